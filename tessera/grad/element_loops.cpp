#include "tessera/grad/element_loops.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tessera/core/error.h"

namespace tessera::grad {
namespace {

inline float to_float(float value) { return value; }
using tessera::to_float;

template <typename To>
To from_float(float value) {
  if constexpr (std::is_same_v<To, BFloat16>) {
    return to_bfloat16(value);
  } else if constexpr (std::is_same_v<To, Float16>) {
    return to_float16(value);
  } else {
    return value;
  }
}

// Calls `use` with a null pointer of the type that `dtype` stands for.
template <typename Use>
void with_type(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::kFloat32:
      return use(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return use(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return use(static_cast<Float16*>(nullptr));
    default:
      TESSERA_INVARIANT(false, to_string(dtype), " is no type of a gradient");
  }
}

template <typename To, typename From>
void convert_loop(To* __restrict to, const From* __restrict from, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    to[i] = from_float<To>(to_float(from[i]));
  }
}

template <typename Value>
void add_loop(float* __restrict sum, const Value* __restrict value, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i) {
    sum[i] += to_float(value[i]);
  }
}

}  // namespace

bool is_gradient_dtype(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

void convert_elements(void* to, DType to_dtype, const void* from, DType from_dtype,
                      std::size_t numel) {
  if (numel == 0) {
    return;
  }
  if (to_dtype == from_dtype) {
    std::memcpy(to, from, numel * bytes_of(to_dtype));
    return;
  }
  with_type(to_dtype, [&](auto* to_type) {
    with_type(from_dtype, [&](auto* from_type) {
      convert_loop(static_cast<decltype(to_type)>(to),
                   static_cast<const std::remove_pointer_t<decltype(from_type)>*>(from), numel);
    });
  });
}

void add_elements(float* sum, const void* value, DType value_dtype, std::size_t numel) {
  with_type(value_dtype, [&](auto* type) {
    add_loop(sum, static_cast<const std::remove_pointer_t<decltype(type)>*>(value), numel);
  });
}

}  // namespace tessera::grad
