// Forward of a program, chunk by chunk.
#pragma once
#include <vector>

#include "pass.h"

namespace fusedrnn::program {

template <class Backend>
class Forward : Pass<Backend> {
  using Base = Pass<Backend>;
  friend Base;
  using typename Base::A, typename Base::O, typename Base::T, typename Base::Space;
  using Buffers = typename Space::Forward;
  using Base::arrays_, Base::values_, Base::results_, Base::before_, Base::after_, Base::is_direct_;
  using Base::backend_, Base::call_, Base::program_, Base::flow_;
  using Base::compact, Base::of_one_step, Base::rows_at, Base::sequence_rows, Base::value_rows,
      Base::copy_rows, Base::run_item;

 public:
  using Base::Base;

  // last: the carries after the sequence, each (batch, width).
  void run(const std::vector<T*>& last, void* workspace) {
    Arena arena(workspace);
    const Buffers buffers(call_, arena);
    this->prepare(buffers);
    place(buffers);
    if (call_.has_lengths()) {
      for (size_t i = 0; i < call_.sequences.size(); ++i) {
        backend_.zero(Matrix<T>::contiguous(call_.sequences[i], call_.seq_len * call_.batch,
                                            program_.sequences[i]));
      }
      for (size_t j = 0; j < last.size(); ++j) {  // of rows without any step
        copy_rows(last[j], call_.carries[j], program_.carries[j].width);
      }
    }
    for (int64_t index = 0; index < call_.chunks(); ++index) {
      const Chunk chunk = call_.chunk_at(index);
      keep_carries(index);
      if (call_.is_finished(chunk)) continue;
      start(chunk, buffers);
      run_chunk(chunk, last);
      save(chunk);
    }
    if (!call_.has_lengths()) finish(last);
  }

 private:
  // Says where everything is that is in the same place in all chunks.
  void place(const Buffers& buffers) {
    is_direct_.reserve(values_.size());
    for (size_t v = 0; v < values_.size(); ++v) {
      is_direct_.push_back(Buffers::is_elsewhere(call_, v) && !program_.values[v].is_in_sequence());
      if (buffers.values[v] == nullptr) continue;
      values_[v] = value_rows(buffers.values[v], program_.values[v], flow_.values[v].is_of_chunk());
    }
    for (size_t j = 0; j < before_.size(); ++j) {
      const Carry& carry = program_.carries[j];
      if (buffers.carries[j] != nullptr) {
        const int64_t step_stride = flow_.carries[j].is_read_after ? Rows::kCompact : 0;
        before_[j] = carry.is_in_sequence()
                         ? rows_at(static_cast<O*>(buffers.carries[j]), carry.width, step_stride)
                         : rows_at(static_cast<A*>(buffers.carries[j]), carry.width, step_stride);
      }
      after_[j] = buffers.carries_after[j];
      if (after_[j] != nullptr) copy_rows(after_[j], call_.carries[j], carry.width);
    }
  }

  void keep_carries(int64_t index) {
    for (size_t j = 0; j < after_.size(); ++j) {
      if (call_.kept[j] == nullptr) continue;
      const int64_t width = program_.carries[j].width;
      copy_rows(call_.kept[j] + index * call_.batch * width, after_[j], width);
    }
  }

  void start(const Chunk& chunk, const Buffers& buffers) {
    this->start_inputs(chunk, buffers);
    for (size_t a = 0; a < arrays_.size(); ++a) {
      const int64_t columns = program_.arrays[a].columns;
      if (call_.is_saved() && chunk.is_full) {
        arrays_[a] = rows_at(call_.saved[a], columns, call_.batch * columns, chunk.first);
      } else if (call_.is_saved() || flow_.arrays[a].is_of_chunk) {
        arrays_[a] = compact(buffers.arrays[a], columns);
      } else {
        arrays_[a] = of_one_step(buffers.arrays[a], columns);
      }
    }
    for (size_t v = 0; v < values_.size(); ++v) {
      const Value& value = program_.values[v];
      if (value.is_in_sequence()) {
        values_[v] = sequence_rows(value.sequence, value.offset, chunk);
      }
      results_[v] = values_[v];
    }
  }

