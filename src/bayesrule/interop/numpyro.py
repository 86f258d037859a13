"""A NumPyro model, fitted without tuning: `posterior = fit(model, args, kwargs, key=key)`, with a verdict.

Every continuous latent site becomes a part of θ on its unconstrained space (NumPyro's `biject_to`), and the model's
joint density, with the Jacobians, is the density that `bayesrule.infer` infers. Arrays among the model's arguments stay
arguments of the compiled programs: a second fit with other data of the same shapes compiles nothing.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..families.gaussian.full import Gaussian
from ..inference.density import Density, constrained
from ..inference.importance import importance
from ..inference.infer import PRODUCTS, gaussian_of, infer_density
from ..inference.posterior import Posterior, load_posterior
from ..numerics.random import Key

try:
    from numpyro import handlers
    from numpyro.distributions import biject_to
    from numpyro.infer import Predictive, init_to_sample, init_to_uniform
    from numpyro.infer.reparam import LocScaleReparam
    from numpyro.infer.util import constrain_fn, log_likelihood, potential_energy
except ImportError as error:
    raise ImportError("bayesrule.interop.numpyro needs NumPyro: pip install 'bayesrule[numpyro]'.") from error

Model = Callable[..., Any]


def fit(
    model: Model,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    key: Key,
    reparam: Literal["auto"] | None = None,
    starts: int | None = None,
    start: Mapping[str, Any] | Gaussian | None = None,
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
    sites = _centrable_sites(model, args, kwargs)
    if not sites:
        return _fit(model, args, kwargs, key, **how)
    candidates = [frozenset(), frozenset(sites), *(frozenset({site}) for site in sites if len(sites) > 1)]
    best: NumpyroPosterior | None = None
    failure: ValueError | None = None
    for candidate in candidates[:6]:
        centring = _decentred(model, candidate) if candidate else model
        try:
            other = _fit(centring, args, kwargs, key, **(how if not candidate else how | {"start": None}))
        except ValueError as error:  # Another centring may have what this one lacks.
            failure = error
            continue
        if best is None or _better(other, best):
            best = other
            best.decentred = tuple(sorted(candidate))
    if best is None:
        raise ValueError(f"No centring of {sorted(sites)} could be fitted: {failure}") from failure
    return best


def load(
    path: str | Path, model: Model, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> NumpyroPosterior:
    """A posterior that `posterior.save(path)` has written, of the same model and data."""
    traced = Traced.of(model, args, kwargs)
    return load_posterior(path, traced.density(), partial(NumpyroPosterior, traced=traced))


class NumpyroPosterior(Posterior):
    """The posterior of a NumPyro model: draws by site, predictions, ArviZ and NUTS beside what `Posterior` has.

    Attributes:
        traced: the model and its arguments.
        decentred: the sites that `reparam="auto"` has decentred.
    """

    decentred: tuple[str, ...] = ()

    def __init__(self, *parts: Any, traced: Traced):
        super().__init__(*parts)
        self.traced = traced

    def constrained(self, points: np.ndarray) -> dict[str, np.ndarray]:
        """All latent sites, and the deterministic ones, at ravelled unconstrained points."""
        function: Any = self.density.function
        return constrained(dataclasses.replace(self.density, constrain=Values(function.call, True)), points)

    def predictive(
        self,
        key: Key,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        count: int = 1000,
        sites: Iterable[str] | None = None,
        draws: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Draws of the observed sites under draws of the posterior, by `numpyro.infer.Predictive`.

        Args:
            key: A JAX key.
            args: The model's arguments for the prediction, such as new inputs and None for what was observed. By
                default those of the fit, with its observations taken out.
            kwargs: Its keyword arguments, to go with `args`.
            count: How many draws.
            sites: Which sites to return; by default what `Predictive` returns.
            draws: Draws of the latent sites to predict under, in place of new ones.
        """
        draw_key, predict_key = jax.random.split(key)
        latent = self._latent(self.samples(draw_key, count) if draws is None else draws)
        own = args is None and kwargs is None
        model = handlers.uncondition(self.traced.model) if own else self.traced.model
        positional, named = (self.traced.args, self.traced.kwargs) if own else (args or (), dict(kwargs or {}))
        predict = Predictive(model, posterior_samples=latent, return_sites=None if sites is None else list(sites))
        return predict(predict_key, *positional, **named)

    def log_likelihood(self, draws: Mapping[str, Any]) -> dict[str, Any]:
        """The log likelihood of every observation under draws of the sites."""
        return log_likelihood(self.traced.model, self._latent(draws), *self.traced.args, **self.traced.kwargs)

    def loo(self, key: Key | None = None, count: int = 4000) -> LeaveOneOut:
        """The expected log density of a new observation, each left out in turn, by Pareto-smoothed importance sampling.

        Args:
            key: A JAX key; by default a fixed one.
            count: How many draws.
        """
        likelihood = self.log_likelihood(self.samples(jax.random.key(0) if key is None else key, count))
        if not likelihood:
            raise ValueError(
                "This model has no observed site: its likelihood is in a factor, which has no observations."
            )
        columns = np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x in likelihood.values()], axis=1)
        weighted = [importance(-column) for column in columns.T]
        pointwise = np.array([np.logaddexp.reduce(w.log_weights + c) for w, c in zip(weighted, columns.T, strict=True)])
        whole = np.logaddexp.reduce(columns, axis=0) - np.log(len(columns))
        return LeaveOneOut(pointwise, np.array([w.khat for w in weighted]), float(np.sum(whole - pointwise)))

    def _latent(self, draws: Mapping[str, Any]) -> dict[str, Any]:
        return {name: draws[name] for name in self.density.like}

    def nuts(self, key: Key, chains: int = 1, **options: Any) -> tuple[Any, dict[str, Any]]:
        """NumPyro's NUTS with this posterior's covariance as its mass matrix, and where its chains start.

        Args:
            key: A JAX key, for the starts.
            chains: How many chains.
            **options: Further options of `numpyro.infer.NUTS`.

        Returns:
            The kernel, and the `init_params` of `MCMC(kernel, …).run(key, *args, init_params=…, **kwargs)`. A few
            warm-up steps find the step size.
        """
        from numpyro.infer import NUTS

        begin, sites = self.nuts_start(key, chains), tuple(sorted(self.density.like))
        settings: Any = {
            "inverse_mass_matrix": {sites: begin["inverse_mass_matrix"]},
            "dense_mass": [sites],
            "adapt_mass_matrix": False,  # A short warm-up would replace it by a worse one.
        } | options
        return NUTS(self.traced.model, **settings), begin["init_params"]

    def to_arviz(self, key: Key | None = None, count: int = 1000) -> Any:
        """The posterior for ArviZ: draws, predictions, log likelihood, observed data, and the verdict."""
        from .arviz import to_arviz

        return to_arviz(self, jax.random.key(0) if key is None else key, count)


