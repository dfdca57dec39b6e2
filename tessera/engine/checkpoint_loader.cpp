#include "tessera/engine/checkpoint_loader.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include <torch/csrc/autograd/variable.h>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/checkpoint/stored_blocks.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/engine/checkpoint_threads.h"
#include "tessera/engine/job_queue.h"
#include "tessera/engine/rank_tensors.h"
#include "tessera/engine/step_state.h"
#include "tessera/quant/block_codec.h"
#include "tessera/shard/shard_store.h"

namespace tessera::engine {
namespace {

using checkpoint::StoredParam;
using checkpoint::StoredRankTensor;
using checkpoint::StoredTensor;

constexpr const char* kLoad = "load";
constexpr std::int64_t kTileNumel = std::int64_t{1} << 18;  // elements
static_assert(kTileNumel % shard::kShardStep == 0, "stores are written in whole steps");
// So many bytes are one thread's at least: reads of the next ones begin when those have come.
constexpr std::int64_t kJobBytes = std::int64_t{64} << 20;
constexpr std::size_t kMostListed = 8;

template <typename From, typename To>
void convert_each(const std::byte* from, std::byte* to, std::int64_t numel, To (*round)(float)) {
  for (std::int64_t i = 0; i < numel; ++i) {
    From value;
    std::memcpy(&value, from + static_cast<std::size_t>(i) * sizeof(From), sizeof(From));
    float wide;
    if constexpr (std::is_same_v<From, float>) {
      wide = value;
    } else {
      wide = to_float(value);
    }
    const To result = round(wide);
    std::memcpy(to + static_cast<std::size_t>(i) * sizeof(To), &result, sizeof(To));
  }
}

template <typename From>
void convert_from(const std::byte* from, DType to_dtype, std::byte* to, std::int64_t numel) {
  switch (to_dtype) {
    case DType::kFloat32:
      return convert_each<From, float>(from, to, numel, [](float value) { return value; });
    case DType::kBFloat16:
      return convert_each<From, BFloat16>(from, to, numel, to_bfloat16);
    case DType::kFloat16:
      return convert_each<From, Float16>(from, to, numel, to_float16);
    default:
      TESSERA_INVARIANT(false, "no parameter is ", to_string(to_dtype));
  }
}

// Widened exactly, or rounded to nearest even.
void convert(std::span<const std::byte> from, DType from_dtype, DType to_dtype,
             std::vector<std::byte>& to) {
  const auto numel = static_cast<std::int64_t>(from.size() / bytes_of(from_dtype));
  to.resize(static_cast<std::size_t>(numel) * bytes_of(to_dtype));
  switch (from_dtype) {
    case DType::kFloat32:
      return convert_from<float>(from.data(), to_dtype, to.data(), numel);
    case DType::kBFloat16:
      return convert_from<BFloat16>(from.data(), to_dtype, to.data(), numel);
    case DType::kFloat16:
      return convert_from<Float16>(from.data(), to_dtype, to.data(), numel);
    default:
      TESSERA_INVARIANT(false, "no parameter is ", to_string(from_dtype));
  }
}

// So that a tile begins where both a store and blocks can be written.
std::int64_t tile_step(const shard::Param& param) {
  return param.layout().is_encoded() ? std::lcm(param.layout().format().step(), shard::kShardStep)
                                     : shard::kShardStep;
}
std::int64_t tile_numel(const shard::Param& param) {
  const std::int64_t step = tile_step(param);
  return std::max(step, kTileNumel / step * step);
}

// Of elements `own` of the tensor, whole steps, in a wire that begins with element `from`.
std::uint64_t hash_of_blocks(const StoredTensor& tensor, std::int64_t tensor_numel,
                             const shard::StoredBytes& places, std::span<const std::byte> wire,
                             std::int64_t from, shard::ElementRange own) {
  std::vector<checkpoint::ContentPiece> pieces =
      checkpoint::content_pieces(tensor.format, tensor_numel, places, own.begin, own.numel);
  pieces[0].begin = places.codes(own.begin - from, own.numel).offset;
  pieces[1].begin = places.scales(own.begin - from, own.numel).offset;
  checkpoint::ContentSum sum(std::move(pieces));
  sum.add(wire);
  return sum.value();
}

bool is_floating(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

const StoredTensor* find_tensor(const StoredParam& stored, std::string_view kind) {
  const auto found = stored.tensors.find(std::string(kind));
  return found == stored.tensors.end() ? nullptr : &found->second;
}

// Of a parameter that is trained.
std::vector<std::string_view> tensor_names(const Config& config, DType dtype) {
  std::vector<std::string_view> names;
  if (dtype != DType::kFloat32) {
    names.emplace_back("master");
  }
  const auto states = optim::state_names(optim::RuleOptions::from(config));
  names.insert(names.end(), states.begin(), states.end());
  return names;
}

std::string listed(const std::vector<std::string>& lines) {
  std::string text;
  for (std::size_t i = 0; i < lines.size() && i < kMostListed; ++i) {
    text += (i == 0 ? "" : "; ") + lines[i];
  }
  if (lines.size() > kMostListed) {
    text += detail::concat("; and ", lines.size() - kMostListed, " more");
  }
  return text;
}

}  // namespace

CheckpointLoader::CheckpointLoader(EngineContext& context, RankAgreement& ranks, Model& model,
                                   StepDriver& driver, ParamAccess& access)
    : ctx_(context), ranks_(ranks), model_(model), driver_(driver), access_(access) {}

LoadResult CheckpointLoader::load(const std::string& path, const LoadOptions& options,
                                  const std::string& half_loaded) {
  std::string found;
  ranks_.agree(kLoad, [&] {
    ctx_.lifecycle.check_idle("load()");
    ctx_.lifecycle.check_not_resident("load()");
    driver_.check_no_gradients_pending("load()");
    access_.check_no_scopes("load()");
    if (ctx_.group.rank() == 0) {
      found = checkpoint::find_save(path);
    }
  });
  // Of rank 0, so that all ranks load the same one while another is being written.
  found = ranks_.broadcast_text(found, kLoad);
  ranks_.agree(kLoad, [&] {
    num_threads_ = num_checkpoint_threads(ctx_.runtime);
    checkpoint::ReaderOptions reader;
    reader.num_callers = num_threads_;
    reader_ = std::make_unique<checkpoint::CheckpointReader>(found, reader);
    match(reader_->manifest(), options.partial, half_loaded);
    state_ = step_state_of(reader_->manifest(), found);
    driver_.finish_update();
  });
  const checkpoint::Manifest& manifest = reader_->manifest();
  ctx_.coordinator.forget_copies();
  ctx_.lifecycle.set_half_loaded(found);
  ranks_.agree(kLoad, [this] { read_all(); });
  compare_hashes();
  driver_.set_state(manifest.step, state_);
  ctx_.lifecycle.set_half_loaded({});
  return {found, manifest.step, manifest.num_ranks, manifest.user, std::move(notes_), read_s_};
}

// --- what takes what ---

void CheckpointLoader::match(const checkpoint::Manifest& manifest, bool partial,
                             const std::string& half_loaded) {
  std::set<const StoredParam*> used;
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    matches_.emplace_back();
    match_param(manifest, id);
    used.insert(matches_.back().stored);
  }
  for (const StoredParam& stored : manifest.params) {
    if (!used.contains(&stored)) {
      problems_.push_back(detail::concat("the model has no parameter ", in_quotes(stored.name)));
    }
  }
  match_buffers(manifest);
  TESSERA_CHECK(partial || problems_.empty(), ConfigError, printable(reader_->path(), 400),
                " is of another model: ", listed(problems_),
                ". Load with partial (--partial) to leave these out and keep initial values for "
                "what is missing");
  TESSERA_CHECK(half_loaded.empty() || problems_.empty(), ConfigError,
                printable(reader_->path(), 400), " cannot be loaded in part, because a load of ",
                printable(half_loaded, 400),
                " has failed before: what is left out may have parts of that: ", listed(problems_),
                ". Load a save that has everything, or make the engine anew");
  for (const std::string& problem : problems_) {
    notes_.push_back(problem);
  }
}

void CheckpointLoader::match_param(const checkpoint::Manifest& manifest, int id) {
  const shard::Param& param = ctx_.params[id];
  const at::Tensor& tensor = model_.tensor(id);
  Match& match = matches_.back();
  const StoredParam* const stored = manifest.find(param.name());
  if (stored == nullptr) {
    problems_.push_back(detail::concat("it has no parameter ", in_quotes(param.name())));
    return;
  }
  const std::vector<std::int64_t> strides =
      tensor.is_contiguous() ? std::vector<std::int64_t>() : tensor.strides().vec();
  const bool same_layout = stored->strides == strides;
  if (stored->shape != tensor.sizes().vec() || !same_layout) {
    problems_.push_back(
        detail::concat(in_quotes(param.name()), " has shape ", at::IntArrayRef(stored->shape),
                       " there and ", tensor.sizes(), " here",
                       same_layout ? "" : ", or the same in another memory order (strides)"));
    return;
  }
  const StoredTensor* const value = find_tensor(*stored, checkpoint::kValueName);
  TESSERA_CHECK(value != nullptr && is_floating(value->dtype), CorruptError,
                printable(reader_->path(), 400), ": parameter ", in_quotes(stored->name),
                " has no value, or one that is no fp32, bf16 or fp16");
  match.stored = stored;
  match.value = value;
  match_states(id, match);
}

void CheckpointLoader::match_states(int id, Match& match) {
  const shard::Param& param = ctx_.params[id];
  optim::Optimizer& optimizer = driver_.optimizer();
  std::vector<std::string_view> names = optimizer.tensor_names(id);
  const bool has_states = match.stored->tensors.size() > 1;
  if (names.empty() && has_states && !param.trainable()) {
    // It was frozen later on: its states wait until it is trained again.
    names = tensor_names(ctx_.runtime.config(), param.layout().dtype());
  }
  for (const std::string_view name : names) {
    const StoredTensor* const tensor = find_tensor(*match.stored, name);
    TESSERA_CHECK(tensor == nullptr || tensor->dtype == DType::kFloat32, CorruptError,
                  printable(reader_->path(), 400), ": ", name, " of parameter ",
                  in_quotes(match.stored->name), " is no fp32");
    // Where the value is fp32, it is the master; and what was frozen never had any.
    if (tensor == nullptr && name != "master" && match.stored->trainable) {
      problems_.push_back(detail::concat("it has no ", name, " of ", in_quotes(param.name())));
    }
    match.tensors.push_back(tensor);
  }
  for (const auto& [name, tensor] : match.stored->tensors) {
    if (name != checkpoint::kValueName && name != "master" &&
        std::find(names.begin(), names.end(), name) == names.end()) {
      problems_.push_back(
          detail::concat("the optimizer here has no ", name, " of ", in_quotes(param.name())));
    }
  }
}

void CheckpointLoader::match_buffers(const checkpoint::Manifest& manifest) {
  for (std::size_t i = 0; i < model_.buffers().size(); ++i) {
    const std::string& name = model_.buffer_names()[i];
    const auto stored =
        std::find_if(manifest.buffers.begin(), manifest.buffers.end(),
                     [&](const StoredRankTensor& each) { return each.name == name; });
    if (model_.buffers()[i].numel() == 0) {
      continue;
    }
    if (stored == manifest.buffers.end()) {
      problems_.push_back(detail::concat("it has no buffer ", in_quotes(name)));
    } else if (const std::string why = why_not(*stored, model_.buffers()[i]); !why.empty()) {
      problems_.push_back(detail::concat("buffer ", in_quotes(name), " ", why));
    }
  }
  for (const StoredRankTensor& stored : manifest.buffers) {
    const std::vector<std::string>& names = model_.buffer_names();
    if (std::find(names.begin(), names.end(), stored.name) == names.end()) {
      problems_.push_back(detail::concat("the model has no buffer ", in_quotes(stored.name)));
    }
  }
}

// --- reading ---

// Reads parameters, with memory of its own.
class CheckpointLoader::ParamReader {
 public:
  explicit ParamReader(CheckpointLoader& loader)
      : loader_(loader), ctx_(loader.ctx_), optimizer_(loader.driver_.optimizer()) {}

