"""Message passing, compared with scikit-learn, gensim and BayesPy: mixtures and PCA by VMP and EM, topics by SVI.

    python benchmarks/bench_messages.py [--data ap_corpus.npz] [--bayespy PYTHON] [--held-out] [--repeats 5]

The time of an iteration is a difference (see `timing.seconds_per_iteration`). The peers on NumPy run with their default
threads and with one, and the faster counts. BayesPy (0.6.6, float64) needs NumPy 1, so it runs in an interpreter of its
own (`--bayespy`), in turns with ours. A pass over the documents is a complete call from a new start, compiled before.
`--data` is the corpus of lda-c as CSR arrays (indptr, indices, counts, vocab), or a folder with
ap_corpus/ap_corpus.npz; without it documents are simulated. gensim runs if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
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
from timing import compare, fastest, first_call, seconds_per_iteration

import bayesrule as blr
from bayesrule import factors

TOPICS, BATCH, TOLERANCE, LOCAL_STEPS = 20, 128, 1e-3, 100
PASSES, SEEDS = (1, 3, 10), 3  # Of the comparison on held-out documents.


def by_threads(name, run):
    """A peer with its default threads, and with one."""

    def with_one_thread(*arguments):
        with threadpool_limits(1):
            return run(*arguments)

    return {name: run, f"{name}, one thread": with_one_thread}


def iterations(fits, turns, bayespy=None):
    """The least seconds of one iteration of each fit, and of BayesPy's (PYTHON, model, sweeps), in turns."""
    if bayespy is None:
        return seconds_per_iteration(fits, 2 * turns)
    best = {}
    for _ in range(turns):
        times = seconds_per_iteration(fits, 2)
        times |= {"BayesPy": by_bayespy(*bayespy), "BayesPy, one thread": by_bayespy(*bayespy, OMP_NUM_THREADS="1")}
        best = {name: min(seconds, best.get(name, np.inf)) for name, seconds in times.items()}
    return best


def by_bayespy(python, model, sweeps, **environment):
    command = [python, bayespy_peer.__file__, model, str(sweeps)]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def show(title, times, targets):
    """Print the times, and the ratio of each of ours to the faster variant of each peer."""
    print(title)
    for name, seconds in times.items():
        print(f"  {name:<44}{1e3 * seconds:10.2f} ms")
    for peer, target in targets.items():
        peer_times = [seconds for name, seconds in times.items() if name.startswith(peer)]
        for name in [name for name in times if name.startswith("ours")] if peer_times else []:
            print(compare(name, times[name], peer, min(peer_times), target))
    print(flush=True)


def our_mixture(rule, prior):
    """A fit of a number of steps to the mixture's data, with or without priors."""
    y = mixture_data().astype(np.float32)
    k, width = 10, y.shape[1]
    means, scales = jnp.asarray(y[:k]), jnp.broadcast_to(jnp.eye(width), (k, width, width))
    components = blr.NormalWishart(means, jnp.ones(k), jnp.full(k, width + 1.0), scales)
    blocks = {"weights": blr.Dirichlet(jnp.full(k, 1.1)), "components": components}
    terms = {"y": factors.mixture("weights", factors.multivariate_normal("y", joint="components"))}
    if prior:
        component_prior = blr.NormalWishart(jnp.zeros(width), 1.0, float(width), jnp.eye(width))
        terms["weights"] = factors.prior("weights", blr.Dirichlet(jnp.full(k, 0.1)))
        terms["components"] = factors.prior("components", component_prior)
    return lambda steps: blr.fit(rule, blr.Model(blocks, terms), None, {"y": y}, steps=steps).q


def mixtures(turns, bayespy):
    y = mixture_data().astype(np.float32)
    ours = {"vmp": our_mixture(blr.vmp(order="parallel"), True), "em": our_mixture(blr.em(order="parallel"), False)}
    for way, kind, python in (("vmp", BayesianGaussianMixture, bayespy), ("em", GaussianMixture, None)):

        def sklearn_fit(steps, kind=kind):
            return kind(n_components=10, max_iter=steps, tol=0, init_params="random_from_data", random_state=0).fit(y)

        fits = {f"ours, {way}": (ours[way], 20)}
        fits |= {name: (run, 5) for name, run in by_threads(kind.__name__, sklearn_fit).items()}
        times = iterations(fits, turns, python and (python, "mixture", 2))
        targets = {kind.__name__: 0.15} | ({"BayesPy": 0.02} if python else {})
        show(f"Mixture of Gaussians, 100,000×10, 10 full covariances: an iteration of {way}", times, targets)
    return {f"mixture, {way}": fit for way, fit in ours.items()}


def our_principal(shared, double=False):
    """A fit of a number of steps of PCA with ARD; the latent rows share one precision, or each has its own."""
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
    """Word counts, documents × vocabulary, in float32 and in a random order, and their name."""
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
        simulated = rng.multinomial(lengths, rng.dirichlet(np.full(TOPICS, 0.1), 2000) @ words)
        counts = scipy.sparse.csr_matrix(simulated.astype(np.float32))
    name = f"{'simulated documents' if data is None else 'AP corpus'}, {counts.shape[0]}×{counts.shape[1]}"
    return counts[rng.permutation(counts.shape[0])], name


def our_topics(counts):
    """SVI over the documents for a number of passes, from a random start."""
    documents, vocabulary = counts.shape
    lengths = np.diff(counts.indptr)
    filled = np.arange(lengths.max()) < lengths[:, None]
    words, word_counts = np.zeros(filled.shape, np.int32), np.zeros(filled.shape, np.float32)
    words[filled], word_counts[filled] = counts.indices, counts.data
    data = {"word": blr.Ragged(words, lengths), "count": blr.Ragged(word_counts, lengths)}
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


