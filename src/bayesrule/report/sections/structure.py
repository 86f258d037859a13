"""The sections on what a model without a target found: groups, topics or factors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...runs.run import Run
from .. import charts
from ..format_numbers import count, counted, mean_and_std, number, percent, rounded_to
from ..held_out_rows import task
from ..markup import Markup, join, tag, user_text
from .layout import figure, legend, side_by_side, table

_SHOWN_COLUMNS, _SHOWN_DOTS, _SHOWN_GROUPS, _SHOWN_DOCUMENTS = 30, 600, 12, 3


def render_groups(run: Run) -> Markup | None:
    """The rows on a plane, what each group is like, and how sure the groups of rows are."""
    rows = run.structure.get("rows") or {}
    if task(run) != "clusters" or not np.size(rows.get("group", ())):
        return None
    group, weight = np.asarray(rows["group"]), np.asarray(run.structure["weight"], float)
    sizes = np.bincount(group, minlength=len(weight))
    empty = int(np.sum(sizes == 0))
    entries = [
        legend(
            f"{charts.GROUP_COLORS[k % len(charts.GROUP_COLORS)]} dot", f"group {k + 1} ({counted(sizes[k], 'row')})"
        )
        for k in range(min(len(weight), _SHOWN_GROUPS))
        if sizes[k]
    ]
    plane, variance = np.asarray(run.structure["plane"], float), np.asarray(run.structure["variance"], float)
    picture = None
    if plane.ndim == 2 and plane.shape[1] == 2:
        subset = f" {count(_SHOWN_DOTS)} of {count(len(plane))} rows are drawn." if len(plane) > _SHOWN_DOTS else ""
        words = join(
            entries,
            " The rows on the plane along which they vary most; the numbers stand at the groups' medians. Groups that "
            f"overlap here can be apart in other directions.{subset}",
        )
        picture = figure(charts.group_plane(plane, group, variance, _SHOWN_DOTS), words, wide=True)
    remark = f" {counted(empty, 'component')} of the mixture has no rows." if empty else ""
    return join(
        picture,
        _group_table(run, sizes, weight),
        tag(
            "p",
            "Means of the columns in each group ± standard deviations inside it. Shaded are means that differ from the "
            "mean of all rows by half a standard deviation or more, ",
            legend("orange", "above"),
            legend("blue", "below"),
            f" it.{remark}",
            class_="caption",
        ),
        side_by_side(_membership(run, rows, "probability of the group, %"), _sizes(run, "groups")),
        _compared(run, "Group"),
        _odd_rows(run, rows),
    )


def _group_table(run: Run, sizes: np.ndarray, weight: np.ndarray) -> Markup:
    mean, std, deviation = (np.asarray(run.structure[key], float) for key in ("mean", "std", "deviation"))
    features = list(run.summary.get("features") or ())
    shown = [k for k in range(len(weight)) if sizes[k]][:_SHOWN_GROUPS]
    apart = np.ptp(deviation[shown], axis=0) if len(shown) > 1 else np.zeros(len(features))
    order = np.argsort(-apart, kind="stable")[:_SHOWN_COLUMNS]
    heads = ["Column", *(f"Group {k + 1}" for k in shown)]
    lines: list[list[Any]] = [["share of rows", *(percent(float(weight[k])) for k in shown)]]
    for column in order:
        cells: list[Any] = [user_text(features[column], 40)]
        for k in shown:
            value, spread = mean_and_std(float(mean[k, column]), float(std[k, column]))
            cells.append(
                _shaded(join(value, tag("span", f" ± {spread}", class_="std")), float(deviation[k, column]), 0.5)
            )
        lines.append(cells)
    more = len(features) - len(order)
    rest = (
        tag("p", f"{counted(more, 'column')} in which groups differ less not shown.", class_="caption")
        if more
        else None
    )
    return join(table(heads, lines, numbers=tuple(range(1, len(heads))), css_class="shaded"), rest)


def _shaded(content: Any, value: float, least: float, full: float = 2.0) -> Markup:
    """Content with a background that is orange for positive values and blue for negative ones."""
    if not np.isfinite(value) or abs(value) < least:
        return tag("span", content)
    share = min(abs(value) / full, 1.0)
    css_class = "shade above" if value > 0 else "shade below"
    return tag("span", content, class_=css_class, style=f"--share:{100 * share:.0f}%")


def _membership(run: Run, rows: dict[str, Any], name: str) -> Markup | None:
    probability = np.asarray(rows.get("probability", ()), float)
    if not probability.size:
        return None
    sure = percent(float(np.mean(probability >= 0.9)))
    words = {
        "clusters": f"How probable the group of each row is; {sure} of the rows have at least 90 %. The others lie "
        "between groups.",
        "topics": f"How much of each row is about its main topic; {sure} of the rows have at least 90 %.",
    }[task(run)]
    return figure(charts.membership(probability, name), words)


def _sizes(run: Run, nouns: str) -> Markup | None:
    sizes, criterion = (np.asarray(run.structure.get(key, ()), float).ravel() for key in ("sizes", "criterion"))
    if sizes.size < 2 or sizes.size != criterion.size or not np.isfinite(criterion).all():
        return None
    name = run.summary.get("criterion") or "criterion"
    words = join(
        legend("orange dot", "chosen"),
        f" The number of {nouns} was chosen by the least {name}, from quick fits by scikit-learn; the model itself was "
        "then fitted with that number. ",
        tag("code", "-p n_components=…", class_="option"),
        " chooses another.",
    )
    return figure(charts.size_curve(sizes, criterion, f"number of {nouns}", str(name)), words)


def _compared(run: Run, noun: str) -> Markup | None:
    """How a column that the model did not see differs between groups, or factors by its levels."""
    found = run.structure.get("compared") or {}
    if not found:
        return None
    name = user_text(found["name"], 40)
    title = tag("h3", "Compared with ", name, ", which the model did not see")
    if "correlation" in found:
        values = np.asarray(found["correlation"], float)
        lines = [[f"Factor {k + 1}", number(float(value), 2)] for k, value in enumerate(values)]
        return tag("div", title, table(["", "Correlation"], lines, numbers=(1,)), class_="part")
    if "counts" in found:
        counts, levels = np.asarray(found["counts"]), [user_text(level, 24) for level in found["levels"]]
        lines = [
            [f"{noun} {k + 1}", *(_share_of(int(value), int(line.sum())) for value in line)]
            for k, line in enumerate(counts)
            if line.sum()
        ]
        heads = [noun, *levels]
    elif "score" in found:
        scores = np.asarray(found["score"], float)
        heads = [name, *(f"Factor {k + 1}" for k in range(scores.shape[1]))]
        lines = [
            [user_text(level, 24), *(_shaded(number(float(value), 2), float(value), 0.5) for value in line)]
            for level, line in zip(found["levels"], scores, strict=True)
        ]
    else:
        heads = [noun, "Mean", "Standard deviation"]
        mean, std = (np.asarray(found[key], float) for key in ("mean", "std"))
        lines = [
            [f"{noun} {k + 1}", rounded_to(float(mean[k]), float(std[k])), number(float(std[k]), 2)]
            for k in range(len(mean))
            if np.isfinite(mean[k])
        ]
    return tag(
        "div", title, table(heads, lines, numbers=tuple(range(1, len(heads))), css_class="shaded"), class_="part"
    )


def _share_of(value: int, total: int) -> Markup:
    shade = f"--share:{100 * value / max(total, 1):.0f}%" if value else None
    return tag("span", count(value), class_="shade below" if value else None, style=shade)


def _odd_rows(run: Run, rows: dict[str, Any]) -> Markup | None:
    """The rows that fit the model least."""
    density = np.asarray(rows.get("log_density", ()), float)
    if not density.size or not np.isfinite(density).any():
        return None
    order = np.argsort(np.where(np.isfinite(density), density, np.inf), kind="stable")[:8]
    row = np.asarray(rows["row"])
    heads, numbers = ["Row", "Log density"], [0, 1]
    lines: list[list[Any]] = [[str(row[i]), number(float(density[i]))] for i in order]
    if "group" in rows:
        heads += ["Group", "Probability"]
        numbers += [2, 3]
        for line, i in zip(lines, order, strict=True):
            line += [str(int(rows["group"][i]) + 1), percent(float(rows["probability"][i]))]
    words = (
        f"Of {counted(len(density), 'row')}, those that are least probable under the model (the median log density is "
        f"{number(float(np.nanmedian(density)))}). Rows are numbered as in the file, from 0."
    )
    listed = table(heads, lines, numbers=numbers)
    return tag("div", tag("h3", "Rows that fit least"), tag("p", words, class_="caption"), listed, class_="part")


def render_topics(run: Run) -> Markup | None:
    """The words of each topic, and how rows divide among topics."""
    words, rows = np.asarray(run.structure.get("words", ())), run.structure.get("rows") or {}
    if task(run) != "topics" or words.ndim != 2:
        return None
    share, probability = (np.asarray(run.structure[key], float) for key in ("share", "probability"))
    features = list(run.summary.get("features") or ())
    group, main = np.asarray(rows["group"]), np.asarray(rows["probability"], float)
    lines = []
    for k in range(len(words)):
        chips = [
            tag(
                "span",
                user_text(features[int(word)], 30),
                class_="chip",
                style=f"--share:{_strength(p, probability[k]):.0f}%",
            )
            for word, p in zip(words[k], probability[k], strict=True)
        ]
        mine = np.flatnonzero(group == k)
        purest = mine[np.argsort(-main[mine], kind="stable")][:_SHOWN_DOCUMENTS]
        shown = ", ".join(str(np.asarray(rows["row"])[i]) for i in purest)
        lines.append([str(k + 1), percent(float(share[k])), tag("span", chips, class_="chips"), shown or "–"])
    heads = ["Topic", "Share of words", "Most probable words, stronger is more probable", "Purest rows"]
    std = float(np.median(np.asarray(rows["std"], float)))
    caption = (
        f"Topics are numbered by size. The share of a row's main topic is known to ± {percent(std)} (median standard "
        "deviation). Rows are numbered as in the file; the first one after the header is row 0."
    )
    return join(
        table(heads, lines, numbers=(0, 1), css_class="topic-table stack"),
        tag("p", caption, class_="caption"),
        side_by_side(_membership(run, rows, "share of the main topic, %"), _sizes(run, "topics")),
        _compared(run, "Topic"),
    )


def _strength(probability: float, all_of_topic: np.ndarray) -> float:
    return 100 * probability / max(float(all_of_topic.max()), 1e-300)


def render_factors(run: Run) -> Markup | None:
    """The loadings of the columns on the factors, the rows by their factors, and what is left to each column."""
    loading, rows = np.asarray(run.structure.get("loading", ()), float), run.structure.get("rows") or {}
    if task(run) != "factors" or loading.ndim != 2:
        return None
    std, noise = (np.asarray(run.structure[key], float) for key in ("loading_std", "noise"))
    explained = np.asarray(run.structure["explained"], float)
    features = list(run.summary.get("features") or ())
    factors = range(loading.shape[0])
    heads = ["Column", *(f"Factor {k + 1}" for k in factors), "Its own"]
    lines: list[list[Any]] = [["share of the variance", *(percent(float(explained[k])) for k in factors), ""]]
    # Columns stand with the factor that moves them most, the strongest first.
    strongest = np.abs(loading).argmax(axis=0)
    order = np.lexsort((-np.abs(loading).max(axis=0), strongest))[:_SHOWN_COLUMNS]
    for column in order:
        cells = [user_text(features[column], 40)]
        for k in factors:
            value, spread = float(loading[k, column]), float(std[k, column])
            text = mean_and_std(value, spread) if spread > 0 else (number(value, 2), "")
            after = tag("span", f" ± {text[1]}", class_="std") if text[1] else None
            cells.append(_shaded(join(text[0], after), value, 0.3, 1.0))
        lines.append([*cells, percent(float(noise[column]))])
    more = len(features) - len(order)
    rest = f" {counted(more, 'column')} with weaker loadings not shown." if more else ""
    caption = join(
        "Loadings ± their standard deviations: by how many of its standard deviations a column moves with one of the "
        "factor's. Shaded are loadings of at least 0.3, ",
        legend("orange", "positive"),
        legend("blue", "negative"),
        f". The last column is the share of its variance that no factor explains.{rest} Factors can be rotated without "
        "a change of the fit; these are the directions that the prior prefers.",
    )
    score = np.asarray(rows["score"], float)
    typical = [number(float(value), 2) for value in np.median(np.asarray(rows["std"], float), axis=0)[:2]]
    known = " and ".join(typical)
    plane = figure(
        charts.score_plane(score, _SHOWN_DOTS),
        f"The rows by their {'first two factors' if score.shape[1] > 1 else 'factor'}; a value is known to ± {known} "
        "(median standard deviations).",
    )
    return join(
        table(heads, lines, numbers=tuple(range(1, len(heads))), css_class="shaded"),
        tag("p", caption, class_="caption"),
        side_by_side(plane, _sizes(run, "factors")),
        _compared(run, "Factor"),
        _odd_rows(run, rows),
    )


def summarize_structure(run: Run) -> str:
    """What was found, in a few words for the headline: "3 groups of rows"."""
    size = {
        "clusters": len({int(each) for each in np.asarray((run.structure.get("rows") or {}).get("group", ())).ravel()}),
        "topics": len(np.asarray(run.structure.get("share", ()))),
        "factors": len(np.asarray(run.structure.get("explained", ()))),
    }.get(task(run), 0)
    nouns = {"clusters": ("group", "groups"), "topics": ("topic", "topics"), "factors": ("factor", "factors")}
    return counted(size, *nouns[task(run)]) if task(run) in nouns and size else ""
