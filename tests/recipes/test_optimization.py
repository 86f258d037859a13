"""Optimisers: Newton against scipy on standard functions, VON against quadrature, no derivatives, Amari."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize

import bayesrule as blr


def rosenbrock(x):
    return jnp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def beale(v):
    x, y = v
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def booth(v):
    x, y = v
    return (x + 2 * y - 7) ** 2 + (2 * x + y - 5) ** 2


def himmelblau(v):
    x, y = v
    return (x**2 + y - 11) ** 2 + (x + y**2 - 7) ** 2


def camel(v):
    x, y = v
    return 2 * x**2 - 1.05 * x**4 + x**6 / 6 + x * y + y**2


def mccormick(v):
    x, y = v
    return jnp.sin(x + y) + (x - y) ** 2 - 1.5 * x + 2.5 * y + 1


def matyas(v):
    x, y = v
    return 0.26 * (x**2 + y**2) - 0.48 * x * y


def sphere(x):
    return jnp.sum(x**2)


def styblinski_tang(x):
    return 0.5 * jnp.sum(x**4 - 16 * x**2 + 5 * x)


def zakharov(x):
    line = jnp.sum(0.5 * jnp.arange(1, x.size + 1) * x)
    return jnp.sum(x**2) + line**2 + line**4


def powell(v):
    """Singular: the Hessian at the minimum has rank 2, so convergence is linear."""
    a, b, c, d = v
    return (a + 10 * b) ** 2 + 5 * (c - d) ** 2 + (b - 2 * c) ** 4 + 10 * (a - d) ** 4


# Function, start, and the known minimum nearest in value: (position or None where singular, value).
FUNCTIONS = {
    "Rosenbrock, 2": (rosenbrock, [-1.2, 1.0], [1.0, 1.0], 0.0),
    "Rosenbrock, 4": (rosenbrock, [1.3, 0.7, 0.8, 1.9], [1.0] * 4, 0.0),
    "Beale": (beale, [1.0, 1.0], [3.0, 0.5], 0.0),
    "Booth": (booth, [-5.0, 5.0], [1.0, 3.0], 0.0),
    "Himmelblau": (himmelblau, [1.0, 1.0], [3.0, 2.0], 0.0),
    "three-hump camel": (camel, [0.6, -0.4], [0.0, 0.0], 0.0),
    "McCormick": (mccormick, [0.0, 0.0], [-0.54719755, -1.54719755], -1.91322295),
    "Matyas": (matyas, [5.0, -7.0], [0.0, 0.0], 0.0),
    "sphere": (sphere, [3.0, -2.0, 1.0], [0.0] * 3, 0.0),
    "Styblinski–Tang": (styblinski_tang, [-1.0, -1.0], [-2.90353403] * 2, -78.33233140754),
    "Zakharov": (zakharov, [2.0, -1.0, 0.5], [0.0] * 3, 0.0),
    "Powell": (powell, [3.0, -1.0, 0.0, 1.0], None, 0.0),
}
# Starts where the Hessian is indefinite, so that the plain Newton step leaves Ω.
INDEFINITE = ("Beale", "Himmelblau", "Styblinski–Tang")


@pytest.mark.extended
@pytest.mark.parametrize("name", FUNCTIONS)
def test_newton_finds_the_minimum_that_scipy_finds(name):
    """The minimum of trust-exact from the same start: its value to 1e-8, its position to 1e-5."""
    function, start, position, value = FUNCTIONS[name]
    start = jnp.array(start)
    compiled = [jax.jit(f) for f in (function, jax.grad(function), jax.hessian(function))]
    theirs = scipy.optimize.minimize(
        compiled[0], start, jac=compiled[1], hess=compiled[2], method="trust-exact", options={"gtol": 1e-8}
    )
    result = blr.fit(blr.newton(), function, start, steps=500, tolerance=1e-16)
    # The Hessian at Powell's minimum is singular, a condition number that no arithmetic resolves.
    assert result.reason == "converged" or (name == "Powell" and result.reason in ("steps", "precision lost"))
    actual = float(function(result.q.mean))
    assert abs(actual - theirs.fun) < 1e-8
    assert abs(actual - value) < 1e-7
    if position is not None:
        assert result.reason == "converged"
        np.testing.assert_allclose(result.q.mean, theirs.x, atol=1e-5)
        np.testing.assert_allclose(result.q.mean, position, atol=1e-5)
        np.testing.assert_allclose(result.q.precision, compiled[2](result.q.mean), rtol=1e-5, atol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("name", INDEFINITE)
def test_plain_newton_fails_from_the_same_start(name):
    """Without the guard λ leaves Ω at an indefinite Hessian, and fit says so."""
    function, start, *_ = FUNCTIONS[name]
    assert np.linalg.eigvalsh(jax.hessian(function)(jnp.array(start)))[0] < 0
    result = blr.fit(blr.newton().replace(guard=blr.NoGuard()), function, jnp.array(start), steps=100)
    assert result.reason == "left the domain"
    assert np.all(np.isfinite(result.q.mean))


def skewed(x):
    return jnp.sum(jnp.exp(x) - 0.5 * x) + 0.5 * x @ x + 0.3 * x[0] * x[1]


@pytest.mark.extended
def test_von_meets_quadrature():
    """VON's stationary average is the fixed point of quadrature-Newton, within its standard error."""
    exact = blr.fit(
        blr.newton(0.5).replace(points=blr.Quadrature(15)), skewed, jnp.zeros(2), steps=300, tolerance=1e-22
    )
    assert exact.reason == "converged"
    rule = blr.von(0.05, samples=10)

    @jax.jit
    @jax.vmap
    def run(key):
        def body(state, k):
            state, _ = rule.step(skewed, state, None, k)
            return state, (state.q.mean, state.q.precision)

        means, precisions = jax.lax.scan(body, rule.init(exact.q), jax.random.split(key, 600))[1]
        return means[100:].mean(0), precisions[100:].mean(0)

    means, precisions = run(jax.random.split(jax.random.key(0), 32))
    # A constant rate leaves a bias of the order of ρ times the noise's variance; 1% is ample for it.
    for actual, value in ((means, exact.q.mean), (precisions, exact.q.precision)):
        error = np.std(actual, axis=0) / np.sqrt(32)
        np.testing.assert_array_less(np.abs(actual.mean(0) - value), 5 * error + 0.01)
        assert np.all(error < 0.01)


