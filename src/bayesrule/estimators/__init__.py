"""scikit-learn estimators: `fit`, `predict` and `score` over the named models, and a posterior beside them.

Names load when first used.
"""

from importlib import import_module
from typing import Any

# Where each estimator lives; the command line reads the names too.
_MODULES = {
    "linear": "RidgeRegression LogisticRegression PoissonRegression",
    "networks": "MLPClassifier MLPRegressor BinaryMLPClassifier",
    "gaussian_process": "GaussianProcessRegressor GaussianProcessClassifier",
    "mixture": "GaussianMixture",
    "topics": "LatentDirichletAllocation",
    "factor_analysis": "PPCA FactorAnalysis",
    "hmm": "GaussianHMM PoissonHMM CategoricalHMM",
    "state_space": "LinearGaussianStateSpace",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
