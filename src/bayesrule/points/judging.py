"""The points at which a bound is judged: finer than those of the fit, or drawn afresh.

A fit makes the bound at its own points large, so that at these points the bound is biased upwards, and a few random
points say nothing about their own error. What judges a bound is one of two kinds: a pair of grids, whose difference is
the integration error, or random points, whose averages under several independent keys have a standard error.
"""

from __future__ import annotations

from typing import NamedTuple

from .base import Points
from .quadrature import Enumeration, Quadrature
from .sampling import MonteCarlo, QuasiMonteCarlo

_LARGEST_GRID = 4096
_LARGEST_ORDER = 128  # NumPy's Gauss–Hermite weights underflow not far above it
_SOBOL_DIMENSIONS = 1024  # beyond, evenly spaced points are hardly better than independent ones, and slow to make


class Judges(NamedTuple):
    """Points for a bound, and coarser ones whose difference from them is the error; None for random points."""

    fine: Points
    coarse: Points | None


def judging_points(points: Points, dimensions: int, samples: int, largest_order: int = _LARGEST_ORDER) -> Judges:
    """Choose the points that judge a bound over a Gaussian.

    Args:
        points: The points of the fit.
        dimensions: The number of standard normal numbers that make one point.
        samples: How many random points to take under one key; even.
        largest_order: How many nodes a grid may have in one dimension, by the memory that they need.

    A grid has four times the nodes of the fit's, as far as its size allows: where nodes miss a bend of the loss, twice
    as many may miss it as well. Where there are one or two dimensions a grid judges random points too: it is far more
    accurate there, and averages over a few shifted points of one dimension are too skewed for a standard error.
    """
    if points.delta or points.exact or isinstance(points, Enumeration):
        return Judges(points, None)
    own = points.order if isinstance(points, Quadrature) else 32 if dimensions <= 2 else None
    if own is not None:
        order = min(max(4 * own, 32 if dimensions <= 2 else 8), largest_order)
        # A grid in several dimensions is refined as far as its size allows; at least a third more nodes say something.
        while dimensions > 1 and order**dimensions > _LARGEST_GRID and order > 4:
            order -= 1
        given = isinstance(points, Quadrature) and own < order
        coarse = own if given else order // 2
        if order**dimensions <= _LARGEST_GRID and order >= (4 * coarse) // 3 and order >= 8:
            bend = points.bend if isinstance(points, Quadrature) and dimensions == 1 else None
            return Judges(Quadrature(order, bend=bend), Quadrature(coarse, bend=bend))
    return Judges(random_points(dimensions, samples), None)


def random_points(dimensions: int, samples: int) -> Points:
    """Randomized quasi-Monte Carlo points, or mirrored draws where the dimensions are too many for them."""
    if dimensions <= _SOBOL_DIMENSIONS:
        return QuasiMonteCarlo(samples, randomized=True)
    return MonteCarlo(samples, antithetic=True)
