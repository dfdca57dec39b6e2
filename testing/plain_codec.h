// The plainest codec there is, for tests: one byte per element and four more per 16 of them.
//
// A block has the exponent of its largest value, and of each value the seven bits below it, cut
// off; so what it decodes is exact in fp32 and bf16, and encodes to itself. A block with a value
// that is not finite decodes to NaN alone.
//
// Where it is given a stream of a device it works as CUDA's codec does, in the order of the stream,
// but on the host: memory of the device is copied there and back.
//
// Threads: as codec.h says.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/codec.h"
#include "tessera/device/device.h"

namespace tessera::comm {

class PlainCodec final : public Codec {
 public:
  static constexpr std::int64_t kBlockNumel = 16;

  // `device`: whose memory it works on; null: the host's. `name`: codecs of other names differ.
  explicit PlainCodec(device::Device* device = nullptr, std::string name = "plain blocks of 16")
      : device_(device), name_(std::move(name)) {}

  std::string_view name() const override { return name_; }
  std::size_t wire_bytes(std::int64_t numel) const override;
  device::Pending encode(const void* values, DType dtype, std::int64_t numel, std::byte* wire,
                         device::Stream* stream) const override;
  device::Pending decode(const std::byte* wire, std::int64_t numel, void* values, DType dtype,
                         device::Stream* stream) const override;
  device::Pending decode_sum(const std::byte* wires, std::size_t stride, int num_wires,
                             std::int64_t numel, void* sum, DType dtype,
                             device::Stream* stream) const override;
  device::Pending measure(const void* values, DType dtype, std::int64_t numel,
                          const std::byte* wire, double* result, bool continues,
                          device::Stream* stream) const override;

 private:
  device::Device* const device_;
  const std::string name_;
};

// On the host, by element: what references are made of.
std::vector<float> to_floats(const void* values, DType dtype, std::int64_t numel);
void from_floats(const std::vector<float>& floats, void* values, DType dtype);
// decode(encode(values)), in fp32.
std::vector<float> through_plain_codec(const std::vector<float>& values);

}  // namespace tessera::comm
