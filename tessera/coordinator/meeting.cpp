#include "tessera/coordinator/meeting.h"

#include <algorithm>

namespace tessera::coordinator {
namespace {

constexpr std::size_t kBits = 63;  // of a word; the sign stays clear

// kind: 8 bits, unit or point: 32 bits, phase: 8 bits
std::int64_t encode(const Intent& intent) {
  const auto kind = static_cast<std::int64_t>(intent.kind);
  std::int64_t what = 0;
  std::int64_t more = 0;
  switch (intent.kind) {
    case Intent::Kind::kStatic:
    case Intent::Kind::kDynamic:
      what = intent.use.unit;
      more = static_cast<std::int64_t>(intent.use.phase);
      break;
    case Intent::Kind::kPoint:
      what = intent.detail;
      more = static_cast<std::int64_t>(intent.point);
      break;
    case Intent::Kind::kFollow:
      break;
  }
  return kind | more << 8 | what << 16;
}

Intent decode(std::int64_t word) {
  Intent intent;
  intent.kind = static_cast<Intent::Kind>(word & 0xff);
  const auto more = static_cast<std::uint8_t>(word >> 8 & 0xff);
  const std::int64_t what = word >> 16;
  switch (intent.kind) {
    case Intent::Kind::kStatic:
    case Intent::Kind::kDynamic:
      intent.use = {static_cast<UnitId>(what), static_cast<Phase>(more)};
      break;
    case Intent::Kind::kPoint:
      intent.point = static_cast<MeetingPoint>(more);
      intent.detail = static_cast<std::uint32_t>(what);
      break;
    case Intent::Kind::kFollow:
      break;
  }
  return intent;
}

}  // namespace

Meeting::Meeting(comm::Group& group, device::Device& device, std::size_t num_flags)
    : group_(group),
      device_(device),
      num_flags_(num_flags),
      num_words_(1 + (num_flags + kBits - 1) / kBits),
      host_(num_words_ * static_cast<std::size_t>(group.size())),
      words_(device.allocate(Tier::kDevice, host_.size() * sizeof(std::int64_t), Role::kStaging)) {}

Meeting::Round Meeting::exchange(const Intent& own, std::span<const int> own_flags) {
  std::fill(host_.begin(), host_.end(), 0);
  const std::size_t first = num_words_ * static_cast<std::size_t>(group_.rank());
  host_[first] = encode(own);
  for (const int flag : own_flags) {
    const auto index = static_cast<std::size_t>(flag);
    host_[first + 1 + index / kBits] |= std::int64_t{1} << index % kBits;
  }
  device::Stream& stream = device_.stream(device::StreamKind::kGather);
  auto* words = reinterpret_cast<std::int64_t*>(words_.data());
  device_.start_copy(words + first, host_.data() + first, num_words_ * sizeof(std::int64_t), stream)
      .wait();
  comm::CallOptions options;
  options.label.unit = "meeting";
  options.stream = &stream;
  const comm::Gather gather{words + first, words, static_cast<std::int64_t>(num_words_),
                            DType::kInt64};
  group_.start_all_gather({&gather, 1}, options).wait();
  device_.start_copy(host_.data(), words, host_.size() * sizeof(std::int64_t), stream).wait();

  Round round;
  round.flags.assign(num_flags_, false);
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(group_.size()); ++rank) {
    const std::int64_t* of_rank = host_.data() + rank * num_words_;
    round.intents.push_back(decode(of_rank[0]));
    for (std::size_t i = 0; i < num_flags_; ++i) {
      if ((of_rank[1 + i / kBits] >> i % kBits & 1) != 0) {
        round.flags[i] = true;
      }
    }
  }
  return round;
}

}  // namespace tessera::coordinator
