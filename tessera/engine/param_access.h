// Internal to engine: whole parameters between steps. It keeps the open scopes (param_scopes.h) and
// makes full values for those who look at or save a model.
//
// Order of collectives: the caller's. Opening a gathered scope gathers; closing exchanges which
// ranks have changed which parameters (one all-gather of flags), then broadcasts the modifier
// rank's changes, in the order of ids. Full values are gathered one by one.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/device/device.h"
#include "tessera/engine/engine_context.h"
#include "tessera/engine/model.h"
#include "tessera/engine/rank_agreement.h"
#include "tessera/engine/step_driver.h"

namespace tessera::engine {

class ParamAccess;

struct GatheredState {
  ParamAccess* access = nullptr;  // null: closed, or the engine is gone
  std::vector<int> ids;           // ascending
  int modifier_rank = -1;
  bool is_early = false;              // opened before the first forward
  std::vector<std::uint64_t> hashes;  // by index in ids: of the values that all ranks agree on
};

struct ResidentState {
  ParamAccess* access = nullptr;  // null: closed, or the engine is gone
  bool is_resident = false;
};

class ParamAccess {
 public:
  ParamAccess(EngineContext& context, RankAgreement& ranks, Model& model, StepDriver& driver)
      : ctx_(context), ranks_(ranks), model_(model), driver_(driver) {}
  ~ParamAccess();
  ParamAccess(const ParamAccess&) = delete;
  ParamAccess& operator=(const ParamAccess&) = delete;

  // --- gathered scopes ---
  std::shared_ptr<GatheredState> open(std::vector<int> ids, int modifier_rank);
  void close(GatheredState& state);
  // As close(); the next call of the engine throws what goes wrong.
  void close_quietly(GatheredState& state) noexcept;
  // REQUIRES of the first forward: see param_scopes.h.
  void check_no_early_scope() const;

  // REQUIRES of a save: nobody changes parameters meanwhile; of a load: nobody looks at them.
  void check_no_edits(const char* what) const;
  void check_no_scopes(const char* what) const;

  // --- resident scopes; a pass has begun ---
  std::shared_ptr<ResidentState> open_resident();
  void close(ResidentState& state);
  void close_quietly(ResidentState& state) noexcept;

  // --- collective ---
  at::Tensor full_value(int id) { return value_on(id, at::Device(at::kCPU)); }
  void save_parameters(const std::string& path);
  void to_plain();

 private:
  // The whole parameter in memory of its own, waited for.
  device::Memory gather_full(int id, const std::string& what);
  // The full value as a tensor of the parameter's shape.
  at::Tensor value_on(int id, at::Device where);
  void hold_early(const std::vector<int>& ids);
  // `written`: by id, those whose copies are no longer what was gathered.
  void free(const GatheredState& state, const std::vector<int>& written);
  void free_early(int id);
  bool is_changed_elsewhere(const GatheredState& state, int id) const;
  // By index in `ids`, in the order of the user's own work.
  std::vector<std::uint64_t> hashes_of(const std::vector<int>& ids) const;
  // Who changed what against the rules; empty: nobody. `changed`: by rank and index in ids.
  std::string first_wrong(const GatheredState& state,
                          const std::vector<std::int64_t>& changed) const;
  void write_back(int id, int modifier_rank);
  // The values of all ranks are these from now on, also for the other scopes.
  void set_hashes(const std::vector<int>& ids);

  EngineContext& ctx_;
  RankAgreement& ranks_;
  Model& model_;
  StepDriver& driver_;
  std::vector<std::shared_ptr<GatheredState>> open_;
  std::map<int, device::Memory> early_;      // gathered before the first forward, by id
  std::shared_ptr<ResidentState> resident_;  // null: no scope is open
};

}  // namespace tessera::engine
