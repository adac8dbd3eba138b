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
#include "functions.h"
#include "stage_vectors.h"

namespace fusedrnn::program {
inline namespace FUSEDRNN_ISA {

constexpr int64_t kBlock = 128;  // columns that are done at a time, at most
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
    const Row<T, const void>& first = rows[0];
    if (count == 1 && n >= L::kWidth && !first.is_narrow()) {
      return static_cast<const A*>(first.data) + column;
    }
    for (int64_t c = 0; c < n; c += L::kWidth) {
      const int64_t lanes = least(L::kWidth, n - c);
      V x = first.load(column + c, lanes);
      for (int i = 1; i < count; ++i) x = x + rows[i].load(column + c, lanes);
      put(c, x);
    }
    return buffer;
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
      A sum{};
      for (int i = 0; i < count; ++i) sum += rows[i].one(group.number);
      for (; c < end; c += L::kWidth) put(c, sum - V{});
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
    sum.start();
    largest.start();
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
      case Out::Column:
        for (int64_t c = 0; c < n; c += L::kWidth) {
          const int64_t lanes = least(L::kWidth, n - c);
          V x = L::load(buffer + c, L::kWidth);
          if (adds) x = to.load(column + c, lanes) + x;
          to.store(column + c, rounds ? L::round(x) : x, lanes);
        }
        return;
      case Out::Sum:
        return reduce(sum, column, n, [&]() __attribute__((always_inline)) { return sum.total(); });
      default:
        return reduce(largest, column, n, [&]() __attribute__((always_inline)) {
          return largest.total(kind == Out::ArgMax);
        });
    }
  }

 private:
  // Whether it has its place where whole vectors of Acc<T> can be written.
  FUSEDRNN_HD bool is_written(int64_t n) const {
    return kind == Out::Column && data != nullptr && !adds && !rounds && n >= L::kWidth &&
           !to.is_narrow();
  }

  template <class R, class Total>
  FUSEDRNN_HD void reduce(R& reduction, int64_t column, int64_t n, const Total& total) {
    for (int64_t c = 0; c < n; c += L::kWidth) {
      const int64_t lanes = least(L::kWidth, n - c);
      group.move_to(column + c);
      reduction.add(L::load(buffer + c, L::kWidth), L::places() + A(column + c - group.begin),
                    lanes);
      if (column + c + lanes < group.end) continue;
      A x = total();
      reduction.start();
      if (adds) x = to.one(group.number) + x;
      to.set(group.number, rounds ? widen(narrow<T>(x)) : x);
    }
  }
};

// Computes n columns, in whole vectors.  from: inputs, and for backward the gradients of results.
template <class T>
using Compute = void (*)(const Acc<T>* const* from, Acc<T>* const* to, int64_t n);

template <class T, class Stage>
struct Arithmetic {
  using L = Lanes<T>;
  using A = Acc<T>;
  using V = typename L::V;
  static constexpr int kIns = Stage::kIns, kOuts = Stage::kOuts;
  static constexpr int kInSlots = at_least_one(kIns), kOutSlots = at_least_one(kOuts);

  static void forward(const A* const* from, A* const* to, int64_t n) {
    for (int64_t c = 0; c < n; c += L::kWidth) {
      V in[kInSlots], out[kOutSlots];
      load<kIns>(in, from, c);
      Stage::forward(in, out);
      for_each<kOuts>(
          [&](auto k) __attribute__((always_inline)) { L::store(to[k] + c, out[k], L::kWidth); });
    }
  }

  static void backward(const A* const* from, A* const* to, int64_t n) {
    for (int64_t c = 0; c < n; c += L::kWidth) {
      V in[kInSlots], dout[kOutSlots], din[kInSlots];
      load<kIns>(in, from, c);
      load<kOuts>(dout, from + kIns, c);
      Stage::backward(in, dout, din);
      for_each<kIns>([&](auto i) __attribute__((always_inline)) {
        if constexpr (is_read(Stage::kIn[i])) L::store(to[i] + c, din[i], L::kWidth);
      });
    }
  }

