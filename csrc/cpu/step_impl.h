// The CPU kernels, compiled once for each instruction set by the files that include this one.  Each
// file defines FUSEDRNN_ISA, which names the namespace of everything emitted here and sets the
// width of VecF; vector.h says why nothing may be emitted outside of that namespace.
#pragma once
#include "../step/unit.h"
#include "flat_product.h"
#include "narrow_product.h"
#include "panel_product.h"
#include "step.h"
#include "vector.h"

namespace fusedrnn::cpu::FUSEDRNN_ISA {

// The `Unit` of step/unit.h for n <= kWidth neighbouring elements of a row in one vector.
struct VectorUnit {
  using Value = VecF;
  static constexpr int64_t kWidth = kLanes;
  int64_t n;
  const float* normals;  // eps of these elements, if it is drawn

  template <class Distribution>
  FUSEDRNN_HD static void draw(uint64_t seed, uint32_t t, uint32_t b, uint32_t block,
                               uint32_t stream, float* out) {
    fusedrnn::draws<Distribution>(out, 4 * kLanes, seed, t, b, block, stream);
  }

  template <class T>
  FUSEDRNN_HD VecF load(const T* p) const {
    return fusedrnn::load(p, n);
  }
  template <class T>
  FUSEDRNN_HD void store(T* p, VecF x) const {
    fusedrnn::store(p, x, n);
  }

  template <class T>
  FUSEDRNN_HD VecF round_to(VecF x) const {
    if constexpr (std::is_same_v<T, float>) {
      return x;
    } else {
      return T::template widen<VecF>(T::narrow(x));
    }
  }

  FUSEDRNN_HD VecF kept(const Zoneout<float>& zoneout, const Zoneout<float>::Chance& chance,
                        uint32_t stream, Place at, int64_t column) const {
    float all[kLanes];
    for (int i = 0; i < kLanes; i += 4) {
      float four[4];
      zoneout.kept(chance, stream, at, uint32_t((column + i) / 4), four);
      for (int j = 0; j < 4; ++j) all[i + j] = four[j];
    }
    return load(all);
  }
  template <class T>
  FUSEDRNN_HD VecF drawn(const Noise<T>&, Place /*at*/, int64_t /*column*/) const {
    return load(normals);
  }
};

// The `Unit` for one element in double precision.
struct DoubleUnit {
  using Value = double;
  static constexpr int64_t kWidth = 1;
  int64_t n;
  const double* normals;

  template <class Distribution>
  FUSEDRNN_HD static void draw(uint64_t seed, uint32_t t, uint32_t b, uint32_t block,
                               uint32_t stream, double* out) {
    double four[4];
    draw4<Distribution>(seed, t, b, block, stream, four);
    for (int j = 0; j < 4; ++j) out[j] = four[j];
  }

