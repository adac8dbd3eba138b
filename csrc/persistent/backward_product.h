// The product in a step of backward: a gradient times the transpose of a weight in registers.
#pragma once
#include "backward_arguments.h"
#include "operand.h"
#include "shared_memory.h"

namespace fusedrnn::cuda {

// What the stages of a block share.
template <class T>
struct BackwardBlock : SharedMemory<PersistentBackward<T>, kBackwardSumFloats> {
  using Base = SharedMemory<PersistentBackward<T>, kBackwardSumFloats>;
  using Base::Base;
  enum Array { kDh, kDc };

  // Where stage s sends one GEMM block of a row in step i, counted backwards.
  FUSEDRNN_DEVICE Packet* sent(int s, int i, int row, int gates, int gate, int packets) const {
    return Base::sent(s, i, row, gates * packets) + gate * packets;
  }
};

// The gradient of the hidden gates of stage `kIndex`, times the block's columns of its weight.
// kDepth: the number of blocks of units for which a warp has registers.
template <class Stage, int kIndex, class T, int kDepth, int kPackets>
class BackwardProduct {
  static constexpr int kGates = Stage::kHiddenGates;
  // The number of GEMM blocks whose packets are loaded at once.
  static constexpr int kAhead = kPackets / kDepth < kGates ? kPackets / kDepth : kGates;
  static_assert(kAhead > 0);
  static constexpr int kChains =
      kPackets / 2;  // independent sums, which need not wait for each other
  using Of = Operands<T>;

 public:
  FUSEDRNN_DEVICE BackwardProduct(BackwardBlock<T>& block) : block_(block) {
    const auto& w = args().weight[kIndex];
    width_ = int(args().step[kIndex].width);
    depth_ = warp_depth(width_, Of::kDepthColumns);
    if (block.first_unit() >= w.columns) return;
    packets_of_gate_ = packets_of(width_, Of::kInPacket);
    from_ = block.sent(kIndex, 0, block.first_row(0) + thread().g, kGates, 0, packets_of_gate_) +
            unit(0) / Of::kInPacket;
    for (int d = 0; d < depth_; ++d) packets_ += unit(d) < width_;
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      FUSEDRNN_UNROLL
      for (int d = 0; d < kDepth; ++d) load_weight(w, gate, d);
    }
  }

