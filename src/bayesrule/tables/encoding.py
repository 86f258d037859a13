"""From a table to numbers: standardised, categories as indicators, gaps filled; learnt once, kept as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .tables import Column, InputError, Table

_LEVELS = 30  # of a category that have a column of their own


@dataclass
class Encoding:
    """What every column becomes: a list of plain dicts, one for each column, and the names of the features."""

    columns: list[dict[str, Any]]
    features: list[str] = field(default_factory=list)

    @staticmethod
    def learnt(table: Table, names: Sequence[str]) -> Encoding:
        """From the training rows of these columns."""
        encoding = Encoding([_described(table.columns[name], table.rows) for name in names])
        for column in encoding.columns:
            if not column["used"]:
                continue
            encoding.features += (
                [column["name"]]
                if column["kind"] == "number"
                else [f"{column['name']}={level}" for level in column["levels"]]
            )
        if not encoding.features:
            notes = "; ".join(f"{c['name']!r} {c['note']}" for c in encoding.columns[:3])
            raise InputError(f"No column is left to predict from{': ' + notes if notes else ''}.")
        return encoding

    def matrix(self, table: Table) -> np.ndarray:
        """(rows, features): numbers less their mean over their deviation, NaN where they are missing; 0 or 1 for each
        level, 0 for those that were not seen in training."""
        parts = []
        for column in self.columns:
            if not column["used"]:
                continue
            parts.append(_encoded(column, table.column(column["name"])))
        return np.concatenate(parts, axis=1)

    @property
    def categories(self) -> list[str]:
        """The columns that are read as text."""
        return [column["name"] for column in self.columns if column["kind"] == "category"]

    def unseen(self, table: Table) -> dict[str, int]:
        """How many values of each category were not there in training."""
        found = {}
        for column in self.columns:
            if column["used"] and column["kind"] == "category":
                known = _encoded(column, table.column(column["name"])).any(axis=1)
                found[column["name"]] = int((~known & ~table.column(column["name"]).missing).sum())
        return {name: count for name, count in found.items() if count}


def _described(column: Column, rows: int) -> dict[str, Any]:
    """How a column is used, from its training rows."""
    missing = column.missing
    said: dict[str, Any] = {"name": column.name, "kind": column.kind, "missing": int(missing.sum()), "used": True}
    if column.note:
        said["note"] = column.note
    if missing.all():
        return said | {"used": False, "note": column.note or "has no values"}
    if column.codes is None:
        return said | _numeric(np.asarray(column.numbers), column.note)
    codes, counts = np.unique(column.codes[~missing], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    levels = [column.levels[code] for code in codes[order]]
    top = [[level, int(count)] for level, count in zip(levels[:5], counts[order], strict=False)]
    said |= {"levels": levels, "different": len(levels), "top": top}
    if len(levels) == 1 and not missing.any():
        return said | {"used": False, "note": "has the same value in every row"}
    if len(levels) > _LEVELS and len(levels) > 0.2 * rows:
        note = f"left out: {len(levels):,} different values in {rows:,} rows tell rows apart and nothing else"
        return said | {"used": False, "levels": levels[:_LEVELS], "note": note}
    if len(levels) > _LEVELS:
        note = f"the {_LEVELS} most frequent of {len(levels):,} values have a column each"
        return said | {"levels": levels[:_LEVELS], "note": note}
    return said


def _numeric(numbers: np.ndarray, note: str) -> dict[str, Any]:
    finite = numbers[np.isfinite(numbers)]
    endless = int(np.isinf(numbers).sum())
    notes = [note] * bool(note) + [f"{endless:,} infinite values are taken as missing"] * bool(endless)
    said: dict[str, Any] = {"note": "; ".join(notes)} if notes else {}
    if not len(finite):
        return said | {"used": False, "note": "has no finite values"}
    # Halved sums, so that the squares of the largest doubles do not overflow.
    size = float(np.max(np.abs(finite))) or 1.0
    mean, std = size * float(np.mean(finite / size)), size * float(np.std(finite / size))
    said |= {"mean": mean, "std": std, "min": float(finite.min()), "max": float(finite.max())}
    if std <= 1e-12 * size:
        return said | {"used": False, "note": "has the same value in every row"}
    return said


def _encoded(described: dict[str, Any], column: Column) -> np.ndarray:
    name = repr(column.name)
    if described["kind"] == "number":
        if column.numbers is None:
            raise InputError(f"Column {name} was numbers in training, and is text here ({column.levels[0]!r}, …).")
        numbers = np.where(np.isfinite(column.numbers), column.numbers, np.nan)
        return ((numbers - described["mean"]) / described["std"])[:, None]
    if column.codes is None:
        column = Column.of_text(column.name, [label or None for label in column.labels()])
    assert column.codes is not None  # it is a category now
    places = {level: place for place, level in enumerate(described["levels"])}
    known = np.array([places.get(level, -1) for level in column.levels] + [-1])[column.codes]
    return (known[:, None] == np.arange(len(places))).astype(float)
