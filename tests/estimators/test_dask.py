"""Estimators on Dask collections equal those on arrays, for any partitioning."""

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

from bayesrule.estimators import (
    PPCA,
    FactorAnalysis,
    GaussianMixture,
    LatentDirichletAllocation,
    LogisticRegression,
    PoissonRegression,
    RidgeRegression,
)

RANDOM = np.random.default_rng(5)
ROWS = 200
X = RANDOM.normal(size=(ROWS, 3)) * [1.0, 2.0, 0.1] + 5.0
F = (X - 5.0) @ [1.0, -0.4, 5.0]
NOISY = F + RANDOM.normal(size=ROWS)
LABELS = np.where(RANDOM.uniform(size=ROWS) < 1 / (1 + np.exp(-F)), "yes", "no")
THREE = np.array(["a", "b", "c"])[np.clip(np.round(F + RANDOM.normal(size=ROWS)), -1, 1).astype(int) + 1]
COUNTS = RANDOM.poisson(np.exp(0.3 * F)).astype(float)
WEIGHTS = RANDOM.uniform(0.0, 2.0, ROWS)
CUTS = {"one": (ROWS,), "even": (50,) * 4, "uneven with empty ones": (0, 7, 0, 150, 43, 0)}
UNEVEN = CUTS["uneven with empty ones"]


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def on_dask(array, cuts=UNEVEN):
    return da.from_array(array, chunks=(cuts, *array.shape[1:]))


def same(one, other, *names, tolerance=1e-9):
    for name in names:
        expected = np.asarray(getattr(one, name), float)
        scale = max(float(np.max(np.abs(expected))), 1e-300)
        np.testing.assert_allclose(np.asarray(getattr(other, name)), expected, rtol=0, atol=tolerance * scale)


def same_posterior(one, other):
    same(one, other, "coef_", "intercept_", "prior_precision_")
    expected = np.asarray(one.posterior_.covariance())
    np.testing.assert_allclose(np.asarray(other.posterior_.covariance()), expected, rtol=0, atol=1e-9 * expected.max())


@pytest.mark.sampled(
    "one-100000000.0",
    "even-0.0",
    "even-100000000.0",
    "uneven with empty ones-0.0",
    "uneven with empty ones-100000000.0",
)
@pytest.mark.parametrize("offset", [0.0, 1e8])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_ridge_takes_one_pass(cuts, offset, monkeypatch):
    passes = []
    compute = dask.base.compute
    monkeypatch.setattr(dask.base, "compute", lambda *args: passes.append(args) or compute(*args))
    x, y = X + offset, NOISY + offset
    here = RidgeRegression().fit(x, y, WEIGHTS)
    there = RidgeRegression().fit(on_dask(x, cuts), on_dask(y, (100, 100)), on_dask(WEIGHTS, cuts))
    same_posterior(here, there)
    same(here, there, "noise_", "log_evidence_")
    assert len(passes) == 1


def test_frames_of_unknown_lengths():
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "y": NOISY, "w": WEIGHTS})
    table = dd.from_pandas(frame, npartitions=3)
    frame, table = frame[frame.a > 5.2], table[table.a > 5.2]
    here = RidgeRegression().fit(frame[["a", "b", "c"]], frame["y"], frame["w"])
    there = RidgeRegression().fit(table[["a", "b", "c"]], table["y"], table["w"])
    same_posterior(here, there)
    assert there.feature_names_in_.tolist() == ["a", "b", "c"]
    lazy = there.predict(table[["a", "b", "c"]], return_std=True)
    for part, expected in zip(lazy, here.predict(frame[["a", "b", "c"]], return_std=True), strict=True):
        assert isinstance(part, da.Array)
        np.testing.assert_allclose(part.compute(), expected, rtol=1e-9)
    with pytest.raises(ValueError, match="feature names should match"):
        there.predict(table[["b", "a", "c"]])


