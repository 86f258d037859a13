"""From a CSV file to cells of text: its encoding, its delimiter, the line of names, and the line of every row.

pyarrow reads the cells, in parallel. Where it fails, or where quotation marks look wrong, the file is read once more
line by line, which is slow and can say where the trouble is.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from .tables import INVISIBLE, InputError

_GZIP = b"\x1f\x8b"
_DELIMITERS = "\t;|,"  # Where two fit equally, the comma may be a decimal mark.
_SNIFFED_LINES = 100
_WHITESPACE = " "  # As a delimiter: any number of spaces and tabs.
_LONGEST_CELL = 1 << 30
_ENCODINGS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}


@dataclass
class TextFile:
    """The text of a CSV file, and what was found out about it.

    Args:
        path: the file.
        data: its text in UTF-8.
        delimiter: what separates columns.
        names: the names of the columns.
        header_line: the line of the names, from 1.
        notes: sentences about what was guessed.
    """

    path: Path
    data: bytes
    delimiter: str = ","
    names: list[str] = field(default_factory=list)
    header_line: int = 1
    notes: list[str] = field(default_factory=list)

    def records(self, *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
        """The records after the header that are not blank, each with the number of its first line."""
        text = io.StringIO(self.data.decode("utf-8"), newline="")
        with _long_cells():
            for line, cells in _numbered(text, self.delimiter, strict):
                if line > self.header_line and any(cell.strip() for cell in cells) | (len(cells) > 1):
                    yield line, cells

    def line_of(self, row: int) -> int:
        """The line of a row, both of them without the header; rows are counted from 0 and lines from 1."""
        for line, _ in islice(self.records(), row, None):
            return line
        return self.header_line + 1 + row


@contextmanager
def _long_cells() -> Generator[None]:
    """Let Python's reader of CSV files, which refuses them, read long cells."""
    previous = csv.field_size_limit(_LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(previous)


def _numbered(lines: Any, delimiter: str, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """The records of a CSV file, each with the number of its first line."""
    if delimiter == _WHITESPACE:
        lines = (re.sub(r"[ \t]+", " ", line.strip(" \t")) for line in lines)
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=strict)
    end = 0
    for cells in reader:
        yield end + 1, cells
        end = reader.line_num


def read_text(path: Path) -> TextFile:
    """The text of a CSV file, unpacked and decoded; its delimiter and header are not known yet."""
    try:
        raw = path.read_bytes()
        if raw.startswith(_GZIP):
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: is the file damaged? ({_first_line(error)})") from error
    notes: list[str] = []
    encoding = next((name for mark, name in _ENCODINGS.items() if raw.startswith(mark)), None)
    if encoding is None and b"\0" in raw[:4096]:
        # Text in UTF-16 without its mark has a zero in every second byte, where letters are Latin.
        even, odd = raw[0:4096:2].count(0), raw[1:4096:2].count(0)
        half = len(raw[:4096]) / 2
        encoding = "utf-16-le" if odd > 0.7 * half > 7 * even else "utf-16-be" if even > 0.7 * half > 7 * odd else None
    if encoding is not None:
        data = _decode(raw, encoding, path)
        notes.append(f"{path.name} is read as {encoding.upper()[:6]}")
    elif b"\0" in raw:
        line = raw[: raw.index(b"\0")].count(b"\n") + 1
        controls = len(raw) - len(raw.translate(None, bytes([*range(9), *range(14, 32)])))
        binary = controls > 0.005 * len(raw)
        what = "it looks like a binary file" if binary else f"line {line} has a NUL byte, which text has not"
        raise InputError(f"{path} is not a table: {what}. CSV, Parquet, NPZ and Excel files can be read.")
    elif raw.isascii():
        data = raw
    else:
        try:
            raw.decode("utf-8")
            data = raw
        except UnicodeDecodeError as error:
            line = raw[: error.start].count(b"\n") + 1
            try:
                data, guess = raw.decode("cp1252").encode(), "Windows-1252"
            except UnicodeDecodeError:
                data, guess = raw.decode("latin-1").encode(), "Latin-1"
            notes.append(f"{path.name} is not UTF-8 (line {line}) and is read as {guess}: otherwise save it as UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf").rstrip(b"\x1a")
    if not data.strip():
        raise InputError(f"{path} is empty.")
    if b"\n" not in data:
        data = data.replace(b"\r", b"\n")  # Lines of an old Macintosh.
    return TextFile(path, data, notes=notes)


def _decode(raw: bytes, encoding: str, path: Path) -> bytes:
    try:
        return raw.decode(encoding).removeprefix("\ufeff").encode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} begins as {encoding.upper()} and goes on otherwise: save it as UTF-8.") from error


def find_header(file: TextFile) -> None:
    """Find the delimiter and the line of names, and set them in the file."""
    with _long_cells():
        _find_header(file)


