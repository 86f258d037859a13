"""Ready-made factors: priors, Gaussians and their precisions, choices among components, likelihoods of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array

from .factor_graph import expected_log as logs
from .factor_graph.factor import Factor, prior
from .factor_graph.linear_factor import LinearFactor
from .factor_graph.sequence_factor import SequenceFactor
from .points.base import Points
from .points.quadrature import Quadrature

Given = str | float | Array
"""A block's name, or a known number or array."""

__all__ = [
    "beginning",
    "bernoulli",
    "bernoulli_logit",
    "bernoulli_probit",
    "bilinear",
    "boltzmann",
    "categorical",
    "category",
    "choice",
    "dynamics",
    "gaussian",
    "hidden_markov",
    "likelihood",
    "linear",
    "mixture",
    "multivariate_normal",
    "normal",
    "poisson",
    "poisson_exp",
    "prior",
    "softmax",
    "student_t",
    "volatility",
    "words",
]


# Gaussians: elementwise, multivariate, linear.


def normal(observed: str, *, mean: Given = 0.0, precision: Given = 1.0, joint: str | None = None) -> Factor:
    """y ~ N(mean, 1/precision), entry by entry; `joint` is a normal–gamma block of both."""
    if joint is not None:
        return Factor(logs.normal_joint, joint, data=observed, said="normal")
    names, known = _named(mean=mean, precision=precision)
    return Factor(
        logs.Bound(logs.normal, tuple(names), known), *names.values(), data=observed, of="seen", said="normal"
    )


def gaussian(block: str, *, mean: Given = 0.0, precision: Given = 1.0) -> Factor:
    """The entries of a Gaussian block ~ N(mean, 1/precision), which may be blocks themselves: hierarchies, ARD."""
    names, known = _named(value=block, mean=mean, precision=precision)
    return Factor(logs.Bound(logs.normal, tuple(names), known), *names.values(), of="seen", said="gaussian")


def multivariate_normal(
    observed: str, *, mean: str | None = None, precision: Given | None = None, joint: str | None = None
) -> Factor:
    """A row of y ~ N(mean, Λ⁻¹): `mean` a Gaussian block, `precision` a Wishart one, `joint` a normal–Wishart one."""
    if joint is not None:
        said = "multivariate_normal"
        return Factor(logs.multivariate_joint, joint, data=observed, features=logs.products, said=said)
    if mean is None or precision is None:
        raise ValueError("multivariate_normal takes mean= and precision=, or joint= a normal–Wishart block.")
    names, known = _named(mean=mean, precision=precision)
    function = logs.Bound(logs.multivariate, tuple(names), known)
    return Factor(function, *names.values(), data=observed, of="seen", said="multivariate_normal")


def linear(observed: str, predictors: Mapping[str, str | None], *, precision: Given = 1.0) -> LinearFactor:
    """y_n ~ N(Σ x_n·w, 1/precision): linear regression. `predictors` names each block's inputs, {"w": "x"}."""
    others = (precision,) if isinstance(precision, str) else ()
    known = () if isinstance(precision, str) else (jnp.log(precision), jnp.asarray(precision))
    # The precision comes as a block's μ = (E log t, E t), or is known.
    row, closed = Partial(logs.linear_row, known), Partial(logs.linear, known)
    return LinearFactor(
        row,
        predictors,
        *others,
        data=observed,
        points=Quadrature(32),
        closed=closed,
        conjugate=True,
        said="linear",
    )


def bilinear(observed: str, left: str, right: str, *, precision: Given = 1.0) -> Factor:
    """y_nd ~ N(w_d·x_n, 1/precision) with both unknown: `left` has a row for each n, `right` for each d (PCA).

    A `SharedGaussian` as `left` is fastest, and exact where all of y is observed, which it asks for. With the states of
    chains as `left`, a `BandedGaussian`, y is (…, T, M).
    """
    names, known = _named(left=left, right=right, precision=precision)
    return Factor(
        logs.Bound(logs.bilinear, tuple(names), known), *names.values(), data=observed, of="seen", said="bilinear"
    )


# The states of a chain, a `BandedGaussian` block.


def dynamics(states: str, *, transition: Given, precision: Given = 1.0, lengths: str | None = None) -> Factor:
    """x_{t+1} ~ N(Ax_t, 1/precision): `transition` is a Gaussian block of D rows, or A itself; `precision` D gammas.

    `lengths` names data that say how many of the steps each chain has; what follows is filling, N(0, I) by itself.
    """
    names, known = _named(states=states, transition=transition, precision=precision)
    function, data = logs.Bound(logs.dynamics, tuple(names), known), () if lengths is None else lengths
    return Factor(function, *names.values(), data=data, of="seen", said="dynamics")


def beginning(states: str, *, mean: Array, precision: Array) -> Factor:
    """The first state of a chain ~ N(mean, Λ⁻¹), both known."""
    function = Partial(logs.beginning, jnp.asarray(mean, float), jnp.asarray(precision, float))
    return Factor(function, states, of="seen", said="beginning")


# Choices.


def categorical(block: str, *, probabilities: str) -> Factor:
    """A categorical block's p(z | π), π a Dirichlet block."""
    return Factor(logs.categorical, block, probabilities, of="seen", said="categorical")


def category(observed: str, *, probabilities: str) -> Factor:
    """An observed category's p(y | π), π a Dirichlet block."""
    return Factor(logs.category, probabilities, data=observed, said="category")


def choice(selector: str, components: Factor) -> Factor:
    """A categorical block chooses, row by row, which component (plate) of another factor the row is from."""
    function = Partial(logs.choice, components)
    return _of_components(function, selector, components, "choice")


