"""The words of random steps: what people write in cells, each a function that writes a line.

Longer than 350 lines, because it is a list.
"""

from __future__ import annotations

from collections.abc import Callable

from .step_source import BOOL, FLOAT, FLOATS, INT, Value, Writer

Word = Callable[[Writer], None]

# {} is a variable; numbers are kept where functions and their derivatives are finite.
UNARY = [
    "torch.sigmoid({})",
    "torch.tanh({})",
    "{}.sigmoid()",
    "{}.tanh()",
    "F.relu({})",
    "torch.relu({})",
    "{}.abs()",
    "-{}",
    "{}.neg()",
    "torch.exp({}.clamp(max=2))",
    "torch.exp(-{}.abs())",
    "torch.log({}.abs()+0.1)",
    "torch.log1p({}.abs())",
    "torch.expm1({}.clamp(-3,2))",
    "torch.sqrt({}.abs()+0.1)",
    "{}.square().add(0.2).rsqrt()",
    "torch.reciprocal({}.abs()+0.5)",
    "1/(1+{}**2)",
    "{}**2",
    "{}**3",
    "{}.pow(2)",
    "({}.abs()+0.1)**1.5",
    "{}.square()",
    "torch.sin({})",
    "torch.cos({})",
    "torch.tan(0.3*{}.tanh())",
    "torch.atan({})",
    "torch.sinh({}.clamp(-2,2))",
    "torch.cosh({}.clamp(-2,2))",
    "torch.asinh({})",
    "torch.atanh(0.9*{}.tanh())",
    "torch.acosh({}.abs()+1.1)",
    "torch.asin(0.9*{}.tanh())",
    "torch.acos(0.9*{}.tanh())",
    "torch.erf({})",
    "torch.erfc({})",
    "F.softplus({})",
    "F.softplus({},beta=2.0,threshold=1.0)",
    "F.silu({})",
    "F.gelu({})",
    'F.gelu({},approximate="tanh")',
    "F.elu({})",
    "F.elu({},alpha=0.7)",
    "F.selu({})",
    "F.celu({},alpha=1.3)",
    "F.leaky_relu({},0.2)",
    "F.mish({})",
    "F.hardtanh({})",
    "F.hardtanh({},-0.5,0.7)",
    "F.hardsigmoid({})",
    "F.hardswish({})",
    "F.relu6({})",
    "F.logsigmoid({})",
    "F.softsign({})",
    "F.tanhshrink({})",
    "F.softshrink({},0.3)",
    "F.hardshrink({},0.3)",
    "F.threshold({},0.1,-0.5)",
    "torch.exp2({}.tanh())",
    "torch.log2({}.abs()+0.1)",
    "torch.log10({}.abs()+0.1)",
    "torch.nan_to_num({})",
    "{}.clamp(-0.5,0.8)",
    "torch.clamp({},min=-0.3)",
    "{}.clamp_max(0.4)",
    "{}.clip(-1,1)",
    "torch.sign({})*{}",
    "torch.floor(3*{})",
    "{}.ceil()",
    "torch.round(2*{})",
    "{}.trunc()",
    "{}.frac()",
    "torch.logit(0.8*{}.sigmoid()+0.1)",
    "{}.relu().sqrt().add(1)",
    "{}.positive()",
    "{}*1.5",
    "{}/3",
    "{}+0.25",
    "2-{}",
    "{}-1",
    "1.0-{}",
    "{}.mul(0.5)",
    "{}.sub(0.1)",
    "{}.true_divide(2)",
    "{}.exp().log()",
    "{}.sgn()",
    "torch.heaviside({},torch.zeros((),dtype=torch.float64))",
    "torch.sinc({})",
    "F.rrelu({},training=False)",
    "torch.special.expit({})",
    "torch.special.erf({})",
    "torch.special.log_ndtr({})",
    "torch.special.i0({}.tanh())",
    "torch.lgamma({}.abs()+1)",
    "torch.digamma({}.abs()+1)",
    "torch.deg2rad({}*30)",
    "torch.erfinv(0.7*{}.tanh())",
    "{}.abs().pow(0.5).add({})",
    "{}.float().double()",
    "{}.clone()",
    "{}.contiguous()",
]

