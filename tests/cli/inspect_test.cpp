// `tessera inspect` as a program: its sums, its timeline and what it refuses.
#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cli/program.h"

namespace tessera::testing {
namespace {

std::string inspected(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "inspect");
  const ProcessResult result = run_tessera_forked(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  return result.out;
}

Json inspected_json(std::vector<std::string> arguments) {
  arguments.emplace_back("--json");
  return Json::parse(inspected(arguments));
}

std::int64_t sum_of(const Json& rows, const char* key) {
  std::int64_t sum = 0;
  for (const Json& row : rows) {
    sum += row[key].get<std::int64_t>();
  }
  return sum;
}

// Every byte of NVMe belongs to a parameter and a role, and what the table says is there.
TEST(Inspect, MapsEveryExtentToItsParameter) {
  for (const char* ranks : {"1", "2"}) {
    const Json plan = inspected_json({"--preset", "tiny", "--ranks", ranks, "--nvme", ".", "--set",
                                      "place.optimizer=nvme", "--set", "place.parameters=nvme"});
    std::map<std::string, std::int64_t> ends;
    std::set<std::string> stored;
    for (const Json& extent : plan["tiers"]["extents"]) {
      std::int64_t& end = ends[extent["role"]];
      EXPECT_EQ(extent["offset"], end) << extent;
      end += extent["bytes"].get<std::int64_t>();
      stored.insert(extent["param"].get<std::string>() + " " + extent["tensor"].get<std::string>());
    }
    for (const Json& line : plan["tiers"]["bytes"]) {
      if (line["tier"] == "nvme") {
        EXPECT_EQ(line["bytes"], ends[line["role"]]) << line;
      }
    }
    EXPECT_EQ(stored.size(), 3 * plan["params"].size());
    EXPECT_GT(plan["totals"]["arena_bytes"].get<std::int64_t>(), 0);
  }
}

TEST(Inspect, ShowsTheFirstExtentsAndTheirSums) {
  const std::string screen =
      inspected({"--preset", "tiny", "--nvme", ".", "--host-budget", "2MiB"});
  EXPECT_HAS(screen, "exp_avg_sq of ");
  EXPECT_HAS(screen, " more\n");
  EXPECT_HAS(screen, "NVMe per step and rank");
}

// Far more than this machine could hold, on more ranks than it could start.
TEST(Inspect, AddsUpAModelThatWouldNotFitHere) {
  constexpr std::int64_t kWidth = 5120;
  constexpr std::int64_t kLayers = 40;
  constexpr std::int64_t kVocabulary = 50304;
  constexpr std::int64_t kSequence = 1024;
  constexpr std::int64_t kRanks = 3000;
  constexpr std::int64_t kNumel = 2 * kVocabulary * kWidth + kSequence * kWidth +
                                  kLayers * (12 * kWidth * kWidth + 13 * kWidth) + 2 * kWidth;
  const Json plan =
      inspected_json({"--preset", "gpt-13b", "--ranks", "3000", "--precision", "bf16"});
  EXPECT_EQ(plan["totals"]["numel"], kNumel);
  EXPECT_EQ(plan["params"].size(), 12 * kLayers + 5U);
  EXPECT_EQ(plan["units"].size(), kLayers + 2U);
  EXPECT_EQ(plan["timeline"].size(), 2 * (kLayers + 2U));
  for (const Json& param : plan["params"]) {
    const auto numel = param["numel"].get<std::int64_t>();
    const auto shard = param["shard_numel"].get<std::int64_t>();
    // Eight bf16 elements are 16 bytes.
    EXPECT_EQ(shard, ((numel + kRanks - 1) / kRanks + 7) / 8 * 8) << param;
    EXPECT_EQ(param["padded_numel"], shard * kRanks);
    EXPECT_EQ(param["shard_bytes"], shard * 2);
    EXPECT_EQ(param["full_bytes"], shard * kRanks * 2);
  }
  for (const char* key : {"full_bytes", "shard_bytes"}) {
    EXPECT_EQ(plan["totals"][key], sum_of(plan["params"], key));
    EXPECT_EQ(plan["totals"][key], sum_of(plan["units"], key));
  }
}

// Plays a timeline with nothing but its own words.
class Replay {
 public:
  explicit Replay(const Json& plan) : plan_(plan) {
    for (const Json& param : plan["params"]) {
      bytes_[param["name"]] = param["full_bytes"];
    }
    for (const Json& unit : plan["units"]) {
      std::vector<std::string>& params = params_of_[unit["name"]];
      params = unit["own"].get<std::vector<std::string>>();
      for (const Json& name : unit["external"]) {
        params.push_back(name);
      }
    }
  }

