// The units of an engine and what each needs, prepared once so that a use
// looks nothing up.
//
// Threads: as Param.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/coordinator/access_trace.h"
#include "tessera/core/error.h"
#include "tessera/core/spans.h"
#include "tessera/shard/param.h"

namespace tessera::coordinator {

// Gathered, with what its shard is loaded to where it must be decoded.
inline std::int64_t full_bytes_of(const shard::Param& param) {
  return static_cast<std::int64_t>(param.gathered_bytes());
}

// Which units are leaves: gathered whole, with everything inside them, when they begin.
//
// A leaf is for a unit whose inner units are small or are used in an order that changes: one gather
// in place of many. Inside a unit are those whose name goes on after its own with a dot. Rules are
// by name, by the end of the name, by the type of the module, or by size: units whose elements,
// divided by one more than the number of units inside, are at most a threshold; a unit without
// others inside gains nothing and is left out of that rule.
struct LeafRule {
  enum class Kind : std::uint8_t { kName, kNameSuffix, kType, kNumelBelow };
  Kind kind = Kind::kName;
  std::string text;
  std::int64_t numel = 0;

  static LeafRule name(std::string text) { return {Kind::kName, std::move(text), 0}; }
  static LeafRule suffix(std::string text) { return {Kind::kNameSuffix, std::move(text), 0}; }
  static LeafRule type(std::string text) { return {Kind::kType, std::move(text), 0}; }
  static LeafRule numel_below(std::int64_t numel) { return {Kind::kNumelBelow, {}, numel}; }
};
std::string describe(const LeafRule& rule);  // "type 'BlockImpl'"

// What is said about a unit when it is made.
struct UnitTraits {
  std::string type;      // of its module
  bool dynamic = false;  // some ranks may skip it
};

struct UnitInfo {
  std::string name;
  UnitTraits traits;
  std::vector<int> ids;       // ascending; of a leaf, those of all units inside it, too
  std::vector<int> own_ids;   // given when it was made
  std::vector<int> external;  // added later
  bool is_leaf = false;
  UnitId leaf = -1;  // the outermost leaf that it is inside of
  // From finalize() on.
  std::vector<int> mixed;             // of a static unit: ids that a dynamic one needs, too
  std::vector<int> planned;           // ids without those, and without direct ones
  std::vector<shard::Param*> direct;  // a group of one, in the device's memory: used in place
  std::vector<shard::Param*> params;
  std::int64_t bytes = 0;           // of its full parameters
  std::int64_t gathered_bytes = 0;  // of those that are not direct
  LabelId label = 0;
  std::string text;  // "h.3 (h.3.attn.weight)", with its first parameter
};

class UnitTable {
 public:
  // `params` outlives the table.
  explicit UnitTable(shard::ParamTable& params) : params_(params) {}

  // Both throw InternalError for a parameter that there is not, and after finalize().
  UnitId add(std::string name, const std::vector<int>& params, UnitTraits traits = {});
  void add_param(UnitId id, int param);  // an external one

  // Throws ConfigError for a rule that matches no unit, and after finalize().
  void mark_leaves(const LeafRule& rule, bool is_leaf);
  std::vector<std::string> leaves() const;

  // Gives leaves what is inside them: whose `ids` are final afterwards. By itself in finalize().
  void expand_leaves();
  // The model is complete: no unit or parameter is added any more.
  void finalize(Spans& spans);
  bool is_finalized() const { return is_finalized_; }
  // Shards have moved: what is direct follows. finalize() calls it.
  void follow_placements();

  std::size_t num_units() const { return units_.size(); }
  // Throws InternalError for a unit that there is not.
  const UnitInfo& operator[](UnitId id) const {
    TESSERA_INVARIANT(id >= 0 && static_cast<std::size_t>(id) < units_.size(), "unit ", id,
                      " is not known; there are ", units_.size());
    return units_[static_cast<std::size_t>(id)];
  }
  std::string text_of(const Use& use) const;  // "the forward of unit 'h.3'"
  // The first unit that needs a parameter. REQUIRES: there is one.
  UnitId owner_id(int param) const { return owners_[static_cast<std::size_t>(param)]; }

  // By parameter id, of the whole table of parameters.
  std::vector<std::int64_t> param_bytes() const;
  // By unit: what make_plan() wants. Which ranks hold a parameter that dynamic units need depends
  // on what they use, so no plan knows of it.
  std::vector<std::vector<int>> planned_ids() const;
  bool has_dynamic() const;
  // Of the largest unit, without what is direct: dynamic ones, or the others.
  std::int64_t largest_bytes(bool dynamic) const;
  // Room for live_limit_bytes of parameters, but for no more than all, and for the largest unit;
  // each parameter rounded up to the arena's alignment. Direct ones need none.
  std::size_t arena_bytes(std::int64_t live_limit_bytes) const;

 private:
  void check_param(UnitId id, int param) const;
  bool matches(const UnitInfo& unit, const LeafRule& rule) const;
  void set_mixed_apart();

  shard::ParamTable& params_;
  std::vector<UnitInfo> units_;
  std::vector<UnitId> owners_;  // by parameter id
  bool has_expanded_ = false;
  bool is_finalized_ = false;
};

}  // namespace tessera::coordinator
