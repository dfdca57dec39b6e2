// What a run will be and what it was like: printed by rank 0 at its beginning and its end.
//
// Threads: plain data.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cli/metrics.h"
#include "cli/train_compare.h"
#include "tessera/core/dtype.h"
#include "tessera/core/ledger.h"
#include "tessera/device/device.h"
#include "tessera/planner/memory_plan.h"

namespace tessera::cli {

struct ModelBytes {
  std::int64_t num_params = 0;     // elements
  std::int64_t num_trainable = 0;  // of them
  DType dtype = DType::kFloat32;
  int num_states = 0;  // fp32 numbers that the optimizer keeps per trainable element

  // What training holds when nothing is sharded: low-precision parameters have fp32 masters beside
  // them; gradients are summed in fp32. Activations are not in it.
  std::int64_t unsharded(Role role) const;
};

struct RunHead {
  std::string preset;
  std::string precision;
  std::int64_t num_params = 0;
  std::int64_t num_frozen = 0;   // of them
  std::int64_t frozen_bits = 0;  // of an element that is held as blocks; 0: as others are
  bool unsharded = false;
  int num_ranks = 1;
  std::string backend;
  std::string device;
  int num_threads = 1;
  std::int64_t num_steps = 0;
  std::int64_t num_epochs = 0;  // 0: steps were asked for
  std::int64_t sequences_per_epoch = 0;
  std::int64_t num_evaluated = 0;  // sequences of one evaluation
  std::int64_t batch = 0;          // sequences of all ranks
  std::int64_t accumulate = 1;
  std::int64_t sequence = 0;
  std::string data;
  std::string eval_data;
};

std::string head_text(const RunHead& head);
// After --verify; `equal`: to the bit.
std::string verified_text(const RunHead& head, Against against, bool equal);

// Sums over the steps of this rank.
class RunTotals {
 public:
  void add(const StepMetrics& metrics);

  std::int64_t num_steps() const { return static_cast<std::int64_t>(step_s_.size()); }
  double median_step_s() const;
  // Of all steps that were shown, and their whole time.
  double tokens_per_s() const;
  std::string text() const;

 private:
  std::vector<double> step_s_;
  double first_loss_ = 0;
  double last_loss_ = 0;
  std::int64_t num_skipped_ = 0;
  double num_tokens_ = 0;
  double total_s_ = 0;
  double exposed_wait_s_ = 0;
  std::uint64_t prefetch_hits_ = 0;
  std::uint64_t prefetch_misses_ = 0;
  std::int64_t full_bytes_peak_ = 0;
};

// Bytes of this rank to and from NVMe, over the steps.
class NvmeTotals {
 public:
  void add(Role role, std::uint64_t read_bytes, std::uint64_t written_bytes);
  void end_step();
  std::uint64_t step_read_bytes() const { return step_read_; }
  std::uint64_t step_written_bytes() const { return step_written_; }
  // Means of a step.
  std::uint64_t read_bytes(Role role) const;
  std::uint64_t written_bytes(Role role) const;

 private:
  struct Bytes {
    std::uint64_t read = 0;
    std::uint64_t written = 0;
  };
  std::array<Bytes, kNumRoles> roles_{};
  std::uint64_t step_read_ = 0;  // of the step that has not ended
  std::uint64_t step_written_ = 0;
  std::uint64_t num_steps_ = 0;
};

// What page-locking took, in bytes and in time; empty where there was none.
std::string pinned_text(const device::PinStats& pins);

// What went where: bytes as planned and as held, and those that a step moved.
std::string places_text(const planner::MemoryPlan& placement, const Ledger& ledger,
                        const NvmeTotals& nvme);

// Bytes per tier and role of this rank beside those of unsharded training.
std::string memory_text(const ModelBytes& model, const Ledger& ledger);

}  // namespace tessera::cli
