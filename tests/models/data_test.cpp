#include "models/data.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "models/demo_corpus.h"
#include "tessera/core/error.h"
#include "tests/support/temporary_directory.h"

namespace tessera::models {
namespace {

using testing::TemporaryDirectory;
using Tokens = std::vector<std::int64_t>;

DataOptions options_of(std::string source, std::int64_t vocabulary, std::int64_t sequence,
                       std::int64_t batch, std::uint64_t seed = 0) {
  return {{std::move(source)}, vocabulary, sequence, batch, seed};
}

Tokens read(TokenSource& source, std::int64_t sequence, std::int64_t step, std::int64_t index) {
  Tokens tokens(static_cast<std::size_t>(sequence) + 1, -1);
  source.read(step, index, tokens);
  return tokens;
}

std::string refusal(const DataOptions& options) {
  try {
    open_data(options);
  } catch (const ConfigError& e) {
    const std::string message = e.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << "one line: " << message;
    return message;
  }
  return "it was opened";
}

class DataFile : public ::testing::Test {
 protected:
  std::string text_file(const std::string& name, const std::string& text) const {
    const std::string path = folder_.path() / name;
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  std::string token_file(const std::string& name, const std::vector<std::uint16_t>& tokens) const {
    std::string text;
    for (const std::uint16_t token : tokens) {
      text += static_cast<char>(token & 0xffU);
      text += static_cast<char>(token >> 8);
    }
    return text_file(name, text);
  }

  const TemporaryDirectory folder_;
};

// From torch 2.13 in Python: torch.randint(0, vocabulary, (8,),
// generator=torch.Generator().manual_seed(1000 + step * batch + index)).
TEST(RandomData, IsWhatThePeersTrainOn) {
  const auto four = open_data(options_of("random", 4096, 7, 2));
  EXPECT_EQ(read(*four, 7, 0, 0), (Tokens{1459, 599, 2119, 3776, 3323, 2398, 1372, 769}));
  EXPECT_EQ(read(*four, 7, 3, 1), (Tokens{2810, 1554, 503, 391, 2613, 343, 3609, 2375}));
  const auto large = open_data(options_of("random", 50304, 7, 16));
  EXPECT_EQ(read(*large, 7, 0, 5), (Tokens{44387, 1059, 1683, 14041, 30967, 33896, 13700, 35443}));
  EXPECT_EQ(large->name(), "random");
}

TEST(RandomData, AnotherSeedIsAShiftOfTheGeneratorsSeed) {
  const auto one = open_data(options_of("random", 256, 7, 1, 1));
  EXPECT_EQ(read(*one, 7, 0, 0), (Tokens{10, 94, 191, 96, 163, 54, 158, 155}));
  const auto many = open_data(options_of("random", 256, 7, 3, 123456789));
  EXPECT_EQ(read(*many, 7, 2, 0), (Tokens{0, 37, 13, 183, 18, 152, 62, 147}));
}

TEST(DemoData, IsMadeOfAFewHundredSentences) {
  const auto sentences = demo_sentences();
  EXPECT_EQ(std::set<std::string>(sentences.begin(), sentences.end()).size(), sentences.size());
  EXPECT_EQ(sentences.size(), 504U);
  EXPECT_EQ(sentences[0], "the old baker sells bread for the old sailor. ");
  EXPECT_EQ(sentences[503], "the kind gardener picks flowers for the kind smith. ");

  const std::set<std::string> known(sentences.begin(), sentences.end());
  const auto source = open_data(options_of("demo", 64, 500, 1));
  EXPECT_EQ(source->name(), "demo");
  std::string text;
  for (const std::int64_t token : read(*source, 500, 4, 0)) {
    ASSERT_GE(token, 0);
    ASSERT_LT(token, kDemoSymbols);
    text += demo_symbol(token);
  }
  // After the first full stop: whole sentences, until the sequence ends.
  std::size_t num_sentences = 0;
  for (std::size_t begin = text.find(". ") + 2;; ++num_sentences) {
    const std::size_t end = text.find(". ", begin);
    if (end == std::string::npos) {
      break;
    }
    EXPECT_EQ(known.count(text.substr(begin, end + 2 - begin)), 1U) << text.substr(begin);
    begin = end + 2;
  }
  EXPECT_GE(num_sentences, 7U);  // 500 symbols, at most 59 to a sentence
  EXPECT_EQ(demo_symbol(28), '?');
  EXPECT_EQ(demo_symbol(-1), '?');
}

TEST(DemoData, DoesNotRepeatInTwentyStepsAndFollowsTheSeed) {
  constexpr std::int64_t kSequence = 128, kBatch = 16;
  const auto source = open_data(options_of("demo", 256, kSequence, kBatch));
  const auto again = open_data(options_of("demo", 256, kSequence, kBatch));
  const auto other = open_data(options_of("demo", 256, kSequence, kBatch, 1));
  std::set<Tokens> seen;
  for (std::int64_t step = 0; step < 20; ++step) {
    for (std::int64_t index = 0; index < kBatch; ++index) {
      const Tokens tokens = read(*source, kSequence, step, index);
      EXPECT_TRUE(seen.insert(tokens).second) << step << " " << index;
      EXPECT_EQ(tokens, read(*again, kSequence, step, index));
      EXPECT_NE(tokens, read(*other, kSequence, step, index));
    }
  }
  const auto narrow = open_data(options_of("demo", 256, kSequence, 8));
  EXPECT_EQ(read(*narrow, kSequence, 5, 3), read(*source, kSequence, 2, 11))
      << "both are number 43";
}

// What a model can learn, by counting: entropies in nats of a symbol given those before it.
TEST(DemoData, CanBeLearnedFromTheSymbolsBefore) {
  constexpr std::int64_t kSequence = 128, kBatch = 16;
  const auto source = open_data(options_of("demo", 64, kSequence, kBatch));
  const auto entropy = [&source](std::size_t num_before) {
    std::map<Tokens, std::map<std::int64_t, double>> counts;
    double total = 0;
    for (std::int64_t step = 0; step < 20; ++step) {
      for (std::int64_t index = 0; index < kBatch; ++index) {
        const Tokens tokens = read(*source, kSequence, step, index);
        for (std::size_t i = num_before; i < tokens.size(); ++i) {
          counts[{tokens.data() + i - num_before, tokens.data() + i}][tokens[i]] += 1;
          total += 1;
        }
      }
    }
    double sum = 0;
    for (const auto& [before, next] : counts) {
      double all = 0;
      for (const auto& [token, count] : next) {
        all += count;
      }
      for (const auto& [token, count] : next) {
        sum -= count * std::log(count / all);
      }
    }
    return sum / total;
  };
  EXPECT_LT(entropy(0), std::log(28.0));
  EXPECT_LT(entropy(1), 0.6 * entropy(0)) << "the symbol before";
  EXPECT_LT(entropy(4), 0.5 * entropy(1)) << "the four before";
  // Drawn in every sentence: two ages of three and, as far as twelve symbols tell, two persons of
  // eight, each of whom acts or is acted for.
  std::size_t shortest = 1000;
  for (const std::string& sentence : demo_sentences()) {
    shortest = std::min(shortest, sentence.size());
  }
  EXPECT_LT(entropy(12), 2 * std::log(3.0 * 8 * 2) / static_cast<double>(shortest));
}

TEST(DemoData, NeedsAVocabularyForItsSymbols) {
  EXPECT_EQ(refusal(options_of("demo", 28, 16, 1)), "it was opened");
  EXPECT_EQ(refusal(options_of("demo", 27, 16, 1)),
            "data: the demo corpus has 28 symbols, which a vocabulary of 27 cannot hold; use a "
            "larger vocabulary, or random data");
}

TEST_F(DataFile, SequencesArePiecesOfTheFileAtDrawnPositions) {
  std::vector<std::uint16_t> words;
  std::string text;
  for (int i = 0; i < 200; ++i) {
    words.push_back(static_cast<std::uint16_t>(1000 + i));
    text += static_cast<char>(i);
  }
  const std::string word_path = token_file("a.bin", words), text_path = text_file("a.txt", text);
  const auto tokens = open_data(options_of(word_path, 2000, 9, 4));
  const auto bytes = open_data(options_of(text_path, 256, 9, 4));
  EXPECT_EQ(tokens->name(), "tokens:" + word_path);
  EXPECT_EQ(bytes->name(), "text:" + text_path);
  std::set<std::int64_t> begins;
  for (std::int64_t step = 0; step < 500; ++step) {
    for (std::int64_t index = 0; index < 4; ++index) {
      const Tokens sequence = read(*bytes, 9, step, index);
      begins.insert(sequence[0]);
      for (std::size_t i = 1; i < sequence.size(); ++i) {
        ASSERT_EQ(sequence[i], sequence[0] + static_cast<std::int64_t>(i));
      }
      const Tokens same = read(*tokens, 9, step, index);
      ASSERT_EQ(same[0], 1000 + sequence[0]) << "the same position";
      ASSERT_EQ(same[9], 1009 + sequence[0]);
    }
  }
  // 191 positions, first and last among them; a given one is missed by 2000 draws with 3e-5.
  EXPECT_EQ(*begins.begin(), 0);
  EXPECT_EQ(*begins.rbegin(), 190);
  EXPECT_GT(begins.size(), 185U);
  const auto other = open_data(options_of("text:" + text_path, 256, 9, 4, 1));
  std::array<Tokens, 2> first;
  for (std::int64_t index = 0; index < 4; ++index) {
    first[0].push_back(read(*bytes, 9, 0, index)[0]);
    first[1].push_back(read(*other, 9, 0, index)[0]);
  }
  EXPECT_NE(first[0], first[1]) << "another seed";
}

TEST_F(DataFile, AFileOfOneSequenceIsThatSequence) {
  const auto source = open_data(options_of("text:" + text_file("a", "abcd"), 256, 3, 2));
  EXPECT_EQ(read(*source, 3, 0, 0), (Tokens{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(read(*source, 3, 7, 1), (Tokens{'a', 'b', 'c', 'd'}));
}

TEST_F(DataFile, ManyThreadsReadTheSame) {
  const auto source =
      open_data(options_of(text_file("a.txt", std::string(5000, 'x') + "yz"), 256, 64, 8));
  std::array<Tokens, 4> read_by;
  std::vector<std::thread> threads;
  for (Tokens& mine : read_by) {
    threads.emplace_back([&source, &mine] {
      for (std::int64_t index = 0; index < 8; ++index) {
        const Tokens tokens = read(*source, 64, 2, index);
        mine.insert(mine.end(), tokens.begin(), tokens.end());
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const Tokens& tokens : read_by) {
    EXPECT_EQ(tokens, read_by[0]);
  }
}

TEST_F(DataFile, ThatCannotBeUsedIsRefusedInOneLine) {
  const std::string missing = folder_.path() / "missing.txt";
  EXPECT_EQ(refusal(options_of(missing, 256, 4, 1)),
            "data: " + missing +
                ": cannot open: No such file or directory; check the name and its permissions");
  EXPECT_EQ(refusal(options_of("text:", 256, 4, 1)), "data: text: names no file; write text:PATH");
  EXPECT_EQ(refusal(options_of("tokens32:", 256, 4, 1)),
            "data: tokens32: names no file; write tokens32:PATH");
  const std::string empty = text_file("empty.txt", "");
  EXPECT_EQ(refusal(options_of(empty, 256, 4, 1)), "data: " + empty + ": the file is empty");
  EXPECT_NE(refusal(options_of("text:/dev/null", 256, 4, 1)).find("not a regular file"),
            std::string::npos);
  const std::string odd = text_file("odd.bin", std::string(11, '\0'));
  EXPECT_NE(refusal(options_of(odd, 256, 4, 1))
                .find(": 11 bytes are not a whole number of 16-bit tokens"),
            std::string::npos);
  const std::string four = text_file("short.txt", "abcd");
  EXPECT_EQ(refusal(options_of(four, 256, 4, 1)),
            "data: " + four +
                ": 4 tokens are fewer than one sequence of 4 and its last target (5); use a longer "
                "file or a shorter sequence");
  EXPECT_NE(refusal(options_of(token_file("short.bin", {1, 2, 3, 4}), 256, 4, 1))
                .find("4 tokens are fewer"),
            std::string::npos);
}

TEST_F(DataFile, ATokenBeyondTheVocabularyIsNamedWithItsPosition) {
  std::vector<std::uint16_t> words(200'000, 7);
  words[150'000] = 301;
  words[150'001] = 302;
  const std::string path = token_file("large.bin", words);
  EXPECT_EQ(refusal(options_of(path, 300, 4, 1)),
            "data: " + path +
                ": token 301 at position 150000 is beyond the vocabulary of 300; was the file made "
                "for another vocabulary (--vocab)?");
  EXPECT_NE(refusal(options_of(path, 302, 4, 1)).find("token 302 at position 150001"),
            std::string::npos);
  EXPECT_EQ(refusal(options_of(path, 303, 4, 1)), "it was opened");
  const std::string text = text_file("a.txt", "abcz");
  EXPECT_NE(refusal(options_of(text, 122, 3, 1)).find("token 122 at position 3 is beyond"),
            std::string::npos);
  EXPECT_EQ(refusal(options_of(text, 123, 3, 1)), "it was opened");
}

TEST_F(DataFile, ThatChangesInUseIsNoticed) {
  const std::string path = token_file("a.bin", {1, 2, 3, 4});
  const auto source = open_data(options_of(path, 10, 3, 1));
  EXPECT_EQ(read(*source, 3, 0, 0), (Tokens{1, 2, 3, 4}));
  const auto refused = [&source]() -> std::string {
    try {
      read(*source, 3, 0, 0);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "it was read";
  };
  // In place: the mapping shows the new bytes.
  std::fstream(path, std::ios::binary | std::ios::in | std::ios::out).seekp(4).put(10);
  EXPECT_NE(refused().find("token 10 at position 2 is beyond the vocabulary of 10"),
            std::string::npos);
  std::filesystem::resize_file(path, 4);
  EXPECT_NE(refused().find("the file had 8 bytes when it was opened and has 4 now"),
            std::string::npos);
}

TEST(Data, RefusesWhatMakesNoSequences) {
  EXPECT_NE(refusal(options_of("demo", 0, 4, 1)).find("a vocabulary of 0"), std::string::npos);
  EXPECT_NE(refusal(options_of("demo", 64, 0, 1)).find("sequences of 0"), std::string::npos);
  EXPECT_NE(refusal(options_of("demo", 64, 4, 0)).find("a batch of 0"), std::string::npos);
  EXPECT_EQ(refusal(options_of("demos\n", 64, 4, 1)),
            "data: \"demos\\n\" is unknown; use demo, random, text:PATH (bytes), tokens:PATH "
            "(16-bit tokens), tokens32:PATH (32-bit tokens), or a path that ends in .txt or .bin");
  EXPECT_NE(refusal(options_of("", 64, 4, 1)).find("\"\" is unknown"), std::string::npos);
}

TEST(Data, HoldsCallersToTheContract) {
  for (const char* source_name : {"demo", "random"}) {
    const auto source = open_data(options_of(source_name, 64, 4, 2));
    Tokens tokens(5);
    source->read(0, 1, tokens);
    EXPECT_THROW(source->read(0, 2, tokens), InternalError);
    EXPECT_THROW(source->read(0, -1, tokens), InternalError);
    EXPECT_THROW(source->read(-1, 0, tokens), InternalError);
    tokens.resize(4);
    EXPECT_THROW(source->read(0, 0, tokens), InternalError);
  }
}

}  // namespace
}  // namespace tessera::models
