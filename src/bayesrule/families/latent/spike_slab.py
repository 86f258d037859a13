"""The spike-and-slab mixture behind dropout: each unit's weights are a Gaussian, or nearly zero (section 4.3)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float

from ...numerics.pytree import PyTree
from ...numerics.random import Key
from ...numerics.trees import ravel, unravel
from ...steps.needs import Need
from ...steps.step import Step
from ..base import Family
from ..gaussian.base import GaussianFamily


class SpikeSlab(Family):
    r"""$q(θ_{jl}) = π_1 N(θ_{jl} | m_{jl}, S_{jl}^{-1}) + (1−π_1) N(θ_{jl} | 0, s_0^{-1})$ (`eq:var_dist_dropout`).

    A unit j is an input of a layer: the entries of a leaf that share an index of its last axis but one (a row of a
    dense layer's (inputs, outputs) matrix, an input channel of a convolution's (…, inputs, outputs)). Leaves with
    fewer axes, such as biases, have no units and are always kept.

    The step is the slab's own, on derivatives weighted by z/π₁ (`eq:von_dropout_1`, `eq:von_dropout_2`). With `learnt`
    the keep probabilities move too: $κ ← κ − ρ[∇_{μ_z}E_q\barℓ + τ(κ − κ_0)]$ with κ = logit π₁, its initial value κ₀,
    and the precision's rate ρ.

    >>> import jax.numpy as jnp
    >>> from bayesrule.families.gaussian.fixed import FixedGaussian
    >>> q = SpikeSlab(FixedGaussian({"w": jnp.ones((2, 3)), "b": jnp.ones(3)}), 0.8)
    >>> float(q.mean["w"][0, 0]), float(q.mean["b"][0])
    (0.8, 1.0)

    Args:
        slab: any Gaussian over the parameters.
        keep: π₁, one number, or a pytree of numbers whose structure is a prefix of the parameters', one for each
            layer; 1 for a layer without dropout.
        spike: the precision s₀ at zero.
        learnt: whether the keep probabilities move too.
    """

    slab: Any
    keep: PyTree
    initial_keep: PyTree
    spike: Any
    learnt: bool = eqx.field(static=True)
    label: ClassVar[str] = "Mixture of Gaussians"
    meaning: ClassVar[str] = (
        "q(θ_j) = π₁ N(m_j, S_j⁻¹) + (1 − π₁) N(0, 1/s₀), a unit's weights or zero  (eq:var_dist_dropout)"
    )
    update: ClassVar[str] = "m ← m − ρ S⁻¹ E_z[(z/π₁)∘∇ℓ̄(z∘m)]  (eq:von_dropout_1, eq:von_dropout_2)"
    separate_rates: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: p.points.chained or p.points.exact or p.curvature.in_lambda,
            lambda p: f"A {p.name} is looked at where some units are dropped: use Masks() points.",
        ),
    )

    def __init__(self, slab: GaussianFamily, keep: PyTree, *, spike: float = 1e8, learnt: bool = False):
        if not isinstance(slab, GaussianFamily):
            raise ValueError(f"The slab of a SpikeSlab is a Gaussian, got {type(slab).__name__}.")
        self.slab = slab
        self.keep = _keep_by_leaf(keep, slab.mean)
        if all(leaf.ndim < 2 for leaf in jax.tree.leaves(slab.mean)) and not _keeps_all(keep):
            raise ValueError(
                "Dropout drops the inputs of layers, which are rows of (inputs, outputs) leaves, but every leaf of "
                "these parameters has fewer than two axes: reshape them, or use the algorithm without dropout."
            )
        self.initial_keep = self.keep
        self.spike = jnp.asarray(spike, jnp.result_type(*jax.tree.leaves(slab.mean)))
        self.learnt = learnt

    @classmethod
    def update_with(cls, part: type[Family]) -> str:
        """The slab's own update, on derivatives at z∘m that are weighted by z/π₁."""
        if issubclass(part, cls):
            return cls.update
        formula = part.update.partition("  (")[0]
        formula = formula.replace("E_q∇ℓ̄", "E_z[(z/π₁)∘∇ℓ̄(z∘m)]").replace("E_q∇²ℓ̄", "E_z[(z/π₁)∘∇²ℓ̄(z∘m)]")
        formula = formula.replace("E_q diag(∇²ℓ̄)", "E_z[(z/π₁)∘diag(∇²ℓ̄(z∘m))]")
        return f"{formula}  (eq:von_dropout_1, eq:von_dropout_2)"

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        slab = choices.pop("slab")
        return cls(slab.around(params, precision), choices.pop("keep"), **choices)

    @property
    def params(self) -> PyTree:
        """m, the slab's mean: the weights of a unit that is kept."""
        return self.slab.params

    @property
    def mean(self) -> PyTree:
        """π₁m, the average of a unit's weights, and the network to predict with."""
        return jax.tree.map(lambda k, m: k.astype(m.dtype) * m, self.keep, self.slab.mean)

    @property
    def gaussian(self) -> GaussianFamily:
        return self.slab

    @property
    def structure(self) -> Any:
        return self.slab.structure

    @property
    def elementwise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # as its slab is
        return self.slab.elementwise

    def units(self, leaf: Array) -> tuple[int, ...]:
        """The shape of a leaf's mask: one number for each unit."""
        return tuple(n if axis == leaf.ndim - 2 else 1 for axis, n in enumerate(leaf.shape))

    def masks(self, uniform: PyTree, relaxation: Any = None) -> PyTree:
        """The masks z, 0 or 1 for each unit, or between them by the Concrete relaxation.

        Args:
            uniform: one uniform number for each unit, as from `uniform`.
            relaxation: the temperature of the relaxation; None for hard masks.
        """

        def leaf(u: Array, keep: Array) -> Array:
            if relaxation is None:
                return (u < keep).astype(u.dtype)
            tiny = jnp.finfo(u.dtype).tiny
            noise = jnp.log(jnp.maximum(u, tiny)) - jnp.log1p(-u)
            return jax.nn.sigmoid((_logit(keep).astype(u.dtype) + noise) / relaxation)

        return jax.tree.map(leaf, uniform, self.keep)

    # The rule.

    def to_step_terms(self, gradient: PyTree, curvature: Any, theta: PyTree, factors: PyTree) -> tuple[PyTree, Any]:
        if factors is None:
            raise ValueError("A SpikeSlab evaluates the loss where some units are dropped: use Masks() points.")
        weights, slopes = factors
        weighted = jax.tree.map(lambda g, w: g * w.astype(g.dtype), gradient, weights)
        curvature = self.structure.multiply_entries(curvature, weights, lambda: self._pairs(weights))
        if not self.learnt:
            return weighted, curvature

        def slope(g: Array, m: Array, s: Array) -> Array:
            return jnp.mean(_by_unit(g * m) * s.astype(g.dtype)) if m.ndim > 1 else jnp.zeros((), g.dtype)

        return {"slab": weighted, "keep": jax.tree.map(slope, gradient, self.slab.mean, slopes)}, curvature

    def _pairs(self, weights: PyTree) -> Float[Array, "P P"]:
        """The weights of the Hessian's entries: z/π₁ within a unit, the product of both units' between two."""
        flat = ravel(jax.tree.map(lambda w, m: jnp.broadcast_to(w, m.shape), weights, self.slab.mean))
        units_by_leaf, start = [], 0
        for leaf in jax.tree.leaves(self.slab.mean):
            shape = self.units(leaf) if leaf.ndim > 1 else leaf.shape
            leaf_units = start + jnp.arange(math.prod(shape)).reshape(shape)
            units_by_leaf.append(jnp.broadcast_to(leaf_units, leaf.shape).reshape(-1))
            start += math.prod(shape)
        unit = jnp.concatenate(units_by_leaf)
        same_unit = unit[:, None] == unit[None, :]
        return jnp.where(same_unit, flat[:, None], flat[:, None] * flat[None, :])

    def from_gaussian_terms(self, gradient: PyTree, curvature: Any) -> tuple[PyTree, Any]:
        if not self.learnt or gradient is None:
            return gradient, curvature
        # The derivative of E_q R in π₁ is R(m_j) − R(0), which is ½ m·∇R(m) for an R that is quadratic about 0, as
        # `regularizer=δ` is. For another R (a prior whose mean is not 0) it is an approximation, as R(0) is not known.
        slope = lambda g, m: 0.5 * jnp.mean(_by_unit(g * m)) if m.ndim > 1 else jnp.zeros((), m.dtype)
        return {"slab": gradient, "keep": jax.tree.map(slope, gradient, self.slab.mean)}, curvature

    def added(self, first: Any, second: Any) -> Any:
        return self.slab.added(first, second)

    def gradient_like(self) -> PyTree:
        return {"slab": self.slab.mean, "keep": self.keep} if self.learnt else self.slab.mean

    def _slab_step(self, step: Step) -> Step:
        return dataclasses.replace(step, gradient=step.gradient["slab"]) if self.learnt else step

    def _keep_direction(self, step: Step) -> PyTree:
        """∇_{μ_z}E_qℓ̄ + τ(κ − κ₀), the natural gradient of each κ."""

        def leaf(keep: Array, initial: Array, slope: Array) -> Array:
            return slope.astype(keep.dtype) + jnp.asarray(step.temperature, keep.dtype) * (
                _logit(keep) - _logit(initial)
            )

        return jax.tree.map(leaf, self.keep, self.initial_keep, step.gradient["keep"])

    def moved(self, step: Step) -> Self:
        slab = self.slab.moved(self._slab_step(step))
        if not self.learnt:
            return eqx.tree_at(lambda q: q.slab, self, slab)

        def leaf(keep: Array, direction: Array) -> Array:
            new = jax.nn.sigmoid(_logit(keep) - jnp.asarray(step.precision_rate, keep.dtype) * direction)
            return jnp.where((keep > 0) & (keep < 1), new, keep)  # a layer without dropout stays one

        keep = jax.tree.map(leaf, self.keep, self._keep_direction(step))
        return eqx.tree_at(lambda q: (q.slab, q.keep), self, (slab, keep))

    def with_scaled_precision(self, factor: Any) -> Self:
        return eqx.tree_at(lambda q: q.slab, self, self.slab.with_scaled_precision(factor))

    def trace(self, curvature: Any) -> Float[Array, ""]:
        return self.slab.trace(curvature)

    def precision_matrices(self) -> tuple[Array, ...]:
        return self.slab.precision_matrices()

    def decrement(self, step: Step) -> Float[Array, ""]:
        """That of the slab, and with `learnt` that of the masks z."""
        own = self.slab.decrement(self._slab_step(step))
        return own + self._length_of_logits(self._keep_direction(step)) if self.learnt else own

    def distance(self, other: Any) -> Float[Array, ""]:
        """That of the slabs, and with `learnt` that of the masks z."""
        own = self.slab.distance(other.slab)
        if not self.learnt:
            return own
        change = jax.tree.map(lambda new, old: _logit(new) - _logit(old), other.keep, self.keep)
        return own + self._length_of_logits(change)

    def _length_of_logits(self, change: PyTree) -> Float[Array, ""]:
        """½⟨d, Fd⟩ of a displacement d of κ: the n masks of a layer share it, and F = nπ₁(1 − π₁)."""

        def leaf(m: Array, keep: Array, d: Array) -> Array:
            count = m.shape[-2] if m.ndim > 1 else 0
            moves = (keep > 0) & (keep < 1)  # The logit of a layer without dropout is infinite and does not move.
            return 0.5 * count * keep * (1 - keep) * jnp.where(moves, d, 0.0) ** 2

        return sum(jax.tree.leaves(jax.tree.map(leaf, self.slab.mean, self.keep, change)), start=jnp.zeros(()))

    def inside(self) -> Bool[Array, ""]:
        proper = [jnp.all((k > 0) & (k <= 1)) for k in jax.tree.leaves(self.keep)]
        return jnp.all(jnp.stack(proper)) & jnp.all(self.slab.inside())

    # The distribution.

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        slab_key, mask_key, spike_key = jax.random.split(key, 3)
        z = self.masks(self.uniform(mask_key, shape))
        slab = self.slab.sample(slab_key, shape)
        noise = jax.random.normal(spike_key, (*shape, self.slab.noise_size))
        spike = unravel(noise / jnp.sqrt(self.spike), self.slab.mean)
        return jax.tree.map(lambda m, a, b: jnp.where(m > 0, a, b), z, slab, spike)

    def uniform(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        """A uniform number for each unit, with leading axes `shape`; called by `Masks` points."""
        leaves, treedef = jax.tree.flatten(self.slab.mean)
        keys = jax.random.split(key, len(leaves))
        draws = [jax.random.uniform(k, (*shape, *self.units(m)), m.dtype) for k, m in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(treedef, draws)

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        if not self.slab.elementwise:
            raise ValueError("The density of a SpikeSlab factorizes over units only if its slab is fixed or diagonal.")
        precision = jax.tree.map(lambda v: 1 / v, self.slab.variance())

        def leaf(t: Array, m: Array, s: Array, keep: Array) -> Array:
            normal = lambda x, p: 0.5 * (jnp.log(p) - math.log(2 * math.pi) - p * x**2)
            slab, spike = normal(t - m, s), normal(t, jnp.asarray(self.spike, t.dtype))
            if m.ndim < 2:
                return jnp.sum(slab, axis=tuple(range(-m.ndim, 0)))
            axes = tuple(axis for axis in range(-m.ndim, 0) if axis != -2)
            both = jnp.logaddexp(jnp.log(keep) + slab.sum(axes), jnp.log1p(-keep) + spike.sum(axes))
            return jnp.sum(both, axis=-1)

        return sum(
            jax.tree.leaves(jax.tree.map(leaf, theta, self.slab.mean, precision, self.keep)), start=jnp.zeros(())
        )

    def entropy(self) -> Float[Array, ""]:
        """H(z) + E_z H(q(θ | z)), which assumes that slab and spike hardly overlap, as the paper's derivation does."""

        def leaf(m: Array, v: Array, keep: Array) -> Array:
            gaussian_entropy = lambda variance: 0.5 * (1 + math.log(2 * math.pi) + jnp.log(variance))
            slab, spike = jnp.sum(gaussian_entropy(v)), m.size * gaussian_entropy(1 / jnp.asarray(self.spike, m.dtype))
            count = m.shape[-2] if m.ndim > 1 else 0
            mask_entropy = -count * (xlogy(keep, keep) + xlogy(1 - keep, 1 - keep))
            return mask_entropy + keep * slab + (1 - keep) * spike

        parts = jax.tree.map(leaf, self.slab.mean, self.slab.variance(), self.keep)
        return sum(jax.tree.leaves(parts), start=jnp.zeros(()))


def _by_unit(x: Array) -> Array:
    """Sums over a unit's entries, in the shape of the leaf's mask."""
    return jnp.sum(x, axis=tuple(axis for axis in range(x.ndim) if axis != x.ndim - 2), keepdims=True)


def _keeps_all(keep: PyTree) -> bool:
    """Whether every keep probability is known to be 1."""
    return not any(isinstance(k, Tracer) or float(k) < 1 for k in jax.tree.leaves(keep))


def _logit(p: Array) -> Array:
    return jnp.log(p) - jnp.log1p(-p)


def _keep_by_leaf(keep: PyTree, mean: PyTree) -> PyTree:
    """One keep probability for each leaf; leaves without units are always kept."""

    def for_leaves(k: Any, part: PyTree) -> PyTree:
        if not isinstance(k, Tracer) and not 0 < float(k) <= 1:
            raise ValueError(f"A keep probability must be above 0 and at most 1, got {float(k):g}.")
        return jax.tree.map(lambda m: jnp.asarray(k if m.ndim > 1 else 1.0, m.dtype), part)

    try:
        return jax.tree.map(for_leaves, keep, mean)
    except ValueError as error:
        if "keep probability" in str(error):
            raise
        raise ValueError(
            "keep= is one number, or a pytree of numbers whose structure is a prefix of the parameters' (one for each "
            "layer)."
        ) from None
