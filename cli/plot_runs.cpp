#include "cli/plot_runs.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/progress.h"
#include "tessera/core/printable.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::json;

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

constexpr std::size_t index_of(std::string_view field) {
  return static_cast<std::size_t>(std::find(kPlotFields.begin(), kPlotFields.end(), field) -
                                  kPlotFields.begin());
}

constexpr std::size_t kLoss = index_of("loss");
constexpr std::size_t kStepTime = index_of("step_s");
constexpr std::size_t kSpeed = index_of("tokens_per_s");

// A null elsewhere says that the number is not known.
constexpr bool means_not_finite(std::size_t field) {
  return field == kLoss || field == index_of("eval_loss") || field == index_of("grad_norm");
}

// False: not the object of a step.
bool read_step(const std::string& line, PlotStep& step) {
  const Json object = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || !object.contains("step") || !object["step"].is_number_integer()) {
    return false;
  }
  step.step = object["step"].get<std::int64_t>();
  step.skipped = object.contains("skipped") && object["skipped"] == true;
  step.tokens = object.contains("tokens") && object["tokens"].is_number()
                    ? object["tokens"].get<double>()
                    : kNothing;
  for (std::size_t i = 0; i < kNumPlotFields; ++i) {
    const auto found = object.find(kPlotFields[i]);
    step.values[i] = found != object.end() && found->is_number() ? found->get<double>() : kNothing;
    step.is_null[i] = found != object.end() && found->is_null() && means_not_finite(i);
  }
  return true;
}

void append_step(std::vector<PlotStep>& steps, PlotStep step) {
  while (!steps.empty() && steps.back().step >= step.step) {
    steps.pop_back();
  }
  const double step_s = std::isfinite(step.values[kStepTime]) ? step.values[kStepTime] : 0;
  step.time_s = (steps.empty() ? 0 : steps.back().time_s) + step_s;
  if (!std::isfinite(step.tokens)) {
    const double speed = std::isfinite(step.values[kSpeed]) ? step.values[kSpeed] : 0;
    step.tokens = (steps.empty() ? 0 : steps.back().tokens) + speed * step_s;
  }
  steps.push_back(step);
}

// Seven digits are more than a screen can show.
Json number(double value) {
  if (!std::isfinite(value)) {
    return nullptr;
  }
  return std::strtod(fmt::format("{:.7g}", value).c_str(), nullptr);
}

struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;
};

std::vector<Range> buckets_of(std::size_t num_steps, std::size_t max_points) {
  const std::size_t count = std::min(num_steps, max_points);
  std::vector<Range> buckets;
  for (std::size_t i = 0; i < count; ++i) {
    buckets.push_back({i * num_steps / count, (i + 1) * num_steps / count});
  }
  return buckets;
}

Json series_json(const std::vector<PlotStep>& steps, const std::vector<Range>& buckets,
                 std::size_t field) {
  Json mean = Json::array();
  Json min = Json::array();
  Json max = Json::array();
  Json nulls = Json::array();
  bool has_any = false;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    double sum = 0;
    double count = 0;
    double low = std::numeric_limits<double>::infinity();
    double high = -low;
    bool has_null = false;
    for (std::size_t row = buckets[i].begin; row < buckets[i].end; ++row) {
      const double value = steps[row].values[field];
      has_null = has_null || steps[row].is_null[field];
      if (std::isfinite(value)) {
        sum += value;
        ++count;
        low = std::min(low, value);
        high = std::max(high, value);
      }
    }
    if (has_null) {
      nulls.push_back(i);
    }
    has_any = has_any || count > 0 || has_null;
    mean.push_back(count > 0 ? number(sum / count) : Json());
    min.push_back(number(low));
    max.push_back(number(high));
  }
  if (!has_any) {
    return {};
  }
  Json series{{"mean", std::move(mean)}};
  if (buckets.size() < steps.size()) {
    series["min"] = std::move(min);
    series["max"] = std::move(max);
  }
  if (!nulls.empty()) {
    series["nulls"] = std::move(nulls);
  }
  return series;
}

