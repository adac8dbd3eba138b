// The last states alone of a stack of layers, in memory for about the square root of the steps.
//
// All layers go through one part of the sequence before any goes on to the next part, so no layer's
// output exists as a whole.  Forward saves the states before each part.  Backward takes the parts
// from the last one on, and goes through the layers forward and backward in each.
#pragma once
#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "passes.h"
#include "stack.h"

namespace fusedrnn {

// States of all layers, or their gradients: h (L, B, P), and c (L, B, H), null without a cell
// state.
template <class P>
struct StackStates {
  P *h = nullptr, *c = nullptr;

  operator StackStates<const P>() const { return {h, c}; }
};

// The gradients of a stack; null where they are not wanted.
template <class T>
struct StackGradients {
  StackStates<const T> last;  // of the last states, given
  StackStates<T> between;     // of the states between two parts, in the end of the first states
  bool wants_hx = false, wants_cx = false;
  T *input = nullptr, *eps = nullptr;
  Acc<T>* weights = nullptr;
  std::vector<bool> wants_weight;
  int64_t lowest = 0;  // the lowest layer of which something is wanted
};

// The passes of all layers through one part of the sequence.  Parts are counted in the order of
// work.
template <class Platform, class T>
class PartPasses {
  using A = Acc<T>;

 public:
  PartPasses(Platform& platform, const Stack& stack, bool is_backward)
      : platform_(platform), stack_(stack), parts_(stack.parts()),
        outputs_(is_backward ? stack.size() : std::min<int64_t>(stack.size(), 2)) {
    for (int64_t l = 0; l < stack.size(); ++l) {
      Problem asked = stack[l].problem(platform);
      for (const int64_t index : ends()) {
        asked.seq_len = parts_.at(index).steps;
        const Plan plan = plan_layer<BackendOf<Platform, T>>(asked);
        FUSEDRNN_CHECK(asked.backend != "persistent" || plan.forward.is_persistent,
                       "backend='persistent' is not possible here: ", reason(asked, plan));
        plans_.push_back(plan);
        const int64_t chunks = (asked.seq_len + plan.steps - 1) / plan.steps;
        most_chunks_ = std::max(most_chunks_, chunks);
      }
    }
  }

  // The memory besides the workspace.  gradients: of backward, or null.
  int64_t carve(void* base, StackGradients<T>* gradients) {
    Arena arena(base);
    const int64_t most = steps_of_longest() * bottom().h_numel();
    const int64_t layers = stack_.size(), states = layers * bottom().h_numel();
    const int64_t cell_states = has_cell_state() ? layers * bottom().cell_state_numel() : 0;
    output_ = arena.take<T>(outputs_ * most);
    cell_states_ = arena.take<A>(outputs_ * most_chunks_ * cell_states / layers);
    if (gradients == nullptr) return arena.size_bytes();
    output_gradient_ = arena.take<T>(std::min<int64_t>(layers - 1, 2) * most);
    after_ = {arena.take<T>(states), arena.take<T>(cell_states)};
    if (!gradients->wants_hx) gradients->between.h = arena.take<T>(states);
    if (!gradients->wants_cx) gradients->between.c = arena.take<T>(cell_states);
    return arena.size_bytes();
  }

  // Of the larger pass of any layer through any part.  gradients: of backward, or null.
  int64_t workspace_bytes(const StackGradients<T>* gradients) const {
    int64_t most = 0;
    for (const int64_t index : ends()) {
      for (int64_t l = 0; l < stack_.size(); ++l) {
        most =
            std::max(most, driver(layer(l, index, &Plan::forward, {})).forward_workspace_bytes());
        if (gradients == nullptr || l < gradients->lowest) continue;
        const Layer<T> back = layer(l, index, &Plan::backward, {});
        most =
            std::max(most, driver(back).backward_workspace_bytes(of(*gradients, back, l, index)));
      }
    }
    return most;
  }

  // The multiply-adds of all steps in recurrent GEMMs.
  int64_t work() const {
    int64_t work = 0;
    for (int64_t l = 0; l < stack_.size(); ++l) {
      work += parts_.seq_len * driver(layer(l, 0, &Plan::forward, {})).step_work();
    }
    return work;
  }

  void forward(int64_t index, const StackStates<const T>& before, const StackStates<T>& after,
               void* workspace) const {
    for (int64_t l = 0; l < stack_.size(); ++l) {
      driver(layer(l, index, &Plan::forward, before))
          .forward(after.h + h_of(l), has_cell_state() ? after.c + c_of(l) : nullptr, nullptr,
                   workspace);
    }
  }

  // Forward again, and backward.  workspace: of both passes.
  void backward(int64_t index, const StackStates<const T>& before,
                const StackGradients<T>& gradients, void* workspace) const {
    forward(index, before, after_, workspace);
    for (int64_t l = stack_.size() - 1; l >= gradients.lowest; --l) {
      const Layer<T> back = layer(l, index, &Plan::backward, before);
      driver(back).backward(of(gradients, back, l, index), nullptr, workspace);
    }
  }

