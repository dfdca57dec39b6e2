// Masters and states, read and written tile by tile: the same elements wherever they live, training
// that goes on with the same bits in another place, and updates that wait for whoever still reads.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tests/optim/optimizer_fixture.h"
#include "tests/support/aligned_bytes.h"
#include "tests/support/expect_names.h"
#include "tests/support/sizes.h"

namespace tessera::optim {
namespace {

constexpr std::int64_t kStep = shard::kShardStep;
constexpr std::int64_t kTileSizes[] = {kStep, 3 * kStep, 100 * kStep};

struct NamedCase {
  std::string name;
  FixtureCase test;
};

// A block and less, ragged, none, several pieces; frozen.
std::vector<FixtureShape> tile_shapes(const std::vector<Placement>& placements) {
  std::vector<FixtureShape> shapes;
  std::size_t next = 0;
  for (const std::int64_t numel : {5, 9001, 4096, 0, 12289, 2048, 7000}) {
    shapes.push_back({numel, placements[next++ % placements.size()]});
  }
  shapes.push_back({17, placements.front(), false});
  return shapes;
}

NamedCase discrete_case(const std::string& name, const std::vector<Placement>& placements) {
  FixtureCase test;
  test.shapes = tile_shapes(placements);
  test.device = FixtureDevice::kDiscrete;  // lazy: a copy that nobody waits for has not come
  return {name, test};
}

std::vector<NamedCase> all_places() {
  std::vector<NamedCase> cases(3);
  cases[0] = {"in memory", {}};
  cases[0].test.shapes = tile_shapes({Placement{}});
  cases[1] = {"on NVMe", {}};
  cases[1].test.shapes = tile_shapes({kAllOnNvme, kStatesOnNvme, on_nvme(true, false, false)});
  cases[1].test.sub_group_numel = 2 * kStep;
  cases[1].test.num_buffers = 2;
  cases[2] = {"in files", cases[1].test};
  cases[2].test.store = StoreKind::kFile;
  const Placement resident{Tier::kDevice, Tier::kDevice, Tier::kDevice, Updater::kDevice};
  const Placement streamed{Tier::kHost, Tier::kDevice, Tier::kHost, Updater::kDevice};
  const Placement streamed_states{Tier::kDevice, Tier::kDevice, Tier::kHost, Updater::kDevice};
  const Placement by_cpu{Tier::kHost, Tier::kHost, Tier::kHost, Updater::kCpu};
  const Placement copied_by_cpu{Tier::kDevice, Tier::kHost, Tier::kHost, Updater::kCpu};
  cases.push_back(discrete_case("resident", {resident}));
  cases.push_back(discrete_case("streamed", {streamed, streamed_states}));
  cases.push_back(
      discrete_case("shared", {streamed, by_cpu, resident, copied_by_cpu, streamed_states}));
  return cases;
}

std::vector<NamedCase> all_places(DType dtype) {
  std::vector<NamedCase> cases = all_places();
  for (NamedCase& each : cases) {
    each.test.dtype = each.test.gradient_dtype = dtype;
  }
  return cases;
}

using StartRead = std::function<device::Pending(std::int64_t, std::int64_t, std::byte*)>;

// All elements of a shard; the memory holds what nobody may take for them.
std::vector<std::byte> read_in_tiles(std::int64_t shard_numel, std::int64_t tile_numel,
                                     std::size_t element_bytes, const StartRead& start_read) {
  std::vector<std::byte> all;
  testing::AlignedBytes tile(static_cast<std::size_t>(tile_numel) * element_bytes);
  for (std::int64_t begin = 0; begin < shard_numel; begin += tile_numel) {
    const std::int64_t numel = std::min(tile_numel, shard_numel - begin);
    std::memset(tile.data(), 0xff, tile.bytes());
    start_read(begin, numel, tile.data()).wait();
    all.insert(all.end(), tile.data(),
               tile.data() + static_cast<std::size_t>(numel) * element_bytes);
  }
  return all;
}

std::vector<std::byte> read_tensor(OptimizerFixture& fixture, int id, std::size_t tensor,
                                   std::int64_t tile_numel) {
  return read_in_tiles(fixture.params()[id].layout().shard_numel(), tile_numel, sizeof(float),
                       [&](std::int64_t begin, std::int64_t numel, std::byte* to) {
                         return fixture.optimizer().start_read(id, tensor, begin, numel, to);
                       });
}

std::vector<std::byte> read_shard(OptimizerFixture& fixture, int id, std::int64_t tile_numel) {
  const shard::Param& param = fixture.params()[id];
  return read_in_tiles(param.layout().shard_numel(), tile_numel, bytes_of(param.layout().dtype()),
                       [&](std::int64_t begin, std::int64_t numel, std::byte* to) {
                         return shard::start_read_shard(param, &fixture.shards(), begin, numel, to);
                       });
}

struct SavedParam {
  std::vector<std::byte> shard;
  std::vector<std::vector<std::byte>> tensors;
  std::int64_t num_updates = 0;
};

std::vector<SavedParam> save_all(OptimizerFixture& fixture, std::int64_t tile_numel) {
  std::vector<SavedParam> saved;
  for (int id = 0; id < fixture.params().num_params(); ++id) {
    SavedParam& each = saved.emplace_back();
    each.shard = read_shard(fixture, id, tile_numel);
    each.num_updates = fixture.optimizer().num_updates(id);
    for (std::size_t i = 0; i < fixture.optimizer().tensor_names(id).size(); ++i) {
      each.tensors.push_back(read_tensor(fixture, id, i, tile_numel));
    }
  }
  return saved;
}

void write_tiles(OptimizerFixture& fixture, int id, std::size_t tensor,
                 const std::vector<std::byte>& values, std::int64_t tile_numel) {
  const std::int64_t shard_numel = fixture.params()[id].layout().shard_numel();
  for (std::int64_t begin = 0; begin < shard_numel; begin += tile_numel) {
    const std::int64_t numel = std::min(tile_numel, shard_numel - begin);
    fixture.optimizer().write(id, tensor, begin, numel,
                              values.data() + static_cast<std::size_t>(begin) * sizeof(float));
  }
}

void load_all(OptimizerFixture& fixture, const std::vector<SavedParam>& saved,
              std::int64_t num_updates, std::int64_t tile_numel) {
  Optimizer& optimizer = fixture.optimizer();
  optimizer.begin_writes();
  for (int id = 0; id < fixture.params().num_params(); ++id) {
    const SavedParam& each = saved[static_cast<std::size_t>(id)];
    fixture.params()[id].forget_device_copy();
    fixture.write_shard(id, each.shard);
    if (!each.tensors.empty()) {
      optimizer.add_states(id);
      optimizer.prepare_writes(id);
    }
    for (std::size_t i = 0; i < each.tensors.size(); ++i) {
      write_tiles(fixture, id, i, each.tensors[i], tile_numel);
    }
    optimizer.set_num_updates(id, each.num_updates);
  }
  optimizer.end_writes(num_updates);
}

TEST(StateTiles, AreWhatAnUpdateHasMadeWhereverItIs) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const NamedCase& place : all_places(dtype)) {
      SCOPED_TRACE(place.name + ", " + std::string(to_string(dtype)));
      run_one(place.test, [&](OptimizerFixture& fixture) {
        fixture.step(1);
        fixture.step(2);
        // At once: states may still be on their way to the host.
        const std::vector<SavedParam> saved = save_all(fixture, 3 * kStep);
        for (const std::int64_t tile_numel : kTileSizes) {
          EXPECT_TRUE(std::ranges::equal(save_all(fixture, tile_numel), saved, {},
                                         &SavedParam::tensors, &SavedParam::tensors))
              << tile_numel;
        }
        const Trained trained = fixture.trained();
        for (std::size_t id = 0; id < saved.size(); ++id) {
          const auto names = fixture.optimizer().tensor_names(static_cast<int>(id));
          EXPECT_TRUE(saved[id].shard == trained[id * 4]) << "p" << id;
          if (!fixture.params()[static_cast<int>(id)].trainable()) {
            EXPECT_TRUE(names.empty());
            continue;
          }
          EXPECT_TRUE(saved[id].num_updates == 2 || saved[id].shard.empty());
          ASSERT_EQ(names.size(), dtype == DType::kFloat32 ? 2U : 3U);
          for (std::size_t i = 0; i < names.size(); ++i) {
            EXPECT_TRUE(saved[id].tensors[i] == trained[id * 4 + 4 - names.size() + i])
                << names[i] << " of p" << id;
          }
        }
      });
    }
  }
}

