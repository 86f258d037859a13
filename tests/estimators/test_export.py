"""An exported linear model predicts with NumPy alone, where JAX, SciPy and this library cannot be imported."""

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
WITHOUT_WEIGHT = {0: 1, 1: 0, 2: 1}
ORDINARY = {
    "ridge": (RidgeRegression(), X, NUMBERS),
    "ridge without intercept": (RidgeRegression(fit_intercept=False, prior_precision=1.0, noise=0.5), X, NUMBERS),
    "ridge of a wide table": (RidgeRegression(), WIDE, WIDE[:, 0]),
    "two classes": (LogisticRegression(recipe="laplace", prior_precision=1.0), X, LABELS),
    "two classes, wide posterior": (LogisticRegression(recipe="laplace", prior_precision=1e-4), X, SCORE > 0.4),
    "three classes": (LogisticRegression(recipe="laplace", prior_precision=1.0), X, CLASSES),
    "counts": (PoissonRegression(recipe="laplace", prior_precision=1.0), X, COUNTS),
}
OTHERS = {
    "default settings": (LogisticRegression(), X, LABELS),
    "independent weights": (LogisticRegression(recipe="mean_field"), X, LABELS),
    "no intercept": (LogisticRegression(recipe="laplace", fit_intercept=False), X, CLASSES),
    "one without weight": (LogisticRegression(recipe="laplace", class_weight=WITHOUT_WEIGHT), X, CLASSES),
    "by class": (LogisticRegression(recipe="by_class", prior_precision=1.0, max_iter=3), X, CLASSES),
    "three classes of a wide table": (LogisticRegression(recipe="laplace"), WIDE, np.arange(20) % 3),
    "default settings for counts": (PoissonRegression(), X, COUNTS),
}
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


def predict_with_numpy(models, root):
    """Fit and export all models; what a process without JAX predicts with each."""
    for name, (model, x, y) in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # Three steps are enough to compare predictions.
            model.fit(x, y)
        folder = model.export("numpy", root / name)
        np.save(folder / "rows.npy", 1.5 * x[::2])
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, check=True)
    return {name: dict(np.load(root / name / "results.npz")) for name in models}


def check(models, root):
    for name, found in predict_with_numpy(models, root).items():
        model, rows = models[name][0], 1.5 * models[name][1][::2]
        if hasattr(model, "classes_"):
            np.testing.assert_array_equal(found["predict"], model.predict(rows), err_msg=name)
            expected = model.predict_proba(rows)
            np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-12, atol=1e-14, err_msg=name)
        else:
            mean, std = model.predict(rows, return_std=True)
            np.testing.assert_allclose(found["predict"], mean, rtol=1e-12, atol=1e-13, err_msg=name)
            np.testing.assert_allclose(found["std"], std, rtol=1e-12, err_msg=name)


def test_numpy_alone_predicts_the_same(tmp_path):
    check(ORDINARY, tmp_path)


@pytest.mark.extended
def test_numpy_alone_predicts_the_same_for_other_posteriors(tmp_path):
    check(OTHERS, tmp_path)


def test_only_what_can_be_exported(tmp_path):
    with pytest.raises(ValueError, match="not fitted"):
        RidgeRegression().export("numpy", tmp_path)
    with pytest.raises(ValueError, match='"numpy"'):
        RidgeRegression().fit(X, NUMBERS).export("onnx", tmp_path)
    assert not hasattr(GaussianMixture(), "export")
