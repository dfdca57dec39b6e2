#include "tessera/device/host_threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "tessera/device/host_copy.h"
#include "tessera/device/host_info.h"
#include "tessera/device/host_memory.h"

namespace tessera::device {

void for_each_piece(std::size_t num_pieces, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next_piece{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto run = [&] {
    try {
      for (std::size_t piece = next_piece++; piece < num_pieces; piece = next_piece++) {
        work(piece);
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      failure = failure ? failure : std::current_exception();
      next_piece = num_pieces;
    }
  };
  const auto num_cores = static_cast<std::size_t>(num_pieces > 1 ? read_host_cores().usable() : 1);
  std::vector<std::thread> helpers;
  while (helpers.size() + 1 < std::min(num_cores, num_pieces)) {
    try {
      helpers.emplace_back(run);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those that there are do it all
    }
  }
  run();
  for (std::thread& helper : helpers) {
    helper.join();
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

namespace {

// Of memory that has its pages: what one core copies while a thread is made many times over.
constexpr std::size_t kCopiedPieceBytes = std::size_t{8} << 20;

void for_each_range(std::size_t bytes, std::size_t piece_bytes,
                    const std::function<void(std::size_t begin, std::size_t bytes)>& work) {
  for_each_piece((bytes + piece_bytes - 1) / piece_bytes, [&](std::size_t piece) {
    const std::size_t begin = piece * piece_bytes;
    work(begin, std::min(piece_bytes, bytes - begin));
  });
}

}  // namespace

void fill_host(void* to, std::uint8_t value, std::size_t bytes) {
  for_each_range(bytes, kTouchedPieceBytes, [&](std::size_t begin, std::size_t count) {
    fill_bytes(static_cast<std::byte*>(to) + begin, value, count);
  });
}

void copy_host(void* to, const void* from, std::size_t bytes) {
  for_each_range(bytes, kCopiedPieceBytes, [&](std::size_t begin, std::size_t count) {
    copy_bytes(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
               count);
  });
}

}  // namespace tessera::device
