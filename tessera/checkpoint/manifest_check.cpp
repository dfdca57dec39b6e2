#include "tessera/checkpoint/manifest_check.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/quant/block_codec.h"

namespace tessera::checkpoint {
namespace {

constexpr std::size_t kMaxFileName = 255;  // as in Linux

// Nothing where the product, from left to right, is more than a number holds.
std::optional<std::int64_t> element_count(const std::vector<std::int64_t>& shape) {
  std::int64_t numel = 1;
  for (const std::int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(numel, dim, &numel)) {
      return std::nullopt;
    }
  }
  return numel;
}

// Whether the elements lie one after the other in some order of the dims, none twice.
bool is_dense(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides) {
  std::vector<std::size_t> dims;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    if (shape[dim] != 1) {  // the stride of a single element says nothing
      dims.push_back(dim);
    }
  }
  std::sort(dims.begin(), dims.end(),
            [&strides](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  std::int64_t expected = 1;
  for (const std::size_t dim : dims) {
    if (strides[dim] != expected) {
      return false;
    }
    expected *= shape[dim];
  }
  return true;
}

bool is_plain(const std::string& name) {
  return !name.empty() && name.size() <= kMaxFileName && name.front() != '.' &&
         name.front() != '-' && name != kManifestName &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '_' || c == '-';
         });
}

class Checks {
 public:
  explicit Checks(const Manifest& manifest) : manifest_(manifest) {}

  void run() {
    TESSERA_CHECK(manifest_.step >= 0 && manifest_.sequence >= 0, ManifestProblem, "step ",
                  manifest_.step, " and sequence ", manifest_.sequence, " cannot be negative");
    TESSERA_CHECK(manifest_.num_ranks >= 1 && manifest_.num_ranks <= kMaxRanks, ManifestProblem,
                  "num_ranks is ", manifest_.num_ranks, "; it must be 1 to ", kMaxRanks);
    check_files();
    check_params();
    check_rank_tensors(manifest_.buffers, "buffer ");
    check_rank_tensors(manifest_.generators, "generator ");
    check_places();
  }

 private:
  // A range of a file with who lies there. Ranks of one tensor have one owner: they may share it.
  struct Place {
    int file;
    std::uint64_t begin;
    std::uint64_t end;
    std::size_t owner;
    bool operator<(const Place& other) const {
      return std::tie(file, begin, end, owner) <
             std::tie(other.file, other.begin, other.end, other.owner);
    }
  };

  void check_files() const {
    std::set<std::string_view> names;
    for (const StoredFile& file : manifest_.files) {
      TESSERA_CHECK(is_plain(file.name), ManifestProblem, "file name ",
                    tessera::in_quotes(file.name),
                    " is not a plain name (letters, digits, '.', '_', '-') in the directory");
      TESSERA_CHECK(names.insert(file.name).second, ManifestProblem, "file ",
                    tessera::in_quotes(file.name), " comes twice");
      TESSERA_CHECK(file.bytes <= kMaxNumber, ManifestProblem, "file ",
                    tessera::in_quotes(file.name), " of ", file.bytes, " bytes is too large");
    }
  }

  void check_name(const std::string& name, const char* what, std::set<std::string_view>& names) {
    TESSERA_CHECK(!name.empty(), ManifestProblem, "a ", what, "has no name");
    TESSERA_CHECK(names.insert(name).second, ManifestProblem, what, tessera::in_quotes(name),
                  ": the name comes twice");
  }

  static std::int64_t check_shape(const std::vector<std::int64_t>& shape, const std::string& what) {
    TESSERA_CHECK(shape.size() <= kMaxDims, ManifestProblem, what, "shape has ", shape.size(),
                  " dims; at most ", kMaxDims, " are allowed");
    const auto numel = element_count(shape);
    TESSERA_CHECK(numel.has_value(), ManifestProblem, what, "shape ", shape_text(shape),
                  " has a negative dim, or more elements than a number holds");
    return *numel;
  }

