// What every backend of Group promises, whatever memory its calls are given. Each test runs its
// ranks in a ContractWorld, so it does not know whether they are threads or processes, talk through
// shared memory or sockets, nor where their bytes are. What ranks of a test share besides their
// group is a SharedByRanks or a RankLatch (forked_ranks.h); they have copies of everything else.
//
//   MemoryContract  which bytes arrive: every network, with memory of the host and of a device
//   GroupContract   agreement, failures, groups of groups: every network
//   LimitContract   what ends at the time limit: one network of each kind
//   StagedContract  calls that pass through pinned memory: a discrete device on a host's network
//   StreamContract  calls that are work of streams: every stream-ordered network; what of it ends
//                   at the time limit is a StreamLimitContract
#pragma once

#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"
#include "tessera/core/ledger.h"
#include "tessera/device/device.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {

using Bytes = std::vector<std::byte>;

// What the body of a test gets, on the thread or in the process of its rank.
struct ContractRank {
  Group& group;
  device::Device& device;  // whose memory its calls are given
  Ledger& ledger;          // of the device
  Role role = Role::kOther;

  device::Memory allocate(std::size_t bytes) const {
    return device.allocate(Tier::kDevice, bytes, role);
  }
  // `source` stays valid until the stream has read it; what is done with the memory on other
  // streams must be ordered behind this one.
  device::Memory start_upload(const Bytes& source, device::Stream& stream) const;
  device::Memory upload(const Bytes& source) const;
  Bytes download(const device::Memory& memory) const;
};

// What a call is given: memory of the host wherever calls take that, else of the device.
template <typename T>
class CallValues {
 public:
  CallValues(const ContractRank& here, std::vector<T> values)
      : here_(here), values_(std::move(values)) {
    if (here.group.is_stream_ordered() && here.device.is_discrete()) {
      const auto bytes = std::as_bytes(std::span(values_));
      memory_ = here.upload(Bytes(bytes.begin(), bytes.end()));
    }
  }

  T* data() { return memory_ ? reinterpret_cast<T*>(memory_->data()) : values_.data(); }
  const std::vector<T>& read() {
    if (memory_) {
      const Bytes bytes = here_.download(*memory_);
      std::memcpy(values_.data(), bytes.data(), bytes.size());
    }
    return values_;
  }

 private:
  const ContractRank& here_;
  std::vector<T> values_;
  std::optional<device::Memory> memory_;
};

// The network of one test: gives each rank its backend.
class Network {
 public:
  virtual ~Network() = default;
  virtual std::unique_ptr<Backend> make_backend(int rank) = 0;
  virtual std::shared_ptr<StatusStore> make_status() = 0;
};
// Ranks as threads over shared memory. `on_streams`: their calls are work of streams.
std::unique_ptr<Network> make_thread_network(int num_ranks, std::uint32_t max_delay_us,
                                             bool on_streams = false);

struct ContractWorld {
  std::string name;
  std::function<std::unique_ptr<Network>(int num_ranks)> make_network;
  // Null: memory of the host.
  std::function<std::unique_ptr<device::Device>(int rank, Ledger& ledger)> make_device = {};
  std::size_t staging_bytes = 0;  // reserved; 0: none
  Role role = Role::kOther;       // of the memory of calls
  bool needs_gpu = false;
  int num_gpus = 1;  // that it needs then
  // Ranks are processes, each with a copy of the network as it was made: that one has no thread,
  // and its ranks meet in files. The test program itself must not have used a GPU then.
  bool as_processes = false;

  // Reads as the test's name.
  friend void PrintTo(const ContractWorld& world, std::ostream* out) { *out << world.name; }
};
inline std::string world_name(const ::testing::TestParamInfo<ContractWorld>& info) {
  return info.param.name;
}

// What each rank threw. A rank that fails posts its failure before its group goes, as a program
// does.
std::vector<std::exception_ptr> run_world(const ContractWorld& world, int num_ranks,
                                          const std::function<void(ContractRank&)>& body,
                                          const GroupOptions& options = patient());

class Contract : public ::testing::TestWithParam<ContractWorld> {
 protected:
  using Body = std::function<void(ContractRank&)>;

  void SetUp() override;

  // Every rank must end without an error.
  void run(int num_ranks, const Body& body);
  // The same for each of these numbers of ranks. Processes take long to start where they use a GPU:
  // they are one world, whose first ranks split off a group for each number.
  void run_each(const std::vector<int>& numbers, const Body& body);
  // What each rank threw.
  std::vector<std::exception_ptr> run_collecting(int num_ranks, const Body& body,
                                                 const GroupOptions& options = patient()) {
    return run_world(GetParam(), num_ranks, body, options);
  }
  // Every rank must throw a CommError with all of these words.
  void expect_failures(int num_ranks, const std::vector<std::string>& words, const Body& body,
                       const GroupOptions& options = patient());
  // A device has no world of one: there calls are its own copies.
  static int least_ranks() { return GetParam().make_device ? 2 : 1; }
  static std::vector<int> ranks_up_to(int most);
};

class MemoryContract : public Contract {};
class GroupContract : public Contract {};
class StagedContract : public Contract {};
class LimitContract : public Contract {};
class StreamContract : public Contract {};
class StreamLimitContract : public Contract {};

// Starts calls of each kind whose input is late, with and without a stream: none waits for it on
// this thread. `codec`: of the calls with one; null: there are none.
void expect_no_wait_in_starts(const ContractRank& here, const Codec* codec);

std::string text_of(const std::exception_ptr& failure);

// Holds a rank up for a random time, so that ranks run out of step: any order must give the same
// result, and no result depends on how long it takes.
void delay_at_random(int rank, std::uint32_t max_delay_us);

}  // namespace tessera::comm
