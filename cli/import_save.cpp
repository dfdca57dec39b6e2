#include "cli/import_save.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/fragment_writer.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/core/config.h"
#include "tessera/core/error.h"
#include "tessera/core/units.h"
#include "tessera/tier/io_engine.h"

namespace tessera::cli {
namespace {

using checkpoint::Fragment;
using checkpoint::FragmentWriter;
using checkpoint::Manifest;
using checkpoint::NewSave;
using checkpoint::StoredParam;
using checkpoint::StoredRankTensor;
using checkpoint::StoredTensor;
using checkpoint::TensorEntry;

constexpr const char* kFileName = "rank-00000.safetensors";
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

// All tensors of the file, in the order of their bytes, named as a save of training names them.
std::vector<TensorEntry> entries_of(const ImportHeader& header) {
  std::vector<TensorEntry> entries;
  for (const ImportedParam& param : header.params) {
    for (const ImportedTensor& tensor : param.tensors) {
      const bool is_value = tensor.name == checkpoint::kValueName;
      entries.push_back(
          {is_value ? param.name : param.name + "#" + tensor.name, tensor.dtype, param.shape});
    }
  }
  for (const ImportedBuffer& buffer : header.buffers) {
    entries.push_back({"buffer#" + buffer.name, buffer.dtype,
                       buffer.type.empty() ? buffer.shape : std::vector{buffer.numel}});
  }
  return entries;
}

class TensorCopier {
 public:
  TensorCopier(const std::string& path, std::vector<TensorEntry> entries, const ReadBytes& read)
      : entries_(std::move(entries)),
        read_(read),
        io_(tier::make_io_engine({}, [](const std::string& /*notice*/) {})),
        writer_(path, entries_, {.io = io_.get()}) {}

  // The next tensor of the file.
  StoredTensor copy() {
    const std::size_t index = next_++;
    const std::size_t bytes = entries_[index].bytes();
    StoredTensor stored;
    stored.dtype = entries_[index].dtype;
    checkpoint::ContentHash content;
    writer_.begin(index);
    for (std::size_t done = 0; done < bytes;) {
      const std::span<std::byte> piece =
          std::span(piece_).first(std::min(kPieceBytes, bytes - done));
      read_(piece);
      content.add(piece);
      writer_.append(piece);
      done += piece.size();
    }
    stored.content = content.value();
    if (bytes > 0) {
      const checkpoint::WrittenTensor& written = writer_.written(index);
      Fragment fragment;
      fragment.offset = written.offset;
      fragment.numel = static_cast<std::int64_t>(bytes / bytes_of(stored.dtype));
      fragment.xxh3 = written.xxh3;
      stored.fragments.push_back(fragment);
    }
    return stored;
  }
  std::uint64_t finish() {
    writer_.finish();
    return writer_.file_bytes();
  }

 private:
  const std::vector<TensorEntry> entries_;
  const ReadBytes& read_;
  const std::unique_ptr<tier::IoEngine> io_;
  FragmentWriter writer_;
  std::size_t next_ = 0;
  std::vector<std::byte> piece_ = std::vector<std::byte>(kPieceBytes);
};

std::map<std::string, std::string> state_of(const ImportHeader& header) {
  std::int64_t num_updates = 0;
  for (const ImportedParam& param : header.params) {
    num_updates = std::max(num_updates, param.updates);
  }
  return {{"num_updated_steps", std::to_string(header.num_updates)},
          // In fp16 ranks agree on it anew.
          {"weight_scale", header.precision == DType::kFloat16 ? "0" : "1"},
          {"loss_scale.value", exact_number(header.loss_scale)},
          {"loss_scale.good_steps", std::to_string(header.good_steps)},
          {"loss_scale.hysteresis_left", std::to_string(header.hysteresis_left)},
          {"optimizer.kind", header.optimizer},
          {"optimizer.num_updates", std::to_string(num_updates)}};
}

// What differs from the defaults, as after a run with these options.
std::map<std::string, std::string> config_of(const ImportHeader& header) {
  const Config defaults;
  std::map<std::string, std::string> config;
  const auto add_text = [&](const char* name, const std::string& value) {
    if (value != defaults.get_string(name)) {
      config.emplace(name, value);
    }
  };
  const auto add_number = [&](const char* name, double value) {
    if (value != defaults.get_double(name)) {
      config.emplace(name, exact_number(value));
    }
  };
  add_text("precision", std::string(to_string(header.precision)));
  add_text("optim.kind", header.optimizer);
  if (!header.groups.empty()) {
    const ImportedGroup& group = header.groups.front();
    // Under a schedule it is that of the last step, not the option.
    if (header.lr_scheduler.empty()) {
      add_number("optim.lr", group.lr);
    }
    add_number("optim.beta1", group.beta1);
    add_number("optim.beta2", group.beta2);
    add_number("optim.eps", group.eps);
    add_number("optim.weight_decay", group.weight_decay);
  }
  return config;
}

std::map<std::string, std::string> user_of(const ImportHeader& header, const std::string& source) {
  std::map<std::string, std::string> user = {{"imported.from", source},
                                             {"imported.deepspeed", header.deepspeed}};
  if (!header.lr_scheduler.empty()) {
    user.emplace("imported.lr_scheduler", header.lr_scheduler);
  }
  if (!header.client_state.empty()) {
    user.emplace("imported.client_state", header.client_state);
  }
  return user;
}

}  // namespace

std::string save_imported(const ImportHeader& header, const ReadBytes& read,
                          const std::function<void()>& finish, const ImportTarget& target) {
  NewSave save(target.root, header.step, {.keep = std::numeric_limits<int>::max()});
  TensorCopier copier(save.path() + "/" + kFileName, entries_of(header), read);
  Manifest manifest;
  manifest.step = header.step;
  manifest.sequence = save.sequence();
  for (const ImportedParam& param : header.params) {
    StoredParam stored;
    stored.name = param.name;
    stored.tied = param.tied;
    stored.shape = param.shape;
    stored.trainable = param.trainable;
    stored.updates = param.updates;
    for (const ImportedTensor& tensor : param.tensors) {
      stored.tensors.emplace(tensor.name, copier.copy());
    }
    manifest.params.push_back(std::move(stored));
  }
  for (const ImportedBuffer& buffer : header.buffers) {
    StoredRankTensor stored;
    stored.name = buffer.name;
    stored.dtype = buffer.dtype;
    stored.type = buffer.type;
    stored.shape = buffer.shape;
    stored.ranks = copier.copy().fragments;
    manifest.buffers.push_back(std::move(stored));
  }
  manifest.state = state_of(header);
  manifest.config = config_of(header);
  manifest.user = user_of(header, target.source);
  finish();
  manifest.files.push_back({kFileName, copier.finish()});
  return save.commit(manifest);
}

}  // namespace tessera::cli
