r"""The evidence of the conjugate model that q's own messages make: hyper-parameters without looking at the data again.

At a fixed point of the rule the natural parameter is a sum, $λ = λ_0(η) + \tildeλ$: the prior's $λ_0$, which depends on
the hyper-parameters η, and the likelihood's message $\tildeλ$. With $\tildeλ$ held fixed, prior and message are a
conjugate model, whose evidence is $\log Z(η) = A(λ_0(η) + \tildeλ) − A(λ_0(η))$. Evaluating it takes no data. Its
derivative is $−∂_η E_q R_η$, that of the bound where q maximises the bound, so that both have the same stationary
points. Under the delta method the slope of the bound has a further term (`evidence_slope`), which this one leaves out.

A Newton step on log Z (`evidence_step`) ends short of the bound's maximum or beyond it, because the message changes
with η too. `Extrapolation` learns from the steps so far how much: for one hyper-parameter it is the secant method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ..families.base import ExponentialFamily
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..objectives.regularizers import Regularizer, as_regularizer
from ..steps.step import Step

_LONGEST_STEP = 2.0  # of log η, along each axis of the Hessian
_LONGEST_EXTRAPOLATION = 4.0


@compiled(static=("prior", "belief"), rare=True)
def evidence_step(
    q: ExponentialFamily,
    logs: PyTree,
    held: PyTree,
    prior: Callable[[PyTree], Any],
    belief: Callable[[PyTree], Any] | None,
) -> tuple[PyTree, Float[Array, ""]]:
    r"""A Newton step of log η on log Z.

    Args:
        q: the posterior at η, whose message $\tildeλ = λ − λ_0(η)$ is held fixed.
        logs: log η.
        held: the logarithms of hyper-parameters that are not learned, a dict; None if there are none.
        prior: prior(η) is what `Objective` takes as `regularizer=`.
        belief: belief(η), a log density of the hyper-parameters that is added to log Z.

    Returns:
        The step, of the structure of log η, and half of it times the slope: the nats still to gain, to second order.
    """
    vector, unravel = ravel_pytree(logs)
    hyper = lambda vector: join(jax.tree.map(jnp.exp, unravel(vector)), jax.tree.map(jnp.exp, held))

    def explicit(vector: Array, posterior: ExponentialFamily) -> Array:
        """What of the conjugate model's bound depends on η where the posterior is held fixed."""
        density = 0.0 if belief is None else belief(hyper(vector))
        return density - as_regularizer(prior(hyper(vector)), None).expected(posterior)

    def slope(changed: Array) -> Array:
        # The posterior maximises the conjugate model's bound, so how it depends on η does not enter the slope.
        posterior = _moved_with_prior(q, hyper(vector), hyper(changed), prior)
        return jax.grad(explicit)(changed, posterior)

    # The slope comes with its derivative, so that it is traced and computed once.
    hessian, value = jax.jacfwd(lambda vector: (slope(vector),) * 2, has_aux=True)(vector)
    step, gain = _newton_step(value, hessian)
    return unravel(step), gain


@compiled(static="prior", rare=True)
def with_new_prior(q: ExponentialFamily, before: PyTree, after: PyTree, prior: Callable[[PyTree], Any]) -> Any:
    """q with the same message and another prior: where to start the fit at other hyper-parameters."""
    return _moved_with_prior(q, before, after, prior)


def join(learned: PyTree, held: dict[str, Any] | None) -> PyTree:
    """All hyper-parameters, from those that are learned and those that are held."""
    return learned if held is None else {**learned, **held}


def _moved_with_prior(q: ExponentialFamily, before: PyTree, after: PyTree, prior: Callable[[PyTree], Any]) -> Any:
    old, new = (_prior_natural(as_regularizer(prior(hyper), None), q) for hyper in (before, after))
    return q.with_natural(jax.tree.map(lambda own, new, old: own + (new - old), q.natural(), new, old))


def _prior_natural(regularizer: Regularizer, q: ExponentialFamily) -> PyTree:
    """λ₀: what the prior adds to λ, the negative of its part of ∇_μ E_q ℓ̄."""
    gradient, curvature = regularizer.derivatives(q)
    return jax.tree.map(jnp.negative, q.natural_step(Step(gradient, curvature, 1.0, 1.0, 1.0)))


def _newton_step(
    slope: Float[Array, " D"], hessian: Float[Array, "D D"]
) -> tuple[Float[Array, " D"], Float[Array, ""]]:
    """A step uphill, by the size of the curvature where the score is not concave, and half of it times the slope.

    It is not long: far from the maximum the curvature says little about the way there.
    """
    if slope.size == 1:
        values, vectors = hessian[0], jnp.ones((1, 1), slope.dtype)
    else:
        values, vectors = jnp.linalg.eigh(hessian)
    along = vectors.T @ slope
    tiny = jnp.finfo(slope.dtype).tiny
    lengths = along / jnp.maximum(jnp.maximum(jnp.abs(values), jnp.abs(along) / _LONGEST_STEP), tiny)
    return vectors @ lengths, 0.5 * jnp.sum(along * lengths)


class Extrapolation:
    """Anderson acceleration of a fixed-point iteration x ← x + r(x) in a few dimensions; in one, the secant method.

    The last steps span a model in which r is linear, and the next x is where that model has r = 0. Where the model
    says that r grows along the way, as it does far from the maximum, the plain step is taken.
    """

    def __init__(self) -> None:
        self.places: list[np.ndarray] = []
        self.residuals: list[np.ndarray] = []

    def next(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """The next x after this one, with its r(x)."""
        self.places = [*self.places, x][-(x.size + 1) :]
        self.residuals = [*self.residuals, residual][-(x.size + 1) :]
        plain = x + residual
        if len(self.places) < 2:
            return plain
        moves = np.stack([x - place for place in self.places[:-1]], axis=1)
        changes = np.stack([residual - other for other in self.residuals[:-1]], axis=1)
        if float(np.sum(moves[:, -1] * changes[:, -1])) >= 0:
            return plain
        weights = np.linalg.lstsq(changes, residual, rcond=1e-10)[0]
        step = residual - (moves + changes) @ weights
        return x + np.clip(step, -_LONGEST_EXTRAPOLATION, _LONGEST_EXTRAPOLATION)
