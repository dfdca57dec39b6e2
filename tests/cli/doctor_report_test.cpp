#include "cli/doctor_report.h"

#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

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
  EXPECT_NE(screen.find("Training cannot run: it needs Gloo."), std::string::npos) << screen;
  EXPECT_NE(screen.find("-> no ranks"), std::string::npos) << screen;
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
  EXPECT_NE(screen.find("nothing is missing"), std::string::npos) << screen;
}

TEST(DoctorReport, JsonSurvivesPathsThatAreNotUtf8) {
  const std::string json = doctor_json(
      std::vector<ProbeResult>{{"directory", ProbeState::kOk, "/tmp/\xff\xfe", "", false}});
  EXPECT_NE(json.find("\"can_train\": true"), std::string::npos) << json;
}

}  // namespace
}  // namespace tessera::cli
