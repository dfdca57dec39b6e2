// A GPT's shape as text, for what outlives a run: a checkpoint says with it which model its
// parameters belong to.
//
// Each key begins with "model."; those of others are left alone. All keys are always written, and
// all are needed to read it, but those of adapters where the model has none. What concerns training
// only, such as recomputation or what is frozen, is not in it.
//
// Threads: stateless.
#pragma once

#include <map>
#include <string>

namespace tessera::models {

struct GptOptions;

std::map<std::string, std::string> describe(const GptOptions& options);

// Trusts nothing. Throws ConfigError with `path`, from where the description comes, and every key
// that is missing, unknown, or has a value that no model has.
GptOptions gpt_from_description(const std::map<std::string, std::string>& description,
                                const std::string& path);

}  // namespace tessera::models
