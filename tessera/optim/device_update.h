// Updates on a device with memory of its own: of states that live there, and of states in pinned
// memory of the host, which stream up into a slot, are updated, and stream down again.
//
//   read stream    | states up            once the slot's last copy down is done, and this piece's
//   reduce stream  | update               behind the copy up, the gradient, the shard's readers
//   write stream   | new parameter down   if it lives on the host; ahead of states: it is needed
//                  | states down
//
// No copy stands between two updates: new parameters are on the device as soon as states are up.
//
// States do not depend on gradients: prepare() sends the first ones up while a backward still runs,
// as many as there are slots (update_slots.h). That is the time in which memory becomes free that
// the model's activations have taken: whoever has it may lend it (lend(), give_back()).
//
// [Note: who hands pieces over] A stream takes so much unfinished work and no more; then it blocks
// whoever gives it more. And states that go up must not stand in the way of parameters that the
// model needs (coordinator/shard_loader.h, [Note: one queue for H2D copies]): a copy up is
// started when its slot is free. So a thread hands the pieces over, and the step's thread goes on
// to the next forward. Everything else is ordered by events.
//
// [Note: in place of the gradient] The next forward needs the new parameter on the device, where it
// has just been made. Where the gradient is of the parameter's type, it is written over the
// gradient, which nobody needs any more: from there it goes down to its home, and whoever gathers
// it copies it from there (shard::DeviceCopy) until wait() says that gradients may go.
//
// Cut: a shard is updated in pieces of at most as many elements as a slot holds. Bits do not depend
// on it.
//
// States of a parameter are made when it is trainable for the first time, and stay; charged as
// Role::kOptimizer, in whole blocks per tensor. On the device each tensor lies in one piece: master
// (unless the parameter is its own), state 0, state 1. On the host the tensors of a piece lie side
// by side, so that one copy takes them up and one takes them down.
//
// Threads: as Param, and a thread of its own, which uses kernels and streams between prepare() or
// start() and the return of wait().
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/device/handed_over.h"
#include "tessera/grad/reducer.h"
#include "tessera/optim/kernels.h"
#include "tessera/optim/rule.h"
#include "tessera/optim/tiered_parts.h"
#include "tessera/optim/update_slots.h"
#include "tessera/shard/param.h"

namespace tessera::optim {

class DeviceUpdate {
 public:
  // `stored`: by id, says which parameters are ours, and where their states live. All of it
  // outlives this. Throws ConfigError if states stream and there are no slots.
  DeviceUpdate(shard::ParamTable& params, const RuleOptions& rule, const OwnMemoryParts& own,
               const std::vector<StoredParts>& stored);
  // Waits for what was started; failures are the waiters' business.
  ~DeviceUpdate();
  DeviceUpdate(const DeviceUpdate&) = delete;
  DeviceUpdate& operator=(const DeviceUpdate&) = delete;

  bool is_ours(int id) const { return stored_[static_cast<std::size_t>(id)].device_update; }
  bool has(int id) const { return states_[static_cast<std::size_t>(id)].exists; }
  // Moments are zero, the master is made from the shard. Once per parameter.
  void add(int id);
  void make_master(int id);
  // What is trainable has changed.
  void plan();

  void prepare();
  // One more slot would be used before the next start(): there are more pieces than slots.
  bool wants_slot();
  std::size_t slot_bytes() const { return slots_.slot_bytes(); }
  // slot_bytes() bytes of the device, once `ready` is done, until keep_lent() lets go of them.
  void lend(std::byte* data, device::Pending ready, std::shared_ptr<void> owner);
  // Blocks until at most this many lent slots are used, and lets go of the others: whichever are
  // free first. States that were sent ahead in vain stay where they were.
  void keep_lent(std::size_t num_slots);

  // Updates `ids`, each ours and trainable, and gives each parameter its Pending. `scalars`: but
  // for the step, which this counts.
  void start(std::span<const int> ids, grad::Reducer& gradients, const UpdateScalars& scalars);
  // Until no gradient is needed any more, but by those who have a shard::DeviceCopy. Copies of
  // states down may still be under way.
  void wait();
  // All of it.
  void wait_all();
  // A copy, on the host, of tensor 0 (the master, or else the first state) and on.
  std::vector<float> read(int id, std::size_t tensor);
  TieredStats take_stats();

