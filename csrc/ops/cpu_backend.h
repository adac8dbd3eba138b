// The driver's backend for CPU tensors: products and stages by the kernels of cpu/, copies by
// torch, on the threads of torch's pool.  Torch also does most products on processors for which
// cpu::multiplies() is false.
#pragma once
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <array>
#include <memory>

#include "../cpu/denormals.h"
#include "../cpu/memory.h"
#include "../cpu/signals.h"
#include "../cpu/step.h"
#include "../cpu/team.h"
#include "../program/carries.h"
#include "../program/stage.h"
#include "cpu_loops.h"
#include "stable.h"

namespace fusedrnn {

template <class Element>
class CpuBackend : public cpu::Memory<Element> {
 public:
  using T = Element;
  using A = Acc<T>;
  struct Recording {};

  void use_scratch(char* const (&)[2], const ScratchNeeds& /*needs*/) const {}
  void expect(int64_t /*seq_len*/, int64_t /*batch*/) const {}

  // The CPU has no streams: all work runs in order.
  struct Split {
    void join() const {}
  };
  Split fork(bool /*wanted*/) const { return {}; }
  template <class F>
  void on_side_stream(const F& f) const {
    f();
  }
  void sync() const {}

  template <class F>
  void enqueue(Recording&, bool /*is_whole*/, bool /*repeats*/, int64_t /*first_row*/,
               const F& steps) const {
    steps(nullptr);
  }
  static bool can_share_rows(int64_t rows) { return fusedrnn::can_share_rows(rows); }
  template <class F>
  void share_rows(int64_t rows, int64_t work, const F& f) {
    signals_.look();
    fusedrnn::share_rows(rows, work, f);
  }

  void gemm(Matrix<A> out, Matrix<const A> a, Matrix<const A> b, bool accumulate,
            bool /*is_of_input*/ = false) {
    signals_.look();
    // True for a weight's gradient, which sums over the rows of a chunk.  Its own rows are units,
    // and a few of them would be summed as inaccurately as a few columns.
    const bool sums_rows = a.row_stride == 1;
    const bool has_few_rows = out.rows < (sums_rows ? cpu::kWide : cpu::kTall);
    const bool is_narrow = out.columns < cpu::kWide;
    if (out.columns >= cpu::kProductColumns && !(sums_rows && has_few_rows)) {
      const cpu::ProductRows& most = kernels_.product_rows;
      const bool is_large = b.rows * b.columns * int64_t(sizeof(A)) > cpu::kLargeBytes;
      const bool has_dots = a.column_stride == 1 && b.row_stride == 1;
      if (has_dots && out.rows <= (is_large ? most.dots_of_large : most.dots)) {
        return flat(out, a, b, accumulate);
      }
      if (out.rows <= most.panels) return panels(out, a, b, accumulate);
    }
    // A product of few rows and contiguous terms, unlike those of forward.
    if (has_few_rows && out.columns >= cpu::kTall && b.column_stride == 1) {
      return narrow(out.transposed(), b.transposed(), a.transposed(), accumulate);
    }
    if (is_narrow && (sums_rows || !has_few_rows)) return narrow(out, a, b, accumulate);
    // torch's GEMM may round differently with another number of threads.
    if (cpu::multiplies()) return panels(out, a, b, accumulate);
    const BorrowedTensor out_tensor = borrower_.borrow(out), a_tensor = borrower_.borrow(a),
                         b_tensor = borrower_.borrow(b);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(out_tensor.get(), out_tensor.get(),
                                                           a_tensor.get(), b_tensor.get(),
                                                           accumulate ? 1.0 : 0.0, 1.0));
  }

  // The same for a weight as panels.
  template <class From>
  void pack(Matrix<const From> b, A* to) const {
    share_panels(b.columns, b.rows, [&](int64_t first, int64_t last) {
      if constexpr (std::is_same_v<From, A>) {
        kernels_.pack(b, to, first, last);
      } else {
        kernels_.pack_tensor(b, to, first, last);
      }
    });
  }
  void gemm_packed(Matrix<A> out, Matrix<const A> a, const A* panels, bool accumulate) {
    if (const RowShare* const share = RowShare::of_this_thread; share != nullptr) {
      return kernels_.packed_product(share->of(out), share->of(a), panels, accumulate, 0,
                                     out.columns);
    }
    signals_.look();
    if (out.rows <= cpu::kLeastTile) {
      return share_panels(out.columns, a.rows * a.columns, [&](int64_t first, int64_t last) {
        kernels_.packed_product(out, a, panels, accumulate, first, last);
      });
    }
    share_tiles(out, a.columns, [&](int64_t r, int64_t tall, int64_t c, int64_t wide) {
      kernels_.packed_product(out.row_range(r, tall), a.row_range(r, tall), panels, accumulate, c,
                              c + wide);
    });
  }

