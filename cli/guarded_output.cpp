#include "cli/guarded_output.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>
#include <ostream>

#include "tessera/core/system_call.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kMostPending = 64 * 1024;

}  // namespace

GuardedOutput::GuardedOutput(std::ostream& stream, int fd)
    : stream_(stream), former_(stream.rdbuf(this)), fd_(fd) {}

GuardedOutput::~GuardedOutput() {
  write_out();
  stream_.rdbuf(former_);
}

GuardedOutput::int_type GuardedOutput::overflow(int_type c) {
  if (!traits_type::eq_int_type(c, traits_type::eof())) {
    const char byte = traits_type::to_char_type(c);
    xsputn(&byte, 1);
  }
  return traits_type::not_eof(c);
}

std::streamsize GuardedOutput::xsputn(const char* text, std::streamsize count) {
  pending_.append(text, static_cast<std::size_t>(count));
  if (pending_.size() >= kMostPending) {
    write_out();
  }
  return count;
}

int GuardedOutput::sync() {
  write_out();
  return 0;
}

void GuardedOutput::write_out() {
  std::size_t done = 0;
  while (!lost_ && done < pending_.size()) {
    const ssize_t count =
        retried([&] { return ::write(fd_, pending_.data() + done, pending_.size() - done); });
    if (count < 0) {
      lost_ = true;
      std::cerr << std::string("tessera: warning: standard output cannot be written: ") +
                       std::strerror(errno) + "; what would stand there is lost\n"
                << std::flush;
      break;
    }
    done += static_cast<std::size_t>(count);
  }
  pending_.clear();
}

void let_writes_fail() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace tessera::cli
