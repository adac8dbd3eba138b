// Backward through a layer, chunk by chunk from the last one on.
//
// Longer than 350 lines, because backward_data and backward_weights share the arrays of a chunk
// and how its rows lie.
#pragma once
#include <algorithm>
#include <utility>

#include "pass.h"

namespace fusedrnn {

template <class Backend>
class BackwardPass : LayerPass<Backend> {
  using Base = LayerPass<Backend>;
  using typename Base::A, typename Base::Chunk, typename Base::O, typename Base::T;
  using typename Base::Part, typename Base::Recording, typename Base::Space;
  using Recomputed = typename Space::Recomputed;
  using BackwardBuffers = typename Space::Backward;
  using Base::backend_, Base::layer_, Base::weight_, Base::chunk_at, Base::is_finished,
      Base::hidden, Base::output, Base::cell_state_before, Base::copy_rows, Base::enqueue_steps,
      Base::prepare, Base::multiply_step, Base::input_rows, Base::unpack, Base::pack,
      Base::apply_dropout, Base::rows_of, Base::output_sequence, Base::noise, Base::weight,
      Base::from_step, Base::output_from, Base::apply_first_reset, Base::chunks, Base::for_parts,
      Base::rows_of_part;
  using Base::kTensorIsOperand;

 public:
  using Base::Base;

  // saved_gates: the pre-activations that forward saved, or null to recompute them.  Gradients of
  // weights are overwritten completely, or added to.
  void run(const Gradients<T>& gradients, const A* saved_gates, void* workspace) {
    Arena arena(workspace);
    BackwardBuffers buffers(layer_, gradients, arena);
    prepare(buffers);
    has_weight_gradients_ = gradients.adds_to_weights;
    start_gradient(buffers.dh, gradients.h_n, output());
    if (layer_.has_cell_state()) start_gradient(buffers.dc, gradients.c_n, hidden());
    backward_chunks(gradients, SavedGates<const A>(layer_, saved_gates), buffers);
    if (!gradients.adds_to_weights) clear_rest(gradients);
    if (shares_bias_gradient(gradients)) {
      const int64_t columns = layer_.shared_columns();
      backend_.copy(Matrix<A>::contiguous(gradients.bias[0], 1, columns),
                    Matrix<const A>::contiguous(shared_bias(gradients), 1, columns));
    }
    if (gradients.hx != nullptr) {
      apply_first_reset(buffers.dh, output());
      copy_rows(gradients.hx, buffers.dh, output());
    }
    if (gradients.cx != nullptr) {
      apply_first_reset(buffers.dc, hidden());
      copy_rows(gradients.cx, buffers.dc, hidden());
    }
  }

 private:
  // While one stream goes back through the steps of a chunk, the second stream, if there is one,
  // computes the weight gradients of the chunk after it and recomputes the chunk before it.
  void backward_chunks(const Gradients<T>& gradients, const SavedGates<const A>& saved,
                       BackwardBuffers& buffers) {
    Recording recording;
    auto streams = backend_.fork(layer_.overlaps);
    const auto recompute_before = [&](int64_t index) {
      do {
        if (--index < 0) return index;
      } while (is_finished(chunk_at(index)));
      backend_.on_side_stream([&] { recompute(chunk_at(index), saved, buffers); });
      return index;
    };
    int64_t index = recompute_before(chunks());
    backend_.sync();
    while (index >= 0) {
      const Chunk chunk = chunk_at(index);
      backward_data(chunk, gradients, saved, buffers, recording);
      if (layer_.overlaps) index = recompute_before(index);
      backend_.sync();
      backend_.on_side_stream([&] { backward_weights(chunk, gradients, buffers); });
      if (!layer_.overlaps) index = recompute_before(index);
    }
    streams.join();
  }

  void start_gradient(A* d, const T* gradient, int64_t columns) {
    if (gradient != nullptr) {
      copy_rows(d, gradient, columns);
    } else {
      backend_.zero(Matrix<A>::contiguous(d, layer_.batch, columns));
    }
  }

