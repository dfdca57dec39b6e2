// Failures of an update: of every read and every write, of kernels, of the buffers. Whoever waits
// is told, nobody hangs, and nothing goes on after it.
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "testing/thread_backend.h"
#include "tests/optim/tiered_world.h"

namespace tessera::optim {
namespace {

using testing::IoCall;
using testing::IoFault;

TieredCase on_disk(DType dtype) {
  TieredCase test;
  test.shapes = {{2048, kAllStored}, {5000, kAllStored}, {17, kAllStored}, {9, kAllStored}};
  test.dtype = dtype;
  test.store = StoreKind::kFile;
  test.num_buffers = 2;
  return test;
}

// "p1" of "... parameter 'p1' ..."; empty: none is named.
std::string named_parameter(const std::string& message) {
  const std::string before = "parameter '";
  const std::size_t begin = message.find(before);
  if (begin == std::string::npos) {
    return {};
  }
  const std::size_t end = message.find('\'', begin + before.size());
  return message.substr(begin + before.size(), end - begin - before.size());
}

std::string io_error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const IoError& error) {
    return error.what();
  }
  return {};
}

// One step into which a fault strikes: the error of wait(), after checks of everybody else's.
std::string fail_in_step(TieredWorld& world, IoCall call) {
  world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
  const std::string message = io_error_of([&] { world.optimizer().wait(); });
  EXPECT_EQ(io_error_of([&] { world.optimizer().wait(); }), message) << "asked again";
  const std::string concerned = named_parameter(message);
  for (int id = 0; id < world.params().num_params(); ++id) {
    const shard::Param& param = world.params()[id];
    EXPECT_TRUE(param.updated().done());
    const std::string own = io_error_of([&] { param.updated().wait(); });
    EXPECT_TRUE(own.empty() || own == message) << param.name() << ": " << own;
    if (param.name() < concerned) {
      EXPECT_EQ(own, "") << param.name() << " comes before";
    } else if (call == IoCall::kRead) {
      EXPECT_EQ(own, message) << param.name() << " is concerned or comes after";
    }
    // A write that fails may find those after it updated, and written.
  }
  const auto version = world.params()[0].version();
  EXPECT_EQ(io_error_of(
                [&] { world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale); }),
            message);
  EXPECT_EQ(world.params()[0].version(), version);
  EXPECT_EQ(io_error_of([&] { world.optimizer().reset_master(0); }), message);
  return message;
}

struct IoRange {
  std::uint64_t reads = 0;
  std::uint64_t writes = 0;
};

IoRange count_io(const testing::FaultEngine& engine) {
  IoRange range;
  for (const testing::SeenIo& io : engine.seen()) {
    ++(io.call == IoCall::kRead ? range.reads : range.writes);
  }
  return range;
}

TEST(UpdateFaults, ReachTheParameterConcernedFromEveryReadAndWrite) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    // Counted in a run without faults: the second step's own.
    IoRange begin;
    IoRange end;
    comm::run_ranks(1, [&](comm::Group& group) {
      TieredWorld world(group, on_disk(dtype));
      world.step(1);
      world.backward(2);
      begin = count_io(world.engine());
      world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
      world.optimizer().wait();
      end = count_io(world.engine());
    });
    ASSERT_GT(end.reads, begin.reads);
    ASSERT_GT(end.writes, begin.writes);
    int num_writes_of_parameters = 0;
    for (const IoCall call : {IoCall::kRead, IoCall::kWrite}) {
      const bool is_read = call == IoCall::kRead;
      for (std::uint64_t n = is_read ? begin.reads : begin.writes;
           n < (is_read ? end.reads : end.writes); ++n) {
        SCOPED_TRACE((is_read ? "read " : "write ") + std::to_string(n));
        comm::run_ranks(1, [&](comm::Group& group) {
          TieredWorld world(group, on_disk(dtype));
          world.engine().set_nth(call, n, n % 2 == 0 ? IoFault::kFail : IoFault::kShort);
          world.step(1);
          world.backward(2);
          const std::string message = fail_in_step(world, call);
          const std::string concerned = named_parameter(message);
          ASSERT_FALSE(concerned.empty()) << message;
          if (message.find("; parameter '") != std::string::npos) {
            // Not its states, but the parameter itself has not come or gone.
            EXPECT_THROW(world.params().find(concerned)->updated().wait(), IoError) << message;
            num_writes_of_parameters += is_read ? 0 : 1;
          }
          EXPECT_EQ(world.engine().num_faults(), 1U);
        });
      }
    }
    EXPECT_EQ(num_writes_of_parameters, 6);  // one per piece
  }
}

