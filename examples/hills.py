"""Posteriors with several modes: the bound rises with the number of mixture components (section 3.2).

Run: python examples/hills.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import bayesrule as blr
from bayesrule.models.landscapes import banana, funnel, two_moons


def evidence(loss):
    """log ∫ exp(−ℓ̄) by a sum over a grid."""
    grid = jnp.linspace(-12, 12, 1201)
    plane = jnp.stack(jnp.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    return jax.nn.logsumexp(-jax.vmap(loss)(plane)) + 2 * jnp.log(grid[1] - grid[0])


def main():
    counts = (1, 2, 5, 10)
    table = Table("target", *(f"K = {count}" for count in counts), "log evidence", title="Evidence lower bound")
    rule = blr.von(0.2).replace(family=blr.Mixture, points=blr.Quadrature(9))
    for loss in (banana, funnel, two_moons):
        bounds = []
        for count in counts:  # The best of three starts, because a mixture may converge to some of the modes only.
            starts = jax.random.normal(jax.random.key(0), (3, count, 2))  # A mean for each component.
            bounds.append(max(blr.fit(rule, loss, start, steps=400).bound for start in starts))
        table.add_row(loss.__name__, *(f"{bound:.3f}" for bound in bounds), f"{evidence(loss):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
