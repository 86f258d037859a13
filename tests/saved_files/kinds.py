"""Every kind of state that a rule carries, each in the middle of its steps: what `make.py` saves and the tests load.

The algorithms and problems here are those that the saved files belong to. They never follow a change of the defaults:
where a default changes, its old value is written out here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bayesrule as blr
from bayesrule import factors

ROWS = np.array([[1.0, 0.3], [-0.5, 1.2], [0.8, -0.9], [0.1, 0.7], [-1.3, -0.2], [0.6, 0.4]])
LABELS = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
TARGETS = np.array([0.5, -1.0, 2.0, 0.3, 1.1, -0.4])
BATCH = 2
FURTHER = 2
"""How many steps the tests take from a saved state."""


class Task(NamedTuple):
    """What a rule is run on: an objective, where q begins, and the data of each step, all of one shape."""

    objective: Any
    start: Any
    data: Callable[[int], Any] = lambda step: None


class Kind(NamedTuple):
    """A kind of state: the rule and the task that it belongs to, and after how many steps it is saved.

    `horizon` is the number of steps that the rule was told of beforehand. `like` makes the container of another
    library, whose structure a file does not hold.
    """

    rule: Callable[[], blr.Rule]
    task: Callable[[], Task]
    steps: int = 3
    horizon: int | None = None
    like: Callable[[], Any] = lambda: None


def logistic_loss(output: jax.Array, label: jax.Array) -> jax.Array:
    return jnp.logaddexp(0.0, output) - label * output


def rows_of(step: int) -> np.ndarray:
    """The rows of a mini-batch: all of them in three steps."""
    return (np.arange(BATCH) + BATCH * step) % len(ROWS)


def batch(step: int) -> Any:
    return jnp.asarray(ROWS[rows_of(step)]), jnp.asarray(LABELS[rows_of(step)])


def regression(regularizer: float | None = 1.0, start: Any = None) -> Task:
    """Two weights, and batches of two of six rows."""
    objective = blr.Objective(logistic_loss, output=lambda w, x: x @ w, size=len(ROWS), regularizer=regularizer)
    return Task(objective, jnp.array([0.3, -0.2]) if start is None else start, batch)


def whole_regression() -> Task:
    task, data = regression(), (jnp.asarray(ROWS), jnp.asarray(LABELS))
    return task._replace(data=lambda step: data)


def flat_regression() -> Task:
    return regression(regularizer=None)


def layer() -> Task:
    """A layer with two outputs: parameters in a dict, a list and a tuple."""

    def loss(params: Any, example: Any) -> jax.Array:
        kernel, (bias, (shift,)) = params["kernel"], params["rest"]
        return 0.5 * jnp.sum((example[0] @ kernel + bias + shift - example[1]) ** 2)

    start = {
        "kernel": jnp.array([[0.3, -0.2], [0.1, 0.4]]),
        "rest": [jnp.array([0.1, 0.0]), (jnp.array(0.2),)],
    }
    return Task(blr.Objective(loss, size=len(ROWS), regularizer=1.0), start, batch)


class Pair(NamedTuple):
    """Parameters in a container that is no dict, list or tuple."""

    first: Any
    second: Any


def pair() -> Task:
    task = regression(start=Pair(jnp.array(0.3), jnp.array(-0.2)))
    output = lambda w, x: x[0] * w.first + x[1] * w.second
    return task._replace(objective=blr.Objective(logistic_loss, output=output, size=len(ROWS), regularizer=1.0))


def half_precision() -> Task:
    return regression(start=jnp.array([0.3, -0.2], jnp.bfloat16))


def single_precision() -> Task:
    return regression(start=jnp.array([0.3, -0.2], jnp.float32))


def columns() -> Task:
    """A weight matrix with one output, for masks and Kronecker factors."""
    objective = blr.Objective(
        lambda w, example: jnp.sum(logistic_loss(example[0] @ w, example[1])), size=len(ROWS), regularizer=1.0
    )
    return Task(objective, jnp.array([[0.3], [-0.2]]), batch)


def wide_layer() -> Task:
    """Three outputs of two inputs, linear, so that columns of weights belong to outputs."""
    classes = lambda f, y: jax.nn.logsumexp(f) - f[y.astype(int)]
    objective = blr.Objective(classes, output=lambda w, x: x @ w, size=len(ROWS), regularizer=1.0)
    return Task(objective, 0.1 * jnp.cos(jnp.arange(6.0)).reshape(2, 3), batch)


def normalized_layer() -> Task:
    """Outputs that are divided by a running scale, as batch normalisation has it."""

    def losses(w: Any, data: Any, aux: Any, key: Any) -> Any:
        outputs = data[0] @ w
        scale = 0.9 * aux["scale"] + 0.1 * jnp.mean(outputs**2)
        counted = {"scale": scale, "batches": aux["batches"] + 1}
        return logistic_loss(outputs / jnp.sqrt(1e-3 + scale), data[1]), counted

    aux = {"scale": jnp.ones(()), "batches": jnp.zeros((), int)}
    objective = blr.Objective.from_batch(losses, size=len(ROWS), regularizer=1.0, aux=aux)
    return Task(objective, jnp.array([0.3, -0.2]), batch)


def correlated() -> Task:
    """Two numbers of a correlated posterior, for steps that are accelerated."""
    matrix = jnp.array([[1.0, 0.95], [0.95, 1.0]])
    return Task(lambda x: 0.5 * (x - 1) @ matrix @ (x - 1) + jnp.sum(jnp.cosh(x)), jnp.array([0.0, 2.0]))


def two_minima() -> Task:
    return Task(lambda x: jnp.sum((x**2 - 1) ** 2 + x / 10), None)


BOX = jnp.array([-2.0]), jnp.array([2.0])


def mixture_of(member: type, *, objective: Any = None) -> Callable[[], Task]:
    """Two components of a mixture on the regression, or on the function with two minima."""

    def task() -> Task:
        if objective is not None:
            parts = [member(jnp.array([x]), jnp.array([[2.0]])) for x in (-1.2, 0.9)]
            return Task(objective, blr.Mixture([0.4, 0.6], parts))
        parts = [member(jnp.array([x, -x]), jnp.array([2.0, 3.0])) for x in (-1.0, 0.8)]
        return regression(start=blr.Mixture([0.4, 0.6], parts))

    return task


def quartic(x: jax.Array) -> jax.Array:
    return jnp.sum((x**2 - 1) ** 2 + x / 10)


def coin() -> Task:
    toss = lambda mu, y: -(y * mu[0] + (1 - y) * mu[1])
    objective = blr.Objective(toss, size=len(LABELS), prior=blr.Beta(1.0, 1.0))
    return Task(objective, blr.Beta(5.0, 5.0), lambda step: jnp.asarray(LABELS))


def experts() -> Task:
    objective = blr.Objective(lambda expert, losses: losses[expert], size=len(ROWS))
    return Task(objective, blr.Categorical(jnp.array([0.1, -0.2])), lambda step: jnp.asarray(ROWS))


def signs(prior: Any = None) -> Task:
    objective = blr.Objective(lambda w, example: 0.5 * (example[1] - example[0] @ w) ** 2, size=len(ROWS), prior=prior)
    return Task(objective, jnp.array([0.3, -0.2]), batch)


def clusters(rows: int | None = None) -> Callable[[], Task]:
    """A mixture as a model with a local block: every row's choice of a component."""

    def task() -> Task:
        blocks = {
            "weights": blr.Dirichlet(jnp.array([2.0, 2.0])),
            "components": blr.NormalGamma(jnp.array([-0.5, 1.0]), jnp.ones(2), jnp.full(2, 2.0), jnp.ones(2)),
        }
        terms = {f"prior of {name}": factors.prior(name, q) for name, q in blocks.items()}
        terms["z"] = factors.categorical("z", probabilities="weights")
        terms["y"] = factors.choice("z", factors.normal("y", joint="components"))
        model = blr.Model(blocks, terms, local={"z": blr.Categorical(jnp.zeros(2))}, size=len(TARGETS))
        chosen = lambda step: np.arange(len(TARGETS)) if rows is None else rows_of(step)
        data = lambda step: {"y": jnp.asarray(TARGETS[chosen(step)])}
        if rows is not None:
            return Task(model, None, lambda step: blr.Rows(data(step), jnp.asarray(chosen(step))))
        return Task(model, None, data)

    return task


