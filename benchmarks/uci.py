"""UCI regression with one hidden layer of 50: test log-likelihood and RMSE of posteriors and of point estimates.

    python benchmarks/uci.py --data FOLDER [--sets boston yacht] [--methods full vogn adamw] [--splits 20] [--out FILE]

The folder holds `uci_NAME/uci_NAME.npz` with X, y, test_idx (the usual 20 splits) and the published MC-dropout
numbers of each split. Inputs and target are standardised on the training part; the printed numbers are in units of y.
All settings come from the training part alone.

"vogn", "ivon" and the point estimates have one setting for all sets: 4000 steps on batches of 64, a cosine decay,
ReLU, and log σ² of the noise as one more parameter of the network. VOGN and IVON have Adam's rate 1e-3 and a
temperature that rises from 0.01 to 1 over the first half of the steps. The prior's precision of VOGN, IVON and Adam,
and whether VOGN and IVON average over 32 draws or predict at the mean of q, are chosen by `blr.choose_prior` on held-
out rows of the training part. The rate of AdamW (optax's) is 1e-3 or 1e-2 and that of SGD (momentum 0.9) 1e-3, 1e-2
or 1e-1, by a fifth of the training part; with 1e-3 Adam moves log σ² by at most 2 in so few steps. Adam and dropout
have AdamW's rate. The ensemble's five networks have a fifth of the steps each, and a rate of their own; dropout keeps
0.95 of inputs and units and has no prior; last-layer Laplace takes AdamW's features, with δ = 1.

"full", a full Gaussian with generalised Gauss–Newton and the delta method, and "ogn" have a procedure of their own:

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
from functools import cache, cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from threadpoolctl import threadpool_limits

jax.config.update("jax_enable_x64", True)

import bayesrule as blr  # noqa: E402  (JAX's precision must be set first.)
from bayesrule.metrics import gaussian_log_likelihood, mixture_log_likelihood, rmse  # noqa: E402  (JAX's precision must be set first.)
from bayesrule.models.networks import gaussian_nll, mlp, noisy_nll, with_noise  # noqa: E402  (JAX's precision must be set first.)

SETS = ("boston", "concrete", "energy", "power", "wine_red", "yacht")
HIDDEN, ROUNDS, HELD_OUT, DRAWS, BATCH = 50, 60, 0.2, 100, 32
WARM_STEPS, WARM_RATE, WARM_NOISES = 1500, 2e-2, (0.5, 0.05)

STEPS, STEP_BATCH, RATE, FIRST_TEMPERATURE, MEMBERS, KEPT = 4000, 64, 1e-3, 0.01, 5, 0.95
RATES = {"adamw": (1e-3, 1e-2), "sgd": (1e-3, 1e-2, 1e-1)}

BY_ROUNDS = {
    "ogn": (blr.ogn(0.02, relative=False, decay=0.99, curvature=10.0), 50),
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
        self.rates = {}
        self.key, self.start_key = jax.random.split(jax.random.key(number))

    @cached_property
    def starts(self):
        """Adam's parameters for the part that is not held out, and for the training part, at each noise."""
        return [
            (warm_start(*self.part, noise, self.start_key), warm_start(*self.all, noise, self.start_key))
            for noise in WARM_NOISES
        ]

    def rate_of(self, name, steps):
        """The rate of an optimizer of optax for so many steps, by the log-likelihood of the part that is held out."""
        if (name, steps) not in self.rates:
            held = {}
            for rate in RATES[name]:
                params = _optax_loop(optimizer_of(name, rate, steps), steps, *self.part, self.key)
                likelihood = judge(params, self.held, method="mean")[0]
                held[rate] = likelihood if np.isfinite(likelihood) else -np.inf
            self.rates[name, steps] = max(held, key=lambda rate: held[rate])
        return self.rates[name, steps]

    def scores(self, method):
        """Test log-likelihood and RMSE in the units of y."""
        likelihood, error = self._by_rounds(method) if method in BY_ROUNDS else AT_ONE_SETTING[method](self)
        return likelihood - np.log(self.unit), error * self.unit

    def _by_rounds(self, method):
        """Test log-likelihood and RMSE of standardised targets by the procedure of rounds."""
        rule, steps = BY_ROUNDS[method]
        held_out = [train(rule, p, *self.part, self.held, ROUNDS, self.key, steps=steps)[2] for p, _ in self.starts]
        likelihoods = np.nan_to_num(np.stack(held_out)[:, :, 0], nan=-np.inf)
        start, best, predictive = np.unravel_index(np.argmax(likelihoods), likelihoods.shape)
        params, rounds = self.starts[start][1], int(best) + 1
        q, noise, _ = train(rule, params, *self.all, None, rounds, self.key, steps=steps)
        apply = network(self.all[0].shape[1])[1]
        return np.asarray(evaluate(q, apply, *self.test, noise, jax.random.clone(self.key)))[:, predictive]


# At one setting: the network has log σ² as a parameter, and a method returns the log-likelihood and RMSE on test rows.


@cache
def noisy_network(inputs):
    return with_noise(mlp((inputs, HIDDEN, 1)), 1)


@cache
def decaying(rate, steps):
    return optax.cosine_decay_schedule(rate, steps)


