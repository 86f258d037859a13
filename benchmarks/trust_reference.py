"""Slow, independent optima for `trust.py`, in NumPy and SciPy with float64; the library is not imported here.

Regressions, Gaussian processes and chains are one model: u ∼ N(0, I), outputs f = b + Au, and a likelihood of f. For a
regression with prior N(0, 1/δ) on its weights A is x/√δ, for a process a root of the prior covariance, for a chain the
response of its outputs to every step's noise. The optimum is Laplace's posterior, found by Newton's method, or the best
Gaussian, found by natural-gradient steps with a line search on the bound, whose expectations are computed finely enough
to be exact at any variance. Precisions are factorised by QR, so that the condition number is not squared. Beyond a
condition of 10⁷ the mode of at most ten unknowns is polished in 50 digits with mpmath.

Likelihoods that are not log-concave have several optima: they are optimised again from the library's own answer.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.optimize import minimize_scalar
from scipy.special import digamma, expit, gammaln, log1p, log_ndtr, logsumexp, ndtr
from trust_problems import CLASSES, DOF, LATENT, Problem

Array = NDArray[Any]

LOG_2PI = np.log(2 * np.pi)


# Likelihoods: log p(y | f) with its first two derivatives in f, and their expectations over f ~ N(m, V).


class Likelihood:
    """log p(y | f) of every row; f is (…, N, 1), or (…, N, K) for K outputs."""

    def __init__(self, y: Array):
        self.y = y

    def at(self, f: Array) -> tuple[Array, Array, Array]:
        """log p (…, N), its gradient (…, N, K) and its Hessian (…, N, K, K)."""
        value, slope, curve = self.scalar(f[..., 0])
        return value, slope[..., None], curve[..., None, None]

    def expected(self, mean: Array, covariance: Array) -> tuple[Array, Array, Array]:
        """The expectations of the three."""
        m, s = mean[:, 0], np.sqrt(np.maximum(covariance[:, 0, 0], 0))
        value, slope, curve = self.expected_scalar(m, s)
        return value, slope[:, None], curve[:, None, None]

    def scalar(self, f: Array) -> tuple[Array, Array, Array]:
        raise NotImplementedError

    def expected_scalar(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        raise NotImplementedError

    def wide(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        """The expectations over N(m, s²) where s is above the width of the likelihood itself."""
        raise NotImplementedError

    def _by_width(self, m: Array, s: Array, limit: float, center: Array | float = 0.0) -> tuple[Array, Array, Array]:
        """Gauss–Hermite quadrature in the rows with s below a limit or far from the bend, `wide` in the others."""
        value, slope, curve = np.empty((3, len(m)))
        narrow = (s < limit) | (np.abs(m - center) > 8 * s)
        for rows, how in ((narrow, "narrow"), (~narrow, "wide")):
            if not np.any(rows):
                continue
            part = type(self)(self.y[rows])
            found = part.wide(m[rows], s[rows]) if how == "wide" else part._narrow(m[rows], s[rows])
            value[rows], slope[rows], curve[rows] = found
        return value, slope, curve

    def _narrow(self, m: Array, s: Array) -> list[Array]:
        nodes, weights = _hermite(96)
        values = self.scalar(m + s * nodes[:, None])
        return [np.tensordot(weights / weights.sum(), value, axes=1) for value in values]


class Gaussian(Likelihood):
    def __init__(self, y: Array, precision: float):
        super().__init__(y)
        self.precision = precision

    def scalar(self, f: Array) -> tuple[Array, Array, Array]:
        t, gap = self.precision, self.y - f
        return 0.5 * (np.log(t) - LOG_2PI - t * gap**2), t * gap, np.full_like(f, -t)

    def expected_scalar(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        value, slope, curve = self.scalar(m)
        return value - 0.5 * self.precision * s**2, slope, curve


class Poisson(Likelihood):
    def scalar(self, f: Array) -> tuple[Array, Array, Array]:
        rate = np.exp(np.minimum(f, 300))
        return self.y * f - rate - gammaln(self.y + 1), self.y - rate, -rate

    def expected_scalar(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        rate = np.exp(np.minimum(m + 0.5 * s**2, 300))
        return self.y * m - rate - gammaln(self.y + 1), self.y - rate, -rate


class Logistic(Likelihood):
    """Where f varies widely, log p = −max(−f, 0) − log(1 + e^{−|f|}) for y = 1: the first term has a closed form, and
    the second is a bump of width 1, integrated over its own width."""

    def scalar(self, f: Array) -> tuple[Array, Array, Array]:
        sign = 2 * self.y - 1
        p = expit(f)
        return -np.logaddexp(0, -sign * f), self.y - p, -p * (1 - p)

    def expected_scalar(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        return self._by_width(m, s, 1.5)

    def wide(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        sign = 2 * self.y - 1
        nodes, weights = _panels(0, 40, 8, 24)
        nodes, weights = np.concatenate([-nodes, nodes])[:, None], np.concatenate([weights, weights])[:, None]
        density = weights * np.exp(-0.5 * ((nodes - m) / s) ** 2) / (s * np.sqrt(2 * np.pi))
        z = sign * m / s
        hinge = sign * m * ndtr(-z) - s * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)  # E min(±f, 0)
        tail = expit(-np.abs(nodes)) * np.sign(nodes)  # 1[f > 0] − σ(f)
        return (
            hinge - np.sum(density * log1p(np.exp(-np.abs(nodes))), axis=0),
            self.y - ndtr(m / s) + np.sum(density * tail, axis=0),
            -np.sum(density * expit(nodes) * expit(-nodes), axis=0),
        )


class Probit(Likelihood):
    """Where f varies widely the integral runs over t in f = sinh t, in which the integrand is smooth."""

    def scalar(self, f: Array) -> tuple[Array, Array, Array]:
        sign = 2 * self.y - 1
        f = sign * f
        value = log_ndtr(f)
        hazard = np.exp(-0.5 * f**2 - 0.5 * LOG_2PI - value)
        far = f < -50  # where h(h + f) loses its digits
        bend = np.where(far, 1 - 1 / np.where(far, f, 1.0) ** 2, hazard * (f + hazard))
        return value, sign * hazard, -bend

    def expected_scalar(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        return self._by_width(m, s, 0.7)

    def wide(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        return _over_sinh(self.scalar, np.zeros_like(m), 1.0, m, s)


class Student(Likelihood):
    """Where f varies widely the integral runs over t in f = y + √ν sinh t, in which the integrand is smooth."""

    def scalar(self, f: Array) -> tuple[Array, Array, Array]:
        gap = self.y - f
        total = DOF + gap**2
        constant = gammaln((DOF + 1) / 2) - gammaln(DOF / 2) - 0.5 * np.log(np.pi * DOF)
        value = constant - 0.5 * (DOF + 1) * log1p(gap**2 / DOF)
        return value, (DOF + 1) * gap / total, (DOF + 1) * (gap**2 - DOF) / total**2

    def expected_scalar(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        return self._by_width(m, s, 0.7, self.y)

    def wide(self, m: Array, s: Array) -> tuple[Array, Array, Array]:
        return _over_sinh(self.scalar, self.y, np.sqrt(DOF), m, s)


class Softmax(Likelihood):
    """log p depends on the differences to the last output only, so the grid is over these: 30 nodes for each.

    That is exact enough for outputs that vary by a few units, as those of the sweep do.
    """

    def at(self, f: Array) -> tuple[Array, Array, Array]:
        p = np.exp(f - logsumexp(f, axis=-1, keepdims=True))
        chosen = np.eye(CLASSES)[self.y.astype(int)]
        value = np.sum(f * chosen, axis=-1) - logsumexp(f, axis=-1)
        return value, chosen - p, p[..., :, None] * p[..., None, :] - p[..., None] * np.eye(CLASSES)

    def expected(self, mean: Array, covariance: Array) -> tuple[Array, Array, Array]:
        nodes, weights = _hermite(30)
        free = CLASSES - 1
        grid = np.stack(np.meshgrid(*[nodes] * free, indexing="ij"), -1).reshape(-1, free)
        weight = np.prod(np.stack(np.meshgrid(*[weights / weights.sum()] * free, indexing="ij"), -1), -1).ravel()
        contrast = np.eye(CLASSES)[:free] - np.eye(CLASSES)[-1]
        value, vector = np.linalg.eigh(contrast @ covariance @ contrast.T)
        root = vector * np.sqrt(np.maximum(value, 0))[:, None, :]
        root = np.concatenate([root, np.zeros((len(root), 1, free))], axis=1)
        parts = [0.0, 0.0, 0.0]
        for first in range(0, len(grid), 500):
            f = mean - mean[:, -1:] + np.einsum("nkl,sl->snk", root, grid[first : first + 500])
            for number, part in enumerate(self.at(f)):
                parts[number] = parts[number] + np.tensordot(weight[first : first + 500], part, axes=1)
        return tuple(parts)  # pyright: ignore[reportReturnType]  # There are three.


def _over_sinh(function: Any, center: Array, scale: float, m: Array, s: Array) -> tuple[Array, Array, Array]:
    """The expectations of three functions over N(m, s²) by the trapezoidal rule in t, f = center + scale·sinh t."""
    t = np.linspace(-16, 16, 801)[:, None]
    f = center + scale * np.sinh(t)
    density = (t[1, 0] - t[0, 0]) * scale * np.cosh(t)
    density = density * np.exp(-0.5 * ((f - m) / s) ** 2) / (s * np.sqrt(2 * np.pi))
    value, slope, curve = (np.sum(density * part, axis=0) for part in function(f))
    return value, slope, curve


@cache
def _hermite(order: int) -> tuple[Array, Array]:
    return np.polynomial.hermite_e.hermegauss(order)


@cache
def _panels(low: float, high: float, panels: int, order: int) -> tuple[Array, Array]:
    """Gauss–Legendre nodes and weights on equal panels."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    edges = np.linspace(low, high, panels + 1)
    half = np.diff(edges)[:, None] / 2
    return ((edges[:-1, None] + half) + half * nodes).ravel(), (half * weights).ravel()


