// The states of a parameter: every move from every state, and what each leaves behind.
#include "tessera/shard/param.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "testing/mock_device.h"

namespace tessera::shard {
namespace {

// What a tensor was told, in order.
struct TensorLog {
  std::vector<std::pair<std::string, void*>> moves;
};

class LoggingTensor final : public FullTensor {
 public:
  explicit LoggingTensor(TensorLog& log) : log_(log) {}
  ~LoggingTensor() override { log_.moves.emplace_back("destroy", nullptr); }
  void attach(void* data) override { log_.moves.emplace_back("attach", data); }
  void detach() override { log_.moves.emplace_back("detach", nullptr); }

 private:
  TensorLog& log_;
};

ParamSpec spec(std::string name, std::int64_t numel, DType dtype = DType::kFloat32) {
  ParamSpec result;
  result.name = std::move(name);
  result.numel = numel;
  result.dtype = dtype;
  return result;
}

class ParamTest : public testing::Test {
 protected:
  std::unique_ptr<FullTensor> tensor() { return std::make_unique<LoggingTensor>(log_); }
  std::size_t shard_bytes() const { return ledger_.current_bytes(Tier::kDevice, Role::kShard); }

  Ledger ledger_;
  TensorLog log_;
  std::unique_ptr<device::Device> device_ = device::make_cpu_device({&ledger_, {}});
};

TEST_F(ParamTest, GathersAndReleasesAroundOneTensor) {
  Param param(3, spec("w", 10), 1, 4, *device_, tensor());
  EXPECT_EQ(param.state(), ParamState::kReleased);
  EXPECT_EQ(param.full(), nullptr);
  std::vector<std::byte> full(param.layout().full_bytes());
  param.start_gather(full.data());
  EXPECT_EQ(param.state(), ParamState::kGathering);
  EXPECT_EQ(param.full(), full.data());
  EXPECT_TRUE(log_.moves.empty()) << "what is not gathered yet must not be readable";
  param.finish_gather();
  EXPECT_EQ(param.state(), ParamState::kAvailable);
  EXPECT_TRUE(log_.moves.empty()) << "what nobody uses must not be readable";
  param.add_user();
  param.add_user();
  param.remove_user();
  EXPECT_EQ(log_.moves.size(), 1U);
  param.remove_user();
  param.release();
  EXPECT_EQ(param.state(), ParamState::kReleased);
  EXPECT_EQ(param.full(), nullptr);
  const std::vector<std::pair<std::string, void*>> expected = {{"attach", full.data()},
                                                               {"detach", nullptr}};
  EXPECT_EQ(log_.moves, expected);
}

TEST_F(ParamTest, AGatherThatIsDroppedNeverReachesTheTensor) {
  Param param(0, spec("w", 10), 0, 2, *device_, tensor());
  std::vector<std::byte> full(param.layout().full_bytes());
  param.start_gather(full.data());
  param.drop();
  EXPECT_EQ(param.state(), ParamState::kReleased);
  EXPECT_EQ(param.full(), nullptr);
  EXPECT_TRUE(log_.moves.empty());
  param.start_gather(full.data());  // and it can be gathered again
  param.finish_gather();
  param.add_user();
  EXPECT_EQ(log_.moves.size(), 1U);
}

TEST_F(ParamTest, AWriteWhileItIsUsedIsAnErrorUnlessItWasAllowed) {
  std::uint64_t num_writes = 5;
  class Written final : public FullTensor {
   public:
    explicit Written(const std::uint64_t& num) : num_(num) {}
    void attach(void*) override {}
    void detach() override {}
    std::uint64_t num_writes() const override { return num_; }

   private:
    const std::uint64_t& num_;
  };
  Param param(0, spec("w", 10), 0, 2, *device_, std::make_unique<Written>(num_writes));
  std::vector<std::byte> full(param.layout().full_bytes());
  param.start_gather(full.data());
  param.finish_gather();
  param.add_user();
  EXPECT_NO_THROW(param.remove_user("h.1"));
  param.add_user();
  param.add_user();
  ++num_writes;
  EXPECT_NO_THROW(param.remove_user("h.1"));
  try {
    param.remove_user("h.1");
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'w' was changed in place while unit 'h.1'"), std::string::npos) << text;
    EXPECT_NE(text.find("gathered()"), std::string::npos) << text;
  }
  EXPECT_EQ(param.num_users(), 0);
  param.add_user();
  param.allow_edits();
  ++num_writes;
  EXPECT_NO_THROW(param.remove_user("h.1"));
  param.add_user();
  ++num_writes;
  EXPECT_THROW(param.remove_user("h.1"), ConfigError) << "allowed once, not for ever";
}

TEST_F(ParamTest, EveryIllegalMoveIsAnErrorWithTheName) {
  struct Move {
    std::string name;
    std::function<void(Param&, void*)> apply;
    std::vector<ParamState> legal_in;
  };
  const std::vector<Move> moves = {
      {"start_gather", [](Param& p, void* full) { p.start_gather(full); }, {ParamState::kReleased}},
      {"finish_gather", [](Param& p, void*) { p.finish_gather(); }, {ParamState::kGathering}},
      {"drop", [](Param& p, void*) { p.drop(); }, {ParamState::kGathering}},
      {"release", [](Param& p, void*) { p.release(); }, {ParamState::kAvailable}},
      {"add_user", [](Param& p, void*) { p.add_user(); }, {ParamState::kAvailable}},
  };
  for (const Move& move : moves) {
    for (const ParamState state :
         {ParamState::kReleased, ParamState::kGathering, ParamState::kAvailable}) {
      SCOPED_TRACE(move.name + " while " + std::string(to_string(state)));
      Param param(0, spec("h.3.attn.weight", 10), 0, 2, *device_, tensor());
      std::vector<std::byte> full(param.layout().full_bytes());
      if (state != ParamState::kReleased) {
        param.start_gather(full.data());
      }
      if (state == ParamState::kAvailable) {
        param.finish_gather();
      }
      if (std::find(move.legal_in.begin(), move.legal_in.end(), state) != move.legal_in.end()) {
        EXPECT_NO_THROW(move.apply(param, full.data()));
        continue;
      }
      const std::size_t num_moves = log_.moves.size();
      try {
        move.apply(param, full.data());
        ADD_FAILURE() << "expected StateError";
      } catch (const StateError& error) {
        EXPECT_EQ(error.parameter(), "h.3.attn.weight");
        EXPECT_NE(std::string(error.what()).find("'h.3.attn.weight' is "), std::string::npos)
            << error.what();
        EXPECT_NE(std::string(error.what()).find(to_string(state)), std::string::npos);
      }
      EXPECT_EQ(param.state(), state);
      EXPECT_EQ(log_.moves.size(), num_moves);
    }
  }
}

TEST_F(ParamTest, CannotBeReleasedUnderItsUsers) {
  Param param(0, spec("tied.weight", 10), 0, 2, *device_, tensor());
  std::vector<std::byte> full(param.layout().full_bytes());
  param.start_gather(full.data());
  param.finish_gather();
  param.add_user();
  param.add_user();
  EXPECT_THROW(param.release(), InternalError);
  param.remove_user();
  try {
    param.release();
    FAIL() << "expected StateError";
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find("'tied.weight'"), std::string::npos) << error.what();
  }
  param.remove_user();
  EXPECT_THROW(param.remove_user(), InternalError);
  EXPECT_EQ(param.num_users(), 0);
  EXPECT_NO_THROW(param.release());
}

TEST_F(ParamTest, ShardsAreZeroAndChargedToTheByte) {
  // New memory of this device is poison, so zeros are there because somebody wrote them.
  device::MockDeviceOptions options;
  options.host.ledger = &ledger_;
  const auto late = device::make_mock_device(options);
  {
    std::size_t expected_bytes = 0;
    std::vector<std::unique_ptr<Param>> params;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const std::int64_t numel : {0, 1, 3, 8, 1000, 4097}) {
        const int num_ranks = 3;
        params.push_back(
            std::make_unique<Param>(0, spec("w", numel, dtype), 2, num_ranks, *late, tensor()));
        const Param& param = *params.back();
        expected_bytes += param.layout().shard_bytes();
        EXPECT_EQ(shard_bytes(), expected_bytes);
        for (std::size_t i = 0; i < param.layout().shard_bytes(); ++i) {
          ASSERT_EQ(param.shard()[i], std::byte{0}) << numel << " elements, byte " << i;
        }
      }
    }
  }
  EXPECT_EQ(shard_bytes(), 0U);
}

