// What the runtime itself costs per use of a unit: begin and end of a use of 12 parameters in a
// group of one, with trace, states, user counts and storage. Target: at most 5 microseconds.
#include <memory>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <ATen/ATen.h>

#include "tessera/comm/backend.h"
#include "tessera/comm/group.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/core/clock.h"
#include "tessera/core/log.h"
#include "tessera/core/option_table.h"
#include "tessera/core/spans.h"
#include "tessera/device/device_cpu.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera::coordinator {
namespace {

constexpr int kParamsPerUnit = 12;
constexpr int kUnits = 24;

// One model and a step of it: every unit forward, then backward.
class Rig {
 public:
  Rig()
      : device_(device::make_cpu_device({})),
        group_(comm::make_solo_backend(device_.get()), "bench", {0}, {}),
        params_(0, 1, *device_),
        spans_(clock_, 0),
        coordinator_({group_, *device_, params_, clock_, spans_, Logger(LogOptions{})}, options()) {
    for (int unit = 0; unit < kUnits; ++unit) {
      std::vector<int> ids;
      for (int i = 0; i < kParamsPerUnit; ++i) {
        shard::ParamSpec spec;
        spec.name = "h." + std::to_string(unit) + ".p" + std::to_string(i);
        spec.numel = 64;
        const shard::Layout layout(spec.numel, 1, spec.dtype);
        tensors_.push_back(at::empty({spec.numel}));
        ids.push_back(
            params_.add(spec, shard::bind_tensor(tensors_.back(), spec.name, layout)).id());
      }
      coordinator_.add_unit("h." + std::to_string(unit), ids);
    }
    step();  // recorded
    coordinator_.end_step();
  }

  void use(UnitId unit, Phase phase) {
    coordinator_.begin_use(unit, phase);
    benchmark::ClobberMemory();
    coordinator_.end_use(unit, phase);
  }
  void step() {
    for (UnitId unit = 0; unit < kUnits; ++unit) {
      use(unit, Phase::kForward);
    }
    for (UnitId unit = kUnits; unit-- > 0;) {
      use(unit, Phase::kBackward);
    }
  }
  Coordinator& coordinator() { return coordinator_; }

 private:
  static CoordinatorOptions options() {
    CoordinatorOptions options;
    options.budgets.bucket_bytes = kUnlimitedBytes;
    options.budgets.live_limit_bytes = kUnlimitedBytes;
    return options;
  }

  SteadyClock clock_;
  std::unique_ptr<device::Device> device_;
  comm::Group group_;
  std::vector<at::Tensor> tensors_;
  shard::ParamTable params_;
  Spans spans_;
  Coordinator coordinator_;
};

// The time of one iteration is that of one use: one pass of one unit, begin and end together.
void use_of_a_unit_of_12_parameters(benchmark::State& state) {
  Rig rig;
  UnitId unit = 0;
  Phase phase = Phase::kForward;
  for ([[maybe_unused]] auto _ : state) {
    rig.use(unit, phase);
    // A whole step, as the trace has it: up through the units, and down again.
    if (phase == Phase::kForward) {
      phase = ++unit == kUnits ? Phase::kBackward : Phase::kForward;
      unit = phase == Phase::kBackward ? kUnits - 1 : unit;
    } else if (--unit < 0) {
      rig.coordinator().end_step();
      unit = 0;
      phase = Phase::kForward;
    }
  }
  if (rig.coordinator().full_bytes() != 0) {
    state.SkipWithError("a use has left its parameters behind");
  }
}
BENCHMARK(use_of_a_unit_of_12_parameters)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tessera::coordinator
