"""A binary network: weights that are plus or minus one.

A network whose weights are signs needs one bit for each and no multiplications. Its loss has no gradient with respect
to a sign. The rule moves a Bernoulli distribution over the signs in its place, and the result says how sure each sign
is.
"""

# %% [markdown]
# ## The problem
#
# 1,797 images of digits, 8 × 8 pixels. `BinaryMLPClassifier` is a scikit-learn classifier whose weights are all ±1.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import bayesrule as blr
from bayesrule.estimators import BinaryMLPClassifier, MLPClassifier

X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.3, random_state=0, stratify=y)

# %% [markdown]
# ## Two recipes
#
# "straight_through" is the usual trick: the gradient at the signs is used as if they were real numbers. "bayesbinn"
# gets nearly the same update from the rule: q is a Bernoulli for each weight, and the gradient is taken at a relaxed
# draw of it. `blr.difference` says in which pieces the two differ.

# %%
print(blr.difference(blr.straight_through(1e-2), blr.bayesbinn(1e-2)))

settings = {"hidden_layer_sizes": (64,), "max_iter": 60, "random_state": 0}
fitted = {
    name: BinaryMLPClassifier(recipe=name, **settings).fit(X_train, y_train)
    for name in ("straight_through", "bayesbinn")
}
real = MLPClassifier((64,), recipe="adam", prior_precision=1.0, max_iter=60, random_state=0).fit(X_train, y_train)

print("\n                    accuracy    NLL")
for name, model in (fitted | {"real weights, adam": real}).items():
    p = model.predict_proba(X_test)
    print(f"{name:20s}  {blr.metrics.accuracy(p, y_test):.3f}  {blr.metrics.nll(p, y_test):.3f}")

# %% [markdown]
# ## What the result means
#
# `posterior_` is a `Bernoulli` over every weight, whose natural parameter λ is half the log odds of +1. Predictions
# average over draws of signs. Many weights are undecided, which is information that a network of point estimates does
# not have: weights of pixels that are nearly always empty stay where they started, near one half.

# %%
bayes = fitted["bayesbinn"]
first = np.asarray(bayes.posterior_.natural()["layer0"]["w"])
probability = 1 / (1 + np.exp(-2 * first))
pixels = probability[:64]  # The last input is the constant that stands for a bias.
certainty = np.abs(2 * pixels - 1).mean(axis=1).reshape(8, 8)
bits = sum(leaf.size for leaf in jax.tree.leaves(bayes.posterior_.natural()))
print(f"{bits} weights, that is {bits / 8 / 1024:.1f} kB as bits")
print(
    f"{np.mean(np.abs(2 * pixels - 1) > 0.9):.0%} of the first layer's signs are certain (p above 0.95 or below 0.05)"
)

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.1), width_ratios=[1.4, 1])
left.hist(pixels.ravel(), bins=40, color="#16508f")
left.set(xlabel="probability that a weight is +1", ylabel="weights of the first layer")
shades = right.imshow(certainty, cmap="Blues", vmin=0, vmax=1)
right.set(title="how sure, pixel by pixel", xticks=[], yticks=[])
figure.colorbar(shades, ax=right, label="mean of |2p − 1|", shrink=0.85)
plt.show()

# %% [markdown]
# ## Any network
#
# The estimator is a thin layer. The same recipe trains the signs of any JAX function: `rule.init` takes the parameters'
# shapes, and `points` says at which signs the loss is differentiated.

# %%
print(blr.bayesbinn(1e-3))

# %% [markdown]
# ## What to watch out for
#
# - Binary weights cost accuracy on a network of this size. On MNIST with two hidden layers of 512, batch normalisation
#   and five epochs the accuracy was 98.18 ± 0.05 % with `bayesbinn` and 98.15 ± 0.04 % with `straight_through` ([deep
#   learning](../deep_learning.md#mnist)).
# - The rate of `bayesbinn` is the fraction of λ that a step forgets, as published; that of `straight_through` is in
#   optax's units.
# - Relaxations near 1 have heavy tails on large networks; the published setting is 1e-10, nearly the sign itself.
#
# ## Where next
#
# [Deep learning from the rule](../deep_learning.md), or [a flax network](flax_network.md) with real weights.
