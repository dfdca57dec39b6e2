// Stored parameters of one rank with a feed in front of them, and an update whose result can be
// computed by hand.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/coordinator/shard_loader.h"
#include "tessera/device/device_cpu.h"
#include "testing/held_store.h"
#include "tests/support/no_tensor.h"

namespace tessera::coordinator {

using support::NoTensor;

// A chance for what must not happen, before a test looks whether it has. No right program depends
// on how long it takes.
constexpr std::int64_t kBlockNumel = 1024;  // fp32 elements of one block

inline void let_others_run() {
  for (int i = 0; i < 2000; ++i) {
    std::this_thread::yield();
  }
}

class LoaderWorld {
 public:
  explicit LoaderWorld(int rank = 0, int num_ranks = 1) : params_(rank, num_ranks, *device_) {}

  shard::Param& add(std::int64_t numel, DType dtype = DType::kFloat32) {
    shard::ParamSpec spec;
    spec.name = detail::concat("p", params_.num_params());
    spec.numel = numel;
    spec.dtype = dtype;
    spec.placement.parameter = Tier::kNvme;
    shard::Param& param = params_.add(spec, std::make_unique<NoTensor>());
    shards_.add(param);
    versions_.push_back(0);
    return param;
  }
  // After the parameters; each gets its first values, straight in the store.
  ShardLoader& make_loader(std::size_t buffer_bytes) {
    for (int id = 0; id < params_.num_params(); ++id) {
      set_version(id, 1);
    }
    loader_ = std::make_unique<ShardLoader>(params_, shards_, *device_, Tier::kHost, buffer_bytes);
    return *loader_;
  }
  // For shards of one block: two tiles, and a window of so many.
  static std::size_t buffer_for_blocks(std::size_t num_blocks) {
    return kSmallestLoaderBytes + num_blocks * tier::kBlockBytes;
  }

  shard::ParamTable& params() { return params_; }
  shard::ShardStore& shards() { return shards_; }
  support::HeldStore& store() { return store_; }
  ShardLoader& loader() { return *loader_; }
  void destroy_loader() { loader_.reset(); }

  // The shard of `version`: elements are different, padding is zero.
  std::vector<std::byte> shard_of(int id, int version) const {
    const shard::Param& param = params_[id];
    const std::size_t element = bytes_of(param.layout().dtype());
    std::vector<std::byte> bytes(param.layout().shard_bytes());
    const std::size_t used = static_cast<std::size_t>(param.range().numel) * element;
    for (std::size_t i = 0; i < used; ++i) {
      const std::size_t mixed = (i / 251 + i) * 7 + static_cast<std::size_t>(id * 31 + version);
      bytes[i] = static_cast<std::byte>(mixed % 255 + 1);
    }
    return bytes;
  }
  // As if it had always been there.
  void set_version(int id, int version) {
    const std::vector<std::byte> bytes = shard_of(id, version);
    if (!bytes.empty()) {
      std::memcpy(store_.bytes_at(static_cast<std::uint64_t>(shards_.offset(id))), bytes.data(),
                  bytes.size());
    }
    versions_[static_cast<std::size_t>(id)] = version;
  }
  // What an update does: writes through the store; the source is kept.
  void write_version(int id, int version) {
    const shard::Param& param = params_[id];
    const std::vector<std::byte> bytes = shard_of(id, version);
    device::Memory& source = sources_.emplace_back(device_->allocate(
        Tier::kHost, tier::whole_blocks(bytes.size()), Role::kStaging, tier::kBlockBytes));
    if (!bytes.empty()) {
      std::memset(source.data(), 0, source.bytes());
      std::memcpy(source.data(), bytes.data(), bytes.size());
    }
    std::ignore = shards_.start_write(param, 0, param.layout().shard_numel(), source.data());
    versions_[static_cast<std::size_t>(id)] = version;
  }
  // Offers all of it, `step` elements at once; how many pieces were taken.
  int offer(int id, int version, std::int64_t step) {
    const shard::Param& param = params_[id];
    const std::vector<std::byte> bytes = shard_of(id, version);
    const std::size_t element = bytes_of(param.layout().dtype());
    int num_taken = 0;
    for (std::int64_t begin = 0; begin < param.range().numel; begin += step) {
      const std::int64_t numel = std::min(step, param.range().numel - begin);
      num_taken +=
          loader_->receive(id, begin, numel, bytes.data() + static_cast<std::size_t>(begin) * element)
              ? 1
              : 0;
    }
    return num_taken;
  }

  // A place that shards are brought to, with room behind it that must not be touched.
  struct Place {
    static constexpr std::size_t kBehind = 64;
    std::vector<std::byte> bytes;
    device::Pending loaded;
  };
  std::unique_ptr<Place> start_load(int id, device::Pending ready = {}) {
    auto place = std::make_unique<Place>();
    place->bytes.assign(params_[id].layout().shard_bytes() + Place::kBehind, std::byte{0x5a});
    place->loaded = loader_->start_load(params_[id], place->bytes.data(), std::move(ready));
    return place;
  }
  void expect_version(int id, const Place& place, int version) const {
    std::vector<std::byte> expected = shard_of(id, version);
    const std::size_t shard_bytes = expected.size();
    expected.resize(shard_bytes + Place::kBehind, std::byte{0x5a});
    ASSERT_EQ(place.bytes.size(), expected.size());
    const auto [wrong, right] =
        std::mismatch(place.bytes.begin(), place.bytes.end(), expected.begin());
    ASSERT_TRUE(wrong == place.bytes.end())
        << "p" << id << " version " << version << " byte " << wrong - place.bytes.begin() << " of "
        << shard_bytes << " is " << std::to_integer<int>(*wrong) << " and not "
        << std::to_integer<int>(*right);
  }
  // Brings the shard, which must be of its last version.
  void expect_load(int id) {
    const std::unique_ptr<Place> place = start_load(id);
    place->loaded.wait();
    expect_version(id, *place, versions_[static_cast<std::size_t>(id)]);
  }
  std::string extent_name(int id) const {
    return detail::concat("parameter '", params_[id].name(), "'");
  }

 private:
  std::unique_ptr<device::Device> device_ = device::make_cpu_device({});
  shard::ParamTable params_;
  std::vector<device::Memory> sources_;  // of writes that may be under way
  support::HeldStore store_{std::size_t{256} << 10};
  shard::ShardStore shards_{store_};
  std::vector<int> versions_;
  std::unique_ptr<ShardLoader> loader_;
};

}  // namespace tessera::coordinator
