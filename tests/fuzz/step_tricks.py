"""What a graph of operations does not show, or what cannot be compiled: words of random steps.

Longer than 350 lines, because it is a list.
"""

# ruff: noqa: E501, code of random steps
from __future__ import annotations

from .step_source import BOOL, FLOATS, INT, Value, Writer
from .step_words import Word, _pair

# Custom functions whose derivative is not that of what they compute.
FUNCTIONS = """
class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()
    @staticmethod
    def backward(ctx, g):
        return -0.5 * g

class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return torch.tanh(y)
    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.01, 0.01)

class ClippedWhenLarge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return 1.0 * y
    @staticmethod
    def backward(ctx, g):
        return torch.where(g.abs() > 50, torch.zeros_like(g), g)

class Right(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y.sin()
    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y.cos()

class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return torch.round(y * 4) / 4
    @staticmethod
    def backward(ctx, g):
        return g
"""


def in_place(w: Writer) -> None:
    """Of a new tensor."""
    one = w.pick(dims=None)
    made = w.new(f"{one.name} * {w.number(0.5, 1.5)}", one.shape)
    ways = [
        "add_(0.5)",
        "mul_(0.7)",
        "tanh_()",
        "sigmoid_()",
        "clamp_(-1, 1)",
        "relu_()",
        "neg_()",
        "zero_()",
    ]
    ways += [
        f"add_({one.name})",
        f"mul_({one.name})",
        f"copy_({one.name})",
        "fill_(0.3)",
        "sub_(1).mul_(2)",
    ]
    ways += [
        f"masked_fill_({one.name} > 0, 0.1)",
        f"addcmul_({one.name}, {one.name})",
        "abs_()",
        "square_()",
    ]
    ways += [
        f"lerp_({one.name}, 0.5)",
        "round_()",
        f"where({one.name} > 0, 1.0)",
        f"div_({one.name}.abs() + 1)",
    ]
    w.do(f"{made.name}.{w.rng.choice(ways)}")


def in_place_operators(w: Writer) -> None:
    one = w.pick(dims=None)
    made = w.new(f"{one.name}.clone()", one.shape)
    text = w.rng.choice(
        ["{} += {o}", "{} *= 0.5", "{} -= 1", "{} /= 2", "{} **= 2", "{} *= {o}.tanh()"]
    )
    w.do(text.replace("{}", made.name).replace("{o}", one.name))


def written_part(w: Writer) -> None:
    """Columns of a tensor are set, maybe of one that others see, too."""
    one, other = w.pick(least=2), w.pick()
    first = w.rng.randint(0, one.width - 1)
    end = w.rng.randint(first + 1, one.width)
    made = w.new(
        w.rng.choice(
            [
                f"{one.name}.clone()",
                f"torch.zeros_like({one.name})",
                f"{one.name} + 0.0",
                f"torch.empty_like({one.name}).copy_({one.name})",
            ]
        ),
        one.shape,
    )
    at = f"{made.name}[:, {first}:{end}]"
    ways = [
        f"{at} = {other.name}[:, :1]",
        f"{at} += 1.0",
        f"{at}.mul_(0.5)",
        f"{at} = 0.25",
        f"{made.name}[:, {first}] = {other.name}[:, 0]",
    ]
    ways += [
        f"{made.name}[..., {first}].sigmoid_()",
        f"{at}.copy_({other.name}[:, -1:].expand(-1, {end - first}))",
    ]
    ways += [
        f"{made.name}[{one.name} > 0.5] = 0.0",
        f"{made.name}.narrow(1, {first}, 1).zero_()",
        f"{made.name}[0] = 0.0",
        f"{made.name}[:2, {first}] = 1.0",
    ]
    w.do(w.rng.choice(ways))


