#include "tessera/comm/store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include <mutex>
#include <utility>
#include <vector>

#include "tessera/comm/c10d_store.h"
#include "tessera/comm/socket_probe.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// c10d's messages may carry a C++ stack trace behind the first line.
std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

class TcpStore final : public Store {
 public:
  TcpStore(c10::intrusive_ptr<c10d::TCPStore> tcp, const std::string& key_prefix)
      : tcp_(std::move(tcp)), store_(tcp_) {
    if (!key_prefix.empty()) {
      store_ = c10::make_intrusive<c10d::PrefixStore>(key_prefix, store_);
    }
  }

  void set(const std::string& key, const std::string& value) override {
    call("set", key, [&] { store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end())); });
  }

  std::string get(const std::string& key, milliseconds timeout) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      store_->wait({key}, timeout);
      return read(key);
    } catch (const std::exception& error) {
      throw CommError(detail::concat("store at ", address(), ": key '", key, "' did not come within ",
                                     timeout.count(), " ms (", first_line(error),
                                     "); the rank that sets it has failed or never started"));
    }
  }

  std::optional<std::string> try_get(const std::string& key) override {
    std::optional<std::string> value;
    call("read", key, [&] {
      if (store_->check({key})) value = read(key);
    });
    return value;
  }

  std::int64_t add(const std::string& key, std::int64_t delta) override {
    std::int64_t sum = 0;
    call("add to", key, [&] { sum = store_->add(key, delta); });
    return sum;
  }

  std::string address() const override {
    return detail::concat(tcp_->getHost(), ":", tcp_->getPort());
  }
  std::uint16_t port() const override { return tcp_->getPort(); }

  const c10::intrusive_ptr<c10d::Store>& c10d() const { return store_; }

 private:
  std::string read(const std::string& key) {
    const std::vector<std::uint8_t> bytes = store_->get(key);
    return std::string(bytes.begin(), bytes.end());
  }

  template <typename Body>
  void call(const char* verb, const std::string& key, const Body& body) {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      body();
    } catch (const std::exception& error) {
      throw CommError(detail::concat("store at ", address(), ": cannot ", verb, " key '", key, "': ",
                                     first_line(error),
                                     "; the process that holds the store has ended or is out of "
                                     "reach"));
    }
  }

  std::mutex mutex_;  // c10d's is held per call only; a check and its read belong together
  c10::intrusive_ptr<c10d::TCPStore> tcp_;
  c10::intrusive_ptr<c10d::Store> store_;
};

c10d::TCPStoreOptions make_options(std::uint16_t port, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

}  // namespace

std::unique_ptr<Store> serve_store(const std::string& host, std::uint16_t port,
                                   milliseconds timeout, const std::string& key_prefix) {
  const int fd = bind_listener(host, port);
  c10d::TCPStoreOptions options = make_options(bound_port(fd), timeout);
  options.isServer = true;
  options.masterListenFd = fd;
  try {
    return std::make_unique<TcpStore>(c10::make_intrusive<c10d::TCPStore>(host, options),
                                      key_prefix);
  } catch (const std::exception& error) {
    throw CommError(detail::concat("store at ", host, ":", options.port, ": cannot be served: ",
                                   first_line(error)));
  }
}

std::unique_ptr<Store> connect_store(const std::string& host, std::uint16_t port,
                                     milliseconds timeout, const std::string& key_prefix) {
  // c10d prints a warning with a stack trace for each attempt that fails; so it is called only
  // when somebody listens.
  const std::string why = wait_for_listener(host, port, timeout);
  TESSERA_CHECK(why.empty(), CommError, "store at ", host, ":", port, " does not answer after ",
                std::chrono::duration<double>(timeout).count(), " s (", why,
                "); is rank 0 running there, and may this host reach that port? MASTER_ADDR and "
                "MASTER_PORT say where it is looked for");
  try {
    return std::make_unique<TcpStore>(
        c10::make_intrusive<c10d::TCPStore>(host, make_options(port, timeout)), key_prefix);
  } catch (const std::exception& error) {
    throw CommError(detail::concat("store at ", host, ":", port, " answers, but not as a store: ",
                                   first_line(error),
                                   "; another program listens there: set MASTER_PORT to a free "
                                   "port"));
  }
}

std::unique_ptr<Store> join_store(const Rendezvous& rendezvous, milliseconds timeout) {
  const auto open = rendezvous.serves_store ? serve_store : connect_store;
  return open(rendezvous.host, rendezvous.port, timeout, rendezvous.key_prefix);
}

c10::intrusive_ptr<c10d::Store> c10d_store(Store& store) {
  auto* tcp = dynamic_cast<TcpStore*>(&store);
  TESSERA_INVARIANT(tcp != nullptr, "the store at ", store.address(), " is not c10d's");
  return tcp->c10d();
}

}  // namespace tessera::comm
