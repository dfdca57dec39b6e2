// What the engine keeps about a unit.
//
// Ownership: the engine and the Units share it, so that a Unit that outlives its engine says so, or
// is a plain call after Engine::to_plain().
//
// Threads: as Engine.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "tessera/coordinator/access_trace.h"

namespace tessera::engine {

struct EngineObjects;

class UnitCore : public std::enable_shared_from_this<UnitCore> {
 public:
  UnitCore(EngineObjects& engine, coordinator::UnitId id, std::string name)
      : engine_(&engine), id_(id), name_(std::move(name)) {}
  UnitCore(const UnitCore&) = delete;
  UnitCore& operator=(const UnitCore&) = delete;

  coordinator::UnitId id() const { return id_; }
  const std::string& name() const { return name_; }
  // Null once the engine is gone.
  EngineObjects* engine() const { return engine_; }
  void detach() { engine_ = nullptr; }
  // Its parameters are ordinary tensors again.
  bool is_plain() const { return is_plain_; }
  void set_plain() { is_plain_ = true; }

  // Trainable parameters, of this unit's own and external.
  int num_trainable() const { return num_trainable_; }
  void add_trainable(int count) { num_trainable_ += count; }
  void count_gradient() { ++num_gradients_; }
  bool has_all_gradients() const { return num_gradients_ >= num_trainable_; }
  void reset_gradients() { num_gradients_ = 0; }

 private:
  EngineObjects* engine_;
  const coordinator::UnitId id_;
  const std::string name_;
  bool is_plain_ = false;
  int num_trainable_ = 0;
  int num_gradients_ = 0;  // that are complete, in this backward
};

}  // namespace tessera::engine
