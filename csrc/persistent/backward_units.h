// The units of a block in backward, and the cell states that it recomputes for them.
#pragma once
#include "backward_product.h"
#include "ring.h"
#include "unit.h"

namespace fusedrnn::cuda {

// The block's units of a stage.
template <class Stage, int kIndex, int kStages, class T>
class BackwardUnits {
 public:
  static constexpr bool kIsLast = kIndex == kStages - 1;

  FUSEDRNN_DEVICE BackwardUnits(BackwardBlock<T>& block)
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
    return zoneout_of<kIsLast, Stage::kCellState>(step().zoneout, at, unit());
  }
  // The parts of pre-activations as they were loaded.  They are not added up yet: the sum would
  // wait for the loads.
  struct Parts {
    float of[Stage::kPre];
  };
  FUSEDRNN_DEVICE Parts parts_at(const RowOfChunk& row) const {
    Parts parts{};
    const auto& s = step();
    if constexpr (Stage::kLinear) {
      // a linear stage has none
    } else if constexpr (Stage::kFactors) {
      const int64_t no_shift = 0;
      load_pre<Stage>(parts.of, s, row, no_shift, unit(), PersistentUnit{});
    } else {
      static_assert(Stage::kHiddenGates + kInputGatesAlone<Stage> == Stage::kPre);
      const float* no_bias = nullptr;
      if (s.pre != nullptr) {
        load_blocks<Stage::kPre>(parts.of, s.pre, no_bias, s.width, row, unit(), PersistentUnit{});
      } else {
        load_blocks<Stage::kHiddenGates>(parts.of, s.hidden_gates, no_bias, s.width, row, unit(),
                                         PersistentUnit{});
        load_blocks<kInputGatesAlone<Stage>>(parts.of + Stage::kHiddenGates, s.input_gates, no_bias,
                                             s.width, row, unit(), PersistentUnit{});
      }
    }
    return parts;
  }
  // The same without loading: calls f(k, where part k is).
  template <class F>
  FUSEDRNN_DEVICE void for_each_part(const RowOfChunk& row, const F& f) const {
    const auto& s = step();
    const auto each = [&](const float* plane, int blocks, int most, int first) {
      const float* at = plane + row * (blocks * s.width) + unit();
      FUSEDRNN_UNROLL
      for (int k = 0; k < most; ++k) {
        if (k < blocks) f(first + k, at + k * s.width);
      }
    };
    if constexpr (Stage::kFactors) {
      each(s.pre, s.factor_blocks, Stage::kPre, 0);
    } else if constexpr (!Stage::kLinear) {
      if (s.pre != nullptr) return each(s.pre, Stage::kPre, Stage::kPre, 0);
      constexpr int kHidden = Stage::kHiddenGates, kAlone = kInputGatesAlone<Stage>;
      each(s.hidden_gates, kHidden, kHidden, 0);
      each(s.input_gates, kAlone, kAlone, kHidden);
    }
  }
  FUSEDRNN_DEVICE void pre_of(const Parts& parts, float (&pre)[Stage::kPre]) const {
    if (Stage::kFactors || Stage::kLinear || step().pre != nullptr) {
      FUSEDRNN_UNROLL
      for (int k = 0; k < Stage::kPre; ++k) pre[k] = parts.of[k];
      return;
    }
    if constexpr (!Stage::kFactors && !Stage::kLinear) {
      float input_gates[Stage::kInputGates], hidden_gates[Stage::kHiddenGates];
      FUSEDRNN_UNROLL
      for (int k = 0; k < Stage::kHiddenGates; ++k) {
        hidden_gates[k] = parts.of[k] + block_.bias(kIndex, Block::kHiddenBias, k, thread().unit());
      }
      FUSEDRNN_UNROLL
      for (int k = 0; k < Stage::kInputGates; ++k) {
        input_gates[k] = block_.bias(kIndex, Block::kInputBias, k, thread().unit());
        if (k >= Stage::kShared)
          input_gates[k] += parts.of[Stage::kHiddenGates + k - Stage::kShared];
      }
      Stage::combine(input_gates, hidden_gates, pre);
    }
  }
  // Called before a barrier; biases are read after it.
  FUSEDRNN_DEVICE void load_biases() const {
    load_bias(Block::kHiddenBias, step().hidden_bias, Stage::kHiddenGates);
    load_bias(Block::kInputBias, step().input_bias, Stage::kInputGates);
  }

