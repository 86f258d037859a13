"""The options of the command line that say how a file is to be read, which `fit` and `predict` share."""

from __future__ import annotations

import typer

MISSING = typer.Option("--missing", help="A text that stands for a missing value, such as -999; may be repeated.")
DECIMAL = typer.Option("--decimal", help="The decimal mark of all numbers, . or , where the file leaves it open.")
DATE_FORMAT = typer.Option(
    "--date-format", help="How dates are written, such as %d/%m/%Y; excel for Excel's numbers of days."
)
SHEET = typer.Option("--sheet", help="The sheet of an Excel workbook, by name or number (default: the first).")
