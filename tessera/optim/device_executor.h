// Updates on the streams of a device: of states in its memory, batch by batch; and on a discrete
// device also of states in pinned memory of the host, which stream through slots.
//
//   read stream    | states H2D           once the slot's last D2H copy is done, and this piece's
//   reduce stream  | update               behind the H2D copy, the gradient, the shard's readers
//   write stream   | new parameter D2H    if it lives on the host; ahead of states: it is needed
//                  | states D2H
//
// No copy stands between two updates. On a CPU device the reduce stream is the calling thread.
//
// States do not depend on gradients: prepare() sends the first ones while a backward still runs, as
// many as there are slots (update_slots.h). That is the time in which memory becomes free that
// activations have taken: whoever has it may lend it (lend(), keep_lent()).
//
// [Note: who hands pieces over] A stream takes so much unfinished work and no more; then it blocks
// whoever gives it more. And states on their way to the device must not hold up parameters that the
// model needs: an H2D copy is started when its slot is free, and few are under way at a time. So a
// thread hands the pieces over, and the step's thread goes on to the next forward. Everything else
// is ordered by events.
//
// [Note: in place of the gradient] The next forward needs the new parameter on the device, where it
// has just been made. Where the gradient has the parameter's type, the parameter is written over
// the gradient, which nobody needs any more: from there it goes to its home, and whoever gathers it
// copies it from there (shard::DeviceCopy) until gradients are cleared after wait().
//
// [Note: gradients of several micro-batches] They are in host memory, those that have not been
// added up there (grad/host_copies.h): they pass through the slot one after the other and are added
// there in fp32, in their order.
//
// A shard that streams is updated in pieces of at most as many elements as a slot holds.
//
// Threads: as Param, and a thread of its own where something streams, which uses kernels and
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
  // All of it outlives this.
  DeviceExecutor(shard::ParamTable& params, const RuleOptions& rule,
                 const OptimizerOptions& options, const OptimizerStates& states);
  // Waits for what was started; failures are the waiters' business.
  ~DeviceExecutor();
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;

  // What is trainable has changed, or states were written from outside.
  void plan();
  void prepare();
  // Something passes through slots.
  bool streams() const { return slots_.slot_bytes() > 0; }

  // One more slot would be used before the next start(): there are more pieces than slots.
  bool wants_slot();
  std::size_t slot_bytes() const { return slots_.slot_bytes(); }
  // slot_bytes() bytes of the device, once `ready` is done, until keep_lent() gives them back.
  void lend(std::byte* data, device::Pending ready, std::shared_ptr<void> owner);
  // Blocks until at most this many lent slots are used, and gives the others back: whichever are
  // free first. States that were sent ahead in vain stay where they were.
  void keep_lent(std::size_t num_slots);

  // Updates `ids`. `scalars`: but for the step and the weight decay. With scalars.on_device
  // gradients are ordered by the reduce stream alone, and nothing may stream.
  std::vector<StartedUpdate> start(std::span<const int> ids, grad::Reducer& gradients,
                                   const UpdateScalars& scalars);
  // Until no gradient is needed any more, but by those who have a shard::DeviceCopy. D2H copies of
  // states may still be under way.
  void wait();
  // All of it.
  void wait_all();
  // Of a parameter that streams: its states are in host memory again, as its last update has made
  // them. From any thread.
  device::Pending states_written(int id) const;
  OptimizerStats take_stats();

 private:
  // See [Note: who hands pieces over]: as many H2D copies of states as keep the link busy.
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
