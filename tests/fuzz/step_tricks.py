"""What a graph of operations does not show, or what cannot be compiled: words of random steps.

Longer than 350 lines, because it is a collection. step_source.py says how its blocks are read.
"""

from __future__ import annotations

from .step_source import BOOL, INT, Value, Writer
from .step_words import Word

# Custom functions, of which only Right has the derivative of what it computes.
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

# Changes in place


def in_place(w: Writer) -> None:
    """Of a new tensor."""
    one = w.pick(dims=None)
    made = w.one_of("{} * 0.8 | {}.clone() | {} + 0.1 | {}.sin()", one)
    block = """{a}.add_(0.5) | {a}.mul_(0.7) | {a}.tanh_() | {a}.sigmoid_() | {a}.clamp_(-1, 1)
        {a}.relu_() | {a}.neg_() | {a}.zero_() | {a}.add_({b}) | {a}.mul_({b}) | {a}.copy_({b})
        {a}.fill_(0.3) | {a}.sub_(1).mul_(2) | {a}.masked_fill_({b} > 0, 0.1)
        {a}.addcmul_({b}, {b}) | {a}.square_() | {a}.lerp_({b}, 0.5) | {a}.div_({b}.abs() + 1)
        F.relu({a}, inplace=True) | F.dropout({a}, 0.3, True, inplace=True) | {a} += {b}
        {a} *= 0.5 | {a} /= 2 | {a} **= 2 | {a} -= {b}.tanh()"""
    w.say(block, made, one)


def written_part(w: Writer) -> None:
    """Columns of a tensor are set, and maybe rows."""
    one, other = w.pick(least=2), w.pick()
    first = w.rng.randint(0, one.width - 1)
    end = w.rng.randint(first + 1, one.width)
    made = w.one_of("{}.clone() | torch.zeros_like({}) | {} + 0.0 | torch.ones_like({})", one)
    block = """{a}[:, {first}:{end}] = {c}[:, :1] | {a}[:, {first}:{end}] += 1.0
        {a}[:, {first}:{end}].mul_(0.5) | {a}[:, {first}:{end}] = 0.25 | {a}[:, {first}] = {c}[:, 0]
        {a}[..., {first}].sigmoid_() | {a}[:, {first}:{end}].copy_({c}[:, -1:].expand(-1, {n}))
        {a}[{b} > 0.5] = 0.0 | {a}.narrow(1, {first}, 1).zero_() | {a}[0] = 0.0
        {a}[:2, {first}] = 1.0 | {a}[:, [{first}]] = {c}[:, :1] | {a}.t()[{first}].add_(1.0)"""
    w.say(block, made, one, other, first=first, end=end, n=end - first)


def aliased(w: Writer) -> None:
    """A view of a new tensor is changed, and the tensor is read; or the other way round."""
    one = w.pick(least=2)
    base = w.one_of("{} * 1.0", one)
    block = """{}.view(rows, -1) | {}[:, 1:] -> w-1 | {}.t().t() | {}[:, ::2] -> (w+1)//2
        {}.detach() | {}[:] | {}.expand(-1, -1)"""
    view = w.one_of(block, base)
    target = w.rng.choice([base, view])
    w.say("{}.mul_(0.5) | {}.add_(1) | {}.tanh_() | {}.zero_()", target)
    w.one_of("{} + {}.sum(-1, keepdim=True)", base)


def changed_argument(w: Writer) -> None:
    """The state or the input itself is changed."""
    arguments = w.values[: len(w.source.states) + len(w.source.inputs)]
    w.say("{}.mul_(0.9) | {}.add_(0.1) | {}.clamp_(-1, 1) | {}.zero_()", w.rng.choice(arguments))


def out_argument(w: Writer) -> None:
    a, b = w.pair()
    made = w.one_of("torch.zeros_like({})", a)
    w.say(r"with torch.no_grad():\n    torch.add({a}, {b}, out={c})", a, b, made)


# Cut derivatives


def data(w: Writer) -> None:
    one = w.pick(dims=None)
    block = r"""{}.data * {} | {}.data.clone() + {}.tanh() | {new} = {} * 1.0\n{new}.data.mul_(0.5)
        {new} = {} * 1.0\n{new}.data = {}.data * 2 | {new} = {} * 1.0\n{new}.data[:] = 0.5"""
    w.one_of(block, one)


