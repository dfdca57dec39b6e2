// Apart from generate.cpp, since the headers of models bring torch's.
#include <cstdint>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/flag_values.h"
#include "cli/generate.h"
#include "models/gpt.h"
#include "models/gpt_checkpoint.h"
#include "models/gpt_generation.h"
#include "models/token_text.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/units.h"
#include "tessera/device/device_cuda.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;
constexpr std::int64_t kMaxSeed = std::numeric_limits<std::int64_t>::max();

std::int64_t count_of(const char* flag, const std::string& text, std::int64_t otherwise,
                      std::int64_t min, std::int64_t max) {
  return text.empty() ? otherwise : parse_count(flag, text, min, max);
}

models::GenerationOptions checked_generation(const GenerateFlags& flags) {
  models::GenerationOptions options;
  options.num_tokens = count_of("--tokens", flags.tokens, kDefaultGeneratedTokens, 1, kMaxTokens);
  options.use_cache = !flags.no_cache;
  options.sampling.top_k = count_of("--top-k", flags.top_k, 0, 0, kMaxTokens);
  options.sampling.seed =
      static_cast<std::uint64_t>(count_of("--seed", flags.seed, 0, 0, kMaxSeed));
  options.sampling.temperature = kDefaultTemperature;
  if (!flags.temperature.empty()) {
    const std::optional<double> temperature = parse_number(flags.temperature);
    TESSERA_CHECK(temperature && *temperature >= 0, ConfigError, "--temperature ",
                  tessera::in_quotes(flags.temperature), " is not a number from 0 on");
    options.sampling.temperature = *temperature;
  }
  return options;
}

at::Device checked_device(const std::string& name) {
  TESSERA_CHECK(name.empty() || name == "cpu" || name == "cuda", ConfigError, "--device ",
                tessera::in_quotes(name), " is neither cpu nor cuda");
  TESSERA_CHECK(name != "cuda" || device::num_cuda_devices() > 0, ConfigError,
                "--device cuda: there is no GPU that this build can use; tessera doctor says why");
  return name == "cuda" ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
}

}  // namespace

int run_generate(const GenerateFlags& flags) {
  models::GenerationOptions generation = checked_generation(flags);
  const at::Device device = checked_device(flags.device);
  const auto checkpoint = std::make_shared<const models::GptCheckpoint>(flags.checkpoint);
  models::GptOptions options = checkpoint->options();
  // Low precision is slow on most CPUs, and gains nothing where a token is computed at a time.
  if (!flags.precision.empty()) {
    options.dtype = parse_precision("--precision", flags.precision);
  } else if (device.is_cpu()) {
    options.dtype = DType::kFloat32;
  }

  const auto& user = checkpoint->manifest().user;
  const auto sources = user.find(models::kDataSources);
  const models::TokenMeaning meaning =
      models::token_meaning_of(sources == user.end() ? std::string() : sources->second);
  generation.num_symbols = models::num_text_symbols(meaning);
  const std::vector<std::int64_t> prompt = models::prompt_tokens(meaning, flags.prompt);
  models::check_prompt(prompt, options.vocabulary);
  if (static_cast<std::int64_t>(prompt.size()) > options.sequence) {
    std::cerr << "tessera: warning: the prompt has " << prompt.size()
              << " tokens, and the model has positions for " << options.sequence
              << ": it sees the last " << models::tokens_kept(options.sequence) << "\n";
  }

  models::Gpt gpt(options, device, /*seed=*/0, checkpoint);
  bool is_first = true;
  const auto print = [&](std::int64_t token) {
    std::cout << models::token_text(meaning, token, is_first) << std::flush;
    is_first = false;
  };
  for (const std::int64_t token : prompt) {
    print(token);
  }
  models::generate(gpt, prompt, generation, print);
  std::cout << "\n";
  return kExitOk;
}

}  // namespace tessera::cli