  void read(const std::vector<int>& ids);

 private:
  using Write = std::function<void(std::int64_t begin, std::span<const std::byte> bytes)>;
  // Gives this rank's part of a tensor to all `writes`, piece by piece, and keeps its hash.
  class Tiles;
  void read_param(int id);
  // All that was collected.
  void read_requests();
  void read_tensor(const StoredTensor& tensor, const shard::Param& param,
                   std::vector<Write> writes);
  // The same of a tensor that is stored as blocks there: of its bytes, then decoded.
  void read_decoded(const StoredTensor& tensor, const shard::Param& param,
                    const std::vector<Write>& writes);
  // Both have the same blocks.
  void read_stored(const StoredTensor& tensor, const shard::Param& param, ShardWriter& writer);
  void clear_tensor(int id, std::size_t number);
  // Held while a shard is written: one that is on NVMe has one caller at a time.
  std::unique_lock<std::mutex> lock_of(const shard::Param& param) {
    return param.is_on_nvme() ? std::unique_lock(loader_.nvme_mutex_)
                              : std::unique_lock<std::mutex>();
  }
  std::uint64_t& hash_of(const shard::Param& param, const StoredTensor& tensor) {
    return loader_.matches_[static_cast<std::size_t>(param.id())].hashes.at(&tensor);
  }

