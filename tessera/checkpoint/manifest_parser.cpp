#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/manifest_check.h"
#include "tessera/checkpoint/safetensors_header.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

constexpr std::string_view kManifestDamaged =
    "the checkpoint is damaged or was changed; load another save, or copy it again";
constexpr std::size_t kHexDigits = 16;
constexpr std::size_t kEndBytes = kManifestEndBegin.size() + kHexDigits + kManifestEndEnd.size();

std::optional<std::uint64_t> hex_value(std::string_view text) {
  if (text.size() != kHexDigits) {
    return std::nullopt;
  }
  std::uint64_t value = 0;
  for (const char c : text) {
    const std::size_t digit = std::string_view("0123456789abcdef").find(c);
    if (digit == std::string_view::npos) {
      return std::nullopt;
    }
    value = value << 4 | digit;
  }
  return value;
}

// What is wrong with the checksum at the end; empty: nothing.
std::string end_problem(std::string_view text) {
  const std::string_view end = text.substr(text.size() - std::min(text.size(), kEndBytes));
  if (!end.starts_with(kManifestEndBegin) || !end.ends_with(kManifestEndEnd) ||
      end.size() != kEndBytes) {
    return "it does not end with its checksum";
  }
  const std::string_view before = text.substr(0, text.size() - kEndBytes);
  const std::uint64_t actual = xxh3(std::as_bytes(std::span(before)));
  const std::string_view stored = end.substr(kManifestEndBegin.size(), kHexDigits);
  return hex_value(stored) == actual
             ? ""
             : detail::concat("its text has the checksum ", checksum_text(actual),
                              ", its last line says ", tessera::in_quotes(stored));
}

enum class Key : std::uint8_t {
  kFormat,
  kVersion,
  kStep,
  kSequence,
  kNumRanks,
  kFiles,
  kParams,
  kBuffers,
  kGenerators,
  kState,
  kConfig,
  kUser,
  kXxh3,
  kName,
  kBytes,
  kTied,
  kShape,
  kStrides,
  kTrainable,
  kUpdates,
  kTensors,
  kDtype,
  kContent,
  kFragments,
  kFile,
  kOffset,
  kBegin,
  kNumel,
  kType,
  kRanks,
  kBlocks
};

enum class Value : std::uint8_t { kNumber, kText, kFlag, kList, kObject };

struct KeyEntry {
  std::string_view name;
  Value value;
};

// In the order of Key. A key has one meaning, wherever it stands.
constexpr std::array<KeyEntry, 31> kKeys = {{
    {"format", Value::kText},     {"version", Value::kNumber},   {"step", Value::kNumber},
    {"sequence", Value::kNumber}, {"num_ranks", Value::kNumber}, {"files", Value::kList},
    {"params", Value::kList},     {"buffers", Value::kList},     {"generators", Value::kList},
    {"state", Value::kObject},    {"config", Value::kObject},    {"user", Value::kObject},
    {"xxh3", Value::kText},       {"name", Value::kText},        {"bytes", Value::kNumber},
    {"tied", Value::kList},       {"shape", Value::kList},       {"strides", Value::kList},
    {"trainable", Value::kFlag},  {"updates", Value::kNumber},   {"tensors", Value::kObject},
    {"dtype", Value::kText},      {"content", Value::kText},     {"fragments", Value::kList},
    {"file", Value::kNumber},     {"offset", Value::kNumber},    {"begin", Value::kNumber},
    {"numel", Value::kNumber},    {"type", Value::kText},        {"ranks", Value::kList},
    {"blocks", Value::kList},
}};

using KeySet = std::uint32_t;

template <typename... Keys>
constexpr KeySet keys(Keys... all) {
  return ((KeySet{1} << static_cast<unsigned>(all)) | ... | 0U);
}

// What a value stands in.
enum class Place : std::uint8_t {
  kStart,
  kManifest,
  kFile,
  kParam,
  kTensor,
  kFragment,
  kRankTensor,  // objects with our keys
  kTensors,
  kTexts,  // objects with names
  kFileList,
  kParamList,
  kFragmentList,
  kRankTensorList,
  kNumberList,
  kNameList
};