BINARY = [
    "{a}+{b}",
    "{a}-{b}",
    "{a}*{b}",
    "{a}/({b}.abs()+0.5)",
    "torch.maximum({a},{b})",
    "torch.minimum({a},{b})",
    "torch.fmax({a},{b})",
    "torch.fmin({a},{b})",
    "torch.max({a},{b})",
    "torch.where({a}>{b},{a},{b})",
    "torch.where({a}>0,{b},-{b})",
    "torch.lerp({a},{b},0.3)",
    "torch.lerp({a},{b},torch.sigmoid({a}))",
    "torch.addcmul({a},{a},{b},value=0.5)",
    "torch.addcdiv({a},{b},{b}**2+1)",
    "torch.atan2({a},{b}.abs()+0.5)",
    "torch.hypot({a},{b}.abs()+0.5)",
    "({a}.abs()+0.5).pow({b}.tanh())",
    "torch.add({a},{b},alpha=0.5)",
    "torch.sub({a},{b},alpha=2)",
    "{a}.mul({b})",
    "{a}.div({b}**2+1)",
    "torch.rsub({a},{b})",
    "{a}.lerp({b},0.6)",
    "torch.remainder({a},{b}.abs()+0.5)",
    "torch.fmod({a},{b}.abs()+0.5)",
    "torch.xlogy({a},{b}.abs()+0.5)",
    "torch.copysign({a},{b})",
    "torch.logaddexp({a},{b})",
    "({a}>{b})*{a}",
    "({a}<={b}).to({a}.dtype)*{b}",
    "({a}<{b}).double()*{a}",
    "{a}.masked_fill({b}>0.5,0.0)",
    "{a}.where({b}>0,{b})",
    "torch.clamp({a},max=0.5)*{b}",
    "torch.clamp({a},{b}-1,{b}+1)",
    "{a}-{a}.detach()+{b}",
    'F.smooth_l1_loss({a},{b},reduction="none")',
    'F.mse_loss({a},{b},reduction="none")',
    "{a}*torch.sigmoid({b})",
    "(1-torch.sigmoid({a}))*{b}+torch.sigmoid({a})*{a}",
    "{a}.float().double()+{b}",
    "torch.square({a}-{b})",
    'torch.div({a},{b}.abs()+1,rounding_mode="floor")',
    'F.huber_loss({a},{b},reduction="none")',
    "torch.logaddexp2({a},{b})",
    "torch.nextafter({a},{b})",
    'F.binary_cross_entropy_with_logits({a},torch.sigmoid({b}),reduction="none")',
]

# Of numbers in a row; "keepdim" or not. {w}: a width.
ROWWISE = [
    "F.softmax({},-1)",
    "F.log_softmax({},-1)",
    "{}.softmax(dim=1)",
    "F.softmin({},-1)",
    "F.normalize({},dim=-1)",
    "F.normalize({},p=1,dim=1)",
    "F.layer_norm({},({w},))",
    "{}-{}.mean(-1,keepdim=True)",
    "{}/({}.norm(dim=-1,keepdim=True)+1)",
    "{}-torch.logsumexp({},-1,keepdim=True)",
    "{}*{}.sum(1,keepdim=True)",
    "{}/{}.abs().amax(-1,keepdim=True).add(0.5)",
    "F.rms_norm({},({w},))",
    "F.rms_norm({},({w},),None,1e-3)",
    "{}*torch.rsqrt({}.square().mean(-1,keepdim=True)+1e-5)",
    "{}.cumsum(-1)",
    "torch.softmax({}/0.5,-1)*{}",
    "{}.sort(-1).values",
    "{}.cumprod(1)",
    "{}.flip(-1).cumsum(-1).flip(-1)",
    "torch.cummax({},-1).values",
    "{}.logcumsumexp(-1)",
]

REDUCING = [
    "{}.sum(-1)",
    "{}.mean(-1)",
    "{}.amax(-1)",
    "{}.amin(-1)",
    "{}.max(-1).values",
    "{}.min(-1)[0]",
    "torch.logsumexp({},-1)",
    "{}.norm(dim=-1)",
    "{}.square().sum(-1).add(0.1).sqrt()",
    "{}.prod(-1)",
    "torch.linalg.vector_norm({},dim=-1)",
    "{}.abs().sum(dim=-1)",
    "{}.median(-1).values",
    "{}.nansum(-1)",
    'torch.einsum("...i->...",{})',
    "{}.aminmax(dim=-1).max",
    "(torch.softmax({},-1)*{}).sum(-1)",
    "torch.linalg.norm({},dim=-1,ord=1)",
    "torch.trapezoid({},dim=-1)",
]
REDUCING_TWO = [
    "{}.var(-1)",
    "{}.std(-1)",
    "{}.var(-1,unbiased=False)",
    "{}.std(dim=-1,correction=0)",
    "torch.var_mean({},-1)[0]",
    "torch.std_mean({},-1)[1]",
]


