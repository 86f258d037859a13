"""UCI regression with one hidden layer of 50: test log-likelihood and RMSE of five posteriors and of MC dropout.

    python benchmarks/uci.py --data FOLDER [--sets boston yacht] [--methods full ogn] [--splits 5] [--out table.md]

The folder holds `uci_NAME/uci_NAME.npz` with X, y, test_idx (the usual 20 splits) and the published MC-dropout
numbers of each split. Inputs and target are standardised on the training part; the printed numbers are in units of y.

One procedure sets every number for all sets and methods, from the training part alone:

- The prior is N(0, 1/(δ·inputs)) for weights and N(0, 1/δ) for biases, and the noise variance is σ². Each method starts
  from the mean that the same run of Adam found at δ = 1 and σ² = 0.5 or 0.05 (one underfits, one overfits), and does up
  to 60 rounds of its steps. After each round δ and σ² are set to the maximum of the bound given q (EM): δ = P/E‖θ‖², at
  most 1, and σ² = (‖r‖² + σ²γ)/N, with the residuals r at q's mean and the effective number of parameters
  γ = Σ(1 − δ·var θ), at most 0.7N. (The two limits keep the mean-field methods from pruning the network early.)
- First a fifth of the training part is held out. Its log-likelihood chooses the start, the number of rounds and the
  predictive distribution: linearised (Gaussian) or the mixture over samples. Then the method runs on all training rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from threadpoolctl import threadpool_limits

jax.config.update("jax_enable_x64", True)

import bayesrule as blr  # noqa: E402  (JAX's precision must be set first.)
from bayesrule.metrics import gaussian_log_likelihood, mixture_log_likelihood, rmse  # noqa: E402  (JAX's precision must be set first.)
from bayesrule.models.networks import gaussian_nll, mlp  # noqa: E402  (JAX's precision must be set first.)

SETS = ("boston", "concrete", "energy", "power", "wine_red", "yacht")
HIDDEN, ROUNDS, HELD_OUT, DRAWS, BATCH = 50, 60, 0.2, 100, 32
WARM_STEPS, WARM_RATE, WARM_NOISES = 1500, 2e-2, (0.5, 0.05)

ONLINE = {"decay": 0.99, "curvature": 10.0}
METHODS = {
    "ogn": (blr.ogn(0.02, relative=False, **ONLINE), 50),
    "vogn": (blr.vogn(0.02, samples=2, antithetic=True, relative=False, **ONLINE), 50),
    "ivon": (blr.ivon(0.02, samples=2, antithetic=True, relative=False, **ONLINE), 50),
    "slang": (blr.slang(0.02, **ONLINE), 50),
    "full": (blr.Rule(blr.Gaussian, blr.Delta(), blr.GeneralizedGaussNewton(), blr.Steps(0.3), name="full"), 1),
}
"""The algorithm, and the number of its steps in a round: mini-batches, or one step on all examples."""


@cache
def network(inputs):
    """`init` and `apply` for weights in units of 1/√inputs, so that one prior precision serves all of them."""
    plain = mlp((inputs, HIDDEN, 1), jnp.tanh)
    units = {"layer0": {"w": inputs**-0.5, "b": 1.0}, "layer1": {"w": HIDDEN**-0.5, "b": 1.0}}
    init = lambda key: jax.tree.map(lambda u, w: w / u, units, plain.init(key))
    apply = lambda params, x: plain.apply(jax.tree.map(lambda u, w: u * w, units, params), x)[0]
    return init, apply


def loss(output, target):
    """The noise variance is part of the target, so that it can change without compiling again."""
    return gaussian_nll(output, target[0], target[1])


def batch_of(x, y, noise, key=None):
    """All examples, or a random BATCH of them if there is a key."""
    if key is not None:
        index = jax.random.randint(key, (BATCH,), 0, len(y))
        x, y = x[index], y[index]
    return x, (y, jnp.broadcast_to(noise, y.shape))


def outputs(apply, theta, x):
    return jax.vmap(apply, (None, 0))(theta, x)


def update_hyperparameters(q, apply, x, y, noise, delta):
    """The σ² and δ that maximise the bound for this q."""
    total = lambda tree: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))
    size, variance = sum(leaf.size for leaf in jax.tree.leaves(q.mean)), total(q.variance())
    effective = jnp.clip(size - delta * variance, 0, 0.7 * len(y))
    residuals = outputs(apply, q.mean, x) - y
    noise = (jnp.sum(residuals**2) + noise * effective) / len(y)
    return noise, jnp.minimum(size / (total(jax.tree.map(jnp.square, q.mean)) + variance), 1.0)


def evaluate(q, apply, x, y, noise, key):
    """Log-likelihood and RMSE (rows) of the linearised predictive and of the mixture (columns)."""
    mean, variance = blr.predict(q, apply, x, method="linearized", variance=True)
    draws = jax.vmap(lambda theta: outputs(apply, theta, x))(q.sample(key, (DRAWS,)))
    likelihoods = gaussian_log_likelihood(mean, variance, y, noise), mixture_log_likelihood(draws, y, 1 / noise)
    return jnp.stack([jnp.stack(likelihoods), jnp.stack([rmse(mean, y), rmse(jnp.mean(draws, axis=0), y)])])


@jax.jit
def warm_start(x, y, noise, key):
    """The parameters that Adam finds with prior precision 1 and this noise variance."""
    init, apply = network(x.shape[1])
    objective = blr.Objective(loss, output=apply, size=len(y), regularizer=1.0)
    first, rest = jax.random.split(key)
    rule = blr.adam(optax.cosine_decay_schedule(WARM_RATE, WARM_STEPS), damping="prior")
    step = lambda state, key: (rule.step(objective, state, batch_of(x, y, noise, key))[0], None)
    return jax.lax.scan(step, rule.init(init(first), objective), jax.random.split(rest, WARM_STEPS))[0].q.mean


@partial(jax.jit, static_argnames="steps")
def train(rule, params, x, y, held, rounds, key, *, steps):
    """q and σ² after some rounds, and the result of `evaluate` on the held-out part, if there is one, after each."""
    apply = network(x.shape[1])[1]
    objective = lambda delta: blr.Objective(loss, output=apply, size=len(y), regularizer=delta)
    noise = jnp.mean((outputs(apply, params, x) - y) ** 2)
    start = rule.init(params, objective(1.0)), noise, jnp.asarray(1.0), jnp.full((ROUNDS, 2, 2), jnp.nan)

    def one_round(number, carry):
        state, noise, delta, scores = carry
        steps_key, judge_key = jax.random.split(jax.random.fold_in(key, number))

        def step(state, key):
            which, points = jax.random.split(key)
            batch = batch_of(x, y, noise, which if steps > 1 else None)
            return rule.step(objective(delta), state, batch, points)[0], None

        state = jax.lax.scan(step, state, jax.random.split(steps_key, steps))[0]
        noise, delta = update_hyperparameters(state.q, apply, x, y, noise, delta)
        if held is not None:
            scores = scores.at[number].set(evaluate(state.q, apply, *held, noise, judge_key))
        return state, noise, delta, scores

    state, noise, _, scores = jax.lax.fori_loop(0, rounds, one_round, start)
    return state.q, noise, scores


class Split:
    """One split of a set: the training part, the part of it that is held out, and the test part, standardised."""

    def __init__(self, file, number):
        x, y, test = file["X"], file["y"], file["test_idx"][number]
        train = np.setdiff1d(np.arange(len(y)), test)
        std = x[train].std(0)
        x = (x - x[train].mean(0)) / np.where(std == 0, 1.0, std)
        self.unit = y[train].std()
        y = (y - y[train].mean()) / self.unit
        shuffled = np.random.default_rng(number).permutation(train)
        held = int(HELD_OUT * len(train))
        self.all, self.part, self.held, self.test = (
            (x[i], y[i]) for i in (train, shuffled[held:], shuffled[:held], test)
        )
        self.key, key = jax.random.split(jax.random.key(number))
        self.starts = [(warm_start(*self.part, noise, key), warm_start(*self.all, noise, key)) for noise in WARM_NOISES]

    def scores(self, method):
        """Test log-likelihood and RMSE in the units of y."""
        rule, steps = METHODS[method]
        held_out = [train(rule, p, *self.part, self.held, ROUNDS, self.key, steps=steps)[2] for p, _ in self.starts]
        likelihoods = np.nan_to_num(np.stack(held_out)[:, :, 0], nan=-np.inf)
        start, best, predictive = np.unravel_index(np.argmax(likelihoods), likelihoods.shape)
        params, rounds = self.starts[start][1], int(best) + 1
        q, noise, _ = train(rule, params, *self.all, None, rounds, self.key, steps=steps)
        apply = network(self.all[0].shape[1])[1]
        likelihood, error = np.asarray(evaluate(q, apply, *self.test, noise, jax.random.clone(self.key)))[:, predictive]
        return likelihood - np.log(self.unit), error * self.unit


def table(title, results, which, better):
    """A table of mean ± standard error over the splits, and in how many of them the method beats MC dropout."""
    methods = list(next(iter(results.values())))
    lines = [f"**{title}**", "", f"| set | {' | '.join(methods)} |", f"|---|{'---|' * len(methods)}"]
    for name, rows in results.items():
        published = rows["MC dropout"][:, which]
        best = max(rows, key=lambda method: better * np.mean(rows[method][:, which]))
        cells = []
        for method, values in rows.items():
            values = values[:, which]
            error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
            cell = f"{np.mean(values):.3f} ± {error:.3f}"
            cell = f"**{cell}**" if method == best else cell
            wins = f" ({np.sum(better * (values - published) > 0)}/{len(values)})"
            cells.append(cell + (wins if method != "MC dropout" else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def count_better_sets(results, methods):
    """On how many sets the average test log-likelihood is above the published one."""
    average = {name: {m: np.mean(v[:, 0]) for m, v in rows.items()} for name, rows in results.items()}
    count = lambda chosen: sum(max(a[m] for m in chosen) > a["MC dropout"] for a in average.values())
    each = ", ".join(f"{method} {count([method])}" for method in methods)
    return f"Sets of {len(results)} with a better average log-likelihood than MC dropout: {each}; any {count(methods)}."


def main():
    parser = argparse.ArgumentParser(description="UCI regression: five posteriors and published MC dropout.")
    parser.add_argument("--data", type=Path, required=True, help="folder with uci_NAME/uci_NAME.npz")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--splits", type=int, default=20, help="how many of the splits to run")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()

    results, began = {}, time.perf_counter()
    for name in arguments.sets:
        file = np.load(arguments.data / f"uci_{name}" / f"uci_{name}.npz")
        numbers = range(min(arguments.splits, len(file["test_idx"])))
        published = np.stack([file["mcdropout_test_ll"], file["mcdropout_test_MC_rmse"]], axis=1)[: len(numbers)]
        results[name] = {"MC dropout": published}
        with threadpool_limits(1, "blas"):  # The threads of XLA and LAPACK would wait for each other.
            splits = [Split(file, number) for number in numbers]
            for method in arguments.methods:
                start = time.perf_counter()
                results[name][method] = np.array([split.scores(method) for split in splits])
                likelihood, error = results[name][method].mean(0)
                line = f"{name} {method}: {likelihood:.3f}, RMSE {error:.3f}, {time.perf_counter() - start:.0f} s"
                print(line, file=sys.stderr, flush=True)

    lines = [
        *table("Test log-likelihood (in brackets: splits better than MC dropout)", results, 0, 1),
        "",
        *table("Test RMSE", results, 1, -1),
        "",
        count_better_sets(results, arguments.methods),
        f"{time.perf_counter() - began:.0f} s.",
    ]
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
