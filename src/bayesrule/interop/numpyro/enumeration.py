"""Discrete latent sites, summed out by NumPyro's enumeration: what that asks of a model, and what depends on them.

NumPyro runs the model on all values of a discrete site at once, along a new axis to the left of all plates, and funsor
sums them out: row by row in a plate, forwards in time in `numpyro.contrib.control_flow.scan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import Distribution, biject_to
from numpyro.infer import Predictive
from numpyro.primitives import Messenger

from ...numerics.random import Key
from .sites import Model, Sites, is_discrete, latent_sites, observed_sites, run


class Discrete(NamedTuple):
    """The discrete latent sites of a model.

    Attributes:
        sites: their names.
        dependent: the deterministic sites whose values depend on theirs.
        scanned: whether some are inside of a scan.
        nesting: how many dimensions, counted from the right, plates and batches take.
    """

    sites: tuple[str, ...]
    dependent: tuple[str, ...]
    nesting: int
    scanned: bool

    @staticmethod
    def of(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], sites: Sites) -> Discrete | None:
        """The discrete latent sites; an error if they cannot be summed out, None if there are none."""
        found = {name: site for name, site in latent_sites(sites).items() if is_discrete(site)}
        if not found:
            return None
        for name, site in found.items():
            if not site["fn"].has_enumerate_support:
                raise ValueError(
                    f"The latent site {name!r} is discrete ({type(site['fn']).__name__}) and has no finite support to "
                    "sum over: sum it out by hand, or sample with NumPyro's DiscreteHMCGibbs."
                )
        _check_funsor(list(found))
        dependent = _dependent(model, args, kwargs, sites, found)
        scanned = any("_scan_current_index" in site["infer"] for site in found.values())
        return Discrete(tuple(found), dependent, _nesting(sites), scanned)

    def error(self, sites: Sites, error: Exception) -> ValueError:
        """What to say where the model cannot be run on all values of its discrete sites at once."""
        bare = [name for name, site in sites.items() if _unplated(site)]
        advice = (
            f"Put the rows of {bare} into numpyro.plate (or make them part of the event by to_event), since NumPyro "
            "takes other axes for values of discrete sites."
            if bare
            else "Write it so that it broadcasts: jnp.where in place of `if`, indexing as in locations[z], no `expand` "
            "to a fixed shape after z, observations in plates, and no z[group] of a site z in a plate of groups."
        )
        return ValueError(
            f"The discrete latent sites {list(self.sites)} are summed out, for which NumPyro runs the model on all of "
            f"their values at once, and that fails: {type(error).__name__}: {error}\n{advice}"
        )


def enumerated(model: Model, nesting: int) -> Model:
    """The model run on all values of its discrete sites at once."""
    from numpyro.contrib.funsor import enum

    return enum(marked(model), -nesting - 1)


def marked(model: Model) -> Model:
    """The model with its discrete sites marked as sites to enumerate."""
    from numpyro.contrib.funsor import config_enumerate

    return config_enumerate(model)


def _check_funsor(names: list[str]) -> None:
    try:
        # Whether it can be imported is the question.
        import numpyro.contrib.funsor  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ImportError(
            f"The latent sites {names} are discrete, and NumPyro sums them out by funsor, which is not installed: "
            "pip install 'bayesrule[numpyro]'."
        ) from error


def _nesting(sites: Sites) -> int:
    """How many dimensions plates and batches take, counted from the right.

    Batches outside of plates count too: values of a discrete site along their axes would be taken for rows.
    """
    plated = [-frame.dim for site in sites.values() if site["type"] == "sample" for frame in site["cond_indep_stack"]]
    return max(plated + [len(_unplated(site)) for site in sites.values()], default=0)


def _unplated(site: Mapping[str, Any]) -> tuple[int, ...]:
    """The batch shape of a site that has rows outside of plates; () of all others, and inside of a scan."""
    if site["type"] != "sample" or "_scan_current_index" in site["infer"]:
        return ()
    own = np.shape(site["value"])
    shape = np.broadcast_shapes(site["fn"].batch_shape, own[: len(own) - site["fn"].event_dim])
    plates = {frame.dim for frame in site["cond_indep_stack"]}
    bare = any(size > 1 and dim - len(shape) not in plates for dim, size in enumerate(shape))
    return shape if bare else ()


def _dependent(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], sites: Sites, discrete: Sites
) -> tuple[str, ...]:
    """The deterministic sites that change with the values of the discrete ones; an error where a support does."""
    held = {name: site["value"] for name, site in latent_sites(sites).items() if name not in discrete}
    supports = {name: site["fn"].enumerate_support(expand=True) for name, site in discrete.items()}
    runs = []
    for end in (0, -1):
        values = held | {name: support[end] for name, support in supports.items()}
        runs.append(run(handlers.substitute(model, data=values), args, kwargs))
    runs.append(run(handlers.substitute(model, data=held), args, kwargs, 1))
    for name in held:
        zero = jnp.zeros_like(biject_to(sites[name]["fn"].support).inv(held[name]))
        images = [np.asarray(biject_to(other[name]["fn"].support)(zero)) for other in runs]
        if not all(np.array_equal(images[0], image) for image in images):
            raise ValueError(
                f"The support of the site {name!r} depends on the discrete latent sites {sorted(discrete)}, so that "
                "these cannot be summed out with it held fixed: draw it from a fixed support, and transform it."
            )
    return tuple(
        name
        for name, site in sites.items()
        if site["type"] == "deterministic"
        and not all(_equal(runs[0][name]["value"], other[name]["value"]) for other in runs)
    )


def _equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


# What follows for draws of the other sites.


def draw_discrete(
    key: Key,
    discrete: Discrete,
    model: Model,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    draws: Mapping[str, Any],
) -> dict[str, Any]:
    """The discrete sites, given the data and draws of all other sites, and deterministic sites that depend on them."""
    if discrete.scanned:
        raise NotImplementedError(
            f"NumPyro cannot draw the discrete sites {list(discrete.sites)}, which are inside of a scan: its "
            "infer_discrete does not work there. Write the steps as a loop with numpyro.contrib.funsor.markov, or run "
            "the backward pass by hand on draws of the other sites."
        )
    draws = {
        name: jnp.asarray(leaf) for name, leaf in draws.items()
    }  # Inside of a scan a NumPy array cannot be indexed by z.
    sample_key, replay_key = jax.random.split(key)
    found = Predictive(model, posterior_samples=draws, infer_discrete=True, return_sites=list(discrete.sites))(
        sample_key, *args, **kwargs
    )
    if not discrete.dependent:
        return found
    replay = Predictive(model, posterior_samples=draws | found, return_sites=list(discrete.dependent))
    return found | replay(replay_key, *args, **kwargs)


class DependentObservations(ValueError):
    """Observations share a discrete site, so that with it summed out there is no log likelihood of each."""

    def __init__(self, *, scanned: bool) -> None:
        what = (
            "The observations depend on each other once the discrete latent sites are summed out, so that there is no "
            "log likelihood of each, and no loo()."
        )
        other = (
            " For the one given the discrete sites add these to the draws: "
            "posterior.log_likelihood(draws | posterior.discrete_samples(key, draws))."
        )
        super().__init__(what if scanned else what + other)


class _Changed(Distribution):
    """A distribution whose log densities are passed through a function."""

    def __init__(self, base: Any, change: Any):
        self.base, self.change = base, change
        super().__init__(base.batch_shape, base.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        return self.base.support

    def log_prob(self, value: Any, intermediates: Any = None) -> Any:
        return self.change(self.base.log_prob(value))


class _change_likelihood(Messenger):
    """Passes the log densities of observed sites through functions, by the name of the site."""

    def __init__(self, fn: Model, changes: Mapping[str, Any]):
        self.changes = changes
        super().__init__(fn)

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.changes and msg["is_observed"]:
            msg["fn"] = _Changed(msg["fn"], self.changes[msg["name"]])


def log_likelihood_rows(
    model: Model, nesting: int, sites: Sites, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: Mapping[str, Any]
) -> dict[str, Any]:
    r"""log p(y_i | θ) of every observation, with the discrete sites summed out, under draws of the other sites.

    Where every observation has discrete sites of its own, as in a mixture, $p(y_i|θ) = E_{z|θ}p(y_i|z, θ)$ is the
    derivative of $\log E_{z|θ}\exp ∑_iε_ip(y_i|z, θ)$ with respect to $ε_i$ at ε = 0: one pass backwards for all of
    them. That these are all of the likelihood is checked; an error where observations share a discrete site.
    """
    observed = observed_sites(sites)
    if any("_scan_current_index" in site["infer"] for site in observed.values()):
        raise DependentObservations(scanned=True)
    rows = {name: jax.eval_shape(site["fn"].log_prob, site["value"]).shape for name, site in observed.items()}

    def joint(changes: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
        seeded = handlers.seed(_change_likelihood(model, changes), 0)
        return _summed(enumerated(seeded, nesting), args, kwargs, values)

    def one(values: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        def weighed(weights: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            largest: dict[str, Any] = {}

            def change(name: str, log_prob: Any) -> Any:
                shape = rows[name]
                log_prob = jnp.broadcast_to(log_prob, np.broadcast_shapes(log_prob.shape, shape))
                axes = tuple(range(log_prob.ndim - len(shape)))
                top = jax.lax.stop_gradient(jnp.max(log_prob, axis=axes))
                largest[name] = jnp.where(jnp.isfinite(top), top, 0.0)
                return weights[name] * jnp.exp(log_prob - largest[name])

            changes = {name: lambda log_prob, name=name: change(name, log_prob) for name in rows}
            return joint(changes, values), largest

        (without, largest), slopes = jax.value_and_grad(weighed, has_aux=True)(
            {name: jnp.zeros(shape) for name, shape in rows.items()}
        )
        likelihood = {name: jnp.log(slopes[name]) + largest[name] for name in rows}
        total = sum(jnp.sum(leaf) for leaf in likelihood.values())
        return likelihood, joint({}, values) - without - total

    likelihood, missing = jax.jit(lambda draws: jax.lax.map(one, draws, batch_size=64))(dict(draws))
    totals = sum(np.sum(np.asarray(leaf).reshape(len(leaf), -1), axis=1) for leaf in likelihood.values())
    rounding = 1e3 * float(jnp.finfo(missing.dtype).eps) * max(1.0, float(np.max(np.abs(totals))))
    if not float(np.max(np.abs(missing))) <= rounding:
        raise DependentObservations(scanned=False)
    return likelihood


def _summed(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    from numpyro.contrib.funsor.infer_util import log_density as summed_log_density

    return summed_log_density(model, args, dict(kwargs), dict(values))[0]
