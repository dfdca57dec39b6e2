// Gathered scopes: changes are on every rank and stay, and what must not be changed is named.
#include <gtest/gtest.h>

#include <ATen/core/grad_mode.h>

#include "tessera/optim/optimizer.h"
#include "tests/engine/engine_fixture.h"

namespace tessera::testing {
namespace {

// One of each kind: odd sizes, a transposed, a frozen, an empty and a low-precision weight.
struct KindsImpl : torch::nn::Module {
  explicit KindsImpl(at::ScalarType type) {
    const auto make = [&](const at::Tensor& values) { return values.to(type); };
    odd = register_parameter("odd", make(input(7, 3, 1)));
    transposed = register_parameter("transposed", make(input(3, 7, 2)).t());
    frozen = register_parameter("frozen", make(input(1, 5, 3)), false);
    empty = register_parameter("empty", make(at::empty({0, 3})));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor weight = odd.to(at::kFloat) * transposed.to(at::kFloat);
    return at::linear(x, weight).sum() + frozen.to(at::kFloat).sum() + empty.sum();
  }
  at::Tensor odd;
  at::Tensor transposed;
  at::Tensor frozen;
  at::Tensor empty;
};

bool padding_is_zero(const shard::Param& param) {
  const std::size_t begin =
      static_cast<std::size_t>(param.range().numel) * bytes_of(param.layout().dtype());
  for (std::size_t i = begin; i < param.layout().shard_bytes(); ++i) {
    if (param.shard()[i] != std::byte{0}) {
      return false;
    }
  }
  return true;
}

// By master weights where there are any.
bool master_follows(Engine& engine, int id) {
  const shard::Param& param = engine.param(id);
  const auto master = engine.optimizer().state(id, "master");
  for (std::int64_t i = 0; i < param.range().numel && !master.empty(); ++i) {
    const auto index = static_cast<std::size_t>(i);
    const float value = param.layout().dtype() == DType::kFloat32
                            ? reinterpret_cast<const float*>(param.shard())[index]
                            : to_float(reinterpret_cast<const BFloat16*>(param.shard())[index]);
    if (master[index] != value) {
      return false;
    }
  }
  return true;
}

// Changes of one rank, after steps have been made: they are everywhere, and a step with lr 0, which
// writes parameters from master weights, leaves them.
TEST(GatheredScope, ChangesReachEveryShardAndNoStepRevertsThem) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      with_engines(ranks, adam_config(0), [&](Engine& engine, comm::Group&) {
        const int modifier = ranks - 1;
        auto unit = engine.unit("unit", std::make_shared<KindsImpl>(type));
        train_step(engine, unit(input(2, 3, 0)));
        std::vector<std::uint64_t> versions;
        for (int id = 0; id < engine.num_params(); ++id) {
          versions.push_back(engine.param(id).version());
        }
        change(engine, unit.module()->parameters(), modifier, [&] {
          unit->odd.fill_(0.5);
          unit->transposed.copy_(at::arange(21, at::kFloat).reshape({7, 3}).to(type));
          unit->frozen.mul_(2);
        });
        const auto expect_changed = [&](const char* when) {
          EXPECT_TRUE(at::equal(engine.full_value(0), at::full({7, 3}, 0.5, type))) << when;
          EXPECT_TRUE(
              at::equal(engine.full_value(1), at::arange(21, at::kFloat).reshape({7, 3}).to(type)))
              << when;
          EXPECT_TRUE(at::equal(engine.full_value(2), input(1, 5, 3).to(type) * 2)) << when;
        };
        expect_changed("after the scope");
        for (int id = 0; id < 3; ++id) {
          EXPECT_EQ(engine.param(id).version(), versions[static_cast<std::size_t>(id)] + 1);
          EXPECT_TRUE(padding_is_zero(engine.param(id))) << engine.param(id).name();
          EXPECT_TRUE(master_follows(engine, id)) << engine.param(id).name();
        }
        EXPECT_EQ(engine.param(3).version(), versions[3]) << "nothing of it was changed";
        train_step(engine, unit(input(2, 3, 0)));
        expect_changed("after a step of lr 0");
      });
    }
  }
}

