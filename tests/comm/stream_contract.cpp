// The part of the contract that is about calls which are work of streams: they move data before the
// ranks have agreed, so what one rank does otherwise must be found beside the work, and what cannot
// be enqueued yet must hold up nobody. With two ranks, as many as there may be GPUs.
#include <algorithm>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/device/handed_over.h"
#include "tests/comm/contract.h"
#include "tests/comm/forked_ranks.h"
#include "tests/comm/reference.h"
#include "tests/support/sizes.h"

namespace tessera::comm {
namespace {

using device::Memory;
using device::StreamKind;

constexpr std::int64_t kOnStreamNumel = 20011;
constexpr std::size_t kOnStreamBytes = kOnStreamNumel * sizeof(float);

// A shard, the room for what is gathered, and how they are gathered.
struct StreamGather {
  explicit StreamGather(const ContractRank& rank)
      : here(rank),
        bytes(reference::array(1, here.group.rank(), 0, kOnStreamNumel, DType::kFloat32)),
        shard(here.upload(bytes)),
        full(here.allocate(2 * kOnStreamBytes)) {
    options.stream = &here.device.stream(StreamKind::kGather);
    options.label = {"h.3", "attn.weight"};
  }

  Pending start() const {
    const Gather gather{shard.data(), full.data(), kOnStreamNumel, DType::kFloat32};
    return here.group.start_all_gather({&gather, 1}, options);
  }
  void expect_gathered() const {
    EXPECT_TRUE(reference::same_bytes(here.download(full),
                                      reference::arrays(1, 2, kOnStreamNumel, DType::kFloat32)));
  }

