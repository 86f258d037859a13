"""The algorithm as an instance of the rule: its pieces, read from what it prints of itself."""

from __future__ import annotations

import re

from ...runs.run import Run
from ..markup import Markup, joined, tag

QUESTIONS = {
    "family": "Which distributions q are candidates?",
    "points": "Where is the loss looked at, to stand for its mean over q?",
    "curvature": "What is measured there?",
    "steps": "How far does a step go?",
    "guard": "What keeps the parameters where they may be?",
    "update": "So this is what one step does.",
}
_LINE = re.compile(r"^ +(\w+) {2,}(\S.*)$")
_LABEL = re.compile(r"(\((?:eq|app|tab|fig|sec):\w+\))")
_INDEX = re.compile(r"(_(?:\{[^}]*\}|\w(?!\w)))")  # not in cosine_decay_schedule
_RULE = joined("λ ← λ − ρ ∇", tag("sub", "μ"), " [ E", tag("sub", "q"), " ℓ̄(θ) − H(q) ]")


def derivation(run: Run) -> Markup | None:
    """One sentence, and a line for each piece; as it is where it cannot be read."""
    text = run.derivation.strip("\n")
    if not text.strip():
        return None
    head, pieces = parsed(text)
    words = joined(
        tag(
            "p", "Every algorithm of this library is one update, a natural-gradient step on expected loss less entropy:"
        ),
        tag("p", _RULE, class_="equation"),
        tag(
            "p",
            "Which distributions, looked at where, measuring what, with which steps: the choice of these pieces makes "
            "it the one that was used here. Labels such as eq:… are the paper's.",
        ),
    )
    if len(pieces) < 3:
        return joined(words, tag("pre", text, tabindex="0"))
    return joined(
        words, tag("p", tag("b", head), class_="rule"), tag("dl", [_piece(*piece) for piece in pieces], class_="pieces")
    )


def parsed(text: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The first line, and for each piece its name, its value and what it says of it.

    >>> parsed("newton (section 1.3.2)\\n  points     Delta()   f(m)  (app:delta)\\n  update     S ← S,  m ← m")
    ('newton (section 1.3.2)', [('points', 'Delta()', 'f(m)  (app:delta)'), ('update', 'S ← S,  m ← m', '')])
    """
    head, *lines = text.splitlines()
    pieces: list[tuple[str, str, str]] = []
    for line in lines:
        match = _LINE.match(line)
        if match and match[1] in QUESTIONS:
            value, _, said = (match[2], "", "") if match[1] in ("steps", "update") else match[2].partition("  ")
            pieces.append((match[1], value.strip(), said.strip()))
        elif line.strip() and pieces:  # a long value goes on in the next line
            name, value, said = pieces[-1]
            pieces[-1] = (name, value, f"{said} {line.strip()}".strip())
    return head.strip(), pieces


def _piece(name: str, value: str, said: str) -> Markup:
    asked = tag("span", QUESTIONS[name], class_="asked")
    answer = tag("span", _set(value), class_="equation") if name in ("steps", "update") else tag("code", value)
    return tag(
        "div", tag("dt", name, asked), tag("dd", answer, tag("span", _set(said), class_="said") if said else None)
    )


def _set(text: str) -> Markup:
    """Mathematics as it is printed: `E_q` and `∇_{μ_j}` with their indices below, the paper's labels in grey.

    >>> _set("E_q f (eq:von_1)")
    'E<sub>q</sub> f <span class="label">(eq:von_1)</span>'
    """
    parts = _LABEL.split(text)
    return joined([tag("span", part, class_="label") if _LABEL.fullmatch(part) else _indexed(part) for part in parts])


def _indexed(text: str) -> Markup:
    first, *rest = _INDEX.split(text)
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return joined(first, [joined(tag("sub", _indexed(index.strip("_{}"))), after) for index, after in pairs])
