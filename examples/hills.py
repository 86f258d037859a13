"""Posteriors with more than one hill: the bound rises with the number of components (section 3.2).

Run: python examples/hills.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import bayesrule as blr


def banana(t):
    """A ridge along a parabola."""
    return 0.5 * (t[0] / 2) ** 2 + 0.5 * ((t[1] - 0.5 * t[0] ** 2 + 2) / 0.5) ** 2


def funnel(t):
    """The second parameter's scale is the exponential of the first."""
    return 0.5 * (t[0] / 1.35) ** 2 + 0.5 * t[1] ** 2 * jnp.exp(-t[0]) + 0.5 * t[0]


def moons(t):
    """Two crescents of a ring."""
    ring = 0.5 * ((jnp.sqrt(jnp.sum(t**2) + 1e-12) - 2) / 0.4) ** 2
    return ring - jnp.logaddexp(-0.5 * ((t[0] - 2) / 0.6) ** 2, -0.5 * ((t[0] + 2) / 0.6) ** 2)


def evidence(loss):
    """log ∫ exp(−ℓ̄), on a grid."""
    grid = jnp.linspace(-12, 12, 1201)
    plane = jnp.stack(jnp.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    return jax.nn.logsumexp(-jax.vmap(loss)(plane)) + 2 * jnp.log(grid[1] - grid[0])


def main():
    counts = (1, 2, 5, 10)
    table = Table("target", *(f"K = {count}" for count in counts), "log evidence", title="Evidence lower bound")
    rule = blr.von(0.2).replace(family=blr.Mixture, points=blr.Quadrature(9))
    for loss in (banana, funnel, moons):
        bounds = []
        for count in counts:  # the best of three starts, since a mixture may settle on some of the hills only
            starts = jax.random.normal(jax.random.key(0), (3, count, 2))  # a mean for each component
            bounds.append(max(blr.fit(rule, loss, start, steps=400).bound for start in starts))
        table.add_row(loss.__name__, *(f"{bound:.3f}" for bound in bounds), f"{evidence(loss):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
