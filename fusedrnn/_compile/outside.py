"""What is computed outside of the recurrence: the weights of products, and vectors of stages.

They are functions of weights alone, which torch computes under its autograd. A small graph of
its own says how, so a record can have that without the rest of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .graphs import Operations, from_json, to_json


class Part(NamedTuple):
    """Some columns of a product's weight; as expressions.Part."""

    weight: fx.Node
    member: int | None
    """Of a stack of weights."""
    is_transposed: bool
    first: int
    columns: int
    bias: fx.Node | None


class Weight(NamedTuple):
    """The weight of a product: parts side by side."""

    terms: int
    parts: list[Part]


class Bias(NamedTuple):
    """A vector that is the sum of biases of products."""

    products: list[int]


class Columns(NamedTuple):
    """A vector of numbers of a tensor, which is read as if it had one dimension."""

    source: fx.Node
    first: int
    width: int
    step: int
    """0 or 1, or -1 if the numbers are at ``places``."""
    places: list[int]


class Table(NamedTuple):
    """An input that consists of rows of a table of weights."""

    table: fx.Node
    input: int
    padding: int
    """Of the row that gets no gradient; negative if all do."""


class Side(NamedTuple):
    """Some columns of a weight, or some numbers of a vector: rows of a constant."""

    constant: int
    """Its number; negative for zeros."""
    is_transposed: bool
    """Whether it is the constant's transpose that has these rows, of a weight."""
    first: int
    """Of the rows."""
    columns: int


class Joined(NamedTuple):
    """A weight whose columns are those of constants, one after the other."""

    sides: list[Side]


class Sum(NamedTuple):
    """A vector that is a sum, of whose terms each consists of constants."""

    terms: list[list[Side]]


class Cut(NamedTuple):
    """A vector that is one of the parts that a constant consists of."""

    constant: int
    widths: tuple[int, ...]
    number: int


class Fixed(NamedTuple):
    """A vector that has no constant in it."""

    number: int


Recipe = Joined | Sum | Cut | Fixed
"""How most weights and vectors are made of constants, and gradients of these from theirs."""


