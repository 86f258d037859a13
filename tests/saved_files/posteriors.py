"""A member of every family, and what else a file can name: the kernels of Gaussian processes, a state space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import bayesrule as blr
from bayesrule.families.shared_precision import SphericalNormalGamma, TiedNormalWishart
from bayesrule.models import kernels

PLACE = {"a": jnp.array([0.3, -0.2]), "b": jnp.array(1.5)}
MATRIX = jnp.array([[2.0, 0.3], [0.3, 1.0]])
WALK = blr.StateSpace(jnp.eye(1), 0.3 * jnp.eye(1), jnp.ones(1))
SITES = jnp.array([0.5, 0.0, -0.2]), jnp.array([-0.5, 0.0, -0.1])
SLAB = blr.FixedGaussian(jnp.array([[0.4], [-0.6]]), 2.0)


def two_gaussians() -> Any:
    return [blr.Gaussian(jnp.array([x, -x]), MATRIX) for x in (-1.0, 0.7)]


POSTERIORS: dict[str, Callable[[], Any]] = {
    "BandedGaussian": lambda: blr.BandedGaussian(jnp.sin(MATRIX), jnp.stack([MATRIX, 2 * MATRIX]), 0.3 * MATRIX[None]),
    "Bernoulli": lambda: blr.Bernoulli(PLACE),
    "Beta": lambda: blr.Beta(2.0, 3.5),
    "BlockDiagonalGaussian": lambda: blr.BlockDiagonalGaussian(MATRIX, jnp.stack([MATRIX, 2 * MATRIX])),
    "Categorical": lambda: blr.Categorical(jnp.array([0.5, 0.0, -0.3])),
    "CategoricalChain": lambda: blr.CategoricalChain([0.6, 0.4], [[0.8, 0.2], [0.3, 0.7]], jnp.sin(MATRIX)),
    "DiagonalGaussian": lambda: blr.DiagonalGaussian(PLACE, 3.0),
    "Dirichlet": lambda: blr.Dirichlet(jnp.array([2.0, 3.0, 0.5])),
    "FixedGaussian": lambda: blr.FixedGaussian(PLACE, 3.0),
    "Gamma": lambda: blr.Gamma(2.0, 3.0),
    "Gaussian": lambda: blr.Gaussian(PLACE, jnp.eye(3) + 0.2),
    "GaussianChain": lambda: blr.GaussianChain(WALK, 3, SITES),
    "GaussianProcess": lambda: blr.GaussianProcess(jnp.eye(3) + 0.5, jnp.array([0.1, 0.2, 0.3]), SITES),
    "KroneckerGaussian": lambda: blr.KroneckerGaussian(
        {"w": MATRIX}, 0.7, inputs={"w": MATRIX}, outputs={"w": 2 * MATRIX}
    ),
    "LowRankGaussian": lambda: blr.slang(0.1, rank=1, curvature=1.0).init(jnp.array([0.3, -0.2]), size=6).q,
    "Mixture": lambda: blr.Mixture([0.3, 0.7], two_gaussians()),
    "NormalGamma": lambda: blr.NormalGamma(jnp.array([-0.5, 1.0]), jnp.ones(2), jnp.full(2, 2.0), jnp.ones(2)),
    "NormalWishart": lambda: blr.NormalWishart(jnp.array([0.5, -0.2]), 2.0, 6.0, MATRIX),
    "PointMass": lambda: blr.PointMass(blr.Gamma(2.0, 3.0)),
    "Poisson": lambda: blr.Poisson(jnp.array([3.0, 1.0])),
    "Product": lambda: blr.Product({"w": blr.Gaussian(jnp.zeros(2)), "rate": blr.Gamma(2.0, 1.0)}),
    "SharedGaussian": lambda: blr.SharedGaussian(jnp.sin(MATRIX), MATRIX),
    "SkewGaussian": lambda: blr.SkewGaussian(jnp.array([0.5, 0.1]), MATRIX, jnp.array([0.3, -0.4])),
    "SpikeSlab": lambda: blr.SpikeSlab(SLAB, 0.7),
    "SpikeSlab, learnt": lambda: blr.SpikeSlab(SLAB, 0.7, learnt=True),
    "StudentT": lambda: blr.StudentT(jnp.array([0.5, 0.1]), MATRIX, 5.0),
    "Wishart": lambda: blr.Wishart(6.0, MATRIX),
    "StateSpace": lambda: WALK,
    "SphericalNormalGamma": lambda: SphericalNormalGamma(MATRIX, jnp.ones(2), jnp.full(2, 2.0), jnp.ones(2)),
    "TiedNormalWishart": lambda: TiedNormalWishart(MATRIX, jnp.ones(2), jnp.array(6.0), MATRIX),
    "kernels": lambda: (
        kernels.RBF(1.0, jnp.array([2.0, 3.0])) + 0.5 * kernels.Matern12(1.0, 2.0) * kernels.Periodic(1.0, 2.0, 3.0)
    ),
    "more kernels": lambda: [kernels.Matern32(1.0, 2.0), kernels.Matern52(1.0, 2.0), kernels.Linear()],
}
