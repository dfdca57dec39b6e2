// One rank of a test: its device, ledger, clock, spans, log and parameter table. The fixtures of
// folders are based on it; several ranks are threads of one process (testing/thread_backend.h).
//
// Threads: one fixture per rank's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/clock.h"
#include "tessera/core/error.h"
#include "tessera/core/ledger.h"
#include "tessera/core/log.h"
#include "tessera/core/spans.h"
#include "tessera/device/device_cpu.h"
#include "tessera/shard/param.h"
#include "testing/mock_device.h"

namespace tessera::support {

enum class DeviceChoice : std::uint8_t { kCpu, kLazy, kRandom };

inline std::string name_of(DeviceChoice choice) {
  return choice == DeviceChoice::kCpu ? "Cpu" : choice == DeviceChoice::kLazy ? "Lazy" : "Random";
}

// A parameter's tensor in plain memory: shows what it is attached to.
class PlainTensor final : public shard::FullTensor {
 public:
  explicit PlainTensor(const void** data) : data_(data) {}
  void attach(void* data) override { *data_ = data; }
  void detach() override { *data_ = nullptr; }

 private:
  const void** data_;
};

inline std::unique_ptr<device::Device> make_device(DeviceChoice choice, Ledger& ledger, int rank,
                                                   bool is_discrete = false) {
  device::CpuDeviceOptions host;
  host.ledger = &ledger;
  if (choice == DeviceChoice::kCpu) {
    return device::make_cpu_device(host);
  }
  device::MockDeviceOptions options;
  options.mode =
      choice == DeviceChoice::kLazy ? device::LateMode::kLazy : device::LateMode::kRandom;
  options.seed = static_cast<std::uint64_t>(rank) + 5;
  options.own_memory = is_discrete;
  options.host = host;
  return device::make_mock_device(options);
}

class RankFixture {
 public:
  using MakeDevice = std::function<std::unique_ptr<device::Device>(Ledger& ledger)>;
  RankFixture(int rank, int num_ranks, const MakeDevice& make)
      : device_(make(ledger_)), params_(rank, num_ranks, *device_) {}
  // `is_discrete`: as a GPU, of mock devices.
  RankFixture(int rank, int num_ranks, DeviceChoice choice = DeviceChoice::kCpu,
              bool is_discrete = false)
      : RankFixture(rank, num_ranks, [=](Ledger& ledger) {
          return make_device(choice, ledger, rank, is_discrete);
        }) {}
  RankFixture(const RankFixture&) = delete;
  RankFixture& operator=(const RankFixture&) = delete;

  int rank() const { return params_.rank(); }
  int num_ranks() const { return params_.num_ranks(); }
  device::Device& device() { return *device_; }
  Ledger& ledger() { return ledger_; }
  const Ledger& ledger() const { return ledger_; }
  shard::ParamTable& params() { return params_; }
  const shard::ParamTable& params() const { return params_; }
  const Clock& clock() const { return clock_; }
  Spans& spans() { return spans_; }
  const std::vector<std::string>& log_lines() const { return *log_lines_; }

  // "p0", "p1", ...
  shard::Param& add_param(std::int64_t numel, Tier tier = Tier::kDevice,
                          DType dtype = DType::kFloat32) {
    shard::ParamSpec spec;
    spec.name = detail::concat("p", params_.num_params());
    spec.numel = numel;
    spec.dtype = dtype;
    spec.placement.parameter = tier;
    return params_.add(spec, std::make_unique<PlainTensor>(&shown_.emplace_back(nullptr)));
  }
  // What the parameter's tensor shows; null: nothing.
  template <typename T = float>
  const T* shown(int id) const {
    return static_cast<const T*>(shown_[static_cast<std::size_t>(id)]);
  }

  Logger logger() const {
    LogOptions options;
    options.sink = [lines = log_lines_](std::string_view line) { lines->emplace_back(line); };
    LogContext context;
    context.rank = rank();
    context.world = num_ranks();
    return Logger(options, context);
  }

 private:
  Ledger ledger_;
  std::unique_ptr<device::Device> device_;
  std::deque<const void*> shown_;  // by parameter
  shard::ParamTable params_;
  SteadyClock clock_;
  Spans spans_{clock_, 64};
  std::shared_ptr<std::vector<std::string>> log_lines_ =
      std::make_shared<std::vector<std::string>>();
};

}  // namespace tessera::support
