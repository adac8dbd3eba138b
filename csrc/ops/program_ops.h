// The operators of programs: a whole sequence by the steps of a compiled cell, and its gradients.
#pragma once
#include <cstdio>
#include <exception>
#include <vector>

#include "../driver/memory_model.h"
#include "../program/driver.h"
#include "program_arguments.h"

namespace fusedrnn {

// Takes the steps of a call.
// last: memory for the carries after them.
template <class Platform>
void run_program_forward(ProgramArguments& args, const Tensors& last) {
  args.check_last(last);
  if (args.batch() == 0) return;
  Platform platform(args.like(), Tuning::of(0));
  args.place(platform);
  dispatch_dtype("a program", args.known().dtype, [&](auto element) {
    using T = decltype(element);
    using Backend = BackendOf<Platform, T>;
    const program::Call<T> c = args.call<T>();
    std::vector<T*> ends;
    ends.reserve(last.size());
    for (const Tensor& l : last) ends.push_back(pointer<T>(l));
    const Tensor workspace = allocate(args.like(), {program::forward_workspace_bytes<Backend>(c)},
                                      ScalarType::Byte, "the workspace");
    platform.compute(times(c.seq_len, c.batch), program::row_work(*c.program), false, [&] {
      program::Forward<Backend>(platform.template backend<T>(), c)
          .run(ends, workspace.mutable_data_ptr());
    });
  });
}

// The operator `program_forward`.  Its arguments are the schema's, in the same order.
template <class Platform>
void program_forward_operator(int64_t program, Tensors inputs, Tensors carries, Tensors weights,
                              Tensors vectors, Tensors reset_to, std::vector<int64_t> reset_kinds,
                              MaybeTensor lengths, MaybeTensor reset, MaybeTensor seed,
                              int64_t stream, int64_t first_step, bool reverse, int64_t chunk,
                              Tensors sequences, Tensors last, Tensors kept, Tensors saved) {
  Constants constants;
  ProgramArguments args({program, inputs, carries, constants, reset_to, reset_kinds, lengths, reset,
                         seed, stream, first_step, reverse, chunk, sequences, kept, saved},
                        /*is_backward=*/false);
  constants = args.checked(weights, vectors);
  run_program_forward<Platform>(args, last);
}

// Computes gradients of a call; those of weights and vectors only if there are rows.
template <class Platform>
void run_program_backward(ProgramArguments& args, const ProgramGradients& given) {
  args.check_gradients(given);
  if (args.batch() == 0) return;
  Platform platform(args.like(), Tuning::of(0));
  args.place(platform);
  dispatch_dtype("a program", args.known().dtype, [&](auto element) {
    using T = decltype(element);
    using Backend = BackendOf<Platform, T>;
    const program::Call<T> c = args.call<T>();
    Tensors dense;
    const program::Gradients<T> gradients = args.gradients<T>(given, dense);
    const Tensor workspace =
        allocate(args.like(), {program::backward_workspace_bytes<Backend>(c, gradients)},
                 ScalarType::Byte, "the workspace");
    platform.compute(times(c.seq_len, c.batch), program::row_work(*c.program), true, [&] {
      program::Backward<Backend>(platform.template backend<T>(), c, gradients)
          .run(workspace.mutable_data_ptr());
    });
  });
}

// The operator `program_backward`.  Its arguments are the schema's, in the same order.
template <class Platform>
void program_backward_operator(int64_t program, Tensors inputs, Tensors carries, Tensors weights,
                               Tensors vectors, Tensors reset_to, std::vector<int64_t> reset_kinds,
                               MaybeTensor lengths, MaybeTensor reset, MaybeTensor seed,
                               int64_t stream, int64_t first_step, bool reverse, int64_t chunk,
                               Tensors sequences, Tensors kept, Tensors saved,
                               Tensors grad_sequences, Tensors grad_last, Tensors grad_inputs,
                               Tensors grad_carries, Tensors grad_weights, Tensors grad_vectors,
                               Tensors grad_reset_to) {
  Constants constants;
  ProgramArguments args({program, inputs, carries, constants, reset_to, reset_kinds, lengths, reset,
                         seed, stream, first_step, reverse, chunk, sequences, kept, saved},
                        /*is_backward=*/true);
  constants = args.checked(weights, vectors);
  const ConstantGradients of_constants = args.checked_gradients(grad_weights, grad_vectors);
  run_program_backward<Platform>(
      args, {grad_sequences, grad_last, grad_inputs, grad_carries, of_constants, grad_reset_to});
  if (args.batch() > 0) return;
  for (const Tensors* gradients : {&grad_weights, &grad_vectors}) {
    for (Tensor gradient : *gradients) torch::stable::zero_(gradient);
  }
}

// Counts the workspace of a program before there are tensors.  As WorkspaceCount in
// driver/memory_model.h: for_any assumes everything that can make a call take more, lengths, resets
// and copies of all tensors.
template <class Memory>
WorkspaceBytes program_workspace(const KnownProgram& known, int64_t seq_len, int64_t batch,
                                 int64_t steps, bool for_any) {
  using T = typename Memory::T;
  using A = Acc<T>;
  static T there{};  // only pointed to, never read or written
  static A sum{};
  static const int64_t length{};
  static const bool reset{};
  const program::Program& p = known.program;
  program::Call<T> c{};
  program::Gradients<T> d{};
  c.program = &p;
  c.flow = &known.flow;
  c.seq_len = seq_len;
  c.batch = batch;
  c.chunk = steps;
  const auto sequence = [&](int64_t width) -> Sequence<const T> {
    if (for_any) return {&there, width, 0, 0, 0};
    return {&there, width, batch * width, width, 1};
  };
  for (const int64_t width : p.inputs) c.inputs.push_back(sequence(width));
  for (const int64_t width : p.sequences) d.sequences.push_back(sequence(width));
  for (const int64_t width : p.vectors) {
    c.vectors.push_back({&there, 1, width, width, for_any ? 0 : 1});
  }
  c.weights.resize(size_t(p.weights()));
  for (const program::Product& product : p.products) {
    const int64_t row_stride = for_any ? 0 : 1, column_stride = for_any ? 0 : product.terms;
    c.weights[size_t(product.weight)] = {&there, product.terms, product.columns, row_stride,
                                         column_stride};
  }
  if (for_any) {
    c.mask = {&length, &reset, seq_len, batch, 1};
    c.rows_at = &length;
  }
  d.inputs.assign(p.inputs.size(), &there);
  d.vectors.assign(p.vectors.size(), &sum);
  Arena forward, backward;
  typename program::Workspace<Memory>::Backward(c, d, backward);
  if (for_any) c.saved.assign(p.arrays.size(), &sum);
  typename program::Workspace<Memory>::Forward(c, forward);
  return {forward.size_bytes(), backward.size_bytes()};
}

// The steps of a chunk, and the bytes of both workspaces.
struct ProgramPlan {
  int64_t steps;
  WorkspaceBytes workspace;
};

// Chunks are as long as the caller asks; or as long as possible with both passes within
// workspace_bytes, whatever tensors a call has; or else program_chunk() chooses.
template <class Memory>
ProgramPlan plan_program(const KnownProgram& known, int64_t seq_len, int64_t batch,
                         int64_t chunk_size, int64_t workspace_bytes) {
  FUSEDRNN_CHECK(seq_len > 0, "expected a sequence of at least one step, got ", seq_len);
  FUSEDRNN_CHECK(chunk_size >= 0, "chunk_size must be 0 (automatic) or more, got ", chunk_size);
  FUSEDRNN_CHECK(workspace_bytes >= 0, "workspace_bytes must be 0 (automatic) or more, got ",
                 workspace_bytes);
  FUSEDRNN_CHECK(chunk_size == 0 || workspace_bytes == 0,
                 "chunk_size and workspace_bytes exclude each other");
  ProgramArguments::check_program_sizes(known, seq_len, batch);
  const int64_t rows = std::max<int64_t>(batch, 1);
  const auto count = [&](int64_t steps, bool for_any) {
    return program_workspace<Memory>(known, seq_len, rows, steps, for_any);
  };
  int64_t steps = ProgramArguments::program_chunk(known, chunk_size, seq_len, rows);
  if (workspace_bytes > 0 && batch > 0) {
    const auto fits = [&](int64_t most) { return count(most, true).most() <= workspace_bytes; };
    FUSEDRNN_CHECK(fits(1), "workspace_bytes must be at least ", count(1, true).most(),
                   " for a program with sequences of (", seq_len, ", ", batch, "), got ",
                   workspace_bytes);
    int64_t least = 1, most = seq_len;
    while (least < most) {
      const int64_t middle = least + (most - least + 1) / 2;
      if (fits(middle)) {
        least = middle;
      } else {
        most = middle - 1;
      }
    }
    // As few chunks as possible, and of equal length.
    steps = Chunks(seq_len, rows, known.stages.is_for_gpu()).within(least);
  }
  return {steps, count(steps, workspace_bytes > 0)};
}

#define FUSEDRNN_PROGRAM_SCHEMA                                                          \
  "int program, Tensor[] inputs, Tensor[] carries, Tensor[] weights, Tensor[] vectors, " \
  "Tensor[] reset_to, int[] reset_kinds, *, Tensor? lengths=None, Tensor? reset=None, "  \
  "Tensor? seed=None, int stream=0, int first_step=0, bool reverse=False, int chunk=0, "

constexpr const char* kProgramForwardSchema =
    "program_forward(" FUSEDRNN_PROGRAM_SCHEMA
    "Tensor(a!)[] sequences, Tensor(b!)[] last, Tensor(c!)[] kept, Tensor(d!)[] saved) -> ()";
constexpr const char* kProgramBackwardSchema =
    "program_backward(" FUSEDRNN_PROGRAM_SCHEMA
    "Tensor[] sequences, Tensor[] kept, Tensor[] saved, Tensor[] grad_sequences, "
    "Tensor[] grad_last, Tensor(a!)[] grad_inputs, Tensor(b!)[] grad_carries, "
    "Tensor(c!)[] grad_weights, Tensor(d!)[] grad_vectors, Tensor(e!)[] grad_reset_to) -> ()";
#undef FUSEDRNN_PROGRAM_SCHEMA

// What Python calls through ctypes.  They return less than 0 after an error, whose text is then in
// `error`.
template <class F>
int64_t with_error(char* error, int64_t error_size, const F& f) {
  const auto explain = [&](const char* text) {
    if (error != nullptr && error_size > 0) {
      std::snprintf(error, size_t(error_size), "%s", text);
    }
    return int64_t(-1);
  };
  try {
    return f();
  } catch (const std::exception& failure) {
    return explain(failure.what());
  } catch (...) {
    return explain("fusedrnn: an unknown error");
  }
}

// Writes the steps of a chunk of a program, and the bytes of the workspaces of forward and
// backward.  Memory: of the backend that runs it.
template <template <class> class Memory>
int64_t write_program_plan(int64_t program, int64_t seq_len, int64_t batch, int64_t dtype,
                           int64_t chunk_size, int64_t workspace_bytes, int64_t* plan, char* error,
                           int64_t error_size) {
  return with_error(error, error_size, [&]() -> int64_t {
    const KnownProgram& known = Programs::all().at(program);
    FUSEDRNN_CHECK(Programs::dtype_of(dtype) == known.dtype, "this program is for ",
                   torch::headeronly::toString(known.dtype), ", got ",
                   torch::headeronly::toString(Programs::dtype_of(dtype)));
    dispatch_dtype("a program", known.dtype, [&](auto element) {
      const ProgramPlan made = plan_program<Memory<decltype(element)>>(known, seq_len, batch,
                                                                       chunk_size, workspace_bytes);
      plan[0] = made.steps;
      plan[1] = made.workspace.forward;
      plan[2] = made.workspace.backward;
    });
    return 0;
  });
}

}  // namespace fusedrnn
