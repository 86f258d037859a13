"""Objectives: four kinds that answer the same questions, and errors that say what is wrong with one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.objectives.base import AbstractObjective
from bayesrule.objectives.objective import as_objective
from bayesrule.objectives.regularizers import Isotropic

ROWS = jnp.array([[1.0, 0.3], [-0.5, 1.2], [0.8, -0.9], [0.1, 0.7], [2.0, 0.4]])


def squared(theta, example):
    return jnp.sum((example - theta) ** 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: blr.Objective(squared, size=0), "positive number"),
        (lambda: blr.Objective(squared, size=-3), "positive number"),
        (lambda: blr.Objective(squared, size=jnp.ones(3)), "positive number"),
        (lambda: blr.Objective(3.0, size=1), "takes a function"),
        (lambda: blr.Objective(squared, size=3, regularizer=-1.0), "not negative"),
        (lambda: blr.Objective(squared, size=3, regularizer=1.0, prior=blr.Gaussian(jnp.zeros(1))), "not both"),
        (lambda: blr.Objective(squared, size=3, prior=1.0), "regularizer="),
        (lambda: blr.Objective(squared, size=3, regularizer=blr.Gaussian(jnp.zeros(1))), "prior="),
        (lambda: blr.Objective(squared, size=3, linear=True), "output=apply"),
        (lambda: blr.newton().step(3.0, blr.newton().init(jnp.zeros(1))), "function of θ"),
    ],
)
def test_objectives_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_objective_needs_its_size():
    """STYLE's example of how an error should read, word for word."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the message is looked at below)
        blr.Objective(squared)
    assert str(error.value) == (
        "Objective needs size=N, the number of training examples: without it the posterior's width is "
        "meaningless. For a full-batch loss pass size=len(data)."
    )


def test_losses_of_the_wrong_shape():
    rule = blr.gradient_descent(0.1)
    state = rule.init(jnp.zeros(2))
    with pytest.raises(ValueError, match="must be a scalar"):
        rule.step(lambda x: x, state)
    with pytest.raises(ValueError, match=r"loss\(params, example\) must be a scalar"):
        rule.step(blr.Objective(lambda t, e: e - t, size=3), state, jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match="one number for each example"):
        rule.step(blr.Objective.from_batch(lambda t, b, a, k: (jnp.sum(t), a), size=3), state, jnp.zeros((3, 2)))


def test_batches_of_the_wrong_shape():
    rule, objective = blr.gradient_descent(0.1), blr.Objective(lambda t, e: jnp.sum(t * e[0]) * e[1], size=3)
    state = rule.init(jnp.zeros(2))
    with pytest.raises(ValueError, match="needs a batch"):
        rule.step(objective, state)
    with pytest.raises(ValueError, match="same number of rows"):
        rule.step(objective, state, (jnp.zeros((3, 2)), jnp.zeros(4)))
    with pytest.raises(ValueError, match="batch is empty"):
        rule.step(objective, state, (jnp.zeros((0, 2)), jnp.zeros(0)))
    with pytest.raises(ValueError, match="3 examples but the weights"):
        rule.step(objective, state, blr.Weighted((jnp.zeros((3, 2)), jnp.zeros(3)), jnp.ones(2)))


def test_curvature_that_needs_what_the_objective_lacks():
    data = jnp.zeros((3, 2))
    rule = blr.Rule(blr.Gaussian, blr.Delta(), blr.GeneralizedGaussNewton(), blr.Steps(0.1))
    with pytest.raises(ValueError, match="output=apply"):
        rule.step(blr.Objective(squared, size=3), rule.init(jnp.zeros(2)), data)
    together = blr.Objective.from_batch(lambda t, b, a, k: (jnp.sum((b - t) ** 2, 1), a), size=3)
    with pytest.raises(ValueError, match="each example's loss by itself"):
        rule.replace(curvature=blr.GaussNewton()).step(together, rule.init(jnp.zeros(2)), data)


def each_row(theta, batch, aux, key):
    return jnp.sum((batch - theta) ** 2, 1), aux


