#include "tessera/checkpoint/safetensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/checkpoint/file_size_limit.h"
#include "tests/checkpoint/safetensors_file.h"
#include "tests/support/temporary_directory.h"

namespace tessera::checkpoint {
namespace {

using testing::file_text;
using testing::FileSizeLimit;
using testing::read_text;
using testing::TemporaryDirectory;
using testing::write_text;

std::vector<std::byte> some_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  }
  return bytes;
}

std::vector<std::byte> read_all(const SafetensorsReader& reader, const std::string& name) {
  std::vector<std::byte> bytes(reader.find(name)->bytes());
  reader.read(name, 0, bytes);
  return bytes;
}

template <typename Exception, typename Work>
std::string message_of(Work work) {
  try {
    work();
  } catch (const Exception& e) {
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << "one line";
    return e.what();
  }
  return "nothing was thrown";
}

std::size_t num_files(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder),
                                                std::filesystem::directory_iterator()));
}

TEST(Safetensors, AFileIsTheReferenceFormatByteForByte) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "a.safetensors";
  SafetensorsWriter writer(
      path,
      {{"w", DType::kFloat32, {2, 1}}, {"b", DType::kBFloat16, {3}}, {"s", DType::kUInt8, {}}},
      {{"format", "pt"}});
  const char data[] = "\0\1\2\3\4\5\6\7\10\11\12\13\14\15\16";
  writer.append(data, 15);
  writer.finish();
  std::string header = R"({"__metadata__":{"format":"pt"},)"
                       R"("w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},)"
                       R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[8,14]},)"
                       R"("s":{"dtype":"U8","shape":[],"data_offsets":[14,15]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  EXPECT_EQ(read_text(path), file_text(header, 15));
}

TEST(Safetensors, WhatIsWrittenInAnyPiecesIsRead) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "a.safetensors";
  const std::vector<TensorEntry> entries = {
      {"zeta", DType::kFloat32, {300, 400}}, {"alpha", DType::kFloat16, {7}},
      {"none", DType::kFloat64, {0, 5}},     {"q\"\\\n\u00e9", DType::kInt64, {3}},
      {"i", DType::kInt32, {1, 1, 1}},       {"d", DType::kFloat64, {2}},
      {"brain", DType::kBFloat16, {5, 3}},   {"", DType::kUInt8, {4}}};
  std::size_t total = 0;
  for (const TensorEntry& entry : entries) {
    total += entry.bytes();
  }
  EXPECT_EQ(total, 300U * 400 * 4 + 14 + 0 + 24 + 4 + 16 + 30 + 4);
  const auto bytes = some_bytes(total);
  for (const std::size_t piece : {std::size_t{1000}, std::size_t{300'000}, total}) {
    SafetensorsWriter writer(path, entries, {{"key", "a \"value\""}, {"other", ""}});
    for (std::size_t begin = 0; begin < total; begin += piece) {
      writer.append(bytes.data() + begin, std::min(piece, total - begin));
    }
    writer.append(nullptr, 0);
    writer.finish();

    const SafetensorsReader reader(path);
    EXPECT_EQ(reader.metadata().at("key"), "a \"value\"");
    EXPECT_EQ(reader.metadata().size(), 2U);
    ASSERT_EQ(reader.entries().size(), entries.size());
    std::size_t begin = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const TensorEntry& entry = reader.entries()[i];
      EXPECT_EQ(entry.name, entries[i].name);
      EXPECT_EQ(entry.dtype, entries[i].dtype);
      EXPECT_EQ(entry.shape, entries[i].shape);
      EXPECT_EQ(reader.find(entry.name), &entry);
      const auto read = read_all(reader, entry.name);
      EXPECT_TRUE(std::equal(read.begin(), read.end(), bytes.begin() + begin)) << entry.name;
      begin += entry.bytes();
    }
    EXPECT_EQ(begin, total);
  }
  EXPECT_EQ(num_files(folder.path()), 1U) << "nothing beside the target is left";
}

