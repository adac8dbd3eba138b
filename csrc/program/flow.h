// What the driver derives from a program once: what is read when, and in which order gradients are
// added up.
//
// A gradient is the sum of what its readers give, in the order in which backward works.  The first
// that gives something to a column writes it, and the others add to it.  Where that is not so for
// all columns of a reader alike, the gradient starts as zeros and all add.
#pragma once
#include <cstdint>
#include <vector>

#include "columns.h"
#include "program.h"

namespace fusedrnn::program {

// The gradient of an input, carry, value or array.
struct Gradient {
  bool is_given = false;   // whether anybody gives something to it
  bool is_zeroed = false;  // whether it starts as zeros
  bool is_alone = true;    // whether each column is given once, by a reader of single columns
};

class Flow {
 public:
  explicit Flow(const Program& program)
      : values(program.values.size()), carries(program.carries.size()),
        arrays(program.arrays.size()), inputs(program.inputs.size()), program_(program),
        written_of_{std::vector<Columns>(inputs.size()), std::vector<Columns>(carries.size()),
                    std::vector<Columns>(values.size()), std::vector<Columns>(arrays.size())} {
    find_makers();
    find_readers();
    find_gradients();
  }

  struct OfValue {
    Phase made = Phase::Step;
    bool is_sequential = false;       // whether its stage is
    bool has_gradient = true;         // false for the kinds of results without a derivative
    bool is_read_after = false;       // whether an item after the steps reads it
    bool has_chunk_gradient = false;  // whether its gradient needs the rows of all steps of a chunk
    bool collect_adds = false;  // whether the gradient as a part of a carry is added to others
    Gradient gradient;

    // Whether forward needs its rows of all steps of a chunk.
    bool is_of_chunk() const { return made != Phase::Step || is_read_after; }
  };
  struct OfCarry {
    bool is_read_after = false;
    bool is_operand = false;  // whether a product reads it
    Gradient gradient;
  };
  struct OfArray {
    bool is_of_chunk = false;  // whether forward needs its rows of all steps of a chunk
    Gradient gradient;

    // Whether the gradient may take the place of the numbers.
    bool is_in_place() const { return gradient.is_alone && !gradient.is_zeroed; }
  };
  struct OfInput {
    bool is_operand = false;
    Gradient gradient;
  };
  std::vector<OfValue> values;
  std::vector<OfCarry> carries;
  std::vector<OfArray> arrays;
  std::vector<OfInput> inputs;
  // Whether the gradient of an operand is added to what is there, and not written.
  std::vector<std::vector<bool>> stage_adds;  // of each input of each stage
  std::vector<bool> product_adds;

  // Whether backward of a product waits until all steps of a chunk are done.
  bool is_deferred(const Product& product) const {
    if (product.phase != Phase::Step) return false;
    const Operand& from = product.operand;
    return from.source == Source::Input ||
           (from.source == Source::Value && values[size_t(from.index)].made == Phase::Before);
  }
  // Whether the gradient of a value as a part of a carry is collected step by step, since backward
  // of its stage works on all steps of a chunk at once.
  bool is_collected(size_t value) const {
    return program_.values[value].is_of_carry() && values[value].made == Phase::Before;
  }
  // Whether an operand can have a gradient.
  bool has_gradient(const Operand& operand) const {
    switch (operand.source) {
      case Source::Value: return values[size_t(operand.index)].has_gradient;
      case Source::Draw:
      case Source::None: return false;
      default: return true;
    }
  }

 private:
  void find_makers() {
    for (const Stage& stage : program_.stages) {
      for (const StageOutput& output : stage.outputs) {
        OfValue& value = values[size_t(output.value)];
        value.made = stage.phase;
        value.is_sequential = stage.is_sequential;
        value.has_gradient = output.has_gradient();
        value.has_chunk_gradient = stage.phase != Phase::Step;
      }
    }
  }

  void find_readers() {
    for (const Product& product : program_.products) {
      see_reader(product.operand, product.phase);
      const size_t i = size_t(product.operand.index);
      if (product.operand.source == Source::Carry) carries[i].is_operand = true;
      if (product.operand.source == Source::Input) inputs[i].is_operand = true;
      if (product.phase != Phase::Step) arrays[size_t(product.array)].is_of_chunk = true;
    }
    for (const Stage& stage : program_.stages) {
      for (const StageInput& input : stage.inputs) see_reader(input.operand, stage.phase);
    }
  }
  void see_reader(const Operand& operand, Phase phase) {
    if (phase != Phase::After) return;
    const size_t i = size_t(operand.index);
    if (operand.source == Source::Carry) carries[i].is_read_after = true;
    if (operand.source == Source::Array) arrays[i].is_of_chunk = true;
    if (operand.source != Source::Value) return;
    values[i].is_read_after = values[i].has_chunk_gradient = true;
  }

