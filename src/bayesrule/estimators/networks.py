"""Neural networks with a posterior over their weights: for classes, for numbers, and one with binary weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import column_or_1d, validate_data

from ..families.base import Family
from ..families.discrete import Bernoulli
from ..fitting.held_out import FEWEST_ROWS, Folds, search_grid
from ..fitting.result import Result
from ..models.networks import Network, binary_mlp, gaussian_nll, mlp, noisy_nll, softmax_cross_entropy, with_noise
from ..numerics.checks import positive_number
from ..numerics.random import Key
from ..objectives.batches import Weighted
from ..objectives.objective import Objective
from ..rule.rule import Rule
from ..steps.schedule import at
from . import named_recipes
from .base import Classifier, Explain, choose_rule, in_dtype_of_inputs
from .base_network import NetworkEstimator
from .preprocessing import encode_classes, example_weights, mean_and_scale

_SCORE_SCALE = 4.0  # The scores of a network of signs are too small to be sure of any class.
# The strengths τδ among which `prior_precision="auto"` chooses, as exponents of √10, and the one that it starts from,
# and takes where there are too few rows to hold some out.
_STRENGTHS = (-6, 1)
_FIRST_STRENGTH = -1
_ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh}


class _Perceptron(NetworkEstimator):
    """A perceptron with a Gaussian posterior and an isotropic Gaussian prior."""

    _rate_factor: ClassVar[float] = 1.0
    activation: str
    recipe: Any
    prior_precision: Any
    temperature: float

    def _mlp(self, outputs: int) -> Network:
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation= is {' or '.join(map(repr, _ACTIVATIONS))}, got {self.activation!r}.")
        return _cached_mlp(self._layer_sizes(self.n_features_in_, outputs), self.activation)

    def _rule(self, steps: int | None) -> Rule:
        temperature = positive_number("temperature", self.temperature)
        settings = (steps, temperature, self._rate_factor, self._initial_curvature())
        named = {name: partial(named_recipes.network_rule, name, *settings) for name in named_recipes.NETWORK}
        return choose_rule(self.recipe, named, self)

    @property
    def coefs_(self) -> list[np.ndarray]:
        """The posterior means of the weights of each layer, (inputs, outputs), for standardised inputs."""
        layers = [np.asarray(layer["w"]) for layer in self._mean_layers()]
        return [layer / layer.dtype.type(np.sqrt(len(layer))) for layer in layers]

    @property
    def intercepts_(self) -> list[np.ndarray]:
        """The posterior means of the biases of each layer."""
        return [np.array(layer["b"]) for layer in self._mean_layers()]

    def _mean_layers(self) -> list[Any]:
        mean = self.posterior_.mean
        return [mean[f"layer{number}"] for number in range(sum(name.startswith("layer") for name in mean))]

    def _initial_curvature(self) -> float:
        """The curvature of one example's loss in the outputs of the network, before any was measured."""
        return 1.0

    def _regularizer(self, rule: Rule, precision: float) -> float:
        """τδ, so that q ∝ exp(−(ℓ̄ + R)/τ) has the prior N(0, 1/δ) untempered and the likelihood to the power 1/τ."""
        if isinstance(self.recipe, str):
            return self.temperature * precision
        return float(at(rule.steps.temperature, 0)) * precision

    def _choose_prior(
        self, rule: Rule, run: Callable[[Weighted], Result], data: Weighted, divide: Callable[[], Folds] | None
    ) -> None:
        if self.prior_precision != "auto":
            self.prior_precision_ = positive_number("prior_precision", self.prior_precision, alternatives='"auto"')
            return
        # The mean of q depends on δ through τδ, the strength of the regularizer, so that the grid is one of strengths.
        temperature = self._regularizer(rule, 1.0)
        folds = None if divide is None else divide()
        chosen = _FIRST_STRENGTH
        if folds is not None and len(folds.fold) >= FEWEST_ROWS:
            weights = np.asarray(data.weights)
            key = jax.random.key(0)  # The same draws for all strengths: their differences are then less noisy.

            def held_out_losses(exponent: int, number: int) -> np.ndarray:
                self.prior_precision_ = _strength(exponent) / temperature
                is_held_out = folds.holds_out(number)
                kept = np.where(is_held_out, 0.0, weights)
                q = run(Weighted(data.examples, jnp.asarray(kept, weights.dtype), float(kept.sum()))).q
                losses = (weights * self._row_losses(q, data.examples, key))[is_held_out]
                return np.bincount(folds.group[is_held_out], losses, len(folds.fold))[folds.fold == number]

            chosen = search_grid(held_out_losses, _FIRST_STRENGTH, *_STRENGTHS)
        self.prior_precision_ = _strength(chosen) / temperature

    @abstractmethod
    def _row_losses(self, q: Family, examples: Any, key: Key) -> np.ndarray:
        """−log p(y | x) of each row, in nats, under the predictive distribution of q. Called for held-out rows.

        Args:
            q: the posterior.
            examples: the padded rows as a fit takes them, inputs and targets.
            key: a key for draws of q.
        """


