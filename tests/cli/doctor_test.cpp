// `tessera doctor`: probes on machines that are laid out for them, so that every state is seen on
// any machine, and what is said of the results.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "cli/low_precision.h"
#include "cli/probe.h"
#include "cli/train_warnings.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera::cli {
namespace {

using testing::TemporaryDirectory;

void write(const std::filesystem::path& file, const std::string& text) {
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << text;
}

std::size_t num_entries(const std::filesystem::path& directory) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(directory),
                                                std::filesystem::directory_iterator()));
}

int a_descriptor() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

TEST(UringProbe, IsOkWhereARingCanBeSetUpAndGivesTheDescriptorBack) {
  const int fd = a_descriptor();
  const ProbeResult result = probe_io_uring([fd] { return fd; }, "/");
  EXPECT_EQ(result.state, ProbeState::kOk);
  EXPECT_EQ(result.cost, "");
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
}

TEST(UringProbe, TellsAnOldKernelFromARefusalAndNamesTheSysctlThatForbidsIt) {
  const TemporaryDirectory root;
  const ProbeResult old_kernel = probe_io_uring([] { return -ENOSYS; }, root.path());
  EXPECT_EQ(old_kernel.state, ProbeState::kMissing);
  EXPECT_HAS(old_kernel.found, "ENOSYS");
  const ProbeResult refused = probe_io_uring([] { return -EPERM; }, root.path());
  EXPECT_EQ(refused.state, ProbeState::kMissing);
  EXPECT_HAS(refused.found, "seccomp");
  write(root.path() / "proc/sys/kernel/io_uring_disabled", "2\n");
  const ProbeResult forbidden = probe_io_uring([] { return -EPERM; }, root.path());
  EXPECT_HAS(forbidden.found, "kernel.io_uring_disabled=2");
  EXPECT_HAS(forbidden.cost, "sysctl");
}

TEST(DirectIoProbe, IsMissingWhereTheFlagIsRefusedAndLeavesNothingBehind) {
  const TemporaryDirectory directory;
  probe_direct_io(directory.path(), open_direct);
  EXPECT_EQ(num_entries(directory.path()), 0U);
  const ProbeResult result =
      probe_direct_io(directory.path(), [](const std::filesystem::path& file) {
        std::ofstream(file) << "made before the refusal";
        return -EINVAL;
      });
  EXPECT_EQ(result.state, ProbeState::kMissing);
  EXPECT_HAS(result.found, "Invalid argument");
  EXPECT_HAS(result.cost, "page cache");
  EXPECT_EQ(num_entries(directory.path()), 0U);
}

TEST(DirectIoProbe, IsMissingWhereThePageCannotBeWritten) {
  const TemporaryDirectory directory;
  const ProbeResult result = probe_direct_io(
      directory.path(), [](const std::filesystem::path&) { return a_descriptor(); });
  EXPECT_EQ(result.state, ProbeState::kMissing);
  EXPECT_HAS(result.found, "write: ");
}

TEST(DirectIoProbe, SaysThatTmpfsIsMemory) {
  if (!std::filesystem::is_directory("/dev/shm") || ::access("/dev/shm", W_OK) != 0) {
    GTEST_SKIP() << "there is no writable tmpfs at /dev/shm";
  }
  const ProbeResult result = probe_direct_io("/dev/shm", open_direct);
  EXPECT_NE(result.state, ProbeState::kOk);
  EXPECT_HAS(result.found, "tmpfs");
}

TEST(DirectoryProbe, NamesFileSystemAndFreeSpace) {
  const TemporaryDirectory directory;
  const ProbeResult result = probe_directory(directory.path());
  EXPECT_HAS(result.found, directory.path().filename().string());
  EXPECT_HAS(result.found, "free");
  const ProbeResult none = probe_directory(directory.path() / "nowhere");
  EXPECT_EQ(none.state, ProbeState::kMissing);
  EXPECT_HAS(none.found, "No such file");
}

