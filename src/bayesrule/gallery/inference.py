"""Pictures of Bayesian inference and online learning, each from a run of the rule. The docstring is the caption."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from sklearn.datasets import load_iris, make_moons

from .. import factors
from ..factor_graph.model import Model
from ..families.dirichlet import Beta, Dirichlet
from ..families.discrete import Categorical
from ..families.gamma import Gamma
from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.wishart import NormalWishart
from ..fitting.fit import fit
from ..models import gp
from ..models.kernels import RBF
from ..objectives.objective import Objective
from ..points.quadrature import Quadrature
from ..recipes import inference as recipes
from ..recipes.optimization import von
from .style import BAYESIAN, INK, PLAIN, QUIET, THIRD, Picture, label, panels, plane, rings, stacked
from .trace import trace_steps


def conjugate() -> Picture:
    """The posterior of a coin's probability after 0, 1, 4, 16, 64 and 256 tosses. Each curve is one exact step of the
    rule with ρ = 1 from the previous one; the dotted line is the true probability."""
    chance = 0.35
    tosses = (np.random.default_rng(8).random(256) < chance).astype(float)
    loss = lambda mu, counts: -(counts[0] * mu[0] + counts[1] * mu[1])  # The counts are heads and tails.
    rule, q, grid = recipes.conjugate(), Beta(jnp.asarray(1.0), jnp.asarray(1.0)), np.linspace(0.002, 0.998, 400)
    step = jax.jit(lambda q, counts: rule.step(Objective(loss, size=1, prior=q), rule.init(q), counts)[0].q)
    density_of = jax.jit(lambda q: jnp.exp(q.log_prob(jnp.asarray(grid))))
    figure, (axes,) = panels(1)
    shades = LinearSegmentedColormap.from_list("", ["#b9cfe8", BAYESIAN])
    for index, (before, after) in enumerate(zip([0, 0, 1, 4, 16, 64], [0, 1, 4, 16, 64, 256], strict=True)):
        if after > before:
            heads = tosses[before:after].sum()
            q = step(q, jnp.array([[heads, after - before - heads]]))
        density = np.asarray(density_of(q))
        color = to_hex(shades(index / 5))
        axes.plot(grid, density, color=color, lw=1.8)
        at = {0: 0.01, 1: 0.9, 4: 0.68}.get(after) or float(grid[np.argmax(density)]) + 0.03
        text = "prior" if after == 0 else f"{after} toss" if after == 1 else f"{after} tosses"
        label(axes, at, float(np.interp(at, grid, density)) + 0.2, text, color if index > 1 else "#7d9fc4")
    axes.axvline(chance, color=INK, lw=1, ls=":")
    axes.set(xlabel="probability of heads", xlim=(0, 1), xticks=[0, 0.25, 0.5, 0.75, 1], yticks=[], ylim=(0, None))
    axes.spines["left"].set_visible(False)
    return Picture(figure, rule)


def laplace() -> Picture:
    """The log-odds of an event that happened once in twelve trials; its posterior (grey) is skewed to the left.
    Laplace's Gaussian has the mode and the curvature there; the variational one is nearer the posterior mean."""

    def loss(theta: jax.Array) -> jax.Array:
        return 12 * jax.nn.softplus(theta) - theta + 0.5 * (theta / 3) ** 2

    rule = recipes.laplace()
    first = Gaussian(jnp.asarray(0.0), jnp.asarray(1.0))
    delta_method = fit(rule, loss, first, steps=50, tolerance=1e-9).q
    averaged = fit(von(0.3).replace(points=Quadrature(30)), loss, delta_method, steps=100).q
    figure, (axes,) = panels(1)
    grid = np.linspace(-8, 1.5, 500)
    density = np.exp(-np.asarray(loss(jnp.asarray(grid))))
    density /= density.sum() * (grid[1] - grid[0])
    axes.fill_between(grid, density, color="#d9d9d9", lw=0)
    for q, color, style in ((delta_method, PLAIN, "-"), (averaged, BAYESIAN, "--")):
        height = np.exp(np.asarray(q.log_prob(jnp.asarray(grid))))
        axes.plot(grid, height, style, color=color, lw=1.8)
        axes.vlines(float(q.mean), 0, height.max(), color=color, lw=1, ls=":")
    axes.set(xlabel="log-odds", xlim=(-8, 1.5), yticks=[], ylim=(0, None))
    axes.spines["left"].set_visible(False)
    top = axes.get_ylim()[1]
    label(axes, -7.8, 0.93 * top, "posterior", "#777777", va="top")
    label(axes, -7.8, 0.85 * top, "Laplace's method", PLAIN, va="top")
    label(axes, -7.8, 0.77 * top, "variational", BAYESIAN, va="top")
    return Picture(figure, rule)


