// What the loops around a generated stage have in common on the CPU and on a GPU.
//
// A generated stage is a struct
//   static constexpr int kIns = 3, kOuts = 2;
//   static constexpr In kIn[] = {In::Column, In::Group, In::Normal};  // at least one element
//   static constexpr Out kOut[] = {Out::Column, Out::Sum};
//
//   template <class A>
//   FUSEDRNN_HD static void forward(const A* in, A* out);
//   template <class A>
//   FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din);
// for one column of a row, where A is float, double or a vector of floats.  It accesses no memory
// but its arguments.  backward() writes din of every In::Column and In::Group; that of other inputs
// is not read.  dout is 0 for the results that have no derivative.
#pragma once
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../base/math.h"
#include "../base/scalar.h"
#include "stage.h"

namespace fusedrnn::program {

// A constant of a stage, the same in all lanes.
template <class A>
FUSEDRNN_HD A number(double x) {
  if constexpr (std::is_same_v<A, double>) {
    return x;
  } else {
    return math::splat<A>(static_cast<float>(x));
  }
}

// A stage that is computed in double where it reads and writes floats.
template <class Stage>
struct InDouble : Stage {};

// What a stage computes with: double for InDouble<...>, and otherwise `Usual`.
template <class Stage, class Usual>
struct NumberOf {
  using type = Usual;
};
template <class Stage, class Usual>
struct NumberOf<InDouble<Stage>, Usual> {
  using type = double;
};
template <class Stage, class Usual>
using NumberOfStage = typename NumberOf<Stage, Usual>::type;

FUSEDRNN_HD constexpr bool is_drawn(In kind) { return kind == In::Normal || kind == In::Uniform; }
FUSEDRNN_HD constexpr bool is_read(In kind) { return kind == In::Column || kind == In::Group; }
FUSEDRNN_HD constexpr bool is_grouped(In kind) { return kind == In::Group || kind == In::Index; }
FUSEDRNN_HD constexpr bool is_grouped(Out kind) { return kind != Out::Column; }
FUSEDRNN_HD constexpr bool is_largest(Out kind) { return kind == Out::Max || kind == Out::ArgMax; }

// The length of a list of inputs or results; an array must not be empty.
FUSEDRNN_HD constexpr int at_least_one(int n) { return n > 0 ? n : 1; }

template <class Kind, int n>
FUSEDRNN_HD constexpr bool any_drawn(const Kind (&kinds)[n], int count) {
  for (int i = 0; i < count; ++i) {
    if (is_drawn(kinds[i])) return true;
  }
  return false;
}

template <class Kind, int n>
FUSEDRNN_HD constexpr bool any_grouped(const Kind (&kinds)[n], int count) {
  for (int i = 0; i < count; ++i) {
    if (is_grouped(kinds[i])) return true;
  }
  return false;
}

// A number that is a constant of the compiler.
template <int i>
struct Constant {
  FUSEDRNN_HD constexpr operator int() const { return i; }
};

template <class F, int... I>
FUSEDRNN_HD void for_each(const F& f, std::integer_sequence<int, I...>) {
  (f(Constant<I>{}), ...);
}

// Calls f(i) for i = 0 .. n - 1, each a constant of the compiler, so that f can ask for the kind of
// input or result i with `if constexpr`.
template <int n, class F>
FUSEDRNN_HD void for_each(const F& f) {
  for_each(f, std::make_integer_sequence<int, n>{});
}

// Where the numbers of a row begin, which are of T or of Acc<T>.  P: void or const void.
template <class T, class P>
FUSEDRNN_HD P* row_of(P* data, int64_t row, int64_t stride, bool is_storage) {
  using Byte = std::conditional_t<std::is_const_v<P>, const char, char>;
  if (data == nullptr) return nullptr;
  const int64_t size = is_storage ? sizeof(T) : sizeof(Acc<T>);
  return static_cast<Byte*>(data) + row * stride * size;
}

// A sum that carries its rounding errors along (Neumaier 1974, with the error of an addition by
// Knuth), so that it is as accurate for a row of any width.  A NaN or inf is that of a plain sum.
template <class V>
struct ExactSum {
  V sum, error;  // both are 0 at first

  FUSEDRNN_HD void add(V x) {
    const V next = sum + x;
    const V added = next - sum;
    error = error + ((sum - (next - added)) + (x - added));
    sum = next;
  }
  FUSEDRNN_HD V total() const {
    const V is_zero_if_finite = error - error;
    return math::select(is_zero_if_finite == V{}, V(sum + error), sum);
  }
};

// Whether x takes the place of `best` as the largest so far: the first of equal numbers stays, and
// the first NaN.
template <class V>
FUSEDRNN_HD auto is_larger(V x, V best) {
  return (x > best) | ((x != x) & (best == best));
}

// A number, and its place in its group.
template <class A>
struct Placed {
  A value, place;

  // Becomes `other` if that is larger, or is the same and comes first.
  FUSEDRNN_HD void add(const Placed& other) {
    const bool is_equal = value == other.value || (value != value && other.value != other.value);
    const bool is_before = is_equal && other.place < place;
    if (is_larger(other.value, value) || is_before) *this = other;
  }
};

}  // namespace fusedrnn::program
