"""Many minima at once.

A function with several minima, and the wish to have all of them: where they are, how deep, how wide. `blr.multimodal`
moves a mixture of Gaussians by the rule; each component takes Newton-like steps, and they repel each other on the way.
"""

# %% [markdown]
# ## All minima of a function in a box
#
# Himmelblau's function has four minima of the same depth. A local optimiser returns one of them, by its start.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import bayesrule as blr


def himmelblau(x):
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


box = (jnp.full(2, -6.0), jnp.full(2, 6.0))
rule = blr.multimodal(0.8, components=12, bounds=box)
result = blr.fit(rule, himmelblau, None, steps=60, key=jax.random.key(0))
minima = result.minima()
for minimum in minima:
    x1, x2 = minimum.position
    print(f"({x1:6.3f}, {x2:6.3f})  value {minimum.value:.1e}  share of the starts {minimum.weight:.2f}")

# %% [markdown]
# ## A posterior with several modes
#
# If the function is −log p(θ), the same mixture is a posterior, at temperature 1. Any rule over Gaussians takes a
# mixture as its family: the components start apart, at the minima that we have found, and their weights are fitted,
# too.

# %%
energy = lambda x: himmelblau(x) / 20
starts = jnp.stack([jnp.asarray(minimum.position) for minimum in minima])
mixture = blr.von(0.2).replace(family=blr.Mixture)
q = blr.fit(mixture, energy, starts, steps=200, key=jax.random.key(1)).q
print("weights:", np.round(q.weights, 3))

grid = np.linspace(-6, 6, 160)
plane = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
height = np.asarray(jax.vmap(himmelblau)(jnp.asarray(plane))).reshape(160, 160)
log_q = np.asarray(jax.vmap(q.log_prob)(jnp.asarray(plane)))
log_p = -height.ravel() / 20
cell = (grid[1] - grid[0]) ** 2
log_p -= np.log(np.sum(np.exp(log_p)) * cell)
print(f"KL(q ‖ p) on the grid: {np.sum(np.exp(log_q) * (log_q - log_p)) * cell:.3f} nats")

# %% [markdown]
# ## What the result means
#
# Each minimum comes with its Hessian, so that flat valleys can be told from sharp ones: the ellipses on the left are
# the contours f = 8 of the quadratic approximations. On the right, the mixture has put a component on each mode, and
# its weights say how much of the probability is there.

# %%
plt.rcParams.update({"figure.constrained_layout.use": True})
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.5), sharey=True)
angle = np.linspace(0, 2 * np.pi, 100)
circle = np.stack([np.cos(angle), np.sin(angle)])
left.contour(grid, grid, np.log1p(height), levels=14, colors="#b9b9b9", linewidths=0.7)
for minimum in minima:
    root = np.linalg.cholesky(np.asarray(minimum.hessian))
    ellipse = np.linalg.solve(root.T, circle * np.sqrt(2 * 8.0))
    left.plot(*(np.asarray(minimum.position)[:, None] + ellipse), color="#16508f")
    left.plot(*minimum.position, "+", color="#c9641a", markersize=9)
left.set(title="minima and curvature", xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
right.contourf(grid, grid, np.exp(log_p).reshape(160, 160), levels=8, cmap="Greys")
right.contour(grid, grid, np.exp(log_q).reshape(160, 160), levels=6, colors="#16508f", linewidths=1)
right.set(title="density (grey) and mixture (blue)", xlabel="$x_1$", aspect="equal")
plt.show()

# %% [markdown]
# ## What to watch out for
#
# - It cannot tell whether all minima have been found. Run it with another key, or with more steps, and compare.
# - It is for few dimensions: every component holds a D × D precision, and nothing above two dimensions was measured.
# - Where evaluations are expensive, multi-start L-BFGS-B is cheaper: it needed 1.7 to 25 times fewer on the eight
#   CEC-2013 functions. Ours reaches the minimisers to rounding, and has the Hessian ([measured](../multimodal.md)).
# - A minimum on the edge of the box that is no stationary point is not found.
#
# ## Where next
#
# [Many minima](../multimodal.md) has the measurements, and `fit(starts=k)`, several starts of *any* algorithm, which is
# the simpler question: does another start end somewhere better?