  void check_params() {
    std::set<std::string_view> names;
    for (const StoredParam& param : manifest_.params) {
      check_name(param.name, "parameter ", names);
      for (const std::string& name : param.tied) {
        check_name(name, "tied name ", names);
      }
      const std::string what = "parameter " + tessera::in_quotes(param.name) + ": ";
      const std::int64_t numel = check_shape(param.shape, what);
      check_strides(param, numel, what);
      TESSERA_CHECK(param.updates >= 0, ManifestProblem, what, param.updates, " updates");
      TESSERA_CHECK(param.tensors.contains(std::string(kValueName)), ManifestProblem, what,
                    "has no tensor ", tessera::in_quotes(kValueName));
      for (const auto& [name, tensor] : param.tensors) {
        TESSERA_CHECK(!name.empty(), ManifestProblem, what, "a tensor has no name");
        const std::string where = what + "tensor " + tessera::in_quotes(name) + ": ";
        std::int64_t covered = 0;
        check_blocks(tensor, where);
        for (const Fragment& fragment : tensor.fragments) {
          TESSERA_CHECK(fragment.begin == covered, ManifestProblem, where,
                        "a fragment begins at element ", fragment.begin,
                        ", the one before it ends at ", covered,
                        fragment.begin > covered ? "; there is a gap" : "; they overlap");
          check_fragment(fragment, numel - covered, where);
          check_place(fragment, fragment.numel, tensor.bytes_of_fragment(fragment),
                      tensor.file_dtype(), {where, num_owners_++});
          if (tensor.format.is_encoded()) {
            TESSERA_CHECK(
                fragment.numel <= tensor.shard_numel && fragment.begin % tensor.format.step() == 0,
                ManifestProblem, where, "elements [", fragment.begin, ", +", fragment.numel,
                ") are no blocks of a fragment of ", tensor.shard_numel);
          }
          covered += fragment.numel;
        }
        TESSERA_CHECK(covered == numel, ManifestProblem, where, "its fragments have ", covered,
                      " of ", numel, " elements");
      }
    }
  }

  static void check_strides(const StoredParam& param, std::int64_t numel, const std::string& what) {
    const auto& strides = param.strides;
    TESSERA_CHECK(strides.empty() || strides.size() == param.shape.size(), ManifestProblem, what,
                  strides.size(), " strides for ", param.shape.size(), " dims");
    TESSERA_CHECK(
        std::all_of(strides.begin(), strides.end(), [](std::int64_t s) { return s >= 0; }) &&
            (strides.empty() || numel == 0 || is_dense(param.shape, strides)),
        ManifestProblem, what, "strides ", shape_text(strides), " of shape ",
        shape_text(param.shape), " leave gaps, or use an element twice");
  }

  void check_rank_tensors(const std::vector<StoredRankTensor>& tensors, const char* kind) {
    std::set<std::string_view> names;
    for (const StoredRankTensor& tensor : tensors) {
      check_name(tensor.name, kind, names);
      const std::string what = kind + tessera::in_quotes(tensor.name) + ": ";
      const std::int64_t count = check_shape(tensor.shape, what);
      TESSERA_CHECK(tensor.ranks.size() == static_cast<std::size_t>(manifest_.num_ranks),
                    ManifestProblem, what, tensor.ranks.size(), " fragments for ",
                    manifest_.num_ranks, " ranks");
      std::int64_t numel = count;
      if (!tensor.type.empty()) {  // elements of a size that is not ours to know, as bytes
        numel = tensor.ranks.front().numel;
        TESSERA_CHECK(tensor.dtype == DType::kUInt8, ManifestProblem, what, "of type ",
                      tessera::in_quotes(tensor.type), " its bytes are U8, not ",
                      type_name(tensor.dtype));
        TESSERA_CHECK(numel >= 0 && (count == 0 ? numel == 0 : numel % count == 0), ManifestProblem,
                      what, numel, " bytes for ", count, " elements of type ",
                      tessera::in_quotes(tensor.type));
      }
      for (const Fragment& fragment : tensor.ranks) {
        TESSERA_CHECK(fragment.begin == 0 && fragment.numel == numel, ManifestProblem, what,
                      "a rank has elements [", fragment.begin, ", +", fragment.numel, ") of ",
                      numel, "; each has all");
        check_fragment(fragment, numel, what);
        check_place(fragment, fragment.numel,
                    static_cast<std::uint64_t>(fragment.numel) * bytes_of(tensor.dtype),
                    tensor.dtype, {what, num_owners_});
      }
      ++num_owners_;
    }
  }