 private:
  template <int n>
  FUSEDRNN_HD static void load(V* x, const A* const* from, int64_t c) {
    for_each<n>([&](auto i)
                    __attribute__((always_inline)) { x[i] = L::load(from[i] + c, L::kWidth); });
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
      : code(code), args(args), backward(backward), sources(sources), sinks(sinks),
        buffers(buffers) {}

  // Not inlined: once in a library.
  __attribute__((noinline)) void run(int64_t first, int64_t last) {
    start();
    int64_t t = args.first_t + first / args.batch, b = first % args.batch;
    for (int64_t row = first; row < last; ++row) {
      if (args.lengths == nullptr || t < args.lengths[b]) {
        do_row(row, uint32_t(t), uint32_t(b));
      } else {
        clear_row(row);
      }
      if (++b == args.batch) {
        b = 0;
        ++t;
      }
    }
  }

 private:
  const Code<T>& code;
  const StageArgs& args;
  const bool backward;
  Source<T>* const sources;  // the results are among them for backward only
  Sink<T>* const sinks;
  A* const buffers;
  int source_count, sink_count;
  bool draws;   // whether anything is drawn
  bool is_cut;  // whether a group ends within a vector
  const A* from[kMostIns + kMostOuts];
  A* to[kMostIns];

  FUSEDRNN_HD void start() {
    source_count = code.ins + (backward ? code.outs : 0);
    sink_count = backward ? code.ins : code.outs;
    draws = code.normal != nullptr || code.uniform != nullptr;
    is_cut = false;
    for (int i = 0; i < code.ins; ++i) start_input(i);
    for (int k = 0; k < code.outs; ++k) start_result(k);
    for (int i = 0; i < source_count; ++i) {
      sources[i].end();
      note_group(sources[i].columns);
    }
    for (int k = 0; k < sink_count; ++k) note_group(sinks[k].columns);
  }
  FUSEDRNN_HD void note_group(int64_t columns) {
    if (columns < args.width && columns % L::kWidth != 0) is_cut = true;
  }

  FUSEDRNN_HD void start_input(int i) {
    const StageIn& of = args.in[i];
    const In kind = code.in[i];
    Source<T>& source = sources[i];
    source.start(kind, of.group, buffers + i * kRoom<T>);
    if (is_read(kind)) {
      source.add(of.data, of.stride, of.is_storage);
      source.add(of.bias, 0, false);
    }
    if (!backward) return;
    Sink<T>& sink = sinks[i];
    sink.kind = kind == In::Group ? Out::Sum : Out::Column;
    sink.columns = kind == In::Group ? of.group : 0;
    sink.data = is_read(kind) ? of.gradient : nullptr;
    sink.stride = of.gradient_stride;
    sink.is_storage = of.gradient_is_storage;
    sink.adds = of.adds;
    sink.rounds = false;
    sink.buffer = buffers + (source_count + i) * kRoom<T>;
  }

  FUSEDRNN_HD void start_result(int k) {
    const StageOut& of = args.out[k];
    const Out kind = code.out[k];
    if (backward) {
      const int i = code.ins + k;
      sources[i].start(is_grouped(kind) ? In::Group : In::Column, of.group, buffers + i * kRoom<T>);
      if (is_largest(kind)) return;
      for (int s = 0; s < 3; ++s) {
        sources[i].add(of.gradient[s], of.gradient_stride[s], of.gradient_is_storage[s]);
      }
      return;
    }
    Sink<T>& sink = sinks[k];
    sink.kind = kind;
    sink.columns = is_grouped(kind) ? of.group : 0;
    sink.data = of.data;
    sink.stride = of.stride;
    sink.is_storage = of.is_storage;
    sink.adds = false;
    sink.rounds = !std::is_same_v<T, A> && of.rounds && !of.is_storage;
    sink.buffer = buffers + (source_count + k) * kRoom<T>;
  }

  // Its results are 0, and its gradients, which need not be added.
  FUSEDRNN_HD void clear_row(int64_t row) {
    for (int k = 0; k < sink_count; ++k) {
      if (!sinks[k].adds) sinks[k].clear_row(row, args.width);
    }
  }

  FUSEDRNN_HD void do_row(int64_t row, uint32_t t, uint32_t b) {
    for (int i = 0; i < source_count; ++i) sources[i].start_row(row, args.width);
    for (int k = 0; k < sink_count; ++k) sinks[k].start_row(row, args.width);
    const Compute<T> compute = backward ? code.backward : code.forward;
    int64_t drawn_from = 0, drawn_to = draws ? 0 : args.width;
    for (int64_t column = 0, n; column < args.width; column += n) {
      if (column == drawn_to) {
        drawn_from = column;
        drawn_to = least(column + kBlock, args.width);
        draw_columns(drawn_from, drawn_to, t, b);
      }
      n = columns_from(column, drawn_to);
      for (int i = 0; i < source_count; ++i) from[i] = sources[i].read(column, n, drawn_from);
      for (int k = 0; k < sink_count; ++k) to[k] = sinks[k].place(column, n);
      compute(from, to, n);
      for (int k = 0; k < sink_count; ++k) sinks[k].finish(column, n);
    }
  }

  // How many columns are done next: whole vectors, or less than one.
  FUSEDRNN_HD int64_t columns_from(int64_t column, int64_t end) {
    int64_t n = least(kBlock, end - column);
    if (is_cut) {
      for (int i = 0; i < source_count; ++i) n = least(n, left_of(sources[i].group, column));
      for (int k = 0; k < sink_count; ++k) n = least(n, left_of(sinks[k].group, column));
    }
    return n < L::kWidth ? n : n / L::kWidth * L::kWidth;
  }
  FUSEDRNN_HD static int64_t left_of(Group& group, int64_t column) {
    group.move_to(column);
    return group.end - column;
  }

  FUSEDRNN_HD void draw_columns(int64_t begin, int64_t end, uint32_t t, uint32_t b) {
    for (int i = 0; i < code.ins; ++i) {
      if (!is_drawn(code.in[i])) continue;
      const int64_t first = args.in[i].offset + begin, skipped = first % 4;
      const Draw<T> draws_them = code.in[i] == In::Normal ? code.normal : code.uniform;
      draws_them(sources[i].buffer, skipped + end - begin, uint64_t(*args.seed),
                 uint32_t(args.first_step) + t, b, uint32_t(first / 4), args.in[i].stream);
      sources[i].drawn = sources[i].buffer + skipped;
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
