// Sums over replicas: over the ranks of a copy, then over micro-batches, then over the copies, to
// the bit, wherever gradients live and however they travel.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/grad/replica_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::grad {
namespace {

// Some are cut at whole blocks of the norm, some share a bucket, some are padding on the last rank,
// and some are reduced from where they lie.
ReduceCase replica_case(const Copies& copies, DType param_dtype, DType wire_dtype) {
  ReduceCase test;
  test.shapes = {{40}, {9001}, {7},   {64, false}, {support::rounds(20011, 9000)},
                 {3},  {9600}, {130}, {0},         {1}};
  test.param_dtype = param_dtype;
  test.options = {40000, wire_dtype};
  test.ranks_per_copy = copies.ranks_per_copy;
  return test;
}

struct Backwards {
  int num_micro_batches = 0;  // that are told of
  int num = 0;
};
const std::vector<Backwards> kAllBackwards = {{1, 1}, {2, 2}, {3, 2}, {0, 2}, {2, 4},
                                              {1, 3}, {3, 3}, {0, 1}, {3, 1}};
const std::vector<Backwards> kBackwards(kAllBackwards.begin(),
                                        kAllBackwards.begin() + support::rounds(9, 5));

// By rank. `expected`: what was found before; empty: the first copy is compared with the plain sum,
// the others with the first.
std::vector<ShardSums> trained(const Copies& copies, const ReduceCase& test, int num_backwards,
                               const std::vector<ShardSums>& expected) {
  std::vector<ShardSums> all(static_cast<std::size_t>(copies.num_ranks));
  comm::run_ranks(copies.num_ranks, [&](comm::Group& group) {
    ReducerFixture world(group, test);
    for (int step = 0; step < 2; ++step) {
      for (int backward = 0; backward < num_backwards; ++backward) {
        run_static(world, step, backward, mostly);
      }
      world.reducer().finish_replica_sums();
      if (expected.empty() && group.rank() < world.num_ranks()) {
        expect_replica_sums(world, step, num_backwards, mostly);
      }
      append_sums(world, all[static_cast<std::size_t>(group.rank())]);
      world.reducer().clear();
    }
  });
  for (std::size_t rank = 0; rank < expected.size(); ++rank) {
    expect_same_bits(all[rank], expected[rank]);
  }
  return all;
}

void expect_same_replicas(const Copies& copies, const std::vector<ShardSums>& all) {
  for (int rank = copies.ranks_per_copy; rank < copies.num_ranks; ++rank) {
    const int first = rank % copies.ranks_per_copy;
    expect_same_bits(all[static_cast<std::size_t>(rank)], all[static_cast<std::size_t>(first)]);
  }
}

class ReducerReplicas : public ::testing::TestWithParam<Copies> {};

TEST_P(ReducerReplicas, HaveTheSumInOrderAtEveryHome) {
  const Copies copies = GetParam();
  const std::vector<std::pair<DType, DType>> all_types = {{DType::kFloat32, DType::kFloat32},
                                                          {DType::kBFloat16, DType::kBFloat16},
                                                          {DType::kFloat32, DType::kFloat16}};
  const std::size_t num_types = support::rounds<std::size_t>(all_types.size(), 2);
  for (std::size_t i = 0; i < kBackwards.size(); ++i) {
    for (std::size_t t = 0; t < num_types; ++t) {
      if (i % num_types != t && (support::kIsSanitized || i > 3)) {
        continue;
      }
      const auto& [param_dtype, wire_dtype] = all_types[t];
      ReduceCase test = replica_case(copies, param_dtype, wire_dtype);
      test.num_micro_batches = kBackwards[i].num_micro_batches;
      std::vector<ShardSums> expected;
      for (const Home home : all_homes()) {
        SCOPED_TRACE(::testing::Message()
                     << to_string(param_dtype) << " as " << to_string(wire_dtype) << ", "
                     << kBackwards[i].num << " backwards of " << test.num_micro_batches << ", "
                     << name_of(home));
        expected = trained(copies, at_home(test, home), kBackwards[i].num, expected);
        expect_same_replicas(copies, expected);
        if (HasFailure()) {
          return;
        }
      }
    }
  }
}

TEST_P(ReducerReplicas, HaveTheSameBitsForEverySizeOfBuckets) {
  const Copies copies = GetParam();
  for (const int num_micro_batches : {1, 2}) {
    ReduceCase test = replica_case(copies, DType::kBFloat16, DType::kBFloat16);
    test.num_micro_batches = num_micro_batches;
    std::vector<ShardSums> expected;
    for (const std::int64_t bucket_bytes : {3000, 40000, 1 << 20}) {
      for (const Home home : {Home::kLateCpu, Home::kMixed, Home::kNvme}) {
        SCOPED_TRACE(::testing::Message() << bucket_bytes << ", " << name_of(home));
        test.options.bucket_bytes = bucket_bytes;
        expected = trained(copies, at_home(test, home), num_micro_batches, expected);
        if (HasFailure()) {
          return;
        }
      }
    }
  }
}

// Whole parameters, put together from the shards of the first copy.
std::vector<std::vector<float>> joined(const Copies& copies, const ReduceCase& test) {
  std::vector<std::vector<std::vector<float>>> shards(  // by shard
      static_cast<std::size_t>(copies.ranks_per_copy));
  comm::run_ranks(copies.num_ranks, [&](comm::Group& group) {
    ReducerFixture world(group, test);
    for (int backward = 0; backward < 2; ++backward) {
      run_static(world, 0, backward, mostly);
    }
    expect_replica_sums(world, 0, 2, mostly);
    for (int id = 0; id < world.params().num_params() && group.rank() < world.num_ranks(); ++id) {
      shards[static_cast<std::size_t>(world.rank())].push_back(
          world.params()[id].trainable() ? read_shard(world, id) : std::vector<float>());
    }
  });
  std::vector<std::vector<float>> params(test.shapes.size());
  for (const auto& shard : shards) {
    for (std::size_t id = 0; id < params.size(); ++id) {
      params[id].insert(params[id].end(), shard[id].begin(), shard[id].end());
    }
  }
  return params;
}

TEST_P(ReducerReplicas, HaveTheSameElementsHoweverShardsAreNumbered) {
  const Copies copies = GetParam();
  for (const int num_micro_batches : {0, 1, 2}) {
    ReduceCase test = replica_case(copies, DType::kFloat32, DType::kFloat32);
    test.num_micro_batches = num_micro_batches;
    const std::vector<std::vector<float>> expected = joined(copies, test);
    test.shard_of_rank.resize(static_cast<std::size_t>(copies.ranks_per_copy));
    std::iota(test.shard_of_rank.begin(), test.shard_of_rank.end(), 0);
    std::rotate(test.shard_of_rank.begin(), test.shard_of_rank.begin() + 1,
                test.shard_of_rank.end());
    EXPECT_EQ(joined(copies, test), expected);
  }
}

const std::vector<int> kDynamic = {2, 6, 9};

// Dynamic parameters in lists of which a rank may know only the second, and twice in a backward.
const std::vector<std::vector<int>> kLists = {{9, 6}, {6, 2}};

bool has_for_list(const Source& source, int id, std::size_t list) {
  return id == 9 || (static_cast<std::size_t>(source.rank) % 2 == list && id == 6) || id == 2;
}

float expected_dynamic(const ReduceCase& test, int num_copies, int num_backwards, int id,
                       std::int64_t index) {
  std::vector<float> at_home(static_cast<std::size_t>(num_copies));
  int num_lists = 0;
  bool is_total = false;  // of the step
  bool is_local = false;  // of the parameter
  std::vector<bool> is_there(at_home.size(), false);
  const auto sum_over_copies = [&] {
    float total = 0;
    for (std::size_t copy = 0; copy < at_home.size(); ++copy) {
      total = copy == 0 ? at_home[copy] : total + at_home[copy];
    }
    if (test.num_micro_batches == 1 && num_lists == 1) {
      total = rounded(total, test.options.wire_dtype);
    }
    at_home.assign(at_home.size(), total);
    is_local = false;
  };
  for (int backward = 0; backward < num_backwards; ++backward) {
    for (std::size_t list = 0; list < kLists.size(); ++list) {
      if (std::find(kLists[list].begin(), kLists[list].end(), id) == kLists[list].end()) {
        continue;
      }
      if (num_lists > 0 && !is_local) {
        is_there.assign(is_there.size(), false);
        is_there[0] = true;
      }
      ++num_lists;
      is_local = true;
      for (int copy = 0; copy < num_copies; ++copy) {
        const auto i = static_cast<std::size_t>(copy);
        const float sum = sum_of_copy(
            test, copy, {0, 0, backward}, id, index,
            [&](const Source& source, int param) { return has_for_list(source, param, list); });
        at_home[i] = is_there[i] ? at_home[i] + sum : sum;
        is_there[i] = true;
      }
    }
    const int k = test.num_micro_batches;
    is_total = is_total || k == 1 || backward + 1 == k;
    if (is_total && is_local) {
      sum_over_copies();
    }
  }
  if (is_local) {
    sum_over_copies();
  }
  return at_home.front();
}

void run_lists(ReducerFixture& world, int backward) {
  const Source source{world.all().rank(), 0, backward};
  for (std::size_t list = 0; list < kLists.size(); ++list) {
    for (const int id : kLists[list]) {
      if (has_for_list(source, id, list)) {
        add(world, source, id);
      }
    }
    world.reducer().reduce_dynamic(kLists[list]);
  }
}

void expect_dynamic(ReducerFixture& world, int num_backwards) {
  for (const int id : kDynamic) {
    const shard::Param& param = world.params()[id];
    const std::vector<float> values = read_shard(world, id);
    for (std::int64_t i = 0; i < param.range().numel; ++i) {
      const std::int64_t index = param.range().begin + i;
      const float value = values[static_cast<std::size_t>(i)];
      const float expected =
          expected_dynamic(world.test(), world.num_copies(), num_backwards, id, index);
      ASSERT_TRUE(is_same(value, expected))
          << param.name() << "[" << index << "] is " << value << ", not " << expected;
    }
  }
}

TEST_P(ReducerReplicas, SumDynamicParametersAtTheBoundary) {
  const Copies copies = GetParam();
  for (const Backwards& backwards : kBackwards) {
    std::vector<ShardSums> expected;
    for (const Home home : all_homes()) {
      ReduceCase test = replica_case(copies, DType::kBFloat16, DType::kBFloat16);
      for (const int id : kDynamic) {
        test.shapes[static_cast<std::size_t>(id)] = {id * 1003, true, true};
      }
      test.has_dynamic_group = true;
      test.num_micro_batches = backwards.num_micro_batches;
      test = at_home(test, home);
      SCOPED_TRACE(::testing::Message() << backwards.num << " backwards of "
                                        << backwards.num_micro_batches << ", " << name_of(home));
      std::vector<ShardSums> all(static_cast<std::size_t>(copies.num_ranks));
      comm::run_ranks(copies.num_ranks, [&](comm::Group& group) {
        ReducerFixture world(group, test);
        for (int backward = 0; backward < backwards.num; ++backward) {
          run_lists(world, backward);
          run_static(world, 0, backward, mostly);
        }
        world.reducer().finish_replica_sums();
        if (expected.empty() && group.rank() < world.num_ranks()) {
          expect_dynamic(world, backwards.num);
        }
        append_sums(world, all[static_cast<std::size_t>(group.rank())]);
      });
      expect_same_replicas(copies, all);
      for (std::size_t rank = 0; rank < expected.size(); ++rank) {
        expect_same_bits(all[rank], expected[rank]);
      }
      expected = all;
      if (HasFailure()) {
        return;
      }
    }
  }
}

// What the closed form of docs/communication.md says of one all-reduce.
std::uint64_t all_reduce_bytes(std::int64_t numel, std::size_t element_bytes, int num_ranks) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(numel) * element_bytes;
  const auto peers = static_cast<std::uint64_t>(num_ranks - 1);
  const auto piece =
      static_cast<std::uint64_t>((numel + num_ranks - 1) / num_ranks) * element_bytes;
  return bytes * static_cast<std::uint64_t>(num_ranks) <= comm::kSmallAllReduceBytes
             ? bytes * peers
             : 2 * piece * peers;
}

