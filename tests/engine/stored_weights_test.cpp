// Frozen weights that are stored as blocks of integers, against a model whose frozen weights are
// what such blocks decode to: the same bits, wherever shards live and however they are gathered.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/device/host_memory.h"
#include "tessera/quant/block_codec.h"
#include "testing/mock_device.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/run_options.h"
#include "tests/support/contains.h"

namespace tessera::testing {
namespace {

using checkpoint::CheckpointReader;
using checkpoint::StoredParam;

// What blocks of the whole parameter decode to.
at::Tensor as_stored(const at::Tensor& values, int bits, std::int64_t block_numel = 128) {
  const auto codec = quant::make_cpu_block_codec({bits, block_numel});
  const at::Tensor from = values.contiguous();
  const DType dtype = from.scalar_type() == at::kFloat ? DType::kFloat32 : DType::kBFloat16;
  at::Tensor wire =
      at::zeros({static_cast<std::int64_t>(codec->wire_bytes(from.numel()))}, at::kByte);
  auto* const bytes = static_cast<std::byte*>(wire.data_ptr());
  codec->encode(from.const_data_ptr(), dtype, from.numel(), bytes, nullptr).wait();
  at::Tensor to = at::empty_like(from);
  codec->decode(bytes, from.numel(), to.data_ptr(), dtype, nullptr).wait();
  return to;
}

// The ids of the frozen weights.
constexpr int kFirst = 2;
constexpr int kSecond = 4;

struct Case {
  int ranks = 1;
  int bits = 0;  // 0: the frozen weights are what blocks of `decoded_bits` decode to
  int decoded_bits = 0;
  bool is_discrete = false;
  bool is_bf16 = false;
  Options options = {};
};

// Two frozen layers between two that are trained, so that gradients pass through them. The second
// recomputes, and the first is used again by a function.
struct Net {
  using Callable = std::function<at::Tensor(const at::Tensor&)>;

