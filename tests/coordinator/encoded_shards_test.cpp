// Gathers of encoded shards: the values that are computed with, on late devices and wherever shards
// are; what is encoded, and when; and what is not.
#include "tessera/coordinator/encoded_shards.h"

#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/coordinator/coordinator_fixture.h"
#include "tests/support/contains.h"

namespace tessera::coordinator {
namespace {

// Counts what it is asked to encode.
class CountingCodec final : public comm::Codec {
 public:
  explicit CountingCodec(device::Device& device) : codec_(&device) {}

  std::string_view name() const override { return codec_.name(); }
  std::size_t wire_bytes(std::int64_t numel) const override { return codec_.wire_bytes(numel); }
  Pending encode(const void* values, DType dtype, std::int64_t numel, std::byte* wire,
                 device::Stream* stream) const override {
    ++num_encoded;
    return codec_.encode(values, dtype, numel, wire, stream);
  }
  Pending decode(const std::byte* wire, std::int64_t numel, void* values, DType dtype,
                 device::Stream* stream) const override {
    return codec_.decode(wire, numel, values, dtype, stream);
  }
  Pending decode_sum(const std::byte* wires, std::size_t stride, int num_wires, std::int64_t numel,
                     void* sum, DType dtype, device::Stream* stream) const override {
    return codec_.decode_sum(wires, stride, num_wires, numel, sum, dtype, stream);
  }
  Pending measure(const void* values, DType dtype, std::int64_t numel, const std::byte* wire,
                  double* result, bool continues, device::Stream* stream) const override {
    return codec_.measure(values, dtype, numel, wire, result, continues, stream);
  }

  mutable int num_encoded = 0;

