// What a checkpoint consists of: the one text (manifest.json) that says which tensors there are and
// which bytes of which file each of them is made of. docs/formats.md specifies it.
//
// Pure: text in, text out. parse_manifest() trusts nothing: it refuses what a writer cannot have
// meant (unknown version or key, fragments that overlap, leave gaps or lie outside their file,
// names that repeat or leave the directory, numbers that overflow), and allocates in proportion to
// the text alone. format() holds writers to the same rules, so that what is written can be read.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/dtype.h"
#include "tessera/shard/stored_format.h"

namespace tessera::checkpoint {

// What is written has the lowest version that says it: 2 has tensors that are stored as blocks.
inline constexpr int kManifestVersion = 2;
inline constexpr std::string_view kManifestName = "manifest.json";
// Of every parameter: what the model computes with.
inline constexpr std::string_view kValueName = "value";

struct StoredFile {
  std::string name;  // in the checkpoint's directory: letters, digits, '.', '_' and '-'
  std::uint64_t bytes = 0;

  bool operator==(const StoredFile&) const = default;
};

// Elements [begin, begin + numel) of a tensor, in memory order.
struct Fragment {
  int file = 0;              // in Manifest::files
  std::uint64_t offset = 0;  // of its first byte, from the start of the file
  std::int64_t begin = 0;
  std::int64_t numel = 0;
  std::uint64_t xxh3 = 0;  // of its bytes

  bool operator==(const Fragment&) const = default;
};

struct StoredTensor {
  DType dtype = DType::kFloat32;
  std::uint64_t content = 0;        // ContentHash of the whole tensor
  std::vector<Fragment> fragments;  // by begin; together they are the tensor
  // Of a tensor that is stored as blocks of integers with scales: it has elements of `dtype` when
  // it is decoded, and each fragment is the bytes of `shard_numel` elements, a multiple of the
  // format's step, of which those behind the fragment's are zero.
  shard::StoredFormat format = {};
  std::int64_t shard_numel = 0;

  bool operator==(const StoredTensor&) const = default;
  // Of a fragment, in its file; and the type that the file says it has.
  std::uint64_t bytes_of_fragment(const Fragment& fragment) const;
  DType file_dtype() const { return format.is_encoded() ? DType::kInt32 : dtype; }
};

// A parameter with all that belongs to it. The tensors of a parameter have its number of elements:
// "value" is what the model computes with; "master" its fp32 master weights, where it is not its
// own; others are states of the optimizer, by their names there.
struct StoredParam {
  std::string name;
  std::vector<std::string> tied;  // other names of the same tensor
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // empty: those of a contiguous tensor; else as dense
  bool trainable = true;
  std::int64_t updates = 0;  // the step that corrects its moments
  std::map<std::string, StoredTensor> tensors;

  std::int64_t numel() const;
  bool operator==(const StoredParam&) const = default;
};

// A buffer of a module, or another small tensor that each rank has for itself, such as the state of
// a random generator: one fragment per rank, each of all elements. Ranks that have the same bytes
// may name the same fragment.
struct StoredRankTensor {
  std::string name;
  DType dtype = DType::kUInt8;
  std::string type;  // torch's, where ours has no name for it: elements are bytes then; else empty
  std::vector<std::int64_t> shape;
  std::vector<Fragment> ranks;  // in rank order

  bool operator==(const StoredRankTensor&) const = default;
};

struct Manifest {
  std::int64_t step = 0;      // steps so far
  std::int64_t sequence = 0;  // of the save in its directory
  int num_ranks = 1;
  std::vector<StoredFile> files;
  std::vector<StoredParam> params;  // in registration order
  std::vector<StoredRankTensor> buffers;
  std::vector<StoredRankTensor> generators;
  // Of the engine: numbers that must be exact ("loss_scale.value"), as text that gives them back.
  std::map<std::string, std::string> state;
  std::map<std::string, std::string> config;  // options that differ from their defaults
  std::map<std::string, std::string> user;    // SaveOptions::user

  // Also by a tied name; null: not there. Looks at one after the other.
  const StoredParam* find(std::string_view name) const;
  bool operator==(const Manifest&) const = default;
};

// Ends with a checksum of itself. Throws ConfigError for text that is not UTF-8.
// REQUIRES: `manifest` is one that parse_manifest() takes.
std::string format(const Manifest& manifest);

// `path` names the text in errors. Throws CorruptError with what is wrong and where; of a version
// that is not ours, with both versions.
Manifest parse_manifest(std::string_view text, const std::string& path);

// The last line of a manifest, and the brace that closes it: a checksum of all text before.
std::string manifest_end(std::string_view before);

}  // namespace tessera::checkpoint
