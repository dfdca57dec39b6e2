// What every backend of Group promises. Instantiate GroupContract once per backend; each test runs
// its ranks through the given runner, so it does not know whether they are threads over shared
// memory or threads over sockets.
#pragma once

#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "tessera/comm/group.h"

namespace tessera::comm {

struct ContractWorld {
  std::string name;
  // Runs the body once per rank, each on its own thread with its own world group, and gives back
  // what each rank threw.
  std::function<std::vector<std::exception_ptr>(int num_ranks, GroupOptions options,
                                                const std::function<void(Group&)>& body)>
      run;
  // Reads as the test's name.
  friend void PrintTo(const ContractWorld& world, std::ostream* out) { *out << world.name; }
};

class GroupContract : public ::testing::TestWithParam<ContractWorld> {
 protected:
  // Every rank must come to its end without an error.
  void run(int num_ranks, const std::function<void(Group&)>& body) { run(num_ranks, {}, body); }
  void run(int num_ranks, const GroupOptions& options, const std::function<void(Group&)>& body) {
    const auto failures = GetParam().run(num_ranks, options, body);
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      if (failures[rank]) {
        ADD_FAILURE() << "rank " << rank << ": " << what(failures[rank]);
      }
    }
  }

  static std::string what(const std::exception_ptr& failure) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      return error.what();
    }
  }
};

inline std::string contract_name(const ::testing::TestParamInfo<ContractWorld>& info) {
  return info.param.name;
}

}  // namespace tessera::comm
