// Internal to engine: which calls are legal now.
//
// Life of an engine: units are added; the first use finalizes the model (buckets, optimizer states
// and the arena depend on all parameters); then forward, backward and step in turn, until
// to_plain() or the end.
//
// [Note: abandoning a pass] An exception in a forward leaves gathers and open uses behind.
// StepDriver::abandon() puts all of them back and counts an epoch; whatever the old graph still
// holds (scopes, hooks) sees that its epoch is over and does nothing more than it must. Gradients
// of micro-batches that are complete stay. An exception in a backward leaves some gradients of its
// micro-batch and not others: then those of the step are dropped, and step() refuses until
// zero_grad() has been called. What is on its way to other ranks is waited for by the next call
// that needs the reducer, and not before: this rank's exception may be what the others wait for. If
// there is no such call, and the engine goes, it aborts its groups (grad::Reducer::leave()).
//
// Threads: as Engine.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::engine {

class Lifecycle {
 public:
  // The model is complete: no unit can be added.
  bool is_finalized() const { return is_finalized_; }
  void set_finalized() { is_finalized_ = true; }
  // Its parameters are ordinary tensors again: nothing is legal any more.
  void set_plain() { is_plain_ = true; }
  // Throws what a scope's destructor could not, and refuses after to_plain().
  void check_usable() {
    if (failure_) {
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
    TESSERA_CHECK(half_loaded_.empty(), ConfigError, "load() of ", half_loaded_,
                  " has failed when parts of it had been read: parameters are of two models. Load "
                  "another save, or make the engine anew");
    TESSERA_CHECK(!is_plain_, ConfigError,
                  "the engine has given its parameters back (to_plain()) and cannot train them; "
                  "make a new engine and its units to go on");
  }
  // What is being loaded; empty: that is done. Until then only another load() is legal.
  const std::string& half_loaded() const { return half_loaded_; }
  void set_half_loaded(std::string path) { half_loaded_ = std::move(path); }
  // The next check_usable() throws the first of them.
  void throw_later(std::exception_ptr failure) {
    if (!failure_) {
      failure_ = std::move(failure);
    }
  }

  // --- forwards and backwards that run; they nest ---
  bool is_idle() const { return forward_depth_ == 0 && backward_depth_ == 0; }
  void check_idle(const char* what) const {
    TESSERA_CHECK(is_idle(), ConfigError, what, " inside of a forward or backward");
  }
  int forward_depth() const { return forward_depth_; }
  void enter_forward() { ++forward_depth_; }
  void leave_forward() { --forward_depth_; }
  int backward_depth() const { return backward_depth_; }  // of Engine::backward()
  void enter_backward() { ++backward_depth_; }
  void leave_backward() { --backward_depth_; }
  // See [Note: abandoning a pass]. True: a backward ran.
  bool abandon() {
    ++epoch_;
    return std::exchange(backward_depth_, 0) > 0;
  }
  std::uint64_t epoch() const { return epoch_; }

  // --- a backward that failed ---
  void fail_backward(std::string why) { failed_backward_ = std::move(why); }
  void forget_failed_backward() { failed_backward_.clear(); }
  void check_gradients_complete() const {
    TESSERA_CHECK(failed_backward_.empty(), ConfigError,
                  "step() after a backward that failed: gradients of this step are incomplete. "
                  "Call zero_grad(), and run the micro-batches of the step again. The failure "
                  "was: ",
                  failed_backward_);
  }

  // --- Engine::resident() ---
  void set_resident(bool is_open) { is_resident_ = is_open; }
  void check_not_resident(const char* what) const {
    TESSERA_CHECK(!is_resident_, ConfigError, what,
                  " inside a resident scope, which is for evaluation; close it first");
  }

 private:
  bool is_finalized_ = false;
  bool is_plain_ = false;
  bool is_resident_ = false;
  int forward_depth_ = 0;
  int backward_depth_ = 0;
  std::uint64_t epoch_ = 0;
  std::string half_loaded_;
  std::exception_ptr failure_;   // of a scope's destructor
  std::string failed_backward_;  // empty: gradients of this step are complete
};

}  // namespace tessera::engine
