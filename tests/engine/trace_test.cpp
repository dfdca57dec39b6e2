// A program of one's own gets the trace that its config asks for, also when it fails.
#include <filesystem>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

#include "tests/engine/engine_fixture.h"
#include "tests/support/read_whole.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

Config traced_config(const std::filesystem::path& path) {
  Config config = quiet_config();
  config.set("trace.path", path.string());
  return config;
}

void train_one_step(Engine& engine) {
  auto unit = engine.unit("unit", affine(5, 6, 1));
  train_step(engine, unit(input(4, 5, 0)).sum());
}

TEST(FileOfRank, PutsTheRankBeforeTheEnding) {
  EXPECT_EQ(file_of_rank("a/run.json", 0), "a/run.json");
  EXPECT_EQ(file_of_rank("a/run.json", 2), "a/run.rank2.json");
  EXPECT_EQ(file_of_rank("run", 1), "run.rank1");
}

TEST(Trace, IsWrittenByEveryRankWhenItsRuntimeEnds) {
  const TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "run.json";
  with_engines(2, traced_config(path),
               [](Engine& engine, comm::Group&) { train_one_step(engine); });
  for (const auto& file : {path, directory.path() / "run.rank1.json"}) {
    const std::string text = read_whole(file);
    EXPECT_NE(text.find("\"forward\""), std::string::npos) << file;
    EXPECT_NE(text.find("\"optimizer step\""), std::string::npos) << file;
  }
}

TEST(Trace, OfARunThatFailsIsWritten) {
  const TemporaryDirectory directory;
  const std::filesystem::path path = directory.path() / "run.json";
  EXPECT_THROW(with_engines(1, traced_config(path),
                            [](Engine& engine, comm::Group&) {
                              train_one_step(engine);
                              throw std::runtime_error("the program failed");
                            }),
               std::runtime_error);
  EXPECT_NE(read_whole(path).find("\"optimizer step\""), std::string::npos);
}

TEST(Trace, ThatCannotBeWrittenIsAWarning) {
  Config config = traced_config("/nowhere/run.json");
  config.set("log.level", std::string("warn"));
  ::testing::internal::CaptureStderr();
  with_engines(1, config, [](Engine& engine, comm::Group&) { train_one_step(engine); });
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("the trace is lost"), std::string::npos);
}

}  // namespace
}  // namespace tessera::testing
