"""Small networks of many kinds with open data: what `architectures.py` trains.

A kind is data in three parts, a network for one example, and its loss. All data come with the packages that the
development environment has (scikit-learn's tables and digits, matplotlib's fonts, Python's own manual); a folder adds
images and tables of its own. Convolutions are products with patches, which are as fast in a loop as outside of one on a
CPU.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

Rows = tuple[np.ndarray, np.ndarray]


class Kind(NamedTuple):
    """A training problem.

    Attributes:
        train, validation, test: inputs and targets.
        init: `init(key)` gives the parameters.
        apply: `apply(params, x)` gives the outputs for one example.
        task: "classes", "characters", "numbers" (squared error) or "noise" (squared error with learnt noise).
        steps: how many steps a training takes.
        batch: how many examples a step sees.
        unit: what a unit of the target is in the user's units, for errors.
    """

    train: Rows
    validation: Rows
    test: Rows
    init: Callable[[Any], Any]
    apply: Callable[[Any, Any], Any]
    task: str
    steps: int
    batch: int = 128
    unit: float = 1.0


# Layers, as dictionaries of arrays.


def dense(key: Any, inputs: int, outputs: int, gain: float = 2.0) -> dict[str, Any]:
    """Weights N(0, gain/inputs) and zeros."""
    return {"w": jnp.sqrt(gain / inputs) * jax.random.normal(key, (inputs, outputs)), "b": jnp.zeros(outputs)}


def linear(layer: dict[str, Any], x: Any) -> Any:
    return x @ layer["w"] + layer["b"]


def normalization(width: int) -> dict[str, Any]:
    return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


def layer_norm(layer: dict[str, Any], x: Any) -> Any:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return layer["scale"] * centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) + layer["shift"]


def group_norm(layer: dict[str, Any], x: Any, groups: int = 4) -> Any:
    """Over the places of an image and the channels of a group."""
    grouped = x.reshape(*x.shape[:2], groups, -1)
    centred = grouped - jnp.mean(grouped, axis=(0, 1, 3), keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=(0, 1, 3), keepdims=True) + 1e-5)
    return layer["scale"] * normal.reshape(x.shape) + layer["shift"]


def patches(x: Any) -> Any:
    """The 3×3 surroundings of every place of an image with zeros around it."""
    height, width = x.shape[:2]
    padded = jnp.pad(x, ((1, 1), (1, 1), (0, 0)))
    return jnp.concatenate([padded[i : i + height, j : j + width] for i in range(3) for j in range(3)], axis=-1)


def pooled(x: Any) -> Any:
    """The largest of every 2×2 places."""
    height, width = (side // 2 for side in x.shape[:2])
    return jnp.max(x[: 2 * height, : 2 * width].reshape(height, 2, width, 2, -1), axis=(1, 3))


# Networks: pairs of init and apply.


def mlp(*sizes: int) -> tuple[Callable, Callable]:
    def init(key):
        keys = jax.random.split(key, len(sizes) - 1)
        gains = [2.0] * (len(sizes) - 2) + [1.0]
        return [dense(*parts) for parts in zip(keys, sizes[:-1], sizes[1:], gains, strict=True)]

    def apply(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(linear(layer, x))
        return linear(params[-1], x)

    return init, lambda params, x: apply(params, x.ravel())


def cnn(
    side: int, classes: int, channels: tuple[int, ...] = (16, 32), *, normalized: bool
) -> tuple[Callable, Callable]:
    places = (side >> len(channels)) ** 2

    def init(key):
        keys, before = jax.random.split(key, len(channels) + 1), (1, *channels)
        blocks = [
            {"convolution": dense(k, 9 * a, b)} | ({"norm": normalization(b)} if normalized else {})
            for k, a, b in zip(keys, before, channels, strict=False)
        ]
        return {"blocks": blocks, "head": dense(keys[-1], places * channels[-1], classes, 1.0)}

    def apply(params, x):
        x = x.reshape(side, side, 1)
        for block in params["blocks"]:
            x = linear(block["convolution"], patches(x))
            x = pooled(jax.nn.relu(group_norm(block["norm"], x) if normalized else x))
        return linear(params["head"], x.ravel())

    return init, apply


def gru(inputs: int, width: int, classes: int) -> tuple[Callable, Callable]:
    """Rows are read in turn; the last state gives the classes."""

    def init(key):
        keys = jax.random.split(key, 4)
        parts = {"gates": (inputs + width, 2 * width), "candidate": (inputs + width, width), "head": (width, classes)}
        return {name: dense(k, *size, 1.0) for k, (name, size) in zip(keys, parts.items(), strict=False)}

    def apply(params, x):
        def step(h, row):
            reset, update = jnp.split(jax.nn.sigmoid(linear(params["gates"], jnp.append(row, h))), 2)
            candidate = jnp.tanh(linear(params["candidate"], jnp.append(row, reset * h)))
            return update * h + (1 - update) * candidate, None

        return linear(params["head"], jax.lax.scan(step, jnp.zeros(width), x)[0])

    return init, apply


def bag_of_embeddings(words: int, width: int, classes: int) -> tuple[Callable, Callable]:
    def init(key):
        table, head = jax.random.split(key)
        return {"table": jax.random.normal(table, (words, width)), "head": dense(head, width, classes, 1.0)}

    return init, lambda params, x: linear(params["head"], jnp.mean(params["table"][x], axis=0))


def transformer(
    characters: int, length: int, width: int = 32, depth: int = 2, heads: int = 4
) -> tuple[Callable, Callable]:
    def init_block(key):
        keys = jax.random.split(key, 4)
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        block = {name: dense(k, *size, 1.0) for k, (name, size) in zip(keys, sizes.items(), strict=True)}
        return block | {"norm1": normalization(width), "norm2": normalization(width)}

    def init(key):
        keys = jax.random.split(key, depth + 3)
        return {
            "table": 0.1 * jax.random.normal(keys[0], (characters, width)),
            "places": 0.1 * jax.random.normal(keys[1], (length, width)),
            "blocks": [init_block(k) for k in keys[3:]],
            "norm": normalization(width),
            "head": dense(keys[2], width, characters, 1.0),
        }

    def attend(block, x):
        q, k, v = jnp.split(linear(block["qkv"], x).reshape(length, heads, -1), 3, axis=-1)
        scores = jnp.einsum("ihd,jhd->hij", q, k) / jnp.sqrt(width / heads)
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9))
        return linear(block["out"], jnp.einsum("hij,jhd->ihd", weights, v).reshape(length, width))

    def apply(params, text):
        x = params["table"][text] + params["places"]
        for block in params["blocks"]:
            x = x + attend(block, layer_norm(block["norm1"], x))
            x = x + linear(block["down"], jax.nn.gelu(linear(block["up"], layer_norm(block["norm2"], x))))
        return linear(params["head"], layer_norm(params["norm"], x))

    return init, apply


def deep(inputs: int, width: int, layers: int, outputs: int = 1) -> tuple[Callable, Callable]:
    """Narrow layers with LayerNorm, one after another, without connections around them."""

    def init(key):
        keys = jax.random.split(key, layers + 1)
        sizes = [inputs, *[width] * layers]
        hidden = [dense(k, a, b) | normalization(b) for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=False)]
        return [*hidden, dense(keys[-1], width, outputs, 1.0)]

    def apply(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(layer_norm(layer, linear(layer, x)))
        return linear(params[-1], x)

    return init, apply


def with_noise(network: tuple[Callable, Callable]) -> tuple[Callable, Callable]:
    """With log σ² as one more parameter and output."""
    init, apply = network
    return (
        lambda key: {"mean": init(key), "log_noise": jnp.zeros(1)},
        lambda params, x: jnp.append(apply(params["mean"], x), params["log_noise"]),
    )


# Data.


def divided(x: np.ndarray, y: np.ndarray, train: int, validation: int, test: int, seed: int = 0) -> list[Rows]:
    """So many rows of each part, at random."""
    order = np.random.default_rng(seed).permutation(len(y))
    ends = np.cumsum([train, validation, test])
    return [(x[rows], y[rows]) for rows in np.split(order[: ends[-1]], ends[:-1])]


@cache
def letters() -> Rows:
    """Capital letters of 18 fonts, turned, shifted and with noise: 16×16 pixels."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = [
        *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Oblique"),
        *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBol"),
        *(
            "STIXGeneralItalic",
            "STIXGeneralBolIta",
            "cmr10",
            "cmb10",
            "cmss10",
            "cmtt10",
            "cmti10",
            "DejaVuSerif-BoldItalic",
        ),
    ]
    random = np.random.default_rng(0)
    fonts = [[ImageFont.truetype(folder / f"{name}.ttf", size) for size in (22, 25, 28)] for name in names]
    x, y = [], random.integers(26, size=9000)
    for label in y:
        image = Image.new("L", (32, 32))
        font = fonts[random.integers(len(fonts))][random.integers(3)]
        place = tuple(16 + random.uniform(-1.5, 1.5, size=2))
        ImageDraw.Draw(image).text(place, string.ascii_uppercase[label], fill=255, font=font, anchor="mm")
        image = image.rotate(random.uniform(-12, 12)).resize((16, 16))
        x.append(np.asarray(image) / 255 + random.normal(0, 0.1, size=(16, 16)))
    return np.array(x, np.float32), y.astype(np.int32)


