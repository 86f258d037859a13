"""A NumPyro posterior for ArviZ: `InferenceData` of ArviZ 0.x, or the `DataTree` of ArviZ 1 and arviz-base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ...numerics.random import Key
from .enumeration import DependentObservations

if TYPE_CHECKING:
    from .posterior import NumpyroPosterior


def to_arviz(posterior: NumpyroPosterior, key: Key, count: int) -> Any:
    """Draws, predictions, log likelihood and data of a posterior, as one chain.

    The verdict is in the attributes of the groups `posterior` and `sample_stats`; the latter has log q and log p of
    every draw. Discrete latent sites, which are summed out, are not among the draws; `log_likelihood` is left out where
    observations depend on each other for that reason.

    Args:
        posterior: the posterior.
        key: a JAX key.
        count: how many draws.
    """
    draw_key, predict_key = jax.random.split(key)
    points = posterior.unconstrained(draw_key, count)
    draws = posterior.constrained(points)
    observed = posterior.traced.observed
    log_p, log_q = posterior.log_densities(points)
    groups: dict[str, dict[str, Any]] = {
        "posterior": draws,
        "sample_stats": {"lp": log_p, "log_q": log_q},
    }
    if observed:
        predicted = posterior.predictive(predict_key, sites=list(observed), draws=draws)
        try:
            likelihood = posterior.log_likelihood(draws)
        except DependentObservations:  # as in a hidden Markov model: there is nothing to put into that group
            likelihood = {}
        groups["posterior_predictive"] = {name: predicted[name] for name in observed if name in predicted}
        groups["log_likelihood"] = {name: likelihood[name] for name in observed if name in likelihood}
    one_chain: dict[str, Any] = {
        group: {name: np.asarray(values)[None] for name, values in variables.items()}
        for group, variables in groups.items()
        if variables
    }
    attributes = {
        "inference_library": "bayesrule",
        "verdict": posterior.verdict,
        "trust": posterior.trust,
        "khat": float(posterior.khat),
        "bound": float(posterior.bound),
        "log_evidence": float(posterior.log_evidence),
        "log_evidence_error": float(posterior.log_evidence_error),
    }
    attrs: dict[str, Any] = {"posterior": attributes, "sample_stats": attributes}
    data: dict[str, Any] = (
        {"observed_data": {name: np.asarray(values) for name, values in observed.items()}} if observed else {}
    )
    try:
        import arviz
    except ImportError:
        arviz = None
    if arviz is not None and hasattr(arviz, "InferenceData"):
        named: dict[str, Any] = {f"{group}_attrs": values for group, values in attrs.items()}
        return arviz.from_dict(**one_chain, **data, **named)
    try:
        from arviz_base import from_dict  # pyright: ignore[reportMissingImports]  # ArviZ 1, where that is installed
    except ImportError as error:
        raise ImportError("to_arviz() needs ArviZ: pip install 'bayesrule[numpyro]'.") from error
    return from_dict(one_chain | data, attrs=attrs)
