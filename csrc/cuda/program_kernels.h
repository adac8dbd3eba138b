// The bodies of the kernels between the steps of programs, one thread for each number: see
// kernels.h.  They move numbers, and are bound by memory: neighbouring threads read neighbours.
#pragma once
#include "kernels.h"
#include "program_launches.h"

namespace fusedrnn::cuda {

// Number i of rows of `width` columns.
struct NumberOfRow {
  int64_t row, column;

  FUSEDRNN_HD NumberOfRow(int64_t i, int64_t width)
      : row(divide(i, width)), column(i - row * width) {}
};

template <class T, class P, class To>
struct CarryBeforeBody {
  program::CarryBefore<T, P, To> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    const NumberOfRow at(i, step.width);
    step.with_source(at.row, [&](const auto* from) {
      step.out[i] = from == nullptr ? To{} : program::convert<To>(from[at.column]);
    });
  }
};

template <class T, class P>
struct CarryLastBody {
  program::CarryLast<T, P> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    const NumberOfRow at(i, step.width);
    if (!step.is_wanted(at.row)) return;
    step.last[i] = program::convert<T>(step.after[at.row * step.stride + at.column]);
  }
};

template <class T>
struct CarryGradientBody {
  program::CarryGradient<T> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    const NumberOfRow at(i, step.width);
    if (step.takes_step(at.row)) step.unit(at.row, at.column, step.is_reset(at.row));
  }
};

template <class A>
struct CarryPartBody {
  program::CarryPart<A> step;
  FUSEDRNN_HD void operator()(int64_t i) const {
    const NumberOfRow at(i, step.width);
    step.unit(at.row, at.column, step.takes_step(at.row));
  }
};

template <class T, class P, class To>
Launch carry_before(const program::CarryBefore<T, P, To>& step, int64_t rows, Stream stream) {
  return launch("carry_before", CarryBeforeBody<T, P, To>{step}, rows * step.width, stream);
}
template <class T, class P>
Launch carry_last(const program::CarryLast<T, P>& step, int64_t rows, Stream stream) {
  return launch("carry_last", CarryLastBody<T, P>{step}, rows * step.width, stream);
}
template <class T>
Launch carry_gradient(const program::CarryGradient<T>& step, int64_t rows, Stream stream) {
  return launch("carry_gradient", CarryGradientBody<T>{step}, rows * step.width, stream);
}
template <class A>
Launch carry_part(const program::CarryPart<A>& step, int64_t rows, Stream stream) {
  return launch("carry_part", CarryPartBody<A>{step}, rows * step.width, stream);
}

// Carries in sequences are of the tensors' type, the others of the wider one.
template Launch carry_before(const program::CarryBefore<float, float, float>&, int64_t, Stream);
template Launch carry_last(const program::CarryLast<float, float>&, int64_t, Stream);
template Launch carry_gradient(const program::CarryGradient<float>&, int64_t, Stream);
template Launch carry_part(const program::CarryPart<float>&, int64_t, Stream);
template Launch carry_before(const program::CarryBefore<double, double, double>&, int64_t, Stream);
template Launch carry_last(const program::CarryLast<double, double>&, int64_t, Stream);
template Launch carry_gradient(const program::CarryGradient<double>&, int64_t, Stream);
template Launch carry_part(const program::CarryPart<double>&, int64_t, Stream);
template Launch carry_before(const program::CarryBefore<BFloat16, BFloat16, BFloat16>&, int64_t,
                             Stream);
template Launch carry_before(const program::CarryBefore<BFloat16, float, float>&, int64_t, Stream);
template Launch carry_last(const program::CarryLast<BFloat16, BFloat16>&, int64_t, Stream);
template Launch carry_last(const program::CarryLast<BFloat16, float>&, int64_t, Stream);
template Launch carry_gradient(const program::CarryGradient<BFloat16>&, int64_t, Stream);
template Launch carry_before(const program::CarryBefore<Half, Half, Half>&, int64_t, Stream);
template Launch carry_before(const program::CarryBefore<Half, float, float>&, int64_t, Stream);
template Launch carry_last(const program::CarryLast<Half, Half>&, int64_t, Stream);
template Launch carry_last(const program::CarryLast<Half, float>&, int64_t, Stream);
template Launch carry_gradient(const program::CarryGradient<Half>&, int64_t, Stream);

}  // namespace fusedrnn::cuda
