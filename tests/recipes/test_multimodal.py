"""Mixtures in the rule: one component is the plain rule, components far apart are Newton's method, and a search."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.families.start import Start
from bayesrule.models.landscapes import banana, funnel, himmelblau, landscapes, two_moons

PLUS = jnp.eye(2) + 0.3
BOX = (jnp.full(2, -6.0), jnp.full(2, 6.0))
MINIMA = jnp.array([[3.0, 2.0], [-2.805118, 3.131313], [-3.77931, -3.283186], [3.584428, -1.848127]])


def loss(theta):
    return jnp.sum(jnp.cosh(theta - 1)) + 0.3 * theta[0] * theta[1] + jnp.sum(theta**2)


def jitted(rule, objective):
    return jax.jit(lambda state, batch, key: rule.step(objective, state, batch, key))


X = jax.random.normal(jax.random.key(5), (20, 2))
DATA = (X, (X @ jnp.array([1.0, -2.0]) > 0).astype(float))
LOGISTIC = blr.Objective(
    lambda f, y: jnp.logaddexp(0, f) - y * f, output=lambda w, x: x @ w, size=20, regularizer=0.5, linear=False
)
SINGLE = {
    "delta": (blr.newton(0.7), loss, None),
    "draws": (blr.von(0.2, samples=6), loss, None),
    "quadrature": (blr.von(0.2).replace(points=blr.Quadrature(5)), loss, None),
    "stein": (blr.von(0.2).replace(points=blr.Quadrature(5), curvature=blr.Stein()), loss, None),
    "examples": (blr.von(0.1).replace(curvature=blr.GaussNewton()), LOGISTIC, DATA),
    "diagonal": (blr.vogn(0.1, decay=0.999, curvature=1.0), LOGISTIC, DATA),
    "fixed": (blr.gradient_descent(0.05).replace(points=blr.MonteCarlo(3)), loss, None),
}


@pytest.mark.extended
@pytest.mark.parametrize("case", SINGLE)
def test_one_component_is_the_plain_rule(case):
    rule, objective, batch = SINGLE[case]
    start = jnp.array([0.4, -0.3])
    state = rule.init(start, objective)
    mixed = rule.replace(family=blr.Mixture)
    stack = mixed.init(blr.Mixture([1.0], [state.q]), objective)
    plain, mixture = jitted(rule, objective), jitted(mixed, objective)
    for count in range(4):
        key = jax.random.key(count)
        state, info = plain(state, batch, key)
        stack, observed = mixture(stack, batch, key)
    for one, many in zip(jax.tree.leaves(state.q), jax.tree.leaves(stack.q.components), strict=True):
        np.testing.assert_allclose(many[0], one, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(observed.objective, info.objective, rtol=1e-13)


@pytest.mark.extended
def test_components_far_apart_take_newton_s_steps():
    """`eq:gaussmix_assumption`: where the others have no responsibility, ∇log q ≈ 0 and ∇²log q ≈ −S_k."""
    starts = MINIMA + jnp.array([[0.2, -0.1], [0.1, 0.2], [-0.2, 0.1], [0.1, -0.1]])
    q = blr.Mixture(jnp.ones(4), blr.Gaussian(starts, jnp.broadcast_to(40 * jnp.eye(2), (4, 2, 2))), learnt=False)
    slopes, hessians = jax.jit(lambda q: (jax.vmap(q.score)(starts), jax.vmap(q.hessian)(starts)))(q)
    np.testing.assert_allclose(slopes, 0.0, atol=1e-8)
    np.testing.assert_allclose(hessians, -np.asarray(q.components.precision), atol=1e-8)
    rule = blr.newton()
    mixture, newton = (
        jitted(rule.replace(family=blr.Mixture), himmelblau),
        jax.vmap(jitted(rule, himmelblau), (0, None, None)),
    )
    stack = rule.replace(family=blr.Mixture).init(q)
    alone = jax.jit(jax.vmap(lambda m: rule.init(blr.Gaussian(m, 40 * jnp.eye(2)))))(starts)
    for _ in range(4):
        stack, _ = mixture(stack, None, None)
        alone, _ = newton(alone, None, None)
        np.testing.assert_allclose(stack.q.components.mean, alone.q.mean, atol=1e-8)
        np.testing.assert_allclose(stack.q.components.precision, alone.q.precision, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(stack.q.components.mean, MINIMA, atol=1e-5)


@pytest.mark.extended
def test_a_target_that_is_a_mixture_is_found_with_its_weights():
    target = blr.Mixture([0.3, 0.7], [blr.Gaussian(jnp.full(1, -2.0), 4.0), blr.Gaussian(jnp.full(1, 2.0), 1.0)])
    q = blr.Mixture([1, 1], blr.Gaussian(jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1, 1))))
    rule = blr.von(0.3).replace(family=blr.Mixture, points=blr.Quadrature(40))
    result = blr.fit(rule, lambda t: -target.log_prob(t), q, steps=200)
    np.testing.assert_allclose(result.q.weights, [0.3, 0.7], atol=1e-6)
    np.testing.assert_allclose(result.q.components.mean[:, 0], [-2.0, 2.0], atol=1e-6)
    np.testing.assert_allclose(result.q.components.precision[:, 0, 0], [4.0, 1.0], atol=1e-5)
    assert abs(result.bound) < 1e-6  # the log of the target's normaliser


GRID = jnp.linspace(-12, 12, 601)
PLANE = jnp.stack(jnp.meshgrid(GRID, GRID), axis=-1).reshape(-1, 2)
CELL = (GRID[1] - GRID[0]) ** 2


@jax.jit
def on_the_plane(q, values):
    log_q = q.log_prob(PLANE)
    return jnp.sum(jnp.exp(log_q) * (-values - log_q)) * CELL


TARGETS = (banana, funnel, two_moons)
ANY = blr.Objective(lambda theta, which: jax.lax.switch(which, TARGETS, theta), size=1)  # compiled once for all three


@pytest.mark.extended
@pytest.mark.parametrize("count", range(3), ids=[target.__name__ for target in TARGETS])
def test_the_bound_rises_with_the_number_of_components(count):
    """The exact bound, on a grid: below the log of the normaliser, and closer to it with K = 1, 2, 5, 10.

    The best of three starts, since a mixture may settle on some of the hills only.
    """
    values = jax.jit(jax.vmap(TARGETS[count]))(PLANE)
    evidence = float(jax.nn.logsumexp(-values) + jnp.log(CELL))
    rule = blr.von(0.2).replace(family=blr.Mixture, points=blr.Quadrature(7))
    bounds = []
    for components in (1, 2, 5, 10):
        starts = jax.random.normal(jax.random.key(0), (3, components, 2))
        results = [blr.fit(rule, ANY, start, jnp.array([count]), steps=200) for start in starts]
        exact = [float(on_the_plane(result.q, values)) for result in results]
        np.testing.assert_allclose([result.trace["bound"][-1] for result in results], exact, atol=0.02)
        bounds.append(max(exact))
    assert np.all(np.diff([*bounds, evidence]) > 0), bounds


# The search.


def search(function, *, steps=60, seed=0, bounds=BOX, start=None, data=None, **choices):
    rule = blr.multimodal(0.8, bounds=bounds, **{"components": 8, "memory": 16} | choices)
    return blr.fit(rule, function, start, data, steps=steps, key=jax.random.key(seed))


def twins(t):
    return jnp.sum((t**2 - 1) ** 2 + t / 10)


EASY = landscapes()[:4]
LINE = (EASY[0].function, EASY[1].function, twins)
ON_THE_LINE = blr.Objective(lambda theta, which: jax.lax.switch(which, LINE, theta), size=1)  # compiled once
HILLS = (himmelblau, EASY[3].function)
SCALED = blr.Objective(lambda theta, e: e[0] * jax.lax.switch(e[1].astype(int), HILLS, theta), size=1)
SEARCHED = [
    (ON_THE_LINE, jnp.array([0])),
    (ON_THE_LINE, jnp.array([1])),
    (himmelblau, None),
    (SCALED, jnp.array([[1.0, 1.0]])),
]


LONGER = (0, 1, 3)  # of the cases, which have their own command


@pytest.mark.extended
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=one.name.replace(" ", "-"), marks=[pytest.mark.extended] if case in LONGER else [])
        for case, one in enumerate(EASY)
    ],
)
def test_all_global_minima_are_found(case):
    """Three seeds; `benchmarks/niching.py` runs fifty, and the harder landscapes."""
    landscape, (function, data) = EASY[case], SEARCHED[case]
    bounds = jnp.asarray(landscape.low), jnp.asarray(landscape.high)
    for seed in range(3):
        result = search(function, bounds=bounds, seed=seed, data=data)
        assert int(result.state.search.measures) * (bounds[0].size + 4) < landscape.budget
        actual = result.minima()
        positions = np.stack([minimum.position for minimum in actual])
        assert landscape.peak_ratio(positions) == 1
        distance = np.linalg.norm(positions[:, None] - landscape.minima[None], axis=2)
        assert np.max(np.min(distance, axis=0)) < 1e-6
        assert abs(sum(minimum.weight for minimum in actual) - 1) < 1e-12
        assert [m.value for m in actual] == sorted(m.value for m in actual)


@pytest.mark.extended
def test_minima_close_together_are_told_apart():
    """Two wells that are a two-thousandth of the box apart."""
    bounds = jnp.array([-2000.0]), jnp.array([2000.0])
    actual = search(ON_THE_LINE, bounds=bounds, data=jnp.array([2])).minima()
    assert [round(float(m.position[0]), 3) for m in actual] == [-1.012, 0.987]
    assert all(m.weight > 0.2 for m in actual)


@pytest.mark.extended
def test_a_search_is_the_same_in_other_units():
    """The temperature is a part of the loss's spread, so the loss's unit does not matter."""
    plain = search(himmelblau).minima()
    scaled = search(SCALED, data=jnp.array([[1e-6, 0.0]])).minima()
    assert len(scaled) == len(plain) == 4
    np.testing.assert_allclose(sorted(m.weight for m in scaled), sorted(m.weight for m in plain), atol=0.02)


@pytest.mark.extended
def test_what_a_minimum_is():
    """Value, Hessian and position are those of the loss there; each of Himmelblau's four comes once."""
    actual = search(himmelblau).minima()
    assert len(actual) == 4
    there = jax.jit(lambda t: (himmelblau(t), jax.hessian(himmelblau)(t)))
    for minimum in actual:
        value, hessian = there(jnp.asarray(minimum.position))
        np.testing.assert_allclose(minimum.value, value, atol=1e-10)
        np.testing.assert_allclose(minimum.hessian, hessian, rtol=1e-9)
        assert 0.1 < minimum.weight < 0.4  # four basins of about the same size


