"""From a table to an estimator's inputs: columns are encoded, and missing values filled from the other columns."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..tables.encoding import Encoding
from ..tables.tables import Table

_MOST_ROWS = 20_000  # Beyond these, the factor analysis is fitted to a random subset of the rows.


@dataclass
class Preprocessing:
    """An encoding of columns, and a factor analysis of the encoded columns that fills in missing values.

    `imputer` is a fitted `FactorAnalysis`, or None where nothing was missing in training or there is one column only.
    """

    encoding: Encoding
    imputer: Any = None

    @staticmethod
    def fit(table: Table, names: list[str], seed: int) -> tuple[Preprocessing, np.ndarray]:
        """Fit to the columns `names` of the training rows; also returns these rows as a matrix."""
        encoding = Encoding.fit(table, names)
        x = encoding.matrix(table)
        preprocessing = Preprocessing(encoding)
        if np.isnan(x).any() and x.shape[1] > 1:
            from ..estimators import FactorAnalysis

            subset = np.random.default_rng(seed).permutation(len(x))[:_MOST_ROWS]
            observed = subset[~np.isnan(x[subset]).all(axis=1)]
            factors = max(1, min(5, x.shape[1] // 2))
            with warnings.catch_warnings():
                # Imputation does not need a converged fit, so that a warning about one would only alarm.
                warnings.simplefilter("ignore")
                preprocessing.imputer = FactorAnalysis(factors, random_state=seed).fit(x[observed])
        return preprocessing, preprocessing.impute(x)

    @property
    def categories(self) -> list[str]:
        """The columns that are read as text."""
        return self.encoding.categories

    def unseen(self, table: Table) -> dict[str, int]:
        """For each categorical column, how many values did not occur in training; columns without any are left out."""
        return self.encoding.unseen(table)

    def impute(self, x: np.ndarray) -> np.ndarray:
        """Replace every missing value by its expectation given the row's other values.

        Without an imputer it becomes the training mean, which is 0 in the encoding's units.
        """
        incomplete = np.isnan(x).any(axis=1)
        if incomplete.any() and self.imputer is not None:
            x = x.copy()
            x[incomplete] = self.imputer.fill(x[incomplete])
        return np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)

    def matrix(self, table: Table) -> np.ndarray:
        """The rows of a table as a matrix (rows, features) without missing values."""
        return self.impute(self.encoding.matrix(table))
