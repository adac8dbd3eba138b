"""The words of random steps: what people write in cells. Each is a function that writes a line.

Longer than 350 lines, because it is a collection. step_source.py says how its blocks are read.
"""

from __future__ import annotations

from collections.abc import Callable

from .step_source import BOOL, FLOAT, INT, Value, Writer

Word = Callable[[Writer], None]

# Numbers are kept where functions and their derivatives are finite.
UNARY = """
    torch.sigmoid({}) torch.tanh({}) {}.sigmoid() {}.tanh() F.relu({}) torch.relu({}) {}.abs() -{}
    {}.neg() torch.exp({}.clamp(max=2)) torch.exp(-{}.abs()) torch.log({}.abs()+0.1)
    torch.log1p({}.abs()) torch.expm1({}.clamp(-3,2)) torch.sqrt({}.abs()+0.1)
    {}.square().add(0.2).rsqrt() torch.reciprocal({}.abs()+0.5) 1/(1+{}**2) {}**2 {}**3 {}.pow(2)
    ({}.abs()+0.1)**1.5 {}.square() torch.sin({}) torch.cos({}) torch.tan(0.3*{}.tanh())
    torch.atan({}) torch.sinh({}.clamp(-2,2)) torch.cosh({}.clamp(-2,2)) torch.asinh({})
    torch.atanh(0.9*{}.tanh()) torch.acosh({}.abs()+1.1) torch.asin(0.9*{}.tanh())
    torch.acos(0.9*{}.tanh()) torch.erf({}) torch.erfc({}) F.softplus({}) F.silu({}) F.gelu({})
    F.softplus({},beta=2.0,threshold=1.0) F.gelu({},approximate="tanh") F.elu({})
    F.elu({},alpha=0.7) F.selu({}) F.celu({},alpha=1.3) F.leaky_relu({},0.2) F.mish({})
    F.hardtanh({}) F.relu6({})
    F.hardtanh({},-0.5,0.7) F.hardsigmoid({}) F.hardswish({}) F.logsigmoid({}) F.softsign({})
    F.tanhshrink({}) F.softshrink({},0.3) F.hardshrink({},0.3) F.threshold({},0.1,-0.5)
    torch.exp2({}.tanh()) torch.log2({}.abs()+0.1) torch.log10({}.abs()+0.1) torch.nan_to_num({})
    {}.clamp(-0.5,0.8) torch.clamp({},min=-0.3) {}.clamp_max(0.4) {}.clip(-1,1) torch.sign({})*{}
    torch.floor(3*{}) {}.ceil() torch.round(2*{}) {}.trunc() {}.frac() {}.relu().sqrt().add(1)
    torch.logit(0.8*{}.sigmoid()+0.1) {}.positive() {}*1.5 {}/3 {}+0.25 2-{} {}-1 1.0-{} {}.mul(0.5)
    {}.sub(0.1) {}.true_divide(2) {}.exp().log() {}.sgn() torch.sinc({}) F.rrelu({},training=False)
    torch.special.expit({}) torch.special.erf({}) torch.special.log_ndtr({})
    torch.special.i0({}.tanh()) torch.lgamma({}.abs()+1) torch.digamma({}.abs()+1)
    torch.deg2rad({}*30) torch.erfinv(0.7*{}.tanh()) {}.abs().pow(0.5).add({}) {}.float().double()
    torch.heaviside({},torch.zeros((),dtype=torch.float64)) {}.clone() {}.contiguous()
"""

