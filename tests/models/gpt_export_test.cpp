// A checkpoint as files of other programs: the bits that were saved come back, under both namings,
// in any cut; the target is whole or not there; transformers computes the same logits.
#include "models/gpt_export.h"

#include <stdlib.h>

#include <algorithm>
#include <functional>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "models/gpt.h"
#include "models/gpt_weights.h"
#include "tessera/core/error.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/models/checkpoint_files.h"
#include "tests/models/models_support.h"
#include "tests/models/transformers_check.h"
#include "tests/models/weight_files.h"
#include "tests/support/contains.h"
#include "tests/support/read_whole.h"
#include "tests/support/temporary_directory.h"

namespace tessera::models {
namespace {

using nlohmann::json;

constexpr std::uint64_t kSavedSeed = 61;
constexpr std::uint64_t kFreshSeed = 62;

GptOptions saved_model(bool tie_head = false) {
  GptOptions options;
  options.width = 15;
  options.layers = 2;
  options.heads = 3;
  options.vocabulary = 37;
  options.sequence = 11;
  options.tie_head = tie_head;
  return options;
}

class GptExport : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (directory_.path() / name).string(); }
  ExportOptions options() const {
    ExportOptions options;
    options.checkpoint = path("run");
    options.to = path("out");
    return options;
  }
  ExportResult run(const ExportOptions& options) const {
    std::filesystem::remove_all(options.to);
    return export_weights(options);
  }
  // Everything in the directory, hidden files included.
  std::set<std::string> names(const std::string& folder = "") const {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path() / folder)) {
      found.insert(entry.path().filename().string());
    }
    return found;
  }
  json parsed(const std::string& name) const { return json::parse(read_whole(path(name))); }
  template <typename Failure>
  std::string failure(const ExportOptions& options) const {
    try {
      export_weights(options);
    } catch (const Failure& error) {
      return error.what();
    }
    return "no such error";
  }

  const testing::TemporaryDirectory directory_;
};

bool has_bits_of(const Gpt& gpt, const std::string& folder, DType dtype = DType::kFloat32) {
  GptOptions options = gpt.options();
  options.dtype = dtype;
  const Gpt found(options, at::kCPU, kFreshSeed, open_weights(folder, options));
  return std::equal(found.params().begin(), found.params().end(), gpt.params().begin(),
                    gpt.params().end(), [&](const NamedParam& a, const NamedParam& b) {
                      return at::equal(a.tensor, b.tensor.to(shard::scalar_type_of(dtype)));
                    });
}

TEST_F(GptExport, ComesBackBitForBitHoweverItIsCut) {
  struct Cut {
    std::size_t tile_bytes;  // bands of one row of the file's, of four, and of all
    std::uint64_t shard_bytes;
  };
  constexpr Cut kCuts[] = {{1, kExportShardBytes}, {4 * 45 * 4, 3000}, {1 << 20, 1}};
  for (const bool tie_head : {false, true}) {
    const Gpt gpt(saved_model(tie_head), at::kCPU, kSavedSeed);
    std::filesystem::remove_all(path("run"));
    write_gpt_checkpoint(path("run"), gpt, {.num_ranks = tie_head ? 3 : 1});
    for (const GptNaming naming : {GptNaming::kGpt2, GptNaming::kTessera}) {
      for (const Cut& cut : kCuts) {
        ExportOptions exported = options();
        exported.naming = naming;
        exported.tile_bytes = cut.tile_bytes;
        exported.shard_bytes = cut.shard_bytes;
        const ExportResult result = run(exported);
        const auto num_tensors = static_cast<int>(gpt.params().size());
        EXPECT_EQ(result.num_tensors, num_tensors);
        EXPECT_EQ(result.bytes, static_cast<std::uint64_t>(gpt_size(gpt.options()).num_params) * 4);
        EXPECT_EQ(result.num_files == 1, cut.shard_bytes == kExportShardBytes);
        EXPECT_EQ(result.num_files == num_tensors, cut.shard_bytes == 1);
        EXPECT_TRUE(has_bits_of(gpt, exported.to)) << tie_head << ", " << cut.tile_bytes;
      }
    }
  }
  EXPECT_EQ(names(), (std::set<std::string>{"run", "out"}));
}

