// What forward and backward have in common: chunks, and the arguments of kernels and GEMMs.
#pragma once
#include <algorithm>
#include <type_traits>

#include "../persistent/backward_arguments.h"
#include "workspace.h"

namespace fusedrnn {

// The same memory as a pointer to another type; only for code where the two types are the same.
template <class To, class From>
To* reinterpret(From* p) {
  return reinterpret_cast<To*>(p);
}

template <class Backend>
class LayerPass {
 public:
  using T = typename Backend::T;

  LayerPass(const Backend& backend, const Layer<T>& layer) : backend_(backend), layer_(layer) {}

 protected:
  using O = typename Backend::O;
  using A = Acc<T>;
  using Space = Workspace<Backend>;
  using Buffers = typename Space::Buffers;
  using Recording = typename Backend::Recording;
  static constexpr bool kTensorIsOperand = Space::kTensorIsOperand;
  static constexpr int64_t kLeastReplays = 3;

  // The steps of a chunk, and where their rows are.
  struct Chunk {
    int64_t index, begin, steps;  // begin: steps done before it
    int64_t first, first_row;     // the first step in memory, and its first row
    int64_t batch;
    bool is_reversed;

    int64_t step(int64_t t) const {
      return is_reversed ? steps - 1 - t : t;
    }  // counted from `first`
    int64_t row(int64_t t) const { return step(t) * batch; }
    int64_t rows() const { return steps * batch; }
  };

  Chunk chunk_at(int64_t index) const {
    Chunk c{};
    c.index = index;
    c.begin = index * layer_.chunk;
    c.steps = std::min(layer_.chunk, layer_.seq_len - c.begin);
    c.is_reversed = layer_.mask.direction < 0;
    c.first = c.is_reversed ? layer_.seq_len - c.begin - c.steps : c.begin;
    c.batch = layer_.batch;
    c.first_row = c.first * c.batch;
    return c;
  }
  bool is_finished(const Chunk& chunk) const { return layer_.rows_of_step(chunk.first) == 0; }

  // The features of the cell state, and of h.
  int64_t hidden() const { return layer_.sizes.hidden; }
  int64_t output() const { return layer_.sizes.output; }
  A* cell_state_before(const Chunk& chunk) const {
    return layer_.chunk_cell_states + chunk.index * layer_.batch * hidden();
  }
  template <class To, class From>
  void copy_rows(To* out, const From* from, int64_t columns) {
    backend_.copy(Matrix<To>::contiguous(out, layer_.batch, columns),
                  Matrix<const From>::contiguous(from, layer_.batch, columns));
  }

  // Zeroes initial states, or their gradients, in rows whose first step is a reset.
  template <class X>
  void apply_first_reset(X* states, int64_t columns) {
    if (layer_.mask.reset == nullptr) return;
    backend_.clear(ClearStep<X>{columns, 0, layer_.mask, states, true}, layer_.batch);
  }

  // Enqueues the steps of a chunk.  All chunks are alike except the first and a short last one; a
  // recording pays off from a few alike chunks on.
  template <class F>
  void enqueue_steps(Recording& recording, const Chunk& chunk, const F& enqueue) {
    const bool is_whole = chunk.steps == layer_.chunk;
    const bool repeats = chunk.begin > 0 && is_whole && layer_.rows_at == nullptr &&
                         layer_.seq_len > kLeastReplays * layer_.chunk;
    backend_.enqueue(recording, is_whole, repeats, chunk.first_row, enqueue);
  }

  // Makes weights and biases available in the types that GEMMs and stages read.  The user's own
  // memory is used where it serves, so float weights are never copied.
  void prepare(const Buffers& buffers, bool is_backward) {
    backend_.use_scratch(buffers.scratch, buffers.needs);
    backend_.expect(layer_.seq_len, layer_.batch);
    for (int p = 0; p < layer_.cell.num_projections; ++p) {
      const Matrix<const T>& w = layer_.weight[p];
      if (Space::weight_is_ready(w)) {
        if constexpr (kTensorIsOperand) weight_[p] = w;
      } else {
        const auto copy = Matrix<O>::contiguous(buffers.weight[p], w.rows, w.columns);
        backend_.copy(copy, w);
        weight_[p] = copy;
      }
      const Matrix<const T>& b = layer_.bias[p];
      if (b.data == nullptr) {
        bias_[p] = nullptr;
      } else if (Space::bias_is_ready(b)) {
        bias_[p] = reinterpret_cast<const A*>(b.data);
      } else {
        backend_.copy(Matrix<A>::contiguous(buffers.bias[p], 1, b.columns), b);
        bias_[p] = buffers.bias[p];
      }
    }
    if constexpr (Backend::kPacks) {
      for (int s = 0; s <= layer_.last(); ++s) {
        packed_[s] = buffers.packed[s];
        if (packed_[s] == nullptr) continue;
        backend_.pack(is_backward ? weight(s) : weight(s).transposed(), buffers.packed[s]);
      }
    }
  }