BINARY = """
    {a}+{b} {a}-{b} {a}*{b} {a}/({b}.abs()+0.5) torch.maximum({a},{b}) torch.minimum({a},{b})
    torch.fmax({a},{b}) torch.fmin({a},{b}) torch.max({a},{b}) torch.where({a}>{b},{a},{b})
    torch.where({a}>0,{b},-{b}) torch.lerp({a},{b},0.3) torch.lerp({a},{b},torch.sigmoid({a}))
    torch.addcmul({a},{a},{b},value=0.5) torch.addcdiv({a},{b},{b}**2+1) {a}*torch.sigmoid({b})
    torch.atan2({a},{b}.abs()+0.5) torch.hypot({a},{b}.abs()+0.5) ({a}.abs()+0.5).pow({b}.tanh())
    torch.add({a},{b},alpha=0.5) torch.sub({a},{b},alpha=2) {a}.mul({b}) {a}.div({b}**2+1)
    torch.rsub({a},{b}) {a}.lerp({b},0.6) torch.remainder({a},{b}.abs()+0.5)
    torch.fmod({a},{b}.abs()+0.5) torch.xlogy({a},{b}.abs()+0.5) torch.copysign({a},{b})
    torch.logaddexp({a},{b}) ({a}>{b})*{a} ({a}<={b}).to({a}.dtype)*{b} ({a}<{b}).double()*{a}
    {a}.masked_fill({b}>0.5,0.0) {a}.where({b}>0,{b}) torch.clamp({a},max=0.5)*{b}
    torch.clamp({a},{b}-1,{b}+1) {a}-{a}.detach()+{b} F.smooth_l1_loss({a},{b},reduction="none")
    F.mse_loss({a},{b},reduction="none") (1-torch.sigmoid({a}))*{b}+torch.sigmoid({a})*{a}
    {a}.float().double()+{b} torch.square({a}-{b}) F.huber_loss({a},{b},reduction="none")
    torch.div({a},{b}.abs()+1,rounding_mode="floor") torch.logaddexp2({a},{b})
    torch.nextafter({a},{b})
    F.binary_cross_entropy_with_logits({a},torch.sigmoid({b}),reduction="none")
"""

# From a row of numbers to one.
ROW_WISE = """
    F.softmax({},-1) F.log_softmax({},-1) {}.softmax(dim=-1) F.softmin({},-1) F.normalize({},dim=-1)
    F.normalize({},p=1,dim=-1) F.layer_norm({},({w},)) {}-{}.mean(-1,keepdim=True)
    {}/({}.norm(dim=-1,keepdim=True)+1) {}-torch.logsumexp({},-1,keepdim=True)
    {}*{}.sum(-1,keepdim=True) {}/{}.abs().amax(-1,keepdim=True).add(0.5) F.rms_norm({},({w},))
    F.rms_norm({},({w},),None,1e-3) {}*torch.rsqrt({}.square().mean(-1,keepdim=True)+1e-5)
    {}.cumsum(-1) torch.softmax({}/0.5,-1)*{} {}.sort(-1).values {}.cumprod(-1)
    {}.flip(-1).cumsum(-1).flip(-1) torch.cummax({},-1).values {}.logcumsumexp(-1)
"""
REDUCING = """
    {}.sum(-1) {}.mean(-1) {}.amax(-1) {}.amin(-1) {}.max(-1).values {}.min(-1)[0] {}.norm(dim=-1)
    torch.logsumexp({},-1) {}.square().sum(-1).add(0.1).sqrt() {}.prod(-1) {}.abs().sum(dim=-1)
    torch.linalg.vector_norm({},dim=-1) {}.median(-1).values {}.nansum(-1) {}.aminmax(dim=-1).max
    torch.einsum("...i->...",{}) (torch.softmax({},-1)*{}).sum(-1) torch.trapezoid({},dim=-1)
    torch.linalg.norm({},dim=-1,ord=1) {}.var(-1) {}.std(-1) {}.var(-1,unbiased=False)
    {}.std(dim=-1,correction=0) torch.var_mean({},-1)[0] torch.std_mean({},-1)[1]
"""


def unary(w: Writer) -> None:
    w.one_of(w.rng.choice(UNARY.split()), w.pick(dims=None))


def binary(w: Writer) -> None:
    w.one_of(w.rng.choice(BINARY.split()), *w.pair())


