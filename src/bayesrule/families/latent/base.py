"""Minimal conditional families: θ is Gaussian given a latent number w, and the rule moves q(θ, w) (section 3.2)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ...numerics.pytree import PyTree
from ...numerics.trees import ravel
from ...steps.needs import Need
from ..base import Family
from ..gaussian.full import Gaussian
from ..gaussian.precision import FULL, Structure


class ConditionalFamily(Family):
    r"""$q(θ) = ∫ q(θ|w)\, q(w)\, dw$ with a Gaussian q(θ|w), whose parameters move, and a fixed q(w).

    q(θ) need not be an exponential family, but q(θ|w) is a minimal one, and the Fisher information of the joint
    q(θ, w) is as simple as a Gaussian's (Lin, Khan and Schmidt, 2019). Because $\log q(θ) = \log q(θ|w) + \log q(w) −
    \log q(w|θ)$, a step on $\barℓ + τ\log q$ is a Gaussian's step on the loss $\barℓ − τ\log q(w|θ)$: the first term is
    the Gaussian's own decay.

    w enters the step as E[w | θ] only, which has a closed form. So points are values of θ alone, and the step varies
    less from draw to draw than if w were drawn too.

    A subclass gives `mean`, `gaussian`, `score`, `hessian`, `grid_axes`, `grid`, and of `Family` `sample`, `log_prob`,
    `entropy`, `joint_entropy`, `to_step_terms`, `from_gaussian_terms`, `moved`, `decrement`.
    """

    core: eqx.AbstractVar[Gaussian]
    """The Gaussian's location and precision S."""
    structure: ClassVar[Structure] = FULL
    separate_rates: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (
        (
            lambda p: not (p.points.delta or p.points.chained),
            lambda p: (
                f"{p.points!r} see nothing of what makes a {p.name} differ from a Gaussian, its tails or its skew: "
                "use MonteCarlo() or Quadrature() points."
            ),
        ),
        (
            lambda p: p.kind.symmetric or not getattr(p.points, "antithetic", False),
            lambda p: f"Antithetic pairs mirror a symmetric q, and a {p.name} is not: use MonteCarlo().",
        ),
        (
            lambda p: not p.curvature.gaussian_identity,
            lambda p: f"{p.curvature!r}'s identity holds for a Gaussian, not for a {p.name}: use Hessian().",
        ),
    )
    required_choice: ClassVar[str]
    """The name of the constructor's argument that bare parameters and a precision do not determine."""

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        if cls.required_choice not in choices:
            raise ValueError(
                f"Bare parameters do not determine which {cls.__name__} to start from: pass a member, with its "
                f"{cls.required_choice}."
            )
        core = Gaussian.around(params, precision)
        make: Any = cls  # pyright cannot know the constructor of a subclass
        return make(core.mean, core.precision, **choices)

    # What an author gives, besides the methods of `Family`.

    @property
    @abstractmethod
    def mean(self) -> PyTree:
        """E_q θ, in the shape of θ."""

    @property
    @abstractmethod
    def gaussian(self) -> Gaussian:
        """The Gaussian with the mean and the covariance of q, for which regularizers are differentiated."""

    @abstractmethod
    def score(self, theta: PyTree) -> PyTree:
        """∇log q(θ) at one θ, in its shape; called by `latent_correction`."""

    @abstractmethod
    def hessian(self, theta: PyTree) -> Float[Array, "P P"]:
        """∇²log q(θ) at one θ, over the ravelled θ; called by `latent_correction`."""

    @property
    @abstractmethod
    def grid_axes(self) -> int:
        """The dimension of the quadrature grid, which then has order^grid_axes points."""

    @abstractmethod
    def grid(self, order: int) -> tuple[PyTree, Float[Array, " S"]]:
        """The points of a quadrature over q, called by `Quadrature`.

        Args:
            order: the number of nodes of each one-dimensional Gauss rule; the grid is their product.

        Returns:
            θ with a leading axis of S points, and their weights, which add up to 1.
        """

    # What follows from these.

    @property
    def precision(self) -> Float[Array, "P P"]:
        """S."""
        return self.core.precision

    @property
    def noise_size(self) -> int:
        """P."""
        return self.precision.shape[-1]

    def covariance(self) -> Float[Array, "P P"]:
        """The covariance of θ."""
        return self.gaussian.covariance()

    def variance(self) -> PyTree:
        """Its diagonal, in the shape of θ."""
        return self.gaussian.variance()

    def latent_correction(self, theta: PyTree) -> tuple[Array, PyTree, Any]:
        """−log q(w | θ) = log q(θ) − log q(θ, w), with the second term replaced by its average under q.

        That average is −H(q(θ, w)) for the value, 0 for the gradient and −S for the curvature. So no draw of w is
        needed, and where q is the posterior, ℓ̄ + log q is constant in θ and q stays where it is, whatever the points.
        """
        gradient, curvature = self.to_step_terms(self.score(theta), self.hessian(theta), theta, None)
        return self.log_prob(theta) + self.joint_entropy(), gradient, curvature + self.precision

    def added(self, first: Any, second: Any) -> Any:
        return self.structure.add(first, second)

    def gradient_like(self) -> PyTree:
        return self.to_step_terms(self.core.mean, jnp.zeros_like(self.precision), self.core.mean, None)[0]

    def with_scaled_precision(self, factor: Any) -> Self:
        return eqx.tree_at(lambda q: q.core, self, self.core.with_scaled_precision(factor))

    def inside(self) -> Bool[Array, ""]:
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(self)]
        return jnp.all(jnp.stack(finite)) & self.core.inside()

    def deviation(self, theta: PyTree) -> Float[Array, "... P"]:
        """θ less the location, as one vector, over any leading axes."""
        lead = jax.tree.leaves(theta)[0].ndim - jax.tree.leaves(self.core.mean)[0].ndim
        return ravel(theta, lead) - ravel(self.core.mean)


def unbatched_gaussian(name: str, mean: PyTree, precision: Any) -> Gaussian:
    """The `core` of a conditional family, which has no batch axes; `name` is the family's, for the error."""
    gaussian = Gaussian(mean, precision)
    if gaussian.batch_shape:
        raise ValueError(f"A {name} is one distribution, but this precision has batch axes: use jax.vmap for many.")
    return gaussian


def product_rule(*rules: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The product of D one-dimensional quadrature rules (nodes, weights): points (S, D) and weights (S,)."""
    nodes = np.meshgrid(*[rule[0] for rule in rules], indexing="ij")
    weights = np.meshgrid(*[rule[1] for rule in rules], indexing="ij")
    return np.stack([x.ravel() for x in nodes], axis=-1), np.prod([x.ravel() for x in weights], axis=0)
