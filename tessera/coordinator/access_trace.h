// The order in which units were used: what prefetching is planned from.
//
// A use is one forward or one backward of one unit; uses appear in the order of their begins. Their
// ends are left out on purpose: in backward a use ends when gradients have come, which may differ
// between ranks (a rank need not touch every parameter), while the begins are the program's own.
// So ranks have the same trace because they run the same program; Group's tags find out if they
// do not.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera::coordinator {

using UnitId = std::int32_t;
// kInference: a forward whose backward will not come.
enum class Phase : std::uint8_t { kForward, kBackward, kInference };
inline constexpr std::size_t kNumPhases = 3;
std::string_view to_string(Phase phase);

struct Use {
  UnitId unit = 0;
  Phase phase = Phase::kForward;
  bool operator==(const Use&) const = default;
};

// kRecord: uses are written down. kComplete: uses are compared with the trace and a plan runs.
// kInvalid: this step has departed from the trace; it goes on without a plan, and the next records.
enum class TraceMode : std::uint8_t { kRecord, kComplete, kInvalid };
std::string_view to_string(TraceMode mode);

class AccessTrace {
 public:
  TraceMode mode() const { return mode_; }
  const std::vector<Use>& uses() const { return uses_; }
  // The index of the next use in the trace; in kRecord the number of uses so far.
  std::size_t position() const { return position_; }

  // One more use. kRecord: appends. kComplete: true if it is the expected one, else the mode
  // becomes kInvalid and false comes back, with position() left at the use that was expected.
  // kInvalid: false.
  bool advance(const Use& use);
  // End of a step. kRecord with at least one use becomes kComplete; kInvalid becomes kRecord, with
  // the old trace forgotten; kComplete stays (a step may end early). The next step begins at
  // position 0.
  void end_step();
  // Something happened that no plan foresaw (an exception): as if the step had departed.
  void invalidate() { mode_ = TraceMode::kInvalid; }

 private:
  TraceMode mode_ = TraceMode::kRecord;
  std::vector<Use> uses_;
  std::size_t position_ = 0;
};

}  // namespace tessera::coordinator