  void check_fragment(const Fragment& fragment, std::int64_t max_numel,
                      const std::string& what) const {
    TESSERA_CHECK(fragment.numel >= 0 && fragment.numel <= max_numel, ManifestProblem, what,
                  "a fragment of ", fragment.numel, " elements where ", max_numel, " are left");
    TESSERA_CHECK(
        fragment.file >= 0 && static_cast<std::size_t>(fragment.file) < manifest_.files.size(),
        ManifestProblem, what, "a fragment in file ", fragment.file, " of ",
        manifest_.files.size());
  }

  static void check_blocks(const StoredTensor& tensor, const std::string& what) {
    if (!tensor.format.is_encoded()) {
      return;
    }
    try {
      quant::check_block_format(tensor.format.blocks());
    } catch (const ConfigError& error) {
      throw ManifestProblem(what + error.what());
    }
    TESSERA_CHECK(tensor.shard_numel >= 0 && tensor.shard_numel % tensor.format.step() == 0 &&
                      static_cast<std::uint64_t>(tensor.shard_numel) <= kMaxNumber / 16,
                  ManifestProblem, what, "blocks of ", tensor.shard_numel,
                  " elements; it must be a multiple of ", tensor.format.step());
    TESSERA_CHECK(tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kBFloat16 ||
                      tensor.dtype == DType::kFloat16,
                  ManifestProblem, what, "blocks that are decoded to ", type_name(tensor.dtype),
                  "; only F32, BF16 and F16 are");
  }

  struct Whose {
    const std::string& what;
    std::size_t owner;
  };
  void check_place(const Fragment& fragment, std::int64_t numel, std::uint64_t bytes, DType dtype,
                   const Whose& whose) {
    const StoredFile& file = manifest_.files[static_cast<std::size_t>(fragment.file)];
    // `bytes` may have overflown where elements are more than a file has bytes.
    TESSERA_CHECK(fragment.offset <= file.bytes &&
                      static_cast<std::uint64_t>(numel) <= kMaxNumber / bytes_of(dtype) &&
                      bytes <= file.bytes - fragment.offset,
                  ManifestProblem, whose.what, numel, " elements of ", type_name(dtype),
                  " at offset ", fragment.offset, " do not lie in file ",
                  tessera::in_quotes(file.name), " of ", file.bytes, " bytes");
    if (numel > 0) {
      places_.push_back({fragment.file, fragment.offset, fragment.offset + bytes, whose.owner});
    }
  }

  void check_places() {
    std::sort(places_.begin(), places_.end());
    for (std::size_t i = 1; i < places_.size(); ++i) {
      const Place& before = places_[i - 1];
      const Place& place = places_[i];
      const bool is_shared =
          place.owner == before.owner && place.begin == before.begin && place.end == before.end;
      TESSERA_CHECK(place.file != before.file || place.begin >= before.end || is_shared,
                    ManifestProblem, "two fragments lie in bytes [", place.begin, ", ",
                    std::min(before.end, place.end), ") of file ",
                    tessera::in_quotes(manifest_.files[static_cast<std::size_t>(place.file)].name));
    }
  }

  const Manifest& manifest_;
  std::size_t num_owners_ = 0;
  std::vector<Place> places_;
};

}  // namespace

void check_manifest(const Manifest& manifest) { Checks(manifest).run(); }

}  // namespace tessera::checkpoint
