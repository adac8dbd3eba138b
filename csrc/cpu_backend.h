// The driver's backend for CPU tensors: GEMMs and copies by torch, stages by the kernels of cpu/,
// threads of torch's pool.
#pragma once
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <array>
#include <optional>

#include "cpu/denormals.h"
#include "cpu/step.h"
#include "torch_stable.h"

namespace fusedrnn {

// Multiply-adds from which on torch may run GEMMs on several threads.
constexpr int64_t kParallelWork = 10'000'000;

// While it lives, denormals are zero on this thread, and on those of torch's pool that run the
// GEMMs of `work` multiply-adds; then all are as they were.
class FlushDenormalsInPool {
 public:
  explicit FlushDenormalsInPool(int64_t work)
      : threads_(work < kParallelWork ? 1 : torch::stable::get_num_threads()) {
    if (threads_ > 1) on_each_thread([] { worker().emplace(); });
  }
  ~FlushDenormalsInPool() {
    if (threads_ > 1) on_each_thread([] { worker().reset(); });
  }

 private:
  static std::optional<cpu::FlushDenormals>& worker() {
    static thread_local std::optional<cpu::FlushDenormals> flush;
    return flush;
  }
  template <class F>
  void on_each_thread(const F& f) const {
    torch::stable::parallel_for(0, threads_, 1, [&](int64_t, int64_t) { f(); });
  }

  cpu::FlushDenormals caller_;
  int64_t threads_;
};

template <class Element>
class CpuBackend {
 public:
  using T = Element;
  using A = Acc<T>;
  using O = A;  // bfloat16 is widened before its GEMMs, so that they accumulate and return float

  void gemm(Matrix<A> out, Matrix<const A> a, Matrix<const A> b, bool accumulate) const {
    const Borrowed out_tensor(out), a_tensor(a), b_tensor(b);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out_tensor.get(), out_tensor.get(),
                                                           a_tensor.get(), b_tensor.get(),
                                                           accumulate ? 1.0 : 0.0, 1.0));
  }

  template <class To, class From>
  void copy(Matrix<To> out, Matrix<const From> from) const {
    copy_tensor(Borrowed(out), Borrowed(from));
  }
  template <class To, class From>
  void copy(Matrix<To> out, Matrix<From> from) const {
    copy(out, Matrix<const From>(from));
  }

  // Steps [begin, begin + steps) of a sequence, as contiguous rows.
  template <class To, class From>
  void copy_steps(To* out, const Sequence<const From>& from, int64_t begin, int64_t steps,
                  int64_t batch) const {
    const int64_t sizes[] = {steps, batch, from.width};
    const int64_t strides[] = {batch * from.width, from.width, 1};
    const int64_t from_strides[] = {from.stride_t, from.stride_b, from.stride_w};
    copy_tensor(BorrowedTensor(out, 3, sizes, strides, kDeviceType, 0),
                BorrowedTensor(from.at(begin), 3, sizes, from_strides, kDeviceType, 0));
  }

  void zero(Matrix<A> out) const { std::fill_n(out.data, out.rows * out.columns, A(0)); }

  void forward(StageKind kind, const cpu::Forward<T>& step, int64_t rows) const {
    parallel(rows, step.width,
             [&](int64_t first, int64_t last) { kernels_.forward(kind, step, first, last); });
  }

  void backward(StageKind kind, const cpu::Backward<T>& step, int64_t rows) const {
    parallel(rows, step.width,
             [&](int64_t first, int64_t last) { kernels_.backward(kind, step, first, last); });
  }

  void column_sum(Matrix<const A> m, A* sum) const {
    parallel(m.columns, m.rows, [&](int64_t first, int64_t last) {
      kernels_.column_sum(m.data, m.rows, m.columns, first, last, sum);
    });
  }

 private:
  // Elements of a stage per thread, below which one thread does it: a barrier would cost as much as
  // it saves.
  static constexpr int64_t kStageGrain = 4'096;
  static constexpr int32_t kDeviceType = 0;  // CPU

  struct Borrowed : BorrowedTensor {
    template <class M>
    explicit Borrowed(const Matrix<M>& m) : Borrowed(m, std::array{m.rows, m.columns}) {}

   private:
    template <class M>
    Borrowed(const Matrix<M>& m, std::array<int64_t, 2> sizes)
        : BorrowedTensor(m.data, 2, sizes.data(), std::array{m.row_stride, m.column_stride}.data(),
                         kDeviceType, 0) {}
  };

  static void copy_tensor(const BorrowedTensor& out, const BorrowedTensor& from) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(out.get(), from.get(), 0));
  }

  // f over [0, count), each item being `size` elements of work.
  template <class F>
  static void parallel(int64_t count, int64_t size, const F& f) {
    const int64_t grain = std::max<int64_t>(1, kStageGrain / std::max<int64_t>(size, 1));
    if (count <= grain) return f(0, count);
    torch::stable::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
      const cpu::FlushDenormals flush;
      f(first, last);
    });
  }

  const cpu::Kernels<T>& kernels_ = cpu::kernels<T>();
};

}  // namespace fusedrnn
