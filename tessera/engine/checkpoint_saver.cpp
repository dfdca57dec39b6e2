#include "tessera/engine/checkpoint_saver.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/checkpoint/save_stall.h"
#include "tessera/checkpoint/snapshot.h"
#include "tessera/core/error.h"
#include "tessera/device/host_info.h"
#include "tessera/engine/checkpoint_threads.h"
#include "tessera/engine/rank_tensors.h"
#include "tessera/engine/step_state.h"
#include "tessera/planner/memory_budgets.h"

namespace tessera::engine {
namespace {

using checkpoint::Fragment;
using checkpoint::SnapshotTensor;
using checkpoint::StoredParam;
using checkpoint::StoredRankTensor;
using checkpoint::StoredTensor;

constexpr const char* kSave = "save";

// What a rank waits for its own disk before it votes; less where a collective may last less.
constexpr std::chrono::nanoseconds kVoteInterval = std::chrono::seconds(1);
constexpr double kVotesPerTimeout = 10;

// Of the first save beside training that its buffer does not hold.
constexpr std::uint64_t kBytesBeforeMeasuring = std::uint64_t{48} << 20;
constexpr std::uint64_t kMeasuredBytes = std::uint64_t{2} << 30;
constexpr std::uint64_t kLeastMeasuredBytes = std::uint64_t{16} << 20;
constexpr std::chrono::milliseconds kMeasuringTime(400);

std::string file_name(int rank) {
  char name[40];
  std::snprintf(name, sizeof(name), "rank-%05d.safetensors", rank);
  return name;
}

std::size_t tile_bytes(const checkpoint::TensorEntry& entry) {
  const std::size_t tile = static_cast<std::size_t>(checkpoint::kTileStep) * bytes_of(entry.dtype);
  return (entry.bytes() + tile - 1) / tile * tile;
}

// On a thread of its own; here and now, if there is none to be had. Nobody else has `work`.
template <typename Work>
auto start_beside(Work work) -> std::future<decltype(work())> {
  const auto shared = std::make_shared<Work>(std::move(work));
  const auto run = [shared] { return (*shared)(); };
  try {
    return std::async(std::launch::async, run);
  } catch (const std::system_error&) {
    std::packaged_task<decltype(run())()> task(run);
    task();
    return task.get_future();
  }
}

template <typename Result>
bool is_over(const std::future<Result>& work, std::chrono::nanoseconds limit) {
  return !work.valid() || work.wait_for(limit) == std::future_status::ready;
}

}  // namespace

struct CheckpointSaver::Save {
  // What becomes of what a rank has written: a fragment of a tensor of a parameter, or of what each
  // rank has for itself.
  struct Destination {
    StoredTensor* tensor = nullptr;
    int param = 0;
    StoredRankTensor* of_rank = nullptr;
    std::int64_t numel = 0;  // of what each rank has for itself
  };

