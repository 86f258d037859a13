"""Gaussian process classification.

Few examples, no idea of the shape of the boundary, and a need to know where the classifier is guessing: a Gaussian
process returns to one half away from the data. Laplace's method and variational inference are one setting apart.
"""

# %% [markdown]
# ## The problem
#
# Two classes that no line separates, 120 examples with overlap.

# %%
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import make_moons
from sklearn.linear_model import LogisticRegression

import bayesrule as blr
from bayesrule import factors
from bayesrule.estimators import GaussianProcessClassifier
from bayesrule.models import gp
from bayesrule.models.kernels import RBF

X, y = make_moons(1120, noise=0.3, random_state=1)
X_train, y_train, X_test, y_test = X[:120], y[:120], X[120:], y[120:]

# %% [markdown]
# ## The few lines
#
# The kernel's variance and length scale are chosen by the evidence, or by its bound. `method="cvi"` is variational
# inference: each example sends a message to the process, found by the rule. `method="laplace"` is the same algorithm
# with one piece changed: the expectation is taken at the mean alone (`Delta`). Beside them, scikit-learn's logistic
# regression.

# %%
models = {
    "GP, cvi": GaussianProcessClassifier(method="cvi"),
    "GP, Laplace": GaussianProcessClassifier(method="laplace"),
    "a line": LogisticRegression(),
}
print("             accuracy   NLL    ECE")
for name, model in models.items():
    p = model.fit(X_train, y_train).predict_proba(X_test)
    scores = blr.metrics.accuracy(p, y_test), blr.metrics.nll(p, y_test), blr.metrics.ece(p, y_test)
    print(f"{name:12s}  {scores[0]:.3f}   {scores[1]:.3f}  {scores[2]:.3f}")
kernel = models["GP, cvi"].kernel_
print(f"kernel: variance {kernel.variance:.1f}, length scale {kernel.lengthscale:.2f} of standardised inputs")

# %% [markdown]
# ## What the result means
#
# Left, the probability of a class; right, the standard deviation of the latent function f, whose sign decides. Near the
# examples f is known; away from them its deviation returns to the prior's, and the probability to one half.

# %%
plt.rcParams.update({"figure.constrained_layout.use": True})
across, up = np.linspace(-2.5, 3.5, 70), np.linspace(-2.2, 2.7, 60)
plane = np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)
process = models["GP, cvi"]
probability = process.predict_proba(plane)[:, 1].reshape(60, 70)
deviation = np.sqrt(process.latent_mean_and_variance(plane)[1]).reshape(60, 70)
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.9), sharey=True)
shades = left.contourf(across, up, probability, levels=np.linspace(0, 1, 11), cmap="PuOr_r")
left.contour(across, up, probability, levels=[0.5], colors="#222222", linewidths=1)
figure.colorbar(shades, ax=left, ticks=[0, 0.5, 1], label="p(orange)")
widths = right.contourf(across, up, deviation, levels=10, cmap="Blues")
figure.colorbar(widths, ax=right, label="standard deviation of f")
for axes in (left, right):
    axes.plot(*X_train[y_train == 0].T, ".", color="#54278f", markersize=4, mec="white", mew=0.4)
    axes.plot(*X_train[y_train == 1].T, ".", color="#a63603", markersize=4, mec="white", mew=0.4)
    axes.set(xlabel="$x_1$", aspect="equal")
left.set_ylabel("$x_2$")
plt.show()

# %% [markdown]
# ## The model in its pieces
#
# The estimator is a thin layer over a model of one block, the process, and one factor. Another likelihood
# (`poisson_exp` for counts, `student_t` for outliers, any log density by `factors.likelihood`) is another factor on the
# same process.

# %%
kernel = RBF(4.0, 0.7)
model = gp.process(kernel, X_train, factors.bernoulli_logit("y", {"f": None}))
result = blr.fit(blr.cvi(1.0), model, None, {"y": y_train.astype(float)}, steps=30, tolerance=1e-4)
mean, variance = gp.predict(result.q, kernel, X_train, np.array([[0.5, 0.25], [9.0, 9.0]]))
print(result, f"bound {float(result.bound):.2f}")
for place, m, v in zip(("between the moons", "far away"), mean, variance, strict=True):
    print(f"f {place}: {m:.2f} ± {v**0.5:.2f}")

# %% [markdown]
# ## What to watch out for
#
# - A dense process costs N³ in time and N² in memory. For a single input and a Matérn kernel `through="chain"` is exact
#   in linear time; `inducing=` in the estimators, or `models.sparse_gp`, is for many rows and several inputs.
# - More than two classes are fitted one against the others.
# - To convergence on 1000 points CVI takes 0.31 of scikit-learn's time in float32 and 0.55 in float64; the first call
#   compiles for 3 to 5 seconds ([measured](../benchmarks.md#gaussian-processes)).
#
# ## Where next
#
# [Named models](../models.md#gaussian-processes) has regression, inducing points and how hyper-parameters are chosen;
# [messages](../messages.md) has the algorithm; [series](series_with_gaps.md) are processes of one input.
