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
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from ..families.product import Product
from ..numerics.linalg import root_rows
from ..numerics.pytree import PyTree
from .block_view import BlockView
from .data import Rows, observed_data, zero_where_missing
from .linear_factor import LinearFactor
from .model import Model
from .sites import message


class LeaveOneOut(eqx.Module):
    r"""Each row's predictive density under the posterior of the others, its cavity $q_{−n} ∝ q / e^{⟨\tildeλ_n, T⟩}$.

    For a conjugate model it is exact, given the factor's other blocks (a noise precision), which are held fixed. For
    others the remaining messages too are held fixed, though a refit would change them; the error grows with the row's
    influence.

    Attributes:
        log_density: $\log E_{q_{−n}} p(y_n \mid θ)$; 0 for a missing row, NaN where the cavity is improper.
        influence: $KL(q ‖ q_{−n})$, how far the row moved q, in nats; 0 and NaN likewise.
        proper: whether the cavity is a distribution.
    """

    log_density: Float[Array, " N"]
    influence: Float[Array, " N"]
    proper: Bool[Array, " N"]

    @property
    def total(self) -> Array:
        """Σ_n log p(y_n | y_{−n}), the expected log predictive density; NaN if any cavity is improper."""
        return jnp.sum(self.log_density)

    def __repr__(self) -> str:
        improper = int(jnp.sum(~self.proper))
        note = f", {improper} with an improper cavity" if improper else ""
        return f"LeaveOneOut({self.log_density.size} rows, total {float(self.total):.6g}{note})"


def leave_one_out(model: Model, q: Product, data: PyTree, factor: str | None = None) -> LeaveOneOut:
    """Compute each row's predictive density under the posterior without that row.

    It is exact if the row's factor is conjugate and q is the exact posterior.

    Args:
        model: a model without local blocks.
        q: its posterior, as `fit` returns it.
        data: the data of the fit.
        factor: the factor whose rows are left out; it may be omitted if only one has rows.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> w, data = blr.Gaussian(jnp.zeros(1), jnp.eye(1)), {"x": jnp.ones((3, 1)), "y": jnp.array([0.0, 0.1, 4.0])}
    >>> model = blr.Model({"w": w}, {"prior": blr.factors.prior("w", w), "y": blr.factors.linear("y", {"w": "x"})})
    >>> result = blr.fit(blr.conjugate(), model, None, data, steps=1)
    >>> leave_one_out(model, result.q, data).log_density.tolist()             # the last is log N(4 | 0.1/3, 1 + 1/3)
    [-1.7632, -1.6332, -6.9632]
    """
    with_rows = [name for name, one in model.factors.items() if one.data]
    if model.local:
        raise ValueError(
            "Rows with local blocks cannot be left out by removing a message, because their own q would go with them: "
            "refit without them."
        )
    if q.has_mixtures:
        raise ValueError(
            "A row of a model with a Mixture block cannot be left out by removing its message, which would have to be "
            "removed from the weights too: refit without the row."
        )
    if factor is None and len(with_rows) != 1:
        raise ValueError(
            f"The rows of one factor can be left out, and the factors with rows are {with_rows}. Pass factor=…, for "
            "example result.loo('y')."
        )
    name = with_rows[0] if factor is None else factor
    if name not in with_rows:
        raise ValueError(f"Factor {name!r} has no rows to leave out: choose one of {with_rows}.")
    if model.batch_rows(data).weights is not None:
        raise ValueError(
            "Weighted rows cannot be left out one by one, since a weight stands for many: fit without weights."
        )
    if not model.rows(data):
        nothing = jnp.zeros(0)
        return LeaveOneOut(nothing, nothing, nothing.astype(bool))
    result, errors = _leave_one_out(model, q, data, name)
    coarse = int(jnp.sum(errors > _LARGEST_ERROR))
    if coarse:
        warnings.warn(
            f"The log densities of {coarse} of {errors.size} rows are known to about {float(jnp.nanmax(errors)):.1g} "
            "nats only: without the row its outputs vary so widely that the grid over them is too coarse. Refit "
            "without the row to score it.",
            stacklevel=3,
        )
    improper = int(jnp.sum(~result.proper))
    if improper:
        warnings.warn(
            f"Without its own message q is not a distribution for {improper} of {result.proper.size} rows: their log "
            "densities are NaN. Each of these rows alone makes q proper in some direction; refit without the row to "
            "score it.",
            stacklevel=3,
        )
    return result


_LARGEST_ERROR = 0.01  # The integration error of a log density, in nats, beyond which it is mentioned.


@eqx.filter_jit
def _leave_one_out(model: Model, q: Product, data: PyTree, name: str) -> tuple[LeaveOneOut, Array]:
    """The densities, and the integration error of each."""
    factor, rows = model.factors[name], model.batch_rows(data)
    # The key is fixed, so that the result is a function of q and the data; factors without random points ignore it.
    row_messages, views = message(model, name, q, rows, jax.random.key(0)), model.views(q)
    arrays, observed = observed_data(factor, rows)
    if isinstance(factor, LinearFactor):
        log_density, influence, proper, errors = _leave_out_in_output_space(
            factor, row_messages["outputs"], views, arrays, observed
        )
    else:
        log_density, influence, proper = _leave_out_in_natural_parameters(model, name, q, rows, row_messages)
        errors = jnp.zeros_like(log_density)
    if observed is not None:
        present = jnp.any(observed.reshape((observed.shape[0], -1)), axis=-1)
        log_density, influence = jnp.where(present, log_density, 0.0), jnp.where(present, influence, 0.0)
        errors, proper = jnp.where(present, errors, 0.0), proper | ~present
    log_density, influence = (jnp.where(proper, x, jnp.nan) for x in (log_density, influence))
    return LeaveOneOut(log_density, influence, proper), jnp.where(proper, errors, 0.0)


