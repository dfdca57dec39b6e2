// Initial values by rule: each element from (seed, parameter name, element index) alone, so that
// every rank makes only its own, and every number of ranks makes the same model. Or from a source,
// such as files, of which every rank reads only its own.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "tessera/core/dtype.h"
#include "tessera/shard/layout.h"

namespace tessera {

// Where values come from that no rule makes.
//
// Threads: any.
class InitSource {
 public:
  virtual ~InitSource() = default;
  // Writes `range` of the parameter, in memory order, to host memory, rounded to `dtype`. Needs
  // memory that does not grow with the range. Throws what is wrong with where they come from.
  virtual void read(const std::string& name, shard::ElementRange range, DType dtype,
                    std::byte* out) const = 0;
};

struct Init {
  enum class Kind : std::uint8_t {
    kModule,    // what the module's constructor made, on rank 0
    kConstant,  // value
    kNormal,    // mean 0, standard deviation value
    kUniform,   // in [-value, value), before it is rounded to a narrower type
    kSource,    // what the source says
  };
  Kind kind = Kind::kModule;
  double value = 0;
  std::shared_ptr<const InitSource> source = nullptr;

  static Init module() { return {}; }
  static Init constant(double value) { return {Kind::kConstant, value}; }
  static Init normal(double deviation) { return {Kind::kNormal, deviation}; }
  static Init uniform(double bound) { return {Kind::kUniform, bound}; }
  static Init from(std::shared_ptr<const InitSource> source) {
    return {Kind::kSource, 0, std::move(source)};
  }
};

// Writes `range` of the parameter, in host memory, rounded to `dtype`. REQUIRES: not kModule.
void fill_initial(const Init& init, std::uint64_t seed, const std::string& name,
                  shard::ElementRange range, DType dtype, void* out);

}  // namespace tessera