@cache
def rule_of(name, rate=RATE):
    schedule = decaying(rate, STEPS)
    if name == "dropout":
        rule = blr.adam(schedule)
        return rule.replace(family=rule.family.dropped(KEPT), points=blr.Masks())
    if name == "adam":
        return blr.adam(schedule)
    temperature = optax.linear_schedule(FIRST_TEMPERATURE, 1.0, STEPS // 2)
    return {"vogn": blr.vogn, "ivon": blr.ivon}[name](schedule, temperature=temperature)


@cache
def likelihood_and_mean(inputs):
    """A function of θ and an example: its likelihood, and the prediction."""
    apply = noisy_network(inputs).apply

    def both(theta, example):
        x, y = example
        output = apply(theta, x)
        return jnp.stack([jnp.exp(-noisy_nll(output, y[None])), output[0]])

    return both


def judge(q, data, **options):
    """Mean log-likelihood and RMSE of predictions averaged over q, by any method of `blr.predict`."""
    likelihoods, means = np.asarray(blr.predict(q, likelihood_and_mean(data[0].shape[1]), data, **options)).T
    return np.array([np.mean(np.log(np.maximum(likelihoods, 1e-300))), rmse(means, data[1])])


def fit_options(split, key):
    x, y = split.all
    start, order = jax.random.split(key)
    objective = blr.Objective(noisy_nll, output=noisy_network(x.shape[1]).apply, size=len(y), regularizer=0.0)
    options = {"steps": STEPS, "batch_size": min(STEP_BATCH, len(y)), "key": order}
    return objective, noisy_network(x.shape[1]).init(start), (x, y[:, None]), options


def by_rule(name):
    def scores(split):
        objective, start, data, options = fit_options(split, split.key)
        methods = ("mean",) if name == "adam" else ("samples", "mean")
        rule = rule_of(name, split.rate_of("adamw", STEPS)) if name == "adam" else rule_of(name)
        chosen = blr.choose_prior(rule, objective, start, data, methods=methods, **options)
        return judge(chosen.q, split.test, method=chosen.method, key=jax.random.key(17), samples=32)

    return scores


def mc_dropout(split):
    objective, start, data, options = fit_options(split, split.key)
    q = blr.fit(rule_of("dropout", split.rate_of("adamw", STEPS)), objective, start, data, **options).q
    return judge(q, split.test, points=blr.Masks(32), key=jax.random.key(17))


@partial(jax.jit, static_argnums=(0, 1))
def _optax_loop(optimizer, steps, x, y, key):
    model, (start, rest) = noisy_network(x.shape[1]), jax.random.split(key)

    def loss(params, rows):
        out = jax.vmap(model.apply, (None, 0))(params, x[rows])
        return jnp.mean(jax.vmap(noisy_nll)(out, y[rows][:, None]))

    def step(carry, key):
        params, state = carry
        rows = jax.random.randint(key, (min(STEP_BATCH, len(y)),), 0, len(y))
        update, state = optimizer.update(jax.grad(loss)(params, rows), state, params)
        return (optax.apply_updates(params, update), state), None

    params = model.init(start)
    return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(rest, steps))[0][0]


@cache
def optimizer_of(name, rate, steps):
    schedule = decaying(rate, steps)
    return optax.adamw(schedule) if name == "adamw" else optax.sgd(schedule, momentum=0.9)


def train_optax(name, split, key, steps=STEPS):
    return _optax_loop(optimizer_of(name, split.rate_of(name, steps), steps), steps, *split.all, key)


def by_optax(name):
    return lambda split: judge(train_optax(name, split, split.key), split.test, method="mean")


def ensemble(split):
    steps, both, (x, y) = STEPS // MEMBERS, likelihood_and_mean(split.test[0].shape[1]), split.test
    keys = jax.random.split(split.key, MEMBERS)
    members = [train_optax("adamw", split, key, steps) for key in keys]
    likelihoods, means = np.mean([blr.predict(m, both, (x, y), method="mean") for m in members], axis=0).T
    return np.array([np.mean(np.log(np.maximum(likelihoods, 1e-300))), rmse(means, y)])


def last_layer_laplace(split):
    params = train_optax("adamw", split, split.key)
    first, last = params["layer0"], params["layer1"]
    features = lambda x: np.column_stack([jax.nn.relu(x @ first["w"] + first["b"]), np.ones(len(x))])
    weights, noise = np.append(last["w"][:, 0], last["b"][0]), float(jnp.exp(params["log_noise"][0]))
    inputs, (x, y) = features(split.all[0]), split.test
    precision = inputs.T @ inputs / noise + np.eye(inputs.shape[1])
    variance = np.sum(features(x) * np.linalg.solve(precision, features(x).T).T, axis=1)
    mean = features(x) @ weights
    return np.array([gaussian_log_likelihood(mean, variance, y, noise), rmse(mean, y)])


AT_ONE_SETTING = {
    "vogn": by_rule("vogn"),
    "ivon": by_rule("ivon"),
    "adam, prior": by_rule("adam"),
    "adamw": by_optax("adamw"),
    "sgd": by_optax("sgd"),
    "ensemble of 5": ensemble,
    "dropout here": mc_dropout,
    "last-layer Laplace": last_layer_laplace,
}
METHODS = (*AT_ONE_SETTING, *BY_ROUNDS)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
