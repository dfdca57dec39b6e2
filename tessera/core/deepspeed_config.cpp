#include "tessera/core/deepspeed_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera {
namespace {

using Meaning = DeepSpeedMeaning;

constexpr std::string_view kZero = "zero_optimization";
constexpr std::string_view kScheduler = "scheduler.type";
constexpr std::string_view kSchedulerParams = "scheduler.params";

constexpr std::string_view kQuantisedInit = "weight_quantization.quantized_initialization";
constexpr std::string_view kQuantisedNames = kDeepSpeedQuantisedNames;
constexpr std::string_view kSymmetric = "blocks have a scale and no offset here: values differ";

std::string zero(std::string_view key) { return detail::concat(kZero, ".", key); }
std::string param(std::string_view name) { return detail::concat(kSchedulerParams, ".", name); }

struct Scheduler {
  std::string_view name;  // as DeepSpeed writes it
  std::string_view kind;  // of schedule.kind
  std::string_view parameters;
  std::string_view largest_lr;  // the parameter that is the learning rate; empty: the optimizer's

  bool has_parameter(std::string_view parameter) const {
    const std::string list = detail::concat(", ", parameters, ",");
    return list.find(detail::concat(", ", parameter, ",")) != std::string::npos;
  }
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

// The option that the key's own value is checked against: that of its target where the value is
// the same, else one of the key's type without limits.
Option value_option(const DeepSpeedKey& key) {
  if (key.meaning == Meaning::kSame) {
    return *find_option(key.option);
  }
  const bool elements =
      key.meaning == Meaning::kElements || key.meaning == Meaning::kMasterElements;
  const double min = elements ? 0 : -kNoLimit;
  const double max = elements ? kMaxInt64AsDouble : kNoLimit;
  return {key.path, key.type, "", min, max, "", "", 0, "", ""};
}

std::string rename(const DeepSpeedKey& key, const std::string& theirs, const std::string& where) {
  std::string_view rest = key.note;
  std::string known;
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    const auto equals = entry.find('=');
    if (entry.substr(0, equals) == theirs) {
      return std::string(entry.substr(equals + 1));
    }
    known += (known.empty() ? "" : ", ") + std::string(entry.substr(0, equals));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
  }
  throw ConfigError(detail::concat(where, " = ", in_quotes(theirs), ": expected one of ", known));
}

void append(std::string& list, std::string_view word) {
  list.append(list.empty() ? "" : ", ").append(word);
}

class Translator {
 public:
  Translator(const DeepSpeedInput& input, std::string_view source)
      : input_(input), source_(source) {}

  DeepSpeedTranslation run() {
    check_combinations();
    for (const DeepSpeedKey& key : deepspeed_keys()) {
      if (has(key.path)) {
        translate(key);
      } else if (is_auto(key.path)) {
        if (!key.option.empty()) {
          append(autos_, short_key(key.path));
        }
      } else if (!key.default_text.empty() && key.meaning != Meaning::kFixed &&
                 defaults_hold(key)) {
        assume_default(key);
      }
    }
    // The two numbers of a list have one "auto" together.
    if (is_auto("optimizer.params.betas")) {
      append(autos_, short_key("optimizer.params.betas"));
    }
    check_stage();
    check_accumulation();
    apply_precision();
    apply_deprecated();
    apply_sharding();
    apply_quantised_weights();
    apply_paths();
    apply_optimizer();
    apply_schedule();
    make_notices();
    return std::move(out_);
  }

 private:
  // --- what the file says ---

  bool has(std::string_view path) const { return input_.values.count(path) != 0; }
  bool is_auto(std::string_view path) const { return input_.autos.count(path) != 0; }
  bool has_block(std::string_view path) const { return input_.blocks.count(path) != 0; }
  const OptionValue& raw(std::string_view path) const { return input_.values.find(path)->second; }

