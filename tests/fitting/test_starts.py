"""fit(starts=k): the right mode among several, by enumeration of the modes; and the record of all starts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq, minimize

import bayesrule as blr
from bayesrule.fitting import fit as fit_module
from bayesrule.fitting.starts import choose, dispersed

KEY = jax.random.key(2)


def two_modes(x):
    """Two wells of different depth in the first entry, a bowl in the second."""
    return 4 * (x[0] ** 2 - 1) ** 2 - 0.7 * x[0] + 0.5 * (x[1] - x[0]) ** 2


@pytest.mark.extended
def test_the_lower_mode_is_found_and_the_share_of_starts_reported():
    """Laplace's evidence of both modes by scipy; each start ends at one of the two."""
    function = lambda x: 4 * (x[0] ** 2 - 1) ** 2 - 0.7 * x[0] + 0.5 * (x[1] - x[0]) ** 2
    evidence = {}
    for sign in (-1, 1):
        x = minimize(function, [sign, sign], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14}).x
        hessian = np.array([[48 * x[0] ** 2 - 16 + 1, -1], [-1, 1]])
        evidence[sign] = -function(x) + np.log(2 * np.pi) - 0.5 * np.linalg.slogdet(hessian)[1]
    alone = blr.fit(blr.laplace(), two_modes, jnp.array([-1.0, 0.0]), steps=100, tolerance=1e-10)
    how = {"steps": 100, "tolerance": 1e-10, "key": KEY}
    result = blr.fit(blr.laplace(), two_modes, jnp.array([-1.0, 0.0]), starts=8, **how)
    assert alone.bound == pytest.approx(evidence[-1], abs=1e-7)
    assert result.bound == pytest.approx(evidence[1], abs=1e-7)
    starts = result.starts
    assert starts.bounds[0] == pytest.approx(alone.bound, abs=1e-9)
    ends = np.abs(starts.bounds[:, None] - [evidence[-1], evidence[1]]) < 1e-6
    assert np.all(ends.sum(axis=1) == 1)
    assert (starts.agree, starts.best) == (ends[:, 1].sum(), int(np.argmax(starts.bounds)))
    assert 1 < starts.agree < 8
    assert f"{starts.agree} of 8 starts agree" in repr(result)
    assert f"{starts.agree} of 8 starts ended within 0.1 nats of the best bound" in str(starts)
    assert "the start that was given ended at" in str(starts)


def test_one_after_another_where_memory_is_short(monkeypatch, tmp_path):
    how = {"steps": 100, "tolerance": 1e-10, "key": KEY, "starts": 8}
    together = blr.fit(blr.laplace(), two_modes, jnp.array([-1.0, 0.0]), **how)
    monkeypatch.setattr(fit_module, "fits_in_memory", lambda *_: False)
    in_turn = blr.fit(blr.laplace(), two_modes, jnp.array([-1.0, 0.0]), **how)
    np.testing.assert_allclose(in_turn.starts.bounds, together.starts.bounds, rtol=1e-9)
    np.testing.assert_allclose(in_turn.q.mean, together.q.mean, rtol=1e-6)
    assert in_turn.starts.reasons == together.starts.reasons
    in_turn.save(tmp_path / "fit.npz")
    loaded = blr.load(tmp_path / "fit.npz").starts
    np.testing.assert_array_equal(loaded.bounds, in_turn.starts.bounds)
    assert loaded[1:] == in_turn.starts[1:]


@pytest.mark.extended
def test_mini_batches_are_compared_by_their_last_epoch():
    x = jnp.asarray(np.random.default_rng(0).normal(size=40))
    objective = blr.Objective(lambda w, e: (w**2 - 1) ** 2 - 0.3 * w + 0.01 * e, size=40)
    rule = blr.newton(0.3)
    result = blr.fit(rule, objective, jnp.array(-1.0), x, steps=100, batch_size=8, key=KEY, starts=6)
    ends = -result.starts.bounds / 40
    assert float(result.q.mean) > 0
    assert np.all((ends > -0.32) & (ends < 0.36))
    assert result.starts.bounds[result.starts.best] > result.starts.bounds[0] + 10


def test_the_best_is_chosen_among_those_that_converged():
    reasons = [blr.Reason.STEPS, blr.Reason.CONVERGED, blr.Reason.CONVERGED, blr.Reason.NOT_FINITE]
    record = choose(np.array([5.0, 1.0, 1.05, np.nan]), reasons)
    assert (record.best, record.agree) == (2, 2)
    assert "1 could not be followed to an end" in str(record)
    record = choose(np.array([5.0, 1.0, np.nan]), [blr.Reason.STEPS, blr.Reason.STEPS, blr.Reason.STEPS])
    assert (record.best, record.agree) == (0, 1)
    assert "No other start confirms it" in str(record)