# The model u ~ N(0, I), f = b + Au, y ~ p(y | f).


class LatentModel(NamedTuple):
    """A (N, K, R), b (N, K) and the likelihood; `dense` says that the outputs themselves are the unknowns."""

    design: Array
    offset: Array
    likelihood: Likelihood
    dense: bool

    def outputs(self, u: Array) -> Array:
        return self.offset + self.design @ u


class Normal(NamedTuple):
    """N(m, CCᵀ) over u."""

    mean: Array
    root: Array

    def log_det(self) -> float:
        return 2 * float(np.linalg.slogdet(self.root)[1])

    def output_covariance(self, model: LatentModel) -> Array:
        reach = model.design @ self.root
        return reach @ reach.transpose(0, 2, 1)


def latent_model(problem: Problem) -> LatentModel:
    """The model of a regression, a Gaussian process or a chain."""
    kind, data, settings = problem.program.kind, problem.data, problem.settings
    if kind.startswith("gp"):
        design = _process_root(data["x"], settings)
    elif kind.startswith("chain"):
        design = _chain_root(data["transition"], data["noise"], data["first"], len(data["y"]))
    else:
        design = data["x"] / np.sqrt(settings["precision"])
    design = design[:, None, :]
    if kind == "softmax":
        design = np.einsum("nor,kl->nklr", design, np.eye(CLASSES)).reshape(len(design), CLASSES, -1)
    if "regression" in kind or kind == "ridge":
        likelihood: Likelihood = Gaussian(data["y"], 1 / settings.get("noise", 1.0))
    elif "student" in kind:
        likelihood = Student(data["y"])
    elif "counts" in kind or kind == "poisson":
        likelihood = Poisson(data["y"])
    else:
        likelihood = {"softmax": Softmax, "probit": Probit}.get(kind, Logistic)(data["y"])
    return LatentModel(design, np.zeros(design.shape[:2]), likelihood, kind.startswith(("gp", "chain")))