  // The product of stage s in a step: out (+)= a w, where w is weight(s), in forward transposed.
  void multiply_step(int s, const Matrix<A>& out, const Matrix<const O>& a,
                     const Matrix<const O>& w, bool accumulate) {
    if constexpr (Backend::kPacks) {
      if (packed_[s] != nullptr) return backend_.gemm_packed(out, a, packed_[s], accumulate);
    }
    backend_.gemm(out, a, w, accumulate);
  }

  // copy: where to copy the input of a chunk; null if the user's own memory serves.
  Matrix<const O> input_rows(const Chunk& chunk, O* copy) {
    if constexpr (kTensorIsOperand) {
      if (copy == nullptr) {
        return {layer_.input.at(chunk.first), chunk.rows(), layer_.sizes.input,
                layer_.input.row_stride(layer_.seq_len, layer_.batch), 1};
      }
    }
    unpack(copy, layer_.input, chunk);
    if (layer_.mask.lengths != nullptr) {
      backend_.clear(ClearStep<O>{layer_.sizes.input, chunk.first_row, layer_.mask, copy, false},
                     chunk.rows());
    }
    if (layer_.dropout > 0) apply_dropout(copy, chunk);
    return Matrix<const O>::contiguous(copy, chunk.rows(), layer_.sizes.input);
  }

  // Copies the steps of a chunk to rows of the workspace, whatever their strides in memory.
  template <class To, class From>
  void unpack(To* rows, const Sequence<From>& sequence, const Chunk& chunk) {
    backend_.copy_steps(Sequence<To>::contiguous(rows, layer_.batch, sequence.width), 0,
                        Sequence<const std::remove_const_t<From>>(sequence), chunk.first,
                        chunk.steps, layer_.batch);
  }
  void pack(const Sequence<T>& sequence, const T* rows, const Chunk& chunk) {
    backend_.copy_steps(sequence, chunk.first,
                        Sequence<const T>::contiguous(rows, layer_.batch, sequence.width), 0,
                        chunk.steps, layer_.batch);
  }

  // Applies dropout to the input of a chunk, or to the input's gradient.
  void apply_dropout(O* x, const Chunk& chunk) {
    const double p = layer_.dropout;
    const DropoutStep<O> step{layer_.sizes.input,   chunk.first_row,         layer_.batch,
                              layer_.zoneout.seed,  layer_.dropout_stream,   layer_.first_step,
                              uint64_t(p * 0x1p32), p < 1 ? 1 / (1 - p) : 0, x};
    backend_.dropout(step, chunk.rows());
  }

  // The rows of eps, or of the output's gradient, in a chunk; null if there is none.
  RowView<const T> rows_of(const Sequence<const T>& sequence, const Chunk& chunk, T* copy) {
    if (sequence.data == nullptr) return {};
    if (copy == nullptr) {
      return {sequence.at(chunk.first), sequence.row_stride(layer_.seq_len, layer_.batch), true};
    }
    unpack(copy, sequence, chunk);
    return {copy, sequence.width, false};
  }
  template <class P>
  static RowView<P> from_row(RowView<P> rows, int64_t row) {
    if (rows.data != nullptr) rows.data += row * rows.stride;
    return rows;
  }
  Sequence<T> output_sequence() const {
    return layer_.sequence(layer_.output, output(), layer_.output_stride);
  }
  // The output from a row on; only for an output that is not packed.
  template <class P = T>
  RowView<P> output_from(int64_t row) const {
    return {reinterpret<P>(layer_.output + row * layer_.output_stride), layer_.output_stride, true};
  }

  // eps: the rows of the chunk.
  Noise<T> noise(const RowView<const T>& eps, int64_t row) const {
    return {from_row(eps, row), layer_.seed, layer_.noise_stream, layer_.first_step};
  }

  Matrix<const O> weight(int s) const {  // a stage may read only the first rows of its weight
    return weight_[layer_.projection(s)].row_range(0, layer_.columns(s));
  }

  // Fills in the fields that forward and backward have in common.  `row` counts from the start of
  // the chunk.  pre: the pre-activations from that row on, or null to combine them from input and
  // hidden gates.
  template <class Step>
  Step make_step(int s, const Chunk& chunk, int64_t row, const A* pre, const A* input_gates,
                 const A* hidden_gates) const {
    Step step{};
    step.width = layer_.width(s);
    step.is_last = s == layer_.last();
    step.first_row = chunk.first_row + row;
    step.mask = layer_.mask;
    step.zoneout = layer_.zoneout;
    step.pre = pre;
    step.input_gates = input_gates;
    step.input_bias = bias_[0];
    step.hidden_gates = hidden_gates;
    step.hidden_bias = bias_[layer_.projection(s)];
    return step;
  }

  Backend backend_;
  Layer<T> layer_;
  Matrix<const O> weight_[kMaxProjections];
  const A* bias_[kMaxProjections];
  const A* packed_[kMaxStages] = {};  // null if a weight is not packed
};

}  // namespace fusedrnn
