"""How many programs a fit compiles: none on about as many rows, and on other columns none but the library's own.

A single operation of JAX on arrays of a new shape compiles a program too, which JAX keeps for good: a process that fits
tables of many shapes would pile them up.
"""

import warnings

import jax
import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from bayesrule import estimators
from bayesrule.numerics import programs

NETWORK = {"hidden_layer_sizes": (4,), "max_iter": 3, "random_state": 0, "prior_precision": 1.0}
SUPERVISED = {
    "ridge": (estimators.RidgeRegression(), "numbers"),
    "logistic": (estimators.LogisticRegression(), "labels"),
    "three classes": (estimators.LogisticRegression(recipe="laplace"), "classes"),
    "Poisson": (estimators.PoissonRegression(), "counts"),
    "network, classes": (estimators.MLPClassifier(**NETWORK), "labels"),
    "network, numbers": (estimators.MLPRegressor(**NETWORK), "numbers"),
    "process, numbers": (estimators.GaussianProcessRegressor(), "numbers"),
    "process, classes": (estimators.GaussianProcessClassifier(optimizer=None), "labels"),
}
UNSUPERVISED = {
    "mixture": (estimators.GaussianMixture(2, max_iter=20, random_state=0), "x"),
    "factor analysis": (estimators.FactorAnalysis(1, max_iter=20), "x"),
    "PPCA": (estimators.PPCA(1, max_iter=20), "x"),
    "topics": (estimators.LatentDirichletAllocation(2, max_iter=5, random_state=0), "words"),
    "HMM": (estimators.GaussianHMM(2, max_iter=5, random_state=0), "series"),
    "state space": (estimators.LinearGaussianStateSpace(max_iter=3), "series"),
}


def table(rows, columns):
    """A table, and targets of every kind."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns))
    score = x[:, 0] + 0.5 * x[:, 1] + rng.normal(size=rows)
    return {
        "x": x,
        "numbers": score,
        "labels": score > np.median(score),
        "classes": np.digitize(score, np.quantile(score, [0.3, 0.7])),
        "counts": rng.poisson(np.exp(0.3 * score)),
        "words": rng.poisson(1.0, size=(rows, columns)) + (np.arange(columns) == 0),
        "series": np.cumsum(x[:, : columns // 4], axis=0),
    }


def fit(name, data):
    """Fit an estimator and use it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # Few iterations do not converge, and need not.
        if name in SUPERVISED:
            model, target = SUPERVISED[name]
            model.fit(data["x"], data[target]).predict(data["x"])
        else:
            model, kind = UNSUPERVISED[name]
            model.fit(data[kind]).score(data[kind])


@pytest.fixture
def compilations(monkeypatch):
    """Calls a function, and returns how many programs of the library and how many others it compiled."""
    programs.release_programs()
    monkeypatch.setattr(programs, "CAPACITY", 1000)  # So that the number of programs only grows.
    compiled = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(details)

    def count(function, *args):
        compiled.clear()
        before = len(programs._programs)
        function(*args)
        own = len(programs._programs) - before
        return own, len(compiled) - own

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


ORDINARY = ("ridge", "logistic", "network, classes", "process, numbers", "mixture")


def marked(name):
    return name if name in ORDINARY else pytest.param(name, marks=pytest.mark.extended)


@pytest.mark.extended
@pytest.mark.parametrize("name", [marked(name) for name in (*SUPERVISED, *UNSUPERVISED)])
def test_other_shapes_compile_few_programs(name, compilations):
    first, _ = compilations(fit, name, table(60, 6))
    assert first > 0
    assert compilations(fit, name, table(57, 6)) == (0, 0)
    own, others = compilations(fit, name, table(60, 9))
    assert 0 < own <= first
    assert others == 0
