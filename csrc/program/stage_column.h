// One column of a row of a generated stage, the work of a thread of a GPU: inputs are read or
// drawn, and results or gradients are stored, or handed to whoever sums up a group of columns.
#pragma once
#include "../base/philox.h"
#include "rare_functions.h"
#include "stage_parts.h"

namespace fusedrnn::program::gpu {

// By 32-bit division if it suffices: that takes a GPU about 20 instructions, 64-bit division 100.
FUSEDRNN_HD int64_t divide(int64_t a, int64_t b) {
  return ((a | b) >> 32) == 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

template <class T>
FUSEDRNN_HD Acc<T> load(const void* data, int64_t i, bool is_storage) {
  if constexpr (!std::is_same_v<T, Acc<T>>) {
    if (is_storage) return widen(static_cast<const T*>(data)[i]);
  }
  return static_cast<const Acc<T>*>(data)[i];
}

template <class T>
FUSEDRNN_HD void store(void* data, int64_t i, Acc<T> x, bool is_storage) {
  if constexpr (!std::is_same_v<T, Acc<T>>) {
    if (is_storage) {
      static_cast<T*>(data)[i] = narrow<T>(x);
      return;
    }
  }
  static_cast<Acc<T>*>(data)[i] = x;
}

FUSEDRNN_HD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Columns of a group; 0 stands for the whole row.
FUSEDRNN_HD int64_t size_of(int32_t group, int64_t width) { return group > 0 ? group : width; }
FUSEDRNN_HD int64_t count_of(int32_t group, int64_t width) {
  return divide(width + size_of(group, width) - 1, size_of(group, width));
}

// A row of the call, and its place in the sequence.
struct Row {
  int64_t row;
  uint32_t t, b;
  bool takes_step;

  static FUSEDRNN_HD Row of(const StageArgs& args, int64_t row) {
    const int64_t step = divide(row, args.batch), b = row - step * args.batch;
    const int64_t t = args.first_t + step;
    return {row, uint32_t(t), uint32_t(b), args.lengths == nullptr || t < args.lengths[b]};
  }
};

// The number that a column draws.  Which of a counter's four words it needs depends on the column;
// a distribution makes numbers from pairs of words, and here gets the same pair twice.
template <class T, In kKind>
FUSEDRNN_HD Acc<T> draw(const StageArgs& args, const StageIn& from, const Row& row,
                        int64_t column) {
  using A = Acc<T>;
  using D = std::conditional_t<kKind == In::Normal, Normal, Uniform<T>>;
  const uint64_t place = uint64_t(from.offset + column), seed = uint64_t(*args.seed);
  uint32_t w[4] = {uint32_t(args.first_step) + row.t, row.b, uint32_t(place / 4), from.stream};
  philox4x32(w, uint32_t(seed), uint32_t(seed >> 32));
  const bool is_second = place % 4 >= 2;
  const uint32_t first = is_second ? w[2] : w[0], second = is_second ? w[3] : w[1];
  const uint32_t pair[4] = {first, second, first, second};
  A x[4];
  D::of(pair, x);
  return widen(narrow<T>(place % 2 == 0 ? x[0] : x[1]));
}

// Input i of a stage in a column.
template <class T, class Stage, int i>
FUSEDRNN_HD Acc<T> input(const StageArgs& args, const Row& row, int64_t column) {
  using A = Acc<T>;
  constexpr In kKind = Stage::kIn[i];
  const StageIn& from = args.in[i];
  if constexpr (is_read(kKind)) {
    const int64_t at =
        kKind == In::Column ? column : divide(column, size_of(from.group, args.width));
    const A x = load<T>(from.data, row.row * from.stride + at, from.is_storage);
    return from.bias == nullptr ? x : x + static_cast<const A*>(from.bias)[at];
  } else if constexpr (kKind == In::Index) {
    const int64_t size = size_of(from.group, args.width);
    return A(column - divide(column, size) * size);
  } else {
    return draw<T, kKind>(args, from, row, column);
  }
}

// All inputs.
template <class T, class Stage, class A>
FUSEDRNN_HD void load_inputs(const StageArgs& args, const Row& row, int64_t column, A* in) {
  for_each<Stage::kIns>([&](auto i) { in[i] = input<T, Stage, i>(args, row, column); });
}

// The gradient of result k in a column.
template <class T, class Stage, int k>
FUSEDRNN_HD Acc<T> gradient(const StageArgs& args, const Row& row, int64_t column) {
  Acc<T> sum = 0;
  if constexpr (!is_largest(Stage::kOut[k])) {
    const StageOut& of = args.out[k];
    const int64_t at =
        Stage::kOut[k] == Out::Column ? column : divide(column, size_of(of.group, args.width));
    for_each<3>([&](auto s) {
      if (of.gradient[s] == nullptr) return;
      sum +=
          load<T>(of.gradient[s], row.row * of.gradient_stride[s] + at, of.gradient_is_storage[s]);
    });
  }
  return sum;
}

// Stores number `at` of result k.
template <class T>
FUSEDRNN_HD void store_result(const StageOut& to, const Row& row, int64_t at, Acc<T> x) {
  if (to.rounds) x = widen(narrow<T>(x));
  store<T>(to.data, row.row * to.stride + at, x, to.is_storage);
}

// Stores number `at` of an input's gradient, or adds it.
template <class T>
FUSEDRNN_HD void store_gradient(const StageIn& of, const Row& row, int64_t at, Acc<T> x) {
  const int64_t i = row.row * of.gradient_stride + at;
  if (of.adds) x = load<T>(of.gradient, i, of.gradient_is_storage) + x;
  store<T>(of.gradient, i, x, of.gradient_is_storage);
}

// What is summed: results of groups, or in backward the gradients of numbers that groups share.
template <class Stage, bool kBackward>
FUSEDRNN_HD constexpr int count_sums() {
  int count = 0;
  if (kBackward) {
    for (int i = 0; i < Stage::kIns; ++i) count += Stage::kIn[i] == In::Group;
  } else {
    for (int k = 0; k < Stage::kOuts; ++k) count += is_grouped(Stage::kOut[k]);
  }
  return count;
}

// Which of the sums input or result i is.
template <class Stage, bool kBackward>
FUSEDRNN_HD constexpr int sum_of(int i) {
  int number = 0;
  for (int j = 0; j < i; ++j) {
    number += kBackward ? Stage::kIn[j] == In::Group : is_grouped(Stage::kOut[j]);
  }
  return number;
}

// A row that does not take the step: its results, or the gradients that are not added, are 0.
template <class T, class Stage, bool kBackward>
FUSEDRNN_HD void clear(const StageArgs& args, const Row& row, int64_t column) {
  if constexpr (kBackward) {
    for_each<Stage::kIns>([&](auto i) {
      if constexpr (is_read(Stage::kIn[i])) {
        const StageIn& of = args.in[i];
        if (of.gradient == nullptr || of.adds) return;
        const bool is_there =
            Stage::kIn[i] == In::Column || column < count_of(of.group, args.width);
        if (is_there) store_gradient<T>(of, row, column, 0);
      }
    });
  } else {
    for_each<Stage::kOuts>([&](auto k) {
      const StageOut& to = args.out[k];
      if (to.data == nullptr) return;
      const bool is_there =
          Stage::kOut[k] == Out::Column || column < count_of(to.group, args.width);
      if (is_there) store_result<T>(to, row, column, 0);
    });
  }
}

// One column of a row.  sum(i, x): takes what input or result i adds to its group.
template <class T, class Stage, bool kBackward, class Sum>
FUSEDRNN_HD void compute(const StageArgs& args, const Row& row, int64_t column, const Sum& sum) {
  using A = NumberOfStage<Stage, Acc<T>>;
  A in[at_least_one(Stage::kIns)], out[at_least_one(Stage::kOuts)];
  load_inputs<T, Stage>(args, row, column, in);
  if constexpr (kBackward) {
    A din[at_least_one(Stage::kIns)];
    for_each<Stage::kOuts>([&](auto k) { out[k] = gradient<T, Stage, k>(args, row, column); });
    Stage::backward(in, out, din);
    for_each<Stage::kIns>([&](auto i) {
      if constexpr (is_read(Stage::kIn[i])) {
        if (args.in[i].gradient == nullptr) return;
        if constexpr (Stage::kIn[i] == In::Column) {
          store_gradient<T>(args.in[i], row, column, Acc<T>(din[i]));
        } else {
          sum(i, Acc<T>(din[i]));
        }
      }
    });
  } else {
    Stage::forward(in, out);
    for_each<Stage::kOuts>([&](auto k) {
      if (args.out[k].data == nullptr) return;
      if constexpr (Stage::kOut[k] == Out::Column) {
        store_result<T>(args.out[k], row, column, Acc<T>(out[k]));
      } else {
        sum(k, Acc<T>(out[k]));
      }
    });
  }
}

// The work of thread i where nothing is summed.
template <class T, class Stage, bool kBackward>
FUSEDRNN_HD void do_column(const StageArgs& args, int64_t i) {
  const Row row = Row::of(args, divide(i, args.width));
  const int64_t column = i - row.row * args.width;
  if (!row.takes_step) return clear<T, Stage, kBackward>(args, row, column);
  compute<T, Stage, kBackward>(args, row, column, [](auto, Acc<T>) {});
}

}  // namespace fusedrnn::program::gpu
