// Shards that are stored as blocks: how they are cut, which parameters are, and that tiles of any
// cut make the blocks of the whole parameter.
#include "tessera/shard/stored_shard.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tests/support/rank_fixture.h"

namespace tessera::shard {
namespace {

TEST(StoredFormat, PiecesAreWholeStepsAndTheFormulaHolds) {
  for (const int bits : {4, 8}) {
    for (const std::int64_t block : {32, 96, 128}) {
      const StoredFormat format{bits, block};
      for (const std::int64_t numel :
           {std::int64_t{0}, std::int64_t{1}, 8 * block, 8 * block + 1, std::int64_t{100000}}) {
        for (const int ranks : {1, 2, 3, 7}) {
          const Layout layout(numel, ranks, DType::kBFloat16, format);
          EXPECT_EQ(layout.shard_numel() % (8 * block), 0);
          EXPECT_GE(layout.padded_numel(), numel);
          EXPECT_TRUE(numel == 0 || (layout.shard_numel() - 8 * block) * ranks < numel);
          EXPECT_EQ(static_cast<std::int64_t>(layout.shard_bytes()),
                    layout.shard_numel() * bits / 8 + layout.shard_numel() / block * 2);
          EXPECT_EQ(
              static_cast<std::size_t>(layout.stored_numel()) * bytes_of(layout.stored_dtype()),
              layout.shard_bytes());
          EXPECT_EQ(layout.full_bytes(), static_cast<std::size_t>(layout.padded_numel()) * 2);
          EXPECT_EQ(layout.gathered_bytes(Tier::kDevice), layout.full_bytes());
          EXPECT_EQ(layout.gathered_bytes(Tier::kHost), layout.full_bytes() + layout.shard_bytes());
        }
      }
    }
  }
}

TEST(StoredRule, TakesFrozenWeightsOfTwoDimsThatANameMatches) {
  Config config;
  config.set("quant.frozen_bits", std::int64_t{4});
  const StoredRule all = StoredRule::from(config);
  EXPECT_EQ(all.format_of("a.weight", false, 1024, 2), (StoredFormat{4, 128}));
  EXPECT_FALSE(all.format_of("a.weight", true, 1024, 2).is_encoded());
  EXPECT_FALSE(all.format_of("a.weight", false, 1023, 2).is_encoded());
  EXPECT_FALSE(all.format_of("a.bias", false, 4096, 1).is_encoded());
  EXPECT_FALSE(StoredRule().format_of("a.weight", false, 1024, 2).is_encoded());
  config.apply_flag("quant.frozen_names=a.*,*.up.weight");
  const StoredRule some = StoredRule::from(config);
  EXPECT_TRUE(some.format_of("a.weight", false, 1024, 2).is_encoded());
  EXPECT_TRUE(some.format_of("b.0.up.weight", false, 1024, 2).is_encoded());
  EXPECT_FALSE(some.format_of("b.0.down.weight", false, 1024, 2).is_encoded());
}

TEST(StoredRule, AStarStandsForAnyRunOfCharacters) {
  EXPECT_TRUE(StoredRule::matches("a*c*", "abcbc"));
  EXPECT_TRUE(StoredRule::matches("*", ""));
  EXPECT_TRUE(StoredRule::matches("a*b*c", "aXbXbXc"));
  EXPECT_FALSE(StoredRule::matches("a*b", "abc"));
  EXPECT_FALSE(StoredRule::matches("a", "ab"));
  EXPECT_FALSE(StoredRule::matches("", "a"));
}

class Stored : public testing::TestWithParam<int> {
 protected:
  ParamSpec spec(std::int64_t numel) const {
    ParamSpec spec;
    spec.name = "w";
    spec.numel = numel;
    spec.trainable = false;
    spec.format = {GetParam(), 128};
    spec.codecs.host = quant::make_cpu_block_codec(spec.format.blocks());
    spec.codecs.device = spec.codecs.host;
    return spec;
  }
  std::unique_ptr<Param> param(std::int64_t numel, int rank, int ranks) {
    return std::make_unique<Param>(0, spec(numel), rank, ranks, *device_,
                                   std::make_unique<support::PlainTensor>(&shown_));
  }
  static std::vector<float> values(std::int64_t numel) {
    std::vector<float> all(static_cast<std::size_t>(numel));
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = static_cast<float>((i * 2654435761U >> 7) % 4001) * 1e-3F - 2;
    }
    return all;
  }
  // Of blocks of the whole parameter.
  static std::vector<float> decoded(const Param& param, std::vector<float> all) {
    const auto numel = static_cast<std::int64_t>(all.size());
    std::vector<std::byte> wire(param.host_codec()->wire_bytes(numel));
    param.host_codec()->encode(all.data(), DType::kFloat32, numel, wire.data(), nullptr).wait();
    param.host_codec()->decode(wire.data(), numel, all.data(), DType::kFloat32, nullptr).wait();
    return all;
  }

