"""UCI regression with one hidden layer of 50: test log-likelihood and RMSE of posteriors and of point estimates.

    python benchmarks/uci.py --data FOLDER [--sets boston yacht] [--methods full vogn adamw] [--splits 20] [--out FILE]

The folder holds `uci_NAME/uci_NAME.npz` with X, y, test_idx (the usual 20 splits) and the published MC-dropout
numbers of each split. Inputs and target are standardised on the training part; the printed numbers are in units of y.
All settings come from the training part alone.

"vogn", "ivon" and the point estimates have one setting for all sets: 2000 steps on batches of 64, a cosine decay,
ReLU, and log σ² of the noise as one more parameter of the network. VOGN and IVON are `blr.vogn(1e-3)` and
`blr.ivon(1e-3)` with all defaults (the decay and a temperature that rises to 1 over the first half of the steps are
among them). What is left is chosen by the log-likelihood of a fifth of the training part that is held out, for each
split by itself, and then all of the training part is fitted: the prior's precision of VOGN, IVON and Adam (0.1, 1 or
10), whether VOGN and IVON average over 32 draws or predict at the mean of q, the rate of AdamW (optax's), Adam, dropout
and the ensemble (1e-3 or 1e-2; with 1e-3 Adam moves log σ² by at most 2 in so few steps) and of SGD with momentum 0.9
(1e-3, 1e-2 or 1e-1). The ensemble's five networks have a fifth of the steps each; dropout keeps 0.95 of inputs and
units and has no prior; last-layer Laplace takes AdamW's features, with δ = 1. All 20 splits of a set are trained side
by side by `vmap`.

"full", a full Gaussian with generalised Gauss–Newton and the delta method, and "ogn" have a procedure of their own,
which takes hours and is run only if they are asked for:

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from threadpoolctl import threadpool_limits

import bayesrule as blr
from bayesrule.metrics import gaussian_log_likelihood, mixture_log_likelihood, rmse
from bayesrule.models.networks import gaussian_nll, mlp, noisy_nll, with_noise

SETS = ("boston", "concrete", "energy", "power", "wine_red", "yacht")
HIDDEN, ROUNDS, HELD_OUT, DRAWS, BATCH = 50, 60, 0.2, 100, 32
WARM_STEPS, WARM_RATE, WARM_NOISES = 1500, 2e-2, (0.5, 0.05)

STEPS, STEP_BATCH, RATE, MEMBERS, KEPT = 2000, 64, 1e-3, 5, 0.95
PRECISIONS = (0.1, 1.0, 10.0)
INPUTS, TRAINING_ROWS, SCORED_ROWS = 13, 8700, (300, 1800)  # As many as the largest set has, or more.
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
        self.key, self.start_key = jax.random.split(jax.random.key(number))

    @cached_property
    def starts(self):
        """Adam's parameters for the part that is not held out, and for the training part, at each noise."""
        return [
            (warm_start(*self.part, noise, self.start_key), warm_start(*self.all, noise, self.start_key))
            for noise in WARM_NOISES
        ]

    def by_rounds(self, method):
        """Test log-likelihood and RMSE of standardised targets by the procedure of rounds."""
        rule, steps = BY_ROUNDS[method]
        held_out = [train(rule, p, *self.part, self.held, ROUNDS, self.key, steps=steps)[2] for p, _ in self.starts]
        likelihoods = np.nan_to_num(np.stack(held_out)[:, :, 0], nan=-np.inf)
        start, best, predictive = np.unravel_index(np.argmax(likelihoods), likelihoods.shape)
        params, rounds = self.starts[start][1], int(best) + 1
        q, noise, _ = train(rule, params, *self.all, None, rounds, self.key, steps=steps)
        apply = network(self.all[0].shape[1])[1]
        return np.asarray(evaluate(q, apply, *self.test, noise, jax.random.clone(self.key)))[:, predictive]


# At one setting: the network has log σ² as a parameter. All splits of a set are trained side by side by `vmap`, and so
# are all settings among which the held-out rows choose; a method returns the scores of every split on its test rows.


class Rows(NamedTuple):
    """Rows of a part of every split, filled up with zeros to the same shape for all sets; `count` of them are real."""

    x: jax.Array
    y: jax.Array
    count: jax.Array