  CheckpointLoader& loader_;
  EngineContext& ctx_;
  optim::Optimizer& optimizer_;
  struct Writer {
    Writer(const shard::Param& given, EngineContext& context)
        : param(&given), writer(context, given) {}
    const shard::Param* param;
    ShardWriter writer;
  };
  std::deque<Writer> writers_;
  std::deque<Tiles> tiles_;
  std::vector<checkpoint::CheckpointReader::Request> requests_;
  std::vector<std::byte> tile_;
  std::vector<std::byte> converted_;
};

// Pieces come in order; those that begin and end at whole steps go on as they are, and others are
// put together to tiles.
class CheckpointLoader::ParamReader::Tiles {
 public:
  Tiles(const StoredTensor& tensor, const shard::Param& param, std::vector<Write> writes,
        std::vector<std::byte>& memory, std::uint64_t& result)
      : element_bytes_(bytes_of(tensor.dtype)),
        numel_(param.range().numel),
        step_bytes_(static_cast<std::size_t>(tile_step(param)) * element_bytes_),
        tile_bytes_(static_cast<std::size_t>(tile_numel(param)) * element_bytes_),
        writes_(std::move(writes)),
        hash_(static_cast<std::uint64_t>(param.range().begin) * element_bytes_),
        memory_(memory),
        result_(result) {}