@pytest.mark.extended
def test_weights_are_the_basins_shares():
    """A double well whose hilltop lies at a quarter of the box: a quarter of the starts go left."""

    def wells(t):
        x = t["x"]
        return jnp.where(x < 0, (x + 0.5) ** 2 * 9, (x - 1.5) ** 2)  # both 2.25 at 0

    bounds = {"x": jnp.array(-1.0)}, {"x": jnp.array(3.0)}
    actual = search(wells, bounds=bounds, steps=100).minima()
    assert [round(float(m.position["x"]), 6) for m in sorted(actual, key=lambda m: m.position["x"])] == [-0.5, 1.5]
    left = next(m for m in actual if m.position["x"] < 0)
    assert abs(left.weight - 0.25) < 0.05


@pytest.mark.extended
def test_a_search_with_data_and_a_prior():
    """The regularizer counts: y = x² has two roots, and the prior N(1, …) makes one of them lower."""
    examples = jnp.array([0.9, 1.1, 1.0])
    prior = blr.DiagonalGaussian(jnp.array([1.0]), jnp.array([0.5]))
    objective = blr.Objective(lambda w, y: 5 * jnp.sum(w**2 - y) ** 2, size=3, prior=prior)
    rule = blr.multimodal(0.8, components=4, bounds=(jnp.array([-2.0]), jnp.array([2.0])))
    result = blr.fit(rule, objective, None, examples, steps=40, key=jax.random.key(0))
    actual = result.minima()
    whole = jax.jit(jax.value_and_grad(lambda w: jnp.sum(5 * (w[0] ** 2 - examples) ** 2) - prior.log_prob(w)))
    assert len(actual) == 2
    assert actual[0].position[0] > 0
    for minimum in actual:
        value, slope = whole(jnp.asarray(minimum.position))
        np.testing.assert_allclose(minimum.value, value, rtol=1e-12)
        np.testing.assert_allclose(slope, 0.0, atol=1e-9)


