"""Gaussian processes with hyper-parameters chosen by the evidence: exact regression, approximate classification."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from .. import factors
from ..factor_graph.model import Model
from ..factor_graph.sites import message, summed_over_rows
from ..families.product import Product
from ..fitting.fit import run_as_fit
from ..fitting.maximize import Maximum, maximize
from ..fitting.result import Result
from ..models import gp, sparse_gp
from ..models.component_predictive import draw_categories
from ..models.kernels import RBF, Kernel
from ..numerics.checks import positive_int
from ..numerics.padding import bucket, column_bucket, pad
from ..numerics.programs import compiled
from ..objectives.batches import Weighted
from ..points.base import Delta
from ..points.quadrature import Quadrature, grid
from ..recipes import conjugate, cvi
from ..steps.guards import Backtracking
from .base import Classifier, Estimator, double_precision, in_dtype_of_inputs, to_numpy
from .preprocessing import drop_unweighted, encode_classes, example_weights, mean_and_scale
from .sklearn_kernels import Conversion, convert, is_sklearn_kernel

_LARGEST_FACTOR = 1e4  # By which a hyper-parameter may differ from its start.
_CHUNK_ROWS = 1024  # Rows that are predicted at a time.
_FINE_GAIN = 1e-14  # relative, at which the search for scikit-learn's hyper-parameters ends: its gradient is 0 then
_INDUCING = 200  # Inducing inputs of n_inducing="auto", beyond `_dense_rows` rows.


class _GaussianProcess(Estimator):
    """Regression and classification with Gaussian processes: inputs, kernels, inducing inputs, predictions of f."""

    kernel: Any
    n_inducing: Any
    optimizer: Any
    _dense_rows: ClassVar[int]
    """With n_inducing="auto", the most rows for which the full process is used."""
    draws_of_missing_inputs = 1  # The cost of a fit is cubic in the rows.
    refits_with_missing_inputs = 2
    kernel_: Any
    posterior_: Any
    x_places_: np.ndarray
    _conversion: Conversion | None = None
    """What scikit-learn's kernel was converted to; None for a kernel of this library."""

    def _prepare_inputs(self, X: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, Kernel, np.ndarray | None]:
        """The inputs in the kernel's units, the kernel to start from, and the inducing inputs (None for all inputs)."""
        if self.optimizer not in ("bound", None):
            raise ValueError(f'optimizer= is "bound" or None (the kernel stays as it is), got {self.optimizer!r}.')
        self._conversion, kernel = None, self.kernel
        if is_sklearn_kernel(kernel):
            self._conversion = convert(kernel)
            kernel = self._conversion.kernel
        if kernel is not None and not isinstance(kernel, Kernel):
            raise ValueError(
                "kernel= is None, a kernel of bayesrule.models.kernels, such as RBF(1.0, 2.0) or 2.0 * Matern32(), or "
                f"one of sklearn.gaussian_process.kernels, got {type(kernel).__name__}."
            )
        self.x_mean_, self.x_scale_ = np.zeros(X.shape[1]), np.ones(X.shape[1])
        if kernel is None:
            self.x_mean_, self.x_scale_ = mean_and_scale(X, weights)
            kernel = RBF(1.0, np.sqrt(X.shape[1]))
        x = self._scale_inputs(X)
        count = self._inducing_count(len(x))
        return x, kernel, None if count is None else np.asarray(sparse_gp.inducing_points(kernel, x, count))

    def _scale_inputs(self, X: np.ndarray) -> np.ndarray:
        """Inputs in the kernel's units.

        The default kernel has one length scale and depends on distances only, which columns of zeros do not change.
        They let inputs of different widths share compiled programs.
        """
        x = (X - self.x_mean_) / self.x_scale_
        return pad(x, len(x), column_bucket(x.shape[1])) if self.kernel is None else x

    def _maximize(self, score: Any, start: dict[str, Any], relative_gain: float) -> Maximum:
        """The hyper-parameters that maximise a score, within a factor of their start or scikit-learn's bounds."""
        if self._conversion is None:
            return maximize(score, start, within=_LARGEST_FACTOR, relative_gain=relative_gain)
        lower, upper = self._conversion.limits(noise=self._conversion.noise is not None)
        if "noise" in start and "noise" not in lower:
            lower["noise"], upper["noise"] = (start["noise"] * _LARGEST_FACTOR**power for power in (-1, 1))
        limits = tuple({name: part[name] for name in start} for part in (lower, upper))
        return maximize(score, start, limits=(limits[0], limits[1]), relative_gain=_FINE_GAIN)

    def _is_kernel_free(self) -> bool:
        """Whether the search may change a hyper-parameter of the kernel."""
        conversion = self._conversion
        if self.optimizer is None or conversion is None:
            return self.optimizer == "bound"
        return bool(np.any(conversion.is_free & ~conversion.is_noise))

    def _as_fitted(self, kernel: Any, noise: Any = None) -> Any:
        """A kernel for `kernel_`: of the library that `kernel` was of."""
        return to_numpy(kernel) if self._conversion is None else self._conversion.restore(kernel, noise)

    def _hyper_at(self, theta: Any, kernel: Any, noise: float | None) -> tuple[Any, float | None]:
        """The kernel and the noise for other hyper-parameters, given by their logarithms.

        Args:
            theta: as scikit-learn's kernel has them; for a kernel of this library the logarithms of its leaves.
            kernel: the fitted kernel.
            noise: the noise, if it is the last of `theta` for a kernel of this library.
        """
        if self._conversion is not None:
            return self._conversion.at(theta)
        leaves, structure = jax.tree.flatten(kernel if noise is None else (kernel, noise))
        sizes = [np.size(leaf) for leaf in leaves]
        theta = np.asarray(theta, float)
        if theta.shape != (sum(sizes),):
            raise ValueError(
                f"theta= has the logarithms of {sum(sizes)} hyper-parameters, got the shape {theta.shape}."
            )
        parts = np.split(np.exp(theta), np.cumsum(sizes)[:-1])
        tree = structure.unflatten(part.reshape(np.shape(leaf)) for part, leaf in zip(parts, leaves, strict=True))
        return (tree, None) if noise is None else (tree[0], float(tree[1]))

    def _training(self) -> Any:
        """The padded training rows, which `fit` keeps and a saved run does not."""
        rows = getattr(self, "_rows", None)
        if rows is None:
            raise ValueError(
                f"This {type(self).__name__} was read from a saved run, which does not hold its training rows: fit it "
                "again for the evidence at other hyper-parameters. The one at its own is bound_."
            )
        return rows

    def _inducing_count(self, rows: int) -> int | None:
        """How many inducing inputs to use; None for the full process."""
        count = self.n_inducing
        if count is None or (isinstance(count, str) and count == "auto"):
            return None if count is None or rows <= self._dense_rows else _INDUCING
        return min(positive_int("n_inducing", count, alternatives='"auto" or None (the full process)'), rows)

    def _predict_latent(
        self, X: np.ndarray, kernel: Kernel, block: Any, full: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The mean of f at new inputs and its variance, or (full) its covariance."""
        places, new = self.x_places_, self._scale_inputs(X)
        rows, padded_size = len(new), bucket(len(places))
        # The training inputs are padded as in `fit`, with outputs that have no sites, so that one compiled program
        # serves several numbers of them.
        if hasattr(block, "sites"):
            block, places = _resize(block, len(places), padded_size), pad(places, padded_size)
        chunk_rows = rows if full else _CHUNK_ROWS
        means, variances = [], []
        for begin in range(0, rows, chunk_rows):
            chunk = new[begin : begin + chunk_rows]
            mean, variance = gp.predict(block, kernel, places, pad(chunk, bucket(len(chunk))), full=full)
            means.append(np.asarray(mean)[: len(chunk)])
            variances.append(np.asarray(variance)[tuple(slice(len(chunk)) for _ in variance.shape)])
        mean, variance = np.concatenate(means), np.concatenate(variances)
        return mean, variance if full else np.maximum(variance, 0.0)


class GaussianProcessRegressor(RegressorMixin, _GaussianProcess):
    r"""Exact regression with a Gaussian process, its hyper-parameters chosen by the evidence.

    $f ∼ GP(0, k)$ and $y_n ∼ N(f(x_n), σ^2)$. An example of weight c counts as c examples.

    Parameters
    ----------
    kernel : None or a kernel of `bayesrule.models.kernels` or `sklearn.gaussian_process.kernels`, default=None
        k, for standardised y. None is `RBF()` with one length scale, on standardised inputs; any other kernel gets the
        inputs as they are. A kernel of scikit-learn's keeps its bounds and fixed hyper-parameters, and its WhiteKernel
        is the noise, for standardised y.
    noise : float or "auto", default="auto"
        σ² in the units of y², or "auto" to choose it by the evidence.
    optimizer : "bound" or None, default="bound"
        "bound" maximises the evidence over the hyper-parameters of the kernel; None leaves them as they are.
    n_inducing : int, None or "auto", default="auto"
        The number of inducing inputs; None for the full process; "auto" uses 200 beyond 1500 rows.
    normalize_y : bool, default=True
        Whether y is standardised.
    random_state : int, RandomState or None, default=None
        The seed of `sample_predictive`.

    Attributes
    ----------
    kernel_, noise_ : the kernel and σ² that were chosen; a kernel of scikit-learn's, if one was given.
    x_places_ : the inputs at which the posterior is represented, in the kernel's units: the training inputs or the
        inducing ones. With `kernel=None` they have columns of zeros at the end.
    posterior_ : the posterior of f at `x_places_`, for standardised y.
    log_evidence_ : the log evidence of y in its own units; with inducing inputs a lower bound. Also `bound_`.
    bound_error_ : its error in nats, 0: it is in closed form.
    x_mean_, x_scale_, y_mean_, y_scale_ : what inputs and targets are standardised by.

    Examples
    --------
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
    _dense_rows = 1500

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

    @double_precision
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Choose the hyper-parameters by the evidence, and compute the posterior at them."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        weights, X, y = drop_unweighted(example_weights(X, sample_weight), X, y)
        x, kernel, inducing = self._prepare_inputs(X, weights)
        self.y_mean_, self.y_scale_ = 0.0, 1.0
        if self.normalize_y:
            self.y_mean_, self.y_scale_ = (float(value) for value in mean_and_scale(y, weights))
        is_noise_free = isinstance(self.noise, str) and self.noise == "auto"
        if not is_noise_free and not (isinstance(self.noise, Real) and float(self.noise) > 0):
            raise ValueError(f'noise= is "auto" or the variance of y about f, a number above 0, got {self.noise!r}.')
        level = None if self._conversion is None else self._conversion.noise
        if level is not None and not is_noise_free:
            raise ValueError(
                f'The noise is given twice, by noise={self.noise!r} and by a WhiteKernel: leave noise="auto", or take '
                "the WhiteKernel out."
            )
        if self._conversion is not None and level is not None:
            is_noise_free = self.optimizer is not None and bool(self._conversion.is_free[self._conversion.is_noise][0])
        rows = bucket(len(y))
        x, y = pad(x, rows), pad((y - self.y_mean_) / self.y_scale_, rows)
        padded_weights = pad(weights, rows)
        hyper: dict[str, Any]
        hyper, free = ({}, {"kernel": kernel}) if self._is_kernel_free() else ({"kernel": kernel}, {})
        starts, best = [free], None
        if level is not None:
            starts = [{**free, "noise": level}] if is_noise_free else starts
            hyper = hyper if is_noise_free else {**hyper, "noise": level}
        elif is_noise_free:
            # The evidence can have two maxima: a process that follows the data, and a smooth one with much noise.
            starts = [{**free, "noise": 0.05}, {**free, "noise": 0.5}]
        else:
            hyper["noise"] = float(self.noise) / self.y_scale_**2
        if free or is_noise_free:
            evidence = lambda logs: _log_evidence(logs, hyper, inducing, x, y, padded_weights)
            maxima = [self._maximize(evidence, start, 1e-10) for start in starts]
            best = max(maxima, key=lambda maximum: maximum.value)
            hyper = {**hyper, **best.hyper}
        if inducing is None:
            model, data = _regression_model(hyper["kernel"], x, hyper["noise"]), {"y": y}
        else:
            model, data = _sparse_regression_model(hyper["kernel"], inducing, hyper["noise"]), {"x": x, "y": y}
        result = self._run(conjugate(), model, None, Weighted(data, jnp.asarray(padded_weights)), steps=1)
        block = to_numpy(result.q["f"])
        self.posterior_ = _resize(block, rows, len(weights)) if inducing is None else block
        self.x_places_ = x[: len(weights)] if inducing is None else inducing
        noise = np.asarray(hyper["noise"]).item()
        self.kernel_, self.noise_ = self._as_fitted(hyper["kernel"], noise), noise * self.y_scale_**2
        _warn_at_bounds(self.kernel_ if self._conversion is not None and starts[0] else None)
        self._rows = {"x": x, "y": y, "weights": padded_weights, "inducing": inducing, "free": tuple(starts[0])}
        # The evidence as the search computes it has more digits than the bound where the noise is very small.
        evidence_found = _bound(result) if best is None else best.value
        self.bound_ = self.log_evidence_ = evidence_found - float(weights.sum() * np.log(self.y_scale_))
        self.bound_error_ = result.bound_error
        return self

    @in_dtype_of_inputs
    @double_precision
    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """The mean of a new y; with `return_std` also its standard deviation, with `return_cov` the covariance.

        Both include the noise of an observation.
        """
        if return_std and return_cov:
            raise ValueError("Give return_std or return_cov, not both: the covariance has the variances in it.")
        X = self._validate(X)
        mean, variance = self._predict_latent(X, _converted(self.kernel_), self.posterior_, full=return_cov)
        mean, variance = self.y_mean_ + self.y_scale_ * mean, self.y_scale_**2 * variance
        if return_cov:
            return mean, variance + self.noise_ * np.eye(len(mean))
        return (mean, np.sqrt(variance + self.noise_)) if return_std else mean

    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Joint draws of y at these inputs, with its noise, (n_samples, n)."""
        mean, covariance = self.predict(X, return_cov=True)
        random = check_random_state(self.random_state if random_state is None else random_state)
        return mean + random.standard_normal((n_samples, len(mean))) @ np.linalg.cholesky(covariance).T

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Joint draws of y at these inputs, with its noise, (n, n_samples): scikit-learn's name and shape."""
        mean, covariance = self.predict(X, return_cov=True)
        return check_random_state(random_state).multivariate_normal(mean, covariance, n_samples).T

    @double_precision
    def log_marginal_likelihood(self, theta: Any = None, eval_gradient: bool = False, clone_kernel: bool = True) -> Any:
        """The log evidence of y in its own units, at these hyper-parameters; with inducing inputs its bound.

        Args:
            theta: the logarithms of the hyper-parameters: those of scikit-learn's `kernel_.theta`, or for a kernel of
                this library those of its leaves, and of the noise for noise="auto"; None for the fitted ones.
            eval_gradient: whether to return the gradient in `theta` too.
            clone_kernel: False changes the hyper-parameters of scikit-learn's `kernel_` as well, but no prediction.
        """
        check_is_fitted(self)
        if theta is None:
            if eval_gradient:
                raise ValueError(
                    "Gradient can only be evaluated for theta!=None: pass kernel_.theta for the fitted one."
                )
            return np.float64(self.log_evidence_)
        rows = self._training()
        is_auto = self._conversion is None and isinstance(self.noise, str)
        kernel, noise = self._hyper_at(theta, self.kernel_, self.noise_ / self.y_scale_**2 if is_auto else None)
        noise = self.noise_ / self.y_scale_**2 if noise is None else noise
        hyper = {"kernel": kernel, "noise": noise}
        # The same split as in `fit` has the same program.
        logs = jax.tree.map(np.log, {name: hyper.pop(name) for name in rows["free"]})
        value, gradient = _log_evidence(logs, hyper, rows["inducing"], rows["x"], rows["y"], rows["weights"])
        if self._conversion is not None and not clone_kernel:
            self.kernel_.theta = np.asarray(theta, float)
        value = np.float64(value) - rows["weights"].sum() * np.log(self.y_scale_)
        return (value, self._flat_gradient(gradient, is_auto)) if eval_gradient else value

    def _flat_gradient(self, gradient: dict[str, Any], is_auto: bool) -> np.ndarray:
        """A gradient in the logarithms of the hyper-parameters as a vector like `theta`."""
        if self._conversion is None:
            parts = [gradient[name] for name in ("kernel", "noise")[: 1 + is_auto] if name in gradient]
            return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(parts)])
        values = self._conversion.kernel.values
        slopes = gradient["kernel"].values if "kernel" in gradient else np.zeros(len(values))
        return self._conversion.gather(slopes, gradient.get("noise", 0.0))