def unary(w: Writer) -> None:
    one = w.pick(dims=None)
    w.new(w.rng.choice(UNARY).replace("{}", one.name), one.shape)


def binary(w: Writer) -> None:
    a, b = _pair(w)
    w.new(w.rng.choice(BINARY).replace("{a}", a.name).replace("{b}", b.name), a.shape)


def _pair(w: Writer) -> tuple[Value, Value]:
    a = w.pick(dims=None)
    return a, w.rng.choice([v for v in w.values if v.shape == a.shape and v.kind == FLOAT])


def with_vector(w: Writer) -> None:
    one = w.pick()
    v = w.vector(one.width)
    ways = [
        "{} * {v}",
        "{} + {v}",
        "{} - {v}",
        "{} / ({v}.abs() + 0.5)",
        "torch.lerp({}, {v}, 0.3)",
    ]
    ways += ["torch.where({} > {v}, {}, {v})", "torch.maximum({}, {v})", "{v} * torch.tanh({})"]
    ways += [
        "torch.addcmul({v}, {}, {v})",
        "torch.exp(-F.softplus({v})) * {}",
        "F.prelu({}, {v}.view(-1))",
    ]
    ways += [
        "torch.sigmoid({v}) * {} + (1 - torch.sigmoid({v})) * {}.square()",
        "{}.mul({v}).add({v})",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name).replace("{v}", v), one.shape)


def with_scalar(w: Writer) -> None:
    one, p = w.pick(dims=None), w.parameter()
    ways = [
        "{} * {p}",
        "{} + {p}",
        "{p} - {}",
        "{} / ({p} ** 2 + 0.5)",
        "torch.tanh({} * {p}.exp())",
    ]
    ways += [
        "torch.where({} > {p}, {}, {p})",
        "F.prelu({}, {p}.view(1))",
        "{}.clamp(min=-1) * {p}.abs()",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name).replace("{p}", p), one.shape)


def with_row_number(w: Writer) -> None:
    """A number for each row, read by all columns."""
    one, number = w.pick(), w.pick(dims=0)
    text = w.rng.choice(["{} * {n}", "{} + {n}", "{} / ({n}.abs() + 1)", "torch.maximum({}, {n})"])
    n = w.rng.choice(["unsqueeze(-1)", "unsqueeze(1)", "view(-1, 1)"])
    n = w.rng.choice([f"{number.name}.{n}", f"{number.name}[:, None]", f"{number.name}[..., None]"])
    w.new(text.replace("{}", one.name).replace("{n}", n), one.shape)


def linear(w: Writer) -> None:
    one, width = w.pick(), w.rng.randint(1, 9)
    if w.rng.random() < 0.4:
        w.new(f"{w.linear(one.width, width)}({one.name})", (width,))
        return
    m, b = w.matrix(one.width, width), w.vector(width)
    ways = ["{} @ {m}", "torch.mm({}, {m})", "torch.matmul({}, {m})", "torch.addmm({b}, {}, {m})"]
    ways += ["F.linear({}, ({m}).t(), {b}.view(-1))", "F.linear({}, ({m}).mT)", "{}.mm({m}) + {b}"]
    ways += ["torch.einsum('bi,ij->bj', {}, {m})", "torch.einsum('...i,ij->...j', {}, {m})"]
    ways += ["torch.addmm({b}, {}, {m}, beta=0.5, alpha=2.0)", "({m}.t() @ {}.t()).t()"]
    ways += ["torch.tensordot({}, {m}, 1)", "({}.unsqueeze(1) @ {m}).squeeze(1)"]
    text = w.rng.choice(ways)
    w.new(text.replace("{}", one.name).replace("{m}", m).replace("{b}", b), (width,))


