#include "tessera/engine/init.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>

#include "tessera/core/counter_random.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera {
namespace {

// Elements that are made at a time, so that the memory for a range is its own and nothing more.
constexpr std::size_t kChunk = 4096;

void check_rule(const Init& init, const std::string& name, DType dtype) {
  TESSERA_INVARIANT(init.kind != Init::Kind::kModule, "parameter ", tessera::in_quotes(name),
                    ": what a module's constructor made cannot be made by rule");
  TESSERA_CHECK(std::isfinite(init.value), ConfigError, "parameter ", tessera::in_quotes(name),
                ": initial value ", init.value, " is not a finite number");
  TESSERA_CHECK(init.kind == Init::Kind::kConstant || init.value >= 0, ConfigError, "parameter ",
                tessera::in_quotes(name), ": the ",
                init.kind == Init::Kind::kNormal ? "standard deviation " : "bound ", init.value,
                " of its initial values is negative");
  const bool is_floating = dtype == DType::kFloat32 || dtype == DType::kBFloat16 ||
                           dtype == DType::kFloat16 || dtype == DType::kFloat64;
  TESSERA_CHECK(is_floating, ConfigError, "parameter ", tessera::in_quotes(name),
                ": no rule makes values of type ", to_string(dtype),
                "; let its module make them (Init::module())");
}

// `value` times what the random stream gives for elements from `begin` on.
void make_values(const Init& init, const CounterRandom& random, std::uint64_t begin,
                 std::span<float> drawn, std::span<double> values) {
  switch (init.kind) {
    case Init::Kind::kModule:  // refused above
    case Init::Kind::kSource:  // read above
    case Init::Kind::kConstant:
      std::fill(values.begin(), values.end(), init.value);
      return;
    case Init::Kind::kNormal:
      random.fill_normal(begin, drawn);
      std::transform(drawn.begin(), drawn.end(), values.begin(),
                     [&init](float x) { return init.value * x; });
      return;
    case Init::Kind::kUniform:
      random.fill_uniform(begin, drawn);
      std::transform(drawn.begin(), drawn.end(), values.begin(),
                     [&init](float x) { return init.value * (2.0 * x - 1.0); });
      return;
  }
}

// Element by element through memcpy: a shard in host memory need not be aligned for its type.
template <typename Element, typename Round>
void store(std::span<const double> values, Round round, std::byte* out) {
  for (const double value : values) {
    const Element element = round(value);
    std::memcpy(out, &element, sizeof(element));
    out += sizeof(element);
  }
}

void store_as(DType dtype, std::span<const double> values, std::byte* out) {
  switch (dtype) {
    case DType::kFloat32:
      store<float>(values, [](double value) { return static_cast<float>(value); }, out);
      return;
    case DType::kBFloat16:
      store<BFloat16>(
          values, [](double value) { return to_bfloat16(static_cast<float>(value)); }, out);
      return;
    case DType::kFloat16:
      store<Float16>(
          values, [](double value) { return to_float16(static_cast<float>(value)); }, out);
      return;
    case DType::kFloat64:
      store<double>(values, [](double value) { return value; }, out);
      return;
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUInt8:
      TESSERA_INVARIANT(false, "type ", to_string(dtype), " was let through");
  }
}

}  // namespace

void fill_initial(const Init& init, std::uint64_t seed, const std::string& name,
                  shard::ElementRange range, DType dtype, void* out) {
  TESSERA_INVARIANT(range.begin >= 0 && range.numel >= 0, "parameter ", tessera::in_quotes(name),
                    ": elements [", range.begin, ", +", range.numel, ")");
  auto* to = static_cast<std::byte*>(out);
  if (init.kind == Init::Kind::kSource) {
    TESSERA_INVARIANT(init.source != nullptr, "parameter ", tessera::in_quotes(name),
                      ": its values come from a source, and there is none");
    init.source->read(name, range, dtype, to);
    return;
  }
  check_rule(init, name, dtype);
  const CounterRandom random(seed, name);
  std::array<float, kChunk> drawn;
  std::array<double, kChunk> values;
  const auto numel = static_cast<std::size_t>(range.numel);
  for (std::size_t done = 0; done < numel; done += kChunk) {
    const std::size_t count = std::min(kChunk, numel - done);
    make_values(init, random, static_cast<std::uint64_t>(range.begin) + done,
                std::span(drawn).first(count), std::span(values).first(count));
    store_as(dtype, std::span<const double>(values).first(count), to + done * bytes_of(dtype));
  }
}

}  // namespace tessera
