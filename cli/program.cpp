#include "cli/program.h"

#include <algorithm>
#include <array>
#include <iostream>
#include <map>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "tessera/comm/rank_process.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/suggest.h"

namespace tessera::cli {
namespace {

constexpr std::array<Command, 14> kCommands{{
    {"train", "Trains a GPT, sharded over ranks",
     "  tessera train --ranks 2\n"
     "  tessera train --ranks 4 --preset small --data text:book.txt --steps 200 --metrics "
     "run.jsonl\n"
     "  tessera train --ranks 2 --verify 3\n"
     "  tessera train --ranks 2 --steps 500 --checkpoint runs/one --save-every 100 --resume\n"
     "  torchrun --nproc-per-node 8 --no-python tessera train --preset gpt-1b4 --device cuda\n",
     add_train},
    {"inspect",
     "Shows a model's shards, and what a step would gather and release, without running it",
     "  tessera inspect --ranks 4\n"
     "  tessera inspect --preset gpt-13b --ranks 64 --precision bf16 --set live.limit_bytes=4GiB\n"
     "  tessera inspect --preset small --ranks 8 --json > plan.json\n",
     add_inspect},
    {"export", "Writes a checkpoint's model for other programs, as safetensors",
     "  tessera export --checkpoint runs/one --to gpt2-mine\n"
     "  tessera export --checkpoint runs/one --to mine --names tessera --precision bf16\n",
     add_export},
    {"generate", "Continues a text with a checkpoint's model",
     "  tessera generate --checkpoint runs/one --prompt \"the old baker \"\n"
     "  tessera generate --checkpoint runs/one --prompt \"12 55 7\" --tokens 20 --temperature 0\n",
     add_generate},
    {"doctor", "Says what this machine has, and what each missing thing costs",
     "  tessera doctor\n"
     "  tessera doctor --dir /mnt/nvme --json\n",
     add_doctor},
    {"bench-comm", "Measures the collectives per size and backend",
     "  tessera bench-comm --ranks 2\n"
     "  tessera bench-comm --ranks 4 --sizes 4KiB,1MiB --rounds 50\n"
     "  torchrun --nproc-per-node 2 --no-python tessera bench-comm --json rates.json\n",
     add_bench_comm},
    {"bench-io", "Measures a directory's disk, beside fio where that is installed",
     "  tessera bench-io /mnt/nvme\n"
     "  tessera bench-io . --engine threads --seconds 10 --bytes 4GiB\n"
     "  tessera bench-io . --json > rates.json\n",
     add_bench_io},
    {"plot", "Makes a page with the curves of runs: loss, speed, times, memory",
     "  tessera plot run.jsonl\n"
     "  tessera plot one.jsonl two.jsonl --out compare.html\n",
     add_plot},
    {"checkpoint", "Shows saves, verifies their bytes, compares two",
     "  tessera checkpoint runs/one\n"
     "  tessera checkpoint runs/one --verify\n"
     "  tessera checkpoint runs/one --diff runs/two/save-00003-step-60\n",
     add_checkpoint},
    {"import", "Makes a checkpoint of one that DeepSpeed ZeRO-3 has saved, moments included",
     "  tessera import deepspeed_run checkpoints\n"
     "  tessera import deepspeed_run checkpoints --tag global_step1000 --python venv/bin/python\n",
     add_import},
    {"launch", "Starts a program of your own once per rank on this machine",
     "  tessera launch --ranks 2 ./train_mlp\n", add_launch},
    {"options", "Lists every option with its default, unit and range",
     "  tessera options\n"
     "  tessera options --markdown > docs/options.md\n",
     add_options},
    {"config", "Checks a config and prints the options that it gives",
     "  tessera config run.json\n"
     "  tessera config run.json --set comm.timeout_s=30\n",
     add_config},
    {"version", "Prints the version", "  tessera version\n", add_version},
}};

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && text.back() == ' ') {
    text.pop_back();
  }
  return text;
}

