#include "tessera/engine/early_updates.h"

#include <algorithm>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::engine {

using coordinator::UnitId;

void EarlyUpdates::seal(std::vector<std::vector<int>> params_of_unit) {
  params_of_unit_ = std::move(params_of_unit);
  units_of_param_.assign(static_cast<std::size_t>(params_.num_params()), {});
  num_expected_.clear();
  for (std::size_t unit = 0; unit < params_of_unit_.size(); ++unit) {
    num_expected_.push_back(std::make_shared<int>(0));
    for (const int id : params_of_unit_[unit]) {
      units_of_param_[static_cast<std::size_t>(id)].push_back(static_cast<UnitId>(unit));
    }
  }
}

std::shared_ptr<void> EarlyUpdates::expect_backward(UnitId unit) {
  if (!is_on_) {
    return nullptr;
  }
  const std::shared_ptr<int> count = num_expected_[static_cast<std::size_t>(unit)];
  ++*count;
  return {count.get(), [count](void*) { --*count; }};
}

void EarlyUpdates::begin_backward(optim::Optimizer& optimizer, grad::Reducer& gradients, double lr,
                                  double gradient_scale) {
  optimizer_ = &optimizer;
  gradients_ = &gradients;
  lr_ = lr;
  gradient_scale_ = gradient_scale;
  is_noted_.assign(static_cast<std::size_t>(params_.num_params()), false);
  noted_.clear();
  is_in_backward_ = true;
}

// See [Note: updates during backward].
bool EarlyUpdates::is_ready(int id) const {
  const shard::Param& param = params_[id];
  const auto index = static_cast<std::size_t>(id);
  return !is_noted_[index] && param.trainable() && gradients_->has_come(id) &&
         param.num_users() == 0 && param.state() != shard::ParamState::kGathering &&
         optimizer_->may_update_early(id);
}

void EarlyUpdates::note(int id) {
  is_noted_[static_cast<std::size_t>(id)] = true;
  noted_.push_back(id);
}

void EarlyUpdates::gradient_came(int id) {
  if (!is_in_backward_ || !is_ready(id)) {
    return;
  }
  const std::vector<UnitId>& units = units_of_param_[static_cast<std::size_t>(id)];
  const bool is_expected = std::any_of(units.begin(), units.end(), [&](UnitId unit) {
    return *num_expected_[static_cast<std::size_t>(unit)] > 0;
  });
  if (!is_expected) {
    note(id);  // gradients of a recomputed unit come one by one: they are started together
  }
}

void EarlyUpdates::begin_unit(UnitId unit, const std::string& name) {
  if (!is_in_backward_) {
    return;
  }
  start_noted();
  for (const int id : params_of_unit_[static_cast<std::size_t>(unit)]) {
    if (is_noted_[static_cast<std::size_t>(id)]) {
      const std::string& param = params_[id].name();
      throw StateError(
          detail::concat("the backward of unit '", name, "' needs parameter '", param,
                         "', which has been updated in this backward already, since nothing said "
                         "that it would be used again; set optim.update_in_backward to false for "
                         "this model"),
          param, name);
    }
  }
}

void EarlyUpdates::end_unit(UnitId unit) {
  if (!is_in_backward_) {
    return;
  }
  for (const int id : params_of_unit_[static_cast<std::size_t>(unit)]) {
    gradient_came(id);
  }
  start_noted();
}

void EarlyUpdates::end_backward() {
  if (!is_in_backward_) {
    return;
  }
  for (int id = 0; id < params_.num_params(); ++id) {
    if (is_ready(id)) {
      note(id);
    }
  }
  start_noted();
  is_in_backward_ = false;
}

void EarlyUpdates::start_noted() {
  if (noted_.empty()) {
    return;
  }
  if (num_started_ == 0) {
    optimizer_->begin_update(*gradients_, lr_, gradient_scale_);
  }
  num_started_ += static_cast<int>(noted_.size());
  count_ += noted_.size();
  optimizer_->update(noted_);
  noted_.clear();
}

void EarlyUpdates::end_step(double gradient_scale) {
  TESSERA_INVARIANT(gradient_scale == gradient_scale_, "updates began with a factor of ",
                    gradient_scale_, ", the step's is ", gradient_scale);
  optimizer_->end_update();
  forget();
}

void EarlyUpdates::forget() {
  num_started_ = 0;
  is_in_backward_ = false;
  noted_.clear();
}

void EarlyUpdates::check_not_started(const char* what) const {
  TESSERA_CHECK(num_started_ == 0, ConfigError, what, " before step(): ", num_started_,
                " parameters have been updated during the last backward, since clipping and the "
                "non-finite guard are off, and the step cannot be taken back; call step() first. A "
                "step has batch.accumulate backwards: if more are meant, set that, or set "
                "optim.update_in_backward to false");
}

void EarlyUpdates::give_up() noexcept {
  is_in_backward_ = false;
  if (num_started_ == 0) {
    return;
  }
  torn_ = detail::concat("the backward failed after updates of ", num_started_,
                         " parameters had been started: parameters are of two ages, and there is "
                         "nothing to go on with but a checkpoint. With optim.update_in_backward "
                         "set to false, updates start when backward is over");
  optimizer_->give_up_update(std::make_exception_ptr(Error(torn_)));
  try {
    optimizer_->wait();
  } catch (const std::exception&) {  // that error, or an earlier one of the update: it is torn
  }
  forget();
}

void EarlyUpdates::check_not_torn(const std::exception_ptr& cause) {
  if (torn_.empty()) {
    return;
  }
  if (cause) {
    try {
      std::rethrow_exception(cause);
    } catch (const std::exception& error) {
      torn_ = detail::concat(torn_, ". The cause: ", error.what());
    } catch (...) {  // it has no words to add
    }
  }
  throw Error(torn_);
}

std::uint64_t EarlyUpdates::take_count() { return std::exchange(count_, 0); }

}  // namespace tessera::engine