  SaveOptions options;
  bool beside_training = false;
  std::int64_t begin_ns = 0;
  checkpoint::SaveBytes bytes;  // of this rank
  checkpoint::Manifest manifest;
  std::vector<SnapshotTensor> tensors;    // until they are being written
  std::vector<Destination> destinations;  // by tensor, the same on all ranks
  std::string directory;
  std::unique_ptr<checkpoint::NewSave> target;  // on rank 0
  // Also of the guard, which stays until no update can ask it.
  std::shared_ptr<checkpoint::Snapshot> snapshot;
  bool is_written = false;  // by all ranks
  std::string path;         // once it is complete
  // On rank 0; they use what is above.
  std::future<void> preparation;        // of the target
  std::future<std::string> completion;  // once it is written
};

CheckpointSaver::CheckpointSaver(EngineContext& context, RankAgreement& ranks, Model& model,
                                 StepDriver& driver, ParamAccess& access)
    : ctx_(context), ranks_(ranks), model_(model), driver_(driver), access_(access) {
  driver_.set_save_votes([this] { return votes(std::chrono::nanoseconds(0)); });
}

CheckpointSaver::~CheckpointSaver() {
  if (save_ && save_->completion.valid()) {
    save_->completion.wait();  // it reads what goes now
  }
  if (save_) {
    ctx_.runtime.logger().warn(
        "the engine goes while a save is written, which is given up; call finish_save() before");
  }
  try {
    drop_guard();
  } catch (const std::exception& error) {
    ctx_.runtime.logger().warn("the last update failed: ", error.what());
    ctx_.params.set_overwrite_guard({});
  }
}

// Nobody may ask it while it goes.
void CheckpointSaver::drop_guard() {
  driver_.finish_update();
  ctx_.params.set_overwrite_guard({});
}

std::string CheckpointSaver::save(const std::string& root, const SaveOptions& options) {
  wait();
  begin(root, options, /*beside_training=*/false);
  std::optional<SaveOutcome> outcome;
  while (!outcome) {
    outcome = wait_and_advance();
  }
  TESSERA_CHECK(outcome->failure.empty(), IoError, outcome->failure);
  return outcome->path;
}

SavePrediction CheckpointSaver::start_save(const std::string& root, const SaveOptions& options) {
  wait();
  begin(root, options, /*beside_training=*/true);
  return predict();
}

void CheckpointSaver::wait() {
  while (save_) {
    if (std::optional<SaveOutcome> outcome = wait_and_advance()) {
      outcomes_.push_back(std::move(*outcome));
    }
  }
}

std::optional<SaveOutcome> CheckpointSaver::finish() {
  wait();
  return take_outcome();
}

std::optional<SaveOutcome> CheckpointSaver::take_outcome() {
  if (outcomes_.empty()) {
    return std::nullopt;
  }
  SaveOutcome outcome = std::move(outcomes_.front());
  outcomes_.pop_front();
  return outcome;
}

void CheckpointSaver::begin(const std::string& root, const SaveOptions& options,
                            bool beside_training) {
  auto save = std::make_unique<Save>();
  save->options = options;
  save->beside_training = beside_training;
  save->begin_ns = ctx_.runtime.clock().now_ns();
  agree([&] {
    ctx_.lifecycle.check_idle("save()");
    TESSERA_CHECK(options.keep >= 1, ConfigError, "save: keep=", options.keep,
                  "; at least the new save has to stay");
    driver_.check_no_gradients_pending("save()");
    access_.check_no_edits("save()");
    drop_guard();
    collect(*save);
  });
  if (ctx_.group.rank() == 0) {
    start_preparing(*save, root);
  }
  wait_for_ranks([&save](std::chrono::nanoseconds limit) {
    return SaveVotes{.num_done = is_over(save->preparation, limit) ? 1.0 : 0.0};
  });
  agree([&] {
    if (save->preparation.valid()) {
      save->preparation.get();
      save->manifest.sequence = save->target->sequence();
    }
  });
  save->directory =
      ranks_.broadcast_text(save->target ? save->target->path() : std::string(), kSave);
  agree([&] { start_writing(*save, beside_training); });
  save_ = std::move(save);
  if (beside_training) {
    ctx_.params.set_overwrite_guard(
        [snapshot = save_->snapshot](int id) { return snapshot->release(id); });
  }
}

void CheckpointSaver::agree(const std::function<void()>& work) {
  ranks_.agree(kSave, [&work] {
    try {
      work();
    } catch (const CommError&) {
      throw;
    } catch (const InternalError&) {
      throw;
    } catch (const ConfigError&) {
      throw;
    } catch (const IoError&) {
      throw;
    } catch (const std::exception& error) {
      const std::string text = error.what();
      throw IoError(detail::concat(
          "save: this rank cannot begin it: ", text.substr(0, text.find('\n')),
          "; free memory and threads of its host, or give a save beside training a smaller "
          "buffer (SaveOptions::memory_bytes, --save-memory)"));
    }
  });
}

void CheckpointSaver::start_preparing(Save& save, const std::string& root) {
  checkpoint::NewSaveOptions options;
  options.keep = save.options.keep;
  options.lock = save.options.lock;
  options.warn = [&logger = ctx_.runtime.logger()](const std::string& text) { logger.warn(text); };
  save.preparation = start_beside([this, &save, root, options, step = driver_.num_steps()] {
    if (removal_.valid()) {
      removal_.get();  // this save may need the room
    }
    save.target = std::make_unique<checkpoint::NewSave>(root, step, options);
  });
}

void CheckpointSaver::collect(Save& save) const {
  checkpoint::Manifest& manifest = save.manifest;
  manifest.step = driver_.num_steps();
  manifest.num_ranks = ctx_.group.size();
  manifest.config = ctx_.runtime.config().changed();
  manifest.user = save.options.user;
  manifest.state = to_text(driver_.state());
  // References to what is in it stay valid.
  manifest.params.resize(static_cast<std::size_t>(ctx_.params.num_params()));
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    collect_param(save, id);
  }
  collect_rank_tensors(save);
  for (const SnapshotTensor& tensor : save.tensors) {
    save.bytes.add(tensor.entry.bytes(), is_changed_by_updates(tensor.owner));
  }
}

