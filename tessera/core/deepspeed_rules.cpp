#include "tessera/core/deepspeed_rules.h"

#include <algorithm>
#include <cmath>

#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/deepspeed_schedule.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera {
namespace {

constexpr std::string_view kZero = "zero_optimization";

std::string zero(std::string_view key) { return detail::concat(kZero, ".", key); }

void check_stage(const DeepSpeedView& view) {
  if (view.has(kZero)) {
    const bool legacy = view.flag(kZero);
    throw ConfigError(detail::concat(
        view.where(kZero), " = ", legacy ? "true" : "false", ": the legacy switch means stage ",
        legacy ? 1 : 0, ", but Tessera always shards everything; write {\"stage\": 3}"));
  }
  const std::string key = zero("stage");
  if (!view.has(key)) {
    return;  // everything is sharded all the same
  }
  const std::int64_t stage = view.integer(key, 0);
  TESSERA_CHECK(stage >= 0 && stage <= 3, ConfigError, view.where(key), " = ", stage,
                ": expected a whole number from 0 to 3; Tessera works like stage 3");
  TESSERA_CHECK(stage != 0, ConfigError, view.where(key), " = 0: Tessera always shards ",
                "everything; set it to 3, and shard.group_size to 1 for a whole copy per rank");
  TESSERA_CHECK(stage == 3, ConfigError, view.where(key), " = ", stage,
                ": Tessera always shards everything; set it to 3 or remove it");
}

void apply_precision(const DeepSpeedView& view, DeepSpeedTranslation& out) {
  const bool fp16 = view.flag("fp16.enabled");
  const bool bf16 = view.flag("bf16.enabled");
  TESSERA_CHECK(!fp16 || !bf16, ConfigError, view.where("fp16.enabled"),
                " and bf16.enabled are both true; choose one");
  if (fp16) {
    add_setting(out, view, "fp16.enabled", "precision", "fp16");
  }
  if (bf16) {
    add_setting(out, view, "bf16.enabled", "precision", "bf16");
  }
  constexpr std::string_view kPower = "fp16.initial_scale_power";
  if (view.has(kPower)) {
    const std::int64_t power = view.integer(kPower, 0);
    TESSERA_CHECK(power >= 0 && power <= 126, ConfigError, view.where(kPower), " = ", power,
                  ": expected a whole number from 0 to 126");
    add_setting(out, view, kPower, "loss_scale.initial", std::ldexp(1.0, static_cast<int>(power)));
  }
  if (view.flag("fp16.fp16_master_weights_and_grads")) {
    add_setting(out, view, "fp16.fp16_master_weights_and_grads", "optim.master_dtype", "fp16");
  }
  if (view.flag("bf16.bf16_master_weights_and_grads")) {
    add_setting(out, view, "bf16.bf16_master_weights_and_grads", "optim.master_dtype", "bf16");
  }
  if (view.flag("bf16.bf16_optimizer_states")) {
    add_setting(out, view, "bf16.bf16_optimizer_states", "optim.state_dtype", "bf16");
  }
}

// A deprecated key that stands for another one, which must then not be given as well.
void apply_deprecated(const DeepSpeedView& view, DeepSpeedTranslation& out) {
  const auto replaced = [&view](const std::string& old, const std::string& replacement) {
    TESSERA_CHECK(!view.has(replacement) && !view.has_block(replacement), ConfigError,
                  view.where(old), " is deprecated and stands beside ", replacement,
                  ", which replaces it; remove ", old);
  };
  for (const auto& [old, block, option] :
       {std::tuple{"cpu_offload", "offload_optimizer", "place.optimizer"},
        std::tuple{"cpu_offload_param", "offload_param", "place.parameters"}}) {
    const std::string key = zero(old);
    if (view.has(key)) {
      replaced(key, zero(block));
      add_setting(out, view, key, option, view.flag(key) ? "host" : "device");
      out.old_names.push_back(detail::concat(old, " (now ", block, ")"));
    }
  }
  const std::string gather = zero("stage3_gather_fp16_weights_on_model_save");
  if (view.has(gather)) {
    const std::string replacement = zero("stage3_gather_16bit_weights_on_model_save");
    replaced(gather, replacement);
    out.not_needed.push_back(short_key(gather));
  }
}

void apply_sharding(const DeepSpeedView& view, DeepSpeedTranslation& out) {
  const std::string mics = zero("mics_shard_size");
  if (view.has(mics)) {
    const std::int64_t ranks = view.integer(mics, -1);
    add_setting(out, view, mics, "shard.group_size", ranks == -1 ? std::int64_t{0} : ranks);
  }
  const std::string loco = zero("zeropp_loco_param");
  if (view.has_block(loco)) {
    for (const char* part : {".err_beta", ".reset_T"}) {
      TESSERA_CHECK(view.has(loco + part), ConfigError, view.where(loco), ": ", loco, part,
                    " is missing; both err_beta and reset_T are needed");
    }
    DeepSpeedSetting setting;
    setting.option = find_option("quant.error_feedback");
    setting.value = true;
    setting.key = loco;
    setting.from = loco + " given";
    out.settings.push_back(std::move(setting));
  }
}

void apply_paths(const DeepSpeedView& view, DeepSpeedTranslation& out) {
  std::vector<std::string> paths;
  std::string last_key;
  for (const char* block : {"offload_param", "offload_optimizer"}) {
    const std::string key = zero(detail::concat(block, ".nvme_path"));
    const std::string path = view.text(key);
    const bool on_nvme = view.text(zero(detail::concat(block, ".device"))) == "nvme";
    TESSERA_CHECK(!on_nvme || !path.empty(), ConfigError,
                  view.where(zero(detail::concat(block, ".device"))),
                  " = \"nvme\": nvme_path is missing; give a directory on the disk");
    if (!path.empty() && std::find(paths.begin(), paths.end(), path) == paths.end()) {
      paths.push_back(path);
      last_key = key;
    }
  }
  if (!paths.empty()) {
    add_setting(out, view, last_key, "nvme.paths", paths);
  }
}

void apply_optimizer(const DeepSpeedView& view, DeepSpeedTranslation& out) {
  constexpr std::string_view kType = "optimizer.type";
  const std::string type = lower_case(view.text(kType));
  const bool decoupled = view.flag("optimizer.params.adam_w_mode", true);
  if (type == "adam" || type == "adamw") {
    add_setting(out, view, kType, "optim.kind", type == "adamw" || decoupled ? "adamw" : "adam");
  } else if (type == "sgd" || type == "lion") {
    add_setting(out, view, kType, "optim.kind", type);
  } else if (!type.empty()) {
    const bool compressed = type.starts_with("onebit") || type.starts_with("zeroone");
    throw ConfigError(detail::concat(
        view.where(kType), " = ", in_quotes(view.text(kType)),
        compressed ? ": compressed optimizers do not go with sharded parameters; use "
                   : ": not supported; use ",
        "Adam, AdamW, SGD or Lion"));
  }
}

}  // namespace

