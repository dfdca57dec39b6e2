#include "cli/save_totals.h"

#include <algorithm>

#include <fmt/format.h>

#include "tessera/core/printable.h"
#include "tessera/core/units.h"

namespace tessera::cli {
namespace {

// Below this nobody sees it.
constexpr double kNoStallS = 1e-3;

}  // namespace

void SaveTotals::add(const SaveRecord& record) {
  if (!record.failure.empty()) {
    ++num_failed_;
    failed_ = record;
    return;
  }
  ++num_saved_;
  last_ = record;
  longest_s_ = std::max(longest_s_, record.seconds);
  if (record.is_async) {
    ++num_async_;
    async_bytes_ = record.bytes;
    stall_s_ += record.stall_s;
    longest_stall_s_ = std::max(longest_stall_s_, record.stall_s);
  }
}

std::string SaveTotals::text() const {
  std::string text;
  const char* name = "saves";
  const auto add_line = [&text, &name](const std::string& line) {
    text += fmt::format("{:<16}{}\n", name, line);
    name = "";
  };
  if (num_saved_ > 0) {
    add_line(fmt::format("{}, each in up to {:.2f} s; the last is of step {}: {}", num_saved_,
                         longest_s_, last_.step, last_.path));
  }
  if (num_async_ > 0) {
    add_line(
        fmt::format("{} beside training, {} of rank 0 each: updates waited {:.2f} s in all, "
                    "{:.2f} s at most",
                    num_async_, approximate_bytes(async_bytes_), stall_s_, longest_stall_s_));
  }
  if (num_failed_ > 0) {
    add_line(fmt::format("{} failed, the last of step {}: {}", num_failed_, failed_.step,
                         printable(failed_.failure, 400)));
  }
  return text;
}

std::string expected_save_text(const ExpectedSave& save) {
  const std::string wait = !save.stall_s ? "how long updates wait is not known yet"
                           : *save.stall_s < kNoStallS
                               ? "updates do not wait"
                               : fmt::format("updates wait about {:.2f} s", *save.stall_s);
  return fmt::format("save of {} beside training, {} of buffer: {}", approximate_bytes(save.bytes),
                     approximate_bytes(save.buffer_bytes), wait);
}

std::string load_time_text(double seconds, double read_s) {
  return fmt::format(", in {:.2f} s, {:.2f} s of them reading", seconds, read_s);
}

std::string failed_save_text(const SaveRecord& record) {
  return fmt::format("the save of step {} failed, and training goes on: {}", record.step,
                     printable(record.failure, 1000));
}

}  // namespace tessera::cli
