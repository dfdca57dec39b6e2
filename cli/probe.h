// What `tessera doctor` asks of a machine: one small function per question.
//
// A probe looks, and where looking is not enough it tries (a ring is really set up, a page is
// really written past the cache, two ranks really exchange bytes). It says what it found and, where
// that is less than it could be, what this costs and what to do about it.
//
// A probe never throws and leaves nothing behind. Whatever it reads of the system comes through its
// arguments, so that tests can show it a machine that they do not have.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera::cli {

enum class ProbeState : std::uint8_t {
  kOk,
  kLimited,  // works, but costs speed or room
  kMissing,
};
std::string to_string(ProbeState state);

struct ProbeResult {
  std::string name;
  ProbeState state = ProbeState::kOk;
  std::string found;
  std::string cost;       // what it costs and the remedy; empty when nothing is lost
  bool required = false;  // nothing trains without it
};

// The parts of the program itself (probes_build.cpp, torch_probe.cpp).
ProbeResult probe_torch();
ProbeResult probe_compiler();
ProbeResult probe_cuda();
ProbeResult probe_nccl();
// Two ranks of this process exchange a few bytes over Gloo on the loopback interface.
ProbeResult probe_gloo();

// Gives a file descriptor, or -errno.
using UringSetup = std::function<int()>;
int setup_io_uring();
ProbeResult probe_io_uring(const UringSetup& setup, const std::filesystem::path& root);
// Opens for writing past the page cache; gives a file descriptor, or -errno.
using DirectOpen = std::function<int(const std::filesystem::path&)>;
int open_direct(const std::filesystem::path& file);
ProbeResult probe_direct_io(const std::filesystem::path& directory, const DirectOpen& open);
ProbeResult probe_directory(const std::filesystem::path& directory);

// nullopt: unlimited.
ProbeResult probe_locked_memory(std::optional<std::size_t> limit_bytes);
struct OpenFileLimit {
  std::uint64_t soft = 0;
  std::uint64_t hard = 0;
};
OpenFileLimit read_open_file_limit();
ProbeResult probe_open_files(const OpenFileLimit& limit);

// `root` is where the machine's proc/ and sys/ are.
ProbeResult probe_memory(const std::filesystem::path& root);
ProbeResult probe_cores(const std::filesystem::path& root);
// low_precision.cpp
ProbeResult probe_low_precision(const std::filesystem::path& root);
ProbeResult probe_huge_pages(const std::filesystem::path& root);
ProbeResult probe_numa(const std::filesystem::path& root);

// All of them, in the order of the screen.
std::vector<ProbeResult> run_probes(const std::filesystem::path& directory);

// At most 80 columns; what something costs stands indented under it.
std::string doctor_screen(std::span<const ProbeResult> results);
std::string doctor_json(std::span<const ProbeResult> results);

// False if something is missing without which nothing trains.
bool can_train(std::span<const ProbeResult> results);

}  // namespace tessera::cli
