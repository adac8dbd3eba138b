// Products whose results have few columns: gradients of weights that a narrow input or state
// meets, and of a narrow input.  A library's GEMM may add up the terms of such a product one after
// another (MKL does for fewer than 12 columns), so its rounding error grows with the square root of
// their number, here of all rows of a chunk; and it may be several times slower than for wide ones.
#pragma once
#include "../matrix.h"
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
      const Matrix<const A> strip = a.row_range(row, count);
      for (int64_t column = 0; column < out.columns; column += kGroup) {
        const int64_t columns = least(kGroup, out.columns - column);
        Vector sum[kGroup] = {};
        add_products(strip, b.column_range(column, columns), sum);
        for (int64_t c = 0; c < columns; ++c) {
          A* to = out.data + row * out.row_stride + (column + c) * out.column_stride;
          for (int64_t r = 0; r < count; ++r, to += out.row_stride) {
            *to = accumulate ? *to + sum[c][r] : sum[c][r];
          }
        }
      }
    }
  }

 private:
  FUSEDRNN_HD static void add_products(const Matrix<const A>& strip, const Matrix<const A>& b,
                                       Vector (&sum)[kGroup]) {
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

  // Columns of a strip as whole vectors, one after another, with zeros where it has no rows.
  FUSEDRNN_HD static void copy(const Matrix<const A>& terms, A* to) {
    for (int64_t r = 0; r < kRows; ++r) {
      const A* from = terms.data + (r < terms.rows ? r * terms.row_stride : 0);
      for (int64_t k = 0; k < terms.columns; ++k) {
        to[k * kRows + r] = r < terms.rows ? from[k * terms.column_stride] : A(0);
      }
    }
  }

  FUSEDRNN_HD static void add_terms(const A* terms, int64_t stride, const Matrix<const A>& factors,
                                    Vector (&sum)[kGroup]) {
    switch (factors.columns) {
      case 1: return add_columns<1>(terms, stride, factors, sum);
      case 2: return add_columns<2>(terms, stride, factors, sum);
      case 3: return add_columns<3>(terms, stride, factors, sum);
      default: return add_columns<kGroup>(terms, stride, factors, sum);
    }
  }

  template <int kColumns>
  FUSEDRNN_HD static void add_columns(const A* terms, int64_t stride,
                                      const Matrix<const A>& factors, Vector (&sum)[kGroup]) {
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
