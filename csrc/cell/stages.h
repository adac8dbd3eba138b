// The math of one unit of a recurrent layer, forward and backward, written once for every backend.
//
// A cell is an ordered list of (projection, stage).  A stage combines
//   input_gates   x W_ih + b_ih, which does not depend on the carry, and
//   hidden_gates  the projection of the carry, or of the previous stage's result, with its bias,
// into its pre-activations.  From these and one more input, which is
//   carry         the unit's own state from the step before (kCarry), or
//   eps           its noise (kNoise),
// it computes one value.  backward() starts from the same inputs and recomputes the gates, so
// forward saves only the carry.  If a stage's inputs do not depend on gradients (kFactors), its
// forward() also computes the factors that make its backward() linear, one per pre-activation, and
// backward() gets these factors instead of the pre-activations.  Only the gradient of eps needs
// factors after the first.
//
// The carry is the stage's result of the step before, or (kCellState) a cell state, which is passed
// in `state`; its gradient is passed in `dstate`, in and out.  A stage reads only the sum of input
// and hidden gates in the first kShared blocks.  GEMMs may accumulate that sum in one array, and it
// has one gradient, in dhidden_gates; dinput_gates has the other blocks (kInputGatesAlone).
// kResult: the stage may be the last of a cell; its result is then h.  kLinear: backward() needs no
// pre-activations.
//
// States are unbounded, derivatives of gates are bounded: backward() multiplies these two first, so
// that no product overflows, and the gradient of a saturated gate is 0 and not inf * 0.
//
// A: float or double, or a SIMD vector of floats.  Arrays hold one entry per block of the GEMM
// result, in the order of torch's gates.  Stages access no memory but their arguments.
#pragma once
#include "../base/hd.h"
#include "../base/math.h"

namespace fusedrnn {

enum class StageKind { Sample, Linear, Gru, Lstm };

// Reparametrised Gaussian sample (Kingma & Welling 2014):  z = loc + eps * exp(logvar / 2).
// hidden_gates and pre: loc, logvar.
struct Sample {
  static constexpr StageKind kKind = StageKind::Sample;
  static constexpr const char* kName = "Sample";
  static constexpr int kInputGates = 0, kShared = 0, kHiddenGates = 2, kPre = 2;
  static constexpr bool kCarry = false, kNoise = true, kFactors = true;
  static constexpr bool kCellState = false, kResult = false, kLinear = false;

  template <class A>
  FUSEDRNN_HD static void combine(const A* /*input_gates*/, const A* hidden_gates, A* pre) {
    pre[0] = hidden_gates[0];
    pre[1] = hidden_gates[1];
  }

  // factors: eps * scale / 2, scale.
  template <class A>
  FUSEDRNN_HD static A forward(const A* pre, A eps, A* factors, A* /*state*/) {
    const A scale = math::exp(A(0.5f * pre[1]));
    const A deviation = eps * scale;
    factors[0] = 0.5f * deviation;
    factors[1] = scale;
    return pre[0] + deviation;
  }

  template <class A>
  FUSEDRNN_HD static void backward(const A* factors, A /*carry*/, A dout, A /*dstate*/,
                                   A* /*dinput_gates*/, A* dhidden_gates, A* deps) {
    dhidden_gates[0] = dout;
    dhidden_gates[1] = dout * factors[0];
    *deps = dout * factors[1];
  }
};

// The identity: the result is the projection itself.
// In a stochastic GRU it takes the place of Sample when there is no noise, z = loc.  It is a stage
// of its own, and not Sample with eps = 0, because 0 * exp(logvar / 2) is NaN once logvar
// overflows; and it needs only the loc half of the GEMM.
// In a projected LSTM it makes h, of fewer features, from the LSTM's result (Sak et al. 2014;
// proj_size in torch.nn.LSTM).
struct Linear {
  static constexpr StageKind kKind = StageKind::Linear;
  static constexpr const char* kName = "Linear";
  static constexpr int kInputGates = 0, kShared = 0, kHiddenGates = 1, kPre = 1;
  static constexpr bool kCarry = false, kNoise = false, kFactors = false;
  static constexpr bool kCellState = false, kResult = true, kLinear = true;

  template <class A>
  FUSEDRNN_HD static void combine(const A* /*input_gates*/, const A* hidden_gates, A* pre) {
    pre[0] = hidden_gates[0];
  }

  template <class A>
  FUSEDRNN_HD static A forward(const A* pre, A /*unused*/, A* /*factors*/, A* /*state*/) {
    return pre[0];
  }

  template <class A>
  FUSEDRNN_HD static void backward(const A* /*pre*/, A /*carry*/, A dout, A /*dstate*/,
                                   A* /*dinput_gates*/, A* dhidden_gates, A* /*unused*/) {
    dhidden_gates[0] = dout;
  }
};

// Gated recurrent unit (Cho et al. 2014) in torch.nn.GRU's form, the reset gate applied after the
// projection:
//   r = sigmoid(x_r + g_r),  u = sigmoid(x_u + g_u),  n = tanh(x_n + r g_n),  h' = n + u (h - n).
// input_gates: x_r, x_u, x_n.  hidden_gates: g_r, g_u, g_n.  pre: x_r + g_r, x_u + g_u, x_n, g_n.
struct Gru {
  static constexpr StageKind kKind = StageKind::Gru;
  static constexpr const char* kName = "Gru";
  static constexpr int kInputGates = 3, kShared = 2, kHiddenGates = 3, kPre = 4;
  static constexpr bool kCarry = true, kNoise = false, kFactors = false;
  static constexpr bool kCellState = false, kResult = true, kLinear = false;

