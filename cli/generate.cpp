#include "cli/generate.h"

#include <memory>

#include <CLI/CLI.hpp>

#include "cli/command.h"
#include "tessera/core/units.h"

namespace tessera::cli {

Action add_generate(CLI::App& app) {
  auto flags = std::make_shared<GenerateFlags>();
  app.add_option("--checkpoint", flags->checkpoint,
                 "A directory of `tessera train --checkpoint`, of which the newest save is taken, "
                 "or one save in it")
      ->required()
      ->type_name("DIR");
  app.add_option("--prompt", flags->prompt,
                 "What to continue: text, if the model was trained on text: or demo data, else "
                 "tokens such as \"12 55 7\"")
      ->required()
      ->type_name("TEXT");
  app.add_option("--tokens", flags->tokens,
                 "Tokens to add (default " + std::to_string(kDefaultGeneratedTokens) + ")")
      ->type_name("N");
  app.add_option("--temperature", flags->temperature,
                 "Divides the logits: below 1 the likely becomes likelier; 0 takes the most likely "
                 "token (default " +
                     exact_number(kDefaultTemperature) + ")")
      ->type_name("T");
  app.add_option("--top-k", flags->top_k,
                 "Draws among so many of the most likely tokens (default 0: all)")
      ->type_name("K");
  app.add_option("--seed", flags->seed, "Another seed gives another text (default 0)")
      ->type_name("N");
  app.add_option("--device", flags->device, "cpu (default) or cuda")->type_name("NAME");
  app.add_option("--precision", flags->precision,
                 "fp32, bf16 or fp16 (default: fp32 on the CPU, the run's on a GPU)")
      ->type_name("NAME");
  app.add_flag("--no-cache", flags->no_cache,
               "Computes keys and values of all tokens anew for each: slower, the same but for "
               "rounding")
      ->disable_flag_override();
  return [flags](const Arguments&) { return run_generate(*flags); };
}

}  // namespace tessera::cli