def aliased(w: Writer) -> None:
    """A view of a new tensor is changed, and the tensor is read; or the other way round."""
    one = w.pick(least=2)
    base = w.new(f"{one.name} * 1.0", one.shape)
    ways = [
        (f"{base.name}.view(rows, -1)", one.width),
        (f"{base.name}[:, 1:]", one.width - 1),
        (f"{base.name}.t().t()", one.width),
        (f"{base.name}[:, ::2]", -(-one.width // 2)),
    ]
    text, width = w.rng.choice(ways)
    view = w.new(text, (width,))
    target = w.rng.choice([base, view])
    w.do(f"{target.name}.{w.rng.choice(['mul_(0.5)', 'add_(1)', 'tanh_()', 'zero_()'])}")
    w.new(f"{base.name} + {base.name}.sum(-1, keepdim=True)", one.shape)


def changed_argument(w: Writer) -> None:
    """The state or the input itself is changed."""
    one = w.rng.choice(w.values[: len(w.source.states) + len(w.source.inputs)])
    w.do(f"{one.name}.{w.rng.choice(['mul_(0.9)', 'add_(0.1)', 'clamp_(-1, 1)', 'zero_()'])}")


def out_argument(w: Writer) -> None:
    a, b = _pair(w)
    made = w.new(f"torch.zeros_like({a.name})", a.shape)
    w.do(f"with torch.no_grad():\n    torch.add({a.name}, {b.name}, out={made.name})")


def data(w: Writer) -> None:
    one = w.pick(dims=None)
    way = w.rng.randrange(4)
    if way == 0:
        w.new(f"{one.name}.data * {one.name}", one.shape)
    elif way == 1:
        made = w.new(f"{one.name} * 1.0", one.shape)
        w.do(f"{made.name}.data.mul_(0.5)")
    elif way == 2:
        made = w.new(f"{one.name} * 1.0", one.shape)
        w.do(f"{made.name}.data = {one.name}.data * 2")
    else:
        made = w.new(f"{one.name}.data.clone()", one.shape)
        w.new(f"{made.name} + {one.name}.tanh()", one.shape)


def without_gradient(w: Writer) -> None:
    one = w.pick()
    made, target = Value(w.name("v"), one.shape), w.new(f"{one.name}.sin()", one.shape)
    block = w.rng.choice(
        [
            "torch.no_grad()",
            "torch.set_grad_enabled(False)",
            "torch.inference_mode()",
            "torch.no_grad(), torch.enable_grad()",
        ]
    )
    ways = [
        f"{made.name} = torch.sigmoid({w.linear(one.width, one.width)}({one.name}))",
        f"{made.name} = {one.name}.tanh()\n    {target.name}.mul_(0.5)",
    ]
    ways += [
        f"{made.name} = {one.name} / {one.name}.norm(dim=-1, keepdim=True).clamp(min=1.0)",
        f"{made.name} = {one.name}\n    {target.name}.copy_({one.name})",
    ]
    w.do(f"with {block}:\n    {w.rng.choice(ways)}", [made])
    w.new(f"{made.name} * {target.name}", one.shape)


def no_grad_function(w: Writer) -> None:
    one = w.pick()
    name = w.name("function")
    w.source.above.append(f"@torch.no_grad()\ndef {name}(y):\n    return y.tanh() * 2")
    w.new(f"{name}({one.name}) * {one.name}", one.shape)


def hook(w: Writer) -> None:
    one = w.pick()
    made = w.new(f"{one.name} * 1.0", one.shape)
    function = w.rng.choice(
        [
            "lambda g: g * 0.5",
            "lambda g: g.clamp(-0.01, 0.01)",
            "lambda g: torch.zeros_like(g)",
            "lambda g: None",
            "lambda g: torch.where(g.abs() > 100, 0.0, g)",
        ]
    )
    w.do(f"if {made.name}.requires_grad:\n    {made.name}.register_hook({function})")
    w.new(f"{made.name}.sin()", one.shape)


def hook_of_weight(w: Writer) -> None:
    one = w.pick()
    p = w.parameter(one.width)
    w.source.setup.append(
        w.rng.choice(
            [
                f"{p}.register_hook(lambda g: g * 0.5)",
                f"{p}.register_post_accumulate_grad_hook(lambda p: None)",
            ]
        )
    )
    w.new(f"{one.name} * {p}", one.shape)


def hook_of_module(w: Writer) -> None:
    one = w.pick()
    m = w.linear(one.width, one.width)
    ways = [
        f"{m}.register_forward_hook(lambda m, i, o: o * 2)",
        f"{m}.register_full_backward_hook(lambda m, i, o: (i[0] * 0.5 if i[0] is not None else None,))",
    ]
    ways += [
        f"{m}.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,))",
        f"{m}.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,))",
    ]
    w.source.setup.append(w.rng.choice(ways))
    w.new(f"{m}({one.name})", one.shape)


def custom_function(w: Writer) -> None:
    one = w.pick(dims=None)
    if FUNCTIONS not in w.source.above:
        w.source.above.append(FUNCTIONS)
    kind = w.rng.choice(["Reversed", "Clipped", "ClippedWhenLarge", "Right", "Rounded"])
    w.new(f"{kind}.apply({one.name})", one.shape)


def counter(w: Writer) -> None:
    """Python state that decides."""
    one, name = w.pick(), f"self.{w.name('n')}"
    w.source.setup.append(f"{name} = 0")
    w.do(f"{name} += 1")
    k = w.rng.choice([2, 3, 4, 7])
    ways = [
        f"{one.name} * (1 + 0.1 * {name})",
        f"{one.name} if {name} % {k} else {one.name} * 0.5",
        f"{one.name}.tanh() if {name} > {k} else {one.name}",
        f"{one.name} + float({name} == {k})",
    ]
    w.new(w.rng.choice(ways), one.shape)


def global_counter(w: Writer) -> None:
    one, name = w.pick(), w.name("STATE")
    k = w.rng.choice([2, 5])
    way = w.rng.randrange(4)
    if way == 0:
        w.source.above.append(f"{name} = {{'n': 0}}")
        w.do(f"{name}['n'] += 1")
        w.new(f"{one.name} * (2.0 if {name}['n'] > {k} else 1.0)", one.shape)
    elif way == 1:
        w.source.above.append(f"{name} = []")
        w.do(f"{name}.append(0)")
        w.new(f"{one.name} + 0.1 * len({name})", one.shape)
    elif way == 2:
        w.source.above.append(
            f"{name} = 0\ndef next_{name}():\n    global {name}\n    {name} += 1\n    return {name}"
        )
        w.new(f"{one.name} + 0.1 * (next_{name}() > {k})", one.shape)
    else:
        w.source.above.append(
            f"def next_{name}(y, known=[0]):\n    known[0] += 1\n    return y * (known[0] > {k})"
        )
        w.new(f"next_{name}({one.name}) + {one.name}", one.shape)


def attribute(w: Writer) -> None:
    """What another step has kept."""
    one, name = w.pick(), f"self.{w.name('kept')}"
    w.source.setup.append(f"{name} = None")
    way = w.rng.randrange(4)
    if way == 0:  # of the first step, for ever
        w.do(f"if {name} is None:\n    {name} = {one.name}.detach().mean()")
        w.new(f"{one.name} - {name}", one.shape)
    elif way == 1:  # of the step before
        made = w.new(
            f"{one.name} if {name} is None or {name}.shape != {one.name}.shape else {one.name} + 0.5 * {name}",
            one.shape,
        )
        w.do(f"{name} = {made.name}.detach()")
    elif way == 2:  # kept and not read
        w.do(f"{name} = {one.name}")
        w.new(f"{name} * 2", one.shape)
    else:
        w.do(f"{name} = [{one.name}.detach()] + ({name} or [])[:2]")
        w.new(f"{one.name} + 0.1 * len({name})", one.shape)


def mode(w: Writer) -> None:
    one = w.pick()
    ways = [
        "{} * 2 if self.training else {}",
        "{}.detach() if torch.is_grad_enabled() and self.training else {}.detach()",
        "F.dropout({}, 0.5, self.training)",
    ]
    ways += [
        "{} + 0.5 if self.scale > 1 else {}",
        "{} * self.scale",
        "{} * self.options['scale']",
        "{} * SCALE",
        "{} * Cell.factor",
        "getattr(self, 'way')({})",
        "{} * self.config.scale",
    ]
    text = w.rng.choice(ways)
    lines = [
        "self.scale = 1.5",
        "self.options = {'scale': 0.5}",
        "self.way = torch.tanh",
        "self.config = Config()",
        "Cell.factor = 0.5",
    ]
    w.source.setup += [line for line in lines if line not in w.source.setup]
    above = "SCALE = 0.7\nclass Config:\n    scale = 0.8"
    if above not in w.source.above:
        w.source.above.append(above)
    w.new(text.replace("{}", one.name), one.shape)
    changes = [
        "cell.scale = 0.5",
        "cell.options['scale'] = 2.0",
        "space['SCALE'] = 0.1",
        "space['Cell'].factor = 3.0",
        "cell.way = torch.sin",
        "cell.config.scale = 0.2",
        "space['Config'].scale = 0.3",
        "cell.train(not cell.training)",
    ]
    w.source.changes += w.rng.sample(changes, 2)


def branch(w: Writer) -> None:
    """Python decides by values; some are rare."""
    one = w.pick()
    limit = w.rng.choice(["0", "0.5", "1e3", "-1e3"])
    ways = [
        "{} if {}.sum() > {l} else {} * 0.5",
        "{} * float({}.mean() > {l})",
        "{} * {}.mean().item()",
        "{} if bool(({} > {l}).any()) else -{}",
    ]
    ways += [
        "{}[:, [int({}.sum().clamp(0, 0.4))]] + {}",
        "{} + len({}.nonzero())",
        "{} * 2 if torch.isnan({}).any() else {}",
        "{} if torch.equal({}, {}.abs()) else {}.abs()",
    ]
    ways += [
        "{} * (1 if {}.tolist()[0][0] > {l} else 2)",
        "{} if {}.max() < {l} else {}.clamp(max=1)",
        "{} + math.tanh({}[0, 0])",
        "({} if {}.abs().sum() else {} + 1)",
        "torch.cond({}.sum() > {l}, lambda y: y * 2, lambda y: y.sin(), ({},))",
    ]
    text = w.rng.choice(ways).replace("{l}", limit)
    w.new(text.replace("{}", one.name), one.shape)


def through_numpy(w: Writer) -> None:
    one = w.pick()
    ways = [
        "torch.from_numpy({}.detach().numpy() * 2)",
        "torch.tensor({}.tolist(), dtype=torch.float64)",
        "torch.as_tensor({}.detach().numpy()).clone()",
        "torch.tensor([[float(c) for c in row] for row in {}], dtype=torch.float64)",
    ]
    w.new(f"{w.rng.choice(ways).replace('{}', one.name)} + {one.name}", one.shape)


def buffer_of_steps(w: Writer) -> None:
    """A buffer that the step changes."""
    one = w.pick()
    b = w.buffer(one.width)
    ways = [
        f"{b} = 0.9 * {b} + 0.1 * {one.name}.detach().mean(0)",
        f"{b}.copy_({one.name}.detach()[0])",
        f"{b}.mul_(0.9)",
        f"{b} += 0.1",
        f"{b}.data.add_(0.1)",
        f"{b} = {b} + 0.1",
    ]
    before = w.rng.random() < 0.5
    if before:
        w.new(f"{one.name} * {b}", one.shape)
    text = w.rng.choice(ways)
    w.do(
        w.rng.choice([text, f"with torch.no_grad():\n    {text}", f"if self.training:\n    {text}"])
    )
    if not before:
        w.new(f"{one.name} + {b}", one.shape)


def weight_of_steps(w: Writer) -> None:
    one = w.pick()
    p = w.parameter(one.width)
    way = w.rng.randrange(3)
    if way == 0:
        w.new(f"{one.name} * {p}", one.shape)
        w.do(f"with torch.no_grad():\n    {p}.mul_(0.99)")
    elif way == 1:
        w.do(f"{p}.data.clamp_(-0.5, 0.5)")
        w.new(f"{one.name} * {p}", one.shape)
    else:
        m = w.linear(one.width, one.width)
        kind = w.rng.choice(["weight_norm", "spectral_norm", "orthogonal"])
        w.source.setup.append(f"nn.utils.parametrizations.{kind}({m})")
        w.new(f"{m}({one.name})", one.shape)


def of_batch(w: Writer) -> None:
    """Mixes rows, or depends on their number."""
    one = w.pick()
    ways = [
        "{} - {}.mean(0)",
        "{} - {}.mean(0, keepdim=True)",
        "{} / {}.std(0).clamp(min=0.1)",
        "{}.cumsum(0)",
        "{}.roll(1, 0)",
        "{}.flip(0)",
        "F.softmax({}, 0)",
        "{} * {}.shape[0]",
        "{} / len({})",
    ]
    ways += [
        "{} + {}.sum()",
        "{} - {}.max()",
        "{}[torch.arange({}.shape[0] - 1, -1, -1)]",
        "{} + {}[0]",
        "{} + {}[:1]",
        "{} * {}[-1:].detach()",
        "{}.sort(0).values",
        "({} @ {}.t()) @ {}",
        "{} + torch.arange({}.shape[0])[:, None] * 0.1",
    ]
    ways += [
        "F.batch_norm({}, None, None, training=True)",
        "{} / {}.norm()",
        "{}.view(-1).view({}.shape)",
        "{} * torch.ones({}.shape[0], 1, dtype={}.dtype)",
        "F.normalize({}, dim=0)",
        "{} + torch.linspace(0, 1, rows, dtype={}.dtype).unsqueeze(-1)",
        "{}.reshape({}.shape[1], -1).reshape({}.shape)",
        "{} * (2 if rows == 3 else 1)",
        "torch.cat([{}[1:], {}[:1]])",
        "{} + torch.randn({}.shape[1], dtype={}.dtype)",
        "{}.t().reshape({}.shape)",
        "torch.eye(rows, dtype={}.dtype) @ {}",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name), one.shape)


def batch_norm(w: Writer) -> None:
    one = w.pick()
    w.new(f"{w.module(f'nn.BatchNorm1d({one.width})')}({one.name})", one.shape)


def cast(w: Writer) -> None:
    one = w.pick()
    ways = [
        "{}.half().double()",
        "{}.bfloat16().to({}.dtype)",
        "{}.to(torch.float32).exp().double()",
        "(10 * {}).int().double()",
        "{}.to(torch.int64).to({})",
        "{}.bool().double()",
        "{}.type_as({})",
        "{} + torch.ones({w})",
        "{} * torch.tensor(0.1)",
    ]
    ways += [
        "({} + torch.tensor(1.0, dtype=torch.float32)).double()",
        "{}.type(torch.float64)",
        "torch.view_as_real(torch.complex({}, {}))[..., 0]",
        "torch.complex({}, {}).abs()",
        "({}.float() @ torch.ones({w}, 1)).double() + {}",
        "{} + {}.new_tensor(0.3)",
        "{}.to({}.device)",
        "{} * torch.finfo({}.dtype).eps ** 0.1",
        "torch.polar({}.abs(), {}).real",
        "{} * torch.get_default_dtype().itemsize",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name).replace("{w}", str(one.width)), one.shape)


