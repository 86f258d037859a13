"""Draw the picture of the README and of the first page: `python draw_rule.py folder` writes `folder/rule.svg`.

On the left one step of the rule with its four pieces, on the right where other choices of pieces end, all on the
posterior of a logistic regression with two weights and nine rows.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import bayesrule as blr
from bayesrule.gallery.dark_theme import follow_theme
from bayesrule.gallery.style import BAYESIAN, INK, PLAIN, QUIET, THIRD, plane, posterior, rings, style_axes

INPUTS = (1.2, 1.9, 2.3, 3.1, 0.6, 0.2, 1.4, 2.7, -0.3)
X = jnp.array([[1.0, value] for value in INPUTS])
Y = jnp.array([-1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
ACROSS, UP = (-4.6, 3.4), (-1.6, 4.6)
REACH = 0.09  # of an arrow, for each unit of the gradient
START = blr.Gaussian(jnp.array([-3.0, -0.1]), jnp.array([[5.0, 0.5], [0.5, 6.0]]))


def loss(w: jax.Array) -> jax.Array:
    """Logistic loss, and a prior N(0, 4)."""
    return jnp.sum(jnp.logaddexp(0.0, -Y * (X @ w))) + 0.125 * w @ w


def call_out(axes: Axes, text: str, at: tuple[float, float], to: tuple[float, float], color: str) -> None:
    """Words in a colour at a place in the frame, with a thin line to what they name."""
    line = {"arrowstyle": "-", "color": color, "lw": 0.9, "shrinkA": 1, "shrinkB": 3}
    axes.annotate(
        text,
        to,
        at,
        textcoords="axes fraction",
        color=color,
        fontsize=10.5,
        arrowprops=line,
        va="center",
        ha="left",
        zorder=9,
    )


def draw_step(axes: Axes) -> None:
    """q before and after a step, the points at which the loss is evaluated, and the gradients measured there."""
    points, key = blr.MonteCarlo(5), jax.random.key(1)
    rule = blr.von(0.5).replace(points=points)
    state, _ = rule.step(loss, rule.init(START), None, key)
    theta = np.asarray(points.at(START, jax.random.clone(key))[0])
    downhill = -np.asarray(jax.vmap(jax.grad(loss))(jnp.asarray(theta)))
    before, after = np.asarray(START.mean), np.asarray(state.q.mean)
    root = np.linalg.cholesky(np.asarray(START.covariance()))
    rings(axes, before, START.covariance(), PLAIN, fill=0.1)
    rings(axes, after, state.q.covariance(), BAYESIAN, fill=0.1)
    axes.quiver(
        *theta.T, *REACH * downhill.T, angles="xy", scale_units="xy", scale=1, color=THIRD, width=0.007, zorder=6
    )
    axes.plot(*theta.T, "o", color=INK, ms=5, mec="white", mew=0.8, zorder=7)
    ends = {"arrowstyle": "-|>", "color": BAYESIAN, "lw": 2.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
    axes.annotate("", after, before, arrowprops=ends, zorder=8)
    lowest = np.argmin(theta[:, 1])
    call_out(axes, "family: which q?", (0.02, 0.04), tuple(before + root @ [-1.3, -1.5]), PLAIN)
    call_out(axes, "points: where?", (0.36, 0.06), tuple(theta[lowest]), INK)
    call_out(
        axes, "curvature: what is measured?", (0.36, 0.14), tuple(theta[lowest] + 0.5 * REACH * downhill[lowest]), THIRD
    )
    call_out(axes, "steps: how far?", (0.02, 0.62), tuple(0.4 * before + 0.6 * after), BAYESIAN)


def draw_ends(axes: Axes) -> None:
    """The q of four algorithms, run to their ends."""
    fixed = blr.fit(blr.gradient_descent(0.2), loss, jnp.zeros(2), steps=200, tolerance=1e-10).q
    laplace = blr.fit(blr.laplace(), loss, jnp.zeros(2), steps=50, tolerance=1e-10).q
    averaged = blr.newton(0.5).replace(points=blr.Quadrature(20))
    full = blr.fit(averaged, loss, laplace, steps=200, tolerance=1e-10).q
    pieces = {"family": blr.DiagonalGaussian, "curvature": blr.HessianDiagonal()}
    diagonal = blr.fit(averaged.replace(**pieces), loss, jnp.zeros(2), steps=200, tolerance=1e-10).q
    as_matrix = lambda q: np.diag(1 / np.broadcast_to(np.asarray(q.precision), 2))
    cases = (
        ("gradient descent: its width is given", fixed, as_matrix(fixed), QUIET, (0.03, 0.06), (-0.5, -0.8)),
        ("Laplace: a Gaussian at the mode", laplace, laplace.covariance(), PLAIN, (0.03, 0.94), (-0.9, 0.35)),
        ("diagonal, averaged over q", diagonal, as_matrix(diagonal), THIRD, (0.55, 0.17), (0.6, -0.6)),
        ("full, averaged over q", full, full.covariance(), BAYESIAN, (0.62, 0.85), (0.3, 0.9)),
    )
    for text, q, covariance, color, at, offset in cases:
        mean = np.asarray(q.mean)
        rings(axes, mean, covariance, color, widths=(1,), fill=0.08, lw=1.8)
        axes.plot(*mean, "o", color=color, ms=5, mec="white", mew=0.8, zorder=7)
        toward = np.asarray(offset)
        root = np.linalg.cholesky(np.asarray(covariance))
        direction = np.linalg.solve(root, toward)
        edge = mean + root @ (direction / np.linalg.norm(direction))
        call_out(axes, text, at, tuple(edge), color)


def draw() -> Figure:
    """Both panels."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    titles = ("One step of the rule: four pieces …", "… and other pieces are other algorithms")
    for number, (title, paint) in enumerate(zip(titles, (draw_step, draw_ends), strict=True), start=1):
        axes = figure.add_subplot(1, 2, number)
        style_axes(axes)
        plane(axes, ACROSS, UP)
        posterior(axes, loss)
        paint(axes)
        axes.set_title(title, fontsize=12, color=INK, loc="left")
    return figure


def main(folder: Path) -> None:
    """Write the picture."""
    with jax.enable_x64(True):
        figure = draw()
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "bayesrule"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    # Two decimals of a point are finer than any screen, and halve the file.
    shorten = lambda path: re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path[0])
    svg = re.sub(r' d="[^"]*"', shorten, file.getvalue().decode())
    (folder / "rule.svg").write_text(follow_theme(svg), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
