// One sharded parameter: where its bytes are, and which moves are legal.
//
//               start_gather             finish_gather
//   kReleased ---------------> kGathering -------------> kAvailable
//       ^                           |                        |
//       +------- drop --------------+                        |
//       +----------------------- release --------------------+
//
// Invariants:
//  (1) This rank's shard exists in every state; gathering never consumes it. Its padding is zero.
//      It is in the device's memory, in pinned host memory of a discrete device, or on NVMe
//      (shard_store.h): then shard() is null.
//  (2) The tensor has storage exactly while the parameter has users: what is gathered ahead or kept
//      for later cannot be read or changed by anybody else. It is one tensor for life: see
//      [Note: identity].
//  (3) In a group of one a shard in the device's memory is the full parameter: gathering attaches
//      it, and moves nothing; unless it is stored as blocks (stored_format.h), which a gather
//      decodes. Such a parameter is frozen for good.
//  (4) A shard carries the number of its last update and the work that completes it; whoever reads
//      the shard orders itself behind that work.
//  (5) Every illegal move is a StateError with the parameter's name and, where one is known, the
//      unit's.
//  (6) A full copy is read-only, since the shard is what counts: a write to the tensor while it is
//      used is found when its last user goes, unless edits were allowed.
//
// [Note: identity] Autograd may have saved the full tensor, or a view of it, for backward. If
// release() replaced the tensor, those copies would keep the memory alive and never see the next
// gather. So the tensor is made once, and only the memory beneath it comes and goes.
//
// This header decides nothing about when to gather: see coordinator/.
//
// Threads: moved by the step's thread, or by autograd on its behalf; never by both at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/codec.h"
#include "tessera/core/dtype.h"
#include "tessera/core/placement.h"
#include "tessera/device/device.h"
#include "tessera/shard/layout.h"

namespace tessera::shard {

enum class ParamState : std::uint8_t { kReleased, kGathering, kAvailable };
std::string_view to_string(ParamState state);

// The tensor side of a parameter: tensor_storage.h has it for torch; tests have plain memory.
// Destroying it detaches: a tensor that a user still holds never points at memory that is gone.
class FullTensor {
 public:
  virtual ~FullTensor() = default;
  // `data`: layout().full_bytes() bytes of device memory that outlive the next detach().
  virtual void attach(void* data) = 0;
  // Any access from now on is an error that names the parameter.
  virtual void detach() = 0;
  // Changes with every write to the tensor that can be seen.
  virtual std::uint64_t num_writes() const { return 0; }
};

// New values of a shard on the host that the device still has where it made them: whoever gathers
// the parameter may copy them from there, without H2D.
struct DeviceCopy {
  const std::byte* values = nullptr;  // range().numel elements; null: there is none
  device::Pending made;               // by work of the device, which may not be handed over yet
};

// What encodes and decodes shards that are stored as blocks: in memory of the device, and of the
// host.
struct StoredCodecs {
  std::shared_ptr<const comm::Codec> device;
  std::shared_ptr<const comm::Codec> host;
};

struct ParamSpec {
  std::string name;  // unique in its table
  std::int64_t numel = 0;
  DType dtype = DType::kFloat32;
  bool trainable = true;
  // Of a weight-decay group: multiplies the optimizer's; 0 for biases and norms, by custom.
  double weight_decay_scale = 1;
  bool dynamic = false;
  Placement placement;
  StoredFormat format = {};
  StoredCodecs codecs = {};  // of that format; null where it is elements
};

class Param {
 public:
  // Takes zeroed shard memory from `device`, charged as Role::kShard. REQUIRES: what is stored as
  // blocks is frozen, and there are codecs for it.
  Param(int id, ParamSpec spec, int rank, int num_ranks, device::Device& device,
        std::unique_ptr<FullTensor> tensor);

  int id() const { return id_; }  // registration number, the same on every rank
  const std::string& name() const { return spec_.name; }
  const ParamSpec& spec() const { return spec_; }
  bool trainable() const { return spec_.trainable; }
  // Between steps: whoever reduces or updates must be told. ConfigError for what is stored as
  // blocks.
  void set_trainable(bool trainable);
  void check_trainable(bool trainable) const;
  // Used only by units that some ranks may skip; before the first use.
  bool dynamic() const { return spec_.dynamic; }
  void set_dynamic(bool dynamic) { spec_.dynamic = dynamic; }
  const Layout& layout() const { return layout_; }
  ElementRange range() const { return range_; }       // of this rank
  std::byte* shard() const { return shard_.data(); }  // as it is stored
  // Null where elements are stored.
  const comm::Codec* codec() const { return spec_.codecs.device.get(); }
  const comm::Codec* host_codec() const { return spec_.codecs.host.get(); }
  // Words [begin, begin + numel) of a shard in memory (Layout::stored_dtype(): elements, unless it
  // is stored as blocks), to the host's. From any thread. REQUIRES:
  // whoever changes the shard is ordered behind it.
  device::Pending start_read(std::int64_t begin, std::int64_t numel, std::byte* to) const;
  bool is_on_nvme() const { return tier() == Tier::kNvme; }
  bool is_on_host() const { return tier() == Tier::kHost; }
  // Of the shard. kHost is pinned memory, from which every gather loads it to a discrete device.
  Tier tier() const { return spec_.placement.parameter; }
  const Placement& placement() const { return spec_.placement; }
  // Before the reducer and the optimizer are made. REQUIRES: the shard is where it says.
  void set_placement(const Placement& placement);
  // Between steps, while released. Memory of the tier before is given back; memory of the new one
  // is zeroed, and what is on NVMe is nowhere else. Whoever says so moves the bytes.
  void set_tier(Tier tier);
  // The same with the bytes, between tiers in memory.
  void move_to(Tier tier);
  bool shard_is_full() const {
    return layout_.num_ranks() == 1 && tier() == Tier::kDevice && !layout_.is_encoded();
  }
  // Of memory that it is gathered to.
  std::size_t gathered_bytes() const { return layout_.gathered_bytes(tier()); }