def hidden_nan(w: Writer) -> None:
    """Not finite in a branch that is not taken, and in its derivative."""
    one = w.pick(dims=None)
    ways = [
        "torch.where({} > 0, {}.sqrt(), 0.0)",
        "torch.where({} > 0, {}, 1.0).log() + torch.where({} > 0, {}.log(), 0.0).detach()",
        "torch.where({} != 0, {} / {}, 1.0)",
        "torch.where({}.abs() > 1e-6, {}.sin() / {}, 1.0)",
    ]
    ways += [
        "torch.nan_to_num({}.log())",
        "torch.nan_to_num({} / {}.relu())",
        "{}.masked_fill({} > 9, -float('inf')).exp()",
        "{}.norm(dim=-1, keepdim=True) * {} if {}.dim() > 1 else {}",
        "{}.relu().sqrt()",
        "{}.abs().sqrt()",
        "{}.relu().pow(0.5)",
    ]
    ways += [
        "torch.maximum({}, torch.full_like({}, float('nan'))).nan_to_num(0.5) + {}",
        "torch.where(torch.isinf(1 / {}), {}, {} * 2)",
        "{} * (0 * {}).exp()",
        "torch.clamp({} / 0.0, -1, 1)",
        "{}.clamp(min=0).log().clamp(min=-5)",
        "torch.xlogy({}.relu(), {}.relu())",
        "torch.fmax({}, {}.log())",
        "torch.where({} < 1e30, {}, {}.exp().exp().exp())",
        "{}.sign() * {}.abs().pow(1 / 3)",
        "torch.atan2({}, {})",
        "torch.hypot({}, {})",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name), one.shape)


