// `tessera import`: what a reader may send, and what DeepSpeed's own checkpoint becomes.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/import_header.h"
#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/core/error.h"
#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

const std::string kFixture = std::string(TESSERA_SOURCE_DIR) + "/tests/cli/data/deepspeed";

// A header that is taken: one parameter and one buffer.
Json good_header() {
  return Json::parse(R"({
    "version": 1, "deepspeed": "0.19.8", "num_ranks": 2, "step": 6, "num_updates": 5,
    "precision": "bf16",
    "optimizer": {"kind": "adam", "groups": [
      {"lr": 0.002, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08, "weight_decay": 0.1}]},
    "loss_scale": {"value": 1, "good_steps": 0, "hysteresis_left": 2},
    "lr_scheduler": "", "client_state": "{\"epoch\": 3}", "notes": ["one\ntwo"],
    "params": [{"name": "a", "tied": ["b"], "shape": [2, 3], "trainable": true, "updates": 5,
                "tensors": [["value", "bf16"], ["master", "fp32"], ["exp_avg", "fp32"],
                            ["exp_avg_sq", "fp32"]]}],
    "buffers": [{"name": "a", "shape": [3], "dtype": "uint8", "type": "Bool", "bytes": 3}]})");
}
constexpr std::size_t kGoodBytes = 6 * (2 + 3 * 4) + 3;

std::string framed(const std::string& header) {
  std::string text;
  for (std::uint64_t length = header.size(), i = 0; i < 8; ++i, length >>= 8) {
    text += static_cast<char>(length & 0xffU);
  }
  return text + header;
}

std::string refusal_of_header(const std::string& text) {
  try {
    cli::parse_import_header(text);
  } catch (const CorruptError& error) {
    return error.what();
  }
  return "it was taken";
}

TEST(ImportHeader, NothingInItIsTrusted) {
  EXPECT_EQ(refusal_of_header(good_header().dump()), "it was taken");
  struct Change {
    const char* path;
    Json value;
    const char* words;
  };
  const std::vector<Change> changes = {
      {"/version", 2, "its version is 2, not 1"},
      {"/step", -1, "step is not a whole number"},
      {"/step", 18446744073709551615U, "step is not a whole number"},
      {"/num_updates", "5", "num_updates is not a whole number"},
      {"/precision", "fp8", "the type \"fp8\""},
      {"/precision", "int64", "its precision is int64"},
      {"/optimizer", 1, "optimizer is no object"},
      {"/optimizer/kind", "lion", "its optimizer is \"lion\""},
      {"/optimizer/groups/0/lr", nullptr, "lr is not a number"},
      {"/loss_scale/value", -1, "value is not a number of at least 0"},
      {"/notes", Json::parse("[1]"), "notes is not a list of texts"},
      {"/params", Json::object(), "params is not a list"},
      {"/params/0", Json::array(), "a parameter is no object"},
      {"/params/0/name", "", "the name \"\" is empty, or comes twice"},
      {"/params/0/tied/0", "a", "the name \"a\" is empty, or comes twice"},
      {"/params/0/shape/0", -2, "shape is not a list of at most 64 dims"},
      {"/params/0/shape", std::vector<int>(65, 1), "shape is not a list of at most 64 dims"},
      {"/params/0/shape", Json::parse("[4294967296, 4294967296]"), "more bytes than"},
      {"/params/0/trainable", 1, "trainable is not true or false"},
      {"/params/0/tensors/0", "value", "a tensor is not name and type"},
      {"/params/0/tensors/1/0", "exp_avg", "the name \"exp_avg\" is empty, or comes twice"},
      {"/params/0/tensors/0/0", "momentum", "has the tensor \"momentum\""},
      {"/params/0/tensors/0/1", "int32", "its value is int32"},
      {"/params/0/tensors/1/1", "bf16", "its master is bf16"},
      {"/params/0/tensors", Json::array(), "has no value"},
      {"/buffers/0/bytes", 4, "has 4 bytes for 3 elements"},
      {"/buffers/0/dtype", "int64", "has 3 bytes for 3 elements"},
      {"/buffers/0/shape/0", 0, "has 3 bytes for 0 elements"},
  };
  for (const Change& change : changes) {
    Json header = good_header();
    header[Json::json_pointer(change.path)] = change.value;
    EXPECT_HAS(refusal_of_header(header.dump()), change.words);
  }
  const Json good = good_header();
  for (const auto& [key, value] : good.items()) {
    Json header = good;
    header.erase(key);
    EXPECT_HAS(refusal_of_header(header.dump()), "it has no " + key);
  }
  for (const char* text : {"", "[", "[]", "\"a\"", "{\"version\": 1e999}"}) {
    EXPECT_HAS(refusal_of_header(text), "the reader's header is wrong") << text;
  }
}

