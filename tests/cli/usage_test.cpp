// Wrong input: exactly one line on stderr, exit code 2, nothing on stdout, nothing written.
#include <algorithm>
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

using Arguments = std::vector<std::string>;

class Usage : public Refusal {};

TEST_F(Usage, NoCommandIsRefused) { expect_refusal({}, "no command given"); }

TEST_F(Usage, LaunchWantsAProgramThatCanBeRun) {
  expect_refusal({"launch", "--ranks", "2"}, "no program was given");
  expect_refusal({"launch", "--ranks", "2", "./nowhere"}, "there is no program \"./nowhere\"");
  expect_refusal({"launch", "--ranks", "0", "true"}, "--ranks \"0\"");
}

TEST_F(Usage, AnUnknownCommandSuggestsTheNearest) {
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
  expect_refusal({"doctor", "doctor"}, "unexpected argument");
  expect_refusal({"version", "--json"}, "unknown flag \"--json\"");
}

TEST_F(Usage, ControlCharactersDoNotBreakTheLine) {
  expect_refusal({"doc\ntor"}, "unknown command");
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
  const std::map<std::string, std::string> torchrun{{"RANK", "0"},
                                                    {"WORLD_SIZE", "2"},
                                                    {"LOCAL_RANK", "0"},
                                                    {"LOCAL_WORLD_SIZE", "2"},
                                                    {"MASTER_ADDR", "127.0.0.1"},
                                                    {"MASTER_PORT", "29500"}};
  expect_refusal({"bench-comm", "--ranks", "2", "--sizes", "4KiB"}, "--ranks", torchrun);
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

TEST_F(Usage, AnUnknownBackendIsRefused) {
  expect_refusal({"bench-comm", "--backend", "carrier-pigeon"}, "carrier-pigeon");
}

TEST_F(Usage, MoreNcclRanksThanGpusAreRefusedBeforeTheyStart) {
  expect_refusal({"bench-comm", "--backend", "nccl", "--ranks", "1000"},
                 "backend nccl needs a GPU for every rank: 1000 ranks");
}

TEST_F(Usage, AResultFileThatCannotBeWrittenIsRefusedBeforeTheWork) {
  expect_refusal({"bench-comm", "--json", "nowhere/rates.json"}, "there is no directory");
  expect_refusal({"bench-comm", "--json", "."}, "is not a file name");
}

TEST_F(Usage, ADirectoryThatDoesNotExistIsRefused) {
  expect_refusal({"doctor", "--dir", "nowhere"}, "\"nowhere\" is not a directory");
  expect_refusal({"bench-io", "nowhere"}, "\"nowhere\" is not a directory");
}

TEST_F(Usage, ConfigsThatCannotBeReadAreRefused) {
  expect_refusal({"config"}, "FILE");
  expect_refusal({"config", "nowhere.json"}, "nowhere.json");
  expect_refusal({"config", "."}, "");
  write("empty.json", "");
  expect_refusal({"config", "empty.json"}, "empty.json");
  write("malformed.json", "{\"seed\": 1,,}");
  expect_refusal({"config", "malformed.json"}, "malformed.json");
  write("list.json", "[1, 2]");
  expect_refusal({"config", "list.json"}, "list.json");
}

TEST_F(Usage, ConfigsThatSayNonsenseAreRefused) {
  write("key.json", "{\"comm\": {\"timeuot_s\": 5}}");
  expect_refusal({"config", "key.json"}, "timeout_s");
  write("type.json", "{\"seed\": \"many\"}");
  expect_refusal({"config", "type.json"}, "seed");
  write("range.json", "{\"comm\": {\"timeout_s\": -5}}");
  expect_refusal({"config", "range.json"}, "timeout_s");
  write("twice.json", "{\"seed\": 1, \"seed\": 2}");
  expect_refusal({"config", "twice.json"}, "seed");
}

TEST_F(Usage, BadSettingsAreRefused) {
  expect_refusal({"bench-comm", "--set", "comm.timeuot_s=5"}, "comm.timeout_s");
  expect_refusal({"bench-comm", "--set", "comm.timeout_s=soon"}, "comm.timeout_s");
  expect_refusal({"bench-comm", "--set", "comm.timeout_s"}, "comm.timeout_s");
  expect_refusal({"bench-comm", "--set", "=5"}, "--set");
  expect_refusal({"bench-comm", "--config", "nowhere.json"}, "nowhere.json");
}

}  // namespace
}  // namespace tessera::testing
