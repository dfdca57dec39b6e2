// Updates on an NVIDIA GPU: the arithmetic is the host's (element_rules.cuh), this file spreads it
// over threads so that memory is the limit.
//
// Tasks come as kernel parameters: no buffer to fill, to keep or to reuse. Each is cut into tiles;
// blocks walk over the tiles of all tasks, so that small spans share a launch with large ones.
#include <cstddef>
#include <type_traits>

#include "tessera/optim/cuda_elements.cuh"
#include "tessera/optim/cuda_launch.h"
#include "tessera/optim/step_rules.cuh"

namespace tessera::optim::cuda {
namespace {

constexpr std::int64_t kTileFours = 4 * kThreads;
constexpr std::int64_t kTileNumel = kTileFours * kWidth;
// At least as many per processor as hide the latency of memory, and the roots and divisions.
constexpr int kMinBlocks = 4;
// 2048 threads, all that a processor holds.
constexpr int kBlocksPerProcessor = 8;

struct Task {
  ElementScalars scalars;
  float* master;
  const void* gradient;
  float* first;
  float* second;
  void* parameter;
  std::int64_t numel;
  std::int64_t head;       // see head_numel()
  std::int64_t last_tile;  // of all tasks, counted from the first one's first; one behind
  DType gradient_dtype;
  DType parameter_dtype;
};

// What every driver takes as parameters of a kernel.
constexpr std::size_t kParameterBytes = 4096;
constexpr int kMaxTasks = (kParameterBytes - 24) / sizeof(Task);
struct Batch {
  Task tasks[kMaxTasks];
  const StepOnDevice* step;  // of all tasks; null: each has its own factor
  int num_tasks;
};
static_assert(sizeof(Batch) <= kParameterBytes);

struct NoParameter {};

template <typename Rule, typename Gradient, typename Parameter>
struct Columns {
  static constexpr bool kHasParameter = !std::is_same_v<Parameter, NoParameter>;

  float* __restrict__ master;
  const Gradient* gradient;  // whose place the parameter may take
  float* __restrict__ first;
  float* __restrict__ second;
  Parameter* parameter;

  // From element `begin` on.
  __device__ Columns(const Task& task, std::int64_t begin)
      : master(task.master + begin),
        gradient(static_cast<const Gradient*>(task.gradient) + begin),
        first(Rule::kNumStates > 0 ? task.first + begin : nullptr),
        second(Rule::kNumStates > 1 ? task.second + begin : nullptr),
        parameter(kHasParameter ? static_cast<Parameter*>(task.parameter) + begin : nullptr) {}

  __device__ void update_one(const ElementScalars& scalars, float factor, int i) const {
    float weight = master[i];
    float of_first = 0;
    float of_second = 0;
    if constexpr (Rule::kNumStates > 0) {
      of_first = first[i];
    }
    if constexpr (Rule::kNumStates > 1) {
      of_second = second[i];
    }
    Rule::update(scalars, widened(gradient[i]) * factor, weight, of_first, of_second);
    master[i] = weight;
    if constexpr (Rule::kNumStates > 0) {
      first[i] = of_first;
    }
    if constexpr (Rule::kNumStates > 1) {
      second[i] = of_second;
    }
    if constexpr (kHasParameter) {
      narrow(weight, parameter[i]);
    }
  }