TEST(StateTiles, GoOnInAnyOtherPlaceWithTheSameBits) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const std::vector<NamedCase> places = all_places(dtype);
    for (std::size_t from = 0; from < places.size(); ++from) {
      const std::size_t to = (from + (dtype == DType::kFloat32 ? 1 : 2)) % places.size();
      SCOPED_TRACE(places[from].name + " to " + places[to].name);
      std::vector<SavedParam> saved;
      Trained expected;
      run_one(places[from].test, [&](OptimizerFixture& fixture) {
        fixture.step(1);
        fixture.step(2);
        saved = save_all(fixture, kStep);
        fixture.step(3);
        expected = fixture.trained();
      });
      run_one(places[to].test, [&](OptimizerFixture& fixture) {
        fixture.step(7);
        fixture.optimizer().prepare();  // what is read or sent ahead is of before
        load_all(fixture, saved, 2, 3 * kStep);
        EXPECT_EQ(fixture.optimizer().num_updates(), 2);
        fixture.step(3);
        EXPECT_TRUE(fixture.trained() == expected);
      });
    }
  }
}

TEST(StateTiles, KeepTheirPaddingZeroWhateverIsGivenForIt) {
  for (const NamedCase& place : all_places(DType::kBFloat16)) {
    SCOPED_TRACE(place.name);
    run_one(place.test, [&](OptimizerFixture& fixture) {
      const std::vector<float> ones(
          static_cast<std::size_t>(fixture.params()[1].layout().shard_numel()), 1.0F);
      const auto* const bytes = reinterpret_cast<const std::byte*>(ones.data());
      fixture.optimizer().begin_writes();
      write_tiles(fixture, 1, 0, {bytes, bytes + ones.size() * sizeof(float)}, kStep);
      fixture.optimizer().end_writes(0);
      const std::span<float> master = fixture.optimizer().state(1, "master");
      EXPECT_GT(master.size(), 9001U);
      EXPECT_EQ(std::ranges::count(master.first(9001), 1.0F), 9001);
      EXPECT_EQ(std::ranges::count(master.subspan(9001), 0.0F),
                static_cast<std::ptrdiff_t>(master.size() - 9001));
    });
  }
}

