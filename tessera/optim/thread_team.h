// A few threads that share one loop at a time: the caller and its helpers.
//
// Chunks are handed out by number. Which thread takes which chunk is left to chance, so a loop body
// must give the same result wherever it runs; what it computes per chunk is fixed by the number.
//
// Threads: run() may be called from any thread; calls run one after the other. A body must not call
// run().
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::optim {

class ThreadTeam {
 public:
  // `num_threads`: the calling one included. Throws ConfigError below 1. `cores`: empty, or one CPU
  // number per thread: helper i runs on cores[i] only; cores[0] is left to the caller, who is not
  // ours to bind. Throws ConfigError for another number of them, or one that is not to be had.
  explicit ThreadTeam(int num_threads, const std::vector<int>& cores = {});
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Calls body(chunk) for every chunk in [0, num_chunks); returns when all are done. `body` must
  // not throw.
  void run(std::int64_t num_chunks, const std::function<void(std::int64_t)>& body);

 private:
  void bind_helpers(const std::vector<int>& cores);
  void stop() noexcept;
  void help();
  void take_chunks();

  std::mutex run_mutex_;  // one loop at a time

  // Written by run() while no helper works; helpers read them after they have seen the loop's
  // number.
  const std::function<void(std::int64_t)>* body_ = nullptr;
  std::int64_t num_chunks_ = 0;
  std::atomic<std::int64_t> next_chunk_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::uint64_t loop_number_ = 0;
  int num_working_ = 0;
  bool is_stopping_ = false;

  std::vector<std::thread> helpers_;  // last: they use everything above
};

}  // namespace tessera::optim
