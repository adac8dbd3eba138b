"""Functions that generated stages call, against torch; their errors are in values/test_math.py."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from compiler.stage_library import EXPORT, compiled, for_set, marked_sets
from torch import Tensor

OF_ONE_NUMBER = "exp log log1p expm1 sqrt rsqrt sigmoid tanh erf sin cos"
OF_ONE_NUMBER += " floor ceil round trunc abs sign"
OF_ONE_NUMBER += " atan asin acos exp2 log2 log10"
# As printed code calls them, of `a` and `b`; and torch's.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        f"math::{name}(a)": lambda a, b, name=name: getattr(torch, name)(a)
        for name in OF_ONE_NUMBER.split()
    },
    "math::softplus(a)": lambda a, b: torch.nn.functional.softplus(a, threshold=50.0),
    "math::pow(a, b)": torch.pow,
    # torch's overflow in float64 where results do not.
    "math::sinh(a)": lambda a, b: torch.from_numpy(np.sinh(a.numpy())),
    "math::cosh(a)": lambda a, b: torch.from_numpy(np.cosh(a.numpy())),
    "math::atan2(a, b)": torch.atan2,
    "math::hypot(a, b)": torch.hypot,
    "math::fmod(a, b)": torch.fmod,
    "math::min2(a, b)": torch.minimum,
    "math::max2(a, b)": torch.maximum,
    "math::select(a < b, a, A(b + number<A>(0.5)))": lambda a, b: torch.where(a < b, a, b + 0.5),
    "math::select(mask_and(a < b, a >= 0.0f), a, b)": lambda a, b: torch.where(
        (a < b) & (a >= 0), a, b
    ),
    "math::select(mask_or(a < b, a == 1.0f), a, b)": lambda a, b: torch.where(
        (a < b) | (a == 1), a, b
    ),
    "math::select(mask_not(a < b), a, b)": lambda a, b: torch.where(~(a < b), a, b),
}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, math.inf, -math.inf, math.nan]
SPECIAL += [1e-20, -1e-20, 30.0, -30.0, 90.0, -90.0, 710.0, 3e6, -3e6, 2.0**23 + 1, 1e30, -1e30]


def text(isa: str) -> str:
    cases = "".join(f"    case {i}: return {call};\n" for i, call in enumerate(FUNCTIONS))
    return f"""{for_set(isa)}namespace fusedrnn::program {{
template <class A>
FUSEDRNN_HD A apply(int which, A a, A b) {{
  switch (which) {{
{cases}  }}
  return a;
}}
}}
using namespace fusedrnn;
{EXPORT} void of_doubles(int which, int n, const double* a, const double* b, double* y) {{
  for (int i = 0; i < n; ++i) y[i] = program::apply(which, a[i], b[i]);
}}
{EXPORT} void of_floats(int which, int n, const float* a, const float* b, float* y) {{
  for (int i = 0; i < n; ++i) y[i] = program::apply(which, a[i], b[i]);
}}
{EXPORT} void of_vectors(int which, int n, const float* a, const float* b, float* y) {{
  for (int i = 0; i < n; i += kLanes) {{
    store(y + i, program::apply(which, load(a + i, n - i), load(b + i, n - i)), n - i);
  }}
}}
"""


@pytest.fixture(scope="module", params=marked_sets())
def functions(request: pytest.FixtureRequest) -> ctypes.CDLL:
    path = compiled(f"functions_{request.param}", text(request.param))
    loaded = ctypes.CDLL(str(path))
    for name in ("of_doubles", "of_floats", "of_vectors"):
        getattr(loaded, name).argtypes = [ctypes.c_int] * 2 + [ctypes.c_void_p] * 3
    return loaded


def check(kind: str, library: ctypes.CDLL, call: str, a: Tensor, b: Tensor) -> None:
    y = torch.empty_like(a)
    pointers = (tensor.data_ptr() for tensor in (a, b, y))
    getattr(library, kind)(list(FUNCTIONS).index(call), len(a), *pointers)
    exact = FUNCTIONS[call](a.double(), b.double())
    info = torch.finfo(a.dtype)
    expected = exact.to(a.dtype)
    # Results near the smallest number may be 0 instead; near the largest one, inf.
    tiny = info.smallest_normal * 1.5 if a.dtype == torch.float32 else 0.0
    is_edge = (exact.abs() > info.max * (1 - 4 * info.eps)) & (y.double().abs() > info.max * 0.999)
    y = torch.where(is_edge & (y.sign() == expected.sign()), expected, y)
    torch.testing.assert_close(y, expected, rtol=3 * info.eps, atol=tiny, equal_nan=True)
    if call not in ("math::min2(a, b)", "math::max2(a, b)"):  # torch's zeros depend on their order
        is_zero = (y == 0) & (expected == 0)
        assert torch.equal(y.signbit()[is_zero], expected.signbit()[is_zero])


@pytest.mark.parametrize("kind", ["of_doubles", "of_floats", "of_vectors"])
@pytest.mark.parametrize("call", FUNCTIONS)
def test_special_and_random_numbers(functions: ctypes.CDLL, kind: str, call: str) -> None:
    dtype = torch.float64 if kind == "of_doubles" else torch.float32
    a, b = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=dtype).T.contiguous()
    check(kind, functions, call, a, b)
    for scale in (1e-3, 1.0, 20.0):
        check(kind, functions, call, *(torch.randn(2, 10_001, dtype=dtype) * scale))
    check(kind, functions, call, *torch.randn(2, 1001, dtype=dtype).exp())