TEST_P(ReducerReplicas, TravelOncePerStep) {
  const Copies copies = GetParam();
  for (const Backwards& backwards : kBackwards) {
    ReduceCase test = replica_case(copies, DType::kBFloat16, DType::kBFloat16);
    test.shapes.push_back({support::rounds(300000, 150000)});
    test.options.bucket_bytes = 1 << 20;
    test.num_micro_batches = backwards.num_micro_batches;
    comm::run_ranks(copies.num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, test);
      const comm::WireBytes before = world.replicas().wire_bytes();
      const std::uint64_t reduced_before = world.group().wire_bytes().num_calls;
      for (int backward = 0; backward < backwards.num; ++backward) {
        run_static(world, 0, backward, mostly);
      }
      for (int i = 0; i < 2; ++i) {
        world.reducer().finish_replica_sums();
        world.reducer().wait();
      }
      const int k = backwards.num_micro_batches;
      const std::uint64_t num_sums =  // of each bucket
          static_cast<std::uint64_t>(k == 0 ? 1 : std::max(1, backwards.num - k + 1));
      std::uint64_t in_wire_type = 0;
      std::uint64_t in_fp32 = 0;
      std::uint64_t numel = 0;
      for (const Bucket& bucket : world.reducer().layout().buckets) {
        in_wire_type += all_reduce_bytes(bucket.shard_numel, 2, copies.num_copies());
        in_fp32 += all_reduce_bytes(bucket.shard_numel, 4, copies.num_copies());
        numel += static_cast<std::uint64_t>(bucket.shard_numel);
      }
      const comm::WireBytes after = world.replicas().wire_bytes();
      EXPECT_EQ(after.payload - before.payload,
                k == 1 ? num_sums * in_wire_type : in_fp32 + (num_sums - 1) * in_wire_type);
      const std::uint64_t num_buckets = world.reducer().layout().buckets.size();
      EXPECT_EQ(after.num_calls - before.num_calls, num_sums * num_buckets);
      EXPECT_EQ(world.group().wire_bytes().num_calls - reduced_before,
                static_cast<std::uint64_t>(backwards.num) * num_buckets);
      const ReducerStats stats = world.reducer().take_stats();
      EXPECT_EQ(stats.num_replica_sums, num_sums * num_buckets);
      EXPECT_EQ(stats.replica_bytes, numel * (k == 1 ? num_sums * 2 : 4 + (num_sums - 1) * 2));
    });
  }
}

