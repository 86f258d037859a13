"""Compiled programs of the library: the same numbers as `jax.jit`, and bounded in number."""

import gc
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.numerics import programs
from bayesrule.numerics.programs import compiled


@compiled(static="power")
def raised(x, power=2):
    return {"y": jnp.sum(jnp.sin(x) ** power)}


def test_one_program_for_each_signature():
    function = compiled(lambda x, scale: scale * jnp.cumsum(x))
    for rows in (3, 4, 3):
        np.testing.assert_allclose(function(np.ones(rows), 2.0), 2 * np.arange(1, rows + 1))
    function(jnp.ones(3), 5)
    function(jnp.ones(3), jnp.asarray(5.0, float))
    assert function.count() == 4  # A weak type is another signature, as for `jax.jit`; a NumPy array is none.
    function(np.ones(3, int), 7.0)
    assert function.count() == 5


def test_static_arguments_by_name_and_by_position():
    x = np.linspace(0, 1, 5)
    assert float(raised(jnp.asarray(x), 3)["y"]) == pytest.approx(np.sum(np.sin(x) ** 3), rel=1e-12)
    assert float(raised(jnp.asarray(x), power=3)["y"]) == pytest.approx(np.sum(np.sin(x) ** 3), rel=1e-12)
    assert float(raised(jnp.asarray(x))["y"]) == pytest.approx(np.sum(np.sin(x) ** 2), rel=1e-12)


def test_donated_buffers_are_given_away():
    move = compiled(donate="x")(lambda x: x + 1)
    x = jnp.ones(1000)
    move(x)
    assert x.is_deleted()


def test_works_inside_other_transformations():
    x = jnp.linspace(0.0, 1.0, 4)
    inner = compiled(static="power")(lambda x, power: jnp.sum(x**power))
    assert float(jax.jit(lambda x: inner(x, 2))(x)) == pytest.approx(float(jnp.sum(x**2)))
    np.testing.assert_allclose(jax.vmap(lambda x: inner(x, 2))(x), x**2)
    np.testing.assert_allclose(jax.grad(lambda x: inner(x, power=2))(x), 2 * x)
    assert inner.count() == 0
    assert inner.eval_shape(x, 2).shape == ()


def test_the_programs_used_last_are_kept(monkeypatch):
    programs.release_programs()
    monkeypatch.setattr(programs, "CAPACITY", 3)
    function, users = compiled(lambda x: x + 1), jax.jit(lambda x: x + 1)
    traced = []
    recorded = compiled(lambda x: traced.append(x.shape) or x + 1)
    for rows in (1, 2, 3, 1, 4, 1, 2):  # With 4 comes one too many, and 2 was not used for the longest time.
        recorded(np.ones(rows))
    assert [shape[0] for shape in traced] == [1, 2, 3, 4, 2]
    function(np.ones(1))
    assert (recorded.count(), function.count()) == (2, 1)
    users(np.ones(1))
    programs.release_programs()
    assert (recorded.count(), function.count(), users._cache_size()) == (0, 0, 1)


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux tells the memory maps of a process.")
def test_dropped_programs_return_their_memory_maps():
    maps = lambda: Path("/proc/self/maps").read_bytes().count(b"\n")
    function = compiled(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(len(x))) + jnp.sin(x))
    function(np.eye(29))  # The first Cholesky factorisation loads libraries.
    gc.collect()
    before = maps()
    for size in range(30, 60):
        function(np.eye(size))
    grown = maps() - before
    programs.release_programs()
    gc.collect()
    assert grown > 30
    assert maps() - before < grown / 3


@pytest.mark.extended
def test_fits_of_new_functions_do_not_pile_up(monkeypatch):
    """Every loss that is defined anew is compiled anew, and nothing can use the old programs again."""
    monkeypatch.setattr(programs, "CAPACITY", 5)
    for center in range(8):
        result = blr.fit(
            blr.newton(), lambda x, c=center: jnp.sum(jnp.cosh(x - c)), jnp.zeros(2), steps=30, tolerance=1e-9
        )
        np.testing.assert_allclose(result.q.mean, center, atol=1e-6)
    assert len(programs._programs) <= 5


def test_memory_is_given_back_after_some_programs_were_dropped(monkeypatch):
    calls = []
    monkeypatch.setattr(programs, "CAPACITY", 2)
    monkeypatch.setattr(programs, "_TRIM_AFTER", 3)
    monkeypatch.setattr(programs, "_dropped", itertools.count(1))
    monkeypatch.setattr(programs, "_malloc_trim", lambda: calls.append)
    programs.release_programs()
    function = compiled(lambda x: x + 1)
    for size in range(1, 10):  # The last seven drop one each.
        function(np.ones(size))
    assert calls == [0, 0]