def sklearn_topics(counts, passes, seed=0):
    """scikit-learn's SVI: its topics after each pass."""
    order = np.random.default_rng(seed).permutation
    settings = {
        "learning_method": "online",
        "learning_offset": 9.0,
        "learning_decay": 0.7,
    }  # Its step count starts at 1.
    settings |= {"batch_size": BATCH, "total_samples": counts.shape[0], "random_state": seed}
    model = LatentDirichletAllocation(TOPICS, mean_change_tol=TOLERANCE, max_doc_update_iter=LOCAL_STEPS, **settings)
    return [model.partial_fit(counts[order(counts.shape[0])]).components_.copy() for _ in range(passes)]


def gensim_topics(counts):
    """gensim's SVI for a number of passes."""
    from gensim.models import LdaModel

    edges = zip(counts.indptr[:-1], counts.indptr[1:], strict=True)
    documents = [list(zip(counts.indices[a:b].tolist(), counts.data[a:b].tolist(), strict=True)) for a, b in edges]
    settings = {"chunksize": BATCH, "offset": 10, "decay": 0.7, "eta": 1 / TOPICS, "eval_every": None}
    settings |= {"iterations": LOCAL_STEPS, "gamma_threshold": TOLERANCE, "random_state": 0}
    names = {number: str(number) for number in range(counts.shape[1])}
    return lambda passes: LdaModel(documents, TOPICS, names, passes=passes, **settings)


def topics(counts, name, repeats):
    ours = our_topics(counts)
    runs = {"ours, svi": ours} | by_threads("scikit-learn", partial(sklearn_topics, counts))
    if importlib.util.find_spec("gensim"):
        runs |= by_threads("gensim", gensim_topics(counts))
    else:
        print("gensim is not run: it is not installed.\n")
    for passes in (1, 5):
        times = fastest({way: partial(run, passes) for way, run in runs.items()}, repeats)
        times = {way: seconds / passes for way, seconds in times.items()}
        title = f"Topics, {name}, {TOPICS} topics, batches of {BATCH}: a pass, of {passes} in one call"
        show(title, times, {"scikit-learn": 0.35, "gensim": 0.5})
    return {"topics, svi (a pass)": ours}


def held_out_bounds(components, counts):
    """scikit-learn's bound for new documents, per word: in full, and without its term for the topics."""
    judge = LatentDirichletAllocation(TOPICS, mean_change_tol=1e-5, max_doc_update_iter=1000)
    judge.partial_fit(counts[:1])  # This creates its attributes.
    judge.components_ = np.asarray(components, np.float64)
    totals = judge.components_.sum(1, keepdims=True)
    judge.exp_dirichlet_component_ = np.exp(digamma(judge.components_) - digamma(totals))
    rows = judge.transform(counts, normalize=False)
    full, topics_term = (judge._approx_bound(counts[:n], rows[:n], sub_sampling=False) for n in (len(rows), 0))
    return np.array([full, full - topics_term]) / counts.sum()


def held_out(counts, name):
    """Train on nine tenths of the documents and evaluate the bound on the rest, with the same code for both."""
    cut = counts.shape[0] * 9 // 10
    train, test = counts[:cut], counts[cut:].astype(np.float64)
    ours, bounds = our_topics(train), np.zeros((SEEDS, len(PASSES), 2, 2))
    for seed in range(SEEDS):
        sklearn_results = sklearn_topics(train, max(PASSES), seed)
        for index, passes in enumerate(PASSES):
            pair = ours(passes, seed), sklearn_results[passes - 1]
            bounds[seed, index] = [held_out_bounds(topics, test) for topics in pair]
    print(f"Topics, {name}: bound per word of {test.shape[0]} held-out documents, {SEEDS} seeds; the documents' part")
    means, stds = bounds.mean(0), bounds.std(0, ddof=1)
    for passes, mean, std in zip(PASSES, means, stds, strict=True):
        for way, (full, part), (full_std, part_std) in zip(("ours", "scikit-learn"), mean, std, strict=True):
            print(f"  {passes:>2} passes, {way:<14} {full:8.4f} ± {full_std:.4f} {part:12.4f} ± {part_std:.4f}")
        gap, verdict = mean[0] - mean[1], "ok" if np.all(mean[0] >= mean[1] - std.max(0)) else "MISSED"
        print(f"  {passes:>2} passes, difference    {gap[0]:+8.4f} {gap[1]:+21.4f}   target ≥ −std   {verdict}")
    print(flush=True)


def main(data=None, bayespy=None, evaluate=False, repeats=5):
    jax.config.update("jax_enable_compilation_cache", False)
    warnings.simplefilter("ignore", ConvergenceWarning)  # They warn that one iteration has not converged.
    if bayespy is None:
        print("BayesPy is not run: name an interpreter that has it with --bayespy.\n")
    counts, name = corpus(data)
    fits = mixtures(repeats, bayespy) | principal(repeats, bayespy) | topics(counts, name, repeats)
    if evaluate:
        held_out(counts, name)
    for fit_name, fit in fits.items():
        print(first_call(fit_name, partial(fit, 1)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure message passing against its peers.")
    parser.add_argument("--data", type=Path, help="ap_corpus.npz, or a folder with ap_corpus/ap_corpus.npz")
    parser.add_argument("--bayespy", metavar="PYTHON", help="an interpreter with BayesPy 0.6.6")
    parser.add_argument("--held-out", action="store_true", help="also evaluate the topics on held-out documents")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.data, arguments.bayespy, arguments.held_out, arguments.repeats)