OptionValue DeepSpeedView::typed(std::string_view path) const {
  const DeepSpeedKey* key = find_deepspeed_key(path);
  TESSERA_INVARIANT(key != nullptr, path, " is not in the table of DeepSpeed's keys");
  OptionType type = key->type;
  double min = -kNoLimit;
  if (key->meaning == DeepSpeedMeaning::kSame) {
    const Option* target = find_option(key->option);
    type = target->type;
    min = target->min;
  }
  const Option option{path, type, "", min, kNoLimit, "", "", 0, "", ""};
  return check_value(option, input_.values.find(path)->second, where(path));
}

bool DeepSpeedView::flag(std::string_view path, bool otherwise) const {
  return has(path) ? std::get<bool>(typed(path)) : otherwise;
}

std::int64_t DeepSpeedView::integer(std::string_view path, std::int64_t otherwise) const {
  return has(path) ? std::get<std::int64_t>(typed(path)) : otherwise;
}

double DeepSpeedView::real(std::string_view path, double otherwise) const {
  return has(path) ? std::get<double>(typed(path)) : otherwise;
}

std::string DeepSpeedView::text(std::string_view path, std::string_view otherwise) const {
  return has(path) ? std::get<std::string>(typed(path)) : std::string(otherwise);
}

std::string DeepSpeedView::shown(std::string_view path) const {
  const OptionValue& value = input_.values.find(path)->second;
  const auto* real = std::get_if<double>(&value);
  const bool whole = real != nullptr && std::floor(*real) == *real && std::abs(*real) < 0x1p53;
  return detail::concat(path, " = ",
                        whole ? std::to_string(static_cast<std::int64_t>(*real)) : to_text(value));
}

