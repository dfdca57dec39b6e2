#include "cli/checkpoint_report.h"

#include <algorithm>
#include <array>
#include <ctime>
#include <map>
#include <set>

#include <fmt/format.h>

#include "cli/progress.h"
#include "tessera/core/dtype.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

using checkpoint::Manifest;
using checkpoint::StoredParam;
using checkpoint::StoredRankTensor;
using checkpoint::StoredTensor;

constexpr const char* kValue = "value";
constexpr const char* kMaster = "master";
constexpr std::size_t kNameWidth = 46;
constexpr std::size_t kShownText = 200;
constexpr std::size_t kMostShown = 20;  // of differences of a kind

std::string trimmed(std::string line) {
  line.erase(line.find_last_not_of(" \n") + 1);
  return line + "\n";
}

std::string made_text(std::int64_t made_at_s, std::int64_t now_s) {
  const auto time = static_cast<std::time_t>(made_at_s);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &parts);
  return fmt::format("{} UTC, {} ago", text.data(), age_text(now_s - made_at_s));
}

// "blocks.12.norm.weight" as "blocks.*.norm.weight": a part of the name that is all digits.
std::string without_numbers(const std::string& name) {
  std::string pattern;
  std::size_t begin = 0;
  while (begin <= name.size()) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    const bool is_number = !part.empty() && std::all_of(part.begin(), part.end(), [](char c) {
      return c >= '0' && c <= '9';
    });
    pattern += is_number ? "*" : part;
    pattern += end < name.size() ? "." : "";
    begin = end + 1;
  }
  return pattern;
}

std::string tensor_type(DType dtype, const std::string& type) {
  return type.empty() ? std::string(to_string(dtype)) : printable(type, 20);
}

// --- parameters ---

// Those of a row have all of it alike.
struct ParamRow {
  std::string pattern;
  std::string sizes;
  std::string type;
  std::string notes;
  std::int64_t numel = 0;  // of each

  bool operator==(const ParamRow&) const = default;
};

ParamRow row_of(const StoredParam& param) {
  ParamRow row;
  row.pattern = without_numbers(param.name);
  row.sizes = param.shape.empty() ? "-" : fmt::format("{}", fmt::join(param.shape, " x "));
  row.numel = param.numel();
  const auto add_note = [&row](const std::string& note) {
    row.notes += (row.notes.empty() ? "" : ", ") + note;
  };
  if (!param.trainable) {
    add_note("frozen");
  }
  for (const std::string& name : param.tied) {
    add_note("tied: " + printable(without_numbers(name), 60));
  }
  if (!param.strides.empty()) {
    add_note("not contiguous");
  }
  for (const auto& [name, tensor] : param.tensors) {
    if (name == kValue) {
      row.type = to_string(tensor.dtype);
      if (tensor.format.is_encoded()) {
        add_note(shard::describe(tensor.format));
      }
    } else {
      add_note(printable(name, 40));
    }
  }
  return row;
}

std::string params_table(const Manifest& manifest) {
  constexpr const char* kRow = "{:<46}{:>18}{:>16}  {:<6}{}\n";
  std::vector<std::pair<ParamRow, std::int64_t>> rows;
  std::int64_t numel = 0;
  for (const StoredParam& param : manifest.params) {
    const ParamRow row = row_of(param);
    numel += row.numel;
    const auto known = std::find_if(rows.begin(), rows.end(),
                                    [&row](const auto& other) { return other.first == row; });
    if (known != rows.end()) {
      ++known->second;
    } else {
      rows.emplace_back(row, 1);
    }
  }
  std::string text = fmt::format(kRow, "parameter", "sizes", "elements", "type", "beside it");
  for (const auto& [row, count] : rows) {
    const std::string times = count == 1 ? "" : fmt::format(", {} times", count);
    text += trimmed(fmt::format(kRow, printable(row.pattern, kNameWidth - times.size() - 1) + times,
                                row.sizes, grouped(row.numel), row.type, row.notes));
  }
  return text + trimmed(fmt::format(kRow, fmt::format("all {}", manifest.params.size()), "",
                                    grouped(numel), "", ""));
}

