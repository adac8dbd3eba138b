// The operators by which Python runs a program: they take the tensors of a call as its step has
// them, and make what the operators of program_ops.h read and write.
#pragma once
#include <vector>

#include "made_of_constants.h"
#include "program_ops.h"

namespace fusedrnn {

// What both operators get, by the names of the schema.
struct StepTensors {
  int64_t program;
  const Tensors& tensors;
  int64_t first_state, seq_len;
  const Tensors& reset_to;
  const std::vector<int64_t>& reset_kinds;
};

// What both make of it.
struct StepCall {
  explicit StepCall(const StepTensors& given)
      : known(Programs::all().at(given.program)), step(known.step_constants()),
        first_state(size_t(given.first_state)),
        first_constant(first_state + known.program.carries.size()), seq_len(given.seq_len),
        batch(rows_of(given.tensors)), like(given.tensors[first_state]),
        made(known.program, step, known.dtype, like, given.tensors.data() + first_constant,
             given.tensors.size() - first_constant) {
    places_of_inputs.reserve(step.inputs.size());
    inputs.reserve(step.inputs.size());
    carries.reserve(first_constant - first_state);
    for (const int64_t place : step.inputs) {
      FUSEDRNN_CHECK(place < given.first_state, "the program reads input ", place,
                     ", and there are ", given.first_state);
      places_of_inputs.push_back(size_t(place));
      inputs.push_back(flat(given.tensors[size_t(place)], {seq_len, batch}));
    }
    for (size_t j = first_state; j < first_constant; ++j) {
      carries.push_back(flat(given.tensors[j], {batch}));
    }
    const size_t states = known.program.carries.size(), kinds = given.reset_kinds.size();
    FUSEDRNN_CHECK(kinds == 0 || kinds == states, "reset_to and reset_kinds must have ", states,
                   " entries each, or none, got ", given.reset_to.size(), " and ", kinds);
    FUSEDRNN_CHECK(given.reset_to.empty() || given.reset_to.size() == given.reset_kinds.size(),
                   "expected ", given.reset_kinds.size(), " tensors for resets, got ",
                   given.reset_to.size());
    for (size_t j = 0; j < given.reset_kinds.size(); ++j) {
      const bool is_none = given.reset_to.empty() || ProgramArguments::is_none(given.reset_to[j]);
      if (is_none) {
        reset_to.push_back(none());
        continue;
      }
      const Tensor& to = given.reset_to[j];
      const bool is_steps = given.reset_kinds[j] == int64_t(program::ResetKind::Steps);
      FUSEDRNN_CHECK(to.dim() > 0, "a state must have a dimension for the batch");
      reset_to.push_back(is_steps ? flat(to, {seq_len, batch}) : flat(to, {to.size(0)}));
    }
  }

  // Stands for what is not there, or not wanted.
  Tensor none() const { return allocate(like, {0}, known.dtype, ""); }

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
    found.reserve(shapes.size());
    std::vector<int64_t> whole = leading;
    for (const std::vector<int64_t>& shape : shapes) {
      whole.resize(leading.size());
      whole.insert(whole.end(), shape.begin(), shape.end());
      found.push_back(allocate(like, whole, dtype, what, zeros));
    }
    return found;
  }
  Tensors flat_ones(const Tensors& tensors, const std::vector<int64_t>& leading) const {
    Tensors found;
    found.reserve(tensors.size());
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
  const Tensor& like;  // a tensor of the call
  MadeOfConstants made;
  std::vector<size_t> places_of_inputs;
  Tensors inputs, carries, reset_to;

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
                              int64_t seq_len, int64_t keeps, Tensors reset_to,
                              std::vector<int64_t> reset_kinds, int64_t chunk, bool reverse,
                              int64_t stream, int64_t first_step, MaybeTensor seed,
                              MaybeTensor lengths, MaybeTensor reset) {
  FUSEDRNN_CHECK(keeps >= 0 && keeps <= int64_t(Keeps::Sums), "keeps must be 0, 1 or 2, got ",
                 keeps);
  const StepCall call({program, tensors, first_state, seq_len, reset_to, reset_kinds});
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
      kept.push_back(allocate(call.like, shape, call.sum_dtype(), "states before chunks"));
    }
  }
  if (keeps == int64_t(Keeps::Sums)) {
    for (const program::Array& array : p.arrays) {
      const std::vector<int64_t> shape{seq_len * batch, array.columns};
      saved.push_back(allocate(call.like, shape, call.sum_dtype(), "sums of products"));
    }
  }
  const Tensors flat_sequences = call.flat_ones(sequences, {seq_len, batch});
  ProgramArguments args(
      {program, call.inputs, call.carries, call.made, call.reset_to, reset_kinds, lengths, reset,
       seed, stream, first_step, reverse, chunk, flat_sequences, kept, saved},
      /*is_backward=*/false);
  run_program_forward<Platform>(args, call.flat_ones(last, {batch}));
  Tensors results = sequences;
  results.reserve(sequences.size() + last.size() + kept.size() + saved.size());
  for (const Tensors* more : std::initializer_list<const Tensors*>{&last, &kept, &saved}) {
    results.insert(results.end(), more->begin(), more->end());
  }
  return results;
}

