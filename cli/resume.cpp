#include "cli/resume.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string_view>

#include <fmt/format.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/save_directory.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

constexpr const char* kSources = "data.sources";
constexpr const char* kNextBatch = "data.next_batch";
constexpr std::size_t kShownSources = 200;
// A run that was killed just now is not gone at once.
constexpr std::chrono::seconds kLockPatience(3);

// What the user calls a value; others are called by their keys.
struct NamedKey {
  std::string_view key;
  std::string_view name;
};
constexpr std::array kNamedKeys = {
    NamedKey{"model.width", "--width"},
    NamedKey{"model.layers", "--layers"},
    NamedKey{"model.heads", "--heads"},
    NamedKey{"model.vocabulary", "--vocab"},
    NamedKey{"model.sequence", "--seq"},
    NamedKey{"model.gelu", "the activation (of --model)"},
    NamedKey{"model.tie_head", "--tie-head"},
    NamedKey{"model.adapter_rank", "--adapters"},
    NamedKey{"model.adapter_alpha", "--adapter-alpha"},
    NamedKey{"data.batch", "--batch"},
    NamedKey{"data.seed", "--seed"},
    NamedKey{"data.order", "the order of the data (drawn: --steps, epochs: --epochs)"},
};

// The type of the parameters may change: values are converted, master weights stay.
constexpr std::string_view kMayChange = "model.dtype";

std::string_view flag_name(std::string_view key) {
  for (const NamedKey& named : kNamedKeys) {
    if (named.key == key) {
      return named.name;
    }
  }
  return key;
}

std::string text_of(const RunIdentity& identity, const std::string& key) {
  const auto found = identity.find(key);
  return found == identity.end() ? "not said" : printable(found->second, 60);
}

std::string sources_of(const RunIdentity& identity) {
  const auto found = identity.find(kSources);
  return found == identity.end() ? "not said" : printable(found->second, kShownSources);
}

}  // namespace

RunIdentity describe(const DataIdentity& data) {
  // A path may have any bytes, and a save's text has not.
  return {{kSources, printable(fmt::format("{}", fmt::join(data.sources, ", ")), kShownSources)},
          {"data.batch", std::to_string(data.batch)},
          {"data.seed", std::to_string(data.seed)},
          {"data.order", data.in_epochs ? "epochs" : "drawn"},
          {kNextBatch, fmt::format("{:016x}", data.next_batch)}};
}

std::optional<ResumePoint> find_resume_point(const CheckpointPlan& plan) {
  const std::vector<checkpoint::SavedName> saves = checkpoint::list_saves(plan.root);
  if (saves.empty()) {
    return std::nullopt;
  }
  const checkpoint::SavedName& newest = saves.back();
  TESSERA_CHECK(plan.resume, ConfigError, "--checkpoint ", tessera::in_quotes(plan.root),
                " has saves of an earlier run, the newest of step ", newest.step,
                "; give --resume to go on from it, or another directory");
  const checkpoint::Manifest manifest = checkpoint::read_manifest(newest.path);
  return ResumePoint{newest.path, manifest.step, manifest.num_ranks, manifest.user};
}

std::shared_ptr<const checkpoint::DirectoryLock> lock_root(
    const CheckpointPlan& plan, const std::optional<ResumePoint>& point) {
  auto lock = std::make_shared<const checkpoint::DirectoryLock>(plan.root, kLockPatience);
  const std::vector<checkpoint::SavedName> saves = checkpoint::list_saves(plan.root);
  const std::string newest = saves.empty() ? std::string() : saves.back().path;
  TESSERA_CHECK(newest == (point ? point->path : std::string()), ConfigError, "--checkpoint ",
                tessera::in_quotes(plan.root), ": another run has saved here while this one began",
                newest.empty() ? "" : ", last ", tessera::printable(newest, 400),
                "; start this one again, with --resume or another directory");
  return lock;
}

void check_same_run(const ResumePoint& point, const RunIdentity& now) {
  if (std::none_of(now.begin(), now.end(),
                   [&](const auto& each) { return point.identity.contains(each.first); })) {
    return;  // another program's
  }
  std::string differences;
  const auto add = [&differences](const std::string& text) {
    differences += (differences.empty() ? "" : ", ") + text;
  };
  bool is_data_known = true;
  for (const auto& [key, value] : now) {
    if (key == kMayChange || key == kSources || key == kNextBatch) {
      continue;
    }
    const std::string before = text_of(point.identity, key);
    if (before != printable(value, 60)) {
      add(fmt::format("{} was {} and is {}", flag_name(key), before, printable(value, 60)));
      is_data_known = false;
    }
  }
  // What only some models have, such as adapters.
  for (const auto& [key, value] : point.identity) {
    if (key.starts_with("model.") && !now.contains(key)) {
      add(fmt::format("{} was {} and is not said", flag_name(key), printable(value, 60)));
    }
  }
  // Other batches, where nothing else explains them.
  if (is_data_known && text_of(point.identity, kNextBatch) != text_of(now, kNextBatch)) {
    const std::string before = sources_of(point.identity);
    const std::string after = sources_of(now);
    add(before == after ? fmt::format("the data, {}, has changed: step {} would have other tokens",
                                      before, point.step + 1)
                        : fmt::format("--data was {} and is {}", before, after));
  }
  TESSERA_CHECK(differences.empty(), ConfigError, "--resume: ", tessera::in_quotes(point.path),
                " is of another run: ", differences,
                "; give what it was trained with, or begin another run with its weights: "
                "`tessera export`, then --init and another --checkpoint directory");
}

}  // namespace tessera::cli