  // With the type that the table gives the key.
  OptionValue checked(const DeepSpeedKey& key) const {
    return check_value(value_option(key), raw(key.path), where(key.path));
  }
  template <typename Value>
  Value get(std::string_view path, Value otherwise) const {
    if (!has(path)) {
      return otherwise;
    }
    const DeepSpeedKey* key = find_deepspeed_key(path);
    TESSERA_INVARIANT(key != nullptr, path, " is not in the table of DeepSpeed's keys");
    return std::get<Value>(checked(*key));
  }
  bool flag(std::string_view path, bool otherwise = false) const { return get(path, otherwise); }
  std::string text(std::string_view path, std::string otherwise = "") const {
    return get(path, std::move(otherwise));
  }

  // `key = value`, as it stands in the file.
  std::string shown(std::string_view path) const {
    const OptionValue& value = raw(path);
    const auto* real = std::get_if<double>(&value);
    const bool whole = real != nullptr && std::floor(*real) == *real && std::abs(*real) < 0x1p53;
    return detail::concat(
        path, " = ", whole ? std::to_string(static_cast<std::int64_t>(*real)) : to_text(value));
  }
  std::string where(std::string_view path) const { return detail::concat(source_, ": ", path); }

  // --- what becomes of a key ---

  void translate(const DeepSpeedKey& key) {
    const std::string where = this->where(key.path);
    switch (key.meaning) {
      case Meaning::kNotNeeded:
        checked(key);
        append(not_needed_, short_key(key.path));
        break;
      case Meaning::kFixed:
        TESSERA_CHECK(checked(key) == parse_value(value_option(key), key.default_text, key.path),
                      ConfigError, where, " = ", to_text(raw(key.path)), ": only ",
                      key.default_text, " is supported: ", key.note);
        break;
      case Meaning::kForeign:
        TESSERA_CHECK(!std::get<bool>(raw(key.path)), ConfigError, where,
                      ": not supported: ", key.note, "; remove it or set enabled to false");
        break;
      case Meaning::kElsewhere:
        if (std::get<bool>(raw(key.path))) {
          append(elsewhere_[key.note], short_key(key.path));
        }
        break;
      case Meaning::kSpecial:
        checked(key);  // the rest in a function of its own
        break;
      case Meaning::kRenamed:
        add(key, rename(key, std::get<std::string>(checked(key)), where), shown(key.path), false);
        break;
      case Meaning::kElements:
      case Meaning::kMasterElements:
      case Meaning::kSame:
        add(key, checked(key), shown(key.path), false);
        break;
    }
  }

  void assume_default(const DeepSpeedKey& key) {
    const std::string from = detail::concat(key.path, " not given: ", key.default_text);
    if (key.meaning == Meaning::kRenamed) {
      add(key, rename(key, std::string(key.default_text), where(key.path)), from, true);
    } else if (key.default_text == "9223372036854775807") {
      add(key, kUnlimitedBytes, from, true);  // the one default that a double cannot hold
    } else {
      add(key, parse_value(value_option(key), key.default_text, key.path), from, true);
    }
  }

  // DeepSpeed's defaults hold inside the blocks that a file gives and that are in force.
  bool defaults_hold(const DeepSpeedKey& key) const {
    const std::string_view block = parent_of(key.path);
    if (block.empty() || !has_block(block)) {
      return false;
    }
    if (block == "fp16" || block == "bf16") {
      return flag(detail::concat(block, ".enabled"));
    }
    const bool offloads =
        block.ends_with(".offload_param") || block.ends_with(".offload_optimizer");
    return !offloads || key.path.ends_with(".device") ||
           text(detail::concat(block, ".device"), "none") == "nvme";
  }

  ConfigSetting& add(std::string_view key, std::string_view option, OptionValue value,
                     std::string from, bool by_default) {
    ConfigSetting setting;
    setting.option = find_option(option);
    TESSERA_INVARIANT(setting.option != nullptr, key, " names no option");
    setting.value = std::move(value);
    setting.origin = where(key);
    setting.kind = by_default ? SettingOrigin::kDeepSpeedDefault : SettingOrigin::kDeepSpeed;
    setting.from = std::move(from);
    out_.settings.push_back(std::move(setting));
    return out_.settings.back();
  }

