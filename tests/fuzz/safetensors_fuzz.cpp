// Whatever bytes a safetensors file holds: it is read, every byte of every tensor, or it is a
// CorruptError of exactly one printable line. What was read comes back the same when it is written.
// Opening it does not take memory out of proportion to the file.
//
// The input is tried as a whole file, and as the header of a file whose length field is right: a
// mutation inside a header rarely keeps the two in step.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tests/fuzz/allocation_meter.h"

namespace {

using tessera::checkpoint::format_header;
using tessera::checkpoint::kLengthBytes;
using tessera::checkpoint::parse_header;
using tessera::checkpoint::SafetensorsReader;

constexpr std::size_t kDataBytes = 40;  // what the headers in the corpus describe
// The shortest tensor is some fifty bytes of text. It becomes an entry of 72, in vectors that may
// be three times as large while they grow, its name in a set and a map, and a shape of its own.
constexpr std::size_t kMaxBytesPerByte = 32;
constexpr std::size_t kMaxFixedBytes = std::size_t{64} << 10;

void require(bool holds, const char* what, std::string_view text) {
  if (!holds) {
    std::fprintf(stderr, "safetensors_fuzz: %s: %.*s\n", what, static_cast<int>(text.size()),
                 text.data());
    std::abort();
  }
}

// A file in memory, with a name that can be opened.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    require(descriptor_ >= 0, "no file in memory", "memfd_create");
    while (!bytes.empty()) {
      const ssize_t done = ::write(descriptor_, bytes.data(), bytes.size());
      require(done > 0, "a file in memory cannot be written", "write");
      bytes.remove_prefix(static_cast<std::size_t>(done));
    }
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

 private:
  const int descriptor_;
};

void read_whole(std::string_view bytes) {
  const MemoryFile file(bytes);
  const SafetensorsReader reader(file.path());
  std::size_t total = 0;
  for (const auto& entry : reader.entries()) {
    std::vector<std::byte> data(entry.bytes());
    reader.read(entry.name, 0, data);
    total += data.size();
  }
  require(total <= bytes.size(), "more data than there are bytes", bytes);

  const std::string header = format_header(reader.entries(), reader.metadata());
  const auto again = parse_header(std::string_view(header).substr(kLengthBytes), total, "again");
  require(again.metadata == reader.metadata(), "metadata changed", header);
  require(again.tensors.size() == reader.entries().size(), "tensors got lost", header);
  for (std::size_t i = 0; i < again.tensors.size(); ++i) {
    const auto& now = again.tensors[i].entry;
    const auto& before = reader.entries()[i];
    require(now.name == before.name && now.dtype == before.dtype && now.shape == before.shape,
            "a tensor changed", header);
  }
}

void try_file(std::string_view bytes) {
  const tessera::fuzz::AllocationMeter meter;
  try {
    read_whole(bytes);
  } catch (const tessera::CorruptError& e) {
    const std::string_view message = e.what();
    require(!message.empty(), "an empty message", message);
    for (const char c : message) {
      require(c >= ' ' && c <= '~', "a message that is not one line of ASCII", message);
    }
  }
  require(meter.peak_bytes() <= kMaxBytesPerByte * bytes.size() + kMaxFixedBytes,
          "more memory than the file can need", bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try_file(bytes);
  std::string file;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    file += static_cast<char>((size >> (8 * i)) & 0xffU);
  }
  try_file(file + bytes + std::string(kDataBytes, '\1'));
  return 0;
}
