// The stages of stages.h in the form of those that Python prints (program/stage_parts.h), so that
// the driver of programs, with its loops and kernels, runs a built-in cell by the math that the
// driver of chains runs.
#pragma once
#include "../program/stage.h"
#include "stages.h"

namespace fusedrnn {

// in: the carry or the noise, if the stage has one, its input gates and its hidden gates.  out: its
// result, and its cell state if it has one.
template <class Stage>
struct Printed {
  static constexpr int kGates = Stage::kCarry || Stage::kNoise;  // of the inputs, the first gate
  static constexpr int kHidden = kGates + Stage::kInputGates;    // and the first hidden gate
  static constexpr int kIns = kHidden + Stage::kHiddenGates, kOuts = 1 + Stage::kCellState;
  // All others are columns, which is 0.
  static constexpr program::In kIn[kIns] = {Stage::kNoise ? program::In::Normal
                                                          : program::In::Column};
  static constexpr program::Out kOut[kOuts] = {program::Out::Column};
  static_assert(int(program::In::Column) == 0 && int(program::Out::Column) == 0);

  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    A pre[Stage::kPre], factors[Stage::kPre], state{};
    Stage::combine(in + kGates, in + kHidden, pre);
    out[0] = Stage::forward(pre, in[0], factors, &state);
    if constexpr (Stage::kCellState) out[1] = state;
  }

  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    A pre[Stage::kPre], factors[Stage::kPre], state{}, dstate{}, dfirst{};
    A dinput_gates[Stage::kPre], dhidden_gates[Stage::kHiddenGates];
    Stage::combine(in + kGates, in + kHidden, pre);
    if constexpr (Stage::kFactors) Stage::forward(pre, in[0], factors, &state);
    if constexpr (Stage::kCellState) dstate = dout[1];
    Stage::backward(Stage::kFactors ? factors : pre, in[0], dout[0], dstate, dinput_gates,
                    dhidden_gates, &dfirst);
    if constexpr (Stage::kCarry) din[0] = dfirst;
    for (int k = 0; k < Stage::kInputGates; ++k) {
      din[kGates + k] = k < Stage::kShared ? dhidden_gates[k] : dinput_gates[k - Stage::kShared];
    }
    for (int k = 0; k < Stage::kHiddenGates; ++k) din[kHidden + k] = dhidden_gates[k];
  }
};

}  // namespace fusedrnn
