// See ../README.md: names that ProcessGroupGloo.hpp mentions. Opaque to us.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gloo {

class Context {
 public:
  std::chrono::milliseconds getTimeout() const;
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = default;
};

}  // namespace transport

namespace rendezvous {

// c10d derives an adapter from it inside its header, so the virtual functions must stand here in
// the order of the real class.
class Store {
 public:
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) = 0;
  virtual bool has_v2_support();
  virtual std::vector<std::vector<char>> multi_get(const std::vector<std::string>& keys);
  virtual void multi_set(const std::vector<std::string>& keys,
                         const std::vector<std::vector<char>>& data);
  virtual void append(const std::string& key, const std::vector<char>& data);
  virtual std::int64_t add(const std::string& key, std::int64_t value);
};

}  // namespace rendezvous
}  // namespace gloo
