"""The Bayesian learning rule of Khan and Rue (JMLR 2023): one update, and the algorithms that follow from it.

Names load when first used, so importing the package costs nothing.
"""

import sys
from importlib import import_module
from typing import Any

if "multiprocessing" in sys.modules:  # Every worker process has it.
    from .numerics.disk_cache import quiet_workers

    quiet_workers()

# Where each public name lives. `__init__.pyi` says the same to type checkers; a test holds the two together.
_MODULES = {
    "rule.rule": "Rule",
    "rule.state": "State Info",
    "rule.describe": "difference",
    "rule.multistart": "Search",
    "objectives.objective": "Objective",
    "objectives.batches": "Weighted Microbatches",
    "streams.stream": "stream",
    "streams.base": "Stream",
    "numerics.disk_cache": "keep_programs",
    "numerics.frozen": "freeze join",
    "points.base": "Delta Exact",
    "points.sampling": "MonteCarlo QuasiMonteCarlo",
    "points.shard_samples": "ShardSamples",
    "points.quadrature": "Quadrature Enumeration",
    "points.relaxed": "Relaxed Sign",
    "points.masks": "Masks",
    "points.by_block": "Each",
    "curvature.gradient": "Gradient SquaredGradient",
    "curvature.stein": "Stein",
    "curvature.hessian": "Hessian HessianDiagonal",
    "curvature.gauss_newton": "GaussNewton GeneralizedGaussNewton",
    "curvature.score": "Reparameterized Score",
    "steps.steps": "Steps",
    "steps.schedule": "Rates",
    "steps.averages": "GradientAverage Shaping Trace WeightDecay",
    "steps.scaling": "Scaling",
    "steps.warm_up": "WarmUp",
    "steps.window": "Window",
    "steps.sweep": "Sweep",
    "steps.acceleration": "Anderson",
    "steps.guards": "Backtracking Retraction NoGuard Boundary",
    "factor_graph.model": "Model",
    "factor_graph.data": "Masked Ragged Rows",
    "factor_graph.factor": "Factor",
    "factor_graph.sites": "Sites",
    "factor_graph.leave_one_out": "LeaveOneOut leave_one_out",
    "fitting.fit": "fit",
    "fitting.checkpointing": "Checkpoint",
    "fitting.run": "run Fitted",
    "fitting.sharding": "shard shard_parameters rows_of_process",
    "fitting.sharded_checkpoint": "ShardedCheckpoint",
    "fitting.processes": "join_processes",
    "fitting.reason": "Reason",
    "fitting.result": "Result save",
    "fitting.starts": "Starts",
    "fitting.minima": "Minimum",
    "fitting.predict": "predict",
    "fitting.choose_prior": "choose_prior ChosenPrior",
    "fitting.choose_width": "choose_width ChosenWidth",
    "fitting.empirical_bayes": "empirical_bayes tuned matched",
    "inference.infer": "infer",
    "inference.posterior": "Posterior",
    "runs": "Run load",
    "families": "FixedGaussian DiagonalGaussian Gaussian SharedGaussian LowRankGaussian KroneckerGaussian SpikeSlab "
    "Mixture StudentT SkewGaussian Bernoulli Categorical CategoricalChain Dirichlet Beta Gamma Wishart NormalGamma "
    "NormalWishart Poisson Product Peak PointMass GaussianProcess GaussianChain BandedGaussian StateSpace Family "
    "BlockDiagonalGaussian SecondMomentGaussian ExponentialFamily",
    "recipes": "sgd rmsprop adam adamw vadam dropout ogn oggn vogn voggn ivon slang straight_through bayesbinn "
    "gradient_descent newton von multimodal conjugate laplace em svi vmp ncvmp cvi exponential_weights table",
}
_PUBLIC_MODULES = ("estimators", "factors", "families", "metrics", "models", "recipes")
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

# A type checker reads the stub, which has them all.
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _PUBLIC_MODULES:
        value = import_module(f"{__name__}.{name}")
    elif name == "__version__":
        value = import_module("importlib.metadata").version(__name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PUBLIC_MODULES, "__version__"})