def masked_softmax(w: Writer) -> None:
    one = w.pick(least=2)
    w.new(
        f"F.softmax({one.name}.masked_fill({one.name} > {w.number(0, 1)}, float('-inf')), -1).nan_to_num()",
        one.shape,
    )


def inner_gradient(w: Writer) -> None:
    """Derivatives inside of the step."""
    one = w.pick()
    name = w.name("energy")
    w.source.above.append(f"def {name}(y):\n    return (y.sin() * y).sum()")
    ways = [
        f"torch.func.grad({name})({one.name})",
        f"torch.func.vmap(torch.func.grad({name}))({one.name})",
        f"torch.func.jvp({name}, ({one.name},), (torch.ones_like({one.name}),))[1] + {one.name}",
    ]
    ways += [
        f"torch.func.vmap(lambda y: y.cumsum(0).tanh())({one.name})",
        f"torch.utils.checkpoint.checkpoint(lambda y: y.sin().exp(), {one.name}, use_reentrant=False)",
    ]
    w.new(w.rng.choice(ways), one.shape)
    if w.rng.random() < 0.3:
        made = Value(w.name("v"), one.shape)
        w.do(
            f"with torch.enable_grad():\n    y = {one.name}.detach().requires_grad_()\n    {made.name} = torch.autograd.grad({name}(y), y)[0].detach()",
            [made],
        )


