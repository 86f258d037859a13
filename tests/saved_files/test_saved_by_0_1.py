"""What the code of 16 November 2026 saved, before its modules moved: files name classes by their public names."""

import csv
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import bayesrule as blr

SAVED = Path(__file__).parent / "saved_by_0_1"
EXPECTED = json.loads((SAVED / "expected.json").read_text(encoding="utf-8"))


def rows():
    with (SAVED / "rows.csv").open(encoding="utf-8") as file:
        table = np.array([[float(x) for x in row] for row in list(csv.reader(file))[1:]])
    return jnp.asarray(table[:, :2]), jnp.asarray(table[:, 2])


def logistic(w, example):
    x, y = example
    return jnp.logaddexp(0.0, -y * (x @ w))


def test_a_result_of_an_earlier_layout_loads():
    result = blr.load(SAVED / "laplace.npz")
    assert isinstance(result.q, blr.Gaussian)
    assert result.reason == EXPECTED["laplace"]["reason"]
    assert result.bound == EXPECTED["laplace"]["bound"]
    np.testing.assert_array_equal(result.q.mean, EXPECTED["laplace"]["mean"])


def test_a_model_of_an_earlier_layout_loads():
    result = blr.load(SAVED / "vmp.npz")
    np.testing.assert_array_equal(result.q["w"].mean, EXPECTED["vmp"]["mean"])
    assert result.bound == EXPECTED["vmp"]["bound"]


def test_a_chain_of_an_earlier_layout_loads_with_its_renamed_fields():
    result, expected = blr.load(SAVED / "gaussian_chain.npz"), EXPECTED["gaussian_chain"]
    q = result.q["f"]
    assert result.bound == expected["bound"]
    np.testing.assert_array_equal(q.mean, expected["mean"])
    np.testing.assert_array_equal(q.variance, expected["variance"])
    np.testing.assert_array_equal(q.spread, expected["variance"])
    again = q.with_natural(q.natural())
    np.testing.assert_allclose(again.states()[1], q.states()[1], rtol=1e-10)


def test_a_checkpoint_of_an_earlier_layout_goes_on_as_it_would_have():
    half = blr.load(SAVED / "vogn_checkpoint.npz")
    assert half.steps == EXPECTED["vogn_checkpoint"]["steps"]
    objective = blr.Objective(logistic, size=24, regularizer=1.0)
    rule = blr.vogn(0.1, decay=0.999, curvature=1.0)  # the defaults of that time
    resumed = blr.fit(rule, objective, half, rows(), steps=10, batch_size=8)
    np.testing.assert_allclose(resumed.q.mean, EXPECTED["vogn_checkpoint"]["mean_after_20"], rtol=1e-12)


def test_a_search_of_an_earlier_layout_goes_on():
    half = blr.load(SAVED / "search_checkpoint.npz")
    himmelblau = lambda x: (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2
    rule = blr.multimodal(0.8, components=6, bounds=(jnp.full(2, -6.0), jnp.full(2, 6.0)))
    minima = blr.fit(rule, himmelblau, half, steps=25).minima()
    positions = sorted(np.asarray(one.position).tolist() for one in minima)
    np.testing.assert_allclose(positions, sorted(EXPECTED["search_checkpoint"]["positions_after_40"]), atol=1e-7)


def test_a_run_of_an_earlier_layout_predicts_what_it_did():
    with (SAVED / "run_predictions.csv").open(encoding="utf-8") as file:
        expected = [float(row["p(1)"]) for row in csv.DictReader(file)]
    predicted = blr.load(SAVED / "run").predict(SAVED / "rows.csv")
    np.testing.assert_allclose(predicted["p(1)"][: len(expected)], expected, rtol=1e-5)  # printed to six digits
