#include "tessera/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/tier/io_engine.h"
#include "testing/fault_engine.h"
#include "tests/checkpoint/made_checkpoint.h"
#include "tests/checkpoint/manifest_file.h"
#include "tests/checkpoint/safetensors_file.h"
#include "tests/support/contains.h"
#include "tests/support/sizes.h"
#include "tests/support/temporary_directory.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using support::rounds;
using testing::DiskDirectory;
using testing::FaultEngine;
using testing::IoCall;
using testing::IoFault;
using testing::MadeCheckpoint;
using testing::MadeOptions;
using testing::make_checkpoint;
using testing::read_text;
using testing::write_text;

// Sizes that do not divide, of every kind of type; one larger than any staging below.
const std::vector<testing::MadeParam> kParams = {{"h.0.weight", DType::kBFloat16, {7, 5}},
                                                 {"h.0.bias", DType::kUInt8, {3}},
                                                 {"wte", DType::kFloat32, {301, 211}},
                                                 {"scale", DType::kFloat64, {}},
                                                 {"none", DType::kFloat16, {0, 4}}};

std::unique_ptr<tier::IoEngine> thread_engine() {
  return tier::make_io_engine({.kind = tier::IoKind::kThreads, .num_threads = 2}, nullptr);
}

// Reads a range and checks what every piece promises.
std::vector<std::byte> read_range(const CheckpointReader& reader, const StoredTensor& tensor,
                                  std::int64_t begin, std::int64_t numel) {
  std::vector<std::byte> all;
  const std::size_t size = bytes_of(tensor.dtype);
  reader.read(tensor, begin, numel, [&](std::int64_t at, std::span<const std::byte> bytes) {
    EXPECT_EQ(static_cast<std::size_t>(at - begin) * size, all.size()) << "in order";
    EXPECT_EQ(bytes.size() % size, 0U) << "whole elements";
    EXPECT_FALSE(bytes.empty());
    if (at != begin) {
      EXPECT_EQ(static_cast<std::size_t>(at) * size % 8, 0U) << "whole words";
    }
    all.insert(all.end(), bytes.begin(), bytes.end());
  });
  return all;
}

std::span<const std::byte> part_of(const std::vector<std::byte>& bytes, const StoredTensor& tensor,
                                   std::int64_t begin, std::int64_t numel) {
  const std::size_t size = bytes_of(tensor.dtype);
  return std::span(bytes).subspan(static_cast<std::size_t>(begin) * size,
                                  static_cast<std::size_t>(numel) * size);
}

template <typename Exception, typename Work>
std::string message_from(Work work) {
  try {
    work();
  } catch (const Exception& e) {
    for (const char c : std::string(e.what())) {
      EXPECT_TRUE(c >= ' ' && c <= '~') << "one printable line: " << e.what();
    }
    return e.what();
  }
  return "nothing was thrown";
}

void flip(char& byte, std::size_t bit) {
  byte = static_cast<char>(static_cast<unsigned char>(byte) ^ (1U << bit));
}

TEST(CheckpointReader, AnyRangeOfATensorIsReadWhicheverFragmentsItLiesIn) {
  const DiskDirectory folder;
  std::mt19937_64 random(3);
  const auto engine = thread_engine();
  for (const std::int64_t piece : {0, 1, 3, 1000}) {
    const std::vector<testing::MadeParam> small = {{"w", DType::kBFloat16, {97}},
                                                   {"v", DType::kUInt8, {61}}};
    const MadeCheckpoint made =
        make_checkpoint(folder.path(), {.params = piece == 1 ? small : kParams,
                                        .num_ranks = 3,
                                        .piece_numel = piece == 3 ? 4999 : piece});
    const CheckpointReader reader(made.path, {.io = engine.get(), .staging_bytes = 32768});
    EXPECT_EQ(reader.path(), made.path);
    EXPECT_EQ(reader.manifest(), made.manifest);
    for (const StoredParam& param : reader.manifest().params) {
      for (const auto& [name, tensor] : param.tensors) {
        const auto& bytes = made.contents.at(name + " of " + param.name);
        const std::int64_t numel = param.numel();
        EXPECT_EQ(read_range(reader, tensor, 0, numel), bytes) << param.name;
        for (int round = 0; round < rounds(10, 3); ++round) {
          const auto begin = static_cast<std::int64_t>(random() % (numel + 1));
          const auto count = static_cast<std::int64_t>(random() % (numel - begin + 1));
          const auto expected = part_of(bytes, tensor, begin, count);
          const auto read = read_range(reader, tensor, begin, count);
          EXPECT_TRUE(std::equal(read.begin(), read.end(), expected.begin(), expected.end()))
              << name << " of " << param.name << " [" << begin << ", +" << count << ")";
        }
      }
    }
  }
}

