"""One list each of families, recipes, points, curvatures and guards, over which the shared tests run.

What is listed is tested: families by families/test_properties.py, recipes by recipes/test_every_recipe.py, pieces by
points/test_every_points.py, curvature/test_every_curvature.py and steps/test_every_guard.py, all in this folder. Each
of them also fails where a public name is missing from its list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bayesrule as blr
from bayesrule import factors
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


def public_subclasses(kind: type) -> set[str]:
    """The names of the public classes of a kind, `kind` itself not among them."""
    public = {name: getattr(blr, name) for name in blr.__all__}
    return {name for name, value in public.items() if isinstance(value, type) and issubclass(value, kind)} - {
        kind.__name__
    }


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
        one = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[index]), batch)  # as NumPy's, which compiles nothing
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

# Families that have no λ and μ of their own (or take a kernel, a chain or layers): the file that tests each.
OTHER_FAMILIES = {
    "SecondMomentGaussian": "recipes/test_vadam.py",
    "LowRankGaussian": "families/gaussian/test_low_rank.py",
    "KroneckerGaussian": "families/gaussian/test_kronecker.py",
    "BlockDiagonalGaussian": "families/gaussian/test_block_diagonal.py",
    "GaussianChain": "families/sites/test_chain.py",
    "Mixture": "families/latent/test_mixture.py",
    "StudentT": "families/latent/test_latent.py",
    "SkewGaussian": "families/latent/test_latent.py",
    "SpikeSlab": "recipes/test_dropout.py",
    "Peak": "recipes/test_em.py",
    "PointMass": "recipes/test_em.py",  # another name of Peak
}


class Problem(NamedTuple):
    """What a rule is run on: an objective, where q begins, and data (None for a plain function)."""

    objective: Any
    start: Any
    data: Any


@dataclasses.dataclass(frozen=True)
class RecipeCase:
    """A recipe as a function of its rate, and a small problem of its kind.

    `rated` says whether the recipe takes a rate at all; where it does not, `make` ignores it.
    """

    make: Callable[[Any], blr.Rule]
    problem: Callable[[], Problem]
    rated: bool = True


X = jnp.array([[1.0, 0.3], [-0.5, 1.2], [0.8, -0.9], [0.1, 0.7], [-1.3, -0.2]])
LABELS = jnp.array([1.0, 0.0, 1.0, 1.0, 0.0])
TARGETS = jnp.array([0.5, -1.0, 2.0, 0.3, 1.1])


def _logistic_loss(output: jax.Array, label: jax.Array) -> jax.Array:
    return jnp.logaddexp(0.0, output) - label * output


def regression() -> Problem:
    """Two weights, five examples; N is not the number of rows, so that a forgotten N/M shows."""
    objective = blr.Objective(_logistic_loss, output=lambda w, x: x @ w, size=8, regularizer=1.0)
    return Problem(objective, jnp.array([0.3, -0.2]), (X, LABELS))


def _flat_regression() -> Problem:
    objective = blr.Objective(_logistic_loss, output=lambda w, x: x @ w, size=8)
    return Problem(objective, jnp.array([0.3, -0.2]), (X, LABELS))


def _binary_weights() -> Problem:
    objective = blr.Objective(lambda w, example: 0.5 * (example[1] - example[0] @ w) ** 2, size=8)
    return Problem(objective, jnp.array([0.3, -0.2]), (X, TARGETS))


def _units() -> Problem:
    objective = blr.Objective(lambda w, example: 0.5 * jnp.sum((example[1] - example[0] @ w) ** 2), size=8)
    return Problem(objective, jnp.array([[0.3], [-0.2]]), (X, TARGETS))


def _two_minima() -> Problem:
    return Problem(lambda x: jnp.sum((x**2 - 1) ** 2 + x / 10), None, None)


def _coin() -> Problem:
    toss = lambda mu, y: -(y * mu[0] + (1 - y) * mu[1])
    return Problem(blr.Objective(toss, size=5, prior=Beta(1.0, 1.0)), Beta(5.0, 5.0), LABELS)


def _experts() -> Problem:
    objective = blr.Objective(lambda expert, losses: losses[expert], size=5)
    return Problem(objective, Categorical(jnp.array([0.1, -0.2])), X)


def _mixture() -> Problem:
    """Two components of one dimension, with every row's choice as a local block."""
    blocks = {
        "weights": Dirichlet(jnp.array([2.0, 2.0])),
        "components": NormalGamma(jnp.array([-0.5, 1.0]), jnp.ones(2), jnp.full(2, 2.0), jnp.ones(2)),
    }
    terms = {f"prior of {name}": factors.prior(name, q) for name, q in blocks.items()}
    terms["z"] = factors.categorical("z", probabilities="weights")
    terms["y"] = factors.choice("z", factors.normal("y", joint="components"))
    model = blr.Model(blocks, terms, local={"z": Categorical(jnp.zeros(2))}, size=5)
    return Problem(model, None, {"y": TARGETS})


