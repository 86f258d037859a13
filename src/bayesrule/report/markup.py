"""HTML that cannot be broken from inside: text is cleaned and escaped unless it is `Markup` already.

Names of columns and classes come from strangers' files. Whatever goes through `tag` is safe, so no caller has to
remember to escape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

# Characters that no page may hold (controls, halves of a pair), and those that turn the direction of what follows.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
_VOID = {"meta", "br", "hr", "col", "img", "input", "link"}
_SPACES = re.compile(r"\s+")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def cleaned(text: Any) -> str:
    """The text without what a page may not hold.

    >>> cleaned("a" + chr(0) + "b" + chr(0x202E) + "c")
    'a�b�c'
    """
    return _FORBIDDEN.sub("\ufffd", str(text))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element: children in order (None is left out, lists are taken apart), attributes with `_` for `-`.

    >>> tag("p", "1 < 2", tag("b", "!"), class_="note", hidden=None)
    '<p class="note">1 &lt; 2<b>!</b></p>'
    """
    said = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{joined(*children)}</{name}>")


def joined(*children: Any) -> Markup:
    """Children one after another, without an element around them."""
    return Markup("".join(_child(each) for each in children))


def named(text: Any, most: int = 80) -> Markup:
    """A name from a file: set apart in its direction of writing, and cut where it is longer than anyone reads.

    >>> named("<b>")
    '<bdi>&lt;b&gt;</bdi>'
    """
    whole = cleaned(text)
    return tag("bdi", shortened(whole, most), title=whole[:400] if len(whole) > most else None)


def shortened(text: Any, most: int) -> str:
    """At most so many characters on one line, the last of them an ellipsis where something was cut.

    >>> shortened("a long name", 6)
    'a lon…'
    """
    line = _SPACES.sub(" ", cleaned(text)).strip() or "(no name)"
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def _attribute(key: str, value: Any) -> str:
    # `<` needs no escaping here, but then the drawings are XML too.
    return f' {key.rstrip("_").replace("_", "-")}="{escape(cleaned(value), quote=True)}"'


def _child(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, Iterable) and not isinstance(child, str):
        return joined(*child)
    return escape(cleaned(child), quote=False)
