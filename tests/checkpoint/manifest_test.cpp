#include "tessera/checkpoint/manifest.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/checkpoint/checksum.h"
#include "tessera/core/error.h"
#include "tests/checkpoint/manifest_file.h"
#include "tests/support/contains.h"
#include "tests/support/read_whole.h"
#include "tests/support/sizes.h"

namespace tessera::checkpoint {
namespace {

using testing::changed;
using testing::some_manifest;
using testing::with_end;
using testing::without_end;

// The message of a CorruptError without the path that it begins with.
std::string manifest_refusal(const std::string& text) {
  try {
    parse_manifest(text, "DIR/manifest.json");
  } catch (const CorruptError& e) {
    const std::string message = e.what();
    EXPECT_EQ(message.find("DIR/manifest.json: "), 0U) << message;
    for (const char c : message) {
      EXPECT_TRUE(c >= ' ' && c <= '~') << "one printable line: " << message;
    }
    return message.substr(std::string("DIR/manifest.json: ").size());
  }
  return "it was read";
}

std::string refused_change(const std::string& from, const std::string& to) {
  return manifest_refusal(changed(format(some_manifest()), from, to));
}

template <typename Change>
std::string refused_by_format(Change change) {
  Manifest manifest = some_manifest();
  change(manifest);
  try {
    format(manifest);
  } catch (const InternalError& e) {
    return e.what();
  }
  return "it was written";
}

#define EXPECT_REFUSED(refused, words) EXPECT_PRED2(contains, refused, words)

TEST(Manifest, WhatIsWrittenIsRead) {
  const Manifest manifest = some_manifest();
  const std::string text = format(manifest);
  EXPECT_EQ(parse_manifest(text, "DIR/manifest.json"), manifest);
  for (const char c : text) {
    EXPECT_TRUE((c >= ' ' && c <= '~') || c == '\n') << "every terminal shows the same text";
  }
  EXPECT_EQ(parse_manifest(format(Manifest()), "empty"), Manifest());
}

TEST(Manifest, IsTextThatPeopleRead) {
  Manifest manifest;
  manifest.step = 60;
  manifest.sequence = 7;
  manifest.files = {{"rank-0.safetensors", 4120}};
  StoredParam param{"fc.weight", {"head.weight"}, {2, 3}, {1, 2}, false, 60, {}};
  param.tensors["value"] = {DType::kFloat32, 0xabc, {{0, 4096, 0, 6, 0xdef}}};
  manifest.params = {param};
  manifest.state = {{"loss_scale.value", "65536"}};
  const std::string text = format(manifest);
  EXPECT_EQ(without_end(text), R"({
  "format": "tessera checkpoint",
  "version": 1,
  "step": 60,
  "sequence": 7,
  "num_ranks": 1,
  "files": [
    {"name": "rank-0.safetensors", "bytes": 4120}
  ],
  "params": [
    {
      "name": "fc.weight",
      "tied": ["head.weight"],
      "shape": [2, 3],
      "strides": [1, 2],
      "trainable": false,
      "updates": 60,
      "tensors": {
        "value": {"dtype": "F32", "content": "0000000000000abc", "fragments": [
          {"file": 0, "offset": 4096, "begin": 0, "numel": 6, "xxh3": "0000000000000def"}
        ]}
      }
    }
  ],
  "buffers": [],
  "generators": [],
  "state": {
    "loss_scale.value": "65536"
  },
  "config": {},
  "user": {},
)");
  EXPECT_EQ(text.substr(text.size() - 31), manifest_end(without_end(text)));
}

// 2048 elements, on two ranks: each has 1024 as int4 codes and 8 scales, 528 bytes.
Manifest with_blocks() {
  Manifest manifest;
  manifest.num_ranks = 2;
  manifest.files = {{"a", 600}, {"b", 528}};
  StoredParam param{"w", {}, {32, 64}, {}, false, 0, {}};
  param.tensors["value"] = {
      DType::kBFloat16, 1, {{0, 72, 0, 1024, 2}, {1, 0, 1024, 1024, 3}}, {4, 128}, 1024};
  manifest.params = {param};
  return manifest;
}

TEST(Manifest, TensorsOfBlocksAreAnotherVersion) {
  const Manifest manifest = with_blocks();
  const std::string text = format(manifest);
  EXPECT_NE(text.find("\"version\": 2,"), std::string::npos);
  EXPECT_NE(text.find("\"value\": {\"dtype\": \"BF16\", \"blocks\": [4, 128, 1024], \"content\""),
            std::string::npos);
  EXPECT_EQ(parse_manifest(text, "m"), manifest);
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string changed = without_end(text);
    changed.replace(changed.find(from), from.size(), to);
    try {
      parse_manifest(changed + manifest_end(changed), "m");
    } catch (const CorruptError& error) {
      return std::string(error.what());
    }
    return std::string("not refused");
  };
  EXPECT_REFUSED(refused("\"version\": 2", "\"version\": 1"), "key \"blocks\" in version 1");
  EXPECT_REFUSED(refused("[4, 128, 1024]", "[5, 128, 1024]"), "bits (4 or 8)");
  EXPECT_REFUSED(refused("[4, 128, 1024]", "[4, 128]"), "bits (4 or 8)");
  EXPECT_REFUSED(refused("[4, 128, 1024]", "[4, 100, 1024]"), "multiple of 32");
  EXPECT_REFUSED(refused("[4, 128, 1024]", "[4, 128, 1000]"), "a multiple of 1024");
  EXPECT_REFUSED(refused("[4, 128, 1024]", "[8, 128, 1024]"), "do not lie in file");
  EXPECT_REFUSED(refused("[4, 128, 1024]", "[4, 128, 9223372036854774784]"), "a multiple of 1024");
  EXPECT_REFUSED(refused("[4, 128, 1024]", "[4, 64, 512]"), "are no blocks of a fragment of 512");
  EXPECT_REFUSED(refused("\"BF16\"", "\"U8\""), "only F32, BF16 and F16");
}

TEST(Manifest, TheExampleOfTheDocumentIsOne) {
  const std::string document =
      read_whole(std::filesystem::path(TESSERA_SOURCE_DIR) / "docs/formats.md");
  const std::string fence = "```json\n";
  const std::size_t begin = document.find(fence) + fence.size();
  const std::string text = document.substr(begin, document.find("```", begin) - begin);
  const Manifest manifest = parse_manifest(text, "docs/formats.md");
  EXPECT_EQ(format(manifest), text);
  ContentHash content;
  for (const float value : {1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F}) {
    content.add(std::as_bytes(std::span(&value, 1)));
  }
  EXPECT_EQ(manifest.find("fc.weight")->tensors.at("value").content, content.value());
}

TEST(Manifest, NumbersOf64BitsAreExact) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
  Manifest manifest;
  manifest.step = kLargest;
  manifest.sequence = (std::int64_t{1} << 53) + 1;  // what a double would round
  manifest.files = {{"a", static_cast<std::uint64_t>(kLargest)}};
  StoredParam param{"w", {}, {kLargest - 8}, {}, true, kLargest, {}};
  param.tensors["value"] = {DType::kUInt8, ~std::uint64_t{0}, {{0, 8, 0, kLargest - 8, 1}}};
  manifest.params = {param};
  EXPECT_EQ(parse_manifest(format(manifest), "DIR"), manifest);
}