def with_vector(w: Writer) -> None:
    one = w.pick()
    block = """{} * {v} | {} + {v} | {} - {v} | {} / ({v}.abs() + 0.5) | torch.lerp({}, {v}, 0.3)
        torch.where({} > {v}, {}, {v}) | torch.maximum({}, {v}) | {v} * torch.tanh({})
        torch.addcmul({v}, {}, {v}) | torch.exp(-F.softplus({v})) * {} | F.prelu({}, {v}.view(-1))
        torch.sigmoid({v}) * {} + (1 - torch.sigmoid({v})) * {}.square() | {}.mul({v}).add({v})"""
    w.one_of(block, one, v=w.vector(one.width))


def with_scalar(w: Writer) -> None:
    block = """{} * {p} | {} + {p} | {p} - {} | {} / ({p} ** 2 + 0.5) | torch.tanh({} * {p}.exp())
        torch.where({} > {p}, {}, {p}) | F.prelu({}, {p}.view(1)) | {}.clamp(min=-1) * {p}.abs()"""
    w.one_of(block, w.pick(dims=None), p=w.parameter())


def with_row_number(w: Writer) -> None:
    """A number for each row, read by all columns."""
    block = """{a} * {b}{wide} | {a} + {b}{wide} | {a} / ({b}.abs() + 1){wide}
        torch.maximum({a}, {b}{wide})"""
    wide = w.chosen(".unsqueeze(-1) | .unsqueeze(1) | .view(-1, 1) | [:, None] | [..., None]")
    w.one_of(block, w.pick(), w.pick(dims=0), wide=wide)


def linear(w: Writer) -> None:
    one, n = w.pick(), w.rng.randint(1, 9)
    if w.rng.random() < 0.4:
        w.one_of("{m}({})", one, shape=(n,), m=w.linear(one.width, n))
        return
    block = """{} @ {m} | torch.mm({}, {m}) | torch.matmul({}, {m}) | torch.addmm({v}, {}, {m})
        F.linear({}, ({m}).t(), {v}.view(-1)) | F.linear({}, ({m}).mT) | {}.mm({m}) + {v}
        torch.einsum('bi,ij->bj', {}, {m}) | torch.einsum('...i,ij->...j', {}, {m})
        torch.addmm({v}, {}, {m}, beta=0.5, alpha=2.0) | ({m}.t() @ {}.t()).t()
        torch.tensordot({}, {m}, 1) | ({}.unsqueeze(1) @ {m}).squeeze(1)"""
    w.one_of(block, one, shape=(n,), m=w.matrix(one.width, n), v=w.vector(n))


def linear_of_several(w: Writer) -> None:
    parts = [w.pick() for _ in range(w.rng.randint(2, 3))]
    names, n = ", ".join(p.name for p in parts), w.rng.randint(1, 6)
    m = w.linear(sum(p.width for p in parts), n)
    block = f"{m}(torch.cat([{names}], -1)) | {m}(torch.cat(({names}), dim=1))"
    w.one_of(block, *parts, shape=(n,))


def gates(w: Writer) -> None:
    """A Linear, in parts that mix."""
    one, count, width = w.pick(), w.rng.randint(2, 4), w.rng.randint(1, 5)
    made = [Value(w.name("g"), (width,)) for _ in range(count)]
    names, m = ", ".join(g.name for g in made), w.linear(one.width, count * width)
    cut = w.chosen(f"chunk({count}, -1) | split({width}, 1) | tensor_split({count}, 1)")
    w.do(f"{names} = {m}({one.name}).{cut}", made)
    w.one_of("torch.sigmoid({a}) * torch.tanh({b})", *made[:2])