  void run() {
    for (const Json& call : plan_["before_step"]) {
      gather(call);
    }
    for (const Json& use : plan_["timeline"]) {
      SCOPED_TRACE(use.dump());
      const auto now = use["gather_now"]["params"].get<std::vector<std::string>>();
      num_misses_ += static_cast<std::int64_t>(now.size());
      if (!now.empty()) {
        gather(use["gather_now"]);
      }
      for (const std::string& name : params_of_[use["unit"]]) {
        EXPECT_TRUE(held_.contains(name)) << name;
      }
      for (const Json& call : use["gather_ahead"]) {
        gather(call);
      }
      EXPECT_EQ(use["held_bytes"], held_bytes_);
      for (const std::string name : use["release"]) {
        EXPECT_EQ(held_.erase(name), 1U) << name;
        held_bytes_ -= bytes_[name];
      }
    }
    EXPECT_EQ(plan_["step"]["num_gathers"], num_gathers_);
    EXPECT_EQ(plan_["step"]["gathered_bytes"], gathered_bytes_);
    EXPECT_EQ(plan_["step"]["num_misses"], num_misses_);
    EXPECT_EQ(plan_["step"]["peak_bytes"], peak_bytes_);
    // Only what persists is left.
    for (const Json& param : plan_["params"]) {
      EXPECT_EQ(held_.contains(param["name"]), param["persists"].get<bool>()) << param["name"];
    }
  }

  std::int64_t peak_bytes() const { return peak_bytes_; }
  std::int64_t num_misses() const { return num_misses_; }

 private:
  void gather(const Json& call) {
    std::int64_t bytes = 0;
    for (const std::string name : call["params"]) {
      EXPECT_TRUE(held_.insert(name).second) << name << " is gathered twice";
      bytes += bytes_[name];
    }
    EXPECT_EQ(call["bytes"], bytes);
    ++num_gathers_;
    gathered_bytes_ += bytes;
    held_bytes_ += bytes;
    peak_bytes_ = std::max(peak_bytes_, held_bytes_);
  }

  const Json& plan_;
  std::map<std::string, std::int64_t> bytes_;
  std::map<std::string, std::vector<std::string>> params_of_;
  std::set<std::string> held_;
  std::int64_t held_bytes_ = 0;
  std::int64_t peak_bytes_ = 0;
  std::int64_t num_gathers_ = 0;
  std::int64_t gathered_bytes_ = 0;
  std::int64_t num_misses_ = 0;
};

TEST(Inspect, TellsATimelineThatHoldsTogether) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"--set", "live.limit_bytes=0"},
      {"--set", "live.limit_bytes=2MiB", "--set", "persist.param_bytes=0"},
      {"--set", "live.limit_bytes=2MiB", "--tie-head", "--set", "live.reuse_distance_bytes=0"},
      {"--set", "prefetch.bucket_bytes=0", "--freeze", "2"},
  };
  for (std::vector<std::string> arguments : cases) {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    arguments.insert(arguments.end(), {"--layers", "6", "--ranks", "4"});
    const Json plan = inspected_json(arguments);
    Replay replay(plan);
    replay.run();
    std::int64_t largest = 0;
    for (const Json& unit : plan["units"]) {
      largest = std::max(largest, unit["full_bytes"].get<std::int64_t>());
    }
    const auto limit = plan["limits"]["live_bytes"].get<std::int64_t>();
    EXPECT_LE(replay.peak_bytes(), std::max(limit, largest));
  }
}

