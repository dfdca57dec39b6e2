// Wherever shards live, and however few buffers they pass through, an update gives the bits that it
// gives in memory.
#include "tessera/optim/tiered_optimizer.h"

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "testing/thread_backend.h"
#include "tests/optim/tiered_world.h"
#include "tests/optim/update_case.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

constexpr int kTieredSteps = 3;
constexpr int kNumPlaces = 8;  // of parameter, gradient and states

StoredParts places(int bits) { return {(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0}; }

std::string text_of(int bits) {
  const StoredParts stored = places(bits);
  return std::string(stored.parameter ? "parameter " : "") + (stored.gradient ? "gradient " : "") +
         (stored.states ? "states " : "") + "stored";
}

// Smaller than a block, a whole one, ragged, none, frozen; one that is larger than all buffers.
std::vector<TieredShape> shapes_at(int bits, std::int64_t largest = 9001) {
  std::vector<TieredShape> shapes;
  for (const std::int64_t numel : {std::int64_t{1}, std::int64_t{15}, std::int64_t{4096},
                                   std::int64_t{5000}, std::int64_t{0}, largest}) {
    shapes.push_back({numel, places(bits)});
  }
  shapes.push_back({17, places(bits), false});
  return shapes;
}

void expect_equal(const std::vector<Trained>& found, const std::vector<Trained>& expected,
                  std::size_t num_tensors) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t rank = 0; rank < found.size(); ++rank) {
    ASSERT_EQ(found[rank].size(), expected[rank].size());
    for (std::size_t i = 0; i < found[rank].size(); ++i) {
      EXPECT_TRUE(found[rank][i] == expected[rank][i])
          << "tensor " << i % num_tensors << " of p" << i / num_tensors << " on rank " << rank;
    }
  }
}

void expect_bits_of_memory(int num_ranks, const TieredCase& test) {
  expect_equal(train(num_ranks, test, kTieredSteps),
               train(num_ranks, in_memory(test), kTieredSteps), 2 + state_names(test.rule).size());
}

TEST(TieredOptimizer, GivesTheBitsOfMemoryForEveryRuleTypeAndPlace) {
  for (const auto& [name, rule] : all_rules()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      if (support::kIsSanitized && dtype == DType::kFloat16) {
        continue;  // to memory the same as bf16
      }
      TieredCase test;
      test.rule = rule;
      test.dtype = dtype;
      test.shapes = shapes_at(0);
      const std::vector<Trained> expected = train(1, in_memory(test), kTieredSteps);
      for (int bits = 0; bits < kNumPlaces; ++bits) {
        SCOPED_TRACE(name + ", " + std::string(to_string(dtype)) + ", " + text_of(bits));
        test.shapes = shapes_at(bits);
        test.num_buffers = 1 + bits % 3;
        expect_equal(train(1, test, kTieredSteps), expected, 2 + state_names(rule).size());
      }
    }
  }
}

TEST(TieredOptimizer, GivesTheSameBitsThroughAnyBuffers) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TieredCase test;
    test.dtype = dtype;
    test.shapes = shapes_at(7);
    const std::vector<Trained> expected = train(1, in_memory(test), kTieredSteps);
    for (const std::int64_t sub_group_numel : {2048, 4096, 6144, 1 << 20}) {
      for (const double num_buffers : {1.0, 1.5, 2.0, 3.0, 5.0, 100.0}) {
        SCOPED_TRACE(std::to_string(sub_group_numel) + " elements, " + std::to_string(num_buffers) +
                     " buffers");
        test.sub_group_numel = sub_group_numel;
        test.num_buffers = num_buffers;
        expect_equal(train(1, test, kTieredSteps), expected, 4);
      }
    }
  }
}

TEST(TieredOptimizer, MixesPlacesFromParameterToParameter) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int first = 0; first < kNumPlaces; ++first) {
      SCOPED_TRACE(text_of(first) + " first");
      TieredCase test;
      test.dtype = dtype;
      test.num_buffers = 2;
      for (int i = 0; i < 2 * kNumPlaces; ++i) {
        // Neighbours of the same place, too.
        test.shapes.push_back({100 + 400 * i, places((first + i / 2 * 3) % kNumPlaces)});
      }
      test.sub_group_numel = 4096;
      expect_bits_of_memory(1, test);
    }
  }
}

TEST(TieredOptimizer, UpdatesEveryRanksShardsAlsoWhereTheyAreEmpty) {
  for (const int num_ranks : {2, 3}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
      for (const int bits : {1, 4, 7}) {
        SCOPED_TRACE(std::to_string(num_ranks) + " ranks, " + text_of(bits));
        TieredCase test;
        test.dtype = dtype;
        test.shapes = shapes_at(bits);
        test.num_buffers = 2;
        expect_bits_of_memory(num_ranks, test);
      }
    }
  }
}