def without_gradient(w: Writer) -> None:
    one = w.pick()
    target = w.one_of("{}.sin()", one)
    mode = w.chosen("""torch.no_grad() | torch.set_grad_enabled(False) | torch.inference_mode()
        torch.no_grad(), torch.enable_grad() | torch.autograd.set_grad_enabled(self.training)""")
    block = r"""with {mode}:\n    {new} = torch.sigmoid({m}({a}))
        with {mode}:\n    {new} = {a}.tanh()\n    {b}.mul_(0.5)
        with {mode}:\n    {new} = {a} / {a}.norm(dim=-1, keepdim=True).clamp(min=1.0)
        with {mode}:\n    {new} = {a}\n    {b}.copy_({a}) | with {mode}:\n    {new} = {b}"""
    made = w.one_of(block, one, target, mode=mode, m=w.linear(one.width, one.width))
    w.one_of("{a} * {b}", made, target)


def no_grad_function(w: Writer) -> None:
    one, name = w.pick(), w.name("function")
    w.above(f"@torch.no_grad()\ndef {name}(y):\n    return y.tanh() * 2")
    w.one_of(name + "({}) * {}", one)


def hook(w: Writer) -> None:
    made = w.one_of("{} * 1.0", w.pick())
    function = w.chosen("""lambda g: g * 0.5 | lambda g: g.clamp(-0.01, 0.01)
        lambda g: torch.zeros_like(g) | lambda g: None""")
    w.say(r"if {}.requires_grad:\n    {}.register_hook({f})", made, f=function)
    w.one_of("{}.sin()", made)


def hook_of_weight(w: Writer) -> None:
    one = w.pick()
    p = w.parameter(one.width)
    block = """{p}.register_hook(lambda g: g * 0.5)
        {p}.register_post_accumulate_grad_hook(lambda p: None)"""
    w.setup(block, p=p)
    w.one_of("{} * {p}", one, p=p)


def hook_of_module(w: Writer) -> None:
    one = w.pick()
    m = w.linear(one.width, one.width)
    block = """{m}.register_forward_hook(lambda m, i, o: o * 2)
        {m}.register_full_backward_hook(lambda m, i, o: tuple(g if g is None else g / 2 for g in i))
        {m}.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,))
        {m}.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,))"""
    w.setup(block, m=m)
    w.one_of("{m}({})", one, m=m)


def custom_function(w: Writer) -> None:
    w.above(FUNCTIONS)
    name = w.rng.choice(["Reversed", "Clipped", "Right", "Rounded"])
    w.one_of("{function}.apply({})", w.pick(dims=None), function=name)


def inner_gradient(w: Writer) -> None:
    """Derivatives inside of the step."""
    name = w.name("energy")
    w.above(f"def {name}(y):\n    return (y.sin() * y).sum()")
    block = r"""torch.func.grad({f})({}) | torch.func.vmap(torch.func.grad({f}))({})
        torch.func.jvp({f}, ({},), (torch.ones_like({}),))[1] + {}
        torch.func.vmap(lambda y: y.cumsum(0).tanh())({})
        torch.utils.checkpoint.checkpoint(lambda y: y.sin().exp(), {}, use_reentrant=False)
        y = {}.detach().requires_grad_()\n{new} = torch.autograd.grad({f}(y), y)[0].detach()
        {new} = torch.autograd.grad({f}({}), {}, create_graph=True)[0]"""
    w.one_of(block, w.pick(), f=name)


# State of Python


def counter(w: Writer) -> None:
    """Python state that decides."""
    one, n = w.pick(), f"self.{w.name('n')}"
    w.setup("{n} = 0", n=n)
    w.say("{n} += 1", n=n)
    block = """{} * (1 + 0.1 * {n}) | {} if {n} % {k} else {} * 0.5 | {}.tanh() if {n} > {k} else {}
        {} + float({n} == {k})"""
    w.one_of(block, one, n=n, k=w.rng.choice([2, 3, 4, 7]))


