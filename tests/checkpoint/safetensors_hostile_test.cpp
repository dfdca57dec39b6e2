// Files that nobody should trust: each is refused with the path and what is wrong, in one line.
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tests/checkpoint/safetensors_file.h"
#include "tests/support/temporary_directory.h"

namespace tessera::checkpoint {
namespace {

using testing::file_text;
using testing::length_field;
using testing::TemporaryDirectory;
using testing::write_text;

class HostileFile : public ::testing::Test {
 protected:
  // The message of a CorruptError without the path that it begins with.
  std::string refusal(const std::string& text) const {
    const std::string path = folder_.path() / "hostile.safetensors";
    write_text(path, text);
    try {
      const SafetensorsReader reader(path);
    } catch (const CorruptError& e) {
      const std::string message = e.what();
      EXPECT_EQ(message.find(path + ": "), 0U) << message;
      for (const char c : message) {
        EXPECT_TRUE(c >= ' ' && c <= '~') << "one printable line: " << message;
      }
      return message.substr(path.size() + 2);
    }
    return "it was read";
  }
  std::string header_refusal(const std::string& header, std::size_t data_bytes = 8) const {
    return refusal(file_text(header, data_bytes));
  }
  // One tensor "w" of these fields.
  std::string tensor_refusal(const std::string& fields, std::size_t data_bytes = 8) const {
    return header_refusal("{\"w\":{" + fields + "}}", data_bytes);
  }

  const TemporaryDirectory folder_;
};

#define EXPECT_SAYS(refused, words) EXPECT_NE((refused).find(words), std::string::npos) << (refused)

TEST_F(HostileFile, ThatIsGoodIsRead) {  // what the cases below are a step away from
  EXPECT_EQ(tensor_refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), "it was read");
  EXPECT_EQ(header_refusal("{}", 0), "it was read");
}

TEST_F(HostileFile, OfTheWrongLength) {
  EXPECT_SAYS(refusal(""), "0 bytes are too few");
  EXPECT_SAYS(refusal("1234567"), "7 bytes are too few");
  EXPECT_SAYS(refusal(length_field(3) + "{}"), "offset 0: a header of 3 bytes in a file of 10");
  EXPECT_SAYS(refusal(length_field(100'000'001) + "{}"),
              "offset 0: a header of 100000001 bytes, at most 100000000 are allowed");
  EXPECT_SAYS(refusal(length_field(~std::uint64_t{0}) + "{}"), "a header of 18446744073709551615");
  EXPECT_SAYS(refusal(length_field(0)), "offset 8: the header does not begin with '{'");
}

TEST_F(HostileFile, ThatIsNotJson) {
  EXPECT_SAYS(header_refusal("hello!!!"), "offset 8: the header does not begin with '{'");
  EXPECT_SAYS(header_refusal(" {}", 0), "offset 8: the header does not begin with '{'");
  EXPECT_SAYS(header_refusal("{\"w\":"), "cannot be read as JSON");
  EXPECT_SAYS(header_refusal("{} x", 0), "offset 11: the header cannot be read as JSON");
  EXPECT_SAYS(header_refusal("{\"\xff\":{}}"), "cannot be read as JSON");
  EXPECT_SAYS(header_refusal(std::string("{}\0\0\0\0\0\0", 8), 0),
              "offset 10: a NUL in the header");
}

TEST_F(HostileFile, WithAHeaderOfAnotherForm) {
  EXPECT_SAYS(header_refusal(R"({"w":1})"), "tensor \"w\": the number 1 where an object belongs");
  EXPECT_SAYS(header_refusal(R"({"w":[]})"), "a list where an object belongs");
  EXPECT_SAYS(header_refusal(R"({"w":null})"), "null where an object");
  EXPECT_SAYS(header_refusal(R"({"__metadata__":{"a":1}})"),
              "__metadata__: the number 1 where text belongs");
  EXPECT_SAYS(header_refusal(R"({"__metadata__":{"a":{}}})"), "an object where text belongs");
  EXPECT_SAYS(header_refusal(R"({"__metadata__":{"a":"","a":""}})"), "key \"a\" comes twice");
  EXPECT_SAYS(tensor_refusal(R"("dtype":true)"), "a boolean where the name of a type belongs");
  EXPECT_SAYS(tensor_refusal(R"("dtype":["F32"])"), "a list where the name of a type belongs");
  EXPECT_SAYS(tensor_refusal(R"("shape":"2")"), "the text \"2\" where a list of numbers belongs");
  EXPECT_SAYS(tensor_refusal(R"("shape":[[2]])"), "a list where a whole number of shape belongs");
  EXPECT_SAYS(tensor_refusal(R"("shape":[2.0])"), "the number 2.0 where a whole number");
  EXPECT_SAYS(tensor_refusal(R"("shape":[1e3])"), "the number 1e3 where a whole number");
  EXPECT_SAYS(tensor_refusal(R"("strides":[1])"), "unknown field \"strides\"");
}

TEST_F(HostileFile, NestedDeeplyCostsNothing) {
  std::string lists = R"({"w":{"shape":)";
  std::string objects = "{";
  for (int i = 0; i < 1'000'000; ++i) {
    lists += '[';
    objects += "\"a\":{";
  }
  EXPECT_SAYS(header_refusal(lists), "a list where a whole number of shape belongs");
  EXPECT_SAYS(header_refusal(objects), "unknown field \"a\"");
}

TEST_F(HostileFile, WithNamesOrFieldsTwice) {
  const std::string w = R"("w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]})";
  EXPECT_SAYS(header_refusal("{" + w + "," + w + "}"), "tensor \"w\": the name comes twice");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"U8","dtype":"U8")"), "dtype comes twice");
  EXPECT_SAYS(tensor_refusal(R"("shape":[8],"shape":[8])"), "shape comes twice");
  EXPECT_SAYS(header_refusal(R"({"__metadata__":{},"__metadata__":{}})"), "comes twice");
}

