// What exceptions leave behind: see [Note: abandoning a pass].

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include <c10/util/Exception.h>

#include "tessera/core/error.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera {

void Engine::Impl::abandon() noexcept {
  ++epoch_;
  closing_is_queued_ = false;
  watch_->forget();
  for (const auto& unit : units_) {
    unit->forget_gradients();
  }
  const bool is_in_backward = std::exchange(backward_depth_, 0) > 0;
  try {
    coordinator_->release_all();
    for (const at::Tensor& tensor : tensors) {
      tensor.mutable_grad() = at::Tensor();
    }
    if (is_in_backward) {
      finish_update();
      if (reducer_->in_backward() && coordinator_->meets()) {
        // Ranks may have stopped at different gradients: now all have started all.
        reducer_->drop_dynamic();
        reducer_->finish_backward();
      }
      forget_gradients();
    }
  } catch (const std::exception& error) {
    runtime.logger().warn("while a pass was abandoned: ", error.what());
  }
}

void Engine::Impl::forget_gradients() noexcept {
  if (reducer_) {
    reducer_->clear();
  }
  weight_sum_ = 0;
  weighted_loss_ = at::Tensor();
}

void Engine::Impl::rethrow_backward_error() {
  failed_backward_ = "an exception that has no words";
  try {
    throw;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    failed_backward_ = text;
    const auto says = [&](std::string_view part) { return text.find(part) != std::string::npos; };
    TESSERA_CHECK(
        !says("modified by an inplace operation") || num_updated_steps_ == 0, ConfigError,
        "backward through a graph from before an update: step() has changed parameters "
        "that it needs, or something else did so in place; call backward() before step(), "
        "or run the forward again. Torch says: ",
        text);
    TESSERA_CHECK(!says("backward through the graph a second time"), ConfigError,
                  "a second backward through the graph of one forward; the first frees what it "
                  "needs. Add the losses and call backward() once, or run the forward again");
    if (says(shard::kReleasedText)) {
      throw StateError(text, {}, {});
    }
    throw;
  } catch (const std::exception& error) {
    failed_backward_ = error.what();
    throw;
  }
}

void Engine::Impl::zero_grad() {
  TESSERA_CHECK(backward_depth_ == 0, ConfigError, "zero_grad() inside of a backward");
  finish_update();
  forget_gradients();
  failed_backward_.clear();
  trainable_is_known_ = false;
}

}  // namespace tessera
