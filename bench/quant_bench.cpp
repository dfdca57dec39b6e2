// Blocks of integers beside a copy of the same values: how far they are from the speed of memory.
//
//   quant_bench [--numel=N] [--seconds=S] [--block_numel=N] [--host | --gpu]
//
// On one core of the host, for every instruction set that it can run, beside memcpy; and, where
// there is a GPU, on it, beside a copy from device to device; or on one of them alone. Bytes per
// second count what is read and written. Rounds of all of them take turns, so that each ratio is of
// one time; a rate is the median of its rounds. A round on a GPU is several runs in a row, so that
// launches and the wait for the last one are not what is measured. The last lines are the lowest
// ratios, with the targets.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/device/device_cpu.h"
#include "tessera/device/device_cuda.h"
#include "tessera/quant/block_codec.h"
#include "tessera/quant/block_loops.h"

namespace tessera::quant {
namespace {

using device::StreamKind;
using Clock = std::chrono::steady_clock;

constexpr int kWires = 4;      // of a sum
constexpr int kRunsOfGpu = 8;  // in a round
constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

struct Arguments {
  std::int64_t numel = std::int64_t{32} << 20;  // 128 MiB of fp32: more than a core's caches
  std::int64_t block_numel = 128;
  std::int64_t seconds = 1;  // for each table
  bool on_host = true;
  bool on_gpu = true;
};

struct Row {
  std::string name;
  std::size_t bytes = 0;  // read and written
  std::function<void()> run;
  double target = 0;  // of the copy's rate; zero: none
  std::vector<double> rates;

