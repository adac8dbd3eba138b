// Stages in the form of those that Python prints, written by hand, for tests of the loops around
// them; and those of the built-in cells.  Included after stage_loop.h or stage_kernel.h.
#pragma once
#include "../../csrc/cell/printed.h"

namespace fusedrnn::program {

// r = sigmoid(x_r + p_r), u = sigmoid(x_u + p_u), n = tanh(x_n + r p_n), h' = n + u (h - n).
// in: x_r + p_r, x_u + p_u, x_n, p_n, h.
struct Gru {
  static constexpr const char* kName = "gru";
  static constexpr int kIns = 5, kOuts = 1;
  static constexpr In kIn[kIns] = {In::Column, In::Column, In::Column, In::Column, In::Column};
  static constexpr Out kOut[kOuts] = {Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    const A r = math::sigmoid(in[0]);
    const A u = math::sigmoid(in[1]);
    const A n = math::tanh(A(in[2] + r * in[3]));
    out[0] = n + u * (in[4] - n);
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    A not_r, not_u, dtanh;
    const A r = math::sigmoid(in[0], not_r);
    const A u = math::sigmoid(in[1], not_u);
    const A n = math::tanh(A(in[2] + r * in[3]), dtanh);
    const A dn = dout[0] * not_u * dtanh;
    din[0] = dn * (in[3] * (r * not_r));
    din[1] = dout[0] * ((in[4] - n) * (u * not_u));
    din[2] = dn;
    din[3] = dn * r;
    din[4] = dout[0] * u;
  }
};

// c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c').  in: i, f, g, o, c.  out: h',
// c'.
struct Lstm {
  static constexpr const char* kName = "lstm";
  static constexpr int kIns = 5, kOuts = 2;
  static constexpr In kIn[kIns] = {In::Column, In::Column, In::Column, In::Column, In::Column};
  static constexpr Out kOut[kOuts] = {Out::Column, Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[1] = math::sigmoid(in[1]) * in[4] + math::sigmoid(in[0]) * math::tanh(in[2]);
    out[0] = math::sigmoid(in[3]) * math::tanh(out[1]);
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    A not_i, not_f, not_o, dg, dc;
    const A i = math::sigmoid(in[0], not_i);
    const A f = math::sigmoid(in[1], not_f);
    const A g = math::tanh(in[2], dg);
    const A o = math::sigmoid(in[3], not_o);
    const A tanh_c = math::tanh(A(f * in[4] + i * g), dc);
    const A dnew = dout[1] + dout[0] * o * dc;
    din[0] = dnew * (g * (i * not_i));
    din[1] = dnew * (in[4] * (f * not_f));
    din[2] = dnew * (i * dg);
    din[3] = dout[0] * (tanh_c * (o * not_o));
    din[4] = dnew * f;
  }
};

// z = loc + eps exp(logvar / 2).  in: loc, logvar, eps.
struct Sample {
  static constexpr const char* kName = "sample";
  static constexpr int kIns = 3, kOuts = 1;
  static constexpr In kIn[kIns] = {In::Column, In::Column, In::Normal};
  static constexpr Out kOut[kOuts] = {Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = in[0] + in[2] * math::exp(A(in[1] * 0.5f));
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    din[0] = dout[0];
    din[1] = dout[0] * in[2] * math::exp(A(in[1] * 0.5f)) * 0.5f;
  }
};

// A normal and a uniform number by themselves.
struct Draws {
  static constexpr const char* kName = "draws";
  static constexpr int kIns = 2, kOuts = 2;
  static constexpr In kIn[kIns] = {In::Normal, In::Uniform};
  static constexpr Out kOut[kOuts] = {Out::Column, Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = in[0];
    out[1] = in[1];
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A*, const A*, A*) {}
};

// The sums that a group's mean and variance are made of.  in: x.  out: sums of x and of x^2.
struct Moments {
  static constexpr const char* kName = "moments";
  static constexpr int kIns = 1, kOuts = 2;
  static constexpr In kIn[kIns] = {In::Column};
  static constexpr Out kOut[kOuts] = {Out::Sum, Out::Sum};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = in[0];
    out[1] = in[0] * in[0];
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    din[0] = dout[0] + dout[1] * 2.0f * in[0];
  }
};

