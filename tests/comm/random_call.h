// One random call, its memory and what it must give. All ranks draw the same calls from the same
// generator. Its input may still be on its way to the device when it is started.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <random>
#include <string>

#include "tests/comm/coded_reference.h"
#include "tests/comm/contract.h"
#include "tests/comm/reference.h"

namespace tessera::comm {

class RandomCall {
 public:
  static constexpr std::size_t kMaxNumel = 8999;
  static constexpr std::size_t kNumTensors = 3;  // of a gather; small ones travel together

  RandomCall(const ContractRank& here, std::mt19937_64& random) : here_(here), seed_(random()) {
    const auto num = static_cast<std::size_t>(here.group.size());
    const int rank = here.group.rank();
    const DType dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    const std::size_t numel = random() % 7 == 0 ? random() % (kMaxNumel + 1) : random() % 200;
    const auto count = static_cast<std::int64_t>(numel);
    const std::size_t own = numel * static_cast<std::size_t>(rank);
    device::Stream& stream = here.device.stream(random() % 2 == 0 ? device::StreamKind::kRead
                                                                  : device::StreamKind::kGather);
    CallOptions options;
    options.stream = &stream;
    // The codec of these calls works on the host.
    const bool has_codec =
        here.group.backend_name() != "ipc" && here.group.backend_name() != "nccl";
    const std::uint64_t what = random() % 7;
    switch (has_codec || what < 4 ? what : 6) {
      case 0: {
        give(reference::array(seed_, rank, 0, numel, dtype), stream);
        const std::size_t full_bytes = source_.size() * num;
        result_ = here.allocate(full_bytes * kNumTensors);
        std::array<Gather, kNumTensors> gathers;
        for (std::size_t i = 0; i < kNumTensors; ++i) {
          gathers[i] = {given_.data(), result_->data() + i * full_bytes, count, dtype};
          append(reference::arrays(seed_, here.group.size(), numel, dtype));
        }
        pending_ = random() % 2 == 0 ? here.group.start_all_gather(gathers, options)
                                     : Pending::all(here.group.start_all_gathers(gathers, options));
        break;
      }
      case 1:
        give(reference::array(seed_, rank, 0, numel * num, dtype), stream);
        result_ = here.allocate(numel * sizeof(float));
        expected_ =
            reference::rank_order_sum(seed_, here.group.size(), own, numel, dtype, DType::kFloat32);
        pending_ = here.group.start_reduce_scatter(given_.data(), result_->data(), count, dtype,
                                                   DType::kFloat32, options);
        break;
      case 2:
        give(reference::array(seed_, rank, 0, numel, dtype), stream);
        expected_ = reference::rank_order_sum(seed_, here.group.size(), 0, numel, dtype, dtype);
        pending_ =
            here.group.start_all_reduce(given_.data(), count, dtype, Reduction::kSum, options);
        break;
      case 3: {
        const int root = static_cast<int>(random() % num);
        give(reference::array(seed_, rank, 0, numel, dtype), stream);
        expected_ = reference::array(seed_, root, 0, numel, dtype);
        pending_ = here.group.start_broadcast(given_.data(), count, dtype, root, options);
        break;
      }
      case 4: {
        give(reference::wires(seed_, rank, numel, 2, dtype), stream);
        expected_ = reference::decoded_wires(seed_, here.group.size(), numel, 2, dtype);
        result_ = here.allocate(expected_.size());
        const Gather gather{given_.data(), result_->data(), count, dtype, "w", &codec_, 2};
        pending_ = here.group.start_all_gather({&gather, 1}, options);
        break;
      }
      case 5:
        give(reference::array(seed_, rank, 0, numel * num, dtype), stream);
        result_ = here.allocate(numel * sizeof(float));
        expected_ =
            reference::decoded_sum(seed_, here.group.size(), own, numel, dtype, DType::kFloat32);
        options.codec = &codec_;
        pending_ = here.group.start_reduce_scatter(given_.data(), result_->data(), count, dtype,
                                                   DType::kFloat32, options);
        break;
      default:
        give(reference::array(seed_, rank, 0, numel * num, dtype), stream);
        result_ = here.allocate(source_.size());
        for (int from = 0; from < here.group.size(); ++from) {
          append(reference::array(seed_, from, own, numel, dtype));
        }
        pending_ =
            here.group.start_all_to_all(given_.data(), result_->data(), count, dtype, options);
    }
  }

  void check(const std::string& where) const {
    pending_.wait();
    EXPECT_TRUE(here_.download(result_ ? *result_ : given_) == expected_) << where;
  }

  // What no call takes more of, with memory of the host.
  static std::size_t max_staging_bytes(int num_ranks) {
    const std::array<std::size_t, kNumTensors> shards = {4 * kMaxNumel, 4 * kMaxNumel,
                                                         4 * kMaxNumel};
    return std::max({all_gather_staging_bytes(shards, GroupOptions().pack_below_bytes, num_ranks),
                     2 * staging_room(2 * PlainCodec().wire_bytes(kMaxNumel) *
                                      static_cast<std::size_t>(num_ranks)),
                     reduce_scatter_staging_bytes(kMaxNumel, DType::kFloat32, num_ranks),
                     all_reduce_staging_bytes(kMaxNumel, DType::kFloat32, num_ranks),
                     staging_room(kSmallAllReduceBytes)});
  }

 private:
  void give(Bytes bytes, device::Stream& stream) {
    source_ = std::move(bytes);
    given_ = here_.start_upload(source_, stream);
  }
  void append(const Bytes& more) { expected_.insert(expected_.end(), more.begin(), more.end()); }

  const ContractRank& here_;
  const PlainCodec codec_{&here_.device};
  const std::uint64_t seed_;
  Bytes source_;
  device::Memory given_;
  std::optional<device::Memory> result_;  // none: the call is in place
  Bytes expected_;
  Pending pending_;
};

// `num_calls` of them, at most `num_in_flight` at a time; a random one is waited for first.
inline void run_random_calls(const ContractRank& here, int num_calls, std::size_t num_in_flight,
                             const std::function<void(int call)>& before_each = {}) {
  std::mt19937_64 random(static_cast<std::uint64_t>(here.group.size()) * 977);
  std::vector<std::unique_ptr<RandomCall>> in_flight;
  for (int i = 0; i < num_calls; ++i) {
    if (before_each) {
      before_each(i);
    }
    in_flight.push_back(std::make_unique<RandomCall>(here, random));
    if (in_flight.size() >= num_in_flight) {
      const std::size_t pick = random() % in_flight.size();
      in_flight[pick]->check("call " + std::to_string(i));
      in_flight.erase(in_flight.begin() + static_cast<std::ptrdiff_t>(pick));
    }
  }
  for (const auto& call : in_flight) {
    call->check("at the end");
  }
}

}  // namespace tessera::comm
