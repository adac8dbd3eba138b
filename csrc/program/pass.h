// What forward and backward of a program have in common: where the numbers of a chunk are, its
// products and its stages.
//
// Longer than 350 lines, because products, stages and carries read the same rows.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "workspace.h"

namespace fusedrnn::program {

template <class Backend>
class Pass {
 public:
  using T = typename Backend::T;

  Pass(const Backend& backend, const Call<T>& call)
      : backend_(backend), call_(call), program_(*call.program), flow_(*call.flow),
        inputs_(program_.inputs.size()), arrays_(program_.arrays.size()),
        values_(program_.values.size()), results_(program_.values.size()),
        before_(program_.carries.size()), after_(program_.carries.size()) {}

 protected:
  using O = typename Backend::O;
  using A = Acc<T>;
  using Space = Workspace<Backend>;
  using Buffers = typename Space::Buffers;
  static constexpr bool kTensorIsOperand = Space::kTensorIsOperand;

  // Rows

  template <class P>
  static Rows rows_at(P* data, int64_t stride, int64_t step_stride, int64_t first = 0) {
    using Number = std::remove_const_t<P>;
    return {const_cast<Number*>(data), stride, step_stride, first, std::is_same_v<Number, T>,
            int64_t(sizeof(Number))};
  }
  template <class P>
  static Rows compact(P* data, int64_t width) {
    return rows_at(data, width, Rows::kCompact);
  }
  template <class P>
  static Rows of_one_step(P* data, int64_t width) {
    return rows_at(data, width, 0);
  }
  // Memory that take_value() has given.
  static Rows value_rows(void* data, const Value& value, bool is_of_chunk) {
    const int64_t step_stride = is_of_chunk ? Rows::kCompact : 0;
    if (value.is_operand) return rows_at(static_cast<O*>(data), value.columns, step_stride);
    return rows_at(static_cast<A*>(data), value.columns, step_stride);
  }
  // Columns of a sequence from one on; shift: of steps.
  Rows sequence_rows(int64_t sequence, int64_t column, const Chunk& chunk,
                     int64_t shift = 0) const {
    const int64_t width = program_.sequences[size_t(sequence)];
    return rows_at(call_.sequences[size_t(sequence)] + column, width, call_.batch * width,
                   chunk.first + shift);
  }
  // The states that step s reads.
  Rows carry_rows(size_t j, const Chunk& chunk, int64_t s) const {
    if (before_[j].exists()) return before_[j];
    const Carry& carry = program_.carries[j];
    if (chunk.starts_at(s)) return of_one_step(call_.carries[j], carry.width);
    return sequence_rows(carry.sequence, carry.offset, chunk, -chunk.direction());
  }
  Rows operand_rows(const Operand& operand, const Chunk& chunk, int64_t s) const {
    const size_t i = size_t(operand.index);
    switch (operand.source) {
      case Source::Input: return inputs_[i];
      case Source::Carry: return carry_rows(i, chunk, s);
      case Source::Value: return values_[i];
      case Source::Array: return arrays_[i];
      case Source::Vector: return rows_at(vectors_[i], 0, 0);
      case Source::Draw:
      case Source::None: break;
    }
    return {};
  }

  // Calls f for parts of a chunk whose rows a product or stage can read at once: for each step, if
  // each_step, or else for all; but the initial states are not where the others are.
  template <class F>
  void for_spans(const Chunk& chunk, bool is_split, bool each_step, const F& f) const {
    if (each_step) {
      for (int64_t s = 0; s < chunk.steps && chunk.rows_of(s) > 0; ++s) f(Span{s, 1});
    } else if (is_split && chunk.begin == 0 && chunk.steps > 1) {
      f(Span{chunk.step(0), 1});
      f(Span{chunk.is_reversed ? 0 : 1, chunk.steps - 1});
    } else {
      f(chunk.whole());
    }
  }
  // Whether an operand is a carry that is read where its sequence is.
  bool is_split(const Operand& operand) const {
    return operand.source == Source::Carry && !before_[size_t(operand.index)].exists();
  }
  template <class F>
  void for_stage_spans(size_t index, const Chunk& chunk, const F& f) const {
    const auto& inputs = program_.stages[index].inputs;
    const bool splits = std::any_of(inputs.begin(), inputs.end(), [&](const StageInput& input) {
      return is_split(input.operand);
    });
    for_spans(chunk, splits, !chunk.is_full, f);
  }
  template <class F>
  void for_product_spans(size_t index, const Chunk& chunk, const F& f) const {
    for_spans(chunk, is_split(program_.products[index].operand), false, f);
  }

