#include <map>
#include <utility>

#include "tessera/checkpoint/checkpoint_reader.h"
#include "tessera/checkpoint/checksum.h"
#include "tessera/checkpoint/stored_blocks.h"
#include "tessera/core/error.h"
#include "tessera/core/printable.h"

namespace tessera::checkpoint {
namespace {

// Tensor by tensor, so that each fragment's bytes serve its checksum and the tensor's.
class Verification {
 public:
  explicit Verification(const CheckpointReader& reader) : reader_(reader) {}

  std::vector<VerifyProblem> run() {
    for (const StoredParam& param : reader_.manifest().params) {
      for (const auto& [name, tensor] : param.tensors) {
        verify_tensor(tensor, detail::concat("tensor ", in_quotes(name), " of parameter ",
                                             in_quotes(param.name)));
      }
    }
    for (const auto* const list : {&reader_.manifest().buffers, &reader_.manifest().generators}) {
      for (const StoredRankTensor& tensor : *list) {
        const Fragment* before = nullptr;
        for (const Fragment& fragment : tensor.ranks) {
          if (before == nullptr || !(fragment == *before)) {  // ranks may share one
            verify_fragment(fragment,
                            static_cast<std::uint64_t>(fragment.numel) * bytes_of(tensor.dtype),
                            [](std::span<const std::byte>) {});
          }
          before = &fragment;
        }
      }
    }
    return std::move(problems_);
  }

 private:
  void verify_tensor(const StoredTensor& tensor, const std::string& what) {
    const std::size_t num_before = problems_.size();
    const std::uint64_t content =
        tensor.format.is_encoded() ? content_of_blocks(tensor) : content_of(tensor);
    if (problems_.size() == num_before && content != tensor.content) {
      problems_.push_back(
          {reader_.path() + "/" + std::string(kManifestName),
           detail::concat(what, ": the whole has the content hash ", checksum_text(content),
                          ", the manifest says ", checksum_text(tensor.content),
                          ", though each fragment is as it says")});
    }
  }

  std::uint64_t content_of(const StoredTensor& tensor) {
    ContentHash content;
    for (const Fragment& fragment : tensor.fragments) {
      verify_fragment(fragment, tensor.bytes_of_fragment(fragment),
                      [&content](std::span<const std::byte> bytes) { content.add(bytes); });
    }
    return content.value();
  }

  std::uint64_t content_of_blocks(const StoredTensor& tensor) {
    const shard::StoredBytes places(tensor.format, tensor.shard_numel);
    std::int64_t numel = 0;
    for (const Fragment& fragment : tensor.fragments) {
      numel += fragment.numel;
    }
    std::uint64_t sum = 0;
    for (const Fragment& fragment : tensor.fragments) {
      if (fragment.numel == 0) {
        continue;
      }
      ContentSum content(
          content_pieces(tensor.format, numel, places, fragment.begin, fragment.numel));
      verify_fragment(fragment, tensor.bytes_of_fragment(fragment),
                      [&content](std::span<const std::byte> bytes) { content.add(bytes); });
      sum += content.value();
    }
    return sum;
  }

  void verify_fragment(const Fragment& fragment, std::uint64_t num_bytes,
                       const CheckpointReader::VisitBytes& visit) {
    try {
      const std::uint64_t actual = reader_.read_unchecked(fragment, num_bytes, visit);
      if (actual != fragment.xxh3) {
        problems_.push_back(
            {reader_.file_path(fragment),
             detail::concat("offset ", fragment.offset, ": ", reader_.describe(fragment),
                            ", elements [", fragment.begin, ", ", fragment.begin + fragment.numel,
                            "), has the checksum ", checksum_text(actual), ", the manifest says ",
                            checksum_text(fragment.xxh3), whose(actual, fragment))});
      }
    } catch (const CorruptError& e) {
      problems_.push_back({reader_.file_path(fragment), e.what()});
    } catch (const IoError& e) {
      problems_.push_back({reader_.file_path(fragment), e.what()});
    }
  }

  // The fragment that has these bytes, if it is another.
  std::string whose(std::uint64_t xxh3, const Fragment& fragment) {
    if (by_checksum_.empty()) {
      for (const StoredParam& param : reader_.manifest().params) {
        for (const auto& [name, tensor] : param.tensors) {
          for (const Fragment& other : tensor.fragments) {
            by_checksum_.emplace(other.xxh3, &other);
          }
        }
      }
      for (const auto* const list : {&reader_.manifest().buffers, &reader_.manifest().generators}) {
        for (const StoredRankTensor& tensor : *list) {
          for (const Fragment& other : tensor.ranks) {
            by_checksum_.emplace(other.xxh3, &other);
          }
        }
      }
    }
    const auto found = by_checksum_.find(xxh3);
    if (found == by_checksum_.end() || found->second->numel != fragment.numel) {
      return "; the file is damaged";
    }
    return detail::concat("; these are the bytes of ", reader_.describe(*found->second), " in ",
                          printable(reader_.file_path(*found->second), 400),
                          ": were the files swapped?");
  }

  const CheckpointReader& reader_;
  std::vector<VerifyProblem> problems_;
  std::map<std::uint64_t, const Fragment*> by_checksum_;  // filled at the first difference
};

}  // namespace

std::vector<VerifyProblem> verify(const CheckpointReader& reader) {
  return Verification(reader).run();
}

}  // namespace tessera::checkpoint
