// The operators `step` and `step_backward`: a single step of a cell, on tensors without a dimension
// for steps and directions, by the passes of a layer.
#pragma once
#include <algorithm>
#include <tuple>
#include <vector>

#include "passes.h"

namespace fusedrnn {

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

// The arguments of a step as those of a layer.  input (B, I) or (I), hx and cx (B, H) or (H) and
// zeros if absent, eps (B, Z) or (Z).  `weights` and `seed` are referred to.
class SingleStep {
 public:
  SingleStep(int64_t cell, const Tensor& input, const MaybeTensor& hx, const MaybeTensor& cx,
             const Weights& weights, const MaybeTensor& eps, const MaybeTensor& seed,
             int64_t tuning)
      : cell_(cell), tuning_(tuning), weights_(weights), seed_(seed),
        named_(checked(cell, input, weights)), missing_(3 - input.dim()),
        width_(weights[reads_h(named_)].size(1)), h_(state("hx", hx, input)),
        input_(with_dimensions(input, missing_)) {
    if (has_cell_state()) c_ = hx || cx ? state("cx", cx, input) : h_;
    FUSEDRNN_CHECK(has_cell_state() || !cx, named_.name, " takes no cx");
    if (eps) noise_ = with_dimensions(*eps, missing_ + 1);
  }
  SingleStep(const SingleStep&) = delete;
  SingleStep& operator=(const SingleStep&) = delete;

  // Of tensors that live as long as this object.
  Call call() const {
    return {.cell = cell_,
            .input = input_,
            .hx = h_,
            .cx = c_,
            .weights = weights_,
            .lengths = none_,
            .batch_sizes = none_,
            .reset = none_,
            .eps = noise_,
            .seed = seed_,
            .dropout = 0,
            .zoneout = 0,
            .cell_zoneout = 0,
            .mask_seed = none_,
            .noise_stream = 0,
            .first_step = 0,
            .reverse = false,
            .chunk_size = 0,
            .workspace_bytes = 0,
            .backend = 0,
            .tuning = tuning_};
  }
  bool has_cell_state() const { return fusedrnn::has_cell_state(named_); }
  const Cell& named() const { return named_; }
  const Tensor& h() const { return h_; }
  const MaybeTensor& c() const { return c_; }
  // A layer's tensor for one of the step that is given or made here.
  MaybeTensor of_layer(const char* name, const MaybeTensor& of_step) const {
    if (!of_step) return of_step;
    FUSEDRNN_CHECK(of_step->dim() == 3 - missing_, name, " must have ", 3 - missing_,
                   " dimensions as input has, got ", shape_text(of_step->sizes()));
    return with_dimensions(*of_step, missing_);
  }
  Tensor of_step(const Tensor& of_layer) const { return with_dimensions(of_layer, -missing_); }

 private:
  static size_t reads_h(const Cell& cell) { return size_t(cell.stages[0].projection); }
  static const Cell& checked(int64_t cell, const Tensor& input, const Weights& weights) {
    FUSEDRNN_CHECK(cell >= 0 && cell < int64_t(std::size(kCells)), "there is no cell ", cell);
    const Cell& named = kCells[cell];
    FUSEDRNN_CHECK(!is_projected(named), named.name, " has no single steps");
    FUSEDRNN_CHECK(input.dim() == 1 || input.dim() == 2, "input must have 1 or 2 dimensions, got ",
                   shape_text(input.sizes()));
    const size_t index = reads_h(named);
    FUSEDRNN_CHECK(weights.size() > index && weights[index].dim() == 2, "weights[", index,
                   "] must have 2 dimensions");
    return named;
  }
  Tensor state(const char* name, const MaybeTensor& given, const Tensor& input) const {
    if (given) return *of_layer(name, given);
    const int64_t batch = input.dim() == 2 ? input.size(0) : 1;
    return allocate(input, {1, batch, width_}, input.scalar_type(), name, true);
  }