class Splits:
    """All splits of a set, stacked along a first axis.

    Rows and inputs are filled up with zeros, so that one program per method serves all sets: compiling them for each
    set would take longer than running them.
    """

    def __init__(self, splits):
        self.inputs = splits[0].all[0].shape[1]
        self.all, self.part = (self._stacked(splits, part, TRAINING_ROWS) for part in ("all", "part"))
        held = len(splits[0].held[1])
        rows = next(rows for rows in SCORED_ROWS if rows >= held)
        self.held, self.test = (self._stacked(splits, part, rows) for part in ("held", "test"))
        self.keys = jnp.stack([split.key for split in splits])

    def _stacked(self, splits, part, rows):
        pad = lambda array, shape: np.pad(array, [(0, n - m) for n, m in zip(shape, array.shape, strict=True)])
        x, y = zip(*(getattr(split, part) for split in splits), strict=True)
        filled = np.stack([pad(each, (rows, INPUTS)) for each in x]), np.stack([pad(each, (rows,)) for each in y])
        return Rows(*(jnp.asarray(each, jnp.float32) for each in filled), jnp.array([len(each) for each in y]))

    def chosen(self, learn, settings, points):
        """Each split's q on its whole training part by its best setting, and the index of its best points.

        Args:
            learn: A compiled function of the rows, keys, the number of inputs and settings of all splits, which
                returns every split's q, or parameters.
            settings: Tuples of numbers.
            points: Functions of q and a key that return θ along a first axis, to average predictions over.
        """
        lanes = lambda setting: jnp.asarray(np.broadcast_to(setting, (len(self.keys), len(settings[0]))), jnp.float32)
        tried = [learn(self.part, self.keys, self.inputs, lanes(setting)) for setting in settings]
        held = np.array([[scores_of(of, q, self.held, self.keys)[:, 0] for q in tried] for of in points])
        held = np.where(np.isfinite(held), held, -np.inf)  # points × settings × splits
        which, best = np.unravel_index(held.reshape(-1, held.shape[-1]).argmax(axis=0), held.shape[:2])
        return learn(self.all, self.keys, self.inputs, lanes(np.array(settings)[best])), which

    def scores(self, q, which, points):
        """Log-likelihood and RMSE on the test rows of each split, with the points that it has chosen."""
        return np.stack([scores_of(of, q, self.test, self.keys) for of in points])[which, np.arange(len(which))]


NETWORK = with_noise(mlp((INPUTS, HIDDEN, 1)), 1)


def first_params(key, inputs):
    """The network's first weights, in the scale that a network with so many inputs has."""
    params = NETWORK.init(key)
    params["layer0"]["w"] = params["layer0"]["w"] * jnp.sqrt(INPUTS / inputs)
    return params


@partial(jax.jit, static_argnums=0)
@partial(jax.vmap, in_axes=(None, 0, 0, 0))
def scores_of(points, q, rows, key):
    """Mean log-likelihood and RMSE of predictions averaged over the points, for every split."""
    theta = points(q, jax.random.fold_in(key, 1))
    outputs = jax.vmap(jax.vmap(NETWORK.apply, (None, 0)), (0, None))(theta, rows.x)
    losses = jax.vmap(jax.vmap(noisy_nll), (0, None))(outputs, rows.y[:, None])
    likelihoods = jax.nn.logsumexp(-losses, axis=0) - jnp.log(len(losses))
    squares = (jnp.mean(outputs[..., 0], axis=0) - rows.y) ** 2
    average = lambda values: jnp.sum(jnp.where(jnp.arange(len(values)) < rows.count, values, 0)) / rows.count
    return jnp.stack([average(likelihoods), jnp.sqrt(average(squares))])


def at_mean(q, key):
    return jax.tree.map(lambda leaf: leaf[None], getattr(q, "mean", q))


def at_draws(q, key):
    return blr.MonteCarlo(32).at(q, key).theta


def at_masks(q, key):
    return blr.Masks(32).at(q, key).theta


def fall(rate, steps):
    """A rate that falls to 0 along half a cosine; the rate may be traced."""
    return lambda count: rate * 0.5 * (1 + jnp.cos(jnp.pi * count / steps))


def batch_rows(key, rows):
    """A batch of different or equal rows, as inputs and targets."""
    chosen = jax.random.randint(key, (STEP_BATCH,), 0, rows.count)
    return rows.x[chosen], rows.y[chosen][:, None]


def side_by_side(learn):
    """A function of one split's rows, key, number of inputs and setting, for all splits and compiled."""
    return jax.jit(jax.vmap(learn, (0, 0, None, 0)))


@cache
def learn_by_rule(name):
    """A setting is the prior's precision and Adam's rate."""

    def learn(rows, key, inputs, setting):
        start, rest = jax.random.split(key)
        precision, rate = setting
        if name in ("vogn", "ivon"):
            rule = {"vogn": blr.vogn, "ivon": blr.ivon}[name](RATE)
        else:
            rule = blr.adam(fall(rate, STEPS))
        if name == "dropout":
            rule = rule.replace(family=rule.family.dropped(KEPT), points=blr.Masks())
        regularizer = 0.0 if name == "dropout" else precision
        objective = blr.Objective(noisy_nll, output=NETWORK.apply, size=rows.count, regularizer=regularizer)
        state = rule.init(first_params(start, inputs), objective, horizon=STEPS)

        def step(state, key):
            of_rows, of_step = jax.random.split(key)
            return rule.step(objective, state, batch_rows(of_rows, rows), of_step)[0], None

        return jax.lax.scan(step, state, jax.random.split(rest, STEPS))[0].q

    return side_by_side(learn)


