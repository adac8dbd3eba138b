// The workspace of one chunk of a program, carved from one allocation; the same code without memory
// counts its size.  Null where the user's own memory serves, or nothing is needed.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "../base/arena.h"
#include "../cpu/step.h"
#include "call.h"

namespace fusedrnn::program {

// T, O: types of tensors and of GEMM operands.
template <class Backend>
struct Workspace {
  using T = typename Backend::T;
  using O = typename Backend::O;
  using A = Acc<T>;
  static constexpr bool kTensorIsOperand = std::is_same_v<T, O>;

  static bool weight_is_ready(const Matrix<const T>& weight) {
    return kTensorIsOperand && weight.is_operand();
  }
  static bool vector_is_ready(const Matrix<const T>& vector) {
    return std::is_same_v<T, A> && (vector.column_stride == 1 || vector.columns == 1);
  }
  // Whether products and stages can read an input in the user's memory, where all rows take all
  // steps.
  static bool input_is_ready(const Call<T>& call, size_t i) {
    return (kTensorIsOperand || !call.flow->inputs[i].is_operand) &&
           call.inputs[i].has_uniform_rows(call.seq_len, call.batch);
  }
  // Whether a product in a step reads its weight as panels.
  static bool is_packed(const Call<T>& call, const Product& product, bool is_backward) {
    const bool is_of_step =
        product.phase == Phase::Step && !(is_backward && call.flow->is_deferred(product));
    const int64_t terms = is_backward ? product.columns : product.terms;
    const int64_t columns = is_backward ? product.terms : product.columns;
    return Backend::kPacks && is_of_step && cpu::packs(call.seq_len, terms, columns);
  }
  // Whether all products read a weight as panels, which are made of the user's own memory.
  static bool is_read_as_panels(const Call<T>& call, size_t w, bool is_backward) {
    const auto& products = call.program->products;
    return !is_backward && call.weights[w].is_operand() &&
           std::all_of(products.begin(), products.end(), [&](const Product& product) {
             return size_t(product.weight) != w || is_packed(call, product, is_backward);
           });
  }
  // Whether stages can read the gradient of a sequence in the user's memory.
  static bool gradient_is_ready(const Call<T>& call, const Sequence<const T>& gradient) {
    return (gradient.stride_w == 1 || gradient.width == 1) &&
           (call.seq_len == 1 || call.batch == 1 ||
            gradient.stride_t == call.batch * gradient.stride_b);
  }
  // Whether a carry in a sequence is copied before steps read it.
  static bool gathers(const Call<T>& call, size_t j) {
    return call.mask.any() || (!kTensorIsOperand && call.flow->carries[j].is_operand);
  }
  // Whether the driver writes the gradient of an input to the user's memory.
  static bool input_gradient_is_ready(const Call<T>& call) {
    return std::is_same_v<T, A> && !call.has_lengths();
  }

  // Memory for numbers of a value: of O for a product's operand, else of A.
  static void* take_value(const Value& value, int64_t rows, Arena& arena) {
    const int64_t count = times(rows, value.columns);
    if (value.is_operand) return arena.take<O>(count);
    return arena.take<A>(count);
  }

  struct Buffers {
    bool is_backward;
    std::vector<O*> weights, inputs;  // inputs: of a chunk
    std::vector<A*> packed;           // weights, as products in steps read them
    std::vector<A*> vectors;
    O* operand;  // of a product, where it must be copied
    ScratchNeeds needs;
    char* scratch[2];  // the backend's own memory