bool CheckpointSaver::is_changed_by_updates(int owner) const {
  return owner >= 0 && ctx_.params[owner].trainable();
}

void CheckpointSaver::collect_param(Save& save, int id) const {
  const shard::Param& param = ctx_.params[id];
  const at::Tensor& tensor = model_.tensor(id);
  StoredParam& stored = save.manifest.params[static_cast<std::size_t>(id)];
  stored.name = param.name();
  stored.tied = model_.tied_names(id);
  stored.shape = tensor.sizes().vec();
  if (!tensor.is_contiguous()) {
    stored.strides = tensor.strides().vec();
  }
  stored.trainable = param.trainable();
  optim::Optimizer& optimizer = driver_.optimizer();
  stored.updates = optimizer.num_updates(id);
  // Whole in its own shape where one rank has all of it, so that others can read it as it is.
  const bool is_whole = ctx_.params.num_ranks() == 1 && stored.strides.empty();
  const bool is_saved_here = saves_shards(ctx_.group.rank());
  const shard::ElementRange range = param.range();
  const auto add = [&](const std::string& kind, DType dtype, auto start_read) {
    StoredTensor& destination = stored.tensors[kind];
    destination.dtype = dtype;
    const bool is_value = kind == checkpoint::kValueName;
    if (is_value && param.layout().is_encoded()) {
      destination.format = param.layout().format();
      destination.shard_numel = param.layout().shard_numel();
    }
    save.destinations.push_back({&destination, id});
    if (!is_saved_here) {
      return;
    }
    SnapshotTensor part;
    part.entry.name = is_value ? stored.name : stored.name + "#" + kind;
    part.entry.dtype = dtype;
    part.entry.shape = is_whole ? stored.shape : std::vector{range.numel};
    part.owner = id;
    if (range.numel > 0) {  // else it begins at the end, which may lie inside a word
      part.content_begin = static_cast<std::uint64_t>(range.begin) * bytes_of(dtype);
    }
    if (destination.format.is_encoded()) {  // its words as they are stored, with their padding
      const shard::Layout& layout = param.layout();
      part.entry.dtype = layout.stored_dtype();
      part.entry.shape = {range.numel > 0 ? layout.stored_numel() : 0};
      part.pieces =
          checkpoint::content_pieces(layout.format(), layout.numel(),
                                     shard::StoredBytes(layout.format(), layout.shard_numel()),
                                     range.numel > 0 ? range.begin : 0, range.numel);
    }
    part.start_read = std::move(start_read);
    save.tensors.push_back(std::move(part));
  };
  add(std::string(checkpoint::kValueName), param.layout().dtype(),
      [&param, shards = ctx_.tiers.shards()](std::int64_t begin, std::int64_t numel,
                                             std::byte* to) {
        return shard::start_read_shard(param, shards, begin, numel, to);
      });
  const std::vector<std::string_view> names = optimizer.tensor_names(id);
  for (std::size_t i = 0; i < names.size(); ++i) {
    add(std::string(names[i]), DType::kFloat32,
        [&optimizer, id, i](std::int64_t begin, std::int64_t numel, std::byte* to) {
          return optimizer.start_read(id, i, begin, numel, to);
        });
  }
}

// All copies are the same: the ranks of the first one save it.
bool CheckpointSaver::saves_shards(int rank) const {
  return ctx_.mesh.mesh().replica_of(rank) == 0;
}

void CheckpointSaver::collect_rank_tensors(Save& save) const {
  const auto add = [&](const char* what, std::vector<RankTensor> copies,
                       std::vector<StoredRankTensor>& stored) {
    stored.reserve(copies.size());  // references stay valid
    for (RankTensor& copy : copies) {
      stored.push_back(describe(copy));
      SnapshotTensor part;
      part.entry.name = detail::concat(what, "#", copy.name);
      part.entry.dtype = stored.back().dtype;
      const auto bytes = static_cast<std::int64_t>(copy.values.nbytes());
      const bool has_type = stored.back().type.empty();
      const std::int64_t numel = has_type ? copy.values.numel() : bytes;
      part.entry.shape = has_type ? stored.back().shape : std::vector{bytes};
      part.start_read = [values = std::move(copy.values), size = bytes_of(part.entry.dtype)](
                            std::int64_t begin, std::int64_t numel, std::byte* to) {
        std::memcpy(to,
                    static_cast<const std::byte*>(values.const_data_ptr()) +
                        static_cast<std::size_t>(begin) * size,
                    static_cast<std::size_t>(numel) * size);
        return device::Pending();
      };
      save.tensors.push_back(std::move(part));
      save.destinations.push_back({nullptr, 0, &stored.back(), numel});
    }
  };
  add("buffer", copy_buffers(model_), save.manifest.buffers);
  add("generator", copy_generators(ctx_.runtime.on_cuda()), save.manifest.generators);
}

