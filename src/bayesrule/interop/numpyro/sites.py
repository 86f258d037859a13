"""The sites of a model, from one run of it: which are latent, and which of them cannot work, by name."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import init_to_uniform

Model = Callable[..., Any]
Sites = dict[str, Any]
"""A trace of NumPyro's: a message for every site, by its name."""

LOOKS_AT_VALUES = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
"""What JAX raises where a model looks at the value of an array that is an argument of a compiled program."""


def run(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any = 0, strategy: Any = init_to_uniform
) -> Sites:
    """The trace of the model at values inside of all constraints."""
    filled = handlers.substitute(handlers.seed(model, key), substitute_fn=strategy)
    with warnings.catch_warnings(), handlers.trace() as sites:
        warnings.simplefilter("ignore")  # of sites that have no distribution to draw from
        try:
            filled(*args, **kwargs)
        except (*LOOKS_AT_VALUES, ImportError):
            raise
        except Exception as error:
            at, last = _site_of(error), next(reversed(sites), None)
            place = f"at its site {at!r}" if at else f"after its site {last!r}" if last else "before its first site"
            nan = _places_of_nan((args, dict(kwargs)))
            hint = f" There are NaN in the arguments ({nan}): leave these rows out, or fill them in." if nan else ""
            raise ValueError(
                f"The model cannot be run on these arguments: {type(error).__name__} {place}: {error}{hint}"
            ) from error
    return dict(sites)


def _site_of(error: BaseException) -> str | None:
    """The site whose `numpyro.sample` the error was raised in; None if it was raised between two of them."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "sample" and frame.f_globals.get("__name__") == "numpyro.primitives":
            return str(frame.f_locals.get("name"))
    return None


def latent_sites(sites: Sites) -> Sites:
    """The sites that have a prior and no observation."""
    return {
        name: site
        for name, site in sites.items()
        if site["type"] == "sample" and not site["is_observed"] and not site.get("infer", {}).get("is_auxiliary")
    }


def observed_sites(sites: Sites) -> Sites:
    """The sites that have observations, without factors, which have none."""
    has_data = lambda site: site["type"] == "sample" and site["is_observed"] and site["fn"] is not None
    return {name: site for name, site in sites.items() if has_data(site) and type(site["fn"]).__name__ != "Unit"}


def is_discrete(site: Mapping[str, Any]) -> bool:
    """Whether the site's values are discrete."""
    return bool(site["fn"].support.is_discrete)


def unconstrained(site: Mapping[str, Any]) -> Any:
    """The site's value on the unconstrained space, by the support that it has in this trace."""
    return biject_to(site["fn"].support).inv(jnp.asarray(site["value"]))


class Outline(NamedTuple):
    """What a model's sites are, without their values.

    Attributes:
        types: the type of every site, in the order of the model.
        latent: shapes and dtypes of the continuous latent sites on their unconstrained space.
        supports: the supports of these that are the same whatever values there are, as pytrees without leaves.
        needs_values: whether more must be known of the model than this: it has discrete latent sites, or values that
            are not inferred.
    """

    types: dict[str, str]
    latent: dict[str, jax.ShapeDtypeStruct]
    supports: dict[str, Any]
    needs_values: bool

    @staticmethod
    def of(sites: Sites) -> Outline:
        """The outline of a trace."""
        latent, supports = {}, {}
        found = latent_sites(sites)
        for name, site in found.items():
            if is_discrete(site):
                continue
            value, support = unconstrained(site), site["fn"].support
            latent[name] = jax.ShapeDtypeStruct(value.shape, value.dtype)
            if not jax.tree.leaves(support):
                supports[name] = jax.tree.structure(support)
        types = {name: site["type"] for name, site in sites.items()}
        learned = any(kind in ("param", "mutable") for kind in types.values())
        return Outline(types, latent, supports, learned or len(latent) < len(found))


