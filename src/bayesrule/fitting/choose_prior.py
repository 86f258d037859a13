"""The strength of a network's prior, and how to predict with its posterior, chosen on held-out training rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..families.base import Family
from ..families.start import Start
from ..numerics.checks import positive_int, positive_number
from ..numerics.frozen import split_off_integers
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.batches import Weighted, count_weight
from ..objectives.objective import Objective
from ..rule.rule import Rule
from .fit import fit, with_frozen
from .held_out import FEWEST_ROWS, FOLDS, Folds, divide_rows, is_lower, search_grid
from .result import Result

PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""The prior's precisions among which `choose_prior` chooses by default."""
_METHODS = ("samples", "mean")
_CHUNK_ROWS = 1024  # Held-out rows that are evaluated side by side.
_DRAWS = 0xD2A3  # Folded into the key of the fits for the key of the draws.


@dataclass(frozen=True)
class ChosenPrior:
    """What `choose_prior` returns.

    Attributes:
        precision: δ of the prior N(0, 1/δ).
        method: how to predict, the `method` of `predict`.
        result: the fit of all rows with this prior.
        losses: the mean held-out loss of an example for each pair (δ, method) that was tried.
    """

    precision: float
    method: str
    result: Result
    losses: dict[tuple[float, str], float]

    @property
    def q(self) -> Any:
        """The posterior given all rows."""
        return self.result.q


def choose_prior(
    rule: Rule,
    objective: Objective,
    start: PyTree,
    data: PyTree,
    *,
    steps: int,
    key: Key,
    batch_size: int | None = None,
    precisions: Sequence[float] = PRECISIONS,
    first: float = 1.0,
    methods: Sequence[str] = _METHODS,
    samples: int = 32,
    microbatches: int = 1,
) -> ChosenPrior:
    r"""Fit with the prior N(0, 1/δ), and predict with the method, under which held-out rows are most probable.

    A fifth of the rows is held out from a fit of the others, which starts from the same parameters and takes the same
    number of steps. Its loss is $−\log E_q\,p(y \mid x, θ)$ over draws ("samples") or $−\log p(y \mid x, m)$ at the
    mean of q ("mean"), so the objective's loss has to be $−\log p(y \mid x, θ)$. For each method the search begins at
    δ = `first` and goes on along the grid as long as a neighbour is better by more than a standard error; up to two
    further fifths are held out where one does not tell. The first of `methods` is kept unless another is better by as
    much. At last all rows are fitted. With the default grid that is mostly four to eight fits in all.

    Equal rows are held out together, and classes (integers as the last of the arrays) have the same shares in all
    parts. Which rows are held out does not depend on their order. With fewer than 20 different rows nothing is held
    out, and δ is `first`.

    Args:
        rule: The algorithm, such as `blr.vogn(schedule)`.
        objective: An `Objective`, whose regularizer or prior is replaced by δ.
        start: The parameters that every fit starts from.
        data: The training data, as for `fit`. Leave out the rows that you test on.
        steps: The number of steps of each fit.
        key: A JAX key, the same for every fit, so that their differences are less noisy.
        batch_size: As for `fit`.
        precisions: The grid of δ, in increasing order.
        first: Where on the grid to begin: a δ that is good on most data.
        methods: The methods of prediction to choose from, "samples" and "mean", the preferred one first.
        samples: The number of draws for a prediction.
        microbatches: As for `fit`.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> x = jax.random.normal(jax.random.key(0), (200, 3))
    >>> y = x @ jnp.array([1.0, -2.0, 0.5]) + jax.random.normal(jax.random.key(1), (200,))
    >>> objective = blr.Objective(lambda w, example: 0.5 * (example[1] - example[0] @ w) ** 2, size=200)
    >>> chosen = choose_prior(blr.ogn(1e-3), objective, jnp.zeros(3), (x, y), steps=200, key=jax.random.key(2))
    >>> chosen.precision, chosen.method, chosen.q.mean.shape
    (1.0, 'samples', (3,))
    """
    grid, place = _check_grid(precisions, first)
    methods = _check_methods(methods)
    samples = positive_int("samples", samples)
    if not isinstance(objective, Objective):
        raise ValueError(
            "choose_prior needs the loss of each row by itself: pass a blr.Objective. Rows of a model or of "
            "Objective.from_batch are not independent of each other."
        )
    if isinstance(start, Result) or Start.is_member(start):
        raise ValueError(
            "choose_prior fits from the same parameters with each prior: pass bare parameters as the start. The "
            "precision of a q, or of an earlier result, belongs to one prior."
        )
    start, frozen = split_off_integers(start)
    objective = objective if frozen is None else cast(Objective, with_frozen(objective, frozen))
    examples, weights = (data.examples, data.weights) if isinstance(data, Weighted) else (data, None)
    examples = jax.tree.map(jnp.asarray, examples)
    rows, count = objective.rows(examples), float(count_weight(data))
    weights = np.ones(rows) if weights is None else np.asarray(weights, float)
    folds = _divide(examples, weights, key)
    options = {"steps": steps, "batch_size": batch_size, "key": key, "microbatches": microbatches}
    draws = jax.random.fold_in(key, _DRAWS)
    seen: dict[tuple[float, str], list[np.ndarray]] = {}

    def with_prior(setting: int, size: Any) -> Objective:
        return dataclasses.replace(objective, size=size, regularizer=grid[setting])

    @cache
    def losses_by_method(setting: int, number: int) -> dict[str, np.ndarray]:
        is_held_out = folds.holds_out(number)
        kept = np.where(is_held_out, 0.0, weights)
        share = kept.sum() / weights.sum()
        part = with_prior(setting, objective.size * share)
        q = fit(rule, part, start, Weighted(examples, jnp.asarray(kept), count * share), **options).q
        held = np.flatnonzero(is_held_out)
        losses = {}
        for method in methods:
            of_rows = np.asarray(_row_losses(part, q, examples, _padded(held, folds), draws, method, samples), float)
            groups = np.bincount(folds.group[held], weights[held] * of_rows[: len(held)], len(folds.fold))
            losses[method] = groups[folds.fold == number]
            seen.setdefault((grid[setting], method), []).append(losses[method].sum() / weights[held].sum())
        return losses

    method, setting = methods[0], place
    if len(folds.fold) >= FEWEST_ROWS:
        best = {
            name: search_grid(lambda s, number, name=name: losses_by_method(s, number)[name], place, 0, len(grid) - 1)
            for name in methods
        }
        losses_of_pair = lambda pair, number: losses_by_method(pair[1], number)[pair[0]]
        for name in methods[1:]:
            if is_lower(losses_of_pair, (name, best[name]), (method, best[method])):
                method = name
        setting = best[method]
    result = fit(rule, with_prior(setting, objective.size), start, data, **options)
    return ChosenPrior(grid[setting], method, result, {pair: float(np.mean(each)) for pair, each in seen.items()})


