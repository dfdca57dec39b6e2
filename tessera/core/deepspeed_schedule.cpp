#include "tessera/core/deepspeed_schedule.h"

#include <algorithm>
#include <array>

#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera {
namespace {

constexpr std::string_view kType = "scheduler.type";
constexpr std::string_view kParams = "scheduler.params";

struct Scheduler {
  std::string_view name;  // as DeepSpeed writes it
  std::string_view kind;  // of schedule.kind
  std::string_view parameters;
  std::string_view largest_lr;  // the parameter that is the learning rate; empty: the optimizer's
};

constexpr std::array kSchedulers = {
    Scheduler{"WarmupLR", "constant",
              "warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration",
              "warmup_max_lr"},
    Scheduler{"WarmupDecayLR", "linear",
              "total_num_steps, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, "
              "last_batch_iteration",
              "warmup_max_lr"},
    Scheduler{"WarmupCosineLR", "cosine",
              "total_num_steps, warmup_min_ratio, warmup_num_steps, cos_min_ratio, warmup_type, "
              "last_batch_iteration",
              ""},
    Scheduler{"OneCycle", "one_cycle",
              "cycle_min_lr, cycle_max_lr, decay_lr_rate, cycle_first_step_size, "
              "cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count, "
              "decay_step_size, cycle_momentum, cycle_min_mom, cycle_max_mom, decay_mom_rate, "
              "last_batch_iteration",
              "cycle_max_lr"},
    Scheduler{"LRRangeTest", "range_test",
              "lr_range_test_min_lr, lr_range_test_step_size, lr_range_test_step_rate, "
              "lr_range_test_staircase, last_batch_iteration",
              ""},
};

std::string param(std::string_view name) { return detail::concat(kParams, ".", name); }

bool has_parameter(const Scheduler& scheduler, std::string_view name) {
  const std::string list = detail::concat(", ", scheduler.parameters, ",");
  return list.find(detail::concat(", ", name, ",")) != std::string::npos;
}

// Null: the file has no scheduler.
const Scheduler* scheduler_of(const DeepSpeedView& view) {
  if (!view.has(kType)) {
    TESSERA_CHECK(!view.has_block(kParams), ConfigError, view.where(kParams),
                  " are given without scheduler.type; give the type too");
    return nullptr;
  }
  const std::string type = lower_case(view.text(kType));
  const auto found =
      std::find_if(kSchedulers.begin(), kSchedulers.end(),
                   [&type](const Scheduler& each) { return lower_case(each.name) == type; });
  TESSERA_CHECK(found != kSchedulers.end(), ConfigError, view.where(kType), " = ",
                in_quotes(view.text(kType)),
                ": expected WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest");
  return &*found;
}

void check_parameters(const Scheduler& scheduler, const DeepSpeedView& view) {
  for (const auto& [path, value] : view.input().values) {
    if (parent_of(path) == kParams) {
      TESSERA_CHECK(has_parameter(scheduler, path.substr(kParams.size() + 1)), ConfigError,
                    view.where(path), ": ", scheduler.name, " has no such parameter; it has ",
                    scheduler.parameters);
    }
  }
}

class ScheduleRules {
 public:
  ScheduleRules(const DeepSpeedView& view, DeepSpeedTranslation& out) : view_(view), out_(out) {}

  void apply(const Scheduler& scheduler) {
    check_parameters(scheduler, view_);
    add_setting(out_, view_, kType, "schedule.kind", std::string(scheduler.kind));
    if (const std::string last = param("last_batch_iteration"); view_.has(last)) {
      const std::int64_t iteration = view_.integer(last, -1);
      TESSERA_CHECK(iteration >= -1 && iteration < (std::int64_t{1} << 53), ConfigError,
                    view_.where(last), " = ", iteration,
                    ": expected a whole number from -1, the beginning, to 9007199254740991");
      add_setting(out_, view_, last, "schedule.first_step", iteration + 1);
    }
    if (scheduler.kind == "one_cycle") {
      one_cycle();
    } else if (scheduler.kind == "range_test") {
      range_test();
    } else {
      warmup(scheduler.kind == "linear", scheduler.kind == "cosine");
    }
  }

 private:
  void warmup(bool decays, bool is_cosine) {
    add_setting(out_, view_, kType, "schedule.deepspeed_timing", true);
    const std::string steps = param("warmup_num_steps");
    if (view_.has(steps)) {
      // DeepSpeed takes one step for two. None is none, which it took for two once.
      const std::int64_t given = view_.integer(steps, 0);
      add_setting(out_, view_, steps, "schedule.warmup_steps",
                  given == 1 ? std::int64_t{2} : given);
    } else {
      assume("warmup_num_steps", "schedule.warmup_steps", std::int64_t{1000});
    }
    copy("warmup_type", "schedule.warmup_shape");
    assume("warmup_type", "schedule.warmup_shape", "log");
    copy("total_num_steps", "schedule.total_steps");
    copy("warmup_min_lr", "schedule.warmup_start_lr");
    if (decays) {
      copy("warmup_min_lr", "schedule.final_lr");  // where it began
    }
    if (is_cosine) {
      ratio("warmup_min_ratio", "schedule.warmup_start_lr", 0);
      ratio("cos_min_ratio", "schedule.final_lr", 0.0001);
    }
  }

