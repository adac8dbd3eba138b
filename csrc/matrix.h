// Strided views: what the driver hands to GEMMs and copies.  Strides and sizes count elements.
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
  operator Matrix<const T>() const { return {data, rows, columns, row_stride, column_stride}; }
  Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }
  // True if a GEMM can read it: neighbours in a row or in a column are neighbours in memory.
  bool is_operand() const {
    return ((column_stride == 1 || columns == 1) && (row_stride >= columns || rows == 1)) ||
           ((row_stride == 1 || rows == 1) && (column_stride >= rows || columns == 1));
  }
  Matrix row_range(int64_t begin, int64_t count) const {
    return {data + begin * row_stride, count, columns, row_stride, column_stride};
  }
  Matrix column_range(int64_t begin, int64_t count) const {
    return {data + begin * column_stride, rows, count, row_stride, column_stride};
  }
};

// A (seq_len, batch, width) tensor as the user gave it: any strides, or data == nullptr for none.
template <class T>
struct Sequence {
  T* data;
  int64_t width, stride_t, stride_b, stride_w;

  // True if the (t, b) rows of `steps` steps lie at one stride, so that a GEMM can read them.
  bool has_uniform_rows(int64_t steps, int64_t batch) const {
    return (stride_w == 1 || width == 1) && row_stride(steps, batch) >= width &&
           (steps == 1 || batch == 1 || stride_t == batch * stride_b);
  }
  bool is_contiguous(int64_t steps, int64_t batch) const {
    return has_uniform_rows(steps, batch) &&
           (row_stride(steps, batch) == width || steps * batch == 1);
  }
  int64_t row_stride(int64_t steps, int64_t batch) const {
    return batch > 1 ? stride_b : steps > 1 ? stride_t : width;
  }
  T* at(int64_t t) const { return data + t * stride_t; }
};

}  // namespace fusedrnn
