// How long updates will wait for a save beside training, from bytes and rates alone.
//
// The writer takes tensors in their order until the first update asks, and then first what updates
// ask for. So an update waits for what it changes, as far as that is neither written by then nor
// has room in the buffer; what no update changes, such as frozen parameters, costs it nothing.
//
// Threads: plain data and pure functions.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::checkpoint {

// Of one rank's part of a save, in the order in which it is written.
class SaveBytes {
 public:
  void add(std::uint64_t bytes, bool is_changed_by_updates);
  std::uint64_t total() const { return total_; }
  std::uint64_t changing() const { return changing_; }
  // Of the changing ones, how many lie in the first so many.
  std::uint64_t changing_in_first(std::uint64_t bytes) const;

 private:
  struct Stretch {
    std::uint64_t bytes = 0;
    bool is_changed_by_updates = false;
  };
  std::vector<Stretch> stretches_;  // neighbours differ
  std::uint64_t total_ = 0;
  std::uint64_t changing_ = 0;
};

struct SavePace {
  std::uint64_t written_bytes = 0;  // so far
  std::uint64_t buffer_bytes = 0;
  double bytes_per_s = 0;      // of the writer
  double before_update_s = 0;  // from now until the first update asks
};

// Seconds. REQUIRES: bytes_per_s > 0.
double predicted_stall_s(const SaveBytes& save, const SavePace& pace);

}  // namespace tessera::checkpoint
