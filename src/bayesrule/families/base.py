"""What a family must offer, and everything that follows from its log-partition function A(λ)."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Bool, Float, PyTree

from ..numerics.coordinates import from_lower, to_vector
from ..numerics.legendre import legendre
from ..numerics.random import Key
from ..steps.needs import Need
from ..steps.step import Step

Q = TypeVar("Q", bound="Family")
"""A member of some family, in the signature of a function that returns a member of the same one."""


class Family(eqx.Module):
    """A distribution q(θ) that the rule can move. θ is any pytree; fields are arrays or static."""

    label: ClassVar[str] = "Family"
    """How Table 1 names it."""
    meaning: ClassVar[str] = "q(θ) = h(θ) exp[⟨λ, T(θ)⟩ − A(λ)]  (section 1.2)"
    update: ClassVar[str] = "λ ← (1 − ρτ)λ − ρ ∇_μ E_q[ℓ̄ + τ log h]  (eq:bayes_learn_rule)"
    """The rule in the family's own coordinates, as a formula for the printed derivation."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """What it needs of the other pieces of a rule."""
    elementwise: ClassVar[bool] = False
    """Whether every entry of θ has parameters, and a step, of its own."""
    separate_rates: ClassVar[bool] = False
    """Whether a step may have two rates, one for a mean and one for a precision."""
    symmetric: ClassVar[bool] = False
    """Whether q is the same on either side of its mean."""
    is_mixture: ClassVar[bool] = False
    """Whether it is a mixture, whose components take a step each."""

    @classmethod
    def update_with(cls, part: type[Family]) -> str:
        """The printed update, for a family that is made of members of another one (`part`); by default its own."""
        return cls.update

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        """The member that an algorithm starts from, given bare parameters."""
        raise ValueError(f"Bare parameters do not say which {cls.__name__} to start from: pass a member of the family.")

    @property
    def gaussian(self) -> Any:
        """What a regularizer, differentiated at a mean, sees of q: the Gaussian in it, else q itself."""
        return self

    def to_step_terms(self, gradient: PyTree, curvature: Any, theta: PyTree, factors: PyTree) -> tuple[PyTree, Any]:
        """A point's derivatives in θ as the step takes them; `factors` is ∂θ/∂μ where the points give it."""
        if factors is None:
            return gradient, curvature
        return jax.tree.map(jnp.multiply, gradient, factors), curvature

    def with_scaled_precision(self, factor: Any) -> Self:
        """The same q with its precision times a number."""
        raise ValueError(
            f"A {type(self).__name__} has no precision to rescale, so its temperature is one number, not a schedule."
        )

    def from_gaussian_terms(self, gradient: PyTree, curvature: Any) -> tuple[PyTree, Any]:
        """Derivatives in the terms of `gaussian`, as the step takes them."""
        return gradient, curvature

    @abstractmethod
    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        """Draws of θ with leading axes `shape`, then the family's batch axes."""

    @abstractmethod
    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        """log q(θ), over any leading axes of θ."""

    @abstractmethod
    def entropy(self) -> Float[Array, "..."]:
        """H(q) = −E_q log q(θ)."""

    def joint_entropy(self) -> Float[Array, "..."]:
        """H(q(θ, z)), where θ is drawn by way of a z (which component, which scale): what needs no points."""
        return self.entropy()

    def latent_correction(self, theta: PyTree) -> tuple[Array, PyTree, Any] | None:
        """−log q(z | θ) and its derivatives in θ, on average over z; None where θ is drawn without one.

        log q(θ) = log q(θ | z) + log q(z) − log q(z | θ), and the first of these is what `moved` knows of: so a step
        on ℓ̄ + τ log q is one on ℓ̄ − τ log q(z | θ).
        """
        return None

    @property
    def component_prototype(self) -> Any:
        """Who takes the steps: itself, or the first of a mixture's components, which are all alike."""
        return self

    @abstractmethod
    def moved(self, step: Step) -> Self:
        """q after one step of the rule: the only place where coordinates change."""

    def added(self, first: Any, second: Any) -> Any:
        """The sum of two curvatures in this family's terms; None where it takes none."""
        return None

    @abstractmethod
    def inside(self) -> Bool[Array, "..."]:
        """Whether the parameters lie in the open set Ω where q is a distribution."""

    def proper(self) -> Bool[Array, "..."]:
        """`inside`, as far as a Gaussian's precision goes."""
        return self.inside()


