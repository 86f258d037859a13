"""BayesPy's models for bench_messages.py, and the common data: `python bayespy_peer.py MODEL SWEEPS` prints seconds.

BayesPy 0.6.6 needs NumPy 1 (`pip install bayespy==0.6.6 numpy==1.26.4 scipy==1.13.1`), so this file runs in an
interpreter of its own. A sweep also computes the bound, as ours does.
"""

import sys
import time

import numpy as np


def mixture_data(size=100_000, width=10, components=10):
    rng = np.random.default_rng(0)
    centres = 3 * rng.normal(size=(components, width))
    y = centres[rng.integers(components, size=size)] + rng.normal(size=(size, width))
    return y - y.mean(0)


def principal_data(size=1000, width=20, rank=5):
    """The data, and the initial loadings."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(size, rank)) @ rng.normal(size=(rank, width)) + 0.3 * rng.normal(size=(size, width))
    return y, rng.normal(size=(width, rank))


def mixture(k=10):
    from bayespy.inference import VB
    from bayespy.nodes import Categorical, Dirichlet, Gaussian, Mixture, Wishart

    y = mixture_data()
    size, width = y.shape
    weights = Dirichlet(0.1 * np.ones(k))
    z = Categorical(weights, plates=(size,))
    mean = Gaussian(np.zeros(width), 0.01 * np.eye(width), plates=(k,))
    precision = Wishart(width, np.eye(width), plates=(k,))
    observed = Mixture(z, Gaussian, mean, precision)
    observed.observe(y)
    z.initialize_from_value(np.random.default_rng(1).integers(k, size=size))
    return VB(mean, precision, weights, z, observed)


def principal():
    from bayespy.inference import VB
    from bayespy.nodes import Gamma, GaussianARD, SumMultiply

    y, start = principal_data()
    width, rank = start.shape
    latent = GaussianARD(0, 1, plates=(1, len(y)), shape=(rank,))
    scales = Gamma(1e-3, 1e-3, plates=(rank,))
    loadings = GaussianARD(0, scales, plates=(width, 1), shape=(rank,))
    noise = Gamma(1e-3, 1e-3)
    observed = GaussianARD(SumMultiply("d,d->", loadings, latent), noise)
    observed.observe(y.T)
    loadings.initialize_from_parameters(start[:, None], np.ones((width, 1, rank)))
    return VB(latent, loadings, scales, noise, observed)


def main(model, sweeps):
    engine, least = {"mixture": mixture, "principal": principal}[model](), np.inf
    for _ in range(int(sweeps)):
        began = time.perf_counter()
        engine.update(repeat=1, tol=-1, verbose=False)
        least = min(least, time.perf_counter() - began)
    print(least)


if __name__ == "__main__":
    main(*sys.argv[1:])
