// Sources of several files, of 32-bit tokens, and epochs over them.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "models/data.h"
#include "models/epoch_order.h"
#include "tessera/core/error.h"
#include "tests/support/temporary_directory.h"

namespace tessera::models {
namespace {

using Sequence = std::vector<std::int64_t>;

std::string opening_error(const DataOptions& options) {
  try {
    open_data(options);
  } catch (const ConfigError& e) {
    const std::string message = e.what();
    EXPECT_EQ(message.find('\n'), std::string::npos) << "one line: " << message;
    return message;
  }
  return "it was opened";
}

class DataFiles : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path() / name; }

  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  // Bytes first, first + 1, ...
  std::string write_count(const std::string& name, int first, int count) const {
    std::string bytes;
    for (int i = 0; i < count; ++i) {
      bytes += static_cast<char>(first + i);
    }
    return write(name, bytes);
  }
  std::string write_double_words(const std::string& name,
                                 const std::vector<std::uint32_t>& tokens) const {
    std::string bytes;
    for (const std::uint32_t token : tokens) {
      for (int shift = 0; shift < 32; shift += 8) {
        bytes += static_cast<char>(token >> shift & 0xffU);
      }
    }
    return write(name, bytes);
  }

  static Sequence read(TokenSource& source, std::int64_t length, std::int64_t step,
                       std::int64_t index) {
    Sequence tokens(static_cast<std::size_t>(length) + 1, -1);
    source.read(step, index, tokens);
    return tokens;
  }

  const testing::TemporaryDirectory folder_;
};

TEST_F(DataFiles, ThePrefixDecidesBeforeTheEnding) {
  const std::string text = write("tokens.txt", std::string("\1\0\2\0\3\0", 6));
  const auto tokens = open_data({{"tokens:" + text}, 10, 2, 1});
  EXPECT_EQ(read(*tokens, 2, 0, 0), (Sequence{1, 2, 3}));
  EXPECT_EQ(tokens->name(), "tokens:" + text);
  const std::string bin = write("text.bin", "abc");
  EXPECT_EQ(read(*open_data({{"text:" + bin}, 256, 2, 1}), 2, 0, 0), (Sequence{'a', 'b', 'c'}));
}

TEST_F(DataFiles, TokensOf32BitsAreReadAndChecked) {
  const std::string file = write_double_words("large.bin", {70000, 1, 4294967295U, 128255});
  const auto source = open_data({{"tokens32:" + file}, std::int64_t{1} << 32, 3, 1});
  EXPECT_EQ(read(*source, 3, 0, 0), (Sequence{70000, 1, 4294967295, 128255}));
  EXPECT_EQ(source->name(), "tokens32:" + file);
  EXPECT_EQ(opening_error({{"tokens32:" + file}, 70001, 3, 1}),
            "data: " + file +
                ": token 4294967295 at position 2 is beyond the vocabulary of 70001; was the file "
                "made for another vocabulary (--vocab), or are its tokens 16-bit (tokens:PATH)?");
  EXPECT_NE(opening_error({{"tokens32:" + write("cut", "abcdef")}, 10, 1, 1})
                .find("6 bytes are not a whole number of 32-bit tokens"),
            std::string::npos);
}

TEST_F(DataFiles, TokensOf32BitsTakenFor16AreNoticed) {
  std::vector<std::uint32_t> tokens(100);
  std::iota(tokens.begin(), tokens.end(), 1U);
  const std::string file = write_double_words("small.bin", tokens);
  for (const std::string& source : {file, "tokens:" + file}) {
    EXPECT_EQ(opening_error({{source}, 1000, 4, 1}),
              "data: " + file +
                  ": every second one of the first 200 16-bit tokens is 0, as in a file of 32-bit "
                  "tokens; use tokens32:PATH, or tokens16:PATH if they are 16-bit");
  }
  EXPECT_EQ(opening_error({{"tokens16:" + file}, 1000, 4, 1}), "it was opened");
  EXPECT_EQ(opening_error({{"tokens32:" + file}, 1000, 4, 1}), "it was opened");
}

TEST_F(DataFiles, ADirectoryIsItsFilesInTheOrderOfTheirNames) {
  std::filesystem::create_directory(path("corpus"));
  std::filesystem::create_directory(path("corpus/more"));
  write_count("corpus/b.txt", 100, 3);
  write_count("corpus/a.md", 0, 3);
  write_count("corpus/.hidden", 200, 3);
  write_count("corpus/more/c.txt", 200, 3);
  const auto source = open_data({{"text:" + path("corpus")}, 256, 2, 1});
  EXPECT_EQ(source->name(), "text:" + path("corpus/a.md") + ", text:" + path("corpus/b.txt"));
  std::filesystem::create_directory(path("empty"));
  EXPECT_NE(opening_error({{"text:" + path("empty")}, 256, 2, 1}).find("has no regular file"),
            std::string::npos);
}

// As many positions as all files together have; none reaches into the next file.
TEST_F(DataFiles, DrawnSequencesComeFromAllFilesAndCrossNone) {
  const std::string first = write_count("a.txt", 0, 10);
  const std::string second = write_count("b.txt", 100, 30);
  const auto source = open_data({{first, second}, 256, 3, 4});
  std::set<std::int64_t> begins;
  for (std::int64_t step = 0; step < 200; ++step) {
    for (std::int64_t index = 0; index < 4; ++index) {
      const Sequence tokens = read(*source, 3, step, index);
      begins.insert(tokens[0]);
      for (std::size_t i = 1; i < tokens.size(); ++i) {
        ASSERT_EQ(tokens[i], tokens[0] + static_cast<std::int64_t>(i));
      }
    }
  }
  // 7 + 27 positions; 800 draws miss a given one with 4e-11.
  std::set<std::int64_t> expected;
  for (std::int64_t i = 0; i < 7; ++i) {
    expected.insert(i);
  }
  for (std::int64_t i = 0; i < 27; ++i) {
    expected.insert(100 + i);
  }
  EXPECT_EQ(begins, expected);
}

