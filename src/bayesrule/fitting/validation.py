"""What a training run looks at along the way: validation data, early stopping, and a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..numerics.checks import positive_int
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..objectives.base import AbstractObjective
from ..objectives.batched import Batched
from ..objectives.batches import Weighted, count_weight
from ..rule.state import State
from ..streams.base import Stream
from .loop import copy_for_donation

Metric = Callable[[Any, PyTree], Any]
"""metric(q, validation) -> a number."""

_ROWS = 4096  # Validation rows that are evaluated side by side, where there is no batch size.


class Validation:
    """Metrics on validation data every so many steps of a fit, and the best state by the first of them.

    Args:
        objective: the fit's objective, for the loss.
        data: the validation data, of the structure of the fit's, or a stream of them, which metrics get as it is.
        metrics: further metrics by name.
        patience: after how many evaluations without a better one the fit ends; None for no end, and no best state.
        batch_size: the number of rows that are evaluated side by side.
    """

    def __init__(
        self,
        objective: AbstractObjective,
        data: PyTree,
        metrics: Mapping[str, Metric] | None,
        patience: int | None,
        batch_size: int | None,
    ):
        if not (objective.takes_data and objective.splits_batches):
            raise ValueError(
                "validation= is for objectives with a loss for each example (blr.Objective): a model's rows have "
                "latent variables of their own, which new rows lack. Look at result.loo() instead."
            )
        if isinstance(data, Weighted):
            data = Weighted(data.examples, data.weights)  # A mean over rows has no use for the count of a batch.
        self.objective = objective.for_evaluation() if isinstance(objective, Batched) else objective
        self.data = data if isinstance(data, Stream) else jax.tree.map(jnp.asarray, data)
        self.rows = data.rows if isinstance(data, Stream) else objective.rows(self.data)
        self.batch_size = batch_size or _ROWS
        self.metrics = {} if metrics is None else dict(metrics)
        if "step" in self.metrics or not all(map(callable, self.metrics.values())):
            raise ValueError('metrics= is a dict from names to functions of (q, validation data); "step" is taken.')
        self.patience = None if patience is None else positive_int("patience", patience)
        self.record: dict[str, list[float]] = {}
        self.best: State | None = None
        self.best_value, self.since_best = np.inf, 0

    def look(self, state: State) -> bool:
        """Evaluate the metrics at a state. Returns whether patience is exhausted."""
        values = {name: float(metric(state.q, self.data)) for name, metric in self.metrics.items()}
        values = values if "loss" in values else {**values, "loss": self._loss(state)}
        for name, value in {"step": int(state.count), **values}.items():
            self.record.setdefault(name, []).append(value)
        first = next(iter(values.values()))
        if first < self.best_value:
            self.best_value, self.since_best = first, 0
            if self.patience is not None:
                self.best = copy_for_donation(state)
        else:
            self.since_best += 1
        return self.patience is not None and self.since_best >= self.patience

    def _loss(self, state: State) -> float:
        """The mean loss of an example at q's mean."""
        totals = [np.asarray(_summed_loss(self.objective, state.q, state.aux, part)) for part in self._parts()]
        total, count = np.sum(np.asarray(totals, float), axis=0)
        return float(total / count)

    def _parts(self) -> Iterator[PyTree]:
        """The validation data, so many rows at a time as are evaluated side by side."""
        if isinstance(self.data, Stream):
            yield from self.data.blocks(self.batch_size)
            return
        for first in range(0, self.rows, self.batch_size):
            yield jax.tree.map(lambda x, first=first: x[first : first + self.batch_size], self.data)

    def text(self) -> str:
        """The last values, for the progress bar."""
        return ", ".join(f"{name} {values[-1]:.4g}" for name, values in self.record.items() if name != "step")

    def trace(self) -> dict[str, np.ndarray]:
        """One value of each metric for each evaluation, and "step", the number of steps before it."""
        return {name: np.asarray(values) for name, values in self.record.items()}

    def resume(self, record: dict[str, np.ndarray], best: State | None, count: int) -> None:
        """Go on with what an earlier part of the same fit had seen when it had taken `count` steps."""
        seen = int(np.searchsorted(record["step"], count, side="right"))
        self.record = {name: list(np.asarray(values)[:seen]) for name, values in record.items()}
        first = next((values for name, values in self.record.items() if name != "step"), [])
        if first:
            place = int(np.argmin(first))
            self.best_value, self.since_best = float(first[place]), len(first) - 1 - place
        self.best = best


@compiled
def _summed_loss(objective: AbstractObjective, q: Any, aux: PyTree, batch: PyTree) -> tuple[Array, Array]:
    """The losses of a batch at q's mean, summed, and the weight of its examples. A random loss has a fixed key."""
    key = jax.random.key(0) if objective.random else None
    total = objective.data(q.mean, batch, aux, key)[0] * count_weight(batch) / objective.size
    rows = jnp.asarray(objective.rows(batch), float)
    return total, jnp.sum(batch.weights).astype(float) if isinstance(batch, Weighted) else rows
