"""Sums of per-example squares and Kronecker factors, against every example's gradient from vmap(grad)."""

from functools import partial
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bayesrule.curvature import per_example_ops
from bayesrule.curvature.per_example import COSTS, kronecker_factors, pulled_squares, second_moments, ways

# Optional: the dev extra installs it.
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

BATCH = 7


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape))


def drawn(tree):
    """Numbers in the place of shapes."""
    return jax.tree.map(lambda s: draw(*s.shape) if isinstance(s, jax.ShapeDtypeStruct) else s, tree)


def cross_entropy(logits, label):
    return jax.nn.logsumexp(logits) - logits[label]


def labels(count=3):
    return jnp.arange(BATCH) % count


@partial(jax.jit, static_argnums=0)
def naive(function, theta, examples, weights):
    """Losses, Σ w g and Σ w g² from the B×P gradients."""
    values, rows = jax.vmap(jax.value_and_grad(function), (None, 0))(theta, examples)
    total = lambda power: jax.tree.map(lambda g: jnp.tensordot(weights.astype(g.dtype), g**power, axes=1), rows)
    return values, total(1), total(2)


many_naive = jax.jit(jax.vmap(naive, (None, 0, None, None)), static_argnums=0)


def agree(ours, theirs, tolerance=1e-12):
    """Leaf by leaf, relative to the leaf's largest entry."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, float), np.asarray(b, float)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max(initial=1e-30))


def mlp(activation):
    def loss(theta, example):
        h = example[0]
        for weight, bias in theta[:-1]:
            h = activation(h @ weight + bias)
        return cross_entropy(h @ theta[-1][0] + theta[-1][1], example[1])

    theta = [(draw(5, 6), draw(6)), (draw(6, 4), draw(4)), (draw(4, 3), draw(3))]
    return loss, theta, (draw(BATCH, 5), labels())


def one_weight(shape, apply, x=None):
    """A loss that is nonlinear in one use of one weight."""
    x = draw(BATCH, 5) if x is None else x
    return lambda w, e: jnp.sum(jnp.tanh(apply(w, e)) ** 2), draw(*shape), x


def convolution(numbers, shape, size=(9, 8), channels=2, **options):
    """A convolution with a bias; the example has no batch axis, as in most libraries' losses."""
    lead = {"N": 1, "C": channels, "H": size[0], "W": size[1]}
    x = draw(BATCH, *(lead[c] for c in numbers[0] if c != "N"))

    def loss(theta, e):
        y = jax.lax.conv_general_dilated(e[None], theta["kernel"], dimension_numbers=numbers, **options)
        out = jnp.moveaxis(y, numbers[2].index("C"), -1) + theta["bias"]
        return jnp.sum(jnp.tanh(0.3 * out) * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    outputs = shape[numbers[1].index("O")]
    return loss, {"kernel": draw(*shape), "bias": draw(outputs)}, x


NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def linen(module, *shape):
    x = draw(BATCH, *shape)
    theta = drawn(jax.eval_shape(module.init, jax.random.key(0), x[0]))
    return lambda t, e: cross_entropy(module.apply(t, e[0]).reshape(-1), e[1]), theta, (x, labels())


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.LayerNorm()(nn.relu(nn.Dense(6)(x))))


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), strides=2)(x))
        x = nn.max_pool(nn.relu(nn.Conv(3, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(-1))


def nnx_mlp():
    model = nnx.Sequential(nnx.Linear(5, 6, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(6, 3, rngs=nnx.Rngs(1)))
    graph, theta = nnx.split(model)
    theta = jax.tree.map(lambda p: draw(*p.shape), theta)
    return lambda t, e: cross_entropy(nnx.merge(graph, t)(e[0]), e[1]), theta, (draw(BATCH, 5), labels())


def equinox_mlp():
    model = drawn(eqx.filter_eval_shape(eqx.nn.MLP, 5, 3, 6, 2, key=jax.random.key(0)))
    theta, static = eqx.partition(model, eqx.is_inexact_array)
    return lambda t, e: cross_entropy(eqx.combine(t, static)(e[0]), e[1]), theta, (draw(BATCH, 5), labels())


def attention():
    layer = drawn(eqx.filter_eval_shape(eqx.nn.MultiheadAttention, 2, 6, key=jax.random.key(0)))
    theta, static = eqx.partition(layer, eqx.is_inexact_array)
    return lambda t, e: jnp.sum(eqx.combine(t, static)(e, e, e) ** 2), theta, draw(BATCH, 4, 6)


def layer_norm(theta, e):
    h = e @ theta["w"]
    h = (h - h.mean()) / jnp.sqrt(h.var() + 1e-5)
    return jnp.sum(jnp.tanh(h * theta["gain"] + theta["bias"]) ** 2)


def recurrent(theta, e):
    step = lambda h, x: (jnp.tanh(theta["w"] @ h + theta["u"] @ x), None)
    return jnp.sum(theta["v"] @ jax.lax.scan(step, jnp.zeros(4), e)[0])


@jax.custom_jvp
def softplus(x):
    return jnp.logaddexp(x, 0.0)


@jax.custom_jvp
def mixed(x):
    return x


mixed.defjvp(lambda p, t: (p[0], t[0] + jnp.mean(t[0])))
softplus.defjvp(lambda p, t: (softplus(p[0]), jax.nn.sigmoid(p[0]) * t[0]))


def tokens(length):
    """Numbers from 0 to 5, with repetitions, at which rows are looked up."""
    return jnp.asarray(np.random.default_rng(length).integers(0, 6, (BATCH, length)))


def used_five_times(w, x):
    for _ in range(5):
        x = jnp.tanh(w @ x)
    return x


def lookup_in_loop(w, i):
    step = lambda h, j: (jnp.tanh(h + w[j]), h * w[j])
    return jax.lax.scan(step, jnp.ones(4), i)[1]


@jax.custom_vjp
def custom_product(w, x):
    return x @ w


custom_product.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, d: (2.0 * jnp.outer(r[1], d), r[0] @ d))


def branches(w, x):
    return jax.lax.cond(x[0] > 0, lambda w: jnp.tanh(x @ w), lambda w: jnp.sin(x[::-1] @ w) * jnp.sum(w), w)


def layers(loss, shape=(4,)):
    """Three layers of four units, stacked; the same weights in every iteration that is over time."""
    theta = {"b": draw(3, 4), "w": draw(3, 4, 4)}
    return lambda t, x: jnp.sum(jnp.cos(jnp.arange(4.0)) * loss(t["w"], t["b"], x)), theta, draw(BATCH, *shape)


def layer(h, wb):
    return jnp.tanh(h @ wb[0] + wb[1])


def scan_over_layers(w, b, x, reverse=False, each=lambda f: f):
    return jax.lax.scan(lambda h, wb: (each(layer)(h, wb), None), x, (w, b), reverse=reverse)[0]


def layers_over_time(w, b, x):
    """A loop over layers in one over time; the weights come in another order of axes."""
    through = lambda h, wb: (jnp.tanh(wb[0].T @ h + wb[1]), None)
    step = lambda h, _: jax.lax.scan(through, h, (jnp.swapaxes(w, 1, 2), b))
    return jax.lax.scan(lambda h, e: (step(h + e, None)[0], None), jnp.zeros(4), x.T)[0]


def layers_one_by_one(w, b, x):
    for i in range(3):
        x = layer(x, (w[i], b[i]))
    return x


def layers_split(w, b, x):
    for one, bias in zip(jnp.split(w, 3), jnp.split(b, 3), strict=True):
        x = layer(x, (one[0], bias[0]))
    return x


def layers_by_index(w, b, x):
    return jax.lax.fori_loop(0, 3, lambda i, h: layer(h, (w[i], b[i])), x)


def weights_carried(w, b, x):
    step = lambda carry, bias: ((layer(carry[0], (carry[1][0], bias)), carry[1]), None)
    h = jax.lax.scan(step, (x, w[:1]), b)[0][0]
    return h + 0.5 * (h @ w[1]) + jnp.sum(b * h)


def weights_changed(w, b, x):
    step = lambda carry, bias: ((layer(carry[0], (carry[1], bias)), 0.5 * carry[1]), None)
    return jax.lax.scan(step, (x, w[0]), b)[0][0]


DENSE, CONV, EACH = "product", "convolution", "examples"
CASES = {
    "tanh MLP": (lambda: mlp(jnp.tanh), [DENSE, "bias"] * 3),
    "relu MLP": (lambda: mlp(jax.nn.relu), [DENSE, "bias"] * 3),
    "x @ w": (lambda: one_weight((5, 3), lambda w, x: x @ w), [DENSE]),
    "w @ x": (lambda: one_weight((3, 5), lambda w, x: w @ x), [DENSE]),
    "x @ w.T": (lambda: one_weight((3, 5), lambda w, x: x @ w.T), [DENSE]),
    "x @ vector": (lambda: one_weight((5,), lambda w, x: x @ w), [DENSE]),
    "dot": (lambda: one_weight((5, 3), lambda w, x: jnp.dot(x, w)), [DENSE]),
    "einsum": (lambda: one_weight((3, 5, 2), partial(jnp.einsum, "aib,i->ba")), [DENSE]),
    "heads": (lambda: one_weight((2, 4, 3), partial(jnp.einsum, "hde,hd->he"), draw(BATCH, 2, 4)), [DENSE]),
    "heads over time": (
        lambda: one_weight((2, 4, 3), partial(jnp.einsum, "hde,thd->teh"), draw(BATCH, 6, 2, 4)),
        [DENSE],
    ),
    "two axes": (lambda: one_weight((3, 2, 4), partial(jnp.einsum, "obi,tib->ot"), draw(BATCH, 6, 4, 2)), [DENSE]),
    "reshaped": (lambda: one_weight((15,), lambda w, x: x @ w.reshape(3, 5).T), [DENSE]),
    "over time": (lambda: one_weight((5, 3), lambda w, x: x @ w, draw(BATCH, 6, 5)), [DENSE]),
    "checkpoint": (lambda: one_weight((5, 3), jax.checkpoint(lambda w, x: jnp.tanh(x @ w))), [DENSE]),
    "jit": (lambda: one_weight((5, 3), jax.jit(lambda w, x: jnp.tanh(x @ w))), [DENSE]),
    "NHWC SAME": (lambda: convolution(NHWC, (3, 3, 2, 4), window_strides=(1, 1), padding="SAME"), ["bias", CONV]),
    "NHWC strided": (lambda: convolution(NHWC, (3, 2, 2, 4), window_strides=(2, 3), padding="SAME"), ["bias", CONV]),
    "NCHW VALID": (lambda: convolution(NCHW, (4, 2, 3, 3), window_strides=(2, 1), padding="VALID"), ["bias", CONV]),
    "dilated": (
        lambda: convolution(
            NHWC,
            (3, 2, 2, 4),
            window_strides=(1, 2),
            padding=[(2, 1), (-1, 3)],
            lhs_dilation=(2, 1),
            rhs_dilation=(2, 3),
        ),
        ["bias", CONV],
    ),
    "groups": (
        lambda: convolution(NHWC, (3, 3, 1, 4), window_strides=(1, 1), padding="SAME", feature_group_count=2),
        ["bias", CONV],
    ),
    "a group for each channel": (
        lambda: convolution(NCHW, (4, 1, 3, 2), window_strides=(2, 1), padding="SAME", feature_group_count=2),
        ["bias", CONV],
    ),
    "linen MLP": (lambda: linen(Perceptron(), 5), ["bias", DENSE, "bias", DENSE, "bias", "scale"]),
    "linen CNN": (lambda: linen(Convolutional(), 12, 12, 2), ["bias", CONV, "bias", CONV, "bias", DENSE]),
    "nnx MLP": (nnx_mlp, ["bias", DENSE] * 2),
    "equinox MLP": (equinox_mlp, [DENSE, "bias"] * 3),
    "attention": (attention, [DENSE] * 4),
    "layer norm": (
        lambda: (layer_norm, {"w": draw(5, 4), "gain": draw(4), "bias": draw(4)}, draw(BATCH, 5)),
        ["bias", "scale", DENSE],
    ),
    "tied": (lambda: one_weight((5, 5), lambda w, x: w.T @ jnp.tanh(w @ x)), ["shared"]),
    "used twice": (lambda: one_weight((5, 5), lambda w, x: w @ jnp.tanh(w @ x)), ["shared"]),
    "used five times": (lambda: one_weight((5, 5), used_five_times), ["shared"]),
    "product and convolution": (
        lambda: one_weight((3, 4), lambda w, x: jnp.convolve(jnp.tanh(w @ x[:4]), w.reshape(-1)[:12])),
        [EACH],
    ),
    "weight decay inside": (lambda: one_weight((5, 3), lambda w, x: jnp.append(x @ w, jnp.sum(w**2))), [EACH]),
    "scan": (
        lambda: (recurrent, {"w": draw(4, 4), "u": draw(4, 3), "v": draw(2, 4)}, draw(BATCH, 6, 3)),
        [DENSE, DENSE, DENSE],
    ),
    "scan over layers": (lambda: layers(scan_over_layers), ["bias", DENSE]),
    "layers in reverse, checkpointed": (
        lambda: layers(partial(scan_over_layers, reverse=True, each=jax.checkpoint)),
        ["bias", DENSE],
    ),
    "layers over time": (lambda: layers(layers_over_time, (4, 3)), ["bias", DENSE]),
    "layers one by one": (lambda: layers(layers_one_by_one), ["bias", DENSE]),
    "layers split": (lambda: layers(layers_split), ["bias", DENSE]),
    "layers by a loop's index": (lambda: layers(layers_by_index), [EACH, EACH]),
    "weights carried along": (lambda: layers(weights_carried), [EACH, DENSE]),
    "weights that a loop changes": (lambda: layers(weights_changed), ["bias", EACH]),
    "lookup": (lambda: one_weight((6, 4), lambda w, i: w[i], jnp.arange(BATCH) % 4), ["lookup"]),
    "lookup of a sequence": (lambda: one_weight((6, 4), lambda w, i: w[i], tokens(5)), ["lookup"]),
    "lookup of a long sequence": (lambda: one_weight((6, 4), lambda w, i: w[i], tokens(150)), ["lookup"]),
    "lookup outside the table": (
        lambda: one_weight((6, 4), lambda w, i: jnp.nan_to_num(jnp.take(w, i, axis=0)), 2 * tokens(5)),
        ["lookup"],
    ),
    "lookup, clipped": (
        lambda: one_weight((6, 4), lambda w, i: jnp.take(w, i, axis=0, mode="clip"), 2 * tokens(5)),
        ["lookup"],
    ),
    "lookup of columns": (lambda: one_weight((4, 6), lambda w, i: jnp.take(w, i, axis=1), tokens(5)), ["lookup"]),
    "lookup of pairs": (lambda: one_weight((6, 6, 2), lambda w, i: w[i, i[::-1]], tokens(5)), ["lookup"]),
    "lookup of a column of each row": (
        lambda: one_weight((5, 6), lambda w, i: jnp.take_along_axis(w, i[:, None], axis=1), tokens(5)),
        [EACH],
    ),
    "lookup of slices": (
        lambda: one_weight((9, 4), lambda w, i: jax.lax.dynamic_slice(w, (i[0], 0), (3, 4)), tokens(5)),
        [EACH],
    ),
    "lookup, mapped": (lambda: one_weight((6, 4), lambda w, i: jax.vmap(lambda j: w[j])(i), tokens(5)), ["lookup"]),
    "lookup in a loop": (lambda: one_weight((6, 4), lookup_in_loop, tokens(5)), ["shared"]),
    "tied to a lookup": (lambda: one_weight((6, 4), lambda w, i: jnp.tanh(w[i]) @ w.T, tokens(5)), ["shared"]),
    "one-hot": (lambda: one_weight((6, 4), lambda w, i: jax.nn.one_hot(i, 6) @ w, tokens(5)), [DENSE]),
    "unused": (
        lambda: (lambda t, x: jnp.sum((x @ t["w"]) ** 2), {"w": draw(5, 2), "z": draw(3)}, draw(BATCH, 5)),
        [DENSE, "unused"],
    ),
    "scalar": (lambda: one_weight((), lambda w, x: w * x), ["scale"]),
    "exponential": (lambda: one_weight((5,), lambda w, x: jnp.exp(w) * x), ["scale"]),
    "custom derivative": (lambda: one_weight((5,), lambda w, x: softplus(w) * x), ["scale"]),
    "custom derivative that mixes entries": (lambda: one_weight((5,), lambda w, x: mixed(w) * x), ["mixed"]),
    "custom derivative of a product": (lambda: one_weight((5, 3), custom_product), [EACH]),
    "branches": (lambda: one_weight((5, 3), branches), [EACH]),
    "either weight": (
        lambda: one_weight((2, 5, 3), lambda w, x: jnp.where(x[0] > 0, w[0], w[1]).T @ x),
        [EACH],
    ),
    "scaled": (lambda: one_weight((5, 3), lambda w, x: x @ (w.T * (1.5 + jnp.arange(3.0))[:, None]).T), [DENSE]),
    "function of each weight": (lambda: one_weight((5, 3), lambda w, x: x @ (w * jax.nn.sigmoid(w))), [DENSE]),
    "masked": (lambda: one_weight((5, 3), lambda w, x: x @ jnp.where(jnp.abs(w) > 0.5, w, 0.0)), [DENSE]),
    "weight and bias in one": (lambda: one_weight((6, 3), lambda w, x: x @ w[:-1] + w[-1]), ["several"]),
    "overlapping parts": (lambda: one_weight((6, 3), lambda w, x: x @ w[:-1] + x @ w[1:]), ["mixed"]),
    "joined": (
        lambda: (
            lambda t, x: jnp.sum(jnp.tanh(x @ jnp.concatenate(t, axis=1)) ** 2),
            [draw(5, 3), draw(5, 2)],
            draw(BATCH, 5),
        ),
        [DENSE, DENSE],
    ),
    "weight normalisation": (
        lambda: (
            lambda t, x: jnp.sum(jnp.tanh(x @ (t["g"] * t["v"] / jnp.linalg.norm(t["v"], axis=0)) + t["b"])),
            {"b": draw(3), "g": draw(3), "v": draw(5, 3)},
            draw(BATCH, 5),
        ),
        ["bias", "rescaled", "rescaled"],
    ),
    "normalised rows": (
        lambda: one_weight((3, 5), lambda w, x: (w / jnp.linalg.norm(w, axis=1, keepdims=True)) @ x),
        ["rescaled"],
    ),
    "norm of all": (lambda: one_weight((3, 5), lambda w, x: (w / jnp.sqrt(jnp.sum(w**2))) @ x), ["rescaled"]),
    "standardised": (
        lambda: one_weight((5, 3), lambda w, x: x @ ((w - w.mean(0)) / jnp.sqrt(w.var(0) + 0.1))),
        ["rescaled"],
    ),
    "normalised and used twice": (
        lambda: one_weight((5, 5), lambda w, x: (lambda v: v.T @ jnp.tanh(v @ x))(w / jnp.linalg.norm(w, axis=0))),
        ["rescaled"],
    ),
    "normalised over time": (
        lambda: one_weight((5, 3), lambda w, x: x @ (w / jnp.linalg.norm(w, axis=0)), draw(BATCH, 6, 5)),
        ["mixed"],
    ),
    "normalised kernel": (
        lambda: one_weight(
            (3, 2, 3, 2),
            lambda w, x: jax.lax.conv(
                x[None], w / jnp.sqrt(jnp.sum(w**2, axis=(1, 2, 3), keepdims=True)), (1, 1), "SAME"
            ),
            draw(BATCH, 2, 4, 3),
        ),
        ["mixed"],
    ),
    "product by its transpose": (lambda: one_weight((5, 2), lambda w, x: w @ w.T @ x + x @ (w @ w.T)), ["rescaled"]),
    "low rank": (
        lambda: (
            lambda t, x: jnp.sum(jnp.tanh(x @ (t["w"] + 0.5 * (t["a"] @ t["b"]))) ** 2),
            {"a": draw(5, 2), "b": draw(2, 3), "w": draw(5, 3)},
            draw(BATCH, 5),
        ),
        ["rescaled", "rescaled", DENSE],
    ),
    "one source of leaves of two kinds": (
        lambda: (
            lambda t, x: jnp.sum(jnp.tanh((t[0] * t[1]) * x) ** 2) + jnp.sum(jnp.sin(t[0] + x) * jnp.exp(t[0] * x[0])),
            [draw(5), draw(5, seed=1)],
            draw(BATCH, 5),
        ),
        [EACH, "scale"],
    ),
    "constant operand": (lambda: one_weight((3, 5), lambda w, x: (w @ draw(5)) * x[:3]), ["mixed"]),
    "product of weights": (
        lambda: (lambda t, x: jnp.sum(jnp.tanh(t[0] @ t[1] @ x)), [draw(3, 4), draw(4, 5)], draw(BATCH, 5)),
        ["rescaled", "rescaled"],
    ),
    "the leaf itself": (lambda: (lambda t, x: t, draw(), draw(BATCH, 2)), [EACH]),
}


@pytest.fixture
def budgets(monkeypatch):
    """The library's own limits, and then ones so small that everything is made in chunks."""

    def each():
        yield "whole"
        for name in ("BUDGET", "LIMIT"):
            monkeypatch.setattr(per_example_ops, name, 40)
        yield "in chunks"

    return each()


# Of the cases that follow, those by which every line of the arithmetic is entered.
OF_EVERY_KIND = (
    "groups",
    "tied",
    "weight decay inside",
    "layers split",
    "weights carried along",
    "lookup",
    "lookup of a long sequence",
    "lookup, clipped",
    "lookup of columns",
    "lookup of slices",
    "tied to a lookup",
    "unused",
    "custom derivative",
    "custom derivative that mixes entries",
    "custom derivative of a product",
    "overlapping parts",
    "joined",
    "weight normalisation",
    "normalised rows",
    "product by its transpose",
    "low rank",
    "product of weights",
    "the leaf itself",
    "x @ w",
    "tanh MLP",
)


@pytest.mark.sampled(*OF_EVERY_KIND)
@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_gradients(case, budgets):
    build, taken = CASES[case]
    function, theta, examples = build()
    weights = jnp.abs(draw(BATCH)).at[2].set(0.0)
    expected = naive(function, theta, examples, weights)
    for _ in budgets:
        moments = jax.jit(partial(second_moments, function))(theta, examples, weights)
        agree((moments.values, moments.gradient, moments.squares), expected)
        assert list(moments.ways.values()) == taken
        assert moments.ways == ways(function, theta, examples)
        assert set(moments.ways.values()) <= set(COSTS)


IN_SINGLE_PRECISION = ["tanh MLP", "groups", "tied", "used twice", "scan", "scan over layers", "lookup of a sequence"]
IN_SINGLE_PRECISION += [
    "lookup of a long sequence",
    "tied to a lookup",
    "scaled",
    "weight normalisation",
    "low rank",
    "standardised",
]


@pytest.mark.sampled(
    "used twice",
    "lookup of a sequence",
    "lookup of a long sequence",
    "tied to a lookup",
    "weight normalisation",
    "standardised",
)
@pytest.mark.as_users
@pytest.mark.parametrize("case", IN_SINGLE_PRECISION)
def test_single_precision_has_its_own_rounding_only(case, budgets):
    function, theta, examples = CASES[case][0]()
    single = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    narrow, inputs = jax.tree.map(single, (theta, examples))
    wide = jax.tree.map(lambda x: x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x, (narrow, inputs))
    weights = jnp.abs(draw(BATCH)).astype(jnp.float32)
    expected = naive(function, *wide, weights.astype(float))
    for _ in budgets:
        moments = jax.jit(partial(second_moments, function))(narrow, inputs, weights)
        assert {leaf.dtype for leaf in jax.tree.leaves((moments.gradient, moments.squares))} == {jnp.dtype("float32")}
        assert all(jnp.all(leaf >= 0) for leaf in jax.tree.leaves(moments.squares))
        agree((moments.values, moments.gradient, moments.squares), expected, 2e-5)


MAPPED = ["tanh MLP", "linen CNN", "over time", "heads over time", "tied", "layer norm", "scan over layers", "low rank"]


@pytest.mark.sampled("tied", "lookup of a long sequence", "scaled")
@pytest.mark.as_users
@pytest.mark.parametrize("case", [*MAPPED, "lookup of a sequence", "lookup of a long sequence", "scaled"])
def test_samples_of_theta_can_be_mapped_over(case, budgets):
    function, theta, examples = CASES[case][0]()
    many = jax.tree.map(lambda t: t + 0.1 * draw(3, *t.shape), theta)
    theirs = many_naive(function, many, examples, jnp.ones(BATCH))
    for _ in budgets:
        ours = jax.jit(jax.vmap(lambda t: second_moments(function, t, examples, jnp.ones(BATCH))))(many)
        agree((ours.values, ours.gradient, ours.squares), theirs)


OUTPUTS = {
    "x @ w": (lambda w, x: jnp.tanh(x) @ w, (5, 3), (5,)),
    "w @ x": (lambda w, x: jnp.tanh(w @ x), (3, 5), (5,)),
    "over time": (lambda w, x: jnp.tanh(x @ w), (5, 3), (6, 5)),
    "heads over time": (partial(jnp.einsum, "hde,thd->teh"), (2, 4, 3), (6, 2, 4)),
    "convolution": (lambda w, x: jax.lax.conv(x[None], w, (2, 1), "SAME"), (3, 2, 2, 3), (2, 6, 5)),
    "bias": (lambda w, x: jnp.tanh(x + w), (5,), (4, 5)),
    "tied": (lambda w, x: w.T @ jnp.tanh(w @ x), (4, 4), (4,)),
    "used twice": (lambda w, x: w @ jnp.tanh(w @ x), (4, 4), (4,)),
    "lookup": (lambda w, x: jnp.tanh(w[jnp.abs(10 * x).astype(int) % 3]), (3, 4), (5,)),
    "recurrent": (lambda w, x: jax.lax.scan(lambda h, e: (jnp.tanh(w @ h + e), h), jnp.ones(4), x)[1], (4, 4), (3, 4)),
    "layers": (lambda w, x: jax.lax.scan(lambda h, v: (jnp.tanh(v @ h), None), x, w)[0], (3, 4, 4), (4,)),
    "groups": (
        lambda w, x: jax.lax.conv_general_dilated(x[None], w, (1,), "SAME", feature_group_count=2),
        (4, 1, 3),
        (2, 5),
    ),
    "scaled": (lambda w, x: jnp.tanh((w * jnp.arange(1.0, 4.0)[:, None]) @ x), (3, 5), (5,)),
    "normalised": (lambda w, x: jnp.tanh((w / jnp.sum(w**2)) @ x), (3, 5), (5,)),
}


def three_columns(f, e):
    return jnp.stack([jnp.cos(f), jnp.sum(e) * f, jnp.ones_like(f)])


@partial(jax.jit, static_argnums=0)
def pulled(function, theta, examples):
    """Outputs, and the squares of what each example's columns are pulled back to."""

    def one(e):
        output, pull = jax.vjp(lambda t: function(t, e), theta)
        return output, jnp.sum(jax.vmap(lambda c: pull(c)[0])(three_columns(output, e)) ** 2, axis=0)

    return jax.vmap(one)(examples)


@pytest.mark.sampled("convolution", "tied", "layers", "groups", "normalised")
@pytest.mark.parametrize("case", OUTPUTS)
def test_pulled_squares_are_the_diagonal_of_the_sandwich(case, budgets):
    function, shape, of_one = OUTPUTS[case]
    theta, examples = draw(*shape), draw(BATCH, *of_one)
    expected, rows = pulled(function, theta, examples)
    for _ in budgets:
        outputs, squares = jax.jit(partial(pulled_squares, function, columns=three_columns))(theta, examples)
        agree((outputs, squares), (expected, np.sum(rows, axis=0)))


def test_generalized_gauss_newton_of_softmax():
    _, theta, examples = mlp(jnp.tanh)
    network = lambda t, e: jnp.tanh(jnp.tanh(e[0] @ t[0][0] + t[0][1]) @ t[1][0] + t[1][1]) @ t[2][0] + t[2][1]

    def columns(f, e):
        p = jax.nn.softmax(f)
        return (jnp.diag(jnp.sqrt(p)) - jnp.outer(p, jnp.sqrt(p))).T

    _, squares = jax.jit(partial(pulled_squares, network, columns=columns))(theta, examples)

    @jax.jit
    def expected(theta, examples):
        jacobian = jax.vmap(jax.jacrev(network), (None, 0))(theta, examples)
        hessian = jax.vmap(jax.hessian(cross_entropy))(jax.vmap(network, (None, 0))(theta, examples), examples[1])
        return jax.tree.map(lambda j: jnp.einsum("bk...,bkl,bl...->...", j, hessian, j), jacobian)

    agree(squares, expected(theta, examples), 1e-11)


@pytest.mark.extended
def test_factors_of_one_position_are_those_of_kfac(budgets):
    function, theta, (x, y) = mlp(jnp.tanh)
    weights = np.abs(draw(BATCH))
    expected = naive(function, theta, (x, y), weights)[:2]
    rows = jax.jit(jax.vmap(jax.grad(function), (None, 0)))(theta, (x, y))
    inputs = [np.asarray(x)]
    for weight, bias in theta[:-1]:
        inputs.append(np.tanh(inputs[-1] @ weight + bias))
    for _ in budgets:
        values, gradient, factors = jax.jit(partial(kronecker_factors, function))(theta, (x, y), weights)
        agree((values, gradient), expected)
        for a, (_, slope), (dense, bias) in zip(inputs, rows, factors, strict=True):
            outer = np.einsum("b,bo,bp->op", weights, slope, slope)  # a bias's gradient is the slope of the output
            agree(dense.inputs, np.einsum("b,bi,bj->ij", weights, a, a) / weights.sum())
            agree((dense.outputs, bias.outputs, bias.inputs), (outer, outer, np.ones((1, 1))))


def test_factors_of_a_convolution_average_the_slopes_over_positions():
    function, theta, x = convolution(NHWC, (3, 2, 2, 4), window_strides=(2, 2), padding="SAME")
    weights = jnp.abs(draw(BATCH))
    factor = jax.jit(partial(kronecker_factors, function))(theta, x, weights).factors["kernel"]
    patches = jax.lax.conv_general_dilated_patches(x, (3, 2), (2, 2), "SAME", dimension_numbers=NHWC)
    patches = patches.reshape(BATCH, 20, 2, 6).swapaxes(2, 3).reshape(BATCH, 20, 12)  # theirs are channels first
    nudged = lambda d, e: function(theta | {"bias": theta["bias"] + d}, e)
    slopes = jax.jit(jax.vmap(jax.grad(nudged), (None, 0)))(jnp.zeros((5, 4, 4)), x).reshape(BATCH, 20, 4)
    agree(factor.inputs, np.einsum("b,bti,btj->ij", weights, patches, patches) / weights.sum())
    agree(factor.outputs, np.einsum("b,bto,btp->op", weights, slopes, slopes) / 20)
    agree(factor.matrix(theta["kernel"]), theta["kernel"].reshape(12, 4))
    agree(factor.leaf(factor.matrix(theta["kernel"])), theta["kernel"])


@pytest.mark.parametrize("case", ["x @ w", "w @ x", "x @ w.T", "einsum", "reshaped", "scalar", "exponential"])
def test_one_example_of_one_position_is_factored_exactly(case):
    function, theta, x = CASES[case][0]()
    _, _, factor = jax.jit(partial(kronecker_factors, function))(theta, x[:1], jnp.full(1, 0.7))
    flat = np.asarray(factor.matrix(jax.jit(jax.grad(function))(theta, x[0]))).ravel()
    agree(np.kron(factor.inputs, factor.outputs), 0.7 * np.outer(flat, flat))
    agree(factor.leaf(factor.matrix(theta)), theta)


def test_factors_take_columns_as_the_squares_do():
    function = lambda w, x: jnp.tanh(x) @ w
    columns = lambda f, x: jnp.stack([jnp.cos(f), f**2])
    theta, x = draw(5, 3), draw(BATCH, 5)
    factors = jax.jit(lambda theta, x: kronecker_factors(function, theta, x, jnp.ones(BATCH), columns))
    outputs, _, factor = factors(theta, x)
    slopes = np.stack([np.cos(outputs), np.asarray(outputs) ** 2])
    agree(factor.outputs, np.einsum("rbo,rbp->op", slopes, slopes))


@pytest.mark.parametrize("case", ["tied", "scan", "lookup", "heads"])
def test_leaves_without_factors_are_named(case):
    function, theta, examples = CASES[case][0]()
    path = r"\['u'\]" if case == "scan" else ""
    with pytest.raises(ValueError, match=rf"theta{path}, of shape \(.*GaussNewton\(\)"):
        jax.eval_shape(lambda theta: kronecker_factors(function, theta, examples, jnp.ones(BATCH)), theta)


def test_the_loss_must_be_one_number():
    with pytest.raises(ValueError, match="pulled_squares"):
        second_moments(lambda t, x: t * x, jnp.ones(3), draw(BATCH, 3), jnp.ones(BATCH))
    with pytest.raises(ValueError, match="one array"):
        second_moments(lambda t, x: (t @ x, x), jnp.ones(3), draw(BATCH, 3), jnp.ones(BATCH))


@pytest.mark.extended
@pytest.mark.parametrize("outer", [jnp.float32, jnp.bfloat16])
def test_half_precision_inside_gives_single_precision_sums(outer):
    def loss(theta, e, inner=jnp.bfloat16):
        h = jnp.tanh(e.astype(inner) @ theta["w"].astype(inner) + theta["b"].astype(inner))
        return jnp.sum((h @ theta["v"].astype(inner)).astype(jnp.float32) ** 2)

    theta = jax.tree.map(lambda t: t.astype(outer), {"w": draw(5, 8), "b": draw(8), "v": draw(8, 2)})
    examples, weights = draw(BATCH, 5).astype(outer), jnp.ones(BATCH, jnp.float32)
    moments = jax.jit(partial(second_moments, loss))(theta, examples, weights)
    assert {leaf.dtype for leaf in jax.tree.leaves(moments.squares)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(moments.gradient)} == {jnp.dtype(outer)}
    assert moments.ways == {"['b']": "bias", "['v']": "product", "['w']": "product"}
    exact = jax.tree.map(lambda t: t.astype(float), theta)
    _, _, squares = naive(partial(loss, inner=float), exact, examples.astype(float), weights)
    agree(moments.squares, squares, 0.05)


def half_precision_cases():
    half = lambda x: x.astype(jnp.bfloat16)
    normalized = lambda v: v / jnp.sqrt(jnp.sum(v**2, axis=0))
    layers = lambda w, x: jax.lax.scan(lambda h, v: (jnp.tanh(v @ h), None), half(x), half(w))[0]
    return {
        "normalised in half precision": ((5, 3), lambda w, x: half(x) @ normalized(half(w)), "mixed"),
        "normalised in single precision": ((5, 3), lambda w, x: half(x) @ half(normalized(w)), "rescaled"),
        "scaled": ((5, 3), lambda w, x: half(x) @ (1.5 * half(w)), "mixed"),
        "tied": ((4, 5), lambda w, x: half(w).T @ jnp.tanh(half(w) @ half(x)), "shared"),
        "looked up": ((5, 3), lambda w, x: half(w)[jnp.abs(10 * x).astype(int) % 5], "lookup"),
        "layers": ((3, 5, 5), layers, "product"),
    }


@pytest.mark.parametrize("case", half_precision_cases())
def test_half_precision_inside_every_way(case):
    shape, apply, way = half_precision_cases()[case]
    loss = lambda w, x: jnp.sum(jnp.tanh(apply(w, x)).astype(jnp.float32) ** 2)
    theta, x = draw(*shape).astype(jnp.float32), draw(BATCH, 5).astype(jnp.float32)
    moments = jax.jit(partial(second_moments, loss))(theta, x, jnp.ones(BATCH, jnp.float32))
    assert moments.squares.dtype == jnp.float32
    assert list(moments.ways.values()) == [way]
    agree(moments.squares, naive(loss, theta, x, jnp.ones(BATCH, jnp.float32))[2], 0.03)


def test_the_function_is_traced_once():
    traces = []

    def loss(theta, e):
        traces.append(1)
        return jnp.sum(jnp.tanh(e @ theta))

    moments = jax.jit(partial(second_moments, loss))
    for seed in range(3):
        first = moments(draw(5, 3, seed=seed), draw(BATCH, 5), jnp.ones(BATCH))
    assert len(traces) == 1
    assert jax.jit(lambda m: m.squares)(first).shape == (5, 3)


@pytest.mark.parametrize("positions", [(), (4,)], ids=["one position", "four"])
def test_no_buffer_holds_every_gradient(positions):
    """B×P float32 numbers are 274 MB: one position takes 2% of that at most, a chunk of examples 10%."""
    sizes, batch = (784, 512, 256, 10), 128
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    theta = [(struct(i, o), struct(o)) for i, o in pairwise(sizes)]

    def loss(theta, e):
        h = e[0]
        for weight, bias in theta:
            h = jnp.tanh(h @ weight + bias)
        return cross_entropy(h.reshape(-1, 10).sum(0), e[1])

    examples = struct(batch, *positions, 784), jax.ShapeDtypeStruct((batch,), jnp.int32)
    program = jax.jit(partial(second_moments, loss)).lower(theta, examples, struct(batch)).compile()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(theta))
    assert program.memory_analysis().temp_size_in_bytes < 4 * batch * parameters / (10 if positions else 50)
