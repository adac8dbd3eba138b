// Any cell through time: chunks, GEMMs, stages, weight gradients.  No cell is named here and no
// dtype is fixed; a backend supplies GEMMs, copies and the loops over rows.
//
// Forward keeps nothing but the output.  Every h_{t-1} is in it, so backward needs no replay: for a
// chunk of steps, GEMMs over all its rows at once and one pass of each stage rebuild the
// intermediates, and only the adjoint chain dh_t -> dh_{t-1} runs step by step.  The workspace is
// that of one chunk, whatever the length of the sequence.
//
// Backend: types T (tensors), O (GEMM operands), A = Acc<T>, and
//   gemm(Matrix<A> out, Matrix<const O> a, Matrix<const O> b, accumulate)   out (+)= a b
//   copy(Matrix<To> out, Matrix<const From> from)                           converts
//   forward / backward(StageKind, step, rows), column_sum(Matrix<const O>, A* sum)   sum += ...
//   enqueue(Recording, is_whole, repeats, first_row, steps)   calls steps(shift), or replays what
//       an earlier call with `repeats` did, further on in the sequence by the difference of
//       first_row; is_whole: no step of a chunk is missing
//   kReplays: whether enqueue may do so.  kGemmRounds: whether gemm takes a Matrix<T> out as well.
//   scratch_bytes(rows, columns), use_scratch(pointer, rows, columns): memory of its own in the
//       workspace; enough for column sums of such a matrix
#pragma once
#include <algorithm>
#include <type_traits>

#include "workspace.h"

namespace fusedrnn {

template <class Backend>
class Driver {
 public:
  using T = typename Backend::T;
  using O = typename Backend::O;
  using A = Acc<T>;

  Driver(const Backend& backend, const Layer<T>& layer) : backend_(backend), layer_(layer) {}

  int64_t forward_workspace_bytes() const {
    Arena arena;
    ForwardBuffers(layer_, arena);
    return arena.size_bytes();
  }
  int64_t backward_workspace_bytes(const Gradients<T>& gradients) const {
    Arena arena;
    BackwardBuffers(layer_, gradients, arena);
    return arena.size_bytes();
  }

  // Multiply-adds of the recurrent GEMMs of a step.
  int64_t step_work() const {
    int64_t work = 0;
    for (int s = 0; s <= layer_.last(); ++s) {
      work += layer_.columns(s) * layer_.weight[layer_.projection(s)].columns;
    }
    return work * layer_.batch;
  }

  // keep: seq_len * batch * kept_columns() numbers for the pre-activations, or null.
  void forward(T* output, T* h_n, A* keep, void* workspace) {
    Arena arena(workspace);
    ForwardBuffers buffers(layer_, arena);
    prepare(buffers);
    const auto hx = Matrix<const T>::contiguous(layer_.hx, layer_.batch, hidden());
    if (!kCarryIsOutput) {
      backend_.copy(Matrix<A>::contiguous(buffers.carry, layer_.batch, hidden()), hx);
    }
    if (!kStateIsOperand) {
      backend_.copy(Matrix<O>::contiguous(buffers.h, layer_.batch, hidden()), hx);
    }
    const Kept<A> kept(layer_, keep);
    Recording recording;
    for (int64_t begin = 0; begin < layer_.seq_len; begin += layer_.chunk) {
      forward_chunk(begin, steps_from(begin), output, kept, buffers, recording);
    }
    backend_.copy(Matrix<T>::contiguous(h_n, layer_.batch, hidden()),
                  Matrix<const T>::contiguous(output + (layer_.rows() - layer_.batch) * hidden(),
                                              layer_.batch, hidden()));
  }

  // keep: what forward left there, or null to compute it again.
  void backward(const Gradients<T>& gradients, const A* keep, void* workspace) {
    Arena arena(workspace);
    BackwardBuffers buffers(layer_, gradients, arena);
    prepare(buffers);
    const auto dh = Matrix<A>::contiguous(buffers.dh, layer_.batch, hidden());
    if (gradients.h_n != nullptr) {
      backend_.copy(dh, Matrix<const T>::contiguous(gradients.h_n, layer_.batch, hidden()));
    } else {
      backend_.zero(dh);
    }
    const Kept<const A> kept(layer_, keep);
    Recording recording;
    const int64_t chunks = (layer_.seq_len + layer_.chunk - 1) / layer_.chunk;
    for (int64_t begin = (chunks - 1) * layer_.chunk; begin >= 0; begin -= layer_.chunk) {
      const int64_t steps = steps_from(begin);
      rebuild(begin, steps, kept, buffers);
      adjoint_chain(begin, steps, gradients, kept, buffers, recording);
      leaf_gradients(begin, steps, gradients, buffers);
    }
    if (gradients.hx != nullptr) {
      backend_.copy(Matrix<T>::contiguous(gradients.hx, layer_.batch, hidden()), dh);
    }
  }