def linear_of_several(w: Writer) -> None:
    parts = [w.pick() for _ in range(w.rng.randint(2, 3))]
    joined = f"torch.cat([{', '.join(p.name for p in parts)}], {w.rng.choice(['-1', '1'])})"
    width, total = w.rng.randint(1, 6), sum(p.width for p in parts)
    w.new(f"{w.linear(total, width)}({joined})", (width,))


def gates(w: Writer) -> None:
    """A Linear, in parts that mix."""
    one, count, width = w.pick(), w.rng.randint(2, 4), w.rng.randint(1, 5)
    names = [w.name("g") for _ in range(count)]
    cut = w.rng.choice([f"chunk({count}, -1)", f"split({width}, 1)", f"tensor_split({count}, 1)"])
    made = [Value(name, (width,)) for name in names]
    text = f"{', '.join(names)} = {w.linear(one.width, count * width)}({one.name}).{cut}"
    w.do(text, made)
    w.new(f"torch.sigmoid({names[0]}) * torch.tanh({names[1]})", (width,))


def bilinear(w: Writer) -> None:
    """Products of two activations."""
    a, b = w.pick(), w.pick()
    ways = [(f"(({a.name} @ {w.matrix(a.width, b.width)}) * {b.name}).sum(-1)", ())]
    outer = f"torch.einsum('bi,bj->bij', {a.name}, {b.name})"
    ways += [
        (outer, (a.width, b.width)),
        (f"{a.name}[:, :, None] * {b.name}[:, None]", (a.width, b.width)),
    ]
    ways += [(f"torch.bmm({a.name}[:, None], {a.name}[:, :, None]).flatten(1)", (1,))]
    if w.rng.random() < 0.3:
        ways += [(f"{w.module(f'nn.Bilinear({a.width}, {b.width}, 3)')}({a.name}, {b.name})", (3,))]
    text, shape = w.rng.choice(ways)
    w.new(text, shape)


def block_product(w: Writer) -> None:
    """A product of each group with a matrix of its own, or with one for all."""
    one, k = w.pick(dims=2), w.rng.randint(1, 3)
    groups, width = one.shape
    p, shared = w.parameter(groups, width, k), w.parameter(width, k)
    ways = [f"torch.bmm({one.name}.transpose(0, 1), {p}).transpose(0, 1)"]
    ways += [f"torch.einsum('bgi,gij->bgj', {one.name}, {p})", f"{one.name} @ {shared}"]
    ways += [f"({one.name}.unsqueeze(-2) @ {p}).squeeze(-2)", f"F.linear({one.name}, {shared}.t())"]
    w.new(w.rng.choice(ways), (groups, k))


def norm_module(w: Writer) -> None:
    one = w.pick(least=2)
    groups, _ = w.groups_of(one)
    kinds = [f"nn.LayerNorm({one.width})", f"nn.LayerNorm({one.width}, eps=1e-3, bias=False)"]
    kinds += [
        f"nn.RMSNorm({one.width}, eps=1e-4)",
        f"nn.LayerNorm({one.width}, elementwise_affine=False)",
    ]
    if one.width // groups > 1:
        kinds.append(f"nn.GroupNorm({groups}, {one.width})")
    w.new(f"{w.module(w.rng.choice(kinds))}({one.name})", one.shape)


def row_wise(w: Writer) -> None:
    one = w.pick(dims=w.rng.choice([1, 1, 1, 2]))
    text = (
        w.rng.choice(ROWWISE)
        .replace("dim=1", "dim=-1")
        .replace("(1,", "(-1,")
        .replace("(1)", "(-1)")
    )
    w.new(text.replace("{}", one.name).replace("{w}", str(one.width)), one.shape)


def reducing(w: Writer) -> None:
    one = w.pick(dims=w.rng.choice([1, 1, 2]), least=2)
    text = w.rng.choice(REDUCING + REDUCING_TWO).replace("{}", one.name)
    w.new(text, one.shape[:-1])


def activation_module(w: Writer) -> None:
    one = w.pick()
    kinds = [
        "nn.Tanh()",
        "nn.ReLU(inplace=False)",
        "nn.ELU()",
        "nn.SiLU()",
        "nn.GELU()",
        "nn.Softplus()",
    ]
    kinds += [
        f"nn.PReLU({one.width})",
        "nn.PReLU()",
        "nn.Hardtanh()",
        "nn.Softmax(-1)",
        "nn.Identity()",
    ]
    kinds += [f"nn.Sequential(nn.Linear({one.width}, 4), nn.ReLU(), nn.Linear(4, {one.width}))"]
    w.new(f"{w.module(w.rng.choice(kinds))}({one.name})", one.shape)


