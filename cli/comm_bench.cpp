#include "cli/comm_bench.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

using comm::Group;
using device::Memory;
using device::Pending;
using device::StreamKind;

constexpr int kRoot = 0;

// Distinct for neighbouring ranks and elements, and small enough that sums over thousands of ranks
// are exact in fp32.
float input_value(int rank, std::size_t index) {
  return static_cast<float>((index * 7 + static_cast<std::size_t>(rank) * 131) % 1021);
}

float sum_of_inputs(int num_ranks, std::size_t index) {
  float sum = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    sum += input_value(rank, index);
  }
  return sum;
}

// One collective: how to start it and what must come out. `input` holds input_value(rank, i);
// a collective that works in place leaves its result in `input`.
struct Collective {
  std::string name;
  std::size_t input_numel = 0;
  std::size_t output_numel = 0;  // 0: in place
  std::function<Pending(void* input, void* output)> start;
  std::function<float(std::size_t index)> expected;
  std::size_t data_bytes = 0;
};

class CollectiveTimer {
 public:
  CollectiveTimer(Group& group, device::Device& device, const Clock& clock, int num_rounds)
      : group_(group), device_(device), clock_(clock), num_rounds_(num_rounds) {}

  CommBenchRow measure(const Collective& collective) {
    Memory input = allocate(collective.input_numel);
    Memory output = allocate(collective.output_numel);
    fill(input, collective.input_numel);
    // Also the warm-up: pages are touched and connections are open from here on.
    collective.start(input.data(), output.data()).wait();
    check(collective, collective.output_numel > 0 ? output : input);

    const std::uint64_t sent_before = group_.wire_bytes().payload;
    std::vector<double> numbers;
    for (int round = 0; round < num_rounds_; ++round) {
      group_.start_barrier().wait();
      const std::int64_t begin_ns = clock_.now_ns();
      collective.start(input.data(), output.data()).wait();
      numbers.push_back(static_cast<double>(clock_.now_ns() - begin_ns) * 1e-3);
    }
    const std::uint64_t sent = group_.wire_bytes().payload - sent_before;
    numbers.push_back(static_cast<double>(sent) / num_rounds_);
    max_over_ranks(numbers);

    CommBenchRow row;
    row.collective = collective.name;
    row.bytes = collective.data_bytes;
    row.wire_bytes = static_cast<std::uint64_t>(numbers.back());
    numbers.pop_back();
    row.median_us = median_of(numbers);
    row.min_us = *std::min_element(numbers.begin(), numbers.end());
    return row;
  }

 private:
  Memory allocate(std::size_t numel) {
    return device_.allocate(Tier::kDevice, numel * sizeof(float), Role::kOther);
  }

  void copy(void* to, const void* from, std::size_t bytes) {
    device_.start_copy(to, from, bytes, device_.stream(StreamKind::kWrite)).wait();
  }

  void fill(const Memory& memory, std::size_t numel) {
    std::vector<float> values(numel);
    for (std::size_t i = 0; i < numel; ++i) {
      values[i] = input_value(group_.rank(), i);
    }
    copy(memory.data(), values.data(), numel * sizeof(float));
  }

  void check(const Collective& collective, const Memory& result) {
    if (!collective.expected) {
      return;
    }
    std::vector<float> values(collective.output_numel > 0 ? collective.output_numel
                                                          : collective.input_numel);
    copy(values.data(), result.data(), values.size() * sizeof(float));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float expected = collective.expected(i);
      TESSERA_CHECK(values[i] == expected, CommError, "bench-comm: ", collective.name, " of ",
                    collective.data_bytes, " bytes over ", group_.backend_name(), " gave ",
                    values[i], " instead of ", expected, " at element ", i,
                    "; times of wrong results are not printed");
    }
  }

  // Every rank ends up with the largest of each number.
  void max_over_ranks(std::vector<double>& numbers) {
    const std::size_t bytes = numbers.size() * sizeof(double);
    Memory memory = device_.allocate(Tier::kDevice, bytes, Role::kOther);
    copy(memory.data(), numbers.data(), bytes);
    group_
        .start_all_reduce(memory.data(), static_cast<std::int64_t>(numbers.size()), DType::kFloat64,
                          comm::Reduction::kMax)
        .wait();
    copy(numbers.data(), memory.data(), bytes);
  }

  Group& group_;
  device::Device& device_;
  const Clock& clock_;
  const int num_rounds_;
};

