// A chunk of the adjoint chain as one kernel: see persistent.h for how blocks share units and rows.
//
// Backward, a block owns the same 16 units of each stage, and of each projection's weight the
// columns that its units of the stage before are.  A step of a stage, from the last one to the
// first, is for each tile of the group:
//   1. what does not depend on other blocks.  A stage's backward is linear in the adjoints of its
//      results, so its factors are computed here, all of exp and tanh, from what was loaded a step
//      before; and what the next step needs is loaded;
//   2. the gradient of the projection behind (of the first stage, a step later, if this is the
//      last), 8 rows of it, comes from the others;
//   3. each of 8 warps multiplies its share of it with the transposed weight, all GEMM blocks of
//      some units, and the parts are added up through shared memory, always in the same order;
//   4. half of the warps apply the factors of a tile to the sum, a unit of a row per thread, send
//      the gradient of this stage's projection, and write what else GEMMs over the whole chunk
//      read.
// Before all steps, the states beside h are computed again, each unit by the thread that needs it.
//
// In 16 bits, where all packets of a row are full, they go through the gradient that GEMMs read,
// and nobody writes it a second time; each step has rows of its own there.  Elsewhere slots are
// memory for the exchange alone, and with flags two of them are enough.  Who writes a gradient of
// step i (counted backwards) has read, of every block that reads this gradient, what that made of
// step i - 1 of it if there is one stage, and so after it had read step i - 2; with two stages,
// what it made of the same step or of i - 1, all of it after step i - 1 of this one.
//
// The gradient of a float is sent rounded to TF32, and GEMMs read all of its bits.  It is stored
// where the pre-activation or the factor has been that it is the gradient of, by the thread that
// has read that: no thread reads what another one has written there, nor writes what it will read.
#pragma once
#include <tuple>

#include "persistent.h"
#include "persistent_backward_step.h"

namespace fusedrnn::cuda {

// What the stages of a block have in common.
template <class T>
struct AdjointBlock : BlockOfGroup<PersistentBackward<T>> {
  using Base = BlockOfGroup<PersistentBackward<T>>;
  using Base::Base, Base::shared, Base::thread;
  int turn = 0;  // of the two buffers of partial sums
  enum Array { kDh, kDstate };

  // A thread reads and writes only its own number of these.
  FUSEDRNN_DEVICE float& kept(int array, int tile) const {
    const int before = 2 * kAdjointSumFloats + kBiasFloats;
    return shared[before + (tile * kKeptArrays + array) * kTileThreads + thread.index];
  }
  enum Bias { kProjectionBias, kSideBias };
  FUSEDRNN_DEVICE float& bias(int stage, Bias which, int gate, int unit) const {
    const int row = (stage * 2 + which) * kMostGates + gate;
    return shared[2 * kAdjointSumFloats + row * kTileUnits + unit];
  }

  FUSEDRNN_DEVICE float* next_turn() {
    if (FUSEDRNN_SEEDED_BUG != 7) turn ^= 1;
    return shared + turn * kAdjointSumFloats;
  }

  // Of stage s in step i, counted backwards: a row of one of its GEMM blocks.
  FUSEDRNN_DEVICE Packet* sent(int s, int i, int row, int gates, int gate, int packets) const {
    return Base::sent(s, i, row, gates * packets) + gate * packets;
  }
};

// The gradient of a projection, that of stage `kIndex`, times the block's columns of its weight.
// kDepth: blocks of units that a warp has room for.
template <class Stage, int kIndex, class T, int kDepth, int kPackets>
class AdjointProduct {
  static constexpr int kGates = Stage::kProjection;
  // GEMM blocks whose packets are on their way at once.
  static constexpr int kAhead = kPackets / kDepth < kGates ? kPackets / kDepth : kGates;
  static_assert(kAhead > 0);
  static constexpr int kChains = kPackets / 2;  // sums that do not wait for each other
  using Of = Operands<T>;

