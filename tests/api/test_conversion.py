"""Replacing torch.nn's modules in a model: same results, same Parameters, and reasons.

Longer than 350 lines, because its tests are of one topic and share their fixtures.
"""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fusedrnn
from fusedrnn import convert, to_torch
from fusedrnn._conversion import _CannotReplace, _check_device

OPTIONS = [
    {},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "dropout": 0.5},
]
INPUT = torch.linspace(-1, 1, 6 * 2 * 5).reshape(6, 2, 5)


def assert_kept(model, match, way=convert):
    before = dict(model.named_modules())
    same, report = way(model)
    assert same is model
    assert report.replaced == []
    (kept,) = report.kept
    assert match in kept.reason
    assert all(m is before[name] for name, m in model.named_modules())


def gradients(model, input):
    model.zero_grad()
    model(input)[0].square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# Results


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in ("GRU", "LSTM") for options in OPTIONS),
        *((name, options) for name in ("GRUCell", "LSTMCell") for options in OPTIONS[:2]),
    ],
    ids=str,
)
def test_there_and_back(name, options):
    input = INPUT[0] if name.endswith("Cell") else INPUT
    old = getattr(nn, name)(5, 7, **options).eval()
    expected, expected_grads = old(input), gradients(old, input)
    state = {key: value.clone() for key, value in old.state_dict().items()}

    new, report = convert(old)
    assert type(new) is getattr(fusedrnn, name)
    assert new.extra_repr() == old.extra_repr()
    assert len(report.replaced) == 1 and report.kept == []
    torch.testing.assert_close(new(input), expected)
    torch.testing.assert_close(gradients(new, input), expected_grads)

    back, report = to_torch(new)
    assert type(back) is type(old)
    assert back.extra_repr() == old.extra_repr()
    assert len(report.replaced) == 1 and report.kept == []
    torch.testing.assert_close(back(input), expected)
    torch.testing.assert_close(gradients(back, input), expected_grads)
    for module in (new, back):
        assert list(module.state_dict()) == list(state)
        assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


def test_the_result_can_be_copied_and_moved():
    for module in (convert(nn.LSTM(5, 7))[0], to_torch(fusedrnn.LSTM(5, 7))[0]):
        expected = module(INPUT)
        moved = copy.deepcopy(module).double()
        torch.testing.assert_close(moved(INPUT.double())[0].float(), expected[0])


# Parameters are the same objects