def _leave_out_in_output_space(
    factor: LinearFactor,
    row_messages: tuple[Array, Array],
    views: Mapping[str, BlockView],
    data: Mapping[str, Array],
    observed: Array | None,
) -> tuple[Array, Array, Array, Array]:
    r"""Log densities, influences, properness and integration errors, computed for the output f_n alone.

    q and its cavity differ by a function of f_n, so that their KL divergence is that of f_n's two distributions. The
    output's covariance $V = RR^⊤$ has no inverse where there are more outputs than states behind them. So both are
    written in the ε of $f = m + Rε$, in which q is N(0, I) and the row's message $ν^⊤f − ½f^⊤κf$ leaves a cavity with
    the precision $B = I − R^⊤κR$ and the mean $e = −B^{−1}R^⊤(ν − κm)$.
    """
    output_mean, output_covariance = factor.outputs(views, data)
    mean, covariance = output_mean, output_covariance
    linear, curvature = row_messages
    if mean.ndim == 1:
        mean, covariance = mean[:, None], covariance[:, None, None]
        linear, curvature = linear[:, None], curvature[:, None, None]
    elif covariance.ndim == mean.ndim:
        diagonal = lambda x: x[..., None] * jnp.eye(x.shape[-1], dtype=x.dtype)
        covariance, curvature = diagonal(covariance), diagonal(curvature)
    rows_of_root = root_rows(covariance)  # Rᵀ
    product = jnp.einsum("nak,nkl,nbl->nab", rows_of_root, curvature, rows_of_root)  # RᵀκR
    eye = jnp.eye(product.shape[-1], dtype=product.dtype)
    factored = jnp.linalg.cholesky(eye - product)
    pivots = jnp.diagonal(factored, axis1=1, axis2=2) ** 2
    # A cavity precision that is no larger than the rounding error of the difference counts as improper.
    proper = jnp.all(pivots > 1e3 * pivots.shape[-1] * jnp.finfo(pivots.dtype).eps, axis=1)
    factored = jnp.asarray(jnp.where(proper[:, None, None], factored, eye))
    slope = linear - jnp.einsum("nkl,nl->nk", curvature, mean)
    whitened = solve_triangular(factored, -jnp.einsum("nak,nk->na", rows_of_root, slope)[..., None], lower=True)
    square = jnp.sum(whitened**2, axis=(1, 2))  # eᵀBe
    half_log_det = jnp.sum(jnp.log(jnp.diagonal(factored, axis1=1, axis2=2)), axis=1)  # ½ log|B|
    trace = jnp.trace(product, axis1=1, axis2=2)  # tr κV
    influence = 0.5 * (square - trace) - half_log_det
    if factor.conjugate:
        # The row's term is ⟨λ̃, T⟩ + c exactly, so that log E_{q₋ₙ} p = c + A(λ) − A(λ − λ̃).
        value = factor.expected_log_likelihood(output_mean, output_covariance, views, data, None)
        value = value if observed is None else zero_where_missing(str(factor), observed, value)
        value = jnp.sum(value.reshape((value.shape[0], -1)), axis=1)
        return value + 0.5 * (trace - square) + half_log_det, influence, proper, jnp.zeros_like(influence)
    shift = solve_triangular(factored, whitened, lower=True, trans="T")[..., 0]
    cavity_mean = mean + jnp.einsum("nak,na->nk", rows_of_root, shift)
    half = solve_triangular(factored, rows_of_root, lower=True)
    cavity_covariance = jnp.einsum("nak,nal->nkl", half, half)
    if output_mean.ndim == 1:
        cavity_mean, cavity_covariance = cavity_mean[:, 0], cavity_covariance[:, 0, 0]
    log_density, errors = factor.log_predictive(cavity_mean, cavity_covariance, views, data, observed)
    return log_density, influence, proper, errors


def _leave_out_in_natural_parameters(
    model: Model, name: str, q: Product, rows: Rows, row_messages: PyTree
) -> tuple[Array, Array, Array]:
    """Log densities, influences and properness, from E log f_n = ⟨λ̃_n, μ⟩ + c_n.

    log E_{q₋ₙ} f_n = c_n + A(λ) − A(λ − λ̃_n).
    """
    factor = model.factors[name]
    values = model.term(name, model.views(q), rows, jax.random.key(0))
    values = jnp.sum(values.reshape((values.shape[0], -1)), axis=1)
    factor_blocks = Product({block: q.blocks[block] for block in factor.blocks})
    natural, expectation = factor_blocks.natural(), factor_blocks.expectation()
    log_partition = factor_blocks.log_partition(natural)

    def leave_out(value: Array, row_message: PyTree) -> tuple[Array, Array, Array]:
        cavity = jax.tree.map(jnp.subtract, natural, {block: row_message[block] for block in factor_blocks.blocks})
        change = factor_blocks.log_partition(cavity) - log_partition
        inner = factor_blocks.inner(row_message, expectation)
        return value - inner - change, change + inner, factor_blocks.inside(cavity)

    return jax.vmap(leave_out)(values, row_messages)
