"""Larger than memory: a posterior from rows on a disk.

A table with more rows than fit into memory is read in pieces. What the rule measures is a sum over rows, so that a step
on a stream is the step on all rows, to rounding. This page writes Parquet files, fits them by passes and by
mini-batches, and then lets Dask do it.
"""

# %% [markdown]
# ## Files
#
# Four files of 25,000 rows, which stand for four thousand: nothing below depends on their number. Small row groups let
# the rows be shuffled well.

# %%
import tempfile
from pathlib import Path

import dask
import dask.array as da
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pyarrow as pa
from pyarrow import parquet

import bayesrule as blr
from bayesrule.estimators import LogisticRegression

rng = np.random.default_rng(0)
truth = np.array([1.0, -0.5, 0.25, 0.0, 0.1, -1.5])
names = [f"x{column}" for column in range(6)]
folder = Path(tempfile.mkdtemp())
for part in range(4):
    x = rng.normal(size=(25_000, 6))
    y = (x @ truth + rng.logistic(size=25_000) > 0).astype(float)
    table = pa.table(dict(zip(names, x.T, strict=True)) | {"y": y})
    parquet.write_table(table, folder / f"part{part}.parquet", row_group_size=2_500)

rows = blr.stream(f"{folder}/*.parquet", target="y", buffer=10_000)
print(f"{rows.rows} rows in {len(list(folder.iterdir()))} files")

# %% [markdown]
# ## Every step is a pass
#
# Without `batch_size` each step of `newton` reads the rows once, block by block, and sums what it measures. A handful
# of passes is enough, and the posterior is Laplace's, with its full covariance.


# %%
def loss(w, example):
    x, y = example
    return jnp.logaddexp(0.0, x @ w) - y * (x @ w)


objective = blr.Objective(loss, size=rows.rows, regularizer=1.0)
seen = []
remember = lambda result: seen.append(np.asarray(result.q.mean)) and False
exact = blr.fit(blr.newton(), objective, jnp.zeros(6), rows, steps=20, tolerance=1e-4, on_step=remember, every=1)
deviation = np.sqrt(np.diag(np.linalg.inv(exact.q.precision)))
print(f"{exact.reason} after {exact.steps} passes")
for name, mean, width, true in zip(names, exact.q.mean, deviation, truth, strict=True):
    print(f"{name}: {mean:6.3f} ± {width:.3f}   (truth {true:5.2f})")

# %% [markdown]
# ## Mini-batches
#
# Where a pass is long, and for networks, take mini-batches. `relative=False` says that the rate is the rule's own ρ,
# which suits a model of few weights: a tenth of a Newton step at first, then less and less. Rows are shuffled within a
# buffer, read ahead by a thread, and a fit that is interrupted goes on from its checkpoint with the batches that it
# would have seen.

# %%
epochs, batch = 3, 500
per_epoch = rows.rows // batch
path = []
follow = lambda result: path.append((result.steps, np.asarray(result.q.mean))) and False
options = {"steps": epochs * per_epoch, "batch_size": batch, "key": jax.random.key(0)}
rate = optax.cosine_decay_schedule(0.1, epochs * per_epoch)
checkpoint = blr.Checkpoint(folder / "fit.npz")
quick = blr.fit(
    blr.vogn(rate, relative=False),
    objective,
    jnp.zeros(6),
    rows,
    on_step=follow,
    every=10,
    checkpoint=checkpoint,
    **options,
)
off = np.abs(quick.q.mean - exact.q.mean) / deviation
print(f"after {epochs} epochs of mini-batches the means are off by {off.max():.2f} standard deviations at most")
print("widths, relative to the exact ones:", np.round(np.asarray(quick.q.precision) ** -0.5 / deviation, 2))

# %% [markdown]
# ## Dask
#
# The estimators take Dask's arrays and DataFrames: each partition is measured where it is, sums travel up a tree, and
# the step is taken once. Here the partitions are in threads of this process; with `distributed.Client(…)` they are on
# other machines, and the numbers stay the same.

# %%
in_memory, labels = (np.asarray(array, float) for array in rows.head(20_000))
X, Y = da.from_array(in_memory, chunks=(5_000, 6)), da.from_array(labels, chunks=5_000)
with dask.config.set(scheduler="threads", num_workers=2):
    on_dask = LogisticRegression().fit(X, Y)
local = LogisticRegression().fit(in_memory, labels)
print(f"on Dask and in memory: coefficients differ by {np.abs(on_dask.coef_ - local.coef_).max():.1e}")

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})
figure, axes = plt.subplots(figsize=(7, 3.3))
distance = lambda mean: np.abs(mean - np.asarray(exact.q.mean)).max() / deviation.max()
passes = np.arange(1, len(seen))
axes.semilogy(
    passes, [distance(mean) for mean in seen[:-1]], "o-", color="#16508f", label="newton, a pass for each step"
)
axes.semilogy(
    [step / per_epoch for step, _ in path],
    [distance(mean) for _, mean in path],
    color="#c9641a",
    label="vogn, batches of 500",
)
axes.axhline(1.0, color="#222222", linestyle="--", linewidth=1)
axes.text(5.0, 1.2, "one posterior standard deviation", fontsize=9, ha="right")
axes.set(xlabel="passes over the files", ylabel="distance to the optimum\nin posterior standard deviations")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What the result means
#
# With many rows the posterior is narrow, and an answer is good once it is well inside of one of its standard
# deviations. Newton's method gets there in a few passes. Mini-batches move at once, and keep a noise of their own,
# which a falling rate reduces.
#
# ## What to watch out for
#
# - `size` is the number of *all* rows: without it a mini-batch posterior has the width of a batch. Files know their
#   number; an iterable is told, or is counted.
# - Sorted files need small row groups or a large buffer, because rows are shuffled within `buffer`.
# - Text, dates and gaps are an error that names the column: what to put there is a decision about all rows. `bayesrule
#   fit 'table/*.parquet' --target y --cluster local:4` takes it.
#
# ## Where next
#
# [Larger than memory](../larger_than_memory.md), [tables on Dask](../tables_on_dask.md), [scaling](../scaling.md) over
# devices, and [when something goes wrong](../faults.md).
