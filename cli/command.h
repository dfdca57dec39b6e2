// The commands of `tessera`, one file each.
//
// A command adds its flags to a CLI11 app and gives back what to run once the command line is
// parsed. What it returns is the exit code; what it throws becomes one line on stderr (program.h).
//
// Threads: main thread only.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitDiverged = 3;  // a training run

// `arguments` is the whole command line, the program first: for commands that start ranks.
using Arguments = std::vector<std::string>;
using Action = std::function<int(const Arguments& arguments)>;

struct Command {
  std::string_view name;
  std::string_view summary;
  std::string_view examples;
  Action (*add_to)(CLI::App& app);
};

Action add_doctor(CLI::App& app);
Action add_bench_comm(CLI::App& app);
Action add_bench_io(CLI::App& app);
Action add_train(CLI::App& app);
Action add_inspect(CLI::App& app);
Action add_export(CLI::App& app);
Action add_generate(CLI::App& app);
Action add_plot(CLI::App& app);
Action add_checkpoint(CLI::App& app);
Action add_import(CLI::App& app);
Action add_launch(CLI::App& app);
Action add_options(CLI::App& app);
Action add_config(CLI::App& app);
Action add_version(CLI::App& app);
int print_version();

}  // namespace tessera::cli
