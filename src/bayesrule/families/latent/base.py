"""Minimal conditional families: θ is a Gaussian once a number w is known, and the rule moves q(θ, w) (section 3.2)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from ...numerics.trees import ravel
from ...steps.needs import Need
from ..base import Family
from ..gaussian.full import Gaussian
from ..gaussian.precision import FULL, Structure


class ConditionalFamily(Family):
    r"""$q(θ) = ∫ q(θ|w)\, q(w)\, dw$ with a Gaussian q(θ|w) whose parameters move and a q(w) that stays.

    q(θ) need not be an exponential family, but q(θ|w) is a minimal one, and the Fisher information of the joint
    q(θ, w) is as simple as a Gaussian's (Lin, Khan and Schmidt, 2019). With $\log q(θ) = \log q(θ|w) + \log q(w) −
    \log q(w|θ)$, a step on $\barℓ + τ\log q$ is a Gaussian's own, which decays by the first of these, on the loss
    $\barℓ − τ\log q(w|θ)$.

    Wherever w enters the step it does so as E[w | θ], which is known: so points are values of θ alone, and the step
    varies less from draw to draw than with w drawn too. `core` holds the Gaussian's location and precision S.
    """

    core: eqx.AbstractVar[Gaussian]
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
    asked: ClassVar[str]
    """What bare parameters and a precision leave open."""

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        if cls.asked not in choices:
            raise ValueError(
                f"Bare parameters do not say which {cls.__name__} to start from: pass a member, with its {cls.asked}."
            )
        core = Gaussian.around(params, precision)
        make: Any = cls  # its own fields are a subclass's matter
        return make(core.mean, core.precision, **choices)

    # What an author gives, besides what every family does.

    @abstractmethod
    def score(self, theta: PyTree) -> PyTree:
        """∇log q(θ)."""

    @abstractmethod
    def hessian(self, theta: PyTree) -> Float[Array, "P P"]:
        """∇²log q(θ)."""

    @property
    @abstractmethod
    def grid_axes(self) -> int:
        """The dimension of the grid: order^grid_axes points."""

    @abstractmethod
    def grid(self, order: int) -> tuple[PyTree, Float[Array, " S"]]:
        """Values of θ and their weights, the product of one-dimensional Gauss rules of this order."""

    # What follows.

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
        """−log q(w | θ) = log q(θ) − log q(θ, w), of which the second is put in by what it is on average.

        That is −H(q(θ, w)) for its value, no gradient, and −S for its curvature. So no draw of w is needed, and where
        q is the posterior, ℓ̄ + log q is the same at every θ and q stays, whatever the points.
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


def one_gaussian(name: str, mean: PyTree, precision: Any) -> Gaussian:
    """The Gaussian inside a conditional family."""
    gaussian = Gaussian(mean, precision)
    if gaussian.batch_shape:
        raise ValueError(f"A {name} is one distribution, and this precision has batch axes: use jax.vmap for many.")
    return gaussian


def tensor(*rules: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The product of one-dimensional rules: points (S, D) and weights (S,)."""
    nodes = np.meshgrid(*[rule[0] for rule in rules], indexing="ij")
    weights = np.meshgrid(*[rule[1] for rule in rules], indexing="ij")
    return np.stack([x.ravel() for x in nodes], axis=-1), np.prod([x.ravel() for x in weights], axis=0)
