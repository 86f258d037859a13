"""Runs of the command line, finished and killed; posteriors of log densities; optimizers of PyTorch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typer.testing import CliRunner

import bayesrule as blr
from bayesrule.cli import app
from bayesrule.inference.density import Density
from bayesrule.inference.posterior import load_posterior
from bayesrule.runs import watch
from saved_files.fits import Killed
from saved_files.kinds import LABELS, ROWS, TARGETS

TABLE = "table.csv"
# A run of each kind of estimator, with few steps.
RUNS: dict[str, list[str]] = {
    "RidgeRegression": ["-t", "y"],
    "LogisticRegression": ["-t", "good", "--recipe", "laplace"],
    "PoissonRegression": ["-t", "count", "--recipe", "laplace"],
    "MLPClassifier": ["-t", "good", "--model", "mlp", "-p", "hidden_layer_sizes=[2]", "-p", "max_iter=3"],
    "BinaryMLPClassifier": ["-t", "good", "--model", "binary-mlp", "-p", "hidden_layer_sizes=[2]", "-p", "max_iter=3"],
    "GaussianProcessRegressor": ["-t", "y", "--model", "gp", "-p", "optimizer=null", "-p", "noise=0.1"],
    "GaussianProcessClassifier": ["-t", "good", "--model", "gp", "-p", "optimizer=null"],
    "GaussianMixture": ["--model", "mixture", "-p", "n_components=2", "-p", "max_iter=3"],
    "FactorAnalysis": ["--model", "factor-analysis", "-p", "n_components=1", "-p", "max_iter=3"],
    "LinearGaussianStateSpace": [
        "-t",
        "y",
        "--task",
        "sequence",
        "--model",
        "state-space",
        "-p",
        "n_states=1",
        "-p",
        "max_iter=2",
    ],
    "GaussianHMM": ["-t", "y", "--task", "sequence", "--model", "hmm", "-p", "n_components=2", "-p", "max_iter=2"],
}
LONG_RUN = ["-t", "good", "--recipe", "vogn", "-p", "batch_size=10", "-p", "max_iter=40", "-p", "prior_precision=1.0"]
LONG_RUN_STEPS = 40


def write_table(folder: Path) -> Path:
    """Thirty rows with two inputs, a number, a class and a count to predict, and some values that are missing."""
    places = np.arange(30.0)
    a, b = np.round(np.sin(1.7 * places), 3), np.round(np.cos(2.9 * places + 0.3), 3)
    y = np.round(a - b + 0.3 * np.sin(11 * places), 3)
    lines = ["a,b,y,good,count"]
    for place in range(len(places)):
        first = "" if place % 10 == 4 else f"{a[place]}"
        good, count = "yes" if y[place] > 0 else "no", int(2 * abs(y[place]))
        lines.append(f"{first},{b[place]},{y[place]},{good},{count}")
    path = folder / TABLE
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def invoke(*arguments: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--quiet"])
    if result.exit_code:
        raise AssertionError(result.output)


def fit_run(folder: Path, name: str) -> None:
    """A finished run, without its report."""
    invoke("fit", str(folder / TABLE), *RUNS[name], "-o", str(folder / name))
    (folder / name / "report.html").unlink()


def predictions(run: Any, table: Path) -> dict[str, list[Any]]:
    """What a run predicts, and how well it did."""
    found = run.predict(steps=3) if run.config["task"] == "sequence" else run.predict(str(table))
    scores = {name: [value] for name, value in run.metrics["model"].items() if isinstance(value, float)}
    return {name: np.asarray(values).tolist() for name, values in found.items()} | scores


def kill_run(folder: Path) -> None:
    """Leave what a killed `bayesrule fit` leaves: what was asked for, and the checkpoints of its fit."""
    interval, fit = watch._SAVE_INTERVAL, watch.fit
    reports: list[int] = []

    def killed(*arguments: Any, progress: Callable[[Any], None], **more: Any) -> Any:
        def report(result: Any) -> None:
            progress(result)
            reports.append(result.steps)
            if len(reports) == 2:
                raise Killed

        return fit(*arguments, progress=report, **more)

    watch._SAVE_INTERVAL, watch.fit = -1.0, killed
    try:
        invoke("fit", str(folder / TABLE), *LONG_RUN, "-o", str(folder / "run"))
    except Killed:
        assert (folder / "run.partial" / "fit0.npz").exists()
    finally:
        watch._SAVE_INTERVAL, watch.fit = interval, fit


def moved_back(folder: Path) -> None:
    """Have an unfinished run find its table where it is now, as old as it was."""
    request = folder / "run.partial" / "request.json"
    options = json.loads(request.read_text(encoding="utf-8"))
    options["data"] = str((folder / TABLE).resolve())
    request.write_text(json.dumps(options), encoding="utf-8")
    os.utime(folder / TABLE, ns=(options["data_stamp"][1],) * 2)


# Posteriors of log densities, which are saved without the density.


def log_density(theta: Any) -> Any:
    return -0.5 * jnp.sum((theta["x"] - 1.0) ** 2) - jnp.exp(0.5 * jnp.sum(theta["x"]))


def infer() -> Any:
    return blr.infer(log_density, {"x": jnp.zeros(2)}, key=jax.random.key(3))


def load_inferred(path: Path) -> Any:
    return load_posterior(path, Density(log_density, (), {"x": jnp.zeros(2)}, lambda theta: theta))


def numpyro_model(x: Any, y: Any = None) -> None:
    import numpyro
    import numpyro.distributions as dist

    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.Gamma(2.0, 2.0))
    numpyro.sample("y", dist.Normal(slope * x, scale), obs=y)


NUMPYRO_DATA = ROWS[:, 0], TARGETS


def infer_numpyro() -> Any:
    from bayesrule.interop import numpyro as bridge

    return bridge.fit(numpyro_model, NUMPYRO_DATA, key=jax.random.key(3))


def load_numpyro(path: Path) -> Any:
    from bayesrule.interop import numpyro as bridge

    return bridge.load(path, numpyro_model, NUMPYRO_DATA)


INFERENCES: dict[str, tuple[Callable[[], Any], Callable[[Path], Any]]] = {
    "infer": (infer, load_inferred),
    "numpyro": (infer_numpyro, load_numpyro),
}


def described(posterior: Any) -> dict[str, Any]:
    """What a posterior says, and draws of its approximation."""
    draws = posterior.samples(jax.random.key(5), 3, refined=False)
    return {
        "verdict": posterior.verdict,
        "trust": posterior.trust,
        "evidence": posterior.log_evidence,
        "covariance": posterior.covariance(),
        "mean": {name: np.asarray(value) for name, value in posterior.mean.items()},
        "draws": {name: np.asarray(value) for name, value in draws.items()},
    }


# Checkpoints of a fit whose parameters are divided over devices, and state dicts of PyTorch's optimizers.


def sharded_fit(start: Any, steps: int, **more: Any) -> blr.Result:
    loss = lambda w, example: jnp.logaddexp(0.0, example[0] @ w) - example[1] * (example[0] @ w)
    objective = blr.Objective(loss, size=len(ROWS), regularizer=1.0)
    data, key = blr.shard((ROWS, LABELS), one_device()), None if isinstance(start, blr.Result) else jax.random.key(3)
    return blr.fit(blr.vogn(1e-3), objective, start, data, steps=steps, batch_size=2, key=key, **more)


def one_device() -> Any:
    return jax.make_mesh((1,), ("data",))


def kill_sharded(folder: Path) -> None:
    def kill(result: blr.Result) -> None:
        if result.steps >= 4:
            raise Killed

    checkpoint = blr.ShardedCheckpoint(folder, keep=1, every=0)
    try:
        start = blr.shard_parameters(jnp.array([0.3, -0.2]), one_device())
        sharded_fit(start, 10, checkpoint=checkpoint, on_step=kill, every=1)
    except Killed:
        pass


OPTIMIZERS: dict[str, Callable[[], blr.Rule]] = {
    "ivon": lambda: blr.ivon(1e-3),
    "adam": lambda: blr.adam(0.01),
    "heavy ball": lambda: blr.sgd(0.1, momentum=0.9, heavy_ball=True),
}


def optimizer_of(name: str, params: list[Any]) -> Any:
    from bayesrule.interop.torch import Optimizer

    return Optimizer(params, OPTIMIZERS[name](), size=len(ROWS), regularizer=1.0, batch_size=2)


def first_params() -> list[Any]:
    import torch

    return [torch.nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))]


def train(optimizer: Any, params: list[Any], steps: range) -> None:
    """Steps on the rows of a regression, two at a time."""
    import torch

    for step in steps:
        rows = (np.arange(2) + 2 * step) % len(ROWS)
        x, y = torch.tensor(ROWS[rows]), torch.tensor(TARGETS[rows])
        optimizer.zero_grad()
        with optimizer.sampled():
            (0.5 * torch.mean((x @ params[0] - y) ** 2)).backward()
        optimizer.step()
