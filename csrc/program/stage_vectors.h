// What the loops around a generated stage on the CPU are made of: vectors of a storage type, the
// numbers of a row, groups of columns, and their sums and largest numbers.
#pragma once
#include "../cpu/vector.h"
#include "stage_parts.h"

namespace fusedrnn::program {
inline namespace FUSEDRNN_ISA {

typedef uint16_t VecH __attribute__((vector_size(2 * FUSEDRNN_LANES)));

// The vector in which a stage of storage type T is computed: of floats, also for 16-bit types.
// (That of double also reads and writes the floats of a stage that is computed in double.)
template <class T>
struct Lanes {
  using V = VecF;
  static constexpr int64_t kWidth = kLanes;

  template <class P>
  FUSEDRNN_HD static V load(const P* p, int64_t n) {
    if constexpr (!std::is_same_v<P, float>) {
      if (n == kLanes) {
        VecH bits;
        memcpy(&bits, p, sizeof bits);
        return P::template widen<V>(__builtin_convertvector(bits, VecU));
      }
    }
    return fusedrnn::load(p, n);
  }
  template <class P>
  FUSEDRNN_HD static void store(P* p, V x, int64_t n) {
    if constexpr (!std::is_same_v<P, float>) {
      if (n == kLanes) {
        const VecH bits = __builtin_convertvector(P::narrow(x), VecH);
        memcpy(p, &bits, sizeof bits);
        return;
      }
    }
    fusedrnn::store(p, x, n);
  }
  FUSEDRNN_HD static V round(V x) {
    if constexpr (std::is_same_v<T, float>) {
      return x;
    } else {
      return T::template widen<V>(T::narrow(x));
    }
  }

  // 0, 1, 2, ...
  FUSEDRNN_HD static V places() {
    V x;
    for (int i = 0; i < kLanes; ++i) x[i] = float(i);
    return x;
  }
  // x in the first n lanes, `other` elsewhere.
  FUSEDRNN_HD static V first(V x, int64_t n, V other) {
    return n == kLanes ? x : math::select(places() < number<V>(double(n)), x, other);
  }

  // The sum of all lanes, as a tree.
  FUSEDRNN_HD static float sum(V x) {
    float all[kLanes];
    memcpy(all, &x, sizeof x);
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) all[i] += all[i + half];
    }
    return all[0];
  }
  FUSEDRNN_HD static float lane(V x, int i) { return x[i]; }

  template <class Distribution>
  FUSEDRNN_HD static void draw(float* out, uint64_t seed, uint32_t t, uint32_t b, uint32_t block,
                               uint32_t stream) {
    fusedrnn::draws<Distribution>(out, 4 * kLanes, seed, t, b, block, stream);
  }
};

template <>
struct Lanes<double> {
  using V = double;
  static constexpr int64_t kWidth = 1;

  template <class P>
  FUSEDRNN_HD static double load(const P* p, int64_t) {
    return *p;
  }
  template <class P>
  FUSEDRNN_HD static void store(P* p, double x, int64_t) {
    *p = P(x);
  }
  FUSEDRNN_HD static double round(double x) { return x; }
  FUSEDRNN_HD static double places() { return 0; }
  FUSEDRNN_HD static double first(double x, int64_t, double) { return x; }
  FUSEDRNN_HD static double sum(double x) { return x; }
  FUSEDRNN_HD static double lane(double x, int) { return x; }

  template <class Distribution>
  FUSEDRNN_HD static void draw(double* out, uint64_t seed, uint32_t t, uint32_t b, uint32_t block,
                               uint32_t stream) {
    double four[4];
    draw4<Distribution>(seed, t, b, block, stream, four);
    for (int j = 0; j < 4; ++j) out[j] = four[j];
  }
};

// Numbers of a row, of T or of Acc<T>.
template <class T, class P>
struct Row {
  using A = Acc<T>;
  using V = typename Lanes<T>::V;
  P* data;
  bool is_storage;

  static FUSEDRNN_HD Row of(P* data, int64_t row, int64_t stride, bool is_storage) {
    return {row_of<T>(data, row, stride, is_storage), is_storage};
  }

  // Whether numbers are of fewer bits than what is computed with.
  FUSEDRNN_HD bool is_narrow() const { return !std::is_same_v<T, A> && is_storage; }

