"""PyTorch: a posterior from the training loop that you have.

`bayesrule.interop.torch.Optimizer` is a `torch.optim.Optimizer`. Model, data loader, loss and scheduler stay as they
are; two lines change, and the loop returns a Gaussian over the weights, whose mean is the model.
"""

# %% [markdown]
# ## The problem
#
# A curve with a gap in its data. A network that is trained as usual gives one answer in the gap, and no sign that it is
# a guess.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

import bayesrule as blr
from bayesrule.interop.torch import Optimizer

rng = np.random.default_rng(0)
inputs = np.concatenate([rng.uniform(-2.0, -0.5, 80), rng.uniform(0.7, 2.0, 80)])
noise = 0.1
targets = np.sin(2.5 * inputs) + noise * rng.normal(size=160)
x = torch.tensor(inputs[:, None], dtype=torch.float32)
y = torch.tensor(targets[:, None], dtype=torch.float32)

# %% [markdown]
# ## Two lines
#
# The first makes the optimizer: a rule, N (`size`), the precision of the prior (`regularizer`, N times what PyTorch
# calls weight decay) and the batch size. The second is `with optimizer.sampled():` around the loss, which puts a draw
# of q into the weights. The loss is the *mean* over the batch of −log p(y | x, θ), without the prior. It must be a log
# likelihood, with the noise in it: a posterior from a loss in other units has a width without meaning.

# %%
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
optimizer = Optimizer(model.parameters(), blr.ivon(2e-3), size=160, regularizer=1.0, batch_size=40, seed=0)
epochs = 350
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

for _ in range(epochs):
    for rows in torch.randperm(160).split(40):
        optimizer.zero_grad()
        with optimizer.sampled():
            loss = 0.5 * torch.mean((model(x[rows]) - y[rows]) ** 2) / noise**2
            loss.backward()
        optimizer.step()
    scheduler.step()

# %% [markdown]
# Outside of `sampled()` the parameters are the mean of q, so that `model(x)` is the usual prediction.
# `optimizer.draw()` puts in a draw for predictions, and does not disturb the training.

# %%
grid = torch.linspace(-2.2, 2.2, 200)[:, None]
draws = []
for _ in range(60):
    with optimizer.draw(), torch.no_grad():
        draws.append(model(grid)[:, 0])
draws = torch.stack(draws).numpy()
at_mean = model(grid).detach()[:, 0].numpy()
middle, deviation = draws.mean(axis=0), draws.std(axis=0)

parts = {"left of the gap": (-2.0, -0.5), "in the gap": (-0.4, 0.6), "right of the gap": (0.7, 2.0)}
places = grid[:, 0].numpy()
for name, (low, high) in parts.items():
    there = (places >= low) & (places <= high)
    print(f"{name:16s} standard deviation of the curve {deviation[there].mean():.2f}")

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})
figure, axes = plt.subplots(figsize=(7, 3.4))
total = np.sqrt(deviation**2 + noise**2)
axes.fill_between(
    places, middle - 1.645 * total, middle + 1.645 * total, color="#c6d6ea", label="90 % interval of a new y"
)
axes.plot(places, draws[:8].T, color="#16508f", linewidth=0.6, alpha=0.6)
axes.plot([], [], color="#16508f", linewidth=0.6, label="draws of the network")
axes.plot(places, at_mean, color="#c9641a", label="at the mean of q")
axes.plot(inputs, targets, ".", color="#222222", markersize=3, label="data")
axes.set(xlabel="x", ylabel="y", ylim=(-2.2, 1.8))
axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower center")
plt.show()

# %% [markdown]
# ## What the result means
#
# Every draw is a network that fits the data; they part ways where there are none. Two kinds of uncertainty add up in
# the band: the noise of y, which more data do not reduce, and the spread of the draws, which they do.
#
# The posterior is a diagonal Gaussian: `optimizer.posterior` has it as JAX's arrays, and `optimizer.state[p]` in
# tensors. It is saved by `state_dict()` like the state of any optimizer.

# %%
weights = model[0].weight
width = optimizer.state[weights]["precision"] ** -0.5
print(type(optimizer.posterior).__name__, tuple(width.shape), f"median width {width.median():.2f}, prior {1.0:.2f}")

# %% [markdown]
# ## What to watch out for
#
# - Independent weights cannot follow the correlations of the true posterior, and the spread between data is smaller
#   than that of the exact one. It tells you where to be careful, and is no guarantee: far beyond the data, where every
#   tanh is saturated, the draws of this network agree and are wrong. A [Gaussian process](gp_classification.md) knows
#   better.
# - `sgd`, `rmsprop`, `adam` and `adamw` may be given, too, and take PyTorch's own steps. `vogn` needs every example's
#   gradient, which PyTorch does not hand over: the optimizer says so.
# - Without `batch_size=` the defaults of `ivon` are the published ones, as in ivon-opt: a rate of about 0.1 and an
#   initial curvature of 1, after which q's width says little about the data.
# - FSDP is refused, and under CUDA JAX must have the device as well.
#
# ## Where next
#
# [A rule as a PyTorch optimizer](../pytorch.md) has groups, schedulers, mixed precision, Lightning and what a step
# costs; [coming from ivon-opt or laplace-torch](../coming_from.md) has their lines beside ours.
