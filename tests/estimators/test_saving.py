"""Whatever an estimator holds after a fit can be written to a file and read back, for every estimator there is."""

import jax
import numpy as np
import pytest

from bayesrule import estimators
from bayesrule.fitting.checkpoint import read, write
from bayesrule.runs.store import _attributes, _restore

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 2))
LABELS = (X[:, 0] + 0.5 * RANDOM.normal(size=24) > 0).astype(int)
NUMBERS = X @ [1.0, -0.5] + 0.1 * RANDOM.normal(size=24)
COUNTS = RANDOM.poisson(np.exp(0.3 * X[:, 0]))
WORDS = RANDOM.poisson(2.0, size=(24, 5))
# Each estimator with few steps, and its data.
FITS = {
    "RidgeRegression": ({}, (X, NUMBERS)),
    "LogisticRegression": ({"recipe": "laplace"}, (X, LABELS)),
    "PoissonRegression": ({"recipe": "laplace"}, (X, COUNTS)),
    "MLPClassifier": ({"hidden_layer_sizes": (3,), "max_iter": 2, "samples": 2}, (X, LABELS)),
    "MLPRegressor": ({"hidden_layer_sizes": (3,), "max_iter": 2, "samples": 2}, (X, NUMBERS)),
    "BinaryMLPClassifier": ({"hidden_layer_sizes": (3,), "max_iter": 2}, (X, LABELS)),
    "GaussianProcessRegressor": ({"optimizer": None, "noise": 0.1}, (X, NUMBERS)),
    "GaussianProcessClassifier": ({"optimizer": None, "method": "laplace"}, (X, LABELS)),
    "GaussianMixture": ({"n_components": 2, "max_iter": 2}, (X,)),
    "LatentDirichletAllocation": ({"n_components": 2, "max_iter": 2}, (WORDS,)),
    "PPCA": ({"n_components": 1, "max_iter": 2}, (X,)),
    "FactorAnalysis": ({"n_components": 1, "max_iter": 2}, (X,)),
    "GaussianHMM": ({"n_components": 2, "max_iter": 2}, (X,)),
    "PoissonHMM": ({"n_components": 2, "max_iter": 2}, (WORDS[:, :1],)),
    "CategoricalHMM": ({"n_components": 2, "max_iter": 2}, (WORDS[:, :1],)),
    "LinearGaussianStateSpace": ({"max_iter": 2}, (NUMBERS[:, None],)),
}


def test_every_estimator_is_listed():
    assert set(FITS) == set(estimators.__all__)


@pytest.mark.sampled("BinaryMLPClassifier", "GaussianProcessRegressor", "CategoricalHMM")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", FITS)
def test_a_fitted_estimator_comes_back_from_a_file(name, tmp_path):
    params, data = FITS[name]
    fitted = getattr(estimators, name)(**params).fit(*data)
    write(tmp_path / "fitted.npz", _attributes(fitted))
    restored = _restore(name, fitted.get_params(), read(tmp_path / "fitted.npz"))
    assert jax.tree.structure(_attributes(restored)) == jax.tree.structure(_attributes(fitted))
    jax.tree.map(np.testing.assert_array_equal, _attributes(restored), _attributes(fitted))
