"""Leave-one-out: what the model says of each row without it, by dropping the row's site instead of refitting."""

from __future__ import annotations

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ..families.product import Product
from .data import observed_part
from .linear_factor import LinearFactor
from .model import Model
from .sites import message


class LeaveOneOut(eqx.Module):
    r"""Every row seen from the others: with $q_{−n} ∝ q / e^{⟨\tildeλ_n, T⟩}$ its cavity,

    `log_density` is $\log E_{q_{−n}} p(y_n \mid θ)$, `influence` the nats $KL(q ‖ q_{−n})$ by which the row moved q.
    Exact for a conjugate model, where a factor's other blocks (a noise precision) are held as they are. For others the
    remaining sites are taken as they are, though a refit would move them: good to about 0.01 nats for rows of an
    influence below 0.1, worse for the few that matter more. `proper` says whether the cavity is a distribution; where
    it is not, the other two are NaN. A missing row has 0 for both.
    """

    log_density: Float[Array, " N"]
    influence: Float[Array, " N"]
    proper: Bool[Array, " N"]

    @property
    def total(self) -> Array:
        """Σ_n log p(y_n | y_{−n}), the expected log predictive density."""
        return jnp.sum(self.log_density)

    def __repr__(self) -> str:
        lost = int(jnp.sum(~self.proper))
        improper = f", {lost} with an improper cavity" if lost else ""
        return f"LeaveOneOut({self.log_density.size} rows, total {float(self.total):.6g}{improper})"


def leave_one_out(model: Model, q: Product, data: PyTree, factor: str | None = None) -> LeaveOneOut:
    """Every row left out, by one factor that has rows: exact where that factor is conjugate and q exact."""
    rowed = [name for name, one in model.factors.items() if one.data]
    if model.local:
        raise ValueError("Rows with local blocks cannot be left out by dropping a site: their q goes with them.")
    if factor is None and len(rowed) != 1:
        raise ValueError(f"Say which factor's rows to leave out, loo(factor=…): the model has {rowed}.")
    name = rowed[0] if factor is None else factor
    if name not in rowed:
        raise ValueError(f"Factor {name!r} has no rows to leave out; {rowed} have.")
    if model.taken(data).weights is not None:
        raise ValueError("Rows that are weighted are not left out one by one: fit without weights.")
    found = _left_out(model, q, data, name)
    lost = int(jnp.sum(~found.proper))
    if lost:
        warnings.warn(
            f"Without its own site q is not a distribution for {lost} of {found.proper.size} rows: their log densities "
            "are NaN. Such rows hold the posterior up alone; refit without them.",
            stacklevel=3,
        )
    return found


@eqx.filter_jit
def _left_out(model: Model, q: Product, data: PyTree, name: str) -> LeaveOneOut:
    factor, rows = model.factors[name], model.taken(data)
    site, seen = message(model, name, q, rows, jax.random.key(0)), model.seen(q)
    arrays, observed = observed_part(factor, rows)
    if isinstance(factor, LinearFactor):
        density, influence, proper = _by_outputs(factor, site["outputs"], seen, arrays)
    else:
        density, influence, proper = _by_natural(model, name, q, rows, site)
    if observed is not None:
        present = jnp.any(observed.reshape((observed.shape[0], -1)), axis=-1)
        density, influence = jnp.where(present, density, 0.0), jnp.where(present, influence, 0.0)
        proper = proper | ~present
    return LeaveOneOut(jnp.where(proper, density, jnp.nan), jnp.where(proper, influence, jnp.nan), proper)


def _by_outputs(factor: LinearFactor, site: Any, seen: Any, data: Any) -> tuple[Array, Array, Array]:
    """In the terms of f_n, since q and its cavity differ by a function of f_n alone."""
    mean, spread = factor.outputs(seen, data)
    first, curve = site
    if mean.ndim == 1:
        mean, spread, first, curve = mean[:, None], spread[:, None, None], first[:, None], curve[:, None, None]
    elif spread.ndim == mean.ndim:
        diagonal = lambda x: x[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)
        spread, curve = diagonal(spread), diagonal(curve)
    precision = jnp.linalg.inv(spread)
    left = precision - curve
    pivots = jnp.diagonal(jnp.linalg.cholesky(left), axis1=1, axis2=2) ** 2
    # What is left of the precision must be more than the rounding of what was taken away.
    rounding = 1e3 * pivots.shape[-1] * jnp.finfo(pivots.dtype).eps
    proper = jnp.all(pivots > rounding * jnp.diagonal(precision, axis1=1, axis2=2), axis=1)
    safe = jnp.where(proper[:, None, None], left, precision)
    covariance = jnp.linalg.inv(safe)
    natural = jnp.einsum("nkl,nl->nk", precision, mean) - first
    center = jnp.einsum("nkl,nl->nk", covariance, natural)
    size, gap = mean.shape[-1], center - mean
    log_det = lambda x: jnp.linalg.slogdet(x)[1]
    trace = jnp.einsum("nkl,nlk->n", safe, spread)
    square = jnp.einsum("nk,nkl,nl->n", gap, safe, gap)
    influence = 0.5 * (trace - size - log_det(safe) + log_det(precision) + square)
    if factor.conjugate:
        # The row's term is ⟨λ̃, T⟩ + c exactly: log E_{q₋ₙ} p = c + A(λ) − A(λ − λ̃).
        flat = (lambda m, v: (m[:, 0], v[:, 0, 0])) if size == 1 else (lambda m, v: (m, v))
        value = factor.given(*flat(mean, spread), seen, data, None)
        value = jnp.sum(value.reshape((value.shape[0], -1)), axis=1)
        second = spread + mean[:, :, None] * mean[:, None, :]
        constant = value - jnp.einsum("nk,nk->n", first, mean) + 0.5 * jnp.einsum("nkl,nkl->n", curve, second)
        partition = lambda p, m: 0.5 * jnp.einsum("nk,nkl,nl->n", m, p, m) - 0.5 * log_det(p)
        return constant + partition(precision, mean) - partition(safe, center), influence, proper
    if size == 1:
        return factor.density(center[:, 0], covariance[:, 0, 0], seen, data), influence, proper
    return factor.density(center, covariance, seen, data), influence, proper


def _by_natural(model: Model, name: str, q: Product, rows: Any, site: PyTree) -> tuple[Array, Array, Array]:
    """In λ: E log f_n = ⟨λ̃_n, μ⟩ + c_n, so log E_{q₋ₙ} f_n = c_n + A(λ) − A(λ − λ̃_n)."""
    factor = model.factors[name]
    values = model.term(name, model.seen(q), rows, jax.random.key(0))
    values = jnp.sum(values.reshape((values.shape[0], -1)), axis=1)
    part = Product({block: q.blocks[block] for block in factor.blocks})
    natural, expectation = part.natural(), part.expectation()
    whole = part.log_partition(natural)

    def one(value: Array, site: PyTree) -> tuple[Array, Array, Array]:
        left = jax.tree.map(jnp.subtract, natural, {block: site[block] for block in part.blocks})
        change, inner = part.log_partition(left) - whole, part.inner(site, expectation)
        return value - inner - change, change + inner, part.inside(left)

    return jax.vmap(one)(values, site)
