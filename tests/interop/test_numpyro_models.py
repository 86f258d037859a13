"""NumPyro models of every kind: the density that is inferred is NumPyro's own, with Jacobians by automatic derivatives.

The reference is `numpyro.infer.util.log_density` of the constrained values, plus the logarithm of the determinant of
their Jacobian, which JAX differentiates: no bijection's own Jacobian is used.
"""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

numpyro = pytest.importorskip("numpyro")

import numpyro.distributions as dist  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro import handlers  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro.contrib.control_flow import scan  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro.distributions import constraints, transforms  # noqa: E402  (skipped above where NumPyro is missing)
from numpyro.infer.reparam import (  # noqa: E402  (skipped above where NumPyro is missing)
    CircularReparam,
    LocScaleReparam,
    TransformReparam,
)
from numpyro.infer.util import log_density  # noqa: E402  (skipped above where NumPyro is missing)

from bayesrule.interop import numpyro as bridge  # noqa: E402  (skipped above where NumPyro is missing)
from bayesrule.interop.numpyro.sites import Outline, look, run  # noqa: E402  (skipped above where NumPyro is missing)

KEY = jax.random.key(0)
Y = jnp.asarray(np.random.default_rng(0).normal(1.0, 2.0, size=12))

# Models.


def simplex(y):
    shares = numpyro.sample("simplex", dist.Dirichlet(jnp.array([2.0, 3.0, 4.0])))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(shares @ jnp.arange(3.0), 1.0), obs=y)


def ordered(y):
    base = dist.Normal(jnp.zeros(3), 2.0).to_event(1)
    cuts = numpyro.sample("ordered", dist.TransformedDistribution(base, transforms.OrderedTransform()))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("grade", dist.OrderedLogistic(slope * y, cuts), obs=jnp.arange(len(y)) % 4)


