#include "tessera/tier/io_thread.h"

#include <pthread.h>
#include <signal.h>

#include <utility>

namespace tessera::tier {

std::thread start_io_thread(std::function<void()> body) {
  // Threads inherit the mask, so that there is no moment in which the new one could get a signal.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    std::thread thread(std::move(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread.native_handle(), "tessera-io");
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace tessera::tier