def _process_root(x: Array, settings: dict[str, float]) -> Array:
    distance = np.abs(x[:, None] - x) / settings["scale"]
    if settings["rough"]:
        correlation = (1 + np.sqrt(3) * distance) * np.exp(-np.sqrt(3) * distance)
    else:
        correlation = np.exp(-0.5 * distance**2)
    values, vectors = np.linalg.eigh(settings["variance"] * correlation)
    return vectors * np.sqrt(np.maximum(values, 0))


def _chain_root(transition: Array, noise: Array, first: Array, steps: int) -> Array:
    """L with LLᵀ the covariance of the first state over time, from its response to every step's noise."""
    response = np.zeros((steps, 2, 2 * steps))
    response[0, :, :2] = np.sqrt(first)
    for step in range(1, steps):
        response[step] = transition @ response[step - 1]
        response[step, :, 2 * step : 2 * step + 2] = np.sqrt(noise)
    return np.linalg.qr(response[:, 0].T, mode="r").T


# Optima.


class Optimum(NamedTuple):
    """The best q, the value of what it maximises, and how far the reference itself is from its optimum (in nats)."""

    q: Normal
    value: float
    residual: float
    condition: float


def log_joint(model: LatentModel, u: Array) -> float:
    """log p(y | u) − ½uᵀu: what Laplace's mode maximises."""
    return float(np.sum(model.likelihood.at(model.outputs(u))[0]) - 0.5 * u @ u)


