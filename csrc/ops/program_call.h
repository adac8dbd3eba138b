// The operators by which Python runs a program: they take the tensors of a call as its step has
// them, and make what the operators of program_ops.h read and write.
#pragma once
#include <vector>

#include "program_ops.h"

namespace fusedrnn {

// What both operators have in common.
struct StepCall {
  // All but the tensors has the names of the schema.
  StepCall(int64_t program, const Tensors& tensors, int64_t first_state, int64_t seq_len,
           const std::vector<int64_t>& reset_kinds)
      : known(Programs::all().at(program)), step(known.step_constants()),
        first_state(size_t(first_state)),
        first_constant(this->first_state + known.program.carries.size()), seq_len(seq_len),
        batch(rows_of(tensors)), none(allocate(tensors[this->first_state], {0}, known.dtype, "")),
        reset_to(reset_kinds.size(), none),
        made(known.program, step, known.dtype, tensors.data() + first_constant,
             tensors.size() - first_constant) {
    for (const int64_t i : step.inputs) {
      FUSEDRNN_CHECK(i < first_state, "the program reads input ", i, ", and there are ",
                     first_state);
      inputs.push_back(flat(tensors[size_t(i)], {seq_len, batch}));
    }
    for (size_t j = this->first_state; j < first_constant; ++j) {
      carries.push_back(flat(tensors[j], {batch}));
    }
  }

  // A tensor of (*leading, ...) as (*leading, width), in the program's type.
  Tensor flat(const Tensor& tensor, std::vector<int64_t> leading) const {
    const int64_t dims = int64_t(leading.size());
    FUSEDRNN_CHECK(
        tensor.dim() >= dims && std::equal(leading.begin(), leading.end(), tensor.sizes().begin()),
        "a tensor must have the dimensions ", shape_text({leading.data(), leading.size()}),
        " first, got ", shape_text(tensor.sizes()));
    const Tensor own =
        tensor.scalar_type() == known.dtype ? tensor : torch::stable::to(tensor, known.dtype);
    if (own.dim() == dims + 1) return own;
    int64_t width = 1;
    for (int64_t i = dims; i < own.dim(); ++i) width = times(width, own.size(i));
    leading.push_back(width);
    return torch::stable::reshape(own, {leading.data(), leading.size()});
  }

  // New tensors of (*leading, ...) each.
  Tensors new_ones(const std::vector<int64_t>& leading,
                   const std::vector<std::vector<int64_t>>& shapes, ScalarType dtype,
                   const char* what, bool zeros = false) const {
    Tensors found;
    for (const std::vector<int64_t>& shape : shapes) {
      std::vector<int64_t> whole = leading;
      whole.insert(whole.end(), shape.begin(), shape.end());
      found.push_back(allocate(none, whole, dtype, what, zeros));
    }
    return found;
  }
  Tensors flat_ones(const Tensors& tensors, const std::vector<int64_t>& leading) const {
    Tensors found;
    for (const Tensor& tensor : tensors) found.push_back(flat(tensor, leading));
    return found;
  }
  ScalarType sum_dtype() const {
    return known.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }
  size_t kept_carries() const {
    const auto& carries = known.program.carries;
    return size_t(std::count_if(carries.begin(), carries.end(), [](const program::Carry& carry) {
      return !carry.is_in_sequence();
    }));
  }

  const KnownProgram& known;
  const StepConstants& step;
  const size_t first_state, first_constant;
  const int64_t seq_len, batch;
  const Tensor none;  // stands for what is not there, or not wanted
  const Tensors reset_to;
  MadeOfConstants made;
  Tensors inputs, carries;

