"""What every recipe must satisfy, whoever wrote it: one test per property, over the list in tests/cases.py."""

import functools

import jax
import numpy as np
import pytest

import bayesrule as blr
from bayesrule import recipes
from bayesrule.fitting import checkpoint
from cases import RECIPES

RATE, OTHER_RATE = 0.1, 0.05


@functools.cache
def run(name):
    """Two steps and a third at another rate, by one compiled program.

    Returns the rule, the compiled step, how many programs it was compiled to by the three steps, the problem, and
    the states and infos from the start on. The programs are counted here, because the suite may release them
    between two tests.
    """
    case = RECIPES[name]
    problem = case.problem()
    step = jax.jit(lambda rule, state, data, key: rule.step(problem.objective, state, data, key))
    rule = case.make(RATE)
    states, infos = [jax.jit(lambda: rule.init(problem.start, problem.objective, **search_key(rule)))()], []
    for count, rule_of_step in enumerate((rule, rule, case.make(OTHER_RATE))):
        state, info = step(rule_of_step, states[-1], problem.data, jax.random.key(count))
        states.append(state)
        infos.append(info)
    return rule, step, step._cache_size(), problem, states, infos


def search_key(rule):
    """A search draws its start from a key."""
    return {"key": jax.random.key(9)} if rule.search is not None else {}


def numbers(tree):
    """The leaves as NumPy arrays, keys as their words."""
    words = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(words(leaf)) for leaf in jax.tree.leaves(tree)]


def equal(one, other):
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(numbers(one), numbers(other), strict=True))


def test_every_public_recipe_is_listed():
    assert set(RECIPES) == set(recipes.__all__) - {"Row", "table"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_moves_q_and_stays_inside(name):
    *_, states, infos = run(name)
    for before, after, info in zip(states, states[1:], infos, strict=False):
        assert info.finite
        assert info.inside
        assert after.count == before.count + 1
    assert not equal(states[0].q, states[1].q)


@pytest.mark.parametrize("name", RECIPES)
def test_neither_a_second_step_nor_another_rate_compiles_again(name):
    _, _, programs, *_ = run(name)
    assert programs == 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_a_function_of_its_arguments(name):
    """The same arguments give the same state to the last bit, and the state that was passed is as it was."""
    rule, step, _, problem, states, _ = run(name)
    before = jax.tree.map(lambda leaf: leaf.copy(), states[0])
    again, _ = step(rule, states[0], problem.data, jax.random.key(0))
    assert equal(again, states[1])
    assert equal(before, states[0])


@pytest.mark.parametrize("name", [name for name, case in RECIPES.items() if case.rated])
def test_a_batch_of_rates_is_a_batch_of_rules(name):
    """By shapes alone, which takes no compiling; the numbers are in tests/rule/test_rule.py."""
    *_, problem, states, _ = run(name)

    def stepped(rate):
        return RECIPES[name].make(rate).step(problem.objective, states[0], problem.data, jax.random.key(0))[0]

    many = jax.eval_shape(jax.vmap(stepped), jax.ShapeDtypeStruct((3,), float))
    shapes = [(3, *np.shape(leaf)) for leaf in numbers(states[1].q)]
    assert [leaf.shape for leaf in jax.tree.leaves(many.q)] == shapes


@pytest.mark.parametrize("name", RECIPES)
def test_its_state_comes_back_from_a_file(name, tmp_path):
    *_, states, _ = run(name)
    state = states[1]
    checkpoint.write(tmp_path / "state.npz", state)
    loaded = checkpoint.read(tmp_path / "state.npz", state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert equal(loaded, state)


@pytest.mark.parametrize("name", RECIPES)
def test_it_prints_a_derivation_whose_update_is_a_formula(name):
    lines = str(RECIPES[name].make(RATE)).splitlines()
    assert lines[0].startswith(name)
    assert "section" in lines[0]
    named = {line.split()[0] for line in lines[1:]}
    assert {"family", "points", "curvature", "steps", "guard", "update"} <= named
    update = next(line for line in lines if line.split()[0] == "update")
    assert "←" in update
    assert "relative to" not in update


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_a_value(name):
    rule = RECIPES[name].make(RATE)
    assert rule == RECIPES[name].make(RATE)
    assert hash(rule) == hash(RECIPES[name].make(RATE))
    assert (rule == RECIPES[name].make(OTHER_RATE)) != RECIPES[name].rated
    assert rule.replace(points=rule.points, curvature=rule.curvature) == rule
    assert rule.replace(guard=blr.Backtracking(3)) != rule
    assert rule.replace(guard=blr.Backtracking(3)).replace(guard=rule.guard) == rule
