// A network of two ranks, one of whom never comes: what a test makes of it is in the all-gathers of
// a class derived from it. Threads: as Backend.
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/backend.h"

namespace tessera::comm {

class LoneBackend : public Backend {
 public:
  std::string_view name() const override { return "lone"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  bool compares_tags() const override { return true; }
  Pending start_all_to_all(const PieceBytes&, const Call&) override { return {}; }
  Pending start_broadcast(void*, std::size_t, int, const Call&) override { return {}; }
  std::unique_ptr<Backend> split(std::span<const int>, const std::string&) override { return {}; }
  std::size_t broadcast_sent_bytes(std::size_t, int) const override { return 0; }
  void abort(const std::string&) override {}
};

}  // namespace tessera::comm
