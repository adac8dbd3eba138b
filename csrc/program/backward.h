// Backward of a program, chunk by chunk from the last one on.
//
// Longer than 350 lines, because all gradients of a chunk flow through the same rows.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "pass.h"

namespace fusedrnn::program {

template <class Backend>
class Backward : Pass<Backend> {
  using Base = Pass<Backend>;
  friend Base;
  using typename Base::A, typename Base::O, typename Base::T, typename Base::Space;
  using Buffers = typename Space::Backward;
  using Base::arrays_, Base::values_, Base::results_, Base::before_, Base::after_, Base::is_direct_;
  using Base::backend_, Base::call_, Base::program_, Base::flow_, Base::weights_;
  using Base::compact, Base::of_one_step, Base::rows_at, Base::sequence_rows, Base::value_rows,
      Base::copy_rows, Base::run_item, Base::operand, Base::for_stage_spans,
      Base::for_product_spans;

 public:
  Backward(const Backend& backend, const Call<T>& call, const Gradients<T>& gradients)
      : Base(backend, call), gradients_(gradients), needs_value_(program_.values.size()),
        needs_array_(program_.arrays.size()), d_inputs_(program_.inputs.size()),
        d_arrays_(program_.arrays.size()), d_values_(program_.values.size()),
        d_before_(program_.carries.size()), d_after_(program_.carries.size()),
        d_sequences_(program_.sequences.size()), has_weight_(call.weights.size()) {
    find_needs();
  }

  // Overwrites all gradients completely.
  void run(void* workspace) {
    Arena arena(workspace);
    Buffers buffers(call_, gradients_, arena);
    this->prepare(buffers);
    place(buffers);
    clear();
    start_carries();
    for (int64_t index = call_.chunks() - 1; index >= 0; --index) {
      const Chunk chunk = call_.chunk_at(index);
      if (call_.is_finished(chunk)) continue;
      start(chunk, buffers);
      make_values(chunk);
      backward_chunk(chunk, buffers);
      leaf_gradients(chunk, buffers);
    }
    for (size_t w = 0; w < has_weight_.size(); ++w) {
      const Matrix<A>& d = gradients_.weights[w];
      if (d.data != nullptr && !has_weight_[w]) backend_.zero(d);
    }
    for (size_t j = 0; j < d_after_.size(); ++j) {
      if (gradients_.carries[j] == nullptr) continue;
      copy_rows(gradients_.carries[j], d_after_[j], program_.carries[j].width);
    }
  }

 private:
  // What is needed

  // Finds the values and arrays on which something depends whose gradient is wanted.  Gradients of
  // carries always are: those of earlier steps depend on them.
  void find_needs() {
    bool is_complete = false;
    while (!is_complete) {
      is_complete = true;
      const auto need = [&](std::vector<bool>::reference flag, bool is_needed) {
        if (flag || !is_needed) return;
        flag = true;
        is_complete = false;
      };
      for (const Product& product : program_.products) {
        const Array& array = program_.arrays[size_t(product.array)];
        const bool is_wanted =
            gradients_.weights[size_t(product.weight)].data != nullptr ||
            (array.has_bias() && gradients_.vectors[size_t(array.bias)] != nullptr);
        need(needs_array_[size_t(product.array)], is_wanted || needs(product.operand));
      }
      for (size_t s = 0; s < program_.stages.size(); ++s) {
        for (const StageOutput& output : program_.stages[s].outputs) {
          need(needs_value_[size_t(output.value)], needs_stage(s));
        }
      }
    }
  }
  bool needs(const Operand& operand) const {
    const size_t i = size_t(operand.index);
    if (!flow_.has_gradient(operand)) return false;
    switch (operand.source) {
      case Source::Input: return gradients_.inputs[i] != nullptr;
      case Source::Carry: return true;
      case Source::Value: return needs_value_[i];
      case Source::Array: return needs_array_[i];
      default: return gradients_.vectors[i] != nullptr;
    }
  }
  bool needs_stage(size_t index) const {
    const auto& inputs = program_.stages[index].inputs;
    return std::any_of(inputs.begin(), inputs.end(),
                       [&](const StageInput& input) { return needs(input.operand); });
  }
  // Whether the initial state of a carry has no gradient that is wanted, where step s reads it.
  bool is_unwanted(size_t j, const Chunk& chunk, int64_t s) const {
    return chunk.starts_at(s) && !call_.mask.any() && gradients_.carries[j] == nullptr;
  }

