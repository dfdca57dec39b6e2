#include "cli/comm_bench.h"

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tessera/comm/peer_memory.h"
#include "tessera/comm/shm_backend.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "testing/hash_store.h"
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
  const CommBenchWorld world{&group, device.get()};
  std::vector<CommBenchRow> rows;
  for (const CommBenchLine& line : measure_collectives({&world, 1}, SteadyClock(), options)) {
    EXPECT_EQ(line.size(), 1U);
    rows.push_back(line.front());
  }
  return rows;
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
        EXPECT_GT(rows[i].gigabytes_per_s(), 0);
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

// Ranks as threads in two worlds, of which the second shares memory.
TEST(CommBench, MeasuresWorldsInTurnsAndPlainCopiesWhereMemoryIsShared) {
  constexpr int kNumRanks = 3;
  comm::ThreadWorldOptions options;
  options.num_ranks = kNumRanks;
  comm::ThreadWorld threads(options);
  const auto store = std::make_shared<comm::HashStore>();
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < kNumRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto device = device::make_cpu_device();
      const std::vector<int> world_ranks = {0, 1, 2};
      Group plain(threads.make_backend(rank), "plain", world_ranks, {});
      std::string why_not;
      Group shared(comm::make_shm_backend(store, rank, kNumRanks, "shared", {}, why_not), "shared",
                   world_ranks, {});
      comm::PeerOptions peer_options;
      peer_options.rank = rank;
      peer_options.size = kNumRanks;
      peer_options.group = "copies";
      peer_options.control_bytes = 1;
      peer_options.timeout = std::chrono::minutes(10);
      const auto peers = comm::connect_peers(*store, peer_options, why_not);
      ASSERT_TRUE(peers) << why_not;
      const std::vector<CommBenchWorld> worlds = {{&plain, device.get(), nullptr},
                                                  {&shared, device.get(), peers.get()}};
      const auto lines = measure_collectives(worlds, SteadyClock(), {{400, 120000}, 2});
      ASSERT_EQ(lines.size(), 1U + 2 * 6);
      for (const CommBenchLine& line : lines) {
        ASSERT_EQ(line.size(), 2U);
        EXPECT_EQ(line[0].collective, line[1].collective);
        EXPECT_EQ(line[0].bytes, line[1].bytes);
        EXPECT_EQ(line[0].median_us > 0, line[0].collective != "memcpy");
        EXPECT_GT(line[1].median_us, 0);
      }
      EXPECT_EQ(lines[2].front().collective, "memcpy");
      EXPECT_EQ(lines[2].front().bytes, lines[1].front().bytes);
    });
  }
}

TEST(CommBenchReport, ShowsRatesOfDataPerSecond) {
  const CommBenchRun run{{"gloo"}, 2, 10};
  EXPECT_HAS(comm_bench_head(run), "2 ranks over gloo, 10 rounds");
  const std::string line =
      comm_bench_text(run, {{"all_gather", 2000000, 1300, 900, 1000, 1000000}});
  EXPECT_HAS(line, "2.000\n");
  EXPECT_HAS(line, "1.30 ms");
  EXPECT_LACKS(comm_bench_text(run, {{"barrier", 0, 10, 9, 8, 0}}), "0.000");
}

TEST(CommBenchReport, SetsBackendsSideBySideAndSaysWhichAreMissingAndWhy) {
  const CommBenchRun run{{"shm", "gloo"}, 2, 10, {{"nccl", "there is no GPU"}}};
  const std::string head = comm_bench_head(run);
  EXPECT_HAS(head, "no nccl: there is no GPU\n");
  EXPECT_HAS(head, "2 ranks over shm, gloo, 10 rounds each");
  const CommBenchLine gather = {{"all_gather", 2000000, 1000, 900, 1000, 1000000},
                                {"all_gather", 2000000, 4000, 3900, 4000, 1000000}};
  const std::string line = comm_bench_text(run, gather);
  EXPECT_HAS(line, " 2.000    4.00 ");  // shm's rate, and how many times as fast as gloo it is
  EXPECT_HAS(line, " 0.500\n");
  const CommBenchLine copies = {{"memcpy", 2000000, 500, 400, 500, 0}, {"memcpy", 2000000}};
  EXPECT_HAS(comm_bench_text(run, copies), " 4.000       - ");
  // The head's columns stand above the numbers.
  EXPECT_EQ(head.size() - head.rfind('\n', head.size() - 2) - 1, line.size());

  const auto document =
      nlohmann::json::parse(comm_bench_json(run, std::vector<CommBenchLine>{gather, copies}));
  ASSERT_EQ(document.at("backends").size(), 2U);
  const auto& shm = document.at("backends").at(0);
  EXPECT_EQ(shm.at("backend"), "shm");
  EXPECT_EQ(shm.at("num_ranks"), 2);
  EXPECT_EQ(shm.at("num_rounds"), 10);
  EXPECT_EQ(shm.at("rows").size(), 2U);
  EXPECT_EQ(document.at("backends").at(1).at("rows").size(), 1U);
  EXPECT_EQ(document.at("not_measured").at(0).at("reason"), "there is no GPU");
}

}  // namespace
}  // namespace tessera::cli
