"""Plants small faults in a copy of the source and reports which of them the tests notice.

    python tests/plant_faults.py --measured build/measured --seed 1 --faults 100

The folder is what `measure.py` has written for all tests of the same source. What a fault is and how they are drawn is
in `faults.py`; the same tree and seed give the same faults. For each, the tests of the first tier (those that are not
marked `extended`) that tell most about its line run for 60 seconds, start included, until one fails. A fault that
survives meets the second tier's for 90 seconds.

The order of the tests (`ranked`): first those that enter the changed line, by the measurement of `measure.py`. Each has
a weight: the part that the changed file has among all lines that it enters, four times that for the docstrings of the
file and the test file of the same name, twice for the same folder. The tests that enter another line of its function
(or class, or of what uses the constant) follow with a fifth of this weight, and those that enter any line of the file
with a fifth again. A test enters few lines where it reuses a program that another has compiled, so the others of the
same test files follow with a fifth of the average weight, as do, where no test enters the file, those of its folder.
The next test is always the one with the largest weight for each second that it takes, and each test that has been
chosen halves the weight of the other cases of its function and takes a tenth off its file's.

A test that fails must pass without the fault; one that does not is left out, and the fault is judged again. A fault is
killed also where nothing can be imported or collected. A test that is still running at the end counts as having failed
if it has taken 20 seconds longer than five times its measured time and passes within that without the fault. A fault is
undecided where no test ended in time, or none was found. Lines that changed since the measurement would mislead it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue

from faults import draw, is_real, possible_faults, top_folder

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/bayesrule"
LIMITS = {"first": 60, "second": 90}  # seconds for a fault
NOT_COPIED = (".git", ".venv", ".cache", ".pytest_cache", ".ruff_cache", "build", "dist", "run")  # Of the root.
UNMEASURED = 2.0  # seconds that a test is thought to take of which nothing is known


# In the process that runs the tests, this file is a plugin of pytest.


def pytest_addoption(parser):
    parser.addoption("--plan", metavar="FILE", help="which tests to run in which order, and where to tell how it goes")


def pytest_configure(config):
    if config.getoption("--plan"):
        config.pluginmanager.register(Teller(**json.loads(Path(config.getoption("--plan")).read_text())))


class Teller:
    """Runs the tests of a plan in its order, without one only lists them, and tells each event as a line of JSON."""

    def __init__(self, tests, log):
        self.tests, self.log = tests, Path(log)

    def tell(self, event, test="", **more):
        with self.log.open("a") as file:
            file.write(json.dumps({"event": event, "test": test, "at": time.time(), **more}) + "\n")

    def pytest_sessionstart(self):
        import bayesrule

        self.tell("imported", file=bayesrule.__file__)

    def pytest_collection_modifyitems(self, config, items):
        if self.tests is None:
            marked = {item.nodeid: item.get_closest_marker("extended") is not None for item in items}
            self.tell("listed", tests=marked)
        rank = {test: place for place, test in enumerate(self.tests or ())}
        items[:] = sorted((item for item in items if item.nodeid in rank), key=lambda item: rank[item.nodeid])

    def pytest_collectreport(self, report):
        if report.failed:
            self.tell("failed", report.nodeid, why=last_line(report))

    def pytest_runtest_logstart(self, nodeid):
        self.tell("started", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.tell("failed", report.nodeid, why=last_line(report))

    def pytest_runtest_logfinish(self, nodeid):
        self.tell("ended", nodeid)


def last_line(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    return (lines[0] if crash else lines[-1])[:200] if lines else ""


# What is known about the tests.


@dataclass(eq=False)
class Measured:
    """A test, its CPU seconds, and the lines that it enters: a bit mask for each file."""

    name: str
    extended: bool
    seconds: float = UNMEASURED
    lines: dict = field(default_factory=dict)

    @cached_property
    def path(self):
        return self.name.split("::")[0]

    @cached_property
    def function(self):
        return self.name.split("[")[0]

    @cached_property
    def size(self):
        return sum(mask.bit_count() for mask in self.lines.values())

    def share(self, file):
        return self.lines.get(file, 0).bit_count() / max(1, self.size)

    def closeness(self, file):
        folder, _, stem = file.removesuffix(".py").rpartition("/")
        if self.path in {f"{PACKAGE}/{file}", "/".join(filter(None, ("tests", folder, f"test_{stem}.py")))}:
            return 4
        return 2 if self.path.startswith((f"{PACKAGE}/{top_folder(file)}/", f"tests/{top_folder(file)}/")) else 1


def read_tests(listed, folder):
    """The tests that exist, with what the measurement in `folder` says about them."""
    tests = {name: Measured(name, extended) for name, extended in listed.items()}
    for path in sorted(folder.glob("*.jsonl")):
        for record in complete_records(path):
            test = tests.get(record["test"])
            if test is not None:
                test.seconds = record["cpu"]
                test.lines = {file: int(mask, 16) for file, mask in record["lines"].items()}
    return list(tests.values())


def complete_records(path):
    """What a file says that has one line of JSON for a record, of which the last may have been interrupted."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def mask_of(lines):
    return sum(1 << line for line in lines)


