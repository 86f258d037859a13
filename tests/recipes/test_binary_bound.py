"""The bound of a network of signs, against the sum over all 2ᴾ settings of its weights."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

import bayesrule as blr
from bayesrule.estimators import BinaryMLPClassifier
from bayesrule.models import networks

NETWORK = networks.binary_mlp((2, 2, 2), normalization="fan_in", spread=0.5)
COUNT = 8
X = jax.random.normal(jax.random.key(1), (12, 2))
Y = (X[:, 0] > X[:, 1]).astype(int)


def loss(output, y):
    return networks.softmax_cross_entropy(3 * output, y)


def weights(signs):
    return {"layer0": {"w": signs[:4].reshape(2, 2)}, "layer1": {"w": signs[4:].reshape(2, 2)}}


ZERO = weights(jnp.zeros(COUNT))
WITH_PRIOR = blr.Objective(loss, output=NETWORK.apply, size=12, prior=blr.Bernoulli(ZERO))
WITHOUT = blr.Objective(loss, output=NETWORK.apply, size=12)
RULES = {
    "bayesbinn": blr.bayesbinn(0.1, samples=4),
    "cold": blr.bayesbinn(0.1, temperature=0.3),
    "straight_through": blr.straight_through(1.0),
}


def enumerated(q):
    """The bound at q and the log evidence, from every setting of the signs."""
    every = np.array(list(itertools.product([-1.0, 1.0], repeat=COUNT)))
    total = lambda signs: jnp.sum(jax.vmap(lambda x, y: loss(NETWORK.apply(weights(signs), x), y))(X, Y))
    losses = np.asarray(jax.jit(jax.vmap(total))(jnp.asarray(every)))
    natural = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(q.natural())])
    log_q = -np.sum(np.logaddexp(0, -2 * every * natural), axis=1)
    bound = -np.exp(log_q) @ (losses + log_q + COUNT * np.log(2))
    return bound, logsumexp(-losses) - COUNT * np.log(2)


@pytest.mark.extended
@pytest.mark.parametrize("name", RULES)
def test_the_bound_is_that_of_the_signs(name):
    start = NETWORK.init(jax.random.key(0))
    result = blr.fit(RULES[name], WITH_PRIOR, start, (X, Y), steps=60, key=jax.random.key(2))
    expected, evidence = enumerated(result.q)
    assert result.normalized
    assert 0 < result.bound_error < 0.1
    assert abs(result.bound - expected) < 4 * result.bound_error
    assert expected < evidence
    assert np.all(np.isnan(result.trace["bound"]))  # Relaxed or most probable signs are no average over q.


@pytest.mark.extended
@pytest.mark.parametrize("name", RULES)
def test_the_uniform_prior_leaves_the_update_as_it_is(name):
    start, key = NETWORK.init(jax.random.key(0)), jax.random.key(2)
    one, other = (blr.fit(RULES[name], f, start, (X, Y), steps=5, key=key) for f in (WITH_PRIOR, WITHOUT))
    for actual, expected in zip(jax.tree.leaves(one.q), jax.tree.leaves(other.q), strict=True):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(one.bound - other.bound, -COUNT * np.log(2), rtol=1e-9)
    assert not other.normalized


@pytest.mark.extended
def test_the_estimator_has_the_prior():
    estimator = BinaryMLPClassifier((3,), max_iter=2, random_state=0).fit(np.asarray(X), np.asarray(Y))
    network = estimator._network()
    objective = estimator._objective(network, 12, estimator._rule(2))
    signs = sum(leaf.size for leaf in jax.tree.leaves(estimator.posterior_))
    with jax.enable_x64(True):
        penalty = float(objective.regularizer.expected(blr.Bernoulli(estimator.posterior_.natural())))
    assert penalty == pytest.approx(signs * np.log(2))
