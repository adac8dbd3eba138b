// The CPU's kernels: a stage over a range of rows on the calling thread.  The caller divides the
// work among threads, and no result depends on how.
#pragma once
#include <cstdint>

#include "../base/matrix.h"
#include "../step/step.h"

namespace fusedrnn::cpu {

template <class T>
using Forward = ForwardStep<T, Acc<T>>;
template <class T>
using Backward = BackwardStep<T, Acc<T>>;

// Numbers of columns (in a weight's gradient also of rows) and of rows of a product from which on
// torch's GEMM is accurate and fast; see narrow_product.h.
constexpr int64_t kWide = 12, kTall = 4;

// The number of rows up to which a product of at least kProductColumns columns is computed here and
// not by torch's GEMM.  dots: by dot products (flat_product.h), if the second operand is the
// transpose of a weight; dots_of_large: the same if the weight is too large for a core's cache;
// panels: by panels (panel_product.h), in tiles.
struct ProductRows {
  int64_t dots, dots_of_large, panels;
};
constexpr int64_t kLargeBytes = 512 << 10;
constexpr int64_t kProductColumns = 16;
// The most rows and columns of a tile, and the least to which tiles shrink so that all threads have
// some.  A tile's rows of the first operand are copied once for all of its columns, so larger ones
// take less time; this copy and a panel fit in a core's cache.
constexpr int64_t kTileRows = 256, kTileColumns = 256, kLeastTile = 64;
// The most terms that are added one after another, and the numbers of a thread's copy of so many
// columns of a tile's rows.
constexpr int64_t kPartTerms = 128, kScratchNumbers = kTileRows * (kPartTerms + 16);

// The least steps of a sequence for which weights that single steps multiply are packed: they are
// then copied once in a call, and not read across their rows in each step.
constexpr int64_t kPackedSteps = 8;
// Threads pack, and multiply by what is packed, so many columns at a time.
constexpr int64_t kPackedColumns = 64;
// The numbers of a packed weight, by which plans count.
FUSEDRNN_HD int64_t packed_numbers(int64_t terms, int64_t columns) {
  return terms * ((columns + kPackedColumns - 1) / kPackedColumns * kPackedColumns);
}

template <class T>
struct Kernels {
  void (*forward)(StageKind, const Forward<T>&, int64_t first_row, int64_t last_row);
  void (*backward)(StageKind, const Backward<T>&, int64_t first_row, int64_t last_row);
  void (*gather)(const GatherStep<T, Acc<T>>&, int64_t first_row, int64_t last_row);
  void (*clear)(const ClearStep<Acc<T>>&, int64_t first_row, int64_t last_row);
  void (*dropout)(const DropoutStep<Acc<T>>&, int64_t first_row, int64_t last_row);
  void (*draw)(const DrawStep<T>&, int64_t first_row, int64_t last_row);
  // sum[c] (+)= sum over rows of m[r][c], for the columns [first, last).
  void (*column_sum)(const Matrix<const Acc<T>>& m, int64_t first, int64_t last, Acc<T>* sum,
                     bool accumulate);
  // The rows [first, last) of out (+)= a b, which has fewer than kWide columns.
  void (*narrow_product)(const Matrix<Acc<T>>& out, const Matrix<const Acc<T>>& a,
                         const Matrix<const Acc<T>>& b, bool accumulate, int64_t first,
                         int64_t last);
  // The columns [first, last) of out (+)= a b.
  void (*flat_product)(const Matrix<Acc<T>>& out, const Matrix<const Acc<T>>& a,
                       const Matrix<const Acc<T>>& b, bool accumulate, int64_t first, int64_t last);
  // out (+)= a b, all of a tile.  scratch: kScratchNumbers numbers of the calling thread.
  void (*panel_product)(const Matrix<Acc<T>>& out, const Matrix<const Acc<T>>& a,
                        const Matrix<const Acc<T>>& b, bool accumulate, Acc<T>* scratch);
  // A weight b as panels, from either type, and the columns [first, last) of out (+)= a b for such
  // a b.  Rows or columns of b are contiguous.
  void (*pack)(const Matrix<const Acc<T>>& b, Acc<T>* to, int64_t first, int64_t last);
  void (*pack_tensor)(const Matrix<const T>& b, Acc<T>* to, int64_t first, int64_t last);
  void (*packed_product)(const Matrix<Acc<T>>& out, const Matrix<const Acc<T>>& a,
                         const Acc<T>* panels, bool accumulate, int64_t first, int64_t last);
  ProductRows product_rows;
};

// The same code compiled for three instruction sets; see step_impl.h.
namespace baseline {
template <class T>
Kernels<T> kernels();
}
namespace avx2 {
template <class T>
Kernels<T> kernels();
}
namespace avx512 {
template <class T>
Kernels<T> kernels();
}

// The widest instruction set of this processor for which there are kernels.
enum class Isa : int64_t { Baseline, Avx2, Avx512 };
FUSEDRNN_HD Isa widest_isa() {
#if defined(__x86_64__) && !defined(__clang__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::Avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::Avx2;
#endif
  return Isa::Baseline;
}

// Whether the baseline's vectors are the processor's, so that products are not left to torch, whose
// library knows wider ones.
#if defined(__aarch64__)
constexpr bool kBaselineMultiplies = true;
#else
constexpr bool kBaselineMultiplies = false;
#endif
FUSEDRNN_HD bool multiplies() { return kBaselineMultiplies || widest_isa() != Isa::Baseline; }

FUSEDRNN_HD bool packs(int64_t seq_len, int64_t terms, int64_t columns) {
  return seq_len >= kPackedSteps && terms > 0 && columns >= kProductColumns && multiplies();
}

template <class T>
const Kernels<T>& kernels() {
#if defined(__x86_64__) && !defined(__clang__)
  static const Kernels<T> widest = widest_isa() == Isa::Avx512 ? avx512::kernels<T>()
                                   : widest_isa() == Isa::Avx2 ? avx2::kernels<T>()
                                                               : baseline::kernels<T>();
#else
  static const Kernels<T> widest = baseline::kernels<T>();
#endif
  return widest;
}

}  // namespace fusedrnn::cpu