class ImportCommand : public ProgramTest {
 protected:
  // Sends `bytes`, says `words`, and ends with this code.
  void write_reader(const std::string& bytes, int exit_code, const std::string& words = "") const {
    write("stream", bytes);
    write("reader", "#!/bin/sh\ncat stream\necho '" + words + "' >&2\nexit " +
                        std::to_string(exit_code) + "\n");
    std::filesystem::permissions(path("reader"), std::filesystem::perms::owner_all);
  }
  ProcessResult import_stream(const Arguments& more = {}) const {
    return run_tessera_forked(joined({"import", ".", "out", "--python", "./reader"}, more), here());
  }
  void expect_failure(int exit_code, const std::string& words) const {
    const ProcessResult result = import_stream();
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    ASSERT_EQ(result.err_lines().size(), 1U) << result.err;
    EXPECT_HAS(result.err, words);
    EXPECT_TRUE(checkpoint::list_saves(path("out")).empty());
    for (const std::string& name : files()) {
      EXPECT_LACKS(name, ".safetensors") << "nothing stays of a save that failed";
    }
  }
};

TEST_F(ImportCommand, WhatAReaderSendsBecomesASave) {
  std::string bytes;
  for (std::size_t i = 0; i < kGoodBytes; ++i) {
    bytes += static_cast<char>(i);
  }
  write_reader(framed(good_header().dump()) + bytes, 0);
  const ProcessResult result = import_stream();
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.out,
             "DeepSpeed 0.19.8, ZeRO-3 on 2 ranks: step 6, bf16, 1 parameter of 6 elements\n"
             "optimizer: adam, lr 0.002, betas 0.9 and 0.95, eps 1e-08, weight decay 0.1\n"
             "note: one\\ntwo\n");
  const checkpoint::CheckpointReader reader(path("out"));
  const checkpoint::Manifest& manifest = reader.manifest();
  EXPECT_TRUE(verify(reader).empty());
  EXPECT_EQ(manifest.step, 6);
  EXPECT_EQ(manifest.num_ranks, 1);
  EXPECT_EQ(manifest.state.at("num_updated_steps"), "5");
  EXPECT_EQ(manifest.state.at("optimizer.kind"), "adam");
  EXPECT_EQ(manifest.state.at("loss_scale.hysteresis_left"), "2");
  const std::map<std::string, std::string> changed = {{"precision", "bf16"},
                                                      {"optim.kind", "adam"},
                                                      {"optim.lr", "0.002"},
                                                      {"optim.beta2", "0.95"},
                                                      {"optim.weight_decay", "0.1"}};
  EXPECT_EQ(manifest.config, changed) << "and not what is a default";
  EXPECT_EQ(manifest.user.at("imported.client_state"), "{\"epoch\": 3}");
  ASSERT_NE(manifest.find("b"), nullptr) << "a tied name";
  // All bytes, in the order in which they were sent.
  std::string stored;
  const auto visit = [&](std::int64_t, std::span<const std::byte> piece) {
    stored.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  };
  for (const char* name : {"value", "master", "exp_avg", "exp_avg_sq"}) {
    reader.read(manifest.params.at(0).tensors.at(name), 0, 6, visit);
  }
  reader.read(manifest.buffers.at(0).ranks.at(0), manifest.buffers.at(0).dtype, visit);
  EXPECT_EQ(stored, bytes);
  // Another one is the newer, and takes nothing away.
  ASSERT_EQ(import_stream().exit_code, 0);
  EXPECT_EQ(checkpoint::list_saves(path("out")).size(), 2U);
}