  void add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::size_t whole =
          ends_it(bytes.size()) ? bytes.size() : bytes.size() / step_bytes_ * step_bytes_;
      if (filled_ == 0 && whole > 0) {
        give(bytes.first(whole));
        bytes = bytes.subspan(whole);
        continue;
      }
      memory_.resize(std::max(memory_.size(), tile_bytes_));
      const std::size_t part = std::min(bytes.size(), tile_bytes_ - filled_);
      std::memcpy(memory_.data() + filled_, bytes.data(), part);
      filled_ += part;
      bytes = bytes.subspan(part);
      if (filled_ == tile_bytes_ || ends_it(filled_)) {
        give(std::span(memory_).first(std::exchange(filled_, 0)));
      }
    }
  }

 private:
  bool ends_it(std::size_t num_bytes) const {
    return given_ + static_cast<std::int64_t>(num_bytes / element_bytes_) == numel_;
  }
  void give(std::span<const std::byte> bytes) {
    hash_.add(bytes);
    for (const Write& write : writes_) {
      write(given_, bytes);
    }
    given_ += static_cast<std::int64_t>(bytes.size() / element_bytes_);
    if (given_ == numel_) {
      result_ = hash_.value();
    }
  }

  const std::size_t element_bytes_;
  const std::int64_t numel_;
  const std::size_t step_bytes_;
  const std::size_t tile_bytes_;
  const std::vector<Write> writes_;
  checkpoint::ContentHash hash_;
  std::vector<std::byte>& memory_;  // one tensor's at a time
  std::uint64_t& result_;
  std::size_t filled_ = 0;  // bytes of memory_
  std::int64_t given_ = 0;  // elements
};