def learn_by_optax(name, steps):
    """A setting is the rate."""

    def learn(rows, key, inputs, setting):
        start, rest = jax.random.split(key)
        rate = fall(setting[0], steps)
        optimizer = optax.adamw(rate) if name == "adamw" else optax.sgd(rate, momentum=0.9)

        def loss(params, batch):
            out = jax.vmap(NETWORK.apply, (None, 0))(params, batch[0])
            return jnp.mean(jax.vmap(noisy_nll)(out, batch[1]))

        def step(carry, key):
            params, state = carry
            update, state = optimizer.update(jax.grad(loss)(params, batch_rows(key, rows)), state, params)
            return (optax.apply_updates(params, update), state), None

        params = first_params(start, inputs)
        return jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(rest, steps))[0][0]

    return learn


@cache
def learn_point(name):
    return side_by_side(learn_by_optax(name, STEPS))


@cache
def learn_members():
    one = learn_by_optax("adamw", STEPS // MEMBERS)
    each = jax.vmap(one, (None, 0, None, None))
    return side_by_side(lambda rows, key, *rest: each(rows, jax.random.split(key, MEMBERS), *rest))


def by_rule(name):
    points = {"adam": (at_mean,), "dropout": (at_masks,)}.get(name, (at_draws, at_mean))
    precisions = (0.0,) if name == "dropout" else PRECISIONS
    rates = RATES["adamw"] if name in ("adam", "dropout") else (RATE,)
    settings = [(precision, rate) for precision in precisions for rate in rates]

    def scores(splits):
        q, which = splits.chosen(learn_by_rule(name), settings, points)
        return splits.scores(q, which, points)

    return scores


def by_optax(name):
    def scores(splits):
        params, which = splits.chosen(learn_point(name), [(rate,) for rate in RATES[name]], (at_mean,))
        splits.features = params if name == "adamw" else getattr(splits, "features", None)
        return splits.scores(params, which, (at_mean,))

    return scores


def all_members(params, key):
    return params


def ensemble(splits):
    params, which = splits.chosen(learn_members(), [(rate,) for rate in RATES["adamw"]], (all_members,))
    return splits.scores(params, which, (all_members,))


@jax.jit
@jax.vmap
def laplace_scores(params, train, test):
    first, last = params["layer0"], params["layer1"]
    features = lambda x: jnp.column_stack([jax.nn.relu(x @ first["w"] + first["b"]), jnp.ones(len(x))])
    weights, noise = jnp.append(last["w"][:, 0], last["b"][0]), jnp.exp(params["log_noise"][0])
    real = lambda rows: (jnp.arange(len(rows.y)) < rows.count)[:, None]
    inputs, new = features(train.x) * real(train), features(test.x)
    precision = inputs.T @ inputs / noise + jnp.eye(inputs.shape[1])
    variance = noise + jnp.sum(new * jnp.linalg.solve(precision, new.T).T, axis=1)
    squares = (new @ weights - test.y) ** 2
    likelihoods = -0.5 * (jnp.log(2 * jnp.pi * variance) + squares / variance)
    average = lambda values: jnp.sum(jnp.where(real(test)[:, 0], values, 0)) / test.count
    return jnp.stack([average(likelihoods), jnp.sqrt(average(squares))])


def last_layer_laplace(splits):
    if getattr(splits, "features", None) is None:
        AT_ONE_SETTING["adamw"](splits)
    return np.asarray(laplace_scores(splits.features, splits.all, splits.test))


AT_ONE_SETTING = {
    "vogn": by_rule("vogn"),
    "ivon": by_rule("ivon"),
    "adam, prior": by_rule("adam"),
    "adamw": by_optax("adamw"),
    "sgd": by_optax("sgd"),
    "ensemble of 5": ensemble,
    "dropout here": by_rule("dropout"),
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
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(AT_ONE_SETTING))
    parser.add_argument("--splits", type=int, default=20, help="how many of the splits to run")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    if any(method in BY_ROUNDS for method in arguments.methods):
        jax.config.update("jax_enable_x64", True)  # The full Gaussian's matrices need it.

    results, began, lines = {}, time.perf_counter(), []
    for name in arguments.sets:
        file = np.load(arguments.data / f"uci_{name}" / f"uci_{name}.npz")
        numbers = range(min(arguments.splits, len(file["test_idx"])))
        published = np.stack([file["mcdropout_test_ll"], file["mcdropout_test_MC_rmse"]], axis=1)[: len(numbers)]
        results[name] = {"MC dropout": published}
        with threadpool_limits(1, "blas"):  # The threads of XLA and LAPACK would wait for each other.
            splits = [Split(file, number) for number in numbers]
            units, together = np.array([split.unit for split in splits]), Splits(splits)
            for method in arguments.methods:
                start = time.perf_counter()
                if method in BY_ROUNDS:
                    scores = np.array([split.by_rounds(method) for split in splits])
                else:
                    scores = np.asarray(AT_ONE_SETTING[method](together))
                # In the units of y.
                results[name][method] = np.column_stack([scores[:, 0] - np.log(units), scores[:, 1] * units])
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
        if arguments.out:  # After every set, so that a run that is cut short leaves what it has.
            arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
