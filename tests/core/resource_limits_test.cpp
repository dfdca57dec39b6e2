#include "tessera/core/resource_limits.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include <gtest/gtest.h>

#include "tessera/core/link_target.h"
#include "tests/support/contains.h"
#include "tests/support/temporary_directory.h"

namespace tessera {
namespace {

TEST(ResourceLimits, CountOpenFiles) {
  const std::uint64_t before = num_open_files();
  const int fd = dup(STDERR_FILENO);
  EXPECT_EQ(num_open_files(), before + 1);
  close(fd);
  EXPECT_EQ(num_open_files(), before);
}

TEST(ResourceLimits, AreNamedWithValueAndRemedyWhereTheyAreTheReason) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{40, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const std::string remedy = remedy_of(std::string("accept: ") + std::strerror(EMFILE));
  raise_open_file_limit(50);
  const std::uint64_t raised = open_file_limit();
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_HAS(remedy, "may have 40 files");
  EXPECT_HAS(remedy, "ulimit -n 1024");
  EXPECT_EQ(raised, 50U);
  EXPECT_EQ(remedy_of("Connection refused"), "");
}

TEST(ResourceLimits, OfAddressSpaceAreNamedWhenMemoryRunsOut) {
  EXPECT_HAS(no_memory_text(1 << 20), "1048576 bytes (1.00 MiB) were asked for")
      << no_memory_text(1 << 20);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  if (before.rlim_cur != RLIM_INFINITY) {
    GTEST_SKIP() << "there is a limit already";
  }
  EXPECT_LACKS(no_memory_text(0), "ulimit -v");
  const rlimit much{std::uint64_t{1} << 46, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &much), 0);
  const std::string text = no_memory_text(0);
  setrlimit(RLIMIT_AS, &before);
  EXPECT_HAS(text, "limited to 68719476736 KiB (ulimit -v)");
}

TEST(LinkTarget, FollowsLinksToAPlaceThatNeedNotExist) {
  const testing::TemporaryDirectory directory;
  const std::filesystem::path& root = directory.path();
  std::filesystem::create_symlink("second", root / "first");
  std::filesystem::create_symlink(root / "folder" / "file", root / "second");
  EXPECT_EQ(link_target((root / "first").string()), (root / "folder" / "file").string());
  EXPECT_EQ(link_target((root / "none").string()), (root / "none").string());
  std::filesystem::create_symlink("circle", root / "circle");
  EXPECT_EQ(link_target((root / "circle").string()), (root / "circle").string());
}

}  // namespace
}  // namespace tessera
