// What becomes of gradients on NVMe while a disk is slow, full or broken.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/tier/file_store.h"
#include "testing/fault_engine.h"
#include "tests/grad/reducer_fixture.h"
#include "tests/support/temporary_directory.h"

namespace tessera::grad {
namespace {

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
void fail_each(int num_ranks, DeviceKind device, IoCall call) {
  bool has_failed = true;
  int num_failures = 0;
  for (std::size_t number = 0; has_failed; ++number) {
    comm::run_ranks(num_ranks, [&](comm::Group& group) {
      ReduceCase test = nvme_case();
      test.device = device;
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
      EXPECT_EQ(world.pool().free_bytes(), world.pool().capacity_bytes());
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

}  // namespace
}  // namespace tessera::grad
