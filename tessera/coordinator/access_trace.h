// The order in which units were used: what prefetching is planned from.
//
// A use is one forward or one backward of one unit; uses appear in the order of their begins. A
// trace is the uses of one pass. Ends matter where units run inside units: a forward that ends
// after others have begun says so. Ends of backward uses are left out on purpose: such a use ends
// when gradients are ready, which may differ between ranks, while the begins are the program's own.
// So ranks have the same trace because they run the same program; Group's tags find out if they do
// not.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera::coordinator {

using UnitId = std::int32_t;
// kInference: a forward without a backward.
enum class Phase : std::uint8_t { kForward, kBackward, kInference };
inline constexpr std::size_t kNumPhases = 3;
std::string_view to_string(Phase phase);

struct Use {
  UnitId unit = 0;
  Phase phase = Phase::kForward;
  bool operator==(const Use&) const = default;
};

struct Trace {
  std::vector<Use> uses;
  // By use: how many uses had begun when it ended; its own place + 1 unless others run inside it.
  std::vector<std::uint32_t> open_until;
};

// kRecord: no known trace fits; uses are written down. kComplete: a known trace is followed, and
// its plan runs. kInvalid: a trace miss, and no other known trace fits; the pass goes on without a
// plan, and is written down for the next time.
enum class TraceMode : std::uint8_t { kRecord, kComplete, kInvalid };

}  // namespace tessera::coordinator
