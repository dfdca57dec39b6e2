// When a reducer waits, and for whom: never for a rank that may need this one to get on, always for
// a network that has what it needs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/grad/reducer_fixture.h"

namespace tessera::grad {
namespace {

// Doubles: a network whose reductions end when a test lets them, and a device that sees its reduce
// stream wait, and opens what it waits for. So a test knows that a rank has waited, and for what,
// without any clock.

// Opened one after the other, or all at once with those that come later.
class Gates {
 public:
  device::Pending gate(std::size_t index) {
    const std::lock_guard lock(mutex_);
    return device::Pending(at(index));
  }
  void open_next() {
    const std::lock_guard lock(mutex_);
    if (!all_open_) {
      at(num_open_++)->succeed();
    }
  }
  void open_all() {
    const std::lock_guard lock(mutex_);
    while (!all_open_ && num_open_ < gates_.size()) {
      gates_[num_open_++]->succeed();
    }
    all_open_ = true;
  }

 private:
  const std::shared_ptr<device::Completion>& at(std::size_t index) {
    while (gates_.size() <= index) {
      gates_.push_back(std::make_shared<device::Completion>());
      if (all_open_) {
        gates_.back()->succeed();
      }
    }
    return gates_[index];
  }

  // Guarded by mutex_.
  std::mutex mutex_;
  std::vector<std::shared_ptr<device::Completion>> gates_;
  std::size_t num_open_ = 0;
  bool all_open_ = false;
};

// The n-th all-to-all of this rank, of which a reduction is made, ends behind the n-th gate.
class GatedBackend final : public comm::Backend {
 public:
  GatedBackend(std::unique_ptr<comm::Backend> inner, std::shared_ptr<Gates> gates)
      : inner_(std::move(inner)), gates_(std::move(gates)) {}

  // Returns when `num_calls` reductions have been met by all ranks. One that was never started is a
  // failure after `limit`, not a hang.
  void await_met(std::size_t num_calls, std::chrono::seconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (num_met() < num_calls) {
      TESSERA_CHECK(std::chrono::steady_clock::now() < end, CommError, "rank ", rank(), ": ",
                    num_met(), " of ", num_calls, " reductions were met after ", limit.count(),
                    " s");
      std::this_thread::yield();
    }
  }
  std::size_t num_met() {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    while (count < met_.size() && *met_[count]) {
      ++count;
    }
    return count;
  }

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool compares_tags() const override { return inner_->compares_tags(); }
  comm::Pending start_all_gather(std::span<const comm::GatherBytes> parts,
                                 const comm::Call& call) override {
    return inner_->start_all_gather(parts, call);
  }
  comm::Pending start_all_to_all(const comm::PieceBytes& pieces, const comm::Call& call) override {
    const comm::Pending arrival = inner_->start_all_to_all(pieces, call);
    const std::lock_guard lock(mutex_);
    met_.push_back(call.met);
    return comm::Pending::all({arrival, gates_->gate(met_.size() - 1)});
  }
  comm::Pending start_broadcast(void* data, std::size_t bytes, int root,
                                const comm::Call& call) override {
    return inner_->start_broadcast(data, bytes, root, call);
  }
  std::unique_ptr<comm::Backend> split(std::span<const int> ranks,
                                       const std::string& name) override {
    return inner_->split(ranks, name);
  }
  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    return inner_->broadcast_sent_bytes(bytes, root);
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  const std::unique_ptr<comm::Backend> inner_;
  const std::shared_ptr<Gates> gates_;
  // Guarded by mutex_.
  std::mutex mutex_;
  std::vector<std::shared_ptr<std::atomic<bool>>> met_;  // by call
};

// A CPU device whose reduce stream opens the next gate when it must wait, and counts that.
class WaitCounter final : public device::Device {
 public:
  WaitCounter(std::unique_ptr<device::Device> inner, std::shared_ptr<Gates> gates)
      : inner_(std::move(inner)),
        reduce_(inner_->stream(device::StreamKind::kReduce), std::move(gates)) {}

  int num_waits() const { return reduce_.num_waits(); }

  std::string name() const override { return inner_->name(); }
  device::Stream& stream(device::StreamKind kind) override {
    return kind == device::StreamKind::kReduce ? reduce_ : inner_->stream(kind);
  }
  device::Memory allocate(Tier tier, std::size_t bytes, Role role, std::size_t alignment) override {
    return inner_->allocate(tier, bytes, role, alignment);
  }
  device::Pending start_copy(void* to, const void* from, std::size_t bytes,
                             device::Stream& stream) override {
    return inner_->start_copy(to, from, bytes, inner_->stream(stream.kind()));
  }
  device::Pending start_fill(void* to, std::uint8_t value, std::size_t bytes,
                             device::Stream& stream) override {
    return inner_->start_fill(to, value, bytes, inner_->stream(stream.kind()));
  }
  device::MemoryInfo memory_info() const override { return inner_->memory_info(); }

 private:
  class ReduceStream final : public device::Stream {
   public:
    ReduceStream(device::Stream& inner, std::shared_ptr<Gates> gates)
        : inner_(inner), gates_(std::move(gates)) {}

