// Uniform tokens, as bench/peers.py makes them; internal to models.
//
// Sequence number n (step * batch + index) is torch.randint(0, vocabulary, (sequence + 1,)) from a
// generator with manual_seed(1000 + n + seed * 2654435769). The factor is 2^32 over the golden
// ratio: torch's generator takes 32 bits of its seed, and this spreads the runs of small seeds over
// them as far from each other as can be.
//
// Threads: read() from any thread; every sequence has a generator of its own.
#pragma once

#include <memory>

#include "models/data.h"

namespace tessera::models {

std::unique_ptr<TokenSource> make_random_tokens(const DataOptions& options);

}  // namespace tessera::models
