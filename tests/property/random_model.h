// A model drawn from a seed, as a description: units with odd parameters, who shares which, and the
// program that calls them. model_program.h runs it, sharded or plain.
//
// Every value of the program is a matrix of `columns` columns whose rows do not meet, so that any
// unit fits behind any other; odd sizes are inside of units. What a model may contain:
//
//   parameters  0 elements, 1 element (with and without a dimension), odd sizes, transposed memory,
//               frozen, never used, used twice in a unit, tied by registration in two units or
//               twice in one, external, made by the module or by rule
//   units       used by some ranks only (dynamic), without parameters, frozen, recomputed, inside
//               one another, one tensor or a tuple, a vector, a map or a struct as arguments and
//               results, an argument handed back as a result, a tensor kept and not returned, a
//               buffer that every forward of training reads and moves
//   program     a unit called several times or never, results nobody uses, calls that are left out
//               or go to another unit in some steps (the same on all ranks), several losses, a
//               weight in the loss, autocast
//
// Dynamic units are called at one place each, with one argument that takes their place where they
// are left out, in models whose input needs a gradient: so every static unit has a backward on
// every rank, and the gradients of a dynamic parameter come between the same two meetings on all
// ranks, where they are added in rank order (reducer.h). Otherwise bits would depend on who came
// when.
//
// A quarter of the models are chains: every unit once, in a row, with nothing that lets two of
// their uses overlap. For those coordinator.h promises limits that need no allowance.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::testing {

struct ParamPlan {
  std::string name;  // with its unit's, as the engine knows it
  std::vector<std::int64_t> shape;
  bool transposed = false;  // memory order against the shape; two dimensions only
  bool trainable = true;
};

// How a unit comes to a parameter.
enum class Link : std::uint8_t {
  kOwn,
  kRegistered,  // the same tensor, registered by this unit's module, too
  kExternal,    // used and not registered: Engine::add_external()
};

struct SlotPlan {
  int param = 0;  // of ModelPlan::params
  Link link = Link::kOwn;
};

enum class OpKind : std::uint8_t {
  kLinear,      // weight, and bias where there is a second slot
  kScale,       // times a vector, or one number
  kShift,       // plus a vector, or one number
  kLookup,      // plus rows of a table, chosen by the batch's ids
  kNorm,        // layer norm with weight and bias
  kEmptySum,    // plus the sum of no elements
  kTwice,       // the same square weight, two times
  kNarrow,      // a linear whose weight is a view of some rows
  kActivation,  // no parameter
  kInner,       // another unit
  kRunning,     // plus a buffer, the running mean of what came through
};

struct OpPlan {
  OpKind kind = OpKind::kActivation;
  std::vector<int> slots;
  int unit = -1;  // of kInner
};

enum class Signature : std::uint8_t { kTensor, kTuple, kVector, kMap, kStruct };

struct UnitPlan {
  std::string name;
  Signature signature = Signature::kTensor;
  bool recompute = false;
  bool init_by_rule = false;      // its own parameters are not the module's, but Init::normal()
  bool hands_input_back = false;  // as its last result; kVector
  bool dynamic = false;
  bool keeps = false;  // something that its forward made and does not return
  std::vector<SlotPlan> slots;
  std::vector<OpPlan> ops;
  int num_results() const;
  std::size_t most_arguments() const;
};

// When a call happens; else its first argument, or another unit's result, takes its place.
enum class When : std::uint8_t { kAlways, kEvenSteps, kRandomly, kOnSomeRanks };

struct CallPlan {
  int unit = 0;
  std::vector<int> arguments;  // values: 0 is the batch, then the results in the order of the calls
  When when = When::kAlways;
  int otherwise = -1;  // a unit; -1: the first argument
};

struct LossPlan {
  int value = 0;
  int form = 0;
};

// A weight in the loss, outside of the units that own it: Engine::function().
struct WeightLossPlan {
  int param = 0;
  bool recompute = false;
};

struct ModelPlan {
  std::uint64_t seed = 0;
  std::int64_t columns = 1;
  std::int64_t head_columns = 1;
  std::vector<ParamPlan> params;
  std::vector<UnitPlan> units;  // a unit calls only units before it; the last one is the head
  std::vector<CallPlan> calls;
  int head_argument = 0;         // a value
  std::vector<LossPlan> losses;  // besides that of the head
  std::vector<WeightLossPlan> weight_losses;
  bool input_needs_gradient = false;
  bool is_chain = false;
  bool autocast = false;  // to bf16

  bool has_recompute() const;
  bool has_dynamic() const;
  bool has_buffers() const;
  std::string describe() const;
};

// Where in training a program runs: what conditions depend on.
struct Moment {
  int step = 0;
  int micro_batch = 0;
  int forward = 0;  // of those before one backward
  int rank = 0;     // dynamic units only: everything else is the same on all ranks
};
bool happens(const ModelPlan& model, std::size_t call, const Moment& moment);

ModelPlan draw_model(std::uint64_t seed);

}  // namespace tessera::testing
