"""Any cell as a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class Recurrent(nn.Module):
    """Runs a cell of your own over a sequence, and trains it in the memory of a few steps.

    A Python loop over a cell keeps for backward what autograd saves of every step. This module
    keeps the state now and then; backward takes the steps again, chunk by chunk. Gradients are
    those of the loop. ``Recurrent(torch.nn.LSTMCell(12, 32))`` computes what torch.nn.LSTM does.

    Args:
        cell: A torch.nn.Module with ``cell(input, state)`` that returns the state, as the cells of
            torch.nn, or ``(output, state)``. The output of a cell that returns its state alone is
            the state's first leaf. Input, state and output are tensors with the batch as their
            first dimension, or tuples, lists and dicts of such. For several layers and directions a
            list of cells, in the order of torch.nn's weights: layers first, and in each layer the
            forward and the reverse cell. Each layer's output is the next one's input.
        bidirectional: Whether each layer has two cells, the second of which takes the steps from
            the last to the first. Their outputs are concatenated in the last dimension.
        batch_first: Whether inputs and outputs are (batch, seq_len, ...); states are not affected.
        chunk_size: Steps of a chunk. None for the root of their number, or what fits into
            ``workspace_bytes``.
        workspace_bytes: Limit on what autograd may keep of a chunk, in bytes; what it keeps of a
            step is measured once. Excludes ``chunk_size``.
        compile: Whether the cell is to run as a program of this package's kernels: its step is
            traced, derived, compiled by the C++ compiler of this machine at the first call (a few
            seconds, then cached on disk), and compared to the cell itself in values and gradients.
            "auto" for cells and calls where that works; others take their steps in Python.
            "require" to make the reason an error; "never" to take all steps in Python.
            :meth:`explain` says the reason, with the operation and its line. What
            torch.compile(fullgraph=True) takes, compiles, if its operations are known; a step is
            traced again when torch.compile's guards say so, or when a class of its modules changes.
            Random numbers of torch are the same either way.
        cuda_graphs: Whether to record the work of a chunk as a CUDA graph, which launches that of
            the others at once. Each call records anew, from the second one with inputs of the same
            kind on. The step must not wait for values of tensors, as ``tensor.item()`` does and
            torch.distributions does unless ``validate_args=False``, and must do the same in each
            step; else it runs without graphs, and :meth:`explain` says why. Without effect on a
            CPU, and on compiled cells, which ``compile="never"`` excludes.
        return_sequence: False to return the last output alone: that of the step which is taken
            last. With two directions it is the last one that each makes, joined; that of the
            reverse cell is at the sequence's start. Of the others nothing is kept but the state now
            and then, so memory grows with the root of seq_len.
        recompute: True has backward compute again what forward has not kept. False keeps it, in
            less time and more memory: of a compiled cell the sums of its products, which backward
            then need not multiply again, and the whole sequence; of steps in Python the graph, as a
            loop keeps it, so that backward takes no step again. Results and random numbers are the
            same either way. Excludes ``cuda_graphs``, and unless ``compile="require"`` also
            ``chunk_size`` and ``workspace_bytes``, since a graph has no chunks.

    The number of layers is that of the list, so unlike torch.nn's layers this one takes none.

    A cell may draw random numbers: torch.randn and its kin, torch.distributions and dropout. These
    then come from one seed, as a function of step, row and draw, and are never kept; other random
    functions work, too. A cell must not change its input or state in place, and must give the
    same result when it is called again; buffers and attributes that it changes are looked after. It
    must return losses as outputs, since what it keeps in an attribute has no gradient. Gradients of
    gradients, torch.func and forward-mode derivatives take a plain loop, with a warning.

    Attributes:
        compile_cell: ``compile``, whose name is a method of torch.nn.Module.
        cell: The cell, or a torch.nn.ModuleList of them.

    Raises:
        TypeError: ``cell`` is no module and no list of modules, or another argument has a wrong
            type.
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
        cuda_graphs: bool = False,
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
                    f"got {kind_of(one)}; a function goes to fusedrnn.scan"
                )
            if isinstance(one, nn.RNNBase):
                raise TypeError(
                    f"fusedrnn: cell must take one step, got {type(one).__name__}, which takes all "
                    f"steps of a sequence: torch.nn.{type(one).__name__}Cell takes one, and "
                    "fusedrnn.convert exchanges such layers"
                )
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.batch_first = check_flag("batch_first", batch_first)
        self.return_sequence = check_flag("return_sequence", return_sequence)
        _check_number(len(cells), bidirectional)
        self.cuda_graphs = cuda_graphs
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
            self.cuda_graphs,
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
            "cuda_graphs": False,
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
        state: Any = None,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
        reset_to: Any = None,
        generator: torch.Generator | None = None,
        length: int | None = None,
    ) -> tuple[Any, Any]:
        """Runs the cell over a sequence.

        Args:
            input: What the cell takes at a step, with the steps as a further first dimension:
                (seq_len, batch, ...) each, or (batch, seq_len, ...) if ``batch_first``; without a
                batch one tensor (seq_len, features) of floating point; or PackedSequences. None for
                a cell without an input, as often as ``length`` says.
            state: The cell's state before the first step, (batch, ...) each; for several cells a
                tuple of their states. None for zeros if the cell is one of torch.nn or fusedrnn, or
                else what its method ``initial_state(batch)`` returns, which must have the dtype and
                the device of the weights: ``self.weight.new_zeros(batch, size)`` has.
            lengths: Steps of each sequence of a padded batch, (batch,) integers of any kind: in a
                tensor on the CPU, an array or a list. Outputs behind a sequence's end are zero,
                its state is that after its last step, and what ``input`` holds there is not looked
                at.
            reset: Where the state is set to zero, or to ``reset_to``, before a step: bool of
                (seq_len, batch), or as ``batch_first`` has it.
            reset_to: What a row's state becomes there: a state with the rows of the batch or with
                one, which gets a gradient; or a sequence of states, (seq_len, batch, ...) each or
                as ``batch_first`` has it. Of a state that is a dict it may have some keys: then
                only those leaves are set. None for zeros.
            generator: Where random numbers come from, whatever function of torch draws them;
                torch's own generator if None. Python's and NumPy's have seeds of their own.
            length: The number of steps. It must agree with ``input`` if that has tensors.

        Returns:
            output: What the cell returns, with the steps as ``input`` has them; a PackedSequence if
            that is one. With ``return_sequence=False`` the output of each sequence's last step; of
            a reverse cell that of its first step, which this cell takes last.

            state: After the last step, as ``state``.

        Raises:
            TypeError, ValueError, RuntimeError: An argument is wrong, or the cell breaks a rule;
                the message names the tensor and the step. What a cell itself raises is passed on.
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

    def step(
        self, input: Any, state: Any = None, generator: torch.Generator | None = None
    ) -> tuple[Any, Any]:
        """One step, for acting and decoding: the cell's, but compiled as the sequence is.

        Args:
            input: What the cell takes: (batch, ...) each, or one tensor (features) without a batch.
            state: Before the step, as in the call of a sequence.
            generator: As in that call.

        Returns:
            output: What the cell returns.

            state: After the step.

        Raises:
            ValueError: The module is bidirectional.
            TypeError, RuntimeError: As of a sequence.

        Example::

            >>> rnn = fusedrnn.Recurrent(torch.nn.GRUCell(12, 32))
            >>> output, h = rnn.step(torch.randn(4, 12), torch.zeros(4, 32))
            >>> output.shape
            torch.Size([4, 32])
        """
        if self.bidirectional:
            raise ValueError("fusedrnn: a bidirectional module has no single step")
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
        """How a call would run, without running it.

        A step or two of each cell run once, to measure what autograd keeps of them.

        Returns:
            An object to print, whose attributes are what it prints. Of several layers and
            directions, which work one after the other, ``step_bytes`` and ``workspace_bytes`` are
            those of the one that takes most; ``kept_bytes_per_step`` is the sum of all.
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
