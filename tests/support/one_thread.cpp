// Linked into tests that are marked SINGLE in the build without sanitizers: the thread sanitizer
// does not see those, so whoever starts a thread in one has to take the mark away.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>

// Found before the C library's, by std::thread as well.
extern "C" int pthread_create(pthread_t* /*thread*/, const pthread_attr_t* /*attributes*/,
                              void* (* /*start*/)(void*), void* /*argument*/) noexcept {
  std::fputs(
      "a thread is started in a test that is marked SINGLE: remove the mark in its "
      "CMakeLists.txt\n",
      stderr);
  std::abort();
}
