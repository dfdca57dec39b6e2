#include "cli/comm_bench.h"

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "testing/thread_backend.h"
#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

using comm::Backend;
using comm::Call;
using comm::Group;
using device::Pending;

// A network that damages the last byte of what one kind of call brings.
class DamagingBackend final : public Backend {
 public:
  enum class Damage { kAllGather, kAllToAll, kBroadcast };
  DamagingBackend(std::unique_ptr<Backend> inner, Damage damage)
      : inner_(std::move(inner)), damage_(damage) {}

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  Pending start_all_gather(std::span<const comm::GatherBytes> parts, const Call& call) override {
    Pending pending = inner_->start_all_gather(parts, call);
    if (damage_ == Damage::kAllGather && !parts.empty()) {
      pending.wait();
      flip_last(parts.back().full, parts.back().shard_bytes * static_cast<std::size_t>(size()));
    }
    return pending;
  }
  Pending start_all_to_all(const comm::PieceBytes& pieces, const comm::Call& call) override {
    Pending pending = inner_->start_all_to_all(pieces, call);
    if (damage_ == Damage::kAllToAll) {
      pending.wait();
      flip_last(pieces.receive, pieces.receive_stride * static_cast<std::size_t>(size()));
    }
    return pending;
  }
  Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) override {
    Pending pending = inner_->start_broadcast(data, bytes, root, call);
    if (damage_ == Damage::kBroadcast) {
      pending.wait();
      flip_last(data, bytes);
    }
    return pending;
  }
  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    return inner_->split(ranks, name);
  }
  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    return inner_->broadcast_sent_bytes(bytes, root);
  }
  bool compares_tags() const override { return inner_->compares_tags(); }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  static void flip_last(void* data, std::size_t bytes) {
    // The top byte of the last float: sign and exponent.
    static_cast<unsigned char*>(data)[bytes - 1] ^= 0x40;
  }

  std::unique_ptr<Backend> inner_;
  const Damage damage_;
};

std::vector<CommBenchRow> measure_comm(Group& group, const CommBenchOptions& options) {
  const auto device = device::make_cpu_device();
  return measure_collectives(group, *device, SteadyClock(), options);
}

// Both ranks see damaged results, so both must refuse.
std::vector<std::string> refusals(DamagingBackend::Damage damage) {
  comm::ThreadWorldOptions options;
  options.num_ranks = 2;
  comm::ThreadWorld world(options);
  std::vector<std::string> messages(2);
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        Group group(std::make_unique<DamagingBackend>(world.make_backend(rank), damage), "world",
                    {0, 1}, {});
        try {
          measure_comm(group, {{4096}, 1});
        } catch (const CommError& error) {
          messages[rank] = error.what();
        }
      });
    }
  }
  return messages;
}

TEST(CommBench, RefusesToTimeWhatIsDamaged) {
  using Damage = DamagingBackend::Damage;
  for (const auto& [damage, call] : {std::pair{Damage::kAllGather, "all_gather of 4096 bytes"},
                                     std::pair{Damage::kAllToAll, "reduce_scatter of 4096 bytes"},
                                     std::pair{Damage::kBroadcast, "broadcast of 4096 bytes"}}) {
    for (const std::string& message : refusals(damage)) {
      EXPECT_HAS(message, call);
    }
  }
  EXPECT_HAS(refusals(Damage::kAllGather)[0], "at element 1023");
}

TEST(CommBench, MeasuresEveryCollectiveForEverySize) {
  for (const int num_ranks : {1, 2, 3}) {
    comm::run_ranks(num_ranks, [num_ranks](Group& group) {
      const auto rows = measure_comm(group, {{1, 4096}, 3});
      ASSERT_EQ(rows.size(), 1U + 2 * 5);
      EXPECT_EQ(rows[0].collective, "barrier");
      const std::size_t ranks = static_cast<std::size_t>(num_ranks);
      // Too small a size becomes one element per rank.
      EXPECT_EQ(rows[1].bytes, 4 * ranks);
      for (std::size_t i = 6; i < rows.size(); ++i) {
        EXPECT_EQ(rows[i].bytes, 4096 / 4 / ranks * 4 * ranks);
        EXPECT_LE(rows[i].min_us, rows[i].median_us);
        EXPECT_GT(rows[i].median_us, 0);
      }
    });
  }
}

TEST(CommBench, CountsTheBytesOfOneCall) {
  const std::map<std::string, std::uint64_t> sent = {
      {"all_gather", 2048}, {"reduce_scatter", 2048}, {"all_to_all", 2048}, {"all_reduce", 4096}};
  comm::run_ranks(2, [&sent](Group& group) {
    for (const CommBenchRow& row : measure_comm(group, {{4096}, 5})) {
      const auto expected = sent.find(row.collective);
      EXPECT_TRUE(expected == sent.end() || row.wire_bytes == expected->second) << row.collective;
    }
  });
}

TEST(CommBench, TakesTheLowerMedianOfAtLeastOneRound) {
  comm::run_ranks(
      1, [](Group& group) { EXPECT_THROW(measure_comm(group, {{4096}, 0}), ConfigError); });
  EXPECT_EQ(median_of({3, 1, 2}), 2);
  EXPECT_EQ(median_of({4, 1, 3, 2}), 2);
}

TEST(CommBenchReport, ShowsRatesOfDataPerSecond) {
  const std::string head = comm_bench_head({"gloo", 2, 10});
  EXPECT_HAS(head, "2 ranks over gloo, 10 rounds");
  const std::string line = comm_bench_line({"all_gather", 2000000, 1000, 900, 1000000});
  EXPECT_HAS(line, "2.000\n");
  EXPECT_HAS(line, "1.00 ms");
  EXPECT_LACKS(comm_bench_line({"barrier", 0, 10, 9, 0}), "0.000");
}

}  // namespace
}  // namespace tessera::cli