  void add(const DeepSpeedKey& key, const OptionValue& value, std::string from, bool by_default) {
    ConfigSetting& setting = add(key.path, key.option, value, std::move(from), by_default);
    setting.least_bytes = key.least_bytes;
    if (key.meaning == Meaning::kElements) {
      setting.numel = std::get<std::int64_t>(value);
    } else if (key.meaning == Meaning::kMasterElements) {
      setting.value =
          std::max(key.least_bytes, bytes_of_elements(std::get<std::int64_t>(value), 4));
    }
  }

  // Sets `option` because of `key`, which the file gives.
  ConfigSetting& set(std::string_view key, std::string_view option, const OptionValue& value) {
    return add(key, option, check_value(*find_option(option), value, where(key)), shown(key),
               false);
  }

  // DeepSpeed's default of a scheduler's parameter, where the file has neither a value nor "auto".
  ConfigSetting* assume(const std::string& key, std::string_view option, const OptionValue& value) {
    return has(key) || is_auto(key) ? nullptr : &add(key, option, value, key + " not given", true);
  }

  // --- keys with rules of their own ---

  void check_stage() const {
    if (has(kZero)) {
      const bool legacy = flag(kZero);
      throw ConfigError(detail::concat(
          where(kZero), " = ", legacy ? "true" : "false", ": the legacy switch means stage ",
          legacy ? 1 : 0, ", but Tessera always shards everything; write {\"stage\": 3}"));
    }
    const std::string key = zero("stage");
    const auto stage = get<std::int64_t>(key, 3);
    TESSERA_CHECK(stage >= 0 && stage <= 3, ConfigError, where(key), " = ", stage,
                  ": expected a whole number from 0 to 3; Tessera works like stage 3");
    TESSERA_CHECK(stage != 0, ConfigError, where(key), " = 0: Tessera always shards ",
                  "everything; set it to 3, and shard.group_size to 1 for a whole copy per rank");
    TESSERA_CHECK(stage == 3, ConfigError, where(key), " = ", stage,
                  ": Tessera always shards everything; set it to 3 or remove it");
  }

  void check_accumulation() const {
    constexpr std::string_view kKey = "data_types.grad_accum_dtype";
    const std::string type = text(kKey, "fp32");
    TESSERA_CHECK(type == "fp32" || type == "float32" || type == "torch.float32" || type == "float",
                  ConfigError, where(kKey), " = ", in_quotes(type),
                  ": only fp32 is supported: gradients of micro-batches are always summed in fp32");
  }

  void apply_precision() {
    TESSERA_CHECK(!flag("fp16.enabled") || !flag("bf16.enabled"), ConfigError,
                  where("fp16.enabled"), " and bf16.enabled are both true; choose one");
    for (const char* name : {"fp16", "bf16"}) {
      if (const std::string key = detail::concat(name, ".enabled"); flag(key)) {
        set(key, "precision", name);
      }
    }
    constexpr std::string_view kPower = "fp16.initial_scale_power";
    if (has(kPower)) {
      const auto power = get<std::int64_t>(kPower, 0);
      TESSERA_CHECK(power >= 0 && power <= 126, ConfigError, where(kPower), " = ", power,
                    ": expected a whole number from 0 to 126");
      set(kPower, "loss_scale.initial", std::ldexp(1.0, static_cast<int>(power)));
    }
  }

  // A deprecated key that stands for another one, which must then not be given as well.
  void apply_deprecated() {
    const auto check_alone = [this](const std::string& old, const std::string& replacement) {
      TESSERA_CHECK(!has(replacement) && !has_block(replacement), ConfigError, where(old),
                    " is deprecated and stands beside ", replacement,
                    ", which replaces it; remove ", old);
    };
    for (const auto& [old, block, option] :
         {std::tuple{"cpu_offload", "offload_optimizer", "place.optimizer"},
          std::tuple{"cpu_offload_param", "offload_param", "place.parameters"}}) {
      if (const std::string key = zero(old); has(key)) {
        check_alone(key, zero(block));
        set(key, option, flag(key) ? "host" : "device");
        append(old_names_, detail::concat(old, " (now ", block, ")"));
      }
    }
    const std::string gather = zero("stage3_gather_fp16_weights_on_model_save");
    if (has(gather)) {
      check_alone(gather, zero("stage3_gather_16bit_weights_on_model_save"));
      append(not_needed_, short_key(gather));
    }
  }

