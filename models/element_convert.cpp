#include "models/element_convert.h"

#include <cstring>

#include "tessera/core/error.h"

namespace tessera::models {
namespace {

float as_float(float value) { return value; }
float as_float(BFloat16 value) { return to_float(value); }
float as_float(Float16 value) { return to_float(value); }

void set(float value, float& element) { element = value; }
void set(float value, BFloat16& element) { element = to_bfloat16(value); }
void set(float value, Float16& element) { element = to_float16(value); }

// Calls work with an element of the type.
template <typename Work>
void with_type(DType dtype, Work work) {
  switch (dtype) {
    case DType::kFloat32:
      work(float{});
      return;
    case DType::kBFloat16:
      work(BFloat16{});
      return;
    case DType::kFloat16:
      work(Float16{});
      return;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUInt8:
      TESSERA_INVARIANT(false, "weights of type ", to_string(dtype));
  }
}

}  // namespace

void convert_elements(DType from_type, std::span<const std::byte> from, DType to_type,
                      std::byte* to) {
  if (from_type == to_type) {
    if (!from.empty()) {
      std::memcpy(to, from.data(), from.size());
    }
    return;
  }
  with_type(from_type, [&](auto source) {
    with_type(to_type, [&](auto target) {
      for (std::size_t at = 0; at < from.size(); at += sizeof(source)) {
        std::memcpy(&source, from.data() + at, sizeof(source));
        set(as_float(source), target);
        std::memcpy(to, &target, sizeof(target));
        to += sizeof(target);
      }
    });
  });
}

}  // namespace tessera::models
