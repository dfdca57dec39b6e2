// Internal to planner: a sum of bytes, and how it is told.
//
// Threads: plain data.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "tessera/core/units.h"

namespace tessera::planner {

class ByteSum {
 public:
  void add(const std::string& what, std::int64_t bytes) {
    if (bytes > 0) {
      text_ << (total_ > 0 ? " + " : "") << approximate_bytes(bytes) << " " << what;
      total_ += bytes;
    }
  }
  std::int64_t total() const { return total_; }
  std::string text() const { return text_.str(); }

 private:
  std::int64_t total_ = 0;
  std::ostringstream text_;
};

}  // namespace tessera::planner
