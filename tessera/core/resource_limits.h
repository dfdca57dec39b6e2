// Limits that the system puts on a process (ulimit), in the words of an error message: a call that
// fails for one of them says which, its value, and how to raise it.
//
// Threads: stateless.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

// RLIMIT_NOFILE of this process.
std::uint64_t open_file_limit();
// Descriptors that this process has open now.
std::uint64_t num_open_files();
// Raises the soft limit of open files towards `wanted`, as far as the hard limit lets it.
void raise_open_file_limit(std::uint64_t wanted);
// "; this process may have 40 files open at a time: raise the limit, ulimit -n 1024"
std::string open_files_remedy();
// open_files_remedy() if the system's words `reason` are about it, else nothing.
std::string remedy_of(const std::string& reason);

// RLIMIT_AS of this process; nothing: unlimited.
std::optional<std::uint64_t> address_space_limit();
// What an allocation failed for: "out of memory: 64 MiB were asked for; this process may use 900000
// KiB of address space (ulimit -v), and uses 899000: raise ..." `asked_bytes` 0: unknown.
std::string no_memory_text(std::uint64_t asked_bytes);

}  // namespace tessera
