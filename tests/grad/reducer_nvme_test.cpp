// Gradient shards on NVMe: the bits of those in memory, through however few buffers.
#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/grad/gradient_bytes.h"
#include "tessera/tier/file_store.h"
#include "testing/fault_engine.h"
#include "tests/grad/reducer_fixture.h"
#include "tests/support/sizes.h"
#include "tests/support/temporary_directory.h"

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
  offloaded.destroy_reducer();
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

// Beside a discrete device a gradient is copied D2H on its way. What it is compared with is one
// memory's.
ReduceCase beside_device(ReduceCase test, DeviceKind device = DeviceKind::kLazy) {
  test.device = device;
  test.is_discrete = true;
  test.pool_bytes += 2 * kStep;  // between the device and the host
  return test;
}

void expect_bits_of_one_memory(comm::Group& group, const ReduceCase& test, int num_backwards) {
  ReduceCase memory = in_memory(test);
  memory.device = DeviceKind::kCpu;
  memory.is_discrete = false;
  ReducerFixture plain(group, memory);
  const ShardSums expected = train(plain, 2, num_backwards);
  ReducerFixture offloaded(group, test);
  expect_same_bits(train(offloaded, 2, num_backwards), expected);
  offloaded.destroy_reducer();
  EXPECT_EQ(offloaded.pool().free_bytes(), offloaded.pool().capacity_bytes());
}

TEST(ReducerNvmeBesideDevice, HasTheBitsOfOneMemoryForEveryNumberOfRanksAndMicroBatches) {
  for (int num_ranks = 1; num_ranks <= 3; ++num_ranks) {
    for (const int num_backwards : {1, 2, 3}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        const int num_micro_batches =
            dtype == DType::kFloat32 ? 0 : num_backwards;  // not told, told
        SCOPED_TRACE(::testing::Message() << num_ranks << " ranks, " << num_backwards << " of "
                                          << num_micro_batches << ", " << to_string(dtype));
        ReduceCase test = beside_device(
            mixed_case(), num_backwards == 2 ? DeviceKind::kRandom : DeviceKind::kLazy);
        test.param_dtype = dtype;
        test.options.wire_dtype = dtype;
        test.num_micro_batches = num_micro_batches;
        test.shapes[7].tier = Tier::kHost;  // beside each other
        comm::run_ranks(num_ranks, [&](comm::Group& group) {
          expect_bits_of_one_memory(group, test, num_backwards);
        });
      }
    }
  }
}

TEST(ReducerNvmeBesideDevice, APieceOfAnySizePassesThroughThreeTiles) {
  for (const std::size_t pool_bytes : {std::size_t{0}, std::size_t{4096}, 3 * kStep, 40 * kStep}) {
    for (const std::int64_t bucket_bytes : {20000, 1 << 20}) {
      SCOPED_TRACE(::testing::Message() << pool_bytes << ", buckets of " << bucket_bytes);
      ReduceCase test = mixed_case();
      test.pool_bytes = kStep + pool_bytes;
      test.options.bucket_bytes = bucket_bytes;
      test = beside_device(test);
      for (int num_ranks = 1; num_ranks <= 2; ++num_ranks) {
        comm::run_ranks(num_ranks,
                        [&](comm::Group& group) { expect_bits_of_one_memory(group, test, 2); });
      }
    }
  }
  ReduceCase test = mixed_case();
  test.pool_bytes = kStep - 4096;
  test = beside_device(test);
  comm::run_ranks(1, [&](comm::Group& group) {
    expect_error<ConfigError>([&] { ReducerFixture world(group, test); },
                              "passes through buffers of 45056 bytes, and needs 49152");
  });
}

