// What a call of core costs where training would pay for it in every step: spans, log lines that
// are not shown, the byte ledger.
#include <string_view>

#include <benchmark/benchmark.h>

#include "tessera/core/clock.h"
#include "tessera/core/ledger.h"
#include "tessera/core/log.h"
#include "tessera/core/spans.h"

namespace tessera {
namespace {

constexpr std::size_t kRingSpans = 65536;

void span_recorded(benchmark::State& state) {
  const SteadyClock clock;
  Spans spans(clock, kRingSpans);
  const LabelId unit = spans.intern("h.3");
  for ([[maybe_unused]] auto _ : state) {
    SpanArgs args;
    args.bytes = 4096;
    args.unit = unit;
    const SpanScope scope(spans, "gather", args);
    benchmark::ClobberMemory();
  }
}
BENCHMARK(span_recorded);

void span_switched_off(benchmark::State& state) {
  const SteadyClock clock;
  Spans spans(clock, 0);
  for ([[maybe_unused]] auto _ : state) {
    const SpanScope scope(spans, "gather");
    benchmark::ClobberMemory();
  }
}
BENCHMARK(span_switched_off);

LogOptions silent_sink() {
  LogOptions options;
  options.sink = [](std::string_view line) { benchmark::DoNotOptimize(line.data()); };
  return options;
}

void log_line_not_shown(benchmark::State& state) {
  const Logger logger(silent_sink());
  for ([[maybe_unused]] auto _ : state) {
    logger.debug("gathered ", 4096, " bytes");
    benchmark::ClobberMemory();
  }
}
BENCHMARK(log_line_not_shown);

void log_line_shown(benchmark::State& state) {
  const Logger logger = Logger(silent_sink()).with_step(17);
  for ([[maybe_unused]] auto _ : state) {
    logger.info("gathered ", 4096, " bytes");
  }
}
BENCHMARK(log_line_shown);

void ledger_charged(benchmark::State& state) {
  Ledger ledger;
  for ([[maybe_unused]] auto _ : state) {
    ledger.charge(Tier::kHost, Role::kFull, 4096);
    ledger.discharge(Tier::kHost, Role::kFull, 4096);
  }
}
BENCHMARK(ledger_charged);

}  // namespace
}  // namespace tessera
