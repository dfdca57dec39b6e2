#include "models/gpt_export.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "models/element_convert.h"
#include "models/gpt.h"
#include "models/gpt_adapters.h"
#include "models/gpt_checkpoint.h"
#include "models/gpt_shapes.h"
#include "models/safetensors_set.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::models {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;  // converted at a time
constexpr const char* kAdapterFile = "adapter_model.safetensors";

std::string reason_of(int error) { return std::generic_category().message(error); }

// A directory that gets its name when it is complete; until then it is removed with all in it.
class NewDirectory {
 public:
  explicit NewDirectory(std::string target) : target_(std::move(target)) {
    while (target_.size() > 1 && target_.back() == '/') {
      target_.pop_back();
    }
    check_free();
    path_ = target_ + ".partial-" + std::to_string(::getpid());
    std::error_code error;
    const bool made = fs::create_directory(path_, error);
    TESSERA_CHECK(made, IoError, printable(path_, 400), ": cannot make the directory: ",
                  error ? error.message() : "it is there already; remove it");
  }
  ~NewDirectory() {
    std::error_code ignored;
    if (!path_.empty()) {
      fs::remove_all(path_, ignored);
    }
  }
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  std::string file(const std::string& name) const { return (fs::path(path_) / name).string(); }

  void check_room(std::uint64_t bytes) const {
    std::error_code error;
    const fs::space_info space = fs::space(path_, error);
    TESSERA_CHECK(error || space.available >= bytes, IoError, printable(target_, 400), ": needs ",
                  bytes, " bytes, and the disk has ", space.available,
                  " left; make room, or export in fewer bytes (--precision bf16)");
  }

  void commit() {
    check_free();
    sync_directory(path_);
    // Replaces an empty directory, and nothing else.
    TESSERA_CHECK(std::rename(path_.c_str(), target_.c_str()) == 0, IoError,
                  printable(target_, 400), ": cannot get its name: ", reason_of(errno));
    path_.clear();
    const std::string parent = fs::path(target_).parent_path().string();
    sync_directory(parent.empty() ? "." : parent);
  }

 private:
  void check_free() const {
    std::error_code ignored;
    const bool is_free = !fs::exists(fs::symlink_status(target_, ignored)) ||
                         (fs::is_directory(target_, ignored) && fs::is_empty(target_, ignored));
    TESSERA_CHECK(is_free, ConfigError, printable(target_, 400),
                  ": is there already; name a directory that is not");
  }

  static void sync_directory(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool synced = descriptor >= 0 && ::fsync(descriptor) == 0;
    const int error = errno;
    if (descriptor >= 0) {
      ::close(descriptor);
    }
    TESSERA_CHECK(synced, IoError, printable(path, 400),
                  ": cannot bring the directory to the disk: ", reason_of(error));
  }

  std::string target_;
  std::string path_;  // empty: it has its name
};

void write_text_file(const std::string& path, const std::string& text) {
  std::FILE* const file = std::fopen(path.c_str(), "wxe");
  TESSERA_CHECK(file != nullptr, IoError, printable(path, 400),
                ": cannot create: ", reason_of(errno));
  bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  written = written && std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
  const int error = errno;
  written = std::fclose(file) == 0 && written;
  TESSERA_CHECK(written, IoError, printable(path, 400), ": cannot write: ", reason_of(error));
}

// One tensor of the set.
struct ExportTensor {
  std::string param;
  FileTensor file;
  std::uint64_t bytes = 0;
  bool is_merged = false;  // with the adapter beside it
};

// Takes tensors from the checkpoint to a file.
class TensorExport {
 public:
  TensorExport(const GptCheckpoint& checkpoint, DType dtype, std::size_t tile_bytes)
      : checkpoint_(checkpoint), dtype_(dtype), tile_bytes_(tile_bytes) {}

