"""ℓ̄(θ) = Σᵢ ℓ(θ, exampleᵢ) + R(θ): the per-example loss, the data's size N, the prior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..families.gaussian.precision import SharedFeatures
from ..numerics.frozen import Frozen, as_frozen, join
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .base import AbstractLoss, AbstractObjective
from .batched import Batched
from .batches import (
    Linearized,
    Microbatches,
    Weighted,
    as_scalar,
    cast_inputs,
    check_size,
    count_examples,
    sum_scaled,
    unpack,
    widen,
)
from .plain import Plain
from .regularizers import Regularizer, as_regularizer


class Objective(AbstractLoss):
    r"""$\barℓ(θ) = \sum_i ℓ(θ, \text{example}_i) + R(θ)$ (`eq:ERM`), estimated from a batch by N/M.

    Args:
        loss: `loss(params, example)`, a scalar; with `output=apply` it is `loss(apply(params, x), y)` for examples
            `(x, y)`. Both are called with one example; batches have a leading axis.
        size: N, the number of training examples.
        output: The model `apply(params, x)`, where the loss is one of its outputs.
        regularizer: δ for the prior N(0, 1/δ) on every entry, a dict of a δ for each leaf, or any function R(params).
        prior: A family as the prior, instead of `regularizer`.
        linear: True says that `apply` is linear (or affine) in the parameters. A function says that it is
            features(x)ᵀΘ, with Θ the ravelled parameters as a matrix of a column for each output, which saves a full
            Gaussian work where there are several outputs.
        aux: Carried along in the rule's state, unchanged.
        compute: A precision, such as `jnp.bfloat16`, in which the loss is computed; q, gradients and sums keep theirs.
        frozen: Parameters that are not learned, from `freeze`: the loss is called with all of them.

    >>> import jax.numpy as jnp
    >>> objective = Objective(lambda w, e: 0.5 * (e[1] - e[0] @ w) ** 2, size=4, regularizer=1.0)
    >>> x, y = jnp.ones((2, 1)), jnp.array([1.0, 3.0])
    >>> float(objective.data(jnp.zeros(1), (x, y))[0])                  # N/M = 2 times 5
    10.0
    """

    loss: Callable[..., Any] = eqx.field(static=True)
    output: Callable[..., Any] | None = eqx.field(static=True)
    linear: Any = eqx.field(static=True)
    compute: Any = eqx.field(static=True)
    size: Any
    regularizer: Regularizer
    aux: PyTree
    frozen: Frozen | None
    random: ClassVar[bool] = False
    takes_data: ClassVar[bool] = True
    keeps_partial_batch: ClassVar[bool] = True

    def __init__(
        self,
        loss: Callable[..., Any],
        *,
        size: int | None = None,
        output: Callable[..., Any] | None = None,
        regularizer: Any = None,
        prior: Any = None,
        linear: bool | Callable[[Any], Array] = False,
        aux: PyTree = None,
        compute: Any = None,
        frozen: PyTree = None,
    ):
        size = check_size(loss, size)
        if linear and output is None:
            raise ValueError(
                "linear=True describes output=apply: pass the function that is linear in the parameters as output=."
            )
        self.loss, self.output, self.linear = loss, output, linear
        self.compute = None if compute is None else jnp.dtype(compute)
        self.size = size
        self.regularizer = as_regularizer(regularizer, prior)
        self.aux = aux
        self.frozen = as_frozen(frozen)

    @staticmethod
    def from_batch(
        function: Callable[..., Any],
        *,
        size: int | None = None,
        aux: PyTree = None,
        regularizer: Any = None,
        prior: Any = None,
        compute: Any = None,
        frozen: PyTree = None,
        evaluate: Callable[..., Any] | None = None,
    ) -> Batched:
        """An objective whose examples are not independent, or whose loss is random.

        `function(params, batch, aux, key)` returns one loss for each example of the batch and the new
        `aux` (batch statistics, say), which is kept in the rule's state and begins as `aux`. `evaluate`, a function of
        the same form, is what `fit(validation=…)` calls instead: with statistics as they are and nothing dropped.
        """
        options: Any = {"regularizer": regularizer, "prior": prior, "aux": aux, "compute": compute, "frozen": frozen}
        return Batched(function, size=size, evaluate=evaluate, **options)

    @property
    def has_linear_outputs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on `linear`
        return bool(self.linear)

    # Batches.

    def examples(self, batch: PyTree) -> tuple[PyTree, Float[Array, " B"]]:
        """The examples, and the factor of each one's loss in the sum: its weight times N/M."""
        examples, weights, scales = unpack(batch, self.size)
        if weights is not None:
            # A row that counts replaces one of zero weight, whose derivatives may be NaN (and 0·NaN is NaN).
            # (Not by a gather of all rows, which takes as long as a pass over them.)
            counts = jnp.asarray(weights) != 0
            first = jnp.argmax(counts)

            def replace(x: Any) -> Array:
                rows = jnp.asarray(x)
                return jnp.where(counts.reshape(-1, *[1] * (rows.ndim - 1)), rows, rows[first])

            examples = jax.tree.map(replace, examples)
        return examples, scales

    def rows(self, batch: PyTree) -> int:
        return count_examples(batch)

    def select_rows(self, data: PyTree, index: Int[Array, " M"], is_row: Bool[Array, " M"]) -> Weighted:
        """Rows of the data as a batch; padding has zero weight and is not counted in M."""
        weighted = isinstance(data, Weighted)
        examples = jax.tree.map(lambda x: x[index], data.examples if weighted else data)
        weights = is_row.astype(float) * (data.weights[index] if weighted else 1.0)
        per_row = 1.0 if not weighted or data.count is None else data.count / (data.weights.shape[0] - data.padding)
        return Weighted(examples, weights, jnp.sum(is_row) * per_row)

    # Values.

    def losses(self, theta: PyTree, examples: PyTree) -> Float[Array, " B"]:
        """Evaluate ℓ(θ, example) for each example."""
        return jax.vmap(lambda example: self.example_loss(theta, example))(examples)

    def example_loss(self, theta: PyTree, example: PyTree) -> Array:
        """Evaluate ℓ(θ, example) for one example."""
        theta, example = cast_inputs((join(theta, self.frozen), example), self.compute)
        if self.output is not None:
            x, y = example
            value = as_scalar(self.loss(self.output(theta, x), y), "loss(output, y)")
        else:
            value = as_scalar(self.loss(theta, example), "loss(params, example)")
        return widen(value, self.compute)

    def data(
        self, theta: PyTree, batch: PyTree = None, aux: PyTree = None, key: Key | None = None
    ) -> tuple[Array, PyTree]:
        """Estimate Σᵢ ℓ(θ, exampleᵢ) from the batch, without R; and aux, unchanged."""
        examples, scales = self.examples(batch)
        return sum_scaled(self.losses(theta, examples), scales), aux

    def separable(self, needed_by: str) -> Objective:
        return self

    # Losses through an output: f = apply(θ, x).

    def outputs(self, theta: PyTree, examples: PyTree) -> Float[Array, "B K"]:
        """Evaluate apply(θ, x) for each example, each ravelled."""
        return jax.vmap(lambda x: self._ravelled_output(theta, x))(examples[0])

    def jacobians(self, theta: PyTree, examples: PyTree) -> PyTree:
        """Differentiate apply(θ, x) in θ for each example: leaves (B, K, *leaf)."""
        return jax.vmap(lambda x: jax.jacrev(lambda t: self._ravelled_output(t, x))(theta))(examples[0])

    def linearized(self, theta: PyTree, batch: PyTree, *, shared: bool = False) -> Linearized:
        """The batch with its outputs' Jacobian, for `linear` objectives.

        Args:
            theta: Any θ, for the shapes: the Jacobian of a linear function is the same everywhere.
            batch: The examples.
            shared: Whether the features that the outputs share will do as a Jacobian (`SharedFeatures`), which only a
                full precision can use; they are used where `linear` is the function of the features.
        """
        if isinstance(batch, Linearized):
            return batch
        batch = batch.batch if isinstance(batch, Microbatches) else batch
        examples, _ = self.examples(batch)
        zero = jax.tree.map(jnp.zeros_like, theta)
        if shared and callable(self.linear):
            features = SharedFeatures(jnp.asarray(jax.vmap(self.linear)(examples[0])), zero)
            # Outputs that are features(x)ᵀΘ are 0 at Θ = 0. To compute that would take a pass over the features.
            like = jax.eval_shape(self.outputs, zero, examples)
            return Linearized(batch, features, jnp.zeros(like.shape, like.dtype))
        return Linearized(batch, self.jacobians(zero, examples), self.outputs(zero, examples))

    def output_loss(self, theta: PyTree, examples: PyTree) -> Callable[[Array, Any], Array]:
        """The function (ravelled output, y) ↦ loss."""
        apply = self._apply()
        first = jax.tree.map(lambda x: x[0], examples[0])
        shape = jax.eval_shape(apply, theta, first).shape
        return lambda f, y: as_scalar(self.loss(f.reshape(shape), y), "loss(output, y)")

    def _ravelled_output(self, theta: PyTree, x: PyTree) -> Float[Array, " K"]:
        apply = self._apply()
        return widen(jnp.ravel(apply(*cast_inputs((theta, x), self.compute))), self.compute)

    def _apply(self) -> Callable[..., Any]:
        if self.output is None:
            raise ValueError(
                "This needs the outputs of the model: build the objective as Objective(loss, output=apply, …) "
                "with loss(output, y) and examples (x, y)."
            )
        output, frozen = self.output, self.frozen
        return output if frozen is None else lambda theta, x: output(join(theta, frozen), x)


def as_objective(objective: Any) -> AbstractObjective:
    """The objective that the user gave: one as it is, or a plain function θ ↦ scalar as `Plain`."""
    if isinstance(objective, AbstractObjective):
        return objective
    if not callable(objective):
        raise ValueError(f"An objective is a blr.Objective or a function of θ, got {type(objective).__name__}.")
    return Plain(function=objective)
