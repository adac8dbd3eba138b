// One stage of a cell applied to a block of rows: load planes -> stage -> store.
//
// The structs are the whole border between the driver and a backend's kernels: plain pointers and
// sizes.  Rows are batch entries of one step, or all (t, b) of a chunk, t slowest; plane k of an
// array with n blocks lies at column k * width of its row.  forward_unit and backward_unit are the
// body that every backend's loop calls; a backend supplies only how lanes are loaded and stored.
//
// T: storage type of the user's tensors.  O: type of the operands of GEMMs (T on a GPU, Acc<T> on
// the CPU).  A = Acc<T>.
//
// A GPU may record the steps of a chunk once and replay them for later chunks.  `shift` then points
// to the rows between the two: arrays of the whole sequence are read and written so much further,
// those of a chunk where they always are.
#pragma once
#include <cstdint>
#include <type_traits>

#include "hd.h"
#include "matrix.h"
#include "philox.h"
#include "scalar.h"
#include "stages.h"

namespace fusedrnn {

// Where a row of a sequence is, counted from its start.  32 bits are enough, since the operators
// take fewer than 2^32 rows.
struct Place {
  uint32_t t, b;

  // Of a row's number.  64-bit division is a function that a GPU calls.
  FUSEDRNN_HD static Place of_row(int64_t row, int64_t batch) {
    const uint32_t t = uint32_t(row) / uint32_t(batch);
    return {t, uint32_t(row) - t * uint32_t(batch)};
  }
  // So many steps later; before the first step, t is larger than any.
  FUSEDRNN_HD Place after(int steps) const { return {t + uint32_t(steps), b}; }
};

// Rows at one stride, or null.  in_sequence: in an array of the whole sequence, not of a chunk.
template <class P>
struct Rows {
  P* data;
  int64_t stride;
  bool in_sequence;

  FUSEDRNN_HD P* at(int64_t row, int64_t shift = 0) const {
    return data + (in_sequence ? row + shift : row) * stride;
  }
};

// What rows of a batch do besides computing.  A row is finished from its length on: there it keeps
// its state, and nothing else of it counts.  Where `reset` is set, its state is zero before the
// step.
struct Mask {
  const int64_t* lengths;  // [batch], or null: none is finished
  const bool* reset;       // [seq_len, batch], or null
  int64_t seq_len, batch;
  int direction;  // 1, or -1 if time runs backwards

  FUSEDRNN_HD bool any() const { return lengths != nullptr || reset != nullptr; }
  FUSEDRNN_HD bool is_active(Place at) const { return lengths == nullptr || at.t < lengths[at.b]; }
  FUSEDRNN_HD bool is_reset(Place at) const {
    return reset != nullptr && reset[at.t * uint32_t(batch) + at.b];
  }
  // Of an active row: whether its state is zeroed before the step that it takes next.
  FUSEDRNN_HD bool is_reset_next(Place at) const {
    const Place next = at.after(direction);
    return reset != nullptr && next.t < seq_len && is_reset(next) && is_active(next);
  }
  // Whether the row takes its first step, from the initial state.
  FUSEDRNN_HD bool is_first(Place at) const {
    const Place before = at.after(-direction);
    return before.t >= seq_len || (direction < 0 && !is_active(before));
  }
};

// Where eps of a row comes from: the user's tensor, else Philox, whose counter is the row's place.
template <class T>
struct Noise {
  Rows<const T> eps;    // null: drawn from the seed
  const int64_t* seed;  // one element, or null if eps is given
  int64_t layer;
  int64_t first_step;  // of the sequence, where it is a part of a longer one

