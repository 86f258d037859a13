"""Modules of flax, of linen and of nnx, for `Objective`, `fit` and `predict`.

Both are called with a batch, in their own training loops as here; an example by itself is a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from ..numerics.frozen import Mask
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .network import Names, Network, add_batch_axis, as_arguments, first_of_batch, split_network

try:
    from flax import core, linen, nnx
except ImportError as error:
    raise ImportError("bayesrule.interop.flax is for modules of flax: pip install 'bayesrule[flax]'.") from error

__all__ = ["from_linen", "from_nnx"]


def from_linen(
    module: linen.Module,
    variables: Mapping[str, Any],
    *,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    rngs: Iterable[str] = (),
    mutable: Iterable[str] | None = None,
    mask: Mask = None,
) -> Network:
    """A module of flax.linen and its variables, with the collection "params" as what is learned.

    The paths are those of the variables: "params/Dense_0/kernel".

    Args:
        module: the module.
        variables: what `module.init` returned.
        train: arguments of the module's call in training, such as `{"train": True}`.
        evaluate: its arguments for predictions, such as `{"train": False}`.
        rngs: the names of the random numbers that training draws, such as `["dropout"]`; they come from the fit's key.
        mutable: the collections that training changes; by default all but "params".
        mask: which parameters are frozen, as for `blr.freeze`.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> module = linen.Dense(1)
    >>> network = from_linen(module, module.init(jax.random.key(0), jnp.ones((1, 2))))
    >>> objective = network.objective(lambda f, y: 0.5 * jnp.sum((y - f) ** 2), size=3, regularizer=1.0)
    >>> x, y = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), jnp.array([1.0, 2.0, 3.0])
    >>> result = blr.fit(blr.newton(), objective, network.params, (x, y), steps=50, tolerance=1e-6)
    >>> variables = network.fitted(result).rebuild()
    >>> [round(float(f), 2) for f in module.apply(variables, x)[:, 0]]
    [1.25, 1.75, 2.25]
    """
    variables = core.unfreeze(dict(variables))
    if "params" not in variables:
        raise ValueError(
            f'The variables of a module of linen have a collection "params", and these have {sorted(variables)}: pass '
            "what module.init returned, with all of its collections."
        )
    in_training, in_evaluation, streams = dict(train or {}), dict(evaluate or {}), tuple(rngs)
    collections = tuple(name for name in variables if name != "params") if mutable is None else tuple(mutable)

    def run(variables: PyTree, x: Any, key: Key | None) -> tuple[Any, PyTree]:
        keys = None if key is None else dict(zip(streams, jax.random.split(key, len(streams)), strict=True))
        arguments: dict[str, Any] = {"rngs": keys, "mutable": list(collections), **in_training}
        output, changed = module.apply(variables, *as_arguments(x), **arguments)
        # What a module sows (intermediate values, for somebody to look at) is not a variable and not kept.
        return output, variables | {name: changed.get(name, variables[name]) for name in collections}

    def apply(variables: PyTree, x: Any) -> Any:
        return first_of_batch(module.apply(variables, *as_arguments(add_batch_axis(x)), **in_evaluation))

    return split_network(
        variables,
        lambda path: path.split("/")[0] == "params",
        lambda path: path.split("/")[0] in collections,
        mask,
        apply=apply,
        apply_in_training=lambda variables, x: first_of_batch(run(variables, add_batch_axis(x), None)[0]),
        train=run,
        rebuild=lambda variables: variables,
        is_random=bool(streams),
    )


def from_nnx(
    model: nnx.Module,
    *,
    wrt: Any = nnx.Param,
    mutable: Any = None,
    train: Mapping[str, Any] | None = None,
    evaluate: Mapping[str, Any] | None = None,
    mask: Mask = None,
) -> Network:
    """A module of flax.nnx, which is not changed, with its parameters as what is learned.

    It is trained in the mode that it is in, and predicts in that of `model.eval()`. A variable that occurs in several
    places is one parameter. All random numbers (dropout) come from the fit's key, whatever its streams were made from.

    Args:
        model: the module.
        wrt: which variables are learned, a filter of nnx as for `nnx.Optimizer`; for example `nnx.LoRAParam`.
        mutable: a filter for what training changes besides; by default every variable that is no `nnx.Param`.
        train, evaluate: arguments of the module's call in training and for predictions, if it has any.
        mask: which parameters are frozen, as for `blr.freeze`; paths are such as "layers/0/kernel".

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> network = from_nnx(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    >>> objective = network.objective(lambda f, y: 0.5 * jnp.sum((y - f) ** 2), size=3, regularizer=1.0)
    >>> x, y = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), jnp.array([1.0, 2.0, 3.0])
    >>> result = blr.fit(blr.newton(), objective, network.params, (x, y), steps=50, tolerance=1e-6)
    >>> model = network.fitted(result).rebuild()
    >>> [round(float(f), 2) for f in model(x)[:, 0]]
    [1.25, 1.75, 2.25]
    """
    in_training, in_evaluation = dict(train or {}), dict(evaluate or {})
    graph, random, state = nnx.split(model, nnx.RngState, ...)
    in_eval = nnx.clone(model)
    in_eval.eval()
    eval_graph = nnx.split(in_eval, nnx.RngState, ...)[0]
    streams = sorted({variable.tag for _, variable in nnx.to_flat_state(random) if isinstance(variable, nnx.RngKey)})
    names = Names(state, wrapper="value")
    mutable = (lambda path, leaf: not isinstance(leaf, nnx.Param)) if mutable is None else mutable

    def merge(graph: Any, variables: PyTree) -> Any:
        # New variables, as a module changes its own.
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf, random), names.to_tree(variables))

    def run(variables: PyTree, x: Any, key: Key | None) -> tuple[Any, PyTree]:
        model = merge(graph, variables)
        if key is not None:
            keys = dict(zip(streams, jax.random.split(key, len(streams)), strict=True))
            nnx.reseed(model, policy="match_shape", **keys)
        output = model(*as_arguments(x), **in_training)
        return output, names.to_dict(nnx.split(model, nnx.RngState, ...)[2])

    def apply(variables: PyTree, x: Any) -> Any:
        return first_of_batch(merge(eval_graph, variables)(*as_arguments(add_batch_axis(x)), **in_evaluation))

    return split_network(
        names.to_dict(state),
        _chosen(state, wrt),
        _chosen(state, mutable),
        mask,
        apply=apply,
        apply_in_training=lambda variables, x: first_of_batch(run(variables, add_batch_axis(x), None)[0]),
        train=run,
        rebuild=lambda variables: merge(graph, variables),
        is_random=bool(streams),
    )


def _chosen(state: Any, chosen: Any) -> Callable[[str], bool]:
    """Whether a filter of nnx chooses the variable at a path; arrays that are no variables do not change."""
    matches = nnx.filterlib.to_predicate(chosen)
    flat = nnx.to_flat_state(state)
    paths = ["/".join(map(str, path)) for path, leaf in flat if isinstance(leaf, nnx.Variable) and matches(path, leaf)]
    return lambda path: any(path == prefix or path.startswith(f"{prefix}/") for prefix in paths)
