"""Factor analysis and probabilistic PCA: rows as a few latent numbers times loadings, and noise."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from .. import factors
from ..factor_graph.model import Model
from ..families.gamma import Gamma
from ..families.gaussian.full import Gaussian
from ..families.gaussian.shared import SharedGaussian
from ..objectives.batches import Weighted
from .starts.principal import principal

_HELD = 1e8  # the precision of a number that is held at 1


def factor_analysis(
    y: Any,
    size: int,
    *,
    noise: Literal["each", "one"] = "each",
    priors: Literal["flat", "default"] = "flat",
    shared: bool = False,
    mean: bool = False,
    key: Any = None,
) -> Model:
    r"""$y_{nd} ∼ N(w_d^⊤x_n, 1/τ_d)$ with $x_n ∼ N(0, I)$ of `size` numbers, loadings w and precisions τ unknown.

    `y` is (N, D), its columns centred; NaN is missing, entry by entry. Fit with `data={"y": y}`. Flat priors are
    maximum likelihood, for `em("loadings", "noise")`; the default ones, for `vmp()` and `svi()`, give every column of
    the loadings a precision of its own (a factor that is not needed fades) and all precisions Gamma(10⁻³, 10⁻³).
    `noise="one"` has the same τ for all columns. `shared` keeps one covariance for all rows: several times faster,
    where nothing is missing and no mini-batches are taken. With `mean` the loadings have one more column,
    the mean's, for a number of each row that is held at 1: where entries are missing, the columns' own means are not
    the best. The start is the principal components, drawn beyond those (`key`).

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> y = jax.random.normal(jax.random.key(0), (50, 1)) * jnp.array([1.0, 2.0, -1.0])
    >>> y = y - y.mean(0) + 0.1 * jax.random.normal(jax.random.key(1), (50, 3))
    >>> result = blr.fit(blr.em("loadings", "noise"), factor_analysis(y, 1), None, {"y": y}, steps=50)
    >>> bool(jnp.all(1 / result.q["noise"].mean < 0.03))
    True
    """
    rows = np.asarray(y, float)
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"y has rows of numbers, (N, D), got {rows.shape}.")
    if noise not in ("each", "one"):
        raise ValueError(f'noise= is "each" (a precision for every column) or "one" for all, got {noise!r}.')
    if priors not in ("flat", "default"):
        raise ValueError(f'priors= is "flat" (maximum likelihood) or "default", got {priors!r}.')
    if shared and (mean or np.any(np.isnan(rows))):
        raise ValueError("Rows that are missing in part have covariances of their own: leave shared=True out.")
    start, left = principal(rows, size, key)
    held = jnp.zeros(size)
    if mean:
        start, size = jnp.pad(start, ((0, 0), (0, 1))), size + 1
        held = jnp.zeros(size).at[-1].set(1.0)
    spread = jnp.broadcast_to(10 * jnp.eye(size), (rows.shape[1], size, size))
    alone = Gaussian(held, jnp.diag(1.0 + _HELD * held))
    latent = SharedGaussian(jnp.zeros((len(rows), size))) if shared else alone
    kind = jnp.mean(left) if noise == "one" else left
    blocks: dict[str, Any] = {"loadings": Gaussian(start, spread), "noise": Gamma(jnp.full_like(kind, 2.0), kind)}
    terms = {
        "latent": factors.prior("latent", latent),
        "y": factors.bilinear("y", "latent", "loadings", precision="noise"),
    }
    if priors == "default":
        vague = Gamma(jnp.asarray(1e-3), jnp.asarray(1e-3))
        blocks["scales"] = Gamma(jnp.ones(size), jnp.ones(size))
        terms |= {f"prior of {name}": factors.prior(name, vague) for name in ("scales", "noise")}
        terms["loadings"] = factors.gaussian("loadings", precision="scales")
    if shared:
        return Model({"latent": latent, **blocks}, terms)
    return Model(blocks, terms, local={"latent": latent})


def ppca(
    y: Any, size: int, *, priors: Literal["flat", "default"] = "flat", shared: bool = False, key: Any = None
) -> Model:
    r"""Probabilistic PCA, $y_n ∼ N(Wx_n, σ^2I)$: `factor_analysis` with one noise for all columns.

    >>> print(ppca([[1.0, 2.0], [-1.0, 0.0], [0.0, -2.0]], 1))
    Model with 3 blocks and 2 factors
      latent    Gaussian[1], one for each row
      loadings  Gaussian[2, 1]
      noise     Gamma[]
      log-joint, the sum of
      latent    E log Gaussian prior(latent)
      y         E log bilinear(latent, loadings, noise; y)
    """
    return factor_analysis(y, size, noise="one", priors=priors, shared=shared, key=key)


def condensed(y: Any, count: int) -> Weighted:
    r"""`count` weighted rows that say of loadings and noise all that y does: the same $\sum_n y_ny_n^⊤$ and N.

    A fit depends on rows that are centred, and of which nothing is missing, through these alone; so its steps and its
    bound are the same. At least min(N, D) rows are needed, and D are enough for any N.

    >>> rows = condensed(np.arange(8.0).reshape(4, 2), 2)
    >>> y, weights = np.asarray(rows.examples["y"]), np.asarray(rows.weights)
    >>> ((y.T * weights) @ y).round(6).tolist(), weights.tolist()
    ([[56.0, 68.0], [68.0, 84.0]], [2.0, 2.0])
    """
    rows = np.asarray(y, float)
    short = np.linalg.qr(rows, mode="r")
    if len(short) > count:
        raise ValueError(f"{len(rows)} rows of {rows.shape[1]} numbers take at least {len(short)} others, got {count}.")
    short = np.concatenate([short, np.zeros((count - len(short), rows.shape[1]))]) * np.sqrt(count / len(rows))
    return Weighted({"y": jnp.asarray(short)}, jnp.full(count, len(rows) / count))
