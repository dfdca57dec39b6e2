// When what is read, updated and written: bytes, order, who waits for whom, and failures.
#include "tessera/optim/cpu_pipeline.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/optim/optimizer_fixture.h"

namespace tessera::optim {
namespace {

using testing::IoCall;
using testing::IoFault;

FixtureCase on_disk(int num_params, std::int64_t numel, const Placement& placement) {
  FixtureCase test;
  test.shapes.assign(static_cast<std::size_t>(num_params), {numel, placement});
  test.store = StoreKind::kFile;
  return test;
}

// What has been read so far, in the order of the calls.
std::vector<std::string> reads_of(const testing::FaultEngine& engine) {
  std::vector<std::string> names;
  for (const testing::SeenIo& io : engine.seen()) {
    if (io.call == IoCall::kRead) {
      names.push_back(io.what);
    }
  }
  return names;
}

TEST(CpuPipeline, MovesTwentyFourBytesPerElementAndStep) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    constexpr std::int64_t kNumel = 5 * 2048;
    constexpr int kParams = 4;
    FixtureCase test = on_disk(kParams, kNumel, kAllOnNvme);
    test.dtype = dtype;
    test.num_buffers = 2;
    run_one(test, [&](OptimizerFixture& fixture) {
      fixture.step(1);
      fixture.optimizer().take_stats();
      const tier::IoCounts before = fixture.engine().counts();
      fixture.step(2);
      const OptimizerStats stats = fixture.optimizer().take_stats();
      constexpr std::uint64_t kAll = kParams * kNumel;
      if (dtype == DType::kFloat32) {
        EXPECT_EQ(stats.states_read_bytes + stats.parameters_read_bytes, 12 * kAll);
        EXPECT_EQ(stats.states_written_bytes + stats.parameters_written_bytes, 12 * kAll);
      } else {
        EXPECT_EQ(stats.states_read_bytes, 12 * kAll);
        EXPECT_EQ(stats.states_written_bytes, 12 * kAll);
        EXPECT_EQ(stats.parameters_read_bytes, 0U);
        EXPECT_EQ(stats.parameters_written_bytes, 2 * kAll);
      }
      EXPECT_EQ(stats.gradients_read_bytes, 4 * kAll);
      // Gradients are written once by the reducer. Nothing else touches the disk.
      const tier::IoCounts after = fixture.engine().counts();
      EXPECT_EQ(after.read_bytes - before.read_bytes,
                stats.states_read_bytes + stats.parameters_read_bytes + stats.gradients_read_bytes);
      EXPECT_EQ(after.written_bytes - before.written_bytes,
                stats.states_written_bytes + stats.parameters_written_bytes + 4 * kAll);
      const SubGroupPlan& plan = fixture.optimizer().plan();
      EXPECT_EQ(plan.states_read_bytes, stats.states_read_bytes);
      EXPECT_EQ(plan.states_written_bytes, stats.states_written_bytes);
      EXPECT_EQ(plan.parameters_read_bytes, stats.parameters_read_bytes);
      EXPECT_EQ(plan.parameters_written_bytes, stats.parameters_written_bytes);
    });
  }
}

TEST(CpuPipeline, MovesNothingOfWhatIsInMemory) {
  FixtureCase test = on_disk(3, 4096, {});
  test.shapes[1].placement = kStatesOnNvme;  // the others are beside it
  run_one(test, [](OptimizerFixture& fixture) {
    fixture.step(1);
    for (const testing::SeenIo& io : fixture.engine().seen()) {
      EXPECT_NE(io.what.find("'p1'"), std::string::npos) << io.what;
    }
    const OptimizerStats stats = fixture.optimizer().take_stats();
    EXPECT_EQ(stats.states_read_bytes, 2U * 4 * 4096);
    EXPECT_EQ(stats.parameters_read_bytes + stats.gradients_read_bytes, 0U);
  });
}