def mixture(weights: str, components: Factor) -> Factor:
    r"""`choice` with the choices summed out where they are best: $\sum_n \log\sum_k \exp(E\logπ_k + E\log f_{nk})$.

    For any q of the others this is the bound at the best q(z), and its derivatives are the messages with that q(z): a
    sweep that updates z first needs no block for it. `weights` is a Dirichlet block.
    """
    return _of_components(Partial(logs.mixture, components), weights, components, "mixture")


def hidden_markov(initial: str | Array, transitions: str | Array, components: Factor) -> SequenceFactor:
    r"""Sequences whose steps choose among components by a Markov chain, the hidden states summed out where best.

    $\log \sum_z \exp[E\logπ_{z_1} + \sum_t E\log A_{z_t z_{t+1}} + \sum_t E\log f(y_t \mid z_t)]$ for each row
    (N, T, …) of the data. As with `mixture`, a step with `em` is one of Baum and Welch's, one with `vmp` a variational
    one with the best q(z). `initial` is a Dirichlet block (K,) and `transitions` one with a plate for each state,
    (K, K), or known probabilities; `components` is any factor whose blocks have K plates. Rows that end in NaN are
    shorter sequences.
    """
    return SequenceFactor(initial, transitions, components)


def _of_components(function: Any, first: str, components: Factor, said: str) -> Factor:
    how = {"data": components.data, "features": components.features, "said": f"{said} of {components.said}"}
    return Factor(function, first, *components.blocks, of="seen", **how)


def words(observed: str, words: str, *, documents: str, topics: str) -> Factor:
    r"""A document's words, each from a topic, which is summed out: $\sum_w n_w \log\sum_k e^{E\logθ_k + E\logβ_{kw}}$.

    `words` names the data's word numbers, one row for each document, and `observed` how often each occurs, 0 where a
    row is filled up. `documents` is a (local) Dirichlet block over topics, `topics` one over words for each topic.
    """
    return Factor(logs.words, documents, topics, data=(words, observed), said="words")


# Likelihoods of outputs that are linear in Gaussian blocks.


def likelihood(
    function: Callable[..., Any],
    observed: str,
    predictors: Mapping[str, str | None],
    *others: str,
    points: Points | None = None,
    said: str = "",
) -> LinearFactor:
    """Any log p(y | f): `function(f, y)` of one row, f = Σ x_n·w its output (or outputs), by a grid over f."""
    said = said or getattr(function, "__name__", "likelihood").replace("<lambda>", "likelihood")
    return LinearFactor(function, predictors, *others, data=observed, points=points or Quadrature(32), said=said)


def bernoulli_logit(
    observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None
) -> LinearFactor:
    """y ∈ {0, 1}, p(y = 1) = 1/(1 + e^{−f}): logistic regression."""
    return likelihood(logs.logit, observed, predictors, points=points, said="bernoulli_logit")


def bernoulli_probit(
    observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None
) -> LinearFactor:
    """y ∈ {0, 1}, p(y = 1) = Φ(f)."""
    return likelihood(logs.probit, observed, predictors, points=points, said="bernoulli_probit")


def poisson_exp(observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None) -> LinearFactor:
    """Counts with rate e^f; its expectation y m − e^{m + v/2} − log y! is exact unless `points` are given."""
    closed = logs.poisson_expected if points is None else None
    return LinearFactor(
        logs.poisson, predictors, data=observed, points=points or Quadrature(32), closed=closed, said="poisson_exp"
    )


def volatility(observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None) -> LinearFactor:
    """y ~ N(0, e^f), f its log-variance; the expectation has y² e^{−m + v/2}, exact unless `points` are given."""
    closed = logs.volatility_expected if points is None else None
    return LinearFactor(
        logs.volatility, predictors, data=observed, points=points or Quadrature(32), closed=closed, said="volatility"
    )


def softmax(observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None) -> LinearFactor:
    """y ∈ {0, …, K−1}, p(y = k) ∝ e^{f_k}: the block is (K, P), and f a vector of K outputs."""
    return likelihood(logs.softmax, observed, predictors, points=points or Quadrature(8), said="softmax")


def student_t(
    observed: str,
    predictors: Mapping[str, str | None],
    *,
    dof: float = 4.0,
    scale: float | Array = 1.0,
    points: Points | None = None,
) -> LinearFactor:
    """y = f + scale·t with Student-t noise: robust regression."""
    function = Partial(logs.student, jnp.asarray(dof, float), jnp.asarray(scale, float))
    return likelihood(function, observed, predictors, points=points, said="student_t")


# Counts, and spins.


def poisson(observed: str, *, rate: str) -> Factor:
    """Counts ~ Poisson(rate), the rate a gamma block."""
    return Factor(logs.counts, rate, data=observed, said="poisson")


def bernoulli(observed: str, *, probability: str) -> Factor:
    """y ∈ {0, 1} with the probability of a beta block."""
    return Factor(logs.tosses, probability, data=observed, said="bernoulli")


def boltzmann(block: str, couplings: Array, fields: Array) -> Factor:
    """½sᵀJs + hᵀs of a `Bernoulli` block of spins s ∈ {−1, 1}: an Ising model. J is symmetric, its diagonal ignored.

    Unnormalised: a bound with it is one on log Z.
    """
    couplings = jnp.asarray(couplings)
    couplings = couplings - jnp.diag(jnp.diag(couplings))
    return Factor(Partial(logs.boltzmann, couplings, jnp.asarray(fields)), block, said="boltzmann")


def _named(**given: Given) -> tuple[dict[str, str], dict[str, Array]]:
    """Which arguments are blocks, and which are known."""
    names = {role: value for role, value in given.items() if isinstance(value, str)}
    known = {role: jnp.asarray(value, float) for role, value in given.items() if not isinstance(value, str)}
    if not names:
        raise ValueError(f"A factor touches a block: name one of {list(given)}.")
    return names, known
