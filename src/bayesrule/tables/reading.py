"""Reading tables from files: CSV (plain or gzipped) and Parquet by pyarrow, which is parallel, NPZ by NumPy, and Excel
workbooks by openpyxl, an extra."""

from __future__ import annotations

import gzip
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from datetime import date, datetime
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from .tables import DATES, Column, InputError, Table

_NULLS = ["", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "#N/A", "?"]
_MOSTLY = 0.95  # A text column with this share of numbers is numeric, and its other values are missing.
_MAGIC = {b"PAR1": "parquet", b"PK\x03\x04": "npz", b"\x1f\x8b": "csv", b"\xd0\xcf\x11\xe0": "xls"}


def read(path: str | Path, categories: Sequence[str] = ()) -> Table:
    """Read a CSV file (any of , ; tab | as the delimiter; also gzipped), a Parquet, NPZ or Excel file, by its content.

    Args:
        path: the file.
        categories: columns that are read as text even if all values look like numbers: a code 01 is not the number 1.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"There is no file {path}: give a CSV, Parquet, NPZ or Excel file, or a name from `bayesrule datasets`."
        )
    if path.is_dir():
        raise InputError(f"{path} is a directory: give a CSV, Parquet, NPZ or Excel file.")
    try:
        with path.open("rb") as file:
            start = file.read(8192)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not start.strip():
        raise InputError(f"{path} is empty.")
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "csv")
    if kind == "csv" and b"\0" in start and not start.startswith(b"\x1f\x8b"):
        raise InputError(
            f"{path} is not a table: it looks like a binary file. CSV, Parquet, NPZ and Excel files can be read."
        )
    if kind == "xls":
        raise InputError(f"{path} is a workbook of an old Excel: save it as .xlsx or CSV.")
    if kind == "npz" and _is_workbook(path):
        columns = _read_workbook(path, categories)
    else:
        columns = _read_csv(path, categories) if kind == "csv" else _BY_KIND[kind](path)
    table = Table(columns, path.name)
    if not table.rows:
        raise InputError(f"{path} has a header and no rows.")
    return table


# CSV and Parquet.


def _read_csv(path: Path, categories: Sequence[str]) -> dict[str, Column]:
    import pyarrow as pa
    from pyarrow import csv

    header = _read_header(path)
    delimiter = max(",;\t|", key=header.count)

    def parse(encoding: str, types: Any = None) -> Any:
        return csv.read_csv(
            path,
            read_options=csv.ReadOptions(encoding=encoding),
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(null_values=_NULLS, strings_can_be_null=True, column_types=types),
        )

    failure: Exception | None = None
    known = dict.fromkeys(categories, pa.string())
    for encoding in ("utf-8", "latin-1"):
        try:
            table = parse(encoding, known)
            if encoding == "utf-8" and any(pa.types.is_binary(kind) for kind in table.schema.types):
                continue  # pyarrow reads text that is not UTF-8 as bytes.
            return _as_columns(table, path, categories)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            failure = error
            if "conversion error" in str(error) and "UTF8" not in str(error).upper():
                # pyarrow infers types from the first block. If a later value does not fit, read everything as text:
                # `_text_column` then decides with all values at hand.
                names = [name.strip().strip('"') for name in header.split(delimiter)]
                return _as_columns(parse(encoding, dict.fromkeys(names, pa.string())), path, categories)
        except OSError as error:
            raise InputError(f"{path} cannot be read: is the file damaged? ({_first_line(error)})") from error
    text = _first_line(failure)
    mismatch = re.search(r"Expected (\d+) columns, got (\d+)(?:: (.{0,40}))?", text)
    if mismatch:
        excerpt = f" ({mismatch[3]} …)" if mismatch[3] else ""
        raise InputError(
            f"{path} is not a table: a line{excerpt} has {mismatch[2]} columns where the header has {mismatch[1]}."
        ) from failure
    raise InputError(f"{path} cannot be read as CSV: {text}") from failure


def _read_header(path: Path) -> str:
    with path.open("rb") as file:
        opened = gzip.open if file.read(2) == b"\x1f\x8b" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
            header = file.readline()
            if "\0" in header:
                raise InputError(f"{path} is not a table: it looks like a binary file.")
            return header
    except (OSError, EOFError) as error:
        raise InputError(f"{path} cannot be read: is the file damaged? ({_first_line(error)})") from error


def _read_parquet(path: Path) -> dict[str, Column]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return _as_columns(parquet.read_table(path), path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {_first_line(error)}") from error


def _as_columns(table: Any, path: Path, categories: Sequence[str] = ()) -> dict[str, Column]:
    names = [name.strip() or f"column {index + 1}" for index, name in enumerate(table.column_names)]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InputError(
            f"{path} has more than one column named {repeated[0]!r}: rename them, so that each has its own name."
        )
    columns = [_column(name, values, name in categories) for name, values in zip(names, table.columns, strict=True)]
    return {column.name: column for column in columns}


def _column(name: str, values: Any, category: bool = False) -> Column:
    import pyarrow as pa

    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.cast(kind.value_type), kind.value_type
    if pa.types.is_boolean(kind):
        values, kind, category = values.cast(pa.string()), pa.string(), True
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        days = (
            np.asarray(values.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy(zero_copy_only=False), float) / 8.64e10
        )
        return Column(name, numbers=days, note=DATES)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = np.asarray(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), float)
        return Column(name, numbers=numbers)
    if pa.types.is_null(kind):
        return Column(name, numbers=np.full(len(values), np.nan))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _text_column(name, values, category)
    return Column(name, numbers=np.full(len(values), np.nan), note=f"is left out: values of type {kind} cannot be read")


def _text_column(name: str, values: Any, category: bool) -> Column:
    """A column of text: numbers if nearly all values are numbers and it is not known as a category."""
    from pyarrow import compute

    encoded = compute.call_function("utf8_trim_whitespace", [values]).combine_chunks().dictionary_encode()
    levels = np.array([*encoded.dictionary.to_pylist(), ""], dtype=object)
    codes = np.asarray(encoded.indices.fill_null(len(levels) - 1))
    present = codes < len(levels) - 1
    parsed = np.array([_parse_number(level) for level in levels])
    share = np.isfinite(parsed[codes[present]]).mean() if present.any() else 0.0
    if not category and (share == 1.0 or (share >= _MOSTLY and present.sum() > 20)):
        odd = [str(level) for level, number in zip(levels[:-1], parsed[:-1], strict=True) if np.isnan(number)]
        count = int(np.isnan(parsed[codes[present]]).sum())
        shown = ", ".join(map(repr, odd[:3]))
        note = f"{count} values that are not numbers ({shown}) are treated as missing" if odd else ""
        return Column(name, numbers=parsed[codes], note=note)
    order = np.argsort(levels[:-1].astype(str))
    sorted_codes = np.append(np.argsort(order), -1)
    return Column(name, codes=sorted_codes[codes], levels=tuple(str(levels[index]) for index in order))


def _parse_number(text: str) -> float:
    """The number that a text stands for, or NaN."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


