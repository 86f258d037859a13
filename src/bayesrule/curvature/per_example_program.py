"""One example's loss as a list of equations, and where each leaf of θ enters it.

The equations that do not depend on the example come first: they make *sources* from the leaves, a leaf itself or
what is computed from leaves alone (a rescaled weight, a product of two). Each source then enters equations that depend
on the example, its *sites*, inside loops too. How the squares of a leaf's gradients are computed follows from the sites
of its sources and from how it enters them (`ways`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array

from ..numerics.pytree import PyTree
from . import per_example_ops as ops
from . import per_example_separable as separable

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "closed_call": "call_jaxpr"}
_REARRANGING = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy", "convert_element_type")
_ELEMENTWISE = frozenset(
    """abs add add_any clamp convert_element_type copy cos div erf exp exp2 expm1 floor integer_pow log log1p logistic
    max min mul neg pow reduce_precision round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh
    and eq ge gt is_finite le lt ne not or""".split()  # noqa: SIM905 - a list would take fifty lines
)
KINDS = {ops.Product: "product", ops.Convolution: "convolution", ops.Lookup: "lookup"}
_FIXED = "fixed"
Path = tuple[int, ...]


class _Constant(NamedTuple):
    val: Any


class _Step(NamedTuple):
    """One equation; its inputs are places in the list of values, or constants with a `val`. A loop has a body."""

    equation: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    body: _Block | None

    def bind(self, arguments: Sequence[Any]) -> list[Any]:
        primitive = self.equation.primitive
        bound = primitive.get_bind_params(self.equation.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)  # a tuple before JAX 0.9
        with self.equation.ctx.manager:
            results = primitive.bind(*functions, *arguments, **params)
        return list(results) if primitive.multiple_results else [results]


class _Block:
    """A jaxpr's equations in one list, with those of the calls in it; the equations in a loop are a block of their own.

    A function with a custom derivative stays one equation: those inside it would be differentiated as they stand.
    """

    def __init__(self, jaxpr: Any, constants: Sequence[Any]) -> None:
        self.steps: list[_Step] = []
        self.inputs = self.size = len(jaxpr.invars)
        self.results = self._inline(jaxpr, [*map(_Constant, constants), *range(self.inputs)])
        self._prune()

    def _inline(self, jaxpr: Any, places: Sequence[Any]) -> list[Any]:
        """Append a jaxpr's equations, and return the places of its results."""
        place = dict(zip((*jaxpr.constvars, *jaxpr.invars), places, strict=True))
        read = lambda v: v if isinstance(v, Literal) else place[v]
        for equation in jaxpr.eqns:
            inputs = tuple(read(v) for v in equation.invars)
            inner = equation.params.get(_CALLS.get(equation.primitive.name, ""))
            if inner is not None:
                known = [*map(_Constant, getattr(inner, "consts", ()))]
                results = self._inline(getattr(inner, "jaxpr", inner), [*known, *inputs])
                place.update(zip(equation.outvars, results, strict=True))
                continue
            outputs = tuple(range(self.size, self.size + len(equation.outvars)))
            self.size += len(outputs)
            place.update(zip(equation.outvars, outputs, strict=True))
            body = None
            if equation.primitive.name == "scan":
                body = _Block(equation.params["jaxpr"].jaxpr, equation.params["jaxpr"].consts)
            self.steps.append(_Step(equation, inputs, outputs, body))
        return [read(v) for v in jaxpr.outvars]

    def _prune(self) -> None:
        """Drop the equations that the results do not depend on, so that they do not count as uses of a leaf."""
        needed, kept = set(_places(self.results)), []
        for step in reversed(self.steps):
            if step.equation.effects or not needed.isdisjoint(step.outputs):
                needed.update(_places(step.inputs))
                kept.append(step)
        self.steps = kept[::-1]

    def reached(self, places: Iterable[int]) -> set[int]:
        """The places whose values depend on the given ones."""
        reached = set(places)
        for step in self.steps:
            if not reached.isdisjoint(_places(step.inputs)):
                reached.update(step.outputs)
        return reached

    def run(
        self, values: dict[int, Any], nudges: dict[Path, Array], others: dict[Path, tuple[int, ...]]
    ) -> tuple[list[Any], dict[Path, list[Array]]]:
        """The results with a nudge added to the output of each site, and the other operands of the sites.

        `values` are those of the inputs, and of the places that are computed already. Inside a loop, the nudges and
        the operands have an axis over its iterations.
        """
        values, operands = dict(values), {}
        for number, step in enumerate(self.steps):
            if step.outputs[0] in values:
                continue
            arguments = [_read(values, i) for i in step.inputs]
            own = {path[1:]: nudge for path, nudge in nudges.items() if path[0] == number}
            if () in own:
                results = [step.bind(arguments)[0] + own[()]]
                operands[(number,)] = [arguments[i] for i in others[(number,)]]
            elif own:
                inner = {path[1:]: at for path, at in others.items() if path[0] == number}
                results, found = _run_loop(step, arguments, own, inner)
                operands |= {(number, *path): found[path] for path in own}
            else:
                results = step.bind(arguments)
            values.update(zip(step.outputs, results, strict=True))
        return [_read(values, i) for i in self.results], operands


