#include "tessera/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <tuple>
#include <utility>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/range_stream.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/checkpoint/snapshot.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/quant/block_codec.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

// Which tensor a fragment belongs to.
struct Owner {
  Fragment fragment;
  std::uint64_t bytes;
  DType dtype;                   // of the tensor in the file
  const StoredParam* param;      // null: of a rank
  const std::string* tensor;     // of a parameter
  const StoredRankTensor* each;  // of a rank
  std::size_t rank;

  static auto place_of(const Fragment& fragment) {
    return std::tie(fragment.file, fragment.offset, fragment.numel);
  }
};

std::vector<Owner> owners_in(const Manifest& manifest) {
  std::vector<Owner> owners;
  for (const StoredParam& param : manifest.params) {
    for (const auto& [name, tensor] : param.tensors) {
      for (const Fragment& fragment : tensor.fragments) {
        owners.push_back({fragment, tensor.bytes_of_fragment(fragment), tensor.file_dtype(), &param,
                          &name, nullptr, 0});
      }
    }
  }
  for (const auto* const list : {&manifest.buffers, &manifest.generators}) {
    for (const StoredRankTensor& each : *list) {
      for (std::size_t rank = 0; rank < each.ranks.size(); ++rank) {
        const Fragment& fragment = each.ranks[rank];
        owners.push_back({fragment,
                          static_cast<std::uint64_t>(fragment.numel) * bytes_of(each.dtype),
                          each.dtype, nullptr, nullptr, &each, rank});
      }
    }
  }
  std::stable_sort(owners.begin(), owners.end(), [](const Owner& a, const Owner& b) {
    return Owner::place_of(a.fragment) < Owner::place_of(b.fragment);
  });
  return owners;
}

// A tensor as the file itself has it.
struct FileTensor {
  std::uint64_t offset = 0;
  const TensorEntry* entry = nullptr;
};

constexpr std::string_view kNotTheManifests =
    "the file is of another save or rank, or damaged; copy the whole checkpoint again";

}  // namespace

// The part of a tensor that is being read, as ranges of files.
struct CheckpointReader::Parts {
  std::vector<FileRange> ranges;
  std::vector<const Fragment*> whole;  // by range; null: a part of a fragment only
};

struct CheckpointReader::Impl {
  Impl(const std::string& target, const ReaderOptions& reader_options)
      : options(reader_options),
        path(find_save(target)),
        manifest(read_manifest(path)),
        owners(owners_in(manifest)),
        files(file_names()) {
    for (std::size_t file = 0; file < manifest.files.size(); ++file) {
      check_file(static_cast<int>(file));
    }
  }

  std::string path_of(int file) const {
    return (fs::path(path) / manifest.files[static_cast<std::size_t>(file)].name).string();
  }

  std::vector<RangeFiles::Name> file_names() const {
    std::vector<RangeFiles::Name> names;
    for (std::size_t file = 0; file < manifest.files.size(); ++file) {
      names.push_back({path_of(static_cast<int>(file)), manifest.files[file].bytes});
    }
    return names;
  }

  void check_file(int file) const {
    const std::string name = path_of(file);
    const std::string shown = printable(name, 400);
    std::error_code error;
    const fs::file_status status = fs::status(name, error);
    TESSERA_CHECK(status.type() != fs::file_type::not_found, CorruptError, shown,
                  ": the file is missing; copy the whole checkpoint again, or load another save");
    TESSERA_CHECK(status.type() == fs::file_type::regular, CorruptError, shown,
                  ": not a regular file", error ? " (" + error.message() + ")" : "",
                  "; a file of the checkpoint was here");
    const std::uint64_t bytes = fs::file_size(name, error);
    const std::uint64_t expected = manifest.files[static_cast<std::size_t>(file)].bytes;
    TESSERA_CHECK(!error && bytes == expected, CorruptError, shown, ": has ", bytes,
                  " bytes, the manifest says ", expected, "; ",
                  bytes < expected ? "the file was cut short; copy it again, or load another save"
                                   : kNotTheManifests);
    check_tensors(file, SafetensorsReader(name), shown);
  }

