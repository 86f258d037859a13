"""Bayesian inference as the rule: Table 1's last block, and online learning (section 5.4)."""

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

    The objective is E_q ℓ̄ as a function of μ, linear in it, so its gradient is minus the sum of the
    likelihoods' natural parameters: $λ ← λ_0 + \sum_i \tildeλ_i(y_i)$.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> toss = lambda mu, y: -(y * mu[0] + (1 - y) * mu[1])           # −E_q log p(y | θ), μ = E(log θ, log(1 − θ))
    >>> coin = blr.Objective(toss, size=3, prior=blr.Beta(1.0, 1.0))
    >>> result = blr.fit(blr.conjugate(), coin, blr.Beta(5.0, 5.0), jnp.array([1.0, 1.0, 0.0]), steps=1)
    >>> float(result.q.a), float(result.q.b)
    (3.0, 2.0)
    """
    return Rule(ExponentialFamily, Exact(), Gradient(), Steps(1.0), Backtracking(), name="conjugate", section="5.1")


def laplace() -> Rule:
    r"""Laplace's method: $N(θ_*, [∇^2\barℓ(θ_*)]^{-1})$ at the minimiser (section 4.4, `app:delta`).

    Newton's pieces; run until converged, its q is Laplace's posterior and its bound Laplace's evidence.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> result = blr.fit(blr.laplace(), lambda x: jnp.sum(2 * x**2), jnp.ones(1), steps=3, tolerance=1e-9)
    >>> float(result.q.precision[0, 0])
    4.0
    """
    return newton().replace(name="laplace", section="4.4")


def vmp(rate: Number = 1.0, *, order: Order = None) -> Rule:
    r"""Variational message passing: ρ = 1, block by block (section 5.3; Winn and Bishop, 2005).

    On a `Model` of conjugate factors, $λ_j ← \sum_i ∇_{μ_j} E_q\log f_i$ for each block j in turn, the others where
    they are. `order` lists the blocks (or groups that move together); `"parallel"` moves all of them at once, which a
    rate below 1 damps.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> print(blr.vmp(order=["z", ("mean", "precision")]).steps)
    ρ = 1, in turn z, mean+precision
    """
    return Rule(Product, Exact(), Gradient(), Steps(rate, sweep=Sweep(order)), name="vmp", section="5.3")


def ncvmp(rate: Number = 1.0, *, order: Order = None) -> Rule:
    r"""Non-conjugate VMP: the same messages for factors that are not conjugate (section 5.3; Knowles and Minka, 2011).

    ρ = 1 may diverge there, so the guard halves a block's step until the bound does not fall; `info.blocks` says what
    fraction each block took.

    >>> import bayesrule as blr
    >>> blr.ncvmp() == blr.vmp().replace(guard=blr.Backtracking(monotone=True))
    True
    """
    return vmp(rate, order=order).replace(guard=Backtracking(monotone=True), name="ncvmp", section="5.3")


def svi(
    rate: Number, *, local_steps: int = 1, tolerance: Number = 0.0, together: int | None = None, order: Order = None
) -> Rule:
    r"""Stochastic variational inference: local blocks with ρ = 1, global ones with $ρ_t$ (section 5.3; Hoffman et al.).

    With mini-batches the factors' rows are scaled by N/M. A `rate` that is a function of the step count, such as
    $(t + t_0)^{−κ}$ with κ between ½ and 1, converges (Robbins and Monro). One step is a local block's optimum if its
    messages do not depend on itself; else it takes up to `local_steps`, afresh from its start at every visit, or until
    the mean change of λ in every row is below `tolerance`, `together` rows at a time (by default all of them). With the
    whole data, ρ = 1 and one local step it is `vmp`.

    >>> import bayesrule as blr
    >>> print(blr.svi(0.5).steps)
    ρ = 0.5, block by block, ρ = 1 in local blocks
    """
    steps = Steps(rate, sweep=Sweep(order, local=local_steps, together=together, tolerance=tolerance))
    return Rule(Product, Exact(), Gradient(), steps, name="svi", section="5.3")


def em(*parameters: str, rate: Number = 1.0, order: Order = None, m_steps: int = 1, tolerance: Number = 0.0) -> Rule:
    r"""Expectation maximisation: `vmp` with the parameters' blocks read at their peak (section 5.2).

    The delta method on q(θ), $θ_* = ∇A^*_{yz}(E_{q}T_{yz})$: with λ the sum of the messages to a conjugate block, θ_* =
    argmax ⟨λ, T(θ)⟩ is the M-step. A Gaussian block with `Delta()` points takes Newton's steps instead, `m_steps` of
    them (one is generalised EM); far from the maximum replace the guard by `Backtracking(monotone=True)`. `parameters`
    names the blocks, by default all that are not local. A rate below 1 with mini-batches is online EM,
    `order="parallel"` the parallel form. The bound is a lower bound on the log-likelihood.

    >>> import bayesrule as blr
    >>> print(blr.em("theta").family)
    Product with theta at its peak
    """
    sweep = Sweep(order, local=1, peaks=m_steps, tolerance=tolerance)
    family = Start(Product).peaked(*parameters)
    return Rule(family, Exact(), Gradient(), Steps(rate, sweep=sweep), name="em", section="5.2")


def cvi(rate: Number = 1.0, *, sites: bool = False) -> Rule:
    r"""Non-conjugate variational inference, every factor's message a natural gradient (section 5.4).

    $λ ← (1−ρ)λ + ρ\sum_i \tildeλ_i(μ)$ with $\tildeλ_i(μ) = ∇_μ E_q\log f_i$ (`eq:blr_global`), all blocks at
    once; each factor has points of its own. With `sites` the $\tildeλ_i$ are kept,
    $\tildeλ_i ← (1−ρ)\tildeλ_i + ρ\tildeλ_i(μ)$ and $λ = \sum_i\tildeλ_i$ (`eq:blr_local`): the same steps on the whole
    data; with mini-batches only a batch's own sites are renewed, so that the others stay exact.

    >>> import bayesrule as blr
    >>> blr.cvi(0.5, sites=True) == blr.cvi(0.5).replace(curvature=blr.Sites())
    True
    """
    measured = Sites() if sites else Gradient()
    return Rule(Product, Exact(), measured, Steps(rate), Backtracking(), name="cvi", section="5.4")


def exponential_weights(rate: Number, *, lazy: bool = False) -> Rule:
    r"""Exponential weights: $q_{t+1} ∝ q_t\,e^{−ρℓ_t}$ for losses that come one after another (section 5.4).

    A categorical q over experts, the expectation by enumeration, no decay (temperature 0). With another
    family it is another online algorithm: a fixed Gaussian and the delta method give online gradient
    descent, a Gaussian with `GaussNewton` the online Newton step. `lazy` takes the sum of all gradients
    from the start, at the current rate.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> rule, losses = blr.exponential_weights(1.0), jnp.array([[1.0, 0.0]])
    >>> objective = blr.Objective(lambda expert, loss: loss[expert], size=1)
    >>> state = rule.init(blr.Categorical(jnp.zeros(2)))
    >>> state, info = rule.step(objective, state, losses)
    >>> [round(float(p), 4) for p in state.q.probabilities]
    [0.2689, 0.7311]
    """
    steps = Steps(rate, temperature=0.0, lazy=lazy)
    return Rule(Categorical, Enumeration(), Score(), steps, name="exponential_weights", section="5.4")
