#include "tessera/device/host_info.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "tests/support/temporary_directory.h"

namespace tessera::device {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kGib = std::size_t{1} << 30;

// A machine laid out in a folder: 64 GiB, 40 of them available.
class HostInfo : public ::testing::Test {
 protected:
  void SetUp() override {
    write("proc/meminfo",
          "MemTotal:       67108864 kB\nMemFree:        1048576 kB\nMemAvailable:   41943040 kB\n");
  }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  const testing::TemporaryDirectory directory_;
  const fs::path root_ = directory_.path();
};

TEST_F(HostInfo, WithoutCgroupsIsTheMachine) {
  const HostMemoryInfo info = read_host_memory(root_);
  EXPECT_EQ(info.total_bytes(), 64 * kGib);
  EXPECT_EQ(info.available_bytes(), 40 * kGib);
  EXPECT_FALSE(info.cgroup_limit_bytes.has_value());
  EXPECT_FALSE(read_host_cores(root_).cgroup_quota.has_value());
}

TEST_F(HostInfo, FallsBackToFreeMemoryOnOldKernels) {
  write("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1048576 kB\n");
  EXPECT_EQ(read_host_memory(root_).available_bytes(), kGib);
}

TEST_F(HostInfo, ContainersWithALimitAreHostsOfTheirOwn) {
  write("proc/sys/kernel/random/boot_id", "3f2a-77\n");
  fs::create_directories(root_ / "proc/self/ns");
  fs::create_symlink("cgroup:[12]", root_ / "proc/self/ns/cgroup");
  EXPECT_EQ(read_host_id(root_), "3f2a-77") << "they share the machine's memory";
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", std::to_string(8 * kGib) + "\n");
  EXPECT_EQ(read_host_id(root_), "3f2a-77 cgroup:[12]");
  EXPECT_EQ(read_host_id(root_ / "nowhere"), "");
}

TEST_F(HostInfo, OfAMachineThatCannotBeReadIsZeroNotAnError) {
  const HostMemoryInfo info = read_host_memory(root_ / "nowhere");
  EXPECT_EQ(info.total_bytes(), 0U);
  EXPECT_EQ(info.available_bytes(), 0U);
}

TEST_F(HostInfo, TakesTheLimitOfACgroupVersion2) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", std::to_string(8 * kGib) + "\n");
  write("sys/fs/cgroup/job/memory.current", std::to_string(3 * kGib) + "\n");
  write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file " + std::to_string(kGib) +
                                             "\nactive_file " + std::to_string(kGib / 2) + "\n");
  const HostMemoryInfo info = read_host_memory(root_);
  EXPECT_EQ(info.total_bytes(), 8 * kGib);
  // Page cache, which the kernel drops first, is not held: 8 - (3 - 1 - 1/2).
  EXPECT_EQ(info.available_bytes(), 6 * kGib + kGib / 2);
}

TEST_F(HostInfo, TakesTheTightestLimitAmongAncestors) {
  write("proc/self/cgroup", "0::/pod/job\n");
  write("sys/fs/cgroup/pod/job/memory.max", "max\n");
  write("sys/fs/cgroup/pod/memory.max", std::to_string(16 * kGib) + "\n");
  write("sys/fs/cgroup/pod/memory.current", std::to_string(15 * kGib) + "\n");
  write("sys/fs/cgroup/pod/job/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
  const HostMemoryInfo info = read_host_memory(root_);
  EXPECT_EQ(info.total_bytes(), 16 * kGib);
  EXPECT_EQ(info.available_bytes(), kGib);
  EXPECT_DOUBLE_EQ(read_host_cores(root_).cgroup_quota.value_or(0), 1.5);
}

TEST_F(HostInfo, FindsTheLimitWhenThePathIsTheHostsAndTheMountItsOwn) {
  write("proc/self/cgroup", "0::/host/only/path\n");
  write("sys/fs/cgroup/memory.max", std::to_string(4 * kGib) + "\n");
  EXPECT_EQ(read_host_memory(root_).total_bytes(), 4 * kGib);
}

TEST_F(HostInfo, TakesTheLimitOfACgroupVersion1) {
  write("proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", std::to_string(2 * kGib) + "\n");
  write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", std::to_string(kGib) + "\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "200000\n");
  write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  const HostMemoryInfo info = read_host_memory(root_);
  EXPECT_EQ(info.total_bytes(), 2 * kGib);
  EXPECT_EQ(info.available_bytes(), kGib);
  EXPECT_DOUBLE_EQ(read_host_cores(root_).cgroup_quota.value_or(0), 2.0);
}

TEST_F(HostInfo, ReadsNoLimitAsNoLimit) {
  write("proc/self/cgroup", "4:memory:/\n0::/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory.max", "max\n");
  EXPECT_FALSE(read_host_memory(root_).cgroup_limit_bytes.has_value());
}

TEST_F(HostInfo, HasNothingAvailableBeyondTheLimit) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "1000\n");
  write("sys/fs/cgroup/memory.current", "1500\n");
  EXPECT_EQ(read_host_memory(root_).available_bytes(), 0U);
}

TEST(HostCores, RoundAQuotaUpAndNeverReachZero) {
  EXPECT_EQ((HostCores{8, std::nullopt}.usable()), 8);
  EXPECT_EQ((HostCores{8, 1.5}.usable()), 2);
  EXPECT_EQ((HostCores{8, 0.1}.usable()), 1);
  EXPECT_EQ((HostCores{2, 64.0}.usable()), 2);
  EXPECT_EQ((HostCores{0, std::nullopt}.usable()), 1);
}

TEST(HostOfThisTest, HasMemoryAndCores) {
  const HostMemoryInfo info = read_host_memory();
  EXPECT_GT(info.total_bytes(), 0U);
  EXPECT_GT(info.available_bytes(), 0U);
  EXPECT_LE(info.available_bytes(), info.total_bytes());
  EXPECT_GE(read_host_cores().usable(), 1);
}

}  // namespace
}  // namespace tessera::device