def _strength(exponent: int) -> float:
    """τδ on the grid, two strengths for each power of ten."""
    return 10 ** (exponent / 2)


class _NetworkClassifier(Classifier, NetworkEstimator):
    """A network whose outputs are the scores of classes."""

    class_weight: Any
    classes_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start."""
        return self._fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train for one pass over new examples, from where the last call ended.

        The posterior is that of the examples of all calls. Inputs are standardised as in the first call, which must
        list all `classes`.
        """
        return self._fit(X, y, sample_weight, classes, incremental=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, classes: Any = None, *, incremental: bool = False) -> Self:
        is_continued = incremental and hasattr(self, "classes_")
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=not is_continued)
        if incremental and not is_continued and classes is None:
            raise ValueError("The first call of partial_fit needs classes=, the list of all classes: y may lack some.")
        if is_continued and classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"classes= must be those of the first call, {self.classes_.tolist()}.")
        self.classes_, labels = encode_classes(y, self.classes_ if is_continued else classes)
        weights = example_weights(X, sample_weight, self.class_weight, self.classes_, labels)
        if not is_continued:
            self.x_mean_, self.x_scale_ = mean_and_scale(X, weights)
        self._train(X, labels.astype(np.int32), weights, incremental=incremental)
        return self

    @in_dtype_of_inputs
    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of every class, averaged over the posterior."""
        probabilities = self._predict_outputs(X, "softmax")
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of the labels, (n_samples, n); within a draw all rows have the same weights."""
        scores, key = self._sample_outputs(X, n_samples, random_state)
        return self.classes_[np.asarray(jax.random.categorical(key, scores))]


