#include "tests/engine/training_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>

#include <ATen/ATen.h>

#include "models/data.h"
#include "models/gpt_shapes.h"
#include "models/plain_trainer.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"
#include "tessera/engine/runtime.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/rule.h"
#include "testing/mock_device.h"
#include "testing/thread_backend.h"

namespace tessera::testing {
namespace {

at::Device device_of(const RunSettings& settings) {
  return settings.device == RunDevice::kCuda
             ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(settings.cuda_index))
             : at::Device(at::kCPU);
}

struct Batch {
  at::Tensor ids;
  at::Tensor targets;
  double weight = 0;
};

// Micro-batch `micro` of a rank: its slice of the batch, cut into `accumulate` pieces.
Batch read_batch(models::TokenSource& data, const RunSettings& settings, std::int64_t step,
                 int rank, int ranks, int micro) {
  const std::int64_t per_rank = settings.batch / ranks;
  const std::int64_t rows = per_rank / settings.accumulate;
  const std::int64_t length = settings.model.sequence + 1;
  at::Tensor tokens = at::empty({rows, length}, at::kLong);
  for (std::int64_t row = 0; row < rows; ++row) {
    data.read(step, rank * per_rank + micro * rows + row,
              {tokens.data_ptr<std::int64_t>() + row * length, static_cast<std::size_t>(length)});
  }
  Batch batch;
  batch.ids = tokens.slice(1, 0, length - 1).contiguous();
  batch.targets = tokens.slice(1, 1, length).contiguous();
  batch.weight = static_cast<double>(batch.ids.numel());
  return batch;
}

std::unique_ptr<models::TokenSource> data_of(const RunSettings& settings) {
  models::DataOptions options;
  options.sources = {settings.data};
  options.vocabulary = settings.model.vocabulary;
  options.sequence = settings.model.sequence;
  options.batch = settings.batch;
  options.seed = settings.seed;
  return models::open_data(options);
}

constexpr const char* kPlantedParam = "blocks.1.norm2.weight";
constexpr std::int64_t kPlantedStep = 2;

// What a shard's values were, to put them back.
class FrozenShard {
 public:
  explicit FrozenShard(const shard::Param& param)
      : param_(param), bytes_(param.shard(), param.shard() + param.layout().shard_bytes()) {}
  void restore() const { std::copy(bytes_.begin(), bytes_.end(), param_.shard()); }

 private:
  const shard::Param& param_;
  std::vector<std::byte> bytes_;
};

// Where a run's results go. Ranks as threads share one, and each writes its own elements of one
// tensor; ranks as processes have one each, and exchange what they have.
class Results {
 public:
  Results(RunOutcome& outcome, bool ranks_are_threads)
      : outcome_(outcome), ranks_are_threads_(ranks_are_threads) {}

  // What is not collected element by element.
  RunOutcome* of_rank(int rank) { return rank == 0 || !ranks_are_threads_ ? &outcome_ : nullptr; }

  // Collective: every rank asks for the same.
  void add_params(Engine& engine) {
    const auto names = optim::state_names(optim::RuleOptions::from(engine.runtime().config()));
    reserve(static_cast<std::size_t>(engine.num_params()));
    for (int id = 0; id < engine.num_params(); ++id) {
      const shard::Param& param = engine.param(id);
      const std::int64_t numel = param.layout().numel();
      // What has no master: fp32 itself, and what is frozen.
      const at::Tensor value = engine.full_value(id).flatten().to(at::kFloat);
      const auto num_states = static_cast<std::int64_t>(names.size());
      add_tensor(id, param.name(), numel, num_states);
      copy_part(engine, param, "master", value, outcome_.params[static_cast<std::size_t>(id)], 0);
      for (std::int64_t i = 0; i < num_states; ++i) {
        copy_part(engine, param, names[static_cast<std::size_t>(i)], at::zeros({numel}),
                  outcome_.states[static_cast<std::size_t>(id)], i * numel);
      }
      if (!ranks_are_threads_) {
        const auto index = static_cast<std::size_t>(id);
        exchange(engine, param, outcome_.params[index]);
        exchange(engine, param, outcome_.states[index]);
      }
    }
  }