  // That of four units, 4 block and on.
  template <class A>
  FUSEDRNN_HD void draw(Place at, uint32_t block, A (&normal)[4]) const {
    normal4(uint64_t(*seed), uint32_t(first_step) + at.t, at.b, block, uint32_t(layer), normal);
  }
};

// The Philox counter's last word, for what is drawn beside a layer's noise.
constexpr uint32_t kDropoutStream = 4u << 29, kZoneoutStream = 2u << 29, kStateStream = 3u << 29;

// Zoneout (Krueger et al. 2017): with some probability a unit keeps its h, and with another its
// state beside h, instead of the new value.  Without a seed it takes the expectation of the two.
template <class A>
struct Zoneout {
  // A probability as kernels need it, prepared by the host, since many GPUs are slow in float64.
  struct Chance {
    A probability;
    A rest;  // for the expectation: 1 - probability, exact also where that is near 1; or drawn: 0
    uint64_t threshold;  // of 32 random bits, below which a unit keeps what it has

    FUSEDRNN_HD bool is_possible() const { return probability > 0; }
  };
  const int64_t* seed;
  int64_t layer, first_step;  // as those of Noise
  Chance h, state;

  static Zoneout of(const int64_t* seed, int64_t layer, int64_t first_step, double h,
                    double state) {
    const auto chance = [&](double probability) {
      return Chance{A(probability), seed == nullptr ? A(1 - probability) : A(0),
                    uint64_t(probability * 0x1p32)};
    };
    return {seed, layer, first_step, chance(h), chance(state)};
  }