def _logistic_model() -> Problem:
    prior = Gaussian(jnp.zeros(2), jnp.eye(2))
    terms = {"prior": factors.prior("w", prior), "y": factors.bernoulli_logit("y", {"w": "x"})}
    return Problem(blr.Model({"w": prior}, terms, size=5), None, {"x": X, "y": LABELS})


BOX = jnp.array([-2.0]), jnp.array([2.0])

RECIPES: dict[str, RecipeCase] = {
    "gradient_descent": RecipeCase(blr.gradient_descent, regression),
    "newton": RecipeCase(blr.newton, regression),
    "von": RecipeCase(lambda rate: blr.von(rate, samples=2), regression),
    "multimodal": RecipeCase(lambda rate: blr.multimodal(rate, components=2, bounds=BOX, memory=4), _two_minima),
    "sgd": RecipeCase(blr.sgd, regression),
    "rmsprop": RecipeCase(blr.rmsprop, regression),
    "adam": RecipeCase(blr.adam, regression),
    "adamw": RecipeCase(blr.adamw, _flat_regression),
    "vadam": RecipeCase(blr.vadam, _flat_regression),
    "dropout": RecipeCase(lambda rate: blr.dropout(rate, 0.5), _units),
    "ogn": RecipeCase(blr.ogn, regression),
    "oggn": RecipeCase(blr.oggn, regression),
    "vogn": RecipeCase(blr.vogn, regression),
    "voggn": RecipeCase(blr.voggn, regression),
    "ivon": RecipeCase(blr.ivon, regression),
    "slang": RecipeCase(lambda rate: blr.slang(rate, rank=1), regression),
    "straight_through": RecipeCase(blr.straight_through, _binary_weights),
    "bayesbinn": RecipeCase(blr.bayesbinn, _binary_weights),
    "conjugate": RecipeCase(lambda rate: blr.conjugate(), _coin, rated=False),
    "laplace": RecipeCase(lambda rate: blr.laplace(), regression, rated=False),
    "em": RecipeCase(lambda rate: blr.em(rate=rate, order=["z", ("weights", "components")]), _mixture),
    "svi": RecipeCase(blr.svi, _mixture),
    "vmp": RecipeCase(blr.vmp, _mixture),
    "ncvmp": RecipeCase(blr.ncvmp, _logistic_model),
    "cvi": RecipeCase(blr.cvi, _logistic_model),
    "exponential_weights": RecipeCase(blr.exponential_weights, _experts),
}


@dataclasses.dataclass(frozen=True)
class PointsCase:
    """Points, a q for which they are made, and E_q of `function` as they should give it.

    Exactly where the points are not random, on average where they are.
    """

    points: Any
    q: Callable[[], Any]
    function: Callable[[Any], jax.Array]
    expected: Callable[[Any], jax.Array]


def _gaussian() -> Gaussian:
    return Gaussian(jnp.array([0.4, -0.6]), jnp.array([[3.0, 0.7], [0.7, 2.0]]))


def _quadratic(theta: jax.Array) -> jax.Array:
    return theta[0] - 2 * theta[0] * theta[1] + 3 * theta[1] ** 2


def _expected_quadratic(q: Gaussian) -> jax.Array:
    covariance = jnp.linalg.inv(q.precision)
    return _quadratic(q.mean) - 2 * covariance[0, 1] + 3 * covariance[1, 1]


def _signs() -> Bernoulli:
    return Bernoulli(jnp.array([0.3, -0.8]))


_PRODUCT = lambda theta: theta[0] * theta[1]
_ENTRIES = lambda theta: theta[0] + 2 * theta[1]