def logistic_model(*, batches: bool = False) -> Task:
    prior = blr.Gaussian(jnp.zeros(2), jnp.eye(2))
    terms = {"prior": factors.prior("w", prior), "y": factors.bernoulli_logit("y", {"w": "x"})}
    model = blr.Model({"w": prior}, terms, size=len(ROWS))

    def data(step: int) -> Any:
        chosen = rows_of(step) if batches else np.arange(len(ROWS))
        part = {"x": jnp.asarray(ROWS[chosen]), "y": jnp.asarray(LABELS[chosen])}
        return blr.Rows(part, jnp.asarray(chosen)) if batches else part

    return Task(model, None, data)


def mixture_block() -> Task:
    """A model with a mixture as its block: the square of a number was observed."""
    prior = blr.Gaussian(jnp.array([0.2]), jnp.array([[0.5]]))
    start = blr.Mixture([1, 1], [blr.Gaussian(jnp.array([m]), jnp.array([[4.0]])) for m in (-1.0, 1.2)])
    square = lambda f, y: -0.5 * ((y - f[0] ** 2) / 0.8) ** 2
    terms = {
        "prior": factors.prior("f", prior),
        "y": blr.Factor(square, "f", data="y", points=blr.Quadrature(8)),
    }
    return Task(blr.Model({"f": start}, terms), None, lambda step: {"y": jnp.array([2.1, 1.7, 2.3])})