def _run_loop(
    step: _Step, arguments: Sequence[Any], nudges: dict[Path, Array], others: dict[Path, tuple[int, ...]]
) -> tuple[list[Any], dict[Path, list[Array]]]:
    body, params = step.body, step.equation.params
    assert body is not None
    constants, carries = params["num_consts"], params["num_carry"]
    fixed, start, slices = arguments[:constants], arguments[constants:][:carries], arguments[constants + carries :]

    def one(carry: list[Any], here: tuple[list[Any], dict[Path, Array]]) -> tuple[list[Any], Any]:
        results, operands = body.run(dict(enumerate([*fixed, *carry, *here[0]])), here[1], others)
        return results[:carries], (results[carries:], operands)

    carry, (outputs, operands) = jax.lax.scan(
        one, list(start), (list(slices), nudges), params["length"], params["reverse"], params["unroll"]
    )
    return [*carry, *outputs], operands


def _read(values: dict[int, Any], place: Any) -> Any:
    return values[place] if isinstance(place, int) else place.val


def _places(inputs: Sequence[Any]) -> list[int]:
    """The places among an equation's inputs, without its constants."""
    return [i for i in inputs if isinstance(i, int)]


class _Route(NamedTuple):
    """A source's entries at some place: their layout, None if they were broadcast, and the loops around the place."""

    source: int
    layout: ops.Layout | None
    loops: tuple[tuple[int, bool], ...] = ()


class _Use(NamedTuple):
    """Where a source enters an equation that depends on the example; a path of None is a use of no known kind."""

    path: Path | None
    step: _Step | None = None
    side: int = 0
    route: _Route | None = None
    meets_example: bool = False
    """Whether all other inputs of the equation depend on the example."""


_UNKNOWN = _Use(None)


class Source(NamedTuple):
    """What the example's equations see of θ: how it is used, and its sites if it has sites only."""

    way: str
    sites: tuple[ops.Site, ...]


