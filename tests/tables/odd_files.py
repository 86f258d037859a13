"""Files as people have them: each is understood, or refused with its place and what helps.

A case has the content of a file, the options it is read with, and what is expected: the values of columns, a remark
that must be made, or the words of an error.
"""

import gzip
import io
import zipfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NAN = float("nan")


@dataclass(frozen=True)
class OddFile:
    """One file.

    Args:
        name: of the case.
        content: text (written as UTF-8), bytes, or a function that returns bytes.
        values: the expected values of columns: numbers (NaN where missing), or texts (None where missing).
        says: regular expressions, each of which a remark about a column or the file must match.
        error: a regular expression that the error must match; it is expected to be refused if this is given.
        options: the settings that it is read with.
        suffix: of the file's name.
        skips: columns that must be left out.
    """

    name: str
    content: Any
    values: dict[str, list[Any]] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    error: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    suffix: str = "csv"
    skips: tuple[str, ...] = ()


def case(name, content, values=None, *, says=(), error="", suffix="csv", skips=(), **options):
    says = (says,) if isinstance(says, str) else says
    return OddFile(name, content, values or {}, says, error, options, suffix, skips)


def column(*cells, name="x", delimiter=",", other="y"):
    """A file with one column of these cells and one of numbers; cells with a delimiter are put into quotation marks."""
    quoted = [f'"{cell}"' if delimiter in cell else cell for cell in cells]
    lines = [f"{cell}{delimiter}{place % 3}" for place, cell in enumerate(quoted)]
    return "\n".join([f"{name}{delimiter}{other}", *lines, ""])


def workbook(**sheets):
    """The bytes of an Excel workbook with these sheets, each a list of rows."""

    def build():
        import openpyxl

        book = openpyxl.Workbook()
        book.remove(book.worksheets[0])
        for title, rows in sheets.items():
            sheet = book.create_sheet(title)
            for row in rows:
                sheet.append(row)
        file = io.BytesIO()
        book.save(file)
        return file.getvalue()

    return build


def parquet(**columns):
    def build():
        import pyarrow as pa
        from pyarrow import parquet as writer

        file = io.BytesIO()
        writer.write_table(pa.table(columns), file)
        return file.getvalue()

    return build


def archive(**files):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in files.items():
            opened.writestr(name.replace("__", "."), content)
    return file.getvalue()


def days(*texts):
    return [NAN if text is None else float(np.datetime64(text, "D").astype(int)) for text in texts]