POINTS: dict[str, PointsCase] = {
    # The delta method is right where the function is linear.
    "Delta": PointsCase(blr.Delta(), _gaussian, _ENTRIES, lambda q: _ENTRIES(q.mean)),
    "MonteCarlo": PointsCase(blr.MonteCarlo(4), _gaussian, _quadratic, _expected_quadratic),
    "MonteCarlo, antithetic": PointsCase(
        blr.MonteCarlo(4, antithetic=True), _gaussian, _quadratic, _expected_quadratic
    ),
    "ShardSamples": PointsCase(blr.ShardSamples(4), _gaussian, _quadratic, _expected_quadratic),
    "MonteCarlo, standard generator": PointsCase(
        blr.MonteCarlo(4, generator="standard"), _gaussian, _quadratic, _expected_quadratic
    ),
    # Its points are mirrored, so the mean is exact; a quadratic function only nearly.
    "QuasiMonteCarlo": PointsCase(blr.QuasiMonteCarlo(64), _gaussian, _ENTRIES, lambda q: _ENTRIES(q.mean)),
    "Quadrature": PointsCase(blr.Quadrature(2), _gaussian, _quadratic, _expected_quadratic),
    "Enumeration": PointsCase(blr.Enumeration(), _signs, _PRODUCT, lambda q: _PRODUCT(q.mean)),
    # Without noise and at relaxation 1 the point is the mean of q.
    "Relaxed, no noise": PointsCase(blr.Relaxed(1.0, noise=False), _signs, _ENTRIES, lambda q: _ENTRIES(q.mean)),
    # Towards relaxation 0 the samples are signs with q's probabilities.
    "Relaxed": PointsCase(blr.Relaxed(1e-6, samples=4), _signs, _PRODUCT, lambda q: _PRODUCT(q.mean)),
    "Sign": PointsCase(blr.Sign(), _signs, _ENTRIES, lambda q: _ENTRIES(jnp.array([1.0, -1.0]))),
    # A unit is kept with probability ½: E θ = ½m.
    "Masks": PointsCase(
        blr.Masks(4),
        lambda: blr.dropout(0.1, 0.5).init(jnp.array([[0.4], [-0.6]]), _units().objective).q,
        lambda theta: _ENTRIES(theta[:, 0]),
        lambda q: 0.5 * _ENTRIES(jnp.array([0.4, -0.6])),
    ),
    "Each": PointsCase(
        blr.Each({"w": blr.MonteCarlo(4), "b": blr.Relaxed(1e-6, samples=4)}),
        lambda: Product({"w": _gaussian(), "b": _signs()}),
        lambda theta: _quadratic(theta["w"]) * theta["b"][0],
        lambda q: _expected_quadratic(q.blocks["w"]) * q.blocks["b"].mean[0],
    ),
}
POINTS_WITHOUT_POINTS = {"Exact"}  # the objective is a function of μ


@dataclasses.dataclass(frozen=True)
class CurvatureCase:
    """A curvature, a q that it serves, and the sure curvature whose expectation it estimates on any loss.

    `hessian` says that this expectation is the Hessian's; Gauss–Newton and squares of gradients are only so for the
    problems in tests/curvature.
    """

    curvature: Any
    q: Callable[[], Any]
    reference: Any
    hessian: bool


def _diagonal() -> DiagonalGaussian:
    return DiagonalGaussian(jnp.array([0.4, -0.6]), jnp.array([3.0, 2.0]))


CURVATURES: dict[str, CurvatureCase] = {
    "Gradient": CurvatureCase(
        blr.Gradient(), lambda: FixedGaussian(jnp.array([0.4, -0.6]), jnp.array([3.0, 2.0])), blr.Gradient(), False
    ),
    "SquaredGradient": CurvatureCase(blr.SquaredGradient(), _diagonal, blr.SquaredGradient(), False),
    "GaussNewton": CurvatureCase(blr.GaussNewton(), _gaussian, blr.GaussNewton(), False),
    # The outputs are linear in θ, where it is the Hessian of the data's loss.
    "GeneralizedGaussNewton": CurvatureCase(blr.GeneralizedGaussNewton(), _gaussian, blr.Hessian(), True),
    "Hessian": CurvatureCase(blr.Hessian(), _gaussian, blr.Hessian(), True),
    "HessianDiagonal": CurvatureCase(blr.HessianDiagonal(), _diagonal, blr.HessianDiagonal(), True),
    "Stein": CurvatureCase(blr.Stein(), _gaussian, blr.Hessian(), True),
    "Reparameterized": CurvatureCase(blr.Reparameterized(), _gaussian, blr.Hessian(), True),
    "Score": CurvatureCase(blr.Score(), _gaussian, blr.Hessian(), True),
}

GUARDS = {
    "NoGuard": blr.NoGuard(),
    "Boundary": blr.Boundary(),
    "Retraction": blr.Retraction(),
    "Backtracking": blr.Backtracking(20),
    "Backtracking, monotone": blr.Backtracking(20, monotone=True),
}
