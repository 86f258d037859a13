"""Message passing: mixtures and principal components by VMP and EM, topics by SVI; scikit-learn, gensim, BayesPy.

    python benchmarks/bench_messages.py [--data ap_corpus.npz] [--bayespy PYTHON] [--held-out] [--repeats 5]

One iteration is a difference: the least time of a fit of 1 + n steps less that of one step, over n. The peers on NumPy
run with as many threads as they like and with one, and the faster counts. BayesPy (0.6.6, float64) needs NumPy 1, so it
runs in an interpreter of its own (`--bayespy`), in turns with ours. A pass over the documents is a whole call from a
fresh start, compiled before. `--data` is the corpus of lda-c as CSR arrays (indptr, indices, counts, vocab), or a
folder with ap_corpus/ap_corpus.npz; without it documents are drawn. gensim runs where it is installed.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import time
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture
from threadpoolctl import threadpool_limits
from timing import fastest

import bayesrule as blr
from bayesrule import factors

TOPICS, BATCH, TOLERANCE, LOCAL_STEPS = 20, 128, 1e-3, 100
PASSES, SEEDS = (1, 3, 10), 3  # of the held-out comparison
FIRST_CALL = 5.0  # seconds


def mixture_data(size=100_000, width=10, components=10):
    rng = np.random.default_rng(0)
    centres = 3 * rng.normal(size=(components, width))
    y = centres[rng.integers(components, size=size)] + rng.normal(size=(size, width))
    return y - y.mean(0)


def principal_data(size=1000, width=20, rank=5):
    rng = np.random.default_rng(0)
    y = rng.normal(size=(size, rank)) @ rng.normal(size=(rank, width)) + 0.3 * rng.normal(size=(size, width))
    return y, rng.normal(size=(width, rank))


def bayespy_seconds(model, sweeps):
    """The least time of a sweep (each computes the bound, as ours do); the source of this is sent to `--bayespy`."""
    import time

    from bayespy.inference import VB
    from bayespy.nodes import Categorical, Dirichlet, Gamma, Gaussian, GaussianARD, Mixture, SumMultiply, Wishart

    if model == "mixture":
        y, k = mixture_data(), 10
        weights = Dirichlet(0.1 * np.ones(k))
        z = Categorical(weights, plates=(len(y),))
        mean = Gaussian(np.zeros(y.shape[1]), 0.01 * np.eye(y.shape[1]), plates=(k,))
        precision = Wishart(y.shape[1], np.eye(y.shape[1]), plates=(k,))
        observed = Mixture(z, Gaussian, mean, precision)
        observed.observe(y)
        z.initialize_from_value(np.random.default_rng(1).integers(k, size=len(y)))
        nodes = mean, precision, weights, z
    else:
        y, start = principal_data()
        latent = GaussianARD(0, 1, plates=(1, len(y)), shape=start.shape[1:])
        scales = Gamma(1e-3, 1e-3, plates=start.shape[1:])
        loadings = GaussianARD(0, scales, plates=(len(start), 1), shape=start.shape[1:])
        noise = Gamma(1e-3, 1e-3)
        observed = GaussianARD(SumMultiply("d,d->", loadings, latent), noise)
        observed.observe(y.T)
        loadings.initialize_from_parameters(start[:, None], np.ones((len(start), 1, start.shape[1])))
        nodes = latent, loadings, scales, noise
    engine, times = VB(*nodes, observed), []
    for _ in range(sweeps):
        began = time.perf_counter()
        engine.update(repeat=1, tol=-1, verbose=False)
        times.append(time.perf_counter() - began)
    return min(times)


def both(name, run):
    """A peer with the threads it takes, and with one."""

    def alone(*arguments):
        with threadpool_limits(1):
            return run(*arguments)

    return {name: run, f"{name}, one thread": alone}


def iterations(fits, turns, bayespy=None):
    """The least seconds of one iteration. `fits` are {name: (fit of so many steps, n)}, `bayespy` an interpreter, a
    model and its sweeps."""
    best = {}

    def keep(times):
        best.update({name: min(seconds, best.get(name, np.inf)) for name, seconds in times.items()})

    for _ in range(turns):
        keep(fastest({(name, 0): partial(fit, 1) for name, (fit, _) in fits.items()}, 2))
        keep(fastest({(name, n): partial(fit, 1 + n) for name, (fit, n) in fits.items()}, 2))
        if bayespy is not None:
            keep({"BayesPy": by_bayespy(*bayespy), "BayesPy, one thread": by_bayespy(*bayespy, OMP_NUM_THREADS="1")})
    times = {name: (best.pop((name, n)) - best.pop((name, 0))) / n for name, (_, n) in fits.items()}
    return times | best


def by_bayespy(python, model, sweeps, **environment):
    sources = map(inspect.getsource, (mixture_data, principal_data, bayespy_seconds))
    program = "\n".join(["import numpy as np", *sources, f"print(bayespy_seconds({model!r}, {sweeps}))"])
    command, environment = [python, "-c", program], os.environ | environment
    return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def show(title, times, targets):
    """The times, and the ratio of each of ours to the faster way of each peer."""
    print(title)
    for name, seconds in times.items():
        print(f"  {name:<44}{1e3 * seconds:10.2f} ms")
    for peer, target in targets.items():
        theirs = [seconds for name, seconds in times.items() if name.startswith(peer)]
        if not theirs:
            print(f"  {peer}: not run")
            continue
        for name in (name for name in times if name.startswith("ours")):
            ratio = times[name] / min(theirs)
            verdict = "ok" if ratio <= target else "MISSED"
            print(f"  {f'{name} / {peer}':<54} ratio {ratio:7.4f}   target ≤ {target}   {verdict}")
    print(flush=True)


def our_mixture(rule, prior):
    """A fit of so many steps to the mixture's data."""
    y = mixture_data().astype(np.float32)
    k, width = 10, y.shape[1]
    means = jnp.asarray(y[np.random.default_rng(1).choice(len(y), k, replace=False)])
    scales = jnp.broadcast_to(jnp.eye(width), (k, width, width))
    blocks = {
        "weights": blr.Dirichlet(jnp.full(k, 1.1)),
        "components": blr.NormalWishart(means, jnp.ones(k), jnp.full(k, width + 1.0), scales),
    }
    terms = {"y": factors.mixture("weights", factors.multivariate_normal("y", joint="components"))}
    if prior:
        components = blr.NormalWishart(jnp.zeros(width), 1.0, float(width), jnp.eye(width))
        terms["weights"] = factors.prior("weights", blr.Dirichlet(jnp.full(k, 0.1)))
        terms["components"] = factors.prior("components", components)
    model = blr.Model(blocks, terms)
    return lambda steps: blr.fit(rule, model, None, {"y": y}, steps=steps).q