def torch_cell(w: Writer) -> None:
    x, h = w.pick(), w.pick()
    kind = w.rng.choice(["GRUCell", "RNNCell", "LSTMCell"])
    cell = w.module(f"nn.{kind}({x.width}, {h.width})")
    if kind == "LSTMCell":
        c = w.pick(width=h.width)
        made = [Value(w.name("v"), h.shape), Value(w.name("v"), h.shape)]
        w.do(f"{made[0].name}, {made[1].name} = {cell}({x.name}, ({h.name}, {c.name}))", made)
    else:
        w.new(f"{cell}({x.name}, {h.name})", h.shape)


# Moving numbers


def moved(w: Writer) -> None:
    """The same width in another order."""
    one = w.pick()
    order = list(range(one.width))
    w.rng.shuffle(order)
    shift, cut = w.rng.randint(-3, 3), w.rng.randint(0, one.width)
    ways = [f"{one.name}.flip(-1)", f"{one.name}.roll({shift}, -1)", f"{one.name}[:, {order}]"]
    ways += [
        f"torch.cat([{one.name}[:, {cut}:], {one.name}[:, :{cut}]], -1)",
        f"torch.fliplr({one.name})",
    ]
    ways += [
        f"{one.name}.index_select(1, torch.tensor({order}))",
        f"{one.name}[..., torch.tensor({order})]",
    ]
    ways += [
        f"torch.stack({one.name}.unbind(-1)[::-1], -1)",
        f"torch.take_along_dim({one.name}, torch.tensor([{order}]), 1)",
    ]
    ways += [f"{one.name}.gather(1, torch.tensor({order}).expand(rows, -1))"]
    w.new(w.rng.choice(ways), one.shape)


def part(w: Writer) -> None:
    one = w.pick()
    first = w.rng.randrange(one.width)
    end, step = w.rng.randint(first + 1, one.width), w.rng.randint(1, 3)
    count = len(range(first, end, step))
    ways = [
        (f"{one.name}[:, {first}:{end}:{step}]", count),
        (f"{one.name}.narrow(1, {first}, {end - first})", end - first),
    ]
    ways += [
        (f"{one.name}[:, {first}:{end}]", end - first),
        (f"{one.name}.select(1, {first})[:, None]", 1),
    ]
    ways += [(f"{one.name}[..., -{end}:]", end), (f"{one.name}[:, {first}].unsqueeze(-1)", 1)]
    ways += [(f"{one.name}.split([{first + 1}, {one.width - first - 1}], -1)[0]", first + 1)]
    ways += [(f"{one.name}.unfold(1, {end - first}, 1).select(1, 0)", end - first)]
    text, width = w.rng.choice(ways)
    w.new(text, (width,))


def joined(w: Writer) -> None:
    parts = [w.pick() for _ in range(w.rng.randint(2, 3))]
    names = ", ".join(p.name for p in parts)
    if all(p.shape == parts[0].shape for p in parts) and w.rng.random() < 0.7:
        way = w.rng.choice(
            [f"torch.stack([{names}], 1)", f"torch.stack([{names}], -1).transpose(1, 2)"]
        )
        w.new(way, (len(parts), parts[0].width))
        return
    way = w.rng.choice(
        [
            "torch.cat([{}], -1)",
            "torch.cat(({}), dim=1)",
            "torch.hstack([{}])",
            "torch.concat([{}], 1)",
        ]
    )
    w.new(way.format(names), (sum(p.width for p in parts),))


def reshaped(w: Writer) -> None:
    one = w.pick(dims=w.rng.choice([1, 2]))
    if len(one.shape) == 1:
        g, k = w.groups_of(one)
        ways = [f"{one.name}.unflatten(-1, ({g}, {k}))", f"{one.name}.view(-1, {g}, {k})"]
        ways += [
            f"{one.name}.reshape({one.name}.shape[0], {g}, {k})",
            f"torch.stack({one.name}.chunk({g}, 1), 1)",
        ]
        ways += [
            f"{one.name}.view(rows, {k}, {g}).transpose(1, 2)",
            f"{one.name}.reshape(-1, {k}, {g}).mT",
        ]
        w.new(w.rng.choice(ways), (g, k))
        return
    g, k = one.shape
    ways = [
        f"{one.name}.flatten(1)",
        f"{one.name}.reshape(len({one.name}), -1)",
        f"{one.name}.transpose(1, 2).flatten(1)",
    ]
    ways += [
        f"{one.name}.permute(0, 2, 1).reshape(-1, {g * k})",
        f"torch.cat({one.name}.unbind(1), -1)",
    ]
    w.new(w.rng.choice(ways), (g * k,))