 private:
  using Space = Workspace<Backend>;
  using Buffers = typename Space::Buffers;
  using ForwardBuffers = typename Space::Forward;
  using BackwardBuffers = typename Space::Backward;
  using Recording = typename Backend::Recording;
  static constexpr bool kCarryIsOutput = Space::kCarryIsOutput;
  static constexpr bool kStateIsOperand = Space::kStateIsOperand;
  static constexpr bool kTensorIsOperand = Space::kTensorIsOperand;
  static constexpr int64_t kLeastReplays = 3;

  int64_t hidden() const { return layer_.sizes.hidden; }
  int64_t steps_from(int64_t begin) const { return std::min(layer_.chunk, layer_.seq_len - begin); }

  // The steps of a chunk.  All chunks but the first and a short last one are alike; to record them
  // pays for a few of these.
  template <class F>
  void enqueue_steps(Recording& recording, int64_t begin, int64_t steps, const F& enqueue) {
    const bool is_whole = steps == layer_.chunk;
    const bool repeats = begin > 0 && is_whole && layer_.seq_len > kLeastReplays * layer_.chunk;
    backend_.enqueue(recording, is_whole, repeats, begin * layer_.batch, enqueue);
  }

  template <bool kFirst, class First, class Second>
  static auto select(First first, Second second) {
    if constexpr (kFirst) {
      return first;
    } else {
      return second;
    }
  }

  // Weights and biases in the types that GEMMs and stages read: the user's own memory where it
  // serves, so that float weights are never copied.
  void prepare(const Buffers& buffers) {
    backend_.use_scratch(buffers.scratch, layer_.chunk * layer_.batch, buffers.summed_columns);
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
  }

  Matrix<const O> input_rows(int64_t begin, int64_t steps, const Buffers& buffers) {
    const int64_t rows = steps * layer_.batch;
    if constexpr (kTensorIsOperand) {
      if (buffers.x == nullptr) {
        return {layer_.input.at(begin), rows, layer_.sizes.input,
                layer_.input.row_stride(layer_.seq_len, layer_.batch), 1};
      }
    }
    backend_.copy_steps(buffers.x, layer_.input, begin, steps, layer_.batch);
    return Matrix<const O>::contiguous(buffers.x, rows, layer_.sizes.input);
  }

  // eps, or the output's gradient, of a chunk; null if there is none.
  Rows<const T> rows_of(const Sequence<const T>& sequence, int64_t begin, int64_t steps, T* copy) {
    if (sequence.data == nullptr) return {};
    if (copy == nullptr) return {sequence.at(begin), true};
    backend_.copy_steps(copy, sequence, begin, steps, layer_.batch);
    return {copy, false};
  }
  static Rows<const T> from_row(Rows<const T> rows, int64_t row, int64_t width) {
    if (rows.data != nullptr) rows.data += row * width;
    return rows;
  }

  // eps: of the chunk
  Noise<T> noise(const Rows<const T>& eps, int64_t row) const {
    return {from_row(eps, row, layer_.sizes.latent), layer_.seed, layer_.batch, layer_.layer};
  }

  Matrix<const O> weight(int s) const {  // a stage may read only the first rows of its projection
    return weight_[layer_.projection(s)].row_range(0, layer_.columns(s));
  }

  // What forward and backward fill in alike.  `row` counts from the start of the chunk; pre: the
  // pre-activations from that row on, or null to combine them from side and projection.
  template <class Step>
  Step make_step(int s, int64_t begin, int64_t row, const A* pre, const A* side,
                 const A* projection) const {
    Step step{};
    step.width = layer_.width(s);
    step.first_row = begin * layer_.batch + row;
    step.pre = pre;
    step.side = side;
    step.side_bias = bias_[0];
    step.projection = projection;
    step.projection_bias = bias_[layer_.projection(s)];
    return step;
  }

  void forward_chunk(int64_t begin, int64_t steps, T* output, const Kept<A>& kept,
                     ForwardBuffers& buffers, Recording& recording) {
    const Rows<const T> eps = rows_of(layer_.eps, begin, steps, buffers.eps);
    backend_.gemm(Matrix<A>::contiguous(buffers.side, steps * layer_.batch, layer_.side_columns()),
                  input_rows(begin, steps, buffers), weight_[0].transposed(), false);
    enqueue_steps(recording, begin, steps, [&](const int64_t* shift) {
      forward_steps(begin, steps, eps, shift, output, kept, buffers);
    });
  }

