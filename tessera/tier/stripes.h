// Where the bytes of a store lie when several files share them: in turn, a stripe in each. Pure
// arithmetic.
//
//   store    | 0 | 1 | 2 | 3 | 4 | 5 | 6 |      three files
//   file 0   | 0 | 3 | 6 |
//   file 1   | 1 | 4 |
//   file 2   | 2 | 5 |
//
// Threads: stateless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::tier {

class Stripes {
 public:
  // One file has one stripe that never ends.
  Stripes(std::size_t num_files, std::uint64_t stripe_bytes);

  struct Piece {
    std::size_t file = 0;
    std::uint64_t offset_in_file = 0;
    std::uint64_t offset = 0;  // in the store
    std::size_t bytes = 0;
  };
  // In the order of the store.
  std::vector<Piece> cut(std::uint64_t offset, std::size_t bytes) const;
  // What a file holds of a store of this size.
  std::uint64_t file_bytes(std::size_t file, std::uint64_t store_bytes) const;

 private:
  const std::uint64_t num_files_;
  const std::uint64_t stripe_bytes_;
};

}  // namespace tessera::tier