NUMBERS = [
    case("dollars", column("$1,200", "$950", "$12,345.50"), {"x": [1200, 950, 12345.5]}, says=r"in \$"),
    case("dollars without cents", column("$1,200", "$3,400"), {"x": [1200, 3400]}, says="commas between thousands"),
    case("euros", column("1.234,56 €", "12,50 €", "€ 7"), {"x": [1234.56, 12.5, 7]}, says="decimal commas"),
    case("two currencies", column("$5", "€6", "$7"), says=r"different units: '\$5' in line 2 and '€6' in line 3"),
    case("losses of dollars in brackets", column("$(6.00)", "($7.50)", "$8.00"), {"x": [-6, -7.5, 8]}),
    case("quarters", column("2023Q2", "2024Q2", "2024Q3"), {"x": ["2023Q2", "2024Q2", "2024Q3"]}),
    case("square metres", column("5.5 m2", "6 m2"), {"x": [5.5, 6]}, says="in m2"),
    case("losses in brackets", column("(1,200.00)", "300.00"), {"x": [-1200, 300]}),
    case("a minus behind", column("12,50-", "3,00"), {"x": [-12.5, 3]}),
    case("a typographic minus", column("−5.5", "3"), {"x": [-5.5, 3]}),
    case("decimal commas", column("12,5", "7,25", "3"), {"x": [12.5, 7.25, 3]}, says="decimal commas"),
    case("decimal commas of a German Excel", "x;y\n1.234,56;1\n7,5;2\n", {"x": [1234.56, 7.5], "y": [1, 2]}),
    case("a comma that may be both", column("1,234", "5,678"), error=r"'1,234' in line 2 is 1234.0 \(--decimal \.\) or "
         r"1\.234 \(--decimal ,\).*--decimal"),
    case("told: points", column("1,234", "5,678"), {"x": [1234, 5678]}, decimal="."),
    case("told: commas", column("1,234", "5,678"), {"x": [1.234, 5.678]}, decimal=","),
    case("thousands above 999 only", column("1,234", "950", "87", "2,500", "12,000"),
         {"x": [1234, 950, 87, 2500, 12000]},
         says=r"'1,234' in line 2 is read as 1234.0: if it is 1.234, say --decimal ,"),
    case("thousands above 999, too few", column("1,234", "950"), error="'1,234' in line 2 .*--decimal"),
    case("thousands against a semicolon", column("1,234", "950", "87", "2,500", "1,000", delimiter=";"),
         error="'1,234' in line 2 .*--decimal"),
    case("euros that may be both", column("1.859 €", "1.799 €"), error=r"'1\.859 €' in line 2 .*--decimal"),
    case("another column decides", 'x;z\n1.234;12,5\n5.678;3,25\n', {"x": [1234, 5678], "z": [12.5, 3.25]}),
    case("a comma among semicolons", "x;y\n1,234;1\n5,678;2\n", {"x": [1.234, 5.678]},
         says=("decimal commas", r"'1,234' in line 2 is read as 1.234: if it is 1234.0, say --decimal \.")),
    case("a point among semicolons", "x;y\n1.234;1\n5.678;2\n", error=r"'1\.234' in line 2.*--decimal"),
    case("three decimals in a plain file", column("1.234", "5.678"), {"x": [1.234, 5.678]},
         says=r"'1\.234' in line 2 is read as 1.234: if it is 1234.0, say --decimal ,"),
    case("both marks", column("1,5", "2.5", "3.5"),
         says=r"'1,5' in line 2 has a decimal comma and '2\.5' in line 3 has a "
         "decimal point. --decimal"),
    case("a mark against the option", column("1.5", "2.5"), error=r"'1\.5' in line 2, which does not fit --decimal ,",
         decimal=","),
    case("spaces between thousands", column("1 234,5", "12 345 678,0"), {"x": [1234.5, 12345678]}),
    case("narrow spaces", column("1\u202f234", "5\u00a0678"), {"x": [1234, 5678]}),
    case("apostrophes", column("1'234.50", "1’234’567"), {"x": [1234.5, 1234567]}),
    case("lakhs", column("₹1,00,000", "₹12,34,567"), {"x": [100000, 1234567]}),
    case("per cent", column("45 %", "7.5%"), {"x": [45, 7.5]}, says="in %"),
    case("some per cent", column("45 %", "0.5", "30 %"), says="'45 %' in line 2 and '0.5' in line 3. Write all alike"),
    case("kilograms", column("0.5 kg", "12kg"), {"x": [0.5, 12]}, says="in kg"),
    case("kilograms and grams", column("0.5 kg", "12 g"), says="'0.5 kg' in line 2 and '12 g' in line 3. Write all"),
    case("a unit now and then", column("0.5 kg", "12"), {"x": [0.5, 12]}, says="1 value without the unit kg"),
    case("units in the header", "weight (kg),\"size, mm\"\n1,2\n3,4\n", {"weight (kg)": [1, 3], "size, mm": [2, 4]}),
    case("too large", column("1e400", "5", "7.5"), {"x": [np.inf, 5, 7.5]},
         says="1 infinite value .'1e400' in line 2. is "
         "treated as missing"),
    case("infinity", column("inf", "-Infinity", "5"), {"x": [np.inf, -np.inf, 5]}, says="'inf' in line 2"),
    case("a word among numbers", column(*map(str, range(30)), "oops", "31.5"), {"x": [*range(30), NAN, 31.5]},
         says="1 value that is not numbers .'oops' in line 32. is treated as missing .--column x=category"),
    case("words among numbers", column("1", "2", "low", "4"), {"x": ["1", "2", "low", "4"]},
         says="'low' in line 4 is no number, while 75% of the values are.*--missing low; --column x=number"),
    case("words among numbers, told", column("1", "2", "low", "4"), {"x": [1, 2, NAN, 4]}, missing=["low"]),
    case("words among numbers, forced", column("1", "2", "low", "4"), {"x": [1, 2, NAN, 4]},
         says="'low' in line 4", columns={"x": "number"}),
    case("a far number", column(*["1.5", "2.5", "-999", "4", "-999", "3.3"]),
         says="-999 far from all other.*--missing=-999"),
    case("a far number, told", column(*["1.5", "2.5", "-999.0", "4", "-999"]), {"x": [1.5, 2.5, NAN, 4, NAN]},
         missing=["-999"]),
]  # fmt: skip