  // Makes weights and vectors available in the types that GEMMs and stages read.  The user's own
  // memory is used where it serves.
  void prepare(const Buffers& buffers) {
    backend_.use_scratch(buffers.scratch, buffers.needs);
    backend_.expect(call_.seq_len, call_.batch);
    operand_copy_ = buffers.operand;
    weights_.reserve(call_.weights.size());
    vectors_.reserve(call_.vectors.size());
    for (size_t w = 0; w < call_.weights.size(); ++w) {
      const Matrix<const T>& weight = call_.weights[w];
      if (Space::weight_is_ready(weight)) {
        if constexpr (kTensorIsOperand) weights_.push_back(weight);
        continue;
      }
      if (Space::is_read_as_panels(call_, w, buffers.is_backward)) {
        weights_.push_back({});
        continue;
      }
      // A weight of torch is (columns, terms) in memory.
      const auto copy = Matrix<O>::contiguous(buffers.weights[w], weight.columns, weight.rows);
      backend_.copy(copy, weight.transposed());
      weights_.push_back(Matrix<const O>(copy).transposed());
    }
    for (size_t v = 0; v < call_.vectors.size(); ++v) {
      const Matrix<const T>& vector = call_.vectors[v];
      if (Space::vector_is_ready(vector)) {
        if constexpr (std::is_same_v<T, A>) vectors_.push_back(vector.data);
        continue;
      }
      backend_.copy(Matrix<A>::contiguous(buffers.vectors[v], 1, vector.columns), vector);
      vectors_.push_back(buffers.vectors[v]);
    }
    if constexpr (Backend::kPacks) {
      packed_ = buffers.packed;
      for (size_t w = 0; w < packed_.size(); ++w) {
        if (packed_[w] == nullptr) continue;
        const auto pack = [&](const auto& weight) {
          backend_.pack(buffers.is_backward ? weight.transposed() : weight, packed_[w]);
        };
        if (call_.weights[w].is_operand()) {
          pack(call_.weights[w]);
        } else {
          pack(weights_[w]);
        }
      }
    }
  }

  // Inputs

  void start_inputs(const Chunk& chunk, const Buffers& buffers) {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Sequence<const T>& input = call_.inputs[i];
      if (chunk.is_full && Space::input_is_ready(call_, i)) {
        const int64_t stride = input.row_stride(call_.seq_len, call_.batch);
        inputs_[i] = rows_at(input.data, stride, input.stride_t, chunk.first);
      } else {
        copy_input(input, chunk, buffers.inputs[i]);
        inputs_[i] = compact(buffers.inputs[i], input.width);
      }
    }
  }
  // The data of finished rows may be NaN, and must not get into sums over all rows.
  void copy_input(const Sequence<const T>& input, const Chunk& chunk, O* copy) {
    copy_steps(copy, input, chunk);
    for (int64_t s = 0; s < chunk.steps && !chunk.is_full && chunk.rows_of(s) > 0; ++s) {
      backend_.clear(ClearStep<O>{input.width, (chunk.first + s) * call_.batch, call_.mask,
                                  copy + chunk.row(s) * input.width, false},
                     chunk.rows_of(s));
    }
  }
  // Copies the rows of a chunk, whatever their strides in memory.
  template <class To>
  void copy_steps(To* copy, const Sequence<const T>& sequence, const Chunk& chunk) {
    const int64_t width = sequence.width;
    if (chunk.is_full) {
      backend_.copy_steps(Sequence<To>::contiguous(copy, chunk.batch, width), 0, sequence,
                          chunk.first, chunk.steps, chunk.batch);
      return;
    }
    for (int64_t s = 0; s < chunk.steps && chunk.rows_of(s) > 0; ++s) {
      const int64_t rows = chunk.rows_of(s);
      backend_.copy(Matrix<To>::contiguous(copy + chunk.row(s) * width, rows, width),
                    Matrix<const T>{sequence.at(chunk.first + s), rows, width, sequence.stride_b,
                                    sequence.stride_w});
    }
  }

