"""Deep-learning algorithms compared with optax, or with their published equations in NumPy and the same noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..gallery.trace import trace_steps
from ..numerics.random import normals
from ..objectives.objective import Objective
from ..rule.rule import Rule
from .check import check, relative_error

STEPS, BATCH, ROWS = 50, 8, 40


def _regression_data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4))
    return x, np.sin(x @ [1.0, -2.0, 0.5, 0.3])


def _batch_indices() -> np.ndarray:
    """The rows of each mini-batch."""
    random = np.random.default_rng(1)
    return np.stack([random.permutation(ROWS)[:BATCH] for _ in range(STEPS)])


def _initial_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    return {"v": 0.5 * random.normal(size=(3, 1)), "w": 0.5 * random.normal(size=(4, 3))}


def _network_loss(params: Any, example: Any) -> jax.Array:
    """The squared error of a network with three hidden units."""
    x, y = example
    return 0.5 * (jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"]) - y) ** 2


def _flatten(params: Any) -> np.ndarray:
    """The weights of every step, (steps, P), from arrays with the steps along their first axis."""
    return np.concatenate([np.reshape(params[name], (len(params[name]), -1)) for name in sorted(params)], axis=1)


def _compare_with_optax(
    rule: Rule,
    transformation: optax.GradientTransformation,
    *,
    evaluate_at: Callable[[Any, Any], Any] = lambda params, step_input: params,
    map_gradient: Callable[[Any, Any], Any] = lambda gradient, step_input: gradient,
    per_step_input: Any = None,
    read: Callable[[Any], Any] = lambda q: q.mean,
    keys: Any = None,
) -> float:
    """Compare every iterate of the rule with optax's, on the mean loss of the same mini-batches.

    optax gets `map_gradient(g, step_input)`, with g the gradient at `evaluate_at(params, step_input)`; `per_step_input`
    holds a `step_input` for each step (the masks of dropout). `read` takes optax's parameters from q.
    """
    x, y = _regression_data()
    batches, start = (x[_batch_indices()], y[_batch_indices()]), jax.tree.map(jnp.asarray, _initial_weights())

    def body(carry: tuple[Any, ...], step_data: tuple[Any, ...]) -> tuple[Any, ...]:
        (params, optax_state), (batch, step_input) = carry, step_data
        mean_loss = lambda p: jnp.mean(jax.vmap(lambda e: _network_loss(p, e))(batch))
        gradient = map_gradient(jax.grad(mean_loss)(evaluate_at(params, step_input)), step_input)
        updates, optax_state = transformation.update(gradient, optax_state, params)
        params = optax.apply_updates(params, updates)
        return (params, optax_state), params

    first = (start, transformation.init(start))
    expected = jax.jit(lambda step_data: jax.lax.scan(body, first, step_data)[1])((batches, per_step_input))
    trace = trace_steps(
        rule, Objective(_network_loss, size=ROWS), start, steps=STEPS, batches=batches, keys=keys, read=read
    )
    initial = _flatten({name: leaf[None] for name, leaf in start.items()})
    return relative_error(_flatten(trace), _flatten(expected), initial)


@check("optax.sgd, 50 mini-batches of a small network", 1e-12)
def sgd(rule: Rule) -> float:
    """The means are optax's parameters."""
    return _compare_with_optax(rule, optax.sgd(0.1))


@check("optax.adam, 50 mini-batches of a small network", 1e-12)
def adam(rule: Rule) -> float:
    """The means are optax's parameters."""
    return _compare_with_optax(rule, optax.adam(1e-3))


@check("optax.sgd on masked weights, the same masks, 50 mini-batches", 1e-12)
def dropout(rule: Rule) -> float:
    """A unit is kept if a uniform number is below 0.9 (z = 1, else 0); the gradient is g(z∘θ)∘z/0.9."""
    keys, keep, shapes = jax.random.split(jax.random.key(3), STEPS), 0.9, {"v": (3, 1), "w": (4, 1)}

    @jax.jit
    @jax.vmap
    def masks(key: Any) -> Any:
        leaves = zip(shapes.items(), jax.random.split(key, 2), strict=True)
        return {name: 1.0 * (jax.random.uniform(k, shape, float) < keep) for (name, shape), k in leaves}

    step_masks = masks(jax.random.clone(keys))
    evaluate_at = lambda params, z: jax.tree.map(jnp.multiply, params, z)
    map_gradient = lambda gradient, z: jax.tree.map(lambda g, z: g * z / keep, gradient, z)
    read = lambda q: q.slab.mean
    return _compare_with_optax(
        rule,
        optax.sgd(0.1),
        evaluate_at=evaluate_at,
        map_gradient=map_gradient,
        per_step_input=step_masks,
        read=read,
        keys=keys,
    )


