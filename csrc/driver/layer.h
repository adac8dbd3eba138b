// The driver's data: one layer with its tensors, its gradients, and the arrays of pre-activations.
// Pointers and sizes only; nothing here allocates or computes.
#pragma once
#include "../base/arena.h"
#include "../base/matrix.h"
#include "../cell/layout.h"
#include "../persistent/arguments.h"
#include "../step/step.h"

namespace fusedrnn {

// One layer and direction of a module, as forward and backward both see it.
template <class T>
struct Layer {
  Cell cell;
  Sizes sizes;
  int64_t seq_len, batch, chunk;  // chunk: steps of a chunk
  Sequence<const T> input, eps;   // eps.data may be null
  const T *hx, *cx;               // (batch, output), (batch, hidden); cx: null without a cell state
  T* output;                      // rows lie like the input's
  int64_t output_stride;          // from row to row; backward only reads the output
  Acc<T>* chunk_cell_states;      // (chunks, batch, hidden), before each chunk; or null
  const int64_t* seed;
  int64_t noise_stream;     // the Philox counter's last word
  int64_t first_step;       // where this sequence starts, if it is a part of a longer one
  double dropout;           // probability, of the input
  int64_t dropout_stream;   // noise_stream of the first direction, since both read the same input
  Zoneout<Acc<T>> zoneout;  // its seed is also used for dropout
  Matrix<const T> weight[kMaxProjections];  // (blocks * to, from)
  Matrix<const T> bias[kMaxProjections];    // (1, blocks * to), data may be null
  Mask mask;
  const int64_t* rows_at;  // [seq_len]: rows from this one on are finished in each step; or null
  // Whether one kernel runs all steps of a chunk, and its plan.
  bool is_persistent;
  cuda::PersistentPlan persistent;
  bool overlaps;  // whether a second stream works on one chunk during the steps of another

  int64_t rows() const { return seq_len * batch; }
  // The number of chunks that are worked on at the same time.
  int64_t buffers() const { return overlaps ? 2 : 1; }
  int64_t chunks() const { return (seq_len + chunk - 1) / chunk; }
  // The number of rows of the batch that take step t, counted from the first.
  int64_t rows_of_step(int64_t t) const { return rows_at == nullptr ? batch : rows_at[t]; }
  Matrix<T> output_rows(int64_t first, int64_t count) const {
    return {output + first * output_stride, count, sizes.output, output_stride, 1};
  }
  // Whether rows of input, output and their gradients lie as in a PackedSequence.
  bool is_packed() const { return input.is_packed(); }
  // A tensor whose rows lie like the input's.
  template <class P>
  Sequence<P> sequence(P* data, int64_t width, int64_t row_stride) const {
    return {data, width, batch * row_stride, row_stride, 1, input.starts};
  }
  bool has_cell_state() const { return fusedrnn::has_cell_state(cell); }
  int last() const { return cell.num_stages - 1; }
  int recurrent_stage() const { return fusedrnn::recurrent_stage(cell); }
  // Whether the GEMM of stage s, in each step, accumulates onto the input gates.
  bool adds_up(int s) const {
    return s == recurrent_stage() && input_columns() == shared_columns();
  }
  int projection(int s) const { return cell.stages[s].projection; }
  int64_t width(int s) const { return sizes[cell.projections[projection(s)].to]; }
  int64_t input_columns() const {
    return traits(cell.stages[recurrent_stage()].kind).input_blocks * width(recurrent_stage());
  }
  int64_t shared_columns() const {  // the first columns of the input gates, see stages.h
    return traits(cell.stages[recurrent_stage()].kind).shared_blocks * width(recurrent_stage());
  }
  int64_t columns_alone() const { return input_columns() - shared_columns(); }
  int64_t columns(int s) const { return traits(cell.stages[s].kind).hidden_blocks * width(s); }
  int64_t pre_columns(int s) const { return traits(cell.stages[s].kind).pre_blocks * width(s); }
};

template <class T>
struct Gradients {
  Sequence<const T> output;  // data may be null
  const T *h_n, *c_n;        // (batch, output), (batch, hidden), or null
  // Each is wanted if it is not null.
  T *input, *hx, *cx, *eps;  // contiguous; rows of `input` lie like the input's
  // The input's gradient is a sum over directions: whether a part of it has been written already,
  // and whether this call completes it.
  bool adds_to_input, completes_input;
  // Whether the weights' gradients have been written already, for another part of the sequence.
  bool adds_to_weights;
  Acc<T>*weight[kMaxProjections], *bias[kMaxProjections];
};

// GEMM results of a chunk, or their gradients.  Columns that input and hidden gates share are in
// hidden_gates of the recurrent stage: their sum, or the gradient of both.
template <class A>
struct GatePlanes {
  A *input_gates, *hidden_gates[kMaxStages];  // input_gates: columns_alone() of them

  // For the stages up to `last`.
  template <class T>
  static GatePlanes carve(const Layer<T>& layer, int last, int64_t rows, Arena& arena) {
    GatePlanes p{};
    p.input_gates = arena.take<A>(rows * layer.columns_alone());
    for (int s = 0; s <= last; ++s) p.hidden_gates[s] = arena.take<A>(rows * layer.columns(s));
    return p;
  }
  template <class T>
  GatePlanes from_row(const Layer<T>& layer, int64_t row) const {
    GatePlanes p{};
    p.input_gates = input_gates + row * layer.columns_alone();
    for (int s = 0; s <= layer.last(); ++s) {
      if (hidden_gates[s] != nullptr) p.hidden_gates[s] = hidden_gates[s] + row * layer.columns(s);
    }
    return p;
  }
};

// The saved pre-activations of the whole sequence, seq_len * batch * saved_columns() numbers at
// `base`; all null if that is null.
template <class A>
class SavedGates {
 public:
  template <class T>
  SavedGates(const Layer<T>& layer, A* base) {
    for (int s = 0; s <= layer.recurrent_stage(); ++s) {
      columns_[s] = layer.pre_columns(s);
      stage_[s] = base;
      if (base != nullptr) base += layer.rows() * columns_[s];
    }
  }
  A* at(int s, int64_t row) const {
    return stage_[s] == nullptr ? nullptr : stage_[s] + row * columns_[s];
  }

 private:
  A* stage_[kMaxStages] = {};
  int64_t columns_[kMaxStages] = {};
};

}  // namespace fusedrnn