  template <class To, class From>
  void copy(Matrix<To> out, Matrix<From> from) const {
    if (const RowShare* const share = RowShare::of_this_thread; share != nullptr) {
      out = share->of(out);
      from = share->of(from);
    }
    // A call of torch takes longer than copying a few rows.
    constexpr int64_t kFew = 16'384;
    const bool has_rows = out.column_stride == 1 && from.column_stride == 1;
    if (has_rows && out.rows * out.columns <= kFew) {
      for (int64_t r = 0; r < out.rows; ++r) {
        copy_row(out.data + r * out.row_stride, from.data + r * from.row_stride, out.columns);
      }
    } else if (lacks_pool()) {
      copy_elements(out, Matrix<const From>(from));
    } else {
      const Matrix<const From> source = from;
      share_copies(out.rows, out.columns, [&](int64_t first, int64_t last) {
        borrower_.copy(out.row_range(first, last - first), source.row_range(first, last - first));
      });
    }
  }
  template <class To, class From>
  void copy_steps(const Sequence<To>& out, int64_t first, const Sequence<const From>& from,
                  int64_t begin, int64_t steps, int64_t batch) const {
    if (!lacks_pool()) {
      return share_copies(steps, batch * out.width, [&](int64_t s, int64_t end) {
        borrower_.copy_steps(out, first + s, from, begin + s, end - s, batch);
      });
    }
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t rows = std::min(out.rows_of(first + t, batch), from.rows_of(begin + t, batch));
      copy_elements(
          Matrix<To>{out.at(first + t), rows, out.width, out.stride_b, out.stride_w},
          Matrix<const From>{from.at(begin + t), rows, from.width, from.stride_b, from.stride_w});
    }
  }

  template <class C>
  void zero(Matrix<C> out) const {
    if (const RowShare* const share = RowShare::of_this_thread; share != nullptr)
      out = share->of(out);
    std::fill_n(out.data, out.rows * out.columns, C{});
  }

  void forward(StageKind kind, const cpu::Forward<T>& step, int64_t rows) const {
    of_rows(rows, step.width,
            [&](int64_t first, int64_t last) { kernels_.forward(kind, step, first, last); });
  }

  void backward(StageKind kind, const cpu::Backward<T>& step, int64_t rows) const {
    of_rows(rows, step.width,
            [&](int64_t first, int64_t last) { kernels_.backward(kind, step, first, last); });
  }

  void gather(const GatherStep<T, A>& step, int64_t rows) const {
    parallel(rows, step.width,
             [&](int64_t first, int64_t last) { kernels_.gather(step, first, last); });
  }

  void clear(const ClearStep<A>& step, int64_t rows) const {
    parallel(rows, step.width,
             [&](int64_t first, int64_t last) { kernels_.clear(step, first, last); });
  }

  void dropout(const DropoutStep<A>& step, int64_t rows) const {
    parallel(rows, step.width,
             [&](int64_t first, int64_t last) { kernels_.dropout(step, first, last); });
  }

  void draw(const DrawStep<T>& step, int64_t rows) const {
    parallel(rows, step.width,
             [&](int64_t first, int64_t last) { kernels_.draw(step, first, last); });
  }

  void column_sums(const ColumnSums<A>& sums) const {
    for (int i = 0; i < sums.count; ++i) {
      const Matrix<const A> m{sums.data[i], sums.rows, sums.columns[i], sums.row_stride[i], 1};
      parallel(m.columns, m.rows, [&](int64_t first, int64_t last) {
        kernels_.column_sum(m, first, last, sums.sum[i], sums.accumulate);
      });
    }
  }

  // The stages of programs, and what becomes of their carries.

  void stage(const program::Stages& stages, int64_t stage, bool is_backward,
             const program::StageArgs& args, int64_t rows) {
    if (RowShare::of_this_thread == nullptr) signals_.look();
    of_rows(rows, args.width, [&](int64_t first, int64_t last) {
      stages.run(stage, is_backward, &args, first, last);
    });
  }

  template <class P, class To>
  void carry_before(const program::CarryBefore<T, P, To>& step, int64_t rows) const {
    of_rows(rows, step.width, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        To* const out = step.out + row * step.width;
        step.with_source(row, [&](const auto* from) {
          if (from == nullptr) {
            std::fill_n(out, step.width, To{});
          } else {
            copy_row(out, from, step.width);
          }
        });
      }
    });
  }
  template <class P>
  void carry_last(const program::CarryLast<T, P>& step, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      if (!step.is_wanted(row)) continue;
      copy_row(step.last + row * step.width, step.after + row * step.stride, step.width);
    }
  }
  void carry_gradient(const program::CarryGradient<T>& step, int64_t rows) const {
    of_rows(rows, step.width, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        if (!step.takes_step(row)) continue;
        const bool is_reset = step.is_reset(row);
        for (int64_t column = 0; column < step.width; ++column) step.unit(row, column, is_reset);
      }
    });
  }
  void carry_part(const program::CarryPart<A>& step, int64_t rows) const {
    of_rows(rows, step.width, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const bool takes_step = step.takes_step(row);
        for (int64_t column = 0; column < step.width; ++column) step.unit(row, column, takes_step);
      }
    });
  }

 private:
  template <class To, class From>
  static void copy_row(To* out, const From* from, int64_t columns) {
    if constexpr (std::is_same_v<To, From>) {
      std::copy_n(from, columns, out);
    } else {
      for (int64_t column = 0; column < columns; ++column) {
        out[column] = program::convert<To>(from[column]);
      }
    }
  }

  template <class To, class From>
  static void copy_elements(const Matrix<To>& out, const Matrix<const From>& from) {
    for (int64_t r = 0; r < out.rows; ++r) {
      for (int64_t c = 0; c < out.columns; ++c) {
        To& to = out.data[r * out.row_stride + c * out.column_stride];
        copy_row(&to, from.data + r * from.row_stride + c * from.column_stride, 1);
      }
    }
  }

  void flat(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
            bool accumulate) const {
    parallel(out.columns, a.rows * a.columns / kTermsPerElement, [&](int64_t first, int64_t last) {
      kernels_.flat_product(out, a, b, accumulate, first, last);
    });
  }
  void panels(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
              bool accumulate) const {
    share_tiles(out, a.columns, [&](int64_t r, int64_t tall, int64_t c, int64_t wide) {
      kernels_.panel_product(out.row_range(r, tall).column_range(c, wide), a.row_range(r, tall),
                             b.column_range(c, wide), accumulate, scratch());
    });
  }
  // Calls f(first row, rows, first column, columns) for tiles of a product of so many terms.  Each
  // begins a panel of a packed weight.
  template <class F>
  static void share_tiles(const Matrix<A>& out, int64_t terms, const F& f) {
    static_assert(cpu::kTileColumns % cpu::kPackedColumns == 0 &&
                  cpu::kLeastTile % cpu::kPackedColumns == 0);
    int64_t rows = std::min(out.rows, cpu::kTileRows);
    int64_t columns = std::min(out.columns, cpu::kTileColumns);
    const auto across = [&] { return (out.columns + columns - 1) / columns; };
    const auto tiles = [&] { return (out.rows + rows - 1) / rows * across(); };
    // Several tiles for each thread, so that all end at about the same time.
    const int64_t threads = torch::stable::get_num_threads(),
                  wanted = threads > 1 ? 4 * threads : 1;
    while (tiles() < wanted && std::max(rows, columns) > cpu::kLeastTile) {
      int64_t& larger = columns >= rows ? columns : rows;
      larger = (larger / 2 + cpu::kLeastTile - 1) / cpu::kLeastTile * cpu::kLeastTile;
    }
    parallel(tiles(), rows * columns * terms / kTermsPerElement, [&](int64_t tile, int64_t end) {
      for (; tile < end; ++tile) {
        const int64_t r = tile / across() * rows, c = tile % across() * columns;
        f(r, std::min(rows, out.rows - r), c, std::min(columns, out.columns - c));
      }
    });
  }
  // Kept by each thread that multiplies; on its stack it could be too large for a small one.
  static A* scratch() {
    static thread_local const std::unique_ptr<A[]> numbers(new A[cpu::kScratchNumbers]);
    return numbers.get();
  }
  // terms: of all multiply-adds of a column.
  template <class F>
  static void share_panels(int64_t columns, int64_t terms, const F& f) {
    constexpr int64_t kPanel = cpu::kPackedColumns;
    const int64_t panels = (columns + kPanel - 1) / kPanel;
    parallel(panels, kPanel * terms / kTermsPerElement, [&](int64_t first, int64_t last) {
      f(first * kPanel, std::min(last * kPanel, columns));
    });
  }
  void narrow(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
              bool accumulate) const {
    parallel(out.rows, a.columns * b.columns / kTermsPerElement, [&](int64_t first, int64_t last) {
      kernels_.narrow_product(out, a, b, accumulate, first, last);
    });
  }

  const Borrower borrower_{0, 0};  // the CPU
  cpu::Signals signals_;
  const cpu::Kernels<T>& kernels_ = cpu::kernels<T>();
};

}  // namespace fusedrnn
