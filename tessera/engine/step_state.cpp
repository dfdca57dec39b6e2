#include "tessera/engine/step_state.h"

#include <charconv>
#include <cmath>
#include <cstdio>

#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::engine {
namespace {

std::string exact(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

class Numbers {
 public:
  Numbers(const std::map<std::string, std::string>& text, const std::string& path)
      : text_(text), path_(path) {}

  const std::string& word(const std::string& name) const {
    const auto found = text_.find(name);
    TESSERA_CHECK(found != text_.end(), CorruptError, printable(path_, 400), ": its state has no ",
                  name);
    return found->second;
  }
  std::int64_t count(const std::string& name) const {
    const std::string& text = word(name);
    std::int64_t value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    TESSERA_CHECK(error == std::errc() && end == text.data() + text.size() && value >= 0,
                  CorruptError, printable(path_, 400), ": ", name, " = ", in_quotes(text),
                  " is no whole number of at least 0");
    return value;
  }
  double number(const std::string& name) const {
    const std::string& text = word(name);
    double value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    TESSERA_CHECK(error == std::errc() && end == text.data() + text.size() &&
                      std::isfinite(value) && value >= 0,
                  CorruptError, printable(path_, 400), ": ", name, " = ", in_quotes(text),
                  " is no finite number of at least 0");
    return value;
  }

 private:
  const std::map<std::string, std::string>& text_;
  const std::string& path_;
};

}  // namespace

std::map<std::string, std::string> to_text(const StepState& state) {
  return {{"num_updated_steps", std::to_string(state.num_updated_steps)},
          {"weight_scale", exact(state.weight_scale)},
          {"loss_scale.value", exact(state.loss_scale.value)},
          {"loss_scale.good_steps", std::to_string(state.loss_scale.good_steps)},
          {"loss_scale.hysteresis_left", std::to_string(state.loss_scale.hysteresis_left)},
          {"optimizer.kind", state.optimizer_kind},
          {"optimizer.num_updates", std::to_string(state.num_optimizer_updates)}};
}

StepState step_state_of(const std::map<std::string, std::string>& text, const std::string& path) {
  const Numbers numbers(text, path);
  StepState state;
  state.num_updated_steps = numbers.count("num_updated_steps");
  state.weight_scale = numbers.number("weight_scale");
  state.loss_scale.value = numbers.number("loss_scale.value");
  state.loss_scale.good_steps = numbers.count("loss_scale.good_steps");
  state.loss_scale.hysteresis_left = numbers.count("loss_scale.hysteresis_left");
  state.optimizer_kind = numbers.word("optimizer.kind");
  state.num_optimizer_updates = numbers.count("optimizer.num_updates");
  return state;
}

}  // namespace tessera::engine
