// Products whose results have few columns: gradients of weights that a narrow input or state
// meets, and of a narrow input.  A library's GEMM may add up the terms of such a product one after
// another (MKL does for fewer than 12 columns), so its rounding error grows with the square root of
// their number, here of all rows of a chunk; and it may be several times slower than for wide ones.
#pragma once
#include "step.h"
#include "vector.h"

namespace fusedrnn::cpu::FUSEDRNN_ISA {

FUSEDRNN_HD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class A>
struct NarrowProduct {
  typedef A Vector __attribute__((vector_size(4 * kLanes)));
  static constexpr int64_t kRows = sizeof(Vector) / sizeof(A);
  static constexpr int64_t kTerms = 128;  // that are added up one after another
  static constexpr int64_t kGroup = 4;    // columns whose sums are made at once, in registers

  // Rows [first, last) of out (+)= a b.  An element's bits do not depend on the range it is in.
  static void rows(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
                   bool accumulate, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row += kRows) {
      const int64_t count = least(kRows, last - row);
      Vector sum[kWide] = {};
      add_products(a.row_range(row, count), b, sum);
      for (int64_t c = 0; c < out.columns; ++c) {
        A* to = out.data + row * out.row_stride + c * out.column_stride;
        for (int64_t r = 0; r < count; ++r, to += out.row_stride) {
          *to = accumulate ? *to + sum[c][r] : sum[c][r];
        }
      }
    }
  }

 private:
  FUSEDRNN_HD static void add_products(const Matrix<const A>& strip, const Matrix<const A>& b,
                                       Vector (&sum)[kWide]) {
    A copied[kTerms * kRows];
    for (int64_t k = 0; k < strip.columns; k += kTerms) {
      const Matrix<const A> terms = strip.column_range(k, least(kTerms, strip.columns - k));
      const Matrix<const A> factors = b.row_range(k, terms.columns);
      if (terms.rows == kRows && terms.row_stride == 1) {
        add_terms(terms.data, terms.column_stride, factors, sum);
      } else {
        copy(terms, copied);
        add_terms(copied, kRows, factors, sum);
      }
    }
  }

  // Columns of a strip as whole vectors, one after another.  Where it has fewer rows, the last one
  // stands in the other lanes, whose sums nobody reads.
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

  FUSEDRNN_HD static void add_terms(const A* terms, int64_t stride, const Matrix<const A>& factors,
                                    Vector* sum) {
    for (int64_t c = 0; c < factors.columns; c += kGroup) {
      const Matrix<const A> group = factors.column_range(c, least(kGroup, factors.columns - c));
      switch (group.columns) {
        case 1: add_columns<1>(terms, stride, group, sum + c); break;
        case 2: add_columns<2>(terms, stride, group, sum + c); break;
        case 3: add_columns<3>(terms, stride, group, sum + c); break;
        default: add_columns<kGroup>(terms, stride, group, sum + c);
      }
    }
  }

  template <int kColumns>
  FUSEDRNN_HD static void add_columns(const A* terms, int64_t stride,
                                      const Matrix<const A>& factors, Vector* sum) {
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
