// Memory for one update, filled from a seed, and the rules that tests go through.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tessera/optim/rule.h"

namespace tessera::optim {

struct RuleCase {
  std::string name;
  RuleOptions rule;
};

inline std::vector<RuleCase> all_rules() {
  RuleOptions adamw;
  RuleOptions adam;
  adam.kind = RuleKind::kAdam;
  RuleOptions adam_without_l2 = adam;
  adam_without_l2.weight_decay = 0;
  RuleOptions sgd;
  sgd.kind = RuleKind::kSgd;
  RuleOptions momentum = sgd;
  momentum.momentum = 0.9;
  RuleOptions lion;
  lion.kind = RuleKind::kLion;
  lion.beta2 = 0.99;
  return {{"adamw", adamw}, {"adam", adam},         {"adam without l2", adam_without_l2},
          {"sgd", sgd},     {"momentum", momentum}, {"lion", lion}};
}

inline std::vector<float> random_floats(std::size_t numel, double scale, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, scale);
  std::vector<float> values(numel);
  for (float& value : values) {
    value = static_cast<float>(normal(random));
  }
  return values;
}

inline std::vector<BFloat16> to_bfloat16s(const std::vector<float>& values) {
  std::vector<BFloat16> out;
  out.reserve(values.size());
  for (const float value : values) {
    out.push_back(to_bfloat16(value));
  }
  return out;
}

template <typename Value>
bool same_bits(const std::vector<Value>& a, const std::vector<Value>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Value)) == 0);
}

// Weights with their states, as a shard has them; the gradient comes from outside.
struct Weights {
  std::vector<float> master;
  std::vector<float> first;
  std::vector<float> second;
  std::vector<std::uint16_t> parameter;

  explicit Weights(std::size_t numel, std::uint64_t seed = 1)
      : master(random_floats(numel, 0.02, seed)), first(numel), second(numel), parameter(numel) {}

  UpdateSpan span(const float* gradient) {
    UpdateSpan out;
    out.master = master.data();
    out.gradient = gradient;
    out.states = {first.data(), second.data()};
    out.numel = static_cast<std::int64_t>(master.size());
    return out;
  }
  UpdateSpan span(const BFloat16* gradient) {
    UpdateSpan out = span(static_cast<const float*>(nullptr));
    out.gradient = gradient;
    out.gradient_dtype = DType::kBFloat16;
    return out;
  }

  bool operator==(const Weights& other) const {
    return same_bits(master, other.master) && same_bits(first, other.first) &&
           same_bits(second, other.second) && same_bits(parameter, other.parameter);
  }
};

}  // namespace tessera::optim