def bilinear(w: Writer) -> None:
    """Products of two activations."""
    a, b = w.pick(), w.pick()
    block = """(({a} @ {m}) * {b}).sum(-1) -> row | torch.einsum('bi,bj->bij', {a}, {b}) -> w,v
        {a}[:, :, None] * {b}[:, None] -> w,v
        torch.bmm({a}[:, None], {a}[:, :, None]).flatten(1) -> 1 | {z}({a}, {b}) -> 3"""
    z = w.module(f"nn.Bilinear({a.width}, {b.width}, 3)")
    w.one_of(block, a, b, m=w.matrix(a.width, b.width), v=b.width, z=z)


def block_product(w: Writer) -> None:
    """A product of each group with a matrix of its own, or with one for all."""
    one, k = w.pick(dims=2), w.rng.randint(1, 3)
    groups, width = one.shape
    block = """torch.bmm({}.transpose(0, 1), {p}).transpose(0, 1)
        torch.einsum('bgi,gij->bgj', {}, {p}) | {} @ {s} | ({}.unsqueeze(-2) @ {p}).squeeze(-2)
        F.linear({}, {s}.t())"""
    p, s = w.parameter(groups, width, k), w.parameter(width, k)
    w.one_of(block, one, shape=(groups, k), p=p, s=s)


def norm_module(w: Writer) -> None:
    one = w.pick(least=2)
    groups, _ = w.groups_of(one)
    block = """nn.LayerNorm({w}) | nn.LayerNorm({w}, eps=1e-3, bias=False)
        nn.RMSNorm({w}, eps=1e-4) | nn.LayerNorm({w}, elementwise_affine=False)"""
    if one.width // groups > 1:
        block += " | nn.GroupNorm({g}, {w})"
    kind = w.filled(w.chosen(block), w=one.width, g=groups)
    w.one_of("{m}({})", one, m=w.module(kind))


def row_wise(w: Writer) -> None:
    w.one_of(w.rng.choice(ROW_WISE.split()), w.pick(dims=w.rng.choice([1, 1, 1, 2])))


def reducing(w: Writer) -> None:
    one = w.pick(dims=w.rng.choice([1, 1, 2]), least=2)
    w.one_of(w.rng.choice(REDUCING.split()), one, shape=one.shape[:-1])


def activation_module(w: Writer) -> None:
    one = w.pick()
    block = """nn.Tanh() | nn.ReLU(inplace=False) | nn.ELU() | nn.SiLU() | nn.GELU() | nn.Softplus()
        nn.PReLU({w}) | nn.PReLU() | nn.Hardtanh() | nn.Softmax(-1) | nn.Identity()
        nn.Sequential(nn.Linear({w}, 4), nn.ReLU(), nn.Linear(4, {w}))"""
    w.one_of("{m}({})", one, m=w.module(w.filled(w.chosen(block), w=one.width)))


def torch_cell(w: Writer) -> None:
    x, h = w.pick(), w.pick()
    kind = w.rng.choice(["GRUCell", "RNNCell", "LSTMCell"])
    m = w.module(f"nn.{kind}({x.width}, {h.width})")
    if kind == "LSTMCell":
        c = w.pick(width=h.width)
        made = [Value(w.name("v"), h.shape), Value(w.name("v"), h.shape)]
        w.do(f"{made[0].name}, {made[1].name} = {m}({x.name}, ({h.name}, {c.name}))", made)
    else:
        w.one_of("{m}({a}, {b})", x, h, shape=h.shape, m=m)


# Moving numbers


def moved(w: Writer) -> None:
    """The same width in another order."""
    one = w.pick()
    order = list(range(one.width))
    w.rng.shuffle(order)
    block = """{}.flip(-1) | {}.roll({shift}, -1) | {}[:, {order}]
        torch.cat([{}[:, {cut}:], {}[:, :{cut}]], -1) | torch.fliplr({})
        {}.index_select(1, torch.tensor({order})) | {}[..., torch.tensor({order})]
        torch.stack({}.unbind(-1)[::-1], -1) | torch.take_along_dim({}, torch.tensor([{order}]), 1)
        {}.gather(1, torch.tensor({order}).expand(rows, -1))"""
    w.one_of(block, one, order=order, shift=w.rng.randint(-3, 3), cut=w.rng.randint(0, one.width))