  void run(const ExportTensor& tensor, checkpoint::SafetensorsWriter& writer) {
    adapter_.reset();
    if (tensor.is_merged) {
      adapter_ = std::make_unique<AdapterProduct>(checkpoint_, tensor.param, dtype_);
    }
    if (tensor.file.is_transposed) {
      run_transposed(tensor, writer);
    } else {
      run_straight(tensor, writer);
    }
  }

 private:
  void run_straight(const ExportTensor& tensor, checkpoint::SafetensorsWriter& writer) {
    const auto numel = static_cast<std::int64_t>(tensor.bytes / bytes_of(dtype_));
    visit(tensor, numel, [&](std::int64_t, std::span<const std::byte> converted) {
      writer.append(converted.data(), converted.size());
    });
  }

  // Ours is [rows, columns], the file's [columns, rows]. A band is what fits in the tile of the
  // file's rows, which are columns of ours: all of ours pass by for each.
  void run_transposed(const ExportTensor& tensor, checkpoint::SafetensorsWriter& writer) {
    const std::size_t bytes = bytes_of(dtype_);
    const auto columns = static_cast<std::size_t>(tensor.file.sizes[0]);
    const auto rows = static_cast<std::size_t>(tensor.file.sizes[1]);
    const std::size_t most = std::clamp<std::size_t>(tile_bytes_ / (rows * bytes), 1, columns);
    std::vector<std::byte> tile;
    for (std::size_t band = 0; band < columns; band += most) {
      const std::size_t count = std::min(most, columns - band);
      tile.resize(count * rows * bytes);
      const auto keep = [&](std::int64_t begin, std::span<const std::byte> converted) {
        std::size_t row = static_cast<std::size_t>(begin) / columns;
        std::size_t column = static_cast<std::size_t>(begin) % columns;
        for (std::size_t at = 0; at < converted.size(); at += bytes) {
          if (column >= band && column < band + count) {
            std::memcpy(tile.data() + ((column - band) * rows + row) * bytes, converted.data() + at,
                        bytes);
          }
          if (++column == columns) {
            column = 0;
            ++row;
          }
        }
      };
      visit(tensor, static_cast<std::int64_t>(rows * columns), keep);
      writer.append(tile.data(), tile.size());
    }
  }

  // All elements in order, as the file's type.
  void visit(const ExportTensor& tensor, std::int64_t numel,
             const checkpoint::CheckpointReader::Visit& use) {
    const checkpoint::StoredTensor& stored = checkpoint_.stored(tensor.param, dtype_);
    const std::size_t from_bytes = bytes_of(stored.dtype);
    const std::size_t to_bytes = bytes_of(dtype_);
    checkpoint_.visit(stored, {0, numel}, [&](std::int64_t begin, std::span<const std::byte> all) {
      if (stored.dtype == dtype_ && !adapter_) {
        use(begin, all);
        return;
      }
      const std::size_t most = kPieceBytes / from_bytes * from_bytes;
      for (std::size_t at = 0; at < all.size(); at += most) {
        auto piece = all.subspan(at, std::min(most, all.size() - at));
        const std::size_t count = piece.size() / from_bytes;
        const std::int64_t piece_begin = begin + static_cast<std::int64_t>(at / from_bytes);
        DType from = stored.dtype;
        if (adapter_) {
          merged_.resize(count);
          convert_elements(from, piece, DType::kFloat32,
                           reinterpret_cast<std::byte*>(merged_.data()));
          adapter_->add_to(piece_begin, merged_);
          from = DType::kFloat32;
          piece = std::as_bytes(std::span(merged_));
        }
        converted_.resize(count * to_bytes);
        convert_elements(from, piece, dtype_, converted_.data());
        check_range(tensor, from, piece);
        use(piece_begin, converted_);
      }
    });
  }

