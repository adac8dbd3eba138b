// Forward through a layer, chunk by chunk.
#pragma once
#include <algorithm>
#include <utility>

#include "pass.h"

namespace fusedrnn {

template <class Backend>
class ForwardPass : LayerPass<Backend> {
  using Base = LayerPass<Backend>;
  using typename Base::A, typename Base::Chunk, typename Base::O, typename Base::T;
  using typename Base::Recording, typename Base::Space;
  using ForwardBuffers = typename Space::Forward;
  using Base::backend_, Base::layer_, Base::weight_, Base::chunk_at, Base::is_finished,
      Base::hidden, Base::output, Base::cell_state_before, Base::copy_rows, Base::enqueue_steps,
      Base::prepare, Base::multiply_step, Base::input_rows, Base::pack, Base::rows_of, Base::chunks,
      Base::output_sequence, Base::noise, Base::weight, Base::output_from, Base::apply_first_reset;
  using Base::kTensorIsOperand;

 public:
  using Base::Base;

  // saved_gates: memory for seq_len * batch * saved_columns() pre-activations, or null.  c_n: null
  // if the cell has no cell state.
  void run(T* h_n, T* c_n, A* saved_gates, void* workspace) {
    Arena arena(workspace);
    ForwardBuffers buffers(layer_, arena);
    prepare(buffers);
    if (buffers.carry != nullptr) {
      copy_rows(buffers.carry, layer_.has_cell_state() ? layer_.cx : layer_.hx, hidden());
      apply_first_reset(buffers.carry, hidden());
    }
    carry_ = buffers.carry;
    if (buffers.h != nullptr) {
      copy_rows(buffers.h, layer_.hx, output());
      apply_first_reset(buffers.h, output());
    }
    forward_chunks(SavedGates<A>(layer_, saved_gates), buffers);
    if (buffers.h != nullptr) {
      copy_rows(h_n, buffers.h, output());
    } else {
      const Chunk last = chunk_at(chunks() - 1);
      backend_.copy(Matrix<T>::contiguous(h_n, layer_.batch, output()),
                    layer_.output_rows(last.first_row + last.row(last.steps - 1), layer_.batch));
    }
    if (c_n != nullptr) copy_rows(c_n, carry_, hidden());
  }

 private:
  // While one stream works through the steps of a chunk, the second stream, if there is one,
  // multiplies the inputs of the next chunk.
  void forward_chunks(const SavedGates<A>& saved, ForwardBuffers& buffers) {
    Recording recording;
    auto streams = backend_.fork(layer_.overlaps);
    const auto project = [&](int64_t index) {
      if (index == chunks() || is_finished(chunk_at(index))) return;
      backend_.on_side_stream([&] { project_input(chunk_at(index), buffers); });
    };
    if (layer_.overlaps) project(0);
    for (int64_t index = 0; index < chunks(); ++index) {
      const Chunk chunk = chunk_at(index);
      if (!layer_.overlaps) project(index);
      backend_.sync();
      if (layer_.chunk_cell_states != nullptr && carry_ != cell_state_before(chunk)) {
        copy_rows(cell_state_before(chunk), carry_, hidden());
      }
      if (!is_finished(chunk)) forward_chunk(chunk, saved, buffers, recording);
      if (buffers.output != nullptr) pack(output_sequence(), buffers.output, chunk);
      if (layer_.overlaps) project(index + 1);
    }
    streams.join();
    clear_rest();
  }

  // Zeroes the cell states of chunks that there are not, since rows are compact.
  void clear_rest() {
    const int64_t rest = (layer_.chunks() - chunks()) * layer_.batch;
    if (layer_.chunk_cell_states == nullptr || rest == 0) return;
    A* const first = layer_.chunk_cell_states + chunks() * layer_.batch * hidden();
    backend_.zero(Matrix<A>::contiguous(first, rest, hidden()));
  }

  void project_input(const Chunk& chunk, const ForwardBuffers& buffers) {
    const auto input_gates = Matrix<A>::contiguous(buffers.input_gates_of(chunk.index),
                                                   chunk.rows(), layer_.input_columns());
    const Matrix<const O> input = input_rows(chunk, buffers.x);
    if constexpr (Backend::kPacks) {
      if (buffers.packed_input != nullptr) {
        return backend_.gemm_packed(input_gates, input, buffers.packed_input, false);
      }
    }
    backend_.gemm(input_gates, input, weight_[0].transposed(), false);
  }

  void forward_chunk(const Chunk& chunk, const SavedGates<A>& saved, ForwardBuffers& buffers,
                     Recording& recording) {
    const RowView<const T> eps = rows_of(layer_.eps, chunk, buffers.eps);
    if constexpr (Backend::kPersistent) {
      if (layer_.is_persistent) return forward_at_once(chunk, eps, saved, buffers);
    }
    enqueue_steps(recording, chunk, [&](const int64_t* replay_offset) {
      for (int64_t t = 0; t < chunk.steps; ++t) {
        forward_step(chunk, t, eps, replay_offset, saved, buffers);
      }
    });
  }

