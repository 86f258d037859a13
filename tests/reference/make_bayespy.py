"""Makes data/bayespy.json: iterates of BayesPy 0.6.6 (numpy 1.26.4, scipy 1.13.1) on five models, sweep by sweep.

    pip install bayespy==0.6.6 numpy==1.26.4 scipy==1.13.1 h5py==3.16.0 truncnorm==0.0.2 scikit-learn==1.9.1
    python tests/reference/make_bayespy.py [ap_corpus.npz]

Python 3.11. Only the package's nodes, their starts, `VB.update` and the nodes' parameters and moments are used. Every
model has fixed data, a written start and a written order; one sweep is one `VB.update(repeat=1)`. The bound is
BayesPy's, with every constant.

The corpus is that of lda-c (`example/ap.tgz`) as CSR: document d has words indices[indptr[d]:indptr[d+1]] with counts.
Without it, the counts are those already in data/bayespy.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
from bayespy.inference import VB
from bayespy.inference.vmp.nodes.categorical import CategoricalMoments
from bayespy.nodes import (
    Categorical,
    Constant,
    Dirichlet,
    Gamma,
    Gate,
    Gaussian,
    GaussianARD,
    GaussianMarkovChain,
    Mixture,
    SumMultiply,
    Wishart,
)
from sklearn.datasets import load_iris

FILE = Path(__file__).parent / "data" / "bayespy.json"
SWEEPS = 10
LONG = 1000  # sweeps to convergence, for the two models that get there


def full(node, array, trailing=0):
    """A parameter or moment with BayesPy's broadcasting over plates undone and plates of length 1 dropped."""
    array = np.asarray(array, dtype=float)
    event = array.shape[array.ndim - trailing :]
    plates = tuple(n for n in node.plates if n != 1)
    return np.broadcast_to(array, node.plates + event).reshape(plates + event).tolist()


def gaussian(node):
    k = len(node.dims[0])
    return {
        "mean": full(node, node.u[0], k),
        "precision": full(node, -2 * node.phi[1], 2 * k),
        "second_moment": full(node, node.u[1], 2 * k),
    }


def gamma(node):
    return {
        "shape": full(node, node.phi[1]),
        "rate": full(node, -node.phi[0]),
        "mean": full(node, node.u[0]),
        "mean_log": full(node, node.u[1]),
    }


def wishart(node):
    return {
        "dof": full(node, 2 * node.phi[1]),
        "inverse_scale": full(node, -2 * node.phi[0], 2),
        "mean": full(node, node.u[0], 2),
        "mean_logdet": full(node, node.u[1]),
    }


def dirichlet(node):
    return {"concentration": full(node, node.phi[0], 1), "mean_log": full(node, node.u[0], 1)}


def concentration(node):
    return {"concentration": full(node, node.phi[0], 1)}


def categorical(node):
    return {"probabilities": full(node, node.u[0], 1)}


def state(blocks):
    return {node.name: write(node) for node, write in blocks.items()}


def sweep(blocks, observed, start, long=False):
    """Sweeps over `blocks`, node: writer, in their order; `start` is the state already written down."""
    engine = VB(*blocks, observed)
    result = {"order": [node.name for node in blocks], "start": start}
    bound = engine.compute_lowerbound()
    if np.isfinite(bound):
        result["elbo_start"] = float(bound)
    for count in range(1, SWEEPS + 1):
        engine.update(repeat=1, tol=-1, verbose=False)
        if count in (1, SWEEPS):
            terms = {node.name: float(value) for node, value in engine.compute_lowerbound_terms().items()}
            result["first" if count == 1 else "last"] = {**state(blocks), "elbo_terms": terms}
    elbo = engine.L[:SWEEPS]
    assert np.all(np.diff(elbo) > -1e-9)
    result["elbo"] = elbo.tolist()
    if long:
        engine.update(repeat=LONG - SWEEPS, tol=-1, verbose=False)
        result["converged"] = {"sweeps": LONG, "elbo": float(engine.L[LONG - 1]), **state(blocks)}
    return result


def normal_gamma():
    y = np.random.RandomState(1).normal(5, 10, 10)
    mu = GaussianARD(0, 1e-6, name="mu")
    tau = Gamma(1e-6, 1e-6, name="tau")
    observed = GaussianARD(mu, tau, plates=(10,), name="y")
    observed.observe(y)
    blocks = {mu: gaussian, tau: gamma}
    return {
        "model": "mu ~ N(0, precision 1e-6), tau ~ Gamma(shape 1e-6, rate 1e-6), y_n ~ N(mu, precision tau)",
        "data": {"y": y.tolist()},
        **sweep(blocks, observed, state(blocks), long=True),
    }