  // Places

  // Says where everything is that is in the same place in all chunks.
  void place(const Buffers& buffers) {
    for (size_t v = 0; v < values_.size(); ++v) {
      const Value& value = program_.values[v];
      is_direct_.push_back(value.is_of_carry() && !value.is_in_sequence() &&
                           Buffers::is_elsewhere(call_, v));
      if (buffers.values[v] != nullptr) {
        results_[v] = values_[v] = value_rows(buffers.values[v], value, true);
      }
      d_values_[v] = rows_at(buffers.value_gradients[v], value.columns,
                             flow_.values[v].has_chunk_gradient ? Rows::kCompact : 0);
    }
    for (size_t j = 0; j < before_.size(); ++j) {
      const Carry& carry = program_.carries[j];
      if (buffers.carries[j] != nullptr) {
        before_[j] = carry.is_in_sequence()
                         ? compact(static_cast<O*>(buffers.carries[j]), carry.width)
                         : compact(static_cast<A*>(buffers.carries[j]), carry.width);
      }
      after_[j] = buffers.carries_after[j];
      d_after_[j] = buffers.carry_gradients[j];
      d_before_[j] = rows_at(buffers.carry_gradients_before[j], carry.width,
                             flow_.carries[j].is_read_after ? Rows::kCompact : 0);
    }
    for (size_t a = 0; a < arrays_.size(); ++a) {
      const int64_t columns = program_.arrays[a].columns;
      if (!call_.is_saved()) arrays_[a] = compact(buffers.arrays[a], columns);
      d_arrays_[a] = compact(buffers.array_gradients[a], columns);
    }
  }

  // Zeroes the gradients that chunks add to, or do not write everywhere.
  void clear() {
    for (size_t v = 0; v < gradients_.vectors.size(); ++v) {
      if (gradients_.vectors[v] == nullptr) continue;
      backend_.zero(Matrix<A>::contiguous(gradients_.vectors[v], 1, program_.vectors[v]));
    }
    const int64_t rows = call_.seq_len * call_.batch;
    for (size_t i = 0; i < gradients_.inputs.size() && call_.has_lengths(); ++i) {
      if (gradients_.inputs[i] == nullptr) continue;
      backend_.zero(Matrix<T>::contiguous(gradients_.inputs[i], rows, program_.inputs[i]));
    }
    for (size_t j = 0; j < program_.carries.size(); ++j) {
      const int64_t width = program_.carries[j].width;
      if (gradients_.reset_rows[j] != nullptr) {
        backend_.zero(Matrix<A>::contiguous(gradients_.reset_rows[j], call_.batch, width));
      }
      if (gradients_.reset_steps[j] != nullptr) {
        backend_.zero(Matrix<T>::contiguous(gradients_.reset_steps[j], rows, width));
      }
    }
  }

  void start_carries() {
    for (size_t j = 0; j < d_after_.size(); ++j) {
      const int64_t width = program_.carries[j].width;
      if (gradients_.last[j] != nullptr) {
        copy_rows(d_after_[j], gradients_.last[j], width);
      } else {
        backend_.zero(Matrix<A>::contiguous(d_after_[j], call_.batch, width));
      }
    }
  }

  void start(const Chunk& chunk, const Buffers& buffers) {
    this->start_inputs(chunk, buffers);
    for (size_t a = 0; a < arrays_.size() && call_.is_saved(); ++a) {
      const int64_t columns = program_.arrays[a].columns;
      arrays_[a] = rows_at(call_.saved[a], columns, call_.batch * columns, chunk.first);
    }
    for (size_t v = 0; v < values_.size(); ++v) {
      const Value& value = program_.values[v];
      if (value.is_in_sequence()) {
        values_[v] = sequence_rows(value.sequence, value.offset, chunk);
      }
    }
    for (size_t i = 0; i < d_inputs_.size(); ++i) {
      const int64_t width = program_.inputs[i];
      if (gradients_.inputs[i] == nullptr) continue;
      d_inputs_[i] = Space::input_gradient_is_ready(call_)
                         ? rows_at(gradients_.inputs[i], width, call_.batch * width, chunk.first)
                         : compact(buffers.input_gradients[i], width);
    }
    for (size_t i = 0; i < d_sequences_.size(); ++i) {
      start_gradient(i, chunk, buffers.sequence_gradients[i]);
    }
    clear_chunk(chunk);
    clear_vectors(chunk, buffers);
  }
  void start_gradient(size_t i, const Chunk& chunk, T* copy) {
    const Sequence<const T>& given = gradients_.sequences[i];
    if (given.data == nullptr) return;
    if (copy == nullptr) {
      const int64_t stride = call_.batch > 1 ? given.stride_b : given.stride_t;
      d_sequences_[i] = rows_at(given.data, stride, given.stride_t, chunk.first);
    } else {
      this->copy_steps(copy, given, chunk);
      d_sequences_[i] = compact(copy, given.width);
    }
  }

