#include "cli/train_evaluate.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

namespace tessera::cli {
namespace {

struct LossSum {
  double loss = 0;  // times tokens
  double tokens = 0;
};

// In rank order, so that every rank has the same bits.
LossSum sum_over_ranks(const LossSum& mine, Runtime& runtime) {
  const comm::HostGather gathered =
      runtime.group().start_gather_host(std::as_bytes(std::span(&mine, 1)));
  gathered.done.wait();
  LossSum sum;
  for (int rank = 0; rank < runtime.num_ranks(); ++rank) {
    LossSum theirs;
    std::memcpy(&theirs, gathered.bytes.get() + static_cast<std::size_t>(rank) * sizeof theirs,
                sizeof theirs);
    sum.loss += theirs.loss;
    sum.tokens += theirs.tokens;
  }
  return sum;
}

}  // namespace

Evaluation::Evaluation(const TrainPlan& plan, Runtime& runtime)
    : plan_(plan),
      runtime_(runtime),
      data_(models::open_data(plan.evaluation->data)),
      batches_(*data_, plan) {}

double Evaluation::run(Trainer& trainer) {
  const std::int64_t num_sequences = plan_.evaluation->data.batch;
  const std::int64_t most = plan_.batch.per_micro_batch();
  const std::int64_t stride = most * runtime_.num_ranks();
  LossSum mine;
  for (std::int64_t round = 0; round < num_sequences; round += stride) {
    const std::int64_t begin = round + most * runtime_.rank();
    const std::int64_t count = std::min(most, num_sequences - begin);
    if (count > 0) {
      const MicroBatch now = batches_.read(0, {begin, count});
      const auto tokens = static_cast<double>(now.ids.numel());
      mine.loss += trainer.evaluate(now) * tokens;
      mine.tokens += tokens;
    } else {
      static_cast<void>(trainer.evaluate(batches_.read(0, {0, 1})));
    }
  }
  // What it gathered is not the next step's.
  static_cast<void>(trainer.take_stats());
  const LossSum sum = sum_over_ranks(mine, runtime_);
  return sum.loss / sum.tokens;
}

}  // namespace tessera::cli