def global_counter(w: Writer) -> None:
    one, name, k = w.pick(), w.name("STATE"), w.rng.choice([2, 5])
    w.above(f"""{name} = 0
def next_{name}(known=[0]):
    global {name}
    {name} += 1
    known[0] += 1
    return {name}
LIST_{name} = []
DICT_{name} = {{'n': 0}}""")
    block = r"""{} + 0.1 * (next_{n}() > {k}) | {new} = {} + 0.1 * len(LIST_{n})\nLIST_{n}.append(0)
        {new} = {} * (2.0 if DICT_{n}['n'] > {k} else 1.0)\nDICT_{n}['n'] += 1
        {} * (next_{n}.__defaults__[0][0] + next_{n}())"""
    w.one_of(block, one, n=name, k=k)


def attribute(w: Writer) -> None:
    """What another step has kept."""
    one, kept = w.pick(), f"self.{w.name('kept')}"
    w.setup("{k} = None", k=kept)
    block = r"""if {k} is None:\n    {k} = {}.detach().mean()\n{new} = {} - {k}
        {new} = {} if {k} is None or len({k}) != rows else {} + 0.5 * {k}\n{k} = {new}.detach()
        {k} = {}\n{new} = {k} * 2
        {k} = [{}.detach()] + ({k} or [])[:2]\n{new} = {} + 0.1 * len({k})
        {k} = {} if {k} is None else {k}\n{new} = {}.sin()
        {new} = {} + 0.5 * (0 if {k} is None else 1)\n{k} = True"""
    w.one_of(block, one, k=kept)


def mode(w: Writer) -> None:
    """What the next call may find changed."""
    w.above("SCALE = 0.7\nclass Config:\n    scale = 0.8")
    lines = ["self.scale = 1.5", "self.options = {'scale': 0.5}", "self.way = torch.tanh"]
    lines += ["self.config = Config()", "Cell.factor = 0.5", "self.parts = [1.0, torch.sin]"]
    w.source.setup += [line for line in lines if line not in w.source.setup]
    block = """{} * 2 if self.training else {} | F.dropout({}, 0.5, self.training)
        {} + 0.5 if self.scale > 1 else {} | {} * self.scale | {} * self.options['scale']
        {} * SCALE | {} * Cell.factor | {} * self.factor | getattr(self, 'way')({})
        {} * self.config.scale | self.parts[1]({}) * self.parts[0]
        {} * getattr(self, 'later', 1.0) | {} * (3.0 if hasattr(self, 'later') else 1.0)"""
    w.one_of(block, w.pick())
    changes = ["cell.scale = 0.5", "cell.options['scale'] = 2.0", "space['SCALE'] = 0.1"]
    changes += ["space['Cell'].factor = 3.0", "cell.way = torch.sin", "cell.config.scale = 0.2"]
    changes += ["space['Config'].scale = 0.3", "cell.train(not cell.training)", "cell.eval()"]
    changes += ["cell.parts[0] = 2.0", "cell.parts[1] = torch.cos", "cell.later = 0.5"]
    w.source.changes += w.rng.sample(changes, 3)


def branch(w: Writer) -> None:
    """Python decides by values; some are rare."""
    block = """{} if {}.sum() > {l} else {} * 0.5 | {} * float({}.mean() > {l})
        {} * {}.mean().item() | {} if bool(({} > {l}).any()) else -{}
        {}[:, [int({}.sum().clamp(0, 0.4))]] + {} | {} + len({}.nonzero())
        {} * 2 if torch.isnan({}).any() else {} | {} if torch.equal({}, {}.abs()) else {}.abs()
        {} * (1 if {}.tolist()[0][0] > {l} else 2) | {} if {}.max() < {l} else {}.clamp(max=1)
        {} + math.tanh({}[0, 0]) | {} if {}.abs().sum() else {} + 1
        torch.cond({}.sum() > {l}, lambda y: y * 2, lambda y: y.sin(), ({},))
        torch.from_numpy({}.detach().numpy() * 2) + {}
        torch.tensor({}.tolist(), dtype=torch.float64) + {}
        torch.as_tensor({}.detach().numpy()).clone() * {}"""
    w.one_of(block, w.pick(), l=w.rng.choice(["0", "0.5", "1e3", "-1e3"]))