KINDS = {
    "plain": (as_objective(lambda theta: jnp.sum((ROWS - theta) ** 2)), None),
    "examples": (blr.Objective(squared, size=5), ROWS),
    "batched": (blr.Objective.from_batch(each_row, size=5), ROWS),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_the_same_data_loss(name):
    """One sum written as a plain function, over examples and over a batch; and E_q of it as a function of μ."""
    objective, batch = KINDS[name]
    theta, q = jnp.array([0.2, -0.1]), blr.FixedGaussian(jnp.array([0.4, -0.6]), 2.0)
    expected = np.sum((np.asarray(ROWS) - np.asarray(theta)) ** 2)
    np.testing.assert_allclose(objective.data(theta, batch, None, None)[0], expected, rtol=1e-12)
    shift = jnp.array([0.3, 0.1])
    at_mu = objective.data(q.expectation() + shift, batch, None, None)[0]
    np.testing.assert_allclose(objective.expected(q, shift, batch, None, None)[0], at_mu, rtol=1e-12)
    assert objective.with_size(7) is objective
    assert objective.rows(batch) == (0 if batch is None else 5)
    assert objective.closed_form_bound(q, batch, None) is None


@pytest.mark.parametrize("name", ["examples", "batched"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_selected_from_the_data_stand_for_all_of_it(name, weighted):
    """The average of a batch's data loss over all ways to split the data is the loss of all data."""
    objective, rows = KINDS[name]
    weights = jnp.array([1.0, 2.0, 0.5, 1.0, 3.0])
    data = blr.Weighted(rows, weights) if weighted else rows
    theta = jnp.array([0.2, -0.1])
    value = jax.jit(lambda i: objective.data(theta, objective.select_rows(data, i[None], jnp.ones(1, bool)))[0])
    batches = [value(jnp.asarray(i)) for i in range(5)]
    np.testing.assert_allclose(np.mean(batches), objective.data(theta, data)[0], rtol=1e-12)


@pytest.mark.parametrize("name", ["examples", "batched"])
def test_a_weight_is_a_number_of_repetitions(name):
    """Σ w ℓ whatever the weights add up to, times N/M where the rows stand for M others: all by NumPy."""
    objective, rows = KINDS[name]
    weights, theta = np.array([2.0, 1.0, 0.0, 3.0, 1.0]), jnp.array([0.2, -0.1])
    repeated = np.sum((np.repeat(np.asarray(ROWS), weights.astype(int), axis=0) - np.asarray(theta)) ** 2)
    for count, factor in ((None, 1.0), (5, 1.0), (7, 5 / 7)):
        value = objective.data(theta, blr.Weighted(rows, jnp.asarray(weights), count))[0]
        np.testing.assert_allclose(value, factor * repeated, rtol=1e-12)


@pytest.mark.extended
def test_padding_of_the_last_batch_does_not_count():
    objective, rows = KINDS["examples"]
    theta = jnp.array([0.2, -0.1])
    padded = objective.select_rows(rows, jnp.array([3, 4, 4]), jnp.array([True, True, False]))
    np.testing.assert_allclose(objective.data(theta, padded)[0], objective.data(theta, rows[3:])[0], rtol=1e-12)
    assert objective.keeps_partial_batch
    assert not KINDS["batched"][0].keeps_partial_batch


@pytest.mark.parametrize("name", KINDS)
def test_a_regularizer_can_be_replaced_in_every_kind(name):
    objective, batch = KINDS[name]
    other = dataclasses.replace(objective, regularizer=Isotropic(2.0))
    assert type(other) is type(objective)
    assert other.regularizer.strength == 2.0
    theta = jnp.ones(2)
    np.testing.assert_array_equal(other.data(theta, batch)[0], objective.data(theta, batch)[0])


def test_only_examples_are_separable():
    assert KINDS["examples"][0].separable("GaussNewton") is KINDS["examples"][0]
    for name in ("plain", "batched"):
        with pytest.raises(ValueError, match="GaussNewton takes each example's loss by itself"):
            KINDS[name][0].separable("GaussNewton")


def test_a_kind_that_leaves_a_question_open_is_abstract():
    class Unfinished(AbstractObjective):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Unfinished()