def bound(model: LatentModel, q: Normal) -> float:
    """E_q log p(y | f) − KL(q ‖ N(0, I))."""
    value = model.likelihood.expected(model.outputs(q.mean), q.output_covariance(model))[0]
    divergence = 0.5 * (np.sum(q.root**2) + q.mean @ q.mean - q.log_det() - len(q.mean))
    return float(np.sum(value) - divergence)


def _precision_root(model: LatentModel, curve: Array) -> Array | None:
    """C with (CCᵀ)⁻¹ = I − Aᵀ(curve)A, or None where that is not positive definite."""
    size = model.design.shape[-1]
    values, vectors = np.linalg.eigh(-curve)
    if np.min(values) > -1e-12 * max(1.0, np.max(np.abs(values))):
        rows = np.einsum("nk,nlk,nlr->nkr", np.sqrt(np.maximum(values, 0)), vectors, model.design).reshape(-1, size)
        triangle = np.linalg.qr(np.vstack([rows, np.eye(size)]), mode="r")
        return solve_triangular(triangle, np.eye(size))
    precision = np.eye(size) - np.einsum("nkr,nkl,nls->rs", model.design, curve, model.design)
    try:
        lower = np.linalg.cholesky(precision)
    except np.linalg.LinAlgError:
        return None
    return solve_triangular(lower, np.eye(size), lower=True).T


def laplace(model: LatentModel, start: Array | None = None) -> Optimum:
    """Laplace's posterior by Newton's method with a line search, from zero or from a start."""
    size = model.design.shape[-1]
    u = np.zeros(size) if start is None else start
    value, residual = log_joint(model, u), np.inf
    for _ in range(500):
        _, slope, curve = model.likelihood.at(model.outputs(u))
        gradient = np.einsum("nkr,nk->r", model.design, slope) - u
        root = _precision_root(model, curve)
        if root is None:  # not concave here: climb along the curvature's absolute value
            precision = np.eye(size) - np.einsum("nkr,nkl,nls->rs", model.design, curve, model.design)
            values, vectors = np.linalg.eigh(precision)
            root = vectors / np.sqrt(np.maximum(np.abs(values), 1e-3))
        scaled = root.T @ gradient
        residual, direction = 0.5 * float(scaled @ scaled), root @ scaled
        for halving in range(60):
            trial = u + 0.5**halving * direction
            reached = log_joint(model, trial)
            if reached >= value:
                break
        else:
            break
        u, value = trial, reached
        if residual < 1e-13:
            break
    if size <= 10 and not isinstance(model.likelihood, Softmax):
        _, _, curve = model.likelihood.at(model.outputs(u))
        root = _precision_root(model, curve)
        if root is not None and np.linalg.cond(root) > 1e7:
            u = _polished(model, u)
            value = log_joint(model, u)
    curve = model.likelihood.at(model.outputs(u))[2]
    root = _precision_root(model, curve)
    root = np.full((size, size), np.nan) if root is None else root
    return Optimum(Normal(u, root), value, residual, _condition(model, curve))