TEST(CheckpointReader, WhatRanksHaveForThemselvesIsReadByFragment) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(folder.path(), {.params = kParams, .num_ranks = 3});
  const CheckpointReader reader(folder.path());  // its newest; an engine of its own
  for (unsigned rank = 0; rank < 3; ++rank) {
    std::vector<std::byte> all;
    const auto keep = [&all](std::int64_t begin, std::span<const std::byte> bytes) {
      EXPECT_EQ(begin, 0);
      all.assign(bytes.begin(), bytes.end());
    };
    reader.read(reader.manifest().generators[0].ranks[rank], DType::kUInt8, keep);
    EXPECT_EQ(all, testing::random_bytes(5, 1 + rank));
    reader.read(reader.manifest().buffers[0].ranks[rank], DType::kFloat32, keep);
    EXPECT_EQ(all, testing::random_bytes(12, 51 + rank));
  }
}

TEST(CheckpointReader, SeveralReadsAreInFlightThroughAStagingOfFixedSize) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(
      folder.path(), {.params = {{"w", DType::kFloat32, {100'000}}}, .num_ranks = 1});
  FaultEngine engine(thread_engine());
  const CheckpointReader reader(made.path, {.io = &engine, .staging_bytes = 131072});
  const auto num_reads = [&engine] { return engine.seen().size(); };
  std::vector<std::size_t> reads_at_piece;
  reader.read(reader.manifest().params[0].tensors.at("value"), 0, 100'000,
              [&](std::int64_t, std::span<const std::byte> bytes) {
                EXPECT_LE(bytes.size(), 16384U + 8);
                reads_at_piece.push_back(num_reads());
              });
  ASSERT_GT(reads_at_piece.size(), 20U);
  EXPECT_EQ(reads_at_piece.front(), 8U) << "the first piece comes while seven more are read";
  EXPECT_EQ(reads_at_piece[1], 9U) << "a slot is used again when its piece was looked at";
  for (const auto& seen : engine.seen()) {
    EXPECT_EQ(seen.offset % tier::kBlockBytes, 0U) << "whole blocks";
    EXPECT_LE(seen.bytes, 16384U);
    EXPECT_EQ(seen.what, "tensor \"value\" of parameter \"w\"");
  }
}

TEST(CheckpointReader, TheNextTensorsAreReadWhileOneIsVisited) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(folder.path(), {.params = kParams, .num_ranks = 1});
  FaultEngine engine(thread_engine());
  const CheckpointReader reader(made.path, {.io = &engine, .staging_bytes = 8 << 20});
  std::vector<CheckpointReader::Request> requests;
  std::vector<std::vector<std::byte>> found(2 * kParams.size());
  std::vector<std::size_t> reads_at_piece;
  for (const StoredParam& param : reader.manifest().params) {
    for (const auto& [name, tensor] : param.tensors) {
      const std::size_t number = requests.size();
      requests.push_back({&tensor, 0, param.numel(), [&, number](std::int64_t, auto bytes) {
                            found[number].insert(found[number].end(), bytes.begin(), bytes.end());
                            reads_at_piece.push_back(engine.seen().size());
                          }});
    }
  }
  ASSERT_LE(requests.size(), found.size());
  reader.read(requests);
  std::size_t number = 0;
  for (const StoredParam& param : reader.manifest().params) {
    for (const auto& [name, tensor] : param.tensors) {
      EXPECT_EQ(found[number++], made.contents.at(name + " of " + param.name)) << param.name;
    }
  }
  ASSERT_GT(reads_at_piece.size(), 4U);
  EXPECT_EQ(reads_at_piece.front(), 6U) << "all others are read";
}

// Those who write whole steps get whole steps.
TEST(CheckpointReader, PiecesAreOfWholeStepsWhereThereIsRoomForSeveral) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(
      folder.path(), {.params = {{"odd", DType::kUInt8, {777}}, {"w", DType::kFloat32, {300'001}}},
                      .num_ranks = 1});
  const auto engine = thread_engine();
  const CheckpointReader reader(made.path, {.io = engine.get(), .staging_bytes = 1 << 20});
  const StoredTensor& tensor = reader.manifest().params[1].tensors.at("value");
  std::vector<std::byte> all;
  reader.read(tensor, 2048, 297'953, [&](std::int64_t begin, std::span<const std::byte> bytes) {
    EXPECT_EQ(begin % 2048, 0);
    all.insert(all.end(), bytes.begin(), bytes.end());
  });
  const auto expected = part_of(made.contents.at("value of w"), tensor, 2048, 297'953);
  EXPECT_TRUE(std::equal(all.begin(), all.end(), expected.begin(), expected.end()));
}

TEST(CheckpointReader, AsManyCallersReadAtATimeAsWereAnnounced) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(folder.path(), {.params = kParams, .num_ranks = 3});
  const auto engine = thread_engine();
  const CheckpointReader reader(made.path,
                                {.io = engine.get(), .staging_bytes = 1 << 18, .num_callers = 3});
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (const StoredParam& param : reader.manifest().params) {
        for (const auto& [name, tensor] : param.tensors) {
          EXPECT_EQ(read_range(reader, tensor, 0, param.numel()),
                    made.contents.at(name + " of " + param.name));
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(CheckpointReader, AFailedReadNamesFileAndTensorAndTheReaderGoesOn) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(folder.path(), {.params = kParams});
  FaultEngine engine(thread_engine());
  engine.set_nth(IoCall::kRead, 2, IoFault::kFail);
  const CheckpointReader reader(made.path, {.io = &engine, .staging_bytes = 32768});
  const StoredTensor& tensor = reader.manifest().params[2].tensors.at("exp_avg");
  const std::string message =
      message_from<IoError>([&] { read_range(reader, tensor, 0, 301 * 211); });
  EXPECT_PRED2(contains, message, made.path + "/rank-0.safetensors");
  EXPECT_PRED2(contains, message, "tensor \"exp_avg\" of parameter \"wte\"");
  EXPECT_EQ(read_range(reader, tensor, 0, 301 * 211), made.contents.at("exp_avg of wte"));
}

TEST(CheckpointReader, AFlippedBitInAFragmentThatIsReadWholeIsAnError) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(folder.path(), {.params = kParams});
  const Fragment& fragment = made.manifest.params[2].tensors.at("value").fragments[1];
  const std::string path = made.path + "/rank-1.safetensors";
  std::string text = read_text(path);
  flip(text[fragment.offset + 77'777], 2);
  write_text(path, text);
  const CheckpointReader reader(made.path);  // the form is right
  const StoredTensor& tensor = reader.manifest().params[2].tensors.at("value");
  const std::string message =
      message_from<CorruptError>([&] { read_range(reader, tensor, 0, 301 * 211); });
  EXPECT_PRED2(contains, message,
               path + ": offset " + std::to_string(fragment.offset) +
                   ": tensor \"value\" of parameter \"wte\", elements [31756, "
                   "63511), has the checksum ");
  EXPECT_PRED2(contains, message,
               ", the manifest says " + checksum_text(fragment.xxh3) +
                   "; the file is damaged or not of this save");
  read_range(reader, tensor, 0, 31'756);  // the other fragment is whole
  const auto problems = verify(reader);
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0].file, path);
  EXPECT_PRED2(contains, problems[0].text, "; the file is damaged");
}

TEST(CheckpointReader, WhatItIsAskedForMustBeThere) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(folder.path(), {.params = kParams});
  const CheckpointReader reader(made.path);
  const StoredTensor& tensor = reader.manifest().params[0].tensors.at("value");
  EXPECT_THROW(read_range(reader, tensor, 30, 6), InternalError);
  EXPECT_THROW(read_range(reader, tensor, -1, 1), InternalError);
  EXPECT_THROW(reader.describe({0, 1, 0, 1, 0}), InternalError);
  EXPECT_THROW(reader.read(tensor, 0, 1,
                           [&](std::int64_t, std::span<const std::byte>) {
                             reader.read(tensor, 0, 1, [](std::int64_t, auto) {});
                           }),
               InternalError);
  EXPECT_THROW(CheckpointReader(folder.path() / "none"), ConfigError);
}

TEST(Verify, AWholeCheckpointHasNoProblem) {
  const DiskDirectory folder;
  for (const std::int64_t piece : {0, 1001}) {  // pieces that end inside a word of eight bytes
    const MadeCheckpoint made =
        make_checkpoint(folder.path(), {.params = kParams, .num_ranks = 3, .piece_numel = piece});
    const auto problems = verify(CheckpointReader(made.path));
    EXPECT_TRUE(problems.empty()) << problems[0].file << ": " << problems[0].text;
  }
}

TEST(Verify, EveryFlippedByteOfTensorsIsFoundAndNamed) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(
      folder.path(), {.params = {{"w", DType::kBFloat16, {9}}, {"v", DType::kFloat32, {2}}}});
  const auto engine = thread_engine();
  for (const char* const name : {"/rank-0.safetensors", "/rank-1.safetensors"}) {
    const std::string path = made.path + name;
    const std::string text = read_text(path);
    const std::size_t data = SafetensorsReader(path).data_offset(0);
    for (std::size_t at = data; at < text.size(); ++at) {
      std::string flipped = text;
      flip(flipped[at], at % 8);
      write_text(path, flipped);
      const auto problems =
          verify(CheckpointReader(made.path, {.io = engine.get(), .staging_bytes = 32768}));
      ASSERT_EQ(problems.size(), 1U) << path << ", byte " << at;
      EXPECT_EQ(problems[0].file, path);
    }
    write_text(path, text);
  }
}

TEST(Verify, SeveralProblemsAreAllFound) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(folder.path(), {.params = kParams});
  for (const char* const name : {"/rank-0.safetensors", "/rank-1.safetensors"}) {
    std::string text = read_text(made.path + name);
    flip(text.back(), 0);                                               // of the buffer
    flip(text[SafetensorsReader(made.path + name).data_offset(0)], 0);  // of the generator
    write_text(made.path + name, text);
  }
  EXPECT_EQ(verify(CheckpointReader(made.path)).size(), 4U);
}

TEST(Verify, AWrongContentHashIsFoundThoughEachFragmentIsRight) {
  const DiskDirectory folder;
  const MadeCheckpoint made = make_checkpoint(folder.path(), {.params = kParams});
  const std::string path = made.path + "/manifest.json";
  const std::uint64_t content = made.manifest.params[2].tensors.at("value").content;
  write_text(path, testing::changed(read_text(path), checksum_text(content), checksum_text(1)));
  const auto problems = verify(CheckpointReader(made.path));
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0].file, path);
  EXPECT_PRED2(contains, problems[0].text,
               "tensor \"value\" of parameter \"wte\": the whole has the content hash " +
                   checksum_text(content) + ", the manifest says 0000000000000001");
}

class DamagedCheckpoint : public ::testing::Test {
 protected:
  std::string file(int rank) const {
    return made_.path + "/rank-" + std::to_string(rank) + ".safetensors";
  }
  std::string refusal() const {
    return message_from<CorruptError>([&] { CheckpointReader reader(made_.path); });
  }

  const DiskDirectory folder_;
  const MadeCheckpoint made_ = make_checkpoint(folder_.path(), {.params = kParams});
};

TEST_F(DamagedCheckpoint, WithAFileMissingNamesIt) {
  fs::remove(file(1));
  EXPECT_EQ(refusal(), file(1) +
                           ": the file is missing; copy the whole checkpoint again, or load "
                           "another save");
  fs::create_directory(file(1));
  EXPECT_PRED2(contains, refusal(), file(1) + ": not a regular file");
}

TEST_F(DamagedCheckpoint, WithAFileCutShortNamesIt) {
  const std::uint64_t bytes = fs::file_size(file(0));
  fs::resize_file(file(0), bytes - 1);
  EXPECT_EQ(refusal(), file(0) + ": has " + std::to_string(bytes - 1) +
                           " bytes, the manifest says " + std::to_string(bytes) +
                           "; the file was cut short; copy it again, or load another save");
  fs::resize_file(file(0), bytes + 1);
  EXPECT_PRED2(contains, refusal(), "the file is of another save or rank, or damaged");
}

TEST_F(DamagedCheckpoint, WithAForeignFileOfTheSameSizeNamesIt) {
  std::string text = read_text(file(0));
  write_text(file(0), std::string(text.size(), 'x'));
  EXPECT_PRED2(contains, refusal(), file(0) + ": offset 0: a header of ");
  // A safetensors file with one tensor that has all of the bytes.
  const std::size_t data = text.size() - 200;
  std::string header = "{\"x\":{\"dtype\":\"U8\",\"shape\":[" + std::to_string(data) +
                       "],\"data_offsets\":[0," + std::to_string(data) + "]}}";
  header.resize(192, ' ');
  write_text(file(0), testing::file_text(header, data));
  EXPECT_PRED2(contains, refusal(), file(0) + ": no tensor begins at offset ");
  EXPECT_PRED2(contains, refusal(),
               "where the manifest has tensor \"cpu\" of rank 0; the file is "
               "of another save or rank, or damaged");
}

TEST_F(DamagedCheckpoint, WithAFlippedBitInAHeaderIsRefusedOrReadsTheSame) {
  // What the manifest does not need, such as a name, may change unseen; nothing else.
  const std::string text = read_text(file(0));
  const std::size_t data = SafetensorsReader(file(0)).data_offset(0);
  const auto engine = thread_engine();
  std::size_t num_refused = 0;
  for (std::size_t at = 0; at < data; at += rounds(11, 37)) {
    std::string flipped = text;
    flip(flipped[at], at % 7);
    write_text(file(0), flipped);
    try {
      const CheckpointReader reader(made_.path, {.io = engine.get(), .staging_bytes = 32768});
      EXPECT_EQ(read_range(reader, reader.manifest().params[0].tensors.at("value"), 0, 35),
                made_.contents.at("value of h.0.weight"));
    } catch (const CorruptError& e) {
      EXPECT_PRED2(contains, e.what(), file(0));
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, data / rounds(22, 74));
}

TEST_F(DamagedCheckpoint, WithFilesSwappedBetweenRanksNamesThem) {
  // Of different form: seen at once.
  fs::rename(file(0), file(9));
  fs::rename(file(1), file(0));
  fs::rename(file(9), file(1));
  EXPECT_PRED2(contains, refusal(), file(0) + ": has ");
  // Of the same form: seen by their bytes, which are each other's.
  const MadeCheckpoint made =
      make_checkpoint(folder_.path(), {.params = {{"w", DType::kFloat32, {10, 10}}}});
  const std::string a = made.path + "/rank-0.safetensors", b = made.path + "/rank-1.safetensors";
  ASSERT_EQ(fs::file_size(a), fs::file_size(b));
  fs::rename(a, made.path + "/c");
  fs::rename(b, a);
  fs::rename(made.path + "/c", b);
  const CheckpointReader reader(made.path);
  EXPECT_PRED2(contains, message_from<CorruptError>([&] {
                 read_range(reader, reader.manifest().params[0].tensors.at("value"), 0, 100);
               }),
               a + ": offset ");
  const auto problems = verify(reader);
  EXPECT_EQ(problems.size(), 2U * 4);
  EXPECT_PRED2(contains, problems[0].text,
               "; these are the bytes of tensor \"exp_avg\" of parameter \"w\" in " + b +
                   ": were the files swapped?");
}

TEST_F(DamagedCheckpoint, WithAFileOfAnotherSaveOfTheSameRunIsFound) {
  const MadeCheckpoint other = make_checkpoint(folder_.path(), {.params = kParams, .seed = 2});
  fs::copy_file(other.path + "/rank-1.safetensors", file(1), fs::copy_options::overwrite_existing);
  const auto problems = verify(CheckpointReader(made_.path));
  ASSERT_FALSE(problems.empty());
  for (const VerifyProblem& problem : problems) {
    EXPECT_EQ(problem.file, file(1));
  }
}

TEST_F(DamagedCheckpoint, WithAFileThatShrinksWhileItIsReadIsNoticed) {
  const CheckpointReader reader(made_.path);
  const StoredTensor& tensor = reader.manifest().params[2].tensors.at("value");
  read_range(reader, tensor, 0, 1);
  fs::resize_file(file(1), fs::file_size(file(1)) / 2);
  EXPECT_THROW(read_range(reader, tensor, 0, 301 * 211), Error);
  const auto problems = verify(reader);
  ASSERT_FALSE(problems.empty());
  EXPECT_EQ(problems[0].file, file(1));
}

}  // namespace
}  // namespace tessera::checkpoint
