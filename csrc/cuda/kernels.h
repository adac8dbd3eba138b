// The bodies of the GPU's kernels, one object per kernel: body(i) is the work of thread i.  Any
// compiler can compile them.  They are included by the one source that defines `launch`, which runs
// a body for all i, on a GPU (launches.cu) or in a loop (tests/emulator).
//
// Longer than 350 lines, because each body is a few lines, and all bodies load and store lanes in
// the same way.
#pragma once
#include <type_traits>

#include "../base/philox.h"
#include "../step/unit.h"
#include "launches.h"

namespace fusedrnn {
namespace cuda {

template <class Body>
Launch launch(const char* kernel, const Body& body, int64_t count, Stream stream);

// The number of neighbours in a row that one thread computes: 16 bytes of float, and the number of
// normals from one call of Philox.
constexpr int kLanes = 4;

template <class A>
struct Pack {
  A lane[kLanes];

  FUSEDRNN_HD friend Pack operator+(const Pack& a, const Pack& b) {
    Pack sum;
    for (int i = 0; i < kLanes; ++i) sum.lane[i] = a.lane[i] + b.lane[i];
    return sum;
  }
  FUSEDRNN_HD friend Pack mix(const Pack& k, A rest, const Pack& a, const Pack& b) {
    Pack mixed;
    for (int i = 0; i < kLanes; ++i) mixed.lane[i] = mix(k.lane[i], rest, a.lane[i], b.lane[i]);
    return mixed;
  }
  FUSEDRNN_HD friend Pack unless_one(const Pack& k, const Pack& x) {
    Pack left;
    for (int i = 0; i < kLanes; ++i) left.lane[i] = unless_one(k.lane[i], x.lane[i]);
    return left;
  }
};

// a / b, by 32-bit division if it suffices: that takes a GPU about 20 instructions, 64-bit division
// 100.
FUSEDRNN_HD int64_t divide(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

// kLanes neighbours in memory, read and written 16 bytes at a time, or all at once if they are
// smaller.
template <class P>
struct alignas(sizeof(P) * kLanes < 16 ? sizeof(P) * kLanes : 16) Chunk {
  P lane[kLanes];

  FUSEDRNN_HD void store(P* p) const {
#if defined(__CUDA_ARCH__)  // here the compiler would split the assignment below into single lanes
    uint32_t w[sizeof(Chunk) / 4];
    memcpy(w, lane, sizeof lane);
    if constexpr (sizeof(Chunk) == 8) {
      __stwb(reinterpret_cast<uint2*>(p), make_uint2(w[0], w[1]));
    } else {
      for (size_t k = 0; k < sizeof(Chunk) / 16; ++k) {
        __stwb(reinterpret_cast<uint4*>(p) + k,
               make_uint4(w[4 * k], w[4 * k + 1], w[4 * k + 2], w[4 * k + 3]));
      }
    }
#else
    *reinterpret_cast<Chunk*>(p) = *this;
#endif
  }
};

// kAligned: there are all kLanes neighbours, at addresses aligned for Chunk.  Otherwise only the
// first `n` exist.
template <class A, bool kAligned>
struct Unit {
  using Value = Pack<A>;
  int n;

  template <class P>
  FUSEDRNN_HD Value load(const P* p) const {
    Value value;
    if constexpr (kAligned) {
      const Chunk<P> chunk = *reinterpret_cast<const Chunk<P>*>(p);
      for (int i = 0; i < kLanes; ++i) value.lane[i] = widen(chunk.lane[i]);
    } else {
      for (int i = 0; i < kLanes; ++i) value.lane[i] = i < n ? widen(p[i]) : A(0);
    }
    return value;
  }
  template <class P>
  FUSEDRNN_HD void store(P* p, const Value& value) const {
    if constexpr (kAligned) {
      Chunk<P> chunk;
      for (int i = 0; i < kLanes; ++i) chunk.lane[i] = narrow<P>(value.lane[i]);
      chunk.store(p);
    } else {
      for (int i = 0; i < kLanes; ++i) {
        if (i < n) p[i] = narrow<P>(value.lane[i]);
      }
    }
  }
  template <class T>
  FUSEDRNN_HD Value round_to(const Value& value) const {
    Value rounded;
    for (int i = 0; i < kLanes; ++i) rounded.lane[i] = widen(narrow<T>(value.lane[i]));
    return rounded;
  }
  FUSEDRNN_HD Value kept(const Zoneout<A>& zoneout, const typename Zoneout<A>::Chance& chance,
                         uint32_t stream, Place at, int64_t column) const {
    Value value;
    zoneout.kept(chance, stream, at, uint32_t(column / kLanes), value.lane);
    return value;
  }
  template <class T>
  FUSEDRNN_HD Value drawn(const Noise<T>& noise, Place at, int64_t column) const {
    Value value;
    noise.draw(at, uint32_t(column / kLanes), value.lane);
    return value;
  }
};

}  // namespace cuda

// Applies a stage to a pack of numbers, lane by lane.
template <class Stage, class A>
struct Lanes<Stage, cuda::Pack<A>> {
  using V = cuda::Pack<A>;
  static constexpr int kInputGates = kInputGatesAlone<Stage> > 0 ? kInputGatesAlone<Stage> : 1;

