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
import importlib.util
import os
import subprocess
import time
import warnings
from functools import partial
from pathlib import Path

import bayespy_peer
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from bayespy_peer import mixture_data, principal_data
from scipy.special import digamma
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture
from threadpoolctl import threadpool_limits
from timing import fastest

import bayesrule as blr
from bayesrule import factors

TOPICS, BATCH, TOLERANCE, LOCAL_STEPS = 20, 128, 1e-3, 100
PASSES, SEEDS = (1, 3, 10), 3  # of the held-out comparison


def both(name, run):
    """A peer with the threads it takes, and with one."""

    def alone(*arguments):
        with threadpool_limits(1):
            return run(*arguments)

    return {name: run, f"{name}, one thread": alone}


def iterations(fits, turns, bayespy=None):
    """The least seconds of one iteration: fits {name: (fit of so many steps, n)}, and (PYTHON, model, sweeps)."""
    best = {}
    keep = lambda times: best.update({name: min(seconds, best.get(name, np.inf)) for name, seconds in times.items()})
    for _ in range(turns):
        keep(fastest({(name, 0): partial(fit, 1) for name, (fit, _) in fits.items()}, 2))
        keep(fastest({(name, n): partial(fit, 1 + n) for name, (fit, n) in fits.items()}, 2))
        if bayespy is not None:
            keep({"BayesPy": by_bayespy(*bayespy), "BayesPy, one thread": by_bayespy(*bayespy, OMP_NUM_THREADS="1")})
    times = {name: (best.pop((name, n)) - best.pop((name, 0))) / n for name, (_, n) in fits.items()}
    return times | best


def by_bayespy(python, model, sweeps, **environment):
    command = [python, bayespy_peer.__file__, model, str(sweeps)]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def show(title, times, targets):
    """The times, and the ratio of each of ours to the faster way of each peer."""
    print(title)
    for name, seconds in times.items():
        print(f"  {name:<44}{1e3 * seconds:10.2f} ms")
    for peer, target in targets.items():
        theirs = [seconds for name, seconds in times.items() if name.startswith(peer)]
        for name in [name for name in times if name.startswith("ours")] if theirs else []:
            ratio = times[name] / min(theirs)
            verdict = "ok" if ratio <= target else "MISSED"
            print(f"  {f'{name} / {peer}':<54} ratio {ratio:7.4f}   target ≤ {target}   {verdict}")
    print(flush=True)


def our_mixture(rule, prior):
    """A fit of so many steps to the mixture's data."""
    y = mixture_data().astype(np.float32)
    k, width = 10, y.shape[1]
    means, scales = jnp.asarray(y[:k]), jnp.broadcast_to(jnp.eye(width), (k, width, width))
    components = blr.NormalWishart(means, jnp.ones(k), jnp.full(k, width + 1.0), scales)
    blocks = {"weights": blr.Dirichlet(jnp.full(k, 1.1)), "components": components}
    terms = {"y": factors.mixture("weights", factors.multivariate_normal("y", joint="components"))}
    if prior:
        belief = blr.NormalWishart(jnp.zeros(width), 1.0, float(width), jnp.eye(width))
        terms["weights"] = factors.prior("weights", blr.Dirichlet(jnp.full(k, 0.1)))
        terms["components"] = factors.prior("components", belief)
    return lambda steps: blr.fit(rule, blr.Model(blocks, terms), None, {"y": y}, steps=steps).q


def mixtures(turns, bayespy):
    y = mixture_data().astype(np.float32)
    ours = {"vmp": our_mixture(blr.vmp(order="parallel"), True), "em": our_mixture(blr.em(order="parallel"), False)}
    for way, kind, asked in (("vmp", BayesianGaussianMixture, bayespy), ("em", GaussianMixture, None)):

        def theirs(steps, kind=kind):
            return kind(n_components=10, max_iter=steps, tol=0, init_params="random_from_data", random_state=0).fit(y)

        fits = {f"ours, {way}": (ours[way], 20)} | {name: (run, 5) for name, run in both(kind.__name__, theirs).items()}
        times = iterations(fits, turns, asked and (asked, "mixture", 2))
        targets = {kind.__name__: 0.15} | ({"BayesPy": 0.02} if asked else {})
        show(f"Mixture of Gaussians, 100,000×10, 10 full covariances: an iteration of {way}", times, targets)
    return {f"mixture, {way}": fit for way, fit in ours.items()}


