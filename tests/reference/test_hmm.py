"""Hidden Markov models against hmmlearn's tests and its EM, iterate by iterate, and dynamax's smoother."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import bayesrule as blr
from bayesrule import factors
from bayesrule.models import hmm
from bayesrule.numerics import hmm as markov

# Optional: the dev extra installs it.
hmmlearn = pytest.importorskip("hmmlearn.hmm")

DATA = Path(__file__).parent / "data"


@pytest.mark.as_users
def test_hmmlearn_s_own_example():
    """REFERENCE 3: log-likelihood −3.3725; P(state 0) .8673, .8204, .3075, .8204, .8673; best path −4.4590."""
    chain = jnp.array([0.5, 0.5]), jnp.array([[0.7, 0.3], [0.3, 0.7]])
    weights = jnp.log(jnp.array([[0.9, 0.2], [0.9, 0.2], [0.1, 0.8], [0.9, 0.2], [0.9, 0.2]]))
    assert_allclose(hmm.log_likelihood(*chain, weights), -3.3725, atol=5e-5)
    assert_allclose(hmm.smooth(*chain, weights)[:, 0], [0.8673, 0.8204, 0.3075, 0.8204, 0.8673], atol=5e-5)
    path, log_probability = hmm.viterbi(*chain, weights)
    assert_allclose(log_probability, -4.4590, atol=5e-5)
    assert_array_equal(path, [0, 0, 1, 0, 0])


@pytest.mark.as_users
def test_dynamax_s_smoother():
    with np.load(DATA / "dynamax_hmm.npz") as file:
        theirs = {name: jnp.array(file[name]) for name in file.files}
    chain = theirs["initial"], theirs["transitions"], theirs["log_likelihoods"]
    assert_allclose(hmm.log_likelihood(*chain), theirs["log_likelihood"], rtol=1e-12)
    assert_allclose(hmm.filter(*chain), theirs["filtered"], atol=1e-12)
    assert_allclose(hmm.smooth(*chain), theirs["smoothed"], atol=1e-12)
    actual = markov.smooth(jnp.log(chain[0]), jnp.log(chain[1]), chain[2])
    assert_allclose(actual.pairs, theirs["pairs"], atol=1e-11)
    assert_array_equal(hmm.viterbi(*chain)[0], theirs["path"])


# EM, iterate by iterate: three sequences of different lengths.

LENGTHS, STATES = [25, 40, 15], 3
CHAIN = np.array([0.5, 0.3, 0.2]), np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.1, 0.6]])
PARTS = np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1])


def drawn(seed):
    """A path of the chain through all sequences, and where it was drawn from."""
    random = np.random.default_rng(seed)
    path = np.zeros(sum(LENGTHS), int)
    for t in range(1, len(path)):
        path[t] = random.choice(STATES, p=CHAIN[1][path[t - 1]])
    return path, random


def gaussian(full):
    path, random = drawn(0)
    y = random.normal(size=(len(path), 2)) @ [[1.0, 0.4], [0.0, 0.7]] + 1.5 * path[:, None] * [1.0, -1.0]
    means = y[[3, 30, 60]]
    if full:
        covariances = np.stack([np.cov(y.T) * scale for scale in (0.5, 1.0, 1.5)])
        start = blr.NormalWishart(means, jnp.ones(3), jnp.full(3, 3.0), np.linalg.inv(covariances))
        components = factors.multivariate_normal("y", joint="states")
    else:
        covariances = np.var(y, axis=0) * np.array([0.5, 1.0, 1.5])[:, None]
        start = blr.NormalGamma(means, jnp.ones((3, 2)), jnp.full((3, 2), 1.5), covariances)
        components = factors.normal("y", joint="states")
    kind = "full" if full else "diag"
    theirs = hmmlearn.GaussianHMM(STATES, kind, min_covar=0, covars_prior=0, covars_weight=0, init_params="")
    theirs.means_, theirs.covars_ = means, covariances

    def same(q):
        assert_allclose(q["mean"], theirs.means_, rtol=1e-9, atol=1e-10)
        covariance = np.linalg.inv(q["precision"]) if full else 1 / q["precision"][:, :, None] * np.eye(2)
        assert_allclose(covariance, theirs.covars_, rtol=1e-8, atol=1e-10)

    return y, start, components, theirs, same


def poisson():
    path, random = drawn(1)
    y = random.poisson(np.array([[0.0, 3.0], [2.0, 2.0], [7.0, 0.5]])[path])
    rates = np.array([[0.2, 2.0], [1.0, 2.5], [5.0, 1.0]])
    theirs = hmmlearn.PoissonHMM(STATES, init_params="")
    theirs.lambdas_ = rates.copy()
    start = blr.Gamma(1 + rates, jnp.ones_like(rates))
    same = lambda q: assert_allclose(q, theirs.lambdas_, rtol=1e-9, atol=1e-12)
    return y, start, factors.poisson("y", rate="states"), theirs, same


def categorical():
    path, random = drawn(2)
    tables = np.array([[0.7, 0.1, 0.1, 0.1], [0.0, 0.5, 0.4, 0.1], [0.1, 0.2, 0.2, 0.5]])
    y = np.array([[random.choice(4, p=tables[state])] for state in path])
    begin = random.dirichlet(np.full(4, 3.0), STATES)
    theirs = hmmlearn.CategoricalHMM(STATES, init_params="", n_features=4)
    theirs.emissionprob_ = begin.copy()
    same = lambda q: assert_allclose(q, theirs.emissionprob_, rtol=1e-9, atol=1e-12)
    return y, blr.Dirichlet(1 + begin), factors.category("y", probabilities="states"), theirs, same


# By hmmlearn, with NumPy 2.5.
@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array:DeprecationWarning")
@pytest.mark.parametrize("case", ["full", "diag", "poisson", "categorical"])
def test_em_takes_hmmlearn_s_iterates(case, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hmmlearn.base"), "disabled", True)  # it says how far it is from converging
    y, start, components, theirs, same = {
        "full": lambda: gaussian(True),
        "diag": lambda: gaussian(False),
        "poisson": poisson,
        "categorical": categorical,
    }[case]()
    model = hmm.hmm_of(components, {"states": start}, initial=CHAIN[0], transitions=CHAIN[1])
    rows = hmm.sequences(
        [y[part, 0] if case == "categorical" else y[part] for part in PARTS], scalar=case == "categorical"
    )
    rule = blr.em(order=[("initial", "transitions", "states")])
    state, step, bound = rule.init(None, model), jax.jit(rule.step), jax.jit(rule.bound)
    theirs.startprob_, theirs.transmat_ = CHAIN
    theirs.n_iter, theirs.tol = 1, -np.inf
    for _ in range(12):
        assert_allclose(bound(model, state.q, {"y": rows}), theirs.score(y, LENGTHS), rtol=1e-10)
        state, _ = step(model, state, {"y": rows})
        theirs.fit(y, LENGTHS)
        assert_allclose(state.q["initial"].mean, theirs.startprob_, rtol=1e-8, atol=1e-11)
        assert_allclose(state.q["transitions"].mean, theirs.transmat_, rtol=1e-8, atol=1e-11)
        same(state.q["states"].mean)
    _, path = theirs.decode(y[PARTS[1]])
    actual = hmm.hidden(model, state.q, rows)
    assert_array_equal(hmm.viterbi(*actual)[0][1], path)
    assert_allclose(hmm.smooth(*actual)[1], theirs.predict_proba(y[PARTS[1]]), atol=1e-9)