 public:
  FUSEDRNN_DEVICE AdjointProduct(AdjointBlock<T>& block) : block_(block) {
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
  // Asks other blocks for the first gradients of step i, counted backwards; or for none.
  FUSEDRNN_DEVICE Operand ask(bool is_wanted, int i, int tile) const {
    const bool is_asked = is_wanted && args().exchange == Exchange::Packets;
    Operand x{};
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kAhead; ++gate) load(is_asked, i, gate, tile, x.packet[gate]);
    return x;
  }
  // This warp's part of the product to `turn`.  is_wanted: as it was asked.
  FUSEDRNN_DEVICE void multiply(bool is_wanted, int i, int tile, Operand& x, float* turn) const {
    const bool is_asked = is_wanted && args().exchange == Exchange::Packets;
    const bool is_counted = is_wanted && !is_asked;
    if (is_counted) {
      block_.template wait_for_senders<kDepth, Of::kDepthColumns>(kIndex, i, tile, depth_, width_);
      FUSEDRNN_UNROLL
      for (int gate = 0; gate < kAhead; ++gate) load_sent(i, gate, tile, x.packet[gate]);
    }
    float sums[kChains][4] = {};
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      if (is_asked) block_.wait_for(x.packet[gate], from(i, gate, tile));
      sync_warp();  // mma is for lanes that are together, and some may have waited longer
      FUSEDRNN_UNROLL
      for (int d = 0; d < kDepth; ++d) {
        if (d < depth_) multiply(sums, gate, d, x.packet[gate][d]);
      }
      if (gate + kAhead < kGates) {
        load(is_asked, i, gate + kAhead, tile, x.packet[gate + kAhead]);
        if (is_counted) load_sent(i, gate + kAhead, tile, x.packet[gate + kAhead]);
      }
    }
    FUSEDRNN_UNROLL
    for (int n = 0; n < 4; ++n) {
      float sum = sums[0][n];
      FUSEDRNN_UNROLL
      for (int chain = 1; chain < kChains; ++chain) sum += sums[chain][n];
      part(turn, thread().warp, n) = sum;
    }
  }
  // Of the unit that a thread computes.
  FUSEDRNN_DEVICE float total(float* turn) const {
    float sum = 0;
    FUSEDRNN_UNROLL
    for (int w = 0; w < kWarps; ++w) sum += part(turn, w, thread().warp);
    return sum;
  }

 private:
  FUSEDRNN_DEVICE const PersistentBackward<T>& args() const { return block_.args; }
  FUSEDRNN_DEVICE const Thread& thread() const { return block_.thread; }
  // The first of the units that this lane multiplies of its warp's block d, a packet of them.
  FUSEDRNN_DEVICE int unit(int d) const {
    return (thread().warp * depth_ + d) * Of::kDepthColumns + Of::kInPacket * thread().q;
  }
  // Number n of this lane's d, as warp `warp` has summed it up.
  FUSEDRNN_DEVICE float& part(float* turn, int warp, int n) const {
    return turn[(warp * 4 + n) * kWarpSize + thread().lane];
  }
  // A block of units of the weight is read along its rows, by as many lanes of each row as there
  // are for one, and turned in shared memory.
  FUSEDRNN_DEVICE void load_weight(const Matrix<const T>& w, int gate, int d) {
    constexpr int kLanes = kWarpSize / Of::kDepthColumns, kColumns = kTileUnits / kLanes;
    constexpr int kRowWords = kTileUnits / Of::kInWord;
    constexpr int kStagedWords = Of::kDepthColumns * kRowWords;
    static_assert(2 * kAdjointSumFloats >= kWarps * kStagedWords);
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
    if (FUSEDRNN_SEEDED_BUG != 13) sync_warp();
    // Numbers of a column one below the other, as many as are in a word.
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

  // Of a GEMM block, what this lane multiplies.
  FUSEDRNN_DEVICE const Packet* from(int i, int gate, int tile) const {
    return block_.slot(kIndex, i, kGates * packets_of_gate_, from_) +
           (tile * kTileRows * kGates + gate) * packets_of_gate_;
  }
  FUSEDRNN_DEVICE bool has_packet(int tile, int d) const {
    return d < packets_ && tile * kTileRows + thread().g < block_.rows;
  }
  // Packets: or nothing.
  FUSEDRNN_DEVICE void load(bool is_asked, int i, int gate, int tile, Packet (&x)[kDepth]) const {
    const Packet* at = is_asked ? from(i, gate, tile) : from_;
    FUSEDRNN_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      load_relaxed_if(is_asked && has_packet(tile, d), at + 4 * d, x[d]);
    }
  }
  // Flags: what is there.
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

