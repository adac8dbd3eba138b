// A built-in cell as the driver of programs runs it, once its sizes are known.
#pragma once
#include <algorithm>

#include "../base/checked.h"
#include "programs.h"

namespace fusedrnn {

// Weights are numbered as the cell's products; vectors are their biases, of the products that have
// one.  A weight is (terms, columns), a bias (columns), and both have the columns that a stage
// reads.
class SizedProgram {
 public:
  // has_noise: whether stages draw their noise, or do without.
  SizedProgram(const cells::Program& cell, const Sizes& sizes, bool has_bias, bool has_noise)
      : cell_(cell), sizes_(sizes), has_noise_(has_noise), is_done_(size_t(cell.products.count())),
        is_sequential_(size_t(cell.values.count())) {
    for (const Width width : cell.inputs) program_.inputs.push_back(sizes[width]);
    for (const Width width : cell.sequences) program_.sequences.push_back(sizes[width]);
    for (const cells::Carry& carry : cell.carries) {
      program_.carries.push_back({sizes[carry.width], carry.sequence, 0});
    }
    for (const cells::Value& value : cell.values) {
      program_.values.push_back(
          {sizes[value.width], value.sequence, 0, value.carry, 0, false, false});
    }
    for (int p = 0; p < cell.products.count(); ++p) add_product(p, has_bias);
    for (int p = 0; p < cell.products.count(); ++p) {
      if (program_.products[size_t(p)].phase == program::Phase::Before) do_product(p);
    }
    for (const cells::Stage& stage : cell.stages) add_stage(stage);
  }

  const program::Program& program() const { return program_; }

 private:
  using Source = cells::Source;

  StageKind kind_of(const cells::Stage& stage) const {
    return has_noise_ ? stage.kind : without_noise(stage.kind);
  }
  // How many blocks of an array its stage reads.
  int64_t blocks_read(int array) const {
    for (const cells::Stage& stage : cell_.stages) {
      for (int r = 0; r < stage.reads.count(); ++r) {
        if (stage.reads[r].is(Source::Array, array)) {
          return cells::Stage{kind_of(stage), stage.reads, {}}.blocks(r);
        }
      }
    }
    fail("no stage of ", cell_.name, " reads product ", array);
  }

  void add_product(int p, bool has_bias) {
    const cells::Product& product = cell_.products[p];
    const int64_t columns = times(blocks_read(p), sizes_[product.to]);
    const bool adds_bias = has_bias && product.has_bias;
    program_.arrays.push_back(
        {columns, adds_bias ? int64_t(program_.vectors.size()) : int64_t(cells::kNone)});
    if (adds_bias) program_.vectors.push_back(columns);
    const bool is_of_input = product.from.source == Source::Input;
    program_.products.push_back({{product.from.source, product.from.index, 0},
                                 p,
                                 sizes_[cell_.width_of(product.from)],
                                 columns,
                                 p,
                                 0,
                                 false,
                                 is_of_input ? program::Phase::Before : program::Phase::Step});
    if (product.from.source != Source::Value) return;
    program::Value& value = program_.values[size_t(product.from.index)];
    value.is_operand = value.is_read = true;
  }
  void do_product(int p) {
    if (is_done_[size_t(p)]) return;
    is_done_[size_t(p)] = true;
    program_.order.push_back({false, p});
  }

  void add_stage(const cells::Stage& stage) {
    program::Stage made{
        sizes_[cell_.values[stage.makes[0]].width], program::Phase::Step, false, {}, {}};
    const cells::Stage of{kind_of(stage), stage.reads, {}};
    for (int r = 0; r < stage.reads.count(); ++r) {
      const cells::Read read = stage.reads[r];
      if (read.source == Source::Array) {
        do_product(read.index);
        for (int64_t k = 0; k < of.blocks(r); ++k) {
          made.inputs.push_back(
              {{read.source, read.index, k * made.width}, program::In::Column, 0});
        }
      } else if (read.source == Source::Draw) {
        if (has_noise_) add_draw(made, read.index);
      } else {
        made.inputs.push_back({{read.source, read.index, 0}, program::In::Column, 0});
        made.is_sequential |= depends_on_kept_carry(read);
        if (read.source == Source::Value) program_.values[size_t(read.index)].is_read = true;
      }
    }
    for (const int v : stage.makes) {
      made.outputs.push_back({v, program::Out::Column, 0});
      is_sequential_[size_t(v)] = made.is_sequential;
    }
    program_.order.push_back({true, int64_t(program_.stages.size())});
    program_.stages.push_back(made);
  }
  void add_draw(program::Stage& made, int index) {
    made.inputs.push_back({{Source::Draw, index, 0}, program::In::Normal, 0});
    while (int64_t(program_.streams.size()) <= index) {
      program_.streams.push_back(int64_t(program_.streams.size()));
    }
  }
  // Whether it is, or is made from, a carry that is kept before each chunk only.
  bool depends_on_kept_carry(const cells::Read& read) const {
    if (read.source == Source::Value) return is_sequential_[size_t(read.index)];
    return read.source == Source::Carry && !program_.carries[size_t(read.index)].is_in_sequence();
  }

  const cells::Program& cell_;
  const Sizes sizes_;
  const bool has_noise_;
  std::vector<bool> is_done_, is_sequential_;
  program::Program program_;
};

inline program::Program sized(const cells::Program& cell, const Sizes& sizes, bool has_bias,
                              bool has_noise) {
  return SizedProgram(cell, sizes, has_bias, has_noise).program();
}

}  // namespace fusedrnn
