"""Networks with a posterior over their weights: perceptrons for classes and for numbers, and one of ±1 weights."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.validation import column_or_1d, validate_data

from ..models.networks import Network, binary_mlp, gaussian_nll, mlp, noisy_nll, softmax_cross_entropy, with_noise
from ..numerics.checks import positive_number
from ..objectives.batches import Weighted
from ..objectives.objective import Objective
from ..objectives.regularizers import Isotropic
from ..rule.rule import Rule
from ..steps.schedule import at
from . import named_recipes as schedules
from .base import Explain, chosen
from .base_network import Trained
from .preprocessing import codes, standard, weights

_GAIN = 4.0  # what signs alone make of a class's score is too small to be sure of anything
_ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh}


class _Perceptron(Trained):
    """A perceptron with a Gaussian posterior, and the precision of its prior."""

    _pace: ClassVar[float] = 1.0
    activation: str
    recipe: Any
    prior_precision: Any
    temperature: float

    def _plain(self, outputs: int) -> Network:
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation= is {' or '.join(map(repr, _ACTIVATIONS))}, got {self.activation!r}.")
        return _perceptron(self._sizes(self.n_features_in_, outputs), self.activation)

    def _rule(self, steps: int | None) -> Rule:
        temperature = positive_number("temperature", self.temperature)
        settings = (steps, temperature, self._pace, self._curvature())
        named = {name: partial(schedules.gaussian, name, *settings) for name in schedules.GAUSSIAN}
        return chosen(self.recipe, named, self)

    def _curvature(self) -> float:
        """What the loss of one example is first taken to curve by, in units of its outputs."""
        return 1.0

    def _regularizer(self, rule: Rule, precision: float) -> float:
        """τδ: q ∝ exp(−(ℓ̄ + R)/τ) has the prior N(0, 1/δ) itself, and the likelihood counts 1/τ times."""
        if isinstance(self.recipe, str):
            return self.temperature * precision
        return float(at(rule.steps.temperature, 0)) * precision

    def _choose(self, network: Network, start: Any, data: Weighted, options: dict[str, Any]) -> None:
        if self.prior_precision != "auto":
            self.prior_precision_ = positive_number("prior_precision", self.prior_precision, alternatives='"auto"')
            return
        # The bound's maximum over δ at the q of a first fit, drawn half-way to 1 by a prior as strong as the weights
        # themselves: of a likelihood that counts more than once, the evidence alone would let them grow without end.
        self.prior_precision_ = 1.0
        rule = schedules.gaussian("ivon", options["steps"], float(self.temperature), self._pace, self._curvature())
        q = self._run(rule, self._objective(network, self.t_, rule), start, data, **options).q
        size = sum(leaf.size for leaf in jax.tree.leaves(q.mean))
        squares = 2 * float(Isotropic(1.0).expected(q)) - size * math.log(2 * math.pi)
        self.prior_precision_ = max(2 * size / (squares + size), 0.1)


class _Classifier(ClassifierMixin, Trained):
    """Labels in, probabilities out."""

    class_weight: Any
    classes_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start."""
        return self._learn(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One pass over new examples, from where the last call ended.

        Every call's examples are new ones: the posterior is that of all of them so far. Inputs are standardised as in
        the first call, which has to name all `classes`.
        """
        return self._learn(X, y, sample_weight, classes, go_on=True)

    def _learn(self, X: Any, y: Any, sample_weight: Any, classes: Any = None, *, go_on: bool = False) -> Self:
        later = go_on and hasattr(self, "classes_")
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=not later)
        if go_on and not later and classes is None:
            raise ValueError("The first call of partial_fit needs classes=, all that may come: some may come late.")
        if later and classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"classes= are not those of the first call, {self.classes_.tolist()}.")
        self.classes_, labels = codes(y, self.classes_ if later else classes)
        counts = weights(X, sample_weight, self.class_weight, self.classes_, labels)
        if not later:
            self.x_mean_, self.x_scale_ = standard(X, counts)
        self._train(X, labels.astype(np.int32), counts, go_on=go_on)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Every class's probability, averaged over the posterior."""
        found = self._outputs(X, "softmax")
        return found / found.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class."""
        found = self.predict_proba(X)
        return self.classes_[np.argmax(found, axis=1)]

    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of the labels, (n_samples, n); within a draw all rows have the same weights."""
        outputs, key = self._drawn(X, n_samples, random_state)
        return self.classes_[np.asarray(jax.random.categorical(key, outputs))]


class MLPClassifier(_Classifier, _Perceptron):
    r"""A perceptron for classes with a posterior over its weights, by any algorithm of the rule.

    $p(y \mid x, θ) = \mathrm{softmax}(f_θ(x))_y$, $θ ∼ N(0, 1/δ)$ with weights in units of $1/\sqrt{\text{inputs}}$; q
    is trained on $E_q[−\log p(y \mid x, θ)] + τ\,\mathrm{KL}(q ‖ p)$. Inputs are standardised first.

    Parameters
    ----------
    hidden_layer_sizes, activation : the layers' widths; "relu" or "tanh".
    recipe : "ivon", "vogn", "voggn", "slang" (averaged over draws of q), "ogn", "oggn" (linearised), "adam", "rmsprop",
        "sgd", "dropout" (the mean alone), with rates of their own, or any rule: `recipe=blr.vogn(1e-2)`.
    prior_precision : δ; 1 is the spread that weights start with. "auto" fits twice, and takes from the first posterior
        what the bound and a hyper-prior around 1 say.
    temperature : τ of the recipes by name. Below 1 the posterior is colder than Bayes', which networks on little data
        need: a factorised q is too wide at 1. A rule has its own.
    max_iter, batch_size : epochs, and examples for each step ("auto": 200); with fewer examples every step sees all.
    samples : draws of the weights for a prediction.
    class_weight : None, "balanced" or a dict.
    random_state : a seed.

    Attributes
    ----------
    classes_, posterior_ (q), prior_precision_ (δ), loss_curve_ (the objective for an example, epoch by epoch), n_iter_,
    x_mean_ and x_scale_ (what inputs are standardised by), state_ (where `partial_fit` goes on).

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

    def __init__(
        self,
        hidden_layer_sizes: Any = (50,),
        *,
        activation: str = "relu",
        recipe: Any = "ivon",
        prior_precision: Any = 1.0,
        temperature: float = 0.03,
        max_iter: int = 200,
        batch_size: Any = "auto",
        samples: int = 32,
        class_weight: Any = None,
        random_state: Any = None,
    ):
        self.hidden_layer_sizes, self.activation, self.recipe = hidden_layer_sizes, activation, recipe
        self.prior_precision, self.temperature, self.max_iter = prior_precision, temperature, max_iter
        self.batch_size, self.samples = batch_size, samples
        self.class_weight, self.random_state = class_weight, random_state

    _pace = 2.0  # the losses of classes are bounded in their slopes, and bear longer steps

    def _network(self) -> Network:
        return self._plain(len(self.classes_))

    def _objective(self, network: Network, size: Any, rule: Rule) -> Objective:
        strength = self._regularizer(rule, self.prior_precision_)
        return Objective(softmax_cross_entropy, output=network.apply, size=size, regularizer=strength)


class MLPRegressor(RegressorMixin, _Perceptron):
    r"""A perceptron for numbers with a posterior over its weights and over the noise, by any algorithm of the rule.

    $y ∼ N(f_θ(x), σ^2)$, $θ ∼ N(0, 1/δ)$ with weights in units of $1/\sqrt{\text{inputs}}$, and q is trained on
    $E_q[−\log p(y \mid x, θ)] + τ\,\mathrm{KL}(q ‖ p)$. Inputs and targets are standardised first. With several targets
    (n, K) each has its σ².

    Parameters
    ----------
    noise : "auto", where log σ² is one more parameter of the network, or σ² in y's own units squared.
    temperature : τ, by default less cold than for classes: the noise is learnt with the weights.

    The others, and the attributes, are those of `MLPClassifier`; beside them `noise_` (σ²), `y_mean_` and `y_scale_`.

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
        prior_precision: Any = 1.0,
        noise: Any = "auto",
        temperature: float = 0.3,
        max_iter: int = 200,
        batch_size: Any = "auto",
        samples: int = 32,
        random_state: Any = None,
    ):
        self.hidden_layer_sizes, self.activation, self.recipe = hidden_layer_sizes, activation, recipe
        self.prior_precision, self.noise, self.temperature = prior_precision, noise, temperature
        self.max_iter, self.batch_size = max_iter, batch_size
        self.samples, self.random_state = samples, random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start."""
        return self._learn(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One pass over new examples, from where the last call ended.

        Every call's examples are new ones: the posterior is that of all of them so far. Inputs and targets are
        standardised as in the first call.
        """
        return self._learn(X, y, sample_weight, go_on=True)

    def _learn(self, X: Any, y: Any, sample_weight: Any, *, go_on: bool = False) -> Self:
        later = go_on and hasattr(self, "state_")
        how = {"dtype": [np.float64, np.float32], "multi_output": True, "y_numeric": True, "reset": not later}
        X, y = validate_data(self, X, y, **how)
        y = column_or_1d(y, warn=True) if y.ndim == 2 and y.shape[1] == 1 else y
        counts = weights(X, sample_weight)
        if not later:
            self.x_mean_, self.x_scale_ = standard(X, counts)
            self.y_mean_, self.y_scale_ = (np.asarray(value, float) for value in standard(y, counts))
        elif y.shape[1:] != self.y_mean_.shape:
            raise ValueError(f"y has the shape {y.shape}, and the first call had {self.y_mean_.size} targets a row.")
        targets = ((y - self.y_mean_) / self.y_scale_).reshape(len(y), -1).astype(X.dtype)
        if not self._noisy:
            noise = positive_number("noise", self.noise, alternatives='"auto"') / self.y_scale_.reshape(-1) ** 2
            targets = np.concatenate([targets, np.broadcast_to(noise, targets.shape).astype(X.dtype)], axis=1)
        self._train(X, targets, counts, go_on=go_on)
        self._keep_noise()
        return self

    def with_posterior(self, q: Any) -> Self:
        other = super().with_posterior(q)
        other._keep_noise()
        return other

    def _keep_noise(self) -> None:
        """σ² in y's own units."""
        found = np.broadcast_to(self.noise, self.y_mean_.size) if not self._noisy else self._learnt_noise()
        self.noise_ = np.asarray(found, float) if self.y_mean_.ndim else float(found[0])

    def _learnt_noise(self) -> np.ndarray:
        return np.exp(np.asarray(self.posterior_.mean["log_noise"], float)) * self.y_scale_.reshape(-1) ** 2

    @property
    def _noisy(self) -> bool:
        """Whether the noise is a parameter."""
        return isinstance(self.noise, str) and self.noise == "auto"

    def _curvature(self) -> float:
        return 1.0 if self._noisy else float(np.max(self.y_scale_) ** 2 / self.noise)

    def _network(self) -> Network:
        network = self._plain(self.y_mean_.size)
        return _noisy(network, self.y_mean_.size) if self._noisy else network

    def _objective(self, network: Network, size: Any, rule: Rule) -> Objective:
        strength = self._regularizer(rule, self.prior_precision_)
        loss = noisy_nll if self._noisy else _known_noise
        return Objective(loss, output=network.apply, size=size, regularizer=strength)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of y, and with `return_std` its standard deviation: that of the model and the noise."""
        mean, spread = self._outputs(X, variance=True)
        size, shape = self.y_mean_.size, (len(mean), *self.y_mean_.shape)
        mean = self.y_mean_ + self.y_scale_ * mean[:, :size].reshape(shape)
        if not return_std:
            return mean
        return mean, np.sqrt(self.y_scale_**2 * spread[:, :size].reshape(shape) + self.noise_)

    def sample_predictive(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draws of y, noise included, (n_samples, n); within a draw all rows have the same weights."""
        outputs, key = self._drawn(X, n_samples, random_state)
        f = outputs[..., : self.y_mean_.size].reshape(*outputs.shape[:2], *self.y_mean_.shape)
        noise = np.sqrt(self.noise_) * np.asarray(jax.random.normal(key, f.shape))
        return self.y_mean_ + self.y_scale_ * f + noise

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class BinaryMLPClassifier(_Classifier):
    r"""A perceptron whose weights are all ±1, with the probability of each sign.

    $p(y \mid x, θ) = \mathrm{softmax}(f_θ(x))_y$ with θ ∈ {−1, 1} and a uniform prior: no biases (a constant input
    stands for one), ReLU, every layer's output divided by the root of its number of inputs, and the last one's times 4.
    Inputs are standardised first.

    Parameters
    ----------
    recipe : "bayesbinn", "straight_through" (predicts with the signs alone), or any rule over `blr.Bernoulli`.

    The others, and the attributes, are those of `MLPClassifier`, but for the prior's.

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
        random_state: Any = None,
    ):
        self.hidden_layer_sizes, self.recipe, self.max_iter = hidden_layer_sizes, recipe, max_iter
        self.batch_size, self.samples = batch_size, samples
        self.class_weight, self.random_state = class_weight, random_state

    def _network(self) -> Network:
        return _signs(self._sizes(self.n_features_in_ + 1, len(self.classes_)))

    def _rule(self, steps: int | None) -> Rule:
        named = {name: partial(schedules.binary, name, steps) for name in schedules.BINARY}
        return chosen(self.recipe, named, self)

    def _objective(self, network: Network, size: Any, rule: Rule) -> Objective:
        return Objective(softmax_cross_entropy, output=network.apply, size=size)


# Networks are functions, and each is made once, or it would be compiled again.


@lru_cache(maxsize=256)
def _perceptron(sizes: tuple[int, ...], activation: str) -> Network:
    return mlp(sizes, _ACTIVATIONS[activation], normalized=True)


@lru_cache(maxsize=256)
def _noisy(network: Network, outputs: int) -> Network:
    return with_noise(network, outputs)


@lru_cache(maxsize=256)
def _signs(sizes: tuple[int, ...]) -> Network:
    plain = binary_mlp(sizes, normalization="fan_in", spread=1.0)
    return Network(plain.init, lambda params, x: _GAIN * plain.apply(params, jnp.append(x, 1.0)))


def _known_noise(output: Any, target: Any) -> Any:
    y, noise = jnp.split(target, 2)
    return gaussian_nll(output, y, noise)
