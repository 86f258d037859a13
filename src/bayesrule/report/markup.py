"""HTML that text cannot break: every string is cleaned and escaped unless it is `Markup` already.

Names of columns and classes come from files of unknown origin. `tag` and `join` escape whatever they are given, so no
caller has to remember it. The report and the gallery are written with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

# Characters that HTML forbids (controls, lone surrogates), and those that reverse the direction of the text after them.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
_VOID_ELEMENTS = {"meta", "br", "hr", "col", "img", "input", "link"}
_SPACES = re.compile(r"\s+")


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def clean(text: Any) -> str:
    """The text with forbidden characters replaced by �.

    >>> clean("a" + chr(0) + "b" + chr(0x202E) + "c")
    'a�b�c'
    """
    return _FORBIDDEN.sub("\ufffd", str(text))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. Of the children None is skipped and lists are flattened; attribute names have `_` for `-`.

    >>> tag("p", "1 < 2", tag("b", "!"), class_="note", hidden=None)
    '<p class="note">1 &lt; 2<b>!</b></p>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID_ELEMENTS:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Any) -> Markup:
    """The children one after another, without an element around them."""
    return Markup("".join(_child(each) for each in children))


def user_text(text: Any, most: int = 80) -> Markup:
    """A name from the user's file: isolated in its direction of writing, and cut after `most` characters.

    >>> user_text("<b>")
    '<bdi>&lt;b&gt;</bdi>'
    """
    full = clean(text)
    return tag("bdi", shorten(full, most), title=full[:400] if len(full) > most else None)


def shorten(text: Any, most: int) -> str:
    """The text on one line, cut to at most `most` characters with an ellipsis at the end.

    >>> shorten("a long name", 6)
    'a lon…'
    """
    line = _SPACES.sub(" ", clean(text)).strip() or "(no name)"
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def _attribute(key: str, value: Any) -> str:
    # HTML does not require `<` to be escaped in attributes, but the drawings must be valid XML too.
    return f' {key.rstrip("_").replace("_", "-")}="{escape(clean(value), quote=True)}"'


def _child(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, Iterable) and not isinstance(child, str):
        return join(*child)
    return escape(clean(child), quote=False)