  template <class P>
  void clear_rows(const Rows& rows, int64_t width, const Chunk& chunk, const Span& span) {
    if (rows.exists()) {
      backend_.zero(rows.matrix<P>(chunk, span, 0, width));
    }
  }
  // Zeroes gradients of all steps that are added to.
  void clear_chunk(const Chunk& chunk) {
    const Span whole = chunk.whole();
    for (size_t i = 0; i < d_inputs_.size(); ++i) {
      if (!flow_.inputs[i].gradient.is_zeroed) continue;
      if (d_inputs_[i].is_storage) {
        clear_rows<T>(d_inputs_[i], program_.inputs[i], chunk, whole);
      } else {
        clear_rows<A>(d_inputs_[i], program_.inputs[i], chunk, whole);
      }
    }
    for (size_t a = 0; a < d_arrays_.size(); ++a) {
      if (!flow_.arrays[a].gradient.is_zeroed) continue;
      clear_rows<O>(d_arrays_[a], program_.arrays[a].columns, chunk, whole);
    }
    for (size_t v = 0; v < d_values_.size(); ++v) {
      if (!flow_.values[v].gradient.is_zeroed || !d_values_[v].is_compact()) continue;
      clear_rows<A>(d_values_[v], program_.values[v].columns, chunk, whole);
    }
    for (size_t j = 0; j < d_before_.size(); ++j) {
      if (!flow_.carries[j].gradient.is_zeroed || !d_before_[j].is_compact()) continue;
      clear_rows<A>(d_before_[j], program_.carries[j].width, chunk, whole);
    }
  }
  // Zeroes the gradients of vectors that steps add to.
  void clear_vectors(const Chunk& chunk, const Buffers& buffers) {
    for (size_t s = 0; s < program_.stages.size(); ++s) {
      const Stage& stage = program_.stages[s];
      if (!Buffers::adds_steps(stage)) continue;
      for (size_t i = 0; i < stage.inputs.size(); ++i) {
        O* const rows = buffers.vector_gradients[s][i];
        if (rows != nullptr) backend_.zero(vector_rows<O>(rows, stage, i, chunk));
      }
    }
  }
  // The rows of the gradient of input i of a stage, which is a vector.
  template <class P>
  Matrix<P> vector_rows(P* data, const Stage& stage, size_t i, const Chunk& chunk) const {
    const int64_t rows = Buffers::vector_rows(stage, chunk.steps, chunk.batch, chunk.rows());
    return Matrix<P>::contiguous(data, rows, stage.inputs[i].columns(stage.width));
  }
  // Zeroes gradients of one step that are added to.
  void clear_step(const Chunk& chunk, int64_t s) {
    for (size_t v = 0; v < d_values_.size(); ++v) {
      if (!flow_.values[v].gradient.is_zeroed || d_values_[v].is_compact()) continue;
      clear_rows<A>(d_values_[v], program_.values[v].columns, chunk, {s, 1});
    }
    for (size_t j = 0; j < d_before_.size(); ++j) {
      if (!flow_.carries[j].gradient.is_zeroed || d_before_[j].is_compact()) continue;
      clear_rows<A>(d_before_[j], program_.carries[j].width, chunk, {s, 1});
    }
  }

  // What forward has not kept

