"""The tutorials: every script of `docs/tutorials` is run, and becomes a page with what it prints and draws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cache import results_of
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SECTION = "Tutorials"
RUNNER = Path(__file__).with_name("run_script.py")


def _scripts(config: MkDocsConfig) -> list[Path]:
    return sorted(Path(config.docs_dir, "tutorials").glob("*.py"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the tutorials in the navigation: those that mkdocs.yml names in their order, then the others."""
    for entry in config.nav or []:
        if isinstance(entry, dict) and SECTION in entry:
            named = entry[SECTION] or []
            pages = [f"tutorials/{path.stem}.md" for path in _scripts(config)]
            entry[SECTION] = [page for page in named if page in pages] + [page for page in pages if page not in named]
    config.nav = [entry for entry in config.nav or [] if not (isinstance(entry, dict) and entry.get(SECTION) == [])]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Run the scripts, and add their pages and pictures."""
    for path in _scripts(config):
        folder = results_of(RUNNER, path, name=f"tutorials-{path.stem}")
        recorded = json.loads((folder / "cells.json").read_text(encoding="utf-8"))
        page = render(recorded, path.name)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=page))
        for picture in sorted(folder.glob(f"{path.stem}_*.*")):
            files.append(File.generated(config, f"tutorials/{picture.name}", abs_src_path=str(picture)))
    return files


def render(recorded: dict[str, Any], name: str) -> str:
    """The Markdown of a page: title and first paragraph from the docstring, then the cells with what they show."""
    title, _, introduction = recorded["heading"].partition("\n")
    parts = [f"# {title.removesuffix('.')}", introduction.strip()]
    for cell in recorded["cells"]:
        if cell["kind"] == "markdown":
            parts.append(cell["source"])
            continue
        parts.append(_fenced("python", cell["source"]))
        shown = "\n".join(filter(None, [cell["printed"].rstrip("\n"), cell["value"]]))
        if shown:
            parts.append(_fenced("{ .text .output }", shown))
        parts += [f"![Figure drawn by the cell above]({figure}){{ .figure }}" for figure in cell["figures"]]
    parts.append(f"The script of this page is `docs/tutorials/{name}`; every output above is from running it.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _fenced(language: str, text: str) -> str:
    """A fenced block, with a fence that is longer than any within it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
