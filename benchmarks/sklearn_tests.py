"""scikit-learn's own test modules with this library's estimators in the place of scikit-learn's.

    python benchmarks/sklearn_tests.py [--only test_bayes test_gpr] [--own] [--list] [--out passes.md]

Every module is run by pytest in a process of its own, in which the names that it imports (`sklearn.linear_model.
LogisticRegression`, …) are the adapters below. An adapter is one of our estimators with scikit-learn's constructor:
a property for each of our parameters reads it off scikit-learn's (`prior_precision` is `1 / C`), and attributes that
have another name here are read off ours (`alpha_` is `1 / noise_`). It changes no other behaviour. Parameters that
choose among scikit-learn's solvers, starts and copies are accepted and have no effect.

`DIFFERENT` lists the tests that do not apply, each with its reason. They are not run, nor are those that scikit-learn
itself marks as failing. The others are counted: a test passes or it does not. `--own` runs the same tests with
scikit-learn's own estimators, which says how many of them can pass at all. `--list` prints the failures, and how many
tests are left out for each reason.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

MODULES = (
    "linear_model.tests.test_bayes",
    "linear_model.tests.test_logistic",
    "mixture.tests.test_gaussian_mixture",
    "mixture.tests.test_bayesian_mixture",
    "mixture.tests.test_mixture",
    "decomposition.tests.test_factor_analysis",
    "decomposition.tests.test_online_lda",
    "gaussian_process.tests.test_gpr",
    "gaussian_process.tests.test_gpc",
    "neural_network.tests.test_mlp",
)
PLACES = {  # The module that each replaced class is imported from.
    "BayesianRidge": "linear_model",
    "LogisticRegression": "linear_model",
    "GaussianMixture": "mixture",
    "BayesianGaussianMixture": "mixture",
    "FactorAnalysis": "decomposition",
    "LatentDirichletAllocation": "decomposition",
    "GaussianProcessRegressor": "gaussian_process",
    "GaussianProcessClassifier": "gaussian_process",
    "MLPClassifier": "neural_network",
    "MLPRegressor": "neural_network",
}

EXPECTED_TO_FAIL = "scikit-learn marks it as a test that may fail (xfail), and its own estimators fail most of them"
PRIVATE = "tests a private function, method or attribute of scikit-learn"
OTHER_CLASS = "tests another class, which this library does not have"
SOLVER = "tests a solver of scikit-learn other than the default one; here one algorithm stands for all of them"
PENALTY = "tests the L1 or elastic-net penalty: a Laplace prior has no Gaussian posterior here"
ARRAY_API = "tests arrays of other libraries (array API), which here become NumPy arrays"
WARM_START = "tests warm_start, which is not offered: partial_fit conditions on more rows, and *_init gives a start"
OUTPUTS = "tests several targets or labels at once; estimators here have one"
CALLABLE_KERNEL = "tests a kernel over strings written in Python, which can be neither compiled nor differentiated"
UNFITTED = "tests predictions before fit, which here raise NotFittedError"
CALLBACKS = "tests scikit-learn's callbacks"
NETWORK_SOLVER = "tests a schedule, early stopping or a solver of scikit-learn's networks; recipes have their own"
PREDICTIVE = "writes to coef_ or compares with probabilities at the coefficients; here they average over the posterior"
CV = "tests LogisticRegressionCV: here the strength of the prior is chosen by the evidence"
ITERATIONS = "tests the scores of fixed-point iterations; here the evidence is maximised directly"
STANDARDIZED = "the learnt precision is that of standardised columns, so that it is not one number for all of coef_"
PRIORS = "tests settings of scikit-learn's priors, or its Dirichlet process; here the priors are its default ones"
PARTIAL_FIT = "partial_fit here conditions on more rows, so that a hundred calls are not a hundred epochs of one fit"
OPTIMIZER = "tests an optimizer function or restarts of scikit-learn's search for the kernel"


class Different(NamedTuple):
    """Tests that do not apply: a module, a pattern of their names with parameters, and the reason."""

    module: str
    pattern: str
    reason: str


DIFFERENT = (
    # Bayesian ridge regression
    Different("test_bayes", r"test_(update_sigma|update_of_sigma_in_ard|toy_ard|ard_accuracy)", OTHER_CLASS),
    Different("test_bayes", r".*ARDRegression", OTHER_CLASS),
    Different("test_bayes", r"test_bayesian_ridge_score(s|_values)", ITERATIONS),
    Different("test_bayes", r"test_bayesian_(ridge_parameter|sample_weights|covariance_matrix)", STANDARDIZED),
    # Logistic regression
    Different("test_logistic", r".*array_api", ARRAY_API),
    Different("test_logistic", r".*callback", CALLBACKS),
    Different("test_logistic", r"test_\w*(logistic_cv|LogisticRegressionCV|regressioncv|regression_cv|_cv_)", CV),
    Different("test_logistic", r"test_(multinomial_cv_iris|logisticregressioncv|lr_scoring_warns)", CV),
    Different("test_logistic", r"test_(lr_cv|passing_params|get_default_scorer|scores_attribute)", CV),
    Different("test_logistic", r".*\[.*(LogisticRegressionCV|-cv|cv-)", CV),
    Different("test_logistic", r"test_(elastic|l1_ratio|logreg_l1|lr_penalty|LogisticRegression_elastic)", PENALTY),
    Different("test_logistic", r"test_(penalty_deprecated|penalty_none)", PENALTY),
    Different("test_logistic", r"test_\w*path", PRIVATE),
    Different("test_logistic", r"test_(warm_start|\w*warm_start)", WARM_START),
    Different(
        "test_logistic", r"test_(check_solver_option|saga_vs|newton_cholesky_fallback|single_feature_newton)", SOLVER
    ),
    Different("test_logistic", r"test_\w*liblinear", SOLVER),
    Different("test_logistic", r"test_\w+\[.*(liblinear|newton|sag)", SOLVER),
    Different("test_logistic", r"test_(sparsify|write_parameters)", PREDICTIVE),
    Different("test_logistic", r"test_logisticregression_warns_with_n_jobs", "tests a deprecated parameter"),
    Different("test_logistic", r"test_zero_max_iter", "tests a fit of no iterations, for which there is no posterior"),
    Different("test_logistic", r"test_logreg_predict_proba_multinomial", PREDICTIVE),
    Different("test_logistic", r"test_max_iter", "tests the wording of the warning of a solver"),
    # Mixtures
    Different(
        "test_gaussian_mixture",
        r"test_check_weights",
        "expects a message that calls the least weight the largest one, which here it does not",
    ),
    Different("test_gaussian_mixture", r".*array_api", ARRAY_API),
    Different("test_gaussian_mixture", r"test_(suffstat|gaussian_suffstat|compute_log_det)", PRIVATE),
    Different(
        "test_gaussian_mixture", r"test_gaussian_mixture_(log_probabilities|precisions_init\[|all_init)", PRIVATE
    ),
    Different("test_gaussian_mixture", r"test_(warm_start|convergence_detected_with_warm_start|monotonic)", WARM_START),
    Different(
        "test_gaussian_mixture", r"test_(max_iter_zero|init_means_not_duplicated)", "tests a fit of no iterations"
    ),
    Different("test_bayesian_mixture", r"test_log_(dirichlet|wishart)_norm", PRIVATE),
    Different("test_bayesian_mixture", r"test_compare_covar_type", PRIVATE),
    Different("test_bayesian_mixture", r"test_monotonic_likelihood", WARM_START),
    Different("test_bayesian_mixture", r"test_bayesian_mixture_\w+_prior_initialisation", PRIORS),
    Different("test_bayesian_mixture", r"test_bayesian_mixture_weights$", PRIORS),
    # Factor analysis: its one test is of everything at once.
    # Topics
    Different("test_online_lda", r"test_(dirichlet_expectation|lda_preplexity_mismatch)", PRIVATE),
    Different("test_online_lda", r"test_lda_fit_perplexity", "bound_ is the evidence bound here, not the perplexity"),
    Different("test_online_lda", r"test_verbosity", "tests the number of lines that verbose prints"),
    # Gaussian processes
    Different("test_gpr", r".*structured", CALLABLE_KERNEL),
    Different("test_gpc", r".*structured", CALLABLE_KERNEL),
    Different("test_gpr", r"test_gpr_predict_input_not_modified", CALLABLE_KERNEL),
    Different("test_gpr", r"test_(prior|no_fit_default_predict|\w+_shape_with_prior)", UNFITTED),
    Different("test_gpr", r"test_(y_multioutput|n_targets_error|constant_target)", OUTPUTS),
    Different("test_gpr", r"test_(predict_shapes|sample_y_shapes)\[(1|10)-", OUTPUTS),
    Different("test_gpr", r"test_custom_optimizer", OPTIMIZER),
    Different("test_gpc", r"test_custom_optimizer", OPTIMIZER),
    # Networks
    Different("test_mlp", r"test_(fit|gradient)$", PRIVATE),
    Different("test_mlp", r"test_lbfgs", NETWORK_SOLVER),
    Different(
        "test_mlp", r"test_(learning_rate|adaptive|shuffle|tolerance|n_iter_no_change|early_stopping)", NETWORK_SOLVER
    ),
    Different("test_mlp", r"test_mlp_(early_stopping|sample_weight_with_early|diverging|vs_poisson)", NETWORK_SOLVER),
    Different("test_mlp", r"test_(mlp_)?warm_start", WARM_START),
    Different("test_mlp", r"test_(multilabel|multioutput|predict_proba_multilabel)", OUTPUTS),
    Different("test_mlp", r"test_(minimum_input_sample_size|mlp_partial_fit_after_fit)", NETWORK_SOLVER),
    Different("test_mlp", r"test_alpha", "tests alpha=0, which is no prior; a network here has one"),
    Different("test_mlp", r"test_predict_proba_binary", "tests an activation function that networks here do not have"),
    Different(
        "test_mlp", r"test_sparse_matrices", "tests sparse rows, which linear models and topics take, and no network"
    ),
    Different("test_mlp", r"test_mlp_\w+_dtypes_casting", "random numbers in single precision are others in JAX"),
    Different("test_mlp", r"test_preserve_feature_names\[MLPC", "fits one class; a classifier here needs two"),
    Different("test_mlp", r"test_nonfinite_params", "inputs are standardised here, so that huge ones are none"),
    Different("test_mlp", r"test_partial_fit_(classification|regression)$", PARTIAL_FIT),
    Different("test_mlp", r"test_partial_fit_errors", NETWORK_SOLVER),
)


def reason_of(module: str, name: str) -> str | None:
    """Why a test does not apply; None if it does."""
    found = (row.reason for row in DIFFERENT if row.module == module and re.match(row.pattern, name))
    return next(found, None)


def build_adapters() -> dict[str, type]:
    """Our estimators with scikit-learn's constructors, by the names of the classes that they stand for."""
    import numpy as np
    from sklearn.gaussian_process import kernels as sklearn_kernels

    from bayesrule import estimators

    def constant(value: Any) -> Any:
        return property(lambda self: value)

    class BayesianRidge(estimators.RidgeRegression):
        recipe = constant("auto")
        prior_precision = constant("auto")
        noise = constant("auto")
        random_state = constant(None)
        alpha_ = property(lambda self: 1 / self.noise_)
        lambda_ = property(lambda self: self.prior_precision_)
        sigma_ = property(lambda self: _weight_covariance(self))

    class LogisticRegression(estimators.LogisticRegression):
        recipe = constant("laplace")
        batch_size = constant(None)
        prior_precision = property(lambda self: 1 / self.C)

    class GaussianMixture(estimators.GaussianMixture):
        method = constant("em")
        batch_size = constant(None)
        learning_decay = constant(0.7)
        learning_offset = constant(2.0)

    class BayesianGaussianMixture(GaussianMixture):
        method = constant("vmp")
        weights_init = constant(None)
        means_init = constant(None)
        precisions_init = constant(None)

    class FactorAnalysis(estimators.FactorAnalysis):
        method = constant("em")

    class LatentDirichletAllocation(estimators.LatentDirichletAllocation):
        method = property(lambda self: {"batch": "vmp", "online": "svi"}[self.learning_method])
        tol = constant(1e-3)

        def perplexity(self, X: Any, sub_sampling: bool = False) -> float:
            return super().perplexity(X)

    class GaussianProcessRegressor(estimators.GaussianProcessRegressor):
        n_inducing = constant(None)
        noise = property(lambda self: _noise_of(self))

        def _prepare_inputs(self, *args: Any) -> Any:
            return _with_parameters(super()._prepare_inputs, self, *args)

        def _scale_inputs(self, *args: Any) -> Any:
            return _with_parameters(super()._scale_inputs, self, *args)

    class GaussianProcessClassifier(estimators.GaussianProcessClassifier):
        method = constant("laplace")
        n_inducing = constant(None)
        class_weight = constant(None)

        def _prepare_inputs(self, *args: Any) -> Any:
            return _with_parameters(super()._prepare_inputs, self, *args)

        def _scale_inputs(self, *args: Any) -> Any:
            return _with_parameters(super()._scale_inputs, self, *args)

    def _noise_of(process: Any) -> Any:
        """scikit-learn's alpha is the noise, unless the kernel has a noise of its own, which is then learnt."""
        has_own = process.kernel is not None and "WhiteKernel" in repr(process.kernel)
        return "auto" if has_own else process.alpha

    def _with_parameters(prepare: Any, process: Any, *args: Any) -> Any:
        """Call a method with our values of the parameters that scikit-learn calls by the same name."""
        kernel, optimizer = process.kernel, process.optimizer
        if kernel is None:  # scikit-learn's default
            process.kernel = sklearn_kernels.ConstantKernel() * sklearn_kernels.RBF()
        process.optimizer = "bound" if optimizer == "fmin_l_bfgs_b" else optimizer
        try:
            return prepare(*args)
        finally:
            process.kernel, process.optimizer = kernel, optimizer

    class _Network:
        recipe = property(lambda self: {"lbfgs": "adam"}.get(self.solver, self.solver))
        temperature = constant(0.03)
        prior_precision = property(lambda self: self.alpha / self.temperature)
        samples = constant(32)
        class_weight = constant(None)
        noise = constant("auto")

    class MLPClassifier(_Network, estimators.MLPClassifier):
        pass

    class MLPRegressor(_Network, estimators.MLPRegressor):
        pass

    def _weight_covariance(ridge: Any) -> np.ndarray:
        covariance = np.asarray(ridge.posterior_.covariance())
        return covariance[-ridge.n_features_in_ :, -ridge.n_features_in_ :].astype(ridge.coef_.dtype)

    adapters = [BayesianRidge, LogisticRegression, GaussianMixture, BayesianGaussianMixture, FactorAnalysis]
    adapters += [LatentDirichletAllocation, GaussianProcessRegressor, GaussianProcessClassifier]
    adapters += [MLPClassifier, MLPRegressor]
    for adapter in adapters:  # Classes of this module, so that they can be pickled.
        adapter.__qualname__ = adapter.__name__
        globals()[adapter.__name__] = _with_constructor_of(adapter)
    return {adapter.__name__: adapter for adapter in adapters}