def mixture():
    data, labels = load_iris(return_X_y=True)
    size, dim, k = *data.shape, 3
    alpha = Dirichlet(np.ones(k), name="alpha")
    z = Categorical(alpha, plates=(size,), name="z")
    mu = Gaussian(np.zeros(dim), 0.01 * np.eye(dim), plates=(k,), name="mu")
    precision = Wishart(4, 0.01 * np.eye(dim), plates=(k,), name="Lambda")
    observed = Mixture(z, Gaussian, mu, precision, name="y")
    observed.observe(data)
    z.initialize_from_value(labels)
    blocks = {mu: gaussian, precision: wishart, alpha: dirichlet, z: categorical}
    start = state({mu: gaussian, precision: wishart, alpha: dirichlet})
    result = sweep(blocks, observed, {**start, "z": "one-hot of the labels"}, long=True)
    del result["converged"]["z"]
    return {
        "model": "alpha ~ Dirichlet(1, 1, 1), z_n ~ Categorical(alpha), mu_k ~ N(0, precision 0.01 I), "
        "Lambda_k ~ Wishart(4 degrees of freedom, inverse scale 0.01 I: mean 400 I), y_n ~ N(mu_z, precision Lambda_z)",
        "data": "sklearn.datasets.load_iris, 150 rows of 4, labels 0, 1, 2",
        **result,
    }


def principal():
    size, observed_dim, dim = 30, 5, 3
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(observed_dim, 2)) @ rng.normal(size=(2, size))
    y = np.round(signal + 0.3 * rng.normal(size=signal.shape), 3)
    start = np.round(rng.normal(size=(observed_dim, dim)), 3)
    x = GaussianARD(0, 1, plates=(1, size), shape=(dim,), name="X")
    alpha = Gamma(1e-3, 1e-3, plates=(dim,), name="alpha")
    w = GaussianARD(0, alpha, plates=(observed_dim, 1), shape=(dim,), name="W")
    tau = Gamma(1e-3, 1e-3, name="tau")
    observed = GaussianARD(SumMultiply("d,d->", w, x), tau, name="y")
    observed.observe(y)
    w.initialize_from_parameters(start[:, None], 10.0 * np.ones((observed_dim, 1, dim)))
    blocks = {x: gaussian, w: gaussian, alpha: gamma, tau: gamma}
    return {
        "model": "x_n ~ N(0, I), alpha_d ~ Gamma(shape 1e-3, rate 1e-3), W_md ~ N(0, precision alpha_d), "
        "tau ~ Gamma(shape 1e-3, rate 1e-3), y_mn ~ N(w_m . x_n, precision tau)",
        "data": {"y": y.tolist()},
        **sweep(blocks, observed, state({w: gaussian, alpha: gamma, tau: gamma, x: gaussian})),
    }


def chain():
    """BayesPy's linear state-space example, small."""
    size, observed_dim, dim = 40, 3, 2
    rng = np.random.default_rng(0)
    turn = np.array([[0.9, 0.3], [-0.3, 0.9]])
    states = [rng.normal(size=dim)]
    for _ in range(size - 1):
        states.append(turn @ states[-1] + rng.normal(size=dim))
    y = rng.normal(size=(observed_dim, dim)) @ np.array(states).T + 0.5 * rng.normal(size=(observed_dim, size))
    y, start = np.round(y, 3), np.round(rng.normal(size=(observed_dim, dim)), 3)
    alpha = Gamma(1e-3, 1e-3, plates=(dim,), name="alpha")
    a = GaussianARD(0, alpha, shape=(dim,), plates=(dim,), name="A")
    x = GaussianMarkovChain(np.zeros(dim), 0.1 * np.eye(dim), a, np.ones(dim), n=size, name="X")
    gammas = Gamma(1e-3, 1e-3, plates=(dim,), name="gamma")
    c = GaussianARD(0, gammas, shape=(dim,), plates=(observed_dim, 1), name="C")
    tau = Gamma(1e-3, 1e-3, name="tau")
    observed = GaussianARD(SumMultiply("d,d->", c, x), tau, name="y")
    observed.observe(y)
    a.initialize_from_parameters(0.5 * np.eye(dim), 10.0 * np.ones((dim, dim)))
    c.initialize_from_parameters(start[:, None], 10.0 * np.ones((observed_dim, 1, dim)))
    states_of = lambda node: {"mean": np.asarray(node.u[0]).tolist(), "second_moment": np.asarray(node.u[1]).tolist()}
    blocks = {x: states_of, c: gaussian, gammas: gamma, a: gaussian, alpha: gamma, tau: gamma}
    return {
        "model": "x_1 ~ N(0, precision 0.1 I), x_{t+1} ~ N(A x_t, I), A_ij ~ N(0, precision alpha_j), C_md ~ N(0, "
        "precision gamma_d), alpha, gamma, tau ~ Gamma(shape 1e-3, rate 1e-3), y_mt ~ N(c_m . x_t, precision tau)",
        "data": {"y": y.tolist()},
        **sweep(blocks, observed, state({c: gaussian, a: gaussian, alpha: gamma, gammas: gamma, tau: gamma})),
    }


