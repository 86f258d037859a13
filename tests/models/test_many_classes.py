"""Softmax regression of many classes: averages over points, parts of the rows, and a posterior for each class."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression as ScikitLearn

import bayesrule as blr
from bayesrule.curvature import base, linear_outputs
from bayesrule.estimators import LogisticRegression, named_recipes
from bayesrule.models import regression
from bayesrule.objectives.batches import Weighted
from bayesrule.rule import update


def measure(rule, objective, q, data):
    """One program instead of a hundred operations."""
    return jax.jit(lambda q, data: update.measure(rule, objective, q, data, None, None))(q, data)


@pytest.mark.parametrize("loss", [regression.softmax, regression.categorical])
@pytest.mark.parametrize("by_row", [False, True])
def test_averages_are_those_of_derivatives_at_the_points(loss, by_row):
    f = 3 * jnp.sin(jnp.arange(4 * 5 * 3.0)).reshape(4, 5, 3)
    y, weights = jnp.array([0, 1, 2, 1, 0]), jnp.array([0.1, 0.2, 0.3, 0.4])
    weights = jnp.broadcast_to(weights[:, None], (4, 5)) if by_row else weights
    at_points = lambda function: jax.jit(jax.vmap(jax.vmap(function), (0, None)))(f, y)
    mean = lambda values: np.tensordot([0.1, 0.2, 0.3, 0.4], values, axes=1)
    averages = jax.jit(loss.averages, static_argnums=3)
    value, slope, hessian = averages(f, y, weights, True)
    np.testing.assert_allclose(value, mean(at_points(loss)), rtol=1e-12)
    np.testing.assert_allclose(slope, mean(at_points(jax.grad(loss))), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(hessian, mean(at_points(jax.hessian(loss))), rtol=1e-9, atol=1e-13)
    own = averages(f, y, weights, False)[2]
    np.testing.assert_allclose(own, np.diagonal(hessian, axis1=1, axis2=2), rtol=1e-10, atol=1e-14)


@pytest.mark.extended
def test_scores_beyond_the_largest_power_have_finite_averages():
    f = jnp.array([[[2000.0, -2000.0, 0.0]]])
    values = regression.categorical.averages(f, jnp.array([1]), jnp.ones(1), True)
    assert all(bool(jnp.all(jnp.isfinite(value))) for value in values)
    np.testing.assert_allclose(values[0], [4000.0])


def _problem(rows: int, dtype=float):
    x = jnp.sin(jnp.arange(rows * 3.0)).reshape(rows, 3).astype(dtype)
    y = jnp.arange(rows) % 4
    return Weighted((x, y), (1 + jnp.arange(rows) % 3).astype(dtype))


@pytest.mark.sampled("DiagonalGaussian-1", "DiagonalGaussian-7", "BlockDiagonalGaussian-7")
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("family", [blr.Gaussian, blr.DiagonalGaussian, blr.BlockDiagonalGaussian])
def test_parts_of_the_rows_add_up(monkeypatch, rows, family):
    kind, outputs = ("categorical", 4) if family is blr.BlockDiagonalGaussian else ("softmax", 3)
    curvature = blr.HessianDiagonal() if family is blr.DiagonalGaussian else blr.Hessian()
    rule = blr.von(0.5).replace(family=family, points=blr.QuasiMonteCarlo(8), curvature=curvature)
    objective = regression.regression(kind, rows)
    q = family(regression.zeros(3, outputs), 2.0)
    whole = measure(rule, objective, q, _problem(rows))
    counts = []
    monkeypatch.setattr(base, "_MOST_NUMBERS", 3 * 8 * outputs)
    plain = linear_outputs.sum_over_rows
    monkeypatch.setattr(base, "sum_over_rows", lambda f, arrays, parts: counts.append(parts) or plain(f, arrays, parts))
    parts = measure(rule, objective, q, _problem(rows))
    assert counts[0] > (2 if rows > 1 else 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), parts, whole)


@pytest.mark.extended
def test_a_diagonal_q_takes_no_jacobian_written_out():
    """The softmax of a mean-field q by shared features, against Jacobians of every weight."""
    data, objective = _problem(6), regression.regression("softmax", 6)
    mean = jax.tree.map(lambda m: m + 0.1, regression.zeros(3, 3))
    q = blr.DiagonalGaussian(mean, jax.tree.map(lambda m: 1 + jnp.arange(m.size).reshape(m.shape), mean))
    rule = blr.von(0.5).replace(
        family=blr.DiagonalGaussian, points=blr.QuasiMonteCarlo(8), curvature=blr.HessianDiagonal()
    )
    written = blr.Objective(regression.softmax, output=regression.scores, linear=True, size=6)
    shared = measure(rule, objective, q, data)
    np.testing.assert_allclose(shared.value, measure(rule, written, q, data).value, rtol=1e-12)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
        shared,
        measure(rule, written, q, data),
    )


def test_single_precision_stays_single():
    objective = regression.regression("categorical", 7)
    mean = jax.tree.map(lambda m: jnp.asarray(m, jnp.float32), regression.zeros(3, 4))
    q = blr.BlockDiagonalGaussian(mean, jnp.float32(2.0))
    rule = blr.von(0.5).replace(family=blr.BlockDiagonalGaussian, points=blr.QuasiMonteCarlo(8))
    measured = measure(rule, objective, q, _problem(7, jnp.float32))
    assert measured.curvature.dtype == jnp.float32
    assert measured.gradient["w"].dtype == jnp.float32


def _table(classes: int, rows: int, columns: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    weights, x = rng.normal(size=(columns, classes)), rng.normal(size=(rows, columns))
    return x, (x @ weights + rng.gumbel(size=(rows, classes))).argmax(axis=1)


@pytest.mark.extended
def test_many_classes_have_a_precision_for_each(subtests, monkeypatch, compiled_as_users):
    assert named_recipes.has_many_weights(16, 21)
    monkeypatch.setattr(named_recipes, "MANY_WEIGHTS", 60)  # Fits of as many as by default take four times as long.
    x, y = _table(10, 600, 8)
    model = LogisticRegression(random_state=0).fit(x[:400], y[:400])
    known = np.isin(y, model.classes_)
    x_new, y_new = x[400:][known[400:]], np.searchsorted(model.classes_, y[400:][known[400:]])
    count = len(model.classes_)
    with subtests.test("shapes"):
        assert isinstance(model.posterior_, blr.BlockDiagonalGaussian)
        assert model.posterior_.precision.shape == (count, 9, 9)
        assert model.coef_.shape == (count, 8)
    probabilities = model.predict_proba(x_new)
    nll = lambda p: -np.log(p[np.arange(len(y_new)), y_new]).mean()
    with subtests.test("probabilities"):
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-9)
        peer = ScikitLearn(max_iter=5000).fit(x[:400], y[:400])
        assert nll(probabilities) < nll(peer.predict_proba(x_new)) + 0.02
    with subtests.test("the order of the classes does not matter"):
        other = LogisticRegression(random_state=0).fit(x[:400], -y[:400])
        np.testing.assert_allclose(other.prior_precision_, model.prior_precision_, rtol=0.02)
        # The points are those of other classes then, and there are few of them in so many dimensions.
        swapped = other.predict_proba(x_new)[:, ::-1]
        assert np.abs(swapped - probabilities).mean() < 0.08 / count  # in units of the mean probability
        assert abs(nll(swapped) - nll(probabilities)) < 0.02
    with subtests.test("more rows"):
        updated = model.partial_fit(x_new[:50], model.classes_[y_new[:50]])
        assert isinstance(updated.posterior_, blr.BlockDiagonalGaussian)


@pytest.mark.extended
def test_by_class_with_separable_classes_and_a_class_without_weight():
    x = np.repeat(np.eye(5), 4, axis=0) * 10
    y = np.repeat(np.arange(5), 4)
    weights = (y != 3).astype(float)
    model = LogisticRegression(recipe="by_class", random_state=0).fit(x, y, sample_weight=weights)
    probabilities = model.predict_proba(x)
    assert np.all(np.isfinite(probabilities))
    np.testing.assert_array_equal(probabilities[:, 3], 0)
    seen = y != 3
    np.testing.assert_array_equal(model.predict(x[seen]), y[seen])
