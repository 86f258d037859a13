"""The type of a pytree, in annotations.

jaxtyping's own is unknown to type checkers, so that in their strict mode everything that takes or returns a pytree
would be partially unknown to users.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    PyTree: TypeAlias = Any
    """Any tree of dicts, lists, tuples and registered classes, with arrays as its leaves."""
else:
    from jaxtyping import PyTree

__all__ = ["PyTree"]
