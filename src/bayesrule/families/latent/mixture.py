"""Finite mixtures: a categorical choice z, and the component that it chooses (section 3.2, `app:mog`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from ...numerics.pytree import PyTree
from ...numerics.random import Key
from ...numerics.trees import average_leaves
from ...steps.needs import Need
from ...steps.step import Step
from ..base import ExponentialFamily, Family
from ..discrete import Categorical
from ..gaussian.base import GaussianFamily
from ..gaussian.precision import FULL, Structure


class Parts(NamedTuple):
    """λ, μ or a gradient of the joint q(θ, z): of the components along a leading axis, and of the choice z."""

    components: PyTree
    choice: PyTree


class Mixture(Family):
    r"""$q(θ) = \sum_k π_k q_k(θ)$ with components of one exponential family.

    It is the q of a rule of its own, whose objective is a function of θ, or a block of a `Model` (`cvi`, `ncvmp`).

    The Fisher information of q may be singular, so the rule moves the joint q(θ, z), a minimal conditional exponential
    family with λ = (λ_1, …, λ_K, logits of π) (`eq:BLRmix`). With $r_k = q(z = k | θ)$ the responsibility, $\log q =
    \log q_k + \log π_k − \log r_k$, where the first term gives the decay of an ordinary step of component k. So a step
    of the mixture is K ordinary steps, component k on the loss $\barℓ − τ\log r_k$ (`eq:exp-von1`, `eq:exp-von2`).

    >>> import jax.numpy as jnp
    >>> from bayesrule.families.gaussian.full import Gaussian
    >>> q = Mixture([1, 3], [Gaussian(jnp.zeros(1)), Gaussian(jnp.full(1, 4.0))])
    >>> q.weights.tolist(), q.mean.tolist(), [round(float(r), 3) for r in q.responsibilities(jnp.full(1, 2.0))]
    ([0.25, 0.75], [3.0], [0.25, 0.75])

    Args:
        weights: positive numbers proportional to the π_k.
        components: a list of K members of one family, or one member whose arrays have a leading axis of K.
        learnt: whether the weights move too, as the categorical distribution of z.
    """

    choice: Categorical
    components: Any
    learnt: bool = eqx.field(static=True)
    label: ClassVar[str] = "Mixture of Gaussians"
    meaning: ClassVar[str] = "q(θ) = Σ_k π_k q_k(θ), moved as the joint q(θ, z)  (eq:BLRmix)"
    update: ClassVar[str] = "λ_k ← (1 − ρτ)λ_k − ρ ∇_{μ_k} E_{q_k}[ℓ̄ − τ log r_k]  (eq:exp-von1, eq:exp-von2)"
    is_mixture: ClassVar[bool] = True
    prior_is_base_measure: ClassVar[bool] = False
    reparameterized: ClassVar[bool] = False
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.plain_coordinates,
            "The components of a mixture move side by side: use GradientAverage instead of natural momentum, and "
            "neither the reverse nor the lazy form.",
        ),
        (
            lambda p: not isinstance(p.member, GaussianFamily) or p.points.fits(p.member.noise_size),
            lambda p: (
                "The responsibilities of a mixture are evaluated over θ, even where the loss is over its outputs, "
                f"and the grid of {p.points!r} in {getattr(p.member, 'noise_size', 0)} dimensions is too large: use "
                "MonteCarlo()."
            ),
        ),
        (
            lambda p: not issubclass(p.kind, GaussianFamily) or p.structure in (None, "none", "diagonal", "full"),
            lambda p: (
                f"The curvature of −log r_k is not a sum of squares, which is all that a {p.name} holds: mix "
                "Gaussian, DiagonalGaussian or FixedGaussian components."
            ),
        ),
        (
            lambda p: not p.points.exact,
            "The entropy of a mixture has no closed form in μ: use MonteCarlo(), Quadrature() or Delta() points.",
        ),
    )

    def __init__(self, weights: Any, components: Any, *, learnt: bool = True):
        weights = jnp.asarray(weights, float)
        if weights.ndim != 1 or not weights.size:
            raise ValueError(f"A mixture has one weight for each component, shape (K,), got shape {weights.shape}.")
        if not isinstance(weights, Tracer) and not bool(jnp.all(jnp.isfinite(weights) & (weights > 0))):
            raise ValueError(f"The weights of a mixture must be above 0, got {weights.tolist()}.")
        self.components = _stack(components, weights.size)
        self.choice = Categorical(jnp.log(weights / jnp.sum(weights)))
        self.learnt = learnt

    @classmethod
    def update_with(cls, part: type[Family]) -> str:
        """Each component's own update, on the loss f_k = ℓ̄ − τ log r_k."""
        if issubclass(part, cls):
            return cls.update
        formula = part.update.partition("  (")[0].replace("ℓ̄", "f_k").replace("E_q", "E_{q_k}")
        return f"{formula},  f_k = ℓ̄ − τ log r_k for each component k  (eq:exp-von1, eq:exp-von2)"

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        """Components of one kind around K parameters, along a leading axis of every leaf."""
        counts = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params)}
        if len(counts) != 1 or counts == {()}:
            raise ValueError(
                "A mixture starts from K parameters, one for each component along a leading axis of every array (or "
                f"from a Mixture), got leading axes {sorted(counts)}."
            )
        shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (precision, params)]
        # The precision is one for each component, or one for all of them.
        precision_axis = 0 if shapes[0] == shapes[1] else None
        members = jax.vmap(choices.pop("component").around, in_axes=(0, precision_axis))(params, precision)
        return cls(jnp.ones(counts.pop()), members, **choices)

    @property
    def weights(self) -> Float[Array, " K"]:
        """π."""
        return self.choice.probabilities

    @property
    def count(self) -> int:
        """K."""
        return self.choice.logits.shape[-1]

    @property
    def mean(self) -> PyTree:
        """Σ_k π_k E_{q_k} θ."""
        return self.average(self.each(lambda c: c.mean))

    def component(self, index: Any) -> Any:
        """One component, a member of the family that was mixed."""
        return jax.tree.map(lambda leaf: leaf[index], self.components)

    @property
    def component_prototype(self) -> ExponentialFamily:
        return self.component(0)

    def each(self, function: Callable[..., Any], *trees: PyTree) -> Any:
        """Apply a function to each component (and its slice of the trees); the results have a leading axis of K."""
        return jax.vmap(function)(self.components, *trees)

    def average(self, tree: PyTree) -> PyTree:
        """Σ_k π_k x_k, for leaves with a leading axis of K."""
        return average_leaves(tree, self.weights)

    def with_parts(self, components: ExponentialFamily, choice: Categorical) -> Self:
        """The same mixture with these components and this distribution of z."""
        return eqx.tree_at(lambda q: (q.components, q.choice), self, (components, choice))

    # The density and its derivatives.

    def _joint(self, theta: PyTree) -> Float[Array, "K ..."]:
        """log π_k + log q_k(θ)."""
        density = self.each(lambda c: c.log_prob(theta))
        log_weights = jax.nn.log_softmax(self.choice.logits)
        return density + log_weights.reshape((-1,) + (1,) * (density.ndim - 1)).astype(density.dtype)

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        return jax.nn.logsumexp(self._joint(theta), axis=0)

    def log_responsibilities(self, theta: PyTree) -> Float[Array, "... K"]:
        """log q(z = k | θ)."""
        return jnp.moveaxis(jax.nn.log_softmax(self._joint(theta), axis=0), 0, -1)

    def responsibilities(self, theta: PyTree) -> Float[Array, "... K"]:
        """r_k(θ) = q(z = k | θ)  (`eq:responsibility`)."""
        return jnp.exp(self.log_responsibilities(theta))

    def score(self, theta: PyTree) -> PyTree:
        """∇log q(θ) = Σ_j r_j S_j(m_j − θ), for Gaussian components  (`eq:mixexp_1st`)."""
        return self._slopes(theta)[2]

    def hessian(self, theta: PyTree) -> Float[Array, "P P"]:
        """∇²log q(θ) = Σ_j r_j[A_jj − S_j − Σ_i r_i A_ij], for Gaussian components  (`eq:mixexp_2nd`)."""
        responsibilities, slopes, score = self._slopes(theta)
        return self._score_variance(responsibilities, slopes, score, FULL) - FULL.average(
            self._precisions(theta, FULL), responsibilities
        )

    def _slopes(self, theta: PyTree) -> tuple[Array, PyTree, PyTree]:
        """r_j, the components' scores S_j(m_j − θ), and their average, the score of the mixture."""
        if not isinstance(self.components, GaussianFamily):
            raise ValueError(
                f"The score of a mixture has a closed form for Gaussian components only, and these are "
                f"{type(self.components).__name__}s: use jax.grad of its log_prob."
            )
        responsibilities = self.responsibilities(theta)
        slopes = self.each(lambda c: c.times(jax.tree.map(jnp.subtract, c.mean, theta)))
        return responsibilities, slopes, average_leaves(slopes, responsibilities)

    def _precisions(self, theta: PyTree, structure: Structure) -> Any:
        """The S_j in a structure, along a leading axis."""
        return self.each(lambda c: c.prior_curvature(structure, theta))

    def _score_variance(self, weights: Array, slopes: PyTree, score: PyTree, structure: Structure) -> Any:
        """Σ_j r_j (d_j − d̄)(d_j − d̄)ᵀ = Σ_j r_j[A_jj − Σ_i r_i A_ij]: no difference of large numbers."""
        return structure.outer_sum(jax.tree.map(jnp.subtract, slopes, score), weights)

    def repulsion(self, index: Int[Array, ""]) -> Responsibility:
        """−log r_k(θ), the loss term that keeps component k away from the others."""
        return Responsibility(self, index)

    # Entropies.

    def entropy(self, key: Key | None = None, samples: int = 4096) -> Float[Array, ""]:
        """H(q) by Monte Carlo, because it has no closed form; the standard error is of the order of 1/√samples nats.

        Args:
            key: for the draws; without one they are the same in every call.
            samples: the number of draws of each component.
        """
        key = jax.random.key(0) if key is None else key
        keys = jax.random.split(key, self.count)
        draws = self.each(lambda c, k: c.sample(k, (samples,)), keys)
        index = jnp.arange(self.count)
        log_responsibility = jax.vmap(lambda t, k: jnp.mean(self.log_responsibilities(t)[..., k]))(draws, index)
        return self.joint_entropy() + self.average(log_responsibility)

    def joint_entropy(self) -> Float[Array, ""]:
        """H(q(θ, z)) = H(π) + Σ_k π_k H(q_k); H(q) is this plus E log r_z."""
        return self.choice.entropy() + self.average(self.each(lambda c: jnp.sum(c.joint_entropy())))

    # The rule.

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        choice_key, draw_key = jax.random.split(key)
        z = jax.random.categorical(choice_key, self.choice.logits, shape=shape)
        keys = jax.random.split(draw_key, z.size)
        draws = jax.vmap(lambda index, k: self.component(index).sample(k))(z.reshape(-1), keys)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), draws)

    def moved(self, step: Step) -> Self:
        """As a block of a model: every component by its own step, and the distribution of z."""
        if not isinstance(step.gradient, Parts):
            raise ValueError("A mixture is moved a component at a time, with its responsibilities: use rule.step.")
        components = self.each(lambda c, g, h: c.moved(_own(step, g, h)), step.gradient.components, step.curvature)
        choice = self.choice.moved(self._choice_step(step)) if self.learnt else self.choice
        return self.with_parts(components, choice)

    def chosen(self, step: Step) -> Categorical:
        """The distribution of z after a step.

        Args:
            step: its gradient has, for each component, E_{q_k}[ℓ̄ + τ(log q_k − log r_k)].
        """
        if not self.learnt:
            return self.choice
        gradient = self.choice.enumerated_gradient(step.gradient, None)
        return self.choice.moved(dataclasses.replace(step, gradient=gradient, curvature=None))

    def inside(self, natural: Parts | None = None) -> Bool[Array, ""]:
        q = self if natural is None else self.with_natural(natural)
        return jnp.all(q.each(lambda c: jnp.all(c.inside()))) & q.choice.inside()

    # As a block of a model: the joint q(θ, z) with λ = (λ_1, …, λ_K, logits) and the expectations (μ_1, …, μ_K, π). Its
    # Fisher information is block diagonal, with the block π_k F_k for component k.

    def mode(self) -> PyTree:
        """A mixture has no closed form for its mode, so that it is not read there."""
        raise ValueError(
            "A Mixture has no closed form for its mode, so it cannot be read there: name the other blocks, for example "
            "em('noise'), or use ncvmp()."
        )

    def natural(self) -> Parts:
        """(λ_1, …, λ_K) along a leading axis, and the natural parameter of the choice z."""
        return Parts(self.each(lambda c: c.natural()), self.choice.natural())

    def with_natural(self, natural: Parts) -> Self:
        """The mixture with this λ."""
        components = self.each(lambda c, x: c.with_natural(x), natural.components)
        return self.with_parts(components, self.choice.with_natural(natural.choice))

    def expectation(self) -> Parts:
        """(μ_1, …, μ_K) along a leading axis, and π without its last entry."""
        return Parts(self.each(lambda c: c.expectation()), self.choice.expectation())

    def inner(self, natural: Parts, statistics: Parts) -> Float[Array, ""]:
        """Σ_k π_k ⟨λ_k, μ_k⟩ + ⟨logits, π⟩, for displacements: the weights are those of this member."""
        own = self.average(self.each(lambda c, a, b: jnp.sum(c.inner(a, b)), natural.components, statistics.components))
        return own + self.choice.inner(natural.choice, statistics.choice)

    def constant_base(self) -> bool:
        """Whether the base measure of the components is constant."""
        return self.component_prototype.constant_base()

    def _symmetric(self, tree: Parts) -> Parts:
        return Parts(self.each(lambda c, x: c._symmetric(x), tree.components), tree.choice)

    def derivatives(self, natural_gradient: Parts) -> tuple[Parts, Any]:
        """The gradients and curvatures of the components' steps, and the gradient of the choice's.

        Args:
            natural_gradient: the derivatives of E_q ℓ̄ in μ_k, which have the factor π_k, and in π.
        """

        def one(component: Any, weight: Array, slope: PyTree) -> tuple[PyTree, Any]:
            return component.derivatives(jax.tree.map(lambda x: x / weight.astype(x.dtype), slope))

        # A component without weight has no message; it stays where it is instead of becoming NaN.
        weights = jnp.maximum(self.weights, jnp.finfo(self.weights.dtype).tiny)
        gradients, curvatures = self.each(one, weights, natural_gradient.components)
        return Parts(gradients, natural_gradient.choice), curvatures

    def added(self, first: Any, second: Any) -> Any:
        return self.each(lambda c, a, b: c.added(a, b), first, second)

    def _choice_step(self, step: Step) -> Step:
        """The step of z: its gradient has the components' entropies H(q_k), which the joint's entropy averages."""
        entropies = self.each(lambda c: jnp.sum(c.joint_entropy()))
        pull = jnp.asarray(step.temperature, entropies.dtype) * self.choice.enumerated_gradient(entropies, None)
        return _own(step, step.gradient.choice - pull, None)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½⟨d, F d⟩ of the joint: Σ_k π_k times the components' decrements, and that of the choice."""
        own = self.each(lambda c, g, h: c.decrement(_own(step, g, h)), step.gradient.components, step.curvature)
        return self.average(own) + (self.choice.decrement(self._choice_step(step)) if self.learnt else 0.0)

    def distance(self, other: Any) -> Float[Array, ""]:
        """½⟨Δ, FΔ⟩ of the joint: Σ_k π_k times the components' distances, and that of the choice."""
        own = self.each(lambda c, d: c.distance(d), other.components)
        return self.average(own) + self.choice.distance(other.choice)

    def frozen_log_responsibility(self, index: Int[Array, ""], theta: PyTree) -> Float[Array, "..."]:
        """log r_k(θ) as a function of θ alone: the derivative of E log r_z in q's own parameters within r is 0."""
        return jax.lax.stop_gradient(self).log_responsibilities(theta)[..., index]

    def precision_matrices(self) -> tuple[Array, ...]:
        return self.components.precision_matrices()

    def with_scaled_precision(self, factor: Any) -> Self:
        return self.with_parts(self.each(lambda c: c.with_scaled_precision(factor)), self.choice)

    def pruned(self, least: float = 1e-3) -> Self:
        """The mixture without the components whose weight is below `least`; not for use inside `jit`."""
        kept = jnp.flatnonzero(self.weights >= least)
        if not kept.size:
            raise ValueError(f"No component has a weight of {least:g} or more; the largest is {self.weights.max():g}.")
        return type(self)(self.weights[kept], self.component(kept), learnt=self.learnt)