TEST(GatheredScope, IsReadableOnEveryRankAndReleasesAfterwards) {
  with_engines(3, [](Engine& engine, comm::Group&) {
    auto unit = engine.unit("unit", affine(5, 7, 1));
    train_step(engine, unit(input(4, 5, 0)).sum());
    const at::Tensor value = engine.full_value(0);
    const std::uint64_t version = engine.param(0).version();
    {
      auto scope = engine.gathered({unit->weight});
      EXPECT_TRUE(at::equal(unit->weight, value));
      scope.close();
      scope.close();
    }
    EXPECT_ANY_THROW(unit->weight.sum());
    EXPECT_EQ(engine.param(0).version(), version);
  });
}

TEST(GatheredScope, NamesRankAndParameterOfAChangeThatDoesNotCount) {
  for (const int modifier : {-1, 0}) {
    with_engines(3, [&](Engine& engine, comm::Group& group) {
      auto unit = engine.unit("unit", affine(5, 7, 1));
      train_step(engine, unit(input(4, 5, 0)).sum());
      const at::Tensor value = engine.full_value(1);
      auto scope = engine.gathered(unit.module()->parameters(), modifier);
      if (group.rank() == 2) {
        unit->bias.data_ptr<float>()[3] += 1;  // torch does not see this one
      }
      const std::string said = message_of([&] { scope.close(); });
      EXPECT_NE(said.find("'unit.bias' was changed on rank 2"), std::string::npos) << said;
      EXPECT_TRUE(at::equal(engine.full_value(1), value));
      // And training goes on with what counts.
      train_step(engine, unit(input(4, 5, 0)).sum());
    });
  }
}

TEST(GatheredScope, LeftWithAForbiddenChangeFailsAtTheNextCall) {
  for (const int ranks : {1, 2}) {
    with_engines(ranks, [](Engine& engine, comm::Group&) {
      auto unit = engine.unit("unit", affine(5, 7, 1));
      train_step(engine, unit(input(4, 5, 0)).sum());
      {
        const auto scope = engine.gathered({unit->weight});
        const at::NoGradGuard no_grad;
        unit->weight.add_(1);
      }
      EXPECT_SAYS("'unit.weight' was changed", unit(input(4, 5, 0)));
      train_step(engine, unit(input(4, 5, 0)).sum());
    });
  }
}

TEST(GatheredScope, MayHoldScopesAndRunUnits) {
  with_engines(2, [](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("unit", affine(5, 7, 1));
    auto other = engine.unit("other", affine(5, 7, 2));
    const auto loss = [&] { return (unit(input(4, 5, 0)) * other(input(4, 5, 0))).mean(); };
    train_step(engine, loss());
    auto outer = engine.gathered({unit->weight, other->bias});
    auto editing = engine.gathered({unit->weight}, 1);
    auto inner = engine.gathered({unit->weight}, 1);
    EXPECT_SAYS("'unit.weight' is to be changed by rank 0",
                auto refused = engine.gathered({unit->weight}, 0));
    if (group.rank() == 1) {
      const at::NoGradGuard no_grad;
      unit->weight.fill_(0.25);
    }
    inner.close();
    {
      // The change counts from the inner scope's end on, for units that run here, too.
      const at::NoGradGuard no_grad;
      const at::Tensor expected =
          at::linear(input(4, 5, 0), at::full({7, 5}, 0.25), engine.full_value(1));
      EXPECT_TRUE(at::equal(unit(input(4, 5, 0)), expected));
    }
    editing.close();
    outer.close();
    EXPECT_TRUE(at::equal(engine.full_value(0), at::full({7, 5}, 0.25)));
    train_step(engine, loss());
    EXPECT_ANY_THROW(unit->weight.sum());
  });
}