struct ObjectKeys {
  KeySet required = 0;
  KeySet optional = 0;
};

constexpr ObjectKeys object_keys(Place place) {
  switch (place) {
    case Place::kManifest:
      return {keys(Key::kFormat, Key::kVersion, Key::kStep, Key::kSequence, Key::kNumRanks,
                   Key::kFiles, Key::kParams, Key::kBuffers, Key::kGenerators, Key::kState,
                   Key::kConfig, Key::kUser, Key::kXxh3)};
    case Place::kFile:
      return {keys(Key::kName, Key::kBytes)};
    case Place::kParam:
      return {keys(Key::kName, Key::kShape, Key::kUpdates, Key::kTensors),
              keys(Key::kTied, Key::kStrides, Key::kTrainable)};
    case Place::kTensor:
      return {keys(Key::kDtype, Key::kContent, Key::kFragments), keys(Key::kBlocks)};
    case Place::kFragment:
      return {keys(Key::kFile, Key::kOffset, Key::kBegin, Key::kNumel, Key::kXxh3)};
    case Place::kRankTensor:
      return {keys(Key::kName, Key::kDtype, Key::kShape, Key::kRanks), keys(Key::kType)};
    default:
      return {};
  }
}

// Takes the JSON apart as it comes, straight into a Manifest: hostile text costs no more memory
// than what it describes.
class ManifestParser : public nlohmann::json_sax<json> {
 public:
  // `end_problem` is thrown once the version is known to be ours.
  ManifestParser(std::string path, std::string end_problem)
      : path_(std::move(path)), end_problem_(std::move(end_problem)) {
    frames_.push_back({Place::kStart});
  }

  Manifest take() { return std::move(manifest_); }

  bool null() override { return refuse("null"); }
  bool number_float(double, const std::string& text) override {
    return refuse("the number " + printable(text, 40));
  }
  bool number_integer(std::int64_t value) override {
    return refuse("the negative number " + std::to_string(value));
  }
  bool binary(json::binary_t&) override { return refuse("binary data"); }

  bool boolean(bool value) override {
    expect(Value::kFlag, "a boolean");
    manifest_.params.back().trainable = value;
    return true;
  }

  bool number_unsigned(std::uint64_t value) override {
    if (value > kMaxNumber) {
      return refuse("the number " + std::to_string(value) + ", too large,");
    }
    const auto number = static_cast<std::int64_t>(value);
    if (place() == Place::kNumberList) {
      if (numbers_->size() == kMaxDims) {
        fail(detail::concat("more than ", kMaxDims, " dims"));
      }
      numbers_->push_back(number);
      return true;
    }
    expect(Value::kNumber, "the number " + std::to_string(value));
    set_number(number);
    return true;
  }

  bool string(std::string& value) override {
    if (place() == Place::kNameList) {
      manifest_.params.back().tied.push_back(std::move(value));
    } else if (place() == Place::kTexts) {
      texts_->insert_or_assign(name_, std::move(value));
    } else {
      expect(Value::kText, "the text " + tessera::in_quotes(value, 40));
      set_text(value);
    }
    return true;
  }

  bool key(std::string& value) override {
    Frame& frame = frames_.back();
    if (frame.place == Place::kTensors || frame.place == Place::kTexts) {
      const bool is_new = frame.place == Place::kTexts
                              ? !texts_->contains(value)
                              : !manifest_.params.back().tensors.contains(value);
      if (!is_new) {
        fail(detail::concat("the name ", tessera::in_quotes(value, 40), " comes twice"));
      }
      name_ = std::move(value);
      return true;
    }
    const auto* const found =
        std::find_if(kKeys.begin(), kKeys.end(),
                     [&value](const KeyEntry& entry) { return entry.name == value; });
    const auto index = static_cast<unsigned>(found - kKeys.begin());
    const ObjectKeys known = object_keys(frame.place);
    if (found == kKeys.end() || ((known.required | known.optional) >> index & 1U) == 0) {
      fail("unknown key " + tessera::in_quotes(value, 40));
    }
    if ((frame.seen >> index & 1U) != 0) {
      fail("key " + tessera::in_quotes(value, 40) + " comes twice");
    }
    // Whether the rest can be understood at all must be known first.
    if (frame.place == Place::kManifest && index != static_cast<unsigned>(Key::kFormat) &&
        index != static_cast<unsigned>(Key::kVersion) &&
        (frame.seen & keys(Key::kFormat, Key::kVersion)) != keys(Key::kFormat, Key::kVersion)) {
      fail("format and version do not come first");
    }
    frame.seen |= KeySet{1} << index;
    frame.key = static_cast<Key>(index);
    return true;
  }

