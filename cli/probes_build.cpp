#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>

#include "cli/probe.h"
#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/group.h"
#include "tessera/comm/nccl_backend.h"
#include "tessera/comm/store.h"
#include "tessera/core/error.h"
#include "tessera/device/device_cuda.h"

namespace tessera::cli {
namespace {

constexpr int kNumRanks = 2;
constexpr std::chrono::milliseconds kTimeout{10000};
const char* const kLoopback = "127.0.0.1";

void exchange_one_number(int rank, std::uint16_t port) {
  std::shared_ptr<comm::Store> store = comm::connect_store(kLoopback, port, kTimeout);
  comm::GlooOptions options;
  options.timeout = kTimeout;
  options.bind_host = kLoopback;
  comm::GroupOptions group_options;
  group_options.timeout = kTimeout;
  comm::Group group(comm::make_gloo_backend(store, rank, kNumRanks, "doctor", options), "doctor",
                    {0, 1}, group_options);
  const std::int32_t mine = 40 + rank;
  std::array<std::int32_t, kNumRanks> all{};
  const comm::Gather gather{&mine, all.data(), 1, DType::kInt32};
  group.start_all_gather({&gather, 1}).wait();
  TESSERA_CHECK(all[0] == 40 && all[1] == 41, CommError, "the exchange gave ", all[0], " and ",
                all[1], " instead of 40 and 41");
}

std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

// Empty: both ranks have each other's number.
std::string exchange_over_loopback() {
  try {
    const std::unique_ptr<comm::Store> server = comm::serve_store(kLoopback, 0, kTimeout);
    std::array<std::exception_ptr, kNumRanks> errors{};
    {
      std::array<std::jthread, kNumRanks> ranks;
      for (int rank = 0; rank < kNumRanks; ++rank) {
        ranks[rank] = std::jthread([rank, port = server->port(), &errors] {
          try {
            exchange_one_number(rank, port);
          } catch (...) {
            errors[rank] = std::current_exception();
          }
        });
      }
    }
    for (const std::exception_ptr& error : errors) {
      if (error) {
        return what(error);
      }
    }
    return "";
  } catch (...) {
    return what(std::current_exception());
  }
}

}  // namespace

ProbeResult probe_compiler() {
  ProbeResult result{"compiler", ProbeState::kOk, "", "", false};
#if defined(__clang__)
  result.found = "clang " __clang_version__;
#else
  result.found = "g++ " __VERSION__;
#endif
#if defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
  result.found += ", C++11 ABI";
#else
  result.found += ", old C++ ABI";
#endif
  return result;
}

ProbeResult probe_cuda() {
  ProbeResult result{"CUDA", ProbeState::kOk, device::cuda_description(), "", false};
  if (!device::cuda_built()) {
    result.state = ProbeState::kMissing;
    result.cost = "training runs on the CPU; build again where CUDA and a CUDA torch are installed";
  } else if (device::num_cuda_devices() == 0) {
    result.state = ProbeState::kMissing;
    result.cost = "training runs on the CPU; check nvidia-smi, and CUDA_VISIBLE_DEVICES";
  }
  return result;
}

ProbeResult probe_nccl() {
  ProbeResult result{"NCCL", ProbeState::kOk, comm::nccl_description(), "", false};
  if (!comm::nccl_built()) {
    result.state = ProbeState::kMissing;
    result.cost = "GPUs cannot talk to each other directly; a CUDA build brings it";
  }
  return result;
}

ProbeResult probe_gloo() {
  ProbeResult result{"Gloo", ProbeState::kOk, "2 ranks exchanged data over loopback", "", true};
  const std::string failure = exchange_over_loopback();
  if (!failure.empty()) {
    result.state = ProbeState::kMissing;
    result.found = "2 ranks on loopback: " + failure;
    result.cost =
        "no more than one rank can run on the CPU; check that 127.0.0.1 is up and not filtered";
  }
  return result;
}

}  // namespace tessera::cli