  AdjointBlock<T>& block_;
  int width_, depth_;
  int packets_of_gate_ = 0, packets_ = 0;  // of a row; and of these those that this lane multiplies
  const Packet* from_ = nullptr;           // of its first tile, of step 0
  uint32_t weight_[kGates][kDepth][2][4];
};

// The block's units of a stage.
template <class Stage, int kIndex, int kStages, class T>
class AdjointUnits {
 public:
  static constexpr bool kIsLast = kIndex == kStages - 1;

  FUSEDRNN_DEVICE AdjointUnits(AdjointBlock<T>& block)
      : block_(block), width_(int(block.args.step[kIndex].width)) {}

  FUSEDRNN_DEVICE const PersistentBackward<T>& args() const { return block_.args; }
  FUSEDRNN_DEVICE const BackwardStep<T, T>& step() const { return args().step[kIndex]; }
  FUSEDRNN_DEVICE const Thread& thread() const { return block_.thread; }
  FUSEDRNN_DEVICE bool has_units() const { return block_.first_unit() < width_; }
  FUSEDRNN_DEVICE int unit() const { return block_.first_unit() + thread().unit(); }
  FUSEDRNN_DEVICE int row_of_batch(int tile) const {
    return block_.first_row(tile) + thread().row();
  }
  FUSEDRNN_DEVICE bool is_there(int tile) const {
    return thread().computes() && unit() < width_ && row_of_batch(tile) < args().batch;
  }
  FUSEDRNN_DEVICE RowOfChunk row_of_chunk(int t, int tile) const {
    return block_.row_of_chunk(t, row_of_batch(tile));
  }
  FUSEDRNN_DEVICE Place place(int t, int tile) const { return block_.place(t, row_of_batch(tile)); }
  FUSEDRNN_DEVICE PersistentUnit unit_at(Place at) const {
    return zoneout_of<kIsLast, Stage::kState>(step().zoneout, at, unit());
  }
  // What pre-activations are made of, as it was loaded: to add it up would be to wait for it.
  struct Parts {
    float of[Stage::kPre];
  };
  FUSEDRNN_DEVICE Parts parts_at(const RowOfChunk& row) const {
    Parts parts{};
    const auto& s = step();
    if constexpr (Stage::kLinear) {
      // not there
    } else if constexpr (Stage::kFactors) {
      const int64_t no_shift = 0;
      load_pre<Stage>(parts.of, s, row, no_shift, unit(), PersistentUnit{});
    } else {
      static_assert(Stage::kProjection + kSideAlone<Stage> == Stage::kPre);
      const float* no_bias = nullptr;
      if (s.pre != nullptr) {
        load_blocks<Stage::kPre>(parts.of, s.pre, no_bias, s.width, row, unit(), PersistentUnit{});
      } else {
        load_blocks<Stage::kProjection>(parts.of, s.projection, no_bias, s.width, row, unit(),
                                        PersistentUnit{});
        load_blocks<kSideAlone<Stage>>(parts.of + Stage::kProjection, s.side, no_bias, s.width, row,
                                       unit(), PersistentUnit{});
      }
    }
    return parts;
  }
  FUSEDRNN_DEVICE void pre_of(const Parts& parts, float (&pre)[Stage::kPre]) const {
    if (Stage::kFactors || Stage::kLinear || step().pre != nullptr) {
      FUSEDRNN_UNROLL
      for (int k = 0; k < Stage::kPre; ++k) pre[k] = parts.of[k];
      return;
    }
    if constexpr (!Stage::kFactors && !Stage::kLinear) {
      float side[Stage::kSide], projection[Stage::kProjection];
      FUSEDRNN_UNROLL
      for (int k = 0; k < Stage::kProjection; ++k) {
        projection[k] =
            parts.of[k] + block_.bias(kIndex, Block::kProjectionBias, k, thread().unit());
      }
      FUSEDRNN_UNROLL
      for (int k = 0; k < Stage::kSide; ++k) {
        side[k] = block_.bias(kIndex, Block::kSideBias, k, thread().unit());
        if (k >= Stage::kShared) side[k] += parts.of[Stage::kProjection + k - Stage::kShared];
      }
      Stage::combine(side, projection, pre);
    }
  }
  // Before a barrier, and read after it.
  FUSEDRNN_DEVICE void load_biases() const {
    load_bias(Block::kProjectionBias, step().projection_bias, Stage::kProjection);
    load_bias(Block::kSideBias, step().side_bias, Stage::kSide);
  }

