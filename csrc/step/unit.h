// One stage of a cell for one unit of a row: load planes -> stage -> store.
//
// forward_unit and backward_unit are the loop body of every backend; a backend supplies only how
// lanes are loaded and stored.
//
// Longer than 350 lines, because forward and backward load and mask a unit in the same way.
#pragma once
#include "step.h"

namespace fusedrnn {

template <class Step>
FUSEDRNN_HD int64_t replay_offset_of(const Step& step) {
  return step.replay_offset == nullptr ? 0 : *step.replay_offset;
}

// row: the row's number, or an object whose product with a length is an offset.
template <int kBlocks, class V, class A, class Row, class Unit>
FUSEDRNN_HD void load_blocks(V* values, const A* plane, const A* bias, int64_t width,
                             const Row& row, int64_t column, const Unit& unit) {
  const A* first = plane + row * (kBlocks * width) + column;
  for (int k = 0; k < kBlocks; ++k) {
    values[k] = unit.load(first + k * width);
    if (bias != nullptr) values[k] = values[k] + unit.load(bias + k * width + column);
  }
}

template <int kBlocks, class V, class P, class Row, class Unit>
FUSEDRNN_HD void store_blocks(const V* values, P* plane, int64_t width, const Row& row,
                              int64_t column, const Unit& unit) {
  P* first = plane + row * (kBlocks * width) + column;
  for (int k = 0; k < kBlocks; ++k) unit.store(first + k * width, values[k]);
}

// replay_offset: of step.pre.
template <class Stage, class V, class Step, class Row, class Unit>
FUSEDRNN_HD void load_pre(V* pre, const Step& step, const Row& row, int64_t replay_offset,
                          int64_t column, const Unit& unit) {
  if constexpr (Stage::kFactors && Step::kReadsFactors) {
    const auto* first = step.pre + row * (step.factor_blocks * step.width) + column;
    for (int k = 0; k < Stage::kPre; ++k) {
      pre[k] = k < step.factor_blocks ? unit.load(first + k * step.width) : V{};
    }
    return;
  }
  if (step.pre != nullptr) {
    using A = std::remove_reference_t<decltype(*step.pre)>;
    const A *first = step.pre + replay_offset * (Stage::kPre * step.width), *no_bias = nullptr;
    return load_blocks<Stage::kPre>(pre, first, no_bias, step.width, row, column, unit);
  }
  V input_gates[Stage::kInputGates > 0 ? Stage::kInputGates : 1], hidden_gates[Stage::kHiddenGates];
  load_blocks<Stage::kHiddenGates>(hidden_gates, step.hidden_gates, step.hidden_bias, step.width,
                                   row, column, unit);
  if constexpr (Step::kAddsUp || kInputGatesAlone<Stage> == 0) {
    const auto* bias = step.input_bias;
    for (int k = 0; k < Stage::kShared; ++k) {
      input_gates[k] = bias == nullptr ? V{} : unit.load(bias + k * step.width + column);
    }
    if (bias != nullptr) bias += Stage::kShared * step.width;
    load_blocks<kInputGatesAlone<Stage>>(input_gates + Stage::kShared, step.input_gates, bias,
                                         step.width, row, column, unit);
  } else {
    load_blocks<Stage::kInputGates>(input_gates, step.input_gates, step.input_bias, step.width, row,
                                    column, unit);
  }
  Stage::combine(input_gates, hidden_gates, pre);
}

// Applies a stage to a value, which may be a SIMD vector.  A backend specialises it for a value
// that consists of several vectors and has no arithmetic of its own.
template <class Stage, class V>
struct Lanes {
  FUSEDRNN_HD static V forward(const V* pre, V input, V* factors, V* state) {
    return Stage::forward(pre, input, factors, state);
  }
  FUSEDRNN_HD static void backward(const V* pre, V carry, V dout, V dstate, V* dinput_gates,
                                   V* dhidden_gates, V* dinput) {
    Stage::backward(pre, carry, dout, dstate, dinput_gates, dhidden_gates, dinput);
  }
};

// Whether the stage carries h_{t-1}; if not and the stage is the last one, h_{t-1} is passed in
// addition to the carry.
template <class Stage>
inline constexpr bool kCarriesResult = Stage::kCarry && !Stage::kCellState;

// Zoneout of an old value a and a new value b: k a + rest b.  If rest is 0 (k is then 1 or 0) the
// result is a or b alone, because the other one may be NaN or inf.
template <class V, class A>
FUSEDRNN_HD V mix(const V& k, A rest, const V& a, const V& b) {
  const V fresh = math::select(k == 0.0f, b, k * a + rest * b);
  return rest == 0 ? math::select(k == 1.0f, a, fresh) : fresh;
}

// x, but 0 where k is 1, even if x is NaN there.
template <class V>
FUSEDRNN_HD V unless_one(const V& k, const V& x) {
  return math::select(k == 1.0f, V{}, x);
}

// What an active unit reads in addition to its pre-activations, and its results.
template <class V>
struct UnitInput {
  V input;  // the carry, or eps
  V h;      // h_{t-1}, for zoneout in a last stage that does not carry it
  bool is_reset_next;
};
template <class V>
struct UnitResult {
  V out;          // goes to the output
  V next, carry;  // for the next projection, not rounded yet, and for the next step
};

template <class Stage, class T, class O, class V, class Unit>
FUSEDRNN_HD UnitResult<V> forward_from_pre(const ForwardStep<T, O>& step, Place at, int64_t column,
                                           const Unit& unit, const V* pre,
                                           const UnitInput<V>& given, V* factors) {
  const V input = given.input;
  V state{};
  V out = Lanes<Stage, V>::forward(pre, input, factors, &state);
  if constexpr (Stage::kCellState) {
    if (step.zoneout.cell_state.is_possible()) {
      const V kept = unit.kept(step.zoneout, step.zoneout.cell_state, kCellStateStream, at, column);
      state = mix(kept, step.zoneout.cell_state.rest, input, state);
    }
  }
  if constexpr (Stage::kResult) {
    if (step.is_last && step.zoneout.h.is_possible()) {
      const V h = kCarriesResult<Stage> ? input : given.h;
      const V kept = unit.kept(step.zoneout, step.zoneout.h, kZoneoutStream, at, column);
      out = mix(kept, step.zoneout.h.rest, h, out);
    }
  }

  V next = out, carry = Stage::kCellState ? state : out;
  if constexpr (Stage::kResult) {
    if (given.is_reset_next) {
      carry = V{};
      if (step.is_last) next = V{};
    }
  }
  return {out, next, carry};
}

// Stores what goes to arrays of the sequence.
template <class Stage, class T, class O, class V, class Row, class Unit>
FUSEDRNN_HD void store_forward(const ForwardStep<T, O>& step, const Row& row, int64_t replay_offset,
                               int64_t column, const Unit& unit, const V* pre, const V& out) {
  if (step.output.data != nullptr)
    unit.store(step.output.at(int64_t(row), replay_offset) + column, out);
  if (step.saved_gates != nullptr) {
    Acc<T>* first = step.saved_gates + replay_offset * (Stage::kPre * step.width);
    store_blocks<Stage::kPre>(pre, first, step.width, row, column, unit);
  }
}

// row: in arrays of the chunk.  at: in the sequence.
template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void forward_unit(const ForwardStep<T, O>& step, int64_t row, Place at, int64_t column,
                              const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t width = step.width, replay_offset = replay_offset_of(step),
                element = row * width + column;
  if (!step.mask.is_active(at)) {
    if constexpr (Stage::kCarry) {
      if (step.carry_out != nullptr)
        unit.store(step.carry_out + element, unit.load(step.carry.at(row) + column));
    }
    // h stays as it is, too.  The result of an earlier stage becomes 0, because GEMMs over all rows
    // of a chunk read it.
    if (!step.is_last && step.operand != nullptr) unit.store(step.operand + element, V{});
    return;
  }
  V pre[Stage::kPre], factors[Stage::kPre];
  UnitInput<V> given{};
  load_pre<Stage>(pre, step, row, replay_offset, column, unit);
  if constexpr (Stage::kCarry) given.input = unit.load(step.carry.at(row) + column);
  if constexpr (Stage::kNoise) {
    given.input = step.noise.eps.data == nullptr
                      ? unit.drawn(step.noise, at, column)
                      : unit.load(step.noise.eps.at(row, replay_offset) + column);
  }
  if constexpr (Stage::kResult && !kCarriesResult<Stage>) {
    if (step.is_last && step.zoneout.h.is_possible()) {
      given.h = unit.load(step.h.at(row) + column);
    }
  }
  if constexpr (Stage::kResult) given.is_reset_next = step.mask.is_reset_next(at);

  const UnitResult<V> result = forward_from_pre<Stage>(step, at, column, unit, pre, given, factors);
  if (step.operand != nullptr) {
    unit.store(step.operand + element, unit.template round_to<T>(result.next));
  }
  if (step.carry_out != nullptr) unit.store(step.carry_out + element, result.carry);
  store_forward<Stage>(step, row, replay_offset, column, unit, pre, result.out);
  if constexpr (Stage::kFactors) {
    if (step.factors != nullptr) {
      Acc<T>* first = step.factors + row * (step.factor_blocks * width) + column;
      for (int k = 0; k < Stage::kPre; ++k) {
        if (k < step.factor_blocks) unit.store(first + k * width, factors[k]);
      }
    }
  }
}

// The gradients of an active unit's inputs.
template <class Stage, class V>
struct UnitGradients {
  V dinput_gates[kInputGatesAlone<Stage> > 0 ? kInputGatesAlone<Stage> : 1],
      dhidden_gates[Stage::kHiddenGates];
  V dinput;  // of the carry, or of eps
  V dh;      // of h_{t-1}, the part that bypasses the stage
};

// Linear in dout and dstate, the gradients of the unit's results.
template <class Stage, class T, class O, class V, class Unit>
FUSEDRNN_HD UnitGradients<Stage, V> backward_from_pre(const BackwardStep<T, O>& step, Place at,
                                                      int64_t column, const Unit& unit,
                                                      const V* pre, const V& carry, V dout,
                                                      V dstate) {
  V dh{}, dkept{};  // of h_{t-1} and of the cell state, the part that bypasses the stage
  V kept_h{}, kept_cell_state{};
  const auto &h = step.zoneout.h, &c = step.zoneout.cell_state;
  const bool may_keep_h = step.is_last && h.is_possible();
  if constexpr (Stage::kResult) {
    if (may_keep_h) {
      kept_h = unit.kept(step.zoneout, h, kZoneoutStream, at, column);
      dh = mix(kept_h, h.rest, dout, V{});
      dout = mix(kept_h, h.rest, V{}, dout);
    }
  }
  if constexpr (Stage::kCellState) {
    if (c.is_possible()) {
      kept_cell_state = unit.kept(step.zoneout, c, kCellStateStream, at, column);
      dkept = mix(kept_cell_state, c.rest, dstate, V{});
      dstate = mix(kept_cell_state, c.rest, V{}, dstate);
    }
  }
  UnitGradients<Stage, V> d;
  Lanes<Stage, V>::backward(pre, carry, dout, dstate, d.dinput_gates, d.dhidden_gates, &d.dinput);
  if constexpr (Stage::kCarry) {
    // A unit that keeps its states passes on only their gradients, even if its gates are NaN.
    const bool keeps_states = !Stage::kCellState || (c.is_possible() && c.rest == 0);
    if (may_keep_h && h.rest == 0 && keeps_states) {
      const V kept = Stage::kCellState ? mix(kept_h, h.rest, kept_cell_state, V{}) : kept_h;
      for (int k = 0; k < kInputGatesAlone<Stage>; ++k)
        d.dinput_gates[k] = unless_one(kept, d.dinput_gates[k]);
      for (V& gradient : d.dhidden_gates) gradient = unless_one(kept, gradient);
      d.dinput = unless_one(kept, d.dinput);
    }
    d.dinput = d.dinput + (Stage::kCellState ? dkept : dh);
  }
  d.dh = dh;
  return d;
}

// Stores the gradients that GEMMs read (dhidden_gates only if it is not null) and the gradient of
// eps.
template <class Stage, class T, class O, class V, class Row, class Unit>
FUSEDRNN_HD void store_backward(const BackwardStep<T, O>& step, const Row& row,
                                int64_t replay_offset, int64_t column, const Unit& unit,
                                const UnitGradients<Stage, V>& d) {
  const int64_t width = step.width;
  if (step.dhidden_gates != nullptr) {
    store_blocks<Stage::kHiddenGates>(d.dhidden_gates, step.dhidden_gates, width, row, column,
                                      unit);
  }
  store_blocks<kInputGatesAlone<Stage>>(d.dinput_gates, step.dinput_gates, width, row, column,
                                        unit);
  if constexpr (Stage::kNoise) {
    if (step.deps != nullptr) {
      unit.store(step.deps + replay_offset * width + row * width + column, d.dinput);
    }
  }
}

// row, at: as in forward_unit.
template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void backward_unit(const BackwardStep<T, O>& step, int64_t row, Place at,
                               int64_t column, const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t width = step.width, replay_offset = replay_offset_of(step),
                element = row * width + column;
  if (!step.mask.is_active(at)) {  // the gradients of its states stay as they are
    return store_backward<Stage>(step, row, replay_offset, column, unit, UnitGradients<Stage, V>{});
  }
  V pre[Stage::kPre], carry{}, dstate{};
  if constexpr (Stage::kLinear) {
    for (V& p : pre) p = V{};  // a linear stage has none
  } else {
    load_pre<Stage>(pre, step, row, replay_offset, column, unit);
  }
  V dout = unit.load(step.dout + element);
  if constexpr (Stage::kCellState) {
    carry = unit.load(step.cell_state + element);
    dstate = unit.load(step.dcarry + element);
  } else if constexpr (Stage::kCarry) {
    carry = unit.load(step.carry.at(row, replay_offset) + column);
  }
  if constexpr (Stage::kResult) {
    if (step.mask.is_reset_next(at)) {
      dstate = V{};
      if (step.is_last) dout = V{};
    }
  }
  if (step.grad_output.data != nullptr) {
    dout = dout + unit.load(step.grad_output.at(row, replay_offset) + column);
  }

  const auto d = backward_from_pre<Stage>(step, at, column, unit, pre, carry, dout, dstate);
  if constexpr (Stage::kResult && !kCarriesResult<Stage>) {
    if (step.is_last) unit.store(step.dout + element, d.dh);  // the GEMM adds the rest
  }
  store_backward<Stage>(step, row, replay_offset, column, unit, d);
  if constexpr (Stage::kCarry) unit.store(step.dcarry + element, d.dinput);
}

// Dropout of four neighbours from `column` on.
template <class O>
FUSEDRNN_HD void dropout_unit(const DropoutStep<O>& step, int64_t row, int64_t column) {
  const Place at = Place::of_row(step.first_row + row, step.batch);
  uint32_t words[4] = {uint32_t(step.first_step) + at.t, at.b, uint32_t(column / 4),
                       uint32_t(step.noise_stream) | kDropoutStream};
  philox4x32(words, uint32_t(uint64_t(*step.seed)), uint32_t(uint64_t(*step.seed) >> 32));
  O* x = step.x + row * step.width + column;
  for (int j = 0; j < 4 && column + j < step.width; ++j) {
    const bool is_zero = words[j] < step.threshold;
    x[j] = narrow<O>(is_zero ? Acc<O>(0) : Acc<O>(widen(x[j]) * Acc<O>(step.scale)));
  }
}

template <class O, class Unit>
FUSEDRNN_HD void clear_unit(const ClearStep<O>& step, int64_t row, Place at, int64_t column,
                            const Unit& unit) {
  const bool is_zero =
      step.is_initial_state ? step.mask.is_reset_at_start(at.b) : !step.mask.is_active(at);
  if (is_zero) unit.store(step.x + row * step.width + column, typename Unit::Value{});
}

template <class T, class O, class Unit>
FUSEDRNN_HD void gather_unit(const GatherStep<T, O>& step, int64_t row, Place at, int64_t column,
                             const Unit& unit) {
  using V = typename Unit::Value;
  const Mask& mask = step.mask;
  V h{};
  if (mask.is_active(at) && !mask.is_reset(at)) {
    h = unit.load(mask.is_first(at) ? step.hx + at.b * step.width + column
                                    : step.before.at(row) + column);
  }
  unit.store(step.h + row * step.width + column, h);
}

}  // namespace fusedrnn
