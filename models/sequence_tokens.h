// What every source of tokens does with a request; internal to models.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "models/data.h"
#include "tessera/core/error.h"

namespace tessera::models {

// The number of a sequence, on which it depends. Holds TokenSource::read to what it requires.
inline std::uint64_t sequence_number(const DataOptions& options, std::int64_t step,
                                     std::int64_t index, std::span<const std::int64_t> tokens) {
  TESSERA_INVARIANT(step >= 0 && index >= 0 && index < options.batch &&
                        tokens.size() == static_cast<std::size_t>(options.sequence) + 1,
                    "step ", step, ", sequence ", index, " of ", options.batch, ", room for ",
                    tokens.size(), " tokens of ", options.sequence + 1);
  return static_cast<std::uint64_t>(step) * static_cast<std::uint64_t>(options.batch) +
         static_cast<std::uint64_t>(index);
}

}  // namespace tessera::models