@cache
def manual() -> dict[str, str]:
    """The topics of Python's manual that `help()` shows, the longest first."""
    from pydoc_data.topics import topics

    return dict(sorted(topics.items(), key=lambda topic: (-len(topic[1]), topic[0])))


def characters(length: int = 64, examples: tuple[int, ...] = (6000, 500, 1000)) -> tuple[list[Rows], int]:
    """Pieces of the manual and the same pieces one place on; the parts are separate stretches of it."""
    text = "".join(manual().values())
    known = [character for character, count in Counter(text).most_common(79) if count > 20]
    codes = np.array([known.index(c) + 1 if c in known else 0 for c in text], np.int32)
    random, parts = np.random.default_rng(0), []
    ends = (np.cumsum([0.0, 0.8, 0.08, 0.12]) * (len(codes) - length - 1)).astype(int)
    for first, last, count in zip(ends[:-1], ends[1:], examples, strict=True):
        starts = random.integers(first, last - length - 1, size=count)[:, None]
        parts.append((codes[starts + np.arange(length)], codes[starts + 1 + np.arange(length)]))
    return parts, len(known) + 1


def passages(topics: int = 12, length: int = 16, vocabulary: int = 2000) -> tuple[list[Rows], int]:
    """Which topic of the manual are these sixteen words from? The parts are separate stretches of every topic."""
    words = [re.findall(r"[A-Za-z_]+", text.lower()) for text in list(manual().values())[:topics]]
    frequent = [word for word, _ in Counter(word for topic in words for word in topic).most_common(vocabulary - 1)]
    codes = {word: code for code, word in enumerate(frequent, 1)}
    parts: list[tuple[list, list]] = [([], []) for _ in range(3)]
    for label, topic in enumerate(words):
        coded = [codes.get(word, 0) for word in topic]
        for start in range(0, len(coded) - length + 1, length):
            block = start // (5 * length) % 10  # Blocks of five passages: seven are for training, one for validation.
            x, y = parts[0 if block < 7 else 1 if block == 7 else 2]
            x.append(coded[start : start + length])
            y.append(label)
    return [(np.array(x, np.int32), np.array(y, np.int32)) for x, y in parts], topics


