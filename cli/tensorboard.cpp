#include "cli/tensorboard.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  constexpr std::uint32_t kReversedPolynomial = 0x82f63b78U;
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kReversedPolynomial : 0);
    }
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kCrcTable = make_crc_table();

template <typename Unsigned>
void append_little_endian(std::string& out, Unsigned value) {
  for (std::size_t i = 0; i < sizeof(value); ++i) {
    out += static_cast<char>((value >> (8 * i)) & 0xff);
  }
}

// The fields of one message of a protocol buffer, in the order of the calls.
class Message {
 public:
  void add_double(unsigned field, double value) {
    add_key(field, kFixed64);
    append_little_endian(bytes_, std::bit_cast<std::uint64_t>(value));
  }
  void add_float(unsigned field, float value) {
    add_key(field, kFixed32);
    append_little_endian(bytes_, std::bit_cast<std::uint32_t>(value));
  }
  void add_int(unsigned field, std::int64_t value) {
    add_key(field, kVarint);
    add_varint(static_cast<std::uint64_t>(value));
  }
  // Strings and messages.
  void add_bytes(unsigned field, std::string_view value) {
    add_key(field, kLengthDelimited);
    add_varint(value.size());
    bytes_ += value;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  static constexpr unsigned kVarint = 0;
  static constexpr unsigned kFixed64 = 1;
  static constexpr unsigned kLengthDelimited = 2;
  static constexpr unsigned kFixed32 = 5;

  void add_key(unsigned field, unsigned wire_type) { add_varint(field << 3 | wire_type); }
  void add_varint(std::uint64_t value) {
    while (value >= 0x80) {
      bytes_ += static_cast<char>((value & 0x7f) | 0x80);
      value >>= 7;
    }
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

double wall_time_s() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// TensorBoard takes every file whose name contains "tfevents", in the order of the seconds.
std::string event_file_name() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0 || host.front() == '\0') {
    host = {"localhost"};
  }
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "events.out.tfevents.%010lld.",
                static_cast<long long>(wall_time_s()));
  return std::string(name.data()) + host.data() + "." + std::to_string(::getpid());
}

std::string new_event_file(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  TESSERA_CHECK(!error, IoError, "--tensorboard ", tessera::in_quotes(directory),
                " cannot be created: ", error.message());
  return (std::filesystem::path(directory) / event_file_name()).string();
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~std::uint32_t{0};
  for (const char c : bytes) {
    crc = kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

std::uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8U;
}

std::string encode_version_event(double wall_time_s) {
  Message event;
  event.add_double(1, wall_time_s);
  event.add_bytes(3, "brain.Event:2");
  return event.bytes();
}

std::string encode_start_event(double wall_time_s, std::int64_t step) {
  constexpr std::int64_t kStart = 1;
  Message session;
  session.add_int(1, kStart);
  Message event;
  event.add_double(1, wall_time_s);
  event.add_int(2, step);
  event.add_bytes(7, session.bytes());
  return event.bytes();
}

std::string encode_scalars_event(double wall_time_s, std::int64_t step,
                                 const std::vector<Scalar>& scalars) {
  Message summary;
  for (const Scalar& scalar : scalars) {
    Message value;
    value.add_bytes(1, scalar.tag);
    value.add_float(2, static_cast<float>(scalar.value));
    summary.add_bytes(1, value.bytes());
  }
  Message event;
  event.add_double(1, wall_time_s);
  event.add_int(2, step);
  event.add_bytes(5, summary.bytes());
  return event.bytes();
}

std::string encode_record(std::string_view bytes) {
  std::string record;
  append_little_endian(record, static_cast<std::uint64_t>(bytes.size()));
  append_little_endian(record, masked_crc32c(record));
  record += bytes;
  append_little_endian(record, masked_crc32c(bytes));
  return record;
}

std::vector<Scalar> tensorboard_scalars(const StepMetrics& metrics) {
  std::vector<Scalar> scalars{
      // A loss or norm that is not finite stays: TensorBoard marks it.
      {"train/loss", metrics.loss},
      {"train/grad_norm", metrics.grad_norm},
      {"train/lr", metrics.lr},
      {"train/loss_scale", metrics.loss_scale},
      {"train/skipped", metrics.skipped ? 1.0 : 0.0},
      {"speed/tokens_per_s", metrics.tokens_per_s},
      {"speed/step_s", metrics.step_s},
      {"speed/exposed_wait_s", metrics.exposed_wait_s},
  };
  if (metrics.eval_loss) {
    scalars.push_back({"eval/loss", *metrics.eval_loss});
  }
  for (const Scalar& scalar :
       {Scalar{"speed/forward_s", metrics.forward_s},
        Scalar{"speed/backward_s", metrics.backward_s}, Scalar{"speed/update_s", metrics.update_s},
        Scalar{"speed/mfu", metrics.mfu}}) {
    if (!std::isnan(scalar.value)) {
      scalars.push_back(scalar);
    }
  }
  constexpr std::array<std::string_view, kNumTiers> kHeld{
      "memory/device_bytes", "memory/pinned_bytes", "memory/host_bytes", "memory/nvme_bytes"};
  for (std::size_t tier = 0; tier < kNumTiers; ++tier) {
    scalars.push_back({kHeld[tier], static_cast<double>(metrics.held[tier].now)});
  }
  scalars.push_back({"memory/rss_peak_bytes", static_cast<double>(metrics.rss_peak_bytes)});
  if (metrics.device_peak_bytes > 0) {
    scalars.push_back({"memory/device_peak_bytes", static_cast<double>(metrics.device_peak_bytes)});
  }
  return scalars;
}

TensorBoardFile::TensorBoardFile(const std::string& directory, std::int64_t num_done,
                                 std::function<void(const std::string& text)> warn)
    : file_({"--tensorboard", new_event_file(directory), 0, std::move(warn)}), num_done_(num_done) {
  append(std::string());
}

bool TensorBoardFile::append(const StepMetrics& metrics) {
  return append(encode_record(
      encode_scalars_event(wall_time_s(), metrics.step, tensorboard_scalars(metrics))));
}

bool TensorBoardFile::append(std::string records) {
  if (!has_head_) {
    const double now_s = wall_time_s();
    std::string head = encode_record(encode_version_event(now_s));
    if (num_done_ > 0) {
      head += encode_record(encode_start_event(now_s, num_done_ + 1));
    }
    records.insert(0, head);
  }
  const bool written = file_.append(records);
  has_head_ = has_head_ || written;
  return written;
}

}  // namespace tessera::cli
