// Reads a program from the list of numbers that fusedrnn/_compile/program.py writes: each field in
// its order, and each list after its length.
#pragma once
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../base/checked.h"
#include "checks.h"
#include "program.h"

namespace fusedrnn::program {

class Reader {
 public:
  Reader(const int64_t* numbers, int64_t count) : numbers_(numbers), count_(count) {}

  Program program() {
    Program p;
    read(p.inputs);
    read(p.sequences);
    read(p.vectors);
    read(p.streams);
    read(p.carries);
    read(p.values);
    read(p.arrays);
    read(p.products);
    read(p.stages);
    read(p.order);
    FUSEDRNN_CHECK(at_ == count_, "a program has ", count_, " numbers, of which ", at_,
                   " have a meaning");
    return p;
  }

 private:
  void read(int64_t& number) {
    FUSEDRNN_CHECK(at_ < count_, "a program ends after ", count_, " numbers, too early");
    number = numbers_[at_++];
  }
  void read(bool& flag) {
    int64_t number;
    read(number);
    FUSEDRNN_CHECK(number == 0 || number == 1, "a flag of a program must be 0 or 1, got ", number);
    flag = number == 1;
  }
  template <class Enum>
  void read(Enum& choice, Enum last) {
    int64_t number;
    read(number);
    FUSEDRNN_CHECK(number >= 0 && number <= int64_t(last), "a choice of a program must be in [0, ",
                   int64_t(last), "], got ", number);
    choice = Enum(number);
  }
  template <class Part>
  void read(std::vector<Part>& list) {
    int64_t length;
    read(length);
    FUSEDRNN_CHECK(length >= 0 && length <= count_ - at_, "a list of a program has length ", length,
                   ", and there are ", count_ - at_, " numbers left");
    list.resize(size_t(length));
    for (Part& part : list) read(part);
  }

  void read(Operand& o) {
    read(o.source, Source::None);
    read(o.index);
    read(o.offset);
  }
  void read(Carry& c) {
    read(c.width);
    read(c.sequence);
    read(c.offset);
  }
  void read(Value& v) {
    read(v.columns);
    read(v.sequence);
    read(v.offset);
    read(v.carry);
    read(v.carry_offset);
    read(v.is_operand);
    read(v.is_read);
  }
  void read(Array& a) {
    read(a.columns);
    read(a.bias);
  }
  void read(Product& p) {
    read(p.operand);
    read(p.weight);
    read(p.terms);
    read(p.columns);
    read(p.array);
    read(p.offset);
    read(p.adds);
    read(p.phase, Phase::After);
  }
  void read(StageInput& i) {
    read(i.operand);
    read(i.kind, In::Index);
    read(i.group);
  }
  void read(StageOutput& o) {
    read(o.value);
    read(o.kind, Out::ArgMax);
    read(o.group);
  }
  void read(Stage& s) {
    read(s.width);
    read(s.phase, Phase::After);
    read(s.is_sequential);
    read(s.inputs);
    read(s.outputs);
  }
  void read(Item& i) {
    read(i.is_stage);
    read(i.index);
  }

  const int64_t* numbers_;
  int64_t count_, at_ = 0;
};

// The program in these numbers.  An error if a driver could not run it.
inline Program read(const int64_t* numbers, int64_t count) {
  FUSEDRNN_CHECK(numbers != nullptr && count >= 0, "a program must be a list of numbers");
  const Program program = Reader(numbers, count).program();
  Checks(program).run();
  return program;
}

}  // namespace fusedrnn::program
