// Internal to grad: how a full bucket becomes this rank's part of its sum over the ranks that hold
// one copy of the model: by one reduce-scatter, or by two, inside hosts and then across.
//
//   one      group:    part r of the bucket goes to rank r
//   two hops inside:   l-th of L ranks of host h gets the sum, over its host, of parts
//                      [l * H, l * H + H), in fp32, in memory that the caller has for it
//            across:   h-th of H hosts gets the sum of part l * H + h over all hosts
//            group:    all ranks say that they have started both
//
// With a codec every reduce-scatter moves its blocks in place of the elements: each element is
// quantised once per hop, by the rank that sends it, and added in fp32 by the one that gets it. The
// result of the first hop stays in fp32, so that it is rounded once, by the second hop's codec, and
// what the second one adds up is rounded once to the type of the result.
//
// Invariants:
//  (1) Nothing here blocks: the second hop is `ready` after the first.
//  (2) `met` is set when all ranks of the group have started the same bucket: the hops alone know
//      of the ranks of this host, and of those with this local rank. So no hop's end depends on
//      what any rank's thread does next.
//  (3) A group of one sends nothing, and quantises nothing.
//
// Threads: as Reducer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/grad/reducer.h"

namespace tessera::grad {

class BucketReduction {
 public:
  // `codec`: of options.blocks, null where there are none.
  BucketReduction(comm::Group& group, const ReductionHops& hops, const comm::Codec* codec,
                  const ReducerOptions& options);

  int num_ranks() const { return group_.size(); }
  bool takes_two_hops() const { return hops_.across != nullptr; }
  // True if every call is work of streams.
  bool is_stream_ordered() const;
  // Bytes of the first hop's result; 0 with one hop.
  std::size_t partial_bytes(std::int64_t shard_numel) const;

  struct Call {
    const void* input = nullptr;  // parts of all ranks; with two hops in the order of shards
    void* output = nullptr;       // one part, in the type of the wire
    void* partial = nullptr;      // of partial_bytes()
    std::int64_t shard_numel = 0;
    comm::Label label;
    device::Stream* stream = nullptr;
    std::shared_ptr<const void> keep_alive;  // of the input
  };
  struct Started {
    device::Pending reduced;
    std::shared_ptr<std::atomic<bool>> met;
    std::vector<device::Pending> calls;  // all of them
    std::uint64_t sent_bytes = 0;        // by this rank
  };
  Started start(Call call) const;

 private:
  Started start_one(Call call) const;
  Started start_two(Call call) const;
  std::uint64_t sent_bytes(const comm::Group& group, std::int64_t shard_numel, DType dtype) const;

  comm::Group& group_;
  const ReductionHops hops_;
  const comm::Codec* const codec_;  // null: exact
  const ReducerOptions options_;
};

}  // namespace tessera::grad
