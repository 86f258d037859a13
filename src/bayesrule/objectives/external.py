"""An objective whose data's loss is differentiated elsewhere: only its size and its prior are known."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from jaxtyping import Array, Bool, Int

from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .base import AbstractLoss, not_separable
from .regularizers import Regularizer, as_regularizer


class External(AbstractLoss):
    r"""$\barℓ(θ) = \sum_i ℓ_i(θ) + R(θ)$ where somebody else differentiates the sum: what `Rule.update` is given.

    Args:
        size: N, the number of training examples.
        regularizer: δ or another regularizer, as for `Objective`.
        prior: A family as the prior, instead of `regularizer`.
        batch_size: M, over how many examples a gradient is averaged; None where that is not known.
    """

    size: Any
    regularizer: Regularizer
    batch_size: Any
    aux: PyTree = None
    has_linear_outputs: ClassVar[bool] = False
    random: ClassVar[bool] = False
    takes_data: ClassVar[bool] = False
    keeps_partial_batch: ClassVar[bool] = False

    def __init__(self, size: Any, regularizer: Any = None, prior: Any = None, batch_size: Any = None):
        for name, number in (("size", size), ("batch_size", batch_size)):
            if isinstance(number, int | float) and not number > 0:
                raise ValueError(f"{name}= is a positive number of examples, got {number}.")
        self.size, self.batch_size = size, batch_size
        self.regularizer = as_regularizer(regularizer, prior)

    @property
    def knows_batch_size(self) -> bool:
        return self.batch_size is not None

    def share(self, batch: PyTree) -> Any:
        return None if self.batch_size is None else self.batch_size / self.size

    def data(self, theta: PyTree, batch: PyTree = None, aux: PyTree = None, key: Key | None = None) -> NoReturn:
        raise ValueError("The loss of this objective is evaluated elsewhere: only its gradient is known here.")

    def rows(self, batch: PyTree) -> int:
        return 0

    def select_rows(self, data: PyTree, index: Int[Array, " M"], is_row: Bool[Array, " M"]) -> PyTree:
        raise ValueError("The data of this objective are elsewhere.")

    def separable(self, needed_by: str) -> NoReturn:
        raise not_separable(needed_by)