def _polished(model: LatentModel, u: Array) -> Array:
    """Two of Newton's steps in 50 digits."""
    import mpmath as mp

    with mp.workdps(50):
        design = [[mp.mpf(float(a)) for a in row] for row in model.design[:, 0]]
        y, at = [mp.mpf(float(v)) for v in model.likelihood.y], [mp.mpf(float(v)) for v in u]
        size = len(at)
        for _ in range(2):
            gradient, precision = mp.matrix([-a for a in at]), mp.eye(size)
            for row, target in zip(design, y, strict=True):
                slope, curve = _derivatives(model.likelihood, mp.fdot(row, at), target, mp)
                for i in range(size):
                    gradient[i] += slope * row[i]
                    for j in range(i + 1):
                        precision[i, j] -= curve * row[i] * row[j]
                        precision[j, i] = precision[i, j]
            change = mp.lu_solve(precision, gradient)
            at = [a + d for a, d in zip(at, change, strict=True)]
        return np.array([float(a) for a in at])


def _derivatives(likelihood: Likelihood, f: Any, y: Any, mp: Any) -> tuple[Any, Any]:
    """The first two derivatives of log p in f, in any number type."""
    if isinstance(likelihood, Gaussian):
        return likelihood.precision * (y - f), -likelihood.precision
    if isinstance(likelihood, Poisson):
        return y - mp.exp(f), -mp.exp(f)
    if isinstance(likelihood, Logistic):
        p = 1 / (1 + mp.exp(-f))
        return y - p, -p * (1 - p)
    gap = y - f
    return (DOF + 1) * gap / (DOF + gap**2), (DOF + 1) * (gap**2 - DOF) / (DOF + gap**2) ** 2


def best_gaussian(model: LatentModel, start: Normal | None = None) -> Optimum:
    """The Gaussian with the highest bound, from Laplace's posterior or from a start."""
    if start is None or not np.all(np.isfinite(start.root)):
        start = laplace(model).q
    curve = model.likelihood.expected(model.outputs(start.mean), start.output_covariance(model))[2]
    root = _precision_root(model, curve)
    if root is None or not np.all(np.isfinite(curve)):
        start = laplace(model).q
        curve = model.likelihood.at(model.outputs(start.mean))[2]
        root = _precision_root(model, curve)
    assert root is not None
    q = Normal(start.mean, root)
    value, residual, rate = bound(model, q), np.inf, 1.0
    history: list[tuple[Array, Array]] = []
    for _ in range(500):
        _, slope, target = model.likelihood.expected(model.outputs(q.mean), q.output_covariance(model))
        gradient = np.einsum("nkr,nk->r", model.design, slope) - q.mean
        reach = model.design @ q.root
        change = np.einsum("nkr,nkl,nls->rs", reach, target - curve, reach)
        scaled = q.root.T @ gradient
        residual = 0.5 * float(scaled @ scaled) + 0.25 * float(np.sum(change**2))
        if residual < 1e-11:
            break
        proposal = _extrapolated(model, q, curve, slope, target, history)
        if proposal is not None and 1e-10 < residual < 1:
            reached = bound(model, proposal[0])
            if reached > value:
                (q, curve), value = proposal, reached
                continue
        rate = min(1.0, 2 * rate)
        for _ in range(60):
            new_curve = (1 - rate) * curve + rate * target
            root = _precision_root(model, new_curve)
            if root is not None:
                trial = Normal(q.mean + rate * root @ (root.T @ gradient), root)
                reached = bound(model, trial)
                if reached >= value - 1e-12 * abs(value) * (residual < 1e-6):
                    break
            rate /= 2
        else:
            break
        q, value, curve = trial, reached, new_curve
    return Optimum(q, value, residual, _condition(model, curve))