def counts_over_time() -> Task:
    """Counts along a random walk, whose posterior is a chain of Gaussians."""
    walk = blr.StateSpace(jnp.eye(1), 0.3 * jnp.eye(1), jnp.ones(1))
    model = blr.Model({"f": blr.GaussianChain(walk, 4)}, {"y": factors.poisson_exp("y", {"f": None})})
    return Task(model, None, lambda step: {"y": jnp.array([1.0, 0.0, 2.0, 4.0])})


def process() -> Task:
    """Labels at four places, whose posterior is a Gaussian process."""
    gap = jnp.arange(4.0)[:, None] - jnp.arange(4.0)
    prior = blr.GaussianProcess(jnp.exp(-0.5 * gap**2) + 0.1 * jnp.eye(4), 0.1)
    model = blr.Model({"f": prior}, {"y": factors.bernoulli_logit("y", {"f": None})})
    return Task(model, None, lambda step: {"y": jnp.array([1.0, 0.0, 1.0, 1.0])})


def path() -> Task:
    """A Markov chain of two states, whose observations are not conjugate to anything: rates of a power of 0.7."""
    start = blr.CategoricalChain([0.6, 0.4], [[0.8, 0.2], [0.3, 0.7]], jnp.zeros((4, 2)))
    scores = jnp.array([[0.9], [0.1], [-0.6], [0.4]])
    objective = blr.Objective(lambda mu, example: -jnp.sum(scores * mu) + 0.5 * jnp.sum(mu**2), size=1)
    return Task(objective, start, lambda step: jnp.zeros(1))


def heavy_tails(member: Callable[[], Any]) -> Callable[[], Task]:
    return lambda: Task(lambda x: jnp.sum(jnp.log1p(x**2)) + 0.1 * jnp.sum(x**2), member())


def with_steps(rule: blr.Rule, **steps: Any) -> blr.Rule:
    return rule.replace(steps=blr.Steps(0.3, **steps))


def shaped(rule: blr.Rule, transformation: Any) -> blr.Rule:
    return rule.replace(steps=rule.steps.shaped(transformation))


def vogn() -> blr.Rule:
    return blr.vogn(1e-3)


def ivon() -> blr.Rule:
    return blr.ivon(1e-3)


# The forms that were published: precisions that start from a number, and decays in place of windows.
PUBLISHED = {"curvature": 1.0, "decay": 0.999}

