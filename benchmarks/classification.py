"""Networks for classes at one setting for all sets: VOGN and IVON beside point estimates, ensembles and Laplace.

    python benchmarks/classification.py --data FOLDER [--validate] [--sets mnist digits] [--only vogn ivon adamw]
        [--seeds 5] [--rows 10000] [--out table.md]

FOLDER/mnist/mnist.npz has X, y, X_test, y_test; FOLDER/NAME/NAME.npz of the tables X and y (a1a with packed bits).
Digits, wine and breast_cancer are scikit-learn's. A table's test rows are a quarter of its rows, another one for each
seed; MNIST's are its test images, and `--rows` of its training images are trained on.

One setting for all: the rate 1e-3 of Adam with a cosine decay, batches of 128, 12 epochs and at least 1000 steps, an
MLP with one hidden layer of 50 units (100 for images), 32 draws for a prediction. For VOGN and IVON the decay is the
default, as is a temperature that rises to 1 over the first half of the steps. SGD has the rate 0.1 and momentum 0.9.
The prior's precision of VOGN, IVON and Adam is chosen by `blr.choose_prior` with its default grid on held-out training
rows, and so is whether VOGN and IVON average over draws or predict at the mean of q; "vogn, draws" and "ivon, draws"
always average. The ensemble's five networks have a fifth of the steps each, so that the budget is the same (except for
the choice of the prior).

`--validate` scores on a fifth of the training rows instead, and reads no test row. The unit of the rate (0.08 posterior
standard deviations of noise for 1e-3), its limit, the grid of priors and the temperature's schedule were chosen on
validation parts of the training rows too, of other splits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import bayesrule as blr
from bayesrule import metrics
from bayesrule.models import networks

RATE, BATCH, EPOCHS, FEWEST_STEPS, DRAWS, MEMBERS, KEPT = 1e-3, 128, 12, 1000, 32, 5, 0.9
TABLES = ("a1a", "australian_scale", "banana", "breast_cancer_scale")
OWN = ("digits", "wine", "breast_cancer")


class Part(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class Problem(NamedTuple):
    """Training rows, rows to score on, and the network for them."""

    train: Part
    test: Part
    network: networks.Network
    steps: int
    batch: int


@cache
def network(sizes: tuple[int, ...]) -> networks.Network:
    return networks.mlp(sizes)


@cache
def decaying(rate: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(rate, steps)


# Data.


@cache
def rows_of(name: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    if name in OWN:
        return getattr(datasets, f"load_{name}")(return_X_y=True)
    file = np.load(folder / name / f"{name}.npz")
    X = np.unpackbits(file["X"], axis=1)[:, :123] if name == "a1a" else file["X"]
    return X.astype(float), np.unique(file["y"], return_inverse=True)[1]


@cache
def images(folder: Path, rows: int) -> tuple[Part, Part]:
    file = np.load(folder / "mnist" / "mnist.npz")
    flat = lambda x: (x.reshape(len(x), -1) / 255).astype(np.float32)
    train = Part(flat(file["X"][:rows]), file["y"][:rows].astype(np.int32))
    return train, Part(flat(file["X_test"]), file["y_test"].astype(np.int32))


def halves(part: Part, seed: int) -> tuple[Part, Part]:
    """Four fifths of the rows, and the others."""
    order = np.random.default_rng([seed, 1]).permutation(len(part.y))
    held, kept = order[: len(order) // 5], order[len(order) // 5 :]
    return Part(part.x[kept], part.y[kept]), Part(part.x[held], part.y[held])


def parts_of(name: str, folder: Path, rows: int, seed: int) -> tuple[Part, Part]:
    """Training and test rows; a table's inputs are standardised on the training rows."""
    if name == "mnist":
        return images(folder, rows)
    X, y = rows_of(name, folder)
    order = np.random.default_rng(seed).permutation(len(y))
    test, train = order[: len(y) // 4], order[len(y) // 4 :]
    scale = X[train].std(axis=0)
    z = ((X - X[train].mean(axis=0)) / np.where(scale > 0, scale, 1.0)).astype(np.float32)
    return Part(z[train], y[train].astype(np.int32)), Part(z[test], y[test].astype(np.int32))


def problem_of(train: Part, test: Part) -> Problem:
    rows, inputs = train.x.shape
    classes = int(max(train.y.max(), test.y.max())) + 1
    batch = min(BATCH, rows)
    steps = max(EPOCHS * -(-rows // batch), FEWEST_STEPS)
    return Problem(train, test, network((inputs, 100 if inputs > 500 else 50, classes)), steps, batch)


# Algorithms: each returns the probabilities for the test rows.


@cache
def rule_of(name: str, steps: int) -> blr.Rule:
    schedule = decaying(RATE, steps)
    if name == "dropout":
        rule = blr.adam(schedule)
        return rule.replace(family=rule.family.dropped(KEPT), points=blr.Masks())
    if name == "adam":
        return blr.adam(schedule)
    return {"vogn": blr.vogn, "ivon": blr.ivon}[name](RATE)


def objective_of(problem: Problem, prior: float) -> blr.Objective:
    return blr.Objective(
        networks.softmax_cross_entropy, output=problem.network.apply, size=len(problem.train.y), regularizer=prior
    )


def predict_rule(q: Any, problem: Problem, method: str) -> Any:
    apply, x = problem.network.apply, problem.test.x
    if method == "mean":
        return blr.predict(q, apply, x, method="mean", link="softmax")
    points = {"points": blr.Masks(DRAWS)} if method == "masks" else {"samples": DRAWS}
    return blr.predict(q, apply, x, key=jax.random.key(17), link="softmax", **points)


def options_of(problem: Problem, seed: int) -> tuple[Any, dict[str, Any]]:
    """The first weights, and what `fit` and `choose_prior` take."""
    start, order = jax.random.split(jax.random.key(seed))
    return problem.network.init(start), {"steps": problem.steps, "batch_size": problem.batch, "key": order}


def by_rule(name: str) -> Callable[[Problem, int], dict[str, Any]]:
    """With the prior, and the way to predict, that `choose_prior` finds; of a posterior also the average over draws."""

    def predict(problem: Problem, seed: int) -> dict[str, Any]:
        start, options = options_of(problem, seed)
        rule, objective = rule_of(name, problem.steps), objective_of(problem, 1.0)
        methods = ("mean",) if name == "adam" else ("samples", "mean")
        chosen = blr.choose_prior(rule, objective, start, tuple(problem.train), methods=methods, **options)
        print(f"{name}: δ = {chosen.precision:g}, {chosen.method}", file=sys.stderr, flush=True)
        if name == "adam":
            return {"adam, prior": predict_rule(chosen.q, problem, "mean")}
        draws = predict_rule(chosen.q, problem, "samples")
        best = draws if chosen.method == "samples" else predict_rule(chosen.q, problem, "mean")
        return {name: best, f"{name}, draws": draws}

    return predict


def mc_dropout(problem: Problem, seed: int) -> dict[str, Any]:
    """Without a prior, as it is mostly used."""
    start, options = options_of(problem, seed)
    rule = rule_of("dropout", problem.steps)
    q = blr.fit(rule, objective_of(problem, 0.0), start, tuple(problem.train), **options).q
    return {"MC dropout": predict_rule(q, problem, "masks")}


def train_optax(optimizer: optax.GradientTransformation, problem: Problem, steps: int, seed: int) -> Any:
    """The weights after so many steps of an optimizer of optax on the mean loss."""
    start, order = jax.random.split(jax.random.key(seed))
    return _optax_loop(optimizer, problem.network, steps, problem.batch, *problem.train, start, order)


@cache
def optimizer_of(name: str, steps: int) -> optax.GradientTransformation:
    return optax.adamw(decaying(RATE, steps)) if name == "adamw" else optax.sgd(decaying(0.1, steps), momentum=KEPT)


def _mean_loss(params: Any, apply: Callable, x: Any, y: Any) -> Any:
    outputs = jax.vmap(apply, (None, 0))(params, x)
    return jnp.mean(jax.vmap(networks.softmax_cross_entropy)(outputs, y))


@jax.jit(static_argnums=(0, 1, 2, 3))
def _optax_loop(optimizer, model, steps, batch, x, y, start, order):
    params = model.init(start)
    per_epoch = -(-len(y) // batch)

    def step(carry, count):
        params, state = carry
        shuffled = jax.random.permutation(jax.random.fold_in(order, count // per_epoch), len(y))
        rows = jnp.take(shuffled, (count % per_epoch) * batch + jnp.arange(batch), mode="wrap")
        gradient = jax.grad(_mean_loss)(params, model.apply, x[rows], y[rows])
        update, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, update), state), None

    return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))[0][0]


def probabilities_of(params: Any, problem: Problem, x: np.ndarray) -> Any:
    return jax.nn.softmax(jax.vmap(problem.network.apply, (None, 0))(params, jnp.asarray(x)))


def by_optax(name: str) -> Callable[[Problem, int], dict[str, Any]]:
    def predict(problem: Problem, seed: int) -> dict[str, Any]:
        params = train_optax(optimizer_of(name, problem.steps), problem, problem.steps, seed)
        return {name: probabilities_of(params, problem, problem.test.x)}

    return predict


def ensemble(problem: Problem, seed: int) -> dict[str, Any]:
    steps = problem.steps // MEMBERS
    members = [train_optax(optimizer_of("adamw", steps), problem, steps, 1000 * seed + k) for k in range(MEMBERS)]
    mean = sum(probabilities_of(member, problem, problem.test.x) for member in members) / MEMBERS
    return {"ensemble of 5": mean}


def last_layer_laplace(problem: Problem, seed: int) -> dict[str, Any]:
    """AdamW's features with Laplace's posterior of the last layer (a full Gaussian, δ = 1), averaged over draws."""
    params = train_optax(optimizer_of("adamw", problem.steps), problem, problem.steps, seed)
    first, last = params["layer0"], params["layer1"]
    features = lambda x: jnp.append(jax.nn.relu(x @ first["w"] + first["b"]), 1.0)
    weights = jnp.concatenate([last["w"], last["b"][None]])
    inputs = jax.vmap(features)(jnp.asarray(problem.train.x))
    p = jax.nn.softmax(inputs @ weights)
    curvatures = jax.vmap(lambda p: jnp.diag(p) - jnp.outer(p, p))(p)
    # One pair of classes at a time: Σᵢ hᵢhᵢᵀ ⊗ (diag pᵢ − pᵢpᵢᵀ).
    blocks = jax.lax.map(lambda c: (inputs * c[:, None]).T @ inputs, curvatures.reshape(len(p), -1).T)
    shape, classes = weights.shape, p.shape[1]
    hessian = jnp.transpose(blocks.reshape(classes, classes, shape[0], shape[0]), (2, 0, 3, 1))
    q = blr.Gaussian(weights.ravel(), hessian.reshape(weights.size, weights.size) + jnp.eye(weights.size))
    test = jax.vmap(features)(jnp.asarray(problem.test.x))
    apply = lambda w, h: h @ w.reshape(shape)
    mean = blr.predict(q, apply, test, key=jax.random.key(17), samples=DRAWS, link="softmax")
    return {"last-layer Laplace": mean}


ALGORITHMS: dict[str, Callable[[Problem, int], dict[str, Any]]] = {
    "vogn": by_rule("vogn"),
    "ivon": by_rule("ivon"),
    "adamw": by_optax("adamw"),
    "adam": by_rule("adam"),
    "sgd": by_optax("sgd"),
    "ensemble": ensemble,
    "dropout": mc_dropout,
    "laplace": last_layer_laplace,
}
"""Each returns the probabilities for the test rows, by the name of a column."""


def score(probabilities: Any, y: np.ndarray) -> list[float]:
    accuracy, nll, ece = (float(of(probabilities, y)) for of in (metrics.accuracy, metrics.nll, metrics.ece))
    return [100 * accuracy, nll, ece]


def cell(scores: np.ndarray) -> str:
    means, errors = scores.mean(axis=0), scores.std(axis=0, ddof=1) / np.sqrt(len(scores))
    return "<br>".join(f"{m:.{d}f}±{e:.{d}f}" for m, e, d in zip(means, errors, (1, 3, 3), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist/ and the tables")
    parser.add_argument("--sets", nargs="+", default=["mnist", *OWN, *TABLES])
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="which algorithms")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=10_000, help="training images of MNIST")
    parser.add_argument("--validate", action="store_true", help="score on a fifth of the training rows")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    lines: list[str] = []
    for name in arguments.sets:
        began, scores = time.process_time(), {}
        for seed in range(arguments.seeds):
            train, test = parts_of(name, arguments.data, arguments.rows, seed)
            if arguments.validate:
                train, test = halves(train, seed + 100)
            problem = problem_of(train, test)
            for algorithm in arguments.only:
                for column, probabilities in ALGORITHMS[algorithm](problem, seed).items():
                    scores.setdefault(column, []).append(score(probabilities, problem.test.y))
        if not lines:
            lines = ["| set | " + " | ".join(scores) + " |", "|---" * (len(scores) + 1) + "|"]
            print("\n".join(lines), flush=True)
        lines.append(f"| {name} | " + " | ".join(cell(np.array(values)) for values in scores.values()) + " |")
        print(lines[-1], f"  ({time.process_time() - began:.0f} s of CPU)", flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
