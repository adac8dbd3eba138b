// The kernels around a generated stage on a GPU, one launch for all rows of a call.
//
// A thread computes one column of a row.  Where columns are summed up (the results of a group, or
// the gradient of a number that a group shares), a block has a row: its threads compute as many
// columns at once, leave what is summed in shared memory, and a warp sums each group that has
// columns there.  Sums are made in a fixed order, so that results do not depend on scheduling.
//
// Other compilers than nvcc run the same on the emulation of csrc/persistent/device.h.
#pragma once
#include "../base/launch.h"
#include "../base/philox.h"
#include "../persistent/device.h"
#include "functions.h"
#include "stage_parts.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace fusedrnn::program {
namespace gpu {

constexpr int kWarp = cuda::kWarpSize;
constexpr int kThreads = 128;         // of a block whose threads are independent
constexpr int kMostRowThreads = 256;  // of a block that has a row
// With a larger minimum of blocks on a multiprocessor, the compiler spills registers in double.
constexpr int kLeastBlocks = 1;
constexpr int64_t kSharedBytes = 48 << 10;  // more would need permission

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
template <class T, class Stage>
FUSEDRNN_HD void load_inputs(const StageArgs& args, const Row& row, int64_t column, Acc<T>* in) {
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
  using A = Acc<T>;
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
          store_gradient<T>(args.in[i], row, column, din[i]);
        } else {
          sum(i, din[i]);
        }
      }
    });
  } else {
    Stage::forward(in, out);
    for_each<Stage::kOuts>([&](auto k) {
      if (args.out[k].data == nullptr) return;
      if constexpr (Stage::kOut[k] == Out::Column) {
        store_result<T>(args.out[k], row, column, out[k]);
      } else {
        sum(k, out[k]);
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

// Of a lane further on.
FUSEDRNN_DEVICE float shuffled_down(float x, int distance) {
  return Traits<float>::from_bits(cuda::shuffle_down(Traits<float>::bits(x), distance));
}
FUSEDRNN_DEVICE double shuffled_down(double x, int distance) {
  const uint64_t bits = Traits<double>::bits(x);
  const uint64_t low = cuda::shuffle_down(uint32_t(bits), distance);
  const uint64_t high = cuda::shuffle_down(uint32_t(bits >> 32), distance);
  return Traits<double>::from_bits(high << 32 | low);
}

// The sum of a group, as far as it has been made; in the block's shared memory, where a group ends
// in later columns.
template <class A>
struct PartOfSum {
  ExactSum<A> sum;

  static FUSEDRNN_DEVICE PartOfSum nothing() { return {{0, 0}}; }
  FUSEDRNN_DEVICE void add(A x, int64_t /*place*/) { sum.sum += x; }
  FUSEDRNN_DEVICE void add_lane(int distance) { sum.sum += shuffled_down(sum.sum, distance); }
  FUSEDRNN_DEVICE void add(const PartOfSum& before) {
    ExactSum<A> all = before.sum;
    all.add(sum.sum);
    sum = all;
  }
  FUSEDRNN_DEVICE A total(bool /*wants_place*/) const { return sum.total(); }
};

// The same of the largest number.
template <class A>
struct PartOfLargest {
  Placed<A> best;

  static FUSEDRNN_DEVICE PartOfLargest nothing() { return {{-A(HUGE_VAL), A(HUGE_VAL)}}; }
  FUSEDRNN_DEVICE void add(A x, int64_t place) { best.add({x, A(place)}); }
  FUSEDRNN_DEVICE void add_lane(int distance) {
    const A value = shuffled_down(best.value, distance);
    best.add({value, shuffled_down(best.place, distance)});
  }
  FUSEDRNN_DEVICE void add(const PartOfLargest& before) { best.add(before.best); }
  FUSEDRNN_DEVICE A total(bool wants_place) const { return wants_place ? best.place : best.value; }
};

// What is kept of a group that ends in later columns.
template <class A>
struct Kept {
  A numbers[2];
};

template <class T, class Stage, bool kBackward>
struct RowWork {
  using A = Acc<T>;
  static constexpr int kSums = count_sums<Stage, kBackward>();
  // Kept twice: a warp may read that of a group while another writes that of the next one.
  static constexpr int64_t kKeptBytes = 2 * kSums * sizeof(Kept<A>);

  static constexpr int most_threads() {
    int threads = kMostRowThreads;
    while (threads > kWarp && shared_bytes(threads) > kSharedBytes) threads /= 2;
    return threads;
  }
  static constexpr int64_t shared_bytes(int threads) {
    return kKeptBytes + kSums * threads * int64_t(sizeof(A));
  }
  static int threads_for(int64_t width) {
    return int(least(most_threads(), (width + kWarp - 1) / kWarp * kWarp));
  }

  const StageArgs& args;
  int threads;
  Row row;
  Kept<A>* kept;  // [2][kSums]
  A* addends;     // [kSums][threads]

  FUSEDRNN_DEVICE RowWork(const StageArgs& args, int threads, int64_t row)
      : args(args), threads(threads), row(Row::of(args, row)),
        kept(reinterpret_cast<Kept<A>*>(cuda::shared_memory())),
        addends(reinterpret_cast<A*>(kept + 2 * kSums)) {}

  // Sums the groups that have columns in [begin, end); one warp has every kWarps-th group.
  template <class Part, class Write>
  FUSEDRNN_DEVICE void sum_groups(int number, int64_t group, int64_t begin, int64_t end,
                                  bool wants_place, const Write& write) {
    const int warps = threads / kWarp, lane = cuda::thread_index() % kWarp;
    const int warp = (cuda::thread_index() / kWarp + number) % warps;
    const A* of_columns = addends + number * threads - begin;
    const int parity = int(divide(begin, threads) % 2);
    Kept<A>& before = kept[parity * kSums + number];
    Kept<A>& after = kept[(1 - parity) * kSums + number];
    for (int64_t g = divide(begin, group) + warp; g * group < end; g += warps) {
      const int64_t first = g * group, last = least(first + group, args.width);
      Part part = Part::nothing();
      for (int64_t c = (first < begin ? begin : first) + lane; c < least(last, end); c += kWarp) {
        part.add(of_columns[c], c - first);
      }
      for (int distance = kWarp / 2; distance > 0; distance /= 2) part.add_lane(distance);
      if (lane != 0) continue;
      static_assert(sizeof(Part) == sizeof(Kept<A>));
      if (first < begin) {
        Part earlier;
        memcpy(&earlier, &before, sizeof earlier);
        part.add(earlier);
      }
      if (last <= end) {
        write(g, part.total(wants_place));
      } else {
        memcpy(&after, &part, sizeof part);
      }
    }
  }

  FUSEDRNN_DEVICE void sum_all(int64_t begin, int64_t end) {
    if constexpr (kBackward) {
      for_each<Stage::kIns>([&](auto i) {
        if constexpr (Stage::kIn[i] == In::Group) {
          const StageIn& of = args.in[i];
          if (of.gradient == nullptr) return;
          sum_groups<PartOfSum<A>>(sum_of<Stage, true>(i), size_of(of.group, args.width), begin,
                                   end, false,
                                   [&](int64_t g, A x) { store_gradient<T>(of, row, g, x); });
        }
      });
    } else {
      for_each<Stage::kOuts>([&](auto k) {
        if constexpr (is_grouped(Stage::kOut[k])) {
          using Part =
              std::conditional_t<is_largest(Stage::kOut[k]), PartOfLargest<A>, PartOfSum<A>>;
          const StageOut& to = args.out[k];
          if (to.data == nullptr) return;
          sum_groups<Part>(sum_of<Stage, false>(k), size_of(to.group, args.width), begin, end,
                           Stage::kOut[k] == Out::ArgMax,
                           [&](int64_t g, A x) { store_result<T>(to, row, g, x); });
        }
      });
    }
  }

  FUSEDRNN_DEVICE void run() {
    const int thread = cuda::thread_index();
    if (!row.takes_step) {
      for (int64_t column = thread; column < args.width; column += threads) {
        clear<T, Stage, kBackward>(args, row, column);
      }
      return;
    }
    for (int64_t begin = 0; begin < args.width; begin += threads) {
      const int64_t end = least(begin + threads, args.width);
      if (begin + thread < end) {
        compute<T, Stage, kBackward>(args, row, begin + thread, [&](auto i, A x) {
          addends[sum_of<Stage, kBackward>(i) * threads + thread] = x;
        });
      }
      cuda::sync_block();
      sum_all(begin, end);
      cuda::sync_block();
    }
  }
};

#if defined(__CUDACC__)
template <class T, class Stage, bool kBackward>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    columns_kernel(const __grid_constant__ StageArgs args, int64_t count) {
  const int64_t i = int64_t(cuda::block_index()) * kThreads + cuda::thread_index();
  if (i < count) do_column<T, Stage, kBackward>(args, i);
}

template <class T, class Stage, bool kBackward>
__global__ void __launch_bounds__(kMostRowThreads, kLeastBlocks)
    rows_kernel(const __grid_constant__ StageArgs args, int threads) {
  RowWork<T, Stage, kBackward>(args, threads, cuda::block_index()).run();
}

template <class Kernel, class Number>
int launch_blocks(Kernel kernel, const StageArgs& args, int64_t blocks, int threads, int64_t shared,
                  Number number, cuda::Stream stream) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args, number);
}
#endif

template <class T, class Stage, bool kBackward>
int launch(const StageArgs& args, int64_t rows, [[maybe_unused]] cuda::Stream stream) {
  if (rows <= 0 || args.width <= 0) return 0;
  if constexpr (count_sums<Stage, kBackward>() > 0) {
    using Work = RowWork<T, Stage, kBackward>;
    const int threads = Work::threads_for(args.width);
    const int64_t shared = Work::shared_bytes(threads);
#if defined(__CUDACC__)
    return launch_blocks(rows_kernel<T, Stage, kBackward>, args, rows, threads, shared, threads,
                         stream);
#else
    for (int64_t row = 0; row < rows; ++row) {
      const auto thread = [&] { Work(args, threads, row).run(); };
      const auto failure =
          cuda::emulated::launch(1, threads, size_t(shared), uint64_t(row), thread);
      if (!failure.empty()) return 1;
    }
#endif
  } else {
    const int64_t count = rows * args.width;
#if defined(__CUDACC__)
    return launch_blocks(columns_kernel<T, Stage, kBackward>, args,
                         (count + kThreads - 1) / kThreads, kThreads, 0, count, stream);
#else
    for (int64_t i = 0; i < count; ++i) do_column<T, Stage, kBackward>(args, i);
#endif
  }
  return 0;
}

}  // namespace gpu

// Enqueues a stage for all rows of a call; pointers are the GPU's.  Returns a cudaError_t.
template <class T, class Stage>
int launch(bool backward, const StageArgs& args, int64_t rows, cuda::Stream stream) {
  return backward ? gpu::launch<T, Stage, true>(args, rows, stream)
                  : gpu::launch<T, Stage, false>(args, rows, stream);
}

}  // namespace fusedrnn::program