KINDS: dict[str, Kind] = {
    # Optimisation: q, and q before the last step.
    "gradient_descent": Kind(lambda: blr.gradient_descent(0.1), regression),
    "gradient_descent, heavy ball": Kind(lambda: blr.gradient_descent(0.1, momentum=0.9), regression),
    "newton": Kind(lambda: blr.newton(0.5), whole_regression),
    "newton, natural momentum": Kind(lambda: with_steps(blr.von(0.3, samples=2), momentum=0.5), whole_regression),
    "newton, accelerated": Kind(
        lambda: blr.newton().replace(
            family=blr.DiagonalGaussian,
            curvature=blr.HessianDiagonal(),
            steps=blr.Steps(1.0, acceleration=blr.Anderson(3)),
        ),
        correlated,
        steps=4,
    ),
    "newton, accelerated full Gaussian": Kind(
        lambda: blr.newton().replace(points=blr.Quadrature(3), steps=blr.Steps(0.5, acceleration=blr.Anderson(2))),
        correlated,
    ),
    "newton, mixture": Kind(
        lambda: blr.newton(0.2).replace(family=blr.Mixture), mixture_of(blr.Gaussian, objective=quartic)
    ),
    "newton, Student's t": Kind(
        lambda: blr.Rule(blr.StudentT, blr.Quadrature(4), blr.Hessian(), blr.Steps(0.2), blr.Retraction()),
        heavy_tails(lambda: blr.StudentT(jnp.array([0.5]), 1.0, 5.0)),
    ),
    "newton, skew Gaussian": Kind(
        lambda: blr.Rule(blr.SkewGaussian, blr.Quadrature(4), blr.Hessian(), blr.Steps(0.2), blr.Retraction()),
        heavy_tails(lambda: blr.SkewGaussian(jnp.array([0.5]), 1.0, -0.5)),
    ),
    "von": Kind(lambda: blr.von(0.3, samples=2), regression),
    "von, block diagonal": Kind(lambda: blr.von(0.3, samples=2).replace(family=blr.BlockDiagonalGaussian), wide_layer),
    "multimodal": Kind(
        lambda: blr.multimodal(0.5, components=3, bounds=BOX, memory=4, patience=4, temperature=1e-3),
        two_minima,
        steps=6,
    ),
    # Deep learning: averages of gradients and squares, at points that are the parameters themselves.
    "sgd": Kind(lambda: blr.sgd(0.1), regression),
    "sgd, momentum": Kind(lambda: blr.sgd(0.1, momentum=0.9), regression),
    "sgd, Nesterov": Kind(lambda: blr.sgd(0.1, momentum=0.9, nesterov=True), regression),
    "sgd, heavy ball": Kind(lambda: blr.sgd(0.1, momentum=0.9, heavy_ball=True), layer),
    "sgd, preconditioned": Kind(lambda: blr.sgd(0.1, precision=jnp.array([[2.0, 0.3], [0.3, 1.0]])), regression),
    "sgd, heavy ball in bfloat16": Kind(lambda: blr.sgd(0.1, momentum=0.9, heavy_ball=True), half_precision),
    "rmsprop": Kind(lambda: blr.rmsprop(0.01), regression),
    "rmsprop, flat prior": Kind(lambda: blr.rmsprop(0.01), flat_regression),
    "adam": Kind(lambda: blr.adam(0.01), regression),
    "adam, nested parameters": Kind(lambda: blr.adam(0.01), layer),
    "adam, other container": Kind(lambda: blr.adam(0.01), pair, like=lambda: Pair(jnp.zeros(()), jnp.zeros(()))),
    "adam, flat prior": Kind(lambda: blr.adam(0.01), flat_regression),
    "adam, float32": Kind(lambda: blr.adam(0.01), single_precision),
    "adam, bfloat16": Kind(lambda: blr.adam(0.01), half_precision),
    "adam, Vadam": Kind(
        lambda: blr.adam(0.01, damping="prior", initial_precision=20.0).replace(points=blr.MonteCarlo(1)), regression
    ),
    "adam, clipped": Kind(
        lambda: shaped(blr.adam(0.01), optax.clip_by_global_norm(0.3)), regression, like=optax.EmptyState
    ),
    "adam, averaged twice": Kind(
        lambda: shaped(blr.adam(0.01), optax.ema(0.8)), regression, like=lambda: optax.ema(0.8).init(jnp.zeros(2))
    ),
    "adam, batch statistics": Kind(lambda: blr.adam(0.01), normalized_layer),
    "adamw": Kind(lambda: blr.adamw(0.01, weight_decay=0.1), flat_regression),
    "dropout": Kind(lambda: blr.dropout(0.05, 0.5), columns),
    "dropout, learnt": Kind(lambda: blr.dropout(0.05, 0.5, keep_rate=0.02), columns),
    # Posteriors of networks, whose precision starts from what is measured, and as published.
    "ogn": Kind(lambda: blr.ogn(1e-3), regression, horizon=12),
    "ogn, published": Kind(lambda: blr.ogn(0.1, **PUBLISHED), regression),
    "oggn": Kind(lambda: blr.oggn(1e-3), regression, horizon=12),
    "oggn, full precision": Kind(
        lambda: blr.oggn(0.1, averaging=0.0, relative=False).replace(family=blr.Gaussian), regression
    ),
    "vogn": Kind(vogn, regression, horizon=12),
    "vogn, before its first step": Kind(vogn, regression, steps=0, horizon=12),
    "vogn, after it has measured": Kind(vogn, regression, steps=1, horizon=12),
    "vogn, without a plan": Kind(lambda: blr.vogn(1e-3, samples=2, antithetic=True), regression),
    "vogn, relative to what was measured": Kind(lambda: blr.vogn(0.05, relative=True), regression),
    "vogn, in its own units": Kind(lambda: blr.vogn(0.05, relative=False), regression),
    "vogn, from a given precision": Kind(
        vogn,
        lambda: regression(start=blr.DiagonalGaussian(jnp.array([0.3, -0.2]), jnp.array([4.0, 6.0]))),
        horizon=12,
    ),
    "vogn, published": Kind(lambda: blr.vogn(0.1, **PUBLISHED), regression),
    "vogn, annealed": Kind(lambda: blr.vogn(0.1, **PUBLISHED, temperature=lambda count: 0.2 + 0.1 * count), regression),
    "vogn, Kronecker factors": Kind(
        lambda: blr.vogn(0.1, relative=False).replace(family=blr.KroneckerGaussian), columns
    ),
    "vogn, batch statistics": Kind(lambda: blr.ivon(0.1, curvature=1.0, decay=0.99), normalized_layer),
    "voggn": Kind(lambda: blr.voggn(1e-3), regression, horizon=12),
    "voggn, published": Kind(lambda: blr.voggn(0.1, **PUBLISHED), regression),
    "ivon": Kind(ivon, regression, horizon=12),
    "ivon, past its first batches": Kind(ivon, regression, steps=22, horizon=40),
    "ivon, published": Kind(lambda: blr.ivon(0.1, curvature=1.0, decay=0.99999), regression),
    "ivon, mixture": Kind(lambda: blr.ivon(1e-3).replace(family=blr.Mixture), mixture_of(blr.DiagonalGaussian)),
    "slang": Kind(lambda: blr.slang(0.05, rank=1), regression),
    "slang, published": Kind(lambda: blr.slang(0.05, rank=1, **PUBLISHED), regression),
    "straight_through": Kind(lambda: blr.straight_through(0.1), signs),
    "straight_through, averaged": Kind(lambda: blr.straight_through(0.1, averaging=0.9), signs),
    "bayesbinn": Kind(lambda: blr.bayesbinn(0.01), signs),
    "bayesbinn, averaged": Kind(lambda: blr.bayesbinn(0.01, averaging=0.9), lambda: signs(blr.Bernoulli(jnp.zeros(2)))),
    # Inference: blocks of a model, local ones, and messages of single rows.
    "conjugate": Kind(lambda: blr.conjugate(), coin, steps=1),
    "conjugate, Markov chain": Kind(
        lambda: blr.Rule(blr.ExponentialFamily, blr.Exact(), blr.Gradient(), blr.Steps(0.5), blr.Backtracking()), path
    ),
    "laplace": Kind(lambda: blr.laplace(), whole_regression),
    "em": Kind(lambda: blr.em(order=["z", ("weights", "components")]), clusters()),
    "svi": Kind(lambda: blr.svi(0.5), clusters(BATCH)),
    "vmp": Kind(lambda: blr.vmp(), clusters()),
    "ncvmp": Kind(lambda: blr.ncvmp(), logistic_model),
    "ncvmp, Gaussian chain": Kind(lambda: blr.ncvmp(), counts_over_time, steps=2),
    "cvi": Kind(lambda: blr.cvi(0.5), logistic_model),
    "cvi, Gaussian process": Kind(lambda: blr.cvi(0.5), process, steps=2),
    "cvi, mixture block": Kind(lambda: blr.cvi(0.3), mixture_block, steps=2),
    "cvi, sites": Kind(lambda: blr.cvi(0.5, sites=True), logistic_model),
    "cvi, sites of mini-batches": Kind(lambda: blr.cvi(0.5, sites=True), lambda: logistic_model(batches=True), steps=4),
    "exponential_weights": Kind(lambda: blr.exponential_weights(0.5), experts),
    "exponential_weights, lazy": Kind(lambda: blr.exponential_weights(0.5, lazy=True), experts),
}


