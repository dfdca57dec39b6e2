// What a checkpoint holds besides parameters: buffers, random generators, states of what was
// frozen, names of tied weights; and calls at the wrong time, which are named and change nothing.
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/dropout.h>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/core/error.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/expert_training.h"
#include "tests/support/process.h"
#include "tests/support/temporary_directory.h"

namespace tessera::testing {
namespace {

// Every forward moves its running mean and counts itself; of several types, one of which
// checkpoints have no name for.
struct WatchingImpl : torch::nn::Module {
  explicit WatchingImpl(int seed) {
    weight = register_parameter("weight", input(4, 4, seed) * 0.5);
    mean = register_buffer("mean", at::zeros({4}));
    count = register_buffer("count", at::zeros({}, at::kLong));
    seen = register_buffer("seen", at::zeros({3}, at::kBool));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    mean.mul_(0.9).add_(x.detach().mean(0), 0.1);
    count.add_(1);
    seen[count.item<std::int64_t>() % 3] = true;
    const at::AutoGradMode grad(true);
    return at::linear(x, weight) + mean;
  }
  at::Tensor weight;
  at::Tensor mean;
  at::Tensor count;
  at::Tensor seen;
};

struct BorrowingImpl : torch::nn::Module {
  explicit BorrowingImpl(const at::Tensor& other) {
    borrowed = register_parameter("borrowed", other, other.requires_grad());
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, borrowed); }
  at::Tensor borrowed;
};

std::vector<at::Tensor> values(Engine& engine) {
  std::vector<at::Tensor> all;
  for (int id = 0; id < engine.num_params(); ++id) {
    all.push_back(engine.full_value(id));
  }
  return all;
}

bool equal(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  bool same = left.size() == right.size();
  for (std::size_t i = 0; same && i < left.size(); ++i) {
    same = at::equal(left[i], right[i]);
  }
  return same;
}

TEST(CheckpointState, BuffersAreEachRanksOwn) {
  const MemoryDirectory folder;
  const std::string root = folder.path().string();
  for (const int ranks : {1, 3}) {
    const auto train = [&](bool resumes) {
      std::vector<at::Tensor> result;
      with_engines(ranks, adam_config(0.05), [&](Engine& engine, comm::Group& group) {
        auto watching = engine.unit("watching", std::make_shared<WatchingImpl>(3));
        const auto step = [&] {
          // Other data on every rank, so that their buffers differ.
          train_step(engine, watching(input(5, 4, group.rank() + 1)).pow(2).mean());
        };
        for (int i = 0; !resumes && i < 4; ++i) {
          step();
        }
        if (resumes) {
          EXPECT_EQ(engine.load(root).step, 4);
          EXPECT_EQ(watching->count.item<std::int64_t>(), 4);
        } else {
          engine.save(root);
        }
        for (int i = 0; i < 5; ++i) {
          step();
        }
        EXPECT_EQ(watching->count.item<std::int64_t>(), 9);
        EXPECT_TRUE(watching->seen.all().item<bool>());
        std::vector<at::Tensor> all = values(engine);
        if (group.rank() == group.size() - 1) {
          all.push_back(watching->mean.clone());
          result = std::move(all);
        }
      });
      return result;
    };
    const std::vector<at::Tensor> whole = train(false);
    EXPECT_TRUE(equal(train(true), whole)) << ranks << " ranks";
  }
}

TEST(CheckpointState, RandomNumbersGoOnWhereTheyWere) {
  const MemoryDirectory folder;
  const std::string root = folder.path().string();
  const auto train = [&](bool resumes) {
    std::vector<at::Tensor> result;
    at::manual_seed(resumes ? 99 : 5);
    with_engines(1, [&](Engine& engine, comm::Group&) {
      auto layer = engine.unit("layer", affine(4, 4, 1));
      const auto step = [&] {
        train_step(engine, at::dropout(layer(input(8, 4, 2)), 0.5, true).pow(2).mean() * 0.1);
      };
      if (resumes) {
        engine.load(root);
      } else {
        step();
        engine.save(root);
      }
      step();
      step();
      result = values(engine);
    });
    return result;
  };
  const std::vector<at::Tensor> whole = train(false);
  EXPECT_TRUE(equal(train(true), whole));
}

TEST(CheckpointState, WhatWasFrozenLaterKeepsItsStates) {
  const MemoryDirectory folder;
  const std::string root = folder.path().string();
  const auto train = [&](bool resumes) {
    std::vector<at::Tensor> result;
    with_engines(2, semantics_config("adamw"), [&](Engine& engine, comm::Group& group) {
      const auto first_module = affine(4, 4, 1, /*trainable=*/true);
      auto first = engine.unit("first", first_module);
      auto second = engine.unit("second", affine(4, 4, 2));
      const auto step = [&] {
        train_step(engine, second(at::tanh(first(input(3, 4, group.rank())))).pow(2).mean());
      };
      if (!resumes) {
        step();
        step();
      }
      engine.set_trainable(first->weight, false);
      if (resumes) {
        EXPECT_TRUE(engine.load(root).notes.size() <= 1);
      } else {
        step();
        engine.save(root);
      }
      step();
      engine.set_trainable(first->weight, true);
      step();
      step();
      std::vector<at::Tensor> all = values(engine);
      if (group.rank() == 0) {
        result = std::move(all);
      }
    });
    return result;
  };
  const std::vector<at::Tensor> whole = train(false);
  EXPECT_TRUE(equal(train(true), whole));
}

// Five elements on three ranks: one has none of them, and none begins where a word of 8 bytes does.
TEST(CheckpointState, ARankMayHaveNothingOfAParameter) {
  const MemoryDirectory folder;
  std::vector<at::Tensor> saved;
  for (const int ranks : {3, 4, 1}) {
    with_engines(ranks, adam_config(0.05), [&](Engine& engine, comm::Group& group) {
      auto layer = engine.unit("layer", affine(3, 5, 1));
      if (ranks == 3) {
        train_step(engine, layer(input(4, 3, group.rank())).pow(2).mean());
        engine.save(folder.path().string());
      } else {
        engine.load(folder.path().string());
      }
      const std::vector<at::Tensor> all = values(engine);
      if (group.rank() == 0 && ranks == 3) {
        saved = all;
      } else if (ranks != 3) {
        EXPECT_TRUE(equal(all, saved)) << ranks << " ranks";
      }
    });
  }
}

TEST(CheckpointState, ATiedWeightIsFoundByBothOfItsNames) {
  const MemoryDirectory folder;
  with_engines(2, [&](Engine& engine, comm::Group& group) {
    const auto in = affine(4, 4, 1);
    auto first = engine.unit("first", in);
    auto second = engine.unit("second", std::make_shared<BorrowingImpl>(in->weight));
    train_step(engine, second(first(input(3, 4, 0))).pow(2).mean());
    engine.save(folder.path().string());
    if (group.rank() == 0) {
      const checkpoint::CheckpointReader reader(folder.path().string());
      EXPECT_NE(reader.manifest().find("first.weight"), nullptr);
      EXPECT_EQ(reader.manifest().find("second.borrowed"), reader.manifest().find("first.weight"));
    }
  });
}

TEST(CheckpointState, ExpertsThatSomeRanksUseGoOn) {
  const MemoryDirectory folder;
  ExpertRun run;
  run.steps = 6;
  const auto train = [&](bool resumes) {
    std::vector<at::Tensor> result;
    with_engines(3, config_of(run), [&](Engine& engine, comm::Group& group) {
      auto layers = expert_layers([&](const std::string& name, int seed) {
        return engine.unit(name, expert_layer(run, seed));
      });
      if (resumes) {
        engine.load(folder.path().string());
      }
      for (int step = static_cast<int>(engine.num_steps()); step < 8; ++step) {
        if (step == 3 && !resumes) {
          engine.start_save(folder.path().string());
        }
        train_step(engine, expert_loss(run, layers, step, group.rank()));
      }
      if (const auto saved = engine.finish_save()) {
        EXPECT_EQ(saved->failure, "");
      }
      std::vector<at::Tensor> all = values(engine);
      if (group.rank() == 0) {
        result = std::move(all);
      }
    });
    return result;
  };
  const std::vector<at::Tensor> whole = train(false);
  EXPECT_TRUE(equal(train(true), whole));
}

TEST(CheckpointState, AnEditBesideASaveIsNotInIt) {
  const MemoryDirectory folder;
  with_engines(2, [&](Engine& engine, comm::Group&) {
    auto layer = engine.unit("layer", affine(4, 4, 1));
    train_step(engine, layer(input(3, 4, 0)).pow(2).mean());
    const at::Tensor before = engine.full_value(0);
    engine.start_save(folder.path().string(), {.memory_bytes = 0});
    change(engine, {layer->weight}, 1, [&] { layer->weight.fill_(7); });
    const auto saved = engine.finish_save();
    ASSERT_TRUE(saved);
    EXPECT_EQ(saved->failure, "");
    EXPECT_TRUE(at::equal(engine.full_value(0), at::full({4, 4}, 7.0)));
    engine.load(folder.path().string());
    EXPECT_TRUE(at::equal(engine.full_value(0), before));
    // What was gathered before the load is no longer read.
    EXPECT_FALSE(at::equal(layer(input(3, 4, 0)), at::full({3, 4}, 7.0)));
  });
}

TEST(CheckpointState, CallsAtTheWrongTimeAreNamedAndChangeNothing) {
  const MemoryDirectory folder;
  const std::string root = folder.path().string();
  with_engines(2, [&](Engine& engine, comm::Group&) {
    auto layer = engine.unit("layer", affine(4, 4, 1));
    const auto loss = [&] { return layer(input(3, 4, 0)).pow(2).mean(); };
    train_step(engine, loss());
    EXPECT_SAYS("neither a checkpoint", engine.load(root));
    EXPECT_SAYS("keep=0", engine.save(root, {.keep = 0}));
    engine.backward(loss());
    EXPECT_SAYS("in the middle of a step", engine.save(root));
    EXPECT_SAYS("in the middle of a step", engine.load(root));
    engine.step();
    {
      GatheredScope scope = engine.gathered({layer->weight}, 0);
      EXPECT_SAYS("inside a gathered scope", engine.save(root));
      scope.close();
    }
    EXPECT_FALSE(engine.take_save_outcome());
    EXPECT_FALSE(engine.finish_save());
    engine.save(root);
    GatheredScope reading = engine.gathered({layer->weight});
    EXPECT_SAYS("inside a gathered scope", engine.load(root));
    reading.close();
    EXPECT_EQ(engine.load(root).step, 2);
    train_step(engine, loss());
    EXPECT_EQ(engine.num_steps(), 3);
  });
  EXPECT_EQ(checkpoint::list_saves(root).size(), 1U);
}

TEST(CheckpointState, ASaveByOneRankAloneIsNamedOnAll) {
  const MemoryDirectory folder;
  const auto failures = failures_of(2, quiet_config(), [&](Engine& engine, comm::Group& group) {
    auto layer = engine.unit("layer", affine(4, 4, 1));
    train_step(engine, layer(input(3, 4, 0)).pow(2).mean());
    if (group.rank() == 0) {
      engine.save(folder.path().string());
    }
    train_step(engine, layer(input(3, 4, 0)).pow(2).mean());
  });
  for (const std::exception_ptr& failure : failures) {
    ASSERT_NE(failure, nullptr);
    EXPECT_SAYS("save", std::rethrow_exception(failure));
  }
  EXPECT_TRUE(checkpoint::list_saves(folder.path().string()).empty());
}

void damage_value_of_first_param(const std::string& save) {
  const checkpoint::CheckpointReader reader(save);
  const auto offset = reader.manifest().params[0].tensors.at("value").fragments[0].offset;
  const auto file = std::filesystem::path(save) / "rank-00000.safetensors";
  std::FILE* const stream = std::fopen(file.c_str(), "r+b");
  std::fseek(stream, static_cast<long>(offset), SEEK_SET);
  std::fputc(0x5a, stream);
  std::fclose(stream);
}

TEST(CheckpointState, ALoadThatFailsHalfWayIsTheLastCallButForAnother) {
  const MemoryDirectory folder;
  const std::string root = folder.path().string();
  with_engines(1, [&](Engine& engine, comm::Group&) {
    auto layer = engine.unit("layer", affine(4, 4, 1));
    const auto loss = [&] { return layer(input(3, 4, 0)).pow(2).mean(); };
    const std::string good = engine.save(root);
    train_step(engine, loss());
    const std::string bad = engine.save(root);
    damage_value_of_first_param(bad);
    EXPECT_SAYS("has the checksum", engine.load(bad));
    EXPECT_SAYS("parameters are of two models", loss());
    EXPECT_SAYS("neither a checkpoint", engine.load(root + "/nothing"));
    EXPECT_SAYS("parameters are of two models", loss());
    EXPECT_EQ(engine.load(good).step, 0);
    train_step(engine, loss());
  });
}

// What the next one leaves out may have bytes of the one that has failed.
TEST(CheckpointState, AfterALoadThatFailedHalfWayNothingMayBeLeftOut) {
  const MemoryDirectory folder;
  const std::string one = folder.path() / "one";
  const std::string two = folder.path() / "two";
  with_engines(1, [&](Engine& engine, comm::Group&) {
    engine.unit("second", affine(4, 4, 2));
    engine.save(one);
  });
  with_engines(1, [&](Engine& engine, comm::Group&) {
    auto first = engine.unit("first", affine(4, 4, 1));
    auto second = engine.unit("second", affine(4, 4, 2));
    const auto loss = [&] { return second(first(input(3, 4, 0))).pow(2).mean(); };
    const std::string good = engine.save(two);
    train_step(engine, loss());
    const std::string bad = engine.save(two);
    damage_value_of_first_param(bad);
    EXPECT_SAYS("has the checksum", engine.load(bad));
    EXPECT_SAYS("it has no parameter \"first.weight\"", engine.load(one));
    EXPECT_SAYS("cannot be loaded in part, because a load of " + bad,
                engine.load(one, {.partial = true}));
    EXPECT_SAYS("parameters are of two models", loss());
    EXPECT_EQ(engine.load(good, {.partial = true}).step, 0) << "which leaves nothing out";
    train_step(engine, loss());
    EXPECT_FALSE(engine.load(one, {.partial = true}).notes.empty());
  });
}

// Both read the same tensor, and each compares what it has read.
TEST(CheckpointState, AModelThatIsNotTiedTakesWhatWasTiedTwice) {
  const MemoryDirectory folder;
  const std::string root = folder.path().string();
  for (const int bits : {0, 8}) {
    at::Tensor saved;
    Config config = quiet_config();
    config.set("quant.frozen_bits", std::int64_t{bits});
    with_engines(2, config, [&](Engine& engine, comm::Group& group) {
      const auto in = affine(64, 64, 1, /*trainable=*/false);
      engine.unit("first", in);
      engine.unit("second", std::make_shared<BorrowingImpl>(in->weight));
      engine.save(root);
      const at::Tensor value = engine.full_value(id_of(engine, "first.weight"));
      if (group.rank() == 0) {
        EXPECT_EQ(engine.param(id_of(engine, "first.weight")).layout().is_encoded(), bits > 0);
        saved = value;
      }
    });
    for (const int ranks : {2, 3}) {
      with_engines(ranks, [&](Engine& engine, comm::Group&) {
        engine.unit("first", affine(64, 64, 3, /*trainable=*/false));
        engine.unit("second", std::make_shared<BorrowingImpl>(input(64, 64, 4)));
        engine.load(root, {.partial = true});
        for (const char* name : {"first.weight", "second.borrowed"}) {
          EXPECT_TRUE(at::equal(engine.full_value(id_of(engine, name)), saved))
              << name << " of " << bits << " bits on " << ranks << " ranks";
        }
      });
    }
  }
}

std::shared_ptr<AffineImpl> converted(const std::shared_ptr<AffineImpl>& module,
                                      at::ScalarType type) {
  module->to(type);
  module->weight = module->named_parameters()["weight"];
  module->bias = module->named_parameters()["bias"];
  return module;
}

Config config_in(const char* precision) {
  Config config = adam_config(0.01);
  config.apply_flag(std::string("precision=") + precision);
  return config;
}

// Loss weights of hundreds and a scale of 65536 overflow fp16, unless ranks agree on what divides
// weights: as a run does that begins in fp16.
TEST(CheckpointState, ASaveOfAnotherTypeGoesOnInFp16WithScalesThatBeginAnew) {
  const std::vector<std::pair<const char*, at::ScalarType>> types = {{"fp32", at::kFloat},
                                                                     {"bf16", at::kBFloat16}};
  for (const auto& [name, type] : types) {
    SCOPED_TRACE(name);
    const MemoryDirectory folder;
    const auto train = [&](const char* precision, at::ScalarType dtype, bool loads) {
      with_engines(2, config_in(precision), [&](Engine& engine, comm::Group& group) {
        auto layer = engine.unit("layer", converted(affine(4, 4, 1), dtype));
        const auto step = [&] {
          const at::Tensor loss = layer(input(3, 4, group.rank()).to(dtype)).pow(2).mean();
          return train_step(engine, loss.to(at::kFloat), 480);
        };
        if (loads) {
          engine.load(folder.path().string());
        }
        for (int i = 0; i < 3; ++i) {
          const StepResult result = step();
          EXPECT_FALSE(result.skipped) << "step " << result.step;
          EXPECT_EQ(result.loss_scale, dtype == at::kHalf ? 65536 : 1) << "step " << result.step;
          EXPECT_EQ(result.weight, 960);
        }
        engine.save(folder.path().string());
      });
    };
    train(name, type, /*loads=*/false);
    train("fp16", at::kHalf, /*loads=*/true);
  }
}

// Whatever number the scale is, and though no step has used it since it became that.
TEST(CheckpointState, AScaleOfOneInFp16GoesOnAsThat) {
  const MemoryDirectory folder;
  const auto train = [&](const char* initial, bool loads) {
    std::vector<at::Tensor> result;
    Config config = config_in("fp16");
    config.apply_flag(std::string("loss_scale.initial=") + initial);
    config.apply_flag("loss_scale.window=2");
    with_engines(2, config, [&](Engine& engine, comm::Group& group) {
      auto layer = engine.unit("layer", converted(affine(4, 4, 1), at::kHalf));
      if (loads) {
        engine.load(folder.path().string());
      } else {
        engine.save(folder.path().string());
      }
      for (const double scale : {1, 1, 2, 2, 4}) {
        const at::Tensor x = input(3, 4, group.rank()).to(at::kHalf);
        const StepResult step = train_step(engine, layer(x).pow(2).mean().to(at::kFloat));
        EXPECT_EQ(step.loss_scale, scale) << initial;
      }
      const std::vector<at::Tensor> all = values(engine);
      if (group.rank() == 0) {
        result = all;
      }
    });
    return result;
  };
  const std::vector<at::Tensor> whole = train("1", /*loads=*/false);
  EXPECT_TRUE(equal(train("65536", /*loads=*/true), whole));
}

// With nothing but the manifest and the stock package.
TEST(CheckpointState, ThePackageSafetensorsOfPythonReadsEveryTensorOfTheManifest) {
  const auto check = [](const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {"/usr/bin/env", "python3",
                                        TESSERA_SOURCE_DIR "/tests/engine/safetensors_check.py"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return run_process(command);
  };
  if (const ProcessResult found = check({"available"}); found.exit_code != 0) {
    GTEST_SKIP() << found.out << found.err;
  }
  const MemoryDirectory folder;
  for (const int ranks : {1, 2}) {
    std::string path;
    with_engines(ranks, config_in("bf16"), [&](Engine& engine, comm::Group& group) {
      auto layer = engine.unit("layer", converted(affine(30, 20, 1), at::kBFloat16));
      train_step(engine, layer(input(3, 30, group.rank()).to(at::kBFloat16)).pow(2).mean());
      const std::string saved = engine.save(folder.path().string());
      if (group.rank() == 0) {
        path = saved;
      }
    });
    const ProcessResult result = check({"check", path});
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
    // Value, master and two moments of two parameters on each rank, and its generator.
    EXPECT_NE(result.out.find(std::to_string(9 * ranks) + " tensors"), std::string::npos)
        << result.out;
  }
}

}  // namespace
}  // namespace tessera::testing