TEST_F(ParamTest, InAGroupOfOneTheShardIsTheFullParameter) {
  Param param(0, spec("w", 10), 0, 1, *device_, tensor());
  EXPECT_TRUE(param.shard_is_full());
  std::vector<std::byte> elsewhere(param.layout().full_bytes());
  EXPECT_THROW(param.start_gather(elsewhere.data()), InternalError);
  param.start_gather(param.shard());
  param.finish_gather();
  param.add_user();
  EXPECT_EQ(log_.moves.back().second, param.shard());
}

TEST_F(ParamTest, RefusesToGatherToNullUnlessThereIsNothingToGather) {
  Param param(0, spec("w", 10), 0, 2, *device_, tensor());
  EXPECT_THROW(param.start_gather(nullptr), InternalError);
  for (const int num_ranks : {1, 2}) {
    Param empty(1, spec("empty", 0), 0, num_ranks, *device_, tensor());
    EXPECT_EQ(empty.shard(), nullptr);
    empty.start_gather(nullptr);
    empty.finish_gather();
    EXPECT_EQ(empty.state(), ParamState::kAvailable);
    empty.release();
  }
}

TEST_F(ParamTest, CountsItsUpdates) {
  Param param(0, spec("w", 10), 0, 2, *device_, tensor());
  EXPECT_EQ(param.version(), 0U);
  EXPECT_TRUE(param.updated().done());
  const auto update = std::make_shared<device::Completion>();
  param.set_updated(device::Pending(update));
  EXPECT_EQ(param.version(), 1U);
  EXPECT_FALSE(param.updated().done());
  update->succeed();
  EXPECT_TRUE(param.updated().done());

  const std::byte values[16] = {};
  param.set_updated({}, {values, {}});
  EXPECT_EQ(param.version(), 2U);
  EXPECT_EQ(param.device_copy().values, values);
  param.set_updated({});
  EXPECT_EQ(param.device_copy().values, nullptr) << "a copy of the version before";
}

