"""Table 1 of the paper (`tab:summary`), printed from the algorithms themselves.

No cell is typed in: the posterior is the family's `label`, and each piece declares its own phrases of the column of
approximations (`Points.approximation`, `Start.approximation`, `Curvature.approximation`, `Steps.approximation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..rule.rule import Rule
from .deep_learning import adam, bayesbinn, dropout, ogn, sgd, straight_through, vogn
from .inference import conjugate, cvi, em, exponential_weights, laplace, ncvmp, svi, vmp
from .optimization import gradient_descent, multimodal, newton, von


@dataclass(frozen=True)
class Row:
    """One row of Table 1: an algorithm, and the two columns that are read off its pieces."""

    block: str
    """The part of the table: optimisation, deep learning, Bayesian inference or online learning."""
    name: str
    """The algorithm's name in the paper."""
    recipe: str
    """The name of the recipe in `bayesrule`."""
    section: str
    """The section of the paper."""
    rule: Rule | None
    """The algorithm itself; None if the library does not have it."""

    @property
    def available(self) -> bool:
        """Whether the library has it."""
        return self.rule is not None

    @property
    def posterior(self) -> str:
        """The family, as Table 1 names it."""
        return "" if self.rule is None else self.rule.family.label

    @property
    def approximations(self) -> str:
        """What the pieces do to the natural gradient: the phrases that each of them declares in `approximation`."""
        if self.rule is None:
            return ""
        rule = self.rule
        pieces = (rule.points, rule.family, rule.curvature, rule.steps)
        phrases = [phrase for piece in pieces for phrase in piece.approximation.split(", ") if phrase]
        return ", ".join(dict.fromkeys(phrases)) or rule.steps.full_step or "None"


_TABLE: tuple[tuple[str, str, str, str, Callable[[], Rule] | None], ...] = (
    ("Optimization", "Gradient descent", "gradient_descent", "1.3.1", lambda: gradient_descent(0.1)),
    ("Optimization", "Newton's method", "newton", "1.3.2", newton),
    ("Optimization", "Variational online Newton", "von", "3.1", von),
    ("Optimization", "Multimodal optimization", "multimodal", "3.2", multimodal),
    ("Deep learning", "SGD", "sgd", "4.1", lambda: sgd(0.1)),
    ("Deep learning", "RMSprop/Adam", "adam", "4.2", lambda: adam(1e-3)),
    ("Deep learning", "Dropout", "dropout", "4.3", lambda: dropout(0.1)),
    ("Deep learning", "STE", "straight_through", "4.5", lambda: straight_through(0.1)),
    ("Deep learning", "Online Gauss-Newton (OGN)", "ogn", "4.4", lambda: ogn(1e-2, decay=0.999, curvature=1.0)),
    ("Deep learning", "Variational OGN", "vogn", "4.4", lambda: vogn(1e-2, decay=0.999, curvature=1.0)),
    ("Deep learning", "BayesBiNN", "bayesbinn", "4.5", lambda: bayesbinn(1e-4)),
    ("Bayesian inference", "Conjugate Bayes", "conjugate", "5.1", conjugate),
    ("Bayesian inference", "Laplace's method", "laplace", "4.4", laplace),
    ("Bayesian inference", "Expectation-Maximization", "em", "5.2", em),
    ("Bayesian inference", "Stochastic VI (SVI)", "svi", "5.3", lambda: svi(0.5)),
    ("Bayesian inference", "Variational message passing (VMP)", "vmp", "5.3", vmp),
    ("Bayesian inference", "Non-conjugate VMP", "ncvmp", "5.3", ncvmp),
    ("Bayesian inference", "Non-conjugate VI", "cvi", "5.4", lambda: cvi(0.5)),
    ("Online learning", "Exponential weights", "exponential_weights", "5.4", lambda: exponential_weights(0.1)),
)


def table() -> Iterator[Row]:
    """The rows of the paper's Table 1 (`tab:summary`) in its order, with two more: `von` and `exponential_weights`.

    >>> [row.name for row in table() if row.available][:2]
    ['Gradient descent', "Newton's method"]
    """
    for block, name, recipe, section, make in _TABLE:
        yield Row(block, name, recipe, section, None if make is None else make())
