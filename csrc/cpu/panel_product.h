// Products of any size.  A panel, some columns of the second operand, is copied so that its rows
// are contiguous, unless they already are and are not read often.  The first operand is copied too
// if its elements lie far apart and several panels meet them.  Then a few vectors of the panel at a
// time are multiplied with a few rows of the first operand, in registers.
#pragma once
#include "step.h"
#include "vector.h"

namespace fusedrnn::cpu::FUSEDRNN_ISA {

template <class A>
struct PanelProduct {
  // out (+)= a b, for at most kTileRows rows.  Rows of out are contiguous, and so are the rows or
  // the columns of a and of b.  An element's bits depend only on its own row of a and column of b.
  // scratch: kScratchNumbers numbers of the calling thread.
  static void all(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
                  bool accumulate, A* scratch) {
    alignas(64) A panel_copy[kTerms * kColumns];
    for (int64_t k = 0; k < a.columns; k += kTerms) {
      const int64_t terms = least(kTerms, a.columns - k);
      const Rows of_a = near(a.column_range(k, terms), out.columns, scratch);
      for (int64_t c = 0; c < out.columns; c += kColumns) {
        const int64_t count = least(kColumns, out.columns - c);
        const bool is_ready = b.column_stride == 1 && count % kWidth == 0 && a.rows <= kFewRows;
        const Matrix<const A> block = b.row_range(k, terms).column_range(c, count);
        multiply(out.column_range(c, count), of_a, is_ready ? block : copied(block, panel_copy),
                 accumulate || k > 0);
      }
    }
  }

  // Copies columns [first, last) of b to panels, one after the other: kColumns columns each, the
  // last one as many as whole vectors take.  first begins a panel.  16-bit numbers are converted.
  template <class From>
  static void pack(const Matrix<const From>& b, A* to, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; c += kColumns) {
      copied(b.column_range(c, least(kColumns, last - c)), to + c * b.rows);
    }
  }
  // The columns [first, last) of out (+)= a b, for a b that is packed.  The bits are those of
  // all().
  static void packed(const Matrix<A>& out, const Matrix<const A>& a, const A* panels,
                     bool accumulate, int64_t first, int64_t last) {
    const int64_t bytes = a.columns * out.columns * int64_t(sizeof(A));
    if (bytes > kLargeBytes && a.rows > kRows) {
      packed<true>(out, a, panels, accumulate, first, last);
    } else {
      packed<false>(out, a, panels, accumulate, first, last);
    }
  }

 private:
  typedef A Vector __attribute__((vector_size(4 * kLanes)));
  static constexpr int64_t kWidth = sizeof(Vector) / sizeof(A);
  static constexpr int kVectors = 4;  // of a row of a panel
  static constexpr int64_t kColumns = kVectors * kWidth;
  static constexpr int64_t kTerms = kPartTerms;
  static constexpr int64_t kFewRows = 64;
  static constexpr int64_t kFar = 4096 / sizeof(A);
  // The number of sums for which the instruction set has registers, in addition to the factors, and
  // the most rows of a strip.
#if defined(__x86_64__)
  static constexpr int kSums = kLanes == 16 ? 24 : 12, kRows = 6;  // of 32 registers, or of 16
#else
  static constexpr int kSums = 20, kRows = 5;  // of 32, of which the strip's terms take kRows
#endif
  // The distances of rows and of strips of kRows rows in a copy of a.  They are no multiples of a
  // power of two that would map rows or strips to the same lines of a cache.
  static constexpr int64_t kCopiedRow = kTerms + kWidth, kStripSize = kTerms * kRows + kWidth;
  static_assert(kScratchNumbers >= kTileRows * kCopiedRow &&
                kScratchNumbers >= (kTileRows + kRows - 1) / kRows * kStripSize);

  // At most kTerms columns of a.  strip_stride: the distance of each strip of kRows rows from the
  // one before it, if it is not as far as that of kRows rows.
  struct Rows {
    Matrix<const A> all;
    int64_t strip_stride = 0;