TEST(Inspect, FindsNoMissWhereTwoUnitsFit) {
  // A block of tiny has 774 KiB in fp32.
  const std::vector<std::string> arguments{"--layers", "12",
                                           "--ranks",  "2",
                                           "--set",    "live.limit_bytes=1600KiB",
                                           "--set",    "persist.param_bytes=0"};
  const Json plan = inspected_json(arguments);
  EXPECT_EQ(plan["step"]["num_misses"], 0);
  EXPECT_LE(plan["step"]["peak_bytes"].get<std::int64_t>(), 1600 * 1024);
}

TEST(Inspect, AGroupOfOneGathersNothing) {
  const Json plan = inspected_json({"--ranks", "1"});
  EXPECT_EQ(plan["step"]["num_gathers"], 0);
  EXPECT_EQ(plan["totals"]["arena_bytes"], 0);
  EXPECT_HAS(inspected({}), "nothing is gathered");
}

TEST(Inspect, MicroBatchesOfAStepShareWhatFits) {
  const auto gathered_bytes = [](const char* limit, const char* micro_batches) {
    const Json plan =
        inspected_json({"--ranks", "2", "--layers", "6", "--set",
                        std::string("live.limit_bytes=") + limit, "--accumulate", micro_batches});
    Replay(plan).run();
    return plan["step"]["gathered_bytes"].get<std::int64_t>();
  };
  // Everything stays until the step ends.
  EXPECT_EQ(gathered_bytes("1GiB", "3"), gathered_bytes("1GiB", "1"));
  // Some of it stays from one to the next.
  EXPECT_GT(gathered_bytes("2MiB", "3"), gathered_bytes("2MiB", "1"));
  EXPECT_LT(gathered_bytes("2MiB", "3"), 3 * gathered_bytes("2MiB", "1"));
}

TEST(Inspect, ShowsUnitsThatAreAlikeOnce) {
  const std::string screen =
      inspected({"--layers", "5", "--freeze", "2", "--ranks", "2", "--tie-head"});
  EXPECT_HAS(screen, "blocks.0 to blocks.1 ");
  EXPECT_HAS(screen, "each of 2\n");
  EXPECT_HAS(screen, "blocks.2 to blocks.4 ");
  EXPECT_HAS(screen, "frozen");
  EXPECT_HAS(screen, "tied: 2 units");
  EXPECT_HAS(screen, "external: of embedding");
  EXPECT_HAS(screen, "   13  backward  embedding");
  EXPECT_HAS(screen, "Per step: ");
  std::istringstream lines(screen);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_FALSE(line.ends_with(' ')) << line;
  }
}

std::int64_t tier_bytes(const Json& plan, const std::string& tier) {
  std::int64_t sum = 0;
  for (const Json& line : plan["tiers"]["bytes"]) {
    sum += line["tier"] == tier ? line["bytes"].get<std::int64_t>() : 0;
  }
  return sum;
}

TEST(Inspect, PlansForAGpuThatNeedNotBeHere) {
  constexpr std::int64_t kGiB = std::int64_t{1} << 30;
  const std::vector<std::string> arguments{"--preset",        "gpt-13b", "--device",      "cuda",
                                           "--precision",     "bf16",    "--batch",       "1",
                                           "--device-budget", "110GiB",  "--host-budget", "112GiB"};
  const Json plan = inspected_json(arguments);
  const std::int64_t in_host = tier_bytes(plan, "pinned") + tier_bytes(plan, "host");
  EXPECT_LE(tier_bytes(plan, "device"), 110 * kGiB);
  EXPECT_GT(tier_bytes(plan, "device"), 100 * kGiB);
  EXPECT_LE(in_host, 112 * kGiB);
  EXPECT_GT(in_host, 70 * kGiB);
  EXPECT_EQ(tier_bytes(plan, "nvme"), 0);
  const Json& update = plan["tiers"]["update"];
  EXPECT_EQ(update["resident_numel"].get<std::int64_t>() +
                update["streamed_numel"].get<std::int64_t>() +
                update["processor_numel"].get<std::int64_t>(),
            sum_of(plan["params"], "shard_numel"));

  // Gradients come as activations go, and go before those of the next forward come: what is there
  // at once is less than all of both.
  const std::int64_t activations = plan["tiers"]["activation_bytes"];
  const std::int64_t besides =
      plan["tiers"]["device_peak_bytes"].get<std::int64_t>() - tier_bytes(plan, "device");
  const std::int64_t passing = plan["tiers"]["full_gradient_bytes"];
  EXPECT_GT(besides, passing);
  EXPECT_LT(besides, passing + activations / 2);

  const std::string screen = inspected(arguments);
  EXPECT_HAS(screen, "device memory with activations: ");
  EXPECT_HAS(screen, "or --cpu-share\n");
  // Twice the sequences, twice the activations; positions are the same for all of them.
  std::vector<std::string> two = arguments;
  two[7] = "2";
  EXPECT_EQ(inspected_json(two)["tiers"]["activation_bytes"].get<std::int64_t>() + 8 * 1024,
            plan["tiers"]["activation_bytes"].get<std::int64_t>() * 2);
}

