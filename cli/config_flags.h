// `--config FILE` and `--set name=value`, for every command that reads options.
//
// Threads: main thread only.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/config.h"

namespace CLI {
class App;
}

namespace tessera::cli {

struct ConfigFlags {
  std::string file;
  std::vector<std::string> settings;
};

void add_config_flags(CLI::App& app, ConfigFlags& flags);
// Only --set: for commands that take the file as an argument.
void add_set_flag(CLI::App& app, ConfigFlags& flags);

// The file, then the settings in their order. Config::check() is left to the caller, whose own
// flags may be what is missing.
Config load_config(const ConfigFlags& flags);

// Sets an option to what a flag says, under the flag's name; an empty text is a flag not given.
void set_from_flag(const char* flag, const std::string& text, const char* option, Config& config);

// The options of room comm in the words of that room.
comm::GroupOptions group_options(const Config& config);

}  // namespace tessera::cli
