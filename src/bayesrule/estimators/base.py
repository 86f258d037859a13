"""The base of all estimators: how a class describes itself, precision and dtypes, keys from seeds, rules by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

import jax
import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from ..fitting.fit import fit
from ..fitting.progress import one_blas_thread
from ..fitting.result import Result
from ..interop.dask import is_dask, map_rows
from ..numerics.disk_cache import keep_programs_in_workers
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..rule.rule import Rule

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Estimator")


@dataclass(frozen=True)
class Explain:
    """Which explanations of a fitted estimator a run can compute and a report can show.

    Args:
        weights: "coefficients" if `posterior_` is a Gaussian over {"w"} or {"b", "w"}, shown feature by feature;
            "layers" if it is over the weights of a network, shown layer by layer; None for neither.
        influence: the likelihood of a linear model, "normal", "logistic" or "poisson": with it, the influence of every
            training row follows from its site; None where rows have no sites.
    """

    weights: Literal["coefficients", "layers"] | None = None
    influence: Literal["normal", "logistic", "poisson"] | None = None


class Estimator(BaseEstimator):
    """The base of all estimators: scikit-learn's interface over fits by the Bayesian learning rule.

    Fitted attributes must be numbers, strings, NumPy arrays, families of this library (with NumPy leaves), or plain
    containers of these: then an estimator can be pickled, and a saved run can hold it without executable code.

    A class describes itself to the registry (`registry.py`), and through it to the command line, the runs and the
    report, by four attributes. One that only has scikit-learn's interface leaves them as they are.
    """

    model: ClassVar[str] = ""
    """The name that `bayesrule fit --model` calls it by; classes for different tasks share one."""
    tasks: ClassVar[tuple[str, ...]] = ()
    """The tasks that the command line uses this class for, of `bayesrule.tables.tasks.TASKS` or, where no column is
    predicted, of `registry.TASKS_WITHOUT_TARGET`."""
    title: ClassVar[str] = ""
    """What a report calls it, with the article inside a sentence: "a Gaussian process"."""
    explain: ClassVar[Explain] = Explain()
    """Which explanations a report can show."""
    draws_of_missing_inputs: ClassVar[int] = 4
    """How many draws of a training row's missing inputs the command line fits, each with a share of its weight."""
    refits_with_missing_inputs: ClassVar[int] = 0
    """How often the command line draws these inputs again, under the fitted model, and fits anew. It helps a model that
    depends on its inputs by curves, unlike the Gaussian from which they are drawn at first."""

    verbose: Any = False
    """Whether `fit` prints its progress; estimators that iterate have it as a parameter."""
    _watcher: Any = None
    _bound_is_evidence: ClassVar[bool] = True
    """Whether the bound of its fits bounds the log evidence. It does not at temperatures other than 1."""

    def _run(self, rule: Rule, objective: Any, start: Any, data: PyTree = None, **options: Any) -> Result:
        """Call `bayesrule.fit`, or the watcher of a run, which shows, saves and resumes the fits of an estimator."""
        if self._watcher is not None:
            return self._watcher.fit(rule, objective, start, data, **options)
        if self.verbose:
            options["progress"] = partial(_print_progress, type(self).__name__)
        return fit(rule, objective, start, data, **options)

    def _validate(self, X: Any) -> np.ndarray:
        """New rows as a float64 array, validated by scikit-learn against the training rows.

        Sparse rows, where the estimator says by its tags that it takes them, are made dense.
        """
        check_is_fitted(self)
        accept_sparse: Any = ["csr", "csc"] if self.__sklearn_tags__().input_tags.sparse else False
        return as_dense(validate_data(self, X, accept_sparse=accept_sparse, dtype=np.float64, reset=False))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_watcher"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        keep_programs_in_workers()
        super().__setstate__(state)