def masks_around(fault, source):
    """The lines by which tests of a fault are found, from the nearest to the farthest: bit masks by file."""
    if fault.runs:
        yield {fault.file: mask_of([*fault.lines, *fault.statement])}
    if fault.around:
        yield {fault.file: mask_of(fault.around)}
    elif fault.name:
        word, mentions = re.compile(rf"\b{re.escape(fault.name)}\b"), {}
        for path in source.rglob("*.py"):
            lines = path.read_text().splitlines()
            inside = [number for number, line in enumerate(lines, 1) if line[:1] == " " and word.search(line)]
            mentions[path.relative_to(source).as_posix()] = mask_of(inside)
        yield mentions
    yield {fault.file: -1}


def ranked(fault, tests, source, limit):
    """The tests for a fault in the order of this file's docstring, as many as take `limit` seconds."""
    tests = [test for test in tests if test.seconds < limit]
    weights = {}
    for distance, masks in enumerate(masks_around(fault, source)):
        for test in tests:
            if test not in weights and any(test.lines.get(file, 0) & mask for file, mask in masks.items()):
                weights[test] = 0.2**distance * test.share(fault.file) * test.closeness(fault.file)
        if not distance:
            paths = {test.path for test in weights}
            beside = 0.2 * sum(weights.values()) / len(weights) if weights else 0.02
    near = 4 if weights else 2
    for test in tests:
        if test.path in paths or test.closeness(fault.file) >= near:
            weights[test] = max(weights.get(test, 0.0), beside)

    chosen, seconds = [], 0.0
    functions, files = Counter(), Counter()

    def gain(test):
        cost = 0.3 + test.seconds + (test.path not in files)
        return weights[test] * 0.5 ** functions[test.function] * 0.9 ** files[test.path] / cost

    while weights and seconds < limit:
        best = max(weights, key=gain)
        del weights[best]
        chosen.append(best)
        seconds += 0.1 + best.seconds + (best.path not in files)
        functions[best.function] += 1
        files[best.path] += 1
    return chosen


# Running them.


@dataclass
class Round:
    """What one run of tests said: `killed`, `survived` or `undecided`."""

    outcome: str
    chosen: int = 0  # tests
    ended: int = 0  # tests, a failing one included
    seconds: float = 0.0
    by: str = ""
    why: str = ""
    running: float = 0.0  # seconds that the test `by` had taken when time was up
    entering: int = 0  # tests of the chosen ones that enter the statement, as far as it was measured
    left_out: list = field(default_factory=list)  # tests that fail without the fault

    def __str__(self):
        left_out = "".join(f"\n        left out, as it fails without the fault: {test}" for test in self.left_out)
        if self.outcome == "killed":
            return f"killed in {self.seconds:.0f} s by {self.by} ({self.why}){left_out}"
        if not self.chosen:
            return f"{self.outcome},{self.why}{left_out}"
        entering = f"{self.entering or 'none'} of them enter the line"
        ended = f"{self.ended} of {self.chosen} tests in {self.seconds:.0f} s{self.why}"
        return f"{self.outcome} {ended}, {entering}{left_out}"


