"""Why torch.compile does not take a step, as a sentence that ends with the user's line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from typing import Any

from torch import fx

from .._step.user_lines import in_brackets, last_line

_DRAW_ELSEWHERE = "draw them before the call and pass them as an input, or draw by torch"
_DRAWS = (
    "random numbers in Python, which a compiled step would draw once for all steps: "
    f"{_DRAW_ELSEWHERE}"
)
_CANNOT = "torch.compile cannot trace this step"
_MOST = 160
"""Characters of what torch says."""
_CALLS = [
    r"know how to trace the (?:Python )?builtin `(?:<unknown module>\.)?(.+?)\.?`",
    r"that the function `(.+?)`(?: in file .*)? should not be traced",
    r"know how to trace builtin operator `(.+?)`",
    r"function <function (.+?) at 0x\w+> since it was wrapped",
    r"Can't find numpy numpy function <[a-z- ]*[ ']([\w.]+)",
]
"""What torch.compile says of functions that it does not follow."""
_SAID = [
    (r"^Data-dependent", "data-dependent branching, by if, while or assert on a tensor's value"),
    (
        r"Could not (?:guard on|extract)",
        "Python code depends on the value of a tensor or of a NumPy number",
    ),
    (
        r"^Attempted to wrap RNN",
        "it calls torch.nn.RNN, LSTM or GRU instead of RNNCell, LSTMCell or GRUCell",
    ),
    (r"__build_class__|LOAD_BUILD_CLASS", "it defines a class"),
    (r"wrap sparse Tensor", "it uses a sparse tensor"),
    (r"guard on TempLocalSource", "it keeps a tensor in an object that it makes"),
    (r"quantized nyi", "it uses a quantized tensor"),
    (r"^logging\.Logger", "it calls a logger"),
    (r"^torch\.\* op returned non-Tensor", "it calls a torch function that returns no tensor"),
    (r"know how to trace method `__call__` of class `(.+?)`", r"it calls a \1"),
    (r"know how to trace method `(.+?)` of class `(.+?)`", r"it calls \2.\1"),
    (r"know how to enter a `?(.+?)`? context manager", r"it enters a \1 by `with`"),
    (
        r"marked that the function `is_dependent`",
        "torch.distributions validates its arguments there: pass validate_args=False, or call "
        "Distribution.set_default_validate_args(False)",
    ),
    *((pattern, r"it calls \1") for pattern in _CALLS),
    (r"context: raised exception (.+)", r"it raises \1"),
    (r"with fake tensors: .* got (\w+)\([\"'](.+?)[\"']?\)+$", r"it raises \1: \2"),
]
"""What torch.compile says, and what it means for the user's code."""


_WAYS_OUT = [
    (
        r"data-dependent branching|Python code depends on|looks at values of tensors|torch\.cond ",
        "choose by torch.where instead of by a tensor's value in Python",
    ),
    (
        r"the step changes .*(?:num_batches_tracked|running_)",
        "take LayerNorm or RMSNorm instead of batch norm",
    ),
    (
        r"the step changes cell\.(?P<name>\w+)(?: |$)",
        "make what later steps read a part of the state: def forward(self, x, state) begins with "
        "h, {name} = state, where h is the state of now, and ends with return output, (h, {name}); "
        "initial_state(self, batch) returns the start of both, tensors with a row for each "
        "sequence; return what the step only collects as an output",
    ),
    (
        r"the step changes (?!a tensor)",
        "return what the step collects as an output, and what it keeps or counts in the state",
    ),
    (r"it calls print\b", "return what it prints as an output of the step"),
    (r"it calls Random\.", _DRAW_ELSEWHERE),
    (
        r"the step draws by aten\.",
        "draw by torch.rand, randn, multinomial, dropout or others that docs/any-cells.md names",
    ),
    (
        r"has a forward hook",
        "remove the hook (torch.nn.utils.weight_norm is one; that of "
        "torch.nn.utils.parametrizations is none)",
    ),
    (
        r"with a batch of \d+ the step raises",
        "make a tensor with a row for each sequence a part of the state",
    ),
]


def way_out(reason: str) -> str:
    """What a user can do so that a step compiles; or nothing."""
    for pattern, words in _WAYS_OUT:
        if found := re.search(pattern, reason):
            return words.format(**found.groupdict())
    return ""


