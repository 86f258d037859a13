"""A prior chosen on held-out rows: its losses beside a linear model's exact ones, what is chosen and what is fitted."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.fitting.choose_prior import PRECISIONS

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(80, 12))
KEY = jax.random.key(3)


def loss(w, example):
    x, y = example
    return 0.5 * (y - x @ w) ** 2 + 0.5 * np.log(2 * np.pi)


def choose(weights, rows=80, **options):
    y = X[:rows] @ weights + RANDOM.normal(size=rows)
    objective = blr.Objective(loss, size=rows)
    options = {"steps": 1, "key": KEY} | options
    return choose_from((X[:rows], y), objective, **options), (X[:rows], y)


def choose_from(data, objective, **options):
    return blr.choose_prior(blr.newton(), objective, jnp.zeros(12), data, **options)


def exact_losses(data, precision, key):
    """The mean held-out losses of ridge regression at the mean, and under its Gaussian predictive distribution."""
    from bayesrule.fitting.choose_prior import _divide

    x, y = data
    folds = _divide((jnp.asarray(x), jnp.asarray(y)), np.ones(len(y)), key)
    held = folds.holds_out(0)
    S = x[~held].T @ x[~held] + precision * np.eye(x.shape[1])
    mean = np.linalg.solve(S, x[~held].T @ y[~held])
    variance = 1 + np.sum(x[held] * np.linalg.solve(S, x[held].T).T, axis=1)
    squares, constant = (y[held] - x[held] @ mean) ** 2, 0.5 * np.log(2 * np.pi)
    averaged = np.mean(0.5 * squares / variance + 0.5 * np.log(variance)) + constant
    return np.mean(0.5 * squares) + constant, averaged


@pytest.mark.extended
def test_the_losses_are_those_of_a_fit_without_the_held_out_rows():
    chosen, data = choose(np.full(12, 3.0), samples=20_000, precisions=(1.0, 1e4))
    at_mean, averaged = exact_losses(data, 1e4, KEY)  # So far off that one fold is enough.
    np.testing.assert_allclose(chosen.losses[1e4, "mean"], at_mean, rtol=1e-10)
    np.testing.assert_allclose(chosen.losses[1e4, "samples"], averaged, rtol=1e-3)


@pytest.mark.parametrize(("weights", "expected"), [(0.0, 100.0), (20.0, 0.1)])
def test_a_prior_of_the_right_strength_is_chosen(weights, expected):
    chosen, _ = choose(weights * RANDOM.normal(size=12), rows=40, methods=("mean",))
    assert chosen.precision == expected
    assert {precision for precision, _ in chosen.losses} <= set(PRECISIONS)


@pytest.mark.extended
def test_all_rows_are_fitted_with_what_was_chosen():
    chosen, data = choose(np.ones(12))
    objective = blr.Objective(loss, size=80, regularizer=chosen.precision)
    result = blr.fit(blr.newton(), objective, jnp.zeros(12), data, steps=1, key=KEY)
    np.testing.assert_array_equal(chosen.q.mean, result.q.mean)
    np.testing.assert_array_equal(chosen.q.precision, result.q.precision)


@pytest.mark.extended
def test_averages_over_draws_are_kept_where_the_posterior_is_right_and_left_where_it_is_too_wide():
    """Twelve weights from 15 rows are so uncertain that the mean alone is overconfident; at a temperature of 1000 q is
    far too wide."""
    data = (X[:25], X[:25] @ np.full(12, 0.3) + RANDOM.normal(size=25))
    objective = blr.Objective(loss, size=25)
    options = {"steps": 1, "key": KEY, "precisions": (1.0,)}
    assert choose_from(data, objective, **options).method == "samples"
    rule = blr.newton()
    wide = rule.replace(steps=blr.Steps(1.0, temperature=1000.0))
    assert blr.choose_prior(wide, objective, jnp.zeros(12), data, **options).method == "mean"


@pytest.mark.extended
def test_a_weight_is_a_number_of_repetitions():
    _, (x, y) = choose(np.ones(12))
    weights = RANDOM.integers(1, 3, 80)
    weighted = choose_from(
        blr.Weighted((x, y), jnp.asarray(weights, float)), blr.Objective(loss, size=80), steps=1, key=KEY
    )
    order = np.repeat(np.arange(80), weights)
    repeated = choose_from((x[order], y[order]), blr.Objective(loss, size=len(order)), steps=1, key=KEY)
    assert weighted.precision == repeated.precision
    assert weighted.losses.keys() == repeated.losses.keys()
    for pair, value in weighted.losses.items():
        np.testing.assert_allclose(value, repeated.losses[pair], rtol=1e-9)


def test_few_rows_are_not_divided():
    chosen, _ = choose(np.zeros(12), rows=19)
    assert (chosen.precision, chosen.method, chosen.losses) == (1.0, "samples", {})


def test_integers_among_the_parameters_are_carried():
    objective = blr.Objective(lambda p, example: loss(p["w"] * p["sign"], example), size=80)
    start = {"w": jnp.zeros(12), "sign": jnp.array(-1)}
    y = X @ np.ones(12)
    chosen = blr.choose_prior(blr.newton(), objective, start, (X, y), steps=1, key=KEY)
    assert chosen.q.mean["w"].mean() < -0.9
    assert int(chosen.result.frozen["sign"]) == -1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precisions": (1.0, 0.1)}, "increasing"),
        ({"precisions": (2.0, 3.0)}, "first="),
        ({"methods": ("linearized",)}, "methods="),
        ({"methods": ()}, "methods="),
    ],
)
def test_wrong_choices_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        choose(np.zeros(12), **options)


def test_what_has_a_prior_already_is_no_start():
    objective = blr.Objective(loss, size=80)
    q = blr.Gaussian(jnp.zeros(12), jnp.eye(12))
    with pytest.raises(ValueError, match="bare parameters"):
        blr.choose_prior(blr.newton(), objective, q, (X, X[:, 0]), steps=1, key=KEY)
    together = blr.Objective.from_batch(lambda w, batch, aux, key: (batch[1] - batch[0] @ w, aux), size=80)
    with pytest.raises(ValueError, match="each row by itself"):
        blr.choose_prior(blr.newton(), cast(Any, together), jnp.zeros(12), (X, X[:, 0]), steps=1, key=KEY)
