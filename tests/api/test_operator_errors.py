"""The operators check their arguments themselves, since they can be called directly."""

from dataclasses import replace

import pytest
import torch
from cases import CELLS, MASKED, Case, operator_arguments

from fusedrnn import _cells as cells


def test_the_operator_of_a_projection_checks_both_widths():
    case = Case("lstm", seq_len=4, proj_size=2, dtype=torch.float32)
    good = {"lengths": None, "reset": None}
    _, arguments = raw_forward(case, **good)
    weights, hx, cx = (arguments[name] for name in ("weights", "hx", "cx"))
    for message, changes in {
        "takes 3 weights, or 5 with biases": {"weights": weights[:4]},
        "weight_hh must have shape .28, 1.": {"hx": hx[..., :1]},
        "weight_ih must have shape .24, 5.": {"cx": cx[..., :6]},
        "needs cx": {"cx": None},
        "cx must have 3 dimensions": {"cx": cx[0]},
        "weight_hr must have shape .2, 7.": {"weights": [*weights[:4], weights[4].t()]},
    }.items():
        with pytest.raises(RuntimeError, match=message):
            raw_forward(case, **good, **changes)


CASE = Case(seq_len=4, batch=3, input_size=5, hidden_size=7, latent_size=6)


def packed(batch_sizes):
    """A packed input with 5 features, in the operator's form."""
    rows = torch.zeros(int(sum(batch_sizes)), 5)
    return {"input": rows, "batch_sizes": torch.tensor(batch_sizes), "lengths": None, "reset": None}


def raw_forward(case, **changes):
    """Calls the operator itself, without the checks of the functional form."""
    arguments = operator_arguments(case, case.tensors(), chunk_size=2) | changes
    return torch.ops.fusedrnn.forward(**arguments), arguments