TEST(Manifest, AParameterIsFoundByEachOfItsNames) {
  const Manifest manifest = some_manifest();
  EXPECT_EQ(manifest.find("h.0.weight"), &manifest.params[0]);
  EXPECT_EQ(manifest.find("lm_head"), &manifest.params[1]);
  EXPECT_EQ(manifest.find("other"), &manifest.params[1]);
  EXPECT_EQ(manifest.find("scale"), &manifest.params[2]);
  EXPECT_EQ(manifest.find("bn.mean"), nullptr);
  EXPECT_EQ(manifest.params[0].numel(), 15);
  EXPECT_EQ(manifest.params[2].numel(), 1);
  EXPECT_EQ(manifest.params[3].numel(), 0);
}

TEST(Manifest, NoByteOfItCanChangeUnseen) {
  const std::string text = format(some_manifest());
  for (std::size_t at = 0; at < text.size(); at += support::rounds(1, 7)) {
    std::string flipped = text;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
    EXPECT_NE(manifest_refusal(flipped), "it was read") << "byte " << at;
  }
}

TEST(Manifest, CutShortAnywhereItIsRefused) {
  const std::string text = format(some_manifest());
  for (std::size_t bytes = 0; bytes < text.size(); bytes += support::rounds(1, 7)) {
    EXPECT_NE(manifest_refusal(text.substr(0, bytes)), "it was read") << bytes;
  }
  EXPECT_REFUSED(manifest_refusal(text.substr(0, text.size() / 2)),
                 "it does not end with its checksum; the checkpoint is damaged or was changed");
  EXPECT_REFUSED(manifest_refusal(text + "\n"), "it does not end with its checksum");
}

