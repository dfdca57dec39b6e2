#include "tessera/shard/param.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/device/host_threads.h"

namespace tessera::shard {

std::string_view to_string(ParamState state) {
  switch (state) {
    case ParamState::kReleased:
      return "released";
    case ParamState::kGathering:
      return "gathering";
    case ParamState::kAvailable:
      return "available";
  }
  return "unknown";
}

Param::Param(int id, ParamSpec spec, int rank, int num_ranks, device::Device& device,
             std::unique_ptr<FullTensor> tensor)
    : id_(id),
      spec_(std::move(spec)),
      layout_(spec_.numel, num_ranks, spec_.dtype, spec_.format),
      range_(layout_.range(rank)),
      device_(device),
      tensor_(std::move(tensor)) {
  TESSERA_INVARIANT(tensor_ != nullptr, "parameter '", name(), "' has no tensor");
  TESSERA_INVARIANT(
      !layout_.is_encoded() || (!spec_.trainable && codec() != nullptr && host_codec() != nullptr),
      "parameter '", name(), "' is stored as ", describe(layout_.format()),
      ", and is trainable or has no codec");
  take_shard();
}

void Param::take_shard() {
  if (is_on_nvme()) {
    return;
  }
  shard_ = device_.allocate(is_on_host() ? Tier::kPinned : Tier::kDevice, layout_.shard_bytes(),
                            Role::kShard);
  // Waited for: whoever fills in the first values may do so from any stream, or from the host.
  device_
      .start_fill(shard_.data(), 0, layout_.shard_bytes(),
                  device_.stream(device::StreamKind::kCompute))
      .wait();
}

void Param::check_trainable(bool trainable) const {
  TESSERA_CHECK(!trainable || !layout_.is_encoded(), ConfigError, "parameter '", name(),
                "' is to be trained, and is stored as ", describe(layout_.format()),
                ", which no update can change; leave it out of quant.frozen_names, or make it "
                "trainable before its unit is made");
}

void Param::set_trainable(bool trainable) {
  check_trainable(trainable);
  spec_.trainable = trainable;
}

void Param::set_placement(const Placement& placement) {
  TESSERA_INVARIANT(placement.parameter == tier(), "parameter '", name(), "' is in ",
                    to_string(tier()), " memory, and is placed in ", to_string(placement.parameter),
                    " memory without having moved there");
  spec_.placement = placement;
}

void Param::set_tier(Tier tier) {
  check_move(state_ == ParamState::kReleased, "; its shard moves only while it is released");
  if (spec_.placement.parameter == tier) {
    return;
  }
  shard_.reset();
  spec_.placement.parameter = tier;
  take_shard();
}

void Param::move_to(Tier tier) {
  check_move(state_ == ParamState::kReleased, "; its shard moves only while it is released");
  TESSERA_INVARIANT(!is_on_nvme() && tier != Tier::kNvme, "parameter '", name(),
                    "' is moved to or from a store without its bytes");
  if (spec_.placement.parameter == tier) {
    return;
  }
  const device::Memory before = std::move(shard_);
  spec_.placement.parameter = tier;
  take_shard();
  device::Stream& stream = device_.stream(device::StreamKind::kWrite);
  stream.wait(updated_);
  device_.start_copy(shard_.data(), before.data(), layout_.shard_bytes(), stream).wait();
}

// D2H on the one stream that is never made to wait for others: an update that waits until this has
// been read cannot hold it up.
device::Pending Param::start_read(std::int64_t begin, std::int64_t numel, std::byte* to) const {
  TESSERA_INVARIANT(
      !is_on_nvme() && begin >= 0 && numel >= 0 && begin + numel <= layout_.stored_numel(),
      "words [", begin, ", +", numel, ") of the shard of parameter '", name(), "', which has ",
      layout_.stored_numel(), " in ", to_string(tier()), " memory");
  const std::size_t element = bytes_of(layout_.stored_dtype());
  const std::byte* const from = shard() + static_cast<std::size_t>(begin) * element;
  const std::size_t bytes = static_cast<std::size_t>(numel) * element;
  if (device_.is_discrete() && !is_on_host()) {
    return device_.start_copy(to, from, bytes, device_.stream(device::StreamKind::kComm));
  }
  device::copy_host(to, from, bytes);
  return {};
}

void Param::start_gather(void* full) {
  check_move(state_ == ParamState::kReleased, "; a gather starts from released");
  TESSERA_INVARIANT(full != nullptr || layout_.numel() == 0, "parameter '", name(),
                    "' is to be gathered to null");
  TESSERA_INVARIANT(!shard_is_full() || full == shard(), "parameter '", name(),
                    "' has one rank: its shard is the full parameter, and cannot be gathered to ",
                    full);
  full_ = full;
  state_ = ParamState::kGathering;
}

void Param::finish_gather() {
  check_move(state_ == ParamState::kGathering, "; there is no gather to finish");
  state_ = ParamState::kAvailable;
}

void Param::drop() {
  check_move(state_ == ParamState::kGathering, "; there is no gather to drop");
  full_ = nullptr;
  state_ = ParamState::kReleased;
}

void Param::release() {
  check_move(state_ == ParamState::kAvailable, "; only an available one can be released");
  if (num_users_ > 0) {
    throw StateError(detail::concat("parameter '", name(), "' cannot be released: ", num_users_,
                                    " units use it"),
                     name(), {});
  }
  full_ = nullptr;
  state_ = ParamState::kReleased;
}

void Param::add_user() {
  if (num_users_ == 0) {
    check_move(state_ == ParamState::kAvailable, "; only an available one can be used");
    tensor_->attach(full_);
    writes_before_ = tensor_->num_writes();
  }
  ++num_users_;
}

void Param::remove_user(std::string_view unit) {
  if (num_users_ == 0) {
    throw StateError(detail::concat("parameter '", name(), "' has no user to remove"), name(),
                     std::string(unit));
  }
  if (--num_users_ > 0) {
    return;
  }
  tensor_->detach();
  const bool was_written = tensor_->num_writes() != writes_before_;
  const bool was_allowed = std::exchange(edits_allowed_, false);
  TESSERA_CHECK(!was_written || was_allowed, ConfigError, "parameter '", name(),
                "' was changed in place while unit '", unit,
                "' used it: that changes a copy which is about to go. Change parameters inside "
                "engine.gathered(), which writes them back to all ranks");
}

void Param::forget_user() noexcept {
  if (num_users_ == 0) {
    return;
  }
  --num_users_;
  if (num_users_ == 0) {
    tensor_->detach();
    edits_allowed_ = false;
  }
}

void Param::check_move(bool is_legal, const char* rule) const {
  if (!is_legal) [[unlikely]] {
    throw StateError(detail::concat("parameter '", name(), "' is ", to_string(state_), rule),
                     name(), {});
  }
}

void Param::set_updated(device::Pending done, DeviceCopy copy) {
  updated_ = std::move(done);
  device_copy_ = std::move(copy);
  ++version_;
}

ParamTable::ParamTable(int rank, int num_ranks, device::Device& device)
    : rank_(rank), num_ranks_(num_ranks), device_(device) {
  TESSERA_CHECK(num_ranks >= 1 && rank >= 0 && rank < num_ranks, ConfigError,
                "parameter table: rank=", rank, " of num_ranks=", num_ranks);
}

Param& ParamTable::add(ParamSpec spec, std::unique_ptr<FullTensor> tensor) {
  TESSERA_CHECK(!spec.name.empty(), ConfigError, "parameter ", num_params(),
                " has no name; give it the one it has in its module");
  TESSERA_CHECK(find(spec.name) == nullptr, ConfigError, "parameter '", spec.name,
                "' is registered twice; give units names of their own, or register a shared weight "
                "as external to the second unit");
  auto param = std::make_unique<Param>(num_params(), std::move(spec), rank_, num_ranks_, device_,
                                       std::move(tensor));
  params_.push_back(std::move(param));
  Param& added = *params_.back();
  by_name_.emplace(added.name(), &added);
  return added;
}

Param* ParamTable::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

}  // namespace tessera::shard
