// What the operators do on every device: allocation, dispatch on dtype, one call of the driver for
// each direction.
//
// Platform is what a device adds, made anew for each call:
//   Platform(input, tuning)
//   gpu()                        its facts for plans, or null
//   keep(host)                   of memory that the call's work reads: as long as that may be done
//   backend<T>()                 the driver's backend
//   computing(multiply_adds)     an object that lives while the driver works
#pragma once
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "driver.h"

namespace fusedrnn {

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <class F>
auto dispatch_dtype(const Tensor& input, const F& f) {
  switch (input.scalar_type()) {
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    case ScalarType::BFloat16: return f(BFloat16{});
    case ScalarType::Half: return f(Half{});
    default:
      fail("input must be float32, float64, bfloat16 or float16, got ",
           torch::headeronly::toString(input.scalar_type()));
  }
}

// dispatch_dtype(), a second time if a GPU has refused to launch a kernel: that is remembered, and
// what is planned then does without.
template <class F>
auto planned_anew(const Tensor& input, const F& f) {
  try {
    return dispatch_dtype(input, f);
  } catch (const LaunchRefused&) {
    return dispatch_dtype(input, f);
  }
}

template <class Platform, class T>
using BackendOf = decltype(std::declval<Platform&>().template backend<T>());

// output (T, B, D P), h_n (D, B, P), c_n (D, B, H) or empty, saved_gates: the pre-activations of
// all steps, empty unless they are to be saved, chunk_cell_states: c before each chunk, or empty.
// P is the number of features of h, which are the H of the cell unless it projects them.
using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Platform>
ForwardResults forward(const Call& call, bool save_gates) {
  const Tensor& input = call.input;
  Arguments args(call);
  Platform platform(input, args.tuning());
  args.place_lengths(platform);
  return planned_anew(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    const ScalarType dtype = input.scalar_type();
    const int64_t directions = args.directions(), batch = args.batch();
    const int64_t width = args.sizes().output, hidden = args.sizes().hidden;
    const Problem asked = args.problem(platform);
    const LayerPlan plan = plan_layer<BackendOf<Platform, T>>(asked);
    FUSEDRNN_CHECK(args.backend() != "persistent" || plan.forward.is_persistent,
                   "backend='persistent' is not possible here: ", reason(asked, plan));
    const int64_t gates_numel = save_gates ? args.kept_numel() : 0;
    const int64_t states_numel = args.states_numel(plan.steps);
    // Of finished rows nothing is written.
    Tensor output =
        allocate(input, args.shape(directions * width), dtype, "the output", args.has_padding());
    Tensor h_n = allocate(input, {directions, batch, width}, dtype, "h_n");
    Tensor c_n = allocate(input, {args.has_state() ? directions : 0, batch, hidden}, dtype, "c_n");
    Tensor saved_gates = allocate(input, {directions * gates_numel}, kScalarType<A>,
                                  "what recompute=False saves", args.has_lengths());
    Tensor chunk_cell_states = allocate(input, {directions * states_numel}, kScalarType<A>,
                                        "the cell states before each chunk");
    for (int64_t d = 0; d < directions && batch > 0; ++d) {
      Layer<T> problem = args.layer<T>(plan.steps, plan.forward, d);
      problem.output = pointer<T>(output) + d * width;
      problem.output_stride = directions * width;
      if (args.has_state()) problem.states = pointer<A>(chunk_cell_states) + d * states_numel;
      Driver driver(platform.template backend<T>(), problem);
      const Tensor workspace =
          allocate(input, {driver.forward_workspace_bytes()}, ScalarType::Byte, "the workspace");
      [[maybe_unused]] const auto computing =
          platform.computing(args.seq_len() * driver.step_work());
      driver.forward(pointer<T>(h_n) + d * args.h_numel(),
                     args.has_state() ? pointer<T>(c_n) + d * args.state_numel() : nullptr,
                     save_gates ? pointer<A>(saved_gates) + d * gates_numel : nullptr,
                     workspace.mutable_data_ptr());
    }
    return std::make_tuple(output, h_n, c_n, saved_gates, chunk_cell_states);
  });
}

// The operator `forward`: its arguments are those of the schema, in its order.
template <class Platform>
ForwardResults forward_operator(int64_t cell, Tensor input, Tensor hx, MaybeTensor cx,
                                Weights weights, MaybeTensor lengths, MaybeTensor batch_sizes,
                                MaybeTensor reset, MaybeTensor eps, MaybeTensor seed,
                                double dropout, double zoneout, double cell_zoneout,
                                MaybeTensor mask_seed, int64_t noise_stream, int64_t first_step,
                                bool reverse, int64_t chunk_size, int64_t workspace_bytes,
                                int64_t backend, int64_t tuning, bool save_gates) {
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

// The same memory, with so many dimensions of one before those of `tensor`, or without.
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
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      tensor.get(), int64_t(sizes.size()), sizes.data(), strides.data(), 0, &handle));
  return Tensor(handle);
}

