// The verdict of `--verify`: sharded training beside unsharded training of the same batches.
//
// Compared are the loss and the gradient norm of every step, relative to the unsharded ones, and
// every parameter after the last step, by the norm of its difference. A difference that is not
// a number is beyond every bound; two losses or norms that are both infinite or NaN agree.
//
// [Note: what is compared]
// In turns, the unsharded reference takes the ranks' micro-batches one after the other, in the
// order in which the exact reduction adds them. So what is left is what sharding does, and not the
// noise of another order of sums: on like machines most runs are equal to the bit. The plain run is
// that of --unsharded: a micro-batch is that of all ranks together. Products over more rows are
// added in another order, so that every result of a step has other roundings.
//
// [Note: bounds of a comparison]
// One rank on the CPU: none. The same operations run in the same order.
//
// Otherwise hosts may differ, a GPU may add in the order of time, and with several micro-batches
// the sum over ranks and micro-batches is put into other brackets.
// fp32: 2e-6, what the project promises between rank counts; 20 steps of `tiny` with several
// micro-batches were 1.4e-7 apart.
// bf16 and fp16: a rounding has a relative error of at most u. A step rounds results of a token
// some kRoundingsPerBlock times per block, forward and back. Roundings are independent, so K =
// kRoundingsPerBlock * (layers + 1) of them are a noise of r = u * sqrt(K): the bound of losses and
// norms. AdamW moves an element by about lr, however small its gradient is, and so turns noise into
// whole moves where the sign of a gradient flips. A gradient of normal distribution with noise r
// has the wrong sign in a share of at most r of its elements; each of those is off by two moves,
// hence the difference is at most 2 * sqrt(r) of how far the tensor has moved. A parameter that is
// not updated is off by all of it: the bound must stay below 1, and is cut at 3/4 for deep models.
// To that comes the rounding of the parameters themselves, as the forward sees them: two masters
// with a last-bit difference may round apart, 2 * u of the tensor's norm.
// Elements that only noise moves (models::gpt_noise_elements) are compared apart from their tensor:
// two noises are at most two moves of lr apart per step and element. That bound is too wide to tell
// whether those elements were updated at all; their tensor's other elements tell.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/core/dtype.h"

namespace tessera::cli {

enum class Against : std::uint8_t { kTurns, kPlain };
// Of --verify-against; empty: turns. ConfigError for another word.
Against parse_against(const std::string& word);

struct CompareBounds {
  double step = 0;      // of losses and gradient norms
  double norm = 0;      // share of a tensor's norm
  double movement = 0;  // share of how far training has moved the tensor, added to it
};

inline constexpr CompareBounds kBitForBit{};
CompareBounds rounding_bounds(DType dtype, std::int64_t layers);

// Norms of one parameter after the last step.
struct ParamDifference {
  std::string name;
  double difference = 0;  // of sharded minus unsharded
  double norm = 0;        // unsharded
  double movement = 0;    // unsharded minus initial
};

class Comparison {
 public:
  explicit Comparison(const CompareBounds& bounds) : bounds_(bounds) {}

  void add_loss(std::int64_t step, double sharded, double unsharded);
  void add_grad_norm(std::int64_t step, double sharded, double unsharded);
  void add_param(const ParamDifference& param);
  // Elements that only noise moves; `allowed` is of the difference's norm.
  void add_noise(const ParamDifference& param, double allowed);
  bool bit_for_bit() const { return bounds_.step == 0; }

  // Empty when everything agrees; else the first step that does not, or the worst parameter, with
  // values and bound.
  const std::string& failure() const { return failure_; }
  // Nothing that was compared differs.
  bool equal() const;
  // The worst difference of each kind with its bound and place.
  std::string table() const;
  // What was compared with what, by which measure: above the table.
  static std::string explanation(Against against, int num_ranks, std::string_view precision);

 private:
  struct Worst {
    double excess = -1;  // difference over bound; below zero: nothing was compared
    double difference = 0;
    double bound = 0;
    std::string place;
  };
  void add_number(std::string_view what, Worst& worst, std::int64_t step, double sharded,
                  double unsharded);
  void add_tensor(const ParamDifference& param, double allowed);

  const CompareBounds bounds_;
  Worst loss_;
  Worst grad_norm_;
  Worst param_;
  bool step_failed_ = false;
  std::string failure_;
};

}  // namespace tessera::cli
