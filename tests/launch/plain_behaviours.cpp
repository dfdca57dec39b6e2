// Ways to end that need nothing but a process.
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "tessera/core/error.h"
#include "tests/launch/rank_program.h"

namespace tessera::testing {
namespace {

// The culprit does it; the others wait until somebody ends them.
template <typename Deed>
int only_culprit(RankContext& context, const Deed& deed) {
  if (!context.is_culprit()) wait_for_the_end();
  deed();
  return 0;
}

[[noreturn]] void end_by_signal(int signal) {
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  // Sanitizers catch some signals; here the signal itself is wanted.
  std::signal(signal, SIG_DFL);
  raise(signal);
  wait_for_the_end();
}

int print_self(RankContext& context) {
  std::string line = "rank " + std::to_string(context.rank()) + " of " +
                     std::to_string(context.rendezvous.world_size) + ":";
  for (const std::string& argument : context.arguments) line += " " + argument;
  const char* threads = std::getenv("OMP_NUM_THREADS");
  say(line + " threads=" + (threads != nullptr ? threads : "unset"));
  return 0;
}

int ignore_signals(RankContext& context) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_IGN);
  say_ready(context.rank());
  wait_for_the_end();
}

// The culprit is killed; the others report the loss, most likely before the launcher sees why.
int lose_culprit(RankContext& context) {
  if (context.is_culprit()) end_by_signal(SIGKILL);
  throw PeerError("lost rank " + context.arguments[0]);
}

// Starts a process that ignores all but SIGKILL, and ends before it: argument 0 is the exit code.
int leave_grandchild(RankContext& context) {
  int ends[2];
  TESSERA_CHECK(pipe(ends) == 0, Error, "no pipe");
  if (fork() == 0) {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_IGN);
    [[maybe_unused]] const ssize_t done = write(ends[1], "x", 1);
    wait_for_the_end();
  }
  char ready = 0;
  TESSERA_CHECK(read(ends[0], &ready, 1) == 1, Error, "no grandchild");
  say_ready(context.rank());
  return context.number(0);
}

// A thread that never ends, in the way of every destructor that would join it.
int throw_beside_stuck_thread(RankContext& context) {
  std::thread([] { wait_for_the_end(); }).detach();
  throw Error("rank " + std::to_string(context.rank()) + " gives up");
}

}  // namespace

std::vector<Behaviour> plain_behaviours() {
  return {
      {"succeed", [](RankContext&) { return 0; }},
      {"print", print_self},
      {"wait",
       [](RankContext& context) -> int {
         say_ready(context.rank());
         wait_for_the_end();
       }},
      {"throw",
       [](RankContext& context) {
         return only_culprit(context, [] { throw IoError("disk is full; make room on it"); });
       }},
      {"throw-config",
       [](RankContext& context) {
         return only_culprit(context, [] { throw ConfigError("lr=-1 is negative"); });
       }},
      {"throw-nonsense",
       [](RankContext& context) { return only_culprit(context, [] { throw 42; }); }},
      {"exit",
       [](RankContext& context) {
         return only_culprit(context, [&] { std::_Exit(context.number(1)); });
       }},
      {"signal",
       [](RankContext& context) {
         return only_culprit(context, [&] { end_by_signal(context.number(1)); });
       }},
      {"all-throw",
       [](RankContext& context) -> int {
         throw ConfigError("rank " + std::to_string(context.rank()) + " has a bad config");
       }},
      {"lose", lose_culprit},
      {"ignore-signals", ignore_signals},
      {"grandchild", leave_grandchild},
      {"throw-beside-stuck-thread", throw_beside_stuck_thread},
  };
}

}  // namespace tessera::testing
