"""From a table to a matrix: numbers are standardised, categories become indicator columns.

The encoding is fitted to the training rows, applied to any rows, and saved as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .tables import Column, InputError, Table

_MOST_LEVELS = 30  # Only the most frequent levels of a category get an indicator column.


@dataclass
class Encoding:
    """How every column is encoded.

    Args:
        columns: a dict for each column, as `Run.summary["columns"]` describes it.
        features: the names of the columns of the matrix.
    """

    columns: list[dict[str, Any]]
    features: list[str] = field(default_factory=list)

    @staticmethod
    def fit(table: Table, names: Sequence[str]) -> Encoding:
        """Fit to the columns `names` of the training rows."""
        encoding = Encoding([_describe(table.columns[name], table.rows) for name in names])
        for column in encoding.columns:
            if not column["used"]:
                continue
            encoding.features += (
                [column["name"]]
                if column["kind"] == "number"
                else [f"{column['name']}={level}" for level in column["levels"]]
            )
        if not encoding.features:
            notes = "; ".join(f"{column['name']!r} {column['note']}" for column in encoding.columns[:3])
            raise InputError(f"No column is left to predict from{': ' + notes if notes else ''}.")
        return encoding

    def matrix(self, table: Table) -> np.ndarray:
        """Encode rows as a matrix (rows, features).

        Numbers have the training mean subtracted and are divided by the training deviation; missing ones are NaN.
        Each level of a category has a column of 0 and 1. All of them are 0 for unknown levels, and for missing values
        if there were some in training: these count as a level of their own. Otherwise missing values are NaN.
        """
        used = [column for column in self.columns if column["used"]]
        return np.concatenate([_encode(column, table.column(column["name"])) for column in used], axis=1)

    def category_blocks(self) -> list[tuple[slice, bool]]:
        """The places of each category's indicator columns in the matrix, and whether every level has one."""
        blocks, begin = [], 0
        for column in self.columns:
            if column["used"]:
                width = 1 if column["kind"] == "number" else len(column["levels"])
                if column["kind"] == "category":
                    blocks.append((slice(begin, begin + width), column.get("different", width) == width))
                begin += width
        return blocks

    def count_missing(self, matrix: np.ndarray) -> int:
        """How many values of an encoded matrix are missing (NaN); a category, of several columns, counts once."""
        missing = np.isnan(matrix).sum(axis=0)
        repeated = sum(int(missing[block][1:].sum()) for block, _ in self.category_blocks())
        return int(missing.sum()) - repeated

    def unseen(self, table: Table) -> dict[str, int]:
        """For each categorical column, how many values have no indicator column; columns without any are left out."""
        counts = {}
        for column in self.columns:
            if column["used"] and column["kind"] == "category":
                known = _encode(column, table.column(column["name"])).any(axis=1)
                counts[column["name"]] = int((~known & ~table.column(column["name"]).missing).sum())
        return {name: count for name, count in counts.items() if count}


def _describe(column: Column, rows: int) -> dict[str, Any]:
    """Describe a column of training rows, and decide how it is encoded."""
    missing = column.missing
    description: dict[str, Any] = {
        "name": column.name,
        "kind": column.kind,
        "missing": int(missing.sum()),
        "used": True,
    }
    if column.guess:
        description["guess"] = column.guess
    if column.note:
        description["note"] = column.note
    if column.skip:
        return description | {"used": False, "note": column.skip}
    if missing.all():
        return description | {"used": False, "note": column.note or "has no values"}
    if column.codes is None:
        return description | _describe_numbers(np.asarray(column.numbers), column.note)
    codes, counts = np.unique(column.codes[~missing], return_counts=True)
    by_frequency = np.argsort(-counts, kind="stable")
    levels = [column.levels[code] for code in codes[by_frequency]]
    top = [[level, int(count)] for level, count in zip(levels[:5], counts[by_frequency], strict=False)]
    description |= {"levels": levels, "different": len(levels), "top": top}
    if len(levels) == 1 and not missing.any():
        return description | {"used": False, "note": "has the same value in every row"}
    if len(levels) > _MOST_LEVELS and len(levels) > 0.2 * rows:
        note = f"is left out: {len(levels):,} different values in {rows:,} rows only tell rows apart"
        return description | {"used": False, "levels": levels[:_MOST_LEVELS], "note": note}
    if len(levels) > _MOST_LEVELS:
        note = f"only the {_MOST_LEVELS} most frequent of {len(levels):,} values get an indicator column"
        return description | {"levels": levels[:_MOST_LEVELS], "note": note}
    return description


def _describe_numbers(numbers: np.ndarray, note: str) -> dict[str, Any]:
    finite = numbers[np.isfinite(numbers)]
    infinite = int(np.isinf(numbers).sum())
    # Where the values come from a file, the note says so already, with the place.
    is_known = not infinite or "infinite value" in note
    notes = [note] * bool(note) + [f"{infinite:,} infinite values are treated as missing"] * (not is_known)
    description: dict[str, Any] = {"note": "; ".join(notes)} if notes else {}
    if not len(finite):
        return description | {"used": False, "note": "has no finite values"}
    # Divide by the largest magnitude first, so that squares of large numbers do not overflow.
    scale = float(np.max(np.abs(finite))) or 1.0
    mean, std = scale * float(np.mean(finite / scale)), scale * float(np.std(finite / scale))
    description |= {"mean": mean, "std": std, "min": float(finite.min()), "max": float(finite.max())}
    if std <= 1e-12 * scale:
        return description | {"used": False, "note": "has the same value in every row"}
    return description


def _encode(description: dict[str, Any], column: Column) -> np.ndarray:
    """Encode a column as its description says: (rows, 1) for numbers, (rows, levels) for a category."""
    if description["kind"] == "number":
        if column.numbers is None:
            raise InputError(
                f"Column {column.name!r} has text ({column.levels[0]!r}, …), and had numbers in training: give numbers "
                "in it."
            )
        numbers = np.where(np.isfinite(column.numbers), column.numbers, np.nan)
        return ((numbers - description["mean"]) / description["std"])[:, None]
    if column.codes is None:
        column = Column.of_text(column.name, [label or None for label in column.labels()])
    assert column.codes is not None  # Because it is a category now.
    index_of = {level: index for index, level in enumerate(description["levels"])}
    indices = np.array([index_of.get(level, -1) for level in column.levels] + [-1])[column.codes]
    indicators = (indices[:, None] == np.arange(len(index_of))).astype(float)
    if not description["missing"]:
        indicators[column.missing] = np.nan
    return indicators