MISSING = [
    case("signs of missing values", column("1", "-", ".", "n/a", "?", "", "NaN", "#N/A", "--", "2"),
         {"x": [1, *[NAN] * 8, 2]}),
    case("words for missing values", column("1", "none", "unknown", "missing", "2.5"), {"x": [1, NAN, NAN, NAN, 2.5]}),
    case("none among words", column("none", "mild", "-", "severe"), {"x": ["none", "mild", None, "severe"]}),
    case("spaces around", column(" 1 ", "  ", " 2"), {"x": [1, NAN, 2]}),
    case("a column without values", column("", "", ""), {"x": [NAN] * 3}, says="empty"),
    case("a sign that is told", column("red", "zz", "blue"), {"x": ["red", None, "blue"]}, missing=["zz"]),
    case("NA is Namibia", column("NA", "DE", "NA"), {"x": ["NA", "DE", "NA"]}, columns={"x": "category"}),
    case("errors of Excel", column("1", "#DIV/0!", "#VALUE!", "3"), {"x": [1, NAN, NAN, 3]}),
]  # fmt: skip

DATES = [
    case("days first", column("31/01/2024", "05/02/2024"), {"x": days("2024-01-31", "2024-02-05")},
         says="day before month"),
    case("months first", column("01/31/2024", "05/02/2024"), {"x": days("2024-01-31", "2024-05-02")},
         says="month before day"),
    case("day or month", column("03/04/2024", "05/06/2024"), error=r"'03/04/2024' in line 2 .*--date-format, such as "
         "%d/%m/%Y"),
    case("day or month, told", column("03/04/2024", "05/06/2024"), {"x": days("2024-04-03", "2024-06-05")},
         date_format="%d/%m/%Y"),
    case("day or month, told for a column", column("03/04/2024", "05/06/2024"), {"x": days("2024-03-04", "2024-05-06")},
         columns={"x": "%m/%d/%Y"}),
    case("day or month, another column decides", "x,z\n03/04/2024,31/01/2024\n05/06/2024,01/02/2024\n",
         {"x": days("2024-04-03", "2024-06-05")}),
    case("days with points", column("03.04.2024", "05.06.24"), {"x": days("2024-04-03", "2024-06-05")}),
    case("names of months", column("31 Jan 2024", "1 March 2024"), {"x": days("2024-01-31", "2024-03-01")}),
    case("American names of months", '"x",y\n"January 31, 2024",1\n"Mar 1, 2024",2\n',
         {"x": days("2024-01-31", "2024-03-01")}),
    case("German names of months", column("12. März 2024", "1. Mai 2024"), {"x": days("2024-03-12", "2024-05-01")}),
    case("short years", column("31-Jan-24", "01-Feb-99"), {"x": days("2024-01-31", "1999-02-01")}),
    case("year or day", column("24-01-12", "24-02-11"), error="'24-01-12' in line 2.*--date-format"),
    case("times", column("2024-01-31 12:00", "2024-01-31T18:00:00Z"), {"x": [19753.5, 19753.75]}),
    case("halves of the day", column("01/31/2024 6:00 PM", "02/01/2024 6:00 am"), {"x": [19753.75, 19754.25]}),
    case("dates in two formats", column("2024-01-31", "31/01/2024", "2024-02-01"),
         says="'2024-01-31' in line 2 and '31/01/2024' in line 3"),
    case("a date that does not exist", column("30/02/2024", *[f"{day:02d}/01/2024" for day in range(1, 30)]),
         says="'30/02/2024' in line 2. is treated as missing"),
    case("dates without marks", column("20240131", "20240201"), {"x": [20240131, 20240201]},
         says="looks like dates .*--column x=%Y%m%d"),
    case("dates without marks, told", column("20240131", "20240201"), {"x": days("2024-01-31", "2024-02-01")},
         date_format="%Y%m%d"),
    case("days of Excel", column("45322", "45323", name="date"), {"date": [45322, 45323]}, says="--column date=excel"),
    case("days of Excel, told", column("45322", "45323", name="date"), {"date": days("2024-01-31", "2024-02-01")},
         columns={"date": "excel"}),
    case("a wrong format", column("31/01/2024"), error="takes a format of Python's strptime", date_format="dd/mm/yyyy"),
]  # fmt: skip

