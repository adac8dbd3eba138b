// The loops around a generated stage on the CPU: all rows times all columns, in vectors.
//
// It is compiled at run time into a library of one storage type, which begins with the instruction
// set as vector.h describes, and includes nothing of torch, so that this takes seconds.  Everything
// here that has code is in the namespace of the instruction set.
//
// A row is cut into vectors from its start, and anew where a group of columns ends, so that a
// vector lies within one group of each input and result.  How it is cut depends on nothing but the
// stage, so a row's results depend neither on the other rows nor on the threads among which they
// are divided.
#pragma once
#include "../cpu/vector.h"
#include "functions.h"
#include "stage_parts.h"

namespace fusedrnn::program {
inline namespace FUSEDRNN_ISA {

// The vector in which a stage of storage type T is computed: of floats, also for 16-bit types.
template <class T>
struct Lanes {
  using V = VecF;
  static constexpr int64_t kWidth = kLanes;

  template <class P>
  FUSEDRNN_HD static V load(const P* p, int64_t n) {
    return fusedrnn::load(p, n);
  }
  template <class P>
  FUSEDRNN_HD static void store(P* p, V x, int64_t n) {
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

  FUSEDRNN_HD static double load(const double* p, int64_t) { return *p; }
  FUSEDRNN_HD static void store(double* p, double x, int64_t) { *p = x; }
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

// The sum of a group's columns.
template <class T>
struct GroupSum {
  using L = Lanes<T>;
  using V = typename L::V;
  ExactSum<V> sum;

  FUSEDRNN_HD GroupSum() { start(); }
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

  // Not an implicit one: g++ compiles that for the baseline, whatever the pragma says.
  FUSEDRNN_HD GroupLargest() { start(); }
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

// One row of a stage: its inputs, and where it is in their groups.
template <class T, class Stage>
struct RowOfStage {
  using L = Lanes<T>;
  using A = Acc<T>;
  using V = typename L::V;
  static constexpr int kIns = Stage::kIns, kOuts = Stage::kOuts;
  static constexpr int kInSlots = at_least_one(kIns), kOutSlots = at_least_one(kOuts);
  static constexpr bool kDraws = any_drawn(Stage::kIn, kIns);
  static constexpr bool kGroups = any_grouped(Stage::kIn, kIns) || any_grouped(Stage::kOut, kOuts);
  static constexpr int64_t kDrawn = 4 * L::kWidth;  // Philox gives four numbers per lane

  const StageArgs& args;
  uint32_t t, b;
  Row<T, const void> in[kInSlots];
  const A* bias[kInSlots];
  Group in_group[kInSlots], out_group[kOutSlots];
  // Of each drawn input; longer than what is drawn at once, since the columns that are wanted may
  // begin within a block of Philox.
  A drawn[kDraws ? kInSlots : 1][kDrawn + 4];

  FUSEDRNN_HD RowOfStage(const StageArgs& args, int64_t row, uint32_t t, uint32_t b)
      : args(args), t(t), b(b) {
    for_each<kIns>([&](auto i) __attribute__((always_inline)) {
      const StageIn& from = args.in[i];
      if constexpr (is_read(Stage::kIn[i])) {
        in[i] = Row<T, const void>::of(from.data, row, from.stride, from.is_storage);
        bias[i] = static_cast<const A*>(from.bias);
      }
      if constexpr (is_grouped(Stage::kIn[i])) in_group[i].start(from.group, args.width);
    });
    for_each<kOuts>([&](auto k) __attribute__((always_inline)) {
      if constexpr (is_grouped(Stage::kOut[k])) out_group[k].start(args.out[k].group, args.width);
    });
  }

  // Draws the numbers of the columns [begin, begin + kDrawn).
  FUSEDRNN_HD void draw(int64_t begin) {
    const uint64_t seed = uint64_t(*args.seed);
    const uint32_t time = uint32_t(args.first_step) + t;
    for_each<kIns>([&](auto i) __attribute__((always_inline)) {
      if constexpr (is_drawn(Stage::kIn[i])) {
        using D = std::conditional_t<Stage::kIn[i] == In::Normal, Normal, Uniform<T>>;
        const int64_t first = args.in[i].offset + begin;
        const uint32_t block = uint32_t(first / 4), stream = args.in[i].stream;
        L::template draw<D>(drawn[i], seed, time, b, block, stream);
        if (first % 4 != 0) {
          A four[4];
          draw4<D>(seed, time, b, block + uint32_t(kDrawn / 4), stream, four);
          for (int j = 0; j < 4; ++j) drawn[i][kDrawn + j] = four[j];
        }
      }
    });
  }

  // Moves to the groups of a column.  Returns how many of the next n columns are in the same.
  FUSEDRNN_HD int64_t move_to(int64_t column, int64_t n) {
    for_each<kIns>([&](auto i) __attribute__((always_inline)) {
      if constexpr (is_grouped(Stage::kIn[i])) {
        in_group[i].move_to(column);
        n = least(n, in_group[i].end - column);
      }
    });
    for_each<kOuts>([&](auto k) __attribute__((always_inline)) {
      if constexpr (is_grouped(Stage::kOut[k])) {
        out_group[k].move_to(column);
        n = least(n, out_group[k].end - column);
      }
    });
    return n;
  }

  // The input of columns [column, column + n), of which the numbers are drawn from `begin` on.
  template <class I>
  FUSEDRNN_HD V load(I i, int64_t column, int64_t n, int64_t begin) const {
    constexpr In kKind = Stage::kIn[i];
    if constexpr (kKind == In::Column) {
      const V x = in[i].load(column, n);
      return bias[i] == nullptr ? x : V(x + L::load(bias[i] + column, n));
    } else if constexpr (kKind == In::Group) {
      A x = in[i].one(in_group[i].number);
      if (bias[i] != nullptr) x += bias[i][in_group[i].number];
      return x - V{};
    } else if constexpr (kKind == In::Index) {
      return L::places() + A(column - in_group[i].begin);
    } else {
      const int64_t skipped = args.in[i].offset % 4;
      return L::round(L::load(&drawn[i][column - begin + skipped], n));
    }
  }

  // Calls f(column, n, inputs) for all vectors of the row.
  template <class F>
  FUSEDRNN_HD void for_vectors(const F& f) {
    const int64_t block = kDraws ? kDrawn : args.width;
    for (int64_t begin = 0; begin < args.width; begin += block) {
      if constexpr (kDraws) draw(begin);
      const int64_t end = least(args.width, begin + block);
      for (int64_t column = begin, n; column < end; column += n) {
        n = least(L::kWidth, end - column);
        if constexpr (kGroups) n = move_to(column, n);
        V inputs[kInSlots];
        for_each<kIns>(
            [&](auto i) __attribute__((always_inline)) { inputs[i] = load(i, column, n, begin); });
        f(column, n, inputs);
      }
    }
  }
};

template <class T, class Stage>
FUSEDRNN_HD void forward_row(const StageArgs& args, int64_t row, uint32_t t, uint32_t b) {
  using L = Lanes<T>;
  using A = Acc<T>;
  using V = typename L::V;
  RowOfStage<T, Stage> stage(args, row, t, b);
  Row<T, void> out[stage.kOutSlots];
  bool rounds[stage.kOutSlots];
  GroupSum<T> sums[stage.kOutSlots];
  GroupLargest<T> largest[stage.kOutSlots];
  for_each<Stage::kOuts>([&](auto k) __attribute__((always_inline)) {
    const StageOut& to = args.out[k];
    out[k] = Row<T, void>::of(to.data, row, to.stride, to.is_storage);
    rounds[k] = to.rounds && !to.is_storage;
  });
  stage.for_vectors([&](int64_t column, int64_t n, const V* in) __attribute__((always_inline)) {
    V result[stage.kOutSlots];
    Stage::forward(in, result);
    for_each<Stage::kOuts>([&](auto k) __attribute__((always_inline)) {
      constexpr Out kKind = Stage::kOut[k];
      if (out[k].data == nullptr) return;
      if constexpr (kKind == Out::Column) {
        out[k].store(column, rounds[k] ? L::round(result[k]) : result[k], n);
      } else {
        const Group& group = stage.out_group[k];
        A total;
        if constexpr (kKind == Out::Sum) {
          sums[k].add(result[k], V{}, n);
          if (column + n < group.end) return;
          total = sums[k].total();
          sums[k].start();
        } else {
          largest[k].add(result[k], L::places() + A(column - group.begin), n);
          if (column + n < group.end) return;
          total = largest[k].total(kKind == Out::ArgMax);
          largest[k].start();
        }
        out[k].set(group.number, rounds[k] ? widen(narrow<T>(total)) : total);
      }
    });
  });
}

// The gradient of result k in the columns [column, column + n).
template <class T, class Stage, class K>
FUSEDRNN_HD typename Lanes<T>::V gradient_of(const RowOfStage<T, Stage>& stage,
                                             const Row<T, const void> (&sources)[3], K k,
                                             int64_t column, int64_t n) {
  using V = typename Lanes<T>::V;
  V sum{};
  if constexpr (!is_largest(Stage::kOut[k])) {
    for (const auto& source : sources) {
      if (source.data == nullptr) continue;
      if constexpr (Stage::kOut[k] == Out::Column) {
        sum = sum + source.load(column, n);
      } else {
        sum = sum + source.one(stage.out_group[k].number);
      }
    }
  }
  return sum;
}

template <class T, class Stage>
FUSEDRNN_HD void backward_row(const StageArgs& args, int64_t row, uint32_t t, uint32_t b) {
  using A = Acc<T>;
  using V = typename Lanes<T>::V;
  RowOfStage<T, Stage> stage(args, row, t, b);
  Row<T, const void> sources[stage.kOutSlots][3];
  Row<T, void> gradients[stage.kInSlots];
  bool adds[stage.kInSlots];
  GroupSum<T> sums[stage.kInSlots];
  for_each<Stage::kOuts>([&](auto k) __attribute__((always_inline)) {
    const StageOut& of = args.out[k];
    for (int s = 0; s < 3; ++s) {
      sources[k][s] = Row<T, const void>::of(of.gradient[s], row, of.gradient_stride[s],
                                             of.gradient_is_storage[s]);
    }
  });
  for_each<Stage::kIns>([&](auto i) __attribute__((always_inline)) {
    const StageIn& of = args.in[i];
    gradients[i] = Row<T, void>::of(of.gradient, row, of.gradient_stride, of.gradient_is_storage);
    adds[i] = of.adds;
  });
  stage.for_vectors([&](int64_t column, int64_t n, const V* in) __attribute__((always_inline)) {
    V dout[stage.kOutSlots], din[stage.kInSlots];
    for_each<Stage::kOuts>([&](auto k) __attribute__((always_inline)) {
      dout[k] = gradient_of(stage, sources[k], k, column, n);
    });
    Stage::backward(in, dout, din);
    for_each<Stage::kIns>([&](auto i) __attribute__((always_inline)) {
      const Row<T, void>& to = gradients[i];
      if constexpr (is_read(Stage::kIn[i])) {
        if (to.data == nullptr) return;
        if constexpr (Stage::kIn[i] == In::Column) {
          to.store(column, adds[i] ? V(to.load(column, n) + din[i]) : din[i], n);
        } else {
          const Group& group = stage.in_group[i];
          sums[i].add(din[i], V{}, n);
          if (column + n < group.end) return;
          const A sum = sums[i].total();
          sums[i].start();
          to.set(group.number, adds[i] ? to.one(group.number) + sum : sum);
        }
      }
    });
  });
}

// A row that does not take the step: its results are 0.
template <class T, class Stage>
FUSEDRNN_HD void clear_results(const StageArgs& args, int64_t row) {
  for_each<Stage::kOuts>([&](auto k) __attribute__((always_inline)) {
    const StageOut& to = args.out[k];
    if (to.data == nullptr) return;
    constexpr bool kOfGroups = is_grouped(Stage::kOut[k]);
    const int64_t count = kOfGroups ? Group::count(to.group, args.width) : args.width;
    Row<T, void>::of(to.data, row, to.stride, to.is_storage).clear(count);
  });
}

// Its gradients are 0, which need not be added.
template <class T, class Stage>
FUSEDRNN_HD void clear_gradients(const StageArgs& args, int64_t row) {
  for_each<Stage::kIns>([&](auto i) __attribute__((always_inline)) {
    if constexpr (is_read(Stage::kIn[i])) {
      const StageIn& of = args.in[i];
      if (of.gradient == nullptr || of.adds) return;
      constexpr bool kOfGroups = Stage::kIn[i] == In::Group;
      const int64_t count = kOfGroups ? Group::count(of.group, args.width) : args.width;
      Row<T, void>::of(of.gradient, row, of.gradient_stride, of.gradient_is_storage).clear(count);
    }
  });
}

// Does the rows [first, last) of a stage.
template <class T, class Stage>
void run(bool backward, const StageArgs& args, int64_t first, int64_t last) {
  int64_t t = args.first_t + first / args.batch, b = first % args.batch;
  for (int64_t row = first; row < last; ++row) {
    const bool takes_step = args.lengths == nullptr || t < args.lengths[b];
    if (!backward) {
      if (takes_step) {
        forward_row<T, Stage>(args, row, uint32_t(t), uint32_t(b));
      } else {
        clear_results<T, Stage>(args, row);
      }
    } else {
      if (takes_step) {
        backward_row<T, Stage>(args, row, uint32_t(t), uint32_t(b));
      } else {
        clear_gradients<T, Stage>(args, row);
      }
    }
    if (++b == args.batch) {
      b = 0;
      ++t;
    }
  }
}

}  // namespace FUSEDRNN_ISA
}  // namespace fusedrnn::program
