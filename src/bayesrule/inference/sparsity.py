r"""Which entries of a Hessian are zero wherever one looks, and how few products tell all the others.

In a hierarchy the Hessian is an arrow: every group's number meets the few that all groups share, and itself. Columns
that have no row in common can be computed in one product, since each row of the sum belongs to one of them (Curtis,
Powell and Reid, 1974); and the rows of columns that meet nearly all others are known from those columns themselves,
because a Hessian is symmetric (Coleman and Moré, 1984). So a few columns are computed one by one and all others in
groups: a hierarchy with 500 groups and five shared numbers takes six products in place of 505.

Which entries are zero is read from Hessians at several points, where structural zeros are exact. An entry may be zero
there and not elsewhere (behind a `where`, say), so that every evaluation takes one more product, with random numbers,
which the recovered matrix must reproduce.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

_DEGREES = (4, 8, 16, 32, 64, 128)
"""From how many entries on a column may count as one that meets nearly all others: the best of these is taken."""

_WORTH = 0.6  # A coloring is used if it takes at most so large a part of the products.
_ROUND = 8  # Numbers of products are multiples of this, so that other data, with other zeros, find their program.


@dataclasses.dataclass(frozen=True, eq=False)
class Coloring:
    """The products that determine a sparse Hessian, and where each of its entries is found in them.

    Args:
        seeds: the vectors that the Hessian is multiplied with, the last of which is for checking.
        rows: the row of each entry that is not zero.
        columns: its column.
        product: the product in which it is found.
        place: where it is in this product.
    """

    seeds: Float[np.ndarray, "C P"]
    rows: Int[np.ndarray, " E"]
    columns: Int[np.ndarray, " E"]
    product: Int[np.ndarray, " E"]
    place: Int[np.ndarray, " E"]

    def recover(
        self, products: Float[np.ndarray, "*B C P"], tolerance: float
    ) -> tuple[Float[np.ndarray, "*B P P"], bool]:
        """The Hessians from their products, and whether they reproduce the one that was taken for checking."""
        size = products.shape[-1]
        hessians = np.zeros((*products.shape[:-2], size, size))
        hessians[..., self.rows, self.columns] = products[..., self.product, self.place]
        hessians = 0.5 * (hessians + np.swapaxes(hessians, -1, -2))
        errors = np.abs(hessians @ self.seeds[-1] - products[..., -1, :])
        scale = np.sum(np.abs(hessians), axis=-1)
        scale = scale + 1e-3 * np.max(scale, axis=-1, keepdims=True, initial=0.0)
        return hessians, bool(np.all(errors <= tolerance * scale + 1e-300))


def color(pattern: Bool[np.ndarray, "P P"]) -> Coloring | None:
    """The fewest products that a simple search finds for Hessians with these entries; None where they save little.

    Args:
        pattern: which entries may be other than zero, a symmetric matrix.

    >>> arrow = np.eye(50, dtype=bool)
    >>> arrow[:2] = arrow[:, :2] = True  # 48 groups, and two numbers that all of them share
    >>> found = color(arrow)
    >>> found.seeds.shape  # two columns, all others at once, and one for checking: rounded up to eight
    (8, 50)
    >>> hessian = np.where(arrow, np.arange(2500.0).reshape(50, 50), 0.0)
    >>> hessian += hessian.T
    >>> recovered, checked = found.recover(found.seeds @ hessian, 1e-12)
    >>> bool(np.all(recovered == hessian)), checked
    (True, True)
    """
    size = len(pattern)
    pattern = pattern | pattern.T | np.eye(size, dtype=bool)
    degrees = np.sum(pattern, axis=1)
    choices = [(_groups(pattern, degrees > degree), degrees > degree) for degree in _DEGREES]
    best, alone = min(choices, key=lambda choice: int(np.max(choice[0])))
    if np.max(best) + 2 > _WORTH * size:
        return None
    count = -(-(int(np.max(best)) + 2) // _ROUND) * _ROUND
    seeds = np.zeros((count, size))
    seeds[best, np.arange(size)] = 1.0
    # Numbers of different sizes: with signs alone, an entry between two columns of a group would pass half of the time.
    seeds[-1] = np.random.default_rng(0).uniform(0.5, 1.5, size)
    rows, columns = np.nonzero(pattern)
    direct = alone[columns] | ~alone[rows]  # Else the entry's row is polluted, and its mirror image is not.
    product, place = np.where(direct, best[columns], best[rows]), np.where(direct, rows, columns)
    return Coloring(seeds, rows, columns, product, place)


def _groups(pattern: np.ndarray, alone: np.ndarray) -> np.ndarray:
    """A number for every column: its own for those that stand alone, and one for each group of the others."""
    colors = np.empty(len(pattern), int)
    colors[alone] = np.arange(np.sum(alone))
    others = np.flatnonzero(~alone)
    part = pattern[np.ix_(others, others)].astype(np.float32)
    conflicts = part.T @ part > 0
    chosen = np.full(len(others), -1)
    # The columns with most conflicts first: each gets the first group in which it has none.
    for column in np.argsort(-np.sum(conflicts, axis=0), kind="stable"):
        taken = chosen[conflicts[column]]
        free = np.ones(len(others) + 1, bool)
        free[taken[taken >= 0]] = False
        chosen[column] = int(np.argmax(free))
    colors[others] = np.sum(alone) + chosen
    return colors