// "400 steps, loss 5.54 -> 2.31, 12.3k tokens/s, 3 skipped"
std::string facts_text(const PlotRun& run) {
  std::string text = run.steps.empty()
                         ? "no step yet"
                         : fmt::format("{} step{}", run.steps.size(),
                                       plural(static_cast<std::int64_t>(run.steps.size())));
  const auto has_loss = [](const PlotStep& step) { return std::isfinite(step.values[kLoss]); };
  const auto first = std::find_if(run.steps.begin(), run.steps.end(), has_loss);
  if (first != run.steps.end()) {
    const auto last = std::find_if(run.steps.rbegin(), run.steps.rend(), has_loss);
    text += fmt::format(", loss {:.4g} -> {:.4g}", first->values[kLoss], last->values[kLoss]);
  }
  if (!run.steps.empty() && run.steps.back().time_s > 0) {
    double tokens = 0;
    for (const PlotStep& step : run.steps) {
      const double in_step = step.values[kSpeed] * step.values[kStepTime];
      tokens += std::isfinite(in_step) ? in_step : 0;
    }
    text += fmt::format(", {} tokens/s", count_text(tokens / run.steps.back().time_s));
  }
  const auto num_skipped = std::count_if(run.steps.begin(), run.steps.end(),
                                         [](const PlotStep& step) { return step.skipped; });
  if (num_skipped > 0) {
    text += fmt::format(", {} skipped", num_skipped);
  }
  if (run.num_unreadable > 0) {
    text += fmt::format(", {} unreadable line{}", run.num_unreadable,
                        plural(static_cast<std::int64_t>(run.num_unreadable)));
  }
  return text;
}

Json run_json(const PlotRun& run, std::size_t max_points) {
  const std::vector<Range> buckets = buckets_of(run.steps.size(), max_points);
  Json step = Json::array();
  Json tokens = Json::array();
  Json time = Json::array();
  Json skipped = Json::array();
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const PlotStep& last = run.steps[buckets[i].end - 1];
    step.push_back(last.step);
    tokens.push_back(last.tokens);
    time.push_back(number(last.time_s));
    const auto begin = run.steps.begin() + static_cast<std::ptrdiff_t>(buckets[i].begin);
    const auto end = run.steps.begin() + static_cast<std::ptrdiff_t>(buckets[i].end);
    if (std::any_of(begin, end, [](const PlotStep& row) { return row.skipped; })) {
      skipped.push_back(i);
    }
  }
  Json series = Json::object();
  for (std::size_t field = 0; field < kNumPlotFields; ++field) {
    Json one = series_json(run.steps, buckets, field);
    if (!one.is_null()) {
      series[std::string(kPlotFields[field])] = std::move(one);
    }
  }
  return {{"name", run.name},
          {"facts", facts_text(run)},
          {"x", {{"step", step}, {"tokens", tokens}, {"time", time}}},
          {"skipped", skipped},
          {"series", series}};
}

}  // namespace

PlotRun read_plot_run(std::string name, std::istream& in) {
  PlotRun run;
  run.name = std::move(name);
  std::string line;
  while (std::getline(in, line)) {
    if (in.eof()) {  // no newline behind it: its end is not written yet
      run.is_torn = true;
      break;
    }
    PlotStep step;
    if (read_step(line, step)) {
      append_step(run.steps, step);
    } else {
      run.num_unreadable += line.empty() ? 0 : 1;
    }
  }
  return run;
}

std::string plot_json(const std::vector<PlotRun>& runs, std::size_t max_points) {
  Json list = Json::array();
  for (const PlotRun& run : runs) {
    list.push_back(run_json(run, max_points));
  }
  return Json{{"runs", std::move(list)}}.dump(-1, ' ', /*ensure_ascii=*/true,
                                              Json::error_handler_t::replace);
}

}  // namespace tessera::cli