TEST(Inspect, GradientsOfParametersInHostMemoryComeAsActivationsGo) {
  const auto plan_of = [](const char* batch) {
    return inspected_json({"--preset", "gpt-7b", "--device", "cuda", "--precision", "bf16",
                           "--batch", batch, "--parameters", "host", "--optimizer", "host",
                           "--cpu-share", "0.5"});
  };
  const auto gradients_of = [](const Json& plan) {
    std::int64_t bytes = 0;
    for (const Json& line : plan["tiers"]["bytes"]) {
      bytes += line["tier"] == "device" && line["role"] == "gradient"
                   ? line["bytes"].get<std::int64_t>()
                   : 0;
    }
    return bytes;
  };
  const auto both_of = [&](const Json& plan) {
    return plan["tiers"]["device_peak_bytes"].get<std::int64_t>() - tier_bytes(plan, "device") +
           gradients_of(plan);
  };
  const Json large = plan_of("4");
  const std::int64_t activations = large["tiers"]["activation_bytes"];
  EXPECT_GT(gradients_of(large), std::int64_t{6} << 30);
  EXPECT_GE(both_of(large), activations);
  EXPECT_LT(both_of(large), activations + (std::int64_t{8} << 20)) << "but for small parameters'";
  const Json small = plan_of("1");
  const std::int64_t passing = small["tiers"]["full_gradient_bytes"];
  ASSERT_GT(gradients_of(small), small["tiers"]["activation_bytes"].get<std::int64_t>());
  EXPECT_GT(both_of(small), gradients_of(small) + passing);
  EXPECT_LT(both_of(small), gradients_of(small) + passing + (std::int64_t{1} << 30));
}

TEST(Inspect, OnAGpuWhateverLivesElsewhereIsGatheredOncePerStep) {
  const auto inspected_with = [](const char* place) {
    return inspected_json({"--preset", "gpt2-124m", "--device", "cuda", "--precision", "bf16",
                           "--parameters", place, "--optimizer", "host"});
  };
  const Json plan = inspected_with("host");
  std::int64_t elsewhere = 0;
  for (std::size_t id = 0; id < plan["params"].size(); ++id) {
    const bool is_there = plan["tiers"]["places"][id]["parameter"] == "device";
    elsewhere += is_there ? 0 : plan["params"][id]["full_bytes"].get<std::int64_t>();
  }
  EXPECT_GT(elsewhere, 300 << 20);
  EXPECT_EQ(plan["step"]["gathered_bytes"], elsewhere);
  EXPECT_EQ(plan["step"]["num_misses"], 0);
  EXPECT_EQ(inspected_with("device")["step"]["num_gathers"], 0) << "shards are used there";
}

