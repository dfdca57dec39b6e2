// An open file, and errors of the file system in our words; internal to checkpoint.
//
// A call that a signal interrupted is repeated. Every IoError is one line: the path, what could not
// be done, the system's reason, and a remedy where one is known.
//
// Threads: one caller at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::checkpoint {

// Throws IoError: "PATH: cannot DOING: REASON; REMEDY".
[[noreturn]] void throw_io_error(const std::string& path, std::string_view doing, int error);

class PosixFile {
 public:
  // `flags` as for open(2); the file is closed in programs that this one starts.
  PosixFile(const std::string& path, int flags, std::string_view doing);
  // A new file, to write; none if something has its name. Errors call it `shown_path`.
  static std::optional<PosixFile> make(std::string path, std::string shown_path);
  ~PosixFile();
  PosixFile(PosixFile&& other) noexcept;
  PosixFile& operator=(PosixFile&&) = delete;

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }

  // All of it, at the file's position.
  void write(const void* data, std::size_t bytes);
  // As much as there is, up to `bytes`: fewer only at the end of the file.
  std::size_t read_at(std::uint64_t offset, void* data, std::size_t bytes) const;
  void sync();
  // Throws what the system reports only now, such as a full quota on a network file system.
  void close();

 private:
  PosixFile(std::string path, std::string shown_path, int descriptor);

  std::string path_;
  std::string shown_path_;
  int descriptor_ = -1;
};

}  // namespace tessera::checkpoint