class MLPClassifier(_NetworkClassifier, _Perceptron):
    r"""A multilayer perceptron for classes, with a posterior over its weights, by any algorithm of the rule.

    $p(y \mid x, θ) = \mathrm{softmax}(f_θ(x))_y$ and $θ ∼ N(0, 1/δ)$, with weights in units of
    $1/\sqrt{\text{inputs}}$. The posterior q minimises $E_q[−\log p(y \mid x, θ)] + τ\,\mathrm{KL}(q ‖ p)$. Inputs are
    standardised first.

    Parameters
    ----------
    hidden_layer_sizes : int or tuple of int, default=(50,)
        The widths of the hidden layers.
    activation : {"relu", "tanh"}, default="relu"
        The activation function.
    recipe : str or Rule, default="ivon"
        The algorithm. "ivon", "vogn", "voggn" and "slang" predict by averaging over draws of q, "ogn" and "oggn" with
        the linearised network, "adam", "rmsprop", "sgd" and "dropout" with the mean of q. Each name has its own rates;
        any other rule can be passed, such as `blr.vogn(1e-2)`.
    prior_precision : float or "auto", default="auto"
        δ. "auto" takes the strength τδ, on a grid of two for each power of ten, under which rows that are held out from
        the fit are most probable, and then fits all rows. The search starts at τδ = 0.32 and compares neighbours on one
        to three fifths of the rows, as many as a clear difference takes: mostly five to ten fits. With fewer than 20
        rows, and in `partial_fit`, there is none, and τδ is 0.32. The network is initialised with draws from the prior
        with δ = 1.
    temperature : float, default=0.03
        τ, for the recipes by name; a rule has its own. Below 1 the posterior is colder than Bayes': at 1 a posterior
        with a diagonal covariance is too wide for networks on little data.
    max_iter : int, default=200
        Epochs.
    batch_size : int or "auto", default="auto"
        Examples per step; "auto" is 200. With at most this many examples, each step uses all of them.
    samples : int, default=32
        Draws of the weights for a prediction.
    class_weight : None, "balanced" or dict, default=None
        Weights of the classes, as in scikit-learn.
    verbose : bool, default=False
        Whether to print the progress of the fits, in steps.
    random_state : int, RandomState or None, default=None
        The seed.

    Attributes
    ----------
    classes_ : the classes, sorted.
    posterior_ : q, over the parameters of the network.
    coefs_, intercepts_ : for each layer the posterior means of its weights and biases, for inputs that are standardised
        by `x_mean_` and `x_scale_`.
    prior_precision_ : δ.
    loss_curve_ : the objective per example, epoch by epoch.
    n_iter_ : the number of epochs.
    x_mean_, x_scale_ : what inputs are standardised by.
    state_ : the state from which `partial_fit` continues.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 2))
    >>> network = MLPClassifier((8,), max_iter=50, random_state=0).fit(x, x[:, 0] * x[:, 1] > 0)
    >>> network.predict([[2.0, 2.0], [2.0, -2.0]]).tolist()
    [True, False]
    """

    model = "mlp"
    tasks = ("binary", "classes")
    title = "a Bayesian neural network"
    explain = Explain("layers")
    _rate_factor = 2.0  # The gradient of the cross-entropy is bounded, so that longer steps are stable.

    def __init__(
        self,
        hidden_layer_sizes: Any = (50,),
        *,
        activation: str = "relu",
        recipe: Any = "ivon",
        prior_precision: Any = "auto",
        temperature: float = 0.03,
        max_iter: int = 200,
        batch_size: Any = "auto",
        samples: int = 32,
        class_weight: Any = None,
        verbose: Any = False,
        random_state: Any = None,
    ):
        self.hidden_layer_sizes, self.activation, self.recipe = hidden_layer_sizes, activation, recipe
        self.prior_precision, self.temperature, self.max_iter = prior_precision, temperature, max_iter
        self.batch_size, self.samples = batch_size, samples
        self.class_weight, self.verbose, self.random_state = class_weight, verbose, random_state

    def _network(self) -> Network:
        return self._mlp(len(self.classes_))

    def _objective(self, network: Network, size: Any, rule: Rule) -> Objective:
        strength = self._regularizer(rule, self.prior_precision_)
        return Objective(softmax_cross_entropy, output=network.apply, size=size, regularizer=strength)

    def _row_losses(self, q: Family, examples: Any, key: Key) -> np.ndarray:
        x, labels = examples
        probabilities = np.asarray(self._average_outputs(q, x, key, "softmax"), float)
        return -np.log(np.maximum(probabilities[np.arange(len(labels)), labels], np.finfo(x.dtype).tiny))


