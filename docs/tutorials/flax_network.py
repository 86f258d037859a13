"""A flax network with VOGN and IVON.

You train a network with Adam and would like to know where it should not be believed. Put `vogn` or `ivon` in the place
of Adam, with Adam's rate and a prior, and the fit returns a Gaussian over the weights in place of one set of weights.
"""

# %% [markdown]
# ## The data
#
# Two half moons, with noise. The second test set lies where no training example does: a network should be unsure there.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import make_moons

import bayesrule as blr
from bayesrule.interop.flax import from_nnx

x, y = make_moons(600, noise=0.25, random_state=0)
x = ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)
train, test = (x[:300], y[:300]), (x[300:], y[300:])
far = np.random.default_rng(0).uniform(-8, 8, (2000, 2)).astype(np.float32)
far = far[np.abs(far).max(axis=1) > 5]

# %% [markdown]
# ## A module, as it is
#
# `from_nnx` takes any `flax.nnx` module (`from_linen` and `from_equinox` take others). `network.params` is where the
# fit starts. The objective has the loss of one example, the number of examples N, without which the width of a
# posterior means nothing, and the precision of the prior N(0, 1/δ) of every weight.


# %%
class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(2, 32, rngs=rngs)
        self.middle = nnx.Linear(32, 32, rngs=rngs)
        self.head = nnx.Linear(32, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.middle(nnx.relu(self.body(x)))))


network = from_nnx(Classifier(nnx.Rngs(0)))
loss = optax.softmax_cross_entropy_with_integer_labels
objective = network.objective(loss, size=300, regularizer=1.0)

# %% [markdown]
# ## Three optimisers, one line each
#
# `adam`, `vogn` and `ivon` are the same update with different pieces; `blr.difference` says which. Adam ends with its
# mean alone; for the other two we average the class probabilities over draws of the weights.

# %%
print(blr.difference(blr.adam(1e-3), blr.vogn(1e-3)).pieces, blr.difference(blr.vogn(1e-3), blr.ivon(1e-3)).pieces)
rules = {"adam": blr.adam(1e-2), "vogn": blr.vogn(1e-3), "ivon": blr.ivon(1e-3)}
fits, predict = {}, {}
for name, rule in rules.items():
    fits[name] = blr.fit(rule, objective, network.params, train, steps=1000, batch_size=50, key=jax.random.key(0))
    options = {"method": "mean"} if name == "adam" else {"samples": 64, "key": jax.random.key(1)}
    fitted = network.fitted(fits[name])
    predict[name] = lambda inputs, q=fits[name].q, fitted=fitted, options=options: blr.predict(
        q, fitted.apply, inputs, frozen=fitted.frozen, link="softmax", **options
    )

print("        accuracy   NLL    ECE   confidence far away")
for name in rules:
    p, away = predict[name](test[0]), predict[name](far)
    scores = blr.metrics.accuracy(p, test[1]), blr.metrics.nll(p, test[1]), blr.metrics.ece(p, test[1])
    print(f"{name}      {scores[0]:.3f}  {scores[1]:.3f}  {scores[2]:.3f}   {jnp.mean(jnp.max(away, axis=1)):.3f}")

# %% [markdown]
# ## What the result means
#
# Among rows like the training rows, Adam's probabilities are as good as the others or better: there the data leave
# little open. What the posterior buys is in the last column.
#
# `result.q` is a `DiagonalGaussian` over the parameters, a pytree like the module's own: `q.mean`, `q.precision`,
# `q.sample(key)`. Each draw is a network that the data allow. Draws agree where there are examples and disagree far
# away, so that their average is less sure there. The picture shows the probability of the orange class: Adam's network
# is certain of it all the way to the edge.

# %%
plt.rcParams.update({"figure.constrained_layout.use": True})
grid = np.linspace(-7, 7, 60, dtype=np.float32)
plane = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
figure, panels = plt.subplots(1, 3, figsize=(7, 2.9), sharex=True, sharey=True)
for axes, name in zip(panels, rules, strict=True):
    probability = np.asarray(predict[name](plane)[:, 1]).reshape(60, 60)
    shades = axes.contourf(grid, grid, probability, levels=np.linspace(0, 1, 11), cmap="PuOr_r")
    for label, colour in ((0, "#d8cbee"), (1, "#fdd9a8")):
        axes.plot(*train[0][train[1] == label].T, ".", color=colour, markersize=2)
    axes.set(title=name, xlabel="$x_1$", aspect="equal")
panels[0].set_ylabel("$x_2$")
figure.colorbar(shades, ax=panels, shrink=0.75, ticks=[0, 0.5, 1], label="p(orange)")
plt.show()

# %% [markdown]
# ## The posterior's width
#
# Not all weights are alike: where data determine a weight, its precision is far above the prior's. The quantiles of the
# standard deviations say so, in units of the prior's, which is 1.

# %%
for name in ("vogn", "ivon"):
    widths = np.concatenate([np.ravel(s) ** -0.5 for s in jax.tree.leaves(fits[name].q.precision)])
    print(name, "standard deviations at 5, 50 and 95 %:", np.round(np.quantile(widths, [0.05, 0.5, 0.95]), 2))

# %% [markdown]
# ## What to watch out for
#
# - The prior matters, because the posterior is as wide as prior and data say. `blr.choose_prior` in the place of `fit`
#   chooses its precision, and whether to predict by draws or at the mean, on held-out rows. It costs four to sixteen
#   fits. With many weights and few data, averages over draws lack confidence, and the mean of q is often better
#   calibrated.
# - It is no free lunch. On eight data sets at one setting `vogn` had a better NLL than AdamW on four and `ivon` on
#   three; SGD with momentum was the best of all on MNIST after few epochs. Averages over draws recognised images that
#   are no digits far better than any point estimate: [deep learning](../deep_learning.md#mnist).
# - A module with batch statistics or dropout has a loss of a whole batch, which `vogn` refuses and `ivon` takes:
#   [modules](../modules.md).
# - More than a thousand weights with 300 examples are learnt slowly under noise: small tables with little noise need
#   more steps than Adam does.
#
# ## Where next
#
# [Modules of flax, equinox and haiku](../modules.md), [training](../training.md) with validation and early stopping, [a
# loop of your own](../loops.md) with optax, the same with [PyTorch](pytorch_network.md), or weights that are [plus or
# minus one](binary_network.md).