# Mixtures.


def _mixture(components: NormalWishart, priors: dict[str, Any], size: int) -> Model:
    blocks = {"weights": Dirichlet(jnp.full(3, 2.0)), "components": components}
    terms: dict[str, Any] = {f"prior of {name}": factors.prior(name, member) for name, member in priors.items()}
    terms["z"] = factors.categorical("z", probabilities="weights")
    terms["y"] = factors.choice("z", factors.multivariate_normal("y", joint="components"))
    return Model(blocks, terms, local={"z": Categorical(jnp.zeros(3))}, size=size)


def _around(means: np.ndarray, df: float = 4.0) -> NormalWishart:
    count = len(means)
    return NormalWishart(jnp.asarray(means), jnp.ones(count), jnp.full(count, df), jnp.stack([jnp.eye(2)] * count))


COLORS = (BAYESIAN, PLAIN, THIRD)


def em() -> Picture:
    """Petals and sepals of 150 irises, and a mixture of three Gaussians from a poor start. An iteration of EM is a step
    of the rule in every block, with the parameters' blocks read at their mode; colours are responsibilities."""
    rows = np.asarray(load_iris(return_X_y=True)[0])[:, [2, 1]]
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    rule, counts = recipes.em(), (1, 5, 15, 60)
    start = np.array([[-0.2, 1.6], [0.2, 0.4], [0.5, -1.2]])
    read = lambda q: (q["components"].mean, q["z"].probabilities)
    modes, responsibilities = trace_steps(
        rule, _mixture(_around(start), {}, 150), None, steps=60, data={"y": rows}, read=read
    )
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    subplots = [figure.add_subplot(2, 2, index + 1) for index in range(4)]
    palette = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in COLORS])
    for axes, count in zip(subplots, counts, strict=True):
        plane(axes, (-1.9, 2.1), (-2.8, 3.3))
        axes.set_title(f"{count} iteration{'s' * (count > 1)}", fontsize=10, color=INK)
        axes.scatter(*rows.T, c=responsibilities[count - 1] @ palette, s=8, lw=0, alpha=0.8)
        means, covariances = modes["mean"][count - 1], np.linalg.inv(modes["precision"][count - 1])
        for mean, covariance, color in zip(means, covariances, COLORS, strict=True):
            rings(axes, mean, covariance, color, widths=(2,), fill=0.08)
    subplots[2].set_xlabel("petal length", color=INK)
    subplots[2].set_ylabel("sepal width", color=INK)
    return Picture(figure, rule)


def decaying_rate(count: Any) -> Any:
    """The rate (t + 2)^−0.7."""
    return (count + 2.0) ** -0.7


def svi() -> Picture:
    """A mixture for 3,000 points. Left, the bound against the rows read: with batches of 60, SVI is close to its best
    before the first pass over the data ends; VMP on all rows (orange) has then taken one step. Right, SVI's q."""
    random = np.random.default_rng(0)
    centers = np.array([[-1.6, -0.6], [1.2, -1.0], [0.3, 1.5]])
    rows = centers[random.integers(0, 3, 3000)] + random.normal(size=(3000, 2)) @ [[0.6, 0.2], [0.0, 0.5]]
    prior = NormalWishart(*map(jnp.asarray, ([0.0, 0.0], 0.1, 4.0, 0.5 * np.eye(2))))
    priors = {"weights": Dirichlet(jnp.full(3, 2.0)), "components": prior}
    start = _around(np.array([[-0.3, 0.0], [0.3, -0.2], [0.0, 0.4]]))
    # The component of each row is summed out at its optimum, so the bound on all rows is defined for every q of the
    # global blocks, whichever rows it was computed from.
    terms = {f"prior of {name}": factors.prior(name, member) for name, member in priors.items()}
    terms["y"] = factors.mixture("weights", factors.multivariate_normal("y", joint="components"))
    model, data = Model({"weights": priors["weights"], "components": start}, terms, size=3000), {"y": jnp.asarray(rows)}
    rule, read = recipes.svi(decaying_rate), lambda q: (q["components"], model.bound(q, data) / 3000)
    batches = {"y": np.concatenate([random.permutation(rows) for _ in range(4)]).reshape(200, 60, 2)}
    components, bounds = trace_steps(rule, model, None, steps=200, batches=batches, read=read)
    _, full_batch = trace_steps(recipes.vmp(order="parallel"), model, None, steps=4, data=data, read=read)
    figure, (left, right) = panels(1.35, 1)
    left.plot(np.arange(1, 5) * 3000, full_batch, "D-", color=PLAIN, ms=5, lw=1.2)
    left.plot(np.arange(1, 201) * 60, bounds, "-", color=BAYESIAN, lw=1.5)
    left.set(xlabel="rows read", ylabel="bound per row", xlim=(0, 12500), xticks=[0, 3000, 6000, 9000, 12000])
    low, high = left.get_ylim()
    label(left, 800, high - 0.2 * (high - low), "batches of 60", BAYESIAN)
    label(left, 4900, low + 0.4 * (high - low), "all rows at once", PLAIN)
    plane(right, (-3.6, 3.2), (-2.9, 3.2))
    right.plot(*rows[::3].T, "o", color=QUIET, ms=1.5, mew=0, alpha=0.5)
    q = jax.tree.map(lambda leaf: leaf[-1], components)
    for mean, precision, color in zip(q.mean, q.df[:, None, None] * q.scale, COLORS, strict=True):
        rings(right, mean, np.linalg.inv(precision), color, fill=0.1)
    return Picture(figure, rule)


