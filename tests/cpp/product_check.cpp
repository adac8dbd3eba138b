// Products by dots and by panels, also of a packed operand (csrc/cpu/flat_product.h,
// panel_product.h) at all kinds of edges: compared with sums in long double, with NaN around
// everything that they may read, and known numbers around everything that they may write.
#include "check.h"
// (the instruction set first)
#include <algorithm>
#include <initializer_list>
#include <random>

#include "../../csrc/cpu/flat_product.h"
#include "../../csrc/cpu/panel_product.h"

namespace fusedrnn::check {
namespace {

using cpu::FUSEDRNN_ISA::FlatProduct;
using cpu::FUSEDRNN_ISA::PanelProduct;

// The columns [first, last) of out (+)= a b.
template <class A>
using Product = void (*)(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
                         bool accumulate, int64_t first, int64_t last);

// NaN, as of an earlier product.
template <class A>
A* scratch() {
  static std::vector<A> numbers;
  numbers.assign(cpu::kScratchNumbers, std::numeric_limits<A>::quiet_NaN());
  return numbers.data();
}

template <class A>
void panels(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
            bool accumulate, int64_t first, int64_t last) {
  const int64_t count = last - first;
  PanelProduct<A>::all(out.column_range(first, count), a, b.column_range(first, count), accumulate,
                       scratch<A>());
}

// By a copy of b in panels, which two threads have made.  Nothing is written around it, and the
// bits are those of a b that is not packed.
template <class A>
void packed(const Matrix<A>& out, const Matrix<const A>& a, const Matrix<const A>& b,
            bool accumulate, int64_t first, int64_t last) {
  constexpr int64_t kAround = 64;
  const int64_t count = last - first, numbers = cpu::packed_numbers(b.rows, count);
  const int64_t half = std::min(cpu::kPackedColumns, count);
  const Matrix<A> to = out.column_range(first, count);
  const Matrix<const A> of_b = b.column_range(first, count);
  std::vector<A> expected(size_t(a.rows * count)), memory(size_t(numbers + 2 * kAround), A(7));
  const auto same = Matrix<A>::contiguous(expected.data(), a.rows, count);
  for (int64_t r = 0; r < a.rows; ++r) {
    std::copy_n(to.data + r * to.row_stride, count, same.data + r * count);
  }
  A* const panels = memory.data() + kAround;
  PanelProduct<A>::pack(of_b, panels, half, count);
  PanelProduct<A>::pack(of_b, panels, 0, half);
  PanelProduct<A>::packed(to, a, panels, accumulate, half, count);
  PanelProduct<A>::packed(to, a, panels, accumulate, 0, half);
  PanelProduct<A>::all(same, a, of_b, accumulate, scratch<A>());
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < count; ++c) {
      const A x = to.data[r * to.row_stride + c], y = same.data[r * count + c];
      expect(x == y, "a packed product", y, x);
    }
  }
  for (int64_t i = 0; i < kAround; ++i) {
    const A before = memory[size_t(i)], after = memory[size_t(kAround + numbers + i)];
    expect(before == 7 && after == 7, "what is around panels", before, after);
  }
}

// A matrix with margins around each row and around the whole.
template <class A>
struct Surrounded {
  static constexpr int64_t kAround = 3;
  std::vector<A> all;
  int64_t rows, columns, row_stride, column_stride;

  Surrounded(int64_t rows, int64_t columns, bool transposed, A around, int64_t least_stride = 0)
      : rows(rows), columns(columns) {
    const int64_t lines = transposed ? columns : rows, length = transposed ? rows : columns;
    const int64_t stride = std::max(length + kAround, least_stride);
    row_stride = transposed ? 1 : stride;
    column_stride = transposed ? stride : 1;
    all.assign(size_t(kAround + lines * stride), around);
  }
  A& at(int64_t row, int64_t column) {
    return all[size_t(kAround + row * row_stride + column * column_stride)];
  }
  void draw(std::mt19937& random) {
    std::uniform_real_distribution<double> number(-1, 1);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) at(r, c) = A(number(random));
    }
  }
  void fill(A value) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) at(r, c) = value;
    }
  }
  Matrix<A> matrix() { return {&at(0, 0), rows, columns, row_stride, column_stride}; }
};

// The error of a sum of parts is at most the terms of a part plus the number of parts, in
// roundings.
template <class A>
double most_off(int64_t terms, double sizes) {
  const auto count = double(terms);
  return std::numeric_limits<A>::epsilon() * (std::fmin(count, 128) + count / 64 + 16) * sizes;
}

template <class A>
void check_product(Product<A> product, Surrounded<A>& a, Surrounded<A>& b, Surrounded<A> out,
                   bool accumulate, int64_t first, int64_t last) {
  const Surrounded<A> before = out;
  product(out.matrix(), a.matrix(), b.matrix(), accumulate, first, last);
  Surrounded<A> expected = before;
  for (int64_t r = 0; r < a.rows; ++r) {
    // The same row alone, and all columns.
    Surrounded<A> alone(1, b.columns, false, 0);
    for (int64_t c = 0; c < b.columns; ++c) alone.at(0, c) = expected.at(r, c);
    product(alone.matrix(), Matrix<const A>(a.matrix()).row_range(r, 1), b.matrix(), accumulate, 0,
            b.columns);
    for (int64_t c = first; c < last; ++c) {
      long double sum = accumulate ? expected.at(r, c) : 0, sizes = std::fabs(double(sum));
      for (int64_t k = 0; k < a.columns; ++k) {
        const long double term = static_cast<long double>(a.at(r, k)) * b.at(k, c);
        sum += term;
        sizes += std::fabs(double(term));
      }
      const double error = std::fabs(double(out.at(r, c) - sum));
      expect(error <= most_off<A>(a.columns, double(sizes)), "a product", double(sum),
             out.at(r, c));
      expect(out.at(r, c) == alone.at(0, c), "a row alone", alone.at(0, c), out.at(r, c));
      expected.at(r, c) = out.at(r, c);
    }
  }
  const bool same =
      std::memcmp(out.all.data(), expected.all.data(), out.all.size() * sizeof(A)) == 0;
  expect(same, "what is around", double(a.columns), double(b.columns));
}

