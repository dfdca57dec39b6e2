// Updates that start one by one while gradients still come: the bits of updates that start
// together, the order in which states are read, and who waits for whom.
#include <algorithm>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "testing/thread_backend.h"
#include "tests/optim/tiered_world.h"

namespace tessera::optim {
namespace {

using testing::IoCall;

std::vector<TieredShape> mixed_shapes_at(const StoredParts& stored) {
  return {{100, stored}, {5000, {}}, {2048, stored}, {0, {}}, {3, stored}, {4097, stored}};
}

// Another order every step: what was expected then is wrong.
std::vector<int> order_of(int step, std::size_t num_params) {
  std::vector<int> order;
  for (std::size_t id = num_params; id-- > 0;) {
    order.push_back(static_cast<int>(id));
  }
  if (step > 2) {
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(step)));
  }
  return order;
}

TEST(UpdatesInParts, GiveTheBitsOfUpdatesThatStartTogether) {
  constexpr int kSteps = 5;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const StoredParts& stored :
         {StoredParts{}, kStates, StoredParts{true, true, true}, StoredParts{true, false, true}}) {
      for (const bool is_late : {false, true}) {
        TieredCase test;
        test.dtype = dtype;
        test.shapes = mixed_shapes_at(stored);
        test.num_buffers = 2;
        test.is_late = is_late;
        const std::vector<Trained> expected = train(1, in_memory(test), kSteps);
        for (const TieredCase& each : {in_memory(test), test}) {
          run_one(each, [&](TieredWorld& world) {
            world.optimizer().expect_early_updates();
            for (int step = 1; step <= kSteps; ++step) {
              world.early_step(step, order_of(step, test.shapes.size()));
            }
            EXPECT_EQ(world.trained(), expected.front());
          });
        }
      }
    }
  }
}

TEST(UpdatesInParts, KeepTheSumsOfSquaresOfGradientsThatAreGone) {
  TieredCase test;
  test.shapes = mixed_shapes_at(kStates);
  run_one(test, [&](TieredWorld& world) {
    world.backward(1);
    const double expected = world.optimizer().sum_of_squares(world.reducer());
    EXPECT_GT(expected, 0);
    world.reducer().clear();
    world.optimizer().begin_update(world.reducer(), kTieredLr, kTieredScale);
    for (const int id : order_of(1, test.shapes.size())) {
      world.add_gradient(1, id);
      world.optimizer().update({&id, 1});
    }
    world.reducer().finish_backward();
    EXPECT_EQ(world.optimizer().sum_of_squares(world.reducer()), expected);
    world.optimizer().end_update();
    world.optimizer().wait();
  });
}

TEST(UpdatesInParts, GiveTheMemoryOfAGradientBackBeforeTheNextComes) {
  TieredCase test;
  test.shapes = mixed_shapes_at(kStates);
  run_one(in_memory(test), [&](TieredWorld& world) {
    world.optimizer().begin_update(world.reducer(), kTieredLr, kTieredScale);
    for (const int id : {5, 4, 2, 1, 0}) {
      const std::weak_ptr<void> memory = world.add_gradient(1, id);
      EXPECT_FALSE(memory.expired());
      world.optimizer().update({&id, 1});
      EXPECT_TRUE(memory.expired()) << "parameter " << id;
    }
    world.reducer().finish_backward();
    world.optimizer().end_update();
    world.optimizer().wait();
  });
}

// By parameter: the states of one are one sub-group.
std::vector<std::string> reads_since(const testing::FaultEngine& engine, std::size_t begin) {
  std::vector<std::string> names;
  const auto seen = engine.seen();
  for (std::size_t i = begin; i < seen.size(); ++i) {
    if (seen[i].call == IoCall::kRead) {
      names.push_back(seen[i].what);
    }
  }
  return names;
}

TieredCase states_on_disk(int num_params) {
  TieredCase test;
  test.shapes.assign(static_cast<std::size_t>(num_params), {2048, kStates});
  test.store = StoreKind::kFile;
  return test;
}

void expect_reads_of(const std::vector<std::string>& reads, const std::vector<int>& params) {
  ASSERT_EQ(reads.size(), params.size());
  for (std::size_t i = 0; i < reads.size(); ++i) {
    EXPECT_NE(reads[i].find("'p" + std::to_string(params[i]) + "'"), std::string::npos)
        << "read " << i << ": " << reads[i];
  }
}

