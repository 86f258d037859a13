"""Batches that are not finite are skipped and counted, and leave nothing behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr

KEY, ROWS, BATCH, STEPS = jax.random.key(5), 12, 4, 6
X = np.asarray(jax.random.normal(jax.random.key(10), (ROWS, 2)))
Y = X @ np.array([1.0, -2.0]) + 0.1
BAD_X = np.where(np.arange(ROWS)[:, None] == 7, np.nan, X)  # One row, and so one batch of every epoch.


def squared(theta, example):
    x, y = example
    return 0.5 * (y - x @ theta) ** 2


OBJECTIVE = blr.Objective(squared, size=ROWS, regularizer=1.0)
RULES = {
    "sgd": blr.sgd(0.02),
    "momentum": blr.gradient_descent(0.01, momentum=0.9),
    "adam": blr.adam(0.01),  # Its averages are divided by 1 − βᵗ, with t the number of steps.
    "vogn": blr.vogn(0.1),
    "ivon": blr.ivon(0.5),  # Its temperature rises with the number of steps.
    "full covariance": blr.von(0.05, samples=2).replace(family=blr.Gaussian),
}


def batches(key, rows=ROWS):
    """The rows of each batch, in the order in which a fit with this key sees them."""
    shuffle_key = jax.random.split(key)[0]
    for epoch in range(100):
        order = np.asarray(jax.random.permutation(jax.random.fold_in(shuffle_key, epoch), rows))
        yield from (order[first : first + BATCH] for first in range(0, rows, BATCH))


def same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def fit(rule, start, x=X, *, steps=STEPS, skip_nonfinite=100, key=KEY, **more):
    data = (jnp.asarray(x), jnp.asarray(Y))
    how = {"batch_size": BATCH, "key": key, "skip_nonfinite": skip_nonfinite}
    return blr.fit(rule, OBJECTIVE, start, data, steps=steps, **how, **more)


LONGER = ("momentum", "full covariance")


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.extended if n in LONGER else ()) for n in RULES])
def test_a_skipped_batch_leaves_nothing_behind(name):
    """Bit for bit a fit on data without NaN that is told to pass over the same batches without a look at them."""
    rule = RULES[name]
    skipping = fit(rule, jnp.zeros(2), BAD_X)
    is_bad = [7 in chosen for chosen, _ in zip(batches(KEY), range(2 * STEPS), strict=False)]
    before = []  # How many bad batches there are between each step and the one before it.
    for place in np.flatnonzero(~np.array(is_bad))[:STEPS]:
        before.append(int(sum(is_bad[:place])) - sum(before))
    assert before[0] == 0  # A fit is told before it goes on, not at its beginning.
    told, ends = jnp.zeros(2), [step for step in range(1, STEPS) if before[step]] + [STEPS]
    for end in ends:
        taken = getattr(told, "steps", 0)
        told = fit(rule, told, steps=STEPS - taken, on_step=lambda result, end=end: result.steps == end, every=1)
        told.skipped += before[end] if end < STEPS else 0
    same(skipping.state, told.state)
    assert skipping.reason == "steps"
    assert skipping.steps == STEPS
    assert skipping.skipped == told.skipped == sum(before) > 1
    np.testing.assert_array_equal(skipping.trace["skipped"], before)
    assert np.all(np.isfinite(skipping.trace["objective"]))
    assert f"{sum(before)} batches were skipped" in skipping.explanation


@pytest.mark.extended
def test_gradient_descent_by_hand():
    """Plain SGD in NumPy on the batches that are finite."""
    rate, theta, taken = 0.02, np.zeros(2), 0
    for chosen in batches(KEY):
        if 7 in chosen:
            continue
        residual = X[chosen] @ theta - Y[chosen]
        theta = theta - rate * (ROWS / BATCH * X[chosen].T @ residual + theta) / ROWS
        taken += 1
        if taken == STEPS:
            break
    result = fit(blr.sgd(rate), jnp.zeros(2), BAD_X)
    np.testing.assert_allclose(result.q.mean, theta, rtol=1e-12)


@pytest.mark.extended
def test_a_resumed_fit_goes_on_counting(tmp_path):
    rule = RULES["vogn"]
    whole = fit(rule, jnp.zeros(2), BAD_X)
    cut = fit(rule, jnp.zeros(2), BAD_X, on_step=lambda result: result.steps == 2, every=1)
    cut.save(tmp_path / "cut.npz")
    rest = fit(rule, blr.load(tmp_path / "cut.npz"), BAD_X, steps=STEPS - 2, key=None)
    same(rest.state, whole.state)
    assert rest.skipped == whole.skipped > cut.skipped > 0
    joined = np.concatenate([cut.trace["skipped"], rest.trace["skipped"]])
    np.testing.assert_array_equal(joined, whole.trace["skipped"])


def test_one_more_than_the_limit_ends_the_fit():
    result = fit(blr.sgd(0.02), jnp.zeros(2), BAD_X, skip_nonfinite=1)
    assert result.reason == "not finite"
    assert result.skipped == 1
    assert np.all(np.isfinite(result.q.mean))
    assert "1 batch was skipped" in result.explanation
    assert "more than skip_nonfinite=1 allows" in result.explanation
    more = fit(blr.sgd(0.02), result, BAD_X, steps=STEPS - result.steps, skip_nonfinite=100)
    same(more.state, fit(blr.sgd(0.02), jnp.zeros(2), BAD_X).state)


def test_a_q_that_diverges_does_not_go_on_for_ever():
    """Every batch is not finite from some step on: the limit is reached, and the last finite q returned."""
    result = fit(blr.sgd(1e200), jnp.zeros(2), steps=1000, skip_nonfinite=5)
    assert result.reason == "not finite"
    assert result.skipped == 5
    assert np.all(np.isfinite(result.q.mean))
    assert "lower the rate" in result.explanation


@pytest.mark.extended
def test_no_batch_is_skipped_where_all_are_finite():
    plain = fit(blr.vogn(0.1), jnp.zeros(2), skip_nonfinite=0)
    allowed = fit(blr.vogn(0.1), jnp.zeros(2), skip_nonfinite=3)
    assert "skipped" not in plain.trace
    assert (plain.skipped, allowed.skipped, allowed.trace["skipped"].sum(), allowed.explanation) == (0, 0, 0, None)
    for a, b in zip(jax.tree.leaves(plain.state), jax.tree.leaves(allowed.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-14)


def test_another_limit_compiles_nothing():
    traces = []

    def counted(theta, example):
        traces.append(1)
        return squared(theta, example)

    objective = blr.Objective(counted, size=ROWS, regularizer=1.0)
    run = lambda limit: blr.fit(
        blr.sgd(0.02), objective, blr.FixedGaussian(jnp.zeros(2)), (jnp.asarray(BAD_X), jnp.asarray(Y)), steps=4,
        batch_size=BATCH, key=KEY, skip_nonfinite=limit,
    )  # fmt: skip
    run(50)
    before = len(traces)
    run(60)
    assert len(traces) == before


@pytest.mark.extended
def test_validation_and_tolerance_go_with_it():
    """The test of convergence does not see what was skipped."""
    watch = {"validation": (jnp.asarray(X), jnp.asarray(Y)), "tolerance": 1e-4}
    result = fit(blr.vogn(0.3), jnp.zeros(2), BAD_X, steps=3000, skip_nonfinite=3000, **watch)
    assert result.skipped > 0
    assert np.all(np.isfinite(result.trace["decrement"]))
    assert all(np.all(np.isfinite(np.asarray(leaf))) for leaf in jax.tree.leaves(result.watch))


@pytest.mark.extended
def test_several_starts_skip_alike():
    alone = fit(RULES["vogn"], jnp.zeros(2), BAD_X)
    best = fit(RULES["vogn"], jnp.zeros(2), BAD_X, starts=2)
    assert best.skipped == alone.skipped


@pytest.mark.parametrize("batch_size", [None, ROWS])
def test_all_data_cannot_be_skipped(batch_size):
    with pytest.raises(
        ValueError, match="every step, which would be as little finite in the next one: pass batch_size"
    ):
        blr.fit(
            blr.newton(), OBJECTIVE, jnp.zeros(2), (X, Y), steps=3, batch_size=batch_size, skip_nonfinite=1, key=KEY
        )