 protected:
  using Block = BackwardBlock<T>;
  BackwardBlock<T>& block_;
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

constexpr int kMostRingWords = 6;  // pre-activations, carry and gradient of LSTM

// In the variant kRing, what BackwardStage::load() loads: parts, carry and grad_output of the next
// few tiles, from the last step on.  Numbers of 16 bits come in pairs, since rows of the benchmark
// begin at multiples of 4 bytes.
template <class Stage, int kIndex, int kStages, class T>
class UnitsRing : BackwardUnits<Stage, kIndex, kStages, T> {
  using Units = BackwardUnits<Stage, kIndex, kStages, T>;
  using Units::args, Units::block_, Units::step, Units::unit, Units::width_;
  using Units::kIsLast;
  static constexpr int kWords = Stage::kPre + 2;
  enum { kCarryWord = Stage::kPre, kGradientWord };

 public:
  FUSEDRNN_DEVICE UnitsRing(BackwardBlock<T>& block)
      : Units(block), words_(block.ring() + kIndex * ring_floats(kMostRingWords)),
        t_(args().steps - 1) {
    static_assert(kWords <= kMostRingWords);
    for (int i = 0; i < words_.kAhead; ++i) copy();
  }

  // Starts to copy those of the next tile for which that has not been done.
  FUSEDRNN_DEVICE void copy() {
    if (t_ >= 0 && Units::is_there(tile_) && step().mask.is_active(Units::place(t_, tile_))) {
      const RowOfChunk row = Units::row_of_chunk(t_, tile_);
      Units::for_each_part(row, [&](int k, const float* part) { words_.copy(k, part); });
      const int even = sizeof(T) == 2 ? unit() & ~1 : unit();
      if constexpr (Stage::kCellState) {
        words_.copy(kCarryWord, args().cell_states + row * width_ + unit());
      } else if constexpr (Stage::kCarry) {
        words_.copy(kCarryWord, carry_at(row) + even);
      }
      const auto& grad_output = step().grad_output;
      if (kIsLast && grad_output.data != nullptr) {
        words_.copy(kGradientWord, grad_output.at(int64_t(row)) + even);
      }
    }
    words_.end_of_copy();
    const bool has_more = block_.has_tile(tile_ + 1);
    tile_ = has_more ? tile_ + 1 : 0;
    t_ -= has_more ? 0 : 1;
  }
  // Those of the next tile for which that has not been done.
  template <class Loaded>
  FUSEDRNN_DEVICE void read(Loaded& loaded) const {
    words_.wait();
    const RowOfChunk any{};
    Units::for_each_part(any, [&](int k, const float*) { loaded.parts.of[k] = words_.word(k); });
    if constexpr (Stage::kCellState) {
      loaded.carry = words_.word(kCarryWord);
    } else if constexpr (Stage::kCarry) {
      loaded.carry = number(kCarryWord);
    }
    if (kIsLast && step().grad_output.data != nullptr) loaded.grad_output = number(kGradientWord);
  }

 private:
  FUSEDRNN_DEVICE const T* carry_at(const RowOfChunk& row) const {
    const bool is_first = t_ == 0 && args().first_carry.data != nullptr;
    return is_first ? args().first_carry.at(row.b) : step().carry.at(int64_t(row));
  }
  FUSEDRNN_DEVICE T number(int word) const {
    if constexpr (sizeof(T) == 4) {
      return words_.word(word);
    } else {
      return T{uint16_t(Traits<float>::bits(words_.word(word)) >> 16 * (unit() % 2))};
    }
  }

  Ring<kWords> words_;
  int t_, tile_ = 0;  // that is copied next
};
struct NoRing {
  template <class Block>
  FUSEDRNN_DEVICE NoRing(const Block&) {}
};

// Recomputes the cell states, each from the one before, and the results that a later stage
// projects.
template <class Stage, int kIndex, int kStages, class T>
class CellStateUnits : BackwardUnits<Stage, kIndex, kStages, T> {
  using Units = BackwardUnits<Stage, kIndex, kStages, T>;
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
    ForwardStep<T, T>
        forward{};  // only the fields that forward_from_pre reads; h comes from the output
    forward.zoneout = step().zoneout;
    const bool is_plain = args().operand == nullptr && !step().mask.any() &&
                          !forward.zoneout.cell_state.is_possible();
    const RowOfChunk row = Units::row_of_chunk(0, tile);
    float state = args().first_cell_state[Units::row_of_batch(tile) * width_ + Units::unit()];
    args().cell_states[row * width_ + Units::unit()] = state;
    // While some steps are computed, the pre-activations of the following ones are loaded.
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
          args().cell_states[Units::row_of_chunk(first + k + 1, tile) * width_ + Units::unit()] =
              state;
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

  // The cell state after step t.
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
      args().cell_states[Units::row_of_chunk(t + 1, tile) * width_ + Units::unit()] = state;
    }
    if (args().operand != nullptr) {
      const RowOfChunk row = Units::row_of_chunk(t, tile);
      args().operand[row * width_ + Units::unit()] = narrow<T>(operand);
    }
    return state;
  }
};

}  // namespace fusedrnn::cuda