  FUSEDRNN_HD static V forward(const V* pre, const V& input, V* factors, V* state) {
    V out;
    FUSEDRNN_UNROLL
    for (int i = 0; i < cuda::kLanes; ++i) {
      A p[Stage::kPre], f[Stage::kPre];
      for (int k = 0; k < Stage::kPre; ++k) p[k] = pre[k].lane[i];
      out.lane[i] = Stage::forward(p, input.lane[i], f, &state->lane[i]);
      if constexpr (Stage::kFactors) {
        for (int k = 0; k < Stage::kPre; ++k) factors[k].lane[i] = f[k];
      }
    }
    return out;
  }

  FUSEDRNN_HD static void backward(const V* pre, const V& carry, const V& dout, const V& dstate,
                                   V* dinput_gates, V* dhidden_gates, V* dinput) {
    FUSEDRNN_UNROLL
    for (int i = 0; i < cuda::kLanes; ++i) {
      A p[Stage::kPre], ds[kInputGates], dp[Stage::kHiddenGates], di = 0;
      for (int k = 0; k < Stage::kPre; ++k) p[k] = pre[k].lane[i];
      Stage::backward(p, carry.lane[i], dout.lane[i], dstate.lane[i], ds, dp, &di);
      for (int k = 0; k < kInputGatesAlone<Stage>; ++k) dinput_gates[k].lane[i] = ds[k];
      for (int k = 0; k < Stage::kHiddenGates; ++k) dhidden_gates[k].lane[i] = dp[k];
      dinput->lane[i] = di;
    }
  }
};

namespace cuda {

// Calls f(row, column, unit) for group i of kLanes neighbours, counted along the rows.
template <class A, bool kAligned, class F>
FUSEDRNN_HD void with_unit(int64_t i, int64_t width, const F& f) {
  const int64_t groups = (width + kLanes - 1) / kLanes;
  const int64_t row = divide(i, groups), column = (i - row * groups) * kLanes;
  const int64_t left = width - column;
  f(row, column, Unit<A, kAligned>{left < kLanes ? int(left) : kLanes});
}

template <class Stage, class T, bool kAligned>
struct ForwardBody {
  Forward<T> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    with_unit<Acc<T>, kAligned>(i, step.width, *this);
  }
  template <class U>
  FUSEDRNN_HD void operator()(int64_t row, int64_t column, const U& unit) const {
    const Place at = Place::of_row(step.first_row + row + replay_offset_of(step), step.mask.batch);
    forward_unit<Stage>(step, row, at, column, unit);
  }
};

template <class Stage, class T, bool kAligned>
struct BackwardBody {
  Backward<T> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    with_unit<Acc<T>, kAligned>(i, step.width, *this);
  }
  template <class U>
  FUSEDRNN_HD void operator()(int64_t row, int64_t column, const U& unit) const {
    const Place at = Place::of_row(step.first_row + row + replay_offset_of(step), step.mask.batch);
    backward_unit<Stage>(step, row, at, column, unit);
  }
};

template <class T, bool kAligned>
struct GatherBody {
  GatherStep<T, T> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    with_unit<Acc<T>, kAligned>(i, step.width, *this);
  }
  template <class U>
  FUSEDRNN_HD void operator()(int64_t row, int64_t column, const U& unit) const {
    const Place at = Place::of_row(step.first_row + row, step.mask.batch);
    gather_unit(step, row, at, column, unit);
  }
};

template <class T, bool kAligned>
struct ClearBody {
  ClearStep<T> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    with_unit<Acc<T>, kAligned>(i, step.width, *this);
  }
  template <class U>
  FUSEDRNN_HD void operator()(int64_t row, int64_t column, const U& unit) const {
    const Place at = Place::of_row(step.first_row + row, step.mask.batch);
    clear_unit(step, row, at, column, unit);
  }
};

template <class T>
struct DropoutBody {
  DropoutStep<T> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    const int64_t groups = (step.width + kLanes - 1) / kLanes, row = divide(i, groups);
    dropout_unit(step, row, (i - row * groups) * kLanes);
  }
};

