"""Run the Python of a page as a reader would, from top to bottom in one namespace: `python run_page.py page.md`.

A block with prompts is a doctest, another is executed. What a page needs and does not show is in comments,
`<!-- setup: … -->`, which run at their place among the blocks.
"""

import doctest
import re
import sys
import textwrap
import traceback
from pathlib import Path

PART = re.compile(
    r"^(?P<indent> *)```python[^\n]*\n(?P<block>.*?)^(?P=indent)```$|^<!-- setup:(?P<setup>.*?)-->$",
    re.DOTALL | re.MULTILINE,
)


def parts(text):
    """The line and the code of every part that runs.

    >>> list(parts("a\\n\\n<!-- setup: n = 1 -->\\n\\n```python\\nn + 1\\n```\\n"))
    [(3, 'n = 1'), (6, 'n + 1\\n')]
    """
    for match in PART.finditer(text):
        kind = "setup" if match["setup"] is not None else "block"
        code = match[kind].strip() if kind == "setup" else textwrap.dedent(match[kind])
        yield text.count("\n", 0, match.start(kind)) + 1, code


def run(path):
    """Run a page; the number of parts that failed, with their reasons printed."""
    namespace, failures = {"__name__": "__main__"}, 0
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    for line, code in parts(path.read_text(encoding="utf-8")):
        if re.search(r"^>>> ", code, re.MULTILINE):
            example = parser.get_doctest(code, namespace, path.name, str(path), line - 1)
            failures += runner.run(example, clear_globs=False).failed > 0
            namespace.update(example.globs)
            continue
        try:
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failures += 1
    return failures


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
