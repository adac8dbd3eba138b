// The operators: their schemas, and the functions behind them, for every device.
#pragma once
#include "draw.h"
#include "last_states.h"
#include "single_step.h"

namespace fusedrnn {

// The operator `forward`.  Its arguments are the schema's, in the same order.
template <class Platform>
ForwardResults forward_operator(int64_t cell, Tensor input, Tensor hx, MaybeTensor cx,
                                Weights weights, MaybeTensor lengths, MaybeTensor batch_sizes,
                                MaybeTensor reset, MaybeTensor eps, MaybeTensor seed,
                                double dropout, double zoneout, double cell_zoneout,
                                MaybeTensor mask_seed, MaybeTensor /*flat_version*/,
                                int64_t noise_stream, int64_t first_step, bool reverse,
                                int64_t chunk_size, int64_t workspace_bytes, int64_t backend,
                                int64_t tuning, bool save_gates) {
  return forward<Platform>({.cell = cell,
                            .input = input,
                            .hx = hx,
                            .cx = cx,
                            .weights = weights,
                            .lengths = lengths,
                            .batch_sizes = batch_sizes,
                            .reset = reset,
                            .eps = eps,
                            .seed = seed,
                            .dropout = dropout,
                            .zoneout = zoneout,
                            .cell_zoneout = cell_zoneout,
                            .mask_seed = mask_seed,
                            .noise_stream = noise_stream,
                            .first_step = first_step,
                            .reverse = reverse,
                            .chunk_size = chunk_size,
                            .workspace_bytes = workspace_bytes,
                            .backend = backend,
                            .tuning = tuning},
                           save_gates);
}

// The operator `backward`.  Its arguments are the schema's, in the same order.
template <class Platform>
BackwardResults backward_operator(
    MaybeTensor grad_output, MaybeTensor grad_h_n, MaybeTensor grad_c_n, int64_t cell, Tensor input,
    Tensor hx, MaybeTensor cx, Weights weights, MaybeTensor lengths, MaybeTensor batch_sizes,
    MaybeTensor reset, MaybeTensor eps, MaybeTensor seed, double dropout, double zoneout,
    double cell_zoneout, MaybeTensor mask_seed, MaybeTensor /*flat_version*/, int64_t noise_stream,
    int64_t first_step, bool reverse, int64_t chunk_size, int64_t workspace_bytes, int64_t backend,
    int64_t tuning, Tensor output, MaybeTensor saved_gates, MaybeTensor chunk_cell_states,
    int64_t needs) {
  return backward<Platform>(
      {.output = grad_output, .h_n = grad_h_n, .c_n = grad_c_n},
      {.cell = cell,
       .input = input,
       .hx = hx,
       .cx = cx,
       .weights = weights,
       .lengths = lengths,
       .batch_sizes = batch_sizes,
       .reset = reset,
       .eps = eps,
       .seed = seed,
       .dropout = dropout,
       .zoneout = zoneout,
       .cell_zoneout = cell_zoneout,
       .mask_seed = mask_seed,
       .noise_stream = noise_stream,
       .first_step = first_step,
       .reverse = reverse,
       .chunk_size = chunk_size,
       .workspace_bytes = workspace_bytes,
       .backend = backend,
       .tuning = tuning},
      {.output = output, .gates = saved_gates, .chunk_cell_states = chunk_cell_states}, needs);
}

// The operator `last_states`.  Its arguments are the schema's, in the same order.
template <class Platform>
LastStates last_states_operator(int64_t cell, Tensor input, Tensor hx, MaybeTensor cx,
                                Weights weights, MaybeTensor lengths, MaybeTensor batch_sizes,
                                MaybeTensor reset, MaybeTensor eps, MaybeTensor seed,
                                double dropout, double zoneout, double cell_zoneout,
                                MaybeTensor mask_seed, MaybeTensor /*flat_version*/,
                                int64_t noise_stream, int64_t first_step, bool reverse,
                                int64_t chunk_size, int64_t workspace_bytes, int64_t backend,
                                int64_t tuning, double inner_dropout) {
  return last_states<Platform>({.cell = cell,
                                .input = input,
                                .hx = hx,
                                .cx = cx,
                                .weights = weights,
                                .lengths = lengths,
                                .batch_sizes = batch_sizes,
                                .reset = reset,
                                .eps = eps,
                                .seed = seed,
                                .dropout = dropout,
                                .zoneout = zoneout,
                                .cell_zoneout = cell_zoneout,
                                .mask_seed = mask_seed,
                                .noise_stream = noise_stream,
                                .first_step = first_step,
                                .reverse = reverse,
                                .chunk_size = chunk_size,
                                .workspace_bytes = workspace_bytes,
                                .backend = backend,
                                .tuning = tuning},
                               inner_dropout);
}

// The operator `last_states_backward`.  Its arguments are the schema's, in the same order.
template <class Platform>
BackwardResults last_states_backward_operator(
    MaybeTensor grad_h_n, MaybeTensor grad_c_n, int64_t cell, Tensor input, Tensor hx,
    MaybeTensor cx, Weights weights, MaybeTensor lengths, MaybeTensor batch_sizes,
    MaybeTensor reset, MaybeTensor eps, MaybeTensor seed, double dropout, double zoneout,
    double cell_zoneout, MaybeTensor mask_seed, MaybeTensor /*flat_version*/, int64_t noise_stream,
    int64_t first_step, bool reverse, int64_t chunk_size, int64_t workspace_bytes, int64_t backend,
    int64_t tuning, Tensor part_h, MaybeTensor part_c, std::vector<bool> needs,
    double inner_dropout) {
  return last_states_backward<Platform>(grad_h_n, grad_c_n,
                                        {.cell = cell,
                                         .input = input,
                                         .hx = hx,
                                         .cx = cx,
                                         .weights = weights,
                                         .lengths = lengths,
                                         .batch_sizes = batch_sizes,
                                         .reset = reset,
                                         .eps = eps,
                                         .seed = seed,
                                         .dropout = dropout,
                                         .zoneout = zoneout,
                                         .cell_zoneout = cell_zoneout,
                                         .mask_seed = mask_seed,
                                         .noise_stream = noise_stream,
                                         .first_step = first_step,
                                         .reverse = reverse,
                                         .chunk_size = chunk_size,
                                         .workspace_bytes = workspace_bytes,
                                         .backend = backend,
                                         .tuning = tuning},
                                        inner_dropout, part_h, part_c, needs);
}

// The operators' schemas.  Python passes arguments after `*` by name; before it are only the
// tensors and what every call has.  No argument is a string: torch's stable ABI never frees a
// string.  flat_version is not read: a graph that saves it for backward notices that the weights
// have been written as a whole.
#define FUSEDRNN_CALL_SCHEMA                                                                   \
  "int cell, Tensor input, Tensor hx, Tensor? cx, Tensor[] weights, *, Tensor? lengths=None, " \
  "Tensor? batch_sizes=None, Tensor? reset=None, Tensor? eps=None, Tensor? seed=None, "        \
  "float dropout=0, float zoneout=0, float cell_zoneout=0, Tensor? mask_seed=None, "           \
  "Tensor? flat_version=None, "                                                                \
  "int noise_stream=0, int first_step=0, bool reverse=False, int chunk_size=0, "               \
  "int workspace_bytes=0, int backend=0, int tuning=0, "

constexpr const char* kForwardSchema =
    "forward(" FUSEDRNN_CALL_SCHEMA
    "bool save_gates=False) "
    "-> (Tensor output, Tensor h_n, Tensor c_n, Tensor saved_gates, Tensor chunk_cell_states)";
constexpr const char* kStepSchema =
    "step(int cell, Tensor input, Tensor? hx, Tensor? cx, Tensor[] weights, *, Tensor? eps=None, "
    "Tensor? seed=None, int tuning=0) -> (Tensor h, Tensor c)";
// The gradients that are needed, in the order of the bits of `needs`, which are those of backward.
constexpr const char* kStepBackwardSchema =
    "step_backward(Tensor? grad_h, Tensor? grad_c, int cell, Tensor input, Tensor? hx, Tensor? cx, "
    "Tensor[] weights, *, Tensor? eps=None, Tensor? seed=None, Tensor? flat_version=None, "
    "int tuning=0, int needs) -> Tensor[]";
constexpr const char* kBackwardSchema =
    "backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, " FUSEDRNN_CALL_SCHEMA
    "Tensor output, Tensor? saved_gates=None, Tensor? chunk_cell_states=None, int needs) "
    "-> (Tensor grad_input, Tensor grad_hx, Tensor grad_cx, Tensor grad_eps, Tensor grad_weights)";
// Layers of one direction each: hx, cx and eps have one entry per layer, `weights` all layers one
// after the other.  `needs` has an entry for input, hx, cx, eps and each weight; as bits of a
// number they would be too many.
constexpr const char* kLastStatesSchema =
    "last_states(" FUSEDRNN_CALL_SCHEMA
    "float inner_dropout=0) -> (Tensor h_n, Tensor c_n, Tensor part_h, Tensor part_c)";
constexpr const char* kLastStatesBackwardSchema =
    "last_states_backward(Tensor? grad_h_n, Tensor? grad_c_n, " FUSEDRNN_CALL_SCHEMA
    "Tensor part_h, Tensor? part_c=None, bool[] needs, float inner_dropout=0) "
    "-> (Tensor grad_input, Tensor grad_hx, Tensor grad_cx, Tensor grad_eps, Tensor grad_weights)";
#undef FUSEDRNN_CALL_SCHEMA
// Standard normals (distribution 0), as a layer draws eps, or uniform numbers strictly between 0
// and 1 (distribution 1).
constexpr const char* kDrawSchema =
    "draw(Tensor seed, int first_step, int steps, int batch, int width, int stream, "
    "int distribution, ScalarType dtype) -> Tensor";

// Every operator: its schema, and its function on a device.
template <class Library>
void define_operators(Library& m) {
  m.def(kForwardSchema);
  m.def(kStepSchema);
  m.def(kStepBackwardSchema);
  m.def(kBackwardSchema);
  m.def(kLastStatesSchema);
  m.def(kLastStatesBackwardSchema);
  m.def(kDrawSchema);
}
template <class Platform, class Library>
void implement_operators(Library& m) {
  m.impl("forward", TORCH_BOX(&forward_operator<Platform>));
  m.impl("step", TORCH_BOX(&step_operator<Platform>));
  m.impl("step_backward", TORCH_BOX(&step_backward_operator<Platform>));
  m.impl("backward", TORCH_BOX(&backward_operator<Platform>));
  m.impl("last_states", TORCH_BOX(&last_states_operator<Platform>));
  m.impl("last_states_backward", TORCH_BOX(&last_states_backward_operator<Platform>));
  m.impl("draw", TORCH_BOX(&draw_operator<Platform>));
}

}  // namespace fusedrnn
