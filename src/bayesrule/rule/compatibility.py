"""Which pieces go together. A wrong pairing is a ValueError that names a right one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..curvature.base import Curvature
from ..curvature.gradient import Gradient
from ..curvature.score import Reparameterized, Score
from ..curvature.stein import Stein
from ..families.base import ExponentialFamily, Family
from ..families.discrete import Bernoulli
from ..families.gaussian.base import GaussianFamily
from ..families.latent.base import ConditionalFamily
from ..families.latent.mixture import Mixture
from ..families.latent.skew_gaussian import SkewGaussian
from ..families.latent.spike_slab import SpikeSlab
from ..families.product import Product
from ..families.start import Start
from ..points.base import Delta, Exact, Points
from ..points.by_block import Each
from ..points.masks import Masks
from ..points.quadrature import Enumeration, Quadrature
from ..points.relaxed import Relaxed, Sign
from ..points.sampling import MonteCarlo
from ..steps.guards import Retraction

_MIXED = ("none", "diagonal", "full")
_FITTING = {
    "none": "Gradient()",
    "diagonal": "HessianDiagonal(), GaussNewton(), GeneralizedGaussNewton(), SquaredGradient() or Stein()",
    "full": "Hessian(), GaussNewton(), GeneralizedGaussNewton() or Stein()",
    "factored": "GaussNewton() or GeneralizedGaussNewton()",
    "kronecker": "GaussNewton() or GeneralizedGaussNewton()",
}


def check(family: Start, points: Points, curvature: Curvature, steps: Any, guard: Any, member: Any = None) -> None:
    """Raise unless these pieces make an algorithm for this kind of family (and this member of it)."""
    kind = family.kind if member is None else type(member)
    if issubclass(kind, Mixture):
        if steps.reverse or steps.lazy or steps.momentum is not None:
            raise ValueError(
                "The components of a mixture move side by side: use GradientAverage instead of natural momentum, and "
                "neither the reverse nor the lazy form."
            )
        member = None if member is None else member.component_prototype
        kind = family.part if member is None else type(member)
        _check_components(kind, points, member)
    conditional = issubclass(kind, ConditionalFamily)
    structure = family.structure if member is None else _structure(member)
    if isinstance(curvature, Reparameterized) and member is not None and not member.reparameterized:
        raise ValueError(f"The samples of this {kind.__name__} are not all differentiable in λ: use Score() instead.")
    _check_points(points, curvature)
    if curvature.remembers:
        _check_sites(points, steps)
    abstract = kind in (Family, ExponentialFamily, GaussianFamily, Mixture)
    if conditional:
        _check_conditional(kind, points, curvature, member)
    if not abstract:
        _check_family(kind, structure, points, curvature, member)
    exponential = issubclass(kind, ExponentialFamily)
    if (steps.reverse or steps.lazy or steps.momentum is not None) and not exponential:
        raise ValueError(
            f"Natural momentum, the reverse and the lazy form need an exponential family, and {kind.__name__} is not "
            "one: use GradientAverage instead of momentum, and reverse=False."
        )
    if isinstance(guard, Retraction) and not (abstract or structure in ("diagonal", "full")):
        raise ValueError(
            f"Retraction curves the step of a Gaussian's precision; {kind.__name__} has none to move that way. Use "
            "Backtracking() or NoGuard()."
        )
    if steps.reverse and not steps.rates.single:
        raise ValueError("The reverse form steps in μ, where mean and precision move as one: give a single rate.")
    if not (abstract or conditional or issubclass(kind, GaussianFamily | SpikeSlab | Product) or steps.rates.single):
        raise ValueError(f"Rates(mean, precision) are for a Gaussian's two parts; a {kind.__name__} takes one rate.")
    if isinstance(guard, Retraction) and steps.reverse:
        raise ValueError("Retraction is for steps in λ: with reverse=True use Backtracking() or NoGuard().")
    if steps.scaling is not None and not abstract and kind is not Product and structure != "diagonal":
        raise ValueError(
            f"A scaling divides entry by entry, so it goes with a diagonal precision, and {kind.__name__}'s is not "
            "one: use a DiagonalGaussian, or leave the scaling out."
        )
    _check_width(points, member)


def _check_components(kind: type[Family], points: Points, member: Any) -> None:
    if isinstance(points, Quadrature) and isinstance(member, GaussianFamily) and not points.fits(member.noise_size):
        raise ValueError(
            f"The responsibilities of a mixture are looked at over θ, even where the loss is looked at over outputs, "
            f"and a grid of order {points.order} in {member.noise_size} dimensions is too large: use MonteCarlo()."
        )
    if issubclass(kind, GaussianFamily) and hasattr(kind, "structure") and kind.structure.name not in _MIXED:
        raise ValueError(
            f"The curvature of −log r_k is not a sum of squares, which is all that a {kind.__name__} holds: mix "
            "Gaussian, DiagonalGaussian or FixedGaussian components."
        )
    if isinstance(points, Exact):
        raise ValueError(
            "The entropy of a mixture has no closed form in μ: use MonteCarlo(), Quadrature() or Delta() points."
        )


def _check_conditional(kind: type[Family], points: Points, curvature: Curvature, member: Any) -> None:
    if points.delta or points.chained:
        raise ValueError(
            f"{points!r} see nothing of what makes a {kind.__name__} differ from a Gaussian, its tails or its skew: "
            "use MonteCarlo() or Quadrature() points."
        )
    if isinstance(points, MonteCarlo) and points.antithetic and not kind.symmetric:
        raise ValueError(f"Antithetic pairs mirror a symmetric q, and a {kind.__name__} is not: use MonteCarlo().")
    if isinstance(curvature, Stein):
        raise ValueError(f"Stein()'s identity holds for a Gaussian, not for a {kind.__name__}: use Hessian().")
    if isinstance(member, SkewGaussian):
        leaves = jax.tree.leaves(member.skew)
        if not any(isinstance(leaf, Tracer) or np.any(np.asarray(leaf)) for leaf in leaves):
            raise ValueError(
                "A SkewGaussian without skew stays without: the natural gradient of α is 0 at α = 0. Start from a skew "
                "that leans to the longer tail, or use a Gaussian."
            )


def _check_width(points: Points, member: Any) -> None:
    """A Gaussian that is sampled needs a precision above zero."""
    if not (isinstance(points, MonteCarlo) and isinstance(member, GaussianFamily) and member.elementwise):
        return
    for leaf in jax.tree.leaves(member.precision):  # pyright: ignore[reportAttributeAccessIssue]  # entry by entry
        if not isinstance(leaf, Tracer) and np.any(np.asarray(leaf) <= 0):
            raise ValueError(
                "This q would be sampled with a precision of zero, an infinite width: give a prior (regularizer=δ) or "
                "a starting precision (initial_precision=…, or curvature=…)."
            )


def _check_points(points: Points, curvature: Curvature) -> None:
    if isinstance(points, Delta) and isinstance(curvature, Stein):
        raise ValueError(
            "Delta() looks only at the mean, where S(θ − m)∇ℓᵀ is zero: Stein() would silently give a curvature of 0. "
            "Use MonteCarlo() or Quadrature() points, or Hessian() at the mean."
        )
    if isinstance(points, Exact) and not (isinstance(curvature, Gradient) or curvature.remembers):
        raise ValueError(
            f"Exact() differentiates the objective in μ and has no points for {type(curvature).__name__}: use "
            "Gradient()."
        )
    if isinstance(points, Enumeration) and not isinstance(curvature, Score):
        raise ValueError("Enumeration() sums over discrete values, where there are no derivatives: use Score().")
    if isinstance(curvature, Score) and isinstance(points, Delta):
        raise ValueError("Score() compares the loss across points, and Delta() is one point: use MonteCarlo(samples).")
    if isinstance(curvature, Reparameterized) and not isinstance(points, MonteCarlo):
        raise ValueError("Reparameterized() differentiates samples: use MonteCarlo(samples) points.")


def _check_sites(points: Points, steps: Any) -> None:
    """Every site moves as λ does, which is a sum of them: by one rate, towards its message."""
    others = (steps.momentum, steps.average, steps.scaling, steps.sweep)
    plain = isinstance(steps.temperature, float | int) and steps.temperature == 1 and steps.units == "natural"
    if not isinstance(points, Exact):
        raise ValueError("Sites() differentiate a model's factors in μ: use Exact() points, and points of the factors.")
    if steps.reverse or steps.lazy or any(x is not None for x in others) or not plain or not steps.rates.single:
        raise ValueError(
            "Sites() take plain steps of all blocks at once, since λ is to stay their sum: one rate, temperature 1, "
            "no sweep, momentum, averaging, scaling, reverse or lazy form."
        )


def _structure(member: Any) -> str | None:
    return member.structure.name if hasattr(member, "structure") else None


def _check_chained(kind: type[Family], points: Points, curvature: Curvature) -> None:
    name, wanted = kind.__name__, {Masks: SpikeSlab, Relaxed: Bernoulli, Sign: Bernoulli, Each: Product}[type(points)]
    if not issubclass(kind, wanted):
        raise ValueError(
            f"{points!r} are points of a {wanted.__name__}, and this is a {name}: use Delta() or MonteCarlo()."
        )
    if isinstance(curvature, Score | Reparameterized) or (wanted is Bernoulli and not isinstance(curvature, Gradient)):
        raise ValueError(f"{points!r} carry the gradient to μ by themselves: use Gradient().")


def _check_family(kind: type[Family], structure: str | None, points: Points, curvature: Curvature, member: Any) -> None:
    name = kind.__name__
    if points.chained:
        _check_chained(kind, points, curvature)
        if isinstance(points, Each) and member is not None:
            if set(points.blocks) != set(member.blocks):
                raise ValueError(f"Each names points for {list(points.blocks)}, the blocks are {list(member.blocks)}.")
            for block in member.blocks:
                _check_block(type(member.blocks[block]), points.blocks[block])
        if structure is None or isinstance(points, Relaxed | Sign):
            return
    needs_exponential = isinstance(points, Exact) or isinstance(curvature, Score | Reparameterized)
    if needs_exponential:
        if not issubclass(kind, ExponentialFamily):
            raise ValueError(
                f"{type(points).__name__}() with {type(curvature).__name__}() needs an exponential family, and {name} "
                f"is not one: use {_FITTING['factored']}."
            )
        if isinstance(curvature, Reparameterized) and not kind.reparameterized:
            raise ValueError(f"The samples of a {name} are not differentiable in λ: use Score() instead.")
        if isinstance(points, Enumeration) and not hasattr(kind, "support"):
            raise ValueError(f"The values of a {name} cannot be listed: use MonteCarlo() points with Score().")
        return
    if issubclass(kind, SpikeSlab) and not points.chained:
        raise ValueError(f"A {name} is looked at where some units are dropped: use Masks() points.")
    if structure is None or (issubclass(kind, Product) and not points.chained):
        raise ValueError(
            f"{type(curvature).__name__}() measures derivatives in θ, which move a Gaussian's mean and precision; for "
            f"a {name} use Exact() points with Gradient(), or MonteCarlo() with "
            f"{'Reparameterized()' if getattr(kind, 'reparameterized', False) else 'Score()'}."
        )
    if structure not in curvature.serves:
        raise ValueError(
            f"{type(curvature).__name__}() does not fill the precision of a {name}: use {_FITTING[structure]}."
        )


def _check_block(kind: type[Family], points: Points) -> None:
    wanted = "Relaxed() or Sign()" if issubclass(kind, Bernoulli) else "Delta() or MonteCarlo()"
    fits = isinstance(points, Relaxed | Sign) if issubclass(kind, Bernoulli) else not points.chained
    if not fits or not issubclass(kind, Bernoulli | GaussianFamily):
        raise ValueError(f"A {kind.__name__} block does not go with {points!r}: use {wanted}.")
