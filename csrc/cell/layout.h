// The table of cells: which projections a cell has, which stages they feed, and where each weight
// lies in the flat buffer.  A new cell is one more row here, and its stages in stages.h.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../base/checked.h"
#include "stages.h"

namespace fusedrnn {

constexpr int kMaxStages = 2;
constexpr int kMaxProjections = 3;

enum class Width { Input, Hidden, Latent, Output };

// output: the features of h; equal to hidden unless the cell projects h.
struct Sizes {
  int64_t input, hidden, latent, output;
  int64_t operator[](Width width) const {
    switch (width) {
      case Width::Input: return input;
      case Width::Hidden: return hidden;
      case Width::Latent: return latent;
      case Width::Output: return output;
    }
    return 0;
  }
};

// weight_<name> has shape (blocks * size(to), size(from)); bias_<name> has (blocks * size(to)).
struct Projection {
  const char* name;
  int blocks;
  Width to, from;
  bool has_bias = true;
};

// A stage and the projection that feeds it.
struct CellStage {
  StageKind kind;
  int projection;
};

// Projection 0 always reads the layer's input; it makes the input gates of the recurrent stage, the
// one stage with a carry.  The result of the last stage, h, is the layer's output.  Stages after
// the recurrent one are linear, and only a cell with a cell state has them.
struct Cell {
  const char* name;
  int num_projections;
  Projection projections[kMaxProjections];
  int num_stages;
  CellStage stages[kMaxStages];
};

constexpr Cell kCells[] = {
    {"stochastic_gru",
     3,
     {{"ih", 3, Width::Hidden, Width::Input},
      {"zh", 3, Width::Hidden, Width::Latent},
      {"hz", 2, Width::Latent, Width::Hidden}},
     2,
     {{StageKind::Sample, 2}, {StageKind::Gru, 1}}},
    {"gru",
     2,
     {{"ih", 3, Width::Hidden, Width::Input}, {"hh", 3, Width::Hidden, Width::Hidden}},
     1,
     {{StageKind::Gru, 1}}},
    {"lstm",
     2,
     {{"ih", 4, Width::Hidden, Width::Input}, {"hh", 4, Width::Hidden, Width::Hidden}},
     1,
     {{StageKind::Lstm, 1}}},
    {"projected_lstm",
     3,
     {{"ih", 4, Width::Hidden, Width::Input},
      {"hh", 4, Width::Hidden, Width::Output},
      {"hr", 1, Width::Output, Width::Hidden, false}},
     2,
     {{StageKind::Lstm, 1}, {StageKind::Linear, 2}}},
};

inline int recurrent_stage(const Cell& cell) {
  int s = 0;
  while (!traits(cell.stages[s].kind).has_carry) ++s;
  return s;
}

inline bool has_cell_state(const Cell& cell) {
  return traits(cell.stages[recurrent_stage(cell)].kind).has_cell_state;
}
inline bool is_projected(const Cell& cell) { return recurrent_stage(cell) < cell.num_stages - 1; }

// The cell that takes z = loc instead of a sample.
inline Cell without_noise(Cell cell) {
  for (CellStage& stage : cell.stages) {
    if (stage.kind == StageKind::Sample) stage.kind = StageKind::Linear;
  }
  return cell;
}

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