def _find_header(file: TextFile) -> None:
    text = io.StringIO(file.data[: 1 << 20].decode("utf-8", errors="ignore"), newline="")
    lines = list(islice(text, 10 * _SNIFFED_LINES))
    start, told = 0, None
    for place, line in enumerate(lines):
        separator = re.fullmatch(r'"?sep=(.)"?\s*', line)
        if separator:  # Excel writes such a line, and reads it.
            told = separator[1]
        elif line.strip() and not (line.lstrip().startswith("#") and not _is_header(line, lines[place + 1 :])):
            start = place
            break
    else:
        raise InputError(f"{file.path} has no rows: all its lines are comments.")
    sample = [line for line in lines[start:] if line.strip()][:_SNIFFED_LINES]
    file.delimiter = told or _choose_delimiter(sample)
    if not told and file.delimiter == ",":
        file.delimiter = _whitespace_or_comma(sample)
    if len(sample) > 1 and re.fullmatch(r"[\s|:+-]*-{3}[\s|:+-]*", sample[1]) and not sample[1].strip("-\r\n ") == "":
        raise InputError(
            f"{file.path} has no values in line {lines.index(sample[1]) + 1}, which draws a line below the names: save "
            "the table as CSV, or remove that line."
        )
    if file.delimiter == _WHITESPACE:
        file.notes.append("the columns are separated by spaces")
    file.header_line = start + 1
    text.seek(0)
    for line, cells in _numbered(text, file.delimiter):
        if line == file.header_line:
            file.names = [" ".join(cell.strip(INVISIBLE).split()) for cell in cells]
            break
    if sample[0].lstrip().startswith("#"):
        file.names[0] = file.names[0].lstrip("# ")
    skipped = sum(bool(line.strip()) for line in lines[:start])
    if skipped and not told:
        file.notes.append(f"the names of the columns are in line {start + 1}: {skipped} lines of comments are left out")
    _check_names(file, sample)


def _is_header(line: str, following: list[str]) -> bool:
    """Whether a line that begins with # has the names of columns: as many as the next line has values."""
    after = next((each for each in following if each.strip() and not each.startswith("#")), "")
    return any(line.count(mark) == after.count(mark) > 0 for mark in _DELIMITERS)


def _choose_delimiter(sample: list[str]) -> str:
    """The delimiter that splits most lines into as many columns as the header, and into most columns."""

    def score(delimiter: str) -> tuple[float, int]:
        widths = [len(cells) for _, cells in _numbered(iter(sample), delimiter)]
        agreeing = sum(width == widths[0] for width in widths) / len(widths)
        return (0.0, 0) if widths[0] == 1 else (agreeing, widths[0])

    scores = {delimiter: score(delimiter) for delimiter in _DELIMITERS}
    best = max(scores.values())
    if best[1] == 0:
        return ","
    # Of those that nearly all lines agree with, the one with the most columns.
    good = {mark: each for mark, each in scores.items() if each[1] and each[0] >= min(0.9, best[0])}
    return max(good, key=lambda mark: (good[mark][1], good[mark][0]))


def _whitespace_or_comma(sample: list[str]) -> str:
    """Spaces, where no line has a comma and all have as many words as the header, at least two."""
    widths = {len(cells) for _, cells in _numbered(iter(sample), _WHITESPACE)}
    has_comma = any("," in line for line in sample)
    return _WHITESPACE if not has_comma and len(widths) == 1 and widths != {1} and len(sample) > 2 else ","


def _check_names(file: TextFile, sample: list[str]) -> None:
    """Raise if the header looks like data, or names two columns alike."""
    rows = [cells for _, cells in _numbered(iter(sample), file.delimiter)][1:]
    numeric = [place for place, name in enumerate(file.names) if _is_plain_number(name)]
    numbers = [float(file.names[place].replace(",", ".")) for place in numeric]
    columns = [place for place in range(len(file.names)) if all(_has_number(row, place) for row in rows)]
    steps = {round(after - before, 9) for before, after in pairwise(numbers)}
    # Years and wavelengths are names, too: they increase evenly. One year alone is a name above other numbers.
    is_scale = len(numbers) > 1 and min(steps) > 0 and (len(steps) == 1 or len(numbers) > 5)
    is_year = re.compile(r"(19|20)\d\d").fullmatch
    if len(numeric) == 1 and is_year(file.names[numeric[0]]):
        is_scale = not all(is_year(row[numeric[0]].strip()) for row in rows if len(row) > numeric[0])
    if rows and numeric and set(columns) <= set(numeric) and columns and not is_scale:
        raise InputError(
            f"{file.path} seems to have no names of columns: line {file.header_line} has the number "
            f"{file.names[numeric[0]]!r} in column {numeric[0] + 1}, as the lines below. Add a first line with the "
            "names of the columns."
        )
    first_place: dict[str, int] = {}
    for place, name in enumerate(file.names):
        if name and name in first_place:
            raise InputError(
                f"{file.path} has more than one column named {name!r}: columns {first_place[name] + 1} and {place + 1} "
                f"of line {file.header_line}. Rename them, so that each has its own name."
            )
        first_place.setdefault(name, place)


def _has_number(row: list[str], place: int) -> bool:
    return place < len(row) and _is_plain_number(row[place])


def _is_plain_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?", text.strip()) is not None