TEST_F(HostileFile, WithFieldsMissing) {
  EXPECT_SAYS(tensor_refusal(""), "dtype is missing");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","data_offsets":[0,8])"), "shape is missing");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[2])"), "data_offsets is missing");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0])"),
              "data_offsets has 1 numbers, not two");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])"),
              "data_offsets has more than two");
}

TEST_F(HostileFile, OfAnUnknownType) {
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8])"),
              "tensor \"w\": dtype \"F8_E4M3\" is not known; F32, BF16");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"f32","shape":[2],"data_offsets":[0,8])"), "is not known");
}

TEST_F(HostileFile, WithNumbersThatCannotBe) {
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
              "the negative number -2 where a whole number of shape belongs");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"),
              "the negative number -8 where a whole number of data_offsets belongs");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8])"),
              "the number 9223372036854775808 in shape is too large");
  EXPECT_SAYS(
      tensor_refusal(R"("dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,8])"),
      "where a whole number of shape belongs");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[4611686018427387906],"data_offsets":[0,8])"),
              "more bytes than a number holds");  // times four is 8 in 64 bits
  EXPECT_SAYS(
      tensor_refusal(R"("dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0])", 0),
      "more bytes than a number holds");
  std::string dims = "1";
  for (int i = 0; i < 64; ++i) {
    dims += ",1";
  }
  EXPECT_SAYS(tensor_refusal("\"dtype\":\"U8\",\"shape\":[" + dims + "],\"data_offsets\":[0,1]"),
              "shape has more than 64 dims");
}

TEST_F(HostileFile, WithOffsetsThatDoNotFit) {
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
              "data_offsets [8, 0] do not lie in the 8 bytes after the header");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[4],"data_offsets":[0,16])"),
              "data_offsets [0, 16] do not lie in the 8 bytes after the header");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"),
              "tensor \"w\": F32 [3] has 12 bytes, data_offsets [0, 8] have 8");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"F32","shape":[],"data_offsets":[0,8])"),
              "F32 [] has 4 bytes");
}

TEST_F(HostileFile, WithGapsOrOverlaps) {
  EXPECT_SAYS(tensor_refusal(R"("dtype":"U8","shape":[6],"data_offsets":[2,8])"),
              "bytes [0, 2) of the data, before tensor \"w\", belong to no tensor");
  EXPECT_SAYS(tensor_refusal(R"("dtype":"U8","shape":[6],"data_offsets":[0,6])"),
              "bytes [6, 8) of the data, after the last tensor, belong to no tensor");
  EXPECT_SAYS(header_refusal("{}", 8), "bytes [0, 8) of the data, after the last tensor");
  const auto two = [this](const std::string& second) {
    return header_refusal(
        R"({"w":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},"v":{"dtype":"U8",)" + second +
        "}}");
  };
  EXPECT_EQ(two(R"("shape":[3],"data_offsets":[5,8])"), "it was read");
  EXPECT_SAYS(two(R"("shape":[4],"data_offsets":[4,8])"),
              "tensor \"v\" begins at 4 of the data, inside the one before it, which ends at 5");
  EXPECT_SAYS(two(R"("shape":[2],"data_offsets":[6,8])"),
              "bytes [5, 6) of the data, before tensor \"v\", belong to no tensor");
  EXPECT_SAYS(two(R"("shape":[5],"data_offsets":[0,5])"), "begins at 0 of the data, inside");
  EXPECT_SAYS(two(R"("shape":[0],"data_offsets":[2,2])"), "begins at 2 of the data, inside");
}

TEST_F(HostileFile, IsNoFileAtAll) {
  const auto message = [](const std::string& path) -> std::string {
    try {
      const SafetensorsReader reader(path);
    } catch (const IoError& e) {
      return e.what();
    }
    return "it was read";
  };
  const std::string missing = folder_.path() / "missing";
  EXPECT_EQ(message(missing), missing +
                                  ": cannot open: No such file or directory; check the name, "
                                  "and that its folder exists");
  EXPECT_SAYS(message(folder_.path()), "not a regular file");
  const std::string pipe = folder_.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_SAYS(message(pipe), "not a regular file");
}

TEST_F(HostileFile, ThatShrinksWhileItIsOpenIsNoticed) {
  const std::string path = folder_.path() / "shrinks.safetensors";
  const std::string text = file_text(R"({"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})", 8);
  write_text(path, text);
  const SafetensorsReader reader(path);
  std::filesystem::resize_file(path, text.size() - 3);
  std::vector<std::byte> out(8);
  reader.read("w", 0, std::span(out).first(5));
  try {
    reader.read("w", 0, out);
    FAIL() << "bytes that are not there were read";
  } catch (const CorruptError& e) {
    EXPECT_SAYS(std::string(e.what()), "the file has become shorter since it was opened");
  }
}

}  // namespace
}  // namespace tessera::checkpoint
