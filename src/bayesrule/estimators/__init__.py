"""scikit-learn estimators over the named models: `fit`, `predict` and `score`, and a posterior.

Each name is imported when it is first used, because most programs need one estimator and not all of them.
"""

from importlib import import_module
from typing import Any

# The module of every estimator. The registry reads the names in this order: the first that does a task is its default.
_MODULES = {
    "ridge": "RidgeRegression",
    "linear": "LogisticRegression PoissonRegression",
    "networks": "MLPClassifier MLPRegressor BinaryMLPClassifier",
    "gaussian_process": "GaussianProcessRegressor GaussianProcessClassifier",
    "state_space": "LinearGaussianStateSpace",
    "hmm": "GaussianHMM PoissonHMM CategoricalHMM",
    "mixture": "GaussianMixture",
    "topics": "LatentDirichletAllocation",
    "factor_analysis": "PPCA FactorAnalysis",
}
EXPORTS = {name: module for module, names in _MODULES.items() for name in names.split()}
"""The module of each public name."""

# A type checker reads the stub, which has them all.
__all__ = sorted(EXPORTS)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