def buffer_of_steps(w: Writer) -> None:
    """A buffer that the step changes."""
    one = w.pick()
    b, is_before = w.buffer(one.width), w.rng.random() < 0.5
    if is_before:
        w.one_of("{} * {b}", one, b=b)
    block = r"""{b} = 0.9 * {b} + 0.1 * {}.detach().mean(0) | {b}.copy_({}.detach()[0])
        {b}.mul_(0.9) | {b} += 0.1 | {b} = {b} + 0.1 | with torch.no_grad():\n    {b}.add_(0.1)
        if self.training:\n    {b}.mul_(0.9)"""
    w.say(block, one, b=b)
    if not is_before:
        w.one_of("{} + {b}", one, b=b)


def weight_of_steps(w: Writer) -> None:
    """A weight that the step changes, or computes from others."""
    one = w.pick()
    p, m = w.parameter(one.width), w.linear(one.width, one.width)
    kind = w.rng.choice(["weight_norm", "spectral_norm", "orthogonal"])
    block = r"""{new} = {} * {p}\nwith torch.no_grad():\n    {p}.mul_(0.99)
        {p}.data.clamp_(-0.5, 0.5)\n{new} = {} * {p} | {new} = {} * {p}\n{p}.data = 0.9 * {p}.data
        {m}({}) | {m}({}) | {} @ self.plain_weight.to({}.dtype)"""
    w.setup("nn.utils.parametrizations.{kind}({m})", kind=kind, m=m)
    w.setup("self.plain_weight = torch.randn({n}, {n})", n=one.width)
    w.one_of(block, one, p=p, m=m)


# Rows of the batch


def of_batch(w: Writer) -> None:
    """Mixes rows, or depends on their number."""
    one = w.pick()
    block = """{} - {}.mean(0) | {} - {}.mean(0, keepdim=True) | {} / {}.std(0).clamp(min=0.1)
        {}.cumsum(0) | {}.roll(1, 0) | {}.flip(0) | F.softmax({}, 0) | {} * {}.shape[0]
        {} / len({}) | {} + {}.sum() | {} - {}.max() | {}[torch.arange({}.shape[0] - 1, -1, -1)]
        {} + {}[0] | {} + {}[:1] | {} * {}[-1:].detach() | {}.sort(0).values | ({} @ {}.t()) @ {}
        {} + torch.arange({}.shape[0])[:, None] * 0.1 | F.batch_norm({}, None, None, training=True)
        {m}({}) | {} / {}.norm() | {}.view(-1).view({}.shape)
        {} * torch.ones({}.shape[0], 1, dtype={}.dtype) | F.normalize({}, dim=0)
        {} + torch.linspace(0, 1, rows, dtype={}.dtype).unsqueeze(-1)
        {}.reshape({}.shape[1], -1).reshape({}.shape) | {} * (2 if rows == 3 else 1)
        torch.cat([{}[1:], {}[:1]]) | {}.t().reshape({}.shape)
        torch.eye(rows, dtype={}.dtype) @ {} | torch.cat([{}, {}])[:rows] | torch.cat([{}, {}])[::2]
        {}.repeat(2, 1)[rows:] | torch.stack([row * 2 for row in {}])
        torch.stack([{}[i] for i in range(rows)]) | {}.expand(2, -1, -1)[1]
        {}.view(1, -1).view(-1, {w})
        torch.where(torch.arange(rows)[:, None] == 0, {}, {} * 0.5)"""
    w.one_of(block, one, m=w.module(f"nn.BatchNorm1d({one.width})"))


def shared_draw(w: Writer) -> None:
    """Numbers for all rows, or drawn in one shape and read in another."""
    block = """{} + torch.randn(1, {w}, dtype={}.dtype) | {} * torch.rand({w}, dtype={}.dtype)
        {} + torch.randn((), dtype={}.dtype) | {} + torch.randn({w}, rows, dtype={}.dtype).t()
        {} + torch.randn(rows * {w}, dtype={}.dtype).view(rows, {w})
        {} * torch.rand(rows, 1, dtype={}.dtype)
        {} + torch.randn(rows, 2, {w}, dtype={}.dtype).mean(1)
        {} + torch.randn(rows, {w}, 1, dtype={}.dtype).squeeze(-1)
        {} + torch.randn(2 * rows, {w}, dtype={}.dtype)[:rows]
        {} + torch.randn(2 * rows, {w}, dtype={}.dtype).view(rows, 2, {w})[:, 1]
        {} + torch.randn(rows, dtype={}.dtype).unsqueeze(-1) | {} + torch.randn_like({})[:, :1]
        {} + torch.randn_like({}, dtype=torch.float32) | {} + torch.randn({}.shape)
        (lambda e: {} * e + e.flip(-1))(torch.randn_like({})) | {} + torch.randn_like({}).cumsum(-1)
        F.dropout2d({}.unsqueeze(-1).unsqueeze(-1), 0.5, True).flatten(1)
        F.dropout1d({}.unsqueeze(-1), 0.4, True).squeeze(-1)
        {} + torch.randn(3, {w}, dtype={}.dtype).sum(0)
        torch.stack([row + torch.randn_like(row) for row in {}]) | {} + torch.randn_like({}.t()).t()
        {} * (torch.rand(rows, dtype={}.dtype) > 0.5)[:, None]"""
    w.one_of(block, w.pick(least=2))