TEXTS = [
    case("long identifiers", column("1000000000000000001", "1000000000000000002", "1000000000000000003"),
         {"x": ["1000000000000000001", "1000000000000000002", "1000000000000000003"]}, says="too long for a number"),
    case("codes with zeros", column("01067", "80331", "10115"), {"x": ["01067", "80331", "10115"]},
         says="leading zeros .'01067' in line 2.*--column x=number"),
    case("codes with zeros, forced", column("01067", "80331"), {"x": [1067, 80331]}, columns={"x": "number"}),
    case("truth values", column("Yes", "no", "YES", "No", "yes", "NO", "Yes", "no"),
         {"x": ["Yes", "no"] * 4}, says="several spellings"),
    case("truth values of two kinds", column("true", "0", "TRUE", "no"), {"x": ["true", "0", "true", "0"]}),
    case("truth values of Python", column("True", "False", "None"), {"x": ["true", "false", None]}),
    case("times of day", column("12:30", "7:45:00"), says="times of day, which are read as text"),
    case("characters without width", column("\u200b5", "6\u200e", "\ufeff7.5"), {"x": [5, 6, 7.5]}),
    case("capitals", column("Paris", "paris", "Rome"), says="differ in capitals only .'Paris', 'paris'"),
    case("row numbers", column(*map(str, range(6)), name=""), says="identifier", skips=("column 1",)),
    case("an identifier", column("17", "4", "99", "3", name="customer_id"), says="identifier", skips=("customer_id",)),
    case("no identifier", column("1700", "400", "9900", "300", name="paid"), {"paid": [1700, 400, 9900, 300]}),
    case("telephone numbers", column(*[f"+49170{1234567 + 89 * place}" for place in range(30)]),
         says="--column x=skip"),
    case("codes with an E", column("12", "1E5", "7"), {"x": [12, 1e5, 7]},
         says="'1E5' in line 3 is read as 100000.*category"),
    case("an identifier that is meant", column("17", "4", "99", "3", name="id"), {"id": [17, 4, 99, 3]},
         columns={"id": "number"}),
    case("a column to leave out", column("1", "2"), skips=("x",), columns={"x": "skip"}),
    case("a kind that does not exist", column("1", "2"), error="--column x=float: there is no such kind",
         columns={"x": "float"}),
    case("a kind for no column", column("1", "2", name="Price"), error="no column 'price'.*Is it 'Price'",
         columns={"price": "number"}),
    case("no dates", column("red", "blue"), error="no dates .* 'red' in line 2.*--column x=%d/%m/%Y",
         columns={"x": "date"}),
    case("no numbers", column("red", "blue"), error="has no numbers, but 'red' in line 2", columns={"x": "number"}),
]  # fmt: skip

