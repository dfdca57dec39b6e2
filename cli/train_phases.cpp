#include "cli/train_phases.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::cli {

// Three events for each micro-batch, made once and recorded anew in every step.
class StepPhases::DeviceEvents {
 public:
  explicit DeviceEvents(int index)
      : device_(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)),
        guard_(device_.type()) {}

  void begin_step() { num_recorded_ = 0; }

  void record() {
    if (num_recorded_ == events_.size()) {
      events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    }
    events_[num_recorded_++].record(guard_.getStream(device_));
  }

  // Nothing if an event is not done.
  std::optional<Times> times(double step_s) const {
    Times times;
    for (std::size_t i = 0; i < num_recorded_; ++i) {
      if (!events_[i].query()) {
        return std::nullopt;
      }
    }
    for (std::size_t i = 0; i + 2 < num_recorded_; i += 3) {
      times.forward_s += between_s(i, i + 1);
      times.backward_s += between_s(i + 1, i + 2);
    }
    const double until_update_s = num_recorded_ == 0 ? 0 : between_s(0, num_recorded_ - 1);
    times.update_s = std::max(0.0, step_s - until_update_s);
    return times;
  }

 private:
  double between_s(std::size_t from, std::size_t to) const {
    return events_[from].elapsedTime(events_[to]) * 1e-3;
  }

  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  std::vector<c10::Event> events_;
  std::size_t num_recorded_ = 0;
};

StepPhases::StepPhases(int cuda_device, const Clock& clock) : clock_(clock) {
  if (cuda_device >= 0) {
    events_ = std::make_unique<DeviceEvents>(cuda_device);
  }
}

StepPhases::~StepPhases() = default;

void StepPhases::begin_step() {
  times_ = {};
  step_begin_ns_ = clock_.now_ns();
  if (events_) {
    events_->begin_step();
  }
}

void StepPhases::begin_forward() {
  phase_begin_ns_ = clock_.now_ns();
  if (events_) {
    events_->record();
  }
}

void StepPhases::begin_backward() {
  times_.forward_s += since_s(phase_begin_ns_);
  phase_begin_ns_ = clock_.now_ns();
  if (events_) {
    events_->record();
  }
}

void StepPhases::end_backward() {
  times_.backward_s += since_s(phase_begin_ns_);
  if (events_) {
    events_->record();
  }
}

void StepPhases::begin_update() { phase_begin_ns_ = clock_.now_ns(); }

StepPhases::Times StepPhases::end_step() {
  times_.update_s = since_s(phase_begin_ns_);
  if (events_) {
    constexpr double kNotKnown = std::numeric_limits<double>::quiet_NaN();
    return events_->times(since_s(step_begin_ns_)).value_or(Times{kNotKnown, kNotKnown, kNotKnown});
  }
  return times_;
}

double StepPhases::since_s(std::int64_t start_ns) const {
  return static_cast<double>(clock_.now_ns() - start_ns) * 1e-9;
}

}  // namespace tessera::cli
