"""A product of named families: independent blocks of θ under one q."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import ravel
from ..steps.step import Step
from .base import ExponentialFamily
from .gaussian.base import GaussianFamily
from .gaussian.precision import DIAGONAL, NONE, GaussNewtonForms, Structure, T
from .latent.mixture import Mixture


class BlockStructure(Structure):
    """Each block's own structure; a diagonal one if they all are that or hold nothing."""

    def __init__(self, blocks: dict[str, Structure]):
        self.blocks = blocks

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # as its blocks are
        names = {structure.name for structure in self.blocks.values()}
        return names.pop() if len(names) == 1 else "diagonal" if names <= {"none", "diagonal"} else "mixed"

    def of_diagonal(self, diagonal: PyTree) -> dict[str, Any]:
        return {name: structure.of_diagonal(diagonal[name]) for name, structure in self.blocks.items()}

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> dict[str, Any]:
        ends = np.cumsum([0, *(ravel(like[name]).size for name in sorted(self.blocks))])  # θ ravels by sorted names
        own = {name: slice(*ends[i : i + 2]) for i, name in enumerate(sorted(self.blocks))}
        return {name: s.of_matrix(matrix[own[name], own[name]], like[name]) for name, s in self.blocks.items()}

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> dict[str, Any]:
        return {name: structure.of_sandwich(jacobian[name], middle) for name, structure in self.blocks.items()}

    def gauss_newton(self, forms: GaussNewtonForms[T]) -> T:
        return DIAGONAL.gauss_newton(forms) if self.name == DIAGONAL.name else forms.sandwich()