// --- bytes by kind ---

struct KindBytes {
  std::int64_t num_tensors = 0;
  std::uint64_t bytes = 0;
  std::set<std::string> types;

  void add(std::uint64_t more, const std::string& type) {
    ++num_tensors;
    bytes += more;
    types.insert(type);
  }
};

KindBytes rank_tensor_bytes(const std::vector<StoredRankTensor>& tensors) {
  KindBytes kind;
  for (const StoredRankTensor& tensor : tensors) {
    std::uint64_t bytes = 0;
    for (const checkpoint::Fragment& fragment : tensor.ranks) {
      bytes += static_cast<std::uint64_t>(fragment.numel) * bytes_of(tensor.dtype);
    }
    kind.add(bytes, tensor_type(tensor.dtype, tensor.type));
  }
  return kind;
}

std::string kinds_table(const Manifest& manifest) {
  constexpr const char* kRow = "{:<24}{:>10}{:>14}  {}\n";
  KindBytes values;
  KindBytes masters;
  std::map<std::string, KindBytes> states;
  for (const StoredParam& param : manifest.params) {
    for (const auto& [name, tensor] : param.tensors) {
      KindBytes& kind = name == kValue ? values : name == kMaster ? masters : states[name];
      if (!tensor.format.is_encoded()) {
        kind.add(static_cast<std::uint64_t>(param.numel()) * bytes_of(tensor.dtype),
                 std::string(to_string(tensor.dtype)));
        continue;
      }
      std::uint64_t bytes = 0;
      for (const checkpoint::Fragment& fragment : tensor.fragments) {
        bytes += tensor.bytes_of_fragment(fragment);
      }
      kind.add(bytes, shard::describe(tensor.format));
    }
  }
  std::string text = fmt::format(kRow, "kind", "tensors", "bytes", "types");
  KindBytes all;
  const auto add_row = [&](const std::string& name, const KindBytes& kind) {
    if (kind.num_tensors > 0) {
      text += fmt::format(kRow, name, kind.num_tensors, approximate_bytes(kind.bytes),
                          fmt::join(kind.types, ", "));
      all.num_tensors += kind.num_tensors;
      all.bytes += kind.bytes;
    }
  };
  add_row("values", values);
  add_row("masters", masters);
  for (const auto& [name, kind] : states) {
    add_row("state " + printable(name, 16), kind);
  }
  add_row("buffers", rank_tensor_bytes(manifest.buffers));
  add_row("generators", rank_tensor_bytes(manifest.generators));
  return text +
         trimmed(fmt::format(kRow, "all", all.num_tensors, approximate_bytes(all.bytes), ""));
}

// --- the rest ---

std::string entries_text(const std::string& head, const std::map<std::string, std::string>& entries,
                         const char* where_none) {
  std::string text = "\n" + head + (entries.empty() ? std::string(": ") + where_none : "") + "\n";
  for (const auto& [name, value] : entries) {
    text += fmt::format("  {} = {}\n", printable(name), printable(value, kShownText));
  }
  return text;
}

// A parameter that no step has used has fewer.
std::string updates_text(const Manifest& manifest) {
  std::int64_t least = manifest.step;
  std::int64_t most = 0;
  for (const StoredParam& param : manifest.params) {
    if (param.trainable) {
      least = std::min(least, param.updates);
      most = std::max(most, param.updates);
    }
  }
  const bool is_one = least >= most;
  return is_one ? fmt::format("{} update{} of every trainable parameter", most, plural(most))
                : fmt::format("{} to {} updates of trainable parameters", least, most);
}

}  // namespace