def table(x: np.ndarray, y: np.ndarray, *, raw: bool = False, seed: int = 0) -> tuple[list[Rows], float]:
    """Three fifths of the rows train, a fifth validates and a fifth tests, standardised on the first; the y's unit."""
    n = len(y)
    parts = divided(x, y, n - 2 * (n // 5), n // 5, n // 5, seed)
    centre, scale = parts[0][0].mean(0), parts[0][0].std(0)
    middle, unit = (0.0, 1.0) if raw else (parts[0][1].mean(), float(parts[0][1].std()))
    prepared = [((a - centre) / np.where(scale > 0, scale, 1.0), (b - middle) / unit) for a, b in parts]
    return [(a.astype(np.float32), b.astype(np.float32)) for a, b in prepared], unit


# The kinds.


def of_images(data: Callable[[], Rows], parts: tuple[int, int, int], network: str, steps: int) -> Kind:
    x, y = data()
    side, classes = x.shape[1], int(y.max()) + 1
    init, apply = {
        "mlp": lambda: mlp(side * side, 128, classes),
        "cnn": lambda: cnn(side, classes, normalized=False),
        "cnn_norm": lambda: cnn(side, classes, normalized=True),
        "gru": lambda: gru(side, 48, classes),
    }[network]()
    return Kind(*divided(x, y, *parts), init, apply, "classes", steps)


def of_letters(network: str, steps: int) -> Kind:
    return of_images(letters, (4000, 1000, 4000), network, steps)


def of_characters() -> Kind:
    parts, known = characters()
    return Kind(*parts, *transformer(known, parts[0][0].shape[1]), "characters", 800, batch=32)


def of_passages() -> Kind:
    parts, topics = passages()
    return Kind(*parts, *bag_of_embeddings(2000, 32, topics), "classes", 1500)


def of_friedman() -> Kind:
    x, y = datasets.make_friedman1(3000, noise=1.0, random_state=0)
    parts, unit = table(x, y)
    return Kind(*parts, *deep(x.shape[1], 16, 8), "numbers", 3000, unit=unit)


def of_table(data: Callable[[], Rows], *, raw: bool = False, noise: bool = False, steps: int = 1000) -> Kind:
    x, y = data()
    parts, unit = table(x, y, raw=raw)
    network = mlp(x.shape[1], 50, 1)
    task = "noise" if noise else "numbers"
    return Kind(*parts, *(with_noise(network) if noise else network), task, steps, batch=32, unit=unit)


def diabetes() -> Rows:
    return datasets.load_diabetes(return_X_y=True)


KINDS: dict[str, Callable[[], Kind]] = {
    "mlp": lambda: of_letters("mlp", 2400),
    "cnn": lambda: of_letters("cnn", 1000),
    "cnn_norm": lambda: of_letters("cnn_norm", 1000),
    "gru": lambda: of_letters("gru", 1600),
    "transformer": of_characters,
    "embeddings": of_passages,
    "deep": of_friedman,
    "table": lambda: of_table(diabetes),
    "table_raw": lambda: of_table(diabetes, raw=True),
    "table_noise": lambda: of_table(diabetes, noise=True),
}


def kinds_in(folder: Path) -> dict[str, Callable[[], Kind]]:
    """Those for the images and tables in a folder: NAME/NAME.npz with X and y, images of three axes."""
    found: dict[str, Callable[[], Kind]] = {}
    for path in sorted(folder.glob("*/*.npz")):
        file = np.load(path)
        if path.stem != path.parent.name or not {"X", "y"} <= set(file) or file["X"].ndim not in {2, 3}:
            continue
        if file["X"].ndim == 3:
            read = lambda file=file: ((file["X"] / 255).astype(np.float32), file["y"].astype(np.int32))
            test = min(4000, len(file["y"]) // 4)
            parts = (min(10_000, len(file["y"]) - 2 * test), test, test)
            for network, steps in {"mlp": 1200, "cnn": 500, "cnn_norm": 500, "gru": 600}.items():
                found[f"{path.stem} {network}"] = lambda read=read, parts=parts, network=network, steps=steps: (
                    of_images(read, parts, network, steps)
                )
        elif path.stem.startswith("uci_"):
            read = lambda file=file: (file["X"].astype(float), file["y"].astype(float).ravel())
            found[path.stem] = lambda read=read: of_table(read, steps=2000)
            found[f"{path.stem} raw"] = lambda read=read: of_table(read, raw=True, steps=2000)
            found[f"{path.stem} noise"] = lambda read=read: of_table(read, noise=True, steps=2000)
    return found
