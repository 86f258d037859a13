"""The base of estimators over neural networks: training on batches, `partial_fit`, and predictive distributions."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from ..families.base import Family
from ..fitting.held_out import Folds, divide_rows
from ..fitting.predict import predict
from ..fitting.result import Result
from ..models.networks import Network
from ..numerics.checks import is_positive_int, positive_int
from ..numerics.padding import coarse_bucket, pad
from ..numerics.programs import compiled
from ..numerics.random import Key
from ..objectives.batches import Weighted
from ..objectives.objective import Objective
from ..points.relaxed import Sign
from ..rule.rule import Rule
from .base import Estimator, make_key, to_numpy
from .named_recipes import prediction_method

_DEFAULT_BATCH = 200
# Of many rows, a fit that only serves to choose the prior takes so many steps at most (or one epoch), so that the price
# of a search does not grow with the rows beyond about 2000.
_MOST_SEARCH_STEPS = 2000


class NetworkEstimator(Estimator):
    """A network that is trained on batches of standardised rows. Subclasses say which network, rule and objective."""

    _bound_is_evidence: ClassVar[bool] = False
    """The recipes of networks may have temperatures other than 1, whose bound does not bound the log evidence."""
    refits_with_missing_inputs: ClassVar[int] = 2
    hidden_layer_sizes: Any
    max_iter: int
    batch_size: Any
    samples: int
    random_state: Any
    n_features_in_: int
    posterior_: Any
    state_: Any
    x_mean_: np.ndarray
    x_scale_: np.ndarray

    @abstractmethod
    def _network(self) -> Network:
        """The network. Called once the numbers of inputs and outputs are known; equal calls return the same object."""

    @abstractmethod
    def _rule(self, steps: int | None) -> Rule:
        """The algorithm. Called once before each fit.

        Args:
            steps: how many steps will be taken; None in `partial_fit`, where more may follow.
        """

    @abstractmethod
    def _objective(self, network: Network, size: Any, rule: Rule) -> Objective:
        """The loss and its regularizer.

        Args:
            network: what `_network` returned.
            size: the number of examples (the sum of their weights), in `partial_fit` of all calls so far.
            rule: the algorithm, whose temperature the regularizer may depend on.
        """

    def _choose_prior(
        self, rule: Rule, run: Callable[[Weighted], Result], data: Weighted, divide: Callable[[], Folds] | None
    ) -> None:
        """Choose hyper-parameters of the prior by preliminary fits.

        Called before a fit from freshly initialised parameters, not before one that goes on.

        Args:
            rule: the algorithm of the preliminary fits.
            run: fits weighted rows from the initial parameters, under the hyper-parameters that are set when it is
                called.
            data: the padded rows.
            divide: divides the padded rows, for holding some of them out. None in `partial_fit`, whose first rows may
                be few.
        """

    def _layer_sizes(self, inputs: int, outputs: int) -> tuple[int, ...]:
        """The widths of all layers."""
        hidden = self.hidden_layer_sizes
        hidden = (hidden,) if isinstance(hidden, Integral) else tuple(hidden)
        if not all(map(is_positive_int, hidden)):
            raise ValueError(
                f"hidden_layer_sizes must be positive whole numbers, the widths of the hidden layers, got "
                f"{self.hidden_layer_sizes!r}."
            )
        return (inputs, *map(int, hidden), outputs)

    def _train(self, X: np.ndarray, y: np.ndarray, weights: np.ndarray, *, incremental: bool) -> None:
        """Train for `max_iter` epochs from freshly initialised parameters; incremental: for one epoch from `state_`."""
        epochs = 1 if incremental else positive_int("max_iter", self.max_iter)
        dtype = X.dtype
        # The rows' dtype is that of the computation, whatever the caller's setting of jax_enable_x64.
        with jax.enable_x64(bool(dtype == np.float64)):
            rows = coarse_bucket(len(X))
            batch_size = _DEFAULT_BATCH if self.batch_size == "auto" else positive_int("batch_size", self.batch_size)
            batch_size = min(batch_size, len(X))
            full_batch = batch_size >= len(X)
            # Batches are drawn from the padded rows too, whose weight is 0.
            steps_per_epoch = 1 if full_batch else -(-rows // batch_size)
            steps = epochs * steps_per_epoch
            rule, network = self._rule(None if incremental else steps), self._network()
            self.prediction_method_ = prediction_method(rule)
            total_weight = float(weights.sum())
            data = Weighted(
                (pad(self._standardize(X, dtype), rows), pad(y, rows)),
                jnp.asarray(pad(weights.astype(dtype), rows)),
                total_weight,
            )
            start_key, batch_key = jax.random.split(make_key(self.random_state))
            options = {"batch_size": None if full_batch else batch_size, "key": batch_key}
            state = getattr(self, "state_", None) if incremental else None
            self.t_ = total_weight + (self.t_ if state is not None else 0.0)

            def run(rule: Rule, data: Weighted, size: float, steps: int) -> Result:
                return self._run(rule, self._objective(network, size, rule), begin, data, steps=steps, **options)

            if state is None:
                begin: Any = _init_params(start_key, network)
                divide = None if incremental else partial(_divide_padded, X, y, weights, rows, start_key)
                short = min(steps, max(steps_per_epoch, _MOST_SEARCH_STEPS))
                short_rule = rule if short == steps else self._rule(short)
                self._choose_prior(short_rule, lambda data: run(short_rule, data, data.count, short), data, divide)
            else:
                begin = Result(state, reason="steps", trace={}, key=batch_key, normalized=True, bound=None)
            result = run(rule, data, self.t_, steps)
            if result.reason not in ("steps", "converged", "interrupted"):
                warnings.warn(
                    f"{type(self).__name__} ended after {result.steps} steps ({result.reason}): the posterior is the "
                    "last finite one. Try another recipe, a smaller rate, or inputs without extreme values.",
                    ConvergenceWarning,
                    stacklevel=3,
                )
            step_losses = np.asarray(result.trace["objective"], float) / self.t_
            whole_epochs = len(step_losses) // steps_per_epoch
            curve = step_losses[: whole_epochs * steps_per_epoch].reshape(-1, steps_per_epoch).mean(axis=1)
            curve_before = getattr(self, "loss_curve_", np.zeros(0)) if state is not None else np.zeros(0)
            self.loss_curve_ = np.concatenate([curve_before, curve])
            self.n_iter_ = (self.n_iter_ if state is not None else 0) + max(1, len(curve))
            self.state_ = to_numpy(result.state)
            self.posterior_ = self.state_.q

    def with_posterior(self, q: Family) -> Self:
        """A copy that predicts from another posterior, such as that of a fit which is still running."""
        other = copy.copy(self)
        other.posterior_ = to_numpy(q)
        return other

    def _standardize(self, X: np.ndarray, dtype: Any) -> np.ndarray:
        return ((X - self.x_mean_) / self.x_scale_).astype(dtype)

    def _validate_inputs(self, X: Any) -> tuple[np.ndarray, Any]:
        """New rows, validated, and the dtype of the posterior, in which predictions are computed."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return X, jax.tree.leaves(self.posterior_)[0].dtype

    def _predict_outputs(self, X: Any, link: Any = None, variance: bool = False) -> Any:
        """The outputs of the network (through `link`) for new rows, averaged over the posterior.

        With `variance`, also the variance of the outputs under the posterior.
        """
        positive_int("samples", self.samples)
        X, dtype = self._validate_inputs(X)
        with jax.enable_x64(bool(dtype == np.float64)):
            x = pad(self._standardize(X, dtype), coarse_bucket(len(X)))
            # The key is folded so that predictions do not repeat the random numbers of the fit, which splits it.
            key = jax.random.fold_in(make_key(self.random_state), 1)
            outputs = self._average_outputs(self.posterior_, x, key, link, variance)
            return jax.tree.map(lambda array: np.asarray(array)[: len(X)], outputs)

    def _average_outputs(self, q: Family, x: np.ndarray, key: Key, link: Any = None, variance: bool = False) -> Any:
        """The outputs of the network (through `link`) for standardised rows, averaged over q, and their variance."""
        method = self.prediction_method_
        options: dict[str, Any] = {"link": link, "variance": variance and method != "mean"}
        options |= {"points": Sign()} if method == "signs" else {"method": method, "samples": self.samples}
        outputs = predict(q, self._network().apply, x, key=key, **options)
        return (outputs, jnp.zeros_like(outputs)) if variance and method == "mean" else outputs

    def _sample_outputs(self, X: Any, n_samples: int, random_state: Any) -> tuple[np.ndarray, Key]:
        """Outputs for new rows, drawn under the posterior, (n_samples, n, K), and a key for further draws.

        They are outputs of sampled weights, or (linearized) draws from each row's own normal distribution; a point
        prediction is repeated.
        """
        positive_int("n_samples", n_samples)
        X, dtype = self._validate_inputs(X)
        weight_key, next_key = jax.random.split(make_key(self.random_state if random_state is None else random_state))
        with jax.enable_x64(bool(dtype == np.float64)):
            x = pad(self._standardize(X, dtype), coarse_bucket(len(X)))
            apply, method = self._network().apply, self.prediction_method_
            if method == "samples":
                outputs = _apply_draws(self.posterior_, x, jax.random.split(weight_key, n_samples), apply)
            elif method in ("mean", "signs"):
                options: dict[str, Any] = {"method": "mean"} if method == "mean" else {"points": Sign()}
                outputs = np.stack(n_samples * [predict(self.posterior_, apply, x, **options)])
            else:
                mean, variance = predict(self.posterior_, apply, x, method="linearized", variance=True)
                outputs = mean + jnp.sqrt(variance) * jax.random.normal(weight_key, (n_samples, *mean.shape))
            return np.asarray(outputs)[:, : len(X)], next_key


def _divide_padded(X: np.ndarray, y: np.ndarray, weights: np.ndarray, rows: int, key: Key) -> Folds:
    """A division of rows that are padded to so many. Targets that are no classes have no shares to keep."""
    labels = y if y.dtype.kind == "i" else np.zeros(len(y), int)
    folds = divide_rows(X, labels, weights, np.asarray(jax.random.key_data(key)).tobytes())
    return Folds(pad(folds.group, rows, fill=-1), folds.fold)


@compiled(static="network")
def _init_params(key: Key, network: Network) -> Any:
    return network.init(key)


@compiled(static="apply")
def _apply_draws(q: Family, x: Any, keys: Any, apply: Any) -> Any:
    """The outputs of the network for a draw of its weights with each key."""
    return jax.lax.map(lambda key: jax.vmap(partial(apply, q.sample(key)))(x), keys)