// The operator `step`: one step where nothing needs a gradient, with little overhead.  input (B, I)
// or (I), hx and cx (B, H) or (H), zeros if absent, eps (B, Z) or (Z) -> h (B, H) or (H), c alike,
// or (0, B, H) of a cell without cell state.
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
  if (has_state(named)) c = hx || cx ? state("cx", cx) : h;
  FUSEDRNN_CHECK(has_state(named) || !cx, named.name, " takes no cx");
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
  return {with_dimensions(h_n, -missing), has_state(named) ? with_dimensions(c_n, -missing) : c_n};
}

// Bits of `needs`, in the order of the results; above them is one for each of `weights`.
enum Needs : int64_t { kInput = 1, kHx = 2, kCx = 4, kEps = 8, kFirstWeight = 16 };

// What only backward takes.
struct Cotangents {
  const MaybeTensor &output, &h_n, &c_n;
};
struct Saved {
  const Tensor& output;
  const MaybeTensor &gates, &chunk_cell_states;
};

// Gradients of input, hx, cx, eps and of the weights in one flat buffer; empty where not needed.
using BackwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Platform>
BackwardResults backward(const Cotangents& grad, const Call& call, const Saved& saved,
                         int64_t needs) {
  const Tensor& input = call.input;
  const Tensor& output = saved.output;
  const Weights& weights = call.weights;
  Arguments args(call);
  const int64_t directions = args.directions(), seq_len = args.seq_len(), batch = args.batch();
  const int64_t width = args.sizes().output, hidden = args.sizes().hidden;
  args.check_sequence("output", output, directions * width);
  FUSEDRNN_CHECK(output.is_contiguous(), "output must be contiguous");
  if (grad.output) args.check_sequence("grad_output", *grad.output, directions * width);
  if (grad.h_n) args.check("grad_h_n", *grad.h_n, {directions, batch, width});
  if (grad.c_n && args.has_state()) args.check("grad_c_n", *grad.c_n, {directions, batch, hidden});
  FUSEDRNN_CHECK(args.has_eps() || (needs & kEps) == 0, "eps was drawn and has no gradient");
  FUSEDRNN_CHECK(args.has_state() || (needs & kCx) == 0, "there is no cx");
  FUSEDRNN_CHECK(needs >= 0 && needs < (kFirstWeight << weights.size()),
                 "needs must have a bit for input, hx, cx, eps and each weight, got ", needs);

  Platform platform(input, args.tuning());
  args.place_lengths(platform);
  return planned_anew(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    Problem asked = args.problem(platform);
    const int64_t state_numel = directions * args.state_numel();
    if (saved.chunk_cell_states && state_numel > 0) {
      asked.chunks = saved.chunk_cell_states->numel() / state_numel;
    }
    const LayerPlan plan = plan_layer<BackendOf<Platform, T>>(asked);
    const int64_t states_numel = args.states_numel(plan.steps);
    const auto check_saved = [&](const char* name, const Tensor& t, int64_t numel) {
      FUSEDRNN_CHECK(t.numel() == numel && t.scalar_type() == kScalarType<A> && t.is_contiguous() &&
                         t.device() == input.device(),
                     "", name, " must be what forward returned for these arguments");
    };
    FUSEDRNN_CHECK(
        saved.chunk_cell_states.has_value() == args.has_state(),
        "chunk_cell_states must be given for a cell with a cell state, and for no other");
    if (saved.chunk_cell_states) {
      check_saved("chunk_cell_states", *saved.chunk_cell_states, directions * states_numel);
    }
    if (saved.gates) check_saved("saved_gates", *saved.gates, directions * args.kept_numel());

    const auto gradient = [&](bool needed, const std::vector<int64_t>& shape, const char* what,
                              bool zeros = false) {
      return allocate(input, needed ? shape : std::vector<int64_t>{0}, input.scalar_type(), what,
                      zeros);
    };
    const bool zeros = args.has_lengths();  // nothing is written where all rows are finished
    Tensor grad_input = gradient(needs & kInput, args.shape(args.sizes().input),
                                 "the gradient of the input", args.has_padding());
    Tensor grad_hx = gradient(needs & kHx, {directions, batch, width}, "the gradient of hx");
    Tensor grad_cx = gradient(needs & kCx, {directions, batch, hidden}, "the gradient of cx");
    Tensor grad_eps = gradient(needs & kEps, {directions, seq_len, batch, args.sizes().latent},
                               "the gradient of eps", zeros);
    const int64_t flat_size = needs >= kFirstWeight ? directions * args.weights_numel() : 0;
    // The driver writes all of those it is asked for, and zeros stand for the others.
    const int64_t every_weight = (kFirstWeight << weights.size()) - kFirstWeight;
    Tensor grad_weights =
        allocate(input, {flat_size}, kScalarType<A>, "the gradients of the weights",
                 batch == 0 || (needs & every_weight) != every_weight);
    MaybeTensor dense_h_n, dense_c_n;
    if (grad.h_n) dense_h_n = torch::stable::contiguous(*grad.h_n);
    if (grad.c_n && args.has_state()) dense_c_n = torch::stable::contiguous(*grad.c_n);

    for (int64_t d = 0; d < directions && batch > 0; ++d) {
      Layer<T> problem = args.layer<T>(plan.steps, plan.backward, d);
      problem.output = const_cast<T*>(Arguments::data<T>(output)) + d * width;  // only read
      problem.output_stride = directions * width;
      if (saved.chunk_cell_states) {
        problem.states =
            const_cast<A*>(Arguments::data<A>(*saved.chunk_cell_states)) + d * states_numel;
      }
      Gradients<T> gradients{};
      if (grad.output) {
        gradients.output = args.sequence<T>(*grad.output, width, d * width);
      }
      const int64_t h = d * args.h_numel(), state = d * args.state_numel();
      if (dense_h_n) gradients.h_n = Arguments::data<T>(*dense_h_n) + h;
      if (dense_c_n) gradients.c_n = Arguments::data<T>(*dense_c_n) + state;
      if (needs & kInput) gradients.input = pointer<T>(grad_input);
      gradients.adds_to_input = d > 0;
      gradients.completes_input = d + 1 == directions;
      if (needs & kHx) gradients.hx = pointer<T>(grad_hx) + h;
      if (needs & kCx) gradients.cx = pointer<T>(grad_cx) + state;
      if (needs & kEps) {
        gradients.eps = pointer<T>(grad_eps) + d * seq_len * batch * args.sizes().latent;
      }
      const std::vector<Parameter>& layout = args.layout();
      for (size_t i = 0; i < layout.size(); ++i) {
        if ((needs & (kFirstWeight << (size_t(d) * layout.size() + i))) == 0) continue;
        A* at = pointer<A>(grad_weights) + d * args.weights_numel() + layout[i].offset;
        const int p = layout[i].projection;
        (layout[i].columns == 0 ? gradients.bias[p] : gradients.weight[p]) = at;
      }
      Driver driver(platform.template backend<T>(), problem);
      const Tensor workspace = allocate(input, {driver.backward_workspace_bytes(gradients)},
                                        ScalarType::Byte, "the workspace");
      [[maybe_unused]] const auto computing = platform.computing(seq_len * driver.step_work());
      driver.backward(
          gradients,
          saved.gates ? Arguments::data<A>(*saved.gates) + d * args.kept_numel() : nullptr,
          workspace.mutable_data_ptr());
    }
    if constexpr (!std::is_same_v<T, A>) {
      const Tensor wide = grad_weights;
      grad_weights = allocate(input, {flat_size}, kScalarType<T>, "the gradients of the weights");
      torch::stable::copy_(grad_weights, wide);
    }
    return std::make_tuple(grad_input, grad_hx, grad_cx, grad_eps, grad_weights);
  });
}