TEST(CpuPipeline, DoesNotReadAgainWhatItStillHolds) {
  constexpr int kParams = 8;
  FixtureCase test = on_disk(kParams, 2048, kAllOnNvme);
  constexpr std::uint64_t kGroupBytes = 2 * 4 * 2048;
  for (const int num_buffers : {1, 3, 5, 8}) {
    SCOPED_TRACE(std::to_string(num_buffers) + " buffers");
    test.num_buffers = num_buffers;
    const int num_kept = num_buffers == kParams ? kParams : std::max(num_buffers - 3, 0);
    run_one(test, [&](OptimizerFixture& fixture) {
      fixture.step(1);
      EXPECT_EQ(fixture.optimizer().take_stats().states_read_bytes, kParams * kGroupBytes);
      for (const int step : {2, 3}) {
        fixture.step(step);
        const OptimizerStats stats = fixture.optimizer().take_stats();
        EXPECT_EQ(stats.states_read_bytes,
                  static_cast<std::uint64_t>(kParams - num_kept) * kGroupBytes);
        EXPECT_EQ(stats.states_written_bytes, kParams * kGroupBytes);
      }
      fixture.optimizer().reset_master(0);
      fixture.step(4);
      EXPECT_EQ(fixture.optimizer().take_stats().states_read_bytes, kParams * kGroupBytes);
    });
  }
}

TEST(CpuPipeline, UpdatesInTheOrderOfRegistration) {
  std::vector<std::pair<int, std::int64_t>> updated;
  FixtureCase test = on_disk(0, 0, kAllOnNvme);
  test.shapes = {{100, kAllOnNvme}, {5000, kAllOnNvme}, {2048, kAllOnNvme}, {3, kAllOnNvme}};
  test.num_buffers = 3;
  test.on_updated = [&](int id, std::int64_t begin, std::int64_t, const void*) {
    updated.emplace_back(id, begin);
    return false;
  };
  run_one(test, [&](OptimizerFixture& fixture) {
    fixture.step(1);
    EXPECT_EQ(updated, (std::vector<std::pair<int, std::int64_t>>{
                           {0, 0}, {1, 0}, {1, 2048}, {1, 4096}, {2, 0}, {3, 0}}));
  });
}

TEST(CpuPipeline, HandsOutTheNewValuesThatItWrites) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    std::vector<std::byte> handed_out;
    FixtureCase test = on_disk(1, 5000, kAllOnNvme);
    test.dtype = dtype;
    test.on_updated = [&](int, std::int64_t, std::int64_t numel, const void* values) {
      const auto* begin = static_cast<const std::byte*>(values);
      handed_out.insert(handed_out.end(), begin,
                        begin + static_cast<std::size_t>(numel) * bytes_of(dtype));
      return true;
    };
    run_one(test, [&](OptimizerFixture& fixture) {
      fixture.step(1);
      std::vector<std::byte> written = fixture.nvme_shard(0);
      written.resize(fixture.params()[0].layout().shard_bytes());
      EXPECT_EQ(handed_out, written);
    });
  }
}

TEST(CpuPipeline, FinishesAParameterWhileLaterOnesAreStillOnTheDisk) {
  FixtureCase test = on_disk(4, 2048, kStatesOnNvme);
  test.num_buffers = 2;
  run_one(test, [&](OptimizerFixture& fixture) {
    fixture.backward(1);
    fixture.engine().set_where_named(IoCall::kRead, "parameter 'p2'", IoFault::kHold);
    fixture.start_update();
    fixture.params()[0].updated().wait();
    fixture.params()[1].updated().wait();
    fixture.engine().wait_until_held(1);
    EXPECT_FALSE(fixture.params()[2].updated().done());
    EXPECT_FALSE(fixture.params()[3].updated().done());
    fixture.engine().clear_faults();
    fixture.engine().release();
    fixture.params()[3].updated().wait();
    fixture.optimizer().wait();
  });
}

