"""Deep-learning algorithms as the rule: Table 1's middle block.

Rates are in optax's units, for a step on the *mean* loss over N examples: so precisions start from multiples of N,
and `rule.init(params, objective)` needs the objective. Below, ĝ is the gradient of the mean loss and v the curvature
of the mean loss that q's precision S = (Nv + δ)/τ stands for, with the prior's precision δ.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..curvature.base import Curvature
from ..curvature.gauss_newton import GaussNewton, GeneralizedGaussNewton
from ..curvature.gradient import Gradient, SquaredGradient
from ..curvature.stein import Stein
from ..families.base import Family
from ..families.discrete import Bernoulli
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.fixed import FixedGaussian
from ..families.gaussian.low_rank import LowRankGaussian
from ..families.start import Start
from ..points.base import Delta, Points
from ..points.masks import Masks
from ..points.relaxed import Relaxed, Sign
from ..points.sampling import MonteCarlo
from ..rule.rule import Rule
from ..steps.guards import Boundary, Guard, Retraction
from ..steps.scaling import GradientAverage, Scaling
from ..steps.schedule import Number, Rates
from ..steps.steps import Steps

# Point estimates, and what they say of a posterior.


def sgd(rate: Number, *, momentum: Number | None = None, precision: Any = 1.0) -> Rule:
    r"""Stochastic gradient descent, $θ ← θ − ρS^{-1}\hat g$ (section 4.1, `eq:sgd_cov`).

    A Gaussian with fixed precision N·S and the delta method on mini-batches. `precision` S is the preconditioner: a
    number, a number for each entry, or a matrix over the ravelled parameters. `momentum` γ is the heavy ball's.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=2)
    >>> state = blr.sgd(0.1).init(jnp.zeros(()), objective)
    >>> state, info = blr.sgd(0.1).step(objective, state, jnp.array([1.0, 3.0]))
    >>> float(state.q.mean), float(info.objective)                    # 0.1 of the mean's slope; the sum's value
    (0.2, 5.0)
    """
    family = Start(FixedGaussian, precision, per_example=True)
    return Rule(family, Delta(), Gradient(), Steps(rate, momentum=momentum), name="sgd", section="4.1")


def rmsprop(rate: Number, *, decay: Number = 0.9, damping: Number = 1e-8) -> Rule:
    r"""RMSprop, $θ ← θ − α\hat g/(\sqrt v + c)$, $v ← βv + (1−β)\hat g^2$ (section 4.2, `eq:rmsprop_update`).

    A diagonal Gaussian, the delta method, and the squared mini-batch gradient for the Hessian; separate rates,
    square root and damping are steps. `decay` is β, `damping` c.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=2)
    >>> state = blr.rmsprop(0.1).init(jnp.zeros(()), objective)
    >>> state, info = blr.rmsprop(0.1).step(objective, state, jnp.array([1.0, 3.0]))
    >>> round(float(state.q.mean), 4)                                 # 0.1·2/√(0.1·4)
    0.3162
    """
    steps = _steps(rate, decay, scaling=Scaling(damping, root=True))
    return _adaptive(Delta(), SquaredGradient(), steps, Boundary(), name="rmsprop", section="4.2")


def adam(
    rate: Number,
    *,
    averaging: Number = 0.9,
    decay: Number = 0.999,
    damping: Number | str = 1e-8,
    initial_precision: Any = None,
) -> Rule:
    r"""Adam, $θ ← θ − α\hat u/(\sqrt{\hat v} + δ/N + c)$ (section 4.2, `eq:adam_momentum`).

    RMSprop's pieces with the gradient averaged, $u ← β_1u + (1−β_1)\hat g$, and both averages debiased. `averaging` is
    β₁, `decay` β₂, `damping` c; a prior's gradient is in u but not in v, and its curvature δ/N in the divisor. With
    `damping="prior"` (c = 0), `initial_precision` for q's first precision and
    `.replace(points=MonteCarlo(1))` it is Vadam (Khan et al., ICML 2018).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=2)
    >>> state = blr.adam(0.1).init(jnp.zeros(()), objective)
    >>> state, info = blr.adam(0.1).step(objective, state, jnp.array([1.0, 3.0]))
    >>> round(float(state.q.mean), 4)
    0.1
    """
    scaling = Scaling(damping, root=True, debias=True)
    steps = _steps(rate, decay, GradientAverage(averaging), scaling)
    rule = _adaptive(Delta(), SquaredGradient(), steps, Boundary(), name="adam", section="4.2")
    if initial_precision is None:
        return rule
    return rule.replace(family=Start(DiagonalGaussian, initial_precision), name=rule.name)


def dropout(
    rate: Number,
    keep: Any = 0.9,
    *,
    samples: int = 1,
    keep_rate: Number | None = None,
    relaxation: Number = 0.1,
) -> Rule:
    r"""SGD with dropout: units are dropped, and gradients taken there are weighted by z/π₁ (section 4.3).

    A spike-and-slab mixture (`eq:var_dist_dropout`) with the delta method in the slab:
    $θ ← θ − ρ\,(z/π_1)∘\hat g(z∘θ)$ (`eq:von_dropout_1`). `keep` is π₁, one number or one a layer; the network to
    predict with is `q.mean`, π₁θ. `keep_rate` lets π₁ be learnt, at that rate, through the Concrete relaxation.

    Any Gaussian algorithm has its dropout: `rule.replace(family=rule.family.dropped(0.9), points=Masks())`.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: jnp.sum((x @ w) ** 2), size=2)
    >>> rule = blr.dropout(0.01, 0.5)
    >>> state = rule.init(jnp.ones((3, 1)), objective)
    >>> state, info = rule.step(objective, state, jnp.ones((2, 3)), jax.random.key(0))
    >>> state.q.mean.shape
    (3, 1)
    """
    slab = Start(FixedGaussian, per_example=True)
    if keep_rate is None:
        family, points, steps = slab.dropped(keep), Masks(samples), Steps(rate)
    else:
        family, points = slab.dropped(keep, learnt=True), Masks(samples, relaxation=relaxation)
        steps = Steps(Rates(rate, keep_rate))
    return Rule(family, points, Gradient(), steps, name="dropout", section="4.3")


# Posteriors for networks.


def ogn(rate: Number, **options: Any) -> Rule:
    r"""Online Gauss–Newton, $θ ← θ − ρ\hat u/(v + δ/N)$ with $v ← βv + (1−β)\tfrac1M\sum_i\hat g_i^2$ (section 4.4).

    Adam's family and points with each example's squared gradient in place of the mini-batch's (`eq:don`,
    `eq:OGN_approx`). Of Adam's extras it keeps the gradient's average, debiased, with the regularizer outside; v is
    neither rooted nor debiased, and starts from h₀. Options as for `vogn`; by default the rate is relative to the first
    divisor, so the step is $−ρ(h_0 + δ/N)\hat g/(v + δ/N)$.
    """
    return _online("ogn", rate, Delta(), GaussNewton(), **options)


def oggn(rate: Number, **options: Any) -> Rule:
    r"""Online generalised Gauss–Newton: `ogn` with $J^⊤∇^2_fℓ\,J$ (section 4.4). Options as for `vogn`."""
    return _online("oggn", rate, Delta(), GeneralizedGaussNewton(), **options)


def vogn(rate: Number, *, samples: int = 1, antithetic: bool = False, **options: Any) -> Rule:
    r"""Variational online Gauss–Newton: `ogn` at samples of q instead of its mean (section 4.4, `eq:von_minibatch`).

    Options: `averaging` β₁ of the gradient (0.9; 0 for none), `decay` β₂ of the curvature (0.999), `curvature` h₀ that
    v starts from (1), `damping` added to the divisor (0), `temperature` τ (1), and `relative` (True): the rate is in
    units of the first divisor, so that training begins as SGD does at that rate; False is the rule's own ρ.

    >>> import bayesrule as blr
    >>> blr.vogn(1e-2).replace(points=blr.Delta()) == blr.ogn(1e-2)
    True
    """
    return _online("vogn", rate, MonteCarlo(samples, antithetic=antithetic), GaussNewton(), **options)


def voggn(rate: Number, *, samples: int = 1, antithetic: bool = False, **options: Any) -> Rule:
    r"""Variational online generalised Gauss–Newton: `oggn` at samples of q (section 4.4). Options as for `vogn`."""
    return _online("voggn", rate, MonteCarlo(samples, antithetic=antithetic), GeneralizedGaussNewton(), **options)


def ivon(rate: Number, *, samples: int = 1, antithetic: bool = False, decay: Number = 0.99999, **options: Any) -> Rule:
    r"""IVON (Shen et al., ICML 2024): `vogn` with Stein's identity for the Hessian, from gradients alone.

    $f = S(θ−m)\hat g$, $h ← β_2h + (1−β_2)f + ½(1−β_2)^2(h−f)^2/(h+δ/N)$ (the retraction),
    $m ← m − α(\hat u + δm/N)/(h + δ/N)$ with α = `rate`·(h₀ + δ/N). Options as for `vogn`; the effective
    sample size is N/`temperature`.

    >>> import bayesrule as blr
    >>> print(blr.ivon(0.1).curvature)
    Stein()
    """
    points = MonteCarlo(samples, antithetic=antithetic)
    return _online("ivon", rate, points, Stein(), guard=Retraction(), decay=decay, **options)


def slang(
    rate: Number, *, rank: int = 5, samples: int = 1, antithetic: bool = False, decay: Number = 0.99, **options: Any
) -> Rule:
    r"""SLANG (Mishkin et al., NeurIPS 2018): `vogn` with a precision that is diagonal plus low rank.

    $S ← β_2S + (1−β_2)\tfrac NM\sum_i g_ig_i^⊤$, of which the `rank` largest directions are kept and the rest of the
    diagonal, $m ← m − ρS^{-1}g$. Options as for `vogn`, but `damping` and `relative`.

    >>> import bayesrule as blr
    >>> blr.slang(0.1, rank=3).family
    LowRankGaussian
    """
    points = MonteCarlo(samples, antithetic=antithetic)
    options = {"relative": False, "decay": decay, "choices": {"rank": rank}, **options}
    return _online("slang", rate, points, GaussNewton(), family=LowRankGaussian, **options)


# Binary networks.


def straight_through(rate: Number, *, averaging: Number | None = None) -> Rule:
    r"""The straight-through estimator, $λ ← λ − α\,\hat g(\mathrm{sign}\,λ)$ (section 4.5, `eq:STE`).

    A Bernoulli over signs, looked at at sign(λ), whose gradient stands for that in μ, and no decay (temperature 0).

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: jnp.sum(w * x), size=1)
    >>> state = blr.straight_through(0.5).init(jnp.array([0.3, -0.2]), objective)
    >>> state, info = blr.straight_through(0.5).step(objective, state, jnp.ones((1, 2)))
    >>> state.q.natural().tolist(), float(info.objective)
    ([-0.2, -0.7], 0.0)
    """
    average = None if averaging is None else GradientAverage(averaging)
    steps = Steps(rate, temperature=0.0, average=average, units="mean")
    return Rule(Bernoulli, Sign(), Gradient(), steps, name="straight_through", section="4.5")


def bayesbinn(
    rate: Number,
    *,
    relaxation: Number = 1.0,
    smoothing: Number = 0.0,
    samples: int = 1,
    averaging: Number | None = None,
    temperature: Number = 1.0,
) -> Rule:
    r"""BayesBiNN, $λ ← (1−ρτ)λ − ρ\,s∘N\hat g(θ)$ at relaxed signs θ (section 4.5, `eq:bayes_learn_binn_final`).

    `straight_through` with the Concrete relaxation for the sign, its noise, and the entropy. The rate is ρ
    itself, the fraction of λ that a step forgets, as published.

    >>> import bayesrule as blr
    >>> print(blr.bayesbinn(1e-4).points)
    Relaxed(1.0)
    """
    average = None if averaging is None else GradientAverage(averaging)
    points = Relaxed(relaxation, smoothing, samples=samples)
    steps = Steps(rate, temperature=temperature, average=average)
    return Rule(Bernoulli, points, Gradient(), steps, name="bayesbinn", section="4.5")


# What they share.


def _steps(
    rate: Number,
    decay: Number,
    average: GradientAverage | None = None,
    scaling: Scaling | None = None,
    temperature: Number = 1.0,
) -> Steps:
    """Separate rates for mean and precision: the precision forgets 1 − `decay` of itself in a step."""
    forgotten = (lambda count: 1 - decay(count)) if callable(decay) else 1 - decay
    rates = Rates(rate, forgotten)
    return Steps(rates, temperature=temperature, average=average, scaling=scaling, units="fraction")


def _adaptive(points: Points, curvature: Curvature, steps: Steps, guard: Guard, *, name: str, section: str) -> Rule:
    """A diagonal Gaussian that starts from its prior: v = 0."""
    family = Start(DiagonalGaussian, 0.0, per_example=True, prior=True)
    return Rule(family, points, curvature, steps, guard, name=name, section=section)


def _online(
    name: str,
    rate: Number,
    points: Points,
    measured: Curvature,
    *,
    family: type[Family] = DiagonalGaussian,
    guard: Guard | None = None,
    averaging: Number = 0.9,
    decay: Number = 0.999,
    curvature: Any = 1.0,
    damping: Number = 0.0,
    temperature: Number = 1.0,
    relative: bool = True,
    choices: dict[str, Any] | None = None,
) -> Rule:
    """A Gaussian that starts from v = h₀; the regularizer stays outside the gradient's average."""
    single = jax.tree_util.all_leaves([curvature]) and jnp.ndim(curvature) == 0
    if relative and not single:
        raise ValueError("A curvature for each entry goes with relative=False: the rate is relative to one number.")
    none = isinstance(averaging, float | int) and averaging == 0
    average = None if none else GradientAverage(averaging, over="data")
    plain = not relative and isinstance(damping, float | int) and damping == 0
    scaling = None if plain else Scaling(damping, start=curvature if relative else None)
    steps = _steps(rate, decay, average, scaling, temperature)
    first = Start(family, curvature, per_example=True, prior=True, **(choices or {}))
    return Rule(first, points, measured, steps, guard or Boundary(), name=name, section="4.4")
