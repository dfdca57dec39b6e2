// That an error is of some kind, and that its message names what it must.
#pragma once

#include <functional>
#include <string>

#include <gtest/gtest.h>

namespace tessera::support {

template <typename Exception>
void expect_names(const std::function<void()>& call, const std::string& words) {
  try {
    call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Exception& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

}  // namespace tessera::support