    int num_waits() const { return num_waits_; }
    device::StreamKind kind() const override { return inner_.kind(); }
    device::Pending record() override { return inner_.record(); }
    void wait(const device::Pending& pending) override {
      if (!pending.done()) {
        ++num_waits_;
        gates_->open_next();
      }
      inner_.wait(pending);
    }
    device::Pending enqueue(std::function<void()> work) override {
      return inner_.enqueue(std::move(work));
    }
    void synchronize() override { inner_.synchronize(); }

   private:
    device::Stream& inner_;
    const std::shared_ptr<Gates> gates_;
    int num_waits_ = 0;
  };

  const std::unique_ptr<device::Device> inner_;
  ReduceStream reduce_;
};

constexpr int kNumParams = 6;
constexpr std::int64_t kNumel = 31;  // odd, so that it is copied into its bucket
constexpr std::int64_t kGradientBytes = kNumel * 4;

// Each static parameter has a bucket of its own; the last registered is reduced first.
ReduceCase bucket_each(bool has_dynamic) {
  ReduceCase test;
  test.shapes.assign(kNumParams, {kNumel});
  if (has_dynamic) {
    test.shapes.push_back({kNumel, true, true});  // nobody uses it
    test.has_dynamic_group = true;
  }
  test.options.bucket_bytes = 48 * sizeof(float);  // room for one, of two ranks or three
  return test;
}

std::int64_t held_bytes(ReducerFixture& world) {
  world.reducer().take_stats();  // the next peak begins with what is held now
  return world.reducer().take_stats().held_bytes_peak;
}

// A hang is a failure after this time, which no healthy rank needs.
constexpr std::chrono::seconds kLimit{20};

comm::GroupOptions bounded() {
  comm::GroupOptions options;
  options.timeout = kLimit;
  return options;
}

// Rank 1 does not use the parameter of the first bucket, so it sends no bucket before the end of
// its backward; to get there it needs the gathers of the others, and they need its.
TEST(ReducerProgress, ARankThatMissesAParameterHoldsUpNoGather) {
  for (const DeviceKind device : {DeviceKind::kCpu, DeviceKind::kLazy, DeviceKind::kRandom}) {
    for (const int num_ranks : {2, 3}) {
      for (const bool has_dynamic : {false, true}) {
        comm::ThreadWorldOptions options;
        options.num_ranks = num_ranks;
        options.max_delay_us = has_dynamic ? 200 : 0;
        comm::run_ranks(options, bounded(), [&](comm::Group& group) {
          const std::unique_ptr<comm::Group> gathers = group.split(0, "gathers");
          ReduceCase test = bucket_each(has_dynamic);
          test.device = device;
          ReducerFixture world(group, test);
          ASSERT_EQ(world.reducer().layout().buckets.size(), 6U);
          const auto is_used = [](const Source& source, int id) {
            return id < kNumParams && !(id == kNumParams - 1 && source.rank == 1);
          };
          std::vector<float> full(static_cast<std::size_t>(num_ranks));
          for (int step = 0; step < 2; ++step) {
            for (int backward = 0; backward < 2; ++backward) {
              const Source source{group.rank(), step, backward};
              for (int id = kNumParams - 1; id >= 0; --id) {
                if (is_used(source, id)) {
                  add(world, source, id);
                }
                const auto shard = static_cast<float>(group.rank() + id);
                const comm::Gather gather{&shard, full.data(), 1, DType::kFloat32};
                gathers->start_all_gather({&gather, 1}).wait();
                EXPECT_EQ(full.back(), static_cast<float>(num_ranks - 1 + id));
              }
              world.reducer().finish_backward();
            }
            expect_sums(world, step, 2, is_used);
            world.reducer().clear();
            EXPECT_EQ(held_bytes(world), 0);
          }
        });
      }
    }
  }
}

// One rank whose reductions end when it waits for them, and not before.
class GatedRank {
 public:
  GatedRank(comm::ThreadWorld& reductions, int rank, bool has_dynamic) {
    const std::shared_ptr<Gates> gates = gates_;
    auto backend = std::make_unique<GatedBackend>(reductions.make_backend(rank), gates);
    backend_ = backend.get();
    group_ = std::make_unique<comm::Group>(std::move(backend), "reductions", std::vector<int>{0, 1},
                                           bounded());
    ReduceCase test = bucket_each(has_dynamic);
    test.wrap_device = [this, gates](std::unique_ptr<device::Device> inner) {
      auto device = std::make_unique<WaitCounter>(std::move(inner), gates);
      device_ = device.get();
      return device;
    };
    world_ = std::make_unique<ReducerFixture>(*group_, test);
  }
  ~GatedRank() { open_all(); }  // a test that failed leaves reductions behind gates
  GatedRank(const GatedRank&) = delete;
  GatedRank& operator=(const GatedRank&) = delete;

  ReducerFixture& world() { return *world_; }
  void await_met(std::size_t num_calls) { backend_->await_met(num_calls, kLimit); }
  int num_waits() const { return device_->num_waits(); }
  void open_all() { gates_->open_all(); }
  std::uint64_t num_started() { return world_->reducer().take_stats().num_reductions; }