  const ContractRank& here;
  const Bytes bytes;
  const Memory shard;
  const Memory full;
  CallOptions options;
};

TEST_P(StreamContract, OtherStreamsAreOrderedBehindACall) {
  run(2, [](ContractRank& here) {
    StreamGather gather(here);
    const Memory copy = here.allocate(2 * kOnStreamBytes);
    device::Stream& write = here.device.stream(StreamKind::kWrite);
    for (int round = 0; round < 10; ++round) {
      write.wait(gather.start());
      std::ignore =
          here.device.start_copy(copy.data(), gather.full.data(), 2 * kOnStreamBytes, write);
      gather.options.stream->wait(write.record());
    }
    write.synchronize();
    EXPECT_TRUE(reference::same_bytes(here.download(copy),
                                      reference::arrays(1, 2, kOnStreamNumel, DType::kFloat32)));
  });
}

// Rank 1 calls its unit by another name, which no network sees; data moves on both ranks.
TEST_P(StreamContract, ACallByAnotherNameFailsOnBothRanksAndInEveryLaterCall) {
  for (const int call : {1, 100}) {
    const std::string number = "#" + std::to_string(call);
    const auto failures = run_collecting(2, [&](ContractRank& here) {
      StreamGather gather(here);
      for (int i = 1; i < call; ++i) {
        gather.start().wait();
      }
      gather.options.met = std::make_shared<std::atomic<bool>>(false);
      gather.options.label.unit = here.group.rank() == 1 ? "h.4" : "h.3";
      const Pending odd = gather.start();
      std::string first;
      for (int later = 0; later < 3; ++later) {
        try {
          (later == 0 ? odd : gather.start()).wait();
          ADD_FAILURE() << "rank " << here.group.rank() << " went on";
        } catch (const CommError& error) {
          first = first.empty() ? error.what() : first;
          EXPECT_EQ(error.what(), first);
        }
      }
      EXPECT_FALSE(*gather.options.met);
      EXPECT_TRUE(reference::same_bytes(here.download(gather.shard), gather.bytes));
      odd.wait();
    });
    for (const auto& failure : failures) {
      EXPECT_EQ(text_of(failure),
                "rank 1 called all_gather " + number +
                    " (1 tensor, 80044 bytes, fp32) for unit 'h.4', parameter 'attn.weight' where "
                    "rank 0 called all_gather " +
                    number +
                    " (1 tensor, 80044 bytes, fp32) for unit 'h.3', parameter 'attn.weight'; all "
                    "ranks must call the same collectives in the same order");
    }
  }
}

// The network may hang then; both ranks go on all the same.
TEST_P(StreamContract, ACallOfAnotherSizeOrKindFailsOnBothRanks) {
  for (const bool of_another_kind : {false, true}) {
    expect_failures(2, {"rank 1 called", "rank 0 called", "unit 'h.3'"}, [&](ContractRank& here) {
      StreamGather gather(here);
      gather.start().wait();
      const bool is_odd = here.group.rank() == 1;
      const Pending odd =
          is_odd && of_another_kind
              ? here.group.start_broadcast(gather.full.data(), 100, DType::kFloat32, 1,
                                           gather.options)
              : here.group.start_all_reduce(gather.full.data(), is_odd ? 100 : 10000,
                                            DType::kFloat32, Reduction::kSum, gather.options);
      EXPECT_THROW(gather.start().wait(), CommError);
      odd.wait();
    });
  }
}

// An input that another thread must still hand to the device: neither its call nor the one behind
// it can be enqueued, and whoever starts them goes on.
TEST_P(StreamContract, ACallWhoseInputIsHandedOverLaterHoldsUpNobody) {
  run(2, [](ContractRank& here) {
    StreamGather gather(here);
    const Memory late_full = here.allocate(2 * kOnStreamBytes);
    const Memory late_shard = here.allocate(kOnStreamBytes);
    const Memory source = here.device.allocate(Tier::kPinned, kOnStreamBytes, Role::kOther);
    std::copy(gather.bytes.begin(), gather.bytes.end(), source.data());
    here.group.start_barrier().wait();
    const auto made = std::make_shared<device::HandedOver>();
    CallOptions late = gather.options;
    late.ready = Pending(made);
    const Gather item{late_shard.data(), late_full.data(), kOnStreamNumel, DType::kFloat32};
    const Pending first = here.group.start_all_gather({&item, 1}, late);
    const Pending second = gather.start();
    EXPECT_TRUE(first.state()->awaits_hand_over());
    EXPECT_TRUE(second.state()->awaits_hand_over());
    EXPECT_FALSE(gather.options.stream->can_order_behind(second));
    made->hand_over(here.device.start_copy(late_shard.data(), source.data(), kOnStreamBytes,
                                           here.device.stream(StreamKind::kRead)));
    here.device.stream(StreamKind::kWrite).wait(second);  // until it is enqueued, not longer
    EXPECT_FALSE(second.state()->awaits_hand_over());
    second.wait();
    EXPECT_TRUE(first.done());
    gather.expect_gathered();
    EXPECT_TRUE(reference::same_bytes(here.download(late_full),
                                      reference::arrays(1, 2, kOnStreamNumel, DType::kFloat32)));
  });
}

TEST_P(StreamContract, AnInputThatFailedFailsItsCallAndNotItsStream) {
  const auto failures = run_collecting(2, [](ContractRank& here) {
    StreamGather gather(here);
    const auto made = std::make_shared<device::HandedOver>();
    gather.options.ready = here.group.rank() == 1 ? Pending(made) : Pending();
    const Pending call = gather.start();
    made->fail(std::make_exception_ptr(IoError("the disk is gone")));
    try {
      call.wait();
    } catch (const std::exception&) {
      if (here.group.rank() == 1) {
        EXPECT_NO_THROW(gather.options.stream->synchronize());
      }
      throw;
    }
  });
  for (const auto& failure : failures) {
    EXPECT_NE(text_of(failure).find("the disk is gone"), std::string::npos) << text_of(failure);
  }
}

TEST_P(StreamContract, WhatACallKeepsIsFreedWithItsEnd) {
  run(2, [](ContractRank& here) {
    StreamGather gather(here);
    auto kept = std::make_shared<int>(1);
    const std::weak_ptr<int> watched = kept;
    gather.options.keep_alive = std::move(kept);
    const Pending call = gather.start();
    gather.options.keep_alive.reset();
    call.wait();
    EXPECT_TRUE(watched.expired());
  });
}

// All ranks have started the call, but the stream of one stands still.
TEST_P(StreamLimitContract, AStreamThatStandsStillIsExplainedAtTheLimit) {
  const RankLatch told(1);
  expect_failures(
      2, {"'h.3'", "'attn.weight'", "all_gather #2", "the limit comm.timeout_s"},
      [&](ContractRank& here) {
        StreamGather gather(here);
        here.group.start_barrier().wait();
        if (here.group.rank() == 1) {
          std::ignore = gather.options.stream->enqueue([&told] { told.wait(); });
        }
        const Pending call = gather.start();
        try {
          call.wait();
        } catch (const CommError&) {
          if (here.group.rank() == 0) {
            told.count_down();
          }
          throw;
        }
      },
      hasty());
}

}  // namespace
}  // namespace tessera::comm
