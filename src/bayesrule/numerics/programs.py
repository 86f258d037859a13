"""Compiled programs of the library itself: quick to compile where they are small, and bounded in number.

`compiled` is `jax.jit` for the library's own functions, with two differences.

A **small** program, one of few numbers, spends more time in the compiler than it will ever run. So where it runs on a
CPU, XLA and LLVM optimise it less: that halves the time to compile and hardly changes the time to run, because what
takes time in it are calls of matrix routines.

A program that is called once or twice in a fit, to judge its end, spends still more time in the compiler than it runs;
`compiled(rare=True)` has LLVM optimise it not at all.

A process that fits many models of different shapes compiles many programs, and JAX keeps each as long as its function.
Every program holds memory and memory maps, of which Linux allows a process 65,530, and a compiler that gets no more of
them ends the process. So all functions of the library together keep the `CAPACITY` programs that were used last. The
programs of the user's own jitted functions are not touched. What dropped programs have held is given back to the system
now and then (`_return_memory`).
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import os
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache, partial, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.core import trace_ctx

from .factors import shared_factors

P = ParamSpec("P")
T = TypeVar("T")

if jax.__version_info__ >= (0, 10):
    warnings.warn(
        f"jax {jax.__version__} is above bayesrule's bound, jax<0.10: jaxlib 0.10 returns wrong numbers on CPU. Run "
        "tests/test_jax_canaries.py with it before you believe a result, or install an older one.",
        stacklevel=2,
    )

CAPACITY = 96
"""How many programs the library keeps. One has twenty to a hundred memory maps, about fifty over all estimators; a fit
of an estimator has two to eight programs. With this number of them a process has six to seven thousand maps."""

SMALL = 2**17
"""Programs whose arguments have fewer numbers than this in all are compiled quickly."""

_QUICKLY = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}

_TRIM_AFTER = 32

_programs: OrderedDict[Hashable, Any] = OrderedDict()  # The jitted function of each signature, the oldest use first.
_lock = threading.Lock()  # Threads of a parallel search may fit at the same time.


class Compiled(Generic[P, T]):
    """A function of arrays that is compiled for each signature, as `jax.jit` does it; see `compiled`."""

    def __init__(
        self,
        function: Callable[P, T],
        static: tuple[str, ...],
        donate: tuple[str, ...],
        rare: bool = False,
        scratch: tuple[str, ...] = (),
    ):
        function = shared_factors()(function)
        self.function, self.static, self.donate, self.rare = function, static, donate + scratch, rare
        self.scratch = scratch
        self._names = list(inspect.signature(function).parameters)
        # Inside another program the function is a part of that one, which has its own options.
        self._nested: Any = jax.jit(function, static_argnames=static)
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if not trace_ctx.is_top_level():
            return self._nested(*args, **kwargs)
        return self._program(args, kwargs)(*args, **kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, list[Any]]:
        """What a program is kept by, and the arrays among its arguments."""
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        static = tuple((name, arguments.pop(name)) for name in self.static if name in arguments)
        leaves, structure = jax.tree.flatten(arguments)
        return (self, len(args), static, structure, tuple(map(_kind_of, leaves))), leaves

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The jitted function for the signature of these arguments, which is now the one that was used last."""
        key, leaves = self._key(args, kwargs)
        with _lock:
            program = _programs.get(key)
            if program is None:
                is_small = sum(map(np.size, leaves)) < SMALL
                # A function object of its own, because JAX keeps programs by the function that they are compiled from.
                program = _programs[key] = jax.jit(
                    partial(self.function),
                    static_argnames=self.static,
                    donate_argnames=self.donate,
                    keep_unused=bool(self.scratch),  # Else JAX drops an argument whose numbers nobody reads.
                    compiler_options=_quick_options(self.rare) if is_small else None,
                )
                if len(_programs) > CAPACITY:
                    _programs.popitem(last=False)
                    _return_memory()
            _programs.move_to_end(key)
        return program

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The shapes and types of what the function returns, without compiling it."""
        return self._nested.eval_shape(*args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The program for these arguments before it is compiled, as `jax.jit` gives it."""
        return self._program(args, kwargs).lower(*args, **kwargs)

    def compile_ahead(self, *args: P.args, **kwargs: P.kwargs) -> Callable[[], None] | None:
        """Compile the program for these arguments in a thread of its own, while this one goes on to trace others.

        Tracing is done here, because what is traced may not be made for several threads; XLA's part is not Python's.

        Returns:
            What waits for the thread, to be called before the program is used; None where there is nothing to compile,
            or where tracing fails: then the first use raises the error.
        """
        if not trace_ctx.is_top_level() or self._key(args, kwargs)[0] in _programs:
            return None
        try:
            lowered = self._program(args, kwargs).lower(*args, **kwargs)
        except Exception:
            return None

        def compile_it() -> None:
            with contextlib.suppress(Exception):  # The first use compiles again, and raises it.
                lowered.compile()

        thread = threading.Thread(target=compile_it, daemon=True)
        thread.start()
        return thread.join

    def count(self) -> int:
        """How many programs of this function there are."""
        with _lock:
            return sum(key[0] is self for key in _programs)  # pyright: ignore[reportIndexIssue]  # They are tuples.