TEST(GatheredScope, MayChangeInitialValuesWhileTheModelIsBuilt) {
  for (const int ranks : {1, 2, 3}) {
    with_engines(ranks, [](Engine& engine, comm::Group& group) {
      auto first = engine.unit("first", affine(5, 6, 1));
      {
        auto scope = engine.gathered({first->weight}, 0);
        auto reading = engine.gathered({first->weight});
        if (group.rank() == 0) {
          const at::NoGradGuard no_grad;
          first->weight.fill_(0.125);
        }
        reading.close();
        scope.close();
      }
      auto second = engine.unit("second", affine(6, 2, 2));
      auto scope = engine.gathered({second->bias});
      EXPECT_SAYS("close that scope first", second(input(4, 6, 0)));
      scope.close();
      const auto plain = affine(6, 2, 2);
      const at::Tensor y = second(first(input(4, 5, 0)));
      const at::Tensor x =
          at::linear(input(4, 5, 0), at::full({6, 5}, 0.125), affine(5, 6, 1)->bias);
      EXPECT_TRUE(at::allclose(y, plain->forward(x)));
      train_step(engine, y.sum());
    });
  }
}

TEST(GatheredScope, OfATiedWeightChangesItForAllItsUnits) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    auto first = affine(6, 6, 1);
    auto second = affine(6, 6, 2);
    second->weight = second->register_parameter("tied", first->weight);
    auto a = engine.unit("a", first);
    auto b = engine.unit("b", second);
    train_step(engine, b(a(input(4, 6, 0))).mean());
    change(engine, {first->weight, second->weight}, 0, [&] { second->weight.zero_(); });
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(a(input(4, 6, 0))[0], engine.full_value(id_of(engine, "a.bias"))));
    EXPECT_TRUE(at::equal(b(input(4, 6, 0))[0], engine.full_value(id_of(engine, "b.bias"))));
  });
}

TEST(GatheredScope, SendsOnlyWhatWasChanged) {
  with_engines(2, [](Engine& engine, comm::Group& group) {
    auto unit = engine.unit("unit", affine(64, 64, 1));
    train_step(engine, unit(input(4, 64, 0)).sum());
    auto scope = engine.gathered(unit.module()->parameters(), 0);
    const std::uint64_t before = group.wire_bytes().payload;
    if (group.rank() == 0) {
      const at::NoGradGuard no_grad;
      unit->bias.add_(1);
    }
    scope.close();
    // The flags of two parameters, and the bias.
    EXPECT_LE(group.wire_bytes().payload - before, 2U * 8U + 64U * 4U);
  });
}

// A unit that throws inside a scope abandons the step, not the scope.
TEST(GatheredScope, SurvivesAnExceptionInAUnit) {
  with_engines(2, [](Engine& engine, comm::Group& group) {
    struct ThrowingImpl : AffineImpl {
      ThrowingImpl() : AffineImpl(5, 6, 1) {}
      at::Tensor forward(const at::Tensor& x) {
        if (throws) {
          throw std::runtime_error("the user's forward failed");
        }
        return AffineImpl::forward(x);
      }
      bool throws = false;
    };
    auto unit = engine.unit("unit", std::make_shared<ThrowingImpl>());
    train_step(engine, unit(input(4, 5, 0)).sum());
    auto scope = engine.gathered({unit->weight}, 0);
    if (group.rank() == 0) {
      const at::NoGradGuard no_grad;
      unit->weight.fill_(2);
    }
    unit->throws = true;
    EXPECT_SAYS("the user's forward failed", unit(input(4, 5, 0)));
    unit->throws = false;
    scope.close();
    EXPECT_TRUE(at::equal(engine.full_value(0), at::full({6, 5}, 2.0F)));
    train_step(engine, unit(input(4, 5, 0)).sum());
  });
}

TEST(WritesOutsideOfScopes, AreAnErrorThatNamesTheParameter) {
  with_engines(2, [](Engine& engine, comm::Group&) {
    struct WritingImpl : AffineImpl {
      WritingImpl() : AffineImpl(5, 6, 1) {}
      at::Tensor forward(const at::Tensor& x) {
        if (writes) {
          const at::NoGradGuard no_grad;
          weight.add_(1);
        }
        return AffineImpl::forward(x);
      }
      bool writes = false;
    };
    auto unit = engine.unit("unit", std::make_shared<WritingImpl>());
    const at::Tensor before = engine.full_value(0);
    unit->writes = true;
    EXPECT_SAYS("parameter 'unit.weight' was changed in place", unit(input(4, 5, 0)));
    unit->writes = false;
    EXPECT_TRUE(at::equal(engine.full_value(0), before));
  });
}

}  // namespace
}  // namespace tessera::testing
