"""Every row of Table 1 agrees with its reference, and stops agreeing when its algorithm is changed."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import bayesrule as blr
from bayesrule import reference_checks as checks
from bayesrule.cli import app
from bayesrule.cli.table import _compile_quickly
from bayesrule.reference_checks import CHECKS, Outcome
from bayesrule.reference_checks.check import relative_error

ROWS = {row.recipe: row for row in blr.table()}
# One changed algorithm for each row, most of them changed only slightly: every one must fail the row's check.
MUTANTS = {
    "gradient_descent": blr.gradient_descent(0.1, momentum=1e-6),
    "newton": blr.newton(0.999),
    "von": blr.von().replace(guard=blr.NoGuard()),
    "multimodal": blr.multimodal(temperature=1e-3),
    "sgd": blr.sgd(0.1 + 1e-9),
    "adam": blr.adam(1e-3, damping=1e-7),
    "dropout": blr.dropout(0.1, 0.89),
    "straight_through": blr.straight_through(0.1).replace(points=blr.Relaxed(1.0, noise=False)),
    "ogn": blr.ogn(1e-2, decay=0.999, curvature=1.0).replace(curvature=blr.SquaredGradient()),
    "vogn": blr.ogn(1e-2, decay=0.999, curvature=1.0),
    "bayesbinn": blr.bayesbinn(1e-4, relaxation=0.999),
    "conjugate": blr.conjugate().replace(steps=blr.Steps(0.999)),
    "laplace": blr.laplace().replace(curvature=blr.GaussNewton()),
    "em": blr.em(rate=0.999),
    "svi": blr.vmp(0.5),
    "vmp": blr.vmp(order=["components", "weights", "z"]),
    "ncvmp": blr.ncvmp(order="parallel"),
    "cvi": blr.cvi(0.501),
    "exponential_weights": blr.exponential_weights(0.1).replace(steps=blr.Steps(0.1, temperature=1e-6)),
}


def test_every_row_has_a_check_and_a_mutant():
    assert set(CHECKS) == set(ROWS) == set(MUTANTS)
    assert all(check.tolerance <= 1e-8 and check.compare.__doc__ for check in CHECKS.values())


@pytest.mark.as_users
@pytest.mark.parametrize("name", ROWS)
def test_a_row_agrees_with_its_reference(name):
    outcome = checks.run_check(ROWS[name])
    assert outcome.passed, (outcome.error, outcome.message)


@pytest.mark.parametrize("name", ROWS)
def test_a_changed_algorithm_is_found_out(name):
    error = CHECKS[name].error(MUTANTS[name])
    assert error > 3 * CHECKS[name].tolerance  # finite: it ran, and came out elsewhere


def test_errors_are_relative_and_strict():
    assert relative_error([1.0, 2.0], [1.0, 2.0, 3.0]) == float("inf")
    check = CHECKS["newton"]
    assert not check.passed(float("nan"))
    assert not check.passed(2e-12)


def test_checks_are_in_float64_whatever_the_process_has():
    with jax.enable_x64(False):
        outcome = checks.run_check(ROWS["gradient_descent"])
        assert outcome.passed
        assert outcome.error < 1e-12
        assert jnp.zeros(()).dtype == jnp.float32


def test_what_goes_wrong_is_a_failure_of_the_row():
    row = dataclasses.replace(ROWS["em"], rule=blr.newton())
    outcome = checks.run_check(row)
    assert not outcome.passed
    assert "Error" in outcome.message
    absent = checks.run_check(dataclasses.replace(row, rule=None))
    assert not absent.passed
    assert absent.message == "not implemented"


@pytest.mark.parametrize(("error", "code"), [(1e-13, 0), (1e-3, 1), (float("nan"), 1)])
def test_the_command_line(monkeypatch, error, code):
    """Each row is printed with its error, and an error above the tolerance makes the exit code 1."""
    fake = lambda row: Outcome(row, CHECKS[row.recipe], error if row.recipe == "em" else 0.0, 0.1)
    monkeypatch.setattr(checks, "run_check", fake)
    result = CliRunner().invoke(app, ["table", "--check"])
    assert result.exit_code == code
    assert result.stdout.count("pass") == 19 - code
    assert f"{error:.1e}" in result.stdout
    assert all(check.reference[:30] in result.stdout for check in CHECKS.values())
    assert "\x1b" not in result.stdout, "no colours in a file"
    assert f"{19 - code} of 19 rows" in result.stdout


def test_the_plain_table():
    result = CliRunner().invoke(app, ["table"])
    assert result.exit_code == 0
    assert "blr.newton" in result.stdout
    assert "pass" not in result.stdout.split()


def test_quick_compilation_leaves_a_process_that_has_jax(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    _compile_quickly()
    assert "XLA_FLAGS" not in os.environ
