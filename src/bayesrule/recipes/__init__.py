"""The paper's algorithms, each by picking pieces."""

from .inference import conjugate, exponential_weights, laplace
from .optimization import gradient_descent, newton, von
from .table import Row, table

__all__ = ["Row", "conjugate", "exponential_weights", "gradient_descent", "laplace", "newton", "table", "von"]