  Net(Engine& engine, const Case& how) {
    const auto make = [&](std::int64_t in, std::int64_t out, int seed, bool trainable) {
      auto module = affine(in, out, seed, trainable);
      const at::NoGradGuard no_grad;
      if (how.is_bf16) {
        module->to(at::kBFloat16);
        module->weight = module->named_parameters()["weight"];
        module->bias = module->named_parameters()["bias"];
      }
      if (!trainable && how.decoded_bits > 0) {
        module->weight.copy_(as_stored(module->weight, how.decoded_bits));
      }
      return module;
    };
    stem = engine.unit("stem", make(96, 96, 4, true));
    first = engine.unit("first", make(96, 768, 1, false));
    second = engine.unit("second", make(768, 103, 2, false), {.recompute = true});
    again = engine.function("again", {first->weight},
                            Callable([weight = first->weight](const at::Tensor& x) {
                              return at::linear(x, weight).sum();
                            }));
    head = engine.unit("head", make(103, 3, 3, true));
    is_bf16 = how.is_bf16;
  }
  at::Tensor loss(int step) {
    at::Tensor x = input(4, 96, step);
    x = is_bf16 ? x.to(at::kBFloat16) : x;
    const at::Tensor y = head(at::gelu(second(at::gelu(first(stem(x))))));
    return y.to(at::kFloat).pow(2).mean() + again(x).to(at::kFloat) * y.to(at::kFloat).mean();
  }
  Unit<AffineImpl> stem;
  Unit<AffineImpl> first;
  Unit<AffineImpl> second;
  Unit<FunctionModule<Callable>> again;
  Unit<AffineImpl> head;
  bool is_bf16 = false;
};

Config config_of(const Case& how) {
  Config config = adam_config(0.01);
  config.set("grad.clip_norm", 0.5);
  config.set("quant.frozen_bits", std::int64_t{how.bits});
  for (const auto& [name, value] : how.options) {
    config.apply_flag(name + "=" + value);
  }
  return config;
}

void with_engine(const Case& how, const std::function<void(Engine&)>& body) {
  comm::run_ranks(how.ranks, [&](comm::Group& group) {
    RuntimeOptions options{-1, 1};
    if (how.is_discrete) {
      options.make_device = [&](device::CpuDeviceOptions host) {
        device::MockDeviceOptions late;
        late.mode = device::LateMode::kRandom;
        late.seed = 7 + static_cast<std::uint64_t>(group.rank());
        late.own_memory = true;
        late.host = std::move(host);
        return device::make_mock_device(std::move(late));
      };
    }
    Runtime runtime(config_of(how), group, options);
    Engine engine(runtime);
    body(engine);
  });
}

void with_net(const Case& how, const std::function<void(Engine&, Net&)>& body) {
  with_engine(how, [&](Engine& engine) {
    Net net(engine, how);
    body(engine, net);
  });
}

// Of rank 0; all ranks must have the same.
struct Outcome {
  std::vector<double> numbers;
  std::vector<at::Tensor> values;
  std::uint64_t gathered_bytes = 0;  // sent by rank 0
  EngineStats last = {};             // of the last step, on rank 0
  std::int64_t shard_bytes = 0;      // that rank 0 has, secondary ones included
};
Outcome train(const Case& how, int steps = 3) {
  Outcome outcome;
  with_net(how, [&](Engine& engine, Net& net) {
    Outcome mine;
    for (int step = 0; step < steps; ++step) {
      const StepResult result = train_step(engine, net.loss(step));
      mine.numbers.push_back(result.loss);
      mine.numbers.push_back(result.grad_norm);
      mine.last = engine.take_stats();
    }
    for (const Tier tier : {Tier::kDevice, Tier::kPinned}) {
      mine.shard_bytes += engine.runtime().ledger().current_bytes(tier, Role::kShard);
    }
    for (int id = 0; id < engine.num_params(); ++id) {
      mine.values.push_back(engine.full_value(id));
    }
    if (engine.group().rank() == 0) {
      outcome = std::move(mine);
    }
  });
  return outcome;
}

void expect_same(const Outcome& stored, const Outcome& plain, const std::string& what) {
  EXPECT_EQ(stored.numbers, plain.numbers) << what;
  ASSERT_EQ(stored.values.size(), plain.values.size()) << what;
  for (std::size_t i = 0; i < stored.values.size(); ++i) {
    EXPECT_TRUE(at::equal(stored.values[i], plain.values[i])) << what << ", parameter " << i;
  }
}

TEST(StoredWeights, TrainAsTheValuesThatTheyDecodeTo) {
  const DiskDirectory directory;
  const Options nvme = joined({{"place.parameters", "nvme"}}, nvme_in(directory));
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int bits : {4, 8}) {
      const bool is_bf16 = ranks == 2;
      const Outcome plain = train({ranks, 0, bits, false, is_bf16});
      const Options live{{"live.limit_bytes", "0"}};
      const std::string what =
          std::to_string(ranks) + " ranks, " + std::to_string(bits) + " bits, ";
      expect_same(train({ranks, bits, 0, false, is_bf16}), plain, what + "in memory");
      expect_same(train({ranks, bits, 0, false, is_bf16, live}), plain, what + "few live");
      expect_same(train({ranks, bits, 0, false, is_bf16, nvme}), plain, what + "on NVMe");
      expect_same(train({ranks, bits, 0, true, is_bf16}), plain, what + "on a device");
      const Options host{{"place.parameters", "host"}, {"place.optimizer", "host"}};
      expect_same(train({ranks, bits, 0, true, is_bf16, host}), plain, what + "beside a device");
      expect_same(train({ranks, bits, 0, true, is_bf16, joined(live, host)}), plain,
                  what + "beside a device, few live");
      expect_same(train({ranks, bits, 0, true, is_bf16, nvme}), plain,
                  what + "on NVMe beside a device");
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST(StoredWeights, TrainAlikeInShardGroupsAndFromSecondaryShards) {
  const Options hosts{{"comm.ranks_per_host", "2"}};
  const std::vector<Options> meshes = {
      joined({{"shard.group_size", "2"}}, hosts),
      joined({{"shard.hierarchical_gather", "true"}}, hosts),
      joined({{"shard.secondary_group_size", "2"}, {"live.limit_bytes", "0"}}, hosts)};
  for (const Options& mesh : meshes) {
    expect_same(train({4, 4, 0, false, false, mesh}), train({4, 0, 4, false, false, mesh}),
                mesh.front().first);
  }
}

// Their secondary shards are blocks, too: what moves, and what memory is taken, is a function of
// the bytes of shards.
TEST(StoredWeights, TrainFromSecondaryShardsOfBlocksWithTheBitsOfGathersFromShards) {
  const DiskDirectory directory;
  const Options nvme = joined({{"place.parameters", "nvme"}}, nvme_in(directory));
  const Options host{{"place.parameters", "host"}, {"place.optimizer", "host"}};
  struct Cut {
    int ranks;
    int per_host;
    int second;
    int bits;
    bool hierarchical;
  };
  for (const Cut& cut : {Cut{4, 2, 2, 4, false}, Cut{4, 2, 2, 8, true}, Cut{6, 3, 3, 8, false},
                         Cut{8, 4, 4, 4, false}, Cut{8, 4, 2, 4, true}}) {
    const Options common{{"comm.ranks_per_host", std::to_string(cut.per_host)},
                         {"shard.hierarchical_gather", cut.hierarchical ? "true" : "false"},
                         {"live.limit_bytes", "0"},  // every use gathers
                         {"persist.param_bytes", "0"}};
    const Options second{{"shard.secondary_group_size", std::to_string(cut.second)}};
    for (const bool is_discrete : {false, true}) {
      for (const Options& place : {Options(), host, nvme}) {
        if (!is_discrete && place == host) {
          continue;  // one memory
        }
        SCOPED_TRACE(::testing::Message()
                     << cut.ranks << " ranks, secondary shards over " << cut.second << ", "
                     << cut.bits << " bits, " << (is_discrete ? "beside a device, " : "")
                     << (place.empty() ? "nothing placed" : place.front().second));
        const Case how{cut.ranks, cut.bits, 0, is_discrete, false, joined(common, place)};
        Case with_second = how;
        with_second.options = joined(how.options, second);
        const Outcome plain = train(how);
        const Outcome run = train(with_second);
        expect_same(run, plain, "");
        // What is frozen is gathered from shards once, and never again.
        const coordinator::CoordinatorStats& from = run.last.gathers;
        const coordinator::CoordinatorStats& of = plain.last.gathers;
        EXPECT_EQ(from.gathered_bytes, of.gathered_bytes);
        EXPECT_GT(of.encoded_bytes, 0U);
        EXPECT_EQ(from.encoded_bytes, 0U);
        EXPECT_EQ(from.secondary_wire_bytes,
                  of.wire_bytes + from.secondary_bytes - of.encoded_bytes);
        const std::uint64_t sent = run.last.sent_inside_bytes + run.last.sent_across_bytes;
        const std::uint64_t expected = run.last.gathered_wire_bytes + run.last.reduced_wire_bytes;
        EXPECT_GE(sent, expected);
        EXPECT_LE(sent, expected + 4096) << "beside norms and what ranks agree on";
        if (::testing::Test::HasFailure()) {
          return;
        }
      }
    }
  }
}

TEST(StoredWeights, HaveSecondaryShardsOfAsManyBytesAsTheFormulaSays) {
  const Options hosts{{"comm.ranks_per_host", "2"}, {"live.limit_bytes", "0"}};
  const Options second = joined({{"shard.secondary_group_size", "2"}}, hosts);
  for (const int bits : {0, 4, 8}) {
    std::int64_t pieces = 0;
    with_net({4, bits, 0, false, false, second}, [&](Engine& engine, Net&) {
      std::int64_t mine = 0;
      for (int id = 0; id < engine.num_params(); ++id) {
        mine += 2 * static_cast<std::int64_t>(engine.param(id).layout().shard_bytes());
      }
      if (engine.group().rank() == 0) {
        pieces = mine;
      }
    });
    const Outcome plain = train({4, bits, 0, false, false, hosts});
    const Outcome run = train({4, bits, 0, false, false, second});
    // Memory of 64 KiB and more is taken in whole pages.
    EXPECT_NEAR(static_cast<double>(run.shard_bytes - plain.shard_bytes),
                static_cast<double>(pieces), 2.0 * static_cast<double>(device::page_bytes()))
        << bits << " bits";
  }
}

// --- Units that only some ranks use, and leaves.

// A layer whose weight is frozen, and whose bias may be trained beside it.
std::shared_ptr<AffineImpl> frozen_layer(const Case& how, int seed, bool trains_bias) {
  auto module = affine(64, 64, seed, false);
  const at::NoGradGuard no_grad;
  if (how.decoded_bits > 0) {
    module->weight.copy_(as_stored(module->weight, how.decoded_bits));
  }
  module->bias.set_requires_grad(trains_bias);
  return module;
}

// Ranks go their own ways through frozen units, in a leaf or routed to experts.
struct RoutedNet {
  static constexpr int kExperts = 4;

  // What a leaf gathers whole.
  struct ChoiceImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x, std::size_t way) { return inside[way](x); }
    std::vector<Unit<AffineImpl>> inside;
  };