  // Makes again the results that products and stages read.  All steps at once, except for stages
  // that depend on a carry which forward has kept before the chunk only.
  void make_values(const Chunk& chunk) {
    for (size_t j = 0; j < before_.size(); ++j) {
      if (!program_.carries[j].is_in_sequence()) {
        const int64_t width = program_.carries[j].width;
        copy_rows(after_[j], call_.kept[j] + chunk.index * call_.batch * width, width);
      } else if (before_[j].exists()) {
        gather_states(j, chunk);
      }
    }
    const auto run = [&](const Item& item) {
      if (item.is_stage ? !program_.stages[size_t(item.index)].is_sequential : !call_.is_saved()) {
        run_item(item, chunk);
      }
    };
    program_.for_items(Phase::Before, run);
    program_.for_items(Phase::Step, run);
    if (has_sequential_steps()) {
      const int64_t row_work = this->shared_row_work([](const Product&) { return false; });
      this->share_steps(*this, chunk, row_work, [&](Backward& pass) {
        for (int64_t t = 0; t < chunk.steps; ++t) pass.make_step(chunk, t);
      });
    }
    program_.for_items(Phase::After, run);
  }
  void gather_states(size_t j, const Chunk& chunk) {
    this->for_spans(chunk, false, !chunk.is_full,
                    [&](const Span& span) { this->gather_from_sequence(j, chunk, span); });
  }
  bool has_sequential_steps() const {
    const auto& carries = program_.carries;
    const auto& stages = program_.stages;
    return std::any_of(carries.begin(), carries.end(),
                       [](const Carry& carry) { return !carry.is_in_sequence(); }) ||
           std::any_of(stages.begin(), stages.end(),
                       [](const Stage& stage) { return stage.is_sequential; });
  }
  void make_step(const Chunk& chunk, int64_t t) {
    const int64_t s = chunk.step(t);
    if (chunk.rows_of(s) == 0) return;
    this->enter_step(chunk, t);
    program_.for_items(Phase::Step, [&](const Item& item) {
      if (item.is_stage && program_.stages[size_t(item.index)].is_sequential) {
        run_item(item, chunk, s);
      }
    });
    this->leave_step(chunk, t);
  }

  // Gradients

  void backward_chunk(const Chunk& chunk, const Buffers& buffers) {
    const auto at_once = [&](const Item& item) { backward_item(item, chunk, buffers); };
    program_.for_items_reversed(Phase::After, at_once);
    const int64_t row_work =
        this->shared_row_work([&](const Product& p) { return !flow_.is_deferred(p); });
    this->share_steps(*this, chunk, row_work, [&](Backward& pass) {
      for (int64_t t = chunk.steps - 1; t >= 0; --t) {
        if (chunk.rows_of(chunk.step(t)) > 0) pass.backward_step(chunk, t, buffers);
      }
    });
    program_.for_items_reversed(Phase::Step, [&](const Item& item) {
      if (!item.is_stage && flow_.is_deferred(program_.products[size_t(item.index)])) at_once(item);
    });
    program_.for_items_reversed(Phase::Before, at_once);
  }
  void backward_item(const Item& item, const Chunk& chunk, const Buffers& buffers) {
    const size_t index = size_t(item.index);
    if (item.is_stage) {
      for_stage_spans(index, chunk,
                      [&](const Span& span) { backward_stage(index, chunk, span, buffers); });
    } else {
      backward_product(index, chunk, chunk.whole());
    }
  }
  void backward_step(const Chunk& chunk, int64_t t, const Buffers& buffers) {
    const int64_t s = chunk.step(t);
    clear_step(chunk, s);
    for (size_t v = 0; v < values_.size(); ++v) {
      if (flow_.is_collected(v) && needs_value_[v] && flow_.values[v].has_gradient) {
        collect(v, chunk, s);
      }
    }
    program_.for_items_reversed(Phase::Step, [&](const Item& item) {
      const size_t index = size_t(item.index);
      if (item.is_stage) {
        backward_stage(index, chunk, {s, 1}, buffers);
      } else if (!flow_.is_deferred(program_.products[index])) {
        backward_product(index, chunk, {s, 1});
      }
    });
    for (size_t j = 0; j < d_before_.size(); ++j) {
      if (!is_unwanted(j, chunk, s)) leave_carry(j, chunk, s);
    }
  }
  // A value that was made before the steps gets its gradient as a part of the next step's carry.
  void collect(size_t v, const Chunk& chunk, int64_t s) {
    const Value& value = program_.values[v];
    const size_t j = size_t(value.carry);
    const CarryPart<A> step{value.columns,
                            chunk.first + s,
                            call_.mask,
                            d_after_[j] + value.carry_offset,
                            program_.carries[j].width,
                            static_cast<A*>(d_values_[v].at(chunk, s)),
                            d_values_[v].stride,
                            flow_.values[v].collect_adds};
    backend_.carry_part(step, chunk.rows_of(s));
  }
  // The gradient of the state before step s is that of the state after the step before.
  void leave_carry(size_t j, const Chunk& chunk, int64_t s) {
    const int64_t width = program_.carries[j].width, t = chunk.first + s;
    A* const before = static_cast<A*>(d_before_[j].at(chunk, s));
    if (call_.mask.any()) {
      T* steps = gradients_.reset_steps[j];
      if (steps != nullptr) steps += t * call_.batch * width;
      const CarryGradient<T> step{width,
                                  t,
                                  call_.mask,
                                  before,
                                  d_after_[j],
                                  call_.reset_to[j].kind,
                                  gradients_.reset_rows[j],
                                  steps};
      backend_.carry_gradient(step, chunk.rows_of(s));
    } else if (d_before_[j].is_compact()) {
      copy_rows(d_after_[j], before, width);
    } else {
      d_after_[j] = static_cast<A*>(std::exchange(d_before_[j].data, d_after_[j]));
    }
  }

