"""A plain function θ ↦ scalar as an objective: no examples, N = 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
from jaxtyping import Array, Bool, Int

from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .base import AbstractLoss, not_separable
from .batches import as_scalar
from .regularizers import Flat, Regularizer

if TYPE_CHECKING:
    from .objective import Objective


class Plain(AbstractLoss):
    """ℓ̄(θ) = function(θ, *arguments), evaluated with batch=None. What a bare function given to `fit` or `step` becomes.

    The arguments are pytrees of arrays. Data that are given as arguments, and not closed over by the function, may
    change without compiling it again.
    """

    function: Callable[..., Any] = eqx.field(static=True)
    arguments: tuple[PyTree, ...] = ()
    size: Any = 1
    regularizer: Regularizer = Flat()
    aux: PyTree = None
    has_linear_outputs: ClassVar[bool] = False
    random: ClassVar[bool] = False
    takes_data: ClassVar[bool] = False
    keeps_partial_batch: ClassVar[bool] = False

    def data(
        self, theta: PyTree, batch: PyTree = None, aux: PyTree = None, key: Key | None = None
    ) -> tuple[Array, PyTree]:
        return as_scalar(self.function(theta, *self.arguments), "the objective"), aux

    def rows(self, batch: PyTree) -> int:
        if batch is not None:
            raise ValueError("A plain function of θ takes no data: wrap a loss over examples in blr.Objective.")
        return 0

    def select_rows(self, data: PyTree, index: Int[Array, " M"], is_row: Bool[Array, " M"]) -> PyTree:
        raise ValueError("A plain function of θ has no data to select rows of.")

    def separable(self, needed_by: str) -> Objective:
        raise not_separable(needed_by)
