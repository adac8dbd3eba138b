// The weights and vectors of a call, made of the constants of its step; and gradients of the
// constants, made of theirs.
#pragma once
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "program_arguments.h"

namespace fusedrnn {

// Weights and vectors of one call: mostly places in the constants, which must live as long.
class MadeOfConstants : public Constants {
 public:
  // like: another tensor of the call.
  MadeOfConstants(const program::Program& program, const StepConstants& known, ScalarType dtype,
                  const Tensor& like, const Tensor* constants, size_t count)
      : dtype_(dtype), like_(like) {
    constants_.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const Tensor& constant = constants[i];
      constants_.push_back(constant.scalar_type() == dtype ? constant
                                                           : torch::stable::to(constant, dtype));
    }
    weights.resize(known.weights.size());
    for (const program::Product& p : program.products) {
      Matrix<const void>& made = weights[size_t(p.weight)];
      if (made.data == nullptr) made = weight(known.weights[size_t(p.weight)][0], p.terms);
    }
    vectors.reserve(known.vectors.size());
    for (const Terms& terms : known.vectors) vectors.push_back(vector(terms));
  }

 private:
  // Some numbers of a tensor, as a matrix.
  struct Place {
    Tensor of;
    int64_t first, rows, columns, row_stride, column_stride;

    Matrix<const void> matrix() const {
      const char* data = static_cast<const char*>(of.const_data_ptr());
      return {data + first * int64_t(of.element_size()), rows, columns, row_stride, column_stride};
    }
    Tensor tensor() const { return view(of, {rows, columns}, {row_stride, column_stride}, first); }
  };

  const Tensor& constant(const Side& side) const {
    FUSEDRNN_CHECK(side.constant < int64_t(constants_.size()), "there is no constant ",
                   side.constant);
    const Tensor& found = constants_[size_t(side.constant)];
    FUSEDRNN_CHECK(found.device() == like_.device(),
                   "constants must be on the device of the other tensors");
    return found;
  }
  // (terms, columns).
  Place rows(const Side& side, int64_t terms) const {
    const Tensor& own = constant(side);
    const int64_t stack = side.member >= 0 ? 1 : 0;  // dimensions before those of the matrix
    const int64_t row = stack + (side.is_transposed ? 1 : 0), column = 2 * stack + 1 - row;
    FUSEDRNN_CHECK(own.dim() == stack + 2 && own.size(column) == side.columns &&
                       own.size(row) - terms >= side.first &&
                       (stack == 0 || side.member < own.size(0)),
                   "a weight cannot be made of ", shape_text(own.sizes()));
    const int64_t stride = own.stride(row);
    const int64_t begin = stack == 0 ? 0 : side.member * own.stride(0);
    return {own, begin + side.first * stride, terms, side.columns, stride, own.stride(column)};
  }
  Matrix<const void> weight(const std::vector<Side>& sides, int64_t terms) {
    if (sides.size() == 1) return rows(sides[0], terms).matrix();
    // Side by side in the way in which torch's linear layers have their weights.
    int64_t columns = 0;
    for (const Side& side : sides) columns += side.columns;
    const Tensor whole = allocate(like_, {columns, terms}, dtype_, "a weight");
    int64_t place = 0;
    for (const Side& side : sides) {
      copy(whole, place * terms, rows(side, terms));
      place += side.columns;
    }
    made_.push_back(whole);
    return Place{whole, 0, terms, columns, 1, terms}.matrix();
  }
  // Column by column.
  void copy(const Tensor& whole, int64_t first, const Place& part) const {
    constexpr int64_t kFew = 1 << 14;  // are copied before torch has begun
    if (!whole.is_cpu() || part.rows * part.columns > kFew) {
      Tensor to = view(whole, {part.rows, part.columns}, {1, part.rows}, first);
      torch::stable::copy_(to, part.tensor());
      return;
    }
    dispatch_dtype("a program", dtype_, [&](auto element) {
      using T = decltype(element);
      const auto* from = static_cast<const T*>(part.matrix().data);
      T* to = static_cast<T*>(whole.mutable_data_ptr()) + first;
      for (int64_t c = 0; c < part.columns; ++c) {
        for (int64_t r = 0; r < part.rows; ++r) {
          *to++ = from[r * part.row_stride + c * part.column_stride];
        }
      }
    });
  }
  // (1, columns).
  Place numbers(const Side& side) {
    const Tensor& all = constant(side);
    FUSEDRNN_CHECK(all.numel() - side.columns >= side.first, "a vector cannot be made of ",
                   shape_text(all.sizes()));
    if (all.dim() == 1) {
      return {all, side.first * all.stride(0), 1, side.columns, side.columns, all.stride(0)};
    }
    if (all.is_contiguous()) return {all, side.first, 1, side.columns, side.columns, 1};
    made_.push_back(torch::stable::contiguous(all));
    return {made_.back(), side.first, 1, side.columns, side.columns, 1};
  }
  Matrix<const void> vector(const Terms& terms) {
    const Side& first = terms[0][0];
    if (terms.size() == 1 && terms[0].size() == 1 && first.constant != Side::kZeros) {
      return numbers(first).matrix();
    }
    int64_t width = 0;
    for (const Side& side : terms[0]) width += side.columns;
    Tensor total = allocate(like_, {1, width}, dtype_, "a vector", /*zeros=*/true);
    for (const std::vector<Side>& sides : terms) {
      int64_t place = 0;
      for (const Side& side : sides) {
        if (side.constant != Side::kZeros) add(total, place, numbers(side));
        place += side.columns;
      }
    }
    made_.push_back(total);
    return Place{total, 0, 1, width, width, 1}.matrix();
  }
  // total[place...] += numbers
  void add(const Tensor& total, int64_t place, const Place& numbers) const {
    if (!total.is_cpu()) {
      Tensor part = view(total, {1, numbers.columns}, {numbers.columns, 1}, place);
      torch::stable::copy_(part, torch::stable::subtract(part, numbers.tensor(), -1));
      return;
    }
    dispatch_dtype("a program", dtype_, [&](auto element) {
      using T = decltype(element);
      const auto* from = static_cast<const T*>(numbers.matrix().data);
      T* to = static_cast<T*>(total.mutable_data_ptr()) + place;
      for (int64_t i = 0; i < numbers.columns; ++i) {
        to[i] = narrow<T>(widen(to[i]) + widen(from[i * numbers.column_stride]));
      }
    });
  }