  bool start_object(std::size_t) override {
    switch (place()) {
      case Place::kStart:
        return enter(Place::kManifest);
      case Place::kFileList:
        manifest_.files.emplace_back();
        return enter(Place::kFile);
      case Place::kParamList:
        manifest_.params.emplace_back();
        return enter(Place::kParam);
      case Place::kFragmentList:
        fragments_->emplace_back();
        return enter(Place::kFragment);
      case Place::kRankTensorList:
        rank_tensors_->emplace_back();
        return enter(Place::kRankTensor);
      case Place::kTensors:
        tensor_ = &manifest_.params.back().tensors[name_];
        return enter(Place::kTensor);
      default:
        break;
    }
    expect(Value::kObject, "an object");
    switch (frames_.back().key) {
      case Key::kTensors:
        return enter(Place::kTensors);
      case Key::kState:
        texts_ = &manifest_.state;
        break;
      case Key::kConfig:
        texts_ = &manifest_.config;
        break;
      default:
        texts_ = &manifest_.user;
    }
    return enter(Place::kTexts);
  }

  bool end_object() override {
    const Frame& frame = frames_.back();
    const KeySet missing = object_keys(frame.place).required & ~frame.seen;
    for (std::size_t index = 0; index < kKeys.size(); ++index) {
      if ((missing >> index & 1U) != 0) {
        fail(detail::concat("key \"", kKeys[index].name, "\" is missing"));
      }
    }
    frames_.pop_back();
    return true;
  }

  bool start_array(std::size_t) override {
    expect(Value::kList, "a list");
    switch (frames_.back().key) {
      case Key::kFiles:
        return enter(Place::kFileList);
      case Key::kParams:
        return enter(Place::kParamList);
      case Key::kBuffers:
        rank_tensors_ = &manifest_.buffers;
        return enter(Place::kRankTensorList);
      case Key::kGenerators:
        rank_tensors_ = &manifest_.generators;
        return enter(Place::kRankTensorList);
      case Key::kTied:
        return enter(Place::kNameList);
      case Key::kShape:
        numbers_ = place() == Place::kParam ? &manifest_.params.back().shape
                                            : &rank_tensors_->back().shape;
        return enter(Place::kNumberList);
      case Key::kStrides:
        numbers_ = &manifest_.params.back().strides;
        return enter(Place::kNumberList);
      case Key::kBlocks:
        if (version_ < 2) {
          fail("key \"blocks\" in version 1");
        }
        blocks_.clear();
        numbers_ = &blocks_;
        return enter(Place::kNumberList);
      case Key::kRanks:
        fragments_ = &rank_tensors_->back().ranks;
        return enter(Place::kFragmentList);
      default:
        fragments_ = &tensor_->fragments;
        return enter(Place::kFragmentList);
    }
  }

