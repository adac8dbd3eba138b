// Products of few rows with the transpose of a weight.  The weight is read once, in place: to
// rearrange it, as for more rows, would take longer than the product itself.
#pragma once
#include "step.h"
#include "vector.h"

namespace fusedrnn::cpu::FUSEDRNN_ISA {

// Rows of out and a, and columns of b, are contiguous.
template <class A>
struct FlatProduct {
  // Columns [first, last) of out (+)= a b.  An element's bits depend only on its own row of a and
  // column of b.
  static void columns(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
                      bool accumulate, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; c += kGroup) {
      const int64_t count = least(kGroup, last - c);
      const A* column[kGroup];  // the last one is repeated to fill the group; the extra results are
                                // dropped
      for (int64_t j = 0; j < kGroup; ++j) {
        column[j] = b.data + (c + least(j, count - 1)) * b.column_stride;
      }
      for (int64_t r = 0; r < a.rows; r += kRows) {
        const int64_t rows = least(kRows, a.rows - r);
        dots<kRows>(out.row_range(r, rows).column_range(c, count), a.row_range(r, rows), column,
                    accumulate);
      }
    }
  }

 private:
  static constexpr int64_t kTerms = 64;  // the most that are added one after another
  static constexpr int kGroup = 4;       // columns whose dot products are computed together
  static constexpr int64_t kBytes = 4 * kLanes, kLeastBytes = kGroup * sizeof(A);
  typedef A Vector __attribute__((vector_size(kBytes > kLeastBytes ? kBytes : kLeastBytes)));
  typedef A Group __attribute__((vector_size(kLeastBytes)));
  static constexpr int64_t kWidth = sizeof(Vector) / sizeof(A);
  // The number of rows for which x86 has registers; other processors may have them for more.
  static constexpr int kRows = kLanes == 16 ? 4 : 2;

  FUSEDRNN_HD static Vector load_all(const A* p) {
    Vector x;
    memcpy(&x, p, sizeof x);
    return x;
  }
  FUSEDRNN_HD static Vector load_first(const A* p, int64_t n) {
    if constexpr (std::is_same_v<Vector, VecF>) {
      return load(p, n);
    } else {
      Vector x{};
      memcpy(&x, p, size_t(n) * sizeof(A));
      return x;
    }
  }

  // Dot products of at most kCount rows.
  template <int kCount>
  FUSEDRNN_HD static void dots(const Matrix<A>& out, const Matrix<const A>& a,
                               const A* const (&column)[kGroup], bool accumulate) {
    if constexpr (kCount > 1) {
      if (a.rows < kCount) return dots<kCount - 1>(out, a, column, accumulate);
    }
    Vector sum[kCount][kGroup] = {};
    for (int64_t begin = 0; begin < a.columns; begin += kTerms * kWidth) {
      const int64_t end = least(a.columns, begin + kTerms * kWidth);
      Vector part[kCount][kGroup] = {};
      int64_t k = begin;
      for (; k + kWidth <= end; k += kWidth) {
        add<kCount>(a, column, k, part,
                    [](const A* p) __attribute__((always_inline)) { return load_all(p); });
      }
      if (k < end) {
        add<kCount>(a, column, k, part, [n = end - k](const A* p) __attribute__((always_inline)) {
          return load_first(p, n);
        });
      }
      for (int r = 0; r < kCount; ++r) {
        for (int j = 0; j < kGroup; ++j) sum[r][j] += part[r][j];
      }
    }
    for (int r = 0; r < kCount; ++r) {
      store(out.row_range(r, 1), sums_of(sum[r]), accumulate);
    }
  }

  template <int kCount, class Load>
  FUSEDRNN_HD static void add(const Matrix<const A>& a, const A* const (&column)[kGroup], int64_t k,
                              Vector (&sum)[kCount][kGroup], const Load& load) {
    Vector factor[kGroup];
    for (int j = 0; j < kGroup; ++j) factor[j] = load(column[j] + k);
    for (int r = 0; r < kCount; ++r) {
      const Vector term = load(a.data + r * a.row_stride + k);
      for (int j = 0; j < kGroup; ++j) sum[r][j] += term * factor[j];
    }
  }

  // The sums of the elements of each vector.
  FUSEDRNN_HD static Group sums_of(const Vector (&v)[kGroup]) {
    constexpr std::make_integer_sequence<int, int(kWidth)> kAll;
    const Vector first = interleave<1, 0>(v[0], v[1], kAll) + interleave<1, 1>(v[0], v[1], kAll);
    const Vector second = interleave<1, 0>(v[2], v[3], kAll) + interleave<1, 1>(v[2], v[3], kAll);
    const Vector four =
        interleave<2, 0>(first, second, kAll) + interleave<2, 1>(first, second, kAll);
    Group part[kWidth / kGroup];
    memcpy(part, &four, sizeof four);
    for (int64_t half = kWidth / kGroup / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) part[i] += part[i + half];
    }
    return part[0];
  }

  // Stores values to a part of a row.
  FUSEDRNN_HD static void store(const Matrix<A>& out, Group values, bool accumulate) {
    if (out.columns == kGroup) {
      if (accumulate) {
        Group before;
        memcpy(&before, out.data, sizeof before);
        values += before;
      }
      memcpy(out.data, &values, sizeof values);
      return;
    }
    for (int64_t c = 0; c < out.columns; ++c) {
      out.data[c] = accumulate ? out.data[c] + values[c] : values[c];
    }
  }
};

}  // namespace fusedrnn::cpu::FUSEDRNN_ISA
