// Which tensor of a gather is waited for, and which is not: over a network that holds some of them
// back until it is told to let go.
#include <memory>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "testing/thread_backend.h"
#include "tests/comm/time_limits.h"

namespace tessera::comm {
namespace {

// Ranks as threads, but the n-th all-gather of this rank (from 0) is done only when `gates[n]` is.
class GatedBackend final : public Backend {
 public:
  GatedBackend(std::unique_ptr<Backend> inner,
               std::vector<std::shared_ptr<device::Completion>> gates)
      : inner_(std::move(inner)), gates_(std::move(gates)) {}

  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  bool compares_tags() const override { return inner_->compares_tags(); }
  Pending start_all_gather(std::span<const GatherBytes> parts, const Call& call) override {
    const Pending arrival = inner_->start_all_gather(parts, call);
    return Pending::all({arrival, Pending(gates_.at(num_gathers_++))});
  }
  Pending start_all_to_all(const PieceBytes& pieces, const Call& call) override {
    return inner_->start_all_to_all(pieces, call);
  }
  Pending start_broadcast(void* data, std::size_t bytes, int root, const Call& call) override {
    return inner_->start_broadcast(data, bytes, root, call);
  }
  std::unique_ptr<Backend> split(std::span<const int> ranks, const std::string& name) override {
    return inner_->split(ranks, name);
  }
  std::size_t broadcast_sent_bytes(std::size_t bytes, int root) const override {
    return inner_->broadcast_sent_bytes(bytes, root);
  }
  void abort(const std::string& reason) override { inner_->abort(reason); }

 private:
  const std::unique_ptr<Backend> inner_;
  const std::vector<std::shared_ptr<device::Completion>> gates_;
  std::size_t num_gathers_ = 0;
};

constexpr std::int64_t kLarge = 20011;  // travels by itself
constexpr std::int64_t kSmall = 11;     // travels with the other small one

// Two ranks that gather a large tensor, two small ones and another large one: the first large one
// is arrival 0, the other 1, the small ones 2. Rank 0 has gates; rank 1 does not hold anything
// back.
class GatherPartsTest : public ::testing::Test {
 protected:
  GatherPartsTest() : world_(ThreadWorldOptions{2, 0, 0, {}}) {
    for (auto& gate : gates_) {
      gate = std::make_shared<device::Completion>();
    }
    auto gated = std::make_unique<GatedBackend>(
        world_.make_backend(0),
        std::vector<std::shared_ptr<device::Completion>>{gates_[0], gates_[1], gates_[2]});
    groups_[0] =
        std::make_unique<Group>(std::move(gated), "world", std::vector<int>{0, 1}, patient());
    groups_[1] =
        std::make_unique<Group>(world_.make_backend(1), "world", std::vector<int>{0, 1}, patient());
    for (std::size_t rank = 0; rank < 2; ++rank) {
      std::vector<Gather> gathers;
      for (std::size_t i = 0; i < 4; ++i) {
        const std::int64_t numel = i == 0 || i == 3 ? kLarge : kSmall;
        shards_[rank][i].assign(static_cast<std::size_t>(numel), static_cast<float>(10 * rank + i));
        fulls_[rank][i].resize(static_cast<std::size_t>(2 * numel));
        gathers.push_back(
            {shards_[rank][i].data(), fulls_[rank][i].data(), numel, DType::kFloat32});
      }
      pendings_[rank] = groups_[rank]->start_all_gathers(gathers);
    }
  }
  ~GatherPartsTest() override {
    for (const auto& gate : gates_) {
      if (!gate->done()) {
        gate->succeed();
      }
    }
  }

  // Waits for tensor `i` on rank 0, and looks at what it got from rank 1.
  void expect_here(std::size_t i) {
    pendings_[0][i].wait();
    EXPECT_EQ(fulls_[0][i].front(), static_cast<float>(i));
    EXPECT_EQ(fulls_[0][i].back(), static_cast<float>(10 + i));
  }
  bool done(std::size_t i) const { return pendings_[0][i].done(); }

  ThreadWorld world_;
  std::array<std::shared_ptr<device::Completion>, 3> gates_;
  std::array<std::array<std::vector<float>, 4>, 2> shards_;
  std::array<std::array<std::vector<float>, 4>, 2> fulls_;
  std::array<std::unique_ptr<Group>, 2> groups_;
  std::array<std::vector<Pending>, 2> pendings_;
};

TEST_F(GatherPartsTest, ATensorIsThereWhileLaterOnesAreHeldBack) {
  gates_[0]->succeed();
  expect_here(0);
  EXPECT_FALSE(done(1) || done(2) || done(3));
  gates_[1]->succeed();
  expect_here(3);
  EXPECT_FALSE(done(1) || done(2));
  gates_[2]->succeed();
  expect_here(1);
  expect_here(2);
}

TEST_F(GatherPartsTest, ATensorIsThereWhileEarlierOnesAreHeldBack) {
  gates_[2]->succeed();
  expect_here(1);
  expect_here(2);
  EXPECT_FALSE(done(0) || done(3));
  gates_[1]->succeed();
  expect_here(3);
  EXPECT_FALSE(done(0));
  gates_[0]->succeed();
  expect_here(0);
}

TEST_F(GatherPartsTest, WhenOneFailsWhatHasComeStaysAndTheRestFails) {
  gates_[1]->succeed();
  expect_here(3);
  gates_[0]->fail(std::make_exception_ptr(CommError("the cable is out")));
  for (const std::size_t i : {0, 1, 2}) {
    try {
      pendings_[0][i].wait();
      ADD_FAILURE() << "tensor " << i << " came";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("the cable is out"), std::string::npos);
    }
  }
  expect_here(3);
}

}  // namespace
}  // namespace tessera::comm