 protected:
  using Block = AdjointBlock<T>;
  AdjointBlock<T>& block_;
  int width_;

 private:
  FUSEDRNN_DEVICE void load_bias(typename Block::Bias which, const float* bias, int gates) const {
    for (int i = thread().index; i < gates * kTileUnits; i += kPersistentThreads) {
      const int gate = i / kTileUnits, in_block = i % kTileUnits;
      const int of_all = block_.first_unit() + in_block;
      block_.bias(kIndex, which, gate, in_block) =
          bias != nullptr && of_all < width_ ? bias[gate * width_ + of_all] : 0.0f;
    }
  }
};

// The states beside h, each from the one before, and what the stage behind has projected.
template <class Stage, int kIndex, int kStages, class T>
class StateUnits : AdjointUnits<Stage, kIndex, kStages, T> {
  using Units = AdjointUnits<Stage, kIndex, kStages, T>;
  using Units::args, Units::block_, Units::step, Units::width_;

 public:
  using Units::Units;

  FUSEDRNN_DEVICE void run() const {
    for (int tile = 0; block_.has_tile(tile); ++tile) {
      if (Units::is_there(tile)) run(tile);
    }
  }

 private:
  static constexpr int kAhead = 4;

  FUSEDRNN_DEVICE void run(int tile) const {
    const int steps = args().operand != nullptr ? args().steps : args().steps - 1;
    ForwardStep<T, T> forward{};  // what forward_from_pre reads of it; h stands in the output
    forward.zoneout = step().zoneout;
    const bool is_plain =
        args().operand == nullptr && !step().mask.any() && !forward.zoneout.state.is_possible();
    const RowOfChunk row = Units::row_of_chunk(0, tile);
    float state = args().first_state[Units::row_of_batch(tile) * width_ + Units::unit()];
    args().state[row * width_ + Units::unit()] = state;
    // Some steps' pre-activations are on their way while others are computed with.
    typename Units::Parts next[kAhead];
    FUSEDRNN_UNROLL
    for (int k = 0; k < kAhead; ++k) next[k] = load(k, tile, steps);
    for (int first = 0; first < steps; first += kAhead) {
      float pre[kAhead][Stage::kPre];
      FUSEDRNN_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        Units::pre_of(next[k], pre[k]);
        next[k] = load(first + kAhead + k, tile, steps);
      }
      if (is_plain && first + kAhead <= steps) {  // gates of several steps at the same time
        FUSEDRNN_UNROLL
        for (int k = 0; k < kAhead; ++k) {
          float no_factors[Stage::kPre];
          Stage::forward(pre[k], state, no_factors, &state);
          args().state[Units::row_of_chunk(first + k + 1, tile) * width_ + Units::unit()] = state;
        }
        continue;
      }
      FUSEDRNN_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        if (first + k < steps) state = after(first + k, tile, forward, pre[k], state);
      }
    }
  }

  FUSEDRNN_DEVICE typename Units::Parts load(int t, int tile, int steps) const {
    if (t >= steps) return {};
    return Units::parts_at(Units::row_of_chunk(t, tile));
  }

  // The state after step t.
  FUSEDRNN_DEVICE float after(int t, int tile, const ForwardStep<T, T>& forward,
                              const float (&pre)[Stage::kPre], float state) const {
    const Place at = Units::place(t, tile);
    float operand = 0;
    if (step().mask.is_active(at)) {
      float factors[Stage::kPre];
      UnitInput<float> given{};
      given.input = state;
      given.is_reset_next = step().mask.is_reset_next(at);
      const UnitResult<float> result = forward_from_pre<Stage>(
          forward, at, Units::unit(), Units::unit_at(at), pre, given, factors);
      state = result.carry;
      operand = result.next;
    }
    if (t + 1 < args().steps) {
      args().state[Units::row_of_chunk(t + 1, tile) * width_ + Units::unit()] = state;
    }
    if (args().operand != nullptr) {
      const RowOfChunk row = Units::row_of_chunk(t, tile);
      args().operand[row * width_ + Units::unit()] = narrow<T>(operand);
    }
    return state;
  }
};

