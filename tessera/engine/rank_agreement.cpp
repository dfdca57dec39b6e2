#include "tessera/engine/rank_agreement.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "tessera/core/error.h"

namespace tessera::engine {

void RankAgreement::join_outside_of_units(const std::string& what) {
  if (lifecycle_.is_finalized()) {
    coordinator_.meet(coordinator::MeetingPoint::kHold, what);
  }
}

std::vector<std::int64_t> RankAgreement::gather_numbers(const std::vector<std::int64_t>& mine,
                                                        const std::string& what) {
  if (group_.size() == 1 || mine.empty()) {
    return mine;
  }
  join_outside_of_units(what);
  device::Device& device = runtime_.device();
  device::Stream& stream = device.stream(device::StreamKind::kGather);
  const std::size_t bytes = mine.size() * sizeof(std::int64_t);
  const auto ranks = static_cast<std::size_t>(group_.size());
  const device::Memory own = device.allocate(Tier::kDevice, bytes, Role::kStaging);
  const device::Memory all = device.allocate(Tier::kDevice, bytes * ranks, Role::kStaging);
  device.start_copy(own.data(), mine.data(), bytes, stream).wait();
  comm::CallOptions call;
  call.label.unit = what;
  call.stream = &stream;
  const comm::Gather gather{own.data(), all.data(), static_cast<std::int64_t>(mine.size()),
                            DType::kInt64};
  group_.start_all_gather({&gather, 1}, call).wait();
  std::vector<std::int64_t> result(mine.size() * ranks);
  device.start_copy(result.data(), all.data(), bytes * ranks, stream).wait();
  return result;
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
  if (group_.size() > 1) {
    join_outside_of_units(what);
    std::vector<std::byte> mine(1 + kMaxText);
    mine.front() = std::byte{refusal ? std::uint8_t{1} : std::uint8_t{0}};
    std::memcpy(mine.data() + 1, text.data(), text.size());
    comm::CallOptions call;
    call.label.unit = what;
    const comm::HostGather all = group_.start_gather_host(mine, call);
    all.done.wait();
    for (int rank = 0; rank < group_.size() && !refusal; ++rank) {
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
