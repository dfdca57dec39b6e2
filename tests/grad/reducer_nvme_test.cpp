// Gradient shards on NVMe: the bits of those in memory, through however few buffers.
#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/grad/gradient_bytes.h"
#include "tests/grad/reducer_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::grad {
namespace {

static_assert(kPieceStep == optim::kNormBlock, "sums of squares are kept per block of the norm");

constexpr std::size_t kStep = kSmallestPoolBytes;

std::unique_ptr<tier::Store> make_lazy_store(int /*rank*/) { return std::make_unique<LazyStore>(); }

// Below, at and above blocks and tiles, without elements, frozen, dynamic, and some in memory.
ReduceCase mixed_case() {
  ReduceCase test;
  const bool frozen = false;
  const bool dynamic = true;
  test.shapes = {{1, true, false, Tier::kNvme},
                 {3, true, false, Tier::kNvme},
                 {4096, true, false, Tier::kNvme},
                 {300},
                 {5000, true, false, Tier::kNvme},
                 {0, true, false, Tier::kNvme},
                 {70001, true, false, Tier::kNvme},
                 {9000},
                 {60, frozen},
                 {6000, true, dynamic, Tier::kNvme},
                 {40001, true, dynamic, Tier::kNvme},
                 {700, true, dynamic},
                 {2, true, dynamic, Tier::kNvme}};
  test.options.bucket_bytes = 64 << 10;
  test.has_dynamic_group = true;  // ranks use different ones of the others
  test.make_store = make_lazy_store;
  test.pool_bytes = 4 * kStep;
  return test;
}

void expect_bits_of_memory(comm::Group& group, const ReduceCase& test, int num_backwards) {
  ReducerFixture plain(group, in_memory(test));
  const ShardSums expected = train(plain, 2, num_backwards);
  ReducerFixture offloaded(group, test);
  expect_same_bits(train(offloaded, 2, num_backwards), expected);
  EXPECT_EQ(offloaded.pool().free_bytes(), offloaded.pool().capacity_bytes());
}

class ReducerNvme : public ::testing::TestWithParam<DeviceKind> {};

TEST_P(ReducerNvme, HasTheBitsOfMemoryForEveryNumberOfRanksAndMicroBatches) {
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    for (const int num_backwards : {1, 3}) {
      SCOPED_TRACE(::testing::Message() << num_ranks << " ranks, " << num_backwards);
      ReduceCase test = mixed_case();
      test.device = GetParam();
      comm::run_ranks(num_ranks, [&](comm::Group& group) {
        expect_bits_of_memory(group, test, num_backwards);
      });
    }
  }
}

TEST_P(ReducerNvme, HasTheBitsOfMemoryInHalfPrecision) {
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    ReduceCase test = mixed_case();
    test.device = GetParam();
    test.param_dtype = DType::kBFloat16;
    test.options.wire_dtype = DType::kBFloat16;
    comm::run_ranks(num_ranks, [&](comm::Group& group) { expect_bits_of_memory(group, test, 3); });
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ReducerNvme,
                         ::testing::Values(DeviceKind::kCpu, DeviceKind::kLazy,
                                           DeviceKind::kRandom),
                         [](const auto& param) {
                           return param.param == DeviceKind::kCpu    ? "cpu"
                                  : param.param == DeviceKind::kLazy ? "lazy"
                                                                     : "random";
                         });

TEST(ReducerNvmeTiles, APieceOfAnySizePassesThroughOneTile) {
  struct Sizes {
    std::size_t pool_bytes = 0;
    std::int64_t bucket_bytes = 0;
  };
  // From one tile in all to tiles larger than any piece; buckets from less than a tile on.
  for (const Sizes& sizes : std::vector<Sizes>{{kStep, 20000},
                                               {kStep, 1 << 20},
                                               {kStep + 4096, 100000},
                                               {3 * kStep, 100000},
                                               {64 * kStep, 1 << 20}}) {
    SCOPED_TRACE(::testing::Message() << sizes.pool_bytes << ", buckets of " << sizes.bucket_bytes);
    ReduceCase test = mixed_case();
    test.pool_bytes = sizes.pool_bytes;
    test.options.bucket_bytes = sizes.bucket_bytes;
    comm::run_ranks(2, [&](comm::Group& group) { expect_bits_of_memory(group, test, 2); });
  }
  ReduceCase alone = mixed_case();
  alone.pool_bytes = kStep;
  comm::run_ranks(1, [&](comm::Group& group) { expect_bits_of_memory(group, alone, 2); });
}

