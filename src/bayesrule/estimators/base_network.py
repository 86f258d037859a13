"""Training a network on batches: rows, epochs, the state to go on from, and predictions from the posterior."""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted, validate_data

from ..fitting.predict import predict
from ..fitting.result import Result
from ..models.networks import Network
from ..numerics.checks import is_positive_int, positive_int
from ..numerics.padding import bucket, pad, power_of_two
from ..objectives.batches import Weighted
from ..objectives.objective import Objective
from ..points.relaxed import Sign
from ..rule.rule import Rule
from .base import Estimator, kept, key_of
from .named_recipes import predicts


class Trained(Estimator):
    """A network that is trained on batches: rows, steps, the state, and predictions."""

    _bound_is_evidence: ClassVar[bool] = False
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
        """The network for the inputs and outputs of this fit."""

    @abstractmethod
    def _rule(self, steps: int | None) -> Rule:
        """The algorithm, for so many steps or (None) for a stream."""

    @abstractmethod
    def _objective(self, network: Network, size: Any, rule: Rule) -> Objective:
        """The loss over so many examples."""

    def _sizes(self, inputs: int, outputs: int) -> tuple[int, ...]:
        hidden = self.hidden_layer_sizes
        hidden = (hidden,) if isinstance(hidden, Integral) else tuple(hidden)
        if not all(map(is_positive_int, hidden)):
            raise ValueError(
                f"hidden_layer_sizes= are the widths of the hidden layers, positive whole numbers, got "
                f"{self.hidden_layer_sizes!r}."
            )
        return (inputs, *map(int, hidden), outputs)

    def _train(self, X: np.ndarray, y: np.ndarray, counts: np.ndarray, *, go_on: bool) -> None:
        """Train from the start for `max_iter` epochs, or (go_on) from the state for one."""
        epochs = 1 if go_on else positive_int("max_iter", self.max_iter)
        real = X.dtype
        with jax.enable_x64(bool(real == np.float64)):
            rows = _rows(len(X))
            size = 200 if self.batch_size == "auto" else positive_int("batch_size", self.batch_size)
            size = min(size, len(X))
            batch, per_epoch = (None, 1) if size >= len(X) else (size, -(-rows // size))
            steps = epochs * per_epoch
            rule, network, total = self._rule(None if go_on else steps), self._network(), float(counts.sum())
            scaled = ((X - self.x_mean_) / self.x_scale_).astype(real)
            data = Weighted((pad(scaled, rows), pad(y, rows)), jnp.asarray(pad(counts.astype(real), rows)), total)
            first, order = jax.random.split(key_of(self.random_state))
            options = {"steps": steps, "batch_size": batch, "key": order}
            state = getattr(self, "state_", None) if go_on else None
            self.t_ = total + (self.t_ if state is not None else 0.0)
            if state is None:
                start: Any = _first(first, network)
                self._choose(network, start, data, options)
            else:
                start = Result(state, "steps", {}, order, True, None)
            objective, self.prediction_method_ = self._objective(network, self.t_, rule), predicts(rule)
            result = self._run(rule, objective, start, data, **options)
            if result.reason not in ("steps", "converged", "interrupted"):
                warnings.warn(
                    f"{type(self).__name__} ended after {result.steps} steps ({result.reason}): the posterior is the "
                    "last good one. Try another recipe, a smaller rate, or inputs without extreme values.",
                    ConvergenceWarning,
                    stacklevel=3,
                )
            values = np.asarray(result.trace["objective"], float) / self.t_
            curve = values[: len(values) // per_epoch * per_epoch].reshape(-1, per_epoch).mean(axis=1)
            before = getattr(self, "loss_curve_", np.zeros(0)) if state is not None else np.zeros(0)
            self.loss_curve_ = np.concatenate([before, curve])
            self.n_iter_ = (self.n_iter_ if state is not None else 0) + max(1, len(curve))
            self.state_ = kept(result.state)
            self.posterior_ = self.state_.q

    def with_posterior(self, q: Any) -> Self:
        """A copy that predicts from another posterior: how a fit that goes on would do now."""
        other = copy.copy(self)
        other.posterior_ = kept(q)
        return other

    def _choose(self, network: Network, start: Any, data: Weighted, options: dict[str, Any]) -> None:
        """What is chosen by a trial before the fit."""

    def _outputs(self, X: Any, link: Any = None, variance: bool = False) -> Any:
        """What the network says of new inputs, averaged over the posterior."""
        check_is_fitted(self)
        positive_int("samples", self.samples)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        real = jax.tree.leaves(self.posterior_)[0].dtype
        with jax.enable_x64(bool(real == np.float64)):
            x = pad(((X - self.x_mean_) / self.x_scale_).astype(real), _rows(len(X)))
            key, how = jax.random.fold_in(key_of(self.random_state), 1), self.prediction_method_
            options: dict[str, Any] = {"link": link, "variance": variance and how != "mean"}
            options |= {"points": Sign()} if how == "signs" else {"method": how, "samples": self.samples}
            found = predict(self.posterior_, self._network().apply, x, key=key, **options)
            if variance and how == "mean":
                found = found, jnp.zeros_like(found)
            return jax.tree.map(lambda array: np.asarray(array)[: len(X)], found)

    def _drawn(self, X: Any, n_samples: int, random_state: Any) -> tuple[np.ndarray, Any]:
        """The network's outputs for draws of its weights, (n_samples, n, K), and a key for what is drawn next."""
        check_is_fitted(self)
        positive_int("n_samples", n_samples)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        real = jax.tree.leaves(self.posterior_)[0].dtype
        first, second = jax.random.split(key_of(self.random_state if random_state is None else random_state))
        with jax.enable_x64(bool(real == np.float64)):
            x = pad(((X - self.x_mean_) / self.x_scale_).astype(real), _rows(len(X)))
            apply = self._network().apply
            if self.prediction_method_ == "samples":
                found = _each(self.posterior_, x, jax.random.split(first, n_samples), apply)
            elif self.prediction_method_ in ("mean", "signs"):
                how: dict[str, Any] = {"method": "mean"} if self.prediction_method_ == "mean" else {"points": Sign()}
                found = np.stack(n_samples * [predict(self.posterior_, apply, x, **how)])
            else:
                mean, spread = predict(self.posterior_, apply, x, method="linearized", variance=True)
                found = mean + jnp.sqrt(spread) * jax.random.normal(first, (n_samples, *mean.shape))
            return np.asarray(found)[:, : len(X)], second


@partial(jax.jit, static_argnames="network")
def _first(key: Any, network: Network) -> Any:
    return network.init(key)


@partial(jax.jit, static_argnames="apply")
def _each(q: Any, x: Any, keys: Any, apply: Any) -> Any:
    """The outputs for a draw of the weights for each key."""
    return jax.lax.map(lambda key: jax.vmap(partial(apply, q.sample(key)))(x), keys)


def _rows(count: int) -> int:
    """The rows that a program is compiled for: coarse where they are few, for compiling costs more than they do."""
    return power_of_two(count, 64) if count <= 256 else bucket(count)
