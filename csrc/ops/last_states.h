// The last states alone of a stack of layers, in memory for about the square root of the steps.
//
// All layers go through one part of the sequence before any goes on to the next part, so no layer's
// output exists as a whole.  Forward saves the states before each part.  Backward takes the parts
// from the last one on, and goes through the layers forward and backward in each.
#pragma once
#include <algorithm>
#include <tuple>
#include <vector>

#include "part_passes.h"

namespace fusedrnn {

// h_n (L, B, P), c_n (L, B, H) or (0, B, H); the states before each part in the order of work,
// part_h (parts, L, B, P), and part_c (parts, L, B, H) or (0, L, B, H).
using LastStates = std::tuple<Tensor, Tensor, Tensor, Tensor>;

template <class Platform>
LastStates last_states(const Call& call, double inner_dropout) {
  const Tensor& input = call.input;
  Stack stack(call, inner_dropout);
  const Arguments& bottom = stack.bottom();
  Platform platform(input, bottom.tuning());
  stack.place(platform);
  return planned_anew(input, [&](auto element) {
    using T = decltype(element);
    const ScalarType dtype = input.scalar_type();
    const int64_t layers = stack.size(), batch = bottom.batch(), parts = stack.parts().count();
    const int64_t width = bottom.sizes().output, hidden = bottom.sizes().hidden;
    const bool has_cell_state = bottom.has_cell_state();
    PartPasses<Platform, T> passes(platform, stack, /*is_backward=*/false);
    Tensor h_n = allocate(input, {layers, batch, width}, dtype, "h_n");
    Tensor c_n = allocate(input, {has_cell_state ? layers : 0, batch, hidden}, dtype, "c_n");
    Tensor part_h = allocate(input, {parts, layers, batch, width}, dtype, "states between parts");
    Tensor part_c = allocate(input, {has_cell_state ? parts : 0, layers, batch, hidden}, dtype,
                             "states between parts");
    const auto results = std::make_tuple(h_n, c_n, part_h, part_c);
    if (batch == 0) return results;
    const Tensor memory =
        allocate(input, {passes.carve(nullptr, nullptr)}, ScalarType::Byte, "outputs of a part");
    passes.carve(memory.mutable_data_ptr(), nullptr);
    const Tensor workspace =
        allocate(input, {passes.workspace_bytes(nullptr)}, ScalarType::Byte, "the workspace");
    const auto copy_first = [](const Tensor& states, const Tensor& first) {
      Tensor at = view(states, {states.size(1), states.size(2), states.size(3)},
                       {states.stride(1), states.stride(2), states.stride(3)});
      torch::stable::copy_(at, first);
    };
    copy_first(part_h, call.hx);
    if (call.cx) copy_first(part_c, *call.cx);
    const auto before = [&](int64_t index) -> StackStates<T> {
      return {pointer<T>(part_h) + index * layers * bottom.h_numel(),
              has_cell_state ? pointer<T>(part_c) + index * layers * bottom.cell_state_numel()
                             : nullptr};
    };
    const StackStates<T> last{pointer<T>(h_n), pointer<T>(c_n)};
    platform.compute(passes.rows(), passes.row_work(), false, [&] {
      for (int64_t index = 0; index < parts; ++index) {
        passes.forward(index, before(index), index + 1 == parts ? last : before(index + 1),
                       workspace.mutable_data_ptr());
      }
    });
    return results;
  });
}

// What last_states_backward is told, in this order, and then one for each of `weights`.
enum StackNeeds : size_t { kNeedsInput, kNeedsHx, kNeedsCx, kNeedsEps, kNeedsFirstWeight };

// The gradients of input, hx, cx, eps and of the weights in one flat buffer; empty where not
// needed.  part_h, part_c: as last_states returned them.
template <class Platform>
BackwardResults last_states_backward(const MaybeTensor& grad_h_n, const MaybeTensor& grad_c_n,
                                     const Call& call, double inner_dropout, const Tensor& part_h,
                                     const MaybeTensor& part_c, const std::vector<bool>& needs) {
  const Tensor& input = call.input;
  Stack stack(call, inner_dropout);
  const Arguments& bottom = stack.bottom();
  const int64_t layers = stack.size(), batch = bottom.batch(), parts = stack.parts().count();
  const int64_t width = bottom.sizes().output, hidden = bottom.sizes().hidden;
  const bool has_cell_state = bottom.has_cell_state();
  const std::vector<int64_t> h_shape{layers, batch, width}, c_shape{layers, batch, hidden};
  if (grad_h_n) bottom.check("grad_h_n", *grad_h_n, {layers, batch, width});
  if (grad_c_n && has_cell_state) bottom.check("grad_c_n", *grad_c_n, {layers, batch, hidden});
  FUSEDRNN_CHECK(needs.size() == kNeedsFirstWeight + call.weights.size(),
                 "needs must have an entry for input, hx, cx, eps and each weight, got ",
                 needs.size());
  FUSEDRNN_CHECK(bottom.has_eps() || !needs[kNeedsEps], "eps was drawn and has no gradient");
  FUSEDRNN_CHECK(has_cell_state || !needs[kNeedsCx], "there is no cx");
  const auto check_states = [&](const char* name, const Tensor& states, int64_t features) {
    bottom.check(name, states, {parts, layers, batch, features});
    FUSEDRNN_CHECK(states.is_contiguous(), name, " must be contiguous");
  };
  check_states("part_h", part_h, width);
  FUSEDRNN_CHECK(part_c.has_value() == has_cell_state,
                 "part_c must be given for a cell with a cell state, and for no other");
  if (part_c) check_states("part_c", *part_c, hidden);

  Platform platform(input, bottom.tuning());
  stack.place(platform);
  return planned_anew(input, [&](auto element) {
    using T = decltype(element);
    using A = Acc<T>;
    const auto gradient = [&](bool needed, const std::vector<int64_t>& shape, const char* what,
                              bool zeros = false) {
      return allocate(input, needed ? shape : std::vector<int64_t>{0}, input.scalar_type(), what,
                      zeros);
    };
    const auto first_wanted = std::find(needs.begin() + kNeedsFirstWeight, needs.end(), true);
    const bool wants_weights = first_wanted != needs.end();
    const bool wants_all =
        std::find(needs.begin() + kNeedsFirstWeight, needs.end(), false) == needs.end();
    PartPasses<Platform, T> passes(platform, stack, /*is_backward=*/true);
    // Nothing is written where all rows are finished.
    Tensor grad_input = gradient(needs[kNeedsInput], bottom.shape(bottom.sizes().input),
                                 "the gradient of the input", bottom.has_padding());
    Tensor grad_hx = gradient(needs[kNeedsHx], h_shape, "the gradient of hx");
    Tensor grad_cx = gradient(needs[kNeedsCx], c_shape, "the gradient of cx");
    Tensor grad_eps =
        gradient(needs[kNeedsEps], {layers, bottom.seq_len(), batch, bottom.sizes().latent},
                 "the gradient of eps", bottom.has_lengths());
    const Tensor grad_weights =
        allocate(input, {wants_weights ? stack.first_weight_number(layers) : 0}, kScalarType<A>,
                 "the gradients of the weights", batch == 0 || !wants_all);
    StackGradients<T> gradients;
    MaybeTensor dense_h_n, dense_c_n;
    if (grad_h_n) dense_h_n = Arguments::dense(*grad_h_n);
    if (grad_c_n && has_cell_state) dense_c_n = Arguments::dense(*grad_c_n);
    if (dense_h_n) gradients.last.h = Arguments::data<T>(*dense_h_n);
    if (dense_c_n) gradients.last.c = Arguments::data<T>(*dense_c_n);
    gradients.wants_hx = needs[kNeedsHx];
    gradients.wants_cx = needs[kNeedsCx];
    if (needs[kNeedsHx]) gradients.between.h = pointer<T>(grad_hx);
    if (needs[kNeedsCx]) gradients.between.c = pointer<T>(grad_cx);
    if (needs[kNeedsInput]) gradients.input = pointer<T>(grad_input);
    if (needs[kNeedsEps]) gradients.eps = pointer<T>(grad_eps);
    if (wants_weights) gradients.weights = pointer<A>(grad_weights);
    gradients.wants_weight.assign(needs.begin() + kNeedsFirstWeight, needs.end());
    if (std::find(needs.begin(), needs.begin() + kNeedsFirstWeight, true) ==
        needs.begin() + kNeedsFirstWeight) {
      const int64_t of_layer = int64_t(bottom.layout().size());
      gradients.lowest = (first_wanted - (needs.begin() + kNeedsFirstWeight)) / of_layer;
    }

    if (batch > 0 && gradients.lowest < layers) {
      const Tensor memory = allocate(input, {passes.carve(nullptr, &gradients)}, ScalarType::Byte,
                                     "outputs of a part");
      passes.carve(memory.mutable_data_ptr(), &gradients);
      const Tensor workspace =
          allocate(input, {passes.workspace_bytes(&gradients)}, ScalarType::Byte, "the workspace");
      platform.compute(passes.rows(), passes.row_work(), true, [&] {
        for (int64_t index = parts - 1; index >= 0; --index) {
          const StackStates<const T> before{
              Arguments::data<T>(part_h) + index * layers * bottom.h_numel(),
              part_c ? Arguments::data<T>(*part_c) + index * layers * bottom.cell_state_numel()
                     : nullptr};
          passes.backward(index, before, gradients, workspace.mutable_data_ptr());
        }
      });
    }
    return std::make_tuple(grad_input, grad_hx, grad_cx, grad_eps, rounded<T>(grad_weights));
  });
}

}  // namespace fusedrnn
