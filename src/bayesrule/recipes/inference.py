"""Bayesian inference as the rule: Table 1's last block, and online learning (section 5.4)."""

from __future__ import annotations

from ..curvature import Gradient
from ..families.base import ExponentialFamily
from ..families.discrete import Categorical
from ..guards import Backtracking
from ..points import Enumeration, Exact
from ..rule import Rule
from ..score import Score
from ..steps import Number, Steps
from .optimization import newton


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
