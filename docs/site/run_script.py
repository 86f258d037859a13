"""Run a script of cells as a notebook would, and record what it shows: `python run_script.py script.py folder`.

A script is in the percent format: `# %%` begins a cell of code, `# %% [markdown]` a cell of text in comments. What
comes before the first cell is the docstring, with the page's title and first paragraph. Below a cell are shown what it
prints, the value of a last bare expression, and the figures that it leaves open. `folder/cells.json` lists the cells.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
import tempfile
import types
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_MARKER = re.compile(r"^# %%(?P<markdown> \[markdown\])?.*$", re.MULTILINE)
_LARGEST_SVG = 400_000  # bytes; pictures of many points are smaller in pixels


@dataclass
class Cell:
    """A cell, and what it has shown."""

    kind: str
    """`markdown` or `code`."""
    source: str
    line: int
    """Where it begins in the script, for tracebacks."""
    printed: str = ""
    value: str = ""
    figures: list[str] = field(default_factory=list)


def read_cells(text: str) -> tuple[str, list[Cell]]:
    """The docstring of a script, and its cells.

    >>> heading, cells = read_cells('\"\"\"Title.\"\"\"\\n\\n# %% [markdown]\\n# Some *text*.\\n\\n# %%\\n1 + 1\\n')
    >>> heading, [(cell.kind, cell.source, cell.line) for cell in cells]
    ('Title.', [('markdown', 'Some *text*.', 4), ('code', '1 + 1', 7)])
    """
    markers = list(_MARKER.finditer(text))
    first = text[: markers[0].start()] if markers else text
    module = ast.parse(first)
    heading = ast.get_docstring(module) or ""
    cells = []
    if len(module.body) > bool(heading):  # Code before the first marker, such as imports.
        begin = module.body[1 if heading else 0].lineno
        cells.append(Cell("code", "\n".join(first.splitlines()[begin - 1 :]).strip("\n"), begin))
    for marker, following in zip(markers, [*markers[1:], None], strict=True):
        body = text[marker.end() + 1 : following.start() if following else len(text)]
        line = text.count("\n", 0, marker.end()) + 2
        if marker["markdown"]:
            body = re.sub(r"(?m)^# ?", "", body)
        else:
            line += len(body) - len(body.lstrip("\n"))
        if body.strip():
            cells.append(Cell("markdown" if marker["markdown"] else "code", body.strip("\n").rstrip(), line))
    return heading, cells


def run_cell(cell: Cell, namespace: dict[str, Any], path: Path) -> None:
    """Run a cell of code and record what it shows."""
    tree = ast.parse("\n" * (cell.line - 1) + cell.source, filename=str(path))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(path), "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), namespace)
            if value is not None and not cell.source.endswith(";"):
                cell.value = repr(value)
    cell.printed = printed.getvalue()


def save_figures(folder: Path, stem: str) -> list[str]:
    """Save every open figure, close it, and return the names of the files."""
    import matplotlib.pyplot as plt

    from bayesrule.gallery.dark_theme import follow_theme

    names = []
    for number in plt.get_fignums():
        figure, file = plt.figure(number), io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
        name = f"{stem}_{len(names) + 1}"
        if file.tell() <= _LARGEST_SVG:
            names.append(f"{name}.svg")
            (folder / names[-1]).write_text(follow_theme(file.getvalue().decode()), encoding="utf-8")
        else:
            names.append(f"{name}.png")
            figure.savefig(folder / names[-1], dpi=160, bbox_inches="tight")
        plt.close(figure)
    return names


def set_style() -> None:
    """The site's colours and sizes, which a script may override."""
    import matplotlib

    from bayesrule.gallery.style import BAYESIAN, PLAIN, QUIET, THIRD

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "axes.prop_cycle": matplotlib.cycler(color=[BAYESIAN, PLAIN, THIRD, QUIET, "#8b5fa8", "#b8922e"]),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.figsize": (6.4, 3.6),
            "figure.constrained_layout.use": True,
            "legend.frameon": False,
            "svg.hashsalt": "bayesrule",
        }
    )


def run_script(path: Path, folder: Path) -> tuple[str, list[Cell]]:
    """Run a script cell by cell in one namespace, in an empty working directory, and save its figures to `folder`."""
    heading, cells = read_cells(path.read_text(encoding="utf-8"))
    set_style()
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for number, cell in enumerate(cells, start=1):
            if cell.kind == "code":
                run_cell(cell, vars(module), path)
                cell.figures = save_figures(folder, f"{path.stem}_{number}")
    return heading, cells


if __name__ == "__main__":
    script, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    title, ran = run_script(script, out)
    content = {"heading": title, "cells": [asdict(cell) for cell in ran]}
    (out / "cells.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