def _extrapolated(
    model: LatentModel, q: Normal, curve: Array, slope: Array, target: Array, history: list[tuple[Array, Array]]
) -> tuple[Normal, Array] | None:
    """A guess of the fixed point from the last eight steps (Anderson's acceleration of λ = (Pm, W)).

    Args:
        model: the model.
        q, curve: the current q and −W, with its precision P = I + AᵀWA.
        slope, target: the expected derivatives at q, of which the next λ is made.
        history: λ and the next λ, step by step; this step is added.

    Returns:
        Another q and its curvature, or None where the guess is no distribution.
    """
    linear, size = model.design @ q.mean, len(q.mean)
    through = lambda curve: np.einsum("nkr,nkl,nl->r", model.design, curve, linear)
    current = np.concatenate([q.mean - through(curve), curve.ravel()])
    first = np.einsum("nkr,nk->r", model.design, slope) - through(target)
    following = np.concatenate([first, target.ravel()])
    history.append((current, following))
    del history[:-9]
    if len(history) < 3:
        return None
    # Both kinds of numbers in units in which a change of 1 is a change of q by about one standard deviation.
    unit = np.concatenate([np.sqrt(np.sum(q.root**2, axis=1)), q.output_covariance(model).ravel()])
    differences = [(new - old) * unit for old, new in history]
    steps = np.stack([d - differences[-1] for d in differences[:-1]], axis=1)
    weights = np.linalg.lstsq(steps, -differences[-1], rcond=1e-10)[0]
    guess = following + sum(w * (new - following) for w, (_, new) in zip(weights, history[:-1], strict=True))
    new_curve = guess[size:].reshape(curve.shape)
    if not np.all(np.isfinite(guess)) or (np.max(curve) <= 0 and np.max(new_curve) > 0):
        return None
    root = _precision_root(model, new_curve)
    return None if root is None else (Normal(root @ (root.T @ guess[:size]), root), new_curve)


def _condition(model: LatentModel, curve: Array) -> float:
    """The condition number of the posterior precision, scaled to a unit diagonal.

    For a process or a chain, whose prior covariance may be singular, it is that of I + W^½KW^½, which is factorised in
    place of the precision and has a scale of its own.
    """
    if model.dense:
        rows = np.sqrt(np.maximum(-curve[:, 0, 0], 0))[:, None] * model.design[:, 0]
        return float(1 + np.linalg.norm(rows, 2) ** 2)
    size = model.design.shape[-1]
    precision = np.eye(size) - np.einsum("nkr,nkl,nls->rs", model.design, curve, model.design)
    scale = 1 / np.sqrt(np.maximum(np.diag(precision), 1e-300))
    values = np.linalg.eigvalsh(scale[:, None] * precision * scale)
    return float(values[-1] / max(values[0], 1e-300))


# Conjugate models with other unknowns than a Gaussian: nats to gain from the library's own answer.


