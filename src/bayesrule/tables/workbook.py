"""Excel workbooks, read by openpyxl, an extra: one sheet, with the names of the columns in its first row."""

from __future__ import annotations

import zipfile
from datetime import date, datetime
from numbers import Real
from pathlib import Path
from typing import Any

from .guess_columns import MISSING
from .tables import InputError, number_label


def is_workbook(path: Path) -> bool:
    """Whether a ZIP archive, which NPZ files and workbooks both are, is a workbook."""
    return "xl/workbook.xml" in archive_names(path)


def archive_names(path: Path) -> list[str]:
    """The names of the files in a ZIP archive; none if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return []


def read_workbook(
    path: Path, wanted: str | None, usual: str | None = None
) -> tuple[list[str], list[Any], list[int], str, list[str]]:
    """The names of the columns of a sheet, their cells as arrays, the number of every row, the sheet, and notes.

    Args:
        path: the workbook.
        wanted: the sheet, by name or by number from 1; None for the first that is not empty.
        usual: the name of a sheet that is read if it is there and none is wanted.
    """
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise InputError(
            f"{path} is an Excel workbook, which needs openpyxl: pip install 'bayesrule[excel]', or save it as CSV."
        ) from error
    import pyarrow as pa

    try:
        workbook = load_workbook(path, read_only=True, data_only=True)
        sheets = {
            sheet.title: [
                (number, row)
                for number, row in enumerate(sheet.values, start=1)
                if any(cell is not None and str(cell).strip() for cell in row)
            ]
            for sheet in workbook.worksheets
        }
        workbook.close()
    except Exception as error:  # It raises whatever its parsers of ZIP and XML do.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} cannot be read as an Excel workbook: {reason}") from error
    title, notes = _choose_sheet(path, sheets, usual if wanted is None and usual in sheets else wanted)
    if not sheets[title]:
        raise InputError(f"{path} is empty: its sheet {title!r} has no cells." + _others(sheets, title))
    (header_row, header), *rows = sheets[title]
    width = max(place + 1 for _, row in sheets[title] for place, cell in enumerate(row) if cell is not None)
    padded = [*header, *[None] * width][:width]
    names = ["" if cell is None else " ".join(str(_text(cell)).split()) for cell in padded]
    for place, name in enumerate(names):
        if name and name in names[:place]:
            raise InputError(
                f"{path} has more than one column named {name!r}: columns {names.index(name) + 1} and {place + 1} of "
                f"row {header_row} of the sheet {title!r}. Rename them, so that each has its own name."
            )
    if rows and sum(bool(name) for name in names) == 1 < width:
        raise InputError(
            f"{path} has one cell in row {header_row} of the sheet {title!r}, where the names of the columns belong: "
            "remove what stands above them." + _others(sheets, title)
        )
    columns = [_cells([row[place] if place < len(row) else None for _, row in rows]) for place in range(width)]
    return names, [pa.chunked_array([column]) for column in columns], [number for number, _ in rows], title, notes


def _choose_sheet(path: Path, sheets: dict[str, list[Any]], wanted: str | None) -> tuple[str, list[str]]:
    titles, filled = list(sheets), [title for title, rows in sheets.items() if rows]
    shown = ", ".join(map(repr, titles))
    if wanted is None:
        if not filled:
            raise InputError(f"{path} is empty: none of its sheets ({shown}) has cells.")
        notes = [f"the sheet {filled[0]!r} is read, of {shown} (--sheet chooses another)"] if len(filled) > 1 else []
        return filled[0], notes
    if wanted in sheets:
        return wanted, []
    if wanted.isdigit() and 1 <= int(wanted) <= len(titles):
        return titles[int(wanted) - 1], []
    raise InputError(f"{path} has no sheet {wanted!r}: it has {shown}. --sheet takes one of these, or its number.")


def _others(sheets: dict[str, list[Any]], title: str) -> str:
    others = [repr(other) for other, rows in sheets.items() if rows and other != title]
    return f" --sheet chooses another: {', '.join(others)}." if others else ""


def _is_given(cell: Any) -> bool:
    return cell is not None and (not isinstance(cell, str) or cell.strip() not in MISSING)


def _text(cell: Any) -> str:
    if isinstance(cell, bool):
        return str(cell).lower()
    return number_label(float(cell)) if isinstance(cell, Real) and cell == cell else str(cell)


def _cells(cells: list[Any]) -> Any:
    """The cells of a column as an array of one type, text where they have several."""
    import pyarrow as pa

    given = [cell if _is_given(cell) else None for cell in cells]
    kinds = {bool if isinstance(cell, bool) else float if isinstance(cell, Real) else type(cell) for cell in given}
    kinds -= {type(None)}
    if kinds == {float}:
        return pa.array([None if cell is None else float(cell) for cell in given], pa.float64())
    if kinds <= {datetime, date} and kinds:
        return pa.array([_as_datetime(cell) for cell in given], pa.timestamp("us"))
    if kinds == {bool}:
        return pa.array(given, pa.bool_())
    return pa.array([None if cell is None else _text(cell) for cell in cells], pa.string())


def _as_datetime(cell: Any) -> datetime | None:
    return cell if cell is None or isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)