// The operator `backward`: its arguments are those of the schema, in its order.
template <class Platform>
BackwardResults backward_operator(
    MaybeTensor grad_output, MaybeTensor grad_h_n, MaybeTensor grad_c_n, int64_t cell, Tensor input,
    Tensor hx, MaybeTensor cx, Weights weights, MaybeTensor lengths, MaybeTensor batch_sizes,
    MaybeTensor reset, MaybeTensor eps, MaybeTensor seed, double dropout, double zoneout,
    double cell_zoneout, MaybeTensor mask_seed, int64_t noise_stream, int64_t first_step,
    bool reverse, int64_t chunk_size, int64_t workspace_bytes, int64_t backend, int64_t tuning,
    Tensor output, MaybeTensor saved_gates, MaybeTensor chunk_cell_states, int64_t needs) {
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

// The operators' schemas.  Python passes all that comes behind `*` by name; only lists of tensors
// and what every call has come before it.  No text is passed: torch's stable ABI keeps a copy of
// each string for ever.
#define FUSEDRNN_CALL_SCHEMA                                                                   \
  "int cell, Tensor input, Tensor hx, Tensor? cx, Tensor[] weights, *, Tensor? lengths=None, " \
  "Tensor? batch_sizes=None, Tensor? reset=None, Tensor? eps=None, Tensor? seed=None, "        \
  "float dropout=0, float zoneout=0, float cell_zoneout=0, Tensor? mask_seed=None, "           \
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
#undef FUSEDRNN_CALL_SCHEMA

}  // namespace fusedrnn
