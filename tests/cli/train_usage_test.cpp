// Wrong input to `tessera train`: one line on stderr, exit code 2, nothing on stdout, nothing
// written. With --ranks the line comes once, from the process that would have started them.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/refusal.h"

namespace tessera::testing {
namespace {

class TrainUsage : public Refusal {
 protected:
  void expect_refusal(std::vector<std::string> arguments, const std::string& part,
                      const std::map<std::string, std::string>& environment = {}) {
    arguments.insert(arguments.begin(), "train");
    Refusal::expect_refusal(arguments, part, environment);
  }

  // 16-bit tokens, little-endian.
  void write_tokens(const std::string& name, const std::vector<std::uint16_t>& tokens) {
    std::string bytes;
    for (const std::uint16_t token : tokens) {
      bytes += static_cast<char>(token & 0xff);
      bytes += static_cast<char>(token >> 8);
    }
    write(name, bytes);
  }
};

TEST_F(TrainUsage, AnUnknownPresetIsRefused) {
  expect_refusal({"--preset", "tinny"}, "tinny");
  expect_refusal({"--preset", "tinny", "--ranks", "2"}, "tiny");
}

TEST_F(TrainUsage, AModelThatCannotBeIsRefused) {
  expect_refusal({"--layers", "0"}, "layers");
  expect_refusal({"--layers", "x"}, "--layers \"x\" is not a whole number from 1 to 65536");
  expect_refusal({"--width", "0"}, "--width \"0\" is not a whole number from 1 to 131072");
  expect_refusal({"--heads", "3"},
                 "--heads 3 does not divide --width 128; the nearest that does is 2");
  expect_refusal({"--model", "nowhere.json"}, "--model \"nowhere.json\" cannot be opened");
  write("config.json", R"({"n_embd": 48, "n_layer": 1, "n_head": 3, "vocab_size": 40})");
  expect_refusal({"--model", "config.json"}, "does not say the number of positions");
  expect_refusal({"--model", "config.json", "--preset", "tiny"}, "are two models");
  expect_refusal({"--freeze", "3"}, "freeze");
  expect_refusal({"--loss-chunk", "-1"}, "--loss-chunk \"-1\" is not a whole number from 0");
  expect_refusal({"--seq", "0"}, "--seq \"0\" is not a whole number from 1");
  expect_refusal({"--vocab", "x"}, "--vocab \"x\" is not a whole number from 1");
}

TEST_F(TrainUsage, ABatchThatRanksCannotShareNamesTheNearest) {
  expect_refusal({"--batch", "7", "--ranks", "2"},
                 "--batch 7 cannot be shared by 2 ranks with 1 micro-batch each: it must be a "
                 "multiple of 2; the nearest is 6");
  expect_refusal({"--batch", "6", "--accumulate", "4"}, "the nearest is 4");
  expect_refusal({"--batch", "0"}, "--batch \"0\" holds no sequence");
  expect_refusal({"--batch", "many"}, "--batch");
  expect_refusal({"--accumulate", "0"}, "--accumulate");
}

TEST_F(TrainUsage, BatchNumbersOfAFileThatContradictAreRefused) {
  write("run.json", R"({"batch": {"total": 8, "micro_per_rank": 4, "accumulate": 1}})");
  expect_refusal({"--config", "run.json"}, "batch.micro_per_rank = 4");
}

TEST_F(TrainUsage, NoStepsAreRefused) {
  expect_refusal({"--steps", "0"}, "--steps \"0\" is not a whole number from 1");
  expect_refusal({"--verify", "0"}, "--verify \"0\" is not a whole number from 1");
}

TEST_F(TrainUsage, NumbersOutsideTheTableOfOptionsAreRefused) {
  expect_refusal({"--lr", "-1"}, "--lr");
  expect_refusal({"--clip", "x"}, "--clip");
  expect_refusal({"--seed", "-1"}, "--seed");
  expect_refusal({"--precision", "fp8"}, "fp32, bf16 or fp16");
  expect_refusal({"--set", "optim.lrr=1"}, "optim.lr");
  expect_refusal({"--set", "schedule.warmup_steps=50", "--steps", "20"}, "warmup");
}

TEST_F(TrainUsage, DataThatCannotBeTrainedOnIsRefused) {
  expect_refusal({"--data", "text:nowhere.txt", "--ranks", "2"}, "nowhere.txt");
  write("empty.txt", "");
  expect_refusal({"--data", "text:empty.txt"}, "empty.txt");
  write("short.txt", "short");
  expect_refusal({"--data", "text:short.txt"}, "short.txt");
  write("odd.bin", "abc");
  expect_refusal({"--data", "tokens:odd.bin"}, "odd.bin");
  expect_refusal({"--data", "nonsense"}, "nonsense");
  expect_refusal({"--data", "text:"}, "data: text: names no file; write text:PATH");
  expect_refusal({"--data", "demo", "--data", "random"}, "cannot be mixed");
}

TEST_F(TrainUsage, ATokenBeyondTheVocabularyIsRefusedWithItsValue) {
  std::vector<std::uint16_t> tokens(1000, 7);
  tokens[900] = 300;
  write_tokens("big.bin", tokens);
  expect_refusal({"--data", "tokens:big.bin", "--metrics", "run.jsonl"}, "300");
  write("bytes.txt", std::string(1000, 'z'));
  expect_refusal({"--data", "text:bytes.txt", "--vocab", "64"}, "122");
}

TEST_F(TrainUsage, EpochsThatCannotBeAreRefused) {
  write("a.txt", std::string(300, 'z'));
  expect_refusal({"--epochs", "2"}, "--epochs 2: demo data has no end; use --steps N, or files");
  expect_refusal({"--epochs", "2", "--steps", "3", "--data", "a.txt"}, "leave one of them out");
  expect_refusal({"--epochs", "0", "--data", "a.txt"},
                 "--epochs \"0\" is not a whole number from 1 to 1048576");
  expect_refusal({"--epochs", "1", "--data", "a.txt", "--ranks", "2"},
                 "the data has 4 sequences of 64 tokens, fewer than one batch of 8");
}

TEST_F(TrainUsage, EvaluationsThatCannotBeAreRefused) {
  expect_refusal({"--eval-every", "2"}, "--eval-every needs data to evaluate");
  expect_refusal({"--eval-batches", "2"}, "--eval-batches needs data to evaluate");
  expect_refusal({"--eval-data", "text:nowhere.txt", "--ranks", "2"}, "nowhere.txt");
  expect_refusal({"--eval-data", "demo", "--eval-every", "0"},
                 "--eval-every \"0\" is not a whole number from 1 to 1099511627776");
  expect_refusal({"--eval-data", "demo", "--eval-batches", "x"},
                 "--eval-batches \"x\" is not a whole number from 1 to 16777216");
  write("bytes.txt", std::string(1000, 'z'));
  expect_refusal({"--eval-data", "bytes.txt", "--vocab", "64", "--ranks", "2"}, "token 122");
}

TEST_F(TrainUsage, OutputsThatCannotBeWrittenAreRefused) {
  for (const char* flag : {"--metrics", "--save", "--save-init", "--trace"}) {
    expect_refusal({flag, "nowhere/file", "--ranks", "2"}, "there is no directory \"nowhere\"");
  }
  expect_refusal({"--save", "."}, "is not a file name");
  expect_refusal({"--save", "a.safetensors", "--save-init", "a.safetensors"}, "both name");
}

TEST_F(TrainUsage, WhatIsShownOfARunIsCheckedBeforeIt) {
  expect_refusal({"--log-every", "0"}, "--log-every \"0\" is not a whole number from 1");
  expect_refusal({"--peak-tflops", "0"}, "--peak-tflops \"0\" is not a number above 0");
  expect_refusal({"--peak-tflops", "inf"}, "--peak-tflops");
  write("file", "");
  expect_refusal({"--tensorboard", "file", "--ranks", "2"}, "is not a directory");
  expect_refusal({"--tensorboard", "file/runs"}, "is not a directory");
}

TEST_F(TrainUsage, WaysOfTrainingThatExcludeEachOtherAreRefused) {
  expect_refusal({"--unsharded", "--ranks", "2"}, "--unsharded trains in one process");
  expect_refusal({"--unsharded", "--verify", "2"}, "--verify");
  expect_refusal({"--verify", "2", "--verify-against", "torch"}, "expected turns or plain");
  expect_refusal({"--verify-against", "plain"}, "give --verify, too");
  expect_refusal({"--set", "comm.backend=threads"}, "comm.backend = threads");
  expect_refusal({"--device", "tpu"}, "is not cpu or cuda");
  expect_refusal({"--device", "cuda", "--ranks", "1000", "--batch", "1000"},
                 "--device cuda needs a GPU for every rank: 1000 ranks");
  expect_refusal({"--threads", "0"}, "--threads");
}

// With the arithmetic, before a rank is started or a file is made.
TEST_F(TrainUsage, AModelThatMemoryDoesNotHoldIsRefusedWithTheSum) {
  for (const char* ranks : {"1", "2"}) {
    expect_refusal({"--ranks", ranks, "--host-budget", "100KiB"}, "optimizer states");
    expect_refusal({"--ranks", ranks, "--host-budget", "100KiB"}, "--nvme DIR");
    expect_refusal({"--ranks", ranks, "--host-budget", "100KiB", "--nvme", "."},
                   "arena (unit 'blocks.0')");
  }
  expect_refusal({"--device-budget", "100KiB"}, "memory.device allows 100 KiB");
}

TEST_F(TrainUsage, TiersThatCannotBeHadAreRefused) {
  expect_refusal({"--nvme-budget", "1GiB"}, "nvme.paths is empty");
  expect_refusal({"--nvme", "nowhere", "--ranks", "2"}, "nowhere");
  expect_refusal({"--nvme", ".", "--set", "place.optimizer=nvme", "--nvme-budget", "4KiB"},
                 "Raise memory.nvme to");
  expect_refusal({"--set", "place.parameters=nvme"}, "nvme.paths is empty");
  expect_refusal({"--set", "place.optimizer=host", "--host-budget", "0"}, "memory.host = 0");
  expect_refusal({"--host-budget", "1GiB", "--unsharded"}, "--unsharded takes what memory");
  expect_refusal({"--host-budget", "much"}, "--host-budget");
}

TEST_F(TrainUsage, PlacesThatAFlagWishesAreCheckedLikeTheOptions) {
  expect_refusal({"--parameters", "nvme"}, "nvme.paths is empty");
  expect_refusal({"--optimizer", "host", "--host-budget", "0"}, "memory.host = 0");
  expect_refusal({"--optimizer", "disk"}, "--optimizer");
  expect_refusal({"--parameters", "disk"}, "auto");
  expect_refusal({"--cpu-share", "1.5"}, "--cpu-share");
  expect_refusal({"--optimizer", "host", "--unsharded"}, "--unsharded takes what memory");
}

TEST_F(TrainUsage, ADirectoryInMemoryIsNoDisk) {
  if (!std::filesystem::is_directory("/dev/shm")) {
    GTEST_SKIP() << "there is no /dev/shm";
  }
  expect_refusal({"--nvme", "/dev/shm", "--set", "place.optimizer=nvme"}, "/dev/shm");
}

TEST_F(TrainUsage, RanksInsideAnotherLaunchersRanksAreRefused) {
  expect_refusal({"--ranks", "2"}, "--ranks",
                 {{"RANK", "0"},
                  {"WORLD_SIZE", "2"},
                  {"LOCAL_RANK", "0"},
                  {"LOCAL_WORLD_SIZE", "2"},
                  {"MASTER_ADDR", "127.0.0.1"},
                  {"MASTER_PORT", "29500"}});
}

TEST_F(TrainUsage, AnUnknownFlagSuggestsTheNearest) {
  expect_refusal({"--step", "3"}, "did you mean \"--steps\"?");
}

}  // namespace
}  // namespace tessera::testing
