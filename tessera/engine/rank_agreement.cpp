#include "tessera/engine/rank_agreement.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "tessera/core/error.h"

namespace tessera::engine {
namespace {

constexpr std::size_t kNumbersBytes = 256;  // those of a step, and more

}  // namespace

void RankAgreement::join_outside_of_units(const std::string& what) {
  if (ctx_.lifecycle.is_finalized()) {
    ctx_.coordinator.reach_consensus(coordinator::ConsensusPoint::kHold, what);
  }
}

std::vector<std::int64_t> RankAgreement::gather_numbers(const std::vector<std::int64_t>& mine,
                                                        const std::string& what) {
  if (ctx_.group.size() == 1 || mine.empty()) {
    return mine;
  }
  join_outside_of_units(what);
  comm::CallOptions call;
  call.label.unit = what;
  const comm::HostGather all = ctx_.group.start_gather_host(std::as_bytes(std::span(mine)), call);
  all.done.wait();
  std::vector<std::int64_t> result(mine.size() * static_cast<std::size_t>(ctx_.group.size()));
  std::memcpy(result.data(), all.bytes.get(), result.size() * sizeof(std::int64_t));
  return result;
}

void RankAgreement::reduce_numbers(std::span<double> numbers, comm::Reduction reduction,
                                   const char* what, comm::Group* group) {
  device::Device& device = ctx_.runtime.device();
  device::Stream& stream = device.stream(device::StreamKind::kReduce);
  if (numbers_.bytes() < numbers.size_bytes()) {
    numbers_ = device.allocate(Tier::kDevice, std::max(kNumbersBytes, numbers.size_bytes()),
                               Role::kStaging);
  }
  device.start_copy(numbers_.data(), numbers.data(), numbers.size_bytes(), stream).wait();
  comm::CallOptions call;
  call.label.unit = what;
  call.stream = &stream;
  (group != nullptr ? *group : ctx_.group)
      .start_all_reduce(numbers_.data(), static_cast<std::int64_t>(numbers.size()), DType::kFloat64,
                        reduction, call)
      .wait();
  device.start_copy(numbers.data(), numbers_.data(), numbers.size_bytes(), stream).wait();
}

std::string RankAgreement::broadcast_text(std::string text, const char* what) {
  if (ctx_.group.size() == 1) {
    return text;
  }
  comm::CallOptions call;
  call.label.unit = what;
  std::uint64_t bytes = text.size();
  ctx_.group.broadcast_host(&bytes, sizeof(bytes), 0, call);
  text.resize(bytes);
  if (bytes > 0) {
    ctx_.group.broadcast_host(text.data(), bytes, 0, call);
  }
  return text;
}

void RankAgreement::agree(const std::string& what, const std::function<void()>& check) {
  constexpr std::size_t kMaxText = 400;
  std::exception_ptr refusal;
  std::string text;
  try {
    check();
  } catch (const std::exception& error) {
    refusal = std::current_exception();
    text = error.what();
    text = text.substr(0, std::min(kMaxText, text.find('\n')));
  }
  if (ctx_.group.size() > 1) {
    join_outside_of_units(what);
    std::vector<std::byte> mine(1 + kMaxText);
    mine.front() = std::byte{refusal ? std::uint8_t{1} : std::uint8_t{0}};
    std::memcpy(mine.data() + 1, text.data(), text.size());
    comm::CallOptions call;
    call.label.unit = what;
    const comm::HostGather all = ctx_.group.start_gather_host(mine, call);
    all.done.wait();
    for (int rank = 0; rank < ctx_.group.size() && !refusal; ++rank) {
      const std::byte* const from = all.bytes.get() + static_cast<std::size_t>(rank) * mine.size();
      const auto* const said = reinterpret_cast<const char*>(from + 1);
      TESSERA_CHECK(
          from[0] == std::byte{0}, ConfigError, what, ": rank ", rank,
          " cannot, so no rank does. It says: ", std::string(said, strnlen(said, kMaxText)));
    }
  }
  if (refusal) {
    std::rethrow_exception(refusal);
  }
}

}  // namespace tessera::engine