def choice_by_value(w: Writer) -> None:
    one = w.pick(least=2)
    ways = [
        "{}.topk(1, -1).values.expand_as({})",
        "{}.gather(1, {}.argsort(-1))",
        "{}[{} > 0].sum() + {}",
        "torch.masked_select({}, {} > 0).sum() * {}",
        "{}.sort(-1, descending=True)[0]",
        "{}.index_select(1, {}[0].argsort())",
        "torch.zeros_like({}).scatter(1, {}.argmax(-1, keepdim=True), 1.0) + {}",
        "{}.clone().masked_scatter({} > 0, {}.sin())",
        "torch.bucketize({}.detach(), torch.tensor([-0.5, 0.5], dtype={}.dtype)).double()",
        "torch.searchsorted({}.detach().sort(-1).values, {}.detach()).double()",
        "{}.unique().sum() + {}",
        "{}.index_add(0, torch.arange(rows), {})",
        "{}.put(torch.tensor([0]), {}[0, :1])",
        "{}.histc(4).sum() + {}",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name), one.shape)


def python_random(w: Writer) -> None:
    """Numbers that nobody can draw again."""
    one = w.pick()
    ways = [
        "{} * random.random()",
        "{} + random.gauss(0, 1)",
        "{} * torch.randint(0, 3, {}.shape).double()",
        "{}[:, torch.randperm({w})]",
        "{} + torch.randint_like({}, 3)",
        "{} * (2 if random.random() > 0.5 else 1)",
        "{} + torch.empty_like({}).cauchy_()",
        "{} * torch.poisson({}.abs())",
        "F.feature_alpha_dropout({}, 0.5, True)",
        "torch.empty_like({}).geometric_(0.5) * {}",
        "{} + torch.empty_like({}).log_normal_().clamp(max=2)",
        "D.Beta({}.abs() + 1, 1.0).rsample() + {}",
        "{} + torch.binomial(torch.full_like({}, 5), torch.full_like({}, 0.5))",
        "F.rrelu({}, training=True)",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name).replace("{w}", str(one.width)), one.shape)