// The operator `program_call_backward`.  Its arguments are the schema's, in the same order.  An
// empty tensor of one dimension stands for no gradient.  It returns those of `tensors`, and then of
// `reset_to`, that are needed: as these are, but those of states that resets set as they are added
// up.
template <class Platform>
Tensors program_call_backward_operator(int64_t program, Tensors tensors, int64_t first_state,
                                       int64_t seq_len, Tensors kept, Tensors gradients,
                                       std::vector<bool> needs, bool is_part, Tensors reset_to,
                                       std::vector<int64_t> reset_kinds, int64_t chunk,
                                       bool reverse, int64_t stream, int64_t first_step,
                                       MaybeTensor seed, MaybeTensor lengths, MaybeTensor reset) {
  const StepCall call({program, tensors, first_state, seq_len, reset_to, reset_kinds});
  const program::Program& p = call.known.program;
  const int64_t batch = call.batch;
  const Tensor none = call.none();
  const size_t sequences = p.sequences.size(), states = p.carries.size();
  const size_t carries = call.kept_carries();
  FUSEDRNN_CHECK(
      kept.size() == sequences + carries || kept.size() == sequences + carries + p.arrays.size(),
      "expected ", sequences + carries, " tensors that forward has kept, or ",
      sequences + carries + p.arrays.size(), ", got ", kept.size());
  FUSEDRNN_CHECK(gradients.size() == sequences + states, "expected ", sequences + states,
                 " gradients, got ", gradients.size());
  FUSEDRNN_CHECK(needs.size() == tensors.size() + reset_to.size(), "expected ",
                 tensors.size() + reset_to.size(), " needs, got ", needs.size());
  const auto need = [&](size_t i) { return needs[i]; };
  const auto flat_or_none = [&](const Tensor& gradient, const std::vector<int64_t>& leading) {
    return ProgramArguments::is_none(gradient) ? none : call.flat(gradient, leading);
  };
  Tensors of_sequences, of_last, of_inputs, of_carries;
  for (size_t i = 0; i < sequences; ++i) {
    of_sequences.push_back(flat_or_none(gradients[i], {seq_len, batch}));
  }
  for (size_t j = 0; j < states; ++j) {
    of_last.push_back(flat_or_none(gradients[sequences + j], {batch}));
  }
  for (size_t i = 0; i < p.inputs.size(); ++i) {
    const bool is_needed = need(call.places_of_inputs[i]);
    of_inputs.push_back(is_needed ? allocate(none, {seq_len, batch, p.inputs[i]}, call.known.dtype,
                                             "a gradient of an input")
                                  : none);
  }
  for (size_t j = 0; j < states; ++j) {
    of_carries.push_back(
        need(call.first_state + j)
            ? allocate(none, {batch, p.carries[j].width}, call.known.dtype, "a gradient of a state")
            : none);
  }
  const Tensor* constants = tensors.data() + call.first_constant;
  const size_t count = tensors.size() - call.first_constant;
  const GradientsOfConstants of_constants(
      call.step, call.made, constants, count,
      [&](size_t i) { return need(call.first_constant + i); }, call.sum_dtype(), is_part, none,
      /*zeros=*/batch == 0);
  Tensors of_resets(states, none);
  for (size_t j = 0; j < reset_to.size(); ++j) {
    if (!need(tensors.size() + j)) continue;
    const bool is_steps = reset_kinds[j] == int64_t(program::ResetKind::Steps);
    const int64_t width = p.carries[j].width;
    of_resets[j] =
        is_steps ? allocate(none, {seq_len, batch, width}, call.known.dtype, "a gradient of states")
                 : allocate(none, {batch, width}, call.sum_dtype(), "a gradient of a state");
  }
  const auto part = [&](size_t first, size_t size) {
    return Tensors(kept.begin() + int64_t(first), kept.begin() + int64_t(first + size));
  };
  const Tensors flat_sequences = call.flat_ones(part(0, sequences), {seq_len, batch});
  const Tensors carries_kept = part(sequences, carries);
  const Tensors saved = part(sequences + carries, kept.size() - sequences - carries);
  ProgramArguments args(
      {program, call.inputs, call.carries, call.made, call.reset_to, reset_kinds, lengths, reset,
       seed, stream, first_step, reverse, chunk, flat_sequences, carries_kept, saved},
      /*is_backward=*/true);
  run_program_backward<Platform>(
      args, {of_sequences, of_last, of_inputs, of_carries, of_constants, of_resets});

  // As the step has them.
  const auto like = [&](const Tensor& gradient, const Tensor& tensor) {
    const Tensor own = in_shape_of(tensor, gradient);
    return own.scalar_type() == tensor.scalar_type() ? own
                                                     : torch::stable::to(own, tensor.scalar_type());
  };
  Tensors results(needs.size(), none);
  for (size_t i = 0; i < of_inputs.size(); ++i) {
    if (ProgramArguments::is_none(of_inputs[i])) continue;
    const size_t place = call.places_of_inputs[i];
    results[place] = like(of_inputs[i], tensors[place]);
  }
  for (size_t j = 0; j < states; ++j) {
    const size_t place = call.first_state + j;
    if (need(place)) results[place] = like(of_carries[j], tensors[place]);
  }
  for (size_t i = 0; i < count; ++i) {
    if (need(call.first_constant + i)) results[call.first_constant + i] = of_constants.of(i);
  }
  for (size_t j = 0; j < reset_to.size(); ++j) {
    const bool is_steps = reset_kinds[j] == int64_t(program::ResetKind::Steps);
    const bool is_wanted = is_steps && need(tensors.size() + j);
    results[tensors.size() + j] = is_wanted ? like(of_resets[j], reset_to[j]) : of_resets[j];
  }
  return results;
}

// tensors: inputs of the step, (seq_len, batch, ...) each, as many as first_state says; its state,
// of (batch, ...) each; and what StepConstants makes weights and vectors of.  keeps: as Keeps.
// reset_to: of each carry, or none; the rest as in program_forward.
#define FUSEDRNN_CALL_OPTIONS                                                                   \
  "Tensor[] reset_to, int[] reset_kinds, int chunk, bool reverse, int stream, int first_step, " \
  "Tensor? seed, Tensor? lengths, Tensor? reset) -> Tensor[]"

constexpr const char* kProgramCallSchema =
    "program_call(int program, Tensor[] tensors, int first_state, int seq_len, int "
    "keeps, " FUSEDRNN_CALL_OPTIONS;
// kept: what program_call returns without the last state.  gradients: of sequences and of the last
// state.  needs: which of `tensors` and of `reset_to` need a gradient.  is_part: gradients of
// constants will be added to those of other steps, and come in the type for that.
constexpr const char* kProgramCallBackwardSchema =
    "program_call_backward(int program, Tensor[] tensors, int first_state, int seq_len, "
    "Tensor[] kept, Tensor[] gradients, bool[] needs, bool is_part, " FUSEDRNN_CALL_OPTIONS;
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