@check("optax.sgd on latent weights, gradients at their signs, 50 batches", 1e-12)
def straight_through(rule: Rule) -> float:
    """BinaryConnect: SGD on the latent weights λ, with the gradient evaluated at sign(λ)."""
    signs = lambda params, _: jax.tree.map(lambda p: jnp.where(p >= 0, 1.0, -1.0), params)
    return _compare_with_optax(rule, optax.sgd(0.1), evaluate_at=signs, read=lambda q: q.natural())


# Logistic regression, for which the per-example gradients are one line of NumPy.

SIZE, PRIOR = 60, 2.5  # The number of examples N, and the prior precision δ.


def _classification_data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(4).normal(size=(SIZE, 3))
    return x, np.sign(x @ [1.5, -1.0, 0.3] + 0.3)


def _logistic_loss(w: jax.Array, example: tuple[Any, ...]) -> jax.Array:
    x, y = example
    return jnp.logaddexp(0.0, -y * (x @ w))


def _logistic_gradients(w: np.ndarray) -> np.ndarray:
    """Every example's gradient at w, (N, 3)."""
    x, y = _classification_data()
    return (-y / (1 + np.exp(y * (x @ w))))[:, None] * x


def _compare_with_gauss_newton(rule: Rule, *, variational: bool) -> float:
    """θ = m + ε/√S (or m); u ← β₁u + (1−β₁)ĝ(θ); v ← β₂v + (1−β₂)·mean ĝᵢ(θ)²; m ← m − α(û + δm/N)/(v + δ/N) and
    S = Nv + δ (Khan et al., 2018; Osawa et al., 2019), with v from 1 and α = 0.01·(1 + δ/N)."""
    beta1, beta2, ridge = 0.9, 0.999, PRIOR / SIZE
    rate, start, keys = 1e-2 * (1 + ridge), np.array([0.1, -0.2, 0.3]), jax.random.split(jax.random.key(5), STEPS)
    draw = lambda key: normals(key, jnp.zeros(3), (1,))[0]
    noise = np.asarray(jax.jit(jax.vmap(draw))(jax.random.clone(keys))) if variational else np.zeros((STEPS, 3))
    mean, u, v, means, precisions = start, np.zeros(3), np.ones(3), [], []
    for count, epsilon in enumerate(noise, start=1):
        gradients = _logistic_gradients(mean + epsilon / np.sqrt(SIZE * v + PRIOR))
        u = beta1 * u + (1 - beta1) * gradients.mean(axis=0)
        v = beta2 * v + (1 - beta2) * np.mean(gradients**2, axis=0)
        mean = mean - rate * (u / (1 - beta1**count) + ridge * mean) / (v + ridge)
        means.append(mean)
        precisions.append(SIZE * v + PRIOR)
    objective = Objective(_logistic_loss, size=SIZE, regularizer=PRIOR)
    read = lambda q: (q.mean, q.precision)
    trace = trace_steps(
        rule, objective, jnp.asarray(start), steps=STEPS, data=_classification_data(), keys=keys, read=read
    )
    return max(relative_error(trace[0], means, start), relative_error(trace[1], precisions, SIZE + PRIOR))


@check("its published equations in NumPy, 50 steps", 1e-12)
def ogn(rule: Rule) -> float:
    """Gradients at the mean."""
    return _compare_with_gauss_newton(rule, variational=False)


@check("its published equations in NumPy with the same noise, 50 steps", 1e-12)
def vogn(rule: Rule) -> float:
    """Gradients at a draw from q."""
    return _compare_with_gauss_newton(rule, variational=True)


@check("its published equations in NumPy with the same noise, 50 steps", 1e-12)
def bayesbinn(rule: Rule) -> float:
    """θ = tanh(λ + δ) with δ half a standard logistic variable; s = (1 − θ²)/(1 − tanh²λ); λ ← (1 − ρ)λ − ρ s∘Σ∇ℓᵢ(θ)
    (Meng et al., 2020, at temperature 1)."""
    rate, start, keys = 1e-4, np.array([0.5, -0.4, 0.1]), jax.random.split(jax.random.key(6), STEPS)
    draw = lambda key: 0.5 * jax.random.logistic(jax.random.split(key, 1)[0], (1, 3), float)[0]
    noise = np.asarray(jax.jit(jax.vmap(draw))(jax.random.clone(keys)))
    natural, expected = start, []
    for delta in noise:
        theta = np.tanh(natural + delta)
        scale = (1 - theta**2) / (1 - np.tanh(natural) ** 2)
        natural = (1 - rate) * natural - rate * scale * _logistic_gradients(theta).sum(axis=0)
        expected.append(natural)
    objective, read = Objective(_logistic_loss, size=SIZE), lambda q: q.natural()
    trace = trace_steps(
        rule, objective, jnp.asarray(start), steps=STEPS, data=_classification_data(), keys=keys, read=read
    )
    return relative_error(trace, expected, start)
