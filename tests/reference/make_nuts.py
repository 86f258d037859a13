"""Posterior moments by long runs of NumPyro's NUTS, for models that have no closed form.

    python tests/reference/make_nuts.py [MODEL …]

Writes `data/nuts_MODEL.json`: means and standard deviations of f at some places, their Monte Carlo standard errors, and
the worst split-R̂. Whitened parametrisations, fixed hyper-parameters, float64, four chains of 4000 draws after 1000.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

DATA = Path(__file__).parent / "data"
CHAINS, WARMUP, DRAWS = 4, 1000, 4000


def coal() -> tuple[Callable[[], Any], np.ndarray]:
    """Mining disasters in 333 bins of 0.334 years: counts ~ Poisson(e^f), f a Matérn-5/2 process (variance 1,
    lengthscale 20 years) around the log of the mean count."""
    times, counts = np.load(DATA / "gp.npz")["coal"].T
    scaled = np.sqrt(5) * np.abs(times[:, None] - times) / 20.0
    covariance = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    root = np.linalg.cholesky(covariance + 1e-10 * np.eye(len(times)))

    def model() -> None:
        white = numpyro.sample("white", dist.Normal(jnp.zeros(len(times)), 1.0).to_event(1))
        f = numpyro.deterministic("f", np.log(counts.mean()) + root @ white)
        numpyro.sample("counts", dist.Poisson(jnp.exp(f)), obs=counts)

    return model, np.arange(0, len(times), 12)


def volatility() -> tuple[Callable[[], Any], np.ndarray]:
    """Quarterly growth of the US real GDP, in per cent around its mean: N(0, e^f), f an AR(1) process around the log of
    the variance (coefficient 0.95, innovations of variance 0.09)."""
    from statsmodels.datasets import macrodata

    growth = 100 * np.diff(np.log(macrodata.load_pandas().data["realgdp"].to_numpy()))
    growth = growth - growth.mean()
    lags = np.abs(np.subtract.outer(np.arange(len(growth)), np.arange(len(growth))))
    root = np.linalg.cholesky(0.09 / (1 - 0.95**2) * 0.95**lags)

    def model() -> None:
        white = numpyro.sample("white", dist.Normal(jnp.zeros(len(growth)), 1.0).to_event(1))
        f = numpyro.deterministic("f", np.log(growth.var()) + root @ white)
        numpyro.sample("growth", dist.Normal(0.0, jnp.exp(0.5 * f)), obs=growth)

    return model, np.arange(0, len(growth), 7)


# Each gives a model whose site "f" is looked at, and the places in f that are kept.
MODELS: dict[str, Callable[[], tuple[Callable[[], Any], np.ndarray]]] = {
    "coal": coal,
    "volatility": volatility,
}


def moments(draws: np.ndarray) -> dict[str, Any]:
    """Draws (chains, draws, places): means and standard deviations, and how far off they may be."""
    mean, sd = draws.mean((0, 1)), draws.std((0, 1))
    squares = (draws - mean) ** 2
    mean_error = sd / np.sqrt(effective_sample_size(draws))
    sd_error = squares.std((0, 1)) / np.sqrt(effective_sample_size(squares)) / (2 * sd)
    actual = {"mean": mean, "sd": sd, "mean_error": mean_error, "sd_error": sd_error}
    rounded = {name: [float(f"{x:.6g}") for x in values] for name, values in actual.items()}
    return rounded | {"worst_rhat": round(float(split_gelman_rubin(draws).max()), 4)}


def main(names: list[str]) -> None:
    numpyro.enable_x64()
    for name in names or list(MODELS):
        model, places = MODELS[name]()
        length = {"num_warmup": WARMUP, "num_samples": DRAWS, "num_chains": CHAINS}
        sampler = MCMC(NUTS(model), **length, chain_method="sequential", progress_bar=False)
        sampler.run(jax.random.key(0))
        draws = np.asarray(sampler.get_samples(group_by_chain=True)["f"][..., places])
        made = f"NumPyro {numpyro.__version__}, {CHAINS} chains of {DRAWS} draws after {WARMUP}"
        record = {"made_by": made, "places": places.tolist()} | moments(draws)
        (DATA / f"nuts_{name}.json").write_text(json.dumps(record) + "\n")
        print(name, record["worst_rhat"], np.max(np.divide(record["mean_error"], record["sd"])))


if __name__ == "__main__":
    main(sys.argv[1:])
