"""From a table to an estimator's inputs: columns are encoded, and missing values drawn given the row's other values.

A missing value is not replaced by a guess, which would count as known. It is drawn several times from its
distribution, a Gaussian over the encoded columns conditioned on what the row has. For new rows that is their other
inputs, and predictions are averaged over the draws (`average.py`), so that their uncertainty is in the prediction. For
training rows it is the other inputs and the target, and the draws are fitted together, each with a share of the row's
weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..models.column_gaussian import ColumnGaussian, balanced_normals, fit_columns
from ..tables.encoding import Encoding
from ..tables.tables import Table

_DRAWS = 32  # of the missing inputs of a row that is predicted
_CHUNK_ROWS, _CHUNK_ENTRIES = 1 << 14, 1 << 22  # Draws that are predicted at a time.
_MOST_COPIES = 20_000  # Copies of training rows, unless there are more incomplete rows than these.


@dataclass
class TrainingRows:
    """The rows that an estimator is fitted to, in which a row with missing inputs stands several times.

    Args:
        x: the inputs, without missing values.
        row: the place of each among the training rows.
        weight: their weights, which sum to 1 for every training row; None where each stands once.
    """

    x: np.ndarray
    row: np.ndarray
    weight: np.ndarray | None = None


@dataclass
class Preprocessing:
    """An encoding of columns, and a Gaussian over the encoded columns from which missing values are drawn."""

    encoding: Encoding
    columns: ColumnGaussian
    seed: int = 0

    @staticmethod
    def fit(
        table: Table, names: list[str], target: np.ndarray, seed: int, draws: int = 1
    ) -> tuple[Preprocessing, TrainingRows]:
        """Fit to the columns `names` of the training rows; also returns these rows as an estimator is fitted to them.

        Args:
            table: the training rows.
            names: the columns of inputs.
            target: the target as columns (rows, ·) that depend on the inputs about linearly.
            seed: of the draws.
            draws: how many draws of the missing inputs of a row are fitted, at most.
        """
        encoding = Encoding.fit(table, names)
        x = encoding.matrix(table)
        # Without the target, drawn inputs would be independent of it given the others, and the fitted model would
        # think less of them than it should.
        joint = fit_columns(np.column_stack([x, target]), seed)
        preprocessing = Preprocessing(encoding, joint.first_columns(x.shape[1]), seed)
        incomplete = np.asarray(np.isnan(x).any(axis=1))
        if not incomplete.any():
            return preprocessing, TrainingRows(x, np.arange(len(x)))
        count = max(1, min(draws, _MOST_COPIES // int(incomplete.sum())))
        rows = np.column_stack([x, target])[incomplete]
        half = np.random.default_rng(seed).standard_normal((len(rows), -(-count // 2), joint.dimensions))
        # Pairs of opposite draws have the right mean in every row.
        drawn = joint.draw(rows, np.concatenate([half, -half], axis=1)[:, :count])[:, :, : x.shape[1]]
        copies = np.where(incomplete, count, 1)
        row = np.repeat(np.arange(len(x)), copies)
        stacked = x[row]
        stacked[incomplete[row]] = drawn.reshape(-1, x.shape[1])
        return preprocessing, TrainingRows(stacked, row, 1 / copies[row] if count > 1 else None)

    @staticmethod
    def without_dependence(encoding: Encoding) -> Preprocessing:
        """An encoding, and independent columns of mean 0 and variance 1, as standardised numbers have them."""
        size = len(encoding.features)
        return Preprocessing(encoding, ColumnGaussian(np.zeros(size), np.zeros((size, 0)), np.ones(size)))

    def unseen(self, table: Table) -> dict[str, int]:
        """For each categorical column, how many values did not occur in training; columns without any are left out."""
        return self.encoding.unseen(table)

    def inputs(self, table: Table) -> Inputs:
        """The inputs of the rows of a table."""
        return Inputs(self.encoding.matrix(table), self)

    def draw(self, x: np.ndarray) -> np.ndarray:
        """Draws of the missing inputs given the others, (rows, draws, features); the same ones for the same row."""
        normals = balanced_normals(_DRAWS, self.columns.dimensions, self.seed)
        drawn = np.empty((len(x), _DRAWS, x.shape[1]))
        lacks_category = np.zeros(len(x), bool)
        for block, _ in self.encoding.category_blocks():
            lacks_category |= np.isnan(x[:, block]).any(axis=1)
        drawn[~lacks_category] = self.columns.draw(x[~lacks_category], normals)
        if lacks_category.any():
            # Levels are drawn first: then numbers that are missing too are drawn given the level.
            copies = self._draw_levels(np.repeat(x[lacks_category][:, None], _DRAWS, axis=1))
            for index in range(_DRAWS):
                copies[:, index] = self.columns.draw(copies[:, index], normals[index : index + 1])[:, 0]
            drawn[lacks_category] = copies
        return drawn

    def _draw_levels(self, copies: np.ndarray) -> np.ndarray:
        """Copies (rows, draws, features) with every missing category drawn.

        The probability of a level is the conditional expectation of its indicator, as far as that is a probability.
        """
        rng = np.random.default_rng(self.seed)
        for block, is_exhaustive in self.encoding.category_blocks():
            quantiles = (rng.permutation(_DRAWS) + 0.5) / _DRAWS
            rows = np.isnan(copies[:, 0, block]).any(axis=1)
            if not rows.any():
                continue
            flat = copies[rows].reshape(-1, copies.shape[2])
            expected = np.clip(self.columns.fill(flat)[:, block], 0.0, 1.0)
            total = expected.sum(axis=1, keepdims=True)
            # Levels without an indicator column of their own have the rest of the probability.
            total = np.where(total > 0, total, 1.0) if is_exhaustive else np.maximum(total, 1.0)
            cumulative = np.cumsum(expected / total, axis=1)
            level = (cumulative < np.tile(quantiles, int(rows.sum()))[:, None]).sum(axis=1)
            width = expected.shape[1]
            flat[:, block] = np.eye(width + 1)[np.minimum(level, width)][:, :width]
            copies[rows] = flat.reshape(-1, *copies.shape[1:])
        return copies


class Inputs:
    """The inputs of some rows.

    Args:
        x: (rows, features), NaN where missing.
        preprocessing: which fills in and draws what is missing.

    Attributes:
        filled: the inputs, missing ones replaced by their expectations.
        incomplete: the places of the rows that miss some.
        missing: how many inputs are missing; a category counts once.
    """

    def __init__(self, x: np.ndarray, preprocessing: Preprocessing):
        self._x, self._preprocessing = x, preprocessing
        self.incomplete = np.flatnonzero(np.isnan(x).any(axis=1))
        self.filled = x
        if len(self.incomplete):
            self.filled = x.copy()
            self.filled[self.incomplete] = preprocessing.columns.fill(x[self.incomplete])
        self.missing = preprocessing.encoding.count_missing(x)

    @property
    def encoded(self) -> np.ndarray:
        """The inputs as they are encoded, NaN where missing."""
        return self._x

    def draws(self, among: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The incomplete rows (those of them that are `among` these places), a chunk at a time.

        Yields their places, and the draws of their inputs (rows, draws, features).
        """
        rows = self.incomplete if among is None else np.intersect1d(self.incomplete, among)
        step = max(1, min(_CHUNK_ROWS, _CHUNK_ENTRIES // self._x.shape[1]) // _DRAWS)
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            yield part, self._preprocessing.draw(self._x[part])