_dropped = itertools.count(1)


def _return_memory() -> None:
    """Give freed memory back to the system, after every so many programs that were dropped.

    Compiling allocates many small pieces of which few remain, scattered over all that was in use, and glibc gives none
    of it back by itself: a process that compiles program after program would seem to grow for ever.
    """
    trim = _malloc_trim()
    if trim is not None and next(_dropped) % _TRIM_AFTER == 0:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None


def _quick_options(rare: bool) -> dict[str, Any] | None:
    """The options with which XLA compiles quickly for a CPU; those that the user has set by XLA_FLAGS stay."""
    if jax.default_backend() != "cpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    options = _QUICKLY | {"xla_backend_optimization_level": 0} if rare else _QUICKLY
    return {name: value for name, value in options.items() if name not in flags} or None


def _kind_of(leaf: Any) -> Hashable:
    """What a program depends on in an argument: its shape, its type, and whether that is weak, as a Python number's."""
    if isinstance(leaf, jax.Array):
        aval = jax.typeof(leaf)
        return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return (), jax.dtypes.canonicalize_dtype(type(leaf)), True
    return np.shape(leaf), jax.dtypes.canonicalize_dtype(np.result_type(leaf)), False


@overload
def compiled(function: Callable[P, T]) -> Compiled[P, T]: ...
@overload
def compiled(
    *,
    static: str | tuple[str, ...] = (),
    donate: str | tuple[str, ...] = (),
    rare: bool = False,
    scratch: str | tuple[str, ...] = (),
) -> Callable[[Callable[P, T]], Compiled[P, T]]: ...
def compiled(
    function: Any = None,
    *,
    static: str | tuple[str, ...] = (),
    donate: str | tuple[str, ...] = (),
    rare: bool = False,
    scratch: str | tuple[str, ...] = (),
) -> Any:
    """`jax.jit` for a function of this library: small programs compile quickly, and old ones are dropped.

    Args:
        function: a function of pytrees of arrays, defined once at the top of a module.
        static: the names of arguments that are hashable values and not arrays.
        donate: the names of arguments whose buffers the program may use for its results.
        rare: whether a program is called only a few times, so that it should above all compile quickly.
        scratch: the names of arguments that are only memory for results of their shapes, and are donated too: a fresh
            array of 40 MB costs more time in the system's page faults than the numbers that are written to it.

    >>> import jax.numpy as jnp
    >>> double = compiled(lambda x: 2 * x)
    >>> [float(double(jnp.asarray(1.0))), double.count()]
    [2.0, 1]
    """
    names = lambda given: (given,) if isinstance(given, str) else tuple(given)
    if function is None:
        return partial(Compiled, static=names(static), donate=names(donate), rare=rare, scratch=names(scratch))
    return Compiled(function, names(static), names(donate), rare, names(scratch))


def release_programs() -> None:
    """Drop all programs of the library; each is compiled again when it is next used."""
    with _lock:
        _programs.clear()
