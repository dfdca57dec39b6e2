#include "models/data.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string_view>

#include "models/demo_corpus.h"
#include "models/file_tokens.h"
#include "models/random_tokens.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::models {
namespace {

struct Prefix {
  std::string_view text;
  FileTokenKind kind;
};
constexpr Prefix kPrefixes[] = {
    {"text:", FileTokenKind::kBytes},
    {"tokens:", FileTokenKind::kWords},
    {"tokens16:", FileTokenKind::kCertainWords},
    {"tokens32:", FileTokenKind::kDoubleWords},
};

void check(const DataOptions& options) {
  TESSERA_CHECK(options.vocabulary >= 1, ConfigError, "data: a vocabulary of ", options.vocabulary,
                " tokens; at least 1 is needed");
  TESSERA_CHECK(options.sequence >= 1, ConfigError, "data: sequences of ", options.sequence,
                " tokens; at least 1 is needed");
  TESSERA_CHECK(options.batch >= 1, ConfigError, "data: a batch of ", options.batch,
                " sequences; at least 1 is needed");
  TESSERA_CHECK(!options.sources.empty(), ConfigError, "data: no source is given");
}

bool is_generated(const std::string& source) { return source == "demo" || source == "random"; }

TokenFileName parsed(const std::string& source) {
  for (const Prefix& prefix : kPrefixes) {
    if (source.starts_with(prefix.text)) {
      TESSERA_CHECK(source.size() > prefix.text.size(), ConfigError, "data: ", prefix.text,
                    " names no file; write ", prefix.text, "PATH");
      return {source.substr(prefix.text.size()), prefix.kind};
    }
  }
  if (source.ends_with(".txt")) {
    return {source, FileTokenKind::kBytes};
  }
  if (source.ends_with(".bin")) {
    return {source, FileTokenKind::kWords};
  }
  throw ConfigError(detail::concat(
      "data: ", tessera::in_quotes(source),
      " is unknown; use demo, random, text:PATH (bytes), tokens:PATH (16-bit tokens), "
      "tokens32:PATH (32-bit tokens), or a path that ends in .txt or .bin"));
}

// A directory becomes its files.
void append_files(const TokenFileName& named, std::vector<TokenFileName>& files) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (!fs::is_directory(named.path, error)) {
    files.push_back(named);
    return;
  }
  std::vector<std::string> paths;
  fs::directory_iterator entry(named.path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code unreadable;  // then opening it says why
    if (!entry->path().filename().string().starts_with('.') && entry->is_regular_file(unreadable)) {
      paths.push_back(entry->path().string());
    }
  }
  TESSERA_CHECK(!error, ConfigError, "data: ", printable(named.path, 400),
                ": cannot list the directory: ", error.message());
  TESSERA_CHECK(!paths.empty(), ConfigError, "data: ", printable(named.path, 400),
                ": the directory has no regular file that is not hidden");
  std::sort(paths.begin(), paths.end());
  for (std::string& path : paths) {
    files.push_back({std::move(path), named.kind});
  }
}

// Nothing: what is generated and has no files.
std::optional<std::vector<TokenFileName>> files_of(const DataOptions& options) {
  check(options);
  if (options.sources.size() == 1 && is_generated(options.sources.front())) {
    return std::nullopt;
  }
  std::vector<TokenFileName> files;
  for (const std::string& source : options.sources) {
    TESSERA_CHECK(!is_generated(source), ConfigError, "data: ", source,
                  " is generated and cannot be mixed with other sources; give it alone");
    append_files(parsed(source), files);
  }
  return files;
}

}  // namespace

std::unique_ptr<TokenSource> open_data(const DataOptions& options) {
  if (const auto files = files_of(options)) {
    return open_file_tokens(options, *files);
  }
  return options.sources.front() == "demo" ? make_demo_tokens(options)
                                           : make_random_tokens(options);
}

TokenMeaning token_meaning(const std::string& source) {
  if (is_generated(source)) {
    return source == "demo" ? TokenMeaning::kDemoSymbol : TokenMeaning::kNumber;
  }
  return parsed(source).kind == FileTokenKind::kBytes ? TokenMeaning::kByte : TokenMeaning::kNumber;
}

std::int64_t count_sequences(const DataOptions& options) {
  const auto files = files_of(options);
  return files ? count_file_sequences(options, *files) : 0;
}

}  // namespace tessera::models