  // Every fragment must be a tensor of the file.
  void check_tensors(int file, const SafetensorsReader& reader, const std::string& shown) const {
    std::vector<FileTensor> tensors;  // by offset, as entries() are
    for (std::size_t i = 0; i < reader.entries().size(); ++i) {
      if (reader.entries()[i].bytes() > 0) {
        tensors.push_back({reader.data_offset(i), &reader.entries()[i]});
      }
    }
    for (auto at = first_in(file); at != owners.end() && at->fragment.file == file; ++at) {
      const Owner& owner = *at;
      const std::uint64_t bytes = owner.bytes;
      const std::uint64_t offset = owner.fragment.offset;
      if (bytes == 0) {
        continue;
      }
      const auto found =
          std::lower_bound(tensors.begin(), tensors.end(), offset,
                           [](const FileTensor& a, std::uint64_t b) { return a.offset < b; });
      const bool is_there = found != tensors.end() && found->offset == offset;
      TESSERA_CHECK(is_there, CorruptError, shown, ": no tensor begins at offset ", offset,
                    ", where the manifest has ", describe(owner), "; ", kNotTheManifests);
      TESSERA_CHECK(found->entry->dtype == owner.dtype && found->entry->bytes() == bytes,
                    CorruptError, shown, ": the tensor at offset ", offset, " is ",
                    tessera::in_quotes(found->entry->name), ", ", found->entry->bytes(),
                    " bytes of ", type_name(found->entry->dtype), "; the manifest has ", bytes,
                    " bytes of ", type_name(owner.dtype), " there, ", describe(owner), "; ",
                    kNotTheManifests);
    }
  }

  std::vector<Owner>::const_iterator first_in(int file) const {
    return std::lower_bound(owners.begin(), owners.end(), file,
                            [](const Owner& a, int b) { return a.fragment.file < b; });
  }

  static std::string describe(const Owner& owner) {
    return owner.param != nullptr
               ? detail::concat("tensor ", tessera::in_quotes(*owner.tensor), " of parameter ",
                                tessera::in_quotes(owner.param->name))
               : detail::concat("tensor ", tessera::in_quotes(owner.each->name), " of rank ",
                                owner.rank);
  }

  std::string describe(const Fragment& fragment) const {
    const auto at = std::lower_bound(owners.begin(), owners.end(), fragment,
                                     [](const Owner& owner, const Fragment& b) {
                                       return Owner::place_of(owner.fragment) < Owner::place_of(b);
                                     });
    TESSERA_INVARIANT(
        at != owners.end() && Owner::place_of(at->fragment) == Owner::place_of(fragment),
        "a fragment at offset ", fragment.offset, " of file ", fragment.file,
        " is not of the checkpoint ", path);
    return describe(*at);
  }

  ReaderOptions options;
  const std::string path;
  const Manifest manifest;
  const std::vector<Owner> owners;
  RangeFiles files;
  std::mutex mutex;
  // Guarded by mutex; made when something is read.
  std::vector<std::unique_ptr<const Staging>> free_stagings;
  std::unique_ptr<tier::IoEngine> own_io;
  int num_reading = 0;
};

// The time in which a caller reads, with its part of the staging; ends also after an error.
class CheckpointReader::Reading {
 public:
  explicit Reading(Impl& impl) : impl_(impl) {
    const std::lock_guard<std::mutex> lock(impl.mutex);
    const int most = std::max(1, impl.options.num_callers);
    TESSERA_INVARIANT(impl.num_reading < most, "a checkpoint is read from inside a visit, or by ",
                      impl.num_reading + 1, " callers instead of ", most);
    if (impl.options.io == nullptr) {
      // As many requests as the staging has room for.
      impl.own_io = tier::make_io_engine({.queue_depth = 1, .num_threads = 16}, nullptr);
      impl.options.io = impl.own_io.get();
    }
    if (impl.free_stagings.empty()) {
      staging_ = std::make_unique<const Staging>(impl.options.staging_bytes /
                                                 static_cast<std::size_t>(most));
    } else {
      staging_ = std::move(impl.free_stagings.back());
      impl.free_stagings.pop_back();
    }
    ++impl.num_reading;
  }
  ~Reading() {
    const std::lock_guard<std::mutex> lock(impl_.mutex);
    impl_.free_stagings.push_back(std::move(staging_));
    --impl_.num_reading;
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  RangeStream stream(const std::vector<FileRange>& ranges) const {
    return RangeStream(impl_.files, *impl_.options.io, *staging_, ranges);
  }

 private:
  Impl& impl_;
  std::unique_ptr<const Staging> staging_;
};

namespace {

// Cuts a stream of bytes into pieces that end at whole words of the tensor, but for the last.
class WordPieces {
 public:
  WordPieces(std::int64_t begin, std::int64_t numel, DType dtype, CheckpointReader::Visit visit)
      : element_bytes_(bytes_of(dtype)),
        position_(static_cast<std::uint64_t>(begin) * element_bytes_),
        end_(position_ + static_cast<std::uint64_t>(numel) * element_bytes_),
        visit_(std::move(visit)) {}