std::string DeepSpeedView::where(std::string_view path) const {
  return detail::concat(source_, ": ", path);
}

void add_setting(DeepSpeedTranslation& out, const DeepSpeedView& view, std::string_view key,
                 std::string_view option, const OptionValue& value) {
  DeepSpeedSetting setting;
  setting.option = find_option(option);
  setting.value = check_value(*setting.option, value, view.where(key));
  setting.key = key;
  setting.from = view.shown(key);
  out.settings.push_back(std::move(setting));
}

void apply_special_keys(const DeepSpeedView& view, DeepSpeedTranslation& out) {
  check_stage(view);
  apply_precision(view, out);
  apply_deprecated(view, out);
  apply_sharding(view, out);
  apply_paths(view, out);
  apply_optimizer(view, out);
  apply_learning_rate(view, out);
  apply_schedule(view, out);
}

void check_combinations(const DeepSpeedView& view) {
  const bool quantised_gradients = view.flag(zero("zero_quantized_gradients"));
  TESSERA_CHECK(!quantised_gradients || view.flag(zero("reduce_scatter"), true), ConfigError,
                view.where(zero("zero_quantized_gradients")),
                " = true needs reduce_scatter: true; remove one of them");
  TESSERA_CHECK(!view.has_block(zero("zeropp_loco_param")) || quantised_gradients, ConfigError,
                view.where(zero("zeropp_loco_param")),
                ": error feedback needs zero_quantized_gradients: true");

  const bool mics = view.integer(zero("mics_shard_size"), -1) > 0;
  TESSERA_CHECK(mics || !view.flag(zero("mics_hierarchical_params_gather")), ConfigError,
                view.where(zero("mics_hierarchical_params_gather")),
                " = true needs mics_shard_size of at least 1");
  for (const char* key : {"zero_quantized_weights", "zero_quantized_gradients"}) {
    TESSERA_CHECK(!mics || !view.flag(zero(key)), ConfigError, view.where(zero(key)),
                  " = true does not go with mics_shard_size; DeepSpeed ignores it there");
  }
  TESSERA_CHECK(!mics || view.integer(zero("zero_hpz_partition_size"), 1) <= 1, ConfigError,
                view.where(zero("zero_hpz_partition_size")),
                " > 1 does not go with mics_shard_size; DeepSpeed ignores it there");

  const std::string device = view.text(zero("offload_optimizer.device"), "none");
  const bool on_cpu = device == "cpu" || device == "nvme" || view.flag(zero("cpu_offload"));
  TESSERA_CHECK(on_cpu || !view.flag("fp16.fp16_master_weights_and_grads"), ConfigError,
                view.where("fp16.fp16_master_weights_and_grads"),
                " = true needs offload_optimizer with device cpu or nvme");
  TESSERA_CHECK(
      on_cpu || !view.flag("bf16.bf16_master_weights_and_grads") ||
          view.flag("bf16.bf16_optimizer_states"),
      ConfigError, view.where("bf16.bf16_master_weights_and_grads"),
      " = true needs offload_optimizer with device cpu or nvme, or bf16_optimizer_states");

  const std::string type = lower_case(view.text("optimizer.type", "adam"));
  TESSERA_CHECK(
      view.real(zero("offload_optimizer.ratio"), 1.0) >= 1.0 || type == "adam" || type == "adamw",
      ConfigError, view.where(zero("offload_optimizer.ratio")),
      " < 1 needs optimizer type Adam or AdamW");
}

}  // namespace tessera
