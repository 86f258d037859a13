"""fit(): the posterior of a NumPyro model, with the centring that its bound chooses; and load(), one that was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import init_to_sample

from ...families.gaussian.diagonal import DiagonalGaussian
from ...families.gaussian.full import Gaussian
from ...fitting.checkpoint import read
from ...inference.density import Density
from ...inference.infer import PRODUCTS, gaussian_of, infer_density, ravelled_or_raise
from ...inference.posterior import load_posterior
from ...numerics.random import Key
from .centring import centrable_sites, centrings, decentred, is_better
from .model import Traced
from .posterior import NumpyroPosterior
from .sites import Model, explain, run, unconstrained


def fit(
    model: Model,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    key: Key,
    reparam: Literal["auto"] | None = None,
    starts: int | None = None,
    start: Mapping[str, Any] | Gaussian | DiagonalGaussian | None = None,
    tolerance: float = 1e-4,
    products: int = PRODUCTS,
    progress: bool | Callable[[str], None] = False,
    checkpoint: str | Path | None = None,
) -> NumpyroPosterior:
    """The posterior of a NumPyro model, without tuning, and a verdict on how far to trust it.

    Args:
        model: Any NumPyro model with continuous latent sites: constraints, plates, hierarchies, `handlers.reparam`,
            `scope`, `mask`, `factor`, `deterministic`. Discrete latent sites are summed out by NumPyro's enumeration
            where their distributions allow that (it needs `funsor`).
        args: The model's positional arguments.
        kwargs: Its keyword arguments.
        key: A JAX key, for starts and fresh draws.
        reparam: "auto" tries location-scale sites whose location or scale depends on other sites as they are and
            decentred, and keeps what has the larger bound.
        starts: How many starts are taken to a mode; by default eight, and fewer with many latent numbers.
        start: Values of the sites to start from, by name; the others start where the density is high among draws. Or
            `posterior.q` of an earlier fit, without a search for modes.
        tolerance: The nats that q may be away from the optimum at its points.
        products: A budget of products of a Hessian with a vector.
        progress: True shows what is being done; a function is called with a line of text.
        checkpoint: A file that holds the best Gaussian so far; `blr.load` it and pass it as `start` to go on.

    Returns:
        The posterior: `trust`, `verdict`, `samples(key, n)`, `summary()`, `predictive(key, …)`, `to_arviz()`, `q`.

    >>> import jax, numpyro, numpyro.distributions as dist, jax.numpy as jnp
    >>> def model(y):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(10.0))
    ...     numpyro.sample("y", dist.Normal(0.0, scale), obs=y)
    >>> posterior = fit(model, (3.0 * jnp.sin(jnp.arange(50.0)),), key=jax.random.key(0))
    >>> posterior.trust, posterior.samples(jax.random.key(1), 5)["scale"].shape
    ('trust', (5,))
    """
    how: Any = {"starts": starts, "start": start, "tolerance": tolerance, "products": products, "progress": progress}
    how["checkpoint"] = checkpoint
    if reparam is None:
        return _fit(model, args, kwargs, key, **how)
    if reparam != "auto":
        raise ValueError(
            f'reparam= is "auto" or None, got {reparam!r}. For a reparametrisation of your own use handlers.reparam.'
        )
    sites = centrable_sites(model, args, kwargs)
    best: NumpyroPosterior | None = None
    failure: ValueError | None = None
    for candidate in centrings(sites):
        try:
            other = _fit(
                decentred(model, candidate), args, kwargs, key, **(how | {"start": None} if candidate else how)
            )
        except ValueError as error:  # Another centring may have what this one lacks.
            if not sites:
                raise
            failure = error
            continue
        if best is None or is_better(other, best):
            best = other
            best.decentred = tuple(sorted(candidate))
    if best is None:
        raise ValueError(f"No centring of {sorted(sites)} could be fitted: {failure}") from failure
    return best


def load(
    path: str | Path, model: Model, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> NumpyroPosterior:
    """A posterior that `posterior.save(path)` has written, of the same model and data.

    Args:
        path: The file.
        model: The model, as it was given to `fit`; sites that `reparam="auto"` has decentred are decentred again.
        args: The model's positional arguments.
        kwargs: Its keyword arguments.
    """
    saved = read(path)
    apart = tuple(saved.get("decentred", ())) if isinstance(saved, dict) else ()
    traced = Traced.of(decentred(model, frozenset(apart)), args, kwargs)
    density = traced.usable_density()
    names = saved.get("sites", sorted(density.like)) if isinstance(saved, dict) else []
    if isinstance(saved, dict) and list(names) != sorted(density.like):
        raise ValueError(
            f"{path} holds a posterior of the sites {list(names)}, and this model has {sorted(density.like)}: load it "
            "with the model that it was fitted with."
        )
    posterior = load_posterior(path, density, partial(NumpyroPosterior, traced=traced))
    posterior.decentred = apart
    return posterior


def _fit(
    model: Model,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    key: Key,
    *,
    start: Mapping[str, Any] | Gaussian | DiagonalGaussian | None,
    **how: Any,
) -> NumpyroPosterior:
    traced = Traced.of(model, args, kwargs)
    density = traced.usable_density()
    q = gaussian_of(start)
    given = _given(traced, density, start) if q is None else None
    kind = partial(NumpyroPosterior, traced=traced)
    return infer_density(
        density,
        key,
        q=q,
        given=given,
        kind=kind,
        advice=partial(_advice, traced),
        explain=partial(_explain, traced),
        **how,
    )


def _given(traced: Traced, density: Density, start: Any) -> np.ndarray | None:
    """The start of the sites that users have given, and zero for the others."""
    if start is None:
        return None
    unknown = sorted(set(start) - set(density.like))
    if unknown:
        raise ValueError(f"start= names {unknown}, which are no latent sites: these are {sorted(density.like)}.")
    # The supports are those that the sites have at the start: that of one site may depend on another's value.
    values = {
        name: jnp.broadcast_to(jnp.asarray(value), jnp.shape(traced.sites[name]["value"]))
        for name, value in start.items()
    }
    sites = run(handlers.substitute(traced.fixed_model, data=values), traced.args, traced.kwargs)
    theta = density.like | {name: unconstrained(sites[name]) for name in start}
    return ravelled_or_raise(theta, density.like | values)


def _explain(traced: Traced) -> str | None:
    runs = [run(traced.fixed_model, traced.args, traced.kwargs, key, init_to_sample) for key in range(1, 4)]
    return explain([traced.sites, *runs], (traced.args, traced.kwargs))


def _advice(traced: Traced) -> str:
    sites = centrable_sites(traced.fixed_model, traced.args, traced.kwargs)
    if sites:
        shown = ", ".join(repr(site) for site in sites[:3])
        return f'Reparametrise {shown} (reparam="auto"), or sample with NUTS from posterior.nuts(key).'
    return "Take more starts, reparametrise the model, or sample with NUTS from posterior.nuts(key)."
