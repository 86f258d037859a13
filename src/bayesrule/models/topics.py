"""Topic models: latent Dirichlet allocation of documents given as counts of words."""

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
from ..fitting.fit import fit
from ..fitting.result import Result
from ..numerics.checks import positive_int
from ..recipes import svi
from ..rule.rule import Rule


def documents(counts: Any, *, rows: int = 0, width: int = 0) -> dict[str, Ragged]:
    """Counts (documents, vocabulary), dense or a SciPy sparse matrix, as a model's data: each document's words.

    Documents without words follow up to at least `rows`, and rows have room for at least `width` words: neither changes
    what is found, and programs that were compiled for these shapes are used again.

    >>> rows = documents([[2, 0, 1], [0, 3, 0]])
    >>> rows["words"].values.tolist(), rows["counts"].values.tolist()
    ([[0, 2], [1, 0]], [[2.0, 1.0], [3.0, 0.0]])
    """
    from scipy.sparse import csr_array, issparse

    given = counts if issparse(counts) else np.asarray(counts)
    if given.ndim != 2 or 0 in given.shape:
        raise ValueError(f"counts are (documents, vocabulary), got {given.shape}.")
    table = csr_array(given)
    if not np.all(np.isfinite(table.data)) or np.any(table.data < 0):
        raise ValueError("Words occur 0 times or more often: counts has other entries.")
    table.eliminate_zeros()
    lengths = np.diff(table.indptr)
    place = np.arange(max(1, width, int(lengths.max(initial=0))))
    inside = place < lengths[:, None]
    shape = max(rows, len(inside)), len(place)
    words, often = np.zeros(shape, np.int32), np.zeros(shape)
    words[: len(inside)][inside], often[: len(inside)][inside] = table.indices, table.data
    # As long as can be: where documents settle in groups by their lengths, those without words are the last.
    sizes = jnp.asarray(np.append(lengths, np.full(shape[0] - len(lengths), shape[1], lengths.dtype)))
    return {"words": Ragged(jnp.asarray(words), sizes), "counts": Ragged(jnp.asarray(often, float), sizes)}


def latent_dirichlet(
    vocabulary: int,
    topics: int,
    *,
    document_prior: float | None = None,
    word_prior: Any = None,
    key: Any = None,
) -> Model:
    r"""Latent Dirichlet allocation: documents with shares of topics, topics with shares of words.

    $θ_n ∼ Dir(α)$, $β_k ∼ Dir(η)$, and every word of document n from $\sum_kθ_{nk}β_k$, its topic summed out. α and η
    are 1/`topics` unless given; η may be an array (K, V). Fit with `data=documents(counts)`: `svi(rate,
    local_steps=100, tolerance=1e-3, together=16)` with mini-batches of documents, or `vmp()` on all of them. Blocks are
    "topics" (K, V) and, for each document, "shares" (K). The start is drawn from the same gammas as scikit-learn's
    (`key`).

    >>> import bayesrule as blr
    >>> counts = [[5, 4, 0, 0], [6, 3, 0, 1], [0, 0, 4, 5], [0, 1, 6, 4]]
    >>> model = latent_dirichlet(4, 2)
    >>> result = blr.fit(blr.svi(1.0, local_steps=50), model, None, documents(counts), steps=20)
    >>> [bool(p[0] > 0.5) for p in result.q["shares"].mean] in ([True, True, False, False], [False, False, True, True])
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


def settled(model: Model, q: Any, rows: dict[str, Ragged], rule: Rule, steps: int = 1) -> Result:
    """Documents settled, the topics where they are: one step of `svi(0.0, local_steps=…)`, and its bound.

    `steps` is how many the program was compiled for, if it ran before: the first ends it.
    """
    return fit(rule, model, {"topics": q["topics"]}, rows, steps=steps, tolerance=math.inf)


def shares(model: Model, q: Any, counts: Any, *, steps: int = 100, tolerance: float = 1e-4) -> Float[Array, "N K"]:
    """The topics' shares in new documents, the topics where they are: E θ of documents that are settled."""
    rows = documents(counts)
    known, given = q["topics"].mean.shape[-1], np.shape(counts)[-1]
    if known != given:
        raise ValueError(
            f"The topics are over {known} words, and counts has {given} columns: give both one vocabulary."
        )
    return settled(model, q, rows, svi(0.0, local_steps=steps, tolerance=tolerance)).q["shares"].mean