  // Elements i to i + kWidth, aligned.
  __device__ void update_four(const ElementScalars& scalars, float factor, int i) const {
    const Four<Gradient> gradients = load_four(gradient + i);
    Four<float> weights = load_four(master + i);
    Four<float> firsts{};
    Four<float> seconds{};
    if constexpr (Rule::kNumStates > 0) {
      firsts = load_four(first + i);
    }
    if constexpr (Rule::kNumStates > 1) {
      seconds = load_four(second + i);
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      Rule::update(scalars, widened(gradients.values[k]) * factor, weights.values[k],
                   firsts.values[k], seconds.values[k]);
    }
    store_four(master + i, weights);
    if constexpr (Rule::kNumStates > 0) {
      store_four(first + i, firsts);
    }
    if constexpr (Rule::kNumStates > 1) {
      store_four(second + i, seconds);
    }
    if constexpr (kHasParameter) {
      Four<Parameter> rounded;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        narrow(weights.values[k], rounded.values[k]);
      }
      store_four(parameter + i, rounded);
    }
  }
};

// Tile `tile` of a task: its part of the fours; the first tile also does what is before and behind
// them. Without fours, all elements are the head, and each tile does its part of that.
template <typename Rule, typename Gradient, typename Parameter>
__device__ void update_tile(const Task& task, float factor, std::int64_t tile) {
  using TaskColumns = Columns<Rule, Gradient, Parameter>;
  const ElementScalars scalars = task.scalars;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t first = tile * kTileNumel;
  if (task.head == task.numel) {
    const TaskColumns columns(task, first);
    const int end = static_cast<int>(min(kTileNumel, task.numel - first));
    for (int i = thread; i < end; i += kThreads) {
      columns.update_one(scalars, factor, i);
    }
    return;
  }
  const std::int64_t num_fours = (task.numel - task.head) / kWidth;
  if (tile == 0) {
    const std::int64_t tail = task.head + num_fours * kWidth;
    if (thread < task.head) {
      TaskColumns(task, 0).update_one(scalars, factor, thread);
    } else if (thread - task.head < task.numel - tail) {
      TaskColumns(task, tail - task.head).update_one(scalars, factor, thread);
    }
  }
  const TaskColumns columns(task, task.head + first);
  const int end = static_cast<int>(min(kTileFours, num_fours - tile * kTileFours));
  for (int four = thread; four < end; four += kThreads) {
    columns.update_four(scalars, factor, four * kWidth);
  }
}

template <typename Rule, typename Gradient>
__device__ void update_parameter(const Task& task, float factor, std::int64_t tile) {
  if (task.parameter == nullptr) {
    update_tile<Rule, Gradient, NoParameter>(task, factor, tile);
  } else if (task.parameter_dtype == DType::kBFloat16) {
    update_tile<Rule, Gradient, BFloat16>(task, factor, tile);
  } else {
    update_tile<Rule, Gradient, Float16>(task, factor, tile);
  }
}

template <typename Rule>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    update_tasks(const __grid_constant__ Batch batch) {
  if (batch.step != nullptr && batch.step->skips != 0) {
    return;
  }
  const float of_step = batch.step == nullptr ? 0.0F : element_factor(*batch.step);
  const std::int64_t num_tiles = batch.tasks[batch.num_tasks - 1].last_tile;
  int at = 0;  // tiles only go up, and so does the task
  for (std::int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    while (tile >= batch.tasks[at].last_tile) {
      ++at;
    }
    const Task& task = batch.tasks[at];
    const std::int64_t of_task = tile - (at == 0 ? 0 : batch.tasks[at - 1].last_tile);
    const float factor = batch.step == nullptr ? task.scalars.gradient_scale : of_step;
    if (task.gradient_dtype == DType::kFloat32) {
      update_parameter<Rule, float>(task, factor, of_task);
    } else if (task.gradient_dtype == DType::kBFloat16) {
      update_parameter<Rule, BFloat16>(task, factor, of_task);
    } else {
      update_parameter<Rule, Float16>(task, factor, of_task);
    }
  }
}

Task task_of(const RoundedTask& given, std::int64_t first_tile) {
  const UpdateSpan& span = given.span;
  Task task{};
  task.scalars = given.scalars;
  task.master = span.master;
  task.gradient = span.gradient;
  task.first = span.states[0];
  task.second = span.states[1];
  task.parameter = span.parameter;
  task.numel = span.numel;
  task.head = head_numel({{span.master, sizeof(float)},
                          {span.gradient, bytes_of(span.gradient_dtype)},
                          {span.states[0], sizeof(float)},
                          {span.states[1], sizeof(float)},
                          {span.parameter, bytes_of(span.parameter_dtype)}},
                         span.numel);
  task.last_tile = first_tile + (span.numel + kTileNumel - 1) / kTileNumel;
  task.gradient_dtype = span.gradient_dtype;
  task.parameter_dtype = span.parameter_dtype;
  return task;
}

void launch_batch(ElementRule rule, const Batch& batch, cudaStream_t stream) {
  const unsigned grid = grid_of(batch.tasks[batch.num_tasks - 1].last_tile, kBlocksPerProcessor);
  switch (rule) {
    case ElementRule::kAdamW:
      update_tasks<AdamWElement><<<grid, kThreads, 0, stream>>>(batch);
      break;
    case ElementRule::kAdam:
      update_tasks<AdamElement><<<grid, kThreads, 0, stream>>>(batch);
      break;
    case ElementRule::kSgd:
      update_tasks<SgdElement><<<grid, kThreads, 0, stream>>>(batch);
      break;
    case ElementRule::kMomentum:
      update_tasks<MomentumElement><<<grid, kThreads, 0, stream>>>(batch);
      break;
    case ElementRule::kLion:
      update_tasks<LionElement><<<grid, kThreads, 0, stream>>>(batch);
      break;
  }
  device::check_cuda("update kernel", cudaGetLastError());
}

}  // namespace

void launch_updates(ElementRule rule, std::span<const RoundedTask> tasks, cudaStream_t stream) {
  Batch batch{};
  std::int64_t num_tiles = 0;
  const auto launch = [&] {
    if (batch.num_tasks > 0) {
      launch_batch(rule, batch, stream);
    }
    batch.num_tasks = 0;
    num_tiles = 0;
  };
  for (const RoundedTask& task : tasks) {
    if (task.span.numel == 0) {
      continue;
    }
    if (batch.num_tasks == kMaxTasks || batch.step != task.step) {
      launch();
    }
    batch.step = task.step;
    batch.tasks[batch.num_tasks] = task_of(task, num_tiles);
    num_tiles = batch.tasks[batch.num_tasks].last_tile;
    ++batch.num_tasks;
  }
  launch();
}

}  // namespace tessera::optim::cuda
