"""Examples of every family, over which the shared tests run: a family is tested by being listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bayesrule.families import (
    BandedGaussian,
    Bernoulli,
    Beta,
    Categorical,
    CategoricalChain,
    DiagonalGaussian,
    Dirichlet,
    ExponentialFamily,
    FixedGaussian,
    Gamma,
    Gaussian,
    GaussianProcess,
    NormalGamma,
    NormalWishart,
    Poisson,
    Product,
    SharedGaussian,
    Wishart,
)


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """Three members along a leading axis; `whole` families have no batch axes and take them by vmap.

    A `single` one has no use for leading axes at all: its arrays have fixed numbers of them.
    """

    batched: Callable[[], ExponentialFamily]
    whole: bool = False
    single: bool = False

    def member(self, index: int = 0) -> ExponentialFamily:
        batch = self.batched()
        one = jax.tree.map(lambda x: x[index], batch)
        return type(one)(one.mean, one.precision) if hasattr(one, "batch_ndim") else one


def _matrices() -> jax.Array:
    rows = jnp.array([[1.0, 0.0, 0.0], [0.4, 0.9, 0.0], [-0.3, 0.5, 1.2]])
    factors = jnp.stack([rows, rows + 0.2 * jnp.eye(3), 1.5 * rows])
    return factors @ jnp.swapaxes(factors, -1, -2)


def _weights() -> dict[str, jax.Array]:
    return {
        "bias": jnp.array([0.3, -0.2, 1.0]),
        "slope": jnp.array([[0.5, -1.0], [0.2, -0.7], [1.4, 0.0]]),
    }


def _precisions() -> dict[str, jax.Array]:
    return {"bias": jnp.array([2.0, 1.5, 0.4]), "slope": jnp.array([[1.0, 3.0], [1.2, 2.5], [0.7, 5.0]])}


def _rows() -> jax.Array:
    return jnp.sin(jnp.arange(24.0)).reshape(3, 2, 4)[..., :3]


def _sites() -> tuple[jax.Array, jax.Array]:
    return jnp.cos(jnp.arange(9.0)).reshape(3, 3), -0.1 * jnp.arange(-1.0, 8.0).reshape(3, 3)


FAMILIES: dict[str, FamilyCase] = {
    "FixedGaussian": FamilyCase(lambda: FixedGaussian(_weights(), _precisions(), batch_ndim=1)),
    "DiagonalGaussian": FamilyCase(lambda: DiagonalGaussian(_weights(), _precisions(), batch_ndim=1)),
    "Gaussian": FamilyCase(lambda: Gaussian(_weights(), _matrices())),
    "SharedGaussian": FamilyCase(lambda: SharedGaussian(_rows(), _matrices())),
    "GaussianProcess": FamilyCase(
        lambda: jax.vmap(lambda sites: GaussianProcess(_matrices()[0], _rows()[0, 0], sites))(_sites()),
        whole=True,
        single=True,
    ),
    "Bernoulli": FamilyCase(lambda: Bernoulli(_weights()), whole=True),
    "Categorical": FamilyCase(
        lambda: Categorical(jnp.array([[0.1, 1.0, -0.5, 0.3], [0.0, 0.5, 0.1, -0.4], [2.0, 0.0, 1.0, 3.0]]))
    ),
    "BandedGaussian": FamilyCase(
        lambda: BandedGaussian(
            _rows(),
            _matrices()[:, None] + jnp.array([0.5, 1.0])[:, None, None] * jnp.eye(3),
            0.3 * _matrices()[:, None, ::-1],
        )
    ),
    "CategoricalChain": FamilyCase(
        lambda: CategoricalChain(
            jnp.array([0.5, 0.2, 0.3]),
            jnp.array([[0.6, 0.3, 0.1], [0.1, 0.7, 0.2], [0.4, 0.4, 0.2]]),
            jnp.sin(jnp.arange(27.0)).reshape(3, 3, 3),
        )
    ),
    "Poisson": FamilyCase(lambda: Poisson(jnp.array([3.0, 4.5, 0.2]))),
    "Dirichlet": FamilyCase(lambda: Dirichlet(jnp.array([[1.5, 2.0, 4.0], [1.0, 2.5, 3.0], [0.6, 0.8, 9.0]]))),
    "Beta": FamilyCase(lambda: Beta(jnp.array([2.0, 2.5, 0.7]), jnp.array([3.0, 2.0, 6.0]))),
    "Gamma": FamilyCase(lambda: Gamma(jnp.array([2.5, 3.5, 0.7]), jnp.array([1.5, 2.0, 0.3]))),
    "NormalGamma": FamilyCase(
        lambda: NormalGamma(
            jnp.array([0.5, 0.3, -2.0]),
            jnp.array([2.0, 3.0, 0.5]),
            jnp.array([3.0, 2.5, 0.8]),
            jnp.array([1.5, 2.0, 4.0]),
        )
    ),
    "Wishart": FamilyCase(lambda: Wishart(jnp.array([6.0, 7.0, 3.5]), 0.2 * _matrices())),
    "NormalWishart": FamilyCase(
        lambda: NormalWishart(
            jnp.array([[0.5, -0.2, 0.1], [0.3, 0.0, 0.2], [-1.0, 2.0, 0.0]]),
            jnp.array([2.0, 3.0, 0.5]),
            jnp.array([6.0, 7.0, 4.5]),
            0.2 * _matrices(),
        )
    ),
    "Product": FamilyCase(
        lambda: Product(
            {
                "class": Categorical(jnp.array([[0.5, 0.0, -0.3], [0.2, 0.1, 0.0], [0.0, 1.0, 2.0]])),
                "counts": Poisson(jnp.array([[3.0, 1.0], [2.0, 0.5], [4.0, 2.0]])),
                "weights": Gaussian(_weights(), _matrices()),
            }
        ),
        whole=True,
    ),
}