  // Carries

  // Copies the states of a part of a chunk to `out`.  P: the type in which they are after steps.
  template <class P, class To>
  void gather(size_t j, const Chunk& chunk, const Span& span, const P* after, int64_t stride,
              int64_t step_stride, To* out) {
    const CarryBefore<T, P, To> step{program_.carries[j].width,
                                     places(chunk, span),
                                     call_.mask,
                                     call_.carries[j],
                                     after,
                                     stride,
                                     step_stride,
                                     call_.reset_to[j],
                                     out};
    backend_.carry_before(step, chunk.rows(span));
  }
  Places places(const Chunk& chunk, const Span& span) const {
    return {chunk.first + span.first, span.count == 1 ? chunk.rows_of(span.first) : chunk.batch};
  }
  // The same for a carry in a sequence.
  void gather_from_sequence(size_t j, const Chunk& chunk, const Span& span) {
    const Carry& carry = program_.carries[j];
    const int64_t width = program_.sequences[size_t(carry.sequence)];
    const T* after = call_.sequences[size_t(carry.sequence)] + carry.offset;
    gather(j, chunk, span, after, width, call_.batch * width,
           static_cast<O*>(before_[j].at(chunk, span.first)));
  }

  // Carries that are not in a sequence.  after_[j] is the state after the latest step, or before
  // the chunk.  Without masks, a step writes it where the next step reads it.

  // Makes the states before step t of a chunk, and says where results go that are parts of the
  // states after it.
  void enter_step(const Chunk& chunk, int64_t t) {
    const int64_t s = chunk.step(t);
    for (size_t j = 0; j < before_.size(); ++j) {
      if (program_.carries[j].is_in_sequence()) continue;
      const int64_t width = program_.carries[j].width;
      if (call_.mask.any()) {
        gather(j, chunk, {s, 1}, after_[j], width, 0, static_cast<A*>(before_[j].at(chunk, s)));
      } else if (!before_[j].is_compact()) {
        after_[j] = static_cast<A*>(std::exchange(before_[j].data, after_[j]));
      } else if (t == 0) {
        copy_rows(static_cast<A*>(before_[j].at(chunk, s)), after_[j], width);
      }
    }
    for (size_t v = 0; v < values_.size(); ++v) {
      if (is_direct_[v]) results_[v] = part_after(v, chunk, t);
    }
  }
  Rows part_after(size_t v, const Chunk& chunk, int64_t t) const {
    const Value& value = program_.values[v];
    const size_t j = size_t(value.carry);
    const bool is_within = before_[j].is_compact() && !call_.mask.any() && t + 1 < chunk.steps;
    A* const state =
        is_within ? static_cast<A*>(before_[j].at(chunk, chunk.step(t + 1))) : after_[j];
    return of_one_step(state + value.carry_offset, program_.carries[j].width);
  }
  // Copies results that are parts of the states after step t, but are kept elsewhere.
  void leave_step(const Chunk& chunk, int64_t t) {
    const int64_t s = chunk.step(t);
    for (size_t v = 0; v < values_.size(); ++v) {
      const Value& value = program_.values[v];
      if (!value.is_of_carry() || value.is_in_sequence() || is_direct_[v]) continue;
      const Rows part = part_after(v, chunk, t);
      copy_from(part.matrix<A>(chunk, {s, 1}, 0, value.columns), values_[v], chunk, {s, 1}, 0);
    }
  }
  template <class To, class From>
  void copy_rows(To* out, const From* from, int64_t columns) {
    backend_.copy(Matrix<To>::contiguous(out, call_.batch, columns),
                  Matrix<const From>::contiguous(from, call_.batch, columns));
  }
  // Copies rows of either type.
  template <class To>
  void copy_from(const Matrix<To>& out, const Rows& rows, const Chunk& chunk, const Span& span,
                 int64_t column) {
    if (rows.is_storage) {
      backend_.copy(out, rows.matrix<const T>(chunk, span, column, out.columns));
    } else {
      backend_.copy(out, rows.matrix<const A>(chunk, span, column, out.columns));
    }
  }