@pytest.mark.parametrize("cell", CELLS)
def test_the_operator_itself_reads_nothing_that_is_not_there(cell):
    case = replace(CASE, cell=cell, num_layers=1, **MASKED, dtype=torch.float32)
    (output, _, _, _, cell_states), good = raw_forward(case)
    weights, lengths, reset = (good[name] for name in ("weights", "lengths", "reset"))
    is_lstm = cell == "lstm"
    last = {"gru": "bias_hh", "lstm": "bias_hh", "stochastic_gru": "bias_hz"}[cell]
    size = len(weights) // 2
    bad = {
        "no backend": {"backend": 3},
        "weights, or": {"weights": weights[:2]},
        "weight_ih must have shape .*, got .5,": {"weights": [weights[0][0], *weights[1:]]},
        "weight_ih must have shape": {"weights": [weights[0][1:], *weights[1:]]},
        f"{last} must have shape": {"weights": [*weights[:-1], weights[-1][1:]]},
        "weight_ih must have": {"weights": [*weights[:size], weights[0][1:], *weights[size + 1 :]]},
        "hx must have shape": {"hx": good["hx"][:, :2]},
        "hx must have shape .directions": {"hx": good["hx"][0]},
        "cx" if is_lstm else "takes no cx": {"cx": None if is_lstm else good["hx"]},
        "eps must have shape": {"eps": torch.zeros(2, 4, 3, 5), "seed": None},
        "seed must be Long": {"seed": torch.zeros(1)},
        "seed must have one": {"seed": torch.zeros(2).long()},
        "exclude": {"eps": torch.zeros(2, 4, 3, 6), "seed": torch.zeros(1).long()},
        "hx must be Float": {"hx": good["hx"].double()},
        "dropout needs a mask_seed": {"dropout": 0.5},
        "must be probabilities": {"zoneout": 1.5},
        "first_step must be 0 or more, and below 2": {"first_step": -1},
        "first_step must be 0 or more": {"first_step": 2**32 - 4},
        "reverse is for": {"reverse": True},
        "at least one step": {"input": good["input"][:0]},
        "3 dimensions": {"input": good["input"][0]},
        "lengths and batch_sizes exclude": {"batch_sizes": lengths},
        "lengths must have shape": {"lengths": lengths[1:]},
        "lengths must be Long": {"lengths": lengths.int()},
        "lengths must have 1 dim": {"lengths": lengths[:, None]},
        r"lengths must be in \[1, 4\], got 5": {"lengths": lengths.clamp(min=5)},
        r"lengths must be in \[1, 4\], got -1": {"lengths": lengths.clamp(max=-1)},
        "seq_len . batch must be below": {"input": good["input"][:1].expand(2**31, 3, 5)},
        "layer must have features": {"input": good["input"][..., :0]},
        "input must have 2 dimensions": packed([3, 3, 2, 1]) | {"input": good["input"]},
        "batch_sizes must be positive": packed([3, 3, 2, 0]),
        "batch_sizes must be positive, at most": packed([4, 3, 2, 1]),
        "and never rise, got 3 at step 2 after 2": packed([3, 2, 3, 1]),
        "batch_sizes must add up to the rows of input, got 9": packed([3, 3, 2, 1])
        | {"input": torch.zeros(8, 5)},
        "batch_sizes must be Long": packed([3.0, 3.0]),
        "reset must have shape": {"reset": reset.t().contiguous()},
        "reset must be Bool": {"reset": reset.float()},
        "reset must be contiguous": {"reset": reset.t().contiguous().t()},
        "float32, float64, bfloat16 or float16": {
            "input": good["input"].int(),
            "hx": good["hx"].int(),
            "cx": good["cx"].int() if is_lstm else None,
            "weights": [w.int() for w in weights],
        },
        "chunk_size": {"chunk_size": -1},
        "workspace_bytes must be 0": {"workspace_bytes": -1},
        "chunk_size and workspace_bytes exclude": {"workspace_bytes": 2**20},
        "noise_stream": {"noise_stream": -1},
        "tuning must have": {"tuning": -1},
    }
    if cell != "stochastic_gru":
        for message in ("eps must have shape", "exclude"):
            del bad[message]
    for message, changes in bad.items():
        with pytest.raises(RuntimeError, match=f"^fusedrnn: .*{message}") as caught:
            raw_forward(case, **changes)
        assert "csrc" not in str(caught.value)

    def raw_backward(**changes):
        arguments = good | {
            "grad_output": torch.ones_like(output),
            "grad_h_n": None,
            "grad_c_n": None,
        }
        arguments |= {"output": output, "saved_gates": None, "needs": 3}
        arguments |= {"chunk_cell_states": cell_states if is_lstm else None}
        return torch.ops.fusedrnn.backward(**(arguments | changes))

    raw_backward()
    for cell in (-1, len(cells.CELLS)):
        with pytest.raises(RuntimeError, match=f"fusedrnn: there is no cell {cell}"):
            raw_backward(cell=cell)
    bad = {
        "output must have shape": {"output": output[1:]},
        "output must be contiguous": {
            "output": output.transpose(0, 1).contiguous().transpose(0, 1)
        },
        "grad_output must have shape": {"grad_output": output[..., 1:]},
        "grad_h_n must have shape": {"grad_h_n": output},
        "saved_gates must be": {"saved_gates": output},
        "eps was drawn": {"needs": 8},
        "needs": {"needs": 16 << len(weights)},
    }
    if is_lstm:
        bad |= {
            "chunk_cell_states must be given": {"chunk_cell_states": None},
            "chunk_cell_states must be what forward returned": {
                "chunk_cell_states": cell_states[1:]
            },
            "grad_c_n must have shape": {"grad_c_n": output},
        }
    else:
        bad |= {
            "there is no cx": {"needs": 4},
            "chunk_cell_states must be given": {"chunk_cell_states": output},
        }
    for message, changes in bad.items():
        with pytest.raises(RuntimeError, match=f"^fusedrnn: .*{message}"):
            raw_backward(**changes)


def calls_of(tensors, path=()):
    """Each tensor among the arguments, with its place."""
    for at, value in tensors.items() if isinstance(tensors, dict) else enumerate(tensors):
        if isinstance(value, torch.Tensor):
            yield (*path, at), value
        elif isinstance(value, list):
            yield from calls_of(value, (*path, at))


@pytest.mark.parametrize("cell", CELLS)
def test_one_meta_tensor_among_others_does_not_lead_to_results_of_nothing(cell):
    case = replace(CASE, cell=cell, num_layers=1, **MASKED, dtype=torch.float32)
    (output, h_n, _, _, cell_states), good = raw_forward(case)
    backward = good | {"grad_output": output, "grad_h_n": h_n, "grad_c_n": None, "output": output}
    backward |= {"chunk_cell_states": cell_states if cell == "lstm" else None, "needs": 3}
    for operator, arguments in (
        (torch.ops.fusedrnn.forward, good),
        (torch.ops.fusedrnn.backward, backward),
    ):
        for path, tensor in calls_of(arguments):
            changed = arguments | {"weights": list(arguments["weights"])}
            where = changed
            for at in path[:-1]:
                where = where[at]
            where[path[-1]] = tensor.to("meta")
            with pytest.raises(RuntimeError, match=r"fusedrnn: .* must be on the (device|CPU)"):
                operator(**changed)
    everything = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in good.items()}
    everything["weights"] = [w.to("meta") for w in good["weights"]]
    assert torch.ops.fusedrnn.forward(**everything)[0].is_meta
