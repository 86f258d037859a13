"""Gaussian processes: classification of 1000 points compared with scikit-learn, counts, a Matérn chain of 10⁵ steps.

    python benchmarks/bench_gp.py [--repeats 5] [--long 100000]

Classification runs to convergence from the prior, with a fixed kernel: scikit-learn's Laplace approximation stops when
its objective improves by less than 1e-10; ours stops after a step whose predicted gain was less than 0.01 nats, which
leaves 1e-6 nats (Laplace) or 1e-3 nats (CVI) to gain. Complete calls are timed, compiled before; scikit-learn runs with
its default threads and with one, and the faster counts.
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import numpy as np
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF as PeerRBF
from sklearn.gaussian_process.kernels import ConstantKernel
from threadpoolctl import threadpool_limits
from timing import compare, fastest, first_call

import bayesrule as blr
from bayesrule import factors
from bayesrule.models import gp
from bayesrule.models.kernels import RBF, Matern32

SIZE = 1000


def classes():
    random = np.random.default_rng(0)
    x = random.normal(size=(SIZE, 2))
    return x, (np.sin(2 * x[:, 0]) + x[:, 1] + 0.5 * random.normal(size=SIZE) > 0).astype(float)


def counts():
    x = np.linspace(0, 10, SIZE)
    return x, np.random.default_rng(1).poisson(np.exp(1 + np.sin(2 * x))).astype(float)


def sklearn_classifier(threads=None):
    x, y = classes()
    model = GaussianProcessClassifier(ConstantKernel(4.0) * PeerRBF(1.0), optimizer=None)
    with threadpool_limits(threads):
        return model.fit(x, y).log_marginal_likelihood_value_


def our_fit(kernel, x, y, likelihood, double, **options):
    """A call that fits to convergence from the prior; `options` are those of the likelihood's factor."""
    with jax.enable_x64(double):
        model = gp.process(kernel, x, likelihood("y", {"f": None}, **options))

    def run():
        with jax.enable_x64(double):
            result = blr.fit(blr.cvi(1.0), model, None, {"y": y}, steps=50, tolerance=0.01)
            jax.block_until_ready(result.q)
        if result.reason != "converged":
            raise RuntimeError(f"This fit should converge, but it ended with {result.reason!r}.")
        return result

    return run


def show(title, times, peer=None, target=None):
    print(title)
    for name, seconds in times.items():
        print(f"  {name:<44}{1e3 * seconds:9.1f} ms")
    for name, seconds in times.items():
        if peer is not None and name.startswith("ours"):
            print(compare(name, seconds, "scikit-learn", peer, target))
    print(flush=True)


def classification(repeats):
    x, y = classes()
    runs = {"scikit-learn": sklearn_classifier, "scikit-learn, one thread": partial(sklearn_classifier, 1)}
    for double in (False, True):
        width = f"float{64 if double else 32}"
        fit = partial(our_fit, RBF(4.0, 1.0), x, y, factors.bernoulli_logit, double)
        runs |= {f"ours, Laplace, {width}": fit(points=blr.Delta()), f"ours, CVI, {width}": fit()}
    times = fastest(runs, repeats)
    peer = min(seconds for name, seconds in times.items() if name.startswith("scikit"))
    show(f"GP classification, N = {SIZE}, to convergence", times, peer, 0.5)
    return runs


def poisson(repeats):
    x, y = counts()
    runs = {
        f"ours, CVI, float{64 if double else 32}": our_fit(RBF(1.0, 0.7), x, y, factors.poisson_exp, double)
        for double in (False, True)
    }
    show(f"GP with Poisson counts, N = {SIZE}, to convergence", fastest(runs, repeats))
    return runs


def chains(longest, repeats):
    """A Matérn process as a chain: regression in one exact step, and Poisson counts to convergence."""
    sizes, times = (longest // 10, longest), {}
    for size in sizes:
        random = np.random.default_rng(2)
        x = np.sort(random.uniform(0, size / 100, size)).astype(np.float32)
        y = np.sin(x) + 0.3 * random.normal(size=size).astype(np.float32)
        exact = gp.regression(Matern32(), x, 0.1, through="chain")
        rates = gp.process(Matern32(), x, factors.poisson_exp("y", {"f": None}), through="chain")
        events = random.poisson(np.exp(np.sin(x))).astype(np.float32)
        runs = {
            "regression": lambda m=exact, y=y: blr.fit(blr.conjugate(), m, None, {"y": y}, steps=1).q,
            "counts": lambda m=rates, y=events: blr.fit(blr.cvi(1.0), m, None, {"y": y}, steps=30, tolerance=1e-2).q,
        }
        times[size] = fastest(runs, repeats)
        show(f"Matérn-3/2 chain, N = {size}, float32", times[size])
    growth = {name: times[sizes[1]][name] / times[sizes[0]][name] for name in times[sizes[0]]}
    print(
        f"Ten times the length takes {', '.join(f'{ratio:.1f} times as long ({n})' for n, ratio in growth.items())}.\n"
    )


def main(data=None, repeats=5, longest=100_000):
    jax.config.update("jax_enable_compilation_cache", False)
    ours = {name: run for name, run in classification(repeats).items() if name.startswith("ours")}
    ours |= {f"{name}, counts": run for name, run in poisson(repeats).items()}
    chains(longest, min(repeats, 3))
    for name, run in ours.items():
        print(first_call(name, lambda run=run: run().q), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure Gaussian processes against scikit-learn.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--long", type=int, default=100_000, help="steps of the longer chain")
    arguments = parser.parse_args()
    main(None, arguments.repeats, arguments.long)
