// `tessera export`: what its flags say is what is written. The files themselves are tested in
// tests/models/gpt_export_test.cpp.
#include <gtest/gtest.h>

#include "models/gpt.h"
#include "models/gpt_weights.h"
#include "tests/cli/in_process.h"
#include "tests/models/checkpoint_files.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::cli {
namespace {

class ExportCommand : public ::testing::Test {
 protected:
  ExportCommand() { models::write_gpt_checkpoint(path("run"), gpt_, {.dtype = DType::kBFloat16}); }

  std::string path(const std::string& name) const { return (directory_.path() / name).string(); }
  InProcessResult run(const std::vector<std::string>& more) const {
    std::vector<std::string> arguments = {"export", "--checkpoint", path("run"), "--to",
                                          path("out")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_in_process(arguments);
  }
  void expect_refused(const std::vector<std::string>& more, const std::string& part) const {
    const InProcessResult result = run(more);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.out, "");
    EXPECT_HAS(result.err, part);
    EXPECT_FALSE(std::filesystem::exists(path("out")));
  }

  const testing::TemporaryDirectory directory_;
  const models::Gpt gpt_{models::gpt_preset("micro"), at::kCPU, 3};
};

TEST_F(ExportCommand, WritesGpt2InTheRunsPrecisionUnlessToldOtherwise) {
  const InProcessResult plain = run({});
  EXPECT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_HAS(plain.out, "exported " + path("run") + "/save-");
  EXPECT_HAS(plain.out,
             "(step 7) to " + path("out") + ": 29 tensors in bf16, 58.8 KiB in 1 file\n");
  EXPECT_EQ(models::open_weights(path("out"), gpt_.options())->summary(), "GPT-2's names, 1 file");
  EXPECT_TRUE(
      checkpoint::SafetensorsReader(path("out/model.safetensors")).find("transformer.wte.weight") !=
      nullptr);

  std::filesystem::remove_all(path("out"));
  const InProcessResult other =
      run({"--names", "tessera", "--precision", "fp32", "--shard-bytes", "60KiB"});
  EXPECT_EQ(other.exit_code, 0) << other.err;
  EXPECT_HAS(other.out, "29 tensors in fp32, 118 KiB in 2 files");
  EXPECT_EQ(models::open_weights(path("out"), gpt_.options())->summary(), "our names, 2 files");
}

TEST_F(ExportCommand, RefusesFlagsByName) {
  expect_refused({"--names", "llama"}, "--names \"llama\" is neither gpt2 nor tessera");
  expect_refused({"--precision", "fp8"}, "--precision \"fp8\" is none of fp32, bf16, fp16");
  for (const char* const size : {"0", "-1", "many"}) {
    expect_refused({"--shard-bytes", size}, "--shard-bytes");
  }
  EXPECT_EQ(run_in_process({"export", "--to", path("out")}).exit_code, 2);
  const InProcessResult nowhere =
      run_in_process({"export", "--checkpoint", path("nowhere"), "--to", path("out")});
  EXPECT_EQ(nowhere.exit_code, 2);
  EXPECT_HAS(nowhere.err, "nowhere");
}

}  // namespace
}  // namespace tessera::cli
