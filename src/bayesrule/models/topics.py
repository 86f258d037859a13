"""Topic models: latent Dirichlet allocation of documents that are given as word counts."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .. import factors
from ..factor_graph.data import Ragged
from ..factor_graph.model import Model
from ..families.dirichlet import Dirichlet
from ..families.product import Product
from ..fitting.fit import fit
from ..fitting.result import Result
from ..numerics.checks import positive_int
from ..numerics.random import Key
from ..recipes import svi
from ..rule.rule import Rule

__all__ = ["documents", "latent_dirichlet", "shares"]


def documents(counts: Any, *, rows: int = 0, width: int = 0) -> dict[str, Ragged]:
    """Word counts as the data of `latent_dirichlet`: for each document its words' numbers, and their counts.

    Args:
        counts: (documents, vocabulary), dense or a SciPy sparse matrix.
        rows: pad with empty documents to at least so many.
        width: pad documents to at least so many different words. Padding does not change the fit, and programs that
            were compiled for these shapes are used again.

    >>> rows = documents([[2, 0, 1], [0, 3, 0]])
    >>> rows["words"].values.tolist(), rows["counts"].values.tolist()
    ([[0, 2], [1, 0]], [[2.0, 1.0], [3.0, 0.0]])
    """
    from scipy.sparse import csr_array, issparse

    matrix = counts if issparse(counts) else np.asarray(counts)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"counts are (documents, vocabulary), got {matrix.shape}.")
    table = csr_array(matrix)
    if not np.all(np.isfinite(table.data)) or np.any(table.data < 0):
        raise ValueError("Words occur 0 times or more often: counts has entries that are negative or not finite.")
    table.eliminate_zeros()
    lengths = np.diff(table.indptr)
    columns = np.arange(max(1, width, int(lengths.max(initial=0))))
    mask = columns < lengths[:, None]
    shape = max(rows, len(mask)), len(columns)
    words, occurrences = np.zeros(shape, np.int32), np.zeros(shape)
    words[: len(mask)][mask], occurrences[: len(mask)][mask] = table.indices, table.data
    # The padding documents get the full length: where a sweep sorts documents into groups by their lengths, they come
    # last and do not mix with the short ones.
    sizes = jnp.asarray(np.append(lengths, np.full(shape[0] - len(lengths), shape[1], lengths.dtype)))
    return {"words": Ragged(jnp.asarray(words), sizes), "counts": Ragged(jnp.asarray(occurrences, float), sizes)}


def latent_dirichlet(
    vocabulary: int,
    topics: int,
    *,
    document_prior: float | None = None,
    word_prior: Any = None,
    key: Key | None = None,
) -> Model:
    r"""Latent Dirichlet allocation: documents are mixtures of topics, topics distributions over words.

    $θ_n ∼ Dir(α)$, $β_k ∼ Dir(η)$, and every word of document n is drawn from $\sum_kθ_{nk}β_k$, its topic summed out.
    The blocks are "topics" β, (K, V), and for each document "shares" θ, (K,). Fit with `data=documents(counts)`:
    `svi(rate, local_steps=100, tolerance=1e-3, together=16)` with mini-batches of documents, or `vmp()` on all.

    Args:
        vocabulary: V, the number of words.
        topics: K.
        document_prior: α, by default 1/K.
        word_prior: η, a number or an array (K, V), by default 1/K.
        key: a random key. The topics start from random gammas, as scikit-learn's.

    >>> import bayesrule as blr
    >>> counts = [[5, 4, 0, 0], [6, 3, 0, 1], [0, 0, 4, 5], [0, 1, 6, 4]]
    >>> model = latent_dirichlet(4, 2)
    >>> result = blr.fit(blr.svi(1.0, local_steps=50), model, None, documents(counts), steps=20)
    >>> [bool(p[0] > 0.5) for p in result.q["shares"].mean] in ([True, True, False, False], [False, False, True, True])
    True
    >>> bool(shares(model, result.q, [[9, 8, 0, 0]]).max() > 0.9)                 # a new document
    True
    """
    for name, value in (("vocabulary", vocabulary), ("topics", topics)):
        positive_int(name, value)
    alpha = 1 / topics if document_prior is None else document_prior
    eta = 1 / topics if word_prior is None else word_prior
    random = np.random.default_rng(np.asarray(jax.random.key_data(jax.random.key(0) if key is None else key)))
    start = random.gamma(100.0, size=(topics, vocabulary)) / 100
    prior = np.broadcast_to(np.asarray(eta, float), start.shape)
    return Model(
        {"topics": Dirichlet(jnp.asarray(start, float))},
        {
            "prior of topics": factors.prior("topics", Dirichlet(jnp.asarray(prior, float))),
            "prior of shares": factors.prior("shares", Dirichlet(jnp.full(topics, alpha))),
            "words": factors.words("counts", "words", documents="shares", topics="topics"),
        },
        local={"shares": Dirichlet(jnp.ones(topics))},
    )


def fit_documents(model: Model, q: Product, rows: dict[str, Ragged], rule: Rule, steps: int = 1) -> Result:
    """Fit the documents' topic shares with the topics held fixed: one step of `svi(0.0, local_steps=…)`, and its bound.

    Args:
        model: a `latent_dirichlet`.
        q: its fitted q, whose topics are held fixed.
        rows: the documents.
        rule: `svi` with rate 0.
        steps: pass the `steps` of an earlier fit to reuse its compiled program; one step is taken in any case.
    """
    return fit(rule, model, {"topics": q["topics"]}, rows, steps=steps, tolerance=math.inf)


def shares(model: Model, q: Product, counts: Any, *, steps: int = 100, tolerance: float = 1e-4) -> Float[Array, "N K"]:
    """E θ of new documents: each topic's share, with the topics held fixed.

    Args:
        model: a `latent_dirichlet`.
        q: its fitted q.
        counts: (documents, vocabulary).
        steps: the number of iterations of each document, at most.
        tolerance: the change of the parameters below which a document has converged.
    """
    rows = documents(counts)
    vocabulary, columns = q["topics"].mean.shape[-1], np.shape(counts)[-1]
    if vocabulary != columns:
        raise ValueError(
            f"The topics are over {vocabulary} words, and counts has {columns} columns: give both one vocabulary."
        )
    return fit_documents(model, q, rows, svi(0.0, local_steps=steps, tolerance=tolerance)).q["shares"].mean
