r"""Hidden Markov models with Gaussian, Poisson, categorical or any factor's emissions, and inference of their states.

    y = sequences([first, second])                                  # of different lengths; NaN is a missing value
    model = gaussian_hmm(y, states=3)
    result = blr.fit(blr.em(order="parallel"), model, None, {"y": y}, steps=100)    # Baum and Welch's algorithm
    probabilities = smooth(*hidden(model, result.q, y))             # q(z_t = k), (N, T, K)

With `priors="default"` the same model is a Bayesian one, for `vmp(order="parallel")`, and for `svi(rate,
order="parallel")` with `batch_size=` sequences at a time. All blocks move at once: the factor sums the states out (at
the best q(z), see `factors.hidden_markov`), so that one step is a full iteration of the algorithm.

`filter`, `smooth`, `viterbi`, `log_likelihood` and `forecast` are functions of three arrays, which `hidden` computes
from a fit: initial probabilities (K,), transitions (K, K) from the row's state to the column's, and the log-likelihood
of every step under every state, (T, K) or (N, T, K).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .. import factors
from ..factor_graph.block_view import batch_shape
from ..factor_graph.data import Rows
from ..factor_graph.factor import Factor
from ..factor_graph.model import Model
from ..factor_graph.sequence_factor import SequenceFactor
from ..families.base import ExponentialFamily
from ..families.dirichlet import Dirichlet
from ..families.gamma import Gamma
from ..families.product import Product
from ..numerics import hmm as markov
from ..numerics.checks import positive_int
from ..numerics.programs import compiled
from ..numerics.random import Key
from .sequences import sequences
from .starts.clusters import (
    Assignments,
    Priors,
    assign_to_clusters,
    cluster_moments,
    gaussian_components,
    k_means,
    pooled_moments,
    random_categories,
    variance_floor,
    with_priors,
)

__all__ = [
    "Hidden",
    "categorical_hmm",
    "filter",
    "forecast",
    "gaussian_hmm",
    "hidden",
    "hmm_of",
    "log_likelihood",
    "poisson_hmm",
    "smooth",
    "viterbi",
]

# Models.


def hmm_of(
    components: Factor,
    blocks: Mapping[str, ExponentialFamily],
    *,
    initial: Any = None,
    transitions: Any = None,
    priors: Mapping[str, ExponentialFamily] | None = None,
) -> Model:
    r"""A hidden Markov model with any factor of one step as its emissions.

    Args:
        components: a factor whose blocks have a plate for each state: a ready-made one, E log f as a function of the
            blocks' μ, or log f of their values with points.
        blocks: the factor's blocks by name, each with the member that it starts from.
        initial: the probabilities (K,) of the first state from which the chain starts; equal ones by default.
        transitions: the probabilities (K, K) of going from the row's state to the column's, from which the chain
            starts; by default it stays half of the time and else moves to any state.
        priors: members by block, also for "initial" and "transitions".

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> def log_laplace(center, y):                                 # a value for each state, (K, 1), and y (N·T,)
    ...     return -jnp.abs(y - center) - jnp.log(2.0)
    >>> components = blr.Factor(log_laplace, "center", data="y", points=blr.Quadrature(5))
    >>> print(hmm_of(components, {"center": blr.Gaussian(jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1, 1)))}))
    Model with 3 blocks and 1 factors
      initial      Dirichlet[2]
      transitions  Dirichlet[2, 2]
      center       Gaussian[2, 1]
      log-joint, the sum of
      y            E log hidden_markov of log_laplace(initial, transitions, center; y)
    """
    plates = {name: batch_shape(block) for name, block in blocks.items()}
    counts = {shape[:1] for shape in plates.values()}
    if len(counts) != 1 or counts == {()}:
        raise ValueError(
            f"Every block of the components needs a plate for each state, as many in all of them, got plates {plates}."
        )
    states = counts.pop()[0]
    first = jnp.full(states, 1 / states) if initial is None else jnp.asarray(initial, float)
    matrix = 0.5 * (jnp.eye(states) + 1 / states) if transitions is None else jnp.asarray(transitions, float)
    if first.shape != (states,) or matrix.shape != (states, states):
        raise ValueError(
            f"The blocks have {states} states, so initial= is ({states},) and transitions= ({states}, {states}), got "
            f"{first.shape} and {matrix.shape}."
        )
    chain = {"initial": Dirichlet(1 + first), "transitions": Dirichlet(1 + matrix)}
    terms = {f"prior of {name}": factors.prior(name, prior) for name, prior in (priors or {}).items()}
    return _model(components, {**chain, **blocks}, terms)


def gaussian_hmm(
    y: Any,
    states: int,
    *,
    covariance: Literal["full", "diag"] = "full",
    priors: Priors = "flat",
    floor: float = 0.0,
    key: Key | None = None,
    start: int = 0,
) -> Model:
    r"""$y_t \mid z_t = k ∼ N(m_k, Λ_k^{−1})$, with full or diagonal precisions Λ_k in the block "states".

    Fit with `data={"y": sequences(y)}`. Flat priors are maximum likelihood, for `em`. The default ones, for `vmp` and
    `svi`, are Dirichlet(1) for the chain and, with m and S the mean and the variances of all steps, a normal–Wishart of
    mean m, count 0.1, D + 2 degrees of freedom and E Λ = S⁻¹ (for each entry a normal–gamma of shape 3/2). In float32
    subtract the mean of y first.

    Args:
        y: one series (T, D) or (T,), many (N, T, D), or a list. The start is a k-means clustering of its steps.
        states: the number of states K.
        covariance: "full", or "diag": the entries of a step are then independent. Any entry may be missing; with
            "full" the others of its step say what it may have been (it is integrated out).
        priors: "flat", "default", or a dict of members for some blocks.
        floor: as for `gaussian_mixture`.
        key: a random key, for k-means.
        start: as for `gaussian_mixture`.

    >>> import bayesrule as blr, jax
    >>> steps = jax.random.normal(jax.random.key(0), (200, 2)).at[100:].add(4.0)
    >>> model = gaussian_hmm(steps, 2)
    >>> result = blr.fit(blr.em(order="parallel"), model, None, {"y": sequences(steps)}, steps=10)
    >>> sorted(round(float(m[0])) for m in result.q["states"].mean["mean"])
    [0, 4]
    """
    rows = sequences(y)
    assignments = assign_to_clusters(rows, states, covariance, key, start)
    components, flat, default = gaussian_components(rows, assignments, covariance, "states")
    return _with_priors(components, assignments, flat, priors, default, variance_floor("states", floor))


def poisson_hmm(y: Any, states: int, *, priors: Priors = "flat", key: Key | None = None, start: int = 0) -> Model:
    """Counts y_t | z_t = k ∼ Poisson(rate_k), entry by entry; rates (K, D) in the block "states".

    Arguments as for `gaussian_hmm`. The default prior of a rate is a gamma of shape 1 with the mean of all counts.

    >>> poisson_hmm([0.0, 1.0, 9.0, 8.0, 11.0, 0.0], 2).blocks["states"].mode().shape
    (2, 1)
    """
    rows = sequences(y)
    counts = np.asarray(rows)[~np.isnan(np.asarray(rows))]
    if np.any(counts < 0) or np.any(counts != np.round(counts)):
        raise ValueError("Poisson counts are 0, 1, 2, …, and y has entries that are negative or not whole numbers.")
    if not np.any(counts):
        raise ValueError("All counts are 0, so that no state differs from another: there is nothing to fit.")
    # The variance of a Poisson count's square root does not grow with its rate, so k-means is not ruled by large
    # counts.
    assignments = k_means(jnp.sqrt(rows), states, key, start)
    weight, mean, _ = (jnp.asarray(x, float) for x in cluster_moments(rows, assignments, False))
    flat = Gamma(1 + weight[:, None] * mean, weight[:, None])
    default = Gamma(jnp.ones(()), 1 / jnp.maximum(pooled_moments(rows)[0], 1e-6))
    return _with_priors(factors.poisson("y", rate="states"), assignments, flat, priors, default)


def categorical_hmm(
    y: Any, states: int, *, categories: int | None = None, priors: Priors = "flat", key: Key | None = None
) -> Model:
    """Categories y_t | z_t = k ∼ probabilities (K, V) in the block "states".

    Fit with `data={"y": sequences(y, scalar=True)}`. The default prior is Dirichlet(1).

    Args:
        y: (T,), (N, T) or a list of categories 0, …, V − 1, NaN where missing.
        states: the number of states K.
        categories: V, by default the largest category plus 1.
        priors: as for `gaussian_hmm`.
        key: a random key. The start is random: each state has the categories' frequencies, perturbed.

    >>> categorical_hmm([0, 1, 1, 0, 2], 2).blocks["states"].mode().shape
    (2, 3)
    """
    rows = np.asarray(sequences(y, scalar=True))
    labels = rows[~np.isnan(rows)]
    too_large = categories is not None and np.any(labels >= categories)
    if np.any(labels != np.round(labels)) or np.any(labels < 0) or too_large:
        last = "" if categories is None else f", …, {categories - 1}"
        raise ValueError(f"Categories are whole numbers 0, 1{last}, and NaN where missing: y has others.")
    assignments, counts = random_categories(rows, states, categories, key)
    components, default = factors.category("y", probabilities="states"), Dirichlet(jnp.ones(counts.shape[1]))
    return _with_priors(components, assignments, _from_counts(counts), priors, default)


def _from_counts(counts: np.ndarray) -> Dirichlet:
    return Dirichlet(1 + jnp.asarray(counts, float))


def _with_priors(
    components: Factor,
    assignments: Assignments,
    flat: ExponentialFamily,
    priors: Priors,
    default: ExponentialFamily,
    extra: Mapping[str, Factor] = MappingProxyType({}),
) -> Model:
    """The model whose blocks start from the clusters' counts and from their priors.

    Args:
        components: the factor of one step, with the block "states".
        assignments: which state each step starts in.
        flat: the member that "states" starts from with flat priors.
        priors: the user's argument.
        default: the default prior of "states".
        extra: further factors.
    """
    states = len(assignments.initial)
    blocks = {
        "initial": _from_counts(assignments.initial),
        "transitions": _from_counts(assignments.transitions),
        "states": flat,
    }
    defaults = {"initial": Dirichlet(jnp.ones(states)), "transitions": Dirichlet(jnp.ones(states)), "states": default}
    blocks, terms = with_priors(blocks, defaults, priors)
    return _model(components, blocks, {**terms, **extra})


def _model(components: Factor, blocks: dict[str, ExponentialFamily], terms: dict[str, Factor]) -> Model:
    chain = factors.hidden_markov("initial", "transitions", components)
    return Model(blocks, {**terms, components.data[-1]: chain})


# States.


class Hidden(NamedTuple):
    """The chain and the likelihoods of its states: the arguments of `smooth` and the others."""

    initial: Float[Array, " K"]
    transitions: Float[Array, "K K"]
    log_likelihoods: Float[Array, "*N T K"]


def hidden(model: Model, q: Product, y: Any) -> Hidden:
    """The chain's probabilities at q's means, and E log f of every step under every state, 0 where it is missing.

    Of a step that is missing in part it is that of the observed entries, the others being integrated out. (Under `jit`,
    where it is not known which these are, it is NaN for a step with dependent entries: see `Model.for_data`.)

    Args:
        model: a model with a `hidden_markov` factor.
        q: its fitted q. With `em` the means are the estimates themselves.
        y: the rows as in the fit, or all of its data by name.

    >>> import bayesrule as blr
    >>> y = [0.0, 1.0, 9.0, 8.0, 11.0, 0.0]
    >>> model = poisson_hmm(y, 2)
    >>> chain = hidden(model, blr.Product(model.blocks), sequences(y))          # where a fit would start
    >>> path, _ = viterbi(*chain)
    >>> [int(state) for state in path[0] != path[0, 0]]
    [0, 0, 1, 1, 1, 0]
    """
    name, factor = next(((n, f) for n, f in model.factors.items() if isinstance(f, SequenceFactor)), ("", None))
    if factor is None:
        raise ValueError("hidden() needs a model with a hidden_markov factor, and this one has none.")
    data = y if isinstance(y, dict) else {factor.data[-1]: y}
    return _hidden(*model.for_data(data), q, name)


@compiled(static="name")
def _hidden(model: Model, data: dict[str, Any], q: Product, name: str) -> Hidden:
    factor: Any = model.factors[name]
    views = model.views(q)
    arrays, observed = model.observations(name, Rows(data))
    roles = zip(factor.chain_blocks, ("initial", "transitions"), strict=True)
    initial, transitions = (factor.constants[role] if block is None else q[block].mean for block, role in roles)
    return Hidden(initial, transitions, factor.log_likelihoods(views, arrays, observed)[0])


def log_likelihood(initial: Any, transitions: Any, log_likelihoods: Any) -> Float[Array, "*N"]:
    r"""$\log p(y_{1:T}) = \log \sum_z p(z) \prod_t f(y_t \mid z_t)$ of every sequence, by the forward algorithm.

    Args:
        initial: p(z₁), (K,).
        transitions: p(z_{t+1} | z_t), (K, K), a row for each z_t.
        log_likelihoods: log f(y_t | z_t = k), (…, T, K); 0 where y_t is missing.

    >>> import jax.numpy as jnp
    >>> likelihoods = jnp.array([[0.9, 0.2], [0.9, 0.2], [0.1, 0.8]])
    >>> float(log_likelihood([0.5, 0.5], [[0.7, 0.3], [0.3, 0.7]], jnp.log(likelihoods)))
    -2.1166
    """
    return markov.log_normalizer(*_logs(initial, transitions, log_likelihoods), None)


def filter(initial: Any, transitions: Any, log_likelihoods: Any) -> Float[Array, "*N T K"]:
    r"""$p(z_t = k \mid y_{1:t})$.

    Arguments as for `log_likelihood`.

    >>> import jax.numpy as jnp
    >>> likelihoods = jnp.array([[0.9, 0.2], [0.9, 0.2], [0.1, 0.8]])
    >>> filter([0.5, 0.5], [[0.7, 0.3], [0.3, 0.7]], jnp.log(likelihoods))[:, 0].tolist()
    [0.8182, 0.8834, 0.1907]
    """
    return jnp.exp(markov.filter_forward(*_logs(initial, transitions, log_likelihoods)).log_probabilities)


def smooth(initial: Any, transitions: Any, log_likelihoods: Any) -> Float[Array, "*N T K"]:
    r"""$p(z_t = k \mid y_{1:T})$, by forward–backward. After the last observation it is the forecast.

    >>> import jax.numpy as jnp
    >>> likelihoods = jnp.array([[0.9, 0.2], [0.9, 0.2], [0.1, 0.8], [0.9, 0.2], [0.9, 0.2]])
    >>> smooth([0.5, 0.5], [[0.7, 0.3], [0.3, 0.7]], jnp.log(likelihoods))[:, 0].tolist()
    [0.8673, 0.8204, 0.3075, 0.8204, 0.8673]
    """
    return markov.smooth(*_logs(initial, transitions, log_likelihoods)).marginals


def viterbi(
    initial: Any, transitions: Any, log_likelihoods: Any, lengths: Any = None
) -> tuple[Int[Array, "*N T"], Float[Array, "*N"]]:
    r"""The most probable path $\arg\max_z p(z, y_{1:T})$, and the log of its joint probability.

    `lengths` (N,) says how many steps each sequence has: the path is −1 after them.

    Other arguments as for `log_likelihood`.

    >>> import jax.numpy as jnp
    >>> likelihoods = jnp.array([[0.9, 0.2], [0.9, 0.2], [0.01, 0.8]])
    >>> path, log_probability = viterbi([0.5, 0.5], [[0.7, 0.3], [0.3, 0.7]], jnp.log(likelihoods))
    >>> path.tolist(), float(jnp.exp(log_probability))                          # ½ · 0.9 · 0.7 · 0.9 · 0.3 · 0.8
    ([0, 0, 1], 0.06804)
    """
    best = markov.best_path(*_logs(initial, transitions, log_likelihoods), lengths=lengths)
    return best.states, best.log_probability


def forecast(initial: Any, transitions: Any, log_likelihoods: Any, steps: int) -> Float[Array, "*N S K"]:
    r"""$p(z_{T+s} = k \mid y_{1:T})$ for s = 1, …, `steps`.

    Other arguments as for `log_likelihood`.

    >>> import jax.numpy as jnp
    >>> forecast([1.0, 0.0], [[0.7, 0.3], [0.3, 0.7]], jnp.zeros((1, 2)), 3)[:, 0].tolist()       # from z₁ = 0
    [0.7, 0.58, 0.532]
    """
    steps = positive_int("steps", steps, meaning="how far to look ahead")
    matrix = jnp.asarray(transitions, float)
    last = filter(initial, transitions, log_likelihoods)[..., -1, :]
    advance = lambda probabilities, _: (probabilities @ matrix,) * 2
    return jnp.moveaxis(jax.lax.scan(advance, last, None, length=steps)[1], 0, -2)


def _logs(initial: Any, transitions: Any, log_likelihoods: Any) -> Sequence[Array]:
    """The logarithms of the chain's probabilities, and the log-likelihoods, as arrays."""
    initial, transitions, likelihoods = (jnp.asarray(x, float) for x in (initial, transitions, log_likelihoods))
    # log 0 = −∞ has an infinite derivative: under this branch a probability of 0 has the derivative 0.
    safe_log = lambda p: jnp.where(p > 0, jnp.log(p + (p == 0)), -jnp.inf)
    return safe_log(initial), safe_log(transitions), likelihoods