std::string age_text(std::int64_t seconds) {
  constexpr std::int64_t kMinute = 60;
  constexpr std::int64_t kHour = 60 * kMinute;
  constexpr std::int64_t kDay = 24 * kHour;
  seconds = std::max<std::int64_t>(seconds, 0);  // a clock that was set back
  return seconds < 2 * kMinute ? fmt::format("{} s", seconds)
         : seconds < 2 * kHour ? fmt::format("{} min", seconds / kMinute)
         : seconds < 2 * kDay  ? fmt::format("{} h", seconds / kHour)
                               : fmt::format("{} days", seconds / kDay);
}

std::uint64_t file_bytes(const Manifest& manifest) {
  std::uint64_t bytes = 0;
  for (const checkpoint::StoredFile& file : manifest.files) {
    bytes += file.bytes;
  }
  return bytes;
}

std::string saves_table(const std::vector<SaveView>& saves, std::int64_t now_s) {
  constexpr const char* kRow = "{:<30}{:>10}{:>8}{:>14}  {}\n";
  std::string text = fmt::format(kRow, "save", "step", "ranks", "bytes", "made");
  for (const SaveView& save : saves) {
    text +=
        fmt::format(kRow, printable(save.name), save.manifest.step, save.manifest.num_ranks,
                    approximate_bytes(file_bytes(save.manifest)), made_text(save.made_at_s, now_s));
  }
  return text;
}

std::string save_screen(const SaveView& save, std::int64_t now_s) {
  const Manifest& manifest = save.manifest;
  const auto num_files = static_cast<std::int64_t>(manifest.files.size());
  return fmt::format("{}: step {}, by {} rank{}, {} in {} file{}, made {}\n{}\n\n",
                     printable(save.name), manifest.step, manifest.num_ranks,
                     plural(manifest.num_ranks), approximate_bytes(file_bytes(manifest)), num_files,
                     plural(num_files), made_text(save.made_at_s, now_s), updates_text(manifest)) +
         params_table(manifest) + "\n" + kinds_table(manifest) +
         entries_text("optimizer and engine", manifest.state, "nothing") +
         entries_text("options", manifest.config, "all have their defaults") +
         entries_text("of the program that trained it", manifest.user, "nothing");
}

std::string differences_table(const checkpoint::CheckpointDifferences& differences) {
  constexpr const char* kRow = "{:<58}{:>20}  {}\n";
  std::string text;
  std::size_t num_rows = 0;
  const auto add_row = [&](const std::string& what, const std::string& first,
                           const std::string& second) {
    if (num_rows == 0) {
      text = fmt::format(kRow, "what differs", "first", "second");
    }
    if (++num_rows <= kMostShown) {
      text += fmt::format(kRow, printable(what, kShownText), first.empty() ? "-" : printable(first),
                          second.empty() ? "-" : printable(second));
    }
  };
  const auto end_rows = [&text](std::size_t count) {
    text += count > kMostShown ? fmt::format("and {} more\n", count - kMostShown) : "";
  };
  for (const checkpoint::ValueDifference& value : differences.values) {
    add_row(value.name, value.first.value_or(""), value.second.value_or(""));
  }
  for (const checkpoint::FormDifference& form : differences.forms) {
    add_row(form.what, form.first, form.second);
  }
  end_rows(num_rows);
  std::size_t num_tensors = 0;
  for (const checkpoint::TensorDifference& tensor : differences.tensors) {
    if (++num_tensors > kMostShown) {
      continue;
    }
    text += fmt::format("{}: {} of {} elements differ, by up to {:g}",
                        printable(tensor.what, kShownText), grouped(tensor.num_different),
                        grouped(tensor.numel), tensor.largest);
    text += tensor.num_nan == 0
                ? "\n"
                : fmt::format("; {} {} NaN in one of them\n", grouped(tensor.num_nan),
                              tensor.num_nan == 1 ? "is" : "are");
  }
  end_rows(num_tensors);
  return text;
}

}  // namespace tessera::cli