void CheckpointLoader::read_all() {
  optim::Optimizer& optimizer = driver_.optimizer();
  optimizer.begin_writes();
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    prepare(id);
  }
  const std::int64_t begin_ns = ctx_.runtime.clock().now_ns();
  read_jobs(make_jobs());
  read_s_ = static_cast<double>(ctx_.runtime.clock().now_ns() - begin_ns) * 1e-9;
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    complete(id);
  }
  read_rank_tensors();
  optimizer.end_writes(state_.num_optimizer_updates);
  // Of what it has left out, also where a load that failed had begun to write it.
  optimizer.make_states();
  driver_.make_states();
}

void CheckpointLoader::prepare(int id) {
  Match& match = matches_[static_cast<std::size_t>(id)];
  if (match.stored == nullptr) {
    return;
  }
  optim::Optimizer& optimizer = driver_.optimizer();
  if (!match.tensors.empty() && optimizer.tensor_names(id).empty()) {
    optimizer.add_states(id);
  }
  const Sources sources = sources_of(id);
  match.hashes[sources.shard] = 0;
  for (const StoredTensor* const tensor : sources.tensors) {
    if (tensor != nullptr) {
      match.hashes[tensor] = 0;
    }
  }
}

CheckpointLoader::Sources CheckpointLoader::sources_of(int id) const {
  const shard::Layout& layout = ctx_.params[id].layout();
  const Match& match = matches_[static_cast<std::size_t>(id)];
  const StoredTensor* const saved_master = find_tensor(*match.stored, "master");
  const StoredTensor* const precise = saved_master != nullptr ? saved_master : match.value;
  Sources sources;
  sources.same_blocks = layout.is_encoded() && match.value->format == layout.format();
  sources.shard =
      sources.same_blocks || match.value->dtype == layout.dtype() ? match.value : precise;
  const std::vector<std::string_view> names = driver_.optimizer().tensor_names(id);
  for (std::size_t number = 0; number < names.size(); ++number) {
    const StoredTensor* const tensor = match.tensors[number];
    sources.tensors.push_back(tensor == nullptr && names[number] == "master" ? precise : tensor);
  }
  return sources;
}

void CheckpointLoader::complete(int id) {
  const Match& match = matches_[static_cast<std::size_t>(id)];
  if (match.stored == nullptr) {
    return;
  }
  optim::Optimizer& optimizer = driver_.optimizer();
  if (!optimizer.tensor_names(id).empty()) {
    optimizer.set_num_updates(id, match.stored->updates);
  }
  shard::Param& param = ctx_.params[id];
  param.set_updated(device::Pending());
  param.set_first_master({});
  // A graph from before knows by this that it is one.
  torch::autograd::impl::bump_version(model_.tensor(id));
}