    Matrix<const A> strip(int64_t first, int64_t count) const {
      if (strip_stride == 0) return all.row_range(first, count);
      return {all.data + first / kRows * strip_stride, count, all.columns, 1, kRows};
    }
  };

  FUSEDRNN_HD static Vector load_whole(const A* p) {
    Vector x;
    memcpy(&x, p, sizeof x);
    return x;
  }
  // Loads the first n elements, at most a whole vector.
  template <class From>
  FUSEDRNN_HD static Vector load_first(const From* p, int64_t n) {
    if constexpr (!std::is_same_v<From, A>) {
      return load(p, least(n, kWidth));
    } else if (n >= kWidth) {
      return load_whole(p);
    } else if constexpr (std::is_same_v<Vector, VecF>) {
      return load(p, n);
    } else {
      Vector x{};
      memcpy(&x, p, size_t(n) * sizeof(A));
      return x;
    }
  }
  FUSEDRNN_HD static void store_first(A* p, Vector x, int64_t n) {
    if (n >= kWidth) {
      memcpy(p, &x, sizeof x);
    } else if constexpr (std::is_same_v<Vector, VecF>) {
      store(p, x, n);
    } else {
      memcpy(p, &x, size_t(n) * sizeof(A));
    }
  }

  // Copies a block of a panel to rows of whole vectors.  Elements beyond its columns are
  // unspecified and do not reach a result.
  template <class From>
  static Matrix<const A> copied(const Matrix<const From>& b, A* to) {
    constexpr int64_t kAhead = 8;  // rows: a processor does not foresee jumps to other pages
    const int64_t columns = (b.columns + kWidth - 1) / kWidth * kWidth;
    if (b.column_stride == 1) {
      for (int64_t k = 0; k < b.rows; ++k) {
        const From* const from = b.data + k * b.row_stride;
        const From* const ahead = from + least(kAhead, b.rows - 1 - k) * b.row_stride;
        for (int64_t c = 0; c < b.columns; c += kWidth) {
          __builtin_prefetch(ahead + c);
          store_first(to + k * columns + c, load_first(from + c, b.columns - c), kWidth);
        }
      }
      return Matrix<const A>::contiguous(to, b.rows, columns);
    }
    for (int64_t c = 0; c < b.columns; c += kWidth) {
      const int64_t count = b.columns - c;
      for (int64_t k = 0; k < b.rows; k += kWidth) {
        Vector v[kWidth];
        for (int64_t i = 0; i < kWidth; ++i) {
          const int64_t column = c + least(i, count - 1);
          v[i] = load_first(b.data + column * b.column_stride + k, b.rows - k);
        }
        transpose<1>(v);
        for (int64_t i = 0; i < least(kWidth, b.rows - k); ++i) {
          store_first(to + (k + i) * columns + c, v[i], kWidth);
        }
      }
    }
    return Matrix<const A>::contiguous(to, b.rows, columns);
  }

  // Transposes by swapping the off-diagonal blocks of kStep by kStep elements in each block of
  // twice that size, then the same with larger blocks.
  template <int kStep>
  FUSEDRNN_HD static void transpose(Vector (&v)[kWidth]) {
    if constexpr (kStep < kWidth) {
      constexpr std::make_integer_sequence<int, int(kWidth)> kAll;
      for (int i = 0; i < int(kWidth); ++i) {
        if (i & kStep) continue;
        const Vector upper = v[i], lower = v[i + kStep];
        v[i] = exchanged<kStep, 0>(upper, lower, kAll);
        v[i + kStep] = exchanged<kStep, 1>(upper, lower, kAll);
      }
      transpose<2 * kStep>(v);
    }
  }
  template <int kStep, int kHalf, int... I>
  FUSEDRNN_HD static Vector exchanged(Vector upper, Vector lower,
                                      std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(
        upper, lower, ((I & kStep) == 0 ? I + kHalf * kStep : I + kWidth - (1 - kHalf) * kStep)...);
  }