  const void* shown_ = nullptr;
  std::unique_ptr<device::Device> device_ = device::make_cpu_device({});
};
INSTANTIATE_TEST_SUITE_P(Bits, Stored, testing::Values(4, 8));

TEST_P(Stored, TilesOfAnyCutMakeTheBlocksOfTheWholeParameter) {
  for (const std::int64_t numel : {1024, 1025, 5000, 70001, 200000}) {
    const std::vector<float> all = values(numel);
    for (const int ranks : {1, 2, 3}) {
      for (int rank = 0; rank < ranks; ++rank) {
        const auto one = param(numel, rank, ranks);
        const std::vector<float> expected = decoded(*one, all);
        StoredShard shard(*one);
        const ElementRange range = one->range();
        for (std::int64_t begin = 0; begin < range.numel; begin += 3072) {
          shard.encode(begin, std::min<std::int64_t>(3072, range.numel - begin),
                       all.data() + range.begin + begin);
        }
        std::vector<float> back(static_cast<std::size_t>(range.numel));
        shard.decode(0, range.numel, back.data());
        EXPECT_TRUE(back.empty() || std::memcmp(back.data(), expected.data() + range.begin,
                                                back.size() * sizeof(float)) == 0)
            << numel << " over " << ranks;
        // As a gather decodes it, padding included.
        std::vector<float> slot(static_cast<std::size_t>(one->layout().shard_numel()), -1.0F);
        one->codec()
            ->decode(shard.bytes().data(), one->layout().shard_numel(), slot.data(),
                     DType::kFloat32, nullptr)
            .wait();
        for (std::size_t i = 0; i < slot.size(); ++i) {
          const bool is_real = i < back.size();
          ASSERT_EQ(slot[i], is_real ? back[i] : 0.0F) << i;
        }
      }
    }
  }
}

TEST_P(Stored, AnUpdateKeepsTheBlocksWhoseValuesStay) {
  const auto one = param(70001, 0, 1);
  std::vector<float> all = values(70001);
  StoredShard shard(*one);
  shard.encode(0, 70001, all.data());
  shard.decode(0, 70001, all.data());
  const std::vector<std::byte> before(shard.bytes().begin(), shard.bytes().end());
  shard.update(0, 70001, all.data());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), shard.bytes().begin()));
  all[70000] = 9;
  shard.update(0, 70001, all.data());
  const StoredBytes places(one->layout().format(), one->layout().shard_numel());
  const std::size_t first = places.codes(70000 / 128 * 128, 0).offset;
  const std::size_t scale = places.scales(70000 / 128 * 128, 0).offset;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const bool may_differ = (i >= first && i < first + 128) || (i >= scale && i < scale + 2);
    ASSERT_TRUE(may_differ || before[i] == shard.bytes()[i]) << i;
  }
  float last = 0;
  shard.decode(70000, 1, &last);
  EXPECT_NEAR(last, 9, 9 * 1.0 / 128);  // a scale is rounded up by at most 2^-7
}

TEST_P(Stored, ParametersAreFrozenForGood) {
  const auto one = param(2048, 1, 2);
  EXPECT_FALSE(one->shard_is_full());
  EXPECT_FALSE(param(2048, 0, 1)->shard_is_full());
  EXPECT_NO_THROW(one->set_trainable(false));
  try {
    one->set_trainable(true);
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("'w' is to be trained"), std::string::npos);
  }
  ParamSpec trainable = spec(2048);
  trainable.trainable = true;
  EXPECT_THROW(Param(0, trainable, 0, 1, *device_, std::make_unique<support::PlainTensor>(&shown_)),
               InternalError);
}

}  // namespace
}  // namespace tessera::shard