TEST_F(ParamTest, ATablePassesUpdatesOnToWhoeverIsRegistered) {
  ParamTable table(0, 1, *device_);
  const float value = 3;
  EXPECT_FALSE(table.pass_on(0, 0, 1, &value)) << "nobody is";
  table.set_receiver([&](int id, std::int64_t begin, std::int64_t numel, const void* values) {
    EXPECT_EQ(values, &value);
    return id == 7 && begin == 2048 && numel == 1;
  });
  EXPECT_TRUE(table.pass_on(7, 2048, 1, &value));
  EXPECT_FALSE(table.pass_on(6, 2048, 1, &value));
  table.set_receiver({});
  EXPECT_FALSE(table.pass_on(7, 2048, 1, &value));
}

TEST_F(ParamTest, ATableAsksItsGuardBeforeAnythingIsOverwritten) {
  ParamTable table(0, 1, *device_);
  EXPECT_TRUE(table.before_overwrite(7).done()) << "nobody asks";
  const auto read = std::make_shared<device::Completion>();
  table.set_overwrite_guard(
      [&](int id) { return id == 7 ? device::Pending(read) : device::Pending(); });
  EXPECT_TRUE(table.before_overwrite(6).done());
  EXPECT_FALSE(table.before_overwrite(7).done());
  read->succeed();
  EXPECT_TRUE(table.before_overwrite(7).done());
  table.set_overwrite_guard({});
  EXPECT_EQ(table.before_overwrite(7).state(), nullptr);
}

// Of a device that is late: what has not come is poison.
TEST_F(ParamTest, AShardIsReadFromWhicheverMemoryItIsIn) {
  device::MockDeviceOptions options;
  options.own_memory = true;
  const std::unique_ptr<device::Device> late = device::make_mock_device(options);
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    ParamSpec described = spec("w", 100);
    described.placement.parameter = tier;
    const Param param(0, described, 0, 1, *late, tensor());
    std::vector<float> values(100);
    std::iota(values.begin(), values.end(), 1.0F);
    late->start_copy(param.shard(), values.data(), 400, late->stream(device::StreamKind::kWrite))
        .wait();
    std::vector<float> found(60);
    // Whatever waits on other streams does not hold it up.
    const auto never = std::make_shared<device::Completion>();
    late->stream(device::StreamKind::kWrite).wait(device::Pending(never));
    param.start_read(40, 60, reinterpret_cast<std::byte*>(found.data())).wait();
    never->succeed();
    EXPECT_TRUE(std::equal(found.begin(), found.end(), values.begin() + 40));
    EXPECT_THROW(std::ignore = param.start_read(40, 61, nullptr), InternalError);
  }
}

