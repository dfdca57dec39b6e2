// The tensors inside arguments and results: tensors themselves, and vectors, tuples, pairs and
// optionals of them. Everything else holds none. Undefined tensors are skipped.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::engine {

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};
template <typename T>
struct IsOptional : std::false_type {};
template <typename T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <typename T>
struct IsTuple : std::false_type {};
template <typename... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <typename A, typename B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

// Calls visit(tensor) for each, in order.
template <typename T, typename Visit>
void visit_tensors(T& value, const Visit& visit) {
  using Plain = std::remove_cv_t<T>;
  if constexpr (std::is_base_of_v<at::Tensor, Plain>) {
    if (value.defined()) {
      visit(value);
    }
  } else if constexpr (IsVector<Plain>::value) {
    if constexpr (!std::is_same_v<Plain, std::vector<bool>>) {
      for (auto& each : value) {
        visit_tensors(each, visit);
      }
    }
  } else if constexpr (IsOptional<Plain>::value) {
    if (value) {
      visit_tensors(*value, visit);
    }
  } else if constexpr (IsTuple<Plain>::value) {
    std::apply([&](auto&... each) { (visit_tensors(each, visit), ...); }, value);
  }
}

template <typename T>
void pack_tensors(const T& value, std::vector<at::Tensor>& out) {
  visit_tensors(value, [&](const at::Tensor& tensor) { out.push_back(tensor); });
}

// Puts `tensors`, from `next` on, where pack_tensors() found them.
template <typename T>
void unpack_tensors(T& value, const std::vector<at::Tensor>& tensors, std::size_t& next) {
  visit_tensors(value, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
}

}  // namespace tessera::engine
