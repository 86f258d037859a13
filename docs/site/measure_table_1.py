"""Compare every row of Table 1 with its reference and draw its picture: `python measure_table_1.py folder`.

`folder/rows.json` has for each row what `bayesrule table` and `bayesrule table --check` print, the derivation, the
docstring and its example, and what differs from the row before it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import bayesrule as blr
from bayesrule.gallery.page import draw_entry, entries
from bayesrule.recipes.table import Row
from bayesrule.reference_checks import run_check

_EXAMPLE = re.compile(r"(?m)^>>> .*(?:\n(?!\s*$).*)*")


def describe(row: Row, before: Row | None) -> dict[str, Any]:
    """Everything that the page says of a row."""
    outcome = run_check(row)
    if not outcome.passed:
        raise SystemExit(f"{row.recipe} does not agree with its reference: {outcome.error:.1e} {outcome.message}")
    text = inspect.getdoc(getattr(blr, row.recipe)) or ""
    example = _EXAMPLE.search(text)
    explanation = re.split(r"(?m)^(?:Args:|Reference:|>>> )", text)[0].strip()
    differs = None
    if before is not None and before.rule is not None and row.rule is not None:
        differs = {"from": before.recipe, "text": str(blr.difference(before.rule, row.rule))}
    return {
        "block": row.block,
        "name": row.name,
        "recipe": row.recipe,
        "section": row.section,
        "posterior": row.posterior,
        "approximations": row.approximations,
        "explanation": explanation,
        "example": example[0] if example else "",
        "rule": str(row.rule),
        "reference": outcome.check.reference,
        "error": f"{outcome.error:.1e}",
        "tolerance": f"{outcome.check.tolerance:.0e}",
        "differs": differs,
    }


def main(folder: Path) -> None:
    """Write the rows and their pictures."""
    pictures = {entry.name: entry for entry in entries()}
    described, before = [], None
    for row in blr.table():
        described.append(describe(row, before))
        entry = pictures[row.recipe]
        described[-1]["caption"] = entry.caption
        (folder / f"{row.recipe}.svg").write_bytes(draw_entry(entry).svg)
        before = row
    (folder / "rows.json").write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