@pytest.mark.parametrize(
    ("way", "make"), [(convert, nn.LSTM), (to_torch, fusedrnn.LSTM), (convert, nn.GRUCell)]
)
def test_the_parameters_are_the_same_objects(way, make):
    old = make(5, 7)
    before = dict(old.named_parameters())
    new, _ = way(old)
    assert new is not old
    after = dict(new.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_an_optimizer_stays_valid():
    model = nn.Sequential(nn.LSTM(5, 7))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    gradients(model, INPUT)
    optimizer.step()
    reference, reference_optimizer = copy.deepcopy((model, optimizer))
    convert(model)
    for m, o in ((model, optimizer), (reference, reference_optimizer)):
        gradients(m, INPUT)
        o.step()
    torch.testing.assert_close(model(INPUT)[0], reference(INPUT)[0])


def test_weights_in_a_larger_memory_stay_there():
    old = nn.GRU(5, 7)
    buffer = torch.zeros(1000)
    for i, p in enumerate(old.parameters()):
        place = buffer[200 * i : 200 * i + p.numel()].view(p.shape)
        p.data = place.copy_(p.data)
    new, _ = convert(old)
    assert new.weight_ih_l0.data_ptr() == buffer.data_ptr()


def test_gradients_flags_and_training_mode_are_carried_over():
    old = nn.GRU(5, 7).eval()
    old.note = "mine"
    old.weight_ih_l0.requires_grad_(False)
    old(INPUT)[0].sum().backward()
    grad = old.weight_hh_l0.grad
    new, _ = convert(old)
    assert new.note == "mine" and not new.training and not new.weight_ih_l0.requires_grad
    assert new.weight_hh_l0.requires_grad and new.weight_hh_l0.grad is grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_is_carried_over(dtype):
    new, _ = convert(nn.LSTM(5, 7, dtype=dtype))
    assert new.weight_ih_l0.dtype == new.flat_weight.dtype == dtype


def test_meta():
    for way, make in ((convert, nn.GRU), (to_torch, fusedrnn.GRU)):
        new, _ = way(make(5, 7, device="meta"))
        assert all(p.is_meta for p in new.parameters())
        new.to_empty(device="cpu").reset_parameters()
        assert new(INPUT)[0].isfinite().all()


@pytest.mark.cuda
def test_cuda():
    old = nn.LSTM(5, 7).cuda()
    expected = old(INPUT.cuda())
    new, _ = convert(old)
    assert all(p.is_cuda for p in new.parameters())
    torch.testing.assert_close(new(INPUT.cuda()), expected)
    assert new.flat_weight.is_cuda
    back, _ = to_torch(new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(back(INPUT.cuda()), expected)


def test_no_random_numbers_are_drawn_and_nothing_is_warned_of():
    with pytest.warns(UserWarning, match="dropout"):
        old = nn.GRU(5, 7, dropout=0.5)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, _ = convert(old)
        back, _ = to_torch(new)
    assert new.dropout == back.dropout == 0.5
    assert torch.equal(torch.get_rng_state(), state)


# Models


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoders = nn.ModuleList([nn.LSTM(5, 7), nn.GRU(7, 7)])
        self.cells = nn.ModuleDict({"a": nn.GRUCell(7, 7)})
        self.none = None
        self.register_module("also_none", None)
        self.head = nn.Sequential(nn.Linear(7, 3), nn.Tanh())

    def forward(self, input):
        for encoder in self.encoders:
            input, _ = encoder(input)
        return self.head(self.cells["a"](input[-1]))


@pytest.mark.parametrize("wrap", [lambda m: m, nn.DataParallel], ids=["plain", "DataParallel"])
def test_models_are_changed_in_place(wrap):
    model = wrap(Tagger())
    expected, keys = model(INPUT), list(model.state_dict())
    same, report = convert(model)
    assert same is model and list(model.state_dict()) == keys
    prefix = "module." if isinstance(model, nn.DataParallel) else ""
    assert [r.name for r in report.replaced] == [
        f"{prefix}encoders.0",
        f"{prefix}encoders.1",
        f"{prefix}cells.a",
    ]
    assert report.kept == []
    for rnn in (model.get_submodule(replaced.name) for replaced in report.replaced):
        assert rnn.flat_weight.numel() == sum(p.numel() for p in rnn.parameters())
    torch.testing.assert_close(model(INPUT), expected)
    assert not any(isinstance(m, nn.RNNBase | nn.RNNCellBase) for m in model.modules())

    assert convert(model) == (model, fusedrnn.ConversionReport())  # nothing is left
    assert len(to_torch(model)[1].replaced) == 3
    torch.testing.assert_close(model(INPUT), expected)


def test_a_shared_module_stays_shared():
    rnn = nn.GRU(5, 5)
    model = nn.Sequential()
    model.a, model.b, model.inner = rnn, rnn, nn.Sequential(rnn)
    _, report = convert(model)
    assert type(model.a) is fusedrnn.GRU
    assert model.a is model.b is model.inner[0]
    assert [r.name for r in report.replaced] == ["a"]


def test_tied_parameters_stay_tied():
    model = nn.ModuleDict({"a": nn.GRU(5, 7), "b": nn.GRU(5, 7), "c": nn.GRU(7, 7, num_layers=2)})
    model["b"].weight_hh_l0 = model["a"].weight_hh_l0
    model["c"].weight_hh_l1 = model["c"].weight_hh_l0
    expected = {name: copy.deepcopy(model[name]) for name in model}
    for way in (convert, to_torch):
        _, report = way(model)
        assert len(report.replaced) == 3
        assert model["b"].weight_hh_l0 is model["a"].weight_hh_l0
        assert model["c"].weight_hh_l1 is model["c"].weight_hh_l0
        for name, input in (("a", INPUT), ("b", INPUT), ("c", torch.ones(3, 2, 7))):
            torch.testing.assert_close(model[name](input), expected[name](input))


def test_hooks_are_carried_over_with_their_handles():
    old, calls = nn.GRU(5, 7), []
    handles = [
        old.register_forward_pre_hook(lambda m, args: calls.append("pre")),
        old.register_forward_hook(lambda m, args, kwargs, out: calls.append("f"), with_kwargs=True),
        old.register_full_backward_hook(lambda m, gi, go: calls.append("backward")),
        old.register_state_dict_post_hook(lambda m, *args: calls.append(type(m))),
        old.register_load_state_dict_post_hook(lambda m, keys: calls.append("load")),
    ]
    for way, kind in ((convert, fusedrnn.GRU), (to_torch, nn.GRU)):
        old, _ = way(old)
        old(INPUT.clone().requires_grad_())[0].sum().backward()
        old.load_state_dict(old.state_dict())
        assert calls == ["pre", "f", "backward", kind, "load"]
        calls.clear()
    for handle in handles:
        handle.remove()
    old.load_state_dict(old.state_dict())
    old(INPUT)
    assert calls == []


# Modules that are kept


class OwnLSTM(nn.LSTM):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


def changed(change, module):
    """The module after a change in place."""
    change(module)
    return module


def quantized(kind):
    return nn.Sequential(pytest.importorskip(f"torch.ao.nn.{kind}").LSTM(5, 7))


COUNTERPART, OVERRIDDEN = "has no counterpart of", "was overridden on this very module"
KEPT = {  # modules, made by functions, with the reason
    "subclass": (lambda: OwnLSTM(5, 7), "subclass of torch.nn.LSTM"),
    "RNN": (lambda: nn.RNN(5, 7), f"fusedrnn {COUNTERPART} torch.nn.RNN"),
    "RNNCell": (lambda: nn.RNNCell(5, 7), f"fusedrnn {COUNTERPART} torch.nn.RNNCell"),
    "parametrized": (
        lambda: changed(lambda m: parametrizations.weight_norm(m, "weight_hh_l0"), nn.LSTM(5, 7)),
        "it is parametrized: weight_hh_l0",
    ),
    **{
        name: (
            lambda name=name: changed(lambda m: setattr(m, name, lambda x: x), nn.GRU(5, 7)),
            f"{name} {OVERRIDDEN}",
        )
        for name in ("forward", "_compiled_call_impl", "recompute")
    },
    "hook": (
        lambda: changed(
            lambda m: m.register_load_state_dict_pre_hook(lambda m, *args: None), nn.GRU(5, 7)
        ),
        "a hook for load_state_dict is bound to this very module",
    ),
    "script": (
        lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.LSTM(5, 7)))),
        "it is compiled by TorchScript",
    ),
    "trace": (
        lambda: nn.Sequential(torch.jit.trace(nn.Sequential(nn.LSTM(5, 7)), INPUT)),
        "it is compiled by TorchScript",
    ),
    **{
        kind: (lambda kind=kind: quantized(kind), f"fusedrnn {COUNTERPART} torch.ao.nn.{kind}")
        for kind in ("quantizable", "quantized.dynamic")
    },
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("what", KEPT)
def test_modules_that_are_kept(what):
    make, reason = KEPT[what]
    assert_kept(make(), reason)


