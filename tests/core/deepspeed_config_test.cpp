// A DeepSpeed file as its users write it: units, defaults, "auto", old names, and what is refused.
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/config.h"
#include "tessera/core/deepspeed_keys.h"
#include "tessera/core/error.h"
#include "tests/support/contains.h"

namespace tessera {
namespace {

Config from(std::string_view json) { return Config::from_json(json, "ds.json"); }

std::string translation_failure(std::string_view json) {
  try {
    from(json);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

std::string all(const Config& config) {
  std::string text;
  for (const std::string& line : config.notices()) {
    text += line + "\n";
  }
  return text;
}

TEST(DeepSpeedConfig, ElementsBecomeBytesOfThePrecision) {
  const auto config = from(R"({"bf16": {"enabled": true},
    "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e7}})");
  EXPECT_EQ(config.get_string("precision"), "bf16");
  EXPECT_EQ(config.get_bytes("prefetch.bucket_bytes"), 100000000);
  EXPECT_HAS(config.describe(),
             "prefetch.bucket_bytes = 100MB  (ds.json: "
             "zero_optimization.stage3_prefetch_bucket_size, "
             "50000000 elements)\n");
}

TEST(DeepSpeedConfig, ElementsFollowAPrecisionThatIsSetLater) {
  auto config = from(R"({"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000000,
                                               "stage3_max_live_parameters": 10}})");
  EXPECT_EQ(config.get_bytes("grad.bucket_bytes"), 4000000);
  config.set("live.limit_bytes", "1MiB", "--live");
  config.apply_flag("precision=fp16");
  EXPECT_EQ(config.get_bytes("grad.bucket_bytes"), 2000000);
  EXPECT_EQ(config.get_bytes("live.limit_bytes"), 1 << 20) << "given in bytes meanwhile";
  EXPECT_HAS(all(config), "grad.bucket_bytes = 2MB");
  EXPECT_HAS(all(config),
             "live.limit_bytes = 1MiB (--live, not "
             "stage3_max_live_parameters = 10)");
}

// One element is "one parameter at a time" to DeepSpeed, and would be a call per element.
TEST(DeepSpeedConfig, SizesThatWouldMakeACallPerElementAreRaisedAndSaySo) {
  for (const char* size : {"0", "1", "1000"}) {
    const auto config =
        from(R"({"zero_optimization": {"stage": 3, "sub_group_size": 1, "reduce_bucket_size": )" +
             std::string(size) + "}}");
    EXPECT_EQ(config.get_bytes("grad.bucket_bytes"), 1 << 20);
    EXPECT_EQ(config.get_bytes("optim.sub_group_bytes"), 1 << 20);
    EXPECT_HAS(all(config), "grad.bucket_bytes = 1MiB (the least, for reduce_bucket_size = " +
                                std::string(size) + ")");
    EXPECT_HAS(all(config), "optim.sub_group_bytes = 1MiB (the least, for sub_group_size = 1)");
  }
  EXPECT_EQ(from(R"({"zero_optimization": {"prefetch_bucket_size": 1}})")
                .get_bytes("prefetch.bucket_bytes"),
            4)
      << "a gather has at least one parameter, however small this is";
}

TEST(DeepSpeedConfig, DefaultsOfABlockHoldWhereTheBlockIsGiven) {
  const auto config = from(R"({"zero_optimization": {"stage": 3}})");
  EXPECT_EQ(config.get_bytes("grad.bucket_bytes"), 2000000000);
  EXPECT_EQ(config.get_bytes("prefetch.bucket_bytes"), 200000000);
  EXPECT_EQ(config.get_bytes("persist.param_bytes"), 400000);
  EXPECT_EQ(config.get_bytes("persist.model_bytes"), kUnlimitedBytes);
  EXPECT_EQ(config.get_bytes("live.limit_bytes"), 4000000000);
  EXPECT_EQ(config.get_bytes("live.reuse_distance_bytes"), 4000000000);
  EXPECT_EQ(config.get_bytes("optim.sub_group_bytes"), 4000000000);
  EXPECT_HAS(all(config),
             "sharding: DeepSpeed's defaults: prefetch.bucket_bytes = 200MB, "
             "live.limit_bytes = 4GB, live.reuse_distance_bytes = 4GB, "
             "persist.param_bytes = 400kB, grad.bucket_bytes = 2GB, "
             "optim.sub_group_bytes = 4GB\n");
  EXPECT_FALSE(config.is_set("nvme.queue_depth")) << "no aio block was given";
  EXPECT_EQ(from("{}").get_bytes("grad.bucket_bytes"), Config().get_bytes("grad.bucket_bytes"));
  EXPECT_TRUE(from("{}").notices().empty());
}

TEST(DeepSpeedConfig, AutoIsOurDefaultAndNullCountsAsNotGiven) {
  const auto config = from(R"({"train_batch_size": "auto", "gradient_clipping": null,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": null,
                          "stage3_max_live_parameters": null},
    "fp16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}})");
  for (const char* name : {"grad.bucket_bytes", "precision", "batch.total", "grad.clip_norm",
                           "optim.beta1", "schedule.warmup_steps"}) {
    EXPECT_FALSE(config.is_set(name)) << name;
  }
  EXPECT_EQ(config.get_bytes("live.limit_bytes"), 4000000000) << "DeepSpeed's default";
  EXPECT_HAS(all(config),
             "\"auto\" is Tessera's default, or what a flag says: reduce_bucket_size, "
             "train_batch_size, fp16.enabled, scheduler.warmup_num_steps, optimizer.betas\n");
}

TEST(DeepSpeedConfig, QuantisedFrozenWeightsAreBlocksOfSoManyBits) {
  const auto frozen = [](const std::string& text) {
    return from(text).get_int("quant.frozen_bits");
  };
  EXPECT_EQ(frozen(R"({"zero_optimization": {"zero_quantized_nontrainable_weights": true}})"), 8);
  EXPECT_EQ(frozen(R"({"zero_optimization": {"zero_quantized_nontrainable_weights": false}})"), 0);
  const auto config = from(R"({"weight_quantization": {"quantized_initialization":
    {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": true}}})");
  EXPECT_EQ(config.get_int("quant.frozen_bits"), 4);
  EXPECT_EQ(config.get_int("quant.block_numel"), 64);
  EXPECT_HAS(translation_failure(R"({"weight_quantization": {"quantized_initialization":
               {"num_bits": 6}}})"),
             "num_bits = 6: frozen weights are kept as integers of 4 or 8 bits");
  EXPECT_EQ(all(config).find("not as in DeepSpeed"), std::string::npos);
}

