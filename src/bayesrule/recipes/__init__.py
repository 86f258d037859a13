"""The paper's algorithms, each by picking pieces."""

from .deep_learning import (
    adam,
    adamw,
    bayesbinn,
    dropout,
    ivon,
    oggn,
    ogn,
    rmsprop,
    sgd,
    slang,
    straight_through,
    vadam,
    voggn,
    vogn,
)
from .inference import conjugate, cvi, em, exponential_weights, laplace, ncvmp, svi, vmp
from .optimization import gradient_descent, multimodal, newton, von
from .table import Row, table

__all__ = [
    "Row",
    "adam",
    "adamw",
    "bayesbinn",
    "conjugate",
    "cvi",
    "dropout",
    "em",
    "exponential_weights",
    "gradient_descent",
    "ivon",
    "laplace",
    "multimodal",
    "ncvmp",
    "newton",
    "oggn",
    "ogn",
    "rmsprop",
    "sgd",
    "slang",
    "straight_through",
    "svi",
    "table",
    "vadam",
    "vmp",
    "voggn",
    "vogn",
    "von",
]