 private:
  const std::shared_ptr<Gates> gates_ = std::make_shared<Gates>();
  GatedBackend* backend_ = nullptr;
  WaitCounter* device_ = nullptr;
  std::unique_ptr<comm::Group> group_;
  std::unique_ptr<ReducerFixture> world_;
};

bool is_in_a_bucket(const Source& /*source*/, int id) { return id < kNumParams; }

class ReducerProgressOfTwo : public ::testing::TestWithParam<bool> {
 protected:
  // Runs both ranks, each with a network of gates between them.
  void run(const std::function<void(GatedRank&, comm::Group&)>& body) {
    comm::ThreadWorldOptions options;
    options.num_ranks = 2;
    comm::ThreadWorld reductions(options);
    comm::run_ranks(options, bounded(), [&](comm::Group& control) {
      GatedRank rank(reductions, control.rank(), GetParam());
      body(rank, control);
    });
  }
};

TEST_P(ReducerProgressOfTwo, RanksInStepHoldNoMoreThanTwoBuckets) {
  run([](GatedRank& rank, comm::Group& control) {
    ReducerFixture& world = rank.world();
    const BucketLayout& layout = world.reducer().layout();
    const auto two_buckets = static_cast<std::size_t>(2 * layout.largest_shard_numel) * 2 * 4;
    for (int num_added = 1; num_added <= kNumParams; ++num_added) {
      add(world, {control.rank(), 0, 0}, kNumParams - num_added);
      ASSERT_EQ(held_bytes(world), 0) << "after gradient " << num_added;
      EXPECT_EQ(rank.num_waits(), std::max(0, num_added - 2)) << "for a buffer, two buckets back";
      EXPECT_LE(world.gradient_bytes(),
                static_cast<std::size_t>(layout.region_numel) * 4 + two_buckets);
      rank.await_met(static_cast<std::size_t>(num_added));
    }
    world.reducer().finish_backward();
    EXPECT_EQ(rank.num_waits(), kNumParams - 2);
    expect_sums(world, 0, 1, is_in_a_bucket);
  });
}

TEST_P(ReducerProgressOfTwo, AGradientIsKeptWhileABucketHasNotBeenSentByAll) {
  run([](GatedRank& rank, comm::Group& control) {
    ReducerFixture& world = rank.world();
    const auto add_down = [&](int from, int to) {
      for (int id = from; id >= to; --id) {
        add(world, {control.rank(), 0, 0}, id);
      }
    };
    if (control.rank() == 0) {
      add_down(5, 1);
      EXPECT_EQ(rank.num_waits(), 0) << "nobody else has sent anything";
      EXPECT_EQ(held_bytes(world), 3 * kGradientBytes) << "all but two buckets";
    }
    control.start_barrier().wait();
    if (control.rank() == 1) {
      add_down(5, 4);
    }
    rank.await_met(2);
    control.start_barrier().wait();
    if (control.rank() == 0) {
      add_down(0, 0);
      EXPECT_EQ(rank.num_waits(), 2) << "for the two that all have sent";
      EXPECT_EQ(held_bytes(world), 2 * kGradientBytes) << "two buckets were sent instead";
    }
    control.start_barrier().wait();
    if (control.rank() == 1) {
      add_down(3, 0);
    }
    world.reducer().finish_backward();
    EXPECT_EQ(rank.num_waits(), kNumParams - 2);
    EXPECT_EQ(held_bytes(world), 0);
    expect_sums(world, 0, 1, is_in_a_bucket);
  });
}

// How many buckets a rank has sent depends on time; which are sent when it is cleared does not.
TEST_P(ReducerProgressOfTwo, RanksThatStopAtTheSameGradientHaveStartedTheSameReductions) {
  run([](GatedRank& rank, comm::Group& control) {
    ReducerFixture& world = rank.world();
    if (control.rank() == 1) {
      control.start_barrier().wait();
    }
    std::size_t num_sent = 0;
    for (int id = kNumParams - 1; id >= 1; --id) {
      add(world, {control.rank(), 0, 0}, id);
      if (control.rank() == 1 && ++num_sent <= 2) {
        rank.await_met(num_sent);  // goes on to send more than rank 0 has
      }
    }
    EXPECT_EQ(rank.num_started(), control.rank() == 0 ? 2U : 4U);
    if (control.rank() == 0) {
      control.start_barrier().wait();
    }
    control.start_barrier().wait();
    rank.open_all();
    world.reducer().clear();
    EXPECT_EQ(held_bytes(world), 0);
    for (int id = kNumParams - 1; id >= 0; --id) {
      add(world, {control.rank(), 1, 0}, id);
    }
    world.reducer().finish_backward();
    expect_sums(world, 1, 1, is_in_a_bucket);
  });
}

INSTANTIATE_TEST_SUITE_P(Lists, ReducerProgressOfTwo, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Dynamic" : "Static"; });

}  // namespace
}  // namespace tessera::grad