  FUSEDRNN_HD double load(const double* p) const { return *p; }
  FUSEDRNN_HD void store(double* p, double x) const { *p = x; }
  template <class T>
  FUSEDRNN_HD double round_to(double x) const {
    return x;
  }
  FUSEDRNN_HD double kept(const Zoneout<double>& zoneout, const Zoneout<double>::Chance& chance,
                          uint32_t stream, Place at, int64_t column) const {
    double four[4];
    zoneout.kept(chance, stream, at, uint32_t(column / 4), four);
    return four[column % 4];
  }
  template <class T>
  FUSEDRNN_HD double drawn(const Noise<T>&, Place /*at*/, int64_t /*column*/) const {
    return *normals;
  }
};

template <class T>
struct UnitFor {
  using type = VectorUnit;
};
template <>
struct UnitFor<double> {
  using type = DoubleUnit;
};

// Calls f(row, place, column, unit) for all elements of rows [first, last).  Rows are cut into
// vectors from their start, whichever thread computes them, so an element's bits depend only on its
// place.  noise: how to draw normals, or null.
template <class T, class Step, class F>
FUSEDRNN_HD void for_units(const Step& step, const Noise<T>* noise, int64_t first, int64_t last,
                           const F& f) {
  using Unit = typename UnitFor<T>::type;
  constexpr int64_t kDrawn = 4 * Unit::kWidth;  // Philox gives four normals per lane
  Acc<T> normals[kDrawn];
  for (int64_t row = first; row < last; ++row) {
    const Place at = Place::of_row(step.first_row + row, step.mask.batch);
    for (int64_t begin = 0; begin < step.width; begin += kDrawn) {
      if (noise != nullptr) {
        Unit::template draw<Normal>(uint64_t(*noise->seed), uint32_t(noise->first_step) + at.t,
                                    at.b, uint32_t(begin / 4), uint32_t(noise->noise_stream),
                                    normals);
      }
      const int64_t end = least(step.width, begin + kDrawn);
      for (int64_t column = begin; column < end; column += Unit::kWidth) {
        f(row, at, column, Unit{least(Unit::kWidth, end - column), normals + (column - begin)});
      }
    }
  }
}

// Whether units need nothing that most calls lack, masks and zoneout, and rows are whole vectors.
template <class Step>
FUSEDRNN_HD bool is_plain(const Step& step) {
  const auto& zoneout = step.zoneout;
  return !step.mask.any() && !zoneout.h.is_possible() && !zoneout.cell_state.is_possible() &&
         step.width % kLanes == 0;
}
// Calls f(step, row, place, column, unit) for a plain step.  The compiler knows what this copy of
// the step lacks: the loop has few branches then, all of its constants in registers, and takes
// about four fifths of the time.
template <class Step, class F>
FUSEDRNN_HD void for_plain_units(Step step, int64_t first, int64_t last, const F& f) {
  step.replay_offset = nullptr;
  step.mask.lengths = nullptr;
  step.mask.reset = nullptr;
  step.zoneout.h.probability = step.zoneout.cell_state.probability = 0;
  for (int64_t row = first; row < last; ++row) {
    const Place at = Place::of_row(step.first_row + row, step.mask.batch);
    for (int64_t column = 0; column < step.width; column += kLanes) {
      f(step, row, at, column, VectorUnit{kLanes, nullptr});
    }
  }
}
// Whether a stage's plain steps have a loop of their own.
template <class Stage, class T>
inline constexpr bool kHasPlainLoop = Stage::kCarry && !std::is_same_v<T, double>;

template <class T>
void forward(StageKind kind, const Forward<T>& step, int64_t first, int64_t last) {
  dispatch_stage(kind, [&](auto stage) {
    using Stage = decltype(stage);
    const auto run =
        [](const auto& step, int64_t row, Place at, int64_t column, const auto& unit)
            __attribute__((always_inline)) { forward_unit<Stage>(step, row, at, column, unit); };
    if constexpr (kHasPlainLoop<Stage, T>) {
      if (is_plain(step)) return for_plain_units(step, first, last, run);
    }
    const bool draws = Stage::kNoise && step.noise.eps.data == nullptr;
    for_units<T>(step, draws ? &step.noise : nullptr, first, last,
                 [&](int64_t row, Place at, int64_t column, const auto& unit)
                     __attribute__((always_inline)) { run(step, row, at, column, unit); });
  });
}

template <class T>
void backward(StageKind kind, const Backward<T>& step, int64_t first, int64_t last) {
  dispatch_stage(kind, [&](auto stage) {
    using Stage = decltype(stage);
    const auto run =
        [](const auto& step, int64_t row, Place at, int64_t column, const auto& unit)
            __attribute__((always_inline)) { backward_unit<Stage>(step, row, at, column, unit); };
    if constexpr (kHasPlainLoop<Stage, T>) {
      if (is_plain(step)) return for_plain_units(step, first, last, run);
    }
    const Noise<T>* no_noise = nullptr;
    for_units<T>(step, no_noise, first, last,
                 [&](int64_t row, Place at, int64_t column, const auto& unit)
                     __attribute__((always_inline)) { run(step, row, at, column, unit); });
  });
}

template <class T>
void gather(const GatherStep<T, Acc<T>>& step, int64_t first, int64_t last) {
  const Noise<T>* no_noise = nullptr;
  for_units<T>(step, no_noise, first, last,
               [&](int64_t row, Place at, int64_t column, const auto& unit)
                   __attribute__((always_inline)) { gather_unit(step, row, at, column, unit); });
}

template <class T>
void clear(const ClearStep<Acc<T>>& step, int64_t first, int64_t last) {
  const Noise<T>* no_noise = nullptr;
  for_units<T>(step, no_noise, first, last,
               [&](int64_t row, Place at, int64_t column, const auto& unit)
                   __attribute__((always_inline)) { clear_unit(step, row, at, column, unit); });
}

template <class A>
void dropout(const DropoutStep<A>& step, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    for (int64_t column = 0; column < step.width; column += 4) dropout_unit(step, row, column);
  }
}

