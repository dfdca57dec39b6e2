// What the coordinator itself costs per use at 10,000 parameters, over a network that takes no
// time: trace, plan, states, books and the start of gathers, for two ranks of which one is here.
// Target: at most 5 microseconds per unit and pass, as in a group of one (unit_cost_torch_bench).
//
//   held      everything fits and is gathered once per step of 16 micro-batches: what a use costs
//   gathered  a tenth of the model fits, one micro-batch: every use also starts a gather of all its
//             parameters and releases them; most of that is the call's and the arena's
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <benchmark/benchmark.h>

#include "tessera/comm/group.h"
#include "tessera/coordinator/coordinator.h"
#include "tessera/core/clock.h"
#include "tessera/core/log.h"
#include "tessera/core/option_table.h"
#include "tessera/core/spans.h"
#include "tessera/device/device_cpu.h"

namespace tessera::coordinator {
namespace {

constexpr int kParams = 10000;
constexpr std::int64_t kNumel = 64;

class InstantBackend final : public comm::Backend {
 public:
  std::string_view name() const override { return "instant"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  bool compares_tags() const override { return true; }
  bool stream_ordered() const override { return true; }
  std::size_t broadcast_sent_bytes(std::size_t, int) const override { return 0; }
  void abort(const std::string&) override {}
  device::Pending start_all_gather(std::span<const comm::GatherBytes>, const comm::Call&) override {
    return {};
  }
  device::Pending start_all_to_all(const comm::PieceBytes&, const comm::Call&) override {
    return {};
  }
  device::Pending start_broadcast(void*, std::size_t, int, const comm::Call&) override {
    return {};
  }
  std::unique_ptr<Backend> split(std::span<const int>, const std::string&) override {
    return std::make_unique<InstantBackend>();
  }
};

class NoTensor final : public shard::FullTensor {
 public:
  void attach(void* data) override { benchmark::DoNotOptimize(data); }
  void detach() override {}
};

void use_units(benchmark::State& state, std::int64_t live_limit_bytes, int micro_batches) {
  const auto params_per_unit = static_cast<int>(state.range(0));
  const int num_units = kParams / params_per_unit;
  const auto device = device::make_cpu_device({});
  comm::Group group(std::make_unique<InstantBackend>(), "bench", {0, 1}, {});
  shard::ParamTable params(0, 2, *device);
  const SteadyClock clock;
  Spans spans(clock, 0);
  CoordinatorOptions options;
  options.budgets.bucket_bytes = std::int64_t{128} << 20;
  options.budgets.live_limit_bytes = live_limit_bytes;
  options.budgets.reuse_distance_bytes = kUnlimitedBytes;
  Coordinator coordinator({group, *device, params, clock, spans, Logger(LogOptions{})}, options);
  for (int unit = 0; unit < num_units; ++unit) {
    std::vector<int> ids;
    for (int i = 0; i < params_per_unit; ++i) {
      shard::ParamSpec spec;
      spec.name = "h." + std::to_string(unit) + ".p" + std::to_string(i);
      spec.numel = kNumel;
      ids.push_back(params.add(spec, std::make_unique<NoTensor>()).id());
    }
    coordinator.add_unit("h." + std::to_string(unit), ids);
  }
  const auto pass = [&] {
    for (UnitId unit = 0; unit < num_units; ++unit) {
      coordinator.begin_use(unit, Phase::kForward);
      coordinator.end_use(unit, Phase::kForward);
    }
    for (UnitId unit = num_units; unit-- > 0;) {
      coordinator.begin_use(unit, Phase::kBackward);
      coordinator.end_use(unit, Phase::kBackward);
    }
  };
  const auto step = [&] {
    for (int i = 0; i < micro_batches; ++i) {
      pass();
    }
    coordinator.end_step();
    coordinator.start_ahead();
  };
  step();
  step();
  std::ignore = coordinator.take_stats();
  for ([[maybe_unused]] auto _ : state) {
    step();
  }
  state.counters["per_use"] =
      benchmark::Counter(static_cast<double>(state.iterations() * micro_batches * 2 * num_units),
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["misses"] = static_cast<double>(coordinator.take_stats().prefetch_misses);
}

constexpr std::int64_t kModelBytes = kParams * kNumel * 4;
BENCHMARK_CAPTURE(use_units, held, kUnlimitedBytes, 16)->ArgName("params")->Arg(1)->Arg(12);
BENCHMARK_CAPTURE(use_units, gathered, kModelBytes / 10, 1)->ArgName("params")->Arg(1)->Arg(12);

}  // namespace
}  // namespace tessera::coordinator