def test_modules_that_torch_lacks_are_kept():
    assert_kept(type("Own", (fusedrnn.GRU,), {})(5, 7), "subclass of fusedrnn.GRU", to_torch)
    for make in (fusedrnn.StochasticGRU, fusedrnn.StochasticGRUCell):
        assert_kept(make(5, 7), f"torch.nn {COUNTERPART} fusedrnn.StochasticGRU", to_torch)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_kept(dtype):
    old = nn.LSTM(5, 7)
    for p in old.parameters():
        p.data = p.data.to(dtype)
    names = "torch.float32, torch.float64, torch.bfloat16, torch.float16"
    assert_kept(old, f"dtype must be one of {names}, got {dtype}")


def test_other_devices_are_kept(monkeypatch):
    with pytest.raises(_CannotReplace, match="fusedrnn does not run on mps:0"):
        _check_device(torch.device("mps:0"), fusedrnn.GRU)
    _check_device(torch.device("mps:0"), nn.GRU)
    monkeypatch.setattr(fusedrnn._library, "cuda_obstacle", "there is no CUDA")
    with pytest.raises(_CannotReplace, match="it is on cuda:0, but there is no CUDA"):
        _check_device(torch.device("cuda:0"), fusedrnn.GRU)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("way", [convert, to_torch])
def test_weight_normed_and_pruned_modules_are_kept(way):
    make = nn.LSTM if way is convert else fusedrnn.LSTM
    normed, spectral, pruned = make(5, 7), make(5, 7), make(5, 7)
    nn.utils.weight_norm(normed, "weight_hh_l0")
    nn.utils.spectral_norm(spectral, "weight_hh_l0")
    prune.random_unstructured(pruned, "weight_hh_l0", 0.5)
    more = "it has more than its usual weights: "
    assert_kept(normed, f"{more}weight_hh_l0_g, weight_hh_l0_v", way)
    assert_kept(spectral, f"{more}weight_hh_l0_orig, weight_hh_l0_u", way)
    assert_kept(pruned, f"{more}weight_hh_l0_mask, weight_hh_l0_orig", way)


