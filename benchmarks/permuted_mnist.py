"""Three permutations of MNIST's pixels learnt in turn, each with the posterior of the one before as its prior.

    python benchmarks/permuted_mnist.py --data FOLDER [--seeds 3] [--epochs 12] [--only vogn ivon adam]

FOLDER/mnist/mnist.npz has X, y, X_test, y_test: 10,000 training images for each task, an MLP 784-100-10, batches of
128, the rate 1e-3, a first prior N(0, 1), all else as `fit` has it by default. Adam has the same rate with a cosine
decay in each task, and no posterior to go on from: it goes on from its weights, without a prior. Printed are the
accuracies on the test images of all three tasks at the end, and their mean over tasks and seeds. Nothing was tuned on
test images.
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

ROWS, BATCH, DRAWS, RATE, TASKS = 10_000, 128, 32, 1e-3, 3
NETWORK = networks.mlp((784, 100, 10))


def learn_in_turn(rule: blr.Rule, x: np.ndarray, y: np.ndarray, orders: list[np.ndarray], steps: int, seed: int):
    """The posterior after the last task."""
    params = NETWORK.init(jax.random.key(seed))
    prior = None if rule.points.delta else blr.DiagonalGaussian(jax.tree.map(jnp.zeros_like, params), 1.0)
    for task, order in enumerate(orders):
        objective = blr.Objective(networks.softmax_cross_entropy, output=NETWORK.apply, size=len(y), prior=prior)
        key = jax.random.key(1000 * seed + task)
        q = blr.fit(rule, objective, params, (x[:, order], y), steps=steps, batch_size=BATCH, key=key).q
        prior, params = None if prior is None else q, q.mean
    return q


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist/mnist.npz")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--only", nargs="+", default=["vogn", "ivon", "adam"])
    arguments = parser.parse_args()
    file = np.load(arguments.data / "mnist" / "mnist.npz")
    flat = lambda x: (x.reshape(len(x), -1) / 255).astype(np.float32)
    x, y, x_test, y_test = (
        flat(file["X"][:ROWS]),
        file["y"][:ROWS].astype(np.int32),
        flat(file["X_test"]),
        file["y_test"],
    )
    steps = arguments.epochs * -(-ROWS // BATCH)
    rates = {"adam": optax.cosine_decay_schedule(RATE, steps)}
    for name in arguments.only:
        rule, began, means = getattr(blr, name)(rates.get(name, RATE)), time.perf_counter(), []
        for seed in range(arguments.seeds):
            random = np.random.default_rng(seed)
            orders = [np.arange(784), *(random.permutation(784) for _ in range(TASKS - 1))]
            q = learn_in_turn(rule, x, y, orders, steps, seed)
            method = "mean" if rule.points.delta else "samples"
            options = {"key": jax.random.key(7), "samples": DRAWS, "link": "softmax", "method": method}
            scores = [
                100 * float(metrics.accuracy(blr.predict(q, NETWORK.apply, x_test[:, order], **options), y_test))
                for order in orders
            ]
            means.append(np.mean(scores))
            print(name, seed, " ".join(f"{score:.1f}" for score in scores), f"mean {means[-1]:.1f}", flush=True)
        error = np.std(means, ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
        print(f"{name}: {np.mean(means):.1f} ± {error:.1f} % ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