def _divide(examples: PyTree, weights: np.ndarray, key: Key) -> Folds:
    """Folds of rows, with equal shares of the classes that the last array has, if it has any."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(examples)]
    rows = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
    last = leaves[-1]
    labels = last if last.ndim == 1 and last.dtype.kind in "iub" else np.zeros(len(last), int)
    return divide_rows(rows, labels.astype(int), weights, np.asarray(jax.random.key_data(key)).tobytes())


def _padded(held: np.ndarray, folds: Folds) -> Int[Array, " B"]:
    """The rows of a fold, with the first repeated up to the size of the largest fold: one program for all."""
    largest = max(np.sum(folds.holds_out(number)) for number in range(FOLDS))
    return jnp.asarray(np.concatenate([held, np.full(largest - len(held), held[0])]))


@compiled(static=("method", "samples"))
def _row_losses(
    objective: Objective, q: Family, examples: PyTree, rows: Int[Array, " B"], key: Key, method: str, samples: int
) -> Float[Array, " B"]:
    """−log of the probability of each of these rows under the predictive distribution of q."""
    held = jax.tree.map(lambda leaf: leaf[rows], examples)

    def losses(theta: PyTree) -> Float[Array, " B"]:
        return jax.lax.map(lambda example: objective.example_loss(theta, example), held, batch_size=_CHUNK_ROWS)

    if method == "mean":
        return losses(q.mean)  # pyright: ignore[reportAttributeAccessIssue]  # what `predict` asks of q, too
    likelihoods = jax.lax.map(lambda key: -losses(q.sample(key)), jax.random.split(key, samples))
    return jnp.log(samples) - jax.nn.logsumexp(likelihoods, axis=0)


def _check_grid(precisions: Sequence[float], first: float) -> tuple[tuple[float, ...], int]:
    """The grid, and the place of `first` in it."""
    grid = tuple(positive_number("precisions", precision) for precision in precisions)
    if not grid or any(a >= b for a, b in pairwise(grid)):
        raise ValueError(f"precisions= are numbers in increasing order, got {list(precisions)}.")
    if first not in grid:
        raise ValueError(f"first= is one of the precisions, {list(grid)}, got {first}: the search begins there.")
    return grid, grid.index(first)


def _check_methods(methods: Sequence[str]) -> tuple[str, ...]:
    if isinstance(methods, str) or not methods or any(method not in _METHODS for method in methods):
        raise ValueError(f'methods= are some of "samples" and "mean", the preferred one first, got {methods!r}.')
    return tuple(methods)
