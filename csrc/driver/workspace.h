// The workspace of one chunk, carved from one allocation; the same code without memory counts its
// size.
#pragma once
#include <algorithm>
#include <type_traits>

#include "../cpu/step.h"
#include "layer.h"

namespace fusedrnn {

// T, O: types of tensors and of GEMM operands.  With T == O the user's tensors are operands as they
// are, and with T == Acc<T> the output itself is the carry.  But steps that are replayed need
// operand and carry at fixed addresses, and masked rows do not take h_{t-1} from the output.
// Buffers here hold copies where the user's memory does not serve.
template <class Backend>
struct Workspace {
  using T = typename Backend::T;
  using O = typename Backend::O;
  using A = Acc<T>;
  static constexpr bool kTensorIsOperand = std::is_same_v<T, O>;
  // Whether a GEMM can write the input's gradient directly.  If it takes two GEMMs, their sum must
  // be rounded only once.
  static constexpr bool kTensorIsResult = std::is_same_v<T, A> || Backend::kGemmRounds;
  static bool input_gradient_is_result(const Layer<T>& layer) {
    return std::is_same_v<T, A> || (Backend::kGemmRounds && layer.columns_alone() == 0);
  }

  static bool state_is_operand(const Layer<T>& layer) {
    return kTensorIsOperand && !Backend::kReplays && !layer.mask.any();
  }
  static bool carry_is_output(const Layer<T>& layer) {
    return std::is_same_v<T, A> && !Backend::kReplays && !layer.mask.any() &&
           !layer.has_cell_state();
  }
  // The same for backward, for all steps of a chunk.
  static bool states_are_operands(const Layer<T>& layer) {
    return kTensorIsOperand && !layer.mask.any();
  }

  // Whether the rows of a chunk in the workspace are only those that are active; see Chunk.  A GPU
  // replays or runs chunks of the same length and place, so there every step has all rows.
  static bool is_compact(const Layer<T>& layer) {
    return !Backend::kReplays && !layer.is_persistent && layer.mask.lengths != nullptr;
  }
  // Whether the rows of each chunk lie at one stride in the tensor.  Packed rows do if those in the
  // workspace are compact.
  template <class P>
  static bool has_uniform_rows(const Layer<T>& layer, const Sequence<P>& sequence) {
    if (!sequence.is_packed()) return sequence.has_uniform_rows(layer.seq_len, layer.batch);
    return is_compact(layer) && (sequence.stride_w == 1 || sequence.width == 1) &&
           sequence.stride_b >= sequence.width;
  }
  // Whether a chunk of the input's gradient is made in the workspace and copied: sums that are
  // rounded once, or compact rows that the tensor does not have.
  static bool copies_input_gradient(const Layer<T>& layer) {
    return !input_gradient_is_result(layer) || (is_compact(layer) && !layer.is_packed());
  }

  static bool weight_is_ready(const Matrix<const T>& weight) {
    return kTensorIsOperand && weight.is_operand();
  }
  static bool bias_is_ready(const Matrix<const T>& bias) {
    return std::is_same_v<T, A> && (bias.column_stride == 1 || bias.columns == 1);
  }

  // The terms and columns of a stage's product in a step, and whether its weight is packed for it.
  struct StepProduct {
    int64_t terms, columns;
    bool is_packed;
  };
  static StepProduct step_product(const Layer<T>& layer, int s, bool is_backward) {
    const int64_t from = layer.weight[layer.projection(s)].columns, to = layer.columns(s);
    const int64_t terms = is_backward ? to : from, columns = is_backward ? from : to;
    return {terms, columns, Backend::kPacks && cpu::packs(layer.seq_len, terms, columns)};
  }
  // The multiply-adds of a row in a step, if each thread may take a share of the rows through all
  // steps of a chunk, or else 0.  It then reads the weights of all steps, which must stay in its
  // cache; and a step may do nothing but multiply by packed weights and run stages on all rows.
  static int64_t shared_row_work(const Layer<T>& layer, bool is_backward) {
    int64_t work = 0;
    for (int s = 0; s <= layer.last(); ++s) {
      const StepProduct product = step_product(layer, s, is_backward);
      if (!product.is_packed) return 0;
      work += product.terms * product.columns;
    }
    const bool fits = work * int64_t(sizeof(A)) <= cpu::kLargeBytes;
    return fits && layer.rows_at == nullptr ? work : 0;
  }
  // Whether forward packs the input's weight as well, once and not for each chunk: where that takes
  // at most half of the input's memory, and no more than a chunk's input gates; but not in chunks
  // of one step, which the least workspace has.
  static bool packs_input(const Layer<T>& layer) {
    const int64_t terms = layer.sizes.input, columns = layer.input_columns();
    return Backend::kPacks && layer.chunk > 1 && terms <= layer.chunk * layer.batch &&
           columns * int64_t(sizeof(A)) <= layer.rows() * int64_t(sizeof(T)) / 2 &&
           cpu::packs(layer.seq_len, terms, columns);
  }
  // Whether a weight is read as panels alone, which are made of the user's own memory.  Backward
  // reads weights in products of whole chunks, too.
  static bool is_read_as_panels(const Layer<T>& layer, int p, bool is_backward) {
    if (is_backward || !layer.weight[p].is_operand()) return false;
    if (p == 0) return packs_input(layer);
    for (int s = 0; s <= layer.last(); ++s) {
      if (layer.projection(s) == p) return step_product(layer, s, is_backward).is_packed;
    }
    return false;
  }

