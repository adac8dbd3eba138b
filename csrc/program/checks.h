// Checks of a program: that every number is in its range, that every column is written once and
// before it is read, and that backward can make the values again that forward does not keep.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "../base/checked.h"
#include "columns.h"
#include "program.h"

namespace fusedrnn::program {

class Checks {
 public:
  explicit Checks(const Program& program) : program_(program) {}

  void run() {
    check_widths();
    check_carries();
    check_values();
    check_arrays();
    check_products();
    for (size_t i = 0; i < program_.stages.size(); ++i) check_stage(i);
    check_results();
    check_order();
    check_flow();
  }

 private:
  static constexpr int64_t kMostColumns = INT32_MAX;

  // The name of a part in an error.
  static std::string name(const char* kind, size_t index) {
    return std::string(kind) + " " + text_of(index);
  }

  static void check_index(const std::string& what, const char* kind, int64_t index, size_t count) {
    FUSEDRNN_CHECK(index >= 0 && index < int64_t(count), what, " of a program has ", kind, " ",
                   index, " of ", count);
  }
  static void check_width(const std::string& what, int64_t width) {
    FUSEDRNN_CHECK(width > 0 && width <= kMostColumns, what,
                   " of a program must have a positive number of columns below 2^31, got ", width);
  }
  // Checks that columns [offset, offset + columns) exist.
  static void check_columns(const std::string& what, int64_t offset, int64_t columns,
                            int64_t width) {
    check_width(what, columns);
    FUSEDRNN_CHECK(offset >= 0 && offset <= width - columns, what, " of a program has ", columns,
                   " columns from ", offset, " on of ", width);
  }

  void check_widths() const {
    for (const auto* widths : {&program_.inputs, &program_.sequences, &program_.vectors}) {
      for (const int64_t width : *widths) check_width("an input, sequence or vector", width);
    }
    for (const int64_t stream : program_.streams) {
      FUSEDRNN_CHECK(stream >= 0 && stream <= UINT32_MAX,
                     "a stream of a program must be in [0, 2^32), got ", stream);
    }
  }

  void check_carries() const {
    for (size_t j = 0; j < program_.carries.size(); ++j) {
      const Carry& carry = program_.carries[j];
      check_width(name("carry", j), carry.width);
      if (carry.is_in_sequence()) {
        check_place(name("carry", j), carry.sequence, carry.offset, carry.width);
      }
    }
  }
  void check_place(const std::string& what, int64_t sequence, int64_t offset,
                   int64_t columns) const {
    check_index(what, "sequence", sequence, program_.sequences.size());
    check_columns(what, offset, columns, program_.sequences[size_t(sequence)]);
  }

  // What a value is of a carry must be where the carry is.
  void check_values() {
    std::vector<Columns> sequences(program_.sequences.size()), carries(program_.carries.size());
    const auto add = [](const std::string& what, Columns& to, Range range) {
      FUSEDRNN_CHECK(!to.has_any(range), what, " of a program writes columns that another has");
      to.add(range);
    };
    for (size_t i = 0; i < program_.values.size(); ++i) {
      const Value& value = program_.values[i];
      const std::string what = name("value", i);
      check_width(what, value.columns);
      if (value.is_in_sequence()) {
        check_place(what, value.sequence, value.offset, value.columns);
        add(what, sequences[size_t(value.sequence)], {value.offset, value.columns});
      }
      if (!value.is_of_carry()) continue;
      check_index(what, "carry", value.carry, program_.carries.size());
      const Carry& carry = program_.carries[size_t(value.carry)];
      check_columns(what, value.carry_offset, value.columns, carry.width);
      add(what, carries[size_t(value.carry)], {value.carry_offset, value.columns});
      const bool is_in_place = carry.is_in_sequence()
                                   ? value.sequence == carry.sequence &&
                                         value.offset == carry.offset + value.carry_offset
                                   : !value.is_in_sequence();
      FUSEDRNN_CHECK(is_in_place, what, " of a program must be kept where its carry is");
    }
    for (size_t s = 0; s < sequences.size(); ++s) {
      FUSEDRNN_CHECK(sequences[s].has({0, program_.sequences[s]}), name("sequence", s),
                     " of a program has columns that no value writes");
    }
    for (size_t j = 0; j < carries.size(); ++j) {
      FUSEDRNN_CHECK(carries[j].has({0, program_.carries[j].width}), name("carry", j),
                     " of a program has columns that no value writes");
    }
  }

