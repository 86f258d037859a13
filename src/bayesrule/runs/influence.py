"""What each row of a linear model did to its posterior: its site is dropped, nothing is refitted."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .. import factors
from ..factor_graph.leave_one_out import leave_one_out
from ..factor_graph.model import Model
from ..families.gaussian.full import Gaussian
from ..families.product import Product
from ..numerics.trees import ravel


def left_out(
    kind: str, q: Gaussian, x: Float[np.ndarray, "N D"], y: Float[np.ndarray, " N"], noise: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Each row's influence in nats, KL(q ‖ q without it), and its predictive log density without it.

    `kind` is "normal" (with its `noise`), "logistic" or "poisson"; q is over {"w"} or {"b", "w"}.

    >>> import bayesrule as blr
    >>> q = blr.Gaussian({"w": jnp.ones(1)}, jnp.array([[3.0]]))                        # of rows 1, 1 and a prior
    >>> influence, density = left_out("normal", q, np.ones((2, 1)), np.array([1.0, 2.0]), 1.0)
    >>> bool(influence[1] > influence[0])
    True
    """
    with_intercept = "b" in q.mean
    columns = np.column_stack([np.ones(len(x)), x]) if with_intercept else x
    factor = {
        "normal": lambda: factors.linear("y", {"w": "x"}, precision=1 / (noise or 1.0)),
        "logistic": lambda: factors.bernoulli_logit("y", {"w": "x"}),
        "poisson": lambda: factors.poisson_exp("y", {"w": "x"}),
    }[kind]()
    # In the order of the precision, which is that of the ravelled mean: the intercept first.
    block = Gaussian(ravel(q.mean), jnp.asarray(q.precision))
    model = Model({"w": block}, {"y": factor}, size=len(x))
    found = leave_one_out(model, Product({"w": block}), {"x": jnp.asarray(columns), "y": jnp.asarray(y)})
    return np.asarray(found.influence), np.asarray(found.log_density)