// DeepSpeed takes no other form than this one.
TEST(DeepSpeedConfig, WeightsWithOffsetsAreKeptWithoutAndSaySo) {
  const auto config = from(R"({"zero_optimization": {"stage": 3},
    "weight_quantization": {"quantized_initialization":
    {"num_bits": 8, "group_size": 64, "group_dim": 1, "symmetric": false}}})");
  EXPECT_EQ(config.get_int("quant.frozen_bits"), 8);
  EXPECT_EQ(config.get_int("quant.block_numel"), 64);
  EXPECT_HAS(all(config),
             "not as in DeepSpeed: weight_quantization.quantized_initialization.symmetric = false "
             "(blocks have a scale and no offset here: values differ)\n");
}

TEST(DeepSpeedConfig, NamesOfQuantisedWeightsBecomePatternsOfFrozenOnes) {
  const auto config = from(R"({"weight_quantization": {"post_init_quant": {
    "fc": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": false},
    "layers.3.attn": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": false}}}})");
  EXPECT_EQ(config.get_int("quant.frozen_bits"), 4);
  EXPECT_EQ(config.get_int("quant.block_numel"), 64);
  EXPECT_EQ(config.get_list("quant.frozen_names"),
            (std::vector<std::string>{"*fc*.weight", "*layers.3.attn*.weight"}));
  EXPECT_HAS(all(config),
             "not as in DeepSpeed: weight_quantization.post_init_quant (of frozen weights alone; "
             "blocks have a scale and no offset here: values differ)\n");
  EXPECT_NO_THROW(config.check());
  EXPECT_NO_THROW(from(R"({"weight_quantization": {"post_init_quant": {}}})").check());
  const auto refused = [](const std::string& names, const std::string& more = "") {
    return translation_failure(R"({"weight_quantization": {"post_init_quant": {)" + names + "}" +
                               more + "}}");
  };
  EXPECT_EQ(refused(R"("fc": {"num_bits": 4}, "qkv": {"num_bits": 8})"),
            "ds.json: weight_quantization.post_init_quant.qkv.num_bits = 8, and another key of "
            "weight_quantization.post_init_quant has 4; all weights are kept with one num_bits "
            "here: take one for all of them");
  EXPECT_HAS(refused(R"("a": {"num_bits": 4, "group_size": 64},
                        "b": {"num_bits": 4, "group_size": 32})"),
             "b.group_size = 32, and another key");
  EXPECT_HAS(refused(R"("fc": {"num_bits": 3})"), "fc.num_bits = 3: frozen weights are kept as");
  EXPECT_HAS(refused(R"("fc": {"group_size": 64})"), "fc.num_bits is missing");
  EXPECT_HAS(refused(R"("fc": {"num_bits": 4, "group_dim": 0})"), "group_dim = 0: only 1");
  EXPECT_HAS(refused(R"("fc": {"num_bits": 4, "bits": 8})"), "fc.bits: unknown key");
  EXPECT_HAS(refused(R"("fc": {"num_bits": "four"})"), "fc.num_bits");
  EXPECT_HAS(refused(R"("fc": 4)"), "fc: expected an object");
  EXPECT_HAS(refused(R"("f*c": {"num_bits": 4})"), "without * or comma");
  EXPECT_HAS(
      refused(R"("fc": {"num_bits": 4})", R"(, "quantized_initialization": {"num_bits": 4})"),
      "are both given");
}

TEST(DeepSpeedConfig, WhatDeepSpeedIgnoresBesideMicsIsDoneAndSaid) {
  const auto config = from(R"({"zero_optimization": {"stage": 3, "mics_shard_size": 8,
    "mics_hierarchical_params_gather": true, "zero_hpz_partition_size": 2,
    "zero_quantized_weights": true, "zero_quantized_gradients": true}})");
  EXPECT_EQ(config.get_int("shard.group_size"), 8);
  EXPECT_EQ(config.get_int("shard.secondary_group_size"), 2);
  EXPECT_TRUE(config.get_bool("quant.weights") && config.get_bool("quant.gradients"));
  EXPECT_HAS(all(config),
             "not as in DeepSpeed: zero_quantized_weights, zero_quantized_gradients, "
             "zero_hpz_partition_size (ignored beside mics_shard_size there, done here)\n");
  EXPECT_NO_THROW(config.check());
  const auto all_ranks = from(R"({"zero_optimization": {"stage": 3,
    "mics_hierarchical_params_gather": true, "zero_quantized_weights": true}})");
  EXPECT_TRUE(all_ranks.get_bool("shard.hierarchical_gather"));
  EXPECT_EQ(all_ranks.get_int("shard.group_size"), 0);
  EXPECT_EQ(all(all_ranks).find("not as in DeepSpeed"), std::string::npos);
}

