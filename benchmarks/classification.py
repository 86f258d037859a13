"""Networks for classes at one setting for all sets: VOGN and IVON beside point estimates, ensembles and Laplace.

    python benchmarks/classification.py --data FOLDER [--validate] [--sets mnist digits] [--only vogn ivon adamw]
        [--seeds 5] [--rows 10000] [--out table.md]

FOLDER/mnist/mnist.npz has X, y, X_test, y_test; FOLDER/NAME/NAME.npz of the tables X and y (a1a with packed bits).
Digits, wine and breast_cancer are scikit-learn's. A table's test rows are a quarter of its rows, another one for each
seed; MNIST's are its test images, and `--rows` of its training images are trained on.

One setting for all: the rate 1e-3 of Adam with a cosine decay, batches of 128, 12 epochs and at least 1000 steps, an
MLP with one hidden layer of 50 units (100 for images), 32 draws for a prediction. SGD has the rate 0.1 and momentum
0.9. The prior's precision of VOGN, IVON and Adam is 1 or 10, whichever has the lower NLL on a fifth of the training
rows in a fit of the others; then all of the training rows are fitted. "vogn, chosen" and "ivon, chosen" choose in the
same way between predictions that are averaged over draws and those at the mean of q. The ensemble's five networks have
a fifth of the steps each, so that the budget is the same (except for the choice of the prior: two more fits).

`--validate` scores on a fifth of the training rows instead, and reads no test row. The unit of the rate (0.08 posterior
standard deviations of noise for 1e-3), its limit and the two priors of the grid were chosen on validation parts of the
training rows too, of other splits.
"""

from __future__ import annotations

import argparse
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
PRIORS = (1.0, 10.0)
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
    return {"vogn": blr.vogn, "ivon": blr.ivon, "adam": blr.adam}[name](schedule)


def train_rule(name: str, problem: Problem, prior: float, seed: int) -> Any:
    objective = blr.Objective(
        networks.softmax_cross_entropy, output=problem.network.apply, size=len(problem.train.y), regularizer=prior
    )
    start, order = jax.random.split(jax.random.key(seed))
    rule, data = rule_of(name, problem.steps), tuple(problem.train)
    options = {"steps": problem.steps, "batch_size": problem.batch, "key": order}
    return blr.fit(rule, objective, problem.network.init(start), data, **options).q


def predict_rule(q: Any, problem: Problem, x: np.ndarray, method: str) -> Any:
    apply, key = problem.network.apply, jax.random.key(17)
    if method == "mean":
        return blr.predict(q, apply, x, method="mean", link="softmax")
    points = {"points": blr.Masks(DRAWS)} if method == "masks" else {"samples": DRAWS}
    return blr.predict(q, apply, x, key=key, link="softmax", **points)


def by_rule(name: str, methods: tuple[str, ...]) -> Callable[[Problem, int], Any]:
    """The prior, and how to predict, are those of the lowest NLL on a fifth of the training rows."""

    def predict(problem: Problem, seed: int) -> Any:
        kept, held = halves(problem.train, seed)
        part = problem._replace(train=kept, batch=min(BATCH, len(kept.y)))
        losses = {}
        for prior in PRIORS:
            q = train_rule(name, part, prior, seed)
            for method in methods:
                nll = float(metrics.nll(predict_rule(q, part, held.x, method), held.y))
                losses[prior, method] = nll if np.isfinite(nll) else np.inf
        prior, method = min(losses, key=lambda choice: losses[choice])
        return predict_rule(train_rule(name, problem, prior, seed), problem, problem.test.x, method)

    return predict


def mc_dropout(problem: Problem, seed: int) -> Any:
    """Without a prior, as it is mostly used."""
    return predict_rule(train_rule("dropout", problem, 0.0, seed), problem, problem.test.x, "masks")


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


def by_optax(name: str) -> Callable[[Problem, int], Any]:
    def predict(problem: Problem, seed: int) -> Any:
        params = train_optax(optimizer_of(name, problem.steps), problem, problem.steps, seed)
        return probabilities_of(params, problem, problem.test.x)

    return predict


def ensemble(problem: Problem, seed: int) -> Any:
    steps = problem.steps // MEMBERS
    members = [train_optax(optimizer_of("adamw", steps), problem, steps, 1000 * seed + k) for k in range(MEMBERS)]
    return sum(probabilities_of(member, problem, problem.test.x) for member in members) / MEMBERS


def last_layer_laplace(problem: Problem, seed: int) -> Any:
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
    return blr.predict(
        q, lambda w, h: h @ w.reshape(shape), test, key=jax.random.key(17), samples=DRAWS, link="softmax"
    )


ALGORITHMS: dict[str, Callable[[Problem, int], Any]] = {
    "vogn": by_rule("vogn", ("samples",)),
    "ivon": by_rule("ivon", ("samples",)),
    "vogn, chosen": by_rule("vogn", ("samples", "mean")),
    "ivon, chosen": by_rule("ivon", ("samples", "mean")),
    "adamw": by_optax("adamw"),
    "adam, prior": by_rule("adam", ("mean",)),
    "sgd": by_optax("sgd"),
    "ensemble of 5": ensemble,
    "MC dropout": mc_dropout,
    "last-layer Laplace": last_layer_laplace,
}


def score(probabilities: Any, y: np.ndarray) -> list[float]:
    accuracy, nll, ece = (float(of(probabilities, y)) for of in (metrics.accuracy, metrics.nll, metrics.ece))
    return [100 * accuracy, nll, ece]


def cell(scores: np.ndarray) -> str:
    means, errors = scores.mean(axis=0), scores.std(axis=0, ddof=1) / np.sqrt(len(scores))
    return " ".join(f"{m:.{d}f}±{e:.{d}f}" for m, e, d in zip(means, errors, (1, 3, 3), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist/ and the tables")
    parser.add_argument("--sets", nargs="+", default=["mnist", *OWN, *TABLES])
    parser.add_argument("--only", nargs="+", default=list(ALGORITHMS), help="which algorithms")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=10_000, help="training images of MNIST")
    parser.add_argument("--validate", action="store_true", help="score on a fifth of the training rows")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    lines = ["| set | " + " | ".join(arguments.only) + " |", "|---" * (len(arguments.only) + 1) + "|"]
    print("\n".join(lines), flush=True)
    for name in arguments.sets:
        began, scores = time.perf_counter(), {algorithm: [] for algorithm in arguments.only}
        for seed in range(arguments.seeds):
            train, test = parts_of(name, arguments.data, arguments.rows, seed)
            if arguments.validate:
                train, test = halves(train, seed + 100)
            problem = problem_of(train, test)
            for algorithm in arguments.only:
                scores[algorithm].append(score(ALGORITHMS[algorithm](problem, seed), problem.test.y))
        cells = [cell(np.array(scores[algorithm])) for algorithm in arguments.only]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], f"  ({time.perf_counter() - began:.0f} s)", flush=True)
        if arguments.out:
            arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
