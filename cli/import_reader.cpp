#include "cli/import_reader.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <system_error>

#include "cli/import_script.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"
#include "tessera/core/system_call.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kMaxReasonChars = 2000;
constexpr int kRefused = 2;  // the script's exit code for input that it refuses

std::string last_line(std::string text) {
  text.erase(text.find_last_not_of(" \r\n") + 1);
  return text.substr(text.rfind('\n') + 1);  // all of it where there is one line
}

}  // namespace

ImportReader::ImportReader(const std::string& python, const std::vector<std::string>& arguments)
    : python_(python) {
  // The script is its standard input: no file that somebody could have put in its place.
  const MemoryFile script(kDeepSpeedReader);
  std::vector<std::string> words = {python, "-"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);

  std::array<int, 2> ends{};
  TESSERA_CHECK(::pipe2(ends.data(), O_CLOEXEC) == 0, IoError,
                "import: no pipe: ", std::generic_category().message(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, script.fd(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors_.fd(), STDERR_FILENO);
  const int error = ::posix_spawnp(&pid_, python.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  fd_ = ends[0];
  if (error != 0) {
    ::close(fd_);
    throw ConfigError("import: cannot start " + in_quotes(python) + ": " +
                      std::generic_category().message(error) +
                      "; it needs a Python with torch: install one, or name it with --python");
  }
}

ImportReader::~ImportReader() {
  ::close(fd_);
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    wait();
  }
}

void ImportReader::read(std::span<std::byte> out) {
  while (!out.empty()) {
    const std::size_t bytes = read_some(out);
    if (bytes == 0) {
      throw_failure();
    }
    out = out.subspan(bytes);
  }
}

void ImportReader::finish() {
  std::array<std::byte, 1> more{};
  TESSERA_CHECK(read_some(more) == 0, CorruptError, "import: ", in_quotes(python_),
                " has sent more than the ", num_bytes_ - 1,
                " bytes that it announced; is it a Python of its own?");
  const int status = wait();
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw_failure();
  }
}

std::size_t ImportReader::read_some(std::span<std::byte> out) {
  const ssize_t bytes = retried([&] { return ::read(fd_, out.data(), out.size()); });
  TESSERA_CHECK(bytes >= 0, IoError, "import: cannot read from ", in_quotes(python_), ": ",
                std::generic_category().message(errno));
  num_bytes_ += static_cast<std::uint64_t>(bytes);
  return static_cast<std::size_t>(bytes);
}

int ImportReader::wait() noexcept {
  if (pid_ > 0) {
    retried([this] { return ::waitpid(pid_, &status_, 0); });
    pid_ = -1;
  }
  return status_;
}

void ImportReader::throw_failure() {
  const int status = wait();
  const std::string reason = printable(last_line(errors_.text()), kMaxReasonChars);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kRefused && !reason.empty()) {
    throw ConfigError("import: " + reason);
  }
  const std::string how = WIFSIGNALED(status)
                              ? detail::concat("was ended by ", ::strsignal(WTERMSIG(status)))
                              : detail::concat("ended with exit code ", WEXITSTATUS(status));
  throw IoError(detail::concat("import: ", in_quotes(python_), " ", how, " after ", num_bytes_,
                               " bytes", reason.empty() ? "" : ": ", reason));
}

}  // namespace tessera::cli
