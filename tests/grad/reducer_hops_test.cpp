// Reductions in one hop and in two, quantised and exact, against the plain sum that
// hop_fixture.h makes of them, to the bit.
#include <algorithm>
#include <array>
#include <cmath>
#include <latch>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/grad/gradient_bytes.h"
#include "tests/grad/hop_fixture.h"
#include "tests/support/sizes.h"

namespace tessera::grad {
namespace {

class ReducerHops : public ::testing::TestWithParam<HopWorld> {};

// By rank; `expected`: what was found before; empty: compared with the plain sum.
std::vector<ShardSums> trained(const HopWorld& hops, const ReduceCase& test, int num_backwards,
                               const std::vector<ShardSums>& expected) {
  std::vector<ShardSums> all(static_cast<std::size_t>(hops.num_ranks));
  comm::run_ranks(hops.num_ranks, [&](comm::Group& group) {
    ReducerFixture world(group, test);
    HopSums sums(test, world.num_copies(), mostly);
    for (int step = 0; step < 2; ++step) {
      for (int backward = 0; backward < num_backwards; ++backward) {
        run_static(world, step, backward, mostly);
      }
      world.reducer().finish_replica_sums();
      if (expected.empty()) {
        std::string first;
        EXPECT_EQ(count_wrong(world, sums, step, num_backwards, &first), 0) << first;
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

struct HopNumbers {
  int bits = 0;
  DType param_dtype = DType::kFloat32;
  DType wire_dtype = DType::kFloat32;
  int num_micro_batches = 1;
};
const std::vector<HopNumbers> kAllNumbers = {{4, DType::kBFloat16, DType::kBFloat16, 1},
                                             {0, DType::kFloat32, DType::kFloat32, 2},
                                             {8, DType::kFloat32, DType::kFloat32, 2},
                                             {8, DType::kFloat32, DType::kFloat16, 3},
                                             {4, DType::kFloat32, DType::kBFloat16, 2}};
const std::vector<HopNumbers> kNumbers(kAllNumbers.begin(),
                                       kAllNumbers.begin() + support::rounds(5, 2));

// All for one world; two of each other one, in turn.
std::vector<Home> homes_of(const HopWorld& hops, std::size_t number) {
  std::vector<Home> all = all_homes();
  if (hops.num_ranks == 4 && hops.ranks_per_copy == 4) {
    return all;
  }
  const std::size_t turn = number + static_cast<std::size_t>(hops.num_ranks / 2);
  return {all[turn % all.size()], all[(turn + all.size() / 2) % all.size()]};
}

TEST_P(ReducerHops, HaveTheSumsThatAreMeantAtEveryHome) {
  const HopWorld hops = GetParam();
  for (std::size_t i = 0; i < kNumbers.size(); ++i) {
    if (i > 0 && i % 2 != static_cast<std::size_t>(hops.ranks_per_host) % 2) {
      continue;
    }
    const HopNumbers& numbers = kNumbers[i];
    ReduceCase test = hop_case(hops, numbers.bits, numbers.param_dtype, numbers.wire_dtype);
    test.num_micro_batches = numbers.num_micro_batches;
    std::vector<ShardSums> expected;
    for (const Home home : homes_of(hops, i)) {
      SCOPED_TRACE(::testing::Message()
                   << numbers.bits << " bits, " << to_string(numbers.param_dtype) << " as "
                   << to_string(numbers.wire_dtype) << ", " << numbers.num_micro_batches
                   << " micro-batches, " << name_of(home));
      expected = trained(hops, at_home(test, home), numbers.num_micro_batches, expected);
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST_P(ReducerHops, HaveTheSameBitsForEverySizeOfBuckets) {
  const HopWorld hops = GetParam();
  ReduceCase test = hop_case(hops, 4, DType::kBFloat16, DType::kBFloat16);
  std::vector<ShardSums> expected;
  for (const std::int64_t bucket_bytes : {3000, 40000, 1 << 20}) {
    SCOPED_TRACE(bucket_bytes);
    test.options.bucket_bytes = bucket_bytes;
    expected = trained(hops, at_home(test, Home::kMixed), 2, expected);
    if (HasFailure()) {
      return;
    }
  }
}

TEST_P(ReducerHops, HaveTheSameBitsWhereCallsAreWorkOfStreamsAndRanksAreLate) {
  const HopWorld hops = GetParam();
  ReduceCase test = hop_case(hops, 8, DType::kFloat32, DType::kFloat32);
  const std::vector<ShardSums> expected = trained(hops, test, 1, {});
  for (const bool on_streams : {false, true}) {
    comm::ThreadWorldOptions options;
    options.num_ranks = hops.num_ranks;
    options.max_delay_us = 30;
    options.seed = 7;
    options.on_streams = on_streams;
    comm::run_ranks(options, {}, [&](comm::Group& group) {
      ReduceCase late = test;
      late.device = on_streams ? DeviceKind::kLazy : DeviceKind::kRandom;
      ReducerFixture world(group, late);
      ShardSums sums;
      for (int step = 0; step < 2; ++step) {
        run_static(world, step, 0, mostly);
        append_sums(world, sums);
        world.reducer().clear();
      }
      expect_same_bits(sums, expected[static_cast<std::size_t>(group.rank())]);
    });
  }
}

// A dynamic parameter that is reduced once in every backward has the bits of a static one.
TEST_P(ReducerHops, TreatDynamicParametersAlike) {
  const HopWorld hops = GetParam();
  const std::vector<int> list = {6, 4, 2, 1};
  for (const bool has_own_group : {false, true}) {
    ReduceCase test = hop_case(hops, 4, DType::kBFloat16, DType::kBFloat16);
    test.num_micro_batches = 2;
    ReduceCase dynamic = test;
    dynamic.has_dynamic_group = has_own_group;
    for (const int id : list) {
      dynamic.shapes[static_cast<std::size_t>(id)].dynamic = true;
    }
    const auto always_used = [](const Source& source, int id) {
      return id == 4 || mostly(source, id);
    };
    comm::run_ranks(hops.num_ranks, [&](comm::Group& group) {
      const Source source{group.rank(), 0, 0};
      ShardSums expected;
      {
        ReducerFixture world(group, test);
        for (int backward = 0; backward < 2; ++backward) {
          run_static(world, 0, backward, always_used);
        }
        append_sums(world, expected);
      }
      ReducerFixture world(group, dynamic);
      for (int backward = 0; backward < 2; ++backward) {
        for (const int id : list) {
          if (always_used({source.rank, 0, backward}, id)) {
            add(world, {source.rank, 0, backward}, id);
          }
        }
        world.reducer().reduce_dynamic(list);
        run_static(world, 0, backward, always_used);
      }
      ShardSums sums;
      append_sums(world, sums);
      expect_same_bits(sums, expected);
    });
  }
}

// The closed forms of docs/communication.md.
TEST_P(ReducerHops, SendWhatTheClosedFormSays) {
  const HopWorld hops = GetParam();
  for (const int bits : {0, 4, 8}) {
    const ReduceCase test = hop_case(hops, bits, DType::kFloat32, DType::kFloat32);
    comm::run_ranks(hops.num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, test);
      const auto sent_by = [](const comm::Group* of) {
        return of == nullptr ? 0 : of->wire_bytes().payload;
      };
      const ReductionHops groups = world.hops();
      const std::uint64_t before[] = {sent_by(&world.group()), sent_by(groups.inside),
                                      sent_by(groups.across)};
      run_static(world, 0, 0, mostly);
      world.reducer().wait();
      const auto bytes = [&](std::int64_t numel) {
        return static_cast<std::uint64_t>(bits == 0 ? static_cast<std::size_t>(numel) * 4
                                                    : codec_of(bits)->wire_bytes(numel));
      };
      const auto p = static_cast<std::uint64_t>(hops.ranks_per_copy);
      const auto l = static_cast<std::uint64_t>(hops.inside_size());
      const std::uint64_t h = p / l;
      std::uint64_t inside = 0;
      std::uint64_t across = 0;
      for (const Bucket& bucket : world.reducer().layout().buckets) {
        inside += hops.takes_two_hops()
                      ? (l - 1) * bytes(bucket.shard_numel * static_cast<std::int64_t>(h))
                      : (p - 1) * bytes(bucket.shard_numel);
        across += hops.takes_two_hops() ? (h - 1) * bytes(bucket.shard_numel) : 0;
      }
      const ReducerStats stats = world.reducer().take_stats();
      EXPECT_EQ(stats.sent_bytes, p == 1 ? 0 : inside + across);
      EXPECT_EQ(stats.num_reductions, world.reducer().layout().buckets.size());
      if (hops.takes_two_hops()) {
        EXPECT_EQ(sent_by(groups.inside) - before[1], inside);
        EXPECT_EQ(sent_by(groups.across) - before[2], across);
        EXPECT_EQ(sent_by(&world.group()) - before[0], 0U) << "words alone";
      }
    });
  }
}

// What the codec cannot send it does not hide.
TEST_P(ReducerHops, LetWhatIsNotFiniteThrough) {
  const HopWorld hops = GetParam();
  for (const float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const ReduceCase test = hop_case(hops, 4, DType::kFloat32, DType::kFloat16);
    comm::run_ranks(hops.num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, test);
      const Source source{group.rank(), 0, 0};
      FullGradient gradient = make_gradient(source, world.params()[1], DType::kFloat32);
      constexpr std::int64_t kBad = 4000;
      if (group.rank() == group.size() - 1) {
        static_cast<float*>(gradient.data)[kBad] = bad;
      }
      world.reducer().add(world.params()[1], std::move(gradient));
      run_static(world, 0, 0, [](const Source& /*source*/, int id) { return id != 1; });
      const shard::Param& param = world.params()[1];
      const std::vector<float> values = read_shard(world, 1);
      const std::int64_t offset = kBad - param.range().begin;
      int num_bad = 0;
      for (const float value : values) {
        num_bad += std::isfinite(value) ? 0 : 1;
      }
      if (offset >= 0 && offset < param.range().numel) {
        EXPECT_FALSE(std::isfinite(values[static_cast<std::size_t>(offset)]));
        EXPECT_LE(num_bad, 128) << "its block alone";
      } else {
        EXPECT_EQ(num_bad, 0);
      }
    });
  }
}

TEST_P(ReducerHops, TakeThePlannedMemory) {
  const HopWorld hops = GetParam();
  for (const int bits : {0, 4}) {
    for (const int num_micro_batches : {1, 2}) {
      ReduceCase test = hop_case(hops, bits, DType::kFloat32, DType::kFloat32);
      test.num_micro_batches = num_micro_batches;
      test.make_store = [](int /*rank*/) { return std::make_unique<LazyStore>(); };
      test.pool_bytes = std::size_t{4} * 4096 * sizeof(float);
      test.shapes[2].dynamic = true;
      std::vector<GradientShape> shapes;
      for (const ParamShape& shape : test.shapes) {
        shapes.push_back({shape.numel, shape.trainable, shape.dynamic, shape.tier});
      }
      const GradientBytes planned =
          gradient_bytes(shapes, hops.ranks_per_copy, test.options, DType::kFloat32,
                         {hops.copies().num_copies(), num_micro_batches});
      EXPECT_EQ(planned.quant_error > 0, bits > 0 && hops.ranks_per_copy > 1);
      comm::run_ranks(hops.num_ranks, [&](comm::Group& group) {
        ReducerFixture world(group, test);
        EXPECT_EQ(world.gradient_bytes(), static_cast<std::size_t>(planned.total()));
        for (int backward = 0; backward < num_micro_batches; ++backward) {
          run_static(world, 0, backward, mostly);
        }
        world.reducer().wait();
        EXPECT_EQ(world.gradient_bytes(), static_cast<std::size_t>(planned.total()));
        EXPECT_EQ(world.ledger().current_bytes(Tier::kPinned, Role::kOther),
                  static_cast<std::size_t>(planned.quant_sums));
      });
    }
  }
}

TEST_P(ReducerHops, MeasureWhatQuantisingChanges) {
  const HopWorld hops = GetParam();
  for (const int bits : {0, 4, 8}) {
    const ReduceCase test = hop_case(hops, bits, DType::kFloat32, DType::kFloat32);
    comm::run_ranks(hops.num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, test);
      double errors = 0;
      double squares = 0;
      double worst = -1;
      int worst_param = -1;
      for (int backward = 0; backward < 2; ++backward) {
        run_static(world, 0, backward, always);
      }
      for (int id = 0; id < world.params().num_params(); ++id) {
        const shard::Param& param = world.params()[id];
        double error = 0;
        double square = 0;
        for (int backward = 0; param.trainable() && backward < 2; ++backward) {
          std::vector<float> values(static_cast<std::size_t>(param.range().numel));
          for (std::size_t i = 0; i < values.size(); ++i) {
            values[i] = gradient_value({group.rank(), 0, backward}, id,
                                       param.range().begin + static_cast<std::int64_t>(i));
          }
          const std::vector<float> arrived = passed_on(test.codec, values, DType::kFloat32);
          for (std::size_t i = 0; i < values.size(); ++i) {
            const double difference = static_cast<double>(arrived[i]) - values[i];
            error += difference * difference;
            square += static_cast<double>(values[i]) * values[i];
          }
        }
        errors += error;
        squares += square;
        if (square > 0 && std::sqrt(error / square) > worst) {
          worst = std::sqrt(error / square);
          worst_param = id;
        }
      }
      world.reducer().wait();
      const QuantErrorStats found = world.reducer().take_stats().quant_error;
      if (bits == 0 || hops.ranks_per_copy == 1) {
        EXPECT_EQ(found.relative(), 0);
        EXPECT_EQ(found.worst_param, -1);
        return;
      }
      // Fewer than 2^16 squares, none negative, each and each sum off by at most 2^-53 of it.
      const double tolerance = std::ldexp(1.0, 16 + 1 - 53);
      EXPECT_NEAR(found.value_squares, squares, squares * tolerance);
      EXPECT_NEAR(found.error_squares, errors, errors * tolerance);
      EXPECT_EQ(found.worst_param, worst_param);
      EXPECT_NEAR(found.worst_error, worst, worst * tolerance);
      // Half a code of a block's largest magnitude at most: the root of a mean square is less.
      EXPECT_LT(found.relative(), bits == 4 ? 0.25 : 0.02);
      EXPECT_EQ(world.reducer().take_stats().quant_error.worst_param, -1) << "since the last time";
    });
  }
}

// With two buckets in flight a third one needs a buffer. Only when all ranks, also those of other
// hosts with other local ranks, have started the first bucket may a rank wait for it.
TEST_P(ReducerHops, NeverWaitForARankThatWaits) {
  const HopWorld hops = GetParam();
  ReduceCase test = hop_case(hops, 8, DType::kFloat32, DType::kFloat32);
  test.options.bucket_bytes = 3000;
  for (int late = 0; late < hops.num_ranks; late += hops.num_ranks - 1) {
    std::latch others(hops.num_ranks - 1);
    comm::run_ranks(hops.num_ranks, [&](comm::Group& group) {
      ReducerFixture world(group, test);
      const Source source{group.rank(), 0, 0};
      if (group.rank() == late) {
        others.wait();  // a rank that needs the others before its own backward, as for a gather
      }
      add_all(world, source);
      if (group.rank() != late) {
        others.count_down();
      }
      world.reducer().finish_backward();
      HopSums sums(test, world.num_copies(), always);
      std::string first;
      EXPECT_EQ(count_wrong(world, sums, 0, 1, &first), 0) << first;
    });
    if (hops.num_ranks == 1) {
      break;
    }
  }
}

// Else a test of the order of hops would see nothing.
TEST(ReducerHopsReference, DependsOnTheHosts) {
  ReduceCase two = hop_case({4, 4, 2}, 0, DType::kFloat32, DType::kFloat32);
  ReduceCase quantised = hop_case({4, 4, 2}, 8, DType::kFloat32, DType::kFloat32);
  ReduceCase one = hop_case({4, 4, 4}, 8, DType::kFloat32, DType::kFloat32);
  comm::run_ranks(4, [&](comm::Group& group) {
    if (group.rank() != 0) {
      ReducerFixture idle(group, two);
      ReducerFixture idle_too(group, quantised);
      return;
    }
    ReducerFixture exact(group, two);
    ReducerFixture world(group, quantised);
    const shard::Param& param = world.params()[1];
    const std::vector<float> exactly = HopSums(two, 1, always).expected(param, 0, 1);
    const std::vector<float> by_host = HopSums(quantised, 1, always).expected(param, 0, 1);
    const std::vector<float> at_once = HopSums(one, 1, always).expected(param, 0, 1);
    int num_quantised = 0;
    int num_by_host = 0;
    for (std::size_t i = 0; i < exactly.size(); ++i) {
      num_quantised += exactly[i] == by_host[i] ? 0 : 1;
      num_by_host += at_once[i] == by_host[i] ? 0 : 1;
    }
    EXPECT_GT(num_quantised, 1000);
    EXPECT_GT(num_by_host, 1000);
  });
}

// What differs most comes first.
constexpr std::array kWorlds = {HopWorld{4, 4, 2}, HopWorld{2, 2, 2}, HopWorld{8, 4, 2},
                                HopWorld{6, 6, 3}, HopWorld{6, 3, 3}, HopWorld{2, 2, 1},
                                HopWorld{3, 3, 3}, HopWorld{6, 6, 2}, HopWorld{8, 8, 2},
                                HopWorld{8, 8, 4}, HopWorld{4, 2, 2}, HopWorld{2, 1, 2}};
INSTANTIATE_TEST_SUITE_P(Worlds, ReducerHops,
                         ::testing::ValuesIn(kWorlds.begin(),
                                             kWorlds.begin() +
                                                 support::rounds<std::size_t>(kWorlds.size(), 3)),
                         [](const auto& param) { return name_of(param.param); });

}  // namespace
}  // namespace tessera::grad
