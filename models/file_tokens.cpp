#include "models/file_tokens.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <limits>
#include <system_error>

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

template <typename Token>
class FileTokens : public TokenSource {
 public:
  FileTokens(const DataOptions& options, const std::string& path)
      : options_(options), file_(path), random_(options.seed, "data.position") {
    constexpr std::size_t kTokenBytes = sizeof(Token);
    TESSERA_CHECK(file_.bytes() % kTokenBytes == 0, ConfigError, "data: ", file_.name(), ": ",
                  file_.bytes(),
                  " bytes are not a whole number of 16-bit tokens; was it cut short, "
                  "or is it text (text:FILE)?");
    tokens_ = {static_cast<const Token*>(file_.data()), file_.bytes() / kTokenBytes};
    const auto needed = static_cast<std::uint64_t>(options.sequence) + 1;
    TESSERA_CHECK(tokens_.size() >= needed, ConfigError, "data: ", file_.name(), ": ",
                  tokens_.size(), " tokens are fewer than one sequence of ", options.sequence,
                  " and its last target (", needed, "); use a longer file or a shorter sequence");
    num_positions_ = tokens_.size() - needed + 1;
    if (std::numeric_limits<Token>::max() >= options.vocabulary) {
      check_vocabulary(0, tokens_);
    }
  }

  std::string name() const override {
    return (sizeof(Token) == 1 ? "text:" : "tokens:") + file_.name();
  }

  void read(std::int64_t step, std::int64_t index, std::span<std::int64_t> tokens) override {
    const std::uint64_t number = sequence_number(options_, step, index, tokens);
    const auto begin = static_cast<std::size_t>(random_.below(number, num_positions_));
    file_.check_not_shorter();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = tokens_[begin + i];
      if (tokens[i] >= options_.vocabulary) [[unlikely]] {
        refuse(begin + i, tokens[i]);
      }
    }
  }

 private:
  // By blocks: the largest token of one is vector code, and only a bad block is looked at closely.
  void check_vocabulary(std::size_t begin, std::span<const Token> tokens) const {
    constexpr std::size_t kBlock = std::size_t{1} << 16;
    for (; !tokens.empty(); begin += kBlock) {
      const auto now = tokens.first(std::min(kBlock, tokens.size()));
      tokens = tokens.subspan(now.size());
      Token largest = 0;
      for (const Token token : now) {
        largest = std::max(largest, token);
      }
      if (largest >= options_.vocabulary) {
        const auto bad = std::find_if(now.begin(), now.end(),
                                      [this](Token token) { return token >= options_.vocabulary; });
        refuse(begin + static_cast<std::size_t>(bad - now.begin()), *bad);
      }
    }
  }

  [[noreturn]] void refuse(std::size_t position, std::int64_t token) const {
    throw ConfigError(detail::concat(
        "data: ", file_.name(), ": token ", token, " at position ", position,
        " is beyond the vocabulary of ", options_.vocabulary,
        sizeof(Token) == 1
            ? "; text needs a vocabulary of 256, or of one more than its largest byte"
            : "; was the file made for another vocabulary?"));
  }

  const DataOptions options_;
  const MappedFile file_;
  const CounterRandom random_;
  std::span<const Token> tokens_;
  std::uint64_t num_positions_ = 0;
};

}  // namespace

std::unique_ptr<TokenSource> open_file_tokens(const DataOptions& options, const std::string& path,
                                              FileTokenKind kind) {
  if (kind == FileTokenKind::kBytes) {
    return std::make_unique<FileTokens<std::uint8_t>>(options, path);
  }
  return std::make_unique<FileTokens<std::uint16_t>>(options, path);
}

}  // namespace tessera::models
