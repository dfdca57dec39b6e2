#include "tessera/engine/step_state.h"

#include <algorithm>
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

// All parameters of an engine have one type; what is converted elsewhere may have frozen ones of
// another.
bool is_fp16(const checkpoint::Manifest& manifest) {
  const auto has_type = [](const checkpoint::StoredParam& param) {
    const auto value = param.tensors.find(std::string(checkpoint::kValueName));
    return value != param.tensors.end() && value->second.dtype == DType::kFloat16;
  };
  return std::any_of(manifest.params.begin(), manifest.params.end(), has_type);
}

}  // namespace

// Other types have the numbers of a scale that does nothing.
std::map<std::string, std::string> to_text(const StepState& state) {
  const Fp16State fp16 = state.fp16.value_or(Fp16State{1, {}});
  return {{"num_updated_steps", std::to_string(state.num_updated_steps)},
          {"weight_scale", exact(fp16.weight_scale)},
          {"loss_scale.value", exact(fp16.loss_scale.value)},
          {"loss_scale.good_steps", std::to_string(fp16.loss_scale.good_steps)},
          {"loss_scale.hysteresis_left", std::to_string(fp16.loss_scale.hysteresis_left)},
          {"optimizer.kind", state.optimizer_kind},
          {"optimizer.num_updates", std::to_string(state.num_optimizer_updates)}};
}

StepState step_state_of(const checkpoint::Manifest& manifest, const std::string& path) {
  const Numbers numbers(manifest.state, path);
  StepState state;
  state.num_updated_steps = numbers.count("num_updated_steps");
  if (is_fp16(manifest)) {
    Fp16State& fp16 = state.fp16.emplace();
    fp16.weight_scale = numbers.number("weight_scale");
    fp16.loss_scale.value = numbers.number("loss_scale.value");
    TESSERA_CHECK(fp16.loss_scale.value > 0, CorruptError, printable(path, 400),
                  ": loss_scale.value = 0, and no gradient can be divided by that");
    fp16.loss_scale.good_steps = numbers.count("loss_scale.good_steps");
    fp16.loss_scale.hysteresis_left = numbers.count("loss_scale.hysteresis_left");
  }
  state.optimizer_kind = numbers.word("optimizer.kind");
  state.num_optimizer_updates = numbers.count("optimizer.num_updates");
  return state;
}

}  // namespace tessera::engine
