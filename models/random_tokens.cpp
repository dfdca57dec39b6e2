#include "models/random_tokens.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "models/sequence_tokens.h"

namespace tessera::models {
namespace {

constexpr std::uint64_t kFirstSeed = 1000;
constexpr std::uint64_t kSeedFactor = 2654435769;

class RandomTokens : public TokenSource {
 public:
  explicit RandomTokens(const DataOptions& options) : options_(options) {}

  std::string name() const override { return "random"; }

  void read(std::int64_t step, std::int64_t index, std::span<std::int64_t> tokens) override {
    const std::uint64_t number = sequence_number(options_, step, index, tokens);
    const at::Generator generator =
        at::detail::createCPUGenerator(kFirstSeed + number + options_.seed * kSeedFactor);
    const at::Tensor drawn = at::randint(0, options_.vocabulary, {options_.sequence + 1}, generator,
                                         at::TensorOptions().dtype(at::kLong).device(at::kCPU));
    std::copy_n(drawn.const_data_ptr<std::int64_t>(), tokens.size(), tokens.begin());
  }

 private:
  const DataOptions options_;
};

}  // namespace

std::unique_ptr<TokenSource> make_random_tokens(const DataOptions& options) {
  return std::make_unique<RandomTokens>(options);
}

}  // namespace tessera::models
