// The safetensors format: 8 bytes of header length, a JSON header, and the tensors' bytes.
//
// The writer streams: the header is written from the shapes, then tensors come in the order given,
// in pieces of any size. It writes beside the target and renames at finish(), so that the target is
// the old file or the new one, whole, and never a part; a writer that is destroyed before that, or
// that failed, removes what it wrote. The reader checks a hostile header (length, overlap, gaps,
// overflow, duplicate names, type, depth) before it trusts any of it; it refuses what the reference
// implementation refuses, and besides unknown fields of a tensor.
//
// Threads: one caller at a time; a reader's const methods from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/core/dtype.h"

namespace tessera::checkpoint {

struct TensorEntry {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  // Throws ConfigError for a negative dim, or for more bytes than a number holds.
  std::size_t bytes() const;
};

class SafetensorsWriter {
 public:
  // Throws ConfigError for names that repeat, IoError if the file cannot be made.
  SafetensorsWriter(const std::string& path, const std::vector<TensorEntry>& entries,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The next bytes. IoError (disk full) names the file and what is missing.
  void append(const void* data, std::size_t bytes);
  // On disk when it returns, under the target's name. REQUIRES: exactly the announced bytes have
  // come.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class SafetensorsReader {
 public:
  // IoError, or CorruptError with the offset or tensor and what is wrong.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;

  const std::vector<TensorEntry>& entries() const;  // in file order
  // Of entries()[index], from the start of the file.
  std::uint64_t data_offset(std::size_t index) const;
  const TensorEntry* find(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const;
  // Elements' bytes [begin, begin + out.size()) of one tensor. ConfigError for a name that is not
  // in the file. REQUIRES: the range lies inside the tensor.
  void read(const std::string& name, std::size_t begin, std::span<std::byte> out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
