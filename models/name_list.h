// What is wrong with a file, by name: as many names as a line holds, and how many more there are;
// internal to models.
//
// Threads: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace tessera::models {

class NameList {
 public:
  // "missing are"
  explicit NameList(std::string title);

  // One line of printable text.
  void add(const std::string& item);
  // "missing are A, B and 7 more"; empty: none.
  std::string text() const;

 private:
  std::string title_;
  std::string items_;
  std::size_t num_items_ = 0;
};

// Those that are not empty, with "; " between them.
std::string joined(std::initializer_list<NameList> lists);

// "[3, 5]"
std::string sizes_text(const std::vector<std::int64_t>& sizes);

}  // namespace tessera::models
