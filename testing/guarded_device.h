// A discrete mock device whose memory the host really cannot touch: the addresses that it gives out
// have no access rights, and only its copies know where the bytes are. A program that reads or
// writes such memory by itself ends at once.
#pragma once

#include <memory>

#include "tessera/core/ledger.h"
#include "testing/mock_device.h"

namespace tessera::device {

std::unique_ptr<Device> make_guarded_device(LateMode mode, int rank, Ledger& ledger);

}  // namespace tessera::device
