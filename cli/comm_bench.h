// Times the collectives of one or more backends: what `tessera bench-comm` measures and prints.
//
// Backends take turns at each collective and size, so that what else the machine does meets all of
// them. Every collective is checked before it is timed: each element of its result must be the one
// that the inputs of all ranks give, else CommError. Times are of single calls: a round starts
// behind a barrier, and counts as long as its slowest rank took. Rates are of as many calls one
// behind the other, none of which is waited for before the last is started, as training makes them.
// The numbers are the same on every rank.
//
// Shards and gradients are what is sent, so that ranks which share memory read it in place. What
// they could reach at best is timed beside the all-gather: "memcpy", the same bytes to the same
// ranks at the same time, each rank straight out of the others' memory; for GPUs, as many bytes as
// all ranks get, copied by one of them inside its GPU.
//
// Threads: collective; call it on every rank with the same arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/comm/peer_memory.h"
#include "tessera/core/clock.h"
#include "tessera/device/device.h"

namespace tessera::cli {

struct CommBenchOptions {
  // Bytes of the larger side of a collective, rounded down to whole elements for every rank.
  std::vector<std::size_t> sizes_bytes;
  int num_rounds = 10;
};

// A backend, in a world of its own.
struct CommBenchWorld {
  comm::Group* group = nullptr;
  device::Device* device = nullptr;         // gives the memory that the backend works on
  const comm::PeerMemory* peers = nullptr;  // for "memcpy"; null: not timed here
};

struct CommBenchRow {
  std::string collective;
  std::size_t bytes = 0;  // 0: the collective carries no data
  double median_us = 0;   // 0: not timed
  double min_us = 0;
  double streamed_us = 0;        // for each of many calls, one behind the other
  std::uint64_t wire_bytes = 0;  // payload sent for one call by the rank that sends most

  // Data per second of calls one behind the other, in 1e9 bytes.
  double gigabytes_per_s() const {
    return streamed_us > 0 ? static_cast<double>(bytes) / streamed_us * 1e-3 : 0;
  }
};

// One collective of one size, by world.
using CommBenchLine = std::vector<CommBenchRow>;

// The worlds are of the same ranks. `on_line` is called on every rank with each line as soon as it
// is known.
std::vector<CommBenchLine> measure_collectives(
    std::span<const CommBenchWorld> worlds, const Clock& clock, const CommBenchOptions& options,
    const std::function<void(const CommBenchLine&)>& on_line = {});

// Lower median: one of the values.
double median_of(std::vector<double> values);

// Why a backend is not among those that were measured.
struct CommBenchGap {
  std::string backend;
  std::string reason;
};

struct CommBenchRun {
  std::vector<std::string> backends;  // in the order of worlds
  int num_ranks = 1;
  int num_rounds = 0;
  std::vector<CommBenchGap> gaps = {};
};

// The table's head, and one of its lines: it is printed as it grows. Several backends are side by
// side, each with how many times as fast as Gloo it is.
std::string comm_bench_head(const CommBenchRun& run);
std::string comm_bench_text(const CommBenchRun& run, const CommBenchLine& line);
std::string comm_bench_json(const CommBenchRun& run, std::span<const CommBenchLine> lines);

}  // namespace tessera::cli
