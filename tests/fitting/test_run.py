"""blr.run: the steps of `fit` as a pure function, under every transformation; and what `fit` says inside a trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import bayesrule as blr

RANDOM = np.random.default_rng(0)
X, Y = jnp.asarray(RANDOM.normal(size=(30, 3))), jnp.asarray((RANDOM.random(30) < 0.5).astype(float))
TRAINED = X[:20], Y[:20]


def logistic(output, y):
    return jnp.logaddexp(0.0, output) - y * output


def product(w, x):
    return x @ w


def build(prior):
    return blr.Objective(logistic, output=product, linear=True, size=20, regularizer=prior)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("rule", "how"),
    [
        (blr.newton(), {"tolerance": 1e-9}),
        (blr.vogn(0.05), {"batch_size": 6, "key": jax.random.key(3)}),
    ],
)
def test_the_steps_are_those_of_fit(rule, how):
    fitted = blr.run(rule, build(1.0), jnp.zeros(3), TRAINED, steps=12, **how)
    result = blr.fit(rule, build(1.0), jnp.zeros(3), TRAINED, steps=12, **how)
    assert (fitted.reason, int(fitted.state.count)) == (result.reason, result.steps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), fitted.q, result.q)
    for name, values in result.trace.items():
        np.testing.assert_allclose(fitted.trace[name][: len(values)], values, rtol=1e-6, atol=1e-18)
    onwards = blr.run(rule, build(1.0), fitted.state, TRAINED, steps=2, **how)
    assert int(onwards.state.count) == result.steps + (1 if fitted.reason == "converged" else 2)


def held_out_loss(log_prior, start, fraction=1.0):
    """The loss of the last 10 rows at the posterior mean, and its width, after 20 Newton steps on the first 20."""
    data = blr.Weighted(TRAINED, fraction * jnp.ones(20))
    q = blr.run(blr.newton(), build(jnp.exp(log_prior)), start, data, steps=20).q
    return jnp.sum(jax.vmap(logistic)(X[20:] @ q.mean, Y[20:])) + jnp.trace(q.covariance())


def independent_loss(log_prior):
    """The same by scipy."""
    x, y, prior = np.asarray(X), np.asarray(Y), np.exp(log_prior)
    signed = lambda w: np.sum(np.logaddexp(0, x[:20] @ w) - y[:20] * (x[:20] @ w)) + 0.5 * prior * w @ w

    def derivatives(w):
        p = 1 / (1 + np.exp(-x[:20] @ w))
        return x[:20].T @ (p - y[:20]) + prior * w, (x[:20].T * (p * (1 - p))) @ x[:20] + prior * np.eye(3)

    slope, hessian = (lambda w: derivatives(w)[0]), (lambda w: derivatives(w)[1])
    w = minimize(signed, np.zeros(3), jac=slope, hess=hessian, method="trust-exact", options={"gtol": 1e-13}).x
    return np.sum(np.logaddexp(0, x[20:] @ w) - y[20:] * (x[20:] @ w)) + np.trace(np.linalg.inv(hessian(w)))


@pytest.mark.extended
def test_hyper_gradients_through_twenty_newton_steps():
    logs = jnp.array([-2.0, 0.3])
    start = jnp.full(3, 3.0)
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(held_out_loss), in_axes=(0, None)))(logs, start)
    np.testing.assert_allclose(values, [independent_loss(log) for log in np.asarray(logs)], rtol=1e-7)
    differences = [(independent_loss(log + 1e-4) - independent_loss(log - 1e-4)) / 2e-4 for log in np.asarray(logs)]
    np.testing.assert_allclose(slopes, differences, rtol=1e-5)


@pytest.mark.extended
def test_reverse_mode_through_repeated_local_steps():
    """A sweep repeats the local steps of a mixture until they converge, a loop of unknown length."""
    y = jnp.asarray(np.r_[RANDOM.normal(-2, 1, 8), RANDOM.normal(2, 1, 8)])

    def bound(log_spread):
        prior = blr.DiagonalGaussian(jnp.zeros(2), jnp.exp(-log_spread) * jnp.ones(2))
        expected = lambda z, m, y: jnp.sum(
            jnp.concatenate([z, 1 - jnp.sum(z, axis=-1, keepdims=True)], axis=-1)
            * -0.5
            * (y[:, None] ** 2 - 2 * y[:, None] * m[0] + m[1]),
            axis=-1,
        )
        model = blr.Model(
            {"m": blr.DiagonalGaussian(jnp.array([-1.0, 1.0]), jnp.ones(2))},
            {"prior": blr.factors.prior("m", prior), "y": blr.Factor(expected, "z", "m", data="y")},
            local={"z": blr.Categorical(jnp.zeros(2))},
        )
        rule = blr.vmp().replace(steps=blr.Steps(1.0, sweep=blr.Sweep(local=4, tolerance=1e-3)))
        return blr.run(rule, model, None, {"y": y}, steps=3).trace["bound"][-1]

    both = jax.jit(jax.value_and_grad(bound))
    difference = (both(0.5 + 1e-5)[0] - both(0.5 - 1e-5)[0]) / 2e-5
    np.testing.assert_allclose(both(0.5)[1], difference, rtol=1e-6)


@pytest.mark.extended
def test_many_data_sets_side_by_side():
    """vmap over data and priors gives what single runs give, each with its own end."""
    sets = jnp.stack([Y[:20], 1 - Y[:20], jnp.roll(Y[:20], 3)])
    one = lambda y, prior: blr.run(blr.newton(), build(prior), jnp.zeros(3), (X[:20], y), steps=15, tolerance=1e-8)
    together = jax.jit(jax.vmap(one))(sets, jnp.array([0.1, 1.0, 10.0]))
    assert together.reason == ["converged"] * 3
    for k, prior in enumerate((0.1, 1.0, 10.0)):
        single = blr.fit(blr.newton(), build(prior), jnp.zeros(3), (X[:20], sets[k]), steps=15, tolerance=1e-8)
        assert single.steps == int(together.state.count[k])
        np.testing.assert_allclose(together.q.mean[k], single.q.mean, rtol=1e-9)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:Some donated buffers")  # where the traced number is hidden in a function
def test_inside_a_scan_and_refused_inside_a_trace():
    streamed, _ = jax.lax.scan(
        lambda q, rows: (blr.run(blr.newton(), build(1.0), q, rows, steps=3).q, None),
        blr.Gaussian(jnp.zeros(3)),
        jax.tree.map(lambda a: a.reshape(2, 10, *a.shape[1:]), TRAINED),
    )
    assert np.all(np.isfinite(streamed.mean))
    fitted = lambda y: blr.fit(blr.newton(), build(1.0), jnp.zeros(3), (X[:20], y), steps=3).q.mean
    for transformed, argument in ((jax.jit(fitted), Y[:20]), (jax.vmap(fitted), Y[None, :20])):
        with pytest.raises(ValueError, match=r"use blr\.run\(rule, objective"):
            transformed(argument)
    hidden = lambda h: blr.fit(blr.newton(), lambda w: h * jnp.sum(jnp.cosh(w)), jnp.ones(2), steps=3).q.mean[0]
    with pytest.raises(ValueError, match=r"use blr\.run"):
        jax.grad(hidden)(2.0)
    with pytest.raises(ValueError, match="compare `code`"):
        jax.jit(lambda y: blr.run(blr.newton(), build(1.0), jnp.zeros(3), (X[:20], y), steps=1).reason)(Y[:20])
    with pytest.raises(ValueError, match="pass key="):
        blr.run(blr.newton(), build(1.0), jnp.zeros(3), TRAINED, steps=1, batch_size=5)


@pytest.mark.extended
def test_rows_that_are_missing_in_part_count_as_in_fit():
    prior = blr.NormalWishart(jnp.zeros(2), 0.1, 4.0, jnp.eye(2))
    terms = {"prior": blr.factors.prior("c", prior), "y": blr.factors.multivariate_normal("y", joint="c")}
    model = blr.Model({"c": prior}, terms)
    data = {"y": jnp.array([[1.0, 2.0], [0.5, jnp.nan], [-1.0, 0.3]])}
    whole, pure = (f(blr.vmp(), model, None, data, steps=5).q["c"] for f in (blr.fit, blr.run))
    np.testing.assert_allclose(pure.mean, whole.mean, rtol=1e-12)
    assert abs(float(whole.mean[0]) - (1.0 + 0.5 - 1.0) / 3.1) < 0.2  # the observed half of the second row counts
