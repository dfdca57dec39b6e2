// Passes without a backward: resident parameters; and steps of ranks without data.

#include <exception>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/engine/resident.h"

namespace tessera {

std::shared_ptr<engine::ResidentState> Engine::Impl::begin_resident() {
  begin_pass();
  TESSERA_CHECK(forward_depth_ == 0 && backward_depth_ == 0, ConfigError,
                "resident() inside of a forward or backward");
  TESSERA_CHECK(resident_ == nullptr, ConfigError, "resident() inside another resident scope");
  auto state = std::make_shared<engine::ResidentState>();
  state->is_resident = coordinator_->begin_resident();
  state->engine = this;
  if (!state->is_resident) {
    runtime.logger().info(
        "the parameters do not fit into live.limit_bytes: units gather as usual in the resident "
        "scope");
  }
  resident_ = state;
  return state;
}

void Engine::Impl::end_resident(engine::ResidentState& state) {
  state.engine = nullptr;
  resident_ = nullptr;
  if (std::exchange(state.is_resident, false)) {
    coordinator_->end_resident();
  }
}

void Engine::Impl::check_not_resident(const char* what) const {
  TESSERA_CHECK(resident_ == nullptr, ConfigError, what,
                " inside a resident scope, which is for evaluation; close it first");
}

std::optional<StepResult> Engine::Impl::follow() {
  begin_pass();
  check_not_resident("follow()");
  for (;;) {
    switch (coordinator_->follow()) {
      case coordinator::MeetingPoint::kWeights:
        find_weight_scale(0);
        break;
      case coordinator::MeetingPoint::kBackwardEnd:
        finish_update();
        reducer_->finish_backward();
        break;
      case coordinator::MeetingPoint::kStep:
        return finish_step();
      case coordinator::MeetingPoint::kHold:
        throw ConfigError(
            "the other ranks open a gathered scope, and this one only follows their steps; "
            "do it before or after the steps, on all ranks");
      case coordinator::MeetingPoint::kAllDone:
      case coordinator::MeetingPoint::kNone:
        return std::nullopt;
    }
  }
}

ResidentScope::ResidentScope(std::shared_ptr<engine::ResidentState> state)
    : state_(std::move(state)) {}

ResidentScope::~ResidentScope() {
  Engine::Impl* engine = state_ ? state_->engine : nullptr;
  try {
    close();
  } catch (const std::exception& error) {
    engine->runtime.logger().warn("while a resident scope was left: ", error.what());
    engine->abandon();  // a fresh start releases everything
  }
}

bool ResidentScope::is_resident() const { return state_ && state_->is_resident; }

void ResidentScope::close() {
  if (state_ && state_->engine != nullptr) {
    state_->engine->end_resident(*state_);
  }
}

}  // namespace tessera
