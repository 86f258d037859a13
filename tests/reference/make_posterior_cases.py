"""Data and posterior moments of the synthetic cases that have no closed form, by NumPyro's NUTS.

    python tests/reference/make_posterior_cases.py [CASE …]      writes posterior_cases.json
    python tests/reference/make_posterior_cases.py --verify      compares the models of posteriordb with its moments

Draws each data set from its seed and keeps it beside the moments, because they belong together. Float64, four chains;
standard errors come from the effective sample sizes of the values and of their squares. Names leave all other cases in
the file as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from posterior_case import Case, Moments, Space, judge  # noqa: E402  (found through the path above)

CHAINS, WARMUP, DRAWS = 4, 1000, 2500


def simulate_gp_poisson(rng: np.random.Generator) -> dict[str, Any]:
    x = np.linspace(0, 10, 15)
    return {"x": x, "counts": rng.poisson(np.exp(1.2 + np.sin(0.9 * x)))}


def simulate_arma_short(rng: np.random.Generator) -> dict[str, Any]:
    noise = rng.normal(size=41)
    y = [0.0]
    for before, now in itertools.pairwise(noise):
        y.append(0.5 * y[-1] + now - 0.3 * before)
    return {"y": np.array(y[1:])}


def simulate_garch(rng: np.random.Generator) -> dict[str, Any]:
    y, variance = [], 1.0
    for z in rng.normal(size=250):
        y.append(0.3 + np.sqrt(variance) * z)
        variance = 0.2 + 0.25 * (y[-1] - 0.3) ** 2 + 0.6 * variance
    return {"y": np.array(y), "first": 1.0}


def simulate_stochastic_volatility(rng: np.random.Generator) -> dict[str, Any]:
    h = [-0.5]
    for z in rng.normal(size=99):
        h.append(-0.5 + 0.95 * (h[-1] + 0.5) + 0.3 * z)
    return {"y": np.exp(np.array(h) / 2) * rng.normal(size=100)}


def simulate_hierarchical_poisson_500(rng: np.random.Generator) -> dict[str, Any]:
    return {"counts": rng.poisson(np.exp(rng.normal(1.5, 0.8, size=500)))}


def simulate_hierarchical_poisson_100(rng: np.random.Generator) -> dict[str, Any]:
    """Few counts, and groups that hardly differ."""
    return {"counts": rng.poisson(np.exp(rng.normal(-0.5, 0.3, size=100)))}


def simulate_random_slopes(rng: np.random.Generator) -> dict[str, Any]:
    group = np.repeat(np.arange(20), 6)
    x = rng.normal(size=120)
    a, b = rng.normal(1.0, 1.0, size=20), rng.normal(-0.5, 0.3, size=20)
    return {"group": group, "x": x, "y": a[group] + b[group] * x + 0.7 * rng.normal(size=120), "groups": 20}


def simulate_lotka_volterra(rng: np.random.Generator) -> dict[str, Any]:
    from scipy.integrate import solve_ivp

    times = np.array([1, 3, 5, 7, 9, 11, 13, 14])
    slope = lambda t, z: [z[0] * (0.6 - 0.3 * z[1]), z[1] * (0.2 * z[0] - 0.8)]
    path = solve_ivp(slope, (0, 14), [5.0, 1.5], t_eval=times, rtol=1e-9, atol=1e-9).y.T
    return {"times": times, "y": path * np.exp(0.15 * rng.normal(size=path.shape))}


def simulate_ordered_mixture(rng: np.random.Generator) -> dict[str, Any]:
    first = rng.uniform(size=80) < 0.6
    return {"y": np.where(first, -1.5, 1.7) + 0.7 * rng.normal(size=80)}


def simulate_hmm_poisson(rng: np.random.Generator) -> dict[str, Any]:
    states = [0]
    for u in rng.uniform(size=79):
        states.append(states[-1] if u < (0.9, 0.8)[states[-1]] else 1 - states[-1])
    return {"counts": rng.poisson(np.array([2.0, 8.0])[states])}


def simulate_robust_regression(rng: np.random.Generator) -> dict[str, Any]:
    X = np.concatenate([np.ones((60, 1)), rng.normal(size=(60, 3))], axis=1)
    return {"X": X, "y": X @ [0.5, 1.0, -1.0, 0.0] + 0.5 * rng.standard_t(3, size=60)}


def simulate_negative_binomial(rng: np.random.Generator) -> dict[str, Any]:
    X = np.concatenate([np.ones((60, 1)), rng.normal(size=(60, 2))], axis=1)
    rate = np.exp(X @ [1.0, 0.5, -0.3]) * rng.gamma(3.0, 1 / 3.0, size=60)
    return {"X": X, "counts": rng.poisson(rate)}


def simulate_correlations(rng: np.random.Generator) -> dict[str, Any]:
    covariance = np.array([[1.0, 0.7, 0.0], [0.7, 2.0, -0.4], [0.0, -0.4, 0.5]])
    return {"y": rng.multivariate_normal(np.zeros(3), covariance, size=40)}


def simulate_rasch(rng: np.random.Generator) -> dict[str, Any]:
    person, item = (part.ravel() for part in np.meshgrid(np.arange(40), np.arange(8), indexing="ij"))
    ability, difficulty = 0.9 * rng.normal(size=40), rng.normal(size=8)
    y = rng.uniform(size=320) < 1 / (1 + np.exp(difficulty[item] - ability[person]))
    return {"person": person, "item": item, "y": y.astype(int), "persons": 40, "items": 8}


# (seed, simulator, draws of each of the four chains)
SIMULATED: dict[str, tuple[int, Callable[[np.random.Generator], dict[str, Any]], int]] = {
    "gp_poisson": (11, simulate_gp_poisson, 2500),
    "arma_short": (12, simulate_arma_short, 10000),
    "garch": (13, simulate_garch, 4000),
    "stochastic_volatility": (14, simulate_stochastic_volatility, 5000),
    "hierarchical_poisson_500": (15, simulate_hierarchical_poisson_500, 2500),
    "hierarchical_poisson_100": (16, simulate_hierarchical_poisson_100, 4000),
    "random_slopes": (17, simulate_random_slopes, 12000),
    "lotka_volterra": (18, simulate_lotka_volterra, 2500),
    "ordered_mixture": (19, simulate_ordered_mixture, 4000),
    "hmm_poisson": (20, simulate_hmm_poisson, 4000),
    "robust_regression": (21, simulate_robust_regression, 4000),
    "negative_binomial": (22, simulate_negative_binomial, 4000),
    "correlations": (23, simulate_correlations, 4000),
    "rasch": (24, simulate_rasch, 4000),
}


def storable(value: Any) -> Any:
    """Arrays as lists, numbers with seven significant digits."""
    if isinstance(value, np.ndarray):
        return [storable(x) for x in value]
    return float(f"{value:.7g}") if isinstance(value, float) else int(value) if isinstance(value, np.integer) else value


def draw(case: Case, key: jax.Array, noncentred: tuple[str, ...] = (), draws: int = DRAWS) -> dict[str, np.ndarray]:
    """NUTS: site → (chains, draws, …). Sites named in `noncentred` are sampled as (x − location) / scale."""
    model, args, kwargs = case.as_numpyro()
    if noncentred:
        model = numpyro.handlers.reparam(model, config={name: LocScaleReparam(0.0) for name in noncentred})
    length = {"num_warmup": WARMUP, "num_samples": draws, "num_chains": CHAINS}
    kernel = NUTS(model, target_accept_prob=0.9, dense_mass=case.dimension <= 20)
    sampler = MCMC(kernel, **length, chain_method="vectorized", progress_bar=False)
    sampler.run(key, *args, **kwargs)
    return {name: np.asarray(value) for name, value in sampler.get_samples(group_by_chain=True).items()}


def moments(case: Case, draws: dict[str, np.ndarray], space: Space) -> tuple[Moments, float]:
    """Moments of a case's quantities, their standard errors, and the worst split-R̂."""
    flat = {name: value.reshape(-1, *value.shape[2:]) for name, value in draws.items()}
    values = np.asarray(case.quantities[space](flat))
    values = values.reshape(CHAINS, -1, values.shape[1])
    mean, sd = values.mean((0, 1)), values.std((0, 1))
    squares = (values - mean) ** 2
    mean_error = sd / np.sqrt(effective_sample_size(values))
    sd_error = squares.std((0, 1)) / np.sqrt(effective_sample_size(squares)) / (2 * sd)
    worst_rhat = float(np.max(split_gelman_rubin(values)))
    return Moments(case.reference[space].names, mean, sd, mean_error, sd_error), worst_rhat