def vmp() -> Picture:
    """Mean and precision of a normal distribution from ten numbers. Grey is the exact posterior, blue the product
    q(mean) q(precision): each block is set by the message from the other, and three sweeps converge."""
    y = np.array([0.2, 1.9, 1.1, -0.6, 2.4, 0.9, 1.5, -0.1, 2.2, 1.0])
    priors = {
        "mean": DiagonalGaussian(jnp.asarray(0.0), jnp.asarray(0.1)),
        "precision": Gamma(jnp.asarray(1.0), jnp.asarray(1.0)),
    }
    terms = {f"prior of {name}": factors.prior(name, member) for name, member in priors.items()}
    terms["y"] = factors.normal("y", mean="mean", precision="precision")
    start = {
        "mean": DiagonalGaussian(jnp.asarray(-0.2), jnp.asarray(25.0)),
        "precision": Gamma(jnp.asarray(12.0), jnp.asarray(5.0)),
    }
    rule, model = recipes.vmp(), Model(priors, terms)
    joint = lambda m, t: 5 * jnp.log(t) - 0.5 * t * jnp.sum((jnp.asarray(y) - m) ** 2) - 0.05 * m**2 - t
    grid = np.linspace(-0.9, 2.7, 140), np.linspace(0.02, 3.6, 140)
    m, t = (jnp.asarray(part) for part in np.meshgrid(*grid))
    exact = np.asarray(jnp.exp(jax.vmap(jax.vmap(joint))(m, t)))
    figure, every = panels(1, 1, 1, size=(5.4, 2.6))
    for axes, sweeps in zip(every, (0, 1, 3), strict=True):
        result = fit(rule, model, start, {"y": jnp.asarray(y)}, steps=sweeps).q if sweeps else start
        q = np.asarray(jnp.exp(result["mean"].log_prob(m) + result["precision"].log_prob(t)))
        plane(axes, (-0.9, 2.7), (0, 3.6))
        for values, filled in ((exact, True), (q, False)):
            order = np.sort(values.ravel())[::-1]
            levels = sorted(order[np.searchsorted(np.cumsum(order) / order.sum(), share)] for share in (0.3, 0.6, 0.9))
            if filled:
                axes.contourf(*grid, values, levels=[*levels, values.max()], colors=["#e4e4e4", "#cfcfcf", "#b5b5b5"])
            else:
                axes.contour(*grid, values, levels=levels, colors=BAYESIAN, linewidths=1.3)
        title = "start" if sweeps == 0 else f"{sweeps} sweep{'s' * (sweeps > 1)}"
        axes.set_title(title, fontsize=10, color=INK)
        axes.set_xlabel("mean")
    every[0].set_ylabel("precision")
    return Picture(figure, rule)


def ncvmp() -> Picture:
    """Counts with rate exp(2.5w) and w ~ N(0, 1). Above, how far the bound is below its best after each sweep: full
    steps with a non-conjugate factor (orange) can overshoot to huge rates and return slowly. NCVMP's guard halves a
    step until the bound does not fall; below, the fraction of the step that it took."""
    prior = Gaussian(jnp.zeros(1), jnp.eye(1))
    terms = {"prior": factors.prior("w", prior), "y": factors.poisson_exp("y", {"w": "x"})}
    model = Model({"w": prior}, terms, size=5)
    data = {"x": jnp.full((5, 1), 2.5), "y": jnp.full(5, 10.0)}
    rule, sweeps = recipes.ncvmp(), 22
    guarded = fit(rule, model, None, data, steps=sweeps, tolerance=1e-6)
    plain = fit(recipes.vmp(), model, None, data, steps=sweeps, tolerance=1e-6)
    figure, (above, below) = stacked(2, 1)
    for result, color, marker in ((plain, PLAIN, "D"), (guarded, BAYESIAN, "o")):
        gap = (guarded.bound or 0.0) - result.trace["bound"][: result.steps]
        above.plot(np.where(gap > 1e-4, gap, np.nan), "-", marker=marker, color=color, ms=4.5, lw=1.2)
    above.set(yscale="log", ylabel="below the best (nats)", xlim=(-0.6, sweeps - 0.4))
    label(above, 7, 3e6, "full steps", PLAIN)
    label(above, 1.6, 1.0, "NCVMP", BAYESIAN)
    below.bar(np.arange(guarded.steps), guarded.trace["fraction"][: guarded.steps], color=BAYESIAN, width=0.7)
    below.set(xlabel="sweep", ylabel="fraction", ylim=(0, 1.05), xlim=(-0.6, sweeps - 0.4), yticks=[0, 0.5, 1])
    below.set_xticks([0, 5, 10, 15, 20])
    above.set_xticks([0, 5, 10, 15, 20], [])
    return Picture(figure, rule)


