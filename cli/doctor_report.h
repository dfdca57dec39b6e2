// What the probes found, as one screen for people or as JSON for programs.
//
// Threads: pure functions.
#pragma once

#include <span>
#include <string>

#include "cli/probe.h"

namespace tessera::cli {

// At most 80 columns; what something costs stands indented under it.
std::string doctor_screen(std::span<const ProbeResult> results);
std::string doctor_json(std::span<const ProbeResult> results);

// False if something is missing without which nothing trains.
bool can_train(std::span<const ProbeResult> results);

}  // namespace tessera::cli