TEST(DeepSpeedConfig, FlagsWinAndTheNoticesShowWhatHolds) {
  auto config = from(R"({"train_batch_size": 16, "bf16": {"enabled": true}})");
  EXPECT_HAS(all(config), "training: precision = bf16, batch.total = 16\n");
  config.set("batch.total", 8, "--batch");
  config.set("precision", "fp32", "--precision");
  EXPECT_HAS(all(config),
             "training: precision = fp32 (--precision, not bf16.enabled = true), "
             "batch.total = 8 (--batch, not train_batch_size = 16)\n");
}

TEST(DeepSpeedConfig, BothNamesOfAKeyAreAcceptedButNotTogether) {
  EXPECT_EQ(from(R"({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 10}})")
                .get_bytes("prefetch.bucket_bytes"),
            40);
  EXPECT_EQ(translation_failure(R"({"zero_optimization": {"prefetch_bucket_size": 1,
                                              "stage3_prefetch_bucket_size": 1}})"),
            "ds.json: zero_optimization.stage3_prefetch_bucket_size: given twice, also under its "
            "other name; keep one of zero_optimization.stage3_prefetch_bucket_size and "
            "prefetch_bucket_size");
}

TEST(DeepSpeedConfig, OtherStagesAreRefusedWithAWayOut) {
  EXPECT_EQ(translation_failure(R"({"zero_optimization": {"stage": 2}})"),
            "ds.json: zero_optimization.stage = 2: Tessera always shards everything; set it to 3 "
            "or remove it");
  EXPECT_EQ(translation_failure(R"({"zero_optimization": {"stage": 0}})"),
            "ds.json: zero_optimization.stage = 0: Tessera always shards everything; set it to 3, "
            "and shard.group_size to 1 for a whole copy per rank");
  EXPECT_EQ(
      translation_failure(R"({"zero_optimization": {"stage": 4}})"),
      "ds.json: zero_optimization.stage = 4: expected a whole number from 0 to 3; Tessera works "
      "like stage 3");
  EXPECT_EQ(translation_failure(R"({"zero_optimization": true})"),
            "ds.json: zero_optimization = true: the legacy switch means stage 1, but Tessera "
            "always shards everything; write {\"stage\": 3}");
  EXPECT_HAS(all(from(R"({"zero_optimization": {}})")), "ZeRO stage 3");
}

TEST(DeepSpeedConfig, KeysThatAreNotNeededAreNamedInOneLine) {
  const auto config = from(R"({"zero_optimization": {"stage": 3, "overlap_comm": true,
      "offload_param": {"device": "cpu", "pin_memory": false},
      "contiguous_gradients": false, "round_robin_gradients": true}, "steps_per_print": 1e9})");
  EXPECT_HAS(all(config),
             "not needed here: contiguous_gradients, round_robin_gradients, overlap_comm, "
             "offload_param.pin_memory, steps_per_print\n");
  EXPECT_EQ(translation_failure(R"({"zero_optimization": {"overlap_comm": "yes"}})"),
            "ds.json: zero_optimization.overlap_comm = \"yes\": expected true or false");
}

TEST(DeepSpeedConfig, MonitorsAreAcceptedAndNameWhatDoesItHere) {
  const auto config = from(R"({"tensorboard": {"enabled": true, "output_path": "x"},
      "wandb": {"enabled": true}, "comet": {"enabled": false}, "csv_monitor": {"enabled": true},
      "activation_checkpointing": {"partition_activations": false, "profile": false}})");
  EXPECT_HAS(all(config),
             "not started from here, use `tessera train --metrics FILE` for wandb, "
             "csv_monitor; `tessera train --tensorboard DIR` for tensorboard\n");
}

TEST(DeepSpeedConfig, OffloadAndAioMeanWhatTheySay) {
  const auto config = from(R"({"zero_optimization": {"stage": 3,
      "offload_param": {"device": "nvme", "nvme_path": "/p", "max_in_cpu": 0},
      "offload_optimizer": {"device": "nvme", "nvme_path": "/o", "ratio": 0.5,
                            "pipeline_read": true}},
      "aio": {"thread_count": 4}})");
  EXPECT_EQ(config.get_string("place.parameters"), "nvme");
  EXPECT_EQ(config.get_string("place.optimizer"), "nvme");
  EXPECT_EQ(config.get_list("nvme.paths"), (std::vector<std::string>{"/p", "/o"}));
  EXPECT_EQ(config.get_bytes("place.parameters_host_bytes"), 0);
  EXPECT_EQ(config.get_int("nvme.parameter_buffers"), 5);
  EXPECT_EQ(config.get_bytes("nvme.parameter_buffer_bytes"), 400000000);
  EXPECT_EQ(config.get_int("nvme.optimizer_buffers"), 4);
  EXPECT_TRUE(config.get_bool("nvme.pipeline_read"));
  EXPECT_FALSE(config.get_bool("nvme.pipeline_write")) << "DeepSpeed's default";
  EXPECT_EQ(config.get_double("optim.cpu_share"), 0.5);
  EXPECT_EQ(config.get_int("nvme.threads"), 4);
  EXPECT_EQ(config.get_int("nvme.queue_depth"), 8);
  EXPECT_EQ(config.get_bytes("nvme.block_bytes"), 1 << 20);
  EXPECT_NO_THROW(config.check());

  const auto host = from(R"({"zero_optimization": {"stage": 3,
                             "offload_optimizer": {"device": "cpu"}}})");
  EXPECT_EQ(host.get_string("place.optimizer"), "host");
  EXPECT_FALSE(host.is_set("nvme.optimizer_buffers")) << "buffers are for nvme";
  EXPECT_FALSE(host.is_set("optim.cpu_share")) << "measured, unless a ratio is given";
  EXPECT_EQ(translation_failure(
                R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})"),
            "ds.json: zero_optimization.offload_param.device = \"nvme\": nvme_path is missing; "
            "give a directory on the disk");
}