TEST(UpdateFaults, LeaveParametersAloneThatWereUpdatedBefore) {
  comm::run_ranks(1, [&](comm::Group& group) {
    TieredWorld world(group, on_disk(DType::kFloat32));
    world.backward(1);
    // In the same sub-group as the end of p1.
    world.engine().set_where_named(IoCall::kRead, "gradient of parameter 'p2'", IoFault::kFail);
    const std::string message = fail_in_step(world, IoCall::kRead);
    EXPECT_EQ(named_parameter(message), "p2");
    world.params()[1].updated().wait();
    EXPECT_THROW(world.params()[2].updated().wait(), IoError);
    EXPECT_THROW(world.params()[3].updated().wait(), IoError);
  });
}

TEST(UpdateFaults, NameTheFirstOfSeveralInOrder) {
  TieredCase test = on_disk(DType::kFloat32);
  test.num_buffers = 8;
  comm::run_ranks(1, [&](comm::Group& group) {
    TieredWorld world(group, test);
    world.backward(1);
    // Both are known at once: nobody waits for the write before all have been updated.
    world.engine().set_where_named(IoCall::kRead, "gradient of parameter 'p2'", IoFault::kFail);
    world.engine().set_where_named(IoCall::kWrite, "exp_avg of parameter 'p0'", IoFault::kFail);
    world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
    const std::string message = io_error_of([&] { world.optimizer().wait(); });
    EXPECT_NE(message.find("exp_avg of parameter 'p0'"), std::string::npos) << message;
  });
}

TEST(UpdateFaults, OfReadsAheadShowInTheUpdate) {
  comm::run_ranks(1, [&](comm::Group& group) {
    TieredWorld world(group, on_disk(DType::kFloat32));
    world.engine().set_where_named(IoCall::kRead, "exp_avg of parameter 'p0'", IoFault::kFail);
    world.optimizer().prepare();
    world.optimizer().wait();
    world.backward(1);
    EXPECT_EQ(named_parameter(fail_in_step(world, IoCall::kRead)), "p0");
  });
}

TEST(UpdateFaults, StopWhatMakesMasters) {
  for (const IoCall call : {IoCall::kRead, IoCall::kWrite}) {
    for (const int id : {0, 1, 3}) {
      comm::run_ranks(1, [&](comm::Group& group) {
        TieredWorld world(group, on_disk(DType::kBFloat16));
        const std::string name = "parameter 'p" + std::to_string(id) + "'";
        world.engine().set_where_named(call, name, IoFault::kFail);
        const std::string message = io_error_of([&] { world.optimizer().reset_master(id); });
        EXPECT_NE(message.find(name), std::string::npos) << message;
        EXPECT_EQ(world.buffers().free_bytes(), world.buffers().capacity_bytes());
      });
    }
  }
}

TEST(UpdateFaults, OfClosedBuffersEndTheUpdate) {
  comm::run_ranks(1, [&](comm::Group& group) {
    TieredWorld world(group, on_disk(DType::kFloat32));
    world.backward(1);
    world.buffers().close(std::make_exception_ptr(IoError("rank 1 has gone")));
    EXPECT_EQ(fail_in_step(world, IoCall::kRead), "rank 1 has gone");
  });
}

TEST(UpdateFaults, EndAnUpdateWhoseOptimizerGoes) {
  comm::run_ranks(1, [&](comm::Group& group) {
    TieredWorld world(group, on_disk(DType::kFloat32));
    world.backward(1);
    world.engine().set_where_named(IoCall::kWrite, "parameter 'p1'", IoFault::kFail);
    world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
    world.destroy_optimizer();
    EXPECT_THROW(world.params()[3].updated().wait(), IoError);
    EXPECT_EQ(world.buffers().free_bytes(), world.buffers().capacity_bytes());
  });
}

}  // namespace
}  // namespace tessera::optim