class LeaveOneOut(NamedTuple):
    """What `posterior.loo()` returns.

    Attributes:
        pointwise: log p(y_i | all other observations) of every observation.
        khat: Pareto's k̂ of each; above 0.7 its value cannot be relied on.
        effective_parameters: p_loo, by how much the observations are better predicted with than without themselves.
    """

    pointwise: np.ndarray
    khat: np.ndarray
    effective_parameters: float

    @property
    def elpd(self) -> float:
        """The sum over observations."""
        return float(np.sum(self.pointwise))

    @property
    def error(self) -> float:
        """Its standard error over observations."""
        return float(np.sqrt(len(self.pointwise)) * np.std(self.pointwise))

    def __str__(self) -> str:
        doubtful = int(np.sum(self.khat > 0.7))
        return f"elpd {self.elpd:.2f} ± {self.error:.2f}, p_loo {self.effective_parameters:.2f}, {doubtful} k̂ above 0.7"


# The model as a density.


class Traced(NamedTuple):
    """A model with its arguments, and what one run of it has shown.

    Attributes:
        model: the model.
        args: its positional arguments.
        kwargs: its keyword arguments.
        sites: the trace of one run at values inside of all constraints.
        enumerated: whether discrete latent sites are summed out.
    """

    model: Model
    args: tuple
    kwargs: dict[str, Any]
    sites: dict[str, Any]
    enumerated: bool

    @staticmethod
    def of(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Traced:
        """Run the model once, and check that every latent site can be inferred."""
        args, kwargs = tuple(args), dict(kwargs or {})
        sites = _run(model, args, kwargs)
        learned = {name: site["value"] for name, site in sites.items() if site["type"] in ("param", "mutable")}
        if learned:  # As NUTS does: what `numpyro.param` holds is not inferred.
            model = handlers.substitute(model, data=learned)
        _check_sites(sites)
        discrete = [name for name, site in _latent_sites(sites).items() if _is_discrete(site)]
        if discrete:
            _check_enumeration(sites, discrete)
        return Traced(model, args, kwargs, sites, bool(discrete))

    @property
    def latent(self) -> dict[str, Any]:
        """The latent sites that are inferred."""
        return {name: site for name, site in _latent_sites(self.sites).items() if not _is_discrete(site)}

    @property
    def observed(self) -> dict[str, np.ndarray]:
        """The observed sites and their values."""
        is_data = lambda site: site["type"] == "sample" and site["is_observed"] and site["fn"] is not None
        return {
            name: np.asarray(site["value"])
            for name, site in self.sites.items()
            if is_data(site) and type(site["fn"]).__name__ != "Unit"
        }

    def density(self, *, dynamic: bool = True) -> Density:
        """The joint density of the latent sites on their unconstrained space.

        Args:
            dynamic: whether arrays among the arguments are arguments of the compiled programs; else they are constants,
                for models that look at their values while they are traced.
        """
        leaves, structure = jax.tree.flatten((self.args, self.kwargs), is_leaf=lambda leaf: leaf is None)
        arrays = [leaf for leaf in leaves if dynamic and _is_array(leaf)]
        static = tuple(_PLACE if dynamic and _is_array(leaf) else _hashable(leaf) for leaf in leaves)
        nesting = _plate_nesting(self.sites) if self.enumerated else None
        call = Call(self.model, structure, static, nesting)
        like = {name: jnp.zeros_like(_unconstrained(site)) for name, site in self.latent.items()}
        if not like:
            raise ValueError("This model has no continuous latent site: there is nothing to infer.")
        names = tuple(sorted(like))
        starts = PriorDraw(call, names)
        return Density(LogJoint(call), (arrays,), like, Values(call, False, names), starts)


_PLACE = "an array"  # Stands for an array among the static parts of the arguments.


class _Constant:
    """A value that cannot be hashed, equal only to itself."""

    def __init__(self, value: Any):
        self.value = value


def _is_array(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray | jax.Array) or leaf.dtype == object:
        return False
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _hashable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return _Constant(leaf)
    return leaf


@dataclasses.dataclass(frozen=True)
class Call:
    """A model and its arguments without their arrays: equal, and hence compiled once, where all of these are.

    Python's numbers stay static, because they may decide shapes.

    Args:
        model: the model.
        structure: the pytree of positional and keyword arguments.
        static: its leaves, with a mark in the place of every array.
        nesting: with discrete sites that are summed out, how many plates are nested in each other; None without.
    """

    model: Model
    structure: Any
    static: tuple[Any, ...]
    nesting: int | None

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with these arrays in their places."""
        rest = iter(arrays)
        leaves = [
            next(rest) if leaf is _PLACE else getattr(leaf, "value", leaf) if isinstance(leaf, _Constant) else leaf
            for leaf in self.static
        ]
        return jax.tree.unflatten(self.structure, leaves)

    def prepared(self, key: Any = 0) -> Model:
        """The model with a seed for what is not substituted, and with its discrete sites summed out."""
        seeded = handlers.seed(self.model, key)
        if self.nesting is None:
            return seeded
        from numpyro.contrib.funsor import config_enumerate, enum

        return enum(config_enumerate(seeded), -self.nesting - 1)


@dataclasses.dataclass(frozen=True)
class LogJoint:
    """log p(θ, data) of unconstrained values, with the Jacobians."""

    call: Call

    def __call__(self, theta: PyTree, arrays: Sequence[Any]) -> Any:
        args, kwargs = self.call.arguments(arrays)
        return -potential_energy(self.call.prepared(), args, kwargs, theta, enum=self.call.nesting is not None)


@dataclasses.dataclass(frozen=True)
class Values:
    """The sites' values from unconstrained ones.

    Args:
        call: the model.
        deterministic: whether deterministic sites are returned too.
        names: the sites to return; None for all.
    """

    call: Call
    deterministic: bool
    names: tuple[str, ...] | None = None

    def __call__(self, theta: PyTree, arrays: Sequence[Any]) -> dict[str, Any]:
        args, kwargs = self.call.arguments(arrays)
        seeded = handlers.seed(self.call.model, 0)
        found = constrain_fn(seeded, args, kwargs, theta, return_deterministic=self.deterministic)
        wanted = found if self.names is None else self.names
        return {name: found[name] for name in wanted if name in theta or self.deterministic}


@dataclasses.dataclass(frozen=True)
class PriorDraw:
    """A draw of the latent sites from the prior, unconstrained; where a site cannot be drawn, from around zero."""

    call: Call
    names: tuple[str, ...]

    def __call__(self, key: Key, arrays: Sequence[Any]) -> dict[str, Any]:
        args, kwargs = self.call.arguments(arrays)
        sites = _run(self.call.model, args, kwargs, key, init_to_sample)
        return {name: _unconstrained(sites[name]) for name in self.names}


def _run(
    model: Model, args: tuple, kwargs: dict[str, Any], key: Any = 0, strategy: Any = init_to_uniform
) -> dict[str, Any]:
    """The trace of the model at values inside of all constraints."""
    filled = handlers.substitute(handlers.seed(model, key), substitute_fn=strategy)
    with warnings.catch_warnings(), handlers.trace() as sites:
        warnings.simplefilter("ignore")  # of sites that have no distribution to draw from
        try:
            filled(*args, **kwargs)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
            raise
        except Exception as error:
            last = next(reversed(sites), None)
            place = f"after its site {last!r}" if last else "before its first site"
            raise ValueError(
                f"The model cannot be run on these arguments: {type(error).__name__} {place}: {error}"
            ) from error
    return dict(sites)


def _unconstrained(site: dict[str, Any]) -> Any:
    return biject_to(site["fn"].support).inv(jnp.asarray(site["value"]))


def _latent_sites(sites: dict[str, Any]) -> dict[str, Any]:
    return {
        name: site
        for name, site in sites.items()
        if site["type"] == "sample" and not site["is_observed"] and not site.get("infer", {}).get("is_auxiliary")
    }


def _is_discrete(site: dict[str, Any]) -> bool:
    return bool(site["fn"].support.is_discrete)


def _check_sites(sites: dict[str, Any]) -> None:
    for name, site in sites.items():
        if site["type"] == "plate":
            size, subsample = site["args"]
            if subsample is not None and subsample != size:
                raise ValueError(
                    f"The plate {name!r} takes {subsample} of its {size} rows at random, and a posterior is that of "
                    "all rows: call the model without subsample_size (for a stochastic gradient use blr.fit with an "
                    "Objective)."
                )


def _check_enumeration(sites: dict[str, Any], discrete: list[str]) -> None:
    for name in discrete:
        if not sites[name]["fn"].has_enumerate_support:
            raise ValueError(
                f"The latent site {name!r} is discrete ({type(sites[name]['fn']).__name__}) and has no finite support "
                "to sum over: sum it out by hand, or sample with NumPyro's DiscreteHMCGibbs."
            )
    try:
        import numpyro.contrib.funsor  # noqa: F401  (whether it can be imported is the question)
    except ImportError as error:
        raise ImportError(
            f"The latent sites {discrete} are discrete, and NumPyro sums them out by funsor, which is not installed: "
            "pip install funsor."
        ) from error


def _plate_nesting(sites: dict[str, Any]) -> int:
    """How many dimensions plates take, counted from the right."""
    depths = [frame.dim for site in sites.values() if site["type"] == "sample" for frame in site["cond_indep_stack"]]
    return -min(depths, default=0)


def _fit(
    model: Model,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    key: Key,
    *,
    start: Mapping[str, Any] | Gaussian | None,
    **how: Any,
) -> NumpyroPosterior:
    traced = Traced.of(model, args, kwargs)
    density = traced.density()
    try:
        jax.eval_shape(density.function, density.like, *density.arguments)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        density = traced.density(dynamic=False)  # The model looks at the values of its data.
    q = gaussian_of(start)
    given = _given(traced, density, start) if q is None else None
    kind = partial(NumpyroPosterior, traced=traced)
    advice = _advice(traced)
    return infer_density(
        density, key, q=q, given=given, kind=kind, advice=advice, explain=partial(_explain, traced), **how
    )


def _given(traced: Traced, density: Density, start: Any) -> np.ndarray | None:
    """The start of the sites that users have given, and zero for the others."""
    if start is None:
        return None
    unknown = sorted(set(start) - set(density.like))
    if unknown:
        raise ValueError(f"start= names {unknown}, which are no latent sites: these are {sorted(density.like)}.")
    theta = dict(density.like)
    for name, value in start.items():
        site = traced.sites[name] | {"value": jnp.asarray(value)}
        theta[name] = jnp.broadcast_to(_unconstrained(site), density.like[name].shape)
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(theta)])


def _explain(traced: Traced) -> str | None:
    """Which site's log density is not finite, at values inside of all constraints."""
    for name, site in traced.sites.items():
        if site["type"] != "sample":
            continue
        value = np.asarray(site["value"])
        if site["is_observed"] and np.issubdtype(value.dtype, np.floating) and np.any(np.isnan(value)):
            count = int(np.sum(np.isnan(value)))
            return (
                f"the observed site {name!r} has {count} NaN among its {value.size} values: leave these out, or put "
                "them under handlers.mask with a finite number in their place."
            )
    for name, site in traced.sites.items():
        if site["type"] == "sample":
            log_prob = np.asarray(site["fn"].log_prob(site["value"]))
            if not np.all(np.isfinite(log_prob)):
                bad = int(np.sum(~np.isfinite(log_prob)))
                return (
                    f"that of the site {name!r} is not, in {bad} of its {log_prob.size} entries: check its parameters, "
                    "and whether its values lie in the support of its distribution."
                )
    return None


def _advice(traced: Traced) -> str:
    sites = _centrable_sites(traced.model, traced.args, traced.kwargs)
    if sites:
        shown = ", ".join(repr(site) for site in sites[:3])
        return f'Reparametrise {shown} (reparam="auto"), or sample with NUTS from posterior.nuts(key).'
    return "Take more starts, reparametrise the model, or sample with NUTS from posterior.nuts(key)."


# The centring of hierarchies.


def _centrable_sites(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[str]:
    """The latent location-scale sites whose location or scale depends on other latent sites."""
    args, kwargs = tuple(args), dict(kwargs or {})
    runs = [_run(model, args, kwargs, key) for key in (1, 2)]
    found = []
    for name in _latent_sites(runs[0]):
        bases = [_base(run[name]["fn"]) for run in runs]
        if not all(hasattr(base, "loc") and hasattr(base, "scale") for base in bases):
            continue
        if type(bases[0]).__name__ not in ("Normal", "StudentT", "Laplace", "Logistic", "Cauchy"):
            continue
        depends = any(
            not np.array_equal(np.asarray(getattr(bases[0], part)), np.asarray(getattr(bases[1], part)))
            for part in ("loc", "scale")
        )
        if depends:
            found.append(name)
    return found


def _base(distribution: Any) -> Any:
    while hasattr(distribution, "base_dist") and type(distribution).__name__ in (
        "Independent",
        "ExpandedDistribution",
        "MaskedDistribution",
    ):
        distribution = distribution.base_dist
    return distribution


def _decentred(model: Model, sites: frozenset[str]) -> Model:
    return handlers.reparam(model, config={site: LocScaleReparam(centered=0.0) for site in sites})


def _better(one: NumpyroPosterior, other: NumpyroPosterior) -> bool:
    """Whether the first has the larger bound, both being those of a Gaussian; a trusted one comes first."""
    if (one.trust == "trust") != (other.trust == "trust"):
        return one.trust == "trust"
    return one.gaussian_bound > other.gaussian_bound
