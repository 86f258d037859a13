"""An exported linear model predicts with NumPy alone: in a process where JAX, SciPy and this library cannot be imported."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from bayesrule.estimators import GaussianMixture, LogisticRegression, PoissonRegression, RidgeRegression

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(60, 4)) * [1.0, 5.0, 0.1, 1.0] + [0.0, 3.0, 0.0, -1.0]
SCORE = X @ [1.0, 0.2, -3.0, 0.5]
NUMBERS = SCORE + 0.5 * RANDOM.normal(size=60)
LABELS = np.where(NUMBERS > 0.5, "yes", "no")
CLASSES = np.digitize(NUMBERS, [-0.5, 1.5])
COUNTS = RANDOM.poisson(np.exp(0.3 * SCORE))
WIDE = RANDOM.normal(size=(20, 110))
MODELS = {
    "ridge": (RidgeRegression(), X, NUMBERS),
    "ridge without intercept": (RidgeRegression(fit_intercept=False, prior_precision=1.0, noise=0.5), X, NUMBERS),
    "ridge of a wide table": (RidgeRegression(), WIDE, WIDE[:, 0]),
    "two classes": (LogisticRegression(), X, LABELS),
    "two classes, wide posterior": (LogisticRegression(prior_precision=1e-4), X, SCORE > 0.4),
    "two classes, independent weights": (LogisticRegression(recipe="mean_field"), X, LABELS),
    "three classes": (LogisticRegression(recipe="laplace"), X, CLASSES),
    "three classes without intercept": (LogisticRegression(recipe="laplace", fit_intercept=False), X, CLASSES),
    "three classes, one without weight": (LogisticRegression(recipe="laplace", class_weight={0: 1, 1: 0, 2: 1}), X, CLASSES),
    "by class": (LogisticRegression(recipe="by_class", prior_precision=1.0, max_iter=3), X, CLASSES),
    "counts": (PoissonRegression(), X, COUNTS),
}  # fmt: skip
SCRIPT = """
import sys
for name in ("jax", "scipy", "sklearn", "bayesrule"):
    sys.modules[name] = None
import importlib, pathlib
import numpy as np
for folder in sorted(pathlib.Path(".").iterdir()):
    sys.path.insert(0, str(folder))
    sys.modules.pop("predict", None)
    predict = importlib.import_module("predict")
    model = predict.load(folder / "model.npz")
    rows = np.load(folder / "rows.npy")
    results = {"predict": model.predict(rows)}
    if model.classes is None:
        results["std"] = model.predict(rows, return_std=True)[1]
    else:
        results["probabilities"] = model.predict_proba(rows)
    np.savez(folder / "results.npz", **results)
    sys.path.pop(0)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """All models fitted and exported, and what a process without JAX predicts with them."""
    root, fitted = tmp_path_factory.mktemp("exported"), {}
    for name, (model, x, y) in MODELS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # Three steps are enough to compare predictions.
            fitted[name] = model.fit(x, y)
        folder = fitted[name].export("numpy", root / name)
        np.save(folder / "rows.npy", 1.5 * x[::2])
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, check=True)
    return {name: (model, dict(np.load(root / name / "results.npz"))) for name, model in fitted.items()}


@pytest.mark.parametrize("name", MODELS)
def test_numpy_alone_predicts_the_same(name, exported):
    model, found = exported[name]
    rows = 1.5 * MODELS[name][1][::2]
    if hasattr(model, "classes_"):
        np.testing.assert_array_equal(found["predict"], model.predict(rows))
        np.testing.assert_allclose(found["probabilities"], model.predict_proba(rows), rtol=1e-12, atol=1e-14)
    else:
        mean, std = model.predict(rows, return_std=True)
        np.testing.assert_allclose(found["predict"], mean, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(found["std"], std, rtol=1e-12)


def test_only_what_can_be_exported(tmp_path):
    with pytest.raises(ValueError, match="not fitted"):
        RidgeRegression().export("numpy", tmp_path)
    with pytest.raises(ValueError, match='"numpy"'):
        RidgeRegression().fit(X, NUMBERS).export("onnx", tmp_path)
    assert not hasattr(GaussianMixture(), "export")