  // The rows of a so that neighbouring elements are near each other: copied if they lie in other
  // pages of memory, unless so few panels meet them that a copy does not pay.
  static Rows near(const Matrix<const A>& a, int64_t columns_of_b, A* to) {
    if (a.row_stride == 1 && a.column_stride >= kFar && a.rows > kRows) {
      copy_strips(a, to);
      return {{to, a.rows, a.columns, 1, kRows}, kStripSize};
    }
    if (a.column_stride == 1 && a.row_stride >= kFar && a.rows > kFewRows &&
        columns_of_b > kColumns) {
      for (int64_t r = 0; r < a.rows; ++r) {
        memcpy(to + r * kCopiedRow, a.data + r * a.row_stride, size_t(a.columns) * sizeof(A));
      }
      return {{to, a.rows, a.columns, kCopiedRow, 1}};
    }
    return {a};
  }

  // Copies strips of kRows rows, column by column.
  static void copy_strips(const Matrix<const A>& a, A* to) {
    for (int64_t k = 0; k < a.columns; ++k) {
      const A* from = a.data + k * a.column_stride;
      A* strip = to + k * kRows;
      int64_t r = 0;
      for (; r + kRows <= a.rows; r += kRows, strip += kStripSize) {
        memcpy(strip, from + r, kRows * sizeof(A));
      }
      for (int64_t i = r; i < a.rows; ++i) strip[i - r] = from[i];
    }
  }