TEST(DeepSpeedConfig, DeprecatedKeysAreMappedUnlessTheirReplacementIsGivenToo) {
  const auto config = from(R"({"zero_optimization": {"stage": 3, "cpu_offload": true,
      "cpu_offload_param": true, "cpu_offload_use_pin_memory": true,
      "stage3_gather_fp16_weights_on_model_save": true}})");
  EXPECT_EQ(config.get_string("place.optimizer"), "host");
  EXPECT_EQ(config.get_string("place.parameters"), "host");
  EXPECT_HAS(all(config),
             "old names: cpu_offload (now offload_optimizer), "
             "cpu_offload_param (now offload_param)");
  EXPECT_EQ(translation_failure(R"({"zero_optimization": {"stage": 3, "cpu_offload": false,
                                              "offload_optimizer": {}}})"),
            "ds.json: zero_optimization.cpu_offload is deprecated and stands beside "
            "zero_optimization.offload_optimizer, which replaces it; remove "
            "zero_optimization.cpu_offload");
  EXPECT_HAS(translation_failure(R"({"zero_optimization": {"stage": 3,
                        "stage3_gather_fp16_weights_on_model_save": true,
                        "gather_16bit_weights_on_model_save": true}})"),
             "which replaces it");
}

TEST(DeepSpeedConfig, PrecisionBlocksSetPrecisionAndLossScale) {
  const auto config = from(R"({"fp16": {"enabled": true, "initial_scale_power": 8,
      "loss_scale_window": 100}, "communication_data_type": "fp32"})");
  EXPECT_EQ(config.get_string("precision"), "fp16");
  EXPECT_EQ(config.get_double("loss_scale.initial"), 256.0);
  EXPECT_EQ(config.get_int("loss_scale.window"), 100);
  EXPECT_EQ(config.get_string("grad.wire_dtype"), "fp32");
  EXPECT_EQ(translation_failure(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"),
            "ds.json: fp16.enabled and bf16.enabled are both true; choose one");
  EXPECT_EQ(translation_failure(R"({"fp16": {"enabled": true, "loss_scale": true}})"),
            "ds.json: fp16.loss_scale = true: expected a finite number of at least 0");
  EXPECT_EQ(translation_failure(R"({"fp16": {"enabled": true, "loss_scale": -1}})"),
            "ds.json: fp16.loss_scale = -1: expected a finite number of at least 0");
}

TEST(DeepSpeedConfig, TypesThatAreAlwaysFp32AreAcceptedAsThatAndRefusedByNameOtherwise) {
  for (const char* types :
       {"{}", R"({"grad_accum_dtype": null})", R"({"grad_accum_dtype": "fp32"})",
        R"({"grad_accum_dtype": "auto"})", R"({"grad_accum_dtype": "torch.float32"})"}) {
    EXPECT_EQ(translation_failure(R"({"data_types": )" + std::string(types) + "}"), "accepted");
  }
  EXPECT_EQ(translation_failure(R"({"data_types": {"grad_accum_dtype": "bf16"}})"),
            "ds.json: data_types.grad_accum_dtype = \"bf16\": only fp32 is supported: gradients of "
            "micro-batches are always summed in fp32");
  for (const char* key : {"fp16.fp16_master_weights_and_grads",
                          "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"}) {
    const std::string block(key, 4);
    const std::string json =
        "{\"" + block + R"(": {"enabled": true, ")" + std::string(key).substr(5) + "\": ";
    EXPECT_EQ(translation_failure(json + "false}}"), "accepted");
    EXPECT_EQ(translation_failure(json + "true}}"),
              "ds.json: " + std::string(key) +
                  " = true: only false is supported: master weights, summed gradients and moments "
                  "are always fp32");
  }
}

TEST(DeepSpeedConfig, OptimizerAndSchedulerAreTranslated) {
  const auto config = from(R"({"optimizer": {"type": "Adam", "params": {"lr": 3e-4,
      "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "adam_w_mode": false}},
      "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000,
      "warmup_num_steps": 10, "cos_min_ratio": 0.1}}})");
  EXPECT_EQ(config.get_string("optim.kind"), "adam");
  EXPECT_EQ(config.get_double("optim.lr"), 3e-4);
  EXPECT_EQ(config.get_double("optim.beta1"), 0.8);
  EXPECT_EQ(config.get_double("optim.beta2"), 0.95);
  EXPECT_EQ(config.get_string("schedule.kind"), "cosine");
  EXPECT_EQ(config.get_int("schedule.total_steps"), 1000);
  EXPECT_EQ(config.get_double("schedule.final_lr"), 3e-4 * 0.1);
  EXPECT_EQ(translation_failure(R"({"optimizer": {"type": "OneBitAdam"}})"),
            "ds.json: optimizer.type = \"OneBitAdam\": compressed optimizers do not go with "
            "sharded parameters; use Adam, AdamW, SGD or Lion");
  EXPECT_EQ(translation_failure(R"({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}})"),
            "ds.json: optimizer.params.betas: expected a list of two numbers");
}

