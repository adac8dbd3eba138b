// A unit of a row, as a thread of a persistent kernel computes it.
#pragma once
#include "../step/unit.h"
#include "exchange.h"

namespace fusedrnn::cuda {

// A unit of a row as a thread computes it.  What it needs random numbers for it has.
struct PersistentUnit {
  using Value = float;
  float kept_h, kept_cell_state;

  template <class P>
  FUSEDRNN_HD float load(const P* p) const {
    return widen(*p);
  }
  template <class P>
  FUSEDRNN_HD void store(P* p, float value) const {
    *p = narrow<P>(value);
  }
  FUSEDRNN_HD float kept(const Zoneout<float>&, const Zoneout<float>::Chance&, uint32_t stream,
                         Place, int64_t) const {
    return stream == kCellStateStream ? kept_cell_state : kept_h;
  }
};

// With what zoneout keeps of it: of h, and of the cell state.
template <bool kOfH, bool kOfCellState>
FUSEDRNN_DEVICE PersistentUnit zoneout_of(const Zoneout<float>& zoneout, Place at, int unit) {
  const auto kept = [&](const Zoneout<float>::Chance& chance, uint32_t stream) {
    if (!chance.is_possible()) return 0.0f;
    float four[4];
    zoneout.kept(chance, stream, at, uint32_t(unit / 4), four);
    const int i = unit % 4;
    return i < 2 ? (i == 0 ? four[0] : four[1]) : (i == 2 ? four[2] : four[3]);
  };
  PersistentUnit u{};
  if constexpr (kOfH) u.kept_h = kept(zoneout.h, kZoneoutStream);
  if constexpr (kOfCellState) u.kept_cell_state = kept(zoneout.cell_state, kCellStateStream);
  return u;
}

}  // namespace fusedrnn::cuda