TEST(ReducerNvmeBesideDevice, BytesD2hAreThoseOfTheGradients) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [](comm::Group& group) {
      ReduceCase test;
      test.shapes = {{5000, true, false, Tier::kNvme}, {300}, {70001, true, false, Tier::kNvme}};
      test.param_dtype = DType::kBFloat16;
      test.options = {64 << 10, DType::kBFloat16};
      test.make_store = make_lazy_store;
      test = beside_device(test);
      test.pool_bytes = 4 * kStep;
      ReducerFixture world(group, test);
      std::uint64_t numel = 0;
      std::uint64_t nvme_bytes = 0;
      for (const int id : {0, 2}) {
        const shard::Layout& layout = world.params()[id].layout();
        numel +=
            static_cast<std::uint64_t>(group.size() > 1 ? layout.shard_numel() : layout.numel());
        nvme_bytes +=
            tier::whole_blocks(static_cast<std::size_t>(layout.shard_numel()) * sizeof(float));
      }
      for (int backward = 0; backward < 3; ++backward) {
        add_all(world, {group.rank(), 0, backward});
        world.reducer().finish_backward();
      }
      world.reducer().wait();
      const ReducerStats stats = world.reducer().take_stats();
      EXPECT_EQ(stats.host_bytes, 3 * 2 * numel);
      EXPECT_EQ(world.ledger().peak_bytes(Tier::kPinned, Role::kGradient), 0U)
          << "they pass through the buffers";
      EXPECT_EQ(stats.nvme_written_bytes, 3 * nvme_bytes);
      EXPECT_EQ(stats.nvme_read_bytes, 2 * nvme_bytes);
    });
  }
}

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
              shapes.push_back({shape.numel, shape.trainable, shape.dynamic, shape.tier});
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

// While a disk is slow, full or broken.

using testing::FaultEngine;
using testing::IoCall;
using testing::IoFault;

// Five tiles through two leases, beside small ones and one in memory.
ReduceCase nvme_case() {
  ReduceCase test;
  test.shapes = {{100, true, false, Tier::kNvme},
                 {300},
                 {20000, true, false, Tier::kNvme},
                 {5000, true, true, Tier::kNvme}};
  test.options.bucket_bytes = 64 << 10;
  test.pool_bytes = 2 * kSmallestPoolBytes;
  return test;
}

void run_step(ReducerFixture& world, int step) {
  for (int backward = 0; backward < 2; ++backward) {
    add_all(world, {world.rank(), step, backward});
    world.reducer().reduce_dynamic(std::vector<int>{3});
    world.reducer().finish_backward();
  }
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const IoError& error) {
    return error.what();
  }
  return "";
}

// Fails one transfer of rank 0, in its turn every one that a step has; all ranks come to an end.
void fail_each(int num_ranks, DeviceKind device, IoCall call, bool is_discrete = false) {
  bool has_failed = true;
  int num_failures = 0;
  for (std::size_t number = 0; has_failed; ++number) {
    comm::run_ranks(num_ranks, [&](comm::Group& group) {
      ReduceCase test = nvme_case();
      test.device = device;
      if (is_discrete) {
        test = beside_device(test, device);
      }
      test.make_store = [&](int rank) {
        auto store = std::make_unique<LazyStore>();
        if (rank == 0) {
          call == IoCall::kRead ? store->fail_read(number) : store->fail_write(number);
        }
        return store;
      };
      ReducerFixture world(group, test);
      run_step(world, 0);
      const std::string error = error_of([&] { world.reducer().wait(); });
      if (group.rank() == 0) {
        has_failed = !error.empty();
        num_failures += has_failed ? 1 : 0;
      } else {
        EXPECT_EQ(error, "");
      }
      if (!error.empty()) {
        EXPECT_NE(error.find("the gradient of parameter 'p"), std::string::npos) << error;
        EXPECT_NE(error.find(" failed"), std::string::npos) << error;
        for (const int id : {0, 1, 2, 3}) {
          EXPECT_EQ(error_of([&] { world.reducer().shard_gradient(id); }), error) << "once more";
        }
        EXPECT_EQ(error_of([&] { world.reducer().sum_of_squares(0); }), error);
      }
      EXPECT_EQ(world.pool().free_bytes() + (is_discrete ? 2 * kStep : 0),
                world.pool().capacity_bytes());
      auto& store = dynamic_cast<LazyStore&>(world.store());
      EXPECT_EQ(store.num_under_way(), 0) << "a lease went back before its transfer was done";
      world.reducer().clear();
      store.clear_faults();
      // Nothing of what went wrong is left.
      run_step(world, 1);
      ShardSums sums;
      append_sums(world, sums);
      ReducerFixture plain(group, in_memory(test));
      run_step(plain, 1);
      ShardSums expected;
      append_sums(plain, expected);
      expect_same_bits(sums, expected);
    });
    ASSERT_FALSE(::testing::Test::HasFailure()) << "number " << number;
  }
  EXPECT_GT(num_failures, 3) << "every one of several";
}

