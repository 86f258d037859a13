"""Ten million float32 normals: ours against `jax.random.normal` and `torch.randn`, and the IVON-like step they serve.

The step is the least an IVON step can be: sample θ = m + ε/√s, take the gradient of ½‖θ − t‖² there, and update m, s
and u in place. Its loss costs nothing, so the ratio to Adam is the worst there can be. `stored` keeps θ; `plain`
leaves XLA to choose; `scanned` runs five steps in one call, which then allocates θ once.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from bayesrule.noise import normal, normals, stored

SIZE, SCANNED = 10_000_000, 5


def minimum(functions, repeats):
    """The least time of each, interleaved."""
    best = [np.inf] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            began = time.perf_counter()
            jax.block_until_ready(function())
            best[i] = min(best[i], time.perf_counter() - began)
    return best


def numbers(repeats):
    key, into = jax.random.key(0), {name: jnp.zeros(SIZE) for name in ("ours", "jax")}
    draws = {
        "ours": jax.jit(lambda key, x: x + normal(key, x.shape), donate_argnums=1),
        "jax": jax.jit(lambda key, x: x + jax.random.normal(key, x.shape), donate_argnums=1),
    }

    def run(name):
        into[name] = draws[name](jax.random.clone(key), into[name])
        return into[name]

    runs = {"ours": lambda: run("ours"), "jax.random.normal": lambda: run("jax")}
    try:
        import torch
    except ImportError:
        print("  torch is not installed")
    else:
        with torch.no_grad():
            x = torch.zeros(SIZE)
        runs["torch, normal_ in place"] = lambda: x.normal_() is None
    for call in runs.values():
        jax.block_until_ready(call())
    times = dict(zip(runs, minimum(list(runs.values()), repeats), strict=True))
    for name, seconds in times.items():
        print(f"  {name:<42} {1e3 * seconds:8.2f} ms   ours / this {times['ours'] / seconds:.3f}")


def ivon_like(keep, target):
    first, second, rate, decay = 0.9, 0.99999, 1e-3, 1e-4

    def step(key, count, m, s, u):
        def sample():
            return jax.tree.map(lambda m, s, e: m + e / jnp.sqrt(s), m, s, normals(key, m))

        theta = stored(sample, count >= 0) if keep else sample()

        def update(m, s, u, theta, target):
            g = theta - target
            f = s * (theta - m) * g
            u = first * u + (1 - first) * g
            new = s + (1 - second) * (f - s) + 0.5 * (1 - second) ** 2 * (f - s) ** 2 / s
            return m - rate * (u / (1 - first ** (count + 1.0)) + decay * m) / new, new, u

        updated = jax.tree.map(update, m, s, u, theta, target)
        return tuple(jax.tree.transpose(jax.tree.structure(m), jax.tree.structure((0, 0, 0)), updated))

    def scanned(key, count, *state):
        def one(state, i):
            return step(jax.random.fold_in(key, i), count + i, *state), None

        return lax.scan(one, state, jnp.arange(SCANNED))[0]

    return step, scanned


def steps(leaves, repeats):
    def tree(value):
        shape = (SIZE // leaves // 1000, 1000) if leaves > 1 else (SIZE,)
        return [jnp.full(shape, value) for _ in range(leaves)]

    target, optimizer, key = tree(0.5), optax.adam(1e-3), jax.random.key(0)

    def adam(key, count, params, state):
        gradient = jax.tree.map(jnp.subtract, params, target)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    plain, _ = ivon_like(False, target)
    kept, scanned = ivon_like(True, target)
    names = ("optax.adam", "plain", "stored", "stored, scanned")
    states = {name: (tree(1.0), tree(4.0), tree(0.0)) for name in names[1:]}
    start = tree(1.0)
    states["optax.adam"] = (start, optimizer.init(start))
    compiled = {
        name: jax.jit(function, donate_argnums=tuple(range(2, 2 + len(states[name]))))
        .lower(key, jnp.int32(0), *states[name])
        .compile()
        for name, function in zip(names, (adam, plain, kept, scanned), strict=True)
    }

    def run(name):
        states[name] = compiled[name](jax.random.clone(key), jnp.int32(0), *states[name])
        return states[name]

    calls = [lambda name=name: run(name) for name in names]
    for call in calls:
        jax.block_until_ready(call())
    times = dict(zip(names, minimum(calls, repeats), strict=True))
    times["stored, scanned"] /= SCANNED
    print(f"  A step on {leaves} leaves (at most 4.0 times Adam)")
    for name, seconds in times.items():
        temporary = compiled[name].memory_analysis().temp_size_in_bytes / 1e6
        ratio = seconds / times["optax.adam"]
        print(f"    {name:<40} {1e3 * seconds:8.2f} ms   ratio {ratio:.2f}   {temporary:.1f} MB besides the state")


def main(data=None):
    numbers(20)
    for leaves in (1, 16):
        steps(leaves, 20)


if __name__ == "__main__":
    main()