# Excel.


def _is_workbook(path: Path) -> bool:
    """Whether a ZIP archive, which NPZ files and workbooks both are, is a workbook."""
    try:
        with zipfile.ZipFile(path) as archive:
            return "xl/workbook.xml" in archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return False


def _read_workbook(path: Path, categories: Sequence[str]) -> dict[str, Column]:
    """The first sheet that is not empty. Its first row has the names of the columns."""
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise InputError(
            f"{path} is an Excel workbook, which needs openpyxl: pip install 'bayesrule[excel]', or save it as CSV."
        ) from error
    import pyarrow as pa

    try:
        workbook = load_workbook(path, read_only=True, data_only=True)
        sheets = [
            [row for row in sheet.values if any(_is_given(cell) for cell in row)] for sheet in workbook.worksheets
        ]
        workbook.close()
    except Exception as error:  # It raises whatever its parsers of ZIP and XML do.
        raise InputError(f"{path} cannot be read as an Excel workbook: {_first_line(error)}") from error
    header, *rows = next((rows for rows in sheets if rows), [()])
    width = max((place + 1 for row in [header, *rows] for place, cell in enumerate(row) if _is_given(cell)), default=0)
    names = [str(header[place]) if place < len(header) and _is_given(header[place]) else "" for place in range(width)]
    columns = [[row[place] if place < len(row) else None for row in rows] for place in range(width)]
    arrays = [pa.chunked_array([_cells(cells)]) for cells in columns]
    return _as_columns(pa.table(arrays, names=names), path, categories)


def _is_given(cell: Any) -> bool:
    return cell is not None and (not isinstance(cell, str) or cell.strip() not in _NULLS)


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
    return pa.array([None if cell is None else str(cell) for cell in given], pa.string())


def _as_datetime(cell: Any) -> datetime | None:
    return cell if cell is None or isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)


# NPZ.


def _read_npz(path: Path) -> dict[str, Column]:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as NPZ (arrays without pickled objects): {_first_line(error)}"
        ) from error
    names = [str(name) for name in arrays.pop("feature_names", [])]
    columns: dict[str, Column] = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            columns[name] = _array_column(name, array)
        elif array.ndim == 2:
            width = array.shape[1]
            labels = names if len(names) == width else [f"{name}{index}" for index in range(width)]
            columns |= {label: _array_column(label, array[:, index]) for index, label in enumerate(labels)}
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1:
        shapes = {name: array.shape for name, array in arrays.items()}
        raise InputError(
            f"{path} needs arrays with the same number of rows, such as X (n, d) and y (n,): it has {shapes}."
        )
    return columns


def _array_column(name: str, array: np.ndarray) -> Column:
    if array.dtype.kind in "biuf":
        return Column(name, numbers=array.astype(float))
    return Column.of_text(name, [str(value) or None for value in array])


_BY_KIND = {"parquet": _read_parquet, "npz": _read_npz}


def _first_line(error: Any) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