TEST_F(ImportCommand, AReaderThatFailsLeavesNothing) {
  const std::string header = framed(good_header().dump());
  const std::string bytes(kGoodBytes, 'x');
  write_reader("", 2, "no torch here");
  expect_failure(2, "error: import: no torch here");
  write_reader(header + bytes, 2, "changed its mind");
  expect_failure(2, "error: import: changed its mind");
  write_reader(header + bytes.substr(1), 0);
  expect_failure(1, "ended with exit code 0 after");
  write_reader(header + bytes.substr(1), 1, "Traceback:\nKeyError: 7");
  expect_failure(1, "ended with exit code 1 after");
  expect_failure(1, "bytes: KeyError: 7");
  write_reader(header + bytes + "y", 0);
  expect_failure(1, "has sent more than");
  write_reader(std::string(8, '\xff') + header, 0);
  expect_failure(1, "its length is 18446744073709551615 bytes");
  write("reader", "#!/bin/sh\nkill -9 $$\n");
  expect_failure(1, "was ended by Killed after 0 bytes");
}

TEST_F(ImportCommand, WrongInputIsRefused) {
  expect_refusal({"import", "none", "out"}, "\"none\" is no directory");
  expect_refusal({"import", ".", ""}, "DIR is empty");
  expect_refusal({"import", ".", "out", "--python", "./none"},
                 "cannot start \"./none\": No such file or directory; it needs a Python");
}

// --- with Python ---

bool lacks_python(const ProcessResult& result) {
  return contains(result.err, "it needs a Python") || contains(result.err, "has no torch");
}

std::vector<float> floats_of(const checkpoint::CheckpointReader& reader,
                             const checkpoint::StoredTensor& tensor, std::int64_t numel) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  reader.read(tensor, 0, numel, [&](std::int64_t begin, std::span<const std::byte> piece) {
    std::memcpy(values.data() + begin, piece.data(), piece.size());
  });
  return values;
}

std::vector<float> floats_of(const checkpoint::SafetensorsReader& file, const std::string& name) {
  const checkpoint::TensorEntry* const entry = file.find(name);
  if (entry == nullptr) {
    return {};
  }
  std::vector<float> values(entry->bytes() / sizeof(float));
  file.read(name, 0, std::as_writable_bytes(std::span(values)));
  return values;
}

TEST_F(ImportCommand, WeightsAndMomentsAreThoseThatDeepSpeedShows) {
  const ProcessResult result = run({"import", kFixture, "out"});
  if (lacks_python(result)) {
    GTEST_SKIP() << result.err;
  }
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_HAS(result.out, "ZeRO-3 on 2 ranks: step 3, fp32, 29 parameters of 7095 elements");
  const checkpoint::CheckpointReader reader(path("out"));
  const checkpoint::Manifest& manifest = reader.manifest();
  EXPECT_TRUE(verify(reader).empty());
  EXPECT_EQ(manifest.step, 3);
  EXPECT_EQ(manifest.state.at("optimizer.num_updates"), "3");
  const checkpoint::SafetensorsReader expected(kFixture + "/expected.safetensors");
  ASSERT_EQ(manifest.params.size() * 3, expected.entries().size());
  for (const checkpoint::StoredParam& param : manifest.params) {
    SCOPED_TRACE(param.name);
    EXPECT_EQ(param.updates, 3);
    const checkpoint::TensorEntry* const entry = expected.find(param.name);
    ASSERT_NE(entry, nullptr);
    EXPECT_EQ(param.shape, entry->shape);
    const auto values = [&](const char* name) {
      return floats_of(reader, param.tensors.at(name), param.numel());
    };
    EXPECT_EQ(param.tensors.size(), 3U);
    EXPECT_EQ(values("value"), floats_of(expected, param.name));
    EXPECT_EQ(values("exp_avg"), floats_of(expected, "exp_avg:" + param.name));
    EXPECT_EQ(values("exp_avg_sq"), floats_of(expected, "exp_avg_sq:" + param.name));
  }
}

TEST_F(ImportCommand, APickleThatRunsACommandIsRefusedAndDoesNotRun) {
  std::filesystem::create_directory(path("tag"));
  write("latest", "tag");
  write("tag/zero_pp_rank_0_mp_rank_00_model_states.pt", "cposix\nsystem\n(S'touch run'\ntR.");
  write("tag/zero_pp_rank_0_mp_rank_00_optim_states.pt", "cposix\nsystem\n(S'touch run'\ntR.");
  const ProcessResult result = run({"import", ".", "out"});
  if (lacks_python(result)) {
    GTEST_SKIP() << result.err;
  }
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_HAS(result.err, "_model_states.pt holds posix.system, which is not among the classes");
  EXPECT_FALSE(std::filesystem::exists(path("run")));
  EXPECT_FALSE(std::filesystem::exists(path("out")));
}

}  // namespace
}  // namespace tessera::testing
