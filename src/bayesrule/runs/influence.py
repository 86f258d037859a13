"""How much each training row moved the posterior of a linear model: its site is removed, nothing is refitted."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .. import factors
from ..factor_graph.leave_one_out import leave_one_out
from ..factor_graph.model import Model
from ..families.gaussian.full import Gaussian
from ..families.gaussian.low_rank import LowRankGaussian
from ..families.product import Product
from ..models.row_space import project
from ..numerics.trees import ravel


def leave_rows_out(
    likelihood: Literal["normal", "logistic", "poisson"],
    q: Gaussian | LowRankGaussian,
    x: Float[np.ndarray, "N D"],
    y: Float[np.ndarray, " N"],
    noise: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's influence in nats, KL(q ‖ q without it), its predictive log density without it, and the prediction.

    The prediction is the mean of y (for two classes the probability of the second) under the posterior without the row.

    Args:
        likelihood: of y given wᵀx + b.
        q: the posterior over {"w"} or {"b", "w"}.
        x: the training inputs.
        y: the training targets.
        noise: the variance of y, for "normal".

    >>> import bayesrule as blr
    >>> q = blr.Gaussian({"w": jnp.ones(1)}, jnp.array([[3.0]]))      # the posterior of two rows x = 1 and a prior
    >>> influence, log_density, mean = leave_rows_out("normal", q, np.ones((2, 1)), np.array([1.0, 2.0]), 1.0)
    >>> bool(influence[1] > influence[0]), mean.tolist()              # half of the other row: the prior is as strong
    (True, [1.0, 0.5])
    """
    inputs = np.column_stack([np.ones(len(x)), x]) if "b" in q.mean else x
    factor = {
        "normal": lambda: factors.linear("y", {"w": "x"}, precision=1 / (noise or 1.0)),
        "logistic": lambda: factors.bernoulli_logit("y", {"w": "x"}),
        "poisson": lambda: factors.poisson_exp("y", {"w": "x"}),
    }[likelihood]()
    if isinstance(q, LowRankGaussian):  # Nothing but the space of the rows matters to what they say.
        block, inputs = project(q, inputs)
    else:
        # The rows of the precision are in the order of the ravelled mean, in which the intercept comes first.
        block = Gaussian(ravel(q.mean), jnp.asarray(q.precision))
    model = Model({"w": block}, {"y": factor}, size=len(x))
    without = leave_one_out(model, Product({"w": block}), {"x": jnp.asarray(inputs), "y": jnp.asarray(y)})
    log_density = np.asarray(without.log_density)
    if likelihood == "logistic":
        observed = np.exp(log_density)
        return np.asarray(without.influence), log_density, np.where(y > 0, observed, 1 - observed)
    mean, variance = inputs @ np.asarray(block.mean), np.einsum("ni,ij,nj->n", inputs, block.covariance(), inputs)
    return np.asarray(without.influence), log_density, _mean_without(likelihood, mean, variance, y, noise)


def _mean_without(
    likelihood: str, mean: np.ndarray, variance: np.ndarray, y: np.ndarray, noise: float | None
) -> np.ndarray:
    r"""E y under the posterior without the row, from the mean and the variance v of the row's output under q.

    The site of a row is its expected log-likelihood to second order, with slope g and curvature h in the output.
    Without it the output has the variance $v' = 1/(1/v − h)$ and the mean $m − v'g$. NaN where that is no distribution.
    """
    if likelihood == "normal":
        curvature, slope = np.full(len(y), 1 / (noise or 1.0)), (y - mean) / (noise or 1.0)
    else:
        curvature = np.exp(mean + variance / 2)
        slope = y - curvature
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rest = 1 / variance - curvature
        without = np.where(rest > 0, 1 / rest, np.nan)
        moved = mean - without * slope
        return moved if likelihood == "normal" else np.exp(moved + without / 2)
