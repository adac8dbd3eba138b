// Strided views that the driver hands to GEMMs and copies.  Strides and sizes count elements.
#pragma once
#include <cstdint>

namespace fusedrnn {

template <class T>
struct Matrix {
  T* data;
  int64_t rows, columns, row_stride, column_stride;

  static Matrix contiguous(T* data, int64_t rows, int64_t columns) {
    return {data, rows, columns, columns, 1};
  }
  // A tensor of any strides.  That of a dimension with one element says nothing, and is made one of
  // a matrix whose rows, or else columns, are contiguous: products look at strides alone.
  static Matrix strided(T* data, int64_t rows, int64_t columns, int64_t row_stride,
                        int64_t column_stride) {
    if (columns == 1) column_stride = 1;
    if (rows == 1) row_stride = column_stride == 1 ? columns : 1;
    return {data, rows, columns, row_stride, column_stride};
  }
  operator Matrix<const T>() const { return {data, rows, columns, row_stride, column_stride}; }
  Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }
  // Whether a GEMM can read it: the elements of each row, or of each column, lie next to each other
  // in memory.
  bool is_operand() const {
    return (column_stride == 1 && (row_stride >= columns || rows == 1)) ||
           (row_stride == 1 && (column_stride >= rows || columns == 1));
  }
  Matrix row_range(int64_t begin, int64_t count) const {
    return {data + begin * row_stride, count, columns, row_stride, column_stride};
  }
  Matrix column_range(int64_t begin, int64_t count) const {
    return {data + begin * column_stride, rows, count, row_stride, column_stride};
  }
};

// A (seq_len, batch, width) tensor as the user gave it, with any strides; data == nullptr if there
// is none.
// A packed one is (rows, width) instead, and each step has rows only for the first entries of the
// batch.  starts[t] is then the first row of step t, and starts[seq_len] the number of all rows.
template <class T>
struct Sequence {
  T* data;
  int64_t width, stride_t, stride_b, stride_w;
  const int64_t* starts = nullptr;

  operator Sequence<const T>() const { return {data, width, stride_t, stride_b, stride_w, starts}; }
  static Sequence contiguous(T* data, int64_t batch, int64_t width) {
    return {data, width, batch * width, width, 1};
  }
  bool is_packed() const { return starts != nullptr; }
  // Whether the (t, b) rows of `steps` steps lie at one stride, so that a GEMM can read them.
  bool has_uniform_rows(int64_t steps, int64_t batch) const {
    return !is_packed() && (stride_w == 1 || width == 1) && row_stride(steps, batch) >= width &&
           (steps == 1 || batch == 1 || stride_t == batch * stride_b);
  }
  int64_t row_stride(int64_t steps, int64_t batch) const {
    return batch > 1 ? stride_b : steps > 1 ? stride_t : width;
  }
  T* at(int64_t t) const { return data + (is_packed() ? starts[t] * stride_b : t * stride_t); }
  int64_t rows_of(int64_t t, int64_t batch) const {
    return is_packed() ? starts[t + 1] - starts[t] : batch;
  }
  // The number of steps, from step t on and at most `steps`, whose rows lie at one stride.
  int64_t alike_from(int64_t t, int64_t steps) const {
    if (!is_packed()) return steps;
    int64_t alike = 1;
    while (alike < steps && starts[t + alike + 1] - starts[t + alike] == rows_of(t, 0)) ++alike;
    return alike;
  }
  int64_t step_stride(int64_t t) const { return is_packed() ? rows_of(t, 0) * stride_b : stride_t; }
};

}  // namespace fusedrnn