// Stage `kIndex` of `kStages`, and the projection that reads its result: that of the stage Behind.
template <class Stage, class Behind, int kIndex, int kStages, class T, int kDepth, int kPackets>
class AdjointStage : AdjointUnits<Stage, kIndex, kStages, T> {
  using Units = AdjointUnits<Stage, kIndex, kStages, T>;
  using typename Units::Block;
  using Units::args, Units::block_, Units::step, Units::thread, Units::unit, Units::width_;
  using Units::kIsLast;
  static constexpr int kGates = Stage::kProjection;
  // Whether weights leave registers for what the next step needs.
  static constexpr bool kLoadsAhead = kPackets > 4;
  static_assert(!kCarriesResult<Stage> || kIsLast);

 public:
  FUSEDRNN_DEVICE AdjointStage(Block& block) : Units(block), product_(block) {
    for (int tile = 0; block.has_tile(tile); ++tile) {
      if (!Units::is_there(tile)) continue;
      const int at = Units::row_of_batch(tile) * width_ + unit();
      if constexpr (kIsLast) block.kept(Block::kDh, tile) = step().dout[at];
      if constexpr (Stage::kState) block.kept(Block::kDstate, tile) = step().dcarry[at];
    }
    if (kLoadsAhead && Units::has_units()) next_ = load(args().steps - 1, 0);
  }

  // Step t of the group's rows; -1: dh and the state's adjoint before the chunk.
  FUSEDRNN_DEVICE void run(int t) {
    if (!Units::has_units()) return;
    const bool ends = t < 0, has_product = this->has_product(t);
    for (int tile = 0; block_.has_tile(tile); ++tile) {
      const Early early = before_exchange(t, tile, kLoadsAhead ? next_ : load(t, tile));
      if constexpr (kLoadsAhead) {
        const bool has_more = block_.has_tile(tile + 1);
        next_ = load(has_more ? t : t - 1, has_more ? tile + 1 : 0);
      }
      typename Product::Operand x = product_.ask(has_product, source_step(t), tile);
      float* turn = block_.next_turn();
      product_.multiply(has_product, source_step(t), tile, x, turn);
      if (FUSEDRNN_SEEDED_BUG != 1) sync_block();
      if (!thread().computes()) continue;
      const float sum = has_product ? product_.total(turn) : 0.0f;
      if (ends) {
        finish(tile, sum);
      } else {
        compute(t, tile, early, sum);
      }
    }
  }

 private:
  // The first time there is nothing yet, and what would come in the end may not be wanted.
  FUSEDRNN_DEVICE bool has_product(int t) const {
    if (!kIsLast) return t >= 0;
    return t < args().steps - 1 && t >= (args().wants_dh ? -1 : 0);
  }
  // Of the gradients that step t multiplies; counted backwards.
  FUSEDRNN_DEVICE int source_step(int t) const { return args().steps - 1 - t - (kIsLast ? 1 : 0); }

  // What a unit needs of memory, as it was loaded: to compute with it would be to wait for it.
  struct Loaded {
    bool is_there : 1, is_active : 1, is_reset_next : 1;  // in one register
    typename Units::Parts parts;
    std::conditional_t<Stage::kState, float, T> carry;
    T grad_output;
  };

  FUSEDRNN_DEVICE Loaded load(int t, int tile) const {
    Loaded loaded{};
    loaded.is_there = t >= 0 && Units::is_there(tile);
    if (!loaded.is_there) return loaded;
    const auto& s = step();
    const RowOfChunk row = Units::row_of_chunk(t, tile);
    const Place at = Units::place(t, tile);
    loaded.is_active = s.mask.is_active(at);
    if (!loaded.is_active) return loaded;
    if constexpr (Stage::kResult) loaded.is_reset_next = s.mask.is_reset_next(at);
    loaded.parts = Units::parts_at(row);
    if constexpr (Stage::kState) {
      loaded.carry = args().state[row * width_ + unit()];
    } else if constexpr (Stage::kCarry) {
      const bool is_first = t == 0 && args().first_carry.data != nullptr;
      const T* h =
          is_first ? args().first_carry.at(Units::row_of_batch(tile)) : s.carry.at(int64_t(row));
      loaded.carry = h[unit()];
    }
    if constexpr (kIsLast) {
      if (s.grad_output.data != nullptr) {
        loaded.grad_output = s.grad_output.at(int64_t(row))[unit()];
      }
    }
    return loaded;
  }

