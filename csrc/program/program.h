// A cell as a program: products of activations and weights, and elementwise stages between them.
//
// A step reads inputs and carries (the state before it), and makes values, of which some are its
// outputs and the carries of the next step.  Python writes the program as a list of numbers;
// numbers.h checks every one of them, since the driver's pointers follow from them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "stage.h"

namespace fusedrnn::program {

// What a product or a stage reads.  index: of the input, carry, value, array, vector or draw.
enum class Source : int64_t { Input, Carry, Value, Array, Vector, Draw, None };
struct Operand {
  Source source;
  int64_t index, offset;  // offset: the first column

  bool is(Source other, int64_t i) const { return source == other && index == i; }
};

// When something is computed.  Before: from inputs alone, for all steps of a chunk at once.  Step:
// in each step.  After: from what steps have made, and nothing reads it that steps need; for all
// steps of a chunk at once.
enum class Phase : int64_t { Before, Step, After };

// The state between steps.  sequence, offset: where every step keeps it, columns [offset, offset +
// width) of a sequence; sequence < 0: only the one before each chunk is kept, and backward makes
// the others again, without products.
struct Carry {
  int64_t width, sequence, offset;

  bool is_in_sequence() const { return sequence >= 0; }
};

// A result of a stage, `columns` numbers in each row.
struct Value {
  int64_t columns;
  int64_t sequence, offset;     // where it is kept; sequence < 0: nowhere
  int64_t carry, carry_offset;  // of which carry of the next step it is a part; carry < 0: of none
  bool is_operand;  // whether a product reads it: it is then rounded to the storage type
  bool is_read;     // whether a product or another stage reads it

  bool is_in_sequence() const { return sequence >= 0; }
  bool is_of_carry() const { return carry >= 0; }
};

// Where products write their results.  bias: a vector that is added to them when they are read, or
// < 0.  Several products may add up in one array.
struct Array {
  int64_t columns, bias;

  bool has_bias() const { return bias >= 0; }
};

// columns [offset, offset + columns) of `array` (+)= operand (rows, terms) weight (terms, columns).
struct Product {
  Operand operand;
  int64_t weight, terms, columns, array, offset;
  bool adds;  // whether an earlier product has written the same columns
  Phase phase;
};

// group: the columns of a group, 0 for kinds without groups.
struct StageInput {
  Operand operand;
  In kind;
  int64_t group;

  // The columns that it reads, in a stage of some width.
  int64_t columns(int64_t width) const {
    return kind == In::Group ? (width + group - 1) / group : width;
  }
};
struct StageOutput {
  int64_t value;
  Out kind;
  int64_t group;

  int64_t columns(int64_t width) const { return kind == Out::Column ? width : width / group; }
  bool has_gradient() const { return kind == Out::Column || kind == Out::Sum; }
};
struct Stage {
  int64_t width;
  Phase phase;
  // Whether backward makes its results step by step, since they depend on a carry that is kept only
  // before each chunk.
  bool is_sequential;
  std::vector<StageInput> inputs;
  std::vector<StageOutput> outputs;
};

// One product or stage, in the order of work.
struct Item {
  bool is_stage;
  int64_t index;
};

struct Program {
  std::vector<int64_t> inputs;     // widths
  std::vector<int64_t> sequences;  // widths
  std::vector<int64_t> vectors;    // widths
  std::vector<int64_t> streams;    // of each draw, to which the call adds its own
  std::vector<Carry> carries;
  std::vector<Value> values;
  std::vector<Array> arrays;
  std::vector<Product> products;
  std::vector<Stage> stages;
  std::vector<Item> order;

  // The number of columns that an operand's offset counts in.
  int64_t width_of(const Operand& operand) const {
    const size_t i = size_t(operand.index);
    switch (operand.source) {
      case Source::Input: return inputs[i];
      case Source::Carry: return carries[i].width;
      case Source::Value: return values[i].columns;
      case Source::Array: return arrays[i].columns;
      case Source::Vector: return vectors[i];
      case Source::Draw:
      case Source::None: break;
    }
    return INT32_MAX;  // as many as are wanted
  }
  bool draws() const { return !streams.empty(); }
  // Weights are numbered by the products that read them.
  int64_t weights() const {
    int64_t count = 0;
    for (const Product& product : products) count = std::max(count, product.weight + 1);
    return count;
  }

  // Calls f(item) for the items of a phase, in the order of work or in the reverse.
  template <class F>
  void for_items(Phase phase, const F& f) const {
    for (const Item& item : order) {
      if (phase_of(item) == phase) f(item);
    }
  }
  template <class F>
  void for_items_reversed(Phase phase, const F& f) const {
    for (auto item = order.rbegin(); item != order.rend(); ++item) {
      if (phase_of(*item) == phase) f(*item);
    }
  }
  Phase phase_of(const Item& item) const {
    const size_t i = size_t(item.index);
    return item.is_stage ? stages[i].phase : products[i].phase;
  }
};

}  // namespace fusedrnn::program