def look(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outline | None:
    """The outline of a model by tracing it alone, and an error where a site cannot work.

    Nothing is computed: to run a model once compiles a program for every operation in it. None where the model looks at
    values while it is traced, or fails in another way: then it has to be run.
    """
    found: list[Outline] = []

    def trace() -> None:
        sites = run(model, args, kwargs)
        check_sites(sites)
        found.append(Outline.of(sites))

    try:
        jax.eval_shape(trace)
    except Exception:
        return None
    return found[0]


# What cannot work.


def check_sites(sites: Sites) -> None:
    """Raise an error where a plate is subsampled, or where observations do not have their distribution's shape."""
    for name, site in sites.items():
        if site["type"] == "plate":
            size, subsample = site["args"]
            if subsample is not None and subsample != size:
                raise ValueError(
                    f"The plate {name!r} takes {subsample} of its {size} rows at random, and a posterior is that of "
                    "all rows: call the model without subsample_size (for a stochastic gradient use blr.fit with an "
                    "Objective)."
                )
    for name, site in observed_sites(sites).items():
        _check_shapes(name, site)


def _check_shapes(name: str, site: Mapping[str, Any]) -> None:
    shape, distribution = np.shape(site["value"]), site["fn"]
    try:
        found = jax.eval_shape(distribution.log_prob, site["value"]).shape
    except LOOKS_AT_VALUES:
        return
    except Exception as error:
        raise ValueError(
            f"The observed site {name!r} has values of shape {shape}, and its distribution "
            f"({type(distribution).__name__}) the shape {distribution.shape()}, so that their density cannot be "
            f"computed: {error}"
        ) from error
    own = shape[: len(shape) - distribution.event_dim]
    if np.prod(found) > max(np.prod(own), np.prod(distribution.batch_shape)):
        warnings.warn(
            f"The observed site {name!r} has values of shape {shape} and a distribution of shape "
            f"{distribution.shape()}: broadcasting makes {int(np.prod(found))} observations of them, each value with "
            "each distribution. If that is not meant, reshape the one or the other.",
            stacklevel=4,
        )


def explain(traces: list[Sites], args: Any) -> str | None:
    """Which site's log density is not a finite number, and what to do about it.

    Args:
        traces: runs of the model at values inside of all constraints; a site is named if its density is not finite in
            any of them.
        args: the model's arguments, among which there may be NaN.
    """
    for name, site in observed_sites(traces[0]).items():
        value = np.asarray(site["value"])
        if np.issubdtype(value.dtype, np.floating) and not np.all(np.isfinite(value)):
            kind = "NaN" if np.any(np.isnan(value)) else "infinite"
            count = int(np.sum(~np.isfinite(value)))
            return (
                f"the observed site {name!r} has {count} {kind} among its {value.size} values: leave these out, put "
                "them under handlers.mask with a finite number in their place, or infer them as a latent site."
            )
    for name, site in traces[0].items():
        if site["type"] != "sample":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values outside of a support, which is what is looked for
            found = [np.asarray(sites[name]["fn"].log_prob(sites[name]["value"])) for sites in traces if name in sites]
        if any(np.all(np.isfinite(log_prob)) for log_prob in found):
            continue  # At other values it is.
        bad = int(np.sum(~np.isfinite(found[0])))
        what = f"that of the site {name!r} is not, in {bad} of its {found[0].size} entries: "
        places = _places_of_nan(args)
        if places:
            return what + f"there are NaN in the model's arguments ({places}); leave these rows out, or fill them in."
        return what + (
            "check its parameters, and whether its values lie in the support of its distribution. If it is finite only "
            "far from zero, give values to start from (start=)."
        )
    return None


def _places_of_nan(args: Any) -> str:
    """Where among the arguments there are NaN, in words."""
    places = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(args)[0]:
        if not isinstance(leaf, np.ndarray | jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        try:
            count = int(np.sum(np.isnan(np.asarray(leaf))))
        except LOOKS_AT_VALUES:  # Inside of a compiled program there are no values to look at.
            continue
        if count:
            first, *rest = path
            kind = "args" if getattr(first, "idx", 0) == 0 else "kwargs"
            places.append(f"{count} in {kind}{jax.tree_util.keystr(tuple(rest))}")
    return ", ".join(places)