TEST(Safetensors, AnyRangeOfATensorCanBeRead) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "a.safetensors";
  const auto bytes = some_bytes(60);
  SafetensorsWriter writer(path, {{"a", DType::kUInt8, {20}}, {"b", DType::kFloat32, {10}}});
  writer.append(bytes.data(), bytes.size());
  writer.finish();
  const SafetensorsReader reader(path);
  for (std::size_t begin = 0; begin <= 40; ++begin) {
    std::vector<std::byte> out(40 - begin);
    reader.read("b", begin, out);
    EXPECT_TRUE(std::equal(out.begin(), out.end(), bytes.begin() + 20 + begin)) << begin;
  }
  std::vector<std::byte> out(2);
  EXPECT_THROW(reader.read("b", 39, out), InternalError);
  EXPECT_THROW(reader.read("b", 41, std::span(out).first(0)), InternalError);
  EXPECT_EQ(reader.find("c"), nullptr);
  const std::string message = message_of<ConfigError>([&] { reader.read("c", 0, out); });
  EXPECT_NE(message.find("no tensor \"c\" among its 2"), std::string::npos) << message;
}

TEST(Safetensors, AFileWithoutTensorsIsAFile) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "empty.safetensors";
  SafetensorsWriter(path, {}).finish();
  EXPECT_EQ(read_text(path), file_text("{}      ", 0));
  EXPECT_TRUE(SafetensorsReader(path).entries().empty());
}

TEST(Safetensors, FilesOfOthersAreReadInTheOrderOfTheirBytes) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "a.safetensors";
  // Header order against file order, fields in another order, white space, no padding.
  write_text(path,
             file_text("{ \"b\" : {\"data_offsets\":[4,6], \"dtype\":\"U8\", \"shape\":[2]},\n"
                       "\"none\":{\"dtype\":\"I32\",\"shape\":[0],\"data_offsets\":[4,4]},"
                       "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
                       6));
  const SafetensorsReader reader(path);
  ASSERT_EQ(reader.entries().size(), 3U);
  EXPECT_EQ(reader.entries()[0].name, "a");
  EXPECT_EQ(reader.entries()[1].name, "none");
  EXPECT_EQ(reader.entries()[2].name, "b");
  EXPECT_EQ(read_all(reader, "b"), (std::vector<std::byte>{std::byte{4}, std::byte{5}}));
  SafetensorsReader moved(path);
  const SafetensorsReader taken(std::move(moved));
  EXPECT_EQ(taken.entries().size(), 3U);
}

TEST(SafetensorsWriter, TheTargetIsTheOldFileUntilFinish) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "a.safetensors";
  write_text(path, "old");
  const float value = 1;
  {
    SafetensorsWriter writer(path, {{"w", DType::kFloat32, {1}}});
    writer.append(&value, 2);
    EXPECT_EQ(num_files(folder.path()), 2U);
    EXPECT_THROW(writer.finish(), InternalError) << "half of the bytes";
    EXPECT_THROW(writer.append(&value, 3), InternalError) << "more than were announced";
  }
  EXPECT_EQ(read_text(path), "old");
  EXPECT_EQ(num_files(folder.path()), 1U);
  // Two writers at once do not meet; the last one to finish wins.
  SafetensorsWriter first(path, {{"w", DType::kFloat32, {1}}});
  SafetensorsWriter second(path, {});
  first.append(&value, sizeof(value));
  second.finish();
  EXPECT_EQ(read_text(path), file_text("{}      ", 0));
  first.finish();
  EXPECT_EQ(SafetensorsReader(path).entries().size(), 1U);
  EXPECT_THROW(first.finish(), InternalError);
  EXPECT_EQ(num_files(folder.path()), 1U);
}