@pytest.mark.extended
def test_starts_may_be_given():
    starts = jnp.concatenate([MINIMA + 0.1, MINIMA - 0.1])
    precisions = jnp.broadcast_to(9 * jnp.eye(2), (8, 2, 2))
    mixture = blr.Mixture(jnp.ones(8), blr.Gaussian(starts, precisions), learnt=False)
    assert len(search(himmelblau, start=mixture).minima()) == 4
    assert blr.multimodal(0.8).init(jnp.array([[0, 1], [2, 3]])).q.components.mean.dtype == float
    state = blr.multimodal(0.8).init(starts)  # the box is theirs, and half as much again on either side
    width = jnp.max(starts, axis=0) - jnp.min(starts, axis=0)
    np.testing.assert_allclose(state.search.high - state.search.low, 2 * width)
    np.testing.assert_array_equal(state.q.components.mean, starts)


def half_a_loss(theta):
    return jnp.sum(theta - jnp.log(theta))


@pytest.mark.extended
def test_where_the_loss_is_not_a_number_a_search_goes_on():
    """log x has no value left of 0: starts there are given up, even if they are all there are."""
    bounds = jnp.array([-2.0]), jnp.array([3.0])
    for seed in range(4):
        actual = search(half_a_loss, bounds=bounds, components=1, seed=seed)
        assert actual.reason == "steps"
        assert [round(float(m.position[0]), 6) for m in actual.minima()] == [1.0]