  void backward_stage(size_t index, const Chunk& chunk, const Span& span, const Buffers& buffers) {
    if (!needs_stage(index)) return;
    const Stage& stage = program_.stages[index];
    StageArgs args = this->stage_args(index, chunk, span);
    for (size_t k = 0; k < stage.outputs.size(); ++k) {
      if (stage.outputs[k].has_gradient()) {
        read_gradient(args.out[k], size_t(stage.outputs[k].value), chunk, span.first);
      }
    }
    for (size_t i = 0; i < stage.inputs.size(); ++i) {
      const Operand& from = stage.inputs[i].operand;
      if (!needs(from)) continue;
      if (from.source == Source::Carry && span.count == 1 &&
          is_unwanted(size_t(from.index), chunk, span.first)) {
        continue;
      }
      StageIn& in = args.in[i];
      Rows rows = gradient_rows(from);
      int64_t column = from.offset, first = span.first;
      bool adds = flow_.stage_adds[index][i];
      if (from.source == Source::Vector) {
        O* const memory = buffers.vector_gradients[index][i];
        const int64_t columns = stage.inputs[i].columns(stage.width);
        rows = compact(memory, columns);
        if (Buffers::adds_steps(stage)) {
          rows = rows_at(memory, columns, call_.batch * columns);
          first /= Buffers::kAddedSteps;
          adds = true;
        }
        column = 0;
      }
      in.gradient = rows.at(chunk, first, column);
      in.gradient_stride = rows.stride;
      in.gradient_is_storage = rows.is_storage;
      in.adds = adds;
    }
    backend_.stage(call_.stages, int64_t(index), true, args, chunk.rows(span));
  }
  Rows gradient_rows(const Operand& operand) const {
    const size_t i = size_t(operand.index);
    switch (operand.source) {
      case Source::Input: return d_inputs_[i];
      case Source::Carry: return d_before_[i];
      case Source::Value: return d_values_[i];
      case Source::Array: return d_arrays_[i];
      default: return {};
    }
  }
  // The gradient of a result is the sum of those of its readers, of the sequence that it is kept
  // in, and of the carry of the next step.
  void read_gradient(StageOut& out, size_t v, const Chunk& chunk, int64_t s) const {
    const Value& value = program_.values[v];
    int count = 0;
    const auto add = [&](const Rows& rows, int64_t column) {
      if (!rows.exists()) return;
      out.gradient[count] = rows.at(chunk, s, column);
      out.gradient_stride[count] = rows.stride;
      out.gradient_is_storage[count++] = rows.is_storage;
    };
    add(d_values_[v], 0);
    if (value.is_in_sequence()) add(d_sequences_[size_t(value.sequence)], value.offset);
    if (value.is_of_carry() && !flow_.is_collected(v)) {
      const size_t j = size_t(value.carry);
      add(of_one_step(d_after_[j], program_.carries[j].width), value.carry_offset);
    }
  }

  Matrix<const O> product_gradient(const Product& product, const Chunk& chunk,
                                   const Span& span) const {
    return d_arrays_[size_t(product.array)].matrix<const O>(chunk, span, product.offset,
                                                            product.columns);
  }
  // The gradient of a product's operand.
  void backward_product(size_t index, const Chunk& chunk, const Span& span) {
    const Product& product = program_.products[index];
    const Operand& to = product.operand;
    if (!needs(to)) return;
    if (to.source == Source::Carry && span.count == 1 &&
        is_unwanted(size_t(to.index), chunk, span.first)) {
      return;
    }
    const Matrix<const O> d = product_gradient(product, chunk, span);
    const auto out = gradient_rows(to).template matrix<A>(chunk, span, to.offset, product.terms);
    const Matrix<const O> w = weights_[size_t(product.weight)].transposed();
    const bool adds = flow_.product_adds[index], is_of_input = to.source == Source::Input;
    if (product.phase == Phase::Step && !flow_.is_deferred(product)) {
      this->multiply_step(out, d, product, w, adds, is_of_input);
    } else {
      backend_.gemm(out, d, w, adds, is_of_input);
    }
  }