TEST(Inspect, OnAGpuWithoutBudgetsTellsWhatEverythingThereTakes) {
  const Json plan =
      inspected_json({"--preset", "gpt2-124m", "--device", "cuda", "--precision", "bf16"});
  // Parameters and gradients of two bytes, master and two moments of four.
  const std::int64_t bytes = 16 * sum_of(plan["params"], "shard_numel");
  EXPECT_GE(tier_bytes(plan, "device"), bytes);
  EXPECT_LE(tier_bytes(plan, "device"), bytes + bytes / 1000) << "each block is rounded up";
  EXPECT_EQ(tier_bytes(plan, "pinned") + tier_bytes(plan, "host"), 0);
  EXPECT_EQ(plan["step"]["num_gathers"], 0);
  EXPECT_EQ(plan["totals"]["arena_bytes"], 0);
}

// On a GPU small parameters of an offloaded model stay there: nobody gathers them.
TEST(Inspect, MarksOnlyWhatIsGatheredAsPersistent) {
  const Json plan = inspected_json(
      {"--preset", "small", "--device", "cuda", "--parameters", "host", "--optimizer", "host"});
  EXPECT_EQ(plan["totals"]["persistent_bytes"], 0) << plan.dump(1);
  for (const Json& param : plan["params"]) {
    EXPECT_FALSE(param["persists"].get<bool>()) << param["name"];
  }
}

// --- meshes ---

Json choice_of(const Json& plan, int shard_size, bool hierarchical) {
  for (const Json& each : plan["mesh"]["choices"]) {
    if (each["shard_size"] == shard_size && each["hierarchical"] == hierarchical &&
        each["secondary_size"] == 1 && each["exact"]) {
      return each;
    }
  }
  ADD_FAILURE() << "no groups of " << shard_size;
  return {};
}

TEST(InspectMesh, CutsParametersForTheRanksOfAGroup) {
  const Json plain = inspected_json({"--ranks", "4"});
  const Json groups = inspected_json({"--ranks", "8", "--shard-size", "4"});
  for (const char* part : {"params", "units", "totals", "timeline", "step"}) {
    EXPECT_EQ(groups[part], plain[part]) << part;
  }
  EXPECT_EQ(groups["num_ranks"], 8);
  EXPECT_EQ(groups["mesh"]["shard_size"], 4);
  EXPECT_EQ(groups["mesh"]["num_replicas"], 2);
  EXPECT_EQ(plain["mesh"]["num_replicas"], 1);
}

// By the sizes of the plan itself: on 4 hosts of 2, groups of 4 span two of them.
TEST(InspectMesh, CountsTheBytesOfAStepPerLink) {
  for (const bool hierarchical : {false, true}) {
    std::vector<std::string> arguments{"--ranks",          "8", "--shard-size", "4",
                                       "--ranks-per-host", "2", "--accumulate", "3"};
    if (hierarchical) {
      arguments.emplace_back("--hierarchical");
    }
    const Json plan = inspected_json(arguments);
    const Json& step = plan["mesh"]["step"];
    const std::int64_t shard = plan["step"]["gathered_bytes"].get<std::int64_t>() / 4;
    EXPECT_EQ(step["gathers"]["inside_bytes"], hierarchical ? 2 * shard : shard);
    EXPECT_EQ(step["gathers"]["across_bytes"], hierarchical ? shard : 2 * shard);
    const std::int64_t reduced = plan["totals"]["shard_bytes"];
    EXPECT_EQ(step["reduce_scatters"]["inside_bytes"], 3 * reduced);
    EXPECT_EQ(step["reduce_scatters"]["across_bytes"], 3 * 2 * reduced);
    EXPECT_EQ(step["replica_sums"]["inside_bytes"], 0);
    EXPECT_EQ(step["replica_sums"]["across_bytes"], reduced) << "two halves to one other copy";
    const Json own = choice_of(plan, 4, hierarchical);
    EXPECT_EQ(own["across_bytes"], step["gathers"]["across_bytes"].get<std::int64_t>() +
                                       step["reduce_scatters"]["across_bytes"].get<std::int64_t>() +
                                       reduced);
    EXPECT_EQ(own["host_across_bytes"], 2 * own["across_bytes"].get<std::int64_t>());
  }
}

