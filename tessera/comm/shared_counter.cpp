#include "tessera/comm/shared_counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include <climits>

namespace tessera::comm {

void SharedCounter::pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // as long as x86's pause; yield is next to nothing
#endif
}

// Not the private kind: the waiting process is another one.
void SharedCounter::sleep(std::uint32_t seen) {
  timespec limit{};
  limit.tv_nsec = std::chrono::nanoseconds(kLookInterval).count();
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&value_), FUTEX_WAIT, seen, &limit, nullptr,
          0);
}

void SharedCounter::wake() {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&value_), FUTEX_WAKE, INT_MAX, nullptr,
          nullptr, 0);
}

}  // namespace tessera::comm
