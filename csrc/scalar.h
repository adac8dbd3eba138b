// The storage types of tensors and the type that each is computed in.  torch-free, so that kernels
// and their emulation compile without torch.
#pragma once
#include <cstdint>
#include <cstring>

#include "hd.h"

namespace fusedrnn {

// bfloat16 as stored in a tensor: the upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

// Accumulation type: carry, gates, pre-activations, adjoints and weight gradients are kept in it.
template <class T>
struct AccumulateIn {
  using type = T;
};
template <>
struct AccumulateIn<BFloat16> {
  using type = float;
};
template <class T>
using Acc = typename AccumulateIn<T>::type;

FUSEDRNN_HD float widen(BFloat16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}
FUSEDRNN_HD float widen(float value) { return value; }
FUSEDRNN_HD double widen(double value) { return value; }

}  // namespace fusedrnn