class Product(ExponentialFamily):
    r"""Independent blocks, $q(θ) = \prod_j q_j(θ_j)$; θ, λ and μ are dicts under the blocks' names.

    $λ = (λ_j)$, $T = (T_j)$, $A(λ) = \sum_j A_j(λ_j)$; the Fisher is block-diagonal, so each block
    moves by itself. A product is one event: log-densities are summed over the blocks' batch axes.

    >>> import jax.numpy as jnp
    >>> from bayesrule.families.gamma import Gamma
    >>> from bayesrule.families.discrete import Poisson
    >>> q = Product({"rates": Gamma(2.0, jnp.array([1.0, 4.0])), "count": Poisson(3.0)})
    >>> q.expectation()["rates"][1].tolist(), q.entropy().shape
    ([2.0, 0.5], ())

    Args:
        blocks: the families by name; a block may also be a `Mixture` of Gaussians.
    """

    blocks: dict[str, Any]
    separate_rates: ClassVar[bool] = True
    label: ClassVar[str] = "Exponential family (mean-field)"
    meaning: ClassVar[str] = "q(θ) = Π_j q_j(θ_j), each an exponential family  (section 5.3)"
    update: ClassVar[str] = "λ_j ← (1 − ρτ)λ_j + ρ Σ_i ∇_{μ_j} E_q log f_i  (eq:blr_global)"

    def __init__(self, blocks: Mapping[str, Any]):
        wrong = [name for name, block in blocks.items() if not isinstance(block, ExponentialFamily | Mixture)]
        if wrong or not blocks:
            found = f"others under {wrong}" if wrong else "none"
            raise ValueError(f"Product needs a dict of exponential families by name, or mixtures, got {found}.")
        self.blocks = {name: blocks[name] for name in sorted(blocks)}

    @property
    def has_mixtures(self) -> bool:
        """Whether a block is a mixture, so that the entropy has no closed form."""
        return any(block.is_mixture for block in self.blocks.values())

    def __getitem__(self, name: str) -> Any:
        """A block."""
        return self.blocks[name]

    @property
    def elementwise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # as its blocks are
        return all(block.elementwise for block in self.blocks.values())

    @property
    def mean(self) -> dict[str, PyTree]:
        """Every block's mean."""
        return {name: block.mean for name, block in self.blocks.items()}

    @property
    def structure(self) -> Structure:
        """Its blocks' structures, for derivatives in θ of Gaussians (diagonal or fixed) and relaxed signs."""
        return BlockStructure({name: getattr(block, "structure", NONE) for name, block in self.blocks.items()})

    def times(self, theta: dict[str, PyTree]) -> dict[str, PyTree]:
        """Sθ in the Gaussian blocks, 0 in the others."""
        zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
        return {
            name: block.times(theta[name]) if isinstance(block, GaussianFamily) else zeros(theta[name])
            for name, block in self.blocks.items()
        }

    def to_step_terms(self, gradient: PyTree, curvature: Any, theta: PyTree, factors: PyTree) -> tuple[PyTree, Any]:
        none = dict.fromkeys(self.blocks)
        curvature, factors = (none if tree is None else tree for tree in (curvature, factors))
        found = self._each("to_step_terms", gradient, curvature, theta, factors)
        return {name: pair[0] for name, pair in found.items()}, {name: pair[1] for name, pair in found.items()}

    @property
    def reparameterized(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # as its blocks are
        return all(block.reparameterized for block in self.blocks.values())

    def _each(self, method: str, *trees: PyTree) -> dict[str, Any]:
        """A method of every block, on its part of each tree."""
        return {name: getattr(block, method)(*(tree[name] for tree in trees)) for name, block in self.blocks.items()}

    def _summed(self, values: dict[str, Any]) -> Float[Array, "..."]:
        """Σ over the blocks and their batch axes; the axes before those (of samples) stay."""
        total: Any = 0.0
        for name, block in self.blocks.items():
            batch = () if block.is_mixture else jax.eval_shape(lambda q: q.log_partition(q.natural()), block).shape
            value = jnp.asarray(values[name])
            value = jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, batch))
            total = total + jnp.sum(value, axis=tuple(range(-len(batch), 0)))
        return total

    # λ, T, A, h.

    def natural(self) -> dict[str, PyTree]:
        return self._each("natural")

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        raise ValueError("λ alone does not say which families a Product has: use its with_natural.")

    @classmethod
    def from_expectation(cls, expectation: PyTree) -> Self:
        raise ValueError("μ alone does not say which families a Product has: use its with_expectation.")

    def with_natural(self, natural: dict[str, PyTree]) -> Self:
        return type(self)(self._each("with_natural", natural))

    def with_expectation(self, expectation: dict[str, PyTree]) -> Self:
        return type(self)(self._each("with_expectation", expectation))

    def statistics(self, theta: dict[str, PyTree]) -> dict[str, PyTree]:
        return self._each("statistics", theta)

    def log_partition(self, natural: dict[str, PyTree]) -> Float[Array, ""]:
        return self._summed(self._each("log_partition", natural))

    def log_base(self, theta: dict[str, PyTree]) -> Float[Array, "..."]:
        return self._summed(self._each("log_base", theta))

    def expected_log_base(self) -> Float[Array, ""]:
        return self._summed(self._each("expected_log_base"))

    def constant_base(self) -> bool:
        return all(self._each("constant_base").values())

    def inside(self, natural: dict[str, PyTree] | None = None) -> Bool[Array, ""]:
        found = self._each("inside") if natural is None else self._each("inside", natural)
        return jnp.all(jnp.stack([jnp.all(value) for value in found.values()]))

    # Density and divergence.

    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> dict[str, PyTree]:
        keys = jax.random.split(key, len(self.blocks))
        return {name: block.sample(k, shape) for k, (name, block) in zip(keys, self.blocks.items(), strict=True)}

    def log_prob(self, theta: dict[str, PyTree]) -> Float[Array, "..."]:
        return self._summed(self._each("log_prob", theta))

    def entropy(self) -> Float[Array, ""]:
        return self._summed(self._each("entropy"))

    def joint_entropy(self) -> Float[Array, ""]:
        return self._summed(self._each("joint_entropy")) if self.has_mixtures else self.entropy()

    def kl(self, other: Any) -> Float[Array, ""]:
        if not isinstance(other, Product) or other.blocks.keys() != self.blocks.keys():
            raise ValueError(f"kl needs another Product with the blocks {list(self.blocks)}.")
        return self._summed(self._each("kl", other.blocks))

    # The block-diagonal Fisher.

    def expectation(self) -> dict[str, PyTree]:
        return self._each("expectation")

    def to_natural_gradient(self, covector: dict[str, PyTree]) -> dict[str, PyTree]:
        return self._each("to_natural_gradient", covector)

    def fisher_product(self, vector: dict[str, PyTree]) -> dict[str, PyTree]:
        return self._each("fisher_product", vector)

    def inner(self, natural: dict[str, PyTree], statistics: dict[str, PyTree]) -> Float[Array, "..."]:
        return self._summed(self._each("inner", natural, statistics))

    def coordinates(self, natural: dict[str, PyTree]) -> Float[Array, " M"]:
        return jnp.concatenate([x.reshape(-1) for x in self._each("coordinates", natural).values()])

    def uncoordinates(self, vector: Float[Array, " M"]) -> dict[str, PyTree]:
        parts, start = {}, 0
        for name, shape in jax.eval_shape(lambda: self._each("coordinates", self.natural())).items():
            parts[name] = vector[start : start + shape.size].reshape(shape.shape)
            start += shape.size
        return self._each("uncoordinates", parts)

    def _symmetric(self, tree: dict[str, PyTree]) -> dict[str, PyTree]:
        return self._each("_symmetric", tree)

    # The rule, block by block.

    def _steps(self, step: Step) -> dict[str, Step]:
        """The step as each block takes it."""
        return {
            name: dataclasses.replace(
                step,
                gradient=step.gradient[name],
                curvature=None if step.curvature is None else step.curvature[name],
                previous=None if step.previous is None else step.previous.blocks[name],
            )
            for name in self.blocks
        }

    def added(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        return self._each("added", first, second)

    def natural_step(self, step: Step) -> dict[str, PyTree]:
        return self._each("natural_step", self._steps(step))

    def derivatives(self, natural_gradient: dict[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, Any]]:
        found = self._each("derivatives", natural_gradient)
        gradients, curvatures = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
        return gradients, curvatures

    def direction(self, step: Step) -> dict[str, PyTree]:
        return self._each("direction", self._steps(step))

    def chart(self) -> dict[str, PyTree]:
        return self._each("chart")

    def at_chart(self, coordinates: dict[str, PyTree]) -> Self:
        return type(self)(self._each("at_chart", coordinates))

    def chart_velocity(self, step: Step) -> dict[str, PyTree]:
        return self._each("chart_velocity", self._steps(step))

    def chart_metric(self, vector: dict[str, PyTree]) -> dict[str, PyTree]:
        return self._each("chart_metric", vector)

    def moved(self, step: Step) -> Self:
        return type(self)(self._each("moved", self._steps(step)))

    def with_scaled_precision(self, factor: Any) -> Self:
        def of(block: Any) -> Any:
            return block.with_scaled_precision(factor) if isinstance(block, GaussianFamily) else block

        return type(self)({name: of(block) for name, block in self.blocks.items()})

    def precision_matrices(self) -> tuple[Array, ...]:
        return tuple(matrix for block in self.blocks.values() for matrix in block.precision_matrices())

    def cancellations(self) -> tuple[Array, ...]:
        return tuple(ratio for block in self.blocks.values() for ratio in block.cancellations())

    def decrement(self, step: Step) -> Float[Array, ""]:
        return jnp.asarray(sum(self._each("decrement", self._steps(step)).values(), start=0.0))

    def distance(self, other: Any) -> Float[Array, ""]:
        """The sum of the blocks' distances, of which a Gaussian's keeps its digits where means are far from 0."""
        return jnp.asarray(sum(self._each("distance", other.blocks).values(), start=0.0))
