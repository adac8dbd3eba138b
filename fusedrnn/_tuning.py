"""Settings of this process that change how the operators work on GPUs.

No setting changes a result, but for the rounding to TF32 that torch's own setting allows. A call
captures them all as one number, which its backward pass uses too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.backends.cudnn import rnn as cudnn_rnn

from . import _helpers as helpers

_FREE_FOR_COLLECTIVES = 16  # multiprocessors
_TUNING = helpers.TUNING


class _Switches:
    """The settings as they are now; code outside of this module and of tests only reads them."""

    replay_chunks = False
    exchange_by_flags = False
    """Whether blocks of a persistent kernel announce results by flags instead of packets."""
    overlap_chunks = False
    """Whether a second stream works on other chunks where a persistent kernel leaves room."""
    free_multiprocessors: int | None = None


switches = _Switches()


class _Setting:
    """A setting that takes effect when it is made, and until the end of a ``with`` around it."""

    _name: str

    def __init__(self, value: Any) -> None:
        self._value, self._before = value, getattr(switches, self._name)
        setattr(switches, self._name, value)

    def __enter__(self) -> None:
        setattr(switches, self._name, self._value)  # again, for a setting that was kept until now

    def __exit__(self, *error: object) -> None:
        setattr(switches, self._name, self._before)


class set_chunk_replay(_Setting):
    """Sets whether a call records the steps of a chunk into a CUDA graph and replays it.

    A call then spends less time on launching small kernels, and no bit of a result changes. The
    default is off, because CUDA lets no thread synchronise a device while another thread records,
    as ``torch.cuda.synchronize`` does: turn it on where no other thread needs that. In a call that
    a CUDA graph captures anyway, by ``torch.cuda.graph`` or ``torch.compile``, in those of cells
    written in Python, and on the CPU it has no effect.

    Works as a function, and as a context manager::

        fusedrnn.set_chunk_replay(True)
        with fusedrnn.set_chunk_replay(True):
            output, h_n = rnn(x)

    Args:
        enabled: True to record and replay. It holds for the whole process, from the next call on.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """

    _name = "replay_chunks"

    def __init__(self, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"fusedrnn: enabled must be a bool, got {type(enabled).__name__}")
        super().__init__(enabled)


class set_free_multiprocessors(_Setting):
    """Sets how many multiprocessors of a GPU persistent kernels leave free for other kernels.

    The blocks of a persistent kernel fill their multiprocessors until it ends, and it begins when
    all of them have room. Other kernels run on the remaining multiprocessors. If none remain, the
    collectives of DistributedDataParallel and FSDP wait for each chunk of steps, and each chunk
    waits for them. But with fewer blocks each block may have more rows, and take more time, so the
    default is 0 where nothing is known to run at the same time. Set it if you run kernels of your
    own on another stream; set it to 0 if collectives never run during backward. A persistent
    kernel always gets enough multiprocessors for one copy of the weights.

    Works as a function, and as a context manager. It holds for all GPUs of this process, from the
    next call on, and for :func:`fusedrnn.plan`; a CUDA graph keeps what it was captured with.

    Args:
        count: Multiprocessors. None, the default, means 16 in a process that
            ``torch.distributed`` has joined with others, by whichever backend, and 0 elsewhere.

    Raises:
        TypeError: ``count`` is neither an int nor None.
        ValueError: ``count`` is below 0, or more than any GPU could have.
    """

    _name = "free_multiprocessors"

    def __init__(self, count: int | None) -> None:
        if count is not None:
            if not isinstance(count, int) or isinstance(count, bool):
                name = type(count).__name__
                raise TypeError(f"fusedrnn: count must be an int or None, got {name}")
            if not 0 <= count < 2**31:
                raise ValueError(f"fusedrnn: count must be in [0, 2^31), got {count}")
        super().__init__(count)


def free_multiprocessors() -> int:
    """How many multiprocessors persistent kernels leave free now."""
    if switches.free_multiprocessors is not None:
        return switches.free_multiprocessors
    is_joined = distributed.is_available() and distributed.is_initialized()
    return _FREE_FOR_COLLECTIVES if is_joined and distributed.get_world_size() > 1 else 0


def allows_tf32(dtype: torch.dtype) -> bool:
    """Whether a GPU may now round products of this dtype to TF32, as torch lets nn.LSTM do.

    A graph of torch.compile has a guard on that setting: it is compiled again when it changes.
    """
    if dtype != torch.float32:
        return False  # without a guard
    return bool(cudnn_rnn.fp32_precision == "tf32")  # type: ignore[attr-defined]


def number(dtype: torch.dtype) -> int:
    """All settings as they are now, as the operators take them."""
    return int(
        _TUNING["replay"] * switches.replay_chunks
        + _TUNING["by_flags"] * switches.exchange_by_flags
        + _TUNING["overlap"] * switches.overlap_chunks
        + _TUNING["tf32"] * allows_tf32(dtype)
        + _TUNING["free_multiprocessors"] * free_multiprocessors()
    )


def number_for(input: Tensor) -> int:
    """The settings for a call with this input: none of them means anything on the CPU."""
    return number(input.dtype) if _matters(input) else 0


def _matters(input: Tensor) -> bool:
    return not input.is_cpu  # read on the CPU, a setting would only become a guard of a graph
