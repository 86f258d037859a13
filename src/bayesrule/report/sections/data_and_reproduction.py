"""The sections on the data, and on how to reproduce the run."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ...runs.run import Run
from ..format_numbers import count, counted, mean_and_std, number, trimmed
from ..markup import Markup, clean, join, tag, user_text
from .layout import mark_options, table

SHOWN_COLUMNS = 40
READING = ("missing", "decimal", "date_format", "sheet", "columns")
SETTINGS = ("data", "target", "task", "model", "recipe", "time", "test_size", "cv", "seed", *READING, "params")


def render_data(run: Run) -> Markup | None:
    """Numbers of rows and columns, what was guessed about them and done about missing values, and the columns."""
    summary = run.summary
    columns: list[dict[str, Any]] = list(summary.get("columns") or ())
    labels = {"rows": "rows", "train_rows": "for training", "test_rows": "held out"}
    counts = [(label, summary[key]) for key, label in labels.items() if summary.get(key) is not None]
    if not columns and not counts:
        return None
    facts = [tag("div", tag("dt", label), tag("dd", count(value)), class_="fact") for label, value in counts]
    facts += [tag("div", tag("dt", "columns"), tag("dd", count(len(columns))), class_="fact")] if columns else []
    if summary.get("features"):
        facts.append(
            tag("div", tag("dt", "inputs of the model"), tag("dd", count(len(summary["features"]))), class_="fact")
        )
    guesses = [tag("li", mark_options(str(each))) for each in summary.get("guesses") or ()]
    return join(
        tag("dl", facts, class_="facts"),
        join(tag("p", "What was guessed; options of the command line change it:"), tag("ul", guesses))
        if guesses
        else None,
        [tag("p", f"{remark[:1].upper()}{remark[1:]}.") for remark in map(str, summary.get("missing") or ())],
        _columns(columns, summary.get("target")) if columns else None,
    )


def _columns(columns: list[dict[str, Any]], target: dict[str, Any] | None) -> Markup:
    """A table of the columns; if there are too many, those with remarks come first and the rest is only counted."""
    remarks_first = sorted(
        columns, key=lambda each: not (each.get("note") or each.get("missing") or not each.get("used", True))
    )
    shown = columns if len(columns) <= SHOWN_COLUMNS else remarks_first[:SHOWN_COLUMNS]
    lines = [_column(target)] if target else []
    lines = [[join(tag("b", line[0]), " (target)"), *line[1:]] for line in lines]
    lines += [_column(each) for each in shown]
    words = None
    if len(shown) < len(columns):
        words = tag(
            "p",
            f"{count(len(shown))} of {counted(len(columns), 'column')}, those with remarks first.",
            class_="caption",
        )
    heads = ["Column", "Read as", "Values", "Missing", "Remark"]
    # The last two columns of this table are left out if they would be empty in every line.
    kept = [index for index in range(5) if index < 3 or any(line[index] not in ("", "–") for line in lines)]
    cells = [[line[index] for index in kept] for line in lines]
    numbers = (3,) if 3 in kept else ()
    return join(table([heads[index] for index in kept], cells, numbers=numbers, css_class="columns stack"), words)


def _column(each: dict[str, Any]) -> list[Any]:
    unused = "" if each.get("used", True) else "not used"
    remark = "; ".join(clean(part) for part in (unused, each.get("note")) if part)
    name = user_text(each.get("name", ""), 60)
    missing = each.get("missing") or 0
    return [
        name,
        clean(each.get("guess") or each.get("kind", "")),
        _values(each),
        count(missing) if missing else "–",
        remark,
    ]


def _values(each: dict[str, Any]) -> Any:
    """The mean and range of a numeric column, or the most frequent levels of a categorical one."""
    if each.get("mean") is not None:
        mean, std = number(each["mean"]), ""
        if each.get("std") is not None:
            mean, std = mean_and_std(float(each["mean"]), float(each["std"]))
        span = f", {number(each.get('min'))} to {number(each.get('max'))}" if each.get("min") is not None else ""
        return f"{mean}{' ± ' if std else ''}{std}{span}"
    top: list[Any] = list(each.get("top") or ())[:3]
    frequent: list[Any] = [join(user_text(level, 24), f" ({count(amount)})") for level, amount in top]
    parts = [join(", " if index else "", part) for index, part in enumerate(frequent)]
    distinct = each.get("different", each.get("levels"))
    levels = len(distinct) if isinstance(distinct, list | tuple) else distinct
    if levels is None:
        return join(parts)
    rest = ", …" if levels > len(top) else ""
    return join(counted(levels, "level"), ": " if parts else "", parts, rest if parts else "")


def render_reproduction(run: Run) -> Markup | None:
    """The configuration as a file that repeats the run, the versions used, and the time it took."""
    if not run.config and not run.versions:
        return None
    settings = {key: run.config[key] for key in SETTINGS if run.config.get(key) not in (None, {}, [])}
    lines = "\n".join(_yaml(settings))
    times = [f"{clean(part).replace('_', ' ')} {trimmed(value, 3)} s" for part, value in run.seconds.items()]
    return join(
        tag("p", "The configuration, as a file for ", tag("code", "bayesrule fit --config", class_="option"), ":")
        if lines
        else None,
        tag("pre", tag("code", lines), tabindex="0", aria_label="configuration") if lines else None,
        render_versions(run.versions),
        tag("p", "Time: ", ", ".join(times), ".", class_="caption") if times else None,
    )


def render_versions(versions: dict[str, str]) -> Markup | None:
    """The versions of the software, those that are known."""
    known = [f"{name} {version}" for name, version in versions.items() if version != "unknown"]
    return tag("p", "Versions: ", ", ".join(clean(each) for each in known), ".", class_="caption") if known else None


def _yaml(values: dict[str, Any], indent: int = 0) -> list[str]:
    """The lines of a configuration in a small subset of YAML.

    >>> _yaml({"seed": 0, "target": "a: b", "params": {"rate": 0.1, "hidden": [50, 50]}})
    ['seed: 0', 'target: "a: b"', 'params:', '  rate: 0.1', '  hidden: [50, 50]']
    """
    lines = []
    for name, value in values.items():
        if value is None:  # The program chooses the value.
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
