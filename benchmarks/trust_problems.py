"""Random problems for `trust.py`: a seed makes the data, the prior and the settings of one fit. NumPy only.

A problem belongs to a program: one recipe on one kind of model and one shape of data, so that all problems of a program
share what XLA compiles. Everything else is drawn from the seed and varies over the ranges in which users work: how far
apart the prior's standard deviation lies from 1, how ill-conditioned, collinear, shifted or badly scaled the columns
are, whether classes can be separated, how large counts are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

CLASSES = 3  # of a softmax
DOF = 4.0  # of Student's t; its scale is 1
COMPONENTS = 2  # of a mixture
LATENT = 2  # latent variables of PPCA

# (N, P). A Gaussian process has one input, a chain two states.
ONE, FEW, WIDE, SOME, MANY = (1, 2), (8, 3), (30, 10), (200, 4), (2000, 6)
POINT, CURVE, LONG_CURVE = (1, 1), (20, 1), (120, 1)
STEP, CHAIN, LONG_CHAIN = ONE, (100, 2), (400, 2)


class Program(NamedTuple):
    """What is compiled once: a recipe, a kind of model, and a shape."""

    recipe: str
    kind: str
    shape: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.recipe} {self.kind} {self.shape[0]}x{self.shape[1]}"


def _programs() -> list[Program]:
    """All programs, in turns over the recipes, so that a first part of the list has some of each."""
    by_recipe: dict[str, list[tuple[str, list[tuple[int, int]]]]] = {
        "laplace": [
            ("logistic", [SOME, WIDE, ONE]),
            ("ridge", [MANY, WIDE]),
            ("poisson", [FEW, MANY]),
            ("student", [SOME, FEW]),
            ("softmax", [FEW, SOME]),
        ],
        "cvi": [
            ("gp counts", [CURVE, LONG_CURVE]),
            ("poisson", [SOME, WIDE, ONE]),
            ("logistic", [FEW, MANY]),
            ("probit", [SOME, FEW, ONE]),
            ("student", [WIDE, SOME]),
            ("softmax", [FEW, SOME]),
            ("gp classes", [POINT, CURVE]),
            ("gp classes, Laplace", [CURVE, LONG_CURVE]),
            ("gp counts, Laplace", [POINT, CURVE]),
            ("gp student", [CURVE]),
            ("chain counts", [CHAIN, STEP, LONG_CHAIN]),
            ("chain counts, Laplace", [CHAIN]),
            ("chain student", [CHAIN]),
        ],
        "cvi, sites": [
            ("poisson", [SOME, FEW, MANY]),
            ("logistic", [SOME, ONE, WIDE]),
            ("student", [SOME]),
            ("softmax", [FEW]),
            ("ridge", [WIDE]),
            ("probit", [WIDE]),
        ],
        "ncvmp": [
            ("chain counts", [CHAIN]),
            ("poisson", [SOME, WIDE]),
            ("logistic", [SOME, FEW]),
            ("student", [FEW, SOME]),
            ("softmax", [FEW]),
            ("gp counts", [CURVE]),
        ],
        "newton": [
            ("poisson", [SOME, ONE]),
            ("logistic", [MANY, FEW]),
            ("ridge", [FEW]),
            ("student", [WIDE]),
            ("softmax", [FEW]),
        ],
        "von, quadrature": [
            ("logistic", [SOME, WIDE, ONE]),
            ("poisson", [FEW, SOME]),
            ("ridge", [WIDE]),
            ("student", [SOME]),
            ("softmax", [FEW]),
        ],
        "em": [("mixture", [SOME]), ("ridge, noise unknown", [SOME, WIDE]), ("ppca", [SOME, MANY])],
        "vmp": [("ridge, noise unknown", [SOME, WIDE, FEW]), ("ridge", [MANY, ONE]), ("mixture", [SOME])],
        "conjugate": [("gp regression", [CURVE, POINT, LONG_CURVE]), ("chain regression", [CHAIN, LONG_CHAIN, STEP])],
        "von": [("ridge", [SOME]), ("logistic", [SOME]), ("poisson", [FEW])],
    }
    queues = {
        recipe: [
            Program(recipe, kind, shapes[turn]) for turn in range(3) for kind, shapes in kinds if turn < len(shapes)
        ]
        for recipe, kinds in by_recipe.items()
    }
    ordered = []
    while any(queues.values()):
        ordered += [queue.pop(0) for queue in queues.values() if queue]
    return ordered


PROGRAMS = _programs()
PER_PROGRAM = 5
PROBLEMS = len(PROGRAMS) * PER_PROGRAM


class Problem(NamedTuple):
    """One fit, with its data rounded to the precision in which the library sees them.

    Attributes:
        seed: the number that made it.
        program: what is compiled.
        dtype: "float32" or "float64".
        data: arrays by name, in float64 but with values of the dtype.
        settings: numbers by name: the prior's precision, Gamma parameters, a noise variance.
        tolerance: as passed to `fit`.
        start_at_prior: whether a model's q starts at the prior, or at N(0, I).
        story: in words, what is special about it.
    """

    seed: int
    program: Program
    dtype: str
    data: dict[str, Array]
    settings: dict[str, float]
    tolerance: float
    start_at_prior: bool
    story: str

    @property
    def log_concave(self) -> bool:
        """Whether the likelihood is log-concave in its linear predictor and all unknowns are Gaussian."""
        kind = self.program.kind
        return not any(word in kind for word in ("student", "unknown", "mixture", "ppca"))


def problem(seed: int, dtype: str) -> Problem:
    """The problem of this seed; its program is number `seed` modulo the number of programs."""
    program = PROGRAMS[seed % len(PROGRAMS)]
    rng = np.random.default_rng([16, seed])
    prior_sd = 10 ** rng.uniform(-2, 3)
    kind = program.kind
    if kind.startswith("gp"):
        data, settings, story = _process(rng, program, prior_sd)
    elif kind.startswith("chain"):
        data, settings, story = _chain(rng, program, prior_sd)
    elif kind in ("mixture", "ppca"):
        data, settings, story = _rows(rng, program)
    else:
        data, settings, story = _regression(rng, program, prior_sd)
    rounded = lambda x: np.asarray(x, dtype).astype(float)
    data = {name: rounded(x) for name, x in data.items()}
    settings = {name: float(rounded(x)) for name, x in settings.items()}
    tolerance = float(rng.choice([1e-4, 1e-6, 1e-6, 1e-6, 1e-8 if dtype == "float64" else 1e-6]))
    return Problem(seed, program, dtype, data, settings, tolerance, bool(rng.random() < 0.7), story)


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    """A number whose logarithm is uniform between those of `low` and `high`."""
    return float(10 ** rng.uniform(np.log10(low), np.log10(high)))


def _design(rng: np.random.Generator, rows: int, columns: int) -> tuple[Array, str]:
    """Columns that are harmless, or troublesome in one of the ways in which real ones are."""
    x = rng.normal(size=(rows, columns))
    trouble = str(rng.choice(["plain", "plain", "conditioned", "collinear", "years", "scaled", "shifted"]))
    if trouble == "conditioned":
        condition = _between(rng, 1, 1e8)
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        x = np.sqrt(rows) * (u * np.geomspace(1, 1 / condition, len(s))) @ vt
        return x, f"singular values over {condition:.1g}"
    if trouble == "collinear":
        noise = _between(rng, 1e-6, 1e-1)
        x[:, -1] = x[:, 0] + noise * x[:, -1]
        return x, f"two columns that differ by {noise:.1g}"
    if trouble == "years":
        years = np.round(rng.uniform(1950, 2020, rows))
        x[:, 0], x[:, 1] = 1.0, (years - 1985) / 10
        if columns > 2:
            x[:, 2] = x[:, 1] ** 2
        if rng.random() < 0.5:
            x[:, 1] = years
            if columns > 2:
                x[:, 2] = years**2
            return x, "years and their squares"
        return x, "decades and their squares"
    if trouble == "scaled":
        scales = 10 ** rng.uniform(-3, 3, columns)
        return x * scales, f"columns of scale {scales.min():.1g} to {scales.max():.1g}"
    if trouble == "shifted":
        shift = _between(rng, 1, 1e4)
        x += shift * rng.choice([-1.0, 1.0], columns)
        return x, f"columns shifted by {shift:.1g}"
    return x, "plain columns"


def _signal(rng: np.random.Generator, x: Array, outputs: int) -> Array:
    """Linear predictors of a random truth with a spread of about 1, centred where there are rows enough to."""
    f = (x / (np.abs(x).max(axis=0) + 1e-300)) @ rng.normal(size=(x.shape[1], outputs))
    f = f - f.mean(axis=0) if len(f) > 2 else f
    return f / np.maximum(f.std(axis=0), 1e-3 + np.abs(f).max(axis=0) / 10)


def _observed(rng: np.random.Generator, kind: str, f: Array) -> tuple[Array, str]:
    """Observations of a kind around the signal f, and what is special about them."""
    rows = len(f)
    if "regression" in kind or "ridge" in kind:
        amplitude, noise = _between(rng, 0.1, 100), _between(rng, 0.1, 3)
        return amplitude * f + noise * rng.normal(size=rows), f"signal {amplitude:.2g}"
    if "student" in kind:
        amplitude = _between(rng, 0.1, 30)
        y = amplitude * f + rng.standard_t(DOF, size=rows)
        outliers = rng.random(rows) < 0.05
        return y + outliers * rng.normal(size=rows) * 30, f"signal {amplitude:.2g}, outliers {outliers.sum()}"
    if "poisson" in kind or "counts" in kind:
        amplitude, level = rng.uniform(0, 1.2), rng.uniform(-2, 6)
        return rng.poisson(np.exp(np.clip(level + amplitude * f, -20, 12))).astype(
            float
        ), f"counts near {np.exp(level):.2g}"
    amplitude = _between(rng, 0.3, 10)
    if rng.random() < 0.2:
        return (f > 0).astype(float), "separable"
    return (rng.random(rows) < 1 / (1 + np.exp(-amplitude * f))).astype(float), f"signal {amplitude:.2g}"


def _regression(rng: np.random.Generator, program: Program, prior_sd: float) -> tuple[dict, dict, str]:
    x, columns = _design(rng, *program.shape)
    settings = {"precision": prior_sd**-2}
    if program.kind == "softmax":
        if program.recipe not in ("laplace", "newton"):
            # Variational inference integrates over all outputs on a grid, which is made for outputs of a few units.
            prior_sd = min(prior_sd, _between(rng, 0.01, 3) / np.median(np.linalg.norm(x, axis=1)))
            settings["precision"] = prior_sd**-2
        f = _between(rng, 0.3, 10) * _signal(rng, x, CLASSES)
        separable = rng.random() < 0.2
        y = np.argmax(f if separable else f + rng.gumbel(size=f.shape), axis=1).astype(float)
        special = "separable" if separable else "drawn classes"
    else:
        y, special = _observed(rng, program.kind, _signal(rng, x, 1)[:, 0])
    if "unknown" in program.kind:
        settings |= {"shape": _between(rng, 0.5, 5), "rate": _between(rng, 1e-2, 5)}
    return {"x": x, "y": y}, settings, f"{columns}, {special}, prior sd {prior_sd:.2g}"


def _process(rng: np.random.Generator, program: Program, prior_sd: float) -> tuple[dict, dict, str]:
    rows = program.shape[0]
    x = np.sort(rng.uniform(0, 10, rows))
    if rows > 4 and rng.random() < 0.3:
        x[1::2] = x[0 : 2 * (rows // 2) : 2]  # every input occurs twice
    scale = _between(rng, 0.3, 10)
    y, special = _observed(rng, program.kind, np.sin(x / scale) + 0.3 * rng.normal(size=rows))
    settings = {"variance": prior_sd**2, "scale": scale, "rough": float(rng.random() < 0.5)}
    settings["noise"] = _between(rng, 1e-3, 10)
    kernel = "Matérn 3/2" if settings["rough"] else "squared exponential"
    return {"x": x, "y": y}, settings, f"{kernel} of scale {scale:.2g}, {special}, prior sd {prior_sd:.2g}"


def _chain(rng: np.random.Generator, program: Program, prior_sd: float) -> tuple[dict, dict, str]:
    rows = program.shape[0]
    if rng.random() < 0.5:
        transition, name = np.array([[1.0, 1.0], [0.0, 1.0]]), "trend"
        noise = np.diag([_between(rng, 1e-3, 1), _between(rng, 1e-5, 1e-2)])
    else:
        angle, decay = rng.uniform(0.05, 1), rng.uniform(0.7, 0.999)
        transition = decay * np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        noise, name = _between(rng, 1e-3, 1) * np.eye(2), "damped oscillation"
    times = np.arange(rows)
    y, special = _observed(rng, program.kind, np.sin(times / 9) + 0.3 * rng.normal(size=rows))
    data = {"transition": transition, "noise": noise, "first": prior_sd**2 * np.eye(2), "y": y}
    return data, {"noise": _between(rng, 1e-3, 10)}, f"{name}, {special}, first state's sd {prior_sd:.2g}"


def _rows(rng: np.random.Generator, program: Program) -> tuple[dict, dict, str]:
    rows, columns = program.shape
    if program.kind == "mixture":
        distance, scale = rng.uniform(1, 5), _between(rng, 0.1, 10)
        chosen = rng.random(rows) < rng.uniform(0.2, 0.8)
        y = rng.normal(size=(rows, columns)) + distance * chosen[:, None] / np.sqrt(columns)
        return {"y": scale * (y - y.mean(0))}, {}, f"means {distance:.2g} sd apart, scale {scale:.2g}"
    strengths = np.sort(10 ** rng.uniform(-0.5, 1, LATENT))[::-1]
    loadings = np.linalg.qr(rng.normal(size=(columns, LATENT)))[0] * strengths
    y = rng.normal(size=(rows, LATENT)) @ loadings.T + rng.normal(size=(rows, columns)) * _between(rng, 0.1, 2)
    return {"y": y - y.mean(0)}, {}, f"loadings {strengths[0]:.2g} and {strengths[1]:.2g}"