 private:
  // `tensor`: values by element, and for each of them maybe several, one array behind the other.
  void exchange(Engine& engine, const shard::Param& param, const at::Tensor& tensor) {
    float* const values = tensor.data_ptr<float>();
    const auto bytes = static_cast<std::size_t>(tensor.numel()) * sizeof(float);
    const std::int64_t numel = param.layout().numel();
    comm::Group& group = engine.runtime().group();
    const comm::HostGather all =
        group.start_gather_host({reinterpret_cast<const std::byte*>(values), bytes});
    all.done.wait();
    for (int rank = 0; rank < group.size(); ++rank) {
      const auto* const theirs =
          reinterpret_cast<const float*>(all.bytes.get() + static_cast<std::size_t>(rank) * bytes);
      const shard::ElementRange range = param.layout().range(engine.mesh().shard_index(rank));
      for (std::int64_t begin = range.begin; begin < tensor.numel(); begin += numel) {
        if (engine.mesh().replica_of(rank) > 0) {
          compare(theirs + begin, values + begin, range.numel, param);
        }
        std::copy_n(theirs + begin, range.numel, values + begin);
      }
    }
  }

  // What a rank of another copy holds with what one of the first does.
  void compare(const float* other, const float* first, std::int64_t numel,
               const shard::Param& param) {
    if (std::memcmp(other, first, static_cast<std::size_t>(numel) * sizeof(float)) != 0) {
      outcome_.differs_in_copies = param.name();
    }
  }

  // Other ranks may add tensors while one is written to.
  void reserve(std::size_t num_params) {
    const std::lock_guard<std::mutex> lock(mutex_);
    outcome_.params.reserve(num_params);
    outcome_.states.reserve(num_params);
  }

  void add_tensor(int id, const std::string& name, std::int64_t numel, std::int64_t num_states) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (outcome_.params.size() <= static_cast<std::size_t>(id)) {
      outcome_.names.push_back(name);
      outcome_.params.push_back(at::zeros({numel}, at::kFloat));
      outcome_.states.push_back(at::zeros({numel * num_states}, at::kFloat));
    }
  }

  // Of this rank's elements, or of `otherwise` where the optimizer has none.
  void copy_part(Engine& engine, const shard::Param& param, std::string_view name,
                 const at::Tensor& otherwise, const at::Tensor& to, std::int64_t offset) {
    const auto values = engine.optimizer().state(param.id(), name);
    const shard::ElementRange range = param.range();
    const float* from = values.empty() ? otherwise.data_ptr<float>() + range.begin : values.data();
    const auto bytes = static_cast<std::size_t>(range.numel) * sizeof(float);
    std::vector<float> part(static_cast<std::size_t>(range.numel));
    device::Device& device = engine.runtime().device();  // may be where the values are
    device.start_copy(part.data(), from, bytes, device.stream(device::StreamKind::kWrite)).wait();
    float* const end = to.data_ptr<float>() + offset + range.begin;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (range.numel > 0 && !collected_.insert(end).second) {  // by a rank of another copy
      compare(part.data(), end, range.numel, param);
    }
    std::copy(part.begin(), part.end(), end);
  }

  std::mutex mutex_;
  std::set<const float*> collected_;  // parts
  RunOutcome& outcome_;
  const bool ranks_are_threads_;
};

// Changes what autograd hands over for one parameter, in one step.
class PlantedGradient {
 public:
  PlantedGradient(const at::Tensor& param, Planted planted) : planted_(planted) {
    param.register_hook([this](const at::Tensor& gradient) { return change(gradient); });
  }
  void set_step(std::int64_t step) { step_ = step; }

 private:
  at::Tensor change(const at::Tensor& gradient) {
    const at::Tensor last = std::exchange(last_, gradient.clone());
    if (step_ != kPlantedStep || planted_ == Planted::kNothing) {
      return gradient;
    }
    return planted_ == Planted::kDoubledGradient ? gradient * 2 : last;
  }
  const Planted planted_;
  std::int64_t step_ = 0;
  at::Tensor last_;
};

