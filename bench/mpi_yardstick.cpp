// The collectives of `tessera bench-comm`, over MPI: the same sizes, element type and way to
// measure.
//
//   mpirun -n 2 build/dev/bench/mpi_yardstick [ROUNDS]
//
// A round starts behind a barrier and counts as long as its slowest rank took; the first call of
// each is not timed. MPI may add in any order: bits are not compared.
#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

constexpr std::size_t kSizes[] = {std::size_t{4} << 10, std::size_t{1} << 20,
                                  std::size_t{64} << 20};

double median_us(int num_rounds, const std::function<void()>& call) {
  call();
  std::vector<double> times;
  for (int round = 0; round < num_rounds; ++round) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    call();
    double own = MPI_Wtime() - begin;
    double slowest = 0;
    MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    times.push_back(slowest * 1e6);
  }
  std::sort(times.begin(), times.end());
  return times[(times.size() - 1) / 2];
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  int num_ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &num_ranks);
  const int num_rounds =
      argc > 1 ? std::max(1, static_cast<int>(std::strtol(argv[1], nullptr, 10))) : 10;
  if (rank == 0) {
    std::printf("%d ranks over MPI, %d rounds; times are medians of the slowest rank's\n",
                num_ranks, num_rounds);
    std::printf("%-15s%12s%14s%9s\n", "collective", "bytes", "us", "GB/s");
  }
  const auto measure = [&](const char* name, std::size_t bytes, const std::function<void()>& call) {
    const double us = median_us(num_rounds, call);
    if (rank == 0) {
      std::printf("%-15s%12zu%14.1f%9.3f\n", name, bytes, us,
                  static_cast<double>(bytes) / us * 1e-3);
      std::fflush(stdout);
    }
  };
  measure("barrier", 0, [] { MPI_Barrier(MPI_COMM_WORLD); });
  for (const std::size_t size : kSizes) {
    const int piece = static_cast<int>(size / sizeof(float)) / num_ranks;
    const int full = piece * num_ranks;
    const std::size_t bytes = static_cast<std::size_t>(full) * sizeof(float);
    std::vector<float> shard(static_cast<std::size_t>(piece), 1.0F);
    std::vector<float> data(static_cast<std::size_t>(full), 1.0F);
    std::vector<float> other(static_cast<std::size_t>(full), 0.0F);
    measure("all_gather", bytes, [&] {
      MPI_Allgather(shard.data(), piece, MPI_FLOAT, other.data(), piece, MPI_FLOAT, MPI_COMM_WORLD);
    });
    measure("reduce_scatter", bytes, [&] {
      MPI_Reduce_scatter_block(data.data(), shard.data(), piece, MPI_FLOAT, MPI_SUM,
                               MPI_COMM_WORLD);
    });
    measure("all_reduce", bytes, [&] {
      MPI_Allreduce(MPI_IN_PLACE, data.data(), full, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    });
    measure("broadcast", bytes,
            [&] { MPI_Bcast(data.data(), full, MPI_FLOAT, 0, MPI_COMM_WORLD); });
    measure("all_to_all", bytes, [&] {
      MPI_Alltoall(data.data(), piece, MPI_FLOAT, other.data(), piece, MPI_FLOAT, MPI_COMM_WORLD);
    });
  }
  MPI_Finalize();
  return 0;
}
