#include "cli/doctor_report.h"

#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

ProbeResult gloo(ProbeState state) {
  return {"Gloo", state, "2 ranks on loopback", state == ProbeState::kOk ? "" : "no ranks", true};
}

TEST(DoctorReport, TrainingNeedsWhatIsRequiredAndNothingElse) {
  const ProbeResult no_cuda{"CUDA", ProbeState::kMissing, "none", "slower", false};
  EXPECT_TRUE(can_train(std::vector<ProbeResult>{no_cuda, gloo(ProbeState::kOk)}));
  EXPECT_TRUE(can_train(std::vector<ProbeResult>{gloo(ProbeState::kLimited)}));
  EXPECT_FALSE(can_train(std::vector<ProbeResult>{no_cuda, gloo(ProbeState::kMissing)}));
}

TEST(DoctorReport, NamesWhatTrainingNeeds) {
  const std::string screen = doctor_screen(std::vector<ProbeResult>{gloo(ProbeState::kMissing)});
  EXPECT_HAS(screen, "Training cannot run: it needs Gloo.");
  EXPECT_HAS(screen, "-> no ranks");
}

TEST(DoctorReport, FitsEightyColumnsWhateverWasFound) {
  const std::vector<ProbeResult> results{
      {"torch", ProbeState::kLimited, std::string(200, 'x'), std::string(300, 'y'), false},
      {"cores", ProbeState::kMissing, "two\nlines", "words and words " + std::string(90, 'z'),
       false}};
  std::istringstream lines(doctor_screen(results));
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), 80U) << line;
  }
}

TEST(DoctorReport, SaysWhenNothingIsMissing) {
  const std::string screen = doctor_screen(std::vector<ProbeResult>{gloo(ProbeState::kOk)});
  EXPECT_HAS(screen, "nothing is missing");
}

TEST(DoctorReport, JsonSurvivesPathsThatAreNotUtf8) {
  const std::string json = doctor_json(
      std::vector<ProbeResult>{{"directory", ProbeState::kOk, "/tmp/\xff\xfe", "", false}});
  EXPECT_HAS(json, "\"can_train\": true");
}

}  // namespace
}  // namespace tessera::cli
