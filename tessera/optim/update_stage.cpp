#include "tessera/optim/update_stage.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::optim {
namespace {

double seconds_since(const Clock& clock, std::int64_t start_ns) {
  return static_cast<double>(clock.now_ns() - start_ns) * 1e-9;
}

}  // namespace

std::vector<device::Pending> UpdateStage::transfers() const {
  std::vector<device::Pending> all = {states_read};
  all.insert(all.end(), parameters_read.begin(), parameters_read.end());
  all.insert(all.end(), gradients_read.begin(), gradients_read.end());
  all.insert(all.end(), writes.begin(), writes.end());
  return all;
}

std::int64_t StageWork::real_numel(const SubGroupPiece& piece) const {
  const std::int64_t left = parts_.params[piece.param].range().numel - piece.begin;
  return std::clamp<std::int64_t>(left, 0, piece.numel);
}

void StageWork::start_reads(UpdateStage& stage) {
  const SubGroup& group = *stage.group;
  if (group.states_bytes > 0) {
    stage.states_read = parts_.tiers.states->start_read(group.states_offset, stage.lease.data(),
                                                        group.states_bytes);
    stats_.states_read_bytes += group.states_bytes;
  }
  if (!group.parameter_stored) {
    return;
  }
  for (const SubGroupPiece& piece : group.pieces) {
    const shard::Param& param = parts_.params[piece.param];
    if (is_own_master(param.layout().dtype())) {
      stage.parameters_read.push_back(parts_.tiers.parameters->start_read(
          param, piece.begin, piece.numel, stage.lease.data() + piece.parameter_in_lease));
      stats_.parameters_read_bytes += piece.parameter_bytes;
    } else {
      stage.parameters_read.emplace_back();
    }
  }
}

void StageWork::start_gradient_reads(UpdateStage& stage, UpdateJob& job) {
  const SubGroup& group = *stage.group;
  if (!group.gradient_stored || !stage.gradients_read.empty()) {
    return;
  }
  for (const SubGroupPiece& piece : group.pieces) {
    stage.gradients_read.push_back(job.gradients->start_read(
        piece.param, piece.begin, piece.numel,
        reinterpret_cast<float*>(stage.lease.data() + piece.gradient_in_lease)));
    stats_.gradients_read_bytes += piece.tensor_bytes;
  }
}

void StageWork::wait_timed(const device::Pending& read) {
  if (read.state() == nullptr) {
    return;
  }
  const SpanScope span(parts_.tiers.spans, "wait for stored states");
  const std::int64_t start = parts_.tiers.clock.now_ns();
  read.wait();
  stats_.read_wait_s += seconds_since(parts_.tiers.clock, start);
}

void StageWork::update(UpdateStage& stage, UpdateJob& job) {
  const SubGroup& group = *stage.group;
  wait_timed(stage.states_read);
  for (std::size_t i = 0; i < group.pieces.size(); ++i) {
    if (!stage.parameters_read.empty()) {
      wait_timed(stage.parameters_read[i]);
    }
    if (!stage.gradients_read.empty()) {
      wait_timed(stage.gradients_read[i]);
    }
    UpdateJob::Item& item = job.items[static_cast<std::size_t>(group.pieces[i].param)];
    item.may_start.wait();
    wait_timed(item.gradient_came);
    update_piece(stage, i, item);
    finish_piece(stage, i, item);
  }
}

void StageWork::update_piece(const UpdateStage& stage, std::size_t index,
                             const UpdateJob::Item& item) {
  const SubGroup& group = *stage.group;
  const SubGroupPiece& piece = group.pieces[index];
  const DType dtype = parts_.params[piece.param].layout().dtype();
  std::byte* const lease = stage.lease.data();
  std::byte* const parameter =
      group.parameter_stored ? lease + piece.parameter_in_lease
                             : item.shard + static_cast<std::size_t>(piece.begin) * bytes_of(dtype);
  const auto tensor = [&](std::size_t number) {
    return group.states_stored ? reinterpret_cast<float*>(lease + piece.states_in_lease +
                                                          number * piece.tensor_bytes)
                               : parts_.states.in_memory(piece.param, number) + piece.begin;
  };
  UpdateSpan span;
  span.numel = real_numel(piece);
  std::size_t next_tensor = 0;
  if (is_own_master(dtype)) {
    span.master = reinterpret_cast<float*>(parameter);
  } else {
    span.master = tensor(next_tensor++);
    span.parameter = parameter;
    span.parameter_dtype = dtype;
  }
  const std::size_t num_states = state_names(parts_.rule).size();
  for (std::size_t i = 0; i < num_states; ++i) {
    span.states[i] = tensor(next_tensor++);
  }
  if (group.gradient_stored) {
    span.gradient = lease + piece.gradient_in_lease;
  } else {
    span.gradient = static_cast<const std::byte*>(item.gradient) +
                    static_cast<std::size_t>(piece.begin) * bytes_of(item.gradient_dtype);
    span.gradient_dtype = item.gradient_dtype;
  }
  SpanArgs args;
  if (parts_.tiers.spans.enabled()) {
    args.parameter = parts_.tiers.spans.intern(parts_.params[piece.param].name());
  }
  const SpanScope scope(parts_.tiers.spans, "update", args);
  const std::int64_t start = parts_.tiers.clock.now_ns();
  if (span.numel > 0 && item.keeps) {
    start_parameter(parts_.kernels, span, stream_).wait();
  } else if (span.numel > 0) {
    parts_.kernels.start_update(parts_.rule, item.scalars, span, stream_).wait();
  }
  if (group.parameter_stored) {
    // A lease holds what its last owner left there.
    const std::size_t used = static_cast<std::size_t>(span.numel) * bytes_of(dtype);
    std::memset(parameter + used, 0, piece.parameter_bytes - used);
  }
  stats_.update_s += seconds_since(parts_.tiers.clock, start);
}

void StageWork::finish_piece(UpdateStage& stage, std::size_t index, UpdateJob::Item& item) {
  const SubGroup& group = *stage.group;
  const SubGroupPiece& piece = group.pieces[index];
  if (group.parameter_stored) {
    const std::byte* const values = stage.lease.data() + piece.parameter_in_lease;
    const bool is_kept = parts_.tiers.on_updated &&
                         parts_.tiers.on_updated(piece.param, piece.begin, piece.numel, values);
    device::Pending written = parts_.tiers.parameters->start_write(
        parts_.params[piece.param], piece.begin, piece.numel, values);
    stage.writes.push_back(written);
    stats_.parameters_written_bytes += piece.parameter_bytes;
    if (!is_kept) {
      item.writes.push_back(std::move(written));
    }
  }
  if (--item.num_pieces_left == 0) {
    if (item.deliver) {
      item.writes.push_back(item.deliver());
    }
    item.done->hand_over(device::Pending::all(std::move(item.writes)));
  }
}

void StageWork::start_state_writes(UpdateStage& stage) {
  const SubGroup& group = *stage.group;
  if (group.states_bytes > 0) {
    stage.writes.push_back(parts_.tiers.states->start_write(group.states_offset, stage.lease.data(),
                                                            group.states_bytes));
    stats_.states_written_bytes += group.states_bytes;
  }
}

TieredStats StageWork::take_stats() { return std::exchange(stats_, {}); }

}  // namespace tessera::optim
