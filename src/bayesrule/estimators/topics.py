"""Topic models: latent Dirichlet allocation of word counts, in full batches, mini-batches or increments."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import numpy as np
from scipy.sparse import csr_array
from scipy.special import digamma
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from ..factor_graph.model import Model
from ..families.dirichlet import Dirichlet
from ..fitting.result import Result
from ..models.topics import documents, fit_documents, latent_dirichlet
from ..numerics.padding import bucket
from ..numerics.random import Key
from ..recipes import svi
from ..rule.rule import Rule
from .base import choose_rule, double_precision, in_dtype_of_inputs, input_dtype, make_key, row_by_row
from .base_iterative import FittedModel, IterativeEstimator, PowerDecay, check_positive_ints, padded_rows
from .training_rows import DaskParts, check_full_batches, is_dask, validate_collection

_TOGETHER = 16  # Of many documents, how many are iterated together: a group takes as many steps as its slowest.


class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, IterativeEstimator):
    r"""Latent Dirichlet allocation: $θ_n ∼ Dir(α)$, $β_k ∼ Dir(η)$, every word of document n from $\sum_k θ_{nk}β_k$.

    Parameters
    ----------
    n_components : int, default=10
        The number of topics.
    method : {"vmp", "svi"} or Rule, default="vmp"
        Variational message passing on all documents at every step, or on mini-batches.
    doc_topic_prior, topic_word_prior : float or None, default=None
        α and η; None is 1/n_components.
    max_iter : int, default=100
        The maximal number of steps; for "svi", of passes over the documents.
    tol : float, default=1e-3
        A fit ends when what is still to gain, estimated from how the steps shrink, is less than this many nats for each
        document.
    batch_size : int, default=128
        Documents of a mini-batch, for "svi".
    learning_decay, learning_offset : float, default=0.7 and 10.0
        "svi" has the rate (t + offset)^−decay at step t.
    max_doc_update_iter, mean_change_tol : int and float, default=100 and 1e-3
        The topic shares of a document are iterated at most so often, or until they change by less.
    verbose : bool, default=False
        Whether to print the progress of the fit.
    random_state : int, RandomState or None, default=None
        The seed of the start.

    Attributes
    ----------
    components_ (K, V) : the parameters of the topics' Dirichlet posterior, as in scikit-learn: how often each topic is
        expected to have given each word, plus η.
    exp_dirichlet_component_ (K, V) : exp E log β under this posterior.
    posterior_ : a Dirichlet over "topics".
    bound_ : the evidence lower bound, with all constants but those of the order of words, as scikit-learn's `score`.
    bound_error_ : its error in nats, 0: the bound is in closed form.
    converged_, n_iter_ : whether the fit converged, and its number of steps.

    Examples
    --------
    >>> import numpy as np
    >>> counts = np.array([[5, 4, 0, 0], [6, 3, 0, 1], [0, 0, 4, 5], [0, 1, 6, 4]])
    >>> topics = LatentDirichletAllocation(2, random_state=0).fit(counts)
    >>> topics.transform(counts).argmax(1).tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
    True
    """

    model = "topics"
    tasks = ("topics",)
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
        verbose: Any = False,
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
        self.verbose = verbose
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        tags.input_tags.sparse = True
        if tags.transformer_tags is not None:
            tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _local_rule(self, rate: Any, rows: int) -> Rule:
        """At every step the documents are iterated to convergence, and the topics move at this rate."""
        check_positive_ints(self, "max_doc_update_iter")
        together = _TOGETHER if rows > 2 * _TOGETHER**2 else None
        return svi(rate, local_steps=self.max_doc_update_iter, tolerance=self.mean_change_tol, together=together)

    def _rule(self, rows: int = 1) -> Rule:
        rates = {"vmp": 1.0, "svi": PowerDecay(self.learning_offset, self.learning_decay)}
        named = {name: partial(self._local_rule, rate, rows) for name, rate in rates.items()}
        return choose_rule(self.method, named, self, parameter="method", example="blr.svi(0.5, local_steps=50)")

    def _validate_counts(self, X: Any, *, reset: bool) -> Any:
        options: dict[str, Any] = {"accept_sparse": "csr", "dtype": np.float64, "ensure_non_negative": True}
        return validate_data(self, X, reset=reset, **options)

    def _model(self, word_prior: Any, _: str = "default", key: Key | None = None, start: int = 0) -> Model:
        """The model; `word_prior` is η, or the posterior so far. The kind of priors is not used: EM is not offered."""
        check_positive_ints(self, "n_components")
        for name in ("doc_topic_prior", "topic_word_prior"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}= is a number above 0, or None for 1/n_components, got {value!r}.")
        return latent_dirichlet(
            self.n_features_in_,
            self.n_components,
            document_prior=self.doc_topic_prior,
            word_prior=word_prior,
            key=key,
        )

    @double_precision
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to counts X (documents, words), dense or sparse."""
        dtype = input_dtype(X)
        check_positive_ints(self, "batch_size")
        if is_dask(X):
            validate_collection(self, X, reset=True)
            parts = DaskParts(X).map(_check_counts)
            width, rows = parts.reduce(_width_and_rows, _merge_widths)
            data: Any = parts.map(_documents, bucket(width)).known(rows=rows, count=float(rows))
        else:
            X = self._validate_counts(X, reset=True)
            rows, data = X.shape[0], None
        batch_size = self.batch_size if self.method == "svi" and self.batch_size < rows else None
        if data is not None:
            check_full_batches(data, batch_size)
        else:
            data = _pad_documents(X) if batch_size is None else documents(X, width=_padded_width(X))
        build = partial(self._model, self.topic_word_prior)
        self._set_topics(self._fit_starts(build, data, rows, batch_size, self._rule(rows)), dtype)
        return self

    @double_precision
    def partial_fit(self, X: Any, y: Any = None) -> Self:
        """Condition on more documents: the posterior so far is the prior for them, and `bound_` is the sum."""
        first, dtype = not hasattr(self, "components_"), input_dtype(X)
        X = self._validate_counts(X, reset=first)
        word_prior = self.topic_word_prior if first else np.asarray(self.posterior_["topics"].concentration)
        model = self._model(word_prior, key=make_key(self.random_state))
        start = None if first else {"topics": self.posterior_["topics"]}
        options: dict[str, Any] = {"steps": self.max_iter, "tolerance": self.tol * X.shape[0]}
        result = self._run(self._local_rule(1.0, X.shape[0]), model, start, _pad_documents(X), **options)
        bound_before = 0.0 if first else self.bound_
        bound = bound_before + float(result.bound or 0.0)
        self._set_topics(FittedModel(model, result, bound, result.bound_error), dtype)
        return self

    def _set_topics(self, fitted: FittedModel, dtype: Any) -> None:
        self._set_attributes(fitted)
        self.components_ = np.array(self.posterior_["topics"].concentration, dtype)

    @property
    def exp_dirichlet_component_(self) -> np.ndarray:
        """exp E log β, by which a topic's words are weighed in a document."""
        totals = self.components_.sum(axis=1, keepdims=True)
        return np.exp(digamma(self.components_) - digamma(totals))

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _validate_new(self, X: Any) -> Any:
        check_is_fitted(self)
        return self._validate_counts(X, reset=False)

    def _fit_documents(self, X: Any) -> Result:
        """Fit the topic shares of new documents, with the topics fixed."""
        # Passing the `max_iter` of `fit` reuses its compiled program; the first step converges.
        rule = self._local_rule(0.0, X.shape[0])
        return fit_documents(
            self._model(self.topic_word_prior), self.posterior_, _pad_documents(X), rule, self.max_iter
        )

    @row_by_row
    @in_dtype_of_inputs
    @double_precision
    def transform(self, X: Any, *, normalize: bool = True) -> np.ndarray:
        """The expected share of each topic in each document.

        With `normalize=False` the parameters of the Dirichlet posterior of the shares: how many words of the document
        each topic is expected to have given, plus α.
        """
        X = self._validate_new(X)
        shares = self._fit_documents(X).q["shares"]
        return np.asarray(shares.mean if normalize else shares.concentration)[: X.shape[0]]

    @double_precision
    def document_posterior(self, X: Any) -> Dirichlet:
        """The posterior of each document's topic shares, with the topics fixed: `transform` has its means."""
        X = self._validate_new(X)
        shares: Any = np.asarray(self._fit_documents(X).q["shares"].concentration)[: X.shape[0]]
        return Dirichlet(shares)

    @double_precision
    def score(self, X: Any, y: Any = None) -> float:
        """The evidence lower bound of these documents, with the topics fixed."""
        return float(self._fit_documents(self._validate_new(X)).bound or 0.0)

    def perplexity(self, X: Any) -> float:
        """exp(−bound per word) of these documents; lower is better."""
        X = self._validate_new(X)
        return float(np.exp(-self.score(X) / X.sum()))


def _check_counts(X: Any) -> Any:
    """A block of counts, dense or sparse, checked."""
    options: Any = {"accept_sparse": "csr", "dtype": np.float64, "ensure_non_negative": True}
    return check_array(X, ensure_min_samples=0, input_name="X", **options)


def _width_and_rows(X: Any) -> tuple[int, int]:
    """The most different words of a document, and the number of documents."""
    return int(np.diff(csr_array(X).indptr).max(initial=1)), X.shape[0]


def _merge_widths(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), one[1] + other[1]


def _documents(X: Any, width: int) -> dict[str, Any]:
    return documents(X, width=width)


def _pad_documents(X: Any) -> dict[str, Any]:
    return documents(X, rows=padded_rows(X.shape[0]), width=_padded_width(X))


def _padded_width(X: Any) -> int:
    """Number of different words to pad every document to: the bucket of the most that a document has."""
    return bucket(int(np.diff(csr_array(X).indptr).max(initial=1)))
