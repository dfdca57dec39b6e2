// Whose memory is held, how much, and for how long; and a device whose memory the host cannot
// reach.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/grad/reducer_fixture.h"

namespace tessera::grad {
namespace {

// All reductions that ranks have started are done, so that a buffer is free wherever one can be.
void end_reductions(comm::Group& group) { group.start_barrier().wait(); }

TEST(ReducerMemory, AGradientIsFreedAsSoonAsItIsInItsBucket) {
  comm::run_ranks(2, [](comm::Group& group) {
    ReduceCase test;
    test.shapes = {{30}, {30}, {30}, {30}};  // two share a bucket
    test.options.bucket_bytes = 64 * sizeof(float);
    test.param_dtype = DType::kFloat32;
    ReducerFixture world(group, test);
    ASSERT_EQ(world.reducer().layout().buckets.size(), 4U) << "16 of 32 elements per rank: alone";
    const Source source{group.rank(), 0, 0};
    EXPECT_TRUE(add(world, source, 3).expired()) << "its turn: copied, since it has padding";
    const std::weak_ptr<void> early = add(world, source, 1);
    EXPECT_FALSE(early.expired()) << "not its turn: kept";
    EXPECT_EQ(world.reducer().take_stats().held_bytes_peak, 120);
    end_reductions(group);
    EXPECT_TRUE(add(world, source, 2).expired());
    EXPECT_TRUE(early.expired()) << "its turn came with the one before it";
    end_reductions(group);
    EXPECT_TRUE(add(world, source, 0).expired());
    world.reducer().finish_backward();
    expect_sums(world, 0, 1, [](const Source&, int) { return true; });
    EXPECT_EQ(world.reducer().take_stats().held_bytes_peak, 120) << "with p1 until p2 came";
    EXPECT_EQ(world.reducer().take_stats().held_bytes_peak, 0);
    add(world, {group.rank(), 0, 1}, 0);
    world.reducer().clear();
    world.reducer().take_stats();
    EXPECT_EQ(world.reducer().take_stats().held_bytes_peak, 0) << "what was forgotten is not held";
  });
}

TEST(ReducerMemory, AWholeParameterIsReducedFromWhereItLies) {
  for (const DType wire : {DType::kFloat32, DType::kBFloat16}) {
    comm::run_ranks(2, [&](comm::Group& group) {
      ReduceCase test;
      test.shapes = {{64}, {128}, {96}};
      test.options = {128 * 4, wire};
      ReducerFixture world(group, test);
      std::vector<std::weak_ptr<void>> gradients;
      for (const int id : {2, 1, 0}) {
        gradients.push_back(add(world, {group.rank(), 0, 0}, id));
      }
      world.reducer().finish_backward();
      expect_sums(world, 0, 1, [](const Source&, int) { return true; });
      const auto region_bytes =
          static_cast<std::size_t>(world.reducer().layout().region_numel) * sizeof(float);
      if (wire == DType::kFloat32) {
        EXPECT_EQ(world.gradient_bytes(), region_bytes) << "no bucket was needed";
      } else {
        EXPECT_GT(world.gradient_bytes(), region_bytes) << "converted in a bucket";
      }
      world.reducer().clear();
      // Another rank's worker may be the last to let go; one that never does ends in a time-out.
      for (const auto& gradient : gradients) {
        while (!gradient.expired()) {
          std::this_thread::yield();
        }
      }
    });
  }
}

TEST(ReducerMemory, IsKeptUntilCopiesToTheHostAreDone) {
  comm::run_ranks(1, [](comm::Group& group) {
    ReduceCase test;
    test.shapes = {{50}, {50, true, false, Tier::kHost}};
    test.device = DeviceKind::kLazy;
    ReducerFixture world(group, test);
    add_all(world, {});
    world.reducer().finish_backward();
    const device::Pending ready = world.reducer().shard_gradient(1).ready;
    EXPECT_FALSE(ready.done()) << "nobody has waited for it";
    world.destroy_reducer();
    EXPECT_TRUE(ready.done()) << "it was still being written to memory that is freed";
  });
}

// A device that does nothing until somebody waits is one of which the host is ahead by everything.
TEST(ReducerMemory, AHostThatIsAheadKeepsNoMoreThanItMay) {
  comm::run_ranks(1, [](comm::Group& group) {
    ReduceCase test;
    test.shapes.assign(6, {50, true, false, Tier::kHost});
    test.shapes[2].numel = 500;  // alone more than may be kept
    test.device = DeviceKind::kLazy;
    test.most_kept_bytes = 2 * 50 * 4;
    ReducerFixture world(group, test);
    std::vector<std::weak_ptr<void>> gradients(6);
    const auto kept = [&] {
      std::vector<int> ids;
      for (int id = 0; id < 6; ++id) {
        if (!gradients[static_cast<std::size_t>(id)].expired()) {
          ids.push_back(id);
        }
      }
      return ids;
    };
    const std::vector<std::vector<int>> expected = {{5}, {4, 5}, {3, 4}, {}, {1}, {0, 1}};
    for (int id = 5; id >= 0; --id) {
      gradients[static_cast<std::size_t>(id)] = add(world, {}, id);
      EXPECT_EQ(kept(), expected[static_cast<std::size_t>(5 - id)]) << "after p" << id;
    }
    world.reducer().finish_backward();
    for (int id = 0; id < 6; ++id) {
      const ShardGradient gradient = world.reducer().shard_gradient(id);
      gradient.ready.wait();
      EXPECT_EQ(static_cast<const float*>(gradient.values)[49], gradient_value({}, id, 49));
    }
  });
}

TEST(ReducerMemory, LaterMicroBatchesAreKeptNoLongerThanTheyMay) {
  comm::run_ranks(1, [](comm::Group& group) {
    ReduceCase test;
    test.shapes.assign(4, {50});
    test.device = DeviceKind::kLazy;
    test.most_kept_bytes = 50 * 4;
    ReducerFixture world(group, test);
    add_all(world, {0, 0, 0});
    world.reducer().finish_backward();
    const std::weak_ptr<void> first = add(world, {0, 0, 1}, 3);
    EXPECT_FALSE(first.expired());
    const std::weak_ptr<void> second = add(world, {0, 0, 1}, 2);
    EXPECT_TRUE(first.expired()) << "two would be more than may be kept";
    EXPECT_FALSE(second.expired());
    world.reducer().finish_backward();
    expect_sums(world, 0, 2,
                [](const Source& source, int id) { return source.backward == 0 || id >= 2; });
  });
}

TEST(ReducerMemory, EqualsItsClosedForm) {
  for (const DType wire : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t bucket_bytes : {400, 1 << 20}) {
      comm::run_ranks(3, [&](comm::Group& group) {
        ReduceCase test;
        test.shapes = {{40}, {7}, {64}, {130}};
        test.options = {bucket_bytes, wire};
        ReducerFixture world(group, test);
        EXPECT_EQ(world.gradient_bytes(), 0U) << "nothing before the first gradient";
        const BucketLayout& layout = world.reducer().layout();
        const std::size_t num_slots = std::min<std::size_t>(2, layout.buckets.size());
        const auto largest = static_cast<std::size_t>(layout.largest_shard_numel);
        const std::size_t region = static_cast<std::size_t>(layout.region_numel) * sizeof(float);
        const std::size_t buckets = num_slots * largest * 3 * bytes_of(wire);
        const std::size_t results = num_slots * largest * bytes_of(wire);
        for (int step = 0; step < 2; ++step) {
          for (int backward = 0; backward < 3; ++backward) {
            for (const int id : {3, 2, 1, 0}) {
              add(world, {group.rank(), step, backward}, id);
            }
            world.reducer().finish_backward();
            // Straight into the region, unless they are added to it or made fp32 there.
            const bool has_results = wire != DType::kFloat32 || step > 0 || backward > 0;
            EXPECT_EQ(world.gradient_bytes(), region + buckets + (has_results ? results : 0));
          }
          world.reducer().clear();
        }
        world.destroy_reducer();
        EXPECT_EQ(world.gradient_bytes(), 0U);
      });
    }
  }
}

TEST(ReducerMemory, AGroupOfOneAdoptsGradients) {
  comm::run_ranks(1, [](comm::Group& group) {
    ReduceCase test;
    test.shapes = {{40}, {7}};
    ReducerFixture world(group, test);
    const shard::Param& param = world.params()[0];
    FullGradient gradient = make_gradient({0, 0, 0}, param, DType::kFloat32);
    const void* data = gradient.data;
    const std::weak_ptr<void> adopted = gradient.owner;
    world.reducer().add(param, std::move(gradient));
    world.reducer().finish_backward();
    EXPECT_EQ(world.reducer().shard_gradient(0).data, data);
    EXPECT_TRUE(add(world, {0, 0, 1}, 0).expired()) << "added, and gone";
    world.reducer().finish_backward();
    EXPECT_EQ(world.reducer().shard_gradient(0).data, data);
    EXPECT_EQ(world.gradient_bytes(), 0U) << "no copy, no region";
    expect_sums(world, 0, 2, [](const Source&, int id) { return id == 0; });
    world.reducer().clear();
    EXPECT_TRUE(adopted.expired());
    EXPECT_EQ(group.wire_bytes().num_calls, 0U);
  });
}

TEST(ReducerMemory, AnAdoptedGradientOutlivesTheWorkThatReadsIt) {
  comm::run_ranks(1, [](comm::Group& group) {
    ReduceCase test;
    test.shapes = {{40}};
    test.device = DeviceKind::kLazy;
    ReducerFixture world(group, test);
    const std::weak_ptr<void> adopted = add(world, {0, 0, 0}, 0);
    world.reducer().finish_backward();
    const ShardGradient gradient = world.reducer().shard_gradient(0);
    std::vector<float> updated(40);
    device::Stream& reduce = world.device().stream(device::StreamKind::kReduce);
    const device::Pending update =
        world.device().start_copy(updated.data(), gradient.data, 160, reduce);
    world.reducer().clear();
    EXPECT_FALSE(adopted.expired()) << "an update still reads it";
    update.wait();
    EXPECT_EQ(updated[39], gradient_value({0, 0, 0}, 0, 39));
  });
}

std::unique_ptr<device::Device> make_discrete() {
  device::MockDeviceOptions options;
  options.own_memory = true;
  return device::make_mock_device(options);
}

TEST(ReducerMemory, ADiscreteDeviceIsNeverTouchedByHostLoops) {
  for (const int num_ranks : {1, 2}) {
    comm::run_ranks(num_ranks, [](comm::Group& group) {
      const std::unique_ptr<device::Device> owner = make_discrete();
      device::Device& device = *owner;
      SteadyClock clock;
      Spans spans(clock, 0);
      shard::ParamTable params(group.rank(), group.size(), device);
      shard::ParamSpec spec;
      spec.name = "w";
      spec.numel = 50;
      shard::Param& param = params.add(spec, std::make_unique<NoTensor>());
      const auto gradient = [&](int backward, DType dtype) {
        return make_gradient({group.rank(), 0, backward}, param, dtype);
      };
      ReducerParts parts{group, device, params, clock, spans, {}};
      {
        Reducer reducer(parts, {});
        try {
          reducer.add(param, gradient(0, DType::kBFloat16));
          ADD_FAILURE() << "expected InternalError";
        } catch (const InternalError& error) {
          EXPECT_NE(std::string(error.what()).find("'w' is bf16 and must become fp32"),
                    std::string::npos)
              << error.what();
        }
        reducer.add(param, gradient(0, DType::kFloat32));
        reducer.finish_backward();
        EXPECT_THROW(reducer.add(param, gradient(1, DType::kFloat32)), InternalError);
        EXPECT_FALSE(reducer.in_backward());
      }
      int num_added = 0;
      parts.add = [&](float* sum, const void* value, DType dtype, std::int64_t numel,
                      device::Stream& stream) {
        ++num_added;
        EXPECT_EQ(dtype, DType::kFloat32);
        return stream.enqueue([=] {
          for (std::int64_t i = 0; i < numel; ++i) {
            sum[i] += static_cast<const float*>(value)[i];
          }
        });
      };
      Reducer reducer(parts, {});
      for (int backward = 0; backward < 2; ++backward) {
        reducer.add(param, gradient(backward, DType::kFloat32));
        reducer.finish_backward();
      }
      const ShardGradient sum = reducer.shard_gradient(0);
      EXPECT_EQ(num_added, 1);
      float expected = 0;
      for (int backward = 0; backward < 2; ++backward) {
        float of_ranks = 0;
        for (int rank = 0; rank < group.size(); ++rank) {
          of_ranks += gradient_value({rank, 0, backward}, 0, param.range().begin);
        }
        expected += of_ranks;
      }
      EXPECT_EQ(sum.data[0], expected);
    });
  }
}

TEST(ReducerMemory, ADeviceThatCannotAddReducesADynamicParameterOnce) {
  comm::run_ranks(2, [](comm::Group& group) {
    const std::unique_ptr<device::Device> owner = make_discrete();
    device::Device& device = *owner;
    SteadyClock clock;
    Spans spans(clock, 0);
    shard::ParamTable params(group.rank(), group.size(), device);
    shard::ParamSpec spec;
    spec.name = "w";
    spec.numel = 50;
    spec.dynamic = true;
    shard::Param& param = params.add(spec, std::make_unique<NoTensor>());
    Reducer reducer({group, device, params, clock, spans, {}}, {});
    const std::vector<int> list = {0};
    reducer.add(param, make_gradient({group.rank(), 0, 0}, param, DType::kFloat32));
    reducer.reduce_dynamic(list);
    EXPECT_THROW(reducer.reduce_dynamic(list), InternalError);
    reducer.finish_backward();
    const std::int64_t index = param.range().begin;
    EXPECT_EQ(reducer.shard_gradient(0).data[0],
              gradient_value({0, 0, 0}, 0, index) + gradient_value({1, 0, 0}, 0, index));
  });
}

}  // namespace
}  // namespace tessera::grad
