"""Gaussian processes with hyper-parameters by the evidence: regression in closed form, classes by sites or Laplace."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from .. import factors
from ..factor_graph.model import Model
from ..fitting.loop import run
from ..fitting.maximize import maximize
from ..fitting.result import Result
from ..models import gp, sparse_gp
from ..models.component_predictive import drawn
from ..models.kernels import RBF, Kernel
from ..numerics.checks import positive_int
from ..numerics.padding import bucket, column_bucket, pad
from ..objectives.batches import Weighted
from ..points.base import Delta
from ..points.quadrature import Quadrature, grid
from ..recipes import conjugate, cvi
from ..rule.rule import Rule
from ..steps.guards import Backtracking
from .base import Estimator, double, kept
from .preprocessing import codes, counted, standard, weights

_WITHIN = 1e4  # how far a hyper-parameter may go from where it starts, as a factor
_CHUNK = 1024  # rows of a prediction at a time


class _Process(Estimator):
    """What both estimators share: inputs, kernels, inducing inputs and predictions of f."""

    kernel: Any
    n_inducing: Any
    optimizer: Any
    dense_rows: ClassVar[int]
    kernel_: Any
    posterior_: Any
    x_places_: np.ndarray

    def _inputs(self, X: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, Kernel, np.ndarray | None]:
        """The inputs as the kernel takes them, the kernel to start from, and the inducing inputs, if any."""
        if self.optimizer not in ("bound", None):
            raise ValueError(f'optimizer= is "bound" or None (the kernel stays as it is), got {self.optimizer!r}.')
        if self.kernel is not None and not isinstance(self.kernel, Kernel):
            raise ValueError(
                "kernel= is None or a kernel of bayesrule.models.kernels, such as RBF(1.0, 2.0) or 2.0 * Matern32(), "
                f"got {type(self.kernel).__name__}."
            )
        self.x_mean_, self.x_scale_ = np.zeros(X.shape[1]), np.ones(X.shape[1])
        kernel = self.kernel
        if kernel is None:
            self.x_mean_, self.x_scale_ = standard(X, counts)
            kernel = RBF(1.0, np.sqrt(X.shape[1]))
        x = self._scaled(X)
        few = self._few(len(x))
        return x, kernel, None if few is None else np.asarray(sparse_gp.inducing_points(kernel, x, few))

    def _scaled(self, X: np.ndarray) -> np.ndarray:
        """In the kernel's units. One length scale sees distances alone, which columns of zeros leave as they are."""
        x = (X - self.x_mean_) / self.x_scale_
        return pad(x, len(x), column_bucket(x.shape[1])) if self.kernel is None else x

    def _few(self, rows: int) -> int | None:
        """How many inducing inputs, None for the whole process."""
        few = self.n_inducing
        if few is None or (isinstance(few, str) and few == "auto"):
            return None if few is None or rows <= self.dense_rows else 200
        return min(positive_int("n_inducing", few, alternatives='"auto" or None (the full process)'), rows)

    def _latent(self, X: np.ndarray, kernel: Kernel, block: Any, full: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the (co)variance of f at new inputs."""
        places, new = self.x_places_, self._scaled(X)
        rows, size = len(new), bucket(len(places))
        # Filled up as in `fit`, with outputs that have no sites, so that nothing is compiled for this very number.
        if hasattr(block, "sites"):
            block, places = resized(block, len(places), size), pad(places, size)
        found = []
        for begin in range(0, rows, rows if full else _CHUNK):
            part = new[begin : begin + (rows if full else _CHUNK)]
            mean, spread = gp.predict(block, kernel, places, pad(part, bucket(len(part))), full=full)
            found.append([np.asarray(array)[tuple(slice(len(part)) for _ in array.shape)] for array in (mean, spread)])
        mean, spread = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return mean, spread if full else np.maximum(spread, 0.0)


class GaussianProcessRegressor(RegressorMixin, _Process):
    r"""Regression with a Gaussian process, exact, its hyper-parameters chosen by the evidence.

    $f ∼ GP(0, k)$, $y_n ∼ N(f(x_n), σ^2)$, y standardised first (`normalize_y`).

    Parameters
    ----------
    kernel : None or a kernel of `bayesrule.models.kernels`, for y in standard units. None is `RBF()` with one length
        scale on inputs that are standardised first; a kernel of one's own sees the inputs as they are.
    noise : "auto" or σ², in y's own units squared.
    optimizer : "bound" maximises the evidence over the kernel's numbers, None keeps them.
    n_inducing : how many inducing inputs, None for the whole process; "auto" takes 200 beyond 1500 rows.
    normalize_y : whether y is standardised.
    random_state : for `sample_predictive`.

    Attributes
    ----------
    kernel_, noise_ : what was found; posterior_ : the block of f at `x_places_`, in standard units (for kernel=None the
    places have columns of zeros after their own).
    log_evidence_ : the log evidence of y, in its own units (with inducing inputs its lower bound, also `bound_`).

    A weight counts an example so many times.

    >>> import numpy as np
    >>> x = np.linspace(0, 6, 30)[:, None]
    >>> process = GaussianProcessRegressor().fit(x, np.sin(x[:, 0]))
    >>> mean, std = process.predict([[1.5], [9.0]], return_std=True)
    >>> round(float(mean[0]), 2), bool(std[1] > 10 * std[0])
    (1.0, True)
    """

    model = "gp"
    tasks = ("regression",)
    title = "a Gaussian process"
    dense_rows = 1500

    def __init__(
        self,
        kernel: Any = None,
        *,
        noise: Any = "auto",
        optimizer: str | None = "bound",
        n_inducing: Any = "auto",
        normalize_y: bool = True,
        random_state: Any = None,
    ):
        self.kernel, self.noise, self.optimizer = kernel, noise, optimizer
        self.n_inducing, self.normalize_y, self.random_state = n_inducing, normalize_y, random_state

    @double
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Choose the hyper-parameters by the evidence, and the posterior at them."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        counts, X, y = counted(weights(X, sample_weight), X, y)
        x, kernel, places = self._inputs(X, counts)
        self.y_mean_, self.y_scale_ = 0.0, 1.0
        if self.normalize_y:
            self.y_mean_, self.y_scale_ = (float(value) for value in standard(y, counts))
        noise: Any = self.noise
        if not (isinstance(noise, str) and noise == "auto") and not (isinstance(noise, Real) and float(noise) > 0):
            raise ValueError(f'noise= is "auto" or the variance of y about f, a number above 0, got {noise!r}.')
        rows = bucket(len(y))
        x, y, filled = pad(x, rows), pad((y - self.y_mean_) / self.y_scale_, rows), pad(counts, rows)
        known: dict[str, Any]
        known, free = ({}, {"kernel": kernel}) if self.optimizer == "bound" else ({"kernel": kernel}, {})
        starts = [free]
        if isinstance(noise, str):  # a process that follows the data, and one that smooths them
            starts = [{**free, "noise": 0.05}, {**free, "noise": 0.5}]
        else:
            known["noise"] = noise / self.y_scale_**2
        if free or isinstance(noise, str):
            score = lambda logs: _score(logs, known, places, x, y, filled)
            tried = [maximize(score, start, within=_WITHIN, relative_gain=1e-10) for start in starts]
            found = max(tried, key=lambda one: one.value)
            known = {**known, **found.hyper}
        if places is None:
            model, data = _regression(known["kernel"], x, known["noise"]), {"y": y}
        else:
            model, data = _sparse_regression(known["kernel"], places, known["noise"]), {"x": x, "y": y}
        result = self._run(conjugate(), model, None, Weighted(data, jnp.asarray(filled)), steps=1)
        block = kept(result.q["f"])
        self.posterior_ = resized(block, rows, len(counts)) if places is None else block
        self.x_places_ = x[: len(counts)] if places is None else places
        self.kernel_, self.noise_ = kept(known["kernel"]), np.asarray(known["noise"]).item() * self.y_scale_**2
        self.bound_ = self.log_evidence_ = _bound(result) - float(counts.sum() * np.log(self.y_scale_))
        return self

    @double
    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """The mean of y, and with `return_std` its standard deviation, or with `return_cov` the covariance.

        Both have the noise of an observation in them.
        """
        if return_std and return_cov:
            raise ValueError("Ask for return_std or for return_cov: the standard deviations are in the covariance.")
        mean, spread = self._latent(self._validate(X), self.kernel_, self.posterior_, full=return_cov)
        mean, spread = self.y_mean_ + self.y_scale_ * mean, self.y_scale_**2 * spread
        if return_cov:
            return mean, spread + self.noise_ * np.eye(len(mean))
        return (mean, np.sqrt(spread + self.noise_)) if return_std else mean

    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of y at these inputs, jointly, (n_samples, n): f and the noise."""
        mean, covariance = self.predict(X, return_cov=True)
        random = check_random_state(self.random_state if random_state is None else random_state)
        return mean + random.standard_normal((n_samples, len(mean))) @ np.linalg.cholesky(covariance).T


class GaussianProcessClassifier(ClassifierMixin, _Process):
    r"""Classification with a Gaussian process: variational (sites by `cvi`) or Laplace's method, kernel by the bound.

    $f ∼ GP(0, k)$, $p(y_n = 1 \mid f) = 1/(1 + e^{−f(x_n)})$; of more than two classes one against the rest for
    each, the probabilities normalised.

    Parameters
    ----------
    kernel : None or a kernel of `bayesrule.models.kernels`. None is `RBF()` with one length scale on inputs that are
        standardised first; a kernel of one's own sees the inputs as they are.
    method : "cvi", Gaussian variational inference, or "laplace".
    optimizer : "bound" maximises the bound (Laplace's evidence) over the kernel's numbers, None keeps them.
    n_inducing : how many inducing inputs, None for the whole process; "auto" takes 200 beyond 500 rows.
    class_weight : None, "balanced" or a dict.
    random_state : for `sample_predictive`.

    Attributes
    ----------
    posterior_, kernel_ : of two classes the block of f and its kernel, of more a list of each; bound_ : the (sum of
    the) bounds on the log evidence.

    >>> import numpy as np
    >>> x = np.linspace(-3, 3, 20)[:, None]
    >>> process = GaussianProcessClassifier().fit(x, np.where(np.abs(x[:, 0]) < 1, "in", "out"))
    >>> process.predict([[0.0], [2.5]]).tolist()
    ['in', 'out']
    """

    model = "gp"
    tasks = ("binary", "classes")
    title = "a Gaussian process"
    dense_rows = 500

    def __init__(
        self,
        kernel: Any = None,
        *,
        method: str = "cvi",
        optimizer: str | None = "bound",
        n_inducing: Any = "auto",
        class_weight: Any = None,
        random_state: Any = None,
    ):
        self.kernel, self.method, self.optimizer = kernel, method, optimizer
        self.n_inducing, self.class_weight, self.random_state = n_inducing, class_weight, random_state

    @double
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit a process for the second of two classes, or for each of more."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        if self.method not in _POINTS:
            raise ValueError(f'method= is "cvi" or "laplace", got {self.method!r}.')
        self.classes_, labels = codes(y)
        counts = weights(X, sample_weight, self.class_weight, self.classes_, labels)
        counts, X, labels = counted(counts, X, labels)
        x, kernel, places = self._inputs(X, counts)
        rows, count = bucket(len(x)), len(x)
        x, filled = pad(x, rows), pad(counts, rows)
        several = len(self.classes_) > 2
        found = []
        for chosen in range(len(self.classes_)) if several else [1]:
            ones = pad((labels == chosen).astype(float), rows)
            found.append(self._one(x, Weighted({"x": x, "y": ones}, jnp.asarray(filled)), kernel, places))
        blocks = [resized(block, rows, count) if places is None else block for block, _, _ in found]
        kernels = [kernel for _, kernel, _ in found]
        self.posterior_, self.kernel_ = (blocks, kernels) if several else (blocks[0], kernels[0])
        self.x_places_ = x[:count] if places is None else places
        self.bound_ = float(sum(bound for _, _, bound in found))
        return self

    def _one(self, x: np.ndarray, data: Weighted, kernel: Kernel, places: Any) -> tuple[Any, Kernel, float]:
        """One class against the others: the block of f, its kernel and the bound."""
        points, rule, start = _POINTS[self.method], _RULES[self.method], None
        if self.optimizer is not None:
            # Of inducing inputs Laplace's method has no evidence of its own, and takes the variational bound's choice.
            kernel = self._kernel(x, data, kernel, places, "cvi" if places is not None else self.method)
        result = self._run(rule, _classes(x, places, kernel, points), start, data, steps=200, tolerance=1e-9)
        return kept(result.q["f"]), kept(kernel), _bound(result)

    def _kernel(self, x: np.ndarray, data: Weighted, kernel: Kernel, places: Any, method: str) -> Kernel:
        """The kernel that the bound is highest at; every look at another one starts from the last one's posterior."""
        points, rule = _POINTS[method], _RULES[method]
        q: Any = _classes(x, places, kernel, points).starting_point(None)

        def scored(logs: Any) -> tuple[Any, Any]:
            nonlocal q
            new, value, slope = _class_score(logs, rule, q, x, places, data, points)
            q = new if np.isfinite(value) else q
            return value, slope

        return maximize(scored, kernel, within=_WITHIN, relative_gain=1e-8).hyper

    @double
    def predict_proba(self, X: Any) -> np.ndarray:
        """Every class's probability, averaged over f by quadrature."""
        X = self._validate(X)
        several = len(self.classes_) > 2
        pairs = zip(self.kernel_, self.posterior_, strict=True) if several else [(self.kernel_, self.posterior_)]
        nodes, shares = (np.asarray(array) for array in grid(64, 1))
        ones = []
        for kernel, block in pairs:
            mean, spread = self._latent(X, kernel, block)
            f = mean[:, None] + np.sqrt(spread)[:, None] * nodes[:, 0]
            ones.append(0.5 * (1 + np.tanh(0.5 * f)) @ shares)
        found = np.stack(ones if several else [1 - ones[0], ones[0]], axis=1)
        return found / found.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        found = self.predict_proba(X)
        return self.classes_[np.argmax(found, axis=1)]

    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of the label of each row by itself, (n_samples, n)."""
        found = np.tile(self.predict_proba(X), (n_samples, 1))
        random = check_random_state(self.random_state if random_state is None else random_state)
        return self.classes_[drawn(random, found).reshape(n_samples, -1)]


def _bound(result: Result) -> float:
    return math.nan if result.bound is None else result.bound


# Compiled once for every kind of kernel and number of rows.


@jax.jit
def _score(logs: Any, known: Any, places: Any, x: Any, y: Any, counts: Any) -> tuple[Any, Any]:
    """The log evidence (its bound, with inducing inputs) and its slope in the numbers' logarithms."""

    def value(logs: Any) -> Any:
        hyper = {**known, **jax.tree.map(jnp.exp, logs)}
        if places is None:
            return gp.log_evidence(hyper["kernel"], x, y, hyper["noise"], counts)
        return sparse_gp.log_evidence(hyper["kernel"], places, x, y, hyper["noise"], counts)

    return jax.value_and_grad(value)(logs)


_regression = jax.jit(gp.regression)


@jax.jit
def _sparse_regression(kernel: Kernel, places: Any, noise: Any) -> Model:
    return sparse_gp.sparse(kernel, places, factors.linear("y", {"f": None}, precision=1 / noise))


@partial(jax.jit, static_argnames="points")
def _classes(x: Any, places: Any, kernel: Kernel, points: Any) -> Model:
    likelihood = factors.bernoulli_logit("y", {"f": None}, points=points)
    return gp.process(kernel, x, likelihood) if places is None else sparse_gp.sparse(kernel, places, likelihood)


@partial(jax.jit, static_argnames="points")
def _class_score(
    logs: Any, rule: Rule, q: Any, x: Any, places: Any, data: Weighted, points: Any
) -> tuple[Any, Any, Any]:
    """The posterior at a kernel, its bound (Laplace's evidence), and the slope in the numbers' logarithms."""
    built = lambda logs: _classes(x, places, jax.tree.map(jnp.exp, logs), points)
    over = lambda model, q: type(q)({"f": q["f"].with_base_of(model.blocks["f"])})
    here = built(logs)
    q = run(rule, here, rule.init(over(here, q), here), data, jax.random.key(0), 100, 1e-10).q

    def value(logs: Any) -> Any:
        if points.delta:
            kernel, y = jax.tree.map(jnp.exp, logs), data.examples["y"]
            return gp.laplace_evidence(kernel, x, here.factors["y"], y, q["f"].mean, data.weights)  # pyright: ignore[reportArgumentType]  # a factor of outputs
        # The posterior is where the bound is highest, so how it moves with the numbers does not matter.
        model = built(logs)
        return model.bound(over(model, jax.lax.stop_gradient(q)), data)

    return q, *jax.value_and_grad(value)(logs)


_POINTS = {"cvi": Quadrature(20), "laplace": Delta()}
# A whole step of variational inference may overshoot, where the kernel is nearly a step; Newton's has no such trouble.
_RULES = {"cvi": cvi(1.0).replace(guard=Backtracking(monotone=True)), "laplace": cvi(1.0)}


def resized(block: Any, size: int, rows: int) -> Any:
    """A process of `size` outputs cut to its first ones, or filled up with outputs that have no sites."""

    def leaf(array: np.ndarray) -> np.ndarray:
        for axis, length in enumerate(array.shape):
            if length == size and rows < size:
                array = np.take(array, range(rows), axis)
            elif length == size:
                width = [(0, rows - size if other == axis else 0) for other in range(array.ndim)]
                array = np.pad(array, width)
        return array

    return jax.tree.map(leaf, block)
