"""Gaussian sites on the outputs of a Gaussian prior, which is the base measure: processes and chains.

λ holds the sites only. The prior cancels in ℓ̄ + log h, so its covariance is never inverted and may be singular, and
with conjugate observations one step of rate 1 is the exact posterior (GP regression, Kalman's smoother).
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from ...numerics.checks import bare
from ...numerics.coordinates import from_lower, to_vector
from ...numerics.pytree import PyTree
from ..base import ExponentialFamily

Outputs = Float[Array, " N"] | Float[Array, "N m"]
Variances = Float[Array, " N"] | Float[Array, "N m m"]
Sites = tuple[Outputs, Variances]


class Solution(NamedTuple):
    """The posterior of a prior with covariance K and its sites.

    `log_det` is log|I + Kκ|, `mean` and `variance` are each output's (a covariance where outputs are vectors), and
    `auxiliary` is what else the subclass computed on the way and wants to reuse.
    """

    log_det: Float[Array, ""]
    mean: Outputs
    variance: Variances
    auxiliary: PyTree = None


class SitedGaussian(ExponentialFamily):
    r"""$q(f) ∝ p(f)\exp\sum_n(ν_n^⊤f_n − ½f_n^⊤κ_nf_n)$: a Gaussian prior p, and a Gaussian site on every output.

    The prior is the base measure: $λ = (ν, −½κ)$, $T = (f, ff^⊤)$, $A(λ) = \log E_p\exp⟨λ, T⟩$ and $μ = (m, V_n +
    m_nm_n^⊤)$ output by output. Densities and the entropy are relative to p, so that `entropy` is −KL(q ‖ p), a model
    of such a block needs no prior factor, and p may be singular. λ = 0 is p itself. κ may be negative, as long as q is
    proper. Outputs are numbers, (N,), or vectors, (N, m), with sites (N, m, m).

    A subclass stores what it needs of p in fields of its own, and gives `solve_sites`, `prior_mean` and `sample`; its
    `__init__` ends with `self._set_sites(natural)`. A member stores its `Solution` beside the sites, because every step
    reads the outputs' moments several times and they are the whole cost of a change of λ.
    """

    sites: Sites
    log_det: Float[Array, ""]
    mean: Outputs
    variance: Variances
    auxiliary: PyTree
    label: ClassVar[str] = "Gaussian process (sites)"
    meaning: ClassVar[str] = "q(f) ∝ p(f) exp Σ_n(ν_n f_n − ½κ_n f_n²), λ = (ν, −½κ), h the prior p"
    update: ClassVar[str] = "ν ← (1 − ρτ)ν − ρ(g − hm),  κ ← (1 − ρτ)κ + ρh,  (g, h) = E_q(ℓ̄′, ℓ̄″) of every output"
    unbatchable: ClassVar[bool] = True
    prior_is_base_measure: ClassVar[bool] = True
    reparameterized: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True

    @abstractmethod
    def solve_sites(self, natural: Sites) -> Solution:
        """Condition the prior on the sites.

        Called whenever a member with other sites is made (`with_natural`, hence once in every step), when a trial λ is
        checked by `inside`, and by `log_partition`. It must be differentiable in λ and in the prior's parameters.

        Args:
            natural: λ = (ν, −½κ), not necessarily this member's.

        Returns:
            The solution, with NaN in it where prior and sites together are not a distribution (κ too negative).
        """

    @property
    @abstractmethod
    def prior_mean(self) -> Outputs:
        """Each output's mean under the prior, m₀."""

    @property
    def spread(self) -> Variances:
        """Another name of `variance`."""
        return self.variance

    # λ.

    def _set_sites(self, natural: Sites, solution: Solution | None = None) -> None:
        """Set the fields of this class; to be called at the end of a subclass's `__init__`.

        Args:
            natural: λ, of the shapes that `as_sites` checks.
            solution: the solution for these sites, where it is known without solving (no sites: the prior).
        """
        self.sites = natural
        solution = self.solve_sites(natural) if solution is None else solution
        self.log_det, self.mean, self.variance, self.auxiliary = solution

    def natural(self) -> Sites:
        return self.sites

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        raise ValueError(f"λ alone does not determine the prior of a {cls.__name__}: use a member's with_natural.")

    def with_natural(self, natural: Sites) -> Self:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return bare(type(self), **fields | {"sites": natural} | self.solve_sites(natural)._asdict())

    def with_base_of(self, other: Any) -> Self:
        """These sites on the other member's prior."""
        return other.with_natural(self.sites)

    def inside(self, natural: Sites | None = None) -> Bool[Array, ""]:
        first, second = self.sites if natural is None else natural
        solution = self._solution if natural is None else self.solve_sites(natural)
        arrays = (first, second, solution.log_det, solution.mean, solution.variance)
        finite = [jnp.all(jnp.isfinite(x)) for x in arrays]
        return jnp.all(jnp.stack(finite))

    @property
    def _solution(self) -> Solution:
        return Solution(self.log_det, self.mean, self.variance)

    # μ.

    @property
    def vector_outputs(self) -> bool:
        """Whether an output is a vector, with a matrix as its site, and not a number."""
        return self.mean.ndim == 2

    def expectation(self) -> Sites:
        return self.mean, self.variance + self._square(self.mean, self.mean)

    def moments(self, shift: Sites) -> tuple[Outputs, Variances]:
        """Each output's mean and (co)variance with μ displaced by `shift`: dV = dμ₂ − dμ₁mᵀ − m dμ₁ᵀ."""
        cross = self._square(shift[0], self.mean)
        second = shift[1]
        if self.vector_outputs:
            return self.mean + shift[0], self.variance + 0.5 * (second + second.mT) - cross - cross.mT
        return self.mean + shift[0], self.variance + second - 2 * cross

    def _square(self, left: Outputs, right: Outputs) -> Variances:
        """The (outer) product of two outputs."""
        return left[..., :, None] * right[..., None, :] if self.vector_outputs else left * right

    def _gradient(self, natural: Sites) -> Sites:
        solution = self.solve_sites(natural)
        return solution.mean, solution.variance + self._square(solution.mean, solution.mean)

    def mode(self) -> Outputs:
        return self.mean

    # The distribution, relative to its prior.

    def statistics(self, theta: Outputs) -> Sites:
        return theta, self._square(theta, theta)

    def _residual(self, sites: Sites, mean: Outputs) -> Outputs:
        """ν − κm, which at the posterior mean equals K⁻¹(m − m₀)."""
        return sites[0] + 2 * self._product(sites[1], mean)

    def _product(self, matrix: Variances, vector: Outputs) -> Outputs:
        return jnp.einsum("...kl,...l->...k", matrix, vector) if self.vector_outputs else matrix * vector

    def log_partition(self, natural: Sites) -> Float[Array, ""]:
        return self._partition(natural, self.solve_sites(natural))

    def _partition(self, natural: Sites, solution: Solution) -> Float[Array, ""]:
        """A(λ) = ½[νᵀm + m₀ᵀ(ν − κm) − log|I + Kκ|]."""
        residual = self._residual(natural, solution.mean)
        return 0.5 * (jnp.sum(natural[0] * solution.mean) + jnp.sum(self.prior_mean * residual) - solution.log_det)

    def log_prob(self, theta: Outputs) -> Float[Array, "..."]:
        log_partition = self._partition(self.sites, self._solution)
        return self.inner(self.sites, self.statistics(theta)) - log_partition

    def entropy(self) -> Float[Array, ""]:
        """−KL(q ‖ p) = −½[(m − m₀)ᵀ(ν − κm) − Σ_n tr κ_nV_n + log|I + Kκ|]."""
        mean_term = jnp.sum((self.mean - self.prior_mean) * self._residual(self.sites, self.mean))
        return -0.5 * (mean_term + 2 * jnp.sum(self.sites[1] * self.variance) + self.log_det)

    def kl(self, other: Any) -> Float[Array, ""]:
        if not isinstance(other, type(self)):
            return super().kl(other)  # raises an error that names both families
        mine, theirs = (jax.tree.leaves(q._prior()) for q in (self, other))
        concrete = not any(isinstance(x, Tracer) for x in (*mine, *theirs))
        same_shapes = [jnp.shape(x) for x in mine] == [jnp.shape(x) for x in theirs]
        if not same_shapes or (concrete and not all(bool(jnp.all(x == y)) for x, y in zip(mine, theirs, strict=True))):
            raise ValueError(
                "kl compares members over one prior, and these two have different priors: put both on one prior with "
                "with_base_of."
            )
        return super().kl(other)

    def _prior(self) -> list[PyTree]:
        """The fields of the subclass, which describe p."""
        inherited = {"sites", *Solution._fields}
        return [getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in inherited]

    def expected_log_base(self) -> float:
        return 0.0

    def constant_base(self) -> bool:
        return True

    # Minimal coordinates: the (N, m, m) matrices of the sites are symmetric in their last two axes.

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return (2, 3) if self.vector_outputs else (1, 1)

    def _symmetric(self, tree: PyTree) -> PyTree:
        return (tree[0], 0.5 * (tree[1] + tree[1].mT)) if self.vector_outputs else tree

    def coordinates(self, natural: Sites) -> Float[Array, "... M"]:
        first, second = natural
        if self.vector_outputs:
            lower = to_vector(second, 2, True)
            parts = to_vector(first, 2, False), to_vector(lower, 2, False)
        else:
            parts = first, second
        return jnp.concatenate(parts, axis=-1)

    def uncoordinates(self, vector: Float[Array, "... M"]) -> Sites:
        shape = self.mean.shape
        first, second = jnp.split(vector, [math.prod(shape)], axis=-1)
        if not self.vector_outputs:
            return first, second
        lead, (size, width) = vector.shape[:-1], shape
        return first.reshape((*lead, *shape)), from_lower(second.reshape((*lead, size, -1)), width)


def as_sites(natural: Any, like: Outputs, owner: str) -> Sites:
    """Convert sites to arrays and check their shapes.

    Args:
        natural: λ = (ν, −½κ), or None for no sites, λ = 0.
        like: an array of the outputs' shape and dtype.
        owner: the family's name, for the error.
    """
    shape = (*like.shape, like.shape[-1]) if like.ndim == 2 else like.shape
    if natural is None:
        return jnp.zeros(like.shape, like.dtype), jnp.zeros(shape, like.dtype)
    first, second = (jax.tree.map(lambda x: jnp.asarray(x, like.dtype), part) for part in natural)
    if first.shape != like.shape or second.shape != shape:
        raise ValueError(
            f"A {owner}'s sites are λ = (ν, −½κ) of shapes {like.shape} and {shape}, one for each output, got "
            f"{first.shape} and {second.shape}."
        )
    return first, second
