#include "models/data.h"

#include <string_view>

#include "models/demo_corpus.h"
#include "models/file_tokens.h"
#include "models/random_tokens.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::models {
namespace {

void check(const DataOptions& options) {
  TESSERA_CHECK(options.vocabulary >= 1, ConfigError, "data: a vocabulary of ", options.vocabulary,
                " tokens; at least 1 is needed");
  TESSERA_CHECK(options.sequence >= 1, ConfigError, "data: sequences of ", options.sequence,
                " tokens; at least 1 is needed");
  TESSERA_CHECK(options.batch >= 1, ConfigError, "data: a batch of ", options.batch,
                " sequences; at least 1 is needed");
}

// What comes after `prefix`, if the source begins with it.
bool takes_prefix(std::string_view& source, std::string_view prefix) {
  if (!source.starts_with(prefix)) {
    return false;
  }
  source.remove_prefix(prefix.size());
  return true;
}

}  // namespace

std::unique_ptr<TokenSource> open_data(const DataOptions& options) {
  check(options);
  std::string_view source = options.source;
  if (source == "demo") {
    return make_demo_tokens(options);
  }
  if (source == "random") {
    return make_random_tokens(options);
  }
  if (takes_prefix(source, "text:") || source.ends_with(".txt")) {
    return open_file_tokens(options, std::string(source), FileTokenKind::kBytes);
  }
  if (takes_prefix(source, "tokens:") || source.ends_with(".bin")) {
    return open_file_tokens(options, std::string(source), FileTokenKind::kWords);
  }
  throw ConfigError(detail::concat("data: ", tessera::in_quotes(options.source),
                                   " is unknown; use demo, random, text:FILE (bytes), tokens:FILE "
                                   "(16-bit tokens), or a path that "
                                   "ends in .txt or .bin"));
}

}  // namespace tessera::models