template <class Distribution, class T, bool kAligned>
struct DrawBody {
  DrawStep<T> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    with_unit<Acc<T>, kAligned>(i, step.width, *this);
  }
  template <class U>
  FUSEDRNN_HD void operator()(int64_t row, int64_t column, const U& unit) const {
    const Place at = Place::of_row(row, step.batch);
    Pack<Acc<T>> drawn;
    draw4<Distribution>(uint64_t(*step.seed), step.time(at), at.b, uint32_t(column / kLanes),
                        uint32_t(step.stream), drawn.lane);
    unit.store(step.out + row * step.width + column, drawn);
  }
};

// A matrix of `sums` and a column of it, from the column's number among all matrices.
struct SummedColumn {
  int matrix;
  int64_t column;

  template <class T>
  FUSEDRNN_HD SummedColumn(const ColumnSums<T>& sums, int64_t of_all) : matrix(0), column(of_all) {
    while (column >= sums.columns[matrix]) column -= sums.columns[matrix++];
  }
};

template <class T>
struct PartialSumBody {
  ColumnSums<T> sums;
  int64_t all_columns;
  Acc<T>* partial;
  FUSEDRNN_HD void operator()(int64_t i) const {
    const int64_t slab = divide(i, all_columns);
    const SummedColumn of(sums, i - slab * all_columns);
    const int64_t first = slab * kSumRows, left = sums.rows - first;
    const int64_t stride = sums.row_stride[of.matrix];
    const T* at = sums.data[of.matrix] + first * stride + of.column;
    Acc<T> sum = 0;
    for (int64_t r = 0; r < (left < kSumRows ? left : kSumRows); ++r) sum += widen(at[r * stride]);
    partial[i] = sum;
  }
};

template <class T>
struct TotalSumBody {
  ColumnSums<T> sums;
  int64_t all_columns, slabs;
  const Acc<T>* partial;
  FUSEDRNN_HD void operator()(int64_t i) const {
    const SummedColumn of(sums, i);
    Acc<T> total = 0;
    for (int64_t s = 0; s < slabs; ++s) total += partial[s * all_columns + i];
    Acc<T>& sum = sums.sum[of.matrix][of.column];
    sum = sums.accumulate ? sum + total : total;
  }
};

struct SetBody {
  int64_t *at, value;
  FUSEDRNN_HD void operator()(int64_t) const { *at = value; }
};

template <class P>
bool aligned(const P* p) {
  return reinterpret_cast<uintptr_t>(p) % alignof(Chunk<P>) == 0;
}
template <class P>
bool aligned(const RowView<P>& rows) {
  return aligned(rows.data) && rows.stride % kLanes == 0;
}
template <class... P>
bool all_aligned(int64_t width, const P&... arrays) {
  return width % kLanes == 0 && (aligned(arrays) && ...);
}
template <class T>
bool all_aligned(const Forward<T>& s) {
  return all_aligned(s.width, s.pre, s.input_gates, s.input_bias, s.hidden_gates, s.hidden_bias,
                     s.carry, s.h, s.noise.eps, s.operand, s.output, s.carry_out, s.saved_gates,
                     s.factors);
}
template <class T>
bool all_aligned(const Backward<T>& s) {
  return all_aligned(s.width, s.pre, s.input_gates, s.input_bias, s.hidden_gates, s.hidden_bias,
                     s.carry, s.cell_state, s.dout, s.grad_output, s.dinput_gates, s.dhidden_gates,
                     s.dcarry, s.deps);
}
template <class T>
bool all_aligned(const GatherStep<T, T>& s) {
  return all_aligned(s.width, s.before, s.hx, s.h);
}
template <class T>
bool all_aligned(const ClearStep<T>& s) {
  return all_aligned(s.width, s.x);
}

template <class T>
bool all_aligned(const DrawStep<T>& s) {
  return all_aligned(s.width, s.out);
}

inline const char* name_of(StageKind kind, bool is_forward) {
  switch (kind) {
    case StageKind::Sample: return is_forward ? "sample_forward" : "sample_backward";
    case StageKind::Linear: return is_forward ? "linear_forward" : "linear_backward";
    case StageKind::Gru: return is_forward ? "gru_forward" : "gru_backward";
    case StageKind::Lstm: return is_forward ? "lstm_forward" : "lstm_backward";
  }
  return "";
}

template <class Aligned, class Ragged, class Step>
Launch launch_units(const char* kernel, const Step& step, int64_t rows, Stream stream) {
  const int64_t count = rows * ((step.width + kLanes - 1) / kLanes);
  return all_aligned(step) ? launch(kernel, Aligned{step}, count, stream)
                           : launch(kernel, Ragged{step}, count, stream);
}

template <template <class, class, bool> class Body, class T, class Step>
Launch launch_step(const char* kernel, StageKind kind, const Step& step, int64_t rows,
                   Stream stream) {
  Launch launched{};
  dispatch_stage(kind, [&](auto stage) {
    using Stage = decltype(stage);
    launched =
        launch_units<Body<Stage, T, true>, Body<Stage, T, false>>(kernel, step, rows, stream);
  });
  return launched;
}