TEST(DeepSpeedConfig, CombinationsThatCannotWorkAreRefused) {
  const auto zero = [](const std::string& keys) {
    return translation_failure(R"({"zero_optimization": {"stage": 3, )" + keys + "}}");
  };
  EXPECT_EQ(zero(R"("zero_quantized_gradients": true, "reduce_scatter": false)"),
            "ds.json: zero_optimization.zero_quantized_gradients = true needs reduce_scatter: "
            "true; remove one of them");
  EXPECT_HAS(zero(R"("zero_quantized_gradients": true, "zeropp_loco_param": {"err_beta": 0.8})"),
             "reset_T is missing");
  EXPECT_HAS(zero(R"("zeropp_loco_param": {"err_beta": 0.8, "reset_T": 4})"), "needs zero_quan");
  EXPECT_HAS(translation_failure(R"({"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 3,
                        "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})"),
             "needs optimizer type Adam");
  EXPECT_EQ(translation_failure(R"({"amp": {"enabled": true}})"),
            "ds.json: amp: not supported: Apex AMP does not go with sharded parameters; use fp16 "
            "or bf16; remove it or set enabled to false");
  EXPECT_EQ(translation_failure(R"({"gradient_allreduce_op": "sum"})"),
            "ds.json: gradient_allreduce_op = \"sum\": only mean is supported: gradients are "
            "averaged once, exactly, by token count");
  EXPECT_EQ(translation_failure(R"({"prescale_gradients": true})")
                .rfind("ds.json: prescale_gradients", 0),
            0U);
  EXPECT_EQ(translation_failure(R"({"wandb": {"enabled": false, "team": "x"}})"), "accepted");
}

TEST(DeepSpeedConfig, MayStandBesideOurOwnSectionsIfTheyAgree) {
  EXPECT_EQ(translation_failure(R"({"precision": "bf16", "prefetch": {"bucket_bytes": "1MiB"},
                        "zero_optimization": {"stage3_prefetch_bucket_size": 1e6}})"),
            "ds.json: prefetch.bucket_bytes = 1MiB, but "
            "zero_optimization.stage3_prefetch_bucket_size = 1000000 says "
            "prefetch.bucket_bytes = 2MB; remove one of them");
  const auto config = from(R"({"precision": "bf16", "prefetch": {"bucket_bytes": 2e6},
                               "live": {"limit_bytes": "1GiB"},
                               "zero_optimization": {"stage3_prefetch_bucket_size": 1e6}})");
  EXPECT_EQ(config.get_bytes("prefetch.bucket_bytes"), 2000000);
  EXPECT_EQ(config.get_bytes("live.limit_bytes"), 1 << 30) << "ours goes before their default";
  EXPECT_EQ(translation_failure(R"({"precision": "fp32", "bf16": {"enabled": true}})"),
            "ds.json: precision = fp32, but bf16.enabled = true says precision = bf16; remove one "
            "of them");
}

TEST(DeepSpeedConfig, UnknownKeysSuggestTheNearestInTheSameBlock) {
  EXPECT_EQ(translation_failure(R"({"zero_optimization": {"stage3_prefetch_bucket_sise": 3}})"),
            "ds.json: zero_optimization.stage3_prefetch_bucket_sise: unknown key; did you mean "
            "zero_optimization.stage3_prefetch_bucket_size?");
  EXPECT_EQ(translation_failure(R"({"zero_optimisation": {}})"),
            "ds.json: zero_optimisation: unknown key; did you mean zero_optimization?");
  EXPECT_EQ(translation_failure(R"({"stage3_max_live_parameters": 3})"),
            "ds.json: stage3_max_live_parameters: unknown key; did you mean "
            "zero_optimization.stage3_max_live_parameters?");
  EXPECT_EQ(translation_failure(R"({"zero_optimization": {"leaf_module": "x"}})"),
            "ds.json: zero_optimization.leaf_module: expected an object, it is of type string");
}

// Every key of the table goes through the translation with some valid value.
TEST(DeepSpeedConfig, EveryKeyOfTheTableIsAccepted) {
  const std::vector<std::string> values = {
      "3",        "true",  "false",        "1.0",       "\"mean\"",   "\"cpu\"",
      "\"fp32\"", "\"x\"", "\"WarmupLR\"", "\"AdamW\"", "\"linear\"", "[0.9, 0.99]",
      "1",        "4",     "1e6"};
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    if (key.path.starts_with("scheduler.params.")) {
      continue;  // legal beside a type that has it: see below
    }
    if (key.path == "zero_optimization" || key.path.find("loco") != std::string_view::npos) {
      continue;  // legal only beside others; tested above
    }
    std::string path(key.path.substr(0, key.path.find('[')));
    bool accepted = false;
    std::string last;
    for (const std::string& value : values) {
      std::string json = value;
      for (std::string rest = path; !rest.empty(); rest = std::string(parent_of(rest))) {
        const std::string parent(parent_of(rest));
        const std::string name = parent.empty() ? rest : rest.substr(parent.size() + 1);
        json = "{\"" + name + "\": " + json + "}";
      }
      last = translation_failure(json);
      accepted = accepted || last == "accepted";
    }
    EXPECT_TRUE(accepted) << key.path << ": " << last;
  }
}

