"""States as `State` of twelve fields wrote them: each is what it was, and its rule goes on from it as it would have.

After further steps numbers are compared to 10⁻¹²: with another version of XLA, or without its optimiser, a step is
another program, which rounds differently.
"""

import dataclasses
import json

import numpy as np
import pytest

import bayesrule as blr
from bayesrule.fitting import checkpoint
from cases import RECIPES, public_subclasses
from saved_files.expected import EXPECTED, assert_near
from saved_files.kinds import FURTHER, KINDS, advanced, numbers
from saved_files.posteriors import POSTERIORS

FIELDS = [
    *("q", "count", "previous", "average", "aux", "scale", "search", "history", "averaged", "unit", "shaped"),
    "horizon",
]

YOUNGER = {"vadam", "SecondMomentGaussian"}  # Recipes and families that came after these files.


def load(saved, name):
    return blr.load(saved / "states" / f"{name}.npz", KINDS[name].like())


def test_every_recipe_has_a_file():
    assert {name.split(",")[0] for name in KINDS} >= set(RECIPES) - YOUNGER
    assert EXPECTED["states"].keys() == KINDS.keys()


def test_every_field_of_that_layout_is_in_a_file(saved):
    """The fields that are not None, as the files themselves name them."""
    found = {}
    for name in KINDS:
        with np.load(saved / "states" / f"{name}.npz") as file:
            description = json.loads(str(file["header"]))["value"]["dict"][0][1]
        assert description["class"] == "State"
        assert [field for field, _ in description["fields"]] == FIELDS
        found[name] = [field for field, value in description["fields"] if value != {"plain": None}]
        assert found[name] == EXPECTED["states"][name]["fields"]
    assert set().union(*found.values()) == set(FIELDS)


def test_every_field_of_a_state_comes_from_a_file(saved):
    """Whatever the layout is today, no part of it is left without an old file that fills it."""
    fields, states = {field.name for field in dataclasses.fields(blr.State)}, [load(saved, name) for name in KINDS]
    assert {name for name in fields if any(getattr(state, name) is not None for state in states)} == fields


@pytest.mark.parametrize("name", KINDS)
def test_a_state_is_what_was_saved(saved, name):
    state, expected = load(saved, name), EXPECTED["states"][name]
    assert type(state) is blr.State
    assert type(state.q).__name__ == expected["class"]
    assert int(state.count) == expected["count"]
    assert_near(numbers(state.q), expected["q"], 0.0)


def kinds_to_advance():
    """Rules whose next steps depend on more than q and the count; others go on from any q in tests of their own.

    (Steps on all rows replace all sites, and so depend on none.)
    """
    for name, expected in EXPECTED["states"].items():
        plain = expected["fields"] == ["q", "count"] or name == "cvi, sites"
        yield pytest.param(name, marks=pytest.mark.extended) if plain else name


@pytest.mark.parametrize("name", list(kinds_to_advance()))
def test_a_rule_goes_on_from_a_saved_state(saved, name):
    state, expected = load(saved, name), EXPECTED["states"][name]
    after, objective = advanced(KINDS[name], state, FURTHER)
    assert int(after.count) == expected["count"] + FURTHER
    # Of bfloat16 and float32 the steps are rounded to their precision, and then the mean once more.
    tolerance = 1e-2 if "bfloat16" in name else 1e-5 if "float32" in name else 1e-12
    np.testing.assert_allclose(objective, expected["objective"], rtol=tolerance)
    assert_near(numbers(after.q), expected["after"], tolerance)


def test_every_family_is_in_a_file():
    named = {name.split(",")[0] for name in POSTERIORS}
    # Peak is another name of PointMass.
    assert named >= public_subclasses(blr.Family) - {"ExponentialFamily", "Peak"} - YOUNGER
    assert named >= {name for name in checkpoint._OTHERS if name.endswith(("Wishart", "Gamma"))}


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_posterior_is_what_was_saved(posteriors, name):
    q, own = posteriors[name], POSTERIORS[name]()
    assert type(q) is type(own)
    assert_near(numbers(q), EXPECTED["posteriors"][name], 0.0)


@pytest.fixture(scope="module")
def posteriors(saved):
    return blr.load(saved / "posteriors" / "posteriors.npz")
