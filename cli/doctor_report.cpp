#include "cli/doctor_report.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kColumns = 80;
constexpr std::size_t kStateColumns = 9;
constexpr std::size_t kNameColumns = 15;
constexpr std::size_t kTextColumns = kColumns - kStateColumns - kNameColumns;

std::string padded(std::string text, std::size_t columns) {
  text.resize(std::max(columns, text.size()), ' ');
  return text;
}

// Breaks at spaces; a word longer than a line is broken anywhere.
std::vector<std::string> wrapped(const std::string& text, std::size_t columns) {
  std::vector<std::string> lines;
  std::size_t begin = 0;
  while (begin < text.size()) {
    std::size_t end = std::min(text.size(), begin + columns);
    if (end < text.size() && text[end] != ' ') {
      const std::size_t space = text.rfind(' ', end);
      if (space != std::string::npos && space > begin) {
        end = space;
      }
    }
    lines.push_back(text.substr(begin, end - begin));
    begin = end;
    while (begin < text.size() && text[begin] == ' ') {
      ++begin;
    }
  }
  return lines;
}

// Costs start two columns further left than findings: they are the sentences.
void append_cost(std::string& screen, const std::string& cost) {
  const std::string indent(kStateColumns + 2, ' ');
  for (const std::string& line : wrapped("-> " + cost, kColumns - indent.size())) {
    screen += indent + line + "\n";
  }
}

}  // namespace

std::string to_string(ProbeState state) {
  switch (state) {
    case ProbeState::kOk:
      return "ok";
    case ProbeState::kLimited:
      return "limited";
    case ProbeState::kMissing:
      return "missing";
  }
  return "unknown";
}

bool can_train(std::span<const ProbeResult> results) {
  return std::none_of(results.begin(), results.end(), [](const ProbeResult& result) {
    return result.required && result.state == ProbeState::kMissing;
  });
}

std::string doctor_screen(std::span<const ProbeResult> results) {
  std::string screen;
  std::string needed;
  int num_limits = 0;
  for (const ProbeResult& result : results) {
    const std::vector<std::string> found = wrapped(printable(result.found, 400), kTextColumns);
    screen += padded(to_string(result.state), kStateColumns) + padded(result.name, kNameColumns) +
              (found.empty() ? std::string() : found.front()) + "\n";
    for (std::size_t i = 1; i < found.size(); ++i) {
      screen += std::string(kStateColumns + kNameColumns, ' ') + found[i] + "\n";
    }
    if (result.state != ProbeState::kOk) {
      ++num_limits;
      append_cost(screen, result.cost);
      if (result.required && result.state == ProbeState::kMissing) {
        needed += (needed.empty() ? "" : ", ") + result.name;
      }
    }
  }
  if (!needed.empty()) {
    screen += "Training cannot run: it needs " + needed + ".\n";
  } else if (num_limits > 0) {
    screen += "Training can run; see the arrows for what would make it faster or larger.\n";
  } else {
    screen += "Training can run; nothing is missing.\n";
  }
  return screen;
}

std::string doctor_json(std::span<const ProbeResult> results) {
  nlohmann::ordered_json probes = nlohmann::ordered_json::array();
  for (const ProbeResult& result : results) {
    probes.push_back({{"name", result.name},
                      {"state", to_string(result.state)},
                      {"found", result.found},
                      {"cost", result.cost},
                      {"required", result.required}});
  }
  const nlohmann::ordered_json document{{"can_train", can_train(results)}, {"probes", probes}};
  // Paths need not be UTF-8; JSON must be.
  return document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace tessera::cli