def their_mixture(kind, y, steps):
    return kind(n_components=10, max_iter=steps, tol=0, init_params="random_from_data", random_state=0).fit(y)


def mixtures(ours, turns, bayespy):
    y = mixture_data().astype(np.float32)
    peers = BayesianGaussianMixture, GaussianMixture
    for name, kind in zip(("vmp", "em"), peers, strict=True):
        runs = both(kind.__name__, partial(their_mixture, kind, y))
        fits = {f"ours, {name}": (ours[name], 20)} | {peer: (run, 5) for peer, run in runs.items()}
        asked = (bayespy, "mixture", 2) if bayespy and name == "vmp" else None
        targets = {kind.__name__: 0.15} | ({"BayesPy": 0.02} if name == "vmp" else {})
        title = f"Mixture of Gaussians, 100,000×10, 10 components with full covariances: an iteration of {name}"
        show(title, iterations(fits, turns, asked), targets)


def our_principal(shared, double=False):
    """A fit of so many steps of principal components with ARD; the latent rows have one precision, or one each."""
    with jax.enable_x64(double):
        y, start = (jnp.asarray(x, float) for x in principal_data())
        size, (width, rank) = len(y), start.shape
        blocks = {
            "loadings": blr.Gaussian(start, jnp.broadcast_to(jnp.eye(rank), (width, rank, rank))),
            "scales": blr.Gamma(jnp.ones(rank), 1.0),
            "noise": blr.Gamma(1.0, 1.0),
        }
        terms = {
            "scales": factors.prior("scales", blr.Gamma(jnp.full(rank, 1e-3), 1e-3)),
            "noise": factors.prior("noise", blr.Gamma(1e-3, 1e-3)),
            "loadings": factors.gaussian("loadings", precision="scales"),
            "y": factors.bilinear("y", "latent", "loadings", precision="noise"),
        }
        if shared:
            blocks["latent"] = blr.SharedGaussian(jnp.zeros((size, rank)), jnp.eye(rank))
            model = blr.Model(blocks, terms | {"latent": factors.gaussian("latent", precision=1.0)}, size=size)
        else:
            row = blr.Gaussian(jnp.zeros(rank), jnp.eye(rank))
            terms["latent"] = factors.prior("latent", row)
            model = blr.Model(blocks, terms, local={"latent": row}, size=size)
    rule = blr.vmp(order=["latent", "loadings", "scales", "noise"])

    def fit(steps):
        with jax.enable_x64(double):
            return blr.fit(rule, model, None, {"y": y}, steps=steps).q

    return fit


