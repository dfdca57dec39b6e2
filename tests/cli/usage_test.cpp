// Wrong input: exactly one line on stderr, exit code 2, nothing on stdout, nothing written. With
// --ranks the line comes once, from the process that would have started them.
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

class Usage : public ProgramTest {};

TEST_F(Usage, LaunchWantsAProgramThatCanBeRun) {
  expect_refusal({"launch", "--ranks", "2"}, "no program was given");
  expect_refusal({"launch", "--ranks", "2", "./nowhere"}, "there is no program \"./nowhere\"");
  expect_refusal({"launch", "--ranks", "0", "true"}, "--ranks \"0\"");
}

TEST_F(Usage, AnUnknownCommandSuggestsTheNearest) {
  expect_refusal({}, "no command given");
  expect_refusal({"doc\ntor"}, "unknown command");
  expect_refusal({"docter"}, "did you mean \"doctor\"?");
  expect_refusal({"bench-com", "--ranks", "2"}, "did you mean \"bench-comm\"?");
  expect_refusal({"frobnicate"}, "unknown command \"frobnicate\"");
}

TEST_F(Usage, AnUnknownFlagSuggestsTheNearest) {
  expect_refusal({"doctor", "--jsn"}, "did you mean \"--json\"?");
  expect_refusal({"bench-comm", "--rank", "2"}, "did you mean \"--ranks\"?");
  expect_refusal({"bench-comm", "--round=2"}, "did you mean \"--rounds\"?");
  expect_refusal({"--versoin"}, "did you mean \"--version\"?");
  expect_refusal({"doctor", "-x"}, "unknown flag \"-x\" of doctor");
}

TEST_F(Usage, StrayArgumentsAreRefused) {
  expect_refusal({"doctor", "now"}, "unexpected argument \"now\"");
  expect_refusal({"version", "--json"}, "unknown flag \"--json\"");
  expect_refusal({"doctor", "--dir", "a\nb"}, "is not a directory");
}

TEST_F(Usage, BadNumbersOfRanksAreRefused) {
  expect_refusal({"bench-comm", "--ranks", "0"}, "--ranks \"0\" is not a whole number from 1");
  expect_refusal({"bench-comm", "--ranks", "x"}, "--ranks \"x\" is not a whole number from 1");
  expect_refusal({"bench-comm", "--ranks", "2x"}, "--ranks \"2x\"");
  expect_refusal({"bench-comm", "--ranks=-1"}, "--ranks \"-1\"");
  expect_refusal({"bench-comm", "--ranks", "99999999999999999999"}, "--ranks");
  expect_refusal({"bench-comm", "--ranks"}, "--ranks");
}

TEST_F(Usage, RanksInsideAnotherLaunchersRanksAreRefused) {
  expect_refusal({"bench-comm", "--ranks", "2", "--sizes", "4KiB"}, "--ranks", kRankOfTwo);
  expect_refusal({"train", "--ranks", "2"}, "--ranks", kRankOfTwo);
}

TEST_F(Usage, HalfARendezvousIsRefused) {
  expect_refusal({"bench-comm", "--sizes", "4KiB"}, "RANK",
                 {{"RANK", "0"}, {"MASTER_PORT", "29500"}});
}

TEST_F(Usage, BadSizesAndRoundsAreRefused) {
  expect_refusal({"bench-comm", "--sizes", "4KiB,,1MiB"}, "--sizes");
  expect_refusal({"bench-comm", "--sizes", "many"}, "\"many\" is not a size");
  expect_refusal({"bench-comm", "--sizes", "0"}, "--sizes");
  expect_refusal({"bench-comm", "--sizes", ""}, "--sizes");
  expect_refusal({"bench-comm", "--rounds", "0"}, "--rounds");
  expect_refusal({"bench-comm", "--rounds", "1.5"}, "--rounds");
}