  double median() {
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() / 2];
  }
};

// The first row is the copy. Returns the lowest ratio among rows with a target.
double measure(const std::string& title, std::vector<Row>& rows, std::int64_t seconds,
               int runs_of_round, const std::function<void()>& wait) {
  const auto run_round = [&](const Row& row) {
    for (int i = 0; i < runs_of_round; ++i) {
      row.run();
    }
    wait();
  };
  for (const Row& row : rows) {
    run_round(row);
  }
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  do {
    for (Row& row : rows) {
      const auto begin = Clock::now();
      run_round(row);
      const std::chrono::duration<double> taken = Clock::now() - begin;
      row.rates.push_back(static_cast<double>(row.bytes) * runs_of_round / taken.count());
    }
  } while (Clock::now() < end || rows[0].rates.size() < 5);
  const double copy = rows[0].median();
  std::printf("%s\n", title.c_str());
  double lowest = 1e9;
  for (Row& row : rows) {
    const double ratio = row.median() / copy;
    std::printf("  %-24s %9.2f GB/s  %5.2f of a copy%s\n", row.name.c_str(), row.median() * 1e-9,
                ratio, row.target > 0 && ratio < row.target ? "  below its target" : "");
    lowest = row.target > 0 ? std::min(lowest, ratio) : lowest;
  }
  std::fflush(stdout);
  return lowest;
}

std::vector<std::byte> sample(DType dtype, std::int64_t numel) {
  std::vector<std::byte> values(static_cast<std::size_t>(numel) * bytes_of(dtype));
  std::uint64_t state = 24;
  for (std::int64_t i = 0; i < numel; ++i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    const float value = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-36F;
    std::byte* const to = values.data() + i * static_cast<std::int64_t>(bytes_of(dtype));
    if (dtype == DType::kFloat32) {
      std::memcpy(to, &value, sizeof(value));
    } else {
      const std::uint16_t bits =
          dtype == DType::kBFloat16 ? to_bfloat16(value).bits : to_float16(value).bits;
      std::memcpy(to, &bits, sizeof(bits));
    }
  }
  return values;
}

double on_host(const Arguments& arguments, DType dtype, int bits) {
  const BlockFormat format{bits, arguments.block_numel};
  const std::int64_t numel = arguments.numel;
  const std::vector<std::byte> values = sample(dtype, numel);
  const std::size_t wire_numel = wire_bytes(format, numel);
  // Aligned, and touched before they are measured.
  const auto host = device::make_cpu_device();
  const device::Memory out = host->allocate(Tier::kHost, values.size(), Role::kOther);
  const device::Memory wires = host->allocate(Tier::kHost, kWires * wire_numel, Role::kOther);
  std::memset(out.data(), 0, out.bytes());
  std::vector<Row> rows;
  rows.push_back({"memcpy",
                  2 * values.size(),
                  [&] { std::memcpy(out.data(), values.data(), values.size()); },
                  0,
                  {}});
  for (const BlockLoops& loops : runnable_block_loops()) {
    for (int rank = 0; rank < kWires; ++rank) {
      loops.encode(format, values.data(), dtype, numel,
                   wires.data() + static_cast<std::size_t>(rank) * wire_numel);
    }
    const bool is_best = loops.name == best_block_loops().name;
    const double target = is_best && dtype == DType::kFloat32 ? 0.5 : 0;
    const std::string of = " " + std::string(loops.name);
    const std::size_t both = values.size() + wire_numel;
    rows.push_back({"encode" + of,
                    both,
                    [&] { loops.encode(format, values.data(), dtype, numel, wires.data()); },
                    target,
                    {}});
    rows.push_back({"decode" + of,
                    both,
                    [&] { loops.decode(format, wires.data(), numel, out.data(), dtype); },
                    target,
                    {}});
    rows.push_back({"sum of 4" + of,
                    values.size() + kWires * wire_numel,
                    [&] {
                      loops.decode_sum(format, wires.data(), wire_numel, kWires, numel, out.data(),
                                       dtype);
                    },
                    0,
                    {}});
    rows.push_back({"measure" + of,
                    both,
                    [&] {
                      double result[2];
                      measure_blocks(loops, format, values.data(), dtype, numel, wires.data(),
                                     result, false);
                    },
                    0,
                    {}});
  }
  return measure("one core, " + to_string(format) + ", " + std::string(to_string(dtype)), rows,
                 arguments.seconds, 1, [] {});
}

double on_gpu(const Arguments& arguments, DType dtype, int bits) {
  const auto gpu = device::make_cuda_device();
  device::Stream& stream = gpu->stream(StreamKind::kReduce);
  const BlockFormat format{bits, arguments.block_numel};
  const auto codec = make_cuda_block_codec(format, *gpu);
  // 1 GiB of fp32 where the host has 128 MiB: many times a GPU's cache, and long beside a launch.
  const std::int64_t numel = 8 * arguments.numel;
  const std::vector<std::byte> some = sample(dtype, arguments.numel);
  const std::size_t bytes = 8 * some.size();
  const std::size_t wire_numel = codec->wire_bytes(numel);
  const device::Memory values = gpu->allocate(Tier::kDevice, bytes, Role::kOther);
  const device::Memory out = gpu->allocate(Tier::kDevice, bytes, Role::kOther);
  const device::Memory wires = gpu->allocate(Tier::kDevice, kWires * wire_numel, Role::kOther);
  const device::Memory result = gpu->allocate(Tier::kDevice, 2 * sizeof(double), Role::kOther);
  for (std::size_t part = 0; part < 8; ++part) {
    gpu->start_copy(values.data() + part * some.size(), some.data(), some.size(), stream).wait();
  }
  for (std::size_t rank = 0; rank < kWires; ++rank) {
    codec->encode(values.data(), dtype, numel, wires.data() + rank * wire_numel, &stream).wait();
  }
  device::Pending last;
  std::vector<Row> rows;
  rows.push_back({"copy on the device",
                  2 * bytes,
                  [&] { last = gpu->start_copy(out.data(), values.data(), bytes, stream); },
                  0,
                  {}});
  rows.push_back({"encode",
                  bytes + wire_numel,
                  [&] { last = codec->encode(values.data(), dtype, numel, wires.data(), &stream); },
                  0.7,
                  {}});
  rows.push_back({"decode",
                  bytes + wire_numel,
                  [&] { last = codec->decode(wires.data(), numel, out.data(), dtype, &stream); },
                  0.7,
                  {}});
  for (const int num_wires : {2, kWires}) {
    rows.push_back({"sum of " + std::to_string(num_wires),
                    bytes + static_cast<std::size_t>(num_wires) * wire_numel,
                    [&, num_wires] {
                      last = codec->decode_sum(wires.data(), wire_numel, num_wires, numel,
                                               out.data(), dtype, &stream);
                    },
                    0.7,
                    {}});
  }
  rows.push_back({"measure",
                  bytes + wire_numel,
                  [&] {
                    last = codec->measure(values.data(), dtype, numel, wires.data(),
                                          reinterpret_cast<double*>(result.data()), false, &stream);
                  },
                  0.7,
                  {}});
  return measure(gpu->name() + ", " + to_string(format) + ", " + std::string(to_string(dtype)),
                 rows, arguments.seconds, kRunsOfGpu, [&] { last.wait(); });
}

bool take(std::string_view argument, std::string_view name, std::int64_t& value) {
  if (!argument.starts_with(name)) {
    return false;
  }
  const std::string_view text = argument.substr(name.size());
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value > 0;
}

int run(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--host" || argument == "--gpu") {
      arguments.on_host = argument == "--host";
      arguments.on_gpu = argument == "--gpu";
    } else if (!take(argv[i], "--numel=", arguments.numel) &&
               !take(argv[i], "--seconds=", arguments.seconds) &&
               !take(argv[i], "--block_numel=", arguments.block_numel)) {
      std::fprintf(stderr, "%s is none of --numel=N --seconds=S --block_numel=N --host --gpu\n",
                   argv[i]);
      return 2;
    }
  }
  double host_ratio = 1e9;
  double gpu_ratio = 1e9;
  const bool has_gpu = arguments.on_gpu && device::num_cuda_devices() > 0;
  for (const DType dtype : kTypes) {
    for (const int bits : {8, 4}) {
      if (arguments.on_host) {
        host_ratio = std::min(host_ratio, on_host(arguments, dtype, bits));
      }
      if (has_gpu) {
        gpu_ratio = std::min(gpu_ratio, on_gpu(arguments, dtype, bits));
      }
    }
  }
  if (arguments.on_host) {
    std::printf("lowest ratio on one core, fp32, encode and decode: %.2f (target 0.5)\n",
                host_ratio);
  }
  if (has_gpu) {
    std::printf("lowest ratio on the GPU: %.2f (target 0.7)\n", gpu_ratio);
  } else if (arguments.on_gpu) {
    std::printf("no GPU: %s\n", device::cuda_description().c_str());
  }
  return 0;
}

}  // namespace
}  // namespace tessera::quant

int main(int argc, char** argv) {
  try {
    return tessera::quant::run(argc, argv);
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
