// One stage of a cell applied to a block of rows: load planes -> stage -> store.
//
// The structs are the whole border between the driver and a backend's kernels: plain pointers and
// sizes.  Rows are batch entries of one step, or all (t, b) of a chunk, t slowest; plane k of an
// array with n blocks lies at column k * width of its row.  forward_unit and backward_unit are the
// body that every backend's loop calls; a backend supplies only how lanes are loaded and stored.
//
// T: storage type of the user's tensors.  O: type of the operands of GEMMs (T on a GPU, Acc<T> on
// the CPU).  A = Acc<T>.
#pragma once
#include <cstdint>
#include <type_traits>

#include "hd.h"
#include "scalar.h"
#include "stages.h"

namespace fusedrnn {

// Where eps of row `first_row + row` comes from: the user's tensor, else Philox.  The counter of a
// row is t = row / batch, b = row % batch, so first_row must count from the start of the sequence.
template <class T>
struct Noise {
  const T* eps;         // [rows, width], or null: drawn from the seed
  const int64_t* seed;  // one element, or null if eps is given
  int64_t batch, layer;
};

// Pre-activations come from `pre` [rows, kPre * width], or where that is null from side and
// projection, [rows, k * width] each, with biases [k * width] that may be null.
template <class T, class O>
struct ForwardStep {
  using A = Acc<T>;
  int64_t width, first_row;
  const A *pre, *side, *side_bias, *projection, *projection_bias;
  const A* carry;  // [rows, width], h_{t-1} unrounded
  Noise<T> noise;
  // The result, [rows, width]; each may be null.  operand is what the next projection reads: the
  // result rounded to T, whatever O is, so that backward can rebuild it from the output.
  O* operand;
  T* output;
  A* carry_out;
  // What backward wants, [rows, kPre * width]; each may be null.  factors may be projection's
  // memory.
  A *keep, *factors;
};

template <class T, class O>
struct BackwardStep {
  using A = Acc<T>;
  int64_t width, first_row;
  const A *pre, *side, *side_bias, *projection, *projection_bias;  // pre: factors if kFactors
  const T* carry;          // [rows, width], h_{t-1} as it stands in the output
  const A* dout;           // [rows, width], adjoint from the step or stage behind
  const T* grad_output;    // [rows, width], added to dout, or null
  O *dside, *dprojection;  // may be the memory of what they are the gradients of, or of factors
  A* dcarry;               // [rows, width], may be dout
  T* deps;                 // [rows, width] or null
};

template <int kBlocks, class V, class A, class Unit>
FUSEDRNN_HD void load_blocks(V* values, const A* plane, const A* bias, int64_t width, int64_t row,
                             int64_t column, const Unit& unit) {
  for (int k = 0; k < kBlocks; ++k) {
    values[k] = unit.load(plane + (row * kBlocks + k) * width + column);
    if (bias != nullptr) values[k] = values[k] + unit.load(bias + k * width + column);
  }
}

template <int kBlocks, class V, class P, class Unit>
FUSEDRNN_HD void store_blocks(const V* values, P* plane, int64_t width, int64_t row, int64_t column,
                              const Unit& unit) {
  for (int k = 0; k < kBlocks; ++k) {
    unit.store(plane + (row * kBlocks + k) * width + column, values[k]);
  }
}

template <class Stage, class V, class Step, class Unit>
FUSEDRNN_HD void load_pre(V* pre, const Step& step, int64_t row, int64_t column, const Unit& unit) {
  if (step.pre != nullptr) {
    using A = std::remove_reference_t<decltype(*step.pre)>;
    const A* no_bias = nullptr;
    return load_blocks<Stage::kPre>(pre, step.pre, no_bias, step.width, row, column, unit);
  }
  V side[Stage::kSide > 0 ? Stage::kSide : 1], projection[Stage::kProjection];
  load_blocks<Stage::kSide>(side, step.side, step.side_bias, step.width, row, column, unit);
  load_blocks<Stage::kProjection>(projection, step.projection, step.projection_bias, step.width,
                                  row, column, unit);
  Stage::combine(side, projection, pre);
}

template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void forward_unit(const ForwardStep<T, O>& step, int64_t row, int64_t column,
                              const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t at = row * step.width + column;
  V pre[Stage::kPre], factors[Stage::kPre], input{};
  load_pre<Stage>(pre, step, row, column, unit);
  if constexpr (Stage::kCarry) input = unit.load(step.carry + at);
  if constexpr (Stage::kNoise) input = unit.noise(step.noise, row, column, step.width);

  const V out = Stage::forward(pre, input, factors);

  if (step.operand != nullptr) unit.store(step.operand + at, unit.template round_to<T>(out));
  if (step.output != nullptr) unit.store(step.output + at, out);
  if (step.carry_out != nullptr) unit.store(step.carry_out + at, out);
  if (step.keep != nullptr) {
    store_blocks<Stage::kPre>(pre, step.keep, step.width, row, column, unit);
  }
  if constexpr (Stage::kFactors) {
    if (step.factors != nullptr) {
      store_blocks<Stage::kPre>(factors, step.factors, step.width, row, column, unit);
    }
  }
}

template <class Stage, class T, class O, class Unit>
FUSEDRNN_HD void backward_unit(const BackwardStep<T, O>& step, int64_t row, int64_t column,
                               const Unit& unit) {
  using V = typename Unit::Value;
  const int64_t at = row * step.width + column;
  V pre[Stage::kPre], carry{};
  load_pre<Stage>(pre, step, row, column, unit);
  if constexpr (Stage::kCarry) carry = unit.load(step.carry + at);
  V dout = unit.load(step.dout + at);
  if (step.grad_output != nullptr) dout = dout + unit.load(step.grad_output + at);

  V dside[Stage::kSide > 0 ? Stage::kSide : 1], dprojection[Stage::kProjection], dinput;
  Stage::backward(pre, carry, dout, dside, dprojection, &dinput);

  store_blocks<Stage::kProjection>(dprojection, step.dprojection, step.width, row, column, unit);
  store_blocks<Stage::kSide>(dside, step.dside, step.width, row, column, unit);
  if constexpr (Stage::kCarry) unit.store(step.dcarry + at, dinput);
  if constexpr (Stage::kNoise) {
    if (step.deps != nullptr) unit.store(step.deps + at, dinput);
  }
}

}  // namespace fusedrnn