  // Of what was converted: fp16 ends at 65504, and what lies beyond would become infinite.
  void check_range(const ExportTensor& tensor, DType from_type,
                   std::span<const std::byte> from) const {
    if (dtype_ != DType::kFloat16) {
      return;
    }
    for (std::size_t i = 0; i < converted_.size() / sizeof(Float16); ++i) {
      Float16 half{};
      std::memcpy(&half, converted_.data() + i * sizeof(half), sizeof(half));
      if ((half.bits & 0x7fffU) != 0x7c00U) {
        continue;
      }
      float value = 0;
      const std::size_t bytes = bytes_of(from_type);
      convert_elements(from_type, from.subspan(i * bytes, bytes), DType::kFloat32,
                       reinterpret_cast<std::byte*>(&value));
      TESSERA_CHECK(std::isinf(value), ConfigError, "parameter ", in_quotes(tensor.param),
                    " has the value ", value,
                    ", which fp16 cannot hold; export with --precision bf16 or fp32");
    }
  }

  const GptCheckpoint& checkpoint_;
  const DType dtype_;
  const std::size_t tile_bytes_;
  std::unique_ptr<AdapterProduct> adapter_;  // of the tensor that passes
  std::vector<float> merged_;
  std::vector<std::byte> converted_;
};

std::vector<ExportTensor> tensors_of(const GptCheckpoint& checkpoint, const ExportOptions& options,
                                     DType dtype) {
  const std::string prefix = options.naming == GptNaming::kGpt2 ? kGpt2Prefix : "";
  const bool are_alone = options.adapters == ExportAdapters::kAlone;
  std::vector<ExportTensor> tensors;
  for (const ParamShape& param : gpt_shape(checkpoint.options()).params) {
    if (is_adapter(param.name) == are_alone) {
      tensors.push_back({param.name, file_tensor(options.naming, prefix, param.name, param.sizes),
                         static_cast<std::uint64_t>(param.numel()) * bytes_of(dtype),
                         !are_alone && has_adapter(checkpoint, param.name)});
    }
  }
  return tensors;
}

