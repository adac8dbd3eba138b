// The arguments of a backend's kernels for single steps: one stage of a cell for a block of rows.
//
// These structs are the whole interface between the driver and these kernels (the persistent ones
// take those of persistent/arguments.h): plain pointers and sizes. The rows are the batch of one
// step, or all (t, b) of a chunk with t slowest; plane k of an array with n blocks starts at column
// k * width of each row.  unit.h has what a kernel does with them.
//
// T: storage type of the user's tensors.  O: type of GEMM operands (T on a GPU, Acc<T> on the CPU).
// A = Acc<T>.
//
// A GPU may record the steps of a chunk once and replay them for later chunks.  `replay_offset`
// then points to the number of rows between the two chunks: arrays of the whole sequence are
// accessed that many rows further on, arrays of a chunk at the same place.
#pragma once
#include <cstdint>
#include <type_traits>

#include "../base/hd.h"
#include "../base/matrix.h"
#include "../base/philox.h"
#include "../base/scalar.h"
#include "../cell/stages.h"

namespace fusedrnn {

// The step and batch entry of a row, counted from the start of the sequence.  32 bits are enough,
// since the operators take fewer than 2^32 rows.
struct Place {
  uint32_t t, b;

  // From the row's number.  32 bits, because a 64-bit division is a function call on a GPU.
  FUSEDRNN_HD static Place of_row(int64_t row, int64_t batch) {
    const uint32_t t = uint32_t(row) / uint32_t(batch);
    return {t, uint32_t(row) - t * uint32_t(batch)};
  }
  // The same entry `steps` steps later; a t before the first step wraps to a number beyond any
  // step.
  FUSEDRNN_HD Place after(int steps) const { return {t + uint32_t(steps), b}; }
};

// Rows at one stride, or null.  in_sequence: whether they are in an array of the whole sequence,
// not of a chunk.
template <class P>
struct RowView {
  P* data;
  int64_t stride;
  bool in_sequence;

  FUSEDRNN_HD P* at(int64_t row, int64_t replay_offset = 0) const {
    return data + (in_sequence ? row + replay_offset : row) * stride;
  }
};

// Which rows of the batch take a step, and which start anew.  A row is finished from its length on:
// it keeps its state, and the rest of its data is ignored.  Where `reset` is set, the state is
// zeroed before the step.
struct Mask {
  const int64_t* lengths;  // [batch], or null if no row finishes early
  const bool* reset;       // [seq_len, batch], or null
  int64_t seq_len, batch;
  int direction;  // 1, or -1 if time runs backwards

  FUSEDRNN_HD bool any() const { return lengths != nullptr || reset != nullptr; }
  FUSEDRNN_HD bool is_active(Place at) const { return lengths == nullptr || at.t < lengths[at.b]; }
  FUSEDRNN_HD bool is_reset(Place at) const {
    return reset != nullptr && reset[at.t * uint32_t(batch) + at.b];
  }
  // Whether the state of an active row is zeroed before the step that it takes next.
  FUSEDRNN_HD bool is_reset_next(Place at) const {
    const Place next = at.after(direction);
    return reset != nullptr && next.t < seq_len && is_reset(next) && is_active(next);
  }
  // Whether the row takes its first step, from the initial state.
  FUSEDRNN_HD bool is_first(Place at) const {
    const Place before = at.after(-direction);
    return before.t >= seq_len || (direction < 0 && !is_active(before));
  }
  // Whether row b of the batch takes a step, and its initial state is zeroed before the first one.
  FUSEDRNN_HD bool is_reset_at_start(uint32_t b) const {
    const int64_t steps = lengths == nullptr ? seq_len : lengths[b];
    return reset != nullptr && steps > 0 && is_reset({direction > 0 ? 0 : uint32_t(steps - 1), b});
  }
};

// The source of a row's eps: the user's tensor, or else Philox with the row's place as its counter.
template <class T>
struct Noise {
  RowView<const T> eps;  // null: drawn from the seed
  const int64_t* seed;   // one element, or null if eps is given
  int64_t noise_stream;
  int64_t first_step;  // where this sequence starts, if it is a part of a longer one