def part(w: Writer) -> None:
    one = w.pick()
    first = w.rng.randrange(one.width)
    end, step = w.rng.randint(first + 1, one.width), w.rng.randint(1, 3)
    block = """{}[:, {first}:{end}:{step}] -> count | {}.narrow(1, {first}, {length}) -> length
        {}.select(1, {first})[:, None] -> 1 | {}[:, {first}:{end}] -> length
        {}[..., -{end}:] -> end | {}[:, {first}].unsqueeze(-1) -> 1
        {}.split([{until}, {rest}], -1)[0] -> until
        {}.unfold(1, {length}, 1).select(1, 0) -> length"""
    names = {"first": first, "end": end, "step": step, "length": end - first}
    names |= {"count": len(range(first, end, step)), "until": first + 1}
    w.one_of(block, one, rest=one.width - first - 1, **names)


def joined(w: Writer) -> None:
    parts = [w.pick() for _ in range(w.rng.randint(2, 3))]
    names = ", ".join(p.name for p in parts)
    if all(p.shape == parts[0].shape for p in parts) and w.rng.random() < 0.7:
        block = "torch.stack([{names}], 1) | torch.stack([{names}], -1).transpose(1, 2)"
        w.one_of(block, *parts, shape=(len(parts), parts[0].width), names=names)
        return
    block = """torch.cat([{names}], -1) | torch.cat(({names}), dim=1) | torch.hstack([{names}])
        torch.concat([{names}], 1)"""
    w.one_of(block, *parts, shape=(sum(p.width for p in parts),), names=names)


def reshaped(w: Writer) -> None:
    one = w.pick(dims=w.rng.choice([1, 2]))
    if len(one.shape) == 1:
        g, k = w.groups_of(one)
        block = """{}.unflatten(-1, ({g}, {k})) | {}.view(-1, {g}, {k})
            {}.reshape({}.shape[0], {g}, {k}) | torch.stack({}.chunk({g}, 1), 1)
            {}.view(rows, {k}, {g}).transpose(1, 2) | {}.reshape(-1, {k}, {g}).mT"""
        w.one_of(block, one, shape=(g, k), g=g, k=k)
        return
    n = one.shape[0] * one.shape[1]
    block = """{}.flatten(1) | {}.reshape(len({}), -1) | {}.transpose(1, 2).flatten(1)
        {}.permute(0, 2, 1).reshape(-1, {n}) | torch.cat({}.unbind(1), -1)"""
    w.one_of(block, one, shape=(n,), n=n)


def of_groups(w: Writer) -> None:
    """Sums, products and choices within groups."""
    one = w.pick(dims=2)
    g, k = one.shape
    block = """{}.sum(1) -> k | {}.mean(-1) -> g | {}.amax(1) -> k | {}.amax(-1) -> g
        {}.softmax(-1) | {}.softmax(1) | {} - {}.mean(-1, keepdim=True) | F.layer_norm({}, ({k},))
        {}.transpose(1, 2) -> k,g | {}[:, {i}] -> k | {}[..., {j}] -> g | {}.sum((1, 2)) -> row
        {}.flip(1) | {}.logsumexp(-1) -> g | {} * {p} | {} + {q} | {} @ {}.transpose(1, 2) -> g,g
        {}.square().mean((-2, -1)) -> row | {}.max(-1, keepdim=True).values * {}
        {}.prod(1) -> k"""
    names = {"i": w.rng.randrange(g), "j": w.rng.randrange(k), "g": g, "k": k}
    w.one_of(block, one, p=w.parameter(g, 1), q=w.parameter(g, k), **names)