TEST(InspectMesh, AWholeCopyPerRankStillComparesWithTheOthers) {
  const Json copies = inspected_json({"--ranks", "4", "--shard-size", "1"});
  EXPECT_EQ(copies["step"]["num_gathers"], 0);
  EXPECT_EQ(copies["mesh"]["step"]["gathers"]["inside_bytes"], 0);
  EXPECT_GT(copies["mesh"]["step"]["replica_sums"]["inside_bytes"], 0);
  EXPECT_EQ(choice_of(copies, 4, false), choice_of(inspected_json({"--ranks", "4"}), 4, false));
  EXPECT_HAS(inspected({"--ranks", "4", "--shard-size", "1"}), "Every rank has a whole copy");
}

TEST(InspectMesh, RecommendsByTheRatesOfTheLinks) {
  const std::vector<std::string> arguments{
      "--preset", "gpt2-124m",     "--ranks", "16",           "--ranks-per-host",
      "4",        "--link-inside", "300GB/s", "--link-across"};
  const auto with_network = [&](const char* rate, std::vector<std::string> more = {}) {
    std::vector<std::string> all = arguments;
    all.emplace_back(rate);
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const Json slow = inspected_json(with_network("1GB"));
  EXPECT_EQ(slow["mesh"]["links"]["inside_bytes_per_s"], 300e9);
  EXPECT_LE(slow["mesh"]["recommended"]["hosts_per_group"], 1);
  for (const Json& each : slow["mesh"]["choices"]) {
    EXPECT_TRUE(each["time_s"] >= slow["mesh"]["recommended"]["time_s"] || !each["exact"]);
  }
  const std::vector<std::string> tight{"--device", "cuda", "--device-budget", "1250MB"};
  const Json small = inspected_json(with_network("1GB", tight));
  for (const Json& each : small["mesh"]["choices"]) {
    EXPECT_EQ(each["fits"], each["memory_bytes"].get<std::int64_t>() <= 1'250'000'000);
  }
  EXPECT_FALSE(choice_of(small, 1, false)["fits"].get<bool>());
  EXPECT_TRUE(small["mesh"]["recommended"]["fits"].get<bool>());
  EXPECT_TRUE(small["mesh"]["recommended"]["hierarchical"].get<bool>()) << "fewer bytes across";
  const Json& inexact = small["mesh"]["recommended_if_numbers_may_change"];
  EXPECT_FALSE(inexact["exact"].get<bool>());
  EXPECT_LT(inexact["time_s"], small["mesh"]["recommended"]["time_s"]);

  const std::string screen = inspected(with_network("1GB", tight));
  EXPECT_HAS(screen, "mesh: 16 ranks = 1 copy x 16 shards, on 4 hosts of 4\n");
  EXPECT_HAS(screen, "max(inside / 300 GB/s of a rank, across / 1 GB/s of a host)");
  EXPECT_HAS(screen, "\nrecommended: ");
  EXPECT_HAS(screen, "\nif numbers may change, in 0.");
  EXPECT_HAS(screen, "do not fit into the device budget");
  EXPECT_HAS(inspected({"--ranks", "2"}), "--link-inside RATE and --link-across RATE add times");
}

TEST(InspectMesh, CountsSecondaryShardsOfTheFlags) {
  const std::vector<std::string> arguments{"--ranks",      "8", "--ranks-per-host", "4",
                                           "--accumulate", "2"};
  std::vector<std::string> second = arguments;
  second.insert(second.end(), {"--hpz-size", "2"});
  const Json plain = inspected_json(arguments);
  const Json plan = inspected_json(second);
  const Json& own = plan["mesh"]["own"];
  EXPECT_EQ(own["secondary_size"], 2);
  EXPECT_EQ(own["secondary_bytes"], plan["totals"]["full_bytes"].get<std::int64_t>() / 2);
  EXPECT_EQ(plain["mesh"]["own"]["secondary_bytes"], 0);
  const std::int64_t all = plan["totals"]["full_bytes"];
  const std::int64_t gathered = plan["step"]["gathered_bytes"];
  const Json& step = plan["mesh"]["step"];
  EXPECT_EQ(step["gathers"]["across_bytes"], all / 8 * 4) << "the first alone";
  EXPECT_EQ(step["secondary_gathers"]["inside_bytes"], (gathered - all) / 2);
  EXPECT_EQ(step["secondary_gathers"]["across_bytes"], 0);
  const std::string screen = inspected(second);
  EXPECT_HAS(screen, "secondary gathers");
  EXPECT_HAS(screen, "hpZ 2, this");
  EXPECT_HAS(screen, "What changes numbers, and is off by default:");
}

// The run is one of the rows: of two hosts of two ranks, and of one host.
TEST(InspectMesh, TellsWhichRowTheFlagsAre) {
  const std::vector<std::vector<std::string>> runs = {
      {},
      {"--quantize-gradients"},
      {"--quantize-gradients=8", "--quantize-weights"},
      {"--shard-size", "2", "--quantize-gradients"},
      {"--hierarchical", "--hpz-size", "2", "--quantize-gradients"},
      {"--shard-size", "2", "--quantize-weights"},
      {"--hpz-size", "2"}};
  for (std::vector<std::string> flags : runs) {
    if (flags != std::vector<std::string>{"--hpz-size", "2"}) {
      flags.insert(flags.begin(), {"--ranks-per-host", "2"});
    }
    flags.insert(flags.begin(), {"--ranks", "4"});
    SCOPED_TRACE(::testing::PrintToString(flags));
    const std::string screen = inspected(flags);
    EXPECT_TRUE(screen.find(", this") != std::string::npos ||
                screen.find(" this\n") != std::string::npos)
        << screen;
    const Json mesh = inspected_json(flags)["mesh"];
    EXPECT_EQ(std::count(mesh["choices"].begin(), mesh["choices"].end(), mesh["own"]), 1);
  }
}

TEST(InspectMesh, AnswersForAMillionRanks) {
  const Json plan = inspected_json({"--preset", "gpt-13b", "--ranks", "1048576", "--ranks-per-host",
                                    "8", "--shard-size", "64", "--precision", "bf16",
                                    "--link-inside", "300GB", "--link-across", "50GB"});
  EXPECT_EQ(plan["mesh"]["num_replicas"], 1048576 / 64);
  EXPECT_EQ(plan["mesh"]["choices"].size(), 4U + 34 * 4 + (3 + 34 * 4) * 5) << "flat ones, hpZ";
  EXPECT_FALSE(plan["mesh"]["recommended"].is_null());
}

TEST(InspectMesh, RefusesWhatIsNoMeshAndNoRate) {
  const auto refusal = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "inspect");
    const ProcessResult result = run_tessera_forked(arguments);
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.err_lines().size(), 1U) << result.err;
    return result.err;
  };
  EXPECT_HAS(refusal({"--ranks", "8", "--shard-size", "3"}),
             "shard.group_size = 3 (--shard-size) does not divide the 8 ranks; possible shard "
             "sizes: 1, 2, 4, 8");
  EXPECT_HAS(refusal({"--ranks", "8", "--hierarchical"}), "needs several hosts");
  EXPECT_HAS(refusal({"--ranks", "8", "--ranks-per-host", "4", "--hpz-size", "3"}),
             "do not divide its 4 ranks; possible are 2, 4");
  EXPECT_HAS(refusal({"--ranks", "8", "--ranks-per-host", "3"}), "does not divide the 8 ranks");
  EXPECT_HAS(refusal({"--ranks", "4", "--link-inside", "fast", "--ranks-per-host", "2",
                      "--link-across", "1GB"}),
             "--link-inside \"fast\" is not a rate");
  EXPECT_HAS(refusal({"--ranks", "4", "--link-across", "1GB"}), "all 4 ranks are on one host");
  EXPECT_HAS(refusal({"--ranks", "4", "--ranks-per-host", "2", "--link-across", "1GB"}),
             "--link-across without --link-inside");
  EXPECT_HAS(refusal({"--ranks", "4", "--ranks-per-host", "2", "--link-inside", "1GB"}),
             "--link-inside without --link-across");
}

}  // namespace
}  // namespace tessera::testing
