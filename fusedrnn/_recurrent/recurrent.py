"""Any cell as a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor, nn

from .._options import check_flag, kind_of
from .._step.noise import Seed
from .._step.trees import flatten
from .._tracers import never_in_graphs
from .explain import explanation
from .explanation import Explanation
from .layer_call import CellMemory
from .layers_call import LayersCall
from .repeated_calls import UsualCalls
from .sequence_forms import Sequences
from .settings import Settings

if TYPE_CHECKING:  # with defaults, which TypeVar has from Python 3.13 on
    from typing_extensions import TypeVar

    StateT = TypeVar("StateT", default=Any)
    OutputT = TypeVar("OutputT", default=Any)
else:
    from typing import TypeVar

    StateT, OutputT = TypeVar("StateT"), TypeVar("OutputT")


class Recurrent(nn.Module, Generic[StateT, OutputT]):
    """A cell of your own over a sequence, trained in the memory of a few steps.

    ``output, state = Recurrent(cell)(x, state, lengths)`` has the values and gradients of ::

        outputs = []
        for t in range(len(x)):                             # x: (seq_len, batch, ...)
            y, new = cell(x[t], state)                      # or y = new = cell(x[t], state)
            is_running = (t < lengths)[:, None]             # True if there are no lengths
            state = torch.where(is_running, new, state)     # a finished row keeps its state
            outputs.append(torch.where(is_running, y, 0))
        output = torch.stack(outputs)                       # (seq_len, batch, ...)

    The loop keeps for backward what autograd saves of every step. This module saves the state every
    sqrt(seq_len) steps, or a compiled cell its outputs alone, and backward recomputes the steps
    chunk by chunk. ``Recurrent(torch.nn.LSTMCell(12, 32))`` computes what torch.nn.LSTM does. Type
    checkers take the types of state and output from ``Recurrent[StateT, OutputT]``.

    Args:
        cell: A torch.nn.Module with ``cell(input, state)`` that returns the state, as the cells of
            torch.nn do, or ``(output, state)``. If a cell returns the state alone, the output is
            the state's first tensor. Input, state and output are tensors with the batch as their
            first dimension, or tuples, lists and dicts of such. For several layers and directions
            pass a list of cells in the order of torch.nn's weights: layer by layer, and in each
            layer the forward and the reverse cell. Each layer's output is the next one's input.
        bidirectional: Whether each layer has two cells, of which the second runs from the last step
            to the first. Their outputs are concatenated in the last dimension.
        batch_first: Whether inputs and outputs are (batch, seq_len, ...); states are not affected.
        chunk_size: Steps of a chunk. None for sqrt(seq_len) steps in Python, or for as many as fit
            into ``workspace_bytes``.
        workspace_bytes: Limit on what autograd may save of a chunk, in bytes; one step is measured
            once. Excludes ``chunk_size``.
        compile: "auto" compiles a cell if it can: its step is traced, derived, compiled by the C++
            compiler of this machine at the first call (a few seconds, then cached on disk), and
            compared to the cell itself in values and gradients. Other cells and calls run as steps
            in Python, chunk by chunk under torch.utils.checkpoint; on a CPU, where that takes
            longer than a loop, a warning says why, once for each cell. "require" makes the reason
            an error; "never" runs all steps in Python.
            :meth:`explain` gives the reason, with the operation and its line. A step compiles if
            torch.compile(fullgraph=True) takes it and its operations are supported; it is traced
            again when torch.compile's guards ask for it, or when a class of its modules changes.
            Random numbers of torch are the same either way.
        return_sequence: False to return only the output of each sequence's last step. With two
            directions, each cell's last one, joined; the reverse cell's is at the sequence's start.
            Only checkpoints of the state are saved, so memory grows with sqrt(seq_len).
        recompute: True has backward recompute what forward has not saved. False saves it, in less
            time and more memory: of a compiled cell the whole sequence and the sums of its
            products, which backward then need not multiply again; of steps in Python the graph, as
            a loop does, so that backward recomputes no step. Results and random numbers are the
            same either way. Unless ``compile="require"``, False excludes ``chunk_size`` and
            ``workspace_bytes``, since a graph has no chunks.

    There is no ``num_layers``: the length of the list is the number of layers.

    A cell may draw random numbers, by torch.randn and the like, torch.distributions and dropout.
    They come from one seed, as a function of step, row and draw, and are never saved; other random
    functions work, too. A cell must not change its input or state in place, and must be repeatable:
    the same result for the same input and state. Buffers and attributes that it changes are put
    back for backward, and what it keeps in them has the gradients of a loop; but resets reach only
    the state that it returns. torch.func, and of compiled cells gradients of gradients, run as a
    plain loop, with a warning; forward-mode derivatives of all cells are those of steps in Python.

    Attributes:
        compile_cell: The argument ``compile``, whose own name is a method of torch.nn.Module.
        cell: The cell, or a torch.nn.ModuleList of cells.

    Raises:
        TypeError: ``cell`` is neither a module nor a list of modules, or another argument has a
            wrong type.
        ValueError: An argument has a wrong value, or ``bidirectional`` has no pair of cells per
            layer.

    Example::

        >>> rnn = fusedrnn.Recurrent(torch.nn.GRUCell(12, 32))
        >>> output, h = rnn(torch.randn(50, 4, 12))
        >>> output.shape, h.shape
        (torch.Size([50, 4, 32]), torch.Size([4, 32]))
    """

    def __init__(
        self,
        cell: nn.Module | Sequence[nn.Module],
        bidirectional: bool = False,
        batch_first: bool = False,
        *,
        chunk_size: int | None = None,
        workspace_bytes: int | None = None,
        compile: str = "auto",
        return_sequence: bool = True,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        is_list = isinstance(cell, list | tuple | nn.ModuleList)
        cells: list[Any] = list(cell) if is_list else [cell]  # type: ignore[arg-type]
        for one in cells:
            if not isinstance(one, nn.Module):
                raise TypeError(
                    f"fusedrnn: cell must be a torch.nn.Module or a list of them, "
                    f"got {kind_of(one)}; for a function use fusedrnn.scan"
                )
            if isinstance(one, nn.RNNBase):
                raise TypeError(
                    f"fusedrnn: cell must compute one step, got {type(one).__name__}, which runs "
                    f"over a whole sequence: use torch.nn.{type(one).__name__}Cell, or "
                    "fusedrnn.convert, which replaces torch.nn.LSTM and torch.nn.GRU"
                )
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.batch_first = check_flag("batch_first", batch_first)
        self.return_sequence = check_flag("return_sequence", return_sequence)
        _check_number(len(cells), bidirectional)
        self.compile_cell = compile
        self.chunk_size, self.workspace_bytes = chunk_size, workspace_bytes
        self.recompute = recompute
        self._settings()
        self.cell = nn.ModuleList(cells) if is_list else cell
        self._memories = [CellMemory() for _ in cells]
        self._usual = UsualCalls()

    def _settings(self) -> Settings:
        return Settings.of(
            self.chunk_size,
            self.workspace_bytes,
            self.compile_cell,
            self.recompute,
        )

    @property
    def _cells(self) -> list[nn.Module]:
        return list(self.cell) if isinstance(self.cell, nn.ModuleList) else [self.cell]  # type: ignore[list-item]

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults."""
        defaults: dict[str, Any] = {
            "bidirectional": False,
            "batch_first": False,
            "chunk_size": None,
            "workspace_bytes": None,
            "return_sequence": True,
            "recompute": True,
        }
        values = {name: getattr(self, name) for name in defaults}
        defaults["compile"], values["compile"] = "auto", self.compile_cell
        return ", ".join(f"{n}={v!r}" for n, v in values.items() if v != defaults[n])

    @never_in_graphs
    def forward(
        self,
        input: Any,
        state: StateT | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
        reset_to: Any = None,
        generator: torch.Generator | None = None,
        length: int | None = None,
    ) -> tuple[OutputT, StateT]:
        """Runs the cell over a sequence.

        Args:
            input: What the cell takes at one step, with the steps as one more first dimension:
                (seq_len, batch, ...) each, or (batch, seq_len, ...) if ``batch_first``; without a
                batch one tensor (seq_len, features) of floating point; or PackedSequences. None for
                a cell without an input, which runs ``length`` steps.
            state: The cell's state before the first step, (batch, ...) each; for several cells a
                tuple of their states. None for zeros if the cell is one of torch.nn or fusedrnn, or
                else for what its method ``initial_state(batch)`` returns, which must have the dtype
                and the device of the weights, as ``self.weight.new_zeros(batch, size)`` has.
            lengths: The number of steps of each sequence of a padded batch, (batch,) integers of
                any kind: in a tensor on the CPU, an array or a list. After a sequence's end outputs
                are zero, its state stays that of its last step, and ``input`` is not read.
            reset: True where the state is set to zero, or to ``reset_to``, before a step: bool,
                (seq_len, batch), or (batch, seq_len) if ``batch_first``.
            reset_to: The state that a row starts from there: a state for the whole batch or with
                one row, which gets a gradient; or a sequence of states, (seq_len, batch, ...) each,
                or (batch, seq_len, ...) if ``batch_first``. Of a state that is a dict it may have
                some keys: only those leaves are set. None for zeros.
            generator: The source of random numbers, whatever function of torch draws them; torch's
                default generator if None. Python's and NumPy's have seeds of their own.
            length: The number of steps. It must agree with ``input`` if that has tensors.

        Returns:
            output: The cell's output of each step, in the form of ``input``: with the steps as one
            more dimension, or a PackedSequence. With ``return_sequence=False`` the output of each
            sequence's last step; of a reverse cell the output of its first one, where it ends.

            state: The state after the last step, in the form of the argument ``state``.

        Raises:
            TypeError, ValueError, RuntimeError: An argument is wrong, or the cell breaks a rule;
                the message names the tensor and the step. Errors of the cell itself are passed on.
        """
        cell = self._modules["cell"]  # the same as self.cell, which torch.nn searches for
        if self._usual.are_of(cell) and lengths is reset is reset_to is length is None:
            made, state = self._usual.run(self, cell, input, state, generator)
            if made is not None:
                return made
        call = self._call(input, state, lengths, reset, reset_to, generator, length)
        output, state = call.results()
        if call.usual is not None:
            self._usual.remember(self, call.usual)
        return output, state

    if TYPE_CHECKING:
        __call__ = forward

    def step(
        self, input: Any, state: StateT | None = None, generator: torch.Generator | None = None
    ) -> tuple[OutputT, StateT]:
        """One step of the cell, for acting and decoding, compiled as in a sequence.

        Args:
            input: What the cell takes: (batch, ...) each, or one tensor (features) without a batch.
            state: The state before the step, as in the call of a sequence.
            generator: The source of random numbers, as in the call of a sequence.

        Returns:
            output: What the cell returns.

            state: The state after the step.

        Raises:
            ValueError: The module is bidirectional.
            TypeError, RuntimeError: As in the call of a sequence.

        Example::

            >>> rnn = fusedrnn.Recurrent(torch.nn.GRUCell(12, 32))
            >>> output, h = rnn.step(torch.randn(4, 12), torch.zeros(4, 32))
            >>> output.shape
            torch.Size([4, 32])
        """
        if self.bidirectional:
            raise ValueError(
                "fusedrnn: step() needs bidirectional=False, since a reverse cell starts at the end"
            )
        leaves, structure = flatten(input, "input")
        has_batch = not leaves or any(leaf.dim() > 1 for leaf in leaves)
        dim = 1 if self.batch_first and has_batch else 0
        sequence = structure.tree([leaf.unsqueeze(dim) for leaf in leaves])
        length = None if leaves else 1
        output, state = self(sequence, state, generator=generator, length=length)
        if self.return_sequence:
            leaves, structure = flatten(output, "output")
            output = structure.tree([leaf.squeeze(dim) for leaf in leaves])
        return output, state

    def explain(
        self, input: Any, state: Any = None, lengths: Any = None, length: int | None = None
    ) -> Explanation:
        """Says how a call would run, without running it.

        A step or two of each cell run once, to measure what autograd saves of them.

        Returns:
            An object to print, with the same facts as attributes. Layers and directions run one
            after the other, so ``step_bytes`` and ``workspace_bytes`` are the largest of all, and
            ``kept_bytes_per_step`` is the sum.
        """
        return explanation(self._call(input, state, lengths, None, None, None, length))

    def _call(
        self,
        input: Any,
        state: Any,
        lengths: Any,
        reset: Any,
        reset_to: Any,
        generator: torch.Generator | None,
        length: int | None,
    ) -> LayersCall:
        cells = self._cells
        _check_number(len(cells), self.bidirectional)  # the list may have changed
        self._memories += [CellMemory() for _ in cells[len(self._memories) :]]
        sequence = Sequences.of(input, self.batch_first, lengths, length, state)
        if reset is None and reset_to is not None:
            raise ValueError("fusedrnn: reset_to must be given together with reset")
        return LayersCall(
            cells=cells,
            is_list=isinstance(self.cell, nn.ModuleList),
            directions=2 if self.bidirectional else 1,
            returns_sequence=self.return_sequence,
            settings=self._settings(),
            memories=self._memories,
            sequence=sequence,
            state=state,
            reset=None if reset is None else sequence.flags(reset),
            reset_to=reset_to,
            seed=Seed(generator),
        )


def _check_number(cells: int, bidirectional: bool) -> None:
    if not cells or (bidirectional and cells % 2):
        wanted = "two cells per layer" if bidirectional else "at least one cell"
        raise ValueError(f"fusedrnn: cell must have {wanted}, got {cells}")