def correlations(y):
    root = numpyro.sample("cholesky", dist.LKJCholesky(3, 2.0))
    matrix = numpyro.sample("matrix", dist.LKJ(2, 1.5))
    scales = numpyro.sample("scales", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
    mean = jnp.zeros(3) + matrix[0, 1]
    with numpyro.plate("rows", len(y) // 3):
        numpyro.sample("y", dist.MultivariateNormal(mean, scale_tril=scales[:, None] * root), obs=y.reshape(-1, 3))


def covariance(y):
    matrix = numpyro.sample("positive", dist.Wishart(5.0, jnp.eye(2)))
    with numpyro.plate("rows", len(y) // 2):
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=matrix), obs=y.reshape(-1, 2))


def intervals(y):
    low = numpyro.sample("low", dist.TruncatedNormal(0.0, 1.0, low=-1.0, high=3.0))
    share = numpyro.sample("share", dist.Beta(2.0, 3.0))
    angle = numpyro.sample("angle", dist.Uniform(-2.0, 5.0))
    pareto = numpyro.sample("above", dist.Pareto(1.5, 3.0))
    bounded = numpyro.sample("bounded", dist.TruncatedCauchy(0.0, 1.0, low=0.5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(low + share + angle, pareto + bounded), obs=y)


def circular(y):
    angle = numpyro.sample("angle", dist.VonMises(0.5, 3.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.VonMises(angle, 2.0), obs=jnp.arctan2(jnp.sin(y), jnp.cos(y)))


def dynamic_support(y):
    """Each site's support depends on the value of the one before."""
    top = numpyro.sample("top", dist.Gamma(3.0, 1.0))
    inside = numpyro.sample("inside", dist.Uniform(0.0, top))
    above = numpyro.sample("above", dist.TruncatedNormal(0.0, 2.0, low=inside))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(inside, above), obs=y)


def nested_plates(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    columns, rows = numpyro.plate("columns", 3, dim=-1), numpyro.plate("rows", 4, dim=-2)
    with columns:
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with rows:
        shift = numpyro.sample("shift", dist.Normal(mean, 1.0))
    with rows, columns:
        effect = numpyro.sample("effect", dist.StudentT(4.0, shift, scale))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y.reshape(4, 3))


@handlers.reparam(config={"shift": LocScaleReparam(centered=0.3), "rate": TransformReparam()})
def reparametrised(y):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    base = dist.Normal(0.0, 1.0)
    rate = numpyro.sample("rate", dist.TransformedDistribution(base, transforms.AffineTransform(2.0, scale)))
    with numpyro.plate("rows", len(y)):
        shift = numpyro.sample("shift", dist.Normal(rate, scale))
        numpyro.sample("y", dist.Normal(shift, 1.0), obs=y)


@handlers.reparam(config={"angle": CircularReparam()})
def on_the_circle(y):
    circular(y)


def scoped(y):
    with handlers.scope(prefix="a"):
        first = numpyro.sample("x", dist.Normal(0.0, 1.0))
    with handlers.scope(prefix="b"):
        second = numpyro.sample("x", dist.Exponential(1.0))
    with numpyro.plate("rows", len(y)), handlers.mask(mask=y > 0):
        numpyro.sample("y", dist.Normal(first, second), obs=y)
    numpyro.factor("extra", -(first**4))
    numpyro.deterministic("both", first + second)


def improper(y):
    """A flat prior over the reals and one over scales, which the likelihood makes proper."""
    mean = numpyro.sample("mean", dist.ImproperUniform(constraints.real, (), ()))
    scale = numpyro.sample("scale", dist.ImproperUniform(constraints.positive, (), ()))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def with_param(y):
    scale = numpyro.param("scale", 2.0, constraint=constraints.positive)
    mean = numpyro.sample("mean", dist.Normal(0.0, scale))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def zero_sum(y):
    effects = numpyro.sample("zero_sum", dist.ZeroSumNormal(1.5, event_shape=(4,)))
    with numpyro.plate("rows", 4):
        numpyro.sample("y", dist.Normal(effects, 1.0), obs=y[:4])


def random_walk(y):
    drift = numpyro.sample("drift", dist.Normal(0.0, 1.0))
    size = numpyro.sample("size", dist.HalfNormal(1.0))

    def step(level, value):
        level = numpyro.sample("level", dist.Normal(level + drift, size))
        width = numpyro.sample("width", dist.Gamma(3.0, 2.0))
        numpyro.sample("y", dist.Normal(level, width), obs=value)
        return level, level

    scan(step, jnp.zeros(()), y[:5])


def imputed(y):
    """Every fourth value is missing, and latent."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    missing = np.arange(len(y)) % 4 == 0
    with numpyro.plate("absent", int(missing.sum())):
        filled = numpyro.sample("filled", dist.Normal(mean, scale).mask(False))
    complete = y.at[np.flatnonzero(missing)].set(filled)
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, scale), obs=complete)


def options(x, *, degree, noise, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([degree]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(sum(w[k] * x**k for k in range(degree)), noise), obs=y)


lower = lambda matrix: matrix[jnp.tril_indices(matrix.shape[-1], -1)]
# The independent numbers of sites that have more numbers than dimensions.
COORDINATES = {
    "simplex": lambda value: value[..., :-1],
    "cholesky": lower,
    "matrix": lower,
    "positive": lambda matrix: matrix[jnp.tril_indices(matrix.shape[-1])],
}
MODELS = [
    (simplex, (Y,), {}),
    (ordered, (Y,), {}),
    (correlations, (Y,), {}),
    (covariance, (Y,), {}),
    (intervals, (Y,), {}),
    (circular, (Y,), {}),
    (dynamic_support, (Y,), {}),
    (nested_plates, (Y,), {}),
    (reparametrised, (Y,), {}),
    (on_the_circle, (Y,), {}),
    (scoped, (Y,), {}),
    (improper, (Y,), {}),
    (with_param, (Y,), {}),
    (zero_sum, (Y,), {}),
    (random_walk, (Y,), {}),
    (imputed, (Y,), {}),
    (options, (Y,), {"degree": 3, "noise": 0.5, "y": Y}),
]


@pytest.mark.sampled("--1", "scoped--", "improper--", "zero_sum--", "imputed--", "options--")
@pytest.mark.parametrize(("model", "args", "kwargs"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_density_is_numpyros_with_the_jacobian(model, args, kwargs):
    traced = bridge.Traced.of(model, args, kwargs)
    density = traced.usable_density()
    ravelled, unravel = jax.flatten_util.ravel_pytree(density.like)

    def coordinates(x):
        values = density.constrain(unravel(x), *density.arguments)
        parts = [COORDINATES.get(name, lambda value: value)(value) for name, value in sorted(values.items())]
        return jnp.concatenate([jnp.ravel(part) for part in parts]), values

    @jax.jit
    def both(x):
        (_, values), jacobian = coordinates(x), jax.jacfwd(lambda x: coordinates(x)[0])(x)
        reference, _ = log_density(handlers.seed(traced.fixed_model, 0), args, kwargs, values)
        # On the plane where numbers add up to zero lengths are those of the space around it.
        volume = 0.5 * jnp.linalg.slogdet(jacobian.T @ jacobian)[1]
        return density.function(unravel(x), *density.arguments), reference + volume

    for point in np.random.default_rng(1).normal(size=(3, len(ravelled))):
        ours, reference = both(jnp.asarray(point))
        assert np.isfinite(ours)
        assert_allclose(ours, reference, rtol=1e-8, atol=1e-8)


@pytest.mark.extended
@pytest.mark.parametrize("model", [simplex, random_walk], ids=lambda model: model.__name__)
def test_a_look_at_a_model_shows_what_a_run_does_and_compiles_nothing(model):
    compiled = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.clear_caches()
    seen = look(model, (Y,), {})
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert seen == Outline.of(run(model, (Y,), {}))


def test_a_model_that_looks_at_values_has_to_be_run():
    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(float(jnp.max(y))))
        numpyro.sample("y", dist.Normal(0.0, scale), obs=y)

    assert look(model, (Y,), {}) is None
    assert bridge.Traced.of(model, (Y,), {}).outline.types == {"scale": "sample", "y": "sample"}