  ParamState state() const { return state_; }
  void* full() const { return full_; }  // null unless gathering or available
  // `full`: where the gather writes; the shard itself in a group of one.
  void start_gather(void* full);
  void finish_gather();
  void drop();     // of a gather that nobody waits for any more
  void release();  // REQUIRES: num_users() == 0

  // Units that need it right now: nested, shared and external ones count once each. The first user
  // attaches the tensor, the last one detaches it. REQUIRES: kAvailable.
  int num_users() const { return num_users_; }
  void add_user();
  // Throws ConfigError if the tensor was written to meanwhile; the user is gone all the same.
  void remove_user(std::string_view unit = {});
  // After an exception: one user less, and no questions asked.
  void forget_user() noexcept;
  // The tensor may be written to until its last user goes; whoever allows it makes the shards
  // follow. REQUIRES: has users.
  void allow_edits() { edits_allowed_ = true; }

  // What master weights begin with where the shard has less precision than the values it was made
  // from: fp32 on the host, shard_numel() elements; null: the shard. Until the optimizer has its
  // master.
  const float* first_master() const { return reinterpret_cast<const float*>(first_master_.data()); }
  void set_first_master(device::Memory values) { first_master_ = std::move(values); }

  std::uint64_t version() const { return version_; }  // updates so far
  const device::Pending& updated() const { return updated_; }
  // Counts one update, which is complete when `done` is; copies of before are stale. `copy`: where
  // the device keeps the new values of a shard in host memory; whoever owns that memory takes the
  // copy back before it goes.
  void set_updated(device::Pending done, DeviceCopy copy = {});
  const DeviceCopy& device_copy() const { return device_copy_; }
  void forget_device_copy() { device_copy_ = {}; }

 private:
  void check_move(bool is_legal, const char* rule) const;
  void take_shard();

  const int id_;
  ParamSpec spec_;
  const Layout layout_;
  const ElementRange range_;
  device::Device& device_;
  device::Memory shard_;
  std::unique_ptr<FullTensor> tensor_;  // after the shard: it detaches from that memory first
  ParamState state_ = ParamState::kReleased;
  void* full_ = nullptr;
  int num_users_ = 0;
  std::uint64_t writes_before_ = 0;  // of the tensor, when it was attached
  bool edits_allowed_ = false;
  device::Memory first_master_;
  std::uint64_t version_ = 0;
  device::Pending updated_;
  DeviceCopy device_copy_;
};

// All parameters of an engine, in the order of registration, which is the order of everything that
// ranks must do alike. References stay valid.
class ParamTable {
 public:
  ParamTable(int rank, int num_ranks, device::Device& device);

  // Throws ConfigError, before anything is allocated, for a name that is taken or empty.
  Param& add(ParamSpec spec, std::unique_ptr<FullTensor> tensor);

  int num_params() const { return static_cast<int>(params_.size()); }
  Param& operator[](int id) const { return *params_[static_cast<std::size_t>(id)]; }
  Param* find(std::string_view name) const;  // null when there is none
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  // New elements [begin, begin + numel) of a shard on NVMe, from its update, which is about to
  // write them, to whoever loads shards. True: kept, and not read again. From any thread.
  bool pass_on(int id, std::int64_t begin, std::int64_t numel, const void* values) const {
    return receiver_ && receiver_(id, begin, numel, values);
  }
  // Who loads shards; {}: nobody. While no update runs.
  using Receiver = std::function<bool(int, std::int64_t, std::int64_t, const void*)>;
  void set_receiver(Receiver receiver) { receiver_ = std::move(receiver); }

  // Done when shard and states of the parameter may change: its update asks before the first byte
  // is overwritten, and waits. From any thread.
  device::Pending before_overwrite(int id) const {
    return overwrite_guard_ ? overwrite_guard_(id) : device::Pending();
  }
  // Who still reads them, such as a save; {}: nobody. While no update runs. The guard must not
  // fail, nor wait for updates.
  using OverwriteGuard = std::function<device::Pending(int id)>;
  void set_overwrite_guard(OverwriteGuard guard) { overwrite_guard_ = std::move(guard); }

 private:
  const int rank_;
  const int num_ranks_;
  device::Device& device_;
  Receiver receiver_;
  OverwriteGuard overwrite_guard_;
  std::vector<std::unique_ptr<Param>> params_;
  std::map<std::string_view, Param*> by_name_;  // the names are those inside params_
};

}  // namespace tessera::shard
