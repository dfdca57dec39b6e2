#include "tessera/checkpoint/comparison.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <span>

#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {
namespace {

template <typename Element>
Element load_element(const std::byte* from) {
  Element element;
  std::memcpy(&element, from, sizeof(element));
  return element;
}

// One element of each in double, which holds all but the largest int64 exactly.
double element_value(const std::byte* from, DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return load_element<double>(from);
    case DType::kFloat32:
      return load_element<float>(from);
    case DType::kBFloat16:
      return to_float(load_element<BFloat16>(from));
    case DType::kFloat16:
      return to_float(load_element<Float16>(from));
    case DType::kInt64:
      return static_cast<double>(load_element<std::int64_t>(from));
    case DType::kInt32:
      return load_element<std::int32_t>(from);
    case DType::kUInt8:
      return load_element<std::uint8_t>(from);
  }
  return 0;
}

class Comparison {
 public:
  Comparison(const CheckpointReader& first, const CheckpointReader& second)
      : readers_{&first, &second} {}

  CheckpointDifferences run() {
    const Manifest& a = readers_[0]->manifest();
    const Manifest& b = readers_[1]->manifest();
    compare_values("", {{"step", std::to_string(a.step)}, {"ranks", std::to_string(a.num_ranks)}},
                   {{"step", std::to_string(b.step)}, {"ranks", std::to_string(b.num_ranks)}});
    compare_values("state: ", a.state, b.state);
    compare_values("config: ", a.config, b.config);
    compare_values("user: ", a.user, b.user);
    compare_params(a, b);
    compare_rank_tensors("buffer ", a.buffers, b.buffers);
    compare_rank_tensors("generator ", a.generators, b.generators);
    return std::move(differences_);
  }

 private:
  using Texts = std::map<std::string, std::string>;

  void compare_values(const std::string& kind, const Texts& a, const Texts& b) {
    for (const auto& [name, value] : a) {
      const auto found = b.find(name);
      if (found == b.end()) {
        differences_.values.push_back({kind + name, value, std::nullopt});
      } else if (found->second != value) {
        differences_.values.push_back({kind + name, value, found->second});
      }
    }
    for (const auto& [name, value] : b) {
      if (!a.contains(name)) {
        differences_.values.push_back({kind + name, std::nullopt, value});
      }
    }
  }

  void compare_params(const Manifest& a, const Manifest& b) {
    std::map<std::string_view, const StoredParam*> others;
    for (const StoredParam& param : b.params) {
      others.emplace(param.name, &param);
    }
    for (const StoredParam& param : a.params) {
      const auto found = others.find(param.name);
      if (found == others.end()) {
        differences_.forms.push_back({"parameter " + in_quotes(param.name), form_of(param), ""});
        continue;
      }
      compare_param(param, *found->second);
      others.erase(found);
    }
    for (const StoredParam& param : b.params) {
      if (others.contains(param.name)) {
        differences_.forms.push_back({"parameter " + in_quotes(param.name), "", form_of(param)});
      }
    }
  }

  static std::string form_of(const StoredParam& param) {
    std::string text = shape_text(param.shape);
    if (!param.strides.empty()) {
      text += " with strides " + shape_text(param.strides);
    }
    for (const std::string& name : param.tied) {
      text += ", tied to " + in_quotes(name);
    }
    return param.trainable ? text : text + ", frozen";
  }

  void compare_param(const StoredParam& a, const StoredParam& b) {
    const std::string what = "parameter " + in_quotes(a.name);
    if (form_of(a) != form_of(b)) {
      differences_.forms.push_back({what, form_of(a), form_of(b)});
    }
    if (a.updates != b.updates) {
      differences_.values.push_back(
          {"updates of " + what, std::to_string(a.updates), std::to_string(b.updates)});
    }
    if (a.shape != b.shape || a.strides != b.strides) {
      return;  // which elements are to be compared?
    }
    for (const auto& [name, tensor] : a.tensors) {
      const std::string tensor_what = "tensor " + in_quotes(name) + " of " + what;
      const auto found = b.tensors.find(name);
      if (found == b.tensors.end()) {
        differences_.forms.push_back({tensor_what, std::string(type_name(tensor.dtype)), ""});
      } else if (found->second.dtype != tensor.dtype) {
        differences_.forms.push_back({tensor_what, std::string(type_name(tensor.dtype)),
                                      std::string(type_name(found->second.dtype))});
      } else if (found->second.content != tensor.content) {
        compare_bytes(tensor_what, tensor, found->second, a.numel());
      }
    }
    for (const auto& [name, tensor] : b.tensors) {
      if (!a.tensors.contains(name)) {
        differences_.forms.push_back({"tensor " + in_quotes(name) + " of " + what, "",
                                      std::string(type_name(tensor.dtype))});
      }
    }
  }

