"""Gaussian processes as models: dense, through a chain, sparse; missing rows, bounds, hyper-parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel

import bayesrule as blr
from bayesrule import factors
from bayesrule.models import gp
from bayesrule.models.kernels import RBF, Matern12, Matern32, Matern52
from bayesrule.models.sparse_gp import inducing_points, sparse

RANDOM = np.random.default_rng(0)
SIZE, NOISE = 40, 0.2
X = np.sort(np.append(RANDOM.uniform(0, 6, SIZE - 1), 3.0))
X[11] = X[10]  # a time that comes twice
Y = np.sin(2 * X) + np.sqrt(NOISE) * RANDOM.normal(size=SIZE)
NEW = np.array([-1.0, X[4], 2.2, 7.5])
COUNTS = RANDOM.poisson(np.exp(np.sin(2 * X))) * 1.0
GAUSSIAN = factors.linear("y", {"f": None}, precision=1 / NOISE)


def exactly(model, y):
    return blr.fit(blr.conjugate(), model, None, {"y": y}, steps=1)


def log_evidence(kernel, x, y, noise=NOISE):
    covariance = np.asarray(kernel(x)) + noise * np.eye(len(x))
    return -0.5 * (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(2 * np.pi * covariance)[1])


@pytest.mark.extended
def test_missing_rows_are_rows_that_are_not_there():
    y = np.where(np.arange(SIZE) % 3 == 0, np.nan, Y)
    observed = np.isfinite(y)
    some, less = (
        exactly(gp.regression(RBF(), X, NOISE), y),
        exactly(gp.regression(RBF(), X[observed], NOISE), Y[observed]),
    )
    assert_allclose(some.bound, less.bound, rtol=1e-10)
    assert_allclose(some.bound, log_evidence(RBF(), X[observed], Y[observed]), rtol=1e-10)
    assert_allclose(some.q["f"].mean[observed], less.q["f"].mean, atol=1e-10)
    for one, other in zip(*(gp.predict(r.q, RBF(), x, NEW) for r, x in ((some, X), (less, X[observed]))), strict=True):
        assert_allclose(one, other, atol=1e-10)


def test_weights_of_zero_and_two_in_laplaces_evidence():
    """Its value and slopes are scikit-learn's for rows that are left out or repeated, at the mode that it finds."""
    weights, labels, logs = np.arange(SIZE) % 3, (Y > 0) * 1.0, np.log([3.0, 1.5])
    rows, mode = np.repeat(np.arange(SIZE), weights), np.zeros(SIZE)
    theirs = GaussianProcessClassifier(ConstantKernel(3.0) * SklearnRBF(1.5), optimizer=None)
    theirs.fit(X[rows, None], labels[rows])
    mode[rows] = theirs.base_estimator_.f_cached
    likelihood = factors.bernoulli_logit("y", {"f": None}, points=blr.Delta())
    evidence = lambda logs: gp.laplace_evidence(RBF(*jnp.exp(logs)), X, likelihood, labels, mode, weights)
    value, slopes = jax.jit(jax.value_and_grad(evidence))(jnp.asarray(logs))
    expected, expected_slopes = theirs.log_marginal_likelihood(logs, eval_gradient=True)
    assert_allclose(value, expected, rtol=1e-9)
    assert_allclose(slopes, expected_slopes, rtol=1e-5)


@pytest.mark.extended
def test_one_row():
    one = exactly(gp.regression(RBF(), X[:1], NOISE), Y[:1])
    assert_allclose(one.q["f"].mean, Y[:1] / (1 + NOISE), rtol=1e-12)
    assert_allclose(one.bound, log_evidence(RBF(), X[:1], Y[:1]), rtol=1e-12)


CHAINS = {"12": Matern12(1.5, 0.8), "52": Matern52(1.5, 0.8), "sum": 0.5 * Matern32() + Matern12()}


@pytest.mark.extended
@pytest.mark.parametrize("name", ["12", pytest.param("52", marks=pytest.mark.extended), "sum"])
def test_the_chain_is_the_dense_process(name):
    kernel = CHAINS[name]
    y = np.where(np.arange(SIZE) % 7 == 0, np.nan, Y)
    models = [gp.regression(kernel, X, NOISE, mean=0.3, through=through) for through in ("dense", "chain")]
    dense, chain = (exactly(model, y) for model in models)
    assert_allclose(chain.bound, dense.bound, rtol=1e-9)
    assert_allclose(chain.q["f"].mean, dense.q["f"].mean, atol=1e-9)
    assert_allclose(chain.q["f"].variance, dense.q["f"].variance, atol=1e-9)
    actual = [gp.predict(result.q, kernel, X, NEW, mean=0.3) for result in (dense, chain)]
    for one, other in zip(*actual, strict=True):
        assert_allclose(one, other, atol=1e-9)
    for model in models:  # nothing observed is the prior
        none = exactly(model, np.full(SIZE, np.nan))
        assert_allclose(none.q["f"].mean, 0.3, atol=1e-12)
        assert_allclose(none.q["f"].variance, kernel.diagonal(X), atol=1e-12)
        assert_allclose(none.bound, 0.0, atol=1e-12)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["poisson", pytest.param("student", marks=pytest.mark.extended)])