def ridge_gain(problem: Problem, mean: Array, root: Array, noise: dict[str, float]) -> tuple[float, float, float]:
    """Ridge regression with an unknown noise precision t ~ Gamma(shape, rate): nats to gain, and how far w is off.

    Given E t (`vmp`) or t (`em`) the best q(w) has a closed form, so that everything is a function of that one number,
    which is maximised from the library's answer.

    Args:
        problem: the problem.
        mean, root: the library's q(w) = N(mean, root rootᵀ).
        noise: the library's q(t): "shape" and "rate", or the point "value".

    Returns:
        The nats to gain, and w's largest deviation and relative error of a standard deviation.
    """
    x, y, prior = problem.data["x"], problem.data["y"], problem.settings
    rows, delta, a0, b0 = len(y), prior["precision"], prior["shape"], prior["rate"]
    _, singular, vt = np.linalg.svd(x, full_matrices=True)
    eigen = np.zeros(x.shape[1])
    eigen[: len(singular)] = singular**2
    target = vt @ (x.T @ y)
    point = "value" in noise

    def posterior(t: float) -> tuple[Array, Array]:
        precision = delta + t * eigen
        return t * target / precision, 1 / precision

    def squares(m: Array, cov: Array) -> float:
        """E‖y − xw‖² for w = vtᵀ(m, cov)."""
        return float(np.sum((y - x @ (vt.T @ m)) ** 2) + np.sum(eigen * np.diag(cov)))

    def evidence(m: Array, cov: Array, a: float, b: float) -> float:
        """The bound for q(w) in the rotated coordinates and q(t) = Gamma(a, b), or t = a/b itself."""
        log_t = np.log(a / b) if point else digamma(a) - np.log(b)
        t, size = a / b, len(m)
        gauss = 0.5 * (size * np.log(delta) - delta * (m @ m + np.trace(cov)) + np.linalg.slogdet(cov)[1] + size)
        likelihood = 0.5 * (rows * (log_t - LOG_2PI) - t * squares(m, cov))
        log_prior = a0 * np.log(b0) - gammaln(a0) + (a0 - 1) * log_t - b0 * t
        entropy = 0.0 if point else a - np.log(b) + gammaln(a) + (1 - a) * digamma(a)
        return float(gauss + likelihood + log_prior + entropy)

    def profile(log_t: float) -> float:
        m, v = posterior(float(np.exp(log_t)))
        cov = np.diag(v)
        a, b = a0 + rows / 2, b0 + 0.5 * squares(m, cov)
        return evidence(m, cov, a - 1, b) if point else evidence(m, cov, a, b)

    rotation = vt @ root
    a, b = (noise["value"], 1.0) if point else (noise["shape"], noise["rate"])
    ours = evidence(vt @ mean, rotation @ rotation.T, a, b)
    at = np.log(a / b)
    width = 0.5
    while True:  # the nearest maximum: widen the bracket while the best point lies at its edge
        grid = at + np.linspace(-width, width, 41)
        best = grid[int(np.argmax([profile(g) for g in grid]))]
        if abs(best - at) < 0.9 * width or width > 30:
            break
        width *= 2
    step = width / 20
    found = minimize_scalar(
        lambda g: -profile(g), bounds=(best - step, best + step), method="bounded", options={"xatol": 1e-10}
    )
    t_best = float(np.exp(found.x))
    for _ in range(200):  # the fixed point itself, to the last digits
        m, v = posterior(t_best)
        a_new, b_new = a0 + rows / 2 - point, b0 + 0.5 * squares(m, np.diag(v))
        t_best = a_new / b_new
    m, v = posterior(t_best)
    best_mean, best_sd = vt.T @ m, np.sqrt(np.sum(vt.T**2 * v, axis=1))
    sd = np.sqrt(np.sum(root**2, axis=1))
    gain = max(-found.fun, profile(np.log(t_best))) - ours
    return gain, float(np.max(np.abs(mean - best_mean) / best_sd)), float(np.max(np.abs(sd / best_sd - 1)))


def ppca_gain(y: Array, loadings: Array, noise: float) -> float:
    """Nats between the log-likelihood at these estimates and its maximum (Tipping and Bishop, 1999)."""
    rows, columns = y.shape
    scatter = y.T @ y / rows

    def log_likelihood(covariance: Array) -> float:
        factor = cho_factor(covariance)
        log_det = 2 * np.sum(np.log(np.diag(factor[0])))
        return -0.5 * rows * (columns * LOG_2PI + log_det + np.trace(cho_solve(factor, scatter)))

    values, vectors = np.linalg.eigh(scatter)
    least = values[:-LATENT].mean()
    best = (vectors * np.concatenate([np.full(columns - LATENT, least), values[-LATENT:]])) @ vectors.T
    return float(log_likelihood(best) - log_likelihood(loadings @ loadings.T + noise * np.eye(columns)))


