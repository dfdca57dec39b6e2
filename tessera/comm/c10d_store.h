// Internal to comm: what sources share that name c10d. The one header of ours with a c10d type.
//
// Threads: stateless.
#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/comm/store.h"

namespace tessera::comm {

// The c10d object behind a Store, for what c10d builds on one. Keys carry the store's prefix.
// REQUIRES: `store` was made by serve_store or connect_store.
c10::intrusive_ptr<c10d::Store> c10d_store(Store& store);

// What c10d says, without the C++ stack trace that it appends.
inline std::string c10d_text(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace tessera::comm