int report(const std::string& message, int exit_code) {
  std::cout.flush();
  std::cerr << "tessera: error: " + one_line(message) + "\n" << std::flush;
  return exit_code;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::vector<std::string_view> known(candidates.begin(), candidates.end());
  const std::string_view found = nearest(word, known);
  return found.empty() ? std::string() : "; did you mean " + tessera::in_quotes(found) + "?";
}

std::vector<std::string> command_names() {
  std::vector<std::string> names;
  for (const Command& command : kCommands) {
    names.emplace_back(command.name);
  }
  return names;
}

// CLI11's own messages do not suggest; what was not expected is still in the app.
std::string describe_unexpected(const CLI::App& app) {
  const std::vector<std::string> remaining = app.remaining(true);
  const std::string word = remaining.empty() ? std::string("?") : remaining.front();
  const auto parsed = app.get_subcommands();
  if (parsed.empty() && word.rfind('-', 0) != 0) {
    return "unknown command " + tessera::in_quotes(word) + did_you_mean(word, command_names()) +
           " (tessera --help lists them)";
  }
  const CLI::App& active = parsed.empty() ? app : *parsed.front();
  const std::string where = parsed.empty() ? std::string() : " of " + active.get_name();
  const std::string help = parsed.empty() ? std::string() : active.get_name() + " ";
  if (word.rfind('-', 0) != 0) {
    return "unexpected argument " + tessera::in_quotes(word) + where + " (tessera " + help +
           "--help)";
  }
  std::vector<std::string> flags;
  for (const CLI::Option* option : active.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      flags.push_back("--" + name);
    }
  }
  const std::string flag = word.substr(0, word.find('='));
  return "unknown flag " + tessera::in_quotes(flag) + where + did_you_mean(flag, flags) +
         " (tessera " + help + "--help lists them)";
}

int run_checked(int argc, char** argv) {
  CLI::App app("Tessera: sharded training for LibTorch on GPU, host memory and NVMe", "tessera");
  app.require_subcommand(0, 1);
  app.set_help_flag("-h,--help", "Prints this help");
  app.footer(
      "tessera COMMAND --help says more about one command.\n\nExamples:\n"
      "  tessera doctor\n  tessera train --ranks 2");
  bool version = false;
  app.add_flag("--version", version, "Prints the version")->disable_flag_override();
  app.get_formatter()->column_width(26);

  std::map<const CLI::App*, Action> actions;
  for (const Command& command : kCommands) {
    CLI::App* const sub =
        app.add_subcommand(std::string(command.name), std::string(command.summary));
    sub->set_help_flag("-h,--help", "Prints this help");
    sub->footer("Examples:\n" + std::string(command.examples));
    actions[sub] = command.add_to(*sub);
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();  // of the command that was asked, if one was
    return kExitOk;
  } catch (const CLI::ExtrasError&) {
    return report(describe_unexpected(app), kExitUsage);
  } catch (const CLI::ParseError& error) {
    return report(error.what(), kExitUsage);
  }
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  if (!parsed.empty()) {
    return actions.at(parsed.front())(Arguments(argv, argv + argc));
  }
  if (version) {
    return print_version();
  }
  return report("no command given; tessera --help lists them", kExitUsage);
}

}  // namespace

int print_version() {
  std::cout << "tessera " TESSERA_VERSION "\n";
  return kExitOk;
}

Action add_version(CLI::App&) {
  return [](const Arguments&) { return print_version(); };
}

int run_program(int argc, char** argv) {
  try {
    const int exit_code = run_checked(argc, argv);
    std::cout.flush();
    // A full disk behind `>` must not look like success.
    return std::cout ? exit_code : report("standard output cannot be written", kExitFailure);
  } catch (const ConfigError& error) {
    return report(error.what(), kExitUsage);
  } catch (const comm::ExitCodeError& error) {
    return report(error.what(), error.exit_code());
  } catch (const std::exception& error) {
    return report(error.what(), kExitFailure);
  }
}

}  // namespace tessera::cli
