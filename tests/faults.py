"""Small faults of a source tree: which there are by fixed rules, and a draw of them from a seed.

A fault is one textual edit of one file, found in its syntax tree. Its kinds, and what they do:

- `arithmetic`: `+` and `-`, `*` and `/` change places; `//` becomes `*`, `%` becomes `//`, `**` becomes `*`.
- `comparison`: `<` and `<=`, `>` and `>=`, `==` and `!=`, `is` and `is not`, `in` and `not in` change places.
- `boolean`: `and` and `or` change places, `&` becomes `|`, a `not` or `~` is left out.
- `sign`: a minus is left out, or put before the first term of a sum or before the product that a function returns.
- `constant`: n becomes n + 1, a float x becomes 2x (0.0 becomes 1.0), True and False change places.
- `dropped`: one term of a sum, one factor of a product, or one part of an `and` or `or` is left out.
- `swapped`: two neighbouring arguments of a call change places, or the values of two neighbouring keywords; `a @ b`
  becomes `b @ a`.
- `condition`: an `if`, of a statement, an expression or a comprehension, is negated.
- `keyword`: a keyword argument of a call is left out.

There are none in docstrings, annotations, decorators, imports, `__all__`, overloads, what only type checkers read,
f-strings, the arguments of `raise`, warnings and what is printed; texts do not change.

`draw` gives each folder of the source one fault and divides the others in proportion to the faults that are possible
there (largest remainders); where there are fewer faults than folders, it draws the folders. Within a folder it draws a
file with a probability in proportion to its possible faults, then one of the kinds that the file has, then the place.
"""

import ast
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
COMPARISON = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
KINDS = ("arithmetic", "comparison", "boolean", "sign", "constant", "dropped", "swapped", "condition", "keyword")

SILENT = {"warn", "print", "echo", "log", "debug", "info", "warning", "error", "cast", "TypeVar", "ParamSpec"}
UNLIKE = {"isinstance", "issubclass", "getattr", "hasattr", "setattr"}  # Swapped arguments of these always raise.
FIELDS = {"annotation", "returns", "decorator_list", "type_params", "msg", "type_comment"}
SIMPLE = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fault:
    """One edit of one file: the bytes from `start` to `end` become `text`."""

    file: str  # from the source's folder
    line: int
    kind: str
    start: int
    end: int
    text: bytes
    lines: range  # of the changed expression
    statement: range  # of the statement around it, without the statements inside
    around: range | None  # of the function whose body it is in or whose default it is, or of the class
    runs: bool  # in the body of a function, not when the file is imported
    name: str  # the function, class or constant of the file that it belongs to

    def applied(self, source):
        """The bytes of the file with the fault."""
        return source[: self.start] + self.text + source[self.end :]

    def shown(self, source):
        """What changes, as one line: the old lines and the new ones, each without the space around them."""
        first, last = source.rfind(b"\n", 0, self.start) + 1, source.find(b"\n", self.end)
        old, new = source[first:last], source[first : self.start] + self.text + source[self.end : last]
        return " → ".join(f"`{b' '.join(part.split()).decode()}`" for part in (old, new))


