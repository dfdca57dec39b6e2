#include "models/file_tokens.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include "models/epoch_order.h"
#include "models/sequence_tokens.h"
#include "tessera/core/counter_random.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::models {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are mapped as they are");

// A regular file, mapped for reading.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) : name_(printable(path, 400)) {
    // Without blocking: the name may be that of a pipe, and opening one waits for its other end.
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    TESSERA_CHECK(descriptor_ >= 0, ConfigError, "data: ", name_, ": cannot open: ", reason(errno),
                  "; check the name and its permissions");
    try {
      map();
    } catch (...) {
      ::close(descriptor_);
      throw;
    }
  }
  ~MappedFile() {
    ::munmap(data_, bytes_);
    ::close(descriptor_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& name() const { return name_; }
  const void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

  // Touching a page that the file no longer has would end the process. This closes all but the
  // moment between the question and the read.
  void check_not_shorter() const {
    struct stat status {};
    const bool is_known = ::fstat(descriptor_, &status) == 0;
    TESSERA_CHECK(is_known && static_cast<std::size_t>(status.st_size) >= bytes_, ConfigError,
                  "data: ", name_, ": the file had ", bytes_, " bytes when it was opened and has ",
                  status.st_size, " now; leave it as it is while it is in use");
  }

 private:
  static std::string reason(int error) { return std::generic_category().message(error); }

  void map() {
    struct stat status {};
    TESSERA_CHECK(::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode), ConfigError,
                  "data: ", name_, ": not a regular file; name a file of text or tokens");
    TESSERA_CHECK(status.st_size > 0, ConfigError, "data: ", name_, ": the file is empty");
    bytes_ = static_cast<std::size_t>(status.st_size);
    data_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, descriptor_, 0);
    TESSERA_CHECK(data_ != MAP_FAILED, ConfigError, "data: ", name_, ": cannot map ", bytes_,
                  " bytes: ", reason(errno));
  }

  const std::string name_;
  int descriptor_ = -1;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// The tokens of one file.
class TokenFile {
 public:
  virtual ~TokenFile() = default;
  virtual std::string name() const = 0;
  virtual std::size_t num_tokens() const = 0;
  // Every token that is there; throws ConfigError for one beyond the vocabulary.
  virtual void check_tokens() const = 0;
  // REQUIRES: [begin, begin + tokens.size()) is in the file.
  virtual void read(std::size_t begin, std::span<std::int64_t> tokens) const = 0;
};

template <typename Token>
class MappedTokens final : public TokenFile {
 public:
  MappedTokens(const DataOptions& options, const TokenFileName& file)
      : vocabulary_(options.vocabulary), kind_(file.kind), file_(file.path) {
    constexpr std::size_t kTokenBytes = sizeof(Token);
    TESSERA_CHECK(file_.bytes() % kTokenBytes == 0, ConfigError, "data: ", file_.name(), ": ",
                  file_.bytes(), " bytes are not a whole number of ", 8 * kTokenBytes,
                  "-bit tokens; was it cut short, ",
                  kTokenBytes == 4 ? "are its tokens 16-bit (tokens:PATH), " : "",
                  "or is it text (text:PATH)?");
    tokens_ = {static_cast<const Token*>(file_.data()), file_.bytes() / kTokenBytes};
    const auto needed = static_cast<std::uint64_t>(options.sequence) + 1;
    TESSERA_CHECK(tokens_.size() >= needed, ConfigError, "data: ", file_.name(), ": ",
                  tokens_.size(), " tokens are fewer than one sequence of ", options.sequence,
                  " and its last target (", needed, "); use a longer file or a shorter sequence");
  }

  std::string name() const override {
    return (kind_ == FileTokenKind::kBytes         ? "text:"
            : kind_ == FileTokenKind::kDoubleWords ? "tokens32:"
                                                   : "tokens:") +
           file_.name();
  }
  std::size_t num_tokens() const override { return tokens_.size(); }

  // By blocks: the largest token of one is vector code, and only a bad block is looked at closely.
  void check_tokens() const override {
    if (kind_ == FileTokenKind::kWords) {
      check_not_double_words();
    }
    if (std::numeric_limits<Token>::max() < vocabulary_) {
      return;
    }
    constexpr std::size_t kBlock = std::size_t{1} << 16;
    std::span<const Token> rest = tokens_;
    for (std::size_t begin = 0; !rest.empty(); begin += kBlock) {
      const auto now = rest.first(std::min(kBlock, rest.size()));
      rest = rest.subspan(now.size());
      Token largest = 0;
      for (const Token token : now) {
        largest = std::max(largest, token);
      }
      if (largest >= vocabulary_) {
        const auto bad = std::find_if(now.begin(), now.end(),
                                      [this](Token token) { return token >= vocabulary_; });
        refuse(begin + static_cast<std::size_t>(bad - now.begin()), *bad);
      }
    }
  }

