#include "cli/train_warnings.h"

#include <string>

#include <gtest/gtest.h>

#include <c10/util/Exception.h>

namespace tessera::cli {
namespace {

TEST(TorchWarnings, AreOneLineOnceAndTheHandlerBeforeComesBack) {
  c10::WarningHandler* const before = c10::WarningUtils::get_warning_handler();
  ::testing::internal::CaptureStderr();
  {
    const TorchWarnings warnings("tessera: rank 1: ");
    for (int i = 0; i < 2; ++i) {
      try {
        TORCH_CHECK(false, "no primitive");
      } catch (const c10::Error& error) {
        TORCH_WARN("a product failed: ", error.what());
      }
    }
    TORCH_WARN("another one");
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "tessera: rank 1: warning of torch: a product failed: no primitive\n"
            "tessera: rank 1: warning of torch: another one\n");
  EXPECT_EQ(c10::WarningUtils::get_warning_handler(), before);
}

}  // namespace
}  // namespace tessera::cli