  // Calls f(piece, index of its first row) for h_{t-1} of a chunk's rows, in up to two pieces
  // because h before the first step is hx.
  template <class F>
  void for_h_before(const Chunk& chunk, const F& f) const {
    const int64_t from_hx = chunk.begin == 0 ? layer_.batch : 0, others = chunk.rows() - from_hx;
    const int64_t first = chunk.is_reversed ? chunk.first_row + layer_.batch
                                            : chunk.first_row + from_hx - layer_.batch;
    if (from_hx > 0) {
      f(Matrix<const T>::contiguous(layer_.hx, from_hx, output()), chunk.row(0));
    }
    if (others > 0) {
      f(Matrix<const T>(layer_.output_rows(first, others)), chunk.is_reversed ? 0 : from_hx);
    }
  }

  // Calls f(piece, index of its first row) for what stage s projects, as GEMM operands: h_{t-1}, or
  // the result of the stage before.
  template <class F>
  void for_source(int s, const Chunk& chunk, const Recomputed& recomputed, const F& f) const {
    const O* dense = s > 0 ? recomputed.operand[s - 1] : recomputed.h;
    if (dense != nullptr) {
      const int64_t width = s > 0 ? layer_.width(s - 1) : output();
      f(Matrix<const O>::contiguous(dense, chunk.rows(), width), int64_t(0));
    } else if constexpr (kTensorIsOperand) {
      for_h_before(chunk, f);
    }
  }

  // h_{t-1} in the output, for the rows of a part whose step before is there.  copy: memory for it
  // if the output is packed and rows are not compact.
  RowView<const T> output_before(const Chunk& chunk, const Part& part, T* copy) {
    const int64_t direction = layer_.mask.direction;
    if (copy == nullptr && layer_.is_packed()) {
      const RowView<T> here = output_from(chunk, part.t);
      const int64_t step = chunk.first + chunk.step(part.t);
      // In the first step no row has a step before, but the part may have more steps.
      const int64_t back = direction < 0 ? -layer_.rows_of_step(step)
                           : step > 0    ? layer_.rows_of_step(step - 1)
                                         : layer_.batch;
      return {here.data - back * here.stride, here.stride, false};
    }
    if (copy == nullptr) {
      return this->template output_from<const T>(part.place - direction * layer_.batch);
    }
    // There is no step before the first or after the last.
    const int64_t first = std::max<int64_t>(chunk.first - direction, 0);
    const int64_t last = std::min(chunk.first - direction + chunk.steps, layer_.seq_len);
    backend_.copy_steps(Sequence<T>::contiguous(copy, layer_.batch, output()),
                        first - (chunk.first - direction), Sequence<const T>(output_sequence()),
                        first, last - first, layer_.batch);
    return {copy, output(), false};
  }

  // Recomputes the intermediates of a chunk up to the recurrent stage, all steps at once: GEMM
  // results unless pre-activations are saved, and the results and factors of the stages before the
  // recurrent one.
  void recompute(const Chunk& chunk, const SavedGates<const A>& saved, BackwardBuffers& buffers) {
    const RowView<const T> eps = rows_of(layer_.eps, chunk, buffers.eps);
    Recomputed& recomputed = buffers.of(chunk.index);
    if (layer_.mask.any()) {
      for_parts(chunk, [&](const Part& part) {
        const GatherStep<T, O> step{
            output(),  part.place,  output_before(chunk, part, recomputed.output),
            layer_.hx, layer_.mask, recomputed.h + part.row * output()};
        backend_.gather(step, part.rows);
      });
    } else if (recomputed.h != nullptr) {
      for_h_before(chunk, [&](const Matrix<const T>& h, int64_t first) {
        backend_.copy(Matrix<O>::contiguous(recomputed.h + first * output(), h.rows, output()), h);
      });
    }
    if (layer_.has_cell_state() && !layer_.is_persistent) {
      copy_cell_states(recomputed, chunk, 0, 0);
    }
    const GatePlanes<A>& planes = recomputed.planes;
    recomputed.input = input_rows(chunk, recomputed.x);
    const bool is_saved = saved.at(0, chunk.first_row) != nullptr;
    for (int s = 0; s <= layer_.recurrent_stage(); ++s) {
      if (!is_saved) {
        for_source(s, chunk, recomputed, [&](const Matrix<const O>& source, int64_t first) {
          backend_.gemm(hidden_gates(planes, s, chunk).row_range(first, source.rows), source,
                        weight(s).transposed(), false);
        });
      }
      if (s < layer_.recurrent_stage()) {
        for_parts(chunk, [&](const Part& part) {
          auto step = this->template make_step<ForwardStep<T, O>>(
              s, part.place, saved.at(s, part.place), nullptr,
              planes.hidden_gates[s] + part.row * layer_.columns(s));
          step.noise = noise(eps, chunk, part.t);
          step.operand = recomputed.operand[s] + part.row * layer_.width(s);
          step.factors = factors(s, part.row, recomputed);
          step.factor_blocks = recomputed.factor_blocks;
          backend_.forward(layer_.cell.stages[s].kind, step, part.rows);
        });
      }
    }
    if (is_saved) return;
    for_input_gates(planes, chunk,
                    [&](const Matrix<A>& input_gates, const Matrix<const O>& w, int64_t first) {
                      backend_.gemm(input_gates, recomputed.input, w.transposed(),
                                    first < layer_.shared_columns());
                    });
  }