def verify(names: list[str]) -> None:
    """Print how far NUTS on our models is from the published moments, in standard errors of the difference."""
    from posteriordb_models import read_cases

    print(f"{'case':<28}{'mean, sd':>10}{'in s.e.':>9}{'sd, %':>9}{'in s.e.':>9}{'R̂':>8}{'s':>7}")
    for case in read_cases():
        if names and case.name not in names:
            continue
        began = time.perf_counter()
        noncentred = ("theta",) if case.name == "eight_schools_centered" else ()
        draws = draw(case, jax.random.key(1), noncentred)
        for space, true in case.reference.items():
            found, rhat = moments(case, draws, space)
            errors = judge(case, found, space)
            z_mean = np.max(np.abs(found.mean - true.mean) / np.hypot(found.mean_error, true.mean_error))
            z_sd = np.max(np.abs(found.sd - true.sd) / np.hypot(found.sd_error, true.sd_error))
            numbers = f"{errors.mean:10.4f}{z_mean:9.1f}{100 * errors.sd:9.2f}{z_sd:9.1f}{rhat:8.4f}"
            print(f"{case.name:<28}{numbers}{time.perf_counter() - began:7.1f}  {space}", flush=True)


def make(names: list[str]) -> None:
    """Sample the named cases, or all, and write them into the file of references."""
    from synthetic_posteriors import NONCENTRED, REFERENCE, SAMPLED, sampled_case

    if set(SIMULATED) != set(SAMPLED):
        raise ValueError(f"Cases without a simulator, or the reverse: {set(SIMULATED) ^ set(SAMPLED)}")
    records = json.loads(REFERENCE.read_text()) if REFERENCE.exists() else {}
    for name in names or list(SIMULATED):
        began = time.perf_counter()
        seed, simulate, length = SIMULATED[name]
        data = {key: storable(value) for key, value in simulate(np.random.default_rng(seed)).items()}
        case = sampled_case(name, {"data": data})
        draws = draw(case, jax.random.key(seed), NONCENTRED.get(name, ()), length)
        flat = {site: value.reshape(-1, *value.shape[2:]) for site, value in draws.items()}
        made = f"NumPyro {numpyro.__version__}, NUTS, {CHAINS} chains of {length} draws after {WARMUP}"
        record: dict[str, Any] = {"made_by": made, "data": data}
        worst = []
        for space, scalars in case.quantities.items():
            found, rhat = moments(case, draws, space)
            worst.append((np.max(found.mean_error / found.sd), np.max(found.sd_error / found.sd), rhat))
            record[space] = {"names": scalars.names(flat)} | {
                what: storable(getattr(found, what)) for what in ("mean", "sd", "mean_error", "sd_error")
            }
        record["worst_rhat"] = round(max(rhat for *_, rhat in worst), 4)
        records[name] = record
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(records[key])}" for key in SIMULATED if key in records)
        REFERENCE.write_text("{\n" + lines + "\n}\n")
        mean, sd, rhat = np.max(worst, axis=0)
        seconds = time.perf_counter() - began
        print(f"{name:<28}s.e. of means {mean:.4f} sd, of sds {sd:.4f} sd, R̂ {rhat:.4f}, {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE")
    parser.add_argument("--verify", action="store_true")
    arguments = parser.parse_args()
    numpyro.enable_x64()
    if arguments.verify:
        verify(arguments.names)
    else:
        make(arguments.names)


if __name__ == "__main__":
    main()