class GaussianProcessClassifier(Classifier, _GaussianProcess):
    r"""Classification with a Gaussian process, by variational inference or Laplace's method.

    $f ∼ GP(0, k)$ and $p(y_n = 1 \mid f) = 1/(1 + e^{−f(x_n)})$. For more than two classes there is a process for each
    class against the others, and their probabilities are normalised.

    Parameters
    ----------
    kernel : None or a kernel of `bayesrule.models.kernels` or `sklearn.gaussian_process.kernels`, default=None
        None is `RBF()` with one length scale, on standardised inputs; any other kernel gets the inputs as they are.
    method : {"cvi", "laplace"}, default="cvi"
        Gaussian variational inference by conjugate-computation steps, or Laplace's method.
    optimizer : "bound" or None, default="bound"
        "bound" maximises the bound on the log evidence (or Laplace's evidence) over the hyper-parameters of the kernel;
        None leaves them as they are.
    n_inducing : int, None or "auto", default="auto"
        The number of inducing inputs; None for the full process; "auto" uses 200 beyond 500 rows.
    class_weight : None, "balanced" or dict, default=None
        Weights of the classes, as in scikit-learn.
    random_state : int, RandomState or None, default=None
        The seed of `sample_predictive`.

    Attributes
    ----------
    classes_ : the classes, sorted.
    posterior_, kernel_ : for two classes the posterior of f at `x_places_` and its kernel; for more a list of each
        (of kernels of scikit-learn's, its CompoundKernel).
    x_places_ : as for `GaussianProcessRegressor`.
    bound_ : the bound on the log evidence, or Laplace's evidence; for more than two classes their sum.
    bound_error_ : the bound's integration error in nats; None for Laplace's evidence.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.linspace(-3, 3, 20)[:, None]
    >>> process = GaussianProcessClassifier().fit(x, np.where(np.abs(x[:, 0]) < 1, "in", "out"))
    >>> process.predict([[0.0], [2.5]]).tolist()
    ['in', 'out']
    """

    model = "gp"
    tasks = ("binary", "classes")
    title = "a Gaussian process"
    _dense_rows = 500

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

    @double_precision
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit a process for the second of two classes, or for each of more."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        if self.method not in _POINTS:
            raise ValueError(f'method= is "cvi" or "laplace", got {self.method!r}.')
        self.classes_, labels = encode_classes(y)
        weights = example_weights(X, sample_weight, self.class_weight, self.classes_, labels)
        weights, X, labels = drop_unweighted(weights, X, labels)
        x, start_kernel, inducing = self._prepare_inputs(X, weights)
        if self._conversion is not None and self._conversion.noise is not None:
            raise ValueError(
                "A classifier has no noise of y, so that its kernel takes no WhiteKernel: leave it out. Labels that "
                "contradict each other are in the probabilities already."
            )
        rows, count = bucket(len(x)), len(x)
        x, padded_weights = pad(x, rows), pad(weights, rows)
        several = len(self.classes_) > 2
        blocks, kernels, results, all_data = [], [], [], []
        for label in range(len(self.classes_)) if several else [1]:
            is_label = pad((labels == label).astype(float), rows)
            data = Weighted({"x": x, "y": is_label}, jnp.asarray(padded_weights))
            result, kernel = self._fit_one_against_rest(x, data, start_kernel, inducing)
            block = to_numpy(result.q["f"])
            blocks.append(_resize(block, rows, count) if inducing is None else block)
            kernels.append(kernel)
            results.append(result)
            all_data.append(data)
        self.posterior_ = blocks if several else blocks[0]
        self.kernel_ = kernels if several else kernels[0]
        if several and self._conversion is not None:
            from sklearn.gaussian_process.kernels import CompoundKernel  # Only who gave such a kernel waits for it.

            self.kernel_ = CompoundKernel(kernels)
        self._rows = {"x": x, "data": to_numpy(all_data), "inducing": inducing}
        self.x_places_ = x[:count] if inducing is None else inducing
        self.bound_ = float(sum(_bound(result) for result in results))
        errors: list[Any] = [result.bound_error for result in results]
        # Laplace's evidence is no integral, so that it has no error; integration errors of the classes add up.
        self.bound_error_ = None if None in errors else float(sum(errors))
        return self

    def _fit_one_against_rest(
        self, x: np.ndarray, data: Weighted, kernel: Kernel, inducing: Any
    ) -> tuple[Result, Kernel]:
        """The fit of f for one class against the others, and its kernel."""
        if not self._is_kernel_free():
            model, start = _class_model(x, inducing, kernel, _POINTS[self.method]), None
        else:
            # With inducing inputs Laplace's evidence is not available: the kernel is chosen by the variational bound.
            by = self._evidence_method(inducing)
            kernel, messages = self._choose_kernel(x, data, kernel, inducing, by)
            _warn_at_bounds(None if self._conversion is None else self._as_fitted(kernel))
            logs = jax.tree.map(jnp.log, kernel)
            model, start = _class_start(logs, messages, x, inducing, data, _POINTS[self.method])
        result = self._run(_RULES[self.method], model, start, data, steps=_STEPS, tolerance=1e-9)
        return result, self._as_fitted(kernel)

    def _evidence_method(self, inducing: Any) -> str:
        return "cvi" if inducing is not None else self.method

    def _choose_kernel(
        self, x: np.ndarray, data: Weighted, kernel: Kernel, inducing: Any, method: str
    ) -> tuple[Kernel, Any]:
        """The kernel that maximises the bound, and the rows' messages there: every fit starts from the last one's."""
        points, rule = _POINTS[method], _RULES[method]
        messages = (np.zeros(len(x)), np.zeros(len(x)))
        last, tolerance = math.nan, _LOOSEST

        def evaluate(logs: Any) -> tuple[Any, Any]:
            nonlocal messages, last, tolerance
            model, start = _class_start(logs, messages, x, inducing, data, points)
            q = run_as_fit(rule, model, start, data, steps=_STEPS, tolerance=tolerance).q
            new, bound, gradient = _class_bound(logs, q, x, inducing, data, points)
            if np.isfinite(bound):
                # While a change of the kernel gains many nats, a rough posterior tells how many.
                gain, last, messages = abs(float(bound) - last), float(bound), new
                tolerance = min(max(_SHARE_OF_GAIN * gain, _TIGHTEST), _LOOSEST) if gain >= 0 else _LOOSEST
            return bound, gradient

        if self.kernel is None:
            # The bound can have a second maximum at a process without variance, and a search from a length scale that
            # is too long may lead there.
            scale = kernel.lengthscale  # pyright: ignore[reportAttributeAccessIssue]  # It is an RBF.
            starts = [RBF(1.0, part * scale) for part in (0.25, 1.0)]
            bounds = [float(evaluate(jax.tree.map(jnp.log, start))[0]) for start in starts]
            kernel = starts[int(np.argmax(np.nan_to_num(bounds, nan=-np.inf)))]

        def score(logs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            bound, gradient = evaluate(logs["kernel"])
            return bound, {"kernel": gradient}

        return self._maximize(score, {"kernel": kernel}, 1e-8).hyper["kernel"], messages

    @in_dtype_of_inputs
    @double_precision
    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, averaged over f by quadrature."""
        X = self._validate(X)
        several = len(self.classes_) > 2
        blocks = self.posterior_ if several else [self.posterior_]
        pairs = zip(map(_converted, self._kernels()), blocks, strict=True)
        nodes, node_weights = (np.asarray(array) for array in grid(64, 1))
        against_rest = []
        for kernel, block in pairs:
            mean, variance = self._predict_latent(X, kernel, block)
            f = mean[:, None] + np.sqrt(variance)[:, None] * nodes[:, 0]
            against_rest.append(0.5 * (1 + np.tanh(0.5 * f)) @ node_weights)
        probabilities = np.stack(against_rest if several else [1 - against_rest[0], against_rest[0]], axis=1)
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def _kernels(self) -> list[Any]:
        """The fitted kernel of each process."""
        if len(self.classes_) == 2:
            return [self.kernel_]
        return list(getattr(self.kernel_, "kernels", self.kernel_))

    @in_dtype_of_inputs
    @double_precision
    def latent_mean_and_variance(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """The mean and the variance of f at these inputs, for two classes."""
        X = self._validate(X)
        if len(self.classes_) > 2:
            raise ValueError(
                "Returning the mean and variance of the latent function f is only supported for binary classification, "
                f"received {len(self.classes_)} classes: use predict_proba."
            )
        return self._predict_latent(X, _converted(self.kernel_), self.posterior_)

    @double_precision
    def log_marginal_likelihood(self, theta: Any = None, eval_gradient: bool = False, clone_kernel: bool = True) -> Any:
        """The bound on the log evidence, or Laplace's evidence, at these hyper-parameters.

        For more than two classes it is the mean of those of their processes, as in scikit-learn.

        Args:
            theta: the logarithms of the hyper-parameters of the kernel, as for `GaussianProcessRegressor`; for more
                than two classes those of one kernel, which all get, or of all. None for the fitted ones.
            eval_gradient: whether to return the gradient in `theta` too, for two classes.
            clone_kernel: False changes the hyper-parameters of scikit-learn's `kernel_` as well, but no prediction.
        """
        check_is_fitted(self)
        kernels = self._kernels()
        if theta is None:
            if eval_gradient:
                raise ValueError(
                    "Gradient can only be evaluated for theta!=None: pass kernel_.theta for the fitted one."
                )
            return np.float64(self.bound_ / len(kernels))
        if eval_gradient and len(kernels) > 1:
            raise NotImplementedError(
                "The gradient of the evidence is that of one process: with more than two classes fit one of them "
                "against the others."
            )
        rows, theta = self._training(), np.asarray(theta, float)
        parts = np.split(theta, len(kernels)) if len(theta) != self._theta_size() else [theta] * len(kernels)
        method = self._evidence_method(rows["inducing"])
        points, values, gradient = _POINTS[method], [], None
        for part, kernel, data in zip(parts, kernels, rows["data"], strict=True):
            logs = jax.tree.map(np.log, self._hyper_at(part, kernel, None)[0])
            messages = (np.zeros(len(rows["x"])), np.zeros(len(rows["x"])))
            model, start = _class_start(logs, messages, rows["x"], rows["inducing"], data, points)
            q = run_as_fit(_RULES[method], model, start, data, steps=_STEPS, tolerance=_TIGHT).q
            _, value, gradient = _class_bound(logs, q, rows["x"], rows["inducing"], data, points)
            values.append(float(value))
        if self._conversion is not None and not clone_kernel:
            self.kernel_.theta = theta if len(kernels) == 1 else np.concatenate(parts)
        value = np.mean(values)
        return (value, self._flat_gradient(gradient)) if eval_gradient else value

    def _theta_size(self) -> int:
        """How many hyper-parameters one kernel has that are not fixed."""
        if self._conversion is not None:
            return int(self._conversion.is_free.sum())
        return sum(np.size(leaf) for leaf in jax.tree.leaves(self._kernels()[0]))

    def _flat_gradient(self, gradient: Any) -> np.ndarray:
        if self._conversion is not None:
            return self._conversion.gather(gradient.values, 0.0)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])

    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of the labels, (n_samples, n), independent for each row."""
        probabilities = np.tile(self.predict_proba(X), (n_samples, 1))
        random = check_random_state(self.random_state if random_state is None else random_state)
        return self.classes_[draw_categories(random, probabilities).reshape(n_samples, -1)]


def _converted(kernel: Any) -> Kernel:
    """A fitted kernel as one of this library."""
    return convert(kernel).kernel if is_sklearn_kernel(kernel) else kernel


def _warn_at_bounds(kernel: Any) -> None:
    """Let scikit-learn warn of hyper-parameters that ended at their bounds; nothing for None."""
    check = getattr(kernel, "_check_bounds_params", None)
    if check is not None:
        check()


def _bound(result: Result) -> float:
    return math.nan if result.bound is None else result.bound


# These are compiled once for every kind of kernel and padded number of rows.


@compiled
def _log_evidence(logs: Any, given: Any, inducing: Any, x: Any, y: Any, weights: Any) -> tuple[Any, Any]:
    """The log evidence (with inducing inputs its bound), and its gradient in the logarithms of the hyper-parameters.

    `given` are the hyper-parameters that are not optimised, on their own scale.
    """

    def value(logs: Any) -> Any:
        hyper = {**given, **jax.tree.map(jnp.exp, logs)}
        if inducing is None:
            return gp.log_evidence(hyper["kernel"], x, y, hyper["noise"], weights)
        return sparse_gp.log_evidence(hyper["kernel"], inducing, x, y, hyper["noise"], weights)

    return jax.value_and_grad(value)(logs)


_regression_model = compiled(gp.regression)


@compiled
def _sparse_regression_model(kernel: Kernel, inducing: Any, noise: Any) -> Model:
    return sparse_gp.sparse(kernel, inducing, factors.linear("y", {"f": None}, precision=1 / noise))


@compiled(static="points")
def _class_model(x: Any, inducing: Any, kernel: Kernel, points: Any) -> Model:
    likelihood = factors.bernoulli_logit("y", {"f": None}, points=points)
    return gp.process(kernel, x, likelihood) if inducing is None else sparse_gp.sparse(kernel, inducing, likelihood)


@compiled(static="points")
def _class_start(logs: Any, messages: Any, x: Any, inducing: Any, data: Weighted, points: Any) -> tuple[Model, Product]:
    """The model at a kernel, given by logarithms, and its posterior with these messages ν_nf_n − ½κ_nf_n² of the rows.

    The messages change less with the kernel than a posterior's mean and covariance do, so that those of one kernel are
    a good start for the next.
    """
    model = _class_model(x, inducing, jax.tree.map(jnp.exp, logs), points)
    return model, _posterior_of(model, messages, data)


def _posterior_of(model: Model, messages: Any, data: Weighted) -> Product:
    q, rows = model.starting_point(None), model.batch_rows(data)
    total = summed_over_rows(model, "y", q, rows, {"outputs": messages, "others": {}})["f"]
    if not q["f"].prior_is_base_measure:
        total = jax.tree.map(jnp.add, q["f"].natural(), total)
    return Product({"f": q["f"].with_natural(total)})


@compiled(static="points")
def _class_bound(logs: Any, q: Product, x: Any, inducing: Any, data: Weighted, points: Any) -> tuple[Any, Any, Any]:
    """The rows' messages to the posterior at a kernel, its bound (or Laplace's evidence), and the bound's gradient.

    Args:
        logs: the kernel, with the logarithms of its hyper-parameters.
        q: the posterior there.
        x: the inputs.
        inducing: the inducing inputs, or None.
        data: the padded rows.
        points: where the likelihood is evaluated; `Delta()` for Laplace's method.
    """
    build_model = lambda logs: _class_model(x, inducing, jax.tree.map(jnp.exp, logs), points)
    model = build_model(logs)
    new = message(model, "y", q, model.batch_rows(data))["outputs"]

    def value(logs: Any) -> Any:
        if points.delta:
            kernel, y = jax.tree.map(jnp.exp, logs), data.examples["y"]
            return gp.laplace_evidence(kernel, x, model.factors["y"], y, q["f"].mean, data.weights)  # pyright: ignore[reportArgumentType]  # A factor of outputs.
        # q maximises the bound, so that by the envelope theorem the messages' dependence on the kernel does not
        # contribute; and little while q is still on its way, which a fixed mean and covariance would.
        moved_model = build_model(logs)
        return moved_model.bound(_posterior_of(moved_model, new, data), data)

    return new, *jax.value_and_grad(value)(logs)


_STEPS = 200  # of each fit, at most
_TIGHT = 1e-12  # nats, of the fit at hyper-parameters that a user asks for: differences of its evidence are gradients
# The tolerance of each posterior while the kernel is searched, in nats: a part of what the last kernel gained on the
# one before it, between these limits.
_SHARE_OF_GAIN, _TIGHTEST, _LOOSEST = 1e-3, 1e-6, 1e-2
_POINTS = {"cvi": Quadrature(20), "laplace": Delta()}
# A full step of variational inference may overshoot if the kernel is nearly a step function; Newton's steps do not.
_RULES = {"cvi": cvi(1.0).replace(guard=Backtracking(monotone=True)), "laplace": cvi(1.0)}


def _resize(block: Any, size: int, rows: int) -> Any:
    """A process of `size` outputs cut to its first `rows` outputs, or padded to `rows` with outputs without sites."""

    def resize_leaf(array: np.ndarray) -> np.ndarray:
        for axis, length in enumerate(array.shape):
            if length == size and rows < size:
                array = np.take(array, range(rows), axis)
            elif length == size:
                width = [(0, rows - size if other == axis else 0) for other in range(array.ndim)]
                array = np.pad(array, width)
        return array

    return jax.tree.map(resize_leaf, block)