TEST(ReducerNvmeFaults, AWriteThatFailsNamesTheParameterAndEndsNothingElse) {
  fail_each(1, DeviceKind::kCpu, IoCall::kWrite);
  fail_each(2, DeviceKind::kCpu, IoCall::kWrite);
  fail_each(2, DeviceKind::kLazy, IoCall::kWrite);
}

TEST(ReducerNvmeFaults, ATransferThatFailsBesideADeviceNamesTheParameterAndEndsNothingElse) {
  for (const IoCall call : {IoCall::kWrite, IoCall::kRead}) {
    fail_each(1, DeviceKind::kLazy, call, true);
    fail_each(2, DeviceKind::kRandom, call, true);
  }
}

TEST(ReducerNvmeFaults, AReadThatFailsNamesTheParameterAndEndsNothingElse) {
  fail_each(1, DeviceKind::kCpu, IoCall::kRead);
  fail_each(2, DeviceKind::kCpu, IoCall::kRead);
  fail_each(2, DeviceKind::kLazy, IoCall::kRead);
}

TEST(ReducerNvmeFaults, AReducerThatGoesWaitsForItsWrites) {
  comm::run_ranks(2, [](comm::Group& group) {
    ReduceCase test = nvme_case();
    test.make_store = [](int) { return std::make_unique<LazyStore>(); };
    ReducerFixture world(group, test);
    run_step(world, 0);
    world.destroy_reducer();
    EXPECT_EQ(world.pool().free_bytes(), world.pool().capacity_bytes());
  });
}

TEST(ReducerNvmeFaults, BuffersThatAreClosedEndTheWait) {
  comm::run_ranks(2, [](comm::Group& group) {
    ReduceCase test = nvme_case();
    test.make_store = [](int) { return std::make_unique<LazyStore>(); };
    ReducerFixture world(group, test);
    world.pool().close(std::make_exception_ptr(IoError("the disk is gone")));
    run_step(world, 0);
    expect_error<IoError>([&] { world.reducer().wait(); }, "': the disk is gone");
  });
}

// Gradients in a real file, behind an engine whose faults a test sets.
class GradientFiles {
 public:
  GradientFiles() : engine_(tier::make_io_engine({tier::IoKind::kThreads}, {})) {}
  FaultEngine& engine() { return engine_; }
  std::unique_ptr<tier::Store> make_store(int rank) {
    tier::FileStoreOptions options;
    options.directories = {directory_.path().string()};
    options.name = {"test", rank, "gradients"};
    options.role = Role::kGradient;
    options.verify = true;
    options.engine = &engine_;
    return std::make_unique<tier::FileStore>(options);
  }

 private:
  testing::TemporaryDirectory directory_;
  FaultEngine engine_;
};

TEST(ReducerNvmeFiles, HaveTheBitsOfMemory) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [](comm::Group& group) {
      GradientFiles files;
      ReduceCase test = nvme_case();
      test.has_dynamic_group = true;
      test.make_store = [&](int rank) { return files.make_store(rank); };
      ReducerFixture plain(group, in_memory(test));
      const ShardSums expected = train(plain, 2, 3);
      ReducerFixture world(group, test);
      expect_same_bits(train(world, 2, 3), expected);
    });
  }
}