def shared_draw(w: Writer) -> None:
    """Numbers for all rows, or drawn in one shape and read in another."""
    one = w.pick(least=2)
    ways = [
        "{} + torch.randn(1, {w}, dtype={}.dtype)",
        "{} * torch.rand({w}, dtype={}.dtype)",
        "{} + torch.randn((), dtype={}.dtype)",
        "{} + torch.randn({w}, rows, dtype={}.dtype).t()",
        "{} + torch.randn(rows * {w}, dtype={}.dtype).view(rows, {w})",
        "{} * torch.rand(rows, 1, dtype={}.dtype)",
        "{} + torch.randn(rows, 2, {w}, dtype={}.dtype).mean(1)",
        "{} + torch.randn(rows, {w}, 1, dtype={}.dtype).squeeze(-1)",
        "{} + torch.randn(2 * rows, {w}, dtype={}.dtype)[:rows]",
        "{} + torch.randn(rows, dtype={}.dtype).unsqueeze(-1)",
        "{} + torch.randn_like({})[:, :1]",
        "{} + torch.randn_like({}, dtype=torch.float32)",
        "{} + torch.randn({}.shape)",
        "(lambda e: {} * e + e.flip(-1))(torch.randn_like({}))",
        "{} + torch.randn_like({}).cumsum(-1) if True else {}",
        "F.dropout2d({}.unsqueeze(-1).unsqueeze(-1), 0.5, True).flatten(1)",
        "F.dropout1d({}.unsqueeze(-1), 0.4, True).squeeze(-1)",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name).replace("{w}", str(one.width)), one.shape)