  const int64_t cell_, tuning_;
  const Weights& weights_;
  const MaybeTensor& seed_;
  const Cell& named_;
  const int64_t missing_;  // dimensions
  const int64_t width_;
  const MaybeTensor none_;
  const Tensor h_, input_;
  MaybeTensor c_, noise_;
};

// The operator `step`: one step with little overhead, without gradients -> h (B, H) or (H), and c
// alike, or (0, B, H) if the cell has no cell state.
template <class Platform>
std::tuple<Tensor, Tensor> step_operator(int64_t cell, Tensor input, MaybeTensor hx, MaybeTensor cx,
                                         Weights weights, MaybeTensor eps, MaybeTensor seed,
                                         int64_t tuning) {
  const SingleStep step(cell, input, hx, cx, weights, eps, seed, tuning);
  Arguments args(step.call());
  Platform platform(input, args.tuning());
  args.place(platform);
  return planned_anew(input, [&](auto element) {
    using T = decltype(element);
    const Plan plan = plan_layer<BackendOf<Platform, T>>(args.problem(platform));
    const int64_t width = args.sizes().output;
    std::vector<int64_t> shape{args.batch(), width}, none{0, args.batch(), width};
    if (input.dim() == 1) shape.erase(shape.begin());
    const Tensor h = allocate(input, shape, input.scalar_type(), "h");
    const Tensor c =
        allocate(input, step.has_cell_state() ? shape : none, input.scalar_type(), "c");
    // The output of a single step is h, and is copied to where it is.
    run_forward<T>(platform, args, plan,
                   {.output = pointer<T>(h),
                    .h_n = pointer<T>(h),
                    .c_n = step.has_cell_state() ? pointer<T>(c) : nullptr,
                    .saved_gates = nullptr,
                    .chunk_cell_states = nullptr});
    return std::make_tuple(h, c);
  });
}

// The operator `step_backward`: gradients of what `step` returns -> those of input, hx, cx, eps and
// of each weight that are needed, in their shapes.
template <class Platform>
std::vector<Tensor> step_backward_operator(MaybeTensor grad_h, MaybeTensor grad_c, int64_t cell,
                                           Tensor input, MaybeTensor hx, MaybeTensor cx,
                                           Weights weights, MaybeTensor eps, MaybeTensor seed,
                                           MaybeTensor /*flat_version*/, int64_t tuning,
                                           int64_t needs) {
  const SingleStep step(cell, input, hx, cx, weights, eps, seed, tuning);
  FUSEDRNN_CHECK(hx || (needs & kHx) == 0, "hx is not given and has no gradient");
  FUSEDRNN_CHECK(cx || (needs & kCx) == 0, "cx is not given and has no gradient");
  // What forward saves of a layer: its output, which has no step before, so it is not read; and c
  // before the only chunk.
  const Tensor output = Arguments::dense(step.h());
  MaybeTensor cell_state;
  if (step.c()) {
    const bool is_double = input.scalar_type() == ScalarType::Double;
    const ScalarType wide = is_double ? ScalarType::Double : ScalarType::Float;
    const Tensor c = Arguments::dense(*step.c());
    cell_state = with_dimensions(c.scalar_type() == wide ? c : torch::stable::to(c, wide), 1);
  }
  const MaybeTensor none;
  const auto [grad_input, grad_hx, grad_cx, grad_eps, flat] = backward<Platform>(
      {.output = none,
       .h_n = step.of_layer("grad_h", grad_h),
       .c_n = step.has_cell_state() ? step.of_layer("grad_c", grad_c) : none},
      step.call(), {.output = output, .gates = none, .chunk_cell_states = cell_state}, needs);
  std::vector<Tensor> found;
  found.reserve(4 + weights.size());
  if (needs & kInput) found.push_back(step.of_step(grad_input));
  if (needs & kHx) found.push_back(step.of_step(grad_hx));
  if (needs & kCx) found.push_back(step.of_step(grad_cx));
  if (needs & kEps) found.push_back(with_dimensions(grad_eps, -(4 - input.dim())));
  int64_t first = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    if (needs & (kFirstWeight << i)) {
      const auto sizes = weight.sizes();
      const std::vector<int64_t> shape(sizes.begin(), sizes.end());
      std::vector<int64_t> strides(shape.size(), 1);
      if (shape.size() == 2) strides[0] = shape[1];
      found.push_back(view(flat, shape, strides, first));
    }
    first += weight.numel();
  }
  return found;
}

}  // namespace fusedrnn
