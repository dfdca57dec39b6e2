// What the engine keeps about a unit and about each of its forwards until their backward is over.
//
// Threads: as Engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/coordinator/access_trace.h"
#include "tessera/engine/engine.h"

namespace tessera::engine {

// One forward whose backward may come. Held by the hooks on the outputs and inputs of that forward.
struct BackwardUse {
  UnitCore* unit = nullptr;
  std::uint64_t epoch = 0;
  int num_inputs = 0;   // tensors that get a gradient in backward
  int inputs_left = 0;  // of them, in this backward
  bool open = false;    // begun and not ended
};

// Fires when the gradient of one tensor is complete and before anything uses it: the units that
// took the tensor as input have done their part, and the unit that made it is about to do its own.
struct Gate {
  std::vector<std::shared_ptr<BackwardUse>> consumers;
  std::shared_ptr<BackwardUse> producer;
};

struct GateKey {
  const void* node = nullptr;
  std::size_t output = 0;
  bool operator==(const GateKey&) const = default;
};
struct GateKeyHash {
  std::size_t operator()(const GateKey& key) const {
    return std::hash<const void*>()(key.node) * 31 + key.output;
  }
};
// The hook on the tensor owns its gate, so a gate whose node is gone is gone, too, and a new node
// at the same address finds nothing.
using GateMap = std::unordered_map<GateKey, std::weak_ptr<Gate>, GateKeyHash>;

class UnitCore {
 public:
  UnitCore(Engine::Impl& engine, coordinator::UnitId id, std::string name)
      : engine_(engine), id_(id), name_(std::move(name)) {}
  UnitCore(const UnitCore&) = delete;
  UnitCore& operator=(const UnitCore&) = delete;

  coordinator::UnitId id() const { return id_; }
  const std::string& name() const { return name_; }
  Engine::Impl& engine() const { return engine_; }

  // A trainable parameter more, of this unit's own or external.
  void add_trainable() { ++num_trainable_; }
  // The forward with these tensors has run: lets its backward be watched.
  void watch_backward(const std::vector<at::Tensor>& inputs,
                      const std::vector<at::Tensor>& outputs);

  void begin_backward(const std::shared_ptr<BackwardUse>& use);
  void input_gradient_came(BackwardUse& use);
  void param_gradient_came();
  // In the epilogue: ends what is still open, and forgets what has come.
  void close_backward();
  // Nothing is open any more, whatever was.
  void forget();

 private:
  void end_if_complete(BackwardUse& use);
  void end(BackwardUse& use);

  Engine::Impl& engine_;
  const coordinator::UnitId id_;
  const std::string name_;
  int num_trainable_ = 0;
  int gradients_come_ = 0;  // of the trainable parameters, in this backward
  std::vector<std::shared_ptr<BackwardUse>> open_;
};

}  // namespace tessera::engine