TEST(StateTiles, AreReadByManyThreadsWhileOthersAreUpdated) {
  for (const NamedCase& place : all_places(DType::kBFloat16)) {
    SCOPED_TRACE(place.name);
    FixtureCase test = place.test;
    test.shapes[4].used_every = 2;  // not in the second step
    test.mode = device::LateMode::kRandom;
    run_one(test, [&](OptimizerFixture& fixture) {
      fixture.step(2);
      std::vector<std::byte> expected = read_tensor(fixture, 4, 0, kStep);
      fixture.params()[4].set_trainable(false);
      fixture.optimizer().follow_trainable(4);
      fixture.remake_reducer();
      fixture.backward(4);
      fixture.start_update();
      std::vector<std::vector<std::byte>> found(2);
      std::vector<std::thread> threads;
      for (std::vector<std::byte>& each : found) {
        threads.emplace_back([&] { each = read_tensor(fixture, 4, 0, kStep); });
      }
      for (std::thread& thread : threads) {
        thread.join();
      }
      fixture.optimizer().wait();
      EXPECT_TRUE(found[0] == expected && found[1] == expected);
      fixture.reducer().clear();
    });
  }
}

TEST(StateTiles, GiveAFrozenParameterTheStatesThatItHad) {
  for (const NamedCase& place : all_places(DType::kBFloat16)) {
    SCOPED_TRACE(place.name);
    const auto follow = [](OptimizerFixture& fixture, bool trainable) {
      fixture.params()[1].set_trainable(trainable);
      fixture.optimizer().follow_trainable(1);
      fixture.remake_reducer();
    };
    std::vector<SavedParam> saved;
    Trained expected;
    run_one(place.test, [&](OptimizerFixture& fixture) {
      fixture.step(1);
      follow(fixture, false);
      fixture.step(2);
      saved = save_all(fixture, kStep);
      follow(fixture, true);
      fixture.step(3);
      expected = fixture.trained();
    });
    FixtureCase frozen = place.test;
    frozen.shapes[1].trainable = false;
    run_one(frozen, [&](OptimizerFixture& fixture) {
      EXPECT_TRUE(fixture.optimizer().tensor_names(1).empty());
      load_all(fixture, saved, 2, kStep);
      EXPECT_EQ(fixture.optimizer().num_updates(1), 1);
      follow(fixture, true);
      fixture.step(3);
      EXPECT_TRUE(fixture.trained() == expected);
    });
  }
}