std::vector<std::vector<int>> CheckpointLoader::make_jobs() const {
  struct Job {
    std::vector<int> ids;
    std::int64_t bytes = 0;
  };
  std::vector<Job> jobs;
  for (int id = 0; id < ctx_.params.num_params(); ++id) {
    const StoredParam* const stored = matches_[static_cast<std::size_t>(id)].stored;
    if (stored == nullptr) {
      continue;
    }
    if (jobs.empty() || jobs.back().bytes >= kJobBytes) {
      jobs.emplace_back();
    }
    jobs.back().ids.push_back(id);
    for (const auto& [kind, tensor] : stored->tensors) {
      jobs.back().bytes +=
          ctx_.params[id].range().numel * static_cast<std::int64_t>(bytes_of(tensor.dtype));
    }
  }
  // A large one must not be the last one, with which the other threads have nothing to do.
  std::ranges::stable_sort(jobs, std::ranges::greater(), &Job::bytes);
  std::vector<std::vector<int>> ids;
  ids.reserve(jobs.size());
  for (Job& job : jobs) {
    ids.push_back(std::move(job.ids));
  }
  return ids;
}

// This thread takes the memory that jobs write to: that lasts about as long as reading what goes
// there. The failure of the first job that has one is thrown, when all threads have ended.
void CheckpointLoader::read_jobs(const std::vector<std::vector<int>>& jobs) {
  JobQueue queue(jobs.size());
  const auto work = [&] {
    std::size_t job = 0;
    try {
      ParamReader reader(*this);
      while (const std::optional<std::size_t> next = queue.take()) {
        job = *next;
        reader.read(jobs[job]);
      }
    } catch (...) {
      queue.fail(job, std::current_exception());
    }
  };
  std::vector<std::thread> readers;
  while (readers.size() < std::min(static_cast<std::size_t>(num_threads_), jobs.size())) {
    try {
      readers.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those that there are do it all
    }
  }
  for (std::size_t job = 0; job < jobs.size() && !queue.has_failed(); ++job) {
    try {
      for (const int id : jobs[job]) {
        driver_.optimizer().prepare_writes(id);
      }
      queue.prepared();
    } catch (...) {
      queue.fail(job, std::current_exception());
    }
  }
  if (readers.empty()) {
    work();
  }
  for (std::thread& reader : readers) {
    reader.join();
  }
  queue.check();
}

// What is stored as blocks is read alone; the rest one behind the other, without a gap.
void CheckpointLoader::ParamReader::read(const std::vector<int>& ids) {
  for (const int id : ids) {
    read_param(id);
  }
  read_requests();
}

void CheckpointLoader::ParamReader::read_requests() {
  loader_.reader_->read(requests_);
  for (auto& [param, writer] : writers_) {
    const std::unique_lock<std::mutex> lock = lock_of(*param);
    writer.finish();
  }
  requests_.clear();
  tiles_.clear();
  writers_.clear();
}

void CheckpointLoader::ParamReader::read_param(int id) {
  const shard::Param& param = ctx_.params[id];
  const DType dtype = param.layout().dtype();
  const Sources sources = loader_.sources_of(id);
  // What of the parameter comes from a stored tensor: it is read once.
  std::map<const StoredTensor*, std::vector<Write>> writes;
  ShardWriter& writer = writers_.emplace_back(param, ctx_).writer;
  if (sources.same_blocks) {
    read_stored(*sources.shard, param, writer);
  } else {
    writes[sources.shard].push_back([this, dtype, &param, &writer, from = sources.shard](
                                        std::int64_t begin, std::span<const std::byte> bytes) {
      if (from->dtype != dtype) {
        convert(bytes, from->dtype, dtype, converted_);
        bytes = converted_;
      }
      const std::unique_lock<std::mutex> lock = lock_of(param);
      writer.write(begin, static_cast<std::int64_t>(bytes.size() / bytes_of(dtype)), bytes.data());
    });
  }
  for (std::size_t number = 0; number < sources.tensors.size(); ++number) {
    const StoredTensor* const from = sources.tensors[number];
    if (from == nullptr) {
      clear_tensor(id, number);
      continue;
    }
    writes[from].push_back(
        [this, id, from, number](std::int64_t begin, std::span<const std::byte> bytes) {
          if (from->dtype != DType::kFloat32) {
            convert(bytes, from->dtype, DType::kFloat32, converted_);
            bytes = converted_;
          }
          const auto numel = static_cast<std::int64_t>(bytes.size() / sizeof(float));
          optimizer_.write(id, number, begin, numel, bytes.data());
        });
  }
  for (auto& [tensor, each] : writes) {
    read_tensor(*tensor, param, std::move(each));
  }
  if (param.layout().is_encoded()) {  // its bytes are in memory until they are written
    read_requests();
  }
}