TEST(CpuPipeline, FinishesAParameterOnNvmeWhenItIsWrittenOrKept) {
  for (const bool is_kept : {false, true}) {
    FixtureCase test = on_disk(2, 4096, kAllOnNvme);
    test.num_buffers = 4;
    test.on_updated = [is_kept](int id, std::int64_t, std::int64_t, const void*) {
      return is_kept && id == 0;
    };
    run_one(test, [&](OptimizerFixture& fixture) {
      fixture.backward(1);
      fixture.engine().set_where_named(IoCall::kWrite, "parameter 'p0'", IoFault::kDelay);
      fixture.start_update();
      fixture.params()[1].updated().wait();  // behind it, and written
      EXPECT_EQ(fixture.params()[0].updated().done(), is_kept);
      EXPECT_EQ(fixture.params()[0].updated().wait_for(std::chrono::nanoseconds(0)), is_kept);
      fixture.engine().clear_faults();
      fixture.engine().release();
      fixture.optimizer().wait();
      EXPECT_TRUE(fixture.params()[0].updated().done());
    });
  }
}

TEST(CpuPipeline, ReadsStatesAheadOfTheGradientsAsFarAsLeasesGo) {
  FixtureCase test = on_disk(4, 2048, kStatesOnNvme);
  test.num_buffers = 2;
  run_one(test, [&](OptimizerFixture& fixture) {
    fixture.optimizer().prepare();
    fixture.optimizer().wait();
    EXPECT_EQ(
        reads_of(fixture.engine()),
        (std::vector<std::string>{"exp_avg of parameter 'p0' to exp_avg_sq of parameter 'p0'",
                                  "exp_avg of parameter 'p1' to exp_avg_sq of parameter 'p1'"}));
    fixture.optimizer().prepare();  // of a step that was given up
    fixture.step(1);
    EXPECT_EQ(fixture.optimizer().take_stats().states_read_bytes, 4U * 2 * 4 * 2048);
  });
}

TEST(CpuPipeline, ReadsTheNextSubGroupWhileOneIsWritten) {
  FixtureCase test = on_disk(3, 2048, kStatesOnNvme);
  test.num_buffers = 2;
  run_one(test, [&](OptimizerFixture& fixture) {
    fixture.backward(1);
    fixture.engine().set_where_named(IoCall::kWrite, "parameter 'p0'", IoFault::kHold);
    fixture.start_update();
    fixture.params()[1].updated().wait();  // read and updated while p0 is not written yet
    EXPECT_EQ(fixture.engine().num_held(), 1U);
    fixture.engine().clear_faults();
    fixture.engine().release();
    fixture.optimizer().wait();
  });
}

TEST(CpuPipeline, WritesAndReadsOnBetweenUpdatesAsFarAsLeasesGo) {
  constexpr int kParams = 16;
  FixtureCase test = on_disk(kParams, 2048, kStatesOnNvme);
  test.num_buffers = 6;  // three keep what they hold
  run_one(test, [&](OptimizerFixture& fixture) {
    for (int step = 1; step <= 2; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      fixture.backward(step);
      for (const char* last : {"'p13'", "'p14'", "'p15'"}) {
        fixture.engine().set_where_named(IoCall::kWrite, last, IoFault::kHold);
      }
      fixture.start_update();
      fixture.optimizer().wait_updated();  // although three leases are not written
      EXPECT_EQ(fixture.engine().num_held(), 3U);
      EXPECT_TRUE(fixture.params()[kParams - 1].updated().done());
      // The next backward runs now.
      fixture.reducer().clear();
      const std::size_t num_reads = reads_of(fixture.engine()).size();
      fixture.optimizer().prepare();
      fixture.engine().clear_faults();
      fixture.engine().release();
      fixture.optimizer().wait();
      std::vector<std::string> reads = reads_of(fixture.engine());
      reads.erase(reads.begin(), reads.begin() + static_cast<std::ptrdiff_t>(num_reads));
      EXPECT_EQ(reads, (std::vector<std::string>{
                           "exp_avg of parameter 'p3' to exp_avg_sq of parameter 'p3'",
                           "exp_avg of parameter 'p4' to exp_avg_sq of parameter 'p4'",
                           "exp_avg of parameter 'p5' to exp_avg_sq of parameter 'p5'"}));
    }
    EXPECT_EQ(fixture.trained(), train(1, in_memory(test), 2)[0]);
  });
}

