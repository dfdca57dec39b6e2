// Internal to engine: the engine's table of the model: parameters by id, the units that use them,
// and buffers. Parameters are sharded as units are made, so at most one unit is whole at a time.
//
// Invariant: a parameter is identified by its tensor. A tensor that is registered a second time is
// tied, and stays one shard.
//
// Order of collectives: registration. A unit takes one exchange, in which a rank reports if it
// cannot make the unit, and one broadcast per parameter with module values.
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/coordinator/unit_table.h"
#include "tessera/engine/engine_context.h"
#include "tessera/engine/rank_agreement.h"
#include "tessera/engine/unit_core.h"
#include "tessera/shard/stored_format.h"

namespace tessera::engine {

class Model {
 public:
  Model(EngineObjects& engine, EngineContext& context, RankAgreement& ranks);
  // Hooks and units may outlive the engine; afterwards they do nothing.
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // --- building ---
  UnitCore* add_unit(const std::string& name, const std::vector<NamedTensor>& params,
                     const UnitOptions& options, const std::string& module_type);
  void add_external(UnitCore& unit, const at::Tensor& tensor);
  // Collective: every rank gets rank 0's values.
  void send_buffers(const std::string& unit, const std::vector<NamedTensor>& buffers);
  void set_leaf(const coordinator::LeafRule& rule, bool is_leaf);
  void set_leaf(const std::string& name, bool is_leaf);
  std::vector<std::string> leaf_units();
  // Fixes which units are inside leaves and which parameters are dynamic.
  void finalize_leaves();
  // REQUIRES: the coordinator is complete. Afterwards a leaf uses the parameters of the units
  // inside it.
  void finalize_units();
  // What quant.frozen_bits does. Collective where anything is stored as blocks.
  void tell_stored() const;

  // --- lookup ---
  planner::ModelShapes shapes() const;
  const std::vector<at::Tensor>& tensors() const { return tensors_; }  // by id
  const at::Tensor& tensor(int id) const { return tensors_[static_cast<std::size_t>(id)]; }
  // Registered buffers of all modules.
  const std::vector<at::Tensor>& buffers() const { return buffers_; }
  const std::vector<std::string>& buffer_names() const { return buffer_names_; }
  // Other names under which units have registered the same tensor.
  const std::vector<std::string>& tied_names(int id) const {
    return tied_names_[static_cast<std::size_t>(id)];
  }
  const std::vector<std::shared_ptr<UnitCore>>& units() const { return units_; }
  const std::vector<UnitCore*>& users_of(int id) const {
    return units_of_param_[static_cast<std::size_t>(id)];
  }
  std::optional<int> find(const at::Tensor& tensor) const;  // null: no parameter of this engine
  int id_of(const at::Tensor& tensor) const;                // ConfigError in place of null
  std::vector<int> ids_of(const std::vector<at::Tensor>& wanted) const;
  bool is_used_by(const at::Tensor& param, const UnitCore& unit) const;
  std::int64_t trainable_bytes() const;

  // --- changes between steps --- Flips whether the parameter is trainable, for its hook and its
  // units.
  void flip_trainable(int id);
  // Removes every parameter's hook, and makes units plain calls.
  void make_plain();

 private:
  // `before`: the values before a conversion to another type; undefined if there was none.
  struct ParamOptions {
    Init init;
    double weight_decay_scale = 1;
    shard::StoredFormat format = {};
  };
  int add_param(const NamedTensor& param, const at::Tensor& before, const ParamOptions& options);
  void check_param(const std::string& name, const at::Tensor& tensor) const;
  void warn_of_units_inside(const std::string& name, const std::vector<int>& ids) const;
  // The type to which parameters and floating buffers are converted as a unit is made; null: none.
  std::optional<DType> wanted_dtype() const;
  coordinator::UnitTraits traits_of(const std::string& name, const std::string& type,
                                    bool dynamic) const;
  void apply_leaf_options();
  // How a parameter is stored: by its unit's UnitOptions, else by the options.
  shard::StoredFormat format_of(const std::string& name, const at::Tensor& tensor,
                                std::optional<int> bits) const;
  const shard::StoredCodecs& codecs_of(shard::StoredFormat format);
  // Checks that every name in quant.frozen_names is a frozen parameter that can be stored as
  // blocks.
  void check_stored_names() const;
  void keep_first_master(shard::Param& param, const at::Tensor& precise);
  void fill_shard(const shard::Param& param, const Init& init);
  void watch_gradient(int id);

  EngineObjects& engine_;  // passed to units and hooks
  EngineContext& ctx_;
  RankAgreement& ranks_;
  std::vector<at::Tensor> tensors_;
  std::unordered_map<const c10::TensorImpl*, int> id_of_tensor_;
  std::vector<std::vector<UnitCore*>> units_of_param_;  // by id
  std::vector<std::shared_ptr<UnitCore>> units_;
  std::vector<std::vector<std::string>> tied_names_;  // by id
  std::vector<at::Tensor> buffers_;
  std::vector<std::string> buffer_names_;  // prefixed with the unit's name
  bool leaf_options_applied_ = false;
  const std::shared_ptr<const std::string> owner_;  // the mesh, for engines that get its parameters
  const shard::StoredRule stored_rule_;
  std::map<int, shard::StoredCodecs> codecs_;  // by bits
};

}  // namespace tessera::engine
