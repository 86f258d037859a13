"""The base of estimators that iterate to convergence, such as EM: methods by name, several starts, warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from ..factor_graph.model import Model
from ..families.product import Product
from ..fitting.fit import fit
from ..fitting.result import Result
from ..numerics.checks import positive_int
from ..numerics.padding import bucket
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..recipes import em, svi, vmp
from ..rule.rule import Rule
from .base import Estimator, choose_rule, make_key, to_numpy

BuildModel = Callable[[str, Key, int], Model]
"""Makes a model from the kind of its priors, "flat" or "default", a key that draws a start, and the start's number."""


def padded_rows(rows: int) -> int:
    """Number of rows to pad to: the bucket of `rows`, at least 160, because for small data compilation dominates."""
    return bucket(rows, least=160)


@dataclass(frozen=True)
class PowerDecay:
    """The rate $(t + t_0)^{−κ}$ at step t. A dataclass, because equal rates must not make a program compile again."""

    offset: float
    decay: float

    def __call__(self, count: Any) -> Any:
        return (count + self.offset) ** -self.decay


class FittedModel(NamedTuple):
    """A model, the result of fitting it, the bound at the result (NaN where there is none), and the bound's error."""

    model: Model
    result: Result
    bound: float
    bound_error: float | None


class IterativeEstimator(Estimator):
    """Steps of `method`, from each of `n_init` starts, until less than `tol` nats for each row are still to gain.

    That is an estimate, from how the steps shrink (`fitting/convergence.py`).
    """

    _methods: ClassVar[Mapping[str, Callable[..., Rule]]] = MappingProxyType(
        {"em": partial(em, order="parallel"), "vmp": partial(vmp, order="parallel")}
    )
    """The rules that `method=` names."""
    _advice: ClassVar[str] = "take fewer components, or method='vmp', whose priors keep components from collapsing"
    """What to do if a fit ends early, for the warning."""
    _computes_likelihood: ClassVar[bool] = False
    """Whether the estimator computes EM's log-likelihood itself. Then the starts are compared by the bound of the last
    step, which needs no further program."""
    method: Any
    max_iter: int
    tol: float
    n_init: int = 1
    random_state: Any

    def _rule(self) -> Rule:
        return choose_rule(self.method, self._methods, self, parameter="method", example="blr.vmp(0.5)")

    def _fit_starts(
        self, build: BuildModel, data: PyTree, rows: int, batch_size: int | None = None, rule: Rule | None = None
    ) -> FittedModel:
        """Fit from every start, and return the fit with the highest bound.

        Args:
            build: makes the model for each start.
            data: the data of the fits.
            rows: the number of rows that are not padding.
            batch_size: rows of a mini-batch, with which `max_iter` counts passes over the data; None for full batches.
            rule: the algorithm, by default the one of `method`.
        """
        check_positive_ints(self, "max_iter", "n_init")
        if not self.tol >= 0:
            raise ValueError(f"tol= is 0 or more nats for each row, got {self.tol!r}.")
        rule = self._rule() if rule is None else rule
        is_em = rule.name == "em"
        if batch_size is None:
            options: dict[str, Any] = {"steps": self.max_iter, "tolerance": self.tol * rows}
        else:
            options = {"steps": self.max_iter * -(-rows // batch_size), "batch_size": batch_size}
        fits = []
        # As many keys as the split below has, at least: one program serves both, and the keys are the same.
        keys = jax.random.split(make_key(self.random_state), max(2, self.n_init))
        for number, key in zip(range(self.n_init), keys, strict=False):
            start_key, batch_key = jax.random.split(key)
            model = build("flat" if is_em else "default", start_key, number)
            result = self._run(rule, model, None, data, key=batch_key, **options)
            if is_em and batch_size is None and self._computes_likelihood:
                bound, error = result.trace["bound"][-1], 0.0  # These models have their bound in closed form.
            else:  # Mini-batches only estimate the bound; a fit of no steps evaluates it on all rows.
                whole = result if batch_size is None else fit(svi(1.0), model, result.q, data, steps=0)
                bound, error = whole.bound, whole.bound_error
            fits.append(FittedModel(model, result, float(np.nan if bound is None else bound), error))
        return max(fits, key=lambda fitted: -np.inf if np.isnan(fitted.bound) else fitted.bound)

    def _set_attributes(self, fitted: FittedModel, q: Product | None = None) -> None:
        """Set `posterior_`, `bound_`, `bound_error_`, `n_iter_` and `converged_`, and warn if the fit did not converge.

        `posterior_` has the blocks that all rows share (of `q`, by default of the result), not those of each row.
        """
        result, name = fitted.result, type(self).__name__
        blocks = (result.q if q is None else q).blocks
        self.posterior_: Any = to_numpy(Product({n: blocks[n] for n in blocks if n not in fitted.model.local}))
        self.bound_, self.bound_error_ = fitted.bound, fitted.bound_error
        self.n_iter_ = result.steps
        # Stochastic steps with decaying rates have no test of convergence: taking all of them is success.
        stochastic = "bound" not in result.trace or self.method == "svi"
        self.converged_ = result.reason == "converged" or (stochastic and result.reason == "steps")
        if self.converged_:
            return
        advice = f"{self._advice}." if result.explanation is None else result.explanation
        message = f"{name} ended after {result.steps} iterations ({result.reason}): {advice}"
        if result.reason == "steps":
            message = (
                f"{name} did not converge in {self.max_iter} iterations: raise max_iter, or tol if it is close enough."
            )
        # The warning points at the caller of `fit`, which runs inside `double_precision`.
        warnings.warn(message, ConvergenceWarning, stacklevel=4)


def check_positive_ints(estimator: Any, *names: str) -> None:
    """Raise unless these parameters of the estimator are integers of at least 1."""
    for name in names:
        positive_int(name, getattr(estimator, name))