def key_of(step: int) -> Any:
    return jax.random.fold_in(jax.random.key(17), step)


def first_state(kind: Kind, rule: blr.Rule, task: Task) -> blr.State:
    key = jax.random.key(9) if rule.search is not None else None
    return rule.init(task.start, task.objective, key, horizon=kind.horizon)


def numbers(q: Any) -> dict[str, np.ndarray]:
    """All numbers of a member of a family, by the names under which it has them."""
    leaves = jax.tree_util.tree_leaves_with_path(q)
    return {jax.tree_util.keystr(path): np.asarray(leaf, float) for path, leaf in leaves}


@functools.cache
def compiled_step(make_rule: Callable[[], blr.Rule], make_task: Callable[[], Task]) -> tuple[Any, Task]:
    """A step of a rule, which kinds of the same rule and task share."""
    rule, task = make_rule(), make_task()
    return jax.jit(lambda state, data, key: rule.step(task.objective, state, data, key)), task


def advanced(kind: Kind, state: blr.State, steps: int) -> tuple[blr.State, float]:
    """The state after some more steps, and the objective before the last of them."""
    step, task = compiled_step(kind.rule, kind.task)
    objective = float("nan")
    for _ in range(steps):
        count = int(state.count)
        state, info = step(state, task.data(count), key_of(count))
        objective = float(info.objective)
    return state, objective