// One after the other into files of at most so many bytes.
std::vector<std::vector<ExportTensor>> cut_into_files(std::vector<ExportTensor> tensors,
                                                      std::uint64_t most_bytes) {
  std::vector<std::vector<ExportTensor>> files;
  std::uint64_t bytes = 0;
  for (ExportTensor& tensor : tensors) {
    if (files.empty() || bytes + tensor.bytes > most_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += tensor.bytes;
    files.back().push_back(std::move(tensor));
  }
  return files;
}

std::string file_name(std::size_t number, std::size_t num_files) {
  if (num_files == 1) {
    return kModelFile;
  }
  const auto padded = [](std::size_t value) {
    const std::string digits = std::to_string(value);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return "model-" + padded(number + 1) + "-of-" + padded(num_files) + ".safetensors";
}

void write_index(const std::string& path, const std::vector<std::vector<ExportTensor>>& files,
                 std::uint64_t total_bytes) {
  Json index;
  index["metadata"]["total_size"] = total_bytes;
  Json& map = index["weight_map"];
  for (std::size_t i = 0; i < files.size(); ++i) {
    for (const ExportTensor& tensor : files[i]) {
      map[tensor.file.name] = file_name(i, files.size());
    }
  }
  write_text_file(path, index.dump(2) + "\n");
}

}  // namespace

std::string export_config(const GptOptions& options, GptNaming naming, DType dtype) {
  const char* const type = dtype == DType::kFloat32    ? "float32"
                           : dtype == DType::kBFloat16 ? "bfloat16"
                                                       : "float16";
  Json config;
  if (naming == GptNaming::kGpt2) {
    config["architectures"] = Json::array({"GPT2LMHeadModel"});
  }
  config["model_type"] = naming == GptNaming::kGpt2 ? "gpt2" : "tessera-gpt";
  config["vocab_size"] = options.vocabulary;
  config["n_positions"] = options.sequence;
  config["n_embd"] = options.width;
  config["n_layer"] = options.layers;
  config["n_head"] = options.heads;
  config["n_inner"] = 4 * options.width;
  config["activation_function"] = options.gelu_tanh ? "gelu_new" : "gelu";
  config["layer_norm_epsilon"] = kGptNormEps;
  config["scale_attn_weights"] = true;
  config["scale_attn_by_inverse_layer_idx"] = false;
  config["tie_word_embeddings"] = options.tie_head;
  for (const char* const dropout : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
    config[dropout] = 0.0;
  }
  // GPT-2's own lie outside of other vocabularies.
  config["bos_token_id"] = nullptr;
  config["eos_token_id"] = nullptr;
  config["torch_dtype"] = type;
  return config.dump(2) + "\n";
}

std::string adapter_config(const GptOptions& options) {
  Json config;
  config["peft_type"] = "LORA";
  config["task_type"] = "CAUSAL_LM";
  config["base_model_name_or_path"] = nullptr;
  config["r"] = options.adapter_rank;
  if (options.adapter_alpha == std::floor(options.adapter_alpha) && options.adapter_alpha < 1e9) {
    config["lora_alpha"] = static_cast<std::int64_t>(options.adapter_alpha);
  } else {
    config["lora_alpha"] = options.adapter_alpha;
  }
  config["lora_dropout"] = 0.0;
  // Of attention and of the feed-forward; both have a c_proj.
  config["target_modules"] = {"c_attn", "c_proj", "c_fc"};
  config["fan_in_fan_out"] = true;  // GPT-2's layers are [inputs, outputs]
  config["bias"] = "none";
  config["inference_mode"] = true;
  return config.dump(2) + "\n";
}

ExportResult export_weights(const ExportOptions& options) {
  TESSERA_INVARIANT(options.shard_bytes > 0, "files of no bytes");
  const bool are_alone = options.adapters == ExportAdapters::kAlone;
  TESSERA_INVARIANT(!are_alone || options.naming == GptNaming::kGpt2, "PEFT has no names of ours");
  const GptCheckpoint checkpoint(options.checkpoint);
  const GptOptions& model = checkpoint.options();
  TESSERA_CHECK(!are_alone || model.adapter_rank > 0, ConfigError,
                printable(checkpoint.path(), 400),
                ": its model has no adapters; leave --adapters out");
  const DType dtype = options.dtype.value_or(model.dtype);
  NewDirectory directory(options.to);

  std::uint64_t total_bytes = 0;
  std::vector<ExportTensor> tensors = tensors_of(checkpoint, options, dtype);
  const auto num_tensors = static_cast<int>(tensors.size());
  int num_merged = 0;
  for (const ExportTensor& tensor : tensors) {
    total_bytes += tensor.bytes;
    num_merged += tensor.is_merged ? 1 : 0;
  }
  directory.check_room(total_bytes);
  // PEFT reads one file.
  const auto files =
      cut_into_files(std::move(tensors),
                     are_alone ? std::numeric_limits<std::uint64_t>::max() : options.shard_bytes);
  TensorExport tensor_export(checkpoint, dtype, options.tile_bytes);
  for (std::size_t i = 0; i < files.size(); ++i) {
    std::vector<checkpoint::TensorEntry> entries;
    for (const ExportTensor& tensor : files[i]) {
      entries.push_back({tensor.file.name, dtype, tensor.file.sizes});
    }
    checkpoint::SafetensorsWriter writer(
        directory.file(are_alone ? kAdapterFile : file_name(i, files.size())), entries,
        {{"format", "pt"}});
    for (const ExportTensor& tensor : files[i]) {
      tensor_export.run(tensor, writer);
    }
    writer.finish();
  }
  if (files.size() > 1) {
    write_index(directory.file(kModelIndex), files, total_bytes);
  }
  if (are_alone) {
    write_text_file(directory.file("adapter_config.json"), adapter_config(model));
  } else {
    write_text_file(directory.file("config.json"), export_config(model, options.naming, dtype));
  }
  directory.commit();
  return {checkpoint.path(), checkpoint.manifest().step,     dtype,
          num_tensors,       static_cast<int>(files.size()), total_bytes,
          num_merged};
}

}  // namespace tessera::models
