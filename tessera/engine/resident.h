// While it is open, all parameters are whole if they fit: see Engine::resident().
//
// Threads: as Engine.
#pragma once

#include <memory>

namespace tessera {

namespace engine {
struct ResidentState;
}

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