  // Null where the user's own memory serves.
  struct Buffers {
    bool is_backward;
    O* weight[kMaxProjections];
    A* bias[kMaxProjections];
    A* packed[kMaxStages];  // the weight of each stage, as its product in a step reads it
    A* packed_input;        // only in forward
    T* eps;
    ScratchNeeds needs;
    char* scratch[2];  // the backend's own memory, for each stream

    // needs: all but the rows, which are filled in here.
    Buffers(const Layer<T>& layer, bool is_backward, const ScratchNeeds& needs, Arena& arena)
        : is_backward(is_backward), weight{}, bias{}, packed{}, packed_input{}, eps{}, needs(needs),
          scratch{} {
      const int64_t rows = this->needs.rows = layer.chunk * layer.batch;
      for (int i = 0; i < layer.buffers(); ++i) {
        scratch[i] = arena.take<char>(Backend::scratch_bytes(this->needs));
      }
      for (int p = 0; p < layer.cell.num_projections; ++p) {
        const Matrix<const T>& w = layer.weight[p];
        if (!weight_is_ready(w) && !is_read_as_panels(layer, p, is_backward)) {
          weight[p] = arena.take<O>(w.rows * w.columns);
        }
        if (layer.bias[p].data != nullptr && !bias_is_ready(layer.bias[p])) {
          bias[p] = arena.take<A>(layer.bias[p].columns);
        }
      }
      for (int s = 0; s <= layer.last(); ++s) {
        const StepProduct product = step_product(layer, s, is_backward);
        if (!product.is_packed) continue;
        packed[s] = arena.take<A>(cpu::packed_numbers(product.terms, product.columns));
      }
      if (!is_backward && packs_input(layer)) {
        const int64_t columns = layer.input_columns();
        packed_input = arena.take<A>(cpu::packed_numbers(layer.sizes.input, columns));
      }
      if (layer.eps.data != nullptr && !has_uniform_rows(layer, layer.eps)) {
        eps = arena.take<T>(rows * layer.sizes.latent);
      }
    }
  };

  // Memory for the input of a chunk, or null if it need not be copied.  Packed rows are copied as
  // padded ones are: the bits of a product may depend on where in memory its operands are.
  static O* take_input(const Layer<T>& layer, Arena& arena) {
    if (kTensorIsOperand && layer.mask.lengths == nullptr && layer.dropout == 0 &&
        has_uniform_rows(layer, layer.input)) {
      return nullptr;
    }
    return arena.take<O>(layer.chunk * layer.batch * layer.sizes.input);
  }

  // Memory for a chunk of a packed tensor, or null if tensors are not packed or serve as they are.
  static T* take_packed(const Layer<T>& layer, int64_t width, Arena& arena) {
    return layer.is_packed() && !is_compact(layer)
               ? arena.take<T>(layer.chunk * layer.batch * width)
               : nullptr;
  }

  struct Forward : Buffers {
    O* x;                                          // of a chunk
    A *input_gates[2], *hidden_gates[kMaxStages];  // of a chunk, alternating; of one step
    O *operand[kMaxStages], *h;                    // of one step
    A* carry;
    // Only with a persistent kernel: h after the chunk, and the exchange between blocks.
    O* h_after;
    char* exchange;
    T* output;  // of a chunk, if it is to be packed

    bool takes_turns;

    A* input_gates_of(int64_t chunk) const { return input_gates[takes_turns ? chunk % 2 : 0]; }