@pytest.mark.extended
def test_where_there_is_no_number_at_all_a_search_ends():
    bounds = jnp.array([-2.0]), jnp.array([3.0])
    nowhere = search(lambda t: jnp.sum(jnp.log(-1 - t**2)), bounds=bounds, components=4, patience=10)
    assert nowhere.reason == "not finite"
    assert nowhere.steps == 9
    assert nowhere.minima() == []


@pytest.mark.extended
def test_without_a_search_a_bad_component_ends_the_fit():
    q = blr.Mixture([1, 1], blr.Gaussian(jnp.array([[-1.0], [2.0]]), jnp.ones((2, 1, 1))))
    result = blr.fit(blr.newton().replace(family=blr.Mixture), half_a_loss, q, steps=5)
    assert result.reason == "not finite"
    np.testing.assert_array_equal(result.q.components.mean, q.components.mean)


@pytest.mark.extended
def test_a_full_memory_keeps_the_lowest():
    landscape = landscapes()[1]  # uneven decreasing maxima: five minima, one of them global
    bounds = jnp.asarray(landscape.low), jnp.asarray(landscape.high)
    result = search(landscape.function, bounds=bounds, memory=2, components=2, steps=120)
    np.testing.assert_allclose(np.sort(result.state.search.value), [-1.0, -0.948], atol=2e-3)
    assert landscape.peak_ratio(np.stack([m.position for m in result.minima()])) == 1


