// What an exception says.
#pragma once

#include <exception>
#include <string>

#include <gtest/gtest.h>

namespace tessera::testing {

template <typename Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no exception";
}

}  // namespace tessera::testing

#define EXPECT_SAYS(text, ...)                                                     \
  do {                                                                             \
    const std::string said = ::tessera::testing::message_of([&] { __VA_ARGS__; }); \
    EXPECT_NE(said.find(text), std::string::npos) << said;                         \
  } while (false)