def python_random(w: Writer) -> None:
    """Numbers that nobody can draw again."""
    block = """{} * random.random() | {} + random.gauss(0, 1)
        {} * torch.randint(0, 3, {}.shape).double() | {}[:, torch.randperm({w})]
        {} + torch.randint_like({}, 3) | {} * (2 if random.random() > 0.5 else 1)
        {} + torch.empty_like({}).cauchy_().clamp(-1, 1) | {} * torch.poisson({}.abs())
        F.feature_alpha_dropout({}, 0.5, True) | torch.empty_like({}).geometric_(0.5) * {}
        {} + torch.empty_like({}).log_normal_().clamp(max=2)
        D.Beta({}.abs() + 1, 1.0).rsample() + {}
        {} + torch.binomial(torch.full_like({}, 5), torch.full_like({}, 0.5))
        F.rrelu({}, training=True) | {} * torch.randint(3, ({w},)).tolist()[0]"""
    w.one_of(block, w.pick())


# Numbers


def cast(w: Writer) -> None:
    block = """{}.half().double() | {}.bfloat16().to({}.dtype) | {}.to(torch.float32).exp().double()
        (10 * {}).int().double() | {}.to(torch.int64).to({}) | {}.bool().double() | {}.type_as({})
        {} + torch.ones({w}) | {} * torch.tensor(0.1)
        ({} + torch.tensor(1.0, dtype=torch.float32)).double() | {}.type(torch.float64)
        torch.view_as_real(torch.complex({}, {}))[..., 0] | torch.complex({}, {}).abs()
        ({}.float() @ torch.ones({w}, 1)).double() + {} | {} + {}.new_tensor(0.3) | {}.to({}.device)
        {} * torch.finfo({}.dtype).eps ** 0.1 | torch.polar({}.abs(), {}).real
        {} * torch.get_default_dtype().itemsize"""
    w.one_of(block, w.pick())


def hidden_nan(w: Writer) -> None:
    """Not finite where it is not taken, or in derivatives, or where numbers are equal."""
    block = """torch.where({} > 0, {}.sqrt(), 0.0)
        torch.where({} > 0, {}, 1.0).log() + torch.where({} > 0, {}.log(), 0.0).detach()
        torch.where({} != 0, {} / {}, 1.0) | torch.where({}.abs() > 1e-6, {}.sin() / {}, 1.0)
        torch.nan_to_num({}.log()) | torch.nan_to_num({} / {}.relu())
        {}.masked_fill({} > 9, -float('inf')).exp() | {}.relu().sqrt() | {}.abs().sqrt()
        {}.relu().pow(0.5)
        torch.maximum({}, torch.full_like({}, float('nan'))).nan_to_num(0.5) + {}
        torch.where(torch.isinf(1 / {}), {}, {} * 2) | {} * (0 * {}).exp()
        torch.clamp({} / 0.0, -1, 1) | {}.clamp(min=0).log().clamp(min=-5)
        torch.xlogy({}.relu(), {}.relu()) | torch.fmax({}, {}.log())
        torch.where({} < 1e30, {}, {}.exp().exp().exp()) | {}.sign() * {}.abs().pow(1 / 3)
        torch.atan2({}, {}) | torch.hypot({}, {}) | torch.maximum({}, {}) | {}.abs() + {}.relu()
        {}.abs().log1p() * {}.sign() | {} ** 2 / {}.abs().clamp(min=1e-12)
        torch.minimum({}, {}.abs()) | {}.clamp(0, 0) | {}.clamp(1, -1)
        ({} * 1e200 * 1e200).clamp(-1, 1) | torch.log_softmax({}.unsqueeze(-1), -1).squeeze(-1)
        torch.logaddexp({}, {} - float('inf')) | {} % 1.0 | torch.floor({}) + {}
        torch.round({}) + torch.round(-{}) | {} / {}.detach().abs().clamp(min=1e-30)"""
    w.one_of(block, w.pick(dims=None))