def cvi() -> Picture:
    """A Gaussian process classifies two moons. The likelihood of a label is not conjugate; each point's message is a
    natural gradient, computed by quadrature in one dimension. Colour is the probability, pale far away from the data;
    on the line it is one half."""
    x, y = make_moons(60, noise=0.18, random_state=3)
    kernel = RBF(6.0, 0.7)
    rule = recipes.cvi(0.5)
    model = gp.process(kernel, jnp.asarray(x), factors.bernoulli_logit("y", {"f": None}))
    q = fit(rule, model, None, {"y": jnp.asarray(y, float)}, steps=30).q
    figure, (axes,) = panels(1, size=(5.2, 3.4))
    plane(axes, (-1.9, 2.9), (-1.35, 1.85))
    first, second = np.linspace(-1.9, 2.9, 70), np.linspace(-1.35, 1.85, 60)
    grid_points = np.stack(np.meshgrid(first, second), axis=-1).reshape(-1, 2)
    mean, variance = gp.predict(q, kernel, jnp.asarray(x), jnp.asarray(grid_points))
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    outputs = np.asarray(mean)[:, None] + np.sqrt(np.asarray(variance))[:, None] * nodes
    probability = ((1 / (1 + np.exp(-outputs))) @ weights / weights.sum()).reshape(60, 70)
    shades = LinearSegmentedColormap.from_list("", [PLAIN, "#f2ddcf", "#ffffff", "#cfdded", BAYESIAN])
    axes.contourf(first, second, probability, levels=np.linspace(0, 1, 21), cmap=shades, alpha=0.75)
    axes.contour(first, second, probability, levels=[0.5], colors=INK, linewidths=1.4)
    for value, color, marker in ((0, PLAIN, "D"), (1, BAYESIAN, "o")):
        axes.plot(*x[y == value].T, marker, color=color, ms=5.5, mec="white", mew=0.8)
    return Picture(figure, rule)


def exponential_weights() -> Picture:
    """Five experts over 300 rounds: for 120 rounds the orange one is best, then the blue one. Above, their weights.
    Below, the regret, which is the loss minus that of the best expert in hindsight, and its bound √(T log K / 2)."""
    rounds, experts = 300, 5
    random = np.random.default_rng(2)
    quality = np.full((rounds, experts), 0.62)
    quality[:120, 1], quality[120:, 0] = 0.4, 0.3
    losses = (random.random((rounds, experts)) < quality).astype(float)
    rate = float(np.sqrt(8 * np.log(experts) / rounds))
    rule = recipes.exponential_weights(rate)
    objective = Objective(lambda expert, loss: loss[expert], size=1)
    start = Categorical(jnp.zeros(experts))
    weights = trace_steps(rule, objective, start, steps=rounds, batches=losses[:, None], read=lambda q: q.probabilities)
    weights_before = np.vstack([np.full(experts, 1 / experts), weights[:-1]])
    regret = np.cumsum(np.sum(weights_before * losses, axis=1)) - np.cumsum(losses, axis=0).min(axis=1)
    figure, (above, below) = stacked(1.6, 1)
    colors = [BAYESIAN, PLAIN, "#b8b8b8", "#cdcdcd", "#e0e0e0"]
    above.stackplot(np.arange(rounds), weights_before.T, colors=colors, edgecolor="white", lw=0.4)
    above.set(ylabel="weight", xlim=(0, rounds), ylim=(0, 1), xticklabels=[])
    below.plot(regret, color=BAYESIAN, lw=1.5)
    limit = np.sqrt(rounds * np.log(experts) / 2)
    below.axhline(limit, color=INK, lw=1, ls="--")
    below.set(xlabel="round", ylabel="regret", xlim=(0, rounds), ylim=(min(0, regret.min()) - 1, 1.25 * limit))
    label(below, 6, limit + 0.8, "bound", INK)
    return Picture(figure, rule)