    Forward(const Layer<T>& layer, Arena& arena)
        : Buffers(layer, false, {}, arena), x(take_input(layer, arena)), input_gates{},
          hidden_gates{}, operand{}, h{}, carry{}, h_after{}, exchange{}, output{},
          takes_turns(layer.overlaps) {
      for (int i = 0; i < layer.buffers(); ++i) {
        input_gates[i] = arena.take<A>(layer.chunk * layer.batch * layer.input_columns());
      }
      for (int s = 0; s <= layer.last(); ++s) {
        if (layer.adds_up(s) || layer.is_persistent) continue;
        hidden_gates[s] = arena.take<A>(layer.batch * layer.columns(s));
      }
      for (int s = 0; s < layer.last(); ++s) {
        if (!layer.is_persistent) operand[s] = arena.take<O>(layer.batch * layer.width(s));
      }
      if (!state_is_operand(layer)) h = arena.take<O>(layer.batch * layer.sizes.output);
      if (layer.is_persistent) {
        h_after = arena.take<O>(layer.batch * layer.sizes.output);
        exchange = arena.take<char>(layer.persistent.workspace_bytes(layer.chunks() > 1 ? 2 : 1));
      }
      if (!carry_is_output(layer)) carry = arena.take<A>(layer.batch * layer.sizes.hidden);
      output = take_packed(layer, layer.sizes.output, arena);
    }
  };

  // Memory for numbers of a chunk and for their gradients, `columns` and `gradient_columns` per
  // row. Steps that are launched one by one put their gradients where the numbers of later steps
  // were, which nothing reads any more, so the smaller of the two arrays takes extra memory for one
  // step only.  A persistent kernel presets the gradients, and some rows of the batch may be ahead
  // of others: then the two arrays do not overlap.
  static A* take_numbers(const Layer<T>& layer, int64_t columns, O** gradient,
                         int64_t gradient_columns, Arena& arena) {
    if (layer.is_persistent) return arena.take<A>(layer.chunk * layer.batch * columns);
    const int64_t numbers = layer.batch * columns * int64_t(sizeof(A));  // bytes of a step
    const int64_t gradients = layer.batch * gradient_columns * int64_t(sizeof(O));
    // Where the second array starts, such that each of its steps begins after the same step of the
    // first array has ended.
    const auto begin = [&](int64_t first, int64_t second) {
      return Arena::aligned(first + (layer.chunk - 1) * std::max<int64_t>(first - second, 0));
    };
    const int64_t ahead = begin(numbers, gradients), reversed = begin(gradients, numbers);
    char* const memory = arena.take<char>(
        std::max(ahead + layer.chunk * gradients, reversed + layer.chunk * numbers));
    if (memory == nullptr) return nullptr;
    const bool is_reversed = layer.mask.direction < 0;
    *gradient = reinterpret_cast<O*>(is_reversed ? memory : memory + ahead);
    return reinterpret_cast<A*>(is_reversed ? memory + reversed : memory);
  }

  // The recomputed intermediates of a chunk, and the gradients that take their place.
  struct Recomputed {
    GatePlanes<A> planes;    // GEMM results; those of earlier stages only until the next stage
    A* factors[kMaxStages];  // of stages that have factors
    int factor_blocks;       // how many are stored; only the first without a gradient of eps
    GatePlanes<O> gradient;  // gradients of GEMM results; the same memory if O is A
    O* x;                    // the input, if it must be copied
    Matrix<const O> input;   // the input as an operand, set by recompute()
    O *operand[kMaxStages], *h;
    char* exchange;          // of a persistent kernel: contiguous with its gradients
    A *dx, *cell_states;     // cell_states: before each step
    T *output, *grad_input;  // output: before each step

