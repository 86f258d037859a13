"""The way of the data: which files of the package one step of the rule enters, in order, and from which floor.

    python benchmarks/files_of_a_step.py

One `rule.step` of `newton`, `adam` and `vmp` is traced once under `sys.setprofile`. The list has every file of the
package in which a function is called, in the order of the first call. Files of which a step calls nothing but functions
of a single line (a default such as `return None`, an accessor, `x + y`) are listed with what is called, and not
numbered: their names say what they do, and a reader who follows the step need not open them.

A call is checked against the floors of the layout (`tests/test_architecture.py`): a function of one floor calls
functions of its own floor or lower ones. Two kinds of calls have no floor, because they follow a value that was handed
down and not an import: a function that another one was given (a closure such as the guard's `assess`), and a method of
an object that it was given (`q.moved` in a guard). They are printed by themselves. Anything else that points up is an
error, and the script ends with status 1.

The script also runs on trees with another layout, of which it prints the lists alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp

import bayesrule as blr
from bayesrule import factors
from bayesrule.numerics.programs import release_programs

ROOT = Path(blr.__file__).parent
FLOORS = (
    {"numerics"},
    {"steps"},
    {"families"},
    {"objectives", "points"},
    {"curvature"},
    {"factor_graph", "factors"},
    {"rule"},
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
LIMIT = 12


def newton() -> Callable[[], Any]:
    """Newton's method on a function of two numbers."""
    rule = blr.newton()
    state = rule.init(jnp.ones(2))
    return lambda: jax.eval_shape(lambda state: rule.step(lambda x: jnp.sum(jnp.cosh(x)), state), state)


def adam() -> Callable[[], Any]:
    """Adam on a least-squares objective and a batch of two examples."""
    rule, objective = blr.adam(1e-3), blr.Objective(lambda w, e: jnp.sum((e - w) ** 2), size=8, regularizer=0.1)
    state, batch = rule.init(jnp.zeros(3), objective), jnp.ones((2, 3))
    return lambda: jax.eval_shape(lambda state, batch: rule.step(objective, state, batch), state, batch)


def vmp() -> Callable[[], Any]:
    """Variational message passing for the mean and the precision of four numbers."""
    blocks = {"mean": blr.Gaussian(jnp.zeros(()), jnp.eye(1)), "precision": blr.Gamma(jnp.array(1.0), jnp.array(1.0))}
    terms = {
        "mean": factors.gaussian("mean", mean=0.0, precision=0.1),
        "precision": factors.prior("precision", blocks["precision"]),
        "y": factors.normal("y", mean="mean", precision="precision"),
    }
    model, rule = blr.Model(blocks, terms, size=4), blr.vmp()
    state, batch = rule.init(None, model), {"y": jnp.arange(4.0)}
    return lambda: jax.eval_shape(lambda state, batch: rule.step(model, state, batch), state, batch)


class Followed:
    """The calls between files of the package, as a profile function sees them."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, int]] = {}
        self.calls: set[tuple[str, str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = _file(frame.f_code)
        if event != "call" or name is None:
            return
        self.files.setdefault(name, {})[frame.f_code.co_qualname] = _length(frame.f_code)
        caller = frame.f_back
        while caller is not None and _file(caller.f_code) is None:
            caller = caller.f_back
        if caller is not None:
            self.calls.add((_file(caller.f_code) or "", name, frame.f_code.co_qualname))


def _file(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    inside = ROOT in path.parents and code.co_name != "<module>"
    return path.relative_to(ROOT).as_posix() if inside else None


def _length(code: CodeType) -> int:
    """How many lines of a function are code."""
    return len({line for _, _, line in code.co_lines() if line is not None} - {code.co_firstlineno}) or 1


def _floor(file: str) -> int | None:
    return FLOOR.get(file.split("/")[0].removesuffix(".py"))


def follow(step: Callable[[], Any]) -> Followed:
    """Trace a step once; everything that it imports is loaded before."""
    step()
    jax.clear_caches()
    release_programs()
    followed = Followed()
    sys.setprofile(followed)
    try:
        step()
    finally:
        sys.setprofile(None)
    return followed


def main() -> int:
    wrong = 0
    for make in (newton, adam, vmp):
        followed = follow(make())
        read = [file for file, lengths in followed.files.items() if max(lengths.values()) > 1]
        print(f"\n{make.__name__}: {len(read)} files to open (the aim is {LIMIT}), {len(followed.files)} entered")
        for file, lengths in followed.files.items():
            place, floor = read.index(file) + 1 if file in read else "", _floor(file)
            short = "" if file in read else f"only {', '.join(sorted(lengths))}"
            print(f"  {place:>2}  {file:<36}{'' if floor is None else f'floor {floor}':<9}{short}".rstrip())
        for caller, file, function in sorted(followed.calls):
            floors = _floor(caller), _floor(file)
            if None in floors or floors[1] <= floors[0]:  # pyright: ignore[reportOperatorIssue]  # None is first.
                continue
            handed = "<locals>" in function or "<lambda>" in function
            method = "." in function.replace("<locals>.", "") and not handed
            what = "a function handed down" if handed else "a method of what was handed down" if method else "UP"
            print(f"      {caller} calls {function} of {file}: {what}")
            wrong += what == "UP"
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
