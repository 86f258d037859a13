"""What a piece needs of the other pieces: pairs of a condition and a message.

Every piece may declare `needs`. When a rule is built, and again when its state is made, each need's condition is
evaluated for all pieces together; the first that does not hold raises a ValueError with its message. This file is in
the layer of the lowest piece, so that families, points, curvature and guards alike can declare needs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..curvature.base import Curvature
    from ..families.base import Family
    from ..points.base import Points
    from .guards import Guard
    from .steps import Steps


@dataclasses.dataclass(frozen=True)
class Pieces:
    """All pieces of a rule, as the conditions of needs see them."""

    kind: type[Family]
    """The class of q; for a mixture, the class of its components."""
    structure: str | None
    """How the kind holds its precision ("none", "diagonal", "full", "factored", "kronecker"); None where it has no
    precision, or where only a member can tell."""
    points: Points
    curvature: Curvature
    steps: Steps
    guard: Guard
    member: Family | None = None
    """The q that a state is made from; None while the rule is built. A need that concerns it holds without it."""

    @property
    def name(self) -> str:
        """The name of the kind, for messages."""
        return self.kind.__name__

    @property
    def abstract(self) -> bool:
        """Whether the kind stands for many families (`ExponentialFamily`), so that only a member can be checked."""
        return inspect.isabstract(self.kind) or self.kind.is_mixture

    @property
    def plain_coordinates(self) -> bool:
        """Whether the steps are plain steps in λ: no natural momentum, neither the reverse nor the lazy form."""
        return not (self.steps.reverse or self.steps.lazy or self.steps.momentum is not None)


Condition = Callable[[Pieces], bool]
"""Whether a need is met."""
Message = str | Callable[[Pieces], str]
"""What is wrong, why it matters and what to do, if it is not."""
Need = tuple[Condition, Message]
"""One need of a piece: a condition on all pieces, and the message if it does not hold."""
