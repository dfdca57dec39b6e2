// A run of DeepSpeed's goes on here, on another number of ranks.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>

#include "cli/import_header.h"
#include "cli/import_reader.h"
#include "cli/import_save.h"
#include "models/gpt.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/engine/engine.h"
#include "tessera/engine/runtime.h"
#include "testing/thread_backend.h"
#include "tests/support/contains.h"
#include "tests/support/read_whole.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

const std::string kDeepSpeedRun = std::string(TESSERA_SOURCE_DIR) + "/tests/cli/data/deepspeed";

// Empty, or why there is no Python for it here.
std::string import_run(const std::string& directory) {
  try {
    cli::ImportReader reader("python3", {kDeepSpeedRun, ""});
    const cli::ReadBytes read = [&reader](std::span<std::byte> out) { reader.read(out); };
    const cli::ImportHeader header = cli::read_import_header(read);
    cli::save_imported(header, read, [&reader] { reader.finish(); }, {directory, kDeepSpeedRun});
  } catch (const ConfigError& error) {
    const std::string why = error.what();
    if (contains(why, "it needs a Python") || contains(why, "has no torch")) {
      return why;
    }
    throw;
  }
  return {};
}

// What the fixture's script gave DeepSpeed.
Config config_of_run(const nlohmann::json& run) {
  const nlohmann::json& optimizer = run.at("optimizer");
  Config config;
  config.set("optim.kind", "adamw");
  config.set("optim.lr", optimizer.at("lr").get<double>());
  config.set("optim.beta1", optimizer.at("betas").at(0).get<double>());
  config.set("optim.beta2", optimizer.at("betas").at(1).get<double>());
  config.set("optim.eps", optimizer.at("eps").get<double>());
  config.set("optim.weight_decay", optimizer.at("weight_decay").get<double>());
  config.set("grad.clip_norm", run.at("clip").get<double>());
  return config;
}

models::GptOptions model_of_run(const nlohmann::json& run) {
  const nlohmann::json& shape = run.at("shape");
  models::GptOptions options;
  options.width = shape.at("width");
  options.layers = shape.at("layers");
  options.heads = shape.at("heads");
  options.vocabulary = shape.at("vocabulary");
  options.sequence = shape.at("sequence");
  return options;
}

// This rank's sequences of a batch, each one token longer than the model's.
at::Tensor tokens_of(const nlohmann::json& batch, int rank, int num_ranks) {
  const std::size_t rows = batch.size() / static_cast<std::size_t>(num_ranks);
  std::vector<std::int64_t> values;
  for (std::size_t row = 0; row < rows; ++row) {
    for (const nlohmann::json& token : batch.at(static_cast<std::size_t>(rank) * rows + row)) {
      values.push_back(token);
    }
  }
  return at::tensor(values, at::kLong).view({static_cast<std::int64_t>(rows), -1});
}

TEST(ImportParity, ThreeRanksGoOnWithTheLossesOfDeepSpeedOnTwo) {
  const TemporaryDirectory directory;
  if (const std::string why = import_run(directory.path()); !why.empty()) {
    GTEST_SKIP() << why;
  }
  const auto run = nlohmann::json::parse(read_whole(kDeepSpeedRun + "/next.json"));
  const std::int64_t step_before = run.at("step");
  comm::run_ranks(3, [&](comm::Group& group) {
    RuntimeOptions runtime_options;
    runtime_options.num_update_threads = 1;
    Runtime runtime(config_of_run(run), group, runtime_options);
    Engine engine(runtime);
    models::Gpt model(model_of_run(run), engine, /*seed=*/0);
    const LoadResult loaded = engine.load(directory.path());
    EXPECT_EQ(loaded.step, step_before);
    EXPECT_EQ(loaded.user.at("imported.deepspeed"), "0.19.8");
    for (std::size_t i = 0; i < run.at("losses").size(); ++i) {
      const at::Tensor tokens = tokens_of(run.at("tokens").at(i), group.rank(), group.size());
      const std::int64_t length = tokens.size(1) - 1;
      const at::Tensor loss = model.loss(tokens.slice(1, 0, length).contiguous(),
                                         tokens.slice(1, 1, length + 1).contiguous());
      engine.backward(loss, static_cast<double>(tokens.size(0) * length));
      const StepResult result = engine.step();
      EXPECT_EQ(result.step, step_before + static_cast<std::int64_t>(i) + 1);
      // Sums have another order, which moves a loss of 4 by 4e-7, one unit of its last place or
      // two. Moments that begin anew move the next losses by 3e-3, a count of updates that is off
      // by one by 4e-4, weight decay that is off by 3e-4.
      EXPECT_NEAR(result.loss, run.at("losses").at(i).get<double>(), 1e-5) << "step " << i;
    }
  });
}

}  // namespace
}  // namespace tessera::testing
