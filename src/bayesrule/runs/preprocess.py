"""What goes into an estimator: encoded columns, with their gaps filled from the others."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..tables.encoding import Encoding
from ..tables.tables import Table

_ROWS = 20_000  # that the filling is learnt from, at the most


@dataclass
class Preparation:
    """The encoding, and a factor analysis of its columns for the values that are missing."""

    encoding: Encoding
    filling: Any = None

    @staticmethod
    def learnt(table: Table, names: list[str], seed: int) -> tuple[Preparation, np.ndarray]:
        """From training rows; and their matrix."""
        encoding = Encoding.learnt(table, names)
        x = encoding.matrix(table)
        prepared = Preparation(encoding)
        if np.isnan(x).any() and x.shape[1] > 1:
            from ..estimators import FactorAnalysis

            rows = np.random.default_rng(seed).permutation(len(x))[:_ROWS]
            seen = rows[~np.isnan(x[rows]).all(axis=1)]
            few = max(1, min(5, x.shape[1] // 2))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a rough fit fills gaps as well
                prepared.filling = FactorAnalysis(few, random_state=seed).fit(x[seen])
        return prepared, prepared.filled(x)

    def unseen(self, table: Table) -> dict[str, int]:
        """How many values of each category were not there in training."""
        return self.encoding.unseen(table)

    def filled(self, x: np.ndarray) -> np.ndarray:
        """Gaps by their expectation given the row's other values; by the mean, which is 0, where there is no more."""
        holes = np.isnan(x).any(axis=1)
        if holes.any() and self.filling is not None:
            x = x.copy()
            x[holes] = self.filling.fill(x[holes])
        return np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)

    def matrix(self, table: Table) -> np.ndarray:
        """(rows, features), without gaps."""
        return self.filled(self.encoding.matrix(table))
