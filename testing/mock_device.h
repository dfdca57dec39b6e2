// A CPU device that is late on purpose: the double on which mistakes in the order of work show
// without an accelerator.
//
// Every stream but compute is a thread with a queue. A copy or fill begins as early as the
// contract of device.h allows, by overwriting its destination with poison, and ends late; it reads
// its source only at the end. A program that forgets a wait therefore meets old bytes or poison,
// and one that reuses a source too early sends the wrong bytes. New memory is poison, too.
//
//   kRandom  work ends after a random number of scheduler yields, drawn per stream from `seed`.
//   kLazy    work ends only when somebody waits for it, or for work that was ordered behind it:
//            the latest moment there is. A missing wait shows every time. Whoever lets work on a
//            stream fulfil a Completion of its own must wait for the stream's Pending, not only
//            for the Completion: the device cannot know about the latter.
//
// A right program cannot tell this device from any other, and never meets a deadlock that a real
// one would not give it.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/device/device_cpu.h"

namespace tessera::device {

// 0xff in every byte is NaN in fp32, bf16 and fp16: it survives arithmetic until a test looks.
inline constexpr std::uint8_t kPoisonByte = 0xff;

enum class LateMode : std::uint8_t { kRandom, kLazy };

struct MockDeviceOptions {
  LateMode mode = LateMode::kLazy;
  std::uint64_t seed = 1;              // kRandom only
  std::uint32_t max_delay_yields = 4;  // kRandom only; before each piece of work
  // Says of itself that it has memory of its own, as a GPU does, so that programs take the ways
  // they take there: tiers and copies are tested without one. The memory is the host's all the
  // same.
  bool own_memory = false;
  // What it says it has; 0: the host's. What is free follows from the ledger, and nothing is
  // refused.
  std::size_t own_memory_bytes = 0;
  CpuDeviceOptions host;
};

std::unique_ptr<Device> make_mock_device(MockDeviceOptions options = {});

}  // namespace tessera::device