  // Products

  // What a product reads, as a GEMM takes it; valid until the next call.
  Matrix<const O> operand(const Product& product, const Chunk& chunk, const Span& span) {
    const Operand& from = product.operand;
    const Rows rows = operand_rows(from, chunk, span.first);
    const bool is_at_once = span.count == 1 || chunk.is_full || rows.is_compact();
    const bool has_type = rows.is_storage ? kTensorIsOperand : std::is_same_v<O, A>;
    if (is_at_once && has_type) {
      return rows.matrix<const O>(chunk, span, from.offset, product.terms);
    }
    const auto copy = Matrix<O>::contiguous(operand_copy_, chunk.rows(span), product.terms);
    if (is_at_once) {
      copy_from(copy, rows, chunk, span, from.offset);
      return copy;
    }
    const int64_t first = chunk.row(span.first);
    for (int64_t s = span.first; s < span.first + span.count && chunk.rows_of(s) > 0; ++s) {
      copy_from(copy.row_range(chunk.row(s) - first, chunk.rows_of(s)), rows, chunk, {s, 1},
                from.offset);
    }
    return copy;
  }
  void multiply(size_t index, const Chunk& chunk, const Span& span) {
    const Product& product = program_.products[index];
    backend_.gemm(
        arrays_[size_t(product.array)].matrix<A>(chunk, span, product.offset, product.columns),
        operand(product, chunk, span), weights_[size_t(product.weight)], product.adds);
  }
  // The product of a step of forward.
  void multiply_step(size_t index, const Chunk& chunk, const Span& span) {
    const Product& product = program_.products[index];
    multiply_step(
        arrays_[size_t(product.array)].matrix<A>(chunk, span, product.offset, product.columns),
        operand(product, chunk, span), product, weights_[size_t(product.weight)], product.adds);
  }
  // out (+)= a w in a step, where w is the product's weight, in backward transposed.
  void multiply_step(const Matrix<A>& out, const Matrix<const O>& a, const Product& product,
                     const Matrix<const O>& w, bool accumulate, bool is_of_input = false) {
    if constexpr (Backend::kPacks) {
      const A* const panels = packed_[size_t(product.weight)];
      if (panels != nullptr) return backend_.gemm_packed(out, a, panels, accumulate);
    }
    backend_.gemm(out, a, w, accumulate, is_of_input);
  }

  // Steps

  // The multiply-adds of a row in a step, if each thread may take a share of the rows through all
  // steps of a chunk: as in Workspace::shared_row_work of driver/workspace.h.  Or else -1.
  // is_multiplied: whether steps multiply by the weight of a product.
  template <class F>
  int64_t shared_row_work(const F& is_multiplied) const {
    // In 16 bits, products of any width copy what they read to the same memory.
    if constexpr (!Backend::kPacks || !std::is_same_v<T, A>) return -1;
    if (call_.has_lengths()) return -1;
    int64_t work = 0;
    for (const Product& product : program_.products) {
      if (product.phase != Phase::Step || !is_multiplied(product)) continue;
      if (packed_[size_t(product.weight)] == nullptr) return -1;
      work += product.terms * product.columns;
    }
    return work * int64_t(sizeof(A)) <= cpu::kLargeBytes ? work : -1;
  }
  // Calls f(pass), which goes through steps of a chunk: for the pass itself, or for copies of it
  // that each take a share of the rows.  All of them end with the same places of states.
  template <class Derived, class F>
  static void share_steps(Derived& pass, const Chunk& chunk, int64_t row_work, const F& f) {
    if constexpr (Backend::kPacks) {
      if (row_work >= 0 && pass.backend_.can_share_rows(chunk.batch)) {
        const Derived before(pass);
        return pass.backend_.share_rows(chunk.batch, row_work * chunk.rows(), [&](int64_t first) {
          Derived own(before);
          f(own);
          if (first == 0) pass.take_places(own);
        });
      }
    }
    f(pass);
  }
  void take_places(Pass& other) {
    before_.swap(other.before_);
    after_.swap(other.after_);
    values_.swap(other.values_);
    results_.swap(other.results_);
  }

