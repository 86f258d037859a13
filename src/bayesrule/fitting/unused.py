"""Parameters that a loss does not depend on, or only behind `stop_gradient`: found in the trace of its gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ..numerics.frozen import path_of
from ..numerics.pytree import PyTree
from ..objectives.base import AbstractObjective


def unused_parameters(objective: AbstractObjective, params: PyTree, data: PyTree) -> list[str]:
    """The paths of the leaves whose gradient is zero whatever parameters and data are.

    Differentiation knows such a zero before anything is computed, and the traced gradient has a constant in its place.
    Nothing is compiled or evaluated.

    Args:
        objective: the loss on data.
        params: the parameters, for their shapes.
        data: all data, of which the first row is used, for its shapes.
    """
    row = objective.select_rows(data, jnp.zeros(1, int), jnp.ones(1, bool))

    def loss(params: PyTree, row: PyTree) -> Any:
        return objective.data(params, row, objective.aux, jax.random.key(0) if objective.random else None)[0]

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, row).jaxpr
    makers = {id(variable): equation for equation in jaxpr.eqns for variable in equation.outvars}
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return [path for path, out in zip(paths, jaxpr.outvars, strict=True) if _is_zero(out, makers)]


def _is_zero(variable: Any, makers: dict[int, Any]) -> bool:
    """Whether a variable is the constant 0, or made of it by giving it a shape or a type."""
    if isinstance(variable, Literal):
        return not jnp.any(jnp.asarray(variable.val))
    equation = makers.get(id(variable))
    shapes = ("broadcast_in_dim", "convert_element_type", "reshape")
    return equation is not None and equation.primitive.name in shapes and _is_zero(equation.invars[0], makers)
