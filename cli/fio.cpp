#include "cli/fio.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "cli/memory_file.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"

namespace tessera::cli {
namespace {

using nlohmann::json;

constexpr int kFileDescriptor = 9;  // in fio's process

struct Finished {
  bool was_started = false;
  int status = 0;
  std::string out;
  std::string err;
};

Finished run_program_to_end(const std::string& program, const std::vector<std::string>& arguments,
                            int file_fd) {
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);

  const MemoryFile out;
  const MemoryFile err;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (file_fd >= 0) {
    posix_spawn_file_actions_adddup2(&actions, file_fd, kFileDescriptor);
  }
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.fd(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.fd(), STDERR_FILENO);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, program.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  Finished finished;
  if (error != 0) {
    finished.err = std::generic_category().message(error);
    return finished;
  }
  finished.was_started = true;
  retried([&] { return ::waitpid(pid, &finished.status, 0); });
  finished.out = out.text();
  finished.err = err.text();
  return finished;
}

bool succeeded(const Finished& finished) {
  return finished.was_started && WIFEXITED(finished.status) && WEXITSTATUS(finished.status) == 0;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

const char* mix_name(tier::IoMix mix) {
  switch (mix) {
    case tier::IoMix::kRead:
      return "read";
    case tier::IoMix::kWrite:
      return "write";
    case tier::IoMix::kMixed:
      break;
  }
  return "rw";
}

// Zero where a load has none of it.
double rate_of(const json& job, const char* direction) {
  const json part = job.is_object() ? job.value(direction, json()) : json();
  const json rate = part.is_object() ? part.value("bw_bytes", json()) : json();
  TESSERA_CHECK(rate.is_number() && rate.get<double>() >= 0 && std::isfinite(rate.get<double>()),
                IoError, "fio gives no bw_bytes of its ", direction, "; use fio 3.0 or later");
  return rate.get<double>();
}

}  // namespace

std::vector<std::string> fio_arguments(const FioJob& job, const std::string& path) {
  const bool is_ring = job.options.kind == tier::IoKind::kUring;
  // Our queue has one order for all threads. fio's jobs have one each, so each gets a piece of the
  // file of its own, or all would read the same blocks at the same time.
  const int num_jobs = is_ring ? 1 : job.options.num_threads;
  const int depth = is_ring ? job.options.queue_depth * job.options.num_threads : 1;
  const std::uint64_t piece_bytes =
      std::max<std::uint64_t>(
          1, job.file_bytes / static_cast<std::uint64_t>(num_jobs) / job.options.block_bytes) *
      job.options.block_bytes;
  return {"--name=tessera",
          "--filename=" + path,
          "--size=" + std::to_string(piece_bytes),
          "--offset_increment=" + std::to_string(piece_bytes),
          "--numjobs=" + std::to_string(num_jobs),
          "--thread",
          "--group_reporting",
          std::string("--ioengine=") + (is_ring ? "io_uring" : "psync"),
          "--iodepth=" + std::to_string(depth),
          "--bs=" + std::to_string(job.options.block_bytes),
          std::string("--direct=") + (job.file->is_direct() ? "1" : "0"),
          std::string("--rw=") + mix_name(job.mix),
          "--rwmixread=50",
          "--invalidate=0",
          "--time_based",
          "--runtime=" + std::to_string(std::llround(job.seconds * 1e3)) + "ms",
          "--output-format=json"};
}

tier::IoRates parse_fio(std::string_view output) {
  // Notes may stand before the document.
  const std::size_t begin = output.find('{');
  const json document = json::parse(begin == std::string_view::npos ? "" : output.substr(begin),
                                    nullptr, /*allow_exceptions=*/false);
  const json jobs = document.is_object() ? document.value("jobs", json()) : json();
  TESSERA_CHECK(jobs.is_array() && !jobs.empty(), IoError,
                "fio printed no list of jobs, but: ", in_quotes(output));
  tier::IoRates rates;
  for (const json& job : jobs) {
    rates.read_bytes_per_s += rate_of(job, "read");
    rates.write_bytes_per_s += rate_of(job, "write");
  }
  return rates;
}

std::optional<Fio> Fio::find(const std::string& program) {
  const Finished finished = run_program_to_end(program, {"--version"}, -1);
  if (!succeeded(finished)) {
    return std::nullopt;
  }
  return Fio(program, printable(first_line(finished.out)));
}

tier::IoRates Fio::run(const FioJob& job) const {
  const Finished finished = run_program_to_end(
      program_, fio_arguments(job, "/proc/self/fd/" + std::to_string(kFileDescriptor)),
      job.file->fd());
  TESSERA_CHECK(succeeded(finished), IoError, version_,
                " failed: ", in_quotes(finished.err.empty() ? finished.out : finished.err));
  return parse_fio(finished.out);
}

}  // namespace tessera::cli