  // f(first number), with its type.
  template <class F>
  FUSEDRNN_HD void with(const F& f) const {
    using Storage = std::conditional_t<std::is_const_v<P>, const T, T>;
    using Wide = std::conditional_t<std::is_const_v<P>, const A, A>;
    if constexpr (!std::is_same_v<T, A>) {
      if (is_storage) return f(static_cast<Storage*>(data));
    }
    f(static_cast<Wide*>(data));
  }

  FUSEDRNN_HD V load(int64_t column, int64_t n) const {
    if constexpr (!std::is_same_v<T, A>) {
      if (is_storage) return Lanes<T>::load(static_cast<const T*>(data) + column, n);
    }
    return Lanes<T>::load(static_cast<const A*>(data) + column, n);
  }
  FUSEDRNN_HD void store(int64_t column, V x, int64_t n) const {
    if constexpr (!std::is_same_v<T, A>) {
      if (is_storage) return Lanes<T>::store(static_cast<T*>(data) + column, x, n);
    }
    Lanes<T>::store(static_cast<A*>(data) + column, x, n);
  }

  FUSEDRNN_HD A one(int64_t i) const {
    if constexpr (!std::is_same_v<T, A>) {
      if (is_storage) return widen(static_cast<const T*>(data)[i]);
    }
    return static_cast<const A*>(data)[i];
  }
  FUSEDRNN_HD void set(int64_t i, A x) const {
    if constexpr (!std::is_same_v<T, A>) {
      if (is_storage) {
        static_cast<T*>(data)[i] = narrow<T>(x);
        return;
      }
    }
    static_cast<A*>(data)[i] = x;
  }

  FUSEDRNN_HD void clear(int64_t count) const {
    using L = Lanes<T>;
    for (int64_t c = 0; c < count; c += L::kWidth) store(c, V{}, least(L::kWidth, count - c));
  }
};

// The group of columns in which the loop over a row is.  The last one may be shorter.
struct Group {
  int64_t size, width, number, begin, end;

  // columns: of a group, or 0 for the whole row.
  FUSEDRNN_HD void start(int64_t columns, int64_t width_of_row) {
    width = width_of_row;
    size = columns > 0 ? columns : width;
    number = begin = 0;
    end = least(size, width);
  }
  FUSEDRNN_HD void move_to(int64_t column) {
    if (column < end) return;
    ++number;
    begin = end;
    end = least(end + size, width);
  }
  FUSEDRNN_HD static int64_t count(int64_t columns, int64_t width) {
    return columns > 0 ? (width + columns - 1) / columns : 1;
  }
};

// Calls f(first column, count) for n columns: for whole vectors, and then for the rest.
template <class T, class F>
FUSEDRNN_HD void for_vectors(int64_t n, const F& f) {
  constexpr int64_t kWidth = Lanes<T>::kWidth;
  int64_t c = 0;
  for (; c + kWidth <= n; c += kWidth) f(c, kWidth);
  if (c < n) f(c, n - c);
}

// The sum of a group's columns.
template <class T>
struct GroupSum {
  using L = Lanes<T>;
  using V = typename L::V;
  ExactSum<V> sum;

  FUSEDRNN_HD void start() { sum = {V{}, V{}}; }
  FUSEDRNN_HD void add(V x, V /*place*/, int64_t n) { sum.add(L::first(x, n, V{})); }
  FUSEDRNN_HD Acc<T> total() const { return L::sum(sum.total()); }
};

// The largest number of a group's columns, and its place in the group.
template <class T>
struct GroupLargest {
  using L = Lanes<T>;
  using V = typename L::V;
  using A = Acc<T>;
  V value, place;

  FUSEDRNN_HD void start() {
    value = number<V>(-HUGE_VAL);
    place = L::places();
  }
  FUSEDRNN_HD void add(V x, V place_of_x, int64_t n) {
    x = L::first(x, n, number<V>(-HUGE_VAL));
    const auto mask = is_larger(x, value);
    value = math::select(mask, x, value);
    place = math::select(mask, place_of_x, place);
  }
  FUSEDRNN_HD A total(bool wants_place) const {
    Placed<A> best = {L::lane(value, 0), L::lane(place, 0)};
    for (int i = 1; i < L::kWidth; ++i) best.add({L::lane(value, i), L::lane(place, i)});
    return wants_place ? best.place : best.value;
  }
};

}  // namespace FUSEDRNN_ISA
}  // namespace fusedrnn::program
