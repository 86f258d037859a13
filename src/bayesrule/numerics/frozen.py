"""Parameters that are not learned: split from those that are, and put back before the loss is called.

q is a distribution of the learned parameters alone, with None in the places of the others: a frozen leaf is not
sampled, has no prior that would pull it, and takes no memory in the state. The objective holds the frozen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .pytree import PyTree

Mask = PyTree | Callable[[str, Any], bool] | None


class Frozen(eqx.Module):
    """Leaves that are not learned, with None in the places of the others: arrays, and whatever else (functions)."""

    arrays: PyTree
    rest: tuple[Any, ...] = eqx.field(static=True)
    structure: Any = eqx.field(static=True)
    dtypes: tuple[Any, ...] | None = eqx.field(static=True)
    """The dtypes in which the learned leaves are handed over, where those are not their own."""

    def __init__(self, tree: PyTree, dtypes: tuple[Any, ...] | None = None):
        self.dtypes = dtypes
        if isinstance(tree, Frozen):
            self.arrays, self.rest, self.structure = tree.arrays, tree.rest, tree.structure
            self.dtypes = tree.dtypes if dtypes is None else dtypes
            return
        self.arrays, rest = eqx.partition(tree, eqx.is_array_like)
        leaves, self.structure = jax.tree.flatten(rest, is_leaf=lambda leaf: leaf is None)
        self.rest = tuple(leaves)

    def joined(self, theta: PyTree) -> PyTree:
        """All parameters: the learned ones as given, the others as they are here."""
        if self.dtypes is not None:
            leaves, structure = jax.tree.flatten(theta)
            cast = [leaf.astype(dtype) for leaf, dtype in zip(leaves, self.dtypes, strict=True)]
            theta = jax.tree.unflatten(structure, cast)
        return eqx.combine(theta, self.arrays, jax.tree.unflatten(self.structure, self.rest))

    def rounding(self, like: PyTree) -> Frozen:
        """The same, where learned leaves are handed over in the dtypes of `like`."""
        return Frozen(self, tuple(leaf.dtype for leaf in jax.tree.leaves(like)))

    @staticmethod
    def nothing(like: PyTree) -> Frozen:
        """No frozen leaves beside learned ones as in `like`."""
        return Frozen(jax.tree.map(lambda _: None, like))


def as_frozen(tree: PyTree) -> Frozen | None:
    """What `Objective` takes as `frozen=`."""
    return None if tree is None else Frozen(tree)


def join(theta: PyTree, frozen: PyTree) -> PyTree:
    """All parameters, from the learned ones and the frozen ones that `freeze` has split off.

    >>> import jax.numpy as jnp
    >>> learned, frozen = freeze({"w": jnp.ones(2), "steps": jnp.array(3)})
    >>> sorted(join(learned, frozen))
    ['steps', 'w']
    """
    return theta if frozen is None else Frozen(frozen).joined(theta)


def freeze(params: PyTree, mask: Mask = None) -> tuple[PyTree, PyTree]:
    """Split parameters into those that are learned and those that are not; each tree has None where the other has not.

    Pass the first as the start of a fit and the second to the objective: `Objective(…, frozen=frozen)`, and to
    `predict(…, frozen=frozen)`. Arrays of integers and booleans, functions and strings are always frozen.

    Args:
        params: all parameters, such as a network's.
        mask: which of them are frozen: a pytree of booleans like the parameters (or a prefix of one), or a function of
            a leaf's path, such as "encoder/layers/0/w", and the leaf. By default none of the floating-point arrays.

    >>> import jax.numpy as jnp
    >>> params = {"encoder": {"w": jnp.ones(2)}, "head": {"w": jnp.zeros(2)}, "steps": jnp.array(3)}
    >>> learned, frozen = freeze(params, lambda path, leaf: path.startswith("encoder"))
    >>> learned["encoder"], frozen["head"], int(frozen["steps"])
    ({'w': None}, {'w': None}, 3)
    """
    if callable(mask) and not isinstance(mask, eqx.Module):
        chosen = jax.tree_util.tree_map_with_path(lambda path, leaf: bool(mask(path_of(path), leaf)), params)
    elif mask is None:
        chosen = jax.tree.map(lambda _: False, params)
    else:
        chosen = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: bool(flag), part), mask, params)
    learned = jax.tree.map(lambda leaf, is_frozen: _is_floating(leaf) and not is_frozen, params, chosen)
    return eqx.partition(params, learned)


def split_off_integers(params: PyTree) -> tuple[PyTree, PyTree]:
    """`freeze` for arrays of integers and booleans beside floating-point ones; the frozen tree is None if there are
    none. Where all leaves are integers they are numbers to be learned, written without a point."""
    leaves = jax.tree.leaves(params)
    is_whole = [hasattr(leaf, "dtype") and not _is_floating(leaf) for leaf in leaves]
    if not any(is_whole) or all(is_whole) or any(map(np.iscomplexobj, leaves)):
        return params, None
    return freeze(params)


def path_of(path: Any) -> str:
    """A leaf's path in a pytree as text: "layers/0/w"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_floating(leaf: Any) -> bool:
    return eqx.is_array_like(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
