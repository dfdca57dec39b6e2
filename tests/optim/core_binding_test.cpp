// Cores for threads, on machines that are written down.
#include "tessera/optim/core_binding.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <latch>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/optim/thread_team.h"

namespace tessera::optim {
namespace {

namespace fs = std::filesystem;
using Cpus = std::vector<int>;

// A folder that looks like /sys/devices/system/cpu.
class Machine {
 public:
  Machine() {
    static std::atomic<int> number{0};
    root_ = fs::temp_directory_path() /
            ("tessera_cores_" + std::to_string(getpid()) + "_" + std::to_string(number++));
    fs::create_directories(root_);
  }
  ~Machine() { fs::remove_all(root_); }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  void add(int cpu, const std::string& siblings, int node,
           const std::string& list = "core_cpus_list") {
    const fs::path of_cpu = root_ / ("cpu" + std::to_string(cpu));
    fs::create_directories(of_cpu / "topology");
    fs::create_directories(of_cpu / ("node" + std::to_string(node)));
    std::ofstream(of_cpu / "topology" / list) << siblings << "\n";
  }
  Cpus cores(int num_threads, const Cpus& usable, CoreShare share = {}) const {
    return cores_for_threads(num_threads, usable, root_, share);
  }

 private:
  fs::path root_;
};

TEST(CoreBinding, TakesOneThreadOfEachPhysicalCore) {
  Machine machine;
  for (int cpu = 0; cpu < 4; ++cpu) {
    const int core = cpu % 2;
    machine.add(cpu, std::to_string(core) + "," + std::to_string(core + 2), 0);
  }
  EXPECT_EQ(machine.cores(2, {0, 1, 2, 3}), (Cpus{0, 1}));
  EXPECT_EQ(machine.cores(1, {0, 1, 2, 3}), (Cpus{0}));
  EXPECT_EQ(machine.cores(3, {0, 1, 2, 3}), Cpus{}) << "there are two cores";
}

TEST(CoreBinding, KeepsToTheCpusThatMayBeUsed) {
  Machine machine;
  for (int cpu = 0; cpu < 4; ++cpu) {
    const int core = cpu / 2 * 2;
    machine.add(cpu, std::to_string(core) + "-" + std::to_string(core + 1), 0);
  }
  EXPECT_EQ(machine.cores(2, {3, 1}), (Cpus{1, 3}));
  EXPECT_EQ(machine.cores(2, {2, 3}), Cpus{}) << "one core";
}

TEST(CoreBinding, SpreadsThreadsOverNodes) {
  Machine machine;
  for (int cpu = 0; cpu < 6; ++cpu) {
    machine.add(cpu, std::to_string(cpu), cpu < 4 ? 0 : 1);
  }
  EXPECT_EQ(machine.cores(6, {0, 1, 2, 3, 4, 5}), (Cpus{0, 4, 1, 5, 2, 3}));
  EXPECT_EQ(machine.cores(3, {0, 1, 2, 3, 4, 5}), (Cpus{0, 4, 1}));
}

TEST(CoreBinding, GivesEachRankCoresOfItsOwnOnOneNodeIfItCan) {
  Machine machine;
  Cpus all;
  for (int cpu = 0; cpu < 8; ++cpu) {
    machine.add(cpu, std::to_string(cpu), cpu % 2);
    all.push_back(cpu);
  }
  EXPECT_EQ(machine.cores(4, all, {0, 2}), (Cpus{0, 2, 4, 6}));
  EXPECT_EQ(machine.cores(3, all, {1, 2}), (Cpus{1, 3, 5}));
  EXPECT_EQ(machine.cores(5, all, {1, 2}), Cpus{}) << "more than its share";
  EXPECT_EQ(machine.cores(2, all, {1, 3}), (Cpus{4, 6}));
  EXPECT_EQ(machine.cores(2, all, {2, 3}), (Cpus{1, 3})) << "two of eight are left over";
  EXPECT_EQ(machine.cores(1, all, {3, 9}), Cpus{}) << "more ranks than cores";
  EXPECT_THROW(machine.cores(1, all, {2, 2}), InternalError);
}

TEST(CoreBinding, SpreadsTheThreadsOfARankThatHasTwoNodes) {
  Machine machine;
  for (int cpu = 0; cpu < 6; ++cpu) {
    machine.add(cpu, std::to_string(cpu), cpu / 2);
  }
  EXPECT_EQ(machine.cores(3, {0, 1, 2, 3, 4, 5}, {0, 2}), (Cpus{0, 2, 1}));
}

TEST(CoreBinding, ReadsTheNamesOfOlderKernels) {
  Machine machine;
  for (int cpu = 0; cpu < 2; ++cpu) {
    machine.add(cpu, "0-1", 0, "thread_siblings_list");
  }
  EXPECT_EQ(machine.cores(1, {0, 1}), (Cpus{0}));
  EXPECT_EQ(machine.cores(2, {0, 1}), Cpus{});
}

TEST(CoreBinding, CountsCpusWithoutADescriptionAsCores) {
  const Machine machine;
  EXPECT_EQ(machine.cores(2, {4, 7, 9}), (Cpus{4, 7}));
  EXPECT_EQ(machine.cores(0, {4}), Cpus{});
}

TEST(CoreBinding, FindsCoresOfThisMachine) {
  const Cpus one = cores_for_threads(1);
  ASSERT_EQ(one.size(), 1U);
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  EXPECT_TRUE(CPU_ISSET(one[0], &set));
  EXPECT_EQ(cores_for_threads(1 << 20), Cpus{});
}

TEST(CoreBinding, KeepsHelpersOnTheirCoresAndLeavesTheCallerAlone) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  const int core = cores_for_threads(1).at(0);
  ThreadTeam team(3, {core, core, core});
  std::mutex mutex;
  std::latch all(3);
  int num_helpers = 0;
  // A chunk per thread: none ends before all have begun.
  team.run(3, [&](std::int64_t /*chunk*/) {
    all.arrive_and_wait();
    cpu_set_t found;
    const int code = sched_getaffinity(0, sizeof(found), &found);
    const std::lock_guard lock(mutex);
    EXPECT_EQ(code, 0);
    if (CPU_EQUAL(&found, &before) && CPU_COUNT(&before) > 1) {
      return;
    }
    EXPECT_EQ(CPU_COUNT(&found), 1);
    EXPECT_TRUE(CPU_ISSET(core, &found));
    ++num_helpers;
  });
  EXPECT_EQ(num_helpers, CPU_COUNT(&before) > 1 ? 2 : 3);
}

TEST(CoreBinding, RefusesCoresThatAreNotToBeHad) {
  EXPECT_THROW(ThreadTeam(2, {0}), ConfigError);
  EXPECT_THROW(ThreadTeam(2, {0, -1}), ConfigError);
  EXPECT_THROW(ThreadTeam(2, {0, CPU_SETSIZE}), ConfigError);
  EXPECT_THROW(ThreadTeam(2, {0, CPU_SETSIZE - 1}), ConfigError) << "no machine of ours has it";
}

}  // namespace
}  // namespace tessera::optim
