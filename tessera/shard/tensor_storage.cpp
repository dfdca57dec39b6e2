#include "tessera/shard/tensor_storage.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <torch/version.h>

#include "tessera/core/error.h"

namespace tessera::shard {
namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
// Before 2.13 torch sets a storage's access error but has no way to take it back: the flag is
// private. Naming a private member in an explicit instantiation is allowed, and tells it to us.
struct ThrowsOnAccess {
  using Member = bool c10::StorageImpl::*;
  friend Member member_of(ThrowsOnAccess);
};
template <typename Tag, typename Tag::Member kMember>
struct Reveal {
  friend typename Tag::Member member_of(Tag) { return kMember; }
};
template struct Reveal<ThrowsOnAccess, &c10::StorageImpl::throw_on_immutable_data_ptr_>;

void clear_error(c10::StorageImpl& storage) { storage.*member_of(ThrowsOnAccess()) = false; }
#else
void clear_error(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#endif

using Owner = std::shared_ptr<const std::string>;

void delete_owner(void* owner) { const std::unique_ptr<Owner> last(static_cast<Owner*>(owner)); }

// The context of a storage's pointer says whose it is, and marks the storage as bound: the tensor
// may outlive whoever bound it.
c10::DataPtr owned(void* data, const Owner& owner, c10::Device device) {
  return {data, std::make_unique<Owner>(owner).release(), &delete_owner, device};
}

// The pointer is set last: that refreshes what torch derives from the error's being there.
void set_memory(c10::StorageImpl& storage, void* data, const Owner& owner) {
  clear_error(storage);
  storage.set_data_ptr_noswap(owned(data, owner, storage.device()));
}

// The byte count stays: with zero bytes many operators would complain about bounds before anybody
// looks at the memory.
void take_memory_away(c10::StorageImpl& storage, const std::string& error, const Owner& owner) {
  storage.set_data_ptr_noswap(owned(nullptr, owner, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(error);
}

class TensorStorage final : public FullTensor {
 public:
  TensorStorage(const at::Tensor& tensor, c10::Storage storage, const std::string& name,
                std::size_t full_bytes, Owner owner)
      : tensor_(tensor.getIntrusivePtr()),
        storage_(std::move(storage)),
        full_bytes_(full_bytes),
        owner_(owner ? std::move(owner) : std::make_shared<const std::string>()),
        gone_(detail::concat("parameter '", name, kReleasedText,
                             ": its engine is gone. Keep the engine as long as the model, or call "
                             "engine.to_plain() before it goes.")),
        error_(detail::concat(
            "parameter '", name, kReleasedText,
            ": only this rank's shard of it is in memory. It is gathered while a unit "
            "that owns it runs. If another unit uses it, register it there with "
            "engine.add_external(unit, tensor); to read it elsewhere, use "
            "engine.full_value(id).")) {
    detach();
  }
  // The tensor may outlive us in a user's hands.
  ~TensorStorage() override {
    if (full_bytes_ > 0) {
      take_memory_away(*storage_.unsafeGetStorageImpl(), gone_, owner_);
    }
  }

  void attach(void* data) override { set_memory(*storage_.unsafeGetStorageImpl(), data, owner_); }

  // Views and detached aliases count with their tensor.
  std::uint64_t num_writes() const override {
    const auto tensor = tensor_.lock();
    return tensor && !tensor->is_inference() ? tensor->version_counter().current_version() : 0;
  }

  void detach() override {
    // There is nothing in an empty parameter that could be read too early.
    if (full_bytes_ > 0) {
      take_memory_away(*storage_.unsafeGetStorageImpl(), error_, owner_);
    }
  }

 private:
  const c10::weak_intrusive_ptr<c10::TensorImpl> tensor_;  // a module owns it
  const c10::Storage storage_;
  const std::size_t full_bytes_;
  const Owner owner_;
  const std::string gone_;
  const std::string error_;
};

void check_can_be_sharded(const at::Tensor& tensor, const std::string& name) {
  TESSERA_CHECK(tensor.defined(), ConfigError, "parameter '", name,
                "' is an undefined tensor; register it after it has been made");
  TESSERA_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized() && tensor.has_storage(),
                ConfigError, "parameter '", name, "' is ", tensor.toString(), " with layout ",
                tensor.layout(), "; only dense tensors with a storage can be sharded");
  TESSERA_CHECK(tensor.device().is_cpu() || tensor.device().is_cuda(), ConfigError, "parameter '",
                name, "' is on ", tensor.device().str(), "; make it on the CPU or on a GPU");
  TESSERA_CHECK(tensor.is_leaf(), ConfigError, "parameter '", name,
                "' is computed from other tensors (it has a grad_fn); shard those");
}

}  // namespace

DType dtype_of(const at::Tensor& tensor, const std::string& name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      throw ConfigError(detail::concat("parameter '", name, "' has type ",
                                       c10::toString(tensor.scalar_type()),
                                       "; fp32, bf16 and fp16 can be sharded: convert it before"));
  }
}

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kInt64:
      return at::kLong;
    case DType::kInt32:
      return at::kInt;
    case DType::kUInt8:
      return at::kByte;
  }
  return at::ScalarType::Undefined;
}