  void apply_sharding() {
    if (const std::string mics = zero("mics_shard_size"); has(mics)) {
      const auto ranks = get<std::int64_t>(mics, -1);
      set(mics, "shard.group_size", ranks == -1 ? std::int64_t{0} : ranks);
      std::string ignored;
      for (const char* const key : {"zero_quantized_weights", "zero_quantized_gradients"}) {
        if (ranks > 0 && flag(zero(key))) {
          append(ignored, key);
        }
      }
      if (ranks > 0 && get<std::int64_t>(zero("zero_hpz_partition_size"), 1) > 1) {
        append(ignored, "zero_hpz_partition_size");
      }
      if (!ignored.empty()) {
        append(different_, ignored + " (ignored beside mics_shard_size there, done here)");
      }
    }
    const std::string loco = zero("zeropp_loco_param");
    if (has_block(loco)) {
      for (const char* part : {".err_beta", ".reset_T"}) {
        TESSERA_CHECK(has(loco + part), ConfigError, where(loco), ": ", loco, part,
                      " is missing; both err_beta and reset_T are needed");
      }
      add(loco, "quant.error_feedback", true, loco + " given", false);
    }
  }

  // Weights that are kept as blocks: there are three ways to say so.
  void apply_quantised_weights() {
    const std::string nontrainable = zero("zero_quantized_nontrainable_weights");
    if (has(nontrainable)) {
      set(nontrainable, "quant.frozen_bits", std::int64_t{flag(nontrainable) ? 8 : 0});
    }
    const std::string bits = detail::concat(kQuantisedInit, ".num_bits");
    if (has(bits)) {
      set(bits, "quant.frozen_bits", checked_bits(get<std::int64_t>(bits, 0), where(bits)));
    }
    const std::string symmetric = detail::concat(kQuantisedInit, ".symmetric");
    if (has(symmetric) && !flag(symmetric)) {
      append(different_, detail::concat(kQuantisedInit, ".symmetric = false (", kSymmetric, ")"));
    }
    TESSERA_CHECK(!flag(kQuantisedNames), ConfigError, where(kQuantisedNames),
                  " = true: expected an object with a part of the names of modules for each key");
    if (!input_.quantised_names.empty()) {
      apply_quantised_names();
    }
  }

  std::int64_t checked_bits(std::int64_t bits, const std::string& where) const {
    TESSERA_CHECK(bits == 4 || bits == 8, ConfigError, where, " = ", bits,
                  ": frozen weights are kept as integers of 4 or 8 bits");
    return bits;
  }

  // Of every module whose name contains a key the weight; here of those that are frozen.
  void apply_quantised_names() {
    TESSERA_CHECK(!has_block(kQuantisedInit), ConfigError, where(kQuantisedNames), " and ",
                  kQuantisedInit,
                  " are both given, which DeepSpeed refuses, too; keep one of them");
    std::vector<std::string> patterns;
    std::map<std::string, std::int64_t, std::less<>> common;
    for (const DeepSpeedQuantisedNames& names : input_.quantised_names) {
      const std::string path = detail::concat(kQuantisedNames, ".", printable(names.key));
      TESSERA_CHECK(!names.key.empty() && names.key.find_first_of("*,") == std::string::npos,
                    ConfigError, where(path),
                    ": a part of the names of modules, without * or comma, is expected");
      for (const auto& [key, value] : names.values) {
        check_quantised_name(path, key, value, common);
      }
      TESSERA_CHECK(names.values.count("num_bits") != 0, ConfigError, where(path),
                    ".num_bits is missing; give 4 or 8");
      patterns.push_back(detail::concat("*", names.key, "*.weight"));
    }
    for (const auto& [key, option] :
         {std::pair{"num_bits", "quant.frozen_bits"}, {"group_size", "quant.block_numel"}}) {
      if (const auto found = common.find(key); found != common.end()) {
        add(kQuantisedNames, option,
            check_value(*find_option(option), found->second, where(kQuantisedNames)),
            detail::concat(kQuantisedNames, ": ", key, " = ", found->second), false);
      }
    }
    add(kQuantisedNames, "quant.frozen_names", patterns, std::string(kQuantisedNames), false);
    append(different_,
           detail::concat(kQuantisedNames, " (of frozen weights alone; ", kSymmetric, ")"));
  }