  // Stages

  // The arguments of a stage that forward and backward have in common.
  StageArgs stage_args(size_t index, const Chunk& chunk, const Span& span) const {
    const Stage& stage = program_.stages[index];
    const Places at = places(chunk, span);
    StageArgs args{};
    args.width = stage.width;
    args.first_t = at.first_t;
    args.batch = at.batch;
    args.first_step = call_.first_step;
    args.seed = call_.seed;
    args.lengths = chunk.is_full ? nullptr : call_.mask.lengths;
    for (size_t i = 0; i < stage.inputs.size(); ++i) {
      const StageInput& input = stage.inputs[i];
      const Operand& from = input.operand;
      StageIn& in = args.in[i];
      in.group = int32_t(input.group);
      if (from.source == Source::Draw) {
        in.offset = from.offset;
        in.stream = uint32_t(program_.streams[size_t(from.index)] + call_.stream);
      }
      const Rows rows = operand_rows(from, chunk, span.first);
      if (!rows.exists()) continue;
      in.data = rows.at(chunk, span.first, from.offset);
      in.stride = rows.stride;
      in.is_storage = rows.is_storage;
      if (from.source != Source::Array) continue;
      const Array& array = program_.arrays[size_t(from.index)];
      if (array.has_bias()) in.bias = vectors_[size_t(array.bias)] + from.offset;
    }
    for (size_t k = 0; k < stage.outputs.size(); ++k) {
      args.out[k].group = int32_t(stage.outputs[k].group);
    }
    return args;
  }
  // Makes the results of a stage that have a place.
  void run_stage(size_t index, const Chunk& chunk, const Span& span) {
    const Stage& stage = program_.stages[index];
    const auto& outputs = stage.outputs;
    const bool is_wanted = std::any_of(outputs.begin(), outputs.end(), [&](const StageOutput& o) {
      return results_[size_t(o.value)].exists();
    });
    if (!is_wanted) return;
    StageArgs args = stage_args(index, chunk, span);
    for (size_t k = 0; k < outputs.size(); ++k) {
      const size_t v = size_t(outputs[k].value);
      const Rows& rows = results_[v];
      if (!rows.exists()) continue;
      StageOut& out = args.out[k];
      out.data = rows.at(chunk, span.first);
      out.stride = rows.stride;
      out.is_storage = rows.is_storage;
      out.rounds = program_.values[v].is_operand && !rows.is_storage;
    }
    backend_.stage(call_.stages, int64_t(index), false, args, chunk.rows(span));
  }

  // An item over all steps of a chunk, or in one step.
  void run_item(const Item& item, const Chunk& chunk) {
    const size_t index = size_t(item.index);
    if (item.is_stage) {
      for_stage_spans(index, chunk, [&](const Span& span) { run_stage(index, chunk, span); });
    } else {
      for_product_spans(index, chunk, [&](const Span& span) { multiply(index, chunk, span); });
    }
  }
  void run_item(const Item& item, const Chunk& chunk, int64_t s) {
    const size_t index = size_t(item.index);
    if (item.is_stage) {
      run_stage(index, chunk, {s, 1});
    } else {
      multiply_step(index, chunk, {s, 1});
    }
  }

  Backend backend_;
  const Call<T>& call_;
  const Program& program_;
  const Flow& flow_;
  std::vector<Matrix<const O>> weights_;
  std::vector<const A*> vectors_;
  std::vector<A*> packed_;  // null if a weight is not packed
  O* operand_copy_ = nullptr;
  // Of the current chunk: what products and stages read, and where results go that are wanted.
  std::vector<Rows> inputs_, arrays_, values_, results_;
  std::vector<Rows> before_;     // the states before steps, where they are copied
  std::vector<A*> after_;        // of carries that are not in a sequence
  std::vector<bool> is_direct_;  // of each value: whether its only place is after_ of its carry
};

}  // namespace fusedrnn::program