    // needs: all but the rows, which are filled in here.
    Buffers(const Call<T>& call, bool is_backward, const ScratchNeeds& needs, Arena& arena)
        : is_backward(is_backward), operand{}, needs(needs), scratch{} {
      const int64_t rows = this->needs.rows = times(call.chunk, call.batch);
      scratch[0] = arena.take<char>(Backend::scratch_bytes(this->needs));
      weights.reserve(call.weights.size());
      vectors.reserve(call.vectors.size());
      inputs.reserve(call.inputs.size());
      for (size_t w = 0; w < call.weights.size(); ++w) {
        const Matrix<const T>& weight = call.weights[w];
        const bool is_copied = !weight_is_ready(weight) && !is_read_as_panels(call, w, is_backward);
        weights.push_back(is_copied ? arena.take<O>(times(weight.rows, weight.columns)) : nullptr);
      }
      take_packed(call, arena);
      for (const Matrix<const T>& v : call.vectors) {
        vectors.push_back(vector_is_ready(v) ? nullptr : arena.take<A>(v.columns));
      }
      for (size_t i = 0; i < call.inputs.size(); ++i) {
        const bool is_ready = input_is_ready(call, i) && !call.has_lengths();
        inputs.push_back(is_ready ? nullptr : arena.take<O>(times(rows, call.inputs[i].width)));
      }
      operand = arena.take<O>(operand_numbers(call, is_backward));
    }

   private:
    void take_packed(const Call<T>& call, Arena& arena) {
      packed.assign(call.weights.size(), nullptr);
      for (const Product& product : call.program->products) {
        if (!is_packed(call, product, is_backward)) continue;
        A*& place = packed[size_t(product.weight)];
        if (place != nullptr) continue;
        const int64_t terms = is_backward ? product.columns : product.terms;
        const int64_t columns = is_backward ? product.terms : product.columns;
        place = arena.take<A>(cpu::packed_numbers(terms, columns));
      }
    }
    // The most numbers of an operand that is copied for its product.
    static int64_t operand_numbers(const Call<T>& call, bool is_backward) {
      int64_t most = 0;
      for (const Product& product : call.program->products) {
        if (!is_copied(call, product)) continue;
        const bool is_of_chunk = is_backward || product.phase != Phase::Step;
        const int64_t rows = is_of_chunk ? times(call.chunk, call.batch) : call.batch;
        most = std::max(most, times(rows, product.terms));
      }
      return most;
    }
    static bool is_copied(const Call<T>& call, const Product& product) {
      const size_t i = size_t(product.operand.index);
      switch (product.operand.source) {
        case Source::Value:
          return call.program->values[i].is_in_sequence() &&
                 (!kTensorIsOperand || call.has_lengths());
        case Source::Carry:
          return !call.program->carries[i].is_in_sequence() && !std::is_same_v<O, A>;
        default: return false;
      }
    }
  };

  struct Forward : Buffers {
    std::vector<A*> arrays;         // of a chunk, or of one step
    std::vector<void*> values;      // the same
    std::vector<void*> carries;     // before each step of a chunk, or before one step
    std::vector<A*> carries_after;  // of carries that are not in a sequence

    Forward(const Call<T>& call, Arena& arena) : Buffers(call, false, {}, arena) {
      const Program& p = *call.program;
      const int64_t of_chunk = times(call.chunk, call.batch);
      const auto rows = [&](bool all) { return all ? of_chunk : call.batch; };
      arrays.reserve(p.arrays.size());
      values.reserve(p.values.size());
      carries.reserve(p.carries.size());
      carries_after.reserve(p.carries.size());
      for (size_t a = 0; a < p.arrays.size(); ++a) {
        const bool is_ready = call.is_saved() && !call.has_lengths();
        const bool all = call.flow->arrays[a].is_of_chunk || call.is_saved();
        arrays.push_back(is_ready ? nullptr : arena.take<A>(times(rows(all), p.arrays[a].columns)));
      }
      for (size_t v = 0; v < p.values.size(); ++v) {
        values.push_back(
            is_elsewhere(call, v)
                ? nullptr
                : take_value(p.values[v], rows(call.flow->values[v].is_of_chunk()), arena));
      }
      for (size_t j = 0; j < p.carries.size(); ++j) {
        const int64_t width = p.carries[j].width;
        const int64_t count = times(rows(call.flow->carries[j].is_read_after), width);
        const bool in_sequence = p.carries[j].is_in_sequence();
        void* before = nullptr;
        if (!in_sequence) before = arena.take<A>(count);
        if (in_sequence && gathers(call, j)) before = arena.take<O>(count);
        carries.push_back(before);
        carries_after.push_back(in_sequence ? nullptr : arena.take<A>(times(call.batch, width)));
      }
    }

