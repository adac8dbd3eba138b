// What forward and backward have in common: chunks, and the arguments of kernels and GEMMs.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

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

  LayerPass(const Backend& backend, const Layer<T>& layer) : backend_(backend), layer_(layer) {
    if (Space::is_compact(layer)) fill_chunks();
  }

 protected:
  using O = typename Backend::O;
  using A = Acc<T>;
  using Space = Workspace<Backend>;
  using Buffers = typename Space::Buffers;
  using Recording = typename Backend::Recording;
  static constexpr bool kTensorIsOperand = Space::kTensorIsOperand;
  static constexpr int64_t kLeastReplays = 3;

  // The steps of a chunk, and where their rows are: in the sequence, where every step has `batch`
  // rows, and in arrays of the chunk.  With compact rows, each step has in the latter only the rows
  // up to the last active one.
  struct Chunk {
    int64_t index, begin, steps;  // begin: steps done before it
    int64_t first, first_row;     // the first step in memory, and its first row in the sequence
    int64_t batch;
    bool is_reversed;
    // Of compact rows, where each step from `first` on starts, and the step behind the last; null
    // if each step has `batch` rows.
    const int64_t* starts;

    int64_t step(int64_t t) const {
      return is_reversed ? steps - 1 - t : t;
    }  // counted from `first`
    int64_t row(int64_t t) const { return row_of_step(step(t)); }
    int64_t rows() const { return row_of_step(steps); }
    int64_t rows_of(int64_t t) const { return row_of_step(step(t) + 1) - row(t); }
    int64_t place(int64_t t) const { return first_row + step(t) * batch; }  // in the sequence

   private:
    int64_t row_of_step(int64_t s) const {
      return starts == nullptr ? s * batch : starts[s] - starts[0];
    }
  };

  // Steps of a chunk whose rows lie in the same way in the sequence and in the chunk.
  struct Part {
    int64_t t;           // the step that is first in memory, in the order of work
    int64_t row, place;  // its first row in the chunk, and in the sequence
    int64_t rows;        // of all its steps
  };
  template <class F>
  static void for_parts(const Chunk& chunk, const F& f) {
    if (chunk.starts == nullptr) return f(Part{chunk.step(0), 0, chunk.first_row, chunk.rows()});
    for (int64_t t = 0; t < chunk.steps; ++t) {
      if (chunk.rows_of(t) > 0) f(Part{t, chunk.row(t), chunk.place(t), chunk.rows_of(t)});
    }
  }

  int64_t chunks() const { return begins_.empty() ? layer_.chunks() : int64_t(begins_.size()); }
  Chunk chunk_at(int64_t index) const {
    const auto begin_of = [&](int64_t i) {
      if (begins_.empty()) return std::min(i * layer_.chunk, layer_.seq_len);
      return i < chunks() ? begins_[size_t(i)] : layer_.seq_len;
    };
    Chunk c{};
    c.index = index;
    c.begin = begin_of(index);
    c.steps = begin_of(index + 1) - c.begin;
    c.is_reversed = layer_.mask.direction < 0;
    c.first = c.is_reversed ? layer_.seq_len - c.begin - c.steps : c.begin;
    c.batch = layer_.batch;
    c.first_row = c.first * c.batch;
    if (starts_.empty()) return c;
    const int64_t* const starts = starts_.data() + c.first;
    if (starts[c.steps] - starts[0] < c.steps * c.batch) c.starts = starts;
    return c;
  }
  // Compact rows: the fewer of them are active, the more steps a chunk has.  It has no more rows
  // than a chunk of layer_.chunk full steps, so there is memory for them; and at least
  // layer_.chunk steps, so that there is a place for the cell states before each chunk.
  void fill_chunks() {
    starts_.push_back(0);
    for (int64_t t = 0; t < layer_.seq_len; ++t) {
      starts_.push_back(starts_.back() + layer_.rows_of_step(t));
    }
    const int64_t most = layer_.chunk * layer_.batch;
    int64_t rows = 0;
    for (int64_t done = 0; done < layer_.seq_len; ++done) {
      const int64_t t = layer_.mask.direction < 0 ? layer_.seq_len - 1 - done : done;
      rows += layer_.rows_of_step(t);
      if (begins_.empty() || rows > most) {
        begins_.push_back(done);
        rows = layer_.rows_of_step(t);
      }
    }
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
    if constexpr (Backend::kPacks) {
      if (row_work_ > 0 && backend_.can_share_rows(layer_.batch)) {
        return backend_.share_rows(layer_.batch, row_work_ * layer_.batch * chunk.steps,
                                   [&](int64_t) { enqueue(nullptr); });
      }
    }
    const bool is_whole = chunk.steps == layer_.chunk;
    const bool repeats = chunk.begin > 0 && is_whole && layer_.rows_at == nullptr &&
                         layer_.seq_len > kLeastReplays * layer_.chunk;
    backend_.enqueue(recording, is_whole, repeats, chunk.first_row, enqueue);
  }

  // Makes weights and biases available in the types that GEMMs and stages read.  The user's own
  // memory is used where it serves, so float weights are never copied.
  void prepare(const Buffers& buffers) {
    backend_.use_scratch(buffers.scratch, buffers.needs);
    backend_.expect(layer_.seq_len, layer_.batch);
    for (int p = 0; p < layer_.cell.num_projections; ++p) {
      const Matrix<const T>& w = layer_.weight[p];
      if (Space::weight_is_ready(w)) {
        if constexpr (kTensorIsOperand) weight_[p] = w;
      } else if (!Space::is_read_as_panels(layer_, p, buffers.is_backward)) {
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
      row_work_ = Space::shared_row_work(layer_, buffers.is_backward);
      for (int s = 0; s <= layer_.last(); ++s) {
        packed_[s] = buffers.packed[s];
        pack_weight(layer_.projection(s), layer_.columns(s), buffers.is_backward,
                    buffers.packed[s]);
      }
      pack_weight(0, layer_.input_columns(), buffers.is_backward, buffers.packed_input);
    }
  }
  // Packs the first rows of a weight, in forward transposed, unless `to` is null.
  void pack_weight(int p, int64_t rows, bool is_backward, A* to) {
    if (to == nullptr) return;
    const auto pack = [&](const auto& w) { backend_.pack(is_backward ? w : w.transposed(), to); };
    const Matrix<const T>& w = layer_.weight[p];
    if (w.is_operand()) {
      pack(w.row_range(0, rows));
    } else {
      pack(weight_[p].row_range(0, rows));
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
                row_stride(layer_.input), 1};
      }
    }
    unpack(copy, layer_.input, chunk);
    if (layer_.mask.lengths != nullptr) {
      for_parts(chunk, [&](const Part& part) {
        backend_.clear(ClearStep<O>{layer_.sizes.input, part.place, layer_.mask,
                                    copy + part.row * layer_.sizes.input, false},
                       part.rows);
      });
    }
    if (layer_.dropout > 0) apply_dropout(copy, chunk);
    return Matrix<const O>::contiguous(copy, chunk.rows(), layer_.sizes.input);
  }

  // Copies the steps of a chunk to rows of the workspace, whatever their strides in memory.
  template <class To, class From>
  void unpack(To* rows, const Sequence<From>& sequence, const Chunk& chunk) {
    if (chunk.starts != nullptr) {
      return for_parts(chunk, [&](const Part& part) {
        backend_.copy(
            Matrix<To>::contiguous(rows + part.row * sequence.width, part.rows, sequence.width),
            Matrix<const From>(rows_of_part(sequence, chunk, part)));
      });
    }
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
    const int64_t width = layer_.sizes.input;
    for_parts(chunk, [&](const Part& part) {
      const DropoutStep<O> step{width,
                                part.place,
                                layer_.batch,
                                layer_.zoneout.seed,
                                layer_.dropout_stream,
                                layer_.first_step,
                                uint64_t(p * 0x1p32),
                                p < 1 ? 1 / (1 - p) : 0,
                                x + part.row * width};
      backend_.dropout(step, part.rows);
    });
  }

  // The rows of eps, or of the output's gradient, in a chunk; null if there is none.
  RowView<const T> rows_of(const Sequence<const T>& sequence, const Chunk& chunk, T* copy) {
    if (sequence.data == nullptr) return {};
    if (copy == nullptr) {
      return {sequence.at(chunk.first), row_stride(sequence), !sequence.is_packed()};
    }
    unpack(copy, sequence, chunk);
    return {copy, sequence.width, false};
  }
  // The rows of a chunk from step t on.
  template <class P>
  static RowView<P> from_step(RowView<P> rows, const Chunk& chunk, int64_t t) {
    const int64_t row = rows.in_sequence ? chunk.place(t) - chunk.first_row : chunk.row(t);
    if (rows.data != nullptr) rows.data += row * rows.stride;
    return rows;
  }
  // From row to row of a sequence that needs no copy.
  template <class P>
  int64_t row_stride(const Sequence<P>& sequence) const {
    return sequence.is_packed() ? sequence.stride_b
                                : sequence.row_stride(layer_.seq_len, layer_.batch);
  }
  // A part of a chunk with compact rows, in memory of the sequence.
  template <class P>
  static Matrix<P> rows_of_part(const Sequence<P>& sequence, const Chunk& chunk, const Part& part) {
    return {sequence.at(chunk.first + chunk.step(part.t)), part.rows, sequence.width,
            sequence.stride_b, sequence.stride_w};
  }
  Sequence<T> output_sequence() const {
    return layer_.sequence(layer_.output, output(), layer_.output_stride);
  }
  // The output from a row of the sequence on; only for an output that is not packed.
  template <class P = T>
  RowView<P> output_from(int64_t row) const {
    return {reinterpret<P>(layer_.output + row * layer_.output_stride), layer_.output_stride, true};
  }
  // The same from step t of a chunk on, also for a packed output of compact rows.
  RowView<T> output_from(const Chunk& chunk, int64_t t) const {
    if (!layer_.is_packed()) return output_from(chunk.place(t));
    return {output_sequence().at(chunk.first + chunk.step(t)), layer_.output_stride, false};
  }

  // eps: the rows of the chunk.
  Noise<T> noise(const RowView<const T>& eps, const Chunk& chunk, int64_t t) const {
    return {from_step(eps, chunk, t), layer_.seed, layer_.noise_stream, layer_.first_step};
  }

  Matrix<const O> weight(int s) const {  // a stage may read only the first rows of its weight
    return weight_[layer_.projection(s)].row_range(0, layer_.columns(s));
  }

  // Fills in the fields that forward and backward have in common.  place: of the first row, in the
  // sequence.  pre: the pre-activations from that row on, or null to combine them from input and
  // hidden gates.
  template <class Step>
  Step make_step(int s, int64_t place, const A* pre, const A* input_gates,
                 const A* hidden_gates) const {
    Step step{};
    step.width = layer_.width(s);
    step.is_last = s == layer_.last();
    step.first_row = place;
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
  int64_t row_work_ = 0;              // see Workspace::shared_row_work

 private:
  // Only with compact rows: the active rows before each step and before the end, and the steps done
  // before each chunk.
  std::vector<int64_t> starts_, begins_;
};

}  // namespace fusedrnn
