// The loops around a generated stage on the CPU: all rows times all columns, in vectors.
//
// It is compiled at run time into a library of one storage type, which begins with the instruction
// set as vector.h describes, and includes nothing of torch, so that this takes seconds.  Everything
// here that has code is in the namespace of the instruction set.
//
// A row is cut into vectors from its start, and anew where a group of columns ends, so that a
// vector lies within one group of each input and result.  How it is cut depends on nothing but the
// stage, so a row's results depend neither on the other rows nor on the threads among which they
// are divided.
//
// Only the step's own arithmetic is compiled for each stage: Arithmetic, which reads and writes
// whole vectors of Acc<T>.  All else is compiled once in a library.  It does a block of a row's
// columns at a time: the numbers of a Source are found in memory, or made in a buffer if they are
// of 16 bits, added up, drawn, or less than a vector; what is computed goes to its place, or to a
// buffer from which a Sink converts it, adds it or reduces it.
//
// Longer than 350 lines, because blocks, sources and sinks are one loop.
#pragma once
#include "rare_functions.h"
#include "stage_vectors.h"

namespace fusedrnn::program {
inline namespace FUSEDRNN_ISA {

constexpr int64_t kBlock = 256;  // columns that are done at a time, at most
// The length of a buffer: what is drawn begins up to 3 columns before the block, and ends with all
// that is drawn at once.
template <class T>
constexpr int64_t kRoom = kBlock + 4 * Lanes<T>::kWidth;

// What a block of columns is computed from: an input, or the gradient of a result.
template <class T>
struct Source {
  using L = Lanes<T>;
  using A = Acc<T>;
  using V = typename L::V;

  struct Term {
    const void* data;
    int64_t stride;
    bool is_storage;
  };
  In kind;
  int32_t columns;  // of a group; 0 without groups
  int count;        // of terms; their sum is what is read, or 0
  Term terms[3];
  A* buffer;
  const A* drawn;
  // Of the row.
  Row<T, const void> rows[3];
  Group group;
  int64_t filled_group, filled;  // whose number is in the buffer, in how many columns

  FUSEDRNN_HD void start(In its_kind, int32_t columns_of_group, A* its_buffer) {
    kind = its_kind;
    columns = is_grouped(kind) ? columns_of_group : 0;
    count = 0;
    buffer = its_buffer;
  }
  FUSEDRNN_HD void add(const void* data, int64_t stride, bool is_storage) {
    if (data != nullptr) terms[count++] = {data, stride, is_storage};
  }
  // Nothing to read is the same number in all columns.
  FUSEDRNN_HD void end() {
    if (kind == In::Column && count == 0) kind = In::Group;
  }

  FUSEDRNN_HD void start_row(int64_t row, int64_t width) {
    for (int i = 0; i < count; ++i) {
      rows[i] = Row<T, const void>::of(terms[i].data, row, terms[i].stride, terms[i].is_storage);
    }
    group.start(columns, width);
    filled_group = -1;
  }

  // Where the numbers of columns [column, column + n) are, in whole vectors.  drawn_from: the first
  // column of those that are drawn.
  FUSEDRNN_HD const A* read(int64_t column, int64_t n, int64_t drawn_from) {
    switch (kind) {
      case In::Column: return read_columns(column, n);
      case In::Group: read_groups(column, n); return buffer;
      case In::Index:
        for (int64_t c = 0; c < n; c += L::kWidth) {
          group.move_to(column + c);
          put(c, L::places() + A(column + c - group.begin));
        }
        return buffer;
      default: return drawn + (column - drawn_from);
    }
  }

 private:
  FUSEDRNN_HD void put(int64_t c, V x) { L::store(buffer + c, x, L::kWidth); }

  FUSEDRNN_HD const A* read_columns(int64_t column, int64_t n) {
    int i = 0;
    const A* sum = nullptr;  // of the first i terms
    if (n % L::kWidth == 0 && !rows[0].is_narrow()) {
      sum = static_cast<const A*>(rows[i++].data) + column;
    }
    for (; i < count; ++i) {
      A* const place = buffer;  // a variable, since writing might change what is not
      rows[i].with([=](auto* data) __attribute__((always_inline)) {
        const auto* const term = data + column;
        if (sum == nullptr) {
          for_vectors<T>(n, [=](int64_t c, int64_t lanes) __attribute__((always_inline)) {
            L::store(place + c, L::load(term + c, lanes), L::kWidth);
          });
        } else {
          for_vectors<T>(n, [=](int64_t c, int64_t lanes) __attribute__((always_inline)) {
            L::store(place + c, L::load(sum + c, L::kWidth) + L::load(term + c, lanes), L::kWidth);
          });
        }
      });
      sum = place;
    }
    return sum;
  }

  // The number of a group, in each of its columns.
  FUSEDRNN_HD void read_groups(int64_t column, int64_t n) {
    group.move_to(column);
    if (column + n <= group.end) {
      if (filled_group == group.number && n <= filled) return;
      filled_group = group.number;
      filled = n;
    } else {
      filled_group = -1;
    }
    for (int64_t c = 0, end = 0; c < n;) {
      group.move_to(column + c);
      end = least(n, group.end - column);
      A sum = count > 0 ? rows[0].one(group.number) : A{};
      for (int i = 1; i < count; ++i) sum += rows[i].one(group.number);
      const V x = sum - V{};
      for (A* const place = buffer; c < end; c += L::kWidth) L::store(place + c, x, L::kWidth);
    }
  }
};

// What becomes of what is computed: of a result, or the gradient of an input.
template <class T>
struct Sink {
  using L = Lanes<T>;
  using A = Acc<T>;
  using V = typename L::V;

  Out kind;
  int32_t columns;  // of a group; 0 without groups
  void* data;       // null if it is not wanted
  int64_t stride;
  bool is_storage, adds, rounds;
  A* buffer;
  // Of the row.
  Row<T, void> to;
  Group group;
  GroupSum<T> sum;
  GroupLargest<T> largest;

  FUSEDRNN_HD void start_row(int64_t row, int64_t width) {
    to = Row<T, void>::of(data, row, stride, is_storage);
    group.start(columns, width);
    if (kind == Out::Column) return;
    if (is_largest(kind)) {
      largest.start();
    } else {
      sum.start();
    }
  }

  // A row that does not take the step.
  FUSEDRNN_HD void clear_row(int64_t row, int64_t width) const {
    if (data == nullptr) return;
    const int64_t count = is_grouped(kind) ? Group::count(columns, width) : width;
    Row<T, void>::of(data, row, stride, is_storage).clear(count);
  }

  // Where n columns are written, in whole vectors.
  FUSEDRNN_HD A* place(int64_t column, int64_t n) const {
    return is_written(n) ? static_cast<A*>(to.data) + column : buffer;
  }

  // What is left to do when columns [column, column + n) are there.
  FUSEDRNN_HD void finish(int64_t column, int64_t n) {
    if (data == nullptr || is_written(n)) return;
    switch (kind) {
      case Out::Column: return write(column, n);
      case Out::Sum:
        return reduce(sum, column, n, [](const GroupSum<T>& of) __attribute__((always_inline)) {
          return of.total();
        });
      default:
        return reduce(largest, column, n,
                      [&](const GroupLargest<T>& of)
                          __attribute__((always_inline)) { return of.total(kind == Out::ArgMax); });
    }
  }

 private:
  // Whether it has its place where whole vectors of Acc<T> can be written.
  FUSEDRNN_HD bool is_written(int64_t n) const {
    return kind == Out::Column && data != nullptr && !adds && !rounds && n % L::kWidth == 0 &&
           !to.is_narrow();
  }

  FUSEDRNN_HD void write(int64_t column, int64_t n) const {
    const A* const computed = buffer;  // variables, since writing might change what is not
    const bool adds = this->adds, rounds = this->rounds;
    to.with([=](auto* data) __attribute__((always_inline)) {
      auto* const place = data + column;
      for_vectors<T>(n, [=](int64_t c, int64_t lanes) __attribute__((always_inline)) {
        V x = L::load(computed + c, L::kWidth);
        if (adds) x = L::load(place + c, lanes) + x;
        L::store(place + c, rounds ? L::round(x) : x, lanes);
      });
    });
  }

  // R: GroupSum or GroupLargest.
  template <class R, class Total>
  FUSEDRNN_HD void reduce(R& so_far, int64_t column, int64_t n, const Total& total) {
    R reduction = so_far;  // in registers
    for (int64_t begin = 0, end; begin < n; begin = end) {
      group.move_to(column + begin);
      end = least(n, group.end - column);
      V place = L::places() + A(column + begin - group.begin);
      for_vectors<T>(end - begin, [&](int64_t c, int64_t lanes) __attribute__((always_inline)) {
        reduction.add(L::load(buffer + begin + c, L::kWidth), place, lanes);
        place = place + A(L::kWidth);
      });
      if (column + end < group.end) continue;
      A x = total(reduction);
      reduction.start();
      if (adds) x = to.one(group.number) + x;
      to.set(group.number, rounds ? widen(narrow<T>(x)) : x);
    }
    so_far = reduction;
  }
};

// Computes n columns, in whole vectors.  from: inputs, and for backward the gradients of results.
template <class T>
using Compute = void (*)(const Acc<T>* const* from, Acc<T>* const* to, int64_t n);

template <class T, class Stage>
struct Arithmetic {
  using L = Lanes<NumberOfStage<Stage, T>>;
  using A = Acc<T>;
  using V = typename L::V;
  static constexpr int kIns = Stage::kIns, kOuts = Stage::kOuts;
  static constexpr int kInSlots = at_least_one(kIns), kOutSlots = at_least_one(kOuts);

  static void forward(const A* const* from, A* const* to, int64_t n) {
    const Pointers<const A*, kIns> ins(from);
    const Pointers<A*, kOuts> outs(to);
    for (int64_t c = 0; c < n; c += L::kWidth) {
      V in[kInSlots], out[kOutSlots];
      load<kIns>(in, ins, c);
      Stage::forward(in, out);
      for_each<kOuts>([&](auto k) __attribute__((always_inline)) {
        L::store(outs.at[k] + c, out[k], L::kWidth);
      });
    }
  }

  static void backward(const A* const* from, A* const* to, int64_t n) {
    const Pointers<const A*, kIns> ins(from);
    const Pointers<const A*, kOuts> results(from + kIns);
    const Pointers<A*, kIns> gradients(to);
    for (int64_t c = 0; c < n; c += L::kWidth) {
      V in[kInSlots], dout[kOutSlots], din[kInSlots];
      load<kIns>(in, ins, c);
      load<kOuts>(dout, results, c);
      Stage::backward(in, dout, din);
      for_each<kIns>([&](auto i) __attribute__((always_inline)) {
        if constexpr (is_read(Stage::kIn[i])) {
          L::store(gradients.at[i] + c, din[i], L::kWidth);
        }
      });
    }
  }

 private:
  // A copy, which what is written cannot change.
  template <class P, int n>
  struct Pointers {
    P at[at_least_one(n)];

    FUSEDRNN_HD explicit Pointers(const P* of) {
      for_each<n>([&](auto i) __attribute__((always_inline)) { at[i] = of[i]; });
    }
  };

  template <int n>
  FUSEDRNN_HD static void load(V* x, const Pointers<const A*, n>& from, int64_t c) {
    for_each<n>([&](auto i)
                    __attribute__((always_inline)) { x[i] = L::load(from.at[i] + c, L::kWidth); });
  }
};

// Draws the numbers of `count` columns, and some more, from column 4 block on.
template <class T>
using Draw = void (*)(Acc<T>* to, int64_t count, uint64_t seed, uint32_t t, uint32_t b,
                      uint32_t block, uint32_t stream);

template <class T, class Distribution>
void draw(Acc<T>* to, int64_t count, uint64_t seed, uint32_t t, uint32_t b, uint32_t block,
          uint32_t stream) {
  using L = Lanes<T>;
  for (int64_t c = 0; c < count; c += 4 * L::kWidth, block += uint32_t(L::kWidth)) {
    L::template draw<Distribution>(to + c, seed, t, b, block, stream);
    for (int i = 0; i < 4; ++i) {
      Acc<T>* const place = to + c + i * L::kWidth;
      L::store(place, L::round(L::load(place, L::kWidth)), L::kWidth);
    }
  }
}

// A stage to the code that is common to all.
template <class T>
struct Code {
  const In* in;
  const Out* out;
  int ins, outs;
  Compute<T> forward, backward;
  Draw<T> normal, uniform;  // null if nothing is drawn of it
};

// The rows of a call.
template <class T>
class Rows {
 public:
  using L = Lanes<T>;
  using A = Acc<T>;

  // sources: of the inputs and results; buffers: kRoom for each source and sink.
  FUSEDRNN_HD Rows(const Code<T>& code, const StageArgs& args, bool backward, Source<T>* sources,
                   Sink<T>* sinks, A* buffers)
      : code_(code), args_(args), backward_(backward), sources_(sources), sinks_(sinks),
        buffers_(buffers) {}

  // Not inlined: once in a library.
  __attribute__((noinline)) void run(int64_t first, int64_t last) {
    start();
    int64_t t = args_.first_t + first / args_.batch, b = first % args_.batch;
    for (int64_t row = first; row < last; ++row) {
      if (args_.lengths == nullptr || t < args_.lengths[b]) {
        do_row(row, uint32_t(t), uint32_t(b));
      } else {
        clear_row(row);
      }
      if (++b == args_.batch) {
        b = 0;
        ++t;
      }
    }
  }

 private:
  const Code<T>& code_;
  const StageArgs& args_;
  const bool backward_;
  Source<T>* const sources_;  // the results are among them for backward only
  Sink<T>* const sinks_;
  A* const buffers_;
  int source_count_, sink_count_;
  int64_t block_;
  bool draws_;   // whether anything is drawn
  bool is_cut_;  // whether a group ends within a vector
  const A* from_[kMostIns + kMostOuts];
  A* to_[kMostIns];

  FUSEDRNN_HD void start() {
    source_count_ = code_.ins + (backward_ ? code_.outs : 0);
    sink_count_ = backward_ ? code_.ins : code_.outs;
    draws_ = code_.normal != nullptr || code_.uniform != nullptr;
    is_cut_ = false;
    // Buffers should stay in the first level of the cache.
    block_ = source_count_ + sink_count_ <= 20 ? kBlock : kBlock / 2;
    for (int i = 0; i < code_.ins; ++i) start_input(i);
    for (int k = 0; k < code_.outs; ++k) start_result(k);
    for (int i = 0; i < source_count_; ++i) {
      sources_[i].end();
      note_group(sources_[i].columns);
    }
    for (int k = 0; k < sink_count_; ++k) note_group(sinks_[k].columns);
  }
  FUSEDRNN_HD void note_group(int64_t columns) {
    if (columns < args_.width && columns % L::kWidth != 0) is_cut_ = true;
  }

  FUSEDRNN_HD void start_input(int i) {
    const StageIn& of = args_.in[i];
    const In kind = code_.in[i];
    Source<T>& source = sources_[i];
    source.start(kind, of.group, buffers_ + i * kRoom<T>);
    if (is_read(kind)) {
      source.add(of.data, of.stride, of.is_storage);
      source.add(of.bias, 0, false);
    }
    if (!backward_) return;
    Sink<T>& sink = sinks_[i];
    sink.kind = kind == In::Group ? Out::Sum : Out::Column;
    sink.columns = kind == In::Group ? of.group : 0;
    sink.data = is_read(kind) ? of.gradient : nullptr;
    sink.stride = of.gradient_stride;
    sink.is_storage = of.gradient_is_storage;
    sink.adds = of.adds;
    sink.rounds = false;
    sink.buffer = buffers_ + (source_count_ + i) * kRoom<T>;
  }

  FUSEDRNN_HD void start_result(int k) {
    const StageOut& of = args_.out[k];
    const Out kind = code_.out[k];
    if (backward_) {
      const int i = code_.ins + k;
      sources_[i].start(is_grouped(kind) ? In::Group : In::Column, of.group,
                        buffers_ + i * kRoom<T>);
      if (is_largest(kind)) return;
      for (int s = 0; s < 3; ++s) {
        sources_[i].add(of.gradient[s], of.gradient_stride[s], of.gradient_is_storage[s]);
      }
      return;
    }
    Sink<T>& sink = sinks_[k];
    sink.kind = kind;
    sink.columns = is_grouped(kind) ? of.group : 0;
    sink.data = of.data;
    sink.stride = of.stride;
    sink.is_storage = of.is_storage;
    sink.adds = false;
    sink.rounds = !std::is_same_v<T, A> && of.rounds && !of.is_storage;
    sink.buffer = buffers_ + (source_count_ + k) * kRoom<T>;
  }

  // Its results are 0, and its gradients, which need not be added.
  FUSEDRNN_HD void clear_row(int64_t row) {
    for (int k = 0; k < sink_count_; ++k) {
      if (!sinks_[k].adds) sinks_[k].clear_row(row, args_.width);
    }
  }

  FUSEDRNN_HD void do_row(int64_t row, uint32_t t, uint32_t b) {
    for (int i = 0; i < source_count_; ++i) sources_[i].start_row(row, args_.width);
    for (int k = 0; k < sink_count_; ++k) sinks_[k].start_row(row, args_.width);
    const Compute<T> compute = backward_ ? code_.backward : code_.forward;
    int64_t drawn_from = 0, drawn_to = draws_ ? 0 : args_.width;
    for (int64_t column = 0, n; column < args_.width; column += n) {
      if (column == drawn_to) {
        drawn_from = column;
        drawn_to = least(column + block_, args_.width);
        draw_columns(drawn_from, drawn_to, t, b);
      }
      n = columns_from(column, drawn_to);
      for (int i = 0; i < source_count_; ++i) from_[i] = sources_[i].read(column, n, drawn_from);
      for (int k = 0; k < sink_count_; ++k) to_[k] = sinks_[k].place(column, n);
      compute(from_, to_, n);
      for (int k = 0; k < sink_count_; ++k) sinks_[k].finish(column, n);
    }
  }

  // How many columns are done next: whole vectors, which need no buffer, unless there are few.
  FUSEDRNN_HD int64_t columns_from(int64_t column, int64_t end) {
    int64_t n = least(block_, end - column);
    if (is_cut_) {
      for (int i = 0; i < source_count_; ++i) n = least(n, left_of(sources_[i].group, column));
      for (int k = 0; k < sink_count_; ++k) n = least(n, left_of(sinks_[k].group, column));
    }
    return n < 4 * L::kWidth ? n : n / L::kWidth * L::kWidth;
  }
  FUSEDRNN_HD static int64_t left_of(Group& group, int64_t column) {
    group.move_to(column);
    return group.end - column;
  }

  FUSEDRNN_HD void draw_columns(int64_t begin, int64_t end, uint32_t t, uint32_t b) {
    for (int i = 0; i < code_.ins; ++i) {
      if (!is_drawn(code_.in[i])) continue;
      const int64_t first = args_.in[i].offset + begin, skipped = first % 4;
      const Draw<T> draws_them = code_.in[i] == In::Normal ? code_.normal : code_.uniform;
      draws_them(sources_[i].buffer, skipped + end - begin, uint64_t(*args_.seed),
                 uint32_t(args_.first_step) + t, b, uint32_t(first / 4), args_.in[i].stream);
      sources_[i].drawn = sources_[i].buffer + skipped;
    }
  }
};

template <class Stage>
FUSEDRNN_HD constexpr bool has(In kind) {
  for (int i = 0; i < Stage::kIns; ++i) {
    if (Stage::kIn[i] == kind) return true;
  }
  return false;
}

// Draw<T> of a distribution if the stage has inputs of that kind; else its code is not compiled.
template <class T, class Stage, In kind, class Distribution>
FUSEDRNN_HD constexpr Draw<T> draw_of() {
  if constexpr (has<Stage>(kind)) {
    return draw<T, Distribution>;
  } else {
    return nullptr;
  }
}

// Does the rows [first, last) of a stage.
template <class T, class Stage>
void run(bool backward, const StageArgs& args, int64_t first, int64_t last) {
  using Its = Arithmetic<T, Stage>;
  static constexpr Code<T> kCode = {Stage::kIn,
                                    Stage::kOut,
                                    Stage::kIns,
                                    Stage::kOuts,
                                    Its::forward,
                                    Its::backward,
                                    draw_of<T, Stage, In::Normal, Normal>(),
                                    draw_of<T, Stage, In::Uniform, Uniform<T>>()};
  constexpr int kSources = at_least_one(Stage::kIns + Stage::kOuts);
  constexpr int kSinks = Stage::kIns > Its::kOutSlots ? Stage::kIns : Its::kOutSlots;
  Source<T> sources[kSources];
  Sink<T> sinks[kSinks];
  alignas(64) Acc<T> buffers[(kSources + kSinks) * kRoom<T>];
  Rows<T> rows(kCode, args, backward, sources, sinks, buffers);
  rows.run(first, last);
}

}  // namespace FUSEDRNN_ISA
}  // namespace fusedrnn::program
