// What the codecs of blocks have in common: their format, and the checks of what they are called
// with, which throw InternalError before anything is enqueued.
//
// Threads: as comm::Codec.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/comm/codec.h"
#include "tessera/quant/block_codec.h"

namespace tessera::quant {

class CheckedCodec : public comm::Codec {
 public:
  explicit CheckedCodec(const BlockFormat& format);

  std::string_view name() const override { return name_; }
  std::size_t wire_bytes(std::int64_t numel) const override;

 protected:
  const BlockFormat& format() const { return format_; }
  void check(const char* work, DType dtype, std::int64_t numel, const std::byte* wire) const;
  void check_sum(DType dtype, std::int64_t numel, const std::byte* wires, std::size_t stride,
                 int num_wires) const;

 private:
  const BlockFormat format_;
  std::string name_;
};

}  // namespace tessera::quant
