// Spans as ranges of NVTX, for the tools of NVIDIA that watch a program from outside (Nsight
// Systems). NVTX is not named here: without it, install_nvtx() is there and does nothing
// (no_nvtx.cpp).
//
// Threads: call it before other threads use the spans.
#pragma once

#include "tessera/core/spans.h"

namespace tessera::device {

// From now on every SpanScope is a range of the domain "tessera", also where the ring of spans is
// off; a range is named after its span and its unit, and carries the bytes. Does nothing, and
// answers false, unless a tool is attached: without one, a scope costs what it costs anyway.
bool install_nvtx(Spans& spans);

}  // namespace tessera::device
