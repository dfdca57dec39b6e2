// `tessera plot`: what is read of a run's metrics, and what the page has of them.
#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cli/metrics.h"
#include "cli/plot_page.h"
#include "cli/plot_runs.h"
#include "tests/support/contains.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::json;

PlotRun read_text(const std::string& text) {
  std::istringstream in(text);
  return read_plot_run("run", in);
}

Json json_of(const PlotRun& run, std::size_t max_points = kMaxPlotPoints) {
  return Json::parse(plot_json({run}, max_points)).at("runs").at(0);
}

std::string line_of(std::int64_t step, double loss) {
  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = loss;
  metrics.step_s = 0.5;
  metrics.tokens = 64 * step;
  metrics.tokens_per_s = 128;
  return metrics_json(metrics) + "\n";
}

TEST(PlotRuns, ReadWhatTrainingWrites) {
  const Json run = json_of(read_text(line_of(1, 4.5) + line_of(2, 3.5)));
  EXPECT_EQ(run.at("x").at("step"), Json({1, 2}));
  EXPECT_EQ(run.at("x").at("tokens"), Json({64.0, 128.0}));
  EXPECT_EQ(run.at("x").at("time"), Json({0.5, 1.0}));
  EXPECT_EQ(run.at("series").at("loss").at("mean"), Json({4.5, 3.5}));
  EXPECT_EQ(run.at("facts"), "2 steps, loss 4.5 -> 3.5, 128 tokens/s");
  // Not known is not a failure, and no chart.
  EXPECT_FALSE(run.at("series").contains("mfu"));
  // Every field that the page draws and that every step has is one of the metrics.
  const Json metrics = Json::parse(line_of(1, 1));
  for (const std::string_view field : kPlotFields) {
    EXPECT_TRUE(field == "eval_loss" || metrics.contains(field)) << field;
  }
}

TEST(PlotRuns, AnEmptyFileIsARunWithoutSteps) {
  const PlotRun run = read_text("");
  EXPECT_TRUE(run.steps.empty());
  EXPECT_FALSE(run.is_torn);
  EXPECT_EQ(json_of(run).at("facts"), "no step yet");
}

TEST(PlotRuns, ALastLineThatIsBeingWrittenIsLeftOut) {
  const std::string second = line_of(2, 2);
  for (std::size_t length = 1; length < second.size(); length += 7) {
    const PlotRun run = read_text(line_of(1, 3) + second.substr(0, length));
    EXPECT_EQ(run.steps.size(), 1U) << length;
    EXPECT_TRUE(run.is_torn) << length;
    EXPECT_EQ(run.num_unreadable, 0U) << length;
  }
}

TEST(PlotRuns, LinesThatAreNoStepAreCounted) {
  const PlotRun run = read_text("{\"step\": \"one\"}\n[1]\n{\"st" + line_of(1, 3) + line_of(2, 3));
  EXPECT_EQ(run.steps.size(), 1U);
  EXPECT_EQ(run.num_unreadable, 3U);
  EXPECT_HAS(json_of(run).at("facts").get<std::string>(), "3 unreadable lines");
}

TEST(PlotRuns, WhatIsNotFiniteIsAGapWithAMark) {
  const Json run = json_of(read_text(line_of(1, 4) + line_of(2, std::nan("")) + line_of(3, 2)));
  EXPECT_EQ(run.at("series").at("loss").at("mean"), Json({4.0, nullptr, 2.0}));
  EXPECT_EQ(run.at("series").at("loss").at("nulls"), Json({1}));
}

TEST(PlotRuns, ARunThatWentOnFromAnEarlierStepHasEachStepOnce) {
  const PlotRun run =
      read_text(line_of(1, 5) + line_of(2, 4) + line_of(3, 3) + line_of(2, 40) + line_of(3, 30));
  const Json json = json_of(run);
  EXPECT_EQ(json.at("x").at("step"), Json({1, 2, 3}));
  EXPECT_EQ(json.at("series").at("loss").at("mean"), Json({5.0, 40.0, 30.0}));
  EXPECT_EQ(json.at("x").at("time"), Json({0.5, 1.0, 1.5}));
}

TEST(PlotRuns, ManyStepsKeepTheirExtremesAndTheLastOne) {
  std::string text;
  for (std::int64_t step = 1; step <= 1000; ++step) {
    text += line_of(step, step == 777 ? 100 : step == 333 ? -100 : 1);
  }
  const Json run = json_of(read_text(text), 30);
  const Json& loss = run.at("series").at("loss");
  ASSERT_EQ(loss.at("mean").size(), 30U);
  double low = 0;
  double high = 0;
  for (std::size_t i = 0; i < 30; ++i) {
    low = std::min(low, loss.at("min").at(i).get<double>());
    high = std::max(high, loss.at("max").at(i).get<double>());
  }
  EXPECT_EQ(low, -100);
  EXPECT_EQ(high, 100);
  EXPECT_EQ(run.at("x").at("step").back(), 1000);
}

TEST(PlotRuns, ASkippedStepIsMarkedAlsoAmongMany) {
  std::string text;
  for (std::int64_t step = 1; step <= 100; ++step) {
    StepMetrics metrics;
    metrics.step = step;
    metrics.skipped = step == 55;
    text += metrics_json(metrics) + "\n";
  }
  EXPECT_EQ(json_of(read_text(text)).at("skipped"), Json({54}));
  EXPECT_EQ(json_of(read_text(text), 10).at("skipped"), Json({5}));
}

TEST(PlotPage, LoadsNothingAndHoldsNoNameThatIsMarkup) {
  PlotRun run = read_text(line_of(1, 2));
  run.name = "</script><img src=x onerror=\"alert('1')\">&\xff{{script}}";
  const std::string page = plot_page(run.name, plot_json({run}));
  EXPECT_LACKS(page, "<img");
  EXPECT_HAS(page,
             "<title>&lt;/script&gt;&lt;img src=x onerror=&quot;alert(&#39;1&#39;)&quot;"
             "&gt;&amp;");
  // The data is one script element, and is what was put in.
  const std::string begin = "<script type=\"application/json\" id=\"data\">";
  const std::size_t from = page.find(begin) + begin.size();
  const Json data = Json::parse(page.substr(from, page.find("</script>", from) - from));
  EXPECT_EQ(data.at("runs").at(0).at("name").get<std::string>().find("</script><img"), 0U);
  // The only address is the name of SVG, which nobody asks for.
  for (const char* word : {"src=\"", "href=", "@import", "url(http", "fetch(", "XMLHttpRequest"}) {
    EXPECT_LACKS(page, word);
  }
  std::size_t num_addresses = 0;
  for (std::size_t at = page.find("://"); at != std::string::npos; at = page.find("://", at + 1)) {
    ++num_addresses;
  }
  EXPECT_EQ(num_addresses, 1U);
  EXPECT_HAS(page, "prefers-color-scheme: dark");
}

}  // namespace
}  // namespace tessera::cli