TEST_P(ReducerReplicas, AreWrongWhereOneRankGivesAnotherValue) {
  const Copies copies = GetParam();
  for (const int num_micro_batches : {0, 1, 2}) {
    ReduceCase test = replica_case(copies, DType::kFloat32, DType::kFloat32);
    test.num_micro_batches = num_micro_batches;
    comm::run_ranks(copies.num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, test);
      run_static(world, 0, 0, always);
      const Source source{group.rank(), 0, 1};
      FullGradient gradient = make_gradient(source, world.params()[1], DType::kFloat32);
      if (group.rank() == group.size() - 1) {
        static_cast<float*>(gradient.data)[5] += 64;
      }
      world.reducer().add(world.params()[1], std::move(gradient));
      run_static(world, 0, 1, [](const Source& /*source*/, int id) { return id != 1; });
      EXPECT_EQ(count_wrong(world, 0, 2, always), world.rank() == 0 ? 1 : 0);
    });
  }
}

// Else a sum in another order would pass for the one that is meant.
TEST(ReducerReplicasReference, DependsOnTheOrderOfItsSums) {
  ReduceCase micro_batches_first = replica_case({4, 2}, DType::kFloat32, DType::kFloat32);
  micro_batches_first.num_micro_batches = 3;
  ReduceCase replicas_first = micro_batches_first;
  replicas_first.num_micro_batches = 1;
  int num_different = 0;
  for (std::int64_t index = 0; index < 1000; ++index) {
    num_different += is_same(expected_element(micro_batches_first, 2, 0, 3, 1, index, always),
                             expected_element(replicas_first, 2, 0, 3, 1, index, always))
                         ? 0
                         : 1;
  }
  EXPECT_GT(num_different, 100);
}

INSTANTIATE_TEST_SUITE_P(Worlds, ReducerReplicas,
                         ::testing::Values(Copies{4, 2}, Copies{6, 3}, Copies{6, 2}, Copies{4, 1}),
                         [](const auto& param) { return name_of(param.param); });

}  // namespace
}  // namespace tessera::grad