def hidden_nan_of_rows(w: Writer) -> None:
    """The same in sums over rows, of equal numbers, of zeros, and of nothing."""
    block = """F.softmax({}.masked_fill({} > 0.5, float('-inf')), -1).nan_to_num()
        {} / {}.norm(dim=-1, keepdim=True) | F.normalize({}, dim=-1) | {} * {}.std(-1, keepdim=True)
        ({} - {}.mean(-1, keepdim=True)) / {}.var(-1, keepdim=True).sqrt().clamp(min=1e-3)
        {} * {}.norm(dim=-1, keepdim=True) | {} - {}.amax(-1, keepdim=True)
        {} * {}.max(-1, keepdim=True).values | {} + F.one_hot({}.argmax(-1), {w})
        {} * {}.prod(-1, keepdim=True)
        torch.logsumexp({}.masked_fill({} < 9, float('-inf')), -1, keepdim=True).nan_to_num() + {}
        F.layer_norm({}, ({w},), eps=0.0).nan_to_num()
        F.cosine_similarity({}, {}, dim=-1).unsqueeze(-1) * {}
        {} + {}.sum(-1, keepdim=True).sign() | {} * ({} == {}.amax(-1, keepdim=True))
        {} / {}.sum(-1, keepdim=True) | F.pairwise_distance({}, {}).unsqueeze(-1) + {}
        {} * torch.linalg.vector_norm({}, ord=float('inf'), dim=-1, keepdim=True)
        {} * {}.norm(p=1, dim=-1, keepdim=True) | {} + {}[:, :0].sum(-1, keepdim=True)"""
    w.one_of(block, w.pick(least=2))


def choice_by_value(w: Writer) -> None:
    block = """{}.topk(1, -1).values.expand_as({}) | {}.gather(1, {}.argsort(-1))
        {}[{} > 0].sum() + {} | torch.masked_select({}, {} > 0).sum() * {}
        {}.sort(-1, descending=True)[0] | {}.index_select(1, {}[0].argsort())
        torch.zeros_like({}).scatter(1, {}.argmax(-1, keepdim=True), 1.0) + {}
        {}.clone().masked_scatter({} > 0, {}.sin())
        torch.bucketize({}.detach(), torch.tensor([-0.5, 0.5], dtype={}.dtype)).double()
        torch.searchsorted({}.detach().sort(-1).values, {}.detach()).double()
        {}.unique().sum() + {} | {}.index_add(0, torch.arange(rows), {})
        {}.put(torch.tensor([0]), {}[0, :1]) | {}.histc(4).sum() + {}"""
    w.one_of(block, w.pick(least=2))


def constant(w: Writer) -> None:
    """Tensors that the step makes, or that it finds."""
    one = w.pick()
    plain, table = f"self.{w.name('plain')}", f"TABLE{one.width}"
    w.above(f"{table} = torch.linspace(-1, 1, {one.width}, dtype=torch.float64)")
    w.setup("{plain} = torch.randn({n}, dtype=torch.float64)", plain=plain, n=one.width)
    block = """{} * {table} | {} * {plain} | {} * {plain} | {} + torch.arange({w})
        {} * torch.linspace(0, 1, {w}, dtype=torch.float64)
        {} + torch.eye({w}, dtype=torch.float64)[0] | {} @ torch.eye({w}, dtype=torch.float64)
        {} @ torch.hann_window({w}, dtype=torch.float64).diag()
        {} @ torch.ones({w}, {w}, dtype=torch.float64).triu() | {} + torch.tensor(0.5)
        {} * torch.pi"""
    w.one_of(block, one, plain=plain, table=table)
    changes = [f"{plain.replace('self', 'cell')}.mul_(2)", f"space['{table}'].mul_(0.5)"]
    changes.append(f"{plain.replace('self', 'cell')} = torch.ones({one.width}).double()")
    w.source.changes.append(w.rng.choice(changes))