  bool end_array() override {
    const bool is_blocks = place() == Place::kNumberList && numbers_ == &blocks_;
    frames_.pop_back();
    if (is_blocks) {
      set_blocks();
      numbers_ = nullptr;
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    TESSERA_CHECK(end_problem_.empty(), CorruptError, path_, ": ", end_problem_, "; ",
                  kManifestDamaged);
    // The parser counts from one.
    throw CorruptError(detail::concat(path_, ": offset ", position - 1,
                                      ": the manifest cannot be read as JSON; ", kManifestDamaged));
  }

 private:
  struct Frame {
    Place place;
    KeySet seen = 0;
    Key key = Key::kFormat;  // the last one
  };

  Place place() const { return frames_.back().place; }
  bool enter(Place place) {
    frames_.push_back({place});
    return true;
  }

  // Refuses what has no place here; this also bounds the depth.
  void expect(Value value, const std::string& what) const {
    const bool has_keys = object_keys(place()).required != 0;
    if (!has_keys || kKeys[static_cast<std::size_t>(frames_.back().key)].value != value) {
      refuse(what);
    }
  }

  [[noreturn]] bool refuse(const std::string& what) const { fail(what + " where " + expected()); }

  std::string expected() const {
    switch (place()) {
      case Place::kStart:
        return "the object of a manifest belongs";
      case Place::kTensors:
        return "an object belongs for tensor " + tessera::in_quotes(name_, 40);
      case Place::kTexts:
        return "text belongs for " + tessera::in_quotes(name_, 40);
      case Place::kNumberList:
        return "a whole number belongs";
      case Place::kNameList:
        return "a name belongs";
      case Place::kFileList:
      case Place::kParamList:
      case Place::kFragmentList:
      case Place::kRankTensorList:
        return "an object belongs";
      default:
        break;
    }
    constexpr std::array<std::string_view, 5> kWords = {"a whole number", "text", "true or false",
                                                        "a list", "an object"};
    const KeyEntry& entry = kKeys[static_cast<std::size_t>(frames_.back().key)];
    return detail::concat(kWords[static_cast<std::size_t>(entry.value)], " belongs for \"",
                          entry.name, "\"");
  }

  // In front of what is wrong: the path, and what is being read.
  std::string where() const {
    std::string text = path_ + ": ";
    for (const Frame& frame : frames_) {
      switch (frame.place) {
        case Place::kFile:
          text += detail::concat("file ", manifest_.files.size() - 1, ": ");
          break;
        case Place::kParam:
          text += named("parameter ", manifest_.params.back().name, manifest_.params.size());
          break;
        case Place::kTensor:
          text += "tensor " + tessera::in_quotes(name_) + ": ";
          break;
        case Place::kRankTensor:
          text += named(rank_tensors_ == &manifest_.buffers ? "buffer " : "generator ",
                        rank_tensors_->back().name, rank_tensors_->size());
          break;
        case Place::kFragment:
          text += detail::concat("fragment ", fragments_->size() - 1, ": ");
          break;
        default:
          break;
      }
    }
    return text;
  }

  static std::string named(const char* what, const std::string& name, std::size_t number) {
    return detail::concat(
        what, name.empty() ? std::to_string(number - 1) : tessera::in_quotes(name), ": ");
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw CorruptError(where() + what + "; " + std::string(kManifestDamaged));
  }

  void set_number(std::int64_t number) {
    const auto as_int = [this, number](const char* what) {
      if (number > std::numeric_limits<int>::max()) {
        fail(detail::concat("the ", what, " ", number, " is too large"));
      }
      return static_cast<int>(number);
    };
    switch (frames_.back().key) {
      case Key::kVersion:
        set_version(number);
        break;
      case Key::kStep:
        manifest_.step = number;
        break;
      case Key::kSequence:
        manifest_.sequence = number;
        break;
      case Key::kNumRanks:
        manifest_.num_ranks = as_int("number of ranks");
        break;
      case Key::kBytes:
        manifest_.files.back().bytes = static_cast<std::uint64_t>(number);
        break;
      case Key::kUpdates:
        manifest_.params.back().updates = number;
        break;
      case Key::kFile:
        fragments_->back().file = as_int("number of a file");
        break;
      case Key::kOffset:
        fragments_->back().offset = static_cast<std::uint64_t>(number);
        break;
      case Key::kBegin:
        fragments_->back().begin = number;
        break;
      default:
        fragments_->back().numel = number;
    }
  }

  void set_blocks() {
    if (blocks_.size() != 3 || (blocks_[0] != 4 && blocks_[0] != 8)) {
      fail("\"blocks\" are bits (4 or 8), elements of a block and elements of a fragment");
    }
    tensor_->format = {static_cast<int>(blocks_[0]), blocks_[1]};
    tensor_->shard_numel = blocks_[2];
  }

  void set_version(std::int64_t version) {
    TESSERA_CHECK(version >= 1 && version <= kManifestVersion, CorruptError, path_,
                  ": a checkpoint of version ", version, "; this Tessera reads versions 1 to ",
                  kManifestVersion,
                  version > kManifestVersion ? "; use a newer one" : "; there is none before it");
    version_ = version;
    TESSERA_CHECK(end_problem_.empty(), CorruptError, path_, ": ", end_problem_, "; ",
                  kManifestDamaged);
  }

  void set_text(const std::string& value) {
    switch (frames_.back().key) {
      case Key::kFormat:
        TESSERA_CHECK(value == kManifestFormat, CorruptError, path_, ": format is ",
                      tessera::in_quotes(value, 40), ", not \"", kManifestFormat,
                      "\"; it was not written by Tessera");
        break;
      case Key::kXxh3:
        if (place() == Place::kFragment) {
          fragments_->back().xxh3 = checksum(value);
        } else {
          checksum(value);  // of the text: compared before
        }
        break;
      case Key::kContent:
        tensor_->content = checksum(value);
        break;
      case Key::kDtype:
        (place() == Place::kTensor ? tensor_->dtype : rank_tensors_->back().dtype) = dtype(value);
        break;
      case Key::kType:
        if (value.empty()) {
          fail("an empty type");
        }
        rank_tensors_->back().type = value;
        break;
      default:
        set_name(value);
    }
  }

  void set_name(const std::string& value) {
    std::string& name = place() == Place::kFile    ? manifest_.files.back().name
                        : place() == Place::kParam ? manifest_.params.back().name
                                                   : rank_tensors_->back().name;
    name = value;
  }

  std::uint64_t checksum(const std::string& text) const {
    const auto value = hex_value(text);
    if (!value.has_value()) {
      fail(detail::concat("checksum ", tessera::in_quotes(text, 40), " is not ", kHexDigits,
                          " digits 0-9, a-f"));
    }
    return *value;
  }

  DType dtype(const std::string& name) const {
    const auto dtype = type_named(name);
    if (!dtype.has_value()) {
      fail("dtype " + tessera::in_quotes(name, 40) + " is not known");
    }
    return *dtype;
  }

  const std::string path_;
  const std::string end_problem_;
  Manifest manifest_;
  std::vector<Frame> frames_;
  std::string name_;  // the last key of an object with names
  // What is being filled.
  StoredTensor* tensor_ = nullptr;
  std::vector<Fragment>* fragments_ = nullptr;
  std::vector<StoredRankTensor>* rank_tensors_ = nullptr;
  std::vector<std::int64_t>* numbers_ = nullptr;
  std::vector<std::int64_t> blocks_;
  std::int64_t version_ = 0;
  std::map<std::string, std::string>* texts_ = nullptr;
};

}  // namespace

Manifest parse_manifest(std::string_view text, const std::string& path) {
  const std::string shown = printable(path, 400);
  // The parser takes a NUL for the end of the text and would not look at what comes after it.
  const std::size_t nul = text.find('\0');
  TESSERA_CHECK(nul == text.npos, CorruptError, shown, ": offset ", nul, ": a NUL; ",
                kManifestDamaged);
  ManifestParser parser(shown, end_problem(text));
  const bool complete = json::sax_parse(text, &parser);
  TESSERA_INVARIANT(complete, "every refusal throws");
  Manifest manifest = parser.take();
  try {
    check_manifest(manifest);
  } catch (const ManifestProblem& problem) {
    throw CorruptError(detail::concat(shown, ": ", problem.what(), "; ", kManifestDamaged));
  }
  return manifest;
}

}  // namespace tessera::checkpoint
