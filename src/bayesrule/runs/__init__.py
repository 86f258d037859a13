"""Runs: the fit of a table as a directory, with the estimator, its preprocessing, its metrics and its report."""

from .run import Run
from .store import load

__all__ = ["Run", "load"]
