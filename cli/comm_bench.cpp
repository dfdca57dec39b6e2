#include "cli/comm_bench.h"

#include <algorithm>
#include <cstring>
#include <memory>

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
constexpr const char* kYardstick = "gloo";  // what the others are compared with

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
  Role input_role = Role::kOther;
  Role output_role = Role::kOther;
  std::function<Pending(void* input, void* output)> start;  // empty: not timed
  std::function<float(std::size_t index)> expected;
  std::size_t data_bytes = 0;
};

class CollectiveTimer {
 public:
  CollectiveTimer(Group& group, device::Device& device, const Clock& clock, int num_rounds)
      : group_(group), device_(device), clock_(clock), num_rounds_(num_rounds) {}

  CommBenchRow measure(const Collective& collective) {
    CommBenchRow row;
    row.collective = collective.name;
    row.bytes = collective.data_bytes;
    if (!collective.start) {
      return row;
    }
    Memory input = allocate(collective.input_numel, collective.input_role);
    Memory output = allocate(collective.output_numel, collective.output_role);
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
    numbers.push_back(time_of_streamed(collective, input, output));
    max_over_ranks(numbers);

    row.streamed_us = numbers.back();
    numbers.pop_back();
    row.wire_bytes = static_cast<std::uint64_t>(numbers.back());
    numbers.pop_back();
    row.median_us = median_of(numbers);
    row.min_us = *std::min_element(numbers.begin(), numbers.end());
    return row;
  }

 private:
  Memory allocate(std::size_t numel, Role role) {
    return device_.allocate(Tier::kDevice, numel * sizeof(float), role);
  }

