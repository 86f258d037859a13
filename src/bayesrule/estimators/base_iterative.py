"""Fits that take steps until they settle: the method by name, the best of several starts, and what ended them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree
from sklearn.exceptions import ConvergenceWarning

from ..factor_graph.model import Model
from ..families.product import Product
from ..fitting.fit import fit
from ..fitting.result import Result
from ..numerics.checks import positive_int
from ..numerics.padding import bucket
from ..recipes import em, svi, vmp
from ..rule.rule import Rule
from .base import Estimator, chosen, kept, key_of

Build = Callable[[str, Any], Model]
"""A model with priors of this kind, "flat" or "default", from a start that the key draws."""


def padded_rows(rows: int) -> int:
    """The bucket of so many rows, 160 at least: such fits are a moment's, and compiling takes longer."""
    return bucket(rows, least=160)


@dataclass(frozen=True)
class Falling:
    """The rate $(t + t_0)^{−κ}$ of step t; equal ones are the same rate to a compiled program."""

    offset: float
    decay: float

    def __call__(self, count: Any) -> Any:
        return (count + self.offset) ** -self.decay


class Found(NamedTuple):
    """A fit, the model and the bound that it ended with."""

    model: Model
    result: Result
    bound: float


class Iterated(Estimator):
    """Steps of `method` from each of `n_init` starts until one could gain less than `tol` nats for each row."""

    _methods: ClassVar[Mapping[str, Callable[..., Rule]]] = MappingProxyType(
        {"em": partial(em, order="parallel"), "vmp": partial(vmp, order="parallel")}
    )
    _advice: ClassVar[str] = "take fewer components, or method='vmp', whose priors keep every one in place"
    _evident: ClassVar[bool] = False  # EM's log-likelihood is a score without a program of its own
    method: Any
    max_iter: int
    tol: float
    n_init: int = 1
    random_state: Any

    def _rule(self) -> Rule:
        return chosen(self.method, self._methods, self, parameter="method", example="blr.vmp(0.5)")

    def _settle(
        self, build: Build, data: PyTree, rows: int, batch_size: int | None = None, rule: Rule | None = None
    ) -> Found:
        """The best of all starts; with a batch size, `max_iter` passes over the data."""
        check_positive_ints(self, "max_iter", "n_init")
        if not self.tol >= 0:
            raise ValueError(f"tol= is 0 or more nats for each row, got {self.tol!r}.")
        rule, found = self._rule() if rule is None else rule, []
        for key in jax.random.split(key_of(self.random_state), self.n_init):
            start, order = jax.random.split(key)
            model = build("flat" if rule.name == "em" else "default", start)
            if batch_size is None:
                how: dict[str, Any] = {"steps": self.max_iter, "tolerance": self.tol * rows}
            else:
                how = {"steps": self.max_iter * -(-rows // batch_size), "batch_size": batch_size}
            result = self._run(rule, model, None, data, key=order, **how)
            if rule.name == "em" and batch_size is None and self._evident:
                bound = result.trace["bound"][-1]  # of the step before, enough to choose by
            else:
                bound = result.bound if batch_size is None else fit(svi(1.0), model, result.q, data, steps=0).bound
            found.append(Found(model, result, float(np.nan if bound is None else bound)))
        return max(found, key=lambda one: -np.inf if np.isnan(one.bound) else one.bound)

    def _keep(self, found: Found, q: Product | None = None) -> None:
        """What every fit leaves behind; a posterior of what all rows share, not of each row's own."""
        result, name = found.result, type(self).__name__
        blocks = (result.q if q is None else q).blocks
        self.posterior_: Any = kept(Product({n: blocks[n] for n in blocks if n not in found.model.local}))
        self.bound_ = found.bound
        self.n_iter_ = result.steps
        falling = "bound" not in result.trace or self.method == "svi"  # steps that shrink do not say when all is done
        self.converged_ = result.reason == "converged" or (falling and result.reason == "steps")
        if result.reason == "steps" and not self.converged_:
            said = (
                f"{name} did not converge in {self.max_iter} iterations: raise max_iter, or tol if it is close enough."
            )
            warnings.warn(said, ConvergenceWarning, stacklevel=4)  # at the call of `fit`, which runs in `double`
        elif not self.converged_:
            said = f"{name} ended after {result.steps} iterations ({result.reason}): {self._advice}."
            warnings.warn(said, ConvergenceWarning, stacklevel=4)


def check_positive_ints(estimator: Any, *names: str) -> None:
    """Raise unless these parameters of the estimator are integers of at least 1."""
    for name in names:
        positive_int(name, getattr(estimator, name))
