r"""Ready-made factors: priors, Gaussians and their precisions, choices among components, likelihoods of outputs.

A factor is one term log f of a model's log-joint. Each function here names the blocks and the data that the term
touches and returns a `Factor` for `blr.Model(blocks, factors)`. The expectation E_q log f that the factor computes is
the equation in its docstring; the message to a block is its derivative in the block's expectation parameters.

Arguments that may be a block or a known value take either: a string is a block's name, a number or an array a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array

from .factor_graph import expected_log
from .factor_graph.factor import Factor, prior
from .factor_graph.linear_factor import LinearFactor
from .factor_graph.row_factor import ComponentFactor, GaussianRowFactor
from .factor_graph.sequence_factor import SequenceFactor
from .factor_graph.word_factor import WordFactor
from .points.base import Points
from .points.quadrature import Quadrature

BlockOrValue = str | float | Array
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


def normal(
    observed: str, *, mean: BlockOrValue = 0.0, precision: BlockOrValue = 1.0, joint: str | None = None
) -> Factor:
    r"""y ~ N(x, 1/t), entry by entry.

    $E\log f = ½\{E\log t − \log 2π − E t\,[(y − E x)^2 + \mathrm{Var}\,x]\}$; with a joint block
    $½\{E\log t − \log 2π − y^2E t + 2yE[tx] − E[tx^2]\}$.

    Args:
        observed: the data y.
        mean: x, a Gaussian block or a constant.
        precision: t, a gamma block or a constant.
        joint: a normal–gamma block over (x, t), instead of the two.

    >>> print(normal("y", mean="x", precision="t"), "and", normal("y", mean="x", precision=4.0))
    normal(x, t; y) and normal(x; y)
    >>> import bayesrule as blr
    >>> x = blr.DiagonalGaussian(jnp.zeros(1), jnp.ones(1))
    >>> model = blr.Model({"x": x}, {"prior": prior("x", x), "y": normal("y", mean="x", precision=4.0)})
    >>> q = blr.fit(blr.conjugate(), model, None, {"y": jnp.array([1.0, 1.5])}, steps=1).q["x"]
    >>> q.mean.tolist(), q.precision.tolist()                                           # 4 · 2.5 / 9, and 1 + 2 · 4
    ([1.1111], [9.0])
    """
    if joint is not None:
        return Factor(expected_log.normal_joint, joint, data=observed, label="normal")
    names, function = _by_role(expected_log.normal, mean=mean, precision=precision)
    return Factor(function, *names, data=observed, of="view", label="normal")


def gaussian(block: str, *, mean: BlockOrValue = 0.0, precision: BlockOrValue = 1.0) -> Factor:
    r"""The entries of a Gaussian block θ ~ N(x, 1/t), where x and t may be blocks: hierarchies, ARD.

    $E\log f = ½\{E\log t − \log 2π − E t\,[(E θ − E x)^2 + \mathrm{Var}\,θ + \mathrm{Var}\,x]\}$.

    Args:
        block: θ, a Gaussian block.
        mean: x, a Gaussian block or a constant.
        precision: t, a gamma block or a constant; it broadcasts against θ's entries.

    >>> import bayesrule as blr
    >>> weights, ard = blr.DiagonalGaussian(jnp.zeros(3), jnp.ones(3)), blr.Gamma(1e-3, 1e-3)
    >>> print(blr.Model({"w": weights, "t": ard}, {"w": gaussian("w", precision="t"), "t": prior("t", ard)}))
    Model with 2 blocks and 2 factors
      w  DiagonalGaussian[3]
      t  Gamma[]
      log-joint, the sum of
      w  E log gaussian(w, t)
      t  E log Gamma prior(t)
    """
    names, function = _by_role(expected_log.normal, value=block, mean=mean, precision=precision)
    return Factor(function, *names, of="view", label="gaussian")


def multivariate_normal(
    observed: str, *, mean: str | None = None, precision: BlockOrValue | None = None, joint: str | None = None
) -> Factor:
    r"""A row of y ~ N(x, Λ⁻¹).

    $E\log f = ½\{E\log|Λ| − D\log 2π − (y_n−Ex)^⊤EΛ(y_n−Ex) − \mathrm{tr}(EΛ\,\mathrm{Cov}\,x)\}$; with a joint block
    $½\{E\log|Λ| − D\log 2π − y_n^⊤EΛ\,y_n + 2y_n^⊤E[Λx] − E[x^⊤Λx]\}$. In float32 centre y first for the latter.

    Args:
        observed: the data y, (N, D). With a joint block single entries may be missing (NaN): they are integrated out,
            at their best q. Otherwise a row is observed or missing as a whole.
        mean: x, a Gaussian block.
        precision: Λ, a Wishart block or a constant.
        joint: a normal–Wishart block over (x, Λ), instead of the two.

    >>> print(multivariate_normal("y", mean="m", precision="P"), "or", multivariate_normal("y", joint="mP"))
    multivariate_normal(m, P; y) or multivariate_normal(mP; y)
    """
    label = "multivariate_normal"
    if joint is not None:
        return GaussianRowFactor(observed, joint, label)
    if mean is None or precision is None:
        raise ValueError("multivariate_normal takes mean= and precision=, or joint= a normal–Wishart block.")
    names, function = _by_role(expected_log.multivariate_normal, mean=mean, precision=precision)
    return Factor(function, *names, data=observed, of="view", label=label)


def linear(observed: str, predictors: Mapping[str, str | None], *, precision: BlockOrValue = 1.0) -> LinearFactor:
    r"""y_n ~ N(f_n, 1/t) with the linear predictor f_n = Σ x_n·w: linear regression.

    $E\log p(y_n \mid f_n) = ½\{E\log t − \log 2π − E t\,[(y_n − E f_n)^2 + \mathrm{Var}\,f_n]\}$.

    Args:
        observed: the data y.
        predictors: the name of each Gaussian block's inputs in the data, {"w": "x"}; None where the block's entries are
            the outputs themselves.
        precision: t, a gamma block or a constant, which may have an entry for each row.

    >>> import bayesrule as blr
    >>> w = blr.Gaussian(jnp.zeros(2), jnp.eye(2))
    >>> model = blr.Model({"w": w}, {"prior": prior("w", w), "y": linear("y", {"w": "x"}, precision=4.0)})
    >>> data = {"x": jnp.array([[1.0, 0.0], [1.0, 1.0]]), "y": jnp.array([1.0, 3.0])}
    >>> blr.fit(blr.conjugate(), model, None, data, steps=1).q["w"].precision.tolist()              # I + 4XᵀX
    [[9.0, 4.0], [4.0, 5.0]]
    """
    is_block = isinstance(precision, str)
    others = (precision,) if is_block else ()
    # The functions take (E log t, E t): a block's μ, which comes after y, or these constants.
    constants = () if is_block else (jnp.log(precision), jnp.asarray(precision))
    return LinearFactor(
        Partial(expected_log.linear_row, constants),
        predictors,
        *others,
        data=observed,
        points=Quadrature(32),
        closed=Partial(expected_log.linear, constants),
        conjugate=True,
        label="linear",
    )


def bilinear(observed: str, left: str, right: str, *, precision: BlockOrValue = 1.0) -> Factor:
    r"""y_nd ~ N(w_d·x_n, 1/t_d) with both x and w unknown: probabilistic PCA, factor analysis.

    $E\log f = ½\{E\log t_d − \log 2π − E t_d\,E(y_{nd} − w_d·x_n)^2\}$, where
    $E(y_{nd} − w_d·x_n)^2 = (y_{nd} − Ew_d·Ex_n)^2 + Ex_n^⊤V_{w_d}Ex_n + \mathrm{tr}\,V_{x_n}(V_{w_d} + Ew_d\,Ew_d^⊤)$
    with V the covariances under q.

    Args:
        observed: the data y, (N, D); (…, T, D) where `left` is a `BandedGaussian`, the states of chains.
        left: x, a Gaussian block with a row for each n. A `SharedGaussian` is fastest and, since all rows then have the
            same posterior covariance, exact; it needs all of y observed.
        right: w, a Gaussian block with a row for each d.
        precision: t, a gamma block or a constant: one number, or one for each d.

    >>> print(bilinear("y", "scores", "loadings", precision="noise"))
    bilinear(scores, loadings, noise; y)
    """
    names, function = _by_role(expected_log.bilinear, left=left, right=right, precision=precision)
    return Factor(function, *names, data=observed, of="view", label="bilinear")


# The states of a chain, a `BandedGaussian` block.


def dynamics(
    states: str, *, transition: BlockOrValue, precision: BlockOrValue = 1.0, lengths: str | None = None
) -> Factor:
    r"""x_{t+1} ~ N(Ax_t, diag 1/τ) for the states of a chain.

    With $a_i$ the i-th row of A, for each state i:
    $E\log f = ½\{(T−1)(E\log τ_i − \log 2π) − E τ_i\sum_t E(x_{t+1,i} − a_i·x_t)^2\}$.

    Args:
        states: x, a `BandedGaussian` block.
        transition: A (D, D), or a Gaussian block whose D plates are its rows.
        precision: τ, a gamma block (D,) or a constant.
        lengths: data that say how many of the steps each chain has. The states after these are padding, independent
            N(0, I).

    >>> print(dynamics("states", transition="A", precision="t"), "or", dynamics("states", transition=jnp.eye(2)))
    dynamics(states, A, t) or dynamics(states)
    """
    names, function = _by_role(expected_log.dynamics, states=states, transition=transition, precision=precision)
    return Factor(function, *names, data=() if lengths is None else lengths, of="view", label="dynamics")


def beginning(states: str, *, mean: Array, precision: Array) -> Factor:
    r"""The first state of a chain, x_0 ~ N(m, P⁻¹).

    $E\log f = ½\{\log|P| − D\log 2π − E(x_0 − m)^⊤P(x_0 − m)\}$.

    Args:
        states: x, a `BandedGaussian` block.
        mean: m (D,), known.
        precision: P (D, D), known.

    >>> print(beginning("states", mean=jnp.zeros(2), precision=jnp.eye(2)))
    beginning(states)
    """
    function = Partial(expected_log.first_state, jnp.asarray(mean, float), jnp.asarray(precision, float))
    return Factor(function, states, of="view", label="beginning")


# Choices.


def categorical(block: str, *, probabilities: str) -> Factor:
    r"""p(z | π) = π_z of a categorical block z.

    $E\log f = \sum_kq(z = k)\,E\log π_k$.

    Args:
        block: z, a categorical block.
        probabilities: π, a Dirichlet block.

    >>> print(categorical("z", probabilities="weights"))
    categorical(z, weights)
    """
    return Factor(expected_log.categorical, block, probabilities, of="view", label="categorical")


def category(observed: str, *, probabilities: str) -> Factor:
    r"""p(y | π) = π_y of an observed category.

    $E\log f = E\log π_{y_n}$.

    Args:
        observed: the data y, whole numbers 0, …, V − 1.
        probabilities: π, a Dirichlet block.

    >>> import bayesrule as blr
    >>> p = blr.Dirichlet(jnp.ones(3))
    >>> model = blr.Model({"p": p}, {"prior": prior("p", p), "y": category("y", probabilities="p")})
    >>> blr.fit(blr.conjugate(), model, None, {"y": jnp.array([0, 2, 2])}, steps=1).q["p"].concentration.tolist()
    [2.0, 1.0, 3.0]
    """
    return Factor(expected_log.category, probabilities, data=observed, label="category")


def choice(selector: str, components: Factor) -> Factor:
    r"""A categorical block z_n chooses, row by row, which component (plate) of another factor the row comes from.

    $E\log f = \sum_kq(z_n = k)\,E\log f(y_n \mid k)$.

    Args:
        selector: z, a (local) categorical block.
        components: a factor whose blocks have a plate for each k.

    >>> print(choice("z", normal("y", mean="centers", precision="t")))
    choice of normal(z, centers, t; y)
    """
    return ComponentFactor(expected_log.choice, selector, components, "choice")


def mixture(weights: str, components: Factor) -> Factor:
    r"""A mixture: `choice` with z summed out.

    $\log\sum_k \exp(E\logπ_k + E\log f(y_n \mid k))$ for each row. For any q of the other blocks this is the bound at
    the best q(z), and its derivatives are the messages with that q(z): no block for z is needed.

    Args:
        weights: π, a Dirichlet block.
        components: a factor whose blocks have a plate for each k.

    >>> print(mixture("weights", normal("y", mean="centers", precision="t")))
    mixture of normal(weights, centers, t; y)
    """
    return ComponentFactor(expected_log.mixture, weights, components, "mixture")


def hidden_markov(initial: str | Array, transitions: str | Array, components: Factor) -> SequenceFactor:
    r"""Sequences whose steps choose among components by a Markov chain, the hidden states z summed out.

    $\log \sum_z \exp[E\logπ_{z_1} + \sum_t E\log A_{z_t z_{t+1}} + \sum_t E\log f(y_t \mid z_t)]$ for each row (N, T,
    …) of the data, computed by the forward algorithm. As with `mixture` this is the bound at the best q(z): a step of
    `em` is one of Baum and Welch's algorithm, a step of `vmp` its variational version. Rows that end in NaN are shorter
    sequences.

    Args:
        initial: π, a Dirichlet block (K,), or known probabilities.
        transitions: A, a Dirichlet block with a plate for each state, (K, K), or known probabilities.
        components: any factor of one step whose blocks have K plates.

    >>> print(hidden_markov("initial", "transitions", poisson("y", rate="rates")))
    hidden_markov of poisson(initial, transitions, rates; y)
    """
    return SequenceFactor(initial, transitions, components)


def words(observed: str, words: str, *, documents: str, topics: str) -> Factor:
    r"""A document's words, each from a topic, which is summed out.

    $\sum_w n_w \log\sum_k \exp(E\logθ_k + E\logβ_{kw})$ for each document: the bound at every word's best q(topic).

    Args:
        observed: the data n, how often each word occurs, (N, L); 0 where a row is padded.
        words: the data that say which word it is, (N, L) numbers of the vocabulary, 0, …, V − 1. Others are an error,
            or a value of NaN inside a jitted function; where a row is padded any number will do.
        documents: θ, a (local) Dirichlet block over topics.
        topics: β, a Dirichlet block over words with a plate for each topic.

    >>> print(words("counts", "words", documents="shares", topics="topics"))
    words(shares, topics; words, counts)
    """
    return WordFactor(observed, words, documents=documents, topics=topics)


# Likelihoods of outputs that are linear in Gaussian blocks.


def likelihood(
    function: Callable[..., Any],
    observed: str,
    predictors: Mapping[str, str | None],
    *others: str,
    points: Points | None = None,
    label: str = "",
    said: str = "",
) -> LinearFactor:
    r"""Any log p(y | f) of outputs that are linear in Gaussian blocks, f_n = Σ x_n·w.

    $E\log p(y_n \mid f_n) = ∫ N(f \mid E f_n, \mathrm{Var}\,f_n)\log p(y_n \mid f)\,df$.

    Args:
        function: `function(f, y, *others)`, log p of one row; f is its output, or a vector of several.
        observed: the data y.
        predictors: the name of each Gaussian block's inputs in the data, {"w": "x"}; None where the block's entries are
            the outputs themselves.
        others: further blocks, which the function takes as their expectation parameters.
        points: how to integrate over f: `Quadrature(32)` by default, `MonteCarlo(n)`, or `Delta()`, which is Newton's
            or Laplace's method.
        label: the factor's name where a model is printed. (`said` is its former name.)

    >>> import bayesrule as blr
    >>> cauchy = likelihood(lambda f, y: -jnp.log1p((y - f) ** 2), "y", {"w": "x"}, label="cauchy")
    >>> print(cauchy)
    cauchy(x·w; y)  by Quadrature(32) over the outputs
    >>> print(likelihood(lambda f, y: -jnp.abs(y - f), "y", {"w": "x"}, points=blr.Quadrature(64)))
    likelihood(x·w; y)  by Quadrature(64) over the outputs
    """
    label = label or said or getattr(function, "__name__", "likelihood").replace("<lambda>", "likelihood")
    return LinearFactor(function, predictors, *others, data=observed, points=points or Quadrature(32), label=label)


def bernoulli_logit(
    observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None
) -> LinearFactor:
    r"""y ∈ {0, 1} with p(y = 1) = 1/(1 + e^{−f}): logistic regression.

    $E\log p(y_n \mid f_n) = −E\log(1 + e^{−(2y_n−1)f_n})$ over $f_n ∼ N(E f_n, \mathrm{Var}\,f_n)$, to nine digits at
    any variance unless `points` are given. Arguments as for `likelihood`.

    >>> import bayesrule as blr
    >>> print(bernoulli_logit("y", {"w": "x"}))
    bernoulli_logit(x·w; y)  in closed form
    >>> print(bernoulli_logit("y", {"w": "x"}, points=blr.Delta()))
    bernoulli_logit(x·w; y)  by Delta() over the outputs
    """
    return _through_outputs(
        expected_log.logit, expected_log.logit_expected, observed, predictors, points, "bernoulli_logit"
    )


def bernoulli_probit(
    observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None
) -> LinearFactor:
    r"""y ∈ {0, 1} with p(y = 1) = Φ(f): probit regression.

    $E\log p(y_n \mid f_n) = E\log Φ((2y_n−1)f_n)$ over $f_n ∼ N(E f_n, \mathrm{Var}\,f_n)$, accurate at any variance
    unless `points` are given. Arguments as for `likelihood`.

    >>> print(bernoulli_probit("y", {"w": "x"}))
    bernoulli_probit(x·w; y)  in closed form
    """
    return _through_outputs(
        expected_log.probit, expected_log.probit_expected, observed, predictors, points, "bernoulli_probit"
    )


def poisson_exp(observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None) -> LinearFactor:
    r"""Counts with rate e^f: Poisson regression.

    $E\log p(y_n \mid f_n) = y_nm_n − e^{m_n + v_n/2} − \log y_n!$ for $f_n ∼ N(m_n, v_n)$, exact unless `points` are
    given. Arguments as for `likelihood`.

    >>> print(poisson_exp("y", {"w": "x", "bias": "one"}))
    poisson_exp(x·w + one·bias; y)  in closed form
    """
    return _through_outputs(
        expected_log.poisson, expected_log.poisson_expected, observed, predictors, points, "poisson_exp"
    )


def volatility(observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None) -> LinearFactor:
    r"""y ~ N(0, e^f), with f its log-variance: stochastic volatility.

    $E\log p(y_n \mid f_n) = −½\{\log 2π + m_n + y_n^2e^{−m_n + v_n/2}\}$ for $f_n ∼ N(m_n, v_n)$, exact unless `points`
    are given. Arguments as for `likelihood`.

    >>> print(volatility("y", {"f": None}))
    volatility(f; y)  in closed form
    """
    return _through_outputs(
        expected_log.volatility, expected_log.volatility_expected, observed, predictors, points, "volatility"
    )


def softmax(observed: str, predictors: Mapping[str, str | None], *, points: Points | None = None) -> LinearFactor:
    r"""y ∈ {0, …, K−1} with p(y = k) ∝ e^{f_k}: multinomial regression.

    $E\log p(y_n \mid f_n) = E[f_{n,y_n} − \log\sum_ke^{f_{nk}}]$ over $f_n ∼ N(E f_n, \mathrm{Cov}\,f_n)$. The block is
    (K, P), and f a vector of K outputs. Arguments as for `likelihood`; the default grid has 8 nodes for each of the K
    outputs.

    >>> import bayesrule as blr
    >>> print(softmax("y", {"w": "x"}))
    softmax(x·w; y)  by Quadrature(8) over the outputs
    >>> print(softmax("y", {"w": "x"}, points=blr.QuasiMonteCarlo(64)))
    softmax(x·w; y)  by QuasiMonteCarlo(64) over the outputs
    """
    return likelihood(expected_log.softmax, observed, predictors, points=points or Quadrature(8), label="softmax")


def student_t(
    observed: str,
    predictors: Mapping[str, str | None],
    *,
    dof: float = 4.0,
    scale: float | Array = 1.0,
    points: Points | None = None,
) -> LinearFactor:
    r"""y = f + s·t_ν with Student-t noise: robust regression.

    $E\log p(y_n \mid f_n) = \mathrm{const} − \frac{ν+1}2E\log(1 + (y_n − f_n)^2/νs^2)$ over
    $f_n ∼ N(E f_n, \mathrm{Var}\,f_n)$, accurate at any variance unless `points` are given.

    Args:
        dof: ν, the degrees of freedom.
        scale: s.
        observed, predictors, points: as for `likelihood`.

    >>> print(student_t("y", {"w": "x"}, dof=4.0, scale=0.5))
    student_t(x·w; y)  in closed form
    """
    noise = jnp.asarray(dof, float), jnp.asarray(scale, float)
    function, expectation = (Partial(f, *noise) for f in (expected_log.student, expected_log.student_expected))
    return _through_outputs(function, expectation, observed, predictors, points, "student_t")


def _through_outputs(
    function: Callable[..., Array],
    expectation: Callable[..., Array],
    observed: str,
    predictors: Mapping[str, str | None],
    points: Points | None,
    label: str,
) -> LinearFactor:
    """A likelihood of linear outputs whose expectation over these is known, and is used unless points are given."""
    closed = expectation if points is None else None
    return LinearFactor(
        function, predictors, data=observed, points=points or Quadrature(32), closed=closed, label=label
    )


# Counts, and spins.


def poisson(observed: str, *, rate: str) -> Factor:
    r"""Counts y ~ Poisson(r).

    $E\log f = yE\log r − E r − \log y!$.

    Args:
        observed: the data y.
        rate: r, a gamma block.

    >>> import bayesrule as blr
    >>> r = blr.Gamma(2.0, 1.0)
    >>> model = blr.Model({"r": r}, {"prior": prior("r", r), "y": poisson("y", rate="r")})
    >>> q = blr.fit(blr.conjugate(), model, None, {"y": jnp.array([3.0, 5.0])}, steps=1).q["r"]
    >>> float(q.shape), float(q.rate)
    (10.0, 3.0)
    """
    return Factor(expected_log.poisson_gamma, rate, data=observed, label="poisson")


def bernoulli(observed: str, *, probability: str) -> Factor:
    r"""y ∈ {0, 1} with p(y = 1) = p.

    $E\log f = yE\log p + (1 − y)E\log(1 − p)$.

    Args:
        observed: the data y.
        probability: p, a beta block.

    >>> import bayesrule as blr
    >>> p = blr.Beta(1.0, 1.0)
    >>> model = blr.Model({"p": p}, {"prior": prior("p", p), "y": bernoulli("y", probability="p")})
    >>> q = blr.fit(blr.conjugate(), model, None, {"y": jnp.array([1.0, 1.0, 0.0])}, steps=1).q["p"]
    >>> float(q.a), float(q.b)
    (3.0, 2.0)
    """
    return Factor(expected_log.bernoulli_beta, probability, data=observed, label="bernoulli")


def boltzmann(block: str, couplings: Array, fields: Array) -> Factor:
    r"""½sᵀJs + hᵀs of spins s ∈ {−1, 1}: an Ising model, unnormalised, so that a bound with it is one on log Z.

    $E\log f = ½μ^⊤Jμ + h^⊤μ$ with $μ = E s$.

    Args:
        block: s, a `Bernoulli` block.
        couplings: J, symmetric; its diagonal is ignored.
        fields: h.

    >>> import bayesrule as blr, math
    >>> pair = boltzmann("s", jnp.array([[0.0, 0.5], [0.5, 0.0]]), jnp.array([0.2, 0.0]))
    >>> model = blr.Model({"s": blr.Bernoulli(jnp.zeros(2))}, {"energy": pair})
    >>> result = blr.fit(blr.vmp(), model, None, steps=50, tolerance=1e-8)
    >>> round(result.bound, 3), round(math.log(4 * math.cosh(0.2) * math.cosh(0.5)), 3)        # the bound, and log Z
    (1.413, 1.526)
    """
    couplings = jnp.asarray(couplings)
    couplings = couplings - jnp.diag(jnp.diag(couplings))
    return Factor(Partial(expected_log.boltzmann, couplings, jnp.asarray(fields)), block, label="boltzmann")


def _by_role(function: Callable[..., Array], **arguments: BlockOrValue) -> tuple[list[str], expected_log.ByRole]:
    """The names of the arguments that are blocks, and the function with the values of the others."""
    blocks = {role: value for role, value in arguments.items() if isinstance(value, str)}
    constants = {role: jnp.asarray(value, float) for role, value in arguments.items() if not isinstance(value, str)}
    if not blocks:
        raise ValueError(
            f"A factor needs at least one block, and all of {list(arguments)} are constants: name a block for one."
        )
    return list(blocks.values()), expected_log.ByRole(function, tuple(blocks), constants)
