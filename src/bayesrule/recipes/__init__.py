"""The paper's algorithms, each by picking pieces."""

from .deep_learning import (
    adam,
    bayesbinn,
    dropout,
    ivon,
    oggn,
    ogn,
    rmsprop,
    sgd,
    slang,
    straight_through,
    voggn,
    vogn,
)
from .inference import conjugate, exponential_weights, laplace
from .optimization import gradient_descent, multimodal, newton, von
from .table import Row, table

__all__ = [
    "Row",
    "adam",
    "bayesbinn",
    "conjugate",
    "dropout",
    "exponential_weights",
    "gradient_descent",
    "ivon",
    "laplace",
    "multimodal",
    "newton",
    "oggn",
    "ogn",
    "rmsprop",
    "sgd",
    "slang",
    "straight_through",
    "table",
    "voggn",
    "vogn",
    "von",
]
