// A manifest with something of everything, and ways to change its text.
#pragma once

#include <string>
#include <string_view>

#include "tessera/checkpoint/manifest.h"

namespace tessera::testing {

// Two ranks: a parameter whose fragments lie in both files, with master weights and a state; a
// frozen one that is tied and not contiguous; a scalar; a buffer of a type that is not ours.
inline checkpoint::Manifest some_manifest() {
  using checkpoint::Fragment;
  checkpoint::Manifest manifest;
  manifest.step = 60;
  manifest.sequence = 7;
  manifest.num_ranks = 2;
  manifest.files = {{"rank-0.safetensors", 400}, {"rank-1.safetensors", 300}};
  checkpoint::StoredParam weight{"h.0.weight", {}, {3, 5}, {}, true, 60, {}};
  weight.tensors["value"] = {DType::kBFloat16,
                             0x0123456789abcdefU,
                             {{0, 100, 0, 8, 1}, {1, 50, 8, 7, 0xffffffffffffffffU}}};
  weight.tensors["master"] = {DType::kFloat32, 2, {{0, 116, 0, 8, 3}, {1, 64, 8, 7, 4}}};
  weight.tensors["exp_avg"] = {DType::kFloat32, 5, {{1, 92, 0, 15, 6}}};
  checkpoint::StoredParam table{
      "wte \"\\\n\xc3\xa9", {"lm_head", "other"}, {4, 2}, {1, 4}, false, 0, {}};
  table.tensors["value"] = {DType::kFloat32, 7, {{0, 200, 0, 8, 8}}};
  checkpoint::StoredParam scale{"scale", {}, {}, {}, true, 9'007'199'254'740'993, {}};
  scale.tensors["value"] = {DType::kFloat32, 9, {{1, 200, 0, 1, 10}}};
  checkpoint::StoredParam empty{"none", {}, {0, 5}, {}, true, 0, {}};
  empty.tensors["value"] = {DType::kFloat16, 0, {}};
  manifest.params = {weight, table, scale, empty};
  manifest.buffers = {
      {"bn.mean", DType::kFloat64, "", {2}, {{0, 300, 0, 2, 11}, {0, 300, 0, 2, 11}}},
      {"mask", DType::kUInt8, "ComplexFloat", {2}, {{0, 320, 0, 16, 12}, {1, 210, 0, 16, 13}}}};
  manifest.generators = {{"cpu", DType::kUInt8, "", {9}, {{0, 340, 0, 9, 14}, {1, 230, 0, 9, 15}}}};
  manifest.state = {{"loss_scale.value", "65536"}, {"schedule", ""}};
  manifest.config = {{"precision", "bf16"}};
  manifest.user = {{"data", "{\"position\": 5}\n"}};
  return manifest;
}

// With the end that belongs to the text before.
inline std::string with_end(std::string_view before) {
  return std::string(before) + checkpoint::manifest_end(before);
}

// A manifest's text without its end.
inline std::string without_end(const std::string& text) {
  return text.substr(0, text.size() - checkpoint::manifest_end("").size());
}

// The text with the first `from` in it turned into `to`, and its checksum put right.
inline std::string changed(const std::string& text, const std::string& from,
                           const std::string& to) {
  std::string before = without_end(text);
  const std::size_t at = before.find(from);
  return at == std::string::npos ? "no such words" : with_end(before.replace(at, from.size(), to));
}

}  // namespace tessera::testing
