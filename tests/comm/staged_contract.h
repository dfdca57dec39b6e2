// What a group promises whose network reaches memory of the host, while its calls are given memory
// of a device: the same bytes, in the order of streams, through staging that a plan can count. Each
// test runs on every pair of network and device that is instantiated.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/core/ledger.h"
#include "tessera/device/device.h"

namespace tessera::comm {

// What the body of a test gets, on the thread of its rank.
struct StagedRank {
  Group& group;
  device::Device& device;
  Ledger& ledger;  // of the device
};

// The network of one test: gives each rank its backend.
class Network {
 public:
  virtual ~Network() = default;
  virtual std::unique_ptr<Backend> make_backend(int rank) = 0;
  virtual std::shared_ptr<StatusStore> make_status() = 0;
};

struct StagedWorld {
  std::string name;
  std::function<std::unique_ptr<Network>(int num_ranks)> make_network;
  std::function<std::unique_ptr<device::Device>(int rank, Ledger& ledger)> make_device;
  bool needs_gpu = false;
  std::size_t staging_bytes = 0;  // reserved; 0: none

  friend void PrintTo(const StagedWorld& world, std::ostream* out) { *out << world.name; }
};

// Ranks as threads over shared memory.
std::unique_ptr<Network> make_thread_network(int num_ranks, std::uint32_t max_delay_us);

class StagedContract : public ::testing::TestWithParam<StagedWorld> {
 protected:
  void SetUp() override;

  using Body = std::function<void(StagedRank&)>;
  // Every rank must come to its end without an error.
  void run(int num_ranks, const Body& body);
  // What each rank threw.
  std::vector<std::exception_ptr> run_collecting(int num_ranks, const Body& body);
};

inline std::string staged_world_name(const ::testing::TestParamInfo<StagedWorld>& info) {
  return info.param.name;
}

}  // namespace tessera::comm