 private:
  const comm::PlainCodec codec_;
};

class EncodedOn : public testing::TestWithParam<DeviceChoice> {};
INSTANTIATE_TEST_SUITE_P(Devices, EncodedOn,
                         testing::Values(DeviceChoice::kCpu, DeviceChoice::kLazy,
                                         DeviceChoice::kRandom),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(EncodedOn, UnitsComputeWithWhatAllRanksDecodeWhateverIsGatheredAhead) {
  for (const int num_ranks : {1, 2, 3}) {
    for (const bool has_nvme : {false, true}) {
      Model model = mixed_model();
      if (has_nvme) {
        model.nvme.ids = {0, 2};
      }
      for (const CoordinatorOptions& options :
           {make_options(0, 0), make_options(1 << 12, 1 << 14, 1 << 14, 64)}) {
        if (GetParam() == DeviceChoice::kRandom && num_ranks != 2) {
          continue;  // threads of many streams, which mostly wait
        }
        run_ranks(num_ranks, [&](Group& group) {
          CoordinatorFixture rank(group, model, options, GetParam(), nullptr, {}, nullptr, true);
          for (int step = 0; step < 3; ++step) {
            rank.train();
            rank.end_step_and_update();
          }
          rank.train_overlapping();
          rank.end_step_and_update();
        });
      }
    }
  }
}

TEST_P(EncodedOn, InTwoPhasesWiresTravelAcrossFirstAndSecondaryShardsKeepThem) {
  for (const int num_ranks : {4, 8}) {
    if (GetParam() == DeviceChoice::kRandom && num_ranks == 8) {
      continue;  // threads of many streams, which mostly wait
    }
    run_ranks(num_ranks, [&](Group& world) {
      // Shards are numbered by local rank, so that one host has the even ranks. Of 8, a secondary
      // shard is two of what the first phase brings.
      const auto across = world.split(world.rank() / 2, "across");
      const auto inside = world.split(world.rank() % 2, "inside");
      const auto near = world.split(world.rank() % 2 * 2 + world.rank() / 4, "near");
      const auto pairs = world.split(world.rank() / 2, "pairs");
      for (Group* const second : {static_cast<Group*>(nullptr), near.get(), pairs.get()}) {
        for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
          if (second == nullptr && tier == Tier::kHost) {
            continue;
          }
          Model model = mixed_model();
          model.secondary = tier;
          CoordinatorFixture rank(world, model, make_options(1 << 12, 0), GetParam(), nullptr,
                                  {across.get(), inside.get()}, second, true);
          for (int step = 0; step < 3; ++step) {
            rank.train();
            const CoordinatorStats stats = rank.take_stats();
            EXPECT_EQ(stats.secondary_bytes > 0, second != nullptr);
            EXPECT_EQ(stats.secondary_wire_bytes < stats.secondary_bytes, second != nullptr);
            EXPECT_EQ(stats.encoded_bytes + stats.secondary_bytes, stats.gathered_bytes);
            rank.end_step_and_update();
          }
        }
      }
    });
  }
}

TEST_P(EncodedOn, HoldsShowExactValuesAndUnitsNeverComputeWithThem) {
  run_ranks(2, [&](Group& group) {
    const auto near = group.split(0, "near");
    for (const std::int64_t persists : {0, 1 << 20}) {
      CoordinatorFixture rank(group, mixed_model(),
                              make_options(1 << 12, 1 << 16, 1 << 16, persists), GetParam(),
                              nullptr, {}, near.get(), true);
      for (int step = 0; step < 4; ++step) {
        rank.coordinator().begin_hold({0, 1, 3}, "a look");
        rank.expect_exact_values(0);
        rank.expect_exact_values(3);
        rank.coordinator().end_hold({0, 1, 3}, "a look", false);
        rank.train();
        rank.coordinator().begin_hold({0, 1}, "an edit");
        rank.expect_exact_values(0);
        rank.update();
        rank.coordinator().end_hold({0, 1}, "an edit", true);
        rank.coordinator().forget_copies();
        rank.train();
        rank.end_step_and_update();
      }
    }
  });
}

TEST(EncodedShards, AreMadeOncePerUpdateAndBehindIt) {
  run_ranks(2, [](Group& world) {
    CoordinatorFixture rank(world, equal_layers(2, kLayerNumel), make_options(0, 0),
                            DeviceChoice::kLazy);
    const CountingCodec codec(rank.device());
    EncodedShards encoded(codec, rank.device(), rank.params());
    shard::Param& param = rank.params()[1];
    ASSERT_TRUE(encoded.covers(param));
    // The update is still to be made when its encoding is asked for.
    const auto updated = std::make_shared<Completion>();
    param.set_updated(Pending(updated));
    EXPECT_FALSE(encoded.has(param));
    encoded.start_encode(param, param.shard(), param.updated());
    EXPECT_TRUE(encoded.has(param));
    EXPECT_FALSE(encoded.made(param).done());
    const std::vector<float> values(static_cast<std::size_t>(param.layout().shard_numel()), 0.75F);
    std::memcpy(param.shard(), values.data(), values.size() * sizeof(float));
    updated->succeed();
    encoded.made(param).wait();
    EXPECT_EQ(codec.num_encoded, 1);
    std::vector<float> full(2 * values.size());
    const comm::Gather gather = encoded.gather(param, full.data());
    world.start_all_gather({&gather, 1}).wait();
    EXPECT_EQ(full, std::vector<float>(full.size(), 0.75F));
  });
}

TEST(EncodedShards, OfAnEarlierUpdateAreRefusedByNameAlsoWhereOneRankHasThem) {
  run_ranks(2, [](Group& world) {
    CoordinatorFixture rank(world, equal_layers(2, kLayerNumel), make_options(0, 0));
    const comm::PlainCodec codec(&rank.device());
    EncodedShards encoded(codec, rank.device(), rank.params());
    shard::Param& param = rank.params()[1];
    EXPECT_THROW(std::ignore = encoded.gather(param, nullptr), InternalError);
    encoded.start_encode(param, param.shard(), {});
    EXPECT_NO_THROW(std::ignore = encoded.gather(param, nullptr));
    param.set_updated(Pending());
    EXPECT_FALSE(encoded.has(param));
    try {
      std::ignore = encoded.gather(param, nullptr);
      FAIL() << "a stale encoded shard was given";
    } catch (const InternalError& error) {
      EXPECT_HAS(std::string(error.what()), "encoded shard of parameter '" + param.name() + "'");
      EXPECT_HAS(std::string(error.what()),
                 detail::concat("is of update ", param.version() - 1,
                                "; the parameter is at update ", param.version()));
    }
    encoded.start_encode(param, param.shard(), {});
  });
  comm::ThreadWorldOptions ranks;
  ranks.num_ranks = 2;
  const auto failures = comm::run_ranks_collecting(ranks, {}, [](Group& world) {
    CoordinatorFixture rank(world, equal_layers(2, kLayerNumel), make_options(0, 0),
                            DeviceChoice::kCpu, nullptr, {}, nullptr, true);
    rank.train();
    if (world.rank() == 1) {  // believes that there was an update
      rank.params()[1].set_updated(Pending());
    }
    rank.train();
  });
  for (const std::exception_ptr& failure : failures) {
    ASSERT_TRUE(failure);
    try {
      std::rethrow_exception(failure);
    } catch (const CommError& error) {
      EXPECT_HAS(std::string(error.what()), "parameter 'p1'");
    }
  }
}

TEST(EncodedShards, AFailedUpdateFailsItsParameterAndIsTriedAgain) {
  run_ranks(2, [](Group& world) {
    CoordinatorFixture rank(world, equal_layers(2, kLayerNumel), make_options(0, 0),
                            DeviceChoice::kCpu);
    const comm::PlainCodec codec(&rank.device());
    EncodedShards encoded(codec, rank.device(), rank.params());
    shard::Param& param = rank.params()[0];
    const auto late = std::make_shared<Completion>();
    encoded.start_encode(param, param.shard(), Pending(late));
    late->fail(std::make_exception_ptr(IoError("the disk is gone")));
    EXPECT_THROW(encoded.made(param).wait(), IoError);
    EXPECT_NO_THROW(rank.device().stream(device::StreamKind::kGather).synchronize());
    encoded.forget_failures();
    EXPECT_FALSE(encoded.has(param));
    encoded.start_encode(param, param.shard(),
                         Pending::failed(std::make_exception_ptr(IoError("x"))));
    EXPECT_THROW(encoded.made(param).wait(), IoError);
    encoded.forget_failures();
    encoded.start_encode(param, param.shard(), {});
    EXPECT_NO_THROW(encoded.made(param).wait());
  });
}

TEST_P(EncodedOn, TheErrorIsThatOfThisRanksShardsAndItsWorstParameterIsNamed) {
  run_ranks(2, [&](Group& group) {
    CoordinatorFixture rank(group, equal_layers(3, kLayerNumel), make_options(0, 0), GetParam(),
                            nullptr, {}, nullptr, true);
    EXPECT_EQ(rank.take_stats().quant_error.param, "");
    for (int step = 0; step < 3; ++step) {
      rank.train();
      double error_sum = 0;
      double value_sum = 0;
      double worst = -1;
      std::string name;
      for (int id = 0; id < 3; ++id) {
        shard::Param& param = rank.params()[id];
        param.updated().wait();
        const auto* const shard = reinterpret_cast<const float*>(param.shard());
        const std::vector<float> values(shard, shard + param.layout().shard_numel());
        const std::vector<float> decoded = comm::through_plain_codec(values);
        double errors = 0;
        double squares = 0;
        for (std::size_t i = 0; i < values.size(); ++i) {
          errors += std::pow(static_cast<double>(decoded[i]) - static_cast<double>(values[i]), 2);
          squares += std::pow(static_cast<double>(values[i]), 2);
        }
        error_sum += errors;
        value_sum += squares;
        if (std::sqrt(errors / squares) > worst) {
          worst = std::sqrt(errors / squares);
          name = param.name();
        }
      }
      rank.end_step_and_update();  // and the next gathers begin
      const QuantError error = rank.take_stats().quant_error;
      EXPECT_EQ(error.param, name);
      EXPECT_EQ(error.worst, worst);
      EXPECT_EQ(error.relative, std::sqrt(error_sum / value_sum));
      EXPECT_GT(error.relative, 0);
    }
  });
}

}  // namespace
}  // namespace tessera::coordinator
