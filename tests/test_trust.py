"""Does "converged" mean converged? The first tenth of `benchmarks/trust.py`, against optima that SciPy finds.

A test is one program (a recipe on a kind of model and a shape) with problems that differ in their data and priors, so
that it is compiled once.
"""

import os

import numpy as np
import pytest
import trust
import trust_problems

TENTH = round(0.1 * len(trust_problems.PROGRAMS))
PROGRAMS = [pytest.param(number, id=str(trust_problems.PROGRAMS[number])) for number in range(TENTH)]


def verdicts(program, dtype):
    return list(trust.sweep(trust.seeds_of_program(program), dtype))


def check(found):
    wrong = [trust.describe(verdict) for verdict in trust.offenders(found)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.sampled("em mixture 200x4")
@pytest.mark.parametrize("program", PROGRAMS)
def test_converged_is_the_optimum_in_float64(program):
    check(verdicts(program, "float64"))


@pytest.mark.as_users
@pytest.mark.skipif(
    "optimization_level=0" in os.environ.get("XLA_FLAGS", ""), reason="float32 is judged once, as users compile it"
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_converged_is_the_optimum_in_float32(program):
    check(verdicts(program, "float32"))


def test_the_sweep_has_all_that_it_promises():
    """At least 300 problems, at most 12 shapes, N from 1 to 2000, every recipe in the tenth, all data rounded."""
    programs = trust_problems.PROGRAMS
    shapes = {program.shape for program in programs}
    assert trust_problems.PROBLEMS >= 300
    assert len(shapes) <= 12
    assert {min(shapes)[0], max(shapes)[0]} == {1, 2000}
    assert {p.recipe for p in programs[:TENTH]} >= {p.recipe for p in programs} - {"von"}
    rounded = trust_problems.problem(3, "float32").data["y"]
    assert rounded.dtype == float
    assert (rounded == rounded.astype("float32")).all()


def test_a_wrong_answer_is_told_from_a_right_one():
    """The judge itself: Laplace's posterior passes, the same one moved by a tenth of a standard deviation does not."""
    task = trust_problems.problem(0, "float64")
    best = trust.optimum_of(task).q
    unit = task.settings["precision"] ** -0.5
    gap, off, spread, _, _ = trust.compare(task, {"mean": unit * best.mean, "root": unit * best.root})
    assert max(abs(gap), off, spread) < 1e-8
    moved = best.mean + 0.1 * best.root @ best.root[0] / np.linalg.norm(best.root[0])  # the likeliest such move
    gap, off, spread, _, _ = trust.compare(task, {"mean": unit * moved, "root": 1.1 * unit * best.root})
    assert gap == pytest.approx(0.005, rel=0.05)
    assert off == pytest.approx(0.1, rel=1e-6)
    assert spread == pytest.approx(0.1, rel=1e-6)