// Which of the matrices have contiguous rows rather than columns; and the least stride of a.
struct Layout {
  bool of_a, of_b;
  int64_t stride_of_a = 0;
};

template <class A>
void check_edges(Product<A> product, Layout lies, std::initializer_list<int64_t> all_rows) {
  std::mt19937 random(1);
  const A nan = std::numeric_limits<A>::quiet_NaN();
  for (const int64_t rows : all_rows) {
    for (const int64_t terms : {1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 63, 64, 65, 200, 1025}) {
      for (const int64_t columns : {16, 17, 19, 32, 47, 64, 65, 81}) {
        Surrounded<A> a(rows, terms, !lies.of_a, nan, lies.stride_of_a),
            b(terms, columns, !lies.of_b, nan);
        Surrounded<A> out(rows, columns, false, 7);
        a.draw(random);
        b.draw(random);
        out.draw(random);
        const int64_t third = columns / 3;
        check_product(product, a, b, out, false, 0, columns);
        check_product(product, a, b, out, true, 0, third);  // as threads share them
        check_product(product, a, b, out, true, third, columns);
        out.fill(nan);
        check_product(product, a, b, out, false, third, 2 * third);
      }
    }
  }
}

// Many equal terms: if they were added one after another, their roundings would be equal too.
template <class A>
void check_many(Product<A> product, Layout lies) {
  Surrounded<A> a(2, 65'536, !lies.of_a, 0), b(65'536, 16, !lies.of_b, 0), out(2, 16, false, 0);
  a.fill(A(0.1));
  b.fill(A(0.3));
  check_product(product, a, b, out, false, 0, 16);
}

// 16-bit numbers make the panels that the same numbers make in float; nothing beyond them is read,
// which the sanitizers of tests/cpp look after, since the numbers end where their memory does.
template <class Narrow>
void check_narrow() {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> number(-1, 1);
  for (const bool has_rows : {true, false}) {
    for (const int64_t terms : {1, 3, 8, 17, 64, 130}) {
      for (const int64_t columns : {16, 19, 32, 65, 130}) {
        const auto count = size_t(terms * columns);
        std::vector<Narrow> narrow(count);
        std::vector<float> wide(count);
        for (size_t i = 0; i < count; ++i) {
          narrow[i].bits = uint16_t(Narrow::narrow(number(random)));
          wide[i] = Narrow::template widen<float>(uint32_t(narrow[i].bits));
        }
        const auto panels_of = [&](const auto* data) {
          using Matrices = Matrix<std::remove_pointer_t<decltype(data)>>;
          const Matrices b = has_rows ? Matrices::contiguous(data, terms, columns)
                                      : Matrices::contiguous(data, columns, terms).transposed();
          std::vector<float> panels(size_t(cpu::packed_numbers(terms, columns)), 7.0F);
          PanelProduct<float>::pack(b, panels.data(), 0, columns);
          return panels;
        };
        const std::vector<float> expected = panels_of(wide.data()), got = panels_of(narrow.data());
        const bool same = std::memcmp(expected.data(), got.data(), got.size() * sizeof(float)) == 0;
        expect(same, "panels of 16-bit numbers", double(terms), double(columns));
      }
    }
  }
}

template <class A>
void edges_of() {
  check_edges<A>(&FlatProduct<A>::columns, {true, false}, {1, 2, 3, 4, 5, 8, 9});
  check_edges<A>(&panels<A>, {true, true}, {1, 2, 3, 4, 5, 6, 7, 8, 67});
  check_edges<A>(&panels<A>, {true, false}, {2, 8, 67});
  check_edges<A>(&panels<A>, {false, true}, {3, 7, 67});
  check_edges<A>(&panels<A>, {false, true, 1100}, {6, 8, 9, 10, 12, 67});
  check_edges<A>(&panels<A>, {true, false, 1100}, {64, 65});
  check_edges<A>(&packed<A>, {true, true}, {1, 5, 8, 13});
  check_edges<A>(&packed<A>, {true, false}, {1, 6, 7});
}
template <class A>
void many_of() {
  check_many<A>(&FlatProduct<A>::columns, {true, false});
  check_many<A>(&panels<A>, {true, true});
  check_many<A>(&panels<A>, {true, false});
  check_many<A>(&packed<A>, {true, false});
}

void edges() {
  edges_of<float>();
  edges_of<double>();
  check_narrow<BFloat16>();
  check_narrow<Half>();
}
void many_terms() {
  many_of<float>();
  many_of<double>();
}

}  // namespace
}  // namespace fusedrnn::check

int main(int argc, char** argv) {
  using namespace fusedrnn::check;
  return run_named(argc, argv, {Check{"edges", edges}, Check{"many_terms", many_terms}});
}