    Recomputed() = default;
    Recomputed(const Layer<T>& layer, const Gradients<T>& gradients, Arena& arena)
        : planes{}, factors{}, factor_blocks(gradients.eps == nullptr ? 1 : 2), gradient{},
          x(take_input(layer, arena)), input{}, operand{}, h{}, exchange{}, dx{}, cell_states{},
          output(take_packed(layer, layer.sizes.output, arena)), grad_input{} {
      const int64_t rows = layer.chunk * layer.batch;
      const int recurrent_stage = layer.recurrent_stage();
      if (layer.is_persistent || std::is_same_v<O, A>) {
        arena.keep_together(layer.is_persistent);
        gradient = GatePlanes<O>::carve(layer, layer.last(), rows, arena);
        arena.keep_together(false);
      }
      if (layer.is_persistent) exchange = arena.take<char>(layer.persistent.workspace_bytes());
      if constexpr (std::is_same_v<O, A>) {
        planes = gradient;
        for (int s = 0; s < recurrent_stage; ++s) factors[s] = planes.hidden_gates[s];
        factor_blocks = 2;  // as many as there are gradients
      } else {
        const int64_t alone = layer.columns_alone(),
                      recurrent_columns = layer.columns(recurrent_stage);
        planes.input_gates = take_numbers(layer, alone, &gradient.input_gates, alone, arena);
        planes.hidden_gates[recurrent_stage] =
            take_numbers(layer, recurrent_columns, &gradient.hidden_gates[recurrent_stage],
                         recurrent_columns, arena);
        for (int s = 0; s < recurrent_stage; ++s) {
          // GEMM results are kept where the recurrent stage's results will be, or if they do not
          // fit there, where the stage's factors will be.
          const bool have_place = layer.columns(s) <= recurrent_columns;
          const bool has_factors = traits(layer.cell.stages[s].kind).has_factors;
          if (!have_place) factor_blocks = 2;
          const int64_t columns = !have_place   ? layer.columns(s)
                                  : has_factors ? factor_blocks * layer.width(s)
                                                : 0;
          factors[s] =
              take_numbers(layer, columns, &gradient.hidden_gates[s], layer.columns(s), arena);
          planes.hidden_gates[s] = have_place ? planes.hidden_gates[recurrent_stage] : factors[s];
        }
        for (int s = recurrent_stage + 1; s <= layer.last(); ++s) {
          take_numbers(layer, 0, &gradient.hidden_gates[s], layer.columns(s), arena);
        }
      }
      for (int s = 0; s < layer.last(); ++s) operand[s] = arena.take<O>(rows * layer.width(s));
      if (!states_are_operands(layer)) h = arena.take<O>(rows * layer.sizes.output);
      if (layer.has_cell_state()) cell_states = arena.take<A>(rows * layer.sizes.hidden);
      if (gradients.input != nullptr) {
        grad_input = take_packed(layer, layer.sizes.input, arena);
      }
      if (gradients.input != nullptr && copies_input_gradient(layer)) {
        dx = take_input_gradient(layer, arena);
      }
    }

   private:
    // Memory for the input's gradient: the recurrent stage's GEMM results, which nothing reads any
    // more, or new memory if there is no room.
    A* take_input_gradient(const Layer<T>& layer, Arena& arena) const {
      const int64_t rows = layer.chunk * layer.batch, width = layer.sizes.input;
      const int64_t columns = layer.columns(layer.recurrent_stage());
      // Their gradients may have taken half of that memory, the first half if time runs backwards.
      const int64_t room = std::is_same_v<O, A> ? 0 : layer.is_persistent ? columns : columns / 2;
      if (width > room) return arena.take<A>(rows * width);
      A* const first = planes.hidden_gates[layer.recurrent_stage()];
      if (first == nullptr || layer.mask.direction >= 0) return first;
      return first + rows * (columns - width);
    }
  };

  struct Backward : Buffers {
    Recomputed chunk[2];              // alternating
    A *dh, *dc, *dstage[kMaxStages];  // of one step
    T* grad_output;                   // of a chunk
    bool takes_turns;

    Recomputed& of(int64_t index) { return chunk[takes_turns ? index % 2 : 0]; }
    const Recomputed& of(int64_t index) const { return chunk[takes_turns ? index % 2 : 0]; }

    Backward(const Layer<T>& layer, const Gradients<T>& gradients, Arena& arena)
        : Buffers(layer, true, scratch_needs(layer, gradients), arena), chunk{}, dh{}, dc{},
          dstage{}, grad_output{}, takes_turns(layer.overlaps) {
      for (int i = 0; i < layer.buffers(); ++i) chunk[i] = Recomputed(layer, gradients, arena);
      for (int s = 0; s < layer.last() && !layer.is_persistent; ++s) {
        dstage[s] = arena.take<A>(layer.batch * layer.width(s));
      }
      if (layer.has_cell_state()) dc = arena.take<A>(layer.batch * layer.sizes.hidden);
      dh = arena.take<A>(layer.batch * layer.sizes.output);
      if (gradients.output.data != nullptr && !has_uniform_rows(layer, gradients.output)) {
        grad_output = arena.take<T>(layer.chunk * layer.batch * layer.sizes.output);
      }
    }

   private:
    static ScratchNeeds scratch_needs(const Layer<T>& layer, const Gradients<T>& gradients) {
      ScratchNeeds needs{};
      for (int p = 0; p < layer.cell.num_projections; ++p) {
        const Matrix<const T>& w = layer.weight[p];
        if (gradients.bias[p] != nullptr) needs.summed_columns += w.rows;
        needs.weight_rows += w.rows;
        needs.largest_weight = std::max(needs.largest_weight, w.rows * w.columns);
      }
      return needs;
    }
  };
};

}  // namespace fusedrnn