def _with_constructor_of(adapter: Any) -> type:
    """The adapter with the constructor of scikit-learn's class of the same name."""
    theirs = getattr(import_module(f"sklearn.{PLACES[adapter.__name__]}"), adapter.__name__)
    signature = inspect.signature(theirs.__init__)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        for name, value in list(bound.arguments.items())[1:]:
            setattr(self, name, value)

    __init__.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]  # Read by get_params.
    adapter.__init__ = __init__
    # Where ours has a parameter that theirs has not, and no property says what it is, it keeps our default.
    known = signature.parameters
    ours = next(kind for kind in adapter.__mro__[1:] if kind.__module__.startswith("bayesrule"))
    for name, parameter in inspect.signature(ours.__init__).parameters.items():
        if name not in known and not hasattr(adapter, name) and parameter.default is not parameter.empty:
            setattr(adapter, name, parameter.default)
    return adapter


# As a plugin of pytest, in the process of a module.


def pytest_configure(config: Any) -> None:
    if os.environ.get("SKLEARN_TESTS_OWN") != "1":
        for name, adapter in build_adapters().items():
            setattr(import_module(f"sklearn.{PLACES[name]}"), name, adapter)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    module = os.environ["SKLEARN_TESTS_MODULE"].rsplit(".", 1)[1]
    reasons = {item.name: EXPECTED_TO_FAIL if item.get_closest_marker("xfail") else None for item in items}
    reasons = {name: reason or reason_of(module, name) for name, reason in reasons.items()}
    config.left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    items[:] = [item for item in items if reasons[item.name] is None]


