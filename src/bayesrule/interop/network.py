"""A module of another library, split into what is learned, what training changes besides, and what stays as it is.

Libraries differ in how a module holds its arrays, and agree in that there are arrays with names. So every module is
read as a dict of dicts of arrays, by the names that its library gives them: "layers", "0", "kernel". Such a dict can be
saved without the library's classes, its paths are those of `freeze` and of rates for parts of the parameters, and an
array that the library shares between two places is there once, which is what tied weights are. Activations, shapes and
flags stay in functions that put the arrays back.

All trees have the structure of that dict, with None where an array is in another one: what is learned (`params`), what
is not (`frozen`), and what training changes besides (`state`: batch statistics), as it is before training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ..fitting.result import Result
from ..numerics.frozen import Mask, freeze, join, path_of
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.batched import Batched
from ..objectives.objective import Objective

__all__ = ["Network"]


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A module as `Objective`, `fit` and `predict` take it; made by `from_linen`, `from_nnx` and `from_equinox`.

    `objective` makes the objective, `params` is the start of a fit, and `fitted` has what the fit found:

        objective = network.objective(loss, size=300, regularizer=1.0)
        result = blr.fit(rule, objective, network.params, (x, y), steps=1000, batch_size=50, key=key)
        fitted = network.fitted(result)
        blr.predict(result.q, fitted.apply, x, frozen=fitted.frozen, key=key)
        module = fitted.rebuild()
    """

    params: PyTree
    """What is learned, arrays of floating-point numbers."""
    frozen: PyTree
    """What is not learned, for `predict(…, frozen=)`: integers, booleans, frozen parameters and the state."""
    state: PyTree | None
    """What training changes besides the parameters; None where there is nothing."""
    apply: Callable[[PyTree, Any], Any]
    """apply(params, x): the output of one example, evaluated as for predictions. All arrays are among the params."""
    _apply_in_training: Callable[[PyTree, Any], Any]
    """The output of one example in training, where it depends on no other example and nothing is random."""
    _train: Callable[[PyTree, Any, Key | None], tuple[Any, PyTree]]
    """The outputs of a batch in training, and all arrays after it."""
    _rebuild: Callable[[PyTree], Any]
    """The module with all these arrays."""
    _is_random: bool

    def objective(
        self,
        loss: Callable[[Any, Any], Any],
        *,
        size: int,
        regularizer: Any = None,
        prior: Any = None,
        compute: Any = None,
        train: bool = True,
    ) -> Objective | Batched:
        """The objective Σᵢ loss(output, yᵢ) + R of examples (x, y).

        A module with a state, or one that draws random numbers, has a loss of a whole batch (`Objective.from_batch`),
        and its state is in the rule's, as `result.state.aux`. Every other has a loss for each example, which recipes
        such as `vogn` and `ogn` need.

        Args:
            loss: `loss(output, y)`, a scalar, of one example.
            size: N, the number of training examples.
            regularizer, prior, compute: As for `Objective`.
            train: False evaluates the module as for predictions: with its statistics as they are and nothing dropped,
                so that examples are independent.
        """
        options: dict[str, Any] = {"size": size, "regularizer": regularizer, "prior": prior, "compute": compute}
        options["frozen"] = self.frozen
        if not train:
            return Objective(loss, output=self.apply, **options)
        if self.state is None and not self._is_random:
            return Objective(loss, output=self._apply_in_training, **options)
        run, is_random = self._train, self._is_random

        def losses(params: PyTree, batch: Any, state: PyTree, key: Key) -> tuple[Any, PyTree]:
            x, y = batch
            variables = params if state is None else eqx.combine(state, params)
            output, after = run(variables, x, key if is_random else None)
            _check_rows(output, x)
            if state is not None:
                kept = lambda old, new: None if old is None else jnp.asarray(new, old.dtype)
                state = jax.tree.map(kept, state, after, is_leaf=_is_none)
            return jax.vmap(loss)(output, y), state

        apply = self.apply

        def evaluate(params: PyTree, batch: Any, state: PyTree, key: Key) -> tuple[Any, PyTree]:
            variables = params if state is None else eqx.combine(state, params)
            return jax.vmap(lambda x, y: loss(apply(variables, x), y))(*batch), state

        return Objective.from_batch(losses, aux=self.state, evaluate=evaluate, **options)

    def fitted(self, result: Result) -> Network:
        """This network with the mean of the result's q as its parameters, and the state that the fit ended with."""
        # An objective with train=False carries no state, and leaves that of the network as it is.
        state = result.state.aux if self.state is not None and result.state.aux is not None else self.state
        frozen = self.frozen if state is None else eqx.combine(state, self.frozen)
        return dataclasses.replace(self, params=result.q.mean, state=state, frozen=frozen)

    def rebuild(self, params: PyTree = None) -> Any:
        """The module with these parameters (a draw of q, say), or with its own.

        Returns:
            What the library's own functions take: a module of nnx, the variables of linen, and of equinox the model, or
            the pair of the model and its state.
        """
        return self._rebuild(join(self.params if params is None else params, self.frozen))