void add_io(engine::RoleIo& sum, const engine::RoleIo& io) {
  sum.read_bytes += io.read_bytes;
  sum.written_bytes += io.written_bytes;
}

void take_saved(RunOutcome* outcome, std::optional<SaveOutcome> saved) {
  if (outcome != nullptr && saved) {
    outcome->saved.push_back(std::move(*saved));
  }
}

// Behind the step that has just ended.
void save_if_due(Engine& engine, const RunSaves& saves, RunOutcome* outcome) {
  take_saved(outcome, engine.take_save_outcome());
  if (std::count(saves.behind.begin(), saves.behind.end(), engine.num_steps()) == 0) {
    return;
  }
  if (saves.beside_training) {
    engine.start_save(saves.root, saves.options);
    return;
  }
  SaveOutcome saved;
  saved.step = engine.num_steps();
  try {
    saved.path = engine.save(saves.root, saves.options);
  } catch (const Error& error) {
    if (!saves.fails) {
      throw;
    }
    saved.failure = error.what();
  }
  take_saved(outcome, std::move(saved));
}

// `world`: null for one rank on CUDA, where a group of threads cannot reach the device's memory.
void train_rank(const RunSettings& settings, comm::Group* world, Results& results) {
  RuntimeOptions runtime_options;
  runtime_options.num_update_threads = 1;
  runtime_options.wrap_io = settings.wrap_io;
  if (settings.device == RunDevice::kMock) {
    runtime_options.make_device = [&](device::CpuDeviceOptions host) {
      device::MockDeviceOptions late;
      late.mode = device::LateMode::kRandom;
      late.seed = settings.seed + static_cast<std::uint64_t>(world->rank());
      late.own_memory = true;
      late.own_memory_bytes = settings.device_bytes;
      late.host = std::move(host);
      return device::make_mock_device(std::move(late));
    };
  }
  runtime_options.cuda_device = settings.device == RunDevice::kCuda ? settings.cuda_index : -1;
  const at::Device where = device_of(settings);
  const std::unique_ptr<Runtime> made =
      world != nullptr ? std::make_unique<Runtime>(config_of(settings), *world, runtime_options)
                       : std::make_unique<Runtime>(config_of(settings), runtime_options);
  Runtime& runtime = *made;
  comm::Group& group = runtime.group();
  RunOutcome* const outcome = results.of_rank(group.rank());
  EngineOptions options;
  options.run_steps = settings.steps;
  if (settings.gives_shapes) {
    options.shapes = models::planner_shapes(models::gpt_shape(settings.model));
  }
  Engine engine(runtime, options);
  models::Gpt model(settings.model, engine, settings.seed);
  const auto data = data_of(settings);
  const shard::Param* planted_param = engine.params().find(kPlantedParam);
  TESSERA_CHECK(planted_param != nullptr, ConfigError, "no parameter ", kPlantedParam);
  std::optional<FrozenShard> before;
  if (settings.planted == Planted::kParamNotUpdated) {
    before.emplace(*planted_param);
  }
  std::unique_ptr<PlantedGradient> planted_gradient;
  if (settings.planted == Planted::kDoubledGradient ||
      settings.planted == Planted::kStaleGradient) {
    planted_gradient =
        std::make_unique<PlantedGradient>(engine.tensor(planted_param->id()), settings.planted);
  }
  if (!settings.saves.load.empty()) {
    const LoadResult loaded = engine.load(settings.saves.load, settings.saves.load_options);
    if (outcome != nullptr) {
      outcome->loaded = loaded;
    }
  }
  save_if_due(engine, settings.saves, outcome);
  for (std::int64_t step = engine.num_steps(); step < settings.steps; ++step) {
    if (planted_gradient) {
      planted_gradient->set_step(step);
    }
    for (int id = 0; step == settings.unfrozen_from && id < engine.num_params(); ++id) {
      engine.set_trainable(engine.tensor(id), true);
    }
    for (int micro = 0; micro < settings.accumulate; ++micro) {
      const Batch batch = read_batch(*data, settings, step, group.rank(), group.size(), micro);
      at::Tensor loss = model.loss(batch.ids.to(where), batch.targets.to(where));
      if (settings.planted == Planted::kSumForMean) {
        loss = loss * (group.size() * settings.accumulate);
      }
      engine.backward(loss, batch.weight);
    }
    const StepResult result = engine.step();
    if (settings.planted == Planted::kParamNotUpdated) {
      before->restore();
    }
    save_if_due(engine, settings.saves, outcome);
    const EngineStats stats = engine.take_stats();
    if (step == 0) {
      runtime.ledger().reset_peaks();  // what building took for a moment is not the plan's
    }
    if (outcome != nullptr) {
      outcome->steps.push_back(result);
      outcome->stats.push_back(stats);
    }
  }
  take_saved(outcome, engine.finish_save());
  engine.zero_grad();  // waits for the last update
  const EngineStats tail = engine.take_stats();
  if (outcome != nullptr) {
    outcome->stats.push_back(tail);
    for (const EngineStats& stats : outcome->stats) {
      add_io(outcome->io.parameters, stats.io.parameters);
      add_io(outcome->io.gradients, stats.io.gradients);
      add_io(outcome->io.states, stats.io.states);
    }
    outcome->stats.pop_back();
    for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
      for (std::size_t role = 0; role < kNumRoles; ++role) {
        const auto cell = std::pair(static_cast<Tier>(tier), static_cast<Role>(role));
        outcome->peaks[cell] =
            static_cast<std::int64_t>(runtime.ledger().peak_bytes(cell.first, cell.second));
      }
    }
    if (engine.memory_plan() != nullptr) {
      outcome->placement = *engine.memory_plan();
    }
  }
  results.add_params(engine);
}

