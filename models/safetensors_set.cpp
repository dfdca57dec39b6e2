#include "models/safetensors_set.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::models {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::size_t kMostIndexBytes = std::size_t{16} << 20;
constexpr std::string_view kIndexEnding = ".index.json";
constexpr const char* kWeightMap = "weight_map";

bool exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// Of the index's own directory, and nothing that leads out of it.
bool is_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\0", 2)) == name.npos;
}

// Refuses a key that comes twice, of which a parser would take either.
json parse_index(const std::string& text, const std::string& shown) {
  std::set<std::pair<std::string, std::string>> keys;
  std::string outer;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth <= 2) {
      const std::string key = parsed.get<std::string>();
      outer = depth == 1 ? key : outer;
      TESSERA_CHECK(keys.emplace(outer, depth == 1 ? std::string() : key).second, CorruptError,
                    shown, ": key ", in_quotes(key), " comes twice; write or copy it again");
    }
    return true;
  };
  return json::parse(text, watch, /*allow_exceptions=*/false);
}

// Which tensor is in which file.
std::map<std::string, std::string> read_index(const std::string& path) {
  const std::string shown = printable(path, 400);
  const json index = parse_index(read_small_file(path, kMostIndexBytes), shown);
  const auto map = index.is_object() ? index.find(kWeightMap) : index.end();
  TESSERA_CHECK(index.is_object() && map != index.end() && map->is_object() && !map->empty(),
                CorruptError, shown, ": not an index of safetensors files: it has no \"",
                kWeightMap, "\" that says which tensor is in which file");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : map->items()) {
    const bool is_named = file.is_string() && is_file_name(file.get<std::string>());
    TESSERA_CHECK(is_named, CorruptError, shown, ": tensor ", in_quotes(tensor), " is in ",
                  printable(file.dump(-1, ' ', true, json::error_handler_t::replace), 120),
                  ", which is not the name of a file beside the index");
    files[tensor] = file.get<std::string>();
  }
  return files;
}

}  // namespace

std::string read_small_file(const std::string& path, std::size_t max_bytes) {
  const std::string shown = printable(path, 400);
  std::error_code error;
  TESSERA_CHECK(fs::is_regular_file(path, error), ConfigError, shown, ": ",
                error ? error.message() : "not a regular file");
  std::ifstream file(path, std::ios::binary);
  TESSERA_CHECK(file, ConfigError, shown,
                ": cannot open: ", std::generic_category().message(errno));
  std::string text(std::min<std::uintmax_t>(fs::file_size(path, error), max_bytes + 1), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  TESSERA_CHECK(!file.bad() && !error, ConfigError, shown, ": cannot be read");
  TESSERA_CHECK(text.size() <= max_bytes, ConfigError, shown, ": larger than ", max_bytes,
                " bytes; that is not such a file");
  return text;
}

SafetensorsSet::SafetensorsSet(const std::string& path) : path_(path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) {
    TESSERA_CHECK(exists(path), ConfigError, printable(path, 400),
                  ": there is no such file or directory; name a safetensors file, or a directory "
                  "with ",
                  kModelFile, " or ", kModelIndex);
    const std::string folder = fs::path(path).parent_path().string();
    folder_ = folder.empty() ? "." : folder;
    if (path.ends_with(kIndexEnding)) {
      open_index(path);
    } else {
      open_file(path);
    }
    return;
  }
  folder_ = path;
  const std::string one = (fs::path(path) / kModelFile).string();
  const std::string index = (fs::path(path) / kModelIndex).string();
  TESSERA_CHECK(!exists(one) || !exists(index), ConfigError, printable(path, 400), ": has both ",
                kModelFile, " and ", kModelIndex, "; name the one that is meant");
  TESSERA_CHECK(exists(one) || exists(index), ConfigError, printable(path, 400), ": has neither ",
                kModelFile, " nor ", kModelIndex, "; name a directory with weights, or a file");
  if (exists(one)) {
    open_file(one);
  } else {
    open_index(index);
  }
}

void SafetensorsSet::open_index(const std::string& index) {
  const std::map<std::string, std::string> expected = read_index(index);
  std::set<std::string> names;
  for (const auto& [tensor, file] : expected) {
    names.insert(file);
  }
  for (const std::string& name : names) {
    const std::string path = (fs::path(folder_) / name).string();
    TESSERA_CHECK(exists(path), ConfigError, printable(path, 400), ": the file is missing, and ",
                  printable(index, 400), " names it; copy all files of the set");
    open_file(path);
    for (const checkpoint::TensorEntry& entry : files_.back().entries()) {
      const auto found = expected.find(entry.name);
      TESSERA_CHECK(found != expected.end() && found->second == name, CorruptError,
                    printable(path, 400), ": holds tensor ", in_quotes(entry.name),
                    found == expected.end()
                        ? std::string(", which is not in the index")
                        : ", which the index says is in " + in_quotes(found->second),
                    "; do these files belong together?");
    }
  }
  for (const auto& [tensor, file] : expected) {
    TESSERA_CHECK(tensors_.count(tensor) == 1, CorruptError,
                  printable((fs::path(folder_) / file).string(), 400), ": holds no tensor ",
                  in_quotes(tensor),
                  ", which the index says it does; do these files belong "
                  "together?");
  }
}

void SafetensorsSet::open_file(const std::string& path) {
  files_.emplace_back(path);
  for (const checkpoint::TensorEntry& entry : files_.back().entries()) {
    tensors_.emplace(entry.name, entry);
    file_of_.emplace(entry.name, files_.size() - 1);
  }
}

void SafetensorsSet::read(const std::string& name, std::size_t begin,
                          std::span<std::byte> out) const {
  const auto found = file_of_.find(name);
  TESSERA_INVARIANT(found != file_of_.end(), path_, ": no tensor ", in_quotes(name));
  files_[found->second].read(name, begin, out);
}

}  // namespace tessera::models
