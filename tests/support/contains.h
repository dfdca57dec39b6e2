// Whether a text says what it should; a failure shows the whole text.
#pragma once

#include <string>

#include <gtest/gtest.h>

namespace tessera {

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline ::testing::AssertionResult has_part(const char* /*text_name*/, const char* /*part_name*/,
                                           const std::string& text, const std::string& part) {
  return contains(text, part) ? ::testing::AssertionSuccess()
                              : ::testing::AssertionFailure() << "no \"" << part << "\" in:\n"
                                                              << text;
}

inline ::testing::AssertionResult lacks_part(const char* /*text_name*/, const char* /*part_name*/,
                                             const std::string& text, const std::string& part) {
  return contains(text, part) ? ::testing::AssertionFailure() << "\"" << part << "\" is in:\n"
                                                              << text
                              : ::testing::AssertionSuccess();
}

}  // namespace tessera

#define EXPECT_HAS(text, part) EXPECT_PRED_FORMAT2(::tessera::has_part, text, part)
#define EXPECT_LACKS(text, part) EXPECT_PRED_FORMAT2(::tessera::lacks_part, text, part)
