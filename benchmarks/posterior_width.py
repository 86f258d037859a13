"""Is the width of a network's posterior that of the data, or of where it started?

    python benchmarks/posterior_width.py --data FOLDER [--epochs 5] [--rate 0.5] [--prior 10]

FOLDER/mnist.npz has X and y, of which 10,000 images are trained on and 5,000 others are for validation; no test image
is read. Two things are measured for the published settings of VOGN and IVON (a start of 1, and a decay of 0.999 or
0.99999) and for a measured start with a window in epochs, at the same rate in gradient descent's units:

- the spread of S/N over the weights of an MLP 784-100-10, beside the Gauss–Newton diagonal plus the prior,
  (Σᵢ gᵢ² + δ)/N at the mean and averaged over eight draws of q, computed from every example's gradient;
- three permutations of the pixels learnt one after another, each with the posterior of the one before as its prior:
  the mean accuracy on all three at the end.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bayesrule as blr
from bayesrule import metrics
from bayesrule.models import networks

BATCH, ROWS, DRAWS = 128, 10_000, 16
NETWORK = networks.mlp((784, 100, 10))
SETTINGS = {
    "vogn, published": lambda rate: blr.vogn(rate, decay=0.999, curvature=1.0),
    "vogn": lambda rate: blr.vogn(rate, relative=True),
    "ivon, published": lambda rate: blr.ivon(rate, decay=0.99999, curvature=1.0),
    "ivon": lambda rate: blr.ivon(rate, relative=True),
}


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def loss(params, example):
    return networks.softmax_cross_entropy(NETWORK.apply(params, example[0]), example[1])


@jax.jit
def sum_of_squares(params, x, y):
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, (x, y))
    return jax.tree.map(lambda g: jnp.sum(g**2, axis=0), gradients)


def gauss_newton(params, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Σᵢ gᵢ² for every weight, from the gradients of 100 examples at a time."""
    return sum(flat(sum_of_squares(params, x[i : i + 100], y[i : i + 100])) for i in range(0, len(y), 100))


def accuracy(q, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The accuracy and the NLL of averaged predictions."""
    predicted = blr.predict(q, NETWORK.apply, x, key=jax.random.key(2), samples=DRAWS, link="softmax")
    return float(metrics.accuracy(predicted, y)), float(metrics.nll(predicted, y))


def learn_in_turn(rule: blr.Rule, data: dict, prior: float, epochs: int) -> dict:
    """The first posterior, and the accuracies on all permutations after the last."""
    random = np.random.default_rng(0)
    orders = [np.arange(784), random.permutation(784), random.permutation(784)]
    params = NETWORK.init(jax.random.key(0))
    before = blr.DiagonalGaussian(jax.tree.map(jnp.zeros_like, params), prior)
    steps, posteriors = epochs * -(-ROWS // BATCH), []
    for task, order in enumerate(orders):
        objective = blr.Objective(networks.softmax_cross_entropy, output=NETWORK.apply, size=ROWS, prior=before)
        rows = data["x"][:, order], data["y"]
        result = blr.fit(rule, objective, params, rows, steps=steps, batch_size=BATCH, key=jax.random.key(task))
        before, params = result.q, result.q.mean
        posteriors.append(result.q)
    last = [accuracy(before, data["x_validation"][:, order], data["y_validation"])[0] for order in orders]
    return {"first": posteriors[0], "accuracies": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist.npz")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--prior", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", default=list(SETTINGS))
    arguments = parser.parse_args()
    file = np.load(arguments.data / "mnist.npz")
    x, y = (file["X"].reshape(len(file["X"]), -1) / 255).astype(np.float32), file["y"].astype(np.int32)
    data = {"x": x[:ROWS], "y": y[:ROWS], "x_validation": x[-5000:], "y_validation": y[-5000:]}
    shown = lambda values: " ".join(f"{value / ROWS:.5f}" for value in np.quantile(values, [0.05, 0.5, 0.95]))
    for name in arguments.only:
        began = time.perf_counter()
        run = learn_in_turn(SETTINGS[name](arguments.rate), data, arguments.prior, arguments.epochs)
        q, precision = run["first"], flat(run["first"].precision)
        at_mean = gauss_newton(q.mean, data["x"], data["y"]) + arguments.prior
        draws = [q.sample(key) for key in jax.random.split(jax.random.key(9), 8)]
        averaged = np.mean([gauss_newton(draw, data["x"], data["y"]) for draw in draws], axis=0) + arguments.prior
        correlation = np.corrcoef(np.log(precision), np.log(averaged))[0, 1]
        accuracy_, nll = accuracy(q, data["x_validation"], data["y_validation"])
        print(f"{name}: S/N {shown(precision)}; Gauss–Newton at the mean {shown(at_mean)}, under q {shown(averaged)}")
        print(f"  correlation of the logarithms {correlation:.3f}; accuracy {accuracy_:.4f}, NLL {nll:.4f}")
        in_turn = " ".join(f"{value:.3f}" for value in run["accuracies"])
        seconds = time.perf_counter() - began
        print(f"  three permutations in turn: {in_turn}, mean {np.mean(run['accuracies']):.3f} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
