// A cell as the driver of chains (driver/) runs it, and the persistent kernels: a list of stages,
// of which each reads one projection.  It follows from the cell's program, if that is a chain.
#pragma once
#include "../base/checked.h"
#include "programs.h"

namespace fusedrnn {

constexpr int kMaxStages = 2;
constexpr int kMaxProjections = 3;

// weight_<name> has shape (blocks * size(to), size(from)); bias_<name> has (blocks * size(to)).
struct Projection {
  const char* name;
  int blocks;
  Width to, from;
  bool has_bias;
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

constexpr int recurrent_stage(const Cell& cell) {
  int s = 0;
  while (!traits(cell.stages[s].kind).has_carry) ++s;
  return s;
}

constexpr bool has_cell_state(const Cell& cell) {
  return traits(cell.stages[recurrent_stage(cell)].kind).has_cell_state;
}
constexpr bool is_projected(const Cell& cell) {
  return recurrent_stage(cell) < cell.num_stages - 1;
}

// The cell that takes z = loc instead of a sample.
inline Cell without_noise(Cell cell) {
  for (CellStage& stage : cell.stages) stage.kind = without_noise(stage.kind);
  return cell;
}

// Makes the cell of a program, and checks the rules of a chain.
class ChainOf {
 public:
  constexpr explicit ChainOf(const cells::Program& program)
      : program_(program), last_(program.stages.count() - 1) {}

  constexpr Cell cell() const {
    check(last_ >= 0 && last_ < kMaxStages && program_.products.count() == last_ + 2,
          "it must have one or two stages, a product for each of them, and one for the input");
    check_input();
    int carries = 0;
    for (int s = 0; s <= last_; ++s) {
      check_stage(s);
      carries += traits(program_.stages[s].kind).has_carry;
    }
    check(carries == 1, "one stage must have a carry");
    Cell cell{program_.name, program_.products.count(), {}, last_ + 1, {}};
    for (int p = 0; p < cell.num_projections; ++p) {
      const cells::Product& product = program_.products[p];
      cell.projections[p] = {product.name, product.blocks, product.to,
                             program_.width_of(product.from), product.has_bias};
    }
    for (int s = 0; s <= last_; ++s) cell.stages[s] = {program_.stages[s].kind, projection(s)};
    check_result(recurrent_stage(cell));
    return cell;
  }

 private:
  // At compile time a failure is an error of the compiler, which names the rule.
  constexpr void check(bool holds, const char* rule) const {
    if (!holds) fail(program_.name, " is no chain: ", rule);
  }

  // Which product makes the hidden gates of a stage.
  constexpr int projection(int s) const {
    const auto& reads = program_.stages[s].reads;
    return reads[reads.count() - 1].index;
  }

  constexpr void check_input() const {
    check(program_.inputs.count() == 1, "it must have one input");
    for (int p = 0; p < program_.products.count(); ++p) {
      check(program_.products[p].from.is(cells::Source::Input, 0) == (p == 0),
            "product 0, and no other, must multiply the input");
    }
  }

  constexpr void check_stage(int s) const {
    const cells::Stage& stage = program_.stages[s];
    const StageTraits of = traits(stage.kind);
    const auto& reads = stage.reads;
    const bool reads_more = of.has_carry || of.has_noise, reads_input = of.input_blocks > 0;
    check(reads.count() == 1 + reads_more + reads_input &&
              stage.makes.count() == 1 + of.has_cell_state,
          "a stage must read and make what its kind does");
    check(!reads_more ||
              reads[0].source == (of.has_carry ? cells::Source::Carry : cells::Source::Draw),
          "a stage must read its carry or its noise first");
    check(!reads_input || reads[reads_more].is(cells::Source::Array, 0),
          "input gates must be those of product 0");
    const cells::Read gates = reads[reads.count() - 1];
    check(gates.source == cells::Source::Array && gates.index > 0,
          "hidden gates must be those of a product other than product 0");
    const cells::Read from = program_.products[gates.index].from;
    check(s == 0 ? from.is(cells::Source::Carry, 0)
                 : from.is(cells::Source::Value, program_.stages[s - 1].makes[0]),
          "the first stage must read a product of carry 0, and any other one a product of the "
          "result before");
    for (int r = reads_more; r < reads.count(); ++r) {
      const cells::Product& product = program_.products[reads[r].index];
      check(
          product.blocks >= stage.blocks(r) && product.to == program_.values[stage.makes[0]].width,
          "a stage must have as many columns as the blocks of its products");
    }
  }

  // recurrent: the stage with a carry.
  constexpr void check_result(int recurrent) const {
    const cells::Stage& stage = program_.stages[recurrent];
    const bool has_cell_state = traits(stage.kind).has_cell_state;
    for (int s = recurrent + 1; s <= last_; ++s) {
      check(has_cell_state && traits(program_.stages[s].kind).is_linear,
            "stages after the one with a carry must be linear, and it must have a cell state");
    }
    check(traits(program_.stages[last_].kind).is_result, "the last stage must make a state");
    const cells::Value& h = program_.values[program_.stages[last_].makes[0]];
    check(h.sequence == 0 && h.carry == 0 && program_.carries[0].sequence == 0,
          "the result of the last stage must be sequence 0 and carry 0");
    const int carry = stage.reads[0].index;
    check(program_.carries.count() == 1 + has_cell_state && carry == int(has_cell_state),
          "the one carry besides h must be a cell state");
    check(!has_cell_state || program_.values[stage.makes[1]].carry == carry,
          "a cell state must be the carry of the stage that makes it");
  }

  const cells::Program& program_;
  int last_;
};

// The cell of a program.  An error if the program is no chain.
constexpr Cell chain_of(const cells::Program& program) { return ChainOf(program).cell(); }

}  // namespace fusedrnn
