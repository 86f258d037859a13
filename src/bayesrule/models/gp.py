"""Gaussian processes: a kernel, inputs and a likelihood make a model; every algorithm for models runs on it.

The likelihood is any `LinearFactor` of the process's outputs, `factors.bernoulli_logit("y", {"f": None})`: None in the
place of inputs means that the block's entries are the outputs. `conjugate()` is exact for Gaussian noise, and `cvi()`
serves all other likelihoods. The factor's points decide between variational inference (`Quadrature`) and Laplace's
approximation (`Delta()`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from ..factor_graph.linear_factor import LinearFactor
from ..factor_graph.model import Model
from ..factors import linear
from ..families.base import Family
from ..families.gaussian.full import Gaussian
from ..families.product import Product
from ..families.sites.base import SitedGaussian
from ..families.sites.chain import GaussianChain
from ..families.sites.process import GaussianProcess
from ..families.sites.state_space import StateSpace
from ..numerics.programs import compiled
from .kernels import Inputs, Kernel, columns
from .sparse_gp import project_on_inducing, single_output

__all__ = ["laplace_evidence", "log_evidence", "predict", "prior", "process", "regression"]


def prior(kernel: Kernel, x: Inputs, *, mean: float | Array = 0.0, through: str = "dense") -> SitedGaussian:
    r"""The process at the inputs x, N(mean, k(x, x)), as a block for a model of your own; q = the prior.

    Args:
        kernel: k.
        x: the inputs, (N,) or (N, D).
        mean: the prior mean, a number or one for each input.
        through: "dense", or "chain": the same process as a state space over sorted times, in linear time, for Matérn
            kernels of one dimension.

    >>> import jax.numpy as jnp
    >>> from bayesrule.models.kernels import Matern32
    >>> times = jnp.array([0.0, 0.5, 2.0])
    >>> [type(prior(Matern32(), times, through=how)).__name__ for how in ("dense", "chain")]
    ['GaussianProcess', 'GaussianChain']
    """
    x = _inputs(x)
    if through == "dense":
        return GaussianProcess(kernel(x), mean)
    if through != "chain":
        raise ValueError(
            f'through= is "dense" (any kernel) or "chain" (a Matérn kernel over sorted times), got {through!r}.'
        )
    return GaussianChain(_centered(kernel.state_space(x), mean), len(x))


def process(
    kernel: Kernel, x: Inputs, likelihood: LinearFactor, *, mean: float | Array = 0.0, through: str = "dense"
) -> Model:
    r"""$f ∼ GP(mean, k)$ and $p(y_n \mid f(x_n))$: the model of any likelihood on a Gaussian process.

    The prior needs no factor: it is the block's base measure.

    Args:
        likelihood: a factor of the process's outputs, with the predictors {name: None}; the name is the block's.
        kernel, x, mean, through: as for `prior`.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> from bayesrule.models.kernels import RBF
    >>> x, y = jnp.array([-2.0, -1.0, 1.0, 2.0]), jnp.array([0.0, 0.0, 1.0, 1.0])
    >>> for points in (blr.Delta(), blr.Quadrature(20)):                             # Laplace, variational inference
    ...     model = process(RBF(), x, blr.factors.bernoulli_logit("y", {"f": None}, points=points))
    ...     result = blr.fit(blr.cvi(), model, None, {"y": y}, steps=50, tolerance=1e-6)
    ...     print(result.reason, round(float(result.q["f"].mean[3]), 3), round(result.bound, 3))
    converged 0.579 -2.621
    converged 0.602 -2.597
    """
    name = single_output(likelihood)
    return Model({name: prior(kernel, x, mean=mean, through=through)}, {likelihood.data[-1]: likelihood}, size=len(x))


def regression(
    kernel: Kernel, x: Inputs, noise: float | Array, *, mean: float | Array = 0.0, through: str = "dense"
) -> Model:
    r"""$y_n ∼ N(f(x_n), noise)$ with a known noise variance: one step of `conjugate()` is exact.

    The bound is then the log marginal likelihood.

    Args:
        noise: the variance, one for all rows or one for each.
        kernel, x, mean, through: as for `prior`.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> from bayesrule.models.kernels import RBF
    >>> x, y = jnp.array([0.0, 1.0, 2.0]), jnp.array([0.0, 1.0, jnp.nan])               # NaN is a missing value
    >>> result = blr.fit(blr.conjugate(), regression(RBF(), x, 0.1), None, {"y": y}, steps=1)
    >>> [round(float(m), 3) for m in result.q["f"].mean], round(result.bound, 3)
    ([0.072, 0.869, 0.695], -2.405)
    """
    variance = jnp.asarray(noise, float)
    if not isinstance(variance, Tracer) and not bool(jnp.all(variance > 0)):
        raise ValueError(f"The noise is a variance above 0, got {noise}: for exact observations give a small one.")
    return process(kernel, x, linear("y", {"f": None}, precision=1 / variance), mean=mean, through=through)


def log_evidence(kernel: Kernel, x: Inputs, y: Any, noise: Any, weights: Any = 1.0) -> Float[Array, ""]:
    r"""$\log ∫ N(f \mid 0, K) \prod_n N(y_n \mid f_n, noise)^{w_n}\,df$, differentiable in the hyper-parameters.

    Args:
        kernel: k.
        x: the inputs.
        y: the observations.
        noise: their variance.
        weights: how many times each observation counts; 0 leaves it out.

    >>> import jax.numpy as jnp
    >>> from bayesrule.models.kernels import RBF
    >>> round(float(log_evidence(RBF(), jnp.array([0.0, 1.0]), jnp.array([0.0, 1.0]), 0.1)), 3)
    -2.405
    """
    # With W the weights, M = W^½KW^½ + noise·I and z = W^½y it is −½{zᵀM⁻¹z + log|M/noise| + Σ w log(2π noise)}. The
    # difference of A(λ) and the observations' squares divided by the noise would lose all digits for a small noise.
    weights = jnp.broadcast_to(jnp.asarray(weights, jnp.result_type(y, float)), jnp.shape(y))
    root = jnp.sqrt(weights)
    factor = jnp.linalg.cholesky(root[:, None] * kernel(x) * root + noise * jnp.eye(len(root), dtype=root.dtype))
    whitened = solve_triangular(factor, root * y, lower=True)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(factor))) - len(root) * jnp.log(noise)
    return -0.5 * (whitened @ whitened + log_det + jnp.sum(weights) * jnp.log(2 * math.pi * noise))


def laplace_evidence(
    kernel: Kernel, x: Inputs, likelihood: LinearFactor, y: Any, mode: Any, weights: Any = 1.0
) -> Float[Array, ""]:
    r"""Laplace's log evidence, differentiable in the kernel's hyper-parameters.

    $\sum_n w_n\log p(y_n \mid f_*) − ½f_*^⊤K^{-1}f_* − ½\log|I + KW(f_*)|$ with W the curvature of −log p. The mode
    $f_*$ depends on the hyper-parameters too. One Newton step from the given mode, which is a fixed point of these
    steps, has the derivative of that dependence.

    Args:
        kernel: k.
        x: the inputs.
        likelihood: a factor of the process's outputs.
        y: the observations.
        mode: $f_*$ for this kernel, as a fit with `Delta()` points gives it.
        weights: how many times each observation counts.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> from bayesrule.models.kernels import RBF
    >>> x, y = jnp.array([-2.0, -1.0, 1.0, 2.0]), jnp.array([0.0, 0.0, 1.0, 1.0])
    >>> labels = blr.factors.bernoulli_logit("y", {"f": None}, points=blr.Delta())
    >>> mode = blr.fit(blr.cvi(), process(RBF(), x, labels), None, {"y": y}, steps=50, tolerance=1e-6).q["f"].mean
    >>> round(float(laplace_evidence(RBF(), x, labels, y, mode)), 3)
    -2.621
    """
    log_p, fixed_mode, process = likelihood.function, jax.lax.stop_gradient(mode), prior(kernel, x)
    first, second = jax.grad(log_p), jax.grad(jax.grad(log_p))
    curvature = lambda f: -jnp.asarray(weights) * jax.vmap(second)(f, y)
    kappa, slope = curvature(fixed_mode), weights * jax.vmap(first)(fixed_mode, y)
    newton = process.solve_sites((kappa * fixed_mode + slope, -0.5 * kappa)).mean
    log_det = process.solve_sites((jnp.zeros_like(newton), -0.5 * curvature(newton))).log_det
    # f = K(slope + κ(f_* − f)) after the step, so this is fᵀK⁻¹f without an inverse of K.
    square = newton @ (kappa * (fixed_mode - newton) + slope)
    return jnp.sum(weights * jax.vmap(log_p)(newton, y)) - 0.5 * (square + log_det)


def predict(
    q: Family, kernel: Kernel, x: Inputs, x_new: Inputs, *, mean: float = 0.0, full: bool = False
) -> tuple[Float[Array, " M"], Array]:
    """The mean and the variance of f at new inputs.

    Args:
        q: a fitted q with one process in it, or the process's block.
        kernel: k.
        x: the inputs that the model was built with; the inducing ones if it is sparse.
        x_new: the new inputs.
        mean: the prior mean.
        full: whether to return the covariance (M, M) in the place of the variances.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> from bayesrule.models.kernels import RBF
    >>> x = jnp.array([0.0, 1.0])
    >>> q = blr.fit(blr.conjugate(), regression(RBF(), x, 0.1), None, {"y": jnp.array([0.0, 1.0])}, steps=1).q
    >>> [round(float(z[0]), 3) for z in predict(q, RBF(), x, jnp.array([2.0]))]
    [0.695, 0.614]
    """
    block = _process_of(q)
    if isinstance(block, GaussianChain) and full:
        raise ValueError(
            "A chain computes the variances of new outputs, not their covariance: for full=True use the dense process."
        )
    return _predict(block, kernel, columns(x), columns(x_new), mean, full=full)


@compiled(static="full")
def _predict(block: Any, kernel: Kernel, x: Array, x_new: Array, mean: Any, *, full: bool) -> tuple[Array, Array]:
    if isinstance(block, GaussianChain):
        return _predict_along_chain(block, kernel, x[:, 0], x_new[:, 0], mean)
    prior_variance = kernel(x_new) if full else kernel.diagonal(x_new)
    if isinstance(block, GaussianProcess):
        return block.predict(kernel(x, x_new), prior_variance, mean)
    # f = a·u + ε for the inducing values u ~ N(m, V): the variance is aᵀVa + k − aᵀa.
    weights = project_on_inducing(kernel, x, x_new)
    weighted_cov = weights @ block.covariance()
    if full:
        return mean + weights @ block.mean, prior_variance - weights @ weights.T + weighted_cov @ weights.T
    return mean + weights @ block.mean, prior_variance + jnp.sum((weighted_cov - weights) * weights, axis=1)


def _process_of(q: Family) -> SitedGaussian | Gaussian:
    """The one block of q that is a process, dense, chain or sparse."""
    blocks = q.blocks.values() if isinstance(q, Product) else [q]
    processes = [block for block in blocks if isinstance(block, SitedGaussian | Gaussian)]
    if len(processes) != 1:
        raise ValueError("predict takes a q with one process in it, or the block of one: predict(q['f'], …).")
    return processes[0]


def _inputs(x: Any) -> Array:
    rows = columns(x)
    if not len(rows) or not (isinstance(rows, Tracer) or bool(jnp.all(jnp.isfinite(rows)))):
        raise ValueError("A process needs inputs, at least one and all finite: only observations may be missing.")
    return rows


def _centered(space: StateSpace, mean: float | Array) -> StateSpace:
    """The same process plus a constant.

    The constant is a shift of all states, by the state x̄ with H·x̄ = mean that is most probable under the stationary
    covariance. It stays there from step to step by the offset x̄ − Fx̄.
    """
    constant = jnp.asarray(mean, space.mean.dtype)
    if constant.ndim:
        raise ValueError(
            f"Through a chain the prior mean is one number, got the shape {constant.shape}: subtract it from y."
        )
    state = constant * space.covariance @ space.emission / (space.emission @ space.covariance @ space.emission)
    offset = state - space.transition @ state
    return StateSpace(space.transition, space.noise, space.emission, state, space.covariance, offset)


def _predict_along_chain(
    block: GaussianChain, kernel: Kernel, old: Array, new: Array, mean: Any
) -> tuple[Array, Array]:
    """The outputs at the new times, from a chain over old and new times together; the new ones have no sites."""
    order = jnp.argsort(jnp.concatenate([old, new]), stable=True)
    pad = lambda site: jnp.concatenate([site, jnp.zeros(len(new), site.dtype)])[order]
    space = _centered(kernel.state_space(jnp.concatenate([old, new])[order]), mean)
    merged = GaussianChain(space, len(order), tuple(pad(site) for site in block.sites), block.parallel)
    places = jnp.zeros(len(order), int).at[order].set(jnp.arange(len(order)))[len(old) :]
    return merged.mean[places], merged.variance[places]
