// Initial values by rule: each element from (seed, parameter name, element index) alone, so that
// every rank makes only its own, and every number of ranks makes the same model.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/core/dtype.h"
#include "tessera/shard/layout.h"

namespace tessera {

struct Init {
  enum class Kind : std::uint8_t {
    kModule,    // what the module's constructor made, on rank 0
    kConstant,  // value
    kNormal,    // mean 0, standard deviation value
    kUniform,   // in [-value, value), before it is rounded to a narrower type
  };
  Kind kind = Kind::kModule;
  double value = 0;

  static Init module() { return {}; }
  static Init constant(double value) { return {Kind::kConstant, value}; }
  static Init normal(double deviation) { return {Kind::kNormal, deviation}; }
  static Init uniform(double bound) { return {Kind::kUniform, bound}; }
};

// Writes `range` of the parameter, in host memory, rounded to `dtype`. REQUIRES: not kModule.
void fill_initial(const Init& init, std::uint64_t seed, const std::string& name,
                  shard::ElementRange range, DType dtype, void* out);

}  // namespace tessera
