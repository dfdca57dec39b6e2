#include "tessera/coordinator/arena_plan.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

#include "tessera/device/arena_map.h"

namespace tessera::coordinator {
namespace {

// The second try looks at pairs.
constexpr std::size_t kMostForSecondTry = 4096;

std::int64_t rounded(std::int64_t bytes) {
  return static_cast<std::int64_t>(device::round_to_arena(static_cast<std::size_t>(bytes)));
}

// Lifetimes that begin and end together.
struct Block {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t bytes = 0;
  std::int64_t offset = -1;
  std::vector<std::size_t> members;
};

// In the order of their begins.
std::vector<Block> blocks_of(std::span<const Lifetime> lifetimes) {
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> known;
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < lifetimes.size(); ++i) {
    const Lifetime& life = lifetimes[i];
    if (life.bytes == 0) {
      continue;
    }
    const auto [found, is_new] = known.try_emplace({life.begin, life.end}, blocks.size());
    if (is_new) {
      blocks.push_back({life.begin, life.end, 0, -1, {}});
    }
    Block& block = blocks[found->second];
    block.bytes += rounded(life.bytes);
    block.members.push_back(i);
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const Block& left, const Block& right) { return left.begin < right.begin; });
  return blocks;
}

std::size_t place_in_order_of_time(std::vector<Block>& blocks, std::int64_t capacity) {
  device::ArenaMap map(static_cast<std::size_t>(capacity));
  using Ending = std::pair<std::int64_t, std::size_t>;
  std::priority_queue<Ending, std::vector<Ending>, std::greater<>> alive;  // end, block
  std::size_t num_unplaced = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    Block& block = blocks[i];
    while (!alive.empty() && alive.top().first <= block.begin) {
      const Block& over = blocks[alive.top().second];
      map.release({static_cast<std::size_t>(over.offset), static_cast<std::size_t>(over.bytes)});
      alive.pop();
    }
    const auto extent = map.place(static_cast<std::size_t>(block.bytes));
    block.offset = extent ? static_cast<std::int64_t>(extent->offset) : -1;
    if (extent) {
      alive.emplace(block.end, i);
    } else {
      ++num_unplaced;
    }
  }
  return num_unplaced;
}

std::size_t place_largest_first(std::vector<Block>& blocks, std::int64_t capacity) {
  std::vector<std::size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t left, std::size_t right) {
    return blocks[left].bytes > blocks[right].bytes;
  });
  std::vector<const Block*> placed;  // by offset
  std::size_t num_unplaced = 0;
  for (const std::size_t i : order) {
    Block& block = blocks[i];
    std::int64_t offset = 0;
    for (const Block* other : placed) {
      if (other->end <= block.begin || block.end <= other->begin) {
        continue;
      }
      if (other->offset >= offset + block.bytes) {
        break;
      }
      offset = std::max(offset, other->offset + other->bytes);
    }
    block.offset = offset + block.bytes <= capacity ? offset : -1;
    if (block.offset < 0) {
      ++num_unplaced;
      continue;
    }
    const auto by_offset = [](const Block* left, const Block* right) {
      return left->offset < right->offset;
    };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), &block, by_offset), &block);
  }
  return num_unplaced;
}

}  // namespace

ArenaPlan assign_offsets(std::span<const Lifetime> lifetimes, std::int64_t capacity_bytes) {
  std::vector<Block> blocks = blocks_of(lifetimes);
  const std::size_t num_unplaced = place_in_order_of_time(blocks, capacity_bytes);
  if (num_unplaced > 0 && blocks.size() <= kMostForSecondTry) {
    std::vector<Block> again = blocks;
    if (place_largest_first(again, capacity_bytes) < num_unplaced) {
      blocks = std::move(again);
    }
  }
  ArenaPlan plan;
  plan.offsets.assign(lifetimes.size(), -1);
  for (const Block& block : blocks) {
    if (block.offset < 0) {
      plan.num_unplaced += static_cast<std::int64_t>(block.members.size());
      continue;
    }
    std::int64_t offset = block.offset;
    for (const std::size_t member : block.members) {
      plan.offsets[member] = offset;
      offset += rounded(lifetimes[member].bytes);
    }
    plan.height = std::max(plan.height, offset);
  }
  return plan;
}

}  // namespace tessera::coordinator
