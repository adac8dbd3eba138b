"""The CUDA operators load and are registered if torch has CUDA, with or without a GPU."""

from pathlib import Path

import pytest
import torch

import fusedrnn
from fusedrnn import _library

WAS_BUILT = any(Path(fusedrnn.__file__).parent.glob("_cuda*.so"))

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or not WAS_BUILT, reason="needs a torch and a build with CUDA"
)


def test_operators_are_registered_for_cuda():
    assert _library.cuda_obstacle is None
    for name in ("forward", "backward"):
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedrnn::{name}", key)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize(
    "call",
    [
        lambda: fusedrnn.StochasticGRU(3, 4, 2).cuda(),
        lambda: fusedrnn.StochasticGRU(3, 4, 2, device="cuda"),
        lambda: fusedrnn.StochasticGRU(3, 4, 2)(torch.zeros(5, 2, 3, device="cuda")),
    ],
    ids=["move", "make", "call"],
)
def test_without_a_gpu_torch_says_so(call):
    with pytest.raises(RuntimeError, match=r"NVIDIA|CUDA"):
        call()