void CheckpointSaver::start_writing(Save& save, bool beside_training) {
  if (!io_) {
    // As many requests as the staging has room for.
    io_ = ctx_.runtime.make_io_engine({.queue_depth = 1, .num_threads = 16});
  }
  checkpoint::SnapshotOptions options;
  options.path = save.directory + "/" + file_name(ctx_.group.rank());
  options.writer.io = io_.get();
  options.device = &ctx_.runtime.device();
  options.tier = ctx_.runtime.device().is_discrete() ? Tier::kPinned : Tier::kHost;
  options.num_threads = num_checkpoint_threads(ctx_.runtime);
  options.in_background = beside_training;
  options.clock = &ctx_.runtime.clock();
  if (beside_training) {
    std::int64_t most = 0;  // that updates may wait for
    for (const SnapshotTensor& tensor : save.tensors) {
      most += is_changed_by_updates(tensor.owner)
                  ? static_cast<std::int64_t>(tile_bytes(tensor.entry))
                  : 0;
    }
    make_buffer(save.options, most);
    options.buffer = buffer_.get();
  }
  save.snapshot = std::make_shared<checkpoint::Snapshot>(std::move(save.tensors), options);
}

// Kept for the next save, unless that wants another size: a little less of what is free is no
// reason to pin memory anew.
void CheckpointSaver::make_buffer(const SaveOptions& options, std::int64_t most_bytes) {
  const std::int64_t had = buffer_ ? static_cast<std::int64_t>(buffer_->capacity_bytes()) : 0;
  const std::int64_t wanted =
      std::min(most_bytes, options.memory_bytes ? *options.memory_bytes : default_buffer_bytes());
  const auto bytes = static_cast<std::int64_t>(
      tier::whole_blocks(static_cast<std::size_t>(std::max<std::int64_t>(wanted, 0))));
  const bool is_close = !options.memory_bytes && had <= bytes && had >= bytes - bytes / 8;
  if (bytes == had || is_close) {
    return;
  }
  buffer_.reset();
  if (bytes > 0) {
    device::Device& device = ctx_.runtime.device();
    buffer_ = std::make_unique<tier::BufferPool>(
        device, device.is_discrete() ? Tier::kPinned : Tier::kHost, static_cast<std::size_t>(bytes),
        "the save's buffer");
  }
}

// What the buffer of an earlier save has taken counts as free: it is replaced. A plan knows of
// none.
std::int64_t CheckpointSaver::default_buffer_bytes() const {
  const planner::MemoryPlan* const plan = ctx_.tiers.plan();
  if (plan != nullptr) {
    const std::int64_t budget =
        plan->is_discrete ? plan->host_budget_bytes : plan->memory_budget_bytes;
    if (budget != planner::kUnlimited) {
      return std::max<std::int64_t>(budget - plan->host_memory_bytes(), 0);
    }
  }
  const auto free = static_cast<std::int64_t>(device::read_host_memory().available_bytes());
  const std::int64_t had = buffer_ ? static_cast<std::int64_t>(buffer_->capacity_bytes()) : 0;
  return planner::save_buffer_of(free, had, ctx_.runtime.num_local_ranks());
}

// What is written meanwhile is written: updates wait that much less.
void CheckpointSaver::measure_writing() {
  const checkpoint::Snapshot& snapshot = *save_->snapshot;
  const Clock& clock = ctx_.runtime.clock();
  // What fills the staging first says nothing of the disk.
  snapshot.wait_for_bytes(kBytesBeforeMeasuring, kMeasuringTime);
  const std::int64_t begin_ns = clock.now_ns();
  const std::uint64_t begin_bytes = snapshot.bytes_so_far();
  snapshot.wait_for_bytes(begin_bytes + kMeasuredBytes, kMeasuringTime);
  const std::uint64_t bytes = snapshot.bytes_so_far() - begin_bytes;
  const std::int64_t ns = clock.now_ns() - begin_ns;
  if (!snapshot.done() && bytes >= kLeastMeasuredBytes && ns > 0) {
    bytes_per_s_ = static_cast<double>(bytes) / (static_cast<double>(ns) * 1e-9);
  }
}

