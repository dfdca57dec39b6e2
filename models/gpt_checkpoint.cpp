#include "models/gpt_checkpoint.h"

#include <set>
#include <string_view>
#include <vector>

#include "models/element_convert.h"
#include "models/gpt_description.h"
#include "models/gpt_shapes.h"
#include "models/name_list.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::models {
namespace {

constexpr const char* kValue = "value";
constexpr const char* kMaster = "master";

bool is_weight_type(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

}  // namespace

GptCheckpoint::GptCheckpoint(const std::string& path)
    : reader_(path), options_(gpt_from_description(reader_.manifest().user, reader_.path())) {
  check_params();
}

void GptCheckpoint::check_params() const {
  NameList missing("missing are");
  NameList misshapen("of other shapes are");
  NameList unreadable("without values in fp32, bf16 or fp16 are");
  NameList extra("not in the model are");
  std::set<std::string> known;
  for (const ParamShape& shape : gpt_shape(options_).params) {
    known.insert(shape.name);
    const checkpoint::StoredParam* const param = manifest().find(shape.name);
    if (param == nullptr) {
      missing.add(in_quotes(shape.name));
      continue;
    }
    if (param->shape != shape.sizes || !param->strides.empty()) {
      misshapen.add(detail::concat(in_quotes(shape.name), " ", sizes_text(param->shape),
                                   param->strides.empty() ? "" : " with strides", ", here ",
                                   sizes_text(shape.sizes)));
    }
    const auto value = param->tensors.find(kValue);
    const auto master = param->tensors.find(kMaster);
    if (value == param->tensors.end() || !is_weight_type(value->second.dtype) ||
        (master != param->tensors.end() && !is_weight_type(master->second.dtype))) {
      unreadable.add(in_quotes(shape.name));
    }
  }
  for (const checkpoint::StoredParam& param : manifest().params) {
    if (known.count(param.name) == 0) {
      extra.add(in_quotes(param.name));
    }
  }
  const std::string problems = joined({missing, misshapen, unreadable, extra});
  TESSERA_CHECK(problems.empty(), ConfigError, printable(path(), 400),
                ": its parameters are not those of the model that it describes: ", problems);
}

const checkpoint::StoredTensor& GptCheckpoint::stored(const std::string& param,
                                                      DType wanted) const {
  const checkpoint::StoredParam* const found = manifest().find(param);
  TESSERA_INVARIANT(found != nullptr, path(), ": no parameter ", in_quotes(param));
  const checkpoint::StoredTensor& value = found->tensors.at(kValue);
  const auto master = found->tensors.find(kMaster);
  return value.dtype == wanted || master == found->tensors.end() ? value : master->second;
}

void GptCheckpoint::visit(const checkpoint::StoredTensor& tensor, shard::ElementRange range,
                          const checkpoint::CheckpointReader::Visit& visit) const {
  const std::lock_guard lock(mutex_);
  reader_.read(tensor, range.begin, range.numel, visit);
}

void GptCheckpoint::read(const std::string& name, shard::ElementRange range, DType dtype,
                         std::byte* out) const {
  const checkpoint::StoredTensor& tensor = stored(name, dtype);
  visit(tensor, range, [&](std::int64_t begin, std::span<const std::byte> bytes) {
    const auto at = static_cast<std::size_t>(begin - range.begin);
    convert_elements(tensor.dtype, bytes, dtype, out + at * bytes_of(dtype));
  });
}

}  // namespace tessera::models