 private:
  // See [Note: one queue for H2D copies] in coordinator/shard_loader.h: a parameter that the
  // model waits for comes behind no more copies of states than keep the link busy.
  static constexpr std::size_t kMostCopiesUp = 2;

  struct States {  // of one parameter
    bool exists = false;
    device::Memory memory;  // of the device or pinned
    std::int64_t num_updates = 0;
    std::size_t first_piece = 0;
    std::size_t num_pieces = 0;
  };
  struct Piece {
    int param = 0;
    std::int64_t begin = 0;
    std::int64_t numel = 0;      // without padding
    device::Pending down;        // of its states, the last time
    UpdateSlot* slot = nullptr;  // it is up, or on its way
    bool is_updated = false;     // since prepare()
  };
  // What is handed over for one parameter.
  struct Item {
    int param = 0;
    bool keeps = false;                        // as UpdateJob::Item's
    UpdateTask task;                           // without tensors, which are those of a piece
    bool takes_over = false;                   // see [Note: in place of the gradient]
    std::shared_ptr<device::HandedOver> made;  // on the device
    std::shared_ptr<device::HandedOver> done;
  };

  bool is_resident(int id) const { return stored_[static_cast<std::size_t>(id)].states_on_device; }
  // Something of it comes to the device for every update.
  bool needs_slot(int id) const { return !is_resident(id) || params_[id].is_on_host(); }
  std::size_t num_tensors(const shard::Param& param) const;
  std::size_t tensor_bytes(const shard::Param& param) const;
  float* resident_tensor(int id, std::size_t number) const;
  std::vector<Piece> pieces_of(int id, std::int64_t numel) const;
  // Of a piece on the host: its tensors, one after the other, each of stride() elements.
  std::byte* piece_home(const Piece& piece) const;
  static std::size_t stride(const Piece& piece);
  std::size_t piece_bytes(const Piece& piece) const;  // of its tensors
  // Where the parameter of a piece is while it is updated.
  std::byte* parameter_place(const Piece& piece) const;
  UpdateTask make_task(int id, const grad::ShardGradient& gradient, const UpdateScalars& scalars);
  Item make_item(int id, grad::Reducer& gradients, const UpdateScalars& scalars);
  void make_resident_master(const shard::Param& param);
  void update_resident(std::span<const int> ids, grad::Reducer& gradients,
                       const UpdateScalars& scalars);
  void start_up(const Piece& piece);  // blocks until its slot and the link are free
  UpdateSpan span_of(const Piece& piece, const Item& item) const;
  void update_piece(Piece& piece, const Item& item, bool is_last);
  void count_bytes(const Piece& piece);
  bool can_go_ahead();
  void go_ahead(std::unique_lock<std::mutex>& lock);
  UpdateSlot* take_slot();  // on the thread
  void hand_over();         // on the thread
  void hand_over_item(const Item& item);
  void wait_handed_over();
  void put_slots_back();

  shard::ParamTable& params_;
  const RuleOptions rule_;
  device::Device& device_;
  Kernels& kernels_;
  const std::vector<StoredParts>& stored_;
  device::Stream& read_;
  device::Stream& write_;
  device::Stream& update_;
  std::vector<States> states_;  // by id
  std::size_t slot_numel_ = 0;
  TieredStats stats_;

  // Of the thread while it is busy, else of the caller.
  std::vector<Piece> pieces_;              // of parameters that need slots, in the order of updates
  std::deque<device::Pending> copies_up_;  // the last ones, of states

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  UpdateSlots slots_;
  std::deque<Item> items_;      // that are still to be handed over
  std::size_t next_ahead_ = 0;  // the next piece that prepare() has a slot for
  bool goes_ahead_ = false;
  bool is_busy_ = false;
  bool is_stopping_ = false;
  std::exception_ptr failure_;
  device::Pending last_update_;     // on the device
  device::Pending last_parameter_;  // that has gone down

  std::thread thread_;  // last: it uses everything above
};

}  // namespace tessera::optim
