"""The sum of squared per-example gradients, compared with the plain gradient of the batch and with JAX's vmap(grad).

An MLP 784-512-256-10 and a CNN (28×28, two strided 3×3 convolutions with 16 and 32 channels, one dense layer), a batch
of 128 in float32. The reference is `value_and_grad` of the weighted mean loss, which gives no squares at all. The
temporary memory is the compiler's own count.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from timing import fastest

BATCH, REPEATS = 128, 200


def cross_entropy(logits, label):
    return jax.nn.logsumexp(logits) - logits[label]


def mlp_loss(params, example):
    h = example[0].reshape(-1)
    for weight, bias in params[:-1]:
        h = jax.nn.relu(h @ weight + bias)
    weight, bias = params[-1]
    return cross_entropy(h @ weight + bias, example[1])


def cnn_loss(params, example):
    h = example[0][None, :, :, None]
    for weight, bias in params[:-1]:
        layout = ("NHWC", "HWIO", "NHWC")
        h = jax.nn.relu(jax.lax.conv_general_dilated(h, weight, (2, 2), "SAME", dimension_numbers=layout) + bias)
    weight, bias = params[-1]
    return cross_entropy(h.reshape(-1) @ weight + bias, example[1])


def layers(*shapes):
    """Random weights and zero biases of these shapes."""
    rng = np.random.default_rng(0)

    def draw(shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)

    return [(draw(shape), jnp.zeros(shape[-1], jnp.float32)) for shape in shapes]


def mlp_params():
    return layers((784, 512), (512, 256), (256, 10))


def batch():
    """Random images and labels."""
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.standard_normal((BATCH, 28, 28)), jnp.float32), jnp.asarray(rng.integers(0, 10, BATCH))


def main(data=None):
    from bayesrule.curvature.per_example import second_moments

    examples = batch()
    weights = jnp.full(BATCH, 1 / BATCH, jnp.float32)
    cases = {
        "MLP 784-512-256-10": (mlp_loss, mlp_params(), 1.6),
        "CNN 16-32-10": (cnn_loss, layers((3, 3, 1, 16), (3, 3, 16, 32), (7 * 7 * 32, 10)), 1.8),
    }
    for name, (loss, params, target) in cases.items():

        def plain(params, examples, weights, loss=loss):
            return jax.value_and_grad(lambda p: weights @ jax.vmap(loss, (None, 0))(p, examples))(params)

        def naive(params, examples, weights, loss=loss):
            values, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, examples)
            sums = [jax.tree.map(lambda g, p=p: jnp.tensordot(weights, g**p, axes=1), gradients) for p in (1, 2)]
            return values, *sums

        def ours(params, examples, weights, loss=loss):
            return second_moments(loss, params, examples, weights)

        programs = [jax.jit(f).lower(params, examples, weights).compile() for f in (plain, ours, naive)]
        names = "plain gradient", "ours, with squares", "vmap(grad)"
        runs = {way: lambda f=f, p=params: f(p, examples, weights) for way, f in zip(names, programs, strict=True)}
        times = fastest(runs, REPEATS)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        print(f"{name}, batch {BATCH}, {size:,} parameters (target: at most {target} times the plain gradient)")
        for (way, seconds), f in zip(times.items(), programs, strict=True):
            memory = f.memory_analysis().temp_size_in_bytes / 2**20
            ratio = seconds / times["plain gradient"]
            print(f"  {way:<20} {1e3 * seconds:8.2f} ms   ratio {ratio:5.2f}   {memory:7.1f} MB temporary")


if __name__ == "__main__":
    main()
