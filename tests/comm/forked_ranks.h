// Ranks of a test as processes, and what they share besides their group.
//
// Each rank is a fork of the test program: it runs the body and ends, without the rest of the test.
// What the body threw and what gtest saw fail in it come back over a pipe. A rank ends with the
// test program, however that ends.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace tessera::comm {

struct RankEnd {
  std::exception_ptr failure;  // what the body threw, of its own kind
  int signal = 0;              // that ended the rank; 0: none
};

// By rank; all processes have ended. Failed expectations of a rank are those of the test.
// REQUIRES: this process has no other thread.
std::vector<RankEnd> run_forked(int num_ranks, const std::function<void(int rank)>& body);

// What a fork of this process answers; for questions that leave traces.
bool is_true_in_a_fork(const std::function<bool()>& question);

// Anonymous memory that a fork shares with its parent; null in the beginning.
class SharedPage {
 public:
  SharedPage();
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;
  static constexpr std::size_t kBytes = 4096;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// A value that ranks share, be they threads or processes. T works between processes, as a lock-free
// atomic does.
template <typename T>
class SharedByRanks {
 public:
  SharedByRanks() : value_(new(page_.data()) T()) {}
  T& operator*() const { return *value_; }
  T* operator->() const { return value_; }

 private:
  static_assert(sizeof(T) <= SharedPage::kBytes);
  const SharedPage page_;
  T* const value_;
};

// As std::latch, for one waiting rank, be ranks threads or processes.
class RankLatch {
 public:
  explicit RankLatch(int count);
  ~RankLatch();
  RankLatch(const RankLatch&) = delete;
  RankLatch& operator=(const RankLatch&) = delete;

  void count_down() const;
  void wait() const;

 private:
  const int count_;
  int ends_[2] = {-1, -1};  // of a pipe
};

}  // namespace tessera::comm
