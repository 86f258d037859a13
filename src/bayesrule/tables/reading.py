"""Files as tables: CSV (plain or gzipped), Parquet and NPZ, by pyarrow, which reads the first two in parallel."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .tables import DATES, Column, InputError, Table

_NULLS = ["", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "#N/A", "?"]
_MOSTLY = 0.95  # of the values: numbers with a few other things among them
_CLUES = {b"PAR1": "parquet", b"PK\x03\x04": "npz", b"\x1f\x8b": "csv"}


def read(path: str | Path, categories: Sequence[str] = ()) -> Table:
    """The table in a file, by its content: `.csv`, `.tsv`, `.csv.gz`, `.parquet` or `.npz`.

    Columns that are known to be `categories` are read as text: else 01 would be the number 1 where all happen to be
    digits.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(
            f"There is no file {path}: give a CSV, Parquet or NPZ file, or a name from `bayesrule datasets`."
        )
    if path.is_dir():
        raise InputError(f"{path} is a directory: give a CSV, Parquet or NPZ file.")
    try:
        with path.open("rb") as file:
            start = file.read(8192)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not start.strip():
        raise InputError(f"{path} is empty.")
    kind = next((kind for clue, kind in _CLUES.items() if start.startswith(clue)), "csv")
    if kind == "csv" and b"\0" in start and not start.startswith(b"\x1f\x8b"):
        raise InputError(f"{path} is not a table: it looks like a binary file. CSV, Parquet and NPZ files can be read.")
    columns = _csv(path, categories) if kind == "csv" else {"parquet": _parquet, "npz": _npz}[kind](path)
    table = Table(columns, path.name)
    if not table.rows:
        raise InputError(f"{path} has a header and no rows.")
    return table


# CSV and Parquet.


def _csv(path: Path, categories: Sequence[str]) -> dict[str, Column]:
    import pyarrow as pa
    from pyarrow import csv

    header = _header(path)
    delimiter = max(",;\t|", key=header.count)

    def tried(encoding: str, types: Any = None) -> Any:
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
            table = tried(encoding, known)
            if encoding == "utf-8" and any(pa.types.is_binary(kind) for kind in table.schema.types):
                continue  # text that is not UTF-8 is read as bytes
            return _converted(table, path, categories)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            failure = error
            if "conversion error" in str(error) and "UTF8" not in str(error).upper():
                # A column that changes its type far down the file: read all as text, and look at it whole.
                names = [name.strip().strip('"') for name in header.split(delimiter)]
                return _converted(tried(encoding, dict.fromkeys(names, pa.string())), path, categories)
        except OSError as error:
            raise InputError(f"{path} cannot be read: is the file damaged? ({_line(error)})") from error
    text = _line(failure)
    found = re.search(r"Expected (\d+) columns, got (\d+)(?:: (.{0,40}))?", text)
    if found:
        where = f" ({found[3]} …)" if found[3] else ""
        raise InputError(
            f"{path} is not a table: a line{where} has {found[2]} columns where the header has {found[1]}."
        ) from failure
    raise InputError(f"{path} cannot be read as CSV: {text}") from failure


def _header(path: Path) -> str:
    with path.open("rb") as file:
        opened = gzip.open if file.read(2) == b"\x1f\x8b" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
            header = file.readline()
            if "\0" in header:
                raise InputError(f"{path} is not a table: it looks like a binary file.")
            return header
    except (OSError, EOFError) as error:
        raise InputError(f"{path} cannot be read: is the file damaged? ({_line(error)})") from error


def _parquet(path: Path) -> dict[str, Column]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return _converted(parquet.read_table(path), path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {_line(error)}") from error


def _converted(table: Any, path: Path, categories: Sequence[str] = ()) -> dict[str, Column]:
    names = [name.strip() or f"column {place + 1}" for place, name in enumerate(table.column_names)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(
            f"{path} has more than one column named {twice[0]!r}: rename them, so that each has its own name."
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
        return _text(name, values, category)
    return Column(name, numbers=np.full(len(values), np.nan), note=f"values of type {kind} are not read")


def _text(name: str, values: Any, category: bool) -> Column:
    """Categories; or numbers, where nearly all of the text is."""
    from pyarrow import compute

    encoded = compute.call_function("utf8_trim_whitespace", [values]).combine_chunks().dictionary_encode()
    levels = np.array([*encoded.dictionary.to_pylist(), ""], dtype=object)
    codes = np.asarray(encoded.indices.fill_null(len(levels) - 1))
    there = codes < len(levels) - 1
    parsed = np.array([_number(level) for level in levels])
    share = np.isfinite(parsed[codes[there]]).mean() if there.any() else 0.0
    if not category and (share == 1.0 or (share >= _MOSTLY and there.sum() > 20)):
        odd = [str(level) for level, number in zip(levels[:-1], parsed[:-1], strict=True) if np.isnan(number)]
        count = int(np.isnan(parsed[codes[there]]).sum())
        shown = ", ".join(map(repr, odd[:3]))
        note = f"{count} values that are not numbers ({shown}) are taken as missing" if odd else ""
        return Column(name, numbers=parsed[codes], note=note)
    order = np.argsort(levels[:-1].astype(str))
    places = np.append(np.argsort(order), -1)
    return Column(name, codes=places[codes], levels=tuple(str(levels[place]) for place in order))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


# NPZ.


def _npz(path: Path) -> dict[str, Column]:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:
        raise InputError(f"{path} cannot be read as NPZ (arrays without pickled objects): {_line(error)}") from error
    names = [str(name) for name in arrays.pop("feature_names", [])]
    columns: dict[str, Column] = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            columns[name] = _array_column(name, array)
        elif array.ndim == 2:
            given = names if len(names) == array.shape[1] else [f"{name}{place}" for place in range(array.shape[1])]
            columns |= {one: _array_column(one, array[:, place]) for place, one in enumerate(given)}
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


def _line(error: Any) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