// --- schedulers: every parameter of every type, and what does not belong together ---

std::string scheduler_json(const std::string& type, const std::string& params,
                           const std::string& more) {
  return R"({"scheduler": {"type": ")" + type + R"(", "params": {)" + params + "}}" + more + "}";
}

Config scheduled(const std::string& type, const std::string& params, const std::string& more = "") {
  return from(scheduler_json(type, params, more));
}

std::string refusal_of(const std::string& type, const std::string& params,
                       const std::string& more = "") {
  return translation_failure(scheduler_json(type, params, more));
}

TEST(DeepSpeedScheduler, EveryParameterOfTheTableBelongsToAType) {
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    constexpr std::string_view kParams = "scheduler.params.";
    if (!key.path.starts_with(kParams)) {
      continue;
    }
    const std::string name(key.path.substr(kParams.size()));
    const Option* const target = find_option(key.option);
    const OptionType type = target != nullptr ? target->type : key.type;
    const std::string value = type == OptionType::kBool     ? "false"
                              : type == OptionType::kChoice ? "\"log\""
                                                            : "1";
    bool accepted = false;
    for (const char* type :
         {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"}) {
      std::string params = '"' + name + "\": " + value;
      if (std::string(type) == "OneCycle") {
        for (const char* needed : {"cycle_min_lr", "cycle_max_lr"}) {
          params += name == needed ? "" : std::string(", \"") + needed + "\": 1";
        }
        params += name == "cycle_momentum" ? "" : ", \"cycle_momentum\": false";
      }
      accepted = accepted || refusal_of(type, params) == "accepted";
    }
    EXPECT_TRUE(accepted) << key.path;
  }
}

TEST(DeepSpeedScheduler, DefaultsOfATypeAreItsOwn) {
  const Config warmup = scheduled("WarmupLR", "");
  EXPECT_EQ(warmup.get_int("schedule.warmup_steps"), 1000);
  EXPECT_FALSE(warmup.is_given("schedule.warmup_steps"));
  EXPECT_EQ(warmup.get_string("schedule.warmup_shape"), "log");
  EXPECT_EQ(scheduled("WarmupCosineLR", "").get_double("schedule.final_lr"), 0.001 * 0.0001);
  const Config range = scheduled("LRRangeTest", "");
  EXPECT_EQ(range.get_double("schedule.warmup_start_lr"), 0.001);
  EXPECT_FALSE(range.is_set("schedule.warmup_steps"));
  EXPECT_FALSE(range.is_set("schedule.deepspeed_timing"));
  const Config stairs = scheduled("OneCycle", R"("cycle_min_lr": 0, "cycle_max_lr": 1,
      "cycle_momentum": false, "cycle_first_stair_count": 5)");
  EXPECT_EQ(stairs.get_int("schedule.cycle_down_stairs"), 5) << "as many as up";
}

TEST(DeepSpeedScheduler, AWarmupOfOneStepIsTakenForTwoAndNoneForNone) {
  EXPECT_EQ(scheduled("WarmupLR", R"("warmup_num_steps": 1)").get_int("schedule.warmup_steps"), 2);
  EXPECT_EQ(scheduled("WarmupLR", R"("warmup_num_steps": 0)").get_int("schedule.warmup_steps"), 0);
}

TEST(DeepSpeedScheduler, TheLargestLearningRateOfTheSchedulerGoesBeforeTheOptimizers) {
  const std::string optimizer = R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}})";
  EXPECT_EQ(scheduled("WarmupLR", R"("warmup_max_lr": 0.25)", optimizer).get_double("optim.lr"),
            0.25);
  EXPECT_EQ(scheduled("WarmupLR", "", optimizer).get_double("optim.lr"), 0.5);
  EXPECT_EQ(scheduled("LRRangeTest", "", optimizer).get_double("optim.lr"), 0.5);
}

TEST(DeepSpeedScheduler, RatiosFollowALearningRateThatAFlagSets) {
  Config config = scheduled("WarmupCosineLR", R"("warmup_min_ratio": 0.5, "cos_min_ratio": 0.25)",
                            R"(, "optimizer": {"type": "AdamW", "params": {"lr": 4}})");
  EXPECT_EQ(config.get_double("schedule.warmup_start_lr"), 2);
  EXPECT_EQ(config.get_double("schedule.final_lr"), 1);
  config.set("optim.lr", 8.0, "--lr");
  EXPECT_EQ(config.get_double("schedule.warmup_start_lr"), 4);
  EXPECT_EQ(config.get_double("schedule.final_lr"), 2);
  EXPECT_EQ(refusal_of("WarmupCosineLR", R"("cos_min_ratio": 2)"),
            "ds.json: scheduler.params.cos_min_ratio = 2: expected a number from 0 to 1");
}

TEST(DeepSpeedScheduler, TheLastIterationIsWhereTheRunBegins) {
  EXPECT_EQ(scheduled("WarmupLR", R"("last_batch_iteration": -1)").get_int("schedule.first_step"),
            0);
  EXPECT_EQ(
      scheduled("LRRangeTest", R"("last_batch_iteration": 41)").get_int("schedule.first_step"), 42);
  EXPECT_EQ(refusal_of("WarmupLR", R"("last_batch_iteration": -2)"),
            "ds.json: scheduler.params.last_batch_iteration = -2: expected a whole number from -1, "
            "the beginning, to 9007199254740991");
}