  template <class P>
  Matrix<P> hidden_gates(const GatePlanes<P>& planes, int s, const Chunk& chunk) const {
    return Matrix<P>::contiguous(planes.hidden_gates[s], chunk.rows(), layer_.columns(s));
  }
  // Calls f(columns, their rows of the weight, index of the first) for the columns that the input's
  // weight makes: first those in the recurrent stage's hidden gates, then the others.
  template <class P, class F>
  void for_input_gates(const GatePlanes<P>& planes, const Chunk& chunk, const F& f) const {
    const int64_t shared = layer_.shared_columns(), alone = layer_.columns_alone();
    if (shared > 0) {
      f(hidden_gates(planes, layer_.recurrent_stage(), chunk).column_range(0, shared),
        weight_[0].row_range(0, shared), 0);
    }
    if (alone > 0) {
      f(Matrix<P>::contiguous(planes.input_gates, chunk.rows(), alone),
        weight_[0].row_range(shared, alone), shared);
    }
  }

  // What backward of a stage reads instead of GEMM results: its factors, or saved pre-activations;
  // null if it has neither.
  const A* ready(int s, const Chunk& chunk, int64_t t, const SavedGates<const A>& saved,
                 const Recomputed& recomputed) const {
    if (!traits(layer_.cell.stages[s].kind).has_factors) return saved.at(s, chunk.place(t));
    return factors(s, chunk.row(t), recomputed);
  }
  A* factors(int s, int64_t row, const Recomputed& recomputed) const {
    return recomputed.factors[s] + row * recomputed.factor_blocks * layer_.width(s);
  }

  // Runs dh_t -> dh_{t-1} through a chunk and writes the gradients of all GEMM results.
  void backward_data(const Chunk& chunk, const Gradients<T>& gradients,
                     const SavedGates<const A>& saved, BackwardBuffers& buffers,
                     Recording& recording) {
    const RowView<const T> grad_output = rows_of(gradients.output, chunk, buffers.grad_output);
    if constexpr (Backend::kPersistent) {
      if (layer_.is_persistent) {
        const auto args = persistent_arguments(chunk, grad_output, gradients, saved, buffers);
        return backend_.backward_data_chunk(layer_.persistent, args,
                                            buffers.of(chunk.index).exchange);
      }
    }
    enqueue_steps(recording, chunk, [&](const int64_t* replay_offset) {
      if (layer_.has_cell_state()) {
        const int64_t steps =
            layer_.recurrent_stage() < layer_.last() ? chunk.steps : chunk.steps - 1;
        for (int64_t t = 0; t < steps; ++t)
          cell_state_step(chunk, t, replay_offset, saved, buffers);
      }
      for (int64_t t = chunk.steps - 1; t >= 0; --t) {
        backward_data_step(chunk, t, grad_output, replay_offset, gradients, saved, buffers);
      }
    });
  }

