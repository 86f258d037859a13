"""Every test runs in float64 on the CPU unless it says otherwise, workers stay small, and slow tests are named.

It lies above `src` and `tests`, because the hooks of a conftest.py hold for the tests of its folder and the examples in
docstrings are tests of `src`.
"""

import ctypes
import gc
import os
import sys
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

import bayesrule
from bayesrule.numerics import programs

jax.config.update("jax_enable_x64", True)

RESIDENT_LIMIT = 1_300_000_000  # bytes; the next test may add some 200 MB before it is looked at again
MAPS_LIMIT = 30_000  # of the 65,530 memory maps that Linux allows a process


def resident_bytes():
    """The memory of this process, 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def release_programs(kept=0):
    """Drop compiled programs: the library's but for those that were used last, or with `kept=0` all that there are.

    A program of the library holds some ten megabytes, and most are of no use to a later test; the small ones of eager
    operations, of which there are many more, hold little and are used again. What another test needs after all comes
    from the cache on disk where compiling it took long.
    """
    with programs._lock:
        while len(programs._programs) > kept:
            programs._programs.popitem(last=False)
    if not kept:
        jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        # The C library keeps what was freed unless it is asked to return it.
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def pytest_collection_finish(session):
    """Leave what collection made out of garbage collections: it stays until the end.

    Compiling makes many objects, so the collector would walk through all modules again and again.
    """
    release_programs()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.fixture
def compiled_as_users(monkeypatch):
    """Let the library compile its own programs as it does small ones for users: for tests that run long.

    XLA has read its flags long ago; the library looks whether they are there before it gives options of its own.
    """
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(programs, "SMALL", 2**30)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Release compiled programs when the process has grown, or holds many maps (looked at once a file)."""
    if resident_bytes() > RESIDENT_LIMIT:
        release_programs(kept=programs.CAPACITY // 4)
        if resident_bytes() > 0.85 * RESIDENT_LIMIT:
            release_programs()
    elif nextitem is None or nextitem.path != item.path:
        maps = Path("/proc/self/maps")
        if maps.exists() and maps.read_bytes().count(b"\n") > MAPS_LIMIT:
            release_programs()


# The first tier takes a sample of large grids, and not the examples of these folders, which take long.
LONG_EXAMPLES = tuple(
    Path(bayesrule.__file__).parent / folder
    for folder in ("families", "curvature", "factor_graph", "estimators", "interop")
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave long examples, and the cases of a test marked `sampled` that its sample has not, to the second tier."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in LONG_EXAMPLES):
            item.add_marker("extended")
    whole_files = not any("::" in argument for argument in config.args)
    grids = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("extended"):
            grids[item.path, item.parent.name, item.originalname].append(item)
    for cases in grids.values():
        named = set(cases[0].get_closest_marker("sampled").args)
        if whole_files and named - {item.callspec.id for item in cases}:
            for item in cases:
                item.fixturenames.insert(0, "a_sample_that_is_out_of_date")
            continue
        sample = [item for item in cases if item.callspec.id in named] if named else covering(cases)
        for item in cases:
            if item not in sample:
                item.add_marker("extended")


@pytest.fixture
def a_sample_that_is_out_of_date(request):
    pytest.fail(f"the mark `sampled` of {request.node.originalname} names cases that are not there")


def covering(cases):
    """Few of the cases, the first ones first, that have every value of every parameter once."""
    values = lambda item: {(name, id(value)) for name, value in item.callspec.params.items()}
    left, sample = set().union(*map(values, cases)), []
    while left:
        sample.append(max(cases, key=lambda item: len(values(item) & left)))
        left -= values(sample[-1])
    return sample


# What the run took.

SLOW = 3.0  # seconds of processor time that a test of the first tier should stay below
SHOWN = 20
started, costs = {}, {}


def processor_seconds():
    """Those of this process and of the ones that it has started and waited for."""
    return sum(os.times()[:4])


def pytest_runtest_logstart(nodeid):
    started[nodeid] = processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        seconds = processor_seconds() - started.pop(item.nodeid)
        is_slow = seconds > SLOW and item.get_closest_marker("extended") is None
        report.user_properties.append(("cost", (seconds, is_slow)))
    return report


def pytest_runtest_logreport(report):
    if report.when == "teardown":
        costs[report.nodeid] = dict(report.user_properties).get("cost", (0.0, False))


def pytest_terminal_summary(terminalreporter):
    if len(costs) < SHOWN:
        return
    total = sum(seconds for seconds, _ in costs.values())
    terminalreporter.section(f"{len(costs)} tests took {total:.0f} s of processor time; the slowest")
    for nodeid, (seconds, is_slow) in sorted(costs.items(), key=lambda cost: -cost[1][0])[:SHOWN]:
        note = f"  (above {SLOW:.0f} s: shorten it, or mark it as extended)" if is_slow else ""
        terminalreporter.line(f"{seconds:6.1f} s  {nodeid}{note}")
