// How engines start their threads. Internal to tier.
#pragma once

#include <functional>
#include <thread>

namespace tessera::tier {

// Starts `body` on a thread that gets no signals: handlers stay on the program's own threads, and a
// write above the limit of a file's size is an error instead of the end of the process (SIGXFSZ).
std::thread start_io_thread(std::function<void()> body);

}  // namespace tessera::tier
