// Whole parameters in a user's hands: for reading and changing them, and for evaluation.
//
//   {
//     auto scope = engine.gathered({block->weight}, /*modifier_rank=*/0);   // whole on every rank
//     if (rank == 0) { at::NoGradGuard no_grad; block->weight.mul_(0.5); }
//     scope.close();   // rank 0's changes are in every rank's shard
//   }
//
// Opening and closing are collective. With a modifier rank its changes are broadcast and written to
// all shards, and the master weights of low precision follow: no later step reverts them. Only
// parameters that did change travel. A change on any other rank, or without a modifier rank, is a
// ConfigError on every rank that names rank and parameter; nothing is written then. Changes are
// found by a hash of the values, so that writes through data() or a raw pointer count, too. (In a
// group of one the tensor is the shard itself: a change without modifier rank is reported, and has
// happened.)
//
// Gathered scopes may overlap, and units may run inside. Two scopes may change one parameter only
// in the name of the same rank; a scope without modifier rank does not look at what another may
// change. Before the first forward a scope does not stop further units from being made; it must be
// closed before the first unit runs.
//
// Threads: as Engine.
#pragma once

#include <memory>

namespace tessera {

namespace engine {
struct GatheredState;
struct ResidentState;
}  // namespace engine

class GatheredScope {
 public:
  explicit GatheredScope(std::shared_ptr<engine::GatheredState> state);  // made by Engine
  GatheredScope(GatheredScope&& other) noexcept = default;
  GatheredScope& operator=(GatheredScope&& other) = delete;
  // Closes. What goes wrong then is thrown by the next call of the engine.
  ~GatheredScope();

  // Collective. The tensors are released, unless somebody else uses them.
  void close();

 private:
  std::shared_ptr<engine::GatheredState> state_;
};

// While it is open, all parameters are whole if they fit: see Engine::resident().
class ResidentScope {
 public:
  explicit ResidentScope(std::shared_ptr<engine::ResidentState> state);  // made by Engine
  ResidentScope(ResidentScope&& other) noexcept = default;
  ResidentScope& operator=(ResidentScope&& other) = delete;
  ~ResidentScope();

  // False: the parameters do not fit, or the scope is closed.
  bool is_resident() const;
  void close();

 private:
  std::shared_ptr<engine::ResidentState> state_;
};

}  // namespace tessera
