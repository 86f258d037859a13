"""A block that is read at its peak: the delta method in the family's own coordinates, EM's parameters."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ..numerics.random import Key
from .base import ExponentialFamily


class Peak(ExponentialFamily):
    r"""All of q's mass at $θ_* = \arg\max_θ ⟨λ, T(θ)⟩$, for the λ of another family: its limit at temperature 0.

    $A(λ) = \max_θ ⟨λ, T(θ)⟩ = ⟨λ, T(θ_*)⟩$, so that $μ = ∇A(λ) = T(θ_*)$. The entropy of a point is none of
    a bound's business and counts as 0. With λ a sum of messages,
    $θ_* = ∇A^*_{yz}(E_q T_{yz})$ is the M-step of section 5.2.

    >>> import jax.numpy as jnp
    >>> from bayesrule.families.gamma import Gamma
    >>> q = Peak(Gamma(3.0, 4.0))
    >>> float(q.mean), float(q.expectation()[1]), float(q.entropy())
    (0.5, 0.5, 0.0)
    """

    of: Any
    label: ClassVar[str] = "Point"
    meaning: ClassVar[str] = "q(θ) = δ(θ − θ_*), θ_* = argmax ⟨λ, T(θ)⟩  (the delta method, section 5.2)"

    def __init__(self, of: ExponentialFamily):
        if isinstance(of, Peak) or not isinstance(of, ExponentialFamily):
            raise ValueError(f"Peak reads an exponential family at its peak, got a {type(of).__name__}.")
        if of.prior_is_base_measure:
            raise ValueError(
                f"A {type(of).__name__} has its prior as base measure, which a peak would leave out of the bound: name "
                "the blocks to read at their peak, em('noise')."
            )
        self.of = of

    @property
    def ranks(self) -> tuple[int, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # as its family's
        return self.of.ranks

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return self.of._leaf_ranks(leaves)

    @property
    def mean(self) -> PyTree:
        """θ_*."""
        return self.of.mode()

    def mode(self) -> PyTree:
        return self.of.mode()

    def moments(self, shift: Any) -> tuple[PyTree, PyTree]:
        """θ_* and no spread, but for what a displacement of μ adds."""
        (mean, spread), (_, still) = self.of.moments(shift), self.of.moments(jax.tree.map(jnp.zeros_like, shift))
        return mean, jax.tree.map(jnp.subtract, spread, still)

    def natural(self) -> PyTree:
        return self.of.natural()

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        raise ValueError("λ alone does not say whose peak it is: use with_natural.")

    @classmethod
    def from_expectation(cls, expectation: PyTree) -> Self:
        raise ValueError("T(θ) has no λ of its own: many q have the same peak.")

    def with_natural(self, natural: PyTree) -> Self:
        return type(self)(self.of.with_natural(natural))

    def with_expectation(self, expectation: PyTree) -> Self:
        raise ValueError("T(θ) has no λ of its own: many q have the same peak.")

    def shifted_in_mu(self, shift: PyTree) -> Self:
        raise ValueError(
            "A block that is read at its peak has no other members near: give the factor as E log f in μ, or Delta() "
            "points and a Gaussian block."
        )

    def statistics(self, theta: PyTree) -> PyTree:
        return self.of.statistics(theta)

    def expectation(self) -> PyTree:
        return self.of.statistics(self.of.mode())

    def _gradient(self, natural: PyTree) -> PyTree:
        return self.with_natural(natural).expectation()

    def log_partition(self, natural: PyTree) -> Float[Array, "..."]:
        return self.inner(natural, self._gradient(natural))

    def constant_base(self) -> bool:
        return self.of.constant_base()

    def expected_log_base(self) -> Float[Array, "..."] | float:
        return 0.0

    def entropy(self) -> Float[Array, "..."]:
        return jnp.zeros(jax.eval_shape(lambda: self.of.log_partition(self.of.natural())).shape)

    def inside(self, natural: PyTree | None = None) -> Bool[Array, "..."]:
        return self.of.inside(natural)

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        raise ValueError("A point has no density: ask the family that it is the peak of, q.of.log_prob(θ).")

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), self.of.mode())
