#include "tessera/engine/init.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/counter_random.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kSeed = 17;
constexpr std::array kRules = {Init::Kind::kConstant, Init::Kind::kNormal, Init::Kind::kUniform};
constexpr std::array kTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

std::vector<std::byte> made(const Init& init, const std::string& name, std::int64_t begin,
                            std::int64_t numel, DType dtype) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(numel) * bytes_of(dtype));
  fill_initial(init, kSeed, name, {begin, numel}, dtype, bytes.data());
  return bytes;
}

template <typename Element>
std::vector<Element> elements(const std::vector<std::byte>& bytes) {
  std::vector<Element> result(bytes.size() / sizeof(Element));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

std::string message_of(const Init& init, DType dtype) {
  try {
    made(init, "blocks.0.up.weight", 0, 1, dtype);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

TEST(FillInitial, AnyCutIntoRangesGivesTheSameBytes) {
  constexpr std::int64_t kNumel = 9001;  // more than two chunks, and odd
  for (const auto kind : kRules) {
    for (const DType dtype : kTypes) {
      const Init init{kind, 0.02};
      const auto whole = made(init, "head.weight", 0, kNumel, dtype);
      for (const std::int64_t piece : {61L, 128L, 2251L, 4096L, 4097L, kNumel}) {
        std::vector<std::byte> joined;
        for (std::int64_t begin = 0; begin < kNumel; begin += piece) {
          const auto part =
              made(init, "head.weight", begin, std::min(piece, kNumel - begin), dtype);
          joined.insert(joined.end(), part.begin(), part.end());
        }
        ASSERT_TRUE(joined == whole) << to_string(dtype) << ", pieces of " << piece;
      }
    }
  }
}

TEST(FillInitial, ValuesAreThoseOfTheParametersStream) {
  const CounterRandom random(kSeed, "norm.weight");
  const auto normal =
      elements<float>(made(Init::normal(0.25), "norm.weight", 5, 100, DType::kFloat32));
  const auto uniform =
      elements<float>(made(Init::uniform(0.25), "norm.weight", 5, 100, DType::kFloat32));
  std::vector<float> drawn_normal(normal.size()), drawn_uniform(normal.size());
  random.fill_normal(5, drawn_normal);
  random.fill_uniform(5, drawn_uniform);
  for (std::uint64_t i = 0; i < normal.size(); ++i) {  // a quarter: no rounding
    EXPECT_EQ(normal[i], 0.25F * drawn_normal[i]);
    EXPECT_EQ(uniform[i], 0.25F * (2.0F * drawn_uniform[i] - 1.0F));
  }
}

TEST(FillInitial, NamesAndSeedsMakeDifferentValues) {
  const Init init = Init::normal(1);
  const auto base = made(init, "blocks.0.up.weight", 0, 64, DType::kFloat32);
  EXPECT_TRUE(made(init, "blocks.1.up.weight", 0, 64, DType::kFloat32) != base);
  std::vector<std::byte> other(base.size());
  fill_initial(init, kSeed + 1, "blocks.0.up.weight", {0, 64}, DType::kFloat32, other.data());
  EXPECT_TRUE(other != base);
}

TEST(FillInitial, LowPrecisionIsTheRoundedSinglePrecision) {
  const Init init = Init::normal(0.02);
  const auto exact = elements<float>(made(init, "w", 3, 5000, DType::kFloat32));
  const auto brain = elements<BFloat16>(made(init, "w", 3, 5000, DType::kBFloat16));
  const auto half = elements<Float16>(made(init, "w", 3, 5000, DType::kFloat16));
  const auto wide = elements<double>(made(init, "w", 3, 5000, DType::kFloat64));
  int num_rounded = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    ASSERT_EQ(brain[i].bits, to_bfloat16(exact[i]).bits) << i;
    ASSERT_EQ(half[i].bits, to_float16(exact[i]).bits) << i;
    ASSERT_EQ(static_cast<float>(wide[i]), exact[i]) << i;
    // Nearest: half of the last of eight bits.
    ASSERT_LE(std::fabs(to_float(brain[i]) - exact[i]), std::fabs(exact[i]) * 0x1p-8F) << i;
    num_rounded += to_float(brain[i]) != exact[i] ? 1 : 0;
  }
  EXPECT_GT(num_rounded, 4900);  // one in 2^16 needs no rounding
}

TEST(FillInitial, ANormalHasItsDeviationAndAUniformItsBound) {
  constexpr std::int64_t kNumel = 1 << 18;
  double square_sum = 0;
  for (const float x : elements<float>(made(Init::normal(0.02), "w", 0, kNumel, DType::kFloat32))) {
    square_sum += static_cast<double>(x) * x;
  }
  // The estimate's relative deviation is sqrt(2 / n); six of them.
  EXPECT_NEAR(square_sum / kNumel / (0.02 * 0.02), 1, 6 * std::sqrt(2.0 / kNumel));
  float smallest = 1, largest = -1;
  for (const float x : elements<float>(made(Init::uniform(0.5), "w", 0, kNumel, DType::kFloat32))) {
    smallest = std::min(smallest, x);
    largest = std::max(largest, x);
  }
  // The chance that no element comes within 1e-4 of an end is (1 - 1e-4)^n < 1e-11.
  EXPECT_GE(smallest, -0.5F);
  EXPECT_LT(smallest, -0.4999F);
  EXPECT_LT(largest, 0.5F);
  EXPECT_GT(largest, 0.4999F);
}

TEST(FillInitial, AConstantIsEveryElementAndZeroDeviationIsZero) {
  for (const float x :
       elements<float>(made(Init::constant(1), "norm.weight", 9, 70, DType::kFloat32))) {
    EXPECT_EQ(x, 1.0F);
  }
  for (const float x : elements<float>(made(Init::normal(0), "w", 9, 70, DType::kFloat32))) {
    EXPECT_EQ(x, 0.0F);
  }
}

TEST(FillInitial, WritesItsRangeAndNothingElse) {
  std::vector<std::byte> memory(64, std::byte{0x5a});
  fill_initial(Init::constant(0), kSeed, "w", {7, 3}, DType::kBFloat16, memory.data() + 17);
  for (std::size_t i = 0; i < memory.size(); ++i) {
    EXPECT_EQ(memory[i], i >= 17 && i < 23 ? std::byte{0} : std::byte{0x5a}) << i;
  }
  fill_initial(Init::constant(0), kSeed, "w", {7, 0}, DType::kBFloat16, nullptr);
}

// Says which element of which parameter it was asked for.
class Counting final : public InitSource {
 public:
  void read(const std::string& name, shard::ElementRange range, DType dtype,
            std::byte* out) const override {
    EXPECT_EQ(dtype, DType::kInt32);
    for (std::int64_t i = 0; i < range.numel; ++i) {
      const auto value = static_cast<std::int32_t>(static_cast<std::int64_t>(name.size()) * 1000 +
                                                   range.begin + i);
      std::memcpy(out + static_cast<std::size_t>(i) * sizeof(value), &value, sizeof(value));
    }
  }
};

TEST(FillInitial, ASourceIsAskedForTheRangeOfThisParameter) {
  const Init init = Init::from(std::make_shared<Counting>());
  EXPECT_EQ(elements<std::int32_t>(made(init, "norm", 7, 3, DType::kInt32)),
            (std::vector<std::int32_t>{4007, 4008, 4009}));
  EXPECT_THROW(made(Init::from(nullptr), "norm", 7, 3, DType::kInt32), InternalError);
}

TEST(FillInitial, RefusesARuleThatMeansNothingAndNamesTheParameter) {
  EXPECT_EQ(message_of(Init::normal(-1), DType::kFloat32),
            "parameter \"blocks.0.up.weight\": the standard deviation -1 of its initial values is "
            "negative");
  EXPECT_EQ(message_of(Init::uniform(-0.5), DType::kFloat32),
            "parameter \"blocks.0.up.weight\": the bound -0.5 of its initial values is negative");
  EXPECT_NE(message_of(Init::constant(std::numeric_limits<double>::infinity()), DType::kFloat32)
                .find("not a finite number"),
            std::string::npos);
  EXPECT_NE(message_of(Init::constant(1), DType::kInt64).find("Init::module()"), std::string::npos);
  EXPECT_THROW(made(Init::module(), "w", 0, 1, DType::kFloat32), InternalError);
  EXPECT_THROW(fill_initial(Init::constant(1), kSeed, "w", {-1, 1}, DType::kFloat32, nullptr),
               InternalError);
}

}  // namespace
}  // namespace tessera
