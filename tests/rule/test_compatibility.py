"""Wrong pairings and values out of range are ValueErrors when they are made, and name what is right."""

import jax
import jax.numpy as jnp
import pytest

import bayesrule as blr
from bayesrule.families.gaussian.base import GaussianFamily

WRONG = {
    "Delta × Stein": (blr.Gaussian, blr.Delta(), blr.Stein(), {}, "MonteCarlo"),
    "Delta × Score": (blr.Gaussian, blr.Delta(), blr.Score(), {}, r"MonteCarlo\(samples\)"),
    "Exact × Hessian": (blr.Gaussian, blr.Exact(), blr.Hessian(), {}, r"Gradient\(\)"),
    "Exact × Score": (blr.Categorical, blr.Exact(), blr.Score(), {}, r"Gradient\(\)"),
    "Enumeration × Gradient": (blr.Categorical, blr.Enumeration(), blr.Gradient(), {}, r"Score\(\)"),
    "Enumeration × Gaussian": (blr.Gaussian, blr.Enumeration(), blr.Score(), {}, r"MonteCarlo\(\)"),
    "Enumeration × Poisson": (blr.Poisson, blr.Enumeration(), blr.Score(), {}, r"MonteCarlo\(\)"),
    "Quadrature × Reparameterized": (blr.Gaussian, blr.Quadrature(3), blr.Reparameterized(), {}, "MonteCarlo"),
    "Delta × Reparameterized": (blr.Gaussian, blr.Delta(), blr.Reparameterized(), {}, "MonteCarlo"),
    "Reparameterized × Poisson": (blr.Poisson, blr.MonteCarlo(2), blr.Reparameterized(), {}, r"Score\(\)"),
    "Reparameterized × Categorical": (blr.Categorical, blr.MonteCarlo(2), blr.Reparameterized(), {}, r"Score\(\)"),
    "Hessian × DiagonalGaussian": (blr.DiagonalGaussian, blr.Delta(), blr.Hessian(), {}, r"HessianDiagonal\(\)"),
    "HessianDiagonal × Gaussian": (blr.Gaussian, blr.Delta(), blr.HessianDiagonal(), {}, r"Hessian\(\)"),
    "SquaredGradient × Gaussian": (blr.Gaussian, blr.Delta(), blr.SquaredGradient(), {}, r"GaussNewton\(\)"),
    "Hessian × FixedGaussian": (blr.FixedGaussian, blr.Delta(), blr.Hessian(), {}, r"Gradient\(\)"),
    "Gradient × Gaussian": (blr.Gaussian, blr.Delta(), blr.Gradient(), {}, r"Hessian\(\)"),
    "Hessian × LowRankGaussian": (blr.LowRankGaussian, blr.Delta(), blr.Hessian(), {}, r"GaussNewton\(\)"),
    "Stein × LowRankGaussian": (blr.LowRankGaussian, blr.MonteCarlo(2), blr.Stein(), {}, r"GaussNewton\(\)"),
    "Hessian × Gamma": (blr.Gamma, blr.MonteCarlo(2), blr.Hessian(), {}, r"Reparameterized\(\)"),
    "Gradient × Categorical": (blr.Categorical, blr.MonteCarlo(2), blr.Gradient(), {}, r"Score\(\)"),
    "Exact × LowRankGaussian": (blr.LowRankGaussian, blr.Exact(), blr.Gradient(), {}, r"GaussNewton\(\)"),
    "Score × LowRankGaussian": (blr.LowRankGaussian, blr.MonteCarlo(2), blr.Score(), {}, r"GaussNewton\(\)"),
    "Retraction × FixedGaussian": (
        blr.FixedGaussian,
        blr.Delta(),
        blr.Gradient(),
        {"guard": blr.Retraction()},
        r"Backtracking\(\)",
    ),
    "Retraction × Gamma": (blr.Gamma, blr.Exact(), blr.Gradient(), {"guard": blr.Retraction()}, r"Backtracking\(\)"),
    "Retraction × LowRankGaussian": (
        blr.LowRankGaussian,
        blr.Delta(),
        blr.GaussNewton(),
        {"guard": blr.Retraction()},
        r"Backtracking\(\)",
    ),
    "Retraction × reverse": (
        blr.Gaussian,
        blr.Delta(),
        blr.Hessian(),
        {"guard": blr.Retraction(), "steps": blr.Steps(0.1, reverse=True)},
        r"Backtracking\(\)",
    ),
    "momentum × LowRankGaussian": (
        blr.LowRankGaussian,
        blr.Delta(),
        blr.GaussNewton(),
        {"steps": blr.Steps(0.1, momentum=0.9)},
        "GradientAverage",
    ),
    "reverse × LowRankGaussian": (
        blr.LowRankGaussian,
        blr.Delta(),
        blr.GaussNewton(),
        {"steps": blr.Steps(0.1, reverse=True)},
        "reverse=False",
    ),
    "lazy × LowRankGaussian": (
        blr.LowRankGaussian,
        blr.Delta(),
        blr.GaussNewton(),
        {"steps": blr.Steps(0.1, temperature=0.0, lazy=True)},
        "exponential family",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_pairing_names_a_right_one(case):
    family, points, curvature, more, right = WRONG[case]
    with pytest.raises(ValueError, match=right):
        blr.Rule(family, points, curvature, **({"steps": blr.Steps(0.1)} | more))


def test_a_replaced_piece_is_checked_too():
    with pytest.raises(ValueError, match="MonteCarlo"):
        blr.newton().replace(curvature=blr.Stein())
    with pytest.raises(ValueError, match="no piece"):
        blr.newton().replace(pointz=blr.Delta())


def test_an_abstract_family_is_checked_at_init():
    """`conjugate` takes any exponential family; a rule for Gaussians of any kind is checked by the start."""
    rule = blr.Rule(GaussianFamily, blr.Delta(), blr.Hessian(), blr.Steps(0.1))
    assert rule.init(blr.Gaussian(jnp.zeros(2))).q.precision.shape == (2, 2)
    with pytest.raises(ValueError, match=r"HessianDiagonal\(\)"):
        rule.init(blr.DiagonalGaussian(jnp.zeros(2)))
    with pytest.raises(ValueError, match="start from"):
        blr.conjugate().init(jnp.zeros(2))


def test_a_start_from_another_family():
    with pytest.raises(ValueError, match=r"moves a Gaussian, and the start is a DiagonalGaussian"):
        blr.newton().init(blr.DiagonalGaussian(jnp.zeros(2)))
    with pytest.raises(ValueError, match="pass a member"):
        blr.exponential_weights(0.1).init(jnp.zeros(3))
    with pytest.raises(ValueError, match="real"):
        blr.newton().init(jnp.zeros(2, complex))
    with pytest.raises(ValueError, match="class such as"):
        blr.Rule(blr.Gaussian(jnp.zeros(2)), blr.Delta(), blr.Hessian(), blr.Steps(0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: blr.Steps(-0.1), "mean's rate must be at least 0"),
        (lambda: blr.Rates(0.1, -0.1), "precision's rate must be at least 0"),
        (lambda: blr.Rates(0.1, blr.Delta()), "or a Window in epochs, got a Delta"),
        (lambda: blr.Steps(float("nan")), "rate must be"),
        (lambda: blr.Steps(0.1, temperature=-1.0), "temperature must be at least 0"),
        (lambda: blr.Steps(0.1, momentum=1.5), "momentum must be between 0 and 1"),
        (lambda: blr.GradientAverage(1.5), "decay must be between 0 and 1"),
        (lambda: blr.GradientAverage(0.9, over="all"), '"data" or "total"'),
        (lambda: blr.Steps(0.1, lazy=True), "temperature=0"),
        (lambda: blr.Steps(0.1, temperature=0.0, lazy=True, momentum=0.9), "without momentum"),
        (lambda: blr.MonteCarlo(0), "samples= is a whole number above 0"),
        (lambda: blr.MonteCarlo(3, antithetic=True), "come in pairs"),
        (lambda: blr.Quadrature(0), "order= is a whole number above 0"),
        (lambda: blr.gradient_descent(-1.0), "rate must be"),
    ],
)
def test_numbers_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_random_points_need_a_key():
    with pytest.raises(ValueError, match="key"):
        blr.von().step(lambda x: jnp.sum(x**2), blr.von().init(jnp.zeros(1)))
    rule = blr.Rule(blr.Gamma, blr.MonteCarlo(2, antithetic=True), blr.Score(), blr.Steps(0.1))
    with pytest.raises(ValueError, match="mirror a symmetric q"):
        rule.step(jnp.log, rule.init(blr.Gamma(2.0, 1.0)), None, jax.random.key(0))
    rule = blr.newton().replace(points=blr.Quadrature(5))
    with pytest.raises(ValueError, match="linear=True"):
        rule.step(lambda x: jnp.sum(x**2), rule.init(jnp.zeros(20)))


def test_what_is_not_symmetric_has_no_mirrored_pairs():
    with pytest.raises(ValueError, match="Antithetic pairs mirror a symmetric q"):
        blr.von(0.1).replace(family=blr.SkewGaussian)
    assert blr.von(0.1).replace(family=blr.StudentT).points.antithetic


def test_a_start_is_something():
    with pytest.raises(ValueError, match="needs a start: pass parameters"):
        blr.newton().init(None)
