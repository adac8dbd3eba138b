// How a thread of a persistent kernel loads and stores a unit of a row.
#pragma once
#include "../step/unit.h"
#include "exchange.h"

namespace fusedrnn::cuda {

// The `Unit` of step/unit.h for one float.  Random numbers are drawn before, and stored here.
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

// The unit with what zoneout keeps: of h if kOfH, and of the cell state if kOfCellState.
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