def widened(w: Writer) -> None:
    one, n = w.pick(), w.rng.randint(2, 3)
    if one.width * n > 12:
        return
    block = """{}.repeat(1, {n}) -> w*n | {}.tile(1, {n}) -> w*n
        {}.repeat_interleave({n}, 1) -> w*n | {}[:, None].expand(-1, {n}, -1).flatten(1) -> w*n
        F.pad({}, (1, {n})) -> w+n+1 | F.pad({}, (0, 1), value=0.5) -> w+1
        torch.cat([{}, torch.ones(rows, 1, dtype={}.dtype)], 1) -> w+1
        F.glu(torch.cat([{}, {}], -1)) | {}.diff(dim=-1, prepend={}[:, :1])"""
    w.one_of(block, one, n=n)


# Masks and numbers of other kinds


def mask(w: Writer) -> None:
    a, b = w.pair()
    block = """{a} > {o} | {a} <= {o} | {a} != {o} | {a} >= {o} | torch.lt({a}, {o})
        torch.isnan({a}) | {a}.isfinite() | torch.isclose({a}, {a}.round()) | ({a}.sign() == 1)"""
    w.one_of(block, a, kind=BOOL, o=w.rng.choice([b.name, w.number()]))


def masks(w: Writer) -> None:
    a = w.pick(BOOL, dims=None)
    b = w.rng.choice([v for v in w.values if v.like(a)])
    block = """{a} & {b} | {a}|{b} | ~{a} | {a} ^ {b} | torch.logical_and({a}, {b})
        {a}.logical_not() | {a} == {b} | torch.logical_or({a}, ~{b})"""
    w.one_of(block, a, b, kind=BOOL)


def by_mask(w: Writer) -> None:
    m = w.pick(BOOL, dims=None)
    fitting = [v for v in w.values if v.shape == m.shape and v.kind == FLOAT]
    if not fitting:
        w.one_of("{}.double()", m)
        return
    block = """torch.where({m}, {a}, {b}) | torch.where({m}, {a}, 0.0) | {a} * {m}
        {a}.masked_fill({m}, 0.3) | {m}.to({a}.dtype) | {m}.double() - {a} | {a}.where({m}, {b})
        torch.where({m}, {a}.exp().clamp(max=3), -{b})"""
    w.one_of(block, w.rng.choice(fitting), w.rng.choice(fitting), m=m.name)


def row_mask(w: Writer) -> None:
    block = "({}.sum(-1) > 0) | ({} > 1).any(-1) | ({} < 2).all(-1) | ({}[:, 0] > 0.1)"
    m = w.one_of(block, w.pick(), shape=(), kind=BOOL)
    w.one_of("torch.where({m}.unsqueeze(-1), {}, {} * 0.5)", w.pick(), m=m.name)


def integers(w: Writer) -> None:
    block = "{} + 1 | {} * 2 | {} % 3 | {} // 2 | {}.abs() | {}.clamp(0, 2) | -{}"
    made = w.one_of(block, w.pick(INT, dims=None), kind=INT)
    w.one_of("{}.double() * 0.1 | {} * 0.25 + 0.0 | {}.to(torch.float64) / 4", made)


def chosen(w: Writer) -> None:
    """The place of the largest number."""
    one = w.pick(least=2)
    block = "{}.argmax(-1) | {}.max(-1)[1] | {}.argmin(1)"
    place = w.one_of(block, one, shape=(), kind=INT)
    block = """F.one_hot({b}, {w}).double() | F.one_hot({b}, {w}).double() + {a} - {a}.detach()
        {m}({b}) -> 3 | {p}[{b}] -> 2 | {a}.gather(1, {b}[:, None]) -> 1 | {b}.double() * 0.1 -> row
        torch.zeros_like({a}).scatter_(1, {b}[:, None], 1.0)"""
    m = w.module(f"nn.Embedding({one.width}, 3)")
    w.one_of(block, one, place, m=m, p=w.parameter(one.width, 2))


# Random numbers


