// How a program's weights and vectors are made of the constants of a step: mostly they are these.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "../base/checked.h"
#include "../program/program.h"

namespace fusedrnn {

// Some columns of a weight, or some numbers of a vector: rows of a constant, or some of its
// numbers.
struct Side {
  static constexpr int64_t kZeros = -1;
  int64_t constant;    // its number, or kZeros
  int64_t member;      // of a stack of matrices, or less than 0
  bool is_transposed;  // whether the constant's transpose has these rows
  int64_t first, columns;
};
// A sum of terms, each of which consists of sides. A weight has one term.
using Terms = std::vector<std::vector<Side>>;

// What Python says of a program in a list of numbers, each list in it after its length.
struct StepConstants {
  std::vector<int64_t> inputs;  // which inputs of the step the program reads
  std::vector<std::vector<int64_t>> sequence_shapes, state_shapes;  // of a row
  std::vector<Terms> weights, vectors;

  static StepConstants read(const int64_t* numbers, int64_t count,
                            const program::Program& program) {
    Reader from{numbers, numbers + count};
    StepConstants found;
    from.list([&] { found.sequence_shapes.push_back(from.numbers()); });
    from.list([&] { found.state_shapes.push_back(from.numbers()); });
    found.check_all_shapes(program);
    found.inputs = from.numbers();
    from.list([&] { found.weights.push_back(from.terms()); });
    from.list([&] { found.vectors.push_back(from.terms()); });
    FUSEDRNN_CHECK(from.next == from.end, "there are too many numbers for constants");
    found.check(program);
    return found;
  }

 private:
  struct Reader {
    const int64_t *next, *end;

    int64_t number() {
      FUSEDRNN_CHECK(next != end, "there are too few numbers for constants");
      return *next++;
    }
    template <class F>
    void list(const F& f) {
      for (int64_t left = number(); left > 0; --left) f();
    }
    std::vector<int64_t> numbers() {
      std::vector<int64_t> found;
      list([&] { found.push_back(number()); });
      return found;
    }
    Terms terms() {
      Terms found;
      list([&] {
        found.emplace_back();
        list([&] {
          const int64_t constant = number(), member = number();
          const bool is_transposed = number() != 0;
          const int64_t first = number();
          found.back().push_back({constant, member, is_transposed, first, number()});
        });
      });
      return found;
    }
  };

  static void check_shapes(const std::vector<std::vector<int64_t>>& shapes,
                           const std::vector<int64_t>& widths) {
    FUSEDRNN_CHECK(shapes.size() == widths.size(), "expected ", widths.size(), " shapes, got ",
                   shapes.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
      int64_t width = 1;
      for (const int64_t size : shapes[i]) {
        FUSEDRNN_CHECK(size > 0, "a size must be 1 or more, got ", size);
        width = times(width, size);
      }
      FUSEDRNN_CHECK(width == widths[i], "a shape has ", width, " numbers, its row ", widths[i]);
    }
  }
  void check_all_shapes(const program::Program& program) const {
    std::vector<int64_t> widths;
    for (const program::Carry& carry : program.carries) widths.push_back(carry.width);
    check_shapes(sequence_shapes, program.sequences);
    check_shapes(state_shapes, widths);
  }
  void check_terms(const Terms& terms, int64_t width) const {
    FUSEDRNN_CHECK(!terms.empty(), "a weight or a vector has no terms");
    for (const std::vector<Side>& sides : terms) {
      int64_t columns = 0;
      for (const Side& side : sides) {
        FUSEDRNN_CHECK(side.columns > 0 && side.first >= 0, "a side has no columns");
        FUSEDRNN_CHECK(side.constant >= Side::kZeros, "there is no constant ", side.constant);
        columns = plus(columns, side.columns);
      }
      FUSEDRNN_CHECK(columns == width, "sides have ", columns, " columns, and should have ", width);
    }
  }
  void check(const program::Program& program) const {
    FUSEDRNN_CHECK(inputs.size() == program.inputs.size(), "expected ", program.inputs.size(),
                   " inputs, got ", inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      FUSEDRNN_CHECK(inputs[i] >= 0, "there is no input ", inputs[i]);
      FUSEDRNN_CHECK(std::count(inputs.begin(), inputs.end(), inputs[i]) == 1, "input ", inputs[i],
                     " is read twice");
    }
    FUSEDRNN_CHECK(
        int64_t(weights.size()) == program.weights() && vectors.size() == program.vectors.size(),
        "expected ", program.weights(), " weights and ", program.vectors.size(), " vectors, got ",
        weights.size(), " and ", vectors.size());
    for (const Terms& terms : weights) {
      FUSEDRNN_CHECK(terms.size() == 1, "a weight has one term, got ", terms.size());
    }
    for (const program::Product& product : program.products) {
      const Terms& terms = weights[size_t(product.weight)];
      check_terms(terms, product.columns);
      for (const Side& side : terms[0]) {
        FUSEDRNN_CHECK(side.constant != Side::kZeros, "a weight has no zeros");
      }
    }
    for (size_t i = 0; i < vectors.size(); ++i) check_terms(vectors[i], program.vectors[i]);
  }
};

}  // namespace fusedrnn
