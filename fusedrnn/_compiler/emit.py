"""The C++ of a program's stages.

Nothing of the user's enters the text but the numbers of the step: names are counted, and constants
are printed from Python's floats.

Longer than 350 lines, because operations that are printed by their options belong together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._front.refusals import CannotCompile
from . import operations
from .columns import packet_of
from .compiled_step import Generated
from .derive import Derived, DerivedPlan
from .operation_graph import Operations
from .program import In, Out
from .step_plan import PlannedStage, StepPlan
from .weights_of_plan import weights_of

aten = torch.ops.aten

STORAGE = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
}

_IN = {
    In.COLUMN: "Column",
    In.GROUP: "Group",
    In.NORMAL: "Normal",
    In.UNIFORM: "Uniform",
    In.INDEX: "Index",
}
_OUT = {Out.COLUMN: "Column", Out.SUM: "Sum", Out.MAX: "Max", Out.ARG_MAX: "ArgMax"}


def emit(derived: DerivedPlan, dtype: torch.dtype, device: str) -> Generated:
    """What runs a step.

    Args:
        dtype: Of its state, inputs and weights.
        device: "cpu" or "cuda".
    """
    plan = derived.plan
    return Generated(
        plan.program,
        plan.output_sequences,
        weights_of(plan),
        library_text(derived, dtype, device),
        derived.has_choices(),
    )


def library_text(derived: DerivedPlan, dtype: torch.dtype, device: str = "cpu") -> str:
    """The text of a library for a storage type, for a "cpu" or for "cuda".

    For a CPU, :mod:`.build` puts the instruction set before it.
    """
    plan = derived.plan
    stages = "\n".join(
        _stage(i, stage, plan, one)
        for i, (stage, one) in enumerate(zip(plan.stages, derived.stages, strict=True))
    )
    return (_LIBRARY if device == "cpu" else _GPU_LIBRARY).format(
        stages=stages, cases=_cases(derived, STORAGE[dtype], device)
    )


_LIBRARY = """#include "program/stage_loop.h"

namespace fusedrnn::program {{
inline namespace FUSEDRNN_ISA {{

{stages}
}}  // namespace FUSEDRNN_ISA
}}  // namespace fusedrnn::program

extern "C" {{
__attribute__((visibility("default"))) extern const int64_t fusedrnn_abi = fusedrnn::program::kAbi;
__attribute__((visibility("default"))) void fusedrnn_stage(
    int64_t stage, int64_t backward, const fusedrnn::program::StageArgs* args, int64_t first,
    int64_t last) {{
  using namespace fusedrnn;
  using namespace fusedrnn::program;
  switch (stage) {{
{cases}  }}
}}
}}
"""
_GPU_LIBRARY = """#include "program/stage_kernel.h"

namespace fusedrnn::program {{

{stages}
}}  // namespace fusedrnn::program

