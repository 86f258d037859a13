"""The page of Table 1: every row from the recipes themselves, with the error that its check has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cache import results_of
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PROGRAM = Path(__file__).with_name("measure_table_1.py")
INTRODUCTION = """# Table 1 as code

Every algorithm of the paper's Table 1 is the same update with other pieces. This page is made by running them: the
columns and the derivation are printed by the recipes, the example is the one in the recipe's docstring, each picture
is a run of the rule (`bayesrule gallery`), and each error was measured against other people's code when the page was
built (`bayesrule table --check`). Errors are relative to the distance that the reference moved.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page and its pictures."""
    folder = results_of(PROGRAM, name="table_1")
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    files.append(File.generated(config, "table_1.md", content=render(rows)))
    for row in rows:
        name = f"{row['recipe']}.svg"
        files.append(File.generated(config, f"table_1/{name}", abs_src_path=str(folder / name)))
    return files


def render(rows: list[dict[str, Any]]) -> str:
    """The page: the table, then a section for each row."""
    parts = [INTRODUCTION, _table(rows)]
    block = None
    for row in rows:
        if row["block"] != block:
            block = row["block"]
            parts.append(f"## {block}")
        parts.append(_section(row))
    return "\n\n".join(parts) + "\n"


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| Algorithm | Recipe | q | Approximations | Section | Error |", "|---|---|---|---|---|---|"]
    lines += [
        f"| [{row['name']}](#{row['recipe']}) | `{row['recipe']}` | {_cell(row['posterior'])} | "
        f"{_cell(row['approximations'])} | {row['section']} | {row['error']} |"
        for row in rows
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _section(row: dict[str, Any]) -> str:
    parts = [
        f"### {row['name']} {{ #{row['recipe']} }}",
        row["explanation"],
        f"```pycon\n{row['example']}\n```" if row["example"] else "",
        f"```text\n{row['rule']}\n```",
        f"![{row['name']}](table_1/{row['recipe']}.svg){{ .figure loading=lazy }}",
        f"/// caption\n{row['caption']}\n///",
        f"**Agrees with** {row['reference']}: error {row['error']}, allowed {row['tolerance']}.",
    ]
    if row["differs"]:
        parts.append(f"**What differs** from [`{row['differs']['from']}`](#{row['differs']['from']}):")
        parts.append(f"```text\n{row['differs']['text']}\n```")
    parts.append(f"Reference: [`blr.{row['recipe']}`][bayesrule.{row['recipe']}]")
    return "\n\n".join(filter(None, parts))