  // The noise of the four units from 4 * block on.
  template <class A>
  FUSEDRNN_HD void draw(Place at, uint32_t block, A (&normal)[4]) const {
    normal4(uint64_t(*seed), uint32_t(first_step) + at.t, at.b, block, uint32_t(noise_stream),
            normal);
  }
};

enum class Distribution { Normal, Uniform };

// Calls f with the object that makes numbers of a distribution, for a tensor of T, from words.
template <class T, class F>
void dispatch_distribution(Distribution distribution, const F& f) {
  switch (distribution) {
    case Distribution::Normal: return f(Normal{});
    case Distribution::Uniform: return f(Uniform<T>{});
  }
}

// Random numbers by themselves: those of Noise, or uniform ones from the same words.
template <class T>
struct DrawStep {
  int64_t width, batch;
  const int64_t* seed;
  int64_t stream, first_step;  // as in Noise
  Distribution distribution;
  T* out;  // [rows, width]

  FUSEDRNN_HD uint32_t time(Place at) const { return uint32_t(first_step) + at.t; }
};

// Bits of the Philox counter's last word that keep these draws apart from a layer's noise.
constexpr uint32_t kDropoutStream = 4u << 29, kZoneoutStream = 2u << 29,
                   kCellStateStream = 3u << 29;

// Zoneout (Krueger et al. 2017): with one probability a unit keeps its h, and with another its cell
// state, instead of taking the new value.  Without a seed the unit takes the expectation.
template <class A>
struct Zoneout {
  // A probability in the form that kernels need, prepared by the host, since many GPUs are slow in
  // float64.
  struct Chance {
    A probability;
    A rest;              // 1 - probability, computed in float64, for the expectation; 0 with a seed
    uint64_t threshold;  // a unit keeps its value if its 32 random bits are below this

    FUSEDRNN_HD bool is_possible() const { return probability > 0; }
  };
  const int64_t* seed;
  int64_t noise_stream, first_step;  // as in Noise
  Chance h, cell_state;

  static Zoneout of(const int64_t* seed, int64_t noise_stream, int64_t first_step, double h,
                    double cell_state) {
    const auto chance = [&](double probability) {
      return Chance{A(probability), seed == nullptr ? A(1 - probability) : A(0),
                    uint64_t(probability * 0x1p32)};
    };
    return {seed, noise_stream, first_step, chance(h), chance(cell_state)};
  }

