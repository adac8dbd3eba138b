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
#include "functions.h"
#include "stage_vectors.h"

namespace fusedrnn::program {
inline namespace FUSEDRNN_ISA {

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
