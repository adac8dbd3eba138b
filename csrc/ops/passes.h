// A pass through a layer, the same on every device: allocation, dispatch on dtype, one call of the
// driver for each direction.
//
// Platform is the device's part, created for each call:
//   Platform(input, tuning)
//   gpu()                        the GPU's properties for plans, or null
//   keep(host)                   keeps memory alive while enqueued work may read it
//   backend<T>()                 the driver's backend
//   compute(rows, row_work, is_backward, f)
//                                calls f, in which the driver works: the rows of all steps, and the
//                                multiply-adds of one of them in forward
#pragma once
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../driver/driver.h"
#include "arguments.h"

namespace fusedrnn {

template <class T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// name: of the argument that has the dtype or is it.
template <class F>
auto dispatch_dtype(const char* name, ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    case ScalarType::BFloat16: return f(BFloat16{});
    case ScalarType::Half: return f(Half{});
    default:
      fail(name, " must be float32, float64, bfloat16 or float16, got ",
           torch::headeronly::toString(dtype));
  }
}
template <class F>
auto dispatch_dtype(const Tensor& input, const F& f) {
  return dispatch_dtype("input", input.scalar_type(), f);
}

// dispatch_dtype(), repeated once if the GPU has refused to launch a kernel: the refusal is
// remembered, so the new plan does without that kernel.
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

// Where forward writes; null for what is not wanted.
template <class T>
struct ForwardMemory {
  T *output, *h_n, *c_n;  // c_n: null if there is no cell state
  Acc<T>*saved_gates, *chunk_cell_states;
};

// Runs forward in every direction, by a plan that has been made for these arguments.
template <class T, class Platform>
void run_forward(Platform& platform, const Arguments& args, const Plan& plan,
                 const ForwardMemory<T>& to) {
  const int64_t directions = args.directions(), width = args.sizes().output;
  for (int64_t d = 0; d < directions && args.batch() > 0; ++d) {
    Layer<T> problem = args.layer<T>(plan.steps, plan.forward, d);
    problem.output = to.output + d * width;
    problem.output_stride = directions * width;
    const int64_t state = d * args.cell_state_numel();
    if (to.chunk_cell_states != nullptr) {
      problem.chunk_cell_states = to.chunk_cell_states + problem.chunks() * state;
    }
    Driver driver(platform.template backend<T>(), problem);
    const Tensor workspace = allocate(args.input(), {driver.forward_workspace_bytes()},
                                      ScalarType::Byte, "the workspace");
    platform.compute(args.seq_len() * args.batch(), driver.row_work(), false, [&] {
      driver.forward(to.h_n + d * args.h_numel(), to.c_n != nullptr ? to.c_n + state : nullptr,
                     to.saved_gates != nullptr ? to.saved_gates + d * args.saved_numel() : nullptr,
                     workspace.mutable_data_ptr());
    });
  }
}

// output (T, B, D P), h_n (D, B, P), c_n (D, B, H) or empty; saved_gates: the pre-activations of
// all steps, empty unless they are to be saved; chunk_cell_states: c before each chunk, (D, chunks,
// B, H) or empty. P is the number of features of h: H, unless the cell projects h.
using ForwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class Platform>
ForwardResults forward(const Call& call, bool save_gates) {
  const Tensor& input = call.input;
  Arguments args(call);
  Platform platform(input, args.tuning());
  args.place(platform);
  return planned_anew(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    const ScalarType dtype = input.scalar_type();
    const int64_t directions = args.directions(), batch = args.batch();
    const int64_t width = args.sizes().output, hidden = args.sizes().hidden;
    const Problem asked = args.problem(platform);
    const Plan plan = plan_layer<BackendOf<Platform, T>>(asked);
    FUSEDRNN_CHECK(args.backend() != "persistent" || plan.forward.is_persistent,
                   "backend='persistent' is not possible here: ", reason(asked, plan));
    const int64_t gates_numel = save_gates ? args.saved_numel() : 0;
    // Nothing is written in finished rows, so outputs with padding start as zeros.
    Tensor output =
        allocate(input, args.shape(directions * width), dtype, "the output", args.has_padding());
    Tensor h_n = allocate(input, {directions, batch, width}, dtype, "h_n");
    Tensor c_n =
        allocate(input, {args.has_cell_state() ? directions : 0, batch, hidden}, dtype, "c_n");
    Tensor saved_gates = allocate(input, {directions * gates_numel}, kScalarType<A>,
                                  "what recompute=False saves", args.has_lengths());
    Tensor chunk_cell_states = allocate(input, args.chunk_cell_states_shape(plan.steps),
                                        kScalarType<A>, "the cell states before each chunk");
    const bool has_c = args.has_cell_state();
    run_forward<T>(platform, args, plan,
                   {.output = pointer<T>(output),
                    .h_n = pointer<T>(h_n),
                    .c_n = has_c ? pointer<T>(c_n) : nullptr,
                    .saved_gates = save_gates ? pointer<A>(saved_gates) : nullptr,
                    .chunk_cell_states = has_c ? pointer<A>(chunk_cell_states) : nullptr});
    return std::make_tuple(output, h_n, c_n, saved_gates, chunk_cell_states);
  });
}

// The bits of `needs`, in the order of the results, followed by one bit for each of `weights`.
enum Needs : int64_t { kInput = 1, kHx = 2, kCx = 4, kEps = 8, kFirstWeight = 16 };

// The arguments that only backward has.
struct Cotangents {
  const MaybeTensor &output, &h_n, &c_n;
};
struct Saved {
  const Tensor& output;
  const MaybeTensor &gates, &chunk_cell_states;
};