TEST(LockedMemoryProbe, IsLimitedBelowOneGiB) {
  EXPECT_EQ(probe_locked_memory(std::nullopt).state, ProbeState::kOk);
  EXPECT_EQ(probe_locked_memory(std::size_t{4} << 30).state, ProbeState::kOk);
  const ProbeResult limited = probe_locked_memory(std::size_t{8} << 20);
  EXPECT_EQ(limited.state, ProbeState::kLimited);
  EXPECT_HAS(limited.found, "8");
  EXPECT_HAS(limited.cost, "ulimit -l");
}

TEST(OpenFilesProbe, ProposesNoMoreThanTheHardLimit) {
  EXPECT_EQ(probe_open_files({1024, 4096}).state, ProbeState::kOk);
  const ProbeResult limited = probe_open_files({256, 512});
  EXPECT_EQ(limited.state, ProbeState::kLimited);
  EXPECT_HAS(limited.cost, "ulimit -n 512");
}

TEST(MemoryProbe, IsLimitedByACgroupAndSaysWhenItKnowsNothing) {
  const TemporaryDirectory root;
  EXPECT_HAS(probe_memory(root.path()).found, "unknown");
  write(root.path() / "proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n");
  EXPECT_EQ(probe_memory(root.path()).state, ProbeState::kOk);
  write(root.path() / "proc/self/cgroup", "0::/box\n");
  write(root.path() / "sys/fs/cgroup/cgroup.controllers", "memory cpu\n");
  write(root.path() / "sys/fs/cgroup/box/memory.max", "1073741824\n");
  write(root.path() / "sys/fs/cgroup/box/memory.current", "0\n");
  const ProbeResult limited = probe_memory(root.path());
  EXPECT_EQ(limited.state, ProbeState::kLimited);
  EXPECT_HAS(limited.found, "cgroup limit");
  EXPECT_HAS(limited.cost, "memory.max");
}

TEST(CoresProbe, ComparesWithTheMachine) {
  const TemporaryDirectory root;
  for (int core = 0; core < 4096; core += 64) {
    std::filesystem::create_directories(root.path() / "sys/devices/system/cpu" /
                                        ("cpu" + std::to_string(core)));
  }
  // Not cores, although they begin like ones.
  std::filesystem::create_directories(root.path() / "sys/devices/system/cpu/cpufreq");
  std::filesystem::create_directories(root.path() / "sys/devices/system/cpu/cpuidle");
  const ProbeResult result = probe_cores(root.path());
  EXPECT_HAS(result.found, " usable of ");
  if (std::stoi(result.found) < 64) {
    EXPECT_EQ(result.state, ProbeState::kLimited);
    EXPECT_HAS(result.found, " of 64");
  }
}

TEST(CoresProbe, IsLimitedByAQuota) {
  const TemporaryDirectory root;
  std::filesystem::create_directories(root.path() / "sys/devices/system/cpu/cpu0");
  std::filesystem::create_directories(root.path() / "sys/devices/system/cpu/cpu1");
  write(root.path() / "proc/self/cgroup", "0::/box\n");
  write(root.path() / "sys/fs/cgroup/cgroup.controllers", "memory cpu\n");
  write(root.path() / "sys/fs/cgroup/box/cpu.max", "50000 100000\n");
  const ProbeResult result = probe_cores(root.path());
  EXPECT_EQ(result.state, ProbeState::kLimited);
  EXPECT_HAS(result.found, "1 usable of 2");
  EXPECT_HAS(result.found, "quota 0.5");
}

TEST(HugePagesProbe, ReadsTheModeInBrackets) {
  const TemporaryDirectory root;
  const std::filesystem::path file = root.path() / "sys/kernel/mm/transparent_hugepage/enabled";
  EXPECT_EQ(probe_huge_pages(root.path()).state, ProbeState::kMissing);
  write(file, "always [madvise] never\n");
  EXPECT_EQ(probe_huge_pages(root.path()).state, ProbeState::kOk);
  EXPECT_HAS(probe_huge_pages(root.path()).found, "madvise");
  write(file, "always madvise [never]\n");
  EXPECT_EQ(probe_huge_pages(root.path()).state, ProbeState::kLimited);
}

