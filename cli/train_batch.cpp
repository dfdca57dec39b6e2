#include "cli/train_batch.h"

#include <algorithm>
#include <string>

#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

// More is a slip of the finger, and would overflow products of sizes.
constexpr std::int64_t kMaxSequences = std::int64_t{1} << 24;

constexpr const char* kTotal = "batch.total";
constexpr const char* kMicro = "batch.micro_per_rank";
constexpr const char* kAccumulate = "batch.accumulate";

// 0: not given.
struct Numbers {
  std::int64_t total = 0;
  std::int64_t micro = 0;
  std::int64_t accumulate = 0;

  bool fit(int num_ranks) const {
    const std::int64_t of_micro = micro == 0 ? 1 : micro;
    const std::int64_t of_accumulate = accumulate == 0 ? 1 : accumulate;
    const std::int64_t product = of_micro * of_accumulate * num_ranks;
    const bool has_all = micro > 0 && accumulate > 0;
    return total == 0 || (has_all ? total == product : total % product == 0);
  }
};

std::int64_t given(const Config& config, const char* name) {
  const std::int64_t value = config.is_given(name) ? config.get_int(name) : 0;
  TESSERA_CHECK(value <= kMaxSequences, ConfigError, config.shown(name),
                ": expected a whole number from 1 to ", kMaxSequences);
  return value;
}

// Without those of a file that contradict flags: first what a rank takes at a time.
Numbers without_contradicted(const Numbers& all, const Config& config, int num_ranks) {
  constexpr unsigned kDropsMicro = 1;
  constexpr unsigned kDropsAccumulate = 2;
  constexpr unsigned kDropsTotal = 4;
  const bool has_flag = (all.total > 0 && !config.is_from_file(kTotal)) ||
                        (all.micro > 0 && !config.is_from_file(kMicro)) ||
                        (all.accumulate > 0 && !config.is_from_file(kAccumulate));
  for (const unsigned drops :
       {kDropsMicro, kDropsAccumulate, kDropsTotal, kDropsMicro | kDropsAccumulate,
        kDropsMicro | kDropsTotal, kDropsAccumulate | kDropsTotal}) {
    Numbers left = all;
    const auto drop = [&](unsigned which, const char* name, std::int64_t& number) {
      number = (drops & which) != 0 && config.is_from_file(name) ? 0 : number;
    };
    drop(kDropsMicro, kMicro, left.micro);
    drop(kDropsAccumulate, kAccumulate, left.accumulate);
    drop(kDropsTotal, kTotal, left.total);
    if (has_flag && left.fit(num_ranks)) {
      return left;
    }
  }
  return all;
}

// "--batch 7", or "batch.total = 7 (run.json: batch.total) with batch.accumulate = 2
// (--accumulate)".
std::string subject_of(const Config& config) {
  const std::string total = config.shown(kTotal);
  const std::string accumulate =
      config.is_given(kAccumulate) ? " with " + config.shown(kAccumulate) : "";
  return total.ends_with("(--batch)") ? "--batch " + std::to_string(config.get_int(kTotal))
                                      : total + accumulate;
}

void set_if_other(Config& config, const char* name, std::int64_t value) {
  if (config.get_int(name) != value) {
    config.set(name, value, "derived");
  }
}

}  // namespace

void BatchShape::check(const std::string& subject) const {
  const std::int64_t unit = num_ranks * accumulate;
  const std::int64_t below = total / unit * unit;
  TESSERA_CHECK(total > 0, ConfigError, subject, " holds no sequence; give at least ", unit);
  TESSERA_CHECK(total == below, ConfigError, subject, " cannot be shared by ", num_ranks,
                num_ranks == 1 ? " rank" : " ranks", " with ", accumulate,
                accumulate == 1 ? " micro-batch" : " micro-batches",
                " each: it must be a multiple of ", unit, "; the nearest is ",
                below == 0 || total - below > unit / 2 ? below + unit : below);
}

SequenceRange micro_batch_of(const BatchShape& shape, int rank, std::int64_t micro_batch) {
  const std::int64_t count = shape.per_micro_batch();
  return {(rank * shape.accumulate + micro_batch) * count, count};
}

std::int64_t shareable_total(std::int64_t wanted, int num_ranks, std::int64_t accumulate) {
  const std::int64_t unit = num_ranks * accumulate;
  return (wanted + unit - 1) / unit * unit;
}

int threads_per_rank(int num_cores, int num_local_ranks) {
  return std::max(1, num_cores / std::max(1, num_local_ranks));
}

BatchShape resolve_batch(Config& config, int num_ranks, std::int64_t default_total) {
  Numbers numbers{given(config, kTotal), given(config, kMicro), given(config, kAccumulate)};
  const bool is_micro_given = numbers.micro > 0;
  TESSERA_CHECK(numbers.micro * numbers.accumulate <= kMaxSequences, ConfigError,
                config.shown(kMicro), " times ", config.shown(kAccumulate),
                ": expected a product from 1 to ", kMaxSequences);
  if (!numbers.fit(num_ranks)) {
    numbers = without_contradicted(numbers, config, num_ranks);
  }
  BatchShape batch{numbers.total, num_ranks, std::max<std::int64_t>(1, numbers.accumulate)};
  if (numbers.total == 0) {
    batch.total = numbers.micro > 0 ? numbers.micro * num_ranks * batch.accumulate
                                    : shareable_total(default_total, num_ranks, batch.accumulate);
  } else if (numbers.micro > 0 && numbers.accumulate == 0 && numbers.fit(num_ranks)) {
    batch.accumulate = numbers.total / (numbers.micro * num_ranks);
  }
  const std::int64_t product = numbers.micro * batch.accumulate * num_ranks;
  TESSERA_CHECK(numbers.micro == 0 || product == batch.total, ConfigError, config.shown(kTotal),
                " is not ", config.shown(kMicro), " times ", config.shown(kAccumulate), " times ",
                num_ranks, num_ranks == 1 ? " rank" : " ranks", ", which is ", product,
                "; change one of them or leave it out");
  batch.check(subject_of(config));
  set_if_other(config, kTotal, batch.total);
  set_if_other(config, kAccumulate, batch.accumulate);
  if (is_micro_given) {
    set_if_other(config, kMicro, batch.per_micro_batch());
  }
  return batch;
}

}  // namespace tessera::cli
