"""Networks on MNIST: accuracy, calibration and out-of-distribution detection of point and Bayesian algorithms.

    python benchmarks/mnist.py --data FOLDER [--seeds 3] [--epochs 5] [--write docs/mnist.md]

FOLDER/mnist.npz has X, y, X_test, y_test. Seeds are paired: all algorithms with one seed have the same initial weights,
the same order of the data and the same objective. Bayesian predictions average over 32 samples of the weights.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bayesrule as blr
from bayesrule import metrics
from bayesrule.models import networks

BATCH, PRIOR, DRAWS = 128, 10.0, 32
PUBLISHED = {"decay": 0.999, "curvature": 1.0}  # not the defaults, with which v is measured
NETWORK = networks.mlp((784, 500, 300, 10))
BINARY = networks.binary_mlp((784, 512, 512, 10))


def load(folder: Path) -> dict[str, np.ndarray]:
    file = np.load(folder / "mnist.npz")
    flat = lambda x: (x.reshape(len(x), -1) / 255).astype(np.float32)
    rotated = np.rot90(file["X_test"], axes=(1, 2))
    random = np.random.default_rng(0)
    noise = random.normal(size=file["X_test"].shape)
    for axis in (1, 2):  # Blurred noise with the stroke width and the share of ink of a digit.
        noise = sum(np.roll(noise, shift, axis) for shift in (-2, -1, 0, 1, 2))
    ink = np.quantile(noise.reshape(len(noise), -1), 0.81, axis=1)[:, None, None]
    scribbles = 255 * (noise > ink)
    return {
        "x": flat(file["X"]),
        "y": file["y"].astype(np.int32),
        "x_test": flat(file["X_test"]),
        "y_test": file["y_test"].astype(np.int32),
        "rotated": flat(rotated),
        "scribbles": flat(scribbles),
    }


def cosine_decay(rate: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(rate, steps)


def algorithms(steps: int) -> dict[str, tuple[blr.Rule, float]]:
    """Each algorithm with the prior's precision; Adam also without a prior, as it is mostly used."""
    return {
        "adam, no prior": (blr.adam(cosine_decay(1e-3, steps)), 0.0),
        "adam": (blr.adam(cosine_decay(1e-3, steps)), PRIOR),
        "vogn": (blr.vogn(cosine_decay(0.5, steps), **PUBLISHED), PRIOR),
        "ivon": (blr.ivon(cosine_decay(0.5, steps), **PUBLISHED), PRIOR),
    }


def train(rule: blr.Rule, prior: float, data: dict, steps: int, seed: int) -> dict[str, float]:
    objective = blr.Objective(
        networks.softmax_cross_entropy, output=NETWORK.apply, size=len(data["y"]), regularizer=prior
    )
    start, order, draws = jax.random.split(jax.random.key(seed), 3)
    began = time.perf_counter()
    result = blr.fit(
        rule, objective, NETWORK.init(start), (data["x"], data["y"]), steps=steps, batch_size=BATCH, key=order
    )
    seconds = time.perf_counter() - began
    method = "mean" if rule.points.delta else "samples"
    probabilities = {
        name: blr.predict(
            result.q,
            NETWORK.apply,
            data[name],
            key=jax.random.clone(draws),
            samples=DRAWS,
            link="softmax",
            method=method,
        )
        for name in ("x_test", "rotated", "scribbles")
    }
    known = metrics.predictive_entropy(probabilities["x_test"])
    scores = {
        "accuracy": 100 * metrics.accuracy(probabilities["x_test"], data["y_test"]),
        "nll": metrics.nll(probabilities["x_test"], data["y_test"]),
        "ece": metrics.ece(probabilities["x_test"], data["y_test"]),
        "brier": metrics.brier(probabilities["x_test"], data["y_test"]),
        "auroc rotated": metrics.auroc(known, metrics.predictive_entropy(probabilities["rotated"])),
        "auroc scribbles": metrics.auroc(known, metrics.predictive_entropy(probabilities["scribbles"])),
    }
    return {name: float(value) for name, value in scores.items()} | {"seconds": seconds}


