"""The library's side of `trust.py`: a problem as a user would write it, and the answer as NumPy arrays in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from trust_problems import CLASSES, COMPONENTS, DOF, LATENT, Problem

import bayesrule as blr
from bayesrule import factors
from bayesrule.models import gp
from bayesrule.models.factor_analysis import ppca
from bayesrule.models.kernels import RBF, Matern32
from bayesrule.models.mixture import gaussian_mixture

Array = NDArray[Any]

STEPS, SLOW_STEPS = 400, 3000  # the latter for EM and message passing, whose steps are many and cheap


class Answer(NamedTuple):
    """What a fit returned.

    Attributes:
        reason: why it ended.
        steps: how many steps it took.
        bound: its bound, None where there is none.
        q: arrays and numbers that describe the posterior, by name (see `_read`).
    """

    reason: str
    steps: int
    bound: float | None
    q: dict[str, Any]


# Losses for `Objective`, with all constants.


def scores(params: Any, x: Any) -> Any:
    return params @ x


def gaussian_loss(f: Any, y: Any) -> Any:
    return 0.5 * (y - f) ** 2 + 0.5 * jnp.log(2 * jnp.pi)


def logistic_loss(f: Any, y: Any) -> Any:
    return jnp.logaddexp(0.0, f) - y * f


def poisson_loss(f: Any, y: Any) -> Any:
    return jnp.exp(f) - y * f + jax.scipy.special.gammaln(y + 1)


def student_loss(f: Any, y: Any) -> Any:
    constant = jax.scipy.special.gammaln((DOF + 1) / 2) - jax.scipy.special.gammaln(DOF / 2) - 0.5 * np.log(np.pi * DOF)
    return 0.5 * (DOF + 1) * jnp.log1p((y - f) ** 2 / DOF) - constant


def softmax_loss(f: Any, y: Any) -> Any:
    return jax.nn.logsumexp(f) - f[y.astype(int)]


LOSSES = {
    "ridge": gaussian_loss,
    "logistic": logistic_loss,
    "poisson": poisson_loss,
    "student": student_loss,
    "softmax": softmax_loss,
}


def rule_of(problem: Problem) -> blr.Rule:
    """The recipe as a user would call it."""
    kind = problem.program.kind
    order = 8 if kind == "softmax" else 32
    return {
        "laplace": blr.laplace,
        "newton": lambda: blr.newton(0.5),
        "von": blr.von,
        "von, quadrature": lambda: blr.von(0.5).replace(
            points=blr.Quadrature(order), guard=blr.Backtracking(monotone=True)
        ),
        "cvi": blr.cvi,
        "cvi, sites": lambda: blr.cvi(sites=True),
        "ncvmp": blr.ncvmp,
        "vmp": lambda: blr.vmp(order="parallel") if kind == "mixture" else blr.vmp(),
        "conjugate": blr.conjugate,
        "em": lambda: {
            "mixture": lambda: blr.em(order="parallel"),
            "ppca": lambda: blr.em("loadings", "noise"),
            "ridge, noise unknown": lambda: blr.em("noise"),
        }[kind](),
    }[problem.program.recipe]()


def run(problem: Problem) -> Answer:
    """Fit the problem in its precision; the caller has set JAX's default dtype accordingly."""
    rule = rule_of(problem)
    recipe, kind = problem.program.recipe, problem.program.kind
    objective, start, data = _objective(problem) if recipe in _OF_OBJECTIVES else _model(problem)
    key = jax.random.key(problem.seed) if recipe == "von" else None
    steps = SLOW_STEPS if recipe in ("em", "vmp") else 2 * STEPS if recipe == "von" else STEPS
    try:
        result = blr.fit(rule, objective, start, data, steps=steps, tolerance=problem.tolerance, key=key)
        bound = result.bound
    except (ValueError, FloatingPointError) as error:
        return Answer(f"error: {str(error)[:60]}", 0, None, {})
    return Answer(str(result.reason), result.steps, bound, _read(kind, result.q))


_OF_OBJECTIVES = ("laplace", "newton", "von", "von, quadrature")


def _arrays(problem: Problem) -> dict[str, Any]:
    return {name: jnp.asarray(x, problem.dtype) for name, x in problem.data.items()}


def _objective(problem: Problem) -> tuple[Any, Any, Any]:
    data, kind = _arrays(problem), problem.program.kind
    delta = jnp.asarray(problem.settings["precision"], problem.dtype)
    shape = (CLASSES, problem.program.shape[1]) if kind == "softmax" else (problem.program.shape[1],)
    objective = blr.Objective(LOSSES[kind], output=scores, linear=True, size=len(data["y"]), regularizer=delta)
    return objective, jnp.zeros(shape, problem.dtype), (data["x"], data["y"])