  // The bytes in front of `bytes` may be overwritten.
  void add(std::span<std::byte> bytes) {
    std::byte* const data = bytes.data() - num_left_;
    std::memcpy(data, left_.data(), num_left_);
    const std::uint64_t total = num_left_ + bytes.size();
    const std::uint64_t reached = position_ + total;
    const std::uint64_t cut =
        reached == end_ ? reached : reached / kContentWordBytes * kContentWordBytes;
    const std::uint64_t given = cut > position_ ? cut - position_ : 0;
    if (given > 0) {
      visit_(static_cast<std::int64_t>(position_ / element_bytes_),
             std::span<const std::byte>(data, given));
    }
    position_ += given;
    num_left_ = static_cast<std::size_t>(total - given);
    std::memcpy(left_.data(), data + given, num_left_);
  }

 private:
  const std::uint64_t element_bytes_;
  std::uint64_t position_;  // in the tensor, of what was given
  const std::uint64_t end_;
  const CheckpointReader::Visit visit_;
  std::array<std::byte, kContentWordBytes> left_{};
  std::size_t num_left_ = 0;
};

}  // namespace

CheckpointReader::CheckpointReader(const std::string& path, const ReaderOptions& options)
    : impl_(std::make_unique<Impl>(path, options)) {}

CheckpointReader::~CheckpointReader() = default;

const std::string& CheckpointReader::path() const { return impl_->path; }

const Manifest& CheckpointReader::manifest() const { return impl_->manifest; }

void CheckpointReader::read(const StoredTensor& tensor, std::int64_t begin, std::int64_t numel,
                            const Visit& visit) const {
  if (tensor.format.is_encoded()) {
    read_decoded(tensor, begin, numel, visit);
    return;
  }
  const Request request = {&tensor, begin, numel, visit};
  read(std::span(&request, 1));
}

void CheckpointReader::read(std::span<const Request> requests) const {
  const Reading reading(*impl_);
  Parts parts;
  std::vector<std::size_t> request_of;  // by range
  std::vector<WordPieces> pieces;       // by request
  pieces.reserve(requests.size());
  for (const Request& request : requests) {
    const StoredTensor& tensor = *request.tensor;
    TESSERA_INVARIANT(!tensor.format.is_encoded(),
                      "a tensor that is stored as blocks is read alone");
    const std::uint64_t size = bytes_of(tensor.dtype);
    std::int64_t found = 0;
    for (const Fragment& fragment : tensor.fragments) {
      const std::int64_t first = std::max(request.begin, fragment.begin);
      const std::int64_t last =
          std::min(request.begin + request.numel, fragment.begin + fragment.numel);
      if (first < last) {
        parts.ranges.push_back(
            {fragment.file,
             fragment.offset + static_cast<std::uint64_t>(first - fragment.begin) * size,
             static_cast<std::uint64_t>(last - first) * size, impl_->describe(fragment),
             static_cast<std::uint64_t>(kTileStep) * size});
        parts.whole.push_back(last - first == fragment.numel ? &fragment : nullptr);
        request_of.push_back(pieces.size());
        found += last - first;
      }
    }
    TESSERA_INVARIANT(request.begin >= 0 && request.numel >= 0 && found == request.numel,
                      "elements [", request.begin, ", +", request.numel,
                      ") of a stored tensor, which has ", found, " of them");
    pieces.emplace_back(request.begin, request.numel, tensor.dtype, request.visit);
  }
  stream_parts(reading, parts, [&](std::size_t range, std::span<std::byte> bytes) {
    pieces[request_of[range]].add(bytes);
  });
}

// Each range in order, and with what is whole compared with its checksum.
template <typename Use>
void CheckpointReader::stream_parts(const Reading& reading, const Parts& parts,
                                    const Use& use) const {
  RangeStream stream = reading.stream(parts.ranges);
  Xxh3 hash;
  while (const auto piece = stream.next()) {
    if (const Fragment* const whole = parts.whole[piece->range]) {
      hash.add(piece->bytes);
      if (piece->is_last) {
        const std::uint64_t actual = std::exchange(hash, Xxh3()).value();
        TESSERA_CHECK(actual == whole->xxh3, CorruptError, printable(file_path(*whole), 400),
                      ": offset ", whole->offset, ": ", describe(*whole), ", elements [",
                      whole->begin, ", ", whole->begin + whole->numel, "), has the checksum ",
                      checksum_text(actual), ", the manifest says ", checksum_text(whole->xxh3),
                      "; the file is damaged or not of this save; load another save");
      }
    }
    use(piece->range, piece->bytes);
  }
}

void CheckpointReader::read_blocks(const StoredTensor& tensor, std::int64_t begin,
                                   std::int64_t numel, const shard::StoredBytes& places,
                                   std::byte* to) const {
  const Reading reading(*impl_);
  const shard::StoredBytes stored(tensor.format, tensor.shard_numel);
  Parts parts;
  // By range: what of it is wanted, and where it goes.
  struct Piece {
    shard::ByteSpan from;
    std::byte* to;
  };
  std::vector<std::vector<Piece>> wanted;
  std::int64_t found = 0;
  for (const Fragment& fragment : tensor.fragments) {
    const std::int64_t first = std::max(begin, fragment.begin);
    const std::int64_t last = std::min(begin + numel, fragment.begin + fragment.numel);
    if (first >= last) {
      continue;
    }
    const std::int64_t count = last - first;
    const std::int64_t at = first - fragment.begin;
    const std::vector<Piece> pieces = {
        {stored.codes(at, count), to + places.codes(first - begin, count).offset},
        {stored.scales(at, count), to + places.scales(first - begin, count).offset}};
    const bool is_whole = count == fragment.numel;
    if (is_whole) {  // its padding is read, too, for the checksum
      parts.ranges.push_back(
          {fragment.file, fragment.offset, stored.bytes(), impl_->describe(fragment)});
      parts.whole.push_back(&fragment);
      wanted.push_back(pieces);
    } else {
      for (const Piece& piece : pieces) {
        parts.ranges.push_back({fragment.file, fragment.offset + piece.from.offset,
                                piece.from.bytes, impl_->describe(fragment)});
        parts.whole.push_back(nullptr);
        wanted.push_back({{{0, piece.from.bytes}, piece.to}});
      }
    }
    found += count;
  }
  TESSERA_INVARIANT(begin >= 0 && begin % tensor.format.step() == 0 && found == numel, "elements [",
                    begin, ", +", numel, ") of a stored tensor, which has ", found, " of them");
  std::size_t range = 0;
  std::size_t position = 0;  // in the range
  stream_parts(reading, parts, [&](std::size_t current, std::span<std::byte> bytes) {
    position = current == range ? position : 0;
    range = current;
    for (const Piece& piece : wanted[range]) {
      const std::size_t first = std::max(position, piece.from.offset);
      const std::size_t last =
          std::min(position + bytes.size(), piece.from.offset + piece.from.bytes);
      if (first < last) {
        std::memcpy(piece.to + (first - piece.from.offset), bytes.data() + (first - position),
                    last - first);
      }
    }
    position += bytes.size();
  });
}

void CheckpointReader::read_decoded(const StoredTensor& tensor, std::int64_t begin,
                                    std::int64_t numel, const Visit& visit) const {
  constexpr std::int64_t kTileNumel = std::int64_t{1} << 18;
  const shard::StoredFormat format = tensor.format;
  const std::unique_ptr<comm::Codec> codec = quant::make_cpu_block_codec(format.blocks());
  const std::size_t element = bytes_of(tensor.dtype);
  const std::int64_t tile = format.tile(kTileNumel);
  std::vector<std::byte> wire;
  std::vector<std::byte> elements;
  for (std::int64_t at = begin; at < begin + numel;) {
    const std::int64_t first = at / format.step() * format.step();
    const std::int64_t last = std::min(first + tile, begin + numel);
    const std::int64_t count = last - first;
    const std::int64_t padded = format.rounded_up(count);
    const shard::StoredBytes places(format, padded);
    wire.assign(places.bytes(), std::byte{0});
    read_blocks(tensor, first, count, places, wire.data());
    elements.resize(static_cast<std::size_t>(padded) * element);
    codec->decode(wire.data(), padded, elements.data(), tensor.dtype, nullptr).wait();
    visit(at, std::span<const std::byte>(elements).subspan(
                  static_cast<std::size_t>(at - first) * element,
                  static_cast<std::size_t>(last - at) * element));
    at = last;
  }
}

void CheckpointReader::read(const Fragment& fragment, DType dtype, const Visit& visit) const {
  read(StoredTensor{dtype, 0, {fragment}}, fragment.begin, fragment.numel, visit);
}

std::uint64_t CheckpointReader::read_unchecked(const Fragment& fragment, std::uint64_t num_bytes,
                                               const VisitBytes& visit) const {
  const Reading reading(*impl_);
  const std::vector<FileRange> ranges = {
      {fragment.file, fragment.offset, num_bytes, impl_->describe(fragment)}};
  RangeStream stream = reading.stream(ranges);
  Xxh3 hash;
  while (const auto piece = stream.next()) {
    hash.add(piece->bytes);
    visit(piece->bytes);
  }
  return hash.value();
}

std::string CheckpointReader::describe(const Fragment& fragment) const {
  return impl_->describe(fragment);
}

std::string CheckpointReader::file_path(const Fragment& fragment) const {
  return impl_->path_of(fragment.file);
}

}  // namespace tessera::checkpoint