  // What a unit needs that is known before the exchange.  of_state: with the state's adjoint 1
  // instead of the result's.
  struct Early {
    bool is_there : 1, is_active : 1, is_reset_next : 1;
    bool keeps_h : 1, keeps_state : 1;  // by zoneout, instead of what is new
    float grad_output;
    UnitAdjoints<Stage, float> of_result, of_state;
  };

  FUSEDRNN_DEVICE Early before_exchange(int t, int tile, const Loaded& loaded) const {
    Early early{};
    early.is_there = loaded.is_there;
    early.is_active = loaded.is_active;
    if (!early.is_active) return early;
    const auto& s = step();
    const Place at = Units::place(t, tile);
    early.is_reset_next = loaded.is_reset_next;
    early.grad_output = widen(loaded.grad_output);
    float pre[Stage::kPre] = {};
    Units::pre_of(loaded.parts, pre);
    const float carry = widen(loaded.carry);
    const PersistentUnit u = Units::unit_at(at);
    early.keeps_h = u.kept_h == 1.0f && s.zoneout.h.rest == 0;
    early.keeps_state = u.kept_state == 1.0f && s.zoneout.state.rest == 0;
    early.of_result = backward_from_pre<Stage>(s, at, unit(), u, pre, carry, 1.0f, 0.0f);
    if constexpr (Stage::kState) {
      early.of_state = backward_from_pre<Stage>(s, at, unit(), u, pre, carry, 0.0f, 1.0f);
    }
    return early;
  }

  // sum: what the projection behind gives of the result's adjoint
  FUSEDRNN_DEVICE void compute(int t, int tile, const Early& early, float sum) const {
    float dout = sum, dstate = 0;
    if constexpr (kIsLast) dout += block_.kept(Block::kDh, tile);
    if constexpr (Stage::kState) dstate = block_.kept(Block::kDstate, tile);
    UnitAdjoints<Stage, float> d{};
    if (early.is_active) {
      if constexpr (Stage::kResult) {
        if (early.is_reset_next) {
          dstate = 0;
          if (kIsLast) dout = 0;
        }
      }
      dout += early.grad_output;
      d = apply(early, dout, dstate);
    }
    send(args().steps - 1 - t, tile, d.dprojection);
    if (!early.is_there) return;
    if constexpr (kIsLast) {  // the projection of the first stage adds the rest
      const float dh = kCarriesResult<Stage> ? d.dinput : d.dh;
      block_.kept(Block::kDh, tile) = early.is_active ? dh : dout;
    }
    if constexpr (Stage::kState) {
      block_.kept(Block::kDstate, tile) = early.is_active ? d.dinput : dstate;
    }
    const int64_t no_shift = 0;
    store_backward<Stage>(step(), Units::row_of_chunk(t, tile), no_shift, unit(), PersistentUnit{},
                          d);
  }

  FUSEDRNN_DEVICE void finish(int tile, float sum) const {
    if (!Units::is_there(tile)) return;
    const int at = Units::row_of_batch(tile) * width_ + unit();
    if constexpr (kIsLast) step().dout[at] = block_.kept(Block::kDh, tile) + sum;
    if constexpr (Stage::kState) step().dcarry[at] = block_.kept(Block::kDstate, tile);
  }

  FUSEDRNN_DEVICE static float apply(float of_result, float of_state, float dout, float dstate) {
    if constexpr (Stage::kState) return of_result * dout + of_state * dstate;
    return of_result * dout;
  }
  FUSEDRNN_DEVICE static UnitAdjoints<Stage, float> apply(const Early& early, float dout,
                                                          float dstate) {
    const auto &r = early.of_result, &s = early.of_state;
    // Of what is kept, what is new has the factor 0, and no gradient even if the adjoint is NaN.
    const float dnew = early.keeps_h ? 0.0f : dout, dnew_state = early.keeps_state ? 0.0f : dstate;
    UnitAdjoints<Stage, float> d{};
    FUSEDRNN_UNROLL
    for (int k = 0; k < kSideAlone<Stage>; ++k) {
      d.dside[k] = apply(r.dside[k], s.dside[k], dnew, dnew_state);
    }
    FUSEDRNN_UNROLL
    for (int k = 0; k < kGates; ++k) {
      d.dprojection[k] = apply(r.dprojection[k], s.dprojection[k], dnew, dnew_state);
    }
    d.dinput = apply(r.dinput, s.dinput, dnew, dnew_state);
    d.dh = early.keeps_h ? dout : apply(r.dh, s.dh, dout, dstate);
    if (kCarriesResult<Stage> && early.keeps_h) d.dinput = dout;
    if (Stage::kState && early.keeps_state) d.dinput += dstate;
    return d;
  }