def unknown(w: Writer) -> None:
    """Operations that are no product, and work on more than a number."""
    block = """F.conv1d({}.unsqueeze(1), torch.ones(1, 1, 3).double(), padding=1).squeeze(1)
        torch.fft.fft({}).real | {} @ torch.linalg.inv(torch.eye({w}, dtype={}.dtype) * 2)
        F.avg_pool1d({}.unsqueeze(1), 3, 1, 1).squeeze(1)
        torch.matrix_exp(0.1 * {}.unsqueeze(-1) * {}.unsqueeze(-2)).sum(-1)
        F.scaled_dot_product_attention({}[:, None], {}[:, None], {}[:, None])[:, 0]
        torch.cdist({}[:, None], {}[:, None]).flatten(1) + {}
        F.max_pool1d({}.unsqueeze(1), 3, 1, 1).squeeze(1)
        F.interpolate({}.unsqueeze(1), size={w}, mode='linear').squeeze(1)
        torch.cross({}[:, :3], {}[:, :3].sin(), dim=-1).sum(-1, keepdim=True) + {}
        torch.trapz({}, dim=-1)[:, None] + {}
        {} + torch.kron({}[:, :1].contiguous(), torch.ones(1, {w}, dtype={}.dtype))
        F.local_response_norm({}[:, :, None], 2).squeeze(-1)"""
    w.one_of(block, w.pick(least=3))


def control(w: Writer) -> None:
    """Loops, functions and errors of Python."""
    block = r"""{new} = {}\nfor i in range(3):\n    {new} = {new} * 0.5 + i
        try:\n    {new} = {} @ torch.ones(99, 1)\nexcept RuntimeError:\n    {new} = {} * 2
        functools.reduce(lambda a, b: a + b, {}.unbind(-1)).unsqueeze(-1) + {}
        sum(({} * k for k in (0.1, 0.2)), {})
        with torch.autocast('cpu', enabled=False):\n    {new} = {}.sin()
        assert {}.dim() == 2\n{new} = {}.cos() | {'a': {}}['a'].tanh()
        with torch.random.fork_rng():\n    {new} = {} + torch.randn_like({})
        with torch.autocast('cpu', dtype=torch.bfloat16):\n    {new} = {}.sin()
        {} if torch.jit.is_tracing() or torch.compiler.is_compiling() else {} * 2
        {} * (2 if {}.requires_grad else 2)
        {}.cos() if isinstance({}, torch.Tensor) and type({}) is torch.Tensor else {}"""
    w.one_of(block, w.pick())


def odd_result(w: Writer) -> None:
    """States and outputs that are arguments, constants, views or each other."""
    n = w.source.states[0]
    block = """h0 | torch.zeros(rows, {n}, dtype=torch.float64) | {p}.expand(rows, -1)
        {b}.repeat(rows, 1) | h0[:] | h0.flip(-1).flip(-1)
        {p} * torch.ones(rows, 1, dtype=torch.float64)"""
    w.one_of(block, Value("h0", (n,)), n=n, p=w.parameter(n), b=w.buffer(n))
    if w.rng.random() < 0.1:
        w.new("torch.arange(rows)", (), INT)
    if w.rng.random() < 0.1:
        w.new("x0 > 0", (w.source.inputs[0],), BOOL)


TRICKS: dict[Word, int] = {
    in_place: 5, written_part: 4, aliased: 3, changed_argument: 1, out_argument: 1, data: 3,
    without_gradient: 4, no_grad_function: 1, hook: 3, hook_of_weight: 1, hook_of_module: 2,
    custom_function: 3, inner_gradient: 2, counter: 2, global_counter: 2, attribute: 3, mode: 4,
    branch: 3, buffer_of_steps: 2, weight_of_steps: 2, of_batch: 5, shared_draw: 4,
    python_random: 2, cast: 3, hidden_nan: 5, hidden_nan_of_rows: 4, choice_by_value: 2,
    constant: 4, unknown: 2, control: 3, odd_result: 3,
}  # fmt: skip
"""How often each is used."""
