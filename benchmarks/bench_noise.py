"""Ten million float32 normal numbers: ours, `jax.random.normal` and torch's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from timing import fastest

from bayesrule.numerics.random import normal

SIZE = 10_000_000


def main(data=None, repeats=20):
    key, arrays = jax.random.key(0), {name: jnp.zeros(SIZE) for name in ("ours", "jax")}
    draws = {
        "ours": jax.jit(lambda key, x: x + normal(key, x.shape), donate_argnums=1),
        "jax": jax.jit(lambda key, x: x + jax.random.normal(key, x.shape), donate_argnums=1),
    }

    def run(name):
        arrays[name] = draws[name](jax.random.clone(key), arrays[name])
        return arrays[name]

    runs = {"ours": lambda: run("ours"), "jax.random.normal": lambda: run("jax")}
    try:
        import torch
    except ImportError:
        print("  torch is not run: it is not installed.")
    else:
        with torch.no_grad():
            x = torch.zeros(SIZE)
        runs["torch, normal_ in place"] = lambda: x.normal_() is None
    times = fastest(runs, repeats)
    for name, seconds in times.items():
        print(f"  {name:<42} {1e3 * seconds:8.2f} ms   ours / this {times['ours'] / seconds:.3f}")


if __name__ == "__main__":
    main()