def small_corpus(corpus, documents=50, vocabulary=200):
    """[(document, word, count)] of the first documents; words are numbered by falling frequency among them."""
    end = corpus["indptr"][documents]
    doc = np.repeat(np.arange(documents), np.diff(corpus["indptr"][: documents + 1]))
    word, count = corpus["indices"][:end].astype(int), corpus["counts"][:end].astype(int)
    total = np.bincount(word, weights=count)
    kept = np.argsort(-total, kind="stable")[:vocabulary]
    number = np.full(len(total), -1)
    number[kept] = np.arange(vocabulary)
    rows = np.stack([doc, number[word], count], axis=1)
    return sorted(rows[rows[:, 1] >= 0].tolist())


def topics(counts, documents=50, vocabulary=200, k=5):
    doc, word, count = np.array(counts).T
    token_pair = np.repeat(np.arange(len(count)), count)
    start = np.round(0.5 + np.random.default_rng(0).gamma(1.0, size=(k, vocabulary)), 3)
    theta = Dirichlet(0.1 * np.ones(k), plates=(documents,), name="theta")
    beta = Dirichlet(0.05 * np.ones(vocabulary), plates=(k,), name="beta")
    index = Constant(CategoricalMoments(documents), doc[token_pair])
    z = Categorical(Gate(index, theta), plates=(len(token_pair),), name="z")
    observed = Categorical(Gate(z, beta), name="words")
    observed.observe(word[token_pair])
    beta.initialize_from_parameters(start)
    start = state({theta: concentration, beta: concentration})

    def first_document(node):
        """One row for each (document, word) of document 0; the tokens of a pair share their q."""
        probabilities = np.broadcast_to(node.u[0], (len(token_pair), k))
        first = np.unique(token_pair, return_index=True)[1]
        np.testing.assert_array_equal(probabilities[first][token_pair], probabilities)
        return {"probabilities_document_0": probabilities[first][doc == 0].tolist()}

    blocks = {z: first_document, theta: concentration, beta: concentration}
    result = sweep(blocks, observed, start)
    del result["elbo_start"]  # z there is nobody's: it comes first in the order
    return {
        "model": "theta_d ~ Dirichlet(0.1, ...), beta_k ~ Dirichlet(0.05, ...), z_t ~ Categorical(theta_doc(t)), "
        "word_t ~ Categorical(beta_z(t)) for every token t",
        "data": {"documents": documents, "vocabulary": vocabulary, "topics": k, "doc_word_count": counts},
        **result,
    }


def main() -> None:
    if len(sys.argv) > 1:
        with np.load(sys.argv[1]) as corpus:
            counts = small_corpus(corpus)
    else:
        counts = json.loads(FILE.read_text())["lda"]["data"]["doc_word_count"]
    reference = {
        "name": "bayespy",
        "description": "variational message passing on five conjugate models: bound after every sweep, state of every "
        "block at the start and after the first and the last sweep",
        "source": "BayesPy 0.6.6 (MIT) with numpy 1.26.4, scipy 1.13.1 and Python 3.11, by make_bayespy.py; "
        "corpus: lda-c example/ap.tgz, counts only",
        "normal_gamma": normal_gamma(),
        "mixture": mixture(),
        "pca": principal(),
        "chain": chain(),
        "lda": topics(counts),
    }
    FILE.write_text(json.dumps(reference, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