TEST(DeepSpeedScheduler, CycledMomentumIsRefusedUnlessTheOptimizerHasNoBetas) {
  const std::string cycle = R"("cycle_min_lr": 0.1, "cycle_max_lr": 1)";
  EXPECT_HAS(refusal_of("OneCycle", cycle + R"(, "cycle_momentum": true)"),
             "cycle_momentum = true: OneCycle changes the learning rate alone");
  EXPECT_EQ(refusal_of("OneCycle", cycle, R"(, "optimizer": {"type": "SGD"})"), "accepted");
  EXPECT_EQ(refusal_of("OneCycle", R"("cycle_min_lr": 0.1, "cycle_momentum": false)"),
            "ds.json: scheduler.params.cycle_max_lr is missing; OneCycle needs cycle_min_lr and "
            "cycle_max_lr");
}

TEST(DeepSpeedScheduler, ParametersWithoutATypeAreRefused) {
  EXPECT_EQ(translation_failure(R"({"scheduler": {"params": {"warmup_num_steps": 3}}})"),
            "ds.json: scheduler.params are given without scheduler.type; give the type too");
}

// --- files as their users have them (tests/core/deepspeed): accepted in few words with the options
// that they mean, or refused in one line ---

using Lines = std::vector<std::string>;

std::filesystem::path shapes(const char* folder) {
  return std::filesystem::path(TESSERA_SOURCE_DIR) / "tests/core/deepspeed" / folder;
}

std::set<std::string> names_in(const char* folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(shapes(folder))) {
    names.insert(entry.path().stem().string());
  }
  return names;
}

Config read_shape(const char* folder, const std::string& name) {
  return Config::from_file((shapes(folder) / (name + ".json")).string());
}

// "name = value" of every option that differs from its default and that the file really gave.
Lines given_options(const Config& config) {
  Lines lines;
  std::string text = config.describe();
  while (!text.empty()) {
    const std::string line = text.substr(0, text.find('\n'));
    text.erase(0, line.size() + 1);
    if (line.find(" not given") == std::string::npos) {
      lines.push_back(line.substr(0, line.find("  (")));
    }
  }
  return lines;
}

struct Shape {
  Lines options;
  Lines unread = {};
};

const std::map<std::string, Shape>& accepted_shapes() {
  static const std::map<std::string, Shape> shapes = {
      {"zero3_all_auto",
       {{"live.limit_bytes = 4GB", "live.reuse_distance_bytes = 4GB", "place.parameters = host",
         "place.optimizer = host", "optim.sub_group_bytes = 4GB",
         "schedule.deepspeed_timing = true"}}},
      {"zero3_nvme",
       {{"precision = bf16", "batch.micro_per_rank = 1", "prefetch.bucket_bytes = 1887436B",
         "persist.param_bytes = 20KiB", "grad.bucket_bytes = 2MiB", "place.parameters = nvme",
         "place.optimizer = nvme", "place.parameters_host_bytes = 2GB",
         "nvme.paths = [\"/local_nvme\"]", "nvme.block_bytes = 256KiB", "nvme.queue_depth = 32",
         "nvme.threads = 1", "nvme.parameter_buffers = 5", "nvme.parameter_buffer_bytes = 200MB",
         "nvme.optimizer_buffers = 4", "optim.sub_group_bytes = 4GB"}}},
      {"zero3_plain", {{}}},
      {"fp16_every_key",
       {{"precision = fp16", "grad.wire_dtype = fp16", "grad.clip_norm = 0.5",
         "loss_scale.initial = 4096", "loss_scale.window = 500", "loss_scale.hysteresis = 3",
         "loss_scale.min = 2"}}},
      {"bf16_with_loss_scale_keys", {{"precision = bf16"}}},
      {"warmup_decay",
       {{"optim.lr = 3e-05", "optim.beta1 = 0.8", "optim.weight_decay = 3e-07",
         "schedule.kind = linear", "schedule.warmup_steps = 500",
         "schedule.warmup_start_lr = 1e-06", "schedule.final_lr = 1e-06",
         "schedule.deepspeed_timing = true"}}},
      {"warmup_cosine",
       {{"optim.lr = 2e-04", "schedule.kind = cosine", "schedule.warmup_steps = 100",
         "schedule.warmup_shape = log", "schedule.warmup_start_lr = 2e-05",
         "schedule.total_steps = 10000", "schedule.final_lr = 1e-05", "schedule.first_step = 200",
         "schedule.deepspeed_timing = true"}}},
      {"one_cycle",
       {{"optim.lr = 0.01", "schedule.kind = one_cycle", "schedule.warmup_start_lr = 1e-05",
         "schedule.cycle_up_steps = 1000", "schedule.cycle_down_steps = 900",
         "schedule.cycle_up_stairs = 500", "schedule.cycle_down_stairs = 450",
         "schedule.decay_steps = 1000", "schedule.decay_rate = 0.001"}}},
      {"lr_range_test",
       {{"optim.kind = sgd", "optim.lr = 0.1", "optim.momentum = 0.9", "schedule.kind = range_test",
         "schedule.warmup_start_lr = 1e-04", "schedule.range_steps = 200",
         "schedule.range_rate = 5", "schedule.range_staircase = true"}}},
      {"monitors", {{"batch.total = 16", "batch.micro_per_rank = 4", "batch.accumulate = 2"}}},
      {"old_names",
       {{"precision = bf16", "prefetch.bucket_bytes = 20MB", "live.limit_bytes = 1GB",
         "place.parameters = host", "place.optimizer = host"}}},
      {"tiny_sizes",
       {{"prefetch.bucket_bytes = 4B", "live.limit_bytes = 4B", "live.reuse_distance_bytes = 0B",
         "grad.bucket_bytes = 1MiB", "optim.sub_group_bytes = 1MiB"}}},
      {"not_built_yet",
       {{"shard.secondary_group_size = 8", "quant.weights = true", "quant.gradients = true"}, {}}},
      {"mics", {{"shard.group_size = 4", "shard.hierarchical_gather = true"}}},
      {"mixture_of_experts",
       {{"unit.leaf_types = [\"MixtralSparseMoeBlock\"]", "unit.leaf_names = [\"experts\"]",
         "unit.leaf_name_suffixes = [\"mlp.experts\"]"}}},
      {"every_subject",
       {{"precision = bf16", "batch.total = 32", "quant.weights = true", "grad.bucket_bytes = 10MB",
         "grad.wire_dtype = fp32", "grad.clip_norm = 0.3", "place.parameters = host",
         "place.optimizer = nvme", "nvme.paths = [\"/nvme\"]", "nvme.block_bytes = 1MiB",
         "nvme.queue_depth = 8", "nvme.threads = 2", "optim.kind = lion", "optim.lr = 2e-04",
         "optim.beta2 = 0.98", "optim.weight_decay = 0.1", "optim.cpu_share = 1",
         "schedule.deepspeed_timing = true"}}},
  };
  return shapes;
}