def of_groups(w: Writer) -> None:
    """Sums, products and choices within groups."""
    one = w.pick(dims=2)
    g, k = one.shape
    ways: list[tuple[str, tuple[int, ...]]] = [
        (f"{one.name}.sum(1)", (k,)),
        (f"{one.name}.mean(-1)", (g,)),
    ]
    ways += [
        (f"{one.name}.amax(1)", (k,)),
        (f"{one.name}.amax(-1)", (g,)),
        (f"{one.name}.softmax(-1)", (g, k)),
    ]
    ways += [
        (f"{one.name}.softmax(1)", (g, k)),
        (f"{one.name} - {one.name}.mean(-1, keepdim=True)", (g, k)),
    ]
    ways += [(f"F.layer_norm({one.name}, ({k},))", (g, k)), (f"{one.name}.transpose(1, 2)", (k, g))]
    ways += [
        (f"{one.name}[:, {w.rng.randrange(g)}]", (k,)),
        (f"{one.name}[..., {w.rng.randrange(k)}]", (g,)),
    ]
    ways += [
        (f"{one.name}.sum((1, 2))", ()),
        (f"{one.name}.flip(1)", (g, k)),
        (f"{one.name}.logsumexp(-1)", (g,)),
    ]
    ways += [
        (f"{one.name} * {w.parameter(g, 1)}", (g, k)),
        (f"{one.name} + {w.parameter(g, k)}", (g, k)),
    ]
    ways += [
        (f"{one.name} @ {one.name}.transpose(1, 2)", (g, g)),
        (f"{one.name}.square().mean((-2, -1))", ()),
    ]
    ways += [
        (f"{one.name}.max(-1, keepdim=True).values * {one.name}", (g, k)),
        (f"{one.name}.prod(1)", (k,)),
    ]
    text, shape = w.rng.choice(ways)
    w.new(text, shape)


def widened(w: Writer) -> None:
    one, times = w.pick(), w.rng.randint(2, 3)
    if one.width * times > 12:
        return
    ways = [
        (f"{one.name}.repeat(1, {times})", one.width * times),
        (f"{one.name}.tile(1, {times})", one.width * times),
    ]
    ways += [(f"{one.name}.repeat_interleave({times}, 1)", one.width * times)]
    ways += [(f"{one.name}[:, None].expand(-1, {times}, -1).flatten(1)", one.width * times)]
    ways += [
        (f"F.pad({one.name}, (1, {times}))", one.width + 1 + times),
        (f"F.pad({one.name}, (0, 1), value=0.5)", one.width + 1),
    ]
    ways += [(f"torch.cat([{one.name}, torch.ones(rows, 1{FLOATS})], 1)", one.width + 1)]
    ways += [
        (f"F.glu(torch.cat([{one.name}, {one.name}], -1))", one.width),
        (f"{one.name}.diff(dim=-1, prepend={one.name}[:, :1])", one.width),
    ]
    text, width = w.rng.choice(ways)
    w.new(text, (width,))


# Masks and numbers of other kinds


def mask(w: Writer) -> None:
    a, b = _pair(w)
    other = w.rng.choice([b.name, w.number()])
    text = w.rng.choice(
        [
            "{} > {o}",
            "{} <= {o}",
            "{} != {o}",
            "{} >= {o}",
            "torch.lt({}, {o})",
            "torch.isnan({})",
            "{}.isfinite()",
            "torch.isclose({}, {}.round())",
            "({}.sign() == 1)",
        ]
    )
    w.new(text.replace("{}", a.name).replace("{o}", other), a.shape, BOOL)


