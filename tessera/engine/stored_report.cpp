#include "tessera/engine/stored_report.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::engine {
namespace {

std::string unchanged(const shard::ParamTable& params, const shard::StoredRule& rule) {
  int num_frozen = 0;
  for (int id = 0; id < params.num_params(); ++id) {
    num_frozen += params[id].trainable() ? 0 : 1;
  }
  const shard::StoredFormat format = rule.format();
  return detail::concat(
      "quant.frozen_bits = ", format.bits, " changes nothing: ",
      num_frozen == 0
          ? detail::concat("all ", params.num_params(), " parameters are trainable")
          : detail::concat("of ", num_frozen, " frozen parameters none has two dims and ",
                           format.step(), " elements"));
}

// Of all ranks, in their order.
std::vector<shard::EncodingChange> summed(comm::Group& group,
                                          const std::vector<shard::EncodingChange>& mine) {
  if (group.size() == 1) {
    return mine;
  }
  comm::CallOptions call;
  call.label.unit = "errors of weights that are stored as blocks";
  const comm::HostGather all = group.start_gather_host(std::as_bytes(std::span(mine)), call);
  all.done.wait();
  std::vector<shard::EncodingChange> sums(mine.size());
  std::vector<shard::EncodingChange> theirs(mine.size());
  const std::size_t bytes = mine.size() * sizeof(shard::EncodingChange);
  for (int rank = 0; rank < group.size(); ++rank) {
    std::memcpy(theirs.data(), all.bytes.get() + static_cast<std::size_t>(rank) * bytes, bytes);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] += theirs[i];
    }
  }
  return sums;
}

}  // namespace

std::string StoredReport::text(comm::Group& group, const shard::ParamTable& params,
                               const shard::StoredRule& rule) const {
  std::vector<int> ids;
  std::vector<shard::EncodingChange> mine;
  std::uint64_t before = 0;
  std::uint64_t after = 0;
  std::string formats;
  for (int id = 0; id < params.num_params(); ++id) {
    const shard::Layout& layout = params[id].layout();
    if (!layout.is_encoded()) {
      continue;
    }
    ids.push_back(id);
    mine.push_back(changes_[static_cast<std::size_t>(id)]);
    before += static_cast<std::uint64_t>(layout.numel()) * bytes_of(layout.dtype());
    after += layout.shard_bytes() * static_cast<std::uint64_t>(layout.num_ranks());
    const std::string format = shard::describe(layout.format());
    if (formats.find(format) == std::string::npos) {
      formats += (formats.empty() ? "" : " and ") + format;
    }
  }
  if (ids.empty()) {
    return rule.format().is_encoded() ? unchanged(params, rule) : std::string();
  }
  const std::vector<shard::EncodingChange> changes = summed(group, mine);
  shard::EncodingChange all;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < changes.size(); ++i) {
    all += changes[i];
    // What is no number is the worst there is.
    if (!std::isnan(changes[worst].relative()) &&
        !(changes[i].relative() <= changes[worst].relative())) {
      worst = i;
    }
  }
  const std::string error =
      all.values == 0 && all.error == 0
          ? std::string("their blocks were read as they are")
          : detail::concat("this changes numbers, by a relative error of ", all.relative(),
                           ", the largest ", changes[worst].relative(), " in '",
                           params[ids[worst]].name(), "'");
  return detail::concat(ids.size(), " of ", params.num_params(), " parameters are stored as ",
                        formats, " (quant.frozen_bits): ", approximate_bytes(after),
                        " in place of ", approximate_bytes(before), " on all ranks; ", error);
}

}  // namespace tessera::engine