def test_other_weights_are_kept():
    odd, mixed, special = nn.GRU(5, 7), nn.GRU(5, 7), nn.GRU(5, 7)
    odd.weight_hh_l0 = nn.Parameter(torch.zeros(3))
    assert_kept(odd, "weight_hh_l0 is (3,) of torch.float32, where (21, 7)")
    mixed.bias_hh_l0.data = mixed.bias_hh_l0.data.double()
    assert_kept(mixed, "bias_hh_l0 is (21,) of torch.float64")
    special.bias_hh_l0 = type("Sharded", (nn.Parameter,), {})(torch.zeros(21))
    assert_kept(special, "bias_hh_l0 is not a plain nn.Parameter")


def test_compiled_modules_are_kept():
    rnn = nn.GRU(5, 7)
    compiled = torch.compile(rnn, backend="eager")
    assert_kept(compiled, "torch.compile has wrapped it")
    assert_kept(nn.ModuleList([rnn, compiled]), "torch.compile has wrapped it")


def test_models_within_torch_compile_are_converted():
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.GRU(5, 7)), backend="eager")
    expected = model(INPUT)
    assert [r.name for r in convert(model)[1].replaced] == ["_orig_mod.0"]
    torch.testing.assert_close(model(INPUT), expected)


# The report


def test_the_report_is_readable():
    model = nn.ModuleDict({"a": nn.LSTM(5, 7, num_layers=2), "b": nn.RNN(5, 7)})
    _, report = convert(model)
    assert str(report).splitlines() == [
        "Replaced 1:",
        "  a: torch.nn.LSTM(5, 7, num_layers=2) -> fusedrnn.LSTM(5, 7, num_layers=2)",
        "Kept 1:",
        "  b: torch.nn.RNN(5, 7): fusedrnn has no counterpart of torch.nn.RNN",
        "In other code:",
        "  isinstance(m, nn.LSTM) is False now: initialise earlier, or ask for fusedrnn.LSTM too",
        "  torch.ao.quantization finds torch.nn's modules only: call fusedrnn.to_torch(model) "
        "before",
    ]
    assert report.replaced[0].name == "a" and report.kept[0].name == "b"
    assert str(convert(nn.Linear(5, 7))[1]) == "Nothing to replace."
    (_, line) = str(convert(nn.RNN(5, 7))[1]).splitlines()  # nothing changes in other code
    assert line.startswith("  (the model): torch.nn.RNN")
    assert to_torch(nn.Sequential(fusedrnn.GRU(5, 7)))[1].advice == []


class Holder(nn.Module):
    """Holds modules in a plain list, among others, besides or in the place of submodules."""

    def __init__(self, lstm, gru):
        super().__init__()
        self.lstm, self.inner = lstm, nn.Sequential(nn.Linear(5, 5), gru)
        self.layers = [self.lstm, self.inner, self.inner[0]]
        self.by_name = {"a": {1: (gru,)}, 3.5: [lstm], "many": list(range(1000)), "me": self}
        self.by_name["itself"] = self.by_name
        self.__dict__["alias"] = gru
        self.inner.spare = {type(lstm)(5, 7)}
        self.deep = [nn.Sequential(type(gru)(5, 7))]
        self.sizes = torch.Size([2]), torch.zeros(2), "text", None


@pytest.mark.parametrize(("way", "library"), [(convert, nn), (to_torch, fusedrnn)])
def test_modules_outside_of_submodules_are_named(way, library):
    """A list that a model goes through in forward would go on with the old modules."""
    model = Holder(library.LSTM(5, 7), library.GRU(5, 7))
    _, report = way(model)
    assert [r.name for r in report.replaced] == ["lstm", "inner.1"]
    name = f"{'torch.nn' if library is nn else 'fusedrnn'}."
    found = {kept.name: (kept.module.removeprefix(name), kept.reason) for kept in report.outside}
    put, hold = "was this one; put the new one here, too", "a torch.nn.ModuleList would make it"
    assert found == {
        "layers[0]": ("LSTM(5, 7)", f"lstm {put}"),
        "by_name['a'][1][0]": ("GRU(5, 7)", f"inner.1 {put}"),
        "by_name[float][0]": ("LSTM(5, 7)", f"lstm {put}"),
        "alias": ("GRU(5, 7)", f"inner.1 {put}"),
        "deep[0].0": ("GRU(5, 7)", f"{hold} a submodule"),
        "inner.spare[0]": ("LSTM(5, 7)", f"{hold} a submodule"),
    }
    assert f"  layers[0]: {name}LSTM(5, 7): lstm {put}" in str(report).splitlines()
    assert "Outside of submodules, so not replaced 6:" in str(report).splitlines()