TEST_F(DataFiles, AnEpochTakesEverySequenceOnce) {
  // Sequences of 4: 6 of the first file (25 tokens), 2 of the second (12 tokens, 3 left over).
  const std::string first = write_count("a.txt", 0, 25);
  const std::string second = write_count("b.txt", 100, 12);
  DataOptions options{{first, second}, 256, 4, 2};
  options.order = DataOrder::kEpochs;
  EXPECT_EQ(count_sequences(options), 8);
  const auto source = open_data(options);
  const std::set<std::int64_t> all{0, 4, 8, 12, 16, 20, 100, 104};
  std::vector<Sequence> orders;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    Sequence begins;
    for (std::int64_t step = 4 * epoch; step < 4 * (epoch + 1); ++step) {
      for (std::int64_t index = 0; index < 2; ++index) {
        const Sequence tokens = read(*source, 4, step, index);
        EXPECT_EQ(tokens[4], tokens[0] + 4);
        begins.push_back(tokens[0]);
      }
    }
    EXPECT_EQ(std::set<std::int64_t>(begins.begin(), begins.end()), all) << "epoch " << epoch;
    orders.push_back(begins);
  }
  EXPECT_NE(orders[0], orders[1]);
  EXPECT_NE(orders[1], orders[2]);
  options.seed = 1;
  const auto other = open_data(options);
  Sequence begins;
  for (std::int64_t number = 0; number < 8; ++number) {
    begins.push_back(read(*other, 4, number / 2, number % 2)[0]);
  }
  EXPECT_NE(begins, orders[0]) << "another seed";
}

TEST_F(DataFiles, AnEpochLeavesOutWhatFillsNoBatch) {
  DataOptions options{{write_count("a.txt", 0, 33)}, 256, 4, 3};
  options.order = DataOrder::kEpochs;
  EXPECT_EQ(count_sequences(options), 8);
  const auto source = open_data(options);
  std::set<std::set<std::int64_t>> taken;
  for (std::int64_t epoch = 0; epoch < 4; ++epoch) {
    std::set<std::int64_t> begins;
    for (std::int64_t step = 2 * epoch; step < 2 * (epoch + 1); ++step) {
      for (std::int64_t index = 0; index < 3; ++index) {
        begins.insert(read(*source, 4, step, index)[0]);
      }
    }
    EXPECT_EQ(begins.size(), 6U);
    taken.insert(begins);
  }
  EXPECT_GT(taken.size(), 1U) << "others in every epoch";
  options.batch = 9;
  EXPECT_NE(opening_error(options).find("has 8 sequences of 4 tokens, fewer than one batch of 9"),
            std::string::npos);
}

TEST_F(DataFiles, WhatIsGeneratedHasNoEndAndIsNotMixed) {
  EXPECT_EQ(count_sequences({{"demo"}, 64, 4, 1}), 0);
  EXPECT_EQ(count_sequences({{"random"}, 64, 4, 1}), 0);
  EXPECT_EQ(opening_error({{write_count("a.txt", 0, 9), "demo"}, 64, 4, 1}),
            "data: demo is generated and cannot be mixed with other sources; give it alone");
}

TEST(EpochOrder, IsAPermutationForEveryCount) {
  for (std::uint64_t count = 1; count <= 70; ++count) {
    const EpochOrder order(7, count);
    std::set<std::uint64_t> seen;
    for (std::uint64_t place = 0; place < count; ++place) {
      seen.insert(order.at(3, place));
    }
    EXPECT_EQ(seen.size(), count);
    EXPECT_LT(*seen.rbegin(), count);
  }
}

// Numbers of a run are a format: these must not change.
TEST(EpochOrder, StaysWhatItIs) {
  const EpochOrder order(0, 10);
  Sequence first;
  for (std::uint64_t place = 0; place < 10; ++place) {
    first.push_back(static_cast<std::int64_t>(order.at(0, place)));
  }
  EXPECT_EQ(first, (Sequence{5, 8, 1, 3, 6, 0, 4, 9, 7, 2}));
  EXPECT_THROW(order.at(0, 10), InternalError);
}

// Each place has each number equally often: a chi-square of 9 * 9 degrees of freedom stays below
// 81 + 5 * sqrt(162) for fair draws. The seed is fixed, so this is one draw.
TEST(EpochOrder, IsFair) {
  constexpr std::uint64_t kCount = 10;
  constexpr std::uint64_t kEpochs = 2000;
  std::vector<double> seen(kCount * kCount);
  const EpochOrder order(0, kCount);
  for (std::uint64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (std::uint64_t place = 0; place < kCount; ++place) {
      seen[place * kCount + order.at(epoch, place)] += 1;
    }
  }
  const double expected = static_cast<double>(kEpochs) / kCount;
  double chi_square = 0;
  for (const double count : seen) {
    chi_square += (count - expected) * (count - expected) / expected;
  }
  EXPECT_LT(chi_square, 145);
}

}  // namespace
}  // namespace tessera::models