    // Whether a value is written to a sequence, or to the carry of the next step.
    static bool is_elsewhere(const Call<T>& call, size_t v) {
      const Value& value = call.program->values[v];
      return value.is_in_sequence() || (value.is_of_carry() && !call.flow->values[v].is_of_chunk());
    }
  };

  // Arrays of a chunk, unless said otherwise.
  struct Backward : Buffers {
    std::vector<A*> arrays;
    std::vector<O*> array_gradients;  // the same memory, where possible
    std::vector<void*> values;
    std::vector<A*> value_gradients;  // of a chunk, or of one step
    std::vector<void*> carries;       // before each step
    // Of one step: carries that are not in a sequence, the gradients of the states after it, and
    // those of the states before it, which are of the chunk if items after the steps read them.
    std::vector<A*> carries_after, carry_gradients, carry_gradients_before;
    std::vector<A*> input_gradients;
    std::vector<T*> sequence_gradients;             // copies
    std::vector<std::vector<O*>> vector_gradients;  // of each input of each stage: vector_rows()

    Backward(const Call<T>& call, const Gradients<T>& gradients, Arena& arena)
        : Buffers(call, true, scratch_needs(call, gradients), arena) {
      take_arrays(call, arena);
      take_values(call, arena);
      take_carries(call, arena);
      const int64_t rows = times(call.chunk, call.batch);
      input_gradients.reserve(call.inputs.size());
      sequence_gradients.reserve(gradients.sequences.size());
      vector_gradients.reserve(call.program->stages.size());
      const auto vector_numbers = [&](const Stage& stage, const StageInput& input) {
        return times(vector_rows(stage, call.chunk, call.batch, rows), input.columns(stage.width));
      };
      for (size_t i = 0; i < call.inputs.size(); ++i) {
        const bool is_needed = gradients.inputs[i] != nullptr && !input_gradient_is_ready(call);
        input_gradients.push_back(is_needed ? arena.take<A>(times(rows, call.inputs[i].width))
                                            : nullptr);
      }
      for (const Sequence<const T>& sequence : gradients.sequences) {
        const bool is_needed = sequence.data != nullptr && !gradient_is_ready(call, sequence);
        sequence_gradients.push_back(is_needed ? arena.take<T>(times(rows, sequence.width))
                                               : nullptr);
      }
      for (const Stage& stage : call.program->stages) {
        std::vector<O*>& of_stage = vector_gradients.emplace_back();
        of_stage.reserve(stage.inputs.size());
        for (const StageInput& input : stage.inputs) {
          const bool is_needed = input.operand.source == Source::Vector &&
                                 gradients.vectors[size_t(input.operand.index)] != nullptr;
          of_stage.push_back(is_needed ? arena.take<O>(vector_numbers(stage, input)) : nullptr);
        }
      }
    }

    // Whether backward adds up the gradients of a stage's vectors over steps as it does these, so
    // that they need a part of the memory and stay in the cache.  Not in 16 bits, which would round
    // each sum.
    static bool adds_steps(const Stage& stage) {
      return std::is_same_v<O, A> && stage.phase == Phase::Step;
    }
    // Steps [i kAddedSteps, (i + 1) kAddedSteps) of a chunk add up in the same rows.  Few, because
    // a sum of many numbers one by one would round more than sums of sums.
    static constexpr int64_t kAddedSteps = 16;
    // How many rows the gradients of a stage's vectors have in a chunk of `rows` rows.
    static int64_t vector_rows(const Stage& stage, int64_t steps, int64_t batch, int64_t rows) {
      return adds_steps(stage) ? times((steps + kAddedSteps - 1) / kAddedSteps, batch) : rows;
    }

