"""A series with gaps, and a series of counts.

Measurements that stop for some years, and numbers of accidents that are small and whole: both are one latent curve with
another likelihood. Kalman's smoother is one step of the rule on a chain; for counts the same chain takes a few steps.
"""

# %% [markdown]
# ## The Nile, with gaps
#
# The yearly flow of the Nile at Aswan, 1871 to 1970, is a textbook series. We hide two stretches of twenty years: NaN
# is a missing value everywhere in this library.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import bayesrule as blr
from bayesrule import factors
from bayesrule.models import kalman
from bayesrule.tables.datasets import dataset

nile = dataset("nile").load()
year, flow = nile.columns["year"].numbers, nile.columns["flow"].numbers
hidden = ((year >= 1890) & (year < 1910)) | ((year >= 1930) & (year < 1950))
observed = jnp.asarray(np.where(hidden, np.nan, flow))

# %% [markdown]
# A `StateSpace` is the prior of the curve: here a random walk, f ← f + noise, and y = f + noise. Its two variances are
# chosen by the evidence, `kalman.log_likelihood`: a function that can be mapped over a grid, as here, or
# differentiated.


# %%
def walk(step_variance):
    first = 1e5 * jnp.eye(1)  # the variance of the first state: the level is hardly known before the data
    return blr.StateSpace(jnp.eye(1), step_variance * jnp.eye(1), jnp.ones(1), covariance=first)


centred = observed - 1000.0
evidence = lambda step, noise: kalman.log_likelihood(walk(step), centred, noise)
steps, noises = jnp.geomspace(1e2, 1e4, 21), jnp.geomspace(5e3, 4e4, 21)
table = jax.jit(jax.vmap(jax.vmap(evidence, (None, 0)), (0, None)))(steps, noises)
row, column = np.unravel_index(jnp.argmax(table), table.shape)
step, noise = float(steps[row]), float(noises[column])
print(f"variance of a step {step:.0f}, of the noise {noise:.0f}, log evidence {table.max():.1f}")

smoothed = kalman.smooth(walk(step), centred, noise)
level = np.asarray(smoothed.mean[:, 0]) + 1000.0
deviation = np.sqrt(np.asarray(smoothed.covariance[:, 0, 0]) + noise)
inside = np.abs(flow - level)[hidden] < 1.645 * deviation[hidden]
print(f"{inside.mean():.0%} of the {hidden.sum()} hidden years are in their 90 % intervals")

# %% [markdown]
# ## Counts
#
# Coal-mining disasters in Britain, year by year, 1851 to 1962, two stretches hidden again. A normal distribution is
# wrong for counts of 0, 1 or 5. The likelihood becomes `factors.poisson_exp`, a Poisson with rate eᶠ; the chain stays.
# It is not conjugate, and `cvi` takes steps until it has converged: each is a smoother with other messages.

# %%
coal = dataset("coal").load()
years, disasters = coal.columns["year"].numbers, coal.columns["disasters"].numbers
away = ((years >= 1870) & (years < 1880)) | ((years >= 1920) & (years < 1935))
data = {"y": jnp.asarray(np.where(away, np.nan, disasters))}

fits = {}
for variance in (0.003, 0.01, 0.03, 0.1):
    rates = blr.StateSpace([[1.0]], [[variance]], [1.0], covariance=[[2.0]])
    model = blr.Model({"f": blr.GaussianChain(rates, len(years))}, {"y": factors.poisson_exp("y", {"f": None})})
    fits[variance] = blr.fit(blr.cvi(1.0), model, None, data, steps=30, tolerance=1e-5)
    print(f"variance of a step {variance}: bound on the log evidence {float(fits[variance].bound):.2f}")
best = max(fits.values(), key=lambda fit: float(fit.bound))

# %% [markdown]
# `result.q["f"]` is the posterior of the log rate at every year, and `result.bound` compares variances as the evidence
# does. A new count varies for two reasons, an uncertain rate and Poisson's own noise, so we draw both.

# %%
f = best.q["f"]
mean, sd = np.asarray(f.mean), np.sqrt(np.asarray(f.variance))
rng = np.random.default_rng(0)
draws = rng.poisson(np.exp(mean + sd * rng.normal(size=(4000, len(mean)))))
low, high = np.quantile(draws, [0.05, 0.95], axis=0)
covered = ((disasters >= low) & (disasters <= high))[away]
print(f"{covered.mean():.0%} of the {away.sum()} hidden years are in their 90 % intervals")

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})
figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5))
top.fill_between(year, level - 1.645 * deviation, level + 1.645 * deviation, color="#c6d6ea", label="90 % of new years")
top.plot(year, level, color="#16508f", label="level")
top.plot(year[~hidden], flow[~hidden], "o", color="#222222", markersize=3, label="seen")
top.plot(year[hidden], flow[hidden], "o", color="#c9641a", markersize=3, mfc="white", label="hidden")
top.set(ylabel="flow of the Nile, 10⁸ m³", xlabel="year")
top.legend(frameon=False, fontsize=9, ncols=4, loc="upper right")
top.set_ylim(350, 1600)
bottom.fill_between(years, low, high, color="#c6d6ea", step="mid")
bottom.plot(years, np.exp(mean), color="#16508f")
bottom.plot(years[~away], disasters[~away], "o", color="#222222", markersize=3)
bottom.plot(years[away], disasters[away], "o", color="#c9641a", markersize=3, mfc="white")
bottom.set(ylabel="disasters in a year", xlabel="year")
plt.show()

# %% [markdown]
# ## What to watch out for
#
# - Intervals of small counts hold more than they promise, because a count cannot be cut at exactly 90 %.
# - The variance of the steps decides how fast the band widens in a gap. The evidence chooses it, with an error of its
#   own that the band does not have.
# - A random walk has no trend and no season. Add states (`[[1, 1], [0, 1]]` is a local trend);
#   `LinearGaussianStateSpace` learns transitions from data, and `bayesrule fit sales.csv --target sold --time week`
#   does all of it for a file.
#
# ## Where next
#
# [Named models](../models.md#state-spaces): other likelihoods, several series, hidden Markov models; a
# [stream](online_stream.md) that never ends; [Gaussian processes](gp_classification.md), which are the same in more
# than one dimension.