TEST_F(GptExport, FilesAreNoLargerThanAskedForAndInTheIndex) {
  const Gpt gpt(saved_model(), at::kCPU, kSavedSeed);
  write_gpt_checkpoint(path("run"), gpt);
  ExportOptions exported = options();
  exported.shard_bytes = 3000;  // the largest tensors have 3600 bytes
  const ExportResult result = run(exported);
  const json index = parsed("out/model.safetensors.index.json");
  EXPECT_EQ(index["metadata"]["total_size"], result.bytes);
  EXPECT_EQ(index["weight_map"].size(), gpt.params().size());
  std::set<std::string> expected = {"config.json", "model.safetensors.index.json"};
  std::uint64_t bytes = 0;
  for (int number = 1; number <= result.num_files; ++number) {
    const auto padded = [](int value) {
      return std::string(value < 10 ? "0000" : "000") + std::to_string(value);
    };
    const std::string name =
        "model-" + padded(number) + "-of-" + padded(result.num_files) + ".safetensors";
    expected.insert(name);
    const checkpoint::SafetensorsReader reader(path("out/" + name));
    std::uint64_t of_file = 0;
    for (const checkpoint::TensorEntry& entry : reader.entries()) {
      of_file += entry.bytes();
      EXPECT_EQ(index["weight_map"][entry.name], name);
    }
    EXPECT_TRUE(of_file <= 3000 || reader.entries().size() == 1) << name;
    EXPECT_EQ(reader.metadata().at("format"), "pt");
    bytes += of_file;
  }
  EXPECT_EQ(bytes, result.bytes);
  EXPECT_EQ(names("out"), expected);

  exported.shard_bytes = kExportShardBytes;
  run(exported);
  EXPECT_EQ(names("out"), (std::set<std::string>{"config.json", "model.safetensors"}));
}

TEST_F(GptExport, Fp32IsMadeOfTheMasterWeightsAndTheRunsTypeOfItsValues) {
  const Gpt gpt(saved_model(), at::kCPU, kSavedSeed);
  for (const DType of_run : {DType::kBFloat16, DType::kFloat16}) {
    std::filesystem::remove_all(path("run"));
    write_gpt_checkpoint(path("run"), gpt, {.num_ranks = 2, .dtype = of_run});
    ExportOptions exported = options();
    EXPECT_EQ(run(exported).dtype, of_run);
    EXPECT_TRUE(has_bits_of(gpt, exported.to, of_run));
    for (const DType wanted : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      exported.dtype = wanted;
      EXPECT_EQ(run(exported).dtype, wanted);
      EXPECT_TRUE(has_bits_of(gpt, exported.to, wanted))
          << to_string(of_run) << " to " << to_string(wanted);
    }
  }
}

TEST_F(GptExport, AValueBeyondFp16IsNamedAndNothingIsLeft) {
  const Gpt gpt(saved_model(), at::kCPU, kSavedSeed);
  {
    const at::NoGradGuard no_grad;
    gpt.params()[8].tensor.select(0, 3).fill_(70000);
    gpt.params()[2].tensor.fill_(INFINITY);  // infinite it may be
  }
  write_gpt_checkpoint(path("run"), gpt);
  ExportOptions exported = options();
  exported.dtype = DType::kFloat16;
  EXPECT_EQ(failure<ConfigError>(exported),
            "parameter \"" + gpt.params()[8].name +
                "\" has the value 70000, which fp16 cannot hold; export with --precision bf16 or "
                "fp32");
  EXPECT_EQ(names(), std::set<std::string>{"run"});
  exported.dtype = DType::kBFloat16;
  EXPECT_EQ(failure<ConfigError>(exported), "no such error");
}

TEST_F(GptExport, TheConfigIsThatOfTheModel) {
  GptOptions model = saved_model(true);
  model.gelu_tanh = true;
  const Gpt gpt(model, at::kCPU, kSavedSeed);
  write_gpt_checkpoint(path("run"), gpt, {.dtype = DType::kBFloat16});
  run(options());
  const json config = parsed("out/config.json");
  EXPECT_EQ(config["model_type"], "gpt2");
  EXPECT_EQ(config["architectures"], json::array({"GPT2LMHeadModel"}));
  EXPECT_EQ(config["activation_function"], "gelu_new");
  EXPECT_EQ(config["tie_word_embeddings"], true);
  EXPECT_EQ(config["n_head"], 3);
  EXPECT_EQ(config["n_positions"], 11);
  EXPECT_EQ(config["torch_dtype"], "bfloat16");
  ExportOptions ours = options();
  ours.naming = GptNaming::kTessera;
  run(ours);
  EXPECT_EQ(parsed("out/config.json")["model_type"], "tessera-gpt");
  EXPECT_TRUE(parsed("out/config.json")["architectures"].is_null());
}

