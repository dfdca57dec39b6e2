#include "models/token_text.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "models/demo_corpus.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::models {
namespace {

constexpr std::int64_t kNumBytes = 256;
constexpr std::string_view kSpaces = " \t\n\r,";

std::vector<std::int64_t> number_tokens(std::string_view prompt) {
  std::vector<std::int64_t> tokens;
  for (std::size_t begin = prompt.find_first_not_of(kSpaces); begin != prompt.npos;) {
    const std::size_t end = std::min(prompt.find_first_of(kSpaces, begin), prompt.size());
    const std::string_view word = prompt.substr(begin, end - begin);
    std::int64_t token = 0;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), token);
    TESSERA_CHECK(error == std::errc() && stop == word.data() + word.size(), ConfigError,
                  "prompt: ", in_quotes(word, 40),
                  " is not a token's number; this model's tokens are numbers, such as 12 55 7");
    tokens.push_back(token);
    begin = prompt.find_first_not_of(kSpaces, end);
  }
  return tokens;
}

}  // namespace

TokenMeaning token_meaning_of(const std::string& sources) {
  std::optional<TokenMeaning> common;
  for (std::size_t begin = 0; begin < sources.size();) {
    const std::size_t end = std::min(sources.find('\n', begin), sources.size());
    const TokenMeaning meaning = token_meaning(sources.substr(begin, end - begin));
    if (common.value_or(meaning) != meaning) {
      return TokenMeaning::kNumber;
    }
    common = meaning;
    begin = end + 1;
  }
  return common.value_or(TokenMeaning::kNumber);
}

std::int64_t num_text_symbols(TokenMeaning meaning) {
  switch (meaning) {
    case TokenMeaning::kByte:
      return kNumBytes;
    case TokenMeaning::kDemoSymbol:
      return kDemoSymbols;
    case TokenMeaning::kNumber:
      break;
  }
  return 0;
}

std::vector<std::int64_t> prompt_tokens(TokenMeaning meaning, std::string_view prompt) {
  if (meaning == TokenMeaning::kNumber) {
    return number_tokens(prompt);
  }
  std::vector<std::int64_t> tokens;
  for (const char c : prompt) {
    if (meaning == TokenMeaning::kByte) {
      tokens.push_back(static_cast<unsigned char>(c));
      continue;
    }
    const std::optional<std::int64_t> token = demo_token(c);
    TESSERA_CHECK(token, ConfigError, "prompt: ", in_quotes(std::string_view(&c, 1)), " at place ",
                  tokens.size(),
                  " is not of the demo corpus, which has the space, the letters a to z and the "
                  "full stop");
    tokens.push_back(*token);
  }
  return tokens;
}

std::string token_text(TokenMeaning meaning, std::int64_t token, bool is_first) {
  switch (meaning) {
    case TokenMeaning::kByte:
      return {static_cast<char>(static_cast<unsigned char>(token))};
    case TokenMeaning::kDemoSymbol:
      return {demo_symbol(token)};
    case TokenMeaning::kNumber:
      break;
  }
  return (is_first ? "" : " ") + std::to_string(token);
}

}  // namespace tessera::models
