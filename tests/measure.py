"""What each test costs and which lines of the library it enters: a pytest plugin, and its summary by folder.

    make test-all ARGS="-p measure --measure build/measured --dist=loadfile"
    python tests/measure.py build/measured > tests/measured.md

Lines are counted with `sys.monitoring`, which costs little and needs Python 3.12; on 3.11 only the costs are recorded.
Compiled programs are dropped between files, because a test that uses the program of another enters none of its lines.
Within a file a line is thus counted for the first test that compiles it, and for others that run it in Python. Records
of several folders are joined, so that costs and lines may come from different runs: the last folder's count.

One line of JSON for a test: its CPU seconds (processes that it started included), the programs that it compiled and
the seconds of tracing and compiling them, its outcome and tier, and the lines of each file of the source as a bit mask.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

SOURCE = str(Path(__file__).parents[1] / "src" / "bayesrule") + os.sep

COMPILING = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}


def pytest_addoption(parser):
    parser.addoption("--measure", metavar="FOLDER", help="where to write what each test costs and enters")


def pytest_configure(config):
    folder = config.getoption("--measure")
    # With workers, the process that distributes the tests runs none.
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(Recorder(Path(folder)))


class Recorder:
    """Writes one line of JSON for each test that has ended."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"{os.getpid()}.jsonl").open("a")
        self.lines, self.path, self.counts, self.failed = defaultdict(set), None, defaultdict(float), False
        self.listen_to_jax()
        if sys.version_info >= (3, 12):
            self.watch_lines()

    def listen_to_jax(self):
        import jax

        from bayesrule.numerics import programs

        def release():
            programs.release_programs()
            jax.clear_caches()

        self.release_programs = release

        def add(event, seconds, **_):
            if event in COMPILING:
                self.counts[COMPILING[event]] += seconds
                self.counts["programs"] += COMPILING[event] == "compiling"

        jax.monitoring.register_event_duration_secs_listener(add)

    def watch_lines(self):
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "measure")

        def started(code, _):
            if code.co_filename.startswith(SOURCE):
                monitoring.set_local_events(monitoring.COVERAGE_ID, code, monitoring.events.LINE)
            return monitoring.DISABLE

        def entered(code, line):
            self.lines[code.co_filename].add(line)
            return monitoring.DISABLE

        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.PY_START, started)
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, entered)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.PY_START)

    def pytest_collection_finish(self, session):
        self.extended = {item.nodeid for item in session.items if item.get_closest_marker("extended")}

    def pytest_runtest_logstart(self, nodeid, location):
        path = nodeid.split("::")[0]
        if path != self.path and sys.version_info >= (3, 12):
            self.release_programs()
        self.path, self.failed = path, False
        self.lines.clear()
        self.counts.clear()
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()
        self.wall, self.cpu = time.perf_counter(), sum(os.times()[:4])

    def pytest_runtest_logreport(self, report):
        self.failed |= report.failed

    def pytest_runtest_logfinish(self, nodeid, location):
        record = {
            "test": nodeid,
            "cpu": round(sum(os.times()[:4]) - self.cpu, 3),
            "wall": round(time.perf_counter() - self.wall, 3),
            "failed": self.failed,
            "extended": nodeid in self.extended,
            **{name: round(value, 3) for name, value in self.counts.items()},
            "lines": {
                name.removeprefix(SOURCE): hex(sum(1 << line for line in lines))
                for name, lines in sorted(self.lines.items())
            },
        }
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()


# The summary.


def records(folders):
    """What is known of each test by name."""
    known = defaultdict(dict)
    for folder in folders:
        for file in sorted(Path(folder).glob("**/*.jsonl")):
            for line in file.read_text("utf-8").splitlines():
                record = json.loads(line)
                if not record["lines"]:
                    del record["lines"]
                known[record["test"]] |= record
    return known


def folder_of(test):
    parts = test.split("::")[0].split("/")
    return "/".join(parts[: 3 if parts[0] == "src" else 2])


def entered(tests):
    """How many lines of the source some tests enter."""
    masks = defaultdict(int)
    for record in tests:
        for file, mask in record.get("lines", {}).items():
            masks[file] |= int(mask, 16)
    return sum(mask.bit_count() for mask in masks.values())


def row(name, tests):
    first = [record for record in tests if not record.get("extended")]
    sums = lambda chosen, *keys: sum(record.get(key, 0) for record in chosen for key in keys)
    numbers = (
        *(len(tests), len(first), sums(tests, "cpu"), sums(first, "cpu"), sums(tests, "programs")),
        *(sums(tests, "tracing", "lowering", "compiling"), entered(tests), entered(first)),
    )
    return f"| {name} | " + " | ".join(f"{number:,.0f}" for number in numbers) + " |"


def summary(known):
    folders = defaultdict(list)
    for test, record in sorted(known.items()):
        folders[folder_of(test)].append(record)
    yield "| folder | tests | first tier | CPU s | first tier | programs | tracing, compiling s | lines | first tier |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for folder, tests in folders.items():
        yield row(f"`{folder}`", tests)
    yield row("all", list(known.values()))


if __name__ == "__main__":
    print("What the tests cost and how many lines of the source they enter, by folder (`tests/measure.py`).\n")
    print(*summary(records(sys.argv[1:])), sep="\n")