std::vector<Collective> collectives_of_size(Group& group, std::size_t size_bytes) {
  const int num_ranks = group.size();
  const int my_rank = group.rank();
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const std::size_t piece = std::max<std::size_t>(1, size_bytes / sizeof(float) / ranks);
  const std::size_t full = piece * ranks;
  const std::size_t full_bytes = full * sizeof(float);
  const auto piece_numel = static_cast<std::int64_t>(piece);
  const auto full_numel = static_cast<std::int64_t>(full);

  std::vector<Collective> list;
  list.push_back(
      {"all_gather", piece, full,
       [&group, piece_numel](void* input, void* output) {
         const comm::Gather gather{input, output, piece_numel, DType::kFloat32};
         return group.start_all_gather({&gather, 1});
       },
       [piece](std::size_t i) { return input_value(static_cast<int>(i / piece), i % piece); },
       full_bytes});
  list.push_back({"reduce_scatter", full, piece,
                  [&group, piece_numel](void* input, void* output) {
                    return group.start_reduce_scatter(input, output, piece_numel, DType::kFloat32,
                                                      DType::kFloat32);
                  },
                  [num_ranks, my_rank, piece](std::size_t i) {
                    return sum_of_inputs(num_ranks, static_cast<std::size_t>(my_rank) * piece + i);
                  },
                  full_bytes});
  // Works in place, so the rounds sum what the rounds before have summed: powers of num_ranks,
  // which may become infinite without any effect on the time.
  list.push_back({"all_reduce", full, 0,
                  [&group, full_numel](void* input, void*) {
                    return group.start_all_reduce(input, full_numel, DType::kFloat32);
                  },
                  [num_ranks](std::size_t i) { return sum_of_inputs(num_ranks, i); }, full_bytes});
  list.push_back({"broadcast", full, 0,
                  [&group, full_numel](void* input, void*) {
                    return group.start_broadcast(input, full_numel, DType::kFloat32, kRoot);
                  },
                  [](std::size_t i) { return input_value(kRoot, i); }, full_bytes});
  list.push_back({"all_to_all", full, full,
                  [&group, piece_numel](void* input, void* output) {
                    return group.start_all_to_all(input, output, piece_numel, DType::kFloat32);
                  },
                  [my_rank, piece](std::size_t i) {
                    return input_value(static_cast<int>(i / piece),
                                       static_cast<std::size_t>(my_rank) * piece + i % piece);
                  },
                  full_bytes});
  return list;
}

std::string microseconds_text(double us) {
  if (us < 1e3) {
    return fmt::format("{:.1f} us", us);
  }
  return us < 1e6 ? fmt::format("{:.2f} ms", us * 1e-3) : fmt::format("{:.2f} s", us * 1e-6);
}

constexpr const char* kCommRow = "{:<15}{:>12}{:>13}{:>13}{:>14}{:>9}\n";

}  // namespace

double median_of(std::vector<double> values) {
  TESSERA_INVARIANT(!values.empty(), "a median needs a value");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<CommBenchRow> measure_collectives(
    Group& group, device::Device& device, const Clock& clock, const CommBenchOptions& options,
    const std::function<void(const CommBenchRow&)>& on_row) {
  TESSERA_CHECK(options.num_rounds > 0, ConfigError, "rounds=", options.num_rounds,
                " times nothing; give at least 1");
  CollectiveTimer timer(group, device, clock, options.num_rounds);
  std::vector<CommBenchRow> rows;
  const auto add_row = [&](const Collective& collective) {
    rows.push_back(timer.measure(collective));
    if (on_row) {
      on_row(rows.back());
    }
  };
  add_row({"barrier", 0, 0, [&group](void*, void*) { return group.start_barrier(); }, nullptr, 0});
  for (const std::size_t size_bytes : options.sizes_bytes) {
    for (const Collective& collective : collectives_of_size(group, size_bytes)) {
      add_row(collective);
    }
  }
  return rows;
}

std::string comm_bench_head(const CommBenchRun& run) {
  return fmt::format("{} rank{} over {}, {} rounds; times are the slowest rank's\n", run.num_ranks,
                     run.num_ranks == 1 ? "" : "s", run.backend, run.num_rounds) +
         fmt::format(kCommRow, "collective", "size", "median", "min", "sent/rank", "GB/s");
}

std::string comm_bench_line(const CommBenchRow& row) {
  const std::string none = "-";
  const bool carries_data = row.bytes > 0;
  return fmt::format(kCommRow, row.collective, carries_data ? approximate_bytes(row.bytes) : none,
                     microseconds_text(row.median_us), microseconds_text(row.min_us),
                     carries_data ? approximate_bytes(row.wire_bytes) : none,
                     carries_data ? fmt::format("{:.3f}", row.gigabytes_per_s()) : none);
}

std::string comm_bench_json(const CommBenchRun& run, std::span<const CommBenchRow> rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const CommBenchRow& row : rows) {
    list.push_back({{"collective", row.collective},
                    {"bytes", row.bytes},
                    {"median_us", row.median_us},
                    {"min_us", row.min_us},
                    {"wire_bytes", row.wire_bytes},
                    {"gigabytes_per_s", row.gigabytes_per_s()}});
  }
  const nlohmann::ordered_json document{{"backend", run.backend},
                                        {"num_ranks", run.num_ranks},
                                        {"num_rounds", run.num_rounds},
                                        {"rows", list}};
  return document.dump(2) + "\n";
}

}  // namespace tessera::cli