class Program:
    """One example's computation as a list of equations, its sources, and the way of each leaf of θ."""

    def __init__(self, function: Callable[[PyTree, PyTree], Array], theta: PyTree, examples: PyTree) -> None:
        paths, self.treedef = jax.tree_util.tree_flatten_with_path(theta)
        self.leaves = [jnp.asarray(leaf) for _, leaf in paths]
        shapes, stack = jax.eval_shape(lambda *x: x, theta, examples)
        self.example = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), stack)
        closed, self.output = jax.make_jaxpr(function, return_shape=True)(shapes, self.example)
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(self.output)):
            raise ValueError(
                f"The function returned {jax.tree.structure(self.output)}, and one array is wanted: leave out the rest."
            )
        self.block = _Block(closed.jaxpr, closed.consts)
        self.varying = self.block.reached(range(len(self.leaves), self.block.inputs))
        self.made = set(range(len(self.leaves)))
        """The places of the leaves, and of all that is computed from them without the example and not rearranged."""
        self.sources = self._find_sources()
        self.reach = self._reach()
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        self.ways = {name: self._way(leaf) for leaf, name in enumerate(names)}

    def _find_sources(self) -> dict[int, Source]:
        """Every source by its place in the block."""
        routes = {i: _Route(i, ops.Layout(leaf.shape)) for i, leaf in enumerate(self.leaves)}
        uses: dict[int, list[_Use]] = {i: [] for i in routes}
        self._follow(self.block, routes, self.varying, (), uses)
        for place in _places(self.block.results):
            if place in routes:
                uses[routes[place].source].append(_UNKNOWN)
        return {place: _source(found) for place, found in uses.items() if found}

    def _follow(
        self, block: _Block, routes: dict[int, _Route], varying: set[int], at: Path, uses: dict[int, list[_Use]]
    ) -> None:
        """Note every use of each source, past the equations that only rearrange, cast or broadcast it."""
        for number, step in enumerate(block.steps):
            entering = [(side, i) for side, i in enumerate(step.inputs) if isinstance(i, int) and i in routes]
            varies = [isinstance(i, int) and i in varying for i in step.inputs]
            if any(varies) and step.body is not None and step.equation.params["length"] > 0:
                self._follow_loop(step, routes, varying, (*at, number), uses)
                continue
            rearranged = False
            for side, place in entering:
                route = routes[place]
                after = route.layout and route.layout.after(step.equation)
                if after or step.equation.primitive.name in _REARRANGING:
                    rearranged = True
                    routes[step.outputs[0]] = route._replace(layout=after)
                elif any(varies):
                    alone = all(v for i, v in enumerate(varies) if i != side and not _is_index(step, i))
                    uses[route.source].append(_Use((*at, number), step, side, route, alone))
                elif at:
                    uses[route.source].append(_UNKNOWN)
            if at or any(varies) or rearranged:
                continue
            self.made.update(step.outputs)
            for place, variable in zip(step.outputs, step.equation.outvars, strict=True):
                if entering and jnp.issubdtype(variable.aval.dtype, jnp.inexact):
                    routes[place], uses[place] = _Route(place, ops.Layout(variable.aval.shape)), []

    def _follow_loop(
        self, step: _Step, routes: dict[int, _Route], varying: set[int], at: Path, uses: dict[int, list[_Use]]
    ) -> None:
        """The same inside a loop. A source may be carried along unchanged, and sliced along its first axis."""
        body, params = step.body, step.equation.params
        assert body is not None
        constants, carries, length = params["num_consts"], params["num_carry"], params["length"]
        inner: dict[int, _Route] = {}
        for i, place in enumerate(step.inputs):
            if not isinstance(place, int) or place not in routes:
                continue
            route = routes[place]
            if i >= constants + carries:
                layout = route.layout and route.layout.inside_loop(length)
                inner[i] = _Route(route.source, layout, (*route.loops, (length, True)))
            elif i < constants or body.results[i - constants] == i:
                inner[i] = route._replace(loops=(*route.loops, (length, False)))
                if i >= constants:
                    routes[step.outputs[i - constants]] = route
            else:
                uses[route.source].append(_UNKNOWN)
        start = {i for i, place in enumerate(step.inputs) if isinstance(place, int) and place in varying}
        while True:
            reached = body.reached(start)
            carried = {constants + i for i, place in enumerate(body.results[:carries]) if place in reached}
            if carried <= start:
                break
            start |= carried
        self._follow(body, inner, reached, at, uses)
        for place in _places([r for i, r in enumerate(body.results) if i >= carries or r != constants + i]):
            if place in inner:
                uses[inner[place].source].append(_UNKNOWN)

    def _reach(self) -> list[dict[int, tuple[Any, ...] | None]]:
        """For each leaf the sources that depend on it, and how: each entry on one entry of the leaf, or None.

        Entries that depend on one entry each are described by the moves from the leaf to them, as in a `Layout`.
        """
        moves: dict[int, dict[int, tuple[Any, ...] | None]] = {i: {i: ()} for i in range(len(self.leaves))}
        for step in self.block.steps:
            places = _places(step.inputs)
            if any(i in self.varying for i in places):
                continue
            for leaf in {leaf for i in places for leaf in moves.get(i, {})}:
                entering = [moves.get(i, {}).get(leaf, _FIXED) if isinstance(i, int) else _FIXED for i in step.inputs]
                found = _moved(step.equation, entering)
                if step.equation.primitive.name == "custom_jvp_call":
                    found = [m if m == _moved_slope(step, entering) else None for m in found]
                for place, route in zip(step.outputs, found, strict=True):
                    if route is not _FIXED:
                        moves.setdefault(place, {})[leaf] = route
        reached = lambda leaf: [place for place in self.sources if leaf in moves.get(place, {})]
        return [{place: moves[place][leaf] for place in reached(leaf)} for leaf in range(len(self.leaves))]

    def _way(self, leaf: int) -> str:
        """How a leaf enters, as `ways` says."""
        reached = self.reach[leaf]
        if not reached:
            return "unused"
        kinds = {self.sources[place].way for place in reached}
        if "examples" in kinds:
            return "examples"
        if not _are_separate(list(reached.values())):
            return "rescaled" if self._is_separable(leaf) else "mixed"
        return kinds.pop() if len(kinds) == 1 else "several"

    def _is_separable(self, leaf: int) -> bool:
        """Whether the leaf's gradient for each example is a sum of few outer products; nothing is computed."""
        sites = {place: self.sources[place].sites for place in self.reach[leaf]}
        count = {place: sum(site.sizes[1] for site in own) for place, own in sites.items()}
        if not all(own and all(site.is_matrix for site in own) and count[at] <= ops.FEW for at, own in sites.items()):
            return False

        def attempt(leaves: list[Array]) -> Any:
            made = self.make(dict(enumerate(leaves)), {})
            pair = lambda x: tuple(jnp.zeros((1, n), ops.wide(x)) for n in x.shape)
            outer = {place: [pair(made[place])] * count[place] for place in sites}
            return self.pull_back(leaf, leaves[leaf], made, outer)

        try:
            jax.eval_shape(attempt, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.leaves])
        except separable.NotSeparable:
            return False
        return True

    def pull_back(self, leaf: int, value: Array, made: dict[int, Any], outer: dict[int, Any]) -> Any:
        """Sums of outer products, the gradients of a leaf's sources, pulled back to the leaf."""
        like, pull = jax.vjp(lambda x: self.remake({leaf: x}, made, self.reach[leaf]), value)
        return separable.pull_back(pull, like, outer)

    def remake(self, leaves: dict[int, Array], made: dict[int, Any], places: Iterable[int]) -> dict[int, Array]:
        """Some sources as a function of some leaves, the others being as they are."""
        places = list(places)
        values = made | self.make(leaves, made, places)
        return {place: values[place] for place in places}

    @property
    def whole(self) -> list[int]:
        """The leaves whose gradient is made for every example by differentiating in the leaf itself."""
        return [leaf for leaf, way in enumerate(self.ways.values()) if way == "examples"]

    def make(
        self, leaves: dict[int, Array], known: dict[int, Any], places: Iterable[int] | None = None
    ) -> dict[int, Any]:
        """The values, by their places, that follow from some leaves without the example.

        Args:
            leaves: The leaves by their numbers.
            known: Values that do not depend on these leaves, or whose dependence is left out.
            places: What is wanted; all by default.

        Returns:
            The leaves, and the values of all steps that had to be evaluated.
        """
        values = known | leaves
        fixed = [step for step in self.block.steps if self.varying.isdisjoint(_places(step.inputs))]
        if places is not None:
            reached = self.block.reached(leaves)
            needed, kept = set(places), []
            for step in reversed(fixed):
                if not needed.isdisjoint(step.outputs) and not reached.isdisjoint(step.outputs):
                    needed.update(_places(step.inputs))
                    kept.append(step)
            fixed = kept[::-1]
        made = dict(leaves)
        for step in fixed:
            results = dict(zip(step.outputs, step.bind([_read(values, i) for i in step.inputs]), strict=True))
            values |= results
            made |= results
        return made

    def run(
        self,
        made: dict[int, Any],
        shifts: dict[int, Array],
        nudges: dict[Path, Array],
        others: dict[Path, tuple[int, ...]],
        example: PyTree,
    ) -> tuple[Array, dict[Path, list[Array]]]:
        """The result from what `make` returned, with shifted sources and nudged sites; the operands at the sites."""
        kept = {place: made[place] for place in self.made} | {place: made[place] + x for place, x in shifts.items()}
        inputs = dict(enumerate(jax.tree.leaves(example), len(self.leaves)))
        (result,), operands = self.block.run(kept | inputs, nudges, others)
        return result, operands


