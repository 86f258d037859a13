"""How wide a network's posterior is, and how to predict with it, chosen on held-out rows without another fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..families.base import Family
from ..families.gaussian.base import GaussianFamily
from ..families.gaussian.fixed import FixedGaussian
from ..families.gaussian.second_moment import SecondMomentGaussian
from ..numerics.checks import positive_int, positive_number
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.batches import Weighted
from ..objectives.objective import Objective

TEMPERATURE_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""The factors of q's temperature among which `choose_width` chooses by default."""
PRIOR_FACTORS = (0.1, 1.0, 10.0)
"""The factors of the prior's precision among which it chooses, where q holds the prior beside what the data say."""
_CHUNK_ROWS = 1024  # Held-out rows that are evaluated side by side.


@dataclass(frozen=True)
class ChosenWidth:
    """What `choose_width` returns.

    Attributes:
        q: the posterior with the chosen width.
        method: how to predict, the `method` of `predict`: "samples", or "mean" where no width made draws better.
        temperature_factor: by what the temperature that q was fitted with is multiplied.
        prior_factor: by what the prior's precision is multiplied.
        losses: the mean held-out loss of an example for the mean, None, and for each pair of factors.
    """

    q: Any
    method: str
    temperature_factor: float
    prior_factor: float
    losses: dict[tuple[float, float] | None, float]

    def __str__(self) -> str:
        mean, best = self.losses[None], self.losses[self.temperature_factor, self.prior_factor]
        if self.method == "mean":
            clear = "better by no more than a standard error" if best < mean else "worse"
            return f"predict with the mean ({mean:.4g} nats a row): draws are {clear} ({best:.4g} at best)"
        return (
            f"predict with draws at {self.temperature_factor:g} times the temperature and {self.prior_factor:g} times "
            f"the prior ({best:.4g} nats a row; the mean has {mean:.4g})"
        )


def choose_width(
    q: Family,
    objective: Objective,
    held_out: PyTree,
    *,
    key: Key,
    temperature_factors: Sequence[float] = TEMPERATURE_FACTORS,
    prior_factors: Sequence[float] = PRIOR_FACTORS,
    samples: int = 32,
) -> ChosenWidth:
    r"""Choose the temperature and the prior of a posterior, and whether to predict with draws or with the mean.

    $S = (NM\hat v + δ)/τ$ is formed again for any τ and δ from what a fit has measured, so that the choice takes no
    other fit: the loss of held-out rows is $−\log E_q\,p(y \mid x, θ)$ over draws or $−\log p(y \mid x, m)$ at the
    mean, and the objective's loss has to be $−\log p(y \mid x, θ)$. The same noise is used for every width. Draws are
    chosen if their loss is lower than the mean's by more than a standard error of the difference; the answer is the
    mean where noise never helps. Among widths the best is taken.

    Args:
        q: A Gaussian posterior, such as a `vadam` fit's `result.q`. If it does not hold the prior by itself, only its
            temperature is chosen.
        objective: The objective of the fit.
        held_out: Rows that were not fitted, as the data of a fit.
        key: A JAX key.
        temperature_factors: What to multiply q's temperature by.
        prior_factors: What to multiply the prior's precision by.
        samples: The number of draws for a prediction.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> x = jax.random.normal(jax.random.key(0), (200, 3))
    >>> y = x @ jnp.array([1.0, -2.0, 0.5]) + jax.random.normal(jax.random.key(1), (200,))
    >>> objective = blr.Objective(lambda w, example: 0.5 * (example[1] - example[0] @ w) ** 2, size=150)
    >>> options = {"steps": 300, "batch_size": 30, "key": jax.random.key(2)}
    >>> result = blr.fit(blr.vadam(1e-2), objective, jnp.ones(3), (x[:150], y[:150]), **options)
    >>> chosen = choose_width(result.q, objective, (x[150:], y[150:]), key=jax.random.key(3))
    >>> chosen.method, chosen.q.mean.shape
    ('mean', (3,))
    """
    if not isinstance(objective, Objective):
        raise ValueError(
            "choose_width needs the loss of each row by itself: pass a blr.Objective. Rows of a model or of "
            "Objective.from_batch are not independent of each other."
        )
    if not isinstance(q, GaussianFamily) or isinstance(q, FixedGaussian):
        raise ValueError(
            f"choose_width scales the precision of a Gaussian that a fit has learnt, and this is a {type(q).__name__}: "
            "pass the q of a result, such as that of vadam, vogn, ivon or laplace."
        )
    if isinstance(held_out, Weighted):
        raise ValueError("choose_width counts each held-out row once: pass the rows without weights.")
    factors = {
        "temperature_factors": [positive_number("temperature_factors", value) for value in temperature_factors],
        "prior_factors": [positive_number("prior_factors", value) for value in prior_factors],
    }
    for name, values in factors.items():
        if not values:
            raise ValueError(f"{name}= has no number to choose from.")
    if not isinstance(q, SecondMomentGaussian):
        factors["prior_factors"] = [1.0]
    samples = positive_int("samples", samples)
    rows = objective.rows(held_out)
    if rows < 2:
        raise ValueError(f"Held-out rows say how wide q should be, and there are {rows}: hold out some more.")
    at_mean = np.asarray(_mean_losses(objective, q, held_out), float)
    if np.isnan(at_mean).any():
        raise ValueError(
            f"The loss of held-out row {int(np.argmax(np.isnan(at_mean)))} at the mean of q is not a number: look for "
            "missing values in it."
        )
    by_width: dict[tuple[float, float], np.ndarray] = {}
    for temperature, prior in product(*factors.values()):
        losses = _draw_losses(objective, _scaled(q, temperature, prior), held_out, jax.random.clone(key), samples)
        by_width[temperature, prior] = np.nan_to_num(np.asarray(losses, float), nan=np.inf)
    means = {width: float(np.mean(losses)) for width, losses in by_width.items()}
    best = min(means, key=lambda width: means[width])
    difference = by_width[best] - at_mean if np.isfinite(means[best]) else np.full(rows, np.inf)
    if np.all(np.isfinite(difference)):
        is_better = np.mean(difference) < -np.std(difference, ddof=1) / np.sqrt(rows)
    else:  # One of the two calls a row impossible.
        is_better = bool(np.isfinite(means[best]))
    losses_of_all: dict[tuple[float, float] | None, float] = {None: float(np.mean(at_mean)), **means}
    return ChosenWidth(_scaled(q, *best), "samples" if is_better else "mean", best[0], best[1], losses_of_all)


def _scaled(q: Any, temperature: float, prior: float) -> Any:
    if isinstance(q, SecondMomentGaussian):
        q = q.with_scaled_prior(prior)
    return q.with_scaled_precision(1 / temperature)


def _losses(objective: Objective, theta: PyTree, held_out: PyTree) -> Float[Array, " B"]:
    return jax.lax.map(lambda example: objective.example_loss(theta, example), held_out, batch_size=_CHUNK_ROWS)


@compiled()
def _mean_losses(objective: Objective, q: Any, held_out: PyTree) -> Float[Array, " B"]:
    return _losses(objective, q.mean, held_out)


@compiled(static=("samples",))
def _draw_losses(objective: Objective, q: Any, held_out: PyTree, key: Key, samples: int) -> Float[Array, " B"]:
    keys = jax.random.split(key, samples)
    likelihoods = jax.lax.map(lambda key: -_losses(objective, q.sample(key), held_out), keys)
    return jnp.log(samples) - jax.nn.logsumexp(likelihoods, axis=0)
