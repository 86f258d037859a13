"""Gaussian sites on the outputs of a Gaussian prior, which is the base measure: processes and chains."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from ...numerics.checks import bare
from ...numerics.coordinates import from_lower, to_vector
from ..base import ExponentialFamily

Outputs = Float[Array, " N"] | Float[Array, "N m"]
Spreads = Float[Array, " N"] | Float[Array, "N m m"]
Sites = tuple[Outputs, Spreads]


class Solved(NamedTuple):
    """What a prior and its sites come to: log|I + Kκ|, every output's mean and (co)variance, and what else to keep."""

    log_det: Float[Array, ""]
    mean: Outputs
    spread: Spreads
    kept: PyTree = None


class SitedGaussian(ExponentialFamily):
    r"""$q(f) ∝ p(f)\exp\sum_n(ν_n^⊤f_n − ½f_n^⊤κ_nf_n)$: a Gaussian prior p, and a Gaussian site on every output.

    The prior is the base measure: $λ = (ν, −½κ)$, $T = (f, ff^⊤)$, $A(λ) = \log E_p\exp⟨λ, T⟩$ and $μ = (m, V_n +
    m_nm_n^⊤)$ output by output. Densities and the entropy are relative to p, so that `entropy` is −KL(q ‖ p), a model
    of such a block needs no prior factor, and p may be singular. λ = 0 is p itself. κ may be negative, as long as q is
    proper. Outputs are numbers, (N,), or vectors, (N, m), with sites (N, m, m).

    A subclass keeps what it needs of p, and gives `solved`, `prior_mean` and `sample`; its `__init__` ends with
    `self._settle(natural)`. A member has its outputs' `mean` and `spread` at hand, since every step asks for them
    several times and they are all that it costs.
    """

    sites: Sites
    log_det: Float[Array, ""]
    mean: Outputs
    spread: Spreads
    kept: PyTree
    label: ClassVar[str] = "Gaussian process (sites)"
    meaning: ClassVar[str] = "q(f) ∝ p(f) exp Σ_n(ν_n f_n − ½κ_n f_n²), λ = (ν, −½κ), h the prior p"
    update: ClassVar[str] = "ν ← (1 − ρτ)ν − ρ(g − hm),  κ ← (1 − ρτ)κ + ρh,  (g, h) = E_q(ℓ̄′, ℓ̄″) of every output"
    unbatchable: ClassVar[bool] = True
    prior_is_base_measure: ClassVar[bool] = True
    reparameterized: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True

    @abstractmethod
    def solved(self, natural: Sites) -> Solved:
        """log|I + Kκ| and the outputs' moments under sites λ; NaN where q is not proper."""

    @property
    @abstractmethod
    def prior_mean(self) -> Outputs:
        """Every output's mean under the prior."""

    # λ.

    def _settle(self, natural: Sites, found: Solved | None = None) -> None:
        self.sites = natural
        self.log_det, self.mean, self.spread, self.kept = self.solved(natural) if found is None else found

    def natural(self) -> Sites:
        return self.sites

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        raise ValueError(f"λ alone does not say which prior a {cls.__name__} has: use a member's with_natural.")

    def with_natural(self, natural: Sites) -> Self:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return bare(type(self), **own | {"sites": natural} | self.solved(natural)._asdict())

    def with_base_of(self, other: Any) -> Self:
        """These sites on the other's prior."""
        return other.with_natural(self.sites)

    def inside(self, natural: Sites | None = None) -> Bool[Array, ""]:
        first, second = self.sites if natural is None else natural
        found = Solved(self.log_det, self.mean, self.spread) if natural is None else self.solved(natural)
        finite = [jnp.all(jnp.isfinite(x)) for x in (first, second, found.log_det, found.mean, found.spread)]
        return jnp.all(jnp.stack(finite))

    # μ.

    @property
    def wide(self) -> bool:
        """Whether an output is a vector."""
        return self.mean.ndim == 2

    def expectation(self) -> Sites:
        return self.mean, self.spread + self._square(self.mean, self.mean)

    def moments(self, shift: Sites) -> tuple[Outputs, Spreads]:
        """Every output's mean and (co)variance, with μ displaced: dV = dμ₂ − dμ₁mᵀ − m dμ₁ᵀ."""
        cross = self._square(shift[0], self.mean)
        second = shift[1]
        if self.wide:
            return self.mean + shift[0], self.spread + 0.5 * (second + second.mT) - cross - cross.mT
        return self.mean + shift[0], self.spread + second - 2 * cross

    def _square(self, left: Outputs, right: Outputs) -> Spreads:
        return left[..., :, None] * right[..., None, :] if self.wide else left * right

    def _gradient(self, natural: Sites) -> Sites:
        found = self.solved(natural)
        return found.mean, found.spread + self._square(found.mean, found.mean)

    def mode(self) -> Outputs:
        return self.mean

    # The distribution, relative to its prior.

    def statistics(self, theta: Outputs) -> Sites:
        return theta, self._square(theta, theta)

    def _pull(self, sites: Sites, mean: Outputs) -> Outputs:
        """ν − κm: the prior's precision times how far the mean is from the prior's."""
        return sites[0] + 2 * self._product(sites[1], mean)

    def _product(self, matrix: Spreads, vector: Outputs) -> Outputs:
        return jnp.einsum("...kl,...l->...k", matrix, vector) if self.wide else matrix * vector

    def log_partition(self, natural: Sites) -> Float[Array, ""]:
        return self._partition(natural, self.solved(natural))

    def _partition(self, natural: Sites, found: Solved) -> Float[Array, ""]:
        pull = self._pull(natural, found.mean)
        return 0.5 * (jnp.sum(natural[0] * found.mean) + jnp.sum(self.prior_mean * pull) - found.log_det)

    def log_prob(self, theta: Outputs) -> Float[Array, "..."]:
        own = self._partition(self.sites, Solved(self.log_det, self.mean, self.spread))
        return self.inner(self.sites, self.statistics(theta)) - own

    def entropy(self) -> Float[Array, ""]:
        """−KL(q ‖ p) = −½[(m − m₀)ᵀ(ν − κm) − Σ_n tr κ_nV_n + log|I + Kκ|]."""
        far = jnp.sum((self.mean - self.prior_mean) * self._pull(self.sites, self.mean))
        return -0.5 * (far + 2 * jnp.sum(self.sites[1] * self.spread) + self.log_det)

    def kl(self, other: Any) -> Float[Array, ""]:
        if not isinstance(other, type(self)):
            return super().kl(other)  # which says why not
        mine, theirs = (jax.tree.leaves(q._prior()) for q in (self, other))
        known = not any(isinstance(x, Tracer) for x in (*mine, *theirs))
        alike = [jnp.shape(x) for x in mine] == [jnp.shape(x) for x in theirs]
        if not alike or (known and not all(bool(jnp.all(x == y)) for x, y in zip(mine, theirs, strict=True))):
            raise ValueError("kl compares members over one prior, and these two have priors of their own.")
        return super().kl(other)

    def _prior(self) -> list[PyTree]:
        """What a subclass keeps of p."""
        own = {"sites", *Solved._fields}
        return [getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in own]

    def expected_log_base(self) -> float:
        return 0.0

    def constant_base(self) -> bool:
        return True

    # Coordinates: only a site's own matrix is symmetric.

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return (2, 3) if self.wide else (1, 1)

    def _symmetric(self, tree: PyTree) -> PyTree:
        return (tree[0], 0.5 * (tree[1] + tree[1].mT)) if self.wide else tree

    def coordinates(self, natural: Sites) -> Float[Array, "... M"]:
        first, second = natural
        if self.wide:
            lower = to_vector(second, 2, True)
            parts = to_vector(first, 2, False), to_vector(lower, 2, False)
        else:
            parts = first, second
        return jnp.concatenate(parts, axis=-1)

    def uncoordinates(self, vector: Float[Array, "... M"]) -> Sites:
        shape = self.mean.shape
        first, second = jnp.split(vector, [math.prod(shape)], axis=-1)
        if not self.wide:
            return first, second
        lead, (size, width) = vector.shape[:-1], shape
        return first.reshape((*lead, *shape)), from_lower(second.reshape((*lead, size, -1)), width)


def as_sites(natural: Any, like: Outputs, owner: str) -> Sites:
    """λ as given, checked against the outputs' shape; none is the prior's, λ = 0."""
    wide = like.ndim == 2
    shape = (*like.shape, like.shape[-1]) if wide else like.shape
    if natural is None:
        return jnp.zeros(like.shape, like.dtype), jnp.zeros(shape, like.dtype)
    first, second = (jax.tree.map(lambda x: jnp.asarray(x, like.dtype), part) for part in natural)
    if first.shape != like.shape or second.shape != shape:
        raise ValueError(
            f"A {owner}'s sites are λ = (ν, −½κ) of shapes {like.shape} and {shape}, one for each output, got "
            f"{first.shape} and {second.shape}."
        )
    return first, second