FixtureCase states_on_disk() {
  FixtureCase test;
  test.dtype = DType::kBFloat16;
  test.shapes = {{3 * kStep, kStatesOnNvme}};
  test.store = StoreKind::kFile;
  test.num_buffers = 3;
  return test;
}

TEST(StateTiles, AreWrittenToDiskSeveralAtATime) {
  run_one(states_on_disk(), [](OptimizerFixture& fixture) {
    const std::vector<std::byte> values(3 * kStep * sizeof(float), std::byte{1});
    fixture.optimizer().begin_writes();
    fixture.engine().set_where_named(testing::IoCall::kWrite, "exp_avg", testing::IoFault::kHold);
    write_tiles(fixture, 0, 1, values, kStep);  // does not wait for what is held
    EXPECT_EQ(fixture.engine().num_held(), 3U);
    fixture.engine().clear_faults();
    fixture.engine().release();
    fixture.optimizer().end_writes(0);
    EXPECT_TRUE(read_tensor(fixture, 0, 1, kStep) == values);
  });
}

TEST(StateTiles, AreWrittenAnewAfterADiskHasFailed) {
  run_one(states_on_disk(), [](OptimizerFixture& fixture) {
    fixture.step(1);
    const std::vector<SavedParam> saved = save_all(fixture, kStep);
    fixture.step(2);
    const Trained expected = fixture.trained();
    fixture.engine().set_where_named(testing::IoCall::kWrite, "exp_avg_sq",
                                     testing::IoFault::kFail);
    support::expect_names<IoError>([&] { load_all(fixture, saved, 1, kStep); },
                                   "exp_avg_sq of parameter 'p0'");
    fixture.engine().clear_faults();
    load_all(fixture, saved, 1, kStep);
    fixture.step(2);
    EXPECT_TRUE(fixture.trained() == expected);
  });
}

// Reads one parameter for a long time.
class SlowReader {
 public:
  SlowReader(OptimizerFixture& fixture, int id) : params_(fixture.params()), id_(id) {
    params_.set_overwrite_guard([this](int asked) {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++num_asked_[asked];
      changed_.notify_all();
      return asked == id_ ? device::Pending(read_) : device::Pending();
    });
  }
  ~SlowReader() { params_.set_overwrite_guard({}); }
  SlowReader(const SlowReader&) = delete;
  SlowReader& operator=(const SlowReader&) = delete;

  void wait_until_asked() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return num_asked_.count(id_) > 0; });
  }
  void finish() { read_->succeed(); }
  const std::map<int, int>& num_asked() const {
    return num_asked_;
  }  // by id; once updates are over

 private:
  shard::ParamTable& params_;
  const int id_;
  const std::shared_ptr<device::Completion> read_ = std::make_shared<device::Completion>();
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::map<int, int> num_asked_;
};