TEST_F(ParamTest, LetsGoOfItsTensorBeforeItsMemory) {
  // The double would not notice; the order of the ledger and the log shows it.
  std::size_t bytes_at_the_end = 0;
  class Watching final : public FullTensor {
   public:
    Watching(const Ledger& ledger, std::size_t& bytes) : ledger_(ledger), bytes_(bytes) {}
    ~Watching() override { bytes_ = ledger_.current_bytes(Tier::kDevice, Role::kShard); }
    void attach(void*) override {}
    void detach() override {}

   private:
    const Ledger& ledger_;
    std::size_t& bytes_;
  };
  {
    const Param param(0, spec("w", 12), 0, 1, *device_,
                      std::make_unique<Watching>(ledger_, bytes_at_the_end));
  }
  EXPECT_EQ(bytes_at_the_end, 48U);
}

TEST_F(ParamTest, AStoredShardTakesNoMemoryAndIsNeverTheFullParameter) {
  ParamSpec on_nvme = spec("w", 10);
  on_nvme.placement.parameter = Tier::kNvme;
  Param param(0, on_nvme, 0, 1, *device_, tensor());
  EXPECT_TRUE(param.is_on_nvme());
  EXPECT_FALSE(param.shard_is_full());
  EXPECT_EQ(param.shard(), nullptr);
  EXPECT_EQ(shard_bytes(), 0U);
  std::vector<std::byte> full(param.layout().full_bytes());
  param.start_gather(full.data());
  EXPECT_THROW(param.set_tier(Tier::kDevice), StateError);
  EXPECT_THROW(param.set_tier(Tier::kNvme), StateError);
  param.finish_gather();
  param.add_user();
  EXPECT_EQ(log_.moves.back(), (std::pair<std::string, void*>("attach", full.data())));
  param.remove_user();
  param.release();
}

TEST_F(ParamTest, AShardMovesBetweenMemoryAndItsStoreWhileReleased) {
  Param param(0, spec("w", 10), 0, 1, *device_, tensor());
  EXPECT_TRUE(param.shard_is_full());
  std::fill_n(param.shard(), param.layout().shard_bytes(), std::byte{1});
  param.set_tier(Tier::kNvme);
  EXPECT_EQ(shard_bytes(), 0U);
  param.set_tier(Tier::kDevice);
  EXPECT_TRUE(param.shard_is_full());
  EXPECT_EQ(shard_bytes(), param.layout().shard_bytes());
  EXPECT_EQ(param.shard()[0], std::byte{0}) << "whoever moves it fills it in";
  std::byte* const shard = param.shard();
  shard[0] = std::byte{7};
  param.set_tier(Tier::kDevice);
  EXPECT_EQ(param.shard(), shard) << "it is there already";
  EXPECT_EQ(shard[0], std::byte{7});
}

TEST_F(ParamTest, ATableKeepsTheOrderOfRegistration) {
  ParamTable table(1, 2, *device_);
  const Param& first = table.add(spec("a", 5), tensor());
  for (int i = 1; i < 100; ++i) {
    table.add(spec("p" + std::to_string(i), i), tensor());
  }
  EXPECT_EQ(table.num_params(), 100);
  EXPECT_EQ(&table[0], &first) << "references stay valid";
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(table[i].id(), i);
    EXPECT_EQ(table.find(table[i].name()), &table[i]);
    EXPECT_EQ(table[i].layout().num_ranks(), 2);
    EXPECT_EQ(table[i].range().begin, table[i].layout().range(1).begin);
  }
  EXPECT_EQ(table.find("p100"), nullptr);
}

TEST_F(ParamTest, ATableRefusesNamesBeforeItTakesMemory) {
  ParamTable table(0, 2, *device_);
  table.add(spec("a", 5), tensor());
  const std::size_t bytes = shard_bytes();
  EXPECT_THROW(table.add(spec("", 500), tensor()), ConfigError);
  try {
    table.add(spec("a", 500), tensor());
    FAIL() << "expected ConfigError";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("'a'"), std::string::npos) << error.what();
  }
  EXPECT_EQ(ledger_.peak_bytes(Tier::kDevice, Role::kShard), bytes);
  EXPECT_EQ(table.num_params(), 1);
  EXPECT_THROW(ParamTable(2, 2, *device_), ConfigError);
  EXPECT_THROW(ParamTable(0, 0, *device_), ConfigError);
}

}  // namespace
}  // namespace tessera::shard
