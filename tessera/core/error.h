// The two checks and the exception types of the whole project.
//
// TESSERA_CHECK: the world is wrong (a bad option, a full disk, a peer that died). It throws the
// named exception. TESSERA_INVARIANT: we are wrong; it throws InternalError with file and line.
// The message parts are evaluated only on failure, so a check on a hot path costs one branch.
//
// A message says what, the values, and the consequence or the remedy. Rank and program name are
// added at the top level, never here. Nothing in the library prints and goes on, or calls exit().
//
// Threads: stateless. Exceptions cross threads only inside Pending (device/pending.h).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace tessera {

// Base of everything that we throw on purpose. Catch this at the top level.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Input that a user can mend: flags, config files, environment. Exit code 2.
class ConfigError : public Error {
 public:
  using Error::Error;
};

// Disk and file system.
class IoError : public Error {
 public:
  using Error::Error;
};

// The network, or a rank that did not do what the others did.
class CommError : public Error {
 public:
  using Error::Error;
};

// A peer is gone or has failed: this rank's own failure is only a consequence of that one.
// The launcher shows such an error only if no rank reports a cause of its own.
class PeerError : public CommError {
 public:
  using CommError::CommError;
};

// Stored data that does not have the form it should have.
class CorruptError : public Error {
 public:
  using Error::Error;
};

// The accelerator or its memory.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// A broken invariant: a defect of Tessera, not of its user.
class InternalError : public Error {
 public:
  using Error::Error;
};

// An illegal move of a parameter or of the coordinator: released while in use, gathered twice, a
// step that ends with gathers outstanding. Says which parameter and which unit; empty: none.
class StateError : public InternalError {
 public:
  StateError(const std::string& message, std::string parameter, std::string unit)
      : InternalError(message), parameter_(std::move(parameter)), unit_(std::move(unit)) {}
  const std::string& parameter() const { return parameter_; }
  const std::string& unit() const { return unit_; }

 private:
  std::string parameter_;
  std::string unit_;
};

namespace detail {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

[[noreturn]] inline void throw_invariant(const char* file, int line, const char* condition,
                                         const std::string& message) {
  throw InternalError(concat("internal error at ", file, ":", line, ": ", condition,
                             message.empty() ? "" : ": ", message,
                             "; this is a defect of Tessera, please report it"));
}

}  // namespace detail
}  // namespace tessera

#define TESSERA_CHECK(condition, Exception, ...)               \
  do {                                                         \
    if (!(condition)) [[unlikely]] {                           \
      throw Exception(::tessera::detail::concat(__VA_ARGS__)); \
    }                                                          \
  } while (false)

#define TESSERA_INVARIANT(condition, ...)                                         \
  do {                                                                            \
    if (!(condition)) [[unlikely]] {                                              \
      ::tessera::detail::throw_invariant(__FILE__, __LINE__, #condition,          \
                                         ::tessera::detail::concat(__VA_ARGS__)); \
    }                                                                             \
  } while (false)
