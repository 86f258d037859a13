"""The committed picture of the README and of the first page is drawn again when the site is built."""

from __future__ import annotations

from pathlib import Path

from cache import results_of
from mkdocs.config.defaults import MkDocsConfig

PROGRAM = Path(__file__).with_name("draw_rule.py")


def on_pre_build(config: MkDocsConfig) -> None:
    """Draw it, and replace the committed file where it has changed."""
    drawn = (results_of(PROGRAM, name="picture") / "rule.svg").read_bytes()
    committed = Path(config.docs_dir, "images", "rule.svg")
    if not committed.exists() or committed.read_bytes() != drawn:
        committed.parent.mkdir(exist_ok=True)
        committed.write_bytes(drawn)
