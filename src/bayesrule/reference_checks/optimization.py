"""Optimisers beside optax's SGD, SciPy's Newton iterations and minima, and the paper's equations in NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.optimize

from ..families.gaussian.full import Gaussian
from ..families.latent.mixture import Mixture
from ..gallery.trace import walked
from ..numerics.random import normal
from ..rule.rule import Rule
from ..rule.state import State
from .check import apart, check

MIXING = np.array([[1.0, 0.4, -0.3], [0.0, 1.2, 0.5], [0.2, -0.1, 0.8]])
TWIST = np.array([[1.0, 0.5], [-0.3, 0.8]])


@check("optax.sgd, 50 steps on Rosenbrock's function", 1e-12)
def gradient_descent(rule: Rule) -> float:
    """Every iterate of the mean against optax's, from the same start."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(2 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    start = jnp.array([-0.4, 0.3, 0.5])
    theirs = optax.sgd(0.1)

    def body(carry: tuple, _: None) -> tuple:
        updates, memory = theirs.update(jax.grad(loss)(carry[0]), carry[1])
        x = optax.apply_updates(carry[0], updates)
        return (x, memory), x

    expected = jax.jit(lambda: jax.lax.scan(body, (start, theirs.init(start)), None, length=50)[1])()
    return apart(walked(rule, loss, start, steps=50), expected, start)


