#include "tessera/optim/sub_group.h"

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/shard/shard_store.h"
#include "tessera/tier/io_engine.h"

namespace tessera::optim {
namespace {

Placement placement_on(bool parameter, bool gradient, bool states) {
  const auto tier = [](bool is_on_nvme) { return is_on_nvme ? Tier::kNvme : Tier::kDevice; };
  return {tier(parameter), tier(gradient), tier(states), Updater::kCpu};
}

SubGroupParam nvme_param(std::int64_t shard_numel, DType dtype = DType::kFloat32) {
  return {shard_numel, dtype, true, placement_on(true, true, true)};
}

// "p0[0+100] p1[0+50] | p2[0+2048]"
std::string text_of(const SubGroupPlan& plan) {
  std::string text;
  for (const SubGroup& group : plan.groups) {
    text += text.empty() ? "" : " | ";
    for (const SubGroupPiece& piece : group.pieces) {
      text += (text.empty() || text.back() == ' ' ? "p" : " p") + std::to_string(piece.param) +
              "[" + std::to_string(piece.begin) + "+" + std::to_string(piece.numel) + "]";
    }
  }
  return text;
}

TEST(SubGroup, CollectsNeighboursAndCutsWhatIsLarger) {
  const std::vector<SubGroupParam> params = {nvme_param(100), nvme_param(50),  nvme_param(5000),
                                             nvme_param(900), nvme_param(100), nvme_param(2048)};
  EXPECT_EQ(text_of(plan_sub_groups(params, 2048, 2)),
            "p0[0+100] p1[0+50] | p2[0+2048] | p2[2048+2048] | p2[4096+904] p3[0+900] p4[0+100] | "
            "p5[0+2048]");
}

TEST(SubGroup, LeavesOutWhatIsFrozenAndWhatIsEmpty) {
  std::vector<SubGroupParam> params = {nvme_param(8), nvme_param(16), nvme_param(0),
                                       nvme_param(24)};
  params[1].trainable = false;
  const SubGroupPlan plan = plan_sub_groups(params, 2048, 2);
  EXPECT_EQ(text_of(plan), "p0[0+8] p3[0+24]");
  EXPECT_EQ(plan.states_bytes, (std::vector<std::size_t>{8192, 0, 0, 8192}));
}

TEST(SubGroup, NeverMixesWhatIsOnNvme) {
  std::vector<SubGroupParam> params(8, nvme_param(16));
  for (std::size_t i = 0; i < params.size(); ++i) {
    params[i].placement = placement_on(i >= 2, i >= 4, i < 6);
  }
  EXPECT_EQ(text_of(plan_sub_groups(params, 2048, 2)),
            "p0[0+16] p1[0+16] | p2[0+16] p3[0+16] | p4[0+16] p5[0+16] | p6[0+16] p7[0+16]");
}

TEST(SubGroup, BeginsAnewWhereStatesOnNvmeDoNotFollow) {
  std::vector<SubGroupParam> params(3, nvme_param(16));
  params[0].states_offset = 0;
  params[1].states_offset = 1 << 20;  // unfrozen later
  params[2].states_offset = 8192;
  const SubGroupPlan plan = plan_sub_groups(params, 2048, 2);
  EXPECT_EQ(text_of(plan), "p0[0+16] | p1[0+16] | p2[0+16]");
  EXPECT_EQ(plan.groups[1].states_offset, std::uint64_t{1} << 20);
}

TEST(SubGroup, GivesLowPrecisionAMasterAmongItsStates) {
  // 2048 elements: 8192 bytes in fp32, 4096 in bf16.
  const SubGroupPlan fp32 = plan_sub_groups({nvme_param(2048)}, 2048, 2);
  EXPECT_EQ(fp32.nvme_states_bytes, 2U * 8192);
  EXPECT_EQ(fp32.max_lease_bytes, 4U * 8192);  // two states, parameter, gradient
  const SubGroupPlan bf16 = plan_sub_groups({nvme_param(2048, DType::kBFloat16)}, 2048, 2);
  EXPECT_EQ(bf16.nvme_states_bytes, 3U * 8192);
  EXPECT_EQ(bf16.max_lease_bytes, 4U * 8192 + 4096);
  // Read and written: 12 bytes per element each, and 4 or 2 for a parameter that is written.
  EXPECT_EQ(fp32.states_read_bytes + fp32.parameters_read_bytes, 12U * 2048);
  EXPECT_EQ(fp32.states_written_bytes + fp32.parameters_written_bytes, 12U * 2048);
  EXPECT_EQ(bf16.states_read_bytes, 12U * 2048);
  EXPECT_EQ(bf16.parameters_read_bytes, 0U);
  EXPECT_EQ(bf16.states_written_bytes, 12U * 2048);
  EXPECT_EQ(bf16.parameters_written_bytes, 2U * 2048);
}

TEST(SubGroup, NeedsNoLeaseForWhatIsInMemory) {
  const SubGroupPlan plan = plan_sub_groups({{5000}}, 2048, 2);
  EXPECT_EQ(plan.max_lease_bytes, 0U);
  EXPECT_EQ(plan.nvme_states_bytes, 0U);
  EXPECT_EQ(plan.states_bytes[0], 2 * tier::whole_blocks(4 * 5000));
}

TEST(SubGroup, RefusesSizesThatAreNotWholeBlocks) {
  for (const std::int64_t numel : {std::int64_t{0}, std::int64_t{-2048}, std::int64_t{1000}}) {
    try {
      plan_sub_groups({nvme_param(16)}, numel, 2);
      FAIL() << "expected ConfigError";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("sub-groups of " + std::to_string(numel)),
                std::string::npos)
          << error.what();
    }
  }
}

TEST(SubGroup, KeepsAllWhereAllFitAndLeavesThreeLeasesOrHalfOfThemElse) {
  const std::vector<SubGroupParam> params(10, nvme_param(2048));
  const SubGroupPlan plan = plan_sub_groups(params, 2048, 2);
  const std::size_t lease = plan.max_lease_bytes;
  ASSERT_EQ(plan.groups.size(), 10U);
  EXPECT_EQ(num_kept_groups(plan, 10 * lease), 10U);
  EXPECT_EQ(num_kept_groups(plan, 10 * lease - 1), 5U);
  EXPECT_EQ(num_kept_groups(plan, 8 * lease), 4U);
  EXPECT_EQ(num_kept_groups(plan, 5 * lease), 2U);
  EXPECT_EQ(num_kept_groups(plan, 3 * lease), 0U);
  EXPECT_EQ(num_kept_groups(plan, lease), 0U);
}

struct Range {
  std::size_t begin = 0;
  std::size_t bytes = 0;
};

// What lies in a lease, in its order.
std::vector<Range> parts_of_lease(const SubGroup& group, std::size_t num_tensors) {
  std::vector<Range> parts;
  for (const SubGroupPiece& piece : group.pieces) {
    if (group.states_on_nvme()) {
      parts.push_back({piece.states_in_lease, num_tensors * piece.tensor_bytes});
    }
  }
  for (const SubGroupPiece& piece : group.pieces) {
    if (group.parameters_on_nvme()) {
      parts.push_back({piece.parameter_in_lease, piece.parameter_bytes});
    }
  }
  for (const SubGroupPiece& piece : group.pieces) {
    if (group.gradients_on_nvme()) {
      parts.push_back({piece.gradient_in_lease, piece.tensor_bytes});
    }
  }
  return parts;
}

TEST(SubGroup, CoversEveryElementOnceInOrderWithoutHoles) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const DType dtype = round % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    const int num_states = static_cast<int>(random() % 3);
    const std::int64_t limit = shard::kShardStep * (1 + static_cast<std::int64_t>(random() % 4));
    std::vector<SubGroupParam> params(1 + random() % 12);
    for (SubGroupParam& param : params) {
      param.shard_numel = 4 * static_cast<std::int64_t>(random() % 5000);
      param.dtype = dtype;
      param.trainable = random() % 5 != 0;
      const bool parameter = random() % 3 != 0;
      const bool gradient = random() % 3 != 0;
      param.placement = placement_on(parameter, gradient, random() % 3 != 0);
    }
    const SubGroupPlan plan = plan_sub_groups(params, limit, num_states);
    const std::size_t num_tensors = num_state_tensors(dtype, num_states);
    std::vector<std::int64_t> covered(params.size(), 0);
    int last = 0;
    std::uint64_t states_end = 0;
    for (const SubGroup& group : plan.groups) {
      std::int64_t numel = 0;
      std::size_t states_bytes = 0;
      for (const SubGroupPiece& piece : group.pieces) {
        const auto id = static_cast<std::size_t>(piece.param);
        EXPECT_GE(piece.param, last);
        last = piece.param;
        EXPECT_TRUE(params[id].trainable);
        EXPECT_EQ(piece.begin % shard::kShardStep, 0);
        EXPECT_EQ(piece.begin, covered[id]);
        covered[id] += piece.numel;
        numel += piece.numel;
        if (group.states_on_nvme()) {
          EXPECT_EQ(piece.states_offset, states_end);
          states_end += num_tensors * piece.tensor_bytes;
          states_bytes += num_tensors * piece.tensor_bytes;
        }
      }
      EXPECT_EQ(group.numel, numel);
      EXPECT_LE(numel, limit);
      EXPECT_EQ(group.states_bytes, states_bytes);
      std::size_t end = 0;
      for (const Range& part : parts_of_lease(group, num_tensors)) {
        EXPECT_EQ(part.begin, end);
        EXPECT_EQ(part.begin % tier::kBlockBytes, 0U);
        end += part.bytes;
      }
      EXPECT_EQ(group.lease_bytes, end);
      EXPECT_LE(end, plan.max_lease_bytes);
    }
    EXPECT_EQ(plan.nvme_states_bytes, states_end);
    for (std::size_t id = 0; id < params.size(); ++id) {
      EXPECT_EQ(covered[id], params[id].trainable ? params[id].shard_numel : 0);
    }
  }
}

}  // namespace
}  // namespace tessera::optim
