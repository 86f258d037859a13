"""Topic models as scikit-learn has them: latent Dirichlet allocation of counts, whole, in mini-batches or in pieces."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import numpy as np
from scipy.sparse import csr_array
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from ..factor_graph.model import Model
from ..fitting.result import Result
from ..models.topics import documents, latent_dirichlet, settled
from ..numerics.padding import bucket
from ..recipes import svi
from ..rule.rule import Rule
from .base import chosen, double, key_of
from .base_iterative import Falling, Found, Iterated, check_positive_ints, padded_rows

_TOGETHER = 16  # documents that settle at a time, where there are many


class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Iterated):
    r"""Latent Dirichlet allocation: $θ_n ∼ Dir(α)$, $β_k ∼ Dir(η)$, every word of document n from $\sum_k θ_{nk}β_k$.

    Parameters
    ----------
    n_components : how many topics.
    method : "vmp" (all documents at every step) or "svi" (mini-batches); or a rule.
    doc_topic_prior, topic_word_prior : α and η; None is 1/n_components.
    max_iter : steps at most; for "svi", passes over the documents.
    tol : a fit ends when a step could gain less than this many nats for each document.
    batch_size : documents of a mini-batch, for "svi".
    learning_decay, learning_offset : "svi" has the rates (t + offset)^−decay.
    max_doc_update_iter, mean_change_tol : a document's shares settle in so many steps, or when they change by less.
    random_state : draws the start.

    Attributes
    ----------
    components_ (K, V) : how often each topic is expected to give each word, as scikit-learn's; η included.
    posterior_ : a Dirichlet over "topics". bound_ : the evidence lower bound, every constant but the orders of words
        included, as scikit-learn's `score`. n_iter_, converged_.

    Examples
    --------
    >>> import numpy as np
    >>> counts = np.array([[5, 4, 0, 0], [6, 3, 0, 1], [0, 0, 4, 5], [0, 1, 6, 4]])
    >>> topics = LatentDirichletAllocation(2, random_state=0).fit(counts)
    >>> topics.transform(counts).argmax(1).tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    True
    """

    title = "latent Dirichlet allocation"
    n_features_in_: int

    def __init__(
        self,
        n_components: int = 10,
        *,
        method: Any = "vmp",
        doc_topic_prior: float | None = None,
        topic_word_prior: float | None = None,
        max_iter: int = 100,
        tol: float = 1e-3,
        batch_size: int = 128,
        learning_decay: float = 0.7,
        learning_offset: float = 10.0,
        max_doc_update_iter: int = 100,
        mean_change_tol: float = 1e-3,
        random_state: Any = None,
    ):
        self.n_components = n_components
        self.method = method
        self.doc_topic_prior = doc_topic_prior
        self.topic_word_prior = topic_word_prior
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.learning_decay = learning_decay
        self.learning_offset = learning_offset
        self.max_doc_update_iter = max_doc_update_iter
        self.mean_change_tol = mean_change_tol
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        return tags

    # A fit.

    def _local(self, rate: Any, rows: int) -> Rule:
        """Documents that settle at every step, and topics that move at this rate."""
        check_positive_ints(self, "max_doc_update_iter")
        together = _TOGETHER if rows > 2 * _TOGETHER**2 else None
        return svi(rate, local_steps=self.max_doc_update_iter, tolerance=self.mean_change_tol, together=together)

    def _rule(self, rows: int = 1) -> Rule:
        rates = {"vmp": 1.0, "svi": Falling(self.learning_offset, self.learning_decay)}
        named = {name: partial(self._local, rate, rows) for name, rate in rates.items()}
        return chosen(self.method, named, self, parameter="method", example="blr.svi(0.5, local_steps=50)")

    def _counts(self, X: Any, *, reset: bool) -> Any:
        how: dict[str, Any] = {"accept_sparse": "csr", "dtype": np.float64, "ensure_non_negative": True}
        return validate_data(self, X, reset=reset, **how)

    def _model(self, prior: Any, _: str = "default", key: Any = None) -> Model:
        check_positive_ints(self, "n_components")
        for name in ("doc_topic_prior", "topic_word_prior"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}= is a number above 0, or None for 1/n_components, got {value!r}.")
        alpha = self.doc_topic_prior
        return latent_dirichlet(self.n_features_in_, self.n_components, document_prior=alpha, word_prior=prior, key=key)

    @double
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to counts X (documents, words), dense or sparse."""
        X = self._counts(X, reset=True)
        check_positive_ints(self, "batch_size")
        rows = X.shape[0]
        batch = self.batch_size if self.method == "svi" and self.batch_size < rows else None
        data = _documents(X) if batch is None else documents(X, width=_width(X))
        self._found(self._settle(partial(self._model, self.topic_word_prior), data, rows, batch, self._rule(rows)))
        return self

    @double
    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Go on with more documents: what was the posterior is the prior now, and `bound_` adds up."""
        first = not hasattr(self, "components_")
        X = self._counts(X, reset=first)
        model = self._model(self.topic_word_prior if first else self.components_, key=key_of(self.random_state))
        start = None if first else {"topics": self.posterior_["topics"]}
        how: dict[str, Any] = {"steps": self.max_iter, "tolerance": self.tol * X.shape[0]}
        result = self._run(self._local(1.0, X.shape[0]), model, start, _documents(X), **how)
        before = 0.0 if first else self.bound_
        self._found(Found(model, result, before + float(result.bound or 0.0)))
        return self

    def _found(self, found: Found) -> None:
        self._keep(found)
        self.components_ = np.asarray(self.posterior_["topics"].concentration)

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    # New documents.

    def _known(self, X: Any) -> Any:
        check_is_fitted(self)
        return self._counts(X, reset=False)

    def _settled(self, X: Any) -> Result:
        # The steps of `fit`, of which the first ends it, so that its program serves here too.
        rule = self._local(0.0, X.shape[0])
        return settled(self._model(self.topic_word_prior), self.posterior_, _documents(X), rule, self.max_iter)

    @double
    def transform(self, X: Any) -> np.ndarray:
        """The expected share of each topic in each document."""
        X = self._known(X)
        return np.asarray(self._settled(X).q["shares"].mean)[: X.shape[0]]

    @double
    def score(self, X: Any, y: Any = None) -> float:
        """The evidence lower bound of these documents, the topics where they are."""
        return float(self._settled(self._known(X)).bound or 0.0)

    def perplexity(self, X: Any) -> float:
        """exp of minus the bound for each word: the lower the better."""
        X = self._known(X)
        return float(np.exp(-self.score(X) / X.sum()))


def _documents(X: Any) -> dict[str, Any]:
    return documents(X, rows=padded_rows(X.shape[0]), width=_width(X))


def _width(X: Any) -> int:
    """Room for the most different words that a document has, so that programs fit other documents too."""
    return bucket(int(np.diff(csr_array(X).indptr).max(initial=1)))