  void forward_steps(int64_t begin, int64_t steps, const Rows<const T>& eps, const int64_t* shift,
                     T* output, const Kept<A>& kept, ForwardBuffers& buffers) {
    const int64_t batch = layer_.batch, side_columns = layer_.side_columns();
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t row = t * batch;
      T* h = output + (begin * batch + row) * hidden();
      const T* h_before = begin + t == 0 ? layer_.hx : h - batch * hidden();
      auto operand = Matrix<const O>::contiguous(select<kStateIsOperand>(h_before, buffers.h),
                                                 batch, hidden());
      for (int s = 0; s <= layer_.last(); ++s) {
        const auto projection =
            Matrix<A>::contiguous(buffers.projection[s], batch, layer_.columns(s));
        backend_.gemm(projection, operand, weight(s).transposed(), false);
        auto step = make_step<ForwardStep<T, O>>(
            s, begin, row, nullptr, buffers.side + row * side_columns, projection.data);
        step.shift = shift;
        step.noise = noise(eps, row);
        step.keep = kept.at(s, step.first_row);
        if (s < layer_.last()) {
          step.operand = buffers.operand[s];
          operand = Matrix<const O>::contiguous(step.operand, batch, layer_.width(s));
        } else {
          step.output = h;
          step.carry = select<kCarryIsOutput>(h_before, buffers.carry);
          if (!kCarryIsOutput) step.carry_out = buffers.carry;
          if (!kStateIsOperand) step.operand = buffers.h;
        }
        backend_.forward(layer_.cell.stages[s].kind, step, batch);
      }
    }
  }

  // h_{t-1} of a chunk's rows, in up to two pieces because that of the first step is hx.
  // f(rows, index of the first one, their count)
  template <class F>
  void for_h_before(int64_t begin, int64_t steps, const F& f) const {
    const int64_t batch = layer_.batch, from_hx = begin == 0 ? batch : 0;
    if (from_hx > 0) f(layer_.hx, int64_t(0), from_hx);
    if (steps * batch > from_hx) {
      f(layer_.output + (begin * batch - batch + from_hx) * hidden(), from_hx,
        steps * batch - from_hx);
    }
  }

  // What stage s projects, as GEMM operands: h_{t-1}, or the result of the stage before.
  // f(piece, index of its first row)
  template <class F>
  void for_source(int s, int64_t begin, int64_t steps, const BackwardBuffers& buffers,
                  const F& f) const {
    const int64_t rows = steps * layer_.batch;
    if (s > 0) {
      const int64_t width = layer_.width(s - 1);
      f(Matrix<const O>::contiguous(buffers.operand[s - 1], rows, width), int64_t(0));
    } else if constexpr (kTensorIsOperand) {
      for_h_before(begin, steps, [&](const T* h, int64_t first, int64_t count) {
        f(Matrix<const O>::contiguous(h, count, hidden()), first);
      });
    } else {
      f(Matrix<const O>::contiguous(buffers.h, rows, hidden()), int64_t(0));
    }
  }

  // The intermediates of a chunk, all steps at once: GEMM results unless pre-activations are kept,
  // and of each stage but the last its result and its factors.
  void rebuild(int64_t begin, int64_t steps, const Kept<const A>& kept, BackwardBuffers& buffers) {
    const int64_t rows = steps * layer_.batch;
    const Rows<const T> eps = rows_of(layer_.eps, begin, steps, buffers.eps);
    if constexpr (!kTensorIsOperand) {
      for_h_before(begin, steps, [&](const T* h, int64_t first, int64_t count) {
        backend_.copy(Matrix<O>::contiguous(buffers.h + first * hidden(), count, hidden()),
                      Matrix<const T>::contiguous(h, count, hidden()));
      });
    }
    const Planes<A>& planes = buffers.planes;
    buffers.input = input_rows(begin, steps, buffers);
    for (int s = 0; s <= layer_.last(); ++s) {
      const A* pre = kept.at(s, begin * layer_.batch);
      if (pre == nullptr) {
        const auto projection =
            Matrix<A>::contiguous(planes.projection[s], rows, layer_.columns(s));
        for_source(s, begin, steps, buffers, [&](Matrix<const O> source, int64_t first) {
          backend_.gemm(projection.row_range(first, source.rows), source, weight(s).transposed(),
                        false);
        });
      }
      if (s < layer_.last()) {
        auto step = make_step<ForwardStep<T, O>>(s, begin, 0, pre, nullptr, planes.projection[s]);
        step.noise = noise(eps, 0);
        step.operand = buffers.operand[s];
        step.factors = planes.projection[s];
        backend_.forward(layer_.cell.stages[s].kind, step, rows);
      } else if (pre == nullptr) {
        backend_.gemm(Matrix<A>::contiguous(planes.side, rows, layer_.side_columns()),
                      buffers.input, weight_[0].transposed(), false);
      }
    }
  }