class MLPRegressor(RegressorMixin, _Perceptron):
    r"""A multilayer perceptron for numbers, with a posterior over its weights and noise, by any algorithm of the rule.

    $y ∼ N(f_θ(x), σ^2)$ and $θ ∼ N(0, 1/δ)$, with weights in units of $1/\sqrt{\text{inputs}}$. The posterior q
    minimises $E_q[−\log p(y \mid x, θ)] + τ\,\mathrm{KL}(q ‖ p)$. Inputs and targets are standardised first. With
    several targets, y (n, K), each has its own σ².

    Parameters
    ----------
    hidden_layer_sizes : int or tuple of int, default=(50,)
        The widths of the hidden layers.
    activation : {"relu", "tanh"}, default="relu"
        The activation function.
    recipe : str or Rule, default="ivon"
        The algorithm, as for `MLPClassifier`.
    prior_precision : float or "auto", default="auto"
        δ, as for `MLPClassifier`.
    noise : float or "auto", default="auto"
        σ² in the units of y², or "auto": then log σ² is one more parameter of the network.
    temperature : float, default=0.3
        τ, for the recipes by name. It is higher than for classes, because the noise is fitted with the weights.
    max_iter, batch_size, samples, verbose, random_state
        As for `MLPClassifier`.

    Attributes
    ----------
    posterior_, coefs_, intercepts_, prior_precision_, loss_curve_, n_iter_, x_mean_, x_scale_, state_ : as for
        `MLPClassifier`.
    noise_ : σ², for several targets one for each.
    y_mean_, y_scale_ : what targets are standardised by.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.linspace(-1, 1, 100)[:, None]
    >>> network = MLPRegressor((8,), max_iter=100, random_state=0).fit(x, x[:, 0])
    >>> mean, std = network.predict([[0.5]], return_std=True)
    >>> mean.shape, bool(std[0] > 0)
    ((1,), True)
    """

    model = "mlp"
    tasks = ("regression",)
    title = "a Bayesian neural network"
    explain = Explain("layers")

    def __init__(
        self,
        hidden_layer_sizes: Any = (50,),
        *,
        activation: str = "relu",
        recipe: Any = "ivon",
        prior_precision: Any = "auto",
        noise: Any = "auto",
        temperature: float = 0.3,
        max_iter: int = 200,
        batch_size: Any = "auto",
        samples: int = 32,
        verbose: Any = False,
        random_state: Any = None,
    ):
        self.hidden_layer_sizes, self.activation, self.recipe = hidden_layer_sizes, activation, recipe
        self.prior_precision, self.noise, self.temperature = prior_precision, noise, temperature
        self.max_iter, self.batch_size = max_iter, batch_size
        self.samples, self.verbose, self.random_state = samples, verbose, random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start."""
        return self._fit(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train for one pass over new examples, from where the last call ended.

        The posterior is that of the examples of all calls. Inputs and targets are standardised as in the first call.
        """
        return self._fit(X, y, sample_weight, incremental=True)

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, incremental: bool = False) -> Self:
        is_continued = incremental and hasattr(self, "state_")
        options = {"dtype": [np.float64, np.float32], "multi_output": True, "y_numeric": True}
        X, y = validate_data(self, X, y, reset=not is_continued, **options)
        y = column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y
        weights = example_weights(X, sample_weight)
        if not is_continued:
            self.x_mean_, self.x_scale_ = mean_and_scale(X, weights)
            self.y_mean_, self.y_scale_ = (np.asarray(value, float) for value in mean_and_scale(y, weights))
        elif y.shape[1:] != self.y_mean_.shape:
            raise ValueError(
                f"y has the shape {y.shape}, and the first call had {self.y_mean_.size} targets for each row: pass as "
                "many."
            )
        targets = ((y - self.y_mean_) / self.y_scale_).reshape(len(y), -1).astype(X.dtype)
        if not self._fits_noise:  # A noise that is known is passed to the loss beside the targets.
            noise = positive_number("noise", self.noise, alternatives='"auto"') / self.y_scale_.reshape(-1) ** 2
            targets = np.concatenate([targets, np.broadcast_to(noise, targets.shape).astype(X.dtype)], axis=1)
        self._train(X, targets, weights, incremental=incremental)
        self._set_noise()
        return self

    def with_posterior(self, q: Family) -> Self:
        other = super().with_posterior(q)
        other._set_noise()
        return other

    def _set_noise(self) -> None:
        """Set `noise_` in the units of y²."""
        if self._fits_noise:
            log_noise = np.asarray(self.posterior_.mean["log_noise"], float)
            noise = np.exp(log_noise) * self.y_scale_.reshape(-1) ** 2
        else:
            noise = np.broadcast_to(self.noise, self.y_mean_.size)
        self.noise_ = np.asarray(noise, float) if self.y_mean_.ndim else float(noise[0])

    @property
    def _fits_noise(self) -> bool:
        """Whether the noise is a parameter of the network."""
        return isinstance(self.noise, str) and self.noise == "auto"

    def _initial_curvature(self) -> float:
        return 1.0 if self._fits_noise else float(np.max(self.y_scale_) ** 2 / self.noise)

    def _network(self) -> Network:
        network = self._mlp(self.y_mean_.size)
        return _cached_with_noise(network, self.y_mean_.size) if self._fits_noise else network

    def _objective(self, network: Network, size: Any, rule: Rule) -> Objective:
        strength = self._regularizer(rule, self.prior_precision_)
        loss = noisy_nll if self._fits_noise else _known_noise_nll
        return Objective(loss, output=network.apply, size=size, regularizer=strength)

    def _row_losses(self, q: Family, examples: Any, key: Key) -> np.ndarray:
        x, targets = examples
        size = self.y_mean_.size
        mean, variance = (np.asarray(part, float)[:, :size] for part in self._average_outputs(q, x, key, variance=True))
        noise = np.exp(np.asarray(cast(Any, q).mean["log_noise"], float)) if self._fits_noise else targets[:, size:]
        total = variance + noise
        return 0.5 * np.sum((targets[:, :size] - mean) ** 2 / total + np.log(2 * np.pi * total), axis=1)

    @in_dtype_of_inputs
    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of a new y, and with `return_std` its standard deviation, of the model and the noise together."""
        mean, variance = self._predict_outputs(X, variance=True)
        size, shape = self.y_mean_.size, (len(mean), *self.y_mean_.shape)
        mean = self.y_mean_ + self.y_scale_ * mean[:, :size].reshape(shape)
        if not return_std:
            return mean
        return mean, np.sqrt(self.y_scale_**2 * variance[:, :size].reshape(shape) + self.noise_)

    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of y with its noise, (n_samples, n); within a draw all rows have the same weights."""
        outputs, key = self._sample_outputs(X, n_samples, random_state)
        f = outputs[..., : self.y_mean_.size].reshape(*outputs.shape[:2], *self.y_mean_.shape)
        noise = np.sqrt(self.noise_) * np.asarray(jax.random.normal(key, f.shape))
        return self.y_mean_ + self.y_scale_ * f + noise

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class BinaryMLPClassifier(_NetworkClassifier):
    r"""A multilayer perceptron whose weights are all ±1, with a posterior probability for each sign.

    $p(y \mid x, θ) = \mathrm{softmax}(f_θ(x))_y$ with θ ∈ {−1, 1} and a uniform prior. There are no biases; a constant
    input stands for one. Activations are ReLU, the output of every layer is divided by the square root of its number of
    inputs, and the scores of the classes are multiplied by 4. Inputs are standardised first.

    Parameters
    ----------
    hidden_layer_sizes : int or tuple of int, default=(100,)
        The widths of the hidden layers.
    recipe : str or Rule, default="bayesbinn"
        "bayesbinn", "straight_through" (which predicts with the most probable signs), or any rule over `blr.Bernoulli`.
    max_iter, batch_size, samples, class_weight, verbose, random_state
        As for `MLPClassifier`.

    Attributes
    ----------
    classes_, posterior_, loss_curve_, n_iter_, x_mean_, x_scale_, state_ : as for `MLPClassifier`.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 3))
    >>> network = BinaryMLPClassifier((16,), max_iter=50, random_state=0).fit(x, x[:, 0] > x[:, 1])
    >>> sorted(np.unique(np.sign(network.posterior_.natural()["layer0"]["w"])).tolist())
    [-1.0, 1.0]
    """

    model = "binary-mlp"
    tasks = ("binary", "classes")
    title = "a neural network with binary weights"

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        *,
        recipe: Any = "bayesbinn",
        max_iter: int = 200,
        batch_size: Any = "auto",
        samples: int = 32,
        class_weight: Any = None,
        verbose: Any = False,
        random_state: Any = None,
    ):
        self.hidden_layer_sizes, self.recipe, self.max_iter = hidden_layer_sizes, recipe, max_iter
        self.batch_size, self.samples = batch_size, samples
        self.class_weight, self.verbose, self.random_state = class_weight, verbose, random_state

    def _network(self) -> Network:
        return _cached_binary_mlp(self._layer_sizes(self.n_features_in_ + 1, len(self.classes_)))

    def _rule(self, steps: int | None) -> Rule:
        named = {name: partial(named_recipes.binary_network_rule, name, steps) for name in named_recipes.BINARY_NETWORK}
        return choose_rule(self.recipe, named, self)

    def _objective(self, network: Network, size: Any, rule: Rule) -> Objective:
        return Objective(softmax_cross_entropy, output=network.apply, size=size, prior=_uniform_signs(network))


def _uniform_signs(network: Network) -> Bernoulli:
    """The uniform prior over a network's signs, λ = 0: it adds the P log 2 of a bound, and no gradient."""
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return Bernoulli(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))


# A network is a pair of functions. Each is made once, because `fit` compiles again for a new function.


@lru_cache(maxsize=256)
def _cached_mlp(sizes: tuple[int, ...], activation: str) -> Network:
    return mlp(sizes, _ACTIVATIONS[activation], normalized=True)


@lru_cache(maxsize=256)
def _cached_with_noise(network: Network, outputs: int) -> Network:
    return with_noise(network, outputs)


@lru_cache(maxsize=256)
def _cached_binary_mlp(sizes: tuple[int, ...]) -> Network:
    network = binary_mlp(sizes, normalization="fan_in", spread=1.0)
    return Network(network.init, lambda params, x: _SCORE_SCALE * network.apply(params, jnp.append(x, 1.0)))


def _known_noise_nll(output: Any, target: Any) -> Any:
    """−log N(y | output, σ²) of a target that holds y and σ²."""
    y, noise = jnp.split(target, 2)
    return gaussian_nll(output, y, noise)
