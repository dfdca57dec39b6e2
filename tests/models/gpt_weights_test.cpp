// Weights from files: the model that reads them has their bits, under our names and GPT-2's, on any
// number of ranks; a set that is not the model's, or was made to deceive, is refused by name.
#include "models/gpt_weights.h"

#include <cstring>
#include <functional>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "models/gpt.h"
#include "tessera/core/error.h"
#include "tessera/engine/build_scope.h"
#include "tessera/engine/engine.h"
#include "testing/thread_backend.h"
#include "tests/models/models_support.h"
#include "tests/models/weight_files.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::models {
namespace {

constexpr std::uint64_t kFileSeed = 41;
constexpr std::uint64_t kOtherSeed = 42;  // of the models that read the files

// Nothing in it divides anything.
GptOptions odd_model(bool tie_head = false) {
  GptOptions options;
  options.width = 15;
  options.layers = 2;
  options.heads = 3;
  options.vocabulary = 37;
  options.sequence = 11;
  options.tie_head = tie_head;
  return options;
}

std::vector<std::byte> zeros(std::size_t num_bytes) { return std::vector<std::byte>(num_bytes); }

bool equal_bits(const Gpt& a, const Gpt& b) {
  bool equal = a.params().size() == b.params().size();
  for (std::size_t i = 0; equal && i < a.params().size(); ++i) {
    equal = a.params()[i].name == b.params()[i].name &&
            at::equal(a.params()[i].tensor, b.params()[i].tensor);
  }
  return equal;
}

class GptWeights : public ::testing::Test {
 protected:
  std::string path(const std::string& name = "") const {
    return (name.empty() ? directory_.path() : directory_.path() / name).string();
  }
  void write_model(const std::vector<WeightTensor>& weights) const {
    write_weights(path("model.safetensors"), weights);
  }
  void write_config(const std::string& json) const { write_text(path("config.json"), json); }
  Gpt read(const GptOptions& options, const std::string& name = "") const {
    return Gpt(options, at::kCPU, kOtherSeed, open_weights(path(name), options));
  }
  // What is wrong with the directory's set.
  std::string refusal(const GptOptions& options, const std::string& name = "") const {
    try {
      open_weights(path(name), options);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(GptWeights, GiveTheModelTheFilesBitsUnderEveryNaming) {
  for (const bool tie_head : {false, true}) {
    const GptOptions options = odd_model(tie_head);
    const Gpt gpt(options, at::kCPU, kFileSeed);
    EXPECT_FALSE(equal_bits(gpt, Gpt(options, at::kCPU, kOtherSeed)));
    write_model(weights_of(gpt, GptNaming::kTessera, ""));
    EXPECT_TRUE(equal_bits(read(options), gpt));
    EXPECT_TRUE(equal_bits(read(options, "model.safetensors"), gpt));
    EXPECT_EQ(open_weights(path(), options)->summary(), "our names, 1 file");
    for (const char* const prefix : {"transformer.", ""}) {
      write_model(weights_of(gpt, GptNaming::kGpt2, prefix));
      EXPECT_TRUE(equal_bits(read(options), gpt)) << prefix;
      EXPECT_EQ(open_weights(path(), options)->summary(), "GPT-2's names, 1 file");
    }
  }
}

TEST_F(GptWeights, MayLieInSeveralFiles) {
  const GptOptions options = odd_model();
  const Gpt gpt(options, at::kCPU, kFileSeed);
  write_sharded(path(), weights_of(gpt, GptNaming::kGpt2, "transformer."), 4);
  EXPECT_TRUE(equal_bits(read(options), gpt));
  EXPECT_TRUE(equal_bits(read(options, "model.safetensors.index.json"), gpt));
  EXPECT_HAS(open_weights(path(), options)->summary(), "8 files");
}

TEST_F(GptWeights, AreRoundedOnceToTheModelsType) {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  GptOptions options = odd_model();
  const Gpt gpt(options, at::kCPU, kFileSeed);
  for (const DType stored : kTypes) {
    write_model(weights_of(gpt, GptNaming::kGpt2, "", stored));
    for (const DType wanted : kTypes) {
      options.dtype = wanted;
      const Gpt found = read(options);
      for (std::size_t i = 0; i < gpt.params().size(); ++i) {
        const at::Tensor expected = gpt.params()[i]
                                        .tensor.detach()
                                        .to(shard::scalar_type_of(stored))
                                        .to(at::kFloat)
                                        .to(shard::scalar_type_of(wanted));
        EXPECT_TRUE(at::equal(found.params()[i].tensor, expected))
            << gpt.params()[i].name << ", " << to_string(stored) << " to " << to_string(wanted);
      }
    }
  }
}

// As a rank does it: any range, also one that begins and ends inside a row of a transposed tensor.
TEST_F(GptWeights, AnyRangeIsThatPieceOfTheWhole) {
  const GptOptions options = odd_model();
  const Gpt gpt(options, at::kCPU, kFileSeed);
  write_model(weights_of(gpt, GptNaming::kGpt2, ""));
  const auto weights = open_weights(path(), options);
  for (const NamedParam& param : gpt.params()) {
    const std::int64_t numel = param.tensor.numel();
    for (const std::int64_t begin : {std::int64_t{0}, numel / 3, numel - 1, numel}) {
      for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, numel / 2, numel}) {
        if (begin + count > numel) {
          continue;
        }
        at::Tensor piece = at::full({count}, NAN, at::kFloat);
        weights->read(param.name, {begin, count}, DType::kFloat32,
                      static_cast<std::byte*>(piece.mutable_data_ptr()));
        EXPECT_TRUE(at::equal(piece, param.tensor.detach().flatten().narrow(0, begin, count)))
            << param.name << " [" << begin << ", +" << count << ")";
      }
    }
  }
}

TEST_F(GptWeights, AShardedModelHasThemOnAnyNumberOfRanks) {
  for (const bool tie_head : {false, true}) {
    const GptOptions options = odd_model(tie_head);
    const Gpt gpt(options, at::kCPU, kFileSeed);
    write_sharded(path(), weights_of(gpt, GptNaming::kGpt2, "transformer."), 5);
    for (const int ranks : {1, 2, 3}) {
      for (const char* const tier : {"device", "host"}) {
        comm::run_ranks(ranks, [&](comm::Group& group) {
          Config config;
          config.set("log.level", std::string("error"));
          config.set("seed", static_cast<std::int64_t>(kOtherSeed));
          Runtime runtime(config, group, {-1, 1});
          const BuildScope scope({.tier = tier});
          Engine engine(runtime);
          const Gpt sharded(options, engine, kOtherSeed, open_weights(path(), options));
          for (int id = 0; id < engine.num_params(); ++id) {
            const NamedParam& expected = gpt.params()[static_cast<std::size_t>(id)];
            EXPECT_TRUE(at::equal(engine.full_value(id), expected.tensor)) << expected.name;
          }
        });
      }
    }
  }
}

TEST_F(GptWeights, OfAnotherModelAreListedByName) {
  GptOptions options = odd_model();
  const Gpt gpt(options, at::kCPU, kFileSeed);
  std::vector<WeightTensor> weights = weights_of(gpt, GptNaming::kGpt2, "");
  weights.push_back({"h.0.attn.bias", DType::kUInt8, {1, 1, 2, 2}, zeros(4)});  // a mask
  write_model(weights);
  EXPECT_EQ(refusal(options), "no error");

  weights.erase(weights.begin() + 1);  // wpe.weight
  weights.push_back(weight_tensor("score.weight", at::ones({2, 15})));
  weights[1] = {weights[1].name, DType::kFloat64, {15}, zeros(15 * sizeof(double))};
  options.vocabulary = 40;
  write_model(weights);
  EXPECT_EQ(refusal(options),
            path() +
                ": these are not weights of this model: missing are \"wpe.weight\"; of other "
                "shapes are \"wte.weight\" [37, 15], here [40, 15], \"lm_head.weight\" [37, 15], "
                "here [40, 15]; of other types than fp32, bf16 and fp16 are \"h.0.ln_1.weight\" "
                "fp64; not in the model are \"score.weight\"; give the model that they belong to: "
                "--model config.json, or --width, --layers, --vocab and --seq");

  options = odd_model();
  options.layers = 5;
  write_model(weights_of(gpt, GptNaming::kTessera, ""));
  EXPECT_HAS(refusal(options), "missing are \"blocks.2.norm1.weight\"");
  EXPECT_HAS(refusal(options), "and 30 more");
  options.layers = 1;
  EXPECT_HAS(refusal(options), "not in the model are \"blocks.1.attention.out.bias\"");

  write_model({weight_tensor("model.embed.weight", at::ones({3}))});
  EXPECT_HAS(refusal(options), "holds no table of tokens");
  EXPECT_HAS(refusal(options), "its tensors are \"model.embed.weight\"");
}

TEST_F(GptWeights, WithTheHeadTwiceAreTakenIfBothAreOne) {
  const GptOptions tied = odd_model(true);
  const Gpt gpt(tied, at::kCPU, kFileSeed);
  std::vector<WeightTensor> weights = weights_of(gpt, GptNaming::kGpt2, "transformer.");
  weights.push_back(weights.front());
  weights.back().name = "lm_head.weight";
  write_model(weights);
  EXPECT_TRUE(equal_bits(read(tied), gpt));
  EXPECT_EQ(refusal(odd_model()), "no error");

  weights.back().bytes.back() ^= std::byte{1};
  write_model(weights);
  EXPECT_EQ(refusal(tied), path() +
                               ": \"lm_head.weight\" has other values than "
                               "\"transformer.wte.weight\", and the model's head is tied; leave "
                               "--tie-head out");
  weights.pop_back();
  write_model(weights);
  EXPECT_HAS(refusal(odd_model()), "missing are \"lm_head.weight\"");
  EXPECT_HAS(refusal(odd_model()), "and --tie-head, since they have no head");
}

TEST_F(GptWeights, OfAnotherComputationAreRefused) {
  GptOptions options = odd_model();
  const Gpt gpt(options, at::kCPU, kFileSeed);
  write_model(weights_of(gpt, GptNaming::kGpt2, ""));
  write_config(R"({"model_type": "gpt2", "activation_function": "gelu", "n_head": 3})");
  EXPECT_EQ(refusal(options), "no error");
  for (const char* const gpt2 :
       {R"({"model_type": "gpt2"})", R"({"activation_function": "gelu_new"})"}) {
    write_config(gpt2);
    options.gelu_tanh = false;
    EXPECT_HAS(refusal(options),
               "activation_function is \"gelu_new\", the model is made with gelu ");
    options.gelu_tanh = true;
    EXPECT_EQ(refusal(options), "no error");
  }
  write_config(
      R"({"activation_function": "relu", "n_head": 5, "layer_norm_epsilon": 1e-6,
          "scale_attn_by_inverse_layer_idx": true})");
  EXPECT_EQ(refusal(options),
            path("config.json") +
                ": these weights are for another computation than this model's: n_head is 5, here "
                "3 (--heads); activation_function is \"relu\", our GPT has gelu and gelu_new; "
                "layer_norm_epsilon is 1e-06, our GPT's is 1e-05; scale_attn_by_inverse_layer_idx "
                "is true, our GPT computes false");
  write_config("[");
  EXPECT_HAS(refusal(options), "config.json: not a JSON object");
}

TEST_F(GptWeights, AreLookedForWhereTheyAreSaidToBe) {
  const GptOptions options = odd_model();
  EXPECT_HAS(refusal(options, "nowhere"), "there is no such file or directory");
  EXPECT_HAS(refusal(options), "has neither model.safetensors nor model.safetensors.index.json");
  const Gpt gpt(options, at::kCPU, kFileSeed);
  write_sharded(path(), weights_of(gpt, GptNaming::kTessera, ""), 100);
  write_model(weights_of(gpt, GptNaming::kTessera, ""));
  EXPECT_HAS(refusal(options), "has both model.safetensors and model.safetensors.index.json");
  write_text(path("model.safetensors"), "no header");
  EXPECT_HAS(refusal(options, "model.safetensors"), path("model.safetensors"));
}

TEST_F(GptWeights, WithAHostileIndexAreRefusedByName) {
  const GptOptions options = odd_model();
  const auto with_index = [&](const std::string& text) {
    write_text(path("model.safetensors.index.json"), text);
    return refusal(options);
  };
  const auto with_map = [&](const std::string& map) {
    return with_index(R"({"weight_map": {)" + map + "}}");
  };
  write_weights(path("a.safetensors"), {weight_tensor("tokens.weight", at::ones({3}))});
  write_weights(path("b.safetensors"), {weight_tensor("tokens.weight", at::ones({3})),
                                        weight_tensor("norm.weight", at::ones({3}))});
  for (const char* const text :
       {"", "[]", "{}", "{\"weight_map\": 3}", "{\"weight_map\": {}}", "{\"weight_map\": {\"a\""}) {
    EXPECT_HAS(with_index(text), "not an index of safetensors files") << text;
  }
  EXPECT_HAS(with_index(std::string(100000, '[')), "not an index of safetensors files");
  for (const char* const file : {R"("../a.safetensors")", R"("/etc/passwd")", R"("")", R"("..")",
                                 R"(".")", "3", "null", R"("a\u0000b")", R"("x/a.safetensors")"}) {
    EXPECT_HAS(with_map(R"("tokens.weight": )" + std::string(file)),
               "which is not the name of a file beside the index");
  }
  EXPECT_HAS(with_map(R"("tokens.weight": "a.safetensors", "tokens.weight": "b.safetensors")"),
             "key \"tokens.weight\" comes twice");
  EXPECT_HAS(with_index(R"({"weight_map": {"a": "a.safetensors"}, "weight_map": {"a": "b"}})"),
             "key \"weight_map\" comes twice");
  EXPECT_HAS(with_map(R"("tokens.weight": "c.safetensors")"), "c.safetensors: the file is missing");
  EXPECT_HAS(with_map(R"("norm.weight": "a.safetensors")"),
             "a.safetensors: holds tensor \"tokens.weight\", which is not in the index");
  EXPECT_HAS(with_map(R"("tokens.weight": "a.safetensors", "norm.weight": "b.safetensors")"),
             "b.safetensors: holds tensor \"tokens.weight\", which the index says is in "
             "\"a.safetensors\"");
  EXPECT_HAS(with_map(R"("tokens.weight": "a.safetensors", "up.weight": "a.safetensors")"),
             "a.safetensors: holds no tensor \"up.weight\", which the index says it does");
}

}  // namespace
}  // namespace tessera::models
