// Failures of an update: of every read and every write, of kernels, of the buffers. Whoever waits
// is told, nobody hangs, and nothing goes on after it.
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/optim/optimizer_fixture.h"

namespace tessera::optim {
namespace {

using testing::IoCall;
using testing::IoFault;

FixtureCase on_disk(DType dtype) {
  FixtureCase test;
  test.shapes = {{2048, kAllOnNvme}, {5000, kAllOnNvme}, {17, kAllOnNvme}, {9, kAllOnNvme}};
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
std::string fail_in_step(OptimizerFixture& fixture, IoCall call) {
  fixture.start_update();
  const std::string message = io_error_of([&] { fixture.optimizer().wait(); });
  EXPECT_EQ(io_error_of([&] { fixture.optimizer().wait(); }), message) << "asked again";
  const std::string concerned = named_parameter(message);
  for (int id = 0; id < fixture.params().num_params(); ++id) {
    const shard::Param& param = fixture.params()[id];
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
  const auto version = fixture.params()[0].version();
  EXPECT_EQ(io_error_of([&] { fixture.start_update(); }), message);
  EXPECT_EQ(fixture.params()[0].version(), version);
  EXPECT_EQ(io_error_of([&] { fixture.optimizer().reset_master(0); }), message);
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

TEST(CpuPipelineFaults, ReachTheParameterConcernedFromEveryReadAndWrite) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    // Counted in a run without faults: the second step's own.
    IoRange begin;
    IoRange end;
    comm::run_ranks(1, [&](comm::Group& group) {
      OptimizerFixture fixture(group, on_disk(dtype));
      fixture.step(1);
      fixture.backward(2);
      begin = count_io(fixture.engine());
      fixture.start_update();
      fixture.optimizer().wait();
      end = count_io(fixture.engine());
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
          OptimizerFixture fixture(group, on_disk(dtype));
          fixture.engine().set_nth(call, n, n % 2 == 0 ? IoFault::kFail : IoFault::kShort);
          fixture.step(1);
          fixture.backward(2);
          const std::string message = fail_in_step(fixture, call);
          const std::string concerned = named_parameter(message);
          ASSERT_FALSE(concerned.empty()) << message;
          if (message.find("; parameter '") != std::string::npos) {
            // Not its states, but the parameter itself has not come or gone.
            EXPECT_THROW(fixture.params().find(concerned)->updated().wait(), IoError) << message;
            num_writes_of_parameters += is_read ? 0 : 1;
          }
          EXPECT_EQ(fixture.engine().num_faults(), 1U);
        });
      }
    }
    EXPECT_EQ(num_writes_of_parameters, 6);  // one per piece
  }
}

TEST(CpuPipelineFaults, LeaveParametersAloneThatWereUpdatedBefore) {
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture fixture(group, on_disk(DType::kFloat32));
    fixture.backward(1);
    // In the same sub-group as the end of p1.
    fixture.engine().set_where_named(IoCall::kRead, "gradient of parameter 'p2'", IoFault::kFail);
    const std::string message = fail_in_step(fixture, IoCall::kRead);
    EXPECT_EQ(named_parameter(message), "p2");
    fixture.params()[1].updated().wait();
    EXPECT_THROW(fixture.params()[2].updated().wait(), IoError);
    EXPECT_THROW(fixture.params()[3].updated().wait(), IoError);
  });
}

TEST(CpuPipelineFaults, NameTheFirstOfSeveralInOrder) {
  FixtureCase test = on_disk(DType::kFloat32);
  test.num_buffers = 8;
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture fixture(group, test);
    fixture.backward(1);
    // Both are known at once: nobody waits for the write before all have been updated.
    fixture.engine().set_where_named(IoCall::kRead, "gradient of parameter 'p2'", IoFault::kFail);
    fixture.engine().set_where_named(IoCall::kWrite, "exp_avg of parameter 'p0'", IoFault::kFail);
    fixture.start_update();
    const std::string message = io_error_of([&] { fixture.optimizer().wait(); });
    EXPECT_NE(message.find("exp_avg of parameter 'p0'"), std::string::npos) << message;
  });
}

TEST(CpuPipelineFaults, OfReadsAheadShowInTheUpdate) {
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture fixture(group, on_disk(DType::kFloat32));
    fixture.engine().set_where_named(IoCall::kRead, "exp_avg of parameter 'p0'", IoFault::kFail);
    fixture.optimizer().prepare();
    fixture.optimizer().wait();
    fixture.backward(1);
    EXPECT_EQ(named_parameter(fail_in_step(fixture, IoCall::kRead)), "p0");
  });
}

TEST(CpuPipelineFaults, StopWhatMakesMasters) {
  for (const IoCall call : {IoCall::kRead, IoCall::kWrite}) {
    for (const int id : {0, 1, 3}) {
      comm::run_ranks(1, [&](comm::Group& group) {
        OptimizerFixture fixture(group, on_disk(DType::kBFloat16));
        const std::string name = "parameter 'p" + std::to_string(id) + "'";
        fixture.engine().set_where_named(call, name, IoFault::kFail);
        const std::string message = io_error_of([&] { fixture.optimizer().reset_master(id); });
        EXPECT_NE(message.find(name), std::string::npos) << message;
        EXPECT_EQ(fixture.buffers().free_bytes(), fixture.buffers().capacity_bytes());
      });
    }
  }
}

TEST(CpuPipelineFaults, OfClosedBuffersEndTheUpdate) {
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture fixture(group, on_disk(DType::kFloat32));
    fixture.backward(1);
    fixture.buffers().close(std::make_exception_ptr(IoError("rank 1 has gone")));
    EXPECT_EQ(fail_in_step(fixture, IoCall::kRead), "rank 1 has gone");
  });
}

TEST(CpuPipelineFaults, EndAnUpdateWhoseOptimizerGoes) {
  comm::run_ranks(1, [&](comm::Group& group) {
    OptimizerFixture fixture(group, on_disk(DType::kFloat32));
    fixture.backward(1);
    fixture.engine().set_where_named(IoCall::kWrite, "parameter 'p1'", IoFault::kFail);
    fixture.start_update();
    fixture.destroy_optimizer();
    EXPECT_THROW(fixture.params()[3].updated().wait(), IoError);
    EXPECT_EQ(fixture.buffers().free_bytes(), fixture.buffers().capacity_bytes());
  });
}

}  // namespace
}  // namespace tessera::optim