TEST_F(Usage, BadFlagsOfBenchIoAreRefusedBeforeTheDiskIsTouched) {
  expect_refusal({"bench-io"}, "DIR");
  expect_refusal({"bench-io", ".", "--engine", "abacus"}, "--engine \"abacus\" is none of auto");
  expect_refusal({"bench-io", ".", "--seconds", "0"}, "--seconds");
  expect_refusal({"bench-io", ".", "--seconds", "soon"}, "--seconds \"soon\" is not a time");
  expect_refusal({"bench-io", ".", "--bytes", "1MiB"},
                 "is not a size from 16MiB to 9223372036854775807B");
  expect_refusal({"bench-io", ".", "--bytes", "1000TiB"}, "more than half of the");
}

TEST_F(Usage, WhatCannotBeDoneIsRefusedBeforeTheWork) {
  expect_refusal({"bench-comm", "--backend", "carrier-pigeon"}, "carrier-pigeon");
  expect_refusal({"bench-comm", "--backend", "nccl", "--ranks", "1000"},
                 "backend nccl needs a GPU for every rank: 1000 ranks");
  expect_refusal({"bench-comm", "--json", "nowhere/rates.json"}, "there is no directory");
  expect_refusal({"bench-comm", "--json", "."}, "is not a file name");
  expect_refusal({"doctor", "--dir", "nowhere"}, "\"nowhere\" is not a directory");
  expect_refusal({"bench-io", "nowhere"}, "\"nowhere\" is not a directory");
}

// What can be wrong in one is in tests/core/config_test.cpp.
TEST_F(Usage, WrongConfigsAndSettingsAreRefused) {
  expect_refusal({"config"}, "FILE");
  expect_refusal({"config", "nowhere.json"}, "nowhere.json");
  expect_refusal({"config", "."}, "");
  write("malformed.json", "{\"seed\": 1,,}");
  expect_refusal({"config", "malformed.json"}, "malformed.json");
  write("key.json", "{\"comm\": {\"timeuot_s\": 5}}");
  expect_refusal({"config", "key.json"}, "timeout_s");
  expect_refusal({"bench-comm", "--set", "comm.timeuot_s=5"}, "comm.timeout_s");
  expect_refusal({"bench-comm", "--set", "=5"}, "--set");
  expect_refusal({"bench-comm", "--config", "nowhere.json"}, "nowhere.json");
  expect_refusal({"train", "--set", "optim.master_dtype=bf16"}, "master weights and moments");
}

class InspectUsage : public ProgramTest {};

TEST_F(InspectUsage, WrongInputIsRefused) {
  const auto refuse = [this](const Arguments& flags, const std::string& part) {
    expect_refusal(joined({"inspect"}, flags), part);
  };
  refuse({"--preset", "tinny"}, "tiny");
  refuse({"--ranks", "0"}, "--ranks \"0\" is not a whole number from 1");
  refuse({"--layers", "0"}, "layers");
  refuse({"--set", "live.limit_byte=1"}, "live.limit_bytes");
  refuse({"--device", "tpu"}, "is not cpu or cuda");
  refuse({"--jsn"}, "did you mean \"--json\"?");
  refuse({"now"}, "unexpected argument \"now\"");
  refuse({"--accumulate", "1000000"}, "take fewer micro-batches");
  refuse({"--set", "unit.dynamic_names=blocks.*"}, "unit.dynamic_names is set");
}

class PlotUsage : public ProgramTest {};

TEST_F(PlotUsage, FilesThatAreNoMetricsAreRefused) {
  write("run.jsonl", "{\"step\": 1}\n");
  write("prose.txt", "no metrics\n");
  expect_refusal({"plot", "run.jsonl", "nowhere.jsonl"}, "cannot open \"nowhere.jsonl\"");
  expect_refusal({"plot", "."}, "is a directory");
  expect_refusal({"plot", "prose.txt"}, "has no line that describes a step");
  expect_refusal({"plot", "run.jsonl", "run.jsonl"}, "named twice");
  expect_refusal({"plot", "run.jsonl", "--out", "run.jsonl"}, "is one of the files to read");
  expect_refusal({"plot", "run.jsonl", "--out", "nowhere/page.html"}, "there is no directory");
  expect_refusal({"plot"}, "FILES");
}

class TrainUsage : public ProgramTest {
 protected:
  void expect_refusal(const Arguments& flags, const std::string& part) const {
    ProgramTest::expect_refusal(joined({"train"}, flags), part);
  }
};