 private:
  const Arguments& bottom() const { return stack_.bottom(); }
  bool has_cell_state() const { return bottom().has_cell_state(); }
  int64_t h_of(int64_t l) const { return l * bottom().h_numel(); }
  int64_t c_of(int64_t l) const { return l * bottom().cell_state_numel(); }
  bool is_last(int64_t index) const { return index + 1 == parts_.count(); }
  int64_t steps_of_longest() const { return std::min(parts_.steps(), parts_.seq_len); }
  // The first part and the last one: all others are as long as the longer one of these.
  std::array<int64_t, 2> ends() const { return {0, parts_.count() - 1}; }
  const Plan& plan(int64_t l, int64_t index) const {
    const bool is_like_first = parts_.at(index).steps == parts_.at(0).steps;
    return plans_[size_t(2 * l + (is_like_first ? 0 : 1))];
  }
  T* output(int64_t l) const {
    return output_ + l % outputs_ * steps_of_longest() * bottom().h_numel();
  }
  T* output_gradient(int64_t l) const {
    return output_gradient_ + l % 2 * steps_of_longest() * bottom().h_numel();
  }

  auto driver(const Layer<T>& layer) const {
    return Driver(platform_.template backend<T>(), layer);
  }

  Layer<T> layer(int64_t l, int64_t index, PassPlan Plan::* pass,
                 const StackStates<const T>& before) const {
    const Plan& plan = this->plan(l, index);
    const int64_t width = bottom().sizes().output;
    Layer<T> layer = stack_.layer<T>(l, index, plan.steps, plan.*pass);
    if (before.h != nullptr) layer.hx = before.h + h_of(l);
    if (before.c != nullptr) layer.cx = before.c + c_of(l);
    layer.output = output(l);
    layer.output_stride = width;
    if (l > 0) layer.input = layer.template sequence<const T>(output(l - 1), width, width);
    if (has_cell_state()) {
      layer.chunk_cell_states = cell_states_ + l % outputs_ * most_chunks_ * c_of(1);
    }
    return layer;
  }

  // The gradients of a layer in a part.
  Gradients<T> of(const StackGradients<T>& all, const Layer<T>& layer, int64_t l,
                  int64_t index) const {
    const bool is_first = index == 0;
    const Part part = parts_.at(index);
    const Arguments& args = stack_[l];
    Gradients<T> g{};
    if (l + 1 < stack_.size()) {
      const int64_t width = args.sizes().output;
      g.output = layer.template sequence<const T>(output_gradient(l), width, width);
    }
    const StackStates<const T> after = is_last(index) ? all.last : all.between;
    if (after.h != nullptr) g.h_n = after.h + h_of(l);
    if (after.c != nullptr) g.c_n = after.c + c_of(l);
    if (!is_first || all.wants_hx) g.hx = all.between.h + h_of(l);
    if (has_cell_state() && (!is_first || all.wants_cx)) g.cx = all.between.c + c_of(l);
    if (l > all.lowest) g.input = output_gradient(l - 1);
    if (l == 0 && all.input != nullptr) {
      g.input = all.input + args.first_row(part.begin) * args.sizes().input;
    }
    g.completes_input = true;
    g.adds_to_weights = !is_last(index);
    if (all.eps != nullptr) {
      const int64_t row = (l * parts_.seq_len + part.begin) * args.batch();
      g.eps = all.eps + row * args.sizes().latent;
    }
    if (all.weights != nullptr) {
      want_weights(g, args.layout(), all.weights + stack_.first_weight_number(l), [&](size_t i) {
        return all.wants_weight[size_t(l) * args.layout().size() + i];
      });
    }
    return g;
  }

  Platform& platform_;
  const Stack& stack_;
  const Parts parts_;
  const int64_t outputs_;         // the number of layers whose outputs are kept; layers take turns
  std::vector<Plan> plans_;       // of each layer in the first part and in the last one
  int64_t most_chunks_ = 0;       // of any part
  T* output_ = nullptr;           // of a part
  A* cell_states_ = nullptr;      // before each chunk of a part
  T* output_gradient_ = nullptr;  // of two layers, which take turns
  StackStates<T> after_;          // the recomputed states after a part, which nothing reads
};

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
    [[maybe_unused]] const auto computing = platform.computing(passes.work());
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
    for (int64_t index = 0; index < parts; ++index) {
      const bool is_last = index + 1 == parts;
      passes.forward(index, before(index),
                     is_last ? StackStates<T>{pointer<T>(h_n), pointer<T>(c_n)} : before(index + 1),
                     workspace.mutable_data_ptr());
    }
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
      [[maybe_unused]] const auto computing = platform.computing(passes.work());
      for (int64_t index = parts - 1; index >= 0; --index) {
        const StackStates<const T> before{
            Arguments::data<T>(part_h) + index * layers * bottom.h_numel(),
            part_c ? Arguments::data<T>(*part_c) + index * layers * bottom.cell_state_numel()
                   : nullptr};
        passes.backward(index, before, gradients, workspace.mutable_data_ptr());
      }
    }
    return std::make_tuple(grad_input, grad_hx, grad_cx, grad_eps, rounded<T>(grad_weights));
  });
}

}  // namespace fusedrnn