class Responsibility(eqx.Module):
    """−log r_k(θ) for one component of a mixture, as a term of its loss."""

    mixture: Mixture
    index: Int[Array, ""]

    def __call__(self, theta: PyTree) -> Float[Array, ""]:
        return -self.mixture.log_responsibilities(theta)[..., self.index]

    def at(self, theta: PyTree, structure: Structure) -> tuple[Array, PyTree, Any]:
        """−log r_k, its gradient ∇log q − ∇log q_k and its Hessian ∇²log q + S_k (`eq:mixexp_1st`, `eq:mixexp_2nd`).

        Args:
            theta: one point.
            structure: the form of the Hessian; no Hessian is computed for one that holds nothing.
        """
        responsibilities, slopes, score = self.mixture._slopes(theta)
        component_score = jax.tree.map(lambda x: x[self.index], slopes)
        gradient = jax.tree.map(jnp.subtract, score, component_score)
        precisions = self.mixture._precisions(theta, structure)
        differences = jax.tree.map(lambda s: s[self.index] - s, precisions)
        score_variance = self.mixture._score_variance(responsibilities, slopes, score, structure)
        hessian = structure.add(score_variance, structure.average(differences, responsibilities))
        return self(theta), gradient, hessian


def _own(step: Step, gradient: PyTree, curvature: Any) -> Step:
    """The step with the derivatives of one component, or of the choice."""
    return dataclasses.replace(step, gradient=gradient, curvature=curvature)


