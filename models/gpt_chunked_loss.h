// The head's product and the cross entropy, a chunk of tokens at a time: logits of all tokens never
// exist, neither in forward nor in backward.
//
// Gradients of the mean loss are made in forward, while a chunk's logits are there, in fp32;
// backward multiplies them by the gradient of the loss and rounds them. So no product is made
// twice, and neither the logits nor what they are made of is kept. Not so
//   where forward runs without gradients, as in evaluation
//   in fp16, where gradients need the factor of the loss before they are rounded, and in low
//   precision on a CPU, which has no product with sums of another type. There backward makes
//   a chunk's logits once more
//
// With V = vocabulary, W = width, N = tokens, C = tokens per chunk and e = bytes of an element, the
// whole computation keeps 4NV bytes from forward to backward and holds 12NV in backward. This one
// holds at most
//   forward    (e + 4) CV, and 4CV more where logits are of low precision and the softmax does not
//              read them as they are, beside `hidden`
//              and the gradients, 4NW + 4VW, which are kept
//   backward   these, and its results: eNW + eVW
// and where backward makes them
//   forward    the same without gradients; `hidden` and the targets are kept
//   backward   the same, its results, and in low precision with several chunks 4VW for the weight's
//
// The numbers are those of the whole: logits are rounded to the type of `hidden`, everything from
// there to the gradient of the logits is fp32 (fp64 for fp64), and that gradient is rounded once.
// A row's loss and gradients do not depend on the chunk it is in, but for what the matrix product
// makes of another number of rows. The weight's gradient is summed over chunks in fp32 and rounded
// once.
//
// Does not wait for a device.
//
// Threads: stateless.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tessera::models {

// hidden [tokens, width], weight [vocabulary, width], targets [tokens] int64, all of them counted.
// Returns the mean over tokens of the cross entropy of hidden * weight^T, fp32. `chunk`: tokens at
// a time, at least 1; more than there are means all at once. Gradients are made for those of hidden
// and weight that need one.
at::Tensor chunked_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                 const at::Tensor& targets, std::int64_t chunk);

}  // namespace tessera::models
