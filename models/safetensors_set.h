// One model in one or several safetensors files, as Hugging Face lays them out:
//
//   DIR/model.safetensors                  all of it, or
//   DIR/model.safetensors.index.json       which tensor is in which file of the directory
//   DIR/model-00001-of-00002.safetensors
//
// or one file of any name. Nothing in it is trusted: the index may name files of its own directory
// alone, and each tensor must be in the file that the index names and in no other.
//
// Threads: const methods from any thread.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/safetensors.h"

namespace tessera::models {

inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kModelIndex = "model.safetensors.index.json";

// The JSON file's text. ConfigError if it is not there, not a file, or larger than `max_bytes`.
std::string read_small_file(const std::string& path, std::size_t max_bytes);

class SafetensorsSet {
 public:
  // A directory, an index or a safetensors file. ConfigError for a path where none is; IoError,
  // CorruptError with the file, and the tensor or offset.
  explicit SafetensorsSet(const std::string& path);

  const std::string& path() const { return path_; }
  const std::string& folder() const { return folder_; }
  std::size_t num_files() const { return files_.size(); }
  // By name.
  const std::map<std::string, checkpoint::TensorEntry>& tensors() const { return tensors_; }
  // As SafetensorsReader::read(). REQUIRES: the tensor is there.
  void read(const std::string& name, std::size_t begin, std::span<std::byte> out) const;

 private:
  void open_index(const std::string& index);
  void open_file(const std::string& path);

  std::string path_;
  std::string folder_;
  std::vector<checkpoint::SafetensorsReader> files_;
  std::map<std::string, checkpoint::TensorEntry> tensors_;
  std::map<std::string, std::size_t> file_of_;
};

}  // namespace tessera::models