def _is_index(step: _Step, side: int) -> bool:
    """Whether an input is one of a lookup's indices, of which some may be constants."""
    return step.equation.primitive.name == "dynamic_slice" and side > 0


def _source(uses: list[_Use]) -> Source:
    """How a source is used: at sites alone, as a bias or a scale, or in another way."""
    sites = [_site(use) for use in uses]
    known = tuple(site for site in sites if isinstance(site, ops.Site))
    if len(known) == len(uses):
        return Source("shared" if len(uses) > 1 else KINDS[type(known[0].operation)], known)
    return Source(sites[0] if len(uses) == 1 and isinstance(sites[0], str) else "examples", ())


def _site(use: _Use) -> ops.Site | str | None:
    """The site of a use, or "bias" or "scale", or None if it is of no known kind."""
    if use.path is None or use.step is None or use.route is None or not use.meets_example:
        # An operand that is the same for all examples would be copied for each of them, so its rows are not used.
        return None
    equation, (_, layout, loops) = use.step.equation, use.route
    name = equation.primitive.name
    if len(equation.invars) == 2 and name in ("add", "sub", "add_any", "mul"):
        return "scale" if name == "mul" else "bias"
    operation = layout and ops.operation(equation, use.side)
    if not layout or not operation:
        return None
    if isinstance(operation, ops.Lookup) and any(sliced for _, sliced in loops):
        return None
    output = equation.outvars[0].aval
    shape = (*(length for length, _ in loops), *output.shape)
    if math.prod(shape) == 0:
        return None
    return ops.Site(use.path, operation, operation.layout(layout), loops, jax.ShapeDtypeStruct(shape, output.dtype))


