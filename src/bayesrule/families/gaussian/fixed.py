"""The Gaussian with a fixed precision, the family of gradient descent."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...numerics.pytree import PyTree
from ...numerics.random import Key
from ...numerics.trees import floating, same_shape, wide
from ...steps.step import Step
from ..base import ExponentialFamily
from .base import GaussianFamily
from .diagonal import DiagonalGaussian
from .full import Gaussian
from .precision import NONE, Structure


class FixedGaussian(GaussianFamily, ExponentialFamily):
    r"""A Gaussian $N(m, S^{-1})$ with a fixed precision, the family of gradient descent.

    $λ = Sm$, $μ = m$, $2\log h(θ) = \log|S| − P\log 2π − θ^⊤Sθ$, so the decay of λ cancels in the
    rule and $m ← m − ρS^{-1}E_q∇\barℓ$ (`eq:blr_sgd1`, `eq:sgd_cov`).

    >>> import jax.numpy as jnp
    >>> q = FixedGaussian(jnp.array([1.0, 2.0]), 4.0)
    >>> [float(x) for x in q.natural()], [float(x) for x in q.expectation()]
    ([4.0, 8.0], [1.0, 2.0])
    >>> [float(x) for x in FixedGaussian(jnp.ones(2), jnp.array([[2.0, 1.0], [1.0, 3.0]])).natural()]
    [3.0, 4.0]

    Args:
        mean: m, any pytree.
        precision: S, one number, a pytree like `mean` with a number for each entry, or a matrix over the ravelled mean.
        batch_ndim: how many of the first axes of each leaf are a batch.
    """

    mean: PyTree
    precision: Any
    batch_ndim: int = eqx.field(static=True)
    dense: bool = eqx.field(static=True)
    label: ClassVar[str] = "Gaussian (fixed cov.)"
    meaning: ClassVar[str] = "q(θ) = N(m, S⁻¹), S fixed, λ = Sm  (tab:EFsummary)"
    update: ClassVar[str] = "m ← m − ρ S⁻¹ E_q∇ℓ̄  (eq:blr_sgd1, eq:sgd_cov)"
    structure: ClassVar[Structure] = NONE
    reparameterized: ClassVar[bool] = True
    keeps_half_precision: ClassVar[bool] = True

    def __init__(self, mean: PyTree, precision: Any = 1.0, *, batch_ndim: int = 0):
        self.mean = floating(mean)
        self.batch_ndim = batch_ndim
        precision = floating(precision)
        self.dense = _is_matrix_over(precision, self.mean)
        if self.dense:
            precision = Gaussian(self.mean, precision).precision
        elif isinstance(precision, jax.Array) and precision.ndim == 0:
            leaves = jax.tree.leaves(self.mean)
            precision = precision.astype(jnp.result_type(*(wide(leaf.dtype) for leaf in leaves)) if leaves else float)
        else:
            precision = same_shape(precision, self.mean, "precision")
        # One number is not expanded to the shape of the mean, which would be read from memory at every step.
        self.precision = precision

    @property
    def params(self) -> PyTree:
        return self.mean

    @property
    def elementwise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # as its precision is
        return not self.dense

    @property
    def _free(self) -> Any:
        """The same Gaussian as a family whose precision may move."""
        if self.dense:
            return Gaussian(self.mean, self.precision)
        return DiagonalGaussian(self.mean, self.precision, batch_ndim=self.batch_ndim)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self._free.batch_shape

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return tuple(leaf.ndim - self.batch_ndim for leaf in leaves)

    # λ and μ.

    def natural(self) -> PyTree:
        return self.times(self.mean)

    def with_natural(self, natural: PyTree) -> Self:
        return self._at(self.solve(natural))

    @classmethod
    def from_natural(cls, natural: PyTree, precision: Any = 1.0) -> Self:
        """The member with λ = Sm and this precision S."""
        return cls(natural, precision).with_natural(floating(natural))

    def expectation(self) -> PyTree:
        return self.mean

    def with_expectation(self, expectation: PyTree) -> Self:
        return self._at(expectation)

    @classmethod
    def from_expectation(cls, expectation: PyTree, precision: Any = 1.0) -> Self:
        """The member with μ = m and this precision S."""
        return cls(expectation, precision)

    def _at(self, mean: PyTree) -> Self:
        return eqx.tree_at(lambda q: q.mean, self, mean)

    def moments(self, shift: PyTree) -> tuple[PyTree, Any]:
        """m with μ displaced, and the covariance, which stays: a matrix, or the entries' variances."""
        spread = self.covariance() if self.dense else self.variance()
        return jax.tree.map(jnp.add, self.mean, shift), spread

    def mode(self) -> PyTree:
        return self.mean

    def to_natural_gradient(self, covector: PyTree) -> PyTree:
        return self.times(covector)

    def fisher_product(self, vector: PyTree) -> PyTree:
        return self.solve(vector)

    def inside(self, natural: PyTree | None = None) -> Bool[Array, "..."]:
        leaves = jax.tree.leaves(self.mean if natural is None else natural)
        finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(self.batch_ndim, x.ndim))) for x in leaves]
        return jnp.all(jnp.stack(finite), axis=0)

    # Density.

    def statistics(self, theta: PyTree) -> PyTree:
        return theta

    def log_partition(self, natural: PyTree) -> Float[Array, "..."]:
        return 0.5 * self.inner(natural, self.solve(natural))

    def log_base(self, theta: PyTree) -> Float[Array, "..."]:
        return self._at(jax.tree.map(jnp.zeros_like, self.mean))._free.log_prob(theta)

    def expected_log_base(self) -> Float[Array, "..."]:
        return self.log_base(self.mean) - 0.5 * self.noise_size

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        return self._free.log_prob(theta)

    def entropy(self) -> Float[Array, "..."]:
        return self._free.entropy()

    # S.

    def transformed(self, noise: Float[Array, "... P"]) -> PyTree:
        return self._free.transformed(noise)

    def drawn(self, key: Key, shape: tuple[int, ...] = (), *, standard: bool = False) -> PyTree:
        return self._free.drawn(key, shape, standard=standard)

    def times(self, theta: PyTree) -> PyTree:
        return self._free.times(theta)

    def solve(self, theta: PyTree) -> PyTree:
        return self._free.solve(theta)

    def variance(self) -> PyTree:
        return self._free.variance()

    def covariance(self) -> Float[Array, "... P P"]:
        return self._free.covariance()

    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K K"]:
        return self._free.output_covariance(jacobian)

    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        return self._free.prior_curvature(structure, like)

    def prior_trace(self, other: GaussianFamily) -> Float[Array, "..."]:
        return self._free.prior_trace(other)

    def trace(self, curvature: Any) -> Float[Array, ""]:
        return jnp.zeros(())

    # The rule.

    def added(self, first: Any, second: Any) -> None:
        return None

    def derivatives(self, natural_gradient: PyTree) -> tuple[PyTree, None]:
        return natural_gradient, None

    def moved(self, step: Step) -> Self:
        """m ← m − ρS⁻¹g + γ(m − m_{t−1}), in λ and in μ alike."""

        push, rate = step.gradient, step.rate
        if getattr(self.precision, "ndim", None) == 0 and not self.dense:
            # One number divides the rate, and not every entry.
            rate = rate / self.precision
        else:
            push = self.solve(push)

        def leaf(m: Array, push: Array) -> Array:
            return (m - jnp.asarray(rate, push.dtype) * push).astype(m.dtype)

        mean = jax.tree.map(leaf, self.mean, push)
        if step.momentum is not None:
            push = lambda n, m, p: n + jnp.asarray(step.momentum, n.dtype) * (m - p)
            mean = jax.tree.map(push, mean, self.mean, step.previous.mean)
        return self._at(mean)

    def with_scaled_precision(self, factor: Any) -> Self:
        return self  # it is fixed

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ gᵀS⁻¹g."""
        return jnp.sum(0.5 * self.inner(step.gradient, self.solve(step.gradient)))


def _is_matrix_over(precision: Any, mean: PyTree) -> bool:
    """Whether it is P×P for a mean of P numbers, and not an entry for each of the mean's own."""
    if not isinstance(precision, jax.Array) or precision.ndim != 2:
        return False
    leaves = jax.tree.leaves(mean)
    size = sum(leaf.size for leaf in leaves)
    same = len(leaves) == 1 and leaves[0].shape == precision.shape
    return precision.shape == (size, size) and not same