    // Whether a value is in a sequence, is not read, or is only a part of the carry of the next
    // step and made when that is.
    static bool is_elsewhere(const Call<T>& call, size_t v) {
      const Value& value = call.program->values[v];
      if (value.is_in_sequence()) return true;
      return !value.is_read && (!value.is_of_carry() || call.flow->values[v].is_sequential);
    }

   private:
    void take_arrays(const Call<T>& call, Arena& arena) {
      const int64_t rows = times(call.chunk, call.batch);
      arrays.reserve(call.program->arrays.size());
      array_gradients.reserve(call.program->arrays.size());
      for (size_t a = 0; a < call.program->arrays.size(); ++a) {
        const int64_t count = times(rows, call.program->arrays[a].columns);
        arrays.push_back(call.is_saved() ? nullptr : arena.take<A>(count));
        if constexpr (std::is_same_v<O, A>) {
          if (!call.is_saved() && call.flow->arrays[a].is_in_place()) {
            array_gradients.push_back(arrays[a]);
            continue;
          }
        }
        array_gradients.push_back(arena.take<O>(count));
      }
    }
    void take_values(const Call<T>& call, Arena& arena) {
      const int64_t rows = times(call.chunk, call.batch);
      values.reserve(call.program->values.size());
      value_gradients.reserve(call.program->values.size());
      for (size_t v = 0; v < call.program->values.size(); ++v) {
        const Value& value = call.program->values[v];
        const Flow::OfValue& flow = call.flow->values[v];
        values.push_back(is_elsewhere(call, v) ? nullptr : take_value(value, rows, arena));
        const int64_t of_gradient = flow.has_chunk_gradient ? rows : call.batch;
        const bool is_needed = flow.has_gradient && flow.gradient.is_given;
        value_gradients.push_back(is_needed ? arena.take<A>(times(of_gradient, value.columns))
                                            : nullptr);
      }
    }
    void take_carries(const Call<T>& call, Arena& arena) {
      const int64_t rows = times(call.chunk, call.batch);
      for (auto* places : {&carries_after, &carry_gradients, &carry_gradients_before}) {
        places->reserve(call.program->carries.size());
      }
      carries.reserve(call.program->carries.size());
      for (size_t j = 0; j < call.program->carries.size(); ++j) {
        const Carry& carry = call.program->carries[j];
        const int64_t of_step = times(call.batch, carry.width);
        const int64_t of_chunk = times(rows, carry.width);
        const bool in_sequence = carry.is_in_sequence();
        void* before = nullptr;
        if (!in_sequence) before = arena.take<A>(of_chunk);
        if (in_sequence && gathers(call, j)) before = arena.take<O>(of_chunk);
        carries.push_back(before);
        carries_after.push_back(in_sequence ? nullptr : arena.take<A>(of_step));
        carry_gradients.push_back(arena.take<A>(of_step));
        carry_gradients_before.push_back(
            arena.take<A>(call.flow->carries[j].is_read_after ? of_chunk : of_step));
      }
    }
    static ScratchNeeds scratch_needs(const Call<T>& call, const Gradients<T>& /*gradients*/) {
      ScratchNeeds needs{};
      for (const Matrix<const T>& w : call.weights) {
        needs.weight_rows += w.rows;
        needs.largest_weight = std::max(needs.largest_weight, times(w.rows, w.columns));
      }
      // The most that one call of column_sums() has.
      int64_t widest = 0;
      for (const Array& array : call.program->arrays) widest = std::max(widest, array.columns);
      for (const int64_t width : call.program->vectors) widest = std::max(widest, width);
      needs.summed_columns = times(ColumnSums<O>::kMost, widest);
      return needs;
    }
  };
};

}  // namespace fusedrnn::program