TEST(ReducerNvmeFiles, ABackwardDoesNotWaitForItsWritesWhileBuffersAreFree) {
  comm::run_ranks(1, [](comm::Group& group) {
    GradientFiles files;
    files.engine().set_where_named(IoCall::kWrite, "parameter", IoFault::kHold);
    ReduceCase test = nvme_case();
    test.pool_bytes = 16 * kSmallestPoolBytes;
    test.make_store = [&](int rank) { return files.make_store(rank); };
    ReducerFixture world(group, test);
    add_all(world, {0, 0, 0});
    world.reducer().finish_backward();
    EXPECT_GT(files.engine().num_held(), 2U);
    EXPECT_LT(world.pool().free_bytes(), world.pool().capacity_bytes());
    files.engine().release();
    ShardSums sums;
    append_sums(world, sums);
    EXPECT_EQ(sums.shards[2][7], gradient_value({0, 0, 0}, 2, 7));
    EXPECT_EQ(world.pool().free_bytes(), world.pool().capacity_bytes());
  });
}

TEST(ReducerNvmeFiles, AFailureSaysWhatWhereAndWhose) {
  comm::run_ranks(1, [](comm::Group& group) {
    GradientFiles files;
    ReduceCase test = nvme_case();
    test.make_store = [&](int rank) { return files.make_store(rank); };
    ReducerFixture world(group, test);
    files.engine().set_where_named(IoCall::kWrite, "'p2'", IoFault::kShort);
    add_all(world, {0, 0, 0});
    world.reducer().finish_backward();
    const std::string error = error_of([&] { world.reducer().wait(); });
    for (const char* part : {"write of ", " at offset ", "gradients", "parameter 'p2'"}) {
      EXPECT_NE(error.find(part), std::string::npos) << part << " in: " << error;
    }
    EXPECT_EQ(error.find("'p2'"), error.rfind("'p2'")) << "named once: " << error;
    files.engine().clear_faults();
    world.reducer().clear();
    add_all(world, {0, 1, 0});
    world.reducer().finish_backward();
    files.engine().set_where_named(IoCall::kRead, "'p0'", IoFault::kCorrupt);
    testing::AlignedBytes memory(4096);
    expect_error<CorruptError>(
        [&] {
          world.reducer().start_read(0, 0, 100, reinterpret_cast<float*>(memory.data())).wait();
        },
        "'p0'");
  });
}

// Nothing but the bound on gradients in flight holds up a backward while the disk stands still.
TEST(ReducerNvmeBesideDevice, ABackwardWaitsForTheDiskOnlyAtTheBoundOnGradientsInFlight) {
  comm::run_ranks(1, [](comm::Group& group) {
    GradientFiles files;
    files.engine().set_where_named(IoCall::kWrite, "parameter", IoFault::kHold);
    ReduceCase test = nvme_case();
    test.pool_bytes = kStep;  // one tile's write stops the others
    test = beside_device(test, DeviceKind::kRandom);
    test.make_store = [&](int rank) { return files.make_store(rank); };
    ReducerFixture world(group, test);
    std::vector<std::weak_ptr<void>> kept;
    for (const int id : {3, 2, 1, 0}) {
      kept.push_back(add(world, {0, 0, 0}, id));
    }
    world.reducer().finish_backward();
    files.engine().wait_until_held(1);
    EXPECT_FALSE(kept[1].expired()) << "it is still read";
    files.engine().clear_faults();
    files.engine().release();
    ShardSums sums;
    append_sums(world, sums);
    EXPECT_EQ(sums.shards[2][7], gradient_value({0, 0, 0}, 2, 7));
    world.reducer().clear();
    EXPECT_TRUE(kept[1].expired());
  });
}

}  // namespace
}  // namespace tessera::grad