// What was never trained, there, has no states: they begin as those of a new model.
void CheckpointLoader::ParamReader::clear_tensor(int id, std::size_t number) {
  const std::int64_t numel = ctx_.params[id].range().numel;
  tile_.assign(static_cast<std::size_t>(std::min(kTileNumel, numel)) * sizeof(float), std::byte{0});
  for (std::int64_t begin = 0; begin < numel; begin += kTileNumel) {
    optimizer_.write(id, number, begin, std::min(kTileNumel, numel - begin), tile_.data());
  }
}

void CheckpointLoader::ParamReader::read_tensor(const StoredTensor& tensor,
                                                const shard::Param& param,
                                                std::vector<Write> writes) {
  const shard::ElementRange range = param.range();
  if (range.numel == 0) {
    return;
  }
  if (tensor.format.is_encoded()) {
    read_decoded(tensor, param, writes);
    return;
  }
  Tiles& tiles =
      tiles_.emplace_back(tensor, param, std::move(writes), tile_, hash_of(param, tensor));
  requests_.push_back(
      {&tensor, range.begin, range.numel,
       [&tiles](std::int64_t /*begin*/, std::span<const std::byte> bytes) { tiles.add(bytes); }});
}

void CheckpointLoader::ParamReader::read_stored(const StoredTensor& tensor,
                                                const shard::Param& param, ShardWriter& writer) {
  const shard::Layout& layout = param.layout();
  const shard::ElementRange range = param.range();
  if (range.numel == 0) {
    return;
  }
  const shard::StoredBytes places(layout.format(), layout.shard_numel());
  const std::span<std::byte> bytes = writer.stored().bytes();
  loader_.reader_->read_blocks(tensor, range.begin, range.numel, places, bytes.data());
  checkpoint::ContentSum hash(checkpoint::content_pieces(layout.format(), layout.numel(), places,
                                                         range.begin, range.numel));
  hash.add(bytes);
  hash_of(param, tensor) = hash.value();
}

// Whole steps are read, and a step is hashed by the rank, and for the tile, in which it begins.
void CheckpointLoader::ParamReader::read_decoded(const StoredTensor& tensor,
                                                 const shard::Param& param,
                                                 const std::vector<Write>& writes) {
  const shard::StoredFormat format = tensor.format;
  const shard::ElementRange range = param.range();
  const std::int64_t numel = param.layout().numel();
  const std::size_t element = bytes_of(tensor.dtype);
  const std::unique_ptr<comm::Codec> codec = quant::make_cpu_block_codec(format.blocks());
  const std::int64_t most = tile_numel(param);
  std::vector<std::byte> wire;
  for (std::int64_t begin = 0; begin < range.numel; begin += most) {
    const std::int64_t first = range.begin + begin;
    const std::int64_t last = std::min(first + most, range.begin + range.numel);
    const std::int64_t from = first / format.step() * format.step();
    const std::int64_t to = std::min(format.rounded_up(last), numel);
    const std::int64_t padded = format.rounded_up(to - from);
    const shard::StoredBytes places(format, padded);
    wire.assign(places.bytes(), std::byte{0});
    loader_.reader_->read_blocks(tensor, from, to - from, places, wire.data());
    if (const std::int64_t own = format.rounded_up(first); own < last) {
      hash_of(param, tensor) += hash_of_blocks(tensor, numel, places, wire, from, {own, to - own});
    }
    tile_.resize(static_cast<std::size_t>(padded) * element);
    codec->decode(wire.data(), padded, tile_.data(), tensor.dtype, nullptr).wait();
    const auto values =
        std::span<const std::byte>(tile_).subspan(static_cast<std::size_t>(first - from) * element,
                                                  static_cast<std::size_t>(last - first) * element);
    for (const Write& write : writes) {
      write(begin, values);
    }
  }
}

