// The tensors inside arguments and results: tensors themselves; vectors, lists, arrays, maps,
// tuples, pairs, optionals and variants of them; and any type T for which
//
//   template <typename Visit> void for_each_tensor(T& value, const Visit& visit)
//
// is found by argument-dependent lookup and calls visit(member) for its members (for a const T,
// too). Everything else holds none that can be seen. Undefined tensors are skipped.
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::engine {

// What for_each_tensor() is asked for in unevaluated operands.
struct AnyVisit {
  template <typename T>
  void operator()(T& value) const;
};

template <typename T>
concept HasForEachTensor =
    requires(T& value, const AnyVisit& visit) { for_each_tensor(value, visit); };
template <typename T>
concept IsOptional = requires(T& value) {
  typename T::value_type;
  requires std::is_same_v<std::remove_cv_t<T>, std::optional<typename T::value_type>>;
};
template <typename T>
concept IsTuple = requires { std::tuple_size<std::remove_cv_t<T>>::value; };
template <typename T>
concept IsMap = requires(T& value) {
  typename T::mapped_type;
  value.begin();
  value.end();
};
// Of elements that are there: not of the bits of a std::vector<bool>.
template <typename T>
concept IsRange = requires(T& value) {
  value.begin();
  value.end();
  requires std::is_lvalue_reference_v<decltype(*value.begin())>;
  requires std::is_const_v<T> ||
               !std::is_const_v<std::remove_reference_t<decltype(*value.begin())>>;
};
template <typename T>
struct IsVariant : std::false_type {};
template <typename... T>
struct IsVariant<std::variant<T...>> : std::true_type {};

// True: nothing is known of what is inside.
template <typename T>
constexpr bool is_opaque() {
  using Plain = std::remove_cv_t<T>;
  if constexpr (std::is_base_of_v<at::Tensor, Plain> || HasForEachTensor<Plain> ||
                IsVariant<Plain>::value || std::is_convertible_v<Plain, std::string_view> ||
                std::is_same_v<Plain, std::vector<bool>>) {
    return false;
  } else if constexpr (IsMap<Plain>) {
    return is_opaque<typename Plain::mapped_type>();
  } else if constexpr (IsOptional<Plain>) {
    return is_opaque<typename Plain::value_type>();
  } else if constexpr (IsTuple<Plain>) {
    return []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
      return (is_opaque<std::tuple_element_t<kIndex, Plain>>() || ...);
    }(std::make_index_sequence<std::tuple_size_v<Plain>>());
  } else if constexpr (IsRange<Plain>) {
    return is_opaque<std::remove_reference_t<decltype(*std::declval<Plain&>().begin())>>();
  } else {
    return std::is_class_v<Plain> || std::is_union_v<Plain>;
  }
}

// Calls visit(tensor) for each, in order.
template <typename T, typename Visit>
void visit_tensors(T& value, const Visit& visit) {
  using Plain = std::remove_cv_t<T>;
  const auto descend = [&](auto& each) { visit_tensors(each, visit); };
  if constexpr (std::is_base_of_v<at::Tensor, Plain>) {
    if (value.defined()) {
      visit(value);
    }
  } else if constexpr (HasForEachTensor<T>) {
    for_each_tensor(value, descend);
  } else if constexpr (IsVariant<Plain>::value) {
    std::visit(descend, value);
  } else if constexpr (std::is_convertible_v<Plain, std::string_view>) {
    // text
  } else if constexpr (IsMap<T>) {
    for (auto& [key, each] : value) {
      descend(each);
    }
  } else if constexpr (IsOptional<T>) {
    if (value) {
      descend(*value);
    }
  } else if constexpr (IsTuple<T>) {
    std::apply([&](auto&... each) { (descend(each), ...); }, value);
  } else if constexpr (IsRange<T>) {
    for (auto& each : value) {
      descend(each);
    }
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
