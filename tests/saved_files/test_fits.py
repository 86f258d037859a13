"""Unfinished fits as `State` of twelve fields wrote them go on to the end that they would have had; finished ones load.

A killed process has left each: its last checkpoint, and of two the one before it.
"""

import numpy as np
import pytest

import bayesrule as blr
from saved_files.expected import EXPECTED, assert_near
from saved_files.fits import FITS, course, verdict


@pytest.mark.parametrize("name", FITS)
def test_a_finished_fit_is_what_was_saved(saved, name):
    result = blr.load(saved / "fits" / f"{name}, finished.npz")
    assert_near({**course(result), **verdict(result)}, EXPECTED["fits"][name], 0.0)


@pytest.mark.parametrize("name", FITS)
def test_an_unfinished_fit_goes_on_to_its_end(saved, name):
    fit = FITS[name]
    half = blr.Checkpoint(saved / "fits" / f"{name}.npz").load()
    assert half.steps == fit.cut
    assert half.reason == "steps"
    found = course(fit.run(half, fit.steps - half.steps))
    found["objective"] = np.concatenate([half.trace["objective"], found["objective"]])
    assert_near(found, {key: EXPECTED["fits"][name][key] for key in found}, 1e-12)