def our_principal(shared, double=False):
    """A fit of so many steps of principal components with ARD; the latent rows have one precision, or one each."""
    with jax.enable_x64(double):
        y, start = (jnp.asarray(x, float) for x in principal_data())
        size, rank = len(y), start.shape[1]
        blocks = {
            "loadings": blr.Gaussian(start, jnp.broadcast_to(jnp.eye(rank), (len(start), rank, rank))),
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


def principal(turns, bayespy):
    ours = {"shared precision": our_principal(True), "shared precision, float64": our_principal(True, double=True)}
    ours |= {"a precision for each row": our_principal(False)}
    fits = {f"ours, {way}": (fit, 200) for way, fit in ours.items()}
    times = iterations(fits, turns, bayespy and (bayespy, "principal", 50))
    show("Principal components with ARD, 1000×20, rank 5: an iteration of vmp", times, {"BayesPy": 0.1})
    return {f"principal components, {way}": fit for way, fit in ours.items()}


def corpus(data):
    """Counts of words, documents × vocabulary, in float32 and in a random order, and what they are."""
    rng = np.random.default_rng(0)
    if data is not None and data.is_dir():
        data = next(data.glob("ap_corpus/ap_corpus.npz"), None)
    if data is not None:
        file = np.load(data)
        parts = file["counts"].astype(np.float32), file["indices"].astype(np.int32), file["indptr"]
        counts = scipy.sparse.csr_matrix(parts, shape=(len(parts[2]) - 1, len(file["vocab"])))
    else:
        words = rng.dirichlet(np.full(5000, 0.1), TOPICS)
        lengths = rng.poisson(rng.gamma(4.0, 50.0, 2000)) + 10
        drawn = rng.multinomial(lengths, rng.dirichlet(np.full(TOPICS, 0.1), 2000) @ words)
        counts = scipy.sparse.csr_matrix(drawn.astype(np.float32))
    name = f"{'drawn documents' if data is None else 'AP corpus'}, {counts.shape[0]}×{counts.shape[1]}"
    return counts[rng.permutation(counts.shape[0])], name


def our_topics(counts):
    """SVI over the documents for so many passes, from a start drawn with a seed."""
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
    rate = lambda count: (10.0 + count) ** -0.7
    rule = blr.svi(rate, local_steps=LOCAL_STEPS, tolerance=TOLERANCE, together=16)

    def fit(passes, seed=0):
        start = np.random.default_rng(seed).gamma(100, 0.01, (TOPICS, vocabulary)).astype(np.float32)
        model = blr.Model({"topics": blr.Dirichlet(start)}, terms, local={"theta": blr.Dirichlet(jnp.ones(TOPICS))})
        steps, key = passes * -(-documents // BATCH), jax.random.key(seed)
        return blr.fit(rule, model, None, data, steps=steps, batch_size=BATCH, key=key).q["topics"].concentration

    return fit


def their_topics(counts, passes, seed=0):
    """scikit-learn's SVI: its topics after each pass."""
    order = np.random.default_rng(seed).permutation
    settings = {"learning_method": "online", "learning_offset": 9.0, "learning_decay": 0.7}  # its count starts at 1
    settings |= {"batch_size": BATCH, "total_samples": counts.shape[0], "random_state": seed}
    model = LatentDirichletAllocation(TOPICS, mean_change_tol=TOLERANCE, max_doc_update_iter=LOCAL_STEPS, **settings)
    return [model.partial_fit(counts[order(counts.shape[0])]).components_.copy() for _ in range(passes)]


def gensim_topics(counts):
    """gensim's SVI for so many passes."""
    from gensim.models import LdaModel

    edges = zip(counts.indptr[:-1], counts.indptr[1:], strict=True)
    documents = [list(zip(counts.indices[a:b].tolist(), counts.data[a:b].tolist(), strict=True)) for a, b in edges]
    settings = {"chunksize": BATCH, "offset": 10, "decay": 0.7, "eta": 1 / TOPICS, "eval_every": None}
    settings |= {"iterations": LOCAL_STEPS, "gamma_threshold": TOLERANCE, "random_state": 0}
    names = {number: str(number) for number in range(counts.shape[1])}
    return lambda passes: LdaModel(documents, TOPICS, names, passes=passes, **settings)


def topics(counts, name, repeats):
    ours = our_topics(counts)
    runs = {"ours, svi": ours} | both("scikit-learn", partial(their_topics, counts))
    if importlib.util.find_spec("gensim"):
        runs |= both("gensim", gensim_topics(counts))
    else:
        print("gensim is not run: it is not installed.\n")
    for passes in (1, 5):
        times = fastest({way: partial(run, passes) for way, run in runs.items()}, repeats)
        times = {way: seconds / passes for way, seconds in times.items()}
        title = f"Topics, {name}, {TOPICS} topics, batches of {BATCH}: a pass, of {passes} in one call"
        show(title, times, {"scikit-learn": 0.35, "gensim": 0.5})
    return {"topics, svi (a pass)": ours}


def held_out_bounds(components, counts):
    """scikit-learn's bound for new documents, per word: all of it, and without its term for the topics."""
    judge = LatentDirichletAllocation(TOPICS, mean_change_tol=1e-5, max_doc_update_iter=1000)
    judge.partial_fit(counts[:1])  # for its attributes
    judge.components_ = np.asarray(components, np.float64)
    totals = judge.components_.sum(1, keepdims=True)
    judge.exp_dirichlet_component_ = np.exp(digamma(judge.components_) - digamma(totals))
    rows = judge.transform(counts, normalize=False)
    whole, rest = (judge._approx_bound(counts[:n], rows[:n], sub_sampling=False) for n in (len(rows), 0))
    return np.array([whole, whole - rest]) / counts.sum()


def held_out(counts, name):
    """Nine documents of ten to learn from, the others to judge by; the same code judges both."""
    cut = counts.shape[0] * 9 // 10
    train, test = counts[:cut], counts[cut:].astype(np.float64)
    ours, bounds = our_topics(train), np.zeros((SEEDS, len(PASSES), 2, 2))
    for seed in range(SEEDS):
        theirs = their_topics(train, max(PASSES), seed)
        for place, passes in enumerate(PASSES):
            pair = ours(passes, seed), theirs[passes - 1]
            bounds[seed, place] = [held_out_bounds(topics, test) for topics in pair]
    print(f"Topics, {name}: bound per word of {test.shape[0]} held-out documents, {SEEDS} seeds; the documents' part")
    means, spreads = bounds.mean(0), bounds.std(0, ddof=1)
    for passes, mean, spread in zip(PASSES, means, spreads, strict=True):
        for way, (all_of_it, part), (first, second) in zip(("ours", "scikit-learn"), mean, spread, strict=True):
            print(f"  {passes:>2} passes, {way:<14} {all_of_it:8.4f} ± {first:.4f} {part:12.4f} ± {second:.4f}")
        gap, verdict = mean[0] - mean[1], "ok" if np.all(mean[0] >= mean[1] - spread.max(0)) else "MISSED"
        print(f"  {passes:>2} passes, difference    {gap[0]:+8.4f} {gap[1]:+21.4f}   target ≥ −spread   {verdict}")
    print(flush=True)


def first_calls(fits):
    """Tracing, compiling and one step (or pass), with nothing compiled before."""
    print("The first call")
    for name, fit in fits.items():
        jax.clear_caches()
        began = time.perf_counter()
        jax.block_until_ready(fit(1))
        seconds = time.perf_counter() - began
        print(f"  {name:<50}{seconds:6.2f} s   target ≤ 5   {'ok' if seconds <= 5 else 'MISSED'}", flush=True)


def main(data=None, bayespy=None, judged=False, repeats=5):
    jax.config.update("jax_enable_compilation_cache", False)
    warnings.simplefilter("ignore", ConvergenceWarning)  # one iteration is not meant to converge
    if bayespy is None:
        print("BayesPy is not run: name an interpreter that has it with --bayespy.\n")
    counts, name = corpus(data)
    fits = mixtures(repeats, bayespy) | principal(repeats, bayespy) | topics(counts, name, repeats)
    if judged:
        held_out(counts, name)
    first_calls(fits)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure message passing against its peers.")
    parser.add_argument("--data", type=Path, help="ap_corpus.npz, or a folder with ap_corpus/ap_corpus.npz")
    parser.add_argument("--bayespy", metavar="PYTHON", help="an interpreter with BayesPy 0.6.6")
    parser.add_argument("--held-out", action="store_true", help="also judge the topics by documents held out")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.data, arguments.bayespy, arguments.held_out, arguments.repeats)
