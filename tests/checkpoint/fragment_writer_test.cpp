// Files whose tensors come in any order: every reader of the format finds every byte, and a file
// that was not finished is none.
#include "tessera/checkpoint/fragment_writer.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <fstream>
#include <ios>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/checkpoint/checksum.h"
#include "tessera/core/error.h"
#include "testing/fault_engine.h"
#include "tests/support/expect_names.h"
#include "tests/support/temporary_directory.h"

namespace tessera::checkpoint {
namespace {

using testing::FaultEngine;
using testing::IoCall;
using testing::IoFault;
using tier::kBlockBytes;

std::unique_ptr<FaultEngine> small_engine(tier::IoKind kind = tier::IoKind::kThreads) {
  tier::IoOptions options;
  options.kind = kind;
  options.num_threads = 2;
  return std::make_unique<FaultEngine>(tier::make_io_engine(options, [](const std::string&) {}));
}

std::vector<std::byte> bytes_of_tensor(const TensorEntry& entry, std::size_t number) {
  std::vector<std::byte> bytes(entry.bytes());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(((number + 1) * 7919 + i * 0x9E3779B97F4A7C15ULL) >> 56);
  }
  return bytes;
}

// Nothing, a byte, less and more than a block, larger than all of the staging; every type.
std::vector<TensorEntry> odd_entries() {
  return {{"a", DType::kUInt8, {1}},
          {"none", DType::kFloat32, {0, 5}},
          {"large", DType::kFloat32, {50001}},
          {"block", DType::kUInt8, {4096}},
          {"b \"quoted\"", DType::kBFloat16, {3, 333}},
          {"scalar", DType::kFloat64, {}},
          {"last", DType::kFloat16, {12345}}};
}

struct FragmentCase {
  std::vector<TensorEntry> entries = odd_entries();
  std::vector<std::size_t> order;  // empty: as they are
  std::size_t staging_bytes = 4 * kBlockBytes;
  std::size_t piece_bytes = 5000;
  tier::DirectIo direct = tier::DirectIo::kAuto;
};

void append_all(FragmentWriter& writer, const FragmentCase& test) {
  std::vector<std::size_t> order = test.order;
  if (order.empty()) {
    order.resize(test.entries.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
  }
  for (const std::size_t i : order) {
    const std::vector<std::byte> bytes = bytes_of_tensor(test.entries[i], i);
    writer.begin(i);
    for (std::size_t begin = 0; begin < bytes.size(); begin += test.piece_bytes) {
      writer.append(
          std::span(bytes).subspan(begin, std::min(test.piece_bytes, bytes.size() - begin)));
    }
  }
}

void expect_file(const std::string& path, const FragmentWriter& writer, const FragmentCase& test) {
  EXPECT_EQ(std::filesystem::file_size(path), writer.file_bytes());
  const SafetensorsReader reader(path);
  ASSERT_EQ(reader.entries().size(), test.entries.size());
  for (std::size_t i = 0; i < test.entries.size(); ++i) {
    const TensorEntry& entry = test.entries[i];
    const TensorEntry* const found = reader.find(entry.name);
    ASSERT_NE(found, nullptr) << entry.name;
    EXPECT_EQ(found->dtype, entry.dtype);
    EXPECT_EQ(found->shape, entry.shape);
    const std::vector<std::byte> expected = bytes_of_tensor(entry, i);
    std::vector<std::byte> bytes(expected.size());
    reader.read(entry.name, 0, bytes);
    EXPECT_TRUE(bytes == expected) << entry.name;
    EXPECT_EQ(writer.written(i).xxh3, xxh3(expected)) << entry.name;
    // Where it says it is.
    std::ifstream file(path, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(writer.written(i).offset));
    file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    EXPECT_TRUE(file.good() && bytes == expected) << entry.name;
  }
}

class FragmentWriterTest : public ::testing::Test {
 protected:
  void write(const FragmentCase& test) { write(test, next_path()); }
  void write(const FragmentCase& test, const std::string& path) {
    FragmentWriter writer(path, test.entries, {engine_.get(), test.staging_bytes, test.direct});
    append_all(writer, test);
    writer.finish();
    expect_file(path, writer, test);
  }
  std::string next_path() {
    return (directory_.path() / ("file-" + std::to_string(num_files_++))).string();
  }

  testing::MemoryDirectory directory_;
  testing::DiskDirectory disk_;
  std::unique_ptr<FaultEngine> engine_ = small_engine();
  int num_files_ = 0;
};

TEST_F(FragmentWriterTest, WritesWhatEveryReaderTakesInWhateverOrderItComes) {
  for (const std::vector<std::size_t>& order :
       {std::vector<std::size_t>{}, {6, 5, 4, 3, 2, 1, 0}, {1, 3, 5, 0, 2, 4, 6}}) {
    FragmentCase test;
    test.order = order;
    write(test);
  }
}

TEST_F(FragmentWriterTest, TakesPiecesOfAnySizeThroughStagingOfAnySize) {
  for (const std::size_t staging_bytes : {std::size_t{0}, 9 * kBlockBytes, 1000 * kBlockBytes}) {
    for (const std::size_t piece_bytes : {std::size_t{777}, kBlockBytes, std::size_t{1} << 20}) {
      FragmentCase test;
      test.staging_bytes = staging_bytes;
      test.piece_bytes = piece_bytes;
      write(test);
    }
  }
}

TEST_F(FragmentWriterTest, WritesTheSameWithAndWithoutThePageCache) {
  for (const tier::IoKind kind : {tier::IoKind::kThreads, tier::IoKind::kAuto}) {
    engine_ = small_engine(kind);
    for (const tier::DirectIo direct : {tier::DirectIo::kOff, tier::DirectIo::kAuto}) {
      FragmentCase test;
      test.direct = direct;
      write(test, (disk_.path() / std::to_string(num_files_++)).string());
    }
  }
}

TEST_F(FragmentWriterTest, WritesAFileWithoutTensors) {
  FragmentCase test;
  test.entries = {};
  write(test);
  test.entries = {{"none", DType::kFloat32, {0}}};
  write(test);
}

// More names than a staging buffer holds, and offsets with every number of digits.
TEST_F(FragmentWriterTest, KeepsEnoughRoomForTheHeaderOfAnyOrder) {
  FragmentCase test;
  test.entries.clear();
  for (int i = 0; i < 300; ++i) {
    test.entries.push_back(
        {std::string(static_cast<std::size_t>(i), 'n') + std::to_string(i), DType::kUInt8, {i}});
  }
  write(test);
  test.order.resize(test.entries.size());
  std::iota(test.order.rbegin(), test.order.rend(), std::size_t{0});
  write(test);
}

TEST_F(FragmentWriterTest, FillsABufferWhileTheOthersAreWritten) {
  FragmentCase test;
  test.entries = {{"w", DType::kUInt8, {8 * 4096}}};
  const std::string path = next_path();
  engine_->set_nth(IoCall::kWrite, 0, IoFault::kHold);
  engine_->set_nth(IoCall::kWrite, 1, IoFault::kHold);
  FragmentWriter writer(path, test.entries, {engine_.get(), test.staging_bytes});
  const std::vector<std::byte> bytes = bytes_of_tensor(test.entries[0], 0);
  writer.begin(0);
  writer.append(std::span(bytes).first(4 * kBlockBytes));  // blocks only if none may be in flight
  EXPECT_EQ(engine_->num_held(), 2U);
  EXPECT_EQ(engine_->seen().size(), 4U);
  engine_->release();
  writer.append(std::span(bytes).subspan(4 * kBlockBytes));
  writer.finish();
  expect_file(path, writer, test);
}

TEST_F(FragmentWriterTest, LeavesNoHeaderBeforeEverythingElseIsWritten) {
  FragmentCase test;
  const std::string path = next_path();
  {
    FragmentWriter writer(path, test.entries, {engine_.get(), test.staging_bytes});
    append_all(writer, test);
    EXPECT_EQ(std::filesystem::file_size(path) % kBlockBytes, 0U);
    EXPECT_GE(std::filesystem::file_size(path), writer.file_bytes());
  }
  EXPECT_THROW(const SafetensorsReader reader(path), CorruptError);
  for (const testing::SeenIo& io : engine_->seen()) {
    EXPECT_GT(io.offset, 0U);
  }
}

TEST_F(FragmentWriterTest, FailsWithThePathWhicheverWriteFails) {
  FragmentCase test;
  test.staging_bytes = 40 * kBlockBytes;
  write(test);
  const std::size_t num_writes = engine_->seen().size();
  ASSERT_GT(num_writes, 4U);
  for (const IoFault fault : {IoFault::kFail, IoFault::kShort}) {
    for (std::size_t n = 0; n < num_writes; ++n) {
      engine_ = small_engine();
      engine_->set_nth(IoCall::kWrite, n, fault);
      const std::string path = next_path();
      {
        FragmentWriter writer(path, test.entries, {engine_.get(), test.staging_bytes});
        const auto append_and_finish = [&] {
          append_all(writer, test);
          writer.finish();
        };
        support::expect_names<IoError>(append_and_finish, path);
        EXPECT_EQ(engine_->num_faults(), 1U);
      }
      if (fault == IoFault::kFail || n + 1 < num_writes) {
        EXPECT_THROW(const SafetensorsReader reader(path), CorruptError) << n;
      }
    }
  }
}

TEST_F(FragmentWriterTest, KeepsTheFirstFailure) {
  FragmentCase test;
  test.entries = {{"w", DType::kUInt8, {8 * 4096}}};
  engine_->set_nth(IoCall::kWrite, 2, IoFault::kFail);
  const std::string path = next_path();
  FragmentWriter writer(path, test.entries, {engine_.get(), test.staging_bytes});
  const std::vector<std::byte> bytes = bytes_of_tensor(test.entries[0], 0);
  writer.begin(0);
  writer.append(std::span(bytes).first(6 * kBlockBytes));
  support::expect_names<IoError>([&] { writer.append(std::span(bytes).subspan(6 * kBlockBytes)); },
                                 "tensor \"w\"");
  EXPECT_THROW(writer.append(std::span(bytes).subspan(6 * kBlockBytes)), IoError) << "again";
}

// A part of a tensor that one of several threads brings.
struct Part {
  FilePlace place;
  std::span<const std::byte> bytes;
};

// Places for all tensors, in pieces of which no two threads bring the same.
std::vector<Part> place_all(FragmentWriter& writer, const FragmentCase& test,
                            const std::vector<std::vector<std::byte>>& contents) {
  std::vector<Part> parts;
  for (std::size_t i = 0; i < contents.size(); ++i) {
    writer.begin(i);
    for (std::size_t begin = 0; begin < contents[i].size(); begin += test.piece_bytes) {
      const auto bytes =
          std::span(contents[i])
              .subspan(begin, std::min(test.piece_bytes, contents[i].size() - begin));
      parts.push_back({writer.place(bytes.size()), bytes});
    }
  }
  return parts;
}

TEST_F(FragmentWriterTest, TakesBytesThatHaveTheirPlacesFromSeveralThreads) {
  FragmentCase test;
  std::vector<std::vector<std::byte>> contents;
  for (std::size_t i = 0; i < test.entries.size(); ++i) {
    contents.push_back(bytes_of_tensor(test.entries[i], i));
  }
  for (const std::size_t staging_bytes : {std::size_t{0}, 20 * kBlockBytes}) {
    const std::string path = next_path();
    FragmentWriter writer(path, test.entries, {engine_.get(), staging_bytes});
    const std::vector<Part> parts = place_all(writer, test, contents);
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
      for (std::size_t i = next++; i < parts.size(); i = next++) {
        const std::size_t half = parts[i].bytes.size() / 2;
        writer.fill(parts[i].place, 0, parts[i].bytes.first(half));
        writer.fill(parts[i].place, half, parts[i].bytes.subspan(half));
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back(work);
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_THROW(writer.fill(parts[0].place, 0, std::span(contents[2]).first(2)), InternalError)
        << "more than there is room for";
    writer.finish();
    const SafetensorsReader reader(path);
    for (std::size_t i = 0; i < contents.size(); ++i) {
      std::vector<std::byte> bytes(contents[i].size());
      reader.read(test.entries[i].name, 0, bytes);
      EXPECT_TRUE(bytes == contents[i]) << test.entries[i].name;
    }
  }
}

TEST_F(FragmentWriterTest, EndsThoseThatWaitForBytesThatNeverCome) {
  FragmentCase test;
  test.entries = {{"w", DType::kUInt8, {8 * 4096}}};
  FragmentWriter writer(next_path(), test.entries, {engine_.get(), test.staging_bytes});
  const std::vector<std::byte> bytes = bytes_of_tensor(test.entries[0], 0);
  writer.begin(0);
  std::ignore = writer.place(4 * kBlockBytes);  // of whom nobody brings anything
  const FilePlace rest = writer.place(4 * kBlockBytes);
  std::thread waiting([&] {
    support::expect_names<IoError>(
        [&] { writer.fill(rest, 0, std::span(bytes).subspan(4 * kBlockBytes)); }, "cannot be read");
  });
  writer.fail(std::make_exception_ptr(IoError("it cannot be read")));
  waiting.join();
  EXPECT_THROW(writer.finish(), IoError);
}

TEST_F(FragmentWriterTest, FinishesNoFileWithHoles) {
  const std::vector<TensorEntry> entries = {{"a", DType::kUInt8, {3}}};
  FragmentWriter writer(next_path(), entries, {engine_.get()});
  const std::vector<std::byte> bytes(3);
  writer.begin(0);
  const FilePlace place = writer.place(3);
  writer.fill(place, 1, std::span(bytes).first(2));
  EXPECT_THROW(writer.finish(), InternalError);
}

TEST_F(FragmentWriterTest, SaysAtOnceThatThereIsNoRoom) {
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit small = before;
  small.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string path = next_path();
  support::expect_names<IoError>(
      [&] {
        const FragmentWriter writer(path, {{"w", DType::kFloat32, {1 << 20}}}, {engine_.get()});
      },
      "file-0: cannot reserve 4198400 bytes: this process may not write files larger than 1048576");
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(engine_->seen().empty());
}

TEST_F(FragmentWriterTest, RefusesAPathThatIsTakenAndOneThatCannotBe) {
  FragmentCase test;
  write(test);
  const auto make = [&](const std::string& path) {
    const FragmentWriter writer(path, test.entries, {engine_.get()});
  };
  support::expect_names<IoError>([&] { make((directory_.path() / "file-0").string()); },
                                 "exists already");
  support::expect_names<IoError>([&] { make((directory_.path() / "no/file").string()); },
                                 "check the name, and that its folder exists");
  test.entries.push_back(test.entries.front());
  support::expect_names<ConfigError>([&] { make(next_path()); }, "hold the name only once");
}

TEST_F(FragmentWriterTest, RefusesTensorsThatAreNotWhatWasAnnounced) {
  const std::vector<TensorEntry> entries = {{"a", DType::kUInt8, {3}}, {"b", DType::kUInt8, {1}}};
  FragmentWriter writer(next_path(), entries, {engine_.get()});
  const std::vector<std::byte> bytes(4);
  EXPECT_THROW(writer.append(bytes), InternalError) << "nothing has begun";
  writer.begin(0);
  EXPECT_THROW(writer.append(bytes), InternalError) << "too many";
  writer.append(std::span(bytes).first(2));
  EXPECT_THROW(writer.begin(1), InternalError) << "one is missing";
  EXPECT_THROW(writer.finish(), InternalError);
  writer.append(std::span(bytes).first(1));
  EXPECT_THROW(writer.begin(0), InternalError) << "again";
  EXPECT_THROW(writer.finish(), InternalError) << "b has not come";
  writer.begin(1);
  writer.append(std::span(bytes).first(1));
  writer.finish();
}

}  // namespace
}  // namespace tessera::checkpoint