  // The arguments of one kernel that does the same, and leaves dh and dc in place.
  cuda::PersistentBackward<T> persistent_arguments(const Chunk& chunk,
                                                   const RowView<const T>& grad_output,
                                                   const Gradients<T>& gradients,
                                                   const SavedGates<const A>& saved,
                                                   const BackwardBuffers& buffers) const {
    cuda::PersistentBackward<T> args{};
    const Recomputed& recomputed = buffers.of(chunk.index);
    const int64_t row = chunk.row(0), from_start = chunk.place(0);
    const bool is_first = chunk.begin == 0;
    const GatePlanes<A> at = recomputed.planes.from_row(layer_, row);
    const GatePlanes<O> d = recomputed.gradient.from_row(layer_, row);
    for (int s = 0; s <= layer_.last(); ++s) {
      const A* pre = ready(s, chunk, 0, saved, recomputed);
      auto step = this->template make_step<BackwardStep<T, O>>(s, from_start, pre, at.input_gates,
                                                               at.hidden_gates[s]);
      step.factor_blocks = recomputed.factor_blocks;
      step.dinput_gates = d.input_gates;
      step.dhidden_gates = d.hidden_gates[s];
      if (step.is_last) {
        step.dout = buffers.dh;
        step.grad_output = from_step(grad_output, chunk, 0);
      }
      if (gradients.eps != nullptr) step.deps = gradients.eps + from_start * step.width;
      args.step[s] = step;
      args.weight[s] = weight(s);
    }
    auto& step = args.step[layer_.recurrent_stage()];
    if (layer_.has_cell_state()) {
      step.dcarry = buffers.dc;
      args.first_cell_state = cell_state_before(chunk);
      args.cell_states = recomputed.cell_states + row * hidden();
      if (!step.is_last)
        args.operand = recomputed.operand[layer_.recurrent_stage()] + row * step.width;
    } else if (recomputed.h != nullptr) {
      step.carry = {recomputed.h + row * output(), output(), false};
    } else {
      step.carry =
          this->template output_from<const O>(from_start - layer_.mask.direction * layer_.batch);
      if (is_first) args.first_carry = {layer_.hx, output(), false};
    }
    args.steps = int(chunk.steps);
    args.batch = int(layer_.batch);
    args.row_step = int(layer_.mask.direction * layer_.batch);
    args.wants_dh = !is_first || gradients.hx != nullptr;
    return args;
  }

  // Computes the cell state before step t + 1 from the one before step t, and the LSTM's result if
  // another stage projects it.
  void cell_state_step(const Chunk& chunk, int64_t t, const int64_t* replay_offset,
                       const SavedGates<const A>& saved, const BackwardBuffers& buffers) {
    const int s = layer_.recurrent_stage();
    const Recomputed& recomputed = buffers.of(chunk.index);
    const bool has_next = t + 1 < chunk.steps, has_operand = s < layer_.last();
    const int64_t rows = chunk.rows_of(t), next = has_next ? chunk.rows_of(t + 1) : 0;
    const auto run = [&](int64_t first, int64_t count, bool carries) {
      const int64_t row = chunk.row(t) + first, place = chunk.place(t) + first;
      const GatePlanes<A> at = recomputed.planes.from_row(layer_, row);
      auto step = this->template make_step<ForwardStep<T, O>>(s, place, saved.at(s, place),
                                                              at.input_gates, at.hidden_gates[s]);
      step.replay_offset = replay_offset;
      step.is_last = false;  // h is in the output already
      step.carry = {recomputed.cell_states + row * hidden(), hidden()};
      if (carries) {
        step.carry_out = recomputed.cell_states + (chunk.row(t + 1) + first) * hidden();
      }
      if (has_operand) step.operand = recomputed.operand[s] + row * layer_.width(s);
      backend_.forward(layer_.cell.stages[s].kind, step, count);
    };
    const int64_t lasting = std::min(rows, next);
    if (lasting > 0) run(0, lasting, true);
    if (has_operand && rows > lasting) run(lasting, rows - lasting, false);
    if (next > rows) copy_cell_states(recomputed, chunk, t + 1, rows);
  }
  // The cell states before step t in rows that have taken no step of the chunk, from one on.
  void copy_cell_states(const Recomputed& recomputed, const Chunk& chunk, int64_t t,
                        int64_t first) {
    const int64_t rows = chunk.rows_of(t) - first;
    A* const out = recomputed.cell_states + (chunk.row(t) + first) * hidden();
    const A* const from = cell_state_before(chunk) + first * hidden();
    backend_.copy(Matrix<A>::contiguous(out, rows, hidden()),
                  Matrix<const A>::contiguous(from, rows, hidden()));
  }

