// What is said when torch finds no memory on a GPU.
#include "cli/out_of_memory.h"

#include <gtest/gtest.h>

#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

constexpr const char* kMessage =
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 1.20 GiB is free.\nException raised from malloc at somewhere";

TEST(OutOfMemory, ReadsWhatTorchTriedToAllocate) {
  EXPECT_EQ(asked_bytes(kMessage), std::size_t{5} << 29);
  EXPECT_EQ(asked_bytes("Tried to allocate 20.00 MiB."), std::size_t{20} << 20);
  EXPECT_EQ(asked_bytes("Tried to allocate 512 bytes."), 512U);
  EXPECT_EQ(asked_bytes("Tried to allocate much"), 0U);
  EXPECT_EQ(asked_bytes("something else"), 0U);
  EXPECT_EQ(asked_bytes("Tried to allocate 3.00 parsecs"), 0U);
}

TEST(OutOfMemory, NamesWhoHoldsWhatAndWhatWouldFit) {
  Ledger ledger;
  ledger.charge(Tier::kDevice, Role::kOptimizer, std::size_t{100} << 30);
  const std::string text =
      out_of_memory_text(kMessage, ledger, {std::size_t{140} << 30, std::size_t{1} << 30});
  EXPECT_EQ(text.find("CUDA out of memory. Tried to allocate 2.50 GiB."), 0U);
  EXPECT_LACKS(text, "Exception raised");
  EXPECT_HAS(text, "optimizer");
  EXPECT_HAS(text, "place.optimizer");
}

}  // namespace
}  // namespace tessera::cli
