#include "tests/launch/rank_program.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>

#include "tessera/core/error.h"

namespace tessera::testing {
namespace {

int to_number(const std::string& text) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  TESSERA_CHECK(!text.empty() && *end == '\0', ConfigError, "'", text, "' is not a number");
  return static_cast<int>(value);
}

// Flags come first; `next` ends at the behaviour's name.
cli::LaunchOptions read_flags(const std::vector<std::string>& args, std::size_t& next) {
  cli::LaunchOptions options;
  options.num_ranks = 0;
  for (; next + 1 < args.size() && args[next].compare(0, 2, "--") == 0; next += 2) {
    const std::string& flag = args[next];
    const std::string& value = args[next + 1];
    if (flag == "--ranks") {
      options.num_ranks = to_number(value);
    } else if (flag == "--settle") {
      options.settle = std::chrono::milliseconds(to_number(value));
    } else if (flag == "--grace") {
      options.grace = std::chrono::milliseconds(to_number(value));
    } else if (flag == "--terminate") {
      options.terminate = std::chrono::milliseconds(to_number(value));
    } else if (flag == "--stop") {
      options.stop = std::chrono::milliseconds(to_number(value));
    } else if (flag == "--program") {
      options.program = value;
    } else {
      throw ConfigError("unknown flag " + flag);
    }
  }
  return options;
}

int run_behaviour(RankContext& context, const std::string& name,
                  const std::vector<Behaviour>& behaviours) {
  for (const Behaviour& behaviour : behaviours) {
    if (name == behaviour.name) return behaviour.body(context);
  }
  throw ConfigError("no behaviour is called '" + name + "'");
}

}  // namespace

int RankContext::number(std::size_t index) const {
  TESSERA_CHECK(index < arguments.size(), ConfigError, "argument ", index, " is missing");
  return to_number(arguments[index]);
}

void say(const std::string& line) {
  const std::string text = line + "\n";
  [[maybe_unused]] const ssize_t done = write(STDOUT_FILENO, text.data(), text.size());
}

void say_ready(int rank) { say("rank " + std::to_string(rank) + " ready"); }

void wait_for_the_end() {
  for (;;) pause();
}

int rank_program_main(int argc, char** argv, const std::vector<Behaviour>& behaviours,
                      const ServeStore& serve_store) {
  const comm::Environment env = comm::process_environment();
  comm::RankProcess process(env);
  return process.run([&] {
    const std::vector<std::string> args(argv, argv + argc);
    std::size_t next = 1;
    cli::LaunchOptions options = read_flags(args, next);
    if (options.num_ranks > 0) {
      options.argv.assign(args.begin() + static_cast<std::ptrdiff_t>(next), args.end());
      options.argv.insert(options.argv.begin(), args[0]);
      options.serve_store = [&] { return serve_store(options.num_ranks); };
      return cli::launch_local_ranks(options);
    }
    TESSERA_CHECK(next < args.size(), ConfigError, "no behaviour was given");
    RankContext context{process, comm::find_rendezvous(env), {}};
    context.arguments.assign(args.begin() + static_cast<std::ptrdiff_t>(next) + 1, args.end());
    return run_behaviour(context, args[next], behaviours);
  });
}

}  // namespace tessera::testing
