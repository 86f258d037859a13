"""Validation data, early stopping and functions that are called along the way of a fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.models import gp, kernels

ROWS, COLUMNS = 60, 40


def problem(seed=0):
    """A regression with almost as many columns as rows, which overfits without a prior."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2 * ROWS, COLUMNS))
    y = x[:, 0] + rng.normal(size=2 * ROWS)
    data = [(jnp.asarray(x[part]), jnp.asarray(y[part])) for part in (slice(0, ROWS), slice(ROWS, None))]
    loss = lambda w, example: 0.5 * (example[0] @ w - example[1]) ** 2
    return blr.Objective(loss, size=ROWS), data[0], data[1]


def mean_loss(w, data):
    return float(np.mean(0.5 * (np.asarray(data[0]) @ np.asarray(w) - np.asarray(data[1])) ** 2))


def fit(**options):
    objective, train, validation = problem()
    options = {"steps": 300, "batch_size": 20, "key": jax.random.key(1), "validation": validation, **options}
    return blr.fit(blr.adam(0.05), objective, jnp.zeros(COLUMNS), train, **options), validation


@pytest.mark.extended
def test_metrics_are_those_of_the_posterior_along_the_way():
    result, validation = fit(metrics={"largest": lambda q, data: jnp.max(jnp.abs(q.mean))}, every=50)
    assert list(result.validation) == ["step", "largest", "loss"]
    np.testing.assert_array_equal(result.validation["step"], [50, 100, 150, 200, 250, 300])
    assert result.validation["loss"][-1] == pytest.approx(mean_loss(result.q.mean, validation), rel=1e-5)
    assert result.validation["largest"][-1] == pytest.approx(float(jnp.max(jnp.abs(result.q.mean))))
    shorter, _ = fit(steps=100, every=50)  # the same steps, whether one looks at them or not
    assert shorter.validation["loss"][-1] == pytest.approx(result.validation["loss"][1], rel=1e-5)


@pytest.mark.extended
def test_by_default_every_epoch_is_evaluated():
    result, _ = fit(steps=9)  # Three batches are an epoch.
    np.testing.assert_array_equal(result.validation["step"], [3, 6, 9])


@pytest.mark.extended
def test_looking_does_not_change_the_steps():
    objective, train, _ = problem()
    plain = blr.fit(
        blr.adam(0.05), objective, jnp.zeros(COLUMNS), train, steps=300, batch_size=20, key=jax.random.key(1)
    )
    looked, _ = fit(every=7)
    np.testing.assert_array_equal(plain.q.mean, looked.q.mean)


@pytest.mark.extended
def test_early_stopping_returns_the_best_state():
    result, validation = fit(patience=3, every=10, steps=3000)
    record = result.validation
    best = int(np.argmin(record["loss"]))
    assert result.reason == "stopped early"
    assert record["step"][-1] < 3000
    assert best == len(record["loss"]) - 4
    assert result.steps == record["step"][best]
    assert mean_loss(result.q.mean, validation) == pytest.approx(record["loss"][best], rel=1e-5)
    longer, _ = fit(steps=3000)
    assert mean_loss(longer.q.mean, validation) > 1.05 * mean_loss(result.q.mean, validation)
    assert len(result.trace["objective"]) == record["step"][-1]


def test_the_best_state_is_not_called_converged_if_another_one_has():
    objective, train, validation = problem()
    rule, start = blr.gradient_descent(2e-3), jnp.zeros(COLUMNS)
    options = {"steps": 20000, "tolerance": 1e-4, "validation": validation, "patience": 10**6, "every": 20}
    plain = blr.fit(rule, objective, start, train, steps=20000, tolerance=1e-4)
    result = blr.fit(rule, objective, start, train, **options)
    assert plain.reason == "converged"
    assert result.steps < plain.steps
    assert result.reason == "stopped early"


@pytest.mark.extended
def test_early_stopping_looks_at_the_first_metric():
    result, _ = fit(patience=2, every=10, metrics={"count": lambda q, data: 1.0}, steps=3000)
    np.testing.assert_array_equal(result.validation["step"], [10, 20, 30])
    assert result.steps == 10


def test_a_resumed_fit_remembers_what_it_has_seen(tmp_path):
    file = tmp_path / "fit.blr"
    whole, validation = fit(patience=3, every=10, steps=3000)
    # The last evaluation before the end: the best state lies before the checkpoint.
    stop = int(whole.validation["step"][-2])
    fit(patience=3, every=10, steps=stop, checkpoint=file)
    saved = blr.load(file)
    assert saved.best is not None
    assert int(saved.best.count) == whole.steps
    objective, train, _ = problem()
    options = {"batch_size": 20, "validation": validation, "patience": 3, "every": 10}
    resumed = blr.fit(blr.adam(0.05), objective, saved, train, steps=3000, **options)
    assert resumed.reason == "stopped early"
    assert resumed.steps == whole.steps
    np.testing.assert_array_equal(resumed.q.mean, whole.q.mean)
    np.testing.assert_allclose(resumed.validation["loss"], whole.validation["loss"])


def test_on_step_sees_every_interval_and_can_stop():
    seen = []

    def on_step(result):
        seen.append((result.steps, float(result.trace["objective"][-1])))
        return result.steps >= 40

    result, _ = fit(validation=None, on_step=on_step, every=20)
    assert [steps for steps, _ in seen] == [20, 40]
    assert result.steps == 40
    assert result.reason == "stopped early"
    assert result.validation is None
    assert seen[-1][1] == result.trace["objective"][-1]


def test_full_batches_and_weights():
    objective, train, (x, y) = problem()
    weights = jnp.where(jnp.arange(ROWS) < 10, 1.0, 0.0)
    result = blr.fit(
        blr.gradient_descent(1e-3),
        objective,
        jnp.zeros(COLUMNS),
        train,
        steps=200,
        validation=blr.Weighted((x, y), weights),
    )
    assert len(result.validation["step"]) == 100
    assert result.validation["loss"][-1] == pytest.approx(mean_loss(result.q.mean, (x[:10], y[:10])), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"validation": None, "patience": 3}, "validation="),
        ({"validation": None, "every": 3}, "on_step="),
        ({"patience": 0}, "patience"),
        ({"every": 0}, "every"),
        ({"metrics": {"step": print}}, "step"),
    ],
)
def test_errors(options, says):
    with pytest.raises(ValueError, match=says):
        fit(**options)


@pytest.mark.extended
def test_a_model_has_no_validation_loss():
    x = jnp.linspace(0.0, 1.0, 5)
    model = gp.regression(kernels.RBF(1.0, 0.5), x, 0.1)
    with pytest.raises(ValueError, match="latent variables"):
        blr.fit(blr.conjugate(), model, None, {"y": x}, steps=1, validation={"y": x})
