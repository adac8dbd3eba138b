// The built-in cells: each is one constant, a program of program/program.h whose widths are
// symbols.
//
// Product p of a cell is the weight matrix weight_<name>, and fills array p.  A stage of stages.h
// reads, in this order: its carry or its noise, if it has one; its input gates, if it has some; and
// its hidden gates.  It reads the first blocks of an array, as many as its kind takes.
//
// A new cell is one more entry of kPrograms.  layout.h makes of it what the driver of chains runs,
// and says at compile time which rule it breaks if it is no chain; sized_program.h makes of it what
// the driver of programs runs, which knows no such rules.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "../program/program.h"
#include "stages.h"

namespace fusedrnn {

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

namespace cells {

using program::Source;

// A list that is a constant of the compiler, which refuses one of more than kMost parts.  (For
// nvcc, a list is constant only if all members of its parts have defaults.)
template <class Part>
class List {
 public:
  static constexpr int kMost = 4;

  constexpr List() = default;
  constexpr List(std::initializer_list<Part> parts) {
    for (const Part& part : parts) parts_[count_++] = part;
  }
  constexpr int count() const { return count_; }
  constexpr const Part& operator[](int i) const { return parts_[i]; }
  constexpr const Part* begin() const { return parts_; }
  constexpr const Part* end() const { return parts_ + count_; }

 private:
  Part parts_[kMost] = {};
  int count_ = 0;
};

constexpr int kNone = -1;

// All columns of what a product or a stage reads.
struct Read {
  Source source{};
  int index{};

  constexpr bool is(Source other, int i) const { return source == other && index == i; }
};
constexpr Read input(int i) { return {Source::Input, i}; }
constexpr Read carry(int i) { return {Source::Carry, i}; }
constexpr Read value(int i) { return {Source::Value, i}; }
constexpr Read array(int i) { return {Source::Array, i}; }
constexpr Read draw(int i) { return {Source::Draw, i}; }

struct Carry {
  Width width{};
  int sequence = kNone;  // where every step keeps it
};
struct Value {
  Width width{};
  int sequence = kNone;  // where it is kept
  int carry = kNone;     // which carry of the next step it is
};
// weight_<name> has shape (blocks * size(to), size of `from`); bias_<name> has (blocks * size(to)).
struct Product {
  const char* name{};
  Read from{};
  int blocks{};
  Width to{};
  bool has_bias = true;
};
struct Stage {
  StageKind kind{};
  List<Read> reads;
  List<int> makes;  // values, all of the stage's width

  // How many blocks of an array it reads.  r: of the reads.
  constexpr int blocks(int r) const {
    const StageTraits of = traits(kind);
    return r == reads.count() - 1 ? of.hidden_blocks : of.input_blocks;
  }
};

struct Program {
  const char* name{};
  List<Width> inputs;
  List<Width> sequences;
  List<Carry> carries;
  List<Value> values;
  List<Product> products;
  List<Stage> stages;

  // Of what a product reads.
  constexpr Width width_of(const Read& from) const {
    switch (from.source) {
      case Source::Input: return inputs[from.index];
      case Source::Carry: return carries[from.index].width;
      default: return values[from.index].width;
    }
  }
};

// Operators number cells by their places here.
constexpr Program kPrograms[] = {
    {"stochastic_gru",
     /*inputs=*/{Width::Input},
     /*sequences=*/{Width::Hidden},
     /*carries=*/{{Width::Hidden, 0}},
     /*values=*/{{Width::Latent}, {Width::Hidden, 0, 0}},
     /*products=*/
     {{"ih", input(0), 3, Width::Hidden},
      {"zh", value(0), 3, Width::Hidden},
      {"hz", carry(0), 2, Width::Latent}},
     /*stages=*/
     {{StageKind::Sample, {draw(0), array(2)}, {0}},
      {StageKind::Gru, {carry(0), array(0), array(1)}, {1}}}},
    {"gru",
     /*inputs=*/{Width::Input},
     /*sequences=*/{Width::Hidden},
     /*carries=*/{{Width::Hidden, 0}},
     /*values=*/{{Width::Hidden, 0, 0}},
     /*products=*/{{"ih", input(0), 3, Width::Hidden}, {"hh", carry(0), 3, Width::Hidden}},
     /*stages=*/{{StageKind::Gru, {carry(0), array(0), array(1)}, {0}}}},
    {"lstm",
     /*inputs=*/{Width::Input},
     /*sequences=*/{Width::Hidden},
     /*carries=*/{{Width::Hidden, 0}, {Width::Hidden}},
     /*values=*/{{Width::Hidden, 0, 0}, {Width::Hidden, kNone, 1}},
     /*products=*/{{"ih", input(0), 4, Width::Hidden}, {"hh", carry(0), 4, Width::Hidden}},
     /*stages=*/{{StageKind::Lstm, {carry(1), array(0), array(1)}, {0, 1}}}},
    // A product depends on the cell state, so every step keeps it, in the second sequence.
    {"projected_lstm",
     /*inputs=*/{Width::Input},
     /*sequences=*/{Width::Output, Width::Hidden},
     /*carries=*/{{Width::Output, 0}, {Width::Hidden, 1}},
     /*values=*/{{Width::Output, 0, 0}, {Width::Hidden}, {Width::Hidden, 1, 1}},
     /*products=*/
     {{"ih", input(0), 4, Width::Hidden},
      {"hh", carry(0), 4, Width::Hidden},
      {"hr", value(1), 1, Width::Output, false}},
     /*stages=*/
     {{StageKind::Lstm, {carry(1), array(0), array(1)}, {1, 2}},
      {StageKind::Linear, {array(2)}, {0}}}},
};

}  // namespace cells
}  // namespace fusedrnn