// Has the gradients of a direction's weights written to `base`, as far as is_wanted(index).
template <class T, class F>
void want_weights(Gradients<T>& gradients, const std::vector<Parameter>& layout, Acc<T>* base,
                  const F& is_wanted) {
  for (size_t i = 0; i < layout.size(); ++i) {
    if (!is_wanted(i)) continue;
    const int p = layout[i].projection;
    (layout[i].columns == 0 ? gradients.bias[p] : gradients.weight[p]) = base + layout[i].offset;
  }
}

// Sums in Acc<T> as a tensor of T: the same one if the types are.
template <class T>
Tensor rounded(const Tensor& sums) {
  if constexpr (std::is_same_v<T, Acc<T>>) return sums;
  Tensor result = allocate(sums, {sums.numel()}, kScalarType<T>, "the gradients of the weights");
  torch::stable::copy_(result, sums);
  return result;
}

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
  if (grad.c_n && args.has_cell_state())
    args.check("grad_c_n", *grad.c_n, {directions, batch, hidden});
  FUSEDRNN_CHECK(args.has_eps() || (needs & kEps) == 0, "eps was drawn and has no gradient");
  FUSEDRNN_CHECK(args.has_cell_state() || (needs & kCx) == 0, "there is no cx");
  FUSEDRNN_CHECK(needs >= 0 && needs < (kFirstWeight << weights.size()),
                 "needs must have a bit for input, hx, cx, eps and each weight, got ", needs);

  Platform platform(input, args.tuning());
  args.place(platform);
  return planned_anew(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    Problem asked = args.problem(platform);
    const auto check_saved = [&](const char* name, const Tensor& t,
                                 const std::vector<int64_t>& shape) {
      FUSEDRNN_CHECK(has_shape(t, shape) && t.scalar_type() == kScalarType<A> &&
                         t.is_contiguous() && t.device() == input.device(),
                     "", name, " must be what forward returned for these arguments");
    };
    FUSEDRNN_CHECK(
        saved.chunk_cell_states.has_value() == args.has_cell_state(),
        "chunk_cell_states must be given for a cell with a cell state, and for no other");
    if (saved.chunk_cell_states && saved.chunk_cell_states->dim() == 4) {
      asked.chunks = std::min(saved.chunk_cell_states->size(1), seq_len);
    }
    const Plan plan = plan_layer<BackendOf<Platform, T>>(asked);
    if (saved.chunk_cell_states) {
      check_saved("chunk_cell_states", *saved.chunk_cell_states,
                  args.chunk_cell_states_shape(plan.steps));
    }
    if (saved.gates) check_saved("saved_gates", *saved.gates, {directions * args.saved_numel()});

    const auto gradient = [&](bool needed, const std::vector<int64_t>& shape, const char* what,
                              bool zeros = false) {
      return allocate(input, needed ? shape : std::vector<int64_t>{0}, input.scalar_type(), what,
                      zeros);
    };
    const bool zeros =
        args.has_lengths();  // because nothing is written where all rows are finished
    Tensor grad_input = gradient(needs & kInput, args.shape(args.sizes().input),
                                 "the gradient of the input", args.has_padding());
    Tensor grad_hx = gradient(needs & kHx, {directions, batch, width}, "the gradient of hx");
    Tensor grad_cx = gradient(needs & kCx, {directions, batch, hidden}, "the gradient of cx");
    Tensor grad_eps = gradient(needs & kEps, {directions, seq_len, batch, args.sizes().latent},
                               "the gradient of eps", zeros);
    const int64_t flat_size = needs >= kFirstWeight ? directions * args.weights_numel() : 0;
    // The driver writes the gradients that are wanted; the others are to be zeros.
    const int64_t every_weight = (kFirstWeight << weights.size()) - kFirstWeight;
    Tensor grad_weights =
        allocate(input, {flat_size}, kScalarType<A>, "the gradients of the weights",
                 batch == 0 || (needs & every_weight) != every_weight);
    MaybeTensor dense_h_n, dense_c_n;
    if (grad.h_n) dense_h_n = torch::stable::contiguous(*grad.h_n);
    if (grad.c_n && args.has_cell_state()) dense_c_n = torch::stable::contiguous(*grad.c_n);

    for (int64_t d = 0; d < directions && batch > 0; ++d) {
      Layer<T> problem = args.layer<T>(plan.steps, plan.backward, d);
      problem.output =
          const_cast<T*>(Arguments::data<T>(output)) + d * width;  // backward only reads it
      problem.output_stride = directions * width;
      if (saved.chunk_cell_states) {
        problem.chunk_cell_states = const_cast<A*>(Arguments::data<A>(*saved.chunk_cell_states)) +
                                    d * problem.chunks() * args.cell_state_numel();
      }
      Gradients<T> gradients{};
      if (grad.output) {
        gradients.output = args.sequence<T>(*grad.output, width, d * width);
      }
      const int64_t h = d * args.h_numel(), state = d * args.cell_state_numel();
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
      want_weights(gradients, args.layout(), pointer<A>(grad_weights) + d * args.weights_numel(),
                   [&](size_t i) {
                     return (needs & (kFirstWeight << (size_t(d) * args.layout().size() + i))) != 0;
                   });
      Driver driver(platform.template backend<T>(), problem);
      const Tensor workspace = allocate(input, {driver.backward_workspace_bytes(gradients)},
                                        ScalarType::Byte, "the workspace");
      platform.compute(seq_len * batch, driver.row_work(), true, [&] {
        driver.backward(
            gradients,
            saved.gates ? Arguments::data<A>(*saved.gates) + d * args.saved_numel() : nullptr,
            workspace.mutable_data_ptr());
      });
    }
    return std::make_tuple(grad_input, grad_hx, grad_cx, grad_eps, rounded<T>(grad_weights));
  });
}

}  // namespace fusedrnn