template <class T>
Launch gather(const GatherStep<T, T>& step, int64_t rows, Stream stream) {
  return launch_units<GatherBody<T, true>, GatherBody<T, false>>("gather", step, rows, stream);
}

template <class T>
Launch clear(const ClearStep<T>& step, int64_t rows, Stream stream) {
  return launch_units<ClearBody<T, true>, ClearBody<T, false>>("clear", step, rows, stream);
}

template <class T>
Launch forward(StageKind kind, const Forward<T>& step, int64_t rows, Stream stream) {
  return launch_step<ForwardBody, T>(name_of(kind, true), kind, step, rows, stream);
}

template <class T>
Launch backward(StageKind kind, const Backward<T>& step, int64_t rows, Stream stream) {
  return launch_step<BackwardBody, T>(name_of(kind, false), kind, step, rows, stream);
}

template <class T>
Launch dropout(const DropoutStep<T>& step, int64_t rows, Stream stream) {
  const int64_t count = rows * ((step.width + kLanes - 1) / kLanes);
  return launch("dropout", DropoutBody<T>{step}, count, stream);
}

template <class T>
Launch draw(const DrawStep<T>& step, int64_t rows, Stream stream) {
  Launch launched{};
  dispatch_distribution<T>(step.distribution, [&](auto distribution) {
    using D = decltype(distribution);
    launched =
        launch_units<DrawBody<D, T, true>, DrawBody<D, T, false>>("draw", step, rows, stream);
  });
  return launched;
}

template <class T>
Launch column_sums(const ColumnSums<T>& sums, Acc<T>* partial, Stream stream) {
  const int64_t slabs = (sums.rows + kSumRows - 1) / kSumRows, columns = sums.all_columns();
  const Launch first = launch("column_sums_partial", PartialSumBody<T>{sums, columns, partial},
                              slabs * columns, stream);
  if (first.error != 0) return first;
  return launch("column_sums_total", TotalSumBody<T>{sums, columns, slabs, partial}, columns,
                stream);
}

Launch set_replay_offset(int64_t* replay_offset, int64_t value, Stream stream) {
  return launch("set_replay_offset", SetBody{replay_offset, value}, 1, stream);
}

template Launch forward<float>(StageKind, const Forward<float>&, int64_t, Stream);
template Launch backward<float>(StageKind, const Backward<float>&, int64_t, Stream);
template Launch gather<float>(const GatherStep<float, float>&, int64_t, Stream);
template Launch clear<float>(const ClearStep<float>&, int64_t, Stream);
template Launch dropout<float>(const DropoutStep<float>&, int64_t, Stream);
template Launch draw<float>(const DrawStep<float>&, int64_t, Stream);
template Launch column_sums<float>(const ColumnSums<float>&, Acc<float>*, Stream);
template Launch forward<double>(StageKind, const Forward<double>&, int64_t, Stream);
template Launch backward<double>(StageKind, const Backward<double>&, int64_t, Stream);
template Launch gather<double>(const GatherStep<double, double>&, int64_t, Stream);
template Launch clear<double>(const ClearStep<double>&, int64_t, Stream);
template Launch dropout<double>(const DropoutStep<double>&, int64_t, Stream);
template Launch draw<double>(const DrawStep<double>&, int64_t, Stream);
template Launch column_sums<double>(const ColumnSums<double>&, Acc<double>*, Stream);
template Launch forward<BFloat16>(StageKind, const Forward<BFloat16>&, int64_t, Stream);
template Launch backward<BFloat16>(StageKind, const Backward<BFloat16>&, int64_t, Stream);
template Launch gather<BFloat16>(const GatherStep<BFloat16, BFloat16>&, int64_t, Stream);
template Launch clear<BFloat16>(const ClearStep<BFloat16>&, int64_t, Stream);
template Launch dropout<BFloat16>(const DropoutStep<BFloat16>&, int64_t, Stream);
template Launch draw<BFloat16>(const DrawStep<BFloat16>&, int64_t, Stream);
template Launch column_sums<BFloat16>(const ColumnSums<BFloat16>&, Acc<BFloat16>*, Stream);
template Launch forward<Half>(StageKind, const Forward<Half>&, int64_t, Stream);
template Launch backward<Half>(StageKind, const Backward<Half>&, int64_t, Stream);
template Launch gather<Half>(const GatherStep<Half, Half>&, int64_t, Stream);
template Launch clear<Half>(const ClearStep<Half>&, int64_t, Stream);
template Launch dropout<Half>(const DropoutStep<Half>&, int64_t, Stream);
template Launch draw<Half>(const DrawStep<Half>&, int64_t, Stream);
template Launch column_sums<Half>(const ColumnSums<Half>&, Acc<Half>*, Stream);

}  // namespace cuda
}  // namespace fusedrnn
