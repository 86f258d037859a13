"""Reading tables from files: CSV (plain or gzipped) and Parquet by pyarrow, which is parallel, NPZ by NumPy, and Excel
workbooks by openpyxl, an extra."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .guess_columns import Context, TextColumn, guess_columns, leave_out_identifiers
from .numerals import read_numeral
from .options import ReadingOptions
from .tables import DATES, Column, InputError, Table
from .text_file import find_header, read_cells, read_text
from .workbook import archive_names, is_workbook, read_workbook

_MAGIC = {b"PAR1": "parquet", b"PK\x03\x04": "zip"}
_FOREIGN = {
    b"\xd0\xcf\x11\xe0": "a workbook of an old Excel: save it as .xlsx or CSV",
    b"BZh": "compressed by bzip2: unpack it first, or compress it by gzip",
    b"\xfd7zXZ": "compressed by xz: unpack it first, or compress it by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it first, or compress it by gzip",
    b"ARROW1": "a Feather file: save it as Parquet",
    b"\x89HDF": "an HDF5 file: save the table as Parquet or CSV",
    b"SQLite format": "a SQLite database: save the table as Parquet or CSV",
    b"%PDF": "a PDF document: save the table as CSV",
    b"{\\rtf": "a text document: save the table as CSV",
    b"\x93NUMPY": "one array of NumPy: save named columns by np.savez, or as CSV",
}
_EXACT = 2.0**53  # Larger whole numbers are not all doubles.


def read(
    path: str | Path,
    options: ReadingOptions | None = None,
    formats: Mapping[str, Mapping[str, Any]] | None = None,
    only: Collection[str] | None = None,
    usual_sheet: str | None = None,
) -> Table:
    """Read a CSV file (columns separated by , ; tab | or spaces; also gzipped), a Parquet, NPZ or Excel file.

    What a file is, is found out by its content. What its columns are is guessed by all their values.

    Args:
        path: the file.
        options: what the user says about the file.
        formats: the `Column.format` of columns that are known, by name: they are read alike, and an error says where
            that is impossible.
        only: the columns that are wanted, and must be there; others are left out. All if not given.
        usual_sheet: the sheet of a workbook that is read if it is there and the options do not name one.
    """
    path, options = Path(path), options or ReadingOptions()
    kind = _file_kind(path)
    if options.sheet is not None and kind != "workbook":
        raise InputError(f"{path} has no sheets: --sheet is for Excel workbooks, and this is a {kind.upper()} file.")
    context = Context(path.name, options, formats or {})
    notes: list[str] = []
    locate: Callable[[int], str] | None = None
    if kind == "csv":
        names, arrays, locate = _read_csv(path, context, notes)
    elif kind == "workbook":
        names, arrays, rows, title, notes = read_workbook(path, options.sheet, usual_sheet)
        locate = lambda row: f"row {rows[row]} of the sheet {title!r}"
    else:
        names, arrays = _read_parquet(path) if kind == "parquet" else _read_npz(path)
    if locate is not None:
        context.place = locate
    names, arrays = _name_columns(path, names, arrays, notes)
    if not len(arrays[0]):
        remark = f" ({'; '.join(notes)})" if notes else ""
        raise InputError(f"{path} has a header and no rows.{remark}")
    _check_names(path, names, [*options.columns, *(only or ())], notes)
    wanted = names if only is None else [name for name in names if name in only]
    columns = _as_columns({name: arrays[names.index(name)] for name in wanted}, context)
    return Table(columns, path.name, notes, locate)


def read_arrow(
    table: Any,
    source: str,
    options: ReadingOptions | None = None,
    formats: Mapping[str, Mapping[str, Any]] | None = None,
    only: Collection[str] | None = None,
) -> Table:
    """A table of pyarrow as `read` reads a file of it.

    Args:
        table: the table of pyarrow.
        source: its name.
        options: what the user says about it.
        formats: the `Column.format` of columns that are known, by name.
        only: the columns that are wanted, and must be there; all if not given.
    """
    path, options, notes = Path(source), options or ReadingOptions(), []
    names, arrays = _name_columns(path, [" ".join(str(name).split()) for name in table.column_names], table.columns, [])
    _check_names(path, names, [*options.columns, *(only or ())], notes)
    wanted = names if only is None else [name for name in names if name in only]
    arrays = {name: arrays[names.index(name)] for name in wanted}
    return Table(_as_columns(arrays, Context(source, options, formats or {})), source, notes)


def _file_kind(path: Path) -> str:
    """What a file is by its first bytes: "csv", "parquet", "npz" or "workbook"; raises if it is nothing of these."""
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
    foreign = next((words for magic, words in _FOREIGN.items() if start.startswith(magic)), None)
    if foreign is None and start.lstrip(b"\xef\xbb\xbf \r\n\t")[:1] in (b"{", b"<", b"["):
        opening = start.lstrip(b"\xef\xbb\xbf \r\n\t")[:1]
        foreign = "HTML or XML: save the table as CSV" if opening == b"<" else "JSON: save the table as CSV"
    if foreign is not None:
        raise InputError(f"{path} is {foreign}.")
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), "csv")
    if kind != "zip":
        return kind
    inside = archive_names(path)
    if is_workbook(path):
        return "workbook"
    if inside and not all(name.endswith(".npy") for name in inside):
        shown = ", ".join(inside[:3]) + (", …" if len(inside) > 3 else "")
        raise InputError(f"{path} is a ZIP archive ({shown}): unpack it, and give the CSV or Excel file in it.")
    return "npz"


def _read_csv(path: Path, context: Context, notes: list[str]) -> tuple[list[str], list[Any], Callable[[int], str]]:
    file = read_text(path)
    find_header(file)
    context.delimiter = file.delimiter
    names, arrays, lines = read_cells(file)
    notes += file.notes
    if lines is None:
        return names, arrays, lambda row: f"line {file.line_of(row)}"
    return names, arrays, lambda row: f"line {lines[row]}"


def _name_columns(path: Path, names: list[str], arrays: list[Any], notes: list[str]) -> tuple[list[str], list[Any]]:
    """Names for columns that have none; those without values are left out, as they come from trailing delimiters."""
    kept = [place for place, name in enumerate(names) if name or not _is_blank(arrays[place])]
    if not kept:
        raise InputError(f"{path} has no columns with names: the first line must have the names of the columns.")
    named = [names[place] or f"column {place + 1}" for place in kept]
    unnamed = [repr(name) for name, place in zip(named, kept, strict=True) if not names[place]]
    if unnamed:
        notes.append(f"columns without a name are called {', '.join(unnamed[:5])}{', …' if len(unnamed) > 5 else ''}")
    repeated = [name for place, name in enumerate(named) if name in named[:place]]
    if repeated:
        raise InputError(
            f"{path} has more than one column named {repeated[0]!r}: rename them, so that each has its own name."
        )
    return named, [arrays[place] for place in kept]


def _check_names(path: Path, names: list[str], wanted: Collection[str], notes: list[str]) -> None:
    """Raise unless all columns that are wanted are there."""
    absent = [name for name in wanted if name not in names]
    remark = f" ({'; '.join(notes)})" if notes else ""
    if len(absent) > 1:
        shown = ", ".join(map(repr, absent[:8])) + (", …" if len(absent) > 8 else "")
        has = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
        raise InputError(f"{path.name} has no columns {shown}: it has {has}.{remark}")
    for name in absent:
        try:
            Table({each: Column(each) for each in names}, path.name).column(name)
        except InputError as error:
            raise InputError(f"{error}{remark}") from None


def _is_blank(array: Any) -> bool:
    import pyarrow as pa
    from pyarrow import compute

    if array.null_count == len(array):
        return True
    if not pa.types.is_string(array.type):
        return False
    trimmed = compute.call_function("utf8_trim_whitespace", [array])
    return not compute.call_function("any", [compute.call_function("not_equal", [trimmed, ""])]).as_py()


def _read_parquet(path: Path) -> tuple[list[str], list[Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet: {_first_line(error)}") from error
    if not table.num_columns:
        raise InputError(f"{path} has no columns.")
    return [" ".join(str(name).split()) for name in table.column_names], table.columns


def _as_columns(arrays: Mapping[str, Any], context: Context) -> dict[str, Column]:
    """Columns from arrays of pyarrow. Those of text are guessed together, since one can decide how others are read."""
    texts: dict[str, TextColumn] = {}
    columns: dict[str, Column] = {}
    for name, array in arrays.items():
        typed = _typed_column(name, array, context)
        if isinstance(typed, Column):
            columns[name] = typed
        else:
            texts[name] = TextColumn.of(name, typed)
    columns |= guess_columns(list(texts.values()), context)
    return {name: columns[name] for name in arrays}


def _typed_column(name: str, values: Any, context: Context) -> Column | Any:
    """The column of an array that has a type; an array of text if its text has to be read, or is wanted."""
    import pyarrow as pa

    values = values if not isinstance(values, pa.ChunkedArray) else pa.chunked_array(values.chunks, type=values.type)
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks else pa.array([], values.type)
    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.cast(kind.value_type), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind):
        return values.cast(pa.string())
    wanted = context.options.columns.get(name) or context.formats.get(name, {}).get("kind")
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        if wanted == "skip":
            return values.cast(pa.string())
        days = values.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy(zero_copy_only=False)
        return Column(
            name, numbers=np.asarray(days, float) / 8.64e10, note=DATES, guess="date", format={"kind": "date"}
        )
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = np.asarray(values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), float)
        too_long = pa.types.is_integer(kind) and bool(np.any(np.abs(numbers) > _EXACT))
        if too_long or wanted not in (None, "number"):
            return pa.array(_number_texts(values, numbers), pa.string())
        return typed_numbers(name, numbers, context)
    if pa.types.is_null(kind):
        return Column(name, numbers=np.full(len(values), np.nan), guess="empty")
    skip = f"is left out: values of type {kind} cannot be read"
    return Column(name, numbers=np.full(len(values), np.nan), note=skip, guess=str(kind), skip=skip)


def _number_texts(values: Any, numbers: np.ndarray) -> list[str | None]:
    """Numbers as text, whole ones with all their digits."""
    return [
        None if value is None or number != number else str(int(value)) if float(number).is_integer() else repr(number)
        for value, number in zip(values.to_pylist(), numbers.tolist(), strict=True)
    ]


def typed_numbers(name: str, numbers: np.ndarray, context: Context) -> Column:
    """A column of numbers that were numbers in the file, too."""
    given = [read_numeral(text) for text in context.options.missing]
    missing = [value for numeral in given if numeral is not None for value in numeral.values.values()]
    numbers = np.where(np.isin(numbers, missing), np.nan, numbers) if missing else numbers
    column = Column(name, numbers=numbers, guess="number", format={"kind": "number"})
    return leave_out_identifiers(column, forced=name in context.options.columns or name in context.formats)


# NPZ.


def _read_npz(path: Path) -> tuple[list[str], list[Any]]:
    import pyarrow as pa

    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:
        raise InputError(
            f"{path} cannot be read as NPZ (arrays without pickled objects): {_first_line(error)}"
        ) from error
    names = [str(name) for name in arrays.pop("feature_names", [])]
    columns: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            columns[name] = array
        elif array.ndim == 2:
            width = array.shape[1]
            labels = names if len(names) == width else [f"{name}{index}" for index in range(width)]
            columns |= {label: array[:, index] for index, label in enumerate(labels)}
    if len({len(column) for column in columns.values()}) != 1:
        shapes = {name: array.shape for name, array in arrays.items()}
        raise InputError(
            f"{path} needs arrays with the same number of rows, such as X (n, d) and y (n,): it has {shapes}."
        )
    as_arrow = lambda array: (
        pa.array(array.astype(array.dtype if array.dtype.kind in "iu" else float), from_pandas=True)
        if array.dtype.kind in "biuf"
        else pa.array(array.astype("datetime64[us]"))
        if array.dtype.kind == "M"
        else pa.array([str(value) for value in array], pa.string())
    )
    return list(columns), [as_arrow(np.ascontiguousarray(array)) for array in columns.values()]


def _first_line(error: Any) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