class Reader:
    """Lists the possible faults of one file."""

    def __init__(self, file, source):
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.faults = []
        self.statement, self.around, self.runs, self.name = range(0), None, False, ""
        self.visit(ast.parse(source))

    def start(self, node):
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node, closed=True):
        """The source of an expression, in parentheses where it might need some."""
        text = self.source[self.start(node) : self.end(node)]
        return text if isinstance(node, SIMPLE) or not closed else b"(" + text + b")"

    def add(self, kind, node, text, start=None, end=None):
        start = self.start(node) if start is None else start
        end = self.end(node) if end is None else end
        line = self.source.count(b"\n", 0, start) + 1
        lines = range(node.lineno, node.end_lineno + 1)
        fault = Fault(self.file, line, kind, start, end, text, lines, self.statement, self.around, self.runs, self.name)
        self.faults.append(fault)

    def add_operator(self, kind, left, right, node, pattern, new):
        """Replace the operator between two operands, which has no position of its own in the tree."""
        first, last = self.end(left), self.start(right)
        literal = pattern if pattern[0].isalpha() else re.escape(pattern)
        for found in re.finditer(rb"#[^\n]*|(" + literal.encode() + rb")", self.source[first:last]):
            if found[1]:
                self.add(kind, node, new.encode(), first + found.start(), first + found.end())
                return

    def visit(self, node):
        if is_excluded(node):
            return
        before = self.statement, self.around, self.runs, self.name
        if isinstance(node, ast.stmt):
            self.enter_statement(node)
        add = getattr(self, f"add_{type(node).__name__}", None)
        if add is not None:
            add(node)
        for field, value in ast.iter_fields(node):
            if field in FIELDS or (field == "body" and is_type_checking(node)):
                continue
            if isinstance(node, FUNCTION):
                self.runs = field == "body" or before[2]
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self.statement, self.around, self.runs, self.name = before

    def enter_statement(self, node):
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        last = max(node.lineno, first_line(body[0]) - 1) if body else node.end_lineno
        self.statement = range(node.lineno, last + 1)
        if isinstance(node, FUNCTION):
            self.around = range(first_line(node.body[0]), node.end_lineno + 1)
        elif isinstance(node, ast.ClassDef) and not self.runs:
            self.around = range(node.lineno, node.end_lineno + 1)
        if not self.name:
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            self.name = getattr(node, "name", None) or getattr(targets[0], "id", "")

    def add_BinOp(self, node):
        op, left, right = type(node.op), node.left, node.right
        if is_sequence(node):
            return
        if op in ARITHMETIC:
            self.add_operator("arithmetic", left, right, node, *ARITHMETIC[op])
        elif op is ast.Pow:
            self.add("arithmetic", node, b"(" + self.text(left) + b" * " + self.text(right) + b")")
        elif op is ast.BitAnd:
            self.add_operator("boolean", left, right, node, "&", "|")
        elif op is ast.MatMult:
            self.add("swapped", node, b"(" + self.text(right) + b" @ " + self.text(left) + b")")
        if op in {ast.Add, ast.Sub, ast.Mult, ast.Div}:
            self.add("dropped", node, self.text(left))
        if op in {ast.Add, ast.Mult}:
            self.add("dropped", node, self.text(right))
        if op is ast.Sub:
            self.add("dropped", node, b"(-" + self.text(right) + b")")
        if op in {ast.Add, ast.Sub} and not isinstance(left, ast.UnaryOp | ast.Constant):
            self.add("sign", left, b"-" + self.text(left))

    def add_AugAssign(self, node):
        if type(node.op) in ARITHMETIC:
            old, new = ARITHMETIC[type(node.op)]
            self.add_operator("arithmetic", node.target, node.value, node, old, new)

    def add_Compare(self, node):
        for (left, right), op in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
            self.add_operator("comparison", left, right, node, *COMPARISON[type(op)])

    def add_BoolOp(self, node):
        old, new = BOOLEAN[type(node.op)]
        for left, right in pairwise(node.values):
            self.add_operator("boolean", left, right, node, old, new)
        for dropped in node.values:
            kept = f" {old} ".encode().join(self.text(value) for value in node.values if value is not dropped)
            self.add("dropped", node, kept if len(node.values) == 2 else b"(" + kept + b")")

    def add_UnaryOp(self, node):
        if not isinstance(node.op, ast.UAdd):
            self.add("sign" if isinstance(node.op, ast.USub) else "boolean", node, self.text(node.operand))

    def add_Return(self, node):
        value = node.value
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div | ast.MatMult):
            self.add("sign", value, b"(-" + self.text(value) + b")")

    def add_Constant(self, node):
        value = node.value
        if isinstance(value, bool):
            self.add("constant", node, str(not value).encode())
        elif isinstance(value, int):
            self.add("constant", node, str(value + 1).encode())
        elif isinstance(value, float):
            self.add("constant", node, repr(2 * value if value else 1.0).encode())

    def add_Call(self, node):
        called = called_name(node)
        values = [] if called in UNLIKE else [node.args, [one.value for one in node.keywords if one.arg]]
        for group in values:
            for one, other in pairwise(group):
                first, second = self.text(one, closed=False), self.text(other, closed=False)
                if first != second and not any(isinstance(value, ast.Starred | ast.Lambda) for value in (one, other)):
                    between = self.source[self.end(one) : self.start(other)]
                    self.add("swapped", one, second + between + first, end=self.end(other))
        parts = sorted([*node.args, *node.keywords], key=self.start)
        for place, part in enumerate(parts):
            if not isinstance(part, ast.keyword) or part.arg is None:
                continue
            if place:
                self.add("keyword", part, b"", start=self.end(parts[place - 1]))
            else:
                self.add("keyword", part, b"", end=self.start(parts[1]) if len(parts) > 1 else None)

    def add_condition(self, test):
        plain = isinstance(test, ast.Compare) and isinstance(
            test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
        )
        if not plain and not isinstance(test, ast.UnaryOp):  # These have been negated already.
            self.add("condition", test, b"(not " + self.text(test) + b")")

    def add_If(self, node):
        if not is_type_checking(node):
            self.add_condition(node.test)

    add_IfExp = add_If

    def add_comprehension(self, node):
        for test in node.ifs:
            self.add_condition(test)