def binary_algorithms(steps: int) -> dict[str, blr.Rule]:
    return {
        "straight_through": blr.straight_through(cosine_decay(10_000.0, steps)),
        "bayesbinn": blr.bayesbinn(cosine_decay(1e-4, steps), relaxation=1e-10, smoothing=1e-10),
    }


def train_binary(rule: blr.Rule, data: dict, steps: int, seed: int) -> dict[str, float]:
    """Binary weights, batch normalisation without parameters; the most probable signs predict."""
    objective = blr.Objective.from_batch(BINARY.loss, size=len(data["y"]), aux=BINARY.statistics)
    start, order = jax.random.split(jax.random.key(seed))
    began = time.perf_counter()
    result = blr.fit(
        rule, objective, BINARY.init(start), (data["x"], data["y"]), steps=steps, batch_size=BATCH, key=order
    )
    seconds = time.perf_counter() - began
    signs = jax.tree.map(lambda x: jnp.where(x >= 0, 1.0, -1.0), result.q.natural())
    statistics, apply = result.state.aux, jax.jit(BINARY.apply, static_argnames="train")
    for first in range(0, 20 * 512, 512):  # The running averages are those of earlier signs: recompute them.
        _, statistics = apply(signs, data["x"][first : first + 512], statistics, train=True)
    logits, _ = apply(signs, data["x_test"], statistics, train=False)
    probabilities = jax.nn.softmax(logits)
    return {
        "accuracy": 100 * float(metrics.accuracy(probabilities, data["y_test"])),
        "nll": float(metrics.nll(probabilities, data["y_test"])),
        "seconds": seconds,
    }


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """A table of mean ± standard error over the seeds."""
    columns = list(next(iter(rows.values()))[0])
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, runs in rows.items():
        cells = []
        for column in columns:
            values = np.array([run[column] for run in runs])
            digits = 2 if column == "accuracy" else 0 if column == "seconds" else 4
            error = "" if column == "seconds" else f" ± {values.std(ddof=1) / np.sqrt(len(values)):.{digits}f}"
            cells.append(f"{values.mean():.{digits}f}{error if len(values) > 1 else ''}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def paired_gains(rows: dict[str, list[dict[str, float]]], name: str, other: str) -> str:
    """The mean gain of one algorithm over another, and in how many seeds it is positive."""
    parts = []
    for column, sign in (("accuracy", 1), ("nll", -1), ("ece", -1), ("auroc rotated", 1), ("auroc scribbles", 1)):
        gains = np.array([sign * (a[column] - b[column]) for a, b in zip(rows[name], rows[other], strict=True)])
        parts.append(f"{column} {gains.mean():+.4f} ({int(np.sum(gains > 0))} of {len(gains)})")
    return f"{name} over {other}, better by: " + ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist.npz")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    arguments = parser.parse_args()
    data = load(arguments.data)
    steps = arguments.epochs * -(-len(data["y"]) // BATCH)
    rows: dict[str, list] = {}
    for seed in range(arguments.seeds):
        for name, (rule, prior) in algorithms(steps).items():
            rows.setdefault(name, []).append(train(rule, prior, data, steps, seed))
            print(name, seed, rows[name][-1], flush=True)
    binary_steps = arguments.epochs * (len(data["y"]) // BATCH)
    signs: dict[str, list] = {}
    for seed in range(arguments.seeds):
        for name, rule in binary_algorithms(binary_steps).items():
            signs.setdefault(name, []).append(train_binary(rule, data, binary_steps, seed))
            print(name, seed, signs[name][-1], flush=True)
    pairs = [paired_gains(rows, name, other) for name in ("vogn", "ivon") for other in ("adam, no prior", "adam")]
    text = "\n".join(["", table(rows), "", *pairs, "", table(signs), ""])
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
