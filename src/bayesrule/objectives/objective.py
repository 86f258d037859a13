"""ℓ̄(θ) = Σᵢ ℓ(θ, exampleᵢ) + R(θ): the per-example loss, the data's size N, the prior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from ..families.gaussian.precision import SharedFeatures
from .batches import Linearized, Microbatches, Weighted, _rows
from .regularizers import Regularizer, as_regularizer


class Objective(eqx.Module):
    r"""$\barℓ(θ) = \sum_i ℓ(θ, \text{example}_i) + R(θ)$ (`eq:ERM`), estimated from a batch by N/M.

    `loss(params, example)` is a scalar; with `output=apply` it is `loss(apply(params, x), y)` for
    examples `(x, y)`. Both see one example; batches have a leading axis. `size` is N. The prior is
    `regularizer=δ` (the Gaussian N(0, 1/δ)), `prior=` a family, or `regularizer=` any function of
    the parameters. `linear=True` says that `apply` is linear (or affine) in the parameters; `linear=features`, that
    it is features(x)ᵀΘ, with Θ the ravelled parameters as a matrix of a column for each output, which saves a full
    Gaussian work where there are several. `compute=jnp.bfloat16` hands the loss its parameters and examples in that
    precision; q, gradients and sums stay as they are.

    >>> import jax.numpy as jnp
    >>> objective = Objective(lambda w, e: 0.5 * (e[1] - e[0] @ w) ** 2, size=4, regularizer=1.0)
    >>> x, y = jnp.ones((2, 1)), jnp.array([1.0, 3.0])
    >>> float(objective.data(jnp.zeros(1), (x, y))[0])                  # N/M = 2 times 5
    10.0
    """

    loss: Callable[..., Any] = eqx.field(static=True)
    output: Callable[..., Any] | None = eqx.field(static=True)
    linear: Any = eqx.field(static=True)
    kind: str = eqx.field(static=True)
    compute: Any = eqx.field(static=True)
    size: Any
    regularizer: Regularizer
    aux: PyTree

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
        kind: str = "examples",
        compute: Any = None,
    ):
        if not callable(loss):
            raise ValueError(f"Objective takes a function loss(params, example), got {type(loss).__name__}.")
        if size is None:
            raise ValueError(
                "Objective needs size=N, the number of training examples: without it the posterior's width is "
                "meaningless. For a full-batch loss pass size=len(data)."
            )
        if linear and output is None:
            raise ValueError("linear=True is said of output=apply: give the function that is linear in the parameters.")
        self.loss, self.output, self.linear, self.kind = loss, output, linear, kind
        self.compute = None if compute is None else jnp.dtype(compute)
        self.size = _checked_size(size)
        self.regularizer = as_regularizer(regularizer, prior)
        self.aux = aux

    @staticmethod
    def from_batch(
        function: Callable[..., Any],
        *,
        size: int | None = None,
        aux: PyTree = None,
        regularizer: Any = None,
        prior: Any = None,
        compute: Any = None,
    ) -> Objective:
        """An objective whose examples are not independent, or whose loss is random.

        `function(params, batch, aux, key)` returns one loss for each example of the batch and the new
        `aux` (batch statistics, say), which is kept in the rule's state and begins as `aux`.
        """
        return Objective(
            function, size=size, regularizer=regularizer, prior=prior, aux=aux, kind="batch", compute=compute
        )

    @property
    def per_example(self) -> bool:
        """Whether one example's loss can be taken by itself."""
        return self.kind == "examples"

    # Batches.

    def examples(self, batch: PyTree) -> tuple[PyTree, Float[Array, " B"]]:
        """The examples, and what each one's loss is multiplied by: its weight times N/M."""
        batch = batch.batch if isinstance(batch, Microbatches) else batch
        rows = self.rows(batch)
        if isinstance(batch, Linearized):
            batch = batch.batch
        weights, count = None, None
        if isinstance(batch, Weighted):
            batch, weights, count = batch.examples, batch.weights, batch.count
        scale = jnp.asarray(self.size / (rows if count is None else count), dtype=float)
        if weights is None:
            return batch, scale * jnp.ones(rows)
        if self.per_example:
            # A row that counts stands in for one of zero weight, whose derivatives may be NaN (and 0·NaN is NaN).
            counts = jnp.asarray(weights) != 0
            index = jnp.where(counts, jnp.arange(rows), jnp.argmax(counts))
            batch = jax.tree.map(lambda x: jnp.asarray(x)[index], batch)
        return batch, scale * weights

    def rows(self, batch: PyTree) -> int:
        """How many examples the batch has."""
        if isinstance(batch, Linearized | Microbatches):
            batch = batch.batch
        if not isinstance(batch, Weighted):
            return _rows(batch)
        rows = _rows(batch.examples)
        if jnp.shape(batch.weights) != (rows,):
            raise ValueError(f"There are {rows} examples but the weights have shape {jnp.shape(batch.weights)}.")
        return rows

    # Values.

    def losses(self, theta: PyTree, examples: PyTree, aux: PyTree = None, key: Any = None) -> tuple[Array, PyTree]:
        """ℓ(θ, example) for each example, and the new aux."""
        if self.kind == "batch":
            # One step looks at the loss several times, with the same noise on purpose.
            theta, examples = self._computed((theta, examples))
            values, aux = self.loss(theta, examples, aux, None if key is None else jax.random.clone(key))
            rows = _rows(examples)
            if jnp.shape(values) != (rows,):
                raise ValueError(
                    f"A from_batch loss returns one number for each example, shape ({rows},), got {jnp.shape(values)}."
                )
            return self._kept(values), aux
        return jax.vmap(lambda example: self.example_loss(theta, example))(examples), aux

    def example_loss(self, theta: PyTree, example: PyTree) -> Array:
        """ℓ(θ, example) for one example."""
        theta, example = self._computed((theta, example))
        if self.output is not None:
            x, y = example
            return self._kept(_scalar(self.loss(self.output(theta, x), y), "loss(output, y)"))
        return self._kept(_scalar(self.loss(theta, example), "loss(params, example)"))

    def _computed(self, tree: PyTree) -> PyTree:
        """What the loss is handed, in the precision that it computes in."""
        if self.compute is None:
            return tree
        real = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jax.tree.map(lambda x: jnp.asarray(x, self.compute) if real(x) else x, tree)

    def _kept(self, values: Array) -> Array:
        return values if self.compute is None else values.astype(jnp.promote_types(values.dtype, jnp.float32))

    def data(self, theta: PyTree, batch: PyTree = None, aux: PyTree = None, key: Any = None) -> tuple[Array, PyTree]:
        """Σᵢ ℓ(θ, exampleᵢ), estimated from the batch, and the new aux. R is not in it."""
        if self.kind == "plain":
            return _scalar(self.loss(theta), "the objective"), aux
        examples, scales = self.examples(batch)
        values, aux = self.losses(theta, examples, aux, key)
        # A zero weight leaves an example out altogether, even one whose loss is not a number.
        return jnp.sum(jnp.where(scales == 0, 0.0, values * scales.astype(values.dtype))), aux

    @property
    def random(self) -> bool:
        """Whether the loss itself is random."""
        return self.kind == "batch"

    def expected(self, q: Any, shift: PyTree, batch: PyTree, aux: PyTree, key: Any) -> tuple[Array, PyTree]:
        """E_q of the data's loss as a function of μ, displaced by `shift`, and the new aux: for `Exact` points."""
        return self.data(jax.tree.map(jnp.add, q.expectation(), shift), batch, aux, key)

    def started(self, params: Any) -> Any:
        """What an algorithm starts from, where the objective has a say in it."""
        return params

    def sized(self, rows: int) -> Any:
        """The objective with the data's size filled in, where it was left to the data."""
        return self

    def prepared(self, batch: PyTree) -> PyTree:
        """The whole data with what can be made of it once for all steps."""
        return batch

    def checked(self, q: Any, data: PyTree) -> None:
        """Raise where the data do not go with the objective, before anything is compiled."""

    # Losses through an output: f = apply(θ, x).

    def outputs(self, theta: PyTree, examples: PyTree) -> Float[Array, "B K"]:
        """apply(θ, x) for each example, each ravelled."""
        apply = self._apply()
        return jax.vmap(lambda x: self._kept(jnp.ravel(apply(*self._computed((theta, x))))))(examples[0])

    def jacobians(self, theta: PyTree, examples: PyTree) -> PyTree:
        """∂apply(θ, x)/∂θ for each example: leaves (B, K, *leaf)."""
        apply = self._apply()
        ravelled = lambda t, x: self._kept(jnp.ravel(apply(*self._computed((t, x)))))
        return jax.vmap(lambda x: jax.jacrev(lambda t: ravelled(t, x))(theta))(examples[0])

    def linearized(self, theta: PyTree, batch: PyTree, *, full: bool = False) -> Linearized:
        """The batch with its outputs' Jacobian, for `linear` objectives: θ gives only the shapes.

        A `full` Gaussian can do with the features that the outputs share.
        """
        if isinstance(batch, Linearized):
            return batch
        batch = batch.batch if isinstance(batch, Microbatches) else batch
        examples, _ = self.examples(batch)
        zero = jax.tree.map(jnp.zeros_like, theta)
        if full and callable(self.linear):
            shared = SharedFeatures(jnp.asarray(jax.vmap(self.linear)(examples[0])), zero)
            return Linearized(batch, shared, self.outputs(zero, examples))
        return Linearized(batch, self.jacobians(zero, examples), self.outputs(zero, examples))

    def output_loss(self, theta: PyTree, examples: PyTree) -> Callable[[Array, Any], Array]:
        """(ravelled output, y) ↦ loss."""
        apply = self._apply()
        first = jax.tree.map(lambda x: x[0], examples[0])
        shape = jax.eval_shape(apply, theta, first).shape
        return lambda f, y: _scalar(self.loss(f.reshape(shape), y), "loss(output, y)")

    def _apply(self) -> Callable[..., Any]:
        if self.output is None:
            raise ValueError(
                "This needs the outputs of the model: build the objective as Objective(loss, output=apply, …) "
                "with loss(output, y) and examples (x, y)."
            )
        return self.output


def as_objective(objective: Any) -> Objective:
    """A plain function θ ↦ scalar is an objective too, with N = 1 and no examples."""
    if isinstance(objective, Objective):
        return objective
    if not callable(objective):
        raise ValueError(f"An objective is a blr.Objective or a function of θ, got {type(objective).__name__}.")
    return Objective(objective, size=1, kind="plain")


def _checked_size(size: Any) -> Any:
    if isinstance(size, Tracer):
        return size
    if isinstance(size, bool) or jnp.ndim(size) != 0 or float(size) <= 0:
        raise ValueError(f"size=N is the number of training examples, a positive number, got {size!r}.")
    return size


def _scalar(value: Any, what: str) -> Array:
    if jnp.shape(value) != ():
        raise ValueError(f"{what} must be a scalar, got shape {jnp.shape(value)}: sum or average it over its axes.")
    return jnp.asarray(value)
