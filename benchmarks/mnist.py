"""Networks on MNIST: accuracy, calibration and out-of-distribution detection of point and Bayesian algorithms.

    python benchmarks/mnist.py --data FOLDER [--rows 60000] [--seeds 5] [--only vogn ivon adamw] [--binary]

FOLDER/mnist.npz has X, y, X_test, y_test. The algorithms are those of `classification.py`, at the same setting: one
hidden layer of 100, batches of 128, 12 epochs, rates of 1e-3 with a cosine decay. The prior's precision of VOGN, IVON
and Adam, and whether VOGN and IVON average over 32 draws or predict at the mean of q, are chosen by `blr.choose_prior`
on held-out training images, anew for each seed; nothing is chosen on test images. With one seed all algorithms have the
same initial weights.

`--binary` trains networks of binary weights instead.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from classification import ALGORITHMS, Part, decaying, problem_of

import bayesrule as blr
from bayesrule import metrics
from bayesrule.models import networks

BATCH = 128
BINARY = networks.binary_mlp((784, 512, 512, 10))


def load(folder: Path, count: int) -> dict[str, np.ndarray]:
    """So many training images, the test images, and two kinds of images that are no digits."""
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
        "x": flat(file["X"][:count]),
        "y": file["y"][:count].astype(np.int32),
        "x_test": flat(file["X_test"]),
        "y_test": file["y_test"].astype(np.int32),
        "rotated": flat(rotated),
        "scribbles": flat(scribbles),
    }


def scores_of(probabilities: np.ndarray, data: dict[str, np.ndarray]) -> dict[str, float]:
    """The scores of predictions for the test images, the rotated ones and the scribbles, one after another."""
    known, rotated, scribbles = np.split(np.asarray(probabilities), 3)
    entropy = metrics.predictive_entropy(known)
    scores = {
        "accuracy": 100 * metrics.accuracy(known, data["y_test"]),
        "NLL": metrics.nll(known, data["y_test"]),
        "ECE": metrics.ece(known, data["y_test"]),
        "Brier": metrics.brier(known, data["y_test"]),
        "AUROC rotated": metrics.auroc(entropy, metrics.predictive_entropy(rotated)),
        "AUROC scribbles": metrics.auroc(entropy, metrics.predictive_entropy(scribbles)),
    }
    return {name: float(value) for name, value in scores.items()}


def compare(data: dict[str, np.ndarray], seeds: int, only: list[str]) -> dict[str, list[dict[str, float]]]:
    """The scores of each algorithm, seed by seed."""
    inputs = np.concatenate([data["x_test"], data["rotated"], data["scribbles"]])
    problem = problem_of(Part(data["x"], data["y"]), Part(inputs, data["y_test"]))
    rows: dict[str, list] = {}
    for seed in range(seeds):
        for name in only:
            began = time.process_time()
            for column, probabilities in ALGORITHMS[name](problem, seed).items():
                scores = scores_of(probabilities, data) | {"seconds": time.process_time() - began}
                rows.setdefault(column, []).append(scores)
                print(column, seed, scores, flush=True)
    return rows


def binary_algorithms(steps: int) -> dict[str, blr.Rule]:
    return {
        "straight_through": blr.straight_through(decaying(10_000.0, steps)),
        "bayesbinn": blr.bayesbinn(decaying(1e-4, steps), relaxation=1e-10, smoothing=1e-10),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist.npz")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=60_000, help="how many of the training images to train on")
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="which algorithms")
    parser.add_argument("--binary", action="store_true", help="the binary networks instead, for five epochs")
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    data = load(arguments.data, arguments.rows)
    if arguments.binary:
        rows, steps = {}, 5 * (len(data["y"]) // BATCH)
        for seed in range(arguments.seeds):
            for name, rule in binary_algorithms(steps).items():
                rows.setdefault(name, []).append(train_binary(rule, data, steps, seed))
                print(name, seed, rows[name][-1], flush=True)
    else:
        rows = compare(data, arguments.seeds, arguments.only)
    text = f"\n{table(rows)}\n"
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
