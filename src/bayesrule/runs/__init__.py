"""Runs: a table in, an estimator with its preprocessing, its metrics and its story out, kept in a directory."""

from .run import Run
from .store import load

__all__ = ["Run", "load"]
