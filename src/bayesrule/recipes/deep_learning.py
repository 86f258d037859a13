"""Deep-learning algorithms as the rule: Table 1's middle block.

Rates are in optax's units, for a step on the *mean* loss over N examples. Therefore precisions start from multiples of
N, and `rule.init(params, objective)` needs the objective. In the equations, ĝ is the gradient of the mean loss, δ the
prior's precision, and v the curvature of the mean loss that q's precision S = (Nv + δ)/τ stands for.
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
from ..families.gaussian.second_moment import SecondMomentGaussian
from ..families.start import Start
from ..points.base import Delta, Points
from ..points.masks import Masks
from ..points.relaxed import Relaxed, Sign
from ..points.sampling import MonteCarlo
from ..rule.rule import Rule
from ..steps.averages import GradientAverage, Trace, WeightDecay
from ..steps.guards import Boundary, Guard, Retraction
from ..steps.scaling import Scaling
from ..steps.schedule import Number, Planned, Rate, Rates, equals
from ..steps.steps import Steps
from ..steps.warm_up import WarmUp
from ..steps.window import Window

# Point estimates, and what they say about a posterior.


def sgd(
    rate: Rate,
    *,
    momentum: Number | None = None,
    nesterov: bool = False,
    heavy_ball: bool = False,
    precision: Any = 1.0,
) -> Rule:
    r"""Stochastic gradient descent, $θ ← θ − ρS^{-1}\hat g$ (section 4.1, `eq:sgd_cov`).

    A Gaussian with fixed precision N·S, and the delta method on mini-batches. With `momentum` the gradient is replaced
    by its trace $u ← γu + \hat g$, as in optax and PyTorch. At a constant rate that is the heavy ball of the paper,
    $+ γ(θ_t − θ_{t−1})$ (`eq:sgd_momentum`), which under a schedule is another algorithm: `heavy_ball=True`.

    Args:
        rate: ρ, a number or a schedule, as in optax.
        momentum: γ, between 0 and 1.
        nesterov: Nesterov's momentum, as in optax: the trace looks one step ahead.
        heavy_ball: The momentum as the rule's own, of λ, in place of the gradient's trace.
        precision: S, the preconditioner: a number, a number for each entry of the parameters, or a matrix over the
            ravelled parameters.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=2)
    >>> state = blr.sgd(0.1).init(jnp.zeros(()), objective)
    >>> state, info = blr.sgd(0.1).step(objective, state, jnp.array([1.0, 3.0]))
    >>> float(state.q.mean), float(info.objective)                    # 0.1 of the mean's slope; the sum's value
    (0.2, 5.0)

    Reference: Robbins and Monro, "A stochastic approximation method", 1951.
    """
    if (nesterov or heavy_ball) and (momentum is None or (nesterov and heavy_ball)):
        raise ValueError("Give momentum=γ, and either nesterov=True or heavy_ball=True if it is not to be plain.")
    if momentum is None or heavy_ball:
        steps = Steps(rate, momentum=momentum)
    else:
        steps = Steps(rate, average=Trace(momentum, nesterov=nesterov))
    family = Start(FixedGaussian, precision, per_example=True)
    return Rule(family, Delta(), Gradient(), steps, name="sgd", section="4.1")


def rmsprop(rate: Rate, *, decay: Number = 0.9, damping: Number = 1e-8) -> Rule:
    r"""RMSprop, $θ ← θ − α\hat g/(\sqrt v + c)$, $v ← βv + (1−β)\hat g^2$ (section 4.2, `eq:rmsprop_update`).

    A diagonal Gaussian, the delta method, and the squared mini-batch gradient in place of the Hessian; the separate
    rates, the square root and the damping belong to the steps.

    Args:
        rate: α, a number or a schedule.
        decay: β, how much of v is kept in each step.
        damping: c.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=2)
    >>> state = blr.rmsprop(0.1).init(jnp.zeros(()), objective)
    >>> state, info = blr.rmsprop(0.1).step(objective, state, jnp.array([1.0, 3.0]))
    >>> round(float(state.q.mean), 4)                                 # 0.1·2/√(0.1·4)
    0.3162

    Reference: Tieleman and Hinton, "Lecture 6.5: RMSprop", Coursera, 2012.
    """
    steps = _steps(rate, decay, scaling=Scaling(damping, root=True))
    return _adaptive(Delta(), SquaredGradient(), steps, Boundary(), name="rmsprop", section="4.2")


def adam(
    rate: Rate,
    *,
    averaging: Number = 0.9,
    decay: Number = 0.999,
    damping: Number | str = 1e-8,
    initial_precision: Any = None,
) -> Rule:
    r"""Adam, $θ ← θ − α\hat u/(\sqrt{\hat v} + δ/N + c)$ (section 4.2, `eq:adam_momentum`).

    RMSprop's pieces with the gradient averaged, $u ← β_1u + (1−β_1)\hat g$, and both averages debiased. The gradient of
    a prior is in u but not in v, and its curvature δ/N is in the divisor. Vadam (Khan et al., ICML 2018) is
    `adam(rate, damping="prior", initial_precision=…).replace(points=MonteCarlo(1))`.

    Args:
        rate: α, a number or a schedule.
        averaging: β₁, how much of the gradient's average u is kept in each step.
        decay: β₂, how much of the squared gradient's average v is kept in each step.
        damping: c; `"prior"` is c = 0, with the damping left to δ/N.
        initial_precision: q's first precision: a number or a pytree like the parameters. By default the prior's, v = 0.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: 0.5 * (w - x) ** 2, size=2)
    >>> state = blr.adam(0.1).init(jnp.zeros(()), objective)
    >>> state, info = blr.adam(0.1).step(objective, state, jnp.array([1.0, 3.0]))
    >>> round(float(state.q.mean), 4)
    0.1

    Reference: Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.
    """
    scaling = Scaling(damping, root=True, debias=True)
    steps = _steps(rate, decay, GradientAverage(averaging), scaling)
    rule = _adaptive(Delta(), SquaredGradient(), steps, Boundary(), name="adam", section="4.2")
    if initial_precision is None:
        return rule
    return rule.replace(family=Start(DiagonalGaussian, initial_precision), name=rule.name)


def adamw(
    rate: Rate,
    *,
    weight_decay: Number = 1e-4,
    mask: Any = None,
    averaging: Number = 0.9,
    decay: Number = 0.999,
    damping: Number = 1e-8,
) -> Rule:
    r"""AdamW, $θ ← θ − α\hat u/(\sqrt{\hat v} + c) − αwθ$: `adam` with a decoupled weight decay.

    The decay is a piece of the steps and no prior. It goes with an objective without a regularizer, and q's precision
    is then N v, without a δ: where the data say nothing, q is as wide as v = 0 makes it. For a posterior with a prior
    use `adam` with a `regularizer`.

    Args:
        rate: α, a number or a schedule.
        weight_decay: w, a number or a schedule; as in optax it is multiplied by the rate.
        mask: Which parameters decay, as in optax: a pytree of booleans, or a function of the parameters that makes one.
        averaging: As for `adam`.
        decay: As for `adam`.
        damping: As for `adam`.

    >>> import bayesrule as blr
    >>> blr.difference(blr.adam(1e-3), blr.adamw(1e-3)).pieces
    ('steps',)

    Reference: Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """
    scaling = Scaling(damping, root=True, debias=True)
    steps = _steps(rate, decay, GradientAverage(averaging), scaling, weight_decay=WeightDecay(weight_decay, mask))
    return _adaptive(Delta(), SquaredGradient(), steps, Boundary(), name="adamw", section="4.2")


def vadam(
    rate: Rate,
    *,
    temperature: Number = 0.03,
    samples: int = 1,
    weight_decay: Number = 1e-4,
    mask: Any = None,
    averaging: Number = 0.9,
    decay: Number = 0.999,
    damping: Number = 1e-8,
) -> Rule:
    r"""Adam's steps at draws of q, $θ ∼ N(m, τ/(NM\hat v + δ))$: `adamw` with a posterior (section 4.2).

    Gradients are taken at a draw, and all else is AdamW's, with its rates, schedules and weight decay: posterior and
    preconditioner are two things. The squared gradient of a batch of M examples is M times smaller than that of its
    examples on average, so that $NM\hat v$ estimates their sum over the data, the Gauss–Newton diagonal. It keeps no
    array besides AdamW's. The loss has to be $−\log p$ of a whole example (a sum over the characters of a text, not
    their mean), and a batch a small part of the data.

    A prior of the objective enters the gradient and the divisor, as in `adam`, and is δ; it takes the place of the
    weight decay (`weight_decay=0`). Without one δ is $1/\mathrm{mean}(θ_0^2)$ for each array of the parameters, 1 for
    zeros: where the data say nothing, q is as wide at τ = 1 as the first weights were.

    Published as Vadam is the form with Adam's own $N\hat v + δ$ as the precision, and δ in the divisor:
    `adam(rate, damping="prior", initial_precision=…).replace(points=MonteCarlo(1))`.

    Args:
        rate: α, a number or a schedule.
        temperature: τ. With so wide a prior a diagonal q is mostly noise at 1, and at 0.1 a deep network at a high rate
            may still fail. `choose_width` finds the width to predict with afterwards.
        samples: How many draws are averaged in each step.
        weight_decay: w, as for `adamw`.
        mask: As for `adamw`.
        averaging: As for `adam`.
        decay: As for `adam`.
        damping: As for `adam`.

    >>> import bayesrule as blr
    >>> blr.difference(blr.adamw(1e-3), blr.vadam(1e-3)).pieces
    ('family', 'points', 'steps')

    Reference: Khan et al., "Fast and scalable Bayesian deep learning by weight-perturbation in Adam", ICML 2018.
    """
    decoupled = None if equals(weight_decay, 0) else WeightDecay(weight_decay, mask)
    scaling = Scaling(damping, root=True, debias=True)
    steps = _steps(rate, decay, GradientAverage(averaging), scaling, temperature, weight_decay=decoupled)
    family = Start(SecondMomentGaussian, 0.0)
    return Rule(family, MonteCarlo(samples), SquaredGradient(), steps, Boundary(), name="vadam", section="4.2")


def dropout(
    rate: Rate,
    keep: Any = 0.9,
    *,
    samples: int = 1,
    keep_rate: Number | None = None,
    relaxation: Number = 0.1,
) -> Rule:
    r"""SGD with dropout, $θ ← θ − ρ\,(z/π_1)∘\hat g(z∘θ)$ (section 4.3, `eq:von_dropout_1`).

    A spike-and-slab mixture (`eq:var_dist_dropout`) with the delta method in the slab: units are dropped where z = 0,
    and the gradient at the dropped network is weighted by z/π₁. The network to predict with is `q.mean`, π₁θ.

    Any Gaussian algorithm has its dropout: `rule.replace(family=rule.family.dropped(0.9), points=Masks())`.

    Args:
        rate: ρ, a number or a schedule, as for `sgd`.
        keep: π₁, the probability that a unit is kept: one number, or one for each layer.
        samples: How many masks z are averaged in each step.
        keep_rate: The rate at which π₁ is learnt; None leaves it fixed.
        relaxation: The relaxation of the Concrete distribution, through which π₁ is learnt.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: jnp.sum((x @ w) ** 2), size=2)
    >>> rule = blr.dropout(0.01, 0.5)
    >>> state = rule.init(jnp.ones((3, 1)), objective)
    >>> state, info = rule.step(objective, state, jnp.ones((2, 3)), jax.random.key(0))
    >>> state.q.mean.shape
    (3, 1)

    Reference: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014.
    """
    slab = Start(FixedGaussian, per_example=True)
    if keep_rate is None:
        family, points, steps = slab.dropped(keep), Masks(samples), Steps(rate)
    else:
        family, points = slab.dropped(keep, learnt=True), Masks(samples, relaxation=relaxation)
        steps = Steps(Rates(rate, keep_rate))
    return Rule(family, points, Gradient(), steps, name="dropout", section="4.3")


# Posteriors for networks.


def ogn(
    rate: Rate,
    *,
    averaging: Number = 0.9,
    decay: Number | Window | None = None,
    curvature: Any = None,
    damping: Number = 0.0,
    temperature: Number | Planned | None = None,
    relative: bool | None = None,
) -> Rule:
    r"""Online Gauss–Newton, $θ ← θ − ρ\hat u/(v + δ/N)$ with $v ← βv + (1−β)\tfrac1M\sum_i\hat g_i^2$ (section 4.4).

    Adam's family and points with each example's squared gradient in place of the mini-batch's (`eq:don`,
    `eq:OGN_approx`). Of Adam's extras it keeps the debiased average of the gradient, with the regularizer outside; v is
    not rooted. The step is $−ρ\,c\,\hat u/(v + δ/N)$ with a number c that says what the rate is in units of.

    By default the rate is in Adam's units: 1e-3 is a good one. On mini-batches `fit` lets a constant rate fall to 0
    along half a cosine over its steps; a schedule is taken as it is. In these units $c = 80\sqrt{M/N}$, and the noise
    of a batch of M examples moves a weight that the data determine by 80ρ of its posterior standard deviations in a
    step: 0.08 at 1e-3, whatever N, M and the scale of the weights are. Steps are never longer than at 2e-3: larger
    rates act as 2e-3. With a given h₀, $c = h_0 + δ/N$ as published, and training begins as SGD does at that rate.

    v is the average of what the batches of the last epoch measured, and starts from the first of them: the first step
    measures, at the mean, and leaves θ. Published are `curvature=1.0` and `decay=0.999`, with which most of v is h₀
    still after hundreds of steps, and the posterior's width says more of h₀ than of the data. Both are also used if the
    objective has no prior, or one that is no density: then h₀ alone keeps v above 0 where no example has a gradient.

    Args:
        rate: ρ, a number or a schedule, by default in Adam's units.
        averaging: β₁ of the gradient's average; 0 for none.
        decay: β₂, how much of the curvature v is kept in each step: a number, a schedule, or a `Window` in epochs, by
            default of one.
        curvature: h₀, the curvature that v starts from: a number, or with `relative=False` a pytree like the
            parameters. None to measure it.
        damping: A number that is added to the divisor.
        temperature: τ of a cold (below 1) or warm posterior: a number, a schedule, or a `WarmUp`. By default 1; in
            Adam's units `WarmUp()`, with which `fit` on mini-batches lets τ rise from 0.01 to 1 over the first half of
            its steps, and which is 1 where the number of steps is not known.
        relative: None for Adam's units where v is measured, and units of the first divisor where h₀ is given; True for
            units of the first divisor (its harmonic mean over the weights where v is measured), so that training begins
            as SGD does at that rate; False for c = 1, the rule's own ρ.

    >>> import bayesrule as blr
    >>> blr.difference(blr.adam(1e-2), blr.ogn(1e-2)).pieces
    ('family', 'curvature', 'steps')

    Reference: Osawa et al., "Practical deep learning with Bayesian principles", NeurIPS 2019.
    """
    steps = _online_steps(rate, averaging, decay, curvature, damping, temperature, _SQUARES, relative=relative)
    return _online(Delta(), GaussNewton(), steps, curvature, name="ogn")


def oggn(
    rate: Rate,
    *,
    averaging: Number = 0.9,
    decay: Number | Window | None = None,
    curvature: Any = None,
    damping: Number = 0.0,
    temperature: Number | Planned | None = None,
    relative: bool | None = None,
) -> Rule:
    r"""Online generalised Gauss–Newton: `ogn` with the curvature $J^⊤∇^2_fℓ\,J$ (section 4.4).

    J is the Jacobian of the network's outputs f, so the objective needs `output=`.

    Args:
        rate: As for `ogn`.
        averaging: As for `ogn`.
        decay: As for `ogn`.
        curvature: As for `ogn`.
        damping: As for `ogn`.
        temperature: As for `ogn`.
        relative: As for `ogn`.

    >>> import bayesrule as blr
    >>> blr.oggn(1e-2) == blr.ogn(1e-2).replace(curvature=blr.GeneralizedGaussNewton())
    True

    Reference: Martens, "New insights and perspectives on the natural gradient method", JMLR 2020.
    """
    steps = _online_steps(rate, averaging, decay, curvature, damping, temperature, _SQUARES, relative=relative)
    return _online(Delta(), GeneralizedGaussNewton(), steps, curvature, name="oggn")


def vogn(
    rate: Rate,
    *,
    samples: int = 1,
    antithetic: bool = False,
    averaging: Number = 0.9,
    decay: Number | Window | None = None,
    curvature: Any = None,
    damping: Number = 0.0,
    temperature: Number | Planned | None = None,
    relative: bool | None = None,
) -> Rule:
    r"""Variational online Gauss–Newton: `ogn` at samples of q instead of its mean (section 4.4, `eq:von_minibatch`).

    $θ_s ∼ N(m, \mathrm{diag}(s)^{-1})$, $m ← m − ρ\hat u/(v + δ/N)$ with the average over samples in $\hat u$ and v.

    Args:
        rate: As for `ogn`.
        samples: How many samples of q are averaged in each step.
        antithetic: Whether samples come in mirrored pairs m ± ε.
        averaging: As for `ogn`.
        decay: As for `ogn`.
        curvature: As for `ogn`.
        damping: As for `ogn`.
        temperature: As for `ogn`.
        relative: As for `ogn`.

    >>> import bayesrule as blr
    >>> blr.vogn(1e-2).replace(points=blr.Delta()) == blr.ogn(1e-2)
    True

    Reference: Khan et al., "Fast and scalable Bayesian deep learning by weight-perturbation in Adam", ICML 2018.
    """
    points = MonteCarlo(samples, antithetic=antithetic)
    steps = _online_steps(rate, averaging, decay, curvature, damping, temperature, _SQUARES, relative=relative)
    return _online(points, GaussNewton(), steps, curvature, name="vogn")


def voggn(
    rate: Rate,
    *,
    samples: int = 1,
    antithetic: bool = False,
    averaging: Number = 0.9,
    decay: Number | Window | None = None,
    curvature: Any = None,
    damping: Number = 0.0,
    temperature: Number | Planned | None = None,
    relative: bool | None = None,
) -> Rule:
    r"""Variational online generalised Gauss–Newton: `oggn` at samples of q, $J^⊤∇^2_fℓ\,J$ averaged (section 4.4).

    Args:
        rate: As for `ogn`.
        samples: As for `vogn`.
        antithetic: As for `vogn`.
        averaging: As for `ogn`.
        decay: As for `ogn`.
        curvature: As for `ogn`.
        damping: As for `ogn`.
        temperature: As for `ogn`.
        relative: As for `ogn`.

    >>> import bayesrule as blr
    >>> blr.voggn(1e-2).replace(points=blr.Delta()) == blr.oggn(1e-2)
    True

    Reference: Osawa et al., "Practical deep learning with Bayesian principles", NeurIPS 2019.
    """
    points = MonteCarlo(samples, antithetic=antithetic)
    steps = _online_steps(rate, averaging, decay, curvature, damping, temperature, _SQUARES, relative=relative)
    return _online(points, GeneralizedGaussNewton(), steps, curvature, name="voggn")


def ivon(
    rate: Rate,
    *,
    samples: int = 1,
    antithetic: bool = False,
    averaging: Number = 0.9,
    decay: Number | Window | None = None,
    curvature: Any = None,
    damping: Number = 0.0,
    temperature: Number | Planned | None = None,
    relative: bool | None = None,
) -> Rule:
    r"""IVON: `vogn` with Stein's identity for the Hessian, from gradients alone.

    $f = S(θ−m)\hat g$, $h ← β_2h + (1−β_2)f + ½(1−β_2)^2(h−f)^2/(h+δ/N)$ (the retraction),
    $m ← m − α(\hat u + δm/N)/(h + δ/N)$ with α = `rate`·(h₀ + δ/N). The effective sample size is N/`temperature`.

    Args:
        rate: As for `ogn`.
        samples: As for `vogn`.
        antithetic: As for `vogn`.
        averaging: As for `ogn`.
        decay: As for `ogn`, but by default a window of five epochs, because Stein's estimate is noisy; published is
            0.99999.
        curvature: As for `ogn`. Stein's estimate can be negative, so v starts from the squared gradients of the first
            20 batches, $M\hat g^2$.
        damping: As for `ogn`.
        temperature: As for `ogn`.
        relative: As for `ogn`.

    >>> import bayesrule as blr
    >>> blr.difference(blr.vogn(0.1, decay=0.999), blr.ivon(0.1, decay=0.999)).pieces
    ('curvature', 'guard')

    Reference: Shen et al., "Variational learning is effective for large deep networks", ICML 2024.
    """
    points = MonteCarlo(samples, antithetic=antithetic)
    steps = _online_steps(rate, averaging, decay, curvature, damping, temperature, _STEIN, relative=relative)
    return _online(points, Stein(), steps, curvature, guard=Retraction(), name="ivon")


def slang(
    rate: Rate,
    *,
    rank: int = 5,
    samples: int = 1,
    antithetic: bool = False,
    averaging: Number = 0.9,
    decay: Number | Window | None = None,
    curvature: Any = None,
    temperature: Number = 1.0,
) -> Rule:
    r"""SLANG: `vogn` with a precision that is diagonal plus low rank (section 4.4).

    $S ← β_2S + (1−β_2)\tfrac NM\sum_i g_ig_i^⊤$, of which the `rank` largest directions are kept and the rest of the
    diagonal, $m ← m − ρS^{-1}g$.

    Args:
        rate: ρ itself, a number or a schedule.
        rank: How many directions the precision has beside its diagonal.
        samples: As for `vogn`.
        antithetic: As for `vogn`.
        averaging: As for `ogn`.
        decay: As for `ogn`; published is 0.99.
        curvature: As for `ogn`, a number or a pytree like the parameters.
        temperature: As for `ogn`.

    >>> import bayesrule as blr
    >>> blr.slang(0.1, rank=3).family
    LowRankGaussian

    Reference: Mishkin et al., "SLANG: fast structured covariance approximations for Bayesian deep learning with natural
    gradient", NeurIPS 2018.
    """
    points = MonteCarlo(samples, antithetic=antithetic)
    steps = _online_steps(rate, averaging, decay, curvature, 0.0, temperature, _LOW_RANK, relative=False)
    family = _online_start(LowRankGaussian, curvature, rank=rank)
    return Rule(family, points, GaussNewton(), steps, Boundary(), name="slang", section="4.4")


# Binary networks.


def straight_through(rate: Number, *, averaging: Number | None = None) -> Rule:
    r"""The straight-through estimator, $λ ← λ − α\,\hat g(\mathrm{sign}\,λ)$ (section 4.5, `eq:STE`).

    A Bernoulli over signs, evaluated at sign(λ), where the gradient replaces that in μ, and no decay (temperature 0).

    Args:
        rate: α, a number or a schedule, for a step on the mean loss.
        averaging: β of the gradient's average; None for none.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> objective = blr.Objective(lambda w, x: jnp.sum(w * x), size=1)
    >>> state = blr.straight_through(0.5).init(jnp.array([0.3, -0.2]), objective)
    >>> state, info = blr.straight_through(0.5).step(objective, state, jnp.ones((1, 2)))
    >>> state.q.natural().tolist(), float(info.objective)
    ([-0.2, -0.7], 0.0)

    Reference: Bengio et al., "Estimating or propagating gradients through stochastic neurons", 2013.
    """
    average = None if averaging is None else GradientAverage(averaging)
    steps = Steps(rate, temperature=0.0, average=average, units="mean")
    return Rule(Bernoulli, Sign(), Gradient(), steps, name="straight_through", section="4.5")


def bayesbinn(
    rate: Rate,
    *,
    relaxation: Number = 1.0,
    smoothing: Number = 0.0,
    samples: int = 1,
    averaging: Number | None = None,
    temperature: Number = 1.0,
) -> Rule:
    r"""BayesBiNN, $λ ← (1−ρτ)λ − ρ\,s∘N\hat g(θ)$ at relaxed signs θ (section 4.5, `eq:bayes_learn_binn_final`).

    `straight_through` with the Concrete relaxation in place of the sign, its noise, and the entropy. The prior is
    uniform over signs: give the objective `prior=Bernoulli(…)` with λ = 0, which leaves the update as it is and the
    bound with its −P log 2. Relaxed signs are no draws of q, so `info.bound` is NaN; `result.bound` is taken at signs
    drawn from q.

    Args:
        rate: ρ itself, the fraction of λ that a step forgets, as published: a number or a schedule.
        relaxation: The relaxation of the Concrete distribution; towards 0 the points become signs.
        smoothing: η in the scale $s = (1 − θ^2 + η)/(τ_c(1 − \tanh^2λ + η))$; 0 is exact, the published code has 1e-10.
        samples: How many relaxed signs are averaged in each step.
        averaging: β of the gradient's average; None for none.
        temperature: τ, a number or a schedule.

    >>> import bayesrule as blr
    >>> print(blr.bayesbinn(1e-4).points)
    Relaxed(1.0)

    Reference: Meng, Bachmann and Khan, "Training binary neural networks using the Bayesian learning rule", ICML 2020.
    """
    average = None if averaging is None else GradientAverage(averaging)
    points = Relaxed(relaxation, smoothing, samples=samples)
    steps = Steps(rate, temperature=temperature, average=average)
    return Rule(Bernoulli, points, Gradient(), steps, name="bayesbinn", section="4.5")


# What they share.


# How long a precision remembers by default, and the decay that was published, for objectives without batches or without
# a prior. Squares: an epoch, so that S is a sum over all examples, each counted once. Stein's estimate of a single
# draw has a standard deviation of √(N/M) times its value or more, so that over w epochs √(1/2w) of it is left, and the
# retraction adds 1/2w: over five epochs a third, and a tenth.
_SQUARES = Window(1.0, decay=0.999)
_STEIN = Window(5.0, steps=100, decay=0.99999)
_LOW_RANK = Window(1.0, decay=0.99)


def _steps(
    rate: Rate,
    decay: Number | Window,
    average: GradientAverage | None = None,
    scaling: Scaling | None = None,
    temperature: Number | Planned = 1.0,
    *,
    measured: bool = False,
    weight_decay: WeightDecay | None = None,
) -> Steps:
    """Separate rates for mean and precision: the precision forgets 1 − `decay` of itself in a step."""
    forgotten: Any = decay
    if not isinstance(decay, Window):
        forgotten = (lambda count: 1 - decay(count)) if callable(decay) else 1 - decay
    rates = Rates(rate, forgotten)
    return Steps(
        rates,
        temperature=temperature,
        average=average,
        weight_decay=weight_decay,
        scaling=scaling,
        units="fraction",
        measured=measured,
    )


def _adaptive(points: Points, curvature: Curvature, steps: Steps, guard: Guard, *, name: str, section: str) -> Rule:
    """A diagonal Gaussian that starts from its prior: v = 0."""
    family = Start(DiagonalGaussian, 0.0, per_example=True, prior=True)
    return Rule(family, points, curvature, steps, guard, name=name, section=section)


def _online_steps(
    rate: Rate,
    averaging: Number,
    decay: Number | Window | None,
    curvature: Any,
    damping: Number,
    temperature: Number | Planned | None,
    window: Window,
    *,
    relative: bool | None,
) -> Steps:
    """The steps of OGN and its kin: the regularizer stays outside the gradient's average, v is measured or from h₀."""
    measured = curvature is None
    is_number = measured or (jax.tree_util.all_leaves([curvature]) and jnp.ndim(curvature) == 0)
    if relative is not False and not is_number:
        raise ValueError("A curvature for each entry goes with relative=False: the rate is relative to one number.")
    average = None if equals(averaging, 0) else GradientAverage(averaging, over="data")
    unscaled = relative is False and equals(damping, 0)
    start = None if relative is False else curvature if not measured else "adam" if relative is None else "measured"
    scaling = None if unscaled else Scaling(damping, start=start)
    decay = window if decay is None else decay
    if temperature is None:
        temperature = WarmUp() if start == "adam" else 1.0
    return _steps(rate, decay, average, scaling, temperature, measured=measured)


def _online_start(kind: type[Family], curvature: Any, **choices: Any) -> Start:
    """A Gaussian that starts from v = h₀, or from its prior until v is measured."""
    measured = curvature is None
    return Start(kind, 1.0 if measured else curvature, per_example=True, prior=True, measured=measured, **choices)


def _online(
    points: Points, measured: Curvature, steps: Steps, curvature: Any, *, name: str, guard: Guard | None = None
) -> Rule:
    """A diagonal Gaussian with a rate of its own for the precision."""
    family = _online_start(DiagonalGaussian, curvature)
    return Rule(family, points, measured, steps, guard or Boundary(), name=name, section="4.4")