def reason_of(error: BaseException) -> str:
    """In torch.compile's words, if there are no plainer ones."""
    text = str(error).strip()
    own, _, frames = text.partition("from user code:")
    where = last_line(frames or text)
    for pattern, words in _SAID:
        if found := re.search(pattern, own, re.MULTILINE):
            said = found.expand(words)
            break
    else:
        said = _in_its_words(own) or type(error).__name__
        if isinstance(error, AssertionError | LookupError):  # of torch.compile itself
            said = f"it fails there, with {type(error).__name__}: {said}"
    return f"{_CANNOT}: {_short(said)}{in_brackets(where)}"


def _in_its_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("backend=")]  # which says what follows
    explained = [line[13:] for line in lines if line.startswith("Explanation: ")]
    said = (explained or lines or [""])[0]
    said = re.sub(r" \(e\.g\. [^)]*\)", "", re.sub(r"^(?:Dynamo|torch\.compile) ", "it ", said))
    return re.split(r"\.(?: |$)", said.replace("Dynamo ", "torch.compile "))[0]


def _short(text: str) -> str:
    text = re.sub(r" at 0x\w+", "", " ".join(text.split()))
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


# What a step does besides its results.


def effect_of(output: Any, module: fx.GraphModule) -> str:
    """What the step changes in Python or draws there, which torch.compile would do once.

    Args:
        output: torch.compile's trace, which has ended.
        module: Its graph.
    """
    for node in module.graph.nodes:
        if _draws(node):
            lines = [last_line(one.meta.get("stack_trace") or "") for one in (node, *node.users)]
            where = in_brackets(next(filter(None, lines), ""))
            return f"the step draws {_DRAWS}{where}"
    if getattr(output, "random_calls", None):  # of numbers that the graph does not have
        return f"the step draws {_DRAWS}"
    find = getattr(output, "get_replayed_side_effect_source_refs", None)
    try:
        found = (
            _sources(output.side_effects) if find is None else find(populate_export_metadata=True)
        )
    except Exception as error:
        return f"the step changes something in Python ({error})"
    if not found:
        return ""
    name, where = _changed(output.side_effects, found[0])
    return f"the step changes {name}{in_brackets(where)}"


def _sources(effects: Any) -> list[str]:
    """What is changed that was there before the step, as torch.compile calls it, before 2.13."""
    found = []
    for variable in effects._get_modified_vars():
        if type(variable.mutation_type).__name__.endswith("Existing"):
            name = getattr(variable.source, "name", None)
            found.append(str(name() if callable(name) else name))
    return found


def _draws(node: fx.Node) -> bool:
    """Whether a node is a number from Python's random, or a function of NumPy's that draws."""
    if node.op == "placeholder":
        source = getattr(node.meta.get("grapharg"), "source", None)
        return type(source).__name__ == "RandomValueSource"
    function = getattr(node.target, "f", None)  # what torch has in the place of NumPy's
    return getattr(function, "__module__", None) == "torch._numpy.random"


def _changed(effects: Any, source: str) -> tuple[str, str]:
    """What a step changes, and the line if torch.compile has noted it."""
    name = as_users_write(source)
    try:
        changed = [
            variable
            for variable in effects._get_modified_vars()
            if getattr(variable.source, "name", None) == source
        ]
        attributes = [one for v in changed for one in effects.store_attr_mutations.get(v, ())]
        stacks = [one for v in changed for one in effects.mutation_user_stacks.get(v, ())]
    except AttributeError:  # of another version of torch
        return name, ""
    lines = [last_line("".join(traceback.format_list(stack))) for stack in stacks]
    return _of_attributes(name, attributes), next(filter(None, lines), "")


_DICTS = {"_buffers": "a buffer", "_parameters": "a parameter", "_modules": "a module"}


def _of_attributes(name: str, attributes: Iterable[str]) -> str:
    owner, _, last = name.rpartition(".")
    if last in _DICTS:
        return f"{_DICTS[last]} of {owner}"
    return ".".join([name, *[one for one in attributes if one != "cell_contents"][:1]])


_PARTS = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_AROUND = re.compile(r"(\w+)\.__closure__\[\d+\](?:\.cell_contents)?")


def as_users_write(source: str) -> str:
    """What torch.compile calls a variable, in the user's words."""
    short = re.sub(r"^G\['__import_(\w+)'\]", _module_of, source)
    short = re.sub(r"^[LG]\['(\w+)'\]", r"\1", short)
    return _AROUND.sub(r"a variable around \1", _PARTS.sub(r".\1", short))


def _module_of(found: re.Match[str]) -> str:
    return found[1].replace("_dot_", ".")