  // dh_t -> dh_{t-1} through a chunk, which leaves the gradients of all GEMM results.
  void adjoint_chain(int64_t begin, int64_t steps, const Gradients<T>& gradients,
                     const Kept<const A>& kept, BackwardBuffers& buffers, Recording& recording) {
    const Rows<const T> grad_output = rows_of(gradients.output, begin, steps, buffers.grad_output);
    enqueue_steps(recording, begin, steps, [&](const int64_t* shift) {
      adjoint_steps(begin, steps, grad_output, shift, gradients, kept, buffers);
    });
  }

  void adjoint_steps(int64_t begin, int64_t steps, const Rows<const T>& grad_output,
                     const int64_t* shift, const Gradients<T>& gradients, const Kept<const A>& kept,
                     const BackwardBuffers& buffers) {
    const int64_t batch = layer_.batch;
    const auto dh = Matrix<A>::contiguous(buffers.dh, batch, hidden());
    for (int64_t t = steps - 1; t >= 0; --t) {
      const int64_t row = t * batch, from_start = begin * batch + row;
      const Planes<A> at = buffers.planes.from_row(layer_, row);
      const Planes<O> d = buffers.gradient.from_row(layer_, row);
      for (int s = layer_.last(); s >= 0; --s) {
        const StageKind kind = layer_.cell.stages[s].kind;
        const A* pre = traits(kind).has_factors ? at.projection[s] : kept.at(s, from_start);
        auto step = make_step<BackwardStep<T, O>>(s, begin, row, pre, at.side, at.projection[s]);
        step.shift = shift;
        step.dside = d.side;
        step.dprojection = d.projection[s];
        if (s == layer_.last()) {
          step.carry =
              from_start == 0 ? layer_.hx : layer_.output + (from_start - batch) * hidden();
          step.dout = step.dcarry = dh.data;
          step.grad_output = from_row(grad_output, row, hidden());
        } else {
          step.dout = buffers.dstage[s];
        }
        if (gradients.eps != nullptr) step.deps = gradients.eps + from_start * step.width;
        backend_.backward(kind, step, batch);

        const auto dprojection =
            Matrix<const O>::contiguous(d.projection[s], batch, layer_.columns(s));
        if (s > 0) {
          const int64_t width = layer_.width(s - 1);
          backend_.gemm(Matrix<A>::contiguous(buffers.dstage[s - 1], batch, width), dprojection,
                        weight(s), false);
        } else if (from_start > 0 || gradients.hx != nullptr) {
          backend_.gemm(dh, dprojection, weight(0), true);
        }
      }
    }
  }

  // Gradients of input and weights, all steps of a chunk at once.
  void leaf_gradients(int64_t begin, int64_t steps, const Gradients<T>& gradients,
                      const BackwardBuffers& buffers) {
    const int64_t rows = steps * layer_.batch;
    const auto dside = Matrix<O>::contiguous(buffers.gradient.side, rows, layer_.side_columns());
    if (gradients.input != nullptr) {
      const int64_t at = begin * layer_.batch * layer_.sizes.input;
      const auto dx = Matrix<T>::contiguous(gradients.input + at, rows, layer_.sizes.input);
      if constexpr (Space::kTensorIsResult) {
        backend_.gemm(dx, dside, weight_[0], false);
      } else {
        const auto wide = Matrix<A>::contiguous(buffers.dx, rows, layer_.sizes.input);
        backend_.gemm(wide, dside, weight_[0], false);
        backend_.copy(dx, wide);
      }
    }
    weight_gradient(0, dside, buffers.input, gradients);
    for (int s = 0; s <= layer_.last(); ++s) {
      const auto d = Matrix<O>::contiguous(buffers.gradient.projection[s], rows, layer_.columns(s));
      for_source(s, begin, steps, buffers, [&](Matrix<const O> source, int64_t first) {
        weight_gradient(layer_.projection(s), d.row_range(first, source.rows), source, gradients);
      });
    }
  }

  void weight_gradient(int p, Matrix<const O> dprojection, Matrix<const O> source,
                       const Gradients<T>& gradients) {
    if (gradients.weight[p] != nullptr) {
      backend_.gemm(Matrix<A>::contiguous(gradients.weight[p], dprojection.columns, source.columns),
                    dprojection.transposed(), source, true);
    }
    if (gradients.bias[p] != nullptr) backend_.column_sum(dprojection, gradients.bias[p]);
  }

  Backend backend_;
  Layer<T> layer_;
  Matrix<const O> weight_[kMaxProjections];
  const A* bias_[kMaxProjections];
};

}  // namespace fusedrnn