@pytest.mark.extended
def test_starts_are_spread_at_the_scale_of_the_first():
    """Means of Gaussians have q's own covariance; other families keep half of what they know."""
    keys = jax.random.split(KEY, 2000)
    q = blr.Gaussian(jnp.array([1.0, -1.0]), jnp.array([[2.0, 0.5], [0.5, 1.0]]))
    means = jax.vmap(lambda key: dispersed(q, key).mean)(keys)
    np.testing.assert_allclose(np.cov(means.T), np.linalg.inv(q.precision), atol=0.12)  # 3 standard errors
    far = jax.vmap(lambda key: dispersed(q, key, 4.0).mean)(keys)
    np.testing.assert_allclose(far - q.mean, 4 * (means - q.mean), rtol=1e-6)
    gamma = blr.Gamma(3.0, 2.0)
    drawn = jax.vmap(lambda key: dispersed(gamma, key).expectation())(keys)
    np.testing.assert_allclose([x.mean() for x in drawn], gamma.expectation(), atol=0.03)
    np.testing.assert_allclose(drawn[1].std(), 0.5 * np.sqrt(3) / 2, rtol=0.1)
    mixture = blr.Mixture(jnp.array([0.5, 0.5]), blr.Gaussian(jnp.array([[-9.0], [9.0]]), jnp.ones((2, 1, 1))))
    places = jax.vmap(lambda key: dispersed(mixture, key).components.mean)(keys[:50])
    assert 0.3 < np.mean(np.abs(places - 9) < 4) < 0.7
    sharp = blr.Dirichlet(100 * jnp.eye(3) + 1)  # Three members far apart, each of them narrow.
    exchanged = dispersed(sharp, KEY, 4.0).concentration
    assert np.max(exchanged / exchanged.sum(axis=1, keepdims=True)) < 0.9
    process = blr.GaussianProcess(jnp.eye(3) + 1)
    product = blr.Product({"f": process, "p": blr.Peak(blr.Dirichlet(jnp.full(3, 2.0)))})
    other = dispersed(product, KEY)
    assert np.all(np.abs(other["f"].mean) > 1e-3)
    assert isinstance(other["p"], blr.Peak)
    assert not np.allclose(other["p"].of.concentration, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": None}, "pass key="),
        ({"checkpoint": "fit.npz"}, "checkpoint= follows one fit"),
        ({"progress": print}, "progress= with a function follows one fit"),
        ({"starts": 0}, "starts= .* above 0"),
    ],
)
def test_what_several_starts_cannot_be_combined_with(arguments, message):
    with pytest.raises(ValueError, match=message):
        blr.fit(blr.newton(), two_modes, jnp.zeros(2), **({"steps": 2, "starts": 3, "key": KEY} | arguments))


def test_a_search_and_a_result_are_no_starts():
    result = blr.fit(blr.newton(), two_modes, jnp.ones(2), steps=1)
    with pytest.raises(ValueError, match=r"pass result\.q as the start"):
        blr.fit(blr.newton(), two_modes, result, steps=1, starts=2, key=KEY)
    box = (jnp.full(2, -2.0), jnp.full(2, 2.0))
    with pytest.raises(ValueError, match="restarts its components by itself"):
        blr.fit(blr.multimodal(0.1, components=2, bounds=box), two_modes, None, steps=1, starts=2, key=KEY)


@pytest.mark.extended
def test_every_start_is_fitted_as_it_would_be_alone():
    """From a prior of sd 30 a count of 0 needs another start and acceleration, beside others as well as alone.

    With a = v₀ E e^f the optimum has m = −a and 1/v = (1 + a)/v₀, where log(a/v₀) = m + v/2.
    """
    v0 = 30.0**2
    gap = lambda log_a: log_a - np.log(v0) + np.exp(log_a) - 0.5 * v0 / (1 + np.exp(log_a))
    a = np.exp(brentq(gap, -30, 30))
    prior = blr.Gaussian(jnp.zeros(1), jnp.eye(1) / v0)
    terms = {"prior": blr.factors.prior("w", prior), "y": blr.factors.poisson_exp("y", {"w": "x"})}
    model, data = blr.Model({"w": prior}, terms, size=1), {"x": jnp.ones((1, 1)), "y": jnp.zeros(1)}
    result = blr.fit(blr.cvi(), model, None, data, steps=400, tolerance=1e-6, starts=3, key=KEY)
    assert result.reason == "converged"
    assert float(result.q["w"].mean[0]) == pytest.approx(-a, abs=2e-3 * np.sqrt(v0 / (1 + a)))
    assert result.starts.agree == 3
    assert set(result.starts.reasons) == {"converged"}
