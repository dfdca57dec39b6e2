// What is said about units: their types, leaves, and which of them some ranks may skip.

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/engine/engine_impl.h"

namespace tessera {
namespace {

using coordinator::LeafRule;

// "models::(anonymous namespace)::BlockImpl<float>" is BlockImpl to a person.
std::string short_type(const std::string& type) {
  const std::string name = type.substr(0, type.find('<'));
  const std::size_t space = name.rfind("::");
  return space == std::string::npos ? name : name.substr(space + 2);
}

LeafRule rule_of(const std::string& name) {
  return name.starts_with("*") ? LeafRule::suffix(name.substr(1)) : LeafRule::name(name);
}

bool matches(const std::string& pattern, const std::string& name) {
  return pattern.ends_with("*") ? name.starts_with(pattern.substr(0, pattern.size() - 1))
                                : name == pattern;
}

}  // namespace

coordinator::UnitTraits Engine::Impl::traits_of(const std::string& name, const std::string& type,
                                                bool dynamic) const {
  const std::vector<std::string>& patterns = runtime.config().get_list("unit.dynamic_names");
  const bool is_named =
      std::any_of(patterns.begin(), patterns.end(),
                  [&](const std::string& pattern) { return matches(pattern, name); });
  return {short_type(type), dynamic || is_named};
}

void Engine::Impl::set_leaf(const LeafRule& rule, bool is_leaf) {
  check_usable();
  TESSERA_CHECK(!is_sealed(), ConfigError, describe(rule),
                " is made a leaf, or is one no longer, after the first forward; do it before");
  apply_leaf_options();
  if (is_leaf) {
    coordinator_->set_leaves(rule);
  } else {
    coordinator_->clear_leaves(rule);
  }
}
void Engine::Impl::set_leaf(const std::string& name, bool is_leaf) {
  set_leaf(rule_of(name), is_leaf);
}

std::vector<std::string> Engine::Impl::leaf_units() {
  apply_leaf_options();
  return coordinator_->leaves();
}

void Engine::Impl::apply_leaf_options() {
  if (leaf_options_applied_) {
    return;
  }
  leaf_options_applied_ = true;
  const Config& config = runtime.config();
  for (const std::string& name : config.get_list("unit.leaf_names")) {
    coordinator_->set_leaves(LeafRule::name(name));
  }
  for (const std::string& suffix : config.get_list("unit.leaf_name_suffixes")) {
    coordinator_->set_leaves(LeafRule::suffix(suffix));
  }
  for (const std::string& type : config.get_list("unit.leaf_types")) {
    coordinator_->set_leaves(LeafRule::type(type));
  }
  if (const std::int64_t numel = config.get_int("unit.leaf_below_numel"); numel > 0) {
    coordinator_->set_leaves(LeafRule::numel_below(numel));
  }
}

void Engine::Impl::settle_units() {
  apply_leaf_options();
  for (const std::string& pattern : runtime.config().get_list("unit.dynamic_names")) {
    TESSERA_CHECK(std::any_of(units_.begin(), units_.end(),
                              [&](const auto& unit) { return matches(pattern, unit->name()); }),
                  ConfigError, "unit.dynamic_names has '", pattern, "', which matches none of ",
                  units_.size(), " units; check its spelling");
  }
  // A parameter that a static unit uses, too, is gathered and reduced by all ranks in any case.
  for (int id = 0; id < params.num_params(); ++id) {
    const auto& users = units_of_param_[static_cast<std::size_t>(id)];
    params[id].set_dynamic(std::all_of(users.begin(), users.end(), [&](const auto* unit) {
      return coordinator_->unit(unit->id()).traits.dynamic;
    }));
  }
  coordinator_->settle_units();
}

void Engine::Impl::seal_units() {
  coordinator_->seal();
  // From here on a leaf uses what is inside it.
  for (const auto& unit : units_) {
    for (const int id : coordinator_->unit(unit->id()).ids) {
      auto& users = units_of_param_[static_cast<std::size_t>(id)];
      if (std::find(users.begin(), users.end(), unit.get()) == users.end()) {
        users.push_back(unit.get());
        unit->add_trainable(params[id].trainable() ? 1 : 0);
      }
    }
  }
}

}  // namespace tessera