LINEAR = {
    "logistic": (LogisticRegression(), LABELS),
    "logistic, Laplace, balanced": (LogisticRegression(recipe="laplace", class_weight="balanced"), LABELS),
    "three classes": (LogisticRegression(recipe="laplace"), THREE),
    "three classes, by points": (LogisticRegression(prior_precision=1.0), THREE),
    "Poisson": (PoissonRegression(), COUNTS),
}
LONG = ("logistic", "three classes, by points", "three classes")


@pytest.mark.extended
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.extended] if n in LONG else []) for n in LINEAR])
def test_linear_models(name):
    """α by the evidence, the posterior and the bound; bounds at random points agree within their errors."""
    model, y = LINEAR[name]
    here = type(model)(**model.get_params()).fit(X, y, WEIGHTS)
    there = type(model)(**model.get_params()).fit(on_dask(X), on_dask(y), on_dask(WEIGHTS))
    same_posterior(here, there)
    if "points" in name:
        rounding = 1e-12 * abs(here.bound_)
        assert abs(there.bound_ - here.bound_) < 5 * np.hypot(here.bound_error_, there.bound_error_) + rounding
    else:
        same(here, there, "bound_")
    assert there.n_iter_ == here.n_iter_
    if name == "logistic, Laplace, balanced":
        for method in ("predict_proba", "decision_function"):
            lazy = getattr(there, method)(on_dask(X))
            assert isinstance(lazy, da.Array)
            np.testing.assert_allclose(lazy.compute(), getattr(here, method)(X), rtol=1e-8)
        assert there.predict(on_dask(X)).compute().tolist() == here.predict(X).tolist()


def test_more_rows_by_partial_fit():
    here, there = (LogisticRegression(recipe="laplace", prior_precision=1.0) for _ in range(2))
    here.fit(X[:100], LABELS[:100]).partial_fit(X[100:], LABELS[100:])
    there.fit(X[:100], LABELS[:100]).partial_fit(on_dask(X[100:], (30, 70)), on_dask(LABELS[100:], (30, 70)))
    same(here, there, "coef_", "bound_")


CLUSTERED = np.concatenate([RANDOM.normal(m, 1.0, (70, 2)) for m in (0.0, 2.0, 5.0)])
FACTORS = RANDOM.normal(size=(180, 1)) * [1.0, 2.0, -1.0] + 0.3 * RANDOM.normal(size=(180, 3)) + 1e3
MISSING = np.where(RANDOM.uniform(size=FACTORS.shape) < 0.1, np.nan, FACTORS)
DOCUMENTS = RANDOM.poisson(RANDOM.gamma(0.4, size=(60, 12))).astype(float)
MIXTURE = ("weights_", "means_", "covariances_", "bound_", "lower_bounds_")
LATENT = ("components_", "noise_variance_", "mean_")
STEPS = {"max_iter": 4, "tol": 0.0, "random_state": 0}
TOPICS = LatentDirichletAllocation(3, mean_change_tol=0.0, max_doc_update_iter=15, **STEPS)
STEPPED = {
    "EM": (GaussianMixture(3, **STEPS), CLUSTERED, MIXTURE),
    "mixture by messages": (GaussianMixture(3, method="vmp", **STEPS), CLUSTERED, MIXTURE),
    "diagonal": (GaussianMixture(3, method="vmp", covariance_type="diag", **STEPS), CLUSTERED, MIXTURE),
    "factor analysis": (FactorAnalysis(1, **STEPS), FACTORS, (*LATENT, "bound_", "loglike_")),
    "PPCA": (PPCA(1, method="vmp", **STEPS), FACTORS, (*LATENT, "bound_", "loglike_")),
    "missing values": (FactorAnalysis(1, **STEPS), MISSING, (*LATENT, "bound_")),
    "missing values by messages": (FactorAnalysis(1, method="vmp", **STEPS), MISSING, LATENT),
    "topics": (TOPICS, DOCUMENTS, ("components_",)),
}
SLOW = ("mixture by messages", "diagonal", "PPCA", "missing values by messages")