  void check_quantised_name(const std::string& path, const std::string& key,
                            const OptionValue& value,
                            std::map<std::string, std::int64_t, std::less<>>& common) const {
    const DeepSpeedKey* const known = find_deepspeed_key(detail::concat(kQuantisedInit, ".", key));
    const std::string where = this->where(detail::concat(path, ".", printable(key)));
    TESSERA_CHECK(known != nullptr, ConfigError, where,
                  ": unknown key; expected num_bits, group_size, group_dim or symmetric");
    const OptionValue given = check_value(value_option(*known), value, where);
    if (known->meaning == Meaning::kFixed) {
      TESSERA_CHECK(given == parse_value(value_option(*known), known->default_text, known->path),
                    ConfigError, where, " = ", to_text(value), ": only ", known->default_text,
                    " is supported: ", known->note);
    } else if (const auto* const number = std::get_if<std::int64_t>(&given)) {
      if (key == "num_bits") {
        checked_bits(*number, where);
      }
      const auto [first, inserted] = common.emplace(key, *number);
      TESSERA_CHECK(inserted || first->second == *number, ConfigError, where, " = ", *number,
                    ", and another key of ", kQuantisedNames, " has ", first->second,
                    "; all weights are kept with one ", key, " here: take one for all of them");
    }
  }

  void apply_paths() {
    std::vector<std::string> paths;
    std::string last_key;
    for (const char* block : {"offload_param", "offload_optimizer"}) {
      const std::string key = zero(detail::concat(block, ".nvme_path"));
      const std::string device = zero(detail::concat(block, ".device"));
      const std::string path = text(key);
      TESSERA_CHECK(text(device) != "nvme" || !path.empty(), ConfigError, where(device),
                    " = \"nvme\": nvme_path is missing; give a directory on the disk");
      if (!path.empty() && std::find(paths.begin(), paths.end(), path) == paths.end()) {
        paths.push_back(path);
        last_key = key;
      }
    }
    if (!paths.empty()) {
      set(last_key, "nvme.paths", paths);
    }
  }

  void apply_optimizer() {
    constexpr std::string_view kType = "optimizer.type";
    const std::string type = lower_case(text(kType));
    const bool decoupled = flag("optimizer.params.adam_w_mode", true);
    if (type == "adam" || type == "adamw") {
      set(kType, "optim.kind", type == "adamw" || decoupled ? "adamw" : "adam");
    } else if (type == "sgd" || type == "lion") {
      set(kType, "optim.kind", type);
    } else if (!type.empty()) {
      const bool compressed = type.starts_with("onebit") || type.starts_with("zeroone");
      throw ConfigError(detail::concat(
          where(kType), " = ", in_quotes(text(kType)),
          compressed ? ": compressed optimizers do not go with sharded parameters; use "
                     : ": not supported; use ",
          "Adam, AdamW, SGD or Lion"));
    }
  }

  // --- the schedule: learning rates as DeepSpeed's engine trains with (optim/schedule.h) ---