class Outside:
    """Computes weights, vectors and inputs of a program from a step's constants and inputs."""

    def __init__(
        self,
        module: Operations,
        constants: Sequence[int],
        weights: Sequence[Weight],
        vectors: Sequence[Bias | Columns],
        inputs: Sequence[int | Table],
    ) -> None:
        """
        Args:
            module: A graph of constants, with no result of its own.
            constants: Which constants of the step its placeholders are.
            inputs: Which inputs of the step the program reads, or tables of which rows.
        """
        self._module, self._constants = module, constants
        self._weights, self._vectors, self._inputs = weights, vectors, inputs
        self._cuts = _cuts(vectors)
        self._places = dict(zip(module.graph.find_nodes(op="placeholder"), constants, strict=True))
        self.reads_tables = any(isinstance(one, Table) for one in inputs)
        self._fits: bool | None = None
        self._known_fixed: dict[Any, Tensor] = {}
        self.recipes: list[Recipe] | None = None
        """Of weights, then of vectors, where all have one; else they need a graph of autograd."""
        found = [*map(self._recipe_of_weight, weights)]
        found += [self._recipe_of_vector(i, vector) for i, vector in enumerate(vectors)]
        cuts = [recipe for recipe in found if isinstance(recipe, Cut)]
        if all(found) and len({(cut.constant, cut.number) for cut in cuts}) == len(cuts):
            self.recipes = [recipe for recipe in found if recipe is not None]
        self._held: dict[tuple[str | int, torch.device], Tensor] = {}
        """What :meth:`hold_on` has copied, by name, or by the number of a vector."""

    def hold_on(self, device: torch.device) -> None:
        """Copies to a device what a program has of its own: numbers in the step, and places.

        A call could not: it would wait for the GPU, and no CUDA graph of it could be captured. They
        stay where they are for as long as the program lives, since a graph may read them.
        """
        with torch.inference_mode(False):  # a later call may train
            for node in self._module.graph.find_nodes(op="get_attr"):
                if (node.target, device) not in self._held:
                    number = getattr(self._module, node.target)
                    self._held[node.target, device] = number.to(device)
            for i, vector in enumerate(self._vectors):
                if isinstance(vector, Columns) and vector.places and (i, device) not in self._held:
                    self._held[i, device] = torch.tensor(vector.places, device=device)

    def __call__(
        self, constants: Sequence[Tensor], like: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Weights, (terms, columns) each, and vectors, (width,) each.

        Args:
            like: A tensor of the program's dtype on its device, such as a carry.
        """
        if self.has_recipes_for(constants):
            return self.by_recipes(constants, like)
        evaluate = self._evaluation(constants, like)
        weights = [self._weight(weight, evaluate) for weight in self._weights]
        vectors = [
            self._bias(vector, evaluate)
            if isinstance(vector, Bias)
            else self._columns(i, vector, evaluate)
            for i, vector in enumerate(self._vectors)
        ]
        return weights, vectors

    # By recipes, without the graph of constants.

    def _recipe_of_weight(self, weight: Weight) -> Recipe | None:
        sides = []
        for part in weight.parts:
            node, is_transposed = part.weight, part.is_transposed
            while _is_transpose(node):
                (node,) = node.all_input_nodes
                is_transposed = not is_transposed
            if part.member is not None or node not in self._places:
                return None
            sides.append(Side(self._places[node], is_transposed, part.first, part.columns))
        return Joined(sides)

    def _recipe_of_vector(self, number: int, vector: Bias | Columns) -> Recipe | None:
        if isinstance(vector, Columns):
            if vector.source.op == "get_attr":
                return Fixed(number)
            widths = self._cuts.get(vector.source)
            if vector.step != 1 or vector.source not in self._places or not widths:
                return None
            number = list(widths).index(vector.first)
            return Cut(self._places[vector.source], tuple(widths.values()), number)
        terms = []
        for i in vector.products:
            sides = []
            for part in self._weights[i].parts:
                if part.bias is None:
                    sides.append(Side(-1, False, 0, part.columns))
                elif part.bias in self._places:
                    sides.append(Side(self._places[part.bias], False, 0, part.columns))
                else:
                    return None
            terms.append(sides)
        return Sum(terms)

    def has_recipes_for(self, constants: Sequence[Tensor]) -> bool:
        """Whether recipes are right for the shapes of a step's constants, which never change."""
        if self._fits is None:
            self._fits = self._fit(constants)
        return self._fits

    def _fit(self, constants: Sequence[Tensor]) -> bool:
        if self.recipes is None:
            return False
        for weight, recipe in zip(self._weights, self.recipes, strict=False):
            assert isinstance(recipe, Joined)
            for i, is_transposed, first, columns in recipe.sides:
                shape = tuple(constants[i].shape)[:: -1 if is_transposed else 1]
                if len(shape) != 2 or shape[1] != columns or shape[0] < first + weight.terms:
                    return False
        for recipe in self.recipes[len(self._weights) :]:
            if isinstance(recipe, Cut):
                if tuple(constants[recipe.constant].shape) != (sum(recipe.widths),):
                    return False
            elif isinstance(recipe, Sum):
                sides = [side for term in recipe.terms for side in term if side.constant >= 0]
                if any(tuple(constants[i].shape) != (columns,) for i, _, _, columns in sides):
                    return False
        return True

    def by_recipes(
        self, constants: Sequence[Tensor], like: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Weights and vectors, as :meth:`__call__` gives them."""
        dtype = like.dtype
        constants = [c if c.dtype == dtype else c.to(dtype) for c in constants]
        made: list[Tensor] = []
        cuts: dict[int, Sequence[Tensor]] = {}
        for recipe in self.recipes or ():
            if isinstance(recipe, Joined):
                terms = self._weights[len(made)].terms
                # Side by side in the way in which torch's linear layers have their weights.
                sides = [constants[i] if t else constants[i].t() for i, t, _, _ in recipe.sides]
                for n, side in enumerate(sides):
                    if side.shape[1] != terms:
                        sides[n] = side.narrow(1, recipe.sides[n].first, terms)
                made.append((sides[0] if len(sides) == 1 else torch.cat(sides)).t())
            elif isinstance(recipe, Sum):
                total: Tensor | None = None
                for term in recipe.terms:
                    sides = [
                        constants[i] if i >= 0 else like.new_zeros(columns)
                        for i, _, _, columns in term
                    ]
                    one = sides[0] if len(sides) == 1 else torch.cat(sides)
                    total = one if total is None else total + one
                assert total is not None
                made.append(total)
            elif isinstance(recipe, Cut):
                parts = cuts.get(recipe.constant)
                if parts is None:
                    parts = cuts[recipe.constant] = constants[recipe.constant].split(recipe.widths)
                made.append(parts[recipe.number])
            else:
                made.append(self._fixed(recipe.number, like))
        count = len(self._weights)
        return made[:count], made[count:]

    def _fixed(self, number: int, like: Tensor) -> Tensor:
        key = number, like.device, like.dtype
        found = self._known_fixed.get(key)
        if found is None:
            vector = self._vectors[number]
            assert isinstance(vector, Columns)
            with torch.inference_mode(False):
                found = self._columns(number, vector, self._evaluation(None, like))
            self._known_fixed[key] = found
        return found

    def memory_by_recipes(
        self, made: Sequence[Tensor], needs: Sequence[bool], sums: torch.dtype
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """For the gradients of weights and vectors; that of a weight lies as the weight does.

        And for those of constants that vectors are parts of, by their numbers, in one.

        Args:
            made: The weights and vectors.
            needs: Which constants need a gradient.
            sums: In which dtype gradients are added up.
        """
        found: list[Tensor] = []
        whole: dict[int, Tensor] = {}
        cuts: dict[int, Sequence[Tensor]] = {}
        like = made[0]
        for recipe, tensor in zip(self.recipes or (), made, strict=True):
            if not any([needs[i] for i in _constants_of(recipe)]):
                found.append(like.new_empty(0, dtype=sums))
            elif isinstance(recipe, Cut):
                if recipe.constant not in cuts:
                    memory = like.new_empty(sum(recipe.widths), dtype=sums)
                    whole[recipe.constant] = memory
                    cuts[recipe.constant] = memory.split(recipe.widths)
                found.append(cuts[recipe.constant][recipe.number])
            elif isinstance(recipe, Joined):
                terms, columns = tensor.shape
                found.append(like.new_empty((columns, terms), dtype=sums).t())
            else:
                found.append(like.new_empty(tensor.shape, dtype=sums))
        return found, whole

    def through_recipes(
        self,
        gradients: Sequence[Tensor],
        whole: dict[int, Tensor],
        needs: Sequence[bool],
        constants: Sequence[Tensor],
    ) -> dict[int, Tensor]:
        """Of constants, by their numbers, from those of weights and vectors.

        Args:
            gradients, whole: In memory that :meth:`memory_by_recipes` has given.
        """
        found: dict[int, list[_Piece]] = {}
        for recipe, gradient in zip(self.recipes or (), gradients, strict=True):
            if isinstance(recipe, Joined):
                terms, gradient = [recipe.sides], gradient.t()
            elif isinstance(recipe, Sum):
                terms = recipe.terms
            else:
                continue
            for sides in terms:
                place = 0
                for i, is_transposed, first, columns in sides:
                    if i >= 0 and needs[i]:
                        own = gradient if len(sides) == 1 else gradient.narrow(0, place, columns)
                        piece = _Piece(0, 0, own)
                        if own.dim() == 2:
                            piece = _Piece(1, first, own)
                            if not is_transposed:
                                piece = _Piece(0, first, own.t())
                        found.setdefault(i, []).append(piece)
                    place += columns
        totals = dict(whole)
        for i, pieces in found.items():
            total = _put_together(pieces, constants[i].shape)
            totals[i] = totals[i] + total if i in totals else total
        return totals

    def inputs(
        self, constants: Sequence[Tensor], inputs: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """The inputs that a program reads, (seq_len, batch, width) each."""
        found = []
        evaluate = self._evaluation(constants, like) if self.reads_tables else None
        for one in self._inputs:
            if isinstance(one, Table):
                assert evaluate is not None
                padding = one.padding if one.padding >= 0 else None
                made = F.embedding(inputs[one.input], evaluate(one.table), padding)
            else:
                made = inputs[one]
            if made.dtype != like.dtype:
                made = made.to(like.dtype)
            found.append(made if made.dim() == 3 else made.reshape(*made.shape[:2], -1))
        return found

    def _evaluation(self, constants: Sequence[Tensor] | None, like: Tensor) -> _Evaluation:
        """Without constants, of what does not depend on them."""
        device = like.device
        held = {name: held for (name, on), held in self._held.items() if on == device}
        constants = [like if constants is None else constants[i] for i in self._constants]
        return _Evaluation(self._module, constants, held, like.dtype, device)

    def _weight(self, weight: Weight, evaluate: _Evaluation) -> Tensor:
        parts = [self._part(part, weight.terms, evaluate) for part in weight.parts]
        # Side by side in the way in which torch's linear layers have their weights.
        return parts[0] if len(parts) == 1 else torch.cat([part.t() for part in parts]).t()

    def _part(self, part: Part, terms: int, evaluate: _Evaluation) -> Tensor:
        weight: Tensor = evaluate(part.weight)
        if part.member is not None:
            weight = weight[part.member]
        if part.is_transposed:
            weight = weight.t()
        weight = weight.to(evaluate.dtype)
        return weight if weight.shape[0] == terms else weight.narrow(0, part.first, terms)

    def _columns(self, number: int, columns: Columns, evaluate: _Evaluation) -> Tensor:
        flat = evaluate(columns.source).reshape(-1).to(evaluate.dtype)
        first, count = columns.first, columns.width
        if columns.step == 1:
            return flat if count == flat.numel() else self._cut(columns, flat, evaluate)
        if columns.step == 0:
            return flat.narrow(0, first, 1).expand(count)
        places = evaluate.held.get(number)
        if places is None:
            places = torch.tensor(columns.places, device=flat.device)
        return flat.index_select(0, places)

    def _cut(self, columns: Columns, flat: Tensor, evaluate: _Evaluation) -> Tensor:
        widths = self._cuts[columns.source]
        if sum(widths.values()) != flat.numel():
            return flat.narrow(0, columns.first, columns.width)
        # At once: gradients of parts are put together at once, too, where each narrow() would add
        # one of the whole.
        parts = evaluate.parts.get(columns.source)
        if parts is None:
            parts = flat.split(list(widths.values()))
            evaluate.parts[columns.source] = parts
        return parts[list(widths).index(columns.first)]

    def _bias(self, vector: Bias, evaluate: _Evaluation) -> Tensor:
        total: Tensor | None = None
        for i in vector.products:
            parts = [
                evaluate(part.bias).to(evaluate.dtype).reshape(-1).expand(part.columns)
                if part.bias is not None
                else torch.zeros(part.columns, dtype=evaluate.dtype, device=evaluate.device)
                for part in self._weights[i].parts
            ]
            bias = parts[0] if len(parts) == 1 else torch.cat(parts)
            total = bias if total is None else total + bias
        assert total is not None
        return total

    # As JSON, in which nodes are their places in the graph.

    def to_json(self) -> dict[str, Any]:
        """What json.dumps takes.

        Raises:
            CannotStore: It has something that cannot be stored.
        """
        numbers = {node: i for i, node in enumerate(self._module.graph.nodes)}

        def stored(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return numbers[value]
            return list(map(stored, value)) if isinstance(value, list | tuple) else value

        return {
            "module": to_json(self._module),
            "constants": list(self._constants),
            "weights": stored(self._weights),
            "vectors": [
                {"bias": vector.products} if isinstance(vector, Bias) else stored(vector)
                for vector in self._vectors
            ],
            "inputs": stored(self._inputs),
        }

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Outside:
        """
        Raises:
            LookupError, TypeError, ValueError, AttributeError, RuntimeError: It is nothing that
                :meth:`to_json` makes.
        """
        module = from_json(stored["module"])
        nodes = list(module.graph.nodes)

        def part(fields: list[Any]) -> Part:
            bias = fields[-1]
            return Part._make(
                [nodes[fields[0]], *fields[1:-1], None if bias is None else nodes[bias]]
            )

        return Outside(
            module,
            stored["constants"],
            [Weight(terms, list(map(part, parts))) for terms, parts in stored["weights"]],
            [
                Bias(vector["bias"])
                if isinstance(vector, dict)
                else Columns(nodes[vector[0]], *vector[1:])
                for vector in stored["vectors"]
            ],
            [
                Table(nodes[one[0]], *one[1:]) if isinstance(one, list) else one
                for one in stored["inputs"]
            ],
        )


def _constants_of(recipe: Recipe) -> list[int]:
    if isinstance(recipe, Cut):
        return [recipe.constant]
    if isinstance(recipe, Fixed):
        return []
    terms = [recipe.sides] if isinstance(recipe, Joined) else recipe.terms
    return [side.constant for term in terms for side in term if side.constant >= 0]


class _Piece(NamedTuple):
    """A part of a constant's gradient: from a place in one dimension on, and all of others."""

    dim: int
    first: int
    gradient: Tensor


def _put_together(pieces: Sequence[_Piece], shape: torch.Size) -> Tensor:
    if len(pieces) == 1 and pieces[0].gradient.shape == shape:
        return pieces[0].gradient
    pieces = sorted(pieces, key=lambda piece: piece.first)
    dim, end = pieces[0].dim, 0
    for piece in pieces:
        if piece.dim != dim or piece.first != end:
            break
        end += piece.gradient.shape[dim]
    else:
        if end == shape[dim]:
            return torch.cat([piece.gradient for piece in pieces], dim)
    total = pieces[0].gradient.new_zeros(shape)
    for piece in pieces:
        size = piece.gradient.shape[piece.dim]
        total.narrow(piece.dim, piece.first, size).add_(piece.gradient)
    return total


def _is_transpose(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten.permute.default:
        return list(node.args[1]) in ([1, 0], [-1, 0], [1, -2], [-1, -2])  # type: ignore[arg-type]
    return node.target is torch.ops.aten.t.default


def _cuts(vectors: Sequence[Bias | Columns]) -> dict[fx.Node, dict[int, int]]:
    """Of each tensor that vectors are parts of: where these begin, and how wide they are.

    Nothing where they are not side by side from the first number on.
    """
    parts: dict[fx.Node, set[tuple[int, int]]] = {}
    for vector in vectors:
        if isinstance(vector, Columns) and vector.step == 1:
            parts.setdefault(vector.source, set()).add((vector.first, vector.width))
    found: dict[fx.Node, dict[int, int]] = {}
    for source, pairs in parts.items():
        end, found[source] = 0, dict(sorted(pairs))
        for first, width in sorted(pairs):
            if first != end:
                found[source] = {}
                break
            end += width
    return found


class _Evaluation:
    """Values of nodes of a graph of constants, each made when somebody asks."""

    def __init__(
        self,
        module: Operations,
        constants: Sequence[Tensor],
        held: Mapping[str | int, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            held: What is on the device already; see :meth:`Outside.hold_on`.
        """
        self.held, self.dtype, self.device = held, dtype, device
        self.parts: dict[fx.Node, tuple[Tensor, ...]] = {}
        """Of vectors that are parts of one tensor."""
        self._known: dict[fx.Node, Any] = {}
        left = iter(constants)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._known[node] = self._own(next(left))
            elif node.op == "get_attr":
                number = held.get(node.target)
                if number is None:
                    number = getattr(module, node.target).to(device)
                self._known[node] = self._own(number)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def __call__(self, node: fx.Node) -> Any:
        left = [node]
        while left:
            one = left[-1]
            missing = [a for a in one.all_input_nodes if a not in self._known]
            if one in self._known or not missing:
                left.pop()
                if one not in self._known:
                    self._known[one] = self._value(one)
            else:
                left += missing
        return self._known[node]

    def _value(self, node: fx.Node) -> Any:
        args: Any = fx.map_arg(node.args, lambda n: self._known[n])
        kwargs: dict[str, Any] = dict(fx.map_arg(node.kwargs, lambda n: self._known[n]))
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"].is_floating_point:
            kwargs["dtype"] = self.dtype
        if kwargs.get("device") is not None:
            kwargs["device"] = self.device
        kwargs.pop("pin_memory", None)
        target: Any = node.target
        if getattr(target, "overloadpacket", None) is torch.ops.fusedrnn_step.stop:
            return args[0].detach()
        return target(*args, **kwargs)