constexpr int kSlow = 4;  // 12289 elements: several pieces, others before and behind it

void expect_unchanged(OptimizerFixture& fixture, const SavedParam& saved) {
  EXPECT_TRUE(read_shard(fixture, kSlow, kStep) == saved.shard);
  for (std::size_t i = 0; i < saved.tensors.size(); ++i) {
    EXPECT_TRUE(read_tensor(fixture, kSlow, i, kStep) == saved.tensors[i]) << i;
  }
}

TEST(OverwriteGuard, HoldsAnUpdateUntilWhatItOverwritesHasBeenRead) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const NamedCase& place : all_places(dtype)) {
      SCOPED_TRACE(place.name + ", " + std::string(to_string(dtype)));
      Trained expected;
      run_one(place.test, [&](OptimizerFixture& fixture) {
        fixture.step(1);
        fixture.step(2);
        expected = fixture.trained();
      });
      FixtureCase test = place.test;
      test.mode = device::LateMode::kRandom;  // goes on by itself
      run_one(test, [&](OptimizerFixture& fixture) {
        fixture.step(1);
        const SavedParam saved = save_all(fixture, kStep)[kSlow];
        SlowReader reader(fixture, kSlow);
        fixture.optimizer().prepare();
        fixture.backward(2);
        std::thread updating([&] {  // on a CPU it blocks
          fixture.start_update();
          fixture.optimizer().wait();
        });
        reader.wait_until_asked();
        expect_unchanged(fixture, saved);
        expect_unchanged(fixture, saved);
        reader.finish();
        updating.join();
        fixture.reducer().clear();
        EXPECT_TRUE(fixture.trained() == expected);
        for (int id = 0; id < fixture.params().num_params(); ++id) {
          const auto found = reader.num_asked().find(id);
          const int num_asked = found == reader.num_asked().end() ? 0 : found->second;
          if (fixture.params()[id].layout().numel() > 0) {
            EXPECT_EQ(num_asked, fixture.params()[id].trainable() ? 1 : 0) << "p" << id;
          }
        }
      });
    }
  }
}

TEST(OverwriteGuard, LetsUpdatesBeforeTheOneThatItHoldsFinish) {
  for (const NamedCase& place : all_places(DType::kBFloat16)) {
    if (place.name == "in memory") {
      continue;  // they run inside start_update()
    }
    SCOPED_TRACE(place.name);
    run_one(place.test, [&](OptimizerFixture& fixture) {
      fixture.step(1);
      SlowReader reader(fixture, kSlow);
      fixture.backward(2);
      fixture.start_update();
      for (const int id : {0, 1, 2}) {
        fixture.params()[id].updated().wait();
      }
      reader.wait_until_asked();
      EXPECT_FALSE(fixture.params()[kSlow].updated().done());
      reader.finish();
      fixture.optimizer().wait();
      fixture.reducer().clear();
    });
  }
}

TEST(OverwriteGuard, HoldsTheUpdateOfAWholeStepOnTheDevice) {
  const NamedCase place = all_places(DType::kBFloat16)[3];
  ASSERT_EQ(place.name, "resident");
  run_one(place.test, [&](OptimizerFixture& fixture) {
    fixture.step(1);
    const SavedParam saved = save_all(fixture, kStep)[kSlow];
    SlowReader reader(fixture, kSlow);
    fixture.backward(2);
    OwnSums own;
    own.sums.weight = 1;
    ASSERT_TRUE(
        fixture.optimizer().start_step(fixture.reducer(), kFixtureLr, {}, own, fixture.group()));
    fixture.optimizer().finish_step();  // the norm is there before the update
    reader.wait_until_asked();
    fixture.params()[2].updated().wait();
    EXPECT_FALSE(fixture.params()[kSlow].updated().done());
    expect_unchanged(fixture, saved);
    reader.finish();
    fixture.optimizer().wait();
    fixture.reducer().clear();
    EXPECT_FALSE(read_shard(fixture, kSlow, kStep) == saved.shard);
  });
}

}  // namespace
}  // namespace tessera::optim