TEST(CpuPipeline, NeverReadsWhatTheLastUpdateStillWrites) {
  constexpr int kParams = 8;
  FixtureCase test = on_disk(kParams, 2048, on_nvme(true, false, true));
  test.dtype = DType::kBFloat16;
  test.num_buffers = kParams + 2;  // all are kept, and there is room beside
  // The parameter is handed on, so that it does not wait for its write.
  test.on_updated = [](int, std::int64_t, std::int64_t, const void*) { return true; };
  run_one(test, [&](OptimizerFixture& fixture) {
    fixture.backward(1);
    for (const char* held : {"parameter 'p1'", "parameter 'p3'"}) {
      fixture.engine().set_where_named(IoCall::kWrite, held, IoFault::kHold);
    }
    fixture.start_update();
    fixture.optimizer().wait_updated();
    EXPECT_EQ(fixture.engine().num_held(), 4U);  // two parameters with their states
    fixture.engine().clear_faults();
    fixture.reducer().clear();
    fixture.optimizer().take_stats();
    fixture.backward(2);
    fixture.start_update();
    fixture.engine().release_one();
    fixture.engine().release_one();
    fixture.params()[2].updated().wait();
    EXPECT_FALSE(fixture.params()[3].updated().done());
    fixture.engine().release();
    fixture.optimizer().wait();
    fixture.reducer().clear();
    EXPECT_EQ(fixture.optimizer().take_stats().states_read_bytes, 0U);
    EXPECT_EQ(fixture.trained(), train(1, in_memory(test), 2)[0]);
  });
}

TEST(CpuPipeline, RunsInTurnWhereItMayNeitherReadAheadNorWriteBehind) {
  constexpr int kParams = 8;
  FixtureCase test = on_disk(kParams, 2048, kStatesOnNvme);
  test.num_buffers = 3;
  test.reads_ahead = false;
  test.writes_behind = false;
  run_one(test, [&](OptimizerFixture& fixture) {
    fixture.step(1);
    const std::vector<testing::SeenIo> seen = fixture.engine().seen();
    ASSERT_EQ(seen.size(), 2U * kParams);
    for (std::size_t i = 0; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i].call, i % 2 == 0 ? IoCall::kRead : IoCall::kWrite) << seen[i].what;
    }
    EXPECT_EQ(fixture.buffers().peak_bytes(), fixture.optimizer().plan().max_lease_bytes);
  });
}

TEST(CpuPipeline, HoldsNoMoreThanItsBuffersAndChargesWhatIsInMemory) {
  FixtureCase test = on_disk(3, 20000, kStatesOnNvme);
  test.shapes.push_back({5000, {}});
  test.num_buffers = 2;
  test.store = StoreKind::kFile;
  run_one(test, [&](OptimizerFixture& fixture) {
    fixture.step(1);
    const SubGroupPlan& plan = fixture.optimizer().plan();
    EXPECT_EQ(fixture.buffers().capacity_bytes(), 2 * plan.max_lease_bytes);
    EXPECT_EQ(fixture.ledger().current_bytes(Tier::kNvme, Role::kOptimizer),
              plan.nvme_states_bytes);
    EXPECT_EQ(fixture.ledger().current_bytes(Tier::kDevice, Role::kOptimizer),
              plan.states_bytes[3]);
    EXPECT_EQ(plan.states_bytes[3], 2U * 5 * 4096);
  });
}