def constant(w: Writer) -> None:
    """Tensors that the step makes, or that it finds."""
    one, width = w.pick(), 0
    width = one.width
    above = f"TABLE{width} = torch.linspace(-1, 1, {width}{FLOATS})"
    if above not in w.source.above:
        w.source.above.append(above)
    name = f"self.{w.name('plain')}"
    w.source.setup.append(f"{name} = torch.randn({width}{FLOATS})")
    ways = [
        f"{{}} * TABLE{width}",
        f"{{}} * {name}",
        f"{{}} + torch.arange({width})",
        f"{{}} * torch.linspace(0, 1, {width}{FLOATS})",
        f"{{}} + torch.eye({width}{FLOATS})[0]",
        f"{{}} @ torch.eye({width}{FLOATS})",
        f"{{}} @ torch.hann_window({width}{FLOATS}).diag()",
        f"{{}} @ torch.ones({width}, {width}{FLOATS}).triu()",
        "{} + torch.tensor(0.5)",
        "{} * torch.pi",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name), one.shape)
    w.source.changes.append(f"{name.replace('self', 'cell')}.mul_(2)")


def unknown(w: Writer) -> None:
    """Operations that are no product, and work on more than a number."""
    one = w.pick(least=3)
    ways = [
        "F.conv1d({}.unsqueeze(1), torch.ones(1, 1, 3, dtype={}.dtype), padding=1).squeeze(1)",
        "torch.fft.fft({}).real",
        "{} @ torch.linalg.inv(torch.eye({w}, dtype={}.dtype) * 2)",
        "F.avg_pool1d({}.unsqueeze(1), 3, 1, 1).squeeze(1)",
        "torch.matrix_exp(0.1 * {}.unsqueeze(-1) * {}.unsqueeze(-2)).sum(-1)",
        "F.scaled_dot_product_attention({}[:, None, None], {}[:, None, None], {}[:, None, None])[:, 0, 0]",
        "torch.cdist({}[:, None], {}[:, None]).flatten(1) + {}",
        "F.max_pool1d({}.unsqueeze(1), 3, 1, 1).squeeze(1)",
        "F.interpolate({}.unsqueeze(1), size={w}, mode='linear').squeeze(1)",
        "F.pairwise_distance({}, {} + 1)[:, None] * {}",
        "F.cosine_similarity({}, {} + 1)[:, None] * {}",
        "torch.cross({}[:, :3], {}[:, :3].sin(), dim=-1).sum(-1, keepdim=True) + {}",
        "torch.baddbmm({}[:, None], {}[:, None], torch.ones(rows, {w}, {w}, dtype={}.dtype)).squeeze(1)",
        "F.local_response_norm({}[:, :, None], 2).squeeze(-1)",
        "torch.trapz({}, dim=-1)[:, None] + {}",
        "F.pixel_shuffle({}[:, :1, None, None], 1).flatten(1) + {}",
        "{} + torch.kron({}[:, :1].contiguous(), torch.ones(1, {w}, dtype={}.dtype))",
        "{}.outer({}[:, 0])" if False else "{}.sin()",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name).replace("{w}", str(one.width)), one.shape)