@pytest.mark.sampled("factor analysis", "topics")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.extended] if n in SLOW else []) for n in STEPPED])
def test_the_same_steps_from_the_same_start(name):
    model, rows, names = STEPPED[name]
    cuts = (0, 7, 0, len(rows) - 40, 33, 0)
    here = type(model)(**model.get_params()).fit(rows)
    there = type(model)(**model.get_params()).fit(on_dask(rows, cuts))
    assert here.n_iter_ == there.n_iter_ == 4
    same(here, there, *names)
    method = "predict_proba" if hasattr(model, "predict_proba") else "transform"
    lazy = getattr(there, method)(on_dask(rows, cuts))
    assert isinstance(lazy, da.Array)
    np.testing.assert_allclose(lazy.compute(), getattr(here, method)(rows), rtol=1e-3 if name == "topics" else 1e-8)


CONVERGED = {
    "EM": (GaussianMixture(3, random_state=0), CLUSTERED),
    "mixture by messages": (GaussianMixture(3, method="vmp", random_state=0), CLUSTERED),
    "missing values by messages": (FactorAnalysis(1, method="vmp", tol=1e-7), MISSING),
    "topics": (
        LatentDirichletAllocation(2, tol=1e-8, max_iter=2000, mean_change_tol=1e-9, random_state=0),
        DOCUMENTS,
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", CONVERGED)
def test_bounds_at_convergence(name):
    model, rows = CONVERGED[name]
    here = type(model)(**model.get_params()).fit(rows)
    there = type(model)(**model.get_params()).fit(on_dask(rows, (20, len(rows) - 20)))
    assert here.converged_
    assert there.converged_
    assert abs(here.bound_ - there.bound_) / len(rows) < 1e-6


@pytest.mark.extended
def test_a_start_from_many_rows(monkeypatch):
    """Of many rows in parts a start is computed from a sample, the same every time; priors are those of all rows."""
    from bayesrule.estimators import factor_analysis, training_rows

    monkeypatch.setattr(training_rows, "START_ROWS", 60)
    monkeypatch.setattr(factor_analysis, "START_ROWS", 60)
    rows = on_dask(CLUSTERED, (100, 110))
    fits = [GaussianMixture(3, random_state=0).fit(rows) for _ in range(2)]
    np.testing.assert_array_equal(fits[0].means_, fits[1].means_)
    here = GaussianMixture(3, random_state=0).fit(CLUSTERED)
    assert abs(fits[0].bound_ - here.bound_) / len(CLUSTERED) < 1e-3
    # Complete rows start from their second moments, however many they are.
    here, there = FactorAnalysis(1).fit(FACTORS), FactorAnalysis(1).fit(on_dask(FACTORS, (100, 80)))
    np.testing.assert_allclose(np.abs(there.components_), np.abs(here.components_), rtol=1e-9)


def test_what_cannot_work_says_so():
    x, y = on_dask(X), on_dask(LABELS)
    with pytest.raises(ValueError, match="batch_size= asks for rows drawn at random"):
        LogisticRegression(batch_size=10).fit(x, y)
    with pytest.raises(ValueError, match="take method='vmp'"):
        GaussianMixture(2, method="svi", batch_size=50).fit(x)
    with pytest.raises(ValueError, match="looks at all data between its steps"):
        LogisticRegression(recipe="mean_field", prior_precision=1.0).fit(x, y)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        RidgeRegression().fit(da.where(x > 6, np.nan, x), on_dask(F))
    with pytest.raises(ValueError, match="at least two classes"):
        LogisticRegression().fit(x, da.zeros_like(on_dask(F)))
    with pytest.raises(ValueError, match="counts are not negative"):
        PoissonRegression().fit(x, on_dask(COUNTS - 1))
    with pytest.raises(ValueError, match="none of a weight above 0"):
        RidgeRegression().fit(x, on_dask(F), on_dask(0 * WEIGHTS))
    with pytest.raises(ValueError, match="weight 0"):
        LogisticRegression().fit(x, y, on_dask(0 * WEIGHTS))
