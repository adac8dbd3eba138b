// Loads operands of products from the user's own memory.
#pragma once
#include "exchange.h"

namespace fusedrnn::cuda {

// A packet of the user's memory as an operand, with zeros from number `count` on.  kInTurn: loads
// the numbers of an incomplete packet one by one, where there are no registers for all at once.
template <bool kInTurn = false, class T>
FUSEDRNN_DEVICE Packet load_operand(const T* p, int64_t stride, int count) {
  using Of = Operands<T>;
  Packet packet{};
  if (stride == 1 && count >= Of::kInPacket && reinterpret_cast<uintptr_t>(p) % 16 == 0) {
    packet = load_plain(reinterpret_cast<const Packet*>(p));
    if constexpr (Of::kRounds) {
      FUSEDRNN_UNROLL
      for (int i = 0; i < 4; ++i) {
        packet.word[i] = Of::bits(Traits<float>::from_bits(packet.word[i]));
      }
    }
    return packet;
  }
  if constexpr (kInTurn) {
    FUSEDRNN_IN_TURN
    for (int i = Of::kInPacket - 1; i >= 0; --i) {  // each shifts the later ones up by one place
      constexpr int left = 32 / Of::kInWord % 32, right = 32 - 32 / Of::kInWord;
      FUSEDRNN_UNROLL
      for (int w = 3; w >= 0; --w) {
        const uint32_t carried = w > 0 ? packet.word[w - 1] >> right : 0;
        packet.word[w] = (left > 0 ? packet.word[w] << left : 0) | carried;
      }
      if (i < count) packet.word[0] |= Of::bits(p[i * stride]);
    }
    return packet;
  }
  FUSEDRNN_UNROLL
  for (int i = 0; i < Of::kInPacket; ++i) {
    const int shift = 16 * (i % Of::kInWord);
    if (i < count) packet.word[i / Of::kInWord] |= Of::bits(p[i * stride]) << shift;
  }
  return packet;
}

}  // namespace fusedrnn::cuda
