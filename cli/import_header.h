// The header that a reader of foreign checkpoints (cli/import/deepspeed.py) sends ahead of its
// tensors: which they are, and the numbers of the training.
//
// Nothing in it is trusted: types, counts, names that repeat, sizes that overflow. What passes can
// become a manifest (checkpoint/manifest.h).
//
// Threads: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/dtype.h"

namespace tessera::cli {

// Fills `out` with the next bytes, or throws.
using ReadBytes = std::function<void(std::span<std::byte> out)>;

struct ImportedTensor {
  std::string name;  // "value", "master", "exp_avg", "exp_avg_sq"
  DType dtype = DType::kFloat32;
};

struct ImportedParam {
  std::string name;
  std::vector<std::string> tied;
  std::vector<std::int64_t> shape;
  bool trainable = true;
  std::int64_t updates = 0;
  std::vector<ImportedTensor> tensors;  // in the order of their bytes
};

struct ImportedBuffer {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
  std::string type;        // torch's, where ours has no name for it; its elements are bytes then
  std::int64_t numel = 0;  // of `dtype`
};

// Hyperparameters of one group of parameters.
struct ImportedGroup {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
};

struct ImportHeader {
  std::string deepspeed;  // its version
  std::int64_t num_ranks = 0;
  std::int64_t step = 0;
  std::int64_t num_updates = 0;  // steps that were not skipped
  DType precision = DType::kFloat32;
  std::string optimizer;  // "adamw", "adam"
  std::vector<ImportedGroup> groups;
  double loss_scale = 1;
  std::int64_t good_steps = 0;
  std::int64_t hysteresis_left = 0;
  std::string lr_scheduler;  // JSON; empty: there is none
  std::string client_state;
  std::vector<std::string> notes;       // for the user, one line each
  std::vector<ImportedParam> params;    // bytes follow in this order,
  std::vector<ImportedBuffer> buffers;  // and then these
  std::int64_t num_elements = 0;        // of all parameters
};

// Throws CorruptError with what is wrong.
ImportHeader parse_import_header(std::string_view json);
// Of the length that comes first.
ImportHeader read_import_header(const ReadBytes& read);

}  // namespace tessera::cli