class Copy:
    """A copy of the tree in which one fault at a time is planted."""

    def __init__(self, folder, environment):
        self.folder, self.process, self.stopped = folder, None, False
        self.passing = set()  # tests that pass without a fault
        left_out = lambda path, names: [
            name for name in names if name == "__pycache__" or (Path(path) == ROOT and name in NOT_COPIED)
        ]
        shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
        path = os.pathsep.join(str(folder / part) for part in ("src", "tests", "benchmarks"))
        # Beside the copy: the command line shows a path below the working directory as a relative one.
        temporary = folder.with_name(f"{folder.name}-temporary")
        temporary.mkdir()
        self.environment = os.environ | environment | {"PYTHONPATH": path, "TMPDIR": str(temporary)}

    def write(self, file, content):
        path = self.folder / PACKAGE / file
        path.write_bytes(content)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # Python tells files apart by their size and the second in which they changed.

    def run(self, paths, tests, limit):
        """The events of a run of `tests`, and its exit status: None if it was stopped after `limit` seconds."""
        plan, log = self.folder / "plan.json", self.folder / "log.jsonl"
        log.write_text("")
        plan.write_text(json.dumps({"tests": tests, "log": str(log)}))
        options = ["-p", "plant_faults", "--plan", str(plan), "-p", "no:cacheprovider", "-n0", "-x", "-q", "-m", ""]
        if self.stopped:
            raise KeyboardInterrupt
        with (self.folder / "output.txt").open("w") as output:
            self.process = process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *paths],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self.end()
        if self.stopped:
            raise KeyboardInterrupt
        return complete_records(log), status

    def stop(self):
        """Run nothing from now on."""
        self.stopped = True
        self.end()

    def end(self):
        """End the tests, and all processes that they have started."""
        process, self.process = self.process, None
        if process is not None:
            with suppress(ProcessLookupError):  # None is left.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def list_tests(self):
        """All tests, and whether they are marked `extended`."""
        events, _ = self.run([], None, None)
        imported = [event["file"] for event in events if event["event"] == "imported"]
        listed = [event["tests"] for event in events if event["event"] == "listed"]
        if not listed or not imported[0].startswith(str(self.folder)):
            raise SystemExit(f"The tests cannot be listed:\n{(self.folder / 'output.txt').read_text()[-3000:]}")
        return listed[0]

    def try_tests(self, tests, limit):
        """Run tests until one fails."""
        began = time.time()
        events, status = self.run(paths_of(tests), [test.name for test in tests], limit)
        counts = len(tests), sum(event["event"] == "ended" for event in events), time.time() - began
        for event in events:
            if event["event"] == "failed":
                return Round("killed", *counts, event["test"], event["why"])
        last = events[-1] if events else {"event": "", "test": ""}
        started = last["event"] == "started"
        if status is None:
            running = time.time() - last["at"] if started else 0.0
            return Round("survived" if counts[1] else "undecided", *counts, last["test"], " (out of time)", running)
        if started:
            return Round("killed", *counts, last["test"], f"the process ended with status {status}")
        if status not in {0, 5}:  # All passed, or there was none.
            return Round("killed", *counts, "import", last_error(self.folder / "output.txt"))
        return Round("survived" if counts[1] else "undecided", *counts)

    def judge(self, fault, tests, limit):
        """What tests say about a fault, from one run more than there are tests that fail without it too."""
        source, names = (ROOT / PACKAGE / fault.file).read_bytes(), {test.name: test for test in tests}
        left_out = []
        while names:
            self.write(fault.file, fault.applied(source))
            result = self.try_tests(list(names.values()), limit)
            self.write(fault.file, source)
            allowed = 5 * names[result.by].seconds + 20 if result.by in names else limit
            if result.outcome != "killed" and result.running > allowed:
                result.outcome, result.why = "killed", f"still running after {result.running:.0f} s"
            result.left_out = left_out
            if result.outcome != "killed" or self.passes(result.by, paths_of(names.values()), allowed):
                return result
            kept = {name: test for name, test in names.items() if result.by not in {name, test.path}}
            if len(kept) == len(names):
                break
            names = kept
            left_out.append(f"{result.by} ({result.why})")
        why = " no test passes without the fault" if tests else " no test"
        return Round("undecided", why=why, left_out=left_out)

    def passes(self, test, paths, limit):
        """Whether a test passes without a fault, within some seconds; or, if it is not a test, whether all collects."""
        if test not in self.passing:
            is_test = "::" in test
            paths = [test.split("::")[0]] if is_test else paths
            events, status = self.run(paths, [test] if is_test else [], limit + LIMITS["first"])
            times = [event["at"] for event in events if event["event"] in {"started", "ended"}] or [0.0]
            if status != (0 if is_test else 5) or times[-1] - times[0] > limit:
                return False
            self.passing.add(test)
        return True


def paths_of(tests):
    """The files of tests in the order of the whole suite: a module may hide what another imports from its package."""
    return sorted({test.path for test in tests}, key=lambda path: (not path.startswith("tests/"), path))


def last_error(path):
    lines = [line for line in path.read_text().splitlines() if line.startswith("E ")] or [""]
    return lines[-1][1:].strip()[:200]


