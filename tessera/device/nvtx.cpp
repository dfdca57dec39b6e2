#include "tessera/device/nvtx.h"

#include <nvtx3/nvToolsExt.h>

#include <string>

namespace tessera::device {
namespace {

// Null without a tool. It lives as long as the program: ranges may end at any time.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("tessera");
  return handle;
}

void begin_range(const Spans& spans, const char* name, const SpanArgs& args) {
  std::string text = name;
  const LabelId about = args.unit != 0 ? args.unit : args.parameter;
  if (about != 0) {
    text += ' ' + spans.label(about);
  }
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = text.c_str();  // the tool copies it
  if (args.bytes >= 0) {
    attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
    attributes.payload.llValue = args.bytes;
  }
  nvtxDomainRangePushEx(domain(), &attributes);
}

void end_range() { nvtxDomainRangePop(domain()); }

constexpr SpanHook kRanges{begin_range, end_range};

}  // namespace

bool install_nvtx(Spans& spans) {
  if (domain() == nullptr) {
    return false;
  }
  spans.set_hook(&kRanges);
  return true;
}

}  // namespace tessera::device
