// Updates on the streams of a device: states in its memory, batch by batch; on a discrete device
// also states in pinned host memory, which stream through slots.
//
//   read stream    | states H2D           once the slot's last D2H copy is done, and this piece's
//   reduce stream  | update               after the H2D copy, the gradient, the shard's readers
//   write stream   | new parameter D2H    if it lives on the host; ahead of states: it is needed
//                  | states D2H
//
// No copy is enqueued between two updates. On a CPU device the reduce stream is the calling thread.
//
// States do not depend on gradients: prepare() copies the first ones while a backward still runs,
// as many as there are slots (update_slots.h). Backward also frees memory of activations, which its
// owner may lend as slots (lend(), keep_lent()).
//
// [Note: who hands pieces over] Enqueuing blocks when a stream's queue is full. Also, H2D copies of
// states must not delay parameters that the model needs: a copy is started when its slot is free,
// and few are in flight at a time. So a separate thread enqueues the pieces, and the step's thread
// continues with the next forward. Everything else is ordered by events.
//
// [Note: in place of the gradient] The next forward needs the new parameter on the device that has
// just computed it. If the gradient has the parameter's type, the parameter is written over the
// gradient, which is no longer needed. From there it is copied to its tier, and gathers copy it
// from there (shard::DeviceCopy) until gradients are cleared after wait().
//
// [Note: gradients of several micro-batches] Gradients in host memory that have not been added up
// there (grad/host_copies.h) pass through the slot one after the other and are added there in fp32,
// in their order.
//
// A shard that streams is updated in pieces of at most as many elements as a slot holds.
//
// Threads: as Param; and, where something streams, a thread of the executor, which uses kernels and
// streams between prepare() or start() and the return of wait().
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
#include "tessera/optim/optimizer_options.h"
#include "tessera/optim/optimizer_states.h"
#include "tessera/optim/update_slots.h"

namespace tessera::optim {

class DeviceExecutor {
 public:
  // All arguments outlive this.
  DeviceExecutor(shard::ParamTable& params, const RuleOptions& rule,
                 const OptimizerOptions& options, const OptimizerStates& states);
  // Waits for running updates. Failures are reported through their Pendings.
  ~DeviceExecutor();
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;

  // Call it after trainability has changed or states were written from outside.
  void plan();
  void prepare();
  // True if some states pass through slots.
  bool streams() const { return slots_.slot_bytes() > 0; }

  // True if one more slot would be used before the next start(): there are more pieces than slots.
  bool wants_slot();
  std::size_t slot_bytes() const { return slots_.slot_bytes(); }
  // Lends slot_bytes() bytes of device memory, usable once `ready` is done, until keep_lent()
  // returns them.
  void lend(std::byte* data, device::Pending ready, std::shared_ptr<void> owner);
  // Blocks until at most this many lent slots are in use, and returns the others, whichever are
  // free first. States that were copied ahead into them are dropped; their originals are unchanged.
  void keep_lent(std::size_t num_slots);

  // Starts the updates of `ids`. `scalars`: without step and weight decay, which are set per
  // parameter. With scalars.on_device, gradients are ordered by the reduce stream alone. REQUIRES
  // then: !streams().
  std::vector<StartedUpdate> start(std::span<const int> ids, grad::Reducer& gradients,
                                   const UpdateScalars& scalars);
  // Blocks until gradients are no longer read, except as a shard::DeviceCopy. D2H copies of states
  // may still be in flight.
  void wait();
  // Blocks until all work is done.
  void wait_all();
  // For a parameter whose states stream: done when the result of its last update is in host memory.
  // From any thread.
  device::Pending states_written(int id) const;
  OptimizerStats take_stats();

 private:
  // See [Note: who hands pieces over]: enough H2D copies of states to keep the link busy.
  static constexpr std::size_t kMostCopiesH2d = 2;

  struct Piece {
    int param = 0;
    OptimizerStates::Piece states;  // numel: without padding
    device::Pending d2h;            // of its states, the last time
    UpdateSlot* slot = nullptr;     // it is there, or on its way
  };
  // By id.
  struct PieceRange {
    std::size_t first = 0;
    std::size_t count = 0;
  };
  // What is handed over for one parameter.
  struct Item {
    int param = 0;
    bool keeps = false;       // no gradient: the parameter is made again
    UpdateTask task;          // without tensors, which are those of a piece
    bool takes_over = false;  // see [Note: in place of the gradient]
    // Of the gradient on the host, with both halves of a sum; none: it is on the device.
    std::vector<const void*> copies;
    bool is_joined = false;  // the first two are halves
    DType copy_dtype = DType::kFloat32;
    device::Pending copies_ready;
    std::shared_ptr<device::HandedOver> made;  // on the device
    std::shared_ptr<device::HandedOver> done;
  };

  std::vector<Piece> pieces_of(int id) const;
  std::size_t states_bytes(const Piece& piece) const;  // that stream
  // Where the parameter of a piece is while it is updated.
  std::byte* parameter_of(const Piece& piece) const;
  // In its slot: the sum of micro-batches, and behind it two copies on their way there.
  float* gradient_sum_of(const Piece& piece) const;
  UpdateTask make_task(int id, const grad::ShardGradient& gradient,
                       const UpdateScalars& scalars) const;
  void update_resident(std::span<const int> ids, grad::Reducer& gradients,
                       const UpdateScalars& scalars, std::vector<StartedUpdate>& started);
  Item make_item(int id, grad::Reducer& gradients, const UpdateScalars& scalars,
                 std::vector<StartedUpdate>& started);
  void count_bytes(const Piece& piece);

  void hand_over();  // the thread
  void hand_over_item(const Item& item);
  bool can_go_ahead() const;
  void start_h2d(const Piece& piece);  // blocks until its slot and the link are free
  UpdateSlot* take_slot();
  void bring_gradient(const Piece& piece, const Item& item);
  void limit_copies_h2d();
  UpdateSpan span_of(const Piece& piece, const Item& item) const;
  void update_piece(Piece& piece, const Item& item, bool is_last);
  void wait_handed_over();
  void put_slots_back();

  shard::ParamTable& params_;
  const RuleOptions rule_;
  device::Device& device_;
  Kernels& kernels_;
  const OptimizerStates& states_;
  const std::size_t slot_gradient_bytes_;
  device::Stream& read_;
  device::Stream& write_;
  device::Stream& update_;
  std::vector<PieceRange> ranges_;  // by id
  OptimizerStats stats_;
  device::Pending resident_;  // the last batches

  // Of the thread while it is busy, else of the caller.
  std::vector<Piece> pieces_;               // in the order of updates
  std::deque<device::Pending> copies_h2d_;  // the last ones, of states

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  UpdateSlots slots_;
  std::deque<Item> items_;      // that are still to be handed over
  std::size_t next_ahead_ = 0;  // the next piece that prepare() has a slot for
  bool goes_ahead_ = false;     // from prepare() to start()
  bool is_busy_ = false;
  bool is_stopping_ = false;
  std::exception_ptr failure_;
  device::Pending last_update_;                  // on the device
  device::Pending last_parameter_;               // that has gone to the host
  std::vector<device::Pending> states_written_;  // by id

  std::thread thread_;  // last: it uses everything above
};

}  // namespace tessera::optim