def _moved(equation: Any, entering: Sequence[Any]) -> list[Any]:
    """The moves from a leaf to the outputs of an equation, from those to its inputs; `_FIXED` where it has no part."""
    name, params = equation.primitive.name, equation.params
    inner = params.get("call_jaxpr" if name == "custom_jvp_call" else _CALLS.get(name, ""))
    if all(moves is _FIXED for moves in entering):
        return [_FIXED] * len(equation.outvars)
    if inner is not None:
        jaxpr = getattr(inner, "jaxpr", inner)
        return _moved_through(jaxpr, dict(zip(jaxpr.invars, entering, strict=True)))
    pairs = zip(entering, equation.invars, strict=True)
    own = [(moves, v.aval.shape) for moves, v in pairs if moves is not _FIXED]
    return [_moved_once(equation, own, number) for number in range(len(equation.outvars))]


def _moved_slope(step: _Step, entering: Sequence[Any]) -> Any:
    """The moves to the derivative of a function with a custom one: it may mix entries where the function does not."""
    avals = [v.aval for v in step.equation.invars]
    if len(step.outputs) != 1 or not all(jnp.issubdtype(a.dtype, jnp.floating) for a in avals):
        return None
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    slope = lambda primals, tangents: jax.jvp(lambda *x: step.bind(x)[0], primals, tangents)[1]
    jaxpr = jax.make_jaxpr(slope)(tuple(shapes), tuple(shapes)).jaxpr
    found = dict(zip(jaxpr.invars, [*entering, *entering], strict=True))
    return _moved_through(jaxpr, found)[0]


def _moved_through(jaxpr: Any, found: dict[Any, Any]) -> list[Any]:
    """The moves to the outputs of a jaxpr, from those to its inputs."""
    read = lambda v: _FIXED if isinstance(v, Literal) else found.get(v, _FIXED)
    for equation in jaxpr.eqns:
        found.update(zip(equation.outvars, _moved(equation, [read(v) for v in equation.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _moved_once(equation: Any, entering: list[tuple[Any, Any]], number: int) -> Any:
    """The same for one output, from the moves and shapes of the inputs in which the leaf has a part."""
    moves, shape = entering[0]
    name, params, result = equation.primitive.name, equation.params, equation.outvars[number].aval
    if jnp.issubdtype(result.dtype, jnp.floating) and jnp.finfo(result.dtype).bits < 32:
        return None  # The sums of squares keep single precision, so they are not taken through this value.
    if moves is None or any(other != (moves, shape) for other in entering):
        return None
    if name in _ELEMENTWISE and result.shape == shape:
        return moves
    if name == "transpose":
        return (*moves, (name, tuple(params["permutation"])))
    if name in _REARRANGING and math.prod(shape) == result.size:
        return (*moves, ("reshape", tuple(result.shape)))
    if name == "concatenate" and len(entering) == 1:
        return (*moves, (name, tuple(result.shape)))
    if name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        return (*moves, (name, tuple(zip(params["start_indices"], params["limit_indices"], strides, strict=True))))
    if name == "split":
        edges = [0, *itertools.accumulate(int(size) for size in params["sizes"])]
        whole = [(0, n, 1) for n in shape]
        whole[params["axis"]] = (edges[number], edges[number + 1], 1)
        return (*moves, ("slice", tuple(whole)))
    return None


def _are_separate(routes: list[tuple[Any, ...] | None]) -> bool:
    """Whether no entry of a leaf is on two routes, and each entry at the end of a route depends on one entry."""
    if any(route is None for route in routes):
        return False
    return all(_are_disjoint(a, b) for a, b in itertools.combinations(routes, 2) if a is not None and b is not None)


def _are_disjoint(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether two routes part at slices without a common entry."""
    for (kind, a), (other, b) in zip(first, second, strict=False):
        if (kind, a) != (other, b):
            apart = lambda p, q: p[1] <= q[0] or q[1] <= p[0]
            return kind == other == "slice" and any(apart(p, q) for p, q in zip(a, b, strict=True))
    return False
