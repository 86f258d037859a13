"""The section on the algorithm: its pieces, parsed from the derivation that the rule prints."""

from __future__ import annotations

import re

from ...runs.run import Run
from ..markup import Markup, join, tag

QUESTIONS = {
    "family": "Which distributions q are candidates?",
    "points": "Where is the loss evaluated, to approximate its expectation under q?",
    "curvature": "What is measured there?",
    "steps": "How large is a step?",
    "guard": "What keeps the parameters valid?",
    "update": "The resulting update.",
}
_LINE = re.compile(r"^ +(\w+) {2,}(\S.*)$")
_LABEL = re.compile(r"(\((?:eq|app|tab|fig|sec):\w+\))")
_INDEX = re.compile(r"(_(?:\{[^}]*\}|\w(?!\w)))")  # One letter after `_`, so that cosine_decay_schedule has no index.
RULE = join("λ ← λ − ρ ∇", tag("sub", "μ"), " [ E", tag("sub", "q"), " ℓ̄(θ) − H(q) ]")


def render_derivation(run: Run) -> Markup | None:
    """The rule and a line for each piece; the printed text itself if it cannot be parsed."""
    text = run.derivation.strip("\n")
    if not text.strip():
        return None
    head, pieces = parse_derivation(text)
    words = join(
        tag(
            "p",
            "Every algorithm of this library is one update, a natural-gradient step on expected loss minus entropy:",
        ),
        tag("p", RULE, class_="equation"),
        tag(
            "p",
            "An algorithm is a choice of the pieces below. Labels such as eq:… are those of the paper.",
        ),
    )
    if len(pieces) < 3:
        return join(words, tag("pre", text, tabindex="0"))
    return join(
        words, tag("p", tag("b", head), class_="rule"), tag("dl", [_piece(*piece) for piece in pieces], class_="pieces")
    )


def parse_derivation(text: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The first line, and for each piece its name, its value and its explanation.

    >>> parse_derivation("newton (section 1.3)\\n  points     Delta()   f(m)  (app:delta)\\n  update     S ← S,  m ← m")
    ('newton (section 1.3)', [('points', 'Delta()', 'f(m)  (app:delta)'), ('update', 'S ← S,  m ← m', '')])
    """
    head, *lines = text.splitlines()
    pieces: list[tuple[str, str, str]] = []
    for line in lines:
        match = _LINE.match(line)
        if match and match[1] in QUESTIONS:
            value, _, meaning = (match[2], "", "") if match[1] in ("steps", "update") else match[2].partition("  ")
            pieces.append((match[1], value.strip(), meaning.strip()))
        elif line.strip() and pieces:  # A long value continues in the next line.
            name, value, meaning = pieces[-1]
            pieces[-1] = (name, value, f"{meaning} {line.strip()}".strip())
    return head.strip(), pieces


def _piece(name: str, value: str, meaning: str) -> Markup:
    question = tag("span", QUESTIONS[name], class_="question")
    answer = tag("span", format_math(value), class_="equation") if name in ("steps", "update") else tag("code", value)
    return tag(
        "div",
        tag("dt", name, question),
        tag("dd", answer, tag("span", format_math(meaning), class_="meaning") if meaning else None),
    )


def format_math(text: str) -> Markup:
    """Formulas with subscripts for `E_q` and `∇_{μ_j}`, and the paper's labels in grey.

    >>> format_math("E_q f (eq:von_1)")
    'E<sub>q</sub> f <span class="label">(eq:von_1)</span>'
    """
    parts = _LABEL.split(text)
    return join(
        [tag("span", part, class_="label") if _LABEL.fullmatch(part) else _with_subscripts(part) for part in parts]
    )


def _with_subscripts(text: str) -> Markup:
    first, *rest = _INDEX.split(text)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return join(first, [join(tag("sub", _with_subscripts(index.strip("_{}"))), after) for index, after in pairs])