  // How much each of the four units from 4 * block on keeps: 0 or 1 with a seed, else the
  // probability.
  FUSEDRNN_HD void kept(const Chance& chance, uint32_t stream, Place at, uint32_t block,
                        A (&kept)[4]) const {
    if (seed == nullptr || !chance.is_possible()) {
      for (int j = 0; j < 4; ++j) kept[j] = chance.probability;
      return;
    }
    uint32_t words[4] = {uint32_t(first_step) + at.t, at.b, block, uint32_t(noise_stream) | stream};
    philox4x32(words, uint32_t(uint64_t(*seed)), uint32_t(uint64_t(*seed) >> 32));
    for (int j = 0; j < 4; ++j) kept[j] = words[j] < chance.threshold ? A(1) : A(0);
  }
};

// Pre-activations come from `pre` [rows, kPre * width], or if that is null from input_gates and
// hidden_gates, [rows, k * width] each, with biases [k * width] that may be null.  With kAddsUp,
// the first kShared blocks of hidden_gates already are sums, and input_gates has only the other
// blocks.
template <class T, class O>
struct ForwardStep {
  using A = Acc<T>;
  static constexpr bool kAddsUp = false;  // except in stages that share all blocks
  static constexpr bool kReadsFactors = false;
  int64_t width, first_row;
  const int64_t* replay_offset;  // null means 0
  const A *pre, *input_gates, *input_bias, *hidden_gates, *hidden_bias;
  RowView<const A> carry;  // h_{t-1} unrounded, or the cell state
  bool is_last;            // stage of the cell: the result is h
  RowView<const O> h;      // h_{t-1}, for a last stage that does not carry it
  Noise<T> noise;
  Mask mask;
  Zoneout<A> zoneout;
  // The result, [rows, width]; each may be null.  operand is what the next projection reads: the
  // result rounded to T even if O is wider, so that backward can recompute it from the output.
  O* operand;
  RowView<T> output;
  A* carry_out;
  // What backward needs; each may be null.  saved_gates is in the sequence, [rows, kPre * width];
  // factors, [rows, factor_blocks * width], may be the memory of hidden_gates.
  A *saved_gates, *factors;
  int factor_blocks;  // how many are wanted, from the first on
};

template <class T, class O>
struct BackwardStep {
  using A = Acc<T>;
  static constexpr bool kAddsUp = true, kReadsFactors = true;
  int64_t width, first_row;
  const int64_t* replay_offset;  // null means 0
  // pre: saved pre-activations, in the sequence; in a stage with factors, the factors of forward
  const A *pre, *input_gates, *input_bias, *hidden_gates, *hidden_bias;
  int factor_blocks;
  RowView<const O> carry;  // h_{t-1} as rounded in the output
  bool is_last;            // stage of the cell: dout is the gradient of h
  const A* cell_state;     // [rows, width], before the step
  Mask mask;
  Zoneout<A> zoneout;
  A* dout;                          // [rows, width], the gradient from the next step or stage
  RowView<const T> grad_output;     // added to dout
  O *dinput_gates, *dhidden_gates;  // may be the memory of input_gates, hidden_gates or
                                    // factors, of the same or of later steps
  A* dcarry;  // [rows, width]: dout itself; with a cell state, its gradient, in and out
  T* deps;    // [rows, width] in the sequence, or null
};

// Inverted dropout of a layer's input (Srivastava et al. 2014), and of its gradient: an element is
// zero with some probability, else scaled up.  Which elements are zero is a function of the seed
// and of the element's place, so that nothing is stored.
template <class O>
struct DropoutStep {
  int64_t width, first_row, batch;
  const int64_t* seed;
  int64_t noise_stream, first_step;  // as in Noise
  uint64_t threshold;                // an element is zero if its 32 random bits are below this
  double scale;
  O* x;  // [rows, width]
};

// Zeroes x in finished rows: the user's data there may be NaN, and must not get into sums over all
// rows.  Or x has the initial states of the batch, or their gradients, and is zeroed in rows whose
// first step is a reset.
template <class O>
struct ClearStep {
  int64_t width, first_row;
  Mask mask;
  O* x;  // [rows, width]
  bool is_initial_state;
};

// Sums over the rows of a chunk, each written or added to its destination.  One call sums all
// matrices, since on a GPU a launch costs more than the sum.
template <class O>
struct ColumnSums {
  static constexpr int kMost = 4;
  const O* data[kMost];
  int64_t columns[kMost], row_stride[kMost];
  Acc<O>* sum[kMost];
  int count;
  int64_t rows;  // of each matrix
  bool accumulate;

  void add(const Matrix<const O>& m, Acc<O>* to) {
    data[count] = m.data;
    columns[count] = m.columns;
    row_stride[count] = m.row_stride;
    sum[count++] = to;
    rows = m.rows;
  }
  int64_t all_columns() const {
    int64_t all = 0;
    for (int i = 0; i < count; ++i) all += columns[i];
    return all;
  }
};

// h_{t-1} of the rows of a chunk as each step read it, for GEMMs and for backward().
template <class T, class O>
struct GatherStep {
  int64_t width, first_row;
  RowView<const T> before;  // h_{t-1} in the output, for rows that have one
  const T* hx;              // [batch, width]
  Mask mask;
  O* h;  // [rows, width]
};

}  // namespace fusedrnn
