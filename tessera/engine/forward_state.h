// What a forward finds around it and may depend on: random generators, autocast, buffers.
//
// Threads: autocast is the calling thread's; generators and buffers are shared, and whoever runs a
// forward has them for itself.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace tessera::engine {

// Autocast of CPU and CUDA.
class AutocastState {
 public:
  static AutocastState now();
  void apply() const;

 private:
  struct OfDevice {
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  std::array<OfDevice, 2> devices_;
  bool cache_ = false;
};

// The default generators of the CPU and, where one is in use, of the current GPU.
class RandomState {
 public:
  static RandomState now(bool with_cuda);
  void apply() const;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> saved_;
};

// Values of buffers; a buffer that nobody writes to afterwards costs no copy.
class BufferValues {
 public:
  static BufferValues now(const std::vector<at::Tensor>& buffers);
  // Writes back what has changed since, without a trace in the version counters: torch's own
  // running statistics leave none either.
  void apply() const;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;
};

// All of it.
class ForwardState {
 public:
  static ForwardState now(const std::vector<at::Tensor>& buffers, bool with_cuda);
  void apply() const;

 private:
  AutocastState autocast_;
  RandomState random_;
  BufferValues buffers_;
};

}  // namespace tessera::engine