def test_what_holds_only_submodules_is_not_named():
    model = Holder(nn.LSTM(5, 7), nn.GRU(5, 7))
    model.layers, model.by_name, model.deep = [model.inner], {}, [nn.Linear(5, 5)]
    del model.__dict__["alias"], model.inner.spare
    assert convert(model)[1].outside == []


def test_a_module_that_an_attribute_alone_holds():
    model = nn.Sequential(nn.LSTM(5, 7))
    model.__dict__["alias"] = model[0]
    (kept,) = convert(model)[1].outside
    assert kept.name == "alias" and kept.reason.startswith("0 was this one")
    rnn = nn.LSTM(5, 7)
    rnn.itself = [rnn]
    (kept,) = convert(rnn)[1].outside
    assert kept.name == "itself[0]" and kept.reason.startswith("the model was this one")


def test_lost_options_are_reported():
    _, report = to_torch(nn.Sequential(fusedrnn.GRU(5, 7, recompute=False, chunk_size=3)))
    assert report.replaced[0].lost == ("recompute=False", "chunk_size=3")
    assert str(report).endswith("torch.nn.GRU(5, 7) (without recompute=False, chunk_size=3)")
    _, report = to_torch(nn.Sequential(fusedrnn.LSTM(5, 7, workspace_bytes=2**20)))
    assert report.replaced[0].lost == ("workspace_bytes=1048576",)


def test_a_pair_of_zeros_is_no_zoneout():
    converted, report = to_torch(fusedrnn.LSTM(5, 7, zoneout=(0.0, 0.0)))
    assert type(converted) is nn.LSTM and not report.replaced[0].lost
    assert_kept(fusedrnn.LSTM(5, 7, zoneout=(0.0, 0.1)), "torch.nn.LSTM has no zoneout", to_torch)


def test_only_modules_are_taken():
    for way, wrong in itertools.product((convert, to_torch), (nn.LSTM, [nn.LSTM(5, 7)], None)):
        with pytest.raises(TypeError, match=r"^fusedrnn: module must be a torch\.nn\.Module, got"):
            way(wrong)


class FastaiWeightDropout(nn.Module):
    """fastai's wrapper (fastai.text.models.awdlstm), which holds the weight under another name."""

    def __init__(self, module, weight_p):
        super().__init__()
        self.module, self.weight_p = module, weight_p
        weight = module.weight_hh_l0
        del module.weight_hh_l0
        self.weight_hh_l0_raw = nn.Parameter(weight.detach())
        self.module.weight_hh_l0 = weight.detach().clone()


class NlpWeightDropLSTM(nn.LSTM):
    """PyTorch-NLP's module (torchnlp.nn), which holds the weight under another name."""

    def __init__(self, *args):
        super().__init__(*args)
        weight = self.weight_hh_l0
        del self.weight_hh_l0
        self.weight_hh_l0_raw = nn.Parameter(weight.detach())


def test_weight_drop_is_kept_and_its_option_is_named():
    model = nn.ModuleList([FastaiWeightDropout(nn.LSTM(3, 4), 0.5), NlpWeightDropLSTM(3, 4)])
    _, report = convert(model)
    assert report.replaced == []
    assert [kept.name for kept in report.kept] == ["0.module", "1"]
    for kept, option in zip(report.kept, ("weight_dropout=0.5", "weight_dropout=p"), strict=True):
        assert "WeightDrop sets weight_hh_l0" in kept.reason and option in kept.reason


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
@pytest.mark.parametrize(("bias", "expected"), [(1, True), (0, False), ("tanh", True)])
def test_the_bias_of_a_cell_is_taken_for_its_truth(cell, bias, expected):
    """torch.nn's cells accept any value of bias too."""
    old = cell(3, 4, bias)
    x = torch.randn(2, 3)
    before = old(x)
    new, report = convert(old)
    assert len(report.replaced) == 1 and new.bias is expected
    torch.testing.assert_close(new(x), before)