  const ScalarType dtype_;
  const Tensor& like_;
  std::vector<Tensor> constants_, made_;
};

// Memory for gradients of weights and vectors, and those of constants that come of them.
class GradientsOfConstants : public ConstantGradients {
 public:
  // needs: whether a constant gets a gradient, by its number.
  // dtype: in which gradients are added up.
  // is_sum: whether they stay in it, to be added to others.
  // none: stands for no gradient.
  // zeros: whether no row gives them anything.
  template <class Needs>
  GradientsOfConstants(const StepConstants& known, const MadeOfConstants& made,
                       const Tensor* constants, size_t count, const Needs& needs, ScalarType dtype,
                       bool is_sum, const Tensor& none, bool zeros)
      : constants_(constants), dtype_(dtype), is_sum_(is_sum), zeros_(zeros), none_(none),
        uses_(count), wholes_(count), of_weights_(made.weights.size(), none),
        of_vectors_(made.vectors.size(), Memory{none, 0}) {
    weights.resize(made.weights.size());
    vectors.resize(made.vectors.size());
    // Whether a weight or a vector needs a gradient.
    const auto note = [&](size_t made_of, bool is_weight) {
      const Terms& terms = (is_weight ? known.weights : known.vectors)[made_of];
      bool is_needed = false;
      for (size_t term = 0; term < terms.size(); ++term) {
        int64_t place = 0;
        for (const Side& side : terms[term]) {
          const int64_t i = side.constant;
          if (i >= 0 && needs(size_t(i))) {
            is_needed = true;
            uses_[size_t(i)].push_back({side, made_of, is_weight, place, term > 0,
                                        terms.size() == 1 && terms[0].size() == 1});
          }
          place += side.columns;
        }
      }
      return is_needed;
    };
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!note(i, true)) continue;
      const int64_t terms = made.weights[i].rows, columns = made.weights[i].columns;
      // As a weight of torch's linear layers lies.
      of_weights_[i] = memory({columns, terms}, "a gradient of a weight");
      weights[i] = {of_weights_[i].mutable_data_ptr(), terms, columns, 1, terms};
    }
    std::vector<bool> needed(vectors.size());
    for (size_t i = 0; i < vectors.size(); ++i) needed[i] = note(i, false);
    for (size_t i = 0; i < count; ++i) make_whole(i);
    for (size_t i = 0; i < vectors.size(); ++i) {
      if (!needed[i] || vectors[i] != nullptr) continue;
      of_vectors_[i] = {memory({made.vectors[i].columns}, "a gradient of a vector"), 0};
      vectors[i] = of_vectors_[i].data();
    }
  }

  // The gradient of a constant; `none` if it has no part in the program.
  Tensor of(size_t i) const {
    const std::vector<Use>& uses = uses_[i];
    if (uses.empty()) return none_;
    const Tensor& constant = constants_[i];
    const Tensor found = wholes_[i] ? in_shape_of(constant, *wholes_[i]) : sum(i);
    return is_sum_ || found.scalar_type() == constant.scalar_type()
               ? found
               : torch::stable::to(found, constant.scalar_type());
  }

 private:
  struct Use {
    Side side;
    size_t made_of;  // which weight or vector
    bool is_weight;
    int64_t place;   // its first column there
    bool is_shared;  // whether an earlier term has the same gradient
    bool is_all;     // whether the weight or vector consists of it alone
  };

  // Numbers of a tensor from one on.
  struct Memory {
    Tensor of;
    int64_t first;

    void* data() const {
      return static_cast<char*>(of.mutable_data_ptr()) + first * int64_t(of.element_size());
    }
  };
  Tensor memory(const std::vector<int64_t>& shape, const char* what) const {
    return allocate(none_, shape, dtype_, what, zeros_);
  }

  // A constant that vectors are parts of, as gains of several gates are, gets its gradient in one
  // piece.
  void make_whole(size_t i) {
    const std::vector<Use>& uses = uses_[i];
    if (uses.size() < 2) return;
    std::vector<std::pair<int64_t, int64_t>> parts;
    for (const Use& use : uses) {
      if (use.is_weight || !use.is_all) return;
      parts.emplace_back(use.side.first, use.side.columns);
    }
    std::sort(parts.begin(), parts.end());
    int64_t end = 0;
    for (const auto& [first, columns] : parts) {
      if (first != end) return;
      end += columns;
    }
    if (end != constants_[i].numel()) return;
    wholes_[i] = memory({end}, "a gradient of a constant");
    for (const Use& use : uses) {
      of_vectors_[use.made_of] = {*wholes_[i], use.side.first};
      vectors[use.made_of] = of_vectors_[use.made_of].data();
    }
  }

  static Tensor member_of(const Tensor& stack, int64_t i) {
    const int64_t rows = stack.size(1), columns = stack.size(2);
    return view(stack, {rows, columns}, {columns, 1}, i * rows * columns);
  }

  // A use's part of the gradient, which lies as the constant does: (rows or numbers, columns).
  Tensor part(const Use& use) const {
    const Side& side = use.side;
    if (!use.is_weight) {
      const Memory& own = of_vectors_[use.made_of];
      const bool is_all = own.of.numel() == side.columns;
      return is_all ? own.of : view(own.of, {side.columns}, {1}, own.first + use.place);
    }
    const Tensor& gradient = of_weights_[use.made_of];  // (columns, terms)
    const int64_t terms = gradient.size(1), first = use.place * terms;
    if (!side.is_transposed) return view(gradient, {terms, side.columns}, {1, terms}, first);
    const bool is_all = gradient.size(0) == side.columns;
    return is_all ? gradient : view(gradient, {side.columns, terms}, {terms, 1}, first);
  }
  Tensor sum(size_t i) const {
    const std::vector<Use>& uses = uses_[i];
    const Tensor& constant = constants_[i];
    if (uses.size() == 1) {
      const Tensor only = part(uses[0]);
      const auto sizes = only.sizes(), all = constant.sizes();
      const bool is_flat = !uses[0].is_weight && only.numel() == constant.numel();
      if (is_flat || std::equal(sizes.begin(), sizes.end(), all.begin(), all.end())) {
        const Tensor own = uses[0].is_shared ? torch::stable::clone(only) : only;
        return is_flat ? in_shape_of(constant, own) : own;
      }
    }
    std::vector<int64_t> shape(constant.sizes().begin(), constant.sizes().end());
    Tensor total = allocate(none_, shape, dtype_, "a gradient of a constant", true);
    Tensor flat = view(total, {total.numel()}, {1});  // as vectors read it
    struct Part {
      int64_t member, dim, first, end;
    };
    std::vector<Part> written;
    for (const Use& use : uses) {
      const Tensor own = part(use);
      const int64_t dim = !use.is_weight ? -1 : use.side.is_transposed ? 1 : 0;
      const int64_t member = use.is_weight ? use.side.member : -1;
      Tensor matrix = !use.is_weight ? flat : member < 0 ? total : member_of(total, member);
      const int64_t size = own.size(std::max<int64_t>(dim, 0));
      const int64_t first = use.side.first, end = first + size;
      Tensor place = torch::stable::narrow(matrix, std::max<int64_t>(dim, 0), first, size);
      const bool is_new = std::none_of(written.begin(), written.end(), [&](const Part& other) {
        if (member >= 0 && other.member >= 0 && member != other.member) return false;
        return other.member != member || other.dim != dim ||
               (other.first < end && first < other.end);
      });
      torch::stable::copy_(place, is_new ? own : torch::stable::subtract(place, own, -1));
      written.push_back({member, dim, first, end});
    }
    return total;
  }

  const Tensor* constants_;
  const ScalarType dtype_;
  const bool is_sum_, zeros_;
  const Tensor none_;
  std::vector<std::vector<Use>> uses_;
  std::vector<std::optional<Tensor>> wholes_;
  std::vector<Tensor> of_weights_;
  std::vector<Memory> of_vectors_;
};

}  // namespace fusedrnn
