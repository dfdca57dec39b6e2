// Internal to comm: the c10d object behind a Store, for backends that c10d builds on one.
//
// Only sources of comm_c10d include this; it is the one header of ours that names a c10d type.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/store.h"

namespace tessera::comm {

// REQUIRES: `store` was made by serve_store or connect_store. Keys carry the store's prefix.
c10::intrusive_ptr<c10d::Store> c10d_store(Store& store);

}  // namespace tessera::comm
