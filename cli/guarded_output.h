// Standard output that may go away: a full disk behind `>`, a reader that has left (`| head -1`).
//
// While it lives, what is written to std::cout goes to the descriptor whole. The first write that
// fails is told on standard error; from then on output is dropped, and std::cout stays good, so
// that nobody who trains fails over a lost line. lost() is for commands whose output is their
// result.
//
// Threads: as std::cout; one at a time, at most one object in a process.
#pragma once

#include <iosfwd>
#include <streambuf>
#include <string>

namespace tessera::cli {

class GuardedOutput final : private std::streambuf {
 public:
  // `fd`: standard output's; another one for tests.
  GuardedOutput(std::ostream& stream, int fd);
  ~GuardedOutput() override;
  GuardedOutput(const GuardedOutput&) = delete;
  GuardedOutput& operator=(const GuardedOutput&) = delete;

  bool lost() const { return lost_; }

 private:
  int_type overflow(int_type c) override;
  int sync() override;
  std::streamsize xsputn(const char* text, std::streamsize count) override;
  void write_out();

  std::ostream& stream_;
  std::streambuf* const former_;
  const int fd_;
  bool lost_ = false;
  std::string pending_;
};

// SIGPIPE and SIGXFSZ would end the process where a write could fail instead: from now on writes
// fail, and are told. For commands that hold something worth more than their output.
void let_writes_fail();

}  // namespace tessera::cli