  void run_chunk(const Chunk& chunk, const std::vector<T*>& last) {
    program_.for_items(Phase::Before, [&](const Item& item) { run_item(item, chunk); });
    const int64_t row_work = this->shared_row_work([](const Product&) { return true; });
    this->share_steps(*this, chunk, row_work, [&](Forward& pass) {
      for (int64_t t = 0; t < chunk.steps; ++t) pass.run_step(chunk, t, last);
    });
    program_.for_items(Phase::After, [&](const Item& item) { run_item(item, chunk); });
  }
  void run_step(const Chunk& chunk, int64_t t, const std::vector<T*>& last) {
    const int64_t s = chunk.step(t);
    if (chunk.rows_of(s) == 0) return;
    enter(chunk, t);
    program_.for_items(Phase::Step, [&](const Item& item) { run_item(item, chunk, s); });
    this->leave_step(chunk, t);
    if (call_.has_lengths() && call_.ends_at[size_t(chunk.first + s)]) end_rows(chunk, t, last);
  }
  void enter(const Chunk& chunk, int64_t t) {
    this->enter_step(chunk, t);
    for (size_t v = 0; v < values_.size(); ++v) {
      if (is_direct_[v]) values_[v] = results_[v];
    }
    for (size_t j = 0; j < before_.size(); ++j) {
      if (program_.carries[j].is_in_sequence() && before_[j].exists()) {
        this->gather_from_sequence(j, chunk, {chunk.step(t), 1});
      }
    }
  }

  // Copies the states of the rows for which step t is the last.
  void end_rows(const Chunk& chunk, int64_t t, const std::vector<T*>& last) {
    const int64_t s = chunk.step(t), rows = chunk.rows_of(s);
    for (size_t j = 0; j < last.size(); ++j) {
      const Carry& carry = program_.carries[j];
      const auto end = [&](const auto* after, int64_t stride) {
        using P = std::remove_const_t<std::remove_pointer_t<decltype(after)>>;
        backend_.carry_last(
            CarryLast<T, P>{carry.width, chunk.first + s, call_.mask, after, stride, last[j]},
            rows);
      };
      if (carry.is_in_sequence()) {
        const Rows from = sequence_rows(carry.sequence, carry.offset, chunk);
        end(static_cast<const T*>(from.at(chunk, s)), from.stride);
      } else {
        end(static_cast<const A*>(after_[j]), carry.width);
      }
    }
  }

  // The states after the whole sequence, if all rows take all steps.
  void finish(const std::vector<T*>& last) {
    const int64_t t = call_.mask.direction > 0 ? call_.seq_len - 1 : 0;
    for (size_t j = 0; j < last.size(); ++j) {
      const Carry& carry = program_.carries[j];
      if (!carry.is_in_sequence()) {
        copy_rows(last[j], after_[j], carry.width);
        continue;
      }
      const int64_t width = program_.sequences[size_t(carry.sequence)];
      const T* state =
          call_.sequences[size_t(carry.sequence)] + t * call_.batch * width + carry.offset;
      backend_.copy(Matrix<T>::contiguous(last[j], call_.batch, carry.width),
                    Matrix<const T>{state, call_.batch, carry.width, width, 1});
    }
  }

  // Copies arrays that are not in the place where they are saved.
  void save(const Chunk& chunk) {
    if (!call_.is_saved() || chunk.is_full) return;
    for (size_t a = 0; a < arrays_.size(); ++a) {
      const int64_t columns = program_.arrays[a].columns;
      const Rows& rows = arrays_[a];
      for (int64_t s = 0; s < chunk.steps && chunk.rows_of(s) > 0; ++s) {
        A* out = call_.saved[a] + (chunk.first + s) * call_.batch * columns;
        backend_.copy(Matrix<A>::contiguous(out, chunk.rows_of(s), columns),
                      rows.matrix<const A>(chunk, {s, 1}, 0, columns));
      }
    }
  }
};

}  // namespace fusedrnn::program
