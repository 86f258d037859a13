"""The data that it was made from, and what is needed to make it again."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from ...runs.run import Run
from ..format_numbers import count, number, round_number, several, with_spread
from ..markup import Markup, cleaned, joined, named, tag
from .layout import table

COLUMNS = 40
ASKED = ("data", "target", "task", "model", "recipe", "time", "test_size", "seed", "params")


def data(run: Run) -> Markup | None:
    """Rows and columns, what was guessed about them, and a line for each column."""
    summary = run.summary
    columns: list[dict[str, Any]] = list(summary.get("columns") or ())
    known = {"rows": "rows", "train_rows": "for training", "test_rows": "held out"}
    counts = [(name, summary[key]) for key, name in known.items() if summary.get(key) is not None]
    if not columns and not counts:
        return None
    facts = [tag("div", tag("dt", name), tag("dd", count(value)), class_="fact") for name, value in counts]
    facts += [tag("div", tag("dt", "columns"), tag("dd", count(len(columns))), class_="fact")] if columns else []
    if summary.get("features"):
        facts.append(
            tag("div", tag("dt", "inputs of the model"), tag("dd", count(len(summary["features"]))), class_="fact")
        )
    guesses = [tag("li", _options(str(each))) for each in summary.get("guesses") or ()]
    return joined(
        tag("dl", facts, class_="facts"),
        joined(tag("p", "What was guessed, and can be said otherwise:"), tag("ul", guesses)) if guesses else None,
        _columns(columns, summary.get("target")) if columns else None,
    )


def _options(text: str) -> Markup:
    """Words in which options of the command line stand out, and stay whole."""
    parts = re.split(r"(--[\w-]+)", text)
    return joined([tag("code", part, class_="option") if part.startswith("--") else part for part in parts])


def _columns(columns: list[dict[str, Any]], target: dict[str, Any] | None) -> Markup:
    """A table of the columns; of very many, those with something to say come first and the rest is counted."""
    remarked = sorted(
        columns, key=lambda each: not (each.get("note") or each.get("missing") or not each.get("used", True))
    )
    shown = columns if len(columns) <= COLUMNS else remarked[:COLUMNS]
    lines = [_column(target)] if target else []
    lines = [[joined(tag("b", line[0]), " (target)"), *line[1:]] for line in lines]
    lines += [_column(each) for each in shown]
    words = None
    if len(shown) < len(columns):
        words = tag(
            "p",
            f"{count(len(shown))} of {several(len(columns), 'column')}, those with remarks first.",
            class_="caption",
        )
    heads = ["Column", "Kind", "Values", "Missing", "Remark"]
    # A column of dashes would only take room.
    there = [place for place in range(5) if place < 3 or any(line[place] not in ("", "–") for line in lines)]
    kept = [[line[place] for place in there] for line in lines]
    numbers = (3,) if 3 in there else ()
    return joined(table([heads[place] for place in there], kept, numbers=numbers, look="columns"), words)


def _column(each: dict[str, Any]) -> list[Any]:
    unused = "" if each.get("used", True) else "not used"
    remark = "; ".join(cleaned(part) for part in (unused, each.get("note")) if part)
    name = named(each.get("name", ""), 60)
    missing = each.get("missing") or 0
    return [name, each.get("kind", ""), _values(each), count(missing) if missing else "–", remark]


def _values(each: dict[str, Any]) -> Any:
    """A number's mean and range, or a category's most frequent levels."""
    if each.get("mean") is not None:
        mean, spread = number(each["mean"]), ""
        if each.get("std") is not None:
            mean, spread = with_spread(float(each["mean"]), float(each["std"]))
        span = f", {number(each.get('min'))} to {number(each.get('max'))}" if each.get("min") is not None else ""
        return f"{mean}{' ± ' if spread else ''}{spread}{span}"
    top: list[Any] = list(each.get("top") or ())[:3]
    said: list[Any] = [joined(named(level, 24), f" ({count(amount)})") for level, amount in top]
    parts = [joined(", " if place else "", part) for place, part in enumerate(said)]
    given = each.get("different", each.get("levels"))
    levels = len(given) if isinstance(given, list | tuple) else given
    if levels is None:
        return joined(parts)
    rest = ", …" if levels > len(top) else ""
    return joined(several(levels, "level"), ": " if parts else "", parts, rest if parts else "")


def again(run: Run) -> Markup | None:
    """The configuration as a file that gives the same run, the versions, and how long it took."""
    if not run.config and not run.versions:
        return None
    asked = {key: run.config[key] for key in ASKED if run.config.get(key) not in (None, {})}
    lines = "\n".join(_yaml(asked))
    took = [f"{cleaned(part).replace('_', ' ')} {round_number(value, 3)} s" for part, value in run.seconds.items()]
    made = [f"{name} {version}" for name, version in run.versions.items() if version != "unknown"]
    return joined(
        tag("p", "As a file for ", tag("code", "bayesrule fit --config", class_="option"), ":") if lines else None,
        tag("pre", tag("code", lines), tabindex="0", aria_label="configuration") if lines else None,
        tag("p", "Made with ", ", ".join(cleaned(each) for each in made), ".", class_="caption") if made else None,
        tag("p", "Time: ", ", ".join(took), ".", class_="caption") if took else None,
    )


def _yaml(values: dict[str, Any], indent: int = 0) -> list[str]:
    """The lines of a configuration in the part of YAML that needs no explanation.

    >>> _yaml({"seed": 0, "target": "a: b", "params": {"rate": 0.1, "hidden": [50, 50]}})
    ['seed: 0', 'target: "a: b"', 'params:', '  rate: 0.1', '  hidden: [50, 50]']
    """
    lines = []
    for name, value in values.items():
        if value is None:  # left to the program
            continue
        if isinstance(value, dict) and value:
            lines += [f"{' ' * indent}{_scalar(name)}:", *_yaml(value, indent + 2)]
        else:
            lines.append(f"{' ' * indent}{_scalar(name)}: {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return json.dumps(value, default=str, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_scalar(each) for each in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    plain = bool(text) and text.isprintable() and text == text.strip() and not set(text) & set(":#{}[],&*!|>'\"%@`")
    ambiguous = (
        text.lower() in {"null", "true", "false", "yes", "no", "~"} or _is_number(text) or text.startswith(("-", "?"))
    )
    return text if plain and not ambiguous else json.dumps(text, ensure_ascii=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
