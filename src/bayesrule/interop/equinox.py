"""Modules of equinox, with or without an `eqx.nn.State`, for `Objective`, `fit` and `predict`.

They are called with one example, in their own training loops under `jax.vmap` as here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax

from ..numerics.frozen import Mask, freeze, path_of
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .network import Names, Network, as_arguments, split_network

__all__ = ["from_equinox"]

_STATE = "State"
"""Where the arrays of an `eqx.nn.State` are, beside those of the module."""


def from_equinox(
    model: eqx.Module,
    state: eqx.nn.State | None = None,
    *,
    random: bool = False,
    axis_name: str = "batch",
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    mask: Mask = None,
) -> Network:
    """A module of equinox, with its arrays of floating-point numbers as what is learned.

    It is trained as it is, and predicts in the mode of `eqx.nn.inference_mode`. Numbers that are no arrays stay as they
    are (`eqx.is_inexact_array`). Weights are tied by `eqx.nn.Shared`; a layer that merely occurs twice is two layers,
    as everywhere in equinox.

    Args:
        model: the module, called as `model(x)`, or `model(x, state)` where there is a state.
        state: the state, from `eqx.nn.make_with_state`.
        random: whether the module takes a key in training, `model(x, key=key)`, as one with dropout does. It comes from
            the fit's key, one for each example.
        axis_name: the name of the batch's axis that the module's `BatchNorm` layers were made with.
        train, evaluate: further arguments of the module's call in training and for predictions, if it has any.
        mask: which parameters are frozen, as for `blr.freeze`: a function of a path such as "layers/0/weight" and the
            array, or a pytree of booleans like the module.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> network = from_equinox(eqx.nn.Linear(2, 1, key=jax.random.key(0)))
    >>> objective = network.objective(lambda f, y: 0.5 * jnp.sum((y - f) ** 2), size=3, regularizer=1.0)
    >>> x, y = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), jnp.array([1.0, 2.0, 3.0])
    >>> result = blr.fit(blr.newton(), objective, network.params, (x, y), steps=50, tolerance=1e-6)
    >>> model = network.fitted(result).rebuild()
    >>> [round(float(f), 2) for f in jax.vmap(model)(x)[:, 0]]
    [1.25, 1.75, 2.25]
    """
    _warn_of_repeated_layers(model)
    in_training, in_evaluation = dict(train or {}), dict(evaluate or {})
    names, inference_names = Names(model), Names(eqx.nn.inference_mode(model))
    state_names = None if state is None else Names(state)
    variables = names.to_dict(model)
    if state_names is not None:
        if _STATE in variables:
            raise ValueError(
                f"The state's arrays are named {_STATE!r}, as is a field of this module: rename the field."
            )
        variables[_STATE] = state_names.to_dict(state)
    learned = jax.tree_util.tree_leaves_with_path(freeze(model, mask)[0])
    is_parameter = {path_of(path) for path, leaf in learned if eqx.is_inexact_array(leaf)}

    def model_of(variables: PyTree) -> Any:
        return names.to_tree(variables)

    def state_of(variables: PyTree) -> tuple[Any, ...]:
        return () if state_names is None else (state_names.to_tree(variables[_STATE]),)

    def run(variables: PyTree, x: Any, key: Key | None) -> tuple[Any, PyTree]:
        model = model_of(variables)

        def one(x: Any, state: tuple[Any, ...], key: Key | None) -> tuple[Any, tuple[Any, ...]]:
            keys = {} if key is None else {"key": key}
            result = model(*as_arguments(x), *state, **keys, **in_training)
            return (result[0], (result[1],)) if state else (result, ())

        rows = jax.tree.leaves(x)[0].shape[0]
        keys = None if key is None else jax.random.split(key, rows)
        axes = (0, None, None if key is None else 0)
        output, after = jax.vmap(one, axes, (0, None), axis_name=axis_name)(x, state_of(variables), keys)
        return output, variables if state_names is None else variables | {_STATE: state_names.to_dict(after[0])}

    def apply(variables: PyTree, x: Any) -> Any:
        result = inference_names.to_tree(variables)(*as_arguments(x), *state_of(variables), **in_evaluation)
        return result if state_names is None else result[0]

    def rebuild(variables: PyTree) -> Any:
        states = state_of(variables)
        return (model_of(variables), states[0]) if states else model_of(variables)

    return split_network(
        variables,
        is_parameter.__contains__,
        lambda path: path.split("/")[0] == _STATE,
        None,
        apply=apply,
        apply_in_training=lambda variables, x: model_of(variables)(*as_arguments(x), **in_training),
        train=run,
        rebuild=rebuild,
        is_random=random,
    )


def _warn_of_repeated_layers(model: eqx.Module) -> None:
    """Warn where a layer with parameters occurs in two places: somebody may have meant to tie its weights."""
    places: dict[int, list[str]] = {}

    def visit(path: Any, node: Any) -> bool:
        if isinstance(node, eqx.Module) and jax.tree.leaves(eqx.filter(node, eqx.is_inexact_array)):
            places.setdefault(id(node), []).append(path_of(path))
        return False

    jax.tree_util.tree_leaves_with_path(model, visit, is_leaf_takes_path=True)
    repeated = [paths for paths in places.values() if len(paths) > 1]
    if repeated:
        places_of_one = " and ".join(repeated[0])
        warnings.warn(
            f"The layer at {places_of_one} is the same object, and equinox learns it as {len(repeated[0])} layers that "
            "begin alike. Tie their weights with eqx.nn.Shared, if that is meant; copies of the layer "
            "(jax.tree.map(lambda x: x, layer)) say that it is not.",
            stacklevel=3,
        )