GOOD = "x,name,y\n1.5,Zoë,1\n2.5,Łódź,0\n"
PLAIN = {"x": [1.5, 2.5], "name": ["Zoë", "Łódź"], "y": [1, 0]}
LINES = [
    case("UTF-16", GOOD.encode("utf-16"), PLAIN, says="UTF-16"),
    case("UTF-16 without a mark", GOOD.encode("utf-16-le"), PLAIN, says="UTF-16"),
    case("UTF-16 of the other order", b"\xfe\xff" + GOOD.encode("utf-16-be"), PLAIN),
    case("UTF-32", GOOD.encode("utf-32"), PLAIN),
    case("half of UTF-16", GOOD.encode("utf-16")[:-1], error="save it as UTF-8"),
    case("a byte-order mark", "\ufeff" + GOOD, PLAIN),
    case("Windows-1252", "x,y\n5 €,1\n7 €,2\n".encode("cp1252"), {"x": [5, 7]},
         says="line 2. and is read as Windows-1252"),
    case("an old Macintosh", GOOD.replace("\n", "\r"), PLAIN),
    case("gzip", gzip.compress(GOOD.encode()), PLAIN, suffix="csv.gz"),
    case("gzip named csv", gzip.compress(GOOD.encode()), PLAIN),
    case("half a gzip", gzip.compress(GOOD.encode() * 50)[:-30], error="damaged"),
    case("a delimiter in quotes", '"a, b";"c; d"\n"1,5";2\n', {"a, b": [1.5], "c; d": [2]}),
    case("quotes after spaces", 'x, "a, b"\n1, "u, v"\n2, "w"\n', {"a, b": ["u, v", "w"]}),
    case("tabs", "x\ty\n1,5\t2\n", {"x": [1.5], "y": [2]}),
    case("spaces", "x   y  z\n1  2.5 a\n10 3.5 b\n", {"x": [1, 10], "y": [2.5, 3.5], "z": ["a", "b"]}),
    case("told by Excel", "sep=;\nx;y\n1,5;2\n", {"x": [1.5], "y": [2]}),
    case("delimiters at the end", "x,y,\n1,2,\n3,4,\n", {"x": [1, 3], "y": [2, 4]}),
    case("delimiters at the end of rows", "x,y\n1,2,\n3,4,\n", {"x": [1, 3], "y": [2, 4]}),
    case("names of rows", "x,y\na,1,2\nb,3,4\n", {"column 1": ["a", "b"], "x": [1, 3], "y": [2, 4]},
         says="has no name"),
    case("blank lines", "\n\nx,y\n\n1,2\n   \n3,4\n\n", {"x": [1, 3], "y": [2, 4]}),
    case("comments", "# made by hand\n# today\nx,y\n1,2\n# a pause\n3,4\n", {"x": [1, 3], "y": [2, 4]},
         says="comments"),
    case("a header that begins as a comment", "#x,y\n1,2\n3,4\n", {"x": [1, 3], "y": [2, 4]}),
    case("line breaks in a value", 'x,y\n"a\nb",1\nc,2\n', {"x": ["a\nb", "c"], "y": [1, 2]}),
    case("a line break in a name", '"size\n(mm)",y\n1,2\n', {"size (mm)": [1]}),
    case("inches", 'x,y\n5" pipe,1\n6 pipe,2\n', {"x": ['5" pipe', "6 pipe"]}),
    case("a very long value", "x,y\n" + "a" * 300_000 + ",1\nb,2\n", {"y": [1, 2]}),
    case("a table of Markdown", "| x | y |\n|---|---|\n| 1 | 2 |\n", error="line 2, which draws a line below the"),
    case("a table of a terminal", "x|y\n---+---\n1|2\n", error="line 2, which draws a line below the names"),
    case("a line too long", "x,y\n1,2\n\n3,4\n1,2,3\n",
         error=r"line 5 \(1,2,3\) has 3 columns where the header, line 1, has "
         "2. Correct or remove"),
    case("a line too short", "x,y,z\n1,2,3\n4,5\n",
         error=r"line 3 \(4,5\) has 2 columns where the header, line 1, has 3"),
    case("decimal commas that delimit", "x,y\n1,5,2,5\n2,5,3,5\n", error="if commas are decimal marks, separate"),
    case("a title above", "Sales of 2024\n\nx,y\n1,2\n", error="line 3 .* remove what stands above"),
    case("a quote that stays open", 'x,y\n1,"a\n2,b\n3,c\n', error="quotation mark that opens in line 2"),
    case("quotes that stay open", 'x,y\n0,z\n1,"a\n2,"b\n3,c\n', error="quotation mark that opens in line 3"),
    case("a NUL byte", b"x,y\n1,2\n3,\x004\n" + b"1,2\n" * 200, error="line 3 has a NUL byte"),
    case("a binary file", bytes(range(256)) * 40, error="binary file"),
    case("no names", "5.1,3.5,setosa\n4.9,3.0,setosa\n6.2,2.9,virginica\n",
         error="line 1 has the number '5.1' in column 1"),
    case("years as names", "land,2019,2020,2021\nDE,1.5,2.5,3\nFR,3,4,5\n", {"2019": [1.5, 3], "2021": [3, 5]}),
    case("one year as a name", "land,2020\nDE,1.5\nFR,3\n", {"2020": [1.5, 3]}),
    case("one year as a value", "DE,2020\nFR,2019\nIT,2021\n", error="line 1 has the number '2020'"),
    case("numbered names", "0,1,2\n1.5,2,3\n3,4,5\n", {"0": [1.5, 3], "2": [3, 5]}),
    case("names twice", "x,y,x\n1,2,3\n", error="columns 1 and 3 of line 1"),
    case("no name", "x,,y\n1,2,3\n4,5,6\n", {"column 2": [2, 5]}, says="columns without a name"),
    case("names alone", "x,y,z\n", error="header and no rows"),
    case("nothing", "", error="is empty"),
    case("comments alone", "# a\n# b\n", error="all its lines are comments"),
    case("JSON", '[{"x": 1}]', error="JSON: save the table as CSV"),
    case("HTML named xls", "<html><table></table></html>", error="HTML or XML: save the table as CSV", suffix="xls"),
    case("PDF", b"%PDF-1.7 ...", error="PDF document"),
    case("a ZIP archive", archive(table__csv="x,y\n1,2\n"),
         error=r"ZIP archive \(table.csv\): unpack it", suffix="zip"),
    case("bzip2", b"BZh91AY&SY", error="bzip2: unpack"),
    case("a sheet of no workbook", GOOD, error="--sheet is for Excel workbooks", sheet="1"),
    case("a wrong mark", GOOD, error="--decimal must be . or ,", decimal="comma"),
]  # fmt: skip

