// What happens to carries between two steps: which state a step reads, where a row has ended, and
// where the gradients of states go.  As in step/step.h, these structs are the interface between the
// driver and a backend, whose loops call the functions here for each row.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../base/hd.h"
#include "../base/scalar.h"
#include "../step/step.h"

namespace fusedrnn::program {

// From a storage type to the type it is computed in, or back.
template <class To, class From>
FUSEDRNN_HD To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<To, Acc<From>>) {
    return widen(x);
  } else {
    return narrow<To>(x);
  }
}

// What a carry is set to where `reset` is set.
enum class ResetKind : int64_t {
  Zero,
  Rows,   // `data` of each row of the batch
  Steps,  // `data` of each step and row
  Keep    // nothing: the carry stays as it is
};
template <class P>
struct ResetTo {
  ResetKind kind;
  P* data;
  int64_t row_stride, step_stride;  // step_stride: 0 unless kind is Steps

  FUSEDRNN_HD P* at(Place place) const {
    return data + int64_t(place.t) * step_stride + int64_t(place.b) * row_stride;
  }
};

// The places of rows: row r is entry r % batch of the batch in step first_t + r / batch.
struct Places {
  int64_t first_t, batch;

  FUSEDRNN_HD Place of(int64_t row) const {
    const Place place = Place::of_row(row, batch);
    return place.after(int(first_t));
  }
};

// The states before steps, as the steps read them.  P: the type in which they are after steps.
template <class T, class P, class O>
struct CarryBefore {
  int64_t width;
  Places places;
  Mask mask;
  const T* initial;  // [batch, width]
  const P* after;  // of step 0; the state of row b after step t is at t * step_stride + b * stride
  int64_t stride, step_stride;
  ResetTo<const T> reset_to;
  O* out;  // [rows, width]

  // Calls f with the memory of a row's state, or with null if it is zero.
  template <class F>
  FUSEDRNN_HD void with_source(int64_t row, const F& f) const {
    const Place at = places.of(row);
    const T* zero = nullptr;
    if (!mask.is_active(at)) return f(zero);
    if (reset_to.kind != ResetKind::Keep && mask.is_reset(at)) {
      return f(reset_to.kind == ResetKind::Zero ? zero : reset_to.at(at));
    }
    if (mask.is_first(at)) return f(initial + int64_t(at.b) * width);
    const int64_t before = int64_t(at.t) - mask.direction;
    f(after + before * step_stride + int64_t(at.b) * stride);
  }
};

// The states of rows after the last step that they take.
template <class T, class P>
struct CarryLast {
  int64_t width, t;
  Mask mask;
  const P* after;  // step t, [rows, width]
  int64_t stride;
  T* last;  // [batch, width]

  FUSEDRNN_HD bool is_wanted(int64_t row) const {
    const Place at{uint32_t(t), uint32_t(row)}, next = at.after(mask.direction);
    return mask.is_active(at) && (next.t >= mask.seq_len || !mask.is_active(next));
  }
};

// From the gradients of the states before step t to those after the step before it, or of the
// initial states, or of what a reset has set them to.  Other rows keep what they have.
template <class T>
struct CarryGradient {
  using A = Acc<T>;
  int64_t width, t;
  Mask mask;
  const A* before;  // [rows, width]
  A* after;         // [batch, width]
  ResetKind reset_kind;
  A* reset_rows;   // [batch, width], added to; or null
  T* reset_steps;  // [batch, width] of step t; or null

  FUSEDRNN_HD Place place(int64_t row) const { return {uint32_t(t), uint32_t(row)}; }
  FUSEDRNN_HD bool takes_step(int64_t row) const { return mask.is_active(place(row)); }
  FUSEDRNN_HD bool is_reset(int64_t row) const {
    return reset_kind != ResetKind::Keep && mask.is_reset(place(row));
  }
  FUSEDRNN_HD void unit(int64_t row, int64_t column, bool is_reset) const {
    const int64_t i = row * width + column;
    const A gradient = before[i];
    after[i] = is_reset ? A(0) : gradient;
    if (!is_reset) return;
    if (reset_rows != nullptr) reset_rows[i] += gradient;
    if (reset_steps != nullptr) reset_steps[i] = convert<T>(gradient);
  }
};

// The gradient of a value as a part of the carry after step t: zero in rows that do not take it.
template <class A>
struct CarryPart {
  int64_t width, t;
  Mask mask;
  const A* from;
  int64_t from_stride;
  A* out;
  int64_t stride;
  bool adds;

  FUSEDRNN_HD void unit(int64_t row, int64_t column, bool takes_step) const {
    const A gradient = takes_step ? from[row * from_stride + column] : A(0);
    A& to = out[row * stride + column];
    to = adds ? to + gradient : gradient;
  }
  FUSEDRNN_HD bool takes_step(int64_t row) const {
    return mask.is_active({uint32_t(t), uint32_t(row)});
  }
};

}  // namespace fusedrnn::program
