// What cannot be had is refused with the arithmetic and a remedy that works.
#include <string>

#include <gtest/gtest.h>

#include "tests/planner/plan_cases.h"

namespace tessera::planner {
namespace {

// The remedy works, and nothing below it does.
void expect_remedy(const ModelShapes& model, MemoryPlanOptions options,
                   std::int64_t MemoryPlanOptions::*budget, const std::string& name) {
  options.*budget = kMiB / 4;
  const std::string text = refusal_of(model, options);
  EXPECT_TRUE(contains(text, name + " allows 256 KiB")) << text;
  EXPECT_TRUE(contains(text, " + ")) << text;
  EXPECT_EQ(contains(text, "--nvme DIR"), !options.has_nvme && name == "memory.host") << text;
  options.*budget = advised_bytes(text);
  EXPECT_EQ(refusal_of(model, options), "");
  options.*budget -= 1;
  EXPECT_NE(refusal_of(model, options), "");
}

TEST(Refusal, ShowsTheSumAndARemedyThatWorks) {
  const ModelShapes model = large_gpt();
  MemoryPlanOptions cpu;
  expect_remedy(small_gpt(64, 4, 3000), cpu, &MemoryPlanOptions::host_bytes, "memory.host");
  for (const bool has_nvme : {false, true}) {
    cpu.has_nvme = has_nvme;
    expect_remedy(model, cpu, &MemoryPlanOptions::host_bytes, "memory.host");
    expect_remedy(model, on_gpu(Tier::kDevice, Tier::kDevice, has_nvme),
                  &MemoryPlanOptions::device_bytes, "memory.device");
    expect_remedy(model, on_gpu({}, {}, has_nvme), &MemoryPlanOptions::device_bytes,
                  "memory.device");
    expect_remedy(model, on_gpu(Tier::kHost, Tier::kHost, has_nvme), &MemoryPlanOptions::host_bytes,
                  "memory.host");
  }
}

TEST(Refusal, OfACpuWithNvmeNamesTheUnitAndABudgetThatWorks) {
  for (const int num_ranks : {1, 2}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const ModelShapes model = small_gpt(64, 4, 3000, dtype);
      MemoryPlanOptions options = with_budget(100000, num_ranks);
      const std::string text = refusal_of(model, options);
      EXPECT_TRUE(contains(text, "arena (unit 'embedding')")) << text;
      EXPECT_TRUE(contains(text, "optimizer buffers")) << text;
      // Buckets grow with the budget, up to a sixteenth of it.
      options.host_bytes = num_ranks * advised_bytes(text);
      EXPECT_TRUE(planned(model, options).uses_nvme);
    }
  }
}

TEST(Refusal, NamesTheBudgetThatBinds) {
  MemoryPlanOptions options = with_budget(kMiB);
  options.device_bytes = kMiB / 4;
  const std::string text = refusal_of(small_gpt(64, 1, 3000), options);
  EXPECT_TRUE(contains(text, "memory.device allows 256 KiB")) << text;
}

TEST(Refusal, KeepsTheBudgetOfNvme) {
  const ModelShapes model = small_gpt(64, 4, 3000);
  MemoryPlanOptions options = with_budget(4 * kMiB);
  const std::int64_t stored = planned(model, options).bytes(Tier::kNvme);
  options.nvme_bytes = stored;
  EXPECT_EQ(planned(model, options).bytes(Tier::kNvme), stored);
  --options.nvme_bytes;
  const std::string text = refusal_of(model, options);
  EXPECT_TRUE(contains(text, "Raise memory.nvme to " + exact_bytes(stored))) << text;
}

TEST(Refusal, NvmeOfAGpuNeedsADirectory) {
  EXPECT_TRUE(contains(refusal_of(large_gpt(), on_gpu({}, Tier::kNvme)), "nvme needs a directory"));
}

TEST(Refusal, Fp32StatesStayWithTheirMasters) {
  const ModelShapes model = large_gpt(DType::kFloat32);
  EXPECT_TRUE(contains(refusal_of(model, on_gpu(Tier::kHost, Tier::kDevice)), "their own masters"));
  EXPECT_TRUE(contains(refusal_of(large_gpt(), on_gpu(Tier::kNvme, Tier::kDevice, true)),
                       "the CPU updates what is on NVMe"));
  for (const Placement& each : planned(model, on_gpu(Tier::kHost)).params) {
    EXPECT_TRUE(each.states != Tier::kDevice || each.parameter == Tier::kDevice);
  }
}

}  // namespace
}  // namespace tessera::planner
