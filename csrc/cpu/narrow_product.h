// Products whose results have few columns, or transposed, few rows.  A library's GEMM may add the
// terms of such a product one after another (MKL does for fewer than 12 columns or 4 rows), onto a
// sum that exists already.  Its rounding error then grows with the square root of their number,
// which in gradients of weights is the number of rows of a chunk.
#pragma once
#include "step.h"
#include "vector.h"

namespace fusedrnn::cpu::FUSEDRNN_ISA {

template <class A>
struct NarrowProduct {
  typedef A Vector __attribute__((vector_size(4 * kLanes)));
  static constexpr int64_t kRows = sizeof(Vector) / sizeof(A);
  static constexpr int64_t kTerms = 32;  // the most that are added one after another
  static constexpr int64_t kGroup = 4;   // columns whose sums are computed together, in registers

  // Rows [first, last) of out (+)= a b.  An element's bits do not depend on that range.
  static void rows(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
                   bool accumulate, int64_t first, int64_t last) {
    const bool streams = a.row_stride == 1 && b.columns < kTall;
    const int64_t step = streams ? kStrip : kRows;
    for (int64_t row = first; row < last; row += step) {
      const int64_t count = least(step, last - row);
      const Matrix<A> result = out.row_range(row, count);
      const Matrix<const A> strip = a.row_range(row, count);
      if (streams) {
        stream<kTall - 1>(result, strip, b, accumulate);
      } else {
        in_registers(result, strip, b, accumulate);
      }
    }
  }

 private:
  static constexpr int64_t kStrip = 512;

  // For at most kColumns columns, and contiguous columns of a.  a may be a weight, larger than a
  // cache, so it is read from start to end, a few terms at a time.
  template <int kColumns>
  FUSEDRNN_HD static void stream(const Matrix<A>& out, const Matrix<const A>& a,
                                 const Matrix<const A>& b, bool accumulate) {
    if constexpr (kColumns > 1) {
      if (b.columns < kColumns) return stream<kColumns - 1>(out, a, b, accumulate);
    }
    constexpr int64_t kAtOnce = 4;
    A sum[kColumns][kStrip] = {};
    for (int64_t begin = 0; begin < a.columns; begin += kTerms) {
      const int64_t end = least(a.columns, begin + kTerms);
      A part[kColumns][kStrip] = {};
      int64_t k = begin;
      for (; k + kAtOnce <= end; k += kAtOnce) add_terms<kColumns, kAtOnce>(a, b, k, part);
      for (; k < end; ++k) add_terms<kColumns, 1>(a, b, k, part);
      for (int c = 0; c < kColumns; ++c) {
        for (int64_t r = 0; r < a.rows; ++r) sum[c][r] += part[c][r];
      }
    }
    for (int c = 0; c < kColumns; ++c) store(out, c, sum[c], accumulate);
  }

  // Adds terms k, k + 1, ... to each sum, in this order.
  template <int kColumns, int kCount>
  FUSEDRNN_HD static void add_terms(const Matrix<const A>& a, const Matrix<const A>& b, int64_t k,
                                    A (&part)[kColumns][kStrip]) {
    const A* term[kCount];
    A factor[kCount][kColumns];
    for (int i = 0; i < kCount; ++i) {
      term[i] = a.data + (k + i) * a.column_stride;
      for (int c = 0; c < kColumns; ++c) {
        factor[i][c] = b.data[(k + i) * b.row_stride + c * b.column_stride];
      }
    }
    for (int64_t r = 0; r < a.rows; ++r) {
      for (int c = 0; c < kColumns; ++c) {
        A x = part[c][r];
        for (int i = 0; i < kCount; ++i) x += term[i][r] * factor[i][c];
        part[c][r] = x;
      }
    }
  }

  // For at most kRows rows.
  FUSEDRNN_HD static void in_registers(const Matrix<A>& out, const Matrix<const A>& a,
                                       const Matrix<const A>& b, bool accumulate) {
    A copied[kTerms * kRows];
    Vector sum[kWide] = {};
    for (int64_t k = 0; k < a.columns; k += kTerms) {
      const Matrix<const A> terms = a.column_range(k, least(kTerms, a.columns - k));
      const Matrix<const A> factors = b.row_range(k, terms.columns);
      if (terms.rows == kRows && terms.row_stride == 1) {
        add_products(terms.data, terms.column_stride, factors, sum);
      } else {
        copy(terms, copied);
        add_products(copied, kRows, factors, sum);
      }
    }
    for (int64_t c = 0; c < out.columns; ++c) {
      A values[kRows];
      memcpy(values, &sum[c], sizeof values);
      store(out, c, values, accumulate);
    }
  }

  FUSEDRNN_HD static void store(const Matrix<A>& out, int64_t column, const A* values,
                                bool accumulate) {
    A* to = out.data + column * out.column_stride;
    for (int64_t r = 0; r < out.rows; ++r, to += out.row_stride) {
      *to = accumulate ? *to + values[r] : values[r];
    }
  }

  // Copies the columns of a strip as whole vectors.  If the strip has fewer rows, its last row is
  // repeated in the other lanes, whose sums are dropped.
  FUSEDRNN_HD static void copy(const Matrix<const A>& terms, A* to) {
    const A* row[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      row[r] = terms.data + least(r, terms.rows - 1) * terms.row_stride;
    }
    for (int64_t k = 0; k < terms.columns; ++k) {
      Vector column;
      for (int64_t r = 0; r < kRows; ++r) column[r] = row[r][k * terms.column_stride];
      memcpy(to + k * kRows, &column, sizeof column);
    }
  }

  FUSEDRNN_HD static void add_products(const A* terms, int64_t stride,
                                       const Matrix<const A>& factors, Vector* sum) {
    for (int64_t c = 0; c < factors.columns; c += kGroup) {
      const int64_t count = least(kGroup, factors.columns - c);
      add_columns<kGroup>(terms, stride, factors.column_range(c, count), sum + c);
    }
  }

  // For at most kColumns columns.
  template <int kColumns>
  FUSEDRNN_HD static void add_columns(const A* terms, int64_t stride,
                                      const Matrix<const A>& factors, Vector* sum) {
    if constexpr (kColumns > 1) {
      if (factors.columns < kColumns) {
        return add_columns<kColumns - 1>(terms, stride, factors, sum);
      }
    }
    Vector part[kColumns] = {};
    for (int64_t k = 0; k < factors.rows; ++k) {
      Vector term;
      memcpy(&term, terms + k * stride, sizeof term);
      const A* factor = factors.data + k * factors.row_stride;
      for (int c = 0; c < kColumns; ++c) part[c] += term * factor[c * factors.column_stride];
    }
    for (int c = 0; c < kColumns; ++c) sum[c] += part[c];
  }
};

}  // namespace fusedrnn::cpu::FUSEDRNN_ISA