// With as many ranks as at the save each takes its own; else all take those of rank 0.
void CheckpointLoader::read_rank_tensors() {
  const checkpoint::Manifest& manifest = reader_->manifest();
  const bool same_ranks = manifest.num_ranks == ctx_.group.size();
  const auto rank = static_cast<std::size_t>(same_ranks ? ctx_.group.rank() : 0);
  const auto read = [&](const StoredRankTensor& stored) {
    std::vector<std::byte> bytes;
    reader_->read(stored.ranks[rank], stored.dtype, [&](std::int64_t, auto piece) {
      bytes.insert(bytes.end(), piece.begin(), piece.end());
    });
    return bytes;
  };
  for (std::size_t i = 0; i < model_.buffers().size(); ++i) {
    for (const StoredRankTensor& stored : manifest.buffers) {
      if (stored.name == model_.buffer_names()[i] && model_.buffers()[i].numel() > 0 &&
          why_not(stored, model_.buffers()[i]).empty()) {
        put_buffer(model_.buffers()[i], read(stored));
      }
    }
  }
  const std::vector<RankTensor> ours = copy_generators(ctx_.runtime.on_cuda());
  for (const RankTensor& generator : ours) {
    const auto stored =
        std::find_if(manifest.generators.begin(), manifest.generators.end(), [&](const auto& each) {
          return each.name == generator.name && each.shape == generator.values.sizes().vec();
        });
    if (same_ranks && stored != manifest.generators.end()) {
      put_generator(stored->name, read(*stored));
    } else {
      notes_.push_back(detail::concat("random numbers of torch's ", generator.name,
                                      " generator begin anew: it was saved by ", manifest.num_ranks,
                                      manifest.num_ranks == 1 ? " rank" : " ranks",
                                      same_ranks ? ", in another form" : ""));
    }
  }
}

// See checkpoint::ContentHash: the parts of all ranks of a copy add up, whatever each has.
void CheckpointLoader::compare_hashes() {
  std::vector<std::int64_t> mine;
  std::vector<std::pair<const StoredTensor*, std::string>> tensors;
  for (const Match& match : matches_) {
    if (match.stored == nullptr) {
      continue;
    }
    for (const auto& [kind, tensor] : match.stored->tensors) {
      if (const auto found = match.hashes.find(&tensor); found != match.hashes.end()) {
        mine.push_back(static_cast<std::int64_t>(found->second));
        tensors.emplace_back(&tensor,
                             detail::concat(kind, " of parameter ", in_quotes(match.stored->name)));
      }
    }
  }
  const std::vector<std::int64_t> all = ranks_.gather_numbers(mine, kLoad);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const comm::Mesh& mesh = ctx_.mesh.mesh();
    std::vector<std::uint64_t> sums(static_cast<std::size_t>(mesh.num_replicas()));
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      sums[static_cast<std::size_t>(mesh.replica_of(rank))] +=
          static_cast<std::uint64_t>(all[static_cast<std::size_t>(rank) * tensors.size() + i]);
    }
    for (const std::uint64_t sum : sums) {
      TESSERA_CHECK(sum == tensors[i].first->content, CorruptError, printable(reader_->path(), 400),
                    ": ", tensors[i].second,
                    " is not what was saved: a file is damaged, or ranks have read different ones. "
                    "`tessera checkpoint --verify` names the file; load an older save");
    }
  }
}

}  // namespace tessera::engine
