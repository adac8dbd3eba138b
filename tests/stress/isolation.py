"""Calls a function in a process of its own, with a limit of time."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock


class Broken(RuntimeError):
    """The process hung, died, or raised an error; the text says which."""


def _report(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()


def isolated(
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    method: str = "spawn",
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Returns the function's result. ``seconds`` is a limit for hangs, not a measure of speed.

    Raises:
        Broken: The function did not return.
    """
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, function, arguments), daemon=False)
    with mock.patch.dict(os.environ, environment or {}):
        process.start()
    sender.close()  # so that the pipe ends with the process
    try:
        if not receiver.poll(seconds):
            raise Broken(f"hung: no answer after {seconds:g} s")
        is_answer, answer = receiver.recv()
        process.join(seconds)
    except EOFError:
        process.join()
        raise Broken(f"died with exit status {process.exitcode}") from None
    finally:
        receiver.close()
        is_hung = process.is_alive()
        process.kill()
        process.join()
    if not is_answer:
        raise Broken(f"raised an error:\n{answer}")
    if is_hung or process.exitcode:
        end = "hung" if is_hung else f"died with exit status {process.exitcode}"
        raise Broken(f"{end} after its answer")
    return answer
