// The operators: their schemas, and the functions behind them, for every device.
#pragma once
#include "draw.h"
#include "last_states.h"

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

// A view of `tensor` with `more` leading dimensions of size one added, or removed if `more` is
// negative.
inline Tensor with_dimensions(const Tensor& tensor, int64_t more) {
  std::vector<int64_t> sizes, strides;
  for (int64_t i = 0; i < more; ++i) {
    sizes.push_back(1);
    strides.push_back(tensor.numel());
  }
  for (int64_t i = std::max<int64_t>(-more, 0); i < tensor.dim(); ++i) {
    sizes.push_back(tensor.size(i));
    strides.push_back(tensor.stride(i));
  }
  return view(tensor, sizes, strides);
}

// The operator `step`: one step with little overhead, without gradients.  input (B, I) or (I), hx
// and cx (B, H) or (H) and zeros if absent, eps (B, Z) or (Z) -> h (B, H) or (H), and c alike, or
// (0, B, H) if the cell has no cell state.
template <class Platform>
std::tuple<Tensor, Tensor> step_operator(int64_t cell, Tensor input, MaybeTensor hx, MaybeTensor cx,
                                         Weights weights, MaybeTensor eps, MaybeTensor seed,
                                         int64_t tuning) {
  FUSEDRNN_CHECK(cell >= 0 && cell < int64_t(std::size(kCells)), "there is no cell ", cell);
  const Cell& named = kCells[cell];
  FUSEDRNN_CHECK(!is_projected(named), named.name, " has no single steps");
  FUSEDRNN_CHECK(input.dim() == 1 || input.dim() == 2, "input must have 1 or 2 dimensions, got ",
                 shape_text(input.sizes()));
  const size_t reads_h = size_t(named.stages[0].projection);
  FUSEDRNN_CHECK(weights.size() > reads_h && weights[reads_h].dim() == 2, "weights[", reads_h,
                 "] must have 2 dimensions");
  const int64_t missing = 3 - input.dim();  // dimensions
  const int64_t batch = input.dim() == 2 ? input.size(0) : 1, width = weights[reads_h].size(1);
  const auto state = [&](const char* name, const MaybeTensor& given) {
    if (!given) return allocate(input, {1, batch, width}, input.scalar_type(), name, true);
    FUSEDRNN_CHECK(given->dim() == input.dim(), name, " must have ", input.dim(),
                   " dimensions as input has, got ", shape_text(given->sizes()));
    return with_dimensions(*given, missing);
  };
  const Tensor h = state("hx", hx);
  MaybeTensor c, noise;
  if (has_cell_state(named)) c = hx || cx ? state("cx", cx) : h;
  FUSEDRNN_CHECK(has_cell_state(named) || !cx, named.name, " takes no cx");
  if (eps) noise = with_dimensions(*eps, missing + 1);
  const Tensor sequence = with_dimensions(input, missing);
  const MaybeTensor none;
  const auto [output, h_n, c_n, saved_gates, chunk_cell_states] =
      forward<Platform>({.cell = cell,
                         .input = sequence,
                         .hx = h,
                         .cx = c,
                         .weights = weights,
                         .lengths = none,
                         .batch_sizes = none,
                         .reset = none,
                         .eps = noise,
                         .seed = seed,
                         .dropout = 0,
                         .zoneout = 0,
                         .cell_zoneout = 0,
                         .mask_seed = none,
                         .noise_stream = 0,
                         .first_step = 0,
                         .reverse = false,
                         .chunk_size = 0,
                         .workspace_bytes = 0,
                         .backend = 0,
                         .tuning = tuning},
                        /*save_gates=*/false);
  return {with_dimensions(h_n, -missing),
          has_cell_state(named) ? with_dimensions(c_n, -missing) : c_n};
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
  m.def(kBackwardSchema);
  m.def(kLastStatesSchema);
  m.def(kLastStatesBackwardSchema);
  m.def(kDrawSchema);
}
template <class Platform, class Library>
void implement_operators(Library& m) {
  m.impl("forward", TORCH_BOX(&forward_operator<Platform>));
  m.impl("step", TORCH_BOX(&step_operator<Platform>));
  m.impl("backward", TORCH_BOX(&backward_operator<Platform>));
  m.impl("last_states", TORCH_BOX(&last_states_operator<Platform>));
  m.impl("last_states_backward", TORCH_BOX(&last_states_backward_operator<Platform>));
  m.impl("draw", TORCH_BOX(&draw_operator<Platform>));
}

}  // namespace fusedrnn