def corpus(data):
    """Counts of words, documents × vocabulary, in float32 and in a random order, and what they are."""
    rng = np.random.default_rng(0)
    data = data and (data / "ap_corpus" / "ap_corpus.npz" if data.is_dir() else data)
    if data and data.exists():
        with np.load(data) as file:
            parts = file["counts"].astype(np.float32), file["indices"].astype(np.int32), file["indptr"]
            counts = scipy.sparse.csr_matrix(parts, shape=(len(parts[2]) - 1, len(file["vocab"])))
    else:
        words = rng.dirichlet(np.full(5000, 0.1), TOPICS)
        lengths = rng.poisson(rng.gamma(4.0, 50.0, 2000)) + 10
        drawn = rng.multinomial(lengths, rng.dirichlet(np.full(TOPICS, 0.1), 2000) @ words)
        counts = scipy.sparse.csr_matrix(drawn.astype(np.float32))
    name = "AP corpus" if data and data.exists() else "drawn documents"
    return counts[rng.permutation(counts.shape[0])], f"{name}, {counts.shape[0]}×{counts.shape[1]}"


def rate(count):
    return (10.0 + count) ** -0.7


def our_topics(counts):
    """SVI over the documents for so many passes (or steps), from a start drawn with a seed."""
    documents, vocabulary = counts.shape
    lengths = np.diff(counts.indptr)
    filled = np.arange(lengths.max()) < lengths[:, None]
    words, numbers = np.zeros(filled.shape, np.int32), np.zeros(filled.shape, np.float32)
    words[filled], numbers[filled] = counts.indices, counts.data
    data = {"word": blr.Ragged(words, lengths), "count": blr.Ragged(numbers, lengths)}
    terms = {
        "topics": factors.prior("topics", blr.Dirichlet(jnp.full(vocabulary, 1 / TOPICS))),
        "theta": factors.prior("theta", blr.Dirichlet(jnp.full(TOPICS, 1 / TOPICS))),
        "words": factors.words("count", "word", documents="theta", topics="topics"),
    }
    local = {"theta": blr.Dirichlet(jnp.ones(TOPICS))}
    rule = blr.svi(rate, local_steps=LOCAL_STEPS, tolerance=TOLERANCE, together=16)

    def fit(passes, seed=0, steps=None):
        start = np.random.default_rng(seed).gamma(100, 0.01, (TOPICS, vocabulary)).astype(np.float32)
        model = blr.Model({"topics": blr.Dirichlet(start)}, terms, local=local)
        steps, key = steps or passes * -(-documents // BATCH), jax.random.key(seed)
        return blr.fit(rule, model, None, data, steps=steps, batch_size=BATCH, key=key).q["topics"].concentration

    return fit


def their_topics(counts, passes, seed=0):
    """scikit-learn's SVI: its topics after each pass."""
    rng = np.random.default_rng(seed)
    model = LatentDirichletAllocation(
        TOPICS,
        learning_method="online",
        learning_offset=9.0,  # its count starts at 1
        batch_size=BATCH,
        mean_change_tol=TOLERANCE,
        max_doc_update_iter=LOCAL_STEPS,
        total_samples=counts.shape[0],
        random_state=seed,
    )
    return [model.partial_fit(counts[rng.permutation(counts.shape[0])]).components_.copy() for _ in range(passes)]


def gensim_topics(counts):
    """gensim's SVI for so many passes, or None where it is not installed."""
    try:
        from gensim.models import LdaModel
    except ImportError:
        return None
    edges = zip(counts.indptr[:-1], counts.indptr[1:], strict=True)
    documents = [list(zip(counts.indices[a:b].tolist(), counts.data[a:b].tolist(), strict=True)) for a, b in edges]
    settings = {"chunksize": BATCH, "offset": 10, "decay": 0.7, "eta": 1 / TOPICS, "eval_every": None}
    settings |= {"iterations": LOCAL_STEPS, "gamma_threshold": TOLERANCE, "random_state": 0}
    names = {number: str(number) for number in range(counts.shape[1])}
    return lambda passes: LdaModel(documents, TOPICS, names, passes=passes, **settings)


def topics(counts, name, ours, repeats):
    runs = {"ours, svi": ours} | both("scikit-learn", partial(their_topics, counts))
    gensim = gensim_topics(counts)
    if gensim is not None:
        runs |= both("gensim", gensim)
    for passes in (1, 5):
        times = fastest({name: partial(run, passes) for name, run in runs.items()}, repeats)
        title = f"Topics, {name}, {TOPICS} topics, batches of {BATCH}: a pass of {passes}"
        per_pass = {name: seconds / passes for name, seconds in times.items()}
        show(title, per_pass, {"scikit-learn": 0.35, "gensim": 0.5})


def held_out_bounds(components, counts):
    """scikit-learn's bound for new documents, per word: all of it, and without its term for the topics."""
    judge = LatentDirichletAllocation(TOPICS, mean_change_tol=1e-5, max_doc_update_iter=1000)
    judge.partial_fit(counts[:1])  # for its attributes
    judge.components_ = np.asarray(components, np.float64)
    judge.exp_dirichlet_component_ = np.exp(blr.Dirichlet(judge.components_).expectation())
    rows = judge.transform(counts, normalize=False)
    whole, rest = (judge._approx_bound(counts[:n], rows[:n], sub_sampling=False) for n in (len(rows), 0))
    return np.array([whole, whole - rest]) / counts.sum()


def held_out(counts, name):
    """Nine documents of ten to learn from, the others to judge by; the same code judges both."""
    cut = counts.shape[0] * 9 // 10
    train, test = counts[:cut], counts[cut:].astype(np.float64)
    ours, found = our_topics(train), {}
    for seed in range(SEEDS):
        theirs = their_topics(train, max(PASSES), seed)
        for passes in PASSES:
            for way, topics in (("ours", ours(passes, seed)), ("scikit-learn", theirs[passes - 1])):
                found.setdefault((passes, way), []).append(held_out_bounds(topics, test))
    print(f"Topics, {name}: bound per word of the {test.shape[0]} documents held out, {SEEDS} seeds")
    for passes in PASSES:
        both_ways = [np.array(found[passes, way]) for way in ("ours", "scikit-learn")]
        for way, values in zip(("ours", "scikit-learn"), both_ways, strict=True):
            (whole, part), (spread, part_spread) = values.mean(0), values.std(0, ddof=1)
            said = f"{whole:8.4f} ± {spread:.4f}   of the documents alone {part:8.4f} ± {part_spread:.4f}"
            print(f"  {passes:>2} passes, {way:<14} {said}")
        gap, spread = both_ways[0].mean(0) - both_ways[1].mean(0), np.max([v.std(0, ddof=1) for v in both_ways], axis=0)
        verdict = "ok" if np.all(gap >= -spread) else "MISSED"
        print(f"  {passes:>2} passes, ours less theirs {gap[0]:+.4f}, {gap[1]:+.4f}   target ≥ −spread   {verdict}")
    print(flush=True)


def first_calls(runs):
    """Tracing, compiling and one step, with nothing compiled before."""
    print("The first call, one step")
    for name, run in runs.items():
        jax.clear_caches()
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds = time.perf_counter() - began
        verdict = "ok" if seconds <= FIRST_CALL else "MISSED"
        print(f"  {name:<44}{seconds:10.2f} s    target ≤ {FIRST_CALL}   {verdict}", flush=True)


def main(data=None, bayespy=None, judged=False, repeats=5):
    jax.config.update("jax_enable_compilation_cache", False)
    warnings.simplefilter("ignore", ConvergenceWarning)  # one iteration is not meant to converge
    if bayespy is None:
        print("BayesPy is not run: name an interpreter that has it with --bayespy.\n")
    mixture = {"vmp": our_mixture(blr.vmp(order="parallel"), True), "em": our_mixture(blr.em(order="parallel"), False)}
    components = {
        "ours, shared precision": our_principal(True),
        "ours, shared precision, float64": our_principal(True, double=True),
        "ours, a precision for each row": our_principal(False),
    }
    counts, name = corpus(data)
    svi = our_topics(counts)

    mixtures(mixture, repeats, bayespy)
    asked = (bayespy, "principal", 50) if bayespy else None
    times = iterations({way: (fit, 200) for way, fit in components.items()}, repeats, asked)
    show("Principal components with ARD, 1000×20, rank 5: an iteration of vmp", times, {"BayesPy": 0.1})
    topics(counts, name, svi, repeats)
    if judged:
        held_out(counts, name)
    calls = {f"mixture, {way}": fit for way, fit in mixture.items()}
    calls |= {f"principal components, {way.removeprefix('ours, ')}": fit for way, fit in components.items()}
    first_calls({way: partial(fit, 1) for way, fit in calls.items()} | {"topics, svi": partial(svi, 0, steps=1)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure message passing against its peers.")
    parser.add_argument("--data", type=Path, help="ap_corpus.npz, or a folder with ap_corpus/ap_corpus.npz")
    parser.add_argument("--bayespy", metavar="PYTHON", help="an interpreter with BayesPy 0.6.6")
    parser.add_argument("--held-out", action="store_true", help="also judge the topics by documents held out")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.data, arguments.bayespy, arguments.held_out, arguments.repeats)