def mixture_gain(y: Array, weights: Array, means: Array, variances: Array) -> tuple[float, float]:
    """Nats that 20,000 further steps of EM gain from these estimates, and the means' move in standard errors."""

    def joint(weights: Array, means: Array, variances: Array) -> Array:
        squares = (y[:, None] - means) ** 2 / variances
        return np.log(weights) - 0.5 * np.sum(LOG_2PI + np.log(variances) + squares, axis=2)

    first = float(np.sum(logsumexp(joint(weights, means, variances), axis=1)))
    new = weights, means, variances
    last = -np.inf
    for step in range(20_000):
        log_joint_ = joint(*new)
        r = np.exp(log_joint_ - logsumexp(log_joint_, axis=1, keepdims=True))
        count = r.sum(0)
        centre = r.T @ y / count[:, None]
        new = count / len(y), centre, np.maximum(r.T @ y**2 / count[:, None] - centre**2, 1e-300)
        if step % 100 == 0:
            value = float(np.sum(logsumexp(log_joint_, axis=1)))
            if value - last < 1e-12 * abs(value):
                break
            last = value
    end = float(np.sum(logsumexp(joint(*new), axis=1)))
    errors = np.sqrt(new[2] / (len(y) * new[0][:, None]))
    return end - first, float(np.max(np.abs(new[1] - means) / errors))


def variational_mixture_gain(y: Array, prior: dict[str, Array], q: dict[str, Array]) -> tuple[float, float, float]:
    """Nats that 20,000 further coordinate-ascent steps gain from this q, and how far its means move.

    The components have independent normal–gamma columns; `prior` and `q` have "concentration" (K,), and "mean",
    "count", "shape", "rate", each (K, D).

    Returns:
        The nats to gain; the means' largest move in posterior standard deviations; the sds' largest relative change.
    """

    def expected(q: dict[str, Array]) -> Array:
        """E log π_k + E log N(y_n | k)."""
        log_weight = digamma(q["concentration"]) - digamma(q["concentration"].sum())
        log_t, t = digamma(q["shape"]) - np.log(q["rate"]), q["shape"] / q["rate"]
        squares = t * (y[:, None] - q["mean"]) ** 2 + 1 / q["count"]
        return log_weight + 0.5 * np.sum(log_t - LOG_2PI - squares, axis=2)

    def value(q: dict[str, Array]) -> float:
        c, c0 = q["concentration"], prior["concentration"]
        kl_weights = gammaln(c.sum()) - gammaln(c0.sum()) - np.sum(gammaln(c) - gammaln(c0))
        kl_weights += np.sum((c - c0) * (digamma(c) - digamma(c.sum())))
        a, b, k, m = (q[name] for name in ("shape", "rate", "count", "mean"))
        a0, b0, k0, m0 = (prior[name] for name in ("shape", "rate", "count", "mean"))
        kl_t = (a - a0) * digamma(a) - gammaln(a) + gammaln(a0) + a0 * np.log(b / b0) + a * (b0 / b - 1)
        kl_x = 0.5 * (np.log(k / k0) - 1 + k0 / k + k0 * (m - m0) ** 2 * a / b)
        return float(np.sum(logsumexp(expected(q), axis=1)) - kl_weights - np.sum(kl_t + kl_x))

    first, last = value(q), -np.inf
    new = q
    for step in range(20_000):
        log_joint_ = expected(new)
        r = np.exp(log_joint_ - logsumexp(log_joint_, axis=1, keepdims=True))
        count, total, square = r.sum(0)[:, None], r.T @ y, r.T @ y**2
        k = prior["count"] + count
        m = (prior["count"] * prior["mean"] + total) / k
        rate = prior["rate"] + 0.5 * (square + prior["count"] * prior["mean"] ** 2 - k * m**2)
        new = {"concentration": prior["concentration"] + count[:, 0], "mean": m, "count": k}
        new |= {"shape": prior["shape"] + 0.5 * count, "rate": rate}
        if step % 100 == 0:
            reached = value(new)
            if reached - last < 1e-12 * abs(reached):
                break
            last = reached
    sd = lambda q: np.sqrt(q["rate"] / (q["count"] * q["shape"]))
    moved = np.max(np.abs(new["mean"] - q["mean"]) / sd(new))
    return value(new) - first, float(moved), float(np.max(np.abs(sd(q) / sd(new) - 1)))
