"""The niching benchmark's functions against its published numbers, and their minimisers against a search of the box."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from bayesrule.models.landscapes import landscapes

LANDSCAPES = landscapes()
# Li, Engelbrecht and Epitropakis (2013): the number of global optima, their value (of the function to be maximised)
# with the error its printed digits allow, the niche radius and the budget.
PUBLISHED = {
    "equal maxima": (5, 1.0, 0, 0.01, 5e4),
    "uneven decreasing maxima": (1, 1.0, 1e-6, 0.01, 5e4),
    "Himmelblau": (4, 200.0, 0, 0.01, 5e4),
    "six-hump camel back": (2, 1.031628453489877, 1e-15, 0.5, 5e4),
    "Shubert 2-D": (18, 186.7309088310239, 1e-13, 0.5, 2e5),
    "Vincent 1-D": (6, 1.0, 0, 0.2, 5e4),
    "Vincent 2-D": (36, 1.0, 0, 0.2, 2e5),
    "modified Rastrigin": (12, -2.0, 0, 0.01, 2e5),
}
# Minimisers that others print, and how far their digits may be off.
KNOWN = {
    "Himmelblau": (1e-6, [[3.0, 2.0], [-2.805118, 3.131312], [-3.779310, -3.283186], [3.584428, -1.848126]]),
    "six-hump camel back": (1e-8, [[0.08984201, -0.71265640], [-0.08984201, 0.71265640]]),
    "Shubert 2-D": (1e-8, [[4.8580568801531943, -7.0835064061884561], [-7.083506406692, -7.708313735499]]),
}
each = pytest.mark.parametrize("landscape", LANDSCAPES, ids=lambda f: f.name)


def grid(landscape):
    """About 600,000 points that cover the box, and their values; (n, …, D) and (n, …)."""
    n = {1: 600_001, 2: 801}[landscape.low.size]
    axes = [np.linspace(low, high, n) for low, high in zip(landscape.low, landscape.high, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    flat = points.reshape(-1, landscape.low.size)
    return points, np.asarray(jax.jit(jax.vmap(landscape.function))(flat)).reshape(points.shape[:-1])


def derivatives(landscape, points):
    """The values, gradients and Hessians at the points."""
    f = landscape.function
    return map(np.asarray, jax.jit(jax.vmap(lambda x: (f(x), jax.grad(f)(x), jax.hessian(f)(x))))(points))


def seeds(landscape, points, accuracy):
    """The benchmark's own count: from the best point on, those not within the radius of an earlier kept one."""
    values = np.asarray(jax.vmap(landscape.function)(points))
    kept = []
    for i in np.argsort(values):
        if all(np.linalg.norm(points[i] - points[j]) > landscape.radius for j in kept):
            kept.append(i)
    return sum(abs(values[i] - landscape.value) <= accuracy for i in kept)


def test_published_numbers():
    assert [f.name for f in LANDSCAPES] == list(PUBLISHED)
    for f in LANDSCAPES:
        count, value, error, radius, budget = PUBLISHED[f.name]
        assert f.minima.shape == (count, f.low.size)
        assert f.minima.dtype == np.float64
        assert abs(f.value + value) <= error
        assert (f.radius, f.budget) == (radius, budget)


def test_published_minimisers():
    minima = {f.name: f.minima for f in LANDSCAPES}
    for name, (error, points) in KNOWN.items():
        distances = np.linalg.norm(np.array(points)[:, None] - minima[name], axis=-1)
        assert distances.min(axis=1).max() < error
        assert len(set(distances.argmin(axis=1))) == len(points)


@pytest.mark.extended
@each
def test_minima_are_stationary_and_curve_upwards(landscape):
    x = jnp.asarray(landscape.minima)
    assert np.all((landscape.low < x) & (x < landscape.high))
    values, gradients, hessians = derivatives(landscape, x)
    np.testing.assert_allclose(values, landscape.value, rtol=1e-14)
    assert np.all(np.linalg.eigvalsh(hessians) > 0.1)
    # Newton's step is what is left of the distance to the minimiser.
    steps = np.linalg.solve(hessians, gradients[..., None])
    np.testing.assert_allclose(steps, 0, atol=2e-14)