TEST(ReducerNvmeTiles, SmallShardsNeedLessThanOneTile) {
  ReduceCase test;
  test.shapes = {{1000, true, false, Tier::kNvme}, {7, true, false, Tier::kNvme}};
  test.make_store = make_lazy_store;
  test.pool_bytes = 4096;
  comm::run_ranks(1, [&](comm::Group& group) { expect_bits_of_memory(group, test, 2); });
  test.shapes.push_back({1025, true, false, Tier::kNvme});
  comm::run_ranks(1, [&](comm::Group& group) {
    expect_error<ConfigError>([&] { ReducerFixture world(group, test); },
                              "'p2' passes through buffers of 4096 bytes, and needs 8192");
  });
}

TEST(ReducerNvmeBytes, AreWrittenOncePerBackwardAndReadOncePerFurtherOne) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [](comm::Group& group) {
      ReduceCase test;
      test.shapes = {{5000, true, false, Tier::kNvme}, {300}, {70001, true, false, Tier::kNvme}};
      test.make_store = make_lazy_store;
      test.pool_bytes = 2 * kStep;
      ReducerFixture world(group, test);
      std::uint64_t nvme_bytes = 0;
      for (const int id : {0, 2}) {
        nvme_bytes += tier::whole_blocks(
            static_cast<std::size_t>(world.params()[id].layout().shard_numel()) * sizeof(float));
      }
      for (int step = 0; step < 2; ++step) {
        for (int backward = 0; backward < 3; ++backward) {
          add_all(world, {group.rank(), step, backward});
          world.reducer().finish_backward();
        }
        world.reducer().wait();
        const ReducerStats stats = world.reducer().take_stats();
        EXPECT_EQ(stats.nvme_written_bytes, 3 * nvme_bytes);
        EXPECT_EQ(stats.nvme_read_bytes, 2 * nvme_bytes);
        std::ignore = world.reducer().sum_of_squares(0);
        EXPECT_EQ(world.reducer().take_stats().nvme_read_bytes, 0U) << "the norm reads nothing";
        world.reducer().clear();
      }
      EXPECT_EQ(world.store().stats().written_bytes, 6 * nvme_bytes);
      EXPECT_EQ(world.store().stats().read_bytes, 4 * nvme_bytes);
    });
  }
}

TEST(ReducerNvmeUse, WhatDidNotComeIsZeroAndNeverLastSteps) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [](comm::Group& group) {
      ReduceCase test;
      test.shapes = {{5000, true, false, Tier::kNvme}, {5000, true, true, Tier::kNvme}};
      test.make_store = make_lazy_store;
      test.pool_bytes = kStep;
      ReducerFixture world(group, test);
      const auto expect_zeros = [&](int id) {
        const std::vector<float> values = read_shard(world, id);
        EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float v) { return v == 0; }));
        EXPECT_EQ(world.reducer().sum_of_squares(id), 0.0);
      };
      expect_zeros(0);
      const std::vector<int> list = {1};
      add_all(world, {group.rank(), 0, 0});
      world.reducer().reduce_dynamic(list);
      world.reducer().finish_backward();
      for (const int id : {0, 1}) {
        EXPECT_GT(world.reducer().sum_of_squares(id).value(), 0);
        EXPECT_NE(read_shard(world, id)[0], 0);
      }
      world.reducer().clear();
      expect_zeros(0);
      expect_zeros(1);
      world.reducer().finish_backward();  // of a micro-batch that used nothing
      expect_zeros(0);
      expect_zeros(1);
    });
  }
}

