// Whatever text a manifest holds: it is read, or it is a CorruptError of exactly one printable
// line. What was read comes back the same when it is written. Neither takes memory out of
// proportion to the text.
//
// The input is tried as a whole manifest, and as one without its end: no mutation meets the
// checksum.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "tessera/checkpoint/manifest.h"
#include "tessera/core/error.h"
#include "tests/fuzz/allocation_meter.h"

namespace {

using tessera::checkpoint::format;
using tessera::checkpoint::Manifest;
using tessera::checkpoint::manifest_end;
using tessera::checkpoint::parse_manifest;

// A name of one letter in a list is four bytes of text. It becomes a string of 32, in a vector that
// may be three times as large while it grows, and a node of a set.
constexpr std::size_t kMaxBytesPerByte = 64;
constexpr std::size_t kMaxFixedBytes = std::size_t{64} << 10;

void require(bool holds, const char* what, std::string_view text) {
  if (!holds) {
    std::fprintf(stderr, "manifest_fuzz: %s: %.*s\n", what, static_cast<int>(text.size()),
                 text.data());
    std::abort();
  }
}

void read_and_write(std::string_view text) {
  const Manifest manifest = parse_manifest(text, "fuzz/manifest.json");
  const std::string written = format(manifest);
  require(parse_manifest(written, "again") == manifest, "the manifest changed", written);
  require(format(parse_manifest(written, "again")) == written, "format() is not stable", written);
}

void try_text(std::string_view text) {
  const tessera::fuzz::AllocationMeter meter;
  try {
    read_and_write(text);
  } catch (const tessera::CorruptError& e) {
    const std::string_view message = e.what();
    require(!message.empty(), "an empty message", message);
    for (const char c : message) {
      require(c >= ' ' && c <= '~', "a message that is not one line of ASCII", message);
    }
  }
  require(meter.peak_bytes() <= kMaxBytesPerByte * text.size() + kMaxFixedBytes,
          "more memory than the text can need", text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try_text(text);
  try_text(text + manifest_end(text));
  return 0;
}