TEST(TieredOptimizer, StreamsATensorThatIsLargerThanAllBuffersTogether) {
  TieredCase test;
  test.dtype = DType::kBFloat16;
  test.shapes = shapes_at(7, 100003);
  test.num_buffers = 1;
  test.store = StoreKind::kFile;
  expect_bits_of_memory(1, test);
}

TEST(TieredOptimizer, WaitsForEverythingThatAMockDeviceHasNotDoneYet) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int bits = 0; bits < kNumPlaces; ++bits) {
      SCOPED_TRACE(text_of(bits));
      TieredCase test;
      test.dtype = dtype;
      test.shapes = shapes_at(bits);
      test.num_buffers = 2;
      test.is_late = true;
      expect_bits_of_memory(1, test);
    }
  }
}

TEST(TieredOptimizer, UpdatesAShardOnlyAfterWhatStillReadsIt) {
  TieredCase test;
  test.shapes = shapes_at(4);
  test.is_late = true;
  comm::run_ranks(1, [&](comm::Group& group) {
    TieredWorld world(group, test);
    world.backward(1);
    for (const device::StreamKind kind :
         {device::StreamKind::kGather, device::StreamKind::kReduce}) {
      const shard::Param& param = world.params()[3];
      const std::size_t bytes = param.layout().shard_bytes();
      const std::vector<std::byte> before(param.shard(), param.shard() + bytes);
      std::vector<std::byte> copy(bytes);
      const device::Pending copied =
          world.device().start_copy(copy.data(), param.shard(), bytes, world.device().stream(kind));
      world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale);
      world.optimizer().wait();
      copied.wait();
      EXPECT_EQ(copy, before);
      EXPECT_NE(std::vector<std::byte>(param.shard(), param.shard() + bytes), before);
    }
  });
}

TEST(TieredOptimizer, SumsSquaresToTheBitsOfMemory) {
  for (const int num_ranks : {1, 2}) {
    std::map<int, std::vector<double>> sums;  // by places
    for (const int bits : {0, 2}) {
      sums[bits].resize(static_cast<std::size_t>(num_ranks));
      TieredCase test;
      test.shapes = shapes_at(bits);
      if (bits == 0) {
        test = in_memory(test);
      }
      comm::run_ranks(num_ranks, [&](comm::Group& group) {
        TieredWorld world(group, test);
        world.backward(1);
        sums[bits][static_cast<std::size_t>(group.rank())] =
            world.optimizer().sum_of_squares(world.reducer());
        world.reducer().clear();
      });
    }
    EXPECT_GT(sums[0][0], 0);
    EXPECT_EQ(sums[0], sums[2]);
  }
}

TEST(TieredOptimizer, FollowsAShardThatWasWrittenFromOutside) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int bits = 0; bits < kNumPlaces; ++bits) {
      SCOPED_TRACE(text_of(bits));
      std::vector<std::vector<Trained>> results;
      for (const bool is_tiered : {false, true}) {
        TieredCase test;
        test.dtype = dtype;
        test.shapes = shapes_at(bits);
        test.num_buffers = 100;  // leases hold everything from step to step
        if (!is_tiered) {
          test = in_memory(test);
        }
        comm::run_ranks(1, [&](comm::Group& group) {
          TieredWorld world(group, test);
          world.step(1);
          world.optimizer().prepare();
          world.write_shard(3, 99);
          world.optimizer().reset_master(3);
          world.step(2);
          results.push_back({world.trained()});
        });
      }
      expect_equal(results[1], results[0], 4);
    }
  }
}

TEST(TieredOptimizer, GivesAParameterItsStatesWhenItIsUnfrozen) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int bits : {4, 5, 7}) {
      SCOPED_TRACE(text_of(bits));
      std::vector<std::vector<Trained>> results;
      for (const bool is_tiered : {false, true}) {
        TieredCase test;
        test.dtype = dtype;
        test.shapes = shapes_at(bits);
        test.shapes[1].trainable = false;
        test.shapes[3].trainable = false;
        test.num_buffers = 3;
        test.sub_group_numel = 4096;
        if (!is_tiered) {
          test = in_memory(test);
        }
        comm::run_ranks(1, [&](comm::Group& group) {
          TieredWorld world(group, test);
          const auto follow = [&](int id, bool trainable) {
            world.params()[id].set_trainable(trainable);
            world.optimizer().follow_trainable(id);
            world.remake_reducer();
          };
          world.step(1);
          follow(3, true);
          world.step(2);
          follow(3, false);
          follow(5, false);
          follow(1, true);
          world.step(3);
          follow(3, true);
          follow(5, true);
          world.step(4);
          results.push_back({world.trained()});
        });
      }
      expect_equal(results[1], results[0], 4);
    }
  }
}

TEST(TieredOptimizer, RefusesAStateThatTheRuleDoesNotHave) {
  comm::run_ranks(1, [&](comm::Group& group) {
    TieredCase test;
    test.shapes = shapes_at(7);
    TieredWorld world(group, test);
    try {
      world.optimizer().state(0, "momentum");
      FAIL() << "expected ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("p0 has no state \"momentum\""), std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace tessera::optim
