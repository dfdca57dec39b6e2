#include "tessera/device/numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "tests/support/temporary_directory.h"

namespace tessera::device {
namespace {

namespace fs = std::filesystem;

// A machine laid out in a folder: one device, and as many nodes as it is told to have.
class NumaNode : public ::testing::Test {
 protected:
  void lay_out(int num_nodes, const std::string& node) {
    for (int i = 0; i < num_nodes; ++i) {
      fs::create_directories(root_ / ("sys/devices/system/node/node" + std::to_string(i)));
    }
    const fs::path device = root_ / "sys/bus/pci/devices/0000:1b:00.0";
    fs::create_directories(device);
    std::ofstream(device / "numa_node") << node << '\n';
  }

  const testing::TemporaryDirectory directory_;
  const fs::path root_ = directory_.path();
};

TEST_F(NumaNode, IsThatOfTheDevice) {
  lay_out(2, "1");
  EXPECT_EQ(numa_node_of("0000:1B:00.0", root_), 1) << "CUDA writes it in capitals";
  EXPECT_FALSE(numa_node_of("0000:1C:00.0", root_).has_value()) << "no such device";
}

TEST_F(NumaNode, IsNothingWhereThereIsOneOnly) {
  lay_out(1, "0");
  EXPECT_FALSE(numa_node_of("0000:1B:00.0", root_).has_value());
}

TEST_F(NumaNode, IsNothingWhereTheMachineDoesNotSay) {
  for (const char* node : {"-1", "", "one", "100000"}) {
    lay_out(2, node);
    EXPECT_FALSE(numa_node_of("0000:1B:00.0", root_).has_value()) << node;
  }
}

TEST(PreferNode, IsThePolicyOfThePages) {
  const HostPages pages = map_pages(1 << 20, kHugePageBytes, Tier::kPinned);
  const bool is_granted = prefer_node(pages, 0);
  int policy = -1;
  const bool is_known = syscall(SYS_get_mempolicy, &policy, nullptr, 0, pages.data,
                                static_cast<unsigned long>(MPOL_F_ADDR)) == 0;
  std::memset(pages.data, 1, pages.bytes);  // good memory, granted or not
  unmap_pages(pages);
  EXPECT_FALSE(prefer_node(pages, -1));
  EXPECT_FALSE(prefer_node(pages, 1 << 20));
  if (!is_granted || !is_known) {
    GTEST_SKIP() << "the system grants no policy for memory";
  }
  EXPECT_EQ(policy, MPOL_PREFERRED);
}

}  // namespace
}  // namespace tessera::device