SavePrediction CheckpointSaver::predict() {
  const checkpoint::SaveBytes& bytes = save_->bytes;
  SavePrediction prediction;
  prediction.bytes = static_cast<std::int64_t>(bytes.total());
  prediction.buffer_bytes = buffer_ ? static_cast<std::int64_t>(buffer_->capacity_bytes()) : 0;
  checkpoint::SavePace pace;
  pace.buffer_bytes = static_cast<std::uint64_t>(prediction.buffer_bytes);
  const bool may_wait = bytes.changing() > pace.buffer_bytes;
  const std::optional<double> before_update_s = driver_.last_seconds_before_update();
  if (may_wait && bytes_per_s_ == 0 && before_update_s) {
    measure_writing();
  }
  pace.written_bytes = save_->snapshot->bytes_so_far();
  if (!may_wait || pace.written_bytes >= bytes.total()) {
    prediction.stall_s = 0;
  } else if (bytes_per_s_ > 0 && before_update_s) {
    // What the update wants to change first is written while the step before it runs, or set aside.
    pace.bytes_per_s = bytes_per_s_;
    pace.before_update_s = *before_update_s;
    prediction.stall_s = checkpoint::predicted_stall_s(bytes, pace);
  }
  return prediction;
}

SaveVotes CheckpointSaver::votes(std::chrono::nanoseconds limit) {
  SaveVotes votes;
  if (!save_) {
    return votes;
  }
  if (save_->is_written) {
    votes.num_done = is_over(save_->completion, limit) ? 1 : 0;
    return votes;
  }
  if (save_->snapshot->wait_for(limit)) {
    votes.num_done = 1;
    try {
      check_part();
    } catch (const std::exception&) {
      votes.num_failed = 1;
    }
  }
  return votes;
}

void CheckpointSaver::wait_for_ranks(
    const std::function<SaveVotes(std::chrono::nanoseconds limit)>& votes) {
  const double timeout_s = ctx_.runtime.config().get_seconds("comm.timeout_s");
  const auto limit =
      std::min(kVoteInterval, std::chrono::duration_cast<std::chrono::nanoseconds>(
                                  std::chrono::duration<double>(timeout_s / kVotesPerTimeout)));
  while (true) {
    const SaveVotes mine = votes(limit);
    const std::vector<std::int64_t> all = ranks_.gather_numbers(
        {static_cast<std::int64_t>(mine.num_done), static_cast<std::int64_t>(mine.num_failed)},
        kSave);
    std::int64_t num_done = 0;
    std::int64_t num_failed = 0;
    for (std::size_t rank = 0; 2 * rank < all.size(); ++rank) {
      num_done += all[2 * rank];
      num_failed += all[2 * rank + 1];
    }
    if (num_done == ctx_.group.size() || num_failed > 0) {
      return;
    }
  }
}

void CheckpointSaver::after_step() {
  const SaveVotes& votes = driver_.save_votes();
  if (!save_ || (votes.num_failed == 0 && votes.num_done < ctx_.group.size())) {
    return;
  }
  if (std::optional<SaveOutcome> outcome = advance()) {
    outcomes_.push_back(std::move(*outcome));
  }
}

void CheckpointSaver::check_part() {
  if (save_->is_written) {
    if (save_->completion.valid()) {
      save_->path = save_->completion.get();
    }
  } else if (save_->snapshot->done()) {
    save_->snapshot->wait();
  }
}

std::optional<SaveOutcome> CheckpointSaver::wait_and_advance() {
  wait_for_ranks([this](std::chrono::nanoseconds limit) { return votes(limit); });
  return advance();
}

std::optional<SaveOutcome> CheckpointSaver::advance() {
  try {
    ranks_.agree(kSave, [this] { check_part(); });
  } catch (const CommError&) {
    throw;
  } catch (const InternalError&) {
    throw;
  } catch (const std::exception& error) {
    return end(error.what());
  }
  if (save_->is_written) {
    save_->path = ranks_.broadcast_text(save_->path, kSave);
    return end({});
  }
  tell_what_was_written();
  save_->is_written = true;
  if (save_->target) {
    save_->completion = start_beside([this] { return complete(); });
  }
  return std::nullopt;
}

