// A program as a list of numbers, as fusedrnn/_compiler/program.py writes it: each field in its
// order, and each list after its length.
#pragma once
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../base/checked.h"
#include "checks.h"
#include "program.h"

namespace fusedrnn::program {

// Goes through all numbers of a program in their order.  Self has number(int64_t&),
// number(bool&), number(Enum&, last) and length(list), which read or write one of them.
template <class Self>
class Numbers {
 protected:
  void visit(Program& p) {
    visit(p.inputs);
    visit(p.sequences);
    visit(p.vectors);
    visit(p.streams);
    visit(p.carries);
    visit(p.values);
    visit(p.arrays);
    visit(p.products);
    visit(p.stages);
    visit(p.order);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }

  template <class Part>
  void visit(std::vector<Part>& list) {
    self().length(list);
    for (Part& part : list) visit(part);
  }
  void visit(int64_t& number) { self().number(number); }
  void visit(Operand& o) {
    self().number(o.source, Source::None);
    self().number(o.index);
    self().number(o.offset);
  }
  void visit(Carry& c) {
    self().number(c.width);
    self().number(c.sequence);
    self().number(c.offset);
  }
  void visit(Value& v) {
    self().number(v.columns);
    self().number(v.sequence);
    self().number(v.offset);
    self().number(v.carry);
    self().number(v.carry_offset);
    self().number(v.is_operand);
    self().number(v.is_read);
  }
  void visit(Array& a) {
    self().number(a.columns);
    self().number(a.bias);
  }
  void visit(Product& p) {
    visit(p.operand);
    self().number(p.weight);
    self().number(p.terms);
    self().number(p.columns);
    self().number(p.array);
    self().number(p.offset);
    self().number(p.adds);
    self().number(p.phase, Phase::After);
  }
  void visit(StageInput& i) {
    visit(i.operand);
    self().number(i.kind, In::Index);
    self().number(i.group);
  }
  void visit(StageOutput& o) {
    self().number(o.value);
    self().number(o.kind, Out::ArgMax);
    self().number(o.group);
  }
  void visit(Stage& s) {
    self().number(s.width);
    self().number(s.phase, Phase::After);
    self().number(s.is_sequential);
    visit(s.inputs);
    visit(s.outputs);
  }
  void visit(Item& i) {
    self().number(i.is_stage);
    self().number(i.index);
  }
};

class Reader : Numbers<Reader> {
  friend Numbers<Reader>;

 public:
  Reader(const int64_t* numbers, int64_t count) : numbers_(numbers), count_(count) {}

  Program program() {
    Program p;
    visit(p);
    FUSEDRNN_CHECK(at_ == count_, "a program has ", count_, " numbers, of which ", at_,
                   " have a meaning");
    return p;
  }

 private:
  void number(int64_t& number) {
    FUSEDRNN_CHECK(at_ < count_, "a program ends after ", count_, " numbers, too early");
    number = numbers_[at_++];
  }
  void number(bool& flag) {
    int64_t read;
    number(read);
    FUSEDRNN_CHECK(read == 0 || read == 1, "a flag of a program must be 0 or 1, got ", read);
    flag = read == 1;
  }
  template <class Enum>
  void number(Enum& choice, Enum last) {
    int64_t read;
    number(read);
    FUSEDRNN_CHECK(read >= 0 && read <= int64_t(last), "a choice of a program must be in [0, ",
                   int64_t(last), "], got ", read);
    choice = Enum(read);
  }
  template <class Part>
  void length(std::vector<Part>& list) {
    int64_t read;
    number(read);
    FUSEDRNN_CHECK(read >= 0 && read <= count_ - at_, "a list of a program has length ", read,
                   ", and there are ", count_ - at_, " numbers left");
    list.resize(size_t(read));
  }

  const int64_t* numbers_;
  int64_t count_, at_ = 0;
};

class Writer : Numbers<Writer> {
  friend Numbers<Writer>;

 public:
  explicit Writer(Program program) { visit(program); }

  const std::vector<int64_t>& numbers() const { return numbers_; }

 private:
  void number(int64_t number) { numbers_.push_back(number); }
  template <class Enum>
  void number(Enum choice, Enum /*last*/) {
    number(int64_t(choice));
  }
  template <class Part>
  void length(const std::vector<Part>& list) {
    number(int64_t(list.size()));
  }

  std::vector<int64_t> numbers_;
};

// The program in these numbers.  An error if a driver could not run it.
inline Program read(const int64_t* numbers, int64_t count) {
  FUSEDRNN_CHECK(numbers != nullptr && count >= 0, "a program must be a list of numbers");
  const Program program = Reader(numbers, count).program();
  Checks(program).run();
  return program;
}

// The numbers of a program.
inline std::vector<int64_t> write(const Program& program) { return Writer(program).numbers(); }

}  // namespace fusedrnn::program
