#include "tessera/grad/shard_gradients.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/grad/gradient_bytes.h"

namespace tessera::grad {
namespace {

using device::Pending;

// Memory of autograd that we hold, charged as long as we do.
class Adopted {
 public:
  Adopted(std::shared_ptr<void> owner, Ledger* ledger, std::size_t bytes)
      : owner_(std::move(owner)), ledger_(ledger), bytes_(bytes) {
    if (ledger_ != nullptr) {
      ledger_->charge(Tier::kDevice, Role::kGradient, bytes_);
    }
  }
  ~Adopted() {
    owner_.reset();
    if (ledger_ != nullptr) {
      ledger_->discharge(Tier::kDevice, Role::kGradient, bytes_);
    }
  }
  Adopted(const Adopted&) = delete;
  Adopted& operator=(const Adopted&) = delete;

 private:
  std::shared_ptr<void> owner_;
  Ledger* const ledger_;
  const std::size_t bytes_;
};

std::size_t bytes_for(std::int64_t numel, DType dtype) {
  return static_cast<std::size_t>(numel) * bytes_of(dtype);
}

// Elsewhere than in the region a first micro-batch that is alone needs no fp32.
bool expects_one(const GradientStream& stream) {
  return stream.is_discrete() && stream.parts().num_micro_batches == 1;
}

}  // namespace

ShardGradients::ShardGradients(GradientStream& stream, const BucketLayout& layout, DType wire_dtype)
    : stream_(stream),
      layout_(layout),
      wire_dtype_(wire_dtype),
      region_dtype_(expects_one(stream) ? wire_dtype : DType::kFloat32),
      sums_(static_cast<std::size_t>(stream.parts().params.num_params())) {
  const ReducerParts& parts = stream_.parts();
  if (parts.sum_of_squares) {
    squares_ =
        stream_.device().allocate(Tier::kPinned, sums_.size() * sizeof(double), Role::kOther);
  }
  if (parts.is_planned) {
    begin_backward();
  }
  for (int id = 0; id < parts.params.num_params(); ++id) {
    const shard::Param& param = parts.params[id];
    if (!param.trainable()) {
      continue;
    }
    Sum& sum = sum_of(param);
    const DType dtype = param.layout().dtype();
    if (param.placement().gradient == Tier::kHost) {
      const bool is_summed = stream_.is_summed_on_host(param);
      const DType comes = is_alone() ? dtype : wire_dtype_;
      sum.copies = std::make_unique<HostCopies>(
          comes, parts.num_micro_batches,
          [&device = stream_.device(), bytes = bytes_for(param.layout().shard_numel(), comes)] {
            return device.allocate(Tier::kPinned, bytes, Role::kGradient);
          });
      const int num_wanted =
          parts.num_host_buffers > 0 ? parts.num_host_buffers : parts.num_micro_batches;
      sum.copies->reserve(is_summed ? 1 : std::max(1, num_wanted));
      if (is_summed) {
        sum.host_sum = stream_.device().allocate(
            Tier::kPinned, bytes_for(param.layout().shard_numel(), DType::kFloat32),
            Role::kGradient);
      }
      if (!host_work_ && (is_summed || parts.num_micro_batches > 1)) {
        TESSERA_INVARIANT(
            parts.host_widen && parts.host_add && parts.host_fold && parts.host_sum_of_squares,
            "several micro-batches are on the host, and nothing adds them there");
        host_work_ = std::make_unique<HostWork>(parts.spans, "gradients on the host");
      }
    } else if (param.placement().gradient == Tier::kDevice && parts.is_planned && is_alone() &&
               !expects_one(stream) && dtype != DType::kFloat32) {
      own_memory(sum, param);
    }
  }
}

ShardGradients::~ShardGradients() {
  clear();
  stream_.drain();
}

void ShardGradients::check(const shard::Param& param, DType dtype) const {
  stream_.check_convertible(param.name(), dtype, is_alone() ? DType::kFloat32 : wire_dtype_);
  if (!is_alone()) {
    stream_.check_convertible(param.name(), wire_dtype_, region_dtype(param));
  }
}

// --- memory ---

std::int64_t ShardGradients::own_numel(const shard::Param& param) const {
  return is_alone() ? param.layout().numel() : param.layout().shard_numel();
}

float* ShardGradients::own_memory(Sum& sum, const shard::Param& param) {
  const std::size_t bytes = bytes_for(own_numel(param), DType::kFloat32);
  if (sum.own.bytes() != bytes) {
    sum.own = stream_.device().allocate(Tier::kDevice, bytes, Role::kGradient);
    sum.own_is_zero = false;
  }
  return reinterpret_cast<float*>(sum.own.data());
}

void ShardGradients::take_regions() {
  const auto take = [this](device::Memory& memory, std::int64_t numel, DType dtype) {
    if (memory.bytes() != bytes_for(numel, dtype)) {
      memory = stream_.device().allocate(Tier::kDevice, bytes_for(numel, dtype), Role::kGradient);
    }
  };
  take(region_, layout_.bucketed_numel, region_dtype_);
  take(dynamic_region_, layout_.region_numel - layout_.bucketed_numel, DType::kFloat32);
}

std::byte* ShardGradients::in_region(const shard::Param& param, std::int64_t begin) {
  take_regions();
  const std::int64_t offset = layout_.region_offset[static_cast<std::size_t>(param.id())] + begin;
  return is_dynamic(param)
             ? dynamic_region_.data() + bytes_for(offset - layout_.bucketed_numel, DType::kFloat32)
             : region_.data() + bytes_for(offset, region_dtype_);
}

// --- gradients come ---

void ShardGradients::begin_backward() {
  if (!is_alone()) {
    take_regions();
  }
}

void ShardGradients::take(const shard::Param& param, FullGradient gradient) {
  const std::int64_t numel = param.layout().numel();
  if (numel == 0) {
    return;
  }
  Sum& sum = sum_of(param);
  const ShardPiece whole{param.id(), 0, numel};
  const std::int64_t bytes = bytes_of_full(param, gradient);
  stream_.order_behind_compute();
  switch (param.placement().gradient) {
    case Tier::kNvme: {
      const Pending left =
          stream_.put_on_nvme(whole, gradient.data, gradient.dtype, !is_first(sum));
      stream_.retire(std::move(gradient.owner), left, bytes);
      break;
    }
    case Tier::kHost: {
      TESSERA_INVARIANT(gradient.dtype == param.layout().dtype(), "the gradient of parameter '",
                        param.name(), "' is ", to_string(gradient.dtype), ", the parameter is ",
                        to_string(param.layout().dtype()));
      const Pending left =
          send_to_host(sum, whole, gradient.data, gradient.dtype, stream_.compute_record());
      end_host_round(sum, param);
      stream_.retire(std::move(gradient.owner), left, bytes);
      break;
    }
    default:
      if (!is_first(sum)) {
        add(sum, whole, gradient.data, gradient.dtype);
        stream_.retire(std::move(gradient.owner), {}, bytes);
      } else if (gradient.dtype == DType::kFloat32 ||
                 (stream_.is_discrete() && (sum.own.data() == nullptr || sum.own_is_zero))) {
        adopt(sum, param, std::move(gradient));
      } else {
        widen(sum, param, gradient.data, gradient.dtype);
        stream_.retire(std::move(gradient.owner), {}, bytes);
      }
  }
  ++sum.num_rounds;
}

void* ShardGradients::target_of(std::span<const Piece> pieces) {
  bool is_target = true;
  std::int64_t end = -1;
  for (const Piece& piece : pieces) {
    const auto id = static_cast<std::size_t>(piece.param);
    const std::int64_t begin = layout_.region_offset[id] + piece.shard_begin;
    is_target &= layout_.home[id] == Tier::kDevice && sums_[id].num_started == 0 &&
                 region_dtype(stream_.parts().params[piece.param]) == wire_dtype_ &&
                 (end < 0 || begin == end);
    end = begin + piece.numel + piece.padding;
  }
  for (const Piece& piece : pieces) {
    const shard::Param& param = stream_.parts().params[piece.param];
    if (piece.shard_begin + piece.numel == param.layout().shard_numel()) {
      ++sum_of(param).num_started;
    }
  }
  const Piece& first = pieces.front();
  return is_target ? in_region(stream_.parts().params[first.param], first.shard_begin) : nullptr;
}

Pending ShardGradients::put(std::span<const Piece> pieces, const std::byte* result) {
  std::vector<Pending> left;
  const Pending made = stream_.stream().record();
  // Neighbours in the region go there together.
  ShardPiece run;
  const std::byte* run_values = nullptr;
  std::int64_t run_end = -1;
  bool run_is_first = true;
  const auto put_run = [&] {
    if (run_values != nullptr) {
      put_piece(run, run_values);
    }
    run_values = nullptr;
  };
  for (const Piece& piece : pieces) {
    const shard::Param& param = stream_.parts().params[piece.param];
    Sum& sum = sum_of(param);
    const ShardPiece at{piece.param, piece.shard_begin, piece.numel};
    const std::byte* values = result + bytes_for(piece.bucket_offset, wire_dtype_);
    const Tier home = *layout_.home[static_cast<std::size_t>(piece.param)];
    if (home == Tier::kNvme) {
      left.push_back(stream_.put_on_nvme(at, values, wire_dtype_, !is_first(sum)));
    } else if (home == Tier::kHost) {
      left.push_back(send_to_host(sum, at, values, wire_dtype_, made));
      if (piece.shard_begin + piece.numel == param.layout().shard_numel()) {
        end_host_round(sum, param);
      }
    } else {
      start_square(sum, at, values, wire_dtype_);
      const std::int64_t begin =
          layout_.region_offset[static_cast<std::size_t>(piece.param)] + piece.shard_begin;
      if (is_first(sum)) {
        sum.values = in_region(param, 0);
        sum.dtype = region_dtype(param);
      }
      const bool is_in_region =
          sum.values == in_region(param, 0) && (is_first(sum) || sum.dtype == DType::kFloat32);
      if (run_values != nullptr && is_in_region && begin == run_end &&
          values == run_values + bytes_for(run.numel, wire_dtype_) &&
          is_first(sum) == run_is_first) {
        run.numel += piece.numel;
      } else {
        put_run();
        run = at;
        run_values = values;
        run_is_first = is_first(sum);
      }
      run_end = is_in_region ? begin + piece.numel : -1;
    }
  }
  put_run();
  for (const Piece& piece : pieces) {
    const shard::Param& param = stream_.parts().params[piece.param];
    sum_of(param).num_rounds +=
        piece.shard_begin + piece.numel == param.layout().shard_numel() ? 1 : 0;
  }
  return Pending::all(std::move(left));
}

// Also of shards behind it in the region, whose round is as this one's.
void ShardGradients::put_piece(const ShardPiece& piece, const std::byte* values) {
  const shard::Param& param = stream_.parts().params[piece.param];
  Sum& sum = sum_of(param);
  if (!is_first(sum)) {
    add(sum, piece, values, wire_dtype_);
    return;
  }
  std::byte* const to = in_region(param, piece.begin);
  if (to != values) {  // else the reduction has written it
    stream_.copy(to, region_dtype(param), values, wire_dtype_, piece.numel);
  }
}

double* ShardGradients::square_of(const shard::Param& param) const {
  return reinterpret_cast<double*>(squares_.data()) + param.id();
}

// By the device.
bool ShardGradients::has_square(const shard::Param& param) const {
  const Sum& sum = sums_[static_cast<std::size_t>(param.id())];
  return sum.num_rounds == sum.num_squared_rounds && sum.num_squared > 0 &&
         sum.num_squared >= param.range().numel;
}

// Before the values go, or are changed. Pieces go on where the last ended, block after block.
void ShardGradients::start_square(Sum& sum, const ShardPiece& piece, const void* values,
                                  DType dtype) {
  if (stream_.parts().num_micro_batches <= 1 && is_first(sum)) {
    sum.num_squared_rounds = 1;
    square_piece(sum, piece, values, dtype);
  }
}

void ShardGradients::square_piece(Sum& sum, const ShardPiece& piece, const void* values,
                                  DType dtype) {
  const shard::Param& param = stream_.parts().params[piece.param];
  if (squares_.data() == nullptr || piece.begin != sum.num_squared ||
      piece.begin % kPieceStep != 0) {
    return;
  }
  const std::int64_t numel =
      std::clamp<std::int64_t>(param.range().numel - piece.begin, 0, piece.numel);
  if (numel > 0) {
    std::ignore = stream_.parts().sum_of_squares(values, dtype, numel, square_of(param),
                                                 piece.begin > 0, stream_.stream());
  } else if (piece.begin == 0) {
    *square_of(param) = 0;  // nothing but padding
  }
  sum.num_squared = piece.begin + piece.numel;
}

Pending ShardGradients::send_to_host(Sum& sum, const ShardPiece& piece, const void* values,
                                     DType dtype, const Pending& made) {
  start_square(sum, piece, values, dtype);
  const bool is_summed = sum.host_sum.data() != nullptr;
  if (piece.begin == 0) {
    if (is_summed) {
      sum.added.wait();  // of the micro-batch before, long ago
      sum.copies->clear();
    }
    sum.copy = sum.copies->next();
  }
  std::byte* const copy = sum.copy + bytes_for(piece.begin, dtype);
  const std::size_t bytes = bytes_for(piece.numel, dtype);
  sum.left = stream_.start_to_host(copy, values, bytes, made);
  stream_.stats().host_bytes += bytes;
  if (is_summed) {
    float* const to = reinterpret_cast<float*>(sum.host_sum.data()) + piece.begin;
    sum.added = host_work_->start(sum.left, [&parts = stream_.parts(), to, copy, dtype,
                                             numel = piece.numel, is_first = is_first(sum)] {
      (is_first ? parts.host_widen : parts.host_add)(to, copy, dtype, numel);
    });
  }
  return sum.left;
}

void ShardGradients::end_host_round(Sum& sum, const shard::Param& param) {
  const bool may_fold = sum.copies->end(sum.left);
  if (!host_work_ || sum.host_sum.data() != nullptr) {
    return;
  }
  const ReducerParts& parts = stream_.parts();
  if (may_fold) {
    sum.copies->fold([&](HostAddends addends, Pending ready) {
      return host_work_->start(std::move(ready),
                               [&parts, addends = std::move(addends), numel = param.range().numel] {
                                 parts.host_fold(addends, numel);
                               });
    });
  }
  const int round = sum.num_rounds + 1;  // it is about to be counted
  if (squares_.data() != nullptr && round > 1 && round == parts.num_micro_batches) {
    sum.squared = host_work_->start(
        sum.copies->ready(),
        [&parts, addends = sum.copies->addends(), result = square_of(param),
         numel = param.range().numel] { *result = parts.host_sum_of_squares(addends, numel); });
  }
}

void ShardGradients::adopt(Sum& sum, const shard::Param& param, FullGradient gradient) {
  if (stream_.is_discrete()) {  // else it costs a pass whenever it is made
    start_square(sum, {param.id(), 0, param.layout().numel()}, gradient.data, gradient.dtype);
  }
  sum.values = gradient.data;
  sum.dtype = gradient.dtype;
  if (sum.own.data() != nullptr) {  // zeros of a step without it
    stream_.retire(std::make_shared<device::Memory>(std::move(sum.own)));
  }
  const auto bytes = static_cast<std::size_t>(bytes_of_full(param, gradient));
  sum.owner = std::make_shared<Adopted>(std::move(gradient.owner), stream_.parts().ledger,
                                        stream_.is_discrete() ? bytes : taken_bytes(bytes));
}

void ShardGradients::widen(Sum& sum, const shard::Param& param, const void* values, DType dtype) {
  float* const data = own_memory(sum, param);
  sum.own_is_zero = false;
  stream_.copy(data, DType::kFloat32, values, dtype, own_numel(param));
  sum.values = data;
  sum.dtype = DType::kFloat32;
}

void ShardGradients::add(Sum& sum, const ShardPiece& piece, const void* values, DType dtype) {
  if (sum.dtype != DType::kFloat32) {  // as it came, and not alone any more
    widen(sum, stream_.parts().params[piece.param], sum.values, sum.dtype);
    stream_.retire(std::move(sum.owner));
  }
  // Adopted memory is the reducer's, and written to.
  auto* const data = static_cast<float*>(const_cast<void*>(sum.values));
  stream_.add(data + piece.begin, values, dtype, piece.numel);
}

// --- sums over replicas ---

void ShardGradients::load(std::span<const Piece> pieces, void* to, DType dtype) {
  for (const Piece& piece : pieces) {
    const shard::Param& param = stream_.parts().params[piece.param];
    Sum& sum = sum_of(param);
    TESSERA_INVARIANT(sum.num_started > 0, "the gradient of parameter '", param.name(),
                      "' is summed over replicas, and nothing has been put");
    std::byte* const at = static_cast<std::byte*>(to) + bytes_for(piece.bucket_offset, dtype);
    const auto from = [&](const void* values, DType from_dtype) {
      stream_.copy(at, dtype,
                   static_cast<const std::byte*>(values) + bytes_for(piece.shard_begin, from_dtype),
                   from_dtype, piece.numel);
    };
    switch (*layout_.home[static_cast<std::size_t>(piece.param)]) {
      case Tier::kNvme:
        stream_.get_from_nvme({piece.param, piece.shard_begin, piece.numel}, at, dtype);
        break;
      case Tier::kHost:
        // Kernels do not convert what is in memory of the host: it leaves in the type that it has.
        stream_.stats().loaded_bytes += bytes_for(piece.numel, dtype);
        if (dtype == DType::kFloat32) {
          stream_.wait_for(sum.added);
          from(sum.host_sum.data(), DType::kFloat32);
        } else {
          stream_.wait_for(sum.left);
          from(sum.copy, sum.copies->dtype());
        }
        break;
      default:
        from(sum.values, sum.dtype);
    }
    stream_.zero(at + bytes_for(piece.numel, dtype), bytes_for(piece.padding, dtype));
  }
}

Pending ShardGradients::replace(std::span<const Piece> pieces, const float* values) {
  std::vector<Pending> left;
  const Pending made = stream_.stream().record();
  for (const Piece& piece : pieces) {
    const shard::Param& param = stream_.parts().params[piece.param];
    Sum& sum = sum_of(param);
    const ShardPiece at{piece.param, piece.shard_begin, piece.numel};
    const float* const from = values + piece.bucket_offset;
    if (at.begin == 0) {
      sum.num_squared = 0;
    }
    sum.num_squared_rounds = sum.num_rounds;
    square_piece(sum, at, from, DType::kFloat32);
    switch (*layout_.home[static_cast<std::size_t>(piece.param)]) {
      case Tier::kNvme:
        left.push_back(stream_.put_on_nvme(at, from, DType::kFloat32, false));
        break;
      case Tier::kHost: {
        const std::size_t bytes = bytes_for(at.numel, DType::kFloat32);
        auto* const to = reinterpret_cast<float*>(sum.host_sum.data()) + at.begin;
        sum.added = stream_.start_to_host(to, from, bytes, made);
        stream_.stats().host_bytes += bytes;
        left.push_back(sum.added);
        break;
      }
      default:
        if (sum.dtype != DType::kFloat32) {
          widen(sum, param, sum.values, sum.dtype);
        }
        stream_.copy(static_cast<float*>(const_cast<void*>(sum.values)) + at.begin, DType::kFloat32,
                     from, DType::kFloat32, at.numel);
    }
  }
  return Pending::all(std::move(left));
}

void ShardGradients::restart(int param) {
  Sum& sum = sums_[static_cast<std::size_t>(param)];
  sum.num_rounds = 0;
  sum.num_squared = 0;
  if (sum.copies) {
    sum.copies->clear();
  }
}

// --- gradients are asked for ---

ShardGradient ShardGradients::finished_gradient(const shard::Param& param) {
  ShardGradient found = gradient(param);
  if (std::exchange(zeros_are_made_, false)) {
    stream_.synchronize();
  }
  return found;
}

ShardGradient ShardGradients::gradient(const shard::Param& param) {
  Sum& sum = sum_of(param);
  TESSERA_INVARIANT(!sum.is_freed, "the gradient of parameter '", param.name(),
                    "' is asked for after it was freed");
  ShardGradient gradient;
  gradient.numel = param.range().numel;
  if (param.layout().numel() == 0) {
    return gradient;
  }
  if (has_square(param)) {
    gradient.squares = square_of(param);
  }
  if (param.placement().gradient == Tier::kHost) {
    gradient.is_on_host = true;
    if (sum.host_sum.data() != nullptr && sum.num_rounds > 0) {
      gradient.values = sum.host_sum.data();
      gradient.ready = sum.added;
      return gradient;
    }
    gradient.ready = sum.copies->ready();
    HostAddends addends = sum.copies->addends();
    gradient.values = addends.values;
    gradient.low = addends.low;
    gradient.dtype = addends.dtype;
    gradient.later = std::move(addends.later);
    return gradient;
  }
  if (sum.num_rounds > 0) {
    gradient.values = sum.values;
    gradient.dtype = sum.dtype;
  } else if (is_alone()) {
    gradient.values = own_memory(sum, param);
    if (!std::exchange(sum.own_is_zero, true)) {
      stream_.zero(sum.own.data(), sum.own.bytes());
      zeros_are_made_ = true;
    }
  } else {
    std::byte* const zeros = in_region(param, 0);
    stream_.zero(zeros, bytes_for(param.layout().shard_numel(), region_dtype(param)));
    zeros_are_made_ = true;
    gradient.values = zeros;
    gradient.dtype = region_dtype(param);
  }
  if (gradient.dtype == DType::kFloat32) {
    gradient.data = static_cast<float*>(const_cast<void*>(gradient.values));
  }
  return gradient;
}

std::optional<double> ShardGradients::sum_of_squares(const shard::Param& param) const {
  const Sum& sum = sums_[static_cast<std::size_t>(param.id())];
  if (sum.num_rounds == 0) {
    return 0.0;  // there is no gradient
  }
  const bool is_squared =
      sum.squared.state() != nullptr && sum.num_rounds == stream_.parts().num_micro_batches;
  if (is_squared) {
    sum.squared.wait();
  }
  return has_square(param) || is_squared ? std::optional(*square_of(param)) : std::nullopt;
}

void ShardGradients::free_gradient(const shard::Param& param) {
  Sum& sum = sum_of(param);
  sum.is_freed = true;
  stream_.retire(std::move(sum.owner), param.updated());
}

void ShardGradients::clear() noexcept {
  if (host_work_) {
    host_work_->drain();
  }
  for (Sum& sum : sums_) {
    if (sum.copies) {
      sum.copies->clear();
    }
    sum.added = {};
    sum.squared = {};
    sum.num_started = 0;
    sum.num_rounds = 0;
    sum.values = nullptr;
    sum.num_squared = 0;
    sum.num_squared_rounds = 0;
    sum.is_freed = false;
    if (sum.owner) {
      stream_.retire(std::move(sum.owner));  // an update on the stream may still read it
    }
  }
}

}  // namespace tessera::grad