// Collective.
void CheckpointSaver::tell_what_was_written() {
  const std::size_t num_tensors = save_->destinations.size();
  std::vector<std::int64_t> mine = {static_cast<std::int64_t>(save_->snapshot->file_bytes())};
  const std::vector<checkpoint::SnapshotTensorResult> results = save_->snapshot->results();
  auto result = results.begin();
  for (const Save::Destination& destination : save_->destinations) {
    if (destination.tensor != nullptr && !saves_shards(ctx_.group.rank())) {
      mine.insert(mine.end(), 3, 0);
      continue;
    }
    mine.push_back(static_cast<std::int64_t>(result->written.offset));
    mine.push_back(static_cast<std::int64_t>(result->written.xxh3));
    mine.push_back(static_cast<std::int64_t>(result->content));
    ++result;
  }
  const std::vector<std::int64_t> all = ranks_.gather_numbers(mine, kSave);
  const std::size_t stride = 1 + 3 * num_tensors;
  TESSERA_INVARIANT(all.size() == stride * static_cast<std::size_t>(ctx_.group.size()),
                    "ranks have written different numbers of tensors");
  checkpoint::Manifest& manifest = save_->manifest;
  for (int rank = 0; rank < ctx_.group.size(); ++rank) {
    const std::int64_t* next = all.data() + stride * static_cast<std::size_t>(rank);
    manifest.files.push_back({file_name(rank), static_cast<std::uint64_t>(*next++)});
    for (const Save::Destination& destination : save_->destinations) {
      Fragment fragment;
      fragment.file = rank;
      fragment.offset = static_cast<std::uint64_t>(*next++);
      fragment.xxh3 = static_cast<std::uint64_t>(*next++);
      const auto content = static_cast<std::uint64_t>(*next++);
      if (destination.of_rank != nullptr) {
        fragment.numel = destination.numel;
        destination.of_rank->ranks.push_back(fragment);
        continue;
      }
      const shard::ElementRange range =
          ctx_.params[destination.param].layout().range(ctx_.mesh.mesh().shard_index(rank));
      if (range.numel > 0 && saves_shards(rank)) {
        fragment.begin = range.begin;
        fragment.numel = range.numel;
        destination.tensor->fragments.push_back(fragment);
        destination.tensor->content += content;
      }
    }
  }
  // Ranks are not in the order of shards everywhere.
  for (StoredParam& param : manifest.params) {
    for (auto& [kind, tensor] : param.tensors) {
      std::sort(
          tensor.fragments.begin(), tensor.fragments.end(),
          [](const Fragment& left, const Fragment& right) { return left.begin < right.begin; });
    }
  }
}

std::string CheckpointSaver::complete() {
  std::string path = save_->target->commit(save_->manifest);
  start_removal(save_->target->replaced());
  save_->target.reset();  // others may save there now
  return path;
}

void CheckpointSaver::start_removal(std::vector<std::string> replaced) {
  if (replaced.empty()) {
    return;
  }
  removal_ = start_beside([replaced = std::move(replaced), &logger = ctx_.runtime.logger()] {
    try {
      checkpoint::remove_replaced(replaced);
    } catch (const std::exception& error) {
      logger.warn("an old save stays for now, the next one tries to remove it: ", error.what());
    }
  });
}

SaveOutcome CheckpointSaver::end(const std::string& failure) {
  const std::unique_ptr<Save> save = std::move(save_);
  SaveOutcome outcome;
  outcome.step = save->manifest.step;
  outcome.path = failure.empty() ? save->path : std::string();
  outcome.failure = failure;
  outcome.bytes = save->bytes.total();
  outcome.seconds = static_cast<double>(ctx_.runtime.clock().now_ns() - save->begin_ns) * 1e-9;
  if (save->snapshot) {
    const checkpoint::SnapshotTimes times = save->snapshot->times();
    outcome.stall_s = times.held_s;
    if (!failure.empty()) {
      save->snapshot->give_up();
    } else {
      bytes_per_s_ = static_cast<double>(save->bytes.total()) / std::max(times.writing_s, 1e-9);
    }
  }
  if (save->target) {  // with what was written of it
    removal_ = start_beside([target = std::move(save->target)]() mutable { target.reset(); });
  }
  return outcome;
}

}  // namespace tessera::engine