def _stack(components: Any, count: int) -> ExponentialFamily:
    """Check K components and stack their arrays along a leading axis."""
    if isinstance(components, Sequence):
        kinds = {type(c).__name__ for c in components}
        shapes = {str((jax.tree.structure(c), [jnp.shape(x) for x in jax.tree.leaves(c)])) for c in components}
        if len(components) != count or len(kinds) != 1 or len(shapes) != 1:
            raise ValueError(
                f"A mixture of {count} weights needs {count} components of one family and one shape, got "
                f"{len(components)} of {sorted(kinds)}."
            )
        components = jax.tree.map(lambda *leaves: jnp.stack(leaves), *components)
    elif getattr(components, "batch_ndim", 0):
        components = dataclasses.replace(components, batch_ndim=components.batch_ndim - 1)
    if not isinstance(components, ExponentialFamily):
        raise ValueError(
            f"The components of a mixture are members of an exponential family, got {type(components).__name__}."
        )
    wrong = [jnp.shape(leaf) for leaf in jax.tree.leaves(components) if jnp.shape(leaf)[:1] != (count,)]
    if wrong:
        raise ValueError(
            f"A mixture of {count} weights needs a leading axis of {count} in every array of its components, got "
            f"shapes {wrong}: give a list of {count} members instead."
        )
    return components
