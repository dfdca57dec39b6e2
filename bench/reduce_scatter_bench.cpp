// Our exact reduce-scatter over Gloo against c10d's own, 64 MB on 2 processes.
//
// Rounds of both are interleaved in one run, so that whatever else the machine does hits both. The
// claim (README, docs/communication.md) is a factor of 2: if it does not hold, the program fails.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench/c10d_yardstick.h"
#include "cli/launch/launch_store.h"
#include "cli/launch/launcher.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/rank_process.h"
#include "tessera/comm/rendezvous.h"
#include "tessera/comm/store.h"
#include "tessera/core/clock.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

constexpr int kNumRanks = 2;
constexpr std::int64_t kShardNumel = 8 * 1000 * 1000;  // 2 shards of fp32: 64 MB
constexpr int kNumRounds = 15;
constexpr double kGoal = 2.0;
constexpr std::chrono::milliseconds kTimeout{60000};

struct Contender {
  const char* name;
  std::function<void(float* input, float* output)> reduce_scatter;
  std::vector<double> times_ms;
};

float input_value(int rank, std::int64_t index) {
  return static_cast<float>((index * 7 + rank * 131) % 1021);
}

// A benchmark of wrong results is worthless.
void check_once(Contender& contender, int rank, std::vector<float>& input,
                std::vector<float>& output) {
  std::fill(output.begin(), output.end(), -1.0F);
  contender.reduce_scatter(input.data(), output.data());
  for (std::int64_t i = 0; i < kShardNumel; ++i) {
    const std::int64_t index = rank * kShardNumel + i;
    const float expected = input_value(0, index) + input_value(1, index);
    TESSERA_CHECK(output[i] == expected, CommError, contender.name, " gave ", output[i],
                  " instead of ", expected, " at element ", index);
  }
}

double slowest_ms(comm::Group& group, double ms) {
  group.start_all_reduce(&ms, 1, DType::kFloat64, comm::Reduction::kMax).wait();
  return ms;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run_rank(const comm::Rendezvous& rendezvous, comm::RankProcess& process) {
  comm::WorldOptions options;
  options.backend = comm::BackendKind::kGloo;
  const comm::World world = comm::join_world(rendezvous, options);
  process.set_status(world.status);
  comm::Group& group = *world.group;
  const auto yardstick = bench::make_c10d_reduce_scatter(
      comm::connect_store(rendezvous.host, rendezvous.port, kTimeout), group.rank(), group.size(),
      rendezvous.host);

  std::vector<float> input(kNumRanks * kShardNumel);
  std::vector<float> output(kShardNumel);
  for (std::size_t i = 0; i < input.size(); ++i) {
    input[i] = input_value(group.rank(), static_cast<std::int64_t>(i));
  }
  std::vector<Contender> contenders{
      {"exact",
       [&group](float* from, float* to) {
         group.start_reduce_scatter(from, to, kShardNumel, DType::kFloat32, DType::kFloat32).wait();
       },
       {}},
      {"c10d",
       [&yardstick](float* from, float* to) { yardstick->reduce_scatter(from, to, kShardNumel); },
       {}}};
  for (Contender& contender : contenders) {
    check_once(contender, group.rank(), input, output);
  }
  const SteadyClock clock;
  for (int round = 0; round < kNumRounds; ++round) {
    for (Contender& contender : contenders) {
      group.start_barrier().wait();
      const std::int64_t begin_ns = clock.now_ns();
      contender.reduce_scatter(input.data(), output.data());
      const double ms = static_cast<double>(clock.now_ns() - begin_ns) * 1e-6;
      contender.times_ms.push_back(slowest_ms(group, ms));
    }
  }
  const double exact_ms = median(contenders[0].times_ms);
  const double c10d_ms = median(contenders[1].times_ms);
  const double ratio = c10d_ms / exact_ms;
  if (group.rank() == 0) {
    std::printf("reduce-scatter of 64 MB fp32 over Gloo, %d processes, median of %d rounds\n",
                kNumRanks, kNumRounds);
    std::printf("  exact (rank order)   %8.1f ms\n", exact_ms);
    std::printf("  c10d's own           %8.1f ms\n", c10d_ms);
    std::printf("  ratio                %8.2f     (goal: at least %.1f)\n", ratio, kGoal);
  }
  TESSERA_CHECK(ratio >= kGoal, Error, "the exact reduce-scatter is ", ratio,
                " times as fast as c10d's, less than the goal of ", kGoal);
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int, char** argv) {
  using namespace tessera;
  const comm::Environment env = comm::process_environment();
  comm::RankProcess process(env);
  return process.run([&] {
    const comm::Rendezvous rendezvous = comm::find_rendezvous(env);
    if (rendezvous.source == comm::RendezvousSource::kTessera) {
      return run_rank(rendezvous, process);
    }
    cli::LaunchOptions options;
    options.num_ranks = kNumRanks;
    options.argv = {argv[0]};
    options.serve_store = [] { return cli::serve_launch_store(kNumRanks, kTimeout); };
    return cli::launch_local_ranks(options);
  });
}