  template <class A>
  FUSEDRNN_HD static void combine(const A* x, const A* p, A* pre) {
    pre[0] = x[0] + p[0];
    pre[1] = x[1] + p[1];
    pre[2] = x[2];
    pre[3] = p[2];
  }

  template <class A>
  FUSEDRNN_HD static A forward(const A* pre, A h, A* /*factors*/, A* /*state*/) {
    const A r = math::sigmoid(pre[0]);
    const A u = math::sigmoid(pre[1]);
    const A n = math::tanh(A(pre[2] + r * pre[3]));
    return n + u * (h - n);
  }

  template <class A>
  FUSEDRNN_HD static void backward(const A* pre, A h, A dout, A /*dstate*/, A* dx, A* dp, A* dh) {
    A not_r, not_u, dtanh;  // 1 - r, 1 - u, 1 - n^2
    const A r = math::sigmoid(pre[0], not_r);
    const A u = math::sigmoid(pre[1], not_u);
    const A n = math::tanh(A(pre[2] + r * pre[3]), dtanh);
    const A dn = dout * not_u * dtanh;
    dp[0] = dn * (pre[3] * (r * not_r));
    dp[1] = dout * ((h - n) * (u * not_u));
    dp[2] = dn * r;
    dx[0] = dn;
    *dh = dout * u;
  }
};

// Long short-term memory (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000)
// in torch.nn.LSTM's form:
//   i, f, o = sigmoid(.),  g = tanh(.),  c' = f c + i g,  h' = o tanh(c').
// input_gates and hidden_gates: for i, f, g, o.  pre: their sums.  The cell state is c.
struct Lstm {
  static constexpr StageKind kKind = StageKind::Lstm;
  static constexpr const char* kName = "Lstm";
  static constexpr int kInputGates = 4, kShared = 4, kHiddenGates = 4, kPre = 4;
  static constexpr bool kCarry = true, kNoise = false, kFactors = false;
  static constexpr bool kCellState = true, kResult = true, kLinear = false;

  template <class A>
  FUSEDRNN_HD static void combine(const A* x, const A* p, A* pre) {
    for (int k = 0; k < kPre; ++k) pre[k] = x[k] + p[k];
  }

  template <class A>
  FUSEDRNN_HD static A forward(const A* pre, A c, A* /*factors*/, A* state) {
    const A i = math::sigmoid(pre[0]);
    const A f = math::sigmoid(pre[1]);
    const A g = math::tanh(pre[2]);
    const A o = math::sigmoid(pre[3]);
    *state = f * c + i * g;
    return o * math::tanh(*state);
  }

  template <class A>
  FUSEDRNN_HD static void backward(const A* pre, A c, A dout, A dstate, A* /*dx*/, A* dp, A* dc) {
    A not_i, not_f, not_o, dg_tanh, dc_tanh;  // 1 - i, ..., 1 - g^2, 1 - tanh(c')^2
    const A i = math::sigmoid(pre[0], not_i);
    const A f = math::sigmoid(pre[1], not_f);
    const A g = math::tanh(pre[2], dg_tanh);
    const A o = math::sigmoid(pre[3], not_o);
    const A tanh_c = math::tanh(A(f * c + i * g), dc_tanh);
    const A dnew = dstate + dout * o * dc_tanh;
    dp[0] = dnew * (g * (i * not_i));
    dp[1] = dnew * (c * (f * not_f));
    dp[2] = dnew * (i * dg_tanh);
    dp[3] = dout * (tanh_c * (o * not_o));
    *dc = dnew * f;
  }
};

// The number of blocks of input_gates that have a gradient of their own.
template <class Stage>
inline constexpr int kInputGatesAlone = Stage::kInputGates - Stage::kShared;

// Calls f(Stage{}) for the stage that `kind` names.  No other code switches on the kind.
template <class F>
constexpr void dispatch_stage(StageKind kind, const F& f) {
  switch (kind) {
    case StageKind::Sample: return f(Sample{});
    case StageKind::Linear: return f(Linear{});
    case StageKind::Gru: return f(Gru{});
    case StageKind::Lstm: return f(Lstm{});
  }
}

struct StageTraits {
  int input_blocks, shared_blocks, hidden_blocks, pre_blocks;
  bool has_carry, has_noise, has_factors, has_cell_state, is_result, is_linear;
};

constexpr StageTraits traits(StageKind kind) {
  StageTraits t{};
  dispatch_stage(kind, [&](auto stage) {
    using Stage = decltype(stage);
    t = {Stage::kInputGates, Stage::kShared,  Stage::kHiddenGates, Stage::kPre,    Stage::kCarry,
         Stage::kNoise,      Stage::kFactors, Stage::kCellState,   Stage::kResult, Stage::kLinear};
  });
  return t;
}

constexpr const char* name_of(StageKind kind) {
  const char* name = nullptr;
  dispatch_stage(kind, [&](auto stage) { name = decltype(stage)::kName; });
  return name;
}

// The stage where noise is left out.
constexpr StageKind without_noise(StageKind kind) {
  return kind == StageKind::Sample ? StageKind::Linear : kind;
}

}  // namespace fusedrnn