class ExponentialFamily(Family):
    r"""A minimal exponential family, $q(θ) = h(θ) \exp[⟨λ, T(θ)⟩ − A(λ)]$.

    A new family gives `statistics` T, `log_partition` A, `log_base` log h (if not 0) and `sample`;
    everything else follows by differentiation and may be overridden for speed or stability.
    A family that stores λ needs nothing more: one field is λ, several are a tuple. One that stores
    friendlier parameters also gives `natural` and `from_natural`.

    λ and μ are pytrees of one shape. `ranks` gives the number of axes of each leaf that belong to
    one distribution (0 a scalar, 1 a vector, 2 a *symmetric* matrix); axes before them are a
    batch. Without `ranks` there is no batch: a leaf is one event whole.

    >>> import jax.numpy as jnp, jax
    >>> class Exponential(ExponentialFamily):
    ...     parameter: jax.Array                                    # λ = −rate
    ...     ranks = (0,)
    ...     def statistics(self, theta): return theta
    ...     def log_partition(self, natural): return -jnp.log(-natural)
    ...     def sample(self, key, shape=()):
    ...         return jax.random.exponential(key, shape + self.parameter.shape) / -self.parameter
    >>> q = Exponential(jnp.array(-4.0))
    >>> float(q.expectation()), round(float(q.entropy()), 4)
    (0.25, -0.3863)
    """

    label: ClassVar[str] = "Exponential family"
    ranks: ClassVar[tuple[int, ...] | None] = None
    unbatchable: ClassVar[bool] = False
    """Whether its arrays have fixed numbers of axes, so that there are no plates and no member for each row."""
    prior_is_base_measure: ClassVar[bool] = False
    """Whether a prior is the base measure, and densities and the entropy are relative to it."""
    reparameterized: ClassVar[bool] = False
    """Whether `sample` is differentiable in the parameters (explicitly or implicitly)."""

    # What an author gives.

    @abstractmethod
    def statistics(self, theta: PyTree) -> PyTree:
        """T(θ), in the shape of λ (with θ's leading axes)."""

    @abstractmethod
    def log_partition(self, natural: PyTree) -> Float[Array, "..."]:
        """A(λ), one value for each batch element."""

    def log_base(self, theta: PyTree) -> Float[Array, "..."] | float:
        """log h(θ); 0 unless said otherwise."""
        return 0.0

    # λ.

    def natural(self) -> PyTree:
        """λ."""
        values = tuple(getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata.get("static"))
        return values[0] if len(values) == 1 else values

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        """The member with this λ."""
        names = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]
        return cls(**dict(zip(names, (natural,) if len(names) == 1 else natural, strict=True)))

    def with_natural(self, natural: PyTree) -> Self:
        """The member with this λ that shares everything else with this one (h, the shape of θ)."""
        return self.from_natural(natural)

    def with_base_of(self, other: Any) -> Self:
        """This λ over the other's base measure, which hyper-parameters may have changed; where h is fixed, itself."""
        return self

    def inside(self, natural: PyTree | None = None) -> Bool[Array, "..."]:
        """Whether λ ∈ Ω; by default, whether A(λ) is finite."""
        return jnp.isfinite(self.log_partition(self.natural() if natural is None else natural))

    # μ = ∇A(λ) and the Fisher information ∇²A(λ).

    def expectation(self) -> PyTree:
        """μ = E_q T(θ) = ∇A(λ)."""
        return self._gradient(self.natural())

    def with_expectation(self, expectation: PyTree) -> Self:
        """The member with this μ: λ = ∇A*(μ), by a convex solve that starts here."""
        return self.with_natural(legendre(self, expectation))

    def shifted_in_mu(self, shift: PyTree) -> Self:
        """The member whose μ differs by `shift`, to first order: λ + F(λ)⁻¹δ."""
        return self.with_natural(
            jax.tree.map(jnp.add, self.natural(), self.to_natural_gradient(self._symmetric(shift)))
        )

    def mode(self) -> PyTree:
        """θ_* = argmax ⟨λ, T(θ)⟩: ∇A*_{yz} of an M-step, where λ is a sum of messages."""
        raise ValueError(
            f"A {type(self).__name__} has no closed form for the θ at which ⟨λ, T(θ)⟩ peaks: give the parameter a "
            "conjugate or a Gaussian block."
        )

    def fisher(self) -> Float[Array, "... M M"]:
        """F(λ) = ∇²A(λ), in minimal coordinates (see `coordinates`)."""
        return self._fisher(self.coordinates(self.natural()))

    def to_natural_gradient(self, covector: PyTree) -> PyTree:
        """F(λ)⁻¹c: from a gradient with respect to λ to one with respect to μ (`eq:natgrad_def`)."""
        solution = jnp.linalg.solve(self.fisher(), self.coordinates(covector)[..., None])[..., 0]
        return self.uncoordinates(solution)

    def fisher_product(self, vector: PyTree) -> PyTree:
        """F(λ)v: the derivative of μ along v."""
        return self._symmetric(jax.jvp(self._gradient, (self.natural(),), (vector,))[1])

    def natural_gradient(self, expected: Callable[[Self], Any]) -> PyTree:
        """F(λ)⁻¹ ∇_λ of any scalar function of q, such as q ↦ E_q f: the gradient in μ."""
        gradient = jax.grad(lambda natural: jnp.sum(expected(self.with_natural(natural))))(self.natural())
        return self.to_natural_gradient(self._symmetric(gradient))

    def enumerated_gradient(self, values: Float[Array, " S"], theta: PyTree) -> PyTree:
        """∇_μ E_q f from the values of f at every θ of a small discrete support: F(λ)⁻¹Cov_q(T, f)."""
        weights = jnp.exp(self.log_prob(theta))
        advantage = weights * (values - jnp.sum(weights * values))
        covariance = jax.tree.map(lambda t: jnp.tensordot(advantage, t, axes=1), self.statistics(theta))
        return self.to_natural_gradient(covariance)

    # Density, entropy, divergence.

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        natural = self.natural()
        return self.log_base(theta) + self.inner(natural, self.statistics(theta)) - self.log_partition(natural)

    def entropy(self) -> Float[Array, "..."]:
        """H(q) = A(λ) − ⟨λ, μ⟩ − E_q log h."""
        natural = self.natural()
        return self.log_partition(natural) - self.inner(natural, self.expectation()) - self.expected_log_base()

    def kl(self, other: Any) -> Float[Array, "..."]:
        """KL(q ‖ other), the Bregman divergence of A from λ_q to λ_other."""
        if type(other) is not type(self):
            raise ValueError(
                f"kl needs two members of one family, got {type(self).__name__} and {type(other).__name__}."
            )
        mine, theirs = self.natural(), other.natural()
        difference = jax.tree.map(jnp.subtract, theirs, mine)
        bregman = self.log_partition(theirs) - self.log_partition(mine)
        return bregman - self.inner(difference, self.expectation())

    def cross_entropy(self, other: Any) -> Float[Array, "..."]:
        """−E_q log other(θ)."""
        return self.kl(other) + self.entropy()

    def expected_log_base(self) -> Float[Array, "..."] | float:
        """E_q log h(θ): log h itself where it is constant, else a family's own closed form."""
        if not self.constant_base():
            raise ValueError(
                f"{type(self).__name__} has no closed form for E_q log h(θ), so its entropy is not "
                "available: override expected_log_base to give it."
            )
        return self.log_base(self._theta_like())

    def constant_base(self) -> bool:
        """Whether log h does not depend on θ (read off its trace)."""
        closed = jax.make_jaxpr(self.log_base)(self._theta_like())
        _, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        return not any(used)

    # The rule.

    def natural_step(self, step: Step) -> PyTree:
        """∇_μ E_q ℓ̄ in the shape of λ, out of what the step measured."""
        return step.gradient

    def derivatives(self, natural_gradient: PyTree) -> tuple[PyTree, Any]:
        """The gradient and curvature that this family's `moved` takes, from ∇_μ E_q ℓ̄."""
        return natural_gradient, None

    def gradient_like(self) -> PyTree:
        """A tree of the shapes that a step's gradient has."""
        return self.derivatives(self.natural())[0]

    def direction(self, step: Step) -> PyTree:
        """∇_μ[E_q ℓ̄ − τ H(q)] = ∇_μ E_q ℓ̄ + τ(λ + ∇_μ E_q log h)  (`app:natgrad_entropy`)."""
        decay = self.natural()
        if not self.constant_base():
            base = self.natural_gradient(lambda q: q.expected_log_base())
            decay = jax.tree.map(jnp.add, decay, base)
        return jax.tree.map(lambda g, d: g + jnp.asarray(step.temperature, g.dtype) * d, self.natural_step(step), decay)

    def moved(self, step: Step) -> Self:
        """The rule in λ (`eq:bayes_learn_rule`), or in μ where the step is reversed."""
        here = self.expectation() if step.reverse else self.natural()
        direction = self.direction(step)
        if step.reverse:
            direction = self.fisher_product(direction)
        new = jax.tree.map(lambda x, d: x - jnp.asarray(step.rate, x.dtype) * d, here, direction)
        if step.momentum is not None:
            before = step.previous.expectation() if step.reverse else step.previous.natural()
            new = jax.tree.map(lambda n, x, b: n + jnp.asarray(step.momentum, n.dtype) * (x - b), new, here, before)
        return self.with_expectation(new) if step.reverse else self.with_natural(new)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½⟨d, F d⟩ for the natural gradient d: to second order, the nats that are still to gain."""
        direction = self.direction(step)
        return 0.5 * jnp.sum(self.inner(direction, self.fisher_product(direction)))

    # Coordinates: λ as one minimal vector, symmetric matrices on an orthonormal basis.

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        return tuple(leaf.ndim for leaf in leaves) if self.ranks is None else self.ranks

    def _own_ranks(self) -> tuple[int, ...]:
        return self._leaf_ranks(jax.tree.leaves(self.natural()))

    def inner(self, natural: PyTree, statistics: PyTree) -> Float[Array, "..."]:
        """⟨λ, T⟩, over any leading axes."""
        pairs = zip(jax.tree.leaves(natural), jax.tree.leaves(statistics), self._own_ranks(), strict=True)
        return jnp.asarray(sum((jnp.sum(a * b, axis=tuple(range(-rank, 0))) for a, b, rank in pairs), start=0.0))

    def coordinates(self, natural: PyTree) -> Float[Array, "... M"]:
        """λ (or μ) as one minimal vector; the map is an isometry, so ⟨λ, μ⟩ is the dot product."""
        leaves = jax.tree.leaves(natural)
        return jnp.concatenate(
            [
                to_vector(leaf, rank, self.ranks is not None)
                for leaf, rank in zip(leaves, self._own_ranks(), strict=True)
            ],
            axis=-1,
        )

    def uncoordinates(self, vector: Float[Array, "... M"]) -> PyTree:
        """The inverse of `coordinates`."""
        leaves, treedef = jax.tree.flatten(jax.eval_shape(self.natural))
        parts, start = [], 0
        for leaf, rank in zip(leaves, self._own_ranks(), strict=True):
            shape = leaf.shape[leaf.ndim - rank :]
            symmetric = rank == 2 and self.ranks is not None
            size = shape[0] * (shape[0] + 1) // 2 if symmetric else math.prod(shape)
            part = vector[..., start : start + size]
            parts.append(from_lower(part, shape[0]) if symmetric else part.reshape(vector.shape[:-1] + shape))
            start += size
        return jax.tree.unflatten(treedef, parts)

    # The machinery behind the above.

    def _theta_like(self) -> PyTree:
        drawn = jax.eval_shape(lambda key: self.sample(key), jax.random.key(0))
        return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), drawn)

    def _symmetric(self, tree: PyTree) -> PyTree:
        if self.ranks is None or 2 not in self.ranks:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        ranks = self._own_ranks()
        halves = [
            0.5 * (leaf + jnp.swapaxes(leaf, -1, -2)) if rank == 2 else leaf
            for leaf, rank in zip(leaves, ranks, strict=True)
        ]
        return jax.tree.unflatten(treedef, halves)

    def _gradient(self, natural: PyTree) -> PyTree:
        return self._symmetric(jax.grad(lambda x: jnp.sum(self.log_partition(x)))(natural))

    def _fisher(self, vector: Float[Array, "... M"]) -> Float[Array, "... M M"]:
        def gradient(x: Array) -> Array:
            return self.coordinates(self._gradient(self.uncoordinates(x)))

        # One direction at a time for the whole batch: column j of every element's Fisher.
        basis = jnp.eye(vector.shape[-1], dtype=vector.dtype)
        columns = jax.vmap(lambda e: jax.jvp(gradient, (vector,), (jnp.broadcast_to(e, vector.shape),))[1])
        return jnp.moveaxis(columns(basis), 0, -1)
