"""The posterior of a NumPyro model: draws by site, predictions, ArviZ and NUTS beside what `Posterior` has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import NUTS, Predictive
from numpyro.infer.util import log_likelihood

from ...fitting.checkpoint import read, write
from ...inference.density import constrained
from ...inference.posterior import Posterior
from ...numerics.random import Key
from .arviz import to_arviz
from .enumeration import draw_discrete, log_likelihood_rows, marked
from .leave_one_out import LeaveOneOut
from .model import Traced, Values


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
        """The latent sites, and the deterministic ones, at ravelled unconstrained points.

        Discrete sites are summed out: `discrete_samples` has these, and the deterministic sites that depend on them.
        """
        function: Any = self.density.function
        values = Values(function.call, self.traced.values)
        return constrained(dataclasses.replace(self.density, constrain=values), points)

    def discrete_samples(self, key: Key, draws: Mapping[str, Any]) -> dict[str, Any]:
        """Draws of the discrete sites given the data and draws of all other sites, one for each of these.

        Args:
            key: A JAX key.
            draws: Draws of the other sites, as `samples` returns them.

        Returns:
            The discrete sites, and the deterministic sites that depend on them.
        """
        traced = self.traced
        if traced.discrete is None:
            raise ValueError("This model has no discrete latent sites: all of its sites are in samples().")
        latent = {name: draws[name] for name in self.density.like}
        return draw_discrete(key, traced.discrete, traced.fixed_model, traced.args, traced.kwargs, latent)

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

        Discrete latent sites are drawn anew, as those of new observations.

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
        traced = self.traced
        model = handlers.uncondition(traced.fixed_model) if own else traced.fixed_model
        positional, named = (traced.args, traced.kwargs) if own else (args or (), dict(kwargs or {}))
        predict = Predictive(model, posterior_samples=latent, return_sites=None if sites is None else list(sites))
        return predict(predict_key, *positional, **named)

    def log_likelihood(self, draws: Mapping[str, Any]) -> dict[str, Any]:
        """The log likelihood of every observation under draws of the sites.

        Discrete sites are summed out, unless `draws` has values for them.
        """
        traced, latent = self.traced, self._latent(draws)
        model, args, kwargs = traced.fixed_model, traced.args, traced.kwargs
        if traced.discrete is None or set(traced.discrete.sites) <= set(latent):
            return log_likelihood(model, latent, *args, **kwargs)
        return log_likelihood_rows(model, traced.discrete.nesting, traced.sites, args, kwargs, latent)

    def loo(self, key: Key | None = None, count: int = 4000) -> LeaveOneOut:
        """The expected log density of a new observation, each left out in turn, by Pareto-smoothed importance sampling.

        Args:
            key: A JAX key; by default a fixed one.
            count: How many draws.
        """
        return LeaveOneOut.of(self.log_likelihood(self.samples(jax.random.key(0) if key is None else key, count)))

    def _latent(self, draws: Mapping[str, Any]) -> dict[str, Any]:
        discrete = () if self.traced.discrete is None else self.traced.discrete.sites
        return {name: draws[name] for name in (*self.density.like, *discrete) if name in draws}

    def nuts(self, key: Key, chains: int = 1, **options: Any) -> tuple[Any, dict[str, Any]]:
        """NumPyro's NUTS with this posterior's covariance as its mass matrix, and where its chains start.

        Args:
            key: A JAX key, for the starts.
            chains: How many chains.
            **options: Further options of `numpyro.infer.NUTS`.

        Returns:
            The kernel, and the `init_params` of `MCMC(kernel, …).run(key, *args, init_params=…, **kwargs)`. Fifteen
            warm-up steps find the step size. With 20 to 150 NumPyro looks for it anew in the last tenth of them alone,
            for the sake of a mass matrix that is not adapted here: fewer are better, and 19 the most that makes sense.
        """
        begin, sites = self.nuts_start(key, chains), tuple(sorted(self.density.like))
        settings: Any = {
            "inverse_mass_matrix": {sites: begin["inverse_mass_matrix"]},
            "dense_mass": [sites] if begin["inverse_mass_matrix"].ndim == 2 else False,
            "adapt_mass_matrix": False,  # A short warm-up would replace it by a worse one.
            "step_size": self.density.size**-0.25,  # about that of a standard Gaussian of so many numbers
        } | options
        model = self.traced.fixed_model
        return NUTS(model if self.traced.discrete is None else marked(model), **settings), begin["init_params"]

    def save(self, path: str | Path) -> None:
        """Save the approximation and its verdict, without the model and the data: `load` puts them together again."""
        super().save(path)
        write(path, read(path) | {"decentred": list(self.decentred), "sites": sorted(self.density.like)})

    def to_arviz(self, key: Key | None = None, count: int = 1000) -> Any:
        """The posterior for ArviZ: draws, predictions, log likelihood, observed data, and the verdict."""
        return to_arviz(self, jax.random.key(0) if key is None else key, count)