  void one_cycle() {
    for (const char* needed : {"cycle_min_lr", "cycle_max_lr"}) {
      const std::string key = param(needed);
      TESSERA_CHECK(view_.has(key) || view_.is_auto(key), ConfigError, view_.where(key),
                    " is missing; OneCycle needs cycle_min_lr and cycle_max_lr");
    }
    const std::string momentum = param("cycle_momentum");
    const bool cycles = view_.flag(momentum, true);
    // DeepSpeed cycles the first of the betas, and leaves an optimizer without betas alone.
    TESSERA_CHECK(!cycles || lower_case(view_.text("optimizer.type", "adamw")) == "sgd",
                  ConfigError, view_.where(momentum),
                  view_.has(momentum) ? " = true" : " is not given, which means true",
                  ": OneCycle changes the learning rate alone here, not the betas; set it to "
                  "false");
    for (const char* unused :
         {"cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"}) {
      if (view_.has(param(unused))) {
        out_.not_needed.push_back(short_key(param(unused)));
      }
    }
    copy("cycle_min_lr", "schedule.warmup_start_lr");
    copy("cycle_first_step_size", "schedule.cycle_up_steps");
    copy("cycle_second_step_size", "schedule.cycle_down_steps");
    copy("cycle_first_stair_count", "schedule.cycle_up_stairs");
    const std::string up = param("cycle_first_stair_count");
    const std::string down = param("cycle_second_stair_count");
    if (view_.has(down)) {
      copy("cycle_second_stair_count", "schedule.cycle_down_stairs");
    } else if (view_.has(up)) {
      add_setting(out_, view_, up, "schedule.cycle_down_stairs", view_.integer(up, 0));
    }
    copy("decay_step_size", "schedule.decay_steps");
    copy("decay_lr_rate", "schedule.decay_rate");
  }

  void range_test() {
    copy("lr_range_test_min_lr", "schedule.warmup_start_lr");
    assume("lr_range_test_min_lr", "schedule.warmup_start_lr", 0.001);
    copy("lr_range_test_step_size", "schedule.range_steps");
    copy("lr_range_test_step_rate", "schedule.range_rate");
    copy("lr_range_test_staircase", "schedule.range_staircase");
  }

  void copy(std::string_view name, std::string_view option) {
    const std::string key = param(name);
    if (view_.has(key)) {
      add_setting(out_, view_, key, option, view_.input().values.find(key)->second);
    }
  }

  // DeepSpeed's default, where the file has neither a value nor "auto".
  void assume(std::string_view name, std::string_view option, const OptionValue& value) {
    if (const std::string key = param(name); !view_.has(key) && !view_.is_auto(key)) {
      out_.settings.push_back(by_default(key, option));
      out_.settings.back().value = value;
    }
  }

  void ratio(std::string_view name, std::string_view option, double otherwise) {
    const std::string key = param(name);
    if (view_.has(key)) {
      const double given = view_.real(key, otherwise);
      TESSERA_CHECK(given >= 0 && given <= 1, ConfigError, view_.where(key), " = ",
                    to_text(OptionValue(given)), ": expected a number from 0 to 1");
      add_setting(out_, view_, key, option, given);
      out_.settings.back().lr_ratio = given;
    } else if (!view_.is_auto(key) && otherwise > 0) {
      out_.settings.push_back(by_default(key, option));
      out_.settings.back().lr_ratio = otherwise;
    }
  }

  static DeepSpeedSetting by_default(const std::string& key, std::string_view option) {
    DeepSpeedSetting setting;
    setting.option = find_option(option);
    setting.key = key;
    setting.from = key + " not given";
    setting.by_default = true;
    return setting;
  }

  const DeepSpeedView& view_;
  DeepSpeedTranslation& out_;
};

}  // namespace

void apply_learning_rate(const DeepSpeedView& view, DeepSpeedTranslation& out) {
  constexpr std::string_view kLr = "optimizer.params.lr";
  const Scheduler* const scheduler = scheduler_of(view);
  const bool has_own = scheduler != nullptr && !scheduler->largest_lr.empty() &&
                       view.has(param(scheduler->largest_lr));
  if (has_own) {
    const std::string key = param(scheduler->largest_lr);
    add_setting(out, view, key, "optim.lr", view.real(key, 0));
    if (view.has(kLr) && view.real(kLr, 0) != view.real(key, 0)) {
      out.not_needed.push_back(
          detail::concat(short_key(kLr), " (", scheduler->largest_lr, " goes before it)"));
    }
  } else if (view.has(kLr)) {
    add_setting(out, view, kLr, "optim.lr", view.real(kLr, 0));
  }
}

void apply_schedule(const DeepSpeedView& view, DeepSpeedTranslation& out) {
  if (const Scheduler* const scheduler = scheduler_of(view)) {
    ScheduleRules(view, out).apply(*scheduler);
  }
}

}  // namespace tessera
