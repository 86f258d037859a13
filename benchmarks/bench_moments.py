"""The sum of squared per-example gradients, compared with the plain gradient of the batch and with JAX's vmap(grad).

A batch of 128 in float32. The reference is `value_and_grad` of the weighted mean loss, which gives no squares at all.
Memory is the compiler's own count of arguments, outputs and temporaries, as a multiple of the plain gradient's; the
squares alone are one more output. `vmap(grad)` is left out where the gradients of all examples exceed 400 MB, or where
the plain gradient takes 0.3 s and more.
"""

from __future__ import annotations

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from character_transformer import Transformer
from timing import fastest, seconds_of

BATCH, SECONDS, LARGEST, LONGEST = 128, 4.0, 100_000_000, 0.3
NHWC = ("NHWC", "HWIO", "NHWC")


def cross_entropy(logits, label):
    return jax.nn.logsumexp(logits) - logits[label]


def draw(*shape, scale=None):
    """Normal numbers, by default divided by the square root of the number of inputs."""
    rng = np.random.default_rng(shape)
    scale = 1 / np.sqrt(np.prod(shape[:-1])) if scale is None else scale
    return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)


def layers(*shapes):
    """Random weights and zero biases of these shapes."""
    return [(draw(*shape), jnp.zeros(shape[-1], jnp.float32)) for shape in shapes]


def mlp_params():
    return layers((784, 512), (512, 256), (256, 10))


def batch():
    """Random images and labels."""
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.standard_normal((BATCH, 28, 28)), jnp.float32), jnp.asarray(rng.integers(0, 10, BATCH))


def network(params, example, weight=lambda w: w):
    """An MLP whose weights are a function of the parameters."""
    h = example[0].reshape(-1)
    for *own, bias in params[:-1]:
        h = jax.nn.relu(h @ weight(*own) + bias)
    *own, bias = params[-1]
    return cross_entropy(h @ weight(*own) + bias, example[1])


def mlp_loss(params, example):
    return network(params, example)


def scaled(w):
    return w / np.sqrt(w.shape[0]).astype(np.float32)


def normalized(v, g):
    return g * v / jnp.sqrt(jnp.sum(v**2, axis=0))


def normalized_params():
    return [(weight, jnp.ones_like(bias), bias) for weight, bias in mlp_params()]


def cnn_loss(params, example, stride=1, groups=1, pool=lambda h: h):
    h = example[0][None, :, :, None]
    for i, (weight, bias) in enumerate(params[:-1]):
        h = jax.lax.conv_general_dilated(
            h, weight, (stride, stride), "SAME", dimension_numbers=NHWC, feature_group_count=groups if i else 1
        )
        h = pool(jax.nn.relu(h + bias))
    weight, bias = params[-1]
    return cross_entropy(h.reshape(-1) @ weight + bias, example[1])


