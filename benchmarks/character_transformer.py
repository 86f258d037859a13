"""A small transformer over characters, in equinox: the network of which `bench_moments.py` sums squared gradients."""

import equinox as eqx
import jax
import jax.numpy as jnp


class Block(eqx.Module):
    """Attention and an MLP, each after a normalisation and around a residual connection."""

    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, width, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
        self.up, self.down = (
            eqx.nn.Linear(width, 4 * width, key=keys[1]),
            eqx.nn.Linear(4 * width, width, key=keys[2]),
        )
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(self.norms[1](y)))))(x)


class Transformer(eqx.Module):
    """The logits of the next character at each place of a text."""

    table: eqx.nn.Embedding
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, characters, length, width, depth, key):
        keys = jax.random.split(key, depth + 3)
        self.table = eqx.nn.Embedding(characters, width, key=keys[0])
        self.places = 0.1 * jax.random.normal(keys[1], (length, width))
        self.blocks = [Block(width, k) for k in keys[3:]]
        self.norm, self.head = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, characters, key=keys[2])

    def __call__(self, text):
        h = jax.vmap(self.table)(text) + self.places
        for block in self.blocks:
            h = block(h)
        return jax.vmap(lambda y: self.head(self.norm(y)))(h)
