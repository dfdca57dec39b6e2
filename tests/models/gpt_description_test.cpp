// A model's shape as text: what was written comes back, and what nobody can have written is named.
#include "models/gpt_description.h"

#include <functional>

#include <gtest/gtest.h>

#include "models/gpt.h"
#include "tests/models/models_support.h"
#include "tests/support/contains.h"

namespace tessera::models {
namespace {

using Description = std::map<std::string, std::string>;

GptOptions odd_gpt() {
  GptOptions options;
  options.width = 15;
  options.layers = 3;
  options.heads = 5;
  options.vocabulary = 77;
  options.sequence = 9;
  return options;
}

std::string refusal(const std::function<void(Description&)>& change) {
  Description description = describe(odd_gpt());
  change(description);
  return message_of([&] { gpt_from_description(description, "run/save"); });
}

TEST(GptDescription, ComesBackAsItWas) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool yes : {false, true}) {
      GptOptions options = odd_gpt();
      options.dtype = dtype;
      options.tie_head = yes;
      options.gelu_tanh = !yes;
      options.adapter_rank = yes ? 4 : 0;
      options.adapter_alpha = yes ? 0.1 : 0;  // no sum of powers of two
      Description description = describe(options);
      EXPECT_EQ(description.contains("model.adapter_rank"), yes);
      description["data.sources"] = "demo";  // not its own
      const GptOptions found = gpt_from_description(description, "run/save");
      EXPECT_EQ(describe(found), describe(options));
      EXPECT_EQ(found.sequence, options.sequence);
      EXPECT_EQ(found.tie_head, options.tie_head);
      EXPECT_EQ(found.gelu_tanh, options.gelu_tanh);
      EXPECT_EQ(found.dtype, options.dtype);
      EXPECT_EQ(found.adapter_rank, options.adapter_rank);
      EXPECT_EQ(found.adapter_alpha, options.adapter_alpha);
    }
  }
}

TEST(GptDescription, NamesEveryKeyThatIsMissingOrOdd) {
  EXPECT_EQ(refusal([](Description& d) {
              d.erase("model.heads");
              d["model.width"] = "15 ";
              d["model.tie_head"] = "yes";
              d["model.experts"] = "8";
            }),
            "run/save: describes no GPT of ours: model.width is \"15 \", model.heads is missing, "
            "model.tie_head is \"yes\", \"model.experts\" is unknown; was it written by tessera "
            "train, and by this version?");
  EXPECT_HAS(refusal([](Description& d) { d["model.layers"] = "99999999999999999999"; }),
             "model.layers is \"99999999999999999999\"");
  EXPECT_HAS(refusal([](Description& d) { d["model.dtype"] = "int64"; }), "model.dtype is");
  EXPECT_HAS(refusal([](Description& d) { d["model.adapter_rank"] = "0"; }),
             "model.adapter_rank is \"0\", model.adapter_alpha is missing");
  EXPECT_HAS(refusal([](Description& d) {
               d["model.adapter_rank"] = "2";
               d["model.adapter_alpha"] = "much";
             }),
             "model.adapter_alpha is \"much\"");
  EXPECT_HAS(refusal([](Description& d) { d["model.gelu"] = ""; }), "model.gelu is \"\"");
  EXPECT_HAS(refusal([](Description& d) { d.clear(); }), "model.width is missing");
}

TEST(GptDescription, RefusesAShapeThatNoModelHas) {
  EXPECT_EQ(refusal([](Description& d) { d["model.heads"] = "4"; }),
            "run/save: describes an impossible GPT: --heads 4 does not divide --width 15; the "
            "nearest that does is 3");
  EXPECT_HAS(refusal([](Description& d) { d["model.layers"] = "-1"; }), "--layers -1");
}

}  // namespace
}  // namespace tessera::models