TEST_F(TrainUsage, FlagsThatSayNothingUsefulAreRefused) {
  expect_refusal({"--preset", "tinny", "--ranks", "2"}, "tiny");
  expect_refusal({"--step", "3"}, "did you mean \"--steps\"?");
  expect_refusal({"--steps", "0"}, "--steps \"0\" is not a whole number from 1");
  expect_refusal({"--verify", "0"}, "--verify \"0\" is not a whole number from 1");
  expect_refusal({"--batch", "7", "--ranks", "2"},
                 "--batch 7 cannot be shared by 2 ranks with 1 micro-batch each: it must be a "
                 "multiple of 2; the nearest is 6");
  expect_refusal({"--batch", "0"}, "--batch \"0\" holds no sequence");
  expect_refusal({"--accumulate", "0"}, "--accumulate");
  expect_refusal({"--lr", "-1"}, "--lr");
  expect_refusal({"--precision", "fp8"}, "fp32, bf16 or fp16");
  expect_refusal({"--warmup", "50", "--steps", "20"},
                 "schedule.warmup_steps = 50 (--warmup) is more than the 20 steps of the run");
  expect_refusal({"--schedule", "cosin"}, "did you mean cosine?");
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
  std::string tokens;  // 16-bit, little-endian
  for (int i = 0; i < 1000; ++i) {
    tokens += i == 900 ? std::string("\x2c\x01", 2) : std::string("\x07\x00", 2);
  }
  write("big.bin", tokens);
  expect_refusal({"--data", "tokens:big.bin", "--metrics", "run.jsonl"}, "300");
  write("bytes.txt", std::string(1000, 'z'));
  expect_refusal({"--data", "text:bytes.txt", "--vocab", "64"}, "122");
}

