#include "tessera/engine/gathered_book.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/engine/engine_impl.h"
#include "tessera/engine/gathered.h"

namespace tessera {
namespace engine {
namespace {

constexpr const char* kWhat = "gathered scope";

// Each step is one-to-one in `hash` and in the word, so a single changed word is always seen.
std::uint64_t add_to_hash(std::uint64_t hash, const std::byte* data, std::size_t bytes) {
  constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15U;
  while (bytes > 0) {
    std::uint64_t word = 0;
    const std::size_t taken = std::min(bytes, sizeof(word));
    std::memcpy(&word, data, taken);
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 32;
    data += taken;
    bytes -= taken;
  }
  return hash;
}

}  // namespace

GatheredBook::~GatheredBook() {
  for (const auto& state : open_) {
    state->book = nullptr;
  }
  // Their memory goes; the tensors must not point at it.
  for (const auto& [id, memory] : early_) {
    shard::Param& param = engine_.params[id];
    param.allow_edits();
    while (param.num_users() > 0) {
      param.remove_user(kWhat);
    }
  }
}

void GatheredBook::check_failure() {
  if (failure_) {
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
}

void GatheredBook::check_no_early_scope() const {
  for (const auto& state : open_) {
    TESSERA_CHECK(!state->is_early || state->ids.empty(), ConfigError,
                  "the first unit runs while parameter '",
                  engine_.params[state->ids.front()].name(),
                  "' is in a gathered scope that was opened before; close that scope first");
  }
}

std::shared_ptr<GatheredState> GatheredBook::open(std::vector<int> ids, int modifier_rank) {
  TESSERA_CHECK(modifier_rank >= -1 && modifier_rank < engine_.group().size(), ConfigError,
                "gathered(): modifier_rank=", modifier_rank, " of ", engine_.group().size(),
                " ranks; -1 is for reading");
  if (modifier_rank >= 0) {
    engine_.check_not_resident("gathered() with a modifier rank");
    TESSERA_CHECK(engine_.forward_depth() == 0, ConfigError,
                  "gathered() with a modifier rank inside of a unit's forward; change parameters "
                  "between units");
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  auto state = std::make_shared<GatheredState>();
  state->ids = std::move(ids);
  state->modifier_rank = modifier_rank;
  state->is_early = !engine_.is_sealed();
  for (const auto& other : open_) {
    for (const int id : state->ids) {
      TESSERA_CHECK(
          modifier_rank < 0 || other->modifier_rank < 0 || other->modifier_rank == modifier_rank ||
              !std::binary_search(other->ids.begin(), other->ids.end(), id),
          ConfigError, "parameter '", engine_.params[id].name(), "' is to be changed by rank ",
          modifier_rank, " inside a gathered scope in which rank ", other->modifier_rank,
          " may change it; close that one first");
    }
  }
  hold(*state);
  for (const int id : state->ids) {
    state->hashes.push_back(hash_of(id));
    if (modifier_rank >= 0) {
      engine_.params[id].allow_edits();
    }
  }
  state->book = this;
  open_.push_back(state);
  return state;
}

void GatheredBook::hold(const GatheredState& state) {
  if (state.is_early) {
    hold_early(state.ids);
  } else {
    engine_.coordinator().begin_hold(state.ids, kWhat);
  }
}

// The coordinator takes its arena when the model is complete; until then each parameter gets memory
// of its own.
void GatheredBook::hold_early(const std::vector<int>& ids) {
  for (const int id : ids) {
    shard::Param& param = engine_.params[id];
    if (param.num_users() == 0) {
      if (param.shard_is_full()) {
        param.start_gather(param.shard());
      } else {
        early_[id] = engine_.gather_full(id, kWhat);
        param.start_gather(early_[id].data());
      }
      param.finish_gather();
    }
    param.add_user();
  }
}

void GatheredBook::let_go_early(int id) {
  shard::Param& param = engine_.params[id];
  param.remove_user(kWhat);
  if (param.num_users() == 0) {
    param.release();
    early_.erase(id);
  }
}

void GatheredBook::let_go(const GatheredState& state, const std::vector<int>& written) {
  std::vector<int> kept;
  std::vector<int> stale;
  for (const int id : state.ids) {
    shard::Param& param = engine_.params[id];
    param.allow_edits();  // they have been looked at
    if (state.is_early) {
      let_go_early(id);
    } else if (std::binary_search(written.begin(), written.end(), id)) {
      stale.push_back(id);
    } else {
      kept.push_back(id);
    }
  }
  if (!stale.empty()) {
    engine_.coordinator().end_hold(stale, kWhat, /*changed=*/true);
  }
  if (!kept.empty()) {
    engine_.coordinator().end_hold(kept, kWhat, /*changed=*/false);
  }
}

std::uint64_t GatheredBook::hash_of(int id) const {
  const shard::Param& param = engine_.params[id];
  const std::size_t bytes =
      static_cast<std::size_t>(param.layout().numel()) * bytes_of(param.layout().dtype());
  const auto* data = static_cast<const std::byte*>(param.full());
  if (!engine_.runtime.on_cuda()) {
    return add_to_hash(0, data, bytes);
  }
  constexpr std::size_t kChunkBytes = std::size_t{8} << 20;
  std::vector<std::byte> chunk(std::min(bytes, kChunkBytes));
  device::Device& device = engine_.runtime.device();
  std::uint64_t hash = 0;
  for (std::size_t done = 0; done < bytes; done += kChunkBytes) {
    const std::size_t part = std::min(kChunkBytes, bytes - done);
    // In the order of the user's own work.
    device.start_copy(chunk.data(), data + done, part, device.stream(device::StreamKind::kCompute))
        .wait();
    hash = add_to_hash(hash, chunk.data(), part);
  }
  return hash;
}

bool GatheredBook::is_changed_elsewhere(const GatheredState& state, int id) const {
  return state.modifier_rank < 0 && std::any_of(open_.begin(), open_.end(), [&](const auto& each) {
           return each->modifier_rank >= 0 &&
                  std::binary_search(each->ids.begin(), each->ids.end(), id);
         });
}

std::string GatheredBook::first_wrong(const GatheredState& state,
                                      const std::vector<std::int64_t>& changed) const {
  const std::size_t num_ids = state.ids.size();
  for (std::size_t rank = 0; rank < changed.size() / std::max<std::size_t>(num_ids, 1); ++rank) {
    for (std::size_t i = 0; i < num_ids; ++i) {
      if (changed[rank * num_ids + i] == 0 || static_cast<int>(rank) == state.modifier_rank) {
        continue;
      }
      const std::string name = engine_.params[state.ids[i]].name();
      if (state.modifier_rank >= 0) {
        return detail::concat("parameter '", name, "' was changed on rank ", rank,
                              " inside a gathered scope in which only rank ", state.modifier_rank,
                              " may change it; nothing of this scope was written back");
      }
      return detail::concat("parameter '", name, "' was changed on rank ", rank,
                            " inside a gathered scope for reading; pass the rank whose changes "
                            "shall count: engine.gathered(params, modifier_rank)");
    }
  }
  return {};
}

void GatheredBook::write_back(int id, int modifier_rank) {
  shard::Param& param = engine_.params[id];
  const shard::Layout& layout = param.layout();
  if (!param.shard_is_full()) {
    comm::CallOptions call;
    call.label.unit = kWhat;
    call.label.parameter = param.name();
    call.stream = &engine_.runtime.device().stream(device::StreamKind::kCompute);
    engine_.group()
        .start_broadcast(param.full(), layout.numel(), layout.dtype(), modifier_rank, call)
        .wait();
    engine_.copy_to_shard(
        param, static_cast<const std::byte*>(param.full()) +
                   static_cast<std::size_t>(param.range().begin) * bytes_of(layout.dtype()));
  }
  engine_.shard_was_written(id);
}

void GatheredBook::set_hash(int id, std::uint64_t hash) {
  for (const auto& other : open_) {
    const auto found = std::lower_bound(other->ids.begin(), other->ids.end(), id);
    if (found != other->ids.end() && *found == id) {
      other->hashes[static_cast<std::size_t>(found - other->ids.begin())] = hash;
    }
  }
}

void GatheredBook::close(GatheredState& state) {
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const auto& each) { return each.get() == &state; });
  const std::shared_ptr<GatheredState> keep = std::move(*found);
  open_.erase(found);
  state.book = nullptr;
  std::vector<int> written;
  std::string wrong;
  try {
    std::vector<std::int64_t> changed;
    for (std::size_t i = 0; i < state.ids.size(); ++i) {
      const int id = state.ids[i];
      changed.push_back(!is_changed_elsewhere(state, id) && hash_of(id) != state.hashes[i] ? 1 : 0);
    }
    changed = engine_.gather_numbers(changed, kWhat);
    wrong = first_wrong(state, changed);
    for (std::size_t i = 0; i < changed.size(); ++i) {
      if (changed[i] != 0) {
        written.push_back(state.ids[i % state.ids.size()]);
      }
    }
    std::sort(written.begin(), written.end());
    written.erase(std::unique(written.begin(), written.end()), written.end());
    for (const int id : written) {
      if (wrong.empty()) {
        write_back(id, state.modifier_rank);
        set_hash(id, hash_of(id));
      } else if (engine_.params[id].shard_is_full()) {
        engine_.shard_was_written(id);  // it has happened: no later step shall revert half of it
      }
    }
  } catch (...) {
    let_go(state, state.ids);
    throw;
  }
  let_go(state, written);
  TESSERA_CHECK(wrong.empty(), ConfigError, wrong);
}

void GatheredBook::close_quietly(GatheredState& state) noexcept {
  try {
    close(state);
  } catch (const std::exception& error) {
    engine_.runtime.logger().warn("while a gathered scope was left: ", error.what());
    if (!failure_) {
      failure_ = std::current_exception();
    }
  }
}

}  // namespace engine

GatheredScope::GatheredScope(std::shared_ptr<engine::GatheredState> state)
    : state_(std::move(state)) {}

GatheredScope::~GatheredScope() {
  if (state_ && state_->book != nullptr) {
    state_->book->close_quietly(*state_);
  }
}

void GatheredScope::close() {
  if (state_ && state_->book != nullptr) {
    state_->book->close(*state_);
  }
}

}  // namespace tessera