TEST(CpuPipeline, NamesEveryExtentOfTheStates) {
  FixtureCase test = on_disk(0, 0, kStatesOnNvme);
  test.shapes = {{2048, kStatesOnNvme}, {3000, kStatesOnNvme}};
  test.dtype = DType::kBFloat16;
  run_one(test, [&](OptimizerFixture& fixture) {
    std::vector<std::string> names;
    for (const tier::StoreExtent& extent : fixture.states().extents()) {
      names.push_back(extent.name);
    }
    EXPECT_EQ(names, (std::vector<std::string>{
                         "master of parameter 'p0'", "exp_avg of parameter 'p0'",
                         "exp_avg_sq of parameter 'p0'",
                         "master of parameter 'p1' from element 0 of its shard",
                         "exp_avg of parameter 'p1' from element 0 of its shard",
                         "exp_avg_sq of parameter 'p1' from element 0 of its shard",
                         "master of parameter 'p1' from element 2048 of its shard",
                         "exp_avg of parameter 'p1' from element 2048 of its shard",
                         "exp_avg_sq of parameter 'p1' from element 2048 of its shard"}));
  });
}

TEST(CpuPipeline, RefusesBuffersThatDoNotHoldASubGroup) {
  FixtureCase test = on_disk(1, 4096, kAllOnNvme);
  test.num_buffers = 0.5;
  comm::run_ranks(1, [&](comm::Group& group) {
    try {
      OptimizerFixture fixture(group, test);
      FAIL() << "expected ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_NE(
          std::string(error.what()).find("the largest sub-group of the optimizer needs 32768"),
          std::string::npos)
          << error.what();
    }
  });
}

TEST(CpuPipeline, EndsWhatIsRunningWhenTheOptimizerGoes) {
  FixtureCase test = on_disk(6, 4096, kAllOnNvme);
  test.num_buffers = 2;
  run_one(test, [&](OptimizerFixture& fixture) {
    fixture.backward(1);
    fixture.start_update();
    fixture.optimizer().prepare();
    fixture.destroy_optimizer();
    for (int id = 0; id < fixture.params().num_params(); ++id) {
      EXPECT_TRUE(fixture.params()[id].updated().done());
      fixture.params()[id].updated().wait();
    }
    EXPECT_EQ(fixture.buffers().free_bytes(), fixture.buffers().capacity_bytes());
  });
}

// Failures: of every read and every write, of the buffers. Whoever waits is told, nobody hangs, and
// nothing goes on after it.

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
  run_one(on_disk(DType::kFloat32), [](OptimizerFixture& fixture) {
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
  run_one(on_disk(DType::kFloat32), [](OptimizerFixture& fixture) {
    fixture.engine().set_where_named(IoCall::kRead, "exp_avg of parameter 'p0'", IoFault::kFail);
    fixture.optimizer().prepare();
    fixture.optimizer().wait();
    fixture.backward(1);
    EXPECT_EQ(named_parameter(fail_in_step(fixture, IoCall::kRead)), "p0");
  });
}

TEST(CpuPipelineFaults, OfWritesBetweenUpdatesStopTheNextOne) {
  run_one(on_disk(DType::kFloat32), [](OptimizerFixture& fixture) {
    fixture.step(1);
    fixture.backward(2);
    fixture.engine().set_where_named(IoCall::kWrite, "exp_avg_sq of parameter 'p3'",
                                     IoFault::kFailLater);
    fixture.start_update();
    fixture.optimizer().wait_updated();
    fixture.engine().wait_until_held(1);
    // It is not known yet when the model goes on.
    fixture.optimizer().prepare();
    fixture.engine().release();
    const std::string message = io_error_of([&] { fixture.optimizer().wait(); });
    EXPECT_NE(message.find("exp_avg_sq of parameter 'p3'"), std::string::npos) << message;
    EXPECT_EQ(io_error_of([&] { fixture.optimizer().wait_updated(); }), message);
    EXPECT_EQ(io_error_of([&] { fixture.start_update(); }), message);
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
  run_one(on_disk(DType::kFloat32), [](OptimizerFixture& fixture) {
    fixture.backward(1);
    fixture.buffers().close(std::make_exception_ptr(IoError("rank 1 has gone")));
    EXPECT_EQ(fail_in_step(fixture, IoCall::kRead), "rank 1 has gone");
  });
}

TEST(CpuPipelineFaults, EndAnUpdateWhoseOptimizerGoes) {
  run_one(on_disk(DType::kFloat32), [](OptimizerFixture& fixture) {
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
