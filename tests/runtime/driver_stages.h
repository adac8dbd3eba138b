// More stages for tests of the driver, as those of stages.h.
#pragma once

namespace fusedrnn::program {

// y = tanh(x + b).
struct Tanh {
  static constexpr int kIns = 2, kOuts = 1;
  static constexpr In kIn[kIns] = {In::Column, In::Column};
  static constexpr Out kOut[kOuts] = {Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = math::tanh(A(in[0] + in[1]));
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    A slope;
    math::tanh(A(in[0] + in[1]), slope);
    din[0] = din[1] = dout[0] * slope;
  }
};

// h' = tanh(p + c w) + g, c' = c / 2 + h'.  in: p, c, w, g (of a group).  out: h', c'.
struct Leaky {
  static constexpr int kIns = 4, kOuts = 2;
  static constexpr In kIn[kIns] = {In::Column, In::Column, In::Column, In::Group};
  static constexpr Out kOut[kOuts] = {Out::Column, Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = math::tanh(A(in[0] + in[1] * in[2])) + in[3];
    out[1] = in[1] * 0.5f + out[0];
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    A slope;
    math::tanh(A(in[0] + in[1] * in[2]), slope);
    const A dh = dout[0] + dout[1];
    din[0] = dh * slope;
    din[1] = din[0] * in[2] + dout[1] * 0.5f;
    din[2] = din[0] * in[1];
    din[3] = dh;
  }
};

// From the sums of x and x^2 of groups of 4: mean and 1 / sqrt(variance + 1/8).
struct Scale {
  static constexpr int kIns = 2, kOuts = 2;
  static constexpr In kIn[kIns] = {In::Column, In::Column};
  static constexpr Out kOut[kOuts] = {Out::Column, Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = in[0] * 0.25f;
    out[1] = math::rsqrt(A(in[1] * 0.25f - out[0] * out[0] + 0.125f));
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    const A mean = in[0] * 0.25f, scale = math::rsqrt(A(in[1] * 0.25f - mean * mean + 0.125f));
    const A dvariance = dout[1] * (scale * scale * scale) * -0.5f;
    din[0] = (dout[0] - dvariance * 2.0f * mean) * 0.25f;
    din[1] = dvariance * 0.25f;
  }
};

// y = a b.
struct Times {
  static constexpr int kIns = 2, kOuts = 1;
  static constexpr In kIn[kIns] = {In::Column, In::Column};
  static constexpr Out kOut[kOuts] = {Out::Column};
  template <class A>
  FUSEDRNN_HD static void forward(const A* in, A* out) {
    out[0] = in[0] * in[1];
  }
  template <class A>
  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {
    din[0] = dout[0] * in[1];
    din[1] = dout[0] * in[0];
  }
};

}  // namespace fusedrnn::program