def read_cells(file: TextFile) -> tuple[list[str], list[Any], list[int] | None]:
    """The names of the columns, the columns as arrays of text, and the line of every row where it is known already."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    # pyarrow takes a quotation mark after a space for a part of the value.
    is_simple = file.delimiter != _WHITESPACE and not re.search(rb'[,;|\t] +"', file.data)
    if is_simple:
        begin = _offset_of_line(file.data, file.header_line)
        places = [str(place) for place in range(len(file.names))]
        try:
            table = arrow_csv.read_csv(
                io.BytesIO(file.data[begin:]),
                read_options=arrow_csv.ReadOptions(column_names=places, skip_rows=0, block_size=1 << 24),
                parse_options=arrow_csv.ParseOptions(delimiter=file.delimiter, newlines_in_values=True),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(places, pa.string()), strings_can_be_null=False
                ),
            )
            columns = [column.combine_chunks() for column in table.columns]
            columns = [column.chunk(0) if isinstance(column, pa.ChunkedArray) else column for column in columns]
            has_line_breaks = any(_contains_line_break(column) for column in columns)
            if not has_line_breaks and file.data.count(b'"') % 2 == 0 and not _has_blank_row(columns):
                return file.names, [column[1:] for column in columns], None
        except pa.ArrowInvalid:
            pass  # The lines are read one by one, to find out which of them is wrong.
    return _read_lines(file)


def _has_blank_row(columns: list[Any]) -> bool:
    """Whether a column of one alone has blank values: lines of spaces."""
    from pyarrow import compute

    if len(columns) > 1:
        return False
    trimmed = compute.call_function("utf8_trim_whitespace", [columns[0]])
    return bool(compute.call_function("any", [compute.call_function("equal", [trimmed, ""])]).as_py())


def _contains_line_break(column: Any) -> bool:
    from pyarrow import compute

    found = compute.call_function("match_substring", [column[1:]], compute.MatchSubstringOptions("\n"))
    return bool(compute.call_function("any", [found]).as_py())


def _offset_of_line(data: bytes, line: int) -> int:
    offset = 0
    for _ in range(line - 1):
        offset = data.index(b"\n", offset) + 1
    return offset


def _read_lines(file: TextFile) -> tuple[list[str], list[Any], list[int] | None]:
    """Read a file line by line, mend what can be mended, and say which line is wrong otherwise."""
    import pyarrow as pa

    _check_quotes(file)
    lines: list[int] = []
    rows: list[list[str]] = []
    comments = 0
    width = len(file.names)
    for line, cells in file.records():
        if len(cells) != width and cells[0].startswith("#"):
            comments += 1
            continue
        lines.append(line)
        rows.append(cells)
    names = file.names
    widths = Counter(map(len, rows))
    if width > 1 and set(widths) == {width + 1} and not all(row[-1].strip() == "" for row in rows):
        # R writes the names of the rows without a name for their column.
        names, width = ["", *names], width + 1
        file.notes.append("every line has one value more than there are names: the first column has no name")
    for place, row in enumerate(rows):
        if len(row) > width and not any(cell.strip() for cell in row[width:]):
            rows[place] = row = row[:width]  # Delimiters at the end of the line.
        if len(row) != width:
            _raise_ragged(file, lines[place], row, width, widths)
    if comments:
        file.notes.append(f"{comments} lines that begin with # are left out as comments")
    columns = [pa.array([row[place] for row in rows], pa.string()) for place in range(width)]
    return names, columns, lines


def _raise_ragged(file: TextFile, line: int, row: list[str], width: int, widths: Counter[int]) -> None:
    counted = "1 column" if len(row) == 1 else f"{len(row)} columns"
    shown = " ".join(file.delimiter.join(row).split())
    shown = shown if len(shown) <= 40 else f"{shown[:40]}…"
    advice = "Correct or remove that line"
    if width == 1:
        advice = f"Line {file.header_line} must have the names of the columns: remove what stands above them"
    elif len(widths) == 1 and file.delimiter == "," and len(row) > width:
        advice = (
            "Every line is so: if commas are decimal marks, separate the columns by semicolons or put the numbers into "
            "quotation marks"
        )
    elif len(row) > width:
        advice += ", or put a value that contains the delimiter into quotation marks"
    raise InputError(
        f"{file.path} is not a table: line {line} ({shown}) has {counted} where the header, line {file.header_line}, "
        f"has {width}. {advice}."
    )


def _check_quotes(file: TextFile) -> None:
    """Raise if a quotation mark is opened and not closed, or closed in the middle of a value."""
    line = file.header_line
    try:
        for line, _ in file.records(strict=True):  # noqa: B007  # The last line that could be read is what matters.
            pass
    except csv.Error as error:
        # The record after the last good one begins where the wrong quotation mark is.
        bad = next((number for number, _ in file.records() if number > line), line)
        after_header = line != file.header_line
        first = next(iter(file.records()), (bad, []))[0]
        raise InputError(
            f"{file.path} is not a table: a quotation mark that opens in line {bad if after_header else first} is not "
            "closed before the next delimiter or the end of the file. Close it, or double it where it belongs to the "
            "text."
        ) from error


def _first_line(error: Any) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
