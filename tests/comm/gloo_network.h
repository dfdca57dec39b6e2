// Gloo between threads of this process, each with its own sockets and store connection.
#pragma once

#include <chrono>
#include <memory>

#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/status_store.h"
#include "tessera/comm/store.h"
#include "tests/comm/staged_contract.h"

namespace tessera::comm {

class GlooNetwork final : public Network {
 public:
  explicit GlooNetwork(int num_ranks) : num_ranks_(num_ranks) {}

  std::unique_ptr<Backend> make_backend(int rank) override {
    GlooOptions options;
    options.bind_host = "127.0.0.1";
    return make_gloo_backend(connect(), rank, num_ranks_, "world", options);
  }
  std::shared_ptr<StatusStore> make_status() override {
    return std::make_shared<StatusStore>(connect(), num_ranks_);
  }

 private:
  static constexpr std::chrono::seconds kTimeout{60};

  std::unique_ptr<Store> connect() { return connect_store("127.0.0.1", server_->port(), kTimeout); }

  const int num_ranks_;
  const std::shared_ptr<Store> server_ = serve_store("127.0.0.1", 0, kTimeout);
};

}  // namespace tessera::comm
