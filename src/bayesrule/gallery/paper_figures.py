"""The paper's figures, drawn from runs of the rule; the docstring of a figure is its caption on the gallery's page."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from ..families.gaussian.fixed import FixedGaussian
from ..families.gaussian.full import Gaussian
from ..families.latent.mixture import Mixture
from ..fitting.fit import fit
from ..fitting.result import Result
from ..points.quadrature import Quadrature
from ..recipes.optimization import gradient_descent, newton, von
from .style import BAYESIAN, INK, PLAIN, bell, canvas, ellipse, label, losses, solution

# Figure 1 (a): a minimum next to a wall.

STEEPNESS, SLOPE, WIDTH = 8.0, 1.0, 0.4  # k, a, σ
WALL_POINTS = Quadrature(40)


def wall_loss(theta: Float[Array, "..."]) -> Float[Array, "..."]:
    """A gentle slope that ends at a wall: ℓ(θ) = e^{kθ} − aθ, with its minimum at θ_* = log(a/k)/k."""
    return jnp.exp(STEEPNESS * theta) - SLOPE * theta


class WallSolutions(NamedTuple):
    """The results of three algorithms on `wall_loss`: Newton's method, and two that average over a Gaussian, one with a
    fixed variance and one that learns it."""

    plain: Result
    bayesian: Result
    learned: Result


def wall_solutions() -> WallSolutions:
    r"""Fit the minimum next to a wall, and the Bayesian solutions, which keep a distance from it.

    With a fixed variance σ², $E_q∇ℓ = ke^{km + ½k^2σ^2} − a$ is zero (`eq:conv_cond_1`) at $m = θ_* − ½kσ^2$. If
    the precision is learned too, $S = E_q∇^2ℓ = ka$ (`eq:conv_cond_2`), and so $m = θ_* − 1/(2a)$.

    >>> plain, bayesian, learned = wall_solutions()
    >>> round(float(plain.q.mean - bayesian.q.mean), 3), round(float(plain.q.mean - learned.q.mean), 3)
    (0.64, 0.5)
    """
    plain = fit(newton(), wall_loss, Gaussian(-1.0, 1.0), steps=50, tolerance=1e-12)
    start = FixedGaussian(plain.q.mean, 1 / WIDTH**2)
    bayesian = fit(gradient_descent(0.5).replace(points=WALL_POINTS), wall_loss, start, steps=200)
    # Near its solution a step multiplies the error by 1 − (3 ± √8)ρ for this k/a, so at ρ = ½ it would diverge.
    learned = fit(von(0.2).replace(points=WALL_POINTS), wall_loss, plain.q, steps=1000)
    return WallSolutions(plain, bayesian, learned)


def wall() -> Figure:
    """Figure 1 (a): the Bayesian solution keeps a distance from the wall (`fig:bayes_robust_1`).

    Averaging over a Gaussian of variance σ² shifts the wall by ½kσ², and the minimum with it.
    """
    solutions = wall_solutions()
    plain, q = float(solutions.plain.q.mean), solutions.bayesian.q
    mean = float(q.mean)
    figure, axes, grid = canvas((-2.3, 0.35), (-1.1, 3.2))
    bell(axes, q, grid, scale=0.75)
    losses(axes, wall_loss, q, WALL_POINTS, grid)
    solution(axes, wall_loss, plain, PLAIN, "D")
    solution(axes, wall_loss, mean, BAYESIAN, "o")
    ends = {"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (mean, -0.15), (plain, -0.15), arrowprops=ends)
    label(axes, (mean + plain) / 2, -0.1, r"$\frac{1}{2}k\sigma^2$", INK, va="bottom", ha="center")
    label(axes, -2.25, 1.55, r"loss $\ell(\theta) = e^{k\theta} - a\theta$", INK, va="top")
    label(axes, -0.66, 2.8, r"averaged loss $\mathrm{E}_q\ell$", BAYESIAN, va="center", ha="right")
    label(axes, mean - 0.05, 0.25, "Bayesian\nsolution $m$", BAYESIAN, va="center", ha="right")
    label(axes, plain + 0.05, -0.15, "plain\nsolution $\\theta_*$", PLAIN, va="center")
    label(axes, mean - 0.55, -0.6, r"$q = \mathcal{N}(m, \sigma^2)$", BAYESIAN, ha="right")
    return figure


# Figure 1 (b): a sharp minimum and a flat one.

FLAT, SHARP = (-1.0, 4.0, 0.9), (1.5, 5.0, 0.12)  # Center, depth, width.
BOWL = 0.3
WELLS_POINTS = Quadrature(200)  # Enough points to resolve the sharp well from the flat one.


def wells_loss(theta: Float[Array, "..."]) -> Float[Array, "..."]:
    """A flat well on the left and a sharp, deeper one on the right, in a wide bowl: ½bθ² minus two Gaussians."""

    def well(center: float, depth: float, width: float) -> Array:
        return depth * jnp.exp(-0.5 * ((theta - center) / width) ** 2)

    return 0.5 * BOWL * theta**2 - well(*FLAT) - well(*SHARP)


class WellsSolutions(NamedTuple):
    """The results of two algorithms in each well of `wells_loss`, the flat one first: Newton's method, and from there
    the same with averages over its Gaussian."""

    newton: tuple[Result, ...]
    averaged: tuple[Result, ...]

    @property
    def plain(self) -> Result:
        """The lowest loss."""
        return min(self.newton, key=lambda result: float(wells_loss(result.q.mean)))

    @property
    def bayesian(self) -> Result:
        """The lowest E_q ℓ − H(q): the highest bound."""
        return max(self.averaged, key=attrgetter("bound"))


def wells_solutions() -> WellsSolutions:
    r"""Fit a sharp minimum and a flat one, with and without the average over q.

    Both algorithms have a solution in each well. The sharp one has the lower loss; the flat one has the lower
    $E_qℓ − H(q)$, because it admits a wider q.

    >>> solutions = wells_solutions()
    >>> round(float(solutions.plain.q.mean), 2), round(float(solutions.bayesian.q.mean), 2)
    (1.5, -0.91)
    """
    plain = [fit(newton(), wells_loss, Gaussian(start, 1.0), steps=50, tolerance=1e-12) for start in (-3.0, 1.6)]
    rule = von(0.5).replace(points=WELLS_POINTS)
    return WellsSolutions(tuple(plain), tuple(fit(rule, wells_loss, each.q, steps=100) for each in plain))


def sharp_and_flat() -> Figure:
    """Figure 1 (b): the Bayesian solution prefers the flat minimum to the sharp one (`fig:bayes_robust_2`).

    The averaged loss is over the Gaussian of the Bayesian solution, moved along θ; it almost closes the sharp well.
    """
    solutions = wells_solutions()
    plain, q = float(solutions.plain.q.mean), solutions.bayesian.q
    mean = float(q.mean)
    figure, axes, grid = canvas((-3.6, 3.2), (-7.5, 2.2))
    bell(axes, q, grid, scale=2.2)
    losses(axes, wells_loss, q, WELLS_POINTS, grid)
    solution(axes, wells_loss, plain, PLAIN, "D")
    solution(axes, wells_loss, mean, BAYESIAN, "o")
    label(axes, -2.65, 1.0, r"loss $\ell(\theta)$", INK)
    label(axes, 2.05, -0.9, "averaged\nloss $\\mathrm{E}_q\\ell$", BAYESIAN, va="top")
    bayesian = "Bayesian solution:\nlowest $\\mathrm{E}_q\\ell - \\mathcal{H}(q)$"
    label(axes, mean - 0.12, -4.85, bayesian, BAYESIAN, va="center", ha="right")
    label(axes, plain + 0.12, -5.6, "plain solution:\nlowest $\\ell$", PLAIN, va="center")
    label(axes, mean + 0.85, -6.5, "$q$", BAYESIAN)
    return figure


# Section 3.2: two minima, and a mixture of two Gaussians.

FRAMES = (0, 1, 2, 4, 8, 40)


def hills_loss(theta: Float[Array, "2"]) -> Float[Array, ""]:
    """Two valleys along a parabola with a saddle between them, the left one a little deeper."""
    x, y = theta[0], theta[1]
    return 2.5 * (x**2 - 1.6) ** 2 + 2.5 * (y - 0.5 * x**2 + 0.8 - 0.3 * x) ** 2 + 0.2 * x


def two_minima_run() -> list[Mixture]:
    """q at each of the `FRAMES` of a run whose two components start close to each other.

    >>> [round(float(x), 1) for x in two_minima_run()[-1].components.mean[:, 0]]
    [-1.2, 1.2]
    """
    rule = von(0.3).replace(family=Mixture, points=Quadrature(9))
    starts = jnp.array([[-0.15, 1.4], [0.15, 1.4]])
    state = rule.init(Mixture.around(starts, 4.0, component=Gaussian, learnt=False))
    step = jax.jit(lambda state: rule.step(hills_loss, state)[0])
    history = [state.q]
    for _ in range(FRAMES[-1]):
        state = step(state)
        history.append(state.q)
    return [history[count] for count in FRAMES]


def two_minima() -> Figure:
    """Six frames of a run: the entropy of the mixture separates two components, and each finds a minimum."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    x, y = np.linspace(-2.4, 2.4, 160), np.linspace(-2.1, 2.1, 140)
    values = np.asarray(jax.vmap(jax.vmap(hills_loss))(jnp.stack(jnp.meshgrid(x, y), axis=-1)))
    styles = {"xticks": [], "yticks": [], "aspect": "equal"}
    for index, (count, q) in enumerate(zip(FRAMES, two_minima_run(), strict=True)):
        axes = figure.add_subplot(2, 3, index + 1, xlim=(x[0], x[-1]), ylim=(y[0], y[-1]), **styles)
        axes.set_title("start" if count == 0 else f"step {count}", fontsize=10, color=INK)
        axes.spines[:].set_color("#bbbbbb")
        levels = values.min() + np.geomspace(0.15, 40, 11)
        axes.contour(x, y, values, levels=levels, colors=INK, linewidths=0.5, alpha=0.55)
        for k, (color, marker) in enumerate([(BAYESIAN, "o"), (PLAIN, "D")]):
            ellipse(axes, q.component(k), color, marker)
    return figure
