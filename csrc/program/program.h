// A cell as a program: products of activations and weights, and elementwise stages between them.
//
// A step reads inputs and carries (the state before it), and makes values, of which some are its
// outputs and the carries of the next step.  Python writes the program as a list of numbers;
// Program::read() checks every one of them, since the driver's pointers follow from them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "../base/checked.h"
#include "stage.h"

namespace fusedrnn::program {

// What a product or a stage reads.  index: of the input, carry, value, array, vector or draw.
enum class Source : int64_t { Input, Carry, Value, Array, Vector, Draw, None };
struct Operand {
  Source source;
  int64_t index, offset;  // offset: the first column
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
};

// A result of a stage, `columns` numbers in each row.
struct Value {
  int64_t columns;
  int64_t sequence, offset;     // where it is kept; sequence < 0: nowhere
  int64_t carry, carry_offset;  // of which carry of the next step it is a part; carry < 0: of none
  bool is_operand;  // whether a product reads it: it is then rounded to the storage type
  bool is_read;     // whether a product or another stage reads it
};

// Where products write their results.  bias: a vector that is added to them when they are read, or
// < 0.  Several products may add up in one array.
struct Array {
  int64_t columns, bias;
};

// columns [offset, offset + columns) of `array` (+)= operand (rows, terms) weight (terms, columns).
struct Product {
  Operand operand;
  int64_t weight, terms, columns, array, offset;
  bool adds;  // whether an earlier product has written the same columns
  Phase phase;
};

struct StageInput {
  Operand operand;
  In kind;
  int64_t group;
};
struct StageOutput {
  int64_t value;
  Out kind;
  int64_t group;
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
};

}  // namespace fusedrnn::program
