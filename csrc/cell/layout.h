// The table of cells, and where each weight lies in the flat buffer.  All of it follows from the
// programs of programs.h.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "chain.h"

namespace fusedrnn {

constexpr auto kCells = [] {
  std::array<Cell, std::size(cells::kPrograms)> chains{};
  for (size_t i = 0; i < chains.size(); ++i) chains[i] = chain_of(cells::kPrograms[i]);
  return chains;
}();

// Pre-activations per step and row of the batch, which forward saves if backward is not to
// recompute them.  Stages after the recurrent one need none.
inline int64_t saved_columns(const Cell& cell, const Sizes& sizes) {
  int64_t columns = 0;
  for (int s = 0; s <= recurrent_stage(cell); ++s) {
    const CellStage& stage = cell.stages[s];
    const int64_t width = sizes[cell.projections[stage.projection].to];
    columns = plus(columns, times(traits(stage.kind).pre_blocks, width));
  }
  return columns;
}

// nullptr if there is no such cell.
inline const Cell* find_cell(const char* name) {
  for (const Cell& cell : kCells) {
    if (std::strcmp(cell.name, name) == 0) return &cell;
  }
  return nullptr;
}

// One weight or bias of one layer: columns == 0 marks a bias.  offset counts elements.
struct Parameter {
  std::string name;
  int projection;
  int64_t offset, rows, columns;
  int64_t numel() const { return times(rows, columns == 0 ? 1 : columns); }
};

inline size_t num_parameters(const Cell& cell, bool bias) {
  size_t count = size_t(cell.num_projections);
  for (int p = 0; p < cell.num_projections; ++p) {
    if (bias && cell.projections[p].has_bias) ++count;
  }
  return count;
}

// The parameters of one layer in torch.nn's order, back to back: the weights that may have a bias,
// their biases, then the weights that never have one.
inline std::vector<Parameter> layer_layout(const Cell& cell, const Sizes& sizes, bool bias) {
  std::vector<Parameter> parameters;
  parameters.reserve(num_parameters(cell, bias));
  int64_t offset = 0;
  const auto add = [&](bool is_bias, bool of_those_with_bias) {
    for (int p = 0; p < cell.num_projections; ++p) {
      const Projection& projection = cell.projections[p];
      if (projection.has_bias != of_those_with_bias) continue;
      parameters.push_back({(is_bias ? "bias_" : "weight_") + std::string(projection.name), p,
                            offset, times(projection.blocks, sizes[projection.to]),
                            is_bias ? 0 : sizes[projection.from]});
      offset = plus(offset, parameters.back().numel());
    }
  };
  add(false, true);
  if (bias) add(true, true);
  add(false, false);
  return parameters;
}

}  // namespace fusedrnn
