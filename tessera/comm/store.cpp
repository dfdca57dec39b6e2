#include "tessera/comm/store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <resolv.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/comm/c10d_store.h"
#include "tessera/comm/socket_probe.h"
#include "tessera/core/error.h"
#include "tessera/core/resource_limits.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLongestPause{50};

// [Note: the second connection]
// c10d prints a stack trace when its connection breaks, and its socket cannot be looked at. So a
// client keeps a second, silent connection to the server: when that one is closed the server is
// gone, and c10d is not asked any more. A server looks at nothing: it lives in this process.
class Sentinel {
 public:
  explicit Sentinel(int fd) : fd_(fd) {}
  ~Sentinel() {
    if (fd_ >= 0) close(fd_);
  }
  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;
  bool server_is_gone() const { return fd_ >= 0 && peer_has_closed(fd_); }

 private:
  const int fd_;
};

class TcpStore final : public Store {
 public:
  TcpStore(c10::intrusive_ptr<c10d::TCPStore> tcp, const std::string& key_prefix,
           std::unique_ptr<Sentinel> sentinel)
      : sentinel_(std::move(sentinel)), tcp_(std::move(tcp)), store_(tcp_) {
    if (!key_prefix.empty()) {
      store_ = c10::make_intrusive<c10d::PrefixStore>(key_prefix, store_);
    }
  }

  void set(const std::string& key, const std::string& value) override {
    call("set", key,
         [&] { store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end())); });
  }

  // Asks again and again, because c10d's own wait prints two warnings when its time is over.
  std::string get(const std::string& key, milliseconds timeout) override {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    milliseconds pause{1};
    for (;;) {
      if (auto value = try_get(key)) return std::move(*value);
      TESSERA_CHECK(std::chrono::steady_clock::now() < deadline, CommError, "store at ", address(),
                    ": key '", key, "' was not set within ", timeout.count(),
                    " ms; the rank that sets it has failed, or has never started");
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, kLongestPause);
    }
  }

  std::optional<std::string> try_get(const std::string& key) override {
    std::optional<std::string> value;
    call("read", key, [&] {
      if (!store_->check({key})) return;
      const std::vector<std::uint8_t> bytes = store_->get(key);
      value.emplace(bytes.begin(), bytes.end());
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
  template <typename Body>
  void call(const char* verb, const std::string& key, const Body& body) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string why = "the connection was closed";
    if (!sentinel_->server_is_gone()) {
      try {
        body();
        return;
      } catch (const std::exception& error) {
        why = c10d_text(error);
      }
    }
    throw CommError(detail::concat("store at ", address(), ": cannot ", verb, " key '", key,
                                   "': ", why,
                                   "; the process that holds the store has ended or is out of "
                                   "reach"));
  }

  std::mutex mutex_;  // c10d's is held per call only; a check and its read belong together
  const std::unique_ptr<Sentinel> sentinel_;
  const c10::intrusive_ptr<c10d::TCPStore> tcp_;
  c10::intrusive_ptr<c10d::Store> store_;
};

c10d::TCPStoreOptions make_options(std::uint16_t port, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

using Tcp = c10::intrusive_ptr<c10d::TCPStore>;

// c10d asks DNS for the name of every address that it connects to, for its messages. Where no DNS
// answers, that costs ten seconds per connection, also to 127.0.0.1, and a warning to the user, who
// can do nothing about it. The resolver's patience belongs to the thread, so shortening it harms
// nobody else. A host given by name needs its lookups, and keeps them.
void shorten_lookups_of_numeric(const std::string& host) {
  in6_addr address;
  if (inet_pton(AF_INET, host.c_str(), &address) == 1 ||
      inet_pton(AF_INET6, host.c_str(), &address) == 1) {
    res_init();
    _res.retrans = 1;  // seconds
    _res.retry = 1;
  }
}

// Torch's warnings wait while a connection is made: whatever really goes wrong there is thrown, and
// told by us. Torch's level is the process's, so the last of several connections restores it.
class WarningsOff {
 public:
  WarningsOff() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (depth_++ == 0) {
      former_ = FLAGS_caffe2_log_level;
      FLAGS_caffe2_log_level = std::max(former_, kTorchError);
    }
  }
  ~WarningsOff() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--depth_ == 0) {
      FLAGS_caffe2_log_level = former_;
    }
  }
  WarningsOff(const WarningsOff&) = delete;
  WarningsOff& operator=(const WarningsOff&) = delete;

 private:
  static constexpr int kTorchError = 2;  // torch's number for errors

  static inline std::mutex mutex_;
  static inline int depth_ = 0;
  static inline int former_ = 0;
};