def drawn(w: Writer) -> None:
    one = w.pick(dims=w.rng.choice([1, 1, 2]))
    block = """torch.randn_like({}) | torch.rand_like({}) | torch.randn({size}, dtype=torch.float64)
        torch.empty_like({}).normal_() | torch.rand(({size}), dtype=torch.float64)
        torch.empty_like({}).uniform_(-1, 1) | torch.zeros_like({}).exponential_()
        torch.normal(0.0, 1.0, {}.shape, dtype={}.dtype)
        {}.new_empty({}.shape).normal_(0.5, 2.0)"""
    w.one_of(block, one, size=f"rows, {', '.join(map(str, one.shape))}")


def noisy(w: Writer) -> None:
    block = """{a} + F.softplus({b}) * torch.randn_like({b})
        D.Normal({a}, F.softplus({b}) + 0.1).rsample() | D.Normal({a}, {b}.abs() + 0.1).sample()
        torch.normal({a}, {b}.abs() + 0.1) | D.LogNormal({a}.tanh(), 0.5).rsample()
        torch.bernoulli(torch.sigmoid({a})) * {b} | D.Bernoulli(logits={a}).sample() * {b}
        ({a}.sigmoid() > torch.rand_like({a})) * {b} | D.Uniform({a}, {a} + 1).rsample()
        D.Laplace({a}, {b}.abs() + 0.1).rsample() | D.Independent(D.Normal({a}, 1.0), 0).rsample()
        D.Normal({a}, {b}.abs() + 0.5).log_prob({b}).clamp(-2, 2)
        D.Exponential({a}.abs() + 0.5).rsample() | D.Gumbel({a}, 1.0).rsample()
        D.kl_divergence(D.Normal({a}, 1.0), D.Normal({b}, 2.0))
        D.Gamma({a}.abs() + 1, 2.0).rsample() | D.Normal({a}, {b}.exp().clamp(0.1, 2)).entropy()"""
    w.one_of(block, *w.pair())


def dropout(w: Writer) -> None:
    p = w.number(0.1, 0.8)
    block = """F.dropout({}, {p}, self.training) | F.dropout({}, {p}) | torch.dropout({}, {p}, True)
        {m}({}) | F.dropout({}, 0.0) | F.alpha_dropout({}, {p}, self.training)"""
    w.one_of(block, w.pick(dims=None), p=p, m=w.module(f"nn.Dropout({p})"))


def categorical(w: Writer) -> None:
    block = """D.OneHotCategoricalStraightThrough(logits={}).rsample()
        D.OneHotCategorical(logits={}).sample()
        D.OneHotCategoricalStraightThrough(probs=F.softmax({}, -1)).rsample()
        F.gumbel_softmax({}, 0.7) | F.gumbel_softmax({}, tau=1.0, hard=True)
        F.one_hot(D.Categorical(logits={}).sample(), {w}).double()
        D.RelaxedOneHotCategorical(0.7, logits={}).rsample()"""
    w.one_of(block, w.pick(dims=w.rng.choice([1, 2]), least=2))


def stopped(w: Writer) -> None:
    block = """{a}.detach() * {b} | {a} + ({b} - {a}).detach()
        (torch.round({a}) - {a}).detach() + {a} | {a} * {b}.detach().clamp(-1, 1)
        {a} / ({b}.detach().abs() + 1)"""
    w.one_of(block, *w.pair())


WORDS: dict[Word, int] = {
    unary: 12, binary: 10, with_vector: 5, with_scalar: 3, with_row_number: 3, linear: 7,
    linear_of_several: 4, gates: 4, bilinear: 2, block_product: 2, norm_module: 3, row_wise: 4,
    reducing: 4, activation_module: 2, torch_cell: 2, moved: 4, part: 4, joined: 3, reshaped: 4,
    of_groups: 4, widened: 2, mask: 2, masks: 1, by_mask: 2, row_mask: 1, integers: 1, chosen: 2,
    drawn: 2, noisy: 3, dropout: 2, categorical: 2, stopped: 2,
}  # fmt: skip
"""How often each is used."""