  static std::string form_of(const StoredRankTensor& tensor) {
    return detail::concat(tensor.type.empty() ? type_name(tensor.dtype) : tensor.type, " ",
                          shape_text(tensor.shape));
  }

  void compare_rank_tensors(const std::string& kind, const std::vector<StoredRankTensor>& a,
                            const std::vector<StoredRankTensor>& b) {
    std::map<std::string_view, const StoredRankTensor*> others;
    for (const StoredRankTensor& tensor : b) {
      others.emplace(tensor.name, &tensor);
    }
    for (const StoredRankTensor& tensor : a) {
      const std::string what = kind + in_quotes(tensor.name);
      const auto found = others.find(tensor.name);
      if (found == others.end()) {
        differences_.forms.push_back({what, form_of(tensor), ""});
        continue;
      }
      const StoredRankTensor& other = *found->second;
      others.erase(found);
      if (form_of(tensor) != form_of(other) ||
          tensor.ranks.front().numel != other.ranks.front().numel) {
        differences_.forms.push_back({what, form_of(tensor), form_of(other)});
        continue;
      }
      const std::size_t num_ranks = std::min(tensor.ranks.size(), other.ranks.size());
      for (std::size_t rank = 0; rank < num_ranks; ++rank) {
        if (tensor.ranks[rank].xxh3 != other.ranks[rank].xxh3) {
          compare_bytes(detail::concat(what, " of rank ", rank),
                        {tensor.dtype, 0, {tensor.ranks[rank]}},
                        {other.dtype, 0, {other.ranks[rank]}}, tensor.ranks[rank].numel);
        }
      }
    }
    for (const StoredRankTensor& tensor : b) {
      if (others.contains(tensor.name)) {
        differences_.forms.push_back({kind + in_quotes(tensor.name), "", form_of(tensor)});
      }
    }
  }

  void compare_bytes(const std::string& what, const StoredTensor& a, const StoredTensor& b,
                     std::int64_t numel) {
    TensorDifference difference{what, numel, 0, 0, 0};
    const auto size = bytes_of(a.dtype);
    const auto step = static_cast<std::int64_t>(kBytesAtOnce / size);
    for (std::int64_t begin = 0; begin < numel; begin += step) {
      const std::int64_t count = std::min(step, numel - begin);
      const std::span<const std::byte> first = load(0, a, begin, count);
      const std::span<const std::byte> second = load(1, b, begin, count);
      for (std::size_t at = 0; at < first.size(); at += size) {
        if (std::memcmp(&first[at], &second[at], size) != 0) {
          add_element(difference, element_value(&first[at], a.dtype),
                      element_value(&second[at], a.dtype));
        }
      }
    }
    // Nothing is added where the bytes are the same all the same: the manifest's hash is wrong
    // then, which is what verify() finds.
    if (difference.num_different > 0) {
      differences_.tensors.push_back(std::move(difference));
    }
  }

  static void add_element(TensorDifference& difference, double a, double b) {
    ++difference.num_different;
    if (std::isnan(a) || std::isnan(b)) {
      ++difference.num_nan;
    } else {
      difference.largest = std::max(difference.largest, a == b ? 0 : std::abs(a - b));
    }
  }

  std::span<const std::byte> load(std::size_t which, const StoredTensor& tensor, std::int64_t begin,
                                  std::int64_t count) {
    std::vector<std::byte>& bytes = loaded_[which];
    bytes.clear();
    readers_[which]->read(tensor, begin, count,
                          [&bytes](std::int64_t, std::span<const std::byte> piece) {
                            bytes.insert(bytes.end(), piece.begin(), piece.end());
                          });
    return bytes;
  }

  const CheckpointReader* const readers_[2];
  std::vector<std::byte> loaded_[2];
  CheckpointDifferences differences_;
};

}  // namespace

CheckpointDifferences compare(const CheckpointReader& first, const CheckpointReader& second) {
  return Comparison(first, second).run();
}

}  // namespace tessera::checkpoint
