#include <fcntl.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <utility>

#include "tessera/checkpoint/posix_file.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {
namespace {

// Without blocking: the name may be that of a pipe, and opening one waits for its other end.
PosixFile open_to_read(const std::string& path) {
  return PosixFile(path, O_RDONLY | O_NONBLOCK, "open");
}

std::uint64_t file_bytes(const PosixFile& file) {
  struct stat status {};
  if (::fstat(file.descriptor(), &status) != 0) {
    throw_io_error(file.path(), "look at", errno);
  }
  TESSERA_CHECK(S_ISREG(status.st_mode), IoError, printable(file.path(), 400),
                ": not a regular file; name a safetensors file");
  return static_cast<std::uint64_t>(status.st_size);
}

// REQUIRES: the range lay inside the file when its size was asked for.
void read_exactly(const PosixFile& file, std::uint64_t offset, void* data, std::size_t bytes) {
  const std::size_t done = file.read_at(offset, data, bytes);
  TESSERA_CHECK(done == bytes, CorruptError, printable(file.path(), 400), ": offset ",
                offset + done, ": the file has become shorter since it was opened");
}

}  // namespace

struct SafetensorsReader::Impl {
  explicit Impl(const std::string& path) : file(open_to_read(path)) {
    const std::uint64_t total_bytes = file_bytes(file);
    TESSERA_CHECK(total_bytes >= kLengthBytes, CorruptError, printable(path, 400), ": ",
                  total_bytes, " bytes are too few for a safetensors file; write or copy it again");
    std::array<unsigned char, kLengthBytes> field{};
    read_exactly(file, 0, field.data(), field.size());
    std::string text(parse_length(field, total_bytes, path), '\0');
    read_exactly(file, kLengthBytes, text.data(), text.size());
    data_begin = kLengthBytes + text.size();
    SafetensorsHeader header = parse_header(text, total_bytes - data_begin, path);
    metadata = std::move(header.metadata);
    for (PlacedTensor& tensor : header.tensors) {
      index.emplace(tensor.entry.name, entries.size());
      begins.push_back(tensor.begin);
      entries.push_back(std::move(tensor.entry));
    }
  }

  const PosixFile file;
  std::uint64_t data_begin = 0;
  std::map<std::string, std::string> metadata;
  std::vector<TensorEntry> entries;
  std::vector<std::uint64_t> begins;  // of the entries' bytes, after data_begin
  std::map<std::string, std::size_t> index;
};

SafetensorsReader::SafetensorsReader(const std::string& path)
    : impl_(std::make_unique<Impl>(path)) {}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;

const std::vector<TensorEntry>& SafetensorsReader::entries() const { return impl_->entries; }

std::uint64_t SafetensorsReader::data_offset(std::size_t index) const {
  return impl_->data_begin + impl_->begins.at(index);
}

const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return impl_->metadata;
}

const TensorEntry* SafetensorsReader::find(const std::string& name) const {
  const auto found = impl_->index.find(name);
  return found == impl_->index.end() ? nullptr : &impl_->entries[found->second];
}

void SafetensorsReader::read(const std::string& name, std::size_t begin,
                             std::span<std::byte> out) const {
  const auto found = impl_->index.find(name);
  TESSERA_CHECK(found != impl_->index.end(), ConfigError, printable(impl_->file.path(), 400),
                ": holds no tensor ", tessera::in_quotes(name), " among its ",
                impl_->entries.size(), "; was it written for another model?");
  const std::size_t bytes = impl_->entries[found->second].bytes();
  TESSERA_INVARIANT(begin <= bytes && out.size() <= bytes - begin, "tensor ",
                    tessera::in_quotes(name), ": bytes [", begin, ", +", out.size(), ") of ",
                    bytes);
  read_exactly(impl_->file, impl_->data_begin + impl_->begins[found->second] + begin, out.data(),
               out.size());
}

}  // namespace tessera::checkpoint