 private:
  int64_t rows_of(const Tensors& tensors) const {
    FUSEDRNN_CHECK(first_constant > first_state && first_constant <= tensors.size(), "expected ",
                   first_state, " inputs and ", known.program.carries.size(),
                   " states, one or more, got ", tensors.size(), " tensors");
    FUSEDRNN_CHECK(tensors[first_state].dim() > 0, "a state must have a dimension for the batch");
    return tensors[first_state].size(0);
  }
};

// What forward keeps for backward.
enum class Keeps { Nothing, Carries, Sums };

// The operator `program_call`.  Its arguments are the schema's, in the same order.  It returns
// sequences, the last state, and what it keeps, as program_forward writes them.
template <class Platform>
Tensors program_call_operator(int64_t program, Tensors tensors, int64_t first_state,
                              int64_t seq_len, int64_t keeps, int64_t chunk, bool reverse,
                              int64_t stream, MaybeTensor seed, MaybeTensor lengths,
                              MaybeTensor reset, std::vector<int64_t> reset_kinds) {
  FUSEDRNN_CHECK(keeps >= 0 && keeps <= int64_t(Keeps::Sums), "keeps must be 0, 1 or 2, got ",
                 keeps);
  const StepCall call(program, tensors, first_state, seq_len, reset_kinds);
  const program::Program& p = call.known.program;
  ProgramArguments::check_program_sizes(call.known, seq_len, call.batch);
  const int64_t batch = call.batch;
  const Tensors sequences = call.new_ones({seq_len, batch}, call.step.sequence_shapes,
                                          call.known.dtype, "a sequence", lengths.has_value());
  const Tensors last =
      call.new_ones({batch}, call.step.state_shapes, call.known.dtype, "the last state");
  Tensors kept, saved;
  if (keeps > 0) {
    const int64_t steps = ProgramArguments::program_chunk(call.known, chunk, seq_len, batch);
    for (const program::Carry& carry : p.carries) {
      if (carry.is_in_sequence()) continue;
      const std::vector<int64_t> shape{(seq_len + steps - 1) / steps, batch, carry.width};
      kept.push_back(allocate(call.none, shape, call.sum_dtype(), "states before chunks"));
    }
  }
  if (keeps == int64_t(Keeps::Sums)) {
    for (const program::Array& array : p.arrays) {
      const std::vector<int64_t> shape{seq_len * batch, array.columns};
      saved.push_back(allocate(call.none, shape, call.sum_dtype(), "sums of products"));
    }
  }
  run_program_forward<Platform>(
      {program, call.inputs, call.carries, call.made.weights, call.made.vectors, call.reset_to,
       reset_kinds, lengths, reset, seed, stream, 0, reverse, chunk,
       call.flat_ones(sequences, {seq_len, batch}), kept, saved},
      call.flat_ones(last, {batch}));
  Tensors results = sequences;
  for (const Tensors* more : std::initializer_list<const Tensors*>{&last, &kept, &saved}) {
    results.insert(results.end(), more->begin(), more->end());
  }
  return results;
}

// The operator `program_call_backward`.  Its arguments are the schema's, in the same order.  An
// empty tensor of one dimension stands for no gradient.  It returns those of `tensors` that are
// needed.
template <class Platform>
Tensors program_call_backward_operator(int64_t program, Tensors tensors, int64_t first_state,
                                       int64_t seq_len, Tensors kept, Tensors gradients,
                                       std::vector<bool> needs, int64_t chunk, bool reverse,
                                       int64_t stream, MaybeTensor seed, MaybeTensor lengths,
                                       MaybeTensor reset, std::vector<int64_t> reset_kinds) {
  const StepCall call(program, tensors, first_state, seq_len, reset_kinds);
  const program::Program& p = call.known.program;
  const int64_t batch = call.batch;
  const size_t sequences = p.sequences.size(), states = p.carries.size();
  const size_t carries = call.kept_carries();
  FUSEDRNN_CHECK(
      kept.size() == sequences + carries || kept.size() == sequences + carries + p.arrays.size(),
      "expected ", sequences + carries, " tensors that forward has kept, or ",
      sequences + carries + p.arrays.size(), ", got ", kept.size());
  FUSEDRNN_CHECK(gradients.size() == sequences + states, "expected ", sequences + states,
                 " gradients, got ", gradients.size());
  FUSEDRNN_CHECK(needs.size() <= tensors.size(), "expected ", tensors.size(), " needs, got ",
                 needs.size());
  const auto need = [&](size_t i) { return i < needs.size() && needs[i]; };
  const auto flat_or_none = [&](const Tensor& gradient, const std::vector<int64_t>& leading) {
    return ProgramArguments::is_none(gradient) ? call.none : call.flat(gradient, leading);
  };
  Tensors of_sequences, of_last, of_inputs, of_carries;
  for (size_t i = 0; i < sequences; ++i) {
    of_sequences.push_back(flat_or_none(gradients[i], {seq_len, batch}));
  }
  for (size_t j = 0; j < states; ++j) {
    of_last.push_back(flat_or_none(gradients[sequences + j], {batch}));
  }
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    const bool is_needed = need(size_t(call.step.inputs[i]));
    of_inputs.push_back(is_needed ? allocate(call.none, {seq_len, batch, p.inputs[i]},
                                             call.known.dtype, "a gradient of an input")
                                  : call.none);
  }
  for (size_t j = 0; j < states; ++j) {
    of_carries.push_back(need(call.first_state + j)
                             ? allocate(call.none, {batch, p.carries[j].width}, call.known.dtype,
                                        "a gradient of a state")
                             : call.none);
  }
  const Tensor* constants = tensors.data() + call.first_constant;
  const size_t count = tensors.size() - call.first_constant;
  const GradientsOfConstants of_constants(
      call.step, call.made, constants, count,
      [&](size_t i) { return need(call.first_constant + i); }, call.sum_dtype(), call.none);
  const auto part = [&](size_t first, size_t size) {
    return Tensors(kept.begin() + int64_t(first), kept.begin() + int64_t(first + size));
  };
  run_program_backward<Platform>(
      {program, call.inputs, call.carries, call.made.weights, call.made.vectors, call.reset_to,
       reset_kinds, lengths, reset, seed, stream, 0, reverse, chunk,
       call.flat_ones(part(0, sequences), {seq_len, batch}), part(sequences, carries),
       part(sequences + carries, kept.size() - sequences - carries)},
      {of_sequences, of_last, of_inputs, of_carries, of_constants.weights, of_constants.vectors,
       Tensors(states, call.none)});

