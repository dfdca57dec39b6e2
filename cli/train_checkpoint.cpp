#include "cli/train_checkpoint.h"

#include <span>
#include <utility>
#include <vector>

#include "cli/final_save.h"
#include "models/gpt_description.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/comm/group.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

std::uint64_t checksum_of_batch(const TrainPlan& plan, models::TokenSource& data,
                                std::int64_t step) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(plan.model.sequence + 1));
  checkpoint::Xxh3 sum;
  for (std::int64_t i = 0; i < plan.batch.total; ++i) {
    data.read(step, i, tokens);
    sum.add(std::as_bytes(std::span(tokens)));
  }
  return sum.value();
}

std::string ranks_text(int num_ranks) {
  return std::to_string(num_ranks) + (num_ranks == 1 ? " rank" : " ranks");
}

}  // namespace

RunIdentity run_identity(const TrainPlan& plan, models::TokenSource& data, std::int64_t num_done) {
  DataIdentity of_data;
  of_data.sources = plan.data.sources;
  of_data.batch = plan.batch.total;
  of_data.seed = plan.seed;
  of_data.in_epochs = plan.data.order == models::DataOrder::kEpochs;
  of_data.next_batch = checksum_of_batch(plan, data, num_done);
  RunIdentity identity = describe(of_data);
  identity.merge(models::describe(plan.model));
  return identity;
}

void check_resume(const TrainPlan& plan, models::TokenSource& data) {
  if (plan.resume) {
    check_same_run(*plan.resume, run_identity(plan, data, plan.resume->step));
  }
}

Checkpoints::Checkpoints(const TrainPlan& plan, Engine& engine, models::TokenSource& data,
                         Tellers tellers)
    : plan_(plan),
      checkpoint_(*plan.checkpoint),
      engine_(engine),
      data_(data),
      tellers_(std::move(tellers)) {}

std::int64_t Checkpoints::resume() {
  if (!checkpoint_.resume) {
    return 0;
  }
  if (!has_agreed_point()) {
    tellers_.say("--resume: " + tessera::in_quotes(checkpoint_.root) +
                 " has no save yet; the run starts anew");
    return 0;
  }
  LoadOptions options;
  options.partial = checkpoint_.partial;
  const Clock& clock = engine_.runtime().clock();
  const std::int64_t start_ns = clock.now_ns();
  const LoadResult loaded =
      engine_.load(plan_.resume ? plan_.resume->path : checkpoint_.root, options);
  saved_step_ = loaded.step;
  const double seconds = static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
  tellers_.say("resumed from " + loaded.path + ": step " + std::to_string(loaded.step) + " of " +
               std::to_string(plan_.num_steps) + ", saved by " + ranks_text(loaded.num_ranks) +
               load_time_text(seconds, loaded.read_s));
  for (const std::string& note : loaded.notes) {
    tellers_.say(note);
  }
  if (loaded.step >= plan_.num_steps) {
    tellers_.say("all " + std::to_string(plan_.num_steps) + " steps are done; --steps N with a " +
                 "larger N trains more");
  }
  return loaded.step;
}

// Each rank has looked for itself, maybe at different times: a directory that is shared over a
// network, or a run that still saves. load() takes the save that rank 0 names.
bool Checkpoints::has_agreed_point() {
  std::uint8_t has_point = plan_.resume ? 1 : 0;
  comm::Group& group = engine_.runtime().group();
  if (group.size() > 1) {
    comm::CallOptions call;
    call.label.unit = "newest checkpoint";
    group.broadcast_host(&has_point, sizeof(has_point), 0, call);
  }
  return has_point != 0;
}

SaveOptions Checkpoints::options_at(std::int64_t step) {
  SaveOptions options;
  options.keep = checkpoint_.keep;
  options.user = run_identity(plan_, data_, step);
  options.memory_bytes = checkpoint_.memory_bytes;
  options.lock = plan_.root_lock;
  return options;
}

void Checkpoints::after_step(std::int64_t step, bool is_last) {
  take_outcomes();
  if (is_last || checkpoint_.save_every == 0 || step % checkpoint_.save_every != 0) {
    return;
  }
  SaveRecord record;
  record.step = step;
  // All ranks throw alike, or none does.
  try {
    if (checkpoint_.is_async) {
      start_save(step);
      return;
    }
    record = save_now(step, checkpoint_.root);
  } catch (const IoError& error) {
    record.failure = error.what();
  } catch (const ConfigError& error) {  // another rank's refusal
    record.failure = error.what();
  }
  add(record);
}

SaveRecord Checkpoints::save_now(std::int64_t step, const std::string& root) {
  const Clock& clock = engine_.runtime().clock();
  const std::int64_t start_ns = clock.now_ns();
  SaveRecord record;
  record.step = step;
  record.path = engine_.save(root, options_at(step));
  record.seconds = static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
  return record;
}

void Checkpoints::start_save(std::int64_t step) {
  const SavePrediction expected = engine_.start_save(checkpoint_.root, options_at(step));
  take_outcomes();  // of one that had to end first
  // Where the first one has found no rate, because nothing got to the disk, the next one says it.
  if (!predicted_ || (!predicted_->stall_s && expected.stall_s)) {
    predicted_ = expected;
    tellers_.say(expected_save_text({expected.bytes, expected.buffer_bytes, expected.stall_s}));
  }
}

void Checkpoints::take_outcomes() {
  while (const std::optional<SaveOutcome> outcome = engine_.take_save_outcome()) {
    add(*outcome);
  }
}

void Checkpoints::add(const SaveOutcome& outcome) {
  SaveRecord record;
  record.step = outcome.step;
  record.path = outcome.path;
  record.failure = outcome.failure;
  record.seconds = outcome.seconds;
  record.is_async = true;
  record.bytes = outcome.bytes;
  record.stall_s = outcome.stall_s;
  add(record);
}

void Checkpoints::add(const SaveRecord& record) {
  totals_.add(record);
  if (record.failure.empty()) {
    saved_step_ = record.step;
  } else {
    tellers_.warn(failed_save_text(record));
  }
}

std::string Checkpoints::finish(std::int64_t step, bool save) {
  while (const std::optional<SaveOutcome> outcome = engine_.finish_save()) {
    add(*outcome);
  }
  if (!save || step == saved_step_) {
    return "";
  }
  SaveRecord record;
  const RescuedSave saved =
      save_or_rescue({"--checkpoint", "the run is", checkpoint_.root},
                     [&](const std::string& root) { record = save_now(step, root); });
  if (saved.path.empty()) {
    record.step = step;
    record.failure = saved.failure;
  }
  totals_.add(record);
  return saved.failure;
}

}  // namespace tessera::cli
