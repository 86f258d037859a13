r"""The evidence of the conjugate model that q's own messages make: hyper-parameters without looking at the data again.

At a fixed point of the rule the natural parameter is a sum, $λ = λ_0(η) + \tildeλ$: the prior's $λ_0$, which depends on
the hyper-parameters η, and the likelihood's message $\tildeλ$. With $\tildeλ$ held fixed, prior and message are a
conjugate model, whose evidence is $\log Z(η) = A(λ_0(η) + \tildeλ) − A(λ_0(η))$. Evaluating it takes no data. Its
derivative is $−∂_η E_q R_η$, that of the bound where q maximises the bound, so that both have the same stationary
points. Under the delta method the slope of the bound has a further term (`evidence_slope`), which this one leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ..families.base import ExponentialFamily
from ..numerics.programs import compiled
from ..objectives.regularizers import Regularizer, as_regularizer
from ..steps.step import Step
from .maximize import maximize

_WITHIN = 1e6  # how far a hyper-parameter may go in one search, as a factor


@compiled
def likelihood_message(regularizer: Regularizer, q: ExponentialFamily) -> PyTree:
    r"""The likelihood's message $\tildeλ = λ − λ_0$: q's natural parameter without the prior's part."""
    return jax.tree.map(jnp.subtract, q.natural(), _prior_natural(regularizer, q))


def conjugate_evidence(
    prior: Callable[[PyTree], Any],
    hyper: PyTree,
    q: ExponentialFamily,
    message: PyTree,
    *,
    belief: Callable[[PyTree], Any] | None = None,
    held: Sequence[str] = (),
) -> tuple[PyTree, float]:
    r"""Maximise $\log Z(η) = A(λ_0(η) + \tildeλ) − A(λ_0(η))$ over positive hyper-parameters η.

    Args:
        prior: prior(hyper) is what `Objective` takes as `regularizer=`.
        hyper: where to start.
        q: a member of the family; its λ is not used.
        message: the likelihood's message, from `likelihood_message`.
        belief: belief(hyper), a log density of the hyper-parameters that is added to log Z.
        held: the names of a dict's entries that are kept at their start.

    Returns:
        The hyper-parameters, and log Z at them.
    """
    score = lambda log_hyper: _log_evidence(q, message, log_hyper, prior, belief)
    best = maximize(score, hyper, within=_WITHIN, held=held, relative_gain=1e-15)
    return best.hyper, best.value


def _prior_natural(regularizer: Regularizer, q: ExponentialFamily) -> PyTree:
    """λ₀: what the prior adds to λ, the negative of its part of ∇_μ E_q ℓ̄."""
    gradient, curvature = regularizer.derivatives(q)
    return jax.tree.map(jnp.negative, q.natural_step(Step(gradient, curvature, 1.0, 1.0, 1.0)))


@compiled(static=("prior", "belief"))
def _log_evidence(
    q: ExponentialFamily, message: PyTree, log_hyper: PyTree, prior: Any, belief: Any
) -> tuple[Array, PyTree]:
    r"""log Z(η) and its gradient in log η.

    log Z is evaluated as the bound $⟨\tildeλ, μ⟩ + H(q) − E_q R_η$ of the conjugate model at its posterior, where it is
    tight. The posterior maximises the bound, so how it depends on η does not enter the gradient.
    """

    def value(log_hyper: PyTree) -> Array:
        hyper = jax.tree.map(jnp.exp, log_hyper)
        regularizer = as_regularizer(prior(hyper), None)
        constant = 0.0 if belief is None else belief(hyper)
        natural = jax.tree.map(jnp.add, message, _prior_natural(regularizer, q))
        posterior = jax.lax.stop_gradient(q.with_natural(natural))
        products = jax.tree.map(jnp.vdot, message, posterior.expectation())
        return sum(jax.tree.leaves(products)) + constant + posterior.entropy() - regularizer.expected(posterior)

    return jax.value_and_grad(value)(log_hyper)
