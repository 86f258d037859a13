"""The centring of hierarchies: which sites have one, the model with some of them decentred, and which is better."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam

from .posterior import NumpyroPosterior
from .sites import Model, latent_sites, run

LOCATION_SCALE = ("Normal", "StudentT", "Laplace", "Logistic", "Cauchy")
WRAPPERS = ("Independent", "ExpandedDistribution", "MaskedDistribution")


def centrable_sites(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[str]:
    """The latent location-scale sites whose location or scale depends on other latent sites."""
    args, kwargs = tuple(args), dict(kwargs or {})
    runs = [run(model, args, kwargs, key) for key in (1, 2)]
    found = []
    for name in latent_sites(runs[0]):
        bases = [_base(sites[name]["fn"]) for sites in runs]
        if not all(type(base).__name__ in LOCATION_SCALE for base in bases):
            continue
        depends = any(
            not np.array_equal(np.asarray(getattr(bases[0], part)), np.asarray(getattr(bases[1], part)))
            for part in ("loc", "scale")
        )
        if depends:
            found.append(name)
    return found


def _base(distribution: Any) -> Any:
    while type(distribution).__name__ in WRAPPERS:
        distribution = distribution.base_dist
    return distribution


def centrings(sites: Sequence[str]) -> list[frozenset[str]]:
    """The sets of sites to try decentred: none, all, and single ones; six at most."""
    singles = [frozenset({site}) for site in sites] if len(sites) > 1 else []
    return list(dict.fromkeys([frozenset(), frozenset(sites), *singles]))[:6]


@functools.lru_cache(maxsize=128)  # The same model for the same sites, so that a second fit compiles nothing.
def decentred(model: Model, sites: frozenset[str]) -> Model:
    """The model with these sites decentred."""
    return handlers.reparam(model, config={site: LocScaleReparam(centered=0.0) for site in sites}) if sites else model


def is_better(one: NumpyroPosterior, other: NumpyroPosterior) -> bool:
    """Whether the first has the larger bound, both being those of a Gaussian; a trusted one comes first."""
    if (one.trust == "trust") != (other.trust == "trust"):
        return one.trust == "trust"
    return one.gaussian_bound > other.gaussian_bound
