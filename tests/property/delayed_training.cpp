#include "tests/property/delayed_training.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <sstream>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"

namespace tessera::testing {
namespace {

using coordinator::Phase;

constexpr std::uint64_t kPlanStream = 2001;
constexpr float kLearningRate = 0.125F;  // a power of two: an update rounds once
constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max() / 4;

class PlainTensor final : public shard::FullTensor {
 public:
  explicit PlainTensor(const float** data) : data_(data) {}
  void attach(void* data) override { *data_ = static_cast<const float*>(data); }
  void detach() override { *data_ = nullptr; }

 private:
  const float** data_;
};

float initial_value(int param, std::int64_t element) {
  return static_cast<float>((param * 131 + element * 17) % 257) / 64 - 2;
}

struct Source {
  int step = 0;
  int micro_batch = 0;
  int rank = 0;
};

// Of many magnitudes, so that another order of summation is another sum.
float gradient_value(float value, const Source& source, int param, std::int64_t element) {
  const auto mix = static_cast<std::uint64_t>(source.step * 7919 + source.micro_batch * 104729 +
                                              source.rank * 1299709 + param * 15485863 + element) *
                   0x9E3779B97F4A7C15ULL;
  return value * 0.25F + static_cast<float>(mix >> 40) / static_cast<float>(1 << ((mix & 7) + 16));
}

// Units in which order; see TrainingPlan::orders.
int unit_of(int entry) { return entry < 0 ? -1 - entry : entry; }

std::unique_ptr<device::Device> make_device(const TrainingPlan& plan, int rank) {
  if (plan.device == DeviceChoice::kCpu) {
    return device::make_cpu_device({});
  }
  device::MockDeviceOptions options;
  options.mode =
      plan.device == DeviceChoice::kLazy ? device::LateMode::kLazy : device::LateMode::kRandom;
  options.seed = plan.seed * 8 + static_cast<std::uint64_t>(rank);
  return device::make_mock_device(options);
}

// The parameters that a step uses.
std::vector<bool> used_params(const TrainingPlan& plan, int step) {
  std::vector<bool> used(plan.numels.size(), false);
  for (const int entry : plan.orders[static_cast<std::size_t>(step) % plan.orders.size()]) {
    for (const int param : plan.units[static_cast<std::size_t>(unit_of(entry))]) {
      used[static_cast<std::size_t>(param)] = true;
    }
  }
  return used;
}

}  // namespace

TrainingPlan draw_training(std::uint64_t seed) {
  Draw draw(seed, kPlanStream);
  TrainingPlan plan;
  plan.seed = seed;
  plan.ranks = draw.between(2, 4);
  plan.steps = draw.between(3, 4);
  plan.micro_batches = draw.between(1, 2);
  // One byte: a collective for every element, of few elements.
  plan.bucket_bytes = draw.one_of<std::int64_t>({1, 64, 1000, kUnlimited});
  const int num_params = draw.between(1, 8);
  for (int i = 0; i < num_params; ++i) {
    plan.numels.push_back(plan.bucket_bytes == 1
                              ? draw.one_of<std::int64_t>({0, 1, 3, 7, 15})
                              : draw.one_of<std::int64_t>({0, 1, 3, 7, 33, 90, 150, 260, 301}));
  }
  const int num_units = draw.between(1, 6);
  for (int i = 0; i < num_units; ++i) {
    std::vector<int> params;
    for (int p = 0; p < num_params; ++p) {
      if (draw.chance(40)) {
        params.push_back(p);
      }
    }
    plan.units.push_back(std::move(params));
  }
  const int num_orders = draw.between(1, 2);
  for (int i = 0; i < num_orders; ++i) {
    std::vector<int> order;
    const int num_uses = draw.between(1, 8);
    for (int use = 0; use < num_uses; ++use) {
      const int unit = draw.between(0, num_units - 1);
      order.push_back(use > 0 && draw.chance(25) ? -1 - unit : unit);
    }
    plan.orders.push_back(std::move(order));
  }
  coordinator::PlanBudgets& budgets = plan.coordinator.budgets;
  budgets.bucket_bytes = draw.one_of<std::int64_t>({0, 1, 1000, kUnlimited});
  budgets.max_inflight = draw.between(1, 4);
  budgets.live_limit_bytes = draw.one_of<std::int64_t>({0, 700, 2000, 8000, kUnlimited});
  budgets.reuse_distance_bytes = draw.one_of<std::int64_t>({0, 2000, kUnlimited});
  plan.coordinator.persist_param_bytes = draw.one_of<std::int64_t>({0, 64, kUnlimited});
  plan.coordinator.persist_model_bytes = draw.one_of<std::int64_t>({0, 500, kUnlimited});
  plan.pack_below_bytes = draw.one_of<std::size_t>({0, 100, 1 << 16});
  plan.device = draw.one_of({DeviceChoice::kCpu, DeviceChoice::kLazy, DeviceChoice::kRandom});
  return plan;
}

std::string TrainingPlan::describe() const {
  std::ostringstream out;
  const auto list = [&](const auto& values) {
    out << '{';
    for (std::size_t i = 0; i < values.size(); ++i) {
      out << (i > 0 ? " " : "") << values[i];
    }
    out << '}';
  };
  constexpr const char* kDevices[] = {"cpu", "lazy", "random"};
  out << "seed " << seed << ": " << ranks << " ranks, " << steps << " steps, " << micro_batches
      << " micro-batches, device " << kDevices[static_cast<std::size_t>(device)]
      << "\n  parameters ";
  list(numels);
  out << "\n  units";
  for (const auto& unit : units) {
    out << ' ';
    list(unit);
  }
  out << "\n  orders";
  for (const auto& order : orders) {
    out << ' ';
    list(order);
  }
  const coordinator::PlanBudgets& budgets = coordinator.budgets;
  out << "\n  prefetch " << budgets.bucket_bytes << " x " << budgets.max_inflight << ", live limit "
      << budgets.live_limit_bytes << ", reuse distance " << budgets.reuse_distance_bytes
      << ", persistent " << coordinator.persist_param_bytes << " of "
      << coordinator.persist_model_bytes << ", gradient buckets " << bucket_bytes
      << ", packed below " << pack_below_bytes << '\n';
  return out.str();
}

Versions train_at_once(const TrainingPlan& plan) {
  Versions versions(1);
  for (std::size_t p = 0; p < plan.numels.size(); ++p) {
    std::vector<float>& values = versions[0].emplace_back();
    for (std::int64_t e = 0; e < plan.numels[p]; ++e) {
      values.push_back(initial_value(static_cast<int>(p), e));
    }
  }
  const auto scale = static_cast<float>(1.0 / (plan.ranks * plan.micro_batches));
  for (int step = 0; step < plan.steps; ++step) {
    std::vector<std::vector<float>> next = versions.back();
    const std::vector<bool> used = used_params(plan, step);
    for (std::size_t p = 0; p < next.size(); ++p) {
      for (std::size_t e = 0; used[p] && e < next[p].size(); ++e) {
        float sum = 0;
        for (int micro = 0; micro < plan.micro_batches; ++micro) {
          float over_ranks = 0;
          for (int rank = 0; rank < plan.ranks; ++rank) {
            const float term = gradient_value(next[p][e], {step, micro, rank}, static_cast<int>(p),
                                              static_cast<std::int64_t>(e));
            over_ranks = rank == 0 ? term : over_ranks + term;
          }
          sum = micro == 0 ? over_ranks : sum + over_ranks;
        }
        next[p][e] -= kLearningRate * (sum * scale);
      }
    }
    versions.push_back(std::move(next));
  }
  return versions;
}

RankTraining::RankTraining(comm::Group& group, const TrainingPlan& plan, const Versions& expected)
    : plan_(plan),
      expected_(expected),
      reduce_group_(group.split(0, "reduce")),
      device_(make_device(plan, group.rank())),
      data_(plan.numels.size(), nullptr),
      params_(group.rank(), group.size(), *device_),
      spans_(clock_, 0),
      kernels_(optim::make_cpu_kernels(1)) {
  for (std::size_t i = 0; i < plan_.numels.size(); ++i) {
    shard::ParamSpec spec;
    spec.name = detail::concat("p", i);
    spec.numel = plan_.numels[i];
    const shard::Param& param = params_.add(spec, std::make_unique<PlainTensor>(&data_[i]));
    auto* shard = reinterpret_cast<float*>(param.shard());
    for (std::int64_t e = 0; e < param.range().numel; ++e) {
      shard[e] = initial_value(static_cast<int>(i), param.range().begin + e);
    }
  }
  LogOptions quiet;
  quiet.level = LogLevel::kError;
  coordinator_ = std::make_unique<coordinator::Coordinator>(
      coordinator::CoordinatorParts{group, *device_, params_, clock_, spans_, Logger(quiet)},
      plan.coordinator);
  for (std::size_t i = 0; i < plan_.units.size(); ++i) {
    coordinator_->add_unit(detail::concat("u", i), plan_.units[i]);
  }
  grad::ReducerOptions reductions;
  reductions.bucket_bytes = plan.bucket_bytes;
  reducer_ = std::make_unique<grad::Reducer>(
      grad::ReducerParts{*reduce_group_, *device_, params_, clock_, spans_}, reductions);
  optim::RuleOptions rule;
  rule.kind = optim::RuleKind::kSgd;
  rule.weight_decay = 0;
  optimizer_ = std::make_unique<optim::Optimizer>(
      params_, rule, optim::OptimizerOptions{*device_, *kernels_, clock_, spans_});
  optimizer_->make_states();
}

RankTraining::~RankTraining() = default;

std::vector<std::string> RankTraining::run() {
  for (int step = 0; step < plan_.steps; ++step) {
    run_step(step);
  }
  optimizer_->wait();
  for (int id = 0; id < params_.num_params(); ++id) {
    const shard::Param& param = params_[id];
    const std::vector<float>& last = expected_.back()[static_cast<std::size_t>(id)];
    if (param.range().numel > 0 &&
        std::memcmp(param.shard(), last.data() + param.range().begin,
                    static_cast<std::size_t>(param.range().numel) * sizeof(float)) != 0) {
      findings_.push_back(detail::concat("the shard of ", param.name(), " at the end"));
    }
  }
  return findings_;
}

void RankTraining::run_step(int step) {
  for (int micro = 0; micro < plan_.micro_batches; ++micro) {
    run_micro_batch(step, micro);
  }
  coordinator_->end_step();
  if (coordinator_->full_bytes() != 0) {
    findings_.push_back(
        detail::concat(coordinator_->full_bytes(), " full bytes after step ", step));
  }
  optimizer_->sum_of_squares(*reducer_);
  optimizer_->start_update(*reducer_, kLearningRate, 1.0 / (plan_.ranks * plan_.micro_batches));
  is_updating_ = true;
}

// The update reads gradients, whose memory the next backward takes.
void RankTraining::finish_update() {
  if (std::exchange(is_updating_, false)) {
    optimizer_->wait();
    reducer_->clear();
  }
}

void RankTraining::run_micro_batch(int step, int micro_batch) {
  const std::vector<int>& order =
      plan_.orders[static_cast<std::size_t>(step) % plan_.orders.size()];
  std::vector<int> open;
  const auto close_down_to = [&](std::size_t depth, Phase phase) {
    for (; open.size() > depth; open.pop_back()) {
      coordinator_->end_use(open.back(), phase);
    }
  };
  for (const int entry : order) {
    close_down_to(entry < 0 ? 1 : 0, Phase::kForward);
    begin(unit_of(entry), Phase::kForward, step);
    open.push_back(unit_of(entry));
  }
  close_down_to(0, Phase::kForward);
  finish_update();
  // In backward a use ends only after the next has begun, as it may in autograd.
  for (std::size_t i = order.size(); i-- > 0;) {
    const int unit = unit_of(order[i]);
    begin(unit, Phase::kBackward, step);
    close_down_to(0, Phase::kBackward);
    open.push_back(unit);
    for (const int param : plan_.units[static_cast<std::size_t>(unit)]) {
      const bool comes_again = std::any_of(
          order.begin(), order.begin() + static_cast<std::ptrdiff_t>(i), [&](int earlier) {
            const auto& params = plan_.units[static_cast<std::size_t>(unit_of(earlier))];
            return std::count(params.begin(), params.end(), param) > 0;
          });
      if (!comes_again) {
        add_gradient(param, step, micro_batch);
      }
    }
  }
  close_down_to(0, Phase::kBackward);
  reducer_->finish_backward();
}

void RankTraining::begin(int unit, Phase phase, int step) {
  coordinator_->begin_use(unit, phase);
  for (const int param : plan_.units[static_cast<std::size_t>(unit)]) {
    compare(param, step, data_[static_cast<std::size_t>(param)],
            phase == Phase::kForward ? "forward" : "backward");
  }
}

void RankTraining::add_gradient(int param, int step, int micro_batch) {
  auto gradient = std::make_shared<std::vector<float>>();
  const float* values = data_[static_cast<std::size_t>(param)];
  for (std::int64_t e = 0; e < params_[param].layout().numel(); ++e) {
    gradient->push_back(gradient_value(values[e], {step, micro_batch, params_.rank()}, param, e));
  }
  reducer_->add(params_[param], {gradient->data(), DType::kFloat32, gradient});
}

void RankTraining::compare(int param, int version, const float* values, const char* where) {
  const std::vector<float>& right =
      expected_[static_cast<std::size_t>(version)][static_cast<std::size_t>(param)];
  if (!right.empty() && std::memcmp(values, right.data(), right.size() * sizeof(float)) != 0) {
    findings_.push_back(detail::concat("rank ", params_.rank(), " step ", version, ": ",
                                       params_[param].name(), " in ", where));
  }
}

}  // namespace tessera::testing
