r"""Anderson acceleration of the rule: a step from the last few steps together.

Where θ's entries are correlated, the steps of a mean-field q are small and turn slowly: each entry moves as if the
others stood still. The last few steps show how the natural gradient changes from place to place, and the place where
it would vanish, were it linear between them, is far ahead of the next step. `Anderson` proposes that place and the
guard compares the loss there with the loss before the step, so that the rule itself, its fixed points and its
monotone bound stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..numerics.pytree import PyTree
from .needs import Need

if TYPE_CHECKING:
    from ..families.base import ExponentialFamily
    from .guards import GuardedStep
    from .step import Step


class History(eqx.Module):
    """The last steps, newest first: what `Anderson` keeps in the rule's `State`."""

    places: PyTree
    """q's coordinates before each step (`ExponentialFamily.chart`), along a leading axis."""
    velocities: PyTree
    """Minus the natural gradient there, in the same coordinates."""
    filled: Int[Array, ""]
    """How many of the steps are there since the history was last emptied."""
    damping: Float[Array, ""]
    """Which fraction of its step the guard left at the last plain step."""


class Proposal(eqx.Module):
    """A q that a guard tries before the step itself."""

    q: Any
    """The candidate."""
    ready: Any
    """Whether there is one; if not, `q` is to be ignored."""


class Anderson(eqx.Module):
    r"""Anderson acceleration over the last `window` steps (type II), for full batches and a guard that compares losses.

    With v(x) = −∇ the rule's direction at the coordinates x of q, and Δ the differences of the last steps to this one:

    $$γ = \arg\min ‖v − ΔV γ‖_F,\qquad x ← x + βρ v − (ΔX + βρ ΔV) γ$$

    in the norm of the Fisher information F. β is the fraction of the last plain step that the guard accepted. Where
    the loss at the new x is not above the loss before the step, it is taken; else the plain step is, and the history
    starts again from there. On a quadratic loss these are the steps of restarted GMRES, preconditioned by F.

    Use it where a fit needs many steps because the family leaves out correlations that the posterior has:
    `rule.replace(steps=blr.Steps(1.0, acceleration=blr.Anderson()), guard=blr.Backtracking(monotone=True))`.

    Args:
        window: How many steps are remembered. It costs the memory of 2·window copies of λ.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> shared = jnp.ones((6, 6)) + 0.01 * jnp.eye(6)                     # correlations of 0.99
    >>> loss = lambda x: 0.5 * (x - 1) @ shared @ (x - 1)
    >>> rule = blr.newton().replace(family=blr.DiagonalGaussian, curvature=blr.HessianDiagonal())
    >>> fast = rule.replace(steps=blr.Steps(1.0, acceleration=blr.Anderson()))
    >>> result = blr.fit(fast, loss, jnp.arange(6.0), steps=100, tolerance=1e-8)
    >>> result.reason, bool(result.steps < 20)
    ('converged', True)

    Reference: Walker and Ni, "Anderson acceleration for fixed-point iterations", SIAM J. Numer. Anal. 2011.
    """

    window: int = eqx.field(static=True)
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.guard.evaluates,
            "Anderson() extrapolates, and only a guard that compares losses can tell whether that went well: use "
            "Backtracking(monotone=True).",
        ),
        (
            lambda p: not p.points.random,
            lambda p: (
                f"{p.points!r} are drawn anew at each step, and Anderson() would take their noise for a change of the "
                "gradient: use Quadrature() or QuasiMonteCarlo()."
            ),
        ),
        (
            lambda p: p.abstract or hasattr(p.kind, "chart"),
            lambda p: (
                f"Anderson() extrapolates in λ or in coordinates with a known Fisher information, and {p.name} has "
                "neither: use an exponential family, or leave the acceleration out."
            ),
        ),
    )

    def __init__(self, window: int = 20):
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"Anderson(window) remembers a positive number of steps, got {window!r}.")
        self.window = window

    def first(self, q: Any) -> History:
        """The empty history, for the state that a rule starts from."""
        empty = jax.tree.map(lambda x: jnp.zeros((self.window, *x.shape), x.dtype), q.chart())
        return History(empty, empty, jnp.zeros((), int), jnp.ones(()))

    def propose(self, history: History, q: ExponentialFamily, step: Step) -> Proposal:
        """The q at which the direction would vanish, were it linear over the last steps. Called once in every step.

        Args:
            history: The steps before this one.
            q: Where the step starts from.
            step: The plain step.
        """
        place, velocity = q.chart(), q.chart_velocity(step)
        known = jnp.arange(self.window) < history.filled

        def difference(now: Array, before: Array) -> Array:
            return jnp.where(known.reshape((-1,) + (1,) * now.ndim), now - before, 0)

        places = jax.tree.map(difference, place, history.places)
        velocities = jax.tree.map(difference, velocity, history.velocities)
        weights = _least_squares(velocities, velocity, q)
        mixing = step.rate * history.damping

        def extrapolated(x: Array, v: Array, dx: Array, dv: Array) -> Array:
            beta, gamma = mixing.astype(x.dtype), weights.astype(x.dtype)
            return x + beta * v - jnp.tensordot(gamma, dx + beta * dv, axes=1)

        new = jax.tree.map(extrapolated, place, velocity, places, velocities)
        return Proposal(q.at_chart(new), history.filled > 0)

    def updated(self, history: History, q: ExponentialFamily, step: Step, guarded: GuardedStep) -> History:
        """The history with this step in it; the earlier ones stay only if the proposal was taken."""
        push = lambda new, old: jnp.concatenate([new[None], old[:-1]])
        places = jax.tree.map(push, q.chart(), history.places)
        velocities = jax.tree.map(push, q.chart_velocity(step), history.velocities)
        filled = jnp.where(guarded.proposed, jnp.minimum(history.filled + 1, self.window), 1)
        damping = jnp.where(guarded.proposed, history.damping, guarded.fraction.astype(history.damping.dtype))
        return History(places, velocities, filled.astype(history.filled.dtype), damping)

    def __str__(self) -> str:
        return f"Anderson acceleration over {self.window} steps"

    __repr__ = __str__


def _least_squares(columns: PyTree, target: PyTree, q: ExponentialFamily) -> Float[Array, " K"]:
    """γ = argmin ‖target − Σ_k γ_k columns_k‖ in the norm of q's Fisher information.

    The normal equations are scaled to a unit diagonal, and directions that rounding cannot tell from 0 are left out:
    among them the columns of steps that are not there, which are 0.
    """
    lowered = jax.vmap(q.chart_metric)(columns)
    rows = lambda tree: [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]
    pairs = list(zip(rows(columns), rows(lowered), jax.tree.leaves(target), strict=True))
    gram = sum((a @ b.T for a, b, _ in pairs), start=jnp.zeros(()))
    right = sum((b @ t.reshape(-1) for _, b, t in pairs), start=jnp.zeros(()))
    norms = jnp.sqrt(jnp.maximum(jnp.diagonal(gram), 0))
    scale = jnp.where(norms > 0, 1 / jnp.asarray(jnp.where(norms > 0, norms, 1)), 0)
    gram = 0.5 * (gram + gram.T) * scale * scale[:, None]
    finite = jnp.all(jnp.isfinite(gram))  # An eigensolver may not return from entries that are not finite.
    values, vectors = jnp.linalg.eigh(jnp.where(finite, gram, 0))
    kept = values > 10 * len(values) * jnp.finfo(values.dtype).eps * values[-1]
    inverse = jnp.where(kept, 1 / jnp.asarray(jnp.where(kept, values, 1)), 0)
    return scale * (vectors @ (inverse * (vectors.T @ (scale * right))))
