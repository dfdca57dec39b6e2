#include "tessera/quant/block_codec.h"

#include "tessera/core/error.h"
#include "tessera/quant/block_loops.h"
#include "tessera/quant/checked_codec.h"

namespace tessera::quant {

void check_block_format(const BlockFormat& format) {
  TESSERA_CHECK(format.bits == 4 || format.bits == 8, ConfigError, "quantised blocks of ",
                format.bits, " bits: there are 4 and 8");
  TESSERA_CHECK(format.block_numel >= 32 && format.block_numel <= kMaxBlockNumel &&
                    format.block_numel % 32 == 0,
                ConfigError, "quantised blocks of ", format.block_numel,
                " values (quant.block_numel): take a multiple of 32, from 32 to ", kMaxBlockNumel);
}

std::string to_string(const BlockFormat& format) {
  return detail::concat("int", format.bits, " blocks of ", format.block_numel);
}

CheckedCodec::CheckedCodec(const BlockFormat& format) : format_(format) {
  check_block_format(format);
  name_ = to_string(format);
}

std::size_t CheckedCodec::wire_bytes(std::int64_t numel) const {
  TESSERA_INVARIANT(numel >= 0, name_, ": the bytes of ", numel, " values");
  return quant::wire_bytes(format_, numel);
}

void CheckedCodec::check(const char* work, DType dtype, std::int64_t numel,
                         const std::byte* wire) const {
  TESSERA_INVARIANT(
      dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16, work,
      " of ", name_, " with ", to_string(dtype), ": values are fp32, bf16 or fp16");
  TESSERA_INVARIANT(numel >= 0, work, " of ", name_, " with ", numel, " values");
  TESSERA_INVARIANT(reinterpret_cast<std::uintptr_t>(wire) % 16 == 0, work, " of ", name_, " at ",
                    static_cast<const void*>(wire), ": a wire is aligned to 16 bytes");
}

void CheckedCodec::check_sum(DType dtype, std::int64_t numel, const std::byte* wires,
                             std::size_t stride, int num_wires) const {
  check("sum", dtype, numel, wires);
  TESSERA_INVARIANT(num_wires >= 1, "sum of ", num_wires, " wires of ", name_);
  TESSERA_INVARIANT(num_wires == 1 || (stride >= wire_bytes(numel) && stride % 16 == 0), "sum of ",
                    num_wires, " wires of ", name_, ", ", stride, " bytes apart: each has ",
                    wire_bytes(numel), ", and is aligned to 16");
}

namespace {

class CpuBlockCodec final : public CheckedCodec {
 public:
  using CheckedCodec::CheckedCodec;

  device::Pending encode(const void* values, DType dtype, std::int64_t numel, std::byte* wire,
                         device::Stream* stream) const override {
    check("encoding", dtype, numel, wire);
    return run(stream,
               [=, this] { best_block_loops().encode(format(), values, dtype, numel, wire); });
  }

  device::Pending decode(const std::byte* wire, std::int64_t numel, void* values, DType dtype,
                         device::Stream* stream) const override {
    check("decoding", dtype, numel, wire);
    return run(stream,
               [=, this] { best_block_loops().decode(format(), wire, numel, values, dtype); });
  }

  device::Pending decode_sum(const std::byte* wires, std::size_t stride, int num_wires,
                             std::int64_t numel, void* sum, DType dtype,
                             device::Stream* stream) const override {
    check_sum(dtype, numel, wires, stride, num_wires);
    return run(stream, [=, this] {
      best_block_loops().decode_sum(format(), wires, stride, num_wires, numel, sum, dtype);
    });
  }

  device::Pending measure(const void* values, DType dtype, std::int64_t numel,
                          const std::byte* wire, double* result, bool continues,
                          device::Stream* stream) const override {
    check("measuring", dtype, numel, wire);
    return run(stream, [=, this] {
      measure_blocks(best_block_loops(), format(), values, dtype, numel, wire, result, continues);
    });
  }

 private:
  template <typename Work>
  static device::Pending run(device::Stream* stream, const Work& work) {
    if (stream != nullptr) {
      return stream->enqueue(work);
    }
    work();
    return {};
  }
};

}  // namespace

std::unique_ptr<comm::Codec> make_cpu_block_codec(const BlockFormat& format) {
  return std::make_unique<CpuBlockCodec>(format);
}

}  // namespace tessera::quant