def test_the_chain_is_the_dense_process_for_other_likelihoods(kind):
    """Student-t sites have negative κ where an observation is far out."""
    if kind == "poisson":
        rule, likelihood, y = blr.cvi(1.0), factors.poisson_exp("y", {"f": None}), COUNTS
    else:
        rule, likelihood, y = blr.cvi(0.5), factors.student_t("y", {"f": None}, dof=3.0, scale=0.3), Y.copy()
        y[[5, 20]] += 6.0
    results = [
        blr.fit(
            rule,
            gp.process(Matern32(1.0, 0.8), X, likelihood, through=through),
            None,
            {"y": y},
            steps=80,
            tolerance=1e-12,
        )
        for through in ("dense", "chain")
    ]
    assert [result.reason for result in results] == ["converged"] * 2
    assert_allclose(results[1].bound, results[0].bound, rtol=1e-9)
    assert_allclose(results[1].q["f"].mean, results[0].q["f"].mean, atol=1e-6)
    if kind == "student":
        assert np.min(-2 * results[0].q["f"].natural()[1]) < -0.05
        assert np.max(np.abs(results[0].q["f"].mean - np.sin(2 * X))[[5, 20]]) < 0.5  # and the two are not followed


def collapsed(kernel, places, x, y):
    """Titsias (2009): log N(y | 0, Q + noise) − tr(K − Q) / (2 noise), Q the covariance that the places explain."""
    cross, own = np.asarray(kernel(places, x)), np.asarray(kernel(places))
    explained = cross.T @ np.linalg.solve(own, cross)
    covariance = explained + NOISE * np.eye(len(x))
    evidence = -0.5 * (y @ np.linalg.solve(covariance, y) + np.linalg.slogdet(2 * np.pi * covariance)[1])
    return evidence - 0.5 * (np.sum(np.asarray(kernel.diagonal(x))) - np.trace(explained)) / NOISE


@pytest.mark.extended
def test_one_sparse_step_gives_the_collapsed_bound():
    places, data = np.linspace(0, 6, 7), {"x": X, "y": Y}
    result = blr.fit(blr.conjugate(), sparse(RBF(), places, GAUSSIAN), None, data, steps=1)
    assert_allclose(result.bound, collapsed(RBF(), places, X, Y), rtol=1e-9)
    evidence = log_evidence(RBF(), X, Y)
    assert result.bound < evidence - 0.1
    whole = blr.fit(blr.conjugate(), sparse(Matern32(), X, GAUSSIAN), None, data, steps=1)
    assert_allclose(whole.bound, log_evidence(Matern32(), X, Y), rtol=1e-8)
    dense = exactly(gp.regression(Matern32(), X, NOISE), Y)
    for full in (False, True):
        actual = [gp.predict(result.q, Matern32(), X, NEW, full=full) for result in (whole, dense)]
        for one, other in zip(*actual, strict=True):
            assert_allclose(one, other, atol=1e-6)


@pytest.mark.extended
def test_sparse_mini_batches_end_at_the_optimum():
    """Sites renew themselves batch by batch, so that a constant rate ends where the whole data do, also with a mean."""
    likelihood, data = factors.poisson_exp("y", {"f": None}), {"x": X, "y": COUNTS}
    model = sparse(Matern32(), np.linspace(0, 6, 8), likelihood, mean=0.5)
    best = blr.fit(blr.cvi(1.0), model, None, data, steps=50, tolerance=1e-14)
    passes = blr.fit(blr.cvi(0.5, sites=True), model, None, data, steps=300, batch_size=10, key=jax.random.key(0))
    assert_allclose(passes.q["f"].mean, best.q["f"].mean, atol=1e-8)
    rate = lambda count: 1 / (1 + 0.3 * count)
    averaged = blr.fit(blr.cvi(rate), model, None, data, steps=300, batch_size=10, key=jax.random.key(0))
    assert model.bound(averaged.q, data) > best.bound - 0.1
    # Left-out rows by their sites: what the inducing values leave open is not part of the row's cavity.
    assert_allclose(best.loo().log_density, passes.loo().log_density, atol=1e-7)