def masks(w: Writer) -> None:
    a = w.pick(BOOL, dims=None)
    b = w.rng.choice([v for v in w.values if v.shape == a.shape and v.kind == BOOL])
    text = w.rng.choice(
        [
            "{a} & {b}",
            "{a} | {b}",
            "~{a}",
            "{a} ^ {b}",
            "torch.logical_and({a}, {b})",
            "{a}.logical_not()",
            "{a} == {b}",
            "torch.logical_or({a}, ~{b})",
        ]
    )
    w.new(text.replace("{a}", a.name).replace("{b}", b.name), a.shape, BOOL)


def by_mask(w: Writer) -> None:
    m = w.pick(BOOL, dims=None)
    fitting = [v for v in w.values if v.shape == m.shape and v.kind == FLOAT]
    if not fitting:
        w.new(f"{m.name}.double()", m.shape)
        return
    a, b = w.rng.choice(fitting), w.rng.choice(fitting)
    text = w.rng.choice(
        [
            "torch.where({m}, {a}, {b})",
            "torch.where({m}, {a}, 0.0)",
            "{a} * {m}",
            "{a}.masked_fill({m}, 0.3)",
            "{m}.to({a}.dtype)",
            "{m}.double() - {a}",
            "{a}.where({m}, {b})",
            "torch.where({m}, {a}.exp().clamp(max=3), -{b})",
        ]
    )
    w.new(text.replace("{m}", m.name).replace("{a}", a.name).replace("{b}", b.name), m.shape)


def row_mask(w: Writer) -> None:
    one = w.pick()
    text = w.rng.choice(
        ["({}.sum(-1) > 0)", "({} > 1).any(-1)", "({} < 2).all(-1)", "({}[:, 0] > 0.1)"]
    )
    m = w.new(text.replace("{}", one.name), (), BOOL)
    other = w.pick()
    w.new(f"torch.where({m.name}.unsqueeze(-1), {other.name}, {other.name} * 0.5)", other.shape)


def integers(w: Writer) -> None:
    a = w.pick(INT, dims=None)
    text = w.rng.choice(
        ["{} + 1", "{} * 2", "{} % 3", "{} // 2", "{}.abs()", "{}.clamp(0, 2)", "-{}"]
    )
    made = w.new(text.replace("{}", a.name), a.shape, INT)
    w.new(
        w.rng.choice(
            [
                f"{made.name}.double() * 0.1",
                f"{made.name} * 0.25 + 0.0",
                f"{made.name}.to(torch.float64) / 4",
            ]
        ),
        a.shape,
    )


def chosen(w: Writer) -> None:
    """The place of the largest number."""
    one = w.pick(least=2)
    text = w.rng.choice(
        [f"{one.name}.argmax(-1)", f"{one.name}.max(-1)[1]", f"{one.name}.argmin(1)"]
    )
    place = w.new(text, (), INT)
    ways = [(f"F.one_hot({place.name}, {one.width}).double()", one.shape)]
    ways += [
        (
            f"F.one_hot({place.name}, {one.width}).double() + {one.name} - {one.name}.detach()",
            one.shape,
        )
    ]
    ways += [
        (f"{w.module(f'nn.Embedding({one.width}, 3)')}({place.name})", (3,)),
        (f"{w.parameter(one.width, 2)}[{place.name}]", (2,)),
    ]
    ways += [
        (f"{one.name}.gather(1, {place.name}[:, None])", (1,)),
        (f"{place.name}.double() * 0.1", ()),
    ]
    ways += [(f"torch.zeros_like({one.name}).scatter_(1, {place.name}[:, None], 1.0)", one.shape)]
    text, shape = w.rng.choice(ways)
    w.new(text, shape)


# Random numbers


def drawn(w: Writer) -> None:
    one = w.pick(dims=w.rng.choice([1, 1, 2]))
    size = f"rows, {', '.join(map(str, one.shape))}"
    ways = [
        "torch.randn_like({})",
        "torch.rand_like({})",
        f"torch.randn({size}{FLOATS})",
        "torch.empty_like({}).normal_()",
    ]
    ways += [
        f"torch.rand(({size}){FLOATS})",
        "torch.empty_like({}).uniform_(-1, 1)",
        "torch.zeros_like({}).exponential_()",
    ]
    ways += [
        "torch.normal(0.0, 1.0, {}.shape, dtype={}.dtype)",
        "{}.new_empty({}.shape).normal_(0.5, 2.0)",
    ]
    w.new(w.rng.choice(ways).replace("{}", one.name), one.shape)


