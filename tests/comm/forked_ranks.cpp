#include "tests/comm/forked_ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include <gtest/gtest.h>

#include "tessera/comm/tag.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

void check_system(bool is_good, const char* what) {
  if (!is_good) {
    throw std::runtime_error(detail::concat(what, ": ", std::strerror(errno)));
  }
}

// Texts behind each other, each with its length.
void put(std::string& message, const std::string& text) {
  message += detail::concat(text.size(), " ", text);
}
std::string take(std::string& message) {
  std::size_t digits = 0;
  const std::size_t bytes = std::stoull(message, &digits);
  std::string text = message.substr(digits + 1, bytes);
  message.erase(0, digits + 1 + bytes);
  return text;
}

std::string kind_of(const std::exception& error) {
  if (dynamic_cast<const MismatchError*>(&error) != nullptr) {
    return "mismatch";
  }
  if (dynamic_cast<const PeerError*>(&error) != nullptr) {
    return "peer";
  }
  if (dynamic_cast<const CommError*>(&error) != nullptr) {
    return "comm";
  }
  return dynamic_cast<const ConfigError*>(&error) != nullptr ? "config" : "other";
}

std::exception_ptr failure_of(const std::string& kind, const std::string& text) {
  if (kind == "none") {
    return nullptr;
  }
  if (kind == "mismatch") {
    return std::make_exception_ptr(MismatchError(text));
  }
  if (kind == "peer") {
    return std::make_exception_ptr(PeerError(text));
  }
  if (kind == "comm") {
    return std::make_exception_ptr(CommError(text));
  }
  return kind == "config" ? std::make_exception_ptr(ConfigError(text))
                          : std::make_exception_ptr(std::runtime_error(text));
}

// What gtest has seen fail, and passes on to the test program instead of printing it.
class FailedParts final : public ::testing::EmptyTestEventListener {
 public:
  void OnTestPartResult(const ::testing::TestPartResult& part) override {
    if (part.failed()) {
      put(message_, part.file_name() == nullptr ? "" : part.file_name());
      put(message_, std::to_string(part.line_number()));
      put(message_, part.message());
    }
  }
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

[[noreturn]] void run_child(int rank, pid_t parent, int to_parent,
                            const std::function<void(int)>& body) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) {
    _exit(1);  // it ended before
  }
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  auto* const failed = new FailedParts();
  listeners.Append(failed);
  std::string message;
  try {
    body(rank);
    put(message, "none");
    put(message, "");
  } catch (const std::exception& error) {
    put(message, kind_of(error));
    put(message, error.what());
  }
  message += failed->message();
  for (std::size_t sent = 0; sent < message.size();) {
    const ssize_t bytes = write(to_parent, message.data() + sent, message.size() - sent);
    if (bytes < 0 && errno != EINTR) {
      _exit(1);
    }
    sent += bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
  }
  _exit(0);
}

std::string read_all(int fd) {
  std::string message;
  char part[4096];
  for (ssize_t bytes = 0; (bytes = read(fd, part, sizeof(part))) != 0;) {
    check_system(bytes > 0 || errno == EINTR, "read");
    message.append(part, bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  }
  return message;
}

}  // namespace

std::vector<RankEnd> run_forked(int num_ranks, const std::function<void(int rank)>& body) {
  struct Child {
    pid_t pid = -1;
    int from = -1;
  };
  std::vector<Child> children;
  std::fflush(nullptr);  // nothing is printed twice
  const pid_t self = getpid();
  for (int rank = 0; rank < num_ranks; ++rank) {
    int ends[2] = {-1, -1};
    check_system(pipe2(ends, O_CLOEXEC) == 0, "pipe2");
    const pid_t pid = fork();
    check_system(pid >= 0, "fork");
    if (pid == 0) {
      run_child(rank, self, ends[1], body);
    }
    close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  std::vector<RankEnd> ends;
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    std::string message = read_all(children[rank].from);
    close(children[rank].from);
    int status = 0;
    while (waitpid(children[rank].pid, &status, 0) < 0) {
      check_system(errno == EINTR, "waitpid");
    }
    RankEnd& end = ends.emplace_back();
    if (WIFSIGNALED(status)) {
      end.signal = WTERMSIG(status);
      continue;
    }
    if (message.empty()) {
      end.failure = std::make_exception_ptr(
          std::runtime_error(detail::concat("ended with status ", WEXITSTATUS(status))));
      continue;
    }
    const std::string kind = take(message);
    end.failure = failure_of(kind, take(message));
    while (!message.empty()) {
      const std::string file = take(message);
      const int line = std::stoi(take(message));
      ADD_FAILURE_AT(file.c_str(), line) << "rank " << rank << ": " << take(message);
    }
  }
  return ends;
}

bool is_true_in_a_fork(const std::function<bool()>& question) {
  const pid_t pid = fork();
  check_system(pid >= 0, "fork");
  if (pid == 0) {
    _exit(question() ? 0 : 1);
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    check_system(errno == EINTR, "waitpid");
  }
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

SharedPage::SharedPage()
    : data_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
  check_system(data_ != MAP_FAILED, "mmap");
}
SharedPage::~SharedPage() { munmap(data_, kBytes); }

RankLatch::RankLatch(int count) : count_(count) {
  check_system(pipe2(ends_, O_CLOEXEC) == 0, "pipe2");
}
RankLatch::~RankLatch() {
  close(ends_[0]);
  close(ends_[1]);
}

void RankLatch::count_down() const {
  const char one = 1;
  check_system(write(ends_[1], &one, 1) == 1, "write");
}

void RankLatch::wait() const {
  for (int seen = 0; seen < count_;) {
    char one = 0;
    const ssize_t bytes = read(ends_[0], &one, 1);
    check_system(bytes == 1 || errno == EINTR, "read");
    seen += bytes == 1 ? 1 : 0;
  }
}

}  // namespace tessera::comm
