// The storage types of tensors, the type that each is computed in, and conversions between them.
// Independent of torch, so that kernels and their emulation compile without it.
#pragma once
#include <cstdint>
#include <type_traits>

#include "hd.h"
#include "math.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace fusedrnn {

// The conversions of the 16-bit types are written once for one number and for a vector: F is float
// or, on the CPU, a vector of floats, and the 16 bits are in the low half of each word. narrow()
// rounds to nearest even, and every NaN becomes 0x7fff.  No step does arithmetic on denormal
// floats, so results are right also where the processor flushes those to 0.
template <class F>
using Words = typename Traits<F>::UInt;

// bfloat16 as stored in a tensor: the upper half of a float.
struct BFloat16 {
  uint16_t bits;

  template <class F>
  static FUSEDRNN_HD F widen(Words<F> word) {
    return Traits<F>::from_bits(word << 16);
  }

  template <class F>
  static FUSEDRNN_HD Words<F> narrow(F x) {
#if defined(__CUDA_ARCH__)
    return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
    const Words<F> wide = Traits<F>::bits(x);
    const Words<F> rounded = wide + 0x7fffu + ((wide >> 16) & 1u);
    return math::select(x == x, rounded, Words<F>{} + 0x7fff0000u) >> 16;
#endif
  }
};

// float16 as stored in a tensor: 5 bits of exponent, 10 of fraction.
struct Half {
  uint16_t bits;

  template <class F>
  static FUSEDRNN_HD F widen(Words<F> word) {
#if defined(__CUDA_ARCH__)
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word)));
#else
    using Float = Traits<F>;
    const Words<F> places = (word & 0x7fffu) << 13;  // exponent and fraction at a float's bits
    const Words<F> exponent = places & (31u << 23);
    // The exponent is biased by 15, a float's by 127; inf and NaN have the largest exponent in
    // both. A denormal has no leading 1, but a float does: 2^-14 is added and subtracted for it.
    const Words<F> shift =
        math::select(exponent == (31u << 23), Words<F>{} + (224u << 23), Words<F>{} + (112u << 23));
    const F denormal = Float::from_bits(places + (113u << 23)) - 0x1p-14f;
    const Words<F> wide = math::select(exponent == 0u, Float::bits(denormal), places + shift);
    return Float::from_bits(wide | ((word & 0x8000u) << 16));
#endif
  }

  template <class F>
  static FUSEDRNN_HD Words<F> narrow(F x) {
#if defined(__CUDA_ARCH__)
    return __half_as_ushort(__float2half_rn(x));
#else
    using Float = Traits<F>;
    const Words<F> sign = Float::bits(x) & 0x80000000u;
    const F size = math::min(Float::from_bits(Float::bits(x) ^ sign), 0x1p16f);  // 2^16 is inf
    // The power of two at or below `size`; denormals have the spacing of the smallest normal
    // halves. Floats 2^13 times as large have the spacing that halves have at `size`, so adding one
    // of them rounds, and the last bits of the sum count units of that spacing, including the
    // leading 1.
    const Words<F> power = Float::bits(math::max(size, 0x1p-14f)) & 0x7f800000u;
    const Words<F> large = power + (13u << 23);
    const Words<F> count = Float::bits(size + Float::from_bits(large)) - large;
    const Words<F> word = (((power - (113u << 23)) >> 13) + count) | (sign >> 16);
    return math::select(x == x, word, Words<F>{} + 0x7fffu);
#endif
  }
};

// Accumulation type: the type of carry, gates, pre-activations, their gradients, and the gradients
// of weights while they are summed.
template <class T>
struct AccumulateIn {
  using type = T;
};
template <>
struct AccumulateIn<BFloat16> {
  using type = float;
};
template <>
struct AccumulateIn<Half> {
  using type = float;
};
template <class T>
using Acc = typename AccumulateIn<T>::type;

template <class T>
FUSEDRNN_HD Acc<T> widen(T value) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return value;
  } else {
    return T::template widen<Acc<T>>(value.bits);
  }
}

template <class T>
FUSEDRNN_HD T narrow(Acc<T> value) {
  if constexpr (std::is_same_v<T, Acc<T>>) {
    return value;
  } else {
    return T{static_cast<uint16_t>(T::narrow(value))};
  }
}

}  // namespace fusedrnn