// c10d waits for the server's first word without a limit, and a listener that never speaks (a
// stopped process, another program) would hold us forever. So a thread of its own waits; if it is
// held up it is left behind, and ends with the process.
Tcp connect_tcp(const std::string& host, const c10d::TCPStoreOptions& options) {
  auto promise = std::make_shared<std::promise<Tcp>>();
  std::future<Tcp> result = promise->get_future();
  std::thread([promise, host, options] {
    try {
      shorten_lookups_of_numeric(host);
      const WarningsOff quiet;
      promise->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  TESSERA_CHECK(result.wait_for(options.timeout) == std::future_status::ready, CommError,
                "no word after ", options.timeout.count(), " ms");
  return result.get();
}

}  // namespace

std::unique_ptr<Store> serve_store(const std::string& host, std::uint16_t port,
                                   milliseconds timeout, const std::string& key_prefix) {
  const int fd = bind_listener(host, port);
  c10d::TCPStoreOptions options = make_options(bound_port(fd), timeout);
  options.isServer = true;
  options.masterListenFd = fd;
  try {
    return std::make_unique<TcpStore>(connect_tcp(host, options), key_prefix,
                                      std::make_unique<Sentinel>(-1));
  } catch (const std::exception& error) {
    throw CommError(detail::concat("store at ", host, ":", options.port, ": cannot be served: ",
                                   c10d_text(error), remedy_of(c10d_text(error))));
  }
}

std::unique_ptr<Store> connect_store(const std::string& host, std::uint16_t port,
                                     milliseconds timeout, const std::string& key_prefix) {
  // c10d prints a warning with a stack trace for each attempt that fails; so it is called only
  // when somebody listens. See [Note: the second connection].
  const ConnectResult probe = connect_within(host, port, timeout);
  auto sentinel = std::make_unique<Sentinel>(probe.fd);
  TESSERA_CHECK(
      probe.fd >= 0, CommError, "store at ", host, ":", port, " does not answer after ",
      std::chrono::duration<double>(timeout).count(), " s (", probe.error, ")",
      remedy_of(probe.error).empty()
          ? "; is rank 0 running there, and may this host reach that port? MASTER_ADDR and "
            "MASTER_PORT say where it is looked for"
          : remedy_of(probe.error));
  try {
    return std::make_unique<TcpStore>(connect_tcp(host, make_options(port, timeout)), key_prefix,
                                      std::move(sentinel));
  } catch (const std::exception& error) {
    throw CommError(detail::concat("store at ", host, ":", port, " answers, but not as a store: ",
                                   c10d_text(error), remedy_of(c10d_text(error)),
                                   "; rank 0 hangs, or another program listens there: then set "
                                   "MASTER_PORT to a free port"));
  }
}

namespace {

// A port belongs to a process, and ranks that join a second world may still be on their way to the
// store of the first: so a server, once it is there, stays until the process ends.
void serve_for_process(const Rendezvous& rendezvous, milliseconds timeout) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, std::uint16_t>, std::unique_ptr<Store>> servers;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Store>& server = servers[{rendezvous.host, rendezvous.port}];
  if (server == nullptr) {
    server = serve_store(rendezvous.host, rendezvous.port, timeout);
  }
}

}  // namespace

std::unique_ptr<Store> join_store(const Rendezvous& rendezvous, milliseconds timeout) {
  if (rendezvous.serves_store) {
    serve_for_process(rendezvous, timeout);
  }
  return connect_store(rendezvous.host, rendezvous.port, timeout, rendezvous.key_prefix);
}

c10::intrusive_ptr<c10d::Store> c10d_store(Store& store) {
  auto* tcp = dynamic_cast<TcpStore*>(&store);
  TESSERA_INVARIANT(tcp != nullptr, "the store at ", store.address(), " is not c10d's");
  return tcp->c10d();
}

}  // namespace tessera::comm