def test_rows_left_out_of_a_sparse_regression_are_exact():
    places, data = np.linspace(0, 6, 7), {"x": X, "y": Y}
    result = blr.fit(blr.conjugate(), sparse(RBF(), places, GAUSSIAN), None, data, steps=1)
    rest = {"x": X[1:], "y": Y[1:]}
    without = blr.fit(blr.conjugate(), sparse(RBF(), places, GAUSSIAN), None, rest, steps=1)
    # The predictive density of the row, what the inducing values leave open included (the bound has it as a penalty).
    mean, variance = gp.predict(without.q, RBF(), places, X[:1])
    total = variance[0] + NOISE
    expected = -0.5 * (np.log(2 * np.pi * total) + (Y[0] - mean[0]) ** 2 / total)
    assert_allclose(result.loo().log_density[0], expected, rtol=1e-8)


@pytest.mark.extended
def test_hyper_parameters_by_an_optimiser_between_steps():
    """Adam on the bound, after one natural-gradient step each, ends where the evidence itself is flat."""
    build = lambda h: gp.regression(RBF(h["variance"], h["scale"]), X, h["noise"])
    start = {"variance": 1.0, "scale": 0.4, "noise": 0.5}
    actual = blr.tuned(blr.conjugate(), build, start, None, {"y": Y}, optimizer=optax.adam(0.1), steps=200)

    def evidence(logs):
        h = {name: jnp.exp(value) for name, value in logs.items()}
        noisy = RBF(h["variance"], h["scale"])(X) + h["noise"] * jnp.eye(SIZE)
        return -0.5 * (Y @ jnp.linalg.solve(noisy, Y) + jnp.linalg.slogdet(2 * jnp.pi * noisy)[1])

    logs = {name: jnp.log(value) for name, value in actual.hyper.items()}
    slopes = jax.grad(evidence)(logs)
    assert max(abs(float(slope)) for slope in slopes.values()) < 1e-2
    assert_allclose(actual.bounds[-1], evidence(logs), rtol=1e-6)
    assert_allclose(actual.q["f"].prior, build(actual.hyper).blocks["f"].prior, rtol=1e-12)
    assert actual.bounds[-1] > actual.bounds[0] + 1


@pytest.mark.extended
def test_hyper_parameters_of_a_sparse_process_by_mini_batches():
    data, places = {"x": X, "y": COUNTS}, np.linspace(0, 6, 8)
    build = lambda h: sparse(Matern32(h["variance"], h["scale"]), places, factors.poisson_exp("y", {"f": None}))
    start = {"variance": 0.1, "scale": 5.0}
    how = {"optimizer": optax.adam(0.05), "steps": 150, "batch_size": 20, "key": jax.random.key(0)}
    actual = blr.tuned(blr.cvi(0.3), build, start, None, data, **how)
    before, after = (
        blr.fit(blr.cvi(1.0), build(h), None, data, steps=50, tolerance=1e-6).bound for h in (start, actual.hyper)
    )
    assert after > before + 2
    with pytest.raises(ValueError, match="pass key="):
        blr.tuned(blr.cvi(0.3), build, start, None, data, **(how | {"key": None}))
    with pytest.raises(ValueError, match="positive numbers"):
        blr.tuned(blr.cvi(0.3), build, {"variance": -1.0, "scale": 1.0}, None, data, **how)


def test_inducing_points_leave_little_open():
    """The greedy choice beats as many random inputs; a repeated input is not chosen twice while others are open."""
    x = RANDOM.uniform(0, 6, (200, 2))
    x[50] = x[7]
    chosen = np.asarray(inducing_points(RBF(), x, 25))

    def left(places):
        cross = np.asarray(RBF()(places, x))
        return len(x) - np.sum(cross * np.linalg.solve(np.asarray(RBF()(places)), cross))

    assert left(chosen) < min(left(x[RANDOM.permutation(200)[:25]]) for _ in range(5))
    assert len(np.unique(chosen, axis=0)) == 25
    with pytest.raises(ValueError, match="between 1 and that"):
        inducing_points(RBF(), x, 201)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: gp.prior(RBF(), X, through="magic"), 'through= is "dense"'),
        (lambda: gp.prior(RBF(), np.zeros(0)), "at least one and all finite"),
        (lambda: gp.prior(RBF(), np.array([0.0, np.nan])), "at least one and all finite"),
        (lambda: gp.prior(Matern32(), X[::-1], through="chain"), "sorted times"),
        (lambda: gp.prior(Matern32(), X, mean=np.zeros(SIZE), through="chain"), "one number"),
        (lambda: gp.process(RBF(), X, factors.linear("y", {"w": "x"})), "factor of its outputs alone"),
        (lambda: exactly(gp.regression(RBF(), X, NOISE), Y[:-1]), "40 outputs and 39 rows of 'y'"),
        (lambda: gp.predict(blr.Product({"a": blr.Gamma(1.0, 1.0)}), RBF(), X, NEW), "one process"),
        (lambda: gp.predict(gp.prior(Matern12(), X, through="chain"), Matern12(), X, NEW, full=True), "dense process"),
    ],
)
def test_bad_input(act, words):
    with pytest.raises(ValueError, match=words):
        act()