@pytest.mark.extended
@each
def test_no_other_point_of_the_box_is_as_good(landscape):
    """Newton's method from every local minimum of a fine grid comes to the listed minimisers and no better point."""
    points, values = grid(landscape)
    assert values.min() >= landscape.value - 1e-12
    starts = points[ndimage.minimum_filter(values, 3, mode="nearest") == values]

    def polished(x):
        newton = lambda _, x: x - jnp.linalg.solve(jax.hessian(landscape.function)(x), jax.grad(landscape.function)(x))
        return jax.lax.fori_loop(0, 8, newton, x)

    ends = np.asarray(jax.jit(jax.vmap(polished))(starts))
    best = ends[np.asarray(jax.vmap(landscape.function)(ends)) <= landscape.value + 1e-6]
    best = best[np.all((landscape.low <= best) & (best <= landscape.high), axis=1)]
    distances = np.linalg.norm(best[:, None] - landscape.minima, axis=-1)
    assert distances.min(axis=1).max() < 1e-10
    assert set(distances.argmin(axis=1)) == set(range(len(landscape.minima)))


@pytest.mark.extended
@each
def test_peak_ratio_counts_the_minima_found(landscape):
    minima = landscape.minima
    assert landscape.peak_ratio(minima) == 1
    assert landscape.peak_ratio(np.repeat(minima, 3, axis=0).reshape(-1, 3, landscape.low.size)) == 1
    assert landscape.peak_ratio(minima[1:]) == pytest.approx(1 - 1 / len(minima), abs=1e-15)
    assert landscape.peak_ratio(np.zeros((0, landscape.low.size))) == 0
    assert landscape.peak_ratio(np.full((1, landscape.low.size), np.nan)) == 0


@pytest.mark.sampled(
    "1e-05-equal maxima",
    "1e-05-uneven decreasing maxima",
    "1e-05-Shubert 2-D",
    "1e-05-Vincent 1-D",
    "1e-05-Vincent 2-D",
    "1e-05-modified Rastrigin",
)
@each
@pytest.mark.parametrize("accuracy", [1e-4, 1e-5])
def test_peak_ratio_is_the_benchmark_s_count(landscape, accuracy):
    """Around each minimum a few points, of which some are as accurate as is asked."""
    _, _, hessians = derivatives(landscape, landscape.minima)
    rng = np.random.default_rng(0)
    shape = (3, *landscape.minima.shape)
    scale = np.sqrt(2 * accuracy / np.linalg.eigvalsh(hessians)[:, :1])
    points = (landscape.minima + 1.5 * scale * rng.standard_normal(shape)).reshape(-1, landscape.low.size)
    for some in np.array_split(rng.permutation(points), 2):
        actual = seeds(landscape, some, accuracy)
        assert landscape.peak_ratio(some, accuracy) == pytest.approx(actual / len(landscape.minima), abs=1e-15)


def test_peak_ratio_wants_both_the_value_and_the_place():
    shubert = next(f for f in LANDSCAPES if f.name == "Shubert 2-D")
    outside = shubert.minima[-1:] + np.array([2 * np.pi, 0])  # as good, and in no niche of the box
    assert float(shubert.function(jnp.asarray(outside[0]))) == pytest.approx(shubert.value, rel=1e-13)
    assert shubert.peak_ratio(outside) == 0
    assert shubert.peak_ratio(shubert.minima + 0.01) == 0
    assert shubert.peak_ratio(shubert.minima + 0.01, accuracy=1.0) == 1


@pytest.mark.extended
def test_peak_ratio_is_float64_s_in_float32():
    with jax.enable_x64(False):
        assert all(f.peak_ratio(f.minima, accuracy=1e-11) == 1 for f in LANDSCAPES)


@pytest.mark.parametrize("x64", [False, True])
def test_functions_keep_float32(x64):
    with jax.enable_x64(x64):
        for f in LANDSCAPES:
            x = jax.ShapeDtypeStruct(f.low.shape, jnp.float32)
            assert jax.eval_shape(jax.value_and_grad(f.function), x)[0] == jax.ShapeDtypeStruct((), jnp.float32)


def test_points_of_another_dimension_are_refused():
    with pytest.raises(ValueError, match=r"Himmelblau takes points of 2 coordinates.*\(5,\)"):
        LANDSCAPES[2].peak_ratio(np.zeros(5))
