"""A Gaussian chain against the dense Gaussian that it is, in stretches side by side or one step after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule.families.sites import kalman
from bayesrule.steps.step import Step

STATES = 3


def system(kind, steps, rng):
    """Random state spaces, with a state that has no noise and one that starts without doubt."""
    F, Q, extra = 0.4 * rng.normal(size=(STATES, STATES)), np.diag([0.3, 0.0, 0.1]), {}
    if kind == "varying":
        F, Q = 0.4 * rng.normal(size=(steps - 1, STATES, STATES)), np.broadcast_to(Q, (steps - 1, STATES, STATES))
        extra = {"offset": rng.normal(size=(steps - 1, STATES))}
    H = rng.normal(size=(2, STATES) if kind == "vectors" else STATES)
    return blr.StateSpace(F, Q, H, rng.normal(size=STATES), np.diag([1.0, 2.0, 0.0]), **extra)


def sites(kind, steps, rng):
    """Sites on every output, of which the first takes information away."""
    if kind == "vectors":
        root = rng.normal(size=(steps, 2, 2))
        curve = root @ root.transpose(0, 2, 1)
        curve[0] -= 0.1 * np.eye(2)
        return rng.normal(size=(steps, 2)), -0.5 * curve
    curve = rng.uniform(0, 2, size=steps)
    curve[0] = -0.1
    return rng.normal(size=steps), -0.5 * curve


def dense(space, steps):
    """The prior's mean and covariance over all states."""
    at = lambda x, rank, t: np.asarray(x if x.ndim == rank else x[t])
    mean, cov = [np.asarray(space.mean)], np.zeros((steps, STATES, steps, STATES))
    cov[0, :, 0] = space.covariance
    for t in range(1, steps):
        F, Q = at(space.transition, 2, t - 1), at(space.noise, 2, t - 1)
        mean.append(F @ mean[-1] + at(space.offset, 1, t - 1))
        for s in range(t):
            cov[t, :, s] = F @ cov[t - 1, :, s]
            cov[s, :, t] = cov[t, :, s].T
        cov[t, :, t] = F @ cov[t - 1, :, t - 1] @ F.T + Q
    return np.concatenate(mean), cov.reshape(steps * STATES, -1)


def posterior(space, natural, steps):
    """Mean and covariance over all states given the sites, log|I + Kκ|, and log E exp ⟨λ, T⟩."""
    mean, K = dense(space, steps)
    H = np.asarray(space.emission).reshape(-1, STATES)
    width = len(H)
    curve = np.zeros((steps * width, steps * width))
    for t, block in enumerate(-2 * np.asarray(natural[1]).reshape(steps, width, width)):
        curve[t * width : (t + 1) * width, t * width : (t + 1) * width] = block
    outputs = np.kron(np.eye(steps), H)
    J, eta = outputs.T @ curve @ outputs, outputs.T @ np.asarray(natural[0]).reshape(-1)
    mixed = np.eye(len(K)) + K @ J
    V = np.linalg.solve(mixed, K)
    after = np.linalg.solve(mixed, mean + K @ eta)
    log_det = np.linalg.slogdet(mixed)[1]
    surprise = eta - J @ mean
    return after, V, log_det, eta @ mean - 0.5 * mean @ J @ mean + 0.5 * surprise @ V @ surprise - 0.5 * log_det


@pytest.mark.sampled("vectors-7-False")
@pytest.mark.parametrize(
    ("kind", "steps", "parallel"),
    [
        ("numbers", 1, True),
        ("numbers", 12, False),
        ("varying", 30, True),
        ("vectors", 30, True),
        ("vectors", 7, False),
    ],
)
def test_the_dense_answer(kind, steps, parallel):
    rng = np.random.default_rng(steps)
    space, natural = system(kind, steps, rng), sites(kind, steps, rng)
    mean, cov, log_det, partition = posterior(space, natural, steps)
    q = blr.GaussianChain(space, steps, natural, parallel=parallel)
    blocks = cov.reshape(steps, STATES, steps, STATES)
    own = np.stack([blocks[t, :, t] for t in range(steps)])
    assert_allclose(q.states()[0], mean.reshape(steps, STATES), atol=1e-12)
    assert_allclose(q.states()[1], own, atol=1e-12)
    assert_allclose(q.log_det, log_det, atol=1e-12)
    assert_allclose(q.log_partition(q.natural()), partition, atol=1e-11)
    assert_allclose(q.entropy(), partition - q.inner(q.natural(), q.expectation()), atol=1e-11)
    if steps > 1:
        assert_allclose(q.pairs(), [blocks[t + 1, :, t] for t in range(steps - 1)], atol=1e-12)
    # The filter at a step is the smoother without what follows.
    t = steps // 2
    first = [np.where((np.arange(steps) <= t).reshape((-1,) + (1,) * (x.ndim - 1)), x, 0.0) for x in natural]
    before = posterior(space, first, steps)
    actual = q.filtered()
    assert_allclose(actual.mean[t], before[0].reshape(steps, STATES)[t], atol=1e-12)
    assert_allclose(actual.covariance[t], before[1].reshape(steps, STATES, steps, STATES)[t, :, t], atol=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "parallel"), [("numbers", False), ("numbers", True)])
def test_the_gradient_of_the_log_partition_is_the_smoother(kind, parallel):
    rng = np.random.default_rng(1)
    q = blr.GaussianChain(system(kind, 20, rng), 20, sites(kind, 20, rng), parallel=parallel)
    slope = q._symmetric(jax.jit(jax.grad(q.log_partition))(q.natural()))
    for one, other in zip(slope, q.expectation(), strict=True):
        assert_allclose(one, other, atol=1e-11)


