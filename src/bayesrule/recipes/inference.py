"""Bayesian inference as the rule: Table 1's last block, and online learning (section 5.4).

Most of these recipes move the blocks of a `Model`, whose factors say how they touch; see `bayesrule.factors`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..curvature.gradient import Gradient
from ..curvature.score import Score
from ..factor_graph.sites import Sites
from ..families.base import ExponentialFamily
from ..families.discrete import Categorical
from ..families.product import Product
from ..families.start import Start
from ..points.base import Exact
from ..points.quadrature import Enumeration
from ..rule.rule import Rule
from ..steps.guards import Backtracking
from ..steps.schedule import Number
from ..steps.steps import Steps
from ..steps.sweep import Sweep
from .optimization import newton

Order = Sequence[str | Sequence[str]] | str | None


def conjugate() -> Rule:
    r"""Bayes' rule for a conjugate model: one step with ρ = 1 (section 5.1, `eq:conj_blr_update`).

    The objective is E_q ℓ̄ as a function of μ. It is linear in μ, so its gradient is minus the sum of the likelihoods'
    natural parameters: $λ ← λ_0 + \sum_i \tildeλ_i(y_i)$.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> toss = lambda mu, y: -(y * mu[0] + (1 - y) * mu[1])           # −E_q log p(y | θ), μ = E(log θ, log(1 − θ))
    >>> coin = blr.Objective(toss, size=3, prior=blr.Beta(1.0, 1.0))
    >>> result = blr.fit(blr.conjugate(), coin, blr.Beta(5.0, 5.0), jnp.array([1.0, 1.0, 0.0]), steps=1)
    >>> float(result.q.a), float(result.q.b)
    (3.0, 2.0)

    Reference: Diaconis and Ylvisaker, "Conjugate priors for exponential families", 1979.
    """
    return Rule(ExponentialFamily, Exact(), Gradient(), Steps(1.0), Backtracking(), name="conjugate", section="5.1")


def laplace() -> Rule:
    r"""Laplace's method: $N(θ_*, [∇^2\barℓ(θ_*)]^{-1})$ at the minimiser (section 4.4, `app:delta`).

    These are Newton's pieces: run until converged, q is Laplace's posterior and the bound is Laplace's evidence.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> result = blr.fit(blr.laplace(), lambda x: jnp.sum(2 * x**2), jnp.ones(1), steps=3, tolerance=1e-9)
    >>> float(result.q.precision[0, 0])
    4.0

    Reference: Tierney and Kadane, "Accurate approximations for posterior moments and marginal densities", 1986.
    """
    return newton().replace(name="laplace", section="4.4")


def vmp(rate: Number = 1.0, *, order: Order = None) -> Rule:
    r"""Variational message passing: ρ = 1, block by block (section 5.3).

    On a `Model` of conjugate factors, $λ_j ← \sum_i ∇_{μ_j} E_q\log f_i$ for each block j in turn, with the others held
    fixed (`eq:blr_global` at ρ = 1).

    Args:
        rate: ρ; below 1 it damps, which parallel updates may need.
        order: The blocks in their order, or groups of blocks that move together; `"parallel"` moves all of them at
            once. By default every block by itself, local ones first.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> print(blr.vmp(order=["z", ("mean", "precision")]).steps)
    ρ = 1, in turn z, mean+precision

    Reference: Winn and Bishop, "Variational message passing", JMLR 2005.
    """
    return Rule(Product, Exact(), Gradient(), Steps(rate, sweep=Sweep(order)), name="vmp", section="5.3")


def ncvmp(rate: Number = 1.0, *, order: Order = None) -> Rule:
    r"""Non-conjugate VMP: the messages of `vmp` for factors that are not conjugate (section 5.3).

    $λ_j ← \sum_i ∇_{μ_j} E_q\log f_i$ as for `vmp`, but the gradient depends on λ_j itself, and ρ = 1 may diverge.
    Therefore the guard halves a block's step until the bound does not fall; `info.blocks` has the fraction of its step
    that each block took.

    Args:
        rate: As for `vmp`.
        order: As for `vmp`.

    >>> import bayesrule as blr
    >>> blr.ncvmp() == blr.vmp().replace(guard=blr.Backtracking(monotone=True))
    True

    Reference: Knowles and Minka, "Non-conjugate variational message passing for multinomial and binary regression",
    NeurIPS 2011.
    """
    return vmp(rate, order=order).replace(guard=Backtracking(monotone=True), name="ncvmp", section="5.3")


def svi(
    rate: Number, *, local_steps: int = 1, tolerance: Number = 0.0, together: int | None = None, order: Order = None
) -> Rule:
    r"""Stochastic variational inference: local blocks with ρ = 1, global ones with $ρ_t$ (section 5.3).

    $λ_j ← (1−ρ_t)λ_j + ρ_t\tfrac NM\sum_{i∈B} ∇_{μ_j} E_q\log f_i$ for a global block and a mini-batch B of M rows
    (`eq:blr_global`). With all rows, ρ = 1 and one local step it is `vmp`.

    Args:
        rate: ρ_t. A schedule such as $(t + t_0)^{−κ}$ with κ between ½ and 1 converges (Robbins and Monro).
        local_steps: How many steps a local block takes at each visit at most, each visit from its start. One step is
            its optimum if its messages do not depend on itself.
        tolerance: Local steps end early if the mean change of λ in every row is not above it.
        together: How many rows repeat their local steps together; by default all rows of the batch.
        order: As for `vmp`.

    >>> import bayesrule as blr
    >>> print(blr.svi(0.5).steps)
    ρ = 0.5, block by block, ρ = 1 in local blocks

    Reference: Hoffman et al., "Stochastic variational inference", JMLR 2013.
    """
    steps = Steps(rate, sweep=Sweep(order, local=local_steps, together=together, tolerance=tolerance))
    return Rule(Product, Exact(), Gradient(), steps, name="svi", section="5.3")


def em(*parameters: str, rate: Number = 1.0, order: Order = None, m_steps: int = 1, tolerance: Number = 0.0) -> Rule:
    r"""Expectation maximisation: `vmp` with the delta method for the parameters (section 5.2).

    A parameter's block is read at its mode, $θ_* = ∇A^*_{yz}(E_{q}T_{yz})$: with λ the sum of the messages to a
    conjugate block, θ_* = argmax ⟨λ, T(θ)⟩ is the M-step. A Gaussian block with `Delta()` points takes Newton's steps
    instead; far from the maximum replace the guard by `Backtracking(monotone=True)`. The bound is a lower bound on the
    log-likelihood.

    Args:
        *parameters: The names of the parameters' blocks; by default all that are not local.
        rate: ρ; below 1 with mini-batches it is online EM.
        order: As for `vmp`; `"parallel"` is the parallel form.
        m_steps: How many of Newton's steps an M-step without a closed form takes at most; one is generalised EM.
        tolerance: Newton's steps end early if the mean change of λ in every row is not above it.

    >>> import bayesrule as blr
    >>> print(blr.em("theta").family)
    Product with theta at the mode

    Reference: Dempster, Laird and Rubin, "Maximum likelihood from incomplete data via the EM algorithm", 1977.
    """
    sweep = Sweep(order, local=1, peaks=m_steps, tolerance=tolerance)
    family = Start(Product).with_point_masses(*parameters)
    return Rule(family, Exact(), Gradient(), Steps(rate, sweep=sweep), name="em", section="5.2")


def cvi(rate: Number = 1.0, *, sites: bool = False) -> Rule:
    r"""Non-conjugate variational inference: every factor's message is a natural gradient (section 5.4).

    $λ ← (1−ρ)λ + ρ\sum_i \tildeλ_i(μ)$ with $\tildeλ_i(μ) = ∇_μ E_q\log f_i$ (`eq:blr_global`), all blocks at
    once; each factor has points of its own. On all rows the guard halves a step until the bound does not fall; on
    mini-batches and with random points, where the bound is no judge, it shortens a step that is longer than 20 nats.
    A block may be a `Mixture` of Gaussians, for posteriors with several modes: its components each get the messages
    $∇_{μ_k}E_{q_k}[\log f_i + \log r_k]$, its weights those of the choice.

    Args:
        rate: ρ, a number or a schedule.
        sites: Keep every $\tildeλ_i$, $\tildeλ_i ← (1−ρ)\tildeλ_i + ρ\tildeλ_i(μ)$ and $λ = \sum_i\tildeλ_i$
            (`eq:blr_local`). On all rows these are the same steps; with mini-batches only a batch's own sites change,
            so that the others stay exact.

    >>> import bayesrule as blr
    >>> blr.cvi(0.5, sites=True) == blr.cvi(0.5).replace(curvature=blr.Sites())
    True

    Reference: Khan and Lin, "Conjugate-computation variational inference", AISTATS 2017; for mixtures Lin, Khan and
    Schmidt, "Fast and simple natural-gradient variational inference with mixture of exponential-family approximations",
    ICML 2019.
    """
    measured = Sites() if sites else Gradient()
    guard = Backtracking(monotone=True, length=20.0)
    return Rule(Product, Exact(), measured, Steps(rate), guard, name="cvi", section="5.4")


def exponential_weights(rate: Number, *, lazy: bool = False) -> Rule:
    r"""Exponential weights: $q_{t+1} ∝ q_t\,e^{−ρℓ_t}$ for losses that come one after another (section 5.4).

    A categorical q over experts, the expectation by enumeration, no decay (temperature 0). With another family it is
    another online algorithm: a fixed Gaussian and the delta method give online gradient descent, a Gaussian with
    `GaussNewton` the online Newton step.

    Args:
        rate: ρ, a number or a schedule.
        lazy: Take the sum of all gradients from the start, at the current rate, $q_{t+1} ∝ q_1e^{−ρ_t\sum_{s≤t}ℓ_s}$.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> rule, losses = blr.exponential_weights(1.0), jnp.array([[1.0, 0.0]])
    >>> objective = blr.Objective(lambda expert, loss: loss[expert], size=1)
    >>> state = rule.init(blr.Categorical(jnp.zeros(2)))
    >>> state, info = rule.step(objective, state, losses)
    >>> [round(float(p), 4) for p in state.q.probabilities]
    [0.2689, 0.7311]

    Reference: Littlestone and Warmuth, "The weighted majority algorithm", 1994.
    """
    steps = Steps(rate, temperature=0.0, lazy=lazy)
    return Rule(Categorical, Enumeration(), Score(), steps, name="exponential_weights", section="5.4")