  RoutedNet(Engine& engine, const Case& how, bool has_leaf) {
    front = engine.unit("front", affine(32, 64, 8));
    const std::string prefix = has_leaf ? "choice." : "experts.";
    for (int i = 0; i < kExperts; ++i) {
      UnitOptions options;
      options.dynamic = !has_leaf;
      options.recompute = i % 2 == 1;
      experts.push_back(engine.unit(prefix + std::to_string(i),
                                    frozen_layer(how, 10 + i, i < kExperts / 2), options));
    }
    if (has_leaf) {
      const auto module = std::make_shared<ChoiceImpl>();
      module->inside = experts;
      choice = engine.unit("choice", module);
      engine.set_leaf("choice");
    }
    back = engine.unit("back", affine(64, 3, 9));
  }

  // In every third step nobody is routed to the last expert, and in every fourth nobody to any.
  at::Tensor loss(int step, int rank) {
    const at::Tensor x = front(input(4, 32, step * 7 + rank));
    at::Tensor y = x;
    if (choice) {
      y = y + at::tanh((*choice)(x, static_cast<std::size_t>((step + rank) % kExperts)));
    }
    for (int i = 0; i < kExperts && !choice && step % 4 != 3; ++i) {
      const bool is_last_but_unused = i == kExperts - 1 && step % 3 == 0;
      if ((step + rank + i) % 2 == 0 && !is_last_but_unused) {
        y = y + at::tanh(experts[static_cast<std::size_t>(i)](x));
      }
    }
    return back(y).pow(2).mean();
  }