TEST_F(TrainUsage, EpochsAndEvaluationsThatCannotBeAreRefused) {
  write("a.txt", std::string(300, 'z'));
  expect_refusal({"--epochs", "2"}, "--epochs 2: demo data has no end; use --steps N, or files");
  expect_refusal({"--epochs", "2", "--steps", "3", "--data", "a.txt"}, "leave one of them out");
  expect_refusal({"--epochs", "0", "--data", "a.txt"},
                 "--epochs \"0\" is not a whole number from 1 to 1048576");
  expect_refusal({"--epochs", "1", "--data", "a.txt", "--ranks", "2"},
                 "the data has 4 sequences of 64 tokens, fewer than one batch of 8");

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

TEST_F(TrainUsage, OutputsThatCannotBeWrittenAreRefusedBeforeTheRun) {
  for (const char* flag : {"--metrics", "--save", "--save-init", "--trace"}) {
    expect_refusal({flag, "nowhere/file", "--ranks", "2"}, "there is no directory \"nowhere\"");
  }
  expect_refusal({"--save", "."}, "is not a file name");
  expect_refusal({"--save", "a.safetensors", "--save-init", "a.safetensors"}, "both name");
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
  expect_refusal({"--set", "comm.backend=threads"}, "expected auto, shm, ipc, gloo or nccl");
  expect_refusal({"--device", "tpu"}, "is not cpu or cuda");
  expect_refusal(
      {"--device", "cuda", "--ranks", "1000", "--batch", "1000", "--set", "comm.backend=nccl"},
      "--device cuda needs a GPU for every rank: 1000 ranks");
  expect_refusal({"--threads", "0"}, "--threads");
}

TEST_F(TrainUsage, ShardGroupsThatRanksCannotHaveAreRefusedWithThoseThatTheyCan) {
  expect_refusal({"--ranks", "4", "--shard-size", "3"},
                 "shard.group_size = 3 (--shard-size) does not divide the 4 ranks; possible shard "
                 "sizes: 1, 2, 4");
  expect_refusal({"--ranks", "4", "--shard-size", "2", "--ranks-per-host", "2", "--hierarchical"},
                 "lies inside one of 2 ranks (comm.ranks_per_host, --ranks-per-host); possible "
                 "shard sizes: 4");
  expect_refusal({"--ranks", "4", "--hierarchical"}, "needs several hosts");
  expect_refusal({"--ranks", "4", "--quantize-gradients=5"}, "quantised to 4 or 8 bits");
  expect_refusal({"--ranks", "4", "--quantize-gradients", "--set", "quant.block_numel=96"},
                 "does not divide 4096");
  expect_refusal({"--ranks", "4", "--set", "comm.ranks_per_host=3"}, "does not divide the 4 ranks");
  expect_refusal({"--ranks", "4", "--shard-size", "x"}, "--shard-size");
}

TEST_F(TrainUsage, FlagsOfCheckpointsThatSayNothingUsefulAreRefused) {
  for (const Arguments& flags :
       std::vector<Arguments>{{"--save-every", "2"}, {"--keep", "2"}, {"--resume"}}) {
    expect_refusal(flags, flags[0] + " is nothing without --checkpoint DIR");
  }
  const Arguments to{"--checkpoint", "run"};
  const auto refuse = [&](const Arguments& flags, const std::string& part) {
    expect_refusal(joined(to, flags), part);
  };
  refuse({"--partial"}, "--partial is nothing without --resume");
  refuse({"--save-async"}, "--save-async is nothing without --save-every N");
  refuse({"--save-every", "1", "--save-memory", "1GiB"}, "is nothing without --save-async");
  refuse({"--save-every", "0"}, "--save-every \"0\" is not a whole number from 1");
  refuse({"--keep", "0", "--ranks", "2"}, "--keep \"0\" is not a whole number from 1");
  refuse({"--save-every", "1", "--save-async", "--save-memory", "much"},
         "--save-memory \"much\" is not a size");
  refuse({"--verify", "2"},
         "--verify compares a whole run with unsharded training; leave "
         "--checkpoint out");
  refuse({"--unsharded"}, "--unsharded shards nothing");
  expect_refusal({"--verify", "2", "--stop-after", "1h"}, "leave --stop-after out");
  expect_refusal({"--stop-after", "0s"}, "--stop-after \"0s\" is not a time above 0");
  expect_refusal({"--stop-after", "soon"}, "--stop-after \"soon\" is not a time above 0");
  expect_refusal({"--init", "nowhere", "--ranks", "2"}, "nowhere");
  write("file", "");
  expect_refusal({"--checkpoint", "file/run", "--ranks", "2"}, "is not a directory");
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

TEST_F(TrainUsage, AModelThatNoMachineHoldsIsRefusedWithTheSumAlsoWithoutABudget) {
  const Arguments huge{"--width", "32768", "--heads", "128", "--layers", "64", "--batch", "3"};
  for (const std::string ranks : {"1", "3"}) {
    const Arguments run = joined(huge, {"--ranks", ranks});
    expect_refusal(run, "the model does not fit: one of " + ranks + " rank");
    expect_refusal(run, ranks == "1" ? "6.00 TiB optimizer states; this machine has "
                                     : "2.00 TiB optimizer states + ");
    expect_refusal(run, ranks == "1" ? "left for it." : "left for each of 3 ranks.");
  }
}

TEST_F(TrainUsage, TiersThatCannotBeHadAreRefused) {
  expect_refusal({"--nvme-budget", "1GiB"}, "nvme.paths is empty");
  expect_refusal({"--nvme", "nowhere", "--ranks", "2"}, "nowhere");
  expect_refusal({"--nvme", ".", "--set", "place.optimizer=nvme", "--nvme-budget", "4KiB"},
                 "Raise memory.nvme to");
  expect_refusal({"--host-budget", "1GiB", "--unsharded"}, "--unsharded takes what memory");
  expect_refusal({"--host-budget", "much"}, "--host-budget");
  expect_refusal({"--parameters", "nvme"}, "nvme.paths is empty");
  expect_refusal({"--optimizer", "host", "--host-budget", "0"}, "memory.host = 0");
  expect_refusal({"--parameters", "disk"}, "auto");
  expect_refusal({"--cpu-share", "1.5"}, "--cpu-share");
}

TEST_F(TrainUsage, ADirectoryInMemoryIsNoDisk) {
  if (!std::filesystem::is_directory("/dev/shm")) {
    GTEST_SKIP() << "there is no /dev/shm";
  }
  expect_refusal({"--nvme", "/dev/shm", "--set", "place.optimizer=nvme"}, "/dev/shm");
}

}  // namespace
}  // namespace tessera::testing