  FUSEDRNN_DEVICE void send(int i, int tile, const float (&dprojection)[kGates]) const {
    if (FUSEDRNN_SEEDED_BUG == 8) return;
    constexpr int kInPacket = Operands<T>::kInPacket;
    const int row = Units::row_of_batch(tile);
    const bool sends = thread().g % kInPacket == 0 && unit() < width_ && row < args().batch;
    FUSEDRNN_UNROLL
    for (int gate = 0; gate < kGates; ++gate) {
      const Packet packet = pack_neighbours(narrow<T>(dprojection[gate]));
      if (!sends) continue;
      block_.store(block_.sent(kIndex, i, row, kGates, gate, packets_of(width_, kInPacket)) +
                       unit() / kInPacket,
                   packet);
    }
    block_.count_sent(kIndex, i, tile);
  }

  using Product = AdjointProduct<Behind, (kIndex + 1) % kStages, T, kDepth, kPackets>;
  Product product_;
  Loaded next_{};  // of the tile that is next
};

// The stages of a cell up to `kIndex`, from the last one on.
template <class T, int kDepth, int kIndex, class... Stages>
struct AdjointStages {
  static constexpr int kStages = sizeof...(Stages);
  using All = std::tuple<Stages...>;
  using Stage = std::tuple_element_t<kIndex, All>;
  using Behind = std::tuple_element_t<(kIndex + 1) % kStages, All>;
  static constexpr int kPackets = packets_ahead(8 * kDepth * (Stages::kProjection + ...));
  AdjointStage<Stage, Behind, kIndex, kStages, T, kDepth, kPackets> stage;
  AdjointStages<T, kDepth, kIndex - 1, Stages...> before;

  FUSEDRNN_DEVICE AdjointStages(AdjointBlock<T>& block) : stage(block), before(block) {}
  FUSEDRNN_DEVICE static void load_biases(AdjointBlock<T>& block) {
    AdjointUnits<Stage, kIndex, kStages, T>(block).load_biases();
    decltype(before)::load_biases(block);
  }
  FUSEDRNN_DEVICE static void rebuild_states(AdjointBlock<T>& block) {
    if constexpr (Stage::kState) StateUnits<Stage, kIndex, kStages, T>(block).run();
    decltype(before)::rebuild_states(block);
  }
  FUSEDRNN_DEVICE void run(int t) {
    stage.run(t);
    before.run(t);
  }
};
template <class T, int kDepth, class... Stages>
struct AdjointStages<T, kDepth, -1, Stages...> {
  FUSEDRNN_DEVICE AdjointStages(AdjointBlock<T>&) {}
  FUSEDRNN_DEVICE static void load_biases(AdjointBlock<T>&) {}
  FUSEDRNN_DEVICE static void rebuild_states(AdjointBlock<T>&) {}
  FUSEDRNN_DEVICE void run(int) {}
};

// The kernel.  A grid of groups * blocks, kPersistentThreads each, all of them there at once.
template <class T, int kDepth, class... Stages>
FUSEDRNN_DEVICE void persistent_backward(StageList<Stages...>, const PersistentBackward<T>& args,
                                         unsigned char* shared) {
  static_assert(sizeof...(Stages) <= 2, "two slots may not be enough");
  if (FUSEDRNN_SEEDED_BUG == 5 && thread_index() / kWarpSize == kWarps - 1) return;
  using All = AdjointStages<T, kDepth, int(sizeof...(Stages)) - 1, Stages...>;
  AdjointBlock<T> block(args, shared);
  All::load_biases(block);
  sync_block();
  All::rebuild_states(block);
  All stages(block);
  if (FUSEDRNN_SEEDED_BUG != 12)
    sync_block();  // weights have been turned where sums are going to be
  for (int t = args.steps - 1; t >= -1; --t) stages.run(t);
  end(args);
}

}  // namespace fusedrnn::cuda
