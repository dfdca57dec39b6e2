#include "tessera/engine/build_scope.h"

#include <map>
#include <mutex>

#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarType.h>

#include "tessera/core/error.h"
#include "tessera/shard/tensor_storage.h"

namespace tessera {
namespace {

thread_local const BuildScope* innermost = nullptr;

// Torch's default type belongs to the process, and ranks may be threads of it: the type of the
// scope opened last holds, and what was before the first comes back with the end of the last.
class DefaultTypes {
 public:
  static DefaultTypes& of_process() {
    static DefaultTypes types;
    return types;
  }

  std::uint64_t add(at::ScalarType type) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_.empty()) {
      before_ = c10::get_default_dtype_as_scalartype();
    }
    open_.emplace(++last_, type);
    set(type);
    return last_;
  }

  void remove(std::uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(number);
    set(open_.empty() ? before_ : open_.rbegin()->second);
  }

 private:
  static void set(at::ScalarType type) { c10::set_default_dtype(c10::scalarTypeToTypeMeta(type)); }

  // Guarded by mutex_.
  std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::map<std::uint64_t, at::ScalarType> open_;  // in the order of their openings
  at::ScalarType before_ = at::kFloat;
};

void check(const BuildOptions& options) {
  TESSERA_CHECK(!options.dtype || *options.dtype == DType::kFloat32 ||
                    *options.dtype == DType::kBFloat16 || *options.dtype == DType::kFloat16,
                ConfigError, "build scope: parameters cannot be ", to_string(*options.dtype),
                "; use fp32, bf16 or fp16");
  TESSERA_CHECK(options.tier.empty() || options.tier == "device" || options.tier == "host",
                ConfigError, "build scope: tier='", options.tier,
                "' is not there yet; use 'device', or 'host' where the engine is on the CPU");
}

}  // namespace

BuildScope::BuildScope(const BuildOptions& options) : options_(options), outer_(innermost) {
  check(options_);
  if (options_.dtype) {
    dtype_number_ = DefaultTypes::of_process().add(shard::scalar_type_of(*options_.dtype));
  }
  innermost = this;
}

BuildScope::~BuildScope() {
  innermost = outer_;
  if (dtype_number_ != 0) {
    DefaultTypes::of_process().remove(dtype_number_);
  }
}

BuildOptions BuildScope::current() {
  BuildOptions result;
  for (const BuildScope* scope = innermost; scope != nullptr; scope = scope->outer_) {
    if (!result.dtype) {
      result.dtype = scope->options_.dtype;
    }
    if (scope->outer_ == nullptr) {
      result.group = scope->options_.group;
      result.tier = scope->options_.tier;
    }
  }
  return result;
}

bool BuildScope::has_overruled() {
  const BuildOptions holds = current();
  for (const BuildScope* scope = innermost; scope != nullptr; scope = scope->outer_) {
    const BuildOptions& own = scope->options_;
    if ((own.group != nullptr && own.group != holds.group) ||
        (!own.tier.empty() && own.tier != holds.tier)) {
      return true;
    }
  }
  return false;
}

}  // namespace tessera
