"""Where the loss is looked at for masks and signs: points that say how they move with μ."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from .points import Points, PointSet
from .steps import Number, number


class Relaxed(Points):
    r"""Relaxed signs, $θ = \tanh((λ + δ)/τ_c)$ with $δ = ½\log(ε/(1−ε))$, ε uniform (`eq:param_b_tau`).

    `relaxation` is the Concrete distribution's τ_c. The gradient is carried from θ to μ = tanh λ by the chain rule,
    with $s = (1 − θ^2 + η)/(τ_c(1 − \tanh^2 λ + η))$. η is `smoothing`: 0 is exact; the published
    code has 1e-10, which at its relaxation of 1e-10 makes s a constant 1e10. `noise=False` leaves δ out: with
    relaxation 1 the point is then the mean of q, and s = 1.
    """

    relaxation: Any
    smoothing: Any
    samples: int = eqx.field(static=True)
    noise: bool = eqx.field(static=True)
    approximation: ClassVar[str] = "Concrete relaxation"
    meaning: ClassVar[str] = "θ = tanh((λ + ½ log ε/(1 − ε))/relaxation), and s = ∂θ/∂μ  (eq:param_b_tau)"
    chained: ClassVar[bool] = True

    def __init__(self, relaxation: Number = 1.0, smoothing: Number = 0.0, *, samples: int = 1, noise: bool = True):
        if samples < 1 or (samples > 1 and not noise):
            raise ValueError(f"Relaxed takes a positive number of samples (one without noise), got {samples}.")
        self.relaxation = number(relaxation, "The relaxation")
        if isinstance(relaxation, float | int) and relaxation == 0:
            raise ValueError("The relaxation must be positive; for the sign itself use Sign().")
        self.smoothing = number(smoothing, "The smoothing")
        self.samples, self.noise = samples, noise

    @property
    def random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # without noise it is not
        return self.noise

    def at(self, q: Any, key: Any) -> PointSet:
        leaves, treedef = jax.tree.flatten(q.natural())
        if self.noise and key is None:
            raise ValueError("Relaxed points are random: pass key=jax.random.key(…).")
        keys = jax.random.split(key, len(leaves)) if self.noise else [None] * len(leaves)
        pairs = [self._leaf(x, k) for x, k in zip(leaves, keys, strict=True)]
        theta, slope = (jax.tree.unflatten(treedef, [pair[i] for pair in pairs]) for i in (0, 1))
        return PointSet(theta, jnp.full(self.samples, 1 / self.samples), slope)

    def _leaf(self, natural: Array, key: Any) -> tuple[Array, Array]:
        relaxation, smoothing = (jnp.asarray(x, natural.dtype) for x in (self.relaxation, self.smoothing))
        shape = (self.samples, *natural.shape)
        # ½ logit of a uniform number is half a logistic one.
        noise = 0.5 * jax.random.logistic(key, shape, natural.dtype) if self.noise else jnp.zeros(shape, natural.dtype)
        inner = (natural + noise) / relaxation
        theta = jnp.tanh(inner)
        # 1 − tanh² as sech² from logarithms: it underflows late, and a ratio of two does not lose digits.
        exact = jnp.exp(2 * (_log_cosh(natural) - _log_cosh(inner))) / relaxation
        if isinstance(self.smoothing, float | int) and self.smoothing == 0:
            return theta, exact
        outer = jnp.exp(-2 * _log_cosh(inner)) + smoothing
        return theta, outer / (relaxation * (jnp.exp(-2 * _log_cosh(natural)) + smoothing))

    def __repr__(self) -> str:
        extras = [str(self.relaxation)]
        if not (isinstance(self.smoothing, float | int) and self.smoothing == 0):
            extras.append(f"smoothing={self.smoothing}")
        extras += [f"samples={self.samples}"] * (self.samples > 1) + ["noise=False"] * (not self.noise)
        return f"Relaxed({', '.join(extras)})"


def _log_cosh(x: Array) -> Array:
    return jnp.abs(x) + jnp.log1p(jnp.exp(-2 * jnp.abs(x))) - jnp.log(jnp.asarray(2, x.dtype))


class Sign(Points):
    """One point, sign(λ), whose gradient is taken as it is: the straight-through estimator (`eq:STE`)."""

    approximation: ClassVar[str] = "Delta method"
    meaning: ClassVar[str] = "θ = sign(λ), with its gradient in place of that in μ (eq:STE)"
    chained: ClassVar[bool] = True

    def at(self, q: Any, key: Any) -> PointSet:
        sign = lambda x: jnp.where(x >= 0, 1.0, -1.0).astype(x.dtype)[None]
        theta = jax.tree.map(sign, q.natural())
        return PointSet(theta, jnp.ones(1), jax.tree.map(jnp.ones_like, theta))


class Masks(Points):
    """Dropout: θ = z∘m with units z dropped at random, and z/π₁ on the derivatives (`eq:grad_loss`).

    Within the slab it is the delta method. `relaxation` draws z by the Concrete relaxation, in (0, 1), which a
    SpikeSlab needs in order to learn its keep probabilities.
    """

    relaxation: Any
    samples: int = eqx.field(static=True)
    approximation: ClassVar[str] = "Delta method, stochastic approx., responsibility approx."
    meaning: ClassVar[str] = "θ = z∘m, units dropped where z = 0; derivatives weighted by z/π₁ (eq:grad_loss)"
    chained: ClassVar[bool] = True
    random: ClassVar[bool] = True
    delta: ClassVar[bool] = True

    def __init__(self, samples: int = 1, *, relaxation: Number | None = None):
        if samples < 1:
            raise ValueError(f"Masks takes a positive number of samples, got {samples}.")
        self.samples = samples
        self.relaxation = None if relaxation is None else number(relaxation, "The relaxation")

    def at(self, q: Any, key: Any) -> PointSet:
        if key is None:
            raise ValueError("Masks are random: pass key=jax.random.key(…).")
        if q.learnt and self.relaxation is None:
            raise ValueError(
                "A keep probability is learnt through the Concrete relaxation: use Masks(relaxation=0.1) points."
            )
        z = q.masks(q.uniform(key, (self.samples,)), self.relaxation)
        return masked(q, z, self.relaxation)

    def __repr__(self) -> str:
        return f"Masks({self.samples}{'' if self.relaxation is None else f', relaxation={self.relaxation}'})"


def masked(q: Any, z: PyTree, relaxation: Any = None, weights: Array | None = None) -> PointSet:
    """The points z∘m for masks with a leading axis, with their weights z/π₁ and slopes ∂z/∂π₁."""
    count = jax.tree.leaves(z)[0].shape[0]
    theta = jax.tree.map(lambda z, m: z * m, z, q.slab.mean)
    factors = jax.tree.map(lambda z, k: z / k, z, q.keep)
    slopes = None
    if relaxation is not None:
        slopes = jax.tree.map(lambda z, k: z * (1 - z) / (relaxation * jnp.where(k < 1, k * (1 - k), 1)), z, q.keep)
    return PointSet(theta, jnp.full(count, 1 / count) if weights is None else weights, (factors, slopes))


class Each(Points):
    """Points for each block of a `Product`: `Each({"w": Relaxed(1.0), "b": MonteCarlo(1)})`."""

    blocks: dict[str, Points]
    approximation: ClassVar[str] = "block by block"
    meaning: ClassVar[str] = "each block at its own points"
    chained: ClassVar[bool] = True

    def __init__(self, blocks: dict[str, Points]):
        if not blocks or not all(isinstance(points, Points) for points in blocks.values()):
            raise ValueError("Each takes a dict with points for every block of a Product.")
        self.blocks = {name: blocks[name] for name in sorted(blocks)}

    @property
    def random(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # if one of them is
        return any(points.random for points in self.blocks.values())

    def at(self, q: Any, key: Any) -> PointSet:
        keys = [None] * len(self.blocks) if key is None else jax.random.split(key, len(self.blocks))
        sets = {name: points.at(q.blocks[name], k) for k, (name, points) in zip(keys, self.blocks.items(), strict=True)}
        count = max(spots.weights.shape[0] for spots in sets.values())
        if any(spots.weights.shape[0] not in (1, count) for spots in sets.values()):
            raise ValueError(f"The blocks need equally many points (or one), got {self}.")
        many = lambda tree: jax.tree.map(lambda t: jnp.broadcast_to(t, (count, *t.shape[1:])), tree)
        theta = {name: many(spots.theta) for name, spots in sets.items()}
        factors = {name: many(spots.factors) for name, spots in sets.items()}
        return PointSet(theta, jnp.full(count, 1 / count), factors)

    def __repr__(self) -> str:
        return f"Each({{{', '.join(f'{name!r}: {points!r}' for name, points in self.blocks.items())}}})"