TEST(SafetensorsWriter, RefusesWhatTheFormatCannotSay) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "a.safetensors";
  const auto refused = [&path](std::vector<TensorEntry> entries,
                               std::map<std::string, std::string> metadata = {}) {
    return message_of<ConfigError>([&] { SafetensorsWriter(path, entries, metadata); });
  };
  EXPECT_EQ(refused({{"w", DType::kFloat32, {1}}, {"w", DType::kFloat32, {1}}}),
            "tensor \"w\": a safetensors file can hold the name only once");
  EXPECT_EQ(refused({{"__metadata__", DType::kFloat32, {1}}}),
            "tensor \"__metadata__\": a safetensors file can hold the name only once, for the "
            "metadata");
  EXPECT_EQ(refused({{"w", DType::kFloat32, {4, -1}}}),
            "tensor \"w\": shape [4, -1] has a negative dim, or more bytes than a number holds");
  constexpr std::int64_t kHuge = std::int64_t{1} << 61;
  EXPECT_NE(refused({{"w", DType::kFloat32, {kHuge}}}).find("more bytes"), std::string::npos);
  EXPECT_NE(refused({{"v", DType::kUInt8, {kHuge, 2}}, {"w", DType::kUInt8, {kHuge, 2}}})
                .find("too many for one file"),
            std::string::npos);
  EXPECT_EQ(refused({{"w\xff", DType::kUInt8, {1}}}),
            "tensor name \"w\\xff\" is not UTF-8, as safetensors needs");
  EXPECT_NE(refused({}, {{"k", "\xc0"}}).find("metadata value"), std::string::npos);
  EXPECT_EQ(num_files(folder.path()), 0U);
}

TEST(SafetensorsWriter, NamesTheFileAndTheRemedyWhereItCannotWrite) {
  const TemporaryDirectory folder;
  const std::string missing = folder.path() / "none" / "a.safetensors";
  EXPECT_EQ(message_of<IoError>([&] { SafetensorsWriter(missing, {}); }),
            missing +
                ": cannot write: No such file or directory; check the name, and that its folder "
                "exists");
  EXPECT_EQ(message_of<IoError>([&] { SafetensorsWriter(folder.path(), {}); }),
            folder.path().string() +
                ": exists and is not a regular file; name a file that may be replaced");
  EXPECT_THROW(SafetensorsWriter("/dev/null", {}), IoError) << "renaming would replace the device";
}

TEST(SafetensorsWriter, NamesAFolderThatMayNotBeWrittenTo) {
  if (::geteuid() == 0) {
    GTEST_SKIP() << "root may write into every folder";
  }
  const TemporaryDirectory folder;
  std::filesystem::create_directory(folder.path() / "locked");
  ::chmod((folder.path() / "locked").c_str(), 0500);
  EXPECT_NE(message_of<IoError>([&] {
              SafetensorsWriter(folder.path() / "locked" / "a.safetensors", {});
            }).find("Permission denied; check the permissions"),
            std::string::npos);
}

TEST(SafetensorsWriter, AFullDiskLeavesTheOldFileAndNothingElse) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "a.safetensors";
  write_text(path, "old");
  constexpr std::size_t kTotal = 3 << 20;
  const auto bytes = some_bytes(1 << 20);
  std::string large, late;
  {
    const FileSizeLimit limit(2'500'000);
    SafetensorsWriter writer(path, {{"w", DType::kUInt8, {kTotal}}});
    writer.append(bytes.data(), bytes.size());
    writer.append(bytes.data(), bytes.size());
    large = message_of<IoError>([&] { writer.append(bytes.data(), bytes.size()); });
    EXPECT_THROW(writer.append(bytes.data(), 1), InternalError);
    EXPECT_THROW(writer.finish(), InternalError);
    // What was only collected so far fails in finish().
    const FileSizeLimit lower(50);
    SafetensorsWriter small(path, {{"w", DType::kUInt8, {100}}});
    small.append(bytes.data(), 100);
    late = message_of<IoError>([&] { small.finish(); });
  }
  EXPECT_EQ(large.find(path + ": cannot write the next "), 0U) << large;
  EXPECT_NE(large.find("; free some space, or choose a folder on another disk (2097152 of 3145728 "
                       "bytes of tensors had come)"),
            std::string::npos)
      << large;
  EXPECT_NE(late.find("(100 of 100 bytes of tensors had come)"), std::string::npos) << late;
  EXPECT_EQ(read_text(path), "old");
  EXPECT_EQ(num_files(folder.path()), 1U);
}

}  // namespace
}  // namespace tessera::checkpoint
