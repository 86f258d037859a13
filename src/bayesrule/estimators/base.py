"""What every estimator shares: double precision inside, rows padded to buckets, seeds as keys, recipes by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from ..fitting.fit import fit
from ..fitting.progress import one_blas_thread
from ..fitting.result import Result
from ..rule.rule import Rule

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Estimator")


class Estimator(BaseEstimator):
    """An estimator over the rule.

    Fitted attributes are numbers, strings, NumPy arrays, the library's own families (with NumPy leaves), or plain
    containers of these: they pickle, and a saved run can hold them without code.
    """

    _watcher: Any = None
    _bounded: ClassVar[bool] = True
    """Whether the bound of its fits is one on the log evidence: not where q is colder than Bayes'."""

    def _run(self, rule: Rule, objective: Any, start: Any, data: PyTree = None, **options: Any) -> Result:
        """`fit`, or what stands in for it: the command line watches, saves and resumes the fits of an estimator."""
        watched = fit if self._watcher is None else self._watcher.fit
        return watched(rule, objective, start, data, **options)

    def _checked(self, X: Any) -> np.ndarray:
        """New rows, as scikit-learn checks them."""
        check_is_fitted(self)
        return np.asarray(validate_data(self, X, dtype=np.float64, reset=False))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_watcher"}


def double(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method in double precision, whatever the process has chosen for JAX: as scikit-learn's own estimators."""

    @wraps(method)
    def precise(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(True), one_blas_thread():
            return method(self, *args, **kwargs)

    return precise


def kept(tree: PyTree) -> PyTree:
    """With NumPy's arrays for JAX's, which would lose half of their digits where they are read in single precision."""
    return jax.tree.map(np.asarray, tree)


def key_of(random_state: Any) -> Any:
    """A JAX key from scikit-learn's `random_state`: a seed, a NumPy generator or None."""
    if random_state is not None and not isinstance(random_state, np.random.RandomState):
        random_state = int(random_state)  # the same seed is the same key, also as a NumPy integer
    if isinstance(random_state, int):
        return jax.random.key(random_state % 2**32)
    return jax.random.key(int(check_random_state(random_state).randint(2**31 - 1)))


def chosen(
    recipe: Any,
    named: Mapping[str, Callable[[], Rule]],
    estimator: Any,
    *,
    parameter: str = "recipe",
    example: str = "blr.vogn(1e-2)",
) -> Rule:
    """The rule that `recipe=` (or another parameter) stands for: a name, or a rule as it is."""
    if isinstance(recipe, Rule):
        return recipe
    if isinstance(recipe, str) and recipe in named:
        return named[recipe]()
    raise ValueError(
        f"{type(estimator).__name__} knows the {parameter}s {', '.join(map(repr, named))} and takes any rule, such as "
        f"{parameter}={example}; got {parameter}={recipe!r}."
    )