  void check_arrays() const {
    for (size_t a = 0; a < program_.arrays.size(); ++a) {
      const Array& array = program_.arrays[a];
      check_width(name("array", a), array.columns);
      if (!array.has_bias()) continue;
      check_index(name("array", a), "vector", array.bias, program_.vectors.size());
      const int64_t width = program_.vectors[size_t(array.bias)];
      FUSEDRNN_CHECK(width == array.columns, name("array", a), " of a program has ", array.columns,
                     " columns and a bias of ", width);
    }
  }

  void check_operand(const std::string& what, const Operand& operand, int64_t columns) const {
    const size_t counts[] = {program_.inputs.size(),  program_.carries.size(),
                             program_.values.size(),  program_.arrays.size(),
                             program_.vectors.size(), program_.streams.size()};
    if (operand.source != Source::None) {
      check_index(what, "source", operand.index, counts[size_t(operand.source)]);
    }
    check_columns(what, operand.offset, columns, program_.width_of(operand));
  }

  void check_products() const {
    std::vector<const Product*> first(program_.products.size());
    for (size_t i = 0; i < program_.products.size(); ++i) {
      const Product& product = program_.products[i];
      const std::string what = name("product", i);
      const Source source = product.operand.source;
      FUSEDRNN_CHECK(source == Source::Input || source == Source::Carry || source == Source::Value,
                     what, " of a program must multiply an input, a carry or a value");
      check_operand(what, product.operand, product.terms);
      if (source == Source::Value) {
        const Value& value = program_.values[size_t(product.operand.index)];
        FUSEDRNN_CHECK(value.is_operand && value.is_read, what,
                       " of a program multiplies a value that is no operand");
      }
      check_index(what, "array", product.array, program_.arrays.size());
      check_columns(what, product.offset, product.columns,
                    program_.arrays[size_t(product.array)].columns);
      check_index(what, "weight", product.weight, first.size());
      const Product*& known = first[size_t(product.weight)];
      if (known == nullptr) known = &product;
      FUSEDRNN_CHECK(known->terms == product.terms && known->columns == product.columns, what,
                     " of a program has a weight of another shape");
    }
    for (int64_t w = 0; w < program_.weights(); ++w) {
      FUSEDRNN_CHECK(first[size_t(w)] != nullptr, "no product of a program reads weight ", w);
    }
  }

  // The last group of an input may have fewer columns than the others.
  static void check_group(const std::string& what, bool is_grouped, int64_t group, int64_t width) {
    FUSEDRNN_CHECK(is_grouped ? group > 0 && group <= kMostColumns : group == 0, what,
                   " of a program has groups of ", group, " columns of ", width);
  }
  void check_stage(size_t index) const {
    const Stage& stage = program_.stages[index];
    const std::string what = name("stage", index);
    check_width(what, stage.width);
    FUSEDRNN_CHECK(stage.inputs.size() <= kMostIns && !stage.outputs.empty() &&
                       stage.outputs.size() <= kMostOuts,
                   what, " of a program must have up to ", kMostIns, " inputs and 1 to ", kMostOuts,
                   " results, got ", stage.inputs.size(), " and ", stage.outputs.size());
    FUSEDRNN_CHECK(!stage.is_sequential || stage.phase == Phase::Step, what,
                   " of a program is sequential, but not in a step");
    for (const StageInput& input : stage.inputs) {
      const Source source = input.operand.source;
      const bool draws = input.kind == In::Normal || input.kind == In::Uniform;
      FUSEDRNN_CHECK(draws == (source == Source::Draw) &&
                         (input.kind == In::Index) == (source == Source::None),
                     what, " of a program has an input whose kind is none of its source");
      check_group(what, input.kind == In::Group || input.kind == In::Index, input.group,
                  stage.width);
      check_operand(what, input.operand, input.columns(stage.width));
      FUSEDRNN_CHECK(
          source != Source::Value || program_.values[size_t(input.operand.index)].is_read, what,
          " of a program reads a value that is not to be read");
    }
    for (const StageOutput& output : stage.outputs) {
      check_index(what, "value", output.value, program_.values.size());
      check_group(what, output.kind != Out::Column, output.group, stage.width);
      FUSEDRNN_CHECK(output.group == 0 || stage.width % output.group == 0, what,
                     " of a program makes one number of ", output.group, " columns of ",
                     stage.width);
      const int64_t columns = program_.values[size_t(output.value)].columns;
      FUSEDRNN_CHECK(output.columns(stage.width) == columns, what, " of a program makes ",
                     output.columns(stage.width), " columns of a value of ", columns);
    }
  }