  // Of each of the calls, in microseconds.
  double time_of_streamed(const Collective& collective, const Memory& input, const Memory& output) {
    group_.start_barrier().wait();
    std::vector<Pending> calls;
    const std::int64_t begin_ns = clock_.now_ns();
    for (int round = 0; round < num_rounds_; ++round) {
      calls.push_back(collective.start(input.data(), output.data()));
    }
    Pending::all(calls).wait();
    return static_cast<double>(clock_.now_ns() - begin_ns) * 1e-3 / num_rounds_;
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

// Each rank copies the pieces of all ranks, as an all-gather does, from where they lie to shared
// memory of its own. Offsets are exchanged in the first call, which is not timed.
std::function<Pending(void*, void*)> copy_from_peers(const CommBenchWorld& world,
                                                     std::size_t piece_bytes) {
  if (world.peers == nullptr) {
    return {};
  }
  const auto offsets = std::make_shared<std::vector<std::int64_t>>();
  return [&group = *world.group, &peers = *world.peers, piece_bytes, offsets](void* input,
                                                                              void* output) {
    const auto num_ranks = static_cast<std::size_t>(group.size());
    const auto my_rank = static_cast<std::size_t>(group.rank());
    if (offsets->empty()) {
      const auto offset = peers.own_heap->offset_of(input, piece_bytes);
      TESSERA_INVARIANT(offset.has_value(), "a shard of ", piece_bytes, " bytes is not shared");
      const auto own = static_cast<std::int64_t>(*offset);
      offsets->resize(num_ranks);
      const comm::Gather gather{&own, offsets->data(), 1, DType::kInt64};
      group.start_all_gather({&gather, 1}).wait();
    }
    for (std::size_t i = 1; i <= num_ranks; ++i) {
      const std::size_t rank = (my_rank + i) % num_ranks;
      const std::byte* const heap =
          rank == my_rank ? peers.own_heap->data() : peers.heaps[rank]->data();
      std::memcpy(static_cast<std::byte*>(output) + rank * piece_bytes, heap + offsets->at(rank),
                  piece_bytes);
    }
    return Pending();
  };
}

// Rank 0 copies as many bytes inside its GPU as all ranks get in an all-gather, while the others do
// nothing: what ranks that share a GPU can reach together.
std::function<Pending(void*, void*)> copy_on_device(const CommBenchWorld& world,
                                                    std::size_t piece_bytes) {
  if (world.group->backend_name() != "ipc") {
    return {};
  }
  return [&group = *world.group, &device = *world.device, piece_bytes](void* input, void* output) {
    Pending last;
    for (int i = 0; group.rank() == 0 && i < group.size() * group.size(); ++i) {
      last = device.start_copy(static_cast<std::byte*>(output) +
                                   static_cast<std::size_t>(i % group.size()) * piece_bytes,
                               input, piece_bytes, device.stream(StreamKind::kWrite));
    }
    return last;
  };
}

std::vector<Collective> collectives_of_size(const CommBenchWorld& world, std::size_t size_bytes) {
  Group& group = *world.group;
  const int num_ranks = group.size();
  const int my_rank = group.rank();
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const std::size_t piece = std::max<std::size_t>(1, size_bytes / sizeof(float) / ranks);
  const std::size_t full = piece * ranks;
  const std::size_t full_bytes = full * sizeof(float);
  const auto piece_numel = static_cast<std::int64_t>(piece);
  const auto full_numel = static_cast<std::int64_t>(full);
  const auto gathered = [piece](std::size_t i) {
    return input_value(static_cast<int>(i / piece), i % piece);
  };

  std::vector<Collective> list;
  list.push_back({"all_gather", piece, full, Role::kShard, Role::kFull,
                  [&group, piece_numel](void* input, void* output) {
                    const comm::Gather gather{input, output, piece_numel, DType::kFloat32};
                    return group.start_all_gather({&gather, 1});
                  },
                  gathered, full_bytes});
  Collective copies{"memcpy",     piece,        full,
                    Role::kShard, Role::kShard, copy_from_peers(world, piece * sizeof(float)),
                    gathered,     full_bytes};
  if (!copies.start) {
    copies.start = copy_on_device(world, piece * sizeof(float));
    copies.expected = {};
  }
  list.push_back(std::move(copies));
  list.push_back({"reduce_scatter", full, piece, Role::kGradient, Role::kGradient,
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
  list.push_back({"all_reduce", full, 0, Role::kGradient, Role::kOther,
                  [&group, full_numel](void* input, void*) {
                    return group.start_all_reduce(input, full_numel, DType::kFloat32);
                  },
                  [num_ranks](std::size_t i) { return sum_of_inputs(num_ranks, i); }, full_bytes});
  list.push_back({"broadcast", full, 0, Role::kShard, Role::kOther,
                  [&group, full_numel](void* input, void*) {
                    return group.start_broadcast(input, full_numel, DType::kFloat32, kRoot);
                  },
                  [](std::size_t i) { return input_value(kRoot, i); }, full_bytes});
  list.push_back({"all_to_all", full, full, Role::kGradient, Role::kGradient,
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

// One backend has all columns; several share the line.
constexpr const char* kCommRow = "{:<15}{:>12}{:>13}{:>13}{:>14}{:>9}\n";
constexpr const char* kCommNames = "{:<15}{:>12}";
constexpr const char* kCommTimes = "{:>14}{:>9}";
constexpr const char* kCommRatio = "{:>8}";
constexpr const char* kNoNumber = "-";
constexpr const char* kCommLegend =
    "times: single calls, the slowest rank's; GB/s: calls one behind the other";

std::string comm_rate_text(const CommBenchRow& row) {
  return row.bytes > 0 ? fmt::format("{:.3f}", row.gigabytes_per_s()) : kNoNumber;
}

std::string comm_size_text(const CommBenchRow& row) {
  return row.bytes > 0 ? approximate_bytes(row.bytes) : kNoNumber;
}

// What the backends are compared with; as many as there are: nothing.
std::size_t yardstick_of(const CommBenchRun& run) {
  const auto found = std::find(run.backends.begin(), run.backends.end(), kYardstick);
  return static_cast<std::size_t>(found - run.backends.begin());
}

std::string comm_ratio_text(const CommBenchLine& line, std::size_t world, std::size_t yardstick) {
  const bool are_timed = line[world].median_us > 0 && line[yardstick].median_us > 0;
  return are_timed ? fmt::format("{:.2f}", line[yardstick].median_us / line[world].median_us)
                   : kNoNumber;
}

}  // namespace

double median_of(std::vector<double> values) {
  TESSERA_INVARIANT(!values.empty(), "a median needs a value");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<CommBenchLine> measure_collectives(
    std::span<const CommBenchWorld> worlds, const Clock& clock, const CommBenchOptions& options,
    const std::function<void(const CommBenchLine&)>& on_line) {
  TESSERA_CHECK(options.num_rounds > 0, ConfigError, "rounds=", options.num_rounds,
                " times nothing; give at least 1");
  std::vector<CommBenchLine> lines;
  // The same list for every world, in which each has its own calls.
  const auto measure = [&](const std::vector<std::vector<Collective>>& lists) {
    for (std::size_t i = 0; i < lists.front().size(); ++i) {
      CommBenchLine line;
      for (std::size_t world = 0; world < worlds.size(); ++world) {
        CollectiveTimer timer(*worlds[world].group, *worlds[world].device, clock,
                              options.num_rounds);
        line.push_back(timer.measure(lists[world][i]));
      }
      if (std::any_of(line.begin(), line.end(),
                      [](const CommBenchRow& row) { return row.median_us > 0; })) {
        lines.push_back(line);
        if (on_line) {
          on_line(line);
        }
      }
    }
  };
  std::vector<std::vector<Collective>> lists;
  for (const CommBenchWorld& world : worlds) {
    Collective barrier;
    barrier.name = "barrier";
    barrier.start = [&group = *world.group](void*, void*) { return group.start_barrier(); };
    lists.push_back({barrier});
  }
  measure(lists);
  for (const std::size_t size_bytes : options.sizes_bytes) {
    lists.clear();
    for (const CommBenchWorld& world : worlds) {
      lists.push_back(collectives_of_size(world, size_bytes));
    }
    measure(lists);
  }
  return lines;
}

std::string comm_bench_head(const CommBenchRun& run) {
  std::string text;
  for (const CommBenchGap& gap : run.gaps) {
    text += fmt::format("no {}: {}\n", gap.backend, gap.reason);
  }
  const std::string ranks = fmt::format("{} rank{}", run.num_ranks, run.num_ranks == 1 ? "" : "s");
  if (run.backends.size() == 1) {
    return text +
           fmt::format("{} over {}, {} rounds\n{}\n", ranks, run.backends.front(), run.num_rounds,
                       kCommLegend) +
           fmt::format(kCommRow, "collective", "size", "median", "min", "sent/rank", "GB/s");
  }
  const std::size_t yardstick = yardstick_of(run);
  text += fmt::format("{} over {}, {} rounds each", ranks, fmt::join(run.backends, ", "),
                      run.num_rounds);
  if (yardstick < run.backends.size()) {
    text += fmt::format("; x: how many times as fast as {}", kYardstick);
  }
  text += fmt::format("\n{}\n", kCommLegend);
  text += fmt::format(kCommNames, "collective", "size");
  for (std::size_t world = 0; world < run.backends.size(); ++world) {
    text += fmt::format(kCommTimes, run.backends[world], "GB/s");
    if (yardstick < run.backends.size() && world != yardstick) {
      text += fmt::format(kCommRatio, "x");
    }
  }
  return text + "\n";
}

std::string comm_bench_text(const CommBenchRun& run, const CommBenchLine& line) {
  const CommBenchRow& first = line.front();
  if (run.backends.size() == 1) {
    return fmt::format(kCommRow, first.collective, comm_size_text(first),
                       microseconds_text(first.median_us), microseconds_text(first.min_us),
                       first.bytes > 0 ? approximate_bytes(first.wire_bytes) : kNoNumber,
                       comm_rate_text(first));
  }
  const std::size_t yardstick = yardstick_of(run);
  std::string text = fmt::format(kCommNames, first.collective, comm_size_text(first));
  for (std::size_t world = 0; world < line.size(); ++world) {
    const CommBenchRow& row = line[world];
    const bool is_timed = row.median_us > 0;
    text += fmt::format(kCommTimes, is_timed ? microseconds_text(row.median_us) : kNoNumber,
                        is_timed ? comm_rate_text(row) : kNoNumber);
    if (yardstick < run.backends.size() && world != yardstick) {
      text += fmt::format(kCommRatio, comm_ratio_text(line, world, yardstick));
    }
  }
  return text + "\n";
}

std::string comm_bench_json(const CommBenchRun& run, std::span<const CommBenchLine> lines) {
  nlohmann::ordered_json backends = nlohmann::ordered_json::array();
  for (std::size_t world = 0; world < run.backends.size(); ++world) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const CommBenchLine& line : lines) {
      const CommBenchRow& row = line[world];
      if (row.median_us > 0) {
        rows.push_back({{"collective", row.collective},
                        {"bytes", row.bytes},
                        {"median_us", row.median_us},
                        {"min_us", row.min_us},
                        {"streamed_us", row.streamed_us},
                        {"wire_bytes", row.wire_bytes},
                        {"gigabytes_per_s", row.gigabytes_per_s()}});
      }
    }
    backends.push_back({{"backend", run.backends[world]},
                        {"num_ranks", run.num_ranks},
                        {"num_rounds", run.num_rounds},
                        {"rows", rows}});
  }
  nlohmann::ordered_json gaps = nlohmann::ordered_json::array();
  for (const CommBenchGap& gap : run.gaps) {
    gaps.push_back({{"backend", gap.backend}, {"reason", gap.reason}});
  }
  const nlohmann::ordered_json document{{"backends", backends}, {"not_measured", gaps}};
  return document.dump(2) + "\n";
}

}  // namespace tessera::cli