TEST(NumaProbe, CountsNodes) {
  const TemporaryDirectory root;
  EXPECT_EQ(probe_numa(root.path()).state, ProbeState::kOk);
  std::filesystem::create_directories(root.path() / "sys/devices/system/node/node0");
  std::filesystem::create_directories(root.path() / "sys/devices/system/node/node1");
  const ProbeResult result = probe_numa(root.path());
  EXPECT_EQ(result.state, ProbeState::kLimited);
  EXPECT_HAS(result.found, "2 nodes");
}

class CpuProbe : public ::testing::Test {
 protected:
  const std::filesystem::path& with(const std::string& cpuinfo) {
    std::filesystem::create_directory(root_.path() / "proc");
    std::ofstream(root_.path() / "proc/cpuinfo") << cpuinfo;
    return root_.path();
  }

  testing::TemporaryDirectory root_;
};

TEST_F(CpuProbe, WithBf16UnitsIsNotWarnedAbout) {
  for (const std::string line :
       {"flags\t\t: fpu avx512f avx512_bf16 amx_bf16", "Features\t: fp asimd i8mm bf16"}) {
    const auto& root = with("processor\t: 0\n" + line + "\n\nprocessor\t: 1\n");
    const LowPrecisionUnits units = read_low_precision_units(root);
    EXPECT_EQ(slow_precision_text(units, DType::kBFloat16), "");
    EXPECT_NE(slow_precision_text(units, DType::kFloat16), "");
    EXPECT_EQ(probe_low_precision(root).state, ProbeState::kOk);
  }
}

TEST_F(CpuProbe, WithoutThemIs) {
  // A flag that only begins like one is none.
  const auto& root = with("flags : fpu avx512f avx512bw bf16_not\n");
  const LowPrecisionUnits units = read_low_precision_units(root);
  EXPECT_TRUE(units.is_known);
  EXPECT_HAS(slow_precision_text(units, DType::kBFloat16), "no bf16 units");
  EXPECT_EQ(slow_precision_text(units, DType::kFloat32), "");
  const ProbeResult probe = probe_low_precision(root);
  EXPECT_EQ(probe.state, ProbeState::kLimited);
  EXPECT_HAS(probe.cost, "--precision fp32");
  EXPECT_FALSE(probe.required);
}

TEST_F(CpuProbe, ThatTellsNothingIsNotWarnedAbout) {
  const LowPrecisionUnits units = read_low_precision_units(root_.path());
  EXPECT_FALSE(units.is_known);
  EXPECT_EQ(slow_precision_text(units, DType::kBFloat16), "");
  EXPECT_HAS(probe_low_precision(root_.path()).found, "unknown");
}

TEST(TorchWarning, IsCutWhereItsStackTraceBegins) {
  EXPECT_EQ(first_sentence("mkldnn_bf16_gemm failed, switching to BLAS gemm: could not create a "
                           "primitive\nException raised from execute at ideep.hpp:40 (most recent "
                           "call first):\nframe #0: c10::Error::Error\nframe #1: ...\n"),
            "mkldnn_bf16_gemm failed, switching to BLAS gemm: could not create a primitive");
  EXPECT_EQ(first_sentence("two\nlines\n"), "two lines");
  EXPECT_EQ(first_sentence(""), "");
}

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
  EXPECT_HAS(doctor_screen(std::vector<ProbeResult>{gloo(ProbeState::kOk)}), "nothing is missing");
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

TEST(DoctorReport, JsonSurvivesPathsThatAreNotUtf8) {
  const std::string json = doctor_json(
      std::vector<ProbeResult>{{"directory", ProbeState::kOk, "/tmp/\xff\xfe", "", false}});
  EXPECT_HAS(json, "\"can_train\": true");
}

}  // namespace
}  // namespace tessera::cli
