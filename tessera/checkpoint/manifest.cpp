#include "tessera/checkpoint/manifest.h"

#include <algorithm>
#include <span>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/manifest_check.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {
namespace {

std::string json_text(std::string_view text) {
  try {
    return nlohmann::json(text).dump(-1, ' ', true);
  } catch (const nlohmann::json::exception&) {
    throw ConfigError(
        detail::concat("a checkpoint cannot hold ", tessera::in_quotes(text),
                       ": it is not UTF-8; name parameters, and give values, in UTF-8"));
  }
}

// "[" and "]" around one line per element, or nothing between them.
template <typename List, typename Line>
std::string lines(const List& list, char open, const std::string& indent, char close, Line line) {
  std::string text(1, open);
  for (const auto& element : list) {
    text += (text.size() > 1 ? ",\n" : "\n") + indent + "  " + line(element);
  }
  return text + (text.size() > 1 ? "\n" + indent : "") + close;
}

template <typename List, typename Word>
std::string words(const List& list, Word word) {
  std::string text = "[";
  for (const auto& element : list) {
    text += (text.size() > 1 ? ", " : "") + word(element);
  }
  return text + "]";
}

std::string numbers_text(const std::vector<std::int64_t>& numbers) {
  return words(numbers, [](std::int64_t number) { return std::to_string(number); });
}

std::string fragments_text(const std::vector<Fragment>& fragments, const std::string& indent) {
  return lines(fragments, '[', indent, ']', [](const Fragment& fragment) {
    return detail::concat("{\"file\": ", fragment.file, ", \"offset\": ", fragment.offset,
                          ", \"begin\": ", fragment.begin, ", \"numel\": ", fragment.numel,
                          ", \"xxh3\": \"", checksum_text(fragment.xxh3), "\"}");
  });
}

std::string param_text(const StoredParam& param) {
  std::string text = "{\n      \"name\": " + json_text(param.name) + ",\n";
  if (!param.tied.empty()) {
    text += "      \"tied\": " + words(param.tied, json_text) + ",\n";
  }
  text += "      \"shape\": " + numbers_text(param.shape) + ",\n";
  if (!param.strides.empty()) {
    text += "      \"strides\": " + numbers_text(param.strides) + ",\n";
  }
  if (!param.trainable) {
    text += "      \"trainable\": false,\n";
  }
  text += detail::concat("      \"updates\": ", param.updates, ",\n      \"tensors\": ");
  text += lines(param.tensors, '{', "      ", '}', [](const auto& named) {
    const StoredTensor& tensor = named.second;
    const std::string blocks =
        tensor.format.is_encoded()
            ? "\"blocks\": " +
                  numbers_text(
                      {tensor.format.bits, tensor.format.block_numel, tensor.shard_numel}) +
                  ", "
            : "";
    return detail::concat(json_text(named.first), ": {\"dtype\": \"", type_name(tensor.dtype),
                          "\", ", blocks, "\"content\": \"", checksum_text(tensor.content),
                          "\", \"fragments\": ", fragments_text(tensor.fragments, "        "), "}");
  });
  return text + "\n    }";
}

std::string rank_tensor_text(const StoredRankTensor& tensor) {
  const std::string type = tensor.type.empty() ? "" : "\"type\": " + json_text(tensor.type) + ", ";
  return detail::concat("{\"name\": ", json_text(tensor.name), ", \"dtype\": \"",
                        type_name(tensor.dtype), "\", ", type,
                        "\"shape\": ", numbers_text(tensor.shape),
                        ", \"ranks\": ", fragments_text(tensor.ranks, "    "), "}");
}

int version_of(const Manifest& manifest) {
  const auto has_blocks = [](const StoredParam& param) {
    return std::any_of(param.tensors.begin(), param.tensors.end(),
                       [](const auto& named) { return named.second.format.is_encoded(); });
  };
  return std::any_of(manifest.params.begin(), manifest.params.end(), has_blocks) ? 2 : 1;
}

std::string texts_text(const std::map<std::string, std::string>& texts) {
  return lines(texts, '{', "  ", '}', [](const auto& entry) {
    return json_text(entry.first) + ": " + json_text(entry.second);
  });
}

}  // namespace

std::uint64_t StoredTensor::bytes_of_fragment(const Fragment& fragment) const {
  return format.is_encoded() && fragment.numel > 0
             ? shard::StoredBytes(format, shard_numel).bytes()
             : static_cast<std::uint64_t>(fragment.numel) * bytes_of(dtype);
}

std::int64_t StoredParam::numel() const {
  std::int64_t numel = 1;
  for (const std::int64_t dim : shape) {
    numel *= dim;
  }
  return numel;
}

const StoredParam* Manifest::find(std::string_view name) const {
  const auto found = std::find_if(params.begin(), params.end(), [name](const StoredParam& param) {
    return param.name == name ||
           std::find(param.tied.begin(), param.tied.end(), name) != param.tied.end();
  });
  return found == params.end() ? nullptr : &*found;
}

std::string manifest_end(std::string_view before) {
  return detail::concat(kManifestEndBegin, checksum_text(xxh3(std::as_bytes(std::span(before)))),
                        kManifestEndEnd);
}

std::string format(const Manifest& manifest) {
  try {
    check_manifest(manifest);
  } catch (const ManifestProblem& problem) {
    TESSERA_INVARIANT(false, "a checkpoint that could not be loaded: ", problem.what());
  }
  std::string text = detail::concat(
      "{\n  \"format\": \"", kManifestFormat, "\",\n  \"version\": ", version_of(manifest),
      ",\n  \"step\": ", manifest.step, ",\n  \"sequence\": ", manifest.sequence,
      ",\n  \"num_ranks\": ", manifest.num_ranks, ",\n  \"files\": ");
  text += lines(manifest.files, '[', "  ", ']', [](const StoredFile& file) {
    return detail::concat("{\"name\": ", json_text(file.name), ", \"bytes\": ", file.bytes, "}");
  });
  text += ",\n  \"params\": " + lines(manifest.params, '[', "  ", ']', param_text);
  text += ",\n  \"buffers\": " + lines(manifest.buffers, '[', "  ", ']', rank_tensor_text);
  text += ",\n  \"generators\": " + lines(manifest.generators, '[', "  ", ']', rank_tensor_text);
  text += ",\n  \"state\": " + texts_text(manifest.state);
  text += ",\n  \"config\": " + texts_text(manifest.config);
  text += ",\n  \"user\": " + texts_text(manifest.user) + ",\n";
  return text + manifest_end(text);
}

}  // namespace tessera::checkpoint