def noisy(w: Writer) -> None:
    a, b = _pair(w)
    ways = [
        "{a} + F.softplus({b}) * torch.randn_like({b})",
        "D.Normal({a}, F.softplus({b}) + 0.1).rsample()",
    ]
    ways += [
        "D.Normal({a}, {b}.abs() + 0.1).sample()",
        "torch.normal({a}, {b}.abs() + 0.1)",
        "D.LogNormal({a}.tanh(), 0.5).rsample()",
    ]
    ways += [
        "torch.bernoulli(torch.sigmoid({a})) * {b}",
        "D.Bernoulli(logits={a}).sample() * {b}",
        "({a}.sigmoid() > torch.rand_like({a})) * {b}",
    ]
    ways += [
        "D.Uniform({a}, {a} + 1).rsample()",
        "D.Laplace({a}, {b}.abs() + 0.1).rsample()",
        "D.Independent(D.Normal({a}, 1.0), 0).rsample()",
    ]
    ways += [
        "D.Normal({a}, {b}.abs() + 0.5).log_prob({b}).clamp(-2, 2)",
        "D.Exponential({a}.abs() + 0.5).rsample()",
        "D.Gumbel({a}, 1.0).rsample()",
    ]
    ways += [
        "D.kl_divergence(D.Normal({a}, 1.0), D.Normal({b}, 2.0))",
        "D.Gamma({a}.abs() + 1, 2.0).rsample()",
        "D.Normal({a}, {b}.exp().clamp(0.1, 2)).entropy()",
    ]
    w.new(w.rng.choice(ways).replace("{a}", a.name).replace("{b}", b.name), a.shape)


def dropout(w: Writer) -> None:
    one, p = w.pick(dims=None), w.number(0.1, 0.8)
    ways = [
        f"F.dropout({one.name}, {p}, self.training)",
        f"F.dropout({one.name}, {p})",
        f"torch.dropout({one.name}, {p}, True)",
    ]
    ways += [
        f"{w.module(f'nn.Dropout({p})')}({one.name})",
        f"F.dropout({one.name}, 0.0)",
        f"F.alpha_dropout({one.name}, {p}, self.training)",
    ]
    w.new(w.rng.choice(ways), one.shape)


def categorical(w: Writer) -> None:
    one = w.pick(dims=w.rng.choice([1, 2]), least=2)
    ways = [
        "D.OneHotCategoricalStraightThrough(logits={}).rsample()",
        "D.OneHotCategorical(logits={}).sample()",
    ]
    ways += [
        "D.OneHotCategoricalStraightThrough(probs=F.softmax({}, -1)).rsample()",
        "F.gumbel_softmax({}, 0.7)",
    ]
    ways += [
        "F.gumbel_softmax({}, tau=1.0, hard=True)",
        "F.one_hot(D.Categorical(logits={}).sample(), {w}).double()",
    ]
    ways += ["D.RelaxedOneHotCategorical(0.7, logits={}).rsample()"]
    w.new(w.rng.choice(ways).replace("{}", one.name).replace("{w}", str(one.width)), one.shape)


def stopped(w: Writer) -> None:
    a, b = _pair(w)
    ways = [
        "{a}.detach() * {b}",
        "{a} + ({b} - {a}).detach()",
        "(torch.round({a}) - {a}).detach() + {a}",
    ]
    ways += ["{a} * {b}.detach().clamp(-1, 1)", "{a} / ({b}.detach().abs() + 1)"]
    w.new(w.rng.choice(ways).replace("{a}", a.name).replace("{b}", b.name), a.shape)


WORDS: dict[Word, int] = {
    unary: 12, binary: 10, with_vector: 5, with_scalar: 3, with_row_number: 3, linear: 7,
    linear_of_several: 4, gates: 4, bilinear: 2, block_product: 2, norm_module: 3, row_wise: 4,
    reducing: 4, activation_module: 2, torch_cell: 2, moved: 4, part: 4, joined: 3, reshaped: 4,
    of_groups: 4, widened: 2, mask: 2, masks: 1, by_mask: 2, row_mask: 1, integers: 1, chosen: 2,
    drawn: 2, noisy: 3, dropout: 2, categorical: 2, stopped: 2,
}  # fmt: skip
"""How often each is used."""
