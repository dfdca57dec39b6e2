// A program that launches itself as N ranks and then misbehaves as its arguments say:
//
//   rank_program --ranks 4 [--settle MS] [--grace MS] [--terminate MS] BEHAVIOUR [ARGUMENT...]
//   rank_program BEHAVIOUR [ARGUMENT...]            one rank, as the environment says
//
// Behaviours come in tables, so that a file with new ones needs no change here. A rank that is
// where a test wants it says so with say_ready(); tests wait for that line, never for time.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/launch/launcher.h"
#include "tessera/comm/rank_process.h"
#include "tessera/comm/rendezvous.h"

namespace tessera::testing {

struct RankContext {
  comm::RankProcess& process;
  comm::Rendezvous rendezvous;
  std::vector<std::string> arguments;

  int rank() const { return rendezvous.rank; }
  // Argument `index` as a number; ConfigError if it is missing.
  int number(std::size_t index) const;
  // True on the rank that argument 0 names: the one to misbehave.
  bool is_culprit() const { return number(0) == rank(); }
};

struct Behaviour {
  const char* name;
  std::function<int(RankContext&)> body;
};

std::vector<Behaviour> plain_behaviours();       // need no store
std::vector<Behaviour> store_behaviours();       // need the program with torch
std::vector<Behaviour> collective_behaviours();  // the same

// "rank 2 ready\n" on standard output, in one piece.
void say(const std::string& line);
void say_ready(int rank);
// Until a signal ends the process.
[[noreturn]] void wait_for_the_end();

using ServeStore = std::function<cli::LaunchStore(int num_ranks)>;
int rank_program_main(int argc, char** argv, const std::vector<Behaviour>& behaviours,
                      const ServeStore& serve_store);

}  // namespace tessera::testing
