"""Optimisers compared with optax's SGD, SciPy's Newton iterations and minima, and the paper's equations in NumPy."""

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
from ..gallery.trace import trace_steps
from ..numerics.random import normal
from ..rule.rule import Rule
from ..rule.state import State
from .check import check, relative_error

MIXING = np.array([[1.0, 0.4, -0.3], [0.0, 1.2, 0.5], [0.2, -0.1, 0.8]])
TWIST = np.array([[1.0, 0.5], [-0.3, 0.8]])


@check("optax.sgd, 50 steps on Rosenbrock's function", 1e-12)
def gradient_descent(rule: Rule) -> float:
    """Every iterate of the mean is compared with optax's, from the same start."""

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(2 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    start = jnp.array([-0.4, 0.3, 0.5])
    transformation = optax.sgd(0.1)

    def body(carry: tuple[Any, ...], _: None) -> tuple[Any, ...]:
        updates, optax_state = transformation.update(jax.grad(loss)(carry[0]), carry[1])
        x = optax.apply_updates(carry[0], updates)
        return (x, optax_state), x

    expected = jax.jit(lambda: jax.lax.scan(body, (start, transformation.init(start)), None, length=50)[1])()
    return relative_error(trace_steps(rule, loss, start, steps=50), expected, start)


@check("scipy.optimize.newton along each axis, every iterate", 1e-12)
def newton(rule: Rule) -> float:
    """The loss is Σ g(uᵢ) with u = Rθ. Newton's method is invariant to the linear map R, so SciPy's scalar iterations
    for the root of g′ give the iterates of u; S is the Hessian at the previous iterate."""
    slope, second_derivative = (lambda u: np.sinh(u - 1) + u), (lambda u: np.cosh(u - 1) + 1)
    start, count = np.array([-0.5, 2.2, 0.9]), 6

    def loss(theta: jax.Array) -> jax.Array:
        u = MIXING @ theta
        return jnp.sum(jnp.cosh(u - 1) + 0.5 * u**2)

    def root(u: float, steps: int) -> Any:
        options = {"fprime": second_derivative, "maxiter": steps, "tol": 1e-300, "full_output": True, "disp": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # SciPy warns that it has not converged.
            return scipy.optimize.newton(slope, u, **options)[0]

    iterates = np.array([start, *([root(u, k) for u in start] for k in range(1, count + 1))])
    means, precisions = trace_steps(
        rule, loss, np.linalg.solve(MIXING, start), steps=count, read=lambda q: (q.mean, q.precision)
    )
    hessians = np.einsum("ia,ti,ib->tab", MIXING, second_derivative(iterates[:-1]), MIXING)
    return max(relative_error(means @ MIXING.T, iterates[1:], start), relative_error(precisions, hessians))


def _gradient_and_hessian(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian of Σ eᵘ − u/2 + ½u², u = Rθ, at points (S, 2), by hand."""
    u = theta @ TWIST.T
    return (np.exp(u) - 0.5 + u) @ TWIST, np.einsum("ia,si,ib->sab", TWIST, np.exp(u) + 1, TWIST)


@check("eq. von_1, retracted, in NumPy with the same noise, 40 steps", 1e-12)
def von(rule: Rule) -> float:
    """θ = m ± L⁻ᵀε for five ε, with S = LLᵀ; D = mean H(θ) − S; S ← S + ρD + ½ρ²DS⁻¹D; m ← m − ρS⁻¹ mean g(θ).
    The last term of S is the retraction of Lin, Schmidt and Khan (2020)."""
    steps, rate, start = 40, 0.1, np.array([1.0, -1.0])
    keys = jax.random.split(jax.random.key(0), steps)

    def loss(theta: jax.Array) -> jax.Array:
        u = TWIST @ theta
        return jnp.sum(jnp.exp(u) - 0.5 * u + 0.5 * u**2)

    first = Gaussian(jnp.asarray(start), jnp.asarray(2 * np.eye(2)))
    trace = trace_steps(rule, loss, first, steps=steps, keys=keys, read=lambda q: (q.mean, q.precision))
    mean, precision, means, precisions = start, 2 * np.eye(2), [], []
    draw_noise = jax.jit(jax.vmap(lambda key: normal(key, (5, 2), float)))
    for epsilon in np.asarray(draw_noise(jax.random.clone(keys))):
        factor = np.linalg.cholesky(precision)
        offsets = np.linalg.solve(factor.T, epsilon.T).T
        gradients, hessians = _gradient_and_hessian(np.concatenate([mean + offsets, mean - offsets]))
        change = rate * (hessians.mean(axis=0) - precision)
        precision = precision + change + 0.5 * change @ np.linalg.solve(precision, change)
        mean = mean - rate * np.linalg.solve(precision, gradients.mean(axis=0))
        means.append(mean)
        precisions.append(precision)
    return max(relative_error(trace[0], means, start), relative_error(trace[1], precisions))


def himmelblau(x: jax.Array) -> jax.Array:
    """Himmelblau's function: four minima in the plane."""
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


@check("eq. exp-von1 in NumPy, 5 steps; all of scipy.optimize's minima", 1e-8)
def multimodal(rule: Rule) -> float:
    """Three components: their first five steps are compared with NumPy. Converged components are recorded and
    restarted, so after sixty steps the record must hold all four of SciPy's minima and nothing else. A component has
    converged when its Newton step is shorter than 10⁻⁵ of the box, and the end of that step is recorded: the error is
    about the square of 10⁻⁵."""
    starts, initial_precisions = np.array([[2.5, 2.5], [-2.2, 3.4], [-3.4, -3.0]]), np.stack([3 * np.eye(2)] * 3)
    first = rule.init(
        Mixture(np.ones(3), Gaussian(jnp.asarray(starts), jnp.asarray(initial_precisions)), learnt=False), himmelblau
    )

    def body(state: State, _: None) -> tuple[Any, ...]:
        state = rule.step(himmelblau, state)[0]
        return state, (state.q.components.mean, state.q.components.precision)

    last, (step_means, step_precisions) = jax.jit(lambda state: jax.lax.scan(body, state, None, length=60))(first)
    means, precisions = _mixture_steps(starts, initial_precisions, steps=5)
    step_error = max(relative_error(step_means[:5], means, starts), relative_error(step_precisions[:5], precisions))
    recorded = np.asarray(last.search.position)[np.asarray(last.search.hits) > 0]
    grid = np.stack(np.meshgrid(*[np.linspace(-5, 5, 7)] * 2), axis=-1).reshape(-1, 2)
    ends = [scipy.optimize.minimize(_value, x, jac=_gradient, method="BFGS").x for x in grid]
    expected = np.array([scipy.optimize.root(_gradient, x, jac=_hessian, tol=1e-14).x for x in ends])
    return max(step_error, relative_error(_unique_rows(recorded), _unique_rows(expected)))


def _unique_rows(rows: np.ndarray) -> np.ndarray:
    """The rows in lexicographic order, one of each that agree to six decimals."""
    return rows[np.unique(np.round(rows, 6), axis=0, return_index=True)[1]] if rows.size else rows


def _value(x: np.ndarray) -> float:
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


def _gradient(x: np.ndarray) -> np.ndarray:
    a, b = x[0] ** 2 + x[1] - 11, x[0] + x[1] ** 2 - 7
    return np.array([4 * x[0] * a + 2 * b, 2 * a + 4 * x[1] * b])


def _hessian(x: np.ndarray) -> np.ndarray:
    cross = 4 * (x[0] + x[1])
    return np.array([[12 * x[0] ** 2 + 4 * x[1] - 42, cross], [cross, 4 * x[0] + 12 * x[1] ** 2 - 26]])


def _mixture_steps(means: np.ndarray, precisions: np.ndarray, *, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Components of equal weight at ρτ = ½: S ← S + ½[∇²ℓ/τ + ∇²log q], m ← m − ½S⁻¹[∇ℓ/τ + ∇log q] at θ = m. τ falls
    from the standard deviation of the losses to a thousandth of it in twenty steps, and S is rescaled to the new τ."""
    loss_std = np.std([_value(m) for m in means])
    history = []
    for count in range(steps):
        tau = loss_std * 10 ** (-3 * count / 20)
        precisions = precisions * (10**0.15 if count else 1.0)
        updated = []
        for m, s in zip(means, precisions, strict=True):
            slope, hessian = _log_mixture(m, means, precisions)
            new = s + 0.5 * (_hessian(m) / tau + hessian)
            updated.append((m - 0.5 * np.linalg.solve(new, _gradient(m) / tau + slope), new))
        means, precisions = (np.array([pair[i] for pair in updated]) for i in (0, 1))
        history.append((means, precisions))
    return np.array([pair[0] for pair in history]), np.array([pair[1] for pair in history])


def _log_mixture(theta: np.ndarray, means: np.ndarray, precisions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """∇log q = Σ rⱼSⱼ(mⱼ − θ), and ∇²log q (`eq:mixexp_1st`, `eq:mixexp_2nd`)."""
    pull = np.einsum("kab,kb->ka", precisions, means - theta)
    logs = 0.5 * np.linalg.slogdet(precisions)[1] - 0.5 * np.einsum("ka,ka->k", means - theta, pull)
    share = np.exp(logs - np.logaddexp.reduce(logs))
    slope = share @ pull
    second = np.einsum("k,kab->ab", share, pull[:, :, None] * pull[:, None, :] - precisions)
    return slope, second - np.outer(slope, slope)