// Attention's backward adds in the order of time otherwise.
void set_deterministic() {
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
}

RunOutcome train_unsharded(const RunSettings& settings) {
  const bool on_cuda = settings.device == RunDevice::kCuda;
  const at::Device where = device_of(settings);
  device::CudaDeviceOptions cuda;
  cuda.index = settings.cuda_index;
  const auto device = on_cuda ? device::make_cuda_device(cuda) : device::make_cpu_device();
  const auto kernels = on_cuda ? optim::make_cuda_kernels(*device) : optim::make_cpu_kernels(1);
  models::Gpt model(settings.model, where, settings.seed);
  EngineOptions options;
  options.run_steps = settings.steps;
  models::PlainTrainer trainer(model.params(), config_of(settings), *kernels, *device, options);
  const auto data = data_of(settings);
  RunOutcome outcome;
  outcome.model = settings.model;
  for (std::int64_t step = 0; step < settings.steps; ++step) {
    for (int micro = 0; micro < settings.accumulate; ++micro) {
      const Batch batch = read_batch(*data, settings, step, 0, 1, micro);
      trainer.backward(model.loss(batch.ids.to(where), batch.targets.to(where)), batch.weight);
    }
    outcome.steps.push_back(trainer.step());
  }
  for (const models::NamedParam& param : model.params()) {
    outcome.names.push_back(param.name);
  }
  for (const at::Tensor& master : trainer.masters()) {
    outcome.params.push_back(master.flatten().to(at::kCPU, at::kFloat).clone());
  }
  return outcome;
}

double relative(double left, double right) {
  const double scale = std::max(std::abs(left), std::abs(right));
  return scale == 0 ? 0 : std::abs(left - right) / scale;
}

}  // namespace

Config config_of(const RunSettings& settings) {
  Config config;
  config.set("optim.lr", 1e-3);
  config.set("seed", static_cast<std::int64_t>(settings.seed));
  if (settings.model.dtype != DType::kFloat32) {
    config.apply_flag("precision=" + std::string(to_string(settings.model.dtype)));
  }
  for (const auto& [name, value] : settings.options) {
    config.apply_flag(name + "=" + value);
  }
  return config;
}