// y = (x - mean) scale weight.  in: x, mean (of a group), scale (of a group), weight (of a column).
struct Normalize {
  static constexpr const char* kName = "normalize";
  static constexpr int kIns = 4, kOuts = 1;
  static constexpr In kIn[kIns] = {In::Column, In::Group, In::Group, In::Column};
  static constexpr Out kOut[kOuts] = {Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = (in[0] - in[1]) * in[2] * in[3];
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    const A d = dout[0] * in[3];
    din[0] = d * in[2];
    din[1] = -din[0];
    din[2] = d * (in[0] - in[1]);
    din[3] = dout[0] * (in[0] - in[1]) * in[2];
  }
};

// in: x.  out: the largest of each group, and its place.
struct Largest {
  static constexpr const char* kName = "largest";
  static constexpr int kIns = 1, kOuts = 2;
  static constexpr In kIn[kIns] = {In::Column};
  static constexpr Out kOut[kOuts] = {Out::Max, Out::ArgMax};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = in[0];
    out[1] = in[0];
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A*, const A*, A* din) {
    din[0] = number<A>(0);
  }
};

// The second piece of a softmax.  in: x, the largest of its group.  out: e = exp(x - largest), and
// the group's sum of e.
struct Exponentials {
  static constexpr const char* kName = "exponentials";
  static constexpr int kIns = 2, kOuts = 2;
  static constexpr In kIn[kIns] = {In::Column, In::Group};
  static constexpr Out kOut[kOuts] = {Out::Column, Out::Sum};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = math::exp(A(in[0] - in[1]));
    out[1] = out[0];
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    din[0] = (dout[0] + dout[1]) * math::exp(A(in[0] - in[1]));
    din[1] = -din[0];
  }
};

// A one-hot row with straight-through gradient.  in: the place that is drawn (of a group), p, the
// column's own place.
struct OneHot {
  static constexpr const char* kName = "one_hot";
  static constexpr int kIns = 3, kOuts = 1;
  static constexpr In kIn[kIns] = {In::Group, In::Column, In::Index};
  static constexpr Out kOut[kOuts] = {Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    const A hot = math::select(in[0] == in[2], number<A>(1), number<A>(0));
    out[0] = hot + (in[1] - in[1]);
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A*, const A* dout, A* din) {
    din[0] = number<A>(0);
    din[1] = dout[0];
  }
};

// Inverted dropout with probability 1/4.  in: x, a uniform number.
struct Dropout {
  static constexpr const char* kName = "dropout";
  static constexpr int kIns = 2, kOuts = 1;
  static constexpr In kIn[kIns] = {In::Column, In::Uniform};
  static constexpr Out kOut[kOuts] = {Out::Column};
  template <class A>
  FUSEDRNN_HD static A scale(A u) {
    return math::select(u < 0.25f, number<A>(0), number<A>(1 / 0.75));
  }
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = in[0] * scale(in[1]);
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    din[0] = dout[0] * scale(in[1]);
  }
};

// Groups of different sizes in one stage.  in: x, a (of groups), b (of other groups).  out: x a b,
// and its sums over groups of a third size.
struct ManyGroups {
  static constexpr const char* kName = "many_groups";
  static constexpr int kIns = 3, kOuts = 2;
  static constexpr In kIn[kIns] = {In::Column, In::Group, In::Group};
  static constexpr Out kOut[kOuts] = {Out::Column, Out::Sum};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = in[0] * in[1] * in[2];
    out[1] = out[0];
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    const A d = dout[0] + dout[1];
    din[0] = d * in[1] * in[2];
    din[1] = d * in[0] * in[2];
    din[2] = d * in[0] * in[1];
  }
};

struct BuiltInSample : Printed<fusedrnn::Sample> {
  static constexpr const char* kName = "sample_of_a_layer";
};
struct BuiltInLinear : Printed<fusedrnn::Linear> {
  static constexpr const char* kName = "linear_of_a_layer";
};
struct BuiltInGru : Printed<fusedrnn::Gru> {
  static constexpr const char* kName = "gru_of_a_layer";
};
struct BuiltInLstm : Printed<fusedrnn::Lstm> {
  static constexpr const char* kName = "lstm_of_a_layer";
};

// Calls f(stage) for each stage, in the order of their numbers.
template <class F>
void for_each_stage(const F& f) {
  f(Gru{});
  f(Lstm{});
  f(Sample{});
  f(Draws{});
  f(Moments{});
  f(Normalize{});
  f(Largest{});
  f(Exponentials{});
  f(OneHot{});
  f(Dropout{});
  f(ManyGroups{});
  f(BuiltInSample{});
  f(BuiltInLinear{});
  f(BuiltInGru{});
  f(BuiltInLstm{});
}

}  // namespace fusedrnn::program
