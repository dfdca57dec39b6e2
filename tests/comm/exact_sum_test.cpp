#include "tessera/comm/exact_sum.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/comm/reference.h"

namespace tessera::comm {
namespace {

// Around the block length on both sides, so that block borders show.
TEST(ExactSum, EqualsThePlainLoopForEveryTypeAndSize) {
  for (const std::size_t numel : {0, 1, 7, 2047, 2048, 2049, 5000}) {
    for (const int num_parts : {1, 2, 3, 8}) {
      for (const auto& [dtype, out] : {std::pair{DType::kFloat32, DType::kFloat32},
                                       {DType::kBFloat16, DType::kFloat32},
                                       {DType::kBFloat16, DType::kBFloat16},
                                       {DType::kFloat16, DType::kFloat16},
                                       {DType::kFloat64, DType::kFloat64},
                                       {DType::kInt64, DType::kInt64}}) {
        const auto parts = reference::arrays(numel, num_parts, numel, dtype);
        std::vector<std::byte> sum(numel * bytes_of(out));
        reduce_in_rank_order({parts.data(), dtype, num_parts, numel}, sum.data(), out,
                             Reduction::kSum);
        EXPECT_TRUE(sum == reference::rank_order_sum(numel, num_parts, 0, numel, dtype, out))
            << numel << " x " << num_parts << " " << to_string(dtype);
      }
    }
  }
}

// 1e8 + 1 - 1e8 is 0 in fp32 and 1 in the other order: the test data must notice an order.
TEST(ExactSum, TheOrderIsThatOfTheRanks) {
  const std::vector<float> parts = {1e8F, 1.0F, -1e8F};
  float sum = -1;
  reduce_in_rank_order({parts.data(), DType::kFloat32, 3, 1}, &sum, DType::kFloat32,
                       Reduction::kSum);
  EXPECT_EQ(sum, 0.0F);
  const std::vector<float> other = {1e8F, -1e8F, 1.0F};
  reduce_in_rank_order({other.data(), DType::kFloat32, 3, 1}, &sum, DType::kFloat32,
                       Reduction::kSum);
  EXPECT_EQ(sum, 1.0F);
}

// bf16 keeps 8 bits: adding 256 ones of it in bf16 would stop at 256 + 1 == 256.
TEST(ExactSum, HalfPrecisionIsAddedInFloatAndRoundedOnce) {
  std::vector<BFloat16> parts(300, to_bfloat16(1.0F));
  parts[0] = to_bfloat16(256.0F);
  float sum = 0;
  reduce_in_rank_order({parts.data(), DType::kBFloat16, 300, 1}, &sum, DType::kFloat32,
                       Reduction::kSum);
  EXPECT_EQ(sum, 555.0F);
  BFloat16 rounded{};
  reduce_in_rank_order({parts.data(), DType::kBFloat16, 300, 1}, &rounded, DType::kBFloat16,
                       Reduction::kSum);
  EXPECT_EQ(rounded.bits, to_bfloat16(555.0F).bits);
}

TEST(ExactSum, NegativeZeroSurvivesAndIntegersWrapAround) {
  const std::vector<float> zeros = {-0.0F, -0.0F};
  float sum = 1;
  reduce_in_rank_order({zeros.data(), DType::kFloat32, 2, 1}, &sum, DType::kFloat32,
                       Reduction::kSum);
  EXPECT_TRUE(std::signbit(sum));
  const std::vector<std::int32_t> large = {std::numeric_limits<std::int32_t>::max(), 1};
  std::int32_t wrapped = 0;
  reduce_in_rank_order({large.data(), DType::kInt32, 2, 1}, &wrapped, DType::kInt32,
                       Reduction::kSum);
  EXPECT_EQ(wrapped, std::numeric_limits<std::int32_t>::min());
}

TEST(ExactSum, MaxAndMinPropagateNaNFromAnyRank) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int where = 0; where < 3; ++where) {
    std::vector<float> parts = {1.0F, 5.0F, -3.0F};
    parts[static_cast<std::size_t>(where)] = nan;
    for (const Reduction reduction : {Reduction::kMax, Reduction::kMin, Reduction::kSum}) {
      float result = 0;
      reduce_in_rank_order({parts.data(), DType::kFloat32, 3, 1}, &result, DType::kFloat32,
                           reduction);
      EXPECT_TRUE(std::isnan(result)) << where;
    }
  }
}

TEST(ExactSum, TheResultMayReplaceTheFirstPart) {
  auto parts = reference::arrays(5, 3, 5000, DType::kFloat32);
  reduce_in_rank_order({parts.data(), DType::kFloat32, 3, 5000}, parts.data(), DType::kFloat32,
                       Reduction::kSum);
  parts.resize(5000 * 4);
  EXPECT_TRUE(parts == reference::rank_order_sum(5, 3, 0, 5000, DType::kFloat32, DType::kFloat32));
}

TEST(ExactSum, ANarrowingResultIsRefused) {
  EXPECT_THROW(check_reduction(DType::kFloat32, DType::kBFloat16), ConfigError);
  EXPECT_THROW(check_reduction(DType::kInt64, DType::kFloat32), ConfigError);
  EXPECT_NO_THROW(check_reduction(DType::kFloat16, DType::kFloat32));
}

}  // namespace
}  // namespace tessera::comm