def split_network(
    variables: PyTree,
    is_learned: Callable[[str], bool],
    is_state: Callable[[str], bool],
    mask: Mask,
    *,
    apply: Callable[[PyTree, Any], Any],
    apply_in_training: Callable[[PyTree, Any], Any],
    train: Callable[[PyTree, Any, Key | None], tuple[Any, PyTree]],
    rebuild: Callable[[PyTree], Any],
    is_random: bool,
) -> Network:
    """A `Network` from a dict of all arrays of a module, and the functions that use them.

    Args:
        variables: a dict of dicts of arrays.
        is_learned: whether the array at this path is a parameter, by the library's own convention.
        is_state: whether training changes it besides the parameters.
        mask: which parameters are frozen, as for `freeze`; a pytree of booleans is like `variables`.
        apply, apply_in_training, train, rebuild, is_random: see `Network`.
    """
    learned, _ = freeze(variables, mask)
    by_path = jax.tree_util.tree_map_with_path
    learned = by_path(lambda path, leaf: leaf if is_learned(path_of(path)) else None, learned)
    if not jax.tree.leaves(learned):
        raise ValueError(
            "This module has nothing to learn, and q is a distribution of what is learned: it has no parameters that "
            "are floating-point arrays, or all of them are frozen."
        )
    frozen = jax.tree.map(lambda a, b: b if a is None else None, learned, variables, is_leaf=_is_none)
    state = by_path(lambda path, leaf: leaf if is_state(path_of(path)) else None, frozen)
    state = state if jax.tree.leaves(state) else None
    return Network(learned, frozen, state, apply, apply_in_training, train, rebuild, is_random)


# Trees as dicts of dicts.


class Names:
    """A pytree's arrays as a dict of dicts by their paths, and back; all other leaves stay here.

    Args:
        tree: any pytree.
        wrapper: a last key of paths that is left out, where a library wraps every array.
    """

    def __init__(self, tree: PyTree, wrapper: str | None = None):
        self.wrapper = wrapper
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        # Of an array only the name stays, so that nothing here holds the memory of the parameters.
        self.leaves = [self._name(path) if eqx.is_array(leaf) else leaf for path, leaf in leaves]
        self.names = [self._name(path) for path, leaf in leaves if eqx.is_array(leaf)]

    def to_dict(self, tree: PyTree) -> dict[str, Any]:
        """The arrays of a tree that has arrays of these names, and perhaps others."""
        leaves = {self._name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        result: dict[str, Any] = {}
        for name in self.names:
            inner = result
            for key in name.keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[name.keys[-1]] = leaves[name]
        return result

    def to_tree(self, variables: dict[str, Any]) -> PyTree:
        """The tree with these arrays."""
        find = lambda name: reduce(lambda inner, key: inner[key], name.keys, variables)
        return jax.tree.unflatten(
            self.structure, [find(leaf) if isinstance(leaf, _Name) else leaf for leaf in self.leaves]
        )

    def _name(self, path: Any) -> _Name:
        keys = tuple(path_of((key,)) for key in path)
        return _Name(keys[:-1] if self.wrapper is not None and keys[-1] == self.wrapper else keys)


class _Name(NamedTuple):
    """The path of an array, in its place."""

    keys: tuple[str, ...]


def as_arguments(x: Any) -> tuple[Any, ...]:
    """What a module is called with: a tuple of inputs is several arguments."""
    return x if isinstance(x, tuple) else (x,)


def add_batch_axis(x: PyTree) -> PyTree:
    """One example as a batch of one."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], x)


def first_of_batch(output: PyTree) -> PyTree:
    """The output of the only example of a batch."""
    _check_rows(output, jnp.zeros(1))
    return jax.tree.map(lambda leaf: leaf[0], output)


def _check_rows(output: PyTree, x: PyTree) -> None:
    """Raise where the outputs do not have a row for each example of a batch."""
    rows = jnp.shape(jax.tree.leaves(x)[0])[:1]
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(output)]
    if any(shape[:1] != rows for shape in shapes):
        raise ValueError(
            f"A module is called with a batch, as in its own library, and returns a row for each of its {rows[0]} "
            f"examples; the shapes of its outputs are {shapes}."
        )


def _is_none(leaf: Any) -> bool:
    return leaf is None