  Unit<AffineImpl> front;
  std::vector<Unit<AffineImpl>> experts;
  std::optional<Unit<ChoiceImpl>> choice;
  Unit<AffineImpl> back;
};

Outcome train_routed(const Case& how, bool has_leaf) {
  Outcome outcome;
  with_engine(how, [&](Engine& engine) {
    RoutedNet net(engine, how, has_leaf);
    Outcome mine;
    for (int step = 0; step < 6; ++step) {
      const StepResult result = train_step(engine, net.loss(step, engine.group().rank()));
      mine.numbers.push_back(result.loss);
      mine.numbers.push_back(result.grad_norm);
      mine.gathered_bytes += engine.take_stats().gathered_wire_bytes;
    }
    int num_stored = 0;
    for (int id = 0; id < engine.num_params(); ++id) {
      mine.values.push_back(engine.full_value(id));
      num_stored += engine.param(id).layout().is_encoded() ? 1 : 0;
    }
    EXPECT_EQ(num_stored, how.bits > 0 ? RoutedNet::kExperts : 0);
    if (engine.group().rank() == 0) {
      outcome = std::move(mine);
    }
  });
  return outcome;
}

void expect_routed_alike(bool has_leaf) {
  const DiskDirectory directory;
  const Options live{{"live.limit_bytes", "0"}, {"persist.param_bytes", "0"}};
  const Options nvme = joined({{"place.parameters", "nvme"}}, nvme_in(directory));
  const Options host{{"place.parameters", "host"}, {"place.optimizer", "host"}};
  for (const int ranks : {1, 2, 3, 4}) {
    const int bits = ranks % 2 == 0 ? 4 : 8;
    const std::string what = std::to_string(ranks) + " ranks, " + std::to_string(bits) + " bits";
    const Outcome plain = train_routed({ranks, 0, bits}, has_leaf);
    expect_same(train_routed({ranks, bits}, has_leaf), plain, what);
    const Outcome few = train_routed({ranks, bits, 0, false, false, live}, has_leaf);
    expect_same(few, plain, what + ", few live");
    const Outcome plain_few = train_routed({ranks, 0, bits, false, false, live}, has_leaf);
    // What is trained is in both: the front's 2112 elements, beside 4096 of each expert.
    EXPECT_LE(few.gathered_bytes, plain_few.gathered_bytes * 2 / 3) << what;
    EXPECT_EQ(plain_few.gathered_bytes > 0, ranks > 1) << what;
    expect_same(train_routed({ranks, bits, 0, false, false, nvme}, has_leaf), plain,
                what + ", on NVMe");
    for (const Options& options : {Options(), host, joined(live, host), nvme}) {
      expect_same(train_routed({ranks, bits, 0, true, false, options}, has_leaf), plain,
                  what + ", beside a device, " + (options.empty() ? "" : options.back().first));
    }
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
  const Options hosts{{"comm.ranks_per_host", "2"}};
  for (const Options& mesh :
       {joined({{"shard.group_size", "2"}}, hosts),
        joined({{"shard.hierarchical_gather", "true"}}, hosts),
        joined({{"shard.secondary_group_size", "2"}, {"live.limit_bytes", "0"}}, hosts)}) {
    for (const bool is_discrete : {false, true}) {
      expect_same(train_routed({4, 4, 0, is_discrete, false, mesh}, has_leaf),
                  train_routed({4, 0, 4, is_discrete, false, mesh}, has_leaf), mesh.front().first);
    }
  }
}

TEST(StoredWeights, OfUnitsThatOnlySomeRanksUseTrainAsTheValuesThatTheyDecodeTo) {
  expect_routed_alike(/*has_leaf=*/false);
}

TEST(StoredWeights, InsideALeafTrainAsTheValuesThatTheyDecodeTo) {
  expect_routed_alike(/*has_leaf=*/true);
}

// What rank 0 says in the first lines of a run.
std::string said(Case how) {
  how.options.emplace_back("log.level", "info");
  ::testing::internal::CaptureStderr();
  with_net(how, [](Engine& engine, Net& net) { train_step(engine, net.loss(0)); });
  return ::testing::internal::GetCapturedStderr();
}

double relative_change(const std::vector<at::Tensor>& values, int bits) {
  double error = 0;
  double squares = 0;
  for (const at::Tensor& each : values) {
    const at::Tensor exact = each.to(at::kDouble);
    error += (as_stored(each, bits).to(at::kDouble) - exact).pow(2).sum().item<double>();
    squares += exact.pow(2).sum().item<double>();
  }
  return std::sqrt(error / squares);
}

TEST(StoredWeights, AreNamedWithTheirBytesAndTheirErrorInTheFirstLinesOfARun) {
  const at::Tensor first = affine(96, 768, 1, false)->weight;
  const at::Tensor second = affine(768, 103, 2, false)->weight;
  for (const int ranks : {1, 3}) {
    for (const int bits : {4, 8}) {
      const std::string text = said({ranks, bits});
      EXPECT_HAS(text, "2 of 8 parameters are stored as int" + std::to_string(bits) +
                           " blocks of 128 (quant.frozen_bits)");
      EXPECT_HAS(text, "in place of 597 KiB on all ranks");
      EXPECT_HAS(text, "this changes numbers");
      const auto number_behind = [&](const std::string& words) {
        const std::size_t at = text.find(words);
        return at == std::string::npos ? -1 : std::stod(text.substr(at + words.size()));
      };
      // Six digits are said.
      const double all = relative_change({first, second}, bits);
      EXPECT_NEAR(number_behind("by a relative error of "), all, 1e-5 * all);
      const double of_first = relative_change({first}, bits);
      const double of_second = relative_change({second}, bits);
      const double worst = std::max(of_first, of_second);
      EXPECT_NEAR(number_behind("the largest "), worst, 1e-5 * worst);
      EXPECT_HAS(text, of_first > of_second ? "in 'first.weight'" : "in 'second.weight'");
    }
  }
  EXPECT_EQ(said({3, 0}).find("stored as"), std::string::npos);
}

TEST(StoredWeights, ThatAreNotThereAreToldWithTheReason) {
  for (const bool is_frozen : {false, true}) {
    ::testing::internal::CaptureStderr();
    with_engine({2, 8, 0, false, false, {{"log.level", "info"}}}, [&](Engine& engine) {
      Unit<AffineImpl> small = engine.unit("small", affine(8, 8, 1, !is_frozen));
      Unit<AffineImpl> head = engine.unit("head", affine(8, 3, 2));
      train_step(engine, head(small(input(2, 8, 0))).pow(2).mean());
    });
    EXPECT_HAS(::testing::internal::GetCapturedStderr(),
               is_frozen ? "quant.frozen_bits = 8 changes nothing: of 2 frozen parameters none has "
                           "two dims and 1024 elements"
                         : "quant.frozen_bits = 8 changes nothing: all 4 parameters are trainable");
  }
}

TEST(StoredWeights, TakeAsManyBytesAsTheFormulaSays) {
  for (const int ranks : {1, 3}) {
    for (const int bits : {4, 8}) {
      with_net({ranks, bits}, [&](Engine& engine, Net&) {
        std::size_t all = 0;
        for (int id = 0; id < engine.num_params(); ++id) {
          const shard::Layout& layout = engine.param(id).layout();
          all += layout.shard_bytes();
          const bool is_stored = id == kFirst || id == kSecond;
          EXPECT_EQ(layout.is_encoded(), is_stored) << engine.param(id).name();
          if (is_stored) {  // whole steps of 1024; 2 bytes of scale for 128 of them
            const std::int64_t share = (layout.numel() + ranks - 1) / ranks;
            const std::int64_t numel = (share + 1023) / 1024 * 1024;
            EXPECT_EQ(layout.shard_numel(), numel);
            EXPECT_EQ(static_cast<std::int64_t>(layout.shard_bytes()),
                      numel * bits / 8 + numel / 128 * 2);
          }
        }
        // Memory of 64 KiB and more is taken in whole pages.
        EXPECT_NEAR(static_cast<double>(
                        engine.runtime().ledger().current_bytes(Tier::kDevice, Role::kShard)),
                    static_cast<double>(all), 2.0 * static_cast<double>(device::page_bytes()));
      });
    }
  }
}

// What a save has of a parameter, whatever it was cut for.
std::map<std::string, std::uint64_t> contents_of(const std::string& save) {
  const CheckpointReader reader(save);
  EXPECT_TRUE(checkpoint::verify(reader).empty());
  std::map<std::string, std::uint64_t> contents;
  for (const StoredParam& param : reader.manifest().params) {
    contents[param.name] = param.tensors.at("value").content;
  }
  return contents;
}

std::string save_of(const Case& how, const std::string& root) {
  std::string path;
  with_net(how, [&](Engine& engine, Net& net) {
    train_step(engine, net.loss(0));
    const std::string saved = engine.save(root);
    if (engine.group().rank() == 0) {
      path = saved;
    }
  });
  return path;
}

// Loads into a model with other values, and trains on.
Outcome resumed(const Case& how, const std::string& save) {
  Outcome outcome;
  with_net(how, [&](Engine& engine, Net& net) {
    for (const Unit<AffineImpl>* unit : {&net.first, &net.second}) {
      change(engine, {(*unit)->weight}, 0, [&] { (*unit)->weight.mul_(-3).add_(1); });
    }
    engine.load(save);
    Outcome mine;
    for (int id = 0; id < engine.num_params(); ++id) {
      mine.values.push_back(engine.full_value(id));
    }
    mine.numbers.push_back(train_step(engine, net.loss(1)).loss);
    if (engine.group().rank() == 0) {
      outcome = std::move(mine);
    }
  });
  return outcome;
}

TEST(StoredWeights, AreSavedAsTheyAreAndLoadedOnAnyNumberOfRanks) {
  const TemporaryDirectory root;
  const DiskDirectory disk;
  const Options nvme = joined({{"place.parameters", "nvme"}}, nvme_in(disk));
  for (const int bits : {4, 8}) {
    std::map<std::string, std::uint64_t> first;
    for (const int from : {1, 2, 3}) {
      const Case how{from, bits, 0, false, false, from == 2 ? nvme : Options()};
      const std::string save =
          save_of(how, (root.path() / std::to_string(10 * bits + from)).string());
      const auto contents = contents_of(save);
      first = first.empty() ? contents : first;
      EXPECT_EQ(contents.at("first.weight"), first.at("first.weight")) << from << " ranks";
      EXPECT_EQ(contents.at("second.weight"), first.at("second.weight")) << from << " ranks";
      for (const int to : {1, 2, 4}) {
        const std::string what = std::to_string(from) + " to " + std::to_string(to) + " ranks, " +
                                 std::to_string(bits) + " bits";
        const Outcome stored = resumed({to, bits}, save);
        const Outcome plain = resumed({to, 0}, save);
        EXPECT_TRUE(at::equal(stored.values[kFirst], as_stored(affine(96, 768, 1)->weight, bits)))
            << what;
        expect_same(stored, plain, what);
        if (from == 1) {  // blocks of other bits are encoded anew
          const Outcome other = resumed({to, 12 - bits}, save);
          EXPECT_TRUE(at::equal(other.values[kSecond], as_stored(plain.values[kSecond], 12 - bits)))
              << what;
        }
      }
      if (HasFailure()) {
        return;
      }
    }
  }
  const std::string plain = save_of({3}, (root.path() / "plain").string());
  const Outcome stored = resumed({2, 4}, plain);
  EXPECT_TRUE(at::equal(stored.values[kSecond], as_stored(affine(768, 103, 2)->weight, 4)));
}

TEST(StoredWeights, ADamagedByteOfASaveIsFound) {
  const TemporaryDirectory root;
  const std::string save = save_of({2, 4}, root.path().string());
  const CheckpointReader before(save);
  const checkpoint::StoredTensor& tensor = before.manifest().params[kFirst].tensors.at("value");
  {
    std::fstream file(before.file_path(tensor.fragments[1]),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(tensor.fragments[1].offset + 5));
    file.put('\x13');
  }
  EXPECT_FALSE(checkpoint::verify(CheckpointReader(save)).empty());
  with_net({1, 4}, [&](Engine& engine, Net&) { EXPECT_SAYS("first.weight", engine.load(save)); });
}

TEST(StoredWeights, ChangesAreEncodedAndOtherBlocksKeepTheirBits) {
  for (const bool is_bf16 : {false, true}) {
    for (const int ranks : {1, 3}) {
      with_net({ranks, 4, 0, false, is_bf16}, [&](Engine& engine, Net& net) {
        const at::Tensor before = engine.full_value(kFirst).clone();
        train_step(engine, net.loss(0));
        change(engine, {net.first->weight}, ranks - 1, [&] { net.first->weight[5][7] = 40; });
        const at::Tensor after = engine.full_value(kFirst);
        const std::int64_t block = (5 * 96 + 7) / 128 * 128;
        at::Tensor expected = before.clone();
        expected[5][7] = 40;
        at::Tensor flat = expected.view({-1});
        flat.narrow(0, block, 128).copy_(as_stored(flat.narrow(0, block, 128), 4));
        EXPECT_TRUE(at::equal(after, expected));
        EXPECT_FALSE(at::equal(after, before));
      });
    }
  }
}

TEST(StoredWeights, CannotBeTrained) {
  with_net({2, 8}, [](Engine& engine, Net& net) {
    EXPECT_SAYS("parameter 'first.weight' is to be trained, and is stored as int8 blocks of 128",
                engine.set_trainable(net.first->weight, true));
    EXPECT_NO_THROW(engine.set_trainable(net.first->bias, true));
    EXPECT_FALSE(engine.param(kFirst).trainable());
    net.second->weight.set_requires_grad(true);
    EXPECT_SAYS("quant.frozen_names", train_step(engine, net.loss(0)));
  });
}

TEST(StoredWeights, AreChosenByNameAndByTheUnit) {
  const auto stored = [](const Options& options) {
    std::string names;
    with_net({1, 4, 0, false, false, options}, [&](Engine& engine, Net& net) {
      net.loss(0);
      for (int id = 0; id < engine.num_params(); ++id) {
        names += engine.param(id).layout().is_encoded() ? engine.param(id).name() + " " : "";
      }
    });
    return names;
  };
  EXPECT_EQ(stored({}), "first.weight second.weight ");
  EXPECT_EQ(stored({{"quant.frozen_names", "sec*"}}), "second.weight ");
  EXPECT_EQ(stored({{"quant.frozen_names", "*.weight"}}), "first.weight second.weight ");
  EXPECT_SAYS("matches none of 8 parameters", stored({{"quant.frozen_names", "third.*"}}));
  EXPECT_SAYS("parameter 'head.weight' is trainable",
              stored({{"quant.frozen_names", "head.weight"}}));
  EXPECT_SAYS("parameter 'first.bias' stays as it is",
              stored({{"quant.frozen_names", "first.bias"}}));

  with_engines(2, [](Engine& engine, comm::Group&) {
    const auto bits = [](const std::string& name, const at::Tensor&) {
      return name == "weight" ? 8 : 0;
    };
    engine.unit("frozen", affine(40, 40, 1, false), {.frozen_bits = bits});
    EXPECT_TRUE(at::equal(engine.full_value(0), as_stored(affine(40, 40, 1)->weight, 8)));
    EXPECT_TRUE(at::equal(engine.full_value(1), affine(40, 40, 1)->bias));
    EXPECT_SAYS("parameter 'trained.weight': frozen_bits = 8, and it is trainable",
                engine.unit("trained", affine(40, 40, 2), {.frozen_bits = bits}));
  });
}

TEST(StoredWeights, ASmallerBlockIsTakenFromTheOptions) {
  with_net({2, 4, 0, false, false, {{"quant.block_numel", "32"}}}, [](Engine& engine, Net&) {
    EXPECT_TRUE(
        at::equal(engine.full_value(kSecond), as_stored(affine(768, 103, 2)->weight, 4, 32)));
    EXPECT_EQ(engine.param(kSecond).layout().shard_numel() % 256, 0);
  });
}

TEST(StoredWeights, InitialValuesByRuleAreEncodedAsTheyAreMade) {
  for (const int ranks : {1, 2}) {
    at::Tensor plain;
    for (const int bits : {0, 4}) {
      Config config = quiet_config();
      config.set("quant.frozen_bits", std::int64_t{bits});
      with_engines(ranks, config, [&](Engine& engine, comm::Group& group) {
        engine.unit("frozen", affine(70, 90, 1, false),
                    {.init = [](const std::string&) { return Init::normal(0.02); }});
        const at::Tensor value = engine.full_value(0);
        if (bits == 0 && group.rank() == 0) {
          plain = value;
        } else if (bits > 0 && group.rank() == 0) {
          EXPECT_TRUE(at::equal(value, as_stored(plain, bits)));
        }
      });
    }
  }
}

}  // namespace
}  // namespace tessera::testing