def first_line(node):
    """The first line of a statement, decorators included."""
    decorators = getattr(node, "decorator_list", None)
    return decorators[0].lineno if decorators else getattr(node, "lineno", None) or node.pattern.lineno


def called_name(node):
    """`warn` for `warnings.warn(...)` and for `warn(...)`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def is_sequence(node):
    """Whether an operand is a text, list or tuple as written, which has no arithmetic."""
    if isinstance(node, ast.BinOp):
        return is_sequence(node.left) or is_sequence(node.right)
    text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return text or isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def is_excluded(node):
    if isinstance(node, ast.Assign):
        return any(getattr(target, "id", "") == "__all__" for target in node.targets)
    if isinstance(node, FUNCTION):
        return any("overload" in ast.dump(decorator) for decorator in node.decorator_list)
    if isinstance(node, ast.Call):
        return called_name(node) in SILENT
    if isinstance(node, ast.Subscript):
        return getattr(node.value, "id", "") == "Literal"
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr)


def is_real(fault, source):
    """Whether the file still parses, and says something else."""
    try:
        return ast.dump(ast.parse(fault.applied(source))) != ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return False


def possible_faults(folder):
    """All possible faults of the Python files of a folder, by file."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return {file: Reader(file, (folder / file).read_bytes()).faults for file in files}


def top_folder(file):
    """`families` for families/gaussian/full.py; the files that are in no folder are one together."""
    return file.split("/")[0] if "/" in file else "."


def shares(sizes, count, rng):
    """How many faults each folder gets, of which the module's docstring gives the rule."""
    if count < len(sizes):
        return Counter(rng.sample(sorted(sizes), count))
    left, total = count - len(sizes), sum(sizes.values())
    exact = {folder: left * size / total for folder, size in sizes.items()}
    given = Counter({folder: 1 + int(part) for folder, part in exact.items()})
    largest = sorted(exact, key=lambda folder: (int(exact[folder]) - exact[folder], folder))
    given.update(largest[: count - given.total()])
    return given


def draw(folder, seed, count):
    """`count` different faults in random order, the same for the same tree and seed."""
    rng = random.Random(seed)
    files = defaultdict(dict)
    for file, faults in possible_faults(folder).items():
        if faults:
            files[top_folder(file)][file] = faults
    sizes = {top: sum(map(len, inside.values())) for top, inside in files.items()}
    drawn = []
    for top, share in sorted(shares(sizes, count, rng).items()):
        inside, taken = files[top], set()
        while len(taken) < min(share, sizes[top]):
            file = rng.choices(list(inside), [len(faults) for faults in inside.values()])[0]
            present = {fault.kind for fault in inside[file]}
            kind = rng.choice([kind for kind in KINDS if kind in present])
            fault = rng.choice([fault for fault in inside[file] if fault.kind == kind])
            if fault not in taken and is_real(fault, (folder / file).read_bytes()):
                taken.add(fault)
                drawn.append(fault)
    rng.shuffle(drawn)
    return drawn
