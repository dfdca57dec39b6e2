// A small key-value store that all processes of a run can reach: the rendezvous.
//
// Behind it is c10d's TCPStore; this header names no torch type, so that the launcher and the
// status store stay torch-free. One connection per Store object: a blocking get() holds up only its
// own.
//
// Threads: every method may be called from any thread; calls on one object follow one another.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/rendezvous.h"

namespace tessera::comm {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Blocks until the key is set; CommError after the timeout, with key and address.
  virtual std::string get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  // Never blocks for a key that is not set.
  virtual std::optional<std::string> try_get(const std::string& key) = 0;
  virtual std::int64_t add(const std::string& key, std::int64_t delta) = 0;
  virtual std::string address() const = 0;  // "127.0.0.1:43121"
  virtual std::uint16_t port() const = 0;
};

// Holds the server in this process, until the Store is destroyed. port 0: one that is free. It
// listens on the address of `host` (listen_scope() in socket_probe.h has the exceptions).
// `key_prefix` is put before every key of this object.
std::unique_ptr<Store> serve_store(const std::string& host, std::uint16_t port,
                                   std::chrono::milliseconds timeout,
                                   const std::string& key_prefix = "");
// Waits up to `timeout` for the server to come up; CommError if it does not.
std::unique_ptr<Store> connect_store(const std::string& host, std::uint16_t port,
                                     std::chrono::milliseconds timeout,
                                     const std::string& key_prefix = "");

// As the rendezvous says: the rank that must serves, from the first call to the end of the process;
// all connect.
std::unique_ptr<Store> join_store(const Rendezvous& rendezvous, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
