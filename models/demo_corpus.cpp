#include "models/demo_corpus.h"

#include <array>
#include <string_view>

#include "models/sequence_tokens.h"
#include "tessera/core/counter_random.h"
#include "tessera/core/error.h"

namespace tessera::models {
namespace {

constexpr std::string_view kAlphabet = " abcdefghijklmnopqrstuvwxyz.";
static_assert(kAlphabet.size() == kDemoSymbols);

struct Actor {
  std::string_view name;
  std::string_view verb;
  std::string_view thing;
};

constexpr std::array<Actor, 8> kActors = {{
    {"baker", "sells", "bread"},
    {"sailor", "brings", "fish"},
    {"farmer", "grows", "corn"},
    {"teacher", "reads", "books"},
    {"painter", "shows", "pictures"},
    {"weaver", "makes", "cloth"},
    {"smith", "forges", "tools"},
    {"gardener", "picks", "flowers"},
}};
constexpr std::array<std::string_view, 3> kAges = {"old", "young", "kind"};

// The [old baker sells bread] for the [young sailor]: nobody does anything for himself.
constexpr std::size_t kNumSentences =
    kActors.size() * kAges.size() * (kActors.size() - 1) * kAges.size();

std::string sentence(std::size_t number) {
  const std::size_t actor = number % kActors.size();
  number /= kActors.size();
  const std::string_view actor_age = kAges[number % kAges.size()];
  number /= kAges.size();
  const std::size_t other = (actor + 1 + number % (kActors.size() - 1)) % kActors.size();
  number /= kActors.size() - 1;
  const std::string_view other_age = kAges[number % kAges.size()];
  return detail::concat("the ", actor_age, " ", kActors[actor].name, " ", kActors[actor].verb, " ",
                        kActors[actor].thing, " for the ", other_age, " ", kActors[other].name,
                        ". ");
}

std::vector<std::int64_t> tokens_of(std::string_view text) {
  std::vector<std::int64_t> tokens;
  for (const char c : text) {
    const std::optional<std::int64_t> token = demo_token(c);
    TESSERA_INVARIANT(token, "'", c, "' is not in the alphabet of the corpus");
    tokens.push_back(*token);
  }
  return tokens;
}

class DemoTokens : public TokenSource {
 public:
  explicit DemoTokens(const DataOptions& options) : options_(options) {
    TESSERA_CHECK(options.vocabulary >= kDemoSymbols, ConfigError, "data: the demo corpus has ",
                  kDemoSymbols, " symbols, which a vocabulary of ", options.vocabulary,
                  " cannot hold; use a larger vocabulary, or random data");
    for (const std::string& text : demo_sentences()) {
      sentences_.push_back(tokens_of(text));
    }
  }

  std::string name() const override { return "demo"; }

  void read(std::int64_t step, std::int64_t index, std::span<std::int64_t> tokens) override {
    // A stream of its own for each sequence: it may need any number of sentences.
    const CounterRandom random(
        options_.seed,
        detail::concat("data.demo.", sequence_number(options_, step, index, tokens)));
    std::uint64_t counter = 0;
    const std::vector<std::int64_t>* now = &draw(random, counter++);
    std::size_t at = random.below(counter++, now->size());
    for (std::int64_t& token : tokens) {
      if (at == now->size()) {
        now = &draw(random, counter++);
        at = 0;
      }
      token = (*now)[at++];
    }
  }

 private:
  const std::vector<std::int64_t>& draw(const CounterRandom& random, std::uint64_t counter) const {
    return sentences_[random.below(counter, sentences_.size())];
  }

  const DataOptions options_;
  std::vector<std::vector<std::int64_t>> sentences_;
};

}  // namespace

std::vector<std::string> demo_sentences() {
  std::vector<std::string> sentences;
  for (std::size_t number = 0; number < kNumSentences; ++number) {
    sentences.push_back(sentence(number));
  }
  return sentences;
}

std::optional<std::int64_t> demo_token(char symbol) {
  const std::size_t place = kAlphabet.find(symbol);
  return place == kAlphabet.npos ? std::nullopt : std::optional(static_cast<std::int64_t>(place));
}

char demo_symbol(std::int64_t token) {
  return token >= 0 && token < kDemoSymbols ? kAlphabet[static_cast<std::size_t>(token)] : '?';
}

std::unique_ptr<TokenSource> make_demo_tokens(const DataOptions& options) {
  return std::make_unique<DemoTokens>(options);
}

}  // namespace tessera::models
