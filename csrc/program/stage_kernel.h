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
#include "../persistent/device.h"
#include "stage_column.h"

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