  void backward_data_step(const Chunk& chunk, int64_t t, const RowView<const T>& grad_output,
                          const int64_t* replay_offset, const Gradients<T>& gradients,
                          const SavedGates<const A>& saved, const BackwardBuffers& buffers) {
    const int64_t batch = layer_.batch, row = chunk.row(t), from_start = chunk.place(t);
    const int64_t rows = layer_.rows_of_step(chunk.first + chunk.step(t));
    const bool is_first = chunk.begin + t == 0;
    const Recomputed& recomputed = buffers.of(chunk.index);
    const GatePlanes<A> at = recomputed.planes.from_row(layer_, row);
    const GatePlanes<O> d = recomputed.gradient.from_row(layer_, row);
    for (int s = layer_.last(); s >= 0; --s) {
      const StageKind kind = layer_.cell.stages[s].kind;
      const A* pre = ready(s, chunk, t, saved, recomputed);
      auto step = this->template make_step<BackwardStep<T, O>>(s, from_start, pre, at.input_gates,
                                                               at.hidden_gates[s]);
      step.factor_blocks = recomputed.factor_blocks;
      step.replay_offset = replay_offset;
      step.dinput_gates = d.input_gates;
      step.dhidden_gates = d.hidden_gates[s];
      if (s == layer_.recurrent_stage()) {
        if (layer_.has_cell_state()) {
          step.cell_state = recomputed.cell_states + row * hidden();
        } else if (recomputed.h != nullptr) {
          step.carry = {recomputed.h + row * output(), output(), false};
        } else if (is_first) {
          step.carry = {reinterpret<const O>(layer_.hx), output(), true};
        } else {
          step.carry =
              this->template output_from<const O>(from_start - layer_.mask.direction * batch);
        }
        step.dcarry = layer_.has_cell_state() ? buffers.dc : buffers.dh;
      }
      step.dout = step.is_last ? buffers.dh : buffers.dstage[s];
      if (step.is_last) step.grad_output = from_step(grad_output, chunk, t);
      if (gradients.eps != nullptr) step.deps = gradients.eps + from_start * step.width;
      backend_.backward(kind, step, chunk.rows_of(t));

      const auto dhidden_gates =
          Matrix<const O>::contiguous(d.hidden_gates[s], rows, layer_.columns(s));
      if (rows == 0) continue;
      if (s > 0) {
        const int64_t width = layer_.width(s - 1);
        multiply_step(s, Matrix<A>::contiguous(buffers.dstage[s - 1], rows, width), dhidden_gates,
                      weight(s), false);
      } else if (!is_first || gradients.hx != nullptr) {
        multiply_step(0, Matrix<A>::contiguous(buffers.dh, rows, output()), dhidden_gates,
                      weight(0), true);
      }
    }
  }

  // The gradients of input and weights, all steps of a chunk at once.  Gradients of weights are
  // sums over chunks: the chunk that is worked on first writes them and later ones add to them, all
  // on one stream.
  void backward_weights(const Chunk& chunk, const Gradients<T>& gradients,
                        const BackwardBuffers& buffers) {
    const Recomputed& recomputed = buffers.of(chunk.index);
    if (gradients.input != nullptr) input_gradient(chunk, gradients, recomputed);
    const bool has_earlier = std::exchange(has_weight_gradients_, true);
    ColumnSums<O> sums{};
    sums.accumulate = has_earlier;
    for (int s = 0; s <= layer_.last(); ++s) {
      const int p = layer_.projection(s);
      const Matrix<O> d = hidden_gates(recomputed.gradient, s, chunk);
      bool adds = has_earlier;
      for_source(s, chunk, recomputed, [&](const Matrix<const O>& source, int64_t first) {
        weight_gradient(gradients.weight[p], d.row_range(first, source.rows), source, adds);
        adds = true;
      });
      if (gradients.bias[p] != nullptr) sums.add(d, gradients.bias[p]);
    }
    for_input_gates(recomputed.gradient, chunk,
                    [&](const Matrix<const O>& d, const Matrix<const O>&, int64_t first) {
                      A *weight = gradients.weight[0], *bias = gradients.bias[0];
                      if (weight != nullptr) weight += first * recomputed.input.columns;
                      weight_gradient(weight, d, recomputed.input, has_earlier);
                      const bool is_shared = first < layer_.shared_columns();
                      if (bias != nullptr && !(is_shared && shares_bias_gradient(gradients))) {
                        sums.add(d, bias + first);
                      }
                    });
    if (sums.count > 0) backend_.column_sums(sums);
  }

