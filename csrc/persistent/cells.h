// The cells that have persistent kernels, each with its stages.  Instantiations, plans and launches
// all follow this one list.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "../cell/stages.h"

// F(name, stages...) for each cell.  mean_gru is the stochastic GRU without noise.
#define FUSEDRNN_PERSISTENT_CELLS(F) \
  F(gru, Gru)                        \
  F(lstm, Lstm)                      \
  F(projected_lstm, Lstm, Linear)    \
  F(stochastic_gru, Sample, Gru)     \
  F(mean_gru, Linear, Gru)

namespace fusedrnn::cuda {

template <class... Stages>
struct StageList {
  static bool is(const StageKind* stages, int num_stages) {
    const auto kinds = {Stages::kKind...};
    return std::equal(kinds.begin(), kinds.end(), stages, stages + num_stages);
  }
};

namespace cells {
#define FUSEDRNN_STAGES(name, ...) using name = StageList<__VA_ARGS__>;
FUSEDRNN_PERSISTENT_CELLS(FUSEDRNN_STAGES)
#undef FUSEDRNN_STAGES
}  // namespace cells

// Calls f(StageList<...>{}) if there are kernels for these stages; else returns false.
template <class F>
bool dispatch_stages(const StageKind* stages, int num_stages, const F& f) {
#define FUSEDRNN_DISPATCH(name, ...) \
  if (cells::name::is(stages, num_stages)) return f(cells::name{}), true;
  FUSEDRNN_PERSISTENT_CELLS(FUSEDRNN_DISPATCH)
#undef FUSEDRNN_DISPATCH
  return false;
}

}  // namespace fusedrnn::cuda