def test_samples():
    rng = np.random.default_rng(2)
    space, natural = system("vectors", 6, rng), sites("vectors", 6, rng)
    mean, cov, *_ = posterior(space, natural, 6)
    q = blr.GaussianChain(space, 6, natural)
    drawn = np.asarray(q.sample_states(jax.random.key(0), (20_000,))).reshape(20_000, -1)
    error = np.sqrt(np.diag(cov) / len(drawn))
    assert np.all(np.abs(drawn.mean(0) - mean) < 5 * error + 1e-6)
    spread = np.sqrt((np.outer(np.diag(cov), np.diag(cov)) + cov**2) / len(drawn))
    assert np.all(np.abs(np.cov(drawn.T) - cov) < 5 * spread + 1e-6)
    assert q.sample(jax.random.key(0), (2, 3)).shape == (2, 3, 6, 2)


def trend(dtype, wide):
    F = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0.9, 0.1], [0, 0, -0.1, 0.9]])
    Q, H = np.diag([0.1, 0.01, 0.2, 0.2]), np.array([1.0, 0, 1, 0])
    return blr.StateSpace(*(jnp.asarray(x, dtype) for x in (F, Q, H, np.zeros(4), wide * np.eye(4))))


@pytest.mark.extended
@pytest.mark.parametrize("wide", [10.0, 1e7])
def test_ten_thousand_steps(wide):
    """Both ways agree, in float32 too, and also after a start that is all but diffuse."""
    size = 10_000
    y = 0.1 * np.random.default_rng(0).normal(size=size).cumsum()

    def smoothed(dtype, parallel):
        values = jnp.asarray(y, dtype)[:, None]
        observed = kalman.OutputSites(values, jnp.ones_like(values), jnp.ones_like(values))
        actual = jax.jit(kalman.filter_segments, static_argnums=2)(trend(dtype, wide), observed, parallel)
        states = jax.jit(kalman.smooth_states, static_argnums=2)(trend(dtype, wide), actual, size)
        return states.mean, jnp.diagonal(states.covariance, axis1=1, axis2=2)

    exact = smoothed(jnp.float64, False)
    for dtype, parallel, tolerance in (
        (jnp.float64, True, 1e-8),
        (jnp.float32, False, 1e-3),
        (jnp.float32, True, 1e-3),
    ):
        mean, variance = smoothed(dtype, parallel)
        assert np.max(np.abs(mean - exact[0])) < tolerance * np.max(np.abs(exact[0]))
        assert np.max(np.abs(variance / exact[1] - 1)) < tolerance


@pytest.mark.extended
def test_many_series_at_once():
    rng = np.random.default_rng(3)
    space = system("numbers", 20, rng)
    first, second = rng.normal(size=(4, 20)), -rng.uniform(size=(4, 20))
    many = jax.vmap(lambda one, two: blr.GaussianChain(space, 20, (one, two)).mean)(first, second)
    one = blr.GaussianChain(space, 20, (first[2], second[2]))
    assert_allclose(many[2], one.mean, atol=1e-12)


@pytest.mark.extended
def test_outside():
    q = blr.GaussianChain(trend(float, 1.0), 80)
    assert q.inside()
    natural = jnp.zeros(80), jnp.zeros(80).at[40].set(10.0)
    assert not q.inside(natural)
    assert not q.with_natural(natural).inside()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transition": np.eye(3)}, "noise has the shape"),
        ({"noise": np.diag([1.0, -0.1])}, "noise is a covariance, and has the eigenvalue -0.1"),
        (
            {"covariance": np.array([[1.0, 0.5], [0.0, 1.0]])},
            "covariance is a covariance: it must be finite and symmetric",
        ),
        ({"noise": np.full((2, 2), np.nan)}, "noise is a covariance: it must be finite"),
        ({"transition": np.zeros((4, 2, 2)), "offset": np.zeros((3, 2))}, "T − 1 entries"),
    ],
)
def test_bad_state_spaces(change, message):
    good = {"transition": np.eye(2), "noise": np.eye(2), "emission": np.ones(2)}
    with pytest.raises(ValueError, match=message):
        blr.StateSpace(**good | change)


def test_bad_chains():
    with pytest.raises(ValueError, match="has a StateSpace as its prior"):
        blr.GaussianChain(np.eye(2), 3)
    with pytest.raises(ValueError, match="needs its number of steps"):
        blr.GaussianChain(trend(float, 1.0))
    with pytest.raises(ValueError, match="of shapes"):
        blr.GaussianChain(trend(float, 1.0), 5, (np.zeros(4), np.zeros(5)))


@pytest.mark.extended
def test_the_decrement_is_that_of_the_fisher_information():
    """½⟨d, Fd⟩ of a short natural gradient d, with F = ∇²A by differentiation of the smoother."""
    rng = np.random.default_rng(4)
    q = blr.GaussianChain(system("numbers", 6, rng), 6).with_natural(
        tuple(jnp.asarray(x) for x in sites("numbers", 6, rng))
    )
    gradient = tuple(1e-4 * jnp.asarray(rng.normal(size=6)) for _ in range(2))
    step = Step(gradient, None, 1.0, 1.0, 0.0)
    direction = q.direction(step)
    image = jax.jvp(lambda n: q.with_natural(n).expectation(), (q.natural(),), (direction,))[1]
    assert_allclose(q.decrement(step), 0.5 * q.inner(direction, image), rtol=1e-2)