  void read(std::size_t begin, std::span<std::int64_t> tokens) const override {
    file_.check_not_shorter();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = tokens_[begin + i];
      if (tokens[i] >= vocabulary_) [[unlikely]] {
        refuse(begin + i, tokens[i]);
      }
    }
  }

 private:
  // Halves of 32-bit tokens below 65536 would pass every other check, and train on zeros.
  void check_not_double_words() const {
    constexpr std::size_t kLooked = std::size_t{1} << 16;
    constexpr std::size_t kFewest = 16;
    const auto now = tokens_.first(std::min(kLooked, tokens_.size()));
    Token low = 0;
    Token high = 0;
    for (std::size_t i = 0; i + 1 < now.size(); i += 2) {
      low |= now[i];
      high |= now[i + 1];
    }
    TESSERA_CHECK(now.size() < kFewest || low == 0 || high != 0, ConfigError,
                  "data: ", file_.name(), ": every second one of the first ", now.size(),
                  " 16-bit tokens is 0, as in a file of 32-bit tokens; use tokens32:PATH, or "
                  "tokens16:PATH if they are 16-bit");
  }

  [[noreturn]] void refuse(std::size_t position, std::int64_t token) const {
    throw ConfigError(detail::concat(
        "data: ", file_.name(), ": token ", token, " at position ", position,
        " is beyond the vocabulary of ", vocabulary_,
        sizeof(Token) == 1
            ? "; text needs a vocabulary of 256, or of one more than its largest byte (--vocab)"
        : sizeof(Token) == 2 ? "; was the file made for another vocabulary (--vocab)?"
                             : "; was the file made for another vocabulary (--vocab), or are its "
                               "tokens 16-bit (tokens:PATH)?"));
  }

  const std::int64_t vocabulary_;
  const FileTokenKind kind_;
  const MappedFile file_;
  std::span<const Token> tokens_;
};

std::unique_ptr<const TokenFile> open_file(const DataOptions& options, const TokenFileName& file) {
  switch (file.kind) {
    case FileTokenKind::kBytes:
      return std::make_unique<MappedTokens<std::uint8_t>>(options, file);
    case FileTokenKind::kDoubleWords:
      return std::make_unique<MappedTokens<std::uint32_t>>(options, file);
    case FileTokenKind::kWords:
    case FileTokenKind::kCertainWords:
      break;
  }
  return std::make_unique<MappedTokens<std::uint16_t>>(options, file);
}

using TokenFiles = std::vector<std::unique_ptr<const TokenFile>>;

TokenFiles open_files(const DataOptions& options, const std::vector<TokenFileName>& names) {
  TokenFiles files;
  for (const TokenFileName& name : names) {
    files.push_back(open_file(options, name));
  }
  return files;
}

// Where sequences may begin in one file.
std::uint64_t num_begins(const DataOptions& options, const TokenFile& file) {
  const auto sequence = static_cast<std::uint64_t>(options.sequence);
  return options.order == DataOrder::kEpochs ? (file.num_tokens() - 1) / sequence
                                             : file.num_tokens() - sequence;
}

class FileTokens final : public TokenSource {
 public:
  FileTokens(const DataOptions& options, TokenFiles files)
      : options_(options), files_(std::move(files)), random_(options.seed, "data.position") {
    std::uint64_t sum = 0;
    for (const auto& file : files_) {
      sum += num_begins(options, *file);
      ends_.push_back(sum);
    }
    if (options.order == DataOrder::kEpochs) {
      const auto batch = static_cast<std::uint64_t>(options.batch);
      TESSERA_CHECK(sum >= batch, ConfigError, "data: ", name(), " has ", sum, " sequences of ",
                    options.sequence, " tokens, fewer than one batch of ", batch,
                    "; use more data, a smaller batch or shorter sequences");
      per_epoch_ = sum / batch * batch;
      order_.emplace(options.seed, sum);
    }
    for (const auto& file : files_) {
      file->check_tokens();
    }
  }

  std::string name() const override {
    std::string text = files_.front()->name();
    if (files_.size() == 2) {
      text += ", " + files_.back()->name();
    } else if (files_.size() > 2) {
      text += " and " + std::to_string(files_.size() - 1) + " more files";
    }
    return text;
  }

  void read(std::int64_t step, std::int64_t index, std::span<std::int64_t> tokens) override {
    const std::uint64_t number = sequence_number(options_, step, index, tokens);
    const std::uint64_t place = order_ ? order_->at(number / per_epoch_, number % per_epoch_)
                                       : random_.below(number, ends_.back());
    const auto end = std::upper_bound(ends_.begin(), ends_.end(), place);
    const auto file = static_cast<std::size_t>(end - ends_.begin());
    const std::uint64_t in_file = place - (file == 0 ? 0 : ends_[file - 1]);
    files_[file]->read(order_ ? in_file * static_cast<std::uint64_t>(options_.sequence) : in_file,
                       tokens);
  }

 private:
  const DataOptions options_;
  const TokenFiles files_;
  const CounterRandom random_;
  std::vector<std::uint64_t> ends_;  // of each file's places, in the numbering of all
  std::uint64_t per_epoch_ = 0;      // sequences that an epoch takes: whole batches
  std::optional<EpochOrder> order_;  // null: drawn
};

}  // namespace

std::unique_ptr<TokenSource> open_file_tokens(const DataOptions& options,
                                              const std::vector<TokenFileName>& files) {
  return std::make_unique<FileTokens>(options, open_files(options, files));
}

std::int64_t count_file_sequences(const DataOptions& options,
                                  const std::vector<TokenFileName>& files) {
  DataOptions epochs = options;
  epochs.order = DataOrder::kEpochs;
  std::uint64_t sum = 0;
  for (const auto& file : open_files(epochs, files)) {
    sum += num_begins(epochs, *file);
  }
  return static_cast<std::int64_t>(sum);
}

}  // namespace tessera::models
