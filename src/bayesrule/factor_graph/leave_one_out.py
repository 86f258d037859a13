r"""Leave-one-out predictive densities, by removing a row's message from q instead of refitting.

λ is a sum of messages, one for each row (`eq:blr_local`). Without row n it is λ − λ̃_n, the cavity $q_{−n}$, at the
cost of a subtraction. For a conjugate model that is the posterior without the row. For others the remaining messages
would change a little in a refit, which is neglected.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from ..families.product import Product
from .block_view import BlockView
from .data import Rows, observed_data
from .linear_factor import LinearFactor
from .model import Model
from .sites import message


class LeaveOneOut(eqx.Module):
    r"""Each row's predictive density under the others, with $q_{−n} ∝ q / e^{⟨\tildeλ_n, T⟩}$ its cavity.

    Exact for a conjugate model, the factor's other blocks (a noise precision) held fixed. For others the remaining
    messages are held fixed, though a refit would change them: the error is about 0.01 nats for rows with an influence
    below 0.1, and larger for the few with more.

    Args:
        log_density: $\log E_{q_{−n}} p(y_n \mid θ)$; 0 for a missing row, NaN where the cavity is improper.
        influence: $KL(q ‖ q_{−n})$, how far the row moved q, in nats; 0 and NaN likewise.
        proper: whether the cavity is a distribution.
    """

    log_density: Float[Array, " N"]
    influence: Float[Array, " N"]
    proper: Bool[Array, " N"]

    @property
    def total(self) -> Array:
        """Σ_n log p(y_n | y_{−n}), the expected log predictive density."""
        return jnp.sum(self.log_density)

    def __repr__(self) -> str:
        improper = int(jnp.sum(~self.proper))
        note = f", {improper} with an improper cavity" if improper else ""
        return f"LeaveOneOut({self.log_density.size} rows, total {float(self.total):.6g}{note})"


def leave_one_out(model: Model, q: Product, data: PyTree, factor: str | None = None) -> LeaveOneOut:
    """The predictive density of every row without it: exact where its factor is conjugate and q the exact posterior.

    Args:
        model: a model without local blocks.
        q: its posterior, as `fit` returns it.
        data: the data of the fit.
        factor: the factor whose rows are left out; it may be omitted if only one has rows.
    """
    with_rows = [name for name, one in model.factors.items() if one.data]
    if model.local:
        raise ValueError(
            "Rows with local blocks cannot be left out by removing a message, because their own q would go with them: "
            "refit without them."
        )
    if factor is None and len(with_rows) != 1:
        raise ValueError(f"Say which factor's rows to leave out, loo(factor=…): the model has {with_rows}.")
    name = with_rows[0] if factor is None else factor
    if name not in with_rows:
        raise ValueError(f"Factor {name!r} has no rows to leave out; {with_rows} have.")
    if model.batch_rows(data).weights is not None:
        raise ValueError(
            "Weighted rows cannot be left out one by one, since a weight stands for many: fit without weights."
        )
    result = _leave_one_out(model, q, data, name)
    improper = int(jnp.sum(~result.proper))
    if improper:
        warnings.warn(
            f"Without its own message q is not a distribution for {improper} of {result.proper.size} rows: their log "
            "densities are NaN. The posterior is proper because of such a row alone; refit without it.",
            stacklevel=3,
        )
    return result


@eqx.filter_jit
def _leave_one_out(model: Model, q: Product, data: PyTree, name: str) -> LeaveOneOut:
    factor, rows = model.factors[name], model.batch_rows(data)
    site, views = message(model, name, q, rows, jax.random.key(0)), model.views(q)
    arrays, observed = observed_data(factor, rows)
    if isinstance(factor, LinearFactor):
        log_density, influence, proper = _by_outputs(factor, site["outputs"], views, arrays)
    else:
        log_density, influence, proper = _by_natural(model, name, q, rows, site)
    if observed is not None:
        present = jnp.any(observed.reshape((observed.shape[0], -1)), axis=-1)
        log_density, influence = jnp.where(present, log_density, 0.0), jnp.where(present, influence, 0.0)
        proper = proper | ~present
    return LeaveOneOut(jnp.where(proper, log_density, jnp.nan), jnp.where(proper, influence, jnp.nan), proper)


def _by_outputs(
    factor: LinearFactor, site: tuple[Array, Array], views: Mapping[str, BlockView], data: Mapping[str, Array]
) -> tuple[Array, Array, Array]:
    """In the space of the output f_n, since q and its cavity differ by a function of f_n alone."""
    mean, covariance = factor.outputs(views, data)
    linear, curvature = site  # the row's message is ν f − ½ f κ f
    if mean.ndim == 1:
        mean, covariance = mean[:, None], covariance[:, None, None]
        linear, curvature = linear[:, None], curvature[:, None, None]
    elif covariance.ndim == mean.ndim:
        diagonal = lambda x: x[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)
        covariance, curvature = diagonal(covariance), diagonal(curvature)
    precision = jnp.linalg.inv(covariance)
    cavity_precision = precision - curvature
    pivots = jnp.diagonal(jnp.linalg.cholesky(cavity_precision), axis1=1, axis2=2) ** 2
    # A cavity precision that is no larger than the rounding error of the difference counts as improper.
    rounding = 1e3 * pivots.shape[-1] * jnp.finfo(pivots.dtype).eps
    proper = jnp.all(pivots > rounding * jnp.diagonal(precision, axis1=1, axis2=2), axis=1)
    safe_precision = jnp.where(proper[:, None, None], cavity_precision, precision)
    cavity_covariance = jnp.linalg.inv(safe_precision)
    natural = jnp.einsum("nkl,nl->nk", precision, mean) - linear
    cavity_mean = jnp.einsum("nkl,nl->nk", cavity_covariance, natural)
    size, gap = mean.shape[-1], cavity_mean - mean
    log_det = lambda x: jnp.linalg.slogdet(x)[1]
    trace = jnp.einsum("nkl,nlk->n", safe_precision, covariance)
    square = jnp.einsum("nk,nkl,nl->n", gap, safe_precision, gap)
    influence = 0.5 * (trace - size - log_det(safe_precision) + log_det(precision) + square)
    if factor.conjugate:
        # The row's term is ⟨λ̃, T⟩ + c exactly, so that log E_{q₋ₙ} p = c + A(λ) − A(λ − λ̃).
        flat = (lambda m, v: (m[:, 0], v[:, 0, 0])) if size == 1 else (lambda m, v: (m, v))
        value = factor.expected_log_likelihood(*flat(mean, covariance), views, data, None)
        value = jnp.sum(value.reshape((value.shape[0], -1)), axis=1)
        second_moment = covariance + mean[:, :, None] * mean[:, None, :]
        constant = value - jnp.einsum("nk,nk->n", linear, mean)
        constant = constant + 0.5 * jnp.einsum("nkl,nkl->n", curvature, second_moment)
        log_partition = lambda p, m: 0.5 * jnp.einsum("nk,nkl,nl->n", m, p, m) - 0.5 * log_det(p)
        log_density = constant + log_partition(precision, mean) - log_partition(safe_precision, cavity_mean)
        return log_density, influence, proper
    if size == 1:
        return factor.log_predictive(cavity_mean[:, 0], cavity_covariance[:, 0, 0], views, data), influence, proper
    return factor.log_predictive(cavity_mean, cavity_covariance, views, data), influence, proper


def _by_natural(model: Model, name: str, q: Product, rows: Rows, site: PyTree) -> tuple[Array, Array, Array]:
    """In λ: E log f_n = ⟨λ̃_n, μ⟩ + c_n, so log E_{q₋ₙ} f_n = c_n + A(λ) − A(λ − λ̃_n)."""
    factor = model.factors[name]
    values = model.term(name, model.views(q), rows, jax.random.key(0))
    values = jnp.sum(values.reshape((values.shape[0], -1)), axis=1)
    touched = Product({block: q.blocks[block] for block in factor.blocks})
    natural, expectation = touched.natural(), touched.expectation()
    log_partition = touched.log_partition(natural)

    def leave_out(value: Array, site: PyTree) -> tuple[Array, Array, Array]:
        cavity = jax.tree.map(jnp.subtract, natural, {block: site[block] for block in touched.blocks})
        change, inner = touched.log_partition(cavity) - log_partition, touched.inner(site, expectation)
        return value - inner - change, change + inner, touched.inside(cavity)

    return jax.vmap(leave_out)(values, site)