def control(w: Writer) -> None:
    """Loops, functions and errors of Python."""
    one = w.pick()
    name = w.name("v")
    ways = [
        f"{name} = {one.name}\nfor i in range(3):\n    {name} = {name} * 0.5 + i",
        f"try:\n    {name} = {one.name} @ torch.ones(99, 1)\nexcept RuntimeError:\n    {name} = {one.name} * 2",
        f"{name} = functools.reduce(lambda a, b: a + b, {one.name}.unbind(-1)).unsqueeze(-1) + {one.name}",
        f"{name} = sum(({one.name} * k for k in (0.1, 0.2)), {one.name})",
        f"with torch.autocast('cpu', enabled=False):\n    {name} = {one.name}.sin()",
        f"assert {one.name}.dim() == 2\n{name} = {one.name}.cos()",
        f"{name} = torch.stack([{one.name}[i] for i in range(rows)])",
        f"{name} = {{'a': {one.name}}}['a'].tanh()",
        f"with torch.random.fork_rng():\n    {name} = {one.name} + torch.randn_like({one.name})",
        f"with torch.autocast('cpu', dtype=torch.bfloat16):\n    {name} = {one.name}.sin()",
        f"y = [row * 2 for row in {one.name}]\n{name} = torch.stack(y)",
        f"{name} = torch.jit.script(F.silu)({one.name})"
        if False
        else f"{name} = F.silu({one.name})",
    ]
    w.do(w.rng.choice(ways), [Value(name, one.shape)])


def odd_result(w: Writer) -> None:
    """States and outputs that are arguments, constants, views or each other."""
    width = w.source.states[0]
    ways = [
        ("h0", (width,)),
        (f"torch.zeros(rows, {width}{FLOATS})", (width,)),
        (f"{w.parameter(width)}.expand(rows, -1)", (width,)),
        (f"{w.buffer(width)}.repeat(rows, 1)", (width,)),
        ("h0[:]", (width,)),
        ("h0.flip(-1).flip(-1)", (width,)),
    ]
    text, shape = w.rng.choice(ways)
    w.new(text, shape)
    if w.rng.random() < 0.3:
        w.new("torch.arange(rows)", (), INT)
    if w.rng.random() < 0.3:
        w.new("(x0 > 0)", (w.source.inputs[0],), BOOL)


TRICKS: dict[Word, int] = {
    in_place: 4, in_place_operators: 2, written_part: 4, aliased: 3, changed_argument: 1,
    out_argument: 1, data: 3, without_gradient: 4, no_grad_function: 1, hook: 3, hook_of_weight: 1,
    hook_of_module: 2, custom_function: 3, counter: 3, global_counter: 3, attribute: 3, mode: 4,
    branch: 4, through_numpy: 1, buffer_of_steps: 3, weight_of_steps: 2, of_batch: 6, batch_norm: 1,
    cast: 4, hidden_nan: 5, masked_softmax: 1, inner_gradient: 2, choice_by_value: 3,
    python_random: 2, shared_draw: 4, constant: 4, unknown: 2, control: 3, odd_result: 3,
}  # fmt: skip
"""How often each is used."""
