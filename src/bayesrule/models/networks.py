"""Small neural networks as pairs of functions: `init(key)` gives the parameters, `apply(params, x)` the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..numerics.pytree import PyTree
from ..numerics.random import Key


class Network(NamedTuple):
    """A network whose examples are independent, as the two functions that a training loop needs.

    Attributes:
        init: `init(key)` gives the parameters.
        apply: `apply(params, x)` gives the outputs for one example x.

    >>> import jax, jax.numpy as jnp
    >>> network = mlp([2, 3, 1])
    >>> network.apply(network.init(jax.random.key(0)), jnp.zeros(2)).shape
    (1,)
    """

    init: Callable[[Key], PyTree]
    apply: Callable[[PyTree, Any], Array]


class BatchNetwork(NamedTuple):
    """A network whose examples depend on each other through batch normalisation.

    Args:
        init: `init(key)` gives the parameters.
        apply: `apply(params, x, statistics, train=True)` takes a batch and returns its outputs and the new averages.
        loss: `loss(params, batch, statistics, key)` is the cross-entropy of each example of `(x, labels)`, and the new
            averages, for `Objective.from_batch(network.loss, size=N, aux=network.statistics)`.
        statistics: the running averages to start from.

    >>> network = binary_mlp((4, 8, 3))
    >>> {layer: sorted(averages) for layer, averages in network.statistics.items()}
    {'layer0': ['mean', 'variance'], 'layer1': ['mean', 'variance']}
    """

    init: Callable[[Key], PyTree]
    apply: Callable[..., tuple[Array, PyTree]]
    loss: Callable[[PyTree, tuple[Any, Any], PyTree, Any], tuple[Array, PyTree]]
    statistics: PyTree


def mlp(
    sizes: Sequence[int], activation: Callable[[Array], Array] = jax.nn.relu, *, normalized: bool = False
) -> Network:
    """A multi-layer perceptron.

    Weights start as N(0, 2/inputs) before an activation (He et al., 2015) and N(0, 1/inputs) in the last layer, biases
    as zeros. The input is ravelled.

    Args:
        sizes: the widths of the layers, the input's first and the output's last.
        activation: the function between layers; there is none after the last.
        normalized: whether a layer's inputs are divided by the square root of their number, and its weights start so
            much larger. One prior N(0, 1/δ) is then adequate for layers of all widths.

    >>> import jax, jax.numpy as jnp
    >>> network = mlp((4, 8, 3))
    >>> params = network.init(jax.random.key(0))
    >>> params["layer0"]["w"].shape, network.apply(params, jnp.ones((2, 2))).shape
    ((4, 8), (3,))
    """
    shapes = _layers(sizes)
    roots = [math.sqrt(inputs) if normalized else 1.0 for inputs, _ in shapes]

    def init(key: Key) -> PyTree:
        keys = jax.random.split(key, len(shapes))
        last = len(shapes) - 1
        return {
            f"layer{i}": {
                "w": roots[i] * _normal(k, shape, shape[0], 1.0 if i == last else 2.0),
                "b": jnp.zeros(shape[1]),
            }
            for i, (k, shape) in enumerate(zip(keys, shapes, strict=True))
        }

    def apply(params: PyTree, x: Any) -> Array:
        h = _example(x, sizes[0])
        for i in range(len(shapes)):
            # The inputs are divided and not the weights, so that the layer is a plain product h @ w, whose per-example
            # squared gradients have a cheap form (curvature/per_example.py).
            h = (activation(h) if i else h) / roots[i] @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"]
        return h

    return Network(init, apply)


def with_noise(network: Network, outputs: int) -> Network:
    """The network with log σ² of each output appended to its outputs, as further parameters. For `noisy_nll`.

    >>> import jax, jax.numpy as jnp
    >>> network = with_noise(mlp((4, 8, 2)), 2)
    >>> network.apply(network.init(jax.random.key(0)), jnp.zeros(4)).tolist()
    [0.0, 0.0, 0.0, 0.0]
    """

    def init(key: Key) -> PyTree:
        return {**network.init(key), "log_noise": jnp.zeros(outputs)}

    def apply(params: PyTree, x: Any) -> Array:
        return jnp.concatenate([network.apply(params, x), params["log_noise"]])

    return Network(init, apply)


def cnn(
    shape: tuple[int, int, int] = (28, 28, 1), channels: Sequence[int] = (16, 32), classes: int = 10, width: int = 3
) -> Network:
    """A small convolutional network: convolutions, each with ReLU and 2×2 max-pooling, and a linear layer.

    Weights start as N(0, 2/inputs), and N(0, 1/inputs) in the last layer; biases as zeros.

    Args:
        shape: (height, width, channels) of an image; one without the last axis is read as grey.
        channels: the number of channels of each convolution.
        classes: the number of outputs.
        width: the width of the kernels, which are padded to keep the image's size.

    >>> import jax, jax.numpy as jnp
    >>> network = cnn((8, 8, 1), channels=(4,), classes=3)
    >>> params = network.init(jax.random.key(0))
    >>> params["conv0"]["w"].shape, params["linear"]["w"].shape
    ((3, 3, 1, 4), (64, 3))
    >>> jax.vmap(network.apply, (None, 0))(params, jnp.ones((5, 8, 8, 1))).shape
    (5, 3)
    """
    height, across = (side >> len(channels) for side in shape[:2])
    if not channels or min(height, across) < 1:
        raise ValueError(
            f"Each convolution halves the image, and {shape[0]}×{shape[1]} cannot be halved {len(channels)} times (it "
            "takes at least one): give fewer channels or larger images."
        )
    kernels = [(width, width, i, o) for i, o in zip((shape[2], *channels[:-1]), channels, strict=True)]
    features = height * across * channels[-1]

    def init(key: Key) -> PyTree:
        *keys, last = jax.random.split(key, len(kernels) + 1)
        params = {
            f"conv{i}": {"w": _normal(k, kernel, math.prod(kernel[:3]), 2.0), "b": jnp.zeros(kernel[3])}
            for i, (k, kernel) in enumerate(zip(keys, kernels, strict=True))
        }
        return params | {"linear": {"w": _normal(last, (features, classes), features, 1.0), "b": jnp.zeros(classes)}}

    def apply(params: PyTree, x: Any) -> Array:
        h = _example(x, math.prod(shape)).reshape(1, *shape)
        for i in range(len(kernels)):
            layer = params[f"conv{i}"]
            h = h.astype(layer["w"].dtype)
            # A batch of one example: under vmap JAX makes this one convolution over all examples.
            h = jax.lax.conv_general_dilated(h, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            h = _max_pool(jax.nn.relu(h + layer["b"]))
        return h.reshape(-1) @ params["linear"]["w"] + params["linear"]["b"]

    return Network(init, apply)


def _max_pool(h: Float[Array, "B H W C"]) -> Float[Array, "B h w C"]:
    """The maximum of every 2×2 patch; an odd last row or column is dropped."""
    batch, height, width, channels = h.shape
    h = h[:, : height // 2 * 2, : width // 2 * 2]
    return h.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


@overload
def binary_mlp(
    sizes: Sequence[int], *, normalization: Literal["batch"] = "batch", spread: float = ..., momentum: float = ...
) -> BatchNetwork: ...


@overload
def binary_mlp(sizes: Sequence[int], *, normalization: Literal["fan_in"], spread: float = ...) -> Network: ...


def binary_mlp(
    sizes: Sequence[int], *, normalization: str = "batch", spread: float = 10.0, momentum: float = 0.9
) -> BatchNetwork | Network:
    """A perceptron whose weights are all ±1, without biases, and ReLU between layers (Meng et al., 2020).

    `init(key)` gives natural parameters for `Bernoulli`; the uniform prior over the signs is the member with λ = 0.
    What `apply` takes are weights: draws of that q, its mean, or their relaxation. For `predict` fix the running
    averages: `lambda params, x: network.apply(params, x[None], statistics, train=False)[0][0]`.

    Args:
        sizes: the widths of the layers, the input's first and the output's last.
        normalization: "batch": every layer, the last too, is followed by batch normalisation without scale and shift,
            (h − mean)/√(variance + 1e-4), over the batch in training and by running averages otherwise; the network is
            a `BatchNetwork`. "fan_in": each layer's output is divided by √inputs, and `apply` takes one example.
        spread: the natural parameters start at ±`spread` with random signs, as in the published code.
        momentum: of the running averages, new = `momentum`·old + (1 − `momentum`)·batch (biased variances).

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> network = binary_mlp((4, 8, 3))
    >>> q = blr.Bernoulli(network.init(jax.random.key(0)))
    >>> x, y = jax.random.normal(jax.random.key(1), (6, 4)), jnp.array([0, 1, 2, 0, 1, 2])
    >>> logits, statistics = network.apply(q.mean, x, network.statistics)
    >>> logits.shape, statistics["layer1"]["mean"].shape
    ((6, 3), (3,))
    >>> prior = blr.Bernoulli(jax.tree.map(jnp.zeros_like, q.natural()))
    >>> objective = blr.Objective.from_batch(network.loss, size=6, aux=network.statistics, prior=prior)
    """
    shapes = _layers(sizes)

    def init(key: Key) -> PyTree:
        keys = jax.random.split(key, len(shapes))
        return {
            f"layer{i}": {"w": spread * jax.random.rademacher(k, shape, float)}
            for i, (k, shape) in enumerate(zip(keys, shapes, strict=True))
        }

    if normalization == "fan_in":

        def apply_one(params: PyTree, x: Any) -> Array:
            h = _example(x, sizes[0])
            for i, (inputs, _) in enumerate(shapes):
                h = (jax.nn.relu(h) if i else h) @ params[f"layer{i}"]["w"] / math.sqrt(inputs)
            return h

        return Network(init, apply_one)
    if normalization != "batch":
        raise ValueError(f'normalization is "batch" or "fan_in", got {normalization!r}.')
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum, the weight of the old average, lies in [0, 1), got {momentum}.")

    def apply(params: PyTree, x: Any, statistics: PyTree, train: bool = True) -> tuple[Array, PyTree]:
        h, new = jax.vmap(lambda row: _example(row, sizes[0]))(jnp.asarray(x)), {}
        for i in range(len(shapes)):
            name = f"layer{i}"
            h = (jax.nn.relu(h) if i else h) @ params[name]["w"]
            h, new[name] = _batch_normalized(h, statistics[name], momentum, train)
        return h, new

    def loss(
        params: PyTree, batch: tuple[Any, Any], statistics: PyTree, key: Key | None = None
    ) -> tuple[Array, PyTree]:
        logits, statistics = apply(params, batch[0], statistics)
        return jax.vmap(softmax_cross_entropy)(logits, jnp.asarray(batch[1])), statistics

    statistics = {f"layer{i}": {"mean": jnp.zeros(out), "variance": jnp.ones(out)} for i, (_, out) in enumerate(shapes)}
    return BatchNetwork(init, apply, loss, statistics)


def _batch_normalized(
    h: Float[Array, "B H"], old: dict[str, Array], momentum: float, train: bool
) -> tuple[Float[Array, "B H"], dict[str, Array]]:
    """(h − mean)/√(variance + 1e-4) over the batch in training, else by the running averages; and the new averages."""
    used = {"mean": jnp.mean(h, axis=0), "variance": jnp.var(h, axis=0)} if train else old
    h = (h - used["mean"]) / jnp.sqrt(used["variance"] + 1e-4)
    if not train:
        return h, old
    # The running averages are not differentiated: how a weight changes them is no part of the loss.
    batch = jax.lax.stop_gradient(used)
    return h, jax.tree.map(lambda o, n: (momentum * o + (1 - momentum) * n).astype(o.dtype), old, batch)


def softmax_cross_entropy(logits: Float[Array, " K"], label: Any) -> Float[Array, ""]:
    """−log softmax(logits)[label] for one example, in nats.

    >>> import jax.numpy as jnp
    >>> float(softmax_cross_entropy(jnp.array([0.0, 0.0]), 1))
    0.6931
    """
    return jax.nn.logsumexp(logits) - logits[label]


def gaussian_nll(output: Any, target: Any, noise: Any = 1.0) -> Float[Array, ""]:
    """−log N(target | output, noise) for one example, with the variance `noise`, summed over its outputs.

    >>> import jax.numpy as jnp
    >>> float(gaussian_nll(jnp.array([0.0]), 1.0))
    1.4189
    """
    output, target = jnp.asarray(output), jnp.asarray(target)
    if output.size != target.size:
        raise ValueError(
            f"The output has shape {output.shape} and the target {target.shape}: they need the same number of entries."
        )
    error = jnp.ravel(output) - jnp.ravel(target)
    return 0.5 * jnp.sum(error**2 / noise + jnp.log(2 * math.pi * jnp.asarray(noise)))


def noisy_nll(output: Float[Array, " 2K"], target: Float[Array, " K"]) -> Float[Array, ""]:
    """−log N(target | f, σ²) for one example with the output (f, log σ²) of a network `with_noise`.

    >>> import jax.numpy as jnp
    >>> float(noisy_nll(jnp.array([0.0, 0.0]), jnp.array([1.0])))
    1.4189
    """
    mean, log_noise = jnp.split(output, 2)
    return gaussian_nll(mean, target, jnp.exp(log_noise))


def _layers(sizes: Sequence[int]) -> list[tuple[int, int]]:
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes are the widths of at least two layers, input first and output last; got {sizes}.")
    return list(pairwise(sizes))


def _example(x: Any, size: int) -> Float[Array, " size"]:
    """One example, ravelled."""
    x = jnp.asarray(x)
    if x.size != size:
        raise ValueError(
            f"The network takes {size} numbers for an example, and an input of shape {x.shape} has {x.size}. For a "
            "batch use jax.vmap(apply, (None, 0))."
        )
    return jnp.ravel(x)


def _normal(key: Key, shape: tuple[int, ...], inputs: int, gain: float) -> Array:
    return math.sqrt(gain / inputs) * jax.random.normal(key, shape)
