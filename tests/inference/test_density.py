"""The programs that evaluate a density at many points: the numbers of JAX's own derivatives, however many points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from bayesrule.inference.advance import LANES, MOST_IN_LANES, advance
from bayesrule.inference.density import Density, average, compile_ahead, expand, log_densities

SIZE = 3


def bent(theta, scale):
    return jnp.sum(jnp.sin(theta["a"])) * theta["b"] - scale * jnp.exp(0.3 * theta["b"]) - jnp.sum(theta["a"] ** 4)


def half(theta, scale):
    return jnp.sum(jnp.log(theta["b"])) - scale * theta["b"] ** 2 - jnp.sum(theta["a"] ** 2)


def density_of(function, dtype=float):
    like = {"a": jnp.zeros(2, dtype), "b": jnp.zeros((), dtype)}
    return Density(function, (jnp.asarray(0.7, dtype),), like, lambda theta, scale: theta)


def reference(function, points):
    """−log p with derivatives at every point, by JAX's transformations alone."""
    negative = lambda x: -function({"a": x[:2], "b": x[2]}, 0.7)
    parts = negative, jax.grad(negative), jax.hessian(negative)
    return [np.asarray(jax.jit(jax.vmap(part))(jnp.asarray(points))) for part in parts]


# One point, a part of a block, a whole one and one more, and more points than one call goes through.
@pytest.mark.extended
@pytest.mark.parametrize("count", [1, 5, 64, 65, 1030])
def test_all_points_count_once(count):
    density = density_of(bent)
    assert density.capacity(density.rows) == 1024
    points = np.random.default_rng(count).normal(size=(count, SIZE))
    mean = average(density, points)
    found = expand(density, points)
    for ours, theirs in zip(found, reference(bent, points), strict=True):
        assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)
    for part, each in zip(mean, found, strict=True):
        assert_allclose(part, np.mean(each, axis=0), rtol=1e-11, atol=1e-11)
    assert_allclose(log_densities(density, points), -found.value, rtol=1e-12)


@pytest.mark.extended
def test_a_point_outside_of_the_support_is_alone_with_it():
    """Its value is infinite and its derivatives are zero, and it spoils an average, which is what no step may take."""
    density = density_of(half)
    points = np.array([[0.1, 0.2, 1.0], [0.1, 0.2, -1.0], [0.3, 0.2, 2.0]])
    found = expand(density, points)
    assert list(np.isfinite(found.value)) == [True, False, True]
    assert found.value[1] == np.inf
    assert not np.any(found.gradient[1])
    assert not np.any(found.hessian[1])
    for ours, theirs in zip(found, reference(half, points), strict=True):
        assert_allclose(ours[[0, 2]], theirs[[0, 2]], rtol=1e-12)
    assert list(np.isfinite(log_densities(density, points))) == [True, False, True]
    spoilt = average(density, points)
    assert spoilt.value == np.inf
    assert not np.any(spoilt.hessian)
    assert np.isfinite(average(density, points[[0, 2]]).value)


@pytest.mark.extended
def test_sums_in_float32_keep_their_digits():
    """Many blocks of one sign: without compensation the sum would lose a digit and more."""
    density = density_of(lambda theta, scale: -1000.1 - 1e-3 * jnp.sum(theta["a"] ** 2) - theta["b"] ** 2, jnp.float32)
    points = np.random.default_rng(0).normal(size=(1024, SIZE))
    exact = np.mean(1000.1 + 1e-3 * np.sum(points[:, :2] ** 2, axis=1) + points[:, 2] ** 2)
    assert_allclose(average(density, points).value, exact, rtol=3e-7)


@pytest.mark.parametrize("size", [4, MOST_IN_LANES + 1])
@pytest.mark.parametrize("count", [1, LANES + 1])
def test_a_whole_step_from_the_hessian_is_newtons(size, count):
    rng = np.random.default_rng(size)
    roots = rng.normal(size=(count, size, size))
    hessians = roots @ np.swapaxes(roots, 1, 2) + size * np.eye(size)
    means, gradients = rng.normal(size=(2, count, size))
    density = Density(lambda x: jnp.sum(x), (), jnp.zeros(size), lambda x: x)
    decrements, good, new, precisions = advance(density, 1.0, means, hessians, np.zeros(count), gradients, hessians)
    steps = np.linalg.solve(hessians, gradients[..., None])[..., 0]
    assert np.all(good)
    assert_allclose(new, means - steps, rtol=1e-10, atol=1e-12)
    assert_allclose(precisions, hessians, rtol=1e-12)
    assert_allclose(decrements, 0.5 * np.sum(gradients * steps, axis=1), rtol=1e-10)


def test_what_is_compiled_ahead_is_used():
    density = density_of(lambda theta, scale: -scale * jnp.sum(theta["a"] ** 2) - theta["b"] ** 2)
    wait = compile_ahead(density)
    assert wait is not None
    wait()
    compiled = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    found = expand(density, np.ones((2, SIZE)))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert_allclose(found.value, [2.4, 2.4])
    assert not compiled
    assert compile_ahead(density) is None


def test_an_error_while_compiling_ahead_waits_for_the_first_use():
    density = density_of(lambda theta, scale: theta["b"] @ theta["a"])
    assert compile_ahead(density) is None
    with pytest.raises((TypeError, ValueError), match="matmul"):
        expand(density, np.ones((1, SIZE)))