TEST_F(GptExport, ReplacesNothing) {
  const Gpt gpt(saved_model(), at::kCPU, kSavedSeed);
  write_gpt_checkpoint(path("run"), gpt);
  ExportOptions exported = options();
  std::filesystem::create_directory(path("out"));
  exported.to = path("out/");
  EXPECT_EQ(failure<ConfigError>(exported), "no such error");  // an empty directory may be filled
  exported.to = path("out");
  EXPECT_EQ(failure<ConfigError>(exported),
            path("out") + ": is there already; name a directory that is not");
  write_text(path("file"), "text");
  exported.to = path("file");
  EXPECT_HAS(failure<ConfigError>(exported), "is there already");
  EXPECT_EQ(read_whole(path("file")), "text");
  std::filesystem::create_symlink(path("nowhere"), path("link"));
  exported.to = path("link");
  EXPECT_HAS(failure<ConfigError>(exported), "is there already");
  exported.to = path("no/where");
  EXPECT_HAS(failure<IoError>(exported), "cannot make the directory");
}

TEST_F(GptExport, ADiskThatIsFullIsNamedAndNothingIsLeft) {
  const Gpt gpt(saved_model(), at::kCPU, kSavedSeed);
  write_gpt_checkpoint(path("run"), gpt);
  for (const rlim_t limit : {100, 20000}) {
    const testing::FileSizeLimit full(limit);
    EXPECT_HAS(failure<IoError>(options()), "model.safetensors");
  }
  EXPECT_EQ(names(), std::set<std::string>{"run"});
}

TEST_F(GptExport, RefusesACheckpointThatIsNotTheGptItDescribes) {
  const Gpt gpt(saved_model(), at::kCPU, kSavedSeed);
  const auto refusal = [&](const ChangeManifest& change) {
    std::filesystem::remove_all(path("run"));
    write_gpt_checkpoint(path("run"), gpt, {}, change);
    return failure<ConfigError>(options());
  };
  EXPECT_HAS(refusal([](checkpoint::Manifest& m) { m.user.clear(); }), "describes no GPT of ours");
  EXPECT_HAS(refusal([](checkpoint::Manifest& m) { m.user["model.layers"] = "3"; }),
             "its parameters are not those of the model that it describes: missing are "
             "\"blocks.2.norm1.weight\"");
  EXPECT_HAS(refusal([](checkpoint::Manifest& m) { m.params[0].shape = {15, 37}; }),
             "of other shapes are \"tokens.weight\" [15, 37], here [37, 15]");
  EXPECT_HAS(refusal([](checkpoint::Manifest& m) { m.params[0].strides = {1, 37}; }),
             "with strides");
  EXPECT_HAS(refusal([](checkpoint::Manifest& m) { m.params[0].name = "other"; }),
             "not in the model are \"other\"");
}

TEST_F(GptExport, TransformersComputesTheSameLogits) {
  if (!has_transformers()) {
    GTEST_SKIP() << "python3 has no transformers";
  }
  for (const bool other : {false, true}) {
    GptOptions model = saved_model(/*tie_head=*/other);
    model.gelu_tanh = other;
    Gpt gpt(model, at::kCPU, kSavedSeed);
    scatter(gpt, 0.1);
    std::filesystem::remove_all(path("run"));
    write_gpt_checkpoint(path("run"), gpt, {.num_ranks = 2});
    ExportOptions exported = options();
    exported.shard_bytes = other ? 3000 : kExportShardBytes;
    run(exported);
    const at::Tensor ids = at::arange(22, at::kLong).remainder(37).view({2, 11});
    write_weights(path("expected"), {weight_tensor("ids", ids.to(at::kFloat)),
                                     weight_tensor("logits", all_logits(gpt, ids))});
    EXPECT_EQ(run_transformers({"compare", exported.to, path("expected"), "1e-4"}), 0) << other;
  }
}

TEST_F(GptExport, WeightsOfTransformersGiveItsLogits) {
  if (!has_transformers()) {
    GTEST_SKIP() << "python3 has no transformers";
  }
  GptOptions model = saved_model(/*tie_head=*/true);
  model.gelu_tanh = true;
  ASSERT_EQ(run_transformers({"make",
                              R"({"n_embd": 15, "n_layer": 2, "n_head": 3, "vocab_size": 37,
                                  "n_positions": 11})",
                              path("gpt2"), path("expected")}),
            0);
  Gpt gpt(model, at::kCPU, kFreshSeed, open_weights(path("gpt2"), model));
  const checkpoint::SafetensorsReader reader(path("expected"));
  const auto values = [&](const std::string& name) {
    const at::Tensor tensor = at::empty(reader.find(name)->shape, at::kFloat);
    reader.read(name, 0, {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()});
    return tensor;
  };
  const at::Tensor found = all_logits(gpt, values("ids").to(at::kLong));
  EXPECT_LE((found - values("logits")).abs().max().item<double>(), 1e-4);
}

}  // namespace
}  // namespace tessera::models
