"""Unfinished fits as `State` of twelve fields wrote them go on to the end that they would have had; finished ones load.

A killed process has left each: its last checkpoint, and of two the one before it.
"""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

import bayesrule as blr
from saved_files.fits import FITS, course, verdict

PLACE = Path(__file__).parent / "twelve_fields"
EXPECTED = json.loads((PLACE / "expected.json").read_text(encoding="utf-8"))["fits"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the files as they were written."""
    folder = tmp_path_factory.mktemp("saved")
    with zipfile.ZipFile(PLACE / "files.zip") as archive:
        archive.extractall(folder)
    return folder / "fits"


def assert_near(actual, expected, tolerance):
    """Two trees of numbers and of words, the second of lists."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if isinstance(value, dict):
            assert_near(value, expected[name], tolerance)
        elif value is None or isinstance(value, str):
            assert value == expected[name]
        else:
            np.testing.assert_allclose(value, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", FITS)
def test_a_finished_fit_is_what_was_saved(saved, name):
    result = blr.load(saved / f"{name}, finished.npz")
    assert_near({**course(result), **verdict(result)}, EXPECTED[name], 0.0)


@pytest.mark.parametrize("name", FITS)
def test_an_unfinished_fit_goes_on_to_its_end(saved, name):
    fit = FITS[name]
    half = blr.Checkpoint(saved / f"{name}.npz").load()
    assert half.steps == fit.cut
    assert half.reason == "steps"
    found = course(fit.run(half, fit.steps - half.steps))
    found["objective"] = np.concatenate([half.trace["objective"], found["objective"]])
    assert_near(found, {key: EXPECTED[name][key] for key in found}, 1e-9)