  struct Operand {
    Packet packet[kGates][kDepth];
  };
  // Starts to load the first gradients of step i (counted backwards) that other blocks send, if
  // is_wanted.
  FUSEDRNN_DEVICE Operand ask(bool is_wanted, int i, int tile) const {
    const bool is_asked = is_wanted && args().exchange == Exchange::Packets;
    Operand x{};
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kAhead; ++gate) load(is_asked, i, gate, tile, x.packet[gate]);
    return x;
  }
  // Writes this warp's part of the product to `turn`.  is_wanted: as in ask().  reader: the stage
  // that reads the product.
  FUSEDRNN_DEVICE void multiply(bool is_wanted, int i, int tile, Operand& x, float* turn,
                                int reader) const {
    const bool is_asked = is_wanted && args().exchange == Exchange::Packets;
    const bool is_counted = is_wanted && !is_asked;
    if (is_counted) {
      block_.template wait_for_senders<kDepth, Of::kDepthColumns>(kIndex, i, tile, depth_, width_);
      FUSEDRNN_UNROLL
      for (int gate = 0; gate < kAhead; ++gate) load_sent(i, gate, tile, x.packet[gate]);
    }
    float sums[kChains][4] = {};
    uint32_t questions = 1;
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      if (is_asked) questions += block_.wait_for(x.packet[gate], from(i, gate, tile));
      if (gate == kGates - 1) block_.clock.at(reader, Point::Arrival);
      sync_warp();  // mma is for lanes that are together, and some may have waited longer
      FUSEDRNN_UNROLL
      for (int d = 0; d < kDepth; ++d) {
        if (d < depth_) multiply(sums, gate, d, x.packet[gate][d]);
      }
      if (gate + kAhead < kGates) {
        ++questions;
        load(is_asked, i, gate + kAhead, tile, x.packet[gate + kAhead]);
        if (is_counted) load_sent(i, gate + kAhead, tile, x.packet[gate + kAhead]);
      }
    }
    if (is_asked) block_.clock.asked(reader, questions);
    FUSEDRNN_UNROLL
    for (int n = 0; n < 4; ++n) {
      float sum = sums[0][n];
      FUSEDRNN_UNROLL
      for (int chain = 1; chain < kChains; ++chain) sum += sums[chain][n];
      part(turn, thread().warp, n) = sum;
    }
  }
  // The whole product for the unit that this thread computes.
  FUSEDRNN_DEVICE float total(float* turn) const {
    float sum = 0;
    FUSEDRNN_UNROLL
    for (int w = 0; w < kWarps; ++w) sum += part(turn, w, thread().warp);
    return sum;
  }

 private:
  FUSEDRNN_DEVICE const PersistentBackward<T>& args() const { return block_.args; }
  FUSEDRNN_DEVICE const Thread& thread() const { return block_.thread; }
  // The first of the units that this lane multiplies in block d of its warp; a packet holds them.
  FUSEDRNN_DEVICE int unit(int d) const {
    return (thread().warp * depth_ + d) * Of::kDepthColumns + Of::kInPacket * thread().q;
  }
  // Number n of this lane's fragment d (see mma), as summed by warp `warp`.
  FUSEDRNN_DEVICE float& part(float* turn, int warp, int n) const {
    return turn[(warp * 4 + n) * kWarpSize + thread().lane];
  }
  // Reads a block of units of the weight along its rows, each row by as many lanes as a warp has
  // for it, and transposes it in shared memory.
  FUSEDRNN_DEVICE void load_weight(const Matrix<const T>& w, int gate, int d) {
    constexpr int kLanes = kWarpSize / Of::kDepthColumns, kColumns = kTileUnits / kLanes;
    constexpr int kRowWords = kTileUnits / Of::kInWord;
    constexpr int kStagedWords = Of::kDepthColumns * kRowWords;
    static_assert(2 * kBackwardSumFloats >= kWarps * kStagedWords);
    auto* staged = reinterpret_cast<uint32_t*>(block_.shared) + thread().warp * kStagedWords;
    const int in_block = thread().lane / kLanes, first = thread().lane % kLanes * kColumns;
    const int k = (thread().warp * depth_ + d) * Of::kDepthColumns + in_block;
    const int column = block_.first_unit() + first;
    const int count = d < depth_ && k < width_ ? int(w.columns) - column : 0;
    const T* row = w.data + (int64_t(gate) * width_ + k) * w.row_stride + column * w.column_stride;
    FUSEDRNN_UNROLL
    for (int i = 0; i < kColumns; i += Of::kInPacket) {
      const Packet packet = load_operand(row + i * w.column_stride, w.column_stride, count - i);
      FUSEDRNN_UNROLL
      for (int j = 0; j < 4; ++j) {
        staged[in_block * kRowWords + (first + i) / Of::kInWord + j] = packet.word[j];
      }
    }
    sync_warp();
    // A word of numbers from one column, next rows in the higher bits.
    const auto at = [&](int k, int column) {
      if constexpr (Of::kInWord == 1) return staged[k * kRowWords + column];
      const uint32_t* word = staged + k * kRowWords + column / 2;
      const int shift = 16 * (column % 2);
      return ((word[0] >> shift) & 0xffffu) | word[kRowWords] >> shift << 16;
    };
    FUSEDRNN_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int column = thread().g + 8 * (i % 2);
      weight_[gate][d][i / 4][i % 4] =
          at(Of::kInPacket * thread().q + Of::kInWord * (i / 2), column);
    }
    sync_warp();
  }

  // The packets of a GEMM block that this lane multiplies.
  FUSEDRNN_DEVICE const Packet* from(int i, int gate, int tile) const {
    return block_.slot(kIndex, i, kGates * packets_of_gate_, from_) +
           (tile * kTileRows * kGates + gate) * packets_of_gate_;
  }
  FUSEDRNN_DEVICE bool has_packet(int tile, int d) const {
    return d < packets_ && tile * kTileRows + thread().g < block_.rows;
  }
  // Packets: loads if is_asked, without a branch.
  FUSEDRNN_DEVICE void load(bool is_asked, int i, int gate, int tile, Packet (&x)[kDepth]) const {
    const Packet* at = is_asked ? from(i, gate, tile) : from_;
    FUSEDRNN_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      load_relaxed_if(is_asked && has_packet(tile, d), at + 4 * d, x[d]);
    }
  }
  // Flags: loads what has been sent.
  FUSEDRNN_DEVICE void load_sent(int i, int gate, int tile, Packet (&x)[kDepth]) const {
    FUSEDRNN_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      if (has_packet(tile, d)) x[d] = load_plain(from(i, gate, tile) + 4 * d);
    }
  }

  FUSEDRNN_DEVICE void multiply(float (&sums)[kChains][4], int gate, int d, const Packet& x) const {
    FUSEDRNN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int chain = (2 * (gate * kDepth + d) + half) % kChains;
      mma<T>(sums[chain], weight_[gate][d][half], x.word[2 * half], x.word[2 * half + 1]);
    }
  }

  BackwardBlock<T>& block_;
  int width_, depth_;
  int packets_of_gate_ = 0,
      packets_ = 0;               // of a row of one gate; and how many of them this lane multiplies
  const Packet* from_ = nullptr;  // where they start in the first tile and step 0
  uint32_t weight_[kGates][kDepth][2][4];
};

}  // namespace fusedrnn::cuda
