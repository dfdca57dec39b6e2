// The devices that the contract is tested on. One that cannot run here says why.
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/core/clock.h"
#include "tessera/core/spans.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"
#include "testing/mock_device.h"
#include "tests/device/device_contract.h"

namespace tessera::device {

std::vector<DeviceCase> all_devices() {
  std::vector<DeviceCase> cases;
  cases.push_back({"cpu", [](Ledger* ledger) { return make_cpu_device({ledger, {}}); }, ""});
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    cases.push_back({"late_seed_" + std::to_string(seed),
                     [seed](Ledger* ledger) {
                       MockDeviceOptions options;
                       options.mode = LateMode::kRandom;
                       options.seed = seed;
                       options.host.ledger = ledger;
                       return make_mock_device(options);
                     },
                     ""});
  }
  cases.push_back({"late_lazy",
                   [](Ledger* ledger) {
                     MockDeviceOptions options;
                     options.host.ledger = ledger;
                     return make_mock_device(options);
                   },
                   ""});
  cases.push_back({"late_with_own_memory",
                   [](Ledger* ledger) {
                     MockDeviceOptions options;
                     options.own_memory = true;
                     options.host.ledger = ledger;
                     return make_mock_device(options);
                   },
                   "", true});
  cases.push_back({"Cuda",
                   [](Ledger* ledger) {
                     CudaDeviceOptions options;
                     options.ledger = ledger;
                     return make_cuda_device(options);
                   },
                   num_cuda_devices() > 0 ? "" : "no GPU: " + cuda_description(), true});
  // With its work timed, which must change nothing.
  cases.push_back({"Cuda_timed",
                   [](Ledger* ledger) {
                     static const SteadyClock clock;
                     static Spans spans(clock, 256);  // outlives the devices
                     CudaDeviceOptions options;
                     options.ledger = ledger;
                     options.spans = &spans;
                     return make_cuda_device(options);
                   },
                   num_cuda_devices() > 0 ? "" : "no GPU: " + cuda_description(), true});
  return cases;
}

}  // namespace tessera::device
