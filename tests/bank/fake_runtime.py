"""The runtime of a GPU for banks, whose streams are those of the fake GPU of ``tests/fake_cuda``.

Memory of this GPU is what ``torch.empty`` gives as uint8 while ``watching()`` is on, which is how
banks ask for it; all other memory is the host's. Copies are done when their stream comes to them.
torch computes at once, so each operation first has its stream do all work so far. What it has
written of the GPU's memory is NaN until the stream comes there, and what it has read must not
change before, or ``notes()`` tells of a race: see fake_runtime.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bank.emulated_device import VIEWS
from builds import ROOT, TESTS, Build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FAKE_CUDA = TESTS / "fake_cuda"
LIBRARY = Build(
    "fake-runtime",
    (TESTS / "bank" / "fake_runtime.cpp", FAKE_CUDA / "runtime.cpp"),
    (
        "-std=c++20",
        "-O1",
        "-g0",
        "-fvisibility=hidden",
        f"-I{FAKE_CUDA}",
        f"-I{FAKE_CUDA / 'include'}",
        f"-I{TESTS / 'emulator'}",  # fibers.h, for csrc/persistent/device.h
    ),
    ("-Wl,-Bsymbolic", "-Wl,--no-undefined"),
    with_torch=False,
    headers=(ROOT / "csrc" / "base", ROOT / "csrc" / "persistent", TESTS / "emulator", FAKE_CUDA),
)
EMPTY = torch.ops.aten.empty.memory_format
POINTER, SIZE, TEXT, EVENT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_uint64
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "begin": (None, ctypes.c_uint64),
    "take_notes": (TEXT,),
    "new_stream": (POINTER,),
    "record": (EVENT, POINTER),
    "wait": (None, POINTER, EVENT),
    "synchronize": (None, EVENT),
    "run_to_here": (None, POINTER),
    "run_all": (None,),
    "by_chance": (None,),
    "allocate": (POINTER, SIZE, POINTER),
    "give_back": (None, POINTER),
    "copy": (None, POINTER, POINTER, SIZE, POINTER),
    "was_read": (None, POINTER, SIZE, POINTER, TEXT),
    "was_written": (None, POINTER, SIZE, POINTER, TEXT),
}
DEFAULT_STREAM = 0


@functools.cache
def library() -> Any:
    loaded = ctypes.CDLL(str(LIBRARY.make()))
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(loaded, f"bank_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class FakeRuntime:
    """A ``Runtime`` of ``fusedrnn._bank.engines``. A new one ends the one before."""

    current: FakeRuntime

    def __init__(self, order: int = 0, *, refuses: bool = False) -> None:
        """
        Args:
            order: Of work that is not ordered. 0: only when it has to be done, 1: copies as soon
                as they can be, else by chance.
            refuses: Whether no memory of the host can be registered.
        """
        self.gpu, self.order, self.refuses = library(), order, refuses
        self.stream = DEFAULT_STREAM
        self.registered: dict[int, int] = {}
        self.log: list[tuple[str, int, int]] = []
        """Of what was registered and unregistered."""
        self.failures: list[str] = []
        self.memories: set[int] = set()
        FakeRuntime.current = self
        self.gpu.bank_begin(order)

    # --- as CUDA ----------------------------------------------------------------------------------

    def new_stream(self) -> int:
        return self.gpu.bank_new_stream()

    def current_stream(self) -> int:
        return self.stream

    def record(self, stream: int) -> int:
        return self.gpu.bank_record(stream)

    def wait(self, stream: int, event: int) -> None:
        self.gpu.bank_wait(stream, event)
        self.gpu.bank_by_chance()

    def copy(self, to: Tensor, source: Tensor, stream: int) -> None:
        assert to.nbytes == source.nbytes and to.is_contiguous() and source.is_contiguous()
        self.gpu.bank_copy(to.data_ptr(), source.data_ptr(), to.nbytes, stream)
        if not any(self.is_registered(memory) for memory in (to, source)):
            self.gpu.bank_run_to_here(stream)  # as CUDA waits for copies of pageable memory
        self.gpu.bank_by_chance()

    def synchronize(self, event: int) -> None:
        self.gpu.bank_synchronize(event)

    def register(self, address: int, nbytes: int) -> str:
        if self.refuses:
            return "out of memory"
        if address in self.registered:
            return "already registered"
        self.registered[address] = nbytes
        self.log.append(("register", address, nbytes))
        return ""

    def unregister(self, address: int) -> None:
        if FakeRuntime.current is not self:
            return
        self.gpu.bank_run_all()
        if not is_mapped(address):
            self.failures.append("memory was unmapped before it was unregistered")
        nbytes = self.registered.pop(address, None)
        if nbytes is None:
            self.failures.append("memory was unregistered that is not registered")
        self.log.append(("unregister", address, nbytes or 0))

    # --- for tests --------------------------------------------------------------------------------

    def is_registered(self, memory: Tensor) -> bool:
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        return any(a <= begin and end <= a + n for a, n in self.registered.items())

    def notes(self) -> str:
        """What has gone wrong so far; work that is left is done before."""
        self.gpu.bank_run_all()
        return "".join([self.gpu.bank_take_notes().decode(), *self.failures])

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """As ``torch.cuda.stream``."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def watching(self) -> TorchDispatchMode:
        return _Watching(self)

    def allocate(self, nbytes: int) -> Tensor:
        address = self.gpu.bank_allocate(nbytes, self.stream)
        owner = (ctypes.c_uint8 * nbytes).from_address(address)
        memory = torch.frombuffer(owner, dtype=torch.uint8)
        weakref.finalize(owner, self._give_back, address).atexit = False
        self.memories.add(address)
        return memory

    def _give_back(self, address: int) -> None:
        if FakeRuntime.current is self:  # the memory of others is gone
            self.memories.discard(address)
            self.gpu.bank_give_back(address)


class _Watching(TorchDispatchMode):
    """Tells of each operation on memory of the GPU."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        runtime, kwargs = self.runtime, kwargs or {}
        if func is EMPTY and kwargs.get("dtype") is torch.uint8 and args[0][0]:
            return runtime.allocate(args[0][0])
        if func in VIEWS:
            return func(*args, **kwargs)
        read, written = self._used(func, args, kwargs)
        if not read and not written:
            return func(*args, **kwargs)
        runtime.gpu.bank_by_chance()
        runtime.gpu.bank_run_to_here(runtime.stream)
        found = func(*args, **kwargs)
        name = str(func).encode()
        overwritten = {memory_of(tensor) for tensor in written}
        for tensor in read:
            if memory_of(tensor) not in overwritten:
                runtime.gpu.bank_was_read(*span_of(tensor), runtime.stream, name)
        for tensor in written:
            runtime.gpu.bank_was_written(*span_of(tensor), runtime.stream, name)
        return found

    def _used(self, func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        read: list[Tensor] = []
        written: list[Tensor] = []
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            info = argument.alias_info
            to = written if info is not None and info.is_write else read
            for tensor in tree_leaves(value):
                is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
                if is_plain and tensor.numel() and memory_of(tensor) in self.runtime.memories:
                    to.append(tensor)
        return read, written


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins, and bytes to its end."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.itemsize


def is_mapped(address: int) -> bool:
    libc = ctypes.CDLL(None)
    return libc.msync(ctypes.c_void_p(address), ctypes.c_size_t(4096), 1) == 0
