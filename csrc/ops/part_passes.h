// The passes of a stack of layers through one part of the sequence, and the memory that they take.
#pragma once
#include <algorithm>
#include <array>
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
    const int64_t layers = stack_.size(), states = times(layers, bottom().h_numel());
    const int64_t cells = has_cell_state() ? bottom().cell_state_numel() : 0;  // numbers of a layer
    output_ = arena.take<T>(times(outputs_, most));
    cell_states_ = arena.take<A>(times(outputs_, most_chunks_ * cells));
    if (gradients == nullptr) return arena.size_bytes();
    output_gradient_ = arena.take<T>(std::min<int64_t>(layers - 1, 2) * most);
    after_ = {arena.take<T>(states), arena.take<T>(times(layers, cells))};
    if (!gradients->wants_hx) gradients->between.h = arena.take<T>(states);
    if (!gradients->wants_cx) gradients->between.c = arena.take<T>(times(layers, cells));
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

  // The rows of all steps, and the multiply-adds of one of them in recurrent GEMMs of all layers.
  int64_t rows() const { return parts_.seq_len * bottom().batch(); }
  int64_t row_work() const {
    int64_t work = 0;
    for (int64_t l = 0; l < stack_.size(); ++l) {
      work += driver(layer(l, 0, &Plan::forward, {})).row_work();
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

}  // namespace fusedrnn