RunOutcome train_in(comm::Group& world, const RunSettings& settings) {
  if (settings.device == RunDevice::kCuda) {
    set_deterministic();
  }
  RunOutcome outcome;
  outcome.model = settings.model;
  Results results(outcome, /*ranks_are_threads=*/false);
  train_rank(settings, &world, results);
  return outcome;
}

RunOutcome train(const RunSettings& settings) {
  if (settings.device == RunDevice::kCuda) {
    set_deterministic();
  }
  if (settings.ranks == 0) {
    return train_unsharded(settings);
  }
  RunOutcome outcome;
  outcome.model = settings.model;
  Results results(outcome, /*ranks_are_threads=*/true);
  if (settings.device == RunDevice::kCuda) {
    train_rank(settings, nullptr, results);
    return outcome;
  }
  Ledger comm_ledger;
  comm::ThreadWorldOptions world;
  world.num_ranks = settings.ranks;
  world.on_streams = settings.calls_on_streams;
  comm::GroupOptions groups;
  groups.ledger = &comm_ledger;
  std::unique_ptr<device::Device> copied_from;
  if (settings.copies_calls) {
    device::MockDeviceOptions late;
    late.mode = device::LateMode::kRandom;
    late.own_memory = true;
    late.host.ledger = &comm_ledger;
    copied_from = device::make_mock_device(std::move(late));
    groups.device = copied_from.get();
  }
  comm::run_ranks(world, groups,
                  [&](comm::Group& group) { train_rank(settings, &group, results); });
  const Tier tier = settings.copies_calls ? Tier::kPinned : Tier::kHost;
  outcome.comm_peak_bytes = static_cast<std::int64_t>(comm_ledger.peak_bytes(tier, Role::kStaging));
  return outcome;
}

std::string Difference::describe() const {
  std::ostringstream out;
  out << "loss " << loss << ", norm " << norm << ", parameters " << param << " (" << worst_param
      << ")";
  return out.str();
}

double Difference::largest() const { return std::max({loss, norm, param}); }

Difference difference(const RunOutcome& left, const RunOutcome& right) {
  Difference worst;
  TESSERA_CHECK(left.steps.size() == right.steps.size() && left.names == right.names, ConfigError,
                "the runs differ in steps or parameters");
  for (std::size_t i = 0; i < left.steps.size(); ++i) {
    worst.loss = std::max(worst.loss, relative(left.steps[i].loss, right.steps[i].loss));
    worst.norm = std::max(worst.norm, relative(left.steps[i].grad_norm, right.steps[i].grad_norm));
  }
  for (std::size_t i = 0; i < left.params.size(); ++i) {
    const at::Tensor b = right.params[i].to(at::kDouble);
    at::Tensor apart = left.params[i].to(at::kDouble) - b;
    if (const shard::ElementRange noise = models::gpt_noise_elements(left.model, left.names[i]);
        noise.numel > 0) {
      at::Tensor part = apart.slice(0, noise.begin, noise.begin + noise.numel);
      worst.noise = std::max(worst.noise, part.abs().max().item<double>());
      part.zero_();
    }
    const double norm = b.norm().item<double>();
    const double off = apart.norm().item<double>();
    const double value = norm == 0 ? off : off / norm;
    if (!(value <= worst.param)) {
      worst.param = value;
      worst.worst_param = left.names[i];
    }
  }
  return worst;
}

bool same_bits(const RunOutcome& left, const RunOutcome& right) {
  if (left.steps.size() != right.steps.size() || left.params.size() != right.params.size()) {
    return false;
  }
  for (std::size_t i = 0; i < left.steps.size(); ++i) {
    if (left.steps[i].loss != right.steps[i].loss ||
        left.steps[i].grad_norm != right.steps[i].grad_norm) {
      return false;
    }
  }
  for (std::size_t i = 0; i < left.params.size(); ++i) {
    if (!at::equal(left.params[i], right.params[i]) ||
        (i < left.states.size() && i < right.states.size() &&
         !at::equal(left.states[i], right.states[i]))) {
      return false;
    }
  }
  return true;
}

}  // namespace tessera::testing