SHEETS = {"notes": [["x", "y"], [1, 2]], "data": [["x", "y"], [3, 4]]}
TYPED = [
    case("several sheets", workbook(**SHEETS), {"x": [1]},
         says="'notes' is read, of 'notes', 'data' .--sheet", suffix="xlsx"),
    case("a sheet by name", workbook(**SHEETS), {"x": [3]}, suffix="xlsx", sheet="data"),
    case("a sheet by number", workbook(**SHEETS), {"x": [3]}, suffix="xlsx", sheet="2"),
    case("no such sheet", workbook(**SHEETS),
         error="no sheet 'date': it has 'notes', 'data'", suffix="xlsx", sheet="date"),
    case("an empty sheet", workbook(empty=[], data=SHEETS["data"]), error="--sheet chooses another: 'data'",
         suffix="xlsx", sheet="empty"),
    case("text and numbers in a sheet", workbook(data=[["x", "y"], [None, None], ["12,5", 1], ["n/a", 2], ["7,5 ", 3]]),
         {"x": [12.5, NAN, 7.5]}, suffix="xlsx"),
    case("two marks in a sheet", workbook(data=[["x", "y"], [None, None], ["12,5", 1], [2.5, 2]]),
         says="'12,5' in row 3 of the sheet 'data'.*--decimal", suffix="xlsx"),
    case("a title in a sheet", workbook(data=[["Sales"], ["x", "y"], [1, 2]]), error="row 1 of the sheet 'data'.*above",
         suffix="xlsx"),
    case("names twice in a sheet", workbook(data=[["x", "x"], [1, 2]]),
         error="columns 1 and 2 of row 1", suffix="xlsx"),
    case("days of Excel in a sheet", workbook(data=[["date", "y"], [45322, 1], [45323, 2]]),
         {"date": days("2024-01-31", "2024-02-01")}, suffix="xlsx", columns={"date": "excel"}),
    case("long identifiers in Parquet", parquet(x=[10**18 + 1, 10**18 + 2, None], y=[1, 2, 3]),
         {"x": ["1000000000000000001", "1000000000000000002", None]}, suffix="parquet"),
    case("lists in Parquet", parquet(x=[[1], [2]], y=[1, 2]),
         says="list.* cannot be read", suffix="parquet", skips=("x",)),
    case("a far number in Parquet", parquet(x=[1.5, -999.0], y=[1, 2]), {"x": [1.5, NAN]}, suffix="parquet",
         missing=[-999]),
]  # fmt: skip

ODD_FILES = [*NUMBERS, *MISSING, *DATES, *TEXTS, *LINES, *TYPED]