  // The gradients of weights, vectors and inputs, of all steps of a chunk at once.
  void leaf_gradients(const Chunk& chunk, const Buffers& buffers) {
    for (size_t p = 0; p < program_.products.size(); ++p) weight_gradient(p, chunk);
    vector_gradients(chunk, buffers);
    for (size_t i = 0; i < d_inputs_.size(); ++i) {
      if (gradients_.inputs[i] != nullptr && !Space::input_gradient_is_ready(call_)) {
        input_gradient(i, chunk);
      }
    }
  }
  void weight_gradient(size_t index, const Chunk& chunk) {
    const Product& product = program_.products[index];
    const size_t w = size_t(product.weight);
    const Matrix<A>& out = gradients_.weights[w];
    if (out.data == nullptr) return;
    for_product_spans(index, chunk, [&](const Span& span) {
      const Matrix<const O> d = product_gradient(product, chunk, span);
      const Matrix<const O> from = operand(product, chunk, span);
      const bool adds = has_weight_[w];
      has_weight_[w] = true;
      if (out.column_stride == 1) {
        backend_.gemm(out, from.transposed(), d, adds);
      } else {
        backend_.gemm(out.transposed(), d.transposed(), from, adds);
      }
    });
  }
  void vector_gradients(const Chunk& chunk, const Buffers& buffers) {
    ColumnSums<O> sums{};
    sums.accumulate = true;
    const auto finish = [&] {
      if (sums.count > 0) backend_.column_sums(sums);
      sums.count = 0;
    };
    const auto add = [&](const Matrix<const O>& rows, A* to) {
      if (sums.count == ColumnSums<O>::kMost || rows.rows != sums.rows) finish();
      sums.add(rows, to);
    };
    for (size_t a = 0; a < d_arrays_.size(); ++a) {
      const Array& array = program_.arrays[a];
      if (!array.has_bias() || gradients_.vectors[size_t(array.bias)] == nullptr) continue;
      add(d_arrays_[a].matrix<const O>(chunk, chunk.whole(), 0, array.columns),
          gradients_.vectors[size_t(array.bias)]);
    }
    for (size_t s = 0; s < program_.stages.size(); ++s) {
      const Stage& stage = program_.stages[s];
      for (size_t i = 0; i < stage.inputs.size(); ++i) {
        const O* const rows = buffers.vector_gradients[s][i];
        if (rows == nullptr) continue;
        const Operand& vector = stage.inputs[i].operand;
        add(vector_rows(rows, stage, i, chunk),
            gradients_.vectors[size_t(vector.index)] + vector.offset);
      }
    }
    finish();
  }
  // Copies the gradient of an input to the user's memory.
  void input_gradient(size_t i, const Chunk& chunk) {
    const int64_t width = program_.inputs[i];
    for_spans_of_steps(chunk, [&](const Span& span) {
      T* out = gradients_.inputs[i] + (chunk.first + span.first) * call_.batch * width;
      backend_.copy(Matrix<T>::contiguous(out, chunk.rows(span), width),
                    d_inputs_[i].matrix<const A>(chunk, span, 0, width));
    });
  }
  template <class F>
  void for_spans_of_steps(const Chunk& chunk, const F& f) const {
    this->for_spans(chunk, false, !chunk.is_full, f);
  }

  void take_places(Backward& other) {
    Base::take_places(other);
    d_before_.swap(other.d_before_);
    d_after_.swap(other.d_after_);
  }

  const Gradients<T>& gradients_;
  std::vector<bool> needs_value_, needs_array_;
  // Of the current chunk: the gradients of what the Rows of Pass are.
  std::vector<Rows> d_inputs_, d_arrays_, d_values_;
  std::vector<Rows> d_before_;  // of the states before steps
  std::vector<A*> d_after_;     // of the states after the latest step that is left to do
  std::vector<Rows> d_sequences_;
  std::vector<bool> has_weight_;  // whether a chunk has written the gradient of a weight
};

}  // namespace fusedrnn::program