  // Every value is the result of one stage.
  void check_results() const {
    std::vector<int> made(program_.values.size());
    for (const Stage& stage : program_.stages) {
      for (const StageOutput& output : stage.outputs) {
        ++made[size_t(output.value)];
        const Value& value = program_.values[size_t(output.value)];
        FUSEDRNN_CHECK(!value.is_of_carry() || stage.phase != Phase::After,
                       name("value", size_t(output.value)),
                       " of a program is a carry that is made after the steps");
      }
    }
    for (size_t i = 0; i < made.size(); ++i) {
      FUSEDRNN_CHECK(made[i] == 1, name("value", i), " of a program is the result of ", made[i],
                     " stages");
    }
  }

  void check_order() const {
    std::vector<int> products(program_.products.size()), stages(program_.stages.size());
    for (const Item& item : program_.order) {
      std::vector<int>& counts = item.is_stage ? stages : products;
      check_index("the order", item.is_stage ? "stage" : "product", item.index, counts.size());
      ++counts[size_t(item.index)];
    }
    for (const auto* counts : {&products, &stages}) {
      for (const int count : *counts) {
        FUSEDRNN_CHECK(count == 1, "the order of a program has an item ", count, " times");
      }
    }
  }

  // Goes through all items as forward does, and then through those of a step as backward does when
  // it makes values again: those that are not sequential before the others.
  void check_flow() {
    is_made_.assign(program_.values.size(), false);
    is_sequential_.assign(program_.values.size(), false);
    written_.assign(program_.arrays.size(), {});
    left_.assign(program_.products.size(), true);
    for (const Phase phase : {Phase::Before, Phase::Step, Phase::After}) {
      program_.for_items(phase, [&](const Item& item) {
        const std::string what = name(item.is_stage ? "stage" : "product", size_t(item.index));
        if (item.is_stage) {
          flow(what, program_.stages[size_t(item.index)]);
        } else {
          flow(what, size_t(item.index));
        }
      });
    }
  }
  void flow(const std::string& what, size_t index) {
    const Product& product = program_.products[index];
    check_read(what, product.operand, product.terms, product.phase, product.phase == Phase::After);
    Columns& written = written_[size_t(product.array)];
    const Range range{product.offset, product.columns};
    FUSEDRNN_CHECK(product.adds ? written.has(range) : !written.has_any(range), what,
                   " of a program must add to columns that have been written, and to no others");
    written.add(range);
    left_[index] = false;
  }
  void flow(const std::string& what, const Stage& stage) {
    for (const StageInput& input : stage.inputs) {
      check_read(what, input.operand, input.columns(stage.width), stage.phase,
                 stage.phase == Phase::After || stage.is_sequential);
    }
    for (const StageOutput& output : stage.outputs) {
      is_made_[size_t(output.value)] = true;
      is_sequential_[size_t(output.value)] = stage.is_sequential;
    }
  }
  // may_wait: whether backward makes the reader again after the sequential stages.
  void check_read(const std::string& what, const Operand& operand, int64_t columns, Phase phase,
                  bool may_wait) const {
    const size_t i = size_t(operand.index);
    bool is_sequential = false;
    if (operand.source == Source::Carry) {
      FUSEDRNN_CHECK(phase != Phase::Before, what, " of a program reads a carry before the steps");
      is_sequential = !program_.carries[i].is_in_sequence();
    } else if (operand.source == Source::Value) {
      FUSEDRNN_CHECK(is_made_[i], what, " of a program reads ", name("value", i),
                     " before it is made");
      is_sequential = is_sequential_[i];
    } else if (operand.source == Source::Array) {
      check_written(what, i, {operand.offset, columns});
    }
    FUSEDRNN_CHECK(!is_sequential || may_wait, what,
                   " of a program depends on a carry that is not kept in a sequence, and is not "
                   "sequential");
  }
  void check_written(const std::string& what, size_t array, Range range) const {
    bool is_complete = written_[array].has(range);
    for (size_t i = 0; i < left_.size(); ++i) {
      const Product& product = program_.products[i];
      if (!left_[i] || product.array != int64_t(array)) continue;
      const bool overlaps =
          product.offset < range.end() && product.offset + product.columns > range.begin;
      is_complete = is_complete && !overlaps;
    }
    FUSEDRNN_CHECK(is_complete, what, " of a program reads ", name("array", array),
                   " before it is written");
  }

  const Program& program_;
  std::vector<bool> is_made_, is_sequential_;  // of each value; is_sequential_: of its stage
  std::vector<Columns> written_;               // of each array
  std::vector<bool> left_;                     // of each product: whether its turn is yet to come
};

}  // namespace fusedrnn::program