def row_by_row(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Let a method of (X, …) that treats every row by itself take a Dask collection, and return lazy Dask arrays."""

    @wraps(method)
    def wrapped(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        named: Any = dict(zip(inspect.signature(method).parameters, (self, *args), strict=False)) | kwargs
        X = named.get("X")
        if not is_dask(X):
            return method(self, *args, **kwargs)
        rest = {name: value for name, value in named.items() if name not in ("self", "X")}
        lazy: Any = map_rows(_call_method, X, self, method.__name__, rest)
        return lazy

    return wrapped


def _call_method(X: Any, estimator: Any, name: str, options: dict[str, Any]) -> Any:
    return getattr(estimator, name)(X, **options)


class Classifier(ClassifierMixin):
    """What all classifiers have in common, given `classes_` and `predict_proba`."""

    classes_: np.ndarray
    predict_proba: Callable[..., np.ndarray]

    @row_by_row
    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithm of `predict_proba`; −∞ for a class that had no weight in `fit`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    @row_by_row
    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        probabilities = self.predict_proba(X)
        return self.classes_[np.argmax(probabilities, axis=1)]


def _print_progress(name: str, result: Result) -> None:
    """Print how far a fit is, a few times a second; a progress function of `fit`."""
    kind = "bound" if len(result.trace.get("bound", ())) else "objective"
    values: Any = result.trace.get(kind, ())
    value = f", {kind} {float(values[-1]):.6g}" if len(values) else ""
    print(f"{name}: Iteration {result.steps}{value}", flush=True)


def as_dense(X: Any) -> np.ndarray:
    """Rows as an array: those of a sparse matrix are made dense, which needs room for all of its zeros."""
    if not sparse.issparse(X):
        return np.asarray(X)
    try:
        return np.asarray(X.toarray())
    except MemoryError as error:
        rows, columns = X.shape
        raise ValueError(
            f"A sparse X is made dense, and {rows:,} × {columns:,} numbers do not fit into memory: keep fewer columns "
            "(sklearn.feature_selection, TruncatedSVD), or give fewer rows at a time."
        ) from error


def input_dtype(X: Any) -> Any:
    """float32 if all of X is, or float64: the dtype of what is computed from it, by scikit-learn's convention."""
    dtypes = list(X.dtypes) if hasattr(X, "dtypes") and hasattr(X, "columns") else [getattr(X, "dtype", None)]
    is_single = bool(dtypes) and all(isinstance(dtype, np.dtype) and dtype == np.float32 for dtype in dtypes)
    return np.dtype(np.float32 if is_single else np.float64)


def in_dtype_of_inputs(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let a method of (X, …) return float32 for X in float32. It computes in double precision all the same."""

    @wraps(method)
    def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result = method(self, *args, **kwargs)
        if input_dtype(args[0] if args else next(iter(kwargs.values()))) == np.float64:
            return result
        return cast_results(result, np.float32)

    return wrapped


def cast_results(results: Any, dtype: Any) -> Any:
    """An array, or a tuple of arrays, in another floating dtype; labels and other objects as they are."""
    if isinstance(results, tuple):
        return tuple(cast_results(result, dtype) for result in results)
    is_float = isinstance(results, np.ndarray) and results.dtype.kind == "f"
    return results.astype(dtype) if is_float else results


def double_precision(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method in double precision, as scikit-learn's estimators do, whatever the process has set for JAX."""

    @wraps(method)
    def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(True), one_blas_thread():
            return method(self, *args, **kwargs)

    return wrapped


def to_numpy(tree: PyTree) -> PyTree:
    """Replace JAX's arrays by NumPy's: JAX would round them to single precision when they are used outside `fit`.

    The methods of a family with such arrays compute in double precision too (`numerics/own_precision.py`).
    """
    return jax.tree.map(np.asarray, tree)


def make_key(random_state: Any) -> Key:
    """A JAX key from scikit-learn's `random_state`: a seed, a NumPy RandomState, or None for a random key."""
    if random_state is not None and not isinstance(random_state, np.random.RandomState):
        random_state = int(random_state)  # The same seed gives the same key, also as a NumPy integer.
    if isinstance(random_state, int):
        return jax.random.key(random_state % 2**32)
    return jax.random.key(int(check_random_state(random_state).randint(2**31 - 1)))


def choose_rule(
    recipe: Any,
    named: Mapping[str, Callable[[], Rule]],
    estimator: Any,
    *,
    parameter: str = "recipe",
    example: str = "blr.vogn(1e-2)",
) -> Rule:
    """The rule that a parameter of an estimator stands for.

    Args:
        recipe: the value of the parameter, a rule or one of the names.
        named: functions that make the rules which have names.
        estimator: whose parameter it is, named in the error.
        parameter: the parameter's name, for the error.
        example: a rule that suits the estimator, for the error.
    """
    if isinstance(recipe, Rule):
        return recipe
    if isinstance(recipe, str) and recipe in named:
        return named[recipe]()
    raise ValueError(
        f"{type(estimator).__name__} knows the {parameter}s {', '.join(map(repr, named))} and takes any rule, such as "
        f"{parameter}={example}; got {parameter}={recipe!r}."
    )