  // Goes through all that give something to a gradient, in the order of backward.
  void find_gradients() {
    stage_adds.resize(program_.stages.size());
    product_adds.resize(program_.products.size());
    give_phase(Phase::After);
    for (size_t v = 0; v < values.size(); ++v) {
      if (!is_collected(v) || !values[v].has_gradient) continue;
      const Operand whole{Source::Value, int64_t(v), 0};
      values[v].collect_adds = give(whole, {0, program_.values[v].columns}, true);
    }
    give_phase(Phase::Step);
    program_.for_items_reversed(Phase::Step, [&](const Item& item) {
      if (!item.is_stage && is_deferred(program_.products[size_t(item.index)])) give(item);
    });
    give_phase(Phase::Before);
    complete(inputs, Source::Input, [&](size_t i) { return program_.inputs[i]; });
    complete(carries, Source::Carry, [&](size_t j) { return program_.carries[j].width; });
    complete(values, Source::Value, [&](size_t v) { return program_.values[v].columns; });
    complete(arrays, Source::Array, [&](size_t a) { return program_.arrays[a].columns; });
    add_to_zeros();
  }
  void give_phase(Phase phase) {
    program_.for_items_reversed(phase, [&](const Item& item) {
      if (item.is_stage) {
        give_of_stage(size_t(item.index));
      } else if (!is_deferred(program_.products[size_t(item.index)])) {
        give(item);
      }
    });
  }
  void give(const Item& item) {
    const Product& product = program_.products[size_t(item.index)];
    if (!has_gradient(product.operand)) return;
    product_adds[size_t(item.index)] =
        give(product.operand, {product.operand.offset, product.terms}, false);
  }
  void give_of_stage(size_t index) {
    const Stage& stage = program_.stages[index];
    std::vector<bool>& adds = stage_adds[index];
    for (size_t i = 0; i < stage.inputs.size(); ++i) {
      const StageInput& input = stage.inputs[i];
      const bool is_target = has_gradient(input.operand) && input.operand.source != Source::Vector;
      adds.push_back(is_target &&
                     give(input.operand, range_of(stage, i), input.kind == In::Column));
      // A stage goes from column to column.  Two inputs that have the same columns at different
      // times cannot be told apart as the first and the second.
      for (size_t other = 0; is_target && other < i; ++other) {
        if (overlap(stage, other, i)) gradient_of(input.operand).is_zeroed = true;
      }
    }
  }
  static Range range_of(const Stage& stage, size_t i) {
    const StageInput& input = stage.inputs[i];
    return {input.operand.offset, input.columns(stage.width)};
  }
  static bool overlap(const Stage& stage, size_t first, size_t second) {
    const StageInput &a = stage.inputs[first], &b = stage.inputs[second];
    const Range of_a = range_of(stage, first), of_b = range_of(stage, second);
    const bool is_same = of_a == of_b && a.kind == b.kind && a.group == b.group;
    return a.operand.is(b.operand.source, b.operand.index) && !is_same && of_a.begin < of_b.end() &&
           of_b.begin < of_a.end();
  }

  // One more gives to some columns.  Returns whether it adds to others.
  bool give(const Operand& operand, Range range, bool by_column) {
    Gradient& gradient = gradient_of(operand);
    Columns& written = written_of_[size_t(operand.source)][size_t(operand.index)];
    const bool adds = written.has(range);
    if (!adds && written.has_any(range)) gradient.is_zeroed = true;
    if (adds || !by_column) gradient.is_alone = false;
    gradient.is_given = true;
    written.add(range);
    return adds;
  }
  Gradient& gradient_of(const Operand& operand) {
    const size_t i = size_t(operand.index);
    switch (operand.source) {
      case Source::Input: return inputs[i].gradient;
      case Source::Carry: return carries[i].gradient;
      case Source::Value: return values[i].gradient;
      default: return arrays[i].gradient;
    }
  }

  // Columns to which nobody gives anything are zeros too.
  template <class List, class Width>
  void complete(List& list, Source source, const Width& width) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (!written_of_[size_t(source)][i].has({0, width(i)})) list[i].gradient.is_zeroed = true;
    }
  }
  void add_to_zeros() {
    for (size_t s = 0; s < stage_adds.size(); ++s) {
      for (size_t i = 0; i < stage_adds[s].size(); ++i) {
        const Operand& operand = program_.stages[s].inputs[i].operand;
        const bool is_target = has_gradient(operand) && operand.source != Source::Vector;
        if (is_target && gradient_of(operand).is_zeroed) stage_adds[s][i] = true;
      }
    }
    for (size_t p = 0; p < product_adds.size(); ++p) {
      if (gradient_of(program_.products[p].operand).is_zeroed) product_adds[p] = true;
    }
    for (OfValue& value : values) value.collect_adds |= value.gradient.is_zeroed;
  }

  const Program& program_;
  std::vector<Columns> written_of_[4];  // of each Source that has columns to be written
};

}  // namespace fusedrnn::program