def derivative_free(rate, samples):
    """Natural evolution strategies: the score function, cooled so that q concentrates.

    With temperature τ, S tends to H/τ; a rate of ρ/τ keeps the mean's steps as long as they were.
    """
    cooling = optax.exponential_decay(1.0, 100, 0.5, end_value=1e-6)
    steps = blr.Steps(lambda count: rate / cooling(count), temperature=cooling)
    points = blr.MonteCarlo(samples, antithetic=True)
    return blr.Rule(blr.Gaussian, points, blr.Score(), steps, blr.Retraction(), name="derivative-free")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("function", "start", "optimum", "steps", "within"),
    [
        (lambda x: 0.5 * x @ jnp.array([[3.0, 1.0], [1.0, 2.0]]) @ x - x[0], [3.0, -2.0], [0.4, -0.2], 1000, 1e-10),
        (rosenbrock, [-1.2, 1.0], [1.0, 1.0], 2000, 1e-4),
    ],
    ids=["quadratic", "Rosenbrock"],
)
def test_without_derivatives(function, start, optimum, steps, within):
    """The score function alone reaches a quadratic's optimum to 1e-10 and Rosenbrock's to 1e-4 (τ ends at 1e-6)."""

    @jax.custom_jvp
    def opaque(x):
        return function(x)

    @opaque.defjvp
    def _(primals, tangents):
        raise AssertionError("the loss was differentiated")

    rule = derivative_free(0.05, 40)
    for seed in range(6):
        result = blr.fit(rule, opaque, jnp.array(start), steps=steps, key=jax.random.key(seed))
        assert result.reason == "steps"
        np.testing.assert_allclose(result.q.mean, optimum, atol=within, err_msg=f"seed {seed}")


def amari():
    path = Path(__file__).parents[2] / "examples" / "amari.py"
    spec = importlib.util.spec_from_file_location("amari", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.extended
def test_amaris_natural_gradient(capsys):
    """Each step is θ − ρF(θ)⁻¹∇(−log p), and the limit is the closed-form maximum-likelihood estimate."""
    module, rate = amari(), 0.5
    y = 3.0 + 2.0 * jax.random.normal(jax.random.key(0), (50,))
    data, objective, rule = (jnp.zeros(50), y), module.objective(y), module.amari(rate)
    step = jax.jit(lambda state: rule.step(objective, state, data)[0])
    state = rule.init(jnp.array([0.0, 1.5]))
    for _ in range(60):
        mean, log_sd = state.q.mean
        # By hand: ∂(−log p)/∂mean = −Σ(y − mean)/sd², ∂/∂log sd = N − Σ(y − mean)²/sd²; F = N diag(1/sd², 2).
        slope = jnp.array([-jnp.sum(y - mean), 50 * jnp.exp(2 * log_sd) - jnp.sum((y - mean) ** 2)])
        expected = state.q.mean - rate * slope / jnp.array([50.0, 100 * jnp.exp(2 * log_sd)])
        state = step(state)
        np.testing.assert_allclose(state.q.mean, expected, rtol=1e-10)
    np.testing.assert_allclose(state.q.mean, [jnp.mean(y), jnp.log(jnp.std(y))], rtol=1e-9)
    module.main()
    assert "closed form" in capsys.readouterr().out
