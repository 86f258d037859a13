"""The interface of an objective ℓ̄(θ): what the rule, the points and `fit` ask of it.

There are five final kinds: a plain function of θ (`Plain`), a sum over independent examples (`Objective`), a loss of
a whole batch (`Batched`), the factors of a log-joint (`factor_graph.Model`), and a loss that somebody else
differentiates (`External`). Each answers the questions below for
itself, so that no caller asks which kind it holds.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array, Bool, Int

from ..families.base import ExponentialFamily, Family, Served
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .batches import count_weight
from .regularizers import Regularizer

if TYPE_CHECKING:
    from typing import ClassVar as AbstractClassVar  # as equinox advises: pyright knows no other spelling

    from .objective import Objective
else:
    from equinox import AbstractClassVar


class AbstractObjective(eqx.Module, Generic[Served]):
    r"""$\barℓ(θ) = ℓ(θ; \text{data}) + R(θ)$, the function whose expectation under q the rule lowers.

    A kind of objective is final: it implements every abstract method, and nothing is derived from it.
    """

    size: AbstractVar[Any]
    """N, the number of training examples that ℓ̄ sums over; 1 for a plain function."""
    regularizer: AbstractVar[Regularizer]
    """R, which is never sampled: the rule adds its exact derivatives."""
    aux: AbstractVar[PyTree]
    """What the state carries from step to step for the loss (batch statistics), as it is before the first step."""
    has_linear_outputs: AbstractClassVar[bool]
    """Whether the loss is one of outputs that are linear in θ; then it is `separable`, and `linearized` there."""
    random: AbstractClassVar[bool]
    """Whether the loss itself is random, so that evaluating it takes a key."""
    takes_data: AbstractClassVar[bool]
    """Whether there are data to evaluate the loss on, and hence batches."""
    keeps_partial_batch: AbstractClassVar[bool]
    """Whether the last batch of an epoch may be smaller; else `fit` drops the examples left over in each epoch."""
    splits_batches: AbstractClassVar[bool]
    """Whether a batch may be measured in parts (`Microbatches`), whose losses add up."""

    @property
    def knows_batch_size(self) -> bool:
        """Whether it can tell how many examples a batch has, so that a precision may start from what a batch shows."""
        return True

    @abstractmethod
    def data(
        self, theta: PyTree, batch: PyTree = None, aux: PyTree = None, key: Key | None = None
    ) -> tuple[Array, PyTree]:
        """Estimate the data's part of ℓ̄ at one θ from a batch.

        Args:
            theta: The parameters.
            batch: The examples, or None where there are none.
            aux: What the state carries for the loss.
            key: A key for a random loss. One step may evaluate the loss several times with the same key, so that it
                compares values under the same noise.

        Returns:
            Σᵢ ℓ(θ, exampleᵢ), scaled from the batch to all N examples and without R, and the new aux.
        """

    @abstractmethod
    def expected(self, q: Served, shift: PyTree, batch: PyTree, aux: PyTree, key: Key | None) -> tuple[Array, PyTree]:
        """Evaluate E_q ℓ as a function of the expectation parameters: what `Exact` points are for.

        Args:
            q: The member at which to evaluate: an exponential family, for a `Model` a `Product` of its blocks.
            shift: A displacement δ of μ, of the structure of `q.expectation()`; None is zero. The gradient of the
                result in δ at 0 is ∇_μ E_q ℓ.
            batch, aux, key: As in `data`.

        Returns:
            E ℓ at μ + δ and the new aux.
        """

    @abstractmethod
    def starting_point(self, params: Any) -> Any:
        """Complete what the user gave `rule.init` as a start, before the family makes a q of it."""

    @abstractmethod
    def with_size(self, rows: int) -> Self:
        """This objective with N set to the number of rows, if it was built without one. Called once per fit."""

    @abstractmethod
    def rows(self, batch: PyTree) -> int:
        """Count the rows of a batch (or of all data), and raise where its arrays disagree; 0 if there are no data."""

    @abstractmethod
    def share(self, batch: PyTree) -> Any:
        """M/N, the part of the data that a batch stands for; None where there are no data, or N is not known."""

    @abstractmethod
    def select_rows(self, data: PyTree, index: Int[Array, " M"], is_row: Bool[Array, " M"]) -> PyTree:
        """Make a mini-batch from rows of the data, inside the compiled loop.

        Args:
            data: All data, as given to `fit`.
            index: Which rows.
            is_row: False for entries of `index` that only pad the last batch of an epoch to the size of the others.
                All True unless `keeps_partial_batch`.

        Returns:
            A batch that `data` and `expected` accept, which stands for as many rows as are not padding.
        """

    @abstractmethod
    def prepare(self, batch: PyTree) -> PyTree:
        """Compute from all data what every full-batch step would compute again; called once, inside the loop's jit."""

    @abstractmethod
    def judges_steps(self, batch: PyTree) -> bool:
        """Whether the loss on this batch says if a step was good, so that a monotone guard may look at it.

        Where it does not, `Guard.without_judge` takes the guard's place.
        """

    @abstractmethod
    def for_data(self, data: PyTree) -> "tuple[AbstractObjective, PyTree]":
        """The objective and the data in the form that suits what the data hold; called once by `fit`, before `jit`."""

    @abstractmethod
    def check_data(self, q: Served, data: PyTree) -> None:
        """Raise a ValueError where the data do not match the objective, before `fit` compiles anything."""

    @abstractmethod
    def closed_form_bound(self, q: Served, batch: PyTree, key: Key | None) -> Array | None:
        """The evidence lower bound at q where the objective has it in closed form.

        None where it takes a rule's points and curvature to estimate E_q ℓ.
        """

    @abstractmethod
    def explain_not_finite(self, q: Served, data: PyTree) -> str | None:
        """Say which part of the objective is not finite at q, for the error of `fit`; None if that is not known."""

    @abstractmethod
    def separable(self, needed_by: str) -> "Objective":
        """This objective as a sum of independent examples' losses, each of which can be differentiated by itself.

        Args:
            needed_by: The piece that needs it, for the error.

        Raises:
            ValueError: If single examples have no loss of their own.
        """


