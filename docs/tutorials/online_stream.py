"""A stream: learning from data that keep coming.

Rows arrive one piece after another and are not kept. The posterior of one piece is the prior of the next; where the
world drifts, a little of the first prior is mixed back in, so that old pieces are forgotten.
"""

# %% [markdown]
# ## The posterior is the next prior
#
# For a conjugate model nothing is lost: ridge regression by `partial_fit` on twenty pieces is the fit of all rows.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import bayesrule as blr
from bayesrule import factors
from bayesrule.estimators import RidgeRegression

rng = np.random.default_rng(0)
x = rng.normal(size=(400, 3))
y = x @ [1.0, -2.0, 0.5] + 0.3 * rng.normal(size=400)
online = RidgeRegression()
for piece in range(20):
    rows = slice(20 * piece, 20 * piece + 20)
    online.partial_fit(x[rows], y[rows])
together = RidgeRegression().fit(x, y)
print("largest difference of the coefficients:", f"{np.abs(online.coef_ - together.coef_).max():.1e}")

# %% [markdown]
# ## A world that drifts
#
# Now the slope of a line moves: slowly, and then with a jump. A `Model` has a block for the weights; `model.after(q)`
# is the model of the next piece, with q as its prior, and `forgetting=φ` gives a piece t pieces ago the weight (1 −
# φ)ᵗ.

# %%
pieces, rows = 120, 5
truth = np.where(np.arange(pieces) < 70, np.sin(np.arange(pieces) / 12), -1.5)
inputs = rng.normal(size=(pieces, rows))
targets = truth[:, None] * inputs + 0.4 * rng.normal(size=(pieces, rows))


def line():
    start = blr.Gaussian(jnp.zeros(1), jnp.eye(1))
    likelihood = factors.linear("y", {"w": "x"}, precision=1 / 0.4**2)
    return blr.Model({"w": start}, {"prior": factors.prior("w", start), "y": likelihood})


def track(forgetting):
    """Mean and standard deviation of the slope after each piece, and the log loss of a piece before it was seen."""
    model, q, slopes, losses = line(), None, [], []
    for x, y in zip(inputs, targets, strict=True):
        mean, variance = (0.0, 1.0) if q is None else (q["w"].mean[0], 1 / q["w"].precision[0, 0])
        spread = 0.4**2 + variance * x**2
        losses.append(np.mean(0.5 * np.log(2 * np.pi * spread) + 0.5 * (y - mean * x) ** 2 / spread))
        q = blr.fit(blr.conjugate(), model, None, {"x": x[:, None], "y": y}, steps=1).q
        slopes.append((q["w"].mean[0], q["w"].precision[0, 0] ** -0.5))
        model = model.after(q, forgetting=forgetting)
    return np.array(slopes), np.array(losses)


rates = (0.0, 0.05, 0.2)
tracks = {rate: track(rate) for rate in rates}
for rate, (_, losses) in tracks.items():
    print(f"forgetting {rate}: log loss of the next piece {losses.mean():.3f}")

# %% [markdown]
# ## Which rate? Let the stream decide
#
# Each rate of forgetting is an expert. `exponential_weights` is the rule on a categorical distribution over experts:
# after each piece λ moves by minus the loss. Its average is nearly as good as that of the best expert, without knowing
# which that is.

# %%
losses = jnp.asarray(np.stack([tracks[rate][1] for rate in rates], axis=1), jnp.float32) * rows
rule = blr.exponential_weights(1.0)
expert_loss = blr.Objective(lambda expert, loss: loss[expert], size=1)
advance = jax.jit(lambda state, loss: rule.step(expert_loss, state, loss[None])[0])
state, weights = rule.init(blr.Categorical(jnp.zeros(len(rates)))), []
for loss in losses:
    weights.append(state.q.probabilities)
    state = advance(state, loss)
weights = np.asarray(weights)
mixed = -np.log(np.sum(weights * np.exp(-np.asarray(losses)), axis=1)) / rows
print(f"mixed by exponential weights: {mixed.mean():.3f}")

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})
figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 4.6), height_ratios=[2, 1], sharex=True)
top.plot(truth, color="#222222", linestyle="--", label="truth")
for rate, colour in zip(rates, ("#b9b9b9", "#16508f", "#c9641a"), strict=True):
    slopes = tracks[rate][0]
    top.plot(slopes[:, 0], color=colour, label=f"forgetting {rate}")
    top.fill_between(
        np.arange(pieces), slopes[:, 0] - 2 * slopes[:, 1], slopes[:, 0] + 2 * slopes[:, 1], color=colour, alpha=0.2
    )
bottom.stackplot(np.arange(pieces), weights.T, colors=("#b9b9b9", "#16508f", "#c9641a"))
top.set(ylabel="slope, ± 2 standard deviations")
top.legend(frameon=False, fontsize=9, ncols=2)
bottom.set(xlabel="piece of the stream", ylabel="weight of experts", ylim=(0, 1))
plt.show()

# %% [markdown]
# ## What the result means
#
# Without forgetting, the posterior becomes narrower for ever and is sure of an average of slopes that never was one.
# With forgetting, the width settles where new rows and forgotten ones balance. It is still the width of a model whose
# slope stays where it is: where the truth moves fast, the band lags behind it.
#
# ## What to watch out for
#
# - Forgetting assumes that drift is about as fast at all times. A state space ([a series](series_with_gaps.md)) says
#   how things drift, and looks back as well.
# - Models that are not conjugate (`LogisticRegression.partial_fit`) approximate at every piece, and pieces of a few
#   rows accumulate that error.
# - Networks learn tasks in turn in the same way, with the posterior as the prior: after three permutations of MNIST
#   `ivon` had 92.6 % on all of them and Adam 85.1 % ([continual learning](../continual_learning.md)).
#
# ## Where next
#
# [Messages](../messages.md#what-else-there-is) for streams of any model; [larger than memory](larger_than_memory.md)
# for data that do end, but do not fit.
