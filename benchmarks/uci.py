"""UCI regression with one hidden layer of 50: test log-likelihood and RMSE of five posteriors, beside MC dropout's.

    python benchmarks/uci.py --data FOLDER [--sets boston yacht] [--methods full ogn] [--splits 5] [--out table.md]

The folder holds `uci_NAME/uci_NAME.npz` with X, y, test_idx (the usual 20 splits) and the published MC-dropout
numbers of each split. Inputs and target are standardised on the training part; what is printed is in y's own units.

One rule finds every number for all sets and methods, from the training part alone:

- The weights are N(0, 1/(δ·inputs)) and the biases N(0, 1/δ); the noise is σ². Each method starts from the mean that
  the same run of Adam found, and does ROUNDS rounds of a few of its steps. After each round δ and σ² are set to what
  maximises the bound given q (EM): δ = P/E‖θ‖² and σ² = (‖r‖² + σ²γ)/N, with the residuals r at q's mean and
  γ = Σ(1 − δ·var θ) the number of parameters that the data determine.
- A fifth of the training part is held out first. Where its log-likelihood is highest says how many rounds to do and
  which predictive to use: linearised (Gaussian) or the mixture over draws. Then all is done again on the whole
  training part.
"""

from __future__ import annotations

import argparse
import time
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

jax.config.update("jax_enable_x64", True)

import bayesrule as blr  # noqa: E402  (after the precision is set)
from bayesrule.metrics import gaussian_log_likelihood, mixture_log_likelihood, rmse  # noqa: E402
from bayesrule.models.networks import gaussian_nll, mlp  # noqa: E402

SETS = ("boston", "concrete", "energy", "power", "wine_red", "yacht")
HIDDEN, ROUNDS, HELD_OUT, DRAWS = 50, 60, 0.2, 100
WARM_STEPS, WARM_RATE, WARM_NOISE, BATCH = 1500, 2e-2, 0.5, 64

ONLINE = {"decay": 0.99, "relative": False, "curvature": 10.0}
RULES = {
    "ogn": (blr.ogn(0.02, **ONLINE), 50),
    "vogn": (blr.vogn(0.02, samples=2, antithetic=True, **ONLINE), 50),
    "ivon": (blr.ivon(0.02, samples=2, antithetic=True, **ONLINE), 50),
    "slang": (blr.slang(0.02, samples=2, antithetic=True, **{**ONLINE, "decay": 0.99}), 50),
    "full": (blr.Rule(blr.Gaussian, blr.Delta(), blr.GeneralizedGaussNewton(), blr.Steps(0.3), name="full"), 1),
    "full_bt": (blr.newton().replace(curvature=blr.GeneralizedGaussNewton()), 1),
}
"""The algorithm, and how many of its steps make a round."""


@cache
def network(inputs):
    """`init` and `apply` for weights in units of 1/√inputs, so that one prior precision serves all of them."""
    plain = mlp((inputs, HIDDEN, 1), jnp.tanh)
    units = {"layer0": {"w": inputs**-0.5, "b": 1.0}, "layer1": {"w": HIDDEN**-0.5, "b": 1.0}}
    init = lambda key: jax.tree.map(lambda u, w: w / u, units, plain.init(key))
    apply = lambda params, x: plain.apply(jax.tree.map(lambda u, w: u * w, units, params), x)[0]
    return init, apply


def loss(output, target):
    """The noise comes with the target, so that it can change while the program stays."""
    return gaussian_nll(output, target[0], target[1])


def batch_of(x, y, noise, key=None):
    """All examples, or BATCH of them where a key says which."""
    if key is not None:
        index = jax.random.randint(key, (BATCH,), 0, len(y))
        x, y = x[index], y[index]
    return x, (y, jnp.broadcast_to(noise, y.shape))


def outputs(apply, theta, x):
    return jax.vmap(apply, (None, 0))(theta, x)


def updated(q, apply, x, y, noise, delta):
    """σ² and δ that maximise the bound, given q."""
    squares = lambda tree: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))
    size, spread = sum(leaf.size for leaf in jax.tree.leaves(q.mean)), squares(q.variance())
    determined = jnp.clip(size - delta * spread, 0, 0.98 * len(y))
    residuals = outputs(apply, q.mean, x) - y
    noise = (jnp.sum(residuals**2) + noise * determined) / len(y)
    return noise, size / (squares(jax.tree.map(jnp.square, q.mean)) + spread)


def judged(q, apply, x, y, noise, key):
    """Log-likelihood and RMSE of the linearised predictive and of the mixture, (2, 2)."""
    mean, spread = blr.predict(q, apply, x, method="linearized", variance=True)
    draws = jax.vmap(lambda k: outputs(apply, q.sample(k), x))(jax.random.split(key, DRAWS))
    likelihoods = gaussian_log_likelihood(mean, spread, y, noise), mixture_log_likelihood(draws, y, 1 / noise)
    return jnp.stack([jnp.stack(likelihoods), jnp.stack([rmse(mean, y), rmse(jnp.mean(draws, axis=0), y)])])


@jax.jit
def warmed(x, y, key):
    """The mean that Adam finds with the first prior and noise."""
    init, apply = network(x.shape[1])
    objective = blr.Objective(loss, output=apply, size=len(y), regularizer=1.0)
    first, rest = jax.random.split(key)
    rule = blr.adam(optax.cosine_decay_schedule(WARM_RATE, WARM_STEPS), damping="prior")
    step = lambda state, key: (rule.step(objective, state, batch_of(x, y, WARM_NOISE, key))[0], None)
    return jax.lax.scan(step, rule.init(init(first), objective), jax.random.split(rest, WARM_STEPS))[0].q.mean


@partial(jax.jit, static_argnames="steps")
def trained(rule, params, x, y, judge_x, judge_y, rounds, key, *, steps):
    """q and σ² after some rounds, and what `judged` says after each."""
    apply = network(x.shape[1])[1]
    objective = lambda delta: blr.Objective(loss, output=apply, size=len(y), regularizer=delta)
    noise = jnp.mean((outputs(apply, params, x) - y) ** 2)
    start = rule.init(params, objective(1.0)), noise, jnp.asarray(1.0), jnp.full((ROUNDS, 2, 2), -jnp.inf)

    def one(number, carry):
        state, noise, delta, scores = carry
        steps_key, judge_key = jax.random.split(jax.random.fold_in(key, number))

        def step(state, key):
            which, points = jax.random.split(key)
            batch = batch_of(x, y, noise, which if steps > 1 else None)
            return rule.step(objective(delta), state, batch, points)[0], None

        state = jax.lax.scan(step, state, jax.random.split(steps_key, steps))[0]
        noise, delta = updated(state.q, apply, x, y, noise, delta)
        score = judged(state.q, apply, judge_x, judge_y, noise, judge_key)
        return state, noise, delta, scores.at[number].set(score)

    state, noise, delta, scores = jax.lax.fori_loop(0, rounds, one, start)
    return scores, noise, delta