  template <bool kFetches>
  static void packed(const Matrix<A>& out, const Matrix<const A>& a, const A* panels,
                     bool accumulate, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; c += kColumns) {
      const int64_t count = least(kColumns, last - c),
                    width = (count + kWidth - 1) / kWidth * kWidth;
      const A* panel = panels + c * a.columns;
      for (int64_t k = 0; k < a.columns; k += kTerms) {
        const int64_t terms = least(kTerms, a.columns - k);
        multiply<kFetches>(out.column_range(c, count), {a.column_range(k, terms)},
                           Matrix<const A>::contiguous(panel + k * width, terms, width),
                           accumulate || k > 0);
      }
    }
  }

  // kFetches: whether to fetch what comes after b in memory, for the next call.
  template <bool kFetches = false>
  static void multiply(const Matrix<A>& out, const Rows& a, const Matrix<const A>& b,
                       bool accumulate) {
    // Unless they are copies, strips are about equally high: 4 and 4 rows take less time than 6 and
    // 2.
    const int64_t strips = (out.rows + kRows - 1) / kRows;
    const int64_t height = a.strip_stride > 0 ? kRows : (out.rows + strips - 1) / strips;
    // As much as b, whose rows are contiguous.  Each strip fetches a line of memory per term, or
    // every second one, whose neighbour comes with it; when all is fetched, one line again and
    // again, which costs nothing.
    constexpr int64_t kLine = 64 / int64_t(sizeof(A));
    const int64_t size = b.rows * b.row_stride;
    const A* const next = b.data + size;
    Ahead ahead{next, strips * kLine < b.row_stride ? 2 * kLine : kLine};
    for (int64_t r = 0; r < out.rows; r += height) {
      const int64_t rows = least(height, out.rows - r);
      strip<kRows, kFetches>(out.row_range(r, rows), a.strip(r, rows), b, accumulate, ahead);
      if constexpr (kFetches) {
        ahead.from += ahead.step * b.rows;
        if (ahead.from - next >= size) ahead = {next, 0};
      }
    }
  }

  // Where to fetch, and how far from term to term.
  struct Ahead {
    const A* from;
    int64_t step;
  };
  // For at most kCount rows.
  template <int kCount, bool kFetches>
  FUSEDRNN_HD static void strip(const Matrix<A>& out, const Matrix<const A>& a,
                                const Matrix<const A>& b, bool accumulate, const Ahead& ahead) {
    if constexpr (kCount > 1) {
      if (a.rows < kCount) return strip<kCount - 1, kFetches>(out, a, b, accumulate, ahead);
    }
    constexpr int kAtOnce = kSums / kCount < kVectors ? kSums / kCount : kVectors;
    for (int64_t c = 0; c < out.columns; c += kAtOnce * kWidth) {
      tile<kCount, kAtOnce, kFetches>(out.column_range(c, out.columns - c), a,
                                      b.column_range(c, b.columns - c), accumulate, ahead);
    }
  }

  // Multiplies the first kAtOnce vectors of columns, or as many as there are.
  template <int kCount, int kAtOnce, bool kFetches>
  FUSEDRNN_HD static void tile(const Matrix<A>& out, const Matrix<const A>& a,
                               const Matrix<const A>& b, bool accumulate, const Ahead& ahead) {
    if constexpr (kAtOnce > 1) {
      if (b.columns < kAtOnce * kWidth) {
        return tile<kCount, kAtOnce - 1, kFetches>(out, a, b, accumulate, ahead);
      }
    }
    in_registers<kCount, kAtOnce, kFetches>(out, a, b, accumulate, ahead);
  }

  // A function of its own, so that the compiler keeps exactly these sums in registers.  All loops
  // but that over the terms are unrolled before the compiler decides what is kept in memory.
  template <int kCount, int kAtOnce, bool kFetches>
  __attribute__((noinline)) static void in_registers(const Matrix<A>& out, const Matrix<const A>& a,
                                                     const Matrix<const A>& b, bool accumulate,
                                                     const Ahead& ahead) {
    constexpr std::make_integer_sequence<int, kCount> kAllRows;
    constexpr std::make_integer_sequence<int, kAtOnce> kAllVectors;
    Vector sum[kCount][kAtOnce];
    for_each(kAllRows, [&](auto r) __attribute__((always_inline)) {
      for_each(kAllVectors, [&](auto j) __attribute__((always_inline)) { sum[r][j] = Vector{}; });
    });
    // The results' places are fetched while the sums are computed.
    for_each(kAllRows, [&](auto r) __attribute__((always_inline)) {
      for_each(kAllVectors, [&](auto j) __attribute__((always_inline)) {
        __builtin_prefetch(out.data + r * out.row_stride + j * kWidth, 1);
      });
    });
    const int64_t row_stride = a.row_stride, column_stride = a.column_stride, stride = b.row_stride;
    const A *term = a.data, *factors = b.data, *line = ahead.from;
    for (int64_t k = 0; k < a.columns; ++k, term += column_stride, factors += stride) {
      if (kFetches) {
        __builtin_prefetch(line, 0, 2);
        line += ahead.step;
      }
      Vector factor[kAtOnce];
      for_each(kAllVectors, [&](auto j) __attribute__((always_inline)) {
        factor[j] = load_whole(factors + j * kWidth);
      });
      for_each(kAllRows, [&](auto r) __attribute__((always_inline)) {
        const A x = term[r * row_stride];
        for_each(kAllVectors,
                 [&](auto j) __attribute__((always_inline)) { sum[r][j] += x * factor[j]; });
      });
    }
    A* to = out.data;
    const int64_t last = out.columns - (kAtOnce - 1) * kWidth;
    for_each(kAllRows, [&](auto r) __attribute__((always_inline)) {
      for_each(kAllVectors, [&](auto j) __attribute__((always_inline)) {
        const int64_t count = j + 1 < kAtOnce ? kWidth : last;
        A* const place = to + j * kWidth;
        if (accumulate) sum[r][j] += load_first(place, count);
        store_first(place, sum[r][j], count);
      });
      to += out.row_stride;
    });
  }

  template <int... I, class F>
  FUSEDRNN_HD static void for_each(std::integer_sequence<int, I...>, const F& f) {
    (f(std::integral_constant<int, I>{}), ...);
  }
};

}  // namespace fusedrnn::cpu::FUSEDRNN_ISA