def max_pool(h):
    return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def max_pool_by_reshape(h):
    """The same numbers, with a backward pass that is several times as fast on a CPU."""
    return h.reshape((1, h.shape[1] // 2, 2, h.shape[2] // 2, 2, -1)).max((2, 4))


def cnn_params(groups=1):
    return layers((3, 3, 1, 16), (3, 3, 16 // groups, 32), (7 * 7 * 32, 10))


def autoencoder_loss(params, example):
    """One matrix for both directions."""
    x = example[0].reshape(-1)
    return jnp.mean((jax.nn.relu(x @ params["w"] + params["b"]) @ params["w"].T + params["c"] - x) ** 2)


def autoencoder_params():
    return {"w": draw(784, 256), "b": jnp.zeros(256), "c": jnp.zeros(784)}


def bag_of_words_loss(params, example):
    """The mean of the looked-up rows, and a dense layer."""
    h = jax.nn.relu(jnp.mean(params["table"][example[0]], axis=0) @ params["w"] + params["b"])
    return cross_entropy(h @ params["v"], example[1])


def bag_of_words():
    params = {"table": draw(20_000, 64, scale=1.0), "w": draw(64, 64), "b": jnp.zeros(64), "v": draw(64, 10)}
    rng = np.random.default_rng(1)
    return params, (jnp.asarray(rng.integers(0, 20_000, (BATCH, 32))), jnp.asarray(rng.integers(0, 10, BATCH)))


def scanned_loss(params, example):
    """Eight residual layers of 128 units in one `lax.scan`."""
    layer = lambda h, own: (h + jnp.tanh(h @ own[0] + own[1]), None)
    start = jnp.tanh(example[0].reshape(-1) @ params["in"])
    return cross_entropy(jax.lax.scan(layer, start, (params["w"], params["b"]))[0] @ params["out"], example[1])


def scanned_params():
    stacked = draw(8, 128, 128, scale=128**-0.5)
    return {"in": draw(784, 128), "w": stacked, "b": jnp.zeros((8, 128)), "out": draw(128, 10)}


def recurrent_loss(params, example):
    """An image's rows as 28 steps of a recurrent layer."""
    step = lambda h, x: (jnp.tanh(params["w"] @ h + params["u"] @ x + params["b"]), None)
    return cross_entropy(params["v"] @ jax.lax.scan(step, jnp.zeros(128), example[0])[0], example[1])


def recurrent_params():
    return {"w": draw(128, 128), "u": draw(128, 28, scale=0.1), "b": jnp.zeros(128), "v": draw(10, 128)}


def transformer():
    """Four blocks of width 64 on texts of 64 of 65 characters."""
    params, static = eqx.partition(Transformer(65, 64, 64, 4, jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, text):
        return jnp.mean(jax.vmap(cross_entropy)(eqx.combine(params, static)(text[:-1]), text[1:]))

    return loss, params, jnp.asarray(np.random.default_rng(1).integers(0, 65, (BATCH, 65)))


def cases():
    """A loss, its parameters, a batch, and the most that the squares may cost as a multiple of the plain gradient."""
    part, images = functools.partial, batch()
    yield "MLP 784-512-256-10", mlp_loss, mlp_params(), images, 1.6
    yield "CNN 16-32-10, strides of 2", part(cnn_loss, stride=2), cnn_params(), images, 1.8
    yield "CNN 16-32-10, max-pooling", part(cnn_loss, pool=max_pool), cnn_params(), images, 1.8
    yield "CNN, pooling by reshape", part(cnn_loss, pool=max_pool_by_reshape), cnn_params(), images, 1.8
    yield "embedding 20,000×64, 32 words", bag_of_words_loss, *bag_of_words(), 3.0
    yield "scan over 8 layers of 128", scanned_loss, scanned_params(), images, 4.0
    yield "transformer, 4 blocks of 64", *transformer(), 3.0
    yield "RNN of 128, 28 steps", recurrent_loss, recurrent_params(), images, None
    yield "MLP, scaled weights", part(network, weight=scaled), mlp_params(), images, None
    yield "MLP, weight normalisation", part(network, weight=normalized), normalized_params(), images, None
    yield "tied autoencoder 784-256", autoencoder_loss, autoencoder_params(), images, None
    yield "CNN, 4 groups", part(cnn_loss, groups=4, pool=max_pool_by_reshape), cnn_params(4), images, None
    yield "CNN, depthwise", part(cnn_loss, groups=16, pool=max_pool_by_reshape), cnn_params(16), images, None


def measure(name, loss, params, examples, target):
    from bayesrule.curvature.per_example import second_moments, ways

    weights = jnp.full(BATCH, 1 / BATCH, jnp.float32)

    def plain(params, examples, weights):
        return jax.value_and_grad(lambda p: weights @ jax.vmap(loss, (None, 0))(p, examples))(params)

    def naive(params, examples, weights):
        values, gradients = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, examples)
        sums = [jax.tree.map(lambda g, p=p: jnp.tensordot(weights, g**p, axes=1), gradients) for p in (1, 2)]
        return values, *sums

    def ours(params, examples, weights):
        return second_moments(loss, params, examples, weights)

    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    compiled = lambda f: jax.jit(f).lower(params, examples, weights).compile()
    programs = {"plain gradient": compiled(plain), "ours, with squares": compiled(ours)}
    runs = {way: lambda f=f: f(params, examples, weights) for way, f in programs.items()}
    jax.block_until_ready(runs["plain gradient"]())
    seconds = seconds_of(runs["plain gradient"])
    times = fastest(runs, int(np.clip(SECONDS / seconds / 2, 5, 300)))
    if BATCH * size <= LARGEST and seconds < LONGEST:
        programs["vmap(grad)"] = slow = compiled(naive)
        times |= fastest({"vmap(grad)": lambda: slow(params, examples, weights)}, 2)
    counts = {way: f.memory_analysis() for way, f in programs.items()}
    memory = {way: count_bytes(count) for way, count in counts.items()}
    temporaries = {way: getattr(count, "temp_size_in_bytes", 0) for way, count in counts.items()}
    limit = "" if target is None else f" (target: at most {target} times the plain gradient, 2 times its memory)"
    taken = sorted(set(ways(loss, params, examples).values()))
    print(f"{name}, {size:,} parameters, {', '.join(taken)}{limit}")
    for way, seconds in times.items():
        ratio, share = (x[way] / x["plain gradient"] for x in (times, memory))
        verdict = "" if target is None or "ours" not in way else "ok" if ratio <= target and share <= 2 else "MISSED"
        temporary = temporaries[way] / 2**20
        print(
            f"  {way:<20} {1e3 * seconds:8.2f} ms   ratio {ratio:6.2f}   memory {memory[way] / 2**20:7.1f} MB   "
            f"ratio {share:5.2f}   {temporary:7.1f} MB temporary   {verdict}",
            flush=True,
        )


def count_bytes(sizes):
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes


def main(data=None):
    for case in cases():
        measure(*case)


if __name__ == "__main__":
    main()
