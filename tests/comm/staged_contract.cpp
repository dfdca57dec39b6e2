// The part of the contract that is about calls whose memory the network does not reach: in which
// order they are copied, at whose cost, and how that fails.
#include <algorithm>
#include <latch>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/device/host_memory.h"
#include "testing/plain_codec.h"
#include "tests/comm/contract.h"
#include "tests/comm/reference.h"

namespace tessera::comm {
namespace {

using device::Memory;
using device::StreamKind;

constexpr std::int64_t kOrderNumel = 20011;

std::size_t pages_of(std::size_t bytes) {
  const std::size_t page = device::page_bytes();
  return (bytes + page - 1) / page * page;
}

TEST_P(StagedContract, CallsArePassedThroughTheHost) {
  run(2, [](ContractRank& here) {
    EXPECT_EQ(here.group.call_memory(), CallMemory::kCopied);
    EXPECT_EQ(here.group.split(0, "both")->call_memory(), CallMemory::kCopied);
  });
}

// The input is made behind a gate that opens only after all ranks have started the call: a call
// that waited for its input on the caller's thread would never get there. Everything is allocated
// before, because a GPU may not allocate while a stream of it stands still.
TEST_P(StagedContract, StartingACallBlocksNobodyHoweverLateItsInputIs) {
  std::latch started(3);
  run(3, [&](ContractRank& here) {
    const Bytes bytes = reference::array(1, here.group.rank(), 0, kOrderNumel, DType::kFloat32);
    const Memory source = here.device.allocate(Tier::kPinned, bytes.size(), Role::kOther);
    std::copy(bytes.begin(), bytes.end(), source.data());
    const Memory data = here.allocate(bytes.size());
    here.group.start_barrier().wait();
    device::Stream& gather = here.device.stream(StreamKind::kGather);
    std::ignore = gather.enqueue([&] { started.wait(); });
    std::ignore = here.device.start_copy(data.data(), source.data(), bytes.size(), gather);
    CallOptions options;
    options.stream = &gather;
    const Pending call = here.group.start_all_reduce(data.data(), kOrderNumel, DType::kFloat32,
                                                     Reduction::kSum, options);
    EXPECT_FALSE(call.done());
    started.count_down();
    call.wait();
    EXPECT_TRUE(reference::same_bytes(
        here.download(data),
        reference::rank_order_sum(1, 3, 0, kOrderNumel, DType::kFloat32, DType::kFloat32)));
  });
}

// Every stream that a caller has may stand behind the call itself: its copies go by another one.
TEST_P(StagedContract, ACallDoesNotWaitForStreamsThatWaitForIt) {
  run(2, [](ContractRank& here) {
    const Bytes bytes = reference::array(2, here.group.rank(), 0, kOrderNumel, DType::kFloat32);
    const Memory data = here.upload(bytes);
    const StreamKind kinds[] = {StreamKind::kGather, StreamKind::kRead, StreamKind::kWrite,
                                StreamKind::kReduce};
    CallOptions options;
    options.stream = &here.device.stream(StreamKind::kGather);
    const Pending call = here.group.start_all_reduce(data.data(), kOrderNumel, DType::kFloat32,
                                                     Reduction::kSum, options);
    std::vector<Memory> copies;
    for (const StreamKind kind : kinds) {
      copies.push_back(here.allocate(bytes.size()));
      here.device.stream(kind).wait(call);
      std::ignore = here.device.start_copy(copies.back().data(), data.data(), bytes.size(),
                                           here.device.stream(kind));
    }
    const Bytes sum =
        reference::rank_order_sum(2, 2, 0, kOrderNumel, DType::kFloat32, DType::kFloat32);
    for (std::size_t i = 0; i < copies.size(); ++i) {
      here.device.stream(kinds[i]).synchronize();
      EXPECT_TRUE(reference::same_bytes(here.download(copies[i]), sum)) << to_string(kinds[i]);
    }
  });
}

TEST_P(StagedContract, StagingIsPinnedAndWhatAPlanCounts) {
  run(2, [](ContractRank& here) {
    const auto pinned = [&] { return here.ledger.current_bytes(Tier::kPinned, Role::kStaging); };
    const auto expect_taken = [&](std::size_t planned, const std::function<Pending()>& start) {
      here.group.reserve_staging(256);  // too little for the call, which has its own while it lasts
      here.ledger.reset_peaks();
      start().wait();
      // The region of one page, and the call's own.
      EXPECT_EQ(here.ledger.peak_bytes(Tier::kPinned, Role::kStaging),
                pages_of(256) + pages_of(planned));
      here.group.reserve_staging(planned);
      here.ledger.reset_peaks();
      start().wait();
      EXPECT_EQ(pinned(), pages_of(planned));
      EXPECT_EQ(here.ledger.peak_bytes(Tier::kPinned, Role::kStaging), pages_of(planned));
    };
    constexpr CallMemory kCopied = CallMemory::kCopied;
    constexpr auto kShard = static_cast<std::size_t>(kOrderNumel) * sizeof(float);
    const Bytes bytes = reference::array(2, here.group.rank(), 0, 2 * kOrderNumel, DType::kFloat32);
    const Memory all = here.upload(bytes);
    const Memory other = here.allocate(bytes.size());
    const Memory shard = here.allocate(kShard);
    const std::size_t below = GroupOptions().pack_below_bytes;
    const Gather gathers[] = {{shard.data(), all.data(), kOrderNumel, DType::kFloat32},
                              {shard.data(), other.data(), 1000, DType::kFloat32},
                              {shard.data(), other.data() + 8000, 500, DType::kFloat32}};
    const std::size_t shards[] = {kShard, 4000, 2000};
    expect_taken(all_gather_staging_bytes(shards, below, 2, kCopied),
                 [&] { return here.group.start_all_gather(gathers); });
    const PlainCodec codec(&here.device);
    const std::size_t wire = codec.wire_bytes(kOrderNumel);
    const Gather coded[] = {{shard.data(), all.data(), kOrderNumel, DType::kFloat32, "", &codec},
                            {shard.data(), other.data(), 2000, DType::kFloat32, "", &codec, 2},
                            {shard.data(), other.data() + 40000, 500, DType::kFloat32}};
    // Wires that travel together take their place in the pack, and nothing else.
    const GatherPiece pieces[] = {{wire, true}, {2 * codec.wire_bytes(2000), true}, {2000}};
    EXPECT_EQ(all_gather_staging_bytes(pieces, below, 2, kCopied),
              staging_room(2 * (wire + 5024 + 2000)));
    expect_taken(all_gather_staging_bytes(pieces, below, 2, kCopied),
                 [&] { return here.group.start_all_gather(coded); });
    expect_taken(encoded_reduce_scatter_staging_bytes(wire, 2), [&] {
      CallOptions options;
      options.codec = &codec;
      return here.group.start_reduce_scatter(all.data(), shard.data(), kOrderNumel, DType::kFloat32,
                                             DType::kFloat32, options);
    });
    const std::uint8_t wants[] = {1, 0};
    const bool copies = here.group.backend_name() == "gloo";
    expect_taken(
        gather_to_staging_bytes(shards, below, {2, 1, here.group.rank() == 0, copies, kCopied}),
        [&] { return here.group.start_gather_to(gathers, wants); });
    expect_taken(reduce_scatter_staging_bytes(kOrderNumel, DType::kFloat32, 2, kCopied), [&] {
      return here.group.start_reduce_scatter(all.data(), shard.data(), kOrderNumel, DType::kFloat32,
                                             DType::kFloat32);
    });
    for (const std::int64_t numel : {std::int64_t{3000}, kOrderNumel, 2 * kOrderNumel}) {
      expect_taken(all_reduce_staging_bytes(numel, DType::kFloat32, 2, kCopied),
                   [&] { return here.group.start_all_reduce(all.data(), numel, DType::kFloat32); });
    }
    expect_taken(broadcast_staging_bytes(kShard, kCopied), [&] {
      return here.group.start_broadcast(shard.data(), kOrderNumel, DType::kFloat32, 1);
    });
    expect_taken(all_to_all_staging_bytes(kShard, 2, kCopied), [&] {
      return here.group.start_all_to_all(all.data(), other.data(), kOrderNumel, DType::kFloat32);
    });
    here.group.reserve_staging(0);
    EXPECT_EQ(pinned(), 0U);
    EXPECT_EQ(here.ledger.current_bytes(Tier::kHost, Role::kStaging), 0U);
  });
}

TEST_P(StagedContract, AnotherCallOnOneRankIsAnErrorOnAllAndWritesNothing) {
  expect_failures(3, {"rank 1 called"}, [](ContractRank& here) {
    const Bytes bytes = reference::array(4, here.group.rank(), 0, kOrderNumel, DType::kFloat32);
    const Memory data = here.upload(bytes);
    const std::int64_t numel = here.group.rank() == 1 ? kOrderNumel - 1 : kOrderNumel;
    try {
      here.group.start_all_reduce(data.data(), numel, DType::kFloat32).wait();
      ADD_FAILURE() << "ranks that do not agree went on";
    } catch (const CommError&) {
      EXPECT_TRUE(reference::same_bytes(here.download(data), bytes));
      throw;
    }
  });
}

TEST_P(StagedContract, AStreamThatFailedFailsTheCallOnEveryRank) {
  const auto failures = run_collecting(2, [](ContractRank& here) {
    const Memory data = here.upload(Bytes(1000));
    device::Stream& read = here.device.stream(StreamKind::kRead);
    if (here.group.rank() == 1) {
      std::ignore = read.enqueue([] { throw DeviceError("the copy engine is gone"); });
    }
    CallOptions options;
    options.stream = &read;
    here.group.start_all_reduce(data.data(), 1000, DType::kUInt8, Reduction::kSum, options).wait();
  });
  for (const auto& failure : failures) {
    EXPECT_NE(text_of(failure).find("the copy engine is gone"), std::string::npos)
        << text_of(failure);
  }
}

}  // namespace
}  // namespace tessera::comm
