"""The operator that draws random numbers by themselves, as the kernels draw them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedrnn import _ops
from fusedrnn._ops import NORMAL, UNIFORM
from fusedrnn._philox import _words, philox_normal

F64 = torch.float64
DTYPES = [torch.float32, F64, torch.bfloat16, torch.float16]
# Widths of whole groups of four columns and of whole vectors, and others.
SHAPES = [(5, 3, 11), (2, 3, 1), (1, 2, 64), (3, 1, 131), (4, 32, 64)]


def uniform(seed, steps, batch, width, stream, dtype, first_step=0):
    """The uniform numbers in plain torch; those of 16 bits are rounded twice, as in the kernels."""
    words = _words(seed, steps, batch, width, stream, first_step).flatten(-2)[..., :width]
    if dtype == F64:
        return (words.double() + 0.5) * 2.0**-32
    numbers = (((words >> 8).double() + 0.5) * 2.0**-24).float().to(dtype)
    least = 2.0**-24 if dtype == torch.float16 else 2.0**-25
    return numbers.clamp(least, 1 - torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [7, -(2**62)])
def test_normals_are_those_of_eps(device, seed, dtype):
    seed = torch.tensor([seed], device=device)
    for shape in SHAPES:
        drawn = _ops.draw(seed, *shape, stream=3, dtype=dtype, first_step=9)
        assert drawn.shape == shape and drawn.dtype == dtype and drawn.device == seed.device
        expected = philox_normal(seed, *shape, 3, F64, first_step=9)
        bound = {F64: 1e-14, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
        tiny = {F64: 1e-14, torch.float32: 1e-6}.get(dtype, 2e-6)
        torch.testing.assert_close(drawn.double(), expected, rtol=bound, atol=tiny)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uniform_numbers_are_those_of_the_words(device, dtype):
    seed = torch.tensor(-5, device=device)
    for shape in [*SHAPES, (8, 128, 256)]:
        options = {"stream": 2**32 - 1, "dtype": dtype, "first_step": 2**31}
        drawn = _ops.draw(seed, *shape, distribution=UNIFORM, **options)
        assert torch.equal(drawn, uniform(seed, *shape, **options))


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (torch.float32, 2.0**-25, 1 - 2.0**-24),
        (F64, 2.0**-33, (0xFFFFFF7F + 0.5) * 2.0**-32),
        (torch.bfloat16, 2.0**-25, 1 - 2.0**-8),
        (torch.float16, 2.0**-24, 1 - 2.0**-11),
    ],
    ids=str,
)
def test_uniform_numbers_are_never_0_or_1(device, dtype, least, most):
    """In the first place, these seeds have the last word 0, and 0xffffff7f."""
    for seed, expected in ((1343428, least), (39075, most)):
        seed = torch.tensor(seed, device=device)
        drawn = _ops.draw(seed, 1, 1, 4, stream=0, distribution=UNIFORM, dtype=dtype)
        assert drawn[0, 0, 3].item() == expected


@pytest.mark.parametrize(
    ("distribution", "mean", "variance", "moments"),
    [  # of numbers with mean 0 and variance 1: means and variances of their powers 1 to 4
        (NORMAL, 0, 1, [(0, 1), (1, 2), (0, 15), (3, 96)]),
        (UNIFORM, 1 / 2, 1 / 12, [(0, 1), (1, 4 / 5), (0, 27 / 7), (9 / 5, 144 / 25)]),
    ],
)
@pytest.mark.parametrize("width", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_moments(device, width, distribution, mean, variance, moments):
    """No neighbours along any axis are correlated, nor their squares: of streams, steps, rows.

    Along a row nor those of a group of four and the next one.
    """
    seed = torch.tensor(3, device=device)
    x = torch.stack(
        [_ops.draw(seed, 16, 64, width, stream=i, distribution=distribution) for i in range(4)]
    )
    x = (x.double() - mean) / variance**0.5
    for power, (expected, variance) in enumerate(moments, 1):
        assert abs(x.pow(power).mean() - expected) < 5 * (variance / x.numel()) ** 0.5
    for numbers, variance in ((x, 1), (x.square() - 1, moments[1][1])):
        for dim, lag in ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (3, 3), (3, 4)):
            count = x.shape[dim] - lag
            products = numbers.narrow(dim, lag, count) * numbers.narrow(dim, 0, count)
            assert abs(products.mean()) < 5 * variance / products.numel() ** 0.5


@pytest.mark.parametrize("distribution", [NORMAL, UNIFORM])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_depend_on_their_place_alone(device, threads, dtype, distribution):
    seed = torch.tensor([99], device=device)
    options = {"stream": 2, "distribution": distribution, "dtype": dtype}
    whole = _ops.draw(seed, 40, 16, 70, **options)
    parts = [_ops.draw(seed, 8, 16, 70, **options, first_step=t) for t in range(0, 40, 8)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole[:13, :4, :9], _ops.draw(seed, 13, 4, 9, **options))
    assert not torch.equal(whole, _ops.draw(seed + 1, 40, 16, 70, **options))
    assert not torch.equal(whole, _ops.draw(seed, 40, 16, 70, **(options | {"stream": 3})))
    assert not torch.equal(whole, _ops.draw(seed + 2**32, 40, 16, 70, **options))
    threads(2)
    assert torch.equal(whole, _ops.draw(seed, 40, 16, 70, **options))


def test_no_numbers_at_all(device):
    seed = torch.tensor(1, device=device)
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        assert _ops.draw(seed, *shape, stream=0).shape == shape


def test_tracers_see_the_shape():
    with FakeTensorMode():
        drawn = _ops.draw(torch.tensor([1]), 2, 3, 5, stream=0, dtype=torch.float16)
    assert drawn.shape == (2, 3, 5) and drawn.dtype == torch.float16


def test_errors(device):
    good = {
        "seed": torch.tensor([1], device=device),
        "steps": 2,
        "batch": 3,
        "width": 4,
        "stream": 0,
    }
    for message, changes in {
        "seed must be Long, got Int": {"seed": good["seed"].int()},
        r"seed must have one element, got \(2,\)": {"seed": good["seed"].expand(2)},
        "steps, batch and width must be 0 or more, got -1, 3 and 4": {"steps": -1},
        "steps, batch and width must be 0 or more, got 2, -3 and 4": {"batch": -3},
        "steps, batch and width must be 0 or more, got 2, 3 and -4": {"width": -4},
        "sizes are too large: 4611686018427387904 times 3": {"steps": 2**62},
        r"steps \* batch and width must be below 2\^32": {"batch": 2**31},
        r"steps \* batch and width must be below": {"width": 2**32},
        r"sizes are too large: there may be 2\^50 numbers": {"batch": 2**20, "width": 2**31},
        r"first_step must be 0 or more, and below 2\^32 with": {"first_step": -1},
        "first_step must be 0 or more, and below": {"first_step": 2**32 - 2},
        r"stream must be in \[0, 2\^32\), got -1": {"stream": -1},
        r"stream must be in \[0, 2\^32\), got 4294967296": {"stream": 2**32},
        "distribution must be 0 .normal. or 1 .uniform., got 2": {"distribution": 2},
        "dtype must be float32, float64, bfloat16 or float16, got Int": {"dtype": torch.int32},
        "dtype must be float32, .*, got ComplexFloat": {"dtype": torch.complex64},
    }.items():
        with pytest.raises(RuntimeError, match=f"^fusedrnn: {message}"):
            _ops.draw(**(good | changes))
