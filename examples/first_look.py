"""One loss and four algorithms: a picture of what each piece of the rule changes.

The loss is asymmetric: a steep wall on the left of its minimum, a gentle slope on the right. Gradient descent and
Newton's method evaluate it at the mean only (the delta method) and converge to the minimum. Variational inference
averages over its Gaussian and stays away from the wall, as in the paper's figure 1.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import bayesrule as blr


def loss(theta: jax.Array) -> jax.Array:
    """A steep wall on the left, a gentle slope on the right."""
    x = theta[0]
    return jnp.exp(-3.0 * x) + 0.4 * x + 0.05 * x**2


start = blr.Gaussian(jnp.array([2.5]), jnp.array([[1.0]]))
average = blr.Quadrature(40)
descent = blr.fit(blr.gradient_descent(0.3), loss, start.mean, steps=15)
laplace = blr.fit(blr.laplace(), loss, start, steps=30, tolerance=1e-6)
bayes = blr.fit(blr.newton(0.5).replace(points=average), loss, start, steps=200, tolerance=1e-6)
averaged = blr.gradient_descent(0.3).replace(points=average)
fixed = blr.fit(averaged, loss, blr.FixedGaussian(start.mean, 2.0), steps=200)

print("\nThe derivations of two of them:\n")
print(blr.laplace(), "\n")
print(blr.newton(0.5).replace(points=average), "\n")

rows = [
    ("gradient descent, 15 steps", descent.q, "#8a8a8a"),
    ("Laplace (delta method)", laplace.q, "#c1121f"),
    ("averaged gradient descent, fixed covariance", fixed.q, "#e09f3e"),
    ("variational: averaged mean and precision", bayes.q, "#00509d"),
]
figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(1.2, 1))
grid = np.linspace(-0.9, 4.5, 500)
values = jax.vmap(loss)(jnp.asarray(grid)[:, None])
top.plot(grid, values, color="black", lw=1.6)
posterior = np.exp(-np.asarray(values))
posterior /= posterior.sum() * (grid[1] - grid[0])
bottom.fill_between(grid, posterior, color="#dddddd", label="posterior $e^{-\\ell}$, normalised")
for name, q, color in rows:
    mean = float(q.mean[0])
    top.plot(mean, float(loss(q.mean)), "o", color=color, ms=8)
    top.vlines(mean, 0, float(loss(q.mean)), color=color, lw=1, ls=":")
    density = np.exp(np.asarray(jax.vmap(q.log_prob)(jnp.asarray(grid)[:, None])))
    bottom.plot(grid, density, color=color, lw=1.8, ls="--" if "descent" in name else "-", label=name)
    print(f"{name:<44} mean {mean:6.3f}   sd {float(jnp.sqrt(q.variance()).squeeze()):.3f}")
top.set(
    ylabel="loss",
    ylim=(0, 6),
    title="The same rule with other pieces: the average keeps away from the wall",
)
bottom.set(xlabel="$\\theta$", ylabel="q($\\theta$)", ylim=(0, None))
top.legend(*bottom.get_legend_handles_labels(), frameon=False, fontsize=9, loc="upper right")
for axis in (top, bottom):
    axis.spines[["top", "right"]].set_visible(False)
figure.tight_layout()
path = Path("first_look.png").resolve()
figure.savefig(path, dpi=140)
print(f"\nThe picture is in {path}")
