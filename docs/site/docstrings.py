"""Examples in docstrings as code: griffe reads `>>>` outside of an `Examples:` section as a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?m)^(?P<indent> *)>>> .*(?:\n(?! *$).*)*")
_FLAGS = re.compile(r" *# doctest: .*$", re.MULTILINE)


def fence_examples(text: str) -> str:
    """The docstring with every doctest between fences.

    >>> print(fence_examples("Add.\\n\\n>>> 1 + 1  # doctest: +SKIP\\n2"))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """

    def fence(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{_FLAGS.sub('', match[0])}\n{indent}```"

    return _EXAMPLE.sub(fence, text)


class FencedExamples(griffe.Extension):
    """Fence the examples of every docstring that griffe has read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
