"""Tables of a page that list public names: `<!-- choices: points -->` becomes a row for each name of that group.

What a row says is the first sentence of the docstring.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from reference import GROUPS, names_of_groups

_PLACE = re.compile(r"^<!-- choices: (?P<group>\w+)(?: (?P<kind>only|without) (?P<names>[\w, ]+))? -->$", re.MULTILINE)


def first_sentence(value: Any) -> str:
    """The first sentence of a docstring, for a cell of a table.

    >>> first_sentence(first_sentence)
    'The first sentence of a docstring, for a cell of a table.'
    """
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:])\s(?=[A-Z])", paragraph)[0]
    return sentence.replace("|", "\\|")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in the tables."""
    return _PLACE.sub(lambda match: _table(match["group"], match["kind"], match["names"] or ""), markdown)


def _table(group: str, kind: str | None, names: str) -> str:
    if group not in {name for name, *_ in GROUPS}:
        raise ValueError(f"There is no group {group!r} of public names.")
    named = set(re.findall(r"\w+", names))
    rows = [(name, value) for name, value in names_of_groups()[group] if (name in named) == (kind == "only")]
    lines = ["| | |", "|---|---|"]
    # An alias is documented where the name is that it stands for.
    target = lambda name, value: getattr(value, "__name__", name)
    lines += [f"| [`{name}`][bayesrule.{target(name, value)}] | {first_sentence(value)} |" for name, value in rows]
    return "\n".join(lines)