std::optional<std::string> owner_of(const at::Tensor& tensor) {
  c10::StorageImpl* const storage =
      tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
  if (storage == nullptr || storage->nbytes() == 0) {
    return std::nullopt;
  }
  const c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &delete_owner
             ? std::optional(**static_cast<const Owner*>(data.get_context()))
             : std::nullopt;
}

at::Tensor storage_elements(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach();
  if (values.is_non_overlapping_and_dense()) {
    return values.as_strided({values.numel()}, {1}, values.storage_offset());
  }
  return values.contiguous().view({values.numel()});
}

std::unique_ptr<FullTensor> bind_tensor(const at::Tensor& tensor, const std::string& name,
                                        const Layout& layout,
                                        std::shared_ptr<const std::string> owner) {
  check_can_be_sharded(tensor, name);
  TESSERA_INVARIANT(dtype_of(tensor, name) == layout.dtype(), "parameter '", name, "' of ",
                    tensor.toString(), " has a layout of ", to_string(layout.dtype()));
  TESSERA_INVARIANT(tensor.numel() == layout.numel(), "parameter '", name, "' of ", tensor.numel(),
                    " elements has a layout of ", layout.numel());
  const std::vector<std::int64_t> sizes = tensor.sizes().vec();
  const bool keeps_strides = tensor.is_non_overlapping_and_dense();
  const std::vector<std::int64_t> strides = tensor.strides().vec();
  // Not resizable: resize_() on a parameter would take its memory for its own.
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      c10::SymInt(static_cast<std::int64_t>(layout.full_bytes())),
      c10::DataPtr(nullptr, tensor.device()), nullptr, /*resizable=*/false));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  if (keeps_strides) {
    impl->set_sizes_and_strides(sizes, strides, 0);
  } else {
    impl->set_storage_offset(0);
    impl->set_sizes_contiguous(sizes);
  }
  return std::make_unique<TensorStorage>(tensor, std::move(storage), name, layout.full_bytes(),
                                         std::move(owner));
}

void unbind_tensor(const at::Tensor& tensor, const at::Tensor& value) {
  TESSERA_INVARIANT(tensor.sizes() == value.sizes() && tensor.strides() == value.strides() &&
                        tensor.scalar_type() == value.scalar_type(),
                    "a parameter of ", tensor.toString(), " with sizes ", tensor.sizes(),
                    " gets a value of ", value.toString(), " with sizes ", value.sizes());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(value.storage());
  impl->set_storage_offset(value.storage_offset());
}

}  // namespace tessera::shard