  // How much each of four units, 4 block and on, keeps: 0 or 1, or the probability.
  FUSEDRNN_HD void kept(const Chance& chance, uint32_t stream, Place at, uint32_t block,
                        A (&kept)[4]) const {
    if (seed == nullptr || !chance.is_possible()) {
      for (int j = 0; j < 4; ++j) kept[j] = chance.probability;
      return;
    }
    uint32_t words[4] = {uint32_t(first_step) + at.t, at.b, block, uint32_t(layer) | stream};
    philox4x32(words, uint32_t(uint64_t(*seed)), uint32_t(uint64_t(*seed) >> 32));
    for (int j = 0; j < 4; ++j) kept[j] = words[j] < chance.threshold ? A(1) : A(0);
  }
};

// Pre-activations come from `pre` [rows, kPre * width], or where that is null from side and
// projection, [rows, k * width] each, with biases [k * width] that may be null.  Where they are
// added up (kAddsUp), the first kShared blocks of projection are sums, and side has the others.
template <class T, class O>
struct ForwardStep {
  using A = Acc<T>;
  static constexpr bool kAddsUp = false;  // but for stages that share all blocks
  static constexpr bool kReadsFactors = false;
  int64_t width, first_row;
  const int64_t* shift;  // or null: 0
  const A *pre, *side, *side_bias, *projection, *projection_bias;
  Rows<const A> carry;  // h_{t-1} unrounded, or the state
  bool is_last;         // of the cell: the result is h
  Rows<const O> h;      // h_{t-1}, for a last stage that does not carry it
  Noise<T> noise;
  Mask mask;
  Zoneout<A> zoneout;
  // The result, [rows, width]; each may be null.  operand is what the next projection reads: the
  // result rounded to T, whatever O is, so that backward can rebuild it from the output.
  O* operand;
  Rows<T> output;
  A* carry_out;
  // What backward wants; each may be null.  keep is in the sequence, [rows, kPre * width]; factors,
  // [rows, factor_blocks * width], may be projection's memory.
  A *keep, *factors;
  int factor_blocks;  // that are wanted, the first ones
};

template <class T, class O>
struct BackwardStep {
  using A = Acc<T>;
  static constexpr bool kAddsUp = true, kReadsFactors = true;
  int64_t width, first_row;
  const int64_t* shift;  // or null: 0
  // pre: in the sequence, or if the stage has factors these, as forward left them
  const A *pre, *side, *side_bias, *projection, *projection_bias;
  int factor_blocks;
  Rows<const O> carry;  // h_{t-1} as it stands in the output
  bool is_last;         // of the cell: dout is the adjoint of h
  const A* state;       // [rows, width], of the step before
  Mask mask;
  Zoneout<A> zoneout;
  A* dout;                    // [rows, width], adjoint from the step or stage behind
  Rows<const T> grad_output;  // added to dout
  O *dside, *dprojection;     // may be the memory of side and projection, or of factors, or theirs
                              // of later steps
  A* dcarry;                  // [rows, width]: dout's memory; of a state: its adjoint, in and out
  T* deps;                    // [rows, width] in the sequence, or null
};

template <class Step>
FUSEDRNN_HD int64_t shift_of(const Step& step) {
  return step.shift == nullptr ? 0 : *step.shift;
}

// row: its number, or something else that times a length is an offset
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

// shift: of the rows in step.pre
template <class Stage, class V, class Step, class Row, class Unit>
FUSEDRNN_HD void load_pre(V* pre, const Step& step, const Row& row, int64_t shift, int64_t column,
                          const Unit& unit) {
  if constexpr (Stage::kFactors && Step::kReadsFactors) {
    const auto* first = step.pre + row * (step.factor_blocks * step.width) + column;
    for (int k = 0; k < Stage::kPre; ++k) {
      pre[k] = k < step.factor_blocks ? unit.load(first + k * step.width) : V{};
    }
    return;
  }
  if (step.pre != nullptr) {
    using A = std::remove_reference_t<decltype(*step.pre)>;
    const A *first = step.pre + shift * (Stage::kPre * step.width), *no_bias = nullptr;
    return load_blocks<Stage::kPre>(pre, first, no_bias, step.width, row, column, unit);
  }
  V side[Stage::kSide > 0 ? Stage::kSide : 1], projection[Stage::kProjection];
  load_blocks<Stage::kProjection>(projection, step.projection, step.projection_bias, step.width,
                                  row, column, unit);
  if constexpr (Step::kAddsUp || kSideAlone<Stage> == 0) {
    const auto* bias = step.side_bias;
    for (int k = 0; k < Stage::kShared; ++k) {
      side[k] = bias == nullptr ? V{} : unit.load(bias + k * step.width + column);
    }
    if (bias != nullptr) bias += Stage::kShared * step.width;
    load_blocks<kSideAlone<Stage>>(side + Stage::kShared, step.side, bias, step.width, row, column,
                                   unit);
  } else {
    load_blocks<Stage::kSide>(side, step.side, step.side_bias, step.width, row, column, unit);
  }
  Stage::combine(side, projection, pre);
}

// A stage on a value, which may be a SIMD vector.  Specialised for values that are several numbers
// without arithmetic of their own.
template <class Stage, class V>
struct Lanes {
  FUSEDRNN_HD static V forward(const V* pre, V input, V* factors, V* state) {
    return Stage::forward(pre, input, factors, state);
  }
  FUSEDRNN_HD static void backward(const V* pre, V carry, V dout, V dstate, V* dside,
                                   V* dprojection, V* dinput) {
    Stage::backward(pre, carry, dout, dstate, dside, dprojection, dinput);
  }
};

// Whether h_{t-1} is what the stage carries; else, if it is the last, it stands beside the carry.
template <class Stage>
inline constexpr bool kCarriesResult = Stage::kCarry && !Stage::kState;

// What zoneout makes of a state a and the new value b: k a + rest b, or where rest is 0 and k is 1
// or 0, one of them alone: the other one may be NaN or inf.
template <class V, class A>
FUSEDRNN_HD V mix(const V& k, A rest, const V& a, const V& b) {
  const V fresh = math::select(k == 0.0f, b, k * a + rest * b);
  return rest == 0 ? math::select(k == 1.0f, a, fresh) : fresh;
}

// x, or 0 where k is 1, whatever x is there.
template <class V>
FUSEDRNN_HD V unless_one(const V& k, const V& x) {
  return math::select(k == 1.0f, V{}, x);
}

// What an active unit reads beside its pre-activations, and what it makes of all.
template <class V>
struct UnitInput {
  V input;  // the carry, or eps
  V h;      // h_{t-1}: for the zoneout of a last stage that does not carry it
  bool is_reset_next;
};
template <class V>
struct UnitResult {
  V out;          // goes to the output
  V next, carry;  // go on to the next projection, still to be rounded, and to the next step
};

template <class Stage, class T, class O, class V, class Unit>
FUSEDRNN_HD UnitResult<V> forward_from_pre(const ForwardStep<T, O>& step, Place at, int64_t column,
                                           const Unit& unit, const V* pre,
                                           const UnitInput<V>& given, V* factors) {
  const V input = given.input;
  V state{};
  V out = Lanes<Stage, V>::forward(pre, input, factors, &state);
  if constexpr (Stage::kState) {
    if (step.zoneout.state.is_possible()) {
      const V kept = unit.kept(step.zoneout, step.zoneout.state, kStateStream, at, column);
      state = mix(kept, step.zoneout.state.rest, input, state);
    }
  }
  if constexpr (Stage::kResult) {
    if (step.is_last && step.zoneout.h.is_possible()) {
      const V h = kCarriesResult<Stage> ? input : given.h;
      const V kept = unit.kept(step.zoneout, step.zoneout.h, kZoneoutStream, at, column);
      out = mix(kept, step.zoneout.h.rest, h, out);
    }
  }

  V next = out, carry = Stage::kState ? state : out;
  if constexpr (Stage::kResult) {
    if (given.is_reset_next) {
      carry = V{};
      if (step.is_last) next = V{};
    }
  }
  return {out, next, carry};
}

// To the arrays of the sequence.
template <class Stage, class T, class O, class V, class Row, class Unit>
FUSEDRNN_HD void store_forward(const ForwardStep<T, O>& step, const Row& row, int64_t shift,
                               int64_t column, const Unit& unit, const V* pre, const V& out) {
  if (step.output.data != nullptr) unit.store(step.output.at(int64_t(row), shift) + column, out);
  if (step.keep != nullptr) {
    Acc<T>* first = step.keep + shift * (Stage::kPre * step.width);
    store_blocks<Stage::kPre>(pre, first, step.width, row, column, unit);
  }
}

// row: as in arrays of the chunk.  at: in the sequence
template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void forward_unit(const ForwardStep<T, O>& step, int64_t row, Place at, int64_t column,
                              const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t width = step.width, shift = shift_of(step), element = row * width + column;
  if (!step.mask.is_active(at)) {
    if constexpr (Stage::kCarry) {
      if (step.carry_out != nullptr)
        unit.store(step.carry_out + element, unit.load(step.carry.at(row) + column));
    }
    // h waits as well; of what feeds another stage, GEMMs over all rows of a chunk read it.
    if (!step.is_last && step.operand != nullptr) unit.store(step.operand + element, V{});
    return;
  }
  V pre[Stage::kPre], factors[Stage::kPre];
  UnitInput<V> given{};
  load_pre<Stage>(pre, step, row, shift, column, unit);
  if constexpr (Stage::kCarry) given.input = unit.load(step.carry.at(row) + column);
  if constexpr (Stage::kNoise) {
    given.input = step.noise.eps.data == nullptr
                      ? unit.drawn(step.noise, at, column)
                      : unit.load(step.noise.eps.at(row, shift) + column);
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
  store_forward<Stage>(step, row, shift, column, unit, pre, result.out);
  if constexpr (Stage::kFactors) {
    if (step.factors != nullptr) {
      Acc<T>* first = step.factors + row * (step.factor_blocks * width) + column;
      for (int k = 0; k < Stage::kPre; ++k) {
        if (k < step.factor_blocks) unit.store(first + k * width, factors[k]);
      }
    }
  }
}

// The adjoints of an active unit's inputs.
template <class Stage, class V>
struct UnitAdjoints {
  V dside[kSideAlone<Stage> > 0 ? kSideAlone<Stage> : 1], dprojection[Stage::kProjection];
  V dinput;  // of the carry, or of eps
  V dh;      // of h_{t-1}, past the stage
};

// Linear in dout and dstate, the adjoints of the unit's results.
template <class Stage, class T, class O, class V, class Unit>
FUSEDRNN_HD UnitAdjoints<Stage, V> backward_from_pre(const BackwardStep<T, O>& step, Place at,
                                                     int64_t column, const Unit& unit, const V* pre,
                                                     const V& carry, V dout, V dstate) {
  V dh{}, dkept{};  // of h_{t-1} and of the state, past the stage
  V kept_h{}, kept_state{};
  const auto &h = step.zoneout.h, &state = step.zoneout.state;
  const bool may_keep_h = step.is_last && h.is_possible();
  if constexpr (Stage::kResult) {
    if (may_keep_h) {
      kept_h = unit.kept(step.zoneout, h, kZoneoutStream, at, column);
      dh = mix(kept_h, h.rest, dout, V{});
      dout = mix(kept_h, h.rest, V{}, dout);
    }
  }
  if constexpr (Stage::kState) {
    if (state.is_possible()) {
      kept_state = unit.kept(step.zoneout, state, kStateStream, at, column);
      dkept = mix(kept_state, state.rest, dstate, V{});
      dstate = mix(kept_state, state.rest, V{}, dstate);
    }
  }
  UnitAdjoints<Stage, V> d;
  Lanes<Stage, V>::backward(pre, carry, dout, dstate, d.dside, d.dprojection, &d.dinput);
  if constexpr (Stage::kCarry) {
    // A unit that keeps its states has no gradient beside theirs, even if its gates are NaN.
    const bool keeps_states = !Stage::kState || (state.is_possible() && state.rest == 0);
    if (may_keep_h && h.rest == 0 && keeps_states) {
      const V kept = Stage::kState ? mix(kept_h, h.rest, kept_state, V{}) : kept_h;
      for (int k = 0; k < kSideAlone<Stage>; ++k) d.dside[k] = unless_one(kept, d.dside[k]);
      for (V& gradient : d.dprojection) gradient = unless_one(kept, gradient);
      d.dinput = unless_one(kept, d.dinput);
    }
    d.dinput = d.dinput + (Stage::kState ? dkept : dh);
  }
  d.dh = dh;
  return d;
}

// To the arrays that GEMMs read, dprojection unless it is null, and the gradient of eps.
template <class Stage, class T, class O, class V, class Row, class Unit>
FUSEDRNN_HD void store_backward(const BackwardStep<T, O>& step, const Row& row, int64_t shift,
                                int64_t column, const Unit& unit, const UnitAdjoints<Stage, V>& d) {
  const int64_t width = step.width;
  if (step.dprojection != nullptr) {
    store_blocks<Stage::kProjection>(d.dprojection, step.dprojection, width, row, column, unit);
  }
  store_blocks<kSideAlone<Stage>>(d.dside, step.dside, width, row, column, unit);
  if constexpr (Stage::kNoise) {
    if (step.deps != nullptr) {
      unit.store(step.deps + shift * width + row * width + column, d.dinput);
    }
  }
}

// row, at: as of forward_unit
template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void backward_unit(const BackwardStep<T, O>& step, int64_t row, Place at,
                               int64_t column, const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t width = step.width, shift = shift_of(step), element = row * width + column;
  if (!step.mask.is_active(at)) {  // its adjoints wait where they are
    return store_backward<Stage>(step, row, shift, column, unit, UnitAdjoints<Stage, V>{});
  }
  V pre[Stage::kPre], carry{}, dstate{};
  if constexpr (Stage::kLinear) {
    for (V& p : pre) p = V{};  // not there
  } else {
    load_pre<Stage>(pre, step, row, shift, column, unit);
  }
  V dout = unit.load(step.dout + element);
  if constexpr (Stage::kState) {
    carry = unit.load(step.state + element);
    dstate = unit.load(step.dcarry + element);
  } else if constexpr (Stage::kCarry) {
    carry = unit.load(step.carry.at(row, shift) + column);
  }
  if constexpr (Stage::kResult) {
    if (step.mask.is_reset_next(at)) {
      dstate = V{};
      if (step.is_last) dout = V{};
    }
  }
  if (step.grad_output.data != nullptr) {
    dout = dout + unit.load(step.grad_output.at(row, shift) + column);
  }

  const auto d = backward_from_pre<Stage>(step, at, column, unit, pre, carry, dout, dstate);
  if constexpr (Stage::kResult && !kCarriesResult<Stage>) {
    if (step.is_last) unit.store(step.dout + element, d.dh);  // the GEMM adds the rest
  }
  store_backward<Stage>(step, row, shift, column, unit, d);
  if constexpr (Stage::kCarry) unit.store(step.dcarry + element, d.dinput);
}

// Inverted dropout of a layer's input (Srivastava et al. 2014), and of its gradient: an element is
// zero with some probability, else scaled up.  Which ones is a function of the seed and of the
// element's place, so that nobody keeps them.
template <class O>
struct DropoutStep {
  int64_t width, first_row, batch;
  const int64_t* seed;
  int64_t layer, first_step;  // as those of Noise
  uint64_t threshold;         // of 32 random bits, below which an element is zero
  double scale;
  O* x;  // [rows, width]
};

// Four neighbours from `column` on.
template <class O>
FUSEDRNN_HD void dropout_unit(const DropoutStep<O>& step, int64_t row, int64_t column) {
  const Place at = Place::of_row(step.first_row + row, step.batch);
  uint32_t words[4] = {uint32_t(step.first_step) + at.t, at.b, uint32_t(column / 4),
                       uint32_t(step.layer) | kDropoutStream};
  philox4x32(words, uint32_t(uint64_t(*step.seed)), uint32_t(uint64_t(*step.seed) >> 32));
  O* x = step.x + row * step.width + column;
  for (int j = 0; j < 4 && column + j < step.width; ++j) {
    const bool is_zero = words[j] < step.threshold;
    x[j] = narrow<O>(is_zero ? Acc<O>(0) : Acc<O>(widen(x[j]) * Acc<O>(step.scale)));
  }
}

// x of finished rows is nobody's business: it may be NaN, and must not get into sums over all rows.
template <class O>
struct ClearStep {
  int64_t width, first_row;
  Mask mask;
  O* x;  // [rows, width]
};

template <class O, class Unit>
FUSEDRNN_HD void clear_unit(const ClearStep<O>& step, int64_t row, Place at, int64_t column,
                            const Unit& unit) {
  if (!step.mask.is_active(at)) {
    unit.store(step.x + row * step.width + column, typename Unit::Value{});
  }
}

// Sums over the rows of a chunk, each of them added to what is there, or written: of all matrices
// at once, since on a GPU a launch costs more than the sum.
template <class O>
struct ColumnSums {
  static constexpr int kMost = 4;
  const O* data[kMost];
  int64_t columns[kMost], row_stride[kMost];
  Acc<O>* sum[kMost];
  int count;
  int64_t rows;  // of each
  bool accumulate;

  void add(const Matrix<const O>& m, Acc<O>* to) {
    data[count] = m.data;
    columns[count] = m.columns;
    row_stride[count] = m.row_stride;
    sum[count++] = to;
    rows = m.rows;
  }
  int64_t all_columns() const {
    int64_t all = 0;
    for (int i = 0; i < count; ++i) all += columns[i];
    return all;
  }
};

// h_{t-1} of the rows of a chunk, for GEMMs and for backward(): what the step read.
template <class T, class O>
struct GatherStep {
  int64_t width, first_row;
  Rows<const T> before;  // h_{t-1} as the output has it, of rows that have one
  const T* hx;           // [batch, width]
  Mask mask;
  O* h;  // [rows, width]
};

template <class T, class O, class Unit>
FUSEDRNN_HD void gather_unit(const GatherStep<T, O>& step, int64_t row, Place at, int64_t column,
                             const Unit& unit) {
  using V = typename Unit::Value;
  const Mask& mask = step.mask;
  V h{};
  if (mask.is_active(at)) {
    if (mask.is_first(at)) {  // hx has been reset by whoever gave it
      h = unit.load(step.hx + at.b * step.width + column);
    } else if (!mask.is_reset(at)) {
      h = unit.load(step.before.at(row) + column);
    }
  }
  unit.store(step.h + row * step.width + column, h);
}

}  // namespace fusedrnn
