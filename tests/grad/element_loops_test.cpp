// The loops over gradients against one element at a time, for every length around a vector's.
#include "tessera/grad/element_loops.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::grad {
namespace {

float read(const void* data, DType dtype, std::size_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const BFloat16*>(data)[i]);
    case DType::kFloat16:
      return to_float(static_cast<const Float16*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

void write(void* data, DType dtype, std::size_t i, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<BFloat16*>(data)[i] = to_bfloat16(value);
      break;
    case DType::kFloat16:
      static_cast<Float16*>(data)[i] = to_float16(value);
      break;
    default:
      static_cast<float*>(data)[i] = value;
  }
}

std::vector<std::uint32_t> random_elements(DType dtype, std::size_t numel) {
  std::vector<std::uint32_t> memory(numel + 1);
  std::mt19937 random(5);
  for (std::size_t i = 0; i < numel; ++i) {
    const float magnitude = std::ldexp(1.0F, static_cast<int>(random() % 40) - 20);
    write(memory.data(), dtype, i, magnitude * (static_cast<float>(random() % 2001) / 1000 - 1));
  }
  return memory;
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

TEST(ElementLoops, ConvertAsOneElementDoes) {
  for (const DType from : kTypes) {
    for (const DType to : kTypes) {
      for (std::size_t numel = 0; numel < 70; ++numel) {
        const auto source = random_elements(from, numel);
        std::vector<std::uint32_t> result(numel + 1, 0xabababab);
        std::vector<std::uint32_t> expected = result;
        for (std::size_t i = 0; i < numel; ++i) {
          write(expected.data(), to, i, read(source.data(), from, i));
        }
        convert_elements(result.data(), to, source.data(), from, numel);
        ASSERT_EQ(result, expected) << to_string(from) << " to " << to_string(to) << ", " << numel;
      }
    }
  }
}

TEST(ElementLoops, AddInFloat) {
  for (const DType dtype : kTypes) {
    for (std::size_t numel = 0; numel < 70; ++numel) {
      const auto values = random_elements(dtype, numel);
      std::vector<float> sum(numel + 1, 0.1F);
      std::vector<float> expected = sum;
      for (std::size_t i = 0; i < numel; ++i) {
        expected[i] = expected[i] + read(values.data(), dtype, i);
      }
      add_elements(sum.data(), values.data(), dtype, numel);
      ASSERT_EQ(std::memcmp(sum.data(), expected.data(), sum.size() * sizeof(float)), 0);
    }
  }
}

TEST(ElementLoops, KnowWhichTypesGradientsHave) {
  for (const DType dtype : kTypes) {
    EXPECT_TRUE(is_gradient_dtype(dtype));
  }
  float value = 0;
  for (const DType dtype : {DType::kFloat64, DType::kInt64, DType::kInt32, DType::kUInt8}) {
    EXPECT_FALSE(is_gradient_dtype(dtype));
    EXPECT_THROW(add_elements(&value, &value, dtype, 1), InternalError);
  }
}

}  // namespace
}  // namespace tessera::grad
