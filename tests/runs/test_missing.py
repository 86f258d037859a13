"""Missing inputs: intervals and probabilities are as wide as what is missing makes them, whatever it is."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

import bayesrule as blr
from bayesrule.cli import app
from bayesrule.fitting.checkpoint import write
from bayesrule.metrics import ece, nll
from bayesrule.runs import store
from bayesrule.runs.preprocess import Preprocessing
from bayesrule.runs.redraw import redraw
from bayesrule.runs.train import PreparedRows, fit_rows, train
from bayesrule.tables.tables import Column, Table

WEIGHTS = np.array([2.0, 0.5, -1.0, 0.3])
UNITS, CENTER = np.array([1.0, 100.0, 0.01, 5.0]), 7.0
NAN = np.nan
PATTERNS = ((), (0,), (1,), (0, 2), (0, 1, 2, 3))


def standard_inputs(rng, rows, correlation):
    shared = rng.normal(size=(rows, 1))
    return np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * rng.normal(size=(rows, 4))


def remove(rng, x, mechanism):
    """30 % of the entries, at random; or a share that depends on the last column, which stays."""
    if mechanism == "complete":
        return x
    if mechanism == "completely at random":
        return np.where(rng.random(x.shape) < 0.3, NAN, x)
    probability = 1 / (1 + np.exp(1.2 - 2 * x[:, -1:]))
    return np.where((rng.random(x.shape) < probability) & (np.arange(4) < 3), NAN, x)


def without(x, columns):
    return np.where(np.isin(np.arange(x.shape[1]), columns), NAN, x)


def table(x, **targets):
    columns = {name: Column(name, numbers=CENTER + UNITS[place] * x[:, place]) for place, name in enumerate("abcd")}
    columns |= {name: Column(name, numbers=np.asarray(y, float)) for name, y in targets.items()}
    return Table(columns, "synthetic")


def fit(data, **config):
    return train(data, {"target": "y", "test_size": 0.05, "seed": 0, "params": {}, **config})


def coverages(rng, correlation, mechanism, model, rows=400):
    """The share of new y in their 90 % intervals, for each pattern of missing inputs."""

    def draw(count):
        x = standard_inputs(rng, count, correlation)
        return x, 1e4 * (3 + x @ WEIGHTS + 0.5 * rng.normal(size=count))

    x, y = draw(rows)
    run = fit(table(remove(rng, x, mechanism), y=y), model=model, task="regression")
    x, y = draw(4000)
    ahead = [run.predict(table(without(x, pattern))) for pattern in PATTERNS]
    return [np.mean((each["low"] <= y) & (y <= each["high"])) for each in ahead]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("correlation", "mechanism"),
    [(0.4, "complete"), (0.4, "completely at random"), (0.4, "at random"), (0.95, "completely at random")],
)
def test_intervals_hold_nine_tenths_whatever_is_missing(correlation, mechanism):
    """Within 4 points, over 4 training sets: their spread of about 2 points leaves a standard error of 1."""
    shares = [coverages(np.random.default_rng(seed), correlation, mechanism, "linear") for seed in range(4)]
    np.testing.assert_allclose(np.mean(shares, axis=0), 0.9, atol=0.04)


@pytest.mark.extended
@pytest.mark.parametrize("mechanism", ["complete", "completely at random", "at random"])
@pytest.mark.parametrize("model", ["mlp", "gp"])
def test_intervals_of_other_models_hold_nine_tenths(model, mechanism):
    shares = [coverages(np.random.default_rng(seed), 0.4, mechanism, model) for seed in range(3)]
    np.testing.assert_allclose(np.mean(shares, axis=0), 0.9, atol=0.04)


def true_missing_input(rng, x, correlation, draws):
    """Draws of the first input given the others, under the true distribution of `standard_inputs`."""
    covariance = correlation + (1 - correlation) * np.eye(4)
    gain = np.linalg.solve(covariance[1:, 1:], covariance[1:, 0])
    deviation = np.sqrt(1 - covariance[0, 1:] @ gain)
    repeated = np.repeat(x[:, None], draws, axis=1)
    repeated[:, :, 0] = (x[:, 1:] @ gain)[:, None] + deviation * rng.normal(size=(len(x), draws))
    return repeated


@pytest.mark.extended
@pytest.mark.parametrize("mechanism", ["complete", "completely at random"])
def test_probabilities_are_calibrated_without_an_important_input(mechanism):
    """Near those of the true model with the missing input integrated out; it explains most of the classes."""
    rng = np.random.default_rng(0)
    draw_labels = lambda x: (rng.random(len(x)) < 1 / (1 + np.exp(-2 * x @ WEIGHTS))).astype(int)
    x = standard_inputs(rng, 600, 0.4)
    run = fit(table(remove(rng, x, mechanism), y=draw_labels(x)))
    x = standard_inputs(rng, 2000, 0.4)
    labels = draw_labels(x)
    draws = true_missing_input(rng, x, 0.4, 500)
    best = {(): 1 / (1 + np.exp(-2 * x @ WEIGHTS)), (0,): (1 / (1 + np.exp(-2 * draws @ WEIGHTS))).mean(1)}
    for pattern, probability in best.items():
        found = run.predict(table(without(x, pattern)))["p(1)"]
        # 5 weights cost about 5/(2·600) nats; two sets of predictions differ by chance by less than 0.005.
        assert float(nll(found, labels)) < float(nll(probability, labels)) + 0.02
        # Of a calibrated model the error of 10 bins of 200 rows is about 0.025.
        assert float(ece(found, labels, bins=10)) < 0.045


@pytest.mark.extended
def test_counts_have_the_interval_of_the_mixture():
    rng = np.random.default_rng(0)
    rate = lambda x: np.exp(1.0 + 0.4 * x @ WEIGHTS)
    x = standard_inputs(rng, 500, 0.4)
    run = fit(table(remove(rng, x, "completely at random"), y=rng.poisson(rate(x))), task="counts", recipe="laplace")
    x = standard_inputs(rng, 600, 0.4)
    y = rng.poisson(rate(x))
    true_counts = rng.poisson(rate(true_missing_input(rng, x, 0.4, 400)))
    low, high = np.quantile(true_counts, [0.05, 0.95], axis=1, method="inverted_cdf")
    ahead = run.predict(table(without(x, (0,))))
    share = np.mean((ahead["low"] <= y) & (y <= ahead["high"]))
    assert share == pytest.approx(np.mean((low <= y) & (y <= high)), abs=0.04)
    assert np.all(ahead["low"] == np.round(ahead["low"]))
    np.testing.assert_allclose(np.median(ahead["std"] / true_counts.std(1)), 1.0, atol=0.15)


@pytest.mark.extended
def test_complete_rows_are_predicted_as_before():
    """A row's prediction depends on its own inputs only, and that of a complete row is the estimator's."""
    rng = np.random.default_rng(0)
    x = standard_inputs(rng, 200, 0.4)
    run = fit(table(x, y=x @ WEIGHTS + rng.normal(size=200)))
    rows = np.where(np.arange(200)[:, None] % 2, x, without(x, (1, 2)))
    ahead = run.predict(table(rows))
    mean, std = run.estimator.predict(run.encoding.encoding.matrix(table(x)), return_std=True)
    np.testing.assert_allclose(ahead["prediction"][1::2], mean[1::2], rtol=1e-12)
    np.testing.assert_allclose(ahead["std"][1::2], std[1::2], rtol=1e-12)
    assert np.all(ahead["std"][::2] > 1.2 * std[::2])
    alone = run.predict(table(rows[6:7]))
    np.testing.assert_allclose(alone["high"], ahead["high"][6:7], rtol=1e-10)


def test_a_category_that_was_never_missing_is_drawn():
    """With its probability given the number beside it; a number that is missing too is drawn given the level."""
    rng = np.random.default_rng(0)
    place = rng.normal(size=1000)
    rome = rng.random(1000) < np.where(place > 0, 0.8, 0.2)
    y = 4.0 * rome + 0.5 * rng.normal(size=1000)
    build = lambda place, city: Table(
        {"place": Column("place", numbers=np.asarray(place, float)), "city": Column.of_text("city", city)}, "synthetic"
    )
    data = build(place, np.where(rome, "Rome", "Bern").tolist())
    data.columns["y"] = Column("y", numbers=y)
    run = fit(data, task="regression")
    ahead = run.predict(build([0.8, -0.8, NAN, 0.0], [None, None, None, "Rome"]))
    # E[Rome | place] by the linear regression that a Gaussian is.
    slope, middle = np.polyfit(place, rome, 1)
    share = np.append(middle + slope * np.array([0.8, -0.8]), rome.mean())
    np.testing.assert_allclose(ahead["prediction"][:3], 4 * share, atol=4 / 32 + 0.15)
    np.testing.assert_allclose(ahead["std"][:3], np.sqrt(16 * share * (1 - share) + 0.25), rtol=0.1)
    assert ahead["std"][3] == pytest.approx(0.5, rel=0.1)
    assert run.missing(build([NAN, NAN], [None, "Rome"])) == 3


@pytest.mark.extended
def test_rows_with_missing_inputs_are_explained_as_rows():
    """Once each; and what is said of a row without it does not know its target, though the fitted draws do."""
    rng = np.random.default_rng(0)
    x = standard_inputs(rng, 600, 0.4)
    y = x @ WEIGHTS + 0.5 * rng.normal(size=600)
    holes = np.where((np.arange(600)[:, None] % 3 == 0) & (np.arange(4) == 0), NAN, x)
    run = fit(table(holes, y=y))
    row = run.influence["row"]
    assert len(np.unique(row)) == len(row) == 570
    np.testing.assert_allclose(run.influence["y"], y[row])
    assert {len(values) for values in run.test.values()} == {30}
    lacks = row % 3 == 0
    density = run.influence["log_density"]
    # What the first input adds to the variance of the noise, given the others.
    added = WEIGHTS[0] ** 2 * np.var(true_missing_input(rng, x[:1], 0.4, 20_000)[0, :, 0])
    for chosen, variance in ((lacks, 0.25 + added), (~lacks, 0.25)):
        expected = -0.5 * np.log(2 * np.pi * np.e * variance)
        assert density[chosen].mean() == pytest.approx(expected, abs=4 * np.sqrt(0.5 / chosen.sum()) + 0.02)
    assert np.isfinite(run.influence["influence"]).all()


def test_earlier_runs_draw_too(tmp_path):
    """Their preprocessing is a factor analysis, or nothing where training rows were complete."""
    rng = np.random.default_rng(0)
    x = standard_inputs(rng, 200, 0.4)
    run = fit(table(x, y=x @ WEIGHTS + rng.normal(size=200)))
    folder = tmp_path / "run"
    store.save(run, folder)
    attributes = {"mean_": np.zeros(4), "components_": np.full((1, 4), 0.6), "noise_variance_": np.full(4, 0.64)}
    holes = table(without(x, (0,)))
    filled = run.encoding.encoding.matrix(holes)
    filled[:, 0] = filled[:, 1:].sum(1) * 0.36 / (0.64 + 3 * 0.36)  # what `FactorAnalysis.fill` makes of it
    write(folder / "filling.npz", {"params": {}, "attributes": attributes})
    store.write_manifest(folder)
    ahead = blr.load(folder).predict(holes)
    mean, std = run.estimator.predict(filled, return_std=True)
    np.testing.assert_allclose(ahead["prediction"], mean, rtol=1e-9)
    assert np.all(ahead["std"] > 1.2 * std)
    (folder / "filling.npz").unlink()
    store.write_manifest(folder)
    ahead = blr.load(folder).predict(holes)
    encoded = np.nan_to_num(run.encoding.encoding.matrix(holes))
    np.testing.assert_allclose(ahead["prediction"], run.estimator.predict(encoded), rtol=1e-9)


@pytest.mark.extended
def test_the_command_line_says_what_it_does(tmp_path):
    rng = np.random.default_rng(0)
    x = standard_inputs(rng, 60, 0.4)
    holes = x.copy()
    holes[:7, 0] = NAN
    columns = np.column_stack([holes, x @ WEIGHTS])
    text = "\n".join(",".join("" if np.isnan(value) else f"{value:.6f}" for value in row) for row in columns)
    (tmp_path / "data.csv").write_text("a,b,c,d,y\n" + text + "\n")
    result = CliRunner().invoke(app, ["fit", str(tmp_path / "data.csv"), "-o", str(tmp_path / "run")])
    sentence = "missing values are drawn from their distribution given the rest of the row"
    assert f"7 {sentence}" in result.output
    assert f"7 {sentence}" in (tmp_path / "run" / "report.html").read_text()
    shown = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(tmp_path / "data.csv")])
    assert f"note: 7 {sentence}" in shown.stderr
    assert len(shown.stdout.splitlines()) == 61


def test_inputs_are_drawn_again_under_the_fitted_model():
    """y = x₀² says nothing to a Gaussian; a model that knows it chooses draws of either sign with squares near y."""
    rng = np.random.default_rng(0)
    x = standard_inputs(rng, 900, 0.0)
    y = x[:, 0] ** 2
    data = table(without(x, (0,))[:300]), table(x[300:])
    columns = [np.concatenate([data[0].columns[name].numbers, data[1].columns[name].numbers]) for name in "abcd"]
    rows = Table(
        {name: Column(name, numbers=values) for name, values in zip("abcd", columns, strict=True)}, "synthetic"
    )
    preprocessing, training = Preprocessing.fit(rows, list("abcd"), y[:, None], 0, 4)
    model = SimpleNamespace(predict=lambda x, return_std: (x[:, 0] ** 2, np.full(len(x), 0.3)))
    redrawn = redraw(model, training, preprocessing.inputs(rows), y, 0)
    lacks = training.row < 300
    np.testing.assert_array_equal(redrawn.x[~lacks], training.x[~lacks])
    np.testing.assert_array_equal(redrawn.x[:, 1:], training.x[:, 1:])
    # Beyond 2 the quantiles of 32 draws are further apart than 0.3 in the square.
    near = lacks & (y[training.row] < 2)
    error = lambda rows: np.median(np.abs(rows.x[near, 0] ** 2 - y[training.row[near]]))
    assert error(redrawn) < 0.25 < 0.4 < error(training)
    assert np.mean(redrawn.x[near, 0] > 0) == pytest.approx(0.5, abs=0.15)
    labels = (np.abs(x[:, 0]) > 1).astype(int)
    sure = lambda x: np.eye(2)[(np.abs(x[:, 0]) > 1).astype(int)]
    redrawn = redraw(SimpleNamespace(predict_proba=sure), training, preprocessing.inputs(rows), labels, 0)
    np.testing.assert_array_equal(np.abs(redrawn.x[lacks, 0]) > 1, labels[training.row[lacks]])


def test_an_interval_has_the_moments_of_the_mixture_of_a_linear_model():
    """The draws of a missing input have its exact mean and variance, so that the prediction is in closed form."""
    rng = np.random.default_rng(0)
    x = standard_inputs(rng, 200, 0.4)
    run = fit(table(x, y=x @ WEIGHTS + rng.normal(size=200)))
    holes = table(without(x[:5], (0, 3)))
    inputs = run.encoding.inputs(holes)
    ((_, draws),) = inputs.draws()
    variance = np.array([np.cov(each.T, bias=True) for each in draws])
    posterior, noise = run.estimator.posterior_, run.estimator.noise_
    covariance = np.asarray(posterior.covariance())
    mean, weights = run.estimator.predict(inputs.filled), run.estimator.coef_
    centered = np.column_stack([np.ones(5), inputs.filled - run.estimator.x_mean_])
    about_mean = np.einsum("ni,ij,nj->n", centered, covariance, centered)
    # Var wᵀx = E[w]ᵀVE[w] + tr(V Cov w) beside the variance at the mean, for w independent of x with covariance V.
    spread = np.einsum("nij,i,j->n", variance, weights, weights) + np.einsum("nij,ij->n", variance, covariance[1:, 1:])
    ahead = run.predict(holes)
    np.testing.assert_allclose(ahead["prediction"], mean, rtol=1e-9)
    np.testing.assert_allclose(ahead["std"], np.sqrt(noise + about_mean + spread), rtol=1e-9)
    np.testing.assert_allclose(
        ahead["high"],
        stats.t.ppf(0.95, run.estimator.degrees_of_freedom_, ahead["prediction"], ahead["std"]),
        rtol=1e-9,
    )


@pytest.mark.parametrize("missing", [True, False])
def test_a_model_that_asks_for_it_is_fitted_again_to_new_draws(missing):
    rng = np.random.default_rng(0)
    x = standard_inputs(rng, 60, 0.5)
    y = x[:, 0] + 0.1 * rng.normal(size=60)
    rows = table(np.concatenate([without(x[:20], (0,)), x[20:]]) if missing else x)
    preprocessing, training = Preprocessing.fit(rows, list("abcd"), y[:, None], 0, 4)
    fitted = []
    model = SimpleNamespace(
        refits_with_missing_inputs=2,
        fit=lambda x, y, **weights: fitted.append(np.array(x)),
        predict=lambda x, return_std: (x[:, 0], np.full(len(x), 0.1)),
    )
    prepared = PreparedRows(model, preprocessing, training, preprocessing.inputs(rows), y)
    fit_rows(prepared, {"seed": 0, "params": {}})
    assert len(fitted) == (3 if missing else 1)
    assert np.array_equal(prepared.training.x, fitted[-1])
    assert not missing or not np.array_equal(fitted[0], fitted[-1])
