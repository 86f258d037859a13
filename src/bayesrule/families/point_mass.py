"""A point mass at the mode of another family: the delta method in that family's λ, as for the parameters of EM."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .base import ExponentialFamily


class Peak(ExponentialFamily):
    r"""The point mass $q(θ) = δ(θ − θ_*)$ at $θ_* = \arg\max_θ ⟨λ, T(θ)⟩$; also called `PointMass`.

    λ is that of another exponential family, whose limit at temperature 0 this is. $A(λ) = \max_θ ⟨λ, T(θ)⟩ = ⟨λ,
    T(θ_*)⟩$, so that $μ = ∇A(λ) = T(θ_*)$. The entropy of a point mass is excluded from the bound: it counts as 0. With
    λ a sum of messages, $θ_* = ∇A^*_{yz}(E_q T_{yz})$ is the M-step of section 5.2.

    >>> import jax.numpy as jnp
    >>> from bayesrule.families.gamma import Gamma
    >>> q = Peak(Gamma(3.0, 4.0))
    >>> float(q.mean), float(q.expectation()[1]), float(q.entropy())
    (0.5, 0.5, 0.0)

    Args:
        of: the member whose mode is taken; it needs a closed form for `mode`.
    """

    of: Any
    label: ClassVar[str] = "Point"
    meaning: ClassVar[str] = "q(θ) = δ(θ − θ_*), θ_* = argmax ⟨λ, T(θ)⟩  (the delta method, section 5.2)"

    def __init__(self, of: ExponentialFamily):
        if isinstance(of, Peak) or not isinstance(of, ExponentialFamily):
            raise ValueError(f"Peak is the mode of a member of an exponential family, got a {type(of).__name__}.")
        if of.prior_is_base_measure:
            raise ValueError(
                f"A {type(of).__name__} has its prior as base measure, which its mode would leave out of the bound: "
                "name the other blocks to read at their mode, for example em('noise')."
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
        """θ_* and a variance of 0, plus what a displacement of μ adds."""
        mean, variance = self.of.moments(shift)
        _, undisplaced = self.of.moments(jax.tree.map(jnp.zeros_like, shift))
        return mean, jax.tree.map(jnp.subtract, variance, undisplaced)

    def natural(self) -> PyTree:
        return self.of.natural()

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        raise ValueError("λ alone does not determine the family whose mode it is: use a member's with_natural.")

    @classmethod
    def from_expectation(cls, expectation: PyTree) -> Self:
        raise ValueError("T(θ_*) does not determine λ: many members have the same mode.")

    def with_natural(self, natural: PyTree) -> Self:
        return type(self)(self.of.with_natural(natural))

    def with_expectation(self, expectation: PyTree) -> Self:
        raise ValueError("T(θ_*) does not determine λ: many members have the same mode.")

    def shifted_in_mu(self, shift: PyTree) -> Self:
        raise ValueError(
            "A block that is read at its mode cannot be displaced in μ: give the factor as E log f in μ, or use "
            "Delta() points and a Gaussian block."
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

    def precision_matrices(self) -> tuple[Array, ...]:
        return self.of.precision_matrices()

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        raise ValueError("A point mass has no density: ask the family whose mode it is, q.of.log_prob(θ).")

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), self.of.mode())


PointMass = Peak
"""Another name of `Peak`."""