  // Null: the file has no scheduler.
  const Scheduler* find_scheduler() const {
    if (!has(kScheduler)) {
      TESSERA_CHECK(!has_block(kSchedulerParams), ConfigError, where(kSchedulerParams),
                    " are given without scheduler.type; give the type too");
      return nullptr;
    }
    const std::string type = lower_case(text(kScheduler));
    const auto found =
        std::find_if(kSchedulers.begin(), kSchedulers.end(),
                     [&type](const Scheduler& each) { return lower_case(each.name) == type; });
    TESSERA_CHECK(found != kSchedulers.end(), ConfigError, where(kScheduler), " = ",
                  in_quotes(text(kScheduler)),
                  ": expected WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest");
    return &*found;
  }

  void apply_schedule() {
    const Scheduler* const scheduler = find_scheduler();
    apply_learning_rate(scheduler);
    if (scheduler == nullptr) {
      return;
    }
    for (const auto& [path, value] : input_.values) {
      TESSERA_CHECK(parent_of(path) != kSchedulerParams ||
                        scheduler->has_parameter(path.substr(kSchedulerParams.size() + 1)),
                    ConfigError, where(path), ": ", scheduler->name,
                    " has no such parameter; it has ", scheduler->parameters);
    }
    set(kScheduler, "schedule.kind", std::string(scheduler->kind));
    if (const std::string last = param("last_batch_iteration"); has(last)) {
      const auto iteration = get<std::int64_t>(last, -1);
      TESSERA_CHECK(iteration >= -1 && iteration < (std::int64_t{1} << 53), ConfigError,
                    where(last), " = ", iteration,
                    ": expected a whole number from -1, the beginning, to 9007199254740991");
      set(last, "schedule.first_step", iteration + 1);
    }
    if (scheduler->kind == "one_cycle") {
      apply_one_cycle();
    } else if (scheduler->kind == "range_test") {
      assume(param("lr_range_test_min_lr"), "schedule.warmup_start_lr", 0.001);
    } else {
      apply_warmup(scheduler->kind);
    }
  }

  // The optimizer's, or the largest one of a scheduler that has its own, as in DeepSpeed.
  void apply_learning_rate(const Scheduler* scheduler) {
    constexpr std::string_view kLr = "optimizer.params.lr";
    const std::string own = scheduler != nullptr ? param(scheduler->largest_lr) : "";
    if (has(own)) {
      set(own, "optim.lr", get(own, 0.0));
      if (has(kLr) && get(kLr, 0.0) != get(own, 0.0)) {
        append(not_needed_,
               detail::concat(short_key(kLr), " (", scheduler->largest_lr, " goes before it)"));
      }
    } else if (has(kLr)) {
      set(kLr, "optim.lr", get(kLr, 0.0));
    }
  }

  void apply_warmup(std::string_view kind) {
    set(kScheduler, "schedule.deepspeed_timing", true);
    const std::string steps = param("warmup_num_steps");
    if (has(steps)) {
      // DeepSpeed takes one step for two. None is none, which it took for two once.
      const auto given = get<std::int64_t>(steps, 0);
      set(steps, "schedule.warmup_steps", given == 1 ? std::int64_t{2} : given);
    }
    assume(steps, "schedule.warmup_steps", std::int64_t{1000});
    assume(param("warmup_type"), "schedule.warmup_shape", "log");
    if (const std::string start = param("warmup_min_lr"); kind == "linear" && has(start)) {
      set(start, "schedule.final_lr", raw(start));  // it ends where it began
    }
    if (kind == "cosine") {
      apply_ratio("warmup_min_ratio", "schedule.warmup_start_lr", 0);
      apply_ratio("cos_min_ratio", "schedule.final_lr", 0.0001);
    }
  }

  void apply_ratio(std::string_view name, std::string_view option, double otherwise) {
    const std::string key = param(name);
    if (has(key)) {
      const double given = get(key, otherwise);
      TESSERA_CHECK(given >= 0 && given <= 1, ConfigError, where(key), " = ",
                    to_text(OptionValue(given)), ": expected a number from 0 to 1");
      set(key, option, given).lr_ratio = given;
    } else if (otherwise > 0) {
      if (ConfigSetting* const setting = assume(key, option, otherwise)) {
        setting->lr_ratio = otherwise;
      }
    }
  }

