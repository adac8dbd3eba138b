"""Graphs of operations by torch's make_fx, of which other threads see nothing.

For the time of a trace, make_fx exchanges methods of torch.nn.Module, and has every function of
torch.compile refuse to run, in all threads. Functions of tensors alone need neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn

from .._front.compile_lock import Busy

_LONGEST_WAIT = 60.0
"""Seconds."""


def make_graph(
    function: Callable[..., Any], *arguments: Any, decompositions: Mapping[Any, Any]
) -> fx.GraphModule:
    """The graph of what a function of tensors computes of these, as operations of ATen.

    Raises:
        Busy: Another thread takes too long.
        Exception: What the function raises.
    """
    # These import torch's compiler, which takes most of a second.
    from torch._dynamo import convert_frame
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    make = make_fx(dispatch_functionalize(function), dict(decompositions), pre_dispatch=False)
    for cell in make.__closure__ or ():  # one of them is what traces
        construct = getattr(cell.cell_contents, "_construct_modes_with_fx_tracer", None)
        if construct is not None:
            cell.cell_contents._construct_modes_with_fx_tracer = functools.partial(
                _construct_with_own_trace, construct
            )
    # Both keep their decompositions where all threads find them.
    if not convert_frame.compile_lock.acquire(timeout=_LONGEST_WAIT):
        raise Busy("another thread is within torch.compile")
    try:
        return make(*arguments)
    finally:
        convert_frame.compile_lock.release()


def _construct_with_own_trace(construct: Callable[[Any], Any], tracer: Any) -> Any:
    tracer.trace = functools.partial(_trace, tracer)
    return construct(tracer)


def _trace(tracer: Any, function: Any, concrete_args: tuple[Any, ...]) -> fx.Graph:
    """What torch.fx.Tracer.trace does with a function that calls no modules."""
    tracer.root = nn.Module()
    tracer.graph = fx.Graph(tracer_cls=type(tracer))
    tracer.tensor_attrs = {}
    call, arguments = tracer.create_args_for_root(function, False, concrete_args)
    results = tracer.create_arg(call(*arguments))
    tracer.create_node("output", "output", (results,), {})
    return tracer.graph
