"""A Gaussian whose precision is a diagonal plus a low-rank product."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
from jaxtyping import Array, Bool, Float

from ...numerics.linalg import root_rows
from ...numerics.pytree import PyTree
from ...numerics.trees import floating, ravel, unravel
from ...steps.step import Step
from .base import GaussianFamily
from .precision import FACTORED, Factored, Structure


class LowRankGaussian(GaussianFamily):
    r"""$N(m, S^{-1})$ with $S = \mathrm{diag}(d) + UU^⊤$, U of L columns: the candidate of SLANG.

    It is not an exponential family, so a step is followed by a projection. The new precision $(1−ρτ)S + ρH$ has a
    higher rank than L: U becomes its L leading directions, and the diagonal of the others is added to d, so that the
    diagonal of S is exact (Mishkin et al., NeurIPS 2018).

    >>> import jax.numpy as jnp
    >>> q = LowRankGaussian(jnp.zeros(3), 1.0, jnp.ones((3, 1)))
    >>> [round(float(x), 4) for x in q.variance()]
    [0.75, 0.75, 0.75]

    Args:
        mean: m, a pytree of floating arrays with P numbers in all.
        diagonal: d, one number or a pytree like the mean.
        factor: U, (P, L) over the ravelled mean. Axes before these are a batch, and the mean has them in front too.
    """

    mean: PyTree
    diagonal: Float[Array, "... P"]
    factor: Float[Array, "... P L"]
    label: ClassVar[str] = "Gaussian (low-rank plus diagonal precision)"
    meaning: ClassVar[str] = "q(θ) = N(m, S⁻¹), S = diag(d) + UUᵀ"
    update: ClassVar[str] = "diag(d) + UUᵀ ← projection of (1 − ρτ)S + ρH,  m ← m − ρ S⁻¹ E_q∇ℓ̄  (section 4.4)"
    structure: ClassVar[Structure] = FACTORED

    @classmethod
    def around(cls, params: PyTree, precision: Any, *, rank: int | None = None, **choices: Any) -> Self:
        if rank is None:
            raise ValueError(
                "Bare parameters do not determine the rank: start from LowRankGaussian(params, diagonal, factor)."
            )
        size = sum(jnp.size(leaf) for leaf in jax.tree.leaves(params))
        dtype = jnp.result_type(*jax.tree.leaves(params), float)
        return cls(params, precision, jnp.zeros((size, min(rank, size)), dtype))

    def __init__(self, mean: PyTree, diagonal: Any, factor: Any):
        self.mean = floating(mean)
        self.factor = floating(factor)
        if self.factor.ndim < 2:
            raise ValueError(f"The factor of a LowRankGaussian is a matrix (P, rank), got shape {self.factor.shape}.")
        lead, size = self.factor.shape[:-2], self.factor.shape[-2]
        leaves = jax.tree.leaves(self.mean)
        own = sum(math.prod(leaf.shape[len(lead) :]) for leaf in leaves)
        if own != size or any(leaf.shape[: len(lead)] != lead for leaf in leaves):
            raise ValueError(
                f"The factor of a LowRankGaussian over {own} numbers has shape (…, {own}, rank) with the mean's batch "
                f"axes in front, got {self.factor.shape}."
            )
        diagonal = floating(diagonal)
        single = isinstance(diagonal, jax.Array) and diagonal.ndim == 0  # else a pytree like the mean
        flat = diagonal if single else ravel(diagonal, len(lead))
        self.diagonal = jnp.broadcast_to(flat, (*lead, size)).astype(self.factor.dtype)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.factor.shape[:-2]

    @property
    def noise_size(self) -> int:
        return self.factor.shape[-2] + self.factor.shape[-1]

    @property
    def precision(self) -> Float[Array, "... P P"]:
        """S, as a dense matrix."""
        identity = jnp.eye(self.diagonal.shape[-1], dtype=self.diagonal.dtype)
        return self.diagonal[..., None] * identity + self.factor @ jnp.swapaxes(self.factor, -1, -2)

    def _tree(self, vector: Float[Array, "... P"]) -> PyTree:
        return unravel(vector, self.mean, len(self.batch_shape))

    def _vector(self, theta: PyTree) -> Float[Array, "... P"]:
        """θ as one vector, over any leading axes."""
        theirs, mine = jax.tree.leaves(theta), jax.tree.leaves(self.mean)
        return ravel(theta, theirs[0].ndim - mine[0].ndim + len(self.batch_shape))

    def _capacitance(self) -> Float[Array, "... L L"]:
        """The Cholesky factor of I + UᵀD⁻¹U, the L×L matrix of Woodbury's identity, with D = diag(d)."""
        inner = jnp.swapaxes(self.factor, -1, -2) @ (self.factor / self.diagonal[..., None])
        return jnp.linalg.cholesky(jnp.eye(inner.shape[-1], dtype=inner.dtype) + inner)

    def _solve(self, rows: Float[Array, "... P"]) -> Float[Array, "... P"]:
        """S⁻¹ of a vector, over any leading axes."""
        half = self._woodbury_root()
        inner = jnp.einsum("...lp,...p->...l", half, rows)
        return rows / self.diagonal - jnp.einsum("...lp,...l->...p", half, inner)

    def transformed(self, noise: Float[Array, "... Q"]) -> PyTree:
        """m + S⁻¹(D^{½}ε₁ + Uε₂), whose covariance is S⁻¹."""
        size = self.diagonal.shape[-1]
        tilted = jnp.sqrt(self.diagonal) * noise[..., :size]
        tilted = tilted + jnp.einsum("...pl,...l->...p", self.factor, noise[..., size:])
        return self._tree(self._vector(self.mean) + self._solve(tilted))

    def times(self, theta: PyTree) -> PyTree:
        vector = self._vector(theta)
        inner = jnp.einsum("...pl,...p->...l", self.factor, vector)
        return self._tree(self.diagonal * vector + jnp.einsum("...pl,...l->...p", self.factor, inner))

    def solve(self, theta: PyTree) -> PyTree:
        return self._tree(self._solve(self._vector(theta)))

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        deviation = self._vector(theta) - self._vector(self.mean)
        along = jnp.einsum("...pl,...p->...l", self.factor, deviation)
        squares = jnp.sum(self.diagonal * deviation**2, axis=-1) + jnp.sum(along**2, axis=-1)
        return 0.5 * (self._log_det() - self.diagonal.shape[-1] * math.log(2 * math.pi) - squares)

    def _log_det(self) -> Float[Array, "..."]:
        pivots = jnp.diagonal(self._capacitance(), axis1=-2, axis2=-1)
        return jnp.sum(jnp.log(self.diagonal), axis=-1) + 2 * jnp.sum(jnp.log(pivots), axis=-1)

    def entropy(self) -> Float[Array, "..."]:
        return 0.5 * (self.diagonal.shape[-1] * (1 + math.log(2 * math.pi)) - self._log_det())

    def inside(self) -> Bool[Array, "..."]:
        finite = jnp.all(jnp.isfinite(self._vector(self.mean)), axis=-1)
        finite = finite & jnp.all(jnp.isfinite(self.factor), axis=(-2, -1))
        return finite & jnp.all(jnp.isfinite(self.diagonal) & (self.diagonal > 0), axis=-1)

    def trace(self, curvature: Factored) -> Float[Array, ""]:
        along = jnp.sum(self._solve(curvature.rows) * curvature.rows)
        return jnp.sum(self._vector(self.variance()) * curvature.diagonal) + along

    def _woodbury_root(self) -> Float[Array, "... L P"]:
        """W with S⁻¹ = D⁻¹ − WᵀW, by Woodbury's identity."""
        scaled = jnp.swapaxes(self.factor / self.diagonal[..., None], -1, -2)
        return linalg.solve_triangular(self._capacitance(), scaled, lower=True)

    def variance(self) -> PyTree:
        return self._tree(1 / self.diagonal - jnp.sum(self._woodbury_root() ** 2, axis=-2))

    def covariance(self) -> Float[Array, "... P P"]:
        half, identity = self._woodbury_root(), jnp.eye(self.diagonal.shape[-1], dtype=self.diagonal.dtype)
        return identity / self.diagonal[..., None] - jnp.swapaxes(half, -1, -2) @ half

    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K K"]:
        flat = ravel(jacobian, 2)
        return jnp.einsum("bkp,blp->bkl", self._solve(flat), flat)

    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        return structure.of_matrix(self.precision, like)

    def prior_trace(self, other: GaussianFamily) -> Float[Array, "..."]:
        return jnp.sum(self.precision * other.covariance(), axis=(-2, -1))

    def moved(self, step: Step) -> Self:
        decay = jnp.asarray(1 - step.precision_rate * step.temperature, self.diagonal.dtype)
        rate = jnp.asarray(step.precision_rate, self.diagonal.dtype)
        # A rate above 1/τ makes the decay negative, and the old factor is then left out. The guard judges such a step
        # by the diagonal, which is multiplied by the negative decay.
        root_decay = jnp.sqrt(jnp.maximum(decay, 0.0))
        columns = jnp.concatenate([root_decay * self.factor, jnp.sqrt(rate) * step.curvature.rows.T], axis=1)
        largest, rest = _leading_directions(columns, self.factor.shape[1])
        diagonal = decay * self.diagonal + rate * step.curvature.diagonal + rest
        new = eqx.tree_at(lambda q: (q.diagonal, q.factor), self, (diagonal, largest))
        push = jnp.asarray(step.rate, diagonal.dtype) * new._solve(self._vector(step.gradient))
        return eqx.tree_at(lambda q: q.mean, new, self._tree(self._vector(self.mean) - push))

    def with_scaled_precision(self, factor: Any) -> Self:
        factor = jnp.asarray(factor, self.diagonal.dtype)
        return eqx.tree_at(
            lambda q: (q.diagonal, q.factor), self, (factor * self.diagonal, jnp.sqrt(factor) * self.factor)
        )

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ gᵀS⁻¹g, the mean's part; the precision's has no closed form, because of the projection."""
        gradient = self._vector(step.gradient)
        return 0.5 * gradient @ self._solve(gradient)


def _leading_directions(columns: Float[Array, "P R"], rank: int) -> tuple[Array, Array]:
    """U of `rank` columns with UUᵀ the best approximation of CCᵀ, and the diagonal of CCᵀ − UUᵀ."""
    size, count = columns.shape
    if count <= size:  # C times the eigenvectors of CᵀC has orthogonal columns, in ascending order of length.
        _, rotation = jnp.linalg.eigh(columns.T @ columns)
        rotated = columns @ rotation
    else:
        rotated = root_rows(columns @ columns.T).T
    kept = rotated[:, ::-1][:, :rank]
    rest = jnp.sum(columns**2, axis=1) - jnp.sum(kept**2, axis=1)
    if kept.shape[1] < rank:
        kept = jnp.pad(kept, ((0, 0), (0, rank - kept.shape[1])))
    return kept, jnp.maximum(rest, 0.0)