def _model(problem: Problem) -> tuple[Any, Any, Any]:
    data, kind = _arrays(problem), problem.program.kind
    if kind.startswith("gp"):
        return _process(problem, data), None, {"y": data["y"]}
    if kind.startswith("chain"):
        system = blr.StateSpace(data["transition"], data["noise"], jnp.array([1.0, 0.0]), covariance=data["first"])
        chain = blr.GaussianChain(system, len(data["y"]))
        return (
            blr.Model({"f": chain}, {"y": _likelihood(problem, "f", None)}, size=len(data["y"])),
            None,
            {"y": data["y"]},
        )
    if kind == "mixture":
        priors: Any = "flat" if problem.program.recipe == "em" else mixture_priors(problem)
        return gaussian_mixture(data["y"], COMPONENTS, covariance="diag", priors=priors), None, data
    if kind == "ppca":
        return ppca(data["y"], LATENT), None, data
    return _regression(problem), None, data


def mixture_priors(problem: Problem) -> dict[str, Any]:
    """Dirichlet(1), and a normal–gamma worth a tenth of a row, on the scale of the data."""
    columns = problem.program.shape[1]
    spread = jnp.asarray(problem.data["y"].var(), problem.dtype)
    components = blr.NormalGamma(
        jnp.zeros(columns), jnp.full(columns, 0.1), jnp.ones(columns), jnp.full(columns, spread)
    )
    return {"weights": blr.Dirichlet(jnp.ones(COMPONENTS)), "components": components}


def _regression(problem: Problem) -> blr.Model:
    settings, kind, columns = problem.settings, problem.program.kind, problem.program.shape[1]
    shape = (CLASSES, columns) if kind == "softmax" else (columns,)
    size = int(np.prod(shape))
    precision = settings["precision"]
    prior = blr.Gaussian(jnp.zeros(shape), precision * jnp.eye(size))
    start = prior if problem.start_at_prior else blr.Gaussian(jnp.zeros(shape), jnp.eye(size))
    blocks: dict[str, Any] = {"w": start}
    terms = {"prior of w": factors.prior("w", prior)}
    if "unknown" in kind:
        blocks["noise"] = blr.Gamma(jnp.asarray(2.0), jnp.asarray(1.0))
        terms["prior of noise"] = factors.prior("noise", blr.Gamma(settings["shape"], settings["rate"]))
    return blr.Model(blocks, terms | {"y": _likelihood(problem, "w", "x")}, size=problem.program.shape[0])


def _likelihood(problem: Problem, block: str, inputs: str | None) -> Any:
    kind, predictors = problem.program.kind, {block: inputs}
    points = blr.Delta() if "Laplace" in kind else None
    if "unknown" in kind:
        return factors.linear("y", predictors, precision="noise")
    if "ridge" in kind or "regression" in kind:
        return factors.linear("y", predictors, precision=1 / problem.settings.get("noise", 1.0))
    if "student" in kind:
        return factors.student_t("y", predictors, dof=DOF, points=points)
    if "poisson" in kind or "counts" in kind:
        return factors.poisson_exp("y", predictors, points=points)
    likelihood = {"softmax": factors.softmax, "probit": factors.bernoulli_probit}.get(kind, factors.bernoulli_logit)
    return likelihood("y", predictors, points=points)


def _process(problem: Problem, data: dict[str, Any]) -> blr.Model:
    settings = problem.settings
    kernel = (Matern32 if settings["rough"] else RBF)(settings["variance"], settings["scale"])
    return gp.process(kernel, data["x"], _likelihood(problem, "f", None))


def _read(kind: str, q: Any) -> dict[str, Any]:
    """The posterior in float64: a Gaussian's mean and root of the covariance, a process's sites and marginals, …"""
    double = lambda x: np.asarray(x, float)
    if kind.startswith(("gp", "chain")):
        first, second = q["f"].natural()
        marginals = {"mean": double(q["f"].mean), "sd": np.sqrt(np.maximum(double(q["f"].variance), 0))}
        return {"first": double(first), "curve": -2 * double(second), **marginals}
    if kind == "ppca":
        return {"loadings": double(q["loadings"].mean), "noise": 1 / float(q["noise"].mean)}
    if kind == "mixture":
        components = q["components"]
        if isinstance(components, blr.NormalGamma):
            fields = {name: double(getattr(components, name)) for name in ("mean", "count", "shape", "rate")}
            return {"concentration": double(q["weights"].concentration), **fields}
        at = components.mode()
        return {
            "weights": double(q["weights"].mode()),
            "means": double(at["mean"]),
            "variances": 1 / double(at["precision"]),
        }
    gaussian = q["w"] if isinstance(q, blr.Product) else q
    found = {"mean": double(gaussian.mean).ravel(), "root": covariance_root(double(gaussian.precision))}
    if isinstance(q, blr.Product) and "noise" in q.blocks:
        noise = q["noise"]
        if isinstance(noise, blr.Gamma):
            return found | {"shape": float(noise.shape), "rate": float(noise.rate)}
        return found | {"value": float(noise.mode())}
    return found


def covariance_root(precision: Array) -> Array:
    """C with CCᵀ = S⁻¹, from S scaled to a unit diagonal; NaN where S is not positive definite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = 1 / np.sqrt(np.diag(precision))
    scaled = scale[:, None] * (0.5 * (precision + precision.T)) * scale
    try:
        lower = np.linalg.cholesky(scaled)
    except np.linalg.LinAlgError:
        return np.full_like(precision, np.nan)
    return scale[:, None] * solve_triangular(lower, np.eye(len(scale)), lower=True).T