@check("scipy.optimize.newton along each axis, every iterate", 1e-12)
def newton(rule: Rule) -> float:
    """The loss is Σ g(uᵢ) with u = Rθ. Newton's method does not mind R, so that SciPy's scalar iterations for the
    root of g′ give those of θ; and S is the Hessian at the iterate before."""
    slope, bend = (lambda u: np.sinh(u - 1) + u), (lambda u: np.cosh(u - 1) + 1)
    start, count = np.array([-0.5, 2.2, 0.9]), 6

    def loss(theta: jax.Array) -> jax.Array:
        u = MIXING @ theta
        return jnp.sum(jnp.cosh(u - 1) + 0.5 * u**2)

    def root(u: float, steps: int) -> Any:
        options = {"fprime": bend, "maxiter": steps, "tol": 1e-300, "full_output": True, "disp": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # that it did not converge yet
            return scipy.optimize.newton(slope, u, **options)[0]

    iterates = np.array([start, *([root(u, k) for u in start] for k in range(1, count + 1))])
    means, precisions = walked(
        rule, loss, np.linalg.solve(MIXING, start), steps=count, read=lambda q: (q.mean, q.precision)
    )
    hessians = np.einsum("ia,ti,ib->tab", MIXING, bend(iterates[:-1]), MIXING)
    return max(apart(means @ MIXING.T, iterates[1:], start), apart(precisions, hessians))


def _lopsided(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian of Σ eᵘ − u/2 + ½u², u = Rθ, at points (S, 2), by hand."""
    u = theta @ TWIST.T
    return (np.exp(u) - 0.5 + u) @ TWIST, np.einsum("ia,si,ib->sab", TWIST, np.exp(u) + 1, TWIST)


@check("eq. von_1, retracted, in NumPy with the same noise, 40 steps", 1e-12)
def von(rule: Rule) -> float:
    """θ = m ± L⁻ᵀε for five ε, with S = LLᵀ; D = mean H(θ) − S; S ← S + ρD + ½ρ²DS⁻¹D; m ← m − ρS⁻¹ mean g(θ).
    The last term of S is Lin, Schmidt and Khan's (2020)."""
    steps, rate, start = 40, 0.1, np.array([1.0, -1.0])
    keys = jax.random.split(jax.random.key(0), steps)

    def loss(theta: jax.Array) -> jax.Array:
        u = TWIST @ theta
        return jnp.sum(jnp.exp(u) - 0.5 * u + 0.5 * u**2)

    first = Gaussian(jnp.asarray(start), jnp.asarray(2 * np.eye(2)))
    found = walked(rule, loss, first, steps=steps, keys=keys, read=lambda q: (q.mean, q.precision))
    mean, precision, means, precisions = start, 2 * np.eye(2), [], []
    drawn = jax.jit(jax.vmap(lambda key: normal(key, (5, 2), float)))
    for epsilon in np.asarray(drawn(jax.random.clone(keys))):
        factor = np.linalg.cholesky(precision)
        away = np.linalg.solve(factor.T, epsilon.T).T
        slopes, hessians = _lopsided(np.concatenate([mean + away, mean - away]))
        change = rate * (hessians.mean(axis=0) - precision)
        precision = precision + change + 0.5 * change @ np.linalg.solve(precision, change)
        mean = mean - rate * np.linalg.solve(precision, slopes.mean(axis=0))
        means.append(mean)
        precisions.append(precision)
    return max(apart(found[0], means, start), apart(found[1], precisions))


def himmelblau(x: jax.Array) -> jax.Array:
    """Himmelblau's function: four minima in the plane."""
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


@check("eq. exp-von1 in NumPy, 5 steps; all of scipy.optimize's minima", 1e-8)
def multimodal(rule: Rule) -> float:
    """Three components: their first five steps by hand. They are at their minima then and begin anew, so that after
    sixty steps their record has all of SciPy's minima, the fourth among them, and no other: to within the square of
    10⁻⁵ of the box, since a component is done, and recorded where Newton's step leads, once that is so short."""
    starts, wide = np.array([[2.5, 2.5], [-2.2, 3.4], [-3.4, -3.0]]), np.stack([3 * np.eye(2)] * 3)
    first = rule.init(Mixture(np.ones(3), Gaussian(jnp.asarray(starts), jnp.asarray(wide)), learnt=False), himmelblau)

    def body(state: State, _: None) -> tuple:
        state = rule.step(himmelblau, state)[0]
        return state, (state.q.components.mean, state.q.components.precision)

    last, seen = jax.jit(lambda state: jax.lax.scan(body, state, None, length=60))(first)
    means, precisions = _repelled(starts, wide, steps=5)
    stepped = max(apart(seen[0][:5], means, starts), apart(seen[1][:5], precisions))
    ours = np.asarray(last.search.position)[np.asarray(last.search.hits) > 0]
    grid = np.stack(np.meshgrid(*[np.linspace(-5, 5, 7)] * 2), axis=-1).reshape(-1, 2)
    ends = [scipy.optimize.minimize(_value, x, jac=_slope, method="BFGS").x for x in grid]
    theirs = np.array([scipy.optimize.root(_slope, x, jac=_hessian, tol=1e-14).x for x in ends])
    return max(stepped, apart(_each_once(ours), _each_once(theirs)))


def _each_once(rows: np.ndarray) -> np.ndarray:
    """Rows in order, without those that are another's equal to six digits."""
    return rows[np.unique(np.round(rows, 6), axis=0, return_index=True)[1]] if rows.size else rows


def _value(x: np.ndarray) -> float:
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


def _slope(x: np.ndarray) -> np.ndarray:
    a, b = x[0] ** 2 + x[1] - 11, x[0] + x[1] ** 2 - 7
    return np.array([4 * x[0] * a + 2 * b, 2 * a + 4 * x[1] * b])


def _hessian(x: np.ndarray) -> np.ndarray:
    cross = 4 * (x[0] + x[1])
    return np.array([[12 * x[0] ** 2 + 4 * x[1] - 42, cross], [cross, 4 * x[0] + 12 * x[1] ** 2 - 26]])


def _repelled(means: np.ndarray, precisions: np.ndarray, *, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Components of equal weight at ρτ = ½: S ← S + ½[∇²ℓ/τ + ∇²log q], m ← m − ½S⁻¹[∇ℓ/τ + ∇log q] at θ = m, with
    τ from the losses' spread down to a thousandth of it in twenty steps, and S always that of the new τ."""
    spread = np.std([_value(m) for m in means])
    seen = []
    for count in range(steps):
        tau = spread * 10 ** (-3 * count / 20)
        precisions = precisions * (10**0.15 if count else 1.0)
        moved = []
        for m, s in zip(means, precisions, strict=True):
            slope, hessian = _log_mixture(m, means, precisions)
            new = s + 0.5 * (_hessian(m) / tau + hessian)
            moved.append((m - 0.5 * np.linalg.solve(new, _slope(m) / tau + slope), new))
        means, precisions = (np.array([pair[i] for pair in moved]) for i in (0, 1))
        seen.append((means, precisions))
    return np.array([pair[0] for pair in seen]), np.array([pair[1] for pair in seen])


def _log_mixture(theta: np.ndarray, means: np.ndarray, precisions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """∇log q = Σ rⱼSⱼ(mⱼ − θ), and ∇²log q (`eq:mixexp_1st`, `eq:mixexp_2nd`)."""
    pull = np.einsum("kab,kb->ka", precisions, means - theta)
    logs = 0.5 * np.linalg.slogdet(precisions)[1] - 0.5 * np.einsum("ka,ka->k", means - theta, pull)
    share = np.exp(logs - np.logaddexp.reduce(logs))
    slope = share @ pull
    second = np.einsum("k,kab->ab", share, pull[:, :, None] * pull[:, None, :] - precisions)
    return slope, second - np.outer(slope, slope)
