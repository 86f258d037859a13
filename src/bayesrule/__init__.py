"""The Bayesian learning rule of Khan and Rue (JMLR 2023): one update, and the algorithms that follow from it.

Names load when first used, so importing the package costs nothing.
"""

from importlib import import_module
from typing import Any

# Where each public name lives. `__init__.pyi` says the same to type checkers; a test holds the two together.
_MODULES = {
    "rule": "Rule",
    "state": "State Info",
    "objective": "Objective Weighted Microbatches",
    "points": "Delta MonteCarlo QuasiMonteCarlo Quadrature Exact Enumeration",
    "relaxed": "Relaxed Sign Masks Each",
    "curvature": "Gradient SquaredGradient Stein",
    "hessians": "Hessian HessianDiagonal GaussNewton GeneralizedGaussNewton",
    "score": "Reparameterized Score",
    "steps": "Steps Sweep Rates GradientAverage Scaling",
    "guards": "Backtracking Retraction NoGuard Boundary",
    "fitting": "fit Result save",
    "runs": "Run load",
    "minima": "Minimum",
    "search": "Search",
    "model": "Model",
    "rows": "Masked Ragged Rows",
    "factor": "Factor",
    "factors": "",
    "sites": "Sites",
    "leaving": "LeaveOneOut leave_one_out",
    "prediction": "predict",
    "metrics": "",
    "evidence": "empirical_bayes tuned matched",
    "families": "FixedGaussian DiagonalGaussian Gaussian SharedGaussian LowRankGaussian KroneckerGaussian SpikeSlab "
    "Mixture StudentT SkewGaussian Bernoulli Categorical CategoricalChain Dirichlet Beta Gamma Wishart NormalGamma "
    "NormalWishart Poisson Product Peak GaussianProcess GaussianChain BandedGaussian StateSpace Family "
    "ExponentialFamily",
    "recipes": "sgd rmsprop adam dropout ogn oggn vogn voggn ivon slang straight_through bayesbinn "
    "gradient_descent newton von multimodal conjugate laplace em svi vmp ncvmp cvi exponential_weights table",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"{__name__}.{name}")
    elif name == "__version__":
        value = import_module("importlib.metadata").version(__name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
