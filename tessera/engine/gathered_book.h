// The open gathered scopes of an engine, and what closing one takes: see gathered.h.
//
// What fixes the order of collectives: the caller. Opening gathers; closing agrees on who has
// changed what (one all-gather of flags), then broadcasts what the modifier rank has changed, in
// the order of ids.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/device/device.h"
#include "tessera/engine/engine.h"

namespace tessera::engine {

class GatheredBook;

struct GatheredState {
  GatheredBook* book = nullptr;  // null: closed, or the engine is gone
  std::vector<int> ids;          // ascending
  int modifier_rank = -1;
  bool is_early = false;              // opened before the engine was sealed
  std::vector<std::uint64_t> hashes;  // by index in ids: of the values that all ranks agree on
};

class GatheredBook {
 public:
  explicit GatheredBook(Engine::Impl& engine) : engine_(engine) {}
  ~GatheredBook();
  GatheredBook(const GatheredBook&) = delete;
  GatheredBook& operator=(const GatheredBook&) = delete;

  std::shared_ptr<GatheredState> open(std::vector<int> ids, int modifier_rank);
  void close(GatheredState& state);
  // As close(); a failure is kept for check_failure().
  void close_quietly(GatheredState& state) noexcept;
  // Throws what a destructor could not.
  void check_failure();
  // REQUIRES of the first forward: see gathered.h.
  void check_no_early_scope() const;
  bool has_open() const { return !open_.empty(); }

 private:
  void hold(const GatheredState& state);
  void hold_early(const std::vector<int>& ids);
  // `written`: by id, those whose copies are no longer what was gathered.
  void let_go(const GatheredState& state, const std::vector<int>& written);
  void let_go_early(int id);
  bool is_changed_elsewhere(const GatheredState& state, int id) const;
  std::uint64_t hash_of(int id) const;
  // Who changed what against the rules; empty: nobody. `changed`: by rank and index in ids.
  std::string first_wrong(const GatheredState& state,
                          const std::vector<std::int64_t>& changed) const;
  void write_back(int id, int modifier_rank);
  // The values of all ranks are these from now on, also for the other scopes.
  void set_hash(int id, std::uint64_t hash);

  Engine::Impl& engine_;
  std::vector<std::shared_ptr<GatheredState>> open_;
  std::map<int, device::Memory> early_;  // by id
  std::exception_ptr failure_;
};

}  // namespace tessera::engine