@pytest.mark.extended
def test_a_search_resumes_and_is_saved(tmp_path):
    whole, half = search(himmelblau), search(himmelblau, steps=30)
    half.save(tmp_path / "half")
    loaded = blr.load(tmp_path / "half")
    assert [m.value for m in loaded.minima()] == [m.value for m in half.minima()]
    rule = blr.multimodal(0.8, bounds=BOX, components=8, memory=16)
    rest = blr.fit(rule, himmelblau, loaded, steps=30)
    for one, other in zip(jax.tree.leaves(whole.state), jax.tree.leaves(rest.state), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.extended
def test_collapsed_components_are_merged():
    """Two components at one place, not yet converged: one begins anew elsewhere, the other carries its mass."""
    starts = jnp.array([[3.3, 2.2], [3.3, 2.2], [-2.5, 3.0]])
    rule = blr.multimodal(0.1, bounds=BOX)
    state = rule.init(starts, himmelblau, jax.random.key(0))
    after, _ = jitted(rule, himmelblau)(state, None, None)
    assert after.search.masses.tolist() == [2.0, 1.0, 1.0]
    assert int(after.search.seeds) == 1
    assert jnp.linalg.norm(after.q.components.mean[1] - after.q.components.mean[0]) > 0.5
    assert jnp.linalg.norm(after.q.components.mean[0] - starts[0]) < 0.5


@pytest.mark.extended
def test_a_cooling_mixture_is_tempered_as_a_whole():
    """At the new temperature every component is narrower, those in log r_k too: the posterior there stays as it is."""
    q = blr.Mixture([0.4, 0.6], blr.Gaussian(jnp.array([[0.5, -1.0], [1.2, 0.3]]), jnp.stack([PLUS, 2 * PLUS])))
    cooling = blr.Steps(0.3, temperature=lambda count: jnp.where(count < 1, 1.0, 0.5), units="fraction")
    rule = blr.von().replace(family=blr.Mixture, points=blr.Quadrature(5), steps=cooling)
    cold = q.with_scaled_precision(2.0)
    state = dataclasses.replace(rule.init(q), count=jnp.asarray(1))
    after, _ = jitted(rule, lambda theta: -0.5 * cold.log_prob(theta))(state, None, None)
    np.testing.assert_allclose(after.q.weights, cold.weights, atol=1e-12)
    np.testing.assert_allclose(after.q.components.mean, cold.components.mean, atol=1e-12)
    np.testing.assert_allclose(after.q.components.precision, cold.components.precision, atol=1e-12)


@pytest.mark.extended
def test_a_checkpoint_of_a_search_is_to_go_on_from(tmp_path):
    rule = blr.multimodal(0.8, bounds=BOX, components=8, memory=16)
    blr.fit(rule, himmelblau, None, steps=30, key=jax.random.key(0), checkpoint=tmp_path / "point")
    point = blr.load(tmp_path / "point")
    with pytest.raises(ValueError, match="pass it to fit"):
        point.minima()
    assert len(blr.fit(rule, himmelblau, point, steps=30).minima()) == 4
    with pytest.raises(ValueError, match="made by a search"):
        blr.fit(blr.newton().replace(family=blr.Mixture), himmelblau, point, steps=1)


@pytest.mark.extended
def test_a_search_with_draws():
    points = blr.MonteCarlo(8, antithetic=True)
    rule = blr.multimodal(0.5, components=8, bounds=BOX, patience=20).replace(points=points)
    assert len(blr.fit(rule, himmelblau, None, steps=60, key=jax.random.key(1)).minima()) == 4


@pytest.mark.parametrize(
    ("choices", "start", "message"),
    [
        ({"bounds": None}, None, "bounds=\\(low, high\\), or the starts"),
        ({"bounds": None}, jnp.zeros((3, 2)), "do not span a box"),
        ({"bounds": (jnp.zeros(2), jnp.zeros(3))}, None, "two of the parameters' shape"),
        ({"bounds": (jnp.ones(2), jnp.zeros(2))}, None, "every low is below"),
        ({"bounds": (jnp.zeros(2), jnp.full(2, jnp.inf))}, None, "finite"),
        ({"components": 0}, None, "components= is a whole number above 0"),
        ({"components": 2.5}, None, "components= is a whole number above 0"),
        ({"bounds": 5.0}, None, "a pair"),
        ({"bounds": ({"a": 0.0}, {"b": 1.0})}, None, "{'a': \\(\\)} and {'b': \\(\\)}"),
        ({}, blr.Gaussian(jnp.zeros(2)), "moves a mixture"),
        ({}, jnp.zeros((4, 3)), "for a box of the shape \\(2,\\)"),
        ({}, jnp.zeros(2), "along a leading axis"),
        ({}, jnp.full((4, 2), jnp.nan), "not finite numbers"),
        ({"bounds": None}, {"a": jnp.zeros(2), "b": jnp.zeros(3)}, "along a leading axis"),
    ],
    ids=lambda value: None,
)
def test_a_search_that_cannot_begin(choices, start, message):
    with pytest.raises(ValueError, match=message):
        search(himmelblau, start=start, steps=1, **choices)


@pytest.mark.parametrize("family", [blr.Gaussian, blr.DiagonalGaussian])
def test_a_search_needs_a_mixture_with_full_precisions(family):
    rule, curvature = blr.multimodal(0.5, bounds=BOX), blr.Hessian()
    if family is blr.DiagonalGaussian:
        family, curvature = Start(blr.Mixture, component=family), blr.HessianDiagonal()
    with pytest.raises(ValueError, match="full precision"):
        rule.replace(family=family, curvature=curvature)


@pytest.mark.extended
def test_a_cold_mixture_is_narrow():
    """At the temperature τ, S_k = ∇²ℓ̄/τ at each minimum; and the hotter, the further two neighbours are apart."""

    both = lambda t: jnp.sum((t**2 - 1) ** 2)

    def run(temperature, start):
        steps = blr.Steps(0.5, temperature=temperature, units="fraction")
        rule = blr.newton().replace(family=blr.Mixture, steps=steps)
        return blr.fit(rule, both, blr.Mixture([1, 1], start), steps=60).q.components

    wells = blr.Gaussian(jnp.array([[-1.1], [0.9]]), jnp.full((2, 1, 1), 80.0))
    cold = run(0.01, wells)
    np.testing.assert_allclose(cold.mean[:, 0], [-1.0, 1.0], atol=1e-8)
    np.testing.assert_allclose(cold.precision[:, 0, 0], 800.0, rtol=1e-6)
    beside = blr.Gaussian(jnp.array([[0.95], [1.05]]), jnp.full((2, 1, 1), 80.0))
    gaps = [float(jnp.diff(run(temperature, beside).mean[:, 0])[0]) for temperature in (0.01, 0.05)]
    assert 0 < gaps[0] < gaps[1]


def test_one_minimum_is_not_many():
    result = blr.fit(blr.newton(), loss, jnp.zeros(2), steps=1)
    with pytest.raises(ValueError, match="multimodal"):
        result.minima()


def test_a_grid_over_theta_must_be_small():
    objective = blr.Objective(lambda f, y: (f - y) ** 2, output=lambda w, x: x @ w, size=20, linear=True)
    rule = blr.von(0.1).replace(family=blr.Mixture, points=blr.Quadrature(5), curvature=blr.GeneralizedGaussNewton())
    with pytest.raises(ValueError, match="evaluated over θ"):
        rule.init(jnp.zeros((2, 20)), objective)


def test_rules_are_equal_by_their_pieces():
    assert blr.multimodal(0.5, bounds=BOX) == blr.multimodal(0.5, bounds=BOX)
    assert blr.multimodal(0.5, bounds=BOX) != blr.multimodal(0.5, bounds=(BOX[0], 2 * BOX[1]))
    assert "search" in str(blr.multimodal(0.5, bounds=BOX))
