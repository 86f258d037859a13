"""Every test runs in float64 on the CPU unless it says otherwise, and workers stay small."""

import ctypes
import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jax._src.interpreters import mlir

from bayesrule.numerics import programs

jax.config.update("jax_enable_x64", True)

# These make a reference's numbers, and need what made them.
collect_ignore = [
    "reference/make_ivon.py",
    "reference/make_bayespy.py",
    "reference/make_nuts.py",
    "reference/make_dynamax.py",
    "reference/make_posterior_cases.py",
    "saved_files/make.py",
]

RESIDENT_LIMIT = 1_300_000_000  # bytes; the next test may add some 200 MB before it is looked at again
MAPS_LIMIT = 30_000  # of the 65,530 memory maps that Linux allows a process


LOWERINGS_OF_A_CONTEXT = 200


def share_contexts():
    """Have programs share MLIR's contexts, of which JAX makes one for each program and keeps it as long as that.

    A context takes 1.2 MB and 4 ms of the 18 ms that an eager operation of a new shape takes, and the suite compiles
    tens of thousands of them: workers would have to drop their programs again and again, and compile them again. A new
    context now and then forgets the constants of programs that are gone.
    """
    make_context, made = mlir.make_ir_context, []

    def shared_context():
        if len(made) % LOWERINGS_OF_A_CONTEXT == 0:
            made[:] = [make_context()]
        else:
            made.append(made[-1])
        return made[-1]

    mlir.make_ir_context = shared_context


share_contexts()


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