_outcomes: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: Any) -> None:
    name = report.nodeid.split("::")[-1]
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = "" if report.outcome != "failed" else str(crash.message if crash else report.longrepr)[:300]
        _outcomes[name] = {"outcome": report.outcome, "message": message, "seconds": report.duration}


def pytest_sessionfinish(session: Any) -> None:
    record = {"outcomes": _outcomes, "left_out": getattr(session.config, "left_out", {})}
    Path(os.environ["SKLEARN_TESTS_OUT"]).write_text(json.dumps(record), encoding="utf-8")


# As a script.


def run_module(module: str, own: bool) -> dict[str, Any]:
    """Run one module of tests in a process of its own, and return what the plugin recorded."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        settings = {
            "SKLEARN_TESTS_MODULE": module,
            "SKLEARN_TESTS_OUT": str(out),
            "SKLEARN_RUN_FLOAT32_TESTS": "1",
            "SKLEARN_TESTS_OWN": str(int(own)),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        command = [sys.executable, "-m", "pytest", "--pyargs", f"sklearn.{module}", "-p", "sklearn_tests"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--no-header", "--tb=short"]
        subprocess.run(command, cwd=folder, env={**os.environ, **settings}, stdout=subprocess.DEVNULL, check=False)
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of modules, such as test_bayes")
    parser.add_argument("--own", action="store_true", help="scikit-learn's own estimators, for comparison")
    parser.add_argument("--list", action="store_true", help="print the failures, and what is left out and why")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    lines = ["| module | apply | pass | share | left out | skipped |", "|---|---|---|---|---|---|"]
    totals: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for module in MODULES:
        name = module.rsplit(".", 1)[1]
        if options.only and name not in options.only:
            continue
        record = run_module(module, options.own)
        counts = Counter(outcome["outcome"] for outcome in record["outcomes"].values())
        apply = counts["passed"] + counts["failed"]
        row = {"apply": apply, "pass": counts["passed"], "out": len(record["left_out"]), "skip": counts["skipped"]}
        totals.update(row)
        reasons.update(record["left_out"].values())
        lines.append(_line(name, row))
        print(lines[-1], flush=True)
        if options.list:
            for test, outcome in record["outcomes"].items():
                if outcome["outcome"] == "failed":
                    message = " ".join(outcome["message"].split())
                    print(f"    {test} ({outcome['seconds']:.1f} s): {message[:180]}", flush=True)
    lines.append(_line("all", totals))
    print(lines[-1])
    if options.list:
        for reason, count in reasons.most_common():
            print(f"{count:5d}  {reason}")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(name: str, row: Any) -> str:
    share = f"{100 * row['pass'] / row['apply']:.0f} %" if row["apply"] else "–"
    return f"| {name} | {row['apply']} | {row['pass']} | {share} | {row['out']} | {row['skip']} |"


if __name__ == "__main__":
    main()