TEST(DeepSpeedShapes, EveryAcceptedFileGivesTheOptionsThatItMeans) {
  std::set<std::string> tested;
  for (const auto& [name, shape] : accepted_shapes()) {
    SCOPED_TRACE(name);
    tested.insert(name);
    const Config config = read_shape("accepted", name);
    EXPECT_NO_THROW(config.check());
    EXPECT_EQ(given_options(config), shape.options);
  }
  EXPECT_EQ(tested, names_in("accepted")) << "every file of the folder is tested";
}

// Beside these a run may say one line of options that are not built yet, and one of the schedule.
TEST(DeepSpeedShapes, AFileIsSummedUpInAtMostEightLines) {
  for (const auto& [name, shape] : accepted_shapes()) {
    const Lines notices = read_shape("accepted", name).notices();
    EXPECT_GE(notices.size(), 2U) << name;
    EXPECT_LE(notices.size(), 8U) << name << "\n" << ::testing::PrintToString(notices);
  }
}

TEST(DeepSpeedShapes, OnlyWhatTheFileAsksForCanBeMissing) {
  for (const auto& [name, shape] : accepted_shapes()) {
    Lines unread;
    for (const std::string& each : read_shape("accepted", name).unread()) {
      unread.push_back(each.substr(0, each.find(" (")));
    }
    EXPECT_EQ(unread, shape.unread) << name;
  }
}

TEST(DeepSpeedShapes, EveryRefusedFileSaysWhyInOneLine) {
  const std::map<std::string, std::string> messages = {
      {"unknown_key",
       ": zero_optimization.stage3_prefetch_bucket_sise: unknown key; did you mean "
       "zero_optimization.stage3_prefetch_bucket_size?"},
      {"one_cycle_momentum",
       ": scheduler.params.cycle_momentum is not given, which means true: OneCycle changes the "
       "learning rate alone here, not the betas; set it to false"},
      {"unknown_scheduler",
       ": scheduler.type = \"CosineAnnealing\": expected WarmupLR, WarmupDecayLR, WarmupCosineLR, "
       "OneCycle or LRRangeTest"},
      {"wrong_parameter",
       ": scheduler.params.cos_min_ratio: WarmupLR has no such parameter; it has warmup_min_lr, "
       "warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration"},
      {"stage_2",
       ": zero_optimization.stage = 2: Tessera always shards everything; set it to 3 or remove "
       "it"},
      {"both_precisions", ": fp16.enabled and bf16.enabled are both true; choose one"},
      {"curriculum",
       ": curriculum_learning: not supported: it is not supported; remove it or set enabled to "
       "false"},
      {"batches_that_contradict",
       "batch.total = 10 (FILE: train_batch_size) is not a multiple of batch.accumulate = 3 "
       "(FILE: gradient_accumulation_steps)"},
      {"nvme_without_path",
       ": zero_optimization.offload_param.device = \"nvme\": nvme_path is missing; give a "
       "directory on the disk"},
  };
  std::set<std::string> tested;
  for (const auto& [name, message] : messages) {
    tested.insert(name);
    const std::string path = (shapes("refused") / (name + ".json")).string();
    std::string said = "accepted";
    try {
      Config::from_file(path).check();
    } catch (const ConfigError& error) {
      said = error.what();
    }
    std::string expected = message.starts_with(":") ? path + message : message;
    for (auto at = expected.find("FILE"); at != std::string::npos; at = expected.find("FILE")) {
      expected.replace(at, 4, path);
    }
    EXPECT_EQ(said, expected) << name;
  }
  EXPECT_EQ(tested, names_in("refused")) << "every file of the folder is tested";
}

}  // namespace
}  // namespace tessera