  void apply_one_cycle() {
    for (const char* needed : {"cycle_min_lr", "cycle_max_lr"}) {
      const std::string key = param(needed);
      TESSERA_CHECK(has(key) || is_auto(key), ConfigError, where(key),
                    " is missing; OneCycle needs cycle_min_lr and cycle_max_lr");
    }
    const std::string momentum = param("cycle_momentum");
    // DeepSpeed cycles the first of the betas, and leaves an optimizer without betas alone.
    TESSERA_CHECK(
        !flag(momentum, true) || lower_case(text("optimizer.type", "adamw")) == "sgd", ConfigError,
        where(momentum), has(momentum) ? " = true" : " is not given, which means true",
        ": OneCycle changes the learning rate alone here, not the betas; set it to false");
    const std::string up = param("cycle_first_stair_count");
    if (has(up) && !has(param("cycle_second_stair_count"))) {
      set(up, "schedule.cycle_down_stairs", get<std::int64_t>(up, 0));
    }
  }

  // --- what does not go together ---

  void check_combinations() const {
    const std::string gradients = zero("zero_quantized_gradients");
    TESSERA_CHECK(!flag(gradients) || flag(zero("reduce_scatter"), true), ConfigError,
                  where(gradients), " = true needs reduce_scatter: true; remove one of them");
    TESSERA_CHECK(!has_block(zero("zeropp_loco_param")) || flag(gradients), ConfigError,
                  where(zero("zeropp_loco_param")),
                  ": error feedback needs zero_quantized_gradients: true");

    const std::string type = lower_case(text("optimizer.type", "adam"));
    const std::string ratio = zero("offload_optimizer.ratio");
    TESSERA_CHECK(get(ratio, 1.0) >= 1.0 || type == "adam" || type == "adamw", ConfigError,
                  where(ratio), " < 1 needs optimizer type Adam or AdamW");
  }

  void make_notices() {
    if (!autos_.empty()) {
      out_.notices.push_back("\"auto\" is Tessera's default, or what a flag says: " + autos_);
    }
    if (!different_.empty()) {
      out_.notices.push_back("not as in DeepSpeed: " + different_);
    }
    std::string names = not_needed_.empty() ? "" : "not needed here: " + not_needed_;
    if (!old_names_.empty()) {
      names += (names.empty() ? "old names: " : "; old names: ") + old_names_;
    }
    if (!names.empty()) {
      out_.notices.push_back(names);
    }
    std::string elsewhere;
    for (const auto& [what, keys] : elsewhere_) {
      elsewhere += detail::concat(elsewhere.empty() ? "" : "; ", what, " for ", keys);
    }
    if (!elsewhere.empty()) {
      out_.notices.push_back("not started from here, use " + elsewhere);
    }
  }

  const DeepSpeedInput& input_;
  const std::string source_;
  DeepSpeedTranslation out_;
  // Lists of keys for the notices.
  std::string autos_;
  std::string not_needed_;
  std::string different_;
  std::string old_names_;                              // "cpu_offload (now offload_optimizer)"
  std::map<std::string_view, std::string> elsewhere_;  // by what does it here
};

}  // namespace

DeepSpeedTranslation translate_deepspeed(const DeepSpeedInput& input, std::string_view source) {
  return Translator(input, source).run();
}

std::string short_key(std::string_view path) {
  constexpr std::string_view kPrefix = "zero_optimization.";
  std::string text(path.starts_with(kPrefix) ? path.substr(kPrefix.size()) : path);
  if (const auto params = text.find(".params."); params != std::string::npos) {
    text.erase(params, std::string_view(".params").size());
  }
  return text;
}

std::int64_t element_bytes(std::string_view precision) { return precision == "fp32" ? 4 : 2; }

std::int64_t bytes_of_elements(std::int64_t numel, std::int64_t bytes_each) {
  return numel > kUnlimitedBytes / bytes_each ? kUnlimitedBytes : numel * bytes_each;
}

}  // namespace tessera
