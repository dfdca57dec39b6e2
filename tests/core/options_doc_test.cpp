#include "tessera/core/options_doc.h"

#include <fstream>
#include <iterator>
#include <string>

#include <gtest/gtest.h>

#include "tessera/core/option_table.h"

namespace tessera {
namespace {

TEST(OptionsDoc, TheFileInDocsIsWhatTheTableSays) {
  const std::string path = std::string(TESSERA_SOURCE_DIR) + "/docs/options.md";
  std::ifstream file(path, std::ios::binary);
  ASSERT_TRUE(file.is_open()) << path;
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_TRUE(text == options_markdown())
      << "docs/options.md is stale: build/tessera options --markdown > docs/options.md";
}

TEST(OptionsDoc, HelpNamesEveryOptionAndAdmitsWhatNothingReads) {
  const std::string help = options_help();
  for (const Option& option : option_table()) {
    const auto at = help.find(std::string(option.name) + " = ");
    ASSERT_NE(at, std::string::npos) << option.name;
    // The option's lines end where the next unindented line begins.
    auto end = help.find('\n', at);
    while (end + 1 < help.size() && help[end + 1] == ' ') {
      end = help.find('\n', end + 1);
    }
    std::string entry = help.substr(at, end - at);
    for (std::size_t line = entry.find("\n    "); line != std::string::npos;
         line = entry.find("\n    ")) {
      entry.replace(line, 5, " ");
    }
    EXPECT_EQ(entry.find("[checked, not used yet]") != std::string::npos, option.read_by.empty())
        << entry;
    EXPECT_NE(entry.find(option.text), std::string::npos) << entry;
  }
}

TEST(OptionsDoc, HelpFitsInAHundredColumns) {
  const std::string help = options_help();
  for (std::size_t start = 0; start < help.size();) {
    const std::size_t end = help.find('\n', start);
    EXPECT_LE(end - start, 100U) << help.substr(start, end - start);
    start = end + 1;
  }
}

TEST(OptionsDoc, IsPlainAscii) {
  for (const char c : options_markdown() + options_help()) {
    ASSERT_TRUE(c == '\n' || (c >= ' ' && c <= '~')) << static_cast<int>(c);
  }
}

}  // namespace
}  // namespace tessera