extern "C" {{
__attribute__((visibility("default"))) extern const int64_t fusedrnn_abi = fusedrnn::program::kAbi;
__attribute__((visibility("default"))) int64_t fusedrnn_stage_launch(
    int64_t stage, int64_t backward, const fusedrnn::program::StageArgs* args, int64_t rows,
    void* of_stream) {{
  using namespace fusedrnn;
  using namespace fusedrnn::program;
  const auto stream = static_cast<cuda::Stream>(of_stream);
  switch (stage) {{
{cases}  }}
  return 1;  // cudaErrorInvalidValue
}}
}}
"""


def _cases(derived: DerivedPlan, storage: str, device: str) -> str:
    call = (
        "run<{}, {}>(backward != 0, *args, first, last)"
        if device == "cpu"
        else "launch<{}, {}>(backward != 0, *args, rows, stream)"
    )
    names = [
        f"InDouble<Stage{i}>" if stage.is_in_double() else f"Stage{i}"
        for i, stage in enumerate(derived.stages)
    ]
    return "".join(
        f"    case {i}: return {call.format(storage, name)};\n" for i, name in enumerate(names)
    )


def _stage(number: int, stage: PlannedStage, plan: StepPlan, derived: Derived) -> str:
    form = plan.program.stages[number]
    ins = [f"In::{_IN[one.kind]}" for one in form.inputs]
    outs = [f"Out::{_OUT[one.kind]}" for one in form.outputs]
    names = [f"in[{i}]" for i in range(len(ins))]
    forward = _Printer(names, pairs=False).body(derived.forward, "out")
    gradients = [f"dout[{k}]" for k in range(len(outs))]
    backward = _Printer(names + gradients, pairs=True).body(derived.backward, "din")
    phase, level, width, _ = stage.key
    return (
        f"// {phase.name.capitalize()}, level {level}, {width} columns.\n"
        f"struct Stage{number} {{\n"
        f"  static constexpr int kIns = {len(ins)}, kOuts = {len(outs)};\n"
        f"  static constexpr In kIn[] = {{{', '.join(ins or ['In::Column'])}}};\n"
        f"  static constexpr Out kOut[] = {{{', '.join(outs)}}};\n\n"
        "  template <class A>\n"
        f"  FUSEDRNN_HD static void forward(const A* in, A* out) {{\n{forward}  }}\n\n"
        "  template <class A>\n"
        "  FUSEDRNN_HD static void backward(const A* in, const A* dout, A* din) {\n"
        f"{backward}  }}\n}};\n"
    )


class _Printer:
    """Prints a graph of numbers as statements."""

    def __init__(self, names: list[str], pairs: bool) -> None:
        """``pairs``: whether to use 1 - sigmoid and 1 - tanh^2 as they come with these."""
        self._names, self._pairs = names, pairs
        self._text: dict[fx.Node, str] = {}
        self._constants: dict[fx.Node, float | bool] = {}
        self._masks: set[fx.Node] = set()
        self._partners: dict[fx.Node, str] = {}
        self._lines: list[str] = []
        self._count = 0

    def body(self, module: Operations, results: str) -> str:
        inputs = iter(self._names)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._text[node] = next(inputs)
            elif node.op == "get_attr":
                self._constants[node] = getattr(module, node.target).reshape(-1)[0].item()
            elif node.op == "output":
                for i, result in enumerate(node.args[0]):
                    value = "A{}" if result is None else self._value(result)
                    self._lines.append(f"{results}[{i}] = {value};")
            else:
                self._node(node)
        return "".join(f"    {line}\n" for line in self._lines)

    # Values

    def _value(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            if arg in self._constants:
                return _number(self._constants[arg])
            if arg in self._masks:  # a mask in arithmetic is 1 or 0
                return f"math::select({self._text[arg]}, number<A>(1), A{{}})"
            return self._text[arg]
        return _number(arg)

    def _known(self, arg: Any) -> float | bool | None:
        if isinstance(arg, fx.Node):
            return self._constants.get(arg)
        return arg if isinstance(arg, bool | int | float) else None

    def _mask(self, arg: Any) -> str:
        """An argument as a mask."""
        if isinstance(arg, fx.Node) and arg in self._masks:
            return self._text[arg]
        known = self._known(arg)
        if known is not None:
            return f"(number<A>({1.0 if known else 0.0}) != A{{}})"
        return f"({self._value(arg)} != A{{}})"

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _set(self, node: fx.Node, code: str, is_mask: bool = False) -> None:
        name = self._text[node] = self._name()
        self._lines.append(f"const {'auto' if is_mask else 'A'} {name} = {code};")
        if is_mask:
            self._masks.add(node)

    # Operations

    def _node(self, node: fx.Node) -> None:
        op, args = packet_of(node), list(node.args)
        row = operations.of(op)
        if op in operations.FULL:
            number = args[0] if op is aten.scalar_tensor else args[1]
            known = self._known(number)
            if known is None:
                self._text[node] = self._value(number)
            else:
                self._constants[node] = known
        elif op in operations.ZEROS or op in operations.ONES or op in operations.EMPTY:
            self._constants[node] = float(op in operations.ONES)
        elif op in operations.COPIES:
            self._same(node, args[0])
        elif op is aten._to_copy:
            self._cast(node, node.all_input_nodes[0])
        elif op in (aten.mul, aten.add) and self._is_neutral(node, op, args):
            pass
        elif row.cpp:
            self._set(node, self._filled(row.cpp, args), row.mask)
        elif op in (aten.sigmoid, aten.tanh):
            self._gate(node, op, args[0])
        else:
            self._set(node, self._arithmetic(node, op, args))

    def _paren(self, arg: Any) -> str:
        return f"A({self._value(arg)})"

    def _same(self, node: fx.Node, arg: Any) -> None:
        if arg in self._constants:
            self._constants[node] = self._constants[arg]
            return
        self._text[node] = self._text[arg]
        if arg in self._masks:
            self._masks.add(node)
        if arg in self._partners:
            self._partners[node] = self._partners[arg]

    def _cast(self, node: fx.Node, arg: fx.Node) -> None:
        if node.kwargs.get("dtype") == torch.bool and arg not in self._masks:
            self._set(node, self._mask(arg), True)
        elif arg in self._masks and node.kwargs.get("dtype") != torch.bool:
            self._set(node, f"math::select({self._text[arg]}, number<A>(1), A{{}})")
        elif node.kwargs.get("dtype") == torch.float32:
            self._set(node, f"A(float({self._value(arg)}))")
        else:
            self._same(node, arg)

    def _is_neutral(self, node: fx.Node, op: Any, args: list[Any]) -> bool:
        """Whether it multiplies by one or adds zero, as derivatives often do."""
        if node.kwargs:
            return False
        neutral = 1.0 if op is aten.mul else 0.0
        for one, other in (args, args[::-1]):
            if self._known(other) == neutral and isinstance(one, fx.Node):
                self._same(node, one)
                return True
        return False

    def _gate(self, node: fx.Node, op: Any, arg: Any) -> None:
        name = "sigmoid" if op is aten.sigmoid else "tanh"
        if not self._pairs:
            return self._set(node, f"math::{name}({self._paren(arg)})")
        partner, own = self._name(), self._name()
        self._lines.append(f"A {partner};")
        self._lines.append(f"const A {own} = math::{name}({self._paren(arg)}, {partner});")
        self._text[node], self._partners[node] = own, partner
        return None

    def _filled(self, template: str, args: list[Any]) -> str:
        """The C++ of a row."""
        masks = {f"m{i}": self._mask(a) for i, a in enumerate(args)} if "{m" in template else {}
        return template.format(*map(self._value, args), **masks)

    def _arithmetic(self, node: fx.Node, op: Any, args: list[Any]) -> str:
        options = {name: value for name, value in node.kwargs.items() if value is not None}
        if options.keys() - {"alpha", "approximate"}:
            raise CannotCompile(f"{op} is called with {', '.join(options)}")
        v = [self._value(a) for a in args if isinstance(a, fx.Node | int | float)]
        alpha = node.kwargs.get("alpha", 1)

        def scaled(x: str) -> str:
            return x if alpha == 1 else f"{_number(alpha)} * {x}"

        if op is aten.add:
            pair = self._complement(node, alpha)
            return pair or f"{v[0]} + {scaled(v[1])}"
        if op in (aten.sub, aten.rsub):
            a, b = (0, 1) if op is aten.sub else (1, 0)
            whole, part = args[a], args[b]
            if (
                alpha == 1
                and self._known(whole) == 1
                and _is(part, aten.sigmoid)
                and part in self._partners
            ):
                return self._partners[part]
            return f"{v[a]} - {scaled(v[b])}"
        if op is aten.div:
            return f"{v[0]} / {v[1]}"
        if op in (aten.clamp, aten.hardtanh, aten.clamp_min, aten.clamp_max):
            return self._clamp(op, args)
        if op is aten.pow:
            return self._power(args)
        if op is aten.sigmoid_backward:
            other = self._partners.get(args[1], f"(1.0f - {v[1]})")
            return f"{v[0]} * ({v[1]} * {other})"
        if op is aten.tanh_backward:
            return f"{v[0]} * {self._partners.get(args[1], f'(1.0f - {v[1]} * {v[1]})')}"
        raise CannotCompile(f"{op} is not a supported elementwise operation")

    def _clamp(self, op: Any, args: list[Any]) -> str:
        low, high = [*args[1:], None, None][:2]
        if op is aten.clamp_max:
            low, high = None, low
        code = self._paren(args[0])
        if low is not None:
            code = f"math::max2({code}, {self._paren(low)})"
        if high is not None:
            code = f"math::min2({code}, {self._paren(high)})"
        return code

    def _power(self, args: list[Any]) -> str:
        x, exponent = self._paren(args[0]), self._known(args[1])
        simple = {
            1.0: x,
            2.0: f"{x} * {x}",
            3.0: f"{x} * {x} * {x}",
            -1.0: f"1.0f / {x}",
            0.5: f"math::sqrt({x})",
            -0.5: f"math::rsqrt({x})",
            -2.0: f"1.0f / ({x} * {x})",
        }
        if exponent == 0:
            return "number<A>(1)"
        if exponent is not None and float(exponent) in simple:
            return simple[float(exponent)]
        return f"math::pow({x}, {self._paren(args[1])})"

    def _complement(self, node: Any, alpha: Any) -> str | None:
        """x (1 - s) for x + -(x s) with a sigmoid s, without cancellation."""
        if alpha != 1:
            return None
        for x, other in (node.args, node.args[::-1]):
            if not (_is(other, aten.neg) and _is(other.args[0], aten.mul)):
                continue
            product = other.args[0]
            for a, s in (product.args, product.args[::-1]):
                if a is x and _is(s, aten.sigmoid) and s in self._partners:
                    return f"{self._value(x)} * {self._partners[s]}"
        return None


def _number(x: Any) -> str:
    """A number of Python's as one of C++."""
    x = float(x)
    if math.isnan(x):
        return "number<A>(NAN)"
    if math.isinf(x):
        return f"number<A>({'-' if x < 0 else ''}HUGE_VAL)"
    return f"number<A>({x!r})"


def _is(arg: Any, op: Callable[..., Any]) -> bool:
    return packet_of(arg) is op
