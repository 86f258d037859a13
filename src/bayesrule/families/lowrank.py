"""A Gaussian whose precision is a diagonal plus a low-rank product."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
from jaxtyping import Array, Bool, Float, PyTree

from ..steps import Step
from .structure import FACTORED, Factored, GaussianFamily, Structure, floating, ravel, unravel


class LowRankGaussian(GaussianFamily):
    r"""$N(m, S^{-1})$ with $S = \mathrm{diag}(d) + UU^⊤$, U of L columns: SLANG's candidate.

    Not an exponential family: it moves by projection. The plain step's precision
    $(1−ρτ)S + ρH$ has more columns; the L largest directions are kept as they are, and the rest of
    its diagonal goes to d, so that the diagonal of S is never approximated
    (Mishkin et al., NeurIPS 2018).

    `mean` is any pytree, `diagonal` one number or a pytree like it, `factor` is (P, L) over the
    ravelled mean.

    >>> import jax.numpy as jnp
    >>> q = LowRankGaussian(jnp.zeros(3), 1.0, jnp.ones((3, 1)))
    >>> [round(float(x), 4) for x in q.variance()]
    [0.75, 0.75, 0.75]
    """

    mean: PyTree
    diagonal: Float[Array, " P"]
    factor: Float[Array, "P L"]
    label: ClassVar[str] = "Gaussian (low-rank plus diagonal precision)"
    meaning: ClassVar[str] = "q(θ) = N(m, S⁻¹), S = diag(d) + UUᵀ"
    update: ClassVar[str] = "diag(d) + UUᵀ ← projection of (1 − ρτ)S + ρH,  m ← m − ρ S⁻¹ E_q∇ℓ̄  (section 4.4)"
    structure: ClassVar[Structure] = FACTORED

    def __init__(self, mean: PyTree, diagonal: Any, factor: Any):
        self.mean = floating(mean)
        size = sum(leaf.size for leaf in jax.tree.leaves(self.mean))
        self.factor = floating(factor)
        if self.factor.ndim != 2 or self.factor.shape[0] != size:
            raise ValueError(
                f"The factor of a LowRankGaussian over {size} numbers has shape ({size}, rank), got "
                f"{self.factor.shape}."
            )
        self.diagonal = jnp.broadcast_to(ravel(floating(diagonal)), (size,)).astype(self.factor.dtype)

    @property
    def noise_size(self) -> int:
        return sum(self.factor.shape)

    @property
    def precision(self) -> Float[Array, "P P"]:
        """S, as a dense matrix."""
        return jnp.diag(self.diagonal) + self.factor @ self.factor.T

    def _tree(self, vector: Float[Array, "... P"]) -> PyTree:
        return unravel(vector, self.mean)

    def _lead(self, theta: PyTree) -> int:
        return jax.tree.leaves(theta)[0].ndim - jax.tree.leaves(self.mean)[0].ndim

    def _capacitance(self) -> Float[Array, "L L"]:
        """chol(I + UᵀD⁻¹U), the small matrix of Woodbury's identity."""
        inner = self.factor.T @ (self.factor / self.diagonal[:, None])
        return jnp.linalg.cholesky(jnp.eye(inner.shape[0], dtype=inner.dtype) + inner)

    def _solve(self, rows: Float[Array, "... P"]) -> Float[Array, "... P"]:
        scaled = rows / self.diagonal
        inner = linalg.cho_solve((self._capacitance(), True), (scaled @ self.factor)[..., None])[..., 0]
        return scaled - (inner @ self.factor.T) / self.diagonal

    def transformed(self, noise: Float[Array, "... Q"]) -> PyTree:
        """m + S⁻¹(D^{½}ε₁ + Uε₂), whose covariance is S⁻¹."""
        first, second = noise[..., : self.diagonal.size], noise[..., self.diagonal.size :]
        tilted = jnp.sqrt(self.diagonal) * first + second @ self.factor.T
        return self._tree(ravel(self.mean) + jnp.vectorize(self._solve, signature="(p)->(p)")(tilted))

    def times(self, theta: PyTree) -> PyTree:
        vector = ravel(theta)
        return self._tree(self.diagonal * vector + self.factor @ (self.factor.T @ vector))

    def solve(self, theta: PyTree) -> PyTree:
        return self._tree(self._solve(ravel(theta)))

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        deviation = ravel(theta, self._lead(theta)) - ravel(self.mean)
        squares = jnp.sum(self.diagonal * deviation**2, axis=-1) + jnp.sum((deviation @ self.factor) ** 2, axis=-1)
        return 0.5 * (self._log_det() - self.diagonal.size * math.log(2 * math.pi) - squares)

    def _log_det(self) -> Float[Array, ""]:
        return jnp.sum(jnp.log(self.diagonal)) + 2 * jnp.sum(jnp.log(jnp.diagonal(self._capacitance())))

    def entropy(self) -> Float[Array, ""]:
        return 0.5 * (self.diagonal.size * (1 + math.log(2 * math.pi)) - self._log_det())

    def inside(self) -> Bool[Array, ""]:
        parts = (ravel(self.mean), self.diagonal, self.factor)
        return jnp.all(self.diagonal > 0) & jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in parts]))

    def trace(self, curvature: Factored) -> Float[Array, ""]:
        return jnp.sum(ravel(self.variance()) * curvature.diagonal) + jnp.sum(
            jax.vmap(self._solve)(curvature.rows) * curvature.rows
        )

    def variance(self) -> PyTree:
        half = linalg.solve_triangular(self._capacitance(), (self.factor / self.diagonal[:, None]).T, lower=True)
        return self._tree(1 / self.diagonal - jnp.sum(half**2, axis=0))

    def covariance(self) -> Float[Array, "P P"]:
        return jax.vmap(self._solve)(jnp.eye(self.diagonal.size, dtype=self.diagonal.dtype))

    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K K"]:
        flat = ravel(jacobian, 2)
        return jnp.einsum("bkp,blp->bkl", jax.vmap(jax.vmap(self._solve))(flat), flat)

    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        return structure.of_matrix(self.precision, like)

    def prior_trace(self, other: GaussianFamily) -> Float[Array, ""]:
        return jnp.sum(self.precision * other.covariance())

    def moved(self, step: Step) -> Self:
        decay = jnp.asarray(1 - step.precision_rate * step.temperature, self.diagonal.dtype)
        rate = jnp.asarray(step.precision_rate, self.diagonal.dtype)
        # A rate past 1/τ would flip the old factor's sign; the guard sees the diagonal instead.
        kept = jnp.sqrt(jnp.maximum(decay, 0.0))
        columns = jnp.concatenate([kept * self.factor, jnp.sqrt(rate) * step.curvature.rows.T], axis=1)
        largest, rest = _largest(columns, self.factor.shape[1])
        diagonal = decay * self.diagonal + rate * step.curvature.diagonal + rest
        new = eqx.tree_at(lambda q: (q.diagonal, q.factor), self, (diagonal, largest))
        push = jnp.asarray(step.rate, diagonal.dtype) * new._solve(ravel(step.gradient))
        return eqx.tree_at(lambda q: q.mean, new, self._tree(ravel(self.mean) - push))

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ gᵀS⁻¹g, the mean's part (the precision moves by projection)."""
        gradient = ravel(step.gradient)
        return 0.5 * gradient @ self._solve(gradient)


def _largest(columns: Float[Array, "P R"], rank: int) -> tuple[Array, Array]:
    """The `rank` largest directions of CCᵀ as columns, and the diagonal of what is left over."""
    size, count = columns.shape
    if count <= size:  # the eigenvectors of CᵀC rotate C's columns into orthogonal ones
        _, rotation = jnp.linalg.eigh(columns.T @ columns)
        rotated = columns @ rotation
    else:
        values, vectors = jnp.linalg.eigh(columns @ columns.T)
        rotated = vectors * jnp.sqrt(jnp.maximum(values, 0.0))
    kept = rotated[:, ::-1][:, :rank]
    rest = jnp.sum(columns**2, axis=1) - jnp.sum(kept**2, axis=1)
    if kept.shape[1] < rank:
        kept = jnp.pad(kept, ((0, 0), (0, rank - kept.shape[1])))
    return kept, jnp.maximum(rest, 0.0)