TEST(Manifest, ThatWasEditedSaysSo) {
  std::string text = format(some_manifest());
  text.replace(text.find("\"step\": 60"), 10, "\"step\": 61");
  EXPECT_REFUSED(manifest_refusal(text), "its text has the checksum ");
  EXPECT_REFUSED(manifest_refusal(text), ", its last line says \"");
}

TEST(Manifest, OfAnotherVersionNamesBothWhateverElseItHolds) {
  std::string text = format(some_manifest());
  text.replace(text.find("\"version\": 1"), 12, "\"version\": 3, \"planets\": [[null]]");
  EXPECT_EQ(manifest_refusal(text),
            "a checkpoint of version 3; this Tessera reads versions 1 to 2; use a newer one");
  EXPECT_REFUSED(refused_change("\"version\": 1", "\"version\": 0"), "there is none before it");
  EXPECT_REFUSED(refused_change("\"tessera checkpoint\"", "\"other\""),
                 "format is \"other\", not \"tessera checkpoint\"");
  EXPECT_REFUSED(refused_change("\"version\": 1,\n", ""), "format and version do not come first");
}

TEST(HostileManifest, ThatIsNoJsonOrOfAnotherForm) {
  EXPECT_REFUSED(manifest_refusal(""), "it does not end with its checksum");
  EXPECT_REFUSED(manifest_refusal(with_end("")), "the text \"xxh3\" where the object");
  EXPECT_REFUSED(manifest_refusal(std::string("{\0}", 3)), "offset 1: a NUL");
  EXPECT_REFUSED(refused_change("\"step\": 60", "\"step\": 60,,"), "cannot be read as JSON");
  EXPECT_REFUSED(manifest_refusal(with_end("[\n")),
                 "a list where the object of a manifest belongs");
  EXPECT_REFUSED(manifest_refusal(with_end("null")), "null where the object of a manifest belongs");
  EXPECT_REFUSED(manifest_refusal(with_end(std::string(100'000, '['))), "a list where");
  EXPECT_REFUSED(refused_change("\"config\": {", "\"config\": {\"a\": {\"b\": 1},"),
                 "an object where text belongs for \"a\"");
  EXPECT_REFUSED(refused_change("\"files\": [", "\"files\": [[],"),
                 "a list where an object belongs");
  EXPECT_REFUSED(refused_change("\"tensors\": {", "\"tensors\": {\"a\": 1,"),
                 "the number 1 where an object belongs for tensor \"a\"");
  EXPECT_REFUSED(refused_change("\"tied\": [", "\"tied\": [true, "), "a boolean where a name");
  EXPECT_REFUSED(refused_change("\"trainable\": false", "\"trainable\": null"),
                 "null where true or false belongs for \"trainable\"");
}

TEST(HostileManifest, WithNumbersThatCannotBe) {
  EXPECT_REFUSED(refused_change("\"step\": 60", "\"step\": -1"),
                 "the negative number -1 where a whole number belongs for \"step\"");
  EXPECT_REFUSED(refused_change("\"step\": 60", "\"step\": 6e1"), "the number 6e1 where");
  EXPECT_REFUSED(refused_change("\"step\": 60", "\"step\": 9223372036854775808"), "too large");
  EXPECT_REFUSED(refused_change("\"step\": 60", "\"step\": 99999999999999999999"), "where a whole");
  EXPECT_REFUSED(refused_change("\"step\": 60", "\"step\": 1e999"), "cannot be read as JSON");
  EXPECT_REFUSED(refused_change("\"num_ranks\": 2", "\"num_ranks\": 0"), "num_ranks is 0");
  EXPECT_REFUSED(refused_change("\"num_ranks\": 2", "\"num_ranks\": 2000000"),
                 "it must be 1 to 1048576");
  EXPECT_REFUSED(refused_change("\"num_ranks\": 2", "\"num_ranks\": 4294967297"), "too large");
  EXPECT_REFUSED(refused_change("\"file\": 0", "\"file\": 4294967296"),
                 "parameter \"h.0.weight\": tensor \"master\": fragment 0: the number of a file "
                 "4294967296 is too large")
      << "no wrap";
  EXPECT_REFUSED(refused_change("\"file\": 1", "\"file\": 2"), "a fragment in file 2 of 2");
  std::string dims;
  for (int i = 0; i < 65; ++i) {
    dims += "1, ";
  }
  EXPECT_REFUSED(refused_change("\"shape\": [", "\"shape\": [" + dims), "more than 64 dims");
}

TEST(HostileManifest, WithKeysThatAreUnknownTwiceOrMissing) {
  EXPECT_REFUSED(refused_change("\"step\": 60", "\"step\": 60, \"stop\": 1"),
                 "unknown key \"stop\"");
  EXPECT_REFUSED(refused_change("\"step\": 60", "\"step\": 60, \"step\": 60"),
                 "key \"step\" comes twice");
  EXPECT_REFUSED(refused_change("\"step\": 60,", ""), "key \"step\" is missing");
  EXPECT_REFUSED(refused_change("\"begin\": 0, ", ""), "fragment 0: key \"begin\" is missing");
  EXPECT_REFUSED(refused_change("\"updates\": 60", "\"updates\": 60, \"bytes\": 1"),
                 "parameter \"h.0.weight\": unknown key \"bytes\"")
      << "known elsewhere";
  EXPECT_REFUSED(refused_change("\"precision\"", "\"precision\": \"\", \"precision\""),
                 "the name \"precision\" comes twice");
  EXPECT_REFUSED(refused_change("\"master\"", "\"exp_avg\""), "the name \"exp_avg\" comes twice");
  EXPECT_REFUSED(refused_change("{\"name\": \"bn.mean\", ", "{"),
                 "buffer 0: key \"name\" is missing");
}

TEST(HostileManifest, WithChecksumsAndTypesThatAreNone) {
  EXPECT_REFUSED(refused_change("0123456789abcdef", "0123456789ABCDEF"),
                 "tensor \"value\": checksum \"0123456789ABCDEF\" is not 16 digits 0-9, a-f");
  EXPECT_REFUSED(refused_change("0123456789abcdef", "123"), "checksum \"123\" is not 16 digits");
  EXPECT_REFUSED(refused_change("\"BF16\"", "\"BF17\""), "dtype \"BF17\" is not known");
  EXPECT_REFUSED(refused_change("\"type\": \"ComplexFloat\"", "\"type\": \"\""), "an empty type");
}

TEST(HostileManifest, WithNamesThatLeaveTheDirectoryOrRepeat) {
  for (const char* const name : {"../a", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "-rf",
                                 "manifest.json", "a b", "a\\nb", "\\u00e9"}) {
    EXPECT_REFUSED(refused_change("\"rank-0.safetensors\"", "\"" + std::string(name) + "\""),
                   "is not a plain name")
        << name;
  }
  EXPECT_REFUSED(refused_change("\"rank-0.safetensors\"", "\"" + std::string(256, 'a') + "\""),
                 "is not a plain name");
  EXPECT_REFUSED(refused_change("\"rank-0.safetensors\"", "\"rank-1.safetensors\""),
                 "file \"rank-1.safetensors\" comes twice");
  EXPECT_REFUSED(refused_change("\"scale\"", "\"h.0.weight\""),
                 "parameter \"h.0.weight\": the name comes twice");
  EXPECT_REFUSED(refused_change("\"lm_head\"", "\"scale\""), "\"scale\": the name comes twice");
  EXPECT_REFUSED(refused_change("\"mask\"", "\"bn.mean\""),
                 "buffer \"bn.mean\": the name comes twice");
  EXPECT_REFUSED(refused_change("\"scale\"", "\"\""), "a parameter has no name");
}

TEST(HostileManifest, WhoseFragmentsAreNotTheTensor) {
  // Of "exp_avg", then of "master", whose second begins at 8.
  EXPECT_REFUSED(
      refused_change("\"begin\": 0, \"numel\": 15", "\"begin\": 1, \"numel\": 14"),
      "parameter \"h.0.weight\": tensor \"exp_avg\": a fragment begins at element 1, the "
      "one before it ends at 0; there is a gap");
  EXPECT_REFUSED(refused_change("\"begin\": 8", "\"begin\": 7"),
                 "begins at element 7, the one before it ends at 8; they overlap");
  EXPECT_REFUSED(refused_change("\"numel\": 15", "\"numel\": 14"), "have 14 of 15 elements");
  EXPECT_REFUSED(refused_change("\"numel\": 15", "\"numel\": 16"),
                 "a fragment of 16 elements where 15 are left");
  EXPECT_REFUSED(refused_change("\"shape\": [3, 5]", "\"shape\": [3, 4294967296, 4294967296]"),
                 "more elements than a number holds");
  EXPECT_REFUSED(refused_change("\"value\": {\"dtype\": \"BF16\"", "\"v\": {\"dtype\": \"BF16\""),
                 "parameter \"h.0.weight\": has no tensor \"value\"");
  EXPECT_REFUSED(refused_change("\"strides\": [1, 4]", "\"strides\": [1, 3]"),
                 "strides [1, 3] of shape [4, 2] leave gaps, or use an element twice");
  EXPECT_REFUSED(refused_change("\"strides\": [1, 4]", "\"strides\": [1]"), "1 strides for 2 dims");
}

TEST(HostileManifest, WhoseFragmentsLieOutsideTheirFileOrInEachOther) {
  EXPECT_REFUSED(refused_change("\"bytes\": 300", "\"bytes\": 238"),
                 "do not lie in file \"rank-1.safetensors\" of 238 bytes");
  EXPECT_REFUSED(refused_change("\"offset\": 92", "\"offset\": 241"),
                 "15 elements of F32 at offset "
                 "241 do not lie in file \"rank-1.safetensors\" of 300 bytes");
  EXPECT_REFUSED(refused_change("\"offset\": 92", "\"offset\": 9223372036854775807"),
                 "do not lie in file");
  EXPECT_REFUSED(refused_change("\"offset\": 92", "\"offset\": 91"),
                 "two fragments lie in bytes [91, 92) of file \"rank-1.safetensors\"");
  EXPECT_REFUSED(refused_change("\"offset\": 210", "\"offset\": 230"),
                 "two fragments lie in bytes");
}

TEST(HostileManifest, WhoseRankTensorsAreNotThoseOfTheRanks) {
  EXPECT_REFUSED(refused_change("\"num_ranks\": 2", "\"num_ranks\": 3"),
                 "buffer \"bn.mean\": 2 fragments for 3 ranks");
  EXPECT_REFUSED(refused_change("\"numel\": 9", "\"numel\": 8"),
                 "generator \"cpu\": a rank has elements [0, +8) of 9; each has all");
  EXPECT_REFUSED(refused_change("\"type\": \"ComplexFloat\", \"shape\": [2]",
                                "\"type\": \"ComplexFloat\", \"shape\": [3]"),
                 "16 bytes for 3 elements of type \"ComplexFloat\"");
  EXPECT_REFUSED(refused_change("\"U8\", \"type\"", "\"I32\", \"type\""),
                 "its bytes are U8, not I32");
}

TEST(ManifestWriter, IsHeldToWhatAReaderTakes) {
  EXPECT_REFUSED(
      refused_by_format([](Manifest& m) { m.params[0].tensors["value"].fragments.pop_back(); }),
      "a checkpoint that could not be loaded: parameter \"h.0.weight\": tensor \"value\": "
      "its fragments have 8 of 15 elements");
  EXPECT_REFUSED(refused_by_format([](Manifest& m) { m.files[1].bytes = 10; }),
                 "do not lie in file");
  EXPECT_REFUSED(refused_by_format([](Manifest& m) { m.step = -1; }), "step -1");
  EXPECT_REFUSED(refused_by_format([](Manifest& m) { m.params[0].updates = -1; }), "-1 updates");
  EXPECT_REFUSED(refused_by_format([](Manifest& m) { m.params[0].shape = {-3, -5}; }),
                 "negative dim");
  EXPECT_REFUSED(refused_by_format([](Manifest& m) { m.params[0].shape.resize(65, 1); }),
                 "65 dims");
  EXPECT_REFUSED(refused_by_format([](Manifest& m) { m.params[1].strides = {-1, 4}; }),
                 "strides [-1");
  EXPECT_REFUSED(refused_by_format([](Manifest& m) { m.files[0].bytes = ~std::uint64_t{0}; }),
                 "is too large");
  EXPECT_REFUSED(refused_by_format([](Manifest& m) { m.params[0].tensors[""] = {}; }),
                 "a tensor has no name");
  EXPECT_REFUSED(
      refused_by_format([](Manifest& m) { m.params[0].tensors["value"].fragments[0].file = -1; }),
      "a fragment in file -1");
}

TEST(ManifestWriter, RefusesTextThatJsonCannotHold) {
  Manifest manifest = some_manifest();
  manifest.user["a"] = "\xff";
  try {
    format(manifest);
    FAIL() << "it was written";
  } catch (const ConfigError& e) {
    EXPECT_PRED2(contains, e.what(), "a checkpoint cannot hold \"\\xff\": it is not UTF-8");
  }
}

}  // namespace
}  // namespace tessera::checkpoint
