"""The style of the pictures: colours, axes, and the marks that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from ..families.base import Family
from ..families.gaussian.base import GaussianFamily
from ..points.base import Points
from ..rule.rule import Rule

# The colours differ in lightness and each solution has its own marker, so that a print in grey can be read too.
INK, PLAIN, BAYESIAN, THIRD, QUIET = "#222222", "#c9641a", "#16508f", "#3f9b6b", "#9a9a9a"

Loss = Callable[[Float[Array, "..."]], Float[Array, "..."]]


class Picture(NamedTuple):
    """A figure, and the algorithm whose run it shows."""

    figure: Figure
    rule: Rule


def canvas(x: tuple[float, float], y: tuple[float, float]) -> tuple[Figure, Axes, np.ndarray]:
    """A figure with one pair of axes over a range of θ and of the loss, and a grid along θ."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlim=x, ylim=y, xlabel=r"$\theta$", yticks=[])
    style_axes(axes)
    axes.spines["left"].set_visible(False)
    return figure, axes, np.linspace(*x, 800)


def style_axes(axes: Axes) -> None:
    """The common style of axes: no frame, and dark ticks and labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)


def panels(*widths: float, size: tuple[float, float] = (5.2, 3.2)) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side, of these relative widths."""
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    subplots = [figure.add_subplot(grid[0, index]) for index in range(len(widths))]
    for axes in subplots:
        style_axes(axes)
    return figure, subplots


def stacked(*heights: float, size: tuple[float, float] = (5.2, 3.4)) -> tuple[Figure, list[Axes]]:
    """A figure with axes one above another, of these relative heights."""
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    subplots = [figure.add_subplot(grid[index, 0]) for index in range(len(heights))]
    for axes in subplots:
        style_axes(axes)
    return figure, subplots


def plane(axes: Axes, x: tuple[float, float], y: tuple[float, float], names: tuple[str, str] = ("", "")) -> None:
    """Axes over two parameters in a thin frame, without ticks unless the parameters have names."""
    axes.set(xlim=x, ylim=y, xlabel=names[0], ylabel=names[1])
    if not any(names):
        axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color("#bbbbbb")


def surface(axes: Axes, function: Callable[[Any], Any], count: int = 120) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The values of a function over the area of the axes, for `contour` and `contourf`."""
    x, y = np.linspace(*axes.get_xlim(), count), np.linspace(*axes.get_ylim(), count)
    grid = jnp.stack(jnp.meshgrid(jnp.asarray(x), jnp.asarray(y)), axis=-1)
    return x, y, np.asarray(jax.jit(jax.vmap(jax.vmap(function)))(grid))


def contours(axes: Axes, function: Callable[[Any], Any], levels: Any = 10) -> None:
    """Contour lines of the loss; `levels` is a list, or their number."""
    x, y, values = surface(axes, function)
    if isinstance(levels, int):
        levels = values.min() + np.ptp(values) * np.linspace(0.02, 1, levels) ** 2
    axes.contour(x, y, values, levels=levels, colors=INK, linewidths=0.5, alpha=0.5, linestyles="solid")


def posterior(axes: Axes, loss: Callable[[Any], Any]) -> None:
    """e^{−ℓ} as grey areas that contain 30, 60, 90 and 99 % of its mass."""
    x, y, values = surface(axes, loss)
    density = np.exp(values.min() - values)
    descending = np.sort(density.ravel())[::-1]
    mass = np.cumsum(descending) / density.sum()
    levels = [descending[np.searchsorted(mass, share)] for share in (0.99, 0.9, 0.6, 0.3)]
    axes.contourf(x, y, density, levels=[*levels, density.max()], colors=["#ececec", "#d9d9d9", "#c4c4c4", "#adadad"])


def trail(axes: Axes, points: np.ndarray, color: str, marker: str = "o", *, size: float = 3, lw: float = 1.2) -> None:
    """The path of a run: a line with a dot for each step and a larger one at the end."""
    axes.plot(*points.T, "-", marker=marker, color=color, ms=size, mew=0, lw=lw)
    axes.plot(*points[-1], marker, color=color, ms=7, mec="white", mew=1, zorder=5)


def rings(
    axes: Axes,
    mean: Any,
    covariance: Any,
    color: str,
    *,
    widths: tuple[float, ...] = (1, 2),
    fill: float = 0.0,
    **line: Any,
) -> None:
    """Ellipses of a two-dimensional Gaussian at these numbers of standard deviations."""
    angles = np.linspace(0, 2 * np.pi, 100)
    ring = np.linalg.cholesky(np.asarray(covariance)) @ np.stack([np.cos(angles), np.sin(angles)])
    for width in widths:
        outline = np.asarray(mean)[:, None] + width * ring
        axes.plot(*outline, **{"color": color, "lw": 1.2} | line)
        axes.fill(*outline, color=color, alpha=fill, lw=0)


def losses(axes: Axes, loss: Loss, q: GaussianFamily, points: Points, grid: np.ndarray) -> None:
    """ℓ, and E_q ℓ as q's mean moves along the grid."""
    theta, weights, _ = points.at(q, None)
    along = jnp.asarray(grid)
    averages = loss(along[:, None] + (theta - q.mean)) @ weights
    axes.plot(grid, averages, color=BAYESIAN, lw=1.6, ls="--")
    axes.plot(grid, loss(along), color=INK, lw=2)


def bell(axes: Axes, q: Family, grid: np.ndarray, scale: float) -> None:
    """The density of q, drawn on the bottom of the axes."""
    floor = axes.get_ylim()[0]
    density = np.exp(np.asarray(q.log_prob(jnp.asarray(grid))))
    axes.fill_between(grid, floor, floor + scale * density, color=BAYESIAN, alpha=0.18, lw=0)
    axes.plot(grid, floor + scale * density, color=BAYESIAN, lw=1)


def solution(axes: Axes, loss: Loss, theta: float, color: str, marker: str) -> None:
    """A solution on the curve of the loss, with a dotted line down to its θ."""
    value = float(loss(jnp.asarray(theta)))
    axes.vlines(theta, axes.get_ylim()[0], value, color=color, lw=1, ls=":")
    axes.plot(theta, value, marker, color=color, ms=7, mec="white", mew=1, zorder=5)


def ellipse(axes: Axes, q: GaussianFamily, color: str, marker: str) -> None:
    """A two-dimensional Gaussian: its mean, and ellipses at one and two standard deviations."""
    rings(axes, q.mean, q.covariance(), color, fill=0.2, lw=1)
    axes.plot(*np.asarray(q.mean), marker, color=color, ms=5, mec="white", mew=0.8)


def label(axes: Axes, x: float, y: float, text: str, color: str, *, ha: str = "left", va: str = "baseline") -> None:
    """A label in the colour of what it names, with a pale outline so that it can be read across lines."""
    halo = [withStroke(linewidth=2.5, foreground="white", alpha=0.8)]
    axes.text(x, y, text, color=color, fontsize=10, ha=ha, va=va, path_effects=halo, zorder=8)