  void input_gradient(const Chunk& chunk, const Gradients<T>& gradients,
                      const Recomputed& recomputed) {
    constexpr bool kDropsSum = std::is_same_v<O, A>;  // before it is rounded
    const bool drops = layer_.dropout > 0 && gradients.completes_input;
    const int64_t width = layer_.sizes.input;
    const Sequence<T> rows = layer_.sequence(gradients.input, width, width);
    const bool packs = recomputed.grad_input != nullptr;
    T* const at = packs ? recomputed.grad_input : rows.at(chunk.first);
    if (packs && gradients.adds_to_input) unpack(at, rows, chunk);
    const auto dx = Matrix<T>::contiguous(at, chunk.rows(), width);
    const auto add_up = [&](const auto& sum) {
      bool adds = gradients.adds_to_input;
      for_input_gates(recomputed.gradient, chunk,
                      [&](const Matrix<const O>& d, const Matrix<const O>& w, int64_t) {
                        backend_.gemm(sum, d, w, adds, /*is_of_input=*/true);
                        adds = true;
                      });
    };
    if constexpr (Space::kTensorIsResult) {
      if (recomputed.dx == nullptr) add_up(dx);
    }
    if (recomputed.dx != nullptr) {
      const auto wide = Matrix<A>::contiguous(recomputed.dx, dx.rows, dx.columns);
      if (gradients.adds_to_input) {
        for_places(dx, wide, rows, chunk,
                   [&](const auto& there, const auto& here) { backend_.copy(here, there); });
      }
      add_up(wide);
      if constexpr (kDropsSum) {
        if (drops) apply_dropout(wide.data, chunk);
      }
      for_places(dx, wide, rows, chunk,
                 [&](const auto& there, const auto& here) { backend_.copy(there, here); });
    }
    if constexpr (kTensorIsOperand) {
      if (drops && (recomputed.dx == nullptr || !kDropsSum)) apply_dropout(dx.data, chunk);
    }
    if (packs) pack(rows, dx.data, chunk);
  }

  // Calls f(there, here) for the rows of a chunk's gradient where they lie at one stride both in
  // the tensor and in the workspace.
  template <class F>
  void for_places(const Matrix<T>& there, const Matrix<A>& here, const Sequence<T>& rows,
                  const Chunk& chunk, const F& f) {
    if (chunk.starts == nullptr || layer_.is_packed()) return f(there, here);
    for_parts(chunk, [&](const Part& part) {
      f(rows_of_part(rows, chunk, part), here.row_range(part.row, part.rows));
    });
  }

  void weight_gradient(A* gradient, const Matrix<const O>& d, const Matrix<const O>& source,
                       bool adds) {
    if (gradient == nullptr) return;
    backend_.gemm(Matrix<A>::contiguous(gradient, d.columns, source.columns), d.transposed(),
                  source, adds);
  }

  // Zeroes the gradients of weights that no chunk has written: of rows that no stage reads, and of
  // everything if all sequences of the batch are empty.
  void clear_rest(const Gradients<T>& gradients) {
    int64_t written[kMaxProjections] = {};  // rows
    if (has_weight_gradients_) {
      written[0] = layer_.input_columns();
      for (int s = 0; s <= layer_.last(); ++s) written[layer_.projection(s)] = layer_.columns(s);
    }
    for (int p = 0; p < layer_.cell.num_projections; ++p) {
      const int64_t columns = layer_.weight[p].columns, rest = layer_.weight[p].rows - written[p];
      const auto clear = [&](A* gradient, int64_t width) {
        if (gradient == nullptr || rest == 0) return;
        backend_.zero(Matrix<A>::contiguous(gradient + written[p] * width, rest, width));
      };
      clear(gradients.weight[p], columns);
      clear(gradients.bias[p], 1);
    }
  }

  // Where the two projections of the recurrent stage share columns, their biases have the same
  // gradient: it is summed once, and copied in the end.
  bool shares_bias_gradient(const Gradients<T>& gradients) const {
    return gradients.bias[0] != nullptr && shared_bias(gradients) != nullptr;
  }
  A* shared_bias(const Gradients<T>& gradients) const {
    return gradients.bias[layer_.projection(layer_.recurrent_stage())];
  }

  bool has_weight_gradients_ = false;  // whether a chunk, or an earlier call, has written them
};

}  // namespace fusedrnn