// Parameters come in turns, each waited for before the next: so nothing depends on time.
std::vector<std::string> reads_of_step(TieredWorld& world, int number,
                                       const std::vector<std::vector<int>>& turns) {
  const std::size_t begin = world.engine().seen().size();
  world.optimizer().prepare();
  world.optimizer().begin_update(world.reducer(), kTieredLr, kTieredScale);
  for (const std::vector<int>& turn : turns) {
    for (const int id : turn) {
      world.add_gradient(number, id);
      world.optimizer().update({&id, 1});
    }
    for (const int id : turn) {
      world.params()[id].updated().wait();
    }
  }
  world.reducer().finish_backward();
  world.optimizer().end_update();
  world.optimizer().wait();
  world.reducer().clear();
  return reads_since(world.engine(), begin);
}

TEST(UpdatesInParts, ReadStatesInTheOrderInWhichGradientsCameTheLastTime) {
  run_one(states_on_disk(4), [](TieredWorld& world) {
    world.optimizer().expect_early_updates();
    expect_reads_of(reads_of_step(world, 1, {{3}, {2}, {1}, {0}}), {3, 2, 1, 0});
    // 2 was expected before 1; the next time that is known.
    expect_reads_of(reads_of_step(world, 2, {{3}, {1, 2}, {0}}), {3, 2, 1, 0});
    expect_reads_of(reads_of_step(world, 3, {{3}, {1}, {2}, {0}}), {3, 1, 2, 0});
  });
}

TEST(UpdatesInParts, TakeTheOrderOfTheNextForwardOnceAllGradientsHaveCome) {
  run_one(states_on_disk(5), [](TieredWorld& world) {
    world.optimizer().expect_early_updates();
    const std::size_t begin = world.engine().seen().size();
    world.step(1);  // all come together
    // The single lease was taken for the one that was expected first.
    expect_reads_of(reads_since(world.engine(), begin), {4, 0, 1, 2, 3});
  });
}

TEST(UpdatesInParts, AreDoneWhileOtherGradientsAreStillToCome) {
  run_one(states_on_disk(3), [](TieredWorld& world) {
    world.optimizer().expect_early_updates();
    world.optimizer().begin_update(world.reducer(), kTieredLr, kTieredScale);
    for (const int id : {2, 1}) {
      world.add_gradient(1, id);
      world.optimizer().update({&id, 1});
      world.params()[id].updated().wait();
      EXPECT_EQ(world.params()[id].version(), 1U);
      EXPECT_EQ(world.params()[0].version(), 0U);
    }
    world.add_gradient(1, 0);
    world.reducer().finish_backward();
    world.optimizer().end_update();
    world.optimizer().wait();
    EXPECT_EQ(world.params()[0].version(), 1U);
  });
}

TEST(UpdatesInParts, FailWithTheCauseIfTheRestNeverComes) {
  run_one(states_on_disk(3), [](TieredWorld& world) {
    world.optimizer().expect_early_updates();
    world.optimizer().begin_update(world.reducer(), kTieredLr, kTieredScale);
    const int last = 2;
    world.add_gradient(1, last);
    world.optimizer().update({&last, 1});
    world.params()[last].updated().wait();
    const int first = 0;  // not its turn yet
    world.add_gradient(1, first);
    world.optimizer().update({&first, 1});
    world.optimizer().give_up_update(
        std::make_exception_ptr(std::runtime_error("the backward failed")));
    EXPECT_THROW(world.optimizer().wait(), std::runtime_error);
    EXPECT_THROW(world.params()[first].updated().wait(), std::runtime_error);
    world.params()[last].updated().wait();
    world.reducer().clear();
    world.backward(2);
    EXPECT_THROW(world.optimizer().start_update(world.reducer(), kTieredLr, kTieredScale),
                 std::runtime_error);
  });
}

TEST(UpdatesInParts, EndWithTheirOptimizer) {
  run_one(states_on_disk(3), [](TieredWorld& world) {
    world.optimizer().begin_update(world.reducer(), kTieredLr, kTieredScale);
    const int last = 2;
    world.add_gradient(1, last);
    world.optimizer().update({&last, 1});
    world.destroy_optimizer();
  });
}

}  // namespace
}  // namespace tessera::optim
