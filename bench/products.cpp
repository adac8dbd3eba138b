// Products by the CPU's kernels on the calling thread, for bench/products_alone.py.  The
// instruction set is chosen as in csrc/cpu/step_*.cpp, here with -DFUSEDRNN_ISA=.
#if FUSEDRNN_HAS_AVX512
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#elif FUSEDRNN_HAS_AVX2
#pragma GCC target("avx2,fma")
#endif
#include <algorithm>
#include <memory>

#include "../csrc/cpu/panel_product.h"

namespace fusedrnn::cpu {
namespace {

using Product = FUSEDRNN_ISA::PanelProduct<float>;

Matrix<const float> matrix(const float* data, const int64_t (&sizes)[4]) {
  return {data, sizes[0], sizes[1], sizes[2], sizes[3]};
}

}  // namespace

// Sizes are those of torch's tensors: rows, columns and both strides.  out is contiguous.

extern "C" __attribute__((visibility("default"))) void pack(const float* b,
                                                            const int64_t (&b_sizes)[4],
                                                            float* panels) {
  Product::pack(matrix(b, b_sizes), panels, 0, b_sizes[1]);
}

// The product of one step.
extern "C" __attribute__((visibility("default"))) void packed(float* out, const float* a,
                                                              const int64_t (&a_sizes)[4],
                                                              const float* panels,
                                                              int64_t columns) {
  Product::packed(Matrix<float>::contiguous(out, a_sizes[0], columns), matrix(a, a_sizes), panels,
                  false, 0, columns);
}

// The product of a chunk, by tiles.
extern "C" __attribute__((visibility("default"))) void product(float* out, const float* a,
                                                               const int64_t (&a_sizes)[4],
                                                               const float* b,
                                                               const int64_t (&b_sizes)[4]) {
  static const std::unique_ptr<float[]> scratch(new float[kScratchNumbers]);
  const auto all = Matrix<float>::contiguous(out, a_sizes[0], b_sizes[1]);
  for (int64_t r = 0; r < all.rows; r += kTileRows) {
    const int64_t rows = std::min(kTileRows, all.rows - r);
    for (int64_t c = 0; c < all.columns; c += kTileColumns) {
      const int64_t columns = std::min(kTileColumns, all.columns - c);
      Product::all(all.row_range(r, rows).column_range(c, columns),
                   matrix(a, a_sizes).row_range(r, rows),
                   matrix(b, b_sizes).column_range(c, columns), false, scratch.get());
    }
  }
}

}  // namespace fusedrnn::cpu