def make_environment():
    """The variables of `make test`, of which those of the caller come first: one cache of programs for all faults."""
    lines = re.findall(r"^test test-all: export (\w+) [:?]?= ?(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    found = {name: os.environ.get(name, value.replace("$(CURDIR)", str(ROOT))) for name, value in lines}
    Path(found["JAX_COMPILATION_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
    return found


# The report.


def verdict(rounds):
    """In one word, what the rounds of a fault said; a tier without tests for it says nothing."""
    for tier, result in rounds.items():
        if result.outcome == "killed":
            return tier
    outcomes = {result.outcome for result in rounds.values() if result.why != " no test"}
    return "survived" if outcomes == {"survived"} else "undecided"


def summary(judged):
    counts = Counter(one["verdict"] for one in judged)
    killed = counts["first"] + counts["second"]
    share = f"{counts['first'] / killed:.0%}" if killed else "none"
    yield f"{len(judged)} faults: {counts['first']} killed by the first tier, {counts['second']} by the second only, "
    yield f"{counts['survived']} survived both, {counts['undecided']} undecided.\n"
    yield f"Of those that are killed at all, the first tier kills {share}.\n"


def markdown(judged):
    """A table by folder, and the faults that the first tier does not kill."""
    names = ("first", "second", "survived", "undecided")
    folders = defaultdict(Counter)
    for one in judged:
        folders[top_folder(one["file"])][one["verdict"]] += 1
    yield "| folder | faults | killed by the first tier | by the second only | survived | undecided |"
    yield "|---|" + "--:|" * 5
    for folder, counts in sorted(folders.items()):
        yield f"| {folder} | {counts.total()} | " + " | ".join(str(counts[name]) for name in names) + " |"
    yield "\n| place | fault | verdict |\n|---|---|---|"
    for one in sorted(judged, key=lambda one: (one["verdict"], one["file"], one["line"])):
        if one["verdict"] != "first":
            shown = one["shown"].replace("|", "\\|")
            yield f"| {one['file']}:{one['line']} | {shown} | {one['verdict']} |"


def judge_all(faults, tests, copies, judged):
    """Judge the faults with as many copies of the tree at a time as there are, and print each when it is done."""
    free = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(fault):
        copy, rounds = free.get(), {}
        source = ROOT / PACKAGE
        for tier, limit in LIMITS.items():
            chosen = ranked(fault, [test for test in tests if test.extended == (tier == "second")], source, limit)
            rounds[tier] = copy.judge(fault, chosen, limit)
            statement = mask_of([*fault.lines, *fault.statement])
            rounds[tier].entering = sum(test.lines.get(fault.file, 0) & statement > 0 for test in chosen)
            if rounds[tier].outcome == "killed":
                break
        free.put(copy)
        shown = fault.shown((source / fault.file).read_bytes())
        told = {tier: asdict(result) for tier, result in rounds.items()}
        place = {"file": fault.file, "line": fault.line, "kind": fault.kind, "shown": shown}
        judged.append({**place, "verdict": verdict(rounds), "rounds": told})
        lines = [f"{fault.file}:{fault.line} {fault.kind}: {shown}"]
        lines += [f"    {tier} tier: {result}" for tier, result in rounds.items()]
        print("\n".join(lines), flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            list(pool.map(one, faults))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, required=True, help="the folder that measure.py has written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=30, help="how many are drawn")
    parser.add_argument("--only", nargs="+", metavar="FILE:LINE", help="all faults of these lines instead of a draw")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are judged at a time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the report as JSON")
    parser.add_argument("--markdown", action="store_true", help="print tables for documentation at the end")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # Its tests are in groups of their own, and would go on.
        signal.signal(number, signal.default_int_handler)
    source, judged = ROOT / PACKAGE, []
    if options.only:
        found = [fault for faults in possible_faults(source).values() for fault in faults]
        found = [fault for fault in found if f"{fault.file}:{fault.line}" in options.only]
        faults = [fault for fault in found if is_real(fault, (source / fault.file).read_bytes())]
    else:
        faults = draw(source, options.seed, options.faults)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        environment = make_environment()
        copies = [Copy(Path(folder) / str(number), environment) for number in range(options.jobs)]
        try:
            tests = read_tests(copies[0].list_tests(), options.measured)
            judge_all(faults, tests, copies, judged)
        except KeyboardInterrupt:
            print("Interrupted.")
    print("\n" + "".join(summary(judged)), *(markdown(judged) if options.markdown else ()), sep="\n")
    if options.out:
        options.out.write_text(json.dumps({"seed": options.seed, "faults": judged}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
