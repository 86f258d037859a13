"""Honest uncertainty for a table.

A table of houses, a number to predict, and the question that a prediction alone does not answer: how far off may it be?
This page fits a CSV file with one command, does the same in Python with scikit-learn's interface, and then checks on
rows that the fit has not seen whether the stated intervals hold as often as they say.
"""

# %% [markdown]
# ## The data
#
# We write a CSV file as people write them: prices with a currency sign and thousands separators, missing values, a
# category. Because the table is simulated, we can hold out as many rows as a check of the intervals needs. The price is
# a product of effects, so that expensive houses differ from one another by more dollars than cheap ones do.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import bayesrule as blr
from bayesrule import metrics
from bayesrule.estimators import RidgeRegression

rng = np.random.default_rng(0)
rows = 3000
area = rng.uniform(50, 250, rows)
age = rng.integers(0, 80, rows)
town = rng.choice(["Oslo", "Bergen", "Hamar"], rows)
level = pd.Series(town).map({"Oslo": 0.5, "Bergen": 0.2, "Hamar": 0.0}).to_numpy()
log_price = 12.0 + 0.008 * (area - 150) - 0.004 * age + level + 0.25 * rng.normal(size=rows)
houses = pd.DataFrame({"area": area.round(), "age": age, "town": town, "price": np.exp(log_price).round()})

folder = Path(tempfile.mkdtemp())
as_written = houses.head(300).copy()
as_written["price"] = [f"${price:,.0f}" for price in as_written["price"]]
as_written.loc[rng.choice(300, 30, replace=False), "age"] = np.nan
as_written.to_csv(folder / "houses.csv", index=False)
print((folder / "houses.csv").read_text()[:110])


# %% [markdown]
# ## One command
#
# `bayesrule fit` reads the file, says how it has read each column, holds out a fifth of the rows, fits, and writes a
# report and the posterior into a directory.

# %%
fit = "fit houses.csv --target price --out run"  # after `bayesrule` in a terminal
ran = subprocess.run(
    [sys.executable, "-m", "bayesrule", *fit.split()], cwd=folder, capture_output=True, text=True, check=True
)
print(ran.stdout)

# %% [markdown]
# The last line of the output names the report, a single HTML file: what was read, how the model does beside a baseline
# and boosted trees, whether its intervals hold on the held-out rows, and what makes the tool suspicious of the data.
#
# `bayesrule predict run new.csv` writes predictions of new rows as CSV, and `blr.load` has the run in Python: a
# prediction, its standard deviation and a 90 % interval of a new observation. A missing age is drawn from its
# distribution.

# %%
run = blr.load(folder / "run")
print(pd.DataFrame(run.predict({"area": [100, 200], "age": [10, np.nan], "town": ["Oslo", "Hamar"]})).round(-2))

# %% [markdown]
# ## The same in Python
#
# The estimators have scikit-learn's interface. The default of a regression is `RidgeRegression`: the strength of its
# prior and the noise are chosen by the evidence, so that there is nothing to tune, and `predict(X, return_std=True)`
# has the standard deviation of a *new observation*, with its noise.

# %%
encoded = pd.get_dummies(houses.drop(columns="price"), dtype=float)
train, test = slice(0, 300), slice(300, None)
ridge = RidgeRegression().fit(encoded[train], houses["price"][train])
mean, std = ridge.predict(encoded[test], return_std=True)
low, high = metrics.interval(mean, std, 0.9, ridge.degrees_of_freedom_)
truth = houses["price"][test].to_numpy()
print(f"noise {ridge.noise_**0.5:,.0f} dollars, learnt from 300 rows")
print(f"{metrics.coverage(truth, low, high):.1%} of {len(truth)} new rows are in their 90 % intervals")

# %% [markdown]
# ## Are the intervals honest?
#
# The average over all rows is the wrong thing to look at: a user asks about *one* house, and intervals that are too
# wide here hide others that are too narrow there. So we split the new rows into thirds by their predicted price.


# %%
def by_thirds(prediction, covered):
    """The share of rows in their intervals, in the lower, middle and upper third of the predictions."""
    thirds = np.array_split(np.argsort(prediction), 3)
    return [float(np.mean(covered[third])) for third in thirds]


in_dollars = by_thirds(mean, (low < truth) & (truth < high))
print("lower, middle and upper third: ", "  ".join(f"{share:.1%}" for share in in_dollars))

# %% [markdown]
# An interval of constant width is too wide for cheap houses and too narrow for expensive ones. The report of the
# command line warns of that ("the noise is not constant"), and proposes to predict the logarithm. That is a modelling
# decision, which the tool leaves to you: here it is the right one, because the noise of the logarithm *is* constant.

# %%
log_ridge = RidgeRegression().fit(encoded[train], np.log(houses["price"][train]))
log_mean, log_std = log_ridge.predict(encoded[test], return_std=True)
log_low, log_high = (np.exp(x) for x in metrics.interval(log_mean, log_std, 0.9, log_ridge.degrees_of_freedom_))
in_logs = by_thirds(log_mean, (log_low < truth) & (truth < log_high))
print("with the logarithm of the price:", "  ".join(f"{share:.1%}" for share in in_logs))

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.4), width_ratios=[1.5, 1])
order = np.argsort(log_mean)[::6]
left.fill_between(
    np.arange(len(order)), log_low[order] / 1e3, log_high[order] / 1e3, color="#c6d6ea", label="90 % interval"
)
left.plot(np.exp(log_mean[order]) / 1e3, color="#16508f", label="prediction")
left.plot(truth[order] / 1e3, ".", color="#222222", markersize=3, label="new house")
left.set(xlabel="houses, by predicted price", ylabel="price, thousand dollars")
left.legend(frameon=False, fontsize=9)
places = np.arange(3)
right.bar(places - 0.2, in_dollars, 0.38, color="#c9641a", label="price")
right.bar(places + 0.2, in_logs, 0.38, color="#16508f", label="log price")
right.axhline(0.9, color="#222222", linewidth=1, linestyle="--")
right.set(xticks=places, xticklabels=["lower", "middle", "upper"], ylim=(0.75, 1.0))
right.set(xlabel="third of the predictions", ylabel="share in the 90 % interval")
right.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# ## What to watch out for
#
# - An interval is honest about what the model can see: noise and too few rows. It knows nothing of rows of another
#   kind. `bayesrule predict` warns of columns outside of the range of the training rows.
# - Counts and classes have estimators of their own (`PoissonRegression`, `LogisticRegression`). Poisson intervals are
#   too narrow where counts vary more than a Poisson distribution allows; the report tests that.
# - Nothing is widened after the fact. On 36 regression tables the 90 % intervals of the default model held as often as
#   they should (within 3 points or two standard errors) on 30, and on the six others the report said why:
#   [benchmarks](../benchmarks.md#real-tables-intervals-likelihoods-and-calibration).
#
# ## Where next
#
# [The command line](../command_line.md) has all options, and how files are read; [estimators](../estimators.md) lists
# the models; [larger than memory](larger_than_memory.md) is for tables that do not fit; a [Gaussian
# process](gp_classification.md) is for curves that are not straight.