TEST(ReducerNvmeUse, RefusesWhatMakesNoSense) {
  comm::run_ranks(1, [](comm::Group& group) {
    ReduceCase test;
    test.shapes = {{5000, true, false, Tier::kNvme}, {5000}};
    test.make_store = make_lazy_store;
    test.pool_bytes = kStep;
    ReducerFixture world(group, test);
    testing::AlignedBytes memory(8192 * sizeof(float));
    auto* to = reinterpret_cast<float*>(memory.data());
    expect_error<InternalError>([&] { world.reducer().start_read(1, 0, 1, to).wait(); },
                                "'p1' is in memory");
    EXPECT_EQ(world.reducer().sum_of_squares(1), 0.0) << "no gradient has come";
    expect_error<InternalError>([&] { world.reducer().start_read(0, 512, 1, to).wait(); }, "'p0'");
    expect_error<InternalError>([&] { world.reducer().start_read(0, 4096, 905, to).wait(); },
                                "'p0'");
    world.reducer().begin_backward();
    expect_error<InternalError>([&] { world.reducer().start_read(0, 0, 1, to).wait(); },
                                "inside a backward");
  });
}

TEST(ReducerNvmeMemory, TheLedgerIsWhatWasPlanned) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t bucket_bytes : {20000, 1 << 20}) {
      for (const bool stores : {true, false}) {
        for (int num_ranks = 1; num_ranks <= support::rounds(3, 2); ++num_ranks) {
          SCOPED_TRACE(::testing::Message() << num_ranks << " ranks, " << bucket_bytes << " bytes");
          comm::run_ranks(num_ranks, [&](comm::Group& group) {
            ReduceCase test = mixed_case();
            test.param_dtype = dtype;
            test.options = {bucket_bytes, dtype};
            std::vector<GradientShape> shapes;
            for (ParamShape& shape : test.shapes) {
              shape.tier = stores ? shape.tier : Tier::kDevice;
              shapes.push_back(
                  {shape.numel, shape.trainable, shape.dynamic, shape.tier == Tier::kNvme});
            }
            const GradientBytes planned = gradient_bytes(shapes, group.size(), test.options, dtype);
            EXPECT_EQ(planned.block_sums > 0, stores);
            ReducerFixture world(group, test);
            const auto device_bytes = static_cast<std::size_t>(planned.shards + planned.slots);
            const auto host_bytes = static_cast<std::size_t>(planned.block_sums);
            const bool adopts = group.size() == 1 && dtype == DType::kFloat32;
            EXPECT_EQ(world.gradient_bytes(), adopts ? 0 : device_bytes);
            for (int backward = 0; backward < 2; ++backward) {
              add_all(world, {group.rank(), 0, backward});
              world.reducer().reduce_dynamic(std::vector<int>{9, 10, 11, 12});
              world.reducer().finish_backward();
              world.reducer().wait();
              EXPECT_EQ(world.gradient_bytes(), device_bytes);
            }
            world.reducer().clear();
            run_backward(world, {group.rank(), 1, 0});  // not all are used
            ShardSums sums;
            append_sums(world, sums);
            EXPECT_EQ(world.gradient_bytes(), device_bytes);
            world.reducer().clear();
            run_backward(world, {group.rank(), 2, 0});  // others are
            append_sums(world, sums);
            EXPECT_EQ(world.gradient_bytes(), device_bytes);
            EXPECT_EQ(world.ledger().peak_bytes(Tier::kDevice, Role::kGradient), device_bytes);
            EXPECT_EQ(world.ledger().peak_bytes(Tier::kHost, Role::kGradient), host_bytes);
            world.destroy_reducer();
            EXPECT_EQ(world.gradient_bytes(), 0U);
            EXPECT_EQ(world.ledger().current_bytes(Tier::kHost, Role::kGradient), 0U);
          });
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::grad