  // As the step has them.
  const auto like = [&](const Tensor& gradient, const Tensor& tensor) {
    std::vector<int64_t> shape(tensor.sizes().begin(), tensor.sizes().end()), strides(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) strides[i] = stride;
    const Tensor own = has_shape(gradient, shape) ? gradient : view(gradient, shape, strides);
    return own.scalar_type() == tensor.scalar_type() ? own
                                                     : torch::stable::to(own, tensor.scalar_type());
  };
  Tensors results(tensors.size(), call.none);
  for (size_t i = 0; i < of_inputs.size(); ++i) {
    if (ProgramArguments::is_none(of_inputs[i])) continue;
    const size_t place = size_t(call.step.inputs[i]);
    results[place] = like(of_inputs[i], tensors[place]);
  }
  for (size_t j = 0; j < states; ++j) {
    const size_t place = call.first_state + j;
    if (need(place)) results[place] = like(of_carries[j], tensors[place]);
  }
  for (size_t i = 0; i < count; ++i) {
    if (need(call.first_constant + i)) results[call.first_constant + i] = of_constants.of(i);
  }
  return results;
}

#define FUSEDRNN_CALL_OPTIONS                                                           \
  "int chunk, bool reverse, int stream, Tensor? seed, Tensor? lengths, Tensor? reset, " \
  "int[] reset_kinds) -> Tensor[]"

// chunk, stream, seed, lengths and reset as in program_forward.  reset_kinds: of each carry 0 for
// zero, or 3 for a carry that no reset changes; or none.
constexpr const char* kProgramCallSchema =
    "program_call(int program, Tensor[] tensors, int first_state, int seq_len, int "
    "keeps, " FUSEDRNN_CALL_OPTIONS;
constexpr const char* kProgramCallBackwardSchema =
    "program_call_backward(int program, Tensor[] tensors, int first_state, int seq_len, Tensor[] "
    "kept, "
    "Tensor[] gradients, bool[] needs, " FUSEDRNN_CALL_OPTIONS;
#undef FUSEDRNN_CALL_OPTIONS

template <class Library>
void define_program_operators(Library& m) {
  m.def(kProgramForwardSchema);
  m.def(kProgramBackwardSchema);
  m.def(kProgramCallSchema);
  m.def(kProgramCallBackwardSchema);
}
template <class Platform, class Library>
void implement_program_operators(Library& m) {
  m.impl("program_forward", TORCH_BOX(&program_forward_operator<Platform>));
  m.impl("program_backward", TORCH_BOX(&program_backward_operator<Platform>));
  m.impl("program_call", TORCH_BOX(&program_call_operator<Platform>));
  m.impl("program_call_backward", TORCH_BOX(&program_call_backward_operator<Platform>));
}

}  // namespace fusedrnn