template <class T>
void draw(const DrawStep<T>& step, int64_t first, int64_t last) {
  using Unit = typename UnitFor<T>::type;
  constexpr int64_t kDrawn = 4 * Unit::kWidth;  // Philox gives four numbers per lane
  dispatch_distribution<T>(
      step.distribution, [&](auto distribution) __attribute__((always_inline)) {
        using D = decltype(distribution);
        Acc<T> drawn[kDrawn];
        for (int64_t row = first; row < last; ++row) {
          const Place at = Place::of_row(row, step.batch);
          for (int64_t begin = 0; begin < step.width; begin += kDrawn) {
            Unit::template draw<D>(uint64_t(*step.seed), step.time(at), at.b, uint32_t(begin / 4),
                                   uint32_t(step.stream), drawn);
            const int64_t end = least(step.width, begin + kDrawn);
            for (int64_t column = begin; column < end; column += Unit::kWidth) {
              const Unit unit{least(Unit::kWidth, end - column), drawn + (column - begin)};
              unit.store(step.out + row * step.width + column, unit.load(unit.normals));
            }
          }
        }
      });
}

// Sums 16 rows, then 16 of those sums, then the total: rounding errors grow as in a tree.
template <class A>
void column_sum(const Matrix<const A>& m, int64_t first, int64_t last, A* sum, bool accumulate) {
  constexpr int64_t kColumns = 256, kRows = 16;
  for (int64_t begin = first; begin < last; begin += kColumns) {
    const int64_t count = least(kColumns, last - begin);
    if (!accumulate) {
      for (int64_t c = 0; c < count; ++c) sum[begin + c] = 0;
    }
    for (int64_t outer = 0; outer < m.rows; outer += kRows * kRows) {
      A outer_sum[kColumns] = {};
      for (int64_t inner = outer; inner < least(m.rows, outer + kRows * kRows); inner += kRows) {
        A inner_sum[kColumns] = {};
        for (int64_t r = inner; r < least(m.rows, inner + kRows); ++r) {
          const A* row = m.data + r * m.row_stride + begin;
          for (int64_t c = 0; c < count; ++c) inner_sum[c] += row[c];
        }
        for (int64_t c = 0; c < count; ++c) outer_sum[c] += inner_sum[c];
      }
      for (int64_t c = 0; c < count; ++c) sum[begin + c] += outer_sum[c];
    }
  }
}

template <class T>
Kernels<T> kernels() {
  return {&forward<T>,
          &backward<T>,
          &gather<T>,
          &clear<T>,
          &dropout<Acc<T>>,
          &draw<T>,
          &column_sum<Acc<T>>,
          &NarrowProduct<Acc<T>>::rows,
          &FlatProduct<Acc<T>>::columns,
          &PanelProduct<Acc<T>>::all,
          &PanelProduct<Acc<T>>::template pack<Acc<T>>,
          &PanelProduct<Acc<T>>::template pack<T>,
          &PanelProduct<Acc<T>>::packed,
          kLanes > 4 || kBaselineMultiplies ? ProductRows{5, 8, INT64_MAX} : ProductRows{2, 2, 2}};
}
template Kernels<float> kernels<float>();
template Kernels<double> kernels<double>();
template Kernels<BFloat16> kernels<BFloat16>();
template Kernels<Half> kernels<Half>();

}  // namespace fusedrnn::cpu::FUSEDRNN_ISA