  // h_{t-1} of step t as a GEMM reads it: in buffers.h if stages write it there, otherwise in hx or
  // in the output.
  Matrix<const O> h_operand(const Chunk& chunk, int64_t t, int64_t rows,
                            const ForwardBuffers& buffers) const {
    if (buffers.h != nullptr) return Matrix<const O>::contiguous(buffers.h, rows, output());
    if (chunk.begin + t == 0) {
      return Matrix<const O>::contiguous(reinterpret<const O>(layer_.hx), rows, output());
    }
    const int64_t before = chunk.place(t) - layer_.mask.direction * layer_.batch;
    return {reinterpret<const O>(layer_.output + before * layer_.output_stride), rows, output(),
            layer_.output_stride, 1};
  }

  // The arguments of stage s in step t.  hidden_gates: the result of its GEMM.
  ForwardStep<T, O> forward_stage(int s, const Chunk& chunk, int64_t t, const Matrix<const O>& h,
                                  const A* hidden_gates, const RowView<const T>& eps,
                                  const SavedGates<A>& saved, const ForwardBuffers& buffers) const {
    const int64_t row = chunk.row(t), from_start = chunk.place(t);
    const A* input_gates = buffers.input_gates_of(chunk.index) + row * layer_.input_columns();
    auto step = this->template make_step<ForwardStep<T, O>>(s, from_start, nullptr, input_gates,
                                                            hidden_gates);
    step.noise = noise(eps, chunk, t);
    step.saved_gates = saved.at(s, from_start);
    if (s == layer_.recurrent_stage()) {
      step.carry = {buffers.carry, hidden()};
      step.carry_out = buffers.carry;
      if (buffers.carry == nullptr) step.carry = {reinterpret<const A>(h.data), h.row_stride};
    }
    if (step.is_last) {
      if (buffers.output != nullptr) {
        step.output = {buffers.output + row * output(), output(), false};
      } else {
        step.output = output_from(chunk, t);
      }
      step.operand = buffers.h;
      if (layer_.has_cell_state()) step.h = {h.data, h.row_stride, false};
    } else {
      step.operand = buffers.operand[s];
    }
    return step;
  }

  void forward_step(const Chunk& chunk, int64_t t, const RowView<const T>& eps,
                    const int64_t* replay_offset, const SavedGates<A>& saved,
                    const ForwardBuffers& buffers) {
    const int64_t rows = layer_.rows_of_step(chunk.first + chunk.step(t));
    if (rows == 0) return;
    A* input_gates = buffers.input_gates_of(chunk.index) + chunk.row(t) * layer_.input_columns();
    const Matrix<const O> h = h_operand(chunk, t, rows, buffers);
    Matrix<const O> operand = h;
    for (int s = 0; s <= layer_.last(); ++s) {
      const bool adds_up = layer_.adds_up(s);
      const auto hidden_gates = Matrix<A>::contiguous(
          adds_up ? input_gates : buffers.hidden_gates[s], rows, layer_.columns(s));
      multiply_step(s, hidden_gates, operand, weight(s).transposed(), adds_up);
      auto step = forward_stage(s, chunk, t, h, hidden_gates.data, eps, saved, buffers);
      step.replay_offset = replay_offset;
      backend_.forward(layer_.cell.stages[s].kind, step, rows);
      operand = Matrix<const O>::contiguous(step.operand, rows, step.width);
    }
  }

  void forward_at_once(const Chunk& chunk, const RowView<const T>& eps, const SavedGates<A>& saved,
                       ForwardBuffers& buffers) {
    cuda::PersistentForward<T> all{};
    const Chunk next = chunk_at(chunk.index + 1);
    const bool has_next = next.index < chunks() && !is_finished(next);
    const auto h = Matrix<const O>::contiguous(buffers.h, layer_.batch, output());
    for (int s = 0; s <= layer_.last(); ++s) {
      all.step[s] = forward_stage(s, chunk, 0, h, nullptr, eps, saved, buffers);
      all.weight[s] = weight(s);
    }
    all.step[layer_.last()].operand = buffers.h_after;  // blocks may still read the h before
    if (layer_.chunk_cell_states != nullptr) {  // the kernel reads the state before this chunk, and
                                                // writes the one before the next
      auto& recurrent_stage = all.step[layer_.recurrent_stage()];
      recurrent_stage.carry = {cell_state_before(chunk), hidden()};
      if (has_next) recurrent_stage.carry_out = cell_state_before(next);
      carry_ = recurrent_stage.carry_out;
    }
    all.turn = {launches_++, has_next};
    all.h = {h.data, h.row_stride, false};
    all.steps = int(chunk.steps);
    all.batch = int(layer_.batch);
    all.row_step = layer_.mask.direction * all.batch;
    backend_.forward_chunk(layer_.persistent, all, buffers.exchange);
    std::swap(buffers.h, buffers.h_after);
  }

  const A* carry_ = nullptr;  // the latest state
  int64_t launches_ = 0;      // of persistent kernels
};

}  // namespace fusedrnn