class AbstractLoss(AbstractObjective[ExponentialFamily]):
    """An objective that is given as a function of θ: what its three kinds have in common."""

    splits_batches: ClassVar[bool] = True

    def expected(
        self, q: ExponentialFamily, shift: PyTree, batch: PyTree, aux: PyTree, key: Key | None
    ) -> tuple[Array, PyTree]:
        """The loss read as a function of μ, at μ + δ."""
        expectation = q.expectation()
        return self.data(expectation if shift is None else jax.tree.map(jnp.add, expectation, shift), batch, aux, key)

    def starting_point(self, params: Any) -> Any:
        return params

    def with_size(self, rows: int) -> Self:
        return self

    def share(self, batch: PyTree) -> Any:
        return count_weight(batch) / self.size if self.takes_data else None

    def prepare(self, batch: PyTree) -> PyTree:
        return batch

    def judges_steps(self, batch: PyTree) -> bool:
        return True

    def for_data(self, data: PyTree) -> tuple[Self, PyTree]:
        return self, data

    def check_data(self, q: Family, data: PyTree) -> None:
        """Nothing to check: a wrong shape shows when the loss is traced."""

    def closed_form_bound(self, q: Family, batch: PyTree, key: Key | None) -> None:
        return None

    def explain_not_finite(self, q: Family, data: PyTree) -> None:
        return None


def not_separable(needed_by: str) -> ValueError:
    """The error for a piece that needs single examples' losses where there are none."""
    return ValueError(
        f"{needed_by} takes each example's loss by itself, and this objective does not have one: build it as "
        "Objective(loss, size=N) with loss(params, example)."
    )
